//! A client or a server that stands still, as after SIGSTOP.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use rlock_client::test_util::{Dial, Dialing};
use rlock_client::{Client, ClientBuilder, Error, ErrorKind, QuorumClient};
use rlock_test::{Direction, Host, Moment};
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep, timeout};

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
        let sent = timeout(Duration::from_millis(50), &mut call).await;
        assert!(sent.is_err(), "it stands still");
        let before = server.stats().commands;
        server.crash(false);
        server.resume();
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

/// Replies come later than usual: each takes longer than its share of the grace. A connection that
/// is dialled then is of no use: the old reply comes first.
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

/// Two stalls, each too short to cost a guard.
fn stalls_twice(seed: u32, grace: u64, lengths: [u64; 3]) -> Result<bool, Error> {
    rlock_test::run(seed.into(), async |network| {
        let server = network.server("locks:6379");
        let host = network.host();
        let client = Client::builder().dial(host.dial());
        let client = client.grace(Duration::from_millis(grace));
        let client = client.connect("redis://locks:6379").await?;
        let guard = client.lock("orders").lock().await?;
        sleep(Duration::from_secs(20)).await;
        sleep(Duration::from_millis(37).saturating_mul(seed)).await;
        let [first, between, second] = lengths.map(Duration::from_millis);
        for (stall, then) in [(first, between), (second, Duration::from_millis(500))] {
            server.pause();
            sleep(stall).await;
            server.resume();
            sleep(then).await;
        }
        Ok(guard.is_lost())
    })
}

/// The reply to a late call confirms nothing of the time since the call was sent.
#[test]
fn a_server_that_stands_still_again_at_once_costs_no_guard() -> Result<(), Error> {
    for (grace, lengths) in [(1_000, [790, 10, 300]), (5_000, [4_390, 150, 500])] {
        for seed in 1..=10 {
            let is_lost = stalls_twice(seed, grace, lengths)?;
            assert!(!is_lost, "grace {grace}, {lengths:?}, seed {seed}");
        }
    }
    Ok(())
}

/// All that was sent meanwhile arrives in one moment when the server goes on. Where BIND comes a
/// moment before the first RLOCK.EVENTS, its refusal says nothing of the session connection.
#[test]
fn what_is_refused_before_the_session_begins_closes_no_connection() -> Result<(), Error> {
    for seed in 1..=40_u32 {
        rlock_test::run(seed.into(), async |network| {
            let server = network.server("locks:6379");
            let host = network.host();
            host.set_latency(Duration::from_millis(2));
            let client = Client::builder().dial(host.dial());
            let client = client.response_timeout(Duration::from_millis(400));
            let client = client.grace(Duration::from_secs(8));
            let client = client.connect("redis://locks:6379").await?;
            let guard = client.lock("orders").lock().await?;
            server.crash(false);
            sleep(Duration::from_secs(1)).await;
            server.restart();
            server.pause();
            sleep(Duration::from_secs(2)).await;
            server.resume();
            let mut has_begun = false;
            for _ in 0..3_000 {
                sleep(Duration::from_millis(1)).await;
                let is_there = server.contents().sessions > 0;
                assert!(is_there || !has_begun, "seed {seed}: it begins twice");
                has_begun = is_there;
            }
            assert!(has_begun, "seed {seed}");
            guard.unlock().await
        })?;
    }
    Ok(())
}

/// A server stands still for a while, and then a session connection delivers nothing more: the
/// usual time for an answer must not be waited twice.
#[test]
fn a_connection_that_falls_silent_after_a_stall_costs_no_guard() -> Result<(), Error> {
    for seed in 1..=5_u32 {
        rlock_test::run(seed.into(), async |network| {
            let server = network.server("locks:6379");
            let host = network.host();
            let client = settings(&host).lease(Duration::from_secs(30));
            let client = client.connect("redis://locks:6379").await?;
            let guard = client.lock("orders").lock().await?;
            sleep(Duration::from_secs(20)).await;
            sleep(Duration::from_millis(13).saturating_mul(seed)).await;
            server.pause();
            sleep(Duration::from_millis(1_200)).await;
            server.resume();
            sleep(Duration::from_millis(20)).await;
            for direction in [Direction::ToServer, Direction::ToHost] {
                assert!(host.cut_one("locks:6379", 0, direction).is_some());
            }
            sleep(Duration::from_secs(12)).await;
            assert!(!guard.is_lost(), "seed {seed}");
            Ok(())
        })?;
    }
    Ok(())
}

/// A network that loses all packets until then: the kernel asks for a connection again a second
/// after it has asked.
#[derive(Clone, Debug)]
struct Lossy {
    until: Arc<OnceLock<Instant>>,
    asked: Arc<AtomicU32>,
    network: Arc<dyn Dial>,
}

impl Lossy {
    fn of(host: &Host) -> Self {
        Self {
            until: Arc::default(),
            asked: Arc::default(),
            network: Arc::new(host.dial()),
        }
    }

    fn lose_until(&self, until: Instant) {
        assert_eq!(self.until.set(until), Ok(()), "once");
    }
}

impl Dial for Lossy {
    fn dial(&self, address: &str) -> Dialing {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let (lossy, address) = (self.clone(), address.to_owned());
        Box::pin(async move {
            while lossy.until.get() > Some(&Instant::now()) {
                sleep(Duration::from_secs(1)).await;
            }
            lossy.network.dial(&address).await
        })
    }
}

