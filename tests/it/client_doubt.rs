//! Events and replies that reach a client late, in another order, or not at all.

use std::time::{Duration, Instant};

use rlock_client::{Client, Error, MultiGuard, ReadGuard};
use rlock_tests::{Proxy, Server, until};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::client::{MS, calls, calm, client, patient, see_in_queue, soon};
use super::ways::{three_ways, two_ways};

fn free(server: &Server, name: &str) -> bool {
    server.run(format!("EXISTS {name}")) == 0
}

/// A wait for several beside a guard of one of them is granted, the word of it lost, and
/// the call dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_wait_for_several_whose_grant_is_unheard_leaves_nothing() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, calm()).await;
    let owner = client.owner();
    let held = client.lock("a").owner(&owner).lock().await.unwrap();
    let mut alice = server.connect();
    alice.take("b", "alice");
    let both = client.multi(["a", "b"]).owner(&owner);
    let waiting = see_in_queue(&server, "b", async move { both.lock().await });
    far.cut_to_client();
    alice.let_go("b", "alice");
    until("it is granted", || server.holder("b").is_some());
    until("it is told", || {
        server.info_number("rlock_unacknowledged_events") > 0
    });
    let cancels = calls(&server, "cancel");
    waiting.abort();
    until("it is called back", || calls(&server, "cancel") > cancels);
    far.sever();
    far.heal();
    soon(client.lock("x").lock())
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    soon(client.shutdown()).await;
    let b = server.holder("b");
    held.unlock().await.unwrap();
    assert!(b.is_none() && free(&server, "a"), "left behind");
}

/// A call that was given up is still being withdrawn when the owner asks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_got_no_guard_does_not_settle_the_next() {
    let server = Server::start();
    let (client, near, _far) = two_ways(&server, calm()).await;
    let scope = client.scope();
    let mut alice = server.connect();
    alice.take("k", "alice");
    near.delay(100 * MS);
    let short = scope.lock("k").lease(500 * MS);
    let dropped = timeout(600 * MS, short.lock()).await;
    assert!(dropped.is_err());
    alice.let_go("k", "alice");
    let guard = soon(scope.lock("k").lock()).await.unwrap();
    near.heal();
    let lost = timeout(1_500 * MS, guard.lost()).await;
    assert!(
        lost.is_err(),
        "it was given no lease, and is lost: {lost:?}"
    );
}

/// Straight after a refusal, without any delay, on several threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_refused_try_does_not_settle_the_lease_of_the_next() {
    let server = Server::start();
    let client = client(&server).await;
    let mut bad = 0;
    for n in 0..3000 {
        let scope = client.scope();
        let name = format!("k{n}");
        let other = client.lock(name.as_str()).lock().await.unwrap();
        let refused = scope.lock(name.as_str()).lease(1000 * MS).try_lock().await;
        assert!(refused.unwrap_err().is_not_acquired());
        let lock = scope.lock(name.as_str());
        let (_, guard) = tokio::join!(other.unlock(), lock.lock());
        if guard.unwrap().valid_for() <= 1000 * MS {
            bad += 1;
        }
    }
    assert_eq!(bad, 0, "of 3000");
}

/// A downgrade keeps the longest hold in the server too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_does_not_outlast_the_longest_hold() {
    let server = Server::start();
    let client = client(&server).await;
    let r = client.rw_lock("r").max_hold(Duration::from_secs(2));
    let writer = r.write().await.unwrap();
    let since = Instant::now();
    sleep(1_700 * MS).await;
    let reader: ReadGuard = writer.downgrade().await.unwrap();
    let next = client.rw_lock("r").write().await.unwrap();
    let held = since.elapsed();
    assert!(held < 2_300 * MS, "held for {held:?}");
    drop((next, reader));
}

