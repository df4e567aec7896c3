//! The state of each lock that is not in its key: one record for each lock.
//!
//! A lock has a record while it has a waiter, a session's hold or a pending release. The record is
//! found by one look-up and closed in one place, [`LockTable::close_if_idle`], so nothing stays
//! behind for an unused lock.
//!
//! The queue of a record is a doubly linked list through the arena of all waiters: joining, leaving
//! from any place and finding the first take the same time however long the queue is. An owner
//! stands in a queue once.

use crate::interface::depth::ReadDepth;
use crate::interface::stored_permits::PermitsRequest;
use crate::memory::deadlines::Deadlines;
use crate::memory::hold::{HoldIndex, SessionHolds};
use crate::memory::log::ages::Ages;
use crate::memory::log::pattern::Patterns;
use crate::memory::pending::PendingRelease;
use crate::memory::position::Positions;
use crate::values::arena::Arena;
use crate::values::few::Few;
use crate::values::ids::{MultiId, RecordId, SessionId, WaiterId};
use crate::values::limits::ROOM_KEPT;
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::Mode;
use crate::values::must_exist::MustExist;
use crate::values::time::{Lease, Now, Wait, earlier, held_ms};
use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

#[cfg(debug_assertions)]
mod check;

/// Where a waiter is told how its wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReplyTarget {
    /// A client that is blocked on its connection.
    Client {
        /// The driver's own handle; the core only hands it back.
        handle: usize,
        /// The client id, shown by INFO.
        client_id: u64,
    },
    /// A session, which gets an event.
    Session(SessionId),
}

/// A waiter that is about to join a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) mode: Mode,
    /// How many permits, if it waits for permits.
    pub(crate) asked: Option<PermitsRequest>,
    pub(crate) lease: Lease,
    pub(crate) wait: Wait,
    pub(crate) reply_to: ReplyTarget,
    /// The session that the hold will belong to. The wait ends with it.
    pub(crate) session: Option<SessionId>,
    /// Whether the session wants to be told, after the grant, when the lock is wanted.
    pub(crate) wanted: bool,
    /// Whether the grant does not count a hold that its owner has already.
    pub(crate) once: bool,
    /// The multi-wait that this is part of.
    pub(crate) multi: Option<MultiId>,
}

#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) owner: Rc<[u8]>,
    pub(crate) mode: Mode,
    /// How many permits, if it waits for permits.
    pub(crate) asked: Option<PermitsRequest>,
    /// The multi-wait that this is part of.
    pub(crate) multi: Option<MultiId>,
    pub(crate) lease: Lease,
    pub(crate) reply_to: ReplyTarget,
    pub(crate) session: Option<SessionId>,
    /// Whether the session wants to be told, after the grant, when the lock is wanted.
    pub(crate) wanted: bool,
    /// Whether the grant does not count a hold that its owner has already.
    pub(crate) once: bool,
    /// When the wait began, monotonic, in milliseconds.
    pub(crate) since: i64,
    /// When the wait ends, monotonic, in milliseconds; none without limit.
    pub(crate) wait_end: Option<i64>,
    record: RecordId,
    /// How many waiters joined the queue before it.
    order: u64,
    ahead: Option<WaiterId>,
    behind: Option<WaiterId>,
}

/// The queue of a lock.
#[derive(Debug, Default)]
struct WaitQueue {
    first: Option<WaiterId>,
    last: Option<WaiterId>,
    length: u32,
    /// How many of its waiters are part of a multi-wait.
    multis: u32,
    /// How many of its waiters wait for permits and named no limit.
    without_limit: u32,
    /// How many of its waiters wait to read.
    readers: u32,
    /// The first waiter whose wait was not found to be long yet. Those behind it were not either:
    /// waits become long in the order in which they began.
    unnoted: Option<WaiterId>,
    /// The waiters whose owner waits for another lock as well, by `order`.
    multi_queue_waiters: BTreeMap<u64, WaiterId>,
    positions: Positions,
    /// How many waiters have joined it since it was last empty.
    joined: u64,
    /// When the lease ends, as far as is known, in milliseconds of the wall clock.
    lease_end: Option<i64>,
}

impl WaitQueue {
    /// Counts a waiter that has joined or left: `by` adds or subtracts.
    fn count(&mut self, waiter: &Waiter, by: fn(u32, u32) -> u32) {
        self.length = by(self.length, 1);
        self.multis = by(self.multis, waiter.multi.is_some().into());
        self.without_limit = by(self.without_limit, names_no_limit(waiter.asked).into());
        self.readers = by(self.readers, (waiter.mode == Mode::Read).into());
    }
}

#[derive(Debug, Default)]
struct LockRecord {
    lock: LockKey,
    /// The number of the pattern that its name matches.
    pattern: usize,
    queue: WaitQueue,
    holds: HoldIndex,
    /// Whether all of these are marked dirty.
    are_holds_dirty: bool,
    /// Holds that must end before anything else is decided at this lock.
    pending: VecDeque<PendingRelease>,
    /// Whether a pending release left the key's TTL as it was, so that the key may outlive its
    /// holders. The last pending release then sets the TTL.
    outlived: bool,
    /// Whether the key may have changed while the lock has waiters.
    dirty: bool,
    /// When to look at the key because a lease is over, in milliseconds of the wall clock.
    lease_over_at: Option<i64>,
    /// When to look at the key in any case, monotonic, in milliseconds.
    look_at: Option<i64>,
    /// The part of these looks that is for the key: when the next one is due. A look that comes
    /// earlier, to note a long wait, does not read the key.
    key_look_at: i64,
}

