#!/usr/bin/env python3
"""Proves that the cluster does what the tests on it rely on: one line a check, and the first that
fails ends it.

On a cluster that somebody brought along (KUBECONFIG), images come from HITHER_REGISTRY, and the
check that cuts a node's link is left out.
"""

import sys

from cluster import images, network, programs, push
from cluster.kubectl import Kubectl, given_kubeconfig
from cluster.layout import State, find
from cluster.machine import RunningMachine
from cluster.say import Failure, say, wait_until
from scenarios import manifests
from scenarios.scenario import expect

NAMESPACE = "hither-smoke"


class Smoke:
    """The checks, in order; each is a method whose name says what holds after it."""

    def __init__(self, kubectl: Kubectl, state: State | None):
        self.kubectl = kubectl
        self.state = state
        registry = push.registry() if state is None else None
        self.busybox = images.reference(images.BUSYBOX_IMAGE, registry)
        self.hither = images.reference(images.HITHER_IMAGE, registry)

    def run(self) -> int:
        checks = [
            self.three_zones_are_ready, self.pods_spread_over_zones, self.a_service_answers_by_name,
            self.logs_and_exec_work, self.the_default_class_gives_a_volume,
            self.mounts_leave_a_privileged_pod, self.hither_runs_as_non_root,
        ]
        if self.state is not None:
            checks.append(self.a_cut_node_is_missed_and_comes_back)
        self.clean()
        try:
            self.kubectl("create", "namespace", NAMESPACE)
            label = "pod-security.kubernetes.io/enforce=privileged"
            self.kubectl("label", "namespace", NAMESPACE, label)
            for check in checks:
                self.prove(check)
        finally:
            self.clean()
        return len(checks)

    def prove(self, check) -> None:
        text = check.__name__.replace("_", " ")
        try:
            check()
        except Failure:
            say(f"FAILED: {text}; the namespace's events:")
            say(self.kubectl("events", "--namespace", NAMESPACE, check=False))
            raise
        say(f"ok: {text}")

    def clean(self) -> None:
        self.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s")

    def of(self, *arguments: object) -> str:
        return self.kubectl("--namespace", NAMESPACE, *arguments)

    def apply(self, manifest: str) -> None:
        self.kubectl("--namespace", NAMESPACE, "apply", "-f", "-", stdin=manifest)

    def zone_of_node(self) -> dict[str, str]:
        nodes = [node["metadata"] for node in self.kubectl.json("nodes")["items"]]
        return {node["name"]: node["labels"].get(manifests.ZONE, "") for node in nodes}

    def three_zones_are_ready(self) -> None:
        self.kubectl.wait("nodes", "condition=Ready", 60, "--all")
        zones = {zone for zone in self.zone_of_node().values() if zone}
        expect(len(zones) >= 3, f"three zones, found {sorted(zones)}")

    def pods_spread_over_zones(self) -> None:
        self.apply(spread_pods(self.busybox))
        self.of("rollout", "status", "statefulset/web", "--timeout=90s")
        zone_of_node = self.zone_of_node()
        pods = self.kubectl.json("--namespace", NAMESPACE, "pods", "--selector=app=web")["items"]
        zones = {zone_of_node[pod["spec"]["nodeName"]] for pod in pods}
        expect(len(pods) == 3 and len(zones) == 3, f"one pod a zone, found {sorted(zones)}")

    def a_service_answers_by_name(self) -> None:
        for asking in range(3):
            seen: set[str] = set()
            for _ in range(40):
                seen.add(self.fetch(asking, f"web.{NAMESPACE}.svc.cluster.local").strip())
                if len(seen) == 3:
                    break
            expect(seen == {"web-0", "web-1", "web-2"}, f"web-{asking} reached only {sorted(seen)}")
            for other in range(3):
                name = self.fetch(asking, f"web-{other}.peers").strip()
                expect(name == f"web-{other}", f"web-{asking} asked web-{other}, got {name!r}")

    def fetch(self, asking: int, host: str) -> str:
        command = ("timeout", "5", "wget", "-q", "-O", "-", f"http://{host}:8080/name")
        return self.of("exec", f"web-{asking}", "--", *command)

    def logs_and_exec_work(self) -> None:
        for number in range(3):
            pod = f"web-{number}"
            expect(self.of("logs", pod).startswith(f"serving {pod}"), f"the log of {pod}")
            said = self.of("exec", pod, "--", "hostname").strip()
            expect(said == pod, f"exec in {pod} said {said!r}")

    def the_default_class_gives_a_volume(self) -> None:
        for number in range(3):
            said = self.of("exec", f"web-{number}", "--", "cat", "/data/name").strip()
            expect(said == f"web-{number}", f"the volume of web-{number} holds {said!r}")

    def mounts_leave_a_privileged_pod(self) -> None:
        """A mounter's pod mounts below a directory of the node; another pod there sees it."""
        self.apply(mounter_pods(self.busybox))
        self.of("wait", "pod/mounter", "pod/reader", "--for=condition=Ready", "--timeout=60s")
        self.of("exec", "mounter", "--", "test", "-c", "/dev/fuse")
        mount = "mount -t tmpfs inside /shared/point && echo seen >/shared/point/file"
        self.of("exec", "mounter", "--", "sh", "-c", mount)
        said = self.of("exec", "reader", "--", "cat", "/shared/point/file").strip()
        expect(said == "seen", f"a mount made in one pod, seen by another: {said!r}")
        self.of("exec", "mounter", "--", "umount", "/shared/point")
        self.of("exec", "reader", "--", "test", "!", "-e", "/shared/point/file")
        self.of("delete", "pod", "mounter", "reader", "--wait=true", "--grace-period=1")

    def hither_runs_as_non_root(self) -> None:
        self.apply(version_pod(self.hither))
        done = "jsonpath={.status.phase}=Succeeded"
        self.of("wait", "pod/version", f"--for={done}", "--timeout=60s")
        said = self.of("logs", "version").strip()
        expect(said.startswith("hither "), f"hither --version said {said!r}")

    def a_cut_node_is_missed_and_comes_back(self) -> None:
        node = find("c")
        network.cut(node)
        try:
            self.kubectl.wait(f"node/{node.name}", "condition=Ready=Unknown", 60)
        finally:
            network.restore(node)
        self.kubectl.wait(f"node/{node.name}", "condition=Ready", 60)
        pods = self.kubectl.json("--namespace", NAMESPACE, "pods", "--selector=app=web")["items"]
        there = next(p["metadata"]["name"] for p in pods if p["spec"]["nodeName"] == node.name)
        number = int(there.rsplit("-", 1)[1])
        wait_until(f"{there} is reached again", 60, lambda: self.answers((number + 1) % 3, there))

    def answers(self, asking: int, name: str) -> bool:
        try:
            return self.fetch(asking, f"{name}.peers").strip() == name
        except Failure:
            return False


