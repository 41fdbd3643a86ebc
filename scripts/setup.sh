#!/usr/bin/env bash
# Installs what is missing from Debian's packages: quick when nothing is.
set -euo pipefail
missing=()
need() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || missing+=("$2"); }
need cc gcc
need fusermount3 fuse3
need fio fio
need nft nftables
need ip iproute2
need setfattr attr
need python3 python3
need etcd etcd-server
need protoc protobuf-compiler
[ -e /usr/include/google/protobuf/descriptor.proto ] || missing+=(libprotobuf-dev)
if [ "${#missing[@]}" -gt 0 ]; then
    echo "installing: ${missing[*]}"
    sudo=""; [ "$(id -u)" -eq 0 ] || sudo=sudo
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq "${missing[@]}" >/dev/null
fi
command -v cargo >/dev/null || { echo "install Rust first: https://rustup.rs"; exit 1; }
[ -e /dev/fuse ] || { echo "there is no /dev/fuse: load the fuse module"; exit 1; }
