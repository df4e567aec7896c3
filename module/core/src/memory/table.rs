//! What is known of each lock beside its key: one record a lock.
//!
//! A record is there while somebody waits for the lock, while a session has a hold of it, while its
//! writer's token is known, or while a hold of it is yet to be released. It is found by one look-up
//! and closed in one place, [`LockTable::close_if_idle`], so nothing can stay behind of a lock that
//! nobody uses.
//!
//! The queue of a record is a chain through the arena of all waiters, with the two neighbours
//! stored in each: joining, leaving from any place and being next take the same time however many
//! wait. An owner stands in a queue once.

use crate::interface::depth::ReadDepth;
use crate::interface::stored_permits::PermitsRequest;
use crate::memory::hold::HoldIndex;
use crate::memory::pending::PendingRelease;
use crate::memory::position::Positions;
use crate::memory::unnoticed::Unnoticed;
use crate::values::arena::Arena;
use crate::values::ids::{MultiId, RecordId, SessionId, WaiterId};
use crate::values::limits::ROOM_KEPT;
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::Mode;
use crate::values::time::{Lease, Now, Wait, earlier};
use crate::values::token::Token;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

/// Where a waiter is told how its wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ReplyTarget {
    /// A client that is blocked on its connection.
    Client {
        /// The driver's own handle; the core only hands it back.
        handle: usize,
        /// The server's number of the client, shown by INFO.
        client_id: u64,
    },
    /// A session, which is told by an event.
    Session(SessionId),
}

/// Somebody who is about to wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) mode: Mode,
    /// How many permits, if it is for permits.
    pub(crate) asked: Option<PermitsRequest>,
    pub(crate) lease: Lease,
    pub(crate) wait: Wait,
    pub(crate) reply_to: ReplyTarget,
    /// The session that the hold is to belong to, and with which the wait ends.
    pub(crate) session: Option<SessionId>,
    /// Whether the session is to be told when the lock is wanted that it was granted.
    pub(crate) wanted: bool,
    /// The wait for several locks that this is part of.
    pub(crate) multi: Option<MultiId>,
}

#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) owner: Rc<[u8]>,
    pub(crate) mode: Mode,
    /// How many permits it waits for, if it does.
    pub(crate) asked: Option<PermitsRequest>,
    /// The wait for several locks that this is part of.
    pub(crate) multi: Option<MultiId>,
    pub(crate) lease: Lease,
    pub(crate) reply_to: ReplyTarget,
    pub(crate) session: Option<SessionId>,
    /// Whether the session is to be told when the lock is wanted that it was granted.
    pub(crate) wanted: bool,
    /// Monotonic, in milliseconds.
    pub(crate) since: i64,
    /// Monotonic, in milliseconds; none without limit.
    pub(crate) wait_end: Option<i64>,
    record: RecordId,
    /// How many joined the queue before it.
    order: u64,
    ahead: Option<WaiterId>,
    behind: Option<WaiterId>,
}

/// Where an owner waits: mostly in one queue.
#[derive(Debug)]
enum Places {
    One(RecordId, WaiterId),
    Several(BTreeMap<RecordId, WaiterId>),
}

/// Those who wait for a lock.
#[derive(Debug, Default)]
struct WaitQueue {
    first: Option<WaiterId>,
    last: Option<WaiterId>,
    length: u32,
    /// How many of them wait for several locks.
    multis: u32,
    /// How many of them wait for permits and named no limit.
    without_limit: u32,
    /// How many of them wait to read.
    readers: u32,
    /// Those whose owner waits for another lock as well, by their order.
    multi_queue_waiters: BTreeMap<u64, WaiterId>,
    positions: Positions,
    /// How many ever joined it.
    joined: u64,
    /// When the lease ends, as far as was heard of it, in milliseconds of the wall clock.
    lease_end: Option<i64>,
}

/// The token of a lock's writer.
///
/// A read-write lock's hash has no room for it, so it is known only to the server that granted it.
/// Somebody else may have written since: it is this writer's only while the key ends when we said.
#[derive(Debug)]
struct Writer {
    owner: Rc<[u8]>,
    token: Token,
    /// The end of the key as we wrote it, in milliseconds of the wall clock.
    ends_at: i64,
}

#[derive(Debug)]
struct LockRecord {
    lock: LockKey,
    queue: WaitQueue,
    holds: HoldIndex,
    writer: Option<Writer>,
    /// Holds that must end before anything else is decided here.
    pending: VecDeque<PendingRelease>,
    /// Whether a reader's hold was released and the key's TTL left as it was, to be set with the
    /// last pending release.
    outlived: bool,
    /// Whether the key may have changed under those who wait.
    dirty: bool,
    /// When the key is looked at because a lease is over, in milliseconds of the wall clock.
    lease_over_at: Option<i64>,
    /// When the key is looked at whatever was heard of it, monotonic, in milliseconds.
    look_at: Option<i64>,
}