/// The connections that were open before stay silent.
#[test]
fn a_network_that_loses_all_for_a_while_costs_no_guard() -> Result<(), Error> {
    for (grace, silence) in [(1_000, 790), (2_000, 1_690), (5_000, 4_390)] {
        for seed in 1..=20_u32 {
            rlock_test::run(seed.into(), async |network| {
                let _server = network.server("locks:6379");
                let host = network.host();
                let network = Lossy::of(&host);
                let settings = settings(&host).lease(Duration::from_secs(30));
                let settings = settings.grace(Duration::from_millis(grace));
                let client = settings.dial(network.clone());
                let client = client.connect("redis://locks:6379").await?;
                let guard = client.lock("orders").lock().await?;
                sleep(Duration::from_secs(5)).await;
                sleep(Duration::from_millis(13).saturating_mul(seed)).await;
                let before = network.asked.load(Ordering::Relaxed);
                network.lose_until(Instant::now() + Duration::from_millis(silence));
                for number in [0, 1] {
                    let cut = host.cut_one("locks:6379", number, Direction::ToServer);
                    assert!(cut.is_some());
                }
                sleep(Duration::from_secs(10)).await;
                assert!(!guard.is_lost(), "grace {grace}, seed {seed}");
                let asked = network.asked.load(Ordering::Relaxed) - before;
                assert!(asked < 20, "{asked} connections, grace {grace}");
                Ok::<_, Error>(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn a_server_that_dies_at_a_moment_has_done_what_came_before_it() -> Result<(), Error> {
    let before_the_command = (Moment::CarriesOut, 0);
    let before_its_reply = (Moment::Sends(Direction::ToHost), 1);
    for (moment, holders) in [before_the_command, before_its_reply] {
        rlock_test::run(4, async |network| {
            let server = network.server("locks:6379");
            let host = network.host();
            let client = settings(&host).connect("redis://locks:6379").await?;
            sleep(Duration::from_secs(1)).await;

            let (dying, is_alive) = (server.clone(), Cell::new(true));
            network.observe(move |at, _| {
                if at == moment && is_alive.replace(false) {
                    dying.crash(false);
                }
            });
            let asked = timeout(Duration::from_millis(10), client.lock("orders").lock()).await;
            assert!(asked.is_err(), "no reply comes");
            server.restart();
            assert_eq!(server.holders("orders").len(), holders, "{moment:?}");
            Ok::<_, Error>(())
        })?;
    }
    Ok(())
}

/// The server that was reached first is gone when the second one is there: they are no majority.
#[test]
fn a_quorum_does_not_count_a_server_that_was_there_and_is_gone() {
    rlock_test::run(1, async |network| {
        let servers = ["one", "two", "three"].map(|name| network.server(&format!("{name}:6379")));
        servers[1].pause();
        servers[2].pause();
        let settings = Client::builder().response_timeout(Duration::from_secs(2));
        let settings = settings.dial(network.host().dial());
        let builder = QuorumClient::builder().settings(settings);
        let urls = ["redis://one", "redis://two", "redis://three"];
        let connecting = spawn_local(async move { builder.connect(urls).await });
        sleep(Duration::from_millis(200)).await;
        servers[0].crash(true);
        sleep(Duration::from_millis(200)).await;
        servers[1].resume();
        let refused = connecting.await.expect("it ends").err();
        let kind = refused.map(|error| error.kind());
        assert_eq!(kind, Some(ErrorKind::Unavailable));
    });
}

/// Many commands are handed over in one moment, and their replies come from the first on: they are
/// heard while the rest is sent.
#[test]
fn replies_are_heard_while_many_commands_are_handed_over() -> Result<(), Error> {
    const MANY: u64 = 6_000;
    rlock_test::run(1, async |network| {
        let server = network.server("one:6379");
        let host = network.host();
        host.set_latency(Duration::ZERO);
        let settings = Client::builder().dial(host.dial());
        let client = settings.connect("redis://one").await?;
        let before = server.stats().commands;
        let mut calls = FuturesUnordered::new();
        for number in 0..MANY {
            let lock = client.lock(format!("k{number}"));
            calls.push(async move { lock.try_lock().await });
        }
        let first = calls.next().await.expect("one of them")?;
        let carried_out = server.stats().commands - before;
        assert!(
            carried_out < MANY / 4,
            "the first one waited for {carried_out}"
        );
        drop(first);
        Ok(())
    })
}

#[test]
fn a_process_that_has_died_does_nothing_more() {
    rlock_test::run(1, async |network| {
        let (host, turns) = (network.host(), Rc::new(Cell::new(0_u32)));
        let counted = Rc::clone(&turns);
        let part = host.run(async move {
            loop {
                sleep(Duration::from_millis(1)).await;
                counted.set(counted.get() + 1);
            }
        });
        spawn_local(part);
        sleep(Duration::from_millis(10)).await;
        host.kill();
        let before = turns.get();
        assert!(before > 0);
        sleep(Duration::from_millis(10)).await;
        host.resume();
        sleep(Duration::from_millis(10)).await;
        assert_eq!(turns.get(), before);
    });
}

/// A pause between two tries to connect that is a part of the whole grace may end after it.
#[test]
fn a_server_that_is_back_within_the_grace_costs_no_guard() -> Result<(), Error> {
    for seed in 0..20 {
        rlock_test::run(seed, async |network| {
            let server = network.server("locks:6379");
            let settings = settings(&network.host()).lease(Duration::from_secs(20));
            let client = settings.connect("redis://locks:6379").await?;
            let guard = client.lock("orders").lock().await?;
            sleep(Duration::from_secs(1)).await;
            server.crash(false);
            sleep(Duration::from_millis(4_400)).await;
            server.restart();
            sleep(LEASE).await;
            assert!(!guard.is_lost(), "with seed {seed}");
            guard.unlock().await
        })?;
    }
    Ok(())
}
