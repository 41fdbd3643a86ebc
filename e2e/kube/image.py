#!/usr/bin/env python3
"""Writes Hither's container image, or the one for tests' pods, as an OCI archive.

  image.py hither OUT.tar --bin DIR [--require NAME …] [--optional NAME …] [--etcd FILE]
  image.py tree OUT --bin DIR …       the same files below a directory, for a Dockerfile
  image.py busybox OUT.tar            a shell and its small tools

Prints the image's digest; the same binaries give the same digest.
"""

import argparse
import sys
from pathlib import Path

from cluster import images, programs
from cluster.say import Failure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, text in (("hither", "the image with Hither's programs"), ("tree", "its files")):
        hither = verbs.add_parser(name, help=text)
        hither.add_argument("out", type=Path)
        hither.add_argument("--bin", type=Path, required=True, help="where the built binaries are")
        hither.add_argument("--require", nargs="+", default=["hither"], metavar="NAME",
                            help="binaries that must be there")
        hither.add_argument("--optional", nargs="*", default=["hither-operator", "hither-csi"],
                            metavar="NAME", help="binaries taken along when they are there")
        hither.add_argument("--etcd", type=Path, help="default: the test cluster's")
    busybox = verbs.add_parser("busybox", help="the image for tests' pods")
    busybox.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.verb == "busybox":
        image = images.busybox()
    else:
        etcd = options.etcd or programs.ensure() / "bin/etcd"
        image = images.hither(options.bin, options.require, options.optional, etcd)
    if options.verb == "tree":
        options.out.mkdir()
        return image.unpack(options.out)
    print(f"{image.name} {image.write(options.out)}")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"image: {failure}")
