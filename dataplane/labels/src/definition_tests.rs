use proptest::prelude::*;

use super::*;
use crate::MAX_TEXT_BYTES;

fn normal(text: &str) -> String {
    text.parse::<StorageDefinition>()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
        .to_string()
}

fn error(text: &str) -> ParseError {
    match text.parse::<StorageDefinition>() {
        Ok(definition) => panic!("{text} reads as {definition}"),
        Err(error) => error,
    }
}

/// Accepted texts that users bring from MooseFS, and what they mean.
#[test]
fn known_texts_keep_their_meaning() {
    let nine = ["A"; 9].join(",");
    for (text, meaning) in [
        ("A;B", "A,B"),
        (" A , B ", "A,B"),
        ("A B", "A&B"),
        ("A*B", "A&B"),
        ("A+BC", "A|(B&C)"),
        ("A[B+C]", "A&(B|C)"),
        ("2A", "A,A"),
        ("2 A", "A,A"),
        ("9A", nine.as_str()),
        ("3*", "*,*,*"),
        ("2", "*,*"),
        ("2 ", "*,*"),
        ("2*,A", "*,*,A"),
        ("2*:S", "*,*:strict"),
        ("a+b", "A|B"),
        ("-A", "!A"),
        ("@4+1", "@4+1"),
        ("=4+1;A", "@4+1,A"),
        ("@8+3,A,B", "@8+3,A,B"),
        ("@4+1 , A ; A", "@4+1,A"),
        ("@2", "@2"),
        ("=1,A", "@1,A"),
        ("2/[R]", "*,*/[RACK]"),
        ("2 / [RACK]", "*,*/[RACK]"),
        ("2/[I]", "*,*/[IP]"),
        ("2/[IP]:l", "*,*/[IP]:loose"),
        ("A,B/[ZONE]", "A,B/[ZONE]"),
        ("A,B/[Z]", "A,B/[ZONE]"),
        ("2/ABX-Z", "*,*/ABXYZ"),
        ("2/z-x", "*,*/XYZ"),
        ("A,B,C,D,E,F,G,H,I", "A,B,C,D,E,F,G,H,I"),
        ("9(zone=a+B)", &["zone=a|B"; 9].join(",")),
        (
            "@4+2,media=ssd,media=hdd/[ZONE]:std",
            "@4+2,media=ssd,media=hdd/[ZONE]:std",
        ),
    ] {
        assert_eq!(normal(text), meaning, "{text}");
        assert_eq!(normal(meaning), meaning, "{meaning}");
    }
}

#[test]
fn nothing_is_a_definition_only_where_one_is_optional() {
    for text in ["-", "~", " -", "- "] {
        assert_eq!(
            StorageDefinition::parse_optional(text).unwrap().value,
            None,
            "{text}"
        );
        assert_eq!(error(text).kind, ParseErrorKind::NothingNotAllowed);
    }
    assert_eq!(error("!").kind, ParseErrorKind::Unexpected);
}

/// Texts that MooseFS refuses, apart from erasure coding forms outside its own range.
#[test]
fn known_bad_texts_are_refused() {
    for text in [
        "",
        " ",
        "\t",
        "!",
        "A*",
        "**",
        "A,",
        ",A",
        "A,,B",
        "9A,B",
        "A,B,C,D,E,F,G,H,I,J",
        "A,B,C,D,E,F,G,H,I,",
        "10A",
        "0A",
        "A2",
        "()",
        "(A",
        "A)",
        "@4+1A",
        "@4+1,2A",
        "@4+1,A,B,C",
        "A/1",
        "A/A-",
        "A:X",
        "A!B",
        "A-B",
        "2,A",
        "A,2",
        "2:S",
        "A/[IP] ",
        "A/[IP] :S",
        "A:S ",
        "A:STANDARD",
        "A\n",
        "A/",
        "A:",
        "A/[X]",
        "A/[IP",
        "A/[IP]B",
        "A:sTrict",
        "@",
        "@+1",
        "@4+",
        "@0",
        "@4+0",
        "@04+1",
        "@4+1,",
        "(A]",
        "A & & B",
    ] {
        let error = error(text);
        assert!(error.offset <= text.len(), "{text}: {error}");
    }
}

#[test]
fn refusals_say_what_to_write() {
    for (text, kind, offset, hint) in [
        ("2,A", ParseErrorKind::BareCount, 0, Some(Hint::BareCount)),
        ("A,2", ParseErrorKind::BareCount, 2, Some(Hint::BareCount)),
        ("2:S", ParseErrorKind::BareCount, 0, Some(Hint::BareCount)),
        ("10A", ParseErrorKind::BadCount, 0, None),
        ("A,0B", ParseErrorKind::BadCount, 2, None),
        ("9A,B", ParseErrorKind::TooManyTerms, 3, None),
        ("A,B,C,D,E,F,G,H,I,", ParseErrorKind::TooManyTerms, 18, None),
        (
            "@4+1,2A",
            ParseErrorKind::CountNotAllowed,
            5,
            Some(Hint::CountInEc),
        ),
        ("@4+1,A,B,C", ParseErrorKind::TooManyEcExpressions, 8, None),
        ("@33+1", ParseErrorKind::BadEcForm, 1, Some(Hint::EcRange)),
        ("@1+1", ParseErrorKind::BadEcForm, 1, Some(Hint::EcRange)),
        ("@9", ParseErrorKind::BadEcForm, 1, Some(Hint::EcRange)),
        ("@4+9", ParseErrorKind::BadEcForm, 3, Some(Hint::EcRange)),
        (
            "A:S ",
            ParseErrorKind::BadMode,
            3,
            Some(Hint::TrailingBlank),
        ),
        (
            "A/[IP] ",
            ParseErrorKind::Unexpected,
            6,
            Some(Hint::TrailingBlank),
        ),
        ("A:X", ParseErrorKind::BadMode, 2, Some(Hint::Modes)),
        (
            "A/1",
            ParseErrorKind::BadUniqueness,
            2,
            Some(Hint::Uniqueness),
        ),
        (
            "A/A-",
            ParseErrorKind::BadUniqueness,
            4,
            Some(Hint::Uniqueness),
        ),
        ("A,B\n", ParseErrorKind::Unexpected, 3, Some(Hint::Newline)),
    ] {
        let error = error(text);
        assert_eq!(
            (error.kind, error.offset, error.hint),
            (kind, offset, hint),
            "{error}"
        );
    }
}

