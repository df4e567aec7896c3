//! Part 4: the crate against what a Rust user would pick instead, each on its own terms, all in
//! this process, on one thread; and against Redisson, in a process of its own.

use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redis::AsyncConnectionConfig;
use redis::aio::{ConnectionManagerConfig, MultiplexedConnection};
use tokio::runtime::Runtime;
use tokio::task::{LocalSet, spawn_blocking, spawn_local};

use crate::allocations;
use crate::host::Host;
use crate::numbers::{Spread, figure, quantile};
use crate::plot::{Bars, Group};
use crate::redisson::Redisson;
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};
use rlock_tests::scripts;

pub(crate) const PART: &str = "crates";

const RLOCK: &str = "rlock-client";
const BY_HAND: &str = "redis: SET NX PX by hand";
const RSLOCK: &str = "rslock 0.10";
const RLOCK_0_2: &str = "rlock 0.2";
const REDISSON: &str = "Redisson (Java)";
const ALL: [&str; 5] = [RLOCK, BY_HAND, RSLOCK, RLOCK_0_2, REDISSON];

const OWN: &str = "a lock each";
const SHARED: &str = "one lock";
pub(crate) const LEASE: Duration = Duration::from_secs(30);
/// A reply that is late on a busy machine is waited for, by all that can be told to.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// How many fight for one lock.
const FIGHTERS: usize = 16;

const MEASURES: [&str; 8] = [
    "locks_per_second",
    "wait_p50_us",
    "wait_p99_us",
    "wait_most_us",
    "least_wins_percent",
    "most_wins_percent",
    "allocations_per_lock",
    "sockets",
];

/// A way to lock, as its own documentation shows it.
pub(crate) trait Lock: Clone + 'static {
    /// A lock that is held.
    type Held: 'static;

    fn lock(&self, name: &str) -> impl Future<Output = Self::Held>;

    fn unlock(&self, held: Self::Held) -> impl Future<Output = ()>;
}

/// A round: a number of tasks or threads, for a time, with a lock each or all with the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fight {
    pub(crate) tasks: usize,
    pub(crate) shared: bool,
    pub(crate) length: Duration,
}

/// Its results: the locks taken within its length, and the length of each wait, in microseconds.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) locks_per_second: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) most: f64,
    /// The locks of the task with the fewest and of the one with the most, in percent of the mean.
    pub(crate) wins: [f64; 2],
    pub(crate) allocations: f64,
}

/// A contender: fights when told to.
type Contender = Box<dyn FnMut(Fight) -> Outcome>;

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &MEASURES);
    let mut host = run.host();
    let runtime = Rc::new(runtime());
    let mut contenders: Vec<(&str, Contender, f64)> = Vec::new();
    for name in ALL {
        let before = host.connections();
        if let Some(mut contender) = contender(name, &runtime, &host) {
            // So that code is compiled, scripts are loaded, and connections are there.
            let warm = if name == REDISSON {
                run.length(4000)
            } else {
                run.length(200)
            };
            for shared in [false, true] {
                contender(Fight {
                    tasks: 64,
                    shared,
                    length: warm,
                });
            }
            contenders.push((name, contender, host.connections() - before));
        }
    }
    let fights = [(OWN, 1, 400), (OWN, 64, 400), (SHARED, FIGHTERS, 1000)];
    for (case, tasks, length) in fights {
        let fight = Fight {
            tasks,
            shared: case == SHARED,
            length: run.length(length),
        };
        alternate(contenders.len(), run.rounds(7), |index, round| {
            let (name, contender, sockets) = &mut contenders[index];
            let outcome = contender(fight);
            let values = [
                outcome.locks_per_second,
                outcome.p50,
                outcome.p99,
                outcome.most,
                outcome.wins[0],
                outcome.wins[1],
                outcome.allocations,
                *sockets,
            ];
            results.add(&at(case, tasks), name, round, &values);
        });
    }
    results
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// None: not on this machine.
fn contender(name: &str, runtime: &Rc<Runtime>, host: &Host) -> Option<Contender> {
    let url = format!("redis://{}", host.server.address());
    let here = Rc::clone(runtime);
    Some(match name {
        RLOCK => fighter(runtime, here.block_on(async { Ours::connect(&url).await })),
        BY_HAND => fighter(
            runtime,
            here.block_on(async { ByHand::connect(&url).await }),
        ),
        RSLOCK => fighter(runtime, Rslock::connect(&url)),
        RLOCK_0_2 => fighter(
            runtime,
            here.block_on(async { Rlock02::connect(&url).await }),
        ),
        _ => {
            let redisson = Arc::new(Mutex::new(Redisson::start(&host.server)?));
            Box::new(move |fight| {
                // On another thread, so that the tasks of the others go on here.
                let redisson = Arc::clone(&redisson);
                let talk = move || redisson.lock().unwrap().fight(fight);
                here.block_on(async { spawn_blocking(talk).await.unwrap() })
            })
        }
    })
}

