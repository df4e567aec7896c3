//! Holds that belong to a session.
//!
//! The hold itself is in the keyspace. What is kept here is whose session it is, so that it can be
//! released when the session ends, and what is needed to notice that it was lost: its token, and
//! when its lease ends.

use crate::arena::{Arena, Id, ROOM_KEPT};
use crate::session::SessionId;
use crate::{LockKey, LockRef, Mode, Now, Token};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

/// The name of a hold that belongs to a session. It stays invalid after the hold has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HoldId(Id);

#[derive(Clone, Debug)]
pub(crate) struct SessionHold {
    pub(crate) lock: LockKey,
    pub(crate) owner: Rc<[u8]>,
    pub(crate) mode: Mode,
    pub(crate) session: SessionId,
    /// None of a hold that a script or a server before this one granted.
    pub(crate) token: Option<Token>,
    /// When the lease ends, as far as was heard of it, in milliseconds of the wall clock.
    ends_at: Option<i64>,
    /// When to look at the key, in milliseconds of the wall clock.
    check_at: Option<i64>,
    /// Whether it stands among those to look at.
    touched: bool,
}

impl SessionHold {
    /// Whether the lease that was last heard of is over.
    pub(crate) fn lease_over(&self, now: Now) -> bool {
        self.ends_at.is_some_and(|end| end < now.wall_ms())
    }
}

/// The holds of one lock. Most locks have one.
#[derive(Debug)]
enum OfLock {
    One(HoldId),
    /// By owner, and then by mode.
    Many(BTreeMap<Rc<[u8]>, OfOwner>),
}

/// The holds that one owner has of a lock: as a writer who also reads, or if somebody else wrote
/// into its hash.
#[derive(Debug, Default)]
struct OfOwner([Option<HoldId>; 3]);

impl OfOwner {
    fn get(&self, mode: Mode) -> Option<HoldId> {
        let Self([plain, read, write]) = self;
        match mode {
            Mode::Plain => *plain,
            Mode::Read => *read,
            Mode::Write => *write,
        }
    }

    fn set(&mut self, mode: Mode, id: Option<HoldId>) {
        let Self([plain, read, write]) = self;
        match mode {
            Mode::Plain => *plain = id,
            Mode::Read => *read = id,
            Mode::Write => *write = id,
        }
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }
}

impl OfLock {
    fn all(&self) -> Vec<HoldId> {
        match self {
            Self::One(id) => vec![*id],
            Self::Many(owners) => owners.values().flat_map(|of| of.0).flatten().collect(),
        }
    }

    fn find(&self, arena: &Arena<SessionHold>, owner: &[u8], mode: Mode) -> Option<HoldId> {
        match self {
            Self::One(id) => {
                let hold = arena.get(id.0)?;
                (*hold.owner == *owner && hold.mode == mode).then_some(*id)
            }
            Self::Many(owners) => owners.get(owner)?.get(mode),
        }
    }

    fn add(&mut self, arena: &Arena<SessionHold>, id: HoldId) {
        let former = match self {
            Self::One(one) => Some(*one),
            Self::Many(_) => None,
        };
        if former.is_some() {
            *self = Self::Many(BTreeMap::new());
        }
        let Self::Many(owners) = self else { return };
        for id in former.into_iter().chain([id]) {
            if let Some(hold) = arena.get(id.0) {
                let of_owner = owners.entry(Rc::clone(&hold.owner)).or_default();
                of_owner.set(hold.mode, Some(id));
            }
        }
    }

    /// Whether none is left.
    fn remove(&mut self, owner: &[u8], mode: Mode) -> bool {
        let Self::Many(owners) = self else {
            return true;
        };
        if let Some(of_owner) = owners.get_mut(owner) {
            of_owner.set(mode, None);
            if of_owner.is_empty() {
                owners.remove(owner);
            }
        }
        owners.is_empty()
    }
}

/// All holds that belong to sessions.
#[derive(Debug, Default)]
pub(crate) struct SessionHolds {
    arena: Arena<SessionHold>,
    databases: BTreeMap<i32, HashMap<Rc<[u8]>, OfLock>>,
    checks: BTreeSet<(i64, HoldId)>,
    to_check: VecDeque<HoldId>,
}

impl SessionHolds {
    pub(crate) fn len(&self) -> usize {
        self.arena.len()
    }

    pub(crate) fn get(&self, id: HoldId) -> Option<&SessionHold> {
        self.arena.get(id.0)
    }

    /// The holds of a lock: more than one of its readers, or if somebody else wrote several owners
    /// into its hash.
    pub(crate) fn of(&self, lock: LockRef<'_>) -> Vec<HoldId> {
        self.of_lock(lock).map_or_else(Vec::new, OfLock::all)
    }

    fn of_lock(&self, lock: LockRef<'_>) -> Option<&OfLock> {
        self.databases.get(&lock.db)?.get(lock.name)
    }

    pub(crate) fn find(&self, lock: LockRef<'_>, owner: &[u8], mode: Mode) -> Option<HoldId> {
        self.of_lock(lock)?.find(&self.arena, owner, mode)
    }

    /// A new hold of a session. None only when four billion are there already.
    pub(crate) fn add(
        &mut self,
        lock: LockKey,
        owner: Rc<[u8]>,
        mode: Mode,
        session: SessionId,
        token: Option<Token>,
    ) -> Option<HoldId> {
        let key = lock.clone();
        let (ends_at, check_at, touched) = (None, None, false);
        let hold = SessionHold {
            lock,
            owner,
            mode,
            session,
            token,
            ends_at,
            check_at,
            touched,
        };
        let id = HoldId(self.arena.insert(hold)?);
        let names = self.databases.entry(key.db).or_default();
        match names.entry(key.name) {
            Entry::Vacant(of_lock) => {
                of_lock.insert(OfLock::One(id));
            }
            Entry::Occupied(mut of_lock) => of_lock.get_mut().add(&self.arena, id),
        }
        Some(id)
    }