/// Not every change of a key is announced by an event that we can afford to listen to (`SET` over a
/// lock, `HDEL` of its owner and a slot that moves are not), so a key is looked at this often while
/// somebody waits for it: later only where too many looks are due.
const LOOK_EVERY_MS: i64 = 1000;

/// So many looks are made at once, and the next after this pause, in the order in which they were
/// due. Without this bound 300,000 locks that are waited for would keep the server busy, though
/// nothing happens. With it all looks together are 3,000 a second, so each of those locks is looked
/// at every 100 seconds. The end of a lease does not wait for that: it is a deadline of its own. To
/// wake the server costs as much as dozens of looks, so they come in portions; and a portion of these
/// is no longer than what the server does for a few commands.
const LOOKS_AT_ONCE: usize = 75;
const LOOKS_PAUSE_MS: i64 = 25;

/// A lock without a record.
#[derive(Debug, Default)]
struct NegativeCache {
    db: Option<i32>,
    name: Vec<u8>,
}

impl NegativeCache {
    fn set(&mut self, lock: LockRef<'_>) {
        self.name.clear();
        // A long name is not kept: it would stay in memory.
        let is_short = lock.name.len() <= MISSED_NAME_MAX;
        self.db = is_short.then_some(lock.db);
        if is_short {
            self.name.extend_from_slice(lock.name);
        }
    }
}

/// A name longer than this is looked up each time.
const MISSED_NAME_MAX: usize = 256;

/// All records, and all waiters.
#[derive(Debug, Default)]
pub(crate) struct LockTable {
    records: Arena<LockRecord>,
    databases: BTreeMap<i32, HashMap<Rc<[u8]>, RecordId>>,
    /// What was looked up last: a command asks for the same lock several times, and hashing its
    /// name costs more than what is done with the record.
    last_found: Cell<Option<RecordId>>,
    last_missed: RefCell<NegativeCache>,
    waiters: Arena<Waiter>,
    /// In which queues each owner waits.
    waits: HashMap<Rc<[u8]>, Places>,
    wait_ends: BTreeSet<(i64, WaiterId)>,
    /// Those who wait and whose wait was not found to be long yet.
    unnoticed: Unnoticed,
    /// When leases are over of locks that somebody waits for, by the wall clock.
    leases_over: BTreeSet<(i64, RecordId)>,
    /// When locks are looked at, and before which moment no more of them are, both monotonic.
    looks: BTreeSet<(i64, RecordId)>,
    no_look_before: i64,
    /// The ends of the writers whose tokens are known.
    writer_ends: BTreeSet<(i64, RecordId)>,
    /// How many queues there are with somebody in them.
    queues: usize,
    /// How many holds are yet to be released.
    pending: usize,
}

/// How many there are of everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Waiters in all queues.
    pub waiters: usize,
    /// Locks that somebody waits for.
    pub locks: usize,
    /// Sessions.
    pub sessions: usize,
    /// Events that their sessions have not fetched yet.
    pub unfetched_events: usize,
    /// Holds that belong to sessions.
    pub session_holds: usize,
    /// Writers whose tokens are known.
    pub writer_tokens: usize,
    /// Holds that are yet to be released because their session ended, or because word of their
    /// grant could not be delivered.
    pub pending_releases: usize,
}

/// A queue as LIST shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueView {
    /// The lock's name.
    pub name: Rc<[u8]>,
    /// How many wait.
    pub waiters: u32,
    /// How long the first in the queue has waited, in milliseconds.
    pub longest_wait_ms: i64,
}

/// A waiter as INFO shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaiterView {
    /// Who waits.
    pub owner: Rc<[u8]>,
    /// For what.
    pub mode: Mode,
    /// For how many permits, if it waits for some.
    pub permits: Option<i64>,
    /// The session that the hold is to belong to.
    pub session: Option<Rc<[u8]>>,
    /// The server's number of the client.
    pub client_id: u64,
    /// For how long, in milliseconds.
    pub waited_ms: i64,
    /// For how long yet, in milliseconds; -1 without limit.
    pub left_ms: i64,
}

impl LockTable {
    // --- Records ---------------------------------------------------------------------------------

    /// The record of a lock. Where there is none at all this hashes nothing: the common case.
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
        // It is never borrowed here already; and if it were, this must not stop the server.
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

    /// Whether nothing is known of any lock.
    #[inline]
    pub(crate) fn is_quiet(&self) -> bool {
        self.records.len() == 0
    }

    pub(crate) fn lock_of(&self, id: RecordId) -> Option<&LockKey> {
        self.records.get(id.0).map(|record| &record.lock)
    }

