//! The lines of waiters: one a lock, first come first served.
//!
//! A line exists while somebody waits. Joining, leaving from any place and being next take the same
//! time however many wait: a line is a chain through the arena of waiters, with the two neighbours
//! stored in each. A second chain runs through the waiters of one owner within a line, so that
//! CANCEL and ONCE find them without a search.

use crate::arena::{Arena, Id, ROOM_KEPT};
use crate::session::SessionId;
use crate::several::MultiId;
use crate::{Lease, Mode, Now, Wait};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

/// A lock's place in the keyspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockKey {
    /// The number of the database.
    pub db: i32,
    /// The key.
    pub name: Rc<[u8]>,
}

impl LockKey {
    /// The same, borrowed.
    pub fn as_ref(&self) -> LockRef<'_> {
        LockRef {
            db: self.db,
            name: &self.name,
        }
    }
}

impl From<LockRef<'_>> for LockKey {
    fn from(lock: LockRef<'_>) -> Self {
        Self {
            db: lock.db,
            name: Rc::from(lock.name),
        }
    }
}

/// A lock's place in the keyspace, borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRef<'a> {
    /// The number of the database.
    pub db: i32,
    /// The key.
    pub name: &'a [u8],
}

/// Where a waiter waits: the way in which it is told how its wait ended.
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
    pub(crate) lease: Lease,
    pub(crate) wait: Wait,
    pub(crate) seat: ReplyTarget,
    /// The session that the hold is to belong to, and with which the wait ends.
    pub(crate) session: Option<SessionId>,
    /// The wait for several locks that this is part of.
    pub(crate) joint: Option<MultiId>,
}

/// The name of a waiter. It stays invalid after the waiter has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(Id);

/// The name of a line. It stays invalid after the last waiter has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueId(Id);

#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) owner: Rc<[u8]>,
    pub(crate) mode: Mode,
    /// The wait for several locks that this is part of.
    pub(crate) joint: Option<MultiId>,
    pub(crate) lease: Lease,
    pub(crate) seat: ReplyTarget,
    pub(crate) session: Option<SessionId>,
    /// Monotonic, in milliseconds.
    pub(crate) since: i64,
    /// Monotonic, in milliseconds; none without limit.
    pub(crate) wait_end: Option<i64>,
    line: QueueId,
    /// How many joined any line before it. Those ahead of it in its line have smaller ones.
    order: u64,
    /// Its neighbours in the line.
    in_line: Links,
    /// Its neighbours among the waiters of its owner in the line.
    of_owner: Links,
}

#[derive(Clone, Copy, Debug, Default)]
struct Links {
    ahead: Option<WaiterId>,
    behind: Option<WaiterId>,
}

/// The two ends of a chain of waiters.
#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    first: Option<WaiterId>,
    last: Option<WaiterId>,
}

/// The lines in which an owner waits, with the ends of its chain in each: mostly one.
#[derive(Debug)]
enum Places {
    One(QueueId, Ends),
    Several(BTreeMap<QueueId, Ends>),
}

/// Which of the two chains through the waiters is meant.
#[derive(Clone, Copy)]
enum Chain {
    InLine,
    OfOwner,
}

#[derive(Debug)]
struct Line {
    lock: LockKey,
    ends: Ends,
    length: u32,
    /// How many of them wait for several locks.
    joints: u32,
    /// Those whose owner waits for another lock as well, by their order.
    multi_queue_waiters: BTreeMap<u64, WaiterId>,
    /// When the lease ends, as far as was heard of it, in milliseconds of the wall clock.
    ends_at: Option<i64>,
    /// When to look at the key again, in milliseconds of the wall clock.
    check_at: Option<i64>,
    /// Whether it stands among those to settle.
    touched: bool,
    /// Whether a newcomer found the lock free, and had the line settled first.
    asked_for: bool,
}

/// Not every change of a key is announced by an event that we can afford to listen to (`SET` over a
/// lock or `HDEL` of its owner are not), so a key is looked at this often while somebody waits for
/// it.
const RECHECK_MS: i64 = 1000;

/// All lines, their waiters and their deadlines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    waiters: Arena<Waiter>,
    arena: Arena<Line>,
    databases: BTreeMap<i32, HashMap<Rc<[u8]>, QueueId>>,
    wait_ends: BTreeSet<(i64, WaiterId)>,
    checks: BTreeSet<(i64, QueueId)>,
    to_settle: VecDeque<QueueId>,
    /// Lines to settle within the present step.
    to_settle_now: VecDeque<QueueId>,
    /// In which lines each owner waits, and where.
    waits: HashMap<Rc<[u8]>, Places>,
    joined: u64,
}

