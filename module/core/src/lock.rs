//! The re-entrant lock: who gets it, who keeps it, who is next.
//!
//! Each method is one command's decision and is total: whatever is stored, there is an answer. The
//! effects are in the order in which they must be carried out: writes, then the unlock message,
//! then word to the waiters, so that nobody hears of a hold that is not written yet.

use crate::line::{LineId, Lines, LockKey, LockRef, Seat, Waiter, WaiterId};
use crate::metrics::{Counters, count};
use crate::request::{Acquire, Cancel, Release, Renew};
use crate::stored::{Count, Hash, Kind, Stored};
use crate::{Dismissal, Effect, Holder, Now, Refusal, Token, TokenMint};
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
    /// The caller is to wait: the driver blocks its client and calls [`Locks::join`].
    MustWait {
        /// When the present lease ends, in milliseconds of the wall clock; none if never.
        ends_at: Option<i64>,
        /// What to answer if the client cannot be blocked after all.
        ttl_ms: i64,
    },
}

/// All that is known about locks beside the keyspace.
#[derive(Debug, Default)]
pub struct Locks {
    lines: Lines,
    tokens: TokenMint,
    counters: Counters,
}

impl Locks {
    // --- Commands --------------------------------------------------------------------------------

    /// RLOCK.ACQUIRE: take it, re-enter it, or hear that it is held.
    ///
    /// # Errors
    /// A key of another type or kind; a hold count that cannot grow; a line that is full.
    pub fn acquire(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Acquire<'_>,
        waiters_max: u32,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Acquired, Refusal> {
        let line = self.lines.find(lock);
        let hash = match (self.as_plain(line, stored)?, line) {
            (Some(hash), _) => hash,
            (None, None) => return Ok(self.take(request, now, effects)),
            // The lock is free, but those in line come first: a newcomer that got here between the
            // end of a lease and the moment at which the line hears of it must not overtake them.
            (None, Some(line)) => match self.hand_over(line, None, now, effects) {
                Some(hold) => hold.seen_by(request.owner),
                None => return Ok(self.take(request, now, effects)),
            },
        };
        match hash.own {
            Some(own) => self.reenter(line, &hash, own, request, now, effects),
            None => self.refuse(line, &hash, request, waiters_max, now),
        }
    }

    /// The second half of an ACQUIRE that must wait: its client is blocked and waits on this seat.
    ///
    /// With ONCE an owner who is in line already keeps its place, and the seat it had is dismissed.
    /// Returns none when there is no room for another waiter at all.
    pub fn join(
        &mut self,
        lock: LockRef<'_>,
        request: &Acquire<'_>,
        seat: Seat,
        ends_at: Option<i64>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<WaiterId> {
        let wait = request.block?;
        let line = self.lines.find(lock).filter(|_| request.once);
        if let Some(id) = line.and_then(|line| self.lines.first_of(line, request.owner)) {
            let seat = self.lines.take_over(id, request.lease, wait, seat, now)?;
            let ttl_ms = ttl_ms(ends_at, now);
            effects.push(Effect::Dismiss {
                seat,
                why: Dismissal::NotAcquired { ttl_ms },
            });
            count(&mut self.counters.cancels);
            return Some(id);
        }
        let (id, line) = self
            .lines
            .join(lock, request.owner, request.lease, wait, seat, now)?;
        self.lines.check_after(line, ends_at, now);
        let waiters = u64::try_from(self.lines.crowd().waiters).unwrap_or(u64::MAX);
        self.counters.waiters_peak = self.counters.waiters_peak.max(waiters);
        Some(id)
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
    /// A key of another type or kind.
    pub fn renew(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Renew<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<bool, Refusal> {
        let line = self.lines.find(lock);
        let Some((hash, _)) = self.own_hold(line, stored, request.token)? else {
            count(&mut self.counters.renewals_lost);
            return Ok(false);
        };
        count(&mut self.counters.renewals);
        if let Some(ends_at) = hash.lease_end(request.lease.end(now)) {
            effects.push(Effect::Write {
                holder: Holder::Caller,
                count: None,
                token: None,
                ends_at: Some(ends_at),
            });
            self.check_after(line, Some(ends_at), now);
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
        let Some(line) = self.lines.find(lock) else {
            return 0;
        };
        let why = Dismissal::NotAcquired {
            ttl_ms: stored.ttl_ms(now),
        };
        let mut left: i64 = 0;
        while let Some(waiter) = self
            .lines
            .first_of(line, request.owner)
            .and_then(|id| self.withdraw(id))
        {
            effects.push(Effect::Dismiss {
                seat: waiter.seat,
                why: why.clone(),
            });
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
        if self.as_plain(line, stored)?.is_none() {
            if let Some(line) = line {
                self.hand_over(line, None, now, effects);
            }
            return Ok(false);
        }
        count(&mut self.counters.breaks);
        self.free(line, now, effects);
        Ok(true)
    }

    // --- What happens without a command ----------------------------------------------------------

    /// A waiter is gone: its connection closed, or it was unblocked. The lock it waited for; none
    /// if it was not in line.
    pub fn depart(&mut self, id: WaiterId) -> Option<LockKey> {
        let lock = self
            .lines
            .line_of(id)
            .and_then(|line| self.lines.lock_of(line))
            .cloned()?;
        self.withdraw(id)?;
        count(&mut self.counters.departures);
        Some(lock)
    }

    /// A grant could not be delivered and is given back: a release that no client asked for.
    pub fn take_back(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        owner: &[u8],
        token: Token,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let request = Release {
            key: lock.name,
            owner,
            token: Some(token),
            lease: None,
        };
        if let Ok(Some(_)) = self.give_back(lock, stored, &request, now, effects) {
            count(&mut self.counters.grants_taken_back);
        }
    }

    /// The key may have changed without us. Whether anybody waits for it.
    pub fn touched(&mut self, lock: LockRef<'_>) -> bool {
        let line = self.lines.find(lock);
        if let Some(line) = line {
            self.lines.touch(line);
        }
        line.is_some()
    }

    /// All keys of a database, or of all, may have changed without us.
    pub fn all_touched(&mut self, db: Option<i32>) {
        self.lines.touch_all(db);
    }

    /// Milliseconds until something is due; none if nothing ever is.
    pub fn next_deadline(&self, now: Now) -> Option<i64> {
        if self.lines.any_touched() {
            Some(0)
        } else {
            self.lines.next_deadline(now)
        }
    }

    /// Time has passed: marks the lines whose key is to be looked at.
    pub fn passed(&mut self, now: Now) {
        self.lines.touch_due(now);
    }

    /// The next waiter whose wait is over, out of the line: its lock and its seat. The driver reads
    /// what is left of the lease and tells it.
    pub fn next_timeout(&mut self, now: Now) -> Option<(LockKey, Seat)> {
        let id = self.lines.overdue(now)?;
        let lock = self
            .lines
            .line_of(id)
            .and_then(|line| self.lines.lock_of(line))
            .cloned()?;
        let waiter = self.withdraw(id)?;
        count(&mut self.counters.timeouts);
        Some((lock, waiter.seat))
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
                self.hand_over(line, None, now, effects);
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
        let Some(line) = self.lines.find(lock) else {
            return;
        };
        while let Some(id) = self.lines.first(line).map(|(id, _)| id) {
            let Some(waiter) = self.lines.leave(id) else {
                return;
            };
            let why = Dismissal::Refused(refusal.clone());
            effects.push(Effect::Dismiss {
                seat: waiter.seat,
                why,
            });
        }
    }

    /// Lifts the token mark to this far ahead of the clock: at start, after loading, at promotion.
    pub fn start_tokens(&mut self, now: Now, guard_ms: i64) {
        self.tokens.start(now.wall_us, guard_ms);
    }

    /// The lines, to look at.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// The counters, to look at.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    // --- Decisions that commands share -----------------------------------------------------------

    fn take(&mut self, request: &Acquire<'_>, now: Now, effects: &mut Vec<Effect>) -> Acquired {
        let token = self.tokens.mint(now.wall_us);
        count(&mut self.counters.grants);
        effects.push(Effect::Write {
            holder: Holder::Caller,
            count: Some(1),
            token: Some(token),
            ends_at: Some(request.lease.end(now)),
        });
        Acquired::Held { count: 1, token }
    }

    fn reenter(
        &mut self,
        line: Option<LineId>,
        hash: &Hash,
        own: Count,
        request: &Acquire<'_>,
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
        self.check_after(line, ends_at.or(hash.ends_at), now);
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
        if request.block.is_none() {
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

    /// Takes a waiter out that gets nothing. Who is first now may be one whose owner holds the
    /// lock, and what one holds is re-entered, never waited for: the line is to be looked at.
    fn withdraw(&mut self, id: WaiterId) -> Option<Waiter> {
        let line = self.lines.line_of(id)?;
        let was_first = self.lines.first(line).is_some_and(|(first, _)| first == id);
        let waiter = self.lines.leave(id)?;
        if was_first {
            self.lines.touch(line);
        }
        Some(waiter)
    }

    fn give_back(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<i64>, Refusal> {
        let line = self.lines.find(lock);
        let Some((hash, own)) = self.own_hold(line, stored, request.token)? else {
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
            self.check_after(line, ends_at.or(hash.ends_at), now);
            return Ok(Some(left));
        }
        if let Some(since) = hash.token.and_then(|token| self.tokens.minted_at(token)) {
            self.counters
                .hold_ms
                .record(now.wall_us.saturating_sub(since).div_euclid(1000));
        }
        if hash.others {
            effects.push(Effect::Leave);
        } else {
            self.free(line, now, effects);
        }
        Ok(Some(0))
    }

    /// Ends the hold: the next in line has the lock, or nobody. One unlock message either way.
    fn free(&mut self, line: Option<LineId>, now: Now, effects: &mut Vec<Effect>) {
        effects.push(Effect::Free);
        let handed_over = line.and_then(|line| self.hand_over(line, None, now, effects));
        if handed_over.is_none() {
            effects.push(Effect::Publish);
        }
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
        let owner = Rc::clone(&self.lines.first(line)?.1.owner);
        if present.is_none() && self.lines.lease_over(line, now) {
            count(&mut self.counters.expiries);
        }
        let (hash, entered_before) = present.unzip();
        let kept = hash.and_then(|hash| hash.token);
        let token = kept.unwrap_or_else(|| self.tokens.mint(now.wall_us));
        let mut hold = Hold {
            owner,
            count: entered_before.unwrap_or(0),
            token,
            ends_at: None,
        };
        let write_at = effects.len();
        while let Some(entered) = Count::next(hold.count) {
            let (id, followed) = self
                .lines
                .first(line)
                .map(|(id, first)| (id, first.followed_by_own()))?;
            let waiter = self.lines.leave(id)?;
            let lease_end = waiter.lease.end(now);
            hold.count = entered;
            hold.ends_at = hash.map_or(Some(lease_end), |hash| hash.lease_end(lease_end));
            self.count_hand_over(entered, now.mono_ms.saturating_sub(waiter.since));
            effects.push(Effect::Grant {
                seat: waiter.seat,
                owner: waiter.owner,
                count: entered,
                token,
            });
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
        Some(hold)
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
    fn as_plain(&mut self, line: Option<LineId>, stored: Stored) -> Result<Option<Hash>, Refusal> {
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
                Err(Refusal::WrongType)
            }
        }
    }

    /// The owner's hold, if it has one and the token, where one is named, is its token.
    fn own_hold(
        &mut self,
        line: Option<LineId>,
        stored: Stored,
        token: Option<Token>,
    ) -> Result<Option<(Hash, Count)>, Refusal> {
        let hash = self.as_plain(line, stored)?;
        if hash.is_none()
            && let Some(line) = line
        {
            // Found free with somebody in line: they are granted as soon as this command is over.
            self.lines.touch(line);
        }
        let matching = hash.filter(|hash| token.is_none() || token == hash.token);
        Ok(matching.and_then(|hash| Some((hash, hash.own?))))
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
