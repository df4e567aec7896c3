//! Part 1: uncontended locks. Take and give back, as fast as it goes.

use rlock_tests::{Reply, Server};

use crate::host::Host;
use crate::load::{CONNECTIONS, Load, Pace, all_of};
use crate::numbers::figure;
use crate::plot::{Bars, Group};
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};
use crate::waiters::queue_elsewhere;
use crate::wire::{Step, Wire};
use rlock_tests::scripts;

pub(crate) const PART: &str = "uncontended";
/// A client uuid and a number, as Redisson and the crate write them.
pub(crate) const OWNER: &str = "0b6bdc62-8d5c-4c0e-9d6f-6b8a5c1f2e3d:1234";

pub(crate) const RLOCK: &str = "RLOCK.ACQUIRE + RLOCK.RELEASE";
pub(crate) const SET_DEL: &str = "SET NX PX + DEL";
pub(crate) const COMPARE: &str = "SET NX PX + compare-and-delete script";
pub(crate) const NATIVE: &str = "SET NX PX + DELEX or DELIFEQ";
const SCRIPTS: &str = "re-entrant scripts with message and latch";

const ALONE: &str = "alone";
const PUBLISH_OFF: &str = "rlock.publish off";
const AOF: &str = "AOF (everysec)";
const REPLICA: &str = "with a replica";
const HELD: &str = "1 million locks held";
const WAITERS: &str = "10 000 waiters elsewhere";
const CONDITIONS: [&str; 6] = [ALONE, PUBLISH_OFF, AOF, REPLICA, HELD, WAITERS];

/// How a key is taken and given back.
struct Pair {
    take: Step,
    give: Step,
    /// Sent after the reply to `give` and not waited for: it goes out with the next `take`.
    afterwards: Step,
}

/// A way to lock.
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    pair: Box<dyn Fn(&str) -> Pair>,
}

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &Pace::MEASURES);
    let mut host = run.host();
    fight(run, &mut host, ALONE, &[1, 16, 128], 9, &mut results);
    host.does("CONFIG SET rlock.publish off");
    fight(run, &mut host, PUBLISH_OFF, &[1, 16], 7, &mut results);
    host.does("CONFIG SET rlock.publish auto");

    all_of(&host.server, (0..run.at_most(1_000_000, 10_000)).map(hold));
    fight(run, &mut host, HELD, &[1, 16], 5, &mut results);
    host.does("FLUSHALL");
    let session_connection = queue_elsewhere(&host.server, run.at_most(10_000, 1000));
    fight(run, &mut host, WAITERS, &[1, 16], 5, &mut results);
    drop(session_connection);

    let aof = Server::builder()
        .config("appendonly yes")
        .config("appendfsync everysec");
    let mut host = run.host_of(aof);
    fight(run, &mut host, AOF, &[1, 16], 5, &mut results);
    // The replica runs where the load does, so the primary has its core for itself.
    let mut host = run.host();
    let _replica = replica_of(&host.server);
    fight(run, &mut host, REPLICA, &[1, 16], 5, &mut results);
    results
}

/// Every contender with these pipelines, under one condition.
fn fight(
    run: &Run,
    host: &mut Host,
    case: &str,
    pipelines: &[usize],
    rounds: usize,
    results: &mut Results,
) {
    let contenders = contenders(&host.server);
    for pipeline in pipelines {
        let mut loads: Vec<Load> = contenders
            .iter()
            .map(|contender| contender.load(&host.server, *pipeline))
            .collect();
        for load in &mut loads {
            load.round(host, run.length(50));
        }
        alternate(contenders.len(), run.rounds(rounds), |index, round| {
            let pace = loads[index].round(host, run.length(300));
            let name = contenders[index].name;
            results.add(&at(case, *pipeline), name, round, &pace.values());
        });
    }
}

fn replica_of(primary: &Server) -> Server {
    let replica = Server::start();
    replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    rlock_tests::until("the replica is connected", || {
        let status = replica.info("master_link_status");
        status.is_some_and(|status| status == "up")
    });
    rlock_tests::in_sync(primary, &replica);
    replica
}

/// Takes a lock that is held all the time, by one owner for an hour.
pub(crate) fn hold(number: u64) -> Step {
    let name = format!("held:{number}");
    Step::of(
        &["RLOCK.ACQUIRE", &name, OWNER, "3600000"],
        &["*2", ":1", ":"],
    )
}

/// Takes and gives back locks with RLOCK: the load of other parts as well.
pub(crate) fn rlock_load(server: &Server, pipeline: usize) -> Load {
    rlock().load(server, pipeline)
}

