//! The order of a chain around links that are known to be broken.

use hither_proto::ids::ChunkserverId;

use crate::servers::Candidate;

/// From one server to the next; 0 is this mount.
pub(crate) type Link = (ChunkserverId, ChunkserverId);

/// The chain in an order that uses no link known to be broken, if there is one; the wanted order
/// changes as little as possible, and members that are being filled stay behind the others.
pub(crate) fn avoiding(chain: Vec<Candidate>, broken: &[Link]) -> Vec<Candidate> {
    fn extend(
        at: ChunkserverId,
        left: &mut Vec<Candidate>,
        done: &mut Vec<Candidate>,
        broken: &[Link],
    ) -> bool {
        if left.is_empty() {
            return true;
        }
        let in_sync_left = left.iter().any(|candidate| !candidate.filling);
        for n in 0..left.len() {
            let next = left.remove(n);
            let in_turn = !(next.filling && in_sync_left);
            if in_turn && !broken.contains(&(at, next.id)) {
                let id = next.id;
                done.push(next.clone());
                if extend(id, left, done, broken) {
                    return true;
                }
                done.pop();
            }
            left.insert(n, next);
        }
        false
    }
    let mut done = Vec::with_capacity(chain.len());
    let mut left = chain.clone();
    if extend(ChunkserverId(0), &mut left, &mut done, broken) {
        done
    } else {
        chain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detour::Place;

    fn chain(ids: &[u64]) -> Vec<Candidate> {
        ids.iter()
            .map(|id| Candidate {
                id: ChunkserverId(*id),
                address: id.to_string(),
                disk: 0,
                place: Place {
                    farness: (0, 0),
                    last: None,
                },
                filling: *id >= 10,
            })
            .collect()
    }

    fn ids(chain: &[Candidate]) -> Vec<u64> {
        chain.iter().map(|c| c.id.0).collect()
    }

    #[test]
    fn broken_links_are_avoided_and_the_order_kept_otherwise() {
        let link = |from, to| (ChunkserverId(from), ChunkserverId(to));
        assert_eq!(ids(&avoiding(chain(&[1, 2, 3]), &[])), vec![1, 2, 3]);
        assert_eq!(
            ids(&avoiding(chain(&[1, 2, 3]), &[link(1, 2)])),
            vec![1, 3, 2]
        );
        assert_eq!(ids(&avoiding(chain(&[1, 2]), &[link(0, 1)])), vec![2, 1]);
        let none = [link(0, 1), link(2, 1)];
        assert_eq!(
            ids(&avoiding(chain(&[1, 2]), &none)),
            vec![1, 2],
            "no way: as wanted"
        );
        // A member that is being filled (here: from 10 on) is never put before one that is not.
        assert_eq!(ids(&avoiding(chain(&[1, 10]), &[link(1, 10)])), vec![1, 10]);
        let round = avoiding(chain(&[1, 2, 10, 11]), &[link(2, 10), link(10, 11)]);
        assert_eq!(ids(&round), vec![1, 2, 11, 10]);
    }
}
