//! Leader election, as docs/leader-election.md describes it: the page's loop, and three processes
//! of the example `leader`, whose leaders are killed, stopped, and told to end.
//!
//! `LEADER_ROUNDS=20 cargo test -p rlock-tests --test it -- --nocapture client_leader` prints how
//! long there was no leader.

#![allow(clippy::print_stdout, reason = "the test prints its measurements")]

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use rlock_client::{Client, Error, Guard};
use rlock_tests::{Server, eventually, until};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::sleep;

use super::client::{cargo, url};
use super::tidy::read;

const NAMES: [&str; 3] = ["ann", "bob", "cyd"];
const EXAMPLE: &str = "leader";
const LOCK: &str = "{example}:leader";

/// Campaigns until it leads, and leads until the work is done. A loss begins the next campaign.
async fn candidate(client: &Client) -> Result<(), Error> {
    loop {
        let guard = match client.lock("leader").lock().await {
            Ok(guard) => guard,
            // The server could not be asked, or its reply was lost: an outage is no defeat.
            Err(error) if error.is_unavailable() || error.is_unknown() => {
                sleep(Duration::from_secs(1)).await;
                continue;
            }
            Err(error) => return Err(error), // no right, wrong password, no module
        };
        tokio::select! {
            biased;
            _reason = guard.lost() => {} // another process may lead soon: stop, and campaign again
            () = lead(&guard) => return guard.unlock().await, // done: resign
        }
    }
}

/// Leads for a moment.
async fn lead(guard: &Guard) {
    guard.renew().await.unwrap();
}

#[test]
fn the_loop_of_the_page_is_the_one_that_is_tested() {
    let page = read("docs/leader-election.md");
    let shown = page.split("```rust\n").nth(1).unwrap();
    let shown = shown.split("```").next().unwrap();
    let own = include_str!("client_leader.rs");
    assert!(own.contains(shown), "{shown}");
}

#[tokio::test]
async fn a_campaign_that_begins_in_an_outage_leads_when_the_server_is_back() {
    let mut server = Server::start();
    let client = Client::connect(&url(&server)).await.unwrap();
    server.stop();
    let campaign = tokio::spawn({
        let client = client.clone();
        async move { candidate(&client).await }
    });
    // The campaign's first call began before this one, and meets the outage as well.
    let first = client.lock("another").lock().await.unwrap_err();
    assert!(first.is_unavailable() || first.is_unknown(), "{first}");
    server.restart();
    campaign.await.unwrap().unwrap();
    client.shutdown().await;
    assert_eq!(server.holder("leader"), None);
}

/// The time on the clock of the example, in microseconds.
fn micros() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap().as_micros().try_into().unwrap()
}

/// A process's statement about a moment.
#[derive(Clone, Debug, PartialEq)]
enum Said {
    Leads { token: u64 },
    LeadsNoMore,
    Resigns,
}

/// A line that a process has written, with its own time.
#[derive(Clone, Debug)]
struct Line {
    at: u64,
    name: String,
    said: Said,
}

impl Line {
    fn parse(line: &str) -> Self {
        let parsed = || {
            let (at, rest) = line.split_once(' ')?;
            let (name, said) = rest.split_once(' ')?;
            let said = match said {
                "leads no more" => Said::LeadsNoMore,
                "resigns" => Said::Resigns,
                leads => {
                    let token = leads.strip_prefix("leads, with token ")?;
                    Said::Leads {
                        token: token.parse().ok()?,
                    }
                }
            };
            let (at, name) = (at.parse().ok()?, name.to_owned());
            Some(Self { at, name, said })
        };
        parsed().unwrap_or_else(|| panic!("{line}"))
    }
}

/// A time in which a process has said that it leads, at its beginning and at its end.
#[derive(Clone, Debug, PartialEq)]
struct Term {
    name: String,
    token: u64,
    from: u64,
    to: u64,
    resigned: Option<u64>,
}

