//! Nobody waits for a lock that is free, for longer than [`BOUND`].
//!
//! The server is asked again and again for the holders and the queues. It has lost a wake-up if the
//! same waiter is first in the queue and could come in, in one answer, in another that was asked
//! for after the bound, and in a third: between these two it has had a turn in which it does what
//! is due.

use std::collections::{BTreeMap, HashMap};

use super::Violation;
use crate::history::{Ask, History, LIMIT, MS, Mode, Sample, Time};

const BOUND: Time = 50 * MS;

/// That the clock was set is noticed at the server's next tick, a tenth of a second apart. If it
/// was right again by then it is noticed once the timer is two tenths overdue.
const CLOCK_NOTICED: Time = 400 * MS;

pub(super) fn check(history: &History) -> Vec<Violation> {
    let wanted = wanted(history);
    // All locks are asked for at once.
    let mut looks: BTreeMap<Time, HashMap<&str, &Sample>> = BTreeMap::new();
    for sample in &history.samples {
        looks
            .entry(sample.asked)
            .or_default()
            .insert(&sample.lock, sample);
    }
    let mut stuck: HashMap<&str, Stuck<'_>> = HashMap::new();
    let mut found = Vec::new();
    for look in looks.values() {
        for (lock, sample) in look {
            let Some(owner) = could_enter(sample, look, &wanted) else {
                stuck.remove(lock);
                continue;
            };
            let entry = stuck
                .entry(lock)
                .or_insert_with(|| Stuck::new(owner, sample));
            if entry.owner != owner || is_held_up(history, entry.since, sample.told) {
                *entry = Stuck::new(owner, sample);
            } else if entry.is_overdue && !entry.is_told {
                entry.is_told = true;
                let ms = (sample.asked - entry.since) / MS;
                let what = format!("{lock}: {owner} waits, and could come in since {ms} ms");
                found.push(Violation::new(sample.told, what));
            } else if sample.asked > entry.since + BOUND {
                entry.is_overdue = true;
            }
        }
    }
    found
}

/// Somebody who could come in and does not.
struct Stuck<'a> {
    owner: &'a str,
    since: Time,
    is_overdue: bool,
    is_told: bool,
}

impl<'a> Stuck<'a> {
    fn new(owner: &'a str, sample: &Sample) -> Self {
        Self {
            owner,
            since: sample.told,
            is_overdue: false,
            is_told: false,
        }
    }
}

/// The locks that each owner waits for.
fn wanted(history: &History) -> HashMap<&str, &[String]> {
    let waits = history.operations.iter();
    let waits = waits.filter(|operation| matches!(operation.ask, Ask::Acquire { .. }));
    waits
        .map(|wait| (wait.owner.as_str(), wait.locks.as_slice()))
        .collect()
}

/// The first in the queue, if nothing is in the way. Of several locks it may be the holder of some,
/// and enters those again.
fn could_enter<'a>(
    sample: &'a Sample,
    look: &HashMap<&str, &Sample>,
    wanted: &HashMap<&str, &[String]>,
) -> Option<&'a str> {
    let (owner, mode) = sample.queue.first()?;
    let is_open = |sample: &Sample| {
        let by_readers = sample
            .holders
            .iter()
            .all(|holder| holder.mode == Mode::Read);
        let readable = *mode == Mode::Read && by_readers;
        let fits = match *mode {
            Mode::Permits(permits) => out(sample) + permits <= LIMIT,
            Mode::Plain | Mode::Read | Mode::Write => false,
        };
        let is_first = sample
            .queue
            .first()
            .is_some_and(|(first, _)| first == owner);
        is_first && (sample.holders.is_empty() || readable || fits)
    };
    let others = wanted.get(owner.as_str()).copied().unwrap_or_default();
    let is_its_own = |sample: &Sample| {
        let waits = sample.queue.iter().any(|(waiter, _)| waiter == owner);
        waits && matches!(&sample.holders[..], [holder] if holder.owner == *owner)
    };
    let all_open = others.iter().all(|lock| {
        look.get(lock.as_str())
            .is_some_and(|sample| is_open(sample) || others.len() > 1 && is_its_own(sample))
    });
    (is_open(sample) && all_open).then_some(owner)
}

