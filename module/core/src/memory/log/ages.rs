//! When the present waits, or the present holds, began: the earliest is found without a walk.

use crate::memory::log::pattern::PATTERNS_MAX;
use std::collections::BTreeMap;

/// How many began at each moment, apart for each pattern's number (see `Patterns::number`).
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ages(BTreeMap<(usize, i64), u32>);

impl Ages {
    /// A wait or hold that began at `before` is replaced by one that began at `after`. Without a
    /// `before` one is added, without an `after` one is removed.
    pub(crate) fn change(&mut self, pattern: usize, before: Option<i64>, after: Option<i64>) {
        if before == after {
            return;
        }
        if let Some(since) = after {
            let count = self.0.entry((pattern, since)).or_default();
            *count = count.saturating_add(1);
        }
        let Some(key) = before.map(|since| (pattern, since)) else {
            return;
        };
        match self.0.get_mut(&key) {
            Some(count) if *count > 1 => *count = count.saturating_sub(1),
            _ => drop(self.0.remove(&key)),
        }
    }

    /// The earliest beginning under this pattern's number, or of all if none is named.
    pub(crate) fn earliest(&self, pattern: Option<usize>) -> Option<i64> {
        let numbers = pattern.map_or(0..=PATTERNS_MAX, |number| number..=number);
        let first = |number| self.0.range((number, i64::MIN)..=(number, i64::MAX)).next();
        numbers
            .filter_map(first)
            .map(|((_, since), _)| *since)
            .min()
    }
}
