//! Several locks at once: all or none.
//!
//! A wait for several locks has a waiter in the queue of each, and holds nothing new until it can
//! have all: at each lock it is the first waiter and the lock is free, or its owner holds the lock
//! already. So a wait never takes one of its locks before the others.

use crate::decisions::decision::{Acquired, Decision, Entry};
use crate::decisions::grant::Held;
use crate::decisions::pending_wait::{LeaseEnds, PendingWait};
use crate::decisions::telling::TOLD_AT_ONCE;
use crate::interface::effect::{Holder, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::outcome::Outcome;
use crate::interface::request::{MultiAcquire, MultiRelease, Release, WaitMode};
use crate::interface::stored::{Count, Stored};
use crate::memory::agenda::Job;
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::values::ids::{MultiId, RecordId, WaiterId};
use crate::values::lock_key::LockRef;
use crate::values::mode::{Kind, Mode};
use crate::values::must_exist::MustExist;
use crate::values::time::Now;
use crate::values::token::Token;

/// Several locks, and the stored value of each.
pub(crate) struct LockSet<'a> {
    pub(crate) locks: Vec<LockRef<'a>>,
    pub(crate) stored: &'a [Stored],
}

/// Several locks that were entered at once.
struct Together {
    /// The highest hold count, and the token that the owner is told.
    held: Held,
    /// The places of the locks whose count was raised, with the tokens of their holds.
    counted: Vec<(usize, Token)>,
}

impl LockSet<'_> {
    pub(crate) fn each(&self) -> impl Iterator<Item = (usize, LockRef<'_>, &Stored)> {
        let locks = self.locks.iter().zip(self.stored).enumerate();
        locks.map(|(place, (lock, stored))| (place, *lock, stored))
    }

    fn any_free(&self) -> bool {
        self.stored.iter().any(Stored::is_free)
    }
}

