//! At most one owner holds a lock; of a read-write lock, one writer or any number of readers. Of
//! permits `capacity.rs` speaks.
//!
//! The tokens are the order of the grants, so there is nothing to search for as a checker of
//! linearizability must: if a hold with a smaller token surely lasted until after a larger one was
//! told, the lock was granted over it. If two have the same token, they surely held it together
//! when both had been told and neither was over.

use super::holds::Hold;
use super::{Violation, holds_of_one_primary};
use crate::history::{History, Mode};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut holds = holds_of_one_primary(history);
    holds.sort_by_key(|hold| (hold.lock, hold.token, hold.told));
    let mut found = Vec::new();
    for of_one_lock in holds.chunk_by(|a, b| a.lock == b.lock) {
        // From each one on, when the first grant of a larger token was told: a hold that is over by
        // then excludes none of them.
        let mut first_told: Vec<_> = of_one_lock.iter().map(|hold| hold.told).collect();
        for index in (1..first_told.len()).rev() {
            first_told[index - 1] = first_told[index - 1].min(first_told[index]);
        }
        let mut present: Vec<&Hold<'_>> = Vec::new();
        for (later, first_told) in of_one_lock.iter().zip(first_told) {
            present.retain(|hold| hold.until > first_told);
            let earlier = present.iter().filter(|earlier| excludes(earlier, later));
            found.extend(earlier.map(|earlier| wrong(earlier, later)));
            present.push(later);
        }
    }
    found
}

fn wrong(earlier: &Hold<'_>, later: &Hold<'_>) -> Violation {
    let what = format!(
        "{}: {} ({:?}, {}) was granted it by {} although {} ({:?}, {}) surely held it from {} \
         to {}",
        later.lock,
        later.owner,
        later.mode,
        later.token,
        later.told,
        earlier.owner,
        earlier.mode,
        earlier.token,
        earlier.told,
        earlier.until
    );
    Violation::new(later.told, what)
}

