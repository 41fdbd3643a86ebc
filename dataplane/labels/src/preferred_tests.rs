use proptest::prelude::*;

use super::*;
use crate::error::Hint;

fn parse(text: &str) -> PreferredLabels {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn error(text: &str) -> ParseError {
    match text.parse::<PreferredLabels>() {
        Ok(list) => panic!("{text} reads as {list}"),
        Err(error) => error,
    }
}

fn rank(list: &str, labels: &str) -> usize {
    parse(list).rank(&labels.parse().unwrap()).index()
}

#[test]
fn rank_is_the_first_expression_that_matches() {
    assert_eq!(rank("A;B;C", "B,C"), 1);
    assert_eq!(rank("A;B;C", "C"), 2);
    assert_eq!(rank("AB;A;*", "A,B"), 0);
    assert_eq!(
        rank("zone=a&media=ssd; zone=a; media=ssd", "zone=a,media=hdd"),
        1
    );
}

#[test]
fn a_server_that_matches_nothing_ranks_after_all_that_match() {
    assert_eq!(rank("A;B", "C"), 2);
    assert_eq!(rank("A,B,C,D,E,F,G,H,I", "Z"), 9);
    assert_eq!(parse("A;B").worst_rank().index(), 2);
}

#[test]
fn without_a_preference_all_ranks_are_equal() {
    for text in ["-", "~", " -"] {
        assert!(parse(text).is_empty());
        assert_eq!(rank(text, "A"), rank(text, ""));
    }
    assert_eq!(PreferredLabels::NONE.to_string(), "-");
    assert_eq!(
        parse(&PreferredLabels::NONE.to_string()),
        PreferredLabels::NONE
    );
}

#[test]
fn a_server_without_labels_satisfies_any_and_not() {
    assert_eq!(rank("A;*", ""), 1);
    assert_eq!(rank("A;!B", ""), 1);
    assert_eq!(rank("A;B", ""), 2);
}

#[test]
fn all_separators_are_the_same() {
    for text in [
        "A,B;C",
        "A;B;C",
        "A\\,B\\,C",
        "A\\;B, C",
        "\"A,B,C\"",
        "'A;B;C'",
        " \"A,B,C\" ",
    ] {
        assert_eq!(parse(text).to_string(), "A;B;C", "{text}");
    }
}

#[test]
fn a_repeat_count_takes_places_and_is_reported() {
    let parsed = PreferredLabels::parse("2A,B").unwrap();
    assert_eq!(parsed.value.to_string(), "A;A;B");
    assert_eq!(rank("2A,B", "B"), 2);
    assert_eq!(
        parsed.warnings,
        [Warning::RepeatCount {
            column: 1,
            count: 2
        }]
    );
    let bare = PreferredLabels::parse("2").unwrap();
    assert_eq!(bare.value.to_string(), "*;*");
    assert_eq!(bare.warnings.len(), 1);
}

#[test]
fn expressions_that_never_decide_are_reported() {
    let warnings = |text: &str| PreferredLabels::parse(text).unwrap().warnings;
    assert!(matches!(
        &warnings("A;B;A")[..],
        [Warning::NeverDecides { position: 3, .. }]
    ));
    assert!(matches!(
        &warnings("*;B")[..],
        [Warning::NeverDecides { position: 2, .. }]
    ));
    assert_eq!(warnings("A;B;*"), []);
    assert!(matches!(&warnings("-o")[..], [Warning::LeadingDash { .. }]));
}

#[test]
fn what_means_nothing_in_a_preference_is_an_error() {
    for (text, kind, offset) in [
        ("@4+1,A,B", ParseErrorKind::EcInPreference, 0),
        ("=4+1", ParseErrorKind::EcInPreference, 0),
        ("A/[IP]", ParseErrorKind::UniquenessInPreference, 1),
        ("2/[R]", ParseErrorKind::UniquenessInPreference, 1),
        ("A;B:strict", ParseErrorKind::ModeInPreference, 3),
    ] {
        let error = error(text);
        assert_eq!((error.kind, error.offset), (kind, offset), "{error}");
    }
}

#[test]
fn bad_lists_are_refused() {
    for text in [
        "",
        " ",
        "A;",
        ";A",
        "A;;B",
        "A2",
        "10A",
        "A,B,C,D,E,F,G,H,I,J",
        "9A;B",
        "\"A",
        "''",
    ] {
        error(text);
    }
    assert_eq!(error("A,").hint, Some(Hint::CommaTrap));
    assert_eq!(error("A\nB").hint, Some(Hint::Newline));
    assert_eq!(error("\"A").hint, Some(Hint::Quotes));
    assert_eq!(error("'A;;B'").offset, 3);
}

#[test]
fn lists_of_expressions_keep_the_bounds() {
    let any = LabelExpr::Any;
    assert!(PreferredLabels::from_expressions(vec![any.clone(); 9]).is_some());
    assert!(PreferredLabels::from_expressions(vec![any; 10]).is_none());
}

#[test]
fn lists_are_text_in_json() {
    let json = serde_json::to_string(&parse("A,B")).unwrap();
    assert_eq!(json, "\"A;B\"");
    assert_eq!(
        serde_json::from_str::<PreferredLabels>(&json).unwrap(),
        parse("A;B")
    );
}

proptest! {
    #[test]
    fn a_list_reads_as_it_was_written(text in "[A-Ca2!*()|&;, =x-]{0,20}") {
        if let Ok(list) = text.parse::<PreferredLabels>() {
            prop_assert_eq!(list.to_string().parse::<PreferredLabels>().unwrap(), list);
        }
    }

    #[test]
    fn rank_is_what_a_search_finds(bits in prop::collection::vec(0_u8..4, 1..9), server in 0_u32..16) {
        let letters: Vec<String> =
            bits.iter().map(|letter| char::from(b'A' + letter).to_string()).collect();
        let list = parse(&letters.join(";"));
        let labels = LabelSet::from_letters(crate::LetterMask::from_bits_truncate(server));
        let expected = bits.iter().position(|bit| server >> bit & 1 == 1).unwrap_or(bits.len());
        prop_assert_eq!(list.rank(&labels).index(), expected);
    }
}
