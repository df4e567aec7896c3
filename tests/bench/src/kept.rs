//! Part 8: a lock that is kept for its next use, against the same lock taken from the server each
//! time: by one task alone, and while another process wants it now and then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rlock_client::{Client, Lock, blocking};
use tokio::runtime::{Builder, Runtime};

use crate::host::Host;
use crate::numbers::{count, figure, median};
use crate::plot::Lines;
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};

pub(crate) const PART: &str = "kept";

const KEPT: &str = "kept";
const EACH_TIME: &str = "asked for each time";
const ALL: [&str; 2] = [KEPT, EACH_TIME];

/// How often a second another process takes it.
const WANTED: &str = "wanted a second";
const WANTS: [u64; 5] = [0, 1, 10, 100, 1000];

const MEASURES: [&str; 2] = ["locks_per_second", "others_wait_us"];

/// Longer than the benchmark.
const IDLE: Duration = Duration::from_secs(3600);
/// A reply that is late on a busy machine is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &MEASURES);
    let host = run.host();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(connect(&host));
    for wants in run.up_to(10, &WANTS) {
        alternate(ALL.len(), run.rounds(7), |index, round| {
            let lock = client.lock("kept");
            let lock = if ALL[index] == KEPT {
                lock.keep(IDLE)
            } else {
                lock
            };
            let others = Others::want(&host, wants);
            let speed = again_and_again(&runtime, &lock, run.length(1000));
            let waits = others.end();
            results.add(
                &at(WANTED, wants),
                ALL[index],
                round,
                &[speed, median(&waits)],
            );
            // The kept lock goes back, for the next contender.
            runtime.block_on(async {
                let other = client.lock("kept").lock().await.unwrap();
                other.unlock().await.unwrap();
            });
        });
    }
    results
}

async fn connect(host: &Host) -> Client {
    let url = format!("redis://{}", host.server.address());
    let patient = Client::builder().response_timeout(PATIENCE).grace(PATIENCE);
    patient.connect(&url).await.unwrap()
}

/// How many pairs of `lock()` and `unlock()` one task makes in a second.
fn again_and_again(runtime: &Runtime, lock: &Lock, length: Duration) -> f64 {
    runtime.block_on(async {
        // So that it is there, if it is kept.
        lock.lock().await.unwrap().unlock().await.unwrap();
        let begun = Instant::now();
        let mut pairs = 0_u64;
        while begun.elapsed() < length {
            lock.lock().await.unwrap().unlock().await.unwrap();
            pairs += 1;
        }
        pairs as f64 / begun.elapsed().as_secs_f64()
    })
}

/// Another process, as far as the server is concerned: a client with connections of its own.
struct Others {
    over: Arc<AtomicBool>,
    waits: JoinHandle<Vec<f64>>,
}

impl Others {
    fn want(host: &Host, a_second: u64) -> Self {
        let url = format!("redis://{}", host.server.address());
        let over = Arc::<AtomicBool>::default();
        let until = Arc::clone(&over);
        let waits = thread::spawn(move || {
            let mut waits = Vec::new();
            if a_second == 0 {
                return waits;
            }
            let client = blocking::Client::connect(&url).unwrap();
            let every = Duration::from_secs(1) / u32::try_from(a_second).unwrap();
            thread::sleep(every / 2);
            while !until.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let guard = client.lock("kept").lock().unwrap();
                waits.push(begun.elapsed().as_secs_f64() * 1e6);
                guard.unlock().unwrap();
                thread::sleep(every.saturating_sub(begun.elapsed()));
            }
            waits
        });
        Self { over, waits }
    }

    /// How long each of its waits was, in microseconds.
    fn end(self) -> Vec<f64> {
        self.over.store(true, Ordering::Relaxed);
        self.waits.join().unwrap()
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("8. A lock that is kept for its next use");
    report.says(
        "One task takes one lock and gives it back, again and again: kept \
         (`client.lock(name).keep(idle)`), and asked for each time. Meanwhile another process \
         takes the lock so often a second; how long it then waits is the median of its waits.",
    );
    let rows: Vec<_> = results
        .sizes(WANTED)
        .into_iter()
        .map(|wants| {
            let at = at(WANTED, wants);
            let speed = |name| figure(results.median(&at, name, "locks_per_second"));
            let wait = |name| figure(results.median(&at, name, "others_wait_us"));
            let [kept, each_time] = ALL;
            vec![
                count(wants),
                speed(kept),
                speed(each_time),
                results
                    .ratio(&at, "locks_per_second", kept, each_time)
                    .to_string(),
                wait(kept),
                wait(each_time),
            ]
        })
        .collect();
    report.table(
        &[
            WANTED,
            "kept, locks/s",
            "each time, locks/s",
            "kept against each time",
            "kept, the other's wait µs",
            "each time, the other's wait µs",
        ],
        &rows,
    );
    let alone = at(WANTED, 0_u64);
    let speed = results.spread(&alone, KEPT, "locks_per_second");
    report.at_least("a kept lock alone, pairs a second", 1e6, speed);
    report.at_least(
        "… against the same without `keep`",
        100.0,
        results.ratio(&alone, "locks_per_second", KEPT, EACH_TIME),
    );
    report
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let curve = |name: &str| {
        let sizes = results.sizes(WANTED).into_iter();
        let points = sizes.filter(|wants| *wants > 0).map(|wants| {
            let speed = results.median(&at(WANTED, wants), name, "locks_per_second");
            (wants, speed)
        });
        (name.to_owned(), points.collect())
    };
    let plot = Lines {
        title: "One task and one lock: taken and given back per second",
        over: "takes per second by another process",
        unit: "per second",
        curves: ALL.map(curve).to_vec(),
    };
    vec![("kept", plot.draw())]
}