/// The terms, in the order of their beginnings. A guard that says "held" has said so ever since its
/// grant, so a process has led from the first time it said so with a token to the last.
fn terms(lines: &[Line]) -> Vec<Term> {
    let mut terms: Vec<Term> = Vec::new();
    for Line { at, name, said } in lines {
        let last = terms.iter_mut().rev().find(|term| term.name == *name);
        match (said, last) {
            (Said::Leads { token }, Some(term)) if term.token == *token => term.to = *at,
            (Said::Leads { token }, _) => terms.push(Term {
                name: name.clone(),
                token: *token,
                from: *at,
                to: *at,
                resigned: None,
            }),
            (Said::Resigns, Some(term)) => term.resigned = Some(*at),
            (Said::Resigns, None) => panic!("{name} resigns and has never led"),
            (Said::LeadsNoMore, _) => {}
        }
    }
    terms.sort_by_key(|term| term.from);
    terms
}

/// A violation in these: two that led at a time, a later one with a token that is not larger, or
/// one that leads and has resigned.
fn trouble(terms: &[Term]) -> Option<String> {
    let late = terms
        .iter()
        .find(|term| term.resigned.is_some_and(|at| at < term.to));
    if let Some(term) = late {
        return Some(format!("leads after it has resigned: {term:?}"));
    }
    let pairs = terms.windows(2).find(|pair| {
        let [former, later] = pair else { return false };
        former.to >= later.from || former.token >= later.token
    });
    pairs.map(|pair| format!("two leaders at a time, or tokens that do not grow: {pair:?}"))
}

/// A process, and the thread that reads its lines.
struct Process {
    child: Child,
    reader: Option<thread::JoinHandle<()>>,
}

