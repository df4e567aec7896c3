//! Which owner waits for which, as the contract says it, without a thought for how long that takes.

use crate::keyspace::Place;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) type Owner = Vec<u8>;

/// A place in a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) owner: Owner,
    /// The wait for several locks that this is part of.
    pub(crate) joint: Option<usize>,
}

/// Everything that an answer depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    /// The waiters, in order.
    pub(crate) lines: BTreeMap<Place, Vec<Standing>>,
    pub(crate) holders: BTreeMap<Place, BTreeSet<Owner>>,
}

impl Graph {
    /// Whether an owner waits for itself, by way of at least one other.
    pub(crate) fn is_in_a_circle(&self, owner: &[u8]) -> bool {
        let mut reached = BTreeSet::new();
        let mut to_visit = self.waits_for(owner);
        while let Some(next) = to_visit.pop_first() {
            if next == owner {
                return true;
            }
            if reached.insert(next.clone()) {
                to_visit.extend(self.waits_for(&next));
            }
        }
        false
    }

    /// The owners that this owner waits for: the holders of all locks that it waits for, and the
    /// waiters before it there that wait for another lock as well.
    pub(crate) fn waits_for(&self, owner: &[u8]) -> BTreeSet<Owner> {
        let mut found = BTreeSet::new();
        for (place, line) in &self.lines {
            // An owner re-enters its own hold and never waits for it: also where a script gave it
            // the lock while it stood in the queue.
            if self.holders_of(place).any(|holder| holder == owner) {
                continue;
            }
            let own = line.iter().enumerate();
            for (at, _) in own.filter(|(_, waiter)| waiter.owner == owner) {
                found.extend(self.holders_of(place).cloned());
                let ahead = line[..at].iter().map(|ahead| &ahead.owner);
                let others = ahead.filter(|ahead| *ahead != owner);
                found.extend(others.filter(|of| self.waits_elsewhere(of, place)).cloned());
            }
        }
        found
    }

    fn holders_of(&self, place: &Place) -> impl Iterator<Item = &Owner> {
        self.holders.get(place).into_iter().flatten()
    }

    fn waits_elsewhere(&self, owner: &Owner, place: &Place) -> bool {
        let mut others = self.lines.iter().filter(|(other, _)| *other != place);
        others.any(|(_, line)| line.iter().any(|of| of.owner == *owner))
    }
}
