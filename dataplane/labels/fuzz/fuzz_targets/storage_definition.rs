//! Any text is refused, or its normal form reads as the same definition; a preference likewise.
#![no_main]

use hither_labels::{PreferenceTemplate, PreferredLabels, StorageDefinition};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(definition) = text.parse::<StorageDefinition>() {
        let again: StorageDefinition = definition
            .to_string()
            .parse()
            .expect("a normal form is readable");
        assert_eq!(again, definition);
        assert!(!definition.terms(8).is_empty());
    }
    if let Ok(preferred) = text.parse::<PreferredLabels>() {
        let again: PreferredLabels = preferred
            .to_string()
            .parse()
            .expect("a normal form is readable");
        assert_eq!(again, preferred);
    }
    if let Ok(template) = text.parse::<PreferenceTemplate>() {
        let values = template
            .variables()
            .into_iter()
            .map(|name| (name.to_owned(), "v".to_owned()));
        let expansion = template.expand(&values.collect());
        assert!(expansion.is_ok_and(|expansion| expansion.dropped.is_empty()));
    }
});
