use proptest::prelude::*;

use super::*;
use crate::candidate::candidate_order;
use hither_labels::StorageDefinition;

fn server(key: u64, labels: &str) -> Candidate {
    Candidate {
        labels: labels.parse().unwrap(),
        ..Candidate::new(ServerKey(key), 1000)
    }
}

fn servers(labels: &[&str]) -> Vec<Candidate> {
    labels
        .iter()
        .zip(1..)
        .map(|(labels, key)| server(key, labels))
        .collect()
}

fn place_with(text: &str, servers: &[Candidate], existing: &[Existing], mode: Mode) -> Placement {
    let definition: StorageDefinition = text.parse().unwrap();
    let terms = definition.terms(8);
    let matcher = Matcher::new(&terms, definition.uniqueness(), servers);
    matcher.place(&candidate_order(servers), existing, mode)
}

fn place(text: &str, servers: &[Candidate]) -> Placement {
    place_with(text, servers, &[], Mode::Std)
}

fn chosen(placement: &Placement) -> Vec<Option<usize>> {
    placement.terms.iter().map(|term| term.server).collect()
}

fn outcomes(placement: &Placement) -> Vec<TermOutcome> {
    placement.terms.iter().map(|term| term.outcome).collect()
}

fn copies(servers: &[u64]) -> Vec<Existing> {
    servers
        .iter()
        .map(|key| Existing {
            server: ServerKey(*key),
            term: None,
        })
        .collect()
}

#[test]
fn terms_are_matched_together_not_one_by_one() {
    // Term by term, A would take the first server and leave nothing for B.
    let placement = place("A,B", &servers(&["A,B", "A"]));
    assert_eq!(chosen(&placement), [Some(1), Some(0)]);
    assert!(placement.is_satisfied());
    let placement = place("*,A+B,B", &servers(&["B", "A,B", ""]));
    assert!(placement.is_satisfied());
}

#[test]
fn the_order_decides_among_equals() {
    let mut servers = servers(&["A", "A", "A"]);
    servers[0].load = 5;
    servers[2].free_bytes = 2000;
    assert_eq!(chosen(&place("A", &servers)), [Some(2)]);
    assert_eq!(chosen(&place("2A", &servers)), [Some(2), Some(1)]);
}

#[test]
fn uniqueness_groups_hold_one_copy_each() {
    let mut servers = servers(&["A", "A", "A"]);
    for (server, rack) in servers.iter_mut().zip(["r1", "r1", "r2"]) {
        server.rack = Some(rack.to_owned());
        server.host = "10.0.0.1".to_owned();
        server.zone = Some("z".to_owned());
    }
    assert_eq!(chosen(&place("2A/[RACK]", &servers)), [Some(0), Some(2)]);
    assert_eq!(
        outcomes(&place("3A/[RACK]", &servers))[2],
        TermOutcome::Unsatisfied(Cause::Taken)
    );
    assert_eq!(place("2A/[IP]", &servers).placed(), 1);
    assert_eq!(place("2A/[ZONE]", &servers).placed(), 1);
    servers[1].zone = None;
    servers[2].zone = None;
    assert_eq!(
        place("3A/[ZONE]", &servers).placed(),
        3,
        "unknown zones do not collide"
    );
}

#[test]
fn masked_letters_group_servers_and_none_is_alone() {
    let placement = place("3*/XY", &servers(&["X,A", "X,B", "X,Y"]));
    assert_eq!(placement.placed(), 2);
    let placement = place("3*/XY", &servers(&["A", "A", "B"]));
    assert_eq!(placement.placed(), 3);
    // A group offers whichever of its servers fits.
    let placement = place("A,B/X", &servers(&["X,A", "X,B", "A", "C"]));
    assert_eq!(chosen(&placement), [Some(2), Some(1)]);
}