def spread_pods(image: str) -> str:
    serve = "hostname >/data/name; echo serving $(hostname); exec httpd -f -p 8080 -h /data"
    probe = {"httpGet": {"path": "/name", "port": 8080}, "periodSeconds": 1}
    data = {"metadata": {"name": "data"}, "spec": manifests.claim_spec("ReadWriteOnce", "1Mi")}
    main = manifests.container(image, "sh", "-c", serve, readinessProbe=probe,
                               volumeMounts=[{"name": "data", "mountPath": "/data"}])
    spec = {"terminationGracePeriodSeconds": 1, "containers": [main]}
    return manifests.together(
        manifests.service("web", "web", 8080),
        manifests.service("peers", "web", 8080, clusterIP="None", publishNotReadyAddresses=True),
        manifests.one_in_each_zone("web", "peers", 3, spec, volumeClaimTemplates=[data]),
    )


def mounter_pods(image: str) -> str:
    """Two pods of one node that share a directory of it."""
    shared = {"path": "/var/local/hither-smoke", "type": "DirectoryOrCreate"}
    beside = {"topologyKey": manifests.HOST, "labelSelector": {"matchLabels": {"app": "mounts"}}}

    def pod(name: str, propagation: str, privileged: bool, command: str) -> dict:
        mount = {"name": "shared", "mountPath": "/shared", "mountPropagation": propagation}
        main = manifests.container(image, "sh", "-c", command, volumeMounts=[mount],
                                   securityContext={"privileged": privileged})
        made = manifests.thing("v1", "Pod", name, spec={
            "affinity": {"podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [beside]}},
            "containers": [main],
            "volumes": [{"name": "shared", "hostPath": shared}],
        })
        made["metadata"]["labels"] = {"app": "mounts"}
        return made

    return manifests.together(
        pod("mounter", "Bidirectional", True, "mkdir -p /shared/point; exec sleep infinity"),
        pod("reader", "HostToContainer", False, "exec sleep infinity"),
    )


def version_pod(image: str) -> str:
    confined = {"runAsNonRoot": True, "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    main = manifests.container(image, "hither", "--version", securityContext=confined)
    spec = {"restartPolicy": "Never", "containers": [main]}
    return manifests.together(manifests.thing("v1", "Pod", "version", spec=spec))


def main() -> None:
    state = State.chosen()
    given = given_kubeconfig(state.kubeconfig)
    kubectl = Kubectl(programs.ensure() / "bin/kubectl", None if given else state.kubeconfig)
    if not given:
        RunningMachine(state, find("control")).required_pid()
    passed = Smoke(kubectl, None if given else state).run()
    print(f"{passed} passed, 0 failed")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"smoke: {failure}\n0 passed, 1 failed")
    except KeyboardInterrupt:
        sys.exit(130)
