//! Late messages about earlier things: the end of a former wait, the answer to a former command,
//! another owner's hold. And a last guard that is dropped when nobody listens.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use rlock_client::{Client, Error, Guard};
use rlock_tests::{Proxy, Server, until};
use tokio::task::JoinSet;

use super::client::{MS, calm, soon};
use super::ways::two_ways;

const WAITS: i64 = 2_000;

/// Many waits of a client, whose end the server cannot tell: its session connection is silent, and
/// another is about to take its place.
async fn waiting(server: &Server, timeout: Duration) -> (Client, JoinSet<Result<Guard, Error>>) {
    let settings = calm().grace(Duration::from_secs(4));
    let (client, near, far) = two_ways(server, settings).await;
    near.lead_to(server.address());
    let mut alice = server.connect();
    for number in 0..WAITS {
        alice.take(&format!("k{number}"), "alice");
    }
    let mut waits = JoinSet::new();
    for number in 0..WAITS {
        let lock = client.lock(format!("k{number}"));
        waits.spawn(async move { lock.lock_timeout(timeout).await });
    }
    until("all wait", || server.info_number("rlock_waiters") == WAITS);
    far.cut_to_server();
    // Until the server has answered the last call that has reached it, which lasts 146 ms.
    tokio::time::sleep(300 * MS).await;
    waits.spawn(async move {
        // Kept until the client is shut down, which has yet to take back what these calls left.
        let (_near, _far) = (near, far);
        std::future::pending().await
    });
    (client, waits)
}

/// The calls hear that they have not got the lock. The ways to the server stay open.
async fn refused(waits: &mut JoinSet<Result<Guard, Error>>) {
    for _ in 0..WAITS {
        match soon(waits.join_next()).await.unwrap().unwrap() {
            Ok(guard) => soon(guard.unlock()).await.unwrap(),
            Err(error) => assert!(error.is_not_acquired(), "{error}"),
        }
    }
}

/// The waits run out, and the locks become free. The calls ask again as soon as the session is
/// attached, and before they are told of that end. Told of it, a call is over, and what its second
/// ACQUIRE was granted nobody hears of.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_call_that_is_told_of_its_timeout_while_it_asks_again_leaves_no_hold() {
    let server = Server::start();
    let (client, mut waits) = waiting(&server, 1500 * MS).await;
    until("out", || server.info_number("rlock_waiters") == 0);
    assert_eq!(server.run("FLUSHALL").text(), "OK");
    refused(&mut waits).await;
    soon(client.shutdown()).await;
    let left = server.run("DBSIZE").int();
    assert_eq!(left, 0, "holds that have no guards");
}

/// The same with waits that an operator ends, and locks that stay taken: the second ACQUIRE stands
/// in the queue for as long as the call was to wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_call_that_is_told_of_its_end_while_it_asks_again_leaves_no_waiter() {
    let server = Server::start();
    let (client, mut waits) = waiting(&server, Duration::from_secs(3600)).await;
    let mut operator = server.connect();
    for number in 0..WAITS {
        let name = format!("k{number}");
        for owner in server.waiting_owners(&name) {
            assert_eq!(operator.run(format!("RLOCK.CANCEL {name} {owner}")), 1);
        }
    }
    refused(&mut waits).await;
    soon(client.shutdown()).await;
    let left = server.info_number("rlock_waiters");
    assert_eq!(left, 0, "waiters of calls that have ended");
}

/// The next call of the same scope hears of the end of the wait that was left in the queue, and
/// takes it for its own: `lock()` says that it has not got the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_lock_is_not_told_of_the_end_of_an_earlier_calls_second_wait() {
    let server = Server::start();
    let settings = calm().grace(Duration::from_secs(4));
    let (client, near, far) = two_ways(&server, settings).await;
    near.lead_to(server.address());
    let mut alice = server.connect();
    for number in 0..WAITS {
        alice.take(&format!("k{number}"), "alice");
    }
    let (mut waits, ended) = (JoinSet::new(), Arc::<AtomicI64>::default());
    for number in 0..WAITS {
        let (lock, ended) = (client.scope().lock(format!("k{number}")), ended.clone());
        waits.spawn(async move {
            let first = lock.lock_timeout(1500 * MS).await;
            let error = first.expect_err("alice has it");
            assert!(error.is_not_acquired(), "{error}");
            ended.fetch_add(1, Ordering::SeqCst);
            lock.lock().await
        });
    }
    until("all wait", || server.info_number("rlock_waiters") == WAITS);
    far.cut_to_server();
    until("all wait again", || {
        let waiting = server.info_number("rlock_waiters");
        ended.load(Ordering::SeqCst) == WAITS && waiting >= WAITS * 9 / 10
    });
    tokio::time::sleep(500 * MS).await;
    assert_eq!(server.run("FLUSHALL").text(), "OK");
    let mut refused = 0;
    while let Some(outcome) = soon(waits.join_next()).await {
        refused += i64::from(outcome.unwrap().is_err_and(|error| error.is_not_acquired()));
    }
    assert_eq!(refused, 0, "calls of lock() that end without the lock");
}

/// A try is granted, and heard of when its lease is over. Nobody has the lock then, and none is
/// held without an expiry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_whose_grant_has_run_out_is_not_told_that_somebody_else_has_the_lock() {
    let server = Server::start();
    let (client, near, _far) = two_ways(&server, calm()).await;
    near.delay(400 * MS);
    let lock = client.lock("k").lease(300 * MS);
    let error = soon(lock.try_lock()).await.unwrap_err();
    assert_eq!(server.run("EXISTS k"), 0);
    assert!(!error.is_not_acquired(), "{error}");
}

/// The reply to the first of two commands is lost, and the second is answered what the first has
/// set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_before_is_not_the_one_that_was_just_set() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let url = format!("redis://{}", proxy.address());
    let client = calm().grace(Duration::ZERO).connect(&url).await.unwrap();
    client
        .lock("k")
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert_eq!(client.set_limit("s", 5).await.unwrap(), None);
    tokio::time::sleep(100 * MS).await;
    proxy.cut_to_client();
    let other = client.clone();
    let set = tokio::spawn(async move { other.set_limit("s", 8).await });
    until("it is set", || server.run("GET {s}:rlock_limit") == "8");
    proxy.sever();
    proxy.heal();
    let before = soon(set).await.unwrap();
    if let Ok(before) = before {
        assert_eq!(before, Some(5));
    }
}

/// The last thing that goes of a client without async is a guard.
#[test]
fn a_guard_that_outlives_its_blocking_client_is_given_back() {
    let server = Server::start();
    let url = format!("redis://{}", server.address());
    for round in 0..50 {
        let client = rlock_client::blocking::ClientBuilder::from(calm())
            .connect(&url)
            .unwrap();
        let guard = client.lock(format!("k{round}")).lock().unwrap();
        drop(client);
        drop(guard);
    }
    until("all are given back", || server.run("DBSIZE") == 0);
}
