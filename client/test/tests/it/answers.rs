//! Answers that are late or lost, and refusals: what a call or a guard makes of them.
#![allow(clippy::expect_used, reason = "a test fails so")]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use rlock_client::{Client, ClientBuilder, Error, ErrorKind};
use rlock_test::{Direction, Host, Network, Server};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep, timeout};

use crate::unheard::{ADDRESS, ms, until};

const MINUTE: Duration = Duration::from_secs(60);
/// The numbers of a client's connections, once it has used both.
const EVENTS: usize = 0;
const COMMANDS: usize = 1;

/// A client that has used both its connections.
async fn client(host: &Host, builder: ClientBuilder) -> Client {
    let builder = builder.dial(host.dial());
    let client = builder.connect("redis://locks:6379").await;
    let client = client.expect("it is there");
    let guard = client.lock("first").lock().await.expect("it is free");
    guard.unlock().await.expect("it is held");
    client
}

/// The server, the host of the first client, that client and another. The first bears an outage of
/// a minute.
async fn setting(network: &Network) -> (Server, Host, Client, Client) {
    let (server, host) = (network.server(ADDRESS), network.host());
    let one = client(&host, Client::builder().grace(MINUTE)).await;
    let other = client(&network.host(), Client::builder().grace(MINUTE)).await;
    (server, host, one, other)
}

/// The commands that the server gets from now on.
fn commands(server: &Server) -> impl Fn(&str) -> usize + Clone + use<> {
    let all = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&all);
    server.observe(move |line| seen.borrow_mut().push(line.to_owned()));
    move |named| {
        all.borrow()
            .iter()
            .filter(|line| line.contains(named))
            .count()
    }
}

fn spawn<T: 'static>(
    call: impl Future<Output = Result<T, Error>> + 'static,
) -> JoinHandle<Result<T, Error>> {
    spawn_local(call)
}

/// How a call ended, which must have ended by now.
async fn ended<T>(call: JoinHandle<Result<T, Error>>) -> Result<T, Error> {
    let ended = timeout(Duration::from_secs(10), call).await;
    ended.expect("it ends in time").expect("it does not panic")
}

#[test]
fn a_call_that_is_refused_is_told_at_once_and_sends_no_more() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, _, one, other) = setting(&network).await;
        let _writes = other.rw_lock("w").write().await?;
        let _holds = other.lock("b").lock().await?;
        let (sent, began) = (commands(&server), Instant::now());
        let wrong = one.lock("w").lock().await.expect_err("it is no such lock");
        assert_eq!(wrong.kind(), ErrorKind::Refused, "{wrong}");
        let taken = one.multi(["a", "b"]).try_lock().await;
        assert!(taken.expect_err("one is held").is_not_acquired());
        assert!(began.elapsed() < ms(100), "{:?}", began.elapsed());
        sleep(MINUTE).await;
        assert_eq!(
            (sent("ACQUIRE"), sent("CANCEL"), sent("RELEASE")),
            (2, 0, 0)
        );
        Ok(())
    })
}

/// Several locks are granted, which the client does not hear in time. One of them is overwritten
/// then. Asked once more, the server refuses.
#[test]
fn a_grant_of_several_that_is_refused_later_leaves_nothing() -> Result<(), Error> {
    for (is_lost, is_of_another_kind) in [(true, true), (false, true), (false, false)] {
        rlock_test::run(1, async |network| {
            let (server, host, one, other) = setting(&network).await;
            let cut = host.cut_one(ADDRESS, COMMANDS, Direction::ToHost);
            // Word that comes after a third of the lease is too late.
            let lease = if is_lost { MINUTE } else { ms(3_000) };
            let both = one.multi(["a", "b"]).lease(lease);
            let call = spawn(async move { both.try_lock().await });
            until("it is granted", || !server.holders("a").is_empty()).await;
            sleep(ms(1_100)).await;
            server.delete("b");
            let (mut writes, mut holds) = (None, None);
            if is_of_another_kind {
                writes = Some(other.rw_lock("b").write().await?);
            } else {
                holds = Some(other.lock("b").lock().await?);
            }
            cut.expect("it is connected").end(!is_lost);
            let refused = ended(call).await.map(drop);
            let refused = refused.expect_err("another has it");
            assert_eq!(refused.is_not_acquired(), !is_of_another_kind, "{refused}");
            sleep(ms(200)).await;
            assert!(server.holders("a").is_empty(), "a hold is left behind");
            drop((writes, holds));
            Ok::<_, Error>(())
        })?;
    }
    Ok(())
}

