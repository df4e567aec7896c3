//! The commands about one lock, from ACQUIRE to BREAK: who gets the lock, and who keeps it.

use crate::decisions::decision::{Acquired, Decision, Entry};
use crate::decisions::pending_wait::PendingWait;
use crate::interface::effect::{Holder, TimeoutKey, WaitOutcome, Write};
use crate::interface::error::CommandError;
use crate::interface::request::{Acquire, Guard, Release, Renew, WaitMode};
use crate::interface::stored::{Count, ReadWrite, Stored};
use crate::memory::log::metrics::count;
use crate::memory::session::LostReason;
use crate::values::circle::Circle;
use crate::values::ids::{RecordId, WaiterId};
use crate::values::mode::Mode;
use crate::values::time::ttl_ms;
use crate::values::token::Token;
use std::rc::Rc;

impl Decision<'_> {
    /// ACQUIRE: takes the lock, enters it once more, or reports that it is held.
    pub(crate) fn acquire(
        &mut self,
        stored: &Stored,
        request: &Acquire<'_>,
        is_reconciled: bool,
        waiters_max: u32,
    ) -> Result<Acquired, CommandError> {
        let session = self.locks.listened(request.session)?;
        if request.mode == Mode::Permits {
            return self.acquire_permits(stored, request, session, is_reconciled, waiters_max);
        }
        if stored.is_free() {
            let Some(queue) = self.queue() else {
                if self.locks.grant_delay.lasts(self.now) {
                    return self.wait_for(PendingWait::promised(), request, waiters_max);
                }
                self.lose_holds(None);
                return Ok(self.take(stored, &Entry::of(request, session)));
            };
            // The waiters come first: a newcomer that arrives after the end of a lease, but before
            // the queue is looked at, must not overtake them.
            if !is_reconciled {
                return Ok(Acquired::ReconcileFirst);
            }
            self.check_kind_of_first(queue, request.mode)?;
            return self.wait_for(PendingWait::promised(), request, waiters_max);
        }
        self.check_kind(stored, request.mode.kind())?;
        match stored {
            Stored::ReadWrite(hash) => self.acquire_read_write(hash, request, session, waiters_max),
            Stored::Plain(hash) => {
                if let Some(own) = hash.own {
                    let (count, token) = self.reenter(hash, own, &Entry::of(request, session))?;
                    return Ok(Acquired::Held { count, token });
                }
                self.check_after(hash.ends_at);
                let pending_wait = PendingWait::until(hash.ends_at, ttl_ms(hash.ends_at, self.now));
                self.wait_for(pending_wait, request, waiters_max)
            }
            Stored::Free | Stored::NoHolder | Stored::Permits(_) | Stored::OtherType => {
                Err(CommandError::WrongType)
            }
        }
    }

    fn take(&mut self, stored: &Stored, entry: &Entry<'_>) -> Acquired {
        if stored.leaves_hash() {
            self.write(Write::Delete);
        }
        let (count, token) = if entry.mode == Mode::Plain {
            let token = self.mint();
            self.begin_plain(entry, token)
        } else {
            self.begin_read_write(entry)
        };
        Acquired::Held { count, token }
    }

    /// The caller cannot have the lock now: it is told so, or must wait.
    pub(crate) fn wait_for(
        &mut self,
        mut pending_wait: PendingWait,
        request: &Acquire<'_>,
        waiters_max: u32,
    ) -> Result<Acquired, CommandError> {
        pending_wait.ttl_ms = self.locks.ttl_or_delay_ms(pending_wait.ttl_ms, self.now);
        if request.wait_mode == WaitMode::None {
            if self.locks.holds.any_asks() && pending_wait.is_kept_out() {
                self.tell_wanted_in_vain(request.owner, request.mode);
            }
            return Ok(Acquired::NotHeld {
                ttl_ms: pending_wait.ttl_ms,
            });
        }
        if self.own_place(request).is_none() {
            self.check_may_wait(request.owner, request.mode, waiters_max)?;
        }
        Ok(Acquired::MustWait(pending_wait))
    }

    /// The owner's place in the queue, if the request takes it over (ONCE).
    pub(crate) fn own_place(&self, request: &Acquire<'_>) -> Option<WaiterId> {
        self.locks.own_place(self.at, request)
    }

    /// Whether this owner may join the queue.
    pub(crate) fn check_may_wait(
        &mut self,
        owner: &[u8],
        mode: Mode,
        waiters_max: u32,
    ) -> Result<(), CommandError> {
        let Some(queue) = self.queue() else {
            return Ok(());
        };
        self.check_not_waiting(queue, owner, mode)?;
        self.check_room(queue, owner, waiters_max)
    }

    /// An owner stands in a queue once. If it waits to read and asks to write, it would wait for
    /// itself.
    fn check_not_waiting(
        &mut self,
        queue: RecordId,
        owner: &[u8],
        mode: Mode,
    ) -> Result<(), CommandError> {
        let waiter = self.locks.table.waiter_of(queue, owner);
        match waiter.map(|(_, waiter)| waiter.mode) {
            None => Ok(()),
            Some(Mode::Read) if mode == Mode::Write => Err(self.refuse_upgrade(owner)),
            Some(_) => Err(CommandError::Waiting),
        }
    }

    fn check_room(
        &mut self,
        queue: RecordId,
        owner: &[u8],
        waiters_max: u32,
    ) -> Result<(), CommandError> {
        if self.locks.table.length(queue) < waiters_max {
            return Ok(());
        }
        let error = CommandError::TooManyWaiters(waiters_max);
        let log = &mut self.locks.log;
        log.add_full(self.at, owner, || error.to_string(), self.now);
        Err(error)
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
    pub(crate) fn release(
        &mut self,
        stored: &Stored,
        request: &Release<'_>,
    ) -> Result<Option<i64>, CommandError> {
        let left = self.give_back(stored, request)?;
        if left.is_some() {
            count(&mut self.locks.counters.releases);
        }
        Ok(left)
    }

    pub(crate) fn give_back(
        &mut self,
        stored: &Stored,
        request: &Release<'_>,
    ) -> Result<Option<i64>, CommandError> {
        let Some(own) = self.own_hold(stored, request.mode, request.token, request.owner)? else {
            return Ok(None);
        };
        let Count::Valid(held) = own else {
            return Err(CommandError::HoldCountMalformed);
        };
        let left = match stored {
            Stored::Plain(hash) => self.leave_plain(hash, held, request),
            Stored::ReadWrite(hash) => self.leave_read_write(hash, held, request),
            Stored::Permits(hash) => self.leave_permits(hash, request)?,
            Stored::Free | Stored::NoHolder | Stored::OtherType => 0,
        };
        Ok(Some(left))
    }

    /// RENEW: starts the lease anew. Returns whether the owner still holds the lock.
    pub(crate) fn renew(
        &mut self,
        stored: &Stored,
        request: &Renew<'_>,
    ) -> Result<bool, CommandError> {
        let session = self.locks.listened(request.session)?;
        let own = self.own_hold(stored, request.mode, request.token, request.owner)?;
        if own.is_none() {
            count(&mut self.locks.counters.renewals_lost);
            return Ok(false);
        }
        count(&mut self.locks.counters.renewals);
        self.locks
            .sessions
            .confirm(self.at, request.owner, request.mode, false);
        match stored {
            Stored::Plain(hash) => self.renew_plain(hash, request, session),
            Stored::ReadWrite(hash) => self.renew_read_write(hash, request, session),
            Stored::Permits(hash) => self.renew_permits(hash, request, session),
            Stored::Free | Stored::NoHolder | Stored::OtherType => {}
        }
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
        let own = self.own_hold(stored, request.mode, request.token, request.owner)?;
        own.map(drop)
            .ok_or_else(|| CommandError::NotHeld(self.present_token(stored, request.mode)))
    }

    /// The token of the present holder, if it is known. Each reader and each holder of permits has
    /// its own, so there it is the caller's.
    fn present_token(&self, stored: &Stored, mode: Mode) -> Option<Token> {
        match stored {
            Stored::Plain(hash) => hash.token,
            Stored::Permits(hash) => hash.own.map(|own| own.token),
            Stored::ReadWrite(hash) if mode == Mode::Read && hash.own_read.is_some() => {
                hash.own_read.and_then(|own| own.token)
            }
            Stored::ReadWrite(hash) => {
                let record = self.locks.table.find(self.at)?;
                let (writer, _) = self.locks.table.writer(record)?;
                self.writer_token(writer, hash.ends_at)
            }
            Stored::Free | Stored::NoHolder | Stored::OtherType => None,
        }
    }

    /// CANCEL: takes the owner's waiter out of the queue. Returns how many there were, 0 or 1.
    pub(crate) fn cancel(&mut self, stored: &Stored, owner: &[u8]) -> i64 {
        let queue = self.queue();
        let waiter = queue.and_then(|queue| self.locks.table.waiter_of(queue, owner));
        let Some(id) = waiter.map(|(id, _)| id) else {
            return 0;
        };
        let ttl_ms = stored.ttl_ms(self.now);
        let ttl_ms = self.locks.ttl_or_delay_ms(ttl_ms, self.now);
        let why = WaitOutcome::NotAcquired { ttl_ms };
        self.locks.dismiss(id, why, self.effects);
        count(&mut self.locks.counters.cancels);
        1
    }

    /// BREAK: ends all present holds. `holders` are the owner of a plain lock, the fields of a
    /// read-write lock's readers, or the holders of permits. Returns whether there was a hold.
    pub(crate) fn break_hold(
        &mut self,
        stored: &Stored,
        holders: &[(Box<[u8]>, Count)],
    ) -> Result<bool, CommandError> {
        let held_as = match stored {
            free if free.is_free() => {
                self.locks.mark_dirty(self.at);
                return Ok(false);
            }
            Stored::OtherType => return Err(self.not_a_lock()),
            Stored::Free | Stored::NoHolder | Stored::Plain(_) => Mode::Plain,
            Stored::Permits(_) => Mode::Permits,
            Stored::ReadWrite(hash) => {
                self.delete_timeouts_of(holders);
                hash.mode()
            }
        };
        count(&mut self.locks.counters.breaks);
        self.log_broken(stored, held_as, holders);
        self.locks.table.forget_writer(self.at);
        self.lose_holds(Some(LostReason::Broken));
        if held_as == Mode::Permits {
            self.write(Write::Delete);
            self.reconcile_now();
        } else {
            self.free(held_as);
        }
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
