"""What has to be installed: names what is missing and installs it on Debian and its kin."""

import os
import shutil
import subprocess
from pathlib import Path

from .say import Failure, say

# A file or command that shows the package to be there, and the package.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
NEEDED = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "tini": "tini",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "ps": "procps",
    "openssl": "openssl",
    "/bin/busybox": "busybox-static",
    "fusermount3": "fuse3",
    CERTIFICATES: "ca-certificates",
    "strip": "binutils",
}


def is_there(thing: str) -> bool:
    if thing.startswith("/"):
        return Path(thing).exists()
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return shutil.which(thing, path=path) is not None


def ensure(needed: dict[str, str]) -> None:
    missing = sorted({package for thing, package in needed.items() if not is_there(thing)})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Failure(f"install these first (named as in Debian): {' '.join(missing)}")
    say(f"installing {' '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(f"{' '.join(command)}\n{done.stderr.strip()}")
