//! Races between a client's actions and the server's messages, each found by an attack.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    missing_docs,
    reason = "a test fails so"
)]

use std::time::Duration;

use rlock_client::{Client, ClientBuilder};
use rlock_test::{Host, Network, Server};
use tokio::time::{Instant, sleep, timeout};

const ADDRESS: &str = "locks:6379";

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn connect(host: &Host, builder: ClientBuilder) -> Client {
    let builder = builder.dial(host.dial());
    builder
        .connect("redis://locks:6379")
        .await
        .expect("it is there")
}

/// The server, and two clients on hosts of their own.
async fn two(network: &Network) -> (Server, [Host; 2], [Client; 2]) {
    let server = network.server(ADDRESS);
    let hosts = [network.host(), network.host()];
    let one = connect(&hosts[0], Client::builder()).await;
    let other = connect(&hosts[1], Client::builder()).await;
    (server, hosts, [one, other])
}

/// The word of a grant and that of its loss come in one answer of EVENTS: the loss is
/// numbered when it is delivered, the grant when the call's task runs, and so the loss is taken
/// for one of an earlier hold.
#[test]
fn a_loss_that_is_told_together_with_its_grant_is_heard() {
    rlock_test::run(1, async |network| {
        let (server, hosts, [one, other]) = two(&network).await;
        let held = one.lock("orders").lock().await.unwrap();
        let beside = one.lock("beside").lock().await.unwrap();
        let wait = |name: &str| {
            let lock = other.lock(name).lease(Duration::from_secs(60));
            tokio::task::spawn_local(async move { lock.lock().await })
        };
        let (waiting, waiting_beside) = (wait("orders"), wait("beside"));
        sleep(ms(500)).await;
        assert_eq!(server.contents().waiters, 2);

        // An answer of EVENTS is on its way, and the next call has not come yet.
        hosts[1].set_latency(ms(200));
        beside.unlock().await.unwrap();
        held.unlock().await.unwrap();
        assert_eq!(server.holders("orders"), [other_owner(&server)]);
        server.delete("orders");

        let guard = waiting.await.unwrap().unwrap();
        let _beside = waiting_beside.await.unwrap().unwrap();
        hosts[1].set_latency(ms(0));
        sleep(Duration::from_secs(50)).await;
        // It is free, and another client gets it.
        let third = one.lock("orders").try_lock().await.expect("it is free");
        assert!(
            guard.is_lost(),
            "two guards say held: for {:?} more, and {:?}",
            guard.valid_for(),
            third.valid_for()
        );
    });
}

fn other_owner(server: &Server) -> String {
    server.holders("orders").pop().expect("somebody has it")
}

/// A lock is taken again by the same owner while its last guard, whose longest hold is nearly over,
/// is being given back. The new hold must not end with the time that the old one had left.
#[test]
fn a_lock_that_is_taken_anew_has_a_lease_of_its_own() {
    rlock_test::run(1, async |network| {
        let server = network.server(ADDRESS);
        let host = network.host();
        let builder = Client::builder().max_hold(Duration::from_secs(60));
        let client = connect(&host, builder).await;
        let scope = client.scope();
        let first = scope.lock("orders").lock().await.unwrap();
        sleep(Duration::from_secs(58)).await;
        assert!(!first.is_lost());
        let token = first.token();
        drop(first);
        let second = scope.lock("orders").lock().await.unwrap();
        assert!(second.token() > token, "it is another hold");
        let began = Instant::now();
        let lost = timeout(Duration::from_secs(20), second.lost()).await;
        assert!(
            lost.is_err(),
            "lost after {:?} of 60 s, with a watchdog and no fault: {lost:?}; held by {:?}",
            began.elapsed(),
            server.holders("orders")
        );
    });
}

