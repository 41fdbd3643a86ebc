//! Storage class definitions: copies or erasure-coded parts, uniqueness, mode.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::error::{Hint, ParseError, ParseErrorKind, Parsed};
use crate::expr::LabelExpr;
use crate::label::LetterMask;
use crate::parse::{MAX_DEPTH, MAX_TERMS, MAX_TEXT_BYTES, Parser};
use crate::text::serde_as_text;

/// Number of data parts of a form that names only its parity parts, unless configured otherwise.
pub const DEFAULT_EC_DATA_PARTS: u8 = 8;
/// Smallest number of data parts.
pub const MIN_EC_DATA_PARTS: u8 = 2;
/// Largest number of data parts.
pub const MAX_EC_DATA_PARTS: u8 = 32;
/// Largest number of parity parts; the smallest is one.
pub const MAX_EC_PARITY_PARTS: u8 = 8;

/// Why values do not make a definition. Trying again cannot help.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// There is no term, or there are more than [`MAX_TERMS`].
    #[error("a definition has 1 to {MAX_TERMS} copies, not {count}")]
    Copies {
        /// The number of terms.
        count: usize,
    },
    /// The number of data or parity parts is out of range.
    #[error(
        "erasure coding takes {MIN_EC_DATA_PARTS} to {MAX_EC_DATA_PARTS} data parts and 1 to \
         {MAX_EC_PARITY_PARTS} parity parts"
    )]
    Parts,
    /// A uniqueness part names no letter.
    #[error("uniqueness by letters needs at least one letter")]
    NoLetters,
    /// The text of the definition could not be read again.
    #[error("the definition is longer than {MAX_TEXT_BYTES} bytes or deeper than {MAX_DEPTH}")]
    TooLarge,
}

/// What happens to a copy whose expression no free server satisfies.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Only matching servers: no space on creation, no copy in repair.
    Strict,
    /// Wait for busy matching servers, spill to others when the matching ones are full.
    #[default]
    Std,
    /// Spill to others in both cases.
    Loose,
}

impl Mode {
    /// The word that stands for the mode in a definition.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Std => "std",
            Self::Loose => "loose",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What two servers of one chunk may not have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Uniqueness {
    /// Nothing beyond being two servers.
    #[default]
    Server,
    /// The address.
    Ip,
    /// The rack.
    Rack,
    /// The zone.
    Zone,
    /// The subset of these letters that they carry. A server that carries none of them is alone.
    Letters(LetterMask),
}

impl fmt::Display for Uniqueness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server => Ok(()),
            Self::Ip => f.write_str("/[IP]"),
            Self::Rack => f.write_str("/[RACK]"),
            Self::Zone => f.write_str("/[ZONE]"),
            Self::Letters(letters) => write!(f, "/{letters}"),
        }
    }
}

/// An erasure coding form and where its parts go.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EcParts {
    data: Option<u8>,
    parity: u8,
    on_data: LabelExpr,
    on_parity: LabelExpr,
}

impl EcParts {
    /// A form with `data` parts (`None`: the cluster's default) and `parity` parts, the first on
    /// servers that match `on_data`, the others on servers that match `on_parity`.
    pub fn new(
        data: Option<u8>,
        parity: u8,
        on_data: LabelExpr,
        on_parity: LabelExpr,
    ) -> Result<Self, DefinitionError> {
        let is_data = |data| (MIN_EC_DATA_PARTS..=MAX_EC_DATA_PARTS).contains(&data);
        if !data.is_none_or(is_data) || !(1..=MAX_EC_PARITY_PARTS).contains(&parity) {
            return Err(DefinitionError::Parts);
        }
        Ok(Self {
            data,
            parity,
            on_data,
            on_parity,
        })
    }

    /// Number of data parts, if the form names it.
    #[must_use]
    pub fn data_parts(&self) -> Option<u8> {
        self.data
    }

    /// Number of parity parts.
    #[must_use]
    pub fn parity_parts(&self) -> u8 {
        self.parity
    }

    /// Where data parts go.
    #[must_use]
    pub fn on_data(&self) -> &LabelExpr {
        &self.on_data
    }

    /// Where parity parts go.
    #[must_use]
    pub fn on_parity(&self) -> &LabelExpr {
        &self.on_parity
    }
}

impl fmt::Display for EcParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("@")?;
        if let Some(data) = self.data {
            write!(f, "{data}+")?;
        }
        write!(f, "{}", self.parity)?;
        if self.on_data != self.on_parity {
            write!(f, ",{},{}", self.on_data, self.on_parity)
        } else if self.on_data != LabelExpr::Any {
            write!(f, ",{}", self.on_data)
        } else {
            Ok(())
        }
    }
}

/// The two kinds of redundancy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Form {
    /// Whole copies, one for each expression; 1 to [`MAX_TERMS`] of them.
    Copies(Vec<LabelExpr>),
    /// Erasure-coded parts.
    Parts(EcParts),
}

/// Where the copies or parts of a chunk are to be, in one state of its storage class.
///
/// `Display` gives the normal form, which reads as an equal definition.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StorageDefinition {
    form: Form,
    uniqueness: Uniqueness,
    mode: Option<Mode>,
}

impl StorageDefinition {
    /// A definition with a form and nothing else.
    pub fn new(form: Form) -> Result<Self, DefinitionError> {
        if let Form::Copies(terms) = &form
            && !(1..=MAX_TERMS).contains(&terms.len())
        {
            return Err(DefinitionError::Copies { count: terms.len() });
        }
        Self {
            form,
            uniqueness: Uniqueness::Server,
            mode: None,
        }
        .checked()
    }

