"""Everything one wants to read after a test that failed, in one folder."""

import shutil
from pathlib import Path

from .kubectl import Kubectl
from .layout import MACHINES, State
from .machine import RunningMachine

# File name and the kubectl command whose output goes there.
VIEWS = {
    "events.txt": ("events", "--all-namespaces"),
    "pods.txt": ("get", "pods", "--all-namespaces", "-o", "wide"),
    "describe-pods.txt": ("describe", "pods", "--all-namespaces"),
    "describe-nodes.txt": ("describe", "nodes"),
    "volumes.txt": ("get", "pv,pvc,storageclass,csinodes,volumeattachments", "-A", "-o", "wide"),
    "api-resources.txt": ("api-resources",),
}


def collect(state: State, kubectl: Kubectl, folder: Path) -> None:
    """What the API server knows, pods' logs, and for a cluster of ours what the machines know.

    Takes what it can get: a part of the cluster being dead is the usual reason to be called.
    """
    folder.mkdir(parents=True, exist_ok=True)
    timeout = "--request-timeout=10s"
    for name, command in VIEWS.items():
        (folder / name).write_text(kubectl(*command, timeout, check=False))
    collect_objects(kubectl, folder, timeout)
    collect_logs(kubectl, folder, timeout)
    for machine in MACHINES:
        host = RunningMachine(state, machine)
        if host.pid is not None:
            collect_machine(host, folder / "machines" / machine.name)
    if state.log.exists():
        shutil.copytree(state.log, folder / "programs", dirs_exist_ok=True)


def collect_objects(kubectl: Kubectl, folder: Path, timeout: str) -> None:
    """Every object of Hither's own kinds, and the workloads."""
    own = kubectl("api-resources", "--verbs=list", "-o", "name", timeout, check=False).split()
    kinds = [kind for kind in own if "hither" in kind]
    kinds += ["statefulsets", "deployments", "daemonsets", "services", "configmaps", "pods"]
    for kind in kinds:
        text = kubectl("get", kind, "--all-namespaces", "-o", "yaml", timeout, check=False)
        (folder / f"{kind}.yaml").write_text(text)


def collect_logs(kubectl: Kubectl, folder: Path, timeout: str) -> None:
    template = "{range .items[*]}{.metadata.namespace}/{.metadata.name}{'\\n'}{end}"
    pods = kubectl("get", "pods", "-A", "-o", f"jsonpath={template}", timeout, check=False).split()
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    for pod in pods:
        namespace, name = pod.split("/")
        common = (f"--namespace={namespace}", name, "--all-containers", "--prefix", timeout)
        (logs / f"{namespace}.{name}.log").write_text(kubectl("logs", *common, check=False))
        before = kubectl("logs", "--previous", *common, check=False)
        if before:
            (logs / f"{namespace}.{name}.previous.log").write_text(before)


def collect_machine(host: RunningMachine, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    views = {
        "processes.txt": ("ps", "axfo", "pid,ppid,stat,rss,etimes,wchan:20,args"),
        "mounts.txt": ("cat", "/proc/self/mountinfo"),
        "network.txt": ("sh", "-c", "ip address; ip route; nft list ruleset"),
    }
    for name, command in views.items():
        (folder / name).write_text(host.run(*command, check=False))
