//! Redisson's `RReadWriteLock` and ours on the same names.

use std::thread;
use std::time::{Duration, Instant};

use rlock_client::Client;
use rlock_tests::{Conn, Reply, Server, until};

use crate::java::{Owner, Redisson};
use crate::measure::{AT_ONCE, WakeUps, took_about};
use crate::rounds;

const MS: Duration = Duration::from_millis(1);
const NOT_THE_OWNER: &str = "error IllegalMonitorStateException";

/// Takes a hold of that mode, which must be granted at once, with a lease of 30 s.
#[track_caller]
fn take(conn: &mut Conn, owner: &str, mode: &str) {
    conn.run(format!("RLOCK.ACQUIRE k {owner} 30000 {mode}"))
        .held();
}

/// It cannot be had now; the lease of its holders.
#[track_caller]
fn refused(conn: &mut Conn, owner: &str, mode: &str) -> i64 {
    conn.run(format!("RLOCK.ACQUIRE k {owner} 30000 {mode}"))
        .refused()
}

#[track_caller]
fn let_go(conn: &mut Conn, owner: &str, mode: &str) -> i64 {
    conn.run(format!("RLOCK.RELEASE k {owner} {mode}")).int()
}

/// In line on a connection of its own.
#[track_caller]
fn in_queue(server: &Server, owner: &str, mode: &str) -> Conn {
    server.blocked_in(&format!("RLOCK.ACQUIRE k {owner} 30000 {mode} BLOCK 0"))
}

/// Java cannot unlock a lock that it does not hold.
#[track_caller]
fn has_lost(java: &Owner, mode: &str) {
    let refused = java.ask(&format!("{mode} k unlock"));
    assert!(refused.starts_with(NOT_THE_OWNER), "{refused}");
}

/// Owner and mode of each hold, in alphabetical order.
fn holders(server: &Server) -> Vec<(String, String)> {
    let info = server.run("RLOCK.INFO k");
    let holders = info.get("holders").array().iter();
    let text = |holder: &Reply, key| holder.get(key).text();
    let mut holders: Vec<_> = holders
        .map(|holder| (text(holder, "owner"), text(holder, "mode").to_lowercase()))
        .collect();
    holders.sort_unstable();
    holders
}

/// The keys in which readers keep their leases.
fn timeout_keys(server: &Server) -> Vec<String> {
    server.run("KEYS *rwlock_timeout*").texts()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_lose_no_update_and_readers_see_none_half_done() {
    const ROUNDS: u32 = 500;
    let server = Server::start();
    let redisson = Redisson::with_watchdog(&server, Duration::from_millis(rounds::LEASE));
    let writers = [redisson.owner(), redisson.owner()];
    let readers = [redisson.owner(), redisson.owner()];
    for writer in &writers {
        writer.tell(&format!("write k rounds {ROUNDS} 1000"));
    }
    for reader in &readers {
        reader.tell(&format!("read k reads {ROUNDS} 1000"));
    }
    // Few of ours, since Java finds the lock free only while none of them waits.
    let url = format!("redis://{}", server.address());
    let ours = rounds::calm().connect(&url).await.unwrap();
    let tasks = [
        tokio::spawn(writes_of_the_crate(ours.clone(), server.connect(), ROUNDS)),
        tokio::spawn(reads_of_the_crate(ours.clone(), server.connect(), ROUNDS)),
    ];
    thread::scope(|scope| {
        for (owner, mode) in [("writer", "WRITE"), ("reader", "READ")] {
            let server = &server;
            scope.spawn(move || rounds::play(server, "k", owner, mode, ROUNDS));
        }
    });
    for task in tasks {
        task.await.unwrap();
    }
    for owner in writers.iter().chain(&readers) {
        let deadline = Duration::from_secs(120);
        assert_eq!(owner.answer_within(deadline).text, ROUNDS.to_string());
    }
    ours.shutdown().await;
    rounds::check(&server, "k", ROUNDS * 4, 50);
    assert!(timeout_keys(&server).is_empty());
}

async fn writes_of_the_crate(client: Client, mut conn: Conn, rounds: u32) {
    for round in 0..rounds {
        let guard = client.rw_lock("k").write().await.unwrap();
        rounds::count(&mut conn, "k", "crate");
        guard.unlock().await.unwrap();
        tokio::time::sleep(rounds::pause(round)).await;
    }
}

async fn reads_of_the_crate(client: Client, mut conn: Conn, rounds: u32) {
    for round in 0..rounds {
        let guard = client.rw_lock("k").read().await.unwrap();
        rounds::compare(&mut conn, "k");
        guard.unlock().await.unwrap();
        tokio::time::sleep(rounds::pause(round)).await;
    }
}

#[test]
fn readers_of_both_sides_share_and_writers_of_both_wait() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (reader, writer, mut conn) = (redisson.owner(), redisson.owner(), server.connect());
    take(&mut conn, "ours", "READ");
    assert_eq!(reader.ask("read k trylock"), "true");
    assert_eq!(writer.ask("write k trylock"), "false");
    refused(&mut conn, "writer", "WRITE");
    take(&mut conn, "another", "READ");
    let mut expected = [
        ("another".to_owned(), "read".to_owned()),
        ("ours".to_owned(), "read".to_owned()),
        (reader.id(), "read".to_owned()),
    ];
    expected.sort_unstable();
    assert_eq!(holders(&server), expected);
    // The first reader to leave, ours or theirs, leaves the lock to the others.
    assert_eq!(let_go(&mut conn, "ours", "READ"), 0);
    reader.does("read k unlock");
    assert_eq!(writer.ask("write k trylock"), "false");
    assert_eq!(let_go(&mut conn, "another", "READ"), 0);
    assert_eq!(server.run("EXISTS k"), 0);
    assert_eq!(writer.ask("write k trylock"), "true");
    refused(&mut conn, "ours", "READ");
    refused(&mut conn, "ours", "WRITE");
    assert_eq!(reader.ask("read k trylock"), "false");
    assert_eq!(holders(&server), [(writer.id(), "write".to_owned())]);
    writer.does("write k unlock");
    take(&mut conn, "ours", "WRITE");
}

