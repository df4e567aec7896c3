//! The client crate against real servers: what its documentation promises.

use std::env;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use rlock_client::{Client, ClientBuilder, Error, Guard, LostReason};
use rlock_tests::{Conn, Server, patience, until};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

pub(super) const MS: Duration = Duration::from_millis(1);

pub(super) fn url(server: &Server) -> String {
    format!("redis://{}", server.address())
}

pub(super) async fn client(server: &Server) -> Client {
    connect(calm(), server).await
}

pub(super) async fn connect(builder: ClientBuilder, server: &Server) -> Client {
    builder.connect(&url(server)).await.unwrap()
}

/// Settings with which nothing is given up where the client or the server is stopped for a
/// while, as on a busy machine. The lease is longer than any test waits, so that no hold that was
/// left behind is overlooked.
pub(super) fn calm() -> ClientBuilder {
    let long = Duration::from_secs(300);
    Client::builder()
        .lease(long)
        .grace(long)
        .response_timeout(long)
}

/// The same, and only the lease says how long a guard is valid.
pub(super) fn patient() -> ClientBuilder {
    calm().grace(Duration::ZERO)
}

/// Two clients of their own.
pub(super) async fn two_clients(server: &Server) -> [Client; 2] {
    [client(server).await, client(server).await]
}

/// Takes the free lock for `alice`, for longer than many rounds last.
pub(super) fn take_for_long(conn: &mut Conn, name: &str) {
    let taken = conn.run(format!("RLOCK.ACQUIRE {name} alice 600000"));
    assert_eq!(taken.held().0, 1);
}

/// How often the server has carried out `RLOCK.<command>`.
pub(super) fn calls(server: &Server, command: &str) -> u64 {
    let everything = server.run("INFO commandstats").text().to_lowercase();
    let prefix = format!("cmdstat_rlock.{command}:calls=");
    let found = everything
        .lines()
        .find_map(|line| line.strip_prefix(&prefix));
    found.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}

/// Calls `lock()` in a task of its own and sees it in the queue behind the waiters that are there.
pub(super) fn wait_in_queue(
    server: &Server,
    client: &Client,
    name: &str,
) -> JoinHandle<Result<Guard, Error>> {
    let lock = client.lock(name);
    see_in_queue(server, name, async move { lock.lock().await })
}

/// Waits in a task of its own and sees it in the queue of `name` behind the waiters that are there.
pub(super) fn see_in_queue<T: Send + 'static>(
    server: &Server,
    name: &str,
    wait: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let before = server.waiting_owners(name).len();
    let waiting = tokio::spawn(wait);
    until("it waits", || server.waiting_owners(name).len() > before);
    waiting
}

/// Awaits this with a deadline, or fails.
pub(super) async fn soon<T>(what: impl Future<Output = T>) -> T {
    timeout(patience(Duration::from_secs(15)), what)
        .await
        .expect("it never came")
}

/// Sees that it works in one of ten tries: a busy machine spoils some of them, and a
/// fault all.
pub(super) async fn once_in_ten(what: &str, mut attempt: impl AsyncFnMut() -> bool) {
    for _ in 0..10 {
        if attempt().await {
            return;
        }
    }
    panic!("not in ten tries: {what}");
}

/// Waits on a thread that may block.
pub(super) fn wait_for<T>(what: impl Future<Output = T>) -> T {
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(what))
}

