//! Leftovers at the only server: waiters behind which no call waits, holds without a guard, leases
//! longer than anybody asked for, questions with a known answer.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use rlock_test::{KEEPALIVE, Server};
use tokio::time::Instant;

use crate::judge::{Held, name};
use crate::schedule::{Fault, FaultKind, Schedule};
use crate::stops;

/// An owner at a lock.
type Place = (String, u8);

/// Keeps account of calls, and compares the server's contents with it.
#[derive(Default)]
pub(crate) struct Surplus {
    /// None at several: there it is not known which of them is asked.
    server: Option<Server>,
    /// When all faults are over.
    quiet_from: Option<Instant>,
    /// The longest time until a hold has been renewed, and a little more.
    round: Duration,
    /// Whether the answer to a call, once it is there, is the last word about it.
    is_sound: bool,
    /// Whether owners are there whose processes are dead, or stand still for a while.
    any_silent: bool,
    /// Whether a clock is set back: that draws a lease out, and a release tries for no longer than
    /// the lease should have lasted.
    draws_out: bool,
    locks: u8,
    /// The number of places in queues that the calls under way may have.
    places: Cell<usize>,
    calls: RefCell<BTreeMap<Place, Calls>>,
    granted: RefCell<BTreeMap<String, Granted>>,
    /// For how long the shortest of an owner's holds lasts.
    shortest: RefCell<BTreeMap<Place, Duration>>,
    too_many_since: Cell<Option<Instant>>,
    /// Since when somebody holds a lock without a guard, and whether that may last.
    held_since: RefCell<BTreeMap<(String, u8, bool), Instant>>,
    /// The owners that may keep a lock that nobody uses, and for how long.
    kept: RefCell<BTreeMap<String, Duration>>,
    /// Owners whose last wait for a lock was in the queue.
    queued: RefCell<BTreeMap<(String, String), bool>>,
}

/// An owner's calls for a lock.
#[derive(Clone, Copy)]
struct Calls {
    under_way: usize,
    latest: Instant,
}

/// The leases granted to an owner. A command for several locks asks for the longest lease of all
/// that its owner has there, or is giving back.
#[derive(Clone, Copy)]
struct Granted {
    longest: Duration,
    /// Whether the watchdog renews all of it.
    are_renewed: bool,
}

/// A call under way.
pub(crate) struct UnderWay {
    surplus: Rc<Surplus>,
    owner: String,
    locks: Vec<u8>,
}

impl Surplus {
    pub(crate) fn of(schedule: &Schedule, servers: &[Server], locks: u8) -> Self {
        let is_one = servers.len() == 1;
        let server = servers.first().filter(|_| is_one).cloned();
        let quiet = schedule.faults.iter().map(is_over_at).max();
        let leases = schedule.clients.iter().map(|client| client.lease);
        let answers = schedule
            .clients
            .iter()
            .map(|client| client.response_timeout);
        let sets_back = |fault: &Fault| matches!(fault.kind, FaultKind::StepClock(by) if by < 0);
        let is_kill = |fault: &Fault| matches!(fault.kind, FaultKind::Kill(_));
        Self {
            server,
            quiet_from: Instant::now().checked_add(quiet.unwrap_or_default()),
            round: leases.chain(answers).max().unwrap_or_default() + SLACK,
            is_sound: !schedule.has_faults(),
            any_silent: schedule.faults.iter().any(is_kill) || stops::are_in(schedule),
            draws_out: schedule.faults.iter().any(sets_back),
            locks,
            ..Self::default()
        }
    }

    /// A call of this owner begins; of one that has no name yet if it is its only call.
    pub(crate) fn begins(self: &Rc<Self>, owner: &str, locks: &[u8]) -> UnderWay {
        self.places.set(self.places.get() + locks.len());
        let call = UnderWay {
            surplus: Rc::clone(self),
            owner: owner.to_owned(),
            locks: locks.to_vec(),
        };
        call.count(|calls| calls.under_way += 1);
        call
    }

    pub(crate) fn granted(&self, owner: &str, lease: Duration, is_renewed: bool) {
        let mut granted = self.granted.borrow_mut();
        let granted = granted.entry(owner.to_owned()).or_insert(Granted {
            longest: lease,
            are_renewed: true,
        });
        granted.longest = granted.longest.max(lease);
        granted.are_renewed &= is_renewed;
    }

    /// Its owner may hold a lock for `idle` without a guard, if nobody else wants it.
    pub(crate) fn is_kept(&self, owner: &str, idle: Duration) {
        let mut kept = self.kept.borrow_mut();
        kept.insert(owner.to_owned(), idle);
    }

    /// How long a guard lasts whose call says `lasts`: no longer than earlier guards of its owner
    /// there, which may not be given back yet.
    pub(crate) fn shortest(&self, owner: &str, locks: &[u8], lasts: Duration) -> Duration {
        let mut shortest = self.shortest.borrow_mut();
        let each = locks.iter().map(|lock| {
            let place = shortest.entry((owner.to_owned(), *lock));
            let shortest = place.or_insert(lasts);
            *shortest = lasts.min(*shortest);
            *shortest
        });
        each.min().unwrap_or(lasts)
    }

