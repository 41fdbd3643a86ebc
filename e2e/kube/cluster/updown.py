"""The cluster as a whole: up, down and what state it is in."""

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from . import addons, cgroup, controlplane, load, needs, network, node, pki, programs
from .kubectl import Kubectl
from .layout import CONTROL, MACHINES, NODES, Machine, State
from .machine import RunningMachine
from .program import Program
from .say import Failure, say


@contextmanager
def alone(state: State):
    """One at a time: a second `up` waits for the first and finds everything done."""
    state.root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(state.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):
            # Only goes when nothing was put there.
            state.root.rmdir()


def up(state: State) -> None:
    """Brings up what is not up yet, whatever that is."""
    lacking = needs.missing(state)
    if lacking:
        raise Failure("this machine lacks\n  " + "\n  ".join(lacking))
    built = programs.ensure()
    with alone(state):
        network.check_free(state)
        same_programs(state, built)
        network.ensure_bridge(state)
        pki.ensure(state)
        archives = load.archives_at_start(built)
        kubectl = Kubectl(built / "bin/kubectl", state.kubeconfig)
        control = ensure_machine(state, CONTROL, built)
        with ThreadPoolExecutor() as pool:
            runtimes = [pool.submit(start_node, state, each, built, archives) for each in NODES]
            controlplane.ensure(state, control, kubectl)
            hosts = [runtime.result() for runtime in runtimes]
            list(pool.map(node.ensure_agents, hosts))
        addons.ensure(kubectl, built / "crds")
        say("waiting for nodes and pods")
        for each in NODES:
            kubectl.wait(f"node/{each.name}", "create", 60)
            kubectl.wait(f"node/{each.name}", "condition=Ready", 120)
        addons.wait(kubectl)


def same_programs(state: State, built: Path) -> None:
    """A running cluster keeps the programs it was started with."""
    if not state.programs.exists():
        state.programs.write_text(f"{built}\n")
    elif state.programs.read_text().strip() != str(built):
        raise Failure("the cluster that is up runs other programs; `make kube-down` ends it")


def ensure_machine(state: State, machine: Machine, built: Path) -> RunningMachine:
    host = RunningMachine(state, machine)
    if host.pid is None:
        say(f"starting {machine.name}")
        host.start(built / "bin")
        network.connect(host)
    else:
        heal(host)
    return host


def heal(host: RunningMachine) -> None:
    """Takes back what a test did to a machine and did not undo."""
    if network.is_cut(host.machine):
        say(f"{host.machine.name}: the link was cut")
        network.restore(host.machine)
    if any(Program(host, name).condition == "stopped" for name in program_names(host.machine)):
        say(f"{host.machine.name}: processes were stopped")
        host.signal_all("CONT")


def program_names(machine: Machine) -> tuple[str, ...]:
    return node.PROGRAMS if machine.is_node else tuple(controlplane.programs())


def start_node(state: State, machine: Machine, built: Path, archives: list[Path]) -> RunningMachine:
    host = ensure_machine(state, machine, built)
    node.ensure_runtime(state, host)
    load.load_into(host, tuple(archives))
    return host


def down(state: State) -> None:
    """Ends everything that `up` started and removes what it made; safe to repeat."""
    if os.geteuid() != 0:
        raise Failure("only root can end the cluster")
    if not state.root.exists() and network.owner() != str(state.root):
        say("nothing is up")
        return
    with alone(state):
        # All at once, so that nobody has time to miss the others.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: RunningMachine(state, each).kill(), MACHINES))
        if network.owner() == str(state.root):
            network.remove()
        cgroup.remove()
        shutil.rmtree(state.root)


def report(state: State) -> list[str]:
    """One line for each machine: what of it runs."""
    lines = []
    for machine in MACHINES:
        host = RunningMachine(state, machine)
        if host.pid is None:
            lines.append(f"{machine.name}: down")
            continue
        states = [f"{name} {Program(host, name).condition}" for name in program_names(machine)]
        link = "link cut" if network.is_cut(machine) else "link up"
        where = f"zone {machine.zone}, " if machine.is_node else ""
        lines.append(f"{machine.name}: {where}{machine.address}, {link}, {', '.join(states)}")
    return lines
