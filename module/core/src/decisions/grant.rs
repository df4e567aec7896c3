//! Who is next: a queue is reconciled with its key, and a free lock goes to the first waiter.

use crate::decisions::decision::{Decision, Entry};
use crate::interface::effect::{Grant, Holder, Write};
use crate::interface::error::CommandError;
use crate::interface::stored::Stored;
use crate::interface::stored_permits::PermitsHolders;
use crate::memory::agenda::Job;
use crate::memory::log::metrics::count;
use crate::values::ids::{RecordId, WaiterId};
use crate::values::mode::{Kind, Mode};
use crate::values::token::Token;
use std::rc::Rc;

impl Decision<'_> {
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
        if matches!(stored, Stored::OtherType) {
            self.locks
                .dismiss_some(queue, &CommandError::WrongType, self.effects);
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
            let are_more = self.dismiss_multis(queue, kind);
            if are_more || first != self.locks.table.first(queue).map(|(id, _)| id) {
                // The key was read for the owner of the former first waiter. With this reading the
                // new first waiter could be granted because of another owner's hold.
                return self.reconcile_now();
            }
        }
        let first = self.locks.table.first(queue);
        let Some((id, first)) = first else { return };
        let (multi, mode, owner) = (first.multi, first.mode, Rc::clone(&first.owner));
        match multi {
            Some(multi) => {
                self.locks.mark_multi(multi, queue, self.now);
                if stored.own(Mode::Plain).is_some() {
                    // Another program's script gave its owner this lock.
                    self.holder_may_have_all(&owner);
                }
                self.check_after(stored.ends_at());
            }
            None if mode == Mode::Permits => {
                self.reconcile_permits(queue, stored, others, most);
            }
            None if stored.lets_in(mode) && self.may_grant(stored, mode) => {
                self.hand_over(id, mode, stored, Some(mode.message_when_free()));
            }
            None => {
                if !stored.is_free() {
                    self.tell_wanted(queue);
                }
                self.check_after(stored.ends_for(mode));
            }
        }
    }

    // --- The end of a hold, and hand-over --------------------------------------------------------

    /// Ends the holds in this mode: the next waiter has the lock, or it is free. Either way exactly
    /// one unlock message is published.
    pub(crate) fn free(&mut self, held_as: Mode) {
        self.write(Write::Delete);
        self.pass_on(held_as);
    }

    /// The lock is free now: grants the next waiter. One that waits for several locks is marked
    /// instead: it may be able to have all of them now.
    pub(crate) fn pass_on(&mut self, held_as: Mode) {
        let queue = self.queue();
        let first = queue.and_then(|queue| self.locks.table.first(queue));
        if let (Some(queue), Some((_, first))) = (queue, first)
            && self.locks.table.is_ending(queue, &first.owner)
        {
            // The next waiter's owner has a pending release here. It must be done first, or it
            // would end the new hold.
            self.publish(held_as);
            return self.reconcile_now();
        }
        if self.locks.grant_delay.lasts(self.now) {
            // No grant during the delay; its end marks the queue dirty. The lease did not run out,
            // so the queue must forget its end: the next look would count an expiry.
            self.check_after(None);
            return self.publish(held_as);
        }
        if first.is_some_and(|(_, first)| first.mode == Mode::Permits) {
            // Whether the next waiter fits depends on its limit, which was not read here.
            self.publish(held_as);
            return self.reconcile_now();
        }
        if let Some((id, first)) = first.filter(|(_, first)| first.multi.is_none()) {
            return self.hand_over(id, first.mode, &Stored::Free, Some(held_as));
        }
        let multi = first.and_then(|(_, first)| first.multi);
        self.check_after(None);
        self.publish(held_as);
        // The first waiter waits for other locks as well. It may be able to have all of them now.
        if let (Some(multi), Some(queue)) = (multi, self.queue()) {
            self.locks.mark_multi(multi, queue, self.now);
        }
    }

    /// Grants this waiter: the first in the queue, which waits in this mode for this lock only and
    /// can have it. An unlock message, if any, comes after the writes and before the reply to the
    /// waiter.
    pub(crate) fn hand_over(
        &mut self,
        id: WaiterId,
        mode: Mode,
        stored: &Stored,
        message: Option<Mode>,
    ) {
        if stored.leaves_hash() {
            self.write(Write::Delete);
        }
        match (mode, stored) {
            (Mode::Plain, Stored::Plain(hash)) => self.hand_over_plain(id, Some(hash), message),
            (Mode::Plain, _) => self.hand_over_plain(id, None, message),
            (_, Stored::ReadWrite(hash)) => self.hand_over_read_write(id, Some(hash), None),
            (..) => self.hand_over_read_write(id, None, message),
        }
    }

    /// Grants a waiter: `enter` makes its entry. An unlock message, if any, comes after the writes
    /// and before the reply to the waiter. Returns false if the entry failed, which the caller has
    /// ruled out.
    ///
    /// The waiter leaves its queue only after the entry. A waiter that left first and then could
    /// not enter would have neither the lock nor a place in the queue, and would not be told.
    pub(crate) fn grant(
        &mut self,
        id: WaiterId,
        message: Option<Mode>,
        enter: impl FnOnce(&mut Self, &Entry<'_>) -> Result<(i64, Token), CommandError>,
    ) -> bool {
        let (Some(waiter), Some(lock)) = (self.locks.table.get(id), self.locks.lock_of(id)) else {
            return false;
        };
        let (owner, mode) = (Rc::clone(&waiter.owner), waiter.mode);
        let entry = Entry {
            owner: &owner,
            holder: Holder::Other(Rc::clone(&owner)),
            mode,
            lease: waiter.lease,
            session: waiter.session,
            once: false,
            waited: true,
        };
        let entered = enter(self, &entry);
        debug_assert!(entered.is_ok(), "who is granted can enter: {entered:?}");
        let Ok((held, token)) = entered else {
            return false;
        };
        let Some(waiter) = self.locks.leave(id) else {
            return false;
        };
        if let Some(message) = message {
            self.publish(message);
        }
        self.count_waited(self.now.mono_ms.saturating_sub(waiter.since));
        let grant = Grant {
            token,
            mode,
            several: None,
        };
        let told = Rc::clone(&owner);
        self.locks
            .tell_granted(&lock, waiter.reply_to, told, held, grant, self.effects);
        if waiter.wanted {
            self.ask_if_wanted(&owner, mode);
        }
        true
    }

    /// Whether the owner that this was read for may be granted the lock now. During the grant delay
    /// it may only enter a hold of its own once more.
    fn may_grant(&self, stored: &Stored, mode: Mode) -> bool {
        !self.locks.grant_delay.lasts(self.now) || !stored.is_new_to_owner(mode)
    }

    /// Has the queue reconciled before this turn is over: the first waiter may now be granted as
    /// well.
    pub(crate) fn reconcile_now(&mut self) {
        if let Some(queue) = self.queue() {
            self.locks.table.mark_dirty(queue);
            self.locks.agenda.add_now(Job::Queue(queue));
        }
    }
}