fn fighter(runtime: &Rc<Runtime>, lock: impl Lock) -> Contender {
    let runtime = Rc::clone(runtime);
    Box::new(move |how| runtime.block_on(LocalSet::new().run_until(fight(lock.clone(), how))))
}

async fn fight(lock: impl Lock, how: Fight) -> Outcome {
    let allocated = allocations::so_far();
    let over = Instant::now() + how.length;
    let tasks = (0..how.tasks).map(|number| {
        let lock = lock.clone();
        let name = if how.shared {
            "shared".to_owned()
        } else {
            format!("own:{number}")
        };
        spawn_local(async move {
            let mut waits = Vec::with_capacity(100_000);
            let mut in_time = 0_u64;
            while Instant::now() < over {
                let begun = Instant::now();
                let held = lock.lock(&name).await;
                waits.push(begun.elapsed().as_secs_f64() * 1e6);
                lock.unlock(held).await;
                in_time += u64::from(Instant::now() < over);
            }
            (waits, in_time)
        })
    });
    let tasks: Vec<_> = tasks.collect();
    let (mut waits, mut wins) = (Vec::new(), Vec::new());
    for task in tasks {
        let (of_task, in_time_of_task) = task.await.unwrap();
        waits.extend(of_task);
        wins.push(in_time_of_task as f64);
    }
    let allocated = allocations::so_far() - allocated;
    let all: f64 = wins.iter().sum();
    let percent = |part| quantile(&wins, part) * 100.0 * wins.len() as f64 / all;
    Outcome {
        locks_per_second: all / how.length.as_secs_f64(),
        p50: quantile(&waits, 0.5),
        p99: quantile(&waits, 0.99),
        most: quantile(&waits, 1.0),
        wins: [percent(0.0), percent(1.0)],
        allocations: allocated as f64 / waits.len() as f64,
    }
}

#[derive(Clone)]
pub(crate) struct Ours(pub(crate) rlock_client::Client);

impl Ours {
    pub(crate) async fn connect(url: &str) -> Self {
        let patient = rlock_client::Client::builder()
            .response_timeout(PATIENCE)
            .grace(PATIENCE);
        Self(patient.connect(url).await.unwrap())
    }
}

impl Lock for Ours {
    type Held = rlock_client::Guard;

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.lock(name).lock().await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        held.unlock().await.unwrap();
    }
}

/// Code without a lock crate: a value of one's own, a script that deletes only that, and polling,
/// here every 10 ms.
#[derive(Clone)]
pub(crate) struct ByHand {
    connection: MultiplexedConnection,
    release: Rc<redis::Script>,
}

impl ByHand {
    pub(crate) async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).unwrap();
        let patient = AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
        let connection = client.get_multiplexed_async_connection_with_config(&patient);
        Self {
            connection: connection.await.unwrap(),
            release: Rc::new(redis::Script::new(scripts::COMPARE_AND_DELETE)),
        }
    }
}

impl Lock for ByHand {
    /// The name, and the owner.
    type Held = [String; 2];

    async fn lock(&self, name: &str) -> Self::Held {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let owner = format!("{}:{number}", std::process::id());
        let mut connection = self.connection.clone();
        let mut set = redis::cmd("SET");
        set.arg(name)
            .arg(&owner)
            .arg("NX")
            .arg("PX")
            .arg(LEASE.as_secs() * 1000);
        while set
            .query_async::<Option<String>>(&mut connection)
            .await
            .unwrap()
            .is_none()
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        [name.to_owned(), owner]
    }

    async fn unlock(&self, [name, owner]: Self::Held) {
        let mut connection = self.connection.clone();
        let mut release = self.release.key(name);
        let release = release.arg(owner).invoke_async(&mut connection);
        let deleted: i64 = release.await.unwrap();
        assert_eq!(deleted, 1);
    }
}

/// Polls after up to 200 ms by default, and gives up after three attempts, which is raised here.
#[derive(Clone)]
struct Rslock(rslock::LockManager);

impl Rslock {
    fn connect(url: &str) -> Self {
        let mut manager = rslock::LockManager::new(vec![url]);
        manager.set_retry(u32::MAX, Duration::from_millis(200));
        Self(manager)
    }
}

impl Lock for Rslock {
    type Held = rslock::LockGuard;

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.acquire(name, LEASE).await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        held.release().await;
    }
}

/// Polls every 100 ms by default, and renews.
#[derive(Clone)]
struct Rlock02(rlock_0_2::async_lock::RLock);

impl Rlock02 {
    async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).unwrap();
        let patient = ConnectionManagerConfig::new().set_response_timeout(Some(PATIENCE));
        let manager = client.get_connection_manager_with_config(patient).await;
        let lock = rlock_0_2::async_lock::RLock::with_connection_manager(manager.unwrap());
        Self(lock.await.unwrap())
    }
}

impl Lock for Rlock02 {
    type Held = rlock_0_2::async_lock::RLockGuard;

    async fn lock(&self, name: &str) -> Self::Held {
        self.0.acquire_mutex(name).await.unwrap()
    }

