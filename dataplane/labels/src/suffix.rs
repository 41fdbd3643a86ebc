//! The parts of a definition around its expressions: erasure coding form, uniqueness, mode.

use crate::definition::{
    EcParts, MAX_EC_DATA_PARTS, MAX_EC_PARITY_PARTS, MIN_EC_DATA_PARTS, Mode, Uniqueness,
};
use crate::error::{Hint, ParseError, ParseErrorKind};
use crate::expr::LabelExpr;
use crate::label::{Letter, LetterMask};
use crate::parse::Parser;

impl Parser<'_> {
    /// An erasure coding form; the parser stands at its `@` or `=`.
    pub(crate) fn ec_form(&mut self) -> Result<EcParts, ParseError> {
        self.advance(1);
        let (data, parity) = self.ec_numbers()?;
        let mut expressions = Vec::new();
        loop {
            let start = self.pos();
            if !self.separator() {
                break;
            }
            if expressions.len() == 2 {
                return Err(self.error_at(ParseErrorKind::TooManyEcExpressions, start));
            }
            self.refuse_count(Some(Hint::CountInEc))?;
            expressions.push(self.expression()?);
        }
        let mut expressions = expressions.into_iter();
        let on_data = expressions.next().unwrap_or(LabelExpr::Any);
        let on_parity = expressions.next().unwrap_or_else(|| on_data.clone());
        EcParts::new(data, parity, on_data, on_parity)
            .map_err(|_| self.error(ParseErrorKind::BadEcForm).hint(Hint::EcRange))
    }

    /// `k+m`, or `m` alone; both numbers in their range.
    fn ec_numbers(&mut self) -> Result<(Option<u8>, u8), ParseError> {
        let start = self.pos();
        let first = self.number()?;
        if !self.take(b'+') {
            if first > MAX_EC_PARITY_PARTS {
                return Err(self.ec_range(start, "1 to 8 parity parts"));
            }
            return Ok((None, first));
        }
        if !(MIN_EC_DATA_PARTS..=MAX_EC_DATA_PARTS).contains(&first) {
            return Err(self.ec_range(start, "2 to 32 data parts"));
        }
        let start = self.pos();
        let parity = self.number()?;
        if parity > MAX_EC_PARITY_PARTS {
            return Err(self.ec_range(start, "1 to 8 parity parts"));
        }
        Ok((Some(first), parity))
    }

    fn ec_range(&self, place: usize, expected: &'static str) -> ParseError {
        self.error_at(ParseErrorKind::BadEcForm, place)
            .expected(expected)
            .hint(Hint::EcRange)
    }

    /// A number of one or two digits that does not begin with 0.
    fn number(&mut self) -> Result<u8, ParseError> {
        let start = self.pos();
        let mut number = 0;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            let is_leading_zero = number == 0 && digit == b'0';
            if is_leading_zero || self.pos() - start == 2 {
                return Err(self.ec_range(start, "a number of parts"));
            }
            number = number * 10 + (digit - b'0');
            self.advance(1);
        }
        if number == 0 {
            return Err(self.ec_range(start, "a number of parts"));
        }
        Ok(number)
    }

    /// The uniqueness part; the parser stands behind its `/`.
    pub(crate) fn uniqueness(&mut self) -> Result<Uniqueness, ParseError> {
        self.skip_blanks();
        if self.peek() == Some(b'[') {
            return self.named_uniqueness();
        }
        let mut letters = LetterMask::EMPTY;
        while let Some(first) = self.letter() {
            self.advance(1);
            let mut last = first;
            if self.take(b'-') {
                last = self.letter().ok_or_else(|| {
                    self.bad_uniqueness()
                        .expected("the last letter of the range")
                })?;
                self.advance(1);
            }
            let (low, high) = (first.min(last), first.max(last));
            for letter in (low.index()..=high.index()).filter_map(Letter::from_index) {
                letters.insert(letter);
            }
        }
        if letters.is_empty() {
            return Err(self
                .bad_uniqueness()
                .expected("`[IP]`, `[RACK]`, `[ZONE]` or letters"));
        }
        Ok(Uniqueness::Letters(letters))
    }

    fn named_uniqueness(&mut self) -> Result<Uniqueness, ParseError> {
        for (name, uniqueness) in UNIQUENESS_NAMES {
            if self.rest()[1..]
                .strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(']'))
            {
                self.advance(name.len() + 2);
                return Ok(*uniqueness);
            }
        }
        Err(self
            .bad_uniqueness()
            .expected("`[IP]`, `[RACK]` or `[ZONE]`"))
    }

    fn bad_uniqueness(&self) -> ParseError {
        self.error(ParseErrorKind::BadUniqueness)
            .hint(Hint::Uniqueness)
    }

    fn letter(&self) -> Option<Letter> {
        self.peek().and_then(|byte| Letter::new(char::from(byte)))
    }

    /// The mode; the parser stands behind its `:`. It is the last part of the text.
    pub(crate) fn mode(&mut self) -> Result<Mode, ParseError> {
        let word = self.rest();
        if let Some(mode) = mode_of(word) {
            self.advance(word.len());
            return Ok(mode);
        }
        let trimmed = word.trim_end_matches([' ', '\t']);
        let error = self
            .error(ParseErrorKind::BadMode)
            .expected("strict, std or loose");
        if mode_of(trimmed).is_some() {
            let place = self.pos() + trimmed.len();
            let error = self.error_at(ParseErrorKind::BadMode, place);
            return Err(error
                .expected("the end of the text")
                .hint(Hint::TrailingBlank));
        }
        Err(error.hint(Hint::Modes))
    }
}

/// The mode with the given name: first letter in either case, the rest all lower or all upper.
fn mode_of(word: &str) -> Option<Mode> {
    let mut rest = word.chars();
    let first = rest.next()?.to_ascii_lowercase();
    let rest = rest.as_str();
    let is = |lower: &str, upper: &str| rest == lower || rest == upper;
    match first {
        's' if is("", "") || is("trict", "TRICT") => Some(Mode::Strict),
        's' if is("td", "TD") => Some(Mode::Std),
        'd' if is("", "") => Some(Mode::Std),
        'l' if is("", "") || is("oose", "OOSE") => Some(Mode::Loose),
        _ => None,
    }
}

const UNIQUENESS_NAMES: &[(&str, Uniqueness)] = &[
    ("I", Uniqueness::Ip),
    ("IP", Uniqueness::Ip),
    ("R", Uniqueness::Rack),
    ("RACK", Uniqueness::Rack),
    ("Z", Uniqueness::Zone),
    ("ZONE", Uniqueness::Zone),
];
