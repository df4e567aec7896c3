//! The re-entrant lock: who gets it, who keeps it, who is next.
//!
//! Each method is one command's decision and is total: whatever is stored, there is an answer. The
//! effects are in the order in which they must be carried out: writes, then the unlock message,
//! then word to the waiters, so that nobody hears of a hold that is not written yet.

use crate::deadlock::DeadlockSearch;
use crate::hold::SessionHolds;
use crate::life::Ending;
use crate::line::{LineId, Lines, LockKey, LockRef, Newcomer, Seat, Waiter, WaiterId};
use crate::metrics::{Counters, count};
use crate::request::{Acquire, Cancel, Patience, Release, Renew};
use crate::session::{Event, EventKind, LostReason, SessionId, Sessions};
use crate::stored::{Count, Hash, Kind, Stored};
use crate::{Dismissal, Effect, Found, Holder, Now, Refusal, Token, TokenMint};
use std::collections::VecDeque;
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
    /// The caller is to wait: the driver sees that no deadlock comes of it, blocks its client if it
    /// is to be blocked, and calls [`Locks::join`].
    MustWait {
        /// When the present lease ends, in milliseconds of the wall clock; none if never.
        ends_at: Option<i64>,
        /// What to answer if the client cannot be blocked after all.
        ttl_ms: i64,
    },
}

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

