//! Late messages, and calls that must end in time. The servers are in memory and time is paused, so
//! that each test takes the same course every time.

use std::sync::Arc;
use std::time::Duration;

use rlock_client::{Client, QuorumClient};
use rlock_test::Direction;
use rlock_tests::{Proxy, Server, until};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::client::calls;
use super::client_faults::{kill_session_connection, session_connection};
use super::ways::three_ways;
use super::wires::{MS, SECOND, Slow, URL, Wire, Wires, cut, name_in};

/// The session connection is cut toward the server, and another takes its place. The call that was
/// given up is still on its way: it arrives late, and the end of its connection later still.
async fn with_a_call_that_is_late(wires: &Wires) -> (Arc<Wire>, Arc<Wire>) {
    let given_up = wires.session();
    given_up.to_server.send_replace(false);
    given_up.end.send_replace(false);
    sleep(4 * SECOND).await;
    let present = wires.session();
    assert!(!Arc::ptr_eq(&given_up, &present));
    (given_up, present)
}

/// The late call takes the session over, and is told that the lock was deleted; nobody hears that.
/// The present connection is told that it was taken over, when another has been opened beside it.
/// That is taken for the doing of the other, and so for proof that nothing was missed.
#[test]
fn a_take_over_by_a_late_call_of_our_own_hides_no_loss() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
        let (given_up, present) = with_a_call_that_is_late(&wires).await;
        assert!(!guard.is_lost());
        present.to_client.send_replace(false);
        given_up.to_server.send_replace(true);
        sleep(MS).await;
        server.delete("k");
        sleep(MS).await;
        given_up.end.send_replace(true);
        let theirs = other.lock("k").try_lock().await.unwrap();
        sleep(1500 * MS).await;
        present.to_client.send_replace(true);
        sleep(600 * SECOND).await;
        assert!(!theirs.is_lost(), "the server knows it as the holder");
        assert!(guard.is_lost(), "two guards say that they hold the lock");
    });
}

/// The same, and the late call comes between two calls of the present connection. That is told
/// nothing at all.
#[test]
fn a_late_call_of_our_own_between_two_calls_hides_no_loss() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
        let (given_up, present) = with_a_call_that_is_late(&wires).await;
        assert!(!guard.is_lost());
        // Answers are half a second late for once.
        present.to_client.send_replace(false);
        sleep(500 * MS).await;
        given_up.to_server.send_replace(true);
        sleep(MS).await;
        server.delete("k");
        sleep(MS).await;
        given_up.end.send_replace(true);
        let theirs = other.lock("k").try_lock().await.unwrap();
        present.to_client.send_replace(true);
        sleep(600 * SECOND).await;
        assert!(!theirs.is_lost(), "the server knows it as the holder");
        assert!(guard.is_lost(), "two guards say that they hold the lock");
    });
}

/// The same with nothing out of the ordinary: the network was cut for four seconds and lets through
/// again what TCP repeats, first the call, and the end of its connection one round trip later. The
/// present connection answers after the same 50 ms as ever. Between its answer and its next call
/// there is a gap of 50 ms in each 220.
#[test]
fn at_no_moment_a_late_call_of_our_own_hides_a_loss() {
    let mut hidden = Vec::new();
    for offset in (0..220).step_by(10) {
        rlock_test::run(1, async |network| {
            let server = network.server("locks:6379");
            let wires = Wires::of(&network.host());
            wires.slow(Slow {
                by: 50 * MS,
                ..Slow::default()
            });
            let client = Client::builder().dial(wires.clone()).connect(URL);
            let client = client.await.unwrap();
            let guard = client.lock("k").lease(3600 * SECOND).lock().await.unwrap();
            let (given_up, _present) = with_a_call_that_is_late(&wires).await;
            sleep(offset * MS).await;
            given_up.to_server.send_replace(true);
            sleep(10 * MS).await;
            server.delete("k");
            sleep(40 * MS).await;
            given_up.end.send_replace(true);
            sleep(120 * SECOND).await;
            if !guard.is_lost() {
                hidden.push(offset);
            }
        });
    }
    assert!(hidden.is_empty(), "the guard lies after {hidden:?} ms");
}

