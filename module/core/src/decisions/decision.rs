//! Decisions about one lock: grants, releases and its queue. The parts that differ by kind of lock
//! are in [`super::plain`], [`super::read_write`] and [`super::permits`].
//!
//! Each decision is total: any stored value has an answer. The effects must be carried out in their
//! order: writes, then the unlock message, then replies to waiters. Otherwise a waiter could be
//! told of a hold that is not written yet.

use crate::decisions::pending_wait::PendingWait;
use crate::interface::effect::{
    Effect, Field, Grant, Holder, TimeoutKey, Value, WaitOutcome, Write,
};
use crate::interface::error::CommandError;
use crate::interface::request::{Acquire, Guard, Release, Renew, WaitMode};
use crate::interface::stored::{Count, ReadWrite, Stored};
use crate::interface::stored_permits::PermitsHolders;
use crate::memory::agenda::Job;
use crate::memory::hold::{HoldIndex, HoldMark, SessionHold};
use crate::memory::log::event_log::LogEvent;
use crate::memory::log::metrics::count;
use crate::memory::pending::PendingRelease;
use crate::memory::session::{Event, EventKind, LostReason};
use crate::memory::state::{Locks, held_ms};
use crate::memory::table::ReplyTarget;
use crate::values::circle::Circle;
use crate::values::ids::{HoldId, RecordId, SessionId, WaiterId};
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::{Kind, Mode};
use crate::values::time::{Lease, NEVER, Now, ttl_ms};
use crate::values::token::Token;
use crate::values::word::Word;
use std::fmt::Write as _;
use std::rc::Rc;

/// One decision refuses at most this many waiters that have nothing to wait for.
pub(crate) const TOLD_AT_ONCE: usize = 100;

/// The result of an ACQUIRE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// The caller holds the lock.
    Held { count: i64, token: Token },
    /// The caller does not hold the lock, and does not wait.
    NotHeld { ttl_ms: i64 },
    /// The lock is free but has waiters. They are granted first; then the command is decided again.
    ReconcileFirst,
    /// The caller must wait.
    MustWait(PendingWait),
}

/// An entry about to be made: the first of a hold, or one more.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) holder: Holder,
    pub(crate) mode: Mode,
    pub(crate) lease: Lease,
    pub(crate) session: Option<SessionId>,
    pub(crate) once: bool,
    /// Whether its owner has waited for it. The lease that it named when it began to wait may be
    /// shorter than the one that it was promised since, if it holds the lock already.
    pub(crate) waited: bool,
}

impl<'a> Entry<'a> {
    pub(crate) fn of(request: &Acquire<'a>, session: Option<SessionId>) -> Self {
        Self {
            owner: request.owner,
            holder: Holder::Caller,
            mode: request.mode,
            lease: request.lease,
            session,
            once: request.once,
            waited: false,
        }
    }

    /// Whether the hold keeps its present end because that is later than `wanted`: a grant after a
    /// wait must not shorten a lease that its owner relies on.
    pub(crate) fn keeps(&self, ends_at: Option<i64>, wanted: i64) -> bool {
        self.waited && ends_at.is_none_or(|end| end > wanted)
    }
}

/// A decision about one lock, while it is made.
pub(crate) struct Decision<'d> {
    pub(crate) locks: &'d mut Locks,
    pub(crate) at: LockRef<'d>,
    /// The lock's place among the locks that were read.
    pub(crate) place: usize,
    pub(crate) now: Now,
    pub(crate) effects: &'d mut Vec<Effect>,
}

impl Locks {
    pub(crate) fn decision<'d>(
        &'d mut self,
        at: LockRef<'d>,
        place: usize,
        now: Now,
        effects: &'d mut Vec<Effect>,
    ) -> Decision<'d> {
        Decision {
            locks: self,
            at,
            place,
            now,
            effects,
        }
    }
}

