//! A guard hears that somebody waits whom it keeps out.

use std::time::Duration;

use rlock_client::{Guard, LostReason, blocking};
use rlock_tests::{Server, Shards, until};
use tokio::time::timeout;

use super::client::{calls, calm, client, soon, two_clients, url, wait_in_queue};
use super::client_doubt::two_ways;

/// Whether it was told by now, without waiting for the server.
async fn is_told<M>(guard: &Guard<M>) -> bool {
    let told = timeout(Duration::ZERO, guard.wanted()).await;
    told.is_ok_and(|told| told.is_ok())
}

/// Has the server asked to tell, and waits until it was.
async fn ask<M>(server: &Server, guard: &Guard<M>) {
    let before = calls(server, "renew");
    assert!(!is_told(guard).await);
    until("the server is asked", || calls(server, "renew") > before);
}

/// Somebody else is refused.
fn want(server: &Server, options: &str) {
    let refused = server.run(format!("RLOCK.ACQUIRE k rival 30000 {options}"));
    refused.refused();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_guards_of_an_owner_hear_of_a_waiter_and_the_server_is_asked_once() {
    let server = Server::start();
    let [client, rival] = two_clients(&server).await;
    let lock = client.lock("k");
    let guard = lock.lock().await.unwrap();
    ask(&server, &guard).await;
    // Whoever looks at it between two steps does not ask each time.
    for _ in 0..1_000 {
        assert!(!is_told(&guard).await);
    }
    assert_eq!(calls(&server, "renew"), 1);
    let second = lock.owner(guard.owner()).lock().await.unwrap();
    let waiting = wait_in_queue(&server, &rival, "k");
    soon(guard.wanted()).await.unwrap();
    soon(second.wanted()).await.unwrap();
    assert_eq!(calls(&server, "renew"), 1);
    // Asked again, and somebody waits still.
    soon(guard.wanted()).await.unwrap();
    assert_eq!(calls(&server, "renew"), 2);
    soon(second.wanted()).await.unwrap();
    assert_eq!(calls(&server, "renew"), 2, "told to the other guard");
    second.unlock().await.unwrap();
    guard.unlock().await.unwrap();
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_kind_of_guard_hears_of_those_whom_it_keeps_out() {
    let server = Server::start();
    let client = client(&server).await;
    let plain = client.lock("k").lock().await.unwrap();
    ask(&server, &plain).await;
    want(&server, "");
    soon(plain.wanted()).await.unwrap();
    plain.unlock().await.unwrap();

    let writer = client.rw_lock("k").write().await.unwrap();
    ask(&server, &writer).await;
    want(&server, "READ");
    soon(writer.wanted()).await.unwrap();
    let reader = writer.downgrade().await.unwrap();
    ask(&server, &reader).await;
    server.run("RLOCK.ACQUIRE k beside 30000 READ").held();
    server.run("RLOCK.RELEASE k beside READ");
    assert!(!is_told(&reader).await);
    want(&server, "WRITE");
    soon(reader.wanted()).await.unwrap();
    reader.unlock().await.unwrap();

    let permits = client.semaphore("k", 3).acquire_many(2).await.unwrap();
    ask(&server, &permits).await;
    want(&server, "PERMITS 2 OF 3");
    soon(permits.wanted()).await.unwrap();
    permits.unlock().await.unwrap();

    let several = client.multi(["k", "l"]).lock().await.unwrap();
    let before = calls(&server, "renew");
    assert!(!is_told(&several).await);
    until("both are asked for", || {
        calls(&server, "renew") == before + 2
    });
    want(&server, "");
    soon(several.wanted()).await.unwrap();
    several.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_have_been_lost_with_a_connection_is_asked_for_anew() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, calm()).await;
    let guard = client.lock("k").lock().await.unwrap();
    ask(&server, &guard).await;
    // The server tells, and its word is lost with the connection.
    far.cut_to_client();
    let _waits = server.wait_in_queue("k", "rival");
    far.sever();
    far.heal();
    soon(guard.wanted()).await.unwrap();
    assert!(!guard.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_ends_with_the_loss_and_with_the_servers_refusal() {
    let server = Server::start();
    let client = client(&server).await;
    let guard = client.lock("k").lock().await.unwrap();
    ask(&server, &guard).await;
    let (wanted, ()) = tokio::join!(soon(guard.wanted()), async {
        server.run("RLOCK.BREAK k");
    });
    assert!(wanted.unwrap_err().is_lost());
    assert_eq!(soon(guard.lost()).await, LostReason::Broken);
    assert!(soon(guard.wanted()).await.unwrap_err().is_lost());

    let guard = client.lock("k").lock().await.unwrap();
    server.run("ACL SETUSER default -rlock.renew");
    for _ in 0..2 {
        let refused = soon(guard.wanted()).await.unwrap_err();
        assert!(refused.is_refused(), "{refused}");
    }
    server.run("ACL SETUSER default +rlock.renew");
    ask(&server, &guard).await;
    want(&server, "");
    soon(guard.wanted()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_each_node_tells_of_its_locks() {
    let shards = Shards::start();
    let client = super::client_cluster::connect(calm(), &shards).await;
    let names = super::client_cluster::a_name_each(&shards, "k");
    let guard = client.multi(names.clone()).lock().await.unwrap();
    for (name, node) in names.iter().zip(shards.primaries()) {
        let waiting = node.blocked_in(&format!("RLOCK.ACQUIRE {name} rival 30000 BLOCK 0"));
        soon(guard.wanted()).await.unwrap();
        waiting.close();
        until("it has left", || node.waiting_owners(name).is_empty());
    }
}

#[test]
fn without_async_it_is_looked_at_or_waited_for() {
    let server = Server::start();
    let client = blocking::Client::connect(&url(&server)).unwrap();
    let guard = client.lock("k").lock().unwrap();
    assert!(!guard.wanted_within(Duration::ZERO).unwrap());
    until("the server is asked", || calls(&server, "renew") == 1);
    let _waiting = server.wait_in_queue("k", "rival");
    until("it is told", || {
        guard.wanted_within(Duration::ZERO).unwrap()
    });
    // Somebody waits still.
    assert!(guard.wanted_within(Duration::from_secs(15)).unwrap());
    server.run("RLOCK.BREAK k");
    until("it is lost", || guard.is_lost());
    assert!(guard.wanted().unwrap_err().is_lost());
}