/// How many permits; of a lock one for each holder.
fn out(sample: &Sample) -> u32 {
    let holders = sample.holders.iter();
    holders.map(|holder| holder.mode.first_count()).sum()
}

/// Whether the server was not allowed to write meanwhile, or its clock was set.
fn is_held_up(history: &History, from: Time, to: Time) -> bool {
    history.faults.iter().any(|fault| {
        let end = match fault.kind.as_str() {
            "pause" | "failover" | "promote" | "no-room" | "cluster-down" => fault.end,
            "clock" => fault.end + CLOCK_NOTICED,
            _ => return false,
        };
        fault.begin <= to && end >= from
    })
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::checkers::says;

    /// What is said if three looks, 40 ms apart, see this.
    fn seen(lines: &str) -> usize {
        let looks = [100, 140, 180, 220].map(|at| {
            let times = format!("{at}000 {at}500");
            lines.replace("AT", &times)
        });
        says(check, &looks.join("\n")).len()
    }

    #[test]
    fn a_waiter_for_a_free_lock_is_found() {
        assert_eq!(seen("info AT k - a/plain"), 1);
        assert_eq!(seen("info AT k x/plain/7 a/plain"), 0);
        assert_eq!(seen("info AT k - -"), 0);
    }

    #[test]
    fn a_reader_may_join_readers() {
        assert_eq!(seen("info AT k x/read/7 a/read"), 1);
        assert_eq!(seen("info AT k x/read/7 a/write"), 0);
        assert_eq!(seen("info AT k x/read/7,y/write/8 a/read"), 0);
    }

    #[test]
    fn a_waiter_for_permits_that_are_free_is_found() {
        let queue = |asked: u32| format!("info AT k x/permits:1/7 a/permits:{asked},b/permits:1");
        assert_eq!(seen(&queue(2)), 1);
        assert_eq!(seen(&queue(3)), 0, "nor may the other one pass it");
    }

    #[test]
    fn a_wait_for_several_needs_all_of_them() {
        let wait = "ask 1.1 1 a s0,s1 plain free acquire 1000 block\n";
        let looks = |second: &str| {
            let looks = [100, 140, 180, 220].map(|at| {
                format!("info {at}000 {at}500 s0 - a/plain\ninfo {at}000 {at}500 s1 {second}\n")
            });
            says(check, &format!("{wait}{}", looks.concat())).len()
        };
        assert_eq!(looks("x/plain/7 a/plain"), 0);
        assert_eq!(
            looks("- b/plain,a/plain"),
            1,
            "b's, which waits for s1 alone"
        );
        assert_eq!(looks("- a/plain"), 2);
    }

    #[test]
    fn a_wait_for_several_enters_again_what_its_owner_holds() {
        let wait = "ask 1.1 1 a s0,s1 plain free acquire 1000 queue\n";
        let looks = |held: &str| {
            let looks = [100, 140, 180, 220].map(|at| {
                format!("info {at}000 {at}500 s0 {held}\ninfo {at}000 {at}500 s1 - a/plain\n")
            });
            says(check, &format!("{wait}{}", looks.concat())).len()
        };
        assert_eq!(looks("a/plain/7 b/plain,a/plain"), 1);
        assert_eq!(looks("b/plain/7 a/plain"), 0);
        assert_eq!(looks("a/plain/7 b/plain"), 0, "its wait is over there");
    }

    #[test]
    fn a_clock_that_was_set_is_noticed_within_some_ticks() {
        let looks = |from: u64| {
            let looks = [0, 40, 80, 120].map(|after| {
                let at = from + after;
                format!("info {at}000 {at}500 k - a/plain\n")
            });
            says(
                check,
                &format!("fault 50000 60000 clock\n{}", looks.concat()),
            )
            .len()
        };
        assert_eq!(looks(100), 0);
        assert_eq!(looks(500), 1);
    }

    #[test]
    fn a_pause_is_no_lost_wake_up() {
        let looks = [100, 140, 180, 220].map(|at| format!("info {at}000 {at}500 k - a/plain\n"));
        let pause = "fault 90000 170000 pause\n";
        assert_eq!(says(check, &(looks.concat() + pause)).len(), 0);
    }
}
