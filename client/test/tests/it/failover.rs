//! Replicas that lag, failovers that lose writes not yet copied, and sentinels that announce them.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::try_join_all;
use rlock_client::{Client, ClientBuilder, Error, LostReason};
use rlock_test::{Direction, Network, Sentinel, Server};
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::kept::poll_once;

const WITHIN: Duration = Duration::from_millis(200);

fn pair(network: &Network) -> (Server, Server) {
    let primary = network.server("one:6379");
    let replica = network.replica("two:6379", &primary);
    (primary, replica)
}

fn sentinels(network: &Network) -> Vec<Sentinel> {
    let start = |number| {
        let sentinel = network.sentinel(&format!("sentinel-{number}:26379"), "orders");
        sentinel.set_primary("one:6379");
        sentinel
    };
    (0..3).map(start).collect()
}

fn builder(network: &Network) -> ClientBuilder {
    Client::builder().dial(network.host().dial())
}

async fn behind_sentinels(settings: ClientBuilder) -> Result<Client, Error> {
    let sentinels = (0..3).map(|number| format!("redis://sentinel-{number}"));
    settings
        .sentinels(sentinels)
        .connect("redis://orders")
        .await
}

#[test]
fn a_replica_has_what_its_primary_had_and_writes_nothing() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (primary, replica) = pair(&network);
        let client = builder(&network).connect("redis://one").await?;
        replica.cut_replication();
        let guard = client.lock("a").lock().await?;
        sleep(Duration::from_secs(1)).await;
        assert_eq!(primary.holders("a").len(), 1);
        assert!(replica.holders("a").is_empty());
        assert!(!replica.is_in_sync());
        replica.mend_replication();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(replica.holders("a"), primary.holders("a"));
        assert!(replica.is_in_sync());
        let refused = builder(&network).connect("redis://two").await;
        let refused = refused.map(drop).expect_err("it is a replica");
        assert!(refused.to_string().contains("replica"), "{refused}");
        guard.unlock().await?;
        sleep(Duration::from_millis(1)).await;
        assert!(replica.holders("a").is_empty());
        Ok(())
    })
}

#[test]
fn what_a_replica_has_not_got_is_not_acknowledged() -> Result<(), Error> {
    rlock_test::run(2, async |network| {
        let (_primary, replica) = pair(&network);
        replica.set_lag(Duration::from_millis(20));
        let settings = builder(&network).acknowledged_by(1, WITHIN);
        let client = settings.connect("redis://one").await?;
        // A replica connects within a second.
        sleep(Duration::from_secs(2)).await;
        let guard = client.lock("a").lock().await?;
        assert_eq!(replica.holders("a").len(), 1);
        guard.unlock().await?;
        replica.cut_replication();
        let error = client.lock("b").lock().await.map(drop);
        let error = error.expect_err("nobody acknowledges it");
        assert!(error.is_not_acknowledged(), "{error}");
        Ok(())
    })
}

#[test]
fn a_failover_keeps_what_the_replica_has_and_loses_the_rest() -> Result<(), Error> {
    rlock_test::run(3, async |network| {
        let (primary, replica) = pair(&network);
        let sentinels = sentinels(&network);
        let client = behind_sentinels(builder(&network).grace(Duration::from_secs(20))).await?;
        let kept = client.lock("a").lock().await?;
        sleep(Duration::from_secs(2)).await;
        replica.cut_replication();
        let tail = client.lock("b").lock().await?;
        replica.promote();
        for sentinel in &sentinels {
            sentinel.set_primary("two:6379");
        }
        let switched = Instant::now();
        assert_eq!(tail.lost().await, LostReason::NotHeld);
        // One of the sentinels announces it at once.
        assert!(switched.elapsed() < Duration::from_secs(1));
        // The old primary does not know of it, and is not asked any more.
        assert_eq!(primary.holders("b").len(), 1);
        assert!(!kept.is_lost());
        replica.mend_replication();
        primary.replicate(&replica);
        sleep(Duration::from_secs(2)).await;
        assert!(!kept.is_lost());
        assert_eq!(primary.holders("a"), replica.holders("a"));
        assert!(primary.is_replica() && primary.holders("b").is_empty());
        kept.unlock().await
    })
}

