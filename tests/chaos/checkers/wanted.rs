//! A session that has asked for it hears that a hold of it is wanted: once, and only if it has kept
//! somebody out.
//!
//! Whether each is told who must be is not asked here: what a session does not fetch before it ends
//! nobody hears.

use std::collections::{HashMap, HashSet};

use super::Violation;
use crate::history::{Ask, History, Mode, Operation, Told, Wait, Wanted};

pub(super) fn check(history: &History) -> Vec<Violation> {
    // Each call of a session is an owner of its own.
    let asks = history.operations.iter().filter(|of| is_acquisition(of));
    let own: HashMap<&str, &Operation> = asks.map(|of| (of.owner.as_str(), of)).collect();
    let mut others: HashMap<&str, Vec<&Operation>> = HashMap::new();
    for operation in history.operations.iter().filter(|of| is_acquisition(of)) {
        for lock in &operation.locks {
            others.entry(lock).or_default().push(operation);
        }
    }
    let mut told = HashSet::new();
    let mut found = Vec::new();
    for event in &history.wanted {
        let Wanted { at, lock, owner } = event;
        if !told.insert((lock, owner)) {
            let what = format!("{lock}: {owner} is told twice that it is wanted");
            found.push(Violation::new(*at, what));
        }
        let hold = own.get(owner.as_str());
        let others = others.get(lock.as_str()).into_iter().flatten();
        let mut others = others.filter(|other| other.owner != *owner);
        let is_wanted =
            hold.is_some_and(|hold| others.any(|other| may_be_kept_out(other, hold, event)));
        if !is_wanted {
            let what = format!("{lock}: {owner} is told that it is wanted, and keeps nobody out");
            found.push(Violation::new(*at, what));
        }
    }
    found
}

fn is_acquisition(operation: &Operation) -> bool {
    matches!(operation.ask, Ask::Acquire { .. })
}

/// Whether the one may have been kept out by the other's hold before this event: it was asked for
/// before that, had no answer when the hold was asked for, and was not refused in words at once.
fn may_be_kept_out(other: &Operation, hold: &Operation, event: &Wanted) -> bool {
    let is_shared = hold.mode == Mode::Read && other.mode == Mode::Read;
    // One that is blocked, or that the crate waits for, may have waited before it was refused.
    let waits = match other.ask {
        Ask::Acquire { wait, .. } => matches!(wait, Wait::Block | Wait::Guard),
        Ask::Renew { .. } | Ask::Release => false,
    };
    let never_waited = !waits && other.queued.is_none();
    let has_ended = match &other.told {
        Some((at, told)) => *at < hold.asked || *told == Told::Error && never_waited,
        None => false,
    };
    !is_shared && other.asked <= event.at && !has_ended
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    const HOLD: &str = "ask 1.1 100 a k plain session acquire 1000 queue
         told 1.1 110 held 1 7\n";

    fn wrong(rest: &str) -> usize {
        says(check, &format!("{HOLD}{rest}")).len()
    }

    #[test]
    fn a_hold_that_keeps_somebody_out_is_told_once() {
        let waits = "ask 2.1 200 b k plain free acquire 1000 block
             wanted 250 k a
             told 2.1 300 held 1 8\n";
        assert_eq!(wrong(waits), 0);
        assert_eq!(wrong(&format!("{waits} wanted 260 k a")), 1);
        let unanswered = "ask 2.1 200 b j,k plain free acquire 1000 none
             wanted 250 k a";
        assert_eq!(wrong(unanswered), 0);
    }

    #[test]
    fn a_hold_that_keeps_nobody_out_is_not_told() {
        assert_eq!(wrong("wanted 250 k a"), 1);
        let rest =
            |ask: &str, told: &str| format!("ask 2.1 {ask}\n told 2.1 {told}\n wanted 250 k a");
        let asks = "b k plain free acquire 1000 none";
        assert_eq!(wrong(&rest(&format!("200 {asks}"), "210 refused")), 0);
        assert_eq!(wrong(&rest(&format!("300 {asks}"), "310 refused")), 1);
        assert_eq!(wrong(&rest(&format!("50 {asks}"), "90 refused")), 1);
        assert_eq!(wrong(&rest(&format!("200 {asks}"), "210 error WAITING")), 1);
        assert_eq!(
            wrong(&rest("200 b j plain free acquire 1000 none", "210 refused")),
            1
        );
    }

    #[test]
    fn readers_keep_writers_out_and_no_readers() {
        let history = |mode: &str| {
            format!(
                "ask 1.1 100 a k read session acquire 1000 queue
                 told 1.1 110 held 1 7
                 ask 2.1 200 b k {mode} free acquire 1000 block
                 wanted 250 k a"
            )
        };
        assert_eq!(says(check, &history("read")).len(), 1);
        assert!(says(check, &history("write")).is_empty());
    }
}
