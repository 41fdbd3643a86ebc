//! Labels of chunkservers: what they say of themselves, and changes by hand.

use hither_labels::{Label, LabelSet, WordLabel};
use hither_proto::ids::ChunkserverId;

use crate::state::{ServerState, State};

/// Labels are changed by hand: `+A`, `-B`, `key=value`, `-key`.
///
/// # Errors
/// What is wrong with a change, and how it is written; that a label says where the server is.
pub fn labels_changed(
    state: &State,
    id: ChunkserverId,
    changes: &[String],
) -> Result<State, String> {
    let mut next = state.clone();
    let server = next
        .servers
        .get_mut(&id)
        .ok_or_else(|| format!("there is no chunkserver {id}"))?;
    for change in changes {
        check_change(change)?;
        check_place(server, id, change)?;
        let about = |text: &str| subject(text).to_owned();
        server
            .manual_labels
            .retain(|old| about(old) != about(change));
        if !places(server).any(|word| word.key() == about(change)) {
            server.manual_labels.push(change.clone());
        }
    }
    show_labels(server);
    Ok(next)
}

/// Where a server says it is, as words.
fn places(server: &ServerState) -> impl Iterator<Item = WordLabel> {
    let place = [
        ("zone", &server.shown.zone),
        ("region", &server.shown.region),
        ("node", &server.shown.node),
    ];
    place
        .into_iter()
        .filter(|(_, name)| !name.is_empty())
        .filter_map(|(key, name)| WordLabel::from_name(key, name).ok())
}

/// Where a server is it says itself: a label that said otherwise would put copies into zones they
/// are not in. What it says already may be repeated, which ends an older change by hand.
fn check_place(server: &ServerState, id: ChunkserverId, change: &str) -> Result<(), String> {
    let key = subject(change);
    let Some(word) = places(server).find(|word| word.key() == key) else {
        return Ok(());
    };
    let own = Label::Word(word).to_string();
    if change.trim_start_matches('+') == own {
        return Ok(());
    }
    Err(format!(
        "chunkserver {id} says itself that it is in {own}: start it with another {key} (--{key}) \
         instead of {change:?}"
    ))
}

/// The effective labels: the server's own, its zone, region and node, then changes by hand.
pub(super) fn show_labels(server: &mut ServerState) {
    let mut set = LabelSet::default();
    for text in &server.own_labels {
        add(&mut set, text);
    }
    for word in places(server) {
        if set.value(word.key()).is_none() {
            // A set beyond its bound keeps what fits.
            let _ = set.insert(Label::Word(word));
        }
    }
    for change in &server.manual_labels {
        apply(&mut set, change);
    }
    server.shown.labels = set.iter().map(|label| label.to_string()).collect();
}

fn add(set: &mut LabelSet, text: &str) {
    match text.parse::<Label>() {
        Ok(label) => {
            // A set beyond its bound keeps what fits.
            let _ = set.insert(label);
        }
        Err(error) => tracing::warn!(label = text, %error, "a chunkserver's label is left out"),
    }
}

fn apply(set: &mut LabelSet, change: &str) {
    if let Some(name) = change.strip_prefix('-') {
        let gone: Vec<Label> = set
            .iter()
            .filter(|label| match label {
                Label::Letter(_) => label.to_string().eq_ignore_ascii_case(name),
                Label::Word(word) => word.key() == name || label.to_string() == name,
            })
            .collect();
        for label in gone {
            set.remove(&label);
        }
        return;
    }
    match change.strip_prefix('+').unwrap_or(change).parse::<Label>() {
        Ok(Label::Word(word)) => {
            // The bound was checked when the change was made.
            let _ = set.replace_word(word);
        }
        Ok(letter) => {
            let _ = set.insert(letter);
        }
        Err(_) => {}
    }
}

fn check_change(change: &str) -> Result<(), String> {
    if let Some(name) = change.strip_prefix('-') {
        let sound = !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic());
        return if sound {
            Ok(())
        } else {
            Err(format!("{change:?} removes nothing: write -A or -key"))
        };
    }
    let text = change.strip_prefix('+').unwrap_or(change);
    text.parse::<Label>().map(|_| ()).map_err(|e| {
        format!("{change:?} is no label change (write +A, -A, key=value or -key): {e}")
    })
}

/// What a change is about: a letter or a key.
fn subject(change: &str) -> &str {
    let name = change.trim_start_matches(['+', '-']);
    name.split('=').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use hither_proto::map::Chunkserver;

    use super::*;

    fn with_server() -> State {
        let mut state = State::default();
        let mut server = ServerState {
            shown: Chunkserver {
                id: 1,
                zone: "eu-1a".into(),
                node: "n1".into(),
                ..Chunkserver::default()
            },
            own_labels: vec!["S".into()],
            ..ServerState::default()
        };
        show_labels(&mut server);
        state.servers.insert(ID, server);
        state
    }

    fn changed(state: &State, changes: &[&str]) -> Result<State, String> {
        let changes: Vec<String> = changes.iter().map(|&c| c.to_owned()).collect();
        labels_changed(state, ID, &changes)
    }

    fn shown(state: &State) -> &[String] {
        &state.servers[&ID].shown.labels
    }

    #[test]
    fn labels_by_hand_win_over_the_servers_own_and_last() {
        let state = with_server();
        let place = ["node=n1", "zone=eu-1a"];
        let state = changed(&state, &["+A", "-s", "region=eu"]).unwrap();
        assert_eq!(shown(&state), ["A", place[0], "region=eu", place[1]]);
        let state = changed(&state, &["+S", "-region"]).unwrap();
        assert_eq!(shown(&state), ["A", "S", place[0], place[1]]);
        assert!(changed(&state, &["Zone=x"]).is_err());
        assert!(labels_changed(&state, ChunkserverId(9), &[]).is_err());
    }

    /// `cs label 1 zone=b` put copies of zone b into zone c.
    #[test]
    fn where_a_server_is_it_says_itself() {
        let state = with_server();
        for change in ["zone=eu-9", "+zone=eu-9", "-zone", "-zone=eu-1a", "-node"] {
            let refused = changed(&state, &["+A", change]).unwrap_err();
            assert!(refused.contains("chunkserver 1 says itself"), "{refused}");
        }
        // A cluster that took such a change before gets rid of it.
        let mut old = state.clone();
        let server = old.servers.get_mut(&ID).unwrap();
        server.manual_labels = vec!["zone=eu-9".into()];
        show_labels(server);
        assert!(shown(&old).contains(&"zone=eu-9".to_owned()));
        let undone = changed(&old, &["zone=eu-1a"]).unwrap();
        assert_eq!(undone, state);
    }

    const ID: ChunkserverId = ChunkserverId(1);
}
