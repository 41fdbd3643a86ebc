//! Sizes as people write them.

/// Reads a size in bytes: a number and nothing, or a unit of 1024 in any of its spellings, such as
/// `4096`, `64K`, `64Ki`, `64KiB`, `10G`, `10Gi`, `10GiB`. `None` when it is none, or too large.
#[must_use]
pub fn bytes_of(text: &str) -> Option<u64> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit());
    let (digits, unit) = text.split_at(unit_at.unwrap_or(text.len()));
    let number: u64 = digits.parse().ok()?;
    let unit = unit.trim_start();
    let shift = match unit {
        "" | "B" => 0,
        _ => {
            let mut letters = unit.chars();
            let letter = letters.next()?.to_ascii_uppercase();
            if !matches!(letters.as_str(), "" | "i" | "B" | "iB") {
                return None;
            }
            10 * (u32::try_from("KMGTPE".find(letter)?).ok()? + 1)
        }
    };
    number.checked_mul(1u64.checked_shl(shift)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_unit_is_the_same_size() {
        for text in ["10G", "10Gi", "10GiB", "10GB", "10g", "10 GiB", "10240M"] {
            assert_eq!(bytes_of(text), Some(10 << 30), "{text}");
        }
        assert_eq!(bytes_of("4096"), Some(4096));
        assert_eq!(bytes_of("4096B"), Some(4096));
        assert_eq!(bytes_of("3K"), Some(3072));
        assert_eq!(bytes_of("2TiB"), Some(2 << 40));
        assert_eq!(bytes_of("1E"), Some(1 << 60));
    }

    #[test]
    fn what_is_no_size_is_none() {
        for text in [
            "", "G", "1Q", "1GiBs", "-1", "1.5G", "1Gib", "16E", "1 0", "٣",
        ] {
            assert_eq!(bytes_of(text), None, "{text:?}");
        }
    }
}