/// We cannot afford to listen to every kind of key event, so some changes are not announced: `SET`
/// over a lock, `HDEL` of its owner, and a slot that moves. So a key is looked at this often while
/// the lock has waiters, or later if too many looks are due.
const LOOK_EVERY_MS: i64 = 1000;

/// At most this many looks are made at once, and the next after this pause, in the order in which
/// they were due. Without this bound 300,000 locks with waiters would keep the server busy although
/// nothing happens. With it there are 3,000 looks a second, so each of those locks is looked at
/// every 100 seconds. The end of a lease does not wait for a look: it is a deadline of its own.
/// Waking the server costs as much as dozens of looks, so they come in portions. A portion takes no
/// longer than a few commands.
const LOOKS_AT_ONCE: usize = 75;
const LOOKS_PAUSE_MS: i64 = 25;

/// The last lock that was looked up and has no record.
#[derive(Debug, Default)]
struct NegativeCache {
    db: Option<i32>,
    name: Vec<u8>,
}

impl NegativeCache {
    fn set(&mut self, lock: LockRef<'_>) {
        self.name.clear();
        // A long name is not kept, because it would stay in memory.
        let is_short = lock.name.len() <= MISSED_NAME_MAX;
        self.db = is_short.then_some(lock.db);
        if is_short {
            self.name.extend_from_slice(lock.name);
        }
    }
}

/// A longer name is looked up each time.
const MISSED_NAME_MAX: usize = 256;

/// All records, and all waiters.
#[derive(Debug, Default)]
pub(crate) struct LockTable {
    records: Arena<LockRecord>,
    databases: BTreeMap<i32, HashMap<Rc<[u8]>, RecordId>>,
    /// The last look-up: a command asks for the same lock several times, and hashing its name costs
    /// more than using the record.
    last_found: Cell<Option<RecordId>>,
    last_missed: RefCell<NegativeCache>,
    waiters: Arena<Waiter>,
    /// The queues in which each owner waits, and its waiter in each.
    waits: HashMap<Rc<[u8]>, Few<RecordId, WaiterId>>,
    wait_ends: Deadlines<WaiterId>,
    /// When the leases of locks with waiters are over, by the wall clock.
    leases_over: Deadlines<RecordId>,
    /// When to look at locks, and the moment before which no more looks are made; both monotonic.
    looks: Deadlines<RecordId>,
    no_look_before: i64,
    /// After how many milliseconds a wait is long; 0 is never.
    pub(crate) long_after_ms: i64,
    /// The patterns by which locks are counted.
    pub(crate) patterns: Patterns,
    /// When the first waiter of each queue began to wait, monotonic, in milliseconds.
    waits_began: Ages,
    /// When the holds of sessions began, in microseconds of the wall clock. A hold whose beginning
    /// is not known is left out.
    holds_began: Ages,
    /// How many queues are not empty.
    pub(crate) queues: usize,
    /// How many pending releases there are.
    pub(crate) pending: usize,
}

/// The number of waiters, sessions, holds and so on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Waiters in all queues.
    pub waiters: usize,
    /// Locks with waiters.
    pub locks: usize,
    /// Sessions.
    pub sessions: usize,
    /// Events that their sessions have not fetched yet.
    pub unacknowledged_events: usize,
    /// Holds that belong to sessions.
    pub session_holds: usize,
    /// Pending releases: holds that must end because their session ended, or because their grant
    /// could not be delivered.
    pub pending_releases: usize,
}

/// The longest present wait and hold, in milliseconds; zero without any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Longest {
    /// How long the waiter that has waited longest has waited.
    pub wait_ms: i64,
    /// How long the hold of a session that has lasted longest has lasted.
    pub hold_ms: i64,
}

/// A queue as LIST shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueView {
    /// The lock's name.
    pub name: Rc<[u8]>,
    /// How many waiters it has.
    pub waiters: u32,
    /// How long the first waiter has waited, in milliseconds.
    pub longest_wait_ms: i64,
}

/// A waiter as INFO shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaiterView {
    /// The owner that waits.
    pub owner: Rc<[u8]>,
    /// The mode in which it wants the lock.
    pub mode: Mode,
    /// The number of permits, if it waits for permits.
    pub permits: Option<i64>,
    /// The session that the hold will belong to.
    pub session: Option<Rc<[u8]>>,
    /// The client id.
    pub client_id: u64,
    /// How long it has waited, in milliseconds.
    pub waited_ms: i64,
    /// How long it will still wait, in milliseconds; -1 without limit.
    pub left_ms: i64,
}

impl LockTable {
    // --- Records ---------------------------------------------------------------------------------

    /// The record of a lock. In the common case there are no records at all, and nothing is hashed.
    #[inline]
    pub(crate) fn find(&self, lock: LockRef<'_>) -> Option<RecordId> {
        if self.records.len() == 0 {
            return None;
        }
        self.find_among_some(lock)
    }

    fn find_among_some(&self, lock: LockRef<'_>) -> Option<RecordId> {
        let last = self.last_found.get();
        let found = last.and_then(|id| self.records.get(id.0));
        if found.is_some_and(|record| record.lock.as_ref() == lock) {
            return last;
        }
        // Nothing else can have borrowed it here. If something had, a panic would stop the server,
        // so the borrow is tried.
        let mut missed = self.last_missed.try_borrow_mut().ok();
        let is_missed =
            |missed: &NegativeCache| missed.db == Some(lock.db) && *missed.name == *lock.name;
        if missed.as_deref().is_some_and(is_missed) {
            return None;
        }
        let names = self.databases.get(&lock.db);
        let found = names.and_then(|names| names.get(lock.name)).copied();
        if found.is_some() {
            self.last_found.set(found);
        } else if let Some(missed) = &mut missed {
            missed.set(lock);
        }
        found
    }

