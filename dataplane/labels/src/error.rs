//! What is wrong with a text, where, and what to write instead.

use std::fmt;

use thiserror::Error;

/// A value read from text together with what looked odd in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parsed<T> {
    /// The value.
    pub value: T,
    /// Things a user should be told although the text is valid.
    pub warnings: Vec<Warning>,
}

/// Something in a valid text that is probably not what its author meant.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Warning {
    /// The text begins with `-`, which is NOT: perhaps a mistyped command option.
    #[error(
        "the leading `-` means NOT: `{text}` is every server that does not match what follows; \
         if a command option was meant, it was mistyped (write `!` to say NOT without this warning)"
    )]
    LeadingDash {
        /// The text.
        text: String,
    },
    /// A run of lower-case letters is several labels, not a word.
    #[error(
        "column {column}: `{run}` means a server with every one of these letters; a word is \
         written key=value, such as media=ssd"
    )]
    LettersLookLikeWord {
        /// First byte of the run, counted from 1.
        column: usize,
        /// The run.
        run: String,
    },
    /// A repeat count in a preference list only takes up slots.
    #[error(
        "column {column}: a repeat count changes nothing in a preference list, it only takes \
         {count} of the nine places"
    )]
    RepeatCount {
        /// Place of the count, counted from 1.
        column: usize,
        /// The count.
        count: u8,
    },
    /// A preferred expression that no server can be the first to satisfy.
    #[error("expression {position}, `{expression}`, never decides: {earlier} comes before it")]
    NeverDecides {
        /// Place in the list, counted from 1.
        position: usize,
        /// The expression.
        expression: String,
        /// The earlier expression that matches all it could match.
        earlier: String,
    },
    /// Something in a server's label list that is accepted but not how it is written.
    #[error("column {column}: {what}")]
    LabelList {
        /// Where, counted from 1.
        column: usize,
        /// What is odd.
        what: &'static str,
    },
}

/// What the parser met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The end of the text.
    End,
    /// A character.
    Character(char),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End => f.write_str("the end of the text"),
            Self::Character(c) if c.is_control() => write!(f, "the character {:#04x}", *c as u32),
            Self::Character(' ') => f.write_str("a blank"),
            Self::Character('`') => f.write_str("a backquote"),
            Self::Character(c) => write!(f, "`{c}`"),
        }
    }
}

/// The cause of a [`ParseError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ParseErrorKind {
    /// Something else was expected here.
    #[error("unexpected text")]
    Unexpected,
    /// There is no text.
    #[error("the text is empty")]
    Empty,
    /// The text, or its normal form, exceeds [`MAX_TEXT_BYTES`](crate::MAX_TEXT_BYTES).
    #[error("the text is longer than {} bytes", crate::MAX_TEXT_BYTES)]
    TooLong,
    /// Groups are nested deeper than [`MAX_DEPTH`](crate::MAX_DEPTH).
    #[error("groups are nested deeper than {}", crate::MAX_DEPTH)]
    TooDeep,
    /// More than [`MAX_TERMS`](crate::MAX_TERMS) terms, repeat counts expanded.
    #[error("more than {} terms, repeat counts expanded", crate::MAX_TERMS)]
    TooManyTerms,
    /// A bracket is closed by the other kind, or not at all.
    #[error("the group is not closed")]
    UnclosedGroup,
    /// A repeat count that is not one digit 1-9.
    #[error("a repeat count is one digit, 1 to 9")]
    BadCount,
    /// A repeat count where none may stand.
    #[error("no repeat count may stand here")]
    CountNotAllowed,
    /// A count without an expression that is not the whole list.
    #[error("a count without an expression has to be the whole list")]
    BareCount,
    /// A `key=value` word with a bad key or value.
    #[error("bad word label")]
    BadWord,
    /// A single character of a label list that is no label.
    #[error("bad label")]
    BadLabel,
    /// A server carries too many words.
    #[error("more than {} word labels", crate::MAX_WORDS)]
    TooManyWords,
    /// The numbers of an erasure-coded form are malformed or out of range.
    #[error("bad erasure coding form")]
    BadEcForm,
    /// More than two expressions after an erasure-coded form.
    #[error("an erasure coding form takes at most two expressions, for data and for parity")]
    TooManyEcExpressions,
    /// The part after `/` is malformed.
    #[error("bad uniqueness part")]
    BadUniqueness,
    /// The part after `:` is malformed.
    #[error("bad mode")]
    BadMode,
    /// An erasure-coded form in a preference list.
    #[error("erasure coding means nothing in a preference list")]
    EcInPreference,
    /// A uniqueness part in a preference list.
    #[error("a uniqueness part means nothing in a preference list")]
    UniquenessInPreference,
    /// A mode in a preference list.
    #[error("a mode means nothing in a preference list")]
    ModeInPreference,
    /// `-` or `~` alone where a definition is required.
    #[error("`-` alone means no definition, but one is required here")]
    NothingNotAllowed,
    /// A `{variable}` that is malformed or not in the value of a word.
    #[error("bad variable")]
    BadVariable,
}