#[test]
fn java_waiters_wake_when_we_release() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    let pairs = [("READ", "write"), ("WRITE", "write"), ("WRITE", "read")];
    let mut wake_ups = WakeUps::of(
        "RELEASE READ and WRITE wake Redisson's read-write locks",
        &[&server],
    );
    for (ours, theirs) in pairs {
        for _ in 0..15 {
            take(&mut conn, "ours", ours);
            java.waits(&format!("{theirs} k lock"));
            let freed = Instant::now();
            assert_eq!(let_go(&mut conn, "ours", ours), 0);
            let answer = java.answer();
            assert_eq!(answer.text, "ok");
            wake_ups.add(freed, answer.ended);
            java.does(&format!("{theirs} k unlock"));
        }
    }
    wake_ups.check();
}

#[test]
fn our_waiters_wake_when_java_unlocks() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    let pairs = [("read", "WRITE"), ("write", "WRITE"), ("write", "READ")];
    let mut wake_ups = WakeUps::of(
        "Redisson's read-write locks wake READ and WRITE",
        &[&server],
    );
    for (theirs, ours) in pairs {
        for _ in 0..15 {
            java.does(&format!("{theirs} k lock"));
            let mut waiter = in_queue(&server, "ours", ours);
            java.tell(&format!("{theirs} k unlock"));
            waiter.read().held();
            let woken = Instant::now();
            let answer = java.answer();
            assert_eq!(answer.text, "ok");
            wake_ups.add(answer.began, woken);
            assert_eq!(let_go(&mut waiter, "ours", ours), 0);
        }
    }
    wake_ups.check();
}

/// Redisson's own, without us: what docs/redisson.md says of its order.
#[test]
fn readers_of_java_pass_its_waiting_writer_and_ours_stand_behind_ours() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (reader, writer, newcomer) = (redisson.owner(), redisson.owner(), redisson.owner());
    reader.does("read k lock");
    writer.waits("write k lock");
    assert_eq!(newcomer.ask("read k trylock"), "true");
    newcomer.does("read k unlock");
    reader.does("read k unlock");
    assert_eq!(writer.answer_within(AT_ONCE).text, "ok");
    writer.does("write k unlock");

    reader.does("read k lock");
    let mut ours = in_queue(&server, "writer", "WRITE");
    refused(&mut server.connect(), "newcomer", "READ");
    assert_eq!(newcomer.ask("read k trylock"), "true"); // by its script, past our queue
    newcomer.does("read k unlock");
    reader.does("read k unlock");
    ours.read_within(AT_ONCE).held();
}

