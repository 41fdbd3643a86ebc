"""Routes that overlap with the cluster's fixed addresses are told from those that do not."""

import unittest

from cluster.layout import BRIDGE
from cluster.network import conflicts


class Conflicts(unittest.TestCase):
    def test_other_networks_and_the_default_are_no_conflict(self):
        routes = [{"dst": "default", "dev": "eth0"}, {"dst": "192.0.2.0/24", "dev": "eth0"},
                  {"dst": "10.98.0.0/16", "dev": "eth1"}, {"type": "local", "dst": "127.0.0.1"}]
        self.assertEqual(conflicts(routes), [])

    def test_the_cluster_is_no_conflict_with_itself(self):
        self.assertEqual(conflicts([{"dst": "10.99.0.0/24", "dev": BRIDGE}]), [])

    def test_overlaps_are_named_once_with_their_device(self):
        routes = [{"dst": "10.0.0.0/8", "dev": "vpn0"}, {"dst": "10.100.3.7", "dev": "eth0"},
                  {"dst": "10.100.3.7", "dev": "eth0"}]
        self.assertEqual(conflicts(routes), ["10.0.0.0/8 on vpn0", "10.100.3.7/32 on eth0"])
