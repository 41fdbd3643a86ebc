//! The CSI driver: volumes of Hither clusters for Kubernetes.
//!
//! | module | concern |
//! | --- | --- |
//! | `rpc`, `level` | the interface's messages, and which version is offered |
//! | `decide` | pure: what to answer, from what was asked and what is there |
//! | `ids`, `secret`, `listing`, `error` | names, access to clusters, pages, refusals |
//! | `clusters`, `source`, `volumes` | clients of clusters, where they are found, and volumes as directories in them |
//! | `controller`, `identity`, `ask` | the services beside the node's, and asking them |
//! | `node` | staging and publishing, records, repair, labels of the node |
//! | `registration`, `server` | the kubelet's registration, sockets, liveness |
//! | `guard`, `kill` | one request a volume within its budget; places tests kill at |
#![forbid(unsafe_code)]

pub mod ask;
pub mod authority;
pub mod clusters;
pub mod controller;
pub mod decide;
pub mod error;
pub mod guard;
pub mod identity;
pub mod ids;
pub mod kill;
pub mod level;
pub mod listing;
pub mod node;
pub mod registration;
pub mod rpc;
pub mod secret;
pub mod server;
pub mod source;
pub mod volumes;

/// Name of the driver, as in the CSIDriver object.
pub const DRIVER: &str = "csi.hither.dev";
