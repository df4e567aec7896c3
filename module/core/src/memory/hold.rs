//! Holds that belong to a session.
//!
//! The hold itself is in the keyspace. The record here has the session, so that the hold is
//! released when the session ends, and the token and the end of the lease, so that a loss is
//! noticed.

use crate::memory::deadlines::Deadlines;
use crate::values::arena::{Arena, Id};
use crate::values::few::Few;
use crate::values::ids::{HoldId, RecordId, SessionId};
use crate::values::lock_key::LockKey;
use crate::values::mode::Mode;
use crate::values::must_exist::MustExist;
use crate::values::time::Now;
use crate::values::token::Token;
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

#[derive(Clone, Debug)]
pub(crate) struct SessionHold {
    pub(crate) lock: LockKey,
    /// The lock's record, which stays open while the lock has a hold.
    pub(crate) record: RecordId,
    pub(crate) owner: Rc<[u8]>,
    pub(crate) mode: Mode,
    pub(crate) session: SessionId,
    /// None if a script, or a server before this one, granted the hold.
    pub(crate) token: Option<Token>,
    /// When it was granted, by the wall clock in microseconds; none if not known.
    pub(crate) since_us: Option<i64>,
    /// When the lease ends, as far as is known, in milliseconds of the wall clock.
    ends_at: Option<i64>,
    /// When to look at the key, in milliseconds of the wall clock.
    check_at: Option<i64>,
    /// Whether it is among the holds whose keys may have changed.
    pub(crate) dirty: bool,
    /// Whether its session asked to be told that the lock is wanted, and was not told yet.
    pub(crate) asks: bool,
}

impl SessionHold {
    /// Whether the last known lease is over.
    pub(crate) fn lease_over(&self, now: Now) -> bool {
        self.ends_at.is_some_and(|end| end <= now.wall_ms())
    }
}

/// The holds that sessions have of one lock, by owner and mode: mostly one. There are several for a
/// lock with readers or permits, or if another client wrote several owners into its hash.
pub(crate) type HoldIndex = Few<Rc<[u8]>, Few<Mode, HoldId>>;

impl HoldIndex {
    /// All of them. Sorted by owner.
    pub(crate) fn all(&self) -> Vec<HoldId> {
        if self.is_empty() {
            return Vec::new();
        }
        let of_owner = self.iter().flat_map(|(_, of_owner)| of_owner.iter());
        of_owner.map(|(_, id)| *id).collect()
    }

    /// An owner's hold of the lock.
    pub(crate) fn find(&self, owner: &[u8], mode: Mode) -> Option<HoldId> {
        self.get(owner)?.get(&mode).copied()
    }

    fn add(&mut self, owner: Rc<[u8]>, mode: Mode, id: HoldId) {
        match self.get_mut(&*owner) {
            Some(of_owner) => of_owner.insert(mode, id),
            None => self.insert(owner, Few::One(mode, id)),
        }
    }

    fn take(&mut self, owner: &[u8], mode: Mode) {
        if let Some(of_owner) = self.get_mut(owner) {
            of_owner.remove(&mode);
            if of_owner.is_empty() {
                self.remove(owner);
            }
        }
    }
}

/// A hold whose key cannot be read now is looked at again after this time.
const CHECK_AGAIN_MS: i64 = 1000;

/// All holds that belong to sessions.
#[derive(Debug, Default)]
pub(crate) struct SessionHolds {
    arena: Arena<SessionHold>,
    /// When to look at keys, by the wall clock.
    pub(crate) checks: Deadlines<HoldId>,
    dirty: VecDeque<HoldId>,
    /// The holds whose sessions asked to be told when the lock is wanted, by the locks' records.
    asking: BTreeSet<(RecordId, HoldId)>,
}

impl SessionHolds {
    pub(crate) fn len(&self) -> usize {
        self.arena.len()
    }

    pub(crate) fn get(&self, id: HoldId) -> Option<&SessionHold> {
        self.arena.get(id.0)
    }

    /// When the hold began, in microseconds of the wall clock, if that is known.
    pub(crate) fn began_at(&self, id: HoldId) -> Option<i64> {
        self.get(id)?.since_us
    }

    /// Adds a hold of a session, also to its lock's index. None only if there are four billion
    /// already.
    #[allow(clippy::too_many_arguments, reason = "what a hold is made of")]
    pub(crate) fn add(
        &mut self,
        index: &mut HoldIndex,
        (record, lock): (RecordId, LockKey),
        owner: Rc<[u8]>,
        mode: Mode,
        session: SessionId,
        token: Option<Token>,
        since_us: Option<i64>,
    ) -> Option<HoldId> {
        let named = Rc::clone(&owner);
        let id = HoldId(self.arena.insert(SessionHold {
            lock,
            record,
            owner,
            mode,
            session,
            token,
            since_us,
            ends_at: None,
            check_at: None,
            dirty: false,
            asks: false,
        })?);
        index.add(named, mode, id);
        Some(id)
    }

    /// Gives the hold to this session, and sets its token. If no session is named, it stays with
    /// its own, and without a token the former one stays. Returns the hold as it was, if it
    /// belonged to another session.
    pub(crate) fn rebind(
        &mut self,
        id: HoldId,
        session: Option<SessionId>,
        token: Option<Token>,
        since_us: Option<i64>,
    ) -> Option<SessionHold> {
        let hold = self.arena.get_mut(id.0).must_exist()?;
        let Some(session) = session else {
            if hold.token.is_none() && token.is_some() {
                hold.since_us = since_us;
            }
            hold.token = token.or(hold.token);
            return None;
        };
        let former = (hold.session != session).then(|| hold.clone());
        if hold.token != token {
            (hold.token, hold.since_us) = (token, since_us);
        }
        hold.session = session;
        former
    }

