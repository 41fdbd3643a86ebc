use proptest::prelude::*;

use super::*;
use crate::{LetterMask, LocationView, effective_labels};

/// A server of a test: labels, suspect, operations in flight.
type Server = (&'static str, bool, u32);

fn order(
    preferred: &str,
    servers: &[Server],
    sort: impl Fn(&PreferredLabels, Answer, &[ServerView<'_>]) -> Vec<usize>,
    answer: Answer,
) -> Vec<usize> {
    let sets: Vec<LabelSet> = servers
        .iter()
        .map(|(text, ..)| text.parse().unwrap())
        .collect();
    let views: Vec<ServerView<'_>> = servers
        .iter()
        .zip(&sets)
        .map(|((_, suspect, in_flight), labels)| ServerView {
            labels,
            suspect: *suspect,
            in_flight: *in_flight,
        })
        .collect();
    sort(&preferred.parse().unwrap(), answer, &views)
}

fn read(preferred: &str, servers: &[Server]) -> Vec<usize> {
    order(preferred, servers, read_order, Answer::Copies)
}

fn write(preferred: &str, servers: &[Server]) -> Vec<usize> {
    order(preferred, servers, write_order, Answer::Copies)
}

#[test]
fn the_ssd_copy_is_read_first_and_the_other_stays_on_the_list() {
    assert_eq!(read("S", &[("H", false, 0), ("S", false, 5)]), [1, 0]);
    assert_eq!(read("S", &[("H", false, 0)]), [0]);
}

#[test]
fn two_mounts_of_two_rooms_read_their_own_copies() {
    let servers = [("A", false, 0), ("B", false, 0)];
    assert_eq!(read("A", &servers), [0, 1]);
    assert_eq!(read("B", &servers), [1, 0]);
}

#[test]
fn an_earlier_expression_outranks_a_later_one_and_no_match_comes_last() {
    let servers = [
        ("C", false, 0),
        ("B", false, 0),
        ("A", false, 9),
        ("B,A", false, 10),
    ];
    assert_eq!(read("A;B", &servers), [2, 3, 1, 0]);
}

#[test]
fn reads_of_equal_rank_go_to_the_least_busy() {
    let servers = [
        ("A", false, 2),
        ("A", false, 1),
        ("B", false, 0),
        ("A", false, 1),
    ];
    assert_eq!(read("A", &servers), [1, 3, 0, 2]);
}

#[test]
fn without_a_preference_load_alone_decides_reads() {
    let servers = [
        ("A", false, 2),
        ("B", false, 0),
        ("C", false, 1),
        ("D", false, 0),
    ];
    assert_eq!(read("-", &servers), [1, 3, 2, 0]);
    // No match anywhere is the same as no preference.
    assert_eq!(read("Z", &servers), read("-", &servers));
}

#[test]
fn writes_keep_the_received_order_within_a_rank() {
    let servers = [
        ("B", false, 0),
        ("A", false, 9),
        ("B", false, 5),
        ("A", false, 0),
    ];
    assert_eq!(write("A", &servers), [1, 3, 0, 2]);
    // Without the option the chain is the list, unchanged, whatever the load.
    assert_eq!(write("-", &servers), [0, 1, 2, 3]);
    assert_eq!(write("Z", &servers), [0, 1, 2, 3]);
}

#[test]
fn rank_takes_precedence_over_the_received_order() {
    // The list comes with the near servers first; a matching far server is read all the same.
    let servers = [("near", false, 0), ("near", false, 0), ("F", false, 3)];
    assert_eq!(read("F", &servers), [2, 0, 1]);
    assert_eq!(write("F", &servers), [2, 0, 1]);
}

#[test]
fn parts_keep_their_positions() {
    let servers = [("H", true, 9), ("S", false, 0), ("H", false, 0)];
    assert_eq!(order("S", &servers, read_order, Answer::Parts), [0, 1, 2]);
    assert_eq!(order("S", &servers, write_order, Answer::Parts), [0, 1, 2]);
}

#[test]
fn suspects_sink_below_everything_and_stay() {
    let servers = [
        ("A", true, 0),
        ("B", false, 7),
        ("A", false, 1),
        ("C", true, 0),
    ];
    assert_eq!(read("A;B", &servers), [2, 1, 0, 3]);
    assert_eq!(write("A;B", &servers), [2, 1, 0, 3]);
}

#[test]
fn servers_of_other_locations_match_only_any_and_not() {
    let near: LabelSet = "B".parse().unwrap();
    let far: LabelSet = "A".parse().unwrap();
    let view = |labels, view| ServerView {
        labels: effective_labels(labels, view),
        suspect: false,
        in_flight: 0,
    };
    let servers = [
        view(&near, LocationView::Own),
        view(&far, LocationView::Other),
    ];
    let read = |list: &str| read_order(&list.parse().unwrap(), Answer::Copies, &servers);
    assert_eq!(read("A;B"), [0, 1]);
    assert_eq!(read("*"), [0, 1]);
    assert_eq!(read("!B"), [1, 0]);
}

fn servers() -> impl Strategy<Value = Vec<(LabelSet, bool, u32)>> {
    let server = (0_u32..16, any::<bool>(), 0_u32..3).prop_map(|(bits, suspect, in_flight)| {
        (
            LabelSet::from_letters(LetterMask::from_bits_truncate(bits)),
            suspect,
            in_flight,
        )
    });
    prop::collection::vec(server, 0..12)
}

proptest! {
    #[test]
    fn orders_are_stable_permutations(servers in servers(), list in "[A-D](;[A-D]){0,3}") {
        let preferred: PreferredLabels = list.parse().unwrap();
        let views: Vec<ServerView<'_>> = servers
            .iter()
            .map(|(labels, suspect, in_flight)| ServerView {
                labels, suspect: *suspect, in_flight: *in_flight,
            })
            .collect();
        let rank = |index: usize| preferred.rank(views[index].labels);
        for (order, counts_load) in [
            (read_order(&preferred, Answer::Copies, &views), true),
            (write_order(&preferred, Answer::Copies, &views), false),
        ] {
            let mut indices = order.clone();
            indices.sort_unstable();
            prop_assert_eq!(indices, (0..views.len()).collect::<Vec<_>>());
            for pair in order.windows(2) {
                let key = |index: usize| {
                    let load = if counts_load { views[index].in_flight } else { 0 };
                    (views[index].suspect, rank(index), load, index)
                };
                prop_assert!(key(pair[0]) < key(pair[1]));
            }
        }
    }
}
