//! Labels: single letters, kept as bits of a mask, and `key=value` words.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::text::serde_as_text;

/// Largest length in bytes of a word label's key, and of its value.
pub const MAX_WORD_BYTES: usize = 63;

/// Why a text is no label. Trying again cannot help: the text has to change.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LabelError {
    /// The text is neither one letter nor `key=value`.
    #[error("`{text}` is no label: write one letter A-Z, or a word such as zone=eu-1a")]
    NotALabel {
        /// The refused text.
        text: String,
    },
    /// The part before `=` is not a valid key.
    #[error(
        "`{key}` is no label key: it starts with a-z, goes on with a-z, 0-9 or `-`, and has at \
         most {MAX_WORD_BYTES} bytes"
    )]
    BadKey {
        /// The refused key.
        key: String,
    },
    /// The part after `=` is not a valid value.
    #[error(
        "`{value}` is no label value: it has 1 to {MAX_WORD_BYTES} bytes of A-Z, a-z, 0-9, `.`, \
         `_` or `-`"
    )]
    BadValue {
        /// The refused value.
        value: String,
    },
    /// The set holds as many words as a set may hold.
    #[error("a server carries at most {} word labels", crate::MAX_WORDS)]
    TooManyWords,
}

/// One letter label, `A` to `Z`. Case does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Letter(u8);

impl Letter {
    /// The letter label of a character; `None` unless it is an ASCII letter.
    #[must_use]
    pub fn new(character: char) -> Option<Self> {
        let byte = u8::try_from(character).ok()?.to_ascii_uppercase();
        byte.is_ascii_uppercase().then(|| Self(byte - b'A'))
    }

    /// The letter with the given index, 0 (`A`) to 25 (`Z`); `None` above.
    #[must_use]
    pub fn from_index(index: u8) -> Option<Self> {
        (index < LETTERS).then_some(Self(index))
    }

    /// Index of the letter, 0 (`A`) to 25 (`Z`).
    #[must_use]
    pub fn index(self) -> u8 {
        self.0
    }

    /// The letter as an upper-case character.
    #[must_use]
    pub fn as_char(self) -> char {
        char::from(b'A' + self.0)
    }

    fn bit(self) -> u32 {
        1 << self.0
    }
}

impl fmt::Display for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.as_char())
    }
}

/// A set of letter labels as a 32-bit mask; bit 0 is `A`, bits above 25 are always clear.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LetterMask(u32);

impl LetterMask {
    /// The set without letters.
    pub const EMPTY: Self = Self(0);

    /// The set with the given bits; bits that stand for no letter are dropped.
    #[must_use]
    pub fn from_bits_truncate(bits: u32) -> Self {
        Self(bits & ((1 << LETTERS) - 1))
    }

    /// The bits of the set, as stored and sent.
    #[must_use]
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Adds a letter; false when it was there already.
    pub fn insert(&mut self, letter: Letter) -> bool {
        let is_new = !self.contains(letter);
        self.0 |= letter.bit();
        is_new
    }

    /// Takes a letter out; false when it was not there.
    pub fn remove(&mut self, letter: Letter) -> bool {
        let was_there = self.contains(letter);
        self.0 &= !letter.bit();
        was_there
    }

    /// Whether the letter is in the set.
    #[must_use]
    pub fn contains(self, letter: Letter) -> bool {
        self.0 & letter.bit() != 0
    }

    /// Whether the set has no letter.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The letters that are in both sets.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The letters that are in either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The letters of the set, `A` first.
    pub fn iter(self) -> impl Iterator<Item = Letter> {
        (0..LETTERS)
            .map(Letter)
            .filter(move |letter| self.contains(*letter))
    }
}

impl fmt::Display for LetterMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|letter| write!(f, "{letter}"))
    }
}

/// A `key=value` label. Key and value are valid by construction.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WordLabel {
    key: Box<str>,
    value: Box<str>,
}

impl WordLabel {
    /// A word label of a key (`[a-z][a-z0-9-]*`) and a value (`[A-Za-z0-9._-]+`), each of at most
    /// [`MAX_WORD_BYTES`] bytes.
    pub fn new(key: &str, value: &str) -> Result<Self, LabelError> {
        if !is_key(key) {
            return Err(LabelError::BadKey { key: clip(key) });
        }
        if !is_value(value) {
            return Err(LabelError::BadValue { value: clip(value) });
        }
        Ok(Self {
            key: key.into(),
            value: value.into(),
        })
    }

    /// A word label of a name from outside, such as a node's: `value_of_name(name)` is its value.
    pub fn from_name(key: &str, name: &str) -> Result<Self, LabelError> {
        let value = Self::value_of_name(name).ok_or_else(|| LabelError::BadValue {
            value: String::new(),
        })?;
        Self::new(key, &value)
    }

    /// The label value that stands for any name; `None` for an empty name.
    ///
    /// A name that is a valid value stands for itself. Any other (too long, or with characters a
    /// value may not have) becomes its beginning, `-`, and 16 digits of a hash of the whole name.
    /// Servers and mounts both use this function, so they agree without having talked.
    #[must_use]
    pub fn value_of_name(name: &str) -> Option<String> {
        if name.is_empty() {
            return None;
        }
        if is_value(name) {
            return Some(name.to_owned());
        }
        let mut value: String = name
            .chars()
            .map(|c| {
                if c.is_ascii() && is_value_byte(c as u8) {
                    c
                } else {
                    '-'
                }
            })
            .take(MAX_WORD_BYTES - 17)
            .collect();
        value.push_str(&format!("-{:016x}", fnv1a(name.as_bytes())));
        Some(value)
    }

