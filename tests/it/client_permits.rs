//! The client's semaphore against real servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use rlock_client::{Error, LostReason, PermitsGuard, Semaphore, blocking};
use rlock_tests::{Cluster, Server, until};
use tokio::task::JoinHandle;

use super::client::{MS, begin_and_drop, calls, calm, client, connect, see_in_queue, soon, url};
use super::client_faults::kill_session_connection;
use super::client_session::waiters;

fn out(server: &Server) -> i64 {
    let info = server.run("RLOCK.INFO k");
    let is_free = !info.keys().contains(&"permits".to_owned());
    if is_free {
        0
    } else {
        info.get("permits").int()
    }
}

/// Waits for permits in a task of its own.
fn waits(
    server: &Server,
    semaphore: &Semaphore,
    permits: u32,
) -> JoinHandle<Result<PermitsGuard, Error>> {
    let semaphore = semaphore.clone();
    see_in_queue(
        server,
        "k",
        async move { semaphore.acquire_many(permits).await },
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taken_in_one_command_and_given_back_in_one() {
    let server = Server::start();
    let client = client(&server).await;
    let exports = client.semaphore("k", 5);
    let two = exports.acquire_many(2).await.unwrap();
    let one = exports.try_acquire().await.unwrap();
    assert_eq!(
        (two.permits(), one.permits(), two.name()),
        (2, 1, &b"k"[..])
    );
    assert!(one.token() > two.token());
    assert_eq!(out(&server), 3);
    two.renew().await.unwrap();
    let refused = exports.try_acquire_many(3).await.unwrap_err();
    let left = refused.lease_left().expect("a lease has an end");
    assert!(refused.is_not_acquired() && left > Duration::from_secs(10));
    for wrong in [0, 6] {
        let refused = exports.acquire_many(wrong).await.unwrap_err();
        assert!(refused.is_refused(), "{refused}");
    }
    two.unlock().await.unwrap();
    drop(one);
    until("both are back", || server.run("EXISTS k") == 0);
    assert_eq!(
        (calls(&server, "acquire"), calls(&server, "release")),
        (5, 2)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_served_in_their_order_also_for_many() {
    let server = Server::start();
    let client = client(&server).await;
    let exports = client.semaphore("k", 3);
    let held = exports.acquire_many(2).await.unwrap();
    let large = waits(&server, &exports, 3);
    let small = waits(&server, &exports, 1);
    let late = exports.acquire_timeout(30 * MS).await.unwrap_err();
    assert!(late.is_not_acquired(), "one fits, and is promised: {late}");
    held.unlock().await.unwrap();
    let large = soon(large).await.unwrap().unwrap();
    assert_eq!(out(&server), 3);
    large.unlock().await.unwrap();
    let small = soon(small).await.unwrap().unwrap();
    small.unlock().await.unwrap();
    assert_eq!(waiters(&server), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn never_more_than_the_limit_are_inside_and_a_raised_one_lets_more_in() {
    let server = Server::start();
    let clients = [client(&server).await, client(&server).await];
    assert_eq!(clients[0].set_limit("k", 3).await.unwrap(), None);
    let (inside, most) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let tasks: Vec<_> = (0..24_u32)
        .map(|number| {
            let client = clients[usize::try_from(number % 2).unwrap()].clone();
            let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
            tokio::spawn(async move {
                let permits = 1 + number % 2;
                let guard = client.semaphore("k", None).acquire_many(permits).await;
                let guard = guard.unwrap();
                let now = inside.fetch_add(permits.into(), Ordering::SeqCst);
                most.fetch_max(now + i64::from(permits), Ordering::SeqCst);
                tokio::time::sleep(2 * MS).await;
                inside.fetch_sub(permits.into(), Ordering::SeqCst);
                guard.unlock().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        soon(task).await.unwrap();
    }
    let most = most.load(Ordering::SeqCst);
    assert!((2..=3).contains(&most), "{most}");

    let all = clients[0].semaphore("k", None);
    let _three = all.acquire_many(3).await.unwrap();
    let waiter = waits(&server, &all, 1);
    assert_eq!(clients[1].set_limit("k", 4).await.unwrap(), Some(3));
    drop(soon(waiter).await.unwrap().unwrap());
    assert_eq!(clients[1].set_limit("k", None).await.unwrap(), Some(4));
    let refused = all.try_acquire().await.unwrap_err();
    assert!(refused.is_refused(), "no limit: {refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_client_that_dies_are_free_at_once() {
    let server = Server::start();
    // Its session connection is the first.
    let dying = connect(calm().grace(Duration::ZERO), &server).await;
    let other = client(&server).await;
    let exports = dying.semaphore("k", 2);
    let _held = [
        exports.acquire().await.unwrap(),
        exports.acquire().await.unwrap(),
    ];
    let waiter = waits(&server, &other.semaphore("k", 2), 2);
    // As `kill -9` does.
    kill_session_connection(&server);
    let info = server.run("RLOCK.INFO k");
    assert!(info.get("permits").int() <= 2);
    drop(soon(waiter).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_hears_that_its_permits_are_lost() {
    let server = Server::start();
    let client = client(&server).await;
    let exports = client.semaphore("k", 2);
    let broken = exports.acquire().await.unwrap();
    server.run("RLOCK.BREAK k");
    assert_eq!(soon(broken.lost()).await, LostReason::Broken);
    assert!(broken.unlock().await.unwrap_err().is_lost());

    let stays = exports.acquire().await.unwrap();
    let short = exports.lease(50 * MS).acquire().await.unwrap();
    assert_eq!(soon(short.lost()).await, LostReason::Expired);
    assert!(!stays.is_lost(), "the others have leases of their own");
    stays.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_and_a_hold_outlive_a_broken_connection() {
    let server = Server::start();
    let client = connect(calm(), &server).await;
    let exports = client.semaphore("k", 2);
    let held = exports.acquire_many(2).await.unwrap();
    let waiter = waits(&server, &exports, 1);
    let token = held.token();
    kill_session_connection(&server);
    until("it waits again", || waiters(&server) == 1);
    held.renew().await.unwrap();
    assert_eq!((held.is_lost(), held.token()), (false, token));
    held.unlock().await.unwrap();
    soon(waiter).await.unwrap().unwrap().unlock().await.unwrap();
    assert_eq!(server.run("EXISTS k"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_at_any_await_nothing_stays_behind() {
    let server = Server::start();
    let client = client(&server).await;
    let exports = client.semaphore("k", 2);
    let mut free = exports.acquire().await.unwrap();
    for round in 0..200_u32 {
        begin_and_drop(exports.acquire_many(1 + round % 2), round).await;
        if round % 8 == 0 {
            drop(free);
            free = exports.acquire().await.unwrap();
        }
    }
    free.unlock().await.unwrap();
    let both = soon(exports.acquire_many(2)).await.unwrap();
    both.unlock().await.unwrap();
    until("nothing is left", || {
        server.run("EXISTS k") == 0 && waiters(&server) == 0
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_permits_and_their_limit_go_where_their_slot_is() {
    let cluster = Cluster::start();
    let builder = rlock_client::Client::builder();
    let client = builder.connect_cluster([url(&cluster.first)]).await;
    let client = client.unwrap();
    client.set_limit("k", 1).await.unwrap();
    let held = client.semaphore("k", None).acquire().await.unwrap();
    cluster.open_slot_of("k");
    cluster.migrate("k");
    cluster.migrate("{k}:rlock_limit");
    cluster.close_slot_of("k");
    assert_eq!(client.set_limit("k", 2).await.unwrap(), Some(1));
    soon(async { client.semaphore("k", None).acquire().await.unwrap() })
        .await
        .unlock()
        .await
        .unwrap();
    held.unlock().await.unwrap();
    assert_eq!(cluster.second.run("EXISTS k"), 0);
}

#[test]
fn without_async_it_does_the_same() {
    let server = Server::start();
    let client = blocking::Client::connect(&url(&server)).unwrap();
    assert_eq!(client.set_limit("k", 2).unwrap(), None);
    let exports = client
        .semaphore("k", None)
        .max_hold(Duration::from_secs(60));
    let guard = exports.acquire_many(2).unwrap();
    assert_eq!(guard.permits(), 2);
    assert!(exports.try_acquire().unwrap_err().is_not_acquired());
    assert!(exports.acquire_timeout(MS).unwrap_err().is_not_acquired());
    guard.unlock().unwrap();
    exports.acquire().unwrap().unlock().unwrap();
    client.shutdown();
}