#[test]
fn clients_that_are_cut_off_with_the_old_primary_go_on_there() -> Result<(), Error> {
    rlock_test::run(4, async |network| {
        let (primary, replica) = pair(&network);
        let sentinels = sentinels(&network);
        let client = behind_sentinels(builder(&network)).await?;
        replica.cut_replication();
        for sentinel in &sentinels {
            sentinel.pause();
        }
        replica.promote();
        let guard = client.lock("a").lock().await?;
        sleep(Duration::from_secs(60)).await;
        assert!(!guard.is_lost());
        for sentinel in &sentinels {
            sentinel.resume();
            sentinel.set_primary("two:6379");
        }
        let lost = timeout(Duration::from_secs(4), guard.lost()).await;
        assert_eq!(lost.ok(), Some(LostReason::NotHeld));
        assert_eq!(primary.holders("a").len(), 1);
        Ok(())
    })
}

/// Without this a thousand clients would open some thousand connections a second.
#[test]
fn sentinels_are_asked_on_connections_that_last() -> Result<(), Error> {
    rlock_test::run(7, async |network| {
        let (primary, replica) = pair(&network);
        let sentinels = sentinels(&network);
        let host = network.host();
        let settings = Client::builder().dial(host.dial());
        let client = behind_sentinels(settings.grace(Duration::from_secs(1))).await?;
        let guard = client.lock("a").lock().await?;
        sleep(Duration::from_secs(5)).await;
        let dials = host.dials();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(host.dials(), dials, "connections are opened by the clock");

        // One that was closed, or has gone silent, is opened anew.
        host.reset("sentinel-0:26379");
        host.reset("sentinel-1:26379");
        let silent = host.cut_one("sentinel-2:26379", 0, Direction::ToHost);
        sleep(Duration::from_secs(5)).await;
        drop(silent);
        primary.pause();
        replica.promote();
        for sentinel in &sentinels {
            sentinel.set_primary("two:6379");
        }
        sleep(Duration::from_secs(5)).await;
        client.lock("b").try_lock().await?.unlock().await?;
        assert!(replica.holders("a").len() == 1 || guard.is_lost());
        Ok(())
    })
}

#[test]
fn waits_at_a_primary_that_becomes_a_replica_go_on_at_the_other() -> Result<(), Error> {
    rlock_test::run(5, async |network| {
        let (primary, replica) = pair(&network);
        let sentinels = sentinels(&network);
        let settings = || builder(&network).grace(Duration::from_secs(20));
        let (one, other) = (
            behind_sentinels(settings()).await?,
            behind_sentinels(settings()).await?,
        );
        let guard = one.lock("a").lock().await?;
        let lock = other.lock("a");
        let waits = async { lock.lock().await };
        let failover = async {
            sleep(Duration::from_secs(2)).await;
            assert!(replica.is_in_sync());
            replica.promote();
            primary.replicate(&replica);
            primary.disconnect_clients();
            for sentinel in &sentinels {
                sentinel.set_primary("two:6379");
            }
            sleep(Duration::from_secs(5)).await;
            assert!(!guard.is_lost());
            guard.unlock().await
        };
        let (next, unlocked) = tokio::join!(waits, failover);
        unlocked?;
        assert_eq!(replica.holders("a").len(), 1);
        next?.unlock().await
    })
}