    /// The record of a lock, which comes into being if there is none. None only when four billion
    /// are there already.
    pub(crate) fn find_or_open(&mut self, lock: LockRef<'_>) -> Option<RecordId> {
        if let Some(id) = self.find(lock) {
            return Some(id);
        }
        let lock = LockKey::from(lock);
        let (db, name) = (lock.db, Rc::clone(&lock.name));
        let id = RecordId(self.records.insert(LockRecord {
            lock,
            queue: WaitQueue::default(),
            holds: HoldIndex::default(),
            writer: None,
            pending: VecDeque::new(),
            outlived: false,
            dirty: false,
            lease_over_at: None,
            look_at: None,
        })?);
        self.databases.entry(db).or_default().insert(name, id);
        self.last_found.set(Some(id));
        self.last_missed.get_mut().db = None;
        Some(id)
    }

    /// Closes a record that nothing is known of any more. To be called after anything has left it.
    fn close_if_idle(&mut self, id: RecordId) {
        let is_idle = self.records.get(id.0).is_some_and(|record| {
            record.queue.length == 0
                && record.holds.is_empty()
                && record.writer.is_none()
                && record.pending.is_empty()
        });
        if !is_idle {
            return;
        }
        let Some(record) = self.records.remove(id.0) else {
            return;
        };
        if let Some(names) = self.databases.get_mut(&record.lock.db) {
            names.remove(&record.lock.name);
            if names.is_empty() {
                names.shrink_to(ROOM_KEPT);
            }
        }
    }

    /// The records of a database, or of all.
    pub(crate) fn in_database(&self, db: Option<i32>) -> Vec<RecordId> {
        let of_db = |record: &LockRecord| db.is_none_or(|db| record.lock.db == db);
        let records = self.records.iter().filter(|(_, record)| of_db(record));
        records.map(|(id, _)| RecordId(id)).collect()
    }

    /// Marks a record: its key may have changed. False if it is marked already, or gone.
    pub(crate) fn mark_dirty(&mut self, id: RecordId) -> bool {
        let record = self.records.get_mut(id.0);
        record.is_some_and(|record| !std::mem::replace(&mut record.dirty, true))
    }

    pub(crate) fn is_dirty(&self, id: RecordId) -> bool {
        self.records.get(id.0).is_some_and(|record| record.dirty)
    }

    /// Whether a record was marked; it no longer is.
    pub(crate) fn take_dirty(&mut self, id: RecordId) -> bool {
        let record = self.records.get_mut(id.0);
        record.is_some_and(|record| std::mem::take(&mut record.dirty))
    }

    /// How many wait, in all queues.
    pub(crate) fn waiters(&self) -> usize {
        self.waiters.len()
    }

    pub(crate) fn gauges(&self) -> Gauges {
        Gauges {
            waiters: self.waiters.len(),
            locks: self.queues,
            writer_tokens: self.writer_ends.len(),
            pending_releases: self.pending,
            ..Gauges::default()
        }
    }

    // --- Holds that must end ---------------------------------------------------------------------

    /// Adds a hold that must end before anything else is decided at its lock.
    pub(crate) fn add_pending(
        &mut self,
        lock: LockRef<'_>,
        release: PendingRelease,
    ) -> Option<RecordId> {
        let id = self.find_or_open(lock)?;
        self.records.get_mut(id.0)?.pending.push_back(release);
        self.pending = self.pending.saturating_add(1);
        Some(id)
    }

    /// The key may be another one by now, for the holds that must end there as well.
    pub(crate) fn mark_pending_replaced(&mut self, id: RecordId) {
        if let Some(record) = self.records.get_mut(id.0) {
            for release in &mut record.pending {
                release.mark.replaced = true;
            }
        }
    }

    pub(crate) fn any_pending(&self) -> bool {
        self.pending > 0
    }

    /// The next pending release of a lock, and how much of its other readers must be read for it.
    ///
    /// Only the last of several reads all of them, and sets the key's TTL by what is left. If each
    /// did, the time would grow with the square of the number of readers that end together.
    pub(crate) fn first_pending(&self, id: RecordId) -> Option<(&PendingRelease, ReadDepth)> {
        let record = self.records.get(id.0)?;
        let depth = match record.pending.len() {
            1 if record.outlived => ReadDepth::Whole,
            1 => ReadDepth::WholeUnlessOutlived,
            _ => ReadDepth::Brief,
        };
        Some((record.pending.front()?, depth))
    }

