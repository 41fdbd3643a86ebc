# syntax=docker/dockerfile:1
# The image that `make image` writes, by a container engine instead:
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/hither:TAG --push .
# What is in it is said once, in e2e/kube/cluster/images.py.

FROM golang:1.26-bookworm AS etcd
WORKDIR /src
COPY e2e/kube/programs/rest .
RUN CGO_ENABLED=0 GOBIN=/out go install -trimpath -ldflags "-s -w" ./etcd

FROM rust:1.91-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends \
    ca-certificates fuse3 libprotobuf-dev protobuf-compiler python3
WORKDIR /src
COPY . .
# A program that the image has to have is a package of the same name.
ARG PROGRAMS="hither hither-operator hither-csi"
RUN cargo build --release $(printf -- '-p %s ' $PROGRAMS) --features hither/etcd
COPY --from=etcd /out/etcd /out/etcd
RUN e2e/kube/image.py tree /rootfs --bin target/release --require $PROGRAMS --etcd /out/etcd

FROM scratch
COPY --from=build /rootfs /
ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/hither"]
