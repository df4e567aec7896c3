//! The plain lock: one holder, who may enter again.

use crate::line::{LockRef, QueueId, Waiter};
use crate::lock::{Acquired, Locks};
use crate::metrics::count;
use crate::request::{Acquire, Release, Renew};
use crate::session::SessionId;
use crate::stored::{Count, Hash};
use crate::{CommandError, Effect, Grant, Holder, Mode, Now, Token};
use std::rc::Rc;

impl Locks {
    pub(crate) fn take_plain(
        &mut self,
        lock: LockRef<'_>,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        token: Token,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Acquired {
        let ends_at = Some(request.lease.end(now));
        count(&mut self.counters.grants);
        effects.push(Effect::Write {
            holder: Holder::Caller,
            count: Some(1),
            token: Some(token),
            ends_at,
        });
        let (owner, mode) = (request.owner, Mode::Plain);
        self.bind(lock, owner, mode, session, Some(token), ends_at);
        Acquired::Held { count: 1, token }
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one decision, all of them needed"
    )]
    pub(crate) fn reenter(
        &mut self,
        lock: LockRef<'_>,
        hash: &Hash,
        own: Count,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Acquired, CommandError> {
        let Count::Valid(held) = own else {
            return Err(CommandError::HoldCountMalformed);
        };
        let entered = if request.once {
            Some(held)
        } else {
            Count::next(held)
        };
        let entered = entered.ok_or(CommandError::HoldCountOverflow)?;
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
        let (owner, mode) = (request.owner, Mode::Plain);
        if request.once {
            self.sessions.confirm(lock, owner, mode);
        }
        self.bind(lock, owner, mode, session, Some(token), ends_at);
        Ok(Acquired::Held {
            count: entered,
            token,
        })
    }

    pub(crate) fn renew_plain(
        &mut self,
        lock: LockRef<'_>,
        hash: &Hash,
        request: &Renew<'_>,
        session: Option<SessionId>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let ends_at = hash.lease_end(request.lease.end(now));
        if ends_at.is_some() {
            effects.push(Effect::Write {
                holder: Holder::Caller,
                count: None,
                token: None,
                ends_at,
            });
            self.check_after(self.lines.find(lock), ends_at, now);
        }
        let (ends_at, mode) = (ends_at.or(hash.ends_at), Mode::Plain);
        self.bind(lock, request.owner, mode, session, hash.token, ends_at);
    }

    pub(crate) fn leave_plain(
        &mut self,
        lock: LockRef<'_>,
        hash: &Hash,
        held: i64,
        request: &Release<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> i64 {
        let left = held.saturating_sub(1);
        if left == 0 {
            self.end_plain(lock, hash, request.owner, now, effects);
            return 0;
        }
        let lease = request.lease;
        let ends_at = lease.and_then(|lease| hash.lease_end(lease.end(now)));
        effects.push(Effect::Write {
            holder: Holder::Caller,
            count: Some(left),
            token: None,
            ends_at,
        });
        let (ends_at, mode) = (ends_at.or(hash.ends_at), Mode::Plain);
        self.check_after(self.lines.find(lock), ends_at, now);
        self.bind(lock, request.owner, mode, None, hash.token, ends_at);
        left
    }

    /// The owner's hold is over, whatever its count.
    pub(crate) fn end_plain(
        &mut self,
        lock: LockRef<'_>,
        hash: &Hash,
        owner: &[u8],
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        self.record_hold(hash.token, now);
        self.unbind(lock, owner, Mode::Plain);
        if hash.others {
            effects.push(Effect::Leave);
        } else {
            self.free(self.lines.find(lock), Mode::Plain, now, effects);
        }
    }

    /// Grants the first in line, and with it the waiters of the same owner directly behind it, on
    /// top of the holds that this owner has in `present`.
    pub(crate) fn hand_over_plain(
        &mut self,
        line: QueueId,
        present: Option<(Hash, i64)>,
        message: Option<Mode>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let Some((_, first)) = self.lines.first(line) else {
            return;
        };
        let owner = Rc::clone(&first.owner);
        let Some(lock) = self.lines.lock_of(line).cloned() else {
            return;
        };
        let (hash, entered_before) = present.unzip();
        let kept = hash.and_then(|hash| hash.token);
        let token = kept.unwrap_or_else(|| self.tokens.mint(now.wall_us));
        let mut held = entered_before.unwrap_or(0);
        let mut ends_at = None;
        let mut session = None;
        let write_at = effects.len();
        let mut next = self.lines.first(line).map(|(id, _)| id);
        while let Some(id) = next
            && let Some(entered) = Count::next(held)
        {
            next = self.lines.get(id).and_then(Waiter::own_behind);
            next = next.filter(|id| self.lines.get(*id).is_some_and(Waiter::is_plain));
            let Some(waiter) = self.leave(id) else { break };
            let lease_end = waiter.lease.end(now);
            held = entered;
            ends_at = hash.map_or(Some(lease_end), |hash| hash.lease_end(lease_end));
            session = waiter.session.or(session);
            self.count_hand_over(entered, now.mono_ms.saturating_sub(waiter.since));
            let mode = Mode::Plain;
            let grant = Grant {
                token,
                mode,
                several: None,
            };
            self.tell_granted(&lock, waiter.seat, waiter.owner, entered, grant, effects);
        }
        let write = Effect::Write {
            holder: Holder::Waiter(Rc::clone(&owner)),
            count: Some(held),
            token: kept.is_none().then_some(token),
            ends_at,
        };
        // The write and the message come before word to the waiters.
        let message = message.map(Effect::Publish);
        effects.splice(write_at..write_at, std::iter::once(write).chain(message));
        // Where others are in the hash, their longer lease may have stayed.
        let ends_at = ends_at.or_else(|| hash?.ends_at);
        self.lines.check_after(line, ends_at, now);
        self.holder_may_have_all(line, &owner);
        let (lock, mode) = (lock.as_ref(), Mode::Plain);
        self.bind(lock, &owner, mode, session, Some(token), ends_at);
    }

    fn count_hand_over(&mut self, entered: i64, waited_ms: i64) {
        self.count_waited(waited_ms);
        count(if entered == 1 {
            &mut self.counters.grants
        } else {
            &mut self.counters.reentries
        });
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
