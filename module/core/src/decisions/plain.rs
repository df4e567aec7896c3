//! The plain lock: one holder, who may enter again.

use crate::decisions::decision::{Decision, Entered, Entry, Then, TokenAndEnd};
use crate::interface::effect::{Field, Holder, Value, Write};
use crate::interface::error::CommandError;
use crate::interface::stored::Hash;
use crate::memory::log::metrics::count;
use crate::values::mode::Mode;

impl Decision<'_> {
    /// Enters the owner's hold once more, or with ONCE only starts its lease anew. A grant after a
    /// wait does not shorten the lease.
    pub(crate) fn reenter_plain(
        &mut self,
        hash: &Hash,
        entry: &Entry<'_>,
    ) -> Result<Entered, CommandError> {
        let (held, entered) = entry.counted(hash.own)?;
        // A hold that a script took has no token yet. Our own hold keeps the token of its grant,
        // but for one case: ONCE takes other locks with it, and names one token for all. The
        // answer to a command that was sent twice would otherwise not tell which token is whose.
        // Only a script can put another owner there. Then the token is that owner's too, and stays.
        let shared = entry.token.filter(|_| entry.once && !hash.others);
        let token = shared.or(hash.token()).unwrap_or_else(|| self.mint());
        count(&mut self.locks.counters.reentries);
        let owner = || Field::Owner(entry.holder.clone());
        let entered_anew = (entered != held).then(|| (owner(), Value::Number(entered)));
        let token_anew =
            (hash.token() != Some(token)).then_some((Field::Fence, Value::Fence(token)));
        match (entered_anew, token_anew) {
            (Some(first), second) => self.write(Write::Set(first, second)),
            (None, Some(first)) => self.write(Write::Set(first, None)),
            (None, None) => {}
        }
        let wanted = entry.lease.end(self.now);
        let ends_at = if entry.keeps(hash.ends_at, wanted) {
            // A script may have begun this hold, so the queue may not know yet when it ends.
            self.check_after(hash.ends_at());
            hash.ends_at()
        } else {
            self.start_lease(hash, wanted)
        };
        Ok((entered, token, ends_at))
    }

    /// Sets the end of the owner's lease. Returns the key's end, which may be later: other owners
    /// in the same hash must not lose time. Only another program can have written them there.
    pub(crate) fn start_lease(&mut self, hash: &Hash, wanted: i64) -> Option<i64> {
        let changes = !hash.others || hash.ends_at().is_some_and(|end| wanted > end);
        let ends_at = if changes {
            self.write(Write::ExpireAt(wanted));
            Some(wanted)
        } else {
            hash.ends_at()
        };
        self.check_after(ends_at);
        ends_at
    }

    /// The owner has given one hold back, and has `left`. Its lease begins anew, or stays.
    pub(crate) fn count_down_plain(
        &mut self,
        hash: &Hash,
        left: i64,
        lease_end: Option<i64>,
    ) -> TokenAndEnd {
        self.set(Field::Owner(Holder::Caller), Value::Number(left));
        let ends_at = match lease_end {
            Some(wanted) => self.start_lease(hash, wanted),
            None => hash.ends_at(),
        };
        (hash.token(), ends_at)
    }

    /// Ends the owner's hold.
    pub(crate) fn end_plain(&mut self, hash: &Hash) -> Then {
        if !hash.others {
            return Then::Freed(Mode::Plain);
        }
        self.write(Write::Remove(Field::Owner(Holder::Caller)));
        // Another owner's field that has a TTL of its own may be over and still be counted as a
        // holder. Then the lock is free, and the queue must be reconciled.
        Then::MayLetIn
    }
}
