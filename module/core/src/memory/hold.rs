//! Holds that belong to a session.
//!
//! The hold itself is in the keyspace. What is kept here is whose session it is, so that it can be
//! released when the session ends, and what is needed to notice that it was lost: its token, and
//! when its lease ends.

use crate::values::arena::{Arena, Id};
use crate::values::ids::{HoldId, RecordId, SessionId};
use crate::values::lock_key::LockKey;
use crate::values::mode::Mode;
use crate::values::time::Now;
use crate::values::token::Token;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

/// How the hold of an owner is told from a later one of the same owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldMark {
    /// None of a hold that a script or a server before this one granted.
    pub(crate) token: Option<Token>,
    /// When the lease ends, as far as is known, in milliseconds of the wall clock.
    pub(crate) ends_at: Option<i64>,
    /// Whether the key may be another one by now: it was renamed, copied, swapped or written anew.
    /// A writer's token is not in its key, so then only the lease's end tells it from a hold that
    /// the same owner had in that other key.
    pub(crate) replaced: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct SessionHold {
    pub(crate) lock: LockKey,
    pub(crate) owner: Rc<[u8]>,
    pub(crate) mode: Mode,
    pub(crate) session: SessionId,
    /// None of a hold that a script or a server before this one granted.
    pub(crate) token: Option<Token>,
    /// When it was granted, by the wall clock in microseconds; none if that is not known.
    pub(crate) since_us: Option<i64>,
    /// When the lease ends, as far as is known, in milliseconds of the wall clock.
    ends_at: Option<i64>,
    /// When to look at the key, in milliseconds of the wall clock.
    check_at: Option<i64>,
    /// Whether it stands among those to look at.
    dirty: bool,
    /// As in [`HoldMark`], until the key is looked at.
    replaced: bool,
    /// The record of its lock, while its session is to be told that the lock is wanted.
    asks_at: Option<RecordId>,
}

impl SessionHold {
    /// Whether the last known lease is over.
    pub(crate) fn lease_over(&self, now: Now) -> bool {
        self.ends_at.is_some_and(|end| end <= now.wall_ms())
    }

    pub(crate) fn mark(&self) -> HoldMark {
        HoldMark {
            token: self.token,
            ends_at: self.ends_at,
            replaced: self.replaced,
        }
    }
}

/// The holds that sessions have of one lock: mostly one. There are more of its readers, or if
/// somebody else wrote several owners into its hash.
#[derive(Debug, Default)]
pub(crate) enum HoldIndex {
    #[default]
    None,
    One(HoldId),
    #[allow(
        clippy::box_collection,
        reason = "a record is as small as with one hold"
    )]
    Many(Box<BTreeMap<Rc<[u8]>, ByMode>>),
}

/// The holds of one owner, by mode.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ByMode([Option<HoldId>; 4]);

impl ByMode {
    fn slot(mode: Mode) -> usize {
        match mode {
            Mode::Plain => 0,
            Mode::Read => 1,
            Mode::Write => 2,
            Mode::Permits => 3,
        }
    }

    fn get(&self, mode: Mode) -> Option<HoldId> {
        self.0.get(Self::slot(mode)).copied().flatten()
    }

    fn set(&mut self, mode: Mode, id: Option<HoldId>) {
        if let Some(slot) = self.0.get_mut(Self::slot(mode)) {
            *slot = id;
        }
    }

    fn ids(&self) -> impl Iterator<Item = HoldId> {
        self.0.into_iter().flatten()
    }
}

impl HoldIndex {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    /// All of them, in the order of their owners.
    pub(crate) fn all(&self) -> Vec<HoldId> {
        match self {
            Self::None => Vec::new(),
            Self::One(id) => vec![*id],
            Self::Many(owners) => owners.values().flat_map(ByMode::ids).collect(),
        }
    }

