//! Metadata load on a directory: threads that make, write, look at, list, rename and remove files.
//!
//! `fsload DIR [--threads T] [--files N] [--flat] [--first F] [--of M] [--limit SECONDS] PHASE...`
//!
//! Phases run one after the other, all threads at the same time, and each is timed from the moment
//! all threads are ready to the moment the last one is done. One JSON object on standard output
//! says how many operations each phase did, how long it took and how long single operations took.
#![forbid(unsafe_code)]

mod args;
mod phase;
mod report;

use std::process::ExitCode;

use args::{Args, Step};
use phase::{Files, Measured};

fn main() -> ExitCode {
    match Args::parse(std::env::args().skip(1)).and_then(|args| run(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("fsload: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let mut files = Files::new(args);
    let mut results: Vec<(String, Measured)> = Vec::new();
    for step in &args.steps {
        match step {
            Step::Wait => report::wait_for_caller()?,
            Step::Measure { kind, label } => {
                results.push((label.clone(), files.measure(*kind)?));
            }
        }
    }
    println!("{}", report::json(args, &results));
    Ok(())
}
