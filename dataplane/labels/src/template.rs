//! Templates of preferred labels: what a class or a volume says once, filled in on each node.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::error::{Hint, ParseError, ParseErrorKind, Warning};
use crate::label::{WordLabel, is_key, is_value_byte};
use crate::preferred::PreferredLabels;
use crate::text::serde_as_text;

/// The template of a volume whose class has none: own node, then own zone, then own region.
pub const DEFAULT_PREFERENCE_TEMPLATE: &str = "node={node}; zone={zone}; region={region}";

/// A list of preferred labels with `{variable}`s in the values of its words.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PreferenceTemplate {
    text: String,
}

/// What a template gives on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expansion {
    /// The list, without the dropped expressions; no preference if all were dropped.
    pub preferred: PreferredLabels,
    /// The expressions that name a variable without a value, in order.
    pub dropped: Vec<DroppedExpression>,
    /// What looks odd in the list.
    pub warnings: Vec<Warning>,
}

/// An expression of a template that was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppedExpression {
    /// The expression as the template has it.
    pub expression: String,
    /// The variable without a value.
    pub variable: String,
}

impl PreferenceTemplate {
    /// Reads a template. It is valid if the list is valid for any values of its variables.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        if let Some(place) = text.find(['"', '\'', '\\']) {
            let error = ParseError::new(ParseErrorKind::Unexpected, text, place);
            return Err(error.expected("a list without quotes and backslashes"));
        }
        let stand_in = fill_in_names(text)?;
        if let Err(error) = PreferredLabels::parse(&stand_in) {
            // Same length, so the same place; but the message shows the template's own text.
            let hint = error.hint;
            let error = ParseError::new(error.kind, text, error.offset).expected(error.expected);
            return Err(hint.into_iter().fold(error, ParseError::hint));
        }
        Ok(Self {
            text: text.to_owned(),
        })
    }

    /// The text of the template.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The names of the variables, sorted.
    #[must_use]
    pub fn variables(&self) -> Vec<&str> {
        let mut names: Vec<&str> = variables(&self.text).map(|(_, name)| name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The list that the template gives with these values.
    ///
    /// Values go through [`WordLabel::value_of_name`], as the servers' own words do. An expression
    /// that names a variable without a value, or with an empty one, is dropped. Fails only if a
    /// value makes a word or the list too long.
    pub fn expand(&self, values: &BTreeMap<String, String>) -> Result<Expansion, ParseError> {
        let mut kept = Vec::new();
        let mut dropped = Vec::new();
        for expression in self.text.split([',', ';']) {
            match fill_in_values(expression, values) {
                Ok(filled) => kept.push(filled),
                Err(variable) => dropped.push(DroppedExpression {
                    expression: expression.trim().to_owned(),
                    variable: variable.to_owned(),
                }),
            }
        }
        if kept.is_empty() {
            let preferred = PreferredLabels::NONE;
            return Ok(Expansion {
                preferred,
                dropped,
                warnings: Vec::new(),
            });
        }
        let parsed = PreferredLabels::parse(&kept.join(";"))?;
        Ok(Expansion {
            preferred: parsed.value,
            dropped,
            warnings: parsed.warnings,
        })
    }
}

impl Default for PreferenceTemplate {
    /// [`DEFAULT_PREFERENCE_TEMPLATE`].
    fn default() -> Self {
        Self {
            text: DEFAULT_PREFERENCE_TEMPLATE.to_owned(),
        }
    }
}

impl fmt::Display for PreferenceTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for PreferenceTemplate {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text)
    }
}

serde_as_text!(PreferenceTemplate);

/// The variables of a checked text: offset of the opening brace, and name.
fn variables(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices('{').filter_map(|(open, _)| {
        let rest = &text[open + 1..];
        rest.find('}').map(|length| (open, &rest[..length]))
    })
}

/// The text with `_name_` for `{name}`: of the same length, and a valid value. Fails when a brace
/// stands anywhere but around a variable in the value of a word.
fn fill_in_names(text: &str) -> Result<String, ParseError> {
    let mut filled = text.to_owned();
    let mut good_braces = Vec::new();
    for (open, name) in variables(text) {
        let before =
            filled[..open].trim_end_matches(|c: char| c.is_ascii() && is_value_byte(c as u8));
        if !is_key(name) || !before.ends_with('=') {
            continue;
        }
        let close = open + 1 + name.len();
        filled.replace_range(open..=open, "_");
        filled.replace_range(close..=close, "_");
        good_braces.extend([open, close]);
    }
    match filled.find(['{', '}']) {
        Some(place) => Err(ParseError::new(ParseErrorKind::BadVariable, text, place)
            .expected("{name} in the value of a word, with a lower-case name")
            .hint(Hint::Variable)),
        None => Ok(filled),
    }
}

