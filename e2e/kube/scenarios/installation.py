"""Hither on the cluster: the chart, and one cluster of three zones with one storage class."""

from pathlib import Path

from cluster import images, programs, push
from cluster.kubectl import Kubectl, given_kubeconfig
from cluster.layout import State
from cluster.say import Failure, run, say, wait_until

from . import manifests
from .hither import HitherCluster
from .leftovers import KINDS, in_the_way

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = ROOT / "config/samples"
NAMESPACE = "hither-system"
RELEASE = "hither"
CLUSTER = "demo"
STORAGE_CLASS = f"{NAMESPACE}-{CLUSTER}-everywhere"
# Label of the namespaces that scenarios make.
OURS = "hither.dev/e2e"


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
        """Takes everything away again; what is left after it is a fault, and named."""
        self.kubectl("delete", "namespace", f"--selector={OURS}", "--timeout=180s")
        try:
            self.of("delete", ",".join(KINDS), "--all", "--timeout=180s")
        except Failure as failure:
            raise Failure(f"{failure}\n{in_the_way(self.kubectl)}") from failure
        # With the operator or the definitions gone nobody would end these.
        left = in_the_way(self.kubectl)
        if left:
            raise Failure(f"Hither stays installed, for there is still:\n{left}")
        run(*self.helm, "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout=3m")
        self.kubectl("delete", "namespace", NAMESPACE, "--timeout=180s")
        for definition in KINDS:
            self.kubectl("delete", "crd", definition, "--timeout=60s")

    def new_namespace(self, name: str) -> None:
        """A namespace of a scenario; one of the same name that is going is waited for."""
        self.kubectl("wait", f"namespace/{name}", "--for=delete", "--timeout=120s")
        self.kubectl("apply", "-f", "-", stdin=manifests.namespace(name, OURS))

    def has_namespace(self, name: str) -> bool:
        """It is there, and not going."""
        phase = "jsonpath={.status.phase}"
        return self.kubectl("get", "namespace", name, "--ignore-not-found", "-o", phase) == "Active"

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

    def until_replaced(self, component: str, node: str, old: str) -> None:
        """Waits for another pod of a DaemonSet on a node, ready."""
        def is_replaced() -> bool:
            try:
                name = self.pod_on(component, node)
            except Failure:
                return False
            pod = self.kubectl.json("--namespace", NAMESPACE, "pod", name)
            ready = [one["ready"] for one in pod["status"].get("containerStatuses", [])]
            return name != old and bool(ready) and all(ready)

        wait_until(f"a new {component} on {node}", 90, is_replaced)
