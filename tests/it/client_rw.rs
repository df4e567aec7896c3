//! The client's read-write lock against real servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rlock_client::{LostReason, ReadGuard, RwLock, WriteGuard, blocking};
use rlock_tests::{Proxy, Server, patience, until};
use tokio::time::{sleep, timeout};

use super::client::{
    MS, begin_and_drop, calls, calm, client, connect, patient, poll_once, see_in_queue, soon,
    two_clients, url,
};
use super::client_faults::{LONG_GRACE, client_through, kill_session_connection};
use super::client_session::{DROPPING, drops, is_granted_within, next_random, waiters};
use super::ways::two_ways;

/// The holders of the lock `k`, as `owner/mode/count`, in the order of the owners.
fn holders(server: &Server) -> Vec<String> {
    let info = server.run("RLOCK.INFO k");
    if info.get("ttl-ms") == &0 {
        return Vec::new();
    }
    let holders = info.get("holders").array().iter();
    let mut holders: Vec<_> = holders
        .map(|holder| {
            let [owner, mode] = ["owner", "mode"].map(|key| holder.get(key).text());
            format!("{owner}/{mode}/{}", holder.get("count").int())
        })
        .collect();
    holders.sort_unstable();
    holders
}

/// Nothing is left: no hash, no timeout key, no waiter.
fn assert_nothing_left(server: &Server) {
    // Not DBSIZE, which counts keys that have expired and are not deleted yet.
    let left = (server.run("KEYS *").array().len(), waiters(server));
    assert_eq!(left, (0, 0), "{:?}", server.run("KEYS *"));
}

/// Waits to read, in a task of its own.
fn waits_to_read(
    server: &Server,
    lock: &RwLock,
) -> tokio::task::JoinHandle<Result<ReadGuard, rlock_client::Error>> {
    let lock = lock.clone();
    see_in_queue(server, "k", async move { lock.read().await })
}

