//! What stands on the command line.

use std::path::PathBuf;
use std::time::Duration;

/// The command line.
#[derive(Debug)]
pub(crate) struct Args {
    /// Where to work.
    pub(crate) dir: PathBuf,
    pub(crate) threads: usize,
    /// Files of each thread.
    pub(crate) files: usize,
    /// All threads in one directory instead of each in its own.
    pub(crate) flat: bool,
    /// Number of the first file.
    pub(crate) first: usize,
    /// `sample` looks at names below this number.
    pub(crate) of: usize,
    /// No phase goes on for longer.
    pub(crate) limit: Duration,
    pub(crate) steps: Vec<Step>,
}

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Say `ready` and go on when a line comes in.
    Wait,
    /// A timed phase, and the name its result has.
    Measure { kind: Kind, label: String },
}

/// What the threads do in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// open(O_CREAT|O_EXCL) and close.
    Create,
    /// Write 4 KiB and fsync, in one file of ten.
    Write,
    /// stat of the files another thread made.
    Stat,
    /// stat of names drawn from the whole directory.
    Sample,
    /// Read the whole directory, three times.
    Readdir,
    Rename,
    Unlink,
}

impl Args {
    pub(crate) fn parse(words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut words = words;
        let mut args = Self {
            dir: PathBuf::new(),
            threads: 1,
            files: 1000,
            flat: false,
            first: 0,
            of: 0,
            limit: Duration::from_secs(3600),
            steps: Vec::new(),
        };
        while let Some(word) = words.next() {
            match word.as_str() {
                "--flat" => args.flat = true,
                "--threads" => args.threads = number(&word, words.next())?.max(1),
                "--files" => args.files = number(&word, words.next())?,
                "--first" => args.first = number(&word, words.next())?,
                "--of" => args.of = number(&word, words.next())?,
                "--limit" => {
                    args.limit = Duration::from_secs(number(&word, words.next())? as u64);
                }
                _ if word.starts_with('-') => return Err(format!("there is no option {word}")),
                _ if args.dir.as_os_str().is_empty() => args.dir = word.into(),
                _ => args.steps.push(step(&word)?),
            }
        }
        if args.dir.as_os_str().is_empty() || args.steps.is_empty() {
            return Err("name a directory and at least one phase".into());
        }
        Ok(args)
    }
}

fn number(option: &str, word: Option<String>) -> Result<usize, String> {
    word.and_then(|word| word.parse().ok())
        .ok_or_else(|| format!("{option} takes a number"))
}

/// `PHASE` or `PHASE:LABEL`.
fn step(word: &str) -> Result<Step, String> {
    if word == "wait" {
        return Ok(Step::Wait);
    }
    let (name, label) = word.split_once(':').unwrap_or((word, word));
    let kind = match name {
        "create" => Kind::Create,
        "write" => Kind::Write,
        "stat" => Kind::Stat,
        "sample" => Kind::Sample,
        "readdir" => Kind::Readdir,
        "rename" => Kind::Rename,
        "unlink" => Kind::Unlink,
        _ => return Err(format!("there is no phase {name}")),
    };
    Ok(Step::Measure {
        kind,
        label: label.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Args, String> {
        Args::parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_stand_anywhere() {
        let args = parse("/d create --threads 8 wait stat:again --flat").expect("valid");
        assert_eq!((args.threads, args.flat), (8, true));
        assert_eq!(args.steps.len(), 3);
        assert_eq!(
            args.steps[2],
            Step::Measure {
                kind: Kind::Stat,
                label: "again".into()
            }
        );
    }

    #[test]
    fn wrong_words_are_refused() {
        for text in ["", "/d", "/d make", "/d create --threads", "/d --x create"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
