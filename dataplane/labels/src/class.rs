//! Storage classes: where copies are to be in each state of a chunk, and when the state changes.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::definition::{DEFAULT_EC_DATA_PARTS, Mode, StorageDefinition};
use crate::template::PreferenceTemplate;

/// Largest length in bytes of the name, and of the description, of a class.
pub const MAX_CLASS_TEXT_BYTES: usize = 255;
/// Longest delay before archiving: 65 535 hours.
pub const MAX_ARCHIVE_DELAY_SECONDS: u64 = 65_535 * 3600;

/// Why a storage class is refused. The texts say what to do; trying again cannot help.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ClassError {
    /// The name is empty.
    #[error("the class has no name: give it one of 1 to {MAX_CLASS_TEXT_BYTES} bytes")]
    NoName,
    /// A text is too long.
    #[error("the {field} has {bytes} bytes: shorten it to {MAX_CLASS_TEXT_BYTES}")]
    TooLong {
        /// The field.
        field: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// A text has a control character.
    #[error("the {field} has a control character at byte {offset}: take it out")]
    ControlCharacter {
        /// The field.
        field: &'static str,
        /// Where the character is.
        offset: usize,
    },
    /// A text begins or ends with a blank.
    #[error("the {field} begins or ends with a blank: take it off")]
    OuterBlank {
        /// The field.
        field: &'static str,
    },
    /// An erasure-coded form where chunks are written.
    #[error(
        "`{state}` asks for erasure coding, but chunks are written as copies: give `{state}` copies \
         such as `2*` (erasure coding is for `archive` and `trash`, which nothing acts on yet)"
    )]
    EcNotAllowed {
        /// The state, create or keep.
        state: ChunkState,
    },
    /// A trigger without an archive definition.
    #[error("there is an archive trigger but no archive definition: add one, or drop the trigger")]
    TriggerWithoutArchive,
    /// The delay before archiving is too long.
    #[error(
        "the archive delay of {seconds} s is too long: give at most {MAX_ARCHIVE_DELAY_SECONDS} s"
    )]
    DelayTooLong {
        /// The delay.
        seconds: u64,
    },
    /// The smallest number of copies that may acknowledge a write is out of range.
    #[error(
        "minWriteCopies is {value}, but `{state}` has {copies} copies: give a number from 1 to {copies}"
    )]
    MinWriteCopies {
        /// The refused number.
        value: u8,
        /// The state with the fewest copies.
        state: ChunkState,
        /// Its number of copies.
        copies: usize,
    },
}

/// The state of a chunk in its class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChunkState {
    /// Being written for the first time.
    Create,
    /// The steady state.
    Keep,
    /// Unchanged for the delay of the archive trigger.
    Archive,
    /// Its file is in the trash.
    Trash,
}

impl ChunkState {
    /// All states, in the order of a chunk's life.
    pub const ALL: [Self; 4] = [Self::Create, Self::Keep, Self::Archive, Self::Trash];

    /// The name of the state's field in a class.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Keep => "keep",
            Self::Archive => "archive",
            Self::Trash => "trash",
        }
    }
}

impl std::fmt::Display for ChunkState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The time of a file that the archive delay is counted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReferenceTime {
    /// Last change of data or attributes.
    #[default]
    Ctime,
    /// Last change of data.
    Mtime,
    /// Last access.
    Atime,
}

/// When chunks pass from keep to archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ArchiveTrigger {
    /// The time the delay is counted from.
    pub reference: ReferenceTime,
    /// Shortest time from the reference to archiving, in seconds.
    pub delay_seconds: u64,
    /// Whether a newer reference time brings the file back to keep.
    pub reversible: bool,
    /// Shorter files are not archived, in bytes.
    pub min_length_bytes: u64,
}

impl Default for ArchiveTrigger {
    /// 24 hours after the last change, not reversible, any length.
    fn default() -> Self {
        Self {
            reference: ReferenceTime::Ctime,
            delay_seconds: 24 * 3600,
            reversible: false,
            min_length_bytes: 0,
        }
    }
}

/// A storage class. [`validate`](Self::validate) says whether it may be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StorageClass {
    /// Name: 1 to 255 bytes without control characters and outer blanks.
    pub name: String,
    /// Description: at most 255 bytes without control characters and outer blanks.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Where a new chunk is first written; as keep if absent. Copies only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create: Option<StorageDefinition>,
    /// Where chunks are in the steady state. Copies only.
    pub keep: StorageDefinition,
    /// Where chunks are after the archive delay; chunks stay in keep if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive: Option<StorageDefinition>,
    /// Where chunks of files in the trash are; they stay where they are if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trash: Option<StorageDefinition>,
    /// The mode of definitions that have none of their own.
    #[serde(default)]
    pub mode: Mode,
    /// When chunks pass to archive; the default trigger if absent and archive is defined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive_trigger: Option<ArchiveTrigger>,
    /// Files with at least this retention left use the trash definition, in seconds.
    #[serde(default)]
    pub min_trash_retention_seconds: u64,
    /// Which class governs a chunk shared by files of several classes: the highest.
    #[serde(default)]
    pub priority: u32,
    /// Whether only administrators may attach the class.
    #[serde(default)]
    pub admin_only: bool,
    /// Preferred labels of mounts that are given none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preferred_labels: Option<PreferenceTemplate>,
    /// Smallest number of in-sync copies that may acknowledge a write; copies - 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_write_copies: Option<u8>,
    /// Whether fsync may answer before the data is on stable storage.
    #[serde(default)]
    pub volatile: bool,
}

