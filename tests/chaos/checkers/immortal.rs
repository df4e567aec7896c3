//! No hold outlives the client that could renew it: when its owner has asked for the last time, or
//! its process is dead, it ends with its lease; when the session that it belongs to has ended, long
//! before that.
//!
//! Only calm time counts, in which nothing was done to the process, its network or the server:
//! traffic that is cut off arrives later, and a client repeats unanswered commands.

use std::collections::{BTreeMap, BTreeSet};

use super::Violation;
use crate::history::{Ask, Fault, History, MS, Time, is_one_session, is_part_of};

/// How long a command may still be under way in calm, and be repeated.
const UNDER_WAY: Time = 6_000 * MS;

/// How much of a lease that began while the clock was ahead may be left when that was set right:
/// the operator ends what would last longer.
const DRAWN_OUT: Time = 2_500 * MS;

/// For how long the holds of such a session outlive its connection.
const LONGEST_GRACE: Time = 300 * MS;

/// No client asks to wait for longer than this.
const LONGEST_WAIT: Time = 2_000 * MS;

pub(super) fn check(history: &History) -> Vec<Violation> {
    let ends = ends(history);
    let mut told = BTreeSet::new();
    let mut found = Vec::new();
    for sample in &history.samples {
        for holder in &sample.holders {
            let Some(end) = ends.get(holder.owner.as_str()) else {
                continue;
            };
            let whose = (sample.lock.as_str(), holder.owner.as_str());
            let calm = calm(history, end, sample.asked);
            if calm > end.may_take + UNDER_WAY && told.insert(whose) {
                let what = format!(
                    "{}: {} still holds it, last heard of at {}, {} ms of calm ago",
                    sample.lock,
                    holder.owner,
                    end.last,
                    calm / MS
                );
                found.push(Violation::new(sample.told, what));
            }
        }
    }
    found
}

/// The end of an owner, which sends nothing more.
#[derive(Debug, Default)]
struct End<'a> {
    process: &'a str,
    last: Time,
    /// The longest lease that it has asked for, and a wait if its last request was one.
    may_take: Time,
    /// All that it asked for belongs to sessions, and ends with them.
    is_of_session: bool,
    is_over: bool,
}

fn ends(history: &History) -> BTreeMap<&str, End<'_>> {
    let died = history.died.iter();
    let died: BTreeMap<_, _> = died.map(|(at, process)| (process.as_str(), *at)).collect();
    let mut ends: BTreeMap<&str, End<'_>> = BTreeMap::new();
    for operation in &history.operations {
        let end = ends.entry(&operation.owner).or_insert_with(|| End {
            process: &operation.process,
            is_of_session: true,
            ..End::default()
        });
        let is_of_session = operation.of_session && is_one_session(&operation.process);
        end.is_of_session &= is_of_session && end.process == operation.process;
        end.process = &operation.process;
        if operation.asked >= end.last {
            end.last = operation.asked;
            // After its release, or a request without an answer, it does not go on.
            end.is_over = operation.ask == Ask::Release || operation.told.is_none();
        }
        let may_take = match operation.ask {
            Ask::Acquire { lease, .. } if operation.told.is_none() => lease + LONGEST_WAIT,
            Ask::Acquire { lease, .. } | Ask::Renew { lease } => lease,
            Ask::Release => 0,
        };
        end.may_take = end.may_take.max(may_take);
    }
    for belief in &history.beliefs {
        if let Some(end) = ends.get_mut(belief.owner.as_str()) {
            end.last = end.last.max(belief.at);
        }
    }
    for end in ends.values_mut() {
        let whole = end.process.split('_').next().unwrap_or_default();
        let died = died.get(whole).copied();
        // An owner that had given back before sends nothing until then.
        if let Some(at) = died.filter(|_| !end.is_over) {
            end.is_over = true;
            end.last = end.last.max(at);
        }
        let closed = history.closed.get(end.process).into_iter().flatten();
        let over = closed.copied().chain(died).min();
        if let Some(at) = over.filter(|_| end.is_of_session) {
            end.is_over = true;
            end.last = end.last.max(at);
            end.may_take = LONGEST_GRACE;
        }
    }
    ends.retain(|owner, end| *owner != "?" && end.is_over);
    ends
}

fn calm(history: &History, end: &End<'_>, until: Time) -> Time {
    let concerns = |fault: &&Fault| match fault.kind.as_str() {
        "break" | "del" | "flush" | "two-primaries" | "kill-replica" | "stop-replica"
        | "end-together" => false,
        _ => fault
            .to
            .as_deref()
            .is_none_or(|to| is_part_of(end.process, to)),
    };
    let faults = history.faults.iter().filter(concerns).map(|fault| {
        let drawn_out = if fault.kind == "clock" { DRAWN_OUT } else { 0 };
        let (from, to) = (
            fault.begin.max(end.last),
            (fault.end + drawn_out).min(until),
        );
        to.saturating_sub(from)
    });
    let all = until.saturating_sub(end.last);
    all.saturating_sub(faults.sum())
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    fn seen_at(ms: u64, between: &str) -> usize {
        let history = format!(
            "ask 1.1 0 a k plain session acquire 1000 guard
             told 1.1 10 held 1 7
             {between}
             info {ms}000 {ms}100 k a/plain/7 -"
        );
        says(check, &history).len()
    }

    #[test]
    fn a_hold_without_anybody_is_found() {
        assert_eq!(seen_at(60_000, ""), 0, "its guard may live");
        assert_eq!(seen_at(60_000, "ask 1.2 500 a k plain session release"), 1);
        assert_eq!(seen_at(60_000, "died 500 1"), 1);
        let released_and_died_later = "ask 1.2 500 a k plain session release\ndied 70000000 1";
        assert_eq!(seen_at(60_000, released_and_died_later), 1);
        assert_eq!(seen_at(1_000, "died 500 1"), 0);
    }

    #[test]
    fn a_hold_that_outlives_its_session_is_found_whatever_its_lease() {
        let seen_at = |ms: u64, ended: &str| {
            let history = format!(
                "ask 1_2.1 0 a k plain session acquire 60000 none
                 told 1_2.1 10 held 1 7
                 {ended}
                 info {ms}000 {ms}100 k a/plain/7 -"
            );
            says(check, &history).len()
        };
        assert_eq!(seen_at(9_000, ""), 0);
        assert_eq!(seen_at(9_000, "closed 500 1_2"), 1);
        assert_eq!(seen_at(9_000, "died 500 1"), 1);
        assert_eq!(seen_at(9_000, "closed 500 1_3"), 0);
        assert_eq!(seen_at(5_000, "closed 500 1_2"), 0);
    }

    #[test]
    fn what_was_held_up_has_more_time() {
        let cut = "died 500 1\nfault 400 7000000 cut 1";
        assert_eq!(seen_at(7_500, cut), 0);
        assert_eq!(seen_at(20_000, cut), 1);
        let ahead = "died 500 1\nfault 400 600 clock";
        assert_eq!(seen_at(8_600, ahead), 0);
        assert_eq!(seen_at(9_600, ahead), 1);
        let of_another = "died 500 1\nfault 400 7000000 cut 2";
        assert_eq!(seen_at(8_500, of_another), 1);
    }
}