    /// Makes this owner's first pending release the lock's next. False if it has none there.
    pub(crate) fn bring_forward(&mut self, id: RecordId, owner: &[u8]) -> bool {
        let Some(record) = self.records.get_mut(id.0) else {
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

    /// Whether this owner has a pending release there.
    pub(crate) fn is_ending(&self, id: RecordId, owner: &[u8]) -> bool {
        let record = self.records.get(id.0);
        let mut pending = record.into_iter().flat_map(|record| &record.pending);
        pending.any(|release| *release.owner == *owner)
    }

    /// Whether a lock has a pending release.
    pub(crate) fn is_any_ending(&self, lock: LockRef<'_>) -> bool {
        let record = self.find(lock).and_then(|id| self.records.get(id.0));
        record.is_some_and(|record| !record.pending.is_empty())
    }

    /// Notes whether the key's TTL may be longer than its readers' leases, until the last pending
    /// release there. Returns what was noted before.
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

    /// The holds that sessions have of a lock, to change. Whoever takes one out calls
    /// [`LockTable::hold_removed`].
    pub(crate) fn holds_mut(&mut self, id: RecordId) -> Option<&mut HoldIndex> {
        self.records.get_mut(id.0).map(|record| &mut record.holds)
    }

    pub(crate) fn hold_removed(&mut self, id: RecordId) {
        self.close_if_idle(id);
    }

    // --- Tokens of writers -----------------------------------------------------------------------

    /// The token of the owner's hold as the writer, if the key still ends when we said it would.
    pub(crate) fn writer_token(
        &self,
        lock: LockRef<'_>,
        owner: &[u8],
        key_end: Option<i64>,
    ) -> Option<Token> {
        let writer = self.records.get(self.find(lock)?.0)?.writer.as_ref()?;
        (*writer.owner == *owner && Some(writer.ends_at) == key_end).then_some(writer.token)
    }

    /// The owner writes with this token, and the key ends then. Without an end the token could not
    /// be told from a later hold's, and is not kept.
    pub(crate) fn keep_writer(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        token: Token,
        key_end: Option<i64>,
    ) {
        let Some(ends_at) = key_end else {
            return self.forget_writer(lock);
        };
        let Some(id) = self.find_or_open(lock) else {
            return;
        };
        let Some(record) = self.records.get_mut(id.0) else {
            return;
        };
        let former = record.writer.take();
        let owner = match &former {
            Some(writer) if *writer.owner == *owner => Rc::clone(&writer.owner),
            _ => Rc::from(owner),
        };
        record.writer = Some(Writer {
            owner,
            token,
            ends_at,
        });
        if let Some(former) = former {
            self.writer_ends.remove(&(former.ends_at, id));
        }
        self.writer_ends.insert((ends_at, id));
    }

    /// The key of a lock that is written ends then, whoever prolonged it.
    pub(crate) fn prolong_writer(&mut self, lock: LockRef<'_>, was: Option<i64>, ends_at: i64) {
        let Some(id) = self.find(lock) else { return };
        let writer = self.records.get_mut(id.0);
        let Some(writer) = writer.and_then(|record| record.writer.as_mut()) else {
            return;
        };
        if Some(writer.ends_at) == was {
            self.writer_ends.remove(&(writer.ends_at, id));
            writer.ends_at = ends_at;
            self.writer_ends.insert((ends_at, id));
        }
    }

    /// The owner writes no more. Where somebody else wrote two writers into the hash, the other's
    /// token stays.
    pub(crate) fn forget_writer_of(&mut self, lock: LockRef<'_>, owner: &[u8]) {
        let id = self.find(lock);
        let record = id.and_then(|id| self.records.get(id.0));
        let writer = record.and_then(|record| record.writer.as_ref());
        if writer.is_some_and(|writer| *writer.owner == *owner) {
            self.forget_writer(lock);
        }
    }

    /// The lock has no writer any more, or another one.
    pub(crate) fn forget_writer(&mut self, lock: LockRef<'_>) {
        if let Some(id) = self.find(lock) {
            self.forget_writer_in(id);
        }
    }

    pub(crate) fn forget_writer_in(&mut self, id: RecordId) {
        let record = self.records.get_mut(id.0);
        if let Some(writer) = record.and_then(|record| record.writer.take()) {
            self.writer_ends.remove(&(writer.ends_at, id));
            self.close_if_idle(id);
        }
    }

    /// Forgets writers whose leases are over: two at a time, which is more than come in, so what is
    /// kept stays in proportion to the locks that are held.
    pub(crate) fn forget_overdue_writers(&mut self, now: Now) {
        for _ in 0..2 {
            match self.writer_ends.first() {
                Some((end, id)) if *end < now.wall_ms() => self.forget_writer_in(*id),
                _ => return,
            }
        }
    }

    pub(crate) fn writers(&self) -> usize {
        self.writer_ends.len()
    }

    /// Who writes, and when the key ends, if the token is known.
    pub(crate) fn writer(&self, id: RecordId) -> Option<(&Rc<[u8]>, i64)> {
        let writer = self.records.get(id.0)?.writer.as_ref()?;
        Some((&writer.owner, writer.ends_at))
    }

    /// The writer that ends next after this one, and around.
    pub(crate) fn writer_after(&self, at: Option<(i64, RecordId)>) -> Option<(i64, RecordId)> {
        let later = at.and_then(|at| {
            use std::ops::Bound::{Excluded, Unbounded};
            self.writer_ends.range((Excluded(at), Unbounded)).next()
        });
        later.or_else(|| self.writer_ends.first()).copied()
    }

    // --- Finding waiters -------------------------------------------------------------------------

    /// The record of a lock that somebody waits for.
    pub(crate) fn queue(&self, lock: LockRef<'_>) -> Option<RecordId> {
        self.find(lock).filter(|id| self.length(*id) > 0)
    }

    pub(crate) fn length(&self, id: RecordId) -> u32 {
        self.records
            .get(id.0)
            .map_or(0, |record| record.queue.length)
    }

    /// Whether a hold in this mode keeps somebody in a queue out. A reader lets others read, and an
    /// owner, who stands in a queue once, does not wait for what it holds.
    pub(crate) fn is_anybody_kept_out(&self, id: RecordId, owner: &[u8], mode: Mode) -> bool {
        let Some(LockRecord { queue, .. }) = self.records.get(id.0) else {
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

    /// Who is next.
    pub(crate) fn first(&self, id: RecordId) -> Option<(WaiterId, &Waiter)> {
        let first = self.records.get(id.0)?.queue.first?;
        Some((first, self.waiters.get(first.0)?))
    }

    pub(crate) fn is_first(&self, id: WaiterId) -> bool {
        let waiter = self.waiters.get(id.0);
        waiter.is_some_and(|waiter| waiter.ahead.is_none())
    }

    /// An owner's waiter in a queue.
    pub(crate) fn waiter_of(&self, id: RecordId, owner: &[u8]) -> Option<(WaiterId, &Waiter)> {
        let waiter = self.waits.get(owner)?.get(id)?;
        Some((waiter, self.waiters.get(waiter.0)?))
    }

    /// The first waits for several locks that stand in a queue. Where there are none, as in nearly
    /// all, nobody is asked: one step follows another here for each reader that comes in.
    pub(crate) fn multis_in(&self, id: RecordId, most: usize) -> Vec<WaiterId> {
        let queue = self.records.get(id.0).map(|record| &record.queue);
        let first = queue
            .filter(|queue| queue.multis > 0)
            .and_then(|queue| queue.first);
        let all = self.from(first);
        let multis = all.filter(|(_, waiter)| waiter.multi.is_some());
        multis.map(|(id, _)| id).take(most).collect()
    }

    /// The first in a queue who wait for permits and named no limit. Where there are none nobody is
    /// asked.
    pub(crate) fn without_limit(&self, id: RecordId, most: usize) -> Vec<WaiterId> {
        let queue = self.records.get(id.0).map(|record| &record.queue);
        let first = queue
            .filter(|queue| queue.without_limit > 0)
            .and_then(|queue| queue.first);
        let all = self.from(first);
        let without = all.filter(|(_, waiter)| names_no_limit(waiter.asked));
        without.map(|(id, _)| id).take(most).collect()
    }

    /// A waiter and those behind it.
    fn from(&self, first: Option<WaiterId>) -> impl Iterator<Item = (WaiterId, &Waiter)> {
        let named = |id: WaiterId| Some((id, self.waiters.get(id.0)?));
        let first = first.and_then(named);
        std::iter::successors(first, move |(_, waiter)| named(waiter.behind?))
    }

    /// Those who wait for a lock, in order.
    pub(crate) fn waiters_of(&self, lock: LockRef<'_>) -> impl Iterator<Item = &Waiter> {
        let record = self.find(lock).and_then(|id| self.records.get(id.0));
        let first = record.and_then(|record| record.queue.first);
        self.from(first).map(|(_, waiter)| waiter)
    }

    /// The queues of a database, in no particular order.
    pub(crate) fn views(&self, db: i32, now: Now) -> impl Iterator<Item = QueueView> + '_ {
        let records = self.records.iter().map(|(_, record)| record);
        let waited_for =
            records.filter(move |record| record.lock.db == db && record.queue.length > 0);
        waited_for.map(move |record| {
            let first = record
                .queue
                .first
                .and_then(|first| self.waiters.get(first.0));
            QueueView {
                name: Rc::clone(&record.lock.name),
                waiters: record.queue.length,
                longest_wait_ms: first.map_or(0, |first| now.mono_ms.saturating_sub(first.since)),
            }
        })
    }

    /// A waiter's place in its queue; 1 is next. In a long queue those ahead are counted by ranges.
    pub(crate) fn position(&mut self, id: WaiterId) -> i64 {
        let waiters = &self.waiters;
        let Some(waiter) = waiters.get(id.0) else {
            return 0;
        };
        let Some(record) = self.records.get_mut(waiter.record.0) else {
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

    /// A new waiter at the end of a lock's queue. None only when four billion wait already.
    pub(crate) fn join(
        &mut self,
        lock: LockRef<'_>,
        newcomer: &Newcomer<'_>,
        now: Now,
    ) -> Option<(WaiterId, RecordId)> {
        let record_id = self.find_or_open(lock)?;
        let owner: Rc<[u8]> = Rc::from(newcomer.owner);
        let queue = &self.records.get(record_id.0)?.queue;
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
        self.unnoticed.joined(id, now);
        let wait_end = newcomer.wait.end(now).map(|end| (end, id));
        self.wait_ends.extend(wait_end);
        if let Some(last) = last.and_then(|last| self.waiters.get_mut(last.0)) {
            last.behind = Some(id);
        }
        let queue = &mut self.records.get_mut(record_id.0)?.queue;
        queue.first = queue.first.or(Some(id));
        queue.last = Some(id);
        queue.length = queue.length.saturating_add(1);
        queue.multis = queue.multis.saturating_add(newcomer.multi.is_some().into());
        let without_limit = names_no_limit(newcomer.asked).into();
        queue.without_limit = queue.without_limit.saturating_add(without_limit);
        let reads = (newcomer.mode == Mode::Read).into();
        queue.readers = queue.readers.saturating_add(reads);
        queue.joined = order.saturating_add(1);
        queue.positions.joined(order);
        if queue.length == 1 {
            self.queues = self.queues.saturating_add(1);
            self.look_again(record_id, now);
        }
        // An owner that waits elsewhere too is kept once.
        if let Some(known) = self.add_place(owner, record_id, id)
            && let Some(waiter) = self.waiters.get_mut(id.0)
        {
            waiter.owner = known;
        }
        Some((id, record_id))
    }

    /// The waiter goes on waiting where it stands, for another connection or session and with new
    /// terms. Returns the reply target and the session that it had.
    pub(crate) fn take_over(
        &mut self,
        id: WaiterId,
        newcomer: &Newcomer<'_>,
        now: Now,
    ) -> Option<(ReplyTarget, Option<SessionId>)> {
        let waiter = self.waiters.get_mut(id.0)?;
        if let Some(end) = waiter.wait_end {
            self.wait_ends.remove(&(end, id));
        }
        waiter.lease = newcomer.lease;
        waiter.wanted = newcomer.wanted;
        waiter.wait_end = newcomer.wait.end(now);
        self.wait_ends.extend(waiter.wait_end.map(|end| (end, id)));
        let reply_to = std::mem::replace(&mut waiter.reply_to, newcomer.reply_to);
        let session = std::mem::replace(&mut waiter.session, newcomer.session);
        Some((reply_to, session))
    }

    /// Takes a waiter out, from wherever it stands.
    pub(crate) fn leave(&mut self, id: WaiterId) -> Option<Waiter> {
        let waiter = self.waiters.remove(id.0)?;
        if let Some(end) = waiter.wait_end {
            self.wait_ends.remove(&(end, id));
        }
        let record = self.records.get_mut(waiter.record.0)?;
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
        queue.length = queue.length.saturating_sub(1);
        queue.multis = queue.multis.saturating_sub(waiter.multi.is_some().into());
        let without_limit = names_no_limit(waiter.asked).into();
        queue.without_limit = queue.without_limit.saturating_sub(without_limit);
        let reads = (waiter.mode == Mode::Read).into();
        queue.readers = queue.readers.saturating_sub(reads);
        queue.multi_queue_waiters.remove(&waiter.order);
        queue.positions.left(waiter.order);
        let is_empty = queue.length == 0;
        if is_empty {
            *queue = WaitQueue::default();
            self.look_no_more_if_done(waiter.record);
            self.queues = self.queues.saturating_sub(1);
        }
        self.remove_place(&waiter);
        let waiters = &self.waiters;
        let is_there = |id: WaiterId| waiters.get(id.0).is_some();
        self.unnoticed.left(id, is_there, waiters.len());
        if is_empty {
            self.close_if_idle(waiter.record);
        }
        Some(waiter)
    }

    // --- Who waits for more than one lock --------------------------------------------------------

    /// Whether anybody waits.
    pub(crate) fn any_queue(&self) -> bool {
        self.queues > 0
    }

    /// Whether anybody waits for another lock than this one.
    pub(crate) fn any_other_queue(&self, id: Option<RecordId>) -> bool {
        let own = id.is_some_and(|id| self.length(id) > 0);
        self.queues > usize::from(own)
    }

    /// The owner, if it waits for anything.
    pub(crate) fn waiting(&self, owner: &[u8]) -> Option<&Rc<[u8]>> {
        self.waits.get_key_value(owner).map(|(owner, _)| owner)
    }

    /// Where an owner waits, and how many joined each of these queues before it. Waits for permits
    /// are not looked at: who of their holders must give them back is not said.
    pub(crate) fn waits_of(&self, owner: &[u8]) -> impl Iterator<Item = (RecordId, u64)> + '_ {
        let places = self.waits.get(owner).into_iter().flat_map(Places::all);
        let waits = places.filter_map(|(queue, waiter)| Some((queue, self.waiters.get(waiter.0)?)));
        let waits = waits.filter(|(_, waiter)| waiter.mode != Mode::Permits);
        waits.map(|(queue, waiter)| (queue, waiter.order))
    }

    /// The owners in a stretch of a queue who wait for another lock as well.
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

    /// Returns the owner's name as it is kept, if it waits elsewhere already.
    fn add_place(
        &mut self,
        owner: Rc<[u8]>,
        record: RecordId,
        waiter: WaiterId,
    ) -> Option<Rc<[u8]>> {
        use std::collections::hash_map::Entry;
        match self.waits.entry(owner) {
            Entry::Vacant(none) => {
                none.insert(Places::One(record, waiter));
                None
            }
            Entry::Occupied(mut places) => {
                let known = Rc::clone(places.key());
                let was_one = places.get_mut().add(record, waiter);
                // With a second queue the owner's waiter in the first counts, too.
                for (record, waiter) in was_one.into_iter().chain([(record, waiter)]) {
                    self.mark_multi_queue(record, waiter, true);
                }
                Some(known)
            }
        }
    }

    fn remove_place(&mut self, gone: &Waiter) {
        // Taken out, and put back where there are others. Mostly there is one: it is hashed once.
        let Some(mut places) = self.waits.remove(&gone.owner) else {
            return;
        };
        if let Places::One(..) = places {
            if self.waits.is_empty() {
                self.waits.shrink_to(ROOM_KEPT);
            }
            return;
        }
        if let Some((record, waiter)) = places.remove(gone.record) {
            self.mark_multi_queue(record, waiter, false);
        }
        self.waits.insert(Rc::clone(&gone.owner), places);
    }

    fn mark_multi_queue(&mut self, record: RecordId, waiter: WaiterId, waits: bool) {
        let order = self.waiters.get(waiter.0).map(|waiter| waiter.order);
        if let (Some(order), Some(record)) = (order, self.records.get_mut(record.0)) {
            let waiters = &mut record.queue.multi_queue_waiters;
            if waits {
                waiters.insert(order, waiter);
            } else {
                waiters.remove(&order);
            }
        }
    }

    // --- Deadlines -------------------------------------------------------------------------------

    /// The lease of a lock was found to end then; none if it never ends, or nobody has the lock.
    /// The key is looked at just after that. A look that is due earlier stays: it will find the
    /// lease as it is by then. Does nothing where nobody waits.
    pub(crate) fn check_after(&mut self, id: RecordId, lease_end: Option<i64>) {
        let Some(record) = self.records.get_mut(id.0) else {
            return;
        };
        if record.queue.length == 0 {
            return;
        }
        record.queue.lease_end = lease_end;
        // A key is expired when the clock is past its end, not when it is there.
        let Some(over_at) = lease_end.map(|end| end.saturating_add(1)) else {
            return;
        };
        if record
            .lease_over_at
            .is_some_and(|earlier| earlier <= over_at)
        {
            return;
        }
        if let Some(later) = record.lease_over_at.replace(over_at) {
            self.leases_over.remove(&(later, id));
        }
        self.leases_over.insert((over_at, id));
    }

    /// Looks at a lock a second from now, unless it is looked at before.
    pub(crate) fn look_again(&mut self, id: RecordId, now: Now) {
        let at = now.mono_ms.saturating_add(LOOK_EVERY_MS);
        if let Some(record) = self.records.get_mut(id.0)
            && record.look_at.is_none()
        {
            record.look_at = Some(at);
            self.looks.insert((at, id));
        }
    }

    /// Does not look any more at a lock that has neither waiters nor pending releases.
    fn look_no_more_if_done(&mut self, id: RecordId) {
        let Some(record) = self.records.get_mut(id.0) else {
            return;
        };
        if record.queue.length > 0 || !record.pending.is_empty() {
            return;
        }
        if let Some(at) = record.lease_over_at.take() {
            self.leases_over.remove(&(at, id));
        }
        if let Some(at) = record.look_at.take() {
            self.looks.remove(&(at, id));
        }
    }

    /// Whether the lease that was last heard of is over.
    pub(crate) fn lease_over(&self, id: RecordId, now: Now) -> bool {
        let lease_end = self
            .records
            .get(id.0)
            .and_then(|record| record.queue.lease_end);
        lease_end.is_some_and(|end| end <= now.wall_ms())
    }

    /// Milliseconds until the nearest deadline; 0 if it has passed, none if there is none.
    pub(crate) fn next_deadline(&self, now: Now) -> Option<i64> {
        let wait = self.wait_ends.first();
        let wait = wait.map(|(end, _)| end.saturating_sub(now.mono_ms));
        let over = self.leases_over.first();
        let over = over.map(|(at, _)| at.saturating_sub(now.wall_ms()));
        let look = self.looks.first();
        let look = look.map(|(at, _)| self.no_look_before.max(*at).saturating_sub(now.mono_ms));
        earlier(earlier(wait, over), look).map(|left| left.max(0))
    }

    /// Who has waited longest of those whose wait was not found to be long yet, and since when.
    pub(crate) fn first_unnoticed(&self) -> Option<(i64, WaiterId)> {
        self.unnoticed.first()
    }

    /// Its wait was found to be long.
    pub(crate) fn pop_unnoticed(&mut self) {
        let waiters = &self.waiters;
        self.unnoticed.pop(|id| waiters.get(id.0).is_some());
    }

    /// Whether somebody has the lock that a waiter waits for, as far as was heard of it.
    pub(crate) fn is_leased(&self, id: WaiterId) -> bool {
        let record = self.record_of(id).and_then(|id| self.records.get(id.0));
        record.is_some_and(|record| record.queue.lease_end.is_some())
    }

    /// A waiter whose wait is over.
    pub(crate) fn overdue(&self, now: Now) -> Option<WaiterId> {
        let (end, id) = self.wait_ends.first()?;
        (*end <= now.mono_ms).then_some(*id)
    }

    /// A lock whose lease is over. Each is returned once.
    pub(crate) fn take_lease_over(&mut self, now: Now) -> Option<RecordId> {
        let (at, id) = self.leases_over.first().copied()?;
        if at > now.wall_ms() {
            return None;
        }
        self.leases_over.pop_first();
        self.records.get_mut(id.0)?.lease_over_at = None;
        Some(id)
    }

    /// The locks that are looked at now, whatever was heard of them. Those that somebody waits for
    /// are looked at again a second later.
    pub(crate) fn take_looks(&mut self, now: Now) -> Vec<RecordId> {
        let mut taken = Vec::new();
        while now.mono_ms >= self.no_look_before
            && taken.len() < LOOKS_AT_ONCE
            && let Some((at, id)) = self.looks.first().copied()
            && at <= now.mono_ms
        {
            self.looks.pop_first();
            if let Some(record) = self.records.get_mut(id.0) {
                record.look_at = None;
            }
            if self.length(id) > 0 {
                self.look_again(id, now);
            }
            taken.push(id);
        }
        if !taken.is_empty() {
            self.no_look_before = now.mono_ms.saturating_add(LOOKS_PAUSE_MS);
        }
        taken
    }
}

fn names_no_limit(asked: Option<PermitsRequest>) -> bool {
    asked.is_some_and(|asked| asked.limit.is_none())
}

impl Places {
    fn get(&self, record: RecordId) -> Option<WaiterId> {
        match self {
            Self::One(only, waiter) => (*only == record).then_some(*waiter),
            Self::Several(places) => places.get(&record).copied(),
        }
    }

    /// Returns the place that was the only one.
    fn add(&mut self, record: RecordId, waiter: WaiterId) -> Option<(RecordId, WaiterId)> {
        match self {
            Self::One(only, first) => {
                let was_one = (*only, *first);
                *self = Self::Several(BTreeMap::from([was_one, (record, waiter)]));
                Some(was_one)
            }
            Self::Several(places) => {
                places.insert(record, waiter);
                None
            }
        }
    }

    /// Of one of several. Returns the place that is the only one from now on.
    fn remove(&mut self, record: RecordId) -> Option<(RecordId, WaiterId)> {
        let Self::Several(places) = self else {
            return None;
        };
        places.remove(&record);
        let (only, waiter) = match places.len() {
            1 => places.first_key_value()?,
            _ => return None,
        };
        let left = (*only, *waiter);
        *self = Self::One(left.0, left.1);
        Some(left)
    }

    fn all(&self) -> impl Iterator<Item = (RecordId, WaiterId)> + '_ {
        let (one, several) = match self {
            Self::One(only, waiter) => (Some((*only, *waiter)), None),
            Self::Several(places) => {
                let places = places.iter().map(|(record, waiter)| (*record, *waiter));
                (None, Some(places))
            }
        };
        one.into_iter().chain(several.into_iter().flatten())
    }
}

impl Waiter {
    /// How many joined the queue before it.
    pub(crate) fn order(&self) -> u64 {
        self.order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::unnoticed::LEFT_MAX;

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
            multi: None,
        };
        table.join(lock, &newcomer, NOW).unwrap().0
    }

    #[test]
    fn waiters_that_have_left_before_they_were_noticed_are_forgotten() {
        let mut table = LockTable::default();
        let waiters: Vec<_> = (0..10_000).map(|at| join(&mut table, at)).collect();
        // All but the first and the last, so that nobody who has left is first.
        for waiter in &waiters[1..9_999] {
            table.leave(*waiter);
        }
        assert!(table.unnoticed.len() <= 2 * 2 + LEFT_MAX);
        table.leave(waiters[0]);
        let first = table.first_unnoticed().map(|(_, first)| first);
        assert_eq!(first, Some(waiters[9_999]));
        table.leave(waiters[9_999]);
        assert_eq!(table.unnoticed.len(), 0);
    }
}