    /// The part before `=`.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The part after `=`.
    #[must_use]
    pub fn value(&self) -> &str {
        &self.value
    }
}

impl fmt::Display for WordLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.key, self.value)
    }
}

/// A label: one letter, or a `key=value` word.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Label {
    /// A letter.
    Letter(Letter),
    /// A word.
    Word(WordLabel),
}

impl FromStr for Label {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        if let Some((key, value)) = text.split_once('=') {
            return WordLabel::new(key, value).map(Self::Word);
        }
        let mut characters = text.chars();
        match (characters.next().and_then(Letter::new), characters.next()) {
            (Some(letter), None) => Ok(Self::Letter(letter)),
            _ => Err(LabelError::NotALabel { text: clip(text) }),
        }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Letter(letter) => letter.fmt(f),
            Self::Word(word) => word.fmt(f),
        }
    }
}

impl From<Letter> for Label {
    fn from(letter: Letter) -> Self {
        Self::Letter(letter)
    }
}

impl From<WordLabel> for Label {
    fn from(word: WordLabel) -> Self {
        Self::Word(word)
    }
}

serde_as_text!(Label);

/// Whether the text is a valid key of a word label.
pub(crate) fn is_key(text: &str) -> bool {
    text.len() <= MAX_WORD_BYTES
        && text
            .bytes()
            .next()
            .is_some_and(|byte| byte.is_ascii_lowercase())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Whether the text is a valid value of a word label.
pub(crate) fn is_value(text: &str) -> bool {
    (1..=MAX_WORD_BYTES).contains(&text.len()) && text.bytes().all(is_value_byte)
}

/// Whether the byte may stand in the value of a word label.
pub(crate) fn is_value_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}

/// The beginning of a refused text, short enough for a message.
pub(crate) fn clip(text: &str) -> String {
    const SHOWN: usize = 80;
    if text.chars().nth(SHOWN).is_none() {
        return text.to_owned();
    }
    text.chars().take(SHOWN).chain("...".chars()).collect()
}

/// FNV-1a with 64 bits: part of the stored form of long names, so it never changes.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

const LETTERS: u8 = 26;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_ignore_case_and_print_in_upper_case() {
        assert_eq!(Letter::new('q'), Letter::new('Q'));
        assert_eq!("q".parse::<Label>().unwrap().to_string(), "Q");
        assert_eq!(Letter::new('é'), None);
        assert_eq!(Letter::new('1'), None);
        assert_eq!(Letter::from_index(26), None);
    }

    #[test]
    fn the_mask_drops_bits_that_are_no_letters() {
        let mask = LetterMask::from_bits_truncate(u32::MAX);
        assert_eq!(mask.to_string(), "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
        assert_eq!(mask.bits(), 0x03ff_ffff);
    }

    #[test]
    fn words_keep_their_case_and_their_bounds() {
        let word: Label = "zone=eu-1A.b_c".parse().unwrap();
        assert_eq!(word.to_string(), "zone=eu-1A.b_c");
        let longest = "a".repeat(MAX_WORD_BYTES);
        assert!(WordLabel::new(&longest, &longest).is_ok());
        let too_long = "a".repeat(MAX_WORD_BYTES + 1);
        assert!(matches!(
            WordLabel::new(&too_long, "x"),
            Err(LabelError::BadKey { .. })
        ));
        assert!(matches!(
            WordLabel::new("x", &too_long),
            Err(LabelError::BadValue { .. })
        ));
        for bad in [
            "Zone=a", "1a=b", "-a=b", "=b", "a=", "a=b c", "a=b=c", "a=é", "AB", "", "1",
        ] {
            assert!(bad.parse::<Label>().is_err(), "{bad}");
        }
    }

    #[test]
    fn long_or_odd_names_become_hashed_values() {
        assert_eq!(
            WordLabel::value_of_name("node-7.example").unwrap(),
            "node-7.example"
        );
        assert_eq!(WordLabel::value_of_name(""), None);
        let long = "n".repeat(64);
        let value = WordLabel::value_of_name(&long).unwrap();
        assert_eq!(value.len(), MAX_WORD_BYTES);
        assert!(is_value(&value));
        let other = WordLabel::value_of_name(&format!("{}m", "n".repeat(63))).unwrap();
        assert_ne!(value, other);
        let odd = WordLabel::from_name("node", "höst/1").unwrap();
        // The stored form of a name must not change between releases.
        assert_eq!(
            odd.to_string(),
            format!("node=h-st-1-{:016x}", fnv1a("höst/1".as_bytes()))
        );
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn labels_are_text_in_json() {
        let label: Label = serde_json::from_str("\"media=ssd\"").unwrap();
        assert_eq!(serde_json::to_string(&label).unwrap(), "\"media=ssd\"");
        assert!(serde_json::from_str::<Label>("\"AB\"").is_err());
    }
}
