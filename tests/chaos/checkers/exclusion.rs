//! At most one owner holds a lock; of a read-write lock, one writer or any number of readers.
//!
//! The tokens are the order of the grants, so there is nothing to search for as a checker of
//! linearizability must: if a hold with a smaller token surely lasted until after a larger one was
//! told, the lock was granted over it.

use super::holds::Hold;
use super::{Violation, holds_of_one_primary};
use crate::history::{History, Mode};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut holds = holds_of_one_primary(history);
    holds.sort_by(|a, b| (a.lock, a.token).cmp(&(b.lock, b.token)));
    let mut found = Vec::new();
    for (index, later) in holds.iter().enumerate() {
        let earlier = holds[..index].iter().rev();
        let earlier = earlier.take_while(|hold| hold.lock == later.lock);
        for earlier in earlier.filter(|earlier| excludes(earlier, later)) {
            found.push(Violation::new(
                later.told,
                format!(
                    "{}: {} ({:?}, {}) was granted it by {} although {} ({:?}, {}) surely held it \
                     from {} to {}",
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
                ),
            ));
        }
    }
    found
}

fn excludes(earlier: &Hold<'_>, later: &Hold<'_>) -> bool {
    let both_read = earlier.mode == Mode::Read && later.mode == Mode::Read;
    earlier.until > later.told
        && earlier.token < later.token
        && earlier.owner != later.owner
        && !both_read
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

    #[test]
    fn a_guard_that_still_believes_when_another_was_granted_is_found() {
        let history = "ask 1.1 10000 a k plain session acquire 1000 guard
             told 1.1 20000 held 1 7
             fault 30000 2000000 stop-client 1
             ask 2.1 30000 b k plain free acquire 1000 block
             told 2.1 1100000 held 1 8
             sure 1099000 k a\n";
        assert!(says(check, history).is_empty());
        assert_eq!(says(check, &format!("{history}sure 2000000 k a")).len(), 1);
    }
}
