//! The lock: who gets it, who keeps it, who is next; what differs by kind is in `plain` and
//! `read_write`.
//!
//! Each method is one command's decision and is total: whatever is stored, there is an answer. The
//! effects are in the order in which they must be carried out: writes, then the unlock message,
//! then word to the waiters, so that nobody hears of a hold that is not written yet.

use crate::deadlock::DeadlockSearch;
use crate::ending::Endings;
use crate::hold::SessionHolds;
use crate::line::{Lines, LockKey, LockRef, Newcomer, QueueId, ReplyTarget, WaiterId};
use crate::metrics::{Counters, count};
use crate::request::{Acquire, Cancel, Release, Renew, WaitMode};
use crate::session::{Event, EventKind, LostReason, SessionId, Sessions};
use crate::several::ttl_of_others_ms;
use crate::several::{MultiId, MultiWaits};
use crate::stored::{Count, Stored, ttl_ms};
use crate::writer::WriterTokens;
use crate::{CommandError, Effect, Found, Grant, Kind, Mode, Now, Token, TokenMint, WaitOutcome};
use std::rc::Rc;

/// What ACQUIRE decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// The caller holds it.
    Held {
        /// Its hold count.
        count: i64,
        /// Its token.
        token: Token,
    },
    /// The caller does not hold it.
    NotHeld {
        /// As in [`Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// The lock is free, but others are in line: the driver settles the line with
    /// [`Locks::settle`], reads the key anew and asks again.
    SettleFirst,
    /// The caller is to wait: the driver sees that no deadlock comes of it, blocks its client if it
    /// is to be blocked, and calls [`Locks::join`].
    MustWait {
        /// When the present lease ends, in milliseconds of the wall clock; none if never.
        ends_at: Option<i64>,
        /// What to answer if the client cannot be blocked after all.
        ttl_ms: i64,
    },
}

/// The end of the lease of a lock that is free, and yet promised.
const FREE_BUT_PROMISED: i64 = i64::MIN;

/// A client that the driver has blocked.
#[derive(Clone, Copy, Debug)]
pub struct BlockedClient {
    /// The driver's own handle; the core only hands it back.
    pub handle: usize,
    /// The server's number of the client, shown by INFO.
    pub client_id: u64,
}

/// A waiter that has joined a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Its name.
    pub waiter: WaiterId,
    /// Its place in the line; 1 is next.
    pub position: i64,
}

/// What is to be decided within the present step, and what must be read for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Due {
    /// A line, with [`Locks::settle`]: its lock. The driver ends what must end there, and then
    /// asks for whom the key is to be read: [`Locks::first_owner`].
    Line(LockKey),
    /// A wait for several locks, with [`Locks::settle_joint`]: its locks, and its owner, for whom
    /// all the keys are to be read.
    MultiWait(MultiId, Rc<[LockKey]>, Rc<[u8]>),
}

/// A waiter whose wait is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// What it waited for.
    pub locks: Vec<LockKey>,
    /// Its owner, for whom the keys are to be read.
    pub owner: Rc<[u8]>,
}

/// All that is known about locks beside the keyspace.
#[derive(Debug, Default)]
pub struct Locks {
    pub(crate) lines: Lines,
    pub(crate) sessions: Sessions,
    pub(crate) holds: SessionHolds,
    /// Holds that must end as soon as a write is allowed.
    pub(crate) endings: Endings,
    pub(crate) counters: Counters,
    pub(crate) joints: MultiWaits,
    pub(crate) writers: WriterTokens,
    pub(crate) tokens: TokenMint,
}

impl Locks {
    // --- Commands --------------------------------------------------------------------------------

