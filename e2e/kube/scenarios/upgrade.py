"""A new image comes in, pod by pod, while files are written and read."""

from cluster.layout import NODES
from cluster.machine import RunningMachine
from cluster.node import CTR
from cluster.say import wait_until

from .clusters import EtcdScenario
from .hither import HitherCluster
from .installation import NAMESPACE, RELEASE
from .load import Load
from .scenario import Scenario, expect

# Which pods are replaced in turn; those of one component one after the other.
ORDER = ("manager", "mds", "chunkserver")


class Upgrade(Scenario):
    """What the upgrades have in common: the image under another name, and the proof of order."""

    needs_own_cluster = True

    def next_image(self) -> str:
        """The same programs under another name, in every node."""
        name = self.there.image.rsplit(":", 1)[0] + f":{self.namespace}"
        for node in NODES:
            host = RunningMachine(self.there.state, node)
            host.run(*CTR, "images", "tag", "--force", self.there.image, name)
        return name

    def until_upgraded(self, cluster: HitherCluster, image: str) -> None:
        """Waits for the end, and looks on the way that no two chunkservers are away."""
        before = {pod["metadata"]["uid"] for part in ORDER for pod in cluster.pods(part)}
        wanted = len(cluster.pods("chunkserver"))

        def is_done() -> bool:
            servers = cluster.pods("chunkserver")
            away = wanted - sum(ready_at(pod) is not None for pod in servers)
            expect(away <= 1, f"at most one chunkserver away, not {away}")
            pods = [pod for part in ORDER for pod in cluster.pods(part)]
            return all(image_of(pod) == image and (ready_at(pod) or part_of(pod) == "mds")
                       for pod in pods)

        wait_until(f"all of {cluster.name} runs {image}", 240, is_done)
        pods = [pod for part in ORDER for pod in cluster.pods(part)]
        expect(not before & {pod["metadata"]["uid"] for pod in pods}, "every pod to be a new one")
        pods.sort(key=begun_at)
        parts = [part_of(pod) for pod in pods]
        expect(parts == sorted(parts, key=ORDER.index), f"{' then '.join(ORDER)}, not {parts}")
        for one, next_one in zip(pods, pods[1:]):
            ready = ready_at(one)
            if ready is not None:
                expect(ready <= begun_at(next_one),
                       f"{next_one['metadata']['name']} after {one['metadata']['name']} is ready")
        wait_until("nothing is left to upgrade", 60,
                   lambda: cluster.conditions().get("Upgrading") == "False")
        wait_until("all copies are there", 60, cluster.is_whole)


class RollingUpgrade(Upgrade):
    """helm upgrade to another image under load: one pod at a time, no error"""

    seconds = 420

    def heal(self) -> None:
        """After a failure half-way; otherwise all stays with the new image."""
        if self.there.image != self.chart_image():
            self.there.chart()
            self.until_upgraded(self.there.demo, self.there.image)

    def chart_image(self) -> str:
        operator = self.kubectl.json("--namespace", NAMESPACE, "deployment", f"{RELEASE}-operator")
        return operator["spec"]["template"]["spec"]["containers"][0]["image"]

    def run(self) -> None:
        pods = self.pods_in_zones()
        image = self.next_image()
        with Load(self, list(pods.values())) as load:
            load.until_more(1)
            self.there.chart(image)
            self.note(f"the chart is upgraded after {load.rounds}")
            self.until_upgraded(self.there.demo, image)
            self.there.image = image
            self.note(f"all runs the new image after {load.rounds}")
            load.until_more(2)
        for pod in pods.values():
            load.verify(pod)


class EtcdUpgrade(EtcdScenario, Upgrade):
    """a cluster on etcd gets another image under load: managers, metadata, then zone by zone"""

    seconds = 480

    def run(self) -> None:
        pods = self.pods_in_zones(self.until_ready())
        image = self.next_image()
        with Load(self, list(pods.values())) as load:
            load.until_more(1)
            self.guest.of("patch", "hithercluster", self.cluster_name, "--type=merge", "-p",
                          f'{{"spec":{{"image":"{image}"}}}}')
            self.until_upgraded(self.guest, image)
            self.note(f"all runs the new image after {load.rounds}")
            load.until_more(2)
        for pod in pods.values():
            load.verify(pod)


def part_of(pod: dict) -> str:
    return pod["metadata"]["labels"]["app.kubernetes.io/component"]


def image_of(pod: dict) -> str:
    return pod["spec"]["containers"][0]["image"]


def begun_at(pod: dict) -> str:
    return pod["metadata"]["creationTimestamp"]


def ready_at(pod: dict) -> str | None:
    """When the pod became ready; None while it is not, or is about to end."""
    if "deletionTimestamp" in pod["metadata"]:
        return None
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            return condition["lastTransitionTime"]
    return None
