//! Why a read went farther than the nearest copy.

use serde::Serialize;

/// Why a read was answered by a server that is farther than the nearest one with a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Detour {
    /// The nearest copy lacks writes, or its server is down.
    OutOfSync,
    /// The nearest server had failed, and not answered since.
    Suspect,
    /// The nearest server had said that it is busy, or starts or stops, or its disk had left a read
    /// unanswered.
    Busy,
    /// The nearest server had been overtaken while it said nothing, and had said nothing since.
    Quiet,
    /// The nearest server was asked, and too late.
    Slow,
    /// The nearest server was asked, and failed.
    Failed,
    /// The preference makes no difference between the two, and the farther one had less to do.
    Spread,
}

/// A server of a group as far as this matters: how far it is, and what puts it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Rank by preference, then distance: lower is nearer.
    pub(crate) farness: (usize, u32),
    /// Why it stands last, if it does.
    pub(crate) last: Option<Detour>,
}

/// Why the server at `at` of a list answered, and not the nearest member of the group; `None` when
/// it is as near. `unread` is how far the nearest member is that cannot be read from; `failed` says
/// that a server that was asked has failed.
pub(crate) fn detour(
    list: &[Place],
    at: usize,
    unread: Option<(usize, u32)>,
    failed: bool,
) -> Option<Detour> {
    let served = list.get(at)?.farness;
    let (index, nearest) = list.iter().enumerate().min_by_key(|(_, p)| p.farness)?;
    if unread.is_some_and(|unread| unread < nearest.farness) {
        return (unread? < served).then_some(Detour::OutOfSync);
    }
    if nearest.farness >= served {
        return None;
    }
    Some(if index < at {
        if failed { Detour::Failed } else { Detour::Slow }
    } else {
        nearest.last.unwrap_or(Detour::Spread)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_detour_has_its_reason() {
        let place = |rank, last| Place {
            farness: (rank, 0),
            last,
        };
        let (near, far) = (place(0, None), place(1, None));
        assert_eq!(detour(&[near, far], 0, None, false), None);
        assert_eq!(detour(&[near, far], 1, None, false), Some(Detour::Slow));
        assert_eq!(detour(&[near, far], 1, None, true), Some(Detour::Failed));
        for why in [Detour::Suspect, Detour::Busy, Detour::Quiet] {
            let list = [far, place(0, Some(why))];
            assert_eq!(detour(&list, 0, None, false), Some(why));
            assert_eq!(detour(&list, 1, None, true), None, "asked last, and near");
        }
        assert_eq!(detour(&[far, near], 0, None, false), Some(Detour::Spread));
        let unread = Some((0, 0));
        assert_eq!(
            detour(&[far], 0, unread, false),
            Some(Detour::OutOfSync),
            "nobody who may be read from is as near"
        );
        assert_eq!(detour(&[near, far], 0, unread, false), None);
        assert_eq!(detour(&[near, far], 1, unread, false), Some(Detour::Slow));
    }
}
