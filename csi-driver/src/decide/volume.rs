//! A volume that is asked for beside one that is there.

use serde::{Deserialize, Serialize};

use super::parameters::Parameters;
use crate::error::Refusal;
use crate::rpc::csi::CapacityRange;

/// What the cluster keeps of a volume beside its quota and class: an attribute of its directory,
/// described in `docs/formats/volumes.md`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeRecord {
    /// Version of the record: [`FORMAT`].
    pub format: u32,
    /// Name it was asked for under.
    pub name: String,
    /// What it was made with; a repeated request has to say the same.
    pub made: Made,
    /// Template of preferred labels; empty: the class's.
    #[serde(default)]
    pub preferred_labels: String,
}

/// What a volume was made with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Made {
    /// Storage class of the cluster; empty: the directory's above.
    pub class: String,
    /// Template of preferred labels.
    pub preferred_labels: String,
    /// Files and directories at most; 0: no limit.
    pub inode_quota: u64,
    /// Permission bits, owner and group of the root.
    pub root: (u32, u32, u32),
}

/// A volume as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Bytes it may hold.
    pub size: u64,
    /// What is kept of it.
    pub record: VolumeRecord,
}

/// What a request leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Creation {
    /// Nothing is to be done.
    IsThere,
    /// It has to be made, of this size.
    Make {
        /// Bytes it may hold.
        size: u64,
    },
}

impl VolumeRecord {
    /// The record of a new volume.
    #[must_use]
    pub fn new(name: &str, parameters: &Parameters) -> Self {
        let mutable = &parameters.mutable;
        let preferred_labels = mutable.preferred_labels.clone().unwrap_or_default();
        Self {
            format: FORMAT,
            name: name.to_owned(),
            made: Made {
                class: mutable.class.clone().unwrap_or_default(),
                preferred_labels: preferred_labels.clone(),
                inode_quota: mutable.inode_quota.unwrap_or(0),
                root: (
                    parameters.root_mode,
                    parameters.root_uid,
                    parameters.root_gid,
                ),
            },
            preferred_labels,
        }
    }

    /// Reads a stored record.
    ///
    /// # Errors
    /// `Broken` for what this build cannot read.
    pub fn of_bytes(bytes: &[u8]) -> Result<Self, Refusal> {
        let record: Self = serde_json::from_slice(bytes)
            .map_err(|error| Refusal::Broken(format!("read a volume's record: {error}")))?;
        if record.format != FORMAT {
            return Err(Refusal::Broken(format!(
                "a volume's record has format {}: this driver knows {FORMAT}",
                record.format
            )));
        }
        Ok(record)
    }

    /// The bytes that are stored.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// What a request to create a volume leads to, beside the volume of that name if there is one.
///
/// # Errors
/// `Exists` when the one that is there is another, `OutOfRange` for a size that cannot be.
pub fn create(
    range: Option<&CapacityRange>,
    wanted: &VolumeRecord,
    there: Option<&Volume>,
) -> Result<Creation, Refusal> {
    let (least, most) = bounds(range)?;
    let Some(there) = there else {
        let size = least.unwrap_or_else(|| most.map_or(SIZE, |most| most.min(SIZE)));
        return Ok(Creation::Make { size });
    };
    let differs = |what: &str| {
        Err(Refusal::Exists(format!(
            "the volume {:?} is there already with {what}",
            wanted.name
        )))
    };
    if there.record.name != wanted.name {
        return Err(Refusal::Broken(format!(
            "the volumes {:?} and {:?} have the same id",
            there.record.name, wanted.name
        )));
    }
    if least.is_some_and(|least| there.size < least) || most.is_some_and(|most| there.size > most) {
        return differs(&format!("{} bytes", there.size));
    }
    if there.record.made != wanted.made {
        return differs("other parameters");
    }
    Ok(Creation::IsThere)
}

/// The size a volume has to be given for a request to expand it; `None`: it is large enough.
///
/// # Errors
/// `Invalid` without a size, `OutOfRange` for one that cannot be.
pub fn expand(range: Option<&CapacityRange>, size: u64) -> Result<Option<u64>, Refusal> {
    let (least, most) = bounds(range)?;
    let Some(least) = least else {
        return Err(Refusal::Invalid("the request has no size".into()));
    };
    if most.is_some_and(|most| size > most) {
        return Err(Refusal::OutOfRange(format!(
            "the volume has {size} bytes already, and volumes are not made smaller"
        )));
    }
    Ok((least > size).then_some(least))
}

fn bounds(range: Option<&CapacityRange>) -> Result<(Option<u64>, Option<u64>), Refusal> {
    let Some(range) = range else {
        return Ok((None, None));
    };
    let wrong = |text: &str| Err(Refusal::OutOfRange(text.to_owned()));
    let bound = |bytes: i64| u64::try_from(bytes).ok();
    let (Some(least), Some(most)) = (bound(range.required_bytes), bound(range.limit_bytes)) else {
        return wrong("a size is negative");
    };
    if most != 0 && least > most {
        return wrong("the size is above its limit");
    }
    Ok(((least != 0).then_some(least), (most != 0).then_some(most)))
}

/// Version of the stored record.
pub const FORMAT: u32 = 1;
/// Bytes of a volume when the request does not say.
const SIZE: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(name: &str, class: &str) -> VolumeRecord {
        let mut parameters = Parameters::default();
        parameters.mutable.class = Some(class.into());
        VolumeRecord::new(name, &parameters)
    }

