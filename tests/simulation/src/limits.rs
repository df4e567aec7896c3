//! The limits that may have counted at a semaphore, by the replies to those who set them, and the
//! consequences.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::Instant;

use crate::judge::name;
use crate::permits::Asked;
use crate::schedule::{FaultKind, Schedule, Step};
use crate::stops::steps;

/// The limits that were set for all, of each semaphore, and the calls that wait there.
pub(crate) struct Limits {
    set: RefCell<BTreeMap<u8, Vec<Set>>>,
    /// Whether a server may come to have an earlier one again.
    forgets: bool,
    /// Whether a clock is set back: leases that had ended, and whose permits were granted again,
    /// go on then where their fields have not been cleared away.
    revives: bool,
    begun: Instant,
    /// The largest limit that a call names, of each semaphore of this run.
    named: BTreeMap<u8, u32>,
    /// Calls that wait, by number.
    waits: RefCell<BTreeMap<u64, Wait>>,
    last: Cell<u64>,
    /// Since when all waiters would find room, at each semaphore.
    fit_since: RefCell<BTreeMap<u8, Instant>>,
    /// A grant may take this long to reach the call that waits for it.
    unheard: Duration,
}

/// A limit that was set, or none.
#[derive(Clone, Copy)]
struct Set {
    limit: Option<u32>,
    begun: Instant,
    /// When it was known to be set.
    known: Option<Instant>,
    /// When another was known to be set that was begun when this one was known.
    over: Option<Instant>,
}

/// Permits that somebody has.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    pub(crate) lock: u8,
    pub(crate) permits: u32,
    /// The most permits that may have been out when these were granted, these among them.
    pub(crate) limit: u32,
    pub(crate) token: u64,
}

/// A call that waits for permits.
#[derive(Clone, Copy)]
struct Wait {
    lock: u8,
    asked: Asked,
    since: Instant,
}

/// It waits until this is dropped.
pub(crate) struct Waiting {
    limits: Rc<Limits>,
    number: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.limits.waits.borrow_mut().remove(&self.number);
    }
}

impl Limits {
    pub(crate) fn of(schedule: &Schedule) -> Self {
        let forgets = |kind| match kind {
            FaultKind::Crash { loses_keys, .. } => loses_keys,
            FaultKind::Flush | FaultKind::Failover(_) | FaultKind::Replace(_) => true,
            _ => false,
        };
        let revives = |kind| matches!(kind, FaultKind::StepClock(by) if by < 0);
        let mut named = BTreeMap::new();
        let asks = |step: &Step| step.locks.first().copied().zip(step.asked);
        for (lock, asked) in steps(schedule).into_iter().filter_map(asks) {
            let most = named.entry(lock).or_default();
            *most = asked.limit.unwrap_or_default().max(*most);
        }
        Self {
            set: RefCell::default(),
            forgets: schedule.faults.iter().any(|fault| forgets(fault.kind)),
            revives: schedule.faults.iter().any(|fault| revives(fault.kind)),
            begun: Instant::now(),
            named,
            waits: RefCell::default(),
            last: Cell::default(),
            fit_since: RefCell::default(),
            unheard: schedule.latency.saturating_mul(10).saturating_add(UNHEARD),
        }
    }

    /// The semaphores of this run.
    pub(crate) fn semaphores(&self) -> impl Iterator<Item = u8> {
        self.named.keys().copied()
    }

    // --- What may have counted -------------------------------------------------------------------

    /// Somebody sets a limit: its number.
    pub(crate) fn sets(&self, lock: u8, limit: Option<u32>) -> usize {
        let mut set = self.set.borrow_mut();
        let all = set.entry(lock).or_insert_with(|| vec![self.none()]);
        all.push(Set {
            limit,
            begun: Instant::now(),
            known: None,
            over: None,
        });
        all.len() - 1
    }

    /// It is set, in the place of this one. Whether that one may have counted.
    pub(crate) fn is_set(&self, lock: u8, number: usize, before: Option<u32>) -> bool {
        let mut set = self.set.borrow_mut();
        let Some(all) = set.get_mut(&lock) else {
            return false;
        };
        let begun = all[number].begun;
        let mut may_be = false;
        for (other, set) in all.iter_mut().enumerate() {
            if other == number {
                set.known = Some(Instant::now());
                continue;
            }
            may_be |= set.limit == before && (self.forgets || set.may_count(begun));
            if set.known.is_some_and(|known| known <= begun) {
                set.over.get_or_insert_with(Instant::now);
            }
        }
        may_be
    }