impl Decision<'_> {
    // --- Commands --------------------------------------------------------------------------------

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

    // --- Outside of a command --------------------------------------------------------------------

    /// Ends a hold, if the key still has that very hold. `outlived`: the releases before this one
    /// left the key's TTL as it was, for the last one to set.
    pub(crate) fn end(&mut self, release: &PendingRelease, stored: &Stored, outlived: bool) {
        if !self.is_hold(stored, &release.owner, release.mode, release.mark) {
            // Marks the queue only, not the sessions' holds: thousands of holds may end here, and
            // each would mark all the others.
            if let Some(queue) = self.queue() {
                self.locks.mark_queue(queue);
            }
            match stored {
                Stored::ReadWrite(hash) if outlived => self.end_key_with_readers(hash),
                Stored::Permits(hash) if outlived => self.end_key_with_permits(hash),
                // Nobody holds permits any more, so the key goes.
                Stored::NoHolder if outlived && release.mode == Mode::Permits => {
                    self.write(Write::Delete);
                }
                _ => {}
            }
            return;
        }
        if !release.whole {
            return self.take_back(release, stored);
        }
        match stored {
            Stored::Plain(hash) => self.end_plain(hash, &release.owner),
            Stored::ReadWrite(hash) => self.end_read_write(hash, &release.owner, release.mode),
            Stored::Permits(hash) => self.end_permits(hash, &release.owner),
            Stored::Free | Stored::NoHolder | Stored::OtherType => {}
        }
        count(&mut self.locks.counters.session_releases);
    }

    fn take_back(&mut self, release: &PendingRelease, stored: &Stored) {
        let name = self.at.name;
        let request = Release {
            key: name,
            owner: &release.owner,
            mode: release.mode,
            permits: None,
            token: release
                .mark
                .token
                .filter(|_| !self.is_held_by_its_session(release)),
            lease: None,
        };
        if let Ok(Some(_)) = self.give_back(stored, &request) {
            count(&mut self.locks.counters.grants_taken_back);
        }
    }

    /// Whether a session's hold with the grant's token is still on record. Then it is the hold of
    /// this grant, even if the token is forgotten because other programs have written to the keys:
    /// a later hold of the same owner has another token, or belongs to no session. Without this
    /// check a grant that is over (BREAK, RELEASE, DEL) would take the owner's newer hold away.
    fn is_held_by_its_session(&self, release: &PendingRelease) -> bool {
        if !matches!(release.mode, Mode::Read | Mode::Write) {
            return false;
        }
        let id = self.session_hold(&release.owner, release.mode);
        let hold = id.and_then(|id| self.locks.holds.get(id));
        hold.is_some_and(|hold| hold.token == release.mark.token)
    }

    /// Whether the key still has the owner's hold with this mark. Where that cannot be told, the
    /// answer is yes: for a writer whose token is not known, and for a reader that has only a
    /// script's timeout keys left. But if the writer's key was replaced, the lease must end at the
    /// same moment.
    fn is_hold(&self, stored: &Stored, owner: &[u8], mode: Mode, mark: HoldMark) -> bool {
        let (own, token) = (stored.own(mode), mark.token);
        own.is_some_and(|(_, stored_token)| match mode {
            Mode::Write => match self.writer_token(owner, stored.ends_at()) {
                Some(known) => Some(known) == token,
                None => !mark.replaced || stored.ends_at() == mark.ends_at,
            },
            Mode::Read => stored_token.is_none() || stored_token == token,
            // A script's hold has no token. The key may have one that another owner in the hash was
            // given.
            Mode::Plain | Mode::Permits => token.is_none() || stored_token == token,
        })
    }

    /// Tells a session if its hold is lost.
    pub(crate) fn check_hold(&mut self, id: HoldId, stored: &Stored) {
        let Some(hold) = self.locks.holds.get(id) else {
            return;
        };
        let (owner, mode, mark) = (Rc::clone(&hold.owner), hold.mode, hold.mark());
        if self.is_hold(stored, &owner, mode, mark) {
            self.locks.holds.check_after(id, stored.own_end(mode));
        } else {
            self.lose(id, None);
        }
    }

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
    fn hand_over(&mut self, id: WaiterId, mode: Mode, stored: &Stored, message: Option<Mode>) {
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

    pub(crate) fn count_grant(&mut self) {
        count(&mut self.locks.counters.grants);
        if let Some(of) = self.locks.patterns.of(self.at.name) {
            count(&mut of.grants);
        }
    }

    pub(crate) fn count_waited(&mut self, waited_ms: i64) {
        self.locks.counters.wait_ms.record(waited_ms);
        if let Some(of) = self.locks.patterns.of(self.at.name) {
            of.wait_ms.record(waited_ms);
        }
        count(&mut self.locks.counters.handovers);
    }

    /// Records how long a hold lasted that has ended. It began with this token.
    pub(crate) fn record_hold(&mut self, owner: &[u8], mode: Mode, token: Option<Token>) {
        if let Some(since) = token.and_then(|token| self.locks.tokens.minted_at(token)) {
            let held_ms = held_ms(since, self.now);
            self.locks.counters.hold_ms.record(held_ms);
            if let Some(of) = self.locks.patterns.of(self.at.name) {
                of.hold_ms.record(held_ms);
            }
        }
        if self.locks.log.options.holds_ms > 0 && self.locks.log.is_on() {
            self.log_long_hold(owner, mode, token);
        }
    }

    // --- Checks of a request against its lock ----------------------------------------------------

    /// Refuses a request if the key is no lock, or a lock of another kind.
    pub(crate) fn check_kind(&mut self, stored: &Stored, asked: Kind) -> Result<(), CommandError> {
        if matches!(stored, Stored::OtherType) {
            return Err(self.not_a_lock());
        }
        match stored.kind() {
            Some(held) if held != asked => Err(CommandError::WrongKind { held, asked }),
            _ => Ok(()),
        }
    }

    /// Refuses a request of another kind than the first waiter's: that is the kind of a free lock
    /// with waiters.
    pub(crate) fn check_kind_of_first(
        &self,
        queue: RecordId,
        mode: Mode,
    ) -> Result<(), CommandError> {
        let first = self.locks.table.first(queue);
        match first.map(|(_, first)| first.mode.kind()) {
            Some(held) if held != mode.kind() => Err(CommandError::WrongKind {
                held,
                asked: mode.kind(),
            }),
            _ => Ok(()),
        }
    }

    /// Another program has overwritten the key. Marks it dirty, so that the waiters are told now
    /// and not when the old lease would have ended.
    fn not_a_lock(&mut self) -> CommandError {
        self.locks.mark_dirty(self.at);
        CommandError::WrongType
    }

    /// The owner's hold in this mode; none if it has none, or if the request names another token
    /// than the hold's.
    fn own_hold(
        &mut self,
        stored: &Stored,
        mode: Mode,
        token: Option<Token>,
        owner: &[u8],
    ) -> Result<Option<Count>, CommandError> {
        self.check_kind(stored, mode.kind())?;
        if stored.is_free() {
            // The lock is free: as soon as this command is over, waiters are granted and sessions
            // are told of lost holds.
            self.locks.mark_dirty(self.at);
        }
        let Some((count, stored_token)) = stored.own(mode) else {
            return Ok(None);
        };
        let is_named = token.is_none_or(|token| {
            let own_token = match mode {
                Mode::Write => self.writer_token(owner, stored.ends_at()),
                Mode::Plain | Mode::Read | Mode::Permits => stored_token,
            };
            own_token == Some(token)
        });
        Ok(is_named.then_some(count))
    }

    pub(crate) fn writer_token(&self, owner: &[u8], key_end: Option<i64>) -> Option<Token> {
        self.locks.table.writer_token(self.at, owner, key_end)
    }

    /// The record of the lock, if it has waiters.
    pub(crate) fn queue(&self) -> Option<RecordId> {
        self.locks.table.queue(self.at)
    }

    pub(crate) fn check_after(&mut self, lease_end: Option<i64>) {
        if let Some(queue) = self.queue() {
            self.locks.table.check_after(queue, lease_end);
        }
    }

    pub(crate) fn mint(&mut self) -> Token {
        self.locks.tokens.mint(self.now.wall_us)
    }

    // --- Effects ---------------------------------------------------------------------------------

    pub(crate) fn write(&mut self, write: Write) {
        let lock = self.place;
        self.effects.push(Effect::Write { lock, write });
    }

    pub(crate) fn set(&mut self, field: Field, value: Value) {
        self.write(Write::Set((field, value), None));
    }

    pub(crate) fn publish(&mut self, held_as: Mode) {
        let lock = self.place;
        self.effects.push(Effect::Publish { lock, held_as });
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

    // --- Holds of sessions -----------------------------------------------------------------------

    #[inline]
    pub(crate) fn session_hold(&self, owner: &[u8], mode: Mode) -> Option<HoldId> {
        // The common case: no session has a hold, so there is nothing to look for.
        if self.locks.holds.len() == 0 {
            return None;
        }
        let record = self.locks.table.find(self.at)?;
        let index = self.locks.table.holds(record)?;
        self.locks.holds.find(index, owner, mode)
    }

    /// Records that the owner holds the lock, with this token and until `ends_at`. The hold belongs
    /// to the session. If no session is named, it stays with the session that has it, if any.
    pub(crate) fn bind(
        &mut self,
        owner: &[u8],
        mode: Mode,
        session: Option<SessionId>,
        token: Option<Token>,
        ends_at: Option<i64>,
    ) {
        let known = self.session_hold(owner, mode);
        let Locks {
            table,
            holds,
            sessions,
            tokens,
            ..
        } = &mut *self.locks;
        let since_us = || token.and_then(|token| tokens.granted_at(token));
        let id = match (known, session) {
            (None, None) => return,
            (Some(id), None) => {
                // A hold that a script took gets its token when it is entered again.
                holds.note_token(id, token);
                id
            }
            (Some(id), Some(session)) => {
                if let Some(former) = holds.rebind(id, session, token, since_us()) {
                    sessions.remove_hold(former, id);
                }
                sessions.add_hold(session, id);
                id
            }
            (None, Some(session)) => {
                let Some(record) = table.find_or_open(self.at) else {
                    return;
                };
                let Some(lock) = table.lock_of(record).cloned() else {
                    return;
                };
                let Some(index) = table.holds_mut(record) else {
                    return;
                };
                let owner = Rc::from(owner);
                let added = holds.add(index, lock, owner, mode, session, token, since_us());
                let Some(id) = added else { return };
                sessions.add_hold(session, id);
                id
            }
        };
        holds.check_after(id, ends_at.filter(|end| *end != NEVER));
    }

    /// Drops the record of a hold that its owner has given back.
    pub(crate) fn unbind(&mut self, owner: &[u8], mode: Mode) {
        if let Some(id) = self.session_hold(owner, mode) {
            self.locks.forget_hold(id);
        }
    }

    /// The owner's hold is lost: tells the session that has it, if any.
    pub(crate) fn lose_hold(&mut self, owner: &[u8], mode: Mode) {
        if let Some(id) = self.session_hold(owner, mode) {
            self.lose(id, None);
        }
    }

    /// All holds of this lock are lost: tells the sessions that have them.
    pub(crate) fn lose_holds(&mut self, reason: Option<LostReason>) {
        let record = self.locks.table.find(self.at);
        let index = record.and_then(|record| self.locks.table.holds(record));
        for id in index.map_or_else(Vec::new, HoldIndex::all) {
            self.lose(id, reason);
        }
    }

    fn lose(&mut self, id: HoldId, reason: Option<LostReason>) {
        let Some(hold) = self.locks.forget_hold(id) else {
            return;
        };
        let by_time = if hold.lease_over(self.now) {
            LostReason::Expired
        } else {
            LostReason::Deleted
        };
        let reason = reason.unwrap_or(by_time);
        let kind = EventKind::Lost(reason);
        count(&mut self.locks.counters.holds_lost);
        if let Some(of) = self.locks.patterns.of(&hold.lock.name) {
            count(&mut of.lost);
        }
        self.log_lost(&hold, reason);
        let event = Event {
            kind,
            lock: hold.lock,
            owner: hold.owner,
        };
        self.locks.tell(hold.session, event, self.effects);
    }
}

// --- The log -------------------------------------------------------------------------------------

impl Decision<'_> {
    /// Logs that a session has lost this hold. A broken hold is in the log already.
    fn log_lost(&mut self, hold: &SessionHold, reason: LostReason) {
        let why = match reason {
            LostReason::Expired => "its lease was over",
            LostReason::Deleted => "its key was deleted, or written by somebody else",
            LostReason::Broken => return,
        };
        if !self.locks.log.is_on() {
            return;
        }
        let held_ms = hold.since_us.map(|since_us| held_ms(since_us, self.now));
        let mut text = why.to_owned();
        describe_hold(
            &mut text,
            held_ms,
            self.locks.sessions.name_of(hold.session),
        );
        let (lock, owner) = (hold.lock.as_ref(), Some(&*hold.owner));
        let (log, now) = (&mut self.locks.log, self.now);
        log.add(LogEvent::Lost, lock, owner, hold.token, text, now);
    }

    /// Logs that BREAK is about to end these holds.
    fn log_broken(&mut self, stored: &Stored, held_as: Mode, holders: &[(Box<[u8]>, Count)]) {
        if !self.locks.log.is_on() {
            return;
        }
        let writer = self.locks.table.find(self.at);
        let writer = writer.and_then(|record| self.locks.table.writer(record));
        let writer = writer.map(|(owner, _)| Rc::clone(owner));
        let owner = match (held_as, holders) {
            (Mode::Write, _) => writer.as_deref(),
            (_, [(owner, _)]) => Some(&**owner),
            _ => None,
        };
        let token = match (held_as, owner) {
            (Mode::Write, Some(owner)) => self.writer_token(owner, stored.ends_at()),
            (_, Some(_)) => stored.own(held_as).and_then(|(_, token)| token),
            (_, None) => None,
        };
        let mut text = match held_as {
            Mode::Plain => "the hold was broken".to_owned(),
            Mode::Write => "the writer's hold was broken".to_owned(),
            Mode::Read => format!("the holds of {} readers were broken", holders.len()),
            Mode::Permits => format!("the permits of {} owners were broken", holders.len()),
        };
        if let Some(owner) = owner {
            let view = self
                .locks
                .hold_view(self.at, owner, held_as, token, self.now);
            describe_hold(&mut text, view.held_ms, view.session.as_ref());
        }
        let (log, now) = (&mut self.locks.log, self.now);
        log.add(LogEvent::Broken, self.at, owner, token, text, now);
    }

    /// Logs a hold that ends, if it was long.
    fn log_long_hold(&mut self, owner: &[u8], mode: Mode, token: Option<Token>) {
        let limit = self.locks.log.options.holds_ms;
        let since_us = token.and_then(|token| self.locks.tokens.granted_at(token));
        if since_us.is_some_and(|since_us| held_ms(since_us, self.now) < limit) {
            return;
        }
        let view = self.locks.hold_view(self.at, owner, mode, token, self.now);
        if view.held_ms.is_none_or(|held_ms| held_ms < limit) {
            return;
        }
        let mut text = "given back".to_owned();
        describe_hold(&mut text, view.held_ms, view.session.as_ref());
        let (log, now) = (&mut self.locks.log, self.now);
        log.add(LogEvent::LongHold, self.at, Some(owner), token, text, now);
    }
}

