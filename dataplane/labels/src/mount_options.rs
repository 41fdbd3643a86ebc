//! Splitting the text of `-o` into options without tearing preference lists apart.
//!
//! Mount options are separated by commas, and so are the expressions of a preference list. Four
//! spellings keep a list whole: `;` between expressions, `\,`, quotes around the value, and plain
//! commas as long as what follows reads as an expression and is no option known to the caller.

use thiserror::Error;

use crate::label::is_key;
use crate::preferred::PreferredLabels;

/// Names of the options whose value is a preference list.
pub const PREFERRED_LABELS_OPTIONS: [&str; 2] = ["preflabels", "mfspreflabels"];
/// Largest length in bytes of the text of all options.
pub const MAX_MOUNT_OPTIONS_BYTES: usize = 64 * 1024;
/// Largest number of options.
pub const MAX_MOUNT_OPTIONS: usize = 1024;

/// Why a text of mount options cannot be split. Trying again cannot help.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MountOptionsError {
    /// The text is longer than [`MAX_MOUNT_OPTIONS_BYTES`].
    #[error("the mount options have {bytes} bytes, more than {MAX_MOUNT_OPTIONS_BYTES}")]
    TooLong {
        /// Length of the text.
        bytes: usize,
    },
    /// There are more than [`MAX_MOUNT_OPTIONS`] options.
    #[error("more than {MAX_MOUNT_OPTIONS} mount options")]
    TooMany,
    /// A quote is not closed.
    #[error("column {column} of the mount options: the quote is not closed")]
    UnclosedQuote {
        /// Place of the opening quote in bytes, counted from 1.
        column: usize,
    },
}

/// One mount option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOption {
    /// What stands before `=`, without blanks around it.
    pub name: String,
    /// What stands after `=`, without quotes and escapes; `None` without `=`.
    pub value: Option<String>,
    /// Offset in bytes of the option in the text.
    pub offset: usize,
    /// Tokens that were taken as further expressions of this preference list. A mount names them
    /// in a message, because a mistyped option name can end up here.
    pub continued_by: Vec<String>,
}

impl MountOption {
    /// Whether the value of the option is a preference list.
    #[must_use]
    pub fn is_preferred_labels(&self) -> bool {
        PREFERRED_LABELS_OPTIONS.contains(&self.name.as_str())
    }

    /// Whether the token goes on with the preference list that this option holds.
    fn is_continued_by(&self, token: &Token) -> bool {
        let Some(list) = &self.value else {
            return false;
        };
        let text = token.text.trim();
        let is_list = PreferredLabels::parse(text).is_ok_and(|parsed| !parsed.value.is_empty());
        if !self.is_preferred_labels() || !is_list || text.bytes().all(|b| b.is_ascii_digit()) {
            return false;
        }
        // `name=value` may be an unknown option as well as a word: only a key that is at home in
        // such lists makes it a word.
        match text.split_once('=') {
            Some((key, _)) if is_key(key) => {
                OPERATOR_KEYS.contains(&key) || list.contains(&format!("{key}="))
            }
            _ => true,
        }
    }
}

/// Splits the text of `-o` at its commas; `is_known` says whether a name is an option of the
/// caller, of the kernel or of the mount program.
///
/// A backslash makes `,`, `;`, quotes and itself ordinary. A quote opens at the beginning of an
/// option or of its value. Empty options are skipped.
pub fn split_mount_options(
    text: &str,
    is_known: impl Fn(&str) -> bool,
) -> Result<Vec<MountOption>, MountOptionsError> {
    if text.len() > MAX_MOUNT_OPTIONS_BYTES {
        return Err(MountOptionsError::TooLong { bytes: text.len() });
    }
    let mut options: Vec<MountOption> = Vec::new();
    let mut open_list: Option<usize> = None;
    for token in tokens(text)? {
        let name = token.name();
        let list = open_list.and_then(|index| options.get_mut(index));
        match list {
            Some(list) if !is_known(name) && list.is_continued_by(&token) => {
                let value = list.value.get_or_insert_default();
                value.push(',');
                value.push_str(&token.text);
                list.continued_by.push(token.text);
            }
            _ => {
                if options.len() == MAX_MOUNT_OPTIONS {
                    return Err(MountOptionsError::TooMany);
                }
                let option = token.into_option();
                open_list = option.is_preferred_labels().then_some(options.len());
                options.push(option);
            }
        }
    }
    Ok(options)
}

/// What stands between two commas, without quotes and escapes.
struct Token {
    text: String,
    offset: usize,
}

impl Token {
    fn name(&self) -> &str {
        self.text
            .split_once('=')
            .map_or(self.text.as_str(), |(name, _)| name)
            .trim()
    }

    fn into_option(self) -> MountOption {
        let value = self.text.split_once('=').map(|(_, value)| value.to_owned());
        let name = self.name().to_owned();
        MountOption {
            name,
            value,
            offset: self.offset,
            continued_by: Vec::new(),
        }
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, MountOptionsError> {
    let mut tokens = Vec::new();
    let mut current = Token {
        text: String::new(),
        offset: 0,
    };
    let mut quote: Option<(char, usize)> = None;
    let mut may_open = true;
    let mut characters = text.char_indices().peekable();
    while let Some((offset, character)) = characters.next() {
        let next = characters.peek().map(|(_, next)| *next);
        match (character, quote) {
            ('\\', _) if next.is_some_and(|next| ESCAPABLE.contains(&next)) => {
                current.text.extend(next);
                characters.next();
            }
            (_, Some((open, _))) if character == open => quote = None,
            (_, Some(_)) => current.text.push(character),
            ('"' | '\'', None) if may_open => quote = Some((character, offset)),
            (',', None) => {
                let following = Token {
                    text: String::new(),
                    offset: offset + 1,
                };
                tokens.push(std::mem::replace(&mut current, following));
                may_open = true;
                continue;
            }
            (_, None) => {
                let is_first_equals = character == '=' && !current.text.contains('=');
                current.text.push(character);
                may_open = is_first_equals;
                continue;
            }
        }
        may_open = false;
    }
    if let Some((_, offset)) = quote {
        return Err(MountOptionsError::UnclosedQuote { column: offset + 1 });
    }
    tokens.push(current);
    tokens.retain(|token| !token.text.trim().is_empty());
    Ok(tokens)
}

const ESCAPABLE: [char; 5] = [',', ';', '\\', '"', '\''];

/// Keys of the words that servers carry without being told to.
const OPERATOR_KEYS: [&str; 4] = ["zone", "region", "node", "media"];

#[cfg(test)]
#[path = "mount_options_tests.rs"]
mod tests;