fn excludes(earlier: &Hold<'_>, later: &Hold<'_>) -> bool {
    let both_read = earlier.mode == Mode::Read && later.mode == Mode::Read;
    let both_permits = earlier.mode.is_permits() && later.mode.is_permits();
    earlier.until > later.told
        && (earlier.token < later.token || later.until > earlier.told)
        && earlier.owner != later.owner
        && !both_read
        && !both_permits
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    fn two(first: &str, second: &str) -> Vec<String> {
        let history = format!(
            "ask 1.1 10000 a k {first} free acquire 1000 none
             told 1.1 20000 held 1 7
             ask 2.1 30000 b k {second} free acquire 1000 none
             told 2.1 40000 held 1 8"
        );
        says(check, &history)
    }

    #[test]
    fn two_owners_at_once_are_found() {
        let found = two("plain", "plain");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("b (Plain, 8)") && found[0].contains("a (Plain, 7)"));
    }

    #[test]
    fn two_owners_with_one_token_are_found_and_not_one_after_the_other() {
        let history = |until: u64| {
            let history = format!(
                "ask 1.1 10000 a k plain free acquire 1000 none
                 ask 2.1 11000 b k plain free acquire 1000 none
                 told 1.1 20000 held 1 7
                 ask 1.2 {until} a k plain free release
                 told 2.1 40000 held 1 7"
            );
            says(check, &history).len()
        };
        assert_eq!(history(50_000), 1);
        assert_eq!(history(30_000), 0, "of the tokens another checker speaks");
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        assert!(two("read", "read").is_empty());
        assert_eq!(two("read", "write").len(), 1);
        assert_eq!(two("write", "read").len(), 1);
        assert_eq!(two("write", "write").len(), 1);
    }

    #[test]
    fn one_after_the_other_is_as_it_should_be() {
        let history = "ask 1.1 10000 a k plain free acquire 1000 none
             told 1.1 20000 held 1 7
             ask 1.2 25000 a k plain free release
             ask 2.1 21000 b k plain free acquire 1000 block
             told 2.1 40000 held 1 8";
        assert!(says(check, history).is_empty());
    }

    #[test]
    fn a_part_of_several_counts() {
        let history = "ask 1.1 10000 a s0,s1 plain free acquire 1000 none
             told 1.1 20000 held 1 7
             ask 2.1 30000 b s1,s2 plain free acquire 1000 none
             told 2.1 40000 held 1 8";
        assert_eq!(says(check, history).len(), 1);
    }

    /// In two sessions of a process that goes on, some of them ended at 50 ms.
    fn after_the_end(of: &str, told: &str) -> usize {
        let history = format!(
            "ask 1_1.1 10000 a {of} session acquire 60000 none
             told 1_1.1 20000 held 1 7
             closed 50000 1_1
             {told}"
        );
        says(check, &history).len()
    }

    #[test]
    fn two_waiters_granted_by_the_end_of_a_session_are_found() {
        let second = |release: &str| {
            let told = format!(
                "ask 2_1.1 30000 b k plain session acquire 60000 queue
                 ask 2_1.2 31000 c k plain session acquire 60000 queue
                 queued 2_1.1 32000
                 queued 2_1.2 32000
                 told 2_1.1 60000 held 1 8
                 {release}
                 told 2_1.2 70000 held 1 9"
            );
            after_the_end("k plain", &told)
        };
        assert_eq!(second(""), 1);
        assert_eq!(
            second("ask 2_1.3 65000 b k plain session release"),
            0,
            "one after the other"
        );
        assert_eq!(second("closed 65000 2_1"), 0, "that session ended, too");
    }

    #[test]
    fn two_writers_after_one_who_read_in_another_session_are_found() {
        let reads = "ask 1_2.1 21000 a k read session acquire 60000 none
             told 1_2.1 22000 held 1 8\n";
        let next = |mode: &str| {
            format!(
                "ask 2_1.1 30000 b k {mode} session acquire 60000 queue
                 ask 2_1.2 31000 c k {mode} session acquire 60000 queue
                 told 2_1.1 60000 held 1 9
                 told 2_1.2 60000 held 1 10\n"
            )
        };
        let both = "closed 50000 1_2\n";
        let after_both = |mode| after_the_end("k write", &format!("{reads}{both}{}", next(mode)));
        assert_eq!(after_both("write"), 1);
        assert_eq!(after_both("read"), 0);
        // A reader that goes on keeps writers out, and not readers.
        let after_one = |mode| after_the_end("k write", &format!("{reads}{}", next(mode)));
        assert_eq!(after_one("write"), 3);
        assert_eq!(after_one("read"), 0);
    }

    #[test]
    fn a_lock_handed_over_with_one_of_two_holds_left_is_found() {
        let holder = |gave: u32| {
            let told = format!(
                "ask 2_1.1 11000 x j plain session acquire 60000 none
                 told 2_1.1 12000 held 1 5
                 ask 2_1.2 30000 x j,k plain session acquire 60000 queue
                 ask 2_1.3 31000 y j plain session acquire 60000 queue
                 ask 2_1.4 50000 x j,k plain session release
                 told 2_1.4 55000 gave {gave}
                 told 2_1.2 60000 entered 8
                 told 2_1.3 60000 held 1 9"
            );
            after_the_end("k plain", &told)
        };
        assert_eq!(holder(2), 1);
        // That one may have been the only one, before the other came.
        assert_eq!(holder(1), 0);
    }

    #[test]
    fn a_guard_that_still_believes_when_another_was_granted_is_found() {
        let history = "ask 1.1 10000 a k plain session acquire 1000 guard
             told 1.1 20000 held 1 7
             fault 30000 2000000 stop-client 1
             ask 2.1 30000 b k plain free acquire 1000 block
             told 2.1 1100000 held 1 8
             sure 1099000 k a 7\n";
        assert!(says(check, history).is_empty());
        assert_eq!(
            says(check, &format!("{history}sure 2000000 k a 7")).len(),
            1
        );
    }
    #[test]
    fn an_owner_that_comes_again_did_not_have_it_in_between() {
        let history = "ask 1.1 10000 a k plain session acquire 1000 guard
             told 1.1 20000 held 1 7
             sure 21000 k a 7
             ask 1.2 22000 a k plain session release
             told 1.2 23000 left 0
             ask 2.1 15000 b k plain free acquire 1000 block
             told 2.1 30000 held 1 8
             ask 2.2 40000 b k plain free release
             told 2.2 41000 left 0
             ask 1.3 35000 a k plain session acquire 1000 guard
             told 1.3 50000 held 1 9
             sure 51000 k a 9\n";
        assert!(says(check, history).is_empty());
        assert_eq!(says(check, &format!("{history}sure 60000 k a 7")).len(), 1);
    }
}
