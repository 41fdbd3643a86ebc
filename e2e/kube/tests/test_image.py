"""Images: the same files give the same bytes, and what is missing is said."""

import json
import shutil
import tarfile
import tempfile
import unittest
from pathlib import Path

from cluster import images
from cluster.oci import Image, described
from cluster.say import Failure

TRUE = shutil.which("true")


def two_files(reverse: bool) -> Image:
    image = Image("hither.test/two:1", "amd64", ["/bin/one"], user="65532:65532")
    files = [("bin/one", b"one"), ("etc/two", b"two")]
    for path, data in reversed(files) if reverse else files:
        image.add(path, data)
    return image


class Archive(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def test_the_order_in_which_files_are_added_does_not_matter(self):
        one, other = self.directory / "one.tar", self.directory / "other.tar"
        self.assertEqual(two_files(False).write(one), two_files(True).write(other))
        self.assertEqual(one.read_bytes(), other.read_bytes())

    def test_name_and_digest_are_read_back(self):
        path = self.directory / "image.tar"
        written = two_files(False).write(path)
        self.assertEqual(described(path), ("hither.test/two:1", written))

    def test_a_changed_byte_changes_the_digest(self):
        changed = two_files(False)
        changed.add("etc/two", b"twO")
        path = self.directory / "image.tar"
        self.assertNotEqual(two_files(False).write(path), changed.write(path))

    def test_every_blob_is_what_its_descriptor_says(self):
        path = self.directory / "image.tar"
        two_files(False).write(path)
        with tarfile.open(path) as archive:
            index = json.load(archive.extractfile("index.json"))
            manifest = self.blob(archive, index["manifests"][0])
            config = self.blob(archive, json.loads(manifest)["config"])
            layer = self.blob(archive, json.loads(manifest)["layers"][0])
        self.assertEqual(json.loads(config)["config"]["User"], "65532:65532")
        self.assertIn(b"bin/one", layer)

    def blob(self, archive: tarfile.TarFile, descriptor: dict) -> bytes:
        name = "blobs/" + descriptor["digest"].replace(":", "/")
        data = archive.extractfile(name).read()
        self.assertEqual(len(data), descriptor["size"])
        return data

    def test_the_hither_image_is_the_same_twice_and_has_what_it_needs(self):
        shutil.copy(TRUE, self.directory / "hither")
        written = []
        for _ in range(2):
            image = images.hither(self.directory, ["hither"], ["hither-csi"], Path(TRUE))
            written.append(image.write(self.directory / "image.tar"))
        self.assertEqual(written[0], written[1])
        self.assertEqual(image.user, "65532:65532")
        for path in ("usr/local/bin/hither", "usr/local/bin/etcd", "usr/bin/fusermount3",
                     "etc/passwd", "etc/ssl/certs/ca-certificates.crt"):
            self.assertIn(path, image.files)
        self.assertTrue(any("libc.so" in path for path in image.files))
        self.assertNotIn("usr/local/bin/hither-csi", image.files)

    def test_a_missing_binary_is_named(self):
        with self.assertRaisesRegex(Failure, "no hither in "):
            images.hither(self.directory, ["hither"], [], Path(TRUE))

    def test_a_tree_holds_the_same_files(self):
        image = two_files(False)
        image.add_link("bin/alias", "one")
        image.unpack(self.directory / "root")
        root = self.directory / "root"
        self.assertEqual((root / "bin/alias").read_bytes(), b"one")
        self.assertEqual((root / "etc/two").read_bytes(), b"two")


class Reference(unittest.TestCase):
    def test_without_a_registry_the_name_stays(self):
        self.assertEqual(images.reference("hither.test/hither:dev", None), "hither.test/hither:dev")

    def test_a_registry_with_a_path_takes_the_place_of_the_domain(self):
        name = images.reference("hither.test/hither:dev", "example.org:5000/team/")
        self.assertEqual(name, "example.org:5000/team/hither:dev")
