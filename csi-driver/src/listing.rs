//! Pages of a list of volumes.

use crate::decide::volume::Volume;
use crate::error::Refusal;
use crate::ids::Handle;

/// Part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Volumes by handle.
    pub volumes: Vec<(Handle, Volume)>,
    /// Where to go on; empty: nothing follows.
    pub next_token: String,
}

/// The handle behind which a token goes on; `None` for the start.
///
/// # Errors
/// `BadToken` for a text that is no token.
pub fn after(token: &str) -> Result<Option<Handle>, Refusal> {
    if token.is_empty() {
        return Ok(None);
    }
    let handle = token.strip_prefix(AFTER).and_then(Handle::parse);
    handle.map(Some).ok_or_else(|| {
        Refusal::BadToken(format!("{token:?} is no token of this driver: start again"))
    })
}

/// How many volumes a page has; `None`: any number.
///
/// # Errors
/// `Invalid` for a negative number.
pub fn limit(max_entries: i32) -> Result<Option<usize>, Refusal> {
    let most = usize::try_from(max_entries)
        .map_err(|_| Refusal::Invalid("max_entries is negative".into()))?;
    Ok((most != 0).then_some(most))
}

/// The page behind a handle. Volumes that come or go between pages disturb no other.
#[must_use]
pub fn page(mut all: Vec<(Handle, Volume)>, after: Option<&Handle>, most: Option<usize>) -> Page {
    all.sort_by(|a, b| a.0.cmp(&b.0));
    if let Some(after) = after {
        all.retain(|(handle, _)| handle > after);
    }
    let more = most.is_some_and(|most| all.len() > most);
    all.truncate(most.unwrap_or(usize::MAX));
    let last = all.last().filter(|_| more);
    Page {
        next_token: last.map_or_else(String::new, |(handle, _)| format!("{AFTER}{handle}")),
        volumes: all,
    }
}

const AFTER: &str = "after:";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::decide::parameters::Parameters;
    use crate::decide::volume::VolumeRecord;

    fn volume(n: u32) -> (Handle, Volume) {
        let handle = Handle::parse(&format!("00ff.v{n:04}")).unwrap();
        let record = VolumeRecord::new(&n.to_string(), &Parameters::default());
        (handle, Volume { size: 1, record })
    }

    #[test]
    fn tokens_of_others_are_refused() {
        for token in ["x", "after:", "after:x", "00ff.v1"] {
            assert!(matches!(after(token), Err(Refusal::BadToken(_))));
        }
        assert!(limit(-1).is_err());
        assert_eq!(limit(0), Ok(None));
    }

    proptest! {
        #[test]
        fn pages_together_are_the_whole(
            count in 0..40u32,
            most in 1..7usize,
        ) {
            let all: Vec<_> = (0..count).map(volume).collect();
            let mut seen = Vec::new();
            let mut token = String::new();
            loop {
                let page = page(all.clone(), after(&token).unwrap().as_ref(), Some(most));
                prop_assert!(page.volumes.len() <= most);
                seen.extend(page.volumes);
                token = page.next_token;
                if token.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(seen, all);
        }
    }
}
