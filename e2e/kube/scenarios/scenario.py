"""A scenario: a namespace of its own, a time limit, and a cluster that is clean after it."""

import hashlib
import json

from cluster.say import Failure, say, wait_until

from . import manifests
from .installation import STORAGE_CLASS, Installation


class Scenario:
    """One test. `run` proves something; what it made in its namespace is removed after it."""

    # Longest time it may take, without its cleaning.
    seconds = 180
    # It cuts links or stops machines, so it needs the cluster of this directory.
    needs_own_cluster = False

    def __init__(self, there: Installation):
        self.there = there
        self.kubectl = there.kubectl
        words = "".join(f"-{c.lower()}" if c.isupper() else c for c in type(self).__name__)
        self.namespace = "e2e" + words

    @classmethod
    def title(cls) -> str:
        return (cls.__doc__ or cls.__name__).strip().splitlines()[0]

    def run(self) -> None:
        raise NotImplementedError

    def heal(self) -> None:
        """Puts back what the scenario has broken outside its namespace."""

    def clean(self) -> None:
        """Takes away what disturbs the next one. An empty namespace goes by itself meanwhile: its
        controller waits before it looks, and longer before it looks again."""
        self.heal()
        self.of("delete", "statefulset,deployment,pod,pvc", "--all", "--cascade=foreground",
                "--timeout=120s")
        wait_until("its volumes are gone", 60, lambda: not self.volumes())
        self.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")

    def begin(self) -> None:
        self.clean()
        self.there.new_namespace(self.namespace)

    # What scenarios are made of.

    def of(self, *arguments: object, check: bool = True) -> str:
        return self.kubectl("--namespace", self.namespace, *arguments, check=check)

    def apply(self, manifest: str) -> None:
        self.kubectl("--namespace", self.namespace, "apply", "-f", "-", stdin=manifest)

    def get(self, *arguments: object) -> dict:
        return self.kubectl.json("--namespace", self.namespace, *arguments)

    def sh(self, pod: str, command: str) -> str:
        """Runs a shell command in a pod."""
        return self.of("exec", pod, "--", "sh", "-c", command)

    def pods_in_zones(self, storage_class: str = STORAGE_CLASS) -> dict[str, str]:
        """A claim many pods share, and a pod in each zone that mounts it: zone to pod."""
        claim = "data"
        self.apply(manifests.claim(claim, storage_class))
        self.apply(manifests.readers(self.there.busybox, claim))
        self.of("rollout", "status", "statefulset/pods", "--timeout=120s")
        zones = self.there.zones()
        pods = self.get("pods", "--selector=app=pods")["items"]
        placed = {zones[p["spec"]["nodeName"]]: p["metadata"]["name"] for p in pods}
        expect(len(placed) == 3, f"a pod in each of three zones, found {sorted(placed)}")
        return placed

    def node_of(self, pod: str) -> str:
        return self.get("pod", pod)["spec"]["nodeName"]

    def volumes(self) -> list[str]:
        """PersistentVolumes of claims in the scenario's namespace."""
        return [volume["metadata"]["name"] for volume in self.kubectl.json("pv")["items"]
                if volume["spec"].get("claimRef", {}).get("namespace") == self.namespace]

    def volume_of(self, claim: str = "data") -> str:
        """Handle of the volume bound to a claim."""
        name = self.get("pvc", claim)["spec"]["volumeName"]
        return self.kubectl.json("pv", name)["spec"]["csi"]["volumeHandle"]

    def mount_of(self, pod: str) -> str:
        """The kernel's number of the mount: another one after a remount."""
        line = self.sh(pod, "grep ' /data ' /proc/self/mountinfo")
        return " ".join(line.split()[:3])

    def counters_of(self, pod: str, claim: str = "data") -> dict:
        """What a pod's mount has counted (`hither locality`)."""
        volume = hashlib.sha256(self.volume_of(claim).encode()).hexdigest()
        mount = f"/var/lib/kubelet/plugins/kubernetes.io/csi/csi.hither.dev/{volume}/globalmount"
        plugin = self.there.pod_on("csi-node", self.node_of(pod))
        return json.loads(self.there.of("exec", plugin, "--", "hither", "--json", "locality", mount))

    def served_by(self, reader: str, writer: str) -> str:
        """The zone whose chunkservers gave all that a pod read of a new file. A read may go
        elsewhere when its server is slow: then once more."""
        mebibytes = 8
        for _ in range(5):
            self.sh(writer, f"dd if=/dev/urandom of=/data/probe bs=1M count={mebibytes} && sync")
            before = self.there.demo.read_by_zone()
            self.sh(reader, "cat /data/probe >/dev/null")
            after = self.there.demo.read_by_zone()
            read = {zone: after[zone] - before[zone] for zone in after}
            zone = max(read, key=lambda zone: read[zone])
            if read[zone] >= mebibytes << 20:
                return zone
        raise Failure(f"no zone gave the {mebibytes} MiB of any of five files: {read}")

    def note(self, text: str) -> None:
        say(f"   {text}")


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Failure(f"expected {what}")


def checksum(text: str) -> str:
    """The sum in what `sha256sum` prints."""
    return text.split()[0] if text.split() else ""
