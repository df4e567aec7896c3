//! Guards that are told of waiters, at the server in memory.

use std::time::Duration;

use rlock_client::{Client, Error};
use rlock_test::{Direction, Network};
use tokio::time::{Instant, sleep, timeout};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn connect(network: &Network) -> Result<Client, Error> {
    let builder = Client::builder().dial(network.host().dial());
    builder.connect("redis://one").await
}

#[test]
fn a_holder_that_yields_between_two_steps_keeps_nobody_waiting_for_longer() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let (job, other) = (connect(&network).await?, connect(&network).await?);
        let working = tokio::task::spawn_local(async move {
            let lock = job.lock("index");
            let (mut guard, mut yielded) = (lock.lock().await?, 0);
            for _ in 0..100 {
                sleep(ms(100)).await;
                if let Ok(wanted) = timeout(Duration::ZERO, guard.wanted()).await {
                    wanted?;
                    guard.unlock().await?;
                    guard = lock.lock().await?;
                    yielded += 1;
                }
            }
            guard.unlock().await?;
            Ok::<_, Error>(yielded)
        });
        for _ in 0..5 {
            sleep(ms(1_050)).await;
            let asked = Instant::now();
            let guard = other.lock("index").lock().await?;
            assert!(asked.elapsed() < ms(200), "{:?}", asked.elapsed());
            guard.unlock().await?;
        }
        assert_eq!(working.await.expect("it does not panic")?, 5);
        Ok(())
    })
}

#[test]
fn after_a_failover_the_new_primary_is_asked() -> Result<(), Error> {
    rlock_test::run(2, async |network| {
        let primary = network.server("one:6379");
        let replica = network.replica("two:6379", &primary);
        let sentinel = network.sentinel("sentinel:26379", "orders");
        sentinel.set_primary("one:6379");
        let builder = || {
            let builder = Client::builder().dial(network.host().dial());
            builder
                .grace(Duration::from_secs(20))
                .sentinels(["redis://sentinel"])
        };
        let client = builder().connect("redis://orders").await?;
        let guard = client.lock("a").lock().await?;
        assert!(timeout(Duration::ZERO, guard.wanted()).await.is_err());
        sleep(Duration::from_secs(2)).await;
        replica.promote();
        sentinel.set_primary("two:6379");
        let rival = builder().connect("redis://orders").await?;
        let refused = async {
            sleep(Duration::from_secs(10)).await;
            rival.lock("a").try_lock().await.map(drop)
        };
        let (wanted, refused) = tokio::join!(guard.wanted(), refused);
        wanted?;
        assert!(refused.expect_err("it is held").is_not_acquired());
        assert!(!guard.is_lost());
        Ok(())
    })
}

/// Word of the loss comes before the answer that brings the grant. If the server were not asked
/// again, the next caller would be given a lock that another owner has by now.
#[test]
fn a_kept_lock_whose_loss_was_told_ahead_is_not_handed_on() -> Result<(), Error> {
    rlock_test::run(4, async |network| {
        let server = network.server("one:6379");
        let host = network.host();
        let client = Client::builder().dial(host.dial());
        let client = client.connect("redis://one").await?;
        let other = connect(&network).await?;
        // Both connections are used.
        client.lock("x").lock().await?.unlock().await?;
        sleep(ms(100)).await;
        let name = "a";
        let lock = client.lock(name).keep(ms(100_000));
        // The second brings the answers to commands, the first the events.
        let cut = host.cut_one("one:6379", 1, Direction::ToHost);
        let mut first = Box::pin(lock.lock());
        assert!(timeout(ms(100), &mut first).await.is_err());
        server.delete(name);
        let others = other.lock(name).lock().await?;
        sleep(ms(500)).await;
        let mut next = Box::pin(lock.lock());
        assert!(timeout(ms(100), &mut next).await.is_err());
        cut.expect("it is connected").end(true);
        let first = first.await?;
        let lost = first.token();
        host.cut("one:6379", Direction::ToServer);
        drop(first);
        if let Ok(next) = timeout(ms(1), next).await {
            assert_ne!(next?.token(), lost);
        }
        host.mend("one:6379");
        others.unlock().await
    })
}