impl StorageClass {
    /// A class with a name and a keep definition, everything else at its default.
    #[must_use]
    pub fn new(name: impl Into<String>, keep: StorageDefinition) -> Self {
        Self {
            name: name.into(),
            description: String::new(),
            create: None,
            keep,
            archive: None,
            trash: None,
            mode: Mode::default(),
            archive_trigger: None,
            min_trash_retention_seconds: 0,
            priority: 0,
            admin_only: false,
            preferred_labels: None,
            min_write_copies: None,
            volatile: false,
        }
    }

    /// Whether the class may be used, and if not, what to change.
    pub fn validate(&self) -> Result<(), ClassError> {
        if self.name.is_empty() {
            return Err(ClassError::NoName);
        }
        check_text("name", &self.name)?;
        check_text("description", &self.description)?;
        for state in [ChunkState::Create, ChunkState::Keep] {
            if self
                .own_definition(state)
                .is_some_and(StorageDefinition::is_ec)
            {
                return Err(ClassError::EcNotAllowed { state });
            }
        }
        match (&self.archive_trigger, &self.archive) {
            (Some(_), None) => return Err(ClassError::TriggerWithoutArchive),
            (Some(trigger), _) if trigger.delay_seconds > MAX_ARCHIVE_DELAY_SECONDS => {
                return Err(ClassError::DelayTooLong {
                    seconds: trigger.delay_seconds,
                });
            }
            _ => {}
        }
        self.check_min_write_copies()
    }

    /// The definition that the class itself gives for a state.
    #[must_use]
    pub fn own_definition(&self, state: ChunkState) -> Option<&StorageDefinition> {
        match state {
            ChunkState::Create => self.create.as_ref(),
            ChunkState::Keep => Some(&self.keep),
            ChunkState::Archive => self.archive.as_ref(),
            ChunkState::Trash => self.trash.as_ref(),
        }
    }

    /// The definition that holds for a state: its own, or else that of keep.
    ///
    /// A chunk that was archived before its file went to the trash, in a class without a trash
    /// definition, stays in archive: ask for that state.
    #[must_use]
    pub fn definition(&self, state: ChunkState) -> &StorageDefinition {
        self.own_definition(state).unwrap_or(&self.keep)
    }

    /// The mode that holds for a state: that of its definition, or else that of the class.
    #[must_use]
    pub fn mode(&self, state: ChunkState) -> Mode {
        self.definition(state).mode().unwrap_or(self.mode)
    }

    /// When chunks pass to archive; `None` if they never do.
    #[must_use]
    pub fn effective_trigger(&self) -> Option<ArchiveTrigger> {
        self.archive
            .as_ref()
            .map(|_| self.archive_trigger.unwrap_or_default())
    }

    /// Smallest number of in-sync copies that may acknowledge a write: as given, or one less than
    /// the state has copies, and at least one.
    #[must_use]
    pub fn min_write_copies(&self, state: ChunkState) -> usize {
        let copies = self.definition(state).terms(DEFAULT_EC_DATA_PARTS).len();
        self.min_write_copies
            .map_or(copies.saturating_sub(1).max(1), usize::from)
    }

    fn check_min_write_copies(&self) -> Result<(), ClassError> {
        let Some(value) = self.min_write_copies else {
            return Ok(());
        };
        for state in [ChunkState::Create, ChunkState::Keep] {
            let copies = self.definition(state).terms(DEFAULT_EC_DATA_PARTS).len();
            if !(1..=copies).contains(&usize::from(value)) {
                return Err(ClassError::MinWriteCopies {
                    value,
                    state,
                    copies,
                });
            }
        }
        Ok(())
    }
}

