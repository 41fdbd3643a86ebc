use proptest::prelude::*;

use super::*;
use crate::error::{Hint, ParseErrorKind, Warning};
use crate::{LetterMask, MAX_DEPTH, MAX_TEXT_BYTES};

fn normal(text: &str) -> String {
    text.parse::<LabelExpr>()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
        .to_string()
}

fn error(text: &str) -> ParseError {
    match text.parse::<LabelExpr>() {
        Ok(expr) => panic!("{text} reads as {expr}"),
        Err(error) => error,
    }
}

#[test]
fn precedence_and_spelling() {
    for (text, meaning) in [
        ("A B", "A&B"),
        ("A*B", "A&B"),
        ("A&&B", "A&B"),
        ("A+BC", "A|(B&C)"),
        ("A||B | C", "A|B|C"),
        ("A[B+C]", "A&(B|C)"),
        ("a+b", "A|B"),
        ("-A", "!A"),
        ("~~A", "A"),
        ("!-~A", "!A"),
        ("!AB", "!A&B"),
        ("!(AB)", "!(A&B)"),
        ("A&!B", "A&!B"),
        ("A&*", "A&*"),
        ("(*)", "*"),
        ("!*", "!*"),
        ("* A", "*&A"),
        ("***", "*&*"),
        ("(A)(B)", "A&B"),
        ("((A&B)&C)", "A&B&C"),
        ("zone=eu-1a", "zone=eu-1a"),
        ("zone=a media=ssd", "zone=a&media=ssd"),
        ("zone=a&!media=hdd+S", "(zone=a&!media=hdd)|S"),
        ("S zone=a", "S&zone=a"),
        ("zone=a*B", "zone=a&B"),
        ("k8s-pool=x.y_z", "k8s-pool=x.y_z"),
        ("\tA\t", "A"),
    ] {
        assert_eq!(normal(text), meaning, "{text}");
    }
}

#[test]
fn refusals_name_the_place_and_the_way_out() {
    for (text, offset, hint) in [
        ("", 0, None),
        ("  ", 2, None),
        ("!", 1, None),
        ("A*", 2, None),
        ("**", 2, None),
        ("()", 1, None),
        ("(A", 2, None),
        ("A)", 1, None),
        ("(A]", 2, Some(Hint::BracketKind)),
        ("A!B", 1, Some(Hint::NotNeedsAnd)),
        ("A-B", 1, Some(Hint::NotNeedsAnd)),
        ("(A-B)", 2, Some(Hint::NotNeedsAnd)),
        ("A2", 1, Some(Hint::CountBefore)),
        ("2A", 0, None),
        ("A+2B", 2, None),
        ("A\n", 1, Some(Hint::Newline)),
        ("A\r\n", 1, Some(Hint::Newline)),
        ("Zone=a", 0, Some(Hint::KeyForm)),
        ("Azone=a", 0, Some(Hint::KeyForm)),
        ("zone =a", 5, Some(Hint::KeyForm)),
        ("zone=", 5, None),
        ("zone=a=b", 6, Some(Hint::KeyForm)),
        ("-1", 1, None),
        ("-", 1, Some(Hint::LeadingDash)),
        ("A& &B", 3, None),
        ("A| |B", 3, None),
        ("A&é", 2, None),
        ("\"A\"", 0, Some(Hint::Quotes)),
    ] {
        let error = error(text);
        assert_eq!(
            (error.offset, error.hint),
            (offset, hint),
            "{text}: {error}"
        );
    }
    assert_eq!(error("").kind, ParseErrorKind::Empty);
    assert_eq!(error("(A").kind, ParseErrorKind::UnclosedGroup);
    let long_key = format!("{}=x", "a".repeat(64));
    assert_eq!(error(&long_key).kind, ParseErrorKind::BadWord);
    let long_value = format!("a={}", "x".repeat(64));
    assert_eq!(error(&long_value).kind, ParseErrorKind::BadWord);
}

#[test]
fn traps_in_valid_texts_are_reported() {
    let warnings = |text: &str| LabelExpr::parse(text).unwrap().warnings;
    // The rest of a mistyped command option is a valid expression.
    assert!(matches!(&warnings("-o")[..], [Warning::LeadingDash { .. }]));
    assert_eq!(warnings("!o"), []);
    assert!(matches!(
        &warnings("A ssd")[..],
        [Warning::LettersLookLikeWord { column: 3, run }] if run == "ssd"
    ));
    assert_eq!(warnings("ABC ab media=ssd"), []);
}

#[test]
fn hostile_texts_are_refused_without_deep_recursion() {
    let nested = |depth: usize| format!("{}A{}", "(".repeat(depth), ")".repeat(depth));
    assert_eq!(normal(&nested(MAX_DEPTH)), "A");
    assert_eq!(error(&nested(MAX_DEPTH + 1)).kind, ParseErrorKind::TooDeep);
    assert_eq!(
        error(&"[".repeat(MAX_TEXT_BYTES)).kind,
        ParseErrorKind::TooDeep
    );
    assert_eq!(
        normal(&format!("{}A", "!".repeat(MAX_TEXT_BYTES - 1))),
        "!A"
    );
    assert_eq!(
        error(&"A".repeat(MAX_TEXT_BYTES + 1)).kind,
        ParseErrorKind::TooLong
    );
    // Fits as it stands, but not in its normal form.
    assert_eq!(
        error(&"A".repeat(MAX_TEXT_BYTES)).kind,
        ParseErrorKind::TooLong
    );
    // AND and OR in turn, twice as deep as the brackets say.
    let towers = format!("{}A{}", "A[B+C".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH));
    assert_eq!(error(&towers).kind, ParseErrorKind::TooDeep);
}

