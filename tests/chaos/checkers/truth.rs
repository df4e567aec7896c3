//! The server tells others the same as the client: a certain holder of a lock is its holder there,
//! with that token, and a client that was told of its loss is not.

use std::collections::{BTreeMap, BTreeSet};

use super::holds::{Hold, series};
use super::{Violation, holds_of_one_primary};
use crate::history::{Ask, Fault, History, Mode, Sample, Time, Told};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let mut holds = holds_of_one_primary(history);
    holds.sort_by_key(|hold| hold.told);
    let gone = gone(history);
    let mut samples: BTreeMap<&str, Vec<&Sample>> = BTreeMap::new();
    for sample in &history.samples {
        samples.entry(&sample.lock).or_default().push(sample);
    }
    let mut found = Vec::new();
    for (lock, mut samples) in samples {
        samples.sort_by_key(|sample| sample.asked);
        let mut coming = holds.iter().filter(|hold| hold.lock == lock).peekable();
        let mut present: Vec<&Hold<'_>> = Vec::new();
        let mut told = BTreeSet::new();
        for sample in samples {
            present.extend(std::iter::from_fn(|| {
                coming.next_if(|hold| hold.told <= sample.asked)
            }));
            present.retain(|hold| hold.until >= sample.told);
            let missed = present.iter().filter(|hold| !shows(sample, hold));
            for hold in missed.filter(|hold| told.insert(hold.owner)) {
                found.push(Violation::new(sample.told, unseen(sample, hold)));
            }
            for holder in &sample.holders {
                let whose = (lock, holder.owner.as_str(), holder.mode);
                if let Some(at) = gone.get(&whose)
                    && *at < sample.asked
                    && !may_be_back(history, holder.mode, *at, sample.asked)
                    && told.insert(whose.1)
                {
                    let what = format!(
                        "{lock}: {} ({:?}) holds it, and was told at {at} that it does not",
                        holder.owner, holder.mode
                    );
                    found.push(Violation::new(sample.told, what));
                }
            }
        }
    }
    found
}

fn shows(sample: &Sample, hold: &Hold<'_>) -> bool {
    sample.holders.iter().any(|holder| {
        let of_token = holder.token.is_none_or(|token| token == hold.token);
        holder.owner == hold.owner
            && holder.mode == hold.mode
            && (of_token || hold.mode == Mode::Write)
    })
}

fn unseen(sample: &Sample, hold: &Hold<'_>) -> String {
    format!(
        "{}: {} ({:?}, {}) holds it from {} to {}, but the server says {:?}",
        hold.lock, hold.owner, hold.mode, hold.token, hold.told, hold.until, sample.holders
    )
}

/// The clients that were told of their loss, and of nothing afterwards, not even the answer to an
/// earlier request, such as a wait that was granted then.
fn gone(history: &History) -> BTreeMap<(&str, &str, Mode), Time> {
    let mut gone = BTreeMap::new();
    for (whose, series) in series(history) {
        let Some(last) = series.last() else { continue };
        let is_first = series.len() == 1;
        let over = match (last.ask, &last.told) {
            (Ask::Release, Some((at, Told::Left(0) | Told::Lost))) => Some(*at),
            (Ask::Acquire { .. }, Some((at, Told::Refused | Told::Error))) if is_first => Some(*at),
            _ => None,
        };
        let is_before = |over: &Time| {
            let mut told = series.iter().map(|operation| operation.told.as_ref());
            told.all(|told| told.is_some_and(|(at, _)| at <= over))
        };
        let over = over.filter(|over| whose.1 != "?" && is_before(over));
        gone.extend(over.map(|at| (whose, at)));
    }
    gone
}