#[test]
fn each_of_two_replicas_acknowledges_for_itself() -> Result<(), Error> {
    rlock_test::run(9, async |network| {
        let primary = network.server("primary:6379");
        let replicas = ["near:6379", "far:6379"].map(|at| network.replica(at, &primary));
        replicas[1].set_lag(Duration::from_millis(400));
        let connect = async |copies| {
            let builder = Client::builder().dial(network.host().dial());
            let within = Duration::from_millis(50);
            let builder = builder.acknowledged_by(copies, within);
            builder.connect("redis://primary:6379").await
        };
        let (by_one, by_both) = (connect(1).await?, connect(2).await?);
        sleep(Duration::from_secs(2)).await;
        let guard = by_one.lock("a").lock().await?;
        let error = by_both.lock("b").try_lock().await.err();
        assert!(error.is_some(), "the far one is too late");
        replicas[1].cut_replication();
        let other = by_one.lock("c").lock().await?;
        assert!(replicas[0].offset() > replicas[1].offset());
        // One replica may lack writes that the other has acknowledged.
        replicas[1].mend_replication();
        sleep(Duration::from_secs(2)).await;
        replicas[1].set_lag(Duration::ZERO);
        by_both.lock("b").lock().await?.unlock().await?;
        guard.unlock().await?;
        other.unlock().await
    })
}

/// An operator ends a hold whose grant has not been heard of, and a failover loses that. At the new
/// primary the call has the same hold, with the same token.
#[test]
fn a_loss_that_a_failover_has_lost_ends_no_guard() -> Result<(), Error> {
    rlock_test::run(5, async |network| {
        let (primary, replica) = pair(&network);
        let sentinels = sentinels(&network);
        let host = network.host();
        let settings = Client::builder().dial(host.dial());
        let client = behind_sentinels(settings.grace(Duration::from_secs(20))).await?;
        client.lock("a").lock().await?.unlock().await?;
        sleep(Duration::from_secs(2)).await;
        let answers = host.cut_one("one:6379", 1, Direction::ToHost);
        let lock = client.lock("a");
        let call = spawn_local(async move { lock.lock().await });
        sleep(Duration::from_millis(100)).await;
        let holders = replica.holders("a");
        assert_eq!(holders.len(), 1, "its grant is copied");
        replica.cut_replication();
        primary.break_lock("a");
        sleep(Duration::from_millis(100)).await;
        replica.promote();
        for sentinel in &sentinels {
            sentinel.set_primary("two:6379");
        }
        answers.expect("it is connected").end(false);
        let guard = call.await.expect("it ends")?;
        assert_eq!(replica.holders("a"), holders);
        sleep(Duration::from_secs(1)).await;
        assert!(!guard.is_lost());
        guard.unlock().await?;
        assert!(replica.holders("a").is_empty());
        Ok(())
    })
}

/// A call has its grant while the watchdog hands over its renewals, and is not polled again. It
/// must not keep the turn to hand over its own.
#[test]
fn a_call_that_nobody_polls_stops_no_acknowledged_renewals() -> Result<(), Error> {
    rlock_test::run(6, async |network| {
        let (primary, _replica) = pair(&network);
        let host = network.host();
        let settings = Client::builder().dial(host.dial());
        let begun = Instant::now();
        let settings = settings.acknowledged_by(1, WITHIN);
        let client = settings.connect("redis://one").await?;
        sleep(Duration::from_secs(2)).await;
        let locks = (0..400).map(|number| client.lock(format!("lock:{number}")));
        let guards = try_join_all(locks.map(async |lock| lock.lock().await)).await?;
        sleep_until(begun + Duration::from_secs(9)).await;
        let answers = host.cut_one("one:6379", 1, Direction::ToHost);
        let lock = client.lock("late");
        let mut call = pin!(lock.lock());
        let begun = timeout(Duration::from_millis(900), &mut call).await;
        assert!(begun.is_err() && primary.holders("late").len() == 1);
        // The watchdog begins, and lets other tasks run after some renewals.
        sleep(Duration::from_millis(100)).await;
        answers.expect("it is connected").end(true);
        for _ in 0..3 {
            assert!(poll_once(call.as_mut()).await.is_none());
            yield_now().await;
        }
        sleep(Duration::from_secs(31)).await;
        assert!(guards.iter().all(|guard| !guard.is_lost()));
        Ok(())
    })
}
