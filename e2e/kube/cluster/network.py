"""The network between the machines: one bridge on the host, one link a machine."""

import json
from ipaddress import IPv4Network

from .layout import (
    BRIDGE,
    BRIDGE_ADDRESS,
    MACHINE_NETWORK,
    MACHINES,
    NODES,
    POD_NETWORK,
    Machine,
    State,
)
from .machine import RunningMachine
from .say import Failure, run


def conflicts(routes: list[dict]) -> list[str]:
    """The host's routes (as `ip -json route` prints them) that overlap with the cluster's."""
    found = []
    for route in routes:
        if route.get("dst", "default") == "default" or route.get("dev") == BRIDGE:
            continue
        network = IPv4Network(route["dst"], strict=False)
        if network.overlaps(MACHINE_NETWORK) or network.overlaps(POD_NETWORK):
            found.append(f"{network} on {route.get('dev', '?')}")
    return sorted(set(found))


def owner() -> str | None:
    """State directory of the cluster that has the bridge; None when there is no bridge."""
    links = json.loads(run("ip", "-json", "link", "show", "type", "bridge") or "[]")
    for link in links:
        if link.get("ifname") == BRIDGE:
            return link.get("ifalias", "(unknown)")
    return None


def check_free(state: State) -> None:
    """Refuses when the fixed addresses are somebody else's."""
    other = owner()
    if other is not None and other != str(state.root):
        raise Failure(
            f"another cluster is up, its state is in {other}: addresses are fixed, so one at a"
            f" time; HITHER_KUBE_STATE={other} make kube-down ends it"
        )
    taken = conflicts(json.loads(run("ip", "-json", "-4", "route", "show", "table", "all")))
    if taken:
        raise Failure(f"the cluster's fixed addresses are taken on this host: {', '.join(taken)}")


def ensure_bridge(state: State) -> None:
    if owner() is None:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "alias", state.root)
    run("ip", "address", "replace", f"{BRIDGE_ADDRESS}/{MACHINE_NETWORK.prefixlen}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for node in NODES:
        run("ip", "route", "replace", node.pod_network, "via", node.address, "dev", BRIDGE)


def connect(host: RunningMachine) -> None:
    """Gives a machine that just started its link, address and the way to the others' pods."""
    machine = host.machine
    run("ip", "link", "delete", machine.link, check=False)
    run("ip", "link", "add", machine.link, "type", "veth",
        "peer", "name", "eth0", "address", machine.mac, "netns", host.required_pid())
    run("ip", "link", "set", machine.link, "master", BRIDGE, "up")
    prefix = MACHINE_NETWORK.prefixlen
    host.run("ip", "address", "add", f"{machine.address}/{prefix}", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    host.run("ip", "route", "add", "default", "via", BRIDGE_ADDRESS)
    for node in NODES:
        if node != machine:
            host.run("ip", "route", "add", node.pod_network, "via", node.address)


def is_cut(machine: Machine) -> bool:
    links = json.loads(run("ip", "-json", "link", "show", machine.link, check=False) or "[{}]")
    return "UP" not in links[0].get("flags", [])


def cut(machine: Machine) -> None:
    run("ip", "link", "set", machine.link, "down")


def restore(machine: Machine) -> None:
    run("ip", "link", "set", machine.link, "up")


def remove() -> None:
    for machine in MACHINES:
        run("ip", "link", "delete", machine.link, check=False)
    run("ip", "link", "delete", BRIDGE, check=False)