/// `SET` and `DEL`, likewise.
pub(crate) fn set_load(server: &Server, pipeline: usize) -> Load {
    set_del().load(server, pipeline)
}

fn rlock() -> Contender {
    Contender {
        name: RLOCK,
        pair: Box::new(|key| Pair {
            take: Step::of(&["RLOCK.ACQUIRE", key, OWNER, "30000"], &["*2", ":1", ":"]),
            give: Step::of(&["RLOCK.RELEASE", key, OWNER], &[":0"]),
            afterwards: Step::default(),
        }),
    }
}

fn set(key: &str) -> Step {
    Step::of(&["SET", key, OWNER, "NX", "PX", "30000"], &["+OK"])
}

fn set_del() -> Contender {
    Contender {
        name: SET_DEL,
        pair: Box::new(move |key| Pair {
            take: set(key),
            give: Step::of(&["DEL", key], &[":1"]),
            afterwards: Step::default(),
        }),
    }
}

pub(crate) fn contenders(server: &Server) -> Vec<Contender> {
    let mut wire = Wire::open(server);
    let compare_and_delete = wire.load(scripts::COMPARE_AND_DELETE);
    let acquire = wire.load(scripts::ACQUIRE);
    let release = wire.load(scripts::RELEASE);
    let mut contenders = vec![
        rlock(),
        set_del(),
        Contender {
            name: COMPARE,
            pair: Box::new(move |key| Pair {
                take: set(key),
                give: Step::of(&["EVALSHA", &compare_and_delete, "1", key, OWNER], &[":1"]),
                afterwards: Step::default(),
            }),
        },
        Contender {
            name: SCRIPTS,
            pair: Box::new(move |key| {
                let (channel, latch) = (format!("released:{{{key}}}"), format!("latch:{{{key}}}"));
                let words = [
                    "EVALSHA", &release, "3", key, &channel, &latch, OWNER, "30000", "16000",
                ];
                Pair {
                    take: Step::of(&["EVALSHA", &acquire, "1", key, "30000", OWNER], &["$-1"]),
                    give: Step::of(&words, &[":1"]),
                    // The first DEL of all finds no latch yet.
                    afterwards: Step::of(&["DEL", &latch], &[":"]),
                }
            }),
        },
    ];
    contenders.extend(native(server));
    contenders
}

/// The safe release that newer servers have as a command: `DELEX` in Redis from 8.4 on, `DELIFEQ`
/// in Valkey from 9.0 on.
fn native(server: &Server) -> Option<Contender> {
    let has = |command: &str| {
        let info = server.run(format!("COMMAND INFO {command}"));
        matches!(info.array(), [Reply::Array(_)])
    };
    let (command, condition) = if has("DELIFEQ") {
        ("DELIFEQ", None)
    } else if has("DELEX") {
        ("DELEX", Some("IFEQ"))
    } else {
        return None;
    };
    Some(Contender {
        name: NATIVE,
        pair: Box::new(move |key| {
            let words: Vec<&str> = [command, key]
                .into_iter()
                .chain(condition)
                .chain([OWNER])
                .collect();
            Pair {
                take: set(key),
                give: Step::of(&words, &[":1"]),
                afterwards: Step::default(),
            }
        }),
    })
}

