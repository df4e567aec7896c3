//! The commands about one lock, from ACQUIRE to BREAK: who gets the lock, and who keeps it.

use crate::decisions::decision::{Acquired, Decision, Entry, Then};
use crate::decisions::pending_wait::{LeaseEnds, PendingWait};
use crate::interface::effect::{Holder, TimeoutKey, WaitOutcome, Write};
use crate::interface::error::CommandError;
use crate::interface::event::LostReason;
use crate::interface::outcome::Outcome;
use crate::interface::request::{Acquire, Cancel, Guard, Release, Renew, WaitMode};
use crate::interface::stored::{Count, HeldBy, ReadWrite, Stored};
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::values::circle::Circle;
use crate::values::ids::{RecordId, SessionId};
use crate::values::mode::Mode;
use std::rc::Rc;

impl Decision<'_> {
    /// ACQUIRE: enters the lock, or reports that it is held. All kinds have this order: an owner
    /// enters its own hold past any queue; then come the waiters, as far as the lock is free; then
    /// a caller for which there is room; and who cannot enter now waits.
    #[inline]
    pub(crate) fn acquire(
        &mut self,
        stored: &Stored,
        request: &Acquire<'_>,
        is_reconciled: bool,
        waiters_max: u32,
    ) -> Result<Acquired, CommandError> {
        let session = self.locks.listened(request.session)?;
        self.check_kind(stored, request.mode.kind())?;
        if !stored.is_new_to_owner(request.mode) {
            return self.admit(stored, request, session);
        }
        let (queue, has_room) = (self.queue(), stored.has_room(request.mode));
        let is_theirs = stored.is_free() || has_room && request.mode == Mode::Permits;
        // A newcomer that arrives after the end of a lease, but before the queue is looked at, must
        // not overtake the waiters.
        if queue.is_some() && is_theirs && !is_reconciled {
            self.reconcile_now();
            return Ok(Acquired::ReconcileFirst);
        }
        self.check_kind_of_first(stored, request.mode.kind(), queue)?;
        self.check_can_end(stored, request)?;
        if has_room && queue.is_none() && !self.locks.grant_delay.lasts(self.now) {
            if stored.is_free() {
                self.lose_holds(None);
            }
            return self.admit(stored, request, session);
        }
        let pending_wait = if is_theirs && has_room {
            PendingWait::new(LeaseEnds::Promised, 0)
        } else {
            let ends_at = stored.ends_for(request.mode);
            if let Some(queue) = queue.filter(|_| request.mode != Mode::Permits) {
                self.locks.table.check_after(queue, ends_at);
            }
            PendingWait::new(LeaseEnds::One(ends_at), stored.ttl_ms(self.now))
        };
        self.wait_for(pending_wait, request, queue, waiters_max)
    }

    /// The caller of an ACQUIRE enters the lock.
    #[inline]
    fn admit(
        &mut self,
        stored: &Stored,
        request: &Acquire<'_>,
        session: Option<SessionId>,
    ) -> Result<Acquired, CommandError> {
        let entry = Entry {
            mode: request.mode,
            asked: request.asked,
            once: request.once,
            ..Entry::new(request.owner, Holder::Caller, request.lease, session)
        };
        let (count, token) = self.enter(stored, &entry)?;
        if request.wanted {
            self.ask_if_wanted(request.owner, request.mode);
        }
        Ok(Acquired::held(count, token))
    }

    /// Refuses a request whose wait could never end with the lock: for more permits than the limit,
    /// and of a reader that wants to become the writer.
    fn check_can_end(
        &mut self,
        stored: &Stored,
        request: &Acquire<'_>,
    ) -> Result<(), CommandError> {
        match (stored, request.asked) {
            // An owner that waits already stays in the queue when the limit is lowered.
            (_, Some(asked)) if self.locks.own_place(self.at, request).is_none() => {
                stored.permits().check_limit(asked)
            }
            (Stored::ReadWrite(hash), _)
                if request.mode == Mode::Write
                    && request.wait_mode != WaitMode::None
                    && hash.own_read.is_some() =>
            {
                Err(self.refuse_upgrade(request.owner))
            }
            _ => Ok(()),
        }
    }

    /// The caller cannot have the lock now: it is told so, or must wait.
    fn wait_for(
        &mut self,
        mut pending_wait: PendingWait,
        request: &Acquire<'_>,
        queue: Option<RecordId>,
        waiters_max: u32,
    ) -> Result<Acquired, CommandError> {
        pending_wait.ttl_ms = self.locks.ttl_or_delay_ms(pending_wait.ttl_ms, self.now);
        if request.wait_mode == WaitMode::None {
            if self.locks.holds.any_asks() && pending_wait.is_kept_out() {
                self.locks
                    .tell_wanted_by(self.at, request.owner, request.mode, self.effects);
            }
            let ttl_ms = pending_wait.ttl_ms;
            return Ok(Acquired::Decided(Outcome::NotHeld { ttl_ms }));
        }
        if let Some(queue) = queue
            && self.locks.own_place(self.at, request).is_none()
        {
            self.check_may_wait(queue, request.owner, request.mode, waiters_max)?;
        }
        Ok(Acquired::MustWait(pending_wait))
    }

    /// Whether this owner may join the queue. An owner stands in a queue once, so one that waits to
    /// read and asks to write would wait for itself.
    pub(crate) fn check_may_wait(
        &mut self,
        queue: RecordId,
        owner: &[u8],
        mode: Mode,
        waiters_max: u32,
    ) -> Result<(), CommandError> {
        let Locks { table, log, .. } = &mut *self.locks;
        match table.waiter_of(queue, owner).map(|(_, of)| of.mode) {
            None if table.length(queue) < waiters_max => Ok(()),
            None => {
                let error = CommandError::TooManyWaiters(waiters_max);
                log.add_full(self.at, owner, || error.to_string(), self.now);
                Err(error)
            }
            Some(Mode::Read) if mode == Mode::Write => Err(self.refuse_upgrade(owner)),
            Some(_) => Err(CommandError::Waiting),
        }
    }

    /// Refuses a reader that asks to wait for WRITE: it would wait for itself.
    pub(crate) fn refuse_upgrade(&mut self, owner: &[u8]) -> CommandError {
        count(&mut self.locks.counters.deadlocks_refused);
        let circle = Circle::of_reader(owner, self.at.name);
        if self.locks.log.is_on() {
            self.locks.log.add_circle(self.at, owner, &circle, self.now);
        }
        CommandError::Deadlock(circle)
    }

    /// RELEASE: gives one hold back, or permits. Returns what the owner has left; none if it does
    /// not hold the lock.
    #[inline]
    pub(crate) fn release(
        &mut self,
        stored: &Stored,
        request: &Release<'_>,
    ) -> Result<Option<i64>, CommandError> {
        let Some((left, then)) = self.release_own(stored, request)? else {
            return Ok(None);
        };
        self.follow(then);
        count(&mut self.locks.counters.releases);
        Ok(Some(left))
    }

    /// The same, but the next waiter is not let in yet.
    pub(crate) fn release_own(
        &mut self,
        stored: &Stored,
        request: &Release<'_>,
    ) -> Result<Option<(i64, Then)>, CommandError> {
        match self.own_hold(stored, request.mode, request.token)? {
            None => Ok(None),
            Some(Count::Malformed) => Err(CommandError::HoldCountMalformed),
            Some(Count::Valid(held)) => self.release_one(stored, held, request).map(Some),
        }
    }

    /// RENEW: starts the lease anew. Returns whether the owner still holds the lock.
    pub(crate) fn renew(
        &mut self,
        stored: &Stored,
        request: &Renew<'_>,
    ) -> Result<bool, CommandError> {
        let session = self.locks.listened(request.session)?;
        let own = self.own_hold(stored, request.mode, request.token)?;
        if own.is_none() {
            count(&mut self.locks.counters.renewals_lost);
            return Ok(false);
        }
        count(&mut self.locks.counters.renewals);
        self.renew_hold(stored, request, session);
        if request.wanted {
            self.ask_if_wanted(request.owner, request.mode);
        }
        Ok(true)
    }

    /// GUARD: refused unless the owner holds the lock.
    pub(crate) fn guard(
        &mut self,
        stored: &Stored,
        request: &Guard<'_>,
    ) -> Result<(), CommandError> {
        let own = self.own_hold(stored, request.mode, request.token)?;
        own.map(drop)
            .ok_or_else(|| CommandError::NotHeld(stored.present_token(request.mode)))
    }

    /// CANCEL: takes the owner's waiter out of the queue. Returns how many there were, 0 or 1.
    pub(crate) fn cancel(&mut self, stored: &Stored, request: &Cancel<'_>) -> i64 {
        let waiter = self.locks.table.waiter_at(self.at, request.owner);
        let waiter = waiter.filter(|(_, of)| request.mode.is_none_or(|mode| of.mode == mode));
        let Some(id) = waiter.map(|(id, _)| id) else {
            return 0;
        };
        let ttl_ms = stored.ttl_ms(self.now);
        let ttl_ms = self.locks.ttl_or_delay_ms(ttl_ms, self.now);
        let why = WaitOutcome::NotAcquired { ttl_ms };
        self.locks.leave(id, why, self.effects);
        count(&mut self.locks.counters.cancels);
        1
    }

    /// BREAK: ends all present holds. `holders` are the owner of a plain lock, the fields of a
    /// read-write lock's readers, or the holders of permits; `first` is one hold, a writer's before
    /// others. Returns whether there was a hold.
    pub(crate) fn break_hold(
        &mut self,
        stored: &Stored,
        holders: &[(Box<[u8]>, Count)],
        first: Option<&HeldBy>,
    ) -> Result<bool, CommandError> {
        if let Some(error) = stored.not_a_lock() {
            return Err(self.not_a_lock(error));
        }
        let held_as = match stored {
            free if free.is_free() => {
                self.locks.mark_dirty(self.at);
                return Ok(false);
            }
            Stored::Permits(_) => Mode::Permits,
            Stored::ReadWrite(hash) => {
                self.delete_timeouts_of(holders);
                hash.mode()
            }
            _ => Mode::Plain,
        };
        count(&mut self.locks.counters.breaks);
        self.log_broken(held_as, holders.len(), first);
        self.lose_holds(Some(LostReason::Broken));
        self.follow(Then::Freed(held_as));
        Ok(true)
    }

    /// Deletes the latest timeout key of each of these readers. Keys of earlier entries, which only
    /// another program's script leaves there, expire by themselves: without the hash they mean
    /// nothing.
    fn delete_timeouts_of(&mut self, readers: &[(Box<[u8]>, Count)]) {
        for (reader, count) in readers.iter().take(ReadWrite::TIMEOUTS_MAX) {
            if let Count::Valid(number) = *count {
                let reader = Holder::Other(Rc::from(&**reader));
                self.write(Write::DeleteTimeout(TimeoutKey { reader, number }));
            }
        }
    }
}