    /// RLOCK.ACQUIRE: take it, re-enter it, or hear that it is held.
    ///
    /// # Errors
    /// A session that nobody listens to; a key of another type or kind; a hold count that cannot
    /// grow; a line that is full.
    pub fn acquire(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Acquire<'_>,
        waiters_max: u32,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Acquired, CommandError> {
        let session = self.listened(request.session)?;
        let line = self.lines.find(lock);
        let is_settled = line.is_some_and(|line| self.lines.take_asked_for(line));
        if stored.is_free() {
            let Some(line) = line else {
                self.lose_holds(lock, None, now, effects);
                return Ok(self.take(lock, stored, request, session, now, effects));
            };
            // Those in line come first: a newcomer that got here between the end of a lease and the
            // moment at which the line hears of it must not overtake them.
            if !is_settled {
                self.lines.set_asked_for(line);
                return Ok(Acquired::SettleFirst);
            }
            self.check_kind_of_first(line, request.mode)?;
            return self.wait_for(Some(line), Some(FREE_BUT_PROMISED), 0, request, waiters_max);
        }
        self.check_kind(lock, line, &stored, request.mode.kind())?;
        match stored {
            Stored::ReadWrite(hash) => {
                self.acquire_read_write(lock, &hash, request, session, waiters_max, now, effects)
            }
            Stored::Plain(hash) => match hash.own {
                Some(own) => self.reenter(lock, &hash, own, request, session, now, effects),
                None => self.refuse(line, hash.ends_at, request, waiters_max, now),
            },
            Stored::Free | Stored::NoHolder | Stored::OtherType => Err(CommandError::WrongType),
        }
    }

    /// Whether the wait of an ACQUIRE could never end; none if there is nothing to search. An owner
    /// who is in line already and only takes its place over begins no new wait. And where nobody
    /// waits for another lock than this there is no circle: its holders wait for nothing, since
    /// what one holds is never waited for.
    pub fn search_deadlock(
        &self,
        lock: LockRef<'_>,
        request: &Acquire<'_>,
    ) -> Option<(DeadlockSearch, Found)> {
        let line = self.lines.find(lock);
        let place = line.and_then(|line| self.own_place(line, request));
        if place.is_some() || !self.lines.any_beside(line) {
            return None;
        }
        let keys = vec![LockKey::from(lock)];
        let mut search = DeadlockSearch::new(&self.lines, request.owner, keys, false);
        let found = search.go_on(&self.lines);
        Some((search, found))
    }

    /// Goes on with the search, now that the holders are known of the lock it asked about.
    pub fn search_on(&mut self, search: &mut DeadlockSearch, holders: &[Box<[u8]>]) -> Found {
        let found = search.holders(&self.lines, holders);
        if let Found::Circle(_) = found {
            count(&mut self.counters.deadlocks_refused);
        }
        found
    }

    /// The second half of an ACQUIRE that must wait, on its blocked client or for its session.
    ///
    /// With ONCE an owner who is in line already keeps its place, and whoever waited there for it
    /// is told so. Returns none when there is no room for another waiter at all.
    pub fn join(
        &mut self,
        lock: LockRef<'_>,
        request: &Acquire<'_>,
        client: Option<BlockedClient>,
        ends_at: Option<i64>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<Joined> {
        let session = self.listened(request.session).ok()?;
        let (wait, seat) = match (request.wait_mode, client) {
            (WaitMode::Block(wait), Some(BlockedClient { handle, client_id })) => {
                (wait, ReplyTarget::Client { handle, client_id })
            }
            (WaitMode::Queue(wait), _) => (wait, ReplyTarget::Session(session?)),
            _ => return None,
        };
        let newcomer = Newcomer {
            owner: request.owner,
            mode: request.mode,
            lease: request.lease,
            wait,
            seat,
            session,
            joint: None,
        };
        let line = self.lines.find(lock);
        let place = line.and_then(|line| self.own_place(line, request));
        let (waiter, position) = if let Some(waiter) = place {
            let ttl_ms = ttl_ms(ends_at, now);
            self.take_over(lock, waiter, &newcomer, ttl_ms, now, effects)?;
            (waiter, self.lines.position(waiter))
        } else {
            let (waiter, line) = self.lines.join(lock, &newcomer, now)?;
            let ends_at = ends_at.filter(|end| *end != FREE_BUT_PROMISED);
            self.lines.check_after(line, ends_at, now);
            (waiter, self.lines.length(line).into())
        };
        if let Some(session) = session {
            self.sessions.add_waiter(session, waiter);
        }
        self.note_peak();
        Some(Joined { waiter, position })
    }

    pub(crate) fn note_peak(&mut self) {
        let waiters = u64::try_from(self.lines.gauges().waiters).unwrap_or(u64::MAX);
        self.counters.waiters_peak = self.counters.waiters_peak.max(waiters);
    }

    /// RLOCK.RELEASE: give one hold back. The holds left; none if the owner does not hold it.
    ///
    /// # Errors
    /// A key of another type or kind; a hold count that is none.
    pub fn release(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<i64>, CommandError> {
        let left = self.give_back(lock, stored, request, now, effects)?;
        if left.is_some() {
            count(&mut self.counters.releases);
        }
        Ok(left)
    }

    /// RLOCK.RENEW: start the lease anew. Whether the owner still holds it.
    ///
    /// # Errors
    /// A session that nobody listens to; a key of another type or kind.
    pub fn renew(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Renew<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<bool, CommandError> {
        let session = self.listened(request.session)?;
        let own = self.own_hold(lock, stored, request.mode, request.token, request.owner)?;
        if own.is_none() {
            count(&mut self.counters.renewals_lost);
            return Ok(false);
        }
        count(&mut self.counters.renewals);
        self.sessions.confirm(lock, request.owner, request.mode);
        match stored {
            Stored::Plain(hash) => self.renew_plain(lock, &hash, request, session, now, effects),
            Stored::ReadWrite(hash) => {
                self.renew_read_write(lock, &hash, request, session, now, effects);
            }
            Stored::Free | Stored::NoHolder | Stored::OtherType => {}
        }
        Ok(true)
    }

    /// RLOCK.CANCEL: the owner's waiters leave the line. How many.
    pub fn cancel(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Cancel<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> i64 {
        let why = WaitOutcome::NotAcquired {
            ttl_ms: stored.ttl_ms(now),
        };
        let mut left: i64 = 0;
        while let Some(line) = self.lines.find(lock)
            && let Some(id) = self.lines.first_of(line, request.owner)
            && self.dismiss(id, why.clone(), effects).is_some()
        {
            count(&mut self.counters.cancels);
            left = left.saturating_add(1);
        }
        left
    }

    /// RLOCK.BREAK: end the present hold, whoever has it. Whether there was one.
    ///
    /// # Errors
    /// A key of another type or kind.
    pub fn break_hold(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<bool, CommandError> {
        let line = self.lines.find(lock);
        let held_as = match stored {
            Stored::Free | Stored::NoHolder => {
                self.touched(lock);
                return Ok(false);
            }
            Stored::OtherType => return Err(self.not_a_lock(lock, line)),
            Stored::Plain(_) => Mode::Plain,
            Stored::ReadWrite(hash) => {
                effects.push(Effect::DeleteAllTimeouts);
                hash.mode()
            }
        };
        count(&mut self.counters.breaks);
        self.writers.forget(lock);
        self.lose_holds(lock, Some(LostReason::Broken), now, effects);
        self.free(line, held_as, now, effects);
        Ok(true)
    }

    // --- What happens without a command ----------------------------------------------------------

    /// The key may have changed without us. Whether anybody waits for it, or has it in a session.
    pub fn touched(&mut self, lock: LockRef<'_>) -> bool {
        let line = self.lines.find(lock);
        if let Some(line) = line {
            self.lines.touch(line);
        }
        self.holds.touch_lock(lock) || line.is_some()
    }

    /// All keys of a database, or of all, may have changed without us.
    pub fn all_touched(&mut self, db: Option<i32>) {
        self.lines.touch_all(db);
        self.holds.touch_all(db);
    }

    /// A waiter's client is gone or was unblocked: it leaves the line. The lock it waited for; none
    /// if it was not in line.
    pub fn depart(&mut self, id: WaiterId) -> Option<LockKey> {
        let lock = self.lock_of(id)?;
        self.withdraw(id)?;
        count(&mut self.counters.departures);
        Some(lock)
    }

    /// The next waiter whose wait is over.
    pub fn next_timeout(&self, now: Now) -> Option<Overdue> {
        let id = self.lines.overdue(now)?;
        let waiter = self.lines.get(id)?;
        let owner = Rc::clone(&waiter.owner);
        let locks = match waiter.joint.and_then(|joint| self.joints.locks(joint)) {
            Some(locks) => locks.to_vec(),
            None => vec![self.lock_of(id)?],
        };
        Some(Overdue { locks, owner })
    }

    /// That waiter leaves the line, and is told what is left of the lease: of several the longest
    /// of those that others hold.
    pub fn time_out(&mut self, stored: &[Stored], now: Now, effects: &mut Vec<Effect>) {
        let Some(id) = self.lines.overdue(now) else {
            return;
        };
        let ttl_ms = match stored {
            [one] => one.ttl_ms(now),
            several => ttl_of_others_ms(several, now),
        };
        let why = WaitOutcome::NotAcquired { ttl_ms };
        if self.dismiss(id, why, effects).is_some() {
            count(&mut self.counters.timeouts);
        }
    }

    /// The next marked line: its lock.
    pub fn next_to_settle(&mut self) -> Option<LockKey> {
        let line = self.lines.next_touched()?;
        self.lines.lock_of(line).cloned()
    }

    /// Brings a line in agreement with its key, as read for the owner that is first in it: grants
    /// it if it is free, and otherwise looks again when the lease is over.
    pub fn settle(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some(line) = self.lines.find(lock) else {
            return;
        };
        if stored == Stored::OtherType {
            return self.dismiss_all(lock, &CommandError::WrongType, effects);
        }
        if stored.is_free() {
            self.lose_holds(lock, None, now, effects);
            if self.lines.lease_over(line, now) {
                count(&mut self.counters.expiries);
            }
        }
        if let Stored::ReadWrite(_) = stored {
            self.dismiss_joints(line, effects);
        }
        let first = self.lines.first(line);
        match first.map(|(_, first)| (first.joint, first.mode)) {
            None => {}
            Some((Some(joint), _)) => {
                self.joints.mark(joint, line);
                if stored.own(Mode::Plain).is_some() {
                    // Somebody else's script gave its owner this one.
                    let owner = self
                        .lines
                        .first(line)
                        .map(|(_, first)| Rc::clone(&first.owner));
                    self.holder_may_have_all(line, &owner.unwrap_or_default());
                }
                self.lines.check_after(line, stored.ends_at(), now);
            }
            Some((None, mode)) if stored.lets_in(mode) => {
                let message = Some(mode.message_when_free());
                self.hand_over(line, &stored, message, now, effects);
            }
            Some((None, mode)) => {
                self.lines.check_after(line, stored.ends_for(mode), now);
            }
        }
    }

    /// Whether anything else is to be decided within this step.
    pub fn is_anything_due(&self) -> bool {
        self.lines.any_to_settle_now() || self.joints.any_marked()
    }

    /// Who is first in line for a lock.
    pub fn first_owner(&self, lock: LockRef<'_>) -> Option<Rc<[u8]>> {
        let line = self.lines.find(lock)?;
        self.lines
            .first(line)
            .map(|(_, first)| Rc::clone(&first.owner))
    }

    /// How the first in line for a lock wants it.
    pub fn first_mode(&self, lock: LockRef<'_>) -> Option<Mode> {
        let line = self.lines.find(lock)?;
        self.lines.first(line).map(|(_, first)| first.mode)
    }

    /// What else is to be decided within this step.
    pub fn next_due(&mut self) -> Option<Due> {
        if let Some(line) = self.lines.next_to_settle_now() {
            return self.lines.lock_of(line).cloned().map(Due::Line);
        }
        self.joints.next_marked()
    }

    /// Instead of settling a line whose key cannot be looked at now.
    pub fn look_again(&mut self, lock: LockRef<'_>, now: Now) {
        let line = self.lines.find(lock);
        self.check_after(line, None, now);
    }

    /// Everybody in a line hears that there is nothing to wait for.
    pub fn dismiss_all(
        &mut self,
        lock: LockRef<'_>,
        refusal: &CommandError,
        effects: &mut Vec<Effect>,
    ) {
        while let Some(line) = self.lines.find(lock)
            && let Some((id, _)) = self.lines.first(line)
            && self
                .dismiss(id, WaitOutcome::Refused(refusal.clone()), effects)
                .is_some()
        {}
    }

    /// Lifts the token mark to this far ahead of the clock: at start, after loading, at promotion.
    pub fn start_tokens(&mut self, now: Now, guard_ms: i64) {
        self.tokens.start(now.wall_us, guard_ms);
    }

    /// The counters, to look at.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    // --- Decisions that commands share -----------------------------------------------------------

    fn take(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Acquired {
        if stored == Stored::NoHolder {
            effects.push(Effect::Free);
        }
        if request.mode != Mode::Plain {
            return self.take_read_write(lock, request, session, now, effects);
        }
        let token = self.tokens.mint(now.wall_us);
        self.take_plain(lock, request, session, token, now, effects)
    }

    pub(crate) fn refuse(
        &mut self,
        line: Option<QueueId>,
        ends_at: Option<i64>,
        request: &Acquire<'_>,
        waiters_max: u32,
        now: Now,
    ) -> Result<Acquired, CommandError> {
        self.check_after(line, ends_at, now);
        self.wait_for(line, ends_at, ttl_ms(ends_at, now), request, waiters_max)
    }

    /// The lock cannot be had now: the caller is told so, or is to wait.
    pub(crate) fn wait_for(
        &self,
        line: Option<QueueId>,
        ends_at: Option<i64>,
        ttl_ms: i64,
        request: &Acquire<'_>,
        waiters_max: u32,
    ) -> Result<Acquired, CommandError> {
        if request.wait_mode == WaitMode::None {
            return Ok(Acquired::NotHeld { ttl_ms });
        }
        let has_place = |line| self.own_place(line, request).is_some();
        if line.is_some_and(|line| self.lines.length(line) >= waiters_max && !has_place(line)) {
            return Err(CommandError::TooManyWaiters(waiters_max));
        }
        Ok(Acquired::MustWait { ends_at, ttl_ms })
    }

    pub(crate) fn give_back(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<i64>, CommandError> {
        let Some(own) = self.own_hold(lock, stored, request.mode, request.token, request.owner)?
        else {
            return Ok(None);
        };
        let Count::Valid(held) = own else {
            return Err(CommandError::HoldCountMalformed);
        };
        let left = match stored {
            Stored::Plain(hash) => self.leave_plain(lock, &hash, held, request, now, effects),
            Stored::ReadWrite(hash) => {
                self.leave_read_write(lock, &hash, held, request, now, effects)
            }
            Stored::Free | Stored::NoHolder | Stored::OtherType => 0,
        };
        Ok(Some(left))
    }

    /// A hold has ended that began with this token.
    pub(crate) fn record_hold(&mut self, token: Option<Token>, now: Now) {
        if let Some(since) = token.and_then(|token| self.tokens.minted_at(token)) {
            let held_us = now.wall_us.saturating_sub(since);
            self.counters.hold_ms.record(held_us.div_euclid(1000));
        }
    }

    /// Ends what was held in this mode: the next in line has the lock, or nobody. One unlock
    /// message either way.
    pub(crate) fn free(
        &mut self,
        line: Option<QueueId>,
        held_as: Mode,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        effects.push(Effect::Free);
        if let Some(line) = line
            && self.is_for_one_lock(line)
        {
            return self.hand_over(line, &Stored::Free, Some(held_as), now, effects);
        }
        effects.push(Effect::Publish(held_as));
        self.first_may_have_all(line);
    }

    /// Whether the first in line waits for no other lock with it.
    pub(crate) fn is_for_one_lock(&self, line: QueueId) -> bool {
        let first = self.lines.first(line);
        first.is_some_and(|(_, first)| first.joint.is_none())
    }

    /// The lock is free, and who is first in its line waits for others with it: perhaps it can have
    /// all now.
    fn first_may_have_all(&mut self, line: Option<QueueId>) {
        let Some(line) = line else { return };
        let first = self.lines.first(line);
        if let Some(joint) = first.and_then(|(_, first)| first.joint) {
            self.joints.mark(joint, line);
        }
    }

    /// Grants the first in line, which waits for this lock only and can have it. The message, if
    /// there is one to be sent, comes before word to the waiters and after what is written.
    fn hand_over(
        &mut self,
        line: QueueId,
        stored: &Stored,
        message: Option<Mode>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        if *stored == Stored::NoHolder {
            effects.push(Effect::Free);
        }
        let first = self.lines.first(line).map(|(id, first)| (id, first.mode));
        match (first, stored) {
            (None, _) => {}
            (Some((_, Mode::Plain)), Stored::Plain(hash)) => {
                let held = match hash.own {
                    Some(Count::Valid(held)) => held,
                    _ => 0,
                };
                self.hand_over_plain(line, Some((*hash, held)), message, now, effects);
            }
            (Some((_, Mode::Plain)), _) => {
                self.hand_over_plain(line, None, message, now, effects);
            }
            (Some((id, _)), Stored::ReadWrite(hash)) => {
                self.hand_over_read_write(id, line, Some(hash), None, now, effects);
            }
            (Some((id, _)), _) => {
                self.hand_over_read_write(id, line, None, message, now, effects);
            }
        }
    }

    /// The owner has a lock now: if it waits for it together with others, perhaps it can have all.
    pub(crate) fn holder_may_have_all(&mut self, line: QueueId, owner: &[u8]) {
        if self.joints.is_empty() {
            return;
        }
        for (_, waiter) in self.lines.all_of(line, owner) {
            if let Some(joint) = waiter.joint {
                self.joints.mark(joint, line);
            }
        }
    }

    pub(crate) fn tell_granted(
        &mut self,
        lock: &LockKey,
        seat: ReplyTarget,
        owner: Rc<[u8]>,
        count: i64,
        grant: Grant,
        effects: &mut Vec<Effect>,
    ) {
        match seat {
            ReplyTarget::Client { handle, .. } => {
                effects.push(Effect::Grant {
                    client: handle,
                    lock: lock.clone(),
                    owner,
                    count,
                    grant,
                });
            }
            ReplyTarget::Session(session) => {
                let event = Event {
                    kind: EventKind::Granted(grant),
                    lock: lock.clone(),
                    owner,
                };
                self.tell(session, event, effects);
            }
        }
    }

    pub(crate) fn count_waited(&mut self, waited_ms: i64) {
        self.counters.wait_ms.record(waited_ms);
        count(&mut self.counters.handovers);
    }

    /// Refuses what cannot be asked of what is stored.
    pub(crate) fn check_kind(
        &mut self,
        lock: LockRef<'_>,
        line: Option<QueueId>,
        stored: &Stored,
        asked: Kind,
    ) -> Result<(), CommandError> {
        if *stored == Stored::OtherType {
            return Err(self.not_a_lock(lock, line));
        }
        match stored.kind() {
            Some(kind) if kind != asked => Err(CommandError::WrongKind(kind)),
            _ => Ok(()),
        }
    }

    /// The kind of a free lock is that of the first in line.
    pub(crate) fn check_kind_of_first(
        &self,
        line: QueueId,
        mode: Mode,
    ) -> Result<(), CommandError> {
        let kind = self.lines.first(line).map(|(_, first)| first.mode.kind());
        match kind {
            Some(kind) if kind != mode.kind() => Err(CommandError::WrongKind(kind)),
            _ => Ok(()),
        }
    }

    /// The key was overwritten: those in line for what was there hear of it now, not at the old
    /// lease's end.
    fn not_a_lock(&mut self, lock: LockRef<'_>, line: Option<QueueId>) -> CommandError {
        if let Some(line) = line {
            self.lines.touch(line);
        }
        self.holds.touch_lock(lock);
        CommandError::WrongType
    }

    /// The owner's hold in this mode, if it has one and the token, where one is named, is its
    /// token.
    pub(crate) fn own_hold(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        mode: Mode,
        token: Option<Token>,
        owner: &[u8],
    ) -> Result<Option<Count>, CommandError> {
        let line = self.lines.find(lock);
        self.check_kind(lock, line, &stored, mode.kind())?;
        if stored.is_free() {
            // Those in line are granted, and those who lost it told, as soon as this command is
            // over.
            self.touched(lock);
        }
        let Some((count, stored_token)) = stored.own(mode) else {
            return Ok(None);
        };
        let own_token = match mode {
            Mode::Write => self.writers.of(lock, owner),
            Mode::Plain | Mode::Read => stored_token,
        };
        let matching = token.is_none() || token == own_token;
        Ok(matching.then_some(count))
    }

    /// The owner's place in the line, if the request is to take it over.
    pub(crate) fn own_place(&self, line: QueueId, request: &Acquire<'_>) -> Option<WaiterId> {
        if !request.once {
            return None;
        }
        let mut own = self.lines.all_of(line, request.owner);
        own.find(|(_, waiter)| waiter.joint.is_none() && waiter.mode == request.mode)
            .map(|(id, _)| id)
    }

    pub(crate) fn take_over(
        &mut self,
        lock: LockRef<'_>,
        waiter: WaiterId,
        newcomer: &Newcomer<'_>,
        ttl_ms: i64,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        let (seat, session) = self.lines.take_over(waiter, newcomer, now)?;
        if let Some(session) = session {
            self.sessions.remove_waiter(session, waiter);
        }
        count(&mut self.counters.cancels);
        if seat != newcomer.seat {
            let lock = LockKey::from(lock);
            let why = WaitOutcome::NotAcquired { ttl_ms };
            self.tell_dismissed(&lock, seat, Rc::from(newcomer.owner), why, effects);
        }
        Some(())
    }

    pub(crate) fn check_after(&mut self, line: Option<QueueId>, ends_at: Option<i64>, now: Now) {
        if let Some(line) = line {
            self.lines.check_after(line, ends_at, now);
        }
    }
}