/// Polls once, as a `select!` would.
pub(super) async fn poll_once<T>(mut pending: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    poll_fn(|cx| Poll::Ready(pending.as_mut().poll(cx))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_free_lock_is_taken_in_one_command_and_given_back_in_one() {
    let server = Server::start();
    let client = client(&server).await;
    let connections = server.info_number("total_connections_received");
    client
        .lock("k")
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    // Only the look at the server is a new connection.
    assert_eq!(
        server.info_number("total_connections_received"),
        connections + 1
    );
    assert_eq!(
        (calls(&server, "acquire"), calls(&server, "release")),
        (1, 1)
    );
    assert_eq!((calls(&server, "renew"), calls(&server, "cancel")), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_tells_what_the_server_knows() {
    let server = Server::start();
    let grace = Duration::from_secs(20);
    let client = connect(calm().grace(grace), &server).await;
    let guard = client.lock("k").lock().await.unwrap();
    assert_eq!(guard.name(), b"k");
    assert_eq!(server.holder("k").as_deref(), Some(guard.owner().as_str()));
    let token = server.run("RLOCK.INFO k").get("token").int();
    assert_eq!(guard.token(), u64::try_from(token).unwrap());
    let left = guard.valid_for();
    assert!(
        left > Duration::ZERO && left < grace,
        "within the grace: {left:?}"
    );
    guard.unlock().await.unwrap();
    assert_eq!(server.holder("k"), None);
}

/// The words that are left out are the same for all: who says nothing waits, and has it alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_awaited_is_taken() {
    let server = Server::start();
    let client = client(&server).await;
    let info = |key: &str| server.run(format!("RLOCK.INFO {key}"));
    let plain = client.lock("k").await.unwrap();
    let both = client.multi(["a", "b"]).await.unwrap();
    let writer = client.rw_lock("prices").await.unwrap();
    let permit = client.semaphore("exports", 1).await.unwrap();
    assert_eq!(server.holder("k").as_deref(), Some(plain.owner().as_str()));
    assert_eq!(server.holder("b").as_deref(), Some(both.owner().as_str()));
    assert_eq!(info("prices").get("mode").text(), "write");
    assert_eq!(permit.permits(), 1);
    drop((plain, both, writer, permit));
    until("nothing is left", || server.run("DBSIZE") == 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_served_in_the_order_in_which_they_came() {
    let server = Server::start();
    let client = client(&server).await;
    let mut guard = client.lock("k").lock().await.unwrap();
    let line: Vec<_> = (0..5)
        .map(|_| wait_in_queue(&server, &client, "k"))
        .collect();
    let owners = server.waiting_owners("k");
    for (waiting, owner) in line.into_iter().zip(owners) {
        let token = guard.token();
        guard.unlock().await.unwrap();
        guard = soon(waiting).await.unwrap().unwrap();
        assert_eq!(guard.owner().as_str(), owner);
        assert!(guard.token() > token);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn try_lock_does_not_wait_and_says_what_is_left_of_the_lease() {
    let server = Server::start();
    let client = client(&server).await;
    server.connect().take("k", "alice");
    let error = client.lock("k").try_lock().await.unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    let left = error.lease_left().unwrap();
    assert!(
        left > Duration::ZERO && left <= Duration::from_secs(30),
        "{left:?}"
    );
    server.run("PERSIST k");
    let error = client.lock("k").try_lock().await.unwrap_err();
    assert!(
        error.is_not_acquired() && error.lease_left().is_none(),
        "{error}"
    );
    assert!(server.waiting_owners("k").is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_timeout_gives_up_in_time_and_leaves_the_queue() {
    let server = Server::start();
    let client = client(&server).await;
    let mut alice = server.connect();
    alice.take("k", "alice");
    let started = Instant::now();
    let error = client.lock("k").lock_timeout(150 * MS).await.unwrap_err();
    assert!(
        error.is_not_acquired() && error.lease_left().is_some(),
        "{error}"
    );
    assert!(started.elapsed() >= 150 * MS);
    assert!(server.waiting_owners("k").is_empty());

    let lock = client.lock("k");
    let waiting = tokio::spawn(async move { lock.lock_timeout(Duration::from_secs(20)).await });
    until("it waits", || !server.waiting_owners("k").is_empty());
    assert_eq!(alice.let_go("k", "alice"), 0);
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();

    alice.take("k", "alice");
    let acquires = calls(&server, "acquire");
    let error = client
        .lock("k")
        .lock_timeout(Duration::ZERO)
        .await
        .unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    assert_eq!(calls(&server, "acquire"), acquires + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_owner_enters_again_and_the_last_guard_gives_back_the_hold() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let lock = client.lock("k").owner(&owner);
    let outer = lock.lock().await.unwrap();
    let inner = lock.lock().await.unwrap();
    let third = lock.try_lock().await.unwrap();
    assert_eq!((outer.token(), inner.owner()), (third.token(), &owner));
    assert_eq!(server.run("RLOCK.INFO k").get("count"), &1);
    assert_eq!(calls(&server, "acquire"), 1, "no round trip");
    assert!(
        client
            .lock("k")
            .try_lock()
            .await
            .unwrap_err()
            .is_not_acquired()
    );
    for guard in [inner, outer] {
        guard.unlock().await.unwrap();
        assert_eq!(server.run("RLOCK.INFO k").get("count"), &1);
    }
    assert_eq!(calls(&server, "release"), 0);
    third.unlock().await.unwrap();
    assert_eq!(server.holder("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entering_again_with_a_shorter_lease_takes_nothing_from_the_first_guard() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let owner = client.owner();
    let outer = client
        .lock("k")
        .owner(&owner)
        .lease(Duration::from_secs(60))
        .lock()
        .await
        .unwrap();
    let again = client.lock("k").owner(&owner).lease(Duration::from_secs(1));
    let inner = again.lock().await.unwrap();
    let promised = outer.valid_for();
    assert!(promised > Duration::from_secs(50), "{promised:?}");
    let ttl = server.run("PTTL k").int();
    assert!(ttl > 50_000, "{ttl}");
    assert!(inner.valid_for() > Duration::from_secs(50));
    // With the last guard the terms are forgotten.
    outer.unlock().await.unwrap();
    inner.unlock().await.unwrap();
    let guard = again.lock().await.unwrap();
    assert!(guard.valid_for() < Duration::from_secs(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entering_again_does_not_hold_a_lock_for_longer_than_allowed() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let lock = client.lock("k").owner(&client.owner());
    let (lease, longest) = (Duration::from_secs(18), Duration::from_secs(20));
    let lock = lock.lease(lease).max_hold(longest);
    let before = Instant::now();
    let outer = lock.lock().await.unwrap();
    let taken = Instant::now();
    sleep(3_000 * MS).await;
    let inner = lock.lock().await.unwrap();
    outer.renew().await.unwrap();
    // Beyond the first lease, and up to the limit.
    let nearly = Duration::from_secs(19);
    for guard in [&outer, &inner] {
        let passed = taken.elapsed();
        let left = guard.valid_for();
        assert!(passed + left <= longest, "{passed:?}, {left:?}");
        assert!(before.elapsed() + left > nearly, "{left:?}");
    }
    let ttl = Duration::from_millis(u64::try_from(server.run("PTTL k").int()).unwrap());
    assert!(ttl + 3_000 * MS <= longest, "{ttl:?}");
    assert!(before.elapsed() + ttl > nearly, "{ttl:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_waits_once_and_its_second_call_joins_when_the_first_is_dropped() {
    let server = Server::start();
    let client = client(&server).await;
    let mut alice = server.connect();
    alice.take("k", "alice");
    let lock = client.lock("k").owner(&client.owner());
    let first = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await }
    });
    until("the first waits", || server.waiting_owners("k").len() == 1);
    let acquires = calls(&server, "acquire");
    // It waits for its turn, here.
    let second = tokio::spawn(async move { lock.lock().await });
    for _ in 0..20 {
        assert_eq!(
            server.waiting_owners("k").len(),
            1,
            "CANCEL would take out both"
        );
        sleep(5 * MS).await;
    }
    assert_eq!(calls(&server, "acquire"), acquires);
    first.abort();
    until("the first has left, the second waits", || {
        calls(&server, "cancel") > 0 && server.waiting_owners("k").len() == 1
    });
    assert_eq!(alice.let_go("k", "alice"), 0);
    soon(second).await.unwrap().unwrap().unlock().await.unwrap();
    assert_eq!(server.holder("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_guard_gives_its_lock_back() {
    let server = Server::start();
    let client = client(&server).await;
    drop(client.lock("k").lock().await.unwrap());
    client.shutdown().await;
    assert_eq!(server.holder("k"), None);
}

#[test]
fn a_guard_may_be_dropped_outside_a_runtime_and_after_its_end() {
    let server = Server::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (here, after) = runtime.block_on(async {
        let client = client(&server).await;
        let lock = client.lock("after").lease(Duration::from_secs(1));
        (
            client.lock("here").lock().await.unwrap(),
            lock.lock().await.unwrap(),
        )
    });
    drop(here);
    until("it was given back", || server.holder("here").is_none());
    runtime.shutdown_timeout(Duration::from_secs(5));
    drop(after);
    until("its lease has ended", || server.holder("after").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_watchdog_keeps_a_short_lease_alive_and_stops_with_the_guard() {
    let server = Server::start();
    let (lease, interval) = (Duration::from_secs(5), 100 * MS);
    let client = connect(calm().lease(lease).renew_every(interval), &server).await;
    let guard = client.lock("k").lock().await.unwrap();
    let started = Instant::now();
    while started.elapsed() < lease + 500 * MS {
        assert!(!guard.is_lost());
        assert!(server.holder("k").is_some());
        sleep(10 * MS).await;
    }
    guard.unlock().await.unwrap();
    let renewals = calls(&server, "renew");
    assert!(renewals > 0);
    sleep(6 * interval).await; // six rounds, had it gone on
    assert_eq!(calls(&server, "renew"), renewals);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_with_a_lease_of_its_own_is_never_renewed_but_by_hand() {
    let server = Server::start();
    let client = connect(calm().lease(300 * MS), &server).await;
    let lease = Duration::from_secs(5);
    let guard = client.lock("k").lease(lease).lock().await.unwrap();
    sleep(400 * MS).await;
    let renewed = Instant::now();
    guard.renew().await.unwrap();
    assert_eq!(calls(&server, "renew"), 1);
    assert_eq!(soon(guard.lost()).await, LostReason::Expired);
    assert!(renewed.elapsed() + 200 * MS > lease, "the renewal counts");
    assert_eq!(calls(&server, "renew"), 1);
    assert!(guard.renew().await.unwrap_err().is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_guards_of_a_client_are_renewed_in_one_pipeline() {
    let server = Server::start();
    let client = connect(calm().renew_every(Duration::from_secs(1)), &server).await;
    let mut guards = Vec::new();
    for i in 0..50 {
        guards.push(client.lock(format!("k{i}")).lock().await.unwrap());
    }
    let mut observer = server.connect();
    let mut numbers = || {
        let text = observer.run("INFO everything").text().to_lowercase();
        ["cmdstat_rlock.renew:calls=", "total_reads_processed:"].map(|field| -> u64 {
            let line = text.lines().find_map(|line| line.strip_prefix(field));
            let digits = line.unwrap_or("0").chars().take_while(char::is_ascii_digit);
            digits.collect::<String>().parse().unwrap()
        })
    };
    let before = numbers();
    let (mut looks, mut renewals, mut reads) = (0, 0, 0);
    until("all have been renewed twice", || {
        looks += 1;
        let now = numbers();
        (renewals, reads) = (now[0] - before[0], now[1] - before[1] - looks);
        renewals >= 100
    });
    // Some are those of the session connection.
    assert!(reads < 20, "{reads} reads for {renewals} renewals");
    assert!(guards.iter().all(|guard| !guard.is_lost()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_told_at_once_why_it_lost_its_lock() {
    let server = Server::start();
    let client = client(&server).await;
    for (command, reason) in [
        ("DEL k", LostReason::Deleted),
        ("RLOCK.BREAK k", LostReason::Broken),
        ("FLUSHALL", LostReason::Deleted),
        // A server that is stopped within this command would delete keys that expire meanwhile.
        ("PEXPIRE k 100", LostReason::Expired),
    ] {
        let guard = client.lock("k").lock().await.unwrap();
        assert!(!guard.is_lost());
        server.run(command);
        assert_eq!(soon(guard.lost()).await, reason, "{command}");
        assert!(guard.is_lost() && guard.valid_for() == Duration::ZERO);
        assert!(guard.unlock().await.unwrap_err().is_lost());
    }
}

/// If the client took its hold back, and the other did the same, they would never end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_whose_hold_went_to_another_session_is_lost_and_does_not_take_it_back() {
    let server = Server::start();
    let client = client(&server).await;
    let guard = client.lock("k").lock().await.unwrap();
    let mut other = server.session_connection("other");
    let (owner, token) = (guard.owner(), guard.token());
    let renew = format!("RLOCK.RENEW k {owner} 30000 TOKEN {token} SESSION other");
    assert_eq!(server.run(renew), 1);
    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
    drop(client.lock("l").lock().await.unwrap());
    assert_eq!(server.run("RLOCK.INFO k").get("session"), "other");
    assert_eq!(other.run("RLOCK.EVENTS other").told().1, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_unlock_reports_the_loss_and_touches_nobody() {
    let server = Server::start();
    let client = client(&server).await;
    let guard = client.lock("k").lease(50 * MS).lock().await.unwrap();
    soon(guard.lost()).await;
    let mut bob = server.connect();
    until("bob has it", || {
        bob.run("RLOCK.ACQUIRE k bob 30000 ONCE").ints()[0] == 1
    });
    assert!(guard.unlock().await.unwrap_err().is_lost());
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_unlock_does_not_free_a_newer_hold_of_the_same_owner() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let lock = client.lock("k").owner(&owner);
    let old = lock.lock().await.unwrap();
    assert_eq!(server.run("DEL k"), 1);
    assert_eq!(soon(old.lost()).await, LostReason::Deleted);
    let new = lock.lock().await.unwrap();
    assert!(new.token() > old.token());
    assert!(old.unlock().await.unwrap_err().is_lost());
    assert_eq!(server.holder("k").as_deref(), Some(owner.as_str()));
    new.unlock().await.unwrap();
    assert_eq!(server.holder("k"), None);
}

/// Fails if the guard is valid for longer than the server's lease.
fn assert_within_the_lease(server: &Server, guard: &Guard) {
    let left = Duration::from_millis(u64::try_from(server.run("PTTL k").int()).unwrap());
    // Asked later, it can only be less.
    let valid = guard.valid_for();
    assert!(valid <= left, "{valid:?}, {left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_valid_for_no_longer_than_the_lease_in_the_server() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let mut alice = server.connect();
    alice.take("k", "alice");
    let lock = client.lock("k").lease(Duration::from_secs(60));
    let waiting = tokio::spawn(async move { lock.lock().await });
    until("it waits", || !server.waiting_owners("k").is_empty());
    alice.let_go("k", "alice");
    let guard = soon(waiting).await.unwrap().unwrap();
    assert_within_the_lease(&server, &guard);
    guard.renew().await.unwrap();
    assert_within_the_lease(&server, &guard);
    let again = client
        .lock("k")
        .owner(guard.owner())
        .try_lock()
        .await
        .unwrap();
    assert_within_the_lease(&server, &again);
    assert_within_the_lease(&server, &guard);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_cannot_keep_a_guard_from_saying_that_it_is_lost() {
    let server = Server::start();
    let lease = 600 * MS;
    let client = connect(calm().lease(lease), &server).await;
    let guard = client.lock("k").lock().await.unwrap();
    server.freeze();
    let frozen = Instant::now();
    // The last confirmed command had been sent before that.
    tokio::time::sleep_until((frozen + lease).into()).await;
    assert!(guard.is_lost(), "the server may do as it likes from now on");
    assert_eq!(soon(guard.lost()).await, LostReason::Expired);
    server.thaw();
    // A renewal that is confirmed now does not bring it back.
    assert!(guard.is_lost());
    drop(guard);
    client.shutdown().await;
    assert_eq!(server.holder("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_that_waited_for_longer_than_its_lease_is_valid_when_it_comes() {
    let server = Server::start();
    // With such a grace the session connection is called so often that a grant counts from when it
    // was made.
    let builder = calm().grace(Duration::from_secs(1));
    let client = connect(builder, &server).await;
    let mut alice = server.connect();
    let lease = 900 * MS;
    once_in_ten("the guard is valid", async || {
        alice.take("k", "alice");
        let lock = client.lock("k").lease(lease);
        let waiting = see_in_queue(&server, "k", async move { lock.lock().await });
        sleep(lease + 100 * MS).await;
        alice.let_go("k", "alice");
        let guard = soon(waiting).await.unwrap().unwrap();
        let valid = guard.valid_for() > Duration::ZERO;
        drop(guard);
        until("it is given back", || server.holder("k").is_none());
        valid
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_the_client_works_again_by_itself() {
    let mut server = Server::start();
    let client = connect(calm().renew_every(50 * MS), &server).await;
    let guard = client.lock("held").lock().await.unwrap();
    server.connect().take("k", "alice");
    let waiting = wait_in_queue(&server, &client, "k");
    server.restart();
    // Nothing was saved: alice's lock is free, and so is ours.
    let waited = soon(waiting).await.unwrap().unwrap();
    assert_eq!(server.holder("k").as_deref(), Some(waited.owner().as_str()));
    assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
    client
        .lock("new")
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    waited.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_survives_a_restart_is_confirmed_and_not_called_lost() {
    let mut server = Server::builder().config("appendonly yes").start();
    let client = connect(calm().renew_every(50 * MS), &server).await;
    let guard = client.lock("k").lock().await.unwrap();
    server.restart();
    until("it was renewed after the restart", || {
        calls(&server, "renew") > 0
    });
    guard.renew().await.unwrap();
    assert!(!guard.is_lost());
    assert_eq!(server.holder("k").as_deref(), Some(guard.owner().as_str()));
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_connections_cost_neither_a_hold_nor_a_wait() {
    let server = Server::start();
    let client = connect(calm().renew_every(50 * MS), &server).await;
    let guard = client.lock("held").lock().await.unwrap();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let waiting = wait_in_queue(&server, &client, "k");
    alice.run("CLIENT KILL TYPE normal SKIPME yes");
    let renewals = calls(&server, "renew");
    until("renewed on a new connection", || {
        calls(&server, "renew") > renewals
    });
    until("they wait on a new connection", || {
        server.waiting_owners("k").len() == 1
    });
    assert!(!guard.is_lost());
    alice.let_go("k", "alice");
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    guard.unlock().await.unwrap();
    assert_eq!((server.holder("k"), server.holder("held")), (None, None));
}

/// Begins something, lets it run for a moment that grows from round to round, and drops it.
pub(super) async fn begin_and_drop<T>(pending: impl Future<Output = T>, round: u32) {
    let mut pending = Box::pin(pending);
    // Round 0: never polled. Round 1: polled once. Then for longer and longer.
    let ends = Instant::now() + round.saturating_sub(1) * 100 * Duration::from_micros(1);
    let mut polls = 0;
    while polls < round {
        polls += 1;
        if poll_once(pending.as_mut()).await.is_ready() {
            return; // with a guard, dropped here
        }
        while polls == round && Instant::now() < ends {
            tokio::task::yield_now().await;
            if poll_once(pending.as_mut()).await.is_ready() {
                return;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_lock_leaves_nothing_behind_when_it_is_free() {
    let server = Server::start();
    for round in 0..40 {
        let client = client(&server).await;
        begin_and_drop(client.lock("k").lock(), round).await;
        client.shutdown().await;
        assert_eq!(server.holder("k"), None, "round {round}");
        assert!(server.waiting_owners("k").is_empty(), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_lock_of_an_owner_leaves_nothing_behind_but_its_other_holds() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let lock = client.lock("k").owner(&owner);
    for round in 0..60 {
        begin_and_drop(lock.lock(), round).await;
        until("it is given back", || server.holder("k").is_none());
    }
    let guard = lock.lock().await.unwrap();
    for round in 0..60 {
        begin_and_drop(lock.lock(), round).await;
    }
    let count = || server.run("RLOCK.INFO k").get("count").int();
    until("only the guard's hold is left", || count() == 1);
    guard.unlock().await.unwrap();
    client.shutdown().await;
    assert_eq!(server.holder("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_lock_leaves_nothing_behind_when_it_is_held() {
    let server = Server::start();
    take_for_long(&mut server.connect(), "k");
    let mut cancelled = 0;
    for round in 0..60 {
        let client = client(&server).await;
        begin_and_drop(client.lock("k").lock(), round).await;
        // By itself, for shutdown() ends every wait; and with it, for it knows when all is done.
        until("nobody waits", || server.waiting_owners("k").is_empty());
        client.shutdown().await;
        assert!(server.waiting_owners("k").is_empty(), "round {round}");
        cancelled = calls(&server, "cancel");
    }
    assert!(cancelled > 0, "no round got as far as the queue");
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
    assert_eq!(server.run("RLOCK.RELEASE k alice"), 0);
    assert_eq!(server.holder("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_lock_in_the_moment_of_its_grant_leaves_nothing_behind() {
    let server = Server::start();
    let mut alice = server.connect();
    for round in 0..60 {
        let client = client(&server).await;
        alice.take("k", "alice");
        let lock = client.lock("k");
        let mut pending = Box::pin(lock.lock());
        assert!(poll_once(pending.as_mut()).await.is_pending());
        until("it waits", || server.waiting_owners("k").len() == 1);
        alice.send("RLOCK.RELEASE k alice");
        let ends = Instant::now() + round * 10 * Duration::from_micros(1);
        while Instant::now() < ends {
            tokio::task::yield_now().await;
        }
        drop(pending);
        assert_eq!(alice.read(), 0);
        client.shutdown().await;
        assert_eq!(server.holder("k"), None, "round {round}");
        assert!(server.waiting_owners("k").is_empty(), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_possible_grant_of_a_stopped_server_is_given_back() {
    let server = Server::start();
    let client = connect(calm().response_timeout(3_000 * MS), &server).await;
    server.freeze();
    let error = client.lock("k").try_lock().await.unwrap_err();
    assert!(error.is_unknown(), "{error}");
    server.thaw();
    client.shutdown().await;
    assert_eq!(server.holder("k"), None);
    assert!(calls(&server, "release") >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_on_a_stopped_server_ends_in_time_and_leaves_the_queue_later() {
    let server = Server::start();
    let client = connect(calm().response_timeout(3_000 * MS), &server).await;
    server.connect().take("k", "alice");
    let lock = client.lock("k");
    let waiting = tokio::spawn(async move { lock.lock_timeout(Duration::from_secs(4)).await });
    until("it waits", || !server.waiting_owners("k").is_empty());
    server.freeze();
    let error = soon(waiting).await.unwrap().unwrap_err();
    assert!(error.is_unknown(), "{error}");
    server.thaw();
    client.shutdown().await;
    assert!(server.waiting_owners("k").is_empty());
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_what_is_pending() {
    let server = Server::start();
    let client = client(&server).await;
    server.connect().take("k", "alice");
    let waiting = wait_in_queue(&server, &client, "k");
    soon(client.shutdown()).await;
    assert!(soon(waiting).await.unwrap().unwrap_err().is_unavailable());
    assert!(server.waiting_owners("k").is_empty());
    assert!(
        client
            .lock("other")
            .lock()
            .await
            .unwrap_err()
            .is_unavailable()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_could_not_be_asked() {
    let mut server = Server::start();
    let client = connect(calm().response_timeout(3_000 * MS), &server).await;
    let guard = client.lock("k").lock().await.unwrap();
    server.kill();
    let mut error = guard.renew().await.unwrap_err();
    // A command that was on its way when the server died remains unknown; the next is not sent.
    if error.is_unknown() {
        error = guard.renew().await.unwrap_err();
    }
    assert!(error.is_unavailable(), "{error}");
    assert!(!guard.is_lost(), "its lease still runs");
    assert!(
        client
            .lock("k")
            .try_lock()
            .await
            .unwrap_err()
            .is_unavailable()
    );
    assert!(guard.unlock().await.unwrap_err().is_unavailable());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_the_module_is_named_as_such() {
    let server = Server::builder().without_module().start();
    let error = Client::connect(&url(&server)).await.unwrap_err();
    assert!(error.is_module_not_loaded(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_carries_the_words_of_the_server() {
    let server = Server::start();
    let client = client(&server).await;
    let error = client
        .lock("k")
        .lease(Duration::ZERO)
        .lock()
        .await
        .unwrap_err();
    assert!(
        error.is_refused() && error.to_string().contains("lease"),
        "{error}"
    );
    server.run("SET k text");
    let error = client.lock("k").lock().await.unwrap_err();
    assert!(
        error.is_refused() && error.to_string().contains("WRONGTYPE"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_any_bytes() {
    let server = Server::start();
    let client = client(&server).await;
    let name = b"\xff\0\r\n";
    let guard = client.lock(name).lock().await.unwrap();
    assert_eq!(guard.name(), name);
    assert_eq!(server.connect().cmd(&[b"EXISTS".as_slice(), name]), 1);
    guard.unlock().await.unwrap();
    assert_eq!(server.connect().cmd(&[b"EXISTS".as_slice(), name]), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_tasks_of_two_clients_are_kept_apart() {
    let server = Server::start();
    let clients = two_clients(&server).await;
    let counter = Arc::new(AtomicU64::new(0));
    let inside = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..1_000)
        .map(|i| {
            let lock = clients[i % 2].lock("k");
            let (counter, inside) = (Arc::clone(&counter), Arc::clone(&inside));
            tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two at a time");
                let seen = counter.load(Ordering::SeqCst);
                tokio::task::yield_now().await;
                counter.store(seen + 1, Ordering::SeqCst);
                inside.store(false, Ordering::SeqCst);
                guard.unlock().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        timeout(patience(Duration::from_secs(60)), task)
            .await
            .unwrap()
            .unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), 1_000);
    assert_eq!(server.holder("k"), None);
}

/// Runs a program of `client/examples` and returns what it prints.
fn example(server: &Server, name: &str) -> String {
    example_with(&[url(server)], name)
}

/// As [`example`], with the URLs of several servers. Its leases are as short as a reader likes: a
/// busy machine may cost it a lock, and then it fails.
pub(super) fn example_with(urls: &[String], name: &str) -> String {
    let mut complaint = String::new();
    for _ in 0..5 {
        match run_example(urls, name) {
            Ok(text) => return text,
            Err(text) => complaint = text,
        }
    }
    panic!("{name} failed\n{complaint}");
}

/// Lets cargo build or run an example. Not for its package alone: with the features of all packages
/// it is the one that `make test` has built; with others half of the build would be done once more.
pub(super) fn cargo(verb: &str, example: &str) -> Command {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command.args([verb, "--quiet", "--example", example]);
    command
}

fn run_example(urls: &[String], name: &str) -> Result<String, String> {
    let output = cargo("run", name).arg("--").args(urls).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    Err(text + &String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_examples_run() {
    let server = Server::start();
    let stock = example(&server, "stock");
    assert_eq!(stock.lines().last(), Some("sold 90, refused 10, left 0"));
    let watchdog = example(&server, "watchdog");
    assert_eq!(
        watchdog.matches("rival: not acquired").count(),
        10,
        "{watchdog}"
    );
    let fencing = example(&server, "fencing");
    assert!(fencing.starts_with("late write refused"), "{fencing}");
    let prices = example(&server, "prices");
    assert!(prices.starts_with("10 changes, and no reader"), "{prices}");
    let exports = example(&server, "exports");
    assert_eq!(exports, "40 exports, never more than the limit at a time\n");
    let yields = example(&server, "yield");
    let last = yields.lines().last().unwrap();
    assert!(!last.contains(" 0 times"), "{yields}");
    let shards = example(&server, "shards");
    assert!(shards.starts_with("20000 changes, 0 lost"), "{shards}");
    let philosophers = example(&server, "philosophers");
    assert_eq!(philosophers, "5 philosophers had 50 meals\n");
    // The stock and two prices.
    until("nothing else is left", || server.run("DBSIZE") == 3);
}
