//! What the index knows of a copy.

use std::fmt;
use std::ops::Range;

use hither_log::Lsn;
use hither_proto::ids::{ChainNumber, Epoch, GroupId, InodeId, LeaseId, SessionId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A set of the 64 regions of 1 MiB that make up a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Regions(pub u64);

impl Regions {
    /// No region.
    pub const NONE: Self = Self(0);

    /// Regions that a range of bytes touches.
    #[must_use]
    pub fn of(range: &Range<u32>) -> Self {
        if range.is_empty() {
            return Self::NONE;
        }
        let (first, last) = (range.start / REGION_BYTES, (range.end - 1) / REGION_BYTES);
        let below = |region: u32| 1u64.checked_shl(region).map_or(u64::MAX, |bit| bit - 1);
        Self(below(last + 1) & !below(first))
    }

    /// Regions in either set.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Regions in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether all of `other` is in this set.
    #[must_use]
    pub fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The bytes of each region in the set, in order.
    pub fn ranges(self) -> impl Iterator<Item = Range<u32>> {
        (0..64)
            .filter(move |region| self.0 >> region & 1 == 1)
            .map(|region| region * REGION_BYTES..(region + 1) * REGION_BYTES)
    }
}

impl fmt::Debug for Regions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Regions({:#x})", self.0)
    }
}

/// A lease under which the copy was written and which was not closed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenMark {
    /// The lease.
    pub lease: LeaseId,
    /// Who wrote.
    pub session: SessionId,
    /// Group epoch of the first write under the lease.
    pub epoch: Epoch,
}

/// Bits of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EntryFlags(pub u32);

impl EntryFlags {
    /// The copy has an open mark.
    pub const OPEN: Self = Self(1);
    /// The copy's file is known to be stable: that it is missing is damage.
    pub const HAS_FILE: Self = Self(2);
    /// Bytes of the copy are still being fetched from another member.
    pub const PARTIAL: Self = Self(4);
    /// There is no copy; the entry only refuses leases below its own.
    pub const ABSENT: Self = Self(8);
    /// Not every member has applied what was written under the open mark: only a seal ends it.
    pub const IN_DOUBT: Self = Self(16);
    /// Blocks were given the checksum of what they held after a crash: torn, or damaged meanwhile.
    /// Another member's copy decides.
    pub const TORN: Self = Self(32);

    /// Whether all of `other` is set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// With `other` set or cleared.
    #[must_use]
    pub fn set(self, other: Self, on: bool) -> Self {
        Self(if on {
            self.0 | other.0
        } else {
            self.0 & !other.0
        })
    }
}

/// What the index knows of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Entry {
    /// Group of the chunk.
    pub group: GroupId,
    /// File the chunk belongs to.
    pub inode: InodeId,
    /// Highest lease seen: the version of the copy.
    pub lease: LeaseId,
    /// Highest chain number seen under that lease.
    pub chain: ChainNumber,
    /// Highest lease seen before the last seal.
    pub lease_before: LeaseId,
    /// Bytes of the copy.
    pub length: u32,
    /// Group epoch of the last change.
    pub changed_epoch: Epoch,
    /// Set while a lease under which the copy was written is not closed.
    pub open: Option<OpenMark>,
    /// Regions written since the mark was set.
    pub touched: Regions,
    /// Regions whose blocks may differ from their checksums after a crash, since data goes there
    /// that no flush has covered.
    pub loose: Regions,
    /// Bits.
    pub flags: EntryFlags,
    /// The record that made the entry what it is.
    pub(crate) lsn: Lsn,
    /// Not stored: regions that were loose when the disk was opened and were not looked at yet.
    pub(crate) suspect: Regions,
    /// Not stored: the epoch in which a filling member found or made the copy complete.
    pub(crate) verified: Epoch,
}