    /// Removes a hold, also from its lock's index.
    pub(crate) fn remove(
        &mut self,
        index: Option<&mut HoldIndex>,
        id: HoldId,
    ) -> Option<SessionHold> {
        let mut hold = self.arena.remove(id.0)?;
        if let Some(index) = index {
            index.take(&hold.owner, hold.mode);
        }
        self.checks.set(id, &mut hold.check_at, None);
        if hold.asks {
            self.asking.remove(&(hold.record, id));
        }
        Some(hold)
    }

    // --- Holds whose sessions asked to be told that the lock is wanted ---------------------------

    /// The hold's session must be told when its lock is wanted. Returns the lock's record.
    pub(crate) fn ask_if_wanted(&mut self, id: HoldId) -> Option<RecordId> {
        let hold = self.arena.get_mut(id.0).must_exist()?;
        hold.asks = true;
        self.asking.insert((hold.record, id));
        Some(hold.record)
    }

    /// The session was told.
    pub(crate) fn ask_no_more(&mut self, id: HoldId) {
        if let Some(hold) = self.arena.get_mut(id.0).must_exist() {
            hold.asks = false;
            self.asking.remove(&(hold.record, id));
        }
    }

    /// Whether any session asked. Mostly none did, and then nothing is searched.
    pub(crate) fn any_asks(&self) -> bool {
        !self.asking.is_empty()
    }

    /// The holds of a lock whose sessions asked.
    pub(crate) fn asking(&self, record: RecordId) -> impl Iterator<Item = (HoldId, &SessionHold)> {
        let first = (record, HoldId(Id::FIRST));
        let of_lock = self.asking.range(first..);
        let of_lock = of_lock.take_while(move |(of, _)| *of == record);
        of_lock.filter_map(|(_, id)| Some((*id, self.get(*id)?)))
    }

    // --- Noticing a loss -------------------------------------------------------------------------

    /// Looks at the key just after the end of the lease. An earlier check stays: it finds the lease
    /// as it is at that time.
    pub(crate) fn check_after(&mut self, id: HoldId, ends_at: Option<i64>) {
        let Some(hold) = self.arena.get_mut(id.0).must_exist() else {
            return;
        };
        hold.ends_at = ends_at;
        if let Some(end) = ends_at {
            self.check_at(id, end.saturating_add(1));
        }
    }

    /// Looks at the key again a second from now, because it could not be read.
    pub(crate) fn check_again(&mut self, id: HoldId, now: Now) {
        self.check_at(id, now.wall_ms().saturating_add(CHECK_AGAIN_MS));
    }

    fn check_at(&mut self, id: HoldId, check_at: i64) {
        if let Some(hold) = self.arena.get_mut(id.0).must_exist() {
            let field = &mut hold.check_at;
            self.checks.bring_forward(id, field, check_at);
        }
    }

    /// Marks a hold dirty: its key may have changed.
    pub(crate) fn mark_dirty(&mut self, id: HoldId) {
        if let Some(hold) = self.arena.get_mut(id.0).must_exist()
            && !std::mem::replace(&mut hold.dirty, true)
        {
            self.dirty.push_back(id);
        }
    }

    /// Marks the holds whose check is due, at most this many.
    pub(crate) fn mark_due(&mut self, most: usize, now: Now) {
        for _ in 0..most {
            let Some(id) = self.checks.due(now.wall_ms()) else {
                return;
            };
            if let Some(hold) = self.arena.get_mut(id.0).must_exist() {
                self.checks.set(id, &mut hold.check_at, None);
            }
            self.mark_dirty(id);
        }
    }

    pub(crate) fn any_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The next dirty hold. It stays dirty.
    pub(crate) fn first_dirty(&mut self) -> Option<HoldId> {
        while let Some(id) = self.dirty.front().copied() {
            if self.arena.get(id.0).is_some() {
                return Some(id);
            }
            self.dirty.pop_front();
        }
        None
    }

    /// The first dirty hold is not dirty any more. Returns the lock's record.
    pub(crate) fn pop_dirty(&mut self) -> Option<RecordId> {
        let id = self.dirty.pop_front()?;
        let hold = self.arena.get_mut(id.0)?;
        hold.dirty = false;
        Some(hold.record)
    }

    pub(crate) fn all(&self) -> Vec<HoldId> {
        self.arena.iter().map(|(id, _)| HoldId(id)).collect()
    }
}

#[cfg(debug_assertions)]
impl SessionHolds {
    /// Asserts that each hold is on the lists that its fields name, and on no others.
    pub(crate) fn check(&self) {
        let holds = || self.arena.iter().map(|(id, hold)| (HoldId(id), hold));
        self.checks
            .check(holds().map(|(id, hold)| (hold.check_at, id)));
        let asking = holds().filter(|(_, hold)| hold.asks);
        let asking = asking.map(|(id, hold)| (hold.record, id));
        assert_eq!(self.asking, asking.collect());
        for (id, hold) in holds() {
            let dirty = self.dirty.iter().filter(|of| **of == id).count();
            assert_eq!(usize::from(hold.dirty), dirty, "{hold:?}");
        }
    }
}
