//! Tasks: begun, parked until what they wait for is there, given up.

use std::collections::BTreeSet;
use std::time::Duration;

use hither_proto::ids::{RequestNumber, SessionId};
use hither_proto::status::{Errno, Status};
use smallvec::SmallVec;

use super::event::{Effect, Refusal, Token};
use super::run::{Blocker, Core, Task, TaskId, Work};

impl Core {
    pub(crate) fn spawn(&mut self, work: Work) {
        let task = self.spawn_idle(None, work);
        self.ready.push_back(task);
    }

    pub(crate) fn spawn_idle(&mut self, token: Option<Token>, work: Work) -> TaskId {
        let id = self.next_task;
        self.next_task += 1;
        self.tasks.insert(
            id,
            Task {
                token,
                work,
                waits: 0,
                fresh: SmallVec::new(),
                given_back: Vec::new(),
                behind_writer: false,
            },
        );
        id
    }

    pub(crate) fn park(&mut self, task: TaskId, blockers: Vec<Blocker>) {
        if let Some(parked) = self.tasks.get_mut(&task) {
            parked.waits = blockers.len();
        }
        for blocker in blockers {
            self.waiters.entry(blocker).or_default().push(task);
        }
    }

    /// Everyone who waits for `blocker` waits for one thing less.
    pub(crate) fn wake(&mut self, blocker: &Blocker) {
        for task in self.waiters.remove(blocker).unwrap_or_default() {
            if let Some(parked) = self.tasks.get_mut(&task) {
                parked.waits = parked.waits.saturating_sub(1);
                if parked.waits == 0 {
                    self.ready.push_back(task);
                }
            }
        }
    }

    /// Lets a task of the system run again after a pause.
    pub(crate) fn pause_task(&mut self, task: TaskId) {
        let ends = *self.pause_ends.get_or_insert(self.now + STORE_PAUSE);
        self.effects.push(Effect::WakeAt(ends));
        self.park(task, vec![Blocker::Pause]);
    }

    /// Ends a parked task with a refusal.
    pub(crate) fn drop_task(&mut self, id: TaskId, refusal: &Refusal) {
        let Some(task) = self.tasks.remove(&id) else {
            return;
        };
        if let Work::Request(request) = &task.work
            && let Some(session) = self.sessions.get_mut(&SessionId(request.session))
        {
            session.running.remove(&RequestNumber(request.number));
        }
        if let Some(token) = task.token {
            self.refuse(token, refusal.clone());
        }
    }

    /// Only waits for locks can be given up: everything else is short.
    pub(crate) fn cancel(&mut self, token: Token) {
        let waiting: Vec<TaskId> = self
            .waiters
            .iter()
            .filter(|(blocker, _)| matches!(blocker, Blocker::Lock(_)))
            .flat_map(|(_, tasks)| tasks.iter().copied())
            .filter(|id| {
                self.tasks
                    .get(id)
                    .is_some_and(|task| task.token == Some(token))
            })
            .collect();
        for task in waiting {
            self.drop_task(task, &Refusal::errno(Errno::EINTR));
        }
    }

    /// Nobody is left to be answered: what has not begun to change anything is given up. Its client
    /// asks again over another connection, if it lives.
    pub(crate) fn requesters_gone(&mut self, tokens: &BTreeSet<Token>) {
        let tasks: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(_, task)| task.token.is_some_and(|token| tokens.contains(&token)))
            .map(|(id, _)| *id)
            .collect();
        let refusal = Refusal::status(Status::RETRY, "the connection is gone");
        for task in tasks {
            self.drop_task(task, &refusal);
        }
    }
}

/// Pause before a task of the system tries a failing store again.
const STORE_PAUSE: Duration = Duration::from_millis(500);
