//! Each owner for itself: the hold count goes up and down by one, and no answer says that a hold is
//! lost which nothing can have ended.

use super::Violation;
use super::holds::{Lasting, series};
use crate::history::{Ask, History, Mode, Operation, Time, Told};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for ((lock, owner, mode), series) in series(history) {
        let mut now: Option<Lasting<'_>> = None;
        for operation in series {
            let Some((at, told)) = &operation.told else {
                // From here on its count is not known.
                break;
            };
            let wrong = match &now {
                Some(lasting) if lasting.is_unclear_after(history, operation) => break,
                Some(lasting) => wrong_with(history, lasting, operation, *at, told),
                None => wrong_at_first(operation, told),
            };
            found.extend(wrong.map(|what| {
                Violation::new(
                    *at,
                    format!("{lock}: {owner} ({mode:?}) was told {told:?}, {what}"),
                )
            }));
            now = match now.take() {
                Some(lasting) => lasting.follow(history, operation, &mut Vec::new()),
                None => Lasting::begin(lock, owner, mode, operation),
            };
        }
    }
    found
}

fn wrong_at_first(operation: &Operation, told: &Told) -> Option<String> {
    match (operation.ask, told) {
        (Ask::Acquire { .. }, Told::Held { count, .. })
            if *count != operation.mode.first_count() =>
        {
            Some("though it did not hold it before".to_owned())
        }
        (Ask::Release, Told::Left(_)) => Some("and held nothing".to_owned()),
        // If these are some of several locks, they may be the others.
        (Ask::Release, Told::Gave(count)) | (Ask::Renew { .. }, Told::Renewed(count)) => {
            let is_all = *count as usize == operation.locks.len();
            is_all.then(|| "and held nothing".to_owned())
        }
        _ => None,
    }
}

