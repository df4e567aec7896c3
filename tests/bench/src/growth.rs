//! Part 5: what an operation costs the server when there is more and more of everything.

use std::time::Instant;

use crate::hand_over::{Circle, Queued};
use crate::host::Host;
use crate::load::{CONNECTIONS, Load, all_of};
use crate::numbers::{Spread, count, figure};
use crate::plot::Lines;
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};
use crate::uncontended::{OWNER, hold, rlock_load, set_load};
use crate::waiters::session_connection;
use crate::wire::{Step, Wire, request};

pub(crate) const PART: &str = "growth";

const HELD: &str = "locks held";
const WAITERS: &str = "waiters on one lock";
const SESSIONS: &str = "sessions";

const PAIR: &str = "ACQUIRE + RELEASE";
const SET_DEL: &str = "SET + DEL beside them";
const RENEW: &str = "RENEW";
const PEXPIRE: &str = "PEXPIRE of the same keys";
const HAND_OVER: &str = "hand-over and a new wait";
const SESSION_PAIR: &str = "ACQUIRE SESSION + RELEASE";
const LINES: [(&str, &[&str]); 3] = [
    (HELD, &[PAIR, SET_DEL, RENEW, PEXPIRE]),
    (WAITERS, &[HAND_OVER]),
    (SESSIONS, &[SESSION_PAIR]),
];

/// Requests at a time on one connection.
const BATCH: usize = 16;

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &["cpu_us", "per_second"]);
    held(run, &mut results);
    waiters(run, &mut results);
    sessions(run, &mut results);
    results
}

/// Locks that are held, and all of them renewed, up to 100,000 in a circle.
fn held(run: &Run, results: &mut Results) {
    let mut host = run.host();
    let mut held = 0;
    for locks in run.up_to(10_000, &[1000, 10_000, 100_000, 1_000_000]) {
        all_of(&host.server, (held..locks).map(hold));
        held = locks;
        let mut loads = [
            rlock_load(&host.server, BATCH),
            set_load(&host.server, BATCH),
            renewals(&host, locks, |name| {
                Step::of(&["RLOCK.RENEW", name, OWNER, "3600000"], &[":1"])
            }),
            renewals(&host, locks, |name| {
                Step::of(&["PEXPIRE", name, "3600000"], &[":1"])
            }),
        ];
        alternate(loads.len(), run.rounds(5), |index, round| {
            let pace = loads[index].round(&mut host, run.length(250));
            let name = LINES[0].1[index];
            results.add(
                &at(HELD, locks),
                name,
                round,
                &[pace.cpu_us, pace.per_second],
            );
        });
    }
}

/// Says that about each of the locks in turn, those of one connection far apart.
fn renewals(host: &Host, locks: u64, say: impl Fn(&str) -> Step) -> Load {
    let each = (locks.min(100_000) / CONNECTIONS as u64).max(1);
    Load::new(
        &host.server,
        CONNECTIONS,
        usize::try_from(each).unwrap(),
        |connection| {
            let first = connection as u64 * each;
            let numbers: Vec<u64> = (first..first + each).collect();
            // 7919 is prime to all the sizes, so each lock has its turn.
            let steps = numbers.chunks(BATCH).map(|numbers| {
                let names = numbers
                    .iter()
                    .map(|number| format!("held:{}", number * 7919 % locks));
                Step::joined(names.map(|name| say(&name)))
            });
            steps.collect()
        },
    )
}

fn waiters(run: &Run, results: &mut Results) {
    let mut host = run.host();
    for waiters in run.up_to(1000, &[1, 10, 100, 1000, 10_000]) {
        let mut circle = Queued::new(&host, waiters);
        for round in 0..run.rounds(5) {
            let cpu_before = host.cpu_us();
            let begun = Instant::now();
            let mut done = 0;
            while begun.elapsed() < run.length(250) {
                circle.hand_over();
                done += 1;
            }
            let seconds = begun.elapsed().as_secs_f64();
            let (cpu, done) = (host.cpu_us() - cpu_before, f64::from(done));
            let values = [cpu / done, done / seconds];
            results.add(&at(WAITERS, waiters), HAND_OVER, round, &values);
        }
    }
}

