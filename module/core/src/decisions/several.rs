//! Several locks at once: all or none.
//!
//! A wait for several locks has a waiter in the queue of each, and holds nothing new until it can
//! have all: at each lock it is the first waiter and the lock is free, or its owner holds the lock
//! already. So a wait never takes one of its locks before the others.

use crate::decisions::decision::{Acquired, Decision, Entry};
use crate::decisions::pending_wait::PendingWait;
use crate::decisions::telling::TOLD_AT_ONCE;
use crate::interface::effect::{Effect, Grant, Holder, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::request::{MultiAcquire, MultiRelease, Release, WaitMode};
use crate::interface::stored::{Count, Hash, Stored};
use crate::memory::agenda::Job;
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::values::ids::{MultiId, RecordId, WaiterId};
use crate::values::lock_key::LockRef;
use crate::values::mode::{Kind, Mode};
use crate::values::time::Now;
use crate::values::token::Token;

/// The locks that a command names, and the stored value of each.
pub(crate) struct LockSet<'a> {
    pub(crate) locks: &'a [LockRef<'a>],
    pub(crate) stored: &'a [Stored],
}

impl LockSet<'_> {
    pub(crate) fn each(&self) -> impl Iterator<Item = (usize, LockRef<'_>, &Stored)> {
        let locks = self.locks.iter().zip(self.stored).enumerate();
        locks.map(|(place, (lock, stored))| (place, *lock, stored))
    }
}

