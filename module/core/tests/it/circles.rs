//! Who waits for whom, as the contract says it, without a thought for how long it takes.

use crate::keyspace::Place;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) type Owner = Vec<u8>;

/// Everything that an answer depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    /// Who waits, in order.
    pub(crate) lines: BTreeMap<Place, Vec<Owner>>,
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

    /// For whom an owner waits: the holders of all that it waits for, and those before it in those
    /// lines who wait for another lock as well.
    pub(crate) fn waits_for(&self, owner: &[u8]) -> BTreeSet<Owner> {
        let mut found = BTreeSet::new();
        for (place, line) in &self.lines {
            let last = line.iter().rposition(|waiter| waiter == owner);
            let holds = self.holders_of(place).any(|holder| holder == owner);
            let Some(last) = last else { continue };
            // What one holds is re-entered, never waited for; but a second wait of its holder
            // stands behind those ahead of it.
            found.extend(self.holders_of(place).filter(|_| !holds).cloned());
            let ahead = line[..last].iter();
            found.extend(
                ahead
                    .filter(|ahead| *ahead != owner && self.waits_elsewhere(ahead, place))
                    .cloned(),
            );
        }
        found
    }

    fn holders_of(&self, place: &Place) -> impl Iterator<Item = &Owner> {
        self.holders.get(place).into_iter().flatten()
    }

    fn waits_elsewhere(&self, owner: &Owner, place: &Place) -> bool {
        let mut others = self.lines.iter().filter(|(other, _)| *other != place);
        others.any(|(_, line)| line.contains(owner))
    }
}
