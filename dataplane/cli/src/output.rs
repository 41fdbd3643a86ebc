//! Tables for people, JSON for programs.

use std::io::Write as _;

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

/// How results are printed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    /// Prints a value: as JSON, or as the table made of it.
    pub(crate) fn print<T: Serialize>(
        self,
        value: &T,
        table: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        if self.json {
            say(&serde_json::to_string_pretty(value)?);
        } else {
            say(&table(value));
        }
        Ok(())
    }

    /// Prints that something was done.
    pub(crate) fn done(self, text: &str) {
        if self.json {
            say("{\"done\": true}");
        } else {
            say(text);
        }
    }
}

/// A line on the standard output. Who reads it may have heard enough: that is no failure.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush())
        && error.kind() == std::io::ErrorKind::BrokenPipe
    {
        std::process::exit(0);
    }
}

/// A table without lines.
pub(crate) fn table<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    table.trim_fmt()
}

/// Bytes with a unit.
pub(crate) fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut rest = count;
    let mut tenths = 0;
    while rest >= 1024 && unit + 1 < units.len() {
        tenths = rest % 1024 * 10 / 1024;
        rest /= 1024;
        unit += 1;
    }
    if unit == 0 {
        format!("{count} B")
    } else {
        format!("{rest}.{tenths} {}", units[unit])
    }
}

/// A share of a whole, in percent.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        "-".into()
    } else {
        format!("{} %", (part * 200 + whole) / (whole * 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_shares() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(percent(1, 3), "33 %");
        assert_eq!(percent(3, 3), "100 %");
        assert_eq!(percent(0, 0), "-");
    }
}