/// The longest timeouts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_very_long_timeout_is_no_error() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.lock("k");
    for timeout in [
        Duration::from_secs(1 << 40),
        Duration::MAX,
        Duration::from_secs(1 << 50),
    ] {
        let got = lock.lock_timeout(timeout).await;
        drop(got.unwrap());
    }
}

/// Late word of an earlier hold of several beside a wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_word_of_earlier_several_beside_a_wait_does_not_end_the_next() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, patient()).await;
    let owner = client.owner();
    let both = client.multi(["a", "b"]).owner(&owner);
    let first = both.lock().await.unwrap();
    let mut alice = server.connect();
    alice.take("c", "alice");
    far.cut_to_client();
    server.run("RLOCK.BREAK a");
    server.run("RLOCK.BREAK b");
    assert!(first.unlock().await.unwrap_err().is_lost());
    let next = both.lock().await.unwrap();
    let more = client.multi(["b", "c"]).owner(&owner);
    let _waiting = see_in_queue(&server, "c", async move { more.lock().await });
    far.heal();
    let early = timeout(Duration::from_secs(1), next.lost()).await;
    assert!(
        early.is_err(),
        "{early:?}, and the server has {:?}",
        server.holder("a")
    );
}

/// A client that has gone asks no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_client_ends_although_the_server_has_gone() {
    let mut server = Server::start();
    let builder = Client::builder()
        .response_timeout(500 * MS)
        .lease(Duration::from_secs(2))
        .grace(Duration::ZERO);
    let address = server.address();
    let client = builder.connect(&super::client::url(&server)).await.unwrap();
    let mut alice = server.connect();
    alice.run("RLOCK.ACQUIRE k alice 300000");
    let lock = client.lock("k");
    let waiting = see_in_queue(&server, "k", async move { lock.lock().await });
    server.kill();
    waiting.abort();
    drop(client);
    sleep(Duration::from_secs(20)).await;
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let called = timeout(Duration::from_secs(10), listener.accept()).await;
    assert!(
        called.is_err(),
        "a client that was dropped 20 s ago calls: {called:?}"
    );
}

/// A shutdown takes no longer than the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_takes_no_longer_than_the_lease() {
    let server = Server::start();
    let builder = Client::builder()
        .response_timeout(500 * MS)
        .lease(Duration::from_secs(2));
    let client = builder.connect(&super::client::url(&server)).await.unwrap();
    let mut alice = server.connect();
    alice.run("RLOCK.ACQUIRE k alice 300000");
    let lock = client.lock("k");
    let _waiting = see_in_queue(&server, "k", async move { lock.lock().await });
    server.freeze();
    let started = Instant::now();
    let _ = timeout(Duration::from_secs(40), client.shutdown()).await;
    let took = started.elapsed();
    server.thaw();
    assert!(took < Duration::from_secs(6), "took {took:?}");
}

/// Two calls of one owner at once, one with a lease that the server refuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_lease_does_not_refuse_a_good_one() {
    let server = Server::start();
    let client = client(&server).await;
    let scope = client.scope();
    let (bad, good) = (scope.lock("k").lease(Duration::ZERO), scope.lock("k"));
    let (bad, good) = tokio::join!(bad.try_lock(), good.try_lock());
    assert!(bad.is_err());
    drop(good.unwrap());
}

/// The same on one thread, where the dropped call ends first.
#[tokio::test(flavor = "current_thread")]
async fn a_dropped_call_does_not_settle_the_lease_of_the_next() {
    let server = Server::start();
    let client = client(&server).await;
    let scope = client.scope();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let short = scope.lock("k").lease(700 * MS);
    let dropped = timeout(300 * MS, short.lock()).await;
    assert!(dropped.is_err());
    alice.let_go("k", "alice");
    let guard = scope.lock("k").lock().await.unwrap();
    assert!(guard.valid_for() > 1_000 * MS);
}