/// How many there are of everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Waiters in all lines.
    pub waiters: usize,
    /// Locks that somebody waits for.
    pub locks: usize,
    /// Sessions.
    pub sessions: usize,
    /// Events that their sessions have not fetched yet.
    pub unfetched_events: usize,
    /// Holds that belong to sessions.
    pub session_holds: usize,
}

/// A line as LIST shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueView {
    /// The lock's name.
    pub name: Rc<[u8]>,
    /// How many wait.
    pub waiters: u32,
    /// How long the first in line has waited, in milliseconds.
    pub longest_wait_ms: i64,
}

/// A waiter as INFO shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaiterView {
    /// Who waits.
    pub owner: Rc<[u8]>,
    /// For what.
    pub mode: Mode,
    /// The server's number of the client.
    pub client_id: u64,
    /// For how long, in milliseconds.
    pub waited_ms: i64,
    /// For how long yet, in milliseconds; -1 without limit.
    pub left_ms: i64,
}

impl Lines {
    /// How many wait, and for how many locks.
    pub(crate) fn gauges(&self) -> Gauges {
        Gauges {
            waiters: self.waiters.len(),
            locks: self.arena.len(),
            ..Gauges::default()
        }
    }

    /// The lines of a database, in no particular order.
    pub(crate) fn views(&self, db: i32, now: Now) -> impl Iterator<Item = QueueView> + '_ {
        let of_db = self
            .arena
            .iter()
            .map(|(_, line)| line)
            .filter(move |line| line.lock.db == db);
        of_db.map(move |line| QueueView {
            name: Rc::clone(&line.lock.name),
            waiters: line.length,
            longest_wait_ms: self
                .waiter(line.ends.first)
                .map_or(0, |first| now.mono_ms.saturating_sub(first.since)),
        })
    }

    /// All locks that somebody waits for.
    pub(crate) fn locks(&self) -> Vec<LockKey> {
        self.arena
            .iter()
            .map(|(_, line)| line.lock.clone())
            .collect()
    }

    /// Those who wait for a lock, in order.
    pub(crate) fn waiters_of(&self, lock: LockRef<'_>) -> impl Iterator<Item = &Waiter> {
        let first = self
            .find(lock)
            .and_then(|line| self.arena.get(line.0)?.ends.first);
        std::iter::successors(self.waiter(first), |at| self.waiter(at.in_line.behind))
    }

    /// A waiter's place in its line; 1 is next.
    pub(crate) fn position(&self, id: WaiterId) -> i64 {
        let ahead =
            std::iter::successors(self.waiter(Some(id)), |at| self.waiter(at.in_line.ahead));
        ahead.fold(0, |position: i64, _| position.saturating_add(1))
    }

    // --- Finding ---------------------------------------------------------------------------------

    /// The line for a lock. Where nobody waits for anything this hashes nothing: the common case.
    pub(crate) fn find(&self, lock: LockRef<'_>) -> Option<QueueId> {
        self.databases.get(&lock.db)?.get(lock.name).copied()
    }

    pub(crate) fn length(&self, line: QueueId) -> u32 {
        self.arena.get(line.0).map_or(0, |line| line.length)
    }

    pub(crate) fn lock_of(&self, line: QueueId) -> Option<&LockKey> {
        self.arena.get(line.0).map(|line| &line.lock)
    }

    pub(crate) fn line_of(&self, id: WaiterId) -> Option<QueueId> {
        self.waiters.get(id.0).map(|waiter| waiter.line)
    }

    /// Who is next in line.
    pub(crate) fn first(&self, line: QueueId) -> Option<(WaiterId, &Waiter)> {
        let id = self.arena.get(line.0)?.ends.first?;
        Some((id, self.waiters.get(id.0)?))
    }

    /// An owner's foremost waiter in a line.
    pub(crate) fn first_of(&self, line: QueueId, owner: &[u8]) -> Option<WaiterId> {
        self.ends_of(line, owner)?.first
    }

    /// An owner's waiters in a line, from the foremost on.
    pub(crate) fn all_of(
        &self,
        line: QueueId,
        owner: &[u8],
    ) -> impl Iterator<Item = (WaiterId, &Waiter)> {
        let with_id = |id: Option<WaiterId>| id.and_then(|id| Some((id, self.waiters.get(id.0)?)));
        std::iter::successors(with_id(self.first_of(line, owner)), move |(_, at)| {
            with_id(at.of_owner.behind)
        })
    }

    pub(crate) fn get(&self, id: WaiterId) -> Option<&Waiter> {
        self.waiters.get(id.0)
    }

    pub(crate) fn is_first(&self, id: WaiterId) -> bool {
        self.waiters
            .get(id.0)
            .is_some_and(|waiter| waiter.in_line.ahead.is_none())
    }

    /// The waits for several locks that stand in a line. Where there are none, as in nearly all,
    /// nobody is asked: one step follows another here for each reader that comes in.
    pub(crate) fn joints_in(&self, line: QueueId) -> Vec<WaiterId> {
        let line = self.arena.get(line.0).filter(|line| line.joints > 0);
        let first = line.and_then(|line| line.ends.first);
        let mut joints = Vec::new();
        let mut next = first;
        while let Some((id, waiter)) = next.and_then(|id| Some((id, self.waiters.get(id.0)?))) {
            joints.extend(waiter.joint.map(|_| id));
            next = waiter.in_line.behind;
        }
        joints
    }

    fn ends_of(&self, line: QueueId, owner: &[u8]) -> Option<Ends> {
        self.waits.get(owner)?.get(line).copied()
    }

    // --- Joining and leaving ---------------------------------------------------------------------

    /// A new waiter at the end of a lock's line. None only when four billion wait already.
    pub(crate) fn join(
        &mut self,
        lock: LockRef<'_>,
        newcomer: &Newcomer<'_>,
        now: Now,
    ) -> Option<(WaiterId, QueueId)> {
        let line_id = self.find(lock).or_else(|| self.open(lock))?;
        let known = self.waiting(newcomer.owner).cloned();
        let owner = known.unwrap_or_else(|| Rc::from(newcomer.owner));
        let order = self.joined;
        self.joined = order.saturating_add(1);
        let waiter = Waiter {
            owner: Rc::clone(&owner),
            mode: newcomer.mode,
            joint: newcomer.joint,
            lease: newcomer.lease,
            seat: newcomer.seat,
            session: newcomer.session,
            since: now.mono_ms,
            wait_end: newcomer.wait.end(now),
            line: line_id,
            order,
            in_line: Links::default(),
            of_owner: Links::default(),
        };
        let id = WaiterId(self.waiters.insert(waiter)?);
        self.wait_ends
            .extend(newcomer.wait.end(now).map(|end| (end, id)));

        let line = self.arena.get_mut(line_id.0)?;
        line.length = line.length.saturating_add(1);
        line.joints = line.joints.saturating_add(newcomer.joint.is_some().into());
        append(&mut self.waiters, Chain::InLine, &mut line.ends, id);
        self.waits_in(&owner, line_id, id);
        Some((id, line_id))
    }

    /// The waiter goes on waiting where it stands, for another connection or session and with new
    /// terms. Returns the seat and the session that it had.
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
        waiter.wait_end = newcomer.wait.end(now);
        self.wait_ends.extend(waiter.wait_end.map(|end| (end, id)));
        let seat = std::mem::replace(&mut waiter.seat, newcomer.seat);
        let session = std::mem::replace(&mut waiter.session, newcomer.session);
        Some((seat, session))
    }

    /// Takes a waiter out, from wherever it stands. With the last one the line is gone.
    pub(crate) fn leave(&mut self, id: WaiterId) -> Option<Waiter> {
        let waiter = self.waiters.remove(id.0)?;
        if let Some(end) = waiter.wait_end {
            self.wait_ends.remove(&(end, id));
        }
        let line = self.arena.get_mut(waiter.line.0)?;
        line.length = line.length.saturating_sub(1);
        line.joints = line.joints.saturating_sub(waiter.joint.is_some().into());
        unlink(
            &mut self.waiters,
            Chain::InLine,
            &mut line.ends,
            waiter.in_line,
        );
        line.multi_queue_waiters.remove(&waiter.order);
        let line_is_empty = line.length == 0;
        self.waits_no_more(&waiter);
        if line_is_empty {
            self.close(waiter.line);
        }
        Some(waiter)
    }

    fn open(&mut self, lock: LockRef<'_>) -> Option<QueueId> {
        let name: Rc<[u8]> = Rc::from(lock.name);
        let line = QueueId(self.arena.insert(Line {
            lock: LockKey {
                db: lock.db,
                name: Rc::clone(&name),
            },
            ends: Ends::default(),
            length: 0,
            joints: 0,
            multi_queue_waiters: BTreeMap::new(),
            ends_at: None,
            check_at: None,
            touched: false,
            asked_for: false,
        })?);
        self.databases
            .entry(lock.db)
            .or_default()
            .insert(name, line);
        Some(line)
    }

    fn close(&mut self, id: QueueId) {
        let Some(line) = self.arena.remove(id.0) else {
            return;
        };
        if let Some(check_at) = line.check_at {
            self.checks.remove(&(check_at, id));
        }
        let Some(names) = self.databases.get_mut(&line.lock.db) else {
            return;
        };
        names.remove(&line.lock.name);
        if names.is_empty() {
            names.shrink_to(ROOM_KEPT);
        }
    }

    // --- Who waits for more than one lock --------------------------------------------------------

    /// Whether anybody waits for another lock than this line's.
    pub(crate) fn any_beside(&self, line: Option<QueueId>) -> bool {
        self.arena.len() > usize::from(line.is_some())
    }

    /// The owner, if it waits for anything.
    pub(crate) fn waiting(&self, owner: &[u8]) -> Option<&Rc<[u8]>> {
        self.waits.get_key_value(owner).map(|(owner, _)| owner)
    }

    /// Where an owner waits.
    pub(crate) fn waits_of(&self, owner: &[u8]) -> impl Iterator<Item = QueueId> + '_ {
        self.waits.get(owner).into_iter().flat_map(Places::lines)
    }

    /// An owner's last waiter in a line; of the holder of the lock, who has what it waits for
    /// together with others, the last that waits for this lock alone.
    pub(crate) fn last_of(&self, line: QueueId, owner: &[u8], holds: bool) -> Option<&Waiter> {
        if !holds {
            return self.waiter(self.ends_of(line, owner)?.last);
        }
        let own = self.all_of(line, owner).map(|(_, waiter)| waiter);
        own.filter(|waiter| waiter.joint.is_none()).last()
    }

    /// The owners in a stretch of a line who wait for another lock as well.
    pub(crate) fn multi_queue_waiters(
        &self,
        line: QueueId,
        stretch: Range<u64>,
    ) -> impl Iterator<Item = &Rc<[u8]>> {
        let line = self.arena.get(line.0).filter(|_| !stretch.is_empty());
        let within = line
            .into_iter()
            .flat_map(move |line| line.multi_queue_waiters.range(stretch.clone()));
        within.filter_map(|(_, id)| self.waiter(Some(*id)).map(|waiter| &waiter.owner))
    }

    /// Whether an owner has a waiter in a line ahead of another one.
    pub(crate) fn is_ahead(&self, line: QueueId, owner: &[u8], of: &Waiter) -> bool {
        let first = self
            .first_of(line, owner)
            .and_then(|first| self.waiter(Some(first)));
        first.is_some_and(|first| first.order < of.order)
    }

    /// Puts a new waiter at the end of its owner's in the line.
    fn waits_in(&mut self, owner: &Rc<[u8]>, line: QueueId, newest: WaiterId) {
        let one = Places::One(line, Ends::default());
        let places = self.waits.entry(Rc::clone(owner)).or_insert(one);
        let was_one = places.only_other_than(line);
        append(
            &mut self.waiters,
            Chain::OfOwner,
            places.get_or_insert(line),
            newest,
        );
        if places.only().is_some() {
            return;
        }
        if let Some(first) = was_one {
            // With a second line the owner's waiters in the first count, too.
            self.mark_multi_queue(owner, first, true);
        }
        if let (Some(waiter), Some(line)) = (self.waiters.get(newest.0), self.arena.get_mut(line.0))
        {
            line.multi_queue_waiters.insert(waiter.order, newest);
        }
    }

    /// Takes a waiter that is gone out of its owner's.
    fn waits_no_more(&mut self, gone: &Waiter) {
        let Some(places) = self.waits.get_mut(&gone.owner) else {
            return;
        };
        let Some(ends) = places.get_mut(gone.line) else {
            return;
        };
        unlink(&mut self.waiters, Chain::OfOwner, ends, gone.of_owner);
        if ends.first.is_some() {
            return;
        }
        if places.only() == Some(gone.line) {
            self.waits.remove(&gone.owner);
            if self.waits.is_empty() {
                self.waits.shrink_to(ROOM_KEPT);
            }
            return;
        }
        places.remove(gone.line);
        if let Some(only) = places.only() {
            self.mark_multi_queue(&gone.owner, only, false);
        }
    }

    fn mark_multi_queue(&mut self, owner: &[u8], line: QueueId, waits: bool) {
        let mut next = self.first_of(line, owner);
        let Some(line) = self.arena.get_mut(line.0) else {
            return;
        };
        while let Some((id, waiter)) = next.and_then(|id| Some((id, self.waiters.get(id.0)?))) {
            if waits {
                line.multi_queue_waiters.insert(waiter.order, id);
            } else {
                line.multi_queue_waiters.remove(&waiter.order);
            }
            next = waiter.of_owner.behind;
        }
    }

    // --- Deadlines -------------------------------------------------------------------------------

    /// Looks at the key again just after its lease is over, and every [`RECHECK_MS`] until then. A
    /// check that is due earlier stays: it will find the lease as it is by then, and set the next
    /// one.
    pub(crate) fn check_after(&mut self, id: QueueId, ends_at: Option<i64>, now: Now) {
        let Some(line) = self.arena.get_mut(id.0) else {
            return;
        };
        line.ends_at = ends_at;
        let recheck_at = now.wall_ms().saturating_add(RECHECK_MS);
        // A key is expired when the clock is past its end, not when it is there.
        let check_at = ends_at.map_or(recheck_at, |end| end.saturating_add(1).min(recheck_at));
        if let Some(earlier) = line.check_at {
            if earlier <= check_at {
                return;
            }
            self.checks.remove(&(earlier, id));
        }
        line.check_at = Some(check_at);
        self.checks.insert((check_at, id));
    }

    /// Whether the lease that was last heard of is over.
    pub(crate) fn lease_over(&self, id: QueueId, now: Now) -> bool {
        let ends_at = self.arena.get(id.0).and_then(|line| line.ends_at);
        ends_at.is_some_and(|end| end < now.wall_ms())
    }

    /// Milliseconds until the nearest deadline; 0 if it has passed, none if there is none.
    pub(crate) fn next_deadline(&self, now: Now) -> Option<i64> {
        let wait = self
            .wait_ends
            .first()
            .map(|(end, _)| end.saturating_sub(now.mono_ms));
        let check = self
            .checks
            .first()
            .map(|(at, _)| at.saturating_sub(now.wall_ms()));
        wait.into_iter().chain(check).min().map(|left| left.max(0))
    }

    /// A waiter whose wait is over.
    pub(crate) fn overdue(&self, now: Now) -> Option<WaiterId> {
        self.wait_ends
            .first()
            .filter(|(end, _)| *end <= now.mono_ms)
            .map(|(_, id)| *id)
    }

    /// Marks the lines whose check is due.
    pub(crate) fn touch_due(&mut self, now: Now) {
        while let Some((_, id)) = self
            .checks
            .first()
            .copied()
            .filter(|(at, _)| *at <= now.wall_ms())
        {
            self.checks.pop_first();
            if let Some(line) = self.arena.get_mut(id.0) {
                line.check_at = None;
            }
            self.touch(id);
        }
    }

    // --- Free, and yet not to be had -------------------------------------------------------------

    /// A newcomer found the lock free: the line is settled before it asks again.
    pub(crate) fn set_asked_for(&mut self, id: QueueId) {
        if let Some(line) = self.arena.get_mut(id.0) {
            line.asked_for = true;
        }
    }

    /// Whether this is the newcomer that asks again.
    pub(crate) fn take_asked_for(&mut self, id: QueueId) -> bool {
        let line = self.arena.get_mut(id.0);
        line.is_some_and(|line| std::mem::take(&mut line.asked_for))
    }

    // --- Lines to settle -------------------------------------------------------------------------

    /// Marks a line: its key may have changed.
    pub(crate) fn touch(&mut self, id: QueueId) {
        if let Some(line) = self.arena.get_mut(id.0)
            && !std::mem::replace(&mut line.touched, true)
        {
            self.to_settle.push_back(id);
        }
    }

    /// Marks a line to be settled within the present step: what was just done allows the first in
    /// it to be granted as well.
    pub(crate) fn settle_now(&mut self, id: QueueId) {
        self.to_settle_now.push_back(id);
    }

    pub(crate) fn any_to_settle_now(&self) -> bool {
        !self.to_settle_now.is_empty()
    }

    /// The next line to settle within the present step.
    pub(crate) fn next_to_settle_now(&mut self) -> Option<QueueId> {
        while let Some(id) = self.to_settle_now.pop_front() {
            if self.arena.get(id.0).is_some() {
                return Some(id);
            }
        }
        None
    }

    /// Marks all lines of a database; of all databases if none is named.
    pub(crate) fn touch_all(&mut self, db: Option<i32>) {
        let of_db = |line: &Line| db.is_none_or(|db| line.lock.db == db);
        let ids: Vec<QueueId> = self
            .arena
            .iter()
            .filter(|(_, line)| of_db(line))
            .map(|(id, _)| QueueId(id))
            .collect();
        for id in ids {
            self.touch(id);
        }
    }

    /// Whether any line is marked.
    pub(crate) fn any_touched(&self) -> bool {
        !self.to_settle.is_empty()
    }

    /// The next marked line, no longer marked.
    pub(crate) fn next_touched(&mut self) -> Option<QueueId> {
        while let Some(id) = self.to_settle.pop_front() {
            if let Some(line) = self.arena.get_mut(id.0) {
                line.touched = false;
                return Some(id);
            }
        }
        None
    }

    fn waiter(&self, id: Option<WaiterId>) -> Option<&Waiter> {
        self.waiters.get(id?.0)
    }
}