fn check_text(field: &'static str, text: &str) -> Result<(), ClassError> {
    if text.len() > MAX_CLASS_TEXT_BYTES {
        return Err(ClassError::TooLong {
            field,
            bytes: text.len(),
        });
    }
    if let Some(offset) = text.find(char::is_control) {
        return Err(ClassError::ControlCharacter { field, offset });
    }
    if text.trim() != text {
        return Err(ClassError::OuterBlank { field });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(keep: &str) -> StorageClass {
        StorageClass::new("fast", keep.parse().unwrap())
    }

    #[test]
    fn names_and_descriptions_have_rules() {
        let named = |name: &str| {
            StorageClass {
                name: name.to_owned(),
                ..class("A")
            }
            .validate()
        };
        assert_eq!(named("a b é"), Ok(()));
        assert_eq!(named(""), Err(ClassError::NoName));
        assert_eq!(named(&"x".repeat(255)), Ok(()));
        let too_long = ClassError::TooLong {
            field: "name",
            bytes: 256,
        };
        assert_eq!(named(&"x".repeat(256)), Err(too_long));
        assert_eq!(named(" a"), Err(ClassError::OuterBlank { field: "name" }));
        assert_eq!(named("a "), Err(ClassError::OuterBlank { field: "name" }));
        let control = ClassError::ControlCharacter {
            field: "name",
            offset: 1,
        };
        assert_eq!(named("a\tb"), Err(control));
        let described = StorageClass {
            description: "x\n".to_owned(),
            ..class("A")
        };
        let control = ClassError::ControlCharacter {
            field: "description",
            offset: 1,
        };
        assert_eq!(described.validate(), Err(control));
    }

    #[test]
    fn erasure_coding_is_for_archive_and_trash() {
        let error = class("@4+2").validate().unwrap_err();
        assert_eq!(
            error,
            ClassError::EcNotAllowed {
                state: ChunkState::Keep
            }
        );
        assert!(error.to_string().contains("`archive`"));
        let create = StorageClass {
            create: "@4+2".parse().ok(),
            ..class("2*")
        };
        assert!(create.validate().is_err());
        let archived = StorageClass {
            archive: "@4+2".parse().ok(),
            trash: "@2+1".parse().ok(),
            ..class("2")
        };
        assert_eq!(archived.validate(), Ok(()));
        assert_eq!(
            archived.effective_trigger(),
            Some(ArchiveTrigger::default())
        );
    }

    #[test]
    fn states_fall_back_to_keep_and_modes_to_the_class() {
        let class = StorageClass {
            create: "S:strict".parse().ok(),
            mode: Mode::Loose,
            ..class("S,H")
        };
        assert_eq!(class.definition(ChunkState::Create).to_string(), "S:strict");
        assert_eq!(class.definition(ChunkState::Archive), &class.keep);
        assert_eq!(class.mode(ChunkState::Create), Mode::Strict);
        assert_eq!(class.mode(ChunkState::Trash), Mode::Loose);
        assert_eq!(class.effective_trigger(), None);
    }

    #[test]
    fn a_trigger_needs_an_archive_and_a_sane_delay() {
        let trigger = ArchiveTrigger {
            delay_seconds: u64::MAX,
            ..ArchiveTrigger::default()
        };
        let mut class = StorageClass {
            archive_trigger: Some(trigger),
            ..class("2")
        };
        assert_eq!(class.validate(), Err(ClassError::TriggerWithoutArchive));
        class.archive = "H".parse().ok();
        assert_eq!(
            class.validate(),
            Err(ClassError::DelayTooLong { seconds: u64::MAX })
        );
    }

    #[test]
    fn the_acknowledging_copies_are_bounded_by_the_smallest_state() {
        let mut class = class("A,B,C");
        assert_eq!(class.min_write_copies(ChunkState::Keep), 2);
        class.create = "A".parse().ok();
        assert_eq!(class.min_write_copies(ChunkState::Create), 1);
        class.min_write_copies = Some(2);
        let error = ClassError::MinWriteCopies {
            value: 2,
            state: ChunkState::Create,
            copies: 1,
        };
        assert_eq!(class.validate(), Err(error));
        class.min_write_copies = Some(0);
        assert!(class.validate().is_err());
        class.min_write_copies = Some(1);
        assert_eq!(class.validate(), Ok(()));
    }

    #[test]
    fn classes_survive_json_and_refuse_unknown_fields() {
        let class = StorageClass {
            description: "one copy in each room".to_owned(),
            archive: "@4+2,H/[ZONE]:loose".parse().ok(),
            archive_trigger: Some(ArchiveTrigger::default()),
            preferred_labels: "zone={zone}&media=ssd; zone={zone}".parse().ok(),
            ..class("A,B")
        };
        let json = serde_json::to_string(&class).unwrap();
        assert_eq!(serde_json::from_str::<StorageClass>(&json).unwrap(), class);
        let small: StorageClass = serde_json::from_str(r#"{"name":"a","keep":"2"}"#).unwrap();
        assert_eq!(small.keep.to_string(), "*,*");
        assert!(serde_json::from_str::<StorageClass>(r#"{"name":"a"}"#).is_err());
        let unknown = r#"{"name":"a","keep":"2","colour":"red"}"#;
        assert!(serde_json::from_str::<StorageClass>(unknown).is_err());
        let bad = serde_json::from_str::<StorageClass>(r#"{"name":"a","keep":"A,,B"}"#);
        assert!(bad.unwrap_err().to_string().contains("column 3"));
    }
}