#[test]
fn a_java_writer_that_enters_again_adds_its_lease_and_ours_starts_anew() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("write k lock 20000");
    java.does("write k lock 20000");
    let ttl = server.run("PTTL k").int();
    assert!((30_000..=40_000).contains(&ttl), "{ttl}");
    java.does("write k unlock");
    java.does("write k unlock");
    for count in [1, 2] {
        let held = conn.run("RLOCK.ACQUIRE k ours 20000 WRITE").held();
        assert_eq!(held.0, count);
    }
    let ttl = server.run("PTTL k").int();
    assert!((10_000..=20_000).contains(&ttl), "{ttl}");
}

#[test]
fn a_writer_that_goes_wakes_all_java_readers() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let mut conn = server.connect();
    take(&mut conn, "ours", "WRITE");
    let readers = [redisson.owner(), redisson.owner(), redisson.owner()];
    for reader in &readers {
        reader.waits("read k lock");
    }
    assert_eq!(let_go(&mut conn, "ours", "WRITE"), 0);
    for reader in &readers {
        assert_eq!(reader.answer_within(AT_ONCE).text, "ok");
    }
    assert_eq!(holders(&server).len(), readers.len());
}

#[test]
fn java_readers_come_in_with_ours_when_a_writer_hands_over() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    take(&mut conn, "ours", "WRITE");
    java.waits("read k lock");
    let mut reader = in_queue(&server, "reader", "READ");
    assert_eq!(let_go(&mut conn, "ours", "WRITE"), 0);
    reader.read().held();
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
    assert_eq!(holders(&server).len(), 2);
}

#[test]
fn a_writer_of_ours_that_becomes_a_reader_lets_java_readers_in() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (reader, writer, mut conn) = (redisson.owner(), redisson.owner(), server.connect());
    take(&mut conn, "ours", "WRITE");
    assert_eq!(reader.ask("read k islocked"), "false");
    take(&mut conn, "ours", "READ");
    assert_eq!(reader.ask("write k islocked"), "true");
    reader.waits("read k lock");
    assert_eq!(let_go(&mut conn, "ours", "WRITE"), 0);
    assert_eq!(reader.answer_within(AT_ONCE).text, "ok");
    assert_eq!(writer.ask("write k islocked"), "false");
    assert_eq!(writer.ask("write k trylock"), "false");
    reader.does("read k unlock");
    assert_eq!(let_go(&mut conn, "ours", "READ"), 0);
    assert_eq!(server.run("EXISTS k"), 0);
}

#[test]
fn a_java_writer_that_becomes_a_reader_lets_ours_in_within_seconds() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("write k lock");
    java.does("read k lock");
    let mut waiter = in_queue(&server, "waiting", "READ");
    let became_a_reader = Instant::now();
    java.does("write k unlock");
    // Redisson publishes nothing; we look at the key every second while it has waiters.
    waiter.read().held();
    let took = became_a_reader.elapsed();
    println!("a Java writer became a reader: our waiting reader came in after {took:?}");
    assert!(took < AT_ONCE, "{took:?}");
    take(&mut conn, "newcomer", "READ");
}

#[test]
fn java_reads_our_read_holds_as_its_own() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    let owner = java.id();
    let ask = |what: &str| java.ask(&format!("read k {what}"));
    assert_eq!(ask("islocked"), "false");
    take(&mut conn, &owner, "read");
    assert_eq!(ask("islocked"), "true");
    assert_eq!(ask("isheld"), "true");
    assert_eq!(ask("count"), "1");
    let ttl: u64 = ask("ttl").parse().unwrap();
    assert!((20_000..=30_000).contains(&ttl), "{ttl}");
    // It enters what we took in its name, and gives back both.
    java.does("read k lock");
    assert_eq!(ask("count"), "2");
    take(&mut conn, &owner, "read");
    assert_eq!(ask("count"), "3");
    for _ in 0..3 {
        java.does("read k unlock");
    }
    assert_eq!(ask("count"), "0");
    // Redisson notes for a moment that it has unlocked.
    until("nothing is left", || server.run("DBSIZE") == 0);
}