/// A wait is granted, and the word of it is lost with the connection. Asked for again beside a
/// guard that is lost and not yet dropped, it is entered twice, and nobody notices.
#[test]
fn a_grant_whose_event_is_lost_is_not_entered_twice_beside_a_lost_guard() {
    rlock_test::run(1, async |network| {
        let (server, hosts, [one, other]) = two(&network).await;
        let scope = other.scope();
        let lost = scope.lock("orders").lock().await.unwrap();
        server.delete("orders");
        lost.lost().await;

        let held = one.lock("orders").lock().await.unwrap();
        let lock = scope.lock("orders");
        let waiting = tokio::task::spawn_local(async move { lock.lock().await });
        sleep(ms(100)).await;
        assert_eq!(server.contents().waiters, 1);
        // The event of the grant is lost with the connections.
        hosts[1].cut(ADDRESS, rlock_test::Direction::ToHost);
        held.unlock().await.unwrap();
        sleep(ms(100)).await;
        hosts[1].reset(ADDRESS);
        sleep(ms(1)).await;
        hosts[1].mend(ADDRESS);

        let guard = waiting.await.unwrap().unwrap();
        drop(lost);
        sleep(ms(100)).await;
        // The last guard is given back, and the server says that all is well.
        guard.unlock().await.unwrap();
        sleep(Duration::from_secs(20)).await;
        assert_eq!(server.holders("orders"), [""; 0], "a hold is left behind");
    });
}

/// A wait for several, beside a guard of one of them, is granted; the first guard's lock is
/// deleted and taken anew by the same owner; then the call, which has heard of nothing, is dropped.
/// The MRELEASE that it sends must not end the new guard's hold.
#[test]
fn a_dropped_wait_for_several_takes_nothing_from_a_newer_guard() {
    let mut failed = Vec::new();
    for seed in 1..=60 {
        rlock_test::run(seed, async |network| {
            let (server, hosts, [one, other]) = two(&network).await;
            let scope = other.scope();
            let first = scope.lock("a").lock().await.unwrap();
            let held = one.lock("b").lock().await.unwrap();
            let both = scope.multi(["b", "a"]);
            let waiting = tokio::task::spawn_local(async move { both.lock().await });
            sleep(ms(200)).await;
            assert!(server.contents().waiters > 0);

            hosts[1].set_latency(ms(400));
            held.unlock().await.unwrap();
            assert_eq!(server.holders("b").len(), 1);
            server.delete("a");
            let Ok(anew) = timeout(ms(5000), scope.lock("a").lock()).await else {
                return;
            };
            let anew = anew.unwrap();
            waiting.abort();
            hosts[1].set_latency(ms(0));
            sleep(Duration::from_secs(2)).await;
            if !anew.is_lost() && server.holders("a").is_empty() {
                let third = one.lock("a").try_lock().await.expect("it is free");
                failed.push((seed, anew.valid_for(), third.valid_for()));
            }
            drop(first);
        });
    }
    assert!(failed.is_empty(), "two guards say held: {failed:?}");
}

/// A RELEASE that names no token is late on a connection that was given up; the next one was
/// answered. When it arrives, it takes the owner's next hold.
#[test]
fn a_release_on_a_connection_that_was_given_up_takes_nothing_from_the_next_writer() {
    let mut failed = Vec::new();
    for seed in 1..=20 {
        rlock_test::run(seed, async |network| {
            let server = network.server(ADDRESS);
            let hosts = [network.host(), network.host()];
            let one = connect(&hosts[0], Client::builder()).await;
            let builder = Client::builder().response_timeout(ms(200));
            let other = connect(&hosts[1], builder).await;
            let scope = other.scope();
            let lock = scope.rw_lock("orders").lease(Duration::from_secs(60));
            let first = lock.write().await.unwrap();
            // A command that is sent now takes a long time. A command that is sent later, by
            // another connection, does not.
            hosts[1].set_latency(Duration::from_secs(8));
            drop(first);
            sleep(ms(1)).await;
            hosts[1].set_latency(ms(0));
            sleep(Duration::from_secs(2)).await;
            if !server.holders("orders").is_empty() {
                return;
            }
            let second = lock.write().await.unwrap();
            sleep(Duration::from_secs(30)).await;
            if !second.is_lost() && server.holders("orders").is_empty() {
                let third = one.rw_lock("orders").try_write().await.expect("it is free");
                failed.push((seed, second.valid_for(), third.valid_for()));
            }
        });
    }
    assert!(failed.is_empty(), "two writers say held: {failed:?}");
}

