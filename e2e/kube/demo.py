#!/usr/bin/env python3
"""Shows Hither on Kubernetes: installed, mounted in three zones, one zone lost.

  demo.py [--keep]     --keep leaves everything running
"""

import argparse
import sys

from cluster import network
from cluster.layout import NODES
from cluster.say import Failure, say
from scenarios.installation import NAMESPACE, Installation
from scenarios.scenario import Scenario, checksum, expect


class Demo(Scenario):
    """three pods in three zones on one volume"""

    def show(self, *arguments: object) -> None:
        """Runs kubectl as a user would, and shows what it prints."""
        print(f"\n$ kubectl {' '.join(str(word) for word in arguments)}")
        print(self.kubectl(*arguments), flush=True)

    def heal(self) -> None:
        if self.there.own:
            for node in NODES:
                network.restore(node)

    def run(self) -> None:
        self.show("get", "-n", NAMESPACE, "hc,csp,csc")
        self.show("get", "-n", NAMESPACE, "pods", "-o", "wide")
        say("a volume, and a pod in each zone that mounts it")
        pods = self.pods_in_zones()
        self.show("get", "-n", self.namespace, "pvc,pods", "-o", "wide")
        self.write(pods)
        self.read_own(pods)
        if self.there.own:
            self.lose_a_zone(pods)

    def write(self, pods: dict[str, str]) -> None:
        self.sums = {}
        for zone, pod in pods.items():
            self.sh(pod, f"dd if=/dev/urandom of=/data/{zone} bs=1M count=64 2>/dev/null && sync")
            self.sums[zone] = checksum(self.sh(pod, f"sha256sum /data/{zone}"))

    def read_own(self, pods: dict[str, str]) -> None:
        say("every pod reads what the pods of the other zones wrote")
        before = self.there.demo.read_by_zone()
        for zone, pod in pods.items():
            for other in pods:
                if other != zone:
                    seen = checksum(self.sh(pod, f"sha256sum /data/{other}"))
                    expect(seen == self.sums[other], "the bytes that were written")
        print(f"\n{'zone':8} {'its pod read':>14} {'its chunkservers gave':>22}")
        for server in sorted(self.there.demo.servers(), key=lambda server: server.zone):
            if server.zone in pods:
                given = (server.read_bytes - before[server.zone]) >> 20
                print(f"{server.zone:8} {128:>10} MiB {given:>18} MiB")
        sys.stdout.flush()

    def lose_a_zone(self, pods: dict[str, str]) -> None:
        lost = next(node for node in NODES if node.name != self.there.demo.manager_node())
        say(f"the link of {lost.zone} is cut")
        network.cut(lost)
        for zone, pod in pods.items():
            if zone == lost.zone:
                continue
            seen = checksum(self.sh(pod, f"sha256sum /data/{lost.zone}"))
            expect(seen == self.sums[lost.zone], "the bytes that were written")
            self.sh(pod, f"echo from {zone} >/data/without-{lost.zone}-{zone}")
            say(f"{pod} in {zone} reads and writes on")
        self.kubectl.wait(f"node/{lost.name}", "condition=Ready=Unknown", 60)
        self.show("get", "nodes")
        network.restore(lost)
        say(f"{lost.zone} is back")
        self.kubectl.wait(f"node/{lost.name}", "condition=Ready", 90)
        self.there.of("wait", "hithercluster/demo", "--for=condition=Ready", "--timeout=120s")
        self.show("get", "-n", NAMESPACE, "hc,csp,csc")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    there = Installation()
    there.install()
    demo = Demo(there)
    demo.begin()
    demo.run()
    if options.keep:
        print('It is left running. eval "$(e2e/kube/kube env)" sets up kubectl;'
              " `make kube-down` ends it.")
        return
    demo.clean()
    there.uninstall()


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"demo: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
