//! Memory that the clients of one process share.
//!
//! Half of the bytes are anybody's: one busy mount among many that rest gets all it can use. The
//! other half is divided evenly, so that a mount whose cluster does not answer, and which keeps what
//! it has, stops nobody else. What is kept of names is divided evenly altogether.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Memory that clients share; clones are the same.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Bytes of written and read-ahead data, all clients together.
    data_bytes_max: usize,
    /// Inodes, all clients together.
    inodes_max: usize,
    clients: AtomicUsize,
    data_bytes: AtomicUsize,
    /// Somebody has given some back.
    less: Notify,
}

impl Budget {
    /// Clients that keep about so much memory together, in bytes; less than 16 MiB counts as that.
    #[must_use]
    pub fn of(bytes: usize) -> Self {
        let bytes = bytes.max(BYTES_MIN);
        Self(Arc::new(Shared {
            // The rest is for what is under way: requests, replies, buffers of the kernel's.
            data_bytes_max: bytes / 8 * 3,
            inodes_max: bytes / 4 / INODE_BYTES,
            clients: AtomicUsize::new(0),
            data_bytes: AtomicUsize::new(0),
            less: Notify::new(),
        }))
    }

    fn clients(&self) -> usize {
        self.0.clients.load(Ordering::Acquire).max(1)
    }
}

/// What one client has of a budget.
#[derive(Debug)]
pub(crate) struct Account {
    budget: Option<Budget>,
    /// Written bytes that are kept.
    written: AtomicUsize,
    /// Never notified.
    alone: Notify,
}

impl Account {
    /// Takes part in a budget; without one nothing is bounded here.
    pub(crate) fn of(budget: Option<Budget>) -> Arc<Self> {
        if let Some(Budget(shared)) = &budget {
            shared.clients.fetch_add(1, Ordering::AcqRel);
        }
        Arc::new(Self {
            budget,
            written: AtomicUsize::new(0),
            alone: Notify::new(),
        })
    }

    /// Whether so many more bytes may be written now. A client that keeps nothing may always go on.
    pub(crate) fn takes(&self, bytes: usize) -> bool {
        let Some(budget) = &self.budget else {
            return true;
        };
        let written = self.written.load(Ordering::Acquire);
        let half = budget.0.data_bytes_max / 2;
        let all = budget.0.data_bytes.load(Ordering::Acquire);
        written == 0 || written + bytes <= half / budget.clients() || all + bytes <= half
    }

    /// Memory for reading ahead: only what is anybody's.
    pub(crate) fn lend(self: &Arc<Self>, bytes: usize) -> Option<Loan> {
        if let Some(Budget(shared)) = &self.budget {
            let half = shared.data_bytes_max / 2;
            let room = |all: usize| Some(all + bytes).filter(|all| *all <= half);
            let (set, get) = (Ordering::AcqRel, Ordering::Acquire);
            shared.data_bytes.fetch_update(set, get, room).ok()?;
        }
        Some(Loan {
            account: Arc::clone(self),
            bytes,
        })
    }

    /// Whether others may soon want what this client could do without.
    pub(crate) fn is_short(&self) -> bool {
        self.budget.as_ref().is_some_and(|Budget(shared)| {
            shared.data_bytes.load(Ordering::Acquire) > shared.data_bytes_max / 4
        })
    }

    /// Inodes this client may keep, and no more than `own`.
    pub(crate) fn inodes_max(&self, own: usize) -> usize {
        let share = |budget: &Budget| budget.0.inodes_max / budget.clients();
        self.budget
            .as_ref()
            .map_or(own, |budget| own.min(share(budget)))
    }

