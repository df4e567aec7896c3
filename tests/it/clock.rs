//! The wall clock of a server is set, forwards or back, while locks are held and waited for.

use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::Server;

const AN_HOUR: i64 = 3600;

#[test]
fn a_wait_ends_in_time_though_the_clock_was_set_back() {
    let server = Server::builder().settable_clock().start();
    server.connect().take("k", "alice");
    let mut waiting = server.connect();
    let since = Instant::now();
    waiting.send("RLOCK.ACQUIRE k bob 30000 BLOCK 3000");
    server.step_clock(-AN_HOUR);
    // The rest of Alice's lease is an hour longer now; the wait is not.
    let left = waiting.read().refused();
    let waited = since.elapsed();
    assert!(left > 30_000, "{left}");
    // The server counts whole milliseconds, and began within one.
    assert!(waited >= Duration::from_millis(2999), "{waited:?}");
}

#[test]
fn an_overwritten_lock_is_noticed_though_the_clock_was_set_back() {
    let server = Server::builder().settable_clock().start();
    server.connect().take("k", "alice");
    let mut waiting = server.wait_in_queue("k", "bob");
    server.step_clock(-AN_HOUR);
    server.run("SET k text");
    assert!(waiting.read().error().starts_with("WRONGTYPE "));
}

#[test]
fn a_clock_that_goes_forward_ends_leases_and_hands_over() {
    let server = Server::builder().settable_clock().start();
    let former = server.connect().take("k", "alice");
    let mut waiting = server.wait_in_queue("k", "bob");
    server.step_clock(AN_HOUR);
    let (count, token) = waiting.read().held();
    assert_eq!(count, 1);
    assert!(token > former);
}

/// As guarantees.md says: their fields stay until a grant finds many of them.
#[test]
fn permits_that_a_clock_which_was_ahead_had_ended_are_held_again_until_they_are_broken() {
    let server = Server::builder().settable_clock().start();
    let mut conn = server.connect();
    let take = |owner: &str, lease: i64| format!("RLOCK.ACQUIRE k {owner} {lease} PERMITS 1 OF 2");
    let day = 24 * AN_HOUR * 1000;
    conn.run(take("alice", 30_000)).held();
    conn.run(take("bob", day)).held();
    server.step_clock(AN_HOUR);
    conn.run(take("carol", day)).held();
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 PERMITS"), 0);
    server.step_clock(0);
    assert_eq!(conn.run("RLOCK.INFO k").get("permits").int(), 3);
    conn.run(take("dave", 30_000)).refused();
    assert_eq!(conn.run("RLOCK.BREAK k"), 1);
    conn.run(take("dave", 30_000)).held();
}

#[test]
fn tokens_grow_whatever_the_clock_does() {
    let server = Server::builder().settable_clock().start();
    let mut conn = server.connect();
    let mut last = conn.take("k", "alice");
    for seconds in [AN_HOUR, -AN_HOUR, 0, -24 * AN_HOUR, 5] {
        server.step_clock(seconds);
        conn.run("RLOCK.BREAK k");
        let token = conn.take("k", "alice");
        assert!(
            token > last,
            "{token} after {last}, the clock at {seconds:+}"
        );
        last = token;
    }
}

#[test]
fn a_wait_begun_while_the_clock_was_wrong_ends_in_time() {
    // The server looks after itself once a second only: it never sees the wrong time.
    let builder = Server::builder().settable_clock();
    let server = builder.config("hz 1").config("dynamic-hz no").start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 100000000").held();
    let _first = server.wait_in_queue("k", "first");
    server.step_clock(AN_HOUR);
    conn.send("RLOCK.ACQUIRE k bob 30000 BLOCK 500");
    conn.settle();
    server.step_clock(0);
    conn.read().refused();
}

/// The server looks at the clock once and fires every timer that is due by then: one that is armed
/// while it does, by a clock that was set back meanwhile, is due too, and the next one as well.
#[test]
fn a_clock_set_back_while_the_timer_fires_does_not_keep_the_server_busy() {
    let server = Server::builder().settable_clock().start();
    let (mut conn, mut session_connection) = (server.connect(), server.connect());
    conn.run("RLOCK.ACQUIRE k alice 100000000").held();
    session_connection.run("RLOCK.EVENTS s");
    // With it something is always due.
    let _first = server.wait_in_queue("k", "first");
    for round in 0..6 {
        server.step_clock(AN_HOUR);
        let wait =
            |number| format!("RLOCK.ACQUIRE k waiter:{round}:{number} 30000 QUEUE 500 SESSION s");
        let waits: Vec<_> = (0..3000).map(wait).collect();
        conn.send_all(&waits);
        for _ in &waits {
            conn.read().array();
        }
        // All of them end at once, for which the timer needs a while: in one round or another it
        // is at work when the clock is set.
        server.freeze();
        thread::sleep(Duration::from_millis(500));
        server.thaw();
        thread::sleep(Duration::from_millis(2 << round));
        server.step_clock(0);
    }
    conn.run("RLOCK.ACQUIRE k bob 30000 BLOCK 500").refused();
}
