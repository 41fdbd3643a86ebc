//! The Kubernetes operator of Hither.
//!
//! [`api`] has the custom resources, [`desired`] what objects they ask for, as a pure function;
//! the controllers do what it says and tell in the status what they see.
#![forbid(unsafe_code)]

pub mod api;
pub mod check;
pub mod claims;
pub mod conditions;
pub mod crds;
pub mod desired;
pub mod error;
pub mod etcd;
pub mod labels;
pub mod manager;
pub mod mounters;
pub mod quantity;
pub mod reference;
pub mod rollout;
pub mod run;
pub mod scale;
pub mod seen;
pub mod status;

#[cfg(test)]
mod decisions_tests;
#[cfg(test)]
mod loss_tests;
#[cfg(test)]
mod rollout_tests;
#[cfg(test)]
mod status_tests;
