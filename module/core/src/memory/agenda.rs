//! The list of jobs: those of the present turn, and those that run outside of any command.

use crate::values::ids::{MultiId, RecordId};
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::time::Now;
use std::collections::VecDeque;

/// A job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    /// The queue of a lock: its first waiter may be able to get the lock.
    Queue(RecordId),
    /// A multi-wait: it may be able to get all its locks.
    Multi(MultiId),
}

/// The one list of jobs.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    /// Jobs that the decisions of this turn have made possible. They are decided before the turn is
    /// over, so that no other command comes between.
    now: VecDeque<Job>,
    /// Locks whose keys may have changed, or at which a hold must end.
    later: VecDeque<Job>,
    /// A lock from whose hash the fields of holders whose leases are over must be removed.
    sweep: Option<LockKey>,
    /// Read-write locks with more readers than one decision may look at. The fields of readers
    /// whose leases are over are removed from their hashes part by part.
    crowded: VecDeque<Crowded>,
    /// When the next part may be swept, monotonic, in milliseconds.
    next_clearing: i64,
    /// How many writers' tokens must be checked, and the last one that was.
    writers_to_check: usize,
    last_writer: Option<(i64, RecordId)>,
}

/// A read-write lock whose readers are checked part by part.
#[derive(Debug)]
struct Crowded {
    lock: LockKey,
    /// Whether a field was removed.
    any_gone: bool,
}

/// One part of one crowded lock is swept in this interval. A part takes a millisecond or two.
const CLEARED_EVERY_MS: i64 = 10;

/// At most this many crowded locks are on the list. Another one is added when it is read again.
const CROWDED_MAX: usize = 1000;

impl Agenda {
    pub(crate) fn is_empty(&self) -> bool {
        self.now.is_empty() && self.later.is_empty()
    }

    /// Whether there are no jobs, now or later.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.is_empty() && self.is_idle() && self.crowded.is_empty()
    }

    /// Whether this turn has nothing to do beside its command.
    pub(crate) fn is_idle(&self) -> bool {
        self.now.is_empty() && self.sweep.is_none() && self.writers_to_check == 0
    }

    /// Forgets all jobs. Returns the multi-waits that were among them.
    pub(crate) fn clear(&mut self) -> Vec<MultiId> {
        self.crowded.clear();
        let jobs = self.now.drain(..).chain(self.later.drain(..));
        let multi = |job| match job {
            Job::Multi(multi) => Some(multi),
            Job::Queue(_) => None,
        };
        jobs.filter_map(multi).collect()
    }

    pub(crate) fn add_now(&mut self, job: Job) {
        self.now.push_back(job);
    }

    pub(crate) fn add_later(&mut self, id: RecordId) {
        self.later.push_back(Job::Queue(id));
    }

    pub(crate) fn first_now(&self) -> Option<Job> {
        self.now.front().copied()
    }

    pub(crate) fn pop_now(&mut self) {
        self.now.pop_front();
    }

    pub(crate) fn add_sweep(&mut self, lock: LockRef<'_>) {
        self.sweep = Some(LockKey::from(lock));
    }

    pub(crate) fn sweep(&self) -> Option<&LockKey> {
        self.sweep.as_ref()
    }

    pub(crate) fn swept(&mut self) {
        self.sweep = None;
    }

    /// Adds a lock with more readers than one decision may look at.
    pub(crate) fn add_crowded(&mut self, lock: LockKey) {
        let is_known = self.crowded.iter().any(|crowded| crowded.lock == lock);
        if !is_known && self.crowded.len() < CROWDED_MAX {
            let any_gone = false;
            self.crowded.push_back(Crowded { lock, any_gone });
        }
    }

    /// When the next crowded lock must be swept, monotonic, in milliseconds.
    pub(crate) fn next_clearing(&self) -> Option<i64> {
        (!self.crowded.is_empty()).then_some(self.next_clearing)
    }

    /// The crowded lock that must be swept now.
    pub(crate) fn crowded(&self, now: Now) -> Option<&LockKey> {
        let first = self.crowded.front()?;
        (now.mono_ms >= self.next_clearing).then_some(&first.lock)
    }

    /// A part of a lock's readers was checked. True if the lock is crowded, this was its last part,
    /// and a field was removed since the lock came onto the list.
    pub(crate) fn cleared(&mut self, lock: &LockKey, any_gone: bool, more: bool, now: Now) -> bool {
        let place = self.crowded.iter().position(|of| of.lock == *lock);
        let Some(mut crowded) = place.and_then(|place| self.crowded.remove(place)) else {
            return false;
        };
        self.next_clearing = now.mono_ms.saturating_add(CLEARED_EVERY_MS);
        crowded.any_gone |= any_gone;
        if !more {
            return crowded.any_gone;
        }
        self.crowded.push_back(crowded);
        false
    }

    /// A writer has begun: two tokens of other writers, whose holds may have ended, must be
    /// checked.
    pub(crate) fn check_writers(&mut self) {
        self.writers_to_check = 2;
    }

    /// Whether a writer's token must be checked: the one after the last that was.
    pub(crate) fn has_writer_to_check(&self) -> bool {
        self.writers_to_check > 0
    }

    pub(crate) fn last_writer(&self) -> Option<(i64, RecordId)> {
        self.last_writer
    }

    pub(crate) fn writer_begun(&mut self, writer: Option<(i64, RecordId)>) {
        self.writers_to_check = self.writers_to_check.saturating_sub(1);
        self.last_writer = writer;
    }

    pub(crate) fn writers_checked(&mut self) {
        self.writers_to_check = 0;
    }

    /// The turn stops: its budget is used, or its readings were out of date too often. The rest
    /// goes behind the jobs that the timer has already, so that a lock with many jobs does not
    /// delay the others.
    pub(crate) fn put_off(&mut self) {
        self.later.append(&mut self.now);
    }

    /// Makes the first of the later jobs a job of this turn. Whether there was one.
    pub(crate) fn begin_later(&mut self) -> bool {
        let first = self.later.pop_front();
        self.now.extend(first);
        first.is_some()
    }
}

#[cfg(debug_assertions)]
impl Agenda {
    /// How often a job is on the list.
    pub(crate) fn count(&self, job: Job) -> usize {
        let jobs = self.now.iter().chain(&self.later);
        jobs.filter(|of| **of == job).count()
    }
}
