"""Names, addresses and paths of the cluster: all that is fixed. Nothing here acts."""

import os
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

BRIDGE = "hither-kube"
BRIDGE_ADDRESS = IPv4Address("10.99.0.1")
MACHINE_NETWORK = IPv4Network("10.99.0.0/24")
POD_NETWORK = IPv4Network("10.100.0.0/16")
SERVICE_NETWORK = IPv4Network("10.96.0.0/16")
API_SERVICE_ADDRESS = IPv4Address("10.96.0.1")
DNS_ADDRESS = IPv4Address("10.96.0.10")
API_PORT = 6443
REGION = "eu-1"
CGROUP = "hither-kube"
# Images that exist nowhere but in this cluster are named after a domain that cannot exist.
IMAGE_DOMAIN = "hither.test"


@dataclass(frozen=True)
class Machine:
    """One machine of the cluster; `number` decides its addresses."""

    name: str
    number: int
    letter: str = ""

    @property
    def address(self) -> IPv4Address:
        return MACHINE_NETWORK[self.number]

    @property
    def mac(self) -> str:
        """The same after every start, so that neighbours' caches stay right."""
        return "02:" + ":".join(f"{byte:02x}" for byte in self.address.packed) + ":01"

    @property
    def link(self) -> str:
        """Name of the host's end of the machine's only link."""
        return f"hk-{self.letter or self.name}"

    @property
    def is_node(self) -> bool:
        return bool(self.letter)

    @property
    def pod_network(self) -> IPv4Network:
        return list(POD_NETWORK.subnets(new_prefix=24))[self.number]

    @property
    def zone(self) -> str:
        return f"{REGION}{self.letter}"


CONTROL = Machine("control", 10)
NODES = tuple(Machine(f"node-{letter}", 11 + i, letter) for i, letter in enumerate("abc"))
MACHINES = (CONTROL, *NODES)
API_URL = f"https://{CONTROL.address}:{API_PORT}"


def find(word: str) -> Machine:
    """The machine a person means: its name, its letter or its zone."""
    for machine in MACHINES:
        if word == machine.name or (machine.is_node and word in (machine.letter, machine.zone)):
            return machine
    raise KeyError(word)


class State:
    """The one directory in which a running cluster keeps everything."""

    def __init__(self, root: Path):
        self.root = root
        self.kubeconfig = root / "kubeconfig"
        self.pki = root / "pki"
        self.log = root / "log"
        self.programs = root / "programs"

    @classmethod
    def chosen(cls) -> "State":
        return cls(Path(os.environ.get("HITHER_KUBE_STATE", "/var/tmp/hither-kube")).absolute())

    def machine(self, machine: Machine) -> Path:
        return self.root / "machines" / machine.name
