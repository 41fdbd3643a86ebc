"""Every zone reads its own copy; a lost zone stops nobody."""

from cluster import network
from cluster.layout import NODES
from cluster.say import Failure, wait_until

from .load import Load
from .scenario import Scenario, checksum, expect

MEBIBYTE = 1 << 20


class OwnZone(Scenario):
    """three pods over three zones write and read one volume, each from its own zone's servers"""

    def run(self) -> None:
        pods = self.pods_in_zones()
        sums = {}
        for zone, pod in pods.items():
            self.sh(pod, f"dd if=/dev/urandom of=/data/{zone} bs=1M count=24 && sync")
            sums[zone] = checksum(self.sh(pod, f"sha256sum /data/{zone}"))
        before = self.there.demo.read_by_zone()
        for zone, pod in pods.items():
            # Each file once from a zone that has not written it, so that no page cache helps.
            others = [other for other in pods if other != zone]
            for other in others:
                seen = checksum(self.sh(pod, f"sha256sum /data/{other}"))
                expect(seen == sums[other], f"{pod} reads what {pods[other]} wrote")
        after = self.there.demo.read_by_zone()
        read = {zone: after[zone] - before[zone] for zone in pods}
        for zone in pods:
            self.note(f"{zone}: its pod read 48 MiB, its chunkservers gave {read[zone] >> 20} MiB")
        expect(all(46 * MEBIBYTE <= given <= 60 * MEBIBYTE for given in read.values()),
               f"the servers of each zone to serve their own pod, and nobody else: {read}")


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
