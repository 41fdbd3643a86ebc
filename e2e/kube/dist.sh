#!/usr/bin/env bash
# Prints the chart as plain objects, custom resource definitions first, in the namespace `hither`.
set -euo pipefail
cd "$(dirname "$0")/../.."
programs=$(e2e/kube/programs/build.sh)
cat <<'NAMESPACE'
apiVersion: v1
kind: Namespace
metadata:
  name: hither
NAMESPACE
# Hooks are helm's own: a file has no uninstall to refuse and no `helm test`.
"$programs/bin/helm" template hither charts/hither --namespace hither --include-crds --no-hooks \
    --set uninstallGuard.enabled=false