#[test]
fn java_sees_our_write_hold_in_its_name_and_cannot_count_it() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    let owner = java.id();
    let ask = |what: &str| java.ask(&format!("write k {what}"));
    assert_eq!(ask("islocked"), "false");
    take(&mut conn, &owner, "write");
    assert_eq!(ask("islocked"), "true");
    assert_eq!(ask("isheld"), "true");
    let ttl: u64 = ask("ttl").parse().unwrap();
    assert!((20_000..=30_000).contains(&ttl), "{ttl}");
    let field = server.run(format!("HGET k {owner}:write")).text();
    for what in ["count", "lock", "unlock"] {
        let refused = ask(what);
        assert!(refused.starts_with("error"), "{what}: {refused}");
        assert_eq!(server.run(format!("HGET k {owner}:write")), field);
    }
    assert_eq!(let_go(&mut conn, &owner, "write"), 0);
    assert_eq!(ask("islocked"), "false");
    until("nothing is left", || server.run("DBSIZE") == 0);
}

#[test]
fn we_read_and_release_a_java_hold() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    for (theirs, ours) in [("read", "READ"), ("write", "WRITE")] {
        java.does(&format!("{theirs} k lock"));
        java.does(&format!("{theirs} k lock"));
        let info = server.run("RLOCK.INFO k");
        let holder = &info.get("holders").array()[0];
        assert_eq!(holder.get("owner"), &java.id());
        assert_eq!(holder.get("count"), &2);
        assert_eq!(let_go(&mut conn, &java.id(), ours), 1);
        assert_eq!(let_go(&mut conn, &java.id(), ours), 0);
        has_lost(&java, theirs);
        assert_eq!(server.run("EXISTS k"), 0);
    }
}

#[test]
fn a_java_reader_that_leaves_does_not_shorten_our_hold() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (reader, writer, mut conn) = (redisson.owner(), redisson.owner(), server.connect());
    conn.run("RLOCK.ACQUIRE k ours 25000 READ").held();
    reader.does("read k lock");
    reader.does("read k unlock");
    let ttl = server.run("PTTL k").int();
    assert!((15_000..=25_000).contains(&ttl), "{ttl}");
    assert_eq!(conn.run("RLOCK.RENEW k ours 30000 READ"), 1);
    assert_eq!(writer.ask("write k trylock"), "false");
    assert_eq!(let_go(&mut conn, "ours", "READ"), 0);
    assert_eq!(writer.ask("write k trylock"), "true");
}

#[test]
fn a_reader_of_ours_that_leaves_does_not_end_javas_hold() {
    let server = Server::start();
    let redisson = Redisson::with_watchdog(&server, 6000 * MS);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("read k lock");
    take(&mut conn, "ours", "READ");
    assert_eq!(let_go(&mut conn, "ours", "READ"), 0);
    // For more than a lease its watchdog keeps our writer out.
    let ttl = conn
        .run("RLOCK.ACQUIRE k writer 30000 WRITE BLOCK 8000")
        .refused();
    assert!((1..=6000).contains(&ttl), "{ttl}");
    assert_eq!(java.ask("read k isheld"), "true");
    java.does("read k unlock");
    take(&mut conn, "writer", "WRITE");
}

#[test]
fn the_watchdog_of_a_java_writer_keeps_us_out() {
    let server = Server::start();
    let redisson = Redisson::with_watchdog(&server, 6000 * MS);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("write k lock");
    conn.run("RLOCK.ACQUIRE k ours 30000 READ BLOCK 8000")
        .refused();
    java.does("write k unlock");
    take(&mut conn, "ours", "READ");
}

#[test]
fn leases_of_java_that_run_out_are_our_waiters() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    for (theirs, ours) in [("read", "WRITE"), ("write", "READ")] {
        java.tell(&format!("{theirs} k lock 500"));
        let taken = java.answer();
        let mut waiter = server.connect();
        waiter
            .run(format!("RLOCK.ACQUIRE k ours 30000 {ours} BLOCK 0"))
            .held();
        let took = taken.began.elapsed();
        took_about(took, 500 * MS);
        has_lost(&java, theirs);
        assert_eq!(let_go(&mut waiter, "ours", ours), 0);
    }
}

