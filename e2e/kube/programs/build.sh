#!/usr/bin/env bash
# Builds the Kubernetes programs of the test cluster from the two Go modules beside this file and
# prints the directory they are in. Nothing is built when they are there already: the directory is
# named by the hash of everything that decides what comes out.
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "kube programs: $*" >&2; }

inputs=(build.sh {kubernetes,rest}/go.{mod,sum} rest/*/main.go)
hash=$(sha256sum "${inputs[@]}" | sha256sum | cut -c1-16)
cache=${HITHER_KUBE_CACHE:-$HOME/.cache/hither-kube}/$hash
if [ -e "$cache/complete" ]; then
    echo "$cache"
    exit 0
fi

command -v go >/dev/null || { say "install Go 1.26 or later first: https://go.dev/dl"; exit 1; }
mkdir -p "$cache/bin" "$cache/crds"
exec 9>"$cache/lock"
flock 9
if [ -e "$cache/complete" ]; then
    echo "$cache"
    exit 0
fi
say "building into $cache/bin; about 10 minutes on two cores the first time"

install() { # module directory, linker flags, packages
    local module=$1 linker="-s -w $2"
    shift 2
    say "$*"
    CGO_ENABLED=0 GOBIN="$cache/bin" GOFLAGS=-buildvcs=false \
        nice -n "${HITHER_KUBE_NICE:-10}" \
        go -C "$module" install -trimpath -ldflags "$linker" "$@" >&2
}

# What `kubectl version` and version skew checks read; without it everything says v0.0.0-master.
kubernetes=$(go -C kubernetes list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${kubernetes#v*.}
flags=
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    flags+=" -X $package.gitVersion=$kubernetes -X $package.gitTreeState=clean"
    flags+=" -X $package.gitMajor=1 -X $package.gitMinor=${minor%%.*}"
done
install kubernetes "$flags" tool

# After the first: what both need has the same version in both go.mod files, and is compiled once.
helm=$(go -C rest list -f '{{.Module.Version}}' helm.sh/helm/v4/cmd/helm)
install rest "-X helm.sh/helm/v4/internal/version.version=$helm" ./coredns ./etcd ./local-volumes tool

# The snapshot CRDs come with the snapshotter's client module.
snapshotter=$(go -C rest list -m -f '{{.Dir}}' github.com/kubernetes-csi/external-snapshotter/client/v8)
cp "$snapshotter"/config/crd/*snapshot.storage.k8s.io_*.yaml "$cache/crds/"
chmod -R u+w "$cache/crds"
: >"$cache/complete"
echo "$cache"