impl Locks {
    /// MACQUIRE: takes all locks, or reports that some are held. A refusal changes nothing.
    pub(crate) fn acquire_several(
        &mut self,
        several: &LockSet<'_>,
        request: &MultiAcquire<'_>,
        is_reconciled: bool,
        waiters_max: u32,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Acquired, CommandError> {
        let session = self.listened(request.session)?;
        let is_promised = |(_, lock, stored): (_, LockRef<'_>, &Stored)| {
            stored.is_free() && self.table.queue(lock).is_some()
        };
        if !is_reconciled && several.each().any(is_promised) {
            return Ok(Acquired::ReconcileFirst);
        }
        let mut can_have_all = true;
        for (place, lock, stored) in several.each() {
            let mut decision = self.decision(lock, place, now, effects);
            can_have_all &= decision.can_have(stored, request.once)?;
        }
        if can_have_all && self.may_grant_several(several, now) {
            let entry = Entry {
                owner: request.owner,
                holder: Holder::Caller,
                mode: Mode::Plain,
                asked: None,
                token: None,
                lease: request.lease,
                session,
                once: request.once,
                waited: false,
            };
            let (held, _) = self.enter_all(several, &entry, now, effects)?;
            if request.wanted {
                self.ask_if_several_wanted(several, request.owner, now, effects);
            }
            return Ok(Acquired::held(held));
        }
        let ttl_ms = self.ttl_or_delay_ms(ttl_of_others_ms(several.stored, now), now);
        if request.wait_mode == WaitMode::None {
            self.tell_several_wanted(several, request.owner, effects);
            return Ok(Acquired::NotHeld { ttl_ms });
        }
        if self.own_multi(several.locks, request).is_none() {
            for (place, lock, _) in several.each() {
                let mut decision = self.decision(lock, place, now, effects);
                decision.check_may_wait(request.owner, Mode::Plain, waiters_max)?;
            }
        }
        let lease_ends = several.stored.iter().map(Stored::ends_at).collect();
        Ok(Acquired::MustWait(PendingWait::for_several(
            lease_ends, ttl_ms,
        )))
    }

    /// Whether an owner that can have all of these locks may be granted them now. During the grant
    /// delay it may only enter locks once more that it holds already.
    fn may_grant_several(&self, several: &LockSet<'_>, now: Now) -> bool {
        !self.grant_delay.lasts(now) || !several.stored.iter().any(Stored::is_free)
    }

    /// Enters all of these locks, which the owner can have. Returns the highest hold count and the
    /// token that the owner is told, and the token of each lock.
    fn enter_all(
        &mut self,
        several: &LockSet<'_>,
        entry: &Entry<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<((i64, Token), Vec<Token>), CommandError> {
        let any_new = several.stored.iter().any(Stored::is_free);
        let new = any_new.then(|| self.tokens.mint(now.wall_us));
        let entry = Entry {
            token: new,
            holder: entry.holder.clone(),
            ..*entry
        };
        let (mut highest, mut tokens) = (0, Vec::with_capacity(several.locks.len()));
        for (place, lock, stored) in several.each() {
            let mut decision = self.decision(lock, place, now, effects);
            if stored.is_free() {
                decision.lose_holds(None);
            }
            let (count, token) = decision.enter(stored, &entry)?;
            decision.holder_may_have_all(entry.owner);
            highest = highest.max(count);
            tokens.push(token);
        }
        // If no lock is newly taken, the answer is the largest token of all.
        let token = new.or(tokens.iter().max().copied());
        Ok(((highest, token.ok_or(CommandError::KeyCount)?), tokens))
    }

    /// The owner's wait for the same locks, if the request takes it over (ONCE).
    pub(crate) fn own_multi(
        &self,
        locks: &[LockRef<'_>],
        request: &MultiAcquire<'_>,
    ) -> Option<MultiId> {
        let multi_at = |lock: &LockRef<'_>| {
            let queue = self.table.queue(*lock)?;
            self.table.waiter_of(queue, request.owner)?.1.multi
        };
        let multi = multi_at(locks.first().filter(|_| request.once)?)?;
        let is_same = self.multis.waiters(multi).len() == locks.len()
            && locks.iter().all(|lock| multi_at(lock) == Some(multi));
        is_same.then_some(multi)
    }

    /// MRELEASE: gives one hold of each lock back, and passes over locks that the owner does not
    /// hold. Returns how many holds were given back. Refused if one of the keys is no plain lock,
    /// or if the count of one of the owner's holds is malformed.
    pub(crate) fn release_several(
        &mut self,
        several: &LockSet<'_>,
        request: &MultiRelease<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<i64, CommandError> {
        for (place, lock, stored) in several.each() {
            let mut decision = self.decision(lock, place, now, effects);
            decision.check_kind(stored, Kind::Plain)?;
            if let Some((Count::Malformed, _)) = stored.own(Mode::Plain) {
                return Err(CommandError::HoldCountMalformed);
            }
        }
        // All locks are free before a waiter is granted: it may wait for several of them.
        let mut given_back = Vec::new();
        for (place, lock, stored) in several.each() {
            let request = Release {
                key: lock.name,
                owner: request.owner,
                mode: Mode::Plain,
                permits: None,
                token: None,
                lease: None,
                by: request.by,
            };
            let mut decision = self.decision(lock, place, now, effects);
            if let Some((_, then)) = decision.release_own(stored, &request)? {
                decision.delete_if_free(then);
                given_back.push((place, lock, then));
                count(&mut self.counters.releases);
            }
        }
        let released = i64::try_from(given_back.len()).unwrap_or(i64::MAX);
        for (place, lock, then) in given_back {
            self.decision(lock, place, now, effects).let_next_in(then);
        }
        Ok(released)
    }

    // --- Hand-over -------------------------------------------------------------------------------

    /// After a change in this queue a wait for several locks may be able to have all of them. That
    /// is decided before this turn is over.
    pub(crate) fn mark_multi(&mut self, id: MultiId, queue: RecordId, now: Now) {
        let lasts = self.grant_delay.lasts(now);
        if self.multis.mark(id, queue, lasts) {
            self.agenda.add_now(Job::Multi(id));
        }
    }

    /// Grants a wait for several locks if it can have all of them, as read for its owner. A wait
    /// that can never have them leaves all queues and is told why.
    pub(crate) fn grant_several(
        &mut self,
        id: MultiId,
        several: &LockSet<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let error = several.stored.iter().find_map(|stored| {
            let other_kind = stored.kind().filter(|kind| *kind != Kind::Plain);
            stored.not_a_lock().or(other_kind.map(wrong_kind))
        });
        if let Some(error) = error {
            return self.refuse_multi(id, error, effects);
        }
        let waiters = self.multis.waiters(id).iter();
        let can_have = |(waiter, stored): &(&WaiterId, &Stored)| match stored {
            Stored::Plain(_) => stored.lets_in(Mode::Plain),
            _ => self.table.is_first(**waiter),
        };
        let blocked = waiters.zip(several.stored).find(|of| !can_have(of));
        let blocked_in = blocked.and_then(|(waiter, _)| self.table.record_of(*waiter));
        let is_kept_back = blocked_in.is_none() && !self.may_grant_several(several, now);
        self.multis.block(id, blocked_in, is_kept_back);
        if blocked_in.is_none() && !is_kept_back {
            self.enter_granted(id, several, now, effects);
        }
    }

    /// Ends a wait that can never have all its locks. Where it was first, the next waiter may be
    /// granted, so that queue is reconciled.
    fn refuse_multi(&mut self, id: MultiId, error: CommandError, effects: &mut Vec<Effect>) {
        let waiters = self.multis.waiters(id).to_vec();
        for waiter in &waiters {
            if self.table.is_first(*waiter)
                && let Some(queue) = self.table.record_of(*waiter)
            {
                self.table.mark_dirty(queue);
                self.agenda.add_now(Job::Queue(queue));
            }
        }
        if let Some(first) = waiters.first() {
            self.leave(*first, WaitOutcome::Refused(error), effects);
        }
    }

    fn enter_granted(
        &mut self,
        id: MultiId,
        several: &LockSet<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let (Some(locks), Some(first)) = (self.multis.locks(id), self.waiter_of(id)) else {
            return;
        };
        let Some(told_under) = several.locks.first() else {
            return;
        };
        let mut decision = self.decision(*told_under, 0, now, effects);
        let granted = decision.grant(first, None, |decision, entry| {
            let Decision {
                locks: state,
                effects,
                ..
            } = decision;
            let ((count, token), tokens) = state.enter_all(several, entry, now, effects)?;
            let grant = Grant {
                token,
                mode: Mode::Plain,
                several: Some(locks.iter().cloned().zip(tokens).collect()),
            };
            Ok((count, grant))
        });
        let Some(waiter) = granted else { return };
        let waited_ms = now.mono_ms.saturating_sub(waiter.since);
        for lock in several.locks.iter().skip(1) {
            if let Some(of) = self.table.patterns.of(lock.name) {
                of.wait_ms.record(waited_ms);
            }
        }
        if waiter.wanted {
            self.ask_if_several_wanted(several, &waiter.owner, now, effects);
        }
    }
}

impl Decision<'_> {
    /// Whether the owner could have this lock of a MACQUIRE.
    fn can_have(&mut self, stored: &Stored, once: bool) -> Result<bool, CommandError> {
        self.check_kind(stored, Kind::Plain)?;
        match (stored, self.queue()) {
            (Stored::Plain(Hash { own: None, .. }), _) => Ok(false),
            (Stored::Plain(Hash { own: Some(own), .. }), _) => match *own {
                Count::Malformed => Err(CommandError::HoldCountMalformed),
                Count::Valid(held) if once || Count::next(held).is_some() => Ok(true),
                Count::Valid(_) => Err(CommandError::HoldCountOverflow),
            },
            (_, None) => Ok(true),
            (_, Some(queue)) => {
                // The lock is free, but promised to its waiters.
                self.check_kind_of_first(queue, Mode::Plain)?;
                Ok(false)
            }
        }
    }

    /// The owner has the lock now. If it waits for this lock together with others, it may be able
    /// to have all of them.
    pub(crate) fn holder_may_have_all(&mut self, owner: &[u8]) {
        if self.locks.multis.is_empty() {
            return;
        }
        let Some(queue) = self.queue() else { return };
        let waiter = self.locks.table.waiter_of(queue, owner);
        if let Some(multi) = waiter.and_then(|(_, waiter)| waiter.multi) {
            self.locks.mark_multi(multi, queue, self.now);
        }
    }

    /// Refuses the waits for several locks in this queue, because the lock is of another kind now:
    /// [`TOLD_AT_ONCE`] at most. Returns whether there are more.
    pub(crate) fn refuse_multis(&mut self, queue: RecordId, held: Kind) -> bool {
        let multis = self.locks.table.multis_in(queue, TOLD_AT_ONCE);
        for id in &multis {
            let why = WaitOutcome::Refused(wrong_kind(held));
            self.locks.leave(*id, why, self.effects);
        }
        multis.len() == TOLD_AT_ONCE && !self.locks.table.multis_in(queue, 1).is_empty()
    }
}

fn wrong_kind(held: Kind) -> CommandError {
    let asked = Kind::Plain;
    CommandError::WrongKind { held, asked }
}

/// The time left of the longest lease that another owner has at these locks, in milliseconds; -1 if
/// one has no end, 0 if nobody else holds any.
pub(crate) fn ttl_of_others_ms(stored: &[Stored], now: Now) -> i64 {
    let of_others = stored.iter().filter(|stored| match stored {
        Stored::Plain(hash) => hash.own.is_none() || hash.others,
        _ => false,
    });
    let mut longest = 0;
    for stored in of_others {
        match stored.ttl_ms(now) {
            -1 => return -1,
            ttl_ms => longest = longest.max(ttl_ms),
        }
    }
    longest
}