    async fn unlock(&self, mut held: Self::Held) {
        held.release().await.unwrap();
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("4. The crate against others");
    report.says(
        "Each as its documentation shows it, through one server: the Rust crates in one process on \
         one thread, Redisson in a process of its own with a thread a lock. Allocations and \
         sockets are the client's; Redisson's allocations are not counted. Where many want one \
         lock, whoever polls may take it again at once while the others sleep: many locks a \
         second, all for one, and most of them without a wait, so that there the longest wait says \
         more than a percentile. The wins are those of the task with the fewest and of the one \
         with the most, in percent of the mean.",
    );
    let (one, many) = (at(OWN, 1_u64), at(OWN, 64_u64));
    let there = results.contenders(&one);
    report_own(results, &there, &mut report);
    report_shared(results, &there, &mut report);
    if !there.iter().any(|name| name == REDISSON) {
        report.says("Redisson was skipped: no Java, or no Maven, on this machine.");
    }
    let against = |at, name| results.ratio(at, "locks_per_second", RLOCK, name);
    report.at_least(
        "the crate against `redis` by hand, 1 task",
        0.9,
        against(&one, BY_HAND),
    );
    report.at_least("… 64 tasks", 1.3, against(&many, BY_HAND));
    report.at_most(
        "… allocations a lock",
        20.0,
        results.spread(&many, RLOCK, "allocations_per_lock"),
    );
    report.at_most(
        "… the longest wait for one lock, against the best of the others",
        1.0,
        best(results, &there),
    );
    report.cost = Some(format!(
        "- With one task the crate reaches {} of the locks per second of hand-written calls \
         through the same library, and {} with 64 tasks.",
        against(&one, BY_HAND),
        against(&many, BY_HAND),
    ));
    report
}

fn report_own(results: &Results, there: &[String], report: &mut Report) {
    let (one, many) = (at(OWN, 1_u64), at(OWN, 64_u64));
    let rows: Vec<_> = there
        .iter()
        .map(|name| {
            vec![
                name.clone(),
                figure(results.median(&one, name, "locks_per_second")),
                results
                    .ratio(&one, "locks_per_second", RLOCK, name)
                    .to_string(),
                figure(results.median(&many, name, "locks_per_second")),
                results
                    .ratio(&many, "locks_per_second", RLOCK, name)
                    .to_string(),
                figure(results.median(&one, name, "allocations_per_lock")),
                figure(results.median(&many, name, "sockets")),
            ]
        })
        .collect();
    report.table(
        &[
            "a lock each",
            "1 task, locks/s",
            "rlock-client against it",
            "64 tasks, locks/s",
            "rlock-client against it",
            "allocations a lock",
            "sockets",
        ],
        &rows,
    );
}

fn report_shared(results: &Results, there: &[String], report: &mut Report) {
    let fight = at(SHARED, FIGHTERS);
    let rows: Vec<_> = there
        .iter()
        .map(|name| {
            let of = |measure| figure(results.median(&fight, name, measure));
            vec![
                name.clone(),
                of("locks_per_second"),
                results
                    .ratio(&fight, "locks_per_second", RLOCK, name)
                    .to_string(),
                of("wait_p50_us"),
                of("wait_p99_us"),
                of("wait_most_us"),
                format!(
                    "{} to {}",
                    of("least_wins_percent"),
                    of("most_wins_percent")
                ),
            ]
        })
        .collect();
    let fighters = format!("{FIGHTERS} tasks, one lock");
    report.table(
        &[
            &fighters,
            "locks/s",
            "rlock-client against it",
            "wait p50 µs",
            "p99",
            "longest",
            "wins %",
        ],
        &rows,
    );
}

/// Our longest wait against the shortest of the other contenders' longest waits. Not a percentile:
/// each lock taken counts as one wait there, and a task that has the lock to itself takes thousands
/// without any.
fn best(results: &Results, there: &[String]) -> Spread {
    let fight = at(SHARED, FIGHTERS);
    let others = there.iter().filter(|name| *name != RLOCK);
    let ratios = others.map(|name| results.ratio(&fight, "wait_most_us", RLOCK, name));
    let nearest = ratios.max_by(|one, other| one.median.total_cmp(&other.median));
    nearest.unwrap_or(Spread::of(&[]))
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let group = |name: &str, at| Group {
        name: name.to_owned(),
        bars: results
            .contenders(&at)
            .into_iter()
            .map(|name| {
                let speed = results.spread(&at, &name, "locks_per_second");
                (name, speed)
            })
            .collect(),
    };
    let plot = Bars {
        title: "Clients: locks taken and given back",
        unit: "thousand per second",
        scale: 1e-3,
        groups: vec![
            group("1 task", at(OWN, 1_u64)),
            group("64 tasks", at(OWN, 64_u64)),
            group("16 tasks, one lock", at(SHARED, FIGHTERS)),
        ],
    };
    vec![("crates", plot.draw())]
}