/// The same with a wait: the late call is told of the grant. The lock is then held by nobody, and
/// the caller waits on.
#[test]
fn a_late_call_of_our_own_hides_no_grant() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let theirs = other.lock("k").lock().await.unwrap();
        let lock = client.lock("k").lease(3600 * SECOND);
        let waiting = tokio::spawn(async move { lock.lock().await });
        let (given_up, present) = with_a_call_that_is_late(&wires).await;
        present.to_client.send_replace(false);
        sleep(500 * MS).await;
        given_up.to_server.send_replace(true);
        sleep(MS).await;
        theirs.unlock().await.unwrap();
        sleep(MS).await;
        given_up.end.send_replace(true);
        present.to_client.send_replace(true);
        let granted = timeout(600 * SECOND, waiting).await;
        assert!(
            granted.is_ok(),
            "the lock is free for the waiter, and it waits on"
        );
    });
}

/// The command connection was closed while idle. The server is slow when the client connects again.
#[test]
fn a_lock_timeout_of_zero_takes_no_longer_than_a_response_timeout() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        for wait in [MS, Duration::ZERO] {
            wires.slow(Slow {
                by: 1800 * MS,
                silent_after_handshake: true,
                ..Slow::default()
            });
            wires.commands().close();
            sleep(MS).await;
            let began = Instant::now();
            let answer = client.lock("k").lock_timeout(wait).await;
            let took = began.elapsed();
            assert!(answer.is_err());
            assert!(took <= 2100 * MS, "{took:?} with a timeout of {wait:?}");
            wires.slow(Slow::default());
            sleep(60 * SECOND).await;
        }
    });
}

/// A server that was starting is reached at the second try, and a third does not answer at all.
#[test]
fn a_quorum_is_connected_when_a_majority_is_and_the_rest_had_its_time() {
    rlock_test::run(1, async |network| {
        let _a = network.server("a:6379");
        let b = network.server("b:6379");
        let _c = network.server("c:6379");
        let host = network.host();
        host.cut("c:6379", Direction::ToServer);
        b.crash(false);
        tokio::task::spawn_local(async move {
            sleep(2 * MS).await;
            b.restart();
        });
        let began = Instant::now();
        let builder = QuorumClient::builder().settings(Client::builder().dial(host.dial()));
        let client = builder.connect(["redis://a", "redis://b", "redis://c"]);
        let _client = client.await.unwrap();
        let took = began.elapsed();
        assert!(took <= 300 * MS, "{took:?}");
    });
}

/// "For twice the response timeout."
#[test]
fn unlocking_a_quorum_takes_no_longer_than_two_response_timeouts() {
    rlock_test::run(1, async |network| {
        let names = ["a:6379", "b:6379", "c:6379"];
        let _servers = names.map(|name| network.server(name));
        let wires = Wires::of(&network.host());
        let builder = QuorumClient::builder().settings(Client::builder().dial(wires.clone()));
        let client = builder.connect(["redis://a", "redis://b", "redis://c"]);
        let client = client.await.unwrap();
        let guard = client.lock("k").lock().await.unwrap();
        sleep(SECOND).await;
        wires.slow(Slow {
            by: 1800 * MS,
            silent_in_handshake: true,
            ..Slow::default()
        });
        for name in ["b:6379", "c:6379"] {
            wires.newest(name, false).close();
        }
        sleep(MS).await;
        let began = Instant::now();
        let answer = guard.unlock().await;
        let took = began.elapsed();
        assert!(answer.is_err());
        assert!(took <= 4200 * MS, "{took:?}");
    });
}

/// Cuts the command connection toward the server until the client has given it up for another. The
/// commands sent on it are still on their way.
async fn with_commands_that_are_late(wires: &Wires, given_up: &Arc<Wire>) {
    sleep(20 * SECOND).await;
    assert!(!Arc::ptr_eq(given_up, &wires.commands()));
}

async fn arrive_late(given_up: &Wire) {
    given_up.to_server.send_replace(true);
    sleep(MS).await;
    given_up.end.send_replace(true);
    sleep(MS).await;
}

/// The RELEASE of a writer is given up unanswered, and repeated on a new connection. The owner
/// writes again. Then the first arrives: it names no token.
#[test]
fn a_late_release_of_a_writer_frees_no_newer_hold() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let scope = client.scope();
        let former = scope.rw_lock("k").write().await.unwrap();
        let given_up = wires.commands();
        cut(&given_up);
        drop(former);
        with_commands_that_are_late(&wires, &given_up).await;
        assert!(server.holders("k").is_empty());
        let lock = scope.rw_lock("k").lease(3600 * SECOND);
        let guard = lock.write().await.unwrap();
        arrive_late(&given_up).await;
        let theirs = other.rw_lock("k").try_write().await;
        sleep(600 * SECOND).await;
        assert!(
            theirs.is_err() || guard.is_lost(),
            "two guards say that they write"
        );
    });
}

