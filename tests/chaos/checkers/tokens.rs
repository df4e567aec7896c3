//! Each grant's token is larger than any that was told before the grant was asked for, whatever the
//! lock, also when the server was killed or another one promoted in between; and nobody else's.

use std::collections::BTreeSet;

use super::holds::Hold;
use super::{Violation, holds_of_one_primary};
use crate::history::History;

pub(super) fn check(history: &History) -> Vec<Violation> {
    let holds = holds_of_one_primary(history);
    let mut by_told: Vec<_> = holds.iter().collect();
    by_told.sort_by_key(|hold| hold.told);
    let mut by_asked = by_told.clone();
    by_asked.sort_by_key(|hold| hold.asked);
    let mut found = Vec::new();
    let mut told = by_told.iter().peekable();
    let mut largest: Option<&Hold<'_>> = None;
    // Also the grants of two primaries: a kept lock may have been granted by the former one, and be
    // taken again when that is over.
    let mut all = super::holds::holds(history);
    all.sort_by_key(|hold| hold.asked);
    let (mut granted, mut again) = (BTreeSet::new(), BTreeSet::new());
    for hold in all.iter().filter(|hold| is_of_the_crate(hold.owner)) {
        if !granted.insert((hold.lock, hold.owner, hold.token)) {
            again.insert((hold.asked, hold.lock, hold.owner));
        }
    }
    for later in by_asked {
        if again.contains(&(later.asked, later.lock, later.owner)) {
            continue;
        }
        while let Some(before) = told.next_if(|hold| hold.told < later.asked) {
            if largest.is_none_or(|largest| largest.token < before.token) {
                largest = Some(before);
            }
        }
        let before = largest.filter(|before| before.token >= later.token);
        found.extend(before.map(|before| wrong(before, later)));
    }
    let mut by_token: Vec<_> = holds.iter().collect();
    by_token.sort_by_key(|hold| (hold.token, hold.owner));
    let shared = by_token
        .windows(2)
        .filter(|two| two[0].token == two[1].token && two[0].owner != two[1].owner);
    found.extend(shared.map(|two| wrong(two[0], two[1])));
    found
}

/// Whether a client of the crate has minted it, `<uuid>:<number>`: for one call, unless the lock is
/// kept. Then it is told the same token again.
fn is_of_the_crate(owner: &str) -> bool {
    owner.contains(':')
}

fn wrong(before: &Hold<'_>, later: &Hold<'_>) -> Violation {
    let what = format!(
        "{}: {} was granted token {} after {} of {} at {}",
        later.lock, later.owner, later.token, before.token, before.owner, before.lock
    );
    Violation::new(later.told, what)
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    fn grants(first: u64, second: u64) -> Vec<String> {
        let history = format!(
            "ask 1.1 10 a k plain free acquire 1000 none
             told 1.1 20 held 1 {first}
             ask 1.2 30 a k plain free release
             ask 2.1 40 b j plain free acquire 1000 none
             told 2.1 50 held 1 {second}"
        );
        says(check, &history)
    }

    #[test]
    fn a_kept_lock_is_told_its_token_again_and_nobody_elses() {
        let history = |owner: &str, again: u64| {
            let history = format!(
                "ask 1.1 10 {owner} k plain session acquire 1000 guard
                 told 1.1 20 held 1 7
                 ask 1.2 21 {owner} k plain session release
                 ask 2.1 22 b j plain free acquire 1000 none
                 told 2.1 23 held 1 8
                 ask 1.3 30 {owner} k plain session acquire 1000 guard
                 told 1.3 40 held 1 {again}"
            );
            says(check, &history).len()
        };
        assert_eq!(history("crate:1", 7), 0);
        assert_eq!(history("crate:1", 6), 1);
        assert_eq!(history("a", 7), 1);
    }

    #[test]
    fn a_token_that_goes_back_is_found() {
        assert!(grants(7, 8).is_empty());
        assert_eq!(grants(8, 7).len(), 1);
    }

    #[test]
    fn of_two_primaries_the_former_may_grant_smaller_ones() {
        let grants = |owner: &str, fault: &str| {
            let history = format!(
                "ask 1.1 10 a k plain free acquire 1000 none
                 told 1.1 20 held 1 8
                 ask 2.1 40 {owner} j plain free acquire 1000 none
                 told 2.1 50 held 1 7
                 fault {fault}"
            );
            says(check, &history).len()
        };
        assert_eq!(grants("uuid:1", "30 60 two-primaries"), 0);
        assert_eq!(grants("uuid:1", "9000000 9900000 two-primaries"), 1);
        assert_eq!(grants("uuid:1", "30 60 promote"), 1);
        assert_eq!(grants("2-1", "30 60 two-primaries"), 1);
    }

    #[test]
    fn a_kept_lock_that_one_of_two_primaries_has_granted_may_be_taken_again() {
        let history = "fault 5 25 two-primaries
             ask 1.1 10 uuid:1 k plain session acquire 1000 guard
             told 1.1 20 held 1 7
             ask 1.2 21 uuid:1 k plain session release
             ask 2.1 30 uuid:2 j plain free acquire 1000 none
             told 2.1 40 held 1 8
             ask 1.3 9000000 uuid:1 k plain session acquire 1000 guard
             told 1.3 9000010 held 1 7";
        assert_eq!(says(check, history), [""; 0]);
    }

    #[test]
    fn a_token_that_two_owners_have_is_found() {
        assert!(!grants(7, 7).is_empty());
    }

    #[test]
    fn several_locks_share_one() {
        let history = "ask 1.1 10 a k,j plain free acquire 1000 none
             told 1.1 20 held 1 7";
        assert!(says(check, history).is_empty());
    }
}
