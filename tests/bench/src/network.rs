//! Part 10: clients and server with a network between them, on which every packet takes its time.

use std::process::Command;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use rlock_tests::{Proxy, scripts};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Mutex, mpsc};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;

use crate::crates::{ByHand, LEASE, Lock, Ours, PATIENCE};
use crate::numbers::{figure, quantile};
use crate::plot::{Bars, Group};
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};

pub(crate) const PART: &str = "network";

/// How long a packet takes, as `tc` has it.
const DELAY: Duration = Duration::from_millis(1);
const NETEM: &str = "qdisc add dev lo root netem delay 1ms";

const PING: &str = "PING round trip";
const RLOCK: &str = "rlock-client";
const KEPT: &str = "rlock-client with keep";
const POLLING: &str = "SET NX PX by hand every 10 ms";
const PUBLISH: &str = "publish and retry";
const ALL: [&str; 5] = [PING, RLOCK, KEPT, POLLING, PUBLISH];

const PAIR: &str = "lock and unlock";
const HAND_OVER: &str = "hand-over to a waiter";
const IDLE: &str = "lock what another used last";
/// With the length of a round in milliseconds.
const CASES: [(&str, u64); 3] = [(PAIR, 300), (HAND_OVER, 1000), (IDLE, 500)];

const MEASURES: [&str; 3] = ["p50_us", "p99_us", "by_netem"];

pub(crate) fn measure(run: &Run) -> Results {
    // A network belongs to a thread and to what that starts, and ends with them.
    let can_delay = thread::spawn(delay_loopback).join().unwrap();
    let part = move || {
        if !can_delay {
            println!("{PART}: no netem here, so a proxy delays what passes it");
        }
        measure_here(run, can_delay && delay_loopback())
    };
    thread::scope(|scope| scope.spawn(part).join().unwrap())
}

/// Gives this thread a loopback of its own that delays what passes it: whether that works. It needs
/// root, iproute2 and a kernel that has netem.
fn delay_loopback() -> bool {
    // SAFETY: no table of files is unshared.
    let network = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
    let succeeds = |program: &str, words: &str| {
        let output = Command::new(program).args(words.split(' ')).output();
        output.is_ok_and(|output| output.status.success())
    };
    network.is_ok() && succeeds("ip", "link set lo up") && succeeds("tc", NETEM)
}

fn measure_here(run: &Run, by_netem: bool) -> Results {
    let mut results = Results::new(PART, &MEASURES);
    let host = run.host();
    let proxy = Proxy::to(host.server.address());
    let address = if by_netem {
        host.server.address()
    } else {
        proxy.delay(DELAY);
        proxy.address()
    };
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let runtime = Rc::new(runtime);
    let url = format!("redis://{address}");
    let mut contenders = ALL.map(|name| runtime.block_on(contender(name, &url, &runtime)));
    for (case, length) in CASES {
        alternate(ALL.len(), run.rounds(7), |index, round| {
            let name = ALL[index];
            let case_of = if name == PING { PAIR } else { case };
            let taken = contenders[index](case_of, run.length(length));
            let values = [quantile(&taken, 0.5), quantile(&taken, 0.99)];
            let values = [values[0], values[1], f64::from(u8::from(by_netem))];
            results.add(&at(case, DELAY.as_micros()), name, round, &values);
        });
    }
    results
}

/// Does this for so long: the microseconds that it took each time.
type Contender = Box<dyn FnMut(&str, Duration) -> Vec<f64>>;

async fn contender(name: &str, url: &str, runtime: &Rc<Runtime>) -> Contender {
    match name {
        PING => of(runtime, Ping::connect(url).await, Ping::connect(url).await),
        RLOCK => of(runtime, Ours::connect(url).await, Ours::connect(url).await),
        KEPT => of(runtime, Kept::connect(url).await, Kept::connect(url).await),
        POLLING => of(
            runtime,
            ByHand::connect(url).await,
            ByHand::connect(url).await,
        ),
        _ => {
            let both = (
                Retry::connect(url, "a").await,
                Retry::connect(url, "b").await,
            );
            of(runtime, both.0, both.1)
        }
    }
}

