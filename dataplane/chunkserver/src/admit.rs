//! Overload: what is too much is refused at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Counts what is under way, of all and of each connection.
#[derive(Debug)]
pub(crate) struct Admission {
    state: Mutex<State>,
    requests_max: usize,
    bytes_max: usize,
}

#[derive(Debug, Default)]
struct State {
    total: Usage,
    connections: BTreeMap<u64, Usage>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Usage {
    requests: usize,
    bytes: usize,
}

/// An admitted request. Dropped when it is answered.
#[derive(Debug)]
pub(crate) struct Permit {
    admission: Arc<Admission>,
    connection: u64,
    bytes: usize,
}

impl Admission {
    pub(crate) fn new(requests_max: usize, bytes_max: usize) -> Self {
        Self {
            state: Mutex::default(),
            requests_max,
            bytes_max,
        }
    }

    /// Admits a request, or not when too much is under way. Once half of everything is taken, each
    /// connection gets no more than its share. `peer`: another chunkserver, whose requests stand
    /// for those of many clients.
    pub(crate) fn enter(
        self: &Arc<Self>,
        connection: u64,
        bytes: usize,
        peer: bool,
    ) -> Option<Permit> {
        let mut state = self.state.lock();
        let State { total, connections } = &mut *state;
        // What peers pass on was admitted elsewhere: refusing it wastes what others have done.
        let factor = if peer { 2 } else { 1 };
        let (requests_max, bytes_max) = (self.requests_max * factor, self.bytes_max * factor);
        let fits =
            total.requests < requests_max && (total.bytes + bytes <= bytes_max || total.bytes == 0);
        if !fits {
            return None;
        }
        let crowded = total.requests >= self.requests_max / 2 || total.bytes >= self.bytes_max / 2;
        if crowded && !peer {
            let own = connections.get(&connection).copied().unwrap_or_default();
            let known = connections.contains_key(&connection);
            let sharers = connections.len() + usize::from(!known);
            let within = own.requests < (self.requests_max / sharers).max(1)
                && (own.bytes == 0 || own.bytes + bytes <= self.bytes_max / sharers);
            if !within {
                return None;
            }
        }
        let own = connections.entry(connection).or_default();
        for usage in [own, total] {
            usage.requests += 1;
            usage.bytes += bytes;
        }
        drop(state);
        Some(Permit {
            admission: Arc::clone(self),
            connection,
            bytes,
        })
    }

    /// Requests under way.
    pub(crate) fn requests(&self) -> usize {
        self.state.lock().total.requests
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.admission.state.lock();
        state.total.requests -= 1;
        state.total.bytes -= self.bytes;
        if let Some(own) = state.connections.get_mut(&self.connection) {
            own.requests -= 1;
            own.bytes -= self.bytes;
            if own.requests == 0 {
                state.connections.remove(&self.connection);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_refused_and_room_comes_back() {
        let admission = Arc::new(Admission::new(4, 1000));
        let first = admission.enter(1, 900, false).unwrap();
        assert!(admission.enter(1, 200, false).is_none());
        drop(first);
        let large = admission.enter(1, 5000, false);
        assert!(large.is_some(), "alone, anything goes");
        drop(large);
        let held: Vec<_> = (0..4)
            .map(|n| admission.enter(n, 1, false).unwrap())
            .collect();
        assert!(admission.enter(9, 1, false).is_none());
        assert!(
            admission.enter(9, 1, true).is_some(),
            "a peer has more room"
        );
        drop(held);
        assert_eq!(admission.requests(), 0);
    }

    #[test]
    fn one_connection_cannot_take_everything() {
        let admission = Arc::new(Admission::new(100, 1 << 20));
        let mut held = Vec::new();
        held.push(admission.enter(2, 1, false).unwrap());
        while let Some(permit) = admission.enter(1, 1, false) {
            held.push(permit);
        }
        assert_eq!(admission.requests(), 51, "its share when two ask");
        for _ in 0..40 {
            held.push(admission.enter(2, 1, false).unwrap());
        }
    }
}
