//! Bytes as Kubernetes writes them. Pure.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The bytes a quantity stands for, rounded up: `10Gi` is 10·2³⁰, `10G` is 10·10⁹, `1.5Gi`, `1e9`
/// and `500m` are quantities too. `None` when it is none, negative or too large.
#[must_use]
pub fn bytes_of(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.trim();
    let unit_at = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}");
    let digits: u128 = digits.parse().ok()?;
    let (factor, divisor) = factor_of(unit)?;
    let divisor = 10_u128
        .checked_pow(u32::try_from(fraction.len()).ok()?)?
        .checked_mul(divisor)?;
    u64::try_from(digits.checked_mul(factor)?.div_ceil(divisor)).ok()
}

/// By what a unit multiplies and divides.
fn factor_of(unit: &str) -> Option<(u128, u128)> {
    let power = |base: u128, letters: &str, of: &str| {
        let at = letters.find(of)?;
        base.checked_pow(u32::try_from(at).ok()? + 1)
    };
    if let Some(binary) = unit.strip_suffix('i') {
        return (binary.len() == 1)
            .then(|| power(1024, "KMGTPE", binary))?
            .map(|f| (f, 1));
    }
    match unit {
        "" => Some((1, 1)),
        "m" => Some((1, 1000)),
        "k" | "M" | "G" | "T" | "P" | "E" => power(1000, "kMGTPE", unit).map(|f| (f, 1)),
        _ => {
            let exponent: i32 = unit.strip_prefix(['e', 'E'])?.parse().ok()?;
            let factor = 10_u128.checked_pow(exponent.unsigned_abs())?;
            Some(if exponent < 0 {
                (1, factor)
            } else {
                (factor, 1)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_kubernetes_is_understood() {
        for (text, bytes) in [
            ("4096", 4096),
            ("10Gi", 10 << 30),
            ("10G", 10_000_000_000),
            ("1.5Gi", 3 << 29),
            ("1e9", 1_000_000_000),
            ("1E3", 1000),
            ("500m", 1),
            ("1500m", 2),
            ("0.10k", 100),
            ("2E", 2_000_000_000_000_000_000),
            ("1Ki", 1024),
        ] {
            assert_eq!(bytes_of(&Quantity(text.into())), Some(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_none() {
        for text in [
            "", ".", "G", "-1", "1Q", "1Ii", "1KiB", "1.2.3", "99E", "1e99", "1GMi",
        ] {
            assert_eq!(bytes_of(&Quantity(text.into())), None, "{text:?}");
        }
    }
}
