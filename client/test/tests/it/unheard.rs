//! Answers and events that were lost with their connection.
#![allow(clippy::unwrap_used, reason = "a test fails so")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rlock_client::{Client, Error, MultiGuard, MultiLock};
use rlock_test::{Direction, Network};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

pub(crate) const ADDRESS: &str = "locks:6379";

pub(crate) const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            sleep(ms(1)).await;
        }
    };
    assert!(timeout(ms(10_000), waiting).await.is_ok(), "{what}");
}

/// A call undoes a grant of several locks whose event was lost. Meanwhile another call of the scope
/// is granted one of them, and keeps it.
#[test]
fn undoing_an_unheard_grant_takes_nothing_that_was_granted_meanwhile() {
    rlock_test::run(1, async |network| {
        let server = network.server(ADDRESS);
        let hosts = [network.host(), network.host()];
        let connect = async |n: usize| {
            let builder = Client::builder().dial(hosts[n].dial());
            builder.connect("redis://locks:6379").await.unwrap()
        };
        let (one, other) = (connect(0).await, connect(1).await);
        let renewing = Rc::new(Cell::new(false));
        let seen = Rc::clone(&renewing);
        server.observe(move |line| {
            if line.contains("RLOCK.RENEW b") {
                seen.set(true);
            }
        });
        let scope = one.scope();
        let first = scope.lock("a").lock().await.unwrap();
        let of_b = other.lock("b").lock().await.unwrap();
        let both = scope.multi(["a", "b"]);
        let _waiting = spawn_local(async move { both.lock().await });
        sleep(ms(300)).await;
        // Both are granted, and the word of it is lost with the session connection.
        let cut = hosts[0].cut_one(ADDRESS, 0, Direction::ToHost).unwrap();
        of_b.unlock().await.unwrap();
        sleep(ms(20)).await;
        hosts[0].set_latency(ms(20));
        cut.end(false);
        // Attached anew, the call asks whether it was granted; the answer takes a while.
        until("it is asked", || renewing.get()).await;
        let slow = hosts[0].cut_one(ADDRESS, 0, Direction::ToHost).unwrap();
        // `a` is lost, which its guard is told; and it is taken again for the same scope.
        server.delete("a");
        sleep(ms(60)).await;
        drop(first);
        let lock = scope.lock("a").lease(ms(60_000));
        let again = spawn_local(async move { lock.lock().await });
        until("it is granted", || server.holders("a").len() == 1).await;
        // Another client waits behind it, as it should.
        let lock = other.lock("a").lease(ms(60_000));
        let third = spawn_local(async move { lock.lock_timeout(ms(1_000)).await });
        sleep(ms(50)).await;
        slow.end(true);
        let again = again.await.unwrap().unwrap();
        let third = third.await.unwrap();
        sleep(ms(20_000)).await;
        if let Ok(third) = third {
            let (again, third) = (again.valid_for(), third.valid_for());
            assert!(
                again.is_zero() || third.is_zero(),
                "two guards say held: {again:?}, {third:?}"
            );
        }
    });
}

/// The first RELEASE was carried out, and its answer was lost with the connection. The second finds
/// nothing, and that is no loss.
#[test]
fn an_unlock_that_is_sent_again_is_no_loss() {
    rlock_test::run(1, async |network| {
        let server = network.server(ADDRESS);
        let host = network.host();
        let builder = Client::builder().dial(host.dial()).grace(ms(20_000));
        let client = builder.connect("redis://locks:6379").await.unwrap();
        let guard = client.lock("orders").lock().await.unwrap();
        host.cut(ADDRESS, Direction::ToHost);
        let unlocking = spawn_local(guard.unlock());
        until("it was given back", || server.holders("orders").is_empty()).await;
        host.reset(ADDRESS);
        host.mend(ADDRESS);
        unlocking.await.unwrap().unwrap();
    });
}

/// The first MACQUIRE was carried out, and its answer was lost with the connection. One of the
/// locks goes to another before it is sent again, and its owner has the others still.
async fn asked_again_with_one_gone(
    network: &Network,
    call: impl AsyncFn(MultiLock) -> Result<MultiGuard, Error>,
) {
    let server = network.server(ADDRESS);
    let host = network.host();
    let connect = async |dial| {
        let builder = Client::builder().dial(dial).grace(ms(20_000));
        builder.connect("redis://locks:6379").await.unwrap()
    };
    let one = connect(host.dial()).await;
    let other = connect(network.host().dial()).await;
    host.cut(ADDRESS, Direction::ToHost);
    let calling = call(one.multi(["a", "b"]));
    let taking = async {
        until("both are granted", || !server.holders("b").is_empty()).await;
        server.delete("b");
        let theirs = other.lock("b").lock().await.unwrap();
        host.reset(ADDRESS);
        host.mend(ADDRESS);
        sleep(ms(2_000)).await;
        theirs.unlock().await.unwrap();
    };
    let (called, ()) = tokio::join!(calling, taking);
    if let Ok(guard) = called {
        assert_eq!(server.holders("a").len(), 1);
        guard.unlock().await.unwrap();
    }
    until("nothing is left", || {
        server.holders("a").is_empty() && server.holders("b").is_empty()
    })
    .await;
}

#[test]
fn several_asked_for_again_leave_nothing_when_they_are_granted() {
    rlock_test::run(1, async |network| {
        asked_again_with_one_gone(&network, async |both| both.lock().await).await;
    });
}

#[test]
fn several_asked_for_again_leave_nothing_when_their_time_is_over() {
    rlock_test::run(1, async |network| {
        let within = async |both: MultiLock| both.lock_timeout(ms(1_000)).await;
        asked_again_with_one_gone(&network, within).await;
    });
}

#[test]
fn several_asked_for_again_leave_nothing_when_they_are_tried() {
    rlock_test::run(1, async |network| {
        asked_again_with_one_gone(&network, async |both| both.try_lock().await).await;
    });
}