#[test]
fn modes_decide_what_busy_full_and_absent_mean() {
    use Mode::{Loose, Std, Strict};
    use TermOutcome::{Spilled, Unsatisfied, Waits};
    type Change = fn(&mut Candidate);
    let states: [(Cause, Change); 3] = [
        (Cause::Busy, |server| server.busy = true),
        (Cause::Full, |server| server.full = true),
        (Cause::Away, |server| server.maintenance = true),
    ];
    for (cause, set) in states {
        let mut servers = servers(&["A", "B"]);
        set(&mut servers[0]);
        let outcome = |mode| outcomes(&place_with("A", &servers, &[], mode))[0];
        let is_busy = cause == Cause::Busy;
        assert_eq!(
            outcome(Strict),
            if is_busy {
                Waits(cause)
            } else {
                Unsatisfied(cause)
            }
        );
        assert_eq!(
            outcome(Std),
            if is_busy {
                Waits(cause)
            } else {
                Spilled(cause)
            }
        );
        assert_eq!(outcome(Loose), Spilled(cause));
    }
    let servers = servers(&["B"]);
    let absent = |mode| outcomes(&place_with("A", &servers, &[], mode))[0];
    assert_eq!(absent(Strict), Unsatisfied(Cause::NoServer));
    assert_eq!(absent(Std), Spilled(Cause::NoServer));
    assert_eq!(absent(Loose), Spilled(Cause::NoServer));
}

#[test]
fn without_a_free_server_a_spill_waits_for_a_busy_one() {
    let mut all_busy = servers(&["B"]);
    all_busy[0].busy = true;
    for mode in [Mode::Std, Mode::Loose] {
        let placement = place_with("A", &all_busy, &[], mode);
        assert_eq!(outcomes(&placement), [TermOutcome::Waits(Cause::NoServer)]);
        assert!(placement.waits());
    }
    assert_eq!(
        outcomes(&place("A", &[])),
        [TermOutcome::Unsatisfied(Cause::NoServer)]
    );
}

#[test]
fn unusable_and_draining_servers_take_nothing() {
    let mut servers = servers(&["A", "A", "A"]);
    servers[0].usable = false;
    servers[1].draining = true;
    assert_eq!(chosen(&place("2A", &servers)), [Some(2), None]);
    assert_eq!(
        outcomes(&place("2A", &servers))[1],
        TermOutcome::Unsatisfied(Cause::Away)
    );
}

#[test]
fn existing_copies_stay_where_they_fit() {
    let servers = servers(&["A", "A", "B", "A,B"]);
    let placement = place_with("A,B", &servers, &copies(&[4, 2]), Mode::Std);
    assert!(placement.is_satisfied() && placement.terms.iter().all(|term| term.is_existing));
    assert_eq!(chosen(&placement), [Some(1), Some(3)]);
    // Two of three fit; the other is surplus and its replacement new.
    let placement = place_with("A,B,B", &servers, &copies(&[1, 2, 3]), Mode::Std);
    assert_eq!(placement.surplus.len(), 1);
    assert!(placement.is_satisfied());
    assert_eq!(
        placement
            .terms
            .iter()
            .filter(|term| term.is_existing)
            .count(),
        2
    );
}

#[test]
fn a_copy_on_a_full_or_unreachable_server_still_counts() {
    let mut servers = servers(&["A", "A"]);
    servers[0].full = true;
    servers[0].usable = false;
    let placement = place_with("A", &servers, &copies(&[1]), Mode::Std);
    assert_eq!(chosen(&placement), [Some(0)]);
    // But not on a draining one, nor on one that is gone.
    servers[0].draining = true;
    let placement = place_with("A", &servers, &copies(&[1, 77]), Mode::Std);
    assert_eq!(
        (chosen(&placement), placement.surplus),
        (vec![Some(1)], vec![0, 1])
    );
}

#[test]
fn a_wrong_copy_is_the_first_choice_for_a_spill() {
    let servers = servers(&["B", "B", "B"]);
    let placement = place_with("A,A", &servers, &copies(&[3, 2]), Mode::Std);
    assert_eq!(chosen(&placement), [Some(2), Some(1)]);
    assert!(placement.terms.iter().all(|term| term.is_existing));
    let strict = place_with("A,A", &servers, &copies(&[3, 2]), Mode::Strict);
    assert_eq!((strict.placed(), strict.surplus), (0, vec![0, 1]));
}

