//! Multi-waits: waits for several locks. Each has a waiter in the queue of each of its locks.

use crate::values::arena::Arena;
use crate::values::ids::{MultiId, RecordId, WaiterId};
use crate::values::lock_key::LockKey;
use crate::values::must_exist::MustExist;
use std::rc::Rc;

/// All multi-waits.
#[derive(Debug, Default)]
pub(crate) struct MultiWaits {
    arena: Arena<MultiWait>,
}

/// A wait for several locks.
#[derive(Debug)]
pub(crate) struct MultiWait {
    pub(crate) owner: Rc<[u8]>,
    /// The locks, in the order in which the command named them.
    pub(crate) locks: Rc<[LockKey]>,
    /// Its waiter in the queue of each lock.
    pub(crate) waiters: Vec<WaiterId>,
    /// Whether it is on the agenda, because it may be able to get all its locks.
    pub(crate) marked: bool,
    /// The queue in which it was last found that it cannot be granted. Until this queue changes,
    /// changes in its other queues make no difference. So all its locks are read once after a
    /// change of this queue, and not once for each of the other locks.
    pub(crate) blocked_in: Option<RecordId>,
    /// Whether only the delay after a start keeps it from its locks. Until the delay ends, no
    /// change in any of its queues makes a difference. Without this flag all its locks would be
    /// read for each of its queues every second, because each queue is looked at every second.
    pub(crate) is_kept_back: bool,
}

impl MultiWaits {
    pub(crate) fn is_empty(&self) -> bool {
        self.arena.len() == 0
    }

    /// Adds a multi-wait, without a waiter in any queue yet.
    pub(crate) fn add(&mut self, owner: &[u8], locks: Rc<[LockKey]>) -> Option<MultiId> {
        let waiters = Vec::with_capacity(locks.len());
        let id = self.arena.insert(MultiWait {
            owner: Rc::from(owner),
            locks,
            waiters,
            marked: false,
            blocked_in: None,
            is_kept_back: false,
        })?;
        Some(MultiId(id))
    }

    pub(crate) fn get(&self, id: MultiId) -> Option<&MultiWait> {
        self.arena.get(id.0)
    }

    pub(crate) fn get_mut(&mut self, id: MultiId) -> Option<&mut MultiWait> {
        self.arena.get_mut(id.0)
    }

    pub(crate) fn locks(&self, id: MultiId) -> Option<Rc<[LockKey]>> {
        self.arena.get(id.0).map(|multi| Rc::clone(&multi.locks))
    }

    pub(crate) fn waiters(&self, id: MultiId) -> &[WaiterId] {
        self.arena
            .get(id.0)
            .map_or(&[], |multi| multi.waiters.as_slice())
    }

    pub(crate) fn remove(&mut self, id: MultiId) -> Vec<WaiterId> {
        self.arena
            .remove(id.0)
            .map_or_else(Vec::new, |multi| multi.waiters)
    }

    /// Marks it because this queue changed, so it may be able to get all its locks. False if it is
    /// marked already, if it is blocked in another queue, or if the delay that keeps it back
    /// `lasts`.
    pub(crate) fn mark(&mut self, id: MultiId, queue: RecordId, lasts: bool) -> bool {
        self.arena.get_mut(id.0).must_exist().is_some_and(|multi| {
            let blocked_in = multi.blocked_in;
            blocked_in.is_none_or(|blocked_in| blocked_in == queue)
                && !(multi.is_kept_back && lasts)
                && !std::mem::replace(&mut multi.marked, true)
        })
    }
}

#[cfg(debug_assertions)]
impl MultiWaits {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (MultiId, &MultiWait)> {
        self.arena.iter().map(|(id, multi)| (MultiId(id), multi))
    }
}
