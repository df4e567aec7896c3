//! No hold outlives those who could renew it: when its owner has asked for the last time, or its
//! process is dead, it ends with its lease.

use std::collections::{BTreeMap, BTreeSet};

use super::Violation;
use crate::history::{Ask, History, MS, Time};

/// How long a command may still be under way, waits in the server included, and a client may repeat
/// what it was not answered.
const UNDER_WAY: Time = 6_000 * MS;

pub(super) fn check(history: &History) -> Vec<Violation> {
    let ends = ends(history);
    let mut told = BTreeSet::new();
    let mut found = Vec::new();
    for sample in &history.samples {
        for holder in &sample.holders {
            let Some(end) = ends.get(holder.owner.as_str()) else {
                continue;
            };
            let whose = (sample.lock.as_str(), holder.owner.as_str());
            if sample.asked <= put_off(history, *end, sample.asked) || !told.insert(whose) {
                continue;
            }
            let what = format!(
                "{}: {} still holds it, and should not since {end}",
                sample.lock, holder.owner
            );
            found.push(Violation::new(sample.told, what));
        }
    }
    found
}

/// When the holds of each owner should have ended, if it does not live on.
fn ends(history: &History) -> BTreeMap<&str, Time> {
    let dead: BTreeMap<&str, Time> = history
        .died
        .iter()
        .map(|(at, process)| (process.as_str(), *at))
        .collect();
    let mut owners: BTreeMap<&str, (Time, Time, bool)> = BTreeMap::new();
    for operation in &history.operations {
        let entry = owners.entry(&operation.owner).or_insert((0, 0, false));
        let dead = dead.get(operation.process.as_str());
        if operation.asked >= entry.0 {
            // After its release, or what it was never answered, an owner is not heard of again.
            entry.0 = operation.asked;
            entry.2 = operation.ask == Ask::Release || operation.told.is_none();
        }
        entry.2 |= dead.is_some();
        entry.0 = entry.0.max(dead.copied().unwrap_or(0));
        if let Ask::Acquire { lease, .. } | Ask::Renew { lease } = operation.ask {
            entry.1 = entry.1.max(lease);
        }
    }
    owners.remove("?");
    let over = owners.into_iter().filter(|(_, (_, _, is_over))| *is_over);
    over.map(|(owner, (last, lease, _))| (owner, last + lease + UNDER_WAY))
        .collect()
}

/// What is cut off arrives later, and on a clock that is set back a lease lasts longer: the end is
/// counted anew from when that was healed.
fn put_off(history: &History, end: Time, until: Time) -> Time {
    let faults = history.faults.iter().filter(|fault| fault.begin <= until);
    let healed = faults
        .map(|fault| fault.end)
        .filter(|healed| healed + UNDER_WAY > end)
        .max();
    healed.map_or(end, |healed| end.max(healed + UNDER_WAY))
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    fn seen_at(ms: u64, between: &str) -> usize {
        let history = format!(
            "ask 1.1 0 a k plain session acquire 1000 guard
             told 1.1 10 held 1 7
             {between}
             info {ms}000 {ms}100 k a/plain/7 -"
        );
        says(check, &history).len()
    }

    #[test]
    fn a_hold_without_anybody_is_found() {
        assert_eq!(seen_at(60_000, ""), 0, "its guard may live");
        assert_eq!(seen_at(60_000, "ask 1.2 500 a k plain session release"), 1);
        assert_eq!(seen_at(60_000, "died 500 1"), 1);
        assert_eq!(seen_at(1_000, "died 500 1"), 0);
    }

    #[test]
    fn what_was_held_up_has_more_time() {
        assert_eq!(seen_at(7_500, "died 500 1\nfault 400 7000000 cut 1"), 0);
        assert_eq!(seen_at(20_000, "died 500 1\nfault 400 7000000 cut 1"), 1);
    }
}
