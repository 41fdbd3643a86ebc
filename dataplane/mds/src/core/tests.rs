//! The core against a store in memory and clients that answer recalls.

mod bounds;
mod chaos;
mod data;
mod failover;
mod files;
mod names;
mod world;
