//! The parser of expressions and of lists of them.
//!
//! One pass by recursive descent, written by hand because messages need to know what stands around
//! the place of an error. Recursion happens only at brackets and is bounded by [`MAX_DEPTH`].

use crate::error::{Hint, ParseError, ParseErrorKind, Warning};
use crate::expr::LabelExpr;
use crate::label::{self, Label, Letter, WordLabel};

/// Largest length in bytes of any text about labels, and of the normal form of what it says.
pub const MAX_TEXT_BYTES: usize = 16 * 1024;

/// Deepest nesting of brackets in an expression, and of AND and OR in its normal form.
pub const MAX_DEPTH: usize = 64;

/// Largest number of terms of a definition or a preference list, repeat counts expanded.
pub const MAX_TERMS: usize = 9;

/// What a text is for; it decides which advice helps and which separators are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// An expression or a storage class definition.
    Placement,
    /// A list of preferred labels.
    Preference,
}

/// A parser at a place in a text.
pub(crate) struct Parser<'a> {
    text: &'a str,
    purpose: Purpose,
    pos: usize,
    end: usize,
    depth: usize,
    /// End of the last run of letters that is known not to be a key.
    run_end: usize,
    warnings: Vec<Warning>,
}

/// The repeat counts met in a list: place and count.
pub(crate) type Counts = Vec<(usize, u8)>;

impl<'a> Parser<'a> {
    pub(crate) fn new(text: &'a str) -> Result<Self, ParseError> {
        Self::for_purpose(text, Purpose::Placement)
    }