/// As before, but the call is not dropped: its guard and the new one have one hold between
/// them, and when the one is given back the other says held.
#[test]
fn a_guard_of_several_and_a_newer_one_do_not_live_off_one_hold() {
    let mut failed = Vec::new();
    for seed in 1..=60 {
        rlock_test::run(seed, async |network| {
            let (server, hosts, [one, other]) = two(&network).await;
            let scope = other.scope();
            let first = scope.lock("a").lock().await.unwrap();
            let held = one.lock("b").lock().await.unwrap();
            let both = scope.multi(["b", "a"]).lease(Duration::from_secs(60));
            let waiting = tokio::task::spawn_local(async move { both.lock().await });
            sleep(ms(200)).await;
            hosts[1].set_latency(ms(400));
            held.unlock().await.unwrap();
            server.delete("a");
            let anew = scope.lock("a").lock().await.unwrap();
            let Ok(both) = waiting.await.unwrap() else {
                return;
            };
            hosts[1].set_latency(ms(0));
            // Lost, if the word of the deletion came only now.
            let _ = anew.unlock().await;
            sleep(Duration::from_secs(30)).await;
            if !both.is_lost() && server.holders("a").is_empty() {
                let third = one.lock("a").try_lock().await.expect("it is free");
                failed.push((seed, both.valid_for(), third.valid_for()));
            }
            drop(first);
        });
    }
    assert!(failed.is_empty(), "two guards say held: {failed:?}");
}

/// The command connection has ended and the session's has not (or is there again): a call that
/// does not wait waits for the new connection, and then for the answer.
#[test]
fn lock_timeout_zero_takes_no_longer_than_the_response_timeout() {
    let mut failed = Vec::new();
    for seed in 1..=30 {
        rlock_test::run(seed, async |network| {
            let server = network.server(ADDRESS);
            let host = network.host();
            let builder = Client::builder().grace(Duration::from_secs(60));
            let client = connect(&host, builder).await;
            host.reset(ADDRESS);
            sleep(Duration::from_secs(10)).await;
            assert_eq!(server.contents().sessions, 1);
            host.set_latency(ms(700));
            let began = Instant::now();
            let told = client.lock("orders").lock_timeout(Duration::ZERO).await;
            let took = began.elapsed();
            if took > ms(2_100) {
                failed.push((seed, took, told.is_ok()));
            }
        });
    }
    assert!(failed.is_empty(), "response timeout 2 s: {failed:?}");
}

/// A wait to write is dropped when its grant is on its way, and has lapsed: the RELEASE that gives
/// it back names no token, and must not take the owner's next hold.
#[test]
fn a_dropped_wait_to_write_takes_nothing_from_a_newer_writer() {
    let mut failed = Vec::new();
    for seed in 1..=60 {
        rlock_test::run(seed, async |network| {
            let (server, hosts, [one, other]) = two(&network).await;
            let scope = other.scope();
            let held = one.rw_lock("a").write().await.unwrap();
            let lock = scope.rw_lock("a");
            let waiting = tokio::task::spawn_local(async move { lock.write().await });
            sleep(ms(200)).await;
            // The event is late, and what the second call says and hears is not.
            hosts[1].set_latency(ms(2_000));
            held.unlock().await.unwrap();
            sleep(ms(1)).await;
            hosts[1].set_latency(ms(0));
            server.delete("a");
            let Ok(anew) = scope.rw_lock("a").try_write().await else {
                return;
            };
            waiting.abort();
            let heard = waiting.await.is_ok();
            sleep(Duration::from_secs(3)).await;
            if server.holders("a").is_empty() {
                failed.push((seed, heard, anew.lost().await));
            }
        });
    }
    assert!(
        failed.is_empty(),
        "the server was told to release it: {failed:?}"
    );
}