#[test]
fn leases_of_ours_that_run_out_are_javas() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    for (ours, theirs) in [("READ", "write"), ("WRITE", "read")] {
        conn.run(format!("RLOCK.ACQUIRE k ours 500 {ours}")).held();
        java.tell(&format!("{theirs} k lock"));
        let answer = java.answer();
        assert_eq!(answer.text, "ok");
        let waited = answer.ended - answer.began;
        assert!(waited < 500 * MS + AT_ONCE, "{waited:?}");
        assert_eq!(
            conn.run(format!("RLOCK.RELEASE k ours {ours}")),
            Reply::Null
        );
        assert_eq!(conn.run(format!("RLOCK.RENEW k ours 30000 {ours}")), 0);
        java.does(&format!("{theirs} k unlock"));
    }
}

#[test]
fn a_java_reader_that_died_keeps_no_writer_of_ours_out() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    take(&mut conn, "ours", "READ");
    java.does("read k lock 500");
    until("its lease is over", || timeout_keys(&server).len() == 1);
    // Its field is still there, and counts for nothing.
    assert_eq!(server.run(format!("HEXISTS k {}", java.id())), 1);
    assert_eq!(holders(&server), [("ours".to_owned(), "read".to_owned())]);
    let mut writer = in_queue(&server, "writer", "WRITE");
    assert_eq!(let_go(&mut conn, "ours", "READ"), 0);
    writer.read_within(AT_ONCE).held();
    has_lost(&java, "read");
    assert_eq!(let_go(&mut writer, "writer", "WRITE"), 0);
}

#[test]
fn a_reader_of_ours_that_died_keeps_no_java_writer_out() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (reader, writer, mut conn) = (redisson.owner(), redisson.owner(), server.connect());
    reader.does("read k lock");
    conn.run("RLOCK.ACQUIRE k ours 300 READ").held();
    until("our lease is over", || timeout_keys(&server).len() == 1);
    writer.waits("write k lock");
    reader.does("read k unlock");
    assert_eq!(writer.answer_within(AT_ONCE).text, "ok");
}

/// Redisson's scripts look at the timeout keys 1 to n of each reader, and ours has the last alone.
#[test]
fn a_reader_of_ours_with_several_entries_outlasts_javas_renewals_and_releases() {
    let server = Server::start();
    let redisson = Redisson::with_watchdog(&server, 1500 * MS);
    let (reader, writer, mut conn) = (redisson.owner(), redisson.owner(), server.connect());
    for _ in 0..5 {
        take(&mut conn, "ours", "READ");
    }
    reader.does("read k lock");
    reader.does("read k lock");
    until("Redisson has renewed", || {
        server.run("PTTL k").int() <= 1500
    });
    assert_eq!(conn.run("RLOCK.RENEW k ours 60000 READ"), 1);
    reader.does("read k unlock");
    reader.does("read k unlock");
    assert!(
        server.run("PTTL k").int() > 1500,
        "the longest lease is ours"
    );
    assert_eq!(holders(&server), [("ours".to_owned(), "read".to_owned())]);
    writer.waits("write k lock");
    for left in (0..5).rev() {
        assert_eq!(let_go(&mut conn, "ours", "READ"), left);
    }
    assert_eq!(writer.answer_within(AT_ONCE).text, "ok");
}

#[test]
fn an_owner_that_reads_by_java_and_by_us_releases_what_it_entered_last_first() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    let id = java.id().clone();
    java.does("read k lock");
    take(&mut conn, &id, "READ");
    java.does("read k lock");
    assert_eq!(holders(&server), [(id.clone(), "read".to_owned())]);
    java.does("read k unlock");
    assert_eq!(let_go(&mut conn, &id, "READ"), 1);
    java.does("read k unlock");
    assert_eq!(server.run("EXISTS k"), 0);
    // The other way round Java takes our timeout key away, and the hold is over.
    java.does("read k lock");
    take(&mut conn, &id, "READ");
    java.does("read k unlock");
    assert_eq!(conn.run(format!("RLOCK.RENEW k {id} 30000 READ")), 0);
    assert_eq!(server.run("EXISTS k"), 0);
}

#[test]
fn a_dead_java_processs_readers_let_our_writer_in() {
    let server = Server::start();
    let watchdog = 4000 * MS;
    let redisson = Redisson::with_watchdog(&server, watchdog);
    redisson.owner().does("read k lock");
    redisson.owner().does("read k lock");
    let mut waiter = in_queue(&server, "ours", "WRITE");
    drop(redisson);
    let gone = Instant::now();
    waiter.read().held();
    assert!(gone.elapsed() < watchdog + AT_ONCE);
}