impl Places {
    fn get(&self, line: QueueId) -> Option<&Ends> {
        match self {
            Self::One(only, ends) => (*only == line).then_some(ends),
            Self::Several(places) => places.get(&line),
        }
    }

    fn get_mut(&mut self, line: QueueId) -> Option<&mut Ends> {
        match self {
            Self::One(only, ends) => (*only == line).then_some(ends),
            Self::Several(places) => places.get_mut(&line),
        }
    }

    fn get_or_insert(&mut self, line: QueueId) -> &mut Ends {
        if let Self::One(only, ends) = *self
            && only != line
        {
            *self = Self::Several(BTreeMap::from([(only, ends)]));
        }
        match self {
            Self::One(_, ends) => ends,
            Self::Several(places) => places.entry(line).or_default(),
        }
    }

    fn remove(&mut self, line: QueueId) {
        let Self::Several(places) = self else { return };
        places.remove(&line);
        if let (1, Some((only, ends))) = (places.len(), places.first_key_value()) {
            *self = Self::One(*only, *ends);
        }
    }

    /// The line, if it is one.
    fn only(&self) -> Option<QueueId> {
        match self {
            Self::One(only, _) => Some(*only),
            Self::Several(_) => None,
        }
    }

    fn only_other_than(&self, line: QueueId) -> Option<QueueId> {
        self.only().filter(|only| *only != line)
    }

