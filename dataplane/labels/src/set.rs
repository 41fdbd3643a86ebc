//! The labels of one chunkserver, and what a client is shown of them.

use std::fmt;
use std::str::FromStr;

use crate::error::{ParseError, ParseErrorKind, Parsed, Warning};
use crate::label::{Label, LabelError, Letter, LetterMask, WordLabel};
use crate::text::serde_as_text;

/// Largest number of word labels in a set.
pub const MAX_WORDS: usize = 64;

/// The labels of a chunkserver: letters as a mask, words sorted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LabelSet {
    letters: LetterMask,
    words: Vec<WordLabel>,
}

impl LabelSet {
    /// The set without labels.
    pub const EMPTY: Self = Self {
        letters: LetterMask::EMPTY,
        words: Vec::new(),
    };

    /// Reads the label list of a server's configuration.
    ///
    /// Labels are separated by `,` or `;`. Letters run together, repeated labels and stray
    /// separators are applied as far as they make sense and reported as warnings. An empty text is
    /// the empty set.
    pub fn parse(text: &str) -> Result<Parsed<Self>, ParseError> {
        if text.len() > crate::MAX_TEXT_BYTES {
            return Err(ParseError::new(
                ParseErrorKind::TooLong,
                text,
                crate::MAX_TEXT_BYTES,
            ));
        }
        let mut reader = ListReader {
            text,
            set: Self::EMPTY,
            warnings: Vec::new(),
        };
        if text.bytes().any(|byte| byte != b' ' && byte != b'\t') {
            let mut offset = 0;
            for item in text.split([',', ';']) {
                reader.item(item, offset)?;
                offset += item.len() + 1;
            }
        }
        Ok(Parsed {
            value: reader.set,
            warnings: reader.warnings,
        })
    }

    /// The set with these letters and no words.
    #[must_use]
    pub fn from_letters(letters: LetterMask) -> Self {
        Self {
            letters,
            words: Vec::new(),
        }
    }

    /// Adds a label; false when it was there already. Fails when the set has [`MAX_WORDS`] words.
    pub fn insert(&mut self, label: Label) -> Result<bool, LabelError> {
        match label {
            Label::Letter(letter) => Ok(self.letters.insert(letter)),
            Label::Word(word) => match self.words.binary_search(&word) {
                Ok(_) => Ok(false),
                Err(_) if self.words.len() >= MAX_WORDS => Err(LabelError::TooManyWords),
                Err(place) => {
                    self.words.insert(place, word);
                    Ok(true)
                }
            },
        }
    }

    /// Makes the word the only one with its key. Fails when the set has [`MAX_WORDS`] words.
    pub fn replace_word(&mut self, word: WordLabel) -> Result<(), LabelError> {
        let kept = self
            .words
            .iter()
            .filter(|other| other.key() != word.key())
            .count();
        if kept >= MAX_WORDS {
            return Err(LabelError::TooManyWords);
        }
        self.words.retain(|other| other.key() != word.key());
        self.insert(Label::Word(word)).map(|_| ())
    }

    /// Takes a label out; false when it was not there.
    pub fn remove(&mut self, label: &Label) -> bool {
        match label {
            Label::Letter(letter) => self.letters.remove(*letter),
            Label::Word(word) => self
                .words
                .binary_search(word)
                .map(|place| self.words.remove(place))
                .is_ok(),
        }
    }

    /// Whether the server carries the label.
    #[must_use]
    pub fn contains(&self, label: &Label) -> bool {
        match label {
            Label::Letter(letter) => self.letters.contains(*letter),
            Label::Word(word) => self.words.binary_search(word).is_ok(),
        }
    }

    /// The letters of the set.
    #[must_use]
    pub fn letters(&self) -> LetterMask {
        self.letters
    }

    /// The words of the set, sorted by key, then value.
    #[must_use]
    pub fn words(&self) -> &[WordLabel] {
        &self.words
    }

    /// The first value of a key.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&str> {
        self.words
            .iter()
            .find(|word| word.key() == key)
            .map(WordLabel::value)
    }

    /// All labels, letters first.
    pub fn iter(&self) -> impl Iterator<Item = Label> {
        let words = self.words.iter().cloned().map(Label::Word);
        self.letters.iter().map(Label::Letter).chain(words)
    }

    /// Whether there is no label.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.letters.is_empty() && self.words.is_empty()
    }
}

impl fmt::Display for LabelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, label) in self.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            label.fmt(f)?;
        }
        Ok(())
    }
}

impl FromStr for LabelSet {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text).map(|parsed| parsed.value)
    }
}

serde_as_text!(LabelSet);

/// Where a server stands, seen from a client, in a cluster that may be divided into locations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocationView {
    /// The cluster has no locations, or the server is in the client's own.
    Own,
    /// The server is in another location.
    Other,
}

/// The labels that a client is told of a server: none when the server is in another location.
///
/// So letters and words match only inside the client's location, `*` matches everywhere, and a
/// negated expression matches a server outside. This holds for answers and for the map alike.
#[must_use]
pub fn effective_labels(labels: &LabelSet, view: LocationView) -> &LabelSet {
    static NONE: LabelSet = LabelSet::EMPTY;
    match view {
        LocationView::Own => labels,
        LocationView::Other => &NONE,
    }
}

/// Reads one label list.
struct ListReader<'a> {
    text: &'a str,
    set: LabelSet,
    warnings: Vec<Warning>,
}

