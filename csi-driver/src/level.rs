//! Which version of the interface is offered.

use std::fmt;
use std::str::FromStr;

/// Version of the interface: older sidecars and test suites stumble over capabilities they do not
/// know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SpecLevel {
    /// Version 1.12.
    V1_12,
    /// Version 1.13: volume health.
    V1_13,
}

impl SpecLevel {
    /// Whether volume health is offered.
    #[must_use]
    pub fn has_health(self) -> bool {
        self >= Self::V1_13
    }
}

impl FromStr for SpecLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "1.12" => Ok(Self::V1_12),
            "1.13" => Ok(Self::V1_13),
            _ => Err("write 1.12 or 1.13".into()),
        }
    }
}

impl fmt::Display for SpecLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1_12 => "1.12",
            Self::V1_13 => "1.13",
        })
    }
}
