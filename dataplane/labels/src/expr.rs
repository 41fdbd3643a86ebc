//! Label expressions: the tree, its meaning and its normal form.

use std::fmt;
use std::str::FromStr;

use crate::error::{ParseError, Parsed};
use crate::label::Label;
use crate::parse::Parser;
use crate::set::LabelSet;
use crate::text::serde_as_text;

/// A boolean expression over labels.
///
/// Parsing and the functions [`all`](Self::all), [`any_of`](Self::any_of) and
/// [`negate`](Self::negate) give the normal form: no NOT of a NOT, no AND directly inside an AND,
/// no OR directly inside an OR, at least two operands each. The text of a normal form parses to
/// an equal tree, as long as it keeps the bounds of the parser.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LabelExpr {
    /// Any server, `*`.
    Any,
    /// A server that carries the label.
    Label(Label),
    /// A server that the operand does not match.
    Not(Box<LabelExpr>),
    /// A server that every operand matches; without operands, any server.
    All(Vec<LabelExpr>),
    /// A server that at least one operand matches; without operands, no server.
    AnyOf(Vec<LabelExpr>),
}

impl LabelExpr {
    /// Reads an expression and reports what looks odd in it.
    pub fn parse(text: &str) -> Result<Parsed<Self>, ParseError> {
        let mut parser = Parser::new(text)?;
        let value = parser.single_expression()?;
        Ok(Parsed {
            value,
            warnings: parser.into_warnings(),
        })
    }

    /// The AND of the operands, in normal form.
    #[must_use]
    pub fn all(operands: Vec<Self>) -> Self {
        let mut flat = Vec::with_capacity(operands.len());
        for operand in operands {
            match operand {
                Self::All(inner) => flat.extend(inner),
                other => flat.push(other),
            }
        }
        match flat.len() {
            0 => Self::Any,
            1 => flat.remove(0),
            _ => Self::All(flat),
        }
    }

    /// The OR of the operands, in normal form.
    #[must_use]
    pub fn any_of(operands: Vec<Self>) -> Self {
        let mut flat = Vec::with_capacity(operands.len());
        for operand in operands {
            match operand {
                Self::AnyOf(inner) => flat.extend(inner),
                other => flat.push(other),
            }
        }
        match flat.len() {
            0 => Self::Any.negate(),
            1 => flat.remove(0),
            _ => Self::AnyOf(flat),
        }
    }

    /// The NOT of the expression, in normal form.
    #[must_use]
    pub fn negate(self) -> Self {
        match self {
            Self::Not(inner) => *inner,
            other => Self::Not(Box::new(other)),
        }
    }

    /// Whether a server with these labels satisfies the expression.
    #[must_use]
    pub fn matches(&self, labels: &LabelSet) -> bool {
        match self {
            Self::Any => true,
            Self::Label(label) => labels.contains(label),
            Self::Not(operand) => !operand.matches(labels),
            Self::All(operands) => operands.iter().all(|operand| operand.matches(labels)),
            Self::AnyOf(operands) => operands.iter().any(|operand| operand.matches(labels)),
        }
    }

    /// The labels that the expression names, in order, with repetitions.
    pub fn labels(&self) -> Vec<&Label> {
        let mut labels = Vec::new();
        let mut open = vec![self];
        while let Some(expr) = open.pop() {
            match expr {
                Self::Any => {}
                Self::Label(label) => labels.push(label),
                Self::Not(operand) => open.push(operand),
                Self::All(operands) | Self::AnyOf(operands) => open.extend(operands.iter().rev()),
            }
        }
        labels
    }

    /// How deep AND and OR are nested; what the normal form needs of [`MAX_DEPTH`](crate::MAX_DEPTH).
    pub(crate) fn depth(&self) -> usize {
        match self {
            Self::Any | Self::Label(_) => 0,
            Self::Not(operand) => operand.depth(),
            Self::All(operands) | Self::AnyOf(operands) => {
                1 + operands.iter().map(Self::depth).max().unwrap_or(0)
            }
        }
    }

    fn fmt_operand(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All(operands) | Self::AnyOf(operands) if operands.len() > 1 => {
                write!(f, "({self})")
            }
            _ => write!(f, "{self}"),
        }
    }

    fn fmt_joined(operands: &[Self], sign: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, operand) in operands.iter().enumerate() {
            if index > 0 {
                f.write_str(sign)?;
            }
            if operands.len() == 1 {
                write!(f, "{operand}")?;
            } else {
                operand.fmt_operand(f)?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for LabelExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Label(label) => label.fmt(f),
            Self::Not(operand) => {
                f.write_str("!")?;
                operand.fmt_operand(f)
            }
            Self::All(operands) if operands.is_empty() => f.write_str("*"),
            Self::All(operands) => Self::fmt_joined(operands, "&", f),
            Self::AnyOf(operands) if operands.is_empty() => f.write_str("!*"),
            Self::AnyOf(operands) => Self::fmt_joined(operands, "|", f),
        }
    }
}

impl FromStr for LabelExpr {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text).map(|parsed| parsed.value)
    }
}

impl From<Label> for LabelExpr {
    fn from(label: Label) -> Self {
        Self::Label(label)
    }
}

serde_as_text!(LabelExpr);

#[cfg(test)]
#[path = "expr_tests.rs"]
mod tests;