/// All that is known about locks beside the keyspace.
#[derive(Debug, Default)]
pub struct Locks {
    pub(crate) lines: Lines,
    pub(crate) sessions: Sessions,
    pub(crate) holds: SessionHolds,
    /// Holds that must end as soon as a write is allowed.
    pub(crate) endings: VecDeque<Ending>,
    pub(crate) counters: Counters,
    tokens: TokenMint,
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
    ) -> Result<Acquired, Refusal> {
        let session = self.listened(request.session)?;
        let line = self.lines.find(lock);
        let hash = match self.as_plain(lock, line, stored)? {
            Some(hash) => hash,
            None => match self.hand_over_free(lock, line, now, effects) {
                // The lock was free, but those in line come first: a newcomer that got here between
                // the end of a lease and the moment at which the line hears of it must not overtake
                // them.
                Some(hold) => hold.seen_by(request.owner),
                None => return Ok(self.take(lock, request, session, now, effects)),
            },
        };
        match hash.own {
            Some(own) => self.reenter(lock, &hash, own, request, session, now, effects),
            None => self.refuse(line, &hash, request, waiters_max, now),
        }
    }

    /// Whether the wait of an ACQUIRE could never end. An owner who is in line already and only
    /// takes its place over begins no new wait.
    pub fn search_deadlock(
        &self,
        lock: LockRef<'_>,
        request: &Acquire<'_>,
    ) -> (DeadlockSearch, Found) {
        let key = LockKey {
            db: lock.db,
            name: Rc::from(lock.name),
        };
        let mut search = DeadlockSearch::new(&self.lines, request.owner, key);
        let found = match self.own_place(lock, request) {
            Some(_) => Found::Nothing,
            None => search.go_on(&self.lines),
        };
        (search, found)
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
        let (wait, seat) = match (request.patience, client) {
            (Patience::Block(wait), Some(BlockedClient { handle, client_id })) => {
                (wait, Seat::Client { handle, client_id })
            }
            (Patience::Queue(wait), _) => (wait, Seat::Session(session?)),
            _ => return None,
        };
        let newcomer = Newcomer {
            owner: request.owner,
            lease: request.lease,
            wait,
            seat,
            session,
        };
        let (waiter, position) = if let Some(waiter) = self.own_place(lock, request) {
            self.take_over(lock, waiter, &newcomer, ends_at, now, effects)?;
            (waiter, self.lines.position(waiter))
        } else {
            let (waiter, line) = self.lines.join(lock, &newcomer, now)?;
            self.lines.check_after(line, ends_at, now);
            (waiter, self.lines.length(line).into())
        };
        if let Some(session) = session {
            self.sessions.add_waiter(session, waiter);
        }
        let waiters = u64::try_from(self.lines.crowd().waiters).unwrap_or(u64::MAX);
        self.counters.waiters_peak = self.counters.waiters_peak.max(waiters);
        Some(Joined { waiter, position })
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
    ) -> Result<Option<i64>, Refusal> {
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
    ) -> Result<bool, Refusal> {
        let session = self.listened(request.session)?;
        let line = self.lines.find(lock);
        let Some((hash, _)) = self.own_hold(lock, line, stored, request.token)? else {
            count(&mut self.counters.renewals_lost);
            return Ok(false);
        };
        count(&mut self.counters.renewals);
        let ends_at = hash.lease_end(request.lease.end(now));
        if ends_at.is_some() {
            effects.push(Effect::Write {
                holder: Holder::Caller,
                count: None,
                token: None,
                ends_at,
            });
            self.check_after(line, ends_at, now);
        }
        self.sessions.confirm(lock, request.owner);
        self.bind(
            lock,
            request.owner,
            session,
            hash.token,
            ends_at.or(hash.ends_at),
        );
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
        let why = Dismissal::NotAcquired {
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
    ) -> Result<bool, Refusal> {
        let line = self.lines.find(lock);
        if self.as_plain(lock, line, stored)?.is_none() {
            self.hand_over_free(lock, line, now, effects);
            return Ok(false);
        }
        count(&mut self.counters.breaks);
        self.lose_holds(lock, Some(LostReason::Broken), now, effects);
        self.free(line, now, effects);
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

    /// The lock of a waiter whose wait is over.
    pub fn next_timeout(&self, now: Now) -> Option<LockKey> {
        self.lock_of(self.lines.overdue(now)?)
    }

    /// The waiter whose wait is over leaves the line, and is told what is left of the lease.
    pub fn time_out(&mut self, stored: Stored, now: Now, effects: &mut Vec<Effect>) {
        let Some(id) = self.lines.overdue(now) else {
            return;
        };
        let why = Dismissal::NotAcquired {
            ttl_ms: stored.ttl_ms(now),
        };
        if self.dismiss(id, why, effects).is_some() {
            count(&mut self.counters.timeouts);
        }
    }

    /// The next marked line: its lock, and the owner that is first in it, for whom the driver is to
    /// read the key.
    pub fn next_to_settle(&mut self) -> Option<(LockKey, Rc<[u8]>)> {
        let line = self.lines.next_touched()?;
        let lock = self.lines.lock_of(line).cloned()?;
        let (_, first) = self.lines.first(line)?;
        Some((lock, Rc::clone(&first.owner)))
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
        match stored {
            Stored::Free => {
                self.hand_over_free(lock, Some(line), now, effects);
            }
            Stored::OtherType => self.dismiss_all(lock, &Refusal::WrongType, effects),
            Stored::Held(hash) => match (hash.kind, hash.own) {
                // Somebody else's script made the first in line the holder: what one holds is
                // re-entered, never waited for.
                (Kind::Plain, Some(Count::Valid(held))) if Count::next(held).is_some() => {
                    self.hand_over(line, Some((hash, held)), now, effects);
                }
                _ => self.lines.check_after(line, hash.ends_at, now),
            },
        }
    }

    /// Instead of settling a line whose key cannot be looked at now.
    pub fn look_again(&mut self, lock: LockRef<'_>, now: Now) {
        let line = self.lines.find(lock);
        self.check_after(line, None, now);
    }

    /// Everybody in a line hears that there is nothing to wait for.
    pub fn dismiss_all(&mut self, lock: LockRef<'_>, refusal: &Refusal, effects: &mut Vec<Effect>) {
        while let Some(line) = self.lines.find(lock)
            && let Some((id, _)) = self.lines.first(line)
            && self
                .dismiss(id, Dismissal::Refused(refusal.clone()), effects)
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
        request: &Acquire<'_>,
        session: Option<SessionId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Acquired {
        let token = self.tokens.mint(now.wall_us);
        let ends_at = Some(request.lease.end(now));
        count(&mut self.counters.grants);
        effects.push(Effect::Write {
            holder: Holder::Caller,
            count: Some(1),
            token: Some(token),
            ends_at,
        });
        self.bind(lock, request.owner, session, Some(token), ends_at);
        Acquired::Held { count: 1, token }
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one decision, all of them needed"
    )]
    fn reenter(
        &mut self,
        lock: LockRef<'_>,
        hash: &Hash,
        own: Count,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Acquired, Refusal> {
        let Count::Valid(held) = own else {
            return Err(Refusal::HoldCountMalformed);
        };
        let entered = if request.once {
            Some(held)
        } else {
            Count::next(held)
        };
        let entered = entered.ok_or(Refusal::HoldCountOverflow)?;
        // A hold that a script took has no token; one of ours keeps the one it was granted with.
        let token = hash.token.unwrap_or_else(|| self.tokens.mint(now.wall_us));
        let ends_at = hash.lease_end(request.lease.end(now));
        count(&mut self.counters.reentries);
        effects.push(Effect::Write {
            holder: Holder::Caller,
            count: (entered != held).then_some(entered),
            token: hash.token.is_none().then_some(token),
            ends_at,
        });
        let ends_at = ends_at.or(hash.ends_at);
        self.check_after(self.lines.find(lock), ends_at, now);
        if request.once {
            self.sessions.confirm(lock, request.owner);
        }
        self.bind(lock, request.owner, session, Some(token), ends_at);
        Ok(Acquired::Held {
            count: entered,
            token,
        })
    }

    fn refuse(
        &mut self,
        line: Option<LineId>,
        hash: &Hash,
        request: &Acquire<'_>,
        waiters_max: u32,
        now: Now,
    ) -> Result<Acquired, Refusal> {
        self.check_after(line, hash.ends_at, now);
        let ttl_ms = ttl_ms(hash.ends_at, now);
        if request.patience == Patience::None {
            return Ok(Acquired::NotHeld { ttl_ms });
        }
        let has_place = |line| request.once && self.lines.first_of(line, request.owner).is_some();
        if line.is_some_and(|line| self.lines.length(line) >= waiters_max && !has_place(line)) {
            return Err(Refusal::TooManyWaiters(waiters_max));
        }
        Ok(Acquired::MustWait {
            ends_at: hash.ends_at,
            ttl_ms,
        })
    }

    pub(crate) fn give_back(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<i64>, Refusal> {
        let line = self.lines.find(lock);
        let Some((hash, own)) = self.own_hold(lock, line, stored, request.token)? else {
            return Ok(None);
        };
        let Count::Valid(held) = own else {
            return Err(Refusal::HoldCountMalformed);
        };
        if held > 1 {
            let left = held.saturating_sub(1);
            let ends_at = request
                .lease
                .and_then(|lease| hash.lease_end(lease.end(now)));
            effects.push(Effect::Write {
                holder: Holder::Caller,
                count: Some(left),
                token: None,
                ends_at,
            });
            let ends_at = ends_at.or(hash.ends_at);
            self.check_after(line, ends_at, now);
            self.bind(lock, request.owner, None, hash.token, ends_at);
            return Ok(Some(left));
        }
        self.end_hold(lock, &hash, request.owner, now, effects);
        Ok(Some(0))
    }

    /// The owner's hold is over, whatever its count.
    pub(crate) fn end_hold(
        &mut self,
        lock: LockRef<'_>,
        hash: &Hash,
        owner: &[u8],
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(since) = hash.token.and_then(|token| self.tokens.minted_at(token)) {
            self.counters
                .hold_ms
                .record(now.wall_us.saturating_sub(since).div_euclid(1000));
        }
        self.unbind(lock, owner);
        if hash.others {
            effects.push(Effect::Leave);
        } else {
            self.free(self.lines.find(lock), now, effects);
        }
    }

    /// Ends the hold: the next in line has the lock, or nobody. One unlock message either way.
    fn free(&mut self, line: Option<LineId>, now: Now, effects: &mut Vec<Effect>) {
        effects.push(Effect::Free);
        let handed_over = line.and_then(|line| self.hand_over(line, None, now, effects));
        if handed_over.is_none() {
            effects.push(Effect::Publish);
        }
    }

    /// As [`hand_over`](Self::hand_over), for a lock that was found free: what sessions had of it
    /// is lost.
    fn hand_over_free(
        &mut self,
        lock: LockRef<'_>,
        line: Option<LineId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<Hold> {
        self.lose_holds(lock, None, now, effects);
        let line = line?;
        if self.lines.lease_over(line, now) {
            count(&mut self.counters.expiries);
        }
        self.hand_over(line, None, now, effects)
    }

    /// Grants the first in line, and with it the waiters of the same owner directly behind it, on
    /// top of the holds that this owner has in `present`. None if nobody waits.
    fn hand_over(
        &mut self,
        line: LineId,
        present: Option<(Hash, i64)>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<Hold> {
        let lock = self.lines.lock_of(line)?.clone();
        let owner = Rc::clone(&self.lines.first(line)?.1.owner);
        let (hash, entered_before) = present.unzip();
        let kept = hash.and_then(|hash| hash.token);
        let token = kept.unwrap_or_else(|| self.tokens.mint(now.wall_us));
        let mut hold = Hold {
            owner,
            count: entered_before.unwrap_or(0),
            token,
            ends_at: None,
        };
        let mut session = None;
        let write_at = effects.len();
        while let Some(entered) = Count::next(hold.count) {
            let (id, followed) = self
                .lines
                .first(line)
                .map(|(id, first)| (id, first.followed_by_own()))?;
            let waiter = self.leave(id)?;
            let lease_end = waiter.lease.end(now);
            hold.count = entered;
            hold.ends_at = hash.map_or(Some(lease_end), |hash| hash.lease_end(lease_end));
            session = waiter.session.or(session);
            self.count_hand_over(entered, now.mono_ms.saturating_sub(waiter.since));
            self.tell_granted(&lock, waiter, entered, token, effects);
            if !followed {
                break;
            }
        }
        let write = Effect::Write {
            holder: Holder::Waiter(Rc::clone(&hold.owner)),
            count: Some(hold.count),
            token: kept.is_none().then_some(token),
            ends_at: hold.ends_at,
        };
        // The write and the message come before word to the waiters.
        effects.splice(write_at..write_at, [write, Effect::Publish]);
        // Where others are in the hash, their longer lease may have stayed.
        hold.ends_at = hold.ends_at.or_else(|| hash?.ends_at);
        self.lines.check_after(line, hold.ends_at, now);
        self.bind(
            lock.as_ref(),
            &hold.owner,
            session,
            Some(token),
            hold.ends_at,
        );
        Some(hold)
    }

    fn tell_granted(
        &mut self,
        lock: &LockKey,
        waiter: Waiter,
        count: i64,
        token: Token,
        effects: &mut Vec<Effect>,
    ) {
        let owner = waiter.owner;
        match waiter.seat {
            Seat::Client { handle, .. } => {
                effects.push(Effect::Grant {
                    client: handle,
                    owner,
                    count,
                    token,
                });
            }
            Seat::Session(session) => {
                let kind = EventKind::Granted(token);
                self.tell(
                    session,
                    Event {
                        kind,
                        lock: lock.clone(),
                        owner,
                    },
                    effects,
                );
            }
        }
    }

    fn count_hand_over(&mut self, entered: i64, waited_ms: i64) {
        self.counters.wait_ms.record(waited_ms);
        count(&mut self.counters.handovers);
        count(if entered == 1 {
            &mut self.counters.grants
        } else {
            &mut self.counters.reentries
        });
    }

    /// The hash of a plain lock; none if the lock is free.
    fn as_plain(
        &mut self,
        lock: LockRef<'_>,
        line: Option<LineId>,
        stored: Stored,
    ) -> Result<Option<Hash>, Refusal> {
        match stored {
            Stored::Free => Ok(None),
            Stored::Held(hash) if hash.kind == Kind::Plain => Ok(Some(hash)),
            Stored::Held(_) => Err(Refusal::WrongKind),
            Stored::OtherType => {
                // Those in line for what was overwritten hear of it now, not at the old lease's
                // end.
                if let Some(line) = line {
                    self.lines.touch(line);
                }
                self.holds.touch_lock(lock);
                Err(Refusal::WrongType)
            }
        }
    }

    /// The owner's hold, if it has one and the token, where one is named, is its token.
    fn own_hold(
        &mut self,
        lock: LockRef<'_>,
        line: Option<LineId>,
        stored: Stored,
        token: Option<Token>,
    ) -> Result<Option<(Hash, Count)>, Refusal> {
        let hash = self.as_plain(lock, line, stored)?;
        if hash.is_none() {
            // Found free: those in line are granted, and those who lost it told, as soon as this
            // command is over.
            self.touched(lock);
        }
        let matching = hash.filter(|hash| token.is_none() || token == hash.token);
        Ok(matching.and_then(|hash| Some((hash, hash.own?))))
    }

    /// The owner's place in the lock's line, if the request is to take it over.
    fn own_place(&self, lock: LockRef<'_>, request: &Acquire<'_>) -> Option<WaiterId> {
        let line = self.lines.find(lock).filter(|_| request.once)?;
        self.lines.first_of(line, request.owner)
    }

    fn take_over(
        &mut self,
        lock: LockRef<'_>,
        waiter: WaiterId,
        newcomer: &Newcomer<'_>,
        ends_at: Option<i64>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        let (seat, session) = self.lines.take_over(waiter, newcomer, now)?;
        if let Some(session) = session {
            self.sessions.remove_waiter(session, waiter);
        }
        count(&mut self.counters.cancels);
        if seat != newcomer.seat {
            let lock = LockKey {
                db: lock.db,
                name: Rc::from(lock.name),
            };
            let why = Dismissal::NotAcquired {
                ttl_ms: ttl_ms(ends_at, now),
            };
            self.tell_dismissed(&lock, seat, Rc::from(newcomer.owner), why, effects);
        }
        Some(())
    }

    fn check_after(&mut self, line: Option<LineId>, ends_at: Option<i64>, now: Now) {
        if let Some(line) = line {
            self.lines.check_after(line, ends_at, now);
        }
    }
}

/// A hold that was just handed over.
struct Hold {
    owner: Rc<[u8]>,
    count: i64,
    token: Token,
    ends_at: Option<i64>,
}

impl Hold {
    fn seen_by(&self, owner: &[u8]) -> Hash {
        let own = *self.owner == *owner;
        Hash {
            kind: Kind::Plain,
            own: own.then_some(Count::Valid(self.count)),
            token: Some(self.token),
            others: !own,
            ends_at: self.ends_at,
        }
    }
}

impl Hash {
    /// The key's expiry when this owner's lease is to end then: never less than what the others in
    /// the same hash have, of whom there are none unless somebody else wrote it. None if it stays.
    fn lease_end(&self, wanted: i64) -> Option<i64> {
        match self.ends_at {
            _ if !self.others => Some(wanted),
            Some(end) => (wanted > end).then_some(wanted),
            None => None,
        }
    }
}

fn ttl_ms(ends_at: Option<i64>, now: Now) -> i64 {
    ends_at.map_or(-1, |end| end.saturating_sub(now.wall_ms()).max(0))
}
