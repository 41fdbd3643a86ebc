"""A volume comes to another class while it is used."""

from cluster.say import wait_until

from . import manifests
from .installation import CLUSTER, STORAGE_CLASS
from .load import Load
from .scenario import Scenario, expect

TOWARDS = "towards"


class ClassChange(Scenario):
    """a claim is given other VolumeAttributesClasses: its mounts and new files follow, in use"""

    seconds = 300

    def clean(self) -> None:
        super().clean()
        # After the volume: a class is kept while files have it.
        self.there.of("delete", "chunkstorageclass", TOWARDS, "--ignore-not-found",
                      "--timeout=120s")
        self.kubectl("delete", "volumeattributesclass", self.wrong, "--ignore-not-found",
                     "--timeout=30s")

    @property
    def wrong(self) -> str:
        return f"{self.namespace}-wrong"

    def run(self) -> None:
        wait_until("no other scenario's copies are left", 120,
                   lambda: sum(self.there.demo.copies_by_zone().values()) == 0)
        pods = self.pods_in_zones()
        home, other, third = sorted(pods)
        pod, writer = pods[home], pods[third]
        named = self.there.demo.storage_class(TOWARDS)
        self.there.of("apply", "-f", "-", stdin=two_copies(home, other))
        self.there.of("wait", f"csc/{TOWARDS}", "--for=condition=Ready", "--timeout=60s")
        wait_until("the operator has made a VolumeAttributesClass", 30,
                   lambda: self.there.has("volumeattributesclass", named))
        mount = self.mount_of(pod)
        expect(self.served_by(pod, writer) == home, f"reads from {home} at first")
        with Load(self, [pod]) as load:
            self.change(named)
            wait_until(f"reads come from {other}", 75,
                       lambda: self.served_by(pod, writer) == other)
            load.until_more(1)
        before = self.there.demo.copies_by_zone()
        # More than may go meanwhile, of the files that the load has written over.
        self.sh(writer, "for n in $(seq 20); do echo $n >/data/new-$n; done; sync")
        grown = {zone for zone, copies in self.there.demo.copies_by_zone().items() if copies > before[zone]}
        expect(grown == {home, other}, f"new files in {home} and {other}, not in {grown}")
        self.refuse()
        self.change(STORAGE_CLASS)
        wait_until(f"reads come from {home} again", 75,
                   lambda: self.served_by(pod, writer) == home)
        expect(self.mount_of(pod) == mount, f"the same mount: {mount}")

    def ask(self, name: str) -> None:
        self.of("patch", "pvc", "data", "--type=merge", "-p",
                f'{{"spec":{{"volumeAttributesClassName":"{name}"}}}}')

    def change(self, name: str) -> None:
        self.ask(name)
        self.of("wait", "pvc/data", "--timeout=90s",
                f"--for=jsonpath={{.status.currentVolumeAttributesClassName}}={name}")

    def refuse(self) -> None:
        """What cannot be is said, and nothing changes."""
        self.kubectl("apply", "-f", "-",
                     stdin=manifests.attributes_class(self.wrong, **{"class": "no-such-class"}))
        self.ask(self.wrong)
        self.of("wait", "pvc/data", "--timeout=60s",
                "--for=jsonpath={.status.modifyVolumeStatus.status}=Infeasible")
        events = self.of("events", "--for=pvc/data")
        expect("no-such-class" in events, f"an event that says why: {events}")


def two_copies(first: str, preferred: str) -> str:
    return f"""\
apiVersion: hither.dev/v1alpha1
kind: ChunkStorageClass
metadata: {{name: {TOWARDS}}}
spec:
  cluster: {CLUSTER}
  keep: zone={first},zone={preferred}
  preferredLabels: zone={preferred}
"""