    /// A parser at the first character that is no blank. Fails when there is none.
    pub(crate) fn for_purpose(text: &'a str, purpose: Purpose) -> Result<Self, ParseError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(ParseError::new(
                ParseErrorKind::TooLong,
                text,
                MAX_TEXT_BYTES,
            ));
        }
        let end = text.len();
        let mut parser = Self {
            text,
            purpose,
            pos: 0,
            end,
            depth: 0,
            run_end: 0,
            warnings: Vec::new(),
        };
        parser.skip_blanks();
        if purpose == Purpose::Preference {
            parser.strip_quotes();
        }
        if parser.peek().is_none() {
            let error = ParseError::new(ParseErrorKind::Empty, text, parser.pos);
            return Err(error.expected("a label expression"));
        }
        parser.warn_of_leading_dash();
        Ok(parser)
    }

    pub(crate) fn into_warnings(self) -> Vec<Warning> {
        self.warnings
    }

    pub(crate) fn warn(&mut self, warning: Warning) {
        self.warnings.push(warning);
    }

    /// Whether the rest of the text is `-` or `~` alone, and so says nothing.
    pub(crate) fn says_nothing(&self) -> bool {
        let rest = &self.text.as_bytes()[self.pos..self.end];
        matches!(rest.first(), Some(b'-' | b'~'))
            && rest[1..].iter().all(|byte| matches!(byte, b' ' | b'\t'))
    }

    /// One expression that is the whole text, without a repeat count.
    pub(crate) fn single_expression(&mut self) -> Result<LabelExpr, ParseError> {
        self.refuse_count(None)?;
        let expr = self.expression()?;
        self.expect_end("an operator or the end of the text")?;
        self.check_normal_form(expr.to_string().len())?;
        Ok(expr)
    }

    /// A list of terms, repeat counts expanded. Stops before `/`, `:` or the end.
    pub(crate) fn terms(&mut self) -> Result<(Vec<LabelExpr>, Counts), ParseError> {
        let mut terms = Vec::new();
        let mut counts = Vec::new();
        loop {
            let start = self.pos;
            let count = self.count()?;
            if let Some(count) = count {
                counts.push((start + 1, count));
                if self.is_bare_count(start, terms.is_empty())? {
                    return Ok((vec![LabelExpr::Any; usize::from(count)], counts));
                }
            }
            let copies = usize::from(count.unwrap_or(1));
            if terms.len() + copies > MAX_TERMS {
                return Err(self.error_at(ParseErrorKind::TooManyTerms, start));
            }
            let expr = self.expression()?;
            terms.extend(std::iter::repeat_n(expr, copies));
            if !self.separator() {
                return Ok((terms, counts));
            }
        }
    }

    /// An expression. Blanks around it are skipped.
    pub(crate) fn expression(&mut self) -> Result<LabelExpr, ParseError> {
        let start = self.pos;
        let expr = self.alternatives()?;
        if expr.depth() > MAX_DEPTH {
            return Err(self.error_at(ParseErrorKind::TooDeep, start));
        }
        Ok(expr)
    }

    /// Takes a separator and the blanks around it; false when there is none.
    pub(crate) fn separator(&mut self) -> bool {
        self.skip_blanks();
        let escaped = self.purpose == Purpose::Preference
            && self.peek() == Some(b'\\')
            && matches!(self.peek_at(1), Some(b',' | b';'));
        if escaped {
            self.pos += 2;
        } else if matches!(self.peek(), Some(b',' | b';')) {
            self.pos += 1;
        } else {
            return false;
        }
        self.skip_blanks();
        true
    }

    /// Fails with a count's kind when a digit stands here.
    pub(crate) fn refuse_count(&self, hint: Option<Hint>) -> Result<(), ParseError> {
        if !self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            return Ok(());
        }
        let error = self
            .error(ParseErrorKind::CountNotAllowed)
            .expected(OPERAND);
        Err(hint.into_iter().fold(error, ParseError::hint))
    }

    /// Fails unless the whole text is read.
    pub(crate) fn expect_end(&mut self, expected: &'static str) -> Result<(), ParseError> {
        match self.peek() {
            None => Ok(()),
            Some(byte) => Err(self.unexpected_after_operand(byte, expected)),
        }
    }

    /// Fails when the normal form of what was read would be too long to be read again.
    pub(crate) fn check_normal_form(&self, length: usize) -> Result<(), ParseError> {
        if length > MAX_TEXT_BYTES {
            return Err(self.error(ParseErrorKind::TooLong));
        }
        Ok(())
    }

    pub(crate) fn peek(&self) -> Option<u8> {
        self.peek_at(0)
    }

    pub(crate) fn peek_at(&self, ahead: usize) -> Option<u8> {
        let place = self.pos + ahead;
        if place < self.end {
            self.text.as_bytes().get(place).copied()
        } else {
            None
        }
    }

    /// Takes the byte if it stands here.
    pub(crate) fn take(&mut self, byte: u8) -> bool {
        let is_here = self.peek() == Some(byte);
        if is_here {
            self.pos += 1;
        }
        is_here
    }

    pub(crate) fn skip_blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t')) {
            self.pos += 1;
        }
    }

    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    /// What is not read yet.
    pub(crate) fn rest(&self) -> &'a str {
        &self.text[self.pos..self.end]
    }

    /// Goes on after the given number of bytes, all of them ASCII.
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.pos = (self.pos + bytes).min(self.end);
    }

    pub(crate) fn error(&self, kind: ParseErrorKind) -> ParseError {
        self.error_at(kind, self.pos)
    }

    pub(crate) fn error_at(&self, kind: ParseErrorKind, place: usize) -> ParseError {
        let error = ParseError::new(kind, self.text, place);
        let is_quote = place < self.end && matches!(self.text.as_bytes()[place], b'"' | b'\'');
        if is_quote {
            error.hint(Hint::Quotes)
        } else {
            error
        }
    }

    /// The error for a byte that cannot follow an operand.
    pub(crate) fn unexpected_after_operand(&self, byte: u8, expected: &'static str) -> ParseError {
        match byte {
            b'0'..=b'9' => self
                .error(ParseErrorKind::CountNotAllowed)
                .hint(Hint::CountBefore),
            b'!' | b'~' | b'-' => self
                .error(ParseErrorKind::Unexpected)
                .hint(Hint::NotNeedsAnd),
            b'=' => self.error(ParseErrorKind::Unexpected).hint(Hint::KeyForm),
            _ => self.error(ParseErrorKind::Unexpected),
        }
        .expected(expected)
    }

    /// Quotes around the whole list are taken off; a shell or a table of mounts may leave them.
    fn strip_quotes(&mut self) {
        let inner = self.text[self.pos..].trim_end_matches([' ', '\t']);
        let Some(quote @ ('"' | '\'')) = inner.chars().next() else {
            return;
        };
        if inner.len() >= 2 && inner.ends_with(quote) {
            self.end = self.pos + inner.len() - 1;
            self.pos += 1;
            self.skip_blanks();
        }
    }

    fn warn_of_leading_dash(&mut self) {
        if self.peek() == Some(b'-') && !self.says_nothing() {
            self.warn(Warning::LeadingDash {
                text: label::clip(self.rest()),
            });
        }
    }

    /// A repeat count and the blanks after it.
    fn count(&mut self) -> Result<Option<u8>, ParseError> {
        let Some(digit @ b'0'..=b'9') = self.peek() else {
            return Ok(None);
        };
        if digit == b'0' || self.peek_at(1).is_some_and(|byte| byte.is_ascii_digit()) {
            return Err(self.error(ParseErrorKind::BadCount));
        }
        self.pos += 1;
        self.skip_blanks();
        Ok(Some(digit - b'0'))
    }

    /// Whether the count that begins at `start` is the whole list; an error when it has no
    /// expression and is not.
    fn is_bare_count(&self, start: usize, is_first: bool) -> Result<bool, ParseError> {
        match self.peek() {
            None | Some(b'/') if is_first => Ok(true),
            None | Some(b'/' | b':' | b',' | b';') => Err(self
                .error_at(ParseErrorKind::BareCount, start)
                .hint(Hint::BareCount)),
            Some(_) => Ok(false),
        }
    }

    /// OR of ANDs.
    fn alternatives(&mut self) -> Result<LabelExpr, ParseError> {
        let mut operands = vec![self.conjunction()?];
        loop {
            match self.peek() {
                Some(b'+') => self.pos += 1,
                Some(b'|') => self.pos += if self.peek_at(1) == Some(b'|') { 2 } else { 1 },
                _ => return Ok(LabelExpr::any_of(operands)),
            }
            operands.push(self.conjunction()?);
        }
    }

    /// AND of operands. Skips the blanks after them.
    fn conjunction(&mut self) -> Result<LabelExpr, ParseError> {
        let mut operands = vec![self.negation()?];
        loop {
            self.skip_blanks();
            match self.peek() {
                Some(b'&') => {
                    self.pos += if self.peek_at(1) == Some(b'&') { 2 } else { 1 };
                    operands.push(self.negation()?);
                }
                Some(b'*') => {
                    self.pos += 1;
                    operands.push(self.negation()?);
                }
                // Juxtaposed: an operand without NOT.
                Some(b'(' | b'[' | b'a'..=b'z' | b'A'..=b'Z') => operands.push(self.operand()?),
                _ => return Ok(LabelExpr::all(operands)),
            }
        }
    }

    /// An operand behind any number of NOTs.
    fn negation(&mut self) -> Result<LabelExpr, ParseError> {
        let mut is_negated = false;
        loop {
            self.skip_blanks();
            match self.peek() {
                Some(b'!' | b'~' | b'-') => {
                    is_negated = !is_negated;
                    self.pos += 1;
                }
                _ => break,
            }
        }
        let operand = self.operand()?;
        Ok(if is_negated {
            operand.negate()
        } else {
            operand
        })
    }

    fn operand(&mut self) -> Result<LabelExpr, ParseError> {
        match self.peek() {
            Some(b'*') => {
                self.pos += 1;
                Ok(LabelExpr::Any)
            }
            Some(open @ (b'(' | b'[')) => self.group(open),
            Some(b'a'..=b'z' | b'A'..=b'Z') => self.label().map(LabelExpr::Label),
            other => Err(self.missing_operand(other)),
        }
    }

    fn group(&mut self, open: u8) -> Result<LabelExpr, ParseError> {
        if self.depth == MAX_DEPTH {
            return Err(self.error(ParseErrorKind::TooDeep));
        }
        self.depth += 1;
        self.pos += 1;
        let expr = self.alternatives()?;
        let (close, expected) = if open == b'(' {
            (b')', "`)` or an operator")
        } else {
            (b']', "`]` or an operator")
        };
        if !self.take(close) {
            let error = match self.peek() {
                Some(b')' | b']') => self
                    .error(ParseErrorKind::UnclosedGroup)
                    .hint(Hint::BracketKind),
                Some(byte @ (b'0'..=b'9' | b'!' | b'~' | b'-' | b'=')) => {
                    return Err(self.unexpected_after_operand(byte, expected));
                }
                _ => self.error(ParseErrorKind::UnclosedGroup),
            };
            return Err(error.expected(expected));
        }
        self.depth -= 1;
        Ok(expr)
    }

    /// A letter, or a word if the run of key characters that begins here ends at `=`.
    fn label(&mut self) -> Result<Label, ParseError> {
        if self.pos >= self.run_end {
            let run = self.length_of(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            if self.peek_at(run) == Some(b'=') {
                return self.word(run).map(Label::Word);
            }
            self.run_end = self.pos + run;
            self.warn_of_word_like_run();
        }
        let letter = self.peek().and_then(|byte| Letter::new(char::from(byte)));
        let letter = letter.ok_or_else(|| self.missing_operand(self.peek()))?;
        self.pos += 1;
        Ok(Label::Letter(letter))
    }

    fn word(&mut self, key_bytes: usize) -> Result<WordLabel, ParseError> {
        let key = &self.rest()[..key_bytes];
        if !label::is_key(key) {
            return Err(self
                .error(ParseErrorKind::BadWord)
                .expected("a key: a-z, then a-z, 0-9 or `-`, at most 63 bytes")
                .hint(Hint::KeyForm));
        }
        self.pos += key_bytes + 1;
        let value_bytes = self.length_of(label::is_value_byte);
        let word = WordLabel::new(key, &self.rest()[..value_bytes]).map_err(|_| {
            self.error(ParseErrorKind::BadWord)
                .expected("a value: 1 to 63 bytes of A-Z, a-z, 0-9, `.`, `_` or `-`")
        })?;
        self.pos += value_bytes;
        Ok(word)
    }

    /// Number of bytes from here on that satisfy the condition.
    fn length_of(&self, condition: impl Fn(u8) -> bool) -> usize {
        self.rest()
            .bytes()
            .take_while(|byte| condition(*byte))
            .count()
    }

    fn warn_of_word_like_run(&mut self) {
        const SHORTEST_WORD: usize = 3;
        let run = self.length_of(|byte| byte.is_ascii_lowercase());
        if run >= SHORTEST_WORD {
            let column = self.pos + 1;
            let run = label::clip(&self.rest()[..run]);
            self.warn(Warning::LettersLookLikeWord { column, run });
        }
    }

    fn missing_operand(&self, found: Option<u8>) -> ParseError {
        if found.is_some_and(|byte| byte.is_ascii_digit()) {
            return self
                .error(ParseErrorKind::CountNotAllowed)
                .expected(OPERAND);
        }
        let error = self.error(ParseErrorKind::Unexpected).expected(OPERAND);
        let text = self.text.trim_start_matches([' ', '\t']);
        let after_separator = self.text[..self.pos]
            .trim_end_matches([' ', '\t'])
            .ends_with([',', ';']);
        if self.purpose == Purpose::Preference && after_separator {
            error.hint(Hint::CommaTrap)
        } else if text.starts_with('-') {
            error.hint(Hint::LeadingDash)
        } else {
            error
        }
    }
}

const OPERAND: &str = "a letter, key=value, `*` or a group";