fn describe_hold(text: &mut String, held_ms: Option<i64>, session: Option<&Rc<[u8]>>) {
    if let Some(held_ms) = held_ms {
        let _ = write!(text, ", after {held_ms} ms");
    }
    if let Some(session) = session {
        let _ = write!(text, ", session '{}'", Word::new(session));
    }
}

impl Locks {
    // --- Telling waiters -------------------------------------------------------------------------

    pub(crate) fn tell(&mut self, session: SessionId, event: Event, effects: &mut Vec<Effect>) {
        effects.extend(self.sessions.tell(session, event).map(Effect::Wake));
    }

    pub(crate) fn tell_granted(
        &mut self,
        lock: &LockKey,
        reply_to: ReplyTarget,
        owner: Rc<[u8]>,
        count: i64,
        grant: Grant,
        effects: &mut Vec<Effect>,
    ) {
        let lock = lock.clone();
        match reply_to {
            ReplyTarget::Client { handle, .. } => effects.push(Effect::Grant {
                client: handle,
                lock,
                owner,
                count,
                grant,
            }),
            ReplyTarget::Session(session) => {
                let kind = EventKind::Granted(grant);
                self.tell(session, Event { kind, lock, owner }, effects);
            }
        }
    }

    /// Takes a waiter out of the queue without a grant, and tells it why.
    pub(crate) fn dismiss(
        &mut self,
        id: WaiterId,
        why: WaitOutcome,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        // A wait for several locks is told once, under its first lock.
        let id = self.main_waiter(id)?;
        let lock = self.lock_of(id)?;
        let waiter = self.withdraw(id)?;
        self.tell_dismissed(&lock, waiter.reply_to, waiter.owner, why, effects);
        Some(())
    }

