#!/usr/bin/env bash
# Measures Hither beside bare FUSE, the bare disk and, with PEERS=1, MooseFS, in one run.
#
#   bench/run.sh PATH_TO_HITHER
#
# Environment:
#   PEERS=1              also install (Debian's packages) and measure MooseFS; needs root
#   BENCH_QUICK=1        small sizes, one repetition: about two minutes
#   BENCH_LARGE=1        also one directory of 10 thousand to 2 million files: long
#   BENCH_DIR=DIR        where to work (default /var/tmp): the disk that is measured
#   BENCH_MINUTES=N      no measurement is begun after N minutes
#   BENCH_ONLY=a,b       only these stages; bench/run.sh --list names them
#   BENCH_SYSTEMS=a,b    only these of disk, bindfs, hither, moosefs
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

missing=()
need() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || missing+=("$2"); }
need python3 python3
need fio fio
need bindfs bindfs
need git git
need tar tar
need fusermount3 fuse3
if [ "${PEERS:-0}" = 1 ]; then
    need ip iproute2
    need nsenter util-linux
    need mfsmaster moosefs-master
    need mfschunkserver moosefs-chunkserver
    need mfsmount moosefs-client
fi
if [ "${#missing[@]}" -gt 0 ]; then
    echo "installing: ${missing[*]}" >&2
    sudo=(); [ "$(id -u)" -eq 0 ] || sudo=(sudo)
    "${sudo[@]}" apt-get update -qq
    # RUNLEVEL=1: no package starts a service of its own.
    "${sudo[@]}" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

target=${CARGO_TARGET_DIR:-$here/../target}/fsload
cargo build --release --quiet --manifest-path "$here/fsload/Cargo.toml" --target-dir "$target"

# It takes this shell's place: signals reach it, and it ends whatever it started.
exec python3 "$here/harness" --fsload "$target/release/fsload" "$@"