    /// The definition with another uniqueness part.
    pub fn with_uniqueness(mut self, uniqueness: Uniqueness) -> Result<Self, DefinitionError> {
        if uniqueness == Uniqueness::Letters(LetterMask::EMPTY) {
            return Err(DefinitionError::NoLetters);
        }
        self.uniqueness = uniqueness;
        self.checked()
    }

    /// The definition with another mode; `None` leaves it to the class.
    pub fn with_mode(mut self, mode: Option<Mode>) -> Result<Self, DefinitionError> {
        self.mode = mode;
        self.checked()
    }

    /// Reads a definition; `-` or `~` alone is `None`, no definition.
    pub fn parse_optional(text: &str) -> Result<Parsed<Option<Self>>, ParseError> {
        let mut parser = Parser::new(text)?;
        let value = if parser.says_nothing() {
            None
        } else {
            Some(read(&mut parser)?)
        };
        Ok(Parsed {
            value,
            warnings: parser.into_warnings(),
        })
    }

    /// Reads a definition where one is required.
    pub fn parse(text: &str) -> Result<Parsed<Self>, ParseError> {
        let parsed = Self::parse_optional(text)?;
        let value = parsed.value.ok_or_else(|| {
            ParseError::new(ParseErrorKind::NothingNotAllowed, text, 0)
                .expected("copies such as `A,B`, or parts such as `@4+2`")
        })?;
        Ok(Parsed {
            value,
            warnings: parsed.warnings,
        })
    }

    /// Copies or parts.
    #[must_use]
    pub fn form(&self) -> &Form {
        &self.form
    }

    /// What two servers of one chunk may not have in common.
    #[must_use]
    pub fn uniqueness(&self) -> Uniqueness {
        self.uniqueness
    }

    /// The mode, if the definition has one of its own.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// Whether the definition asks for erasure-coded parts.
    #[must_use]
    pub fn is_ec(&self) -> bool {
        matches!(self.form, Form::Parts(_))
    }

    /// One expression for each copy, or for each part in the order of part numbers (data first).
    ///
    /// `default_data_parts` counts for a form that names only its parity parts.
    #[must_use]
    pub fn terms(&self, default_data_parts: u8) -> Vec<&LabelExpr> {
        match &self.form {
            Form::Copies(terms) => terms.iter().collect(),
            Form::Parts(parts) => {
                let data = usize::from(parts.data.unwrap_or(default_data_parts));
                let on_data = std::iter::repeat_n(&parts.on_data, data);
                on_data
                    .chain(std::iter::repeat_n(&parts.on_parity, parts.parity.into()))
                    .collect()
            }
        }
    }

    /// The definition with its copies in a fixed order: equal for definitions that ask for the same
    /// servers, so that their chunks may share placement groups.
    #[must_use]
    pub fn sorted(&self) -> Self {
        let mut sorted = self.clone();
        if let Form::Copies(terms) = &mut sorted.form {
            terms.sort();
        }
        sorted
    }

    fn checked(self) -> Result<Self, DefinitionError> {
        let depth = match &self.form {
            Form::Copies(terms) => terms.iter().map(LabelExpr::depth).max().unwrap_or(0),
            Form::Parts(parts) => parts.on_data.depth().max(parts.on_parity.depth()),
        };
        if depth > MAX_DEPTH || self.to_string().len() > MAX_TEXT_BYTES {
            return Err(DefinitionError::TooLarge);
        }
        Ok(self)
    }
}

impl fmt::Display for StorageDefinition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.form {
            Form::Copies(terms) => fmt_list(terms, ",", f)?,
            Form::Parts(parts) => parts.fmt(f)?,
        }
        self.uniqueness.fmt(f)?;
        self.mode.map_or(Ok(()), |mode| write!(f, ":{mode}"))
    }
}

impl FromStr for StorageDefinition {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text).map(|parsed| parsed.value)
    }
}

serde_as_text!(StorageDefinition);

/// Writes expressions with a separator between them.
pub(crate) fn fmt_list(
    terms: &[LabelExpr],
    separator: &str,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    for (index, term) in terms.iter().enumerate() {
        if index > 0 {
            f.write_str(separator)?;
        }
        write!(f, "{term}")?;
    }
    Ok(())
}

fn read(parser: &mut Parser<'_>) -> Result<StorageDefinition, ParseError> {
    let form = match parser.peek() {
        Some(b'@' | b'=') => Form::Parts(parser.ec_form()?),
        _ => Form::Copies(parser.terms()?.0),
    };
    let mut expected = "an operator, `,`, `/`, `:` or the end of the text";
    let mut uniqueness = Uniqueness::Server;
    if parser.take(b'/') {
        uniqueness = parser.uniqueness()?;
        expected = "`:` or the end of the text";
        if matches!(parser.peek(), Some(b' ' | b'\t')) {
            let error = parser.error(ParseErrorKind::Unexpected).expected(expected);
            return Err(error.hint(Hint::TrailingBlank));
        }
    }
    let mode = if parser.take(b':') {
        Some(parser.mode()?)
    } else {
        None
    };
    parser.expect_end(expected)?;
    let definition = StorageDefinition {
        form,
        uniqueness,
        mode,
    };
    parser.check_normal_form(definition.to_string().len())?;
    Ok(definition)
}

#[cfg(test)]
#[path = "definition_tests.rs"]
mod tests;