/// Two processes, as far as the server is concerned.
fn of<L: Lock>(runtime: &Rc<Runtime>, one: L, other: L) -> Contender {
    let runtime = Rc::clone(runtime);
    Box::new(move |case, length| {
        let rounds = again_and_again(case, length, one.clone(), other.clone());
        runtime.block_on(LocalSet::new().run_until(rounds))
    })
}

async fn again_and_again<L: Lock>(case: &str, length: Duration, one: L, other: L) -> Vec<f64> {
    let over = Instant::now() + length;
    let mut taken = Vec::new();
    while Instant::now() < over || taken.len() < 3 {
        let (begun, ended) = match case {
            PAIR => {
                let begun = Instant::now();
                one.unlock(one.lock(PAIR).await).await;
                (begun, Instant::now())
            }
            HAND_OVER => {
                let held = one.lock(HAND_OVER).await;
                let waiter = other.clone();
                let waiting = spawn_local(async move {
                    let held = waiter.lock(HAND_OVER).await;
                    let ended = Instant::now();
                    waiter.unlock(held).await;
                    ended
                });
                // Until it waits; and, for one that polls, not always as long after its last try.
                let later = Duration::from_millis(taken.len() as u64 * 7 % 10);
                sleep(DELAY * 10 + later).await;
                let begun = Instant::now();
                one.unlock(held).await;
                (begun, waiting.await.unwrap())
            }
            _ => {
                one.unlock(one.lock(IDLE).await).await;
                let begun = Instant::now();
                let held = other.lock(IDLE).await;
                let ended = Instant::now();
                other.unlock(held).await;
                (begun, ended)
            }
        };
        taken.push((ended - begun).as_secs_f64() * 1e6);
    }
    taken
}

/// One round trip, and nothing to give back.
#[derive(Clone)]
struct Ping(MultiplexedConnection);

impl Ping {
    async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).unwrap();
        Self(client.get_multiplexed_async_connection().await.unwrap())
    }
}

impl Lock for Ping {
    type Held = ();

    async fn lock(&self, _: &str) {
        let ping = redis::cmd("PING");
        let mut connection = self.0.clone();
        let () = ping.query_async(&mut connection).await.unwrap();
    }

    async fn unlock(&self, (): ()) {}
}

/// See part 8.
#[derive(Clone)]
struct Kept(Ours);

impl Kept {
    async fn connect(url: &str) -> Self {
        Self(Ours::connect(url).await)
    }
}

impl Lock for Kept {
    type Held = rlock_client::Guard;

    async fn lock(&self, name: &str) -> Self::Held {
        let lock = self.0.0.lock(format!("kept:{name}")).keep(PATIENCE);
        lock.lock().await.unwrap()
    }

    async fn unlock(&self, held: Self::Held) {
        self.0.unlock(held).await;
    }
}

/// The re-entrant scripts, with a message that tells those who wait to try again. They have
/// subscribed before, by the same connection.
#[derive(Clone)]
struct Retry {
    owner: &'static str,
    connection: MultiplexedConnection,
    messages: Rc<Mutex<mpsc::UnboundedReceiver<redis::PushInfo>>>,
    acquire: Rc<redis::Script>,
    release: Rc<redis::Script>,
}

const CHANNEL: &str = "freed";

impl Retry {
    async fn connect(url: &str, owner: &'static str) -> Self {
        let client = redis::Client::open(format!("{url}?protocol=resp3")).unwrap();
        let (told, messages) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new()
            .set_push_sender(told)
            .set_response_timeout(Some(PATIENCE));
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        let mut connection = connection.await.unwrap();
        connection.subscribe(CHANNEL).await.unwrap();
        Self {
            owner,
            connection,
            messages: Rc::new(Mutex::new(messages)),
            acquire: Rc::new(redis::Script::new(scripts::ACQUIRE)),
            release: Rc::new(redis::Script::new(scripts::RELEASE)),
        }
    }

    fn latch(&self) -> String {
        format!("latch:{}", self.owner)
    }
}

