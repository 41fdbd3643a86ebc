"""What happens to files when the metadata's own servers are lost."""

from cluster.say import wait_until

from . import manifests
from .installation import NAMESPACE
from .scenario import Scenario, expect

CLUSTER = "meta"
STORAGE_CLASS = f"{NAMESPACE}-{CLUSTER}-{CLUSTER}"


class MetadataMemberLost(Scenario):
    """a member of the managed etcd loses its volume under writers: it is replaced, files go on"""

    seconds = 480

    def run(self) -> None:
        self.kubectl("--namespace", NAMESPACE, "apply", "-f", "-", stdin=cluster())
        self.there.of("wait", f"hithercluster/{CLUSTER}", "--for=condition=Ready",
                      "--timeout=180s")
        self.wait_members("True")
        wait_until("the storage class", 60,
                   lambda: self.there.has("storageclass", STORAGE_CLASS))
        self.apply(manifests.claim("data", STORAGE_CLASS))
        self.apply(manifests.readers(self.there.busybox, "data"))
        self.of("rollout", "status", "statefulset/pods", "--timeout=120s")
        self.sh("pods-0", "(n=0; while [ ! -e /data/stop ]; do echo $n >>/data/log || exit 1;"
                          " sync /data/log || exit 1; n=$((n+1)); done; echo $n >/data/end)"
                          " >/data/out 2>&1 &")
        for member in ("1", "0"):
            before = self.lines()
            self.there.of("delete", "pvc", f"data-0-{CLUSTER}-etcd-{member}", "--wait=false")
            self.there.of("delete", "pod", f"{CLUSTER}-etcd-{member}")
            self.wait_members("False")
            self.wait_members("True")
            wait_until("the writer goes on", 60, lambda before=before: self.lines() > before)
            self.note(f"member {member} was replaced; {self.lines()} lines so far")
        self.sh("pods-0", "touch /data/stop")
        wait_until("the writer is done", 60,
                   lambda: self.sh("pods-0", "cat /data/end 2>/dev/null || true").strip() != "")
        written = self.sh("pods-0", "cat /data/end").strip()
        expect(self.sh("pods-1", "wc -l </data/log").strip() == written, "every line elsewhere")
        expect(self.sh("pods-1", "cat /data/out") == "", "a writer that saw no error")

    def lines(self) -> int:
        return int(self.sh("pods-0", "wc -l </data/log").strip())

    def wait_members(self, status: str) -> None:
        self.there.of("wait", f"hithercluster/{CLUSTER}", "--timeout=180s",
                      f"--for=condition=MetadataMembers={status}")

    def clean(self) -> None:
        # The volumes go first: a cluster with volumes stays.
        super().clean()
        self.there.of("delete", "chunkstorageclass,chunkserverpool,hithercluster",
                      f"--selector=e2e={CLUSTER}", "--timeout=180s")
        self.there.of("delete", "pvc,configmap", f"--selector=hither.dev/cluster={CLUSTER}")


def cluster() -> str:
    return f"""\
apiVersion: hither.dev/v1alpha1
kind: HitherCluster
metadata: {{name: {CLUSTER}, labels: {{e2e: {CLUSTER}}}}}
spec:
  zones: [{{name: eu-1a}}, {{name: eu-1b}}, {{name: eu-1c}}]
  defaultClass: 3*/[ZONE]
  metadataStore:
    managedEtcd:
      storage: {{claim: {{size: 1Gi}}}}
---
apiVersion: hither.dev/v1alpha1
kind: ChunkserverPool
metadata: {{name: {CLUSTER}, labels: {{e2e: {CLUSTER}}}}}
spec:
  cluster: {CLUSTER}
  replicasPerZone: 1
  storage: {{claim: {{size: 5Gi}}}}
---
apiVersion: hither.dev/v1alpha1
kind: ChunkStorageClass
metadata: {{name: {CLUSTER}, labels: {{e2e: {CLUSTER}}}}}
spec:
  cluster: {CLUSTER}
  keep: zone=eu-1a,zone=eu-1b,zone=eu-1c
"""
