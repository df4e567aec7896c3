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
    /// Locks whose hashes may have fields of readers, or of holders of permits, whose leases are
    /// over. The timer removes these fields part by part, at one lock after the other.
    sweeps: VecDeque<Sweep>,
    /// When the next part may be swept, monotonic, in milliseconds.
    next_sweep: i64,
}

/// A lock whose hash is swept part by part.
#[derive(Debug)]
struct Sweep {
    lock: LockKey,
    /// Whether a field was removed.
    any_removed: bool,
}

/// One part of one lock is swept in this interval. A part takes a millisecond or two.
const SWEPT_EVERY_MS: i64 = 10;

/// At most this many locks are on the list. Another one is added when it gives cause again.
const SWEEPS_MAX: usize = 1000;

impl Agenda {
    pub(crate) fn is_empty(&self) -> bool {
        self.now.is_empty() && self.later.is_empty()
    }

    /// Whether there are no jobs, now or later.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.is_empty() && self.sweeps.is_empty()
    }

    /// Forgets all jobs. Returns the multi-waits that were among them.
    pub(crate) fn clear(&mut self) -> Vec<MultiId> {
        self.sweeps.clear();
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

    /// Adds a lock to sweep.
    pub(crate) fn add_sweep(&mut self, lock: LockRef<'_>) {
        let is_known = self.sweeps.iter().any(|sweep| sweep.lock.as_ref() == lock);
        if !is_known && self.sweeps.len() < SWEEPS_MAX {
            self.sweeps.push_back(Sweep {
                lock: LockKey::from(lock),
                any_removed: false,
            });
        }
    }

    /// When the next part must be swept, monotonic, in milliseconds.
    pub(crate) fn next_sweep(&self) -> Option<i64> {
        (!self.sweeps.is_empty()).then_some(self.next_sweep)
    }

    /// The lock to sweep a part of now.
    pub(crate) fn due_sweep(&self, now: Now) -> Option<&LockKey> {
        let first = self.sweeps.front()?;
        (now.mono_ms >= self.next_sweep).then_some(&first.lock)
    }

    /// A part of the first lock was swept. True if this was its last part, and a field was removed
    /// since the lock came onto the list.
    pub(crate) fn swept(&mut self, any_removed: bool, more: bool, now: Now) -> bool {
        self.next_sweep = now.mono_ms.saturating_add(SWEPT_EVERY_MS);
        if let Some(first) = self.sweeps.front_mut() {
            first.any_removed |= any_removed;
        }
        let done = (!more).then(|| self.sweeps.pop_front()).flatten();
        done.is_some_and(|sweep| sweep.any_removed)
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
