//! The waiters whose wait was not logged as long yet.

use crate::values::ids::WaiterId;
use crate::values::time::Now;
use std::collections::VecDeque;

/// The waiters that were not noticed yet, in the order in which they began to wait. Each is noticed
/// after the same time, so this is also the order in which they become due.
#[derive(Debug, Default)]
pub(crate) struct Unnoticed {
    /// Each with the moment at which it began to wait, monotonic, in milliseconds.
    waiters: VecDeque<(i64, WaiterId)>,
}

/// Waiters that have left are removed when they come first, or when they are more than this many
/// and more than half of all entries.
pub(crate) const LEFT_MAX: usize = 64;

impl Unnoticed {
    pub(crate) fn joined(&mut self, id: WaiterId, now: Now) {
        self.waiters.push_back((now.mono_ms, id));
    }

    /// A waiter has left; `waiters` are still waiting. Afterwards the first entry is a waiter that
    /// still waits.
    pub(crate) fn left(
        &mut self,
        id: WaiterId,
        is_there: impl Fn(WaiterId) -> bool,
        waiters: usize,
    ) {
        if self.waiters.front().is_some_and(|(_, first)| *first == id) {
            self.pop(is_there);
        } else if self.waiters.len() > waiters.saturating_mul(2).saturating_add(LEFT_MAX) {
            self.waiters.retain(|(_, id)| is_there(*id));
            self.waiters.shrink_to(waiters.saturating_mul(2));
        }
    }

    /// The first entry: since when that waiter has waited, and its id.
    pub(crate) fn first(&self) -> Option<(i64, WaiterId)> {
        self.waiters.front().copied()
    }

    /// The first waiter was noticed: removes it.
    pub(crate) fn pop(&mut self, is_there: impl Fn(WaiterId) -> bool) {
        self.waiters.pop_front();
        while let Some((_, first)) = self.waiters.front()
            && !is_there(*first)
        {
            self.waiters.pop_front();
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.waiters.len()
    }
}
