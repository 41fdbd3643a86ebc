//! Placeholder until the crate's first change.
