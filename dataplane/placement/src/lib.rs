//! Where copies go: pure decisions about servers, without clock, randomness or I/O.
//!
//! - [`Matcher`] matches the terms of a storage definition to servers, jointly and never greedily.
//!   Creation, repair, rebalance and dry run all ask it.
//! - [`plan_groups`], [`plan_balance`] and [`plan_repair`] make, spread and mend placement groups.
//! - [`dry_run`] says what a change of class would move, and [`fulfilment`] whether the servers
//!   that are present can satisfy a definition at all.
//! - [`DistanceTable`] and [`server_order`] give the order in which servers are listed to a client.
//!
//! Equal input gives equal output. Where chance is wanted the caller brings a seed.

#![forbid(unsafe_code)]

mod assign;
mod balance;
mod candidate;
mod distance;
mod dry_run;
mod groups;
mod matcher;
mod repair;

pub use balance::{Move, plan_balance};
pub use candidate::{Candidate, DiskKey, GroupKey, ServerKey, candidate_order};
pub use distance::{Distance, DistanceTable, ListedServer, Site, server_order};
pub use dry_run::{CopySet, DryRun, Fulfilment, Layout, ZoneMoves, dry_run, fulfilment};
pub use groups::{
    Disk, GROUPS_PER_SERVER, Group, GroupPlan, GroupRules, Member, PlanServer, PlannedGroup,
    plan_groups, wanted_groups,
};
pub use matcher::{
    Cause, Existing, MAX_CANDIDATES, Matcher, Placement, TermOutcome, TermPlacement,
};
pub use repair::{RepairPlan, RepairStep, Urgency, plan_repair};
