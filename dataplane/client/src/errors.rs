//! Errors of written data: each is told once to every descriptor that was open when it happened,
//! whoever of them asks first (as `errseq` does in Linux).

use crate::error::FsError;

/// The errors of one file.
#[derive(Debug, Default)]
pub(crate) struct WriteErrors {
    /// Errors so far.
    count: u64,
    /// Somebody was told of the last one.
    told: bool,
    last: Option<FsError>,
}

/// How many errors of a file a descriptor has been told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen(u64);

impl WriteErrors {
    /// Data could not be stored.
    pub(crate) fn record(&mut self, error: FsError) {
        self.count += 1;
        self.told = false;
        self.last = Some(error);
    }

    /// Where a new descriptor begins: an error nobody was told of is for it too.
    pub(crate) fn begin(&self) -> Seen {
        Seen(if self.told || self.count == 0 {
            self.count
        } else {
            self.count - 1
        })
    }

    /// Tells a descriptor of what happened since it last asked.
    pub(crate) fn tell(&mut self, seen: &mut Seen) -> Result<(), FsError> {
        if seen.0 >= self.count {
            return Ok(());
        }
        *seen = Seen(self.count);
        self.told = true;
        self.last.clone().map_or(Ok(()), Err)
    }

    /// The last error, if nobody was told of it.
    pub(crate) fn untold(&self) -> Result<(), FsError> {
        match &self.last {
            Some(error) if !self.told => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Nothing of the file matters any more.
    pub(crate) fn forget(&mut self) {
        self.told = true;
    }
}

#[cfg(test)]
mod tests {
    use hither_proto::status::Errno;

    use super::*;

    #[test]
    fn every_descriptor_is_told_once() {
        let mut errors = WriteErrors::default();
        let (mut a, mut b) = (errors.begin(), errors.begin());
        assert_eq!(errors.tell(&mut a), Ok(()));
        errors.record(Errno::ENOSPC.into());
        assert!(errors.untold().is_err());
        let mut late = errors.begin();
        for seen in [&mut a, &mut b, &mut late] {
            assert_eq!(errors.tell(seen), Err(Errno::ENOSPC.into()));
            assert_eq!(errors.tell(seen), Ok(()));
        }
        let mut new = errors.begin();
        assert_eq!(errors.tell(&mut new), Ok(()), "told already");
        assert_eq!(errors.untold(), Ok(()));
        errors.record(Errno::EIO.into());
        assert_eq!(errors.tell(&mut a), Err(Errno::EIO.into()));
    }
}
