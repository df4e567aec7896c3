//! Permits: a counting semaphore. Each owner holds a number of permits, with a lease of its own. No
//! grant takes the sum of all above the limit.
//!
//! Strictly first come, first served: the first waiter waits until its request fits, and no waiter
//! behind it passes.

use crate::decisions::decision::{Decision, Entered, Entry, Then, TokenAndEnd};
use crate::decisions::telling::TOLD_AT_ONCE;
use crate::interface::effect::{Field, Holder, Value, WaitOutcome, Write};
use crate::interface::error::CommandError;
use crate::interface::request::Release;
use crate::interface::stored::Stored;
use crate::interface::stored_permits::{Permits, PermitsHash, PermitsHold, PermitsRequest};
use crate::memory::log::metrics::count;
use crate::values::ids::RecordId;
use crate::values::mode::{Kind, Mode};

/// Holders that never release leave their fields in the hash for as long as others hold permits. A
/// grant that finds this many of them has them removed.
const SWEEP_FROM: usize = 16;

impl Decision<'_> {
    // --- Commands --------------------------------------------------------------------------------

    /// Gives the owner the permits that it asks for. With ONCE an owner that has some keeps them,
    /// and its lease starts anew. Returns how many it has, and the token.
    pub(crate) fn enter_permits(
        &mut self,
        hash: &PermitsHash,
        entry: &Entry<'_>,
    ) -> Result<Entered, CommandError> {
        let Some(own) = hash.own else {
            return self.begin_permits(hash, entry);
        };
        if !entry.once {
            return Err(CommandError::Held);
        }
        count(&mut self.locks.counters.reentries);
        let own = own.ending(entry.lease.end(self.now));
        self.set_own_permits(hash, own);
        Ok((own.permits.get(), own.token, Some(own.ends_at)))
    }

    fn begin_permits(
        &mut self,
        hash: &PermitsHash,
        entry: &Entry<'_>,
    ) -> Result<Entered, CommandError> {
        let permits = entry.asked.ok_or(CommandError::NoLimit)?.permits;
        let (token, ends_at) = (self.mint(), entry.lease.end(self.now));
        let hold = PermitsHold {
            permits,
            ends_at,
            token,
        };
        self.count_grant();
        let set = |is_first| Write::SetPermits(entry.holder.clone(), hold, is_first);
        if hash.is_free() {
            self.write(set(true));
            self.write(Write::ExpireAt(ends_at));
        } else {
            self.write(set(false));
            self.expire_permits(hash, Some(ends_at));
            if hash.over >= SWEEP_FROM {
                self.locks.agenda.add_sweep(self.at);
            }
        }
        Ok((permits.get(), token, Some(ends_at)))
    }

    /// Gives some permits back, or all. Returns the permits left.
    pub(crate) fn release_permits(
        &mut self,
        hash: &PermitsHash,
        request: &Release<'_>,
    ) -> Result<(i64, Then), CommandError> {
        let Some(own) = hash.own else {
            return Ok((0, Then::Nothing));
        };
        let held = own.permits.get();
        let left = request
            .permits
            .map_or(0, |given_back| held.saturating_sub(given_back.get()));
        if left < 0 {
            return Err(CommandError::PermitsNotHeld(held));
        }
        let Some(permits) = Permits::new(left) else {
            let then = self.give_back(&Stored::Permits(*hash), request);
            return Ok((0, then));
        };
        let rest = PermitsHold { permits, ..own };
        let lease_end = request.lease.map(|lease| lease.end(self.now));
        let rest = rest.ending(lease_end.unwrap_or(rest.ends_at));
        let (token, ends_at) = self.set_own_permits(hash, rest);
        self.bind(request.owner, Mode::Permits, None, token, ends_at);
        Ok((left, Then::MayLetIn))
    }

    /// LIMIT: sets the limit for all callers, or removes it; then the limit that each caller names
    /// counts. Returns the former limit, 0 if there was none.
    pub(crate) fn set_limit(
        &mut self,
        stored: &Stored,
        limit: Option<Permits>,
    ) -> Result<i64, CommandError> {
        self.check_kind(stored, Kind::Permits)?;
        self.check_kind_of_first(stored, Kind::Permits, self.queue())?;
        let before = stored.permits().limit;
        self.write(limit.map_or(Write::DeleteLimit, |limit| {
            Write::SetLimit(Value::Number(limit.get()))
        }));
        // Only the first of the waiters without a limit are refused here. The others are refused
        // when the queue is reconciled.
        if let (None, Some(queue)) = (limit, self.queue()) {
            self.refuse_without_limit(queue);
        }
        self.reconcile_now();
        Ok(before.map_or(0, Permits::get))
    }

    /// Refuses the first waiters that named no limit, since none is set. Returns whether there was
    /// one.
    pub(crate) fn refuse_without_limit(&mut self, queue: RecordId) -> bool {
        let without = self.locks.table.without_limit(queue, TOLD_AT_ONCE);
        for id in &without {
            let why = WaitOutcome::Refused(CommandError::NoLimit);
            self.locks.leave(*id, why, self.effects);
        }
        !without.is_empty()
    }

    // --- The end of a hold -----------------------------------------------------------------------

    /// Ends the owner's hold, however many permits it has. The key goes with the last holder.
    pub(crate) fn end_permits(&mut self, hash: &PermitsHash) -> Then {
        if hash.others_end.is_none() {
            return Then::Freed(Mode::Permits);
        }
        self.write(Write::Remove(Field::Owner(Holder::Caller)));
        self.expire_permits(hash, None);
        Then::MayLetIn
    }

    /// Sets the key's end to the end of its last holder's lease.
    pub(crate) fn end_key_with_permits(&mut self, hash: &PermitsHash) {
        self.expire_permits(hash, hash.own.map(|own| own.ends_at));
    }

    /// Replaces the owner's hold by this one.
    pub(crate) fn set_own_permits(&mut self, hash: &PermitsHash, hold: PermitsHold) -> TokenAndEnd {
        self.write(Write::SetPermits(Holder::Caller, hold, false));
        self.expire_permits(hash, Some(hold.ends_at));
        // The lease may end earlier than before. Then a waiter may fit, so the queue must look.
        self.check_after(Some(hold.ends_at));
        (Some(hold.token), Some(hold.ends_at))
    }

    fn expire_permits(&mut self, hash: &PermitsHash, own_end: Option<i64>) {
        if let Some(end) = hash.key_end(own_end) {
            self.write(Write::ExpireAt(end));
        }
    }
}

impl PermitsHash {
    /// Refuses a request that the present limit can never grant.
    pub(crate) fn check_limit(&self, asked: PermitsRequest) -> Result<(), CommandError> {
        let limit = self.limit.or(asked.limit).ok_or(CommandError::NoLimit)?;
        if asked.permits > limit {
            return Err(CommandError::PermitsOverLimit(limit.get()));
        }
        Ok(())
    }
}