/// What the index keeps of every copy in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed {
    inode: InodeId,
    lease: LeaseId,
    changed_epoch: Epoch,
    lsn: Lsn,
    verified: Epoch,
    group: GroupId,
    chain: ChainNumber,
    pub(crate) length: u32,
    pub(crate) flags: EntryFlags,
}

/// The rest, which only copies in use have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Detail {
    lease_before: LeaseId,
    pub(crate) open: Option<OpenMark>,
    touched: Regions,
    loose: Regions,
    pub(crate) suspect: Regions,
}

impl Packed {
    /// Splits an entry; the detail is `None` when there is nothing in it.
    pub(crate) fn of(entry: &Entry) -> (Self, Option<Detail>) {
        let packed = Self {
            inode: entry.inode,
            lease: entry.lease,
            changed_epoch: entry.changed_epoch,
            lsn: entry.lsn,
            verified: entry.verified,
            group: entry.group,
            chain: entry.chain,
            length: entry.length,
            flags: entry.flags,
        };
        let detail = Detail {
            lease_before: entry.lease_before,
            open: entry.open,
            touched: entry.touched,
            loose: entry.loose,
            suspect: entry.suspect,
        };
        (
            packed,
            Some(detail).filter(|detail| *detail != Detail::default()),
        )
    }

    /// The entry.
    pub(crate) fn with(&self, detail: Option<&Detail>) -> Entry {
        let detail = detail.copied().unwrap_or_default();
        Entry {
            group: self.group,
            inode: self.inode,
            lease: self.lease,
            chain: self.chain,
            lease_before: detail.lease_before,
            length: self.length,
            changed_epoch: self.changed_epoch,
            open: detail.open,
            touched: detail.touched,
            loose: detail.loose,
            flags: self.flags,
            lsn: self.lsn,
            suspect: detail.suspect,
            verified: self.verified,
        }
    }

    /// Group of the chunk.
    pub(crate) fn group(&self) -> GroupId {
        self.group
    }

    /// Whether there is a copy, complete or not.
    pub(crate) fn exists(&self) -> bool {
        !self.flags.has(EntryFlags::ABSENT)
    }
}

const _: () = assert!(
    size_of::<Packed>() == 56,
    "a copy at rest costs this much memory"
);

impl Entry {
    /// Whether there is a copy, complete or not.
    #[must_use]
    pub fn exists(&self) -> bool {
        !self.flags.has(EntryFlags::ABSENT)
    }

