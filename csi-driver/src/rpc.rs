//! The generated messages and services.

/// The Container Storage Interface.
#[allow(missing_docs, reason = "generated; proto/csi.proto has the comments")]
#[allow(clippy::all, clippy::pedantic, reason = "generated")]
#[allow(unreachable_pub, unused_qualifications, reason = "generated")]
#[allow(elided_lifetimes_in_paths, reason = "generated")]
#[allow(clippy::allow_attributes_without_reason, reason = "generated")]
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// Registration with the kubelet.
#[allow(
    missing_docs,
    reason = "generated; proto/registration.proto has the comments"
)]
#[allow(clippy::all, clippy::pedantic, reason = "generated")]
#[allow(unreachable_pub, unused_qualifications, reason = "generated")]
#[allow(elided_lifetimes_in_paths, reason = "generated")]
#[allow(clippy::allow_attributes_without_reason, reason = "generated")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}
