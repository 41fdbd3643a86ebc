"""Addresses and names do not collide and can be found again."""

import unittest

from cluster.layout import (
    CONTROL,
    MACHINE_NETWORK,
    MACHINES,
    NODES,
    POD_NETWORK,
    SERVICE_NETWORK,
    find,
)


class Layout(unittest.TestCase):
    def test_everything_is_distinct(self):
        for of in ("name", "address", "mac", "link"):
            values = [getattr(machine, of) for machine in MACHINES]
            self.assertEqual(len(set(values)), len(MACHINES), of)
        self.assertEqual(len({node.zone for node in NODES}), 3)
        self.assertEqual(len({node.pod_network for node in NODES}), 3)

    def test_networks_contain_their_own_and_do_not_overlap(self):
        for machine in MACHINES:
            self.assertIn(machine.address, MACHINE_NETWORK)
        for node in NODES:
            self.assertTrue(node.pod_network.subnet_of(POD_NETWORK))
        self.assertFalse(MACHINE_NETWORK.overlaps(POD_NETWORK))
        self.assertFalse(SERVICE_NETWORK.overlaps(POD_NETWORK))

    def test_interface_names_fit_the_kernel(self):
        for machine in MACHINES:
            self.assertLess(len(machine.link), 16)

    def test_a_node_is_found_by_name_letter_and_zone(self):
        for word in ("node-b", "b", "eu-1b"):
            self.assertEqual(find(word), NODES[1])
        self.assertEqual(find("control"), CONTROL)
        for word in ("", "d", "node"):
            with self.assertRaises(KeyError):
                find(word)