    /// Whether other members may have written other bytes under the open mark.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.flags.has(EntryFlags::IN_DOUBT)
    }

    /// Whether blocks were taken as they were after a crash.
    #[must_use]
    pub fn is_torn(&self) -> bool {
        self.flags.has(EntryFlags::TORN)
    }

    /// Whether bytes are still being fetched.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.flags.has(EntryFlags::PARTIAL)
    }

    pub(crate) fn with_flag(mut self, flag: EntryFlags, on: bool) -> Self {
        self.flags = self.flags.set(flag, on);
        self
    }

    /// Notes a change by a write under (lease, session, epoch).
    pub(crate) fn touch(&mut self, range: &Range<u32>, mark: OpenMark) {
        self.length = self.length.max(range.end);
        self.changed_epoch = self.changed_epoch.max(mark.epoch);
        self.touched = self.touched.with(Regions::of(range));
        if self.open.is_none_or(|open| open.lease < mark.lease) {
            self.open = Some(mark);
        }
    }

    pub(crate) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let open = self.open.unwrap_or(OpenMark {
            lease: LeaseId(0),
            session: SessionId(0),
            epoch: Epoch(0),
        });
        let raw = Raw {
            inode: self.inode.0.into(),
            lease: self.lease.0.into(),
            lease_before: self.lease_before.0.into(),
            changed_epoch: self.changed_epoch.0.into(),
            lsn: self.lsn.0.into(),
            touched: self.touched.0.into(),
            loose: self.loose.0.into(),
            open_lease: open.lease.0.into(),
            open_session: open.session.0.into(),
            open_epoch: open.epoch.0.into(),
            group: self.group.0.into(),
            length: self.length.into(),
            chain: self.chain.0.into(),
            flags: self
                .flags
                .set(EntryFlags::OPEN, self.open.is_some())
                .0
                .into(),
        };
        let mut bytes = [0; ENTRY_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// `None` for bytes that no build wrote.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let raw = Raw::read_from_bytes(bytes).ok()?;
        let flags = EntryFlags(raw.flags.get());
        let open = flags.has(EntryFlags::OPEN).then(|| OpenMark {
            lease: LeaseId(raw.open_lease.get()),
            session: SessionId(raw.open_session.get()),
            epoch: Epoch(raw.open_epoch.get()),
        });
        let entry = Self {
            group: GroupId(raw.group.get()),
            inode: InodeId(raw.inode.get()),
            lease: LeaseId(raw.lease.get()),
            chain: ChainNumber(raw.chain.get()),
            lease_before: LeaseId(raw.lease_before.get()),
            length: raw.length.get(),
            changed_epoch: Epoch(raw.changed_epoch.get()),
            open,
            touched: Regions(raw.touched.get()),
            loose: Regions(raw.loose.get()),
            flags: flags.set(EntryFlags::OPEN, false),
            lsn: Lsn(raw.lsn.get()),
            ..Self::default()
        };
        (entry.length <= crate::geometry::CHUNK_BYTES).then_some(entry)
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Raw {
    inode: U64,
    lease: U64,
    lease_before: U64,
    changed_epoch: U64,
    lsn: U64,
    touched: U64,
    loose: U64,
    open_lease: U64,
    open_session: U64,
    open_epoch: U64,
    group: U32,
    length: U32,
    chain: U32,
    flags: U32,
}

/// Bytes of an encoded entry.
pub(crate) const ENTRY_BYTES: usize = 96;
/// Bytes of one region.
pub(crate) const REGION_BYTES: u32 = 1 << 20;

const _: () = assert!(
    size_of::<Raw>() == ENTRY_BYTES,
    "the size of an entry is part of the format"
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn regions_of_ranges() {
        assert_eq!(Regions::of(&(5..5)), Regions(0));
        assert_eq!(Regions::of(&(0..1)), Regions(1));
        assert_eq!(Regions::of(&(0..REGION_BYTES)), Regions(1));
        assert_eq!(Regions::of(&(0..REGION_BYTES + 1)), Regions(3));
        assert_eq!(
            Regions::of(&(63 * REGION_BYTES..64 * REGION_BYTES)),
            Regions(1 << 63)
        );
        assert_eq!(Regions::of(&(0..64 * REGION_BYTES)), Regions(u64::MAX));
        assert_eq!(Regions(0b101).ranges().count(), 2);
    }

    proptest! {
        #[test]
        fn round_trip(numbers: [u64; 10], small: [u32; 4], open: bool) {
            let entry = Entry {
                group: GroupId(small[0]),
                inode: InodeId(numbers[0]),
                lease: LeaseId(numbers[1]),
                chain: ChainNumber(small[1]),
                lease_before: LeaseId(numbers[2]),
                length: small[2] % (crate::geometry::CHUNK_BYTES + 1),
                changed_epoch: Epoch(numbers[3]),
                open: open.then_some(OpenMark {
                    lease: LeaseId(numbers[4]),
                    session: SessionId(numbers[5]),
                    epoch: Epoch(numbers[6]),
                }),
                touched: Regions(numbers[7]),
                loose: Regions(numbers[8]),
                flags: EntryFlags(small[3] & !1),
                lsn: Lsn(numbers[9]),
                ..Entry::default()
            };
            prop_assert_eq!(Entry::decode(&entry.encode()), Some(entry));
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Entry::decode(&bytes);
        }
    }
}
