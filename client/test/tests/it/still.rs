//! A client or a server that stands still, as after SIGSTOP.

use std::time::Duration;

use rlock_client::{Client, ClientBuilder, Error};
use rlock_test::Host;
use tokio::task::yield_now;
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(2);

fn settings(host: &Host) -> ClientBuilder {
    let settings = Client::builder().dial(host.dial());
    settings.lease(LEASE).grace(Duration::from_secs(5))
}

#[test]
fn a_guard_in_a_process_that_stood_still_is_lost_when_it_is_asked() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let (still, other) = (network.host(), network.host());
        let other = settings(&other).connect("redis://locks:6379").await?;
        let connecting = settings(&still).connect("redis://locks:6379");
        let client = still.run(connecting).await?;
        let guard = client.lock("orders").lock().await?;
        sleep(LEASE * 3).await;
        assert!(!guard.is_lost(), "it is renewed");

        still.pause();
        let next = other.lock("orders").lock().await?;
        assert!(next.token() > guard.token());
        assert!(
            guard.is_lost(),
            "before anything else of its process is done"
        );
        let before = server.stats().renewals;
        sleep(Duration::from_millis(200)).await;
        assert_eq!(server.stats().renewals, before, "nothing of it is done");

        still.resume();
        assert!(client.lock("orders").try_lock().await.is_err());
        next.unlock().await?;
        client.lock("orders").lock().await?.unlock().await
    })
}

#[test]
fn a_process_that_stands_still_for_a_moment_loses_nothing() -> Result<(), Error> {
    rlock_test::run(2, async |network| {
        let server = network.server("locks:6379");
        let host = network.host();
        let connecting = settings(&host).connect("redis://locks:6379");
        let client = host.run(connecting).await?;
        let guard = client.lock("orders").lock().await?;
        for _ in 0..10 {
            host.pause();
            sleep(LEASE / 4).await;
            host.resume();
            assert!(!guard.is_lost());
            sleep(LEASE / 4).await;
        }
        assert_eq!(server.holders("orders").len(), 1);
        guard.unlock().await
    })
}

#[test]
fn a_server_killed_while_it_stood_still_does_nothing_it_was_sent() -> Result<(), Error> {
    rlock_test::run(3, async |network| {
        let server = network.server("locks:6379");
        let host = network.host();
        let client = settings(&host).connect("redis://locks:6379").await?;
        client.lock("orders").lock().await?.unlock().await?;

        server.pause();
        let lock = client.lock("orders");
        let mut call = std::pin::pin!(lock.try_lock());
        let sent = tokio::time::timeout(Duration::from_millis(50), &mut call).await;
        assert!(sent.is_err(), "it stands still");
        let before = server.stats().commands;
        server.crash(false);
        server.restart();
        // No time goes by, so that nobody has connected to it again.
        for _ in 0..100 {
            yield_now().await;
        }
        assert_eq!(server.stats().commands, before, "what it read is lost");
        assert_eq!(server.contents().sessions, 0);

        call.await?.unlock().await
    })
}

/// The answers come later than usual, and each is overdue by the share of the grace that there is
/// for one. What is dialled then is of no use: the old answer comes first.
#[test]
fn a_long_way_to_the_server_opens_no_connection_again_and_again() -> Result<(), Error> {
    rlock_test::run(3, async |network| {
        let _server = network.server("locks:6379");
        let host = network.host();
        host.set_latency(Duration::from_millis(200));
        let settings = Client::builder().dial(host.dial());
        let settings = settings.grace(Duration::from_secs(1));
        let client = settings.connect("redis://locks:6379").await?;
        let guard = client.lock("orders").lock().await?;
        sleep(Duration::from_secs(60)).await;
        assert!(!guard.is_lost());
        let dials = host.dials();
        assert!(dials < 10, "{dials} connections in a minute");
        guard.unlock().await
    })
}
