//! What the caller gets to read.

use std::io::{self, BufRead as _, Write as _};

use crate::args::Args;
use crate::phase::Measured;

/// Says `ready` and waits for a line: the caller changes something in between.
pub(crate) fn wait_for_caller() -> Result<(), String> {
    let mut out = io::stdout();
    writeln!(out, "ready")
        .and_then(|()| out.flush())
        .map_err(|error| format!("say ready: {error}"))?;
    let mut line = String::new();
    match io::stdin().lock().read_line(&mut line) {
        Ok(0) => Err("nobody said go on".into()),
        Ok(_) => Ok(()),
        Err(error) => Err(format!("read standard input: {error}")),
    }
}

/// All results as one line of JSON. Labels are words of the command line and hold no quotes.
pub(crate) fn json(args: &Args, results: &[(String, Measured)]) -> String {
    let phases: Vec<String> = results
        .iter()
        .map(|(label, measured)| format!("\"{label}\": {}", one(measured)))
        .collect();
    format!(
        "{{\"threads\": {}, \"files_per_thread\": {}, \"phases\": {{{}}}}}",
        args.threads,
        args.files,
        phases.join(", ")
    )
}

fn one(measured: &Measured) -> String {
    let seconds = measured.elapsed.as_secs_f64();
    let rate = if seconds > 0.0 {
        measured.operations as f64 / seconds
    } else {
        0.0
    };
    format!(
        "{{\"operations\": {}, \"seconds\": {seconds:.6}, \"per_second\": {rate:.1}, \
         \"p50_us\": {:.1}, \"p99_us\": {:.1}, \"max_us\": {:.1}, \"cut_short\": {}}}",
        measured.operations,
        quantile_us(&measured.sorted_ns, 50),
        quantile_us(&measured.sorted_ns, 99),
        quantile_us(&measured.sorted_ns, 100),
        measured.cut_short,
    )
}

/// The `percent`th quantile by nearest rank, in microseconds.
fn quantile_us(sorted_ns: &[u64], percent: usize) -> f64 {
    let rank = (sorted_ns.len() * percent).div_ceil(100).max(1);
    sorted_ns
        .get(rank - 1)
        .map_or(0.0, |&ns| ns as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let sorted: Vec<u64> = (1..=200).map(|n| n * 1000).collect();
        assert_eq!(quantile_us(&sorted, 50), 100.0);
        assert_eq!(quantile_us(&sorted, 99), 198.0);
        assert_eq!(quantile_us(&sorted, 100), 200.0);
        assert_eq!(quantile_us(&[], 50), 0.0);
    }
}
