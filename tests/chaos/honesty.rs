//! The limits of a lock alone, shown beside a token and a guarded command.
//!
//! The same application three times: it keeps a set in a store, and whoever adds to it holds a lock
//! while it reads and writes the set back. Again and again a process is stopped, for longer than
//! its lease, between its last look at its guard and its write. The one that trusts its lock must
//! lose elements that it had acknowledged: if none were lost, the test would prove nothing. The one
//! whose store looks at tokens must lose none, nor the one whose commands are guarded.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Server, eventually};
use rustix::process::Signal;

use crate::clients::{LOCKS, Process, Role};

/// The fate of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) added: usize,
    pub(crate) refused: usize,
    pub(crate) lost: usize,
}

/// The set guarded by the lock alone, by the token, and with `RLOCK.GUARD`.
#[derive(Debug)]
pub(crate) struct Outcomes {
    pub(crate) trusting: Outcome,
    pub(crate) with_token: Outcome,
    pub(crate) with_guard: Outcome,
    pub(crate) stops: usize,
}

const PROCESSES: usize = 3;

pub(crate) fn experiment(seconds: u64) -> Outcomes {
    let stops = usize::try_from((seconds / 10).clamp(4, 30)).expect("few");
    Outcomes {
        trusting: set(Role::AddsTrusting, stops),
        with_token: set(Role::AddsWithToken, stops),
        with_guard: set(Role::AddsGuarded, stops),
        stops,
    }
}

fn set(role: Role, stops: usize) -> Outcome {
    let server = Server::start();
    let record = Arc::default();
    let mut processes: Vec<_> = (0..PROCESSES)
        .map(|name| {
            Process::start(
                name.to_string(),
                role,
                &[server.address()],
                0,
                LOCKS,
                &record,
            )
        })
        .collect();
    for _ in 0..stops {
        eventually("a process is stopped in time", || {
            stop_one_inside(&processes, &record).then_some(())
        });
    }
    for process in &mut processes {
        process.tell_to_stop();
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline && !processes.iter_mut().all(Process::has_ended) {
        thread::sleep(Duration::from_millis(5));
    }
    processes.iter_mut().for_each(Process::kill);
    let set = server.run("GET set").text();
    let set: BTreeSet<_> = set.split(',').collect();
    outcome(&record.lock().expect("a list"), &set)
}

fn outcome(record: &[String], set: &BTreeSet<&str>) -> Outcome {
    let said = |word| record.iter().filter_map(move |line| line.split_once(word));
    let added: Vec<_> = said(" added ").map(|(_, element)| element).collect();
    Outcome {
        added: added.len(),
        refused: said(" refused").count(),
        lost: added
            .iter()
            .filter(|element| !set.contains(**element))
            .count(),
    }
}

/// Stops a process that is inside until another one has added something. Whether it was in time: on
/// a busy machine the process may have been through by then.
fn stop_one_inside(processes: &[Process], record: &Mutex<Vec<String>>) -> bool {
    let find = |from: usize, is_it: &dyn Fn(&[&str]) -> bool| {
        let record = record.lock().expect("a list");
        let words = |line: &String| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let mut said = record[from..].iter().map(words);
        said.find(|words| is_it(&words.iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let length = || record.lock().expect("a list").len();
    let first = length();
    let inside = eventually("a process is inside", || {
        find(first, &|words| words[3] == "inside")
    });
    let name = inside[2].as_str();
    let process = processes.iter().find(|process| process.name == name);
    let process = process.expect("ours");
    process.signal(Signal::STOP);
    let stopped = length();
    eventually("another one adds something", || {
        find(stopped, &|words| words[3] == "added" && words[2] != name)
    });
    // All that it had written by then has been read in that time.
    let is_through = |words: &[&str]| words[2] == name && ["added", "refused"].contains(&words[3]);
    let in_time = find(first, &is_through).is_none();
    process.signal(Signal::CONT);
    in_time
}

#[test]
fn what_was_acknowledged_and_is_not_there_is_lost() {
    let record = ["says 1 0 added a", "says 2 1 added b", "says 3 0 refused"];
    let record = record.map(str::to_owned);
    let all = outcome(&record, &["a", "b"].into());
    assert_eq!((all.added, all.refused, all.lost), (2, 1, 0));
    assert_eq!(outcome(&record, &["b"].into()).lost, 1);
}