/// The same with several locks.
#[test]
fn a_late_release_of_several_frees_no_newer_hold() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let scope = client.scope();
        let former = scope.multi(["k", "l"]).lock().await.unwrap();
        let given_up = wires.commands();
        cut(&given_up);
        drop(former);
        with_commands_that_are_late(&wires, &given_up).await;
        assert!(server.holders("k").is_empty());
        let both = scope.multi(["k", "l"]).lease(3600 * SECOND);
        let guard = both.lock().await.unwrap();
        arrive_late(&given_up).await;
        let theirs = other.lock("k").try_lock().await;
        sleep(600 * SECOND).await;
        assert!(
            theirs.is_err() || guard.is_lost(),
            "two guards say that they hold the lock"
        );
    });
}

/// The same with a plain lock: the command that undoes a call with an unknown outcome names no
/// token either.
#[test]
fn what_undoes_an_unknown_call_and_is_late_frees_no_newer_hold() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let scope = client.scope();
        let given_up = wires.commands();
        cut(&given_up);
        let unknown = scope.lock("k").try_lock().await;
        assert!(unknown.unwrap_err().is_unknown());
        with_commands_that_are_late(&wires, &given_up).await;
        assert!(server.holders("k").is_empty());
        let guard = scope.lock("k").lease(3600 * SECOND).lock().await.unwrap();
        arrive_late(&given_up).await;
        let theirs = other.lock("k").try_lock().await;
        sleep(600 * SECOND).await;
        assert!(
            theirs.is_err() || guard.is_lost(),
            "two guards say that they hold the lock"
        );
    });
}

/// "Nothing stays behind, at whatever await it is dropped."
#[test]
fn a_dropped_call_whose_command_is_late_leaves_no_hold() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let given_up = wires.commands();
        cut(&given_up);
        let dropped = timeout(100 * MS, client.lock("k").lock()).await;
        assert!(dropped.is_err());
        with_commands_that_are_late(&wires, &given_up).await;
        arrive_late(&given_up).await;
        sleep(20 * SECOND).await;
        let left = server.holders("k");
        assert!(left.is_empty(), "{left:?}");
    });
}

/// A hold is renewed on a connection that is given up, and then on the next. Then the first RENEW
/// arrives, which asks for less.
#[test]
fn a_late_renewal_does_not_cut_the_lease_short() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let builder = Client::builder().grace(20 * SECOND);
        let client = builder.dial(wires.clone()).connect(URL).await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let guard = client.lock("k").lease(100 * SECOND).lock().await.unwrap();
        sleep(80 * SECOND).await;
        let given_up = wires.commands();
        cut(&given_up);
        let since = Instant::now();
        let renewing = timeout(MS, guard.renew()).await;
        assert!(renewing.is_err(), "{renewing:?}");
        wires.session().close();
        sleep_until(since + 15 * SECOND).await;
        assert!(!Arc::ptr_eq(&given_up, &wires.commands()));
        guard.renew().await.unwrap();
        assert!(guard.valid_for() > 15 * SECOND);
        arrive_late(&given_up).await;
        // The word of the end of the lease is late, by much less than the grace.
        sleep(13 * SECOND).await;
        wires.session().to_client.send_replace(false);
        sleep(1500 * MS).await;
        let theirs = other.lock("k").try_lock().await.ok();
        assert!(
            theirs.is_none() || guard.is_lost(),
            "two guards say that they hold the lock, this one for {:?}",
            guard.valid_for()
        );
    });
}

/// "Not acquired: only if somebody else took this owner out of the queue with `RLOCK.CANCEL`."
#[test]
fn a_late_cancel_ends_no_newer_wait() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let other = other.await.unwrap();
        let _theirs = other.lock("k").lock().await.unwrap();
        let scope = client.scope();
        let dropped = timeout(SECOND, async {
            let lock = scope.lock("k");
            let mut waiting = Box::pin(lock.lock());
            let queued = timeout(100 * MS, &mut waiting).await;
            assert!(queued.is_err());
            cut(&wires.commands());
            waiting.await
        });
        assert!(dropped.await.is_err());
        let given_up = wires.commands();
        with_commands_that_are_late(&wires, &given_up).await;
        let lock = scope.lock("k");
        let waiting = tokio::spawn(async move { lock.lock().await.map(drop) });
        sleep(SECOND).await;
        arrive_late(&given_up).await;
        let ended = timeout(60 * SECOND, waiting).await;
        assert!(ended.is_err(), "{ended:?}");
    });
}

