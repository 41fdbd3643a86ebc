#!/usr/bin/env python3
"""Writes Hither's container image, or the one for tests' pods, as an OCI archive.

  image.py hither OUT.tar --bin DIR [--require NAME …] [--optional NAME …] [--etcd FILE]
  image.py busybox OUT.tar
  image.py push OUT.tar REGISTRY/NAME:TAG

Prints the image's digest; the same binaries give the same digest.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from cluster import images, packages, programs
from cluster.say import Failure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    hither = verbs.add_parser("hither", help="the image with Hither's programs")
    hither.add_argument("out", type=Path)
    hither.add_argument("--bin", type=Path, required=True, help="where the built binaries are")
    hither.add_argument("--require", nargs="+", default=["hither"], help="binaries that must be there")
    hither.add_argument("--optional", nargs="*", default=["hither-operator", "hither-csi"],
                        help="binaries that are taken along when they are there")
    hither.add_argument("--etcd", type=Path, help="default: the one built for the test cluster")
    busybox = verbs.add_parser("busybox", help="the image for tests' pods")
    busybox.add_argument("out", type=Path)
    push = verbs.add_parser("push", help="an archive to a registry, by skopeo and its logins")
    push.add_argument("archive", type=Path)
    push.add_argument("name", help="REGISTRY/NAME:TAG")
    options = parser.parse_args()
    if options.verb == "push":
        return push_archive(options.archive, options.name)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.verb == "hither":
        etcd = options.etcd or programs.ensure() / "bin/etcd"
        image = images.hither(options.bin, options.require, options.optional, etcd)
    else:
        image = images.busybox()
    print(f"{image.name} {image.write(options.out)}")


def push_archive(archive: Path, name: str) -> None:
    packages.ensure({"skopeo": "skopeo"})
    command = ["skopeo", "copy", "--quiet", f"oci-archive:{archive}", f"docker://{name}"]
    if subprocess.run(command).returncode != 0:
        raise Failure(f"could not push {name}; `skopeo login` or `docker login` may be missing")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"image: {failure}")
