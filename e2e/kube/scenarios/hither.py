"""One HitherCluster, seen from outside."""

import json
from dataclasses import dataclass

from cluster.kubectl import Kubectl


@dataclass(frozen=True)
class Server:
    """A chunkserver as the manager shows it."""

    id: int
    zone: str
    state: str
    read_bytes: int
    copies: int


class HitherCluster:
    """A cluster by namespace and name; the scenarios' way to ask it."""

    def __init__(self, kubectl: Kubectl, namespace: str, name: str):
        self.kubectl = kubectl
        self.namespace = namespace
        self.name = name

    def storage_class(self, name: str) -> str:
        """What the operator calls a class of it in Kubernetes."""
        return f"{self.namespace}-{self.name}-{name}"

    def of(self, *arguments: object, stdin: str | None = None, check: bool = True) -> str:
        return self.kubectl("--namespace", self.namespace, *arguments, stdin=stdin, check=check)

    def get(self, *arguments: object) -> dict:
        return self.kubectl.json("--namespace", self.namespace, *arguments)

    def until_ready(self, seconds: int) -> None:
        self.of("wait", f"hithercluster/{self.name}", "--for=condition=Ready",
                f"--timeout={seconds}s")

    def pods(self, component: str) -> list[dict]:
        """Its pods of a component: manager, mds or chunkserver."""
        return self.get("pods", f"--selector=hither.dev/cluster={self.name},"
                                f"app.kubernetes.io/component={component}")["items"]

    def manager_node(self) -> str:
        """Node of the manager that `administer` asks."""
        return self.get("pod", f"{self.name}-manager-0")["spec"]["nodeName"]

    def administer(self, *words: object) -> dict | list:
        """`hither --json` beside a manager."""
        service = f"{self.name}-manager.{self.namespace}.svc:7650"
        text = self.of("exec", f"{self.name}-manager-0", "--",
                       "hither", "--cluster", service, "--json", *words)
        return json.loads(text)

    def servers(self) -> list[Server]:
        known = {s["id"]: s for s in self.administer("cs", "ls")}
        return [Server(s["id"], known[s["id"]]["zone"], known[s["id"]]["state"],
                       s["readBytes"], s["copies"])
                for s in self.administer("cs", "stat")]

    def read_by_zone(self) -> dict[str, int]:
        """Bytes that the chunkservers of each zone have given to readers."""
        return self.by_zone(lambda server: server.read_bytes)

    def copies_by_zone(self) -> dict[str, int]:
        """Copies of chunks that the chunkservers of each zone have."""
        return self.by_zone(lambda server: server.copies)

    def by_zone(self, what) -> dict[str, int]:
        sums: dict[str, int] = {}
        for server in self.servers():
            sums[server.zone] = sums.get(server.zone, 0) + what(server)
        return sums

    def is_missed(self, zone: str) -> bool:
        """The manager hears of no chunkserver of a zone."""
        known = self.administer("cs", "ls")
        return all(server["state"] != "up" for server in known if server["zone"] == zone)

    def conditions(self) -> dict[str, str]:
        status = self.get("hithercluster", self.name).get("status", {})
        return {c["type"]: c["status"] for c in status.get("conditions", [])}

    def is_whole(self) -> bool:
        """Every chunkserver is up and every copy is where it should be."""
        conditions = self.conditions()
        return conditions.get("Degraded") == "False" and conditions.get("Ready") == "True"
