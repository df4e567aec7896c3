//! A decision, and the steps that decisions are made of.
//!
//! Each decision is total: any stored value has an answer. The effects must be carried out in their
//! order: writes, then the unlock message, then replies to waiters. Otherwise a waiter could be
//! told of a hold that is not written yet.

use crate::decisions::pending_wait::PendingWait;
use crate::interface::effect::{Effect, Field, Holder, Value, Write};
use crate::interface::error::CommandError;
use crate::interface::event::{EventKind, LostReason};
use crate::interface::outcome::Outcome;
use crate::interface::stored::{Count, Stored};
use crate::interface::stored_permits::PermitsRequest;
use crate::memory::agenda::Job;
use crate::memory::hold::{HoldIndex, SessionHold};
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::values::ids::{HoldId, RecordId, SessionId};
use crate::values::known::Known;
use crate::values::lock_key::LockRef;
use crate::values::mode::{Kind, Mode};
use crate::values::must_exist::MustExist;
use crate::values::time::{Lease, NEVER, Now, held_ms};
use crate::values::token::Token;
use std::rc::Rc;

/// The result of an ACQUIRE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// The caller holds the lock, or does not and does not wait.
    Decided(Outcome),
    /// The lock is free but has waiters. They are granted first; then the command is decided again.
    ReconcileFirst,
    /// The caller must wait.
    MustWait(PendingWait),
}

impl Acquired {
    pub(crate) fn held(count: i64, token: Token) -> Self {
        Self::Decided(Outcome::Held { count, token })
    }
}

/// The consequence of a change of a lock's holds for its waiters. The function of a kind writes its
/// own fields and returns this; [`Decision::follow`] acts on it.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(crate) enum Then {
    /// Nothing: the holders left keep the waiters out as before.
    Nothing,
    /// The lock is free, and was held in this mode.
    Freed(Mode),
    /// The lock has holders left, and a waiter may now come in beside them.
    MayLetIn,
}

/// An entry about to be made: the first of a hold, or one more.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) holder: Holder,
    pub(crate) mode: Mode,
    /// How many permits, if it is for permits.
    pub(crate) asked: Option<PermitsRequest>,
    /// The token of a new hold, if it shares one with other locks.
    pub(crate) token: Option<Token>,
    pub(crate) lease: Lease,
    pub(crate) session: Option<SessionId>,
    pub(crate) once: bool,
    /// Whether its owner has waited for it. The lease that it named when it began to wait may be
    /// shorter than the one that it was promised since, if it holds the lock already.
    pub(crate) waited: bool,
}

impl<'a> Entry<'a> {
    /// The first entry of a plain lock.
    pub(crate) fn new(
        owner: &'a [u8],
        holder: Holder,
        lease: Lease,
        session: Option<SessionId>,
    ) -> Self {
        Self {
            owner,
            holder,
            mode: Mode::Plain,
            asked: None,
            token: None,
            lease,
            session,
            once: false,
            waited: false,
        }
    }

    /// The owner's present count, 0 without a hold, and its count after this entry.
    pub(crate) fn counted(&self, own: Option<Count>) -> Result<(i64, i64), CommandError> {
        let held = match own {
            None => 0,
            Some(Count::Valid(held)) => held,
            Some(Count::Malformed) => return Err(CommandError::HoldCountMalformed),
        };
        let entered = Count::entered(held, self.once);
        Ok((held, entered.ok_or(CommandError::HoldCountOverflow)?))
    }

    /// Whether the entry raises the count of a lock that is stored like this.
    pub(crate) fn counts(&self, stored: &Stored) -> Result<bool, CommandError> {
        let own = stored.own(self.mode).map(|(count, _)| count);
        self.counted(own).map(|(held, entered)| held != entered)
    }

    /// Whether the hold keeps its present end because that is later than `wanted`: a grant after a
    /// wait must not shorten a lease that its owner relies on.
    pub(crate) fn keeps(&self, ends_at: Known<Option<i64>>, wanted: i64) -> bool {
        self.waited && ends_at.get_or(None).is_none_or(|end| end > wanted)
    }
}

