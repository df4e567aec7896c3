//! When the present waits, or the present holds, began: the earliest is found without a walk.

use crate::memory::log::pattern::PATTERNS_MAX;
use std::collections::BTreeSet;

/// The beginnings of waits or holds, apart for each pattern's number (see `Patterns::number`).
#[derive(Debug)]
pub(crate) struct Ages<I>([BTreeSet<(i64, I)>; PATTERNS_MAX + 1]);

impl<I> Default for Ages<I> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| BTreeSet::new()))
    }
}

impl<I: Ord> Ages<I> {
    pub(crate) fn insert(&mut self, pattern: usize, since: i64, id: I) {
        if let Some(of_pattern) = self.0.get_mut(pattern) {
            of_pattern.insert((since, id));
        }
    }

    pub(crate) fn remove(&mut self, pattern: usize, since: i64, id: I) {
        if let Some(of_pattern) = self.0.get_mut(pattern) {
            of_pattern.remove(&(since, id));
        }
    }

    /// The earliest beginning under this pattern's number, or of all if none is named.
    pub(crate) fn earliest(&self, pattern: Option<usize>) -> Option<i64> {
        let first = |of: &BTreeSet<(i64, I)>| of.first().map(|(since, _)| *since);
        match pattern {
            Some(pattern) => self.0.get(pattern).and_then(first),
            None => self.0.iter().filter_map(first).min(),
        }
    }

    #[cfg(debug_assertions)]
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(BTreeSet::len).sum()
    }

    #[cfg(debug_assertions)]
    pub(crate) fn contains(&self, pattern: usize, since: i64, id: I) -> bool {
        let of_pattern = self.0.get(pattern);
        of_pattern.is_some_and(|of_pattern| of_pattern.contains(&(since, id)))
    }
}