    /// Whether there are no records.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.records.len() == 0
    }

    pub(crate) fn lock_of(&self, id: RecordId) -> Option<&LockKey> {
        self.records.get(id.0).map(|record| &record.lock)
    }

    /// The record of a lock; opens one if the lock has none. None only if there are four billion
    /// already.
    pub(crate) fn find_or_open(&mut self, lock: LockRef<'_>) -> Option<RecordId> {
        if let Some(id) = self.find(lock) {
            return Some(id);
        }
        let lock = LockKey::from(lock);
        let (db, name) = (lock.db, Rc::clone(&lock.name));
        let id = RecordId(self.records.insert(LockRecord {
            pattern: self.patterns.number(&name),
            lock,
            ..LockRecord::default()
        })?);
        self.databases.entry(db).or_default().insert(name, id);
        self.last_found.set(Some(id));
        self.last_missed.get_mut().db = None;
        Some(id)
    }

    /// Closes a record that is empty. Must be called after anything was removed from it.
    pub(crate) fn close_if_idle(&mut self, id: RecordId) {
        let is_idle = self.records.get(id.0).is_some_and(|record| {
            record.queue.length == 0 && record.holds.is_empty() && record.pending.is_empty()
        });
        if !is_idle {
            return;
        }
        let Some(record) = self.records.remove(id.0).must_exist() else {
            return;
        };
        if let Some(names) = self.databases.get_mut(&record.lock.db) {
            names.remove(&record.lock.name);
            if names.is_empty() {
                names.shrink_to(ROOM_KEPT);
            }
        }
    }

    /// The records of a database, or of all databases.
    pub(crate) fn in_database(&self, db: Option<i32>) -> Vec<RecordId> {
        let of_db = |record: &LockRecord| db.is_none_or(|db| record.lock.db == db);
        let records = self.records.iter().filter(|(_, record)| of_db(record));
        records.map(|(id, _)| RecordId(id)).collect()
    }

    /// Marks a record dirty: its key may have changed. False if it is dirty already, or closed.
    pub(crate) fn mark_dirty(&mut self, id: RecordId) -> bool {
        let record = self.records.get_mut(id.0);
        record.is_some_and(|record| !std::mem::replace(&mut record.dirty, true))
    }

    pub(crate) fn is_dirty(&self, id: RecordId) -> bool {
        self.records.get(id.0).is_some_and(|record| record.dirty)
    }

    /// Whether something is due at a lock: a pending release, or a look for its waiters.
    pub(crate) fn is_due(&self, id: RecordId) -> bool {
        let record = self.records.get(id.0);
        record.is_some_and(|record| record.dirty || !record.pending.is_empty())
    }

    /// Clears the mark. Whether the record was dirty.
    pub(crate) fn take_dirty(&mut self, id: RecordId) -> bool {
        let record = self.records.get_mut(id.0);
        record.is_some_and(|record| std::mem::take(&mut record.dirty))
    }

    /// The number of waiters in all queues.
    pub(crate) fn waiters(&self) -> usize {
        self.waiters.len()
    }

    // --- Pending releases ------------------------------------------------------------------------

    /// Adds a hold that must end before anything else is decided at its lock.
    pub(crate) fn add_pending(
        &mut self,
        lock: LockRef<'_>,
        release: PendingRelease,
    ) -> Option<RecordId> {
        let id = self.find_or_open(lock)?;
        let record = self.records.get_mut(id.0).must_exist()?;
        record.pending.push_back(release);
        self.pending = self.pending.saturating_add(1);
        Some(id)
    }

    pub(crate) fn any_pending(&self) -> bool {
        self.pending > 0
    }

    /// The next pending release of a lock, and how much of its other holders must be read for it.
    ///
    /// Only the last one reads all of them, and sets the key's TTL to the last of their leases. If
    /// each did, the time would grow with the square of the number of holders that end together.
    pub(crate) fn first_pending(&self, id: RecordId) -> Option<(&PendingRelease, ReadDepth)> {
        let record = self.records.get(id.0)?;
        let depth = match record.pending.len() {
            1 if record.outlived => ReadDepth::Whole,
            1 => ReadDepth::WholeUnlessOutlived,
            _ => ReadDepth::Brief,
        };
        Some((record.pending.front()?, depth))
    }

    /// Makes this owner's first pending release the lock's next one. False if it has none there.
    pub(crate) fn bring_forward(&mut self, id: RecordId, owner: &[u8]) -> bool {
        let Some(record) = self.records.get_mut(id.0).must_exist() else {
            return false;
        };
        let mut of_owner = record
            .pending
            .iter()
            .map(|release| *release.owner == *owner);
        let at = of_owner.position(|is_own| is_own);
        let release = at.and_then(|at| record.pending.remove(at));
        let is_there = release.is_some();
        if let Some(release) = release {
            record.pending.push_front(release);
        }
        is_there
    }

    /// Whether this owner has a pending release at the lock.
    pub(crate) fn is_ending(&self, id: RecordId, owner: &[u8]) -> bool {
        let record = self.records.get(id.0);
        let mut pending = record.into_iter().flat_map(|record| &record.pending);
        pending.any(|release| *release.owner == *owner)
    }

    /// Notes whether the key may outlive the leases in it, until the last pending release sets its
    /// TTL. Returns the former note.
    pub(crate) fn set_outlived(&mut self, id: RecordId, outlived: bool) -> bool {
        let record = self.records.get_mut(id.0);
        record.is_some_and(|record| std::mem::replace(&mut record.outlived, outlived))
    }

    pub(crate) fn take_pending(&mut self, id: RecordId) -> Option<PendingRelease> {
        let release = self.records.get_mut(id.0)?.pending.pop_front()?;
        self.pending = self.pending.saturating_sub(1);
        self.look_no_more_if_done(id);
        self.close_if_idle(id);
        Some(release)
    }

    // --- Holds of sessions -----------------------------------------------------------------------

    pub(crate) fn holds(&self, id: RecordId) -> Option<&HoldIndex> {
        self.records.get(id.0).map(|record| &record.holds)
    }

    /// The holds that sessions have of a lock, to be changed. Call [`LockTable::close_if_idle`]
    /// after removing one.
    pub(crate) fn holds_mut(&mut self, id: RecordId) -> Option<&mut HoldIndex> {
        let record = self.records.get_mut(id.0)?;
        record.are_holds_dirty = false;
        Some(&mut record.holds)
    }

    #[cfg(debug_assertions)]
    pub(crate) fn says_holds_are_dirty(&self, id: RecordId) -> bool {
        let record = self.records.get(id.0);
        record.is_some_and(|record| record.are_holds_dirty)
    }

    /// Sets whether all holds of a lock are marked dirty. Returns whether they were.
    pub(crate) fn set_holds_dirty(&mut self, id: RecordId, are: bool) -> bool {
        let record = self.records.get_mut(id.0);
        record.is_some_and(|record| std::mem::replace(&mut record.are_holds_dirty, are))
    }

    // --- The longest wait and hold ---------------------------------------------------------------

    /// A session's hold of this lock begins, ends, or is a later one.
    pub(crate) fn note_hold(&mut self, id: RecordId, before: Option<i64>, after: Option<i64>) {
        let pattern = self.records.get(id.0).map_or(0, |record| record.pattern);
        self.holds_began.change(pattern, before, after);
    }

    /// Counts by these patterns from now on.
    pub(crate) fn set_patterns(&mut self, patterns: &[u8], holds: &SessionHolds) {
        // Any CONFIG SET comes here, and a walk over all locks must not be its price.
        if !self.patterns.set(patterns) {
            return;
        }
        for id in self.in_database(None) {
            if let Some(record) = self.records.get_mut(id.0) {
                record.pattern = self.patterns.number(&record.lock.name);
            }
        }
        (self.waits_began, self.holds_began) = self.ages(holds);
    }

    /// When the first waits of the queues and the holds of sessions began, found by a walk.
    pub(crate) fn ages(&self, holds: &SessionHolds) -> (Ages, Ages) {
        let (mut waits, mut held) = <(Ages, Ages)>::default();
        for (_, record) in self.records.iter() {
            let first = record.queue.first.and_then(|id| self.waiters.get(id.0));
            waits.change(record.pattern, None, first.map(|first| first.since));
            for id in record.holds.all() {
                held.change(record.pattern, None, holds.began_at(id));
            }
        }
        (waits, held)
    }

    /// The longest wait and hold of the locks with this pattern's number, or of all.
    pub(crate) fn longest(&self, pattern: Option<usize>, now: Now) -> Longest {
        let (wait, hold) = (
            self.waits_began.earliest(pattern),
            self.holds_began.earliest(pattern),
        );
        Longest {
            wait_ms: wait.map_or(0, |since| now.mono_ms.saturating_sub(since)),
            hold_ms: hold.map_or(0, |since_us| held_ms(since_us, now)),
        }
    }

    // --- Finding waiters -------------------------------------------------------------------------

    /// The record of a lock that has waiters.
    pub(crate) fn queue(&self, lock: LockRef<'_>) -> Option<RecordId> {
        self.find(lock).filter(|id| self.length(*id) > 0)
    }

    fn queue_of(&self, id: RecordId) -> Option<&WaitQueue> {
        self.records.get(id.0).map(|record| &record.queue)
    }

    pub(crate) fn length(&self, id: RecordId) -> u32 {
        self.queue_of(id).map_or(0, |queue| queue.length)
    }

    /// Whether a hold in this mode keeps a waiter out. A reader lets other readers in, and an
    /// owner, which stands in a queue once, does not wait for its own hold.
    pub(crate) fn is_anybody_kept_out(&self, id: RecordId, owner: &[u8], mode: Mode) -> bool {
        let Some(queue) = self.queue_of(id) else {
            return false;
        };
        let lets_in = |of: Mode| mode == Mode::Read && of == Mode::Read;
        let readers = if lets_in(Mode::Read) {
            queue.readers
        } else {
            0
        };
        let own = self.waiter_of(id, owner);
        let is_own = own.is_some_and(|(_, waiter)| !lets_in(waiter.mode));
        queue.length.saturating_sub(readers) > u32::from(is_own)
    }

    pub(crate) fn record_of(&self, id: WaiterId) -> Option<RecordId> {
        self.waiters.get(id.0).map(|waiter| waiter.record)
    }

    pub(crate) fn get(&self, id: WaiterId) -> Option<&Waiter> {
        self.waiters.get(id.0)
    }

    /// The first waiter.
    pub(crate) fn first(&self, id: RecordId) -> Option<(WaiterId, &Waiter)> {
        let first = self.records.get(id.0)?.queue.first?;
        Some((first, self.waiters.get(first.0).must_exist()?))
    }

    pub(crate) fn is_first(&self, id: WaiterId) -> bool {
        let waiter = self.waiters.get(id.0);
        waiter.is_some_and(|waiter| waiter.ahead.is_none())
    }

    /// An owner's waiter in a queue.
    pub(crate) fn waiter_of(&self, id: RecordId, owner: &[u8]) -> Option<(WaiterId, &Waiter)> {
        let waiter = *self.waits.get(owner)?.get(&id)?;
        Some((waiter, self.waiters.get(waiter.0).must_exist()?))
    }

    /// An owner's waiter in the queue of a lock.
    pub(crate) fn waiter_at(&self, lock: LockRef<'_>, owner: &[u8]) -> Option<(WaiterId, &Waiter)> {
        self.waiter_of(self.queue(lock)?, owner)
    }

    /// The first `most` waiters of multi-waits in a queue. Nearly every queue has none, and then it
    /// is not walked: this is called again for each reader that is granted.
    pub(crate) fn multis_in(&self, id: RecordId, most: usize) -> Vec<WaiterId> {
        let queue = self.queue_of(id).filter(|queue| queue.multis > 0);
        let first = queue.and_then(|queue| queue.first);
        let all = self.from(first);
        let multis = all.filter(|(_, waiter)| waiter.multi.is_some());
        multis.map(|(id, _)| id).take(most).collect()
    }

    /// The first `most` waiters that wait for permits and named no limit. A queue without any is
    /// not walked.
    pub(crate) fn without_limit(&self, id: RecordId, most: usize) -> Vec<WaiterId> {
        let queue = self.queue_of(id).filter(|queue| queue.without_limit > 0);
        let first = queue.and_then(|queue| queue.first);
        let all = self.from(first);
        let without = all.filter(|(_, waiter)| names_no_limit(waiter.asked));
        without.map(|(id, _)| id).take(most).collect()
    }

    /// A waiter and the waiters behind it.
    fn from(&self, first: Option<WaiterId>) -> impl Iterator<Item = (WaiterId, &Waiter)> {
        let named = |id: WaiterId| Some((id, self.waiters.get(id.0).must_exist()?));
        let first = first.and_then(named);
        std::iter::successors(first, move |(_, waiter)| named(waiter.behind?))
    }

    /// The waiters for a lock, in order.
    pub(crate) fn waiters_of(&self, lock: LockRef<'_>) -> impl Iterator<Item = &Waiter> {
        let queue = self.find(lock).and_then(|id| self.queue_of(id));
        self.from(queue.and_then(|queue| queue.first))
            .map(|(_, waiter)| waiter)
    }

    /// The queues of a database, in no particular order.
    pub(crate) fn views(&self, db: i32, now: Now) -> impl Iterator<Item = QueueView> + '_ {
        let records = self.records.iter();
        let records = records.filter(move |(_, record)| record.lock.db == db);
        records.filter_map(move |(id, record)| {
            let (_, first) = self.first(RecordId(id))?;
            Some(QueueView {
                name: Rc::clone(&record.lock.name),
                waiters: record.queue.length,
                longest_wait_ms: now.mono_ms.saturating_sub(first.since),
            })
        })
    }

    /// A waiter's position in its queue; the first has 1. In a long queue the waiters ahead are
    /// counted by ranges.
    pub(crate) fn position(&mut self, id: WaiterId) -> i64 {
        let waiters = &self.waiters;
        let Some(waiter) = waiters.get(id.0).must_exist() else {
            return 0;
        };
        let Some(record) = self.records.get_mut(waiter.record.0).must_exist() else {
            return 0;
        };
        let queue = &mut record.queue;
        let first = queue.first.and_then(|first| waiters.get(first.0));
        let from_first = std::iter::successors(first, |at| waiters.get(at.behind?.0));
        let orders = from_first.map(|waiter| waiter.order);
        let (counted, from) = queue.positions.before(waiter.order, queue.length, orders);
        let back = std::iter::successors(Some(waiter), |at| waiters.get(at.ahead?.0));
        let back = back.take_while(|waiter| waiter.order >= from);
        back.fold(counted, |position, _| position.saturating_add(1))
    }

    // --- Joining and leaving ---------------------------------------------------------------------

    /// Adds a waiter at the end of a lock's queue. None only if there are four billion waiters
    /// already.
    pub(crate) fn join(
        &mut self,
        lock: LockRef<'_>,
        newcomer: &Newcomer<'_>,
        now: Now,
    ) -> Option<(WaiterId, RecordId)> {
        let record_id = self.find_or_open(lock)?;
        let owner: Rc<[u8]> = Rc::from(newcomer.owner);
        let queue = &self.records.get(record_id.0).must_exist()?.queue;
        let (order, last) = (queue.joined, queue.last);
        let waiter = Waiter {
            owner: Rc::clone(&owner),
            mode: newcomer.mode,
            asked: newcomer.asked,
            multi: newcomer.multi,
            lease: newcomer.lease,
            reply_to: newcomer.reply_to,
            session: newcomer.session,
            wanted: newcomer.wanted,
            once: newcomer.once,
            since: now.mono_ms,
            wait_end: newcomer.wait.end(now),
            record: record_id,
            order,
            ahead: last,
            behind: None,
        };
        let Some(id) = self.waiters.insert(waiter).map(WaiterId) else {
            self.close_if_idle(record_id);
            return None;
        };
        self.wait_ends.set(id, &mut None, newcomer.wait.end(now));
        if let Some(last) = last.and_then(|last| self.waiters.get_mut(last.0).must_exist()) {
            last.behind = Some(id);
        }
        let record = self.records.get_mut(record_id.0).must_exist()?;
        let (pattern, queue) = (record.pattern, &mut record.queue);
        queue.first = queue.first.or(Some(id));
        queue.last = Some(id);
        if let Some(waiter) = self.waiters.get(id.0).must_exist() {
            queue.count(waiter, u32::saturating_add);
        }
        queue.joined = order.saturating_add(1);
        queue.positions.joined(order);
        if queue.length == 1 {
            self.queues = self.queues.saturating_add(1);
            let since = Some(now.mono_ms);
            self.waits_began.change(pattern, None, since);
        }
        if queue.unnoted.is_none() {
            queue.unnoted = Some(id);
            self.look_again(record_id, now);
        }
        // The name of an owner that waits elsewhere too is stored once.
        if let Some(known) = self.add_place(owner, record_id, id)
            && let Some(waiter) = self.waiters.get_mut(id.0)
        {
            waiter.owner = known;
        }
        Some((id, record_id))
    }

    /// The waiter keeps its place, but waits for another connection or session and with new terms.
    pub(crate) fn take_over(&mut self, id: WaiterId, newcomer: &Newcomer<'_>, now: Now) {
        if let Some(waiter) = self.waiters.get_mut(id.0).must_exist() {
            waiter.lease = newcomer.lease;
            waiter.wanted = newcomer.wanted;
            waiter.once = newcomer.once;
            waiter.reply_to = newcomer.reply_to;
            waiter.session = newcomer.session;
            let wait_end = newcomer.wait.end(now);
            self.wait_ends.set(id, &mut waiter.wait_end, wait_end);
        }
    }

    /// Removes a waiter, wherever it stands in its queue.
    pub(crate) fn leave(&mut self, id: WaiterId) -> Option<Waiter> {
        let mut waiter = self.waiters.remove(id.0)?;
        self.wait_ends.set(id, &mut waiter.wait_end, None);
        let record = self.records.get_mut(waiter.record.0).must_exist()?;
        if waiter.ahead.is_none() {
            let next = waiter.behind.and_then(|next| self.waiters.get(next.0));
            let (before, after) = (Some(waiter.since), next.map(|next| next.since));
            self.waits_began.change(record.pattern, before, after);
        }
        let queue = &mut record.queue;
        match waiter.ahead.and_then(|ahead| self.waiters.get_mut(ahead.0)) {
            Some(ahead) => ahead.behind = waiter.behind,
            None => queue.first = waiter.behind,
        }
        match waiter
            .behind
            .and_then(|behind| self.waiters.get_mut(behind.0))
        {
            Some(behind) => behind.ahead = waiter.ahead,
            None => queue.last = waiter.ahead,
        }
        if queue.unnoted == Some(id) {
            queue.unnoted = waiter.behind;
        }
        queue.count(&waiter, u32::saturating_sub);
        queue.multi_queue_waiters.remove(&waiter.order);
        queue.positions.left(waiter.order);
        let is_empty = queue.length == 0;
        if is_empty {
            *queue = WaitQueue::default();
            self.look_no_more_if_done(waiter.record);
            self.queues = self.queues.saturating_sub(1);
        }
        self.remove_place(&waiter);
        if is_empty {
            self.close_if_idle(waiter.record);
        }
        Some(waiter)
    }

    // --- Owners that wait for several locks ------------------------------------------------------

    /// Whether there is any waiter.
    pub(crate) fn any_queue(&self) -> bool {
        self.queues > 0
    }

    /// Whether another lock than this one has waiters.
    pub(crate) fn any_other_queue(&self, id: Option<RecordId>) -> bool {
        let own = id.is_some_and(|id| self.length(id) > 0);
        self.queues > usize::from(own)
    }

    /// The owner's name as it is stored, if the owner waits for anything.
    pub(crate) fn waiting(&self, owner: &[u8]) -> Option<&Rc<[u8]>> {
        self.waits.get_key_value(owner).map(|(owner, _)| owner)
    }

    /// The queues in which an owner waits, and how many waiters joined each of them before it.
    /// Waits for permits are left out: nothing says which of the holders must give permits back.
    pub(crate) fn waits_of(&self, owner: &[u8]) -> impl Iterator<Item = (RecordId, u64)> + '_ {
        let places = self.waits.get(owner).into_iter().flat_map(Few::iter);
        let waits =
            places.filter_map(|(queue, waiter)| Some((*queue, self.waiters.get(waiter.0)?)));
        let waits = waits.filter(|(_, waiter)| waiter.mode != Mode::Permits);
        waits.map(|(queue, waiter)| (queue, waiter.order))
    }

    /// The owners in a stretch of a queue that wait for another lock as well.
    pub(crate) fn multi_queue_waiters(
        &self,
        id: RecordId,
        stretch: Range<u64>,
    ) -> impl Iterator<Item = &Rc<[u8]>> {
        let record = self.records.get(id.0).filter(|_| !stretch.is_empty());
        let within = record
            .into_iter()
            .flat_map(move |record| record.queue.multi_queue_waiters.range(stretch.clone()));
        within.filter_map(|(_, id)| self.waiters.get(id.0).map(|waiter| &waiter.owner))
    }

    /// Returns the owner's name as it is stored, if it waits elsewhere already.
    fn add_place(
        &mut self,
        owner: Rc<[u8]>,
        record: RecordId,
        waiter: WaiterId,
    ) -> Option<Rc<[u8]>> {
        let mut places = match self.waits.entry(owner) {
            Entry::Vacant(none) => {
                none.insert(Few::One(record, waiter));
                return None;
            }
            Entry::Occupied(places) => places,
        };
        let known = Rc::clone(places.key());
        let only = places
            .get()
            .only()
            .map(|(record, waiter)| (*record, *waiter));
        places.get_mut().insert(record, waiter);
        // With the second queue, the owner's waiter in the first queue must be marked too.
        for (record, waiter) in only.into_iter().chain([(record, waiter)]) {
            self.mark_multi_queue(record, waiter, true);
        }
        Some(known)
    }

    fn remove_place(&mut self, gone: &Waiter) {
        // Removed, and put back if the owner waits elsewhere too. Mostly it does not, and then its
        // name is hashed only once.
        let Some(mut places) = self.waits.remove(&gone.owner).must_exist() else {
            return;
        };
        places.remove(&gone.record);
        if places.is_empty() {
            if self.waits.is_empty() {
                self.waits.shrink_to(ROOM_KEPT);
            }
            return;
        }
        if let Some((record, waiter)) = places.only() {
            self.mark_multi_queue(*record, *waiter, false);
        }
        self.waits.insert(Rc::clone(&gone.owner), places);
    }

    fn mark_multi_queue(&mut self, record: RecordId, waiter: WaiterId, waits: bool) {
        let order = self.waiters.get(waiter.0).must_exist().map(Waiter::order);
        let record = self.records.get_mut(record.0).must_exist();
        if let (Some(order), Some(record)) = (order, record) {
            let waiters = &mut record.queue.multi_queue_waiters;
            if waits {
                waiters.insert(order, waiter);
            } else {
                waiters.remove(&order);
            }
        }
    }

    // --- Deadlines -------------------------------------------------------------------------------

    /// The lease of a lock was found to end at `lease_end`; none if it never ends, or if the lock
    /// is free. The key is looked at just after that. An earlier look stays: it finds the lease as
    /// it is at that time. Does nothing if the lock has no waiters.
    pub(crate) fn check_after(&mut self, id: RecordId, lease_end: Option<i64>) {
        let Some(record) = self.records.get_mut(id.0).must_exist() else {
            return;
        };
        if record.queue.length == 0 {
            return;
        }
        record.queue.lease_end = lease_end;
        // A key is expired when the clock is past its end, not when the clock has reached it.
        if let Some(end) = lease_end {
            self.lease_over_at(id, end.saturating_add(1));
        }
    }

    /// Looks at a lock a second from now, since it was not known which node serves its key, or at
    /// the end of the lease if that comes before. The lease may be over, so this look does not wait
    /// behind those at other locks.
    pub(crate) fn retry(&mut self, id: RecordId, now: Now) {
        let lease_end = self.queue_of(id).and_then(|queue| queue.lease_end);
        let lease_end = lease_end.filter(|end| *end >= now.wall_ms());
        let again_at = now.wall_ms().saturating_add(LOOK_EVERY_MS);
        let over_at = lease_end.map_or(again_at, |end| end.saturating_add(1).min(again_at));
        self.lease_over_at(id, over_at);
    }

    fn lease_over_at(&mut self, id: RecordId, over_at: i64) {
        if let Some(record) = self.records.get_mut(id.0).must_exist() {
            let field = &mut record.lease_over_at;
            self.leases_over.bring_forward(id, field, over_at);
        }
    }

    /// Looks at a lock a second from now, or when the wait of its first waiter that was not noted
    /// becomes long, if that is before. An earlier look stays.
    fn look_again(&mut self, id: RecordId, now: Now) {
        let Some(record) = self.records.get_mut(id.0).must_exist() else {
            return;
        };
        let unnoted = record.queue.unnoted.and_then(|id| self.waiters.get(id.0));
        let long_at = unnoted.and_then(|waiter| waiter.long_at(self.long_after_ms));
        if record.look_at.is_none() && record.key_look_at <= now.mono_ms {
            record.key_look_at = now.mono_ms.saturating_add(LOOK_EVERY_MS);
        }
        // Not in the past: a queue with many long waits would come before all others.
        let at = record.key_look_at.min(long_at.unwrap_or(i64::MAX));
        let at = at.max(now.mono_ms);
        self.looks.bring_forward(id, &mut record.look_at, at);
    }

    /// Makes no more looks at a lock that has neither waiters nor pending releases.
    fn look_no_more_if_done(&mut self, id: RecordId) {
        let Some(record) = self.records.get_mut(id.0).must_exist() else {
            return;
        };
        if record.queue.length == 0 && record.pending.is_empty() {
            self.leases_over.set(id, &mut record.lease_over_at, None);
            self.looks.set(id, &mut record.look_at, None);
        }
    }

    /// Whether the last known lease is over.
    pub(crate) fn lease_over(&self, id: RecordId, now: Now) -> bool {
        let lease_end = self.queue_of(id).and_then(|queue| queue.lease_end);
        lease_end.is_some_and(|end| end <= now.wall_ms())
    }

    /// Milliseconds until the nearest deadline; 0 if it has passed, none without deadlines.
    pub(crate) fn next_deadline(&self, now: Now) -> Option<i64> {
        let look = self.looks.next().map(|at| at.max(self.no_look_before));
        let mono = earlier(self.wait_ends.next(), look);
        let mono = mono.map(|at| at.saturating_sub(now.mono_ms));
        let over = self.leases_over.next();
        let over = over.map(|at| at.saturating_sub(now.wall_ms()));
        earlier(mono, over).map(|left| left.max(0))
    }

    /// Whether the lock that a waiter waits for is held with a lease that ends, as far as is known.
    pub(crate) fn is_leased(&self, id: WaiterId) -> bool {
        let queue = self.record_of(id).and_then(|id| self.queue_of(id));
        queue.is_some_and(|queue| queue.lease_end.is_some())
    }

    /// A waiter whose wait is over.
    pub(crate) fn overdue(&self, now: Now) -> Option<WaiterId> {
        self.wait_ends.due(now.mono_ms)
    }

    /// A lock whose lease is over. Each is returned once.
    pub(crate) fn take_lease_over(&mut self, now: Now) -> Option<RecordId> {
        let id = self.leases_over.due(now.wall_ms())?;
        let record = self.records.get_mut(id.0).must_exist()?;
        self.leases_over.set(id, &mut record.lease_over_at, None);
        Some(id)
    }

    /// A lock whose look is due now, after this many looks in the turn; whether its key must be
    /// read; and its first waiter that was not noted, if its wait is long by now. That waiter
    /// counts as noted afterwards. If there are more, the next look is due at once, behind those at
    /// other locks.
    pub(crate) fn take_look(
        &mut self,
        looks: usize,
        now: Now,
    ) -> Option<(RecordId, bool, Option<WaiterId>)> {
        let may_begin = looks > 0 || now.mono_ms >= self.no_look_before;
        let due = self.looks.due(now.mono_ms);
        let id = due.filter(|_| may_begin && looks < LOOKS_AT_ONCE)?;
        self.no_look_before = now.mono_ms.saturating_add(LOOKS_PAUSE_MS);
        let unnoted = self.records.get(id.0).must_exist()?.queue.unnoted;
        let long = unnoted.filter(|id| self.is_long(*id, now));
        let record = self.records.get_mut(id.0)?;
        self.looks.set(id, &mut record.look_at, None);
        let is_of_key = record.key_look_at <= now.mono_ms;
        if let Some(waiter) = long.and_then(|id| self.waiters.get(id.0)) {
            record.queue.unnoted = waiter.behind;
        }
        if record.queue.length > 0 {
            self.look_again(id, now);
        }
        Some((id, is_of_key, long))
    }

    /// Whether a waiter's wait is long by now, and was not noted.
    pub(crate) fn is_long(&self, id: WaiterId, now: Now) -> bool {
        let Some(waiter) = self.waiters.get(id.0) else {
            return false;
        };
        let queue = self.queue_of(waiter.record);
        let unnoted = queue.and_then(|queue| self.waiters.get(queue.unnoted?.0));
        let is_unnoted = unnoted.is_some_and(|unnoted| unnoted.order <= waiter.order);
        let long_at = waiter.long_at(self.long_after_ms);
        is_unnoted && long_at.is_some_and(|at| at <= now.mono_ms)
    }
}

