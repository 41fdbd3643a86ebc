"""What administrators do to nodes."""

from cluster.say import Failure, wait_until

from . import manifests
from .installation import NAMESPACE
from .load import Load
from .scenario import Scenario, expect


class Drain(Scenario):
    """two nodes are drained, one after the other: pods move, reads elsewhere go on"""

    seconds = 420

    def heal(self) -> None:
        for node in self.there.zones():
            self.kubectl("uncordon", node)

    def run(self) -> None:
        pods = self.pods_in_zones()
        zones = self.there.zones()
        # With the embedded store the node of the one manager cannot be done without.
        staying = self.there.demo.manager_node()
        first, second = sorted(node for node in zones if node != staying)
        self.apply(manifests.movable("mover", self.there.busybox, "data", zones[first]))
        self.of("rollout", "status", "deployment/mover", "--timeout=90s")
        before, node = self.mover()
        expect(node == first, f"the pod on {first}, not on {node}")
        self.sh(before, "echo moved >/data/kept && sync /data/kept")
        with Load(self, [pods[zones[second]], pods[zones[staying]]]) as load:
            load.until_more(1)
            self.drain(first, 150)
            self.note(f"{first} is drained")
            load.until_more(3)
            expect(not self.chunkservers_on(first), f"no chunkserver on {first}")
            self.of("rollout", "status", "deployment/mover", "--timeout=90s")
            after, node = self.mover()
            expect(node != first, f"the pod elsewhere than on {first}")
            expect(self.sh(after, "cat /data/kept").strip() == "moved", "its file")
            self.refused(second)
            load.until_more(1)
            self.kubectl("uncordon", first)
        with Load(self, [pods[zones[staying]]]) as load:
            # Goes on by itself once the first node's copies have caught up.
            self.drain(second, 150)
            self.note(f"{second} is drained")
            expect(self.chunkservers_on(first), f"the chunkserver back on {first}")
            load.until_more(3)
            self.kubectl("uncordon", second)
        self.of("rollout", "status", "statefulset/pods", "--timeout=120s")
        for pod in pods.values():
            load.verify(pod)
        wait_until("all copies have caught up", 120, self.there.demo.is_whole)

    def drain(self, node: str, seconds: int, *more: str) -> None:
        self.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
                     f"--timeout={seconds}s", *more)

    def refused(self, node: str) -> None:
        """A second chunkserver is not given away while copies of the first are missing."""
        running = self.chunkservers_on(node)
        try:
            self.drain(node, 12, "--pod-selector=app.kubernetes.io/component=chunkserver")
        except Failure as failure:
            expect("disruption budget" in str(failure), f"a budget's refusal: {failure}")
        else:
            raise Failure(f"the chunkserver of {node} was evicted while another was away")
        expect(self.chunkservers_on(node) == running, f"{running} to run on")
        self.kubectl("uncordon", node)

    def chunkservers_on(self, node: str) -> list[str]:
        """Uids: a pod of the same name is another after an eviction."""
        found = self.kubectl.json("--namespace", NAMESPACE, "pods",
                                  "--selector=app.kubernetes.io/component=chunkserver",
                                  f"--field-selector=spec.nodeName={node}")["items"]
        return [pod["metadata"]["uid"] for pod in found]

    def mover(self) -> tuple[str, str]:
        """Name and node of the Deployment's pod."""
        found = self.get("pods", "--selector=app=mover")["items"]
        running = [p for p in found if "deletionTimestamp" not in p["metadata"]]
        expect(len(running) == 1, "one pod of the Deployment")
        return running[0]["metadata"]["name"], running[0]["spec"]["nodeName"]


class ZoneRelabelled(Scenario):
    """a node's zone label changes: its mounts read from the other zone at once, and back"""

    seconds = 240
    moved: tuple[str, str] | None = None

    def heal(self) -> None:
        if self.moved is not None:
            self.label(*self.moved)

    def label(self, node: str, zone: str) -> None:
        self.kubectl("label", "node", node, f"{manifests.ZONE}={zone}", "--overwrite")

    def run(self) -> None:
        pods = self.pods_in_zones()
        home, other, third = sorted(pods)
        pod = pods[home]
        node = self.node_of(pod)
        mount = self.mount_of(pod)
        expect(self.served_by(pod, pods[third]) == home, f"reads from {home} at first")
        self.moved = (node, home)
        with Load(self, [pod]) as load:
            self.label(node, other)
            wait_until(f"reads come from {other}", 60,
                       lambda: self.served_by(pod, pods[third]) == other)
            load.until_more(1)
            self.label(node, home)
            wait_until(f"reads come from {home} again", 60,
                       lambda: self.served_by(pod, pods[third]) == home)
        expect(self.mount_of(pod) == mount, f"the same mount: {mount}")
