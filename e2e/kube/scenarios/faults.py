"""Faults that others have had with kubelets, nodes and mounts (CASES.md)."""

import json

from cluster import node as nodes
from cluster.layout import find
from cluster.machine import RunningMachine
from cluster.program import Program
from cluster.say import Failure, wait_until

from . import manifests
from .installation import NAMESPACE, RELEASE, STORAGE_CLASS
from .scenario import Scenario, expect

TAINT = "hither.dev/e2e"


class KubeletRestarted(Scenario):
    """a kubelet restarts again and again under a pod: its mount stays, none comes on top of it"""

    seconds = 300
    needs_own_cluster = True

    def run(self) -> None:
        pods = self.pods_in_zones()
        pod = next(iter(pods.values()))
        name = self.node_of(pod)
        host = RunningMachine(self.there.state, find(name))
        mount, mounts = self.mount_of(pod), mounts_of_fuse(host)
        # In the pod itself: `exec` goes through the kubelet.
        self.sh(pod, "(n=0; while [ ! -e /data/stop ]; do echo $n >>/data/log && sync /data/log"
                     " || exit 1; n=$((n+1)); done; echo $n >/data/end) >/data/out 2>&1 &")
        for round in range(5):
            Program(host, "kubelet").end()
            nodes.start_program(host, "kubelet")
            # It has looked at what is mounted before it mounts anything.
            self.apply(manifests.pod(f"next-{round}", self.there.busybox, "data", name))
            self.of("wait", f"pod/next-{round}", "--for=condition=Ready", "--timeout=90s")
            self.of("delete", "pod", f"next-{round}", "--timeout=60s")
        self.sh(pod, "touch /data/stop")
        wait_until("the writer is done", 60,
                   lambda: self.sh(pod, "cat /data/end 2>/dev/null || true").strip() != "")
        expect(self.sh(pod, "cat /data/out") == "", "a writer that saw no error")
        expect(self.sh(pod, "wc -l </data/log") == self.sh(pod, "cat /data/end"), "every line")
        expect(self.mount_of(pod) == mount, f"the same mount: {mount}")
        wait_until("only the mounts of before are there", 60,
                   lambda: mounts_of_fuse(host) == mounts)


def mounts_of_fuse(host: RunningMachine) -> list[str]:
    """Where FUSE file systems are mounted on a machine, each as often as it is."""
    lines = host.run("cat", "/proc/self/mountinfo").splitlines()
    return sorted(line.split()[4] for line in lines if " - fuse" in line)


class TaintedNode(Scenario):
    """a node with a taint nobody knows has its plugin and mounter all the same"""

    def heal(self) -> None:
        for node in self.there.zones():
            self.kubectl("taint", "node", node, f"{TAINT}-", check=False)

    def run(self) -> None:
        node = sorted(self.there.zones())[0]
        self.kubectl("taint", "node", node, f"{TAINT}=:NoSchedule")
        for component in ("csi-node", "mounter"):
            old = self.there.pod_on(component, node)
            self.there.of("delete", "pod", old, "--timeout=90s")
            self.there.until_replaced(component, node, old)
        self.apply(manifests.claim("data", STORAGE_CLASS))
        self.apply(manifests.pod("one", self.there.busybox, "data", node))
        self.of("wait", "pod/one", "--for=condition=Ready", "--timeout=90s")
        self.sh("one", "echo here >/data/f && sync /data/f")


class NodesForbidden(Scenario):
    """without the right to read its node the plugin mounts all the same; nothing is near then"""

    role: dict | None = None

    @property
    def role_name(self) -> str:
        return f"{NAMESPACE}-{RELEASE}-csi-node"

    def heal(self) -> None:
        if self.role is not None:
            self.kubectl("replace", "-f", "-", stdin=json.dumps(self.role))

    def run(self) -> None:
        role = self.kubectl.json("clusterrole", self.role_name)
        for field in ("resourceVersion", "managedFields"):
            role["metadata"].pop(field, None)
        self.role = role
        less = {**role, "rules": [one for one in role["rules"] if "nodes" not in one["resources"]]}
        self.kubectl("replace", "-f", "-", stdin=json.dumps(less))
        node = sorted(self.there.zones())[0]
        old = self.there.pod_on("csi-node", node)
        self.there.of("delete", "pod", old, "--timeout=60s")
        self.there.until_replaced("csi-node", node, old)
        self.apply(manifests.claim("data", STORAGE_CLASS))
        self.apply(manifests.pod("one", self.there.busybox, "data", node))
        self.of("wait", "pod/one", "--for=condition=Ready", "--timeout=90s")
        self.sh("one", "echo here >/data/f && sync /data/f")


class PartOfVolume(Scenario):
    """pods that mount a directory of a volume (subPath) share it with those that mount it all"""

    seconds = 240

    def run(self) -> None:
        zones = sorted(self.there.zones())
        self.apply(manifests.claim("data", STORAGE_CLASS))
        self.apply(manifests.pod("whole", self.there.busybox, "data", zones[0]))
        self.apply(manifests.pod("part", self.there.busybox, "data", zones[1], below="a/b"))
        self.of("wait", "pod/whole", "pod/part", "--for=condition=Ready", "--timeout=90s")
        self.sh("part", "echo from the part >/data/f && sync /data/f")
        expect(self.sh("whole", "cat /data/a/b/f") == "from the part\n", "one and the same file")
        self.sh("whole", "echo from the whole >/data/a/b/g && sync /data/a/b/g")
        expect(self.sh("part", "ls /data").split() == ["f", "g"], "what is below, and no more")
        # The mount ends under it: the pod's next start finds the same directory again.
        mounter = self.there.pod_on("mounter", zones[1])
        self.there.of("delete", "pod", mounter, "--grace-period=1")
        wait_until("the pod sees that its mount is dead", 60, lambda: not self.reads("part"))
        self.of("delete", "pod", "part", "--timeout=90s")
        self.apply(manifests.pod("part", self.there.busybox, "data", zones[1], below="a/b"))
        self.of("wait", "pod/part", "--for=condition=Ready", "--timeout=120s")
        expect(self.sh("part", "ls /data").split() == ["f", "g"], "the same after the mount's end")

    def reads(self, pod: str) -> bool:
        try:
            return self.sh(pod, "cat /data/f") != ""
        except Failure:
            return False