    /// Refuses the first waiters in a queue, which have nothing to wait for. Returns whether there
    /// was one.
    ///
    /// The queue stays dirty: its key is read again for the waiters behind them, in this turn or in
    /// the next. So a hundred thousand such waiters do not hold up other clients, and a key that
    /// was changed back meanwhile counts.
    pub(crate) fn dismiss_some(
        &mut self,
        queue: RecordId,
        error: &CommandError,
        effects: &mut Vec<Effect>,
    ) -> bool {
        self.table.mark_dirty(queue);
        let mut told = 0_usize;
        while told < TOLD_AT_ONCE
            && let Some((id, _)) = self.table.first(queue)
            && self
                .dismiss(id, WaitOutcome::Refused(error.clone()), effects)
                .is_some()
        {
            told = told.saturating_add(1);
        }
        told > 0
    }

    pub(crate) fn tell_dismissed(
        &mut self,
        lock: &LockKey,
        reply_to: ReplyTarget,
        owner: Rc<[u8]>,
        why: WaitOutcome,
        effects: &mut Vec<Effect>,
    ) {
        match reply_to {
            ReplyTarget::Client { handle, .. } => effects.push(Effect::Dismiss {
                client: handle,
                why,
            }),
            ReplyTarget::Session(session) => {
                let kind = match why {
                    WaitOutcome::NotAcquired { ttl_ms } => EventKind::Timeout { ttl_ms },
                    WaitOutcome::Refused(error) => EventKind::Error(error),
                };
                let lock = lock.clone();
                self.tell(session, Event { kind, lock, owner }, effects);
            }
        }
    }
}