/// The warning of docs/redisson.md: beside Redisson a READ lease is at most its watchdog's.
#[test]
fn the_renewal_of_a_java_reader_cuts_a_longer_read_lease_of_ours() {
    let server = Server::start();
    let redisson = Redisson::with_watchdog(&server, 1500 * MS);
    let mut conn = server.connect();
    redisson.owner().does("read k lock");
    conn.run("RLOCK.ACQUIRE k ours 60000 READ").held();
    until("Redisson has renewed", || {
        server.run("PTTL k").int() <= 1500
    });
    drop(redisson);
    until("the hash is gone", || server.run("EXISTS k") == 0);
    // Versions before 4.4.0 cut our timeout key as well, a millisecond after the hash: their script
    // sets one TTL after the other.
    let is_left = Redisson::is_at_least((4, 4));
    until("only what Redisson does not cut is left", || {
        timeout_keys(&server).len() == usize::from(is_left)
    });
    assert_eq!(conn.run("RLOCK.RENEW k ours 60000 READ"), 0);
    take(&mut conn, "writer", "WRITE");
}

/// docs/redisson.md on older versions: they renew all readers, ours as well, and dead or not.
#[test]
fn since_4_4_a_java_reader_renews_none_but_its_own_process() {
    let server = Server::start();
    let redisson = Redisson::with_watchdog(&server, 6000 * MS);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("read k lock");
    conn.run("RLOCK.ACQUIRE k ours 3000 READ").held();
    // For more than two leases ours is not renewed.
    let write = "RLOCK.ACQUIRE k writer 30000 WRITE BLOCK 8000";
    conn.run(write).refused();
    let ours = ("ours".to_owned(), "read".to_owned());
    let is_over = Redisson::is_at_least((4, 4));
    assert_eq!(holders(&server).contains(&ours), !is_over);
    java.does("read k unlock");
}

#[test]
fn force_unlock_of_java_ends_our_holds_and_grants_our_next() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    for (mode, other) in [("read", "write"), ("write", "read")] {
        take(&mut conn, "ours", mode);
        let mut waiter = in_queue(&server, "next", "WRITE");
        assert_eq!(java.ask(&format!("{other} k force")), "false");
        assert_eq!(java.ask(&format!("{mode} k force")), "true");
        waiter.read_within(AT_ONCE).held();
        assert_eq!(
            conn.run(format!("RLOCK.RELEASE k ours {mode}")),
            Reply::Null
        );
        assert_eq!(let_go(&mut waiter, "next", "WRITE"), 0);
    }
}

#[test]
fn break_ends_the_holds_of_java_and_wakes_its_waiters() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (first, second, writer) = (redisson.owner(), redisson.owner(), redisson.owner());
    first.does("read k lock");
    second.does("read k lock");
    writer.waits("write k lock");
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    assert_eq!(writer.answer_within(AT_ONCE).text, "ok");
    assert!(timeout_keys(&server).is_empty());
    has_lost(&first, "read");
    has_lost(&second, "read");
    let reader = redisson.owner();
    reader.waits("read k lock");
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    assert_eq!(reader.answer_within(AT_ONCE).text, "ok");
    has_lost(&writer, "write");
}

#[test]
fn the_two_kinds_of_lock_keep_out_of_each_others_way() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("read k lock");
    let plain = conn.run("RLOCK.ACQUIRE k ours 30000").error();
    assert!(plain.starts_with("WRONGKIND"), "{plain}");
    java.does("read k unlock");
    take(&mut conn, "ours", "WRITE");
    assert_eq!(java.ask("lock k trylock"), "false");
    assert_eq!(let_go(&mut conn, "ours", "WRITE"), 0);
    java.does("lock k lock");
    let read = conn.run("RLOCK.ACQUIRE k ours 30000 READ").error();
    assert!(read.starts_with("WRONGKIND"), "{read}");
    java.does("lock k unlock");
    take(&mut conn, "ours", "READ");
}

#[test]
fn a_session_that_ends_lets_java_writers_in() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    for mode in ["READ", "WRITE"] {
        let session_connection = server.session_connection("s");
        let acquire = format!("RLOCK.ACQUIRE k ours 30000 {mode} SESSION s");
        conn.run(acquire).held();
        java.waits("write k lock");
        session_connection.close();
        assert_eq!(java.answer_within(AT_ONCE).text, "ok");
        java.does("write k unlock");
    }
}
