#!/usr/bin/env bash
# Tests on real clusters and mounts. Builds the binary under test (with etcd: that needs protoc, and
# the tests need etcd; scripts/setup.sh installs both) and installs the suites first.
# Arguments go to cargo test, for example: e2e/run.sh --test faults
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
case " $* " in
*" --test "*) suites=("$@") ;;
*) suites=("$@"); for file in e2e/tests/*.rs; do suites+=(--test "$(basename "$file" .rs)"); done ;;
esac
# The driver ends at named places when a test wants it to. In the whole workspace: see the Makefile.
what=(--quiet --workspace --features hither/etcd,hither-csi/kill-points,hither-e2e/live)
cargo build "${what[@]}" --bins --test basics
export HITHER_BIN="$target/debug/hither"
export HITHER_CSI_BIN="$target/debug/hither-csi"
# The CSI suite is one of the programs of the test cluster (the first time they take a while).
export HITHER_CSI_SANITY="$(e2e/kube/programs/build.sh)/bin/csi-sanity"
export PJDFSTEST_BIN="$target/tools/bin/pjdfstest"
if [ ! -x "$PJDFSTEST_BIN" ]; then
    echo "installing pjdfstest"
    CARGO_TARGET_DIR="$target/tools/build" \
        cargo install --quiet --version 0.2.2 --root "$target/tools" pjdfstest
fi
cargo test "${what[@]}" "${suites[@]}" -- --test-threads=1
