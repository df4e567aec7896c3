//! Grants: to the next waiter when a hold has ended, and when a queue is reconciled with its key.

use crate::decisions::decision::{Decision, Entry, Then};
use crate::interface::effect::{Grant, Holder, WaitOutcome, Write};
use crate::interface::error::CommandError;
use crate::interface::stored::Stored;
use crate::interface::stored_permits::{PermitsHash, PermitsHolders, Room};
use crate::memory::log::metrics::count;
use crate::memory::table::Waiter;
use crate::values::ids::{RecordId, WaiterId};
use crate::values::lock_key::LockKey;
use crate::values::mode::{Kind, Mode};
use crate::values::must_exist::MustExist;
use crate::values::token::Token;
use std::rc::Rc;

/// A hold count, and the token of the hold.
pub(crate) type Held = (i64, Token);

/// The locks that a grant took, if not the one that was waited for: see [`Grant::taken`].
type Taken = Rc<[(LockKey, Token)]>;

impl Decision<'_> {
    // --- After the end of a hold -----------------------------------------------------------------

    /// Deletes the key of a free lock, and lets the next waiter in. If the lock is free, exactly
    /// one unlock message is published.
    pub(crate) fn follow(&mut self, then: Then) {
        self.delete_if_free(then);
        self.let_next_in(then);
    }

    /// The first half of [`Decision::follow`]: a free lock has no key.
    pub(crate) fn delete_if_free(&mut self, then: Then) {
        if let Then::Freed(_) = then {
            self.write(Write::Delete);
        }
    }

    /// The second half: grants the next waiter, or has the queue reconciled.
    pub(crate) fn let_next_in(&mut self, then: Then) {
        match then {
            Then::Nothing => {}
            Then::MayLetIn => self.reconcile_now(),
            Then::Freed(held_as) => self.pass_on(held_as),
        }
    }

    /// The lock is free now: grants the next waiter, if that can be decided without another
    /// reading.
    fn pass_on(&mut self, held_as: Mode) {
        let queue = self.queue();
        let first = queue.and_then(|queue| self.locks.table.first(queue));
        let Some((queue, (id, first))) = queue.zip(first) else {
            return self.publish(held_as);
        };
        let (mode, multi) = (first.mode, first.multi);
        // A pending release of the next waiter's owner must be done first, or it would end the new
        // hold. Whether the next waiter for permits fits depends on the limit, which was not read
        // here. And a waiter of another kind stands behind permits only where another program wrote
        // them: its reading checks that all keys of its kind are here.
        let is_of_permits = mode == Mode::Permits || held_as == Mode::Permits;
        if self.locks.table.is_ending(queue, &first.owner) || is_of_permits {
            self.publish(held_as);
            return self.reconcile_now();
        }
        if multi.is_none() && !self.locks.grant_delay.lasts(self.now) {
            return self.hand_over(id, &Stored::Free, Some(held_as));
        }
        // No grant now. The lease did not run out, so the queue must forget its end: the next look
        // would count an expiry. The end of the grant delay marks the queue dirty.
        self.check_after(None);
        self.publish(held_as);
        // The first waiter waits for other locks as well. It may be able to have all of them now.
        if let Some(multi) = multi {
            self.mark_multi(multi, queue);
        }
    }

    // --- The queue -------------------------------------------------------------------------------

    /// Reconciles a queue with its key, as read for the first waiter's owner: grants the first
    /// waiter if it can have the lock, and otherwise looks again when the lease is over. `most`
    /// bounds how many waiters for permits it may grant.
    pub(crate) fn reconcile(
        &mut self,
        queue: RecordId,
        stored: &Stored,
        others: Option<&PermitsHolders>,
        most: usize,
    ) {
        if let Some(error) = stored.not_a_lock() {
            self.locks.refuse_some(queue, &error, self.effects);
            return;
        }
        if stored.is_free() {
            self.lose_holds(None);
            if self.locks.table.lease_over(queue, self.now) {
                count(&mut self.locks.counters.expiries);
            }
        }
        if let Some(kind) = stored.kind().filter(|kind| *kind != Kind::Plain) {
            let first = self.locks.table.first(queue).map(|(id, _)| id);
            let are_more = self.refuse_multis(queue, kind);
            if are_more || first != self.locks.table.first(queue).map(|(id, _)| id) {
                // The key was read for the owner of the former first waiter. With this reading the
                // new first waiter could be granted because of another owner's hold.
                return self.reconcile_now();
            }
        }
        let Some((id, first)) = self.locks.table.first(queue).must_exist() else {
            return;
        };
        let (multi, mode, once) = (first.multi, first.mode, first.once);
        let owner = Rc::clone(&first.owner);
        match multi {
            Some(multi) => {
                self.mark_multi(multi, queue);
                if stored.own(Mode::Plain).is_some() {
                    // Another program's script gave its owner this lock.
                    self.holder_may_have_all(&owner);
                }
                self.check_after(stored.ends_at());
            }
            None if mode == Mode::Permits => self.let_in(queue, stored, others, most),
            None if stored.lets_in(mode, once) && self.may_grant(stored, mode) => {
                let is_read_write = matches!(stored, Stored::ReadWrite(_));
                self.hand_over(
                    id,
                    stored,
                    (!is_read_write).then(|| mode.message_when_free()),
                );
            }
            None => {
                if !stored.is_free() {
                    self.locks.tell_wanted_by_queue(queue, self.effects);
                }
                self.check_after(stored.ends_for(mode));
            }
        }
    }

    /// Whether the owner that this was read for may be granted the lock now. During the grant delay
    /// it may only enter a hold of its own once more.
    fn may_grant(&self, stored: &Stored, mode: Mode) -> bool {
        !self.locks.grant_delay.lasts(self.now) || !stored.is_new_to_owner(mode)
    }

    /// Grants the first waiter in the queue, which can have the lock as it is stored.
    fn hand_over(&mut self, id: WaiterId, stored: &Stored, message: Option<Mode>) {
        let mode = self.grant_one(id, stored, message);
        // A reader lets the next readers in, and a writer behind it must know when the last lease
        // of a reader ends. If the lock was not free, a script may have made the owners of both
        // waiters holders.
        let next = self.queue().and_then(|queue| self.locks.table.first(queue));
        let is_alone = next.is_some_and(|(_, next)| next.multi.is_none());
        let may_follow = match mode {
            Some(Mode::Read) => is_alone,
            Some(Mode::Plain) => !stored.is_free(),
            Some(Mode::Write | Mode::Permits) => is_alone && !stored.is_free(),
            None => false,
        };
        if may_follow {
            self.reconcile_now();
        }
    }

    /// Grants a waiter for one lock, which can have it as it is stored. Returns its mode.
    fn grant_one(&mut self, id: WaiterId, stored: &Stored, message: Option<Mode>) -> Option<Mode> {
        let waiter = self.grant(id, message, |decision, entry| {
            let takes_none = (!entry.counts(stored)?).then(|| Rc::from([]));
            Ok((decision.enter(stored, entry)?, takes_none))
        })?;
        if waiter.wanted {
            self.ask_if_wanted(&waiter.owner, waiter.mode);
        }
        Some(waiter.mode)
    }

    /// Grants a waiter: `enter` makes its entry. An unlock message, if any, comes after the writes
    /// and before the reply to the waiter. Returns the waiter; none if the entry failed, which the
    /// caller has ruled out.
    ///
    /// The waiter leaves its queue only after the entry. A waiter that left first and then could
    /// not enter would have neither the lock nor a place in the queue, and would not be told.
    pub(crate) fn grant(
        &mut self,
        id: WaiterId,
        message: Option<Mode>,
        enter: impl FnOnce(&mut Self, &Entry<'_>) -> Result<(Held, Option<Taken>), CommandError>,
    ) -> Option<Waiter> {
        let (waiter, of) = (self.locks.table.get(id)?, self.locks.wait_of(id)?);
        let holder = Holder::Other(Rc::clone(&of.owner));
        let entry = Entry {
            mode: waiter.mode,
            asked: waiter.asked,
            once: waiter.once,
            waited: true,
            ..Entry::new(&of.owner, holder, waiter.lease, waiter.session)
        };
        let entered = enter(self, &entry);
        debug_assert!(entered.is_ok(), "who is granted can enter: {entered:?}");
        let ((count, token), its_locks) = entered.ok()?;
        let waiter = self.locks.leave_queues(id)?;
        let grant = Grant {
            token,
            mode: waiter.mode,
            taken: its_locks,
        };
        if let Some(message) = message {
            self.publish(message);
        }
        self.count_waited(self.now.mono_ms.saturating_sub(waiter.since));
        self.locks.tell_granted(of, count, grant, self.effects);
        Some(waiter)
    }

    // --- Permits ---------------------------------------------------------------------------------

    /// Grants the first waiter for permits, for which the key was read, if its request fits, and
    /// the waiters behind it that fit as well. Otherwise looks again when the request will fit.
    fn let_in(
        &mut self,
        queue: RecordId,
        stored: &Stored,
        others: Option<&PermitsHolders>,
        most: usize,
    ) {
        if matches!(stored, Stored::Plain(_) | Stored::ReadWrite(_)) {
            // A script made it a lock of another kind.
            return self.check_after(stored.ends_at());
        }
        let hash = stored.permits();
        let Some((id, _)) = self.locks.table.first(queue).must_exist() else {
            return;
        };
        if hash.limit.is_none() && self.refuse_without_limit(queue) {
            return self.reconcile_now();
        }
        if hash.own.is_some() {
            // Another program wrote this hold, or renamed the key of other permits.
            let why = WaitOutcome::Refused(CommandError::Held);
            self.locks.leave(id, why, self.effects);
            return self.reconcile_now();
        }
        match hash.room {
            Room::Now if self.locks.grant_delay.lasts(self.now) => self.check_after(None),
            Room::Now => self.let_in_all(queue, hash, others, most),
            room => self.keep_out(queue, room),
        }
    }

    /// Grants waiters, from the first on, as long as they fit. The first does. `others` are the
    /// other holders: with them one reading serves for all. A waiter's owner is one of them only if
    /// another program wrote its hold.
    fn let_in_all(
        &mut self,
        queue: RecordId,
        mut hash: PermitsHash,
        others: Option<&PermitsHolders>,
        most: usize,
    ) {
        let mut beside = others.map(|others| (others, others.holds()));
        for number in 0..most.max(1) {
            let Some((id, first)) = self.locks.table.first(queue) else {
                return;
            };
            let (Some(asked), lease) = (first.asked, first.lease) else {
                break;
            };
            if number > 0 {
                let Some((others, holders)) = &beside else {
                    break;
                };
                // Checked before the room: a waiter that holds permits already is refused, whether
                // its request fits or not.
                if others.is_among(&first.owner) {
                    break;
                }
                match holders.room(asked, hash.limit, hash.ends_at) {
                    Room::Now => {}
                    Room::NoLimit => break,
                    room => return self.keep_out(queue, room),
                }
            }
            if self.grant_one(id, &Stored::Permits(hash), None).is_none() {
                break;
            }
            let ends_at = lease.end(self.now);
            hash = hash.granted(ends_at);
            if let Some((_, holders)) = &mut beside {
                holders.add(ends_at, asked.permits);
            }
        }
        // The next waiter needs a reading of its own, or the turn has granted enough.
        self.reconcile_now();
    }

    /// The first waiter stays, and is looked at again when its request will fit.
    fn keep_out(&mut self, queue: RecordId, room: Room) {
        self.locks.tell_wanted_by_queue(queue, self.effects);
        self.check_after(room.at());
    }
}
