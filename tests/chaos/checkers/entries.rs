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
        (Ask::Acquire { .. }, Told::Held { count, .. }) if *count != 1 => {
            Some("though it did not hold it before".to_owned())
        }
        (Ask::Release, Told::Left(_)) | (Ask::Renew { .. }, Told::Renewed(1..)) => {
            Some("and held nothing".to_owned())
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
        (Ask::Acquire { .. }, Told::Held { count: now, .. }) if *now != count + 1 => {
            // A writer's second token can also be that of a new hold.
            (operation.mode != Mode::Write || *now != 1 || surely)
                .then(|| format!("having held it {count} times"))
        }
        (Ask::Release, Told::Left(0)) if lasting.may_be_the_last(at) => None,
        (Ask::Release, Told::Left(left)) if left + 1 != count => {
            Some(format!("having held it {count} times"))
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
    fn an_answer_that_never_came_is_no_answer() {
        let history = format!(
            "{GRANT}ask 1.2 30000 a k plain free acquire 1000 none
             ask 1.3 40000 a k plain free release
             told 1.3 50000 left 1"
        );
        assert!(says(check, &history).is_empty());
    }
}
