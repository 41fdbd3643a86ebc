//! Directory fragments: ranges of name hashes.

use std::fmt;

use crate::ids::NameHash;

/// A fragment of a directory: all names whose hash starts with `value` in its top `bits` bits.
///
/// `bits` 0 is the whole directory. On the wire and in keys it is `bits << 56 | value`, with
/// `value` right-aligned, so `bits` is at most 56.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Fragment {
    bits: u8,
    value: u64,
}

impl Fragment {
    /// The whole directory.
    pub const WHOLE: Self = Self { bits: 0, value: 0 };
    /// Most bits a fragment may have.
    pub const BITS_MAX: u8 = 56;

    /// Reads the wire form; `None` when the bits are out of range or the value has more bits.
    #[must_use]
    pub fn from_wire(raw: u64) -> Option<Self> {
        let bits = u8::try_from(raw >> 56).ok()?;
        let value = raw & ((1 << 56) - 1);
        if bits > Self::BITS_MAX {
            return None;
        }
        (value >> bits == 0).then_some(Self { bits, value })
    }

    /// The wire form.
    #[must_use]
    pub fn to_wire(self) -> u64 {
        u64::from(self.bits) << 56 | self.value
    }

    /// Number of leading hash bits that are fixed.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.bits
    }

    /// Whether names with this hash are in the fragment.
    #[must_use]
    pub fn contains(self, hash: NameHash) -> bool {
        self.bits == 0 || hash.0 >> (64 - self.bits) == self.value
    }

    /// Lowest hash of the fragment.
    #[must_use]
    pub fn first(self) -> NameHash {
        if self.bits == 0 {
            NameHash(0)
        } else {
            NameHash(self.value << (64 - self.bits))
        }
    }

    /// Highest hash of the fragment.
    #[must_use]
    pub fn last(self) -> NameHash {
        if self.bits == 0 {
            NameHash(u64::MAX)
        } else {
            NameHash(self.first().0 | (u64::MAX >> self.bits))
        }
    }

    /// The two halves; `None` at [`Self::BITS_MAX`].
    #[must_use]
    pub fn split(self) -> Option<[Self; 2]> {
        (self.bits < Self::BITS_MAX).then(|| {
            let bits = self.bits + 1;
            [
                Self {
                    bits,
                    value: self.value << 1,
                },
                Self {
                    bits,
                    value: self.value << 1 | 1,
                },
            ]
        })
    }

    /// The fragment this one is a half of; `None` for the whole directory.
    #[must_use]
    pub fn parent(self) -> Option<Self> {
        (self.bits > 0).then(|| Self {
            bits: self.bits - 1,
            value: self.value >> 1,
        })
    }
}

impl fmt::Display for Fragment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bits == 0 {
            return f.write_str("*");
        }
        write!(
            f,
            "{:0width$b}*",
            self.value,
            width = usize::from(self.bits)
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn halves_partition_the_whole(hash: u64, path: u64, depth in 0u8..56) {
            let mut fragment = Fragment::WHOLE;
            for bit in 0..depth {
                fragment = fragment.split().unwrap()[usize::from(path >> bit & 1 == 1)];
            }
            let [low, high] = fragment.split().unwrap();
            let hash = NameHash(hash);
            prop_assert_eq!(
                fragment.contains(hash),
                low.contains(hash) || high.contains(hash)
            );
            prop_assert!(!(low.contains(hash) && high.contains(hash)));
            prop_assert_eq!(low.parent(), Some(fragment));
            prop_assert_eq!(low.first(), fragment.first());
            prop_assert_eq!(high.last(), fragment.last());
            prop_assert_eq!(low.last().0 + 1, high.first().0);
            prop_assert_eq!(Fragment::from_wire(fragment.to_wire()), Some(fragment));
        }

        #[test]
        fn any_wire_form_is_refused_or_kept(raw: u64) {
            if let Some(fragment) = Fragment::from_wire(raw) {
                prop_assert_eq!(fragment.to_wire(), raw);
            }
        }
    }
}
