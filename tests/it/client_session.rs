//! The client's session: two connections, whatever it holds and waits for; nothing left behind.

#![allow(clippy::print_stdout, reason = "a figure for the documents")]

use std::env;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rlock_client::{Client, LostReason, blocking};
use rlock_tests::{Server, patience, until};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::span;

use super::client::{
    MS, calls, calm, client, connect, poll_once, soon, take_for_long, two_clients, url,
    wait_in_queue,
};

/// The session of a client, by an owner of its own.
pub(super) fn session_of(client: &Client) -> String {
    let owner = client.owner();
    owner.as_str().rsplit_once(':').unwrap().0.to_owned()
}

/// The connections of clients, without the one that asks. One of an earlier question may not have
/// been seen to close yet.
fn sockets(server: &Server) -> usize {
    server.run("CLIENT LIST").text().lines().count() - 1
}

pub(super) fn waiters(server: &Server) -> i64 {
    server.info_number("rlock_waiters")
}

/// A random number that is the same in each run with the same seed.
pub(super) fn next_random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_holds_and_a_thousand_waits_use_two_sockets() {
    let server = Server::start();
    let client = client(&server).await;
    let mut guards = Vec::new();
    for i in 0..1_000 {
        guards.push(client.lock(format!("k{i}")).lock().await.unwrap());
    }
    let waiting: Vec<_> = (0..1_000)
        .map(|i| {
            let lock = client.lock(format!("k{i}"));
            tokio::spawn(async move { lock.lock().await })
        })
        .collect();
    until("all are in the queue", || waiters(&server) == 1_000);
    until("its sockets are all there are", || sockets(&server) == 2);
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    drop(guards);
    for waiting in waiting {
        drop(soon(waiting).await.unwrap().unwrap());
    }
    client.shutdown().await;
    assert_eq!(server.run("DBSIZE"), 0);
    until("its sockets are all there are", || sockets(&server) == 2);
}

/// More calls at once than the connection of the `redis` crate has room for if it is not told
/// otherwise, which is 50: what then waits for room overtakes what waited before it.
const BURST: u64 = 1_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_queue_in_the_order_in_which_they_were_made() {
    let server = Server::start();
    let client = client(&server).await;
    let guard = client.lock("k").lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..BURST {
        let (lock, order) = (client.lock("k"), Arc::clone(&order));
        let mut pending = Box::pin(async move {
            let guard = lock.lock().await.unwrap();
            order.lock().unwrap().push(number);
            guard.unlock().await.unwrap();
        });
        assert!(poll_once(pending.as_mut()).await.is_pending());
        waiting.push(tokio::spawn(pending));
    }
    guard.unlock().await.unwrap();
    for waiting in waiting {
        soon(waiting).await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..BURST).collect::<Vec<_>>());
}

/// Were a CANCEL to reach the server before the ACQUIRE that it undoes, that would stand in the
/// queue for nobody, and then hold the lock to the end of its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_calls_dropped_at_once_are_all_undone_behind_what_they_asked_for() {
    let server = Server::start();
    let client = client(&server).await;
    let mut alice = server.connect();
    take_for_long(&mut alice, "k");
    for number in 0..BURST {
        let lock = client.lock("k");
        let mut pending = Box::pin(lock.lock());
        assert!(poll_once(pending.as_mut()).await.is_pending());
        if number % 8 == 0 {
            // So that what undoes the first calls is sent among the next.
            tokio::task::yield_now().await;
        }
    }
    until("all are undone", || calls(&server, "cancel") == BURST);
    until("nobody waits", || waiters(&server) == 0);
    client.shutdown().await;
    assert_eq!(calls(&server, "acquire"), BURST + 1);
    assert_eq!(alice.let_go("k", "alice"), 0);
    assert_eq!(server.run("DBSIZE"), 0);
}

