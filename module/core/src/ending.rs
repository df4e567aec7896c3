//! Holds that must end although nobody gives them back.

use crate::{LockKey, LockRef, Mode, Token};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// A hold that must end as soon as a write is allowed, because nobody is left who knows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRelease {
    /// The lock.
    pub lock: LockKey,
    /// The holder.
    pub owner: Rc<[u8]>,
    /// How it is held.
    pub mode: Mode,
    /// The grant: a later one of the same owner stays. None of a hold without a token.
    pub token: Option<Token>,
    /// Whether all of the hold ends, with its session, or only what one grant added to it.
    pub whole: bool,
}

/// All of these, in the order in which it came about that they must end; and those of each lock.
#[derive(Debug, Default)]
pub(crate) struct Endings {
    in_order: BTreeMap<u64, PendingRelease>,
    databases: BTreeMap<i32, BTreeMap<Rc<[u8]>, VecDeque<u64>>>,
    added: u64,
}

impl Endings {
    pub(crate) fn is_empty(&self) -> bool {
        self.in_order.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.in_order.clear();
        self.databases.clear();
    }

    pub(crate) fn add(&mut self, ending: PendingRelease) {
        let of_db = self.databases.entry(ending.lock.db).or_default();
        let of_lock = of_db.entry(Rc::clone(&ending.lock.name)).or_default();
        of_lock.push_back(self.added);
        self.in_order.insert(self.added, ending);
        self.added = self.added.wrapping_add(1);
    }

    pub(crate) fn take_first(&mut self) -> Option<PendingRelease> {
        let lock = self.in_order.first_key_value()?.1.lock.clone();
        self.take_first_of(lock.as_ref())
    }

    /// The first of a lock.
    pub(crate) fn take_first_of(&mut self, lock: LockRef<'_>) -> Option<PendingRelease> {
        let of_db = self.databases.get_mut(&lock.db)?;
        let of_lock = of_db.get_mut(lock.name)?;
        let first = of_lock.pop_front();
        if of_lock.is_empty() {
            of_db.remove(lock.name);
        }
        self.in_order.remove(&first?)
    }
}