impl ListReader<'_> {
    /// Reads what stands between two separators; `offset` is where it begins in the text.
    fn item(&mut self, item: &str, offset: usize) -> Result<(), ParseError> {
        let mut pieces = 0;
        let mut start = offset;
        for piece in item.split([' ', '\t']) {
            if !piece.is_empty() {
                pieces += 1;
                self.piece(piece, start)?;
            }
            start += piece.len() + 1;
        }
        match pieces {
            0 => self.warn(offset, "nothing stands between two separators"),
            1 => {}
            _ => self.warn(offset, "labels are separated by `,` or `;`, not by a blank"),
        }
        Ok(())
    }

    fn piece(&mut self, piece: &str, offset: usize) -> Result<(), ParseError> {
        if piece.contains('=') {
            let label = piece.parse().map_err(|_| {
                ParseError::new(ParseErrorKind::BadWord, self.text, offset)
                    .expected("key=value with a lower-case key, at most 63 bytes each")
            })?;
            return self.add(label, offset);
        }
        for (index, character) in piece.char_indices() {
            let letter = Letter::new(character).ok_or_else(|| {
                ParseError::new(ParseErrorKind::BadLabel, self.text, offset + index)
                    .expected("a letter A-Z or key=value")
            })?;
            self.add(Label::Letter(letter), offset + index)?;
        }
        if piece.len() > 1 {
            self.warn(
                offset,
                "letters run together are separate labels; separate them with `,`",
            );
        }
        Ok(())
    }

    fn add(&mut self, label: Label, offset: usize) -> Result<(), ParseError> {
        match self.set.insert(label) {
            Ok(true) => {}
            Ok(false) => self.warn(offset, "the label is there twice"),
            Err(_) => {
                return Err(ParseError::new(
                    ParseErrorKind::TooManyWords,
                    self.text,
                    offset,
                ));
            }
        }
        Ok(())
    }

    fn warn(&mut self, offset: usize, what: &'static str) {
        self.warnings.push(Warning::LabelList {
            column: offset + 1,
            what,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LabelExpr;

    fn set(text: &str) -> LabelSet {
        text.parse().unwrap()
    }

    #[test]
    fn lists_are_read_in_any_order_and_printed_in_one() {
        assert_eq!(
            set("zone=b; a ,C;media=ssd").to_string(),
            "A,C,media=ssd,zone=b"
        );
        assert_eq!(set("").to_string(), "");
        assert_eq!(set("A,B").letters().bits(), 3);
        assert_eq!(set("zone=b").value("zone"), Some("b"));
        assert_eq!(set("zone=b").value("region"), None);
    }

    #[test]
    fn odd_lists_are_applied_with_warnings() {
        for (text, result) in [
            ("AB", "A,B"),
            ("A,,B", "A,B"),
            ("A,A", "A"),
            ("A B,", "A,B"),
        ] {
            let parsed = LabelSet::parse(text).unwrap();
            assert_eq!(parsed.value.to_string(), result, "{text}");
            assert!(!parsed.warnings.is_empty(), "{text}");
        }
        assert!(LabelSet::parse("A;B").unwrap().warnings.is_empty());
    }

    #[test]
    fn bad_labels_name_their_place() {
        assert_eq!(LabelSet::parse("A,1").unwrap_err().offset, 2);
        assert_eq!(LabelSet::parse("A,é").unwrap_err().offset, 2);
        assert_eq!(LabelSet::parse("A, Zone=x").unwrap_err().offset, 3);
        assert_eq!(LabelSet::parse("A\n").unwrap_err().offset, 1);
        assert_eq!(
            LabelSet::parse(&"A".repeat(crate::MAX_TEXT_BYTES + 1))
                .unwrap_err()
                .kind,
            ParseErrorKind::TooLong
        );
    }

    #[test]
    fn the_number_of_words_is_bounded() {
        let many: Vec<String> = (0..=MAX_WORDS).map(|i| format!("w{i}=x")).collect();
        assert!(LabelSet::parse(&many[1..].join(",")).is_ok());
        let error = LabelSet::parse(&many.join(",")).unwrap_err();
        assert_eq!(error.kind, ParseErrorKind::TooManyWords);
        let mut full = set(&many[1..].join(","));
        assert_eq!(
            full.insert("new=x".parse().unwrap()),
            Err(LabelError::TooManyWords)
        );
        assert_eq!(full.insert("w1=x".parse().unwrap()), Ok(false));
        // Replacing the word of a key works in a full set.
        full.replace_word(WordLabel::new("w1", "y").unwrap())
            .unwrap();
        assert_eq!(full.value("w1"), Some("y"));
        assert!(
            full.replace_word(WordLabel::new("new", "y").unwrap())
                .is_err()
        );
        assert!(full.remove(&"w2=x".parse().unwrap()));
        assert!(!full.remove(&"w2=x".parse().unwrap()));
    }

    #[test]
    fn a_server_outside_the_location_has_no_labels() {
        let labels = set("A,zone=b");
        let far = effective_labels(&labels, LocationView::Other);
        let near = effective_labels(&labels, LocationView::Own);
        let matches =
            |text: &str, labels: &LabelSet| text.parse::<LabelExpr>().unwrap().matches(labels);
        assert!(matches("A", near) && matches("zone=b", near) && matches("*", near));
        assert!(!matches("A", far) && !matches("zone=b", far));
        assert!(matches("*", far) && matches("!A", far) && matches("!zone=b", far));
    }

    #[test]
    fn sets_are_text_in_json() {
        let json = serde_json::to_string(&set("B,a,zone=x")).unwrap();
        assert_eq!(json, "\"A,B,zone=x\"");
        assert_eq!(
            serde_json::from_str::<LabelSet>(&json).unwrap(),
            set("A,B,zone=x")
        );
    }
}