/// A replica that is promoted may have missed a release. Permits are held again whose leases had
/// ended by a clock that was ahead, if they were still stored when it was set back.
fn may_be_back(history: &History, mode: Mode, gone: Time, seen: Time) -> bool {
    let is_cause = |kind: &str| kind == "promote" || kind == "clock" && mode.is_permits();
    let between = |fault: &Fault| fault.begin <= seen && fault.end >= gone;
    history
        .faults
        .iter()
        .any(|fault| is_cause(fault.kind.as_str()) && between(fault))
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    fn held_and_then(lines: &str) -> usize {
        let history = format!(
            "ask 1.1 10000 a k plain free acquire 1000 none
             told 1.1 20000 held 1 7
             {lines}"
        );
        says(check, &history).len()
    }

    #[test]
    fn a_hold_that_the_server_denies_is_found() {
        assert_eq!(held_and_then("info 30000 31000 k a/plain/7 -"), 0);
        assert_eq!(held_and_then("info 30000 31000 k - -"), 1);
        assert_eq!(held_and_then("info 30000 31000 k a/plain/8 -"), 1);
        assert_eq!(held_and_then("info 2000000 2001000 k - -"), 0);
    }

    #[test]
    fn a_hold_that_is_back_after_its_release_is_found() {
        let release = "ask 1.2 30000 a k plain free release
             told 1.2 40000 left 0\n";
        let seen = "info 50000 51000 k a/plain/7 -\n";
        assert_eq!(held_and_then(&format!("{release}{seen}")), 1);
        let promoted = "fault 45000 46000 promote";
        assert_eq!(held_and_then(&format!("{release}{seen}{promoted}")), 0);
    }

    #[test]
    fn permits_may_be_back_where_the_clock_was_set() {
        let lost = |mode: &str, fault: &str| {
            let history = format!(
                "ask 1.1 10000 a k {mode} free acquire 1000 none
                 told 1.1 20000 held 2 7
                 ask 1.2 30000 a k {mode} free release
                 told 1.2 40000 lost
                 {fault}
                 info 50000 51000 k a/{mode}/7 -"
            );
            says(check, &history).len()
        };
        let set = "fault 25000 45000 clock";
        assert_eq!((lost("permits:2", set), lost("plain", set)), (0, 1));
        assert_eq!(lost("permits:2", ""), 1);
    }

    #[test]
    fn permits_that_were_over_may_be_given_back_when_the_clock_is_set_back() {
        let given_back = |clock: &str| {
            let history = format!(
                "ask 1.1 10000 a k permits:2 free acquire 300 none
                 told 1.1 20000 held 2 7
                 info 350000 351000 k b/permits:3/8 -
                 {clock}
                 ask 1.2 400000 a k permits:2 free release
                 told 1.2 401000 left 0"
            );
            says(check, &history).len()
        };
        assert_eq!(given_back("fault 360000 900000 clock"), 0);
        assert_eq!(given_back(""), 1);
    }

    #[test]
    fn what_a_wait_was_granted_after_its_owner_had_nothing_left_is_no_fault() {
        let lost = "ask 1.2 30000 a k,l plain free acquire 1000 queue
             queued 1.2 31000
             ask 1.3 32000 a k plain free release
             told 1.3 33000 left 0
             ask 1.4 32500 a k plain free release
             told 1.4 34000 lost\n";
        let seen = "info 60000 61000 k a/plain/8 -\n";
        let granted = "told 1.2 50000 entered 1 8\n";
        assert_eq!(held_and_then(&format!("{lost}{granted}{seen}")), 0);
        let refused = "told 1.2 33500 refused\n";
        assert_eq!(held_and_then(&format!("{lost}{refused}{seen}")), 1);
    }

    #[test]
    fn a_hold_of_fewer_permits_than_were_granted_is_found() {
        let seen = |holder: &str| {
            let history = format!(
                "ask 1.1 10000 a k permits:2 free acquire 1000 none
                 told 1.1 20000 held 2 7
                 info 30000 31000 k {holder} -"
            );
            says(check, &history).len()
        };
        assert_eq!(seen("a/permits:2/7,b/permits:1/8"), 0);
        assert_eq!(seen("a/permits:1/7"), 1);
    }

    #[test]
    fn a_lock_that_was_refused_and_is_held_is_found() {
        let history = "ask 1.1 10000 a k plain free acquire 1000 none
             told 1.1 20000 refused
             info 30000 31000 k a/plain/7 -";
        assert_eq!(says(check, history).len(), 1);
    }

    #[test]
    fn a_part_of_several_that_is_missing_is_found() {
        let history = "ask 1.1 10000 a s0,s1 plain free acquire 1000 none
             told 1.1 20000 held 1 7
             info 30000 31000 s0 a/plain/7 -
             info 30000 31000 s1 - -";
        assert_eq!(says(check, history).len(), 1);
    }
}
