//! When the present waits, or the present holds, began: the earliest is found without a walk.

use crate::memory::log::pattern::PATTERNS_MAX;
use std::collections::BTreeMap;

/// How many began at each moment, apart for each pattern's number (see `Patterns::number`).
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ages([BTreeMap<i64, u32>; PATTERNS_MAX + 1]);

impl Ages {
    /// A wait or hold that began at `before` is replaced by one that began at `after`. Without a
    /// `before` one is added, without an `after` one is removed.
    pub(crate) fn change(&mut self, pattern: usize, before: Option<i64>, after: Option<i64>) {
        let Some(began) = self.0.get_mut(pattern).filter(|_| before != after) else {
            return;
        };
        if let Some(since) = after {
            let count = began.entry(since).or_default();
            *count = count.saturating_add(1);
        }
        let Some(since) = before else { return };
        match began.get_mut(&since) {
            Some(count) if *count > 1 => *count = count.saturating_sub(1),
            _ => drop(began.remove(&since)),
        }
    }

    /// The earliest beginning under this pattern's number, or of all if none is named.
    pub(crate) fn earliest(&self, pattern: Option<usize>) -> Option<i64> {
        let first = |began: &BTreeMap<i64, u32>| Some(*began.first_key_value()?.0);
        match pattern {
            Some(pattern) => first(self.0.get(pattern)?),
            None => self.0.iter().filter_map(first).min(),
        }
    }
}