    fn range(least: i64, most: i64) -> CapacityRange {
        CapacityRange {
            required_bytes: least,
            limit_bytes: most,
        }
    }

    #[test]
    fn another_size_or_parameter_is_another_volume() {
        let there = Volume {
            size: 100,
            record: record("a", "two"),
        };
        let ask = |range, class| create(Some(&range), &record("a", class), Some(&there));
        assert_eq!(ask(range(100, 0), "two"), Ok(Creation::IsThere));
        assert_eq!(ask(range(50, 200), "two"), Ok(Creation::IsThere));
        for (range, class) in [
            (range(101, 0), "two"),
            (range(1, 99), "two"),
            (range(100, 0), "three"),
        ] {
            assert!(matches!(ask(range, class), Err(Refusal::Exists(_))));
        }
        // A class or template that was changed later is not what the request asked for.
        let mut changed = there.clone();
        changed.record.preferred_labels = "A".into();
        let again = create(Some(&range(100, 0)), &record("a", "two"), Some(&changed));
        assert_eq!(again, Ok(Creation::IsThere));
    }

    #[test]
    fn sizes() {
        let make = |range: Option<CapacityRange>| create(range.as_ref(), &record("a", ""), None);
        assert_eq!(make(None), Ok(Creation::Make { size: SIZE }));
        assert_eq!(make(Some(range(0, 5))), Ok(Creation::Make { size: 5 }));
        assert_eq!(make(Some(range(7, 9))), Ok(Creation::Make { size: 7 }));
        assert!(make(Some(range(9, 7))).is_err());
        assert!(make(Some(range(-1, 0))).is_err());
        assert_eq!(expand(Some(&range(5, 0)), 7), Ok(None));
        assert_eq!(expand(Some(&range(9, 0)), 7), Ok(Some(9)));
        assert!(expand(None, 7).is_err());
        assert!(expand(Some(&range(3, 5)), 7).is_err());
    }

    #[test]
    fn a_record_of_another_version_is_not_guessed_at() {
        let mut newer = record("a", "two");
        assert_eq!(VolumeRecord::of_bytes(&newer.to_bytes()), Ok(newer.clone()));
        newer.format = FORMAT + 1;
        assert!(VolumeRecord::of_bytes(&newer.to_bytes()).is_err());
        assert!(VolumeRecord::of_bytes(b"{}").is_err());
    }

    proptest! {
        #[test]
        fn what_was_made_satisfies_the_request(least in 0..i64::MAX, most in 0..i64::MAX) {
            let wanted = record("a", "two");
            let range = range(least, most);
            if let Ok(Creation::Make { size }) = create(Some(&range), &wanted, None) {
                let there = Volume { size, record: wanted.clone() };
                let again = create(Some(&range), &wanted, Some(&there));
                prop_assert_eq!(again, Ok(Creation::IsThere));
            }
        }

        #[test]
        fn an_expansion_is_enough_and_never_shrinks(least in 1..i64::MAX, size in 0..u64::MAX) {
            let range = range(least, 0);
            if let Ok(Some(new)) = expand(Some(&range), size) {
                prop_assert!(new > size);
                prop_assert_eq!(expand(Some(&range), new), Ok(None));
            }
        }
    }
}