/// A grant was heard too late, so it is asked for again, and no answer comes to that; another call
/// of the owner begins meanwhile. Both together are one hold, and it ends with the second guard.
#[test]
fn a_grant_that_is_asked_for_again_is_not_entered_twice() {
    let mut failed = Vec::new();
    for after in 0..30 {
        rlock_test::run(1, async |network| {
            let server = network.server(ADDRESS);
            let host = network.host();
            let builder = Client::builder().grace(Duration::from_secs(20));
            let client = connect(&host, builder).await;
            let scope = client.scope();
            let asked = std::rc::Rc::new(std::cell::Cell::new(0));
            let seen = std::rc::Rc::clone(&asked);
            server
                .observe(move |line| seen.set(seen.get() + usize::from(line.contains("ACQUIRE"))));
            let lock = scope.lock("orders").lease(Duration::from_secs(3));
            let call = || {
                let lock = lock.clone();
                tokio::task::spawn_local(async move { lock.lock().await })
            };
            // The answer is too old when it comes.
            host.cut(ADDRESS, rlock_test::Direction::ToHost);
            let first = call();
            sleep(ms(1_200)).await;
            host.set_latency(ms(5));
            host.mend(ADDRESS);
            while asked.get() < 2 {
                sleep(ms(1)).await;
            }
            host.cut(ADDRESS, rlock_test::Direction::ToHost);
            sleep(ms(1_980 + after)).await;
            host.mend(ADDRESS);
            let second = call();
            let (Ok(first), Ok(second)) = (first.await.unwrap(), second.await.unwrap()) else {
                return;
            };
            first.unlock().await.unwrap();
            second.unlock().await.unwrap();
            let holders = server.holders("orders");
            if !holders.is_empty() {
                failed.push(after);
            }
        });
    }
    assert!(failed.is_empty(), "a hold is left behind: {failed:?}");
}

/// One of several locks is deleted, and a new guard takes it together with one that is free and
/// one that is held. Giving the old guard back must not free what the new one counts on.
#[test]
fn a_guard_of_several_that_lost_one_takes_nothing_from_a_newer_one() {
    let mut failed = Vec::new();
    for seed in 1..=60 {
        rlock_test::run(seed, async |network| {
            let (server, hosts, [one, other]) = two(&network).await;
            let scope = other.scope();
            let _first = scope.lock("a").lock().await.unwrap();
            let old = scope.multi(["b", "c"]).lock().await.unwrap();
            hosts[1].set_latency(ms(400));
            server.delete("b");
            let new = scope.multi(["b", "a", "d"]).try_lock().await.unwrap();
            if old.is_lost() || new.is_lost() {
                return;
            }
            drop(old);
            // Until the word of the deletion comes, the new guard counts on the deleted hold.
            sleep(ms(1_000)).await;
            if !new.is_lost() && server.holders("b").is_empty() {
                let third = one.lock("b").try_lock().await.expect("it is free");
                failed.push((seed, new.valid_for(), third.valid_for()));
            }
        });
    }
    assert!(failed.is_empty(), "two guards say held: {failed:?}");
}

/// A wait for several that is granted sets its own lease for a lock that its owner holds already. A
/// call that is dropped before it hears of the grant must not leave it so.
#[test]
fn a_dropped_wait_for_several_does_not_cut_the_lease_of_another_guard() {
    rlock_test::run(1, async |network| {
        let (server, hosts, [one, other]) = two(&network).await;
        let scope = other.scope();
        let first = scope
            .lock("a")
            .lease(Duration::from_secs(60))
            .lock()
            .await
            .unwrap();
        let held = one.lock("b").lock().await.unwrap();
        sleep(Duration::from_secs(58)).await;
        let both = scope.multi(["b", "a"]).lease(Duration::from_secs(1));
        let waiting = tokio::task::spawn_local(async move { both.lock().await });
        sleep(ms(200)).await;
        first.renew().await.unwrap();
        hosts[1].set_latency(ms(50));
        held.unlock().await.unwrap();
        waiting.abort();
        hosts[1].set_latency(ms(0));
        let lost = timeout(Duration::from_secs(30), first.lost()).await;
        assert!(
            lost.is_err(),
            "lost at most 30 s after its lease of 60 s was renewed: {lost:?}, held by {:?}",
            server.holders("a")
        );
    });
}

