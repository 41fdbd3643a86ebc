//! The operator on a real Kubernetes: `cargo test -p hither-operator --features live`, with
//! KUBECONFIG and an image on its nodes (`HITHER_IMAGE`, by default that of `e2e/kube`).
//!
//! Nodes have to stand in the zones of `config/samples`, and there has to be a default storage
//! class. Each test has a namespace of its own and runs the operator in this process.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod etcd;
mod life;
mod rules;
mod support;
