#!/usr/bin/env bash
# The scenarios, and with no scenario named the operator's tests, on the cluster that is up.
#   run.sh IMAGES [NAME …]     IMAGES: the directory with what `make e2e-image` made
set -euo pipefail
cd "$(dirname "$0")/../.."
images=$1
shift
# The name under which the cluster knows the image: on one that was brought along, its registry's.
names=$(e2e/kube/kube load "$images/hither-test.tar" "$images/busybox.tar")
e2e/kube/kube sidecars
e2e/kube/e2e.py "$@"
if [ $# -eq 0 ]; then
    eval "$(e2e/kube/kube env)"
    HITHER_IMAGE=$(head -1 <<<"$names") cargo test --quiet --workspace \
        --features hither/etcd,hither-operator/live --test live -- --test-threads=2
fi