/// The same of several locks.
#[test]
fn a_release_of_several_on_a_connection_that_was_given_up_takes_nothing_from_the_next() {
    let mut failed = Vec::new();
    for seed in 1..=20 {
        rlock_test::run(seed, async |network| {
            let server = network.server(ADDRESS);
            let hosts = [network.host(), network.host()];
            let one = connect(&hosts[0], Client::builder()).await;
            let builder = Client::builder().response_timeout(ms(200));
            let other = connect(&hosts[1], builder).await;
            let scope = other.scope();
            let both = scope.multi(["a", "b"]).lease(Duration::from_secs(60));
            let first = both.lock().await.unwrap();
            hosts[1].set_latency(Duration::from_secs(8));
            drop(first);
            sleep(ms(1)).await;
            hosts[1].set_latency(ms(0));
            sleep(Duration::from_secs(2)).await;
            if !server.holders("a").is_empty() {
                return;
            }
            let second = both.lock().await.unwrap();
            sleep(Duration::from_secs(30)).await;
            if !second.is_lost() && server.holders("a").is_empty() {
                let third = one.lock("a").try_lock().await.expect("it is free");
                failed.push((seed, second.valid_for(), third.valid_for()));
            }
        });
    }
    assert!(failed.is_empty(), "two guards say held: {failed:?}");
}

/// The same for a call that waits meanwhile and is granted later.
#[test]
fn a_wait_that_begins_beside_a_release_has_a_lease_of_its_own() {
    rlock_test::run(1, async |network| {
        let server = network.server(ADDRESS);
        let hosts = [network.host(), network.host()];
        let one = connect(&hosts[0], Client::builder()).await;
        let builder = Client::builder().max_hold(Duration::from_secs(60));
        let other = connect(&hosts[1], builder).await;
        let scope = other.scope();
        let first = scope.lock("orders").lock().await.unwrap();
        let theirs = one.lock("orders");
        let theirs = tokio::task::spawn_local(async move { theirs.lock().await });
        sleep(ms(59_000)).await;
        drop(first);
        let lock = scope.lock("orders");
        let waiting = tokio::task::spawn_local(async move { lock.lock().await });
        let theirs = theirs.await.unwrap().unwrap();
        sleep(Duration::from_secs(25)).await;
        theirs.unlock().await.unwrap();
        let second = waiting.await.unwrap().unwrap();
        let began = Instant::now();
        let lost = timeout(Duration::from_secs(20), second.lost()).await;
        assert!(
            lost.is_err(),
            "lost after {:?} of 60 s, with a watchdog and no fault: {lost:?}, held by {:?}",
            began.elapsed(),
            server.holders("orders")
        );
    });
}

/// Sessions end, and leases, while a server has much else to do: its timer is late, its turns are
/// short, and are interrupted between reading and deciding.
#[test]
fn a_busy_server_has_one_holder_at_a_time() {
    for seed in 0..20 {
        rlock_test::run(seed, async |network| {
            let (server, hosts, [one, other]) = two(&network).await;
            server.make_busy();
            let held = one.lock("orders").lock().await.unwrap();
            let waiters = (0..4).map(|_| {
                let lock = other.lock("orders").lease(ms(50));
                tokio::task::spawn_local(async move {
                    let guard = lock.lock().await.unwrap();
                    // Its lease ends meanwhile, with every second of them.
                    sleep(ms(guard.token() % 2 * 100)).await;
                })
            });
            let waiters: Vec<_> = waiters.collect();
            sleep(ms(100)).await;
            hosts[0].kill();
            drop(held);
            let holders = async {
                loop {
                    assert!(server.holders("orders").len() <= 1, "seed {seed}");
                    sleep(ms(1)).await;
                }
            };
            tokio::select! {
                () = holders => {}
                () = async { for waiter in waiters { waiter.await.unwrap() } } => {}
            }
        });
    }
}
