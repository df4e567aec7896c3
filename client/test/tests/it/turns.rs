//! Calls of one owner that wait for each other in the client.

use std::pin::pin;
use std::time::Duration;

use rlock_client::{Client, Error};
use rlock_test::{Direction, Network};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);

async fn connect(network: &Network) -> Result<Client, Error> {
    let builder = Client::builder().dial(network.host().dial());
    builder.connect("redis://one").await
}

/// A call for several locks has to wait behind another call of its owner for one of them, which
/// stands in the server's queue. Another lock that the owner gives back meanwhile is free at once.
#[test]
fn a_call_that_waits_for_one_lock_keeps_no_other() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let (one, other) = (connect(&network).await?, connect(&network).await?);
        let scope = one.scope();
        let of_other = other.lock("b").lock().await?;
        let guard = scope.lock("a").lock().await?;
        let queued = scope.lock("b");
        let queued = spawn_local(async move { queued.lock().await });
        sleep(SECOND).await;
        let both = scope.multi(["a", "b"]);
        let both = spawn_local(async move { both.lock().await });
        sleep(SECOND).await;
        guard.unlock().await?;
        assert!(server.holders("a").is_empty(), "unlock() has said so");
        other.lock("a").try_lock().await?.unlock().await?;
        // Both calls come to their end all the same, in their order.
        of_other.unlock().await?;
        let first = timeout(SECOND, queued).await;
        first
            .expect("it is its turn")
            .expect("it ends")?
            .unlock()
            .await?;
        let last = timeout(SECOND, both).await;
        let last = last.expect("it is its turn").expect("it ends")?;
        assert_eq!(server.holders("a"), server.holders("b"));
        last.unlock().await?;
        assert!(server.holders("a").is_empty() && server.holders("b").is_empty());
        Ok(())
    })
}

/// Calls of one owner for the same locks, named in different orders, do not wait for each other in
/// a circle, and a call that is dropped in line holds up no other.
#[test]
fn calls_of_one_owner_for_several_locks_follow_each_other() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let (one, other) = (connect(&network).await?, connect(&network).await?);
        let scope = one.scope();
        let of_other = other.multi(["a", "b", "c"]).lock().await?;
        let orders = [["a", "b"], ["b", "a"], ["c", "a"], ["b", "c"], ["a", "c"]];
        let calls = orders.map(|names| {
            let locks = scope.multi(names);
            spawn_local(async move { locks.lock().await?.unlock().await })
        });
        sleep(SECOND).await;
        calls[1].abort();
        of_other.unlock().await?;
        for (number, call) in calls.into_iter().enumerate() {
            let ended = timeout(SECOND, call).await.expect("it is its turn");
            assert_eq!(ended.is_err(), number == 1, "{ended:?}");
            ended.unwrap_or(Ok(()))?;
        }
        let names = ["a", "b", "c"];
        assert!(names.iter().all(|name| server.holders(name).is_empty()));
        Ok(())
    })
}

/// A call that does not wait stands in line behind one that is about to wait in the server's queue.
/// As soon as that is known, it ends.
#[test]
fn a_try_behind_a_call_ends_when_that_waits_in_the_queue() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let host = network.host();
        let builder = Client::builder().dial(host.dial());
        let (one, other) = (
            builder.connect("redis://one").await?,
            connect(&network).await?,
        );
        let _of_other = other.lock("a").lock().await?;
        let lock = one.scope().lock("a");
        // Both connections are used.
        one.lock("b").lock().await?.unlock().await?;
        let cut = host.cut_one("one:6379", 1, Direction::ToHost);
        let (queued, last) = (lock.clone(), lock);
        let _queued = spawn_local(async move { queued.lock().await });
        let last = spawn_local(async move { last.try_lock().await });
        sleep(SECOND / 2).await;
        assert!(!last.is_finished(), "the other may be granted yet");
        cut.expect("it is connected").end(true);
        let last = timeout(SECOND / 10, last).await;
        let last = last.expect("it waits no longer").expect("it ends");
        assert!(
            last.map(drop)
                .expect_err("another has it")
                .is_not_acquired()
        );
        Ok(())
    })
}

/// The first in line waits for another lock, and has it soon enough for a call behind it that does
/// not wait.
#[test]
fn a_try_behind_one_that_waits_for_another_lock_ends_in_time() -> Result<(), Error> {
    for is_soon in [true, false] {
        rlock_test::run(1, async |network| {
            let _server = network.server("one:6379");
            let (one, other) = (connect(&network).await?, connect(&network).await?);
            let scope = one.scope();
            let of_other = other.lock("b").lock().await?;
            let queued = scope.lock("b");
            let queued = spawn_local(async move { queued.lock().await });
            sleep(SECOND).await;
            let both = scope.multi(["a", "b"]);
            let _both = spawn_local(async move { both.lock().await?.unlock().await });
            sleep(SECOND).await;
            let last = scope.lock("a");
            let last = spawn_local(async move { last.try_lock().await });
            sleep(SECOND).await;
            assert!(!last.is_finished());
            if is_soon {
                of_other.unlock().await?;
                queued.await.expect("it ends")?.unlock().await?;
            }
            let last = timeout(5 * SECOND, last).await;
            let last = last.expect("it waits no longer").expect("it ends");
            assert_eq!(last.is_ok(), is_soon, "{:?}", last.map(drop));
            Ok::<_, Error>(())
        })?;
    }
    Ok(())
}

/// It waits for an earlier renewal to be answered, and is not polled again. The watchdog goes on.
#[test]
fn a_renewal_that_nobody_polls_keeps_no_turn() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let host = network.host();
        let client = Client::builder().dial(host.dial());
        let client = client.connect("redis://one").await?;
        let guard = client.lock("a").lock().await?;
        let answers = host.cut_one("one:6379", 1, Direction::ToHost);
        let (mut first, mut second) = (pin!(guard.renew()), pin!(guard.renew()));
        assert!(timeout(SECOND, &mut first).await.is_err());
        assert!(timeout(SECOND / 10, &mut second).await.is_err());
        answers.expect("it is connected").end(true);
        sleep(SECOND * 100).await;
        assert!(!guard.is_lost());
        Ok(())
    })
}

/// The server was not asked, so nobody knows how long another owner's lease lasts.
#[test]
fn a_try_behind_a_wait_of_its_owner_names_no_lease() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let _server = network.server("one:6379");
        let (one, other) = (connect(&network).await?, connect(&network).await?);
        let held = other.lock("a").lock().await?;
        let lock = one.scope().lock("a");
        let waits = lock.clone();
        let waits = spawn_local(async move { waits.lock().await });
        sleep(SECOND).await;
        let refused = lock.try_lock().await.map(drop).expect_err("it is held");
        assert!(refused.is_not_acquired() && refused.lease_left().is_none());
        held.unlock().await?;
        waits.await.expect("it ends")?.unlock().await
    })
}