/// `try_lock()` is granted. Before its reply is heard an operator breaks the lock, and the session
/// is told while there is no hold yet that it could be about.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_whose_loss_is_told_before_its_grant_is_lost() {
    let server = Server::start();
    let (client, [_near, p2, _p3]) = three_ways(&server, calm()).await;
    let lock = client.lock("k").lease(Duration::from_secs(290));
    p2.delay(300 * MS);
    let trying = tokio::spawn(async move { lock.try_lock().await });
    until("it is granted", || server.holder("k").is_some());
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    server.connect().take("k", "alice");
    let guard = soon(trying).await.unwrap().unwrap();
    p2.heal();
    let told = timeout(Duration::from_secs(4), guard.lost()).await;
    assert!(
        told.is_ok(),
        "alice has it, and the guard says that it is held"
    );
}

/// The same of `lock()`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_whose_loss_is_told_before_its_grant_is_lost() {
    let server = Server::start();
    let (client, [_near, p2, _p3]) = three_ways(&server, calm()).await;
    let lock = client.lock("k").lease(Duration::from_secs(290));
    p2.delay(300 * MS);
    let trying = tokio::spawn(async move { lock.lock().await });
    until("it is granted", || server.holder("k").is_some());
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    server.connect().take("k", "alice");
    let guard = soon(trying).await.unwrap().unwrap();
    p2.heal();
    let told = timeout(Duration::from_secs(4), guard.lost()).await;
    assert!(
        told.is_ok(),
        "alice has it, and the guard says that it is held"
    );
}

/// The same of a writer, which the server knows by no token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_whose_loss_is_told_before_its_grant_is_lost() {
    let server = Server::start();
    let (client, [_near, p2, _p3]) = three_ways(&server, calm()).await;
    let lock = client.rw_lock("k");
    p2.delay(300 * MS);
    let trying = tokio::spawn(async move { lock.try_write().await });
    until("it is granted", || server.run("EXISTS k") == 1);
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    server
        .connect()
        .run("RLOCK.ACQUIRE k alice 300000 WRITE")
        .held();
    let guard = soon(trying).await.unwrap().unwrap();
    p2.heal();
    let told = timeout(Duration::from_secs(4), guard.lost()).await;
    assert!(
        told.is_ok(),
        "alice has it, and the guard says that it is held"
    );
}

/// A connection is given up with a writer's RELEASE on it, which is carried out late: after the
/// lock was granted anew over the next connection, and is answered before that grant. The RELEASE
/// was handed over first, and takes the new hold all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_release_that_an_abandoned_connection_delivers_late_leaves_no_guard_that_lies() {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let server = Server::start();
    let builder = patient().response_timeout(TIMEOUT);
    let (client, [near, commands, session]) = three_ways(&server, builder).await;
    let next_commands = Proxy::to(server.address());
    near.lead_to(next_commands.address());
    let r = client.rw_lock("r").owner(&client.owner());
    let one = r.write().await.unwrap();

    commands.cut_to_server();
    let started = Instant::now();
    let ask_in_vain = || {
        let lock = client.lock("x");
        tokio::spawn(async move { lock.try_lock().await });
    };
    while started.elapsed() + 500 * MS < TIMEOUT * 4 {
        ask_in_vain();
        sleep(50 * MS).await;
    }
    // After four times the timeout the connection is given up, and the RELEASE waits there.
    session.cut_to_client();
    assert_eq!(server.run("RLOCK.BREAK r"), 1);
    drop(one);
    next_commands.delay(200 * MS);
    while started.elapsed() < TIMEOUT * 4 + 200 * MS {
        ask_in_vain();
        sleep(50 * MS).await;
    }
    let next = tokio::spawn(async move { r.try_write().await });
    until("it is granted", || server.run("EXISTS r") == 1);
    commands.heal();
    let next = soon(next).await.unwrap();
    // Refused, it has no guard that could lie.
    let Ok(next) = next else { return };
    next_commands.heal();
    until("the RELEASE is carried out", || {
        calls(&server, "release") > 0
    });
    if !free(&server, "r") {
        // On a busy machine the connection was given up too early or too late: it came before.
        return;
    }
    // Later it is told in any case: the session connection is found silent, and made anew.
    let told = timeout(1000 * MS, next.lost()).await;
    session.heal();
    assert!(
        told.is_ok(),
        "nobody has it, and the guard says that it is held"
    );
}

