"""More than one cluster, and other stores of metadata."""

import base64

from cluster.say import Failure, wait_until

from . import manifests
from .guests import GuestScenario
from .hither import HitherCluster
from .installation import NAMESPACE, RELEASE, SAMPLES, STORAGE_CLASS
from .load import Load
from .scenario import checksum, expect

MEBIBYTE = 1 << 20


class TwoClusters(GuestScenario):
    """two clusters of one name in two namespaces: volumes, reads and secrets stay apart"""

    seconds = 300

    def run(self) -> None:
        self.apply_samples("cluster.yaml", "pools.yaml", "classes.yaml")
        self.guest.until_ready(180)
        theirs = self.guest.storage_class("everywhere")
        wait_until("the storage class is there", 60,
                   lambda: self.there.has("storageclass", theirs))
        for name, of_class in (("ours", STORAGE_CLASS), ("theirs", theirs)):
            self.apply(manifests.claim(name, of_class))
            # One writes, another on another node reads what is in no cache of its own.
            for pod, node in zip(("writer", "reader"), sorted(self.there.zones())):
                self.apply(manifests.pod(f"{name}-{pod}", self.there.busybox, name, node))
        pods = [f"pod/{name}-{pod}" for name in ("ours", "theirs") for pod in ("writer", "reader")]
        self.of("wait", *pods, "--for=condition=Ready", "--timeout=120s")
        self.ids_differ()
        for name, own, other in (("ours", self.there.demo, self.guest),
                                 ("theirs", self.guest, self.there.demo)):
            self.reads_come_from(name, own, other)
        expect(self.sh("ours-reader", "ls /data").split() == ["ours"], "its own file alone")
        expect(self.sh("theirs-reader", "ls /data").split() == ["theirs"], "its own file alone")
        self.secrets_stay_apart(theirs)
        # The end of one's volume is nothing to the other.
        self.of("delete", "pod", "theirs-writer", "theirs-reader", "--wait=true")
        self.of("delete", "pvc", "theirs", "--wait=true", "--timeout=60s")
        wait_until("its copies are gone", 90,
                   lambda: sum(self.guest.copies_by_zone().values()) == 0)
        self.sh("ours-writer", "echo on >/data/more && sync /data/more")

    def ids_differ(self) -> None:
        for name, cluster in (("ours", self.there.demo), ("theirs", self.guest)):
            handle = self.volume_of(name)
            known = cluster.get("hithercluster", cluster.name)["status"]["clusterId"]
            expect(handle.startswith(f"{known}."), f"{name} on cluster {known}: {handle}")

    def reads_come_from(self, name: str, own: HitherCluster, other: HitherCluster) -> None:
        self.sh(f"{name}-writer", f"dd if=/dev/urandom of=/data/{name} bs=1M count=8 && sync")
        wrote = checksum(self.sh(f"{name}-writer", f"sha256sum /data/{name}"))
        before = [sum(cluster.read_by_zone().values()) for cluster in (own, other)]
        read = checksum(self.sh(f"{name}-reader", f"sha256sum /data/{name}"))
        after = [sum(cluster.read_by_zone().values()) for cluster in (own, other)]
        expect(read == wrote, f"{name}: what was written")
        expect(after[0] - before[0] >= 8 * MEBIBYTE, f"{name}: 8 MiB from its own chunkservers")
        expect(after[1] == before[1], f"{name}: nothing from the other's")

    def secrets_stay_apart(self, theirs: str) -> None:
        for of_class, cluster in ((STORAGE_CLASS, self.there.demo), (theirs, self.guest)):
            parameters = self.kubectl.json("storageclass", of_class)["parameters"]
            named = {value for key, value in parameters.items()
                     if key.endswith("secret-namespace")}
            expect(named == {cluster.namespace}, f"secrets of {cluster.namespace}: {named}")
            secret = cluster.get("secret", f"{cluster.name}-csi")["data"]
            known = cluster.get("hithercluster", cluster.name)["status"]["clusterId"]
            expect(base64.b64decode(secret["clusterID"]).decode() == known, "its own id")
            self.may_read(cluster.namespace, f"secret/{cluster.name}-csi", True)
            self.may_read(cluster.namespace, "secret/other", False)

    def may_read(self, namespace: str, what: str, wanted: bool) -> None:
        account = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-csi-controller"
        said = self.kubectl("auth", "can-i", "get", what, f"--namespace={namespace}",
                            f"--as={account}", check=False).strip()
        expect(said == ("yes" if wanted else "no"), f"{what} in {namespace}: {said}")


