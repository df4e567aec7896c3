//! Several locks at once: all or none.
//!
//! A wait for several locks stands in the line of each and holds nothing until it can have all: at
//! each lock it is first in line and the lock is free, or its owner holds the lock already. So
//! nobody ever holds one lock while it waits for the others that it asked for with it.

use crate::arena::{Arena, Id};
use crate::deadlock::{DeadlockSearch, Found};
use crate::line::{LockKey, LockRef, Newcomer, QueueId, ReplyTarget, WaiterId};
use crate::lock::{Acquired, BlockedClient, Due, Joined, Locks};
use crate::metrics::count;
use crate::request::{Acquire, MultiAcquire, MultiRenew, Release, Renew, WaitMode};
use crate::session::SessionId;
use crate::stored::{Count, Hash, Stored};
use crate::{CommandError, Effect, Grant, Kind, Lease, Mode, Now, Token, WaitOutcome};
use std::collections::VecDeque;
use std::rc::Rc;

/// The name of a wait for several locks. It stays invalid after the wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MultiId(Id);

/// All waits for several locks.
#[derive(Debug, Default)]
pub(crate) struct MultiWaits {
    arena: Arena<MultiWait>,
    marked: VecDeque<MultiId>,
}

#[derive(Debug)]
struct MultiWait {
    owner: Rc<[u8]>,
    /// The locks, in the order in which they were named.
    locks: Rc<[LockKey]>,
    /// Its waiter in the line of each.
    waiters: Vec<WaiterId>,
    /// Whether it stands among those that can perhaps have all.
    marked: bool,
    /// The line in which it was last found that it cannot. Until something happens there, what
    /// happens in its other lines changes nothing; so a look at all its locks follows on a change
    /// of one, not on each look at each of them.
    blocked_in: Option<QueueId>,
}

impl MultiWaits {
    pub(crate) fn is_empty(&self) -> bool {
        self.arena.len() == 0
    }

    pub(crate) fn locks(&self, id: MultiId) -> Option<Rc<[LockKey]>> {
        self.arena.get(id.0).map(|joint| Rc::clone(&joint.locks))
    }

    pub(crate) fn waiters(&self, id: MultiId) -> &[WaiterId] {
        self.arena
            .get(id.0)
            .map_or(&[], |joint| joint.waiters.as_slice())
    }

    pub(crate) fn remove(&mut self, id: MultiId) -> Vec<WaiterId> {
        self.arena
            .remove(id.0)
            .map_or_else(Vec::new, |joint| joint.waiters)
    }

    /// After what happened in this line perhaps it can have all: to be decided within the present
    /// step.
    pub(crate) fn mark(&mut self, id: MultiId, line: QueueId) {
        if let Some(joint) = self.arena.get_mut(id.0)
            && joint.blocked_in.is_none_or(|blocked_in| blocked_in == line)
            && !std::mem::replace(&mut joint.marked, true)
        {
            self.marked.push_back(id);
        }
    }

    pub(crate) fn any_marked(&self) -> bool {
        !self.marked.is_empty()
    }

    /// The next marked one, no longer marked.
    pub(crate) fn next_marked(&mut self) -> Option<Due> {
        while let Some(id) = self.marked.pop_front() {
            if let Some(joint) = self.arena.get_mut(id.0) {
                joint.marked = false;
                let (locks, owner) = (Rc::clone(&joint.locks), Rc::clone(&joint.owner));
                return Some(Due::MultiWait(id, locks, owner));
            }
        }
        None
    }
}

/// What MACQUIRE decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquiredSeveral {
    /// The caller can have all: the driver calls [`Locks::enter_one_of`] for each.
    Enter(Entering),
    /// The caller holds none by this.
    NotHeld {
        /// The longest of what is left of the leases of others; -1 if one has no end, 0 if all are
        /// free, but promised to those in line.
        ttl_ms: i64,
    },
    /// The caller is to wait: the driver sees that no deadlock comes of it, blocks its client if it
    /// is to be blocked, and calls [`Locks::join_several`].
    MustWait {
        /// What to answer if the client cannot be blocked after all.
        ttl_ms: i64,
    },
}

/// An entry into several locks, while it is made lock by lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entering {
    /// The token of those that are newly taken; none if there are none.
    new: Option<Token>,
    /// The largest token of the others.
    kept: Option<Token>,
    /// The highest hold count.
    count: i64,
}