    /// The hold belongs to another session now, or has another token.
    pub(crate) fn rebind(
        &mut self,
        id: HoldId,
        session: SessionId,
        token: Option<Token>,
    ) -> Option<SessionId> {
        let hold = self.arena.get_mut(id.0)?;
        hold.token = token;
        Some(std::mem::replace(&mut hold.session, session))
    }

    /// The hold has this token, whoever has the hold.
    pub(crate) fn note_token(&mut self, id: HoldId, token: Option<Token>) {
        if let Some(hold) = self.arena.get_mut(id.0) {
            hold.token = token.or(hold.token);
        }
    }

    pub(crate) fn remove(&mut self, id: HoldId) -> Option<SessionHold> {
        let hold = self.arena.get(id.0)?;
        let names = self.databases.get_mut(&hold.lock.db)?;
        if let Entry::Occupied(mut of_lock) = names.entry(Rc::clone(&hold.lock.name))
            && of_lock.get_mut().remove(&hold.owner, hold.mode)
        {
            of_lock.remove();
        }
        if names.is_empty() {
            names.shrink_to(ROOM_KEPT);
        }
        let hold = self.arena.remove(id.0)?;
        if let Some(check_at) = hold.check_at {
            self.checks.remove(&(check_at, id));
        }
        Some(hold)
    }

    // --- Noticing a loss -------------------------------------------------------------------------

    /// Looks at the key just after the lease is over. A check that is due earlier stays: it will
    /// find the lease as it is by then.
    pub(crate) fn check_after(&mut self, id: HoldId, ends_at: Option<i64>) {
        let Some(hold) = self.arena.get_mut(id.0) else {
            return;
        };
        hold.ends_at = ends_at;
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

    pub(crate) fn touch(&mut self, id: HoldId) {
        if let Some(hold) = self.arena.get_mut(id.0)
            && !std::mem::replace(&mut hold.touched, true)
        {
            self.to_check.push_back(id);
        }
    }

    /// Marks the holds of a lock. Whether there are any.
    pub(crate) fn touch_lock(&mut self, lock: LockRef<'_>) -> bool {
        let ids = self.of(lock);
        for id in &ids {
            self.touch(*id);
        }
        !ids.is_empty()
    }

    /// Marks all holds of a database; of all databases if none is named.
    pub(crate) fn touch_all(&mut self, db: Option<i32>) {
        let of_db = |hold: &SessionHold| db.is_none_or(|db| hold.lock.db == db);
        let ids: Vec<HoldId> = self
            .arena
            .iter()
            .filter(|(_, hold)| of_db(hold))
            .map(|(id, _)| HoldId(id))
            .collect();
        for id in ids {
            self.touch(id);
        }
    }

    /// Marks the holds whose check is due.
    pub(crate) fn touch_due(&mut self, now: Now) {
        while let Some((_, id)) = self
            .checks
            .first()
            .copied()
            .filter(|(at, _)| *at <= now.wall_ms())
        {
            self.checks.pop_first();
            if let Some(hold) = self.arena.get_mut(id.0) {
                hold.check_at = None;
            }
            self.touch(id);
        }
    }

    pub(crate) fn any_touched(&self) -> bool {
        !self.to_check.is_empty()
    }

    /// The next marked hold, no longer marked.
    pub(crate) fn next_touched(&mut self) -> Option<HoldId> {
        while let Some(id) = self.to_check.pop_front() {
            if let Some(hold) = self.arena.get_mut(id.0) {
                hold.touched = false;
                return Some(id);
            }
        }
        None
    }

    pub(crate) fn all(&self) -> Vec<HoldId> {
        self.arena.iter().map(|(id, _)| HoldId(id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SessionLimits, request::SessionRef, session::Sessions};
    use std::time::{Duration, Instant};

    /// What it takes to end the holds of so many readers of one lock, one after the other.
    fn time_to_end(readers: u32) -> Duration {
        let limits = SessionLimits {
            sessions: 1,
            events_per_session: 1,
            out_of_memory: false,
        };
        let of = SessionRef::from(&b"s"[..]);
        let (session, _) = Sessions::default().attach(of, 1, 0, limits).unwrap();
        let mut holds = SessionHolds::default();
        let name: Rc<[u8]> = Rc::from(&b"lock"[..]);
        let lock = LockKey { db: 0, name };
        for reader in 0..readers {
            let (lock, owner) = (lock.clone(), Rc::from(reader.to_be_bytes()));
            holds.add(lock, owner, Mode::Read, session, None);
        }
        #[allow(clippy::disallowed_methods, reason = "it is time that is measured")]
        let begun = Instant::now();
        for id in holds.of(lock.as_ref()) {
            holds.remove(id);
        }
        assert_eq!(holds.len(), 0);
        begun.elapsed()
    }

    /// A sorted list took the square of their number.
    #[test]
    fn ending_the_holds_of_a_crowd_takes_as_long_for_each_as_for_few() {
        let best = |readers| (0..3).map(|_| time_to_end(readers)).min().unwrap();
        let (few, many) = (best(10_000), best(160_000));
        assert!(many < 60 * few, "{many:?} for 16 times as many as {few:?}");
    }
}