/// The hold after an entry: its count (or the number of permits), its token and its end.
pub(crate) type Entered = (i64, Token, Option<i64>);

/// The token and the end of a hold that goes on.
pub(crate) type TokenAndEnd = (Option<Token>, Option<i64>);

/// A decision while it is made: about one lock, or about several one after the other.
pub(crate) struct Decision<'d> {
    pub(crate) locks: &'d mut Locks,
    /// The lock that it is about; of several the first.
    pub(crate) at: LockRef<'d>,
    /// The lock's place among the locks that were read.
    pub(crate) place: usize,
    pub(crate) now: Now,
    pub(crate) effects: &'d mut Vec<Effect>,
}

impl Decision<'_> {
    /// The part of this decision that is about another of the locks that were read.
    pub(crate) fn part<'p>(&'p mut self, place: usize, at: LockRef<'p>) -> Decision<'p> {
        Decision {
            locks: self.locks,
            at,
            place,
            now: self.now,
            effects: self.effects,
        }
    }

    pub(crate) fn count_grant(&mut self) {
        count(&mut self.locks.counters.grants);
        if let Some(of) = self.locks.table.patterns.of(self.at.name) {
            count(&mut of.grants);
        }
    }

    pub(crate) fn count_waited(&mut self, waited_ms: i64) {
        self.locks.counters.wait_ms.record(waited_ms);
        if let Some(of) = self.locks.table.patterns.of(self.at.name) {
            of.wait_ms.record(waited_ms);
        }
        count(&mut self.locks.counters.handovers);
    }

    /// Records how long a hold lasted that has ended. It began with this token.
    pub(crate) fn record_hold(&mut self, owner: &[u8], mode: Mode, token: Option<Token>) {
        if let Some(since) = token.and_then(|token| self.locks.tokens.minted_at(token)) {
            let held_ms = held_ms(since, self.now);
            self.locks.counters.hold_ms.record(held_ms);
            if let Some(of) = self.locks.table.patterns.of(self.at.name) {
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
        if let Some(error) = stored.not_a_lock() {
            return Err(self.not_a_lock(error));
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
        stored: &Stored,
        asked: Kind,
        queue: Option<RecordId>,
    ) -> Result<(), CommandError> {
        let queue = queue.filter(|_| stored.is_free());
        let first = queue.and_then(|queue| self.locks.table.first(queue));
        match first.map(|(_, first)| first.mode.kind()) {
            Some(held) if held != asked => Err(CommandError::WrongKind { held, asked }),
            _ => Ok(()),
        }
    }

    /// Another program has overwritten the key. Marks it dirty, so that the waiters are told now
    /// and not when the old lease would have ended.
    pub(crate) fn not_a_lock(&mut self, error: CommandError) -> CommandError {
        self.locks.mark_dirty(self.at);
        error
    }

    /// The owner's hold in this mode; none if it has none, or if the request names another token
    /// than the hold's.
    pub(crate) fn own_hold(
        &mut self,
        stored: &Stored,
        mode: Mode,
        token: Option<Token>,
    ) -> Result<Option<Count>, CommandError> {
        self.check_kind(stored, mode.kind())?;
        if stored.is_free() {
            // The lock is free: as soon as this command is over, waiters are granted and sessions
            // are told of lost holds.
            self.locks.mark_dirty(self.at);
        }
        let own = stored.own(mode);
        let own = own.filter(|(_, own_token)| token.is_none() || token == *own_token);
        Ok(own.map(|(count, _)| count))
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

    /// Has the queue reconciled before this turn is over: the first waiter may now be granted as
    /// well.
    pub(crate) fn reconcile_now(&mut self) {
        if let Some(queue) = self.queue() {
            self.locks.table.mark_dirty(queue);
            self.locks.agenda.add_now(Job::Queue(queue));
        }
    }

    // --- Effects ---------------------------------------------------------------------------------

    pub(crate) fn write(&mut self, write: Write) {
        let lock = self.place;
        self.effects.push(Effect::Write { lock, write });
    }

    pub(crate) fn set(&mut self, field: Field, value: Value) {
        self.write(Write::Set((field, value), None));
    }

    /// Sends the unlock message. Permits have none: only our own clients use them.
    pub(crate) fn publish(&mut self, held_as: Mode) {
        if held_as != Mode::Permits {
            let lock = self.place;
            self.effects.push(Effect::Publish { lock, held_as });
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
        index.find(owner, mode)
    }

    /// Records that the owner holds the lock, with this token and until `ends_at`. The hold belongs
    /// to the session. If no session is named, it stays with the session that has it, if any.
    /// Another session that had it is told so. Otherwise its client would go on to believe in a
    /// hold that now ends with the other session.
    pub(crate) fn bind(
        &mut self,
        owner: &[u8],
        mode: Mode,
        session: Option<SessionId>,
        token: Option<Token>,
        ends_at: Option<i64>,
    ) {
        let id = match (self.session_hold(owner, mode), session) {
            (None, None) => return,
            (None, Some(session)) => self.add_hold(owner, mode, session, token),
            (Some(id), _) => self.rebind(id, session, token),
        };
        if let Some(id) = id {
            let ends_at = ends_at.filter(|end| *end != NEVER);
            self.locks.holds.check_after(id, ends_at);
        }
    }

    /// The session's hold goes on, perhaps with another session or another token.
    fn rebind(
        &mut self,
        id: HoldId,
        session: Option<SessionId>,
        token: Option<Token>,
    ) -> Option<HoldId> {
        let since_us = token.and_then(|token| self.locks.tokens.granted_at(token));
        let Locks { table, holds, .. } = &mut *self.locks;
        let (record, began) = holds.get(id).map(|hold| (hold.record, hold.since_us))?;
        let former = holds.rebind(id, session, token, since_us);
        table.note_hold(record, began, holds.began_at(id));
        if let (Some(former), Some(session)) = (former, session) {
            self.locks.sessions.remove_hold(former.session, id);
            self.locks.sessions.add_hold(session, id);
            let kind = EventKind::Lost(LostReason::Taken);
            self.locks.tell_of(former, kind, self.effects);
        }
        Some(id)
    }

    fn add_hold(
        &mut self,
        owner: &[u8],
        mode: Mode,
        session: SessionId,
        token: Option<Token>,
    ) -> Option<HoldId> {
        let since_us = token.and_then(|token| self.locks.tokens.granted_at(token));
        let Locks { table, holds, .. } = &mut *self.locks;
        let record = table.find_or_open(self.at)?;
        let lock = table.lock_of(record).must_exist()?.clone();
        let index = table.holds_mut(record).must_exist()?;
        let owner = Rc::from(owner);
        let id = holds.add(index, (record, lock), owner, mode, session, token, since_us)?;
        table.note_hold(record, None, since_us);
        self.locks.sessions.add_hold(session, id);
        Some(id)
    }

    /// Drops the record of a hold that has ended, and tells nobody.
    pub(crate) fn forget_hold(&mut self, owner: &[u8], mode: Mode) -> Option<SessionHold> {
        let id = self.session_hold(owner, mode)?;
        self.locks.forget_hold(id)
    }

    /// All holds of this lock are lost: tells the sessions that have them.
    #[inline]
    pub(crate) fn lose_holds(&mut self, reason: Option<LostReason>) {
        // As in `session_hold`.
        if self.locks.holds.len() == 0 {
            return;
        }
        let record = self.locks.table.find(self.at);
        let index = record.and_then(|record| self.locks.table.holds(record));
        for id in index.map_or_else(Vec::new, HoldIndex::all) {
            self.lose(id, reason);
        }
    }

    pub(crate) fn lose(&mut self, id: HoldId, reason: Option<LostReason>) {
        let Some(hold) = self.locks.forget_hold(id).must_exist() else {
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
        if let Some(of) = self.locks.table.patterns.of(&hold.lock.name) {
            count(&mut of.lost);
        }
        self.log_lost(&hold, reason);
        self.locks.tell_of(hold, kind, self.effects);
    }
}
