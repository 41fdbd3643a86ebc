"""What is in the way is named so that somebody can act."""

import unittest

from scenarios.leftovers import described


class Leftovers(unittest.TestCase):
    def test_a_cluster_that_waits_says_for_what(self) -> None:
        line = described({
            "kind": "HitherCluster",
            "metadata": {"name": "demo", "namespace": "team", "deletionTimestamp": "2026-01-02T03:04:05Z",
                         "finalizers": ["hither.dev/cluster"]},
            "status": {"conditions": [
                {"type": "Ready", "status": "True", "message": "all is well"},
                {"type": "DeletionBlocked", "status": "True", "message": "volumes: pvc-1"},
            ]},
        })
        self.assertEqual(line, "HitherCluster demo in namespace team; going since 2026-01-02T03:04:05Z;"
                               " kept by hither.dev/cluster; volumes: pvc-1")

    def test_one_that_nobody_has_deleted(self) -> None:
        line = described({"kind": "ChunkserverPool", "metadata": {"name": "main", "namespace": "team"}})
        self.assertEqual(line, "ChunkserverPool main in namespace team")


if __name__ == "__main__":
    unittest.main()
