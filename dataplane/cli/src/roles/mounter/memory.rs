//! How much memory the mounts of this process may keep together.

use std::path::Path;

/// Bytes for all mounts: as given, else most of what the control group leaves this process, else a
/// part of what the machine has.
pub(super) fn budget_bytes(given: Option<u64>) -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok();
    decide(
        given,
        limit(Path::new("/sys/fs/cgroup")).as_deref(),
        machine.as_deref(),
    )
}

/// The limit of this process's control group (version 2), as the kernel writes it.
fn limit(groups: &Path) -> Option<String> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    std::fs::read_to_string(groups.join(path).join("memory.max")).ok()
}

fn decide(given: Option<u64>, limit: Option<&str>, meminfo: Option<&str>) -> Option<u64> {
    let limit = limit.and_then(|text| text.trim().parse::<u64>().ok());
    // The program itself needs some, and at the limit all mounts would end.
    let of_limit = limit.map(|bytes| bytes / 4 * 3);
    let of_machine = || total(meminfo?).map(|bytes| bytes / MACHINE_PART);
    given.or(of_limit).or_else(of_machine)
}

fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Without anything said, one part in so many of the machine's memory.
const MACHINE_PART: u64 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_counts_before_the_limit_and_the_machine() {
        let meminfo = Some("MemTotal:        8388608 kB\nMemFree: 1 kB\n");
        let (limit, none) = (Some("1073741824\n"), Some("max\n"));
        assert_eq!(decide(Some(5), limit, meminfo), Some(5));
        assert_eq!(decide(None, limit, meminfo), Some(768 << 20));
        assert_eq!(decide(None, none, meminfo), Some(2 << 30));
        assert_eq!(decide(None, None, meminfo), Some(2 << 30));
        assert_eq!(decide(None, None, Some("nonsense")), None);
    }
}
