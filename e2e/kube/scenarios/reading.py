"""Every zone reads its own copy; a lost zone stops nobody."""

from cluster import network
from cluster.layout import NODES
from cluster.say import Failure, wait_until

from .load import Load
from .scenario import Scenario, checksum, expect

MEBIBYTE = 1 << 20
# Size of a pod's file, in MiB.
SIZE = 8
DETOURS = ("failovers", "hedges", "spills", "suspicions")


class OwnZone(Scenario):
    """three pods over three zones write and read one volume, each from its own zone's servers"""

    def run(self) -> None:
        pods = self.pods_in_zones()
        # A read goes elsewhere when its server is slow, which the mount counts: then once more.
        for _ in range(5):
            before, given_before = self.counted(pods), self.there.demo.read_by_zone()
            self.read_of_others(pods)
            after, given_after = self.counted(pods), self.there.demo.read_by_zone()
            detours = 0
            for zone, pod in pods.items():
                mount = {what: count - before[zone][what] for what, count in after[zone].items()}
                given = given_after[zone] - given_before[zone]
                self.note(f"{zone}: {pod} read {2 * SIZE} MiB: by its mount's count {shown(mount)};"
                          f" the zone's chunkservers gave {given >> 20} MiB")
                detours += mount["detours"]
                near = mount["near"]
                if mount["detours"] == 0:
                    expect(near >= 2 * SIZE * MEBIBYTE and mount["far"] == 0,
                           f"{zone}: all from its own zone, as no server was slow")
                    expect(given >= near, f"{zone}: the same by its chunkservers' count")
            if detours == 0:
                return
        raise Failure("slow servers in each of five rounds: nothing is known of preference")

    def read_of_others(self, pods: dict[str, str]) -> None:
        """Every pod writes a file and reads those of the others."""
        sums = {}
        for zone, pod in pods.items():
            file = f"/data/{zone}"
            self.sh(pod, f"rm -f {file}; dd if=/dev/urandom of={file} bs=1M count={SIZE} && sync")
            sums[zone] = checksum(self.sh(pod, f"sha256sum {file}"))
        for zone, pod in pods.items():
            # Files that its node has not written, so that no page cache helps.
            for other in pods:
                if other != zone:
                    seen = checksum(self.sh(pod, f"sha256sum /data/{other}"))
                    expect(seen == sums[other], f"{pod} reads what {pods[other]} wrote")

    def counted(self, pods: dict[str, str]) -> dict[str, dict[str, int]]:
        """By zone, what its pod's mount has read near and far, and how often not as preferred."""
        found = {}
        for zone, pod in pods.items():
            counters = self.counters_of(pod)
            read = {where: traffic["readBytes"]
                    for where, traffic in counters["byLocality"].items()}
            near = sum(read.pop(where, 0) for where in ("node", "zone"))
            found[zone] = {"near": near, "far": sum(read.values()),
                           "detours": sum(counters[what] for what in DETOURS)}
        return found


def shown(counted: dict[str, int]) -> str:
    return (f"{counted['near'] >> 20} near, {counted['far'] >> 20} far,"
            f" {counted['detours']} reads not as preferred")


class ZoneLoss(Scenario):
    """a zone is cut off during verified reads and writes: pods elsewhere see no error"""

    seconds = 240
    needs_own_cluster = True

    def heal(self) -> None:
        if self.there.own:
            for node in NODES:
                network.restore(node)

    def run(self) -> None:
        pods = self.pods_in_zones()
        # With the embedded store the zone of the one manager is not one to lose.
        lost = next(node for node in NODES if node.name != self.there.demo.manager_node())
        staying = {zone: pod for zone, pod in pods.items() if zone != lost.zone}
        with Load(self, list(staying.values())) as load:
            load.until_more(2)
            network.cut(lost)
            self.note(f"{lost.zone} is cut off after {load.rounds}")
            wait_until("its chunkserver is missed", 60, lambda: self.there.demo.is_missed(lost.zone))
            load.until_more(6)
            network.restore(lost)
            self.note(f"{lost.zone} is back after {load.rounds}")
            load.until_more(2)
        self.kubectl.wait(f"node/{lost.name}", "condition=Ready", 90)
        back = pods[lost.zone]
        wait_until(f"{back} is reached again", 60, lambda: self.answers(back))
        load.verify(back)
        wait_until("its copies have caught up", 120, self.there.demo.is_whole)

    def answers(self, pod: str) -> bool:
        try:
            return self.sh(pod, "ls /data >/dev/null && echo yes").strip() == "yes"
        except Failure:
            return False
