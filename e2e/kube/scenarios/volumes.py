"""The life of volumes."""

from cluster.say import Failure, wait_until

from . import manifests
from .installation import STORAGE_CLASS
from .scenario import Scenario, expect


class Expansion(Scenario):
    """a volume in use grows, and its pods see it without a restart"""

    def run(self) -> None:
        pods = self.pods_in_zones()
        pod = next(iter(pods.values()))
        expect(self.size(pod) == 1 << 20, f"1 GiB at first, not {self.size(pod)} KiB")
        self.of("patch", "pvc", "data", "--type=merge", "-p",
                '{"spec":{"resources":{"requests":{"storage":"3Gi"}}}}')
        self.of("wait", "pvc/data", "--for=jsonpath={.status.capacity.storage}=3Gi",
                "--timeout=90s")
        wait_until("the pod sees the new size", 60, lambda: self.size(pod) == 3 << 20)

    def size(self, pod: str) -> int:
        """KiB that `df` shows."""
        return int(self.sh(pod, "df -Pk /data | tail -1").split()[1])


class FullVolume(Scenario):
    """a volume takes what its claim asked for and no more; others do not notice"""

    def run(self) -> None:
        self.apply(manifests.claim("data", STORAGE_CLASS, size="16Mi"))
        self.apply(manifests.pod("one", self.there.busybox, "data"))
        self.of("wait", "pod/one", "--for=condition=Ready", "--timeout=90s")
        try:
            self.sh("one", "dd if=/dev/urandom of=/data/f bs=1M count=64 && sync /data/f")
        except Failure as failure:
            said = str(failure)
            expect("space" in said or "quota" in said.lower(), f"no space left, not {said!r}")
        else:
            raise Failure("64 MiB went into a volume of 16 MiB")
        self.sh("one", "rm /data/f && echo small >/data/g && sync /data/g")


class OneWriter(Scenario):
    """a volume of ReadWriteOncePod is refused to a second pod"""

    def run(self) -> None:
        self.apply(manifests.claim("data", STORAGE_CLASS, mode="ReadWriteOncePod"))
        self.apply(manifests.pod("one", self.there.busybox, "data"))
        self.of("wait", "pod/one", "--for=condition=Ready", "--timeout=90s")
        self.apply(manifests.pod("two", self.there.busybox, "data"))
        wait_until("the second pod is refused", 60, self.is_refused)
        self.of("delete", "pod", "one", "--wait=true")
        self.of("wait", "pod/two", "--for=condition=Ready", "--timeout=90s")

    def is_refused(self) -> bool:
        pod = self.get("pod", "two")
        return pod["status"]["phase"] == "Pending" and any(
            "ReadWriteOncePod" in c.get("message", "")
            for c in pod["status"].get("conditions", []))


class Deletion(Scenario):
    """a deleted claim takes its files with it"""

    def run(self) -> None:
        wait_until("no other scenario's copies are left", 120, lambda: self.copies() == 0)
        pods = self.pods_in_zones()
        pod = next(iter(pods.values()))
        self.sh(pod, "dd if=/dev/urandom of=/data/f bs=1M count=32 && sync /data/f")
        volume = self.get("pvc", "data")["spec"]["volumeName"]
        expect(self.copies() >= 3, "a copy in each zone")
        self.of("delete", "statefulset", "pods", "--wait=true")
        self.of("wait", "pod", "--selector=app=pods", "--for=delete", "--timeout=90s")
        self.of("delete", "pvc", "data", "--wait=true", "--timeout=90s")
        self.kubectl("wait", f"pv/{volume}", "--for=delete", "--timeout=90s")
        wait_until("the copies are gone", 120, lambda: self.copies() == 0)

    def copies(self) -> int:
        """Copies of chunks on all chunkservers."""
        return sum(self.there.demo.copies_by_zone().values())


class ManyClaims(Scenario):
    """twenty claims are met although operator and manager are killed meanwhile"""

    seconds = 300

    def run(self) -> None:
        names = [f"data-{n}" for n in range(20)]
        self.apply(manifests.together(*(manifests.claim(name, STORAGE_CLASS) for name in names)))
        selector = "app.kubernetes.io/component in (operator)"
        self.there.of("delete", "pods", "--selector", selector, "--grace-period=0", "--force")
        manager = [name for name in self.there.of("get", "pods", "-o", "name").split()
                   if "demo-manager" in name]
        self.there.of("delete", *manager, "--grace-period=0", "--force")
        claims = [f"pvc/{name}" for name in names]
        self.of("wait", *claims, "--for=jsonpath={.status.phase}=Bound", "--timeout=200s")
        handles = {self.volume_of(name) for name in names}
        expect(len(handles) == 20, "twenty different volumes")