impl Decision<'_> {
    /// MACQUIRE: takes all locks, or reports that some are held. A refusal changes nothing.
    pub(crate) fn acquire_several(
        &mut self,
        several: &LockSet<'_>,
        request: &MultiAcquire<'_>,
        is_reconciled: bool,
        waiters_max: u32,
    ) -> Result<Acquired, CommandError> {
        let session = self.locks.listened(request.session)?;
        let mut are_promised = false;
        for (place, lock, stored) in several.each() {
            if stored.is_free() && !is_reconciled {
                let mut part = self.part(place, lock);
                are_promised |= part.queue().is_some();
                part.reconcile_now();
            }
        }
        if are_promised {
            return Ok(Acquired::ReconcileFirst);
        }
        let entry = Entry {
            once: request.once,
            ..Entry::new(request.owner, Holder::Caller, request.lease, session)
        };
        let mut can_have_all = true;
        for (place, lock, stored) in several.each() {
            can_have_all &= self.part(place, lock).can_have(stored, &entry)?;
        }
        if can_have_all && self.may_grant_several(several) {
            let (count, token) = self.enter_all(several, &entry)?.held;
            if request.wanted {
                self.ask_if_several_wanted(several, request.owner);
            }
            return Ok(Acquired::held(count, token));
        }
        let ttl_ms = ttl_of_others_ms(several.stored, self.now);
        let ttl_ms = self.locks.ttl_or_delay_ms(ttl_ms, self.now);
        if request.wait_mode == WaitMode::None {
            self.tell_several_wanted(several, request.owner);
            return Ok(Acquired::Decided(Outcome::NotHeld { ttl_ms }));
        }
        if self.locks.own_multi(&several.locks, request).is_none() {
            for (place, lock, _) in several.each() {
                let mut part = self.part(place, lock);
                if let Some(queue) = part.queue() {
                    part.check_may_wait(queue, request.owner, Mode::Plain, waiters_max)?;
                }
            }
        }
        let ends = several.stored.iter().map(Stored::ends_at).collect();
        let pending_wait = PendingWait::new(LeaseEnds::Several(ends), ttl_ms);
        Ok(Acquired::MustWait(pending_wait))
    }

    /// Whether an owner that can have all of these locks may be granted them now. During the grant
    /// delay it may only enter locks once more that it holds already.
    fn may_grant_several(&self, several: &LockSet<'_>) -> bool {
        !self.locks.grant_delay.lasts(self.now) || !several.any_free()
    }

    /// Enters all of these locks, which the owner can have.
    fn enter_all(
        &mut self,
        several: &LockSet<'_>,
        entry: &Entry<'_>,
    ) -> Result<Together, CommandError> {
        let new = several.any_free().then(|| self.mint());
        let entry = Entry {
            token: new,
            holder: entry.holder.clone(),
            ..*entry
        };
        let (mut count, mut largest, mut counted) = (0, None, Vec::new());
        for (place, lock, stored) in several.each() {
            let mut part = self.part(place, lock);
            if stored.is_free() {
                part.lose_holds(None);
            }
            let (held, token) = part.enter(stored, &entry)?;
            part.holder_may_have_all(entry.owner);
            (count, largest) = (count.max(held), largest.max(Some(token)));
            if entry.counts(stored)? {
                counted.push((place, token));
            }
        }
        // If no lock is newly taken, the answer is the largest token of all.
        let token = new.or(largest).ok_or(CommandError::KeyCount)?;
        Ok(Together {
            held: (count, token),
            counted,
        })
    }

    /// MRELEASE: gives one hold of each lock back, and passes over locks that the owner does not
    /// hold. Returns how many holds were given back. Refused if one of the keys is no plain lock,
    /// or if the count of one of the owner's holds is malformed.
    pub(crate) fn release_several(
        &mut self,
        several: &LockSet<'_>,
        request: &MultiRelease<'_>,
    ) -> Result<i64, CommandError> {
        for (place, lock, stored) in several.each() {
            self.part(place, lock).check_kind(stored, Kind::Plain)?;
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
            let mut part = self.part(place, lock);
            if let Some((_, then)) = part.release_own(stored, &request)? {
                part.delete_if_free(then);
                given_back.push((place, lock, then));
                count(&mut self.locks.counters.releases);
            }
        }
        let released = i64::try_from(given_back.len()).unwrap_or(i64::MAX);
        for (place, lock, then) in given_back {
            self.part(place, lock).let_next_in(then);
        }
        Ok(released)
    }

    // --- Hand-over -------------------------------------------------------------------------------

    /// After a change in this queue a wait for several locks may be able to have all of them. That
    /// is decided before this turn is over.
    pub(crate) fn mark_multi(&mut self, id: MultiId, queue: RecordId) {
        let lasts = self.locks.grant_delay.lasts(self.now);
        if self.locks.multis.mark(id, queue, lasts) {
            self.locks.agenda.add_now(Job::Multi(id));
        }
    }

    /// Grants a wait for several locks if it can have all of them, as read for its owner. A wait
    /// that can never have them leaves all queues and is told why.
    pub(crate) fn grant_several(&mut self, id: MultiId, several: &LockSet<'_>) {
        let error = several.stored.iter().find_map(|stored| {
            let other_kind = stored.kind().filter(|kind| *kind != Kind::Plain);
            stored.not_a_lock().or(other_kind.map(wrong_kind))
        });
        if let Some(error) = error {
            return self.refuse_multi(id, error);
        }
        let table = &self.locks.table;
        let waiters = self.locks.multis.waiters(id);
        let first = waiters.first().and_then(|first| table.get(*first));
        let (waiters, once) = (waiters.iter(), first.is_some_and(|first| first.once));
        let can_have = |(waiter, stored): &(&WaiterId, &Stored)| match stored {
            Stored::Plain(_) => stored.lets_in(Mode::Plain, once),
            _ => table.is_first(**waiter),
        };
        let blocked = waiters.zip(several.stored).find(|of| !can_have(of));
        let blocked_in = blocked.and_then(|(waiter, _)| table.record_of(*waiter));
        let is_kept_back = blocked_in.is_none() && !self.may_grant_several(several);
        if let Some(multi) = self.locks.multis.get_mut(id).must_exist() {
            (multi.blocked_in, multi.is_kept_back) = (blocked_in, is_kept_back);
        }
        if blocked_in.is_none() && !is_kept_back {
            self.enter_granted(id, several);
        }
    }

    /// Ends a wait that can never have all its locks. Where it was first, the next waiter may be
    /// granted, so that queue is reconciled.
    fn refuse_multi(&mut self, id: MultiId, error: CommandError) {
        let waiters = self.locks.multis.waiters(id).to_vec();
        for waiter in &waiters {
            if self.locks.table.is_first(*waiter)
                && let Some(queue) = self.locks.table.record_of(*waiter)
            {
                self.locks.table.mark_dirty(queue);
                self.locks.agenda.add_now(Job::Queue(queue));
            }
        }
        if let Some(first) = waiters.first() {
            let why = WaitOutcome::Refused(error);
            self.locks.leave(*first, why, self.effects);
        }
    }

    fn enter_granted(&mut self, id: MultiId, several: &LockSet<'_>) {
        let multis = &self.locks.multis;
        let (locks, first) = (multis.locks(id), multis.waiters(id).first().copied());
        let (Some(locks), Some(first)) = (locks.must_exist(), first.must_exist()) else {
            return;
        };
        let granted = self.grant(first, None, |decision, entry| {
            let Together { held, counted } = decision.enter_all(several, entry)?;
            let lock = |(place, token): (usize, _)| Some((locks.get(place)?.clone(), token));
            Ok((held, Some(counted.into_iter().filter_map(lock).collect())))
        });
        let Some(waiter) = granted else { return };
        let waited_ms = self.now.mono_ms.saturating_sub(waiter.since);
        for lock in several.locks.iter().skip(1) {
            if let Some(of) = self.locks.table.patterns.of(lock.name) {
                of.wait_ms.record(waited_ms);
            }
        }
        if waiter.wanted {
            self.ask_if_several_wanted(several, &waiter.owner);
        }
    }

    /// Whether the owner could have this lock of a MACQUIRE.
    fn can_have(&mut self, stored: &Stored, entry: &Entry<'_>) -> Result<bool, CommandError> {
        self.check_kind(stored, Kind::Plain)?;
        match (stored, self.queue()) {
            (Stored::Plain(hash), _) => entry.counted(hash.own).map(|_| hash.own.is_some()),
            (_, None) => Ok(true),
            // The lock is free, but promised to its waiters.
            (_, queue) => self
                .check_kind_of_first(stored, Kind::Plain, queue)
                .map(|()| false),
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
            self.mark_multi(multi, queue);
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

impl Locks {
    /// The owner's wait for the same locks, if the request takes it over (ONCE): its first waiter.
    pub(crate) fn own_multi(
        &self,
        locks: &[LockRef<'_>],
        request: &MultiAcquire<'_>,
    ) -> Option<WaiterId> {
        let multi_at = |lock: &LockRef<'_>| self.table.waiter_at(*lock, request.owner)?.1.multi;
        let multi = multi_at(locks.first().filter(|_| request.once)?)?;
        let waiters = self.multis.waiters(multi);
        let is_same =
            waiters.len() == locks.len() && locks.iter().all(|lock| multi_at(lock) == Some(multi));
        waiters.first().copied().filter(|_| is_same)
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
