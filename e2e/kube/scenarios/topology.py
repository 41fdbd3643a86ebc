"""Volumes that stay in a zone, for those who want that."""

from cluster.say import wait_until

from . import manifests
from .installation import CLUSTER, STORAGE_CLASS
from .scenario import Scenario, expect

PINNED = "pinned"
SWITCH = "csi.topology.enabled"


class PinnedToZone(Scenario):
    """with topology a class may keep volumes in their first pod's zone; others go anywhere"""

    seconds = 300

    def clean(self) -> None:
        super().clean()
        self.there.of("delete", "chunkstorageclass", PINNED, "--ignore-not-found",
                      "--timeout=120s")
        if self.topology_keys():
            self.there.chart()
            wait_until("no node offers its zone", 60, lambda: not self.topology_keys())

    def run(self) -> None:
        self.there.of("apply", "-f", "-", stdin=pinned_class())
        self.there.of("wait", f"csc/{PINNED}", "--for=condition=Ready", "--timeout=60s")
        pinned = self.there.demo.storage_class(PINNED)
        self.apply(manifests.together(manifests.claim("refused", pinned),
                                      manifests.pod("refused", self.there.busybox, "refused")))
        wait_until("without topology it is refused, with the reason", 60,
                   lambda: SWITCH in self.of("events", "--for=pvc/refused"))
        self.of("delete", "pod/refused", "pvc/refused", "--timeout=60s")

        self.there.chart(**{SWITCH: "true"})
        wait_until("every node offers its zone", 60,
                   lambda: len(self.topology_keys()) == len(self.there.zones()))
        zone, other = sorted(self.there.zones().values())[1:]
        self.apply(manifests.claim("data", pinned))
        expect(self.get("pvc", "data")["status"]["phase"] == "Pending", "a claim without a pod")
        self.apply(manifests.movable("first", self.there.busybox, "data", zone))
        self.of("rollout", "status", "deployment/first", "--timeout=90s")
        volume = self.kubectl.json("pv", self.get("pvc", "data")["spec"]["volumeName"])
        expect(self.zones_of(volume) == [zone], f"a volume of {zone}: {self.zones_of(volume)}")
        # Another pod, which would rather be elsewhere, comes to the volume.
        self.apply(manifests.movable("second", self.there.busybox, "data", other))
        self.of("rollout", "status", "deployment/second", "--timeout=90s")
        pod = self.get("pods", "--selector=app=second")["items"][0]
        expect(self.there.zones()[pod["spec"]["nodeName"]] == zone, f"the second pod in {zone}")

        self.of("delete", "deployment", "first", "second", "--wait=true")
        self.of("wait", "pods", "--all", "--for=delete", "--timeout=60s")
        self.of("delete", "pvc", "data", "--wait=true", "--timeout=60s")
        self.pods_in_zones(STORAGE_CLASS)
        volume = self.kubectl.json("pv", self.get("pvc", "data")["spec"]["volumeName"])
        expect("nodeAffinity" not in volume["spec"], "no pinning of a class that does not ask")

    def topology_keys(self) -> list[str]:
        """The zones' key, once for each node that offers it."""
        drivers = [driver for node in self.kubectl.json("csinodes")["items"]
                   for driver in node["spec"].get("drivers") or []]
        return [key for driver in drivers if driver["name"] == "csi.hither.dev"
                for key in driver.get("topologyKeys") or [] if key == manifests.ZONE]

    def zones_of(self, volume: dict) -> list[str]:
        terms = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        return [value for term in terms for one in term["matchExpressions"]
                if one["key"] == manifests.ZONE for value in one["values"]]


def pinned_class() -> str:
    return f"""\
apiVersion: hither.dev/v1alpha1
kind: ChunkStorageClass
metadata: {{name: {PINNED}}}
spec:
  cluster: {CLUSTER}
  keep: "2"
  volumes: {{pinToZone: true, binding: WaitForFirstConsumer}}
"""