    /// The largest limit that may have counted for this caller since then.
    pub(crate) fn most(&self, lock: u8, asked: Asked, since: Instant) -> u32 {
        let limits = self.possible(lock, since).into_iter();
        let counts = limits.filter_map(|limit| limit.or(asked.limit));
        counts.max().unwrap_or_default()
    }

    /// The smallest; 0 if there may have been none.
    pub(crate) fn least(&self, lock: u8, asked: Asked, since: Instant) -> u32 {
        let limits = self.possible(lock, since).into_iter();
        let counts = limits.map(|limit| limit.or(asked.limit).unwrap_or_default());
        counts.min().unwrap_or_default()
    }

    fn possible(&self, lock: u8, since: Instant) -> Vec<Option<u32>> {
        let set = self.set.borrow();
        let none = [self.none()];
        let all = set.get(&lock).map_or(&none[..], Vec::as_slice);
        let counts = |set: &&Set| self.forgets || set.may_count(since);
        all.iter().filter(counts).map(|set| set.limit).collect()
    }

    /// The limit in force at first: none.
    fn none(&self) -> Set {
        Set {
            limit: None,
            begun: self.begun,
            known: Some(self.begun),
            over: None,
        }
    }

    // --- What must be so -------------------------------------------------------------------------

    /// No more are out at a server than any limit allows that has counted.
    pub(crate) fn is_kept_at(&self, lock: u8, out: u64) -> Option<String> {
        let limit = self.named.get(&lock).copied();
        let most = self.most(lock, Asked { permits: 1, limit }, self.begun);
        (out > most.into() && !self.revives).then(|| {
            format!(
                "{out} permits of {} are out, and {most} may be at most",
                name(lock)
            )
        })
    }

    /// A call waits for permits, or tries to get them.
    pub(crate) fn waits(self: &Rc<Self>, lock: u8, asked: Asked) -> Waiting {
        let number = self.last.get() + 1;
        self.last.set(number);
        let since = Instant::now();
        let wait = Wait { lock, asked, since };
        self.waits.borrow_mut().insert(number, wait);
        let limits = Rc::clone(self);
        Waiting { limits, number }
    }

    /// Where there is room for all waiters, they do not wait.
    pub(crate) fn nobody_waits_for_free_ones(&self, lock: u8, out: u64) -> Option<String> {
        let waits = self.waits.borrow();
        let here = || waits.values().filter(|wait| wait.lock == lock);
        let all = out
            + here()
                .map(|wait| u64::from(wait.asked.permits))
                .sum::<u64>();
        let now = Instant::now();
        let finds_room = |wait: &Wait| all <= self.least(lock, wait.asked, now).into();
        let mut fit_since = self.fit_since.borrow_mut();
        if !here().all(finds_room) {
            fit_since.remove(&lock);
            return None;
        }
        let since = *fit_since.entry(lock).or_insert(now);
        let longest = here().map(|wait| wait.since.max(since).elapsed()).max();
        let longest = longest.filter(|longest| *longest > self.unheard)?;
        let lock = name(lock);
        Some(format!(
            "a call waits for permits of {lock}, for which there was room for {longest:?}"
        ))
    }
}

impl Set {
    /// Whether it may have counted since then.
    fn may_count(&self, since: Instant) -> bool {
        self.over.is_none_or(|over| over >= since)
    }
}

/// No grant took the permits that are out above its limit.
pub(crate) fn are_kept(shares: &[Share], has_order: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for own in shares {
        // Where tokens tell nothing: of those with a limit so low the last was granted beside
        // all the others.
        let is_before = |other: &&Share| {
            let is_before = if has_order {
                other.token <= own.token
            } else {
                other.limit <= own.limit
            };
            is_before && other.lock == own.lock
        };
        let out: u32 = shares.iter().filter(is_before).map(|of| of.permits).sum();
        if out > own.limit {
            let Share {
                token, limit, lock, ..
            } = own;
            let lock = name(*lock);
            wrong.push(format!(
                "with token {token} {out} permits of {lock} are out, and {limit} may be"
            ));
        }
    }
    wrong
}

/// Timers may be off by this much, and a busy server may act this late.
const UNHEARD: Duration = Duration::from_millis(300);
