"""Nothing is removed under its users."""

from cluster.say import Failure, run

from . import manifests
from .installation import CLUSTER, NAMESPACE, RELEASE, STORAGE_CLASS
from .scenario import Scenario, expect


class ClusterInUse(Scenario):
    """a cluster with volumes on it is not deleted; the condition names them"""

    def run(self) -> None:
        self.apply(manifests.claim("data", STORAGE_CLASS))
        self.apply(manifests.pod("one", self.there.busybox, "data"))
        self.of("wait", "pod/one", "--for=condition=Ready", "--timeout=90s")
        volume = self.get("pvc", "data")["spec"]["volumeName"]
        self.there.of("delete", "hithercluster", CLUSTER, "--wait=false")
        self.there.of("wait", f"hithercluster/{CLUSTER}", "--for=condition=DeletionBlocked",
                      "--timeout=60s")
        cluster = self.kubectl.json("--namespace", NAMESPACE, "hithercluster", CLUSTER)
        said = [c["message"] for c in cluster["status"]["conditions"]
                if c["type"] == "DeletionBlocked"]
        expect(volume in said[0], f"the volume's name in {said}")
        self.sh("one", "echo on >/data/f && sync /data/f")
        # Deletion cannot be taken back in Kubernetes: what was asked for happens when the last
        # volume is gone. The next scenario finds a new cluster.
        self.of("delete", "pod", "one", "--wait=true")
        self.of("delete", "pvc", "data", "--wait=true", "--timeout=90s")
        self.kubectl("wait", f"pv/{volume}", "--for=delete", "--timeout=90s")
        self.there.of("wait", f"hithercluster/{CLUSTER}", "--for=delete", "--timeout=120s")
        self.there.install()


class UninstallGuard(Scenario):
    """helm uninstall is refused while a cluster exists"""

    def run(self) -> None:
        try:
            run(*self.there.helm, "uninstall", RELEASE, "--namespace", NAMESPACE, "--timeout=90s")
        except Failure as failure:
            self.note(str(failure).splitlines()[-1])
        else:
            raise Failure("helm uninstall went through with a cluster there")
        self.there.of("rollout", "status", f"deployment/{RELEASE}-operator", "--timeout=60s")
