"""What runs in the cluster itself: CoreDNS, the snapshot controller, a default storage class."""

from pathlib import Path

from .kubectl import Kubectl

MANIFESTS = Path(__file__).parent.parent / "manifests"


def ensure(kubectl: Kubectl, crds: Path) -> None:
    definitions = sorted(crds.glob("*.yaml"))
    kubectl.apply("\n---\n".join(path.read_text() for path in definitions))
    manifests = sorted(MANIFESTS.glob("*.yaml"))
    kubectl.apply("\n---\n".join(path.read_text() for path in manifests))


def wait(kubectl: Kubectl) -> None:
    for thing in ("daemonset/coredns", "deployment/snapshot-controller", "daemonset/local-volumes"):
        kubectl("rollout", "status", thing, "--namespace=kube-system", "--timeout=120s")
    kubectl.wait("crd/volumesnapshots.snapshot.storage.k8s.io", "condition=Established", 30)