/// A wait for `a` and `b` beside a guard of `a`, when nothing comes from the server any more on any
/// connection. The second value keeps the proxies and the guard.
async fn mute_while_it_waits(
    server: &Server,
    lease: Duration,
    timeout: Duration,
) -> (Client, impl Sized, JoinHandle<Result<MultiGuard, Error>>) {
    let builder = Client::builder()
        .grace(Duration::from_secs(6))
        .lease(lease)
        .response_timeout(Duration::from_secs(2));
    let (client, [near, commands, session]) = three_ways(server, builder).await;
    let owner = client.owner();
    let held = client.lock("a").owner(&owner).lock().await.unwrap();
    server.connect().run("RLOCK.ACQUIRE b alice 300000");
    let both = client.multi(["a", "b"]).owner(&owner);
    let waiting = see_in_queue(server, "b", async move { both.lock_timeout(timeout).await });
    session.cut_to_client();
    commands.cut_to_client();
    (client, (near, commands, session, held), waiting)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_is_kept_while_the_server_is_mute() {
    let server = Server::start();
    let (started, time) = (Instant::now(), Duration::from_secs(8));
    let lease = Duration::from_secs(60);
    let (_client, _kept, waiting) = mute_while_it_waits(&server, lease, time).await;
    let error = soon(waiting).await.unwrap().unwrap_err();
    let took = started.elapsed();
    assert!(took < Duration::from_secs(13), "{took:?}: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_takes_no_longer_than_the_lease_while_a_wait_hears_nothing() {
    let server = Server::start();
    let lease = Duration::from_secs(7);
    let (client, _kept, waiting) = mute_while_it_waits(&server, lease, Duration::MAX).await;
    let started = Instant::now();
    let shutdown = tokio::spawn(async move { client.shutdown().await });
    let error = soon(waiting).await.unwrap().unwrap_err();
    let told = started.elapsed();
    soon(shutdown).await.unwrap();
    let took = started.elapsed();
    assert!(told < Duration::from_secs(4), "{told:?}: {error}");
    assert!(took < Duration::from_secs(11), "{took:?}");
}

/// A wait is granted, and the word of it is lost with the session connection: the next one tells it
/// again.
async fn granted_unheard<G: Send + 'static>(
    server: &Server,
    far: &Proxy,
    [name, mode]: [&str; 2],
    wait: impl Future<Output = Result<G, Error>> + Send + 'static,
) {
    let mut alice = server.connect();
    alice.run(format!("RLOCK.ACQUIRE {name} alice 300000 {mode}"));
    let waiting = see_in_queue(server, name, wait);
    far.cut_to_client();
    alice.run(format!("RLOCK.RELEASE {name} alice {mode}"));
    until("it is told", || {
        server.info_number("rlock_unacknowledged_events") > 0
    });
    far.sever();
    far.heal();
    let guard = soon(waiting).await.unwrap().unwrap();
    assert_eq!(*server.run(format!("RLOCK.INFO {name}")).get("count"), 1);
    drop(guard);
    until("it is free", || free(server, name));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_was_granted_unheard_is_not_entered_twice() {
    let server = Server::start();
    let builder = calm().grace(Duration::from_secs(60));
    let (client, _near, far) = two_ways(&server, builder).await;
    let lock = client.lock("k");
    let waits = async move { lock.lock().await };
    granted_unheard(&server, &far, ["k", ""], waits).await;
    let lock = client.rw_lock("r");
    let waits = async move { lock.write().await };
    granted_unheard(&server, &far, ["r", "WRITE"], waits).await;
}