impl Contender {
    pub(crate) fn load(&self, server: &Server, pipeline: usize) -> Load {
        let pairs = (pipeline / 2).max(1);
        Load::new(server, CONNECTIONS, pairs, |connection| {
            let (mut first, mut takes, mut gives) = <(Step, Step, Step)>::default();
            for number in 0..pairs {
                let pair = (self.pair)(&format!("lock:{connection}:{number}"));
                first.append(pair.afterwards);
                takes.append(pair.take);
                gives.append(pair.give);
            }
            first.append(takes);
            if pipeline > 1 {
                first.append(gives);
                return vec![first];
            }
            // Without a pipeline the release waits for the grant.
            vec![first, gives]
        })
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("1. Uncontended");
    report.says(
        "50 connections, each with keys of its own, take a lock and give it back. Pairs a second, \
         the server's CPU time for a pair, and the part of the time in which the server was busy. \
         Where that is well below 1, the load is the slower side, and draws the ratios towards 1; \
         those of the CPU time do not depend on it.",
    );
    for pipeline in results.sizes(ALONE) {
        report.table(
            &[
                &format!("pipeline {pipeline}"),
                "pairs/s",
                "CPU µs",
                "busy",
                "RLOCK's pairs/s against it",
                "the same by CPU time",
            ],
            &rows_of(results, pipeline),
        );
    }
    report.says("RLOCK's pairs a second under other conditions, and against the others there:");
    let rows: Vec<_> = CONDITIONS
        .iter()
        .flat_map(|case| {
            results
                .sizes(case)
                .into_iter()
                .map(move |size| (*case, size))
        })
        .map(|(case, pipeline)| {
            let at = at(case, pipeline);
            let against = |other| results.ratio(&at, "per_second", RLOCK, other).to_string();
            vec![
                format!("{case}, pipeline {pipeline}"),
                figure(results.median(&at, RLOCK, "per_second")),
                against(SET_DEL),
                against(COMPARE),
                against(SCRIPTS),
            ]
        })
        .collect();
    report.table(
        &["", "pairs/s", SET_DEL, "compare-and-delete", "scripts"],
        &rows,
    );
    targets(results, &mut report);
    let against =
        |pipeline: u64, other| results.ratio(&at(ALONE, pipeline), "per_second", RLOCK, other);
    report.gain = Some(format!(
        "- A server takes and gives back {} times as many locks per second as with re-entrant \
         scripts.",
        against(16, SCRIPTS),
    ));
    report.cost = Some(format!(
        "- Plain `SET NX PX` + `DEL`, which is not a safe lock, is faster: RLOCK reaches {} of its \
         pairs per second, and {} with 16 commands in a pipeline. Of the safe `SET NX PX` + \
         compare-and-delete script, which nobody can wait for, RLOCK reaches {} and {}.",
        against(1, SET_DEL),
        against(16, SET_DEL),
        against(1, COMPARE),
        against(16, COMPARE),
    ));
    report
}

fn rows_of(results: &Results, pipeline: u64) -> Vec<Vec<String>> {
    let at = at(ALONE, pipeline);
    let row = |name: String| {
        let name = name.as_str();
        vec![
            name.to_owned(),
            figure(results.median(&at, name, "per_second")),
            figure(results.median(&at, name, "cpu_us")),
            figure(results.median(&at, name, "server_busy")),
            results.ratio(&at, "per_second", RLOCK, name).to_string(),
            results.ratio(&at, "cpu_us", name, RLOCK).to_string(),
        ]
    };
    results.contenders(&at).into_iter().map(row).collect()
}

fn targets(results: &Results, report: &mut Report) {
    let against = |case, pipeline: u64, other| {
        let at = at(case, pipeline);
        results.ratio(&at, "per_second", RLOCK, other)
    };
    report.at_least(
        "pairs/s against `SET` + `DEL`, pipeline 16",
        0.53,
        against(ALONE, 16, SET_DEL),
    );
    report.at_least(
        "… against the scripts, pipeline 16",
        3.2,
        against(ALONE, 16, SCRIPTS),
    );
    report.at_least(
        "… against `SET` + `DEL`, pipeline 16, `rlock.publish off`",
        0.58,
        against(PUBLISH_OFF, 16, SET_DEL),
    );
    report.at_least(
        "… against `SET` + `DEL`, no pipeline",
        0.85,
        against(ALONE, 1, SET_DEL),
    );
    report.at_least(
        "… against the scripts, no pipeline",
        2.1,
        against(ALONE, 1, SCRIPTS),
    );
    report.at_least(
        "… against `SET` + compare-and-delete, pipeline 16",
        1.0,
        against(ALONE, 16, COMPARE),
    );
    report.at_least("… pipeline 128", 1.0, against(ALONE, 128, COMPARE));
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let groups = |measure: &str| {
        let groups = results.sizes(ALONE).into_iter().map(|pipeline| {
            let at = at(ALONE, pipeline);
            let bar = |name: &str| (name.to_owned(), results.spread(&at, name, measure));
            Group {
                name: format!("pipeline {pipeline}"),
                bars: results
                    .contenders(&at)
                    .iter()
                    .map(|name| bar(name))
                    .collect(),
            }
        });
        groups.collect()
    };
    let speed = Bars {
        title: "Uncontended: take and give back",
        unit: "thousand pairs per second",
        scale: 1e-3,
        groups: groups("per_second"),
    };
    let cost = Bars {
        title: "Uncontended: what a pair costs the server",
        unit: "µs of CPU time",
        scale: 1.0,
        groups: groups("cpu_us"),
    };
    vec![
        ("uncontended-speed", speed.draw()),
        ("uncontended-cost", cost.draw()),
    ]
}
