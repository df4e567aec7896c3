//! No more permits are out than the limit, and no grant brings it about.
//!
//! Tokens are the order of the grants. Those with a smaller token that surely lasted until after a
//! grant was told were all held when it was made, so with it they must not be more than the limit.

use super::holds::Hold;
use super::{Violation, holds_of_one_primary};
use crate::history::{History, LIMIT};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut holds = holds_of_one_primary(history);
    holds.retain(|hold| hold.mode.is_permits());
    holds.sort_by_key(|hold| (hold.lock, hold.token));
    let mut found = Vec::new();
    for of_one in holds.chunk_by(|a, b| a.lock == b.lock) {
        for (place, granted) in of_one.iter().enumerate() {
            let before = of_one[..place].iter().rev().take(LOOKED_AT);
            let beside: Vec<_> = before.filter(|hold| hold.until > granted.told).collect();
            let out: u32 = beside.iter().map(|hold| hold.mode.first_count()).sum();
            if out + granted.mode.first_count() > LIMIT {
                found.push(wrong(granted, &beside, out));
            }
        }
    }
    found
}

/// So many grants back: far more than can be held at a time, and told late.
const LOOKED_AT: usize = 2_000;

fn wrong(granted: &Hold<'_>, beside: &[&Hold<'_>], out: u32) -> Violation {
    let others = beside.iter().map(|hold| {
        format!(
            "{} ({}, {}, until {})",
            hold.owner,
            hold.mode.first_count(),
            hold.token,
            hold.until
        )
    });
    let others: Vec<_> = others.collect();
    let what = format!(
        "{}: {} ({}, {}) was granted permits by {} although {out} of {LIMIT} were out: {}",
        granted.lock,
        granted.owner,
        granted.mode.first_count(),
        granted.token,
        granted.told,
        others.join(", ")
    );
    Violation::new(granted.told, what)
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    /// `a` has two of three, `b` is granted some, and `c` one more.
    fn granted(b: u32, before_c: &str) -> usize {
        let history = format!(
            "ask 1.1 10000 a k permits:2 free acquire 1000 none
             told 1.1 20000 held 2 7
             ask 2.1 30000 b k permits:{b} free acquire 1000 none
             told 2.1 40000 held {b} 8
             {before_c}
             ask 3.1 60000 c k permits:1 free acquire 1000 none
             told 3.1 70000 held 1 9"
        );
        says(check, &history).len()
    }

    #[test]
    fn one_more_than_the_limit_is_found() {
        let back = "ask 1.2 50000 a k permits:2 free release
             told 1.2 55000 left 0";
        assert_eq!(granted(1, back), 0);
        assert_eq!(granted(2, back), 1, "of b");
        assert_eq!(granted(1, ""), 1, "of c");
    }

    #[test]
    fn what_may_have_ended_counts_for_nothing() {
        assert_eq!(granted(1, "fault 50000 51000 break k"), 0);
        assert_eq!(granted(1, "fault 50000 51000 break j"), 1);
        let unheard = "ask 1.2 50000 a k permits:2 free release";
        assert_eq!(granted(1, unheard), 0);
    }

    #[test]
    fn others_of_another_semaphore_do_not_count() {
        let history = "ask 1.1 10000 a k permits:3 free acquire 1000 none
             told 1.1 20000 held 3 7
             ask 2.1 30000 b j permits:3 free acquire 1000 none
             told 2.1 40000 held 3 8";
        assert!(says(check, history).is_empty());
    }
}
