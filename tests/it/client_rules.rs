//! The client's five rules: one hold for each owner, and a session that confirms its holds by
//! itself.

use std::time::{Duration, Instant};

use rlock_tests::{Proxy, Server, until};

use super::client::{calls, calm, client, connect, soon};
use super::client_faults::{LONG_GRACE, client_through};

/// Both connections are silent, as when a device between client and server has forgotten them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_connections_silent_at_once_cost_no_guard_and_no_renewal() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let client = client_through(&proxy).await;
    let guard = client.lock("k").lock().await.unwrap();
    let renewals = calls(&server, "renew");
    proxy.cut_to_server();
    proxy.cut_to_client();
    tokio::time::sleep(LONG_GRACE * 3 / 4).await;
    assert!(!guard.is_lost());
    proxy.heal();
    let events = calls(&server, "events");
    until("the session is heard of again", || {
        calls(&server, "events") > events + 2
    });
    let began = Instant::now();
    while began.elapsed() < LONG_GRACE {
        assert!(!guard.is_lost());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(calls(&server, "renew"), renewals);
    soon(guard.unlock()).await.unwrap();
    assert_eq!(server.holder("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_out_of_its_bounds_is_refused_also_by_an_owner_who_holds_the_lock() {
    let server = Server::start();
    let client = client(&server).await;
    let scope = client.scope();
    let _guard = scope.lock("k").lock().await.unwrap();
    for lease in [Duration::ZERO, Duration::from_secs(1 << 50)] {
        let error = scope.lock("k").lease(lease).lock().await.unwrap_err();
        assert!(error.is_refused(), "{error}");
        let error = scope.lock("k").max_hold(lease).lock().await.unwrap_err();
        assert!(error.is_refused(), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_entered_again_costs_no_command_and_the_last_guard_gives_it_back() {
    let server = Server::start();
    let client = client(&server).await;
    let scope = client.scope();
    let first = scope.lock("a").lock().await.unwrap();
    let acquires = calls(&server, "acquire");
    let mut others = Vec::new();
    for _ in 0..100 {
        others.push(scope.lock("a").try_lock().await.unwrap());
    }
    assert_eq!(calls(&server, "acquire"), acquires);
    assert_eq!(server.run("RLOCK.INFO a").get("count"), &1);
    // Of several locks those are asked for that are missing.
    let both = scope.multi(["a", "b"]).lock().await.unwrap();
    assert_eq!(both.token_of("a"), Some(first.token()));
    assert!(both.token() > first.token());
    drop(first);
    for other in others {
        other.unlock().await.unwrap();
    }
    assert!(server.holder("a").is_some());
    both.unlock().await.unwrap();
    assert_eq!((server.holder("a"), server.holder("b")), (None, None));
}

/// A thousand guards are dropped while the server is away, and a call beside them ends in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_given_back_while_the_server_is_silent_is_free_when_it_answers() {
    const LOCKS: usize = 1_000;
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let client = client_through(&proxy).await;
    let mut guards = Vec::new();
    for number in 0..LOCKS {
        guards.push(client.lock(format!("k{number}")).lock().await.unwrap());
    }
    proxy.cut_to_server();
    drop(guards);
    let began = Instant::now();
    assert!(client.lock("other").try_lock().await.is_err());
    assert!(began.elapsed() < Duration::from_secs(30));
    proxy.heal();
    until("all are free", || server.run("DBSIZE") == 0);
}

/// The first call asks and is then queued. A try beside it is refused as soon as the server has
/// answered the first, and never waits in the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_behind_a_wait_of_its_owner_is_refused_at_once() {
    let server = Server::start();
    // A try that waited for the time of a reply would not be refused in the time of this test.
    let settings = calm().response_timeout(Duration::from_secs(300));
    let client = connect(settings, &server).await;
    server.connect().take("k", "alice");
    let scope = client.scope();
    for _ in 0..50 {
        let first = scope.lock("k");
        let waiting = tokio::spawn(async move { first.lock().await });
        // Now before the first has asked, now while it asks, now while it waits.
        let error = soon(scope.lock("k").try_lock()).await.unwrap_err();
        assert!(error.is_not_acquired(), "{error}");
        waiting.abort();
        until("the wait is undone", || {
            server.waiting_owners("k").is_empty()
        });
    }
}
