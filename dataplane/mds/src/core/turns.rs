//! Who is served first when a file was given back: a session that has mapped pages from before, and
//! asks for the exclusive lease to store them. What others write then is newer, and lies over them.

use std::time::Duration;

use hither_proto::ids::{InodeId, SessionId};

use super::event::Effect;
use super::run::{Blocker, Core, Stop};

/// A turn that is kept for a session until then.
#[derive(Debug)]
pub(crate) struct Turn {
    until: Duration,
    ino: InodeId,
    session: SessionId,
}

impl Core {
    /// The session comes first: until it has the exclusive lease, or for so long.
    pub(crate) fn keep_turn(&mut self, ino: InodeId, session: SessionId) {
        let leases = self.leases.of_mut(ino);
        if leases.pages.contains(&session) {
            return;
        }
        leases.pages.push(session);
        let until = self.now + TURN;
        self.turns.push_back(Turn {
            until,
            ino,
            session,
        });
        self.effects.push(Effect::WakeAt(until));
    }

    /// Others wait while a turn is kept.
    pub(crate) fn need_turn(&self, session: SessionId, ino: InodeId) -> Result<(), Stop> {
        let pages = self.leases.of(ino).map(|leases| &leases.pages);
        match pages {
            Some(pages) if !pages.is_empty() && !pages.contains(&session) => {
                Err(Stop::Block(Blocker::Inode(ino)))
            }
            _ => Ok(()),
        }
    }

    /// The session has had its turn.
    pub(crate) fn end_turn(&mut self, ino: InodeId, session: SessionId) {
        let kept = self
            .leases
            .of(ino)
            .is_some_and(|leases| leases.pages.contains(&session));
        if kept {
            // Its time must not end another turn that is kept later.
            self.turns
                .retain(|turn| (turn.ino, turn.session) != (ino, session));
            let leases = self.leases.of_mut(ino);
            leases.pages.retain(|other| *other != session);
            self.leases.prune(ino);
            self.wake(&Blocker::Inode(ino));
        }
    }

    /// Turns that nobody took end.
    pub(crate) fn expire_turns(&mut self) {
        while self
            .turns
            .front()
            .is_some_and(|turn| turn.until <= self.now)
            && let Some(turn) = self.turns.pop_front()
        {
            self.end_turn(turn.ino, turn.session);
            // Also where nobody knows the file any more.
            self.wake(&Blocker::Inode(turn.ino));
        }
    }
}

/// How long a turn is kept: far longer than a request is on its way that was sent with the answer.
const TURN: Duration = Duration::from_secs(1);
