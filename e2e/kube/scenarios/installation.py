"""Hither on the cluster: the chart, one cluster of three zones, one storage class."""

import json
from dataclasses import dataclass
from pathlib import Path

from cluster import images, programs, push
from cluster.kubectl import Kubectl, given_kubeconfig
from cluster.layout import State
from cluster.say import Failure, run, say, wait_until

ROOT = Path(__file__).resolve().parents[3]
NAMESPACE = "hither-system"
RELEASE = "hither"
CLUSTER = "demo"
STORAGE_CLASS = f"{NAMESPACE}-{CLUSTER}-everywhere"


@dataclass(frozen=True)
class Server:
    """A chunkserver as the manager shows it."""

    id: int
    zone: str
    read_bytes: int


class Installation:
    """The cluster under test with Hither on it."""

    def __init__(self) -> None:
        self.state = State.chosen()
        given = given_kubeconfig(self.state.kubeconfig)
        self.own = given is None
        programs_dir = programs.ensure() / "bin"
        kubeconfig = self.state.kubeconfig if self.own else None
        self.kubectl = Kubectl(programs_dir / "kubectl", kubeconfig)
        self.helm = [programs_dir / "helm", *([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])]
        registry = None if self.own else push.registry()
        self.image = images.reference(images.HITHER_IMAGE, registry)
        self.busybox = images.reference(images.BUSYBOX_IMAGE, registry)

    def install(self) -> None:
        repository, tag = self.image.rsplit(":", 1)
        say("helm install")
        run(*self.helm, "upgrade", "--install", RELEASE, ROOT / "charts/hither",
            "--namespace", NAMESPACE, "--create-namespace",
            "--set", f"image.repository={repository},image.tag={tag}",
            "--wait", "--timeout=5m")
        say("the sample of three zones")
        for part in ("cluster", "pools", "classes"):
            self.of("apply", "-f", ROOT / f"config/samples/{part}.yaml")
        self.kubectl("--namespace", NAMESPACE, "wait", f"hithercluster/{CLUSTER}",
                     "--for=condition=Ready", "--timeout=240s")
        wait_until("the storage class is there", 60, lambda: self.has("storageclass", STORAGE_CLASS))

    def uninstall(self) -> None:
        """Takes everything away again; what is left after it is a fault."""
        self.of("delete", "hithercluster,chunkserverpool,chunkstorageclass", "--all",
                "--timeout=180s", check=False)
        run(*self.helm, "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout=3m",
            check=False)
        self.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=180s")
        for definition in ("hitherclusters", "chunkserverpools", "chunkstorageclasses"):
            self.kubectl("delete", "crd", f"{definition}.hither.dev", "--ignore-not-found",
                         "--timeout=60s")

    def of(self, *arguments: object, check: bool = True) -> str:
        return self.kubectl("--namespace", NAMESPACE, *arguments, check=check)

    def has(self, kind: str, name: str) -> bool:
        return self.kubectl("get", kind, name, "--ignore-not-found") != ""

    def zones(self) -> dict[str, str]:
        """Zone of each node."""
        label = "topology.kubernetes.io/zone"
        nodes = [node["metadata"] for node in self.kubectl.json("nodes")["items"]]
        return {node["name"]: node["labels"].get(label, "") for node in nodes}

    def pod_on(self, component: str, node: str) -> str:
        """Name of the pod of a DaemonSet on a node."""
        selector = f"--selector=app.kubernetes.io/component={component}"
        field = f"--field-selector=spec.nodeName={node}"
        pods = self.kubectl.json("--namespace", NAMESPACE, "pods", selector, field)["items"]
        running = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
        if len(running) != 1:
            raise Failure(f"one {component} pod on {node}, found {len(running)}")
        return running[0]["metadata"]["name"]

    def manager_node(self) -> str:
        """Node of the manager that `administer` asks."""
        pod = self.kubectl.json("--namespace", NAMESPACE, "pod", f"{CLUSTER}-manager-0")
        return pod["spec"]["nodeName"]

    def administer(self, *words: object) -> dict | list:
        """`hither --json` beside a manager."""
        service = f"{CLUSTER}-manager.{NAMESPACE}.svc:7650"
        text = self.of("exec", f"{CLUSTER}-manager-0", "--",
                       "hither", "--cluster", service, "--json", *words)
        return json.loads(text)

    def servers(self) -> list[Server]:
        zones = {s["id"]: s["zone"] for s in self.administer("cs", "ls")}
        return [Server(s["id"], zones[s["id"]], s["readBytes"])
                for s in self.administer("cs", "stat")]

    def is_whole(self) -> bool:
        """Every chunkserver is up and every copy is where it should be."""
        cluster = self.kubectl.json("--namespace", NAMESPACE, "hithercluster", CLUSTER)
        conditions = {c["type"]: c["status"] for c in cluster["status"]["conditions"]}
        return conditions["Degraded"] == "False" and conditions["Ready"] == "True"
