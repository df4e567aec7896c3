//! The waiters whose wait was not logged as a long one yet.

use crate::values::ids::WaiterId;
use crate::values::time::Now;
use std::collections::VecDeque;

/// The waiters that were not noticed yet, in the order in which they began: that of their moments
/// too, since all are noticed after the same time.
#[derive(Debug, Default)]
pub(crate) struct Unnoticed {
    /// With the moment at which each began, monotonic, in milliseconds.
    waiters: VecDeque<(i64, WaiterId)>,
}

/// Those who have left are forgotten when they are first, or more than so many and half of all.
pub(crate) const LEFT_MAX: usize = 64;

impl Unnoticed {
    pub(crate) fn joined(&mut self, id: WaiterId, now: Now) {
        self.waiters.push_back((now.mono_ms, id));
    }

    /// A waiter has left, and so many are there. The first is always one of them.
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

    /// Since when the first of them has waited.
    pub(crate) fn first(&self) -> Option<(i64, WaiterId)> {
        self.waiters.front().copied()
    }

    /// The first was noticed.
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