impl Lock for Retry {
    type Held = String;

    async fn lock(&self, name: &str) -> String {
        let (mut connection, name) = (self.connection.clone(), format!("scripted:{name}"));
        // The next attempt does not wait for the deletion of the last release's latch.
        let (mut beside, delete) = (
            self.connection.clone(),
            redis::cmd("DEL").arg(self.latch()).take(),
        );
        let mut messages = self.messages.lock().await;
        let mut acquire = self.acquire.key(&name);
        acquire.arg(LEASE.as_secs() * 1000).arg(self.owner);
        loop {
            // These tell of earlier releases.
            while messages.try_recv().is_ok() {}
            let deleted = delete.query_async::<i64>(&mut beside);
            let (deleted, left) = tokio::join!(deleted, acquire.invoke_async(&mut connection));
            deleted.unwrap();
            let left: Option<i64> = left.unwrap();
            if left.is_none() {
                return name;
            }
            messages.recv().await.unwrap();
        }
    }

    async fn unlock(&self, name: String) {
        let mut connection = self.connection.clone();
        let mut release = self.release.key(name);
        release.key(CHANNEL).key(self.latch());
        release.arg(self.owner).arg(30_000).arg(16_000);
        let freed: i64 = release.invoke_async(&mut connection).await.unwrap();
        assert_eq!(freed, 1);
    }
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("10. Over a network");
    let here = |case| at(case, DELAY.as_micros());
    let by_netem = results.median(&here(PAIR), PING, "by_netem") > 0.0;
    let means = if by_netem { "`tc netem`" } else { "a proxy" };
    report.says(&format!(
        "Each packet takes 1 ms, by {means}. A lock that is free is taken and given back by one \
         task; or it is held while another process waits for it, and the time is that from the \
         call of unlock until the other has it; or another process takes it that has been given \
         back before, and may be kept where it was. Microseconds, and the median against the round \
         trip of a PING beside it."
    ));
    for (case, _) in CASES {
        let here = here(case);
        let row = |name: &str| {
            vec![
                name.to_owned(),
                figure(results.median(&here, name, "p50_us")),
                figure(results.median(&here, name, "p99_us")),
                results.ratio(&here, "p50_us", name, PING).to_string(),
                results.ratio(&here, "p50_us", RLOCK, name).to_string(),
            ]
        };
        let head = [
            case,
            "p50 µs",
            "p99 µs",
            "p50 against PING",
            "rlock-client's against it",
        ];
        report.table(&head, &ALL.map(row));
    }
    let against = |case, name, other| results.ratio(&here(case), "p50_us", name, other);
    report.at_most(
        "hand-over against PING, over a network",
        1.1,
        against(HAND_OVER, RLOCK, PING),
    );
    report.at_least(
        "… publish and retry against it",
        1.5,
        against(HAND_OVER, PUBLISH, RLOCK),
    );
    report.gain = Some(format!(
        "- Over a network on which a packet takes 1 ms, the next waiter has the lock {} round \
         trips after the release. Publish and retry takes {} times as long, and polling every 10 \
         ms {} times.",
        against(HAND_OVER, RLOCK, PING),
        against(HAND_OVER, PUBLISH, RLOCK),
        against(HAND_OVER, POLLING, RLOCK),
    ));
    report.cost = Some(format!(
        "- Taking a lock that another process keeps idle costs {} round trips over that network, \
         instead of {}.",
        against(IDLE, KEPT, PING),
        against(IDLE, RLOCK, PING),
    ));
    report
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let group = |(case, _): (&str, u64)| {
        let here = at(case, DELAY.as_micros());
        let bar = |name: &str| (name.to_owned(), results.spread(&here, name, "p50_us"));
        Group {
            name: case.to_owned(),
            bars: ALL.map(bar).to_vec(),
        }
    };
    let plot = Bars {
        title: "Over a network on which a packet takes 1 ms (median)",
        unit: "ms",
        scale: 1e-3,
        groups: CASES.map(group).into(),
    };
    vec![("network", plot.draw())]
}
