//! The promises that every history must keep, under all faults: one file a promise, each a pure
//! function from a history to its violations.
//!
//! No answer is never taken for "no". A checker builds on the facts that a history proves;
//! `holds.rs` defines them.

use crate::history::{Fault, History, Time};
use holds::{Hold, SETTLING, holds};

mod holds; // how long who surely held what; no checker itself

mod capacity; // no more permits than there may be
mod entries; // each owner: its count, and no hold lost without a cause
mod exclusion; // one owner at a time, one writer or many readers
mod immortal; // no hold outlives those who could renew it
mod order; // first come, first served
mod tokens; // each larger than any before
mod truth; // what clients are told is what the server says to others
mod wake_up; // nobody waits for a free lock
mod wanted; // a holder is told of those whom it keeps out, and of nobody else

/// Something that must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) at: Time,
    /// In words, with the owners and tokens concerned.
    pub(crate) what: String,
}

impl Violation {
    fn new(at: Time, what: String) -> Self {
        Self { at, what }
    }
}

/// Finds the violations of a history.
pub(crate) type Checker = fn(&History) -> Vec<Violation>;

pub(crate) const ALL: [(&str, Checker); 9] = [
    ("mutual exclusion", exclusion::check),
    ("permits", capacity::check),
    ("re-entrance", entries::check),
    ("tokens grow", tokens::check),
    ("first come, first served", order::check),
    ("no lost wake-up", wake_up::check),
    ("no immortal lock", immortal::check),
    ("told and true", truth::check),
    ("wanted", wanted::check),
];

/// The proven holds, except the grants that a replaced primary may have made. The client crate asks
/// the sentinels itself, and while they change their mind it may be connected to either: two
/// primaries have no common order of grants, and nothing that one of them says is true at the
/// other. The network of the storm leads all others to one of them; and soon after that a guard
/// must have noticed.
fn holds_of_one_primary(history: &History) -> Vec<Hold<'_>> {
    let faults = history.faults.iter();
    let two: Vec<_> = faults
        .filter(|fault| fault.kind == "two-primaries")
        .collect();
    let is_of_either = |hold: &Hold<'_>| {
        let of_the_crate = hold.owner.contains(':');
        let held_then = |at: &&Fault| at.begin <= hold.until && hold.told <= at.end;
        let mut two = two.iter().copied().filter(held_then);
        of_the_crate && two.any(|at| hold.until <= at.end + SETTLING)
    };
    let mut holds = holds(history);
    holds.retain(|hold| !is_of_either(hold));
    holds
}

/// A checker's verdict on a history that is written down in a test.
#[cfg(test)]
fn says(checker: Checker, history: &str) -> Vec<String> {
    let violations = checker(&History::parse(history));
    violations.into_iter().map(|found| found.what).collect()
}
