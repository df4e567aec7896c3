//! What must be true of every history, whatever was done to the servers: one file a promise, each
//! a pure function from a history to what is wrong with it.
//!
//! No answer is never taken for "no". What a checker builds on is what a history proves, and
//! `holds.rs` says what that is.

use crate::history::{History, Time};

mod holds; // how long who surely held what; no checker itself

mod entries; // each owner: its count, and no hold lost without a cause
mod exclusion; // one owner at a time, one writer or many readers
mod immortal; // no hold outlives those who could renew it
mod order; // first come, first served
mod tokens; // each larger than any before
mod truth; // what clients are told is what the server says to others
mod wake_up; // nobody waits for a free lock

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

/// Finds what is wrong with a history.
pub(crate) type Checker = fn(&History) -> Vec<Violation>;

pub(crate) const ALL: [(&str, Checker); 7] = [
    ("mutual exclusion", exclusion::check),
    ("re-entrance", entries::check),
    ("tokens grow", tokens::check),
    ("first come, first served", order::check),
    ("no lost wake-up", wake_up::check),
    ("no immortal lock", immortal::check),
    ("told and true", truth::check),
];

/// What a checker says to a history that is written down in a test.
#[cfg(test)]
fn says(checker: Checker, history: &str) -> Vec<String> {
    let violations = checker(&History::parse(history));
    violations.into_iter().map(|found| found.what).collect()
}
