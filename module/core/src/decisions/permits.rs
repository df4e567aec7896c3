//! Permits: a counting semaphore. Each owner holds a number of permits, with a lease of its own. No
//! grant takes the sum of all above the limit.
//!
//! Strictly first come, first served: the first waiter waits until its request fits, and no waiter
//! behind it passes. One reading has all holders and their permits, so it serves to grant all
//! waiters that fit, and to see whether a waiter holds some already.

use crate::decisions::decision::{Acquired, Decision, Entry};
use crate::decisions::pending_wait::PendingWait;
use crate::decisions::telling::TOLD_AT_ONCE;
use crate::interface::effect::{Field, Holder, Value, WaitOutcome, Write};
use crate::interface::error::CommandError;
use crate::interface::request::{Acquire, Release, Renew};
use crate::interface::stored::Stored;
use crate::interface::stored_permits::{
    Permits, PermitsHash, PermitsHold, PermitsHolders, PermitsRequest, Room,
};
use crate::memory::log::metrics::count;
use crate::values::ids::{RecordId, SessionId, WaiterId};
use crate::values::mode::{Kind, Mode};
use crate::values::token::Token;
use std::collections::BTreeSet;

/// Holders that never release leave their fields in the hash for as long as others hold permits. A
/// grant that finds this many of them has them removed.
const SWEEP_FROM: usize = 16;

