"""What happens to pods when the programs of their node end."""

import json

from cluster.say import Failure, wait_until

from . import manifests
from .installation import CLUSTER, NAMESPACE, RELEASE, STORAGE_CLASS
from .scenario import Scenario, expect


class PluginKilled(Scenario):
    """the node plugin is killed while a pod writes: the pod does not notice"""

    def run(self) -> None:
        pods = self.pods_in_zones()
        pod = next(iter(pods.values()))
        node = self.node_of(pod)
        self.sh(pod, "(n=0; while [ $n -lt 400 ]; do echo $n >>/data/log || exit 1; n=$((n+1));"
                     " done; echo done >/data/end) >/data/out 2>&1 &")
        plugin = self.there.pod_on("csi-node", node)
        self.there.of("delete", "pod", plugin, "--grace-period=0", "--force")
        wait_until("the writer is done", 60,
                   lambda: self.sh(pod, "cat /data/end 2>/dev/null || true").strip() == "done")
        expect(self.sh(pod, "wc -l </data/log").strip() == "400", "every line")
        self.there.until_replaced("csi-node", node, plugin)
        # The new one serves the node: its pod goes and comes again.
        self.of("delete", "pod", pod, "--wait=true")
        self.of("rollout", "status", "statefulset/pods", "--timeout=90s")
        expect(self.sh(pod, "wc -l </data/log").strip() == "400", "every line after a restart")


class MounterEnds(Scenario):
    """the mount pod is deleted while pods use it: they see it, and recover without a reboot"""

    seconds = 240

    def run(self) -> None:
        pods = self.pods_in_zones()
        zone, pod = next(iter(pods.items()))
        node = self.node_of(pod)
        others = [other for other in pods.values() if other != pod]
        self.sh(pod, "echo before >/data/kept && sync /data/kept")
        mounter = self.there.pod_on("mounter", node)
        self.there.of("delete", "pod", mounter, "--grace-period=1")
        wait_until("the pod sees that its mount is dead", 60, lambda: not self.reads(pod))
        expect(all(self.reads(other) for other in others), "pods of other nodes read on")
        # The plugin mounts anew; a container sees it after its restart.
        self.of("delete", "pod", pod, "--wait=true", "--timeout=90s")
        self.of("rollout", "status", "statefulset/pods", "--timeout=120s")
        expect(self.sh(pod, "cat /data/kept").strip() == "before", "what was stable is there")

    def reads(self, pod: str) -> bool:
        try:
            return self.sh(pod, "cat /data/kept").strip() == "before"
        except Failure:
            return False


class ControllerRestarted(Scenario):
    """a new controller knows every cluster without having been asked for any"""

    def run(self) -> None:
        self.apply(manifests.claim("data", STORAGE_CLASS, size="64Mi"))
        self.of("wait", "pvc/data", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
        handle = self.volume_of("data")
        name = f"deployment/{RELEASE}-csi-controller"
        self.there.of("rollout", "restart", name)
        self.there.of("rollout", "status", name, "--timeout=120s")
        listed = [json.loads(line) for line in self.ask("volumes").splitlines()]
        expect({"handle": handle, "sizeBytes": 64 << 20} in listed, f"{handle} in {listed}")
        one = json.loads(self.ask("volumes", handle))
        expect(one["handle"] == handle, f"the volume by its handle: {one}")
        room = self.ask("capacity", f"--cluster={NAMESPACE}.{CLUSTER}", "--class=everywhere")
        expect(int(room) > 64 << 20, f"room for more, not {room}")

    def ask(self, *words: str) -> str:
        return self.there.of("exec", f"deployment/{RELEASE}-csi-controller", "-c", "controller",
                             "--", "hither-csi", *words)
