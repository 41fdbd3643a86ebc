#!/usr/bin/env bash
# Tests on real clusters and mounts. Builds the binary under test first.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
cargo build --quiet --bin hither
export HITHER_BIN="$target/debug/hither"
cargo test --quiet -p hither-e2e --features live "$@" -- --test-threads=1