    /// Resolves when a client of the budget has given some back after this call.
    pub(crate) fn less(&self) -> Notified<'_> {
        let alone = &self.alone;
        self.budget
            .as_ref()
            .map_or(alone, |budget| &budget.0.less)
            .notified()
    }

    fn use_more(&self, bytes: usize) {
        if let Some(Budget(shared)) = &self.budget {
            shared.data_bytes.fetch_add(bytes, Ordering::AcqRel);
        }
    }

    fn use_less(&self, bytes: usize) {
        if let Some(Budget(shared)) = &self.budget {
            shared.data_bytes.fetch_sub(bytes, Ordering::AcqRel);
            shared.less.notify_waiters();
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let written = *self.written.get_mut();
        self.use_less(written);
        if let Some(Budget(shared)) = &self.budget {
            shared.clients.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Memory that was lent; given back when this goes.
#[derive(Debug)]
pub(crate) struct Loan {
    account: Arc<Account>,
    bytes: usize,
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.account.use_less(self.bytes);
    }
}

/// A number of written bytes that an account counts.
#[derive(Debug)]
pub(crate) struct Gauge {
    value: AtomicUsize,
    account: Arc<Account>,
}

impl Gauge {
    pub(crate) fn new(account: &Arc<Account>) -> Self {
        Self {
            value: AtomicUsize::new(0),
            account: Arc::clone(account),
        }
    }

    pub(crate) fn get(&self) -> usize {
        self.value.load(Ordering::Acquire)
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.value.fetch_add(bytes, Ordering::AcqRel);
        self.account.written.fetch_add(bytes, Ordering::AcqRel);
        self.account.use_more(bytes);
    }

    pub(crate) fn sub(&self, bytes: usize) {
        self.value.fetch_sub(bytes, Ordering::AcqRel);
        self.account.written.fetch_sub(bytes, Ordering::AcqRel);
        self.account.use_less(bytes);
    }
}

/// Least memory of a budget.
const BYTES_MIN: usize = 16 << 20;
/// About what an inode takes with its place in a directory.
const INODE_BYTES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Budgets of 64 MiB: 24 MiB of data, 12 of them anybody's; 16 Ki inodes.
    fn two() -> (Arc<Account>, Arc<Account>) {
        let budget = Budget::of(64 * MIB);
        (Account::of(Some(budget.clone())), Account::of(Some(budget)))
    }

    #[test]
    fn many_clients_keep_no_more_than_the_budget() {
        let budget = Budget::of(64 * MIB);
        let accounts: Vec<_> = (0..50).map(|_| Account::of(Some(budget.clone()))).collect();
        let gauges: Vec<Gauge> = accounts.iter().map(Gauge::new).collect();
        let piece = 64 << 10;
        let mut taken = true;
        while std::mem::take(&mut taken) {
            for (account, gauge) in accounts.iter().zip(&gauges) {
                if account.takes(piece) {
                    gauge.add(piece);
                    taken = true;
                }
            }
        }
        let all: usize = gauges.iter().map(Gauge::get).sum();
        assert!(all <= 24 * MIB, "{all}");
        let inodes: usize = accounts.iter().map(|one| one.inodes_max(200_000)).sum();
        assert!(inodes <= 16 << 10, "{inodes}");
    }

    #[test]
    fn one_that_gives_nothing_back_stops_nobody() {
        let (dead, other) = two();
        let (kept, written) = (Gauge::new(&dead), Gauge::new(&other));
        kept.add(12 * MIB);
        assert!(!dead.takes(1), "all that is anybody's is taken");
        written.add(5 * MIB);
        assert!(other.takes(MIB), "this is its own");
        assert!(!other.takes(2 * MIB));
        assert!(other.lend(1).is_none());
        kept.sub(6 * MIB);
        assert!(other.takes(MIB) && dead.takes(0));
    }

    #[test]
    fn a_client_alone_has_it_all_and_a_client_that_ends_gives_it_back() {
        let (one, two) = two();
        let gauge = Gauge::new(&one);
        gauge.add(12 * MIB);
        assert!(two.lend(MIB).is_none());
        assert_eq!(one.inodes_max(200_000), 8 << 10);
        drop((gauge, one));
        assert_eq!(two.inodes_max(200_000), 16 << 10);
        assert_eq!(two.inodes_max(100), 100);
        let loan = two.lend(12 * MIB);
        assert!(loan.is_some() && two.lend(1).is_none() && two.is_short());
        drop(loan);
        assert!(two.lend(1).is_some() && !two.is_short());
    }

    #[test]
    fn without_a_budget_nothing_is_bounded() {
        let account = Account::of(None);
        let gauge = Gauge::new(&account);
        gauge.add(1 << 40);
        assert!(account.takes(1 << 40) && account.lend(1 << 40).is_some());
        assert_eq!(account.inodes_max(7), 7);
    }
}
