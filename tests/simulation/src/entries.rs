//! While nothing is under way for an owner, the server must count one hold for it in each mode in
//! which it has guards: not less, and not more, since nobody would give back the rest before the
//! lease ends.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use rlock_test::Server;
use tokio::time::Instant;

use crate::judge::{Held, counted, name};
use crate::schedule::{FaultKind, Schedule};
use crate::stops;

/// Compares what the server counts with the guards that there are.
#[derive(Default)]
pub(crate) struct Entries {
    /// None if more goes wrong in this run than that an answer is late: see [`Entries::of`].
    server: Option<Server>,
    locks: u8,
    /// The longest time that work begun last may go on after its caller stopped waiting for it.
    rest: Duration,
    owners: RefCell<BTreeMap<String, Doing>>,
    /// The owners whose lock may be held without a guard.
    kept: RefCell<BTreeSet<String>>,
    /// The owners and locks with a violation reported already.
    wrong: RefCell<BTreeSet<(String, u8)>>,
    /// The number of connections that the clients have opened, if none was broken.
    connections: Cell<u64>,
    /// Somebody does not know whether something was carried out.
    is_unsure: Cell<bool>,
}

/// The work in progress for an owner. Calls whose owner has no name yet count as those of one
/// without a name.
struct Doing {
    under_way: usize,
    since: Instant,
}

/// Somebody works for an owner.
pub(crate) struct Works {
    entries: Rc<Entries>,
    owner: String,
}

impl Entries {
    /// At a single server, or a primary that is not replaced, without leases that end while their
    /// owner has others there, if all that goes wrong are silences which together are shorter than
    /// the time for a reply.
    pub(crate) fn of(schedule: &Schedule, servers: &[Server], locks: u8) -> Self {
        let silence = |kind| match kind {
            FaultKind::Cut { lasts, .. } | FaultKind::Pause(lasts) => Some(lasts),
            FaultKind::CutOne { lasts, arrives, .. } => arrives.then_some(lasts),
            FaultKind::DropCall => Some(Duration::ZERO),
            _ => None,
        };
        let faults = schedule.faults.iter();
        let silences: Option<Duration> = faults.map(|fault| silence(fault.kind)).sum();
        let answers = schedule.latency.saturating_mul(10).saturating_add(SLACK);
        let is_late_at_most = silences
            .is_some_and(|silences| silences.saturating_add(answers) < schedule.response_timeout());
        let is_quiet = is_late_at_most && !stops::are_in(schedule) && !schedule.may_leave();
        let is_one = schedule.servers == 1 && schedule.clustered.is_none();
        let server = servers.first().filter(|_| is_one && is_quiet);
        let rest = silences.unwrap_or_default() + schedule.latency * 20 + REST;
        Self {
            server: server.cloned(),
            locks,
            rest: schedule
                .small
                .map_or(rest, |small| small.rests.saturating_sub(SLACK)),
            ..Self::default()
        }
    }

    /// How long to wait at the end until all must be settled, if it is looked at.
    pub(crate) fn rest(&self) -> Option<Duration> {
        self.server.as_ref().map(|_| self.rest + SLACK)
    }

    /// A client has connected.
    pub(crate) fn connected(&self) {
        let more = self.connections.get().saturating_add(CONNECTIONS);
        self.connections.set(more);
    }

    /// A call, or a release, has ended with the word that it may or may not have been carried out.
    pub(crate) fn is_unsure(&self) {
        self.is_unsure.set(true);
    }

    /// This owner's lock is kept when no guard has it.
    pub(crate) fn is_kept(&self, owner: &str) {
        self.kept.borrow_mut().insert(owner.to_owned());
    }

    /// Work is done for this owner until the returned value is dropped.
    pub(crate) fn works(self: &Rc<Self>, owner: &str) -> Works {
        let works = Works {
            entries: Rc::clone(self),
            owner: owner.to_owned(),
        };
        works.count(|under_way| under_way.saturating_add(1));
        works
    }

    /// Whether entries are counted in this run, and have been until now.
    pub(crate) fn are_counted(&self) -> bool {
        let connections = || self.connections.get();
        let is_whole = |server: &Server| server.stats().connections == connections();
        self.server.as_ref().is_some_and(is_whole) && !self.is_unsure.get()
    }

    /// Where the server counts otherwise than it must.
    pub(crate) fn look(&self, held: &[Rc<Held>]) -> Vec<String> {
        let mut wrong = Vec::new();
        let Some(server) = self.server.as_ref().filter(|_| self.are_counted()) else {
            return wrong;
        };
        for lock in 0..self.locks {
            let name = name(lock);
            for owner in server.holders(&name) {
                let is_of = |held: &&Rc<Held>| held.owner == owner;
                if !self.rests(&owner) || held.iter().filter(is_of).any(|of| is_lost(of)) {
                    continue;
                }
                let here = held.iter().filter(is_of);
                let guards = counted(here.filter(|held| held.locks.contains(&lock)));
                let count = server.count(&name, &owner);
                let is_idle = guards == 0 && count == 1 && self.kept.borrow().contains(&owner);
                let is_wrong = count != guards && !is_idle;
                if is_wrong && self.wrong.borrow_mut().insert((owner.clone(), lock)) {
                    wrong.push(format!(
                        "the server counts {count} of {owner} at {name}, who has {guards} guards"
                    ));
                }
            }
        }
        wrong
    }

    /// Whether nothing of this owner can be under way.
    fn rests(&self, owner: &str) -> bool {
        let owners = self.owners.borrow();
        let doing = owners.get(owner).or_else(|| owners.get(""));
        doing.is_none_or(|doing| doing.under_way == 0 && doing.since.elapsed() > self.rest)
    }
}

fn is_lost(held: &Held) -> bool {
    held.says_held().is_none()
}

impl Works {
    fn count(&self, change: impl Fn(usize) -> usize) {
        let mut owners = self.entries.owners.borrow_mut();
        let since = Instant::now();
        let doing = owners.entry(self.owner.clone());
        let doing = doing.or_insert(Doing {
            under_way: 0,
            since,
        });
        doing.under_way = change(doing.under_way);
        doing.since = since;
    }
}

impl Drop for Works {
    fn drop(&mut self) {
        self.count(|under_way| under_way.saturating_sub(1));
    }
}

/// The number of connections that a client opens at a server.
const CONNECTIONS: u64 = 2;

/// How long a client may take to call a wait back, beside the time that messages are under way.
const REST: Duration = Duration::from_millis(700);

const SLACK: Duration = Duration::from_millis(200);