impl Process {
    fn signal(&self, signal: Signal) {
        let id = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(id, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended cannot be killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Candidates {
    server: Server,
    processes: HashMap<&'static str, Process>,
    lines: Arc<Mutex<Vec<Line>>>,
}

impl Candidates {
    fn start() -> Self {
        // Nobody waits for a compiler with a deadline.
        assert!(cargo("build", EXAMPLE).status().unwrap().success());
        let mut candidates = Self {
            server: Server::start(),
            processes: HashMap::new(),
            lines: Arc::default(),
        };
        for name in NAMES {
            candidates.begin(name);
        }
        candidates.all_campaign();
        candidates
    }

    fn begin(&mut self, name: &'static str) {
        let mut child = cargo("run", EXAMPLE)
            .args(["--", &url(&self.server), name])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let written = BufReader::new(child.stdout.take().unwrap());
        let lines = Arc::clone(&self.lines);
        let reader = thread::spawn(move || {
            for line in written.lines() {
                lines.lock().unwrap().push(Line::parse(&line.unwrap()));
            }
        });
        let reader = Some(reader);
        self.processes.insert(name, Process { child, reader });
    }

    /// Waits until one leads and the others are in the queue.
    fn all_campaign(&self) {
        until("two wait, and one leads", || {
            assert_eq!(trouble(&self.terms()), None);
            self.server.waiting_owners(LOCK).len() == 2
        });
    }

    fn terms(&self) -> Vec<Term> {
        terms(&self.lines.lock().unwrap())
    }

    /// Waits until another than this one leads whose term began after this time.
    fn next(&self, since: u64, former: &str) -> Term {
        eventually("another leads", || {
            let mut terms = self.terms().into_iter();
            terms.find(|term| term.from > since && term.name != former)
        })
    }

    /// Waits until somebody has just said that it leads. Its name, and the time.
    fn leader(&self) -> (&'static str, u64) {
        let since = micros();
        let name = eventually("somebody leads", || {
            let lines = self.lines.lock().unwrap();
            let last = lines.iter().rev().find(|line| line.at > since)?;
            let leads = matches!(last.said, Said::Leads { .. });
            leads.then(|| last.name.clone())
        });
        let name = NAMES.into_iter().find(|one| *one == name).unwrap();
        (name, micros())
    }

    /// Waits until it has ended, and all that it has written was read. Whether all was well.
    fn end(&mut self, name: &str) -> bool {
        let mut process = self.processes.remove(name).unwrap();
        let status = process.child.wait().unwrap();
        process.reader.take().unwrap().join().unwrap();
        status.success()
    }
}

/// For how long there was no leader, by what had become of the former one.
#[derive(Default)]
struct Gaps(HashMap<&'static str, Vec<Duration>>);

impl Gaps {
    fn add(&mut self, after: &'static str, from: u64, to: u64) -> Duration {
        let gap = Duration::from_micros(to.saturating_sub(from));
        self.0.entry(after).or_default().push(gap);
        gap
    }
}

impl fmt::Display for Gaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (after, gaps) in &self.0 {
            let mut gaps = gaps.clone();
            gaps.sort();
            let (times, middle, longest) = (gaps.len(), gaps[gaps.len() / 2], gaps.last());
            let longest = longest.unwrap();
            writeln!(
                f,
                "{after}: {times} times, median {middle:?}, longest {longest:?}"
            )?;
        }
        Ok(())
    }
}

#[test]
fn one_of_three_leads_whatever_is_killed_stopped_or_told_to_end() {
    let rounds = env::var("LEADER_ROUNDS").map_or(2, |rounds| rounds.parse().unwrap());
    let mut candidates = Candidates::start();
    let mut gaps = Gaps::default();
    let mut before_the_lease = 0;
    for _ in 0..rounds {
        // Killed. Its session ends its hold, long before its lease would have.
        let (name, _) = candidates.leader();
        let lease = candidates.server.run(format!("PTTL {LOCK}")).int();
        let at = micros();
        candidates.processes[name].signal(Signal::KILL);
        let next = candidates.next(at, name);
        let gap = gaps.add("killed", at, next.from);
        before_the_lease += u32::from(gap < Duration::from_millis(lease.unsigned_abs()));
        candidates.end(name);
        candidates.begin(name);
        candidates.all_campaign();

        // Stopped with its connections open: until its lease ends. When it goes on it must have
        // seen that another leads.
        let (name, at) = candidates.leader();
        candidates.processes[name].signal(Signal::STOP);
        let next = candidates.next(at, name);
        gaps.add("stopped", at, next.from);
        candidates.processes[name].signal(Signal::CONT);
        candidates.all_campaign();

        // Told to end: it resigns when its step is done.
        let (name, at) = candidates.leader();
        candidates.processes[name].signal(Signal::TERM);
        candidates.next(at, name);
        assert!(candidates.end(name), "{name} has failed");
        candidates.begin(name);
        candidates.all_campaign();

        // A planned move, since others wait.
        let (name, at) = candidates.leader();
        candidates.next(at, name);
    }
    for process in candidates.processes.values() {
        process.signal(Signal::TERM);
    }
    for name in NAMES {
        assert!(candidates.end(name), "{name} has failed");
    }
    let terms = candidates.terms();
    assert_eq!(trouble(&terms), None);
    for pair in terms.windows(2) {
        if let Some(at) = pair[0].resigned {
            gaps.add("resigned", at, pair[1].from);
        }
    }
    println!("{gaps}");
    // A busy machine may make one of them late.
    assert!(before_the_lease > 0, "a killed leader led on: {gaps}");
    let resigned = gaps.0.get("resigned").map_or(0, Vec::len);
    assert!(resigned >= 2 * rounds, "{gaps}");
    assert_eq!(candidates.server.holder(LOCK), None);
}

#[test]
fn two_leaders_at_a_time_are_noticed() {
    let judged = |lines: &[&str]| {
        let lines: Vec<_> = lines.iter().map(|line| Line::parse(line)).collect();
        trouble(&terms(&lines)).is_some()
    };
    let (ann, bob) = ("10 ann leads, with token 1", "20 bob leads, with token 2");
    assert!(!judged(&[bob, "30 bob leads, with token 2", ann]));
    assert!(!judged(&[
        ann,
        "15 ann resigns",
        "16 ann leads no more",
        bob
    ]));
    assert!(judged(&[ann, bob, "21 ann leads, with token 1"]));
    assert!(judged(&[ann, "9 ann resigns", bob]));
    assert!(judged(&[ann, "20 bob leads, with token 1"]));
}