/// Polls until then, at moments finer than a timer's. Granted or not, it is dropped here.
pub(super) async fn is_granted_within<T>(
    patience: Duration,
    pending: impl Future<Output = T>,
) -> bool {
    let mut pending = Box::pin(pending);
    let ends = Instant::now() + patience;
    loop {
        if poll_once(pending.as_mut()).await.is_ready() {
            return true;
        }
        if Instant::now() >= ends {
            return false;
        }
        tokio::task::yield_now().await;
    }
}

/// How long they are dropped at most: on a busy machine there are fewer.
pub(super) const DROPPING: Duration = Duration::from_secs(100);

/// How many locks are dropped while pending: `RLOCK_DROPS`, more in `make soak`.
pub(super) fn drops() -> u64 {
    env::var("RLOCK_DROPS").map_or(10_000, |text| text.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_dropped_at_random_moments_under_traffic_leave_no_key_and_no_waiter() {
    let server = Server::start();
    let clients = two_clients(&server).await;
    let (over, granted) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let traffic: Vec<_> = (0..4)
        .map(|i| {
            let lock = clients[i % 2].lock(format!("k{}", i % 2));
            let over = Arc::clone(&over);
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    let droppers: Vec<_> = (0..4_u64)
        .map(|i| {
            let (client, granted) = (clients[(i % 2) as usize].clone(), Arc::clone(&granted));
            let mut random = 0x9E37_79B9_7F4A_7C15 + i;
            tokio::spawn(async move {
                let (mut dropped, ends) = (0, Instant::now() + DROPPING);
                // Where nothing is granted so soon, as on a busy machine, more follow, ever later.
                let more = || granted.load(Ordering::Relaxed) == 0;
                while (dropped < drops() / 4 || more()) && Instant::now() < ends {
                    let lock = client.lock(format!("k{}", next_random(&mut random) % 2));
                    let longest = 800 + 100 * dropped.saturating_sub(drops() / 4);
                    let patience = Duration::from_micros(next_random(&mut random) % longest);
                    if is_granted_within(patience, lock.lock()).await {
                        granted.fetch_add(1, Ordering::Relaxed);
                    } else {
                        dropped += 1;
                    }
                }
                dropped
            })
        })
        .collect();
    let mut dropped = 0;
    for dropper in droppers {
        let all = timeout(patience(Duration::from_secs(120)), dropper).await;
        dropped += all.unwrap().unwrap();
    }
    over.store(true, Ordering::Relaxed);
    let long = patience(Duration::from_secs(60));
    for task in traffic {
        timeout(long, task).await.unwrap().unwrap();
    }
    for client in &clients {
        timeout(long, client.shutdown()).await.unwrap();
    }
    assert_eq!((server.run("DBSIZE").int(), waiters(&server)), (0, 0));
    let granted = granted.load(Ordering::Relaxed);
    println!("{dropped} pending locks and {granted} guards dropped: no key, no waiter");
    assert!(granted > 0, "some are dropped as guards");
    until("its sockets are all there are", || sockets(&server) == 4);
}

/// The resident memory of this process, in KiB.
fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "heavy, and it must be alone in its process: make soak"]
async fn a_hundred_thousand_locks_taken_and_dropped_leak_nothing() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let mut before = 0;
    for i in 0..100_000 {
        let lock = client.lock(format!("k{i}"));
        let guard = if i % 2 == 0 {
            lock.lock().await.unwrap()
        } else {
            lock.owner(&owner).try_lock().await.unwrap()
        };
        guard.unlock().await.unwrap();
        if i == 10_000 {
            before = resident_kib();
        }
    }
    client.shutdown().await;
    let grown = resident_kib().saturating_sub(before);
    println!("100,000 locks taken and dropped: {grown} KiB more than after 10,000");
    assert!(grown < 2_048, "{grown} KiB");
    assert_eq!(server.run("DBSIZE"), 0);
}

/// For how long another task of this thread was kept from running at most until it is over, and how
/// long another client's PING took at most.
async fn longest_pauses(
    server: &Server,
    mut is_over: impl FnMut() -> bool + Send + 'static,
) -> [Duration; 2] {
    let mut conn = server.connect();
    let over = Arc::<AtomicBool>::default();
    let is_over_now = Arc::clone(&over);
    let pings = thread::spawn(move || {
        let mut longest = Duration::ZERO;
        while !is_over() {
            for _ in 0..1_000 {
                let begun = Instant::now();
                conn.run("PING");
                longest = longest.max(begun.elapsed());
            }
        }
        is_over_now.store(true, Ordering::Release);
        longest
    });
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    while !over.load(Ordering::Acquire) {
        tokio::task::yield_now().await;
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    [longest, pings.join().unwrap()]
}

#[tokio::test]
#[ignore = "heavy, and it must be alone in its process: make soak"]
async fn renewals_of_a_hundred_thousand_locks_keep_nobody_waiting() {
    const LOCKS: u64 = 100_000;
    let server = Arc::new(Server::start());
    let builder = Client::builder().lease(MS * 3_600_000);
    let builder = builder.renew_every(MS * 30_000);
    let client = builder.connect(&url(&server)).await.unwrap();
    let mut guards = Vec::new();
    for some in 0..LOCKS / 1_000 {
        let mut takes = JoinSet::new();
        for number in 0..1_000 {
            let lock = client.lock(format!("k{some}:{number}"));
            takes.spawn(async move { lock.lock().await.unwrap() });
        }
        guards.extend(takes.join_all().await);
    }
    let quiet = Instant::now();
    let idle = longest_pauses(&server, move || quiet.elapsed() > MS * 1_000).await;
    let before = calls(&server, "renew");
    let (asked, deadline) = (Arc::clone(&server), quiet + patience(MS * 120_000));
    let is_over = move || calls(&asked, "renew") >= before + LOCKS || Instant::now() > deadline;
    let renewing = longest_pauses(&server, is_over).await;
    assert!(calls(&server, "renew") >= before + LOCKS);
    println!(
        "longest pause of another task, and of another client: {idle:?} while nothing is renewed, \
         {renewing:?} while {LOCKS} locks are"
    );
    // A machine that is busy with something else has long pauses too, but not such.
    assert!(renewing.iter().all(|pause| *pause < MS * 2_000));
    assert!(guards.iter().all(|guard| !guard.is_lost()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_circle_of_two_owners_is_refused_and_named() {
    let server = Server::start();
    let client = client(&server).await;
    let (ann, ben) = (client.owner(), client.owner());
    let first = client.lock("a").owner(&ann).lock().await.unwrap();
    let second = client.lock("b").owner(&ben).lock().await.unwrap();
    let lock = client.lock("b").owner(&ann);
    let waiting = tokio::spawn(async move { lock.lock().await });
    until("ann waits for b", || server.waiting_owners("b").len() == 1);
    let error = client.lock("a").owner(&ben).lock().await.unwrap_err();
    assert!(error.is_deadlock(), "{error}");
    let text = error.to_string();
    assert!(
        text.contains(ann.as_str()) && text.contains(ben.as_str()),
        "{text}"
    );
    second.unlock().await.unwrap();
    drop(soon(waiting).await.unwrap().unwrap());
    first.unlock().await.unwrap();
    client.shutdown().await;
    assert_eq!(server.run("DBSIZE"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_hold_ends_a_hold_that_would_be_renewed_for_ever() {
    let server = Server::start();
    let (lease, longest) = (4_000 * MS, 4_500 * MS);
    let builder = calm().lease(lease).max_hold(longest);
    let client = connect(builder.renew_every(100 * MS), &server).await;
    let before = Instant::now();
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(&server, &client, "k");
    assert_eq!(soon(guard.lost()).await, LostReason::MaxHold);
    let held = before.elapsed();
    assert!(held + 300 * MS > longest, "it was renewed: {held:?}");
    assert!(guard.renew().await.unwrap_err().is_lost());
    let next = soon(waiting).await.unwrap().unwrap();
    assert!(next.token() > guard.token());
    let short = client
        .lock("other")
        .max_hold(200 * MS)
        .lock()
        .await
        .unwrap();
    assert!(server.run("PTTL other").int() <= 200);
    assert_eq!(soon(short.lost()).await, LostReason::MaxHold);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_taken_over_is_taken_back() {
    let server = Server::start();
    let client = client(&server).await;
    let guard = client.lock("held").lock().await.unwrap();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let waiting = wait_in_queue(&server, &client, "k");
    let mut thief = server.connect();
    for _ in 0..3 {
        let told = calls(&server, "events");
        thief.run(format!("RLOCK.EVENTS {}", session_of(&client)));
        until("it is taken back", || calls(&server, "events") > told + 2);
    }
    alice.let_go("k", "alice");
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
}

#[test]
fn programs_without_async_have_the_same_locks() {
    let server = Server::start();
    let client = blocking::ClientBuilder::from(calm())
        .connect(&url(&server))
        .unwrap();
    let guard = client.lock("k").lock().unwrap();
    assert_eq!(server.holder("k").as_deref(), Some(guard.owner().as_str()));
    assert!(client.lock("k").try_lock().unwrap_err().is_not_acquired());
    assert!(
        client
            .lock("k")
            .lock_timeout(20 * MS)
            .unwrap_err()
            .is_not_acquired()
    );
    guard.renew().unwrap();
    assert_eq!(guard.lost_within(20 * MS), None);
    let again = client.lock("k").owner(guard.owner()).lock().unwrap();
    assert_eq!(again.token(), guard.token());
    again.unlock().unwrap();

    let (granted, told) = mpsc::channel();
    let lock = client.lock("k");
    let other = thread::spawn(move || granted.send(lock.lock().unwrap()).unwrap());
    until("the other thread waits", || {
        server.waiting_owners("k").len() == 1
    });
    guard.unlock().unwrap();
    let next = told
        .recv_timeout(patience(Duration::from_secs(15)))
        .unwrap();
    other.join().unwrap();
    server.run("RLOCK.BREAK k");
    let reason = next.lost_within(patience(Duration::from_secs(15)));
    assert_eq!(reason, Some(LostReason::Broken));
    assert!(next.is_lost());
    drop(
        client
            .lock("dropped")
            .lease(Duration::from_secs(60))
            .lock()
            .unwrap(),
    );
    client.shutdown();
    assert_eq!(server.run("DBSIZE"), 0);
    drop((client, next));
    until("its connections are closed", || sockets(&server) == 0);
}

/// Remembers the names of the spans at DEBUG that were opened.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<Vec<&'static str>>>);

impl tracing::Subscriber for Spans {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &span::Attributes<'_>) -> span::Id {
        let mut names = self.0.lock().unwrap();
        let metadata = span.metadata();
        let is_debug = *metadata.level() == tracing::Level::DEBUG;
        if is_debug && metadata.target().starts_with("rlock_client") {
            names.push(metadata.name());
        }
        span::Id::from_u64(names.len().max(1) as u64)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn waits_holds_renewals_and_releases_are_spans() {
    let server = Server::start();
    let spans = Spans::default();
    // With a single subscriber `tracing` asks that of the thread which comes first to a span, and
    // other tests run on threads that have none.
    let _second = tracing::Dispatch::new(Spans::default());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tracing::subscriber::with_default(spans.clone(), || {
        runtime.block_on(async {
            let client = connect(calm().renew_every(20 * MS), &server).await;
            let guard = client.lock("k").lock().await.unwrap();
            while calls(&server, "renew") == 0 {
                sleep(5 * MS).await;
            }
            guard.unlock().await.unwrap();
        });
    });
    let names = spans.0.lock().unwrap();
    for name in ["wait", "hold", "renew", "release"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
}