impl Decision<'_> {
    // --- Commands --------------------------------------------------------------------------------

    pub(crate) fn acquire_permits(
        &mut self,
        stored: &Stored,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        is_reconciled: bool,
        waiters_max: u32,
    ) -> Result<Acquired, CommandError> {
        self.check_kind(stored, Kind::Permits)?;
        let hash = stored.permits();
        let asked = request.asked.ok_or(CommandError::NoLimit)?;
        if let Some(own) = hash.own {
            if !request.once {
                return Err(CommandError::Held);
            }
            return Ok(self.keep_permits(&hash, own, &Entry::of(request, session)));
        }
        let queue = self.queue();
        let may_come_in = hash.is_free() || hash.room == Room::Now;
        if queue.is_some() && may_come_in && !is_reconciled {
            return Ok(Acquired::ReconcileFirst);
        }
        if let Some(queue) = queue.filter(|_| hash.is_free()) {
            self.check_kind_of_first(queue, Mode::Permits)?;
        }
        // An owner that waits already stays in the queue when the limit is lowered.
        if self.own_place(request).is_none() {
            hash.check_limit(asked)?;
        }
        let lasts = self.locks.grant_delay.lasts(self.now);
        if hash.room == Room::Now && queue.is_none() && !lasts {
            if hash.is_free() {
                self.lose_holds(None);
            }
            let entry = Entry::of(request, session);
            let (permits, token) = self.begin_permits(&hash, &entry, asked);
            return Ok(Acquired::Held {
                count: permits,
                token,
            });
        }
        let pending_wait = match hash.room {
            Room::Now | Room::Unknown => PendingWait::promised(),
            _ => PendingWait::until(hash.room_at(), hash.ttl_ms(self.now)),
        };
        self.wait_for(pending_wait, request, waiters_max)
    }

    /// ONCE: the owner keeps its permits, and its lease starts anew.
    fn keep_permits(
        &mut self,
        hash: &PermitsHash,
        own: PermitsHold,
        entry: &Entry<'_>,
    ) -> Acquired {
        count(&mut self.locks.counters.reentries);
        self.locks
            .sessions
            .confirm(self.at, entry.owner, Mode::Permits, true);
        self.set_own_permits(
            hash,
            own.begun_anew(entry.lease, self.now),
            entry.owner,
            entry.session,
        );
        Acquired::Held {
            count: own.permits.get(),
            token: own.token,
        }
    }

    pub(crate) fn renew_permits(
        &mut self,
        hash: &PermitsHash,
        request: &Renew<'_>,
        session: Option<SessionId>,
    ) {
        if let Some(own) = hash.own {
            let renewed = own.begun_anew(request.lease, self.now);
            self.set_own_permits(hash, renewed, request.owner, session);
        }
    }

    /// Gives some permits back, or all. Returns the permits left.
    pub(crate) fn leave_permits(
        &mut self,
        hash: &PermitsHash,
        request: &Release<'_>,
    ) -> Result<i64, CommandError> {
        let Some(own) = hash.own else { return Ok(0) };
        let held = own.permits.get();
        let left = request
            .permits
            .map_or(0, |given_back| held.saturating_sub(given_back.get()));
        if left < 0 {
            return Err(CommandError::PermitsNotHeld(held));
        }
        let Some(left) = Permits::new(left) else {
            self.end_permits(hash, request.owner);
            return Ok(0);
        };
        let rest = PermitsHold {
            permits: left,
            ..own
        };
        let rest = match request.lease {
            Some(lease) => rest.begun_anew(lease, self.now),
            None => rest,
        };
        self.set_own_permits(hash, rest, request.owner, None);
        self.reconcile_now();
        Ok(left.get())
    }

    /// LIMIT: sets the limit for all callers, or removes it; then the limit that each caller names
    /// counts. Returns the former limit, 0 if there was none.
    pub(crate) fn set_limit(
        &mut self,
        stored: &Stored,
        limit: Option<Permits>,
    ) -> Result<i64, CommandError> {
        self.check_kind(stored, Kind::Permits)?;
        if let Some(queue) = self.queue().filter(|_| stored.is_free()) {
            self.check_kind_of_first(queue, Mode::Permits)?;
        }
        let before = stored.permits().limit;
        self.write(limit.map_or(Write::DeleteLimit, |limit| {
            Write::SetLimit(Value::Number(limit.get()))
        }));
        // Only the first of the waiters without a limit are refused here. The others are refused
        // when the queue is reconciled.
        if let (None, Some(queue)) = (limit, self.queue()) {
            self.dismiss_without_limit(queue);
        }
        self.reconcile_now();
        Ok(before.map_or(0, Permits::get))
    }

    // --- The end of a hold -----------------------------------------------------------------------

    /// Ends the owner's hold, however many permits it has. The key goes with the last holder.
    pub(crate) fn end_permits(&mut self, hash: &PermitsHash, owner: &[u8]) {
        let token = hash.own.map(|own| own.token);
        self.record_hold(owner, Mode::Permits, token);
        self.unbind(owner, Mode::Permits);
        if hash.others_end.is_none() {
            self.write(Write::Delete);
        } else {
            self.write(Write::Remove(Field::Owner(Holder::Caller)));
            self.expire_permits(hash, None);
        }
        self.reconcile_now();
    }

    /// Sets the key's end to the end of its last holder's lease.
    pub(crate) fn end_key_with_permits(&mut self, hash: &PermitsHash) {
        self.expire_permits(hash, hash.own.map(|own| own.ends_at));
    }

    // --- Grants ----------------------------------------------------------------------------------

    /// Grants the first waiter, for which the key was read, if its request fits, and the waiters
    /// behind it that fit as well. Otherwise looks again when the request will fit.
    pub(crate) fn reconcile_permits(
        &mut self,
        queue: RecordId,
        stored: &Stored,
        others: Option<&PermitsHolders>,
        most: usize,
    ) {
        if matches!(stored, Stored::Plain(_) | Stored::ReadWrite(_)) {
            // A script made it a lock of another kind.
            return self.check_after(stored.ends_at());
        }
        let hash = stored.permits();
        let Some((id, first)) = self.locks.table.first(queue) else {
            return;
        };
        let Some(asked) = first.asked else { return };
        if hash.limit.is_none() && self.dismiss_without_limit(queue) {
            return self.reconcile_now();
        }
        if hash.own.is_some() {
            // Another program wrote this hold, or renamed the key of other permits.
            let why = WaitOutcome::Refused(CommandError::Held);
            self.locks.dismiss(id, why, self.effects);
            return self.reconcile_now();
        }
        match hash.room {
            Room::Now if self.locks.grant_delay.lasts(self.now) => self.check_after(None),
            Room::Now => {
                let ends_at = self.hand_over_permits(id, &hash, asked);
                if let (Some(others), Some(ends_at)) = (others, ends_at) {
                    let mut holders = others.holds();
                    holders.add(ends_at, asked.permits);
                    let hash = hash.granted(ends_at);
                    let most = most.saturating_sub(1);
                    return self.let_in_more(queue, hash, holders, others, most);
                }
                // The next waiter may fit as well.
                self.reconcile_now();
            }
            room => self.keep_out(queue, room),
        }
    }

    /// Grants further waiters, from the first on, as long as they fit beside these holders.
    /// `others` are the holders that were read: a waiter's owner is one of them only if another
    /// program wrote its hold.
    fn let_in_more(
        &mut self,
        queue: RecordId,
        mut hash: PermitsHash,
        mut holders: PermitsHolders,
        others: &PermitsHolders,
        most: usize,
    ) {
        let mut hold_already = None;
        for _ in 0..most {
            let Some((id, first)) = self.locks.table.first(queue) else {
                return;
            };
            let Some(asked) = first.asked else { break };
            let table = &self.locks.table;
            let hold_already: &BTreeSet<WaiterId> = hold_already.get_or_insert_with(|| {
                let waiters = others.owners().map(|owner| table.waiter_of(queue, owner));
                waiters.flatten().map(|(id, _)| id).collect()
            });
            // Checked before the room: a waiter that holds permits already is refused, whether its
            // request fits or not.
            if hold_already.contains(&id) {
                break;
            }
            match holders.room(asked, hash.limit, hash.ends_at) {
                Room::Now => {}
                Room::NoLimit => break,
                room => return self.keep_out(queue, room),
            }
            let Some(ends_at) = self.hand_over_permits(id, &hash, asked) else {
                break;
            };
            holders.add(ends_at, asked.permits);
            hash = hash.granted(ends_at);
        }
        // The next waiter needs a reading of its own, or the turn has granted enough.
        self.reconcile_now();
    }

    /// The first waiter stays, and is looked at again when its request will fit.
    fn keep_out(&mut self, queue: RecordId, room: Room) {
        self.tell_wanted(queue);
        self.check_after(room.at());
    }

    /// Refuses the first waiters that named no limit, since none is set. Returns whether there was
    /// one.
    fn dismiss_without_limit(&mut self, queue: RecordId) -> bool {
        let without = self.locks.table.without_limit(queue, TOLD_AT_ONCE);
        for id in &without {
            let why = WaitOutcome::Refused(CommandError::NoLimit);
            self.locks.dismiss(*id, why, self.effects);
        }
        !without.is_empty()
    }

    /// Grants a waiter its permits. Returns when the new hold ends.
    fn hand_over_permits(
        &mut self,
        id: WaiterId,
        hash: &PermitsHash,
        asked: PermitsRequest,
    ) -> Option<i64> {
        let ends_at = self.locks.table.get(id)?.lease.end(self.now);
        let is_granted = self.grant(id, None, |decision, entry| {
            Ok(decision.begin_permits(hash, entry, asked))
        });
        is_granted.then_some(ends_at)
    }

    /// Gives the owner these permits. Returns how many, and the token.
    fn begin_permits(
        &mut self,
        hash: &PermitsHash,
        entry: &Entry<'_>,
        asked: PermitsRequest,
    ) -> (i64, Token) {
        let (token, permits) = (self.mint(), asked.permits);
        let ends_at = entry.lease.end(self.now);
        let hold = PermitsHold {
            permits,
            ends_at,
            token,
        };
        self.count_grant();
        // While others hold permits, the hash stays when this owner's lease is over. A session may
        // still have that former hold on record. It is not the new hold, so it counts as lost.
        self.lose_hold(entry.owner, Mode::Permits);
        let set = |is_first| Write::SetPermits(entry.holder.clone(), hold, is_first);
        if hash.is_free() {
            if hash.is_there {
                self.write(Write::Delete);
            }
            self.locks.table.forget_writer(self.at);
            self.write(set(true));
            self.write(Write::ExpireAt(ends_at));
        } else {
            self.write(set(false));
            self.expire_permits(hash, Some(ends_at));
            if hash.over >= SWEEP_FROM {
                self.locks.agenda.add_sweep(self.at);
            }
        }
        let (owner, session) = (entry.owner, entry.session);
        self.bind(owner, Mode::Permits, session, Some(token), Some(ends_at));
        (permits.get(), token)
    }

    /// Replaces the owner's hold by this one.
    fn set_own_permits(
        &mut self,
        hash: &PermitsHash,
        hold: PermitsHold,
        owner: &[u8],
        session: Option<SessionId>,
    ) {
        self.write(Write::SetPermits(Holder::Caller, hold, false));
        self.expire_permits(hash, Some(hold.ends_at));
        // The lease may end earlier than before. Then a waiter may fit, so the queue must look.
        self.check_after(Some(hold.ends_at));
        let (token, end) = (Some(hold.token), Some(hold.ends_at));
        self.bind(owner, Mode::Permits, session, token, end);
    }

    fn expire_permits(&mut self, hash: &PermitsHash, own_end: Option<i64>) {
        if let Some(end) = hash.key_end(own_end) {
            self.write(Write::ExpireAt(end));
        }
    }
}

impl PermitsHash {
    /// Refuses a request that the present limit can never grant.
    fn check_limit(&self, asked: PermitsRequest) -> Result<(), CommandError> {
        let limit = self.limit.or(asked.limit).ok_or(CommandError::NoLimit)?;
        if asked.permits > limit {
            return Err(CommandError::PermitsOverLimit(limit.get()));
        }
        Ok(())
    }
}