/// Waits to write, in a task of its own.
fn waits_to_write(
    server: &Server,
    lock: &RwLock,
) -> tokio::task::JoinHandle<Result<WriteGuard, rlock_client::Error>> {
    let lock = lock.clone();
    see_in_queue(server, "k", async move { lock.write().await })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taken_in_one_command_and_given_back_in_one() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k");
    let reader = lock.read().await.unwrap();
    let other = lock.read().await.unwrap();
    assert_eq!(reader.name(), b"k");
    let info = server.run("RLOCK.INFO k");
    assert_eq!(info.get("mode").text(), "read");
    assert_eq!(holders(&server).len(), 2);
    assert!(other.token() > reader.token());
    let token = info.get("holders").array().iter().find_map(|holder| {
        let own = holder.get("owner").text() == reader.owner().as_str();
        own.then(|| holder.get("token").int())
    });
    assert_eq!(token, i64::try_from(reader.token()).ok());
    reader.unlock().await.unwrap();
    other.unlock().await.unwrap();
    let writer = lock.write().await.unwrap();
    let info = server.run("RLOCK.INFO k");
    assert_eq!(info.get("mode").text(), "write");
    assert_eq!(info.get("owner").text(), writer.owner().as_str());
    assert_eq!(
        info.get("token").int(),
        i64::try_from(writer.token()).unwrap()
    );
    writer.unlock().await.unwrap();
    assert_eq!(
        ["acquire", "release", "renew", "cancel"].map(|command| calls(&server, command)),
        [3, 3, 0, 0]
    );
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_are_together_and_writers_alone() {
    let server = Server::start();
    let clients = two_clients(&server).await;
    // Readers inside, or -1 for a writer.
    let inside = Arc::new(AtomicI64::new(0));
    let (most, written) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> = (0..500)
        .map(|i| {
            let lock = clients[i % 2].rw_lock("k");
            let inside = Arc::clone(&inside);
            let (most, written) = (Arc::clone(&most), Arc::clone(&written));
            tokio::spawn(async move {
                if i % 5 == 0 {
                    let guard = lock.write().await.unwrap();
                    assert_eq!(inside.swap(-1, Ordering::SeqCst), 0, "not alone");
                    let seen = written.load(Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    written.store(seen + 1, Ordering::SeqCst);
                    assert_eq!(inside.swap(0, Ordering::SeqCst), -1, "not alone");
                    guard.unlock().await.unwrap();
                } else {
                    let guard = lock.read().await.unwrap();
                    let readers = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(readers > 0, "beside a writer");
                    most.fetch_max(readers, Ordering::SeqCst);
                    let seen = written.load(Ordering::SeqCst);
                    sleep(MS).await;
                    assert_eq!(written.load(Ordering::SeqCst), seen);
                    assert!(inside.fetch_sub(1, Ordering::SeqCst) > 0);
                    guard.unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(patience(Duration::from_secs(60)), task)
            .await
            .unwrap()
            .unwrap();
    }
    assert_eq!(written.load(Ordering::SeqCst), 100);
    let most = most.load(Ordering::SeqCst);
    assert!(most > 1, "at most {most} reader at a time");
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_wait_behind_a_waiting_writer_and_are_granted_together() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k");
    let first = lock.read().await.unwrap();
    let writer = waits_to_write(&server, &lock);
    let readers = [waits_to_read(&server, &lock), waits_to_read(&server, &lock)];
    assert!(lock.try_read().await.unwrap_err().is_not_acquired());
    let late = waits_to_write(&server, &lock);
    first.unlock().await.unwrap();
    let writer = soon(writer).await.unwrap().unwrap();
    assert_eq!(server.waiting_owners("k").len(), 3);
    writer.unlock().await.unwrap();
    let [one, other] = readers;
    let readers = [
        soon(one).await.unwrap().unwrap(),
        soon(other).await.unwrap().unwrap(),
    ];
    assert_eq!(holders(&server).len(), 2);
    assert!(!late.is_finished());
    drop(readers);
    soon(late).await.unwrap().unwrap().unlock().await.unwrap();
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_come_in_at_once_when_the_writer_that_kept_them_out_is_dropped() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k");
    let first = lock.read().await.unwrap();
    let writer = waits_to_write(&server, &lock);
    let reader = waits_to_read(&server, &lock);
    writer.abort();
    let second = soon(reader).await.unwrap().unwrap();
    assert!(!first.is_lost() && !second.is_lost());
    // A wait that times out, too.
    let kept_out = lock.clone();
    let waiting = see_in_queue(&server, "k", async move {
        kept_out.write_timeout(Duration::from_secs(4)).await
    });
    let reader = waits_to_read(&server, &lock);
    assert!(soon(waiting).await.unwrap().unwrap_err().is_not_acquired());
    drop(soon(reader).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_long_wait_the_reply_is_what_is_left_of_the_lease() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k").lease(Duration::from_secs(60));
    let writer = lock.try_write().await.unwrap();
    let errors = [
        lock.try_read().await.unwrap_err(),
        lock.try_write().await.unwrap_err(),
        lock.read_timeout(20 * MS).await.unwrap_err(),
        lock.write_timeout(20 * MS).await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_not_acquired(), "{error}");
        let left = error.lease_left().unwrap();
        assert!(
            left > Duration::from_secs(40) && left <= Duration::from_secs(60),
            "{left:?}"
        );
    }
    assert!(server.waiting_owners("k").is_empty());
    writer.unlock().await.unwrap();
    let reader = lock.try_read().await.unwrap();
    assert!(lock.try_write().await.unwrap_err().is_not_acquired());
    let other = lock.read_timeout(Duration::ZERO).await.unwrap();
    let waiting = lock.clone();
    let writer = see_in_queue(&server, "k", async move {
        waiting.write_timeout(Duration::from_secs(20)).await
    });
    drop((reader, other));
    let writer = soon(writer).await.unwrap().unwrap();
    let waiting = lock.clone();
    let reader = see_in_queue(&server, "k", async move {
        waiting.read_timeout(Duration::from_secs(20)).await
    });
    drop(writer);
    drop(soon(reader).await.unwrap().unwrap());
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_lets_waiting_readers_in_at_once_and_no_writer() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k");
    let writer = lock.write().await.unwrap();
    let (owner, token) = (writer.owner().clone(), writer.token());
    let readers = [waits_to_read(&server, &lock), waits_to_read(&server, &lock)];
    let next = waits_to_write(&server, &lock);
    let mut rival = server.connect();
    rival.send("RLOCK.ACQUIRE k rival 30000 WRITE BLOCK 0");
    until("the rival waits", || server.waiting_owners("k").len() == 4);
    let reader = writer.downgrade().await.unwrap();
    assert_eq!(reader.owner(), &owner);
    assert!(reader.token() > token);
    for waiting in readers {
        drop(soon(waiting).await.unwrap().unwrap());
    }
    assert!(!next.is_finished() && !reader.is_lost());
    rival.expect_nothing_yet();
    reader.renew().await.unwrap();
    reader.unlock().await.unwrap();
    let next = soon(next).await.unwrap().unwrap();
    next.unlock().await.unwrap();
    assert_eq!(rival.read().held().0, 1);
    assert_eq!(rival.run("RLOCK.RELEASE k rival WRITE"), 0);
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_keeps_the_lease_and_the_longest_hold_and_the_other_guards() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let longest = Duration::from_secs(20);
    let lock = client
        .rw_lock("k")
        .lease(Duration::from_secs(30))
        .max_hold(longest);
    let before = Instant::now();
    let writer = lock.write().await.unwrap();
    let taken = Instant::now();
    sleep(300 * MS).await;
    let again = lock.clone().owner(writer.owner()).write().await.unwrap();
    let reader = again.downgrade().await.unwrap();
    let owner = reader.owner().as_str();
    assert_eq!(
        holders(&server),
        [format!("{owner}/read/1"), format!("{owner}/write/1")]
    );
    assert!(lock.try_read().await.unwrap_err().is_not_acquired());
    let passed = taken.elapsed();
    let left = reader.valid_for();
    assert!(passed + left <= longest, "from the first: {left:?}");
    assert!(before.elapsed() + left > Duration::from_secs(19));
    writer.unlock().await.unwrap();
    lock.try_read().await.unwrap().unlock().await.unwrap();
    reader.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_of_a_lost_hold_says_so_and_holds_nothing() {
    let server = Server::start();
    let client = client(&server).await;
    for round in 0..20 {
        let writer = client.rw_lock("k").write().await.unwrap();
        if round % 2 == 0 {
            server.run("RLOCK.BREAK k");
        } else {
            server.run("DEL k");
        }
        if round % 4 < 2 {
            soon(writer.lost()).await;
        }
        let error = writer.downgrade().await.unwrap_err();
        assert!(error.is_lost(), "{error}");
        until("nothing is held", || server.run("DBSIZE") == 0);
    }
    let writer = client.rw_lock("k").write().await.unwrap();
    client.shutdown().await;
    assert!(writer.downgrade().await.unwrap_err().is_unavailable());
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_dropped_at_any_moment_leaves_nothing_behind() {
    let server = Server::start();
    for round in 0..40 {
        let client = client(&server).await;
        let writer = client.rw_lock("k").write().await.unwrap();
        begin_and_drop(writer.downgrade(), round).await;
        client.shutdown().await;
        assert_nothing_left(&server);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_may_read_and_keeps_its_place_but_a_reader_cannot_write() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k").owner(&client.owner());
    let writer = lock.write().await.unwrap();
    let reader = lock.read().await.unwrap();
    assert_ne!(reader.token(), writer.token());
    writer.unlock().await.unwrap();
    assert!(!reader.is_lost());
    drop(client.rw_lock("k").read().await.unwrap());

    let error = lock.write().await.unwrap_err();
    assert!(error.is_deadlock(), "{error}");
    let error = lock.write_timeout(Duration::from_secs(9)).await;
    assert!(error.unwrap_err().is_deadlock());
    let error = lock.try_write().await.unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    reader.unlock().await.unwrap();
    drop(lock.write().await.unwrap());
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_waits_once_be_it_to_read_or_to_write() {
    let server = Server::start();
    let client = client(&server).await;
    let alone = client.rw_lock("k").write().await.unwrap();
    let lock = client.rw_lock("k").owner(&client.owner());
    let reader = waits_to_read(&server, &lock);
    let acquires = calls(&server, "acquire");
    let own = lock.clone();
    let writer = tokio::spawn(async move { own.write().await });
    until("the second has asked", || {
        calls(&server, "acquire") > acquires
    });
    assert_eq!(
        server.waiting_owners("k").len(),
        1,
        "CANCEL would take out both"
    );
    alone.unlock().await.unwrap();
    let reader = soon(reader).await.unwrap().unwrap();
    // Its turn has come, and it would wait for itself.
    let error = soon(writer).await.unwrap().unwrap_err();
    assert!(error.is_deadlock(), "{error}");
    reader.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_owner_enters_again_and_the_last_guard_gives_back_the_hold() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k").owner(&client.owner());
    let writers = (lock.write().await.unwrap(), lock.try_write().await.unwrap());
    let readers = (lock.read().await.unwrap(), lock.try_read().await.unwrap());
    let owner = writers.0.owner().as_str().to_owned();
    assert_eq!(writers.0.token(), writers.1.token());
    assert_eq!(readers.0.token(), readers.1.token());
    let held = |read: i64, write: i64| {
        let modes = [("read", read), ("write", write)].into_iter();
        let held = modes.filter(|(_, count)| *count > 0);
        held.map(|(mode, count)| format!("{owner}/{mode}/{count}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(holders(&server), held(1, 1));
    assert_eq!(calls(&server, "acquire"), 2);
    writers.1.unlock().await.unwrap();
    readers.0.unlock().await.unwrap();
    assert_eq!(holders(&server), held(1, 1));
    writers.0.unlock().await.unwrap();
    assert_eq!(holders(&server), held(1, 0));
    readers.1.unlock().await.unwrap();
    assert_nothing_left(&server);
}

/// Fails if a guard that is valid for so long outlasts the lease in the server.
fn assert_within_the_lease(server: &Server, valid_for: impl Fn() -> Duration) {
    let info = server.run("RLOCK.INFO k");
    let ttls = info.get("holders").array().iter();
    let least = ttls.map(|holder| holder.get("ttl-ms").int()).min();
    let left = Duration::from_millis(u64::try_from(least.unwrap()).unwrap());
    // Asked later, it can only be less.
    assert!(valid_for() <= left + MS, "{info:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_valid_for_no_longer_than_the_lease_in_the_server() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let lock = client.rw_lock("k").lease(Duration::from_secs(60));
    let writer = lock.write().await.unwrap();
    assert_within_the_lease(&server, || writer.valid_for());
    writer.renew().await.unwrap();
    assert_within_the_lease(&server, || writer.valid_for());
    let reader = waits_to_read(&server, &lock);
    writer.unlock().await.unwrap();
    let reader = soon(reader).await.unwrap().unwrap();
    assert_within_the_lease(&server, || reader.valid_for());
    assert!(reader.valid_for() > Duration::from_secs(50));
    reader.renew().await.unwrap();
    assert_within_the_lease(&server, || reader.valid_for());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_gives_back_one_of_two_guards_keeps_the_others_lease() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let lock = client
        .rw_lock("k")
        .lease(Duration::from_secs(10))
        .owner(&client.owner());
    let outer = lock.read().await.unwrap();
    sleep(300 * MS).await;
    // Its entry ends later than that of the first, and is the first to go.
    let inner = lock.read().await.unwrap();
    assert_within_the_lease(&server, || outer.valid_for());
    inner.unlock().await.unwrap();
    assert_within_the_lease(&server, || outer.valid_for());
    outer.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_watchdog_keeps_short_leases_of_both_modes_alive() {
    let server = Server::start();
    let lease = Duration::from_secs(5);
    let client = connect(calm().lease(lease).renew_every(100 * MS), &server).await;
    let readers = [
        client.rw_lock("k").read().await.unwrap(),
        client.rw_lock("k").read().await.unwrap(),
    ];
    let writer = client.rw_lock("other").write().await.unwrap();
    let started = Instant::now();
    while started.elapsed() < lease + 500 * MS {
        assert!(!writer.is_lost() && readers.iter().all(|reader| !reader.is_lost()));
        assert_eq!(holders(&server).len(), 2);
        sleep(10 * MS).await;
    }
    assert!(calls(&server, "renew") >= 3);
    drop((readers, writer));
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_of_both_modes_are_told_at_once_why_they_lost_their_lock() {
    let server = Server::start();
    let client = client(&server).await;
    for (command, reason) in [
        ("DEL k", LostReason::Deleted),
        ("RLOCK.BREAK k", LostReason::Broken),
        ("FLUSHALL", LostReason::Deleted),
    ] {
        let lock = client.rw_lock("k");
        let readers = [lock.read().await.unwrap(), lock.read().await.unwrap()];
        server.run(command);
        for reader in readers {
            assert_eq!(soon(reader.lost()).await, reason, "{command}");
            assert!(reader.is_lost() && reader.valid_for() == Duration::ZERO);
            assert!(reader.unlock().await.unwrap_err().is_lost());
        }
        server.run("FLUSHALL");
        let lock = lock.owner(&client.owner());
        let (writer, reader) = (lock.write().await.unwrap(), lock.read().await.unwrap());
        server.run(command);
        assert_eq!(soon(writer.lost()).await, reason, "{command}");
        assert_eq!(soon(reader.lost()).await, reason, "{command}");
        assert!(writer.unlock().await.unwrap_err().is_lost());
        assert!(reader.unlock().await.unwrap_err().is_lost());
        server.run("FLUSHALL");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_loses_its_hold_at_its_own_end_and_the_others_keep_theirs() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.rw_lock("k");
    let long = lock.read().await.unwrap();
    let short = lock.clone().lease(200 * MS).read().await.unwrap();
    let writer = waits_to_write(&server, &lock);
    assert_eq!(soon(short.lost()).await, LostReason::Expired);
    until("the server has ended it, too", || {
        holders(&server).len() == 1
    });
    assert!(short.unlock().await.unwrap_err().is_lost());
    assert!(!long.is_lost());
    long.unlock().await.unwrap();
    soon(writer).await.unwrap().unwrap().unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_unlock_does_not_free_a_newer_hold_of_the_same_owner() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let lock = client.rw_lock("k").owner(&owner);
    let old = lock.write().await.unwrap();
    assert_eq!(server.run("DEL k"), 1);
    assert_eq!(soon(old.lost()).await, LostReason::Deleted);
    let new = lock.write().await.unwrap();
    assert!(new.token() > old.token());
    assert!(old.unlock().await.unwrap_err().is_lost());
    assert_eq!(holders(&server), [format!("{owner}/write/1")]);
    assert!(!new.is_lost());
    new.unlock().await.unwrap();

    let old = lock.read().await.unwrap();
    server.run("FLUSHALL");
    assert_eq!(soon(old.lost()).await, LostReason::Deleted);
    let new = lock.read().await.unwrap();
    assert!(old.unlock().await.unwrap_err().is_lost());
    assert_eq!(holders(&server), [format!("{owner}/read/1")]);
    new.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_is_a_plain_lock_or_a_read_write_lock() {
    let server = Server::start();
    let client = client(&server).await;
    let plain = client.lock("k").lock().await.unwrap();
    for error in [
        client.rw_lock("k").read().await.unwrap_err(),
        client.rw_lock("k").try_write().await.unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(error.is_refused() && text.contains("WRONGKIND"), "{text}");
    }
    plain.unlock().await.unwrap();
    let reader = client.rw_lock("k").read().await.unwrap();
    let error = client.lock("k").lock().await.unwrap_err();
    assert!(
        error.is_refused() && error.to_string().contains("WRONGKIND"),
        "{error}"
    );
    reader.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_call_leaves_nothing_behind() {
    let server = Server::start();
    for round in 0..40 {
        let client = client(&server).await;
        let lock = client.rw_lock("k");
        begin_and_drop(lock.read(), round).await;
        begin_and_drop(lock.write(), round).await;
        client.shutdown().await;
        assert_nothing_left(&server);
    }
    let mut alice = server.connect();
    for mode in ["READ", "WRITE"] {
        alice.run(format!("RLOCK.ACQUIRE k alice 600000 {mode}"));
        for round in 0..60 {
            let client = client(&server).await;
            let lock = client.rw_lock("k");
            begin_and_drop(lock.write(), round).await;
            begin_and_drop(lock.read(), round).await;
            until("nobody waits", || server.waiting_owners("k").is_empty());
            client.shutdown().await;
            let mode = mode.to_lowercase();
            assert_eq!(holders(&server), [format!("alice/{mode}/1")], "{round}");
        }
        assert_eq!(alice.run(format!("RLOCK.RELEASE k alice {mode}")), 0);
        assert_nothing_left(&server);
    }
    assert!(calls(&server, "cancel") > 0, "no round got into the queue");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_call_in_the_moment_of_its_grant_leaves_nothing_behind() {
    let server = Server::start();
    let mut alice = server.connect();
    for round in 0..60 {
        let client = client(&server).await;
        alice.run("RLOCK.ACQUIRE k alice 30000 WRITE");
        let lock = client.rw_lock("k");
        let (mut reader, mut writer) = (Box::pin(lock.read()), Box::pin(lock.write()));
        assert!(poll_once(reader.as_mut()).await.is_pending());
        assert!(poll_once(writer.as_mut()).await.is_pending());
        until("they wait", || server.waiting_owners("k").len() == 2);
        alice.send("RLOCK.RELEASE k alice WRITE");
        let ends = Instant::now() + round * 10 * Duration::from_micros(1);
        while Instant::now() < ends {
            tokio::task::yield_now().await;
        }
        drop(reader);
        drop(writer);
        assert_eq!(alice.read(), 0);
        client.shutdown().await;
        assert_nothing_left(&server);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_dropped_at_random_moments_under_traffic_leave_no_key_and_no_waiter() {
    let server = Server::start();
    let clients = two_clients(&server).await;
    let over = Arc::new(AtomicBool::new(false));
    let traffic: Vec<_> = (0..4)
        .map(|i| {
            let lock = clients[i % 2].rw_lock("k");
            let over = Arc::clone(&over);
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    if i < 2 {
                        lock.read().await.unwrap().unlock().await.unwrap();
                    } else {
                        let writer = lock.write().await.unwrap();
                        writer.downgrade().await.unwrap().unlock().await.unwrap();
                    }
                }
            })
        })
        .collect();
    let droppers: Vec<_> = (0..4_u64)
        .map(|i| {
            let client = clients[(i % 2) as usize].clone();
            // Two of them share what their calls of one client have in common.
            let owner = (i < 2).then(|| client.owner());
            let mut random = 0x9E37_79B9_7F4A_7C15 + i;
            let ends = Instant::now() + DROPPING;
            tokio::spawn(async move {
                for _ in 0..drops() / 20 {
                    if Instant::now() > ends {
                        break;
                    }
                    let mut lock = client.rw_lock("k");
                    if let Some(owner) = &owner {
                        lock = lock.owner(owner);
                    }
                    let patience = Duration::from_micros(next_random(&mut random) % 1_500);
                    match next_random(&mut random) % 3 {
                        0 => is_granted_within(patience, lock.read()).await,
                        1 => is_granted_within(patience, lock.write()).await,
                        _ => {
                            let downgraded = async { lock.write().await?.downgrade().await };
                            is_granted_within(patience, downgraded).await
                        }
                    };
                }
            })
        })
        .collect();
    for dropper in droppers {
        timeout(patience(Duration::from_secs(120)), dropper)
            .await
            .unwrap()
            .unwrap();
    }
    over.store(true, Ordering::Relaxed);
    let long = patience(Duration::from_secs(60));
    for task in traffic {
        timeout(long, task).await.unwrap().unwrap();
    }
    for client in &clients {
        timeout(long, client.shutdown()).await.unwrap();
    }
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_connections_cost_neither_a_hold_nor_a_wait() {
    let server = Server::start();
    let builder = calm().renew_every(50 * MS).grace(LONG_GRACE);
    let client = connect(builder, &server).await;
    let [lock, other] = ["k", "other"].map(|name| client.rw_lock(name));
    let reader = lock.read().await.unwrap();
    let writer = other.write().await.unwrap();
    let to_write = waits_to_write(&server, &lock);
    let to_read = see_in_queue(&server, "other", async move { other.read().await });
    let mut observer = server.connect();
    for _ in 0..3 {
        observer.run("CLIENT KILL TYPE normal SKIPME yes");
        let renewals = calls(&server, "renew");
        until("renewed on a new connection", || {
            calls(&server, "renew") > renewals + 1
        });
        until("they wait on a new connection", || waiters(&server) == 2);
    }
    kill_session_connection(&server);
    until("they wait again", || waiters(&server) == 2);
    sleep(LONG_GRACE + 200 * MS).await;
    assert!(!reader.is_lost() && !writer.is_lost());
    reader.unlock().await.unwrap();
    writer.unlock().await.unwrap();
    soon(to_write)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    soon(to_read)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_of_both_modes_that_survive_a_restart_are_confirmed_and_not_called_lost() {
    let mut server = Server::builder().config("appendonly yes").start();
    let client = connect(calm().renew_every(50 * MS), &server).await;
    let reader = client.rw_lock("k").read().await.unwrap();
    let writer = client.rw_lock("other").write().await.unwrap();
    server.restart();
    until("they were renewed after the restart", || {
        calls(&server, "renew") > 1
    });
    reader.renew().await.unwrap();
    // Its token is stored with the hold.
    assert!(server.run("RLOCK.INFO other").get("token").int() > 0);
    writer.renew().await.unwrap();
    assert!(!reader.is_lost() && !writer.is_lost());
    let writer = writer.downgrade().await.unwrap();
    writer.unlock().await.unwrap();
    reader.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_loses_everything_is_told_and_waits_queue_again() {
    let mut server = Server::start();
    let client = connect(calm().renew_every(50 * MS), &server).await;
    let writer = client.rw_lock("k").write().await.unwrap();
    let reader = client.rw_lock("other").read().await.unwrap();
    let waiting = waits_to_read(&server, &client.rw_lock("k"));
    server.restart();
    let waited = soon(waiting).await.unwrap().unwrap();
    assert_eq!(soon(writer.lost()).await, LostReason::NotHeld);
    assert_eq!(soon(reader.lost()).await, LostReason::NotHeld);
    assert!(writer.unlock().await.unwrap_err().is_lost());
    assert!(!waited.is_lost());
    waited.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_of_both_modes_say_lost_when_the_network_is_cut() {
    for cut in [Proxy::cut_to_server, Proxy::cut_to_client] {
        let server = Server::start();
        let proxy = Proxy::to(server.address());
        let client = client_through(&proxy).await;
        let reader = client.rw_lock("k").read().await.unwrap();
        let writer = client.rw_lock("other").write().await.unwrap();
        let waiting = waits_to_write(&server, &client.rw_lock("k"));
        // And has been told so, for replies come in order.
        drop(client.lock("told").lock().await.unwrap());
        cut(&proxy);
        sleep(LONG_GRACE).await;
        assert!(reader.is_lost() && writer.is_lost());
        assert_eq!(soon(reader.lost()).await, LostReason::SessionUnconfirmed);
        assert_eq!(soon(writer.lost()).await, LostReason::SessionUnconfirmed);
        drop((reader, writer));
        proxy.heal();
        let next = soon(waiting).await.unwrap().unwrap();
        assert!(!next.is_lost());
        soon(next.unlock()).await.unwrap();
        soon(client.shutdown()).await;
        until("nothing is left", || {
            server.run("DBSIZE") == 0 && waiters(&server) == 0
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_what_is_pending() {
    let server = Server::start();
    let client = client(&server).await;
    server.connect().run("RLOCK.ACQUIRE k alice 30000 WRITE");
    let lock = client.rw_lock("k");
    let (reader, writer) = (
        waits_to_read(&server, &lock),
        waits_to_write(&server, &lock),
    );
    soon(client.shutdown()).await;
    assert!(soon(reader).await.unwrap().unwrap_err().is_unavailable());
    assert!(soon(writer).await.unwrap().unwrap_err().is_unavailable());
    assert!(server.waiting_owners("k").is_empty());
    assert!(lock.read().await.unwrap_err().is_unavailable());
}

#[test]
fn programs_without_async_have_the_same_lock() {
    let server = Server::start();
    let client = blocking::ClientBuilder::from(calm())
        .connect(&url(&server))
        .unwrap();
    let lock = client.rw_lock("k");
    let readers = (lock.read().unwrap(), lock.try_read().unwrap());
    let third = lock.read_timeout(Duration::from_secs(9)).unwrap();
    assert!(lock.try_write().unwrap_err().is_not_acquired());
    assert!(lock.write_timeout(20 * MS).unwrap_err().is_not_acquired());
    assert_eq!(third.name(), b"k");
    assert_eq!(holders(&server).len(), 3);
    drop((readers, third));
    let owner = client.owner();
    let lock = lock
        .lease(Duration::from_secs(60))
        .max_hold(Duration::from_secs(40))
        .owner(&owner);
    let writer = lock.write().unwrap();
    let ttl = server.run("PTTL k").int();
    assert!((30_001..=40_000).contains(&ttl), "{ttl}");
    writer.renew().unwrap();
    let reader = writer.downgrade().unwrap();
    assert_eq!(holders(&server), [format!("{owner}/read/1")]);
    server.run("RLOCK.BREAK k");
    let reason = reader.lost_within(patience(Duration::from_secs(15)));
    assert_eq!(reason, Some(LostReason::Broken));
    assert!(reader.unlock().unwrap_err().is_lost());
    client.shutdown();
    assert_nothing_left(&server);
}

/// The lock that is written is broken and written by somebody else, before its guard is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_of_a_hold_that_another_has_by_now_says_that_it_is_lost() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, patient()).await;
    let writer = client.rw_lock("w").write().await.unwrap();
    far.cut_to_client();
    assert_eq!(server.run("RLOCK.BREAK w"), 1);
    let mut alice = server.connect();
    alice.run("RLOCK.ACQUIRE w alice 600000 WRITE").held();
    let error = soon(writer.downgrade()).await.unwrap_err();
    assert!(error.is_lost(), "{error}");
}
