//! The plain lock: one holder, who may enter again.

use crate::decisions::decision::{Decision, Entry};
use crate::interface::effect::{Field, Holder, Value, Write};
use crate::interface::error::CommandError;
use crate::interface::request::{Release, Renew};
use crate::interface::stored::{Count, Hash};
use crate::memory::log::metrics::count;
use crate::values::ids::{SessionId, WaiterId};
use crate::values::mode::Mode;
use crate::values::token::Token;

impl Decision<'_> {
    /// Takes a free lock with this token. The hold count, and the token.
    pub(crate) fn begin_plain(&mut self, entry: &Entry<'_>, token: Token) -> (i64, Token) {
        let end = entry.lease.end(self.now);
        self.count_grant();
        self.write(Write::Set(
            (Field::Owner(entry.holder.clone()), Value::Number(1)),
            Some((Field::Fence, Value::Fence(token))),
        ));
        self.write(Write::ExpireAt(end));
        self.check_after(Some(end));
        let (owner, session) = (entry.owner, entry.session);
        self.bind(owner, Mode::Plain, session, Some(token), Some(end));
        (1, token)
    }

    /// The owner of a hold enters it once more, or starts its lease anew. A wait that is granted
    /// does not shorten it.
    pub(crate) fn reenter(
        &mut self,
        hash: &Hash,
        own: Count,
        entry: &Entry<'_>,
    ) -> Result<(i64, Token), CommandError> {
        let Count::Valid(held) = own else {
            return Err(CommandError::HoldCountMalformed);
        };
        let entered = if entry.once {
            Some(held)
        } else {
            Count::next(held)
        };
        let entered = entered.ok_or(CommandError::HoldCountOverflow)?;
        // A hold that a script took has no token; one of ours keeps the one it was granted with.
        let token = hash.token.unwrap_or_else(|| self.mint());
        count(&mut self.locks.counters.reentries);
        let owner = || Field::Owner(entry.holder.clone());
        let entered_anew = (entered != held).then(|| (owner(), Value::Number(entered)));
        let token_anew = (hash.token.is_none()).then_some((Field::Fence, Value::Fence(token)));
        match (entered_anew, token_anew) {
            (Some(first), second) => self.write(Write::Set(first, second)),
            (None, Some(first)) => self.write(Write::Set(first, None)),
            (None, None) => {}
        }
        let wanted = entry.lease.end(self.now);
        let ends_at = if entry.keeps(hash.ends_at, wanted) {
            // A script may have begun it, and nobody has heard yet when it ends.
            self.check_after(hash.ends_at);
            hash.ends_at
        } else {
            self.start_lease(hash, wanted)
        };
        if entry.once {
            self.locks
                .sessions
                .confirm(self.at, entry.owner, Mode::Plain, true);
        }
        let (owner, session) = (entry.owner, entry.session);
        self.bind(owner, Mode::Plain, session, Some(token), ends_at);
        Ok((entered, token))
    }

    pub(crate) fn renew_plain(
        &mut self,
        hash: &Hash,
        request: &Renew<'_>,
        session: Option<SessionId>,
    ) {
        let ends_at = self.start_lease(hash, request.lease.end(self.now));
        self.bind(request.owner, Mode::Plain, session, hash.token, ends_at);
    }

    /// The owner's lease is to end then. When the key ends, which may be later: others in the same
    /// hash, of whom there are none unless somebody else wrote it, lose nothing.
    fn start_lease(&mut self, hash: &Hash, wanted: i64) -> Option<i64> {
        let changed = hash.lease_end(wanted);
        if let Some(end) = changed {
            self.write(Write::ExpireAt(end));
        }
        let ends_at = changed.or(hash.ends_at);
        self.check_after(ends_at);
        ends_at
    }

    /// Gives one hold back. Those that are left.
    pub(crate) fn leave_plain(&mut self, hash: &Hash, held: i64, request: &Release<'_>) -> i64 {
        let left = held.saturating_sub(1);
        if left == 0 {
            self.end_plain(hash, request.owner);
            return 0;
        }
        self.set(Field::Owner(Holder::Caller), Value::Number(left));
        let ends_at = match request.lease {
            Some(lease) => self.start_lease(hash, lease.end(self.now)),
            None => hash.ends_at,
        };
        self.bind(request.owner, Mode::Plain, None, hash.token, ends_at);
        left
    }

    /// The owner's hold is over, whatever its count.
    pub(crate) fn end_plain(&mut self, hash: &Hash, owner: &[u8]) {
        self.record_hold(owner, Mode::Plain, hash.token);
        self.unbind(owner, Mode::Plain);
        if hash.others {
            self.write(Write::Remove(Field::Owner(Holder::Caller)));
            // Another field with a TTL of its own may be over, and is counted still.
            self.reconcile_now();
        } else {
            self.free(Mode::Plain);
        }
    }

    /// Grants a waiter that is first in the queue, on top of what its owner has already or of a
    /// free lock.
    pub(crate) fn hand_over_plain(
        &mut self,
        id: WaiterId,
        present: Option<&Hash>,
        message: Option<Mode>,
    ) {
        let is_granted = self.grant(id, message, |decision, entry| {
            if let Some(hash) = present {
                return decision.reenter(hash, hash.own.unwrap_or(Count::Malformed), entry);
            }
            // A hold that a session of the owner had, and that others took away, is not this one.
            decision.lose_hold(entry.owner, Mode::Plain);
            let token = decision.mint();
            Ok(decision.begin_plain(entry, token))
        });
        // A script has made the first in line a holder, and may have made the next one, too.
        if is_granted && present.is_some() {
            self.reconcile_now();
        }
    }
}

impl Hash {
    /// The key's expiry when this owner's lease is to end then: never less than what the others in
    /// the same hash have. None if it stays.
    fn lease_end(&self, wanted: i64) -> Option<i64> {
        match self.ends_at {
            _ if !self.others => Some(wanted),
            Some(end) => (wanted > end).then_some(wanted),
            None => None,
        }
    }
}