/// As `what_undoes_an_unknown_call_and_is_late_frees_no_newer_hold`, with a real server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_undoes_an_unknown_call_and_is_late_frees_no_newer_hold_at_a_real_server() {
    const TIMEOUT: Duration = SECOND;
    let server = Server::start();
    let builder = Client::builder().response_timeout(TIMEOUT);
    let (client, [_near, first, _next]) = three_ways(&server, builder.grace(60 * SECOND)).await;
    let scope = client.scope();
    first.cut_to_server();
    let unknown = scope.lock("k").try_lock().await;
    assert!(unknown.unwrap_err().is_unknown());
    // The command that undoes it is repeated until it is answered.
    until("it is undone", || calls(&server, "release") > 0);
    let guard = scope.lock("k").lease(3600 * SECOND).lock().await.unwrap();
    let mut alice = server.connect();
    first.heal();
    // If the connection were still open, the late command would have arrived long before.
    sleep(2 * SECOND).await;
    assert!(alice.run("RLOCK.ACQUIRE k alice 3600000").refused() > 0);
    guard.renew().await.unwrap();
}

/// "A node has another address, and the old one leads to another server": the same while another
/// node of the cluster is down, so that the slots are asked for only once a second.
#[test]
fn a_stranger_at_the_old_address_of_a_node_grants_nothing_while_another_node_is_down() {
    let down = (0..10).map(|step| (true, step * 100));
    for (is_down, offset) in [(false, 0)].into_iter().chain(down) {
        rlock_test::run(1, async |network| {
            let [x, y, z, stranger] =
                ["x:6379", "y:6379", "z:6379", "stranger:6379"].map(|name| network.server(name));
            let wires = Wires::of(&network.host());
            for (id, server) in [("x", &x), ("y", &y), ("z", &z)] {
                wires.is(id, server);
            }
            wires.lead("a:6379", "x:6379");
            let at = |host| {
                vec![
                    (0, 16_381, host, "x"),
                    (16_382, 16_382, "y", "y"),
                    (16_383, 16_383, "z", "z"),
                ]
            };
            *wires.0.slots.lock().unwrap() = at("a");
            let client = Client::builder().dial(wires.clone());
            let client = client.connect_cluster(["redis://a", "redis://y"]);
            let client = client.await.unwrap();
            let other = Client::builder().dial(network.host().dial());
            let other = other.connect("redis://x:6379").await.unwrap();
            let k = name_in(7);
            let theirs = other.lock(&*k).lock().await.unwrap();
            for slot in [8, 16_382, 16_383] {
                let free = client.lock(name_in(slot)).lock().await.unwrap();
                free.unlock().await.unwrap();
            }
            if is_down {
                z.crash(false);
            }
            wires.lead("b:6379", "x:6379");
            *wires.0.slots.lock().unwrap() = at("b");
            sleep(20 * SECOND + offset * MS).await;
            assert!(
                client
                    .lock(&*k)
                    .try_lock()
                    .await
                    .unwrap_err()
                    .is_not_acquired()
            );
            wires.lead("a:6379", "stranger:6379");
            wires.close_all("a:6379");
            for _ in 0..200 {
                sleep(10 * MS).await;
                let ours = client.lock(&*k).try_lock().await;
                let both = ours.is_ok_and(|ours| !ours.is_lost()) && !theirs.is_lost();
                assert!(
                    !both,
                    "granted by the stranger; another node is down: {is_down}"
                );
            }
            assert!(stranger.holders(&k).is_empty());
        });
    }
}

/// For some 100 s TCP repeats the bytes of a connection that its program has closed.
#[test]
fn a_call_of_our_own_that_is_90_seconds_late_does_not_end_the_client_for_good() {
    rlock_test::run(1, async |network| {
        let _server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let guard = client.lock("k").lock().await.unwrap();
        let (given_up, _present) = with_a_call_that_is_late(&wires).await;
        sleep(86 * SECOND).await;
        given_up.to_server.send_replace(true);
        sleep(MS).await;
        given_up.end.send_replace(true);
        sleep(SECOND).await;
        let next = client.lock("l").try_lock().await;
        assert!(next.is_ok(), "{:?}", next.err());
        assert!(!guard.is_lost());
    });
}

