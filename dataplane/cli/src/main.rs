//! The hither command.

fn main() {}