fn names_no_limit(asked: Option<PermitsRequest>) -> bool {
    asked.is_some_and(|asked| asked.limit.is_none())
}

impl Waiter {
    /// How many waiters joined the queue before it.
    pub(crate) fn order(&self) -> u64 {
        self.order
    }

    /// When its wait becomes long, monotonic, in milliseconds; none if none ever does.
    fn long_at(&self, after_ms: i64) -> Option<i64> {
        (after_ms > 0).then(|| self.since.saturating_add(after_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Now = Now {
        wall_us: 0,
        mono_ms: 0,
    };

    fn join(table: &mut LockTable, number: usize) -> WaiterId {
        let lock = LockRef { db: 0, name: b"k" };
        let owner = number.to_string();
        let newcomer = Newcomer {
            owner: owner.as_bytes(),
            mode: Mode::Plain,
            asked: None,
            lease: Lease::from_ms(1).unwrap(),
            wait: Wait::from_ms(0).unwrap(),
            reply_to: ReplyTarget::Client {
                handle: number,
                client_id: 0,
            },
            session: None,
            wanted: false,
            once: false,
            multi: None,
        };
        table.join(lock, &newcomer, NOW).unwrap().0
    }

    /// It is asked for again and again. A long name would stay in memory.
    #[test]
    fn the_last_lock_without_a_record_is_kept_in_mind_if_its_name_is_short() {
        let mut table = LockTable::default();
        join(&mut table, 1);
        let missed = |name: &[u8]| {
            assert_eq!(table.find(LockRef { db: 0, name }), None);
            let missed = table.last_missed.borrow();
            (missed.db, missed.name.len())
        };
        assert_eq!(missed(b"j"), (Some(0), 1));
        assert_eq!(missed(&[b'n'; MISSED_NAME_MAX + 1]), (None, 0));
        let longest = [b'n'; MISSED_NAME_MAX];
        assert_eq!(missed(&longest), (Some(0), MISSED_NAME_MAX));
    }

    #[test]
    fn each_wait_is_found_to_be_long_once_whoever_has_left_before() {
        let long_after_ms = 7;
        let mut table = LockTable {
            long_after_ms,
            ..LockTable::default()
        };
        let waiters: Vec<_> = (0..10).map(|at| join(&mut table, at)).collect();
        let queue = table.record_of(waiters[0]).unwrap();
        assert_eq!(table.take_look(0, NOW.after(6)), None);
        for gone in [0, 1, 3, 9] {
            table.leave(waiters[gone]);
        }
        let (now, mut looks, mut long) = (NOW.after(7), 0, Vec::new());
        while let Some((looked_at, is_of_key, noted)) = table.take_look(looks, now) {
            assert_eq!((looked_at, is_of_key), (queue, false));
            assert!(noted.is_none_or(|noted| !table.is_long(noted, now)));
            long.extend(noted);
            looks += 1;
        }
        assert_eq!(long, [2, 4, 5, 6, 7, 8].map(|at| waiters[at]));
        // No more looks are made than are needed. The next one is of the key, a second after the
        // first waiter joined.
        let next = NOW.mono_ms + LOOK_EVERY_MS - now.mono_ms;
        assert_eq!((looks, table.next_deadline(now)), (6, Some(next)));
    }
}
