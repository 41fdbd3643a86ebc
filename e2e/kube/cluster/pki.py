"""Keys, certificates and kubeconfigs. Made once a cluster, by openssl."""

from dataclasses import dataclass
from pathlib import Path

from .layout import API_SERVICE_ADDRESS, API_URL, CONTROL, NODES, Machine, State
from .say import run, say

DAYS = 365


@dataclass(frozen=True)
class Identity:
    """One certificate: its file name, for which user and groups it speaks, where it answers."""

    name: str
    user: str
    groups: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return "".join(f"/O={group}" for group in self.groups) + f"/CN={self.user}"


def node_identity(node: Machine) -> Identity:
    user = f"system:node:{node.name}"
    return Identity(node.name, user, ("system:nodes",), (f"DNS:{node.name}", f"IP:{node.address}"))


API_SERVER = Identity(
    "apiserver",
    "kube-apiserver",
    hosts=(
        "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc",
        "DNS:kubernetes.default.svc.cluster.local", "DNS:localhost",
        "IP:127.0.0.1", f"IP:{CONTROL.address}", f"IP:{API_SERVICE_ADDRESS}",
    ),
)
# Certificates for clients of the API server that need a kubeconfig.
CLIENTS = (
    Identity("admin", "admin", ("system:masters",)),
    Identity("controller-manager", "system:kube-controller-manager"),
    Identity("scheduler", "system:kube-scheduler"),
    Identity("proxy", "system:kube-proxy"),
    *(node_identity(node) for node in NODES),
)
IDENTITIES = (API_SERVER, Identity("kubelet-client", "apiserver", ("system:masters",)), *CLIENTS)


def ensure(state: State) -> None:
    done = state.pki / "complete"
    if done.exists():
        return
    say("making certificates")
    state.pki.mkdir(parents=True, exist_ok=True)
    make_authority(state.pki)
    for identity in IDENTITIES:
        make_certificate(state.pki, identity)
    for identity in CLIENTS:
        (state.pki / f"{identity.name}.kubeconfig").write_text(kubeconfig(state.pki, identity))
    state.kubeconfig.write_text((state.pki / "admin.kubeconfig").read_text())
    state.kubeconfig.chmod(0o600)
    done.touch()


def make_authority(directory: Path) -> None:
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("openssl", "req", "-x509", *new_key, "-days", DAYS, "-subj", "/CN=hither-kube",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature",
        "-keyout", directory / "ca.key", "-out", directory / "ca.crt")
    run("openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048",
        "-out", directory / "sa.key")
    run("openssl", "pkey", "-in", directory / "sa.key", "-pubout", "-out", directory / "sa.pub")


def make_certificate(directory: Path, identity: Identity) -> None:
    stem = directory / identity.name
    run("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-subj", identity.subject, "-keyout", f"{stem}.key", "-out", f"{stem}.csr")
    hosts = identity.hosts or (f"DNS:{identity.name}",)
    extensions = f"subjectAltName={','.join(hosts)}\nextendedKeyUsage=serverAuth,clientAuth\n"
    run("openssl", "x509", "-req", "-in", f"{stem}.csr", "-out", f"{stem}.crt", "-days", DAYS,
        "-CA", directory / "ca.crt", "-CAkey", directory / "ca.key", "-CAcreateserial",
        "-extfile", "/dev/stdin", stdin=extensions)


def kubeconfig(directory: Path, identity: Identity) -> str:
    """A kubeconfig that carries its certificates, so that it works wherever it is copied."""
    return f"""\
apiVersion: v1
kind: Config
clusters:
- name: hither-kube
  cluster:
    server: {API_URL}
    certificate-authority-data: {encoded(directory / "ca.crt")}
users:
- name: {identity.name}
  user:
    client-certificate-data: {encoded(directory / f"{identity.name}.crt")}
    client-key-data: {encoded(directory / f"{identity.name}.key")}
contexts:
- name: hither-kube
  context: {{cluster: hither-kube, user: {identity.name}}}
current-context: hither-kube
"""


def encoded(path: Path) -> str:
    return run("base64", "--wrap=0", path)