    fn insert(&mut self, holds: &SessionHolds, id: HoldId, owner: &Rc<[u8]>, mode: Mode) {
        match self {
            Self::None => *self = Self::One(id),
            Self::One(first) => {
                let mut owners: Box<BTreeMap<Rc<[u8]>, ByMode>> = Box::default();
                if let Some(hold) = holds.get(*first) {
                    let of_first = owners.entry(Rc::clone(&hold.owner)).or_default();
                    of_first.set(hold.mode, Some(*first));
                }
                owners
                    .entry(Rc::clone(owner))
                    .or_default()
                    .set(mode, Some(id));
                *self = Self::Many(owners);
            }
            Self::Many(owners) => {
                owners
                    .entry(Rc::clone(owner))
                    .or_default()
                    .set(mode, Some(id));
            }
        }
    }

    fn remove(&mut self, owner: &[u8], mode: Mode) {
        let Self::Many(owners) = self else {
            *self = Self::None;
            return;
        };
        if let Some(of_owner) = owners.get_mut(owner) {
            of_owner.set(mode, None);
            if of_owner.ids().next().is_none() {
                owners.remove(owner);
            }
        }
        if owners.is_empty() {
            *self = Self::None;
        }
    }
}

/// All holds that belong to sessions.
#[derive(Debug, Default)]
pub(crate) struct SessionHolds {
    arena: Arena<SessionHold>,
    checks: BTreeSet<(i64, HoldId)>,
    dirty: VecDeque<HoldId>,
    /// Those whose sessions are to be told that their locks are wanted, by the locks' records.
    asking: BTreeSet<(RecordId, HoldId)>,
}

impl SessionHolds {
    pub(crate) fn len(&self) -> usize {
        self.arena.len()
    }

    pub(crate) fn get(&self, id: HoldId) -> Option<&SessionHold> {
        self.arena.get(id.0)
    }

    /// An owner's hold among those of its lock.
    pub(crate) fn find(&self, index: &HoldIndex, owner: &[u8], mode: Mode) -> Option<HoldId> {
        match index {
            HoldIndex::None => None,
            HoldIndex::One(id) => {
                let hold = self.get(*id)?;
                (*hold.owner == *owner && hold.mode == mode).then_some(*id)
            }
            HoldIndex::Many(owners) => owners.get(owner)?.get(mode),
        }
    }

    /// A new hold of a session, put among those of its lock. None only when four billion are there
    /// already.
    #[allow(clippy::too_many_arguments, reason = "what a hold is made of")]
    pub(crate) fn add(
        &mut self,
        index: &mut HoldIndex,
        lock: LockKey,
        owner: Rc<[u8]>,
        mode: Mode,
        session: SessionId,
        token: Option<Token>,
        since_us: Option<i64>,
    ) -> Option<HoldId> {
        let of = Rc::clone(&owner);
        let id = HoldId(self.arena.insert(SessionHold {
            lock,
            owner,
            mode,
            session,
            token,
            since_us,
            ends_at: None,
            check_at: None,
            dirty: false,
            replaced: false,
            asks_at: None,
        })?);
        index.insert(self, id, &of, mode);
        Some(id)
    }

    /// The hold belongs to another session now, or has another token.
    pub(crate) fn rebind(
        &mut self,
        id: HoldId,
        session: SessionId,
        token: Option<Token>,
        since_us: Option<i64>,
    ) -> Option<SessionId> {
        let hold = self.arena.get_mut(id.0)?;
        if hold.token != token {
            (hold.token, hold.since_us) = (token, since_us);
        }
        Some(std::mem::replace(&mut hold.session, session))
    }

    /// The hold has this token, whichever session it belongs to.
    pub(crate) fn note_token(&mut self, id: HoldId, token: Option<Token>) {
        if let Some(hold) = self.arena.get_mut(id.0) {
            hold.token = token.or(hold.token);
        }
    }

    /// Takes a hold out, and from among those of its lock.
    pub(crate) fn remove(
        &mut self,
        index: Option<&mut HoldIndex>,
        id: HoldId,
    ) -> Option<SessionHold> {
        let hold = self.arena.remove(id.0)?;
        if let Some(index) = index {
            index.remove(&hold.owner, hold.mode);
        }
        if let Some(check_at) = hold.check_at {
            self.checks.remove(&(check_at, id));
        }
        if let Some(record) = hold.asks_at {
            self.asking.remove(&(record, id));
        }
        Some(hold)
    }