#[test]
fn our_own_range_of_erasure_coding_is_wider() {
    for text in ["@5+1", "@2+1", "@32+8", "@10+4,A", "@8"] {
        assert_eq!(normal(text), text);
    }
}

#[test]
fn modes_have_three_spellings() {
    for (mode, spellings) in [
        (
            Mode::Strict,
            ["s", "S", "strict", "STRICT", "Strict", "sTRICT"],
        ),
        (Mode::Std, ["d", "D", "std", "STD", "Std", "sTD"]),
        (Mode::Loose, ["l", "L", "loose", "LOOSE", "Loose", "lOOSE"]),
    ] {
        for spelling in spellings {
            let definition: StorageDefinition = format!("A:{spelling}").parse().unwrap();
            assert_eq!(definition.mode(), Some(mode), "{spelling}");
        }
    }
}

#[test]
fn terms_of_parts_are_data_then_parity() {
    let definition: StorageDefinition = "@2+1,A,B".parse().unwrap();
    let terms: Vec<String> = definition
        .terms(8)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(terms, ["A", "A", "B"]);
    let by_default: StorageDefinition = "@2".parse().unwrap();
    assert_eq!(by_default.terms(DEFAULT_EC_DATA_PARTS).len(), 10);
}

#[test]
fn order_of_copies_does_not_matter_for_sharing() {
    let one: StorageDefinition = "B,A/[ZONE]".parse().unwrap();
    let other: StorageDefinition = "A;B/[Z]".parse().unwrap();
    assert_ne!(one, other);
    assert_eq!(one.sorted(), other.sorted());
}

#[test]
fn values_outside_the_bounds_make_no_definition() {
    let copies = |count| StorageDefinition::new(Form::Copies(vec![LabelExpr::Any; count]));
    assert_eq!(copies(0), Err(DefinitionError::Copies { count: 0 }));
    assert_eq!(copies(10), Err(DefinitionError::Copies { count: 10 }));
    let definition = copies(2).unwrap();
    let empty = Uniqueness::Letters(LetterMask::EMPTY);
    assert_eq!(
        definition.with_uniqueness(empty),
        Err(DefinitionError::NoLetters)
    );
    let parts = |data, parity| EcParts::new(data, parity, LabelExpr::Any, LabelExpr::Any);
    assert!(parts(Some(33), 1).is_err() && parts(Some(1), 1).is_err());
    assert!(parts(None, 0).is_err() && parts(None, 9).is_err() && parts(None, 8).is_ok());
    let wide = LabelExpr::all(vec!["A".parse().unwrap(); MAX_TEXT_BYTES]);
    let too_large = StorageDefinition::new(Form::Copies(vec![wide]));
    assert_eq!(too_large, Err(DefinitionError::TooLarge));
}

#[test]
fn nine_times_the_longest_old_expression_fits() {
    let text = format!("9({})", "A".repeat(125));
    assert_eq!(normal(&normal(&text)), normal(&text));
    let too_long = format!("9({})", "A".repeat(MAX_TEXT_BYTES - 3));
    assert_eq!(error(&too_long).kind, ParseErrorKind::TooLong);
}

fn definition_text() -> impl Strategy<Value = String> {
    let expr = prop::sample::select(&["A", "!B", "A+B", "(AB)|C", "zone=a", "*", "-(A|*)"][..]);
    let copies = prop::collection::vec((0_u8..3, expr.clone()), 1..4).prop_map(|terms| {
        let term = |(count, expr): &(u8, &str)| match count {
            0 => (*expr).to_owned(),
            count => format!("{count}{expr}"),
        };
        terms.iter().map(term).collect::<Vec<_>>().join(";")
    });
    let parts =
        (2_u8..=32, 1_u8..=8, prop::collection::vec(expr, 0..3)).prop_map(|(data, parity, on)| {
            let on: String = on.iter().map(|expr| format!(",{expr}")).collect();
            format!("@{data}+{parity}{on}")
        });
    let uniqueness = prop::sample::select(&["", "/[IP]", "/[R]", "/[ZONE]", "/AB", "/C-F"][..]);
    let mode = prop::sample::select(&["", ":s", ":STD", ":Loose"][..]);
    (prop_oneof![copies, parts], uniqueness, mode)
        .prop_map(|(form, uniqueness, mode)| format!("{form}{uniqueness}{mode}"))
}

proptest! {
    #[test]
    fn definitions_are_read_and_their_normal_form_reads_the_same(text in definition_text()) {
        let definition: StorageDefinition = text.parse().unwrap();
        let again: StorageDefinition = definition.to_string().parse().unwrap();
        prop_assert_eq!(again, definition);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[A-Ca0-9!*()\\[\\],;/:@=+ IPRZ\\-é\n]{0,24}") {
        match StorageDefinition::parse_optional(&text) {
            Ok(parsed) => if let Some(definition) = parsed.value {
                let again: StorageDefinition = definition.to_string().parse().unwrap();
                prop_assert_eq!(again, definition);
            },
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}