#[test]
fn a_call_whose_grants_always_come_late_ends() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host, one, _) = setting(&network).await;
        let sent = commands(&server);
        host.set_latency(ms(100));
        let lock = one.lock("a").lease(ms(1));
        let late = ended(spawn(async move { lock.lock().await })).await;
        let late = late.map(drop).expect_err("each is too late");
        assert_eq!(late.kind(), ErrorKind::Unknown, "{late}");
        assert_eq!(sent("ACQUIRE a"), 6);
        Ok(())
    })
}

/// The server begins another life, so a call that waits asks again. The answer is overdue.
#[test]
fn a_wait_outlives_an_answer_that_is_overdue() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host, one, other) = setting(&network).await;
        let held = other.lock("a").lease(MINUTE).lock().await?;
        let lock = one.lock("a");
        let call = spawn(async move { lock.lock().await });
        until("it waits", || server.waiters() == 1).await;
        server.crash(false);
        let sent = commands(&server);
        host.set_latency(ms(20));
        server.restart();
        until("it asks again", || sent("ACQUIRE a") == 1).await;
        host.cut(ADDRESS, Direction::ToHost);
        sleep(ms(5_000)).await;
        assert!(
            !call.is_finished(),
            "{:?}",
            call.await.map(|ended| ended.map(drop))
        );
        host.mend(ADDRESS);
        sleep(ms(1_000)).await;
        held.unlock().await?;
        ended(call).await?.unlock().await
    })
}

/// The session ends and begins anew while the answer that a call waits is on its way.
#[test]
fn a_wait_of_a_former_life_is_asked_for_again() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host) = (network.server(ADDRESS), network.host());
        let one = client(&host, Client::builder().grace(Duration::ZERO)).await;
        let other = client(&network.host(), Client::builder()).await;
        let held = other.lock("a").lease(MINUTE).lock().await?;
        let cut = host.cut_one(ADDRESS, COMMANDS, Direction::ToHost);
        let lock = one.lock("a");
        let call = spawn(async move { lock.lock().await });
        until("it waits", || server.waiters() == 1).await;
        host.reset_one(ADDRESS, EVENTS);
        until("it has left", || server.waiters() == 0).await;
        sleep(ms(500)).await;
        cut.expect("it is connected").end(true);
        until("it waits again", || server.waiters() == 1).await;
        held.unlock().await?;
        ended(call).await?.unlock().await
    })
}

/// The session's connection has just ended. The call waits for the next one, but not for ever.
#[test]
fn a_call_that_finds_no_session_waits_for_it_in_time() -> Result<(), Error> {
    for is_there_again in [true, false] {
        rlock_test::run(1, async |network| {
            let (server, host, one, _) = setting(&network).await;
            let sent = commands(&server);
            host.set_latency(ms(50));
            host.reset_one(ADDRESS, EVENTS);
            let lock = one.lock("a");
            let call = spawn(async move { lock.lock().await });
            until("it asks", || sent("ACQUIRE") == 1).await;
            if !is_there_again {
                host.cut(ADDRESS, Direction::ToServer);
            }
            let told = ended(call).await;
            assert_eq!(told.is_ok(), is_there_again);
            // It was refused first.
            assert_eq!(sent("ACQUIRE"), if is_there_again { 2 } else { 1 });
            Ok::<_, Error>(())
        })?;
    }
    Ok(())
}