/// Advice for a known trap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hint {
    /// A leading `-` is NOT.
    LeadingDash,
    /// Mount options are split at commas.
    CommaTrap,
    /// The text has a line end.
    Newline,
    /// A bare count in a longer list.
    BareCount,
    /// A repeat count after its expression.
    CountBefore,
    /// Repeat counts do not go with erasure coding.
    CountInEc,
    /// A negation needs an operator before it.
    NotNeedsAnd,
    /// Keys are lower case.
    KeyForm,
    /// No blank may follow here.
    TrailingBlank,
    /// Quotes do not belong to the text.
    Quotes,
    /// Groups close with their own kind.
    BracketKind,
    /// Names of modes.
    Modes,
    /// Names of uniqueness parts.
    Uniqueness,
    /// The range of erasure coding forms.
    EcRange,
    /// Where variables may stand.
    Variable,
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LeadingDash => {
                "a leading `-` means NOT; a mistyped command option ends up here as well"
            }
            Self::CommaTrap => {
                "mount options are split at commas: separate expressions with `;` (or `\\,`)"
            }
            Self::Newline => "the text is one line; a text read from a file may carry a line end",
            Self::BareCount => "write `2*` for two of any server, as in `2*,A` or `2*:strict`",
            Self::CountBefore => "a repeat count stands before its expression, as in `2A`",
            Self::CountInEc => {
                "the numbers of parts stand in front, as in `@4+2,A`; drop the count"
            }
            Self::NotNeedsAnd => "write `A&!B` for A and not B",
            Self::KeyForm => {
                "a word is key=value without blanks; the key is lower case, and a blank or an \
                 operator separates it from a letter before it"
            }
            Self::TrailingBlank => "remove the blank",
            Self::Quotes => "quotes go around the whole list",
            Self::BracketKind => "`(` is closed by `)`, and `[` by `]`",
            Self::Modes => "modes are strict (s), std (d) and loose (l)",
            Self::Uniqueness => {
                "write `/[IP]`, `/[RACK]`, `/[ZONE]`, or letters and ranges such as `/ABX-Z`"
            }
            Self::EcRange => {
                "write `@k+m` with 2 to 32 data parts and 1 to 8 parity parts, or `@m`"
            }
            Self::Variable => "variables stand in the value of a word, as in `zone={zone}`",
        })
    }
}

/// Why a text is refused, with the place. Trying again cannot help: the text has to change.
///
/// `Display` gives a message, the text, a line with a caret below the place, and a hint if one of
/// the known traps may be the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// The cause.
    pub kind: ParseErrorKind,
    /// Offset in bytes of what was found.
    pub offset: usize,
    /// What was found there.
    pub found: Found,
    /// What would have been right; empty when the cause says it all.
    pub expected: &'static str,
    /// What to write instead, for known traps.
    pub hint: Option<Hint>,
    /// The refused text.
    pub text: String,
}

