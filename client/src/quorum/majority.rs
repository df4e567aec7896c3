//! The arithmetic of a quorum: how many servers are enough, for how long the lock is held, and
//! which error too few of them make. Pure functions.

use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// Each server's answer, in the order in which the servers were named; `None` is success.
pub(crate) type Answers = Vec<Option<Error>>;

/// How many servers have done their part.
pub(crate) fn done(answers: &[Option<Error>]) -> usize {
    answers.iter().filter(|answer| answer.is_none()).count()
}

/// More than half of this number of servers.
pub(crate) fn majority(servers: usize) -> usize {
    (servers / 2).saturating_add(1)
}

/// For how long a quorum is held, given the remaining validity of each of its holds: until fewer
/// than `need` of them are left. Zero means not held.
///
/// A hold's remaining validity is its lease, less the time since its command was sent, less the
/// drift of clocks. It is shorter if its server may declare this client dead before that.
pub(crate) fn validity(left: impl IntoIterator<Item = Duration>, need: usize) -> Duration {
    let mut left: Vec<_> = left.into_iter().collect();
    left.sort_unstable_by(|one, other| other.cmp(one));
    let last_needed = need.saturating_sub(1);
    left.get(last_needed).copied().unwrap_or_default()
}

/// Why too few servers have granted the lock, from what each of them said; `None` is a grant.
pub(crate) fn refusal(answers: &[Option<Error>], need: usize) -> ErrorKind {
    let count = |is: fn(&Option<Error>) -> bool| answers.iter().filter(|one| is(one)).count();
    let answered = count(|one| one.as_ref().is_none_or(Error::is_not_acquired));
    // As if the servers that did not answer had granted it.
    let possible =
        answered.saturating_add(count(|one| one.as_ref().is_some_and(Error::is_unanswered)));
    if answered >= need {
        ErrorKind::NotAcquired
    } else if possible >= need {
        ErrorKind::Unavailable
    } else {
        let mut errors = answers.iter().flatten();
        let refused = errors.find(|error| !error.is_unanswered() && !error.is_not_acquired());
        refused.map_or(ErrorKind::Refused, Error::kind)
    }
}

/// Why too few servers have confirmed a renewal or a release, from what each of them said; `None`
/// is a confirmation.
pub(crate) fn doubt(answers: &[Option<Error>], need: usize) -> ErrorKind {
    let may_hold = |answer: &&Option<Error>| answer.as_ref().is_none_or(Error::is_unanswered);
    if answers.iter().filter(may_hold).count() < need {
        ErrorKind::Lost
    } else if answers.iter().flatten().any(Error::is_unknown) {
        ErrorKind::Unknown
    } else {
        ErrorKind::Unavailable
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LostReason;
    use crate::time::drift;

    #[test]
    fn more_than_half() {
        let needs = [1, 2, 2, 3, 3, 4, 4];
        for (servers, need) in (1_usize..).zip(needs) {
            assert_eq!(majority(servers), need, "of {servers}");
            // Two majorities share a server, and with one fewer they need not.
            assert!(need * 2 > servers && (need - 1) * 2 <= servers);
        }
    }

    /// Lease 10 s, so a drift of 102 ms: a hold is valid for 9,898 ms less the time since its
    /// command was sent.
    #[test]
    fn held_until_too_few_holds_are_left() {
        const LEASE: Duration = Duration::from_secs(10);
        let cases: [(&[u64], usize, u64); 10] = [
            // ms since each was sent, how many are needed, ms for which the quorum is held
            (&[0, 0, 0], 2, 9_898),
            (&[0, 0, 5_000], 2, 9_898),
            (&[0, 5_000, 5_000], 2, 4_898),
            (&[7_000, 1_000, 4_000], 2, 5_898),
            (&[0], 2, 0),
            (&[], 2, 0),
            (&[0, 9_897, 9_898], 2, 1),
            (&[0, 9_898, 9_898], 2, 0),
            (&[0, 0, 12_000, 12_000, 3_000], 3, 6_898),
            (&[0, 0, 12_000, 12_000, 9_950], 3, 0),
        ];
        for (elapsed, need, held) in cases {
            let left = elapsed.iter().map(|ms| {
                let valid = LEASE.saturating_sub(drift(LEASE));
                valid.saturating_sub(Duration::from_millis(*ms))
            });
            let held = Duration::from_millis(held);
            assert_eq!(validity(left, need), held, "{elapsed:?}, {need} needed");
        }
    }

    /// The servers' answers, one letter for each.
    fn answers(letters: &str) -> Vec<Option<Error>> {
        let answer = |letter| match letter {
            'y' => None,
            'h' => Some(Error::not_acquired(None)),
            'd' => Some(Error::not_attached()),
            's' => Some(Error::too_slow(Duration::from_millis(100))),
            'w' => Some(Error::from_text("WRONGTYPE not a lock")),
            'm' => Some(Error::from_text("ERR unknown command")),
            'l' => Some(Error::lost(LostReason::Expired)),
            letter => panic!("{letter}: yes, held, down, slow, wrong, no module, lost"),
        };
        letters.chars().map(answer).collect()
    }

    #[test]
    fn a_refusal_is_of_the_kind_that_stands_in_the_way() {
        let cases = [
            ("hhhhh", ErrorKind::NotAcquired),
            ("yyhhh", ErrorKind::NotAcquired),
            ("yyhds", ErrorKind::NotAcquired),
            ("yhhww", ErrorKind::NotAcquired),
            ("yyddd", ErrorKind::Unavailable),
            ("yysss", ErrorKind::Unavailable),
            ("hhdds", ErrorKind::Unavailable),
            ("yywwd", ErrorKind::Unavailable),
            ("ydwww", ErrorKind::Refused),
            ("hsmmm", ErrorKind::ModuleNotLoaded),
        ];
        for (said, kind) in cases {
            assert_eq!(refusal(&answers(said), 3), kind, "{said}");
        }
    }

    #[test]
    fn a_doubt_is_a_loss_only_if_too_few_can_have_held_it() {
        let cases = [
            ("yydll", ErrorKind::Unavailable),
            ("ydsll", ErrorKind::Unknown),
            ("yylll", ErrorKind::Lost),
            ("ydlll", ErrorKind::Lost),
        ];
        for (said, kind) in cases {
            assert_eq!(doubt(&answers(said), 3), kind, "{said}");
        }
    }
}
