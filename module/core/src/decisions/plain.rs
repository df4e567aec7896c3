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
    /// Takes a free lock with this token. Returns the hold count and the token.
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

    /// Enters the owner's hold once more, or with ONCE only starts its lease anew. A grant after a
    /// wait does not shorten the lease.
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
        // A hold that a script took has no token yet. Our own hold keeps the token of its grant.
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
            // A script may have begun this hold, so the queue may not know yet when it ends.
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

    /// Sets the end of the owner's lease. Returns the key's end, which may be later: other owners
    /// in the same hash must not lose time. Only another program can have written them there.
    fn start_lease(&mut self, hash: &Hash, wanted: i64) -> Option<i64> {
        let changed = hash.lease_end(wanted);
        if let Some(end) = changed {
            self.write(Write::ExpireAt(end));
        }
        let ends_at = changed.or(hash.ends_at);
        self.check_after(ends_at);
        ends_at
    }

    /// Gives one hold back. Returns the holds left.
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

    /// Ends the owner's hold, whatever its count.
    pub(crate) fn end_plain(&mut self, hash: &Hash, owner: &[u8]) {
        self.record_hold(owner, Mode::Plain, hash.token);
        self.unbind(owner, Mode::Plain);
        if hash.others {
            self.write(Write::Remove(Field::Owner(Holder::Caller)));
            // Another owner's field that has a TTL of its own may be over and still be counted as a
            // holder. Then the lock is free, and the queue must be reconciled.
            self.reconcile_now();
        } else {
            self.free(Mode::Plain);
        }
    }

    /// Grants the first waiter in the queue: it takes a free lock, or re-enters the hold that its
    /// owner has already.
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
            // A session may still have a former hold of this owner on record, which others ended.
            // It is not the new hold, so it counts as lost.
            decision.lose_hold(entry.owner, Mode::Plain);
            let token = decision.mint();
            Ok(decision.begin_plain(entry, token))
        });
        // A script made the first waiter's owner a holder. It may have done the same for the next
        // one.
        if is_granted && present.is_some() {
            self.reconcile_now();
        }
    }
}

impl Hash {
    /// The key's new expiry if this owner's lease shall end at `wanted`; none if the expiry stays.
    /// While other owners are in the hash, it never gets earlier: they must not lose time.
    fn lease_end(&self, wanted: i64) -> Option<i64> {
        match self.ends_at {
            _ if !self.others => Some(wanted),
            Some(end) => (wanted > end).then_some(wanted),
            None => None,
        }
    }
}