impl ParseError {
    /// Place of the error in bytes, counted from 1.
    #[must_use]
    pub fn column(&self) -> usize {
        self.offset + 1
    }

    /// An error at a byte of a text. An offset inside a character moves to its beginning.
    pub(crate) fn new(kind: ParseErrorKind, text: &str, offset: usize) -> Self {
        let mut offset = offset.min(text.len());
        while !text.is_char_boundary(offset) {
            offset -= 1;
        }
        let found = text[offset..]
            .chars()
            .next()
            .map_or(Found::End, Found::Character);
        let hint = matches!(found, Found::Character('\n' | '\r')).then_some(Hint::Newline);
        Self {
            kind,
            offset,
            found,
            expected: "",
            hint,
            text: text.to_owned(),
        }
    }

    pub(crate) fn expected(mut self, expected: &'static str) -> Self {
        self.expected = expected;
        self
    }

    /// Adds a hint unless there is a better one.
    pub(crate) fn hint(mut self, hint: Hint) -> Self {
        self.hint.get_or_insert(hint);
        self
    }

    /// The part of the text around the error, without control characters, and the caret's place.
    fn excerpt(&self) -> (String, usize) {
        let before: Vec<char> = self.text[..self.offset].chars().collect();
        let skipped = before.len().saturating_sub(EXCERPT_BEFORE);
        let mut shown = String::new();
        if skipped > 0 {
            shown.push_str("...");
        }
        let printable = |c: char| if c.is_control() { '\u{b7}' } else { c };
        shown.extend(before[skipped..].iter().copied().map(printable));
        let caret = shown.chars().count();
        let mut after = self.text[self.offset..].chars();
        shown.extend(after.by_ref().take(EXCERPT_AFTER).map(printable));
        if after.next().is_some() {
            shown.push_str("...");
        }
        (shown, caret)
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {}: {}", self.column(), self.kind)?;
        if self.expected.is_empty() {
            write!(f, " (found {})", self.found)?;
        } else {
            write!(f, ": found {}, expected {}", self.found, self.expected)?;
        }
        let (shown, caret) = self.excerpt();
        write!(f, "\n  {shown}\n  {:caret$}^", "")?;
        if let Some(hint) = self.hint {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ParseError {}

const EXCERPT_BEFORE: usize = 60;
const EXCERPT_AFTER: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_the_place() {
        let error = ParseError::new(ParseErrorKind::Unexpected, "A,,B", 2)
            .expected("a label")
            .hint(Hint::CommaTrap);
        assert_eq!(
            error.to_string(),
            "column 3: unexpected text: found `,`, expected a label\n  A,,B\n    ^\n\
             hint: mount options are split at commas: separate expressions with `;` (or `\\,`)"
        );
    }

    #[test]
    fn the_caret_counts_characters_and_control_characters_stay_on_the_line() {
        let error = ParseError::new(ParseErrorKind::Unexpected, "é\nA", 2);
        assert_eq!(
            error.to_string(),
            "column 3: unexpected text (found the character 0x0a)\n  é·A\n   ^\nhint: the text is \
             one line; a text read from a file may carry a line end"
        );
        // An offset inside a character does not panic.
        assert_eq!(
            ParseError::new(ParseErrorKind::Unexpected, "é", 1).offset,
            0
        );
    }

    #[test]
    fn long_texts_are_shown_in_part() {
        let text = format!("{}!{}", "A".repeat(500), "B".repeat(500));
        let shown = ParseError::new(ParseErrorKind::Unexpected, &text, 500).to_string();
        assert!(shown.len() < 400, "{shown}");
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[1].find('!'), lines[2].find('^'));
    }
}