/// The expression with values for its variables, or the first variable that has none.
fn fill_in_values<'a>(
    expression: &'a str,
    values: &BTreeMap<String, String>,
) -> Result<String, &'a str> {
    let mut filled = String::new();
    let mut done = 0;
    for (open, name) in variables(expression) {
        let value = values
            .get(name)
            .and_then(|value| WordLabel::value_of_name(value));
        filled.push_str(&expression[done..open]);
        filled.push_str(&value.ok_or(name)?);
        done = open + name.len() + 2;
    }
    filled.push_str(&expression[done..]);
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect()
    }

    fn expand(template: &str, pairs: &[(&str, &str)]) -> Expansion {
        PreferenceTemplate::parse(template)
            .unwrap()
            .expand(&values(pairs))
            .unwrap()
    }

    #[test]
    fn variables_are_filled_in() {
        let expansion = expand(
            "zone={zone}&media=ssd; zone={zone}; media=ssd",
            &[("zone", "eu-1a")],
        );
        assert_eq!(
            expansion.preferred.to_string(),
            "zone=eu-1a&media=ssd;zone=eu-1a;media=ssd"
        );
        assert_eq!(expansion.dropped, []);
        assert_eq!(expansion.warnings, []);
        assert_eq!(
            expand("room={zone}-{rack}.x", &[("zone", "a"), ("rack", "7")])
                .preferred
                .to_string(),
            "room=a-7.x"
        );
    }

    #[test]
    fn an_expression_with_an_unknown_variable_is_dropped_and_reported() {
        let expansion = expand(
            DEFAULT_PREFERENCE_TEMPLATE,
            &[("zone", "b"), ("region", "")],
        );
        assert_eq!(expansion.preferred.to_string(), "zone=b");
        let dropped: Vec<&str> = expansion
            .dropped
            .iter()
            .map(|dropped| dropped.variable.as_str())
            .collect();
        assert_eq!(dropped, ["node", "region"]);
        assert_eq!(expansion.dropped[1].expression, "region={region}");
        assert!(
            expand(DEFAULT_PREFERENCE_TEMPLATE, &[])
                .preferred
                .is_empty()
        );
    }

    #[test]
    fn values_cannot_bring_operators_in() {
        let expansion = expand("zone={zone}", &[("zone", "a|*")]);
        assert_eq!(expansion.preferred.expressions().len(), 1);
        let word = WordLabel::from_name("zone", "a|*").unwrap();
        assert_eq!(expansion.preferred.to_string(), word.to_string());
        let long = "n".repeat(100);
        let expansion = expand("node={node}", &[("node", &long)]);
        assert_eq!(
            expansion.preferred.to_string(),
            WordLabel::from_name("node", &long).unwrap().to_string()
        );
    }

    #[test]
    fn bad_templates_are_refused_at_their_place() {
        for (text, place) in [
            ("{zone}", 0),
            ("zone={zone", 5),
            ("zone=zone}", 9),
            ("zone={Zone}", 5),
            ("zone={}", 5),
            ("A;{b}=c", 2),
            ("zone={zone};;A", 12),
            ("zone={{zone}}", 5),
            ("\"zone={zone}\"", 0),
            ("zone={zone}/[IP]", 11),
        ] {
            let error = PreferenceTemplate::parse(text).unwrap_err();
            assert_eq!(error.offset, place, "{text}: {error}");
            assert_eq!(error.text, text);
        }
    }

    #[test]
    fn templates_keep_their_text_and_name_their_variables() {
        let template = PreferenceTemplate::default();
        assert_eq!(template.variables(), ["node", "region", "zone"]);
        let json = serde_json::to_string(&template).unwrap();
        assert_eq!(
            serde_json::from_str::<PreferenceTemplate>(&json).unwrap(),
            template
        );
        assert_eq!(
            PreferenceTemplate::parse(DEFAULT_PREFERENCE_TEMPLATE).unwrap(),
            template
        );
        assert!(expand("-", &[]).preferred.is_empty());
    }
}
