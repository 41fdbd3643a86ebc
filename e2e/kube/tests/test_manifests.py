"""The manifests are what kubectl can read."""

import json
import unittest

from scenarios import manifests
import smoke

IMAGE = "example.org/busybox:1"


def objects(text: str) -> list[dict]:
    return [json.loads(part) for part in text.split("\n---\n")]


class Manifests(unittest.TestCase):
    def test_every_one_is_complete(self) -> None:
        texts = [
            manifests.namespace("one", "hither.dev/e2e"),
            manifests.claim("data", "standard"),
            manifests.pod("one", IMAGE, "data", "node-a"),
            manifests.readers(IMAGE, "data"),
            manifests.movable("one", IMAGE, "data", "eu-1a"),
            manifests.attributes_class("fast", **{"class": "fast"}),
            smoke.spread_pods(IMAGE), smoke.mounter_pods(IMAGE), smoke.version_pod(IMAGE),
        ]
        for one in (one for text in texts for one in objects(text)):
            self.assertTrue(one["apiVersion"] and one["kind"] and one["metadata"]["name"])

    def test_a_claim_is_mounted(self) -> None:
        (pod,) = objects(manifests.pod("one", IMAGE, "mine"))
        self.assertNotIn("nodeName", pod["spec"])
        (volume,) = pod["spec"]["volumes"]
        self.assertEqual(volume["persistentVolumeClaim"], {"claimName": "mine"})
        (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
        self.assertEqual(mount["name"], volume["name"])

    def test_selectors_find_the_pods(self) -> None:
        _, pods = objects(manifests.readers(IMAGE, "data"))
        labels = pods["spec"]["template"]["metadata"]["labels"]
        self.assertEqual(pods["spec"]["selector"]["matchLabels"], labels)
        (spread,) = pods["spec"]["template"]["spec"]["topologySpreadConstraints"]
        self.assertEqual(spread["labelSelector"]["matchLabels"], labels)


if __name__ == "__main__":
    unittest.main()