/// As `at_no_moment_a_late_call_of_our_own_hides_a_loss`; the end of the connection arrives
/// together with the call. If that is in the gap, the session has no connection for a moment, so
/// the server takes all its waiters out of their queues.
#[test]
fn at_no_moment_a_late_call_of_our_own_costs_a_wait() {
    let mut hang = Vec::new();
    for offset in (0..220).step_by(10) {
        rlock_test::run(1, async |network| {
            let server = network.server("locks:6379");
            let wires = Wires::of(&network.host());
            wires.slow(Slow {
                by: 50 * MS,
                ..Slow::default()
            });
            let client = Client::builder().dial(wires.clone()).connect(URL);
            let client = client.await.unwrap();
            let other = Client::builder().dial(network.host().dial()).connect(URL);
            let other = other.await.unwrap();
            let theirs = other.lock("k").lock().await.unwrap();
            let lock = client.lock("k");
            let waiting = tokio::spawn(async move { lock.lock().await });
            let (given_up, _present) = with_a_call_that_is_late(&wires).await;
            assert_eq!(server.contents().waiters, 1);
            sleep(offset * MS).await;
            given_up.to_server.send_replace(true);
            given_up.end.send_replace(true);
            sleep(SECOND).await;
            let waiters = server.contents().waiters;
            theirs.unlock().await.unwrap();
            let granted = timeout(300 * SECOND, waiting).await;
            if granted.is_err() {
                hang.push((offset, waiters, server.holders("k")));
            }
        });
    }
    assert!(
        hang.is_empty(),
        "for five minutes nobody has the lock, and it waits: {hang:?}"
    );
}

/// The same with a real server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_call_of_our_own_costs_no_wait_at_a_real_server() {
    for attempt in 0..10 {
        let server = Server::start();
        let [near, first, second, third] = [(); 4].map(|()| Proxy::to(server.address()));
        near.lead_to(first.address());
        let url = format!("redis://{}", near.address());
        let client = Client::builder().grace(SECOND).connect(&url).await.unwrap();
        near.lead_to(second.address());
        let before = session_connection(&server).unwrap();
        kill_session_connection(&server);
        until("the session goes by the second", || {
            session_connection(&server).is_some_and(|id| id != before)
        });
        let mut alice = server.connect();
        alice.take("k", "alice");
        let lock = client.lock("k");
        let waiting = tokio::spawn(async move { lock.lock().await });
        until("it waits", || server.info_number("rlock_waiters") == 1);
        third.delay(50 * MS);
        near.lead_to(third.address());
        second.cut_to_server();
        sleep(2 * SECOND).await;
        until("it waits still", || {
            server.info_number("rlock_waiters") == 1
        });
        second.heal();
        sleep(3 * SECOND).await;
        alice.let_go("k", "alice");
        let granted = timeout(10 * SECOND, waiting).await;
        assert!(
            granted.is_ok(),
            "attempt {attempt}: k is free, and it waits"
        );
    }
}

/// A wait for several locks is dropped while the news of its grant is on the way, and the same
/// owner asks again before that is given back. The RELEASE names no token, so the second grant is
/// in doubt; when the server confirms it the RELEASE is over, and the owner has nothing else. By
/// the time it is asked for again there is another call of the owner.
#[test]
fn a_grant_that_was_in_doubt_is_given_back_though_the_owner_is_alone_by_then() {
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let wires = Wires::of(&network.host());
        let client = Client::builder().dial(wires.clone()).connect(URL);
        let client = client.await.unwrap();
        let other = Client::builder().dial(network.host().dial()).connect(URL);
        let theirs = other.await.unwrap().lock("k").lock().await.unwrap();
        let scope = client.scope();
        let ask = || {
            let lock = scope.multi(["k"]);
            tokio::spawn(async move { lock.lock().await })
        };
        let (commands, session) = (wires.commands(), wires.session());
        let dropped = ask();
        sleep(10 * MS).await;
        session.to_client.send_replace(false);
        theirs.unlock().await.unwrap();
        dropped.abort();
        assert!(dropped.await.is_err());
        sleep(10 * MS).await;
        commands.to_server.send_replace(false);
        let second = ask();
        sleep(10 * MS).await;
        session.to_client.send_replace(true);
        sleep(10 * MS).await;
        commands.to_server.send_replace(true);
        sleep(2 * MS).await;
        let third = ask();
        for granted in [second, third] {
            drop(granted.await.unwrap().unwrap());
        }
        sleep(SECOND).await;
        assert!(server.holders("k").is_empty());
    });
}