impl Entering {
    fn begin(new: Option<Token>) -> Self {
        Self {
            new,
            kept: None,
            count: 0,
        }
    }

    fn add(&mut self, count: i64, token: Token) {
        self.count = self.count.max(count);
        self.kept = self.kept.max(Some(token));
    }

    /// The highest hold count, and the token that the owner is told.
    pub fn held(&self) -> Option<(i64, Token)> {
        self.new.or(self.kept).map(|token| (self.count, token))
    }
}

/// A wait for several locks that can have all of them, and has left all lines: the driver calls
/// [`Locks::enter_granted`] for each lock, and then [`Locks::tell_joint_granted`].
#[derive(Debug)]
pub struct MultiGrant {
    locks: Rc<[LockKey]>,
    owner: Rc<[u8]>,
    lease: Lease,
    seat: ReplyTarget,
    session: Option<SessionId>,
    since: i64,
    entering: Entering,
    tokens: Vec<Token>,
}

impl Locks {
    // --- Commands --------------------------------------------------------------------------------

    /// Whether anybody stands in line for the lock. Before MACQUIRE the driver settles the lines of
    /// all its keys that are free.
    pub fn is_waited_for(&self, lock: LockRef<'_>) -> bool {
        self.lines.find(lock).is_some()
    }

    /// RLOCK.MACQUIRE: take all, or hear that some are held.
    ///
    /// # Errors
    /// A session that nobody listens to; a key of another type or kind; a hold count that cannot
    /// grow; a line that is full. Nothing was changed then.
    pub fn acquire_several(
        &mut self,
        locks: &[LockRef<'_>],
        stored: &[Stored],
        request: &MultiAcquire<'_>,
        waiters_max: u32,
        now: Now,
    ) -> Result<AcquiredSeveral, CommandError> {
        self.listened(request.session)?;
        let mut can_have_all = true;
        for (lock, stored) in locks.iter().zip(stored) {
            can_have_all &= self.can_have(*lock, stored, request.once)?;
        }
        if can_have_all {
            let any_new = stored.iter().any(Stored::is_free);
            let new = any_new.then(|| self.tokens.mint(now.wall_us));
            return Ok(AcquiredSeveral::Enter(Entering::begin(new)));
        }
        let ttl_ms = ttl_of_others_ms(stored, now);
        if request.wait_mode == WaitMode::None {
            return Ok(AcquiredSeveral::NotHeld { ttl_ms });
        }
        if self.own_joint(locks, request).is_none() {
            for lock in locks {
                let line = self.lines.find(*lock);
                if line.is_some_and(|line| self.lines.length(line) >= waiters_max) {
                    return Err(CommandError::TooManyWaiters(waiters_max));
                }
            }
        }
        Ok(AcquiredSeveral::MustWait { ttl_ms })
    }

    /// Whether the owner could have this one.
    fn can_have(
        &mut self,
        lock: LockRef<'_>,
        stored: &Stored,
        once: bool,
    ) -> Result<bool, CommandError> {
        let line = self.lines.find(lock);
        self.check_kind(lock, line, stored, Kind::Plain)?;
        match (stored, line) {
            (Stored::Plain(Hash { own: None, .. }), _) => Ok(false),
            (Stored::Plain(Hash { own: Some(own), .. }), _) => match own {
                Count::Malformed => Err(CommandError::HoldCountMalformed),
                Count::Valid(held) if once || Count::next(*held).is_some() => Ok(true),
                Count::Valid(_) => Err(CommandError::HoldCountOverflow),
            },
            (_, None) => Ok(true),
            (_, Some(line)) => {
                // Free, but promised.
                self.check_kind_of_first(line, Mode::Plain)?;
                Ok(false)
            }
        }
    }

    /// Enters one of the locks of a MACQUIRE that can have all.
    pub fn enter_one_of(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &MultiAcquire<'_>,
        entering: &mut Entering,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let session = self.listened(request.session).ok().flatten();
        self.enter_plain(
            lock,
            stored,
            &request.of(lock.name),
            session,
            entering,
            now,
            effects,
        );
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one decision, all of them needed"
    )]
    fn enter_plain(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &Acquire<'_>,
        session: Option<SessionId>,
        entering: &mut Entering,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let entered = match (stored, entering.new) {
            (Stored::Plain(hash), _) => match hash.own {
                Some(own) => self.reenter(lock, &hash, own, request, session, now, effects),
                None => return,
            },
            (_, Some(token)) => {
                if stored == Stored::NoHolder {
                    effects.push(Effect::Free);
                }
                self.lose_holds(lock, None, now, effects);
                Ok(self.take_plain(lock, request, session, token, now, effects))
            }
            (_, None) => return,
        };
        if let Ok(Acquired::Held { count, token }) = entered {
            entering.add(count, token);
        }
        if let Some(line) = self.lines.find(lock) {
            self.holder_may_have_all(line, request.owner);
        }
    }