fn wrong_with(
    history: &History,
    lasting: &Lasting<'_>,
    operation: &Operation,
    at: Time,
    told: &Told,
) -> Option<String> {
    let count = lasting.count();
    // While it is surely held, it can be neither lost nor granted anew.
    let surely = lasting.surely_until(history) > at;
    match (operation.ask, told) {
        (Ask::Acquire { .. }, Told::Held { token, .. })
            if *token != lasting.token() && operation.mode != Mode::Write =>
        {
            surely.then(|| format!("though it surely held it with token {}", lasting.token()))
        }
        (Ask::Acquire { .. }, Told::Held { count: now, .. })
            if *now != operation.mode.next_count(count) =>
        {
            // A writer's second token can also be that of a new hold.
            let is_new = operation.mode == Mode::Write && *now == 1 && !surely;
            let is_explained = is_new || *now <= count && lasting.may_be_fewer(history, at);
            (!is_explained).then(|| format!("having held it {count} times"))
        }
        (Ask::Release, Told::Left(0)) if lasting.may_be_the_last(history, at) => None,
        (Ask::Release, Told::Left(left)) if left + operation.mode.given_back() != count => {
            let is_explained = *left < count && lasting.may_be_fewer(history, at);
            (!is_explained).then(|| format!("having held it {count} times"))
        }
        (_, Told::Lost | Told::Renewed(0)) if surely => {
            Some("though nothing can have ended the hold".to_owned())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    const GRANT: &str = "ask 1.1 10000 a k plain free acquire 1000 none
         told 1.1 20000 held 1 7\n";

    fn then(line: &str, told: &str) -> usize {
        let history = format!("{GRANT}ask 1.2 30000 a k plain free {line}\ntold 1.2 40000 {told}");
        says(check, &history).len()
    }

    #[test]
    fn a_count_that_jumps_is_found() {
        assert_eq!(then("acquire 1000 none", "held 2 7"), 0);
        assert_eq!(then("acquire 1000 none", "held 3 7"), 1);
        assert_eq!(then("release", "left 0"), 0);
        assert_eq!(then("release", "left 1"), 1);
        let first = "ask 1.1 10000 a k plain free acquire 1000 none
             told 1.1 20000 held 2 7";
        assert_eq!(says(check, first).len(), 1);
    }

    #[test]
    fn permits_are_counted_as_they_were_asked_for() {
        let then = |held: u32, rest: &str| {
            let history = format!(
                "ask 1.1 10000 a k permits:2 free acquire 1000 none
                 told 1.1 20000 held {held} 7
                 {rest}"
            );
            says(check, &history).len()
        };
        let again = |told: &str| {
            let again = "ask 1.2 30000 a k permits:2 free acquire 1000 none";
            then(2, &format!("{again}\ntold 1.2 40000 {told}"))
        };
        let release = |told: &str| {
            let release = "ask 1.2 30000 a k permits:2 free release";
            then(2, &format!("{release}\ntold 1.2 40000 {told}"))
        };
        assert_eq!((then(2, ""), then(1, ""), then(3, "")), (0, 1, 1));
        assert_eq!((again("held 2 7"), again("held 4 7")), (0, 1));
        assert_eq!((release("left 0"), release("left 1")), (0, 1));
        assert_eq!(release("lost"), 1);
    }

    #[test]
    fn a_hold_that_is_lost_without_a_cause_is_found() {
        assert_eq!(then("release", "lost"), 1);
        assert_eq!(then("renew 1000", "renewed 0"), 1);
        assert_eq!(then("acquire 1000 none", "held 1 8"), 1);
        let broken = format!(
            "{GRANT}fault 25000 26000 break k
             ask 1.2 30000 a k plain free release
             told 1.2 40000 lost"
        );
        assert!(says(check, &broken).is_empty());
        let late = format!(
            "{GRANT}ask 1.2 30000 a k plain free release
             told 1.2 2000000 lost"
        );
        assert!(says(check, &late).is_empty());
    }

    #[test]
    fn a_readers_first_entry_may_end_before_its_last_by_its_lease_or_a_clock_that_was_set() {
        let released = |lease: u64, fault: &str| {
            let history = format!(
                "ask 1.1 10000 a k read free acquire {lease} none
                 told 1.1 20000 held 1 7
                 {fault}
                 ask 1.2 330000 a k read free acquire 1000 none
                 told 1.2 340000 held 2 7
                 ask 1.3 350000 a k read free release
                 told 1.3 360000 left 0"
            );
            says(check, &history).len()
        };
        assert_eq!(released(1000, ""), 1);
        assert_eq!(released(300, ""), 0);
        assert_eq!(released(1000, "fault 100000 300000 clock"), 0);
        assert_eq!(released(1000, "fault 1000 9000 clock"), 1);
    }

    #[test]
    fn a_replica_that_was_promoted_may_know_of_fewer_entries_and_never_of_more() {
        let released = |left: u32, fault: &str| {
            let history = format!(
                "{GRANT}ask 1.2 30000 a k plain free acquire 1000 none
                 told 1.2 40000 held 2 7
                 {fault}
                 ask 1.3 60000 a k plain free release
                 told 1.3 70000 left {left}"
            );
            says(check, &history).len()
        };
        assert_eq!(released(1, ""), 0);
        assert_eq!(released(0, ""), 1);
        assert_eq!(released(0, "fault 45000 55000 promote"), 0);
        assert_eq!(released(2, "fault 45000 55000 promote"), 1);
    }

    #[test]
    fn several_locks_count_up_and_down_each_for_itself() {
        let then = |release: &str, told: &str| {
            let history = format!(
                "{GRANT}ask 1.2 30000 a k,j plain free acquire 1000 queue
                 ask 1.3 40000 a k,j plain free release
                 told 1.3 50000 gave 2
                 told 1.2 60000 entered 9
                 ask 1.4 70000 a {release} plain free release
                 told 1.4 80000 {told}"
            );
            says(check, &history).len()
        };
        let renewed = |count: u32| {
            let history = format!(
                "ask 1.1 10000 a k,j plain session renew 1000
                 told 1.1 20000 renewed {count}"
            );
            says(check, &history).len()
        };
        assert_eq!((renewed(0), renewed(1), renewed(2)), (0, 0, 2));
        assert_eq!(then("k", "left 0"), 0);
        assert_eq!(then("k", "lost"), 1);
        assert_eq!(then("k", "left 1"), 1);
        assert_eq!(then("j", "lost"), 0);
        assert_eq!(then("j", "left 0"), 1);
    }

    #[test]
    fn several_locks_of_which_some_were_given_back_leave_open_which() {
        let history = format!(
            "{GRANT}ask 1.2 40000 a k,j plain free release
             told 1.2 50000 gave 1
             ask 1.3 70000 a k plain free release
             told 1.3 80000 lost"
        );
        assert!(says(check, &history).is_empty());
    }

    #[test]
    fn an_answer_that_never_came_is_no_answer() {
        let history = format!(
            "{GRANT}ask 1.2 30000 a k plain free acquire 1000 none
             ask 1.3 40000 a k plain free release
             told 1.3 50000 left 1"
        );
        assert!(says(check, &history).is_empty());
    }
}
