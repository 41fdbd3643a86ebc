# Every target installs what it needs on a fresh Debian machine and says so; it is quick when
# nothing is missing.
SHELL := /bin/bash
export CARGO_TARGET_DIR ?= $(CURDIR)/target

.PHONY: demo test bench check build install setup

setup:
	@scripts/setup.sh

# A whole cluster on this machine: three zones, every mount reads its own copy, a zone dies.
demo: setup
	cargo build --release --bin hither
	python3 scripts/demo.py "$(CARGO_TARGET_DIR)/release/hither" $(if $(KEEP),--keep)

# What is not built by default, and is checked all the same.
ALL_FEATURES := hither/etcd,hither-csi/kill-points,hither-e2e/live,hither-operator/live
check: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --workspace --all-targets --features $(ALL_FEATURES) -- -D warnings
	python3 -m unittest discover --quiet --start-directory e2e/kube/tests --top-level-directory e2e/kube
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

# Everything for tests is built in the whole workspace, with its tests' dependencies, and with these
# features (here, in e2e/run.sh and for e2e-image): with others, cargo builds most of it once more.
test: setup
	cargo test --workspace --features hither/etcd --quiet
	e2e/run.sh

bench: setup
	cargo build --release --bin hither
	bench/run.sh "$(CARGO_TARGET_DIR)/release/hither"

# make build FEATURES=etcd: with the etcd backend of the metadata store (needs protoc).
FEATURES ?=
build:
	cargo build --release --bin hither --features "$(FEATURES)"

PREFIX ?= /usr/local
install: build
	install -m 755 "$(CARGO_TARGET_DIR)/release/hither" $(PREFIX)/bin/hither
	ln -sf $(PREFIX)/bin/hither /sbin/mount.fuse.hither

# The container image, without Docker; see Dockerfile for elsewhere. A program that the image has to
# have is a package of the same name.
IMAGE_PROGRAMS := hither hither-operator hither-csi
IMAGES := $(CARGO_TARGET_DIR)/images
.PHONY: image
image: setup
	cargo build --release $(addprefix -p ,$(IMAGE_PROGRAMS)) --features hither/etcd
	e2e/kube/image.py hither $(IMAGES)/hither.tar --bin "$(CARGO_TARGET_DIR)/release" --require $(IMAGE_PROGRAMS)
	e2e/kube/image.py busybox $(IMAGES)/busybox.tar

# The chart as one file, for `kubectl apply --server-side -f`.
.PHONY: dist
dist:
	@mkdir -p dist
	@e2e/kube/dist.sh >dist/install.yaml
	@echo "dist/install.yaml: $$(grep -c '^kind:' dist/install.yaml) objects"

# A real Kubernetes on this machine, in three zones; e2e/kube/README.md says how it is made.
.PHONY: kube-up kube-down kube-smoke
kube-up:
	@e2e/kube/kube up

kube-down:
	@e2e/kube/kube down

# Every scenario on the cluster, then the operator's tests there, with binaries as the tests have them.
.PHONY: e2e e2e-image
e2e-image: setup
	cargo build --quiet --workspace --bins --test live --features hither/etcd,hither-operator/live
	e2e/kube/image.py hither $(IMAGES)/hither-test.tar --bin "$(CARGO_TARGET_DIR)/debug" --require $(IMAGE_PROGRAMS)
	e2e/kube/image.py busybox $(IMAGES)/busybox.tar

e2e: kube-up e2e-image
	@e2e/kube/run.sh $(IMAGES) $(SCENARIOS)
	@e2e/kube/kube down

# Hither on that Kubernetes: installed, mounted in three zones, one zone lost. It shows what happens,
# not how fast: with the tests' build, which is there sooner than `image`.
.PHONY: demo-kube
demo-kube: kube-up e2e-image
	@e2e/kube/kube load $(IMAGES)/hither-test.tar $(IMAGES)/busybox.tar
	@e2e/kube/kube sidecars
	@e2e/kube/demo.py $(if $(KEEP),--keep)
	@$(if $(KEEP),true,e2e/kube/kube down)

# Proves what the tests on the cluster rely on.
kube-smoke: kube-up e2e-image
	@e2e/kube/kube load $(IMAGES)/hither-test.tar $(IMAGES)/busybox.tar
	@e2e/kube/smoke.py
