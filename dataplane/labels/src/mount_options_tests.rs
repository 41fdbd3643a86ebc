use proptest::prelude::*;

use super::*;

fn split(text: &str) -> Vec<MountOption> {
    let known = [
        "ro",
        "rw",
        "a",
        "b",
        "noatime",
        "cache",
        "zone",
        "allow_other",
        "uid",
    ];
    // `zone` is not an option of ours; it is listed by one test below.
    split_mount_options(text, |name| name != "zone" && known.contains(&name)).unwrap()
}

fn shown(text: &str) -> Vec<String> {
    split(text)
        .into_iter()
        .map(|option| match option.value {
            Some(value) => format!("{}: {value}", option.name),
            None => option.name,
        })
        .collect()
}

#[test]
fn plain_options_are_split_at_commas() {
    assert_eq!(shown("ro,uid=5,path=a=b"), ["ro", "uid: 5", "path: a=b"]);
    assert_eq!(shown(""), [""; 0]);
    assert_eq!(shown(",,ro, ,"), ["ro"]);
    assert_eq!(split("ro,uid=5")[1].offset, 3);
    assert_eq!(shown("x=")[0], "x: ");
}

#[test]
fn every_spelling_of_a_list_arrives_whole() {
    for text in [
        "a,b,preflabels=A,B;C,ro",
        "a,b,preflabels=A\\,B\\,C,ro",
        "a,b,preflabels=\"A,B,C\",ro",
        "a,b,preflabels='A,B;C',ro",
        "a,b,preflabels=A;B;C,ro",
        "a,b,\"preflabels=A,B,C\",ro",
        "a,b,preflabels=A,B,C,ro",
    ] {
        let options = split(text);
        let names: Vec<&str> = options.iter().map(|option| option.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "preflabels", "ro"], "{text}");
        let value = options[2].value.clone().unwrap();
        let list: PreferredLabels = value.parse().unwrap();
        assert_eq!(list.to_string(), "A;B;C", "{text}");
    }
}

#[test]
fn both_names_of_the_option_take_lists() {
    assert_eq!(shown("mfspreflabels=S,H,ro"), ["mfspreflabels: S,H", "ro"]);
    assert_eq!(shown("other=S,H,ro"), ["other: S", "H", "ro"]);
}

#[test]
fn what_was_taken_is_named() {
    let options = split("preflabels=A,B,!C&D,ro,E");
    assert_eq!(options[0].continued_by, ["B", "!C&D"]);
    // A known option ends the list.
    assert_eq!(options[2].name, "E");
    assert_eq!(options.len(), 3);
}

#[test]
fn known_options_are_never_taken() {
    assert_eq!(
        shown("preflabels=A,ro,noatime"),
        ["preflabels: A", "ro", "noatime"]
    );
    assert_eq!(shown("preflabels=A,cache=4"), ["preflabels: A", "cache: 4"]);
}

#[test]
fn words_go_on_a_list_when_their_key_is_at_home_there() {
    assert_eq!(
        shown("preflabels=zone=a&media=ssd,zone=a,zone=b,ro"),
        ["preflabels: zone=a&media=ssd,zone=a,zone=b", "ro"]
    );
    assert_eq!(shown("preflabels=A,media=ssd"), ["preflabels: A,media=ssd"]);
    assert_eq!(
        shown("preflabels=pool=x,pool=y"),
        ["preflabels: pool=x,pool=y"]
    );
    // A mistyped option is not swallowed.
    assert_eq!(shown("preflabels=A,cahce=4"), ["preflabels: A", "cahce: 4"]);
    assert_eq!(
        shown("preflabels=A,(B|rack=r1)"),
        ["preflabels: A,(B|rack=r1)"]
    );
}

#[test]
fn what_does_not_parse_is_not_taken() {
    assert_eq!(shown("preflabels=A,x_y"), ["preflabels: A", "x_y"]);
    assert_eq!(shown("preflabels=A,2"), ["preflabels: A", "2"]);
    assert_eq!(shown("preflabels=A,-"), ["preflabels: A", "-"]);
    assert_eq!(shown("preflabels,A"), ["preflabels", "A"]);
}

#[test]
fn escapes_and_quotes() {
    assert_eq!(shown("pw=a\\,b\\\\c\\d"), ["pw: a,b\\c\\d"]);
    assert_eq!(shown("pw=\"a,\\\"b'\",ro"), ["pw: a,\"b'", "ro"]);
    assert_eq!(shown("pw=it's,ro"), ["pw: it's", "ro"]);
    assert_eq!(shown("pw=x\\"), ["pw: x\\"]);
    let error = split_mount_options("ro,pw=\"a,b", |_| true);
    assert_eq!(error, Err(MountOptionsError::UnclosedQuote { column: 7 }));
}

#[test]
fn sizes_are_bounded() {
    let long = "x".repeat(MAX_MOUNT_OPTIONS_BYTES + 1);
    let error = split_mount_options(&long, |_| true);
    assert_eq!(error, Err(MountOptionsError::TooLong { bytes: long.len() }));
    let many = vec!["ro"; MAX_MOUNT_OPTIONS + 1].join(",");
    assert_eq!(
        split_mount_options(&many, |_| true),
        Err(MountOptionsError::TooMany)
    );
}

proptest! {
    #[test]
    fn no_text_makes_the_splitter_panic(text in "[a-cA=\\\\,;\"' é]{0,30}") {
        if let Ok(options) = split_mount_options(&text, |name| name == "a") {
            for option in options {
                prop_assert!(text.is_char_boundary(option.offset));
            }
        }
    }

    #[test]
    fn an_escaped_value_arrives_as_it_was(value in "[a-z,;\\\\\"' ]{1,20}") {
        let escaped: String = value
            .chars()
            .flat_map(|c| ESCAPABLE.contains(&c).then_some('\\').into_iter().chain([c]))
            .collect();
        let options = split_mount_options(&format!("ro,pw={escaped},rw"), |_| true).unwrap();
        prop_assert_eq!(options[1].value.as_deref(), Some(value.as_str()));
        prop_assert_eq!(options.len(), 3);
    }
}
