//! Any text is refused with a place inside it, or its normal form reads as the same expression.
#![no_main]

use hither_labels::{LabelExpr, LabelSet, LetterMask};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| match text.parse::<LabelExpr>() {
    Ok(expr) => {
        let again: LabelExpr = expr.to_string().parse().expect("a normal form is readable");
        assert_eq!(again, expr);
        for bits in [0, 1, 0x0155_5555, u32::MAX] {
            let labels = LabelSet::from_letters(LetterMask::from_bits_truncate(bits));
            assert_eq!(
                expr.matches(&labels),
                !expr.clone().negate().matches(&labels)
            );
        }
    }
    Err(error) => {
        assert!(text.is_char_boundary(error.offset));
        assert!(error.to_string().len() < 1024);
    }
});
