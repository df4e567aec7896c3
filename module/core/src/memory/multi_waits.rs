//! The waits for several locks. Each has a waiter in the queue of each of its locks.

use crate::values::arena::Arena;
use crate::values::ids::{MultiId, RecordId, WaiterId};
use crate::values::lock_key::LockKey;
use std::rc::Rc;

/// All waits for several locks.
#[derive(Debug, Default)]
pub(crate) struct MultiWaits {
    arena: Arena<MultiWait>,
}

#[derive(Debug)]
struct MultiWait {
    owner: Rc<[u8]>,
    /// The locks, in the order in which they were named.
    locks: Rc<[LockKey]>,
    /// Its waiter in the queue of each.
    waiters: Vec<WaiterId>,
    /// Whether it stands among those that can perhaps have all.
    marked: bool,
    /// The queue in which it was last found that it cannot be granted. Until something happens
    /// there, changes in its other queues change nothing. So all its locks are read once after a
    /// change of this one, not once for each of them.
    blocked_in: Option<RecordId>,
    /// Whether only the delay after a start keeps it back. Until that ends, no change in any of its
    /// queues changes anything: each is looked at every second, and each look would read all.
    is_kept_back: bool,
}

impl MultiWaits {
    pub(crate) fn is_empty(&self) -> bool {
        self.arena.len() == 0
    }

    /// A new wait, without a waiter in any queue yet.
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

    pub(crate) fn add_waiter(&mut self, id: MultiId, waiter: WaiterId) {
        if let Some(multi) = self.arena.get_mut(id.0) {
            multi.waiters.push(waiter);
        }
    }

    pub(crate) fn locks(&self, id: MultiId) -> Option<Rc<[LockKey]>> {
        self.arena.get(id.0).map(|multi| Rc::clone(&multi.locks))
    }

    pub(crate) fn owner(&self, id: MultiId) -> Option<Rc<[u8]>> {
        self.arena.get(id.0).map(|multi| Rc::clone(&multi.owner))
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

    /// After what happened in this queue perhaps it can have all. False if it is marked already, if
    /// it was blocked in another queue, or if the delay that keeps it back `lasts`.
    pub(crate) fn mark(&mut self, id: MultiId, queue: RecordId, lasts: bool) -> bool {
        self.arena.get_mut(id.0).is_some_and(|multi| {
            let blocked_in = multi.blocked_in;
            blocked_in.is_none_or(|blocked_in| blocked_in == queue)
                && !(multi.is_kept_back && lasts)
                && !std::mem::replace(&mut multi.marked, true)
        })
    }

    pub(crate) fn unmark(&mut self, id: MultiId) {
        if let Some(multi) = self.arena.get_mut(id.0) {
            multi.marked = false;
        }
    }

    pub(crate) fn block(&mut self, id: MultiId, blocked_in: Option<RecordId>, is_kept_back: bool) {
        if let Some(multi) = self.arena.get_mut(id.0) {
            (multi.blocked_in, multi.is_kept_back) = (blocked_in, is_kept_back);
        }
    }
}
