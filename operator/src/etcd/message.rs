//! What a member's admission leaves as its last message, for the operator to read in the pod's status.
//!
//! It names the member: what a pod said of one member says nothing about the next one in its place,
//! and pods are seen later than etcd's list.

use std::fmt;

/// What was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// There is no data, and the member is not let in.
    NoData {
        /// The member whose data it should have: it is listed here, and has started.
        lost: Option<u64>,
        /// Why it is not let in.
        why: String,
    },
    /// etcd was let start.
    LetIn {
        /// As which member, as far as that is known.
        member: Option<u64>,
    },
}

impl Message {
    /// From a message; `None` if it is another container's or a failure's.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        if let Some(rest) = text.strip_prefix(NO_DATA) {
            let (of, why) = rest.split_once(": ").unwrap_or((rest, ""));
            return Some(Self::NoData {
                lost: of.strip_prefix(OF).and_then(id),
                why: why.to_owned(),
            });
        }
        let rest = text.strip_prefix(LET_IN)?;
        Some(Self::LetIn {
            member: rest.strip_prefix(AS).and_then(id),
        })
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoData { lost, why } => {
                write!(f, "{NO_DATA}")?;
                if let Some(id) = lost {
                    write!(f, "{OF}{id:x}")?;
                }
                write!(f, ": {why}")
            }
            Self::LetIn { member } => {
                write!(f, "{LET_IN}")?;
                member.map_or(Ok(()), |id| write!(f, "{AS}{id:x}"))
            }
        }
    }
}

fn id(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim(), 16).ok()
}

const NO_DATA: &str = "this member has no data";
const OF: &str = " of ";
const LET_IN: &str = "etcd may start";
const AS: &str = " as ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_as_it_was() {
        let no_data = |lost| Message::NoData {
            lost,
            why: "no: other".into(),
        };
        for message in [
            no_data(None),
            no_data(Some(0x2963_5285_fc45_714a)),
            Message::LetIn { member: None },
            Message::LetIn {
                member: Some(u64::MAX),
            },
        ] {
            assert_eq!(Message::of(&message.to_string()), Some(message));
        }
        assert_eq!(
            no_data(Some(0x2a)).to_string(),
            "this member has no data of 2a: no: other"
        );
        assert_eq!(Message::of("read: no such file"), None);
    }
}
