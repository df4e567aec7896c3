//! A guard hears that it keeps a waiter out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rlock_client::{
    ErrorKind, Guard, LostReason, QuorumBuilder, QuorumClient, QuorumGuard, blocking,
};
use rlock_tests::{Server, Shards, until};
use tokio::time::timeout;

use super::client::{MS, calls, calm, client, soon, two_clients, url, wait_in_queue};
use super::client_quorum::within_grace;
use super::ways::two_ways;

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
    // A holder that looks at it between two steps does not ask the server each time.
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

/// Settings with which no part is lost where all stands still for a while, and asked for anew.
fn settings() -> QuorumBuilder {
    within_grace(Duration::from_secs(300))
}

/// Three servers of a quorum, a client of theirs, and a rival.
async fn three() -> ([Server; 3], QuorumClient, QuorumClient) {
    let servers: [Server; 3] = std::array::from_fn(|_| Server::start());
    let connect = async || {
        let connecting = async {
            loop {
                // On a busy machine a majority may not answer in time.
                if let Ok(client) = settings().connect(servers.each_ref().map(url)).await {
                    return client;
                }
            }
        };
        soon(connecting).await
    };
    let (client, rival) = (connect().await, connect().await);
    (servers, client, rival)
}

/// Takes the lock at all three.
async fn take(client: &QuorumClient) -> QuorumGuard {
    loop {
        // A busy machine may make it too late, and what a rival had is on its way back.
        let Ok(guard) = soon(client.lock("k").lock()).await else {
            continue;
        };
        until("all have joined", || guard.tokens().len() == 3);
        return guard;
    }
}

/// The guard hears that others are refused at this server. The first of them may come before the
/// server was asked to tell: the server may have got another renewal by then.
async fn hears_of_others_at(server: &Server, guard: &QuorumGuard) {
    let heard = async {
        loop {
            want(server, "");
            if let Ok(told) = timeout(20 * MS, guard.wanted()).await {
                return told;
            }
        }
    };
    soon(heard).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_a_majority_it_ends_as_soon_as_one_server_tells() {
    let (servers, client, rival) = three().await;
    let asked = || servers.each_ref().map(|server| calls(server, "renew"));
    let guard = take(&client).await;
    for _ in 0..1_000 {
        assert!(timeout(Duration::ZERO, guard.wanted()).await.is_err());
    }
    until("all are asked", || asked().iter().all(|times| *times > 0));
    assert!(asked().iter().sum::<u64>() < 10, "not each time");
    hears_of_others_at(&servers[2], &guard).await;
    // Told once, it is asked again.
    let before = asked()[2];
    assert!(timeout(Duration::ZERO, guard.wanted()).await.is_err());
    until("it is asked again", || asked()[2] > before);
    servers[2].freeze();
    hears_of_others_at(&servers[1], &guard).await;
    servers[2].thaw();
    soon(guard.unlock()).await.unwrap();

    // One that tries again and again.
    let guard = take(&client).await;
    let trying = tokio::spawn(async move { rival.lock("k").lock().await });
    soon(guard.wanted()).await.unwrap();
    soon(guard.unlock()).await.unwrap();
    let theirs = soon(trying).await.unwrap().unwrap();
    soon(theirs.unlock()).await.unwrap();

    let guard = take(&client).await;
    let (wanted, ()) = tokio::join!(soon(guard.wanted()), async {
        for server in &servers[..2] {
            server.run("RLOCK.BREAK k");
        }
    });
    assert!(wanted.unwrap_err().is_lost());
    assert!(soon(guard.wanted()).await.unwrap_err().is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_a_majority_servers_that_refuse_to_tell_matter_when_none_is_left() {
    let (servers, client, _rival) = three().await;
    let guard = take(&client).await;
    for server in &servers[..2] {
        server.run("ACL SETUSER default -rlock.renew");
    }
    hears_of_others_at(&servers[2], &guard).await;
    servers[2].run("ACL SETUSER default -rlock.renew");
    let refused = soon(guard.wanted()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    assert!(refused.servers().all(|(_, error)| error.is_some()));
}

#[test]
fn at_a_majority_without_async_it_is_looked_at_or_waited_for() {
    let servers: [Server; 3] = std::array::from_fn(|_| Server::start());
    let urls = servers.each_ref().map(url);
    let client = blocking::QuorumBuilder::from(settings())
        .connect(urls)
        .unwrap();
    let guard = client.lock("k").lock().unwrap();
    until("all have joined", || guard.tokens().len() == 3);
    assert!(!guard.wanted_within(Duration::ZERO).unwrap());
    until("it is told", || {
        want(&servers[0], "");
        guard.wanted_within(20 * MS).unwrap()
    });
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            until("it is told again", || {
                want(&servers[0], "");
                is_over.load(Ordering::SeqCst)
            });
        });
        guard.wanted().unwrap();
        is_over.store(true, Ordering::SeqCst);
    });
}
