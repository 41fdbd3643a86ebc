//! What people ask of a cluster.

pub(crate) mod cs;
pub(crate) mod meta;
pub(crate) mod paths;
pub(crate) mod sclass;
pub(crate) mod session;
pub(crate) mod status;
