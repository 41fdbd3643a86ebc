//! Labels, label expressions, storage classes and preferred labels: pure logic.
//!
//! A chunkserver carries a [`LabelSet`]. A [`StorageClass`] says with [`StorageDefinition`]s where
//! the copies of a chunk are to be; the [`PreferredLabels`] of one mount say which of those copies
//! it contacts first. The two halves meet only in [`check_preference`], which tells a user when a
//! preference can never match a class.
//!
//! Nothing here reads a clock, a file or a socket, and every function is total: hostile text gives
//! a [`ParseError`], never a panic or an overflow of the stack. The bounds are
//! [`MAX_TEXT_BYTES`], [`MAX_DEPTH`], [`MAX_TERMS`], [`MAX_WORD_BYTES`] and [`MAX_WORDS`].
//!
//! The language is described for users in `docs/labels.md`.

#![forbid(unsafe_code)]

mod check;
mod class;
mod definition;
mod error;
mod expr;
mod label;
mod mount_options;
mod order;
mod parse;
mod preferred;
mod set;
mod suffix;
mod template;
mod text;

pub use check::{PreferenceWarning, check_preference};
pub use class::{
    ArchiveTrigger, ChunkState, ClassError, MAX_ARCHIVE_DELAY_SECONDS, MAX_CLASS_TEXT_BYTES,
    ReferenceTime, StorageClass,
};
pub use definition::{
    DEFAULT_EC_DATA_PARTS, DefinitionError, EcParts, Form, MAX_EC_DATA_PARTS, MAX_EC_PARITY_PARTS,
    MIN_EC_DATA_PARTS, Mode, StorageDefinition, Uniqueness,
};
pub use error::{Found, Hint, ParseError, ParseErrorKind, Parsed, Warning};
pub use expr::LabelExpr;
pub use label::{Label, LabelError, Letter, LetterMask, MAX_WORD_BYTES, WordLabel};
pub use mount_options::{
    MAX_MOUNT_OPTIONS, MAX_MOUNT_OPTIONS_BYTES, MountOption, MountOptionsError,
    PREFERRED_LABELS_OPTIONS, split_mount_options,
};
pub use order::{Answer, ServerView, read_order, write_order};
pub use parse::{MAX_DEPTH, MAX_TERMS, MAX_TEXT_BYTES};
pub use preferred::{PreferredLabels, Rank};
pub use set::{LabelSet, LocationView, MAX_WORDS, effective_labels};
pub use template::{DEFAULT_PREFERENCE_TEMPLATE, DroppedExpression, Expansion, PreferenceTemplate};
