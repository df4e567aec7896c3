//! Locks that nobody else wants: take and give back, as fast as it goes.

use std::time::Instant;

use rlock_tests::Server;

use crate::numbers::{median, order, ratio};
use crate::scripts;
use crate::wire::{Wire, load, request};

const CONNECTIONS: usize = 50;
const OWNER: &str = "0b6bdc62-8d5c-4c0e-9d6f-6b8a5c1f2e3d:1234";

/// What is sent, and the lines of the replies to it.
#[derive(Default)]
struct Step {
    bytes: Vec<u8>,
    lines: Vec<&'static str>,
}

impl Step {
    fn of(words: &[&str], lines: &[&'static str]) -> Self {
        Self {
            bytes: request(words),
            lines: lines.to_vec(),
        }
    }

    fn append(&mut self, other: Self) {
        self.bytes.extend(other.bytes);
        self.lines.extend(other.lines);
    }
}

/// How a key is taken and given back.
struct Pair {
    take: Step,
    give: Step,
    /// Sent after the reply to `give` and not waited for: it goes out with the next `take`.
    afterwards: Step,
}

/// A way to lock.
struct Contender {
    name: &'static str,
    pair: Box<dyn Fn(&str) -> Pair>,
}

/// What one round of a contender gave.
struct Round {
    pairs_per_second: f64,
    cpu_us_per_pair: f64,
}

pub(crate) fn measure(server: &Server, quick: bool) {
    println!("Uncontended, {CONNECTIONS} connections, each its own keys: take + give back");
    let contenders = contenders(server);
    for pipeline in [1, 16] {
        let rounds = if quick { 3 } else { 9 };
        let pairs = match (quick, pipeline) {
            (true, _) => 20_000,
            (false, 1) => 60_000,
            (false, _) => 200_000,
        };
        let mut results: Vec<Vec<Round>> = contenders.iter().map(|_| Vec::new()).collect();
        let mut loads: Vec<Load> = contenders
            .iter()
            .map(|contender| Load::new(server, contender, pipeline))
            .collect();
        for load in &mut loads {
            load.round(server, pairs / 10);
        }
        for round in 0..rounds {
            for index in order(contenders.len(), round) {
                results[index].push(loads[index].round(server, pairs));
            }
        }
        print(pipeline, &contenders, &results);
    }
}

fn contenders(server: &Server) -> Vec<Contender> {
    let mut wire = Wire::open(server);
    let compare_and_delete = load(&mut wire, scripts::COMPARE_AND_DELETE);
    let acquire = load(&mut wire, scripts::ACQUIRE);
    let release = load(&mut wire, scripts::RELEASE);
    let set = |key: &str| Step::of(&["SET", key, OWNER, "NX", "PX", "30000"], &["+OK"]);
    let nothing = Step::default;
    vec![
        Contender {
            name: "RLOCK.ACQUIRE + RLOCK.RELEASE",
            pair: Box::new(move |key| Pair {
                take: Step::of(&["RLOCK.ACQUIRE", key, OWNER, "30000"], &["*2", ":1", ":"]),
                give: Step::of(&["RLOCK.RELEASE", key, OWNER], &[":0"]),
                afterwards: nothing(),
            }),
        },
        Contender {
            name: "SET NX PX + DEL",
            pair: Box::new(move |key| Pair {
                take: set(key),
                give: Step::of(&["DEL", key], &[":1"]),
                afterwards: nothing(),
            }),
        },
        Contender {
            name: "SET NX PX + compare-and-delete script",
            pair: Box::new(move |key| Pair {
                take: set(key),
                give: Step::of(&["EVALSHA", &compare_and_delete, "1", key, OWNER], &[":1"]),
                afterwards: nothing(),
            }),
        },
        Contender {
            name: "re-entrant scripts with message and latch",
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
    ]
}

/// The connections of a contender, and what each of them sends, step by step.
struct Load {
    connections: Vec<(Wire, Vec<Step>)>,
    pairs_at_a_time: usize,
}

impl Load {
    fn new(server: &Server, contender: &Contender, pipeline: usize) -> Self {
        let pairs_at_a_time = (pipeline / 2).max(1);
        let connections = (0..CONNECTIONS).map(|connection| {
            let (mut first, mut gives) = (Step::default(), Step::default());
            let mut takes = Step::default();
            for number in 0..pairs_at_a_time {
                let pair = (contender.pair)(&format!("lock:{connection}:{number}"));
                first.append(pair.afterwards);
                takes.append(pair.take);
                gives.append(pair.give);
            }
            first.append(takes);
            // Without a pipeline the release waits for the grant.
            let steps = if pipeline == 1 {
                vec![first, gives]
            } else {
                first.append(gives);
                vec![first]
            };
            (Wire::open(server), steps)
        });
        Self {
            connections: connections.collect(),
            pairs_at_a_time,
        }
    }

    fn round(&mut self, server: &Server, pairs: usize) -> Round {
        let cpu_before = cpu_us(server);
        let begun = Instant::now();
        let turns = pairs / (CONNECTIONS * self.pairs_at_a_time);
        for _ in 0..turns {
            self.turn();
        }
        let seconds = begun.elapsed().as_secs_f64();
        let done = (turns * CONNECTIONS * self.pairs_at_a_time) as f64;
        Round {
            pairs_per_second: done / seconds,
            cpu_us_per_pair: (cpu_us(server) - cpu_before) / done,
        }
    }

    /// Every connection sends, then every connection reads.
    fn turn(&mut self) {
        for step in 0..self.connections[0].1.len() {
            for (wire, steps) in &mut self.connections {
                wire.send(&steps[step].bytes);
            }
            for (wire, steps) in &mut self.connections {
                wire.expect(steps[step].lines.iter().copied());
            }
        }
    }
}

/// The server's CPU time so far, in microseconds.
pub(crate) fn cpu_us(server: &Server) -> f64 {
    let seconds = |field| server.info(field).unwrap().parse::<f64>().unwrap();
    (seconds("used_cpu_user") + seconds("used_cpu_sys")) * 1e6
}

fn print(pipeline: usize, contenders: &[Contender], results: &[Vec<Round>]) {
    let speeds: Vec<Vec<f64>> = results
        .iter()
        .map(|rounds| rounds.iter().map(|round| round.pairs_per_second).collect())
        .collect();
    println!("\n  pipeline {pipeline:<30} pairs/s   CPU us/pair   RLOCK's pairs/s against it");
    for (index, contender) in contenders.iter().enumerate() {
        let cpu: Vec<f64> = results[index]
            .iter()
            .map(|round| round.cpu_us_per_pair)
            .collect();
        let against = ratio(&speeds[0], &speeds[index]);
        let (speed, cpu) = (median(&speeds[index]), median(&cpu));
        println!(
            "  {:<41} {speed:>8.0} {cpu:>10.2}      {against}",
            contender.name
        );
    }
    println!();
}