    // --- Who asks whether its lock is wanted -----------------------------------------------------

    /// The hold's session is to be told when its lock, which has this record, is wanted.
    pub(crate) fn ask_if_wanted(&mut self, id: HoldId, record: RecordId) {
        if let Some(hold) = self.arena.get_mut(id.0) {
            hold.asks_at = Some(record);
            self.asking.insert((record, id));
        }
    }

    /// It was told.
    pub(crate) fn ask_no_more(&mut self, id: HoldId) {
        let hold = self.arena.get_mut(id.0);
        if let Some(record) = hold.and_then(|hold| hold.asks_at.take()) {
            self.asking.remove(&(record, id));
        }
    }

    /// Whether anybody is to be told: where not, as mostly, nobody is looked for.
    pub(crate) fn any_asks(&self) -> bool {
        !self.asking.is_empty()
    }

    /// The holds of a lock that ask.
    pub(crate) fn asking(&self, record: RecordId) -> impl Iterator<Item = (HoldId, &SessionHold)> {
        let first = (record, HoldId(Id::FIRST));
        let of_lock = self.asking.range(first..);
        let of_lock = of_lock.take_while(move |(of, _)| *of == record);
        of_lock.filter_map(|(_, id)| Some((*id, self.get(*id)?)))
    }

    // --- Noticing a loss -------------------------------------------------------------------------

    /// Looks at the key just after the lease is over. A check that is due earlier stays: it will
    /// find the lease as it is by then.
    pub(crate) fn check_after(&mut self, id: HoldId, ends_at: Option<i64>) {
        let Some(hold) = self.arena.get_mut(id.0) else {
            return;
        };
        hold.ends_at = ends_at;
        hold.replaced = false;
        let Some(check_at) = ends_at.map(|end| end.saturating_add(1)) else {
            return;
        };
        if hold.check_at.is_some_and(|earlier| earlier <= check_at) {
            return;
        }
        if let Some(later) = hold.check_at.replace(check_at) {
            self.checks.remove(&(later, id));
        }
        self.checks.insert((check_at, id));
    }

    /// When the nearest check is due, in milliseconds of the wall clock.
    pub(crate) fn next_check(&self) -> Option<i64> {
        self.checks.first().map(|(at, _)| *at)
    }

    /// Marks a hold: its key may have changed.
    pub(crate) fn mark_dirty(&mut self, id: HoldId) {
        if let Some(hold) = self.arena.get_mut(id.0)
            && !std::mem::replace(&mut hold.dirty, true)
        {
            self.dirty.push_back(id);
        }
    }

    /// The hold's key may be another one by now.
    pub(crate) fn mark_replaced(&mut self, id: HoldId) {
        if let Some(hold) = self.arena.get_mut(id.0) {
            hold.replaced = true;
        }
    }

    /// Marks the holds whose check is due, so many at most.
    pub(crate) fn mark_due(&mut self, most: usize, now: Now) {
        for _ in 0..most {
            let Some((at, id)) = self.checks.first().copied() else {
                return;
            };
            if at > now.wall_ms() {
                return;
            }
            self.checks.pop_first();
            if let Some(hold) = self.arena.get_mut(id.0) {
                hold.check_at = None;
            }
            self.mark_dirty(id);
        }
    }

    pub(crate) fn any_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The next marked hold. It stays marked.
    pub(crate) fn first_dirty(&mut self) -> Option<HoldId> {
        while let Some(id) = self.dirty.front().copied() {
            if self.arena.get(id.0).is_some() {
                return Some(id);
            }
            self.dirty.pop_front();
        }
        None
    }

    /// This hold is no longer marked.
    pub(crate) fn pop_dirty(&mut self) {
        if let Some(id) = self.dirty.pop_front()
            && let Some(hold) = self.arena.get_mut(id.0)
        {
            hold.dirty = false;
        }
    }

    pub(crate) fn all(&self) -> Vec<HoldId> {
        self.arena.iter().map(|(id, _)| HoldId(id)).collect()
    }
}
