"""Hither on the cluster: the chart, and one cluster of three zones with one storage class."""

from pathlib import Path

from cluster import images, programs, push
from cluster.kubectl import Kubectl, given_kubeconfig
from cluster.layout import State
from cluster.say import Failure, run, say, wait_until

from .hither import HitherCluster

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = ROOT / "config/samples"
NAMESPACE = "hither-system"
RELEASE = "hither"
CLUSTER = "demo"
STORAGE_CLASS = f"{NAMESPACE}-{CLUSTER}-everywhere"


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
        self.demo = HitherCluster(self.kubectl, NAMESPACE, CLUSTER)

    def install(self) -> None:
        say("helm install")
        self.chart()
        say("the sample of three zones")
        for part in ("cluster", "pools", "classes"):
            self.of("apply", "-f", SAMPLES / f"{part}.yaml")
        self.demo.until_ready(240)
        wait_until("the storage class is there", 60, lambda: self.has("storageclass", STORAGE_CLASS))

    def chart(self, image: str = "", **values: object) -> None:
        """Installs the chart, or changes it to these values and to the defaults of all others."""
        repository, tag = (image or self.image).rsplit(":", 1)
        settings = {"image.repository": repository, "image.tag": tag, **values}
        run(*self.helm, "upgrade", "--install", RELEASE, ROOT / "charts/hither",
            "--namespace", NAMESPACE, "--create-namespace", "--reset-values",
            "--set", ",".join(f"{name}={value}" for name, value in settings.items()),
            # The default takes the mounters, which an upgrade leaves alone, for unready.
            "--wait=legacy", "--timeout=5m")

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

    def of(self, *arguments: object, stdin: str | None = None, check: bool = True) -> str:
        return self.demo.of(*arguments, stdin=stdin, check=check)

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
