//! A network of a test's own, in which the connection between two processes can be cut.
//!
//! All processes are at one loopback address: they are told apart by the group id they run with,
//! which the kernel knows of each socket.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::run;

/// A network namespace. Dropping it removes it, and all rules in it.
#[derive(Debug)]
pub struct Network {
    name: String,
}

/// Who cannot reach whom.
#[derive(Debug, Clone)]
pub struct Ends {
    /// Group id of the process whose packets are dropped.
    pub from_group: u32,
    /// Address (`host:port`) they are sent to.
    pub to: String,
}

impl Network {
    /// # Panics
    /// When the system does not let us.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("hither-e2e-{}-{number}", std::process::id());
        run(Command::new("ip").args(["netns", "add", &name]));
        let network = Self { name };
        let up = ["-n", &network.name, "link", "set", "lo", "up"];
        run(Command::new("ip").args(up));
        network.nft("add table inet cut");
        network.nft("add chain inet cut out { type filter hook output priority 0; }");
        network
    }

    /// What to run a command in this network with.
    pub(crate) fn enter(&self) -> Vec<String> {
        // Not `ip netns exec`: that takes the mounts along.
        vec!["nsenter".into(), format!("--net=/run/netns/{}", self.name)]
    }

    fn nft(&self, rule: &str) {
        let words = self.enter();
        run(Command::new(&words[0])
            .args(&words[1..])
            .args(["nft", rule]));
    }

    /// Drops what is sent between these ends from now on, without a word to either.
    ///
    /// # Panics
    /// When the rule is refused.
    pub fn cut(&self, ends: &[Ends]) {
        for ends in ends {
            let (group, port) = (ends.from_group, ends.to.rsplit(':').next().unwrap_or("0"));
            self.nft(&format!(
                "add rule inet cut out meta skgid {group} tcp dport {port} counter drop"
            ));
        }
    }

    /// Lets everything through again.
    ///
    /// # Panics
    /// When the rules cannot be removed.
    pub fn heal(&self) {
        self.nft("flush chain inet cut out");
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
    }
}

/// What to run a command as another group with.
pub(crate) fn as_group(group: u32) -> Vec<String> {
    let group = group.to_string();
    ["setpriv", "--regid", &group, "--clear-groups"]
        .map(str::to_owned)
        .to_vec()
}
