//! The invariants of the table between two calls. Tests assert them after each step.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    clippy::panic,
    reason = "only tests run it, and the order of a hash map makes no difference to a sum"
)]

use crate::memory::hold::SessionHolds;
use crate::memory::table::{LockRecord, LockTable, WaitQueue, Waiter, names_no_limit};
use crate::values::few::Few;
use crate::values::ids::{RecordId, WaiterId};
use crate::values::mode::Mode;
use std::collections::{BTreeMap, HashMap};

impl LockTable {
    pub(crate) fn check(&self) {
        let (mut waiters, mut queues, mut pending) = (0, 0, 0);
        for (id, record) in self.records.iter() {
            self.check_record(RecordId(id), record);
            let walked = self.check_queue(RecordId(id), &record.queue);
            waiters += walked.len();
            queues += usize::from(!walked.is_empty());
            pending += record.pending.len();
        }
        assert_eq!((self.queues, self.pending), (queues, pending));
        let named = self.databases.values().map(HashMap::len);
        assert_eq!(self.records.len(), named.sum(), "a record has no name");
        let places = self.waits.values().map(|places| places.iter().count());
        assert_eq!(waiters, places.sum(), "a waiter has no place");
        assert_eq!(waiters, self.waiters.len(), "a waiter is in no queue");
        let records = || self.records.iter().map(|(id, of)| (of, RecordId(id)));
        let leases_over = records().map(|(of, id)| (of.lease_over_at, id));
        self.leases_over.check(leases_over);
        self.looks.check(records().map(|(of, id)| (of.look_at, id)));
        let wait_ends = self.each_waiter().map(|(id, of)| (of.wait_end, id));
        self.wait_ends.check(wait_ends);
        assert!(self.waits.values().all(|places| !places.is_empty()));
    }

    fn check_record(&self, id: RecordId, record: &LockRecord) {
        let LockRecord { lock, queue, .. } = record;
        let names = self.databases.get(&lock.db);
        assert_eq!(names.and_then(|names| names.get(&lock.name)), Some(&id));
        let is_waited_for = queue.length > 0 || !record.pending.is_empty();
        let is_kept = is_waited_for || !record.holds.is_empty();
        assert!(is_kept, "nothing is in {record:?}");
        assert!(record.holds.iter().all(|(_, modes)| !modes.is_empty()));
        let is_looked_at = record.look_at.is_some() || record.lease_over_at.is_some();
        assert!(is_waited_for || !is_looked_at, "no waiter: {record:?}");
        assert!(
            queue.length == 0 || record.look_at.is_some(),
            "no look: {record:?}"
        );
    }

    /// Walks a queue. Returns its waiters.
    fn check_queue(&self, id: RecordId, queue: &WaitQueue) -> Vec<&Waiter> {
        let (mut ahead, mut next, mut walked) = (None, queue.first, Vec::new());
        let mut multi_queue_waiters = BTreeMap::new();
        while let Some(at) = next {
            let Some(waiter) = self.waiters.get(at.0) else {
                panic!("{at:?} is in the queue {id:?} and is no waiter");
            };
            assert_eq!((waiter.ahead, waiter.record), (ahead, id), "{waiter:?}");
            self.check_waiter(at, waiter);
            if self.waits.get(&waiter.owner).and_then(Few::only).is_none() {
                multi_queue_waiters.insert(waiter.order, at);
            }
            (ahead, next) = (Some(at), waiter.behind);
            walked.push(waiter);
        }
        assert_eq!(queue.last, ahead);
        assert_eq!(queue.multi_queue_waiters, multi_queue_waiters);
        assert!(walked.is_sorted_by(|one, other| one.order < other.order));
        assert!(walked.last().is_none_or(|last| last.order < queue.joined));
        let count = |is: fn(&Waiter) -> bool| walked.iter().filter(|of| is(of)).count();
        let counts = [
            (queue.length, walked.len()),
            (queue.multis, count(|of| of.multi.is_some())),
            (queue.readers, count(|of| of.mode == Mode::Read)),
            (queue.without_limit, count(|of| names_no_limit(of.asked))),
        ];
        let is_right = |(noted, counted)| usize::try_from(noted) == Ok(counted);
        assert!(counts.into_iter().all(is_right), "{counts:?}");
        let unnoted = queue
            .unnoted
            .map(|id| self.waiters.get(id.0).map(|of| of.record));
        assert!(unnoted.is_none_or(|record| record == Some(id)), "{queue:?}");
        let is_unused = queue.joined == 0 && queue.lease_end.is_none();
        assert!(
            queue.length > 0 || is_unused,
            "something is left in {queue:?}"
        );
        walked
    }

    fn check_waiter(&self, id: WaiterId, waiter: &Waiter) {
        let place = self.waits.get(&waiter.owner);
        let place = place.and_then(|places| places.get(&waiter.record));
        assert_eq!(place, Some(&id), "{waiter:?}");
    }

    /// Asserts that the noted beginnings of waits and holds are those of all there are.
    pub(crate) fn check_ages(&self, holds: &SessionHolds) {
        let (waits, held) = self.ages(holds);
        assert_eq!((&waits, &held), (&self.waits_began, &self.holds_began));
    }

    /// Whether the key of a lock is looked at again without a job.
    pub(crate) fn is_looked_at(&self, id: RecordId) -> bool {
        let record = self.records.get(id.0);
        record.is_some_and(|record| record.look_at.is_some() || record.lease_over_at.is_some())
    }

    /// All waiters.
    pub(crate) fn each_waiter(&self) -> impl Iterator<Item = (WaiterId, &Waiter)> {
        self.waiters
            .iter()
            .map(|(id, waiter)| (WaiterId(id), waiter))
    }
}