#[test]
fn as_many_operands_as_the_original_grammar_held_are_accepted() {
    let many = "A".repeat(125);
    assert_eq!(normal(&many), vec!["A"; 125].join("&"));
    assert_eq!(normal(&vec!["B"; 126].join("+")), vec!["B"; 126].join("|"));
}

#[test]
fn expressions_name_their_labels() {
    let expr: LabelExpr = "A&!(zone=b+C)|*".parse().unwrap();
    let labels: Vec<String> = expr.labels().iter().map(ToString::to_string).collect();
    assert_eq!(labels, ["A", "zone=b", "C"]);
}

#[test]
fn empty_and_single_lists_have_a_meaning_and_a_text() {
    let none = LabelSet::EMPTY;
    for (expr, text, is_match) in [
        (LabelExpr::All(vec![]), "*", true),
        (LabelExpr::AnyOf(vec![]), "!*", false),
        (LabelExpr::all(vec![]), "*", true),
        (LabelExpr::any_of(vec![]), "!*", false),
        (LabelExpr::AnyOf(vec![LabelExpr::Any]), "*", true),
        (
            LabelExpr::Not(Box::new(LabelExpr::All(vec![]))),
            "!*",
            false,
        ),
    ] {
        assert_eq!(expr.to_string(), text);
        assert_eq!(expr.matches(&none), is_match);
    }
}

/// One operand of a flat text: how often it is negated, and its letter (`None`: any server).
type Operand = (usize, Option<u8>);

/// A flat text and, for each set of A-D, the value that OR of AND of NOT gives. Written without
/// the parser: the text is a list of lists of operands.
fn flat_text() -> impl Strategy<Value = (String, Vec<Vec<Operand>>)> {
    let operand = (
        0_usize..3,
        prop_oneof![9 => (0_u8..4).prop_map(Some), 1 => Just(None)],
    );
    let ors = prop::collection::vec(prop::collection::vec(operand, 1..5), 1..5);
    (ors, prop::collection::vec((0_usize..8, 0_usize..3), 16)).prop_map(|(ors, style)| {
        let mut text = String::new();
        let mut style = style.into_iter().cycle();
        for (i, ands) in ors.iter().enumerate() {
            let (sign, _) = style.next().unwrap_or_default();
            if i > 0 {
                text.push_str(["+", "|", "||", " + ", " | ", "\t|| ", "+ ", " |"][sign]);
            }
            for (j, (nots, letter)) in ands.iter().enumerate() {
                let (sign, not) = style.next().unwrap_or_default();
                if j > 0 {
                    // Only an operand without NOT may be juxtaposed, and `*` would be an operator.
                    let signs: &[&str] = if *nots == 0 && letter.is_some() {
                        &["", " ", "&", "&&", "*", " * ", " & ", "  "]
                    } else {
                        &["&", "&&", "*", " * ", " & ", "&& ", " &&", "* "]
                    };
                    text.push_str(signs[sign]);
                }
                text.push_str(&["!", "~", "-"][not].repeat(*nots));
                text.push(letter.map_or('*', |letter| char::from(b'A' + letter)));
            }
        }
        (text, ors)
    })
}

fn tree() -> impl Strategy<Value = LabelExpr> {
    const WORDS: [&str; 3] = ["zone=eu-1a", "media=ssd", "a-b=C.d_e"];
    let leaf = prop_oneof![
        Just(LabelExpr::Any),
        prop_oneof![
            "[A-F]".prop_map(|t| t),
            prop::sample::select(&WORDS[..]).prop_map(str::to_owned)
        ]
        .prop_map(|text| LabelExpr::Label(text.parse().unwrap())),
    ];
    leaf.prop_recursive(5, 40, 4, |inner| {
        prop_oneof![
            inner.clone().prop_map(LabelExpr::negate),
            prop::collection::vec(inner.clone(), 0..4).prop_map(LabelExpr::all),
            prop::collection::vec(inner, 0..4).prop_map(LabelExpr::any_of),
        ]
    })
}

proptest! {
    #[test]
    fn a_normal_form_reads_as_itself(expr in tree()) {
        let text = expr.to_string();
        prop_assert_eq!(text.parse::<LabelExpr>().unwrap(), expr);
    }

    #[test]
    fn precedence_is_that_of_a_naive_evaluator((text, ors) in flat_text()) {
        let expr: LabelExpr = text.parse().unwrap();
        for bits in 0..16 {
            let labels = LabelSet::from_letters(LetterMask::from_bits_truncate(bits));
            let naive = ors.iter().any(|ands| {
                ands.iter().all(|(nots, letter)| {
                    let holds = letter.is_none_or(|letter| bits >> letter & 1 == 1);
                    holds ^ (nots % 2 == 1)
                })
            });
            prop_assert_eq!(expr.matches(&labels), naive, "{} on {}", text, labels);
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,40}") {
        let _ = LabelExpr::parse(&text).map_err(|error| error.to_string());
    }

    #[test]
    fn texts_of_the_grammars_characters_are_read_or_refused_inside(
        text in "[A-Da=0-9!~&|+*()\\[\\],;/: zone-]{0,24}",
    ) {
        match LabelExpr::parse(&text) {
            Ok(parsed) => {
                let again = parsed.value.to_string().parse::<LabelExpr>();
                prop_assert_eq!(again.unwrap(), parsed.value);
            }
            Err(error) => {
                prop_assert!(error.offset <= text.len());
                prop_assert!(error.to_string().contains('^'));
            }
        }
    }
}
