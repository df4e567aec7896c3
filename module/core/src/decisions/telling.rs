//! Telling waiters and sessions how a wait ended.

use crate::interface::effect::{Effect, Grant, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::event::{Event, EventKind};
use crate::memory::hold::SessionHold;
use crate::memory::state::Locks;
use crate::memory::table::ReplyTarget;
use crate::values::ids::{RecordId, SessionId, WaiterId};
use crate::values::lock_key::LockKey;
use crate::values::mode::Mode;
use crate::values::token::Token;
use std::rc::Rc;

/// One decision refuses at most this many waiters that have nothing to wait for.
pub(crate) const TOLD_AT_ONCE: usize = 100;

/// A wait, and where its outcome is sent. A wait for several locks is named by its first lock.
pub(crate) struct WaitOf {
    pub(crate) lock: LockKey,
    pub(crate) owner: Rc<[u8]>,
    mode: Mode,
    reply_to: ReplyTarget,
}

impl WaitOf {
    /// The event that the wait is over, with the token if it was granted.
    fn event(self, kind: EventKind, token: Option<Token>) -> Event {
        Event {
            kind,
            lock: self.lock,
            owner: self.owner,
            mode: self.mode,
            token,
        }
    }
}

impl Locks {
    pub(crate) fn wait_of(&self, id: WaiterId) -> Option<WaitOf> {
        let waiter = self.table.get(id)?;
        Some(WaitOf {
            lock: self.lock_of(id)?,
            owner: Rc::clone(&waiter.owner),
            mode: waiter.mode,
            reply_to: waiter.reply_to,
        })
    }

    fn tell(&mut self, session: SessionId, event: Event, effects: &mut Vec<Effect>) {
        effects.extend(self.sessions.tell(session, event).map(Effect::Wake));
    }

    /// Tells the session of a hold what happened to it.
    pub(crate) fn tell_of(
        &mut self,
        hold: SessionHold,
        kind: EventKind,
        effects: &mut Vec<Effect>,
    ) {
        let event = Event {
            kind,
            lock: hold.lock,
            owner: hold.owner,
            mode: hold.mode,
            token: hold.token,
        };
        self.tell(hold.session, event, effects);
    }

    pub(crate) fn tell_granted(
        &mut self,
        of: WaitOf,
        count: i64,
        grant: Grant,
        effects: &mut Vec<Effect>,
    ) {
        match of.reply_to {
            ReplyTarget::Client { handle, .. } => effects.push(Effect::Grant {
                client: handle,
                lock: of.lock,
                owner: of.owner,
                count,
                grant,
            }),
            ReplyTarget::Session(session) => {
                self.tell(
                    session,
                    of.event(EventKind::Granted, Some(grant.token)),
                    effects,
                );
            }
        }
    }

    /// Takes a waiter out of the queue without a grant, and tells it why.
    pub(crate) fn leave(
        &mut self,
        id: WaiterId,
        why: WaitOutcome,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        // A wait for several locks is told once, under its first lock.
        let id = self.main_waiter(id)?;
        let of = self.wait_of(id)?;
        self.leave_untold(id)?;
        self.tell_left(of, why, effects);
        Some(())
    }

    /// Refuses the first waiters in a queue, which have nothing to wait for. Returns whether there
    /// was one.
    ///
    /// The queue stays dirty: its key is read again for the waiters behind them, in this turn or in
    /// the next. So a hundred thousand such waiters do not hold up other clients, and a key that
    /// was changed back meanwhile counts.
    pub(crate) fn refuse_some(
        &mut self,
        queue: RecordId,
        error: &CommandError,
        effects: &mut Vec<Effect>,
    ) -> bool {
        self.table.mark_dirty(queue);
        for told in 0..TOLD_AT_ONCE {
            let why = WaitOutcome::Refused(error.clone());
            let first = self.table.first(queue).map(|(id, _)| id);
            if first.and_then(|id| self.leave(id, why, effects)).is_none() {
                return told > 0;
            }
        }
        true
    }

    pub(crate) fn tell_left(&mut self, of: WaitOf, why: WaitOutcome, effects: &mut Vec<Effect>) {
        match of.reply_to {
            ReplyTarget::Client { handle, .. } => effects.push(Effect::Leave {
                client: handle,
                why,
            }),
            ReplyTarget::Session(session) => {
                let kind = match why {
                    WaitOutcome::NotAcquired { ttl_ms } => EventKind::Timeout { ttl_ms },
                    // Its own session connection closed. A waiter that is blocked on another
                    // connection is refused there.
                    WaitOutcome::Refused(CommandError::NoSession) => EventKind::Left,
                    WaitOutcome::Refused(error) => EventKind::Error(error),
                };
                self.tell(session, of.event(kind, None), effects);
            }
        }
    }
}