#[test]
fn parts_stay_in_their_places() {
    let servers = servers(&["S", "S", "H", "H", "S"]);
    let parts = |list: &[(u64, usize)]| -> Vec<Existing> {
        list.iter()
            .map(|(key, term)| Existing {
                server: ServerKey(*key),
                term: Some(*term),
            })
            .collect()
    };
    let placement = place_with(
        "@2+1,S,H",
        &servers,
        &parts(&[(2, 0), (1, 1), (3, 2)]),
        Mode::Std,
    );
    assert_eq!(chosen(&placement), [Some(1), Some(0), Some(2)]);
    // Server 1 holds the parity part: it is no place for a data part, and its part has to move.
    let placement = place_with("@2+1,S,H", &servers, &parts(&[(2, 0), (1, 2)]), Mode::Std);
    assert_eq!(chosen(&placement), [Some(1), Some(4), Some(2)]);
    assert_eq!(placement.surplus, [1]);
}

/// The largest number of terms that servers can satisfy, by trying everything.
fn most_by_force(
    terms: &[&LabelExpr],
    servers: &[Candidate],
    group_of: &dyn Fn(usize) -> usize,
    used: &mut Vec<usize>,
) -> usize {
    let Some((first, rest)) = terms.split_first() else {
        return 0;
    };
    let mut best = most_by_force(rest, servers, group_of, used);
    for (index, server) in servers.iter().enumerate() {
        let is_able = server.usable && !server.busy && !server.full;
        if is_able && first.matches(&server.labels) && !used.contains(&group_of(index)) {
            used.push(group_of(index));
            best = best.max(1 + most_by_force(rest, servers, group_of, used));
            used.pop();
        }
    }
    best
}

fn small_cluster() -> impl Strategy<Value = Vec<Candidate>> {
    let one = (
        prop::sample::select(&["", "A", "B", "C", "A,B", "B,C", "A,X", "B,X", "A,B,Y"][..]),
        0_usize..3,
        0_u8..8,
    );
    prop::collection::vec(one, 0..7).prop_map(|servers| {
        let numbered = servers.into_iter().zip(1..);
        numbered
            .map(|((labels, zone, state), key)| Candidate {
                zone: ["a", "b", "c"].get(zone).map(|zone| (*zone).to_owned()),
                busy: state == 1,
                full: state == 2,
                usable: state != 3,
                ..server(key, labels)
            })
            .collect()
    })
}

proptest! {
    #[test]
    fn as_many_terms_are_matched_as_can_be(
        servers in small_cluster(),
        text in "(A|B|C|\\*|!A|A\\+B)(,(A|B|C|\\*|!A|BC)){0,3}(/\\[ZONE\\]|/XY|)",
        mode in prop::sample::select(&[Mode::Strict, Mode::Std, Mode::Loose][..]),
        held in prop::collection::vec(1_u64..7, 0..3),
    ) {
        let definition: StorageDefinition = text.parse().unwrap();
        let terms = definition.terms(8);
        let matcher = Matcher::new(&terms, definition.uniqueness(), &servers);
        let order = candidate_order(&servers);
        let placement = matcher.place(&order, &[], mode);
        let matched =
            placement.terms.iter().filter(|t| t.outcome == TermOutcome::Matched).count();
        let group_of = |index: usize| matcher.group_of[index];
        let most = most_by_force(&terms, &servers, &group_of, &mut Vec::new());
        prop_assert_eq!(matched, most);

        // With copies that exist as well, no two places share a group, and what is called matched
        // is; the number of matched terms does not fall.
        let with_held = matcher.place(&order, &copies(&held), mode);
        let matched_with =
            with_held.terms.iter().filter(|t| t.outcome == TermOutcome::Matched).count();
        for placement in [&placement, &with_held] {
            let mut groups = Vec::new();
            for (index, term) in placement.terms.iter().enumerate() {
                prop_assert_eq!(
                    term.server.is_some(),
                    matches!(term.outcome, TermOutcome::Matched | TermOutcome::Spilled(_))
                );
                let Some(server) = term.server else { continue };
                prop_assert!(!groups.contains(&group_of(server)));
                groups.push(group_of(server));
                let is_match = terms[index].matches(&servers[server].labels);
                prop_assert!(is_match || matches!(term.outcome, TermOutcome::Spilled(_)));
                let able = !servers[server].busy && !servers[server].full && servers[server].usable;
                prop_assert!(able || term.is_existing);
            }
        }
        prop_assert!(matched_with >= matched);
    }
}
