//! First come, first served: an owner that asked for a lock after another was seen in its queue, or
//! was told that it is, is not granted before that one.
//!
//! A grant's place in the order is its token. A wait that ended without a grant, or whose end is
//! unknown, has no place and proves nothing.

use std::collections::{HashMap, HashSet};

use super::holds::{Hold, SETTLING};
use super::{Violation, holds_of_one_primary};
use crate::history::{Ask, History, Mode, Time, Wait};

pub(super) fn check(history: &History) -> Vec<Violation> {
    let since = in_queue_since(history);
    let mut holds = holds_of_one_primary(history);
    holds.sort_by(|a, b| (a.lock, a.token, a.asked).cmp(&(b.lock, b.token, b.asked)));
    let mut found = Vec::new();
    for of_one_lock in holds.chunk_by(|a, b| a.lock == b.lock) {
        // Of those with a smaller token, who asked last.
        let mut latest = &of_one_lock[0];
        let mut grants = HashSet::new();
        for hold in of_one_lock {
            // A kept lock that is handed on is granted by nobody.
            if !grants.insert((hold.owner, hold.token)) {
                continue;
            }
            let waited = since.get(&(hold.lock, hold.owner));
            if let Some(at) = waited
                // A grant that was asked for later is of another wait.
                && hold.asked < *at
                && latest.asked > *at
                && latest.token < hold.token
                && !may_have_queued_again(history, hold.owner, *at, hold.told)
            {
                let what = format!(
                    "{}: {} (token {}), in the queue since {at} at the latest, was overtaken by {} \
                     (token {}), who asked at {}",
                    hold.lock, hold.owner, hold.token, latest.owner, latest.token, latest.asked
                );
                found.push(Violation::new(hold.told, what));
            }
            // A writer takes READ past the queue.
            let writes = |other: &Hold<'_>| other.owner == hold.owner && other.mode == Mode::Write;
            let is_own_reading = hold.mode == Mode::Read && of_one_lock.iter().any(writes);
            if hold.asked > latest.asked && !is_own_reading {
                latest = hold;
            }
        }
    }
    found
}

/// The first moment in which each is known to have been in the queue.
fn in_queue_since(history: &History) -> HashMap<(&str, &str), Time> {
    let mut since = HashMap::new();
    let mut seen = |lock, owner, at: Time| {
        let first = since.entry((lock, owner)).or_insert(at);
        *first = at.min(*first);
    };
    for operation in &history.operations {
        for lock in operation.queued.iter().flat_map(|_| &operation.locks) {
            seen(
                lock.as_str(),
                operation.owner.as_str(),
                operation.queued.unwrap_or_default(),
            );
        }
    }
    for sample in &history.samples {
        for (owner, _) in &sample.queue {
            seen(sample.lock.as_str(), owner.as_str(), sample.told);
        }
    }
    since
}

/// The client crate goes on waiting after a fault, at the end of the queue if the server has
/// forgotten it.
fn may_have_queued_again(history: &History, owner: &str, from: Time, to: Time) -> bool {
    let of_the_crate = history.operations.iter().any(|operation| {
        let by_guard = matches!(
            operation.ask,
            Ask::Acquire {
                wait: Wait::Guard,
                ..
            }
        );
        by_guard && operation.owner == owner
    });
    let meanwhile =
        |fault: &crate::history::Fault| fault.begin <= to && fault.end + SETTLING >= from;
    of_the_crate && history.faults.iter().any(meanwhile)
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    /// `b` asks after `a` was seen in the queue, and is granted with this token.
    fn race(seen: &str, tokens: [u64; 2]) -> usize {
        let [a, b] = tokens;
        let history = format!(
            "ask 1.1 10 a k plain free acquire 1000 block
             {seen}
             ask 2.1 50 b k plain free acquire 1000 block
             told 1.1 100 held 1 {a}
             told 2.1 100 held 1 {b}"
        );
        says(check, &history).len()
    }

    #[test]
    fn an_overtaken_waiter_is_found() {
        let sample = "info 20 30 k x/plain/6 a/plain";
        assert_eq!(race(sample, [7, 8]), 0);
        assert_eq!(race(sample, [8, 7]), 1);
        assert_eq!(race("queued 1.1 40", [8, 7]), 1);
    }

    #[test]
    fn a_waiter_not_seen_in_the_queue_first_has_no_claim() {
        assert_eq!(race("", [8, 7]), 0);
        assert_eq!(race("info 40 60 k x/plain/6 a/plain", [8, 7]), 0);
    }

    #[test]
    fn a_writer_may_read_past_the_queue() {
        let line = "ask 1.1 10 a k read free acquire 1000 block
             info 20 30 k x/write/6 a/read
             told 1.1 100 held 1 8\n";
        let reads = "ask 2.2 50 x k read free acquire 1000 none
             told 2.2 60 held 1 7\n";
        let writes = "ask 2.1 1 x k write free acquire 1000 none
             told 2.1 2 held 1 6\n";
        assert_eq!(says(check, &format!("{line}{reads}")).len(), 1);
        assert_eq!(says(check, &format!("{writes}{line}{reads}")).len(), 0);
    }

    #[test]
    fn the_crate_may_queue_again_after_a_fault() {
        let history = "ask 1.1 10 a k plain session acquire 1000 guard
             info 20 30 k x/plain/6 a/plain
             ask 2.1 50 b k plain free acquire 1000 block
             told 2.1 100 held 1 7
             told 1.1 100 held 1 8\n";
        assert_eq!(says(check, history).len(), 1);
        let fault = format!("{history}fault 60 70 sever 1");
        assert_eq!(says(check, &fault).len(), 0);
    }
}
