//! Telling waiters and sessions how a wait ended.

use crate::interface::effect::{Effect, Grant, WaitOutcome};
use crate::interface::error::CommandError;
use crate::memory::session::{Event, EventKind};
use crate::memory::state::Locks;
use crate::memory::table::ReplyTarget;
use crate::values::ids::{RecordId, SessionId, WaiterId};
use crate::values::lock_key::LockKey;
use std::rc::Rc;

/// One decision refuses at most this many waiters that have nothing to wait for.
pub(crate) const TOLD_AT_ONCE: usize = 100;

impl Locks {
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
    pub(crate) fn leave(
        &mut self,
        id: WaiterId,
        why: WaitOutcome,
        effects: &mut Vec<Effect>,
    ) -> Option<()> {
        // A wait for several locks is told once, under its first lock.
        let id = self.main_waiter(id)?;
        let lock = self.lock_of(id)?;
        let waiter = self.leave_untold(id)?;
        self.tell_left(&lock, waiter.reply_to, waiter.owner, why, effects);
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
        let mut told = 0_usize;
        while told < TOLD_AT_ONCE
            && let Some((id, _)) = self.table.first(queue)
            && self
                .leave(id, WaitOutcome::Refused(error.clone()), effects)
                .is_some()
        {
            told = told.saturating_add(1);
        }
        told > 0
    }

    pub(crate) fn tell_left(
        &mut self,
        lock: &LockKey,
        reply_to: ReplyTarget,
        owner: Rc<[u8]>,
        why: WaitOutcome,
        effects: &mut Vec<Effect>,
    ) {
        match reply_to {
            ReplyTarget::Client { handle, .. } => effects.push(Effect::Leave {
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