/// The server becomes a replica for a while. A call that waits goes on, without haste; one that no
/// server has taken in ends in time.
#[test]
fn a_call_at_a_server_that_becomes_a_replica() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, _, one, other) = setting(&network).await;
        let second = network.server("second:6379");
        let held = other.lock("a").lease(MINUTE).lock().await?;
        let lock = one.lock("a");
        let waits = spawn(async move { lock.lock().await });
        until("it waits", || server.waiters() == 1).await;
        let guard = one.lock("c").lock().await?;
        second.replicate(&server);
        sleep(ms(2_000)).await;
        let sent = commands(&server);
        server.replicate(&second);
        sleep(ms(500)).await;
        let renews = spawn(async move { guard.renew().await });
        let lock = one.lock("b");
        let ends = ended(spawn(async move { lock.lock().await })).await;
        assert!(
            ends.map(drop)
                .expect_err("it is a replica")
                .is_unavailable()
        );
        sleep(ms(5_000)).await;
        assert!(
            !waits.is_finished(),
            "{:?}",
            waits.await.map(|ended| ended.map(drop))
        );
        let sent = (sent("ACQUIRE"), sent("RENEW"));
        assert!(sent.0.max(sent.1) < 100, "{sent:?} times");
        server.promote();
        sleep(ms(2_000)).await;
        assert!(
            ended(renews)
                .await
                .is_err_and(|error| error.is_unavailable())
        );
        held.unlock().await?;
        ended(waits).await?.unlock().await
    })
}

/// The end of an earlier wait of the same owner is told while the next one has begun.
#[test]
fn the_end_of_a_former_wait_ends_no_other() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host, one, other) = setting(&network).await;
        let held = other.lock("a").lease(MINUTE).lock().await?;
        let lock = one.scope().lock("a");
        let cut = host.cut_one(ADDRESS, EVENTS, Direction::ToHost);
        let first = lock.lock_timeout(ms(500)).await.map(drop);
        let first = first.expect_err("another has it");
        // It cannot know what the server has not told.
        assert_eq!(first.kind(), ErrorKind::Unknown, "{first}");
        let next = lock.clone();
        let next = spawn(async move { next.lock().await });
        until("it waits", || server.waiters() == 1).await;
        cut.expect("it is connected").end(true);
        sleep(ms(500)).await;
        assert!(
            !next.is_finished(),
            "{:?}",
            next.await.map(|ended| ended.map(drop))
        );
        held.unlock().await?;
        ended(next).await?.unlock().await
    })
}

/// A hold is lost and taken anew by its owner. Word of the loss comes before that of the new grant.
#[test]
fn the_loss_of_a_former_hold_is_not_that_of_the_next() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host, one, _) = setting(&network).await;
        let lock = one.scope().lock("a").lease(MINUTE);
        let former = lock.lock().await?;
        let events = host.cut_one(ADDRESS, EVENTS, Direction::ToHost);
        server.delete("a");
        drop(former);
        sleep(ms(100)).await;
        let answers = host.cut_one(ADDRESS, COMMANDS, Direction::ToHost);
        let next = lock.clone();
        let next = spawn(async move { next.lock().await });
        until("it is granted", || !server.holders("a").is_empty()).await;
        events.expect("it is connected").end(true);
        sleep(ms(10)).await;
        answers.expect("it is connected").end(true);
        let next = ended(next).await?;
        sleep(ms(100)).await;
        assert!(!next.is_lost());
        next.unlock().await
    })
}

/// The server begins another life, in which another owner has the lock. Until the renewal says so,
/// nobody else gets a guard of the hold; and one that never hears does not wait for ever.
#[test]
fn a_hold_of_a_former_life_is_confirmed_before_the_next_guard() -> Result<(), Error> {
    for is_answered in [true, false] {
        rlock_test::run(1, async |network| {
            let (server, host, one, other) = setting(&network).await;
            let lock = one.scope().lock("a");
            let _guard = lock.lock().await?;
            server.crash(false);
            let sent = commands(&server);
            host.set_latency(ms(20));
            server.restart();
            until("it is renewed", || sent("RENEW a") == 1).await;
            host.cut(ADDRESS, Direction::ToHost);
            server.delete("a");
            let others = other.lock("a").lock().await?;
            let next = lock.clone();
            let mut next = spawn(async move { next.lock().await });
            let early = timeout(ms(500), &mut next).await;
            assert!(early.is_err(), "two have it");
            if is_answered {
                host.mend(ADDRESS);
                others.unlock().await?;
                ended(next).await?.unlock().await
            } else {
                assert!(ended(next).await.is_err());
                Ok(())
            }
        })?;
    }
    Ok(())
}