fn sessions(run: &Run, results: &mut Results) {
    let mut host = run.host();
    let mut session_connections = Vec::new();
    for sessions in run.up_to(1000, &[1, 10, 100, 1000, 10_000]) {
        while (session_connections.len() as u64) < sessions {
            let name = format!("session:{}", session_connections.len());
            let connection = session_connection(&host.server, &name);
            session_connections.push((name, connection));
        }
        // Ten thousand pairs, each for the next session.
        let each = 200;
        let mut load = Load::new(&host.server, CONNECTIONS, each, |connection| {
            let pairs: Vec<Step> = (0..each)
                .map(|number| session_pair(connection * each + number, sessions))
                .collect();
            pairs
                .chunks(BATCH / 2)
                .map(|pairs| Step::joined(pairs.to_vec()))
                .collect()
        });
        for round in 0..run.rounds(5) {
            // The load comes by connections that are not bound to the sessions, so each session is
            // told of its releases.
            for (name, connection) in &mut session_connections {
                hear_all(name, connection);
            }
            let pace = load.round(&mut host, run.length(250));
            let values = [pace.cpu_us, pace.per_second];
            results.add(&at(SESSIONS, sessions), SESSION_PAIR, round, &values);
        }
    }
}

/// Hears all events of a session. One reply has a part of them, and each call acknowledges those
/// that were told before.
fn hear_all(name: &str, connection: &mut Wire) {
    let events = request(&["RLOCK.EVENTS", name]);
    let end = request(&["PING"]);
    let mut is_last = false;
    while !is_last {
        connection.send(&[&*events, &*end].concat());
        loop {
            match connection.line() {
                b"+PONG" => break,
                line => is_last |= line == b"*0",
            }
        }
    }
}

fn session_pair(number: usize, sessions: u64) -> Step {
    let (name, session) = (
        format!("lock:{number}"),
        format!("session:{}", number as u64 % sessions),
    );
    let acquire = ["RLOCK.ACQUIRE", &name, OWNER, "30000", "SESSION", &session];
    let release = ["RLOCK.RELEASE", &name, OWNER];
    Step::joined([
        Step::of(&acquire, &["*2", ":1", ":"]),
        Step::of(&release, &[":0"]),
    ])
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("5. Growth");
    report.says(
        "The server's CPU time for one operation, in µs, pipeline 16; and the last column against \
         the first. A hand-over here is RELEASE, EVENTS, PING and the ACQUIRE of the next wait, \
         one after the other. SET + DEL and PEXPIRE show what a larger keyspace costs plain \
         commands.",
    );
    for (case, names) in LINES {
        let sizes = results.sizes(case);
        let Some((first, last)) = sizes.first().zip(sizes.last()) else {
            continue;
        };
        let rows: Vec<_> = names
            .iter()
            .map(|name| {
                let costs = sizes
                    .iter()
                    .map(|size| figure(results.median(&at(case, *size), name, "cpu_us")));
                let of = |size| results.values(&at(case, size), name, "cpu_us");
                let growth = Spread::of_ratios(&of(*last), &of(*first)).to_string();
                [(*name).to_owned()]
                    .into_iter()
                    .chain(costs)
                    .chain([growth])
                    .collect()
            })
            .collect();
        let counts: Vec<String> = sizes.iter().map(|size| count(*size)).collect();
        let head: Vec<&str> = [case]
            .into_iter()
            .chain(counts.iter().map(String::as_str))
            .chain(["last against first"])
            .collect();
        report.table(&head, &rows);
    }
    let sizes = results.sizes(HELD);
    if let Some(at_100_000) = sizes.iter().find(|size| **size == 100_000) {
        let at = at(HELD, *at_100_000);
        let second = results.median(&at, RENEW, "per_second");
        let words = "100,000 locks are renewed in";
        report.says(&format!("{words} {} ms.", figure(1e8 / second)));
    }
    report
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let line = |case: &str, name: &str| {
        let sizes = results.sizes(case).into_iter();
        let points = sizes.map(|size| (size, results.median(&at(case, size), name, "cpu_us")));
        (format!("{name}: {case}"), points.collect())
    };
    let plot = Lines {
        title: "CPU time of an operation, by the number of locks, waiters or sessions",
        over: "number",
        unit: "µs of CPU time",
        curves: vec![
            line(HELD, PAIR),
            line(HELD, SET_DEL),
            line(HELD, RENEW),
            line(HELD, PEXPIRE),
            line(WAITERS, HAND_OVER),
            line(SESSIONS, SESSION_PAIR),
        ],
    };
    vec![("growth", plot.draw())]
}