    /// Leftovers at the server; `shares` says whether an owner has several calls.
    pub(crate) fn look(&self, held: &[Rc<Held>], shares: impl Fn(&str) -> bool) -> Vec<String> {
        let Some(server) = self.server.as_ref().filter(|server| server.is_running()) else {
            return Vec::new();
        };
        let mut wrong: Vec<_> = self.longer_leases(server, held).collect();
        wrong.extend(self.waits_for_nobody(server));
        wrong.extend(self.held_for_nobody(server, held, shares));
        wrong
    }

    /// Whether it has been so for so long that nothing can be under way that ends it.
    fn lasts(&self, since: Instant) -> bool {
        let quiet = self.quiet_from.map_or(since, |quiet| quiet.max(since));
        quiet.elapsed() > LASTING
    }

    fn waits_for_nobody(&self, server: &Server) -> Option<String> {
        let (waiters, calls) = (server.waiters(), self.places.get());
        if waiters <= calls || self.any_silent {
            self.too_many_since.set(None);
            return None;
        }
        let since = self.too_many_since.get().unwrap_or_else(Instant::now);
        self.too_many_since.set(Some(since));
        let lasts = self.lasts(since);
        lasts.then(|| format!("{waiters} wait in queues, and {calls} are waited for"))
    }

    /// An owner of several calls may have to leave something until its lease ends: a release could
    /// take what another call has.
    fn held_for_nobody(
        &self,
        server: &Server,
        held: &[Rc<Held>],
        shares: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        if self.any_silent || self.draws_out {
            return wrong;
        }
        let mut held_since = self.held_since.borrow_mut();
        let before = std::mem::take(&mut *held_since);
        for lock in 0..self.locks {
            for owner in server.holders(&name(lock)) {
                let has = |held: &&Rc<Held>| held.owner == owner && held.locks.contains(&lock);
                if shares(&owner) || held.iter().any(|held| has(&held)) {
                    continue;
                }
                let idle = self.kept.borrow().get(&owner).copied();
                // A kept lock may be there for longer while nobody waits for it.
                let idle = idle.filter(|_| server.waiting(&name(lock)) == 0);
                let place = (owner, lock, idle.is_some());
                let since = before.get(&place).copied().unwrap_or_else(Instant::now);
                if self.lasts(since) && since.elapsed() > idle.unwrap_or_default() + LASTING {
                    let (owner, lock) = (&place.0, name(lock));
                    wrong.push(format!("{owner} holds {lock}, and nobody has a guard"));
                }
                held_since.insert(place, since);
            }
        }
        wrong
    }

    /// A request that was refused must not make the lease of a hold longer.
    fn longer_leases(&self, server: &Server, held: &[Rc<Held>]) -> impl Iterator<Item = String> {
        // Of readers the server tells only the longest.
        let is_alone = |held: &&Rc<Held>| self.is_sound && held.says_held() == Some(true);
        let places = held.iter().filter(is_alone).flat_map(|held| {
            let locks = held.locks.iter();
            locks.map(|lock| (held.owner.clone(), *lock))
        });
        places.filter_map(move |place| {
            let granted = *self.granted.borrow().get(&place.0)?;
            let calls = *self.calls.borrow().get(&place)?;
            let is_settled = calls.under_way == 0 && calls.latest.elapsed() > self.round;
            let left = server.lease_left(&name(place.1))?;
            let is_longer = left > granted.longest + Duration::from_millis(1);
            (is_settled && granted.are_renewed && is_longer).then(|| {
                let (longest, lock) = (granted.longest, name(place.1));
                let owner = &place.0;
                format!("{owner} holds {lock} for {left:?} more, and asked for {longest:?}")
            })
        })
    }

    /// Listens to the commands to the server, in a run in which no call may ask about a grant that
    /// it waited for: see [`Schedule::is_brief`].
    pub(crate) fn hears(&self, said: &str) -> Option<String> {
        let mut words = said.split(' ').skip(1);
        let command = words.next()?;
        let place = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut queued = self.queued.borrow_mut();
        match command {
            "RLOCK.ACQUIRE" => {
                queued.insert(place, said.contains("-> [-1"));
            }
            "RLOCK.RENEW" if queued.get(&place) == Some(&true) => {
                let (lock, owner) = &place;
                return Some(format!(
                    "{owner} was granted {lock}, and asks whether it holds it"
                ));
            }
            _ => {}
        }
        None
    }
}

impl UnderWay {
    fn count(&self, change: impl Fn(&mut Calls)) {
        let mut calls = self.surplus.calls.borrow_mut();
        for lock in &self.locks {
            let calls = calls.entry((self.owner.clone(), *lock));
            let calls = calls.or_insert(Calls {
                under_way: 0,
                latest: Instant::now(),
            });
            change(calls);
            calls.latest = Instant::now();
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let places = self.surplus.places.get().saturating_sub(self.locks.len());
        self.surplus.places.set(places);
        self.count(|calls| calls.under_way = calls.under_way.saturating_sub(1));
    }
}

pub(crate) fn is_over_at(fault: &Fault) -> Duration {
    let lasts = match fault.kind {
        FaultKind::Cut { lasts, .. }
        | FaultKind::CutOne { lasts, .. }
        | FaultKind::StandStill { lasts, .. }
        | FaultKind::Pause(lasts)
        | FaultKind::Crash { lasts, .. } => lasts,
        FaultKind::HalfOpen { .. } => KEEPALIVE,
        _ => Duration::ZERO,
    };
    fault.at.saturating_add(lasts)
}

/// The time that a leftover may be there until the client has undone it.
const LASTING: Duration = Duration::from_secs(12);

const SLACK: Duration = Duration::from_secs(1);