    /// Whether the wait of a MACQUIRE could never end, as in [`Locks::search_deadlock`].
    pub fn search_deadlock_of_several(
        &self,
        locks: &[LockRef<'_>],
        request: &MultiAcquire<'_>,
    ) -> Option<(DeadlockSearch, Found)> {
        if self.own_joint(locks, request).is_some() {
            return None;
        }
        let keys = locks.iter().map(|lock| LockKey::from(*lock)).collect();
        let mut search = DeadlockSearch::new(&self.lines, request.owner, keys, true);
        let found = search.go_on(&self.lines);
        Some((search, found))
    }

    /// The second half of a MACQUIRE that must wait: as [`Locks::join`], for all its locks.
    pub fn join_several(
        &mut self,
        locks: &[LockRef<'_>],
        stored: &[Stored],
        request: &MultiAcquire<'_>,
        client: Option<BlockedClient>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<Joined> {
        let session = self.listened(request.session).ok()?;
        let (wait, seat) = match (request.wait_mode, client) {
            (WaitMode::Block(wait), Some(BlockedClient { handle, client_id })) => {
                (wait, ReplyTarget::Client { handle, client_id })
            }
            (WaitMode::Queue(wait), _) => (wait, ReplyTarget::Session(session?)),
            _ => return None,
        };
        let place = self.own_joint(locks, request);
        let mut newcomer = Newcomer {
            owner: request.owner,
            mode: Mode::Plain,
            lease: request.lease,
            wait,
            seat,
            session,
            joint: place,
        };
        let (waiter, position) = match place {
            Some(joint) => self.take_over_joint(joint, stored, &newcomer, now, effects)?,
            None => self.join_all(locks, stored, &mut newcomer, now)?,
        };
        if let Some(session) = session {
            self.sessions.add_waiter(session, waiter);
        }
        self.note_peak();
        Some(Joined { waiter, position })
    }

    fn join_all(
        &mut self,
        locks: &[LockRef<'_>],
        stored: &[Stored],
        newcomer: &mut Newcomer<'_>,
        now: Now,
    ) -> Option<(WaiterId, i64)> {
        let joint = MultiId(self.joints.arena.insert(MultiWait {
            owner: Rc::from(newcomer.owner),
            locks: locks.iter().map(|lock| LockKey::from(*lock)).collect(),
            waiters: Vec::with_capacity(locks.len()),
            marked: false,
            blocked_in: None,
        })?);
        newcomer.joint = Some(joint);
        let mut position: i64 = 0;
        for (lock, stored) in locks.iter().zip(stored) {
            let Some((waiter, line)) = self.lines.join(*lock, newcomer, now) else {
                // No room: none of it waits.
                for waiter in self.joints.remove(joint) {
                    self.lines.leave(waiter);
                }
                return None;
            };
            self.lines.check_after(line, stored.ends_at(), now);
            position = position.max(self.lines.length(line).into());
            if let Some(joint) = self.joints.arena.get_mut(joint.0) {
                joint.waiters.push(waiter);
            }
        }
        Some((*self.joints.waiters(joint).first()?, position))
    }

    fn take_over_joint(
        &mut self,
        joint: MultiId,
        stored: &[Stored],
        newcomer: &Newcomer<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<(WaiterId, i64)> {
        let waiters = self.joints.waiters(joint).to_vec();
        let (first, others) = waiters.split_first()?;
        let lock = self.lock_of(*first)?;
        let ttl_ms = ttl_of_others_ms(stored, now);
        self.take_over(lock.as_ref(), *first, newcomer, ttl_ms, now, effects)?;
        for waiter in others {
            self.lines.take_over(*waiter, newcomer, now)?;
        }
        let positions = waiters.iter().map(|waiter| self.lines.position(*waiter));
        Some((*first, positions.max()?))
    }

    /// The owner's wait for the same locks, if the request is to take it over.
    fn own_joint(&self, locks: &[LockRef<'_>], request: &MultiAcquire<'_>) -> Option<MultiId> {
        let line = self.lines.find(*locks.first().filter(|_| request.once)?)?;
        let mut own = self.lines.all_of(line, request.owner);
        own.find_map(|(_, waiter)| {
            let joint = waiter.joint?;
            let waited_for = self.joints.locks(joint)?;
            let is_same = waited_for.len() == locks.len()
                && waited_for.iter().all(|key| locks.contains(&key.as_ref()));
            is_same.then_some(joint)
        })
    }

    /// Refuses MRENEW if one of the keys is no plain lock.
    ///
    /// # Errors
    /// That one.
    pub fn check_renewable(
        &mut self,
        locks: &[LockRef<'_>],
        stored: &[Stored],
    ) -> Result<(), CommandError> {
        for (lock, stored) in locks.iter().zip(stored) {
            let line = self.lines.find(*lock);
            self.check_kind(*lock, line, stored, Kind::Plain)?;
        }
        Ok(())
    }

    /// Refuses MRELEASE for the same reason, or if the owner's hold of one cannot be counted.
    ///
    /// # Errors
    /// These.
    pub fn check_releasable(
        &mut self,
        locks: &[LockRef<'_>],
        stored: &[Stored],
    ) -> Result<(), CommandError> {
        for (lock, stored) in locks.iter().zip(stored) {
            self.check_renewable(&[*lock], &[*stored])?;
            if let Some((Count::Malformed, _)) = stored.own(Mode::Plain) {
                return Err(CommandError::HoldCountMalformed);
            }
        }
        Ok(())
    }

    /// Gives back one hold of one lock of a MRELEASE. Whether the owner had one. Nobody is granted
    /// by it before the driver goes on with [`Locks::next_due`].
    pub fn release_one_of(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        owner: &[u8],
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Stored::Plain(hash) = stored else {
            self.touched(lock);
            return false;
        };
        let request = Release {
            key: lock.name,
            owner,
            mode: Mode::Plain,
            token: None,
            lease: None,
        };
        let left = match hash.own {
            Some(Count::Valid(held)) => held.saturating_sub(1),
            _ => return false,
        };
        if left > 0 || hash.others {
            let _ = self.give_back(lock, stored, &request, now, effects);
        } else {
            self.record_hold(hash.token, now);
            self.unbind(lock, owner, Mode::Plain);
            self.free_for_later(self.lines.find(lock), effects);
        }
        count(&mut self.counters.releases);
        true
    }

    /// As [`Locks::free`], but the next in line is granted later in this step. One unlock message
    /// either way: now, unless the hand-over brings it.
    fn free_for_later(&mut self, line: Option<QueueId>, effects: &mut Vec<Effect>) {
        effects.push(Effect::Free);
        let Some(line) = line else {
            effects.push(Effect::Publish(Mode::Plain));
            return;
        };
        let first = self.lines.first(line);
        if !first.is_some_and(|(_, first)| first.is_plain()) {
            effects.push(Effect::Publish(Mode::Plain));
        }
        self.lines.settle_now(line);
    }

    /// Renews the hold of one lock of a MRENEW. Whether the owner has one.
    ///
    /// # Errors
    /// A session that nobody listens to.
    pub fn renew_one_of(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        request: &MultiRenew<'_>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<bool, CommandError> {
        let request = Renew {
            key: lock.name,
            owner: request.owner,
            lease: request.lease,
            mode: Mode::Plain,
            token: None,
            session: request.session,
        };
        self.renew(lock, stored, &request, now, effects)
    }

    // --- Hand-over -------------------------------------------------------------------------------

    /// By which name a wait for several locks was joined, as [`Joined`] told it.
    pub fn waiter_of(&self, id: MultiId) -> Option<WaiterId> {
        self.joints.waiters(id).first().copied()
    }

    /// Decides whether a wait for several locks can have all, its keys as read for its owner. One
    /// that never can leaves all lines and is told why.
    pub fn settle_joint(
        &mut self,
        id: MultiId,
        stored: &[Stored],
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Option<MultiGrant> {
        let waiters = self.joints.waiters(id).to_vec();
        let first = *waiters.first()?;
        let refusal = stored.iter().find_map(|stored| match stored {
            Stored::OtherType => Some(CommandError::WrongType),
            Stored::ReadWrite(_) => Some(CommandError::WrongKind(Kind::ReadWrite)),
            Stored::Free | Stored::NoHolder | Stored::Plain(_) => None,
        });
        if let Some(refusal) = refusal {
            // Those behind it are next where it was first.
            for waiter in waiters {
                if self.lines.is_first(waiter)
                    && let Some(line) = self.lines.line_of(waiter)
                {
                    self.lines.settle_now(line);
                }
            }
            self.dismiss(first, WaitOutcome::Refused(refusal), effects);
            return None;
        }
        let can_have = |(waiter, stored): (&WaiterId, &Stored)| match stored {
            Stored::Plain(_) => stored.lets_in(Mode::Plain),
            _ => self.lines.is_first(*waiter),
        };
        let blocked = waiters.iter().zip(stored).find(|of| !can_have(*of));
        let blocked_in = blocked.and_then(|(waiter, _)| self.lines.line_of(*waiter));
        if let Some(joint) = self.joints.arena.get_mut(id.0) {
            joint.blocked_in = blocked_in;
        }
        if blocked_in.is_some() {
            return None;
        }
        let any_new = stored.iter().any(Stored::is_free);
        let new = any_new.then(|| self.tokens.mint(now.wall_us));
        let locks = self.joints.locks(id)?;
        let waiter = self.leave(first)?;
        Some(MultiGrant {
            tokens: Vec::with_capacity(locks.len()),
            locks,
            owner: waiter.owner,
            lease: waiter.lease,
            seat: waiter.seat,
            session: waiter.session,
            since: waiter.since,
            entering: Entering::begin(new),
        })
    }

    /// Enters one of the locks of a wait for several that was granted. The caller of the step is
    /// the waiter's owner.
    pub fn enter_granted(
        &mut self,
        lock: LockRef<'_>,
        stored: Stored,
        granted: &mut MultiGrant,
        now: Now,
        effects: &mut Vec<Effect>,
    ) {
        let owner = Rc::clone(&granted.owner);
        let request = Acquire {
            key: lock.name,
            owner: &owner,
            lease: granted.lease,
            mode: Mode::Plain,
            wait_mode: WaitMode::None,
            session: None,
            once: false,
        };
        let mut one = Entering::begin(granted.entering.new);
        let session = granted.session;
        self.enter_plain(lock, stored, &request, session, &mut one, now, effects);
        if let Some(token) = one.kept {
            granted.entering.add(one.count, token);
            granted.tokens.push(token);
        }
        let line = self.lines.find(lock);
        self.check_after(line, Some(granted.lease.end(now)), now);
        // The same owner's waiters directly behind it re-enter with it.
        let first = line.and_then(|line| Some((line, self.lines.first(line)?.1)));
        if let Some((line, first)) = first
            && first.owner == owner
            && first.is_plain()
        {
            self.lines.settle_now(line);
        }
    }

    /// Tells the waiter, now that all is written.
    pub fn tell_joint_granted(&mut self, granted: MultiGrant, now: Now, effects: &mut Vec<Effect>) {
        let Some((held, token)) = granted.entering.held() else {
            return;
        };
        let Some(told_under) = granted.locks.first().cloned() else {
            return;
        };
        self.count_waited(now.mono_ms.saturating_sub(granted.since));
        let several = granted.locks.iter().cloned().zip(granted.tokens).collect();
        let grant = Grant {
            token,
            mode: Mode::Plain,
            several: Some(several),
        };
        let owner = granted.owner;
        self.tell_granted(&told_under, granted.seat, owner, held, grant, effects);
    }

    /// Ends the waits for several locks that stand in the line of one which is now of another kind.
    pub(crate) fn dismiss_joints(&mut self, line: QueueId, effects: &mut Vec<Effect>) {
        for id in self.lines.joints_in(line) {
            let why = WaitOutcome::Refused(CommandError::WrongKind(Kind::ReadWrite));
            self.dismiss(id, why, effects);
        }
    }
}

/// Of the leases that others have, what is left of the longest in milliseconds; -1 if one has no
/// end, 0 if there are none.
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
