"""etcd, the API server, the controller manager and the scheduler, on a machine of their own."""

from .kubectl import Kubectl
from .layout import API_PORT, CONTROL, POD_NETWORK, SERVICE_NETWORK, State
from .machine import RunningMachine
from .program import Program
from .say import Failure, wait_until

PKI = "/etc/kubernetes/pki"
ETCD = "http://127.0.0.1:2379"
ETCD_PEER = "http://127.0.0.1:2380"
FILES = (
    "ca.crt", "ca.key", "sa.key", "sa.pub", "apiserver.crt", "apiserver.key",
    "kubelet-client.crt", "kubelet-client.key",
    "controller-manager.kubeconfig", "scheduler.kubeconfig",
)


def programs() -> dict[str, list[str]]:
    """Each program's arguments, in the order in which they have to start."""
    return {
        "etcd": [
            "--data-dir=/var/lib/etcd/data",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            f"--listen-peer-urls={ETCD_PEER}",
            f"--initial-advertise-peer-urls={ETCD_PEER}",
            f"--initial-cluster=default={ETCD_PEER}",
            # The cluster does not outlive its host; without it every write waits for the disk.
            "--unsafe-no-fsync",
        ],
        "kube-apiserver": [
            f"--etcd-servers={ETCD}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={CONTROL.address}",
            f"--secure-port={API_PORT}",
            "--allow-privileged=true",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--client-ca-file={PKI}/ca.crt",
            f"--tls-cert-file={PKI}/apiserver.crt",
            f"--tls-private-key-file={PKI}/apiserver.key",
            f"--kubelet-certificate-authority={PKI}/ca.crt",
            f"--kubelet-client-certificate={PKI}/kubelet-client.crt",
            f"--kubelet-client-key={PKI}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={PKI}/sa.pub",
            f"--service-account-signing-key-file={PKI}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--endpoint-reconciler-type=lease",
            # There is no kube-proxy here: webhooks are called at their pods' addresses.
            "--enable-aggregator-routing=true",
        ],
        "kube-controller-manager": [
            f"--kubeconfig={PKI}/controller-manager.kubeconfig",
            f"--service-account-private-key-file={PKI}/sa.key",
            f"--root-ca-file={PKI}/ca.crt",
            f"--cluster-signing-cert-file={PKI}/ca.crt",
            f"--cluster-signing-key-file={PKI}/ca.key",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            f"--cluster-cidr={POD_NETWORK}",
            "--allocate-node-cidrs=false",
            # Half the default: the loss of a zone is noticed sooner.
            "--node-monitor-grace-period=20s",
        ],
        "kube-scheduler": [
            f"--kubeconfig={PKI}/scheduler.kubeconfig",
            "--leader-elect=false",
        ],
    }


def ensure(state: State, host: RunningMachine, kubectl: Kubectl) -> None:
    for name in FILES:
        host.write(f"{PKI}/{name}", (state.pki / name).read_text())
    for name, arguments in programs().items():
        program = Program(host, name)
        if program.pid is None:
            program.start(*arguments)
        if name == "kube-apiserver":
            wait_for_api(program, kubectl)


def wait_for_api(program: Program, kubectl: Kubectl) -> None:
    def ready() -> bool:
        if program.pid is None:
            raise Failure(f"the API server ended; see {program.log}")
        return kubectl.is_ready()

    wait_until("the API server is ready", 120, ready, str(program.log))