/// A renewal that leaves the lease its end was given up, and may arrive yet: it was to make sure
/// that copies have the hold, for a second guard of it.
#[test]
fn no_lease_begins_anew_before_a_renewal_that_may_cut_it() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host) = (network.server(ADDRESS), network.host());
        let _replica = network.replica("replica:6379", &server);
        sleep(ms(2_000)).await;
        let builder = Client::builder().grace(MINUTE).acknowledged_by(1, ms(200));
        let lock = client(&host, builder)
            .await
            .scope()
            .lock("a")
            .lease(10 * MINUTE);
        let guard = lock.lock().await?;
        guard.renew().await?;
        let sent = commands(&server);
        host.cut(ADDRESS, Direction::ToHost);
        let second = ended(spawn(async move { lock.lock().await })).await;
        assert!(second.is_err() && sent("RENEW a") == 1);
        host.mend(ADDRESS);
        sleep(ms(1_000)).await;
        let refused = guard.renew().await.expect_err("it might be cut");
        assert!(refused.is_not_acknowledged(), "{refused}");
        guard.unlock().await
    })
}

#[test]
fn a_hold_that_is_over_is_not_renewed() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, _, one, _) = setting(&network).await;
        let lost = one.lock("a").lease(ms(500)).lock().await?;
        lost.lost().await;
        let sent = commands(&server);
        server.crash(false);
        server.restart();
        sleep(ms(5_000)).await;
        assert_eq!(sent("RENEW"), 0);
        Ok(())
    })
}

/// Of a hold that the server no longer has, a renewal that waits for copies says at once that it is
/// lost.
#[test]
fn a_renewal_that_waits_for_copies_tells_of_a_loss() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host) = (network.server(ADDRESS), network.host());
        let _replica = network.replica("replica:6379", &server);
        sleep(ms(2_000)).await;
        let one = client(&host, Client::builder().acknowledged_by(1, ms(200))).await;
        let guard = one.lock("a").lock().await?;
        let _cut = host.cut_one(ADDRESS, EVENTS, Direction::ToHost);
        server.delete("a");
        let lost = guard.renew().await.expect_err("it is deleted");
        assert!(lost.is_lost(), "{lost}");
        Ok(())
    })
}

/// The session's connection ends just before a renewal. That would leave the lease as it is until
/// the next one, but as soon as there is a session again, it begins anew.
#[test]
fn a_renewal_that_finds_no_session_is_made_up_for() -> Result<(), Error> {
    for copies in [0, 1] {
        rlock_test::run(1, async |network| {
            let (server, host) = (network.server(ADDRESS), network.host());
            let _replica = network.replica("replica:6379", &server);
            sleep(ms(2_000)).await;
            let builder = Client::builder().grace(MINUTE);
            let builder = match copies {
                0 => builder,
                copies => builder.acknowledged_by(copies, ms(200)),
            };
            let one = client(&host, builder).await;
            let guard = one.lock("a").lock().await?;
            let sent = commands(&server);
            let renewed = async |times| {
                while sent("RENEW a") < times {
                    sleep(ms(1)).await;
                }
                Instant::now()
            };
            let (first, second) = (renewed(1).await, renewed(2).await);
            sleep((second - first).saturating_sub(ms(30))).await;
            host.set_latency(ms(20));
            host.reset_one(ADDRESS, EVENTS);
            sleep(ms(1_500)).await;
            let left = server.lease_left("a");
            assert!(left > Some(Duration::from_secs(28)), "{copies}: {left:?}");
            guard.unlock().await
        })?;
    }
    Ok(())
}

