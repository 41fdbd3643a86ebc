//! The preferred labels of one mount, and the rank they give to a server.

use std::fmt;
use std::str::FromStr;

use crate::definition::fmt_list;
use crate::error::{ParseError, ParseErrorKind, Parsed, Warning};
use crate::expr::LabelExpr;
use crate::parse::{MAX_DEPTH, MAX_TERMS, MAX_TEXT_BYTES, Parser, Purpose};
use crate::set::LabelSet;
use crate::text::serde_as_text;

/// Place of a server in a mount's preference: 0 is best.
///
/// Ranks of one list compare with each other, those of different lists do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(u8);

impl Rank {
    /// Index of the first expression that the server satisfies; the length of the list if none.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The label expressions that one mount prefers, most preferred first; at most [`MAX_TERMS`].
///
/// An empty list is no preference. `Display` writes `;` between expressions, so that the text can
/// stand in mount options, and `-` for the empty list.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct PreferredLabels {
    expressions: Vec<LabelExpr>,
}

impl PreferredLabels {
    /// No preference: every server has the same rank.
    pub const NONE: Self = Self {
        expressions: Vec::new(),
    };

    /// Reads a list and reports what looks odd in it.
    ///
    /// The syntax is that of the copies of a storage class, with `\,` as one more separator and
    /// optional quotes around the whole; `-` or `~` alone is no preference.
    pub fn parse(text: &str) -> Result<Parsed<Self>, ParseError> {
        let mut parser = Parser::for_purpose(text, Purpose::Preference)?;
        if parser.says_nothing() {
            return Ok(Parsed {
                value: Self::NONE,
                warnings: parser.into_warnings(),
            });
        }
        if matches!(parser.peek(), Some(b'@' | b'=')) {
            return Err(parser.error(ParseErrorKind::EcInPreference));
        }
        let (expressions, counts) = parser.terms()?;
        match parser.peek() {
            Some(b'/') => return Err(parser.error(ParseErrorKind::UniquenessInPreference)),
            Some(b':') => return Err(parser.error(ParseErrorKind::ModeInPreference)),
            _ => parser.expect_end("an operator, `;` or the end of the text")?,
        }
        let value = Self { expressions };
        parser.check_normal_form(value.to_string().len())?;
        let has_counts = !counts.is_empty();
        for (column, count) in counts {
            parser.warn(Warning::RepeatCount { column, count });
        }
        if !has_counts {
            value
                .idle_expressions()
                .into_iter()
                .for_each(|warning| parser.warn(warning));
        }
        Ok(Parsed {
            value,
            warnings: parser.into_warnings(),
        })
    }

    /// A list of expressions; `None` when they are too many, too long or too deep to be written.
    #[must_use]
    pub fn from_expressions(expressions: Vec<LabelExpr>) -> Option<Self> {
        let depth = expressions.iter().map(LabelExpr::depth).max().unwrap_or(0);
        let list = Self { expressions };
        let fits = list.expressions.len() <= MAX_TERMS
            && depth <= MAX_DEPTH
            && list.to_string().len() <= MAX_TEXT_BYTES;
        fits.then_some(list)
    }

    /// The expressions, most preferred first.
    #[must_use]
    pub fn expressions(&self) -> &[LabelExpr] {
        &self.expressions
    }

    /// Whether there is no preference.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.expressions.is_empty()
    }

    /// The rank of a server with these labels, as the client was told them.
    #[must_use]
    pub fn rank(&self, labels: &LabelSet) -> Rank {
        let matching = self
            .expressions
            .iter()
            .position(|expr| expr.matches(labels));
        let index = matching.unwrap_or(self.expressions.len());
        // At most MAX_TERMS expressions exist, so the index always fits.
        Rank(u8::try_from(index).unwrap_or(u8::MAX))
    }

    /// The rank of a server that satisfies no expression; with an empty list, of every server.
    #[must_use]
    pub fn worst_rank(&self) -> Rank {
        Rank(u8::try_from(self.expressions.len()).unwrap_or(u8::MAX))
    }

    /// Expressions that cannot be the first to match: after `*`, or a second time.
    fn idle_expressions(&self) -> Vec<Warning> {
        let mut warnings = Vec::new();
        for (index, expr) in self.expressions.iter().enumerate() {
            let earlier = self.expressions[..index]
                .iter()
                .find(|earlier| **earlier == LabelExpr::Any || *earlier == expr);
            if let Some(earlier) = earlier {
                warnings.push(Warning::NeverDecides {
                    position: index + 1,
                    expression: crate::label::clip(&expr.to_string()),
                    earlier: crate::label::clip(&earlier.to_string()),
                });
            }
        }
        warnings
    }
}

impl fmt::Display for PreferredLabels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("-");
        }
        fmt_list(&self.expressions, ";", f)
    }
}

impl FromStr for PreferredLabels {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text).map(|parsed| parsed.value)
    }
}

serde_as_text!(PreferredLabels);

#[cfg(test)]
#[path = "preferred_tests.rs"]
mod tests;
