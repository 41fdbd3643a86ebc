"""Scenarios with a cluster of their own, in a namespace that the operator is told to watch."""

from .hither import HitherCluster
from .installation import CLUSTER, SAMPLES
from .scenario import Scenario


class GuestScenario(Scenario):
    """Has a second namespace, for a cluster. Its volumes go before the cluster, and all of that
    before the operator no longer looks there."""

    # Name of the cluster's resource.
    cluster_name = CLUSTER

    @property
    def home(self) -> str:
        """Namespace of the cluster."""
        return f"{self.namespace}-cluster"

    @property
    def guest(self) -> HitherCluster:
        return HitherCluster(self.kubectl, self.home, self.cluster_name)

    def begin(self) -> None:
        super().begin()
        self.there.new_namespace(self.home)
        self.there.chart(watchNamespaces=f"{{{self.home}}}")

    def clean(self) -> None:
        super().clean()
        if not self.there.has_namespace(self.home):
            return
        self.guest.of("delete", "hithercluster,chunkserverpool,chunkstorageclass", "--all",
                      "--timeout=120s")
        self.guest.of("delete", "pvc", "--all", "--timeout=120s")
        self.there.chart()
        self.kubectl("delete", "namespace", self.home, "--wait=false")

    def apply_samples(self, *parts: str) -> None:
        for part in parts:
            self.guest.of("apply", "-f", SAMPLES / part)