/// Others have overwritten the key, and the client has not heard of it. It asks the server again
/// and again, not just when a renewal is due.
#[test]
fn a_renewal_that_is_refused_is_sent_again_soon() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host) = (network.server(ADDRESS), network.host());
        // It is renewed each second.
        let one = client(&host, Client::builder().lease(ms(3_000))).await;
        let other = client(&network.host(), Client::builder()).await;
        let _guard = one.lock("a").lock().await?;
        let _cut = host.cut_one(ADDRESS, EVENTS, Direction::ToHost);
        server.delete("a");
        let _writes = other.rw_lock("a").write().await?;
        let sent = commands(&server);
        until("it is renewed", || sent("RENEW a") == 1).await;
        sleep(ms(800)).await;
        assert!((3..20).contains(&sent("RENEW a")), "{}", sent("RENEW a"));
        Ok(())
    })
}

/// The server becomes a replica between two calls of EVENTS. The session has no hold, so it goes
/// on, and an event tells that the wait is over.
#[test]
fn a_wait_outlives_the_word_of_a_server_that_becomes_a_replica() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host, one, other) = setting(&network).await;
        let second = network.server("second:6379");
        let held = other.lock("a").lease(MINUTE).lock().await?;
        let lock = one.lock("a");
        let waits = spawn(async move { lock.lock().await });
        until("it waits", || server.waiters() == 1).await;
        second.replicate(&server);
        sleep(ms(2_000)).await;
        let cut = host.cut_one(ADDRESS, EVENTS, Direction::ToServer);
        sleep(ms(1_900)).await;
        server.replicate(&second);
        cut.expect("it is connected").end(true);
        sleep(ms(500)).await;
        assert!(
            !waits.is_finished(),
            "{:?}",
            waits.await.map(|ended| ended.map(drop))
        );
        server.promote();
        sleep(ms(2_000)).await;
        held.unlock().await?;
        ended(waits).await?.unlock().await
    })
}

/// The answer to a call that waits in the session's next life comes before the client has heard of
/// that.
#[test]
fn a_wait_of_a_life_that_is_yet_to_be_heard_of_is_asked_for_once() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host) = (network.server(ADDRESS), network.host());
        let one = client(&host, Client::builder().grace(Duration::ZERO)).await;
        let other = client(&network.host(), Client::builder()).await;
        let held = other.lock("a").lease(MINUTE).lock().await?;
        let sent = commands(&server);
        host.set_latency(ms(50));
        host.reset_one(ADDRESS, EVENTS);
        until("it has another life", || sent("RLOCK.EVENTS") > 0).await;
        // Now it is the younger of the two.
        let cut = host.cut_one(ADDRESS, 1, Direction::ToHost);
        let lock = one.lock("a");
        let call = spawn(async move { lock.lock().await });
        sleep(ms(1_000)).await;
        assert_eq!(sent("ACQUIRE a"), 1);
        cut.expect("it is connected").end(true);
        held.unlock().await?;
        ended(call).await?.unlock().await
    })
}

/// While the server is down, commands wait for the next connection, and go out with it at once. A
/// call that ends before that says why.
#[test]
fn an_outage_puts_commands_off_for_no_longer_than_it_lasts() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (server, host) = (network.server(ADDRESS), network.host());
        let builder = Client::builder().grace(MINUTE).renew_every(ms(500));
        let one = client(&host, builder).await;
        let guard = one.lock("a").lock().await?;
        host.set_latency(ms(1));
        server.crash(false);
        sleep(ms(100)).await;
        let lock = one.lock("b");
        let told = ended(spawn(async move { lock.lock().await })).await;
        let told = told.map(drop).expect_err("it is down");
        assert!(
            told.is_unavailable() && !told.to_string().contains("another"),
            "{told}"
        );
        sleep(ms(2_000)).await;
        let sent = commands(&server);
        server.restart();
        until("it is connected", || sent("RLOCK.BIND") > 0).await;
        let began = Instant::now();
        until("it is renewed", || sent("RENEW a") > 0).await;
        assert!(began.elapsed() < ms(200), "{:?}", began.elapsed());
        guard.unlock().await
    })
}