    fn lines(&self) -> impl Iterator<Item = QueueId> + '_ {
        let (one, several) = match self {
            Self::One(only, _) => (Some(*only), None),
            Self::Several(places) => (None, Some(places.keys().copied())),
        };
        one.into_iter().chain(several.into_iter().flatten())
    }
}

impl Waiter {
    /// The next in line, if it is the same owner's.
    pub(crate) fn own_behind(&self) -> Option<WaiterId> {
        self.in_line
            .behind
            .filter(|_| self.in_line.behind == self.of_owner.behind)
    }

    /// How many joined any line before it.
    pub(crate) fn order(&self) -> u64 {
        self.order
    }

    /// Whether it waits for a plain lock, and for nothing else.
    pub(crate) fn is_plain(&self) -> bool {
        self.mode == Mode::Plain && self.joint.is_none()
    }

    fn links(&mut self, chain: Chain) -> &mut Links {
        match chain {
            Chain::InLine => &mut self.in_line,
            Chain::OfOwner => &mut self.of_owner,
        }
    }
}

fn append(waiters: &mut Arena<Waiter>, chain: Chain, ends: &mut Ends, id: WaiterId) {
    let last = ends.last.replace(id);
    if let Some(waiter) = waiters.get_mut(id.0) {
        waiter.links(chain).ahead = last;
    }
    match last.and_then(|last| waiters.get_mut(last.0)) {
        Some(last) => last.links(chain).behind = Some(id),
        None => ends.first = Some(id),
    }
}

/// Joins the neighbours of a waiter that is gone.
fn unlink(waiters: &mut Arena<Waiter>, chain: Chain, ends: &mut Ends, gone: Links) {
    match gone.ahead.and_then(|ahead| waiters.get_mut(ahead.0)) {
        Some(ahead) => ahead.links(chain).behind = gone.behind,
        None => ends.first = gone.behind,
    }
    match gone.behind.and_then(|behind| waiters.get_mut(behind.0)) {
        Some(behind) => behind.links(chain).ahead = gone.ahead,
        None => ends.last = gone.ahead,
    }
}
