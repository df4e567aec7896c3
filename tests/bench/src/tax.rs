//! Part 7: what the module costs a server that also does other things.

use rlock_tests::Server;

use crate::host::Host;
use crate::load::{CONNECTIONS, Load, Pace, all_of};
use crate::memory::bare_hash;
use crate::numbers::figure;
use crate::plot::{Bars, Group};
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};
use crate::uncontended::hold;
use crate::waiters::queue_elsewhere;
use crate::wire::{Step, Wire};

pub(crate) const PART: &str = "tax";

const WITHOUT: &str = "without the module";
/// The same once more, to see how far apart two servers are that do not differ.
const ONCE_MORE: &str = "without it once more";
const IDLE: &str = "loaded and idle";
const IN_USE: &str = "10 000 locks held";
const WAITERS: &str = "10 000 waiters";
const ALL: [&str; 5] = [WITHOUT, ONCE_MORE, IDLE, IN_USE, WAITERS];

const COMMANDS: [&str; 4] = ["SET", "GET", "INCR", "DEL"];
const BATCH: usize = 16;

/// A server, and the session connection of those who wait there, if any. Each has as many hashes,
/// locks or not: a larger keyspace costs by itself.
type Guest = (Host, Option<Wire>);

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &Pace::MEASURES);
    let mut guests: Vec<Guest> = ALL.iter().map(|name| guest(run, name)).collect();
    for command in COMMANDS {
        let mut loads: Vec<Load> = guests.iter().map(|(host, _)| load(host, command)).collect();
        for (load, (host, _)) in loads.iter_mut().zip(&mut guests) {
            load.round(host, run.length(50));
        }
        alternate(ALL.len(), run.rounds(9), |index, round| {
            let pace = loads[index].round(&mut guests[index].0, run.length(200));
            results.add(&at(command, BATCH), ALL[index], round, &pace.values());
        });
    }
    results
}

fn guest(run: &Run, name: &str) -> Guest {
    let many = run.at_most(10_000, 1000);
    let host = match name {
        WITHOUT | ONCE_MORE => run.host_of(Server::builder().without_module()),
        _ => run.host(),
    };
    if name == IN_USE {
        all_of(&host.server, (0..many).map(hold));
    } else {
        all_of(&host.server, (0..many).map(bare_hash));
    }
    let session_connection = (name == WAITERS).then(|| queue_elsewhere(&host.server, many));
    (host, session_connection)
}

/// One command, on keys of each connection's own. DEL needs keys, and so it comes with SET.
fn load(host: &Host, command: &str) -> Load {
    Load::new(&host.server, CONNECTIONS, BATCH, |connection| {
        let batch = (0..BATCH).map(|number| {
            let key = format!("{command}:{connection}:{number}");
            match command {
                "SET" => Step::of(&["SET", &key, "0123456789"], &["+OK"]),
                "GET" => Step::of(&["GET", &key], &["$-1"]),
                "INCR" => Step::of(&["INCR", &key], &[":"]),
                _ => Step::joined([
                    Step::of(&["SET", &key, "0123456789"], &["+OK"]),
                    Step::of(&["DEL", &key], &[":1"]),
                ]),
            }
        });
        vec![Step::joined(batch)]
    })
}

/// DEL stands for the pair that it is measured in.
fn label(command: &str) -> &str {
    if command == "DEL" {
        "SET + DEL"
    } else {
        command
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("7. Tax");
    report.says(
        "Commands that touch no lock, pipeline 16, beside 10 000 hashes that are locks or not: \
         thousands a second without the module, and how much of that is left in the other cases. \
         The second server without the module shows how far apart two are that do not differ.",
    );
    let rows: Vec<_> = COMMANDS
        .iter()
        .map(|command| {
            let at = at(command, BATCH);
            let left = ALL.iter().skip(1);
            let left = left.map(|name| results.ratio(&at, "per_second", name, WITHOUT).to_string());
            let speed = figure(results.median(&at, WITHOUT, "per_second") / 1e3);
            [label(command).to_owned(), speed]
                .into_iter()
                .chain(left)
                .collect()
        })
        .collect();
    report.table(&[&[""][..], &ALL].concat(), &rows);
    let left = |command, name| results.ratio(&at(command, BATCH), "per_second", name, WITHOUT);
    report.at_least(
        "SET with the module idle, against none",
        0.99,
        left("SET", IDLE),
    );
    report.at_least("GET …", 0.99, left("GET", IDLE));
    report.at_least(
        "SET with 10,000 waiters, against none",
        0.97,
        left("SET", WAITERS),
    );
    report.at_least("GET …", 0.97, left("GET", WAITERS));
    report.at_least("INCR …", 0.97, left("INCR", WAITERS));
    report.at_least("SET + DEL …", 0.97, left("DEL", WAITERS));
    report
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let groups = COMMANDS.iter().map(|command| {
        let at = at(command, BATCH);
        let bar = |name: &str| (name.to_owned(), results.spread(&at, name, "per_second"));
        Group {
            name: label(command).to_owned(),
            bars: ALL.map(bar).to_vec(),
        }
    });
    let plot = Bars {
        title: "Commands that touch no lock",
        unit: "million per second",
        scale: 1e-6,
        groups: groups.collect(),
    };
    vec![("tax", plot.draw())]
}
