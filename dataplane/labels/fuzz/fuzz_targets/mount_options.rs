//! Splitting is total, loses no option, and leaves a value whole that was escaped.
#![no_main]

use hither_labels::split_mount_options;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(options) = split_mount_options(text, |name| name == "ro") {
        assert!(
            options
                .windows(2)
                .all(|pair| pair[0].offset < pair[1].offset)
        );
    }
    let escaped: String = text
        .chars()
        .flat_map(|c| ",;\\\"'".contains(c).then_some('\\').into_iter().chain([c]))
        .collect();
    if let Ok(options) = split_mount_options(&format!("pw={escaped}"), |_| true) {
        assert_eq!(options[0].value.as_deref(), Some(text));
        assert_eq!(options.len(), 1);
    }
});