class EtcdScenario(GuestScenario):
    """Has a cluster whose metadata is in an etcd."""

    cluster_name = "prod"

    def until_ready(self) -> str:
        """The sample with its etcd; the storage class's name."""
        self.guest.of("apply", "-f", "-", stdin=etcd(self.there.image))
        self.guest.of("rollout", "status", "deployment/etcd", "--timeout=90s")
        text = (SAMPLES / "etcd/cluster.yaml").read_text()
        self.guest.of("apply", "-f", "-", stdin=text.replace("etcd.default", f"etcd.{self.home}"))
        text = (SAMPLES / "classes.yaml").read_text()
        self.guest.of("apply", "-f", "-", stdin=text.replace("cluster: demo", "cluster: prod"))
        self.guest.until_ready(180)
        name = self.guest.storage_class("everywhere")
        wait_until("the storage class is there", 60, lambda: self.there.has("storageclass", name))
        return name


class EtcdStore(EtcdScenario):
    """metadata in an etcd that exists: metadata server and leading manager are lost under load"""

    seconds = 360

    def run(self) -> None:
        pods = self.pods_in_zones(self.until_ready())
        for component, count in (("manager", 3), ("mds", 2), ("chunkserver", 3)):
            running = self.guest.pods(component)
            expect(len(running) == count, f"{count} of {component}, not {len(running)}")
            on = {self.there.zones()[pod["spec"]["nodeName"]] for pod in running}
            expect(len(on) == count, f"each {component} in a zone of its own, not {sorted(on)}")
        wait_until("the loss of any zone would be survived", 60,
                   lambda: self.guest.conditions().get("ZoneLossTolerated") == "True")
        with Load(self, list(pods.values())) as load:
            load.until_more(1)
            for what in ("mds", "manager"):
                lost = self.leading(what)
                self.guest.of("delete", "pod", lost, "--grace-period=0", "--force")
                self.note(f"{lost} is gone after {load.rounds}")
                load.until_more(3)
        for pod in pods.values():
            load.verify(pod)
        wait_until("the cluster is whole", 120, self.guest.is_whole)

    def leading(self, component: str) -> str:
        """Pod of the leading manager, or of the active metadata server."""
        for name in sorted(pod["metadata"]["name"] for pod in self.guest.pods("manager")):
            service = f"{self.cluster_name}-manager.{self.home}.svc:7650"
            status = self.guest.of("exec", name, "--", "hither", "--cluster", service, "--json",
                                   "status", check=False)
            for pod in self.guest.pods(component):
                if f'"{pod["status"]["podIP"]}:{7650 if component == "manager" else 7651}"' in status:
                    return pod["metadata"]["name"]
        raise Failure(f"nobody leads: no address of a {component} in {status}")


def etcd(image: str) -> str:
    """One member without a disk: what these scenarios lose is everything else."""
    return f"""\
apiVersion: v1
kind: Service
metadata: {{name: etcd}}
spec:
  selector: {{app: etcd}}
  ports: [{{port: 2379}}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: etcd}}
spec:
  strategy: {{type: Recreate}}
  selector: {{matchLabels: {{app: etcd}}}}
  template:
    metadata: {{labels: {{app: etcd}}}}
    spec:
      containers:
      - name: etcd
        image: {image}
        imagePullPolicy: IfNotPresent
        command: [/usr/local/bin/etcd]
        args:
        - --data-dir=/data/etcd
        - --listen-client-urls=http://0.0.0.0:2379
        - --advertise-client-urls=http://etcd:2379
        volumeMounts: [{{name: data, mountPath: /data}}]
        readinessProbe: {{tcpSocket: {{port: 2379}}, periodSeconds: 1}}
        securityContext: {{runAsUser: 65532}}
      volumes:
      - {{name: data, emptyDir: {{}}}}
"""
