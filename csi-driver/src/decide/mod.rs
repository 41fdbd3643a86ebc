//! What to answer, as functions of what was asked and what is there. No I/O, no clock.

pub mod access;
pub mod parameters;
pub mod publish;
pub mod volume;
