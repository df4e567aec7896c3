//! The invariants of all state between two calls. Tests assert them after each step.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::panic,
    reason = "only tests run it"
)]

use crate::memory::agenda::Job;
use crate::memory::hold::HoldIndex;
use crate::memory::state::Locks;
use crate::values::ids::{HoldId, RecordId};

impl Locks {
    /// Asserts everything that must be true between two calls.
    ///
    /// # Panics
    /// Something is not true.
    pub fn assert_invariants(&self) {
        self.table.check();
        self.table.check_ages(&self.holds);
        self.sessions.check();
        let holds = self.holds.all();
        self.holds.check();
        for id in &holds {
            self.check_hold(*id);
        }
        let records = self.table.in_database(None);
        let indexed = records.iter().filter_map(|id| self.table.holds(*id));
        let indexed: usize = indexed.map(|index| HoldIndex::all(index).len()).sum();
        let (waits, of_sessions) = self.sessions.counts();
        assert_eq!((indexed, of_sessions), (holds.len(), holds.len()), "holds");
        let mut mains = 0;
        for (id, waiter) in self.table.each_waiter() {
            let main = self.main_waiter(id).unwrap_or_else(|| panic!("{waiter:?}"));
            let of_session = waiter.session.filter(|_| main == id);
            let is_its = of_session.is_none_or(|session| self.sessions.has_waiter(session, id));
            assert!(is_its, "not its session's: {waiter:?}");
            mains += usize::from(of_session.is_some());
        }
        assert_eq!(waits, mains, "waits of sessions");
        self.check_multis();
        for id in records {
            self.check_jobs(id);
            self.check_dirty_holds(id);
        }
    }

    /// If all holds of a lock are said to be marked, they are.
    fn check_dirty_holds(&self, id: RecordId) {
        let holds = self
            .table
            .holds(id)
            .filter(|_| self.table.says_holds_are_dirty(id));
        let mut holds = holds.into_iter().flat_map(HoldIndex::all);
        let is_dirty = |id| self.holds.get(id).is_some_and(|hold| hold.dirty);
        assert!(holds.all(is_dirty), "not all are dirty");
    }

    fn check_hold(&self, id: HoldId) {
        let hold = self.holds.get(id).unwrap_or_else(|| panic!("{id:?}"));
        let record = self.table.find(hold.lock.as_ref());
        assert_eq!(record, Some(hold.record), "{hold:?}");
        let index = self.table.holds(hold.record);
        let found = index.and_then(|index| index.find(&hold.owner, hold.mode));
        assert_eq!(found, Some(id), "not in its lock's index: {hold:?}");
        assert!(self.sessions.has_hold(hold.session, id), "{hold:?}");
    }

    fn check_multis(&self) {
        for (id, multi) in self.multis.iter() {
            let (locks, waiters) = (&multi.locks, &multi.waiters);
            assert_eq!(locks.len(), waiters.len(), "{id:?}");
            for (lock, waiter) in locks.iter().zip(waiters) {
                assert_eq!(self.lock_of(*waiter).as_ref(), Some(lock), "{id:?}");
                let named = self.table.get(*waiter).and_then(|waiter| waiter.multi);
                assert_eq!(named, Some(id), "{waiter:?}");
            }
            let jobs = self.agenda.count(Job::Multi(id));
            assert_eq!(usize::from(multi.marked), jobs, "{id:?}");
            let mut records = waiters.iter().map(|waiter| self.table.record_of(*waiter));
            let blocked_in = multi.blocked_in;
            assert!(
                blocked_in.is_none() || records.any(|record| record == blocked_in),
                "{id:?}"
            );
        }
    }

    /// A lock that must be read has a job, or the timer makes one.
    fn check_jobs(&self, id: RecordId) {
        let has_job = self.agenda.count(Job::Queue(id)) > 0;
        assert!(has_job || !self.table.is_dirty(id), "{id:?} has no job");
        let is_ending = self.table.first_pending(id).is_some();
        let is_due = has_job || self.table.is_looked_at(id);
        assert!(is_due || !is_ending, "{id:?} is never released");
    }
}
