//! Locks that nobody else wants: take and give back, as fast as it goes.

use std::time::Instant;

use rlock_tests::Server;

use crate::numbers::{median, ratio};
use crate::scripts;
use crate::wire::{Wire, load, request};

const CONNECTIONS: usize = 50;
const OWNER: &str = "0b6bdc62-8d5c-4c0e-9d6f-6b8a5c1f2e3d:1234";

/// The requests that take a key, and those that give it back.
type Pair = [Vec<Vec<u8>>; 2];

/// A way to lock, and how many lines the replies to a pair have.
struct Contender {
    name: &'static str,
    pair: Box<dyn Fn(&str) -> Pair>,
    lines: usize,
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
        for _ in 0..rounds {
            for (load, results) in loads.iter_mut().zip(&mut results) {
                results.push(load.round(server, pairs));
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
    let set = |key: &str| request(&["SET", key, OWNER, "NX", "PX", "30000"]);
    vec![
        Contender {
            name: "RLOCK.ACQUIRE + RLOCK.RELEASE",
            pair: Box::new(|key| {
                let take = request(&["RLOCK.ACQUIRE", key, OWNER, "30000"]);
                [vec![take], vec![request(&["RLOCK.RELEASE", key, OWNER])]]
            }),
            lines: 4,
        },
        Contender {
            name: "SET NX PX + DEL",
            pair: Box::new(move |key| [vec![set(key)], vec![request(&["DEL", key])]]),
            lines: 2,
        },
        Contender {
            name: "SET NX PX + compare-and-delete script",
            pair: Box::new(move |key| {
                let give = request(&["EVALSHA", &compare_and_delete, "1", key, OWNER]);
                [vec![set(key)], vec![give]]
            }),
            lines: 2,
        },
        Contender {
            name: "re-entrant scripts with message and latch",
            pair: Box::new(move |key| {
                let (channel, latch) = (format!("released:{{{key}}}"), format!("latch:{{{key}}}"));
                let take = request(&["EVALSHA", &acquire, "1", key, "30000", OWNER]);
                let words = [
                    "EVALSHA", &release, "3", key, &channel, &latch, OWNER, "30000", "16000",
                ];
                [vec![take], vec![request(&words), request(&["DEL", &latch])]]
            }),
            lines: 3,
        },
    ]
}

/// The connections of a contender, and what each of them sends at a time.
struct Load {
    wires: Vec<Wire>,
    batches: Vec<Vec<Vec<u8>>>,
    lines: usize,
    pairs_at_a_time: usize,
}

impl Load {
    fn new(server: &Server, contender: &Contender, pipeline: usize) -> Self {
        let pairs = (pipeline / 2).max(1);
        let batches = (0..CONNECTIONS).map(|connection| {
            let (mut takes, mut gives) = (Vec::new(), Vec::new());
            for pair in 0..pairs {
                let [take, give] = (contender.pair)(&format!("lock:{connection}:{pair}"));
                takes.extend(take);
                gives.extend(give);
            }
            takes.append(&mut gives);
            // Without a pipeline each command waits for the one before.
            if pipeline == 1 {
                takes
            } else {
                vec![takes.concat()]
            }
        });
        let batches = batches.collect();
        let wires = (0..CONNECTIONS).map(|_| Wire::open(server)).collect();
        Self {
            wires,
            batches,
            lines: contender.lines * pairs,
            pairs_at_a_time: pairs,
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
        let steps = self.batches[0].len();
        let mut left = vec![self.lines; CONNECTIONS];
        for step in 0..steps {
            for (wire, batch) in self.wires.iter_mut().zip(&self.batches) {
                wire.send(&batch[step]);
            }
            for (wire, left) in self.wires.iter_mut().zip(&mut left) {
                // Of several steps each but the first has one line.
                let lines = if step == 0 { *left - (steps - 1) } else { 1 };
                wire.lines(lines);
                *left -= lines;
            }
        }
    }
}

/// The server's CPU time so far, in microseconds.
pub(crate) fn cpu_us(server: &Server) -> f64 {
    let seconds = |field| {
        server
            .info(field)
            .and_then(|text| text.parse::<f64>().ok())
            .unwrap_or(0.0)
    };
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
