"""A node: containerd, kubelet and kube-proxy on a machine, at the paths of a usual node."""

import json

from . import cgroup
from .layout import DNS_ADDRESS, IMAGE_DOMAIN, POD_NETWORK, REGION, Machine, State
from .machine import RunningMachine
from .program import Program
from .say import wait_until

PKI = "/etc/kubernetes/pki"
SOCKET = "/run/containerd/containerd.sock"
CTR = ("ctr", f"--address={SOCKET}", "--namespace=k8s.io")
PAUSE_IMAGE = f"{IMAGE_DOMAIN}/pause:1"
PROGRAMS = ("containerd", "kubelet", "kube-proxy")


def containerd_config() -> str:
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


def cni_config(node: Machine) -> str:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": str(node.pod_network)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False,
        "hairpinMode": True, "ipam": addresses,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]})


def kubelet_config(node: Machine) -> str:
    """JSON is YAML, and needs no library."""
    return json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": str(node.address),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{PKI}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{PKI}/{node.name}.crt",
        "tlsPrivateKeyFile": f"{PKI}/{node.name}.key",
        "clusterDNS": [str(DNS_ADDRESS)],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup.name_of(node),
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        # Settings of the host's kernel that a kubelet wants to change are left alone.
        "featureGates": {"KubeletInUserNamespace": True},
        # All nodes share one disk and one memory: only a host that is really full evicts.
        "evictionHard": {
            "memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "4s",
        "volumeStatsAggPeriod": "10s",
    })


def proxy_config(node: Machine) -> str:
    return json.dumps({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{PKI}/proxy.kubeconfig"},
        "mode": "nftables",
        "hostnameOverride": node.name,
        "clusterCIDR": str(POD_NETWORK),
        # The table of connections belongs to the host's kernel.
        "conntrack": {
            "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
        },
    })


def arguments(node: Machine) -> dict[str, list[str]]:
    labels = f"topology.kubernetes.io/region={REGION},topology.kubernetes.io/zone={node.zone}"
    return {
        "containerd": ["--config=/etc/containerd/config.toml"],
        "kubelet": [
            "--config=/etc/kubernetes/kubelet.yaml",
            f"--kubeconfig={PKI}/{node.name}.kubeconfig",
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            f"--node-labels={labels}",
            "--cert-dir=/var/lib/kubelet/pki",
        ],
        "kube-proxy": ["--config=/etc/kubernetes/proxy.yaml"],
    }


def start_program(host: RunningMachine, name: str) -> None:
    Program(host, name).start(*arguments(host.machine)[name])


def ensure_runtime(state: State, host: RunningMachine) -> None:
    """Writes the configuration and has containerd answer."""
    node = host.machine
    cgroup.ensure(node)
    for name in ("ca.crt", f"{node.name}.crt", f"{node.name}.key",
                 f"{node.name}.kubeconfig", "proxy.kubeconfig"):
        host.write(f"{PKI}/{name}", (state.pki / name).read_text())
    host.write("/etc/containerd/config.toml", containerd_config())
    host.write("/etc/cni/net.d/10-pods.conflist", cni_config(node))
    host.write("/etc/kubernetes/kubelet.yaml", kubelet_config(node))
    host.write("/etc/kubernetes/proxy.yaml", proxy_config(node))
    containerd = Program(host, "containerd")
    if containerd.pid is None:
        start_program(host, "containerd")
    what = f"containerd answers on {node.name}"
    wait_until(what, 30, lambda: host.succeeds(*CTR, "version"), str(containerd.log))


def ensure_agents(host: RunningMachine) -> None:
    """Starts the kubelet and kube-proxy; the API server has to answer already."""
    for name in ("kubelet", "kube-proxy"):
        if Program(host, name).pid is None:
            start_program(host, name)
