//! Redisson's fair, fenced and spin locks on a name that we lock too.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rlock_tests::{Conn, Reply, Server};

use crate::java::{Owner, Redisson};
use crate::measure::{A_WHILE, AT_ONCE, WakeUps};

#[test]
fn a_fenced_lock_and_ours_exclude_and_wake_each_other() {
    exclude_and_wake_each_other("fenced");
}

#[test]
fn a_lock_that_is_not_re_entrant_and_ours_exclude_and_wake_each_other() {
    if !Redisson::is_at_least((4, 4)) {
        return; // it has none
    }
    exclude_and_wake_each_other("once");
}

#[test]
fn a_fair_lock_and_ours_exclude_and_wake_each_other() {
    exclude_and_wake_each_other("fair");
}

#[track_caller]
fn exclude_and_wake_each_other(kind: &str) {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.take("k", "ours");
    assert_eq!(java.ask(&format!("{kind} k trylock")), "false");
    java.waits(&format!("{kind} k lock"));
    assert_eq!(conn.let_go("k", "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
    conn.run("RLOCK.ACQUIRE k ours 30000").refused();
    let mut waiter = server.wait_in_queue("k", "ours");
    java.does(&format!("{kind} k unlock"));
    waiter.read_within(AT_ONCE).held();
    assert_eq!(java.ask(&format!("{kind} k trylock")), "false");
    assert_eq!(waiter.let_go("k", "ours"), 0);
    assert_eq!(java.ask(&format!("{kind} k trylock")), "true");
}

#[test]
fn a_spin_lock_and_ours_exclude_each_other() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.take("k", "ours");
    assert_eq!(java.ask("spin k trylock"), "false");
    // It is told nothing, and finds out by asking again and again.
    java.tell("spin k lock");
    assert_eq!(conn.let_go("k", "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
    // It tells nothing either; the deleted key does.
    let mut waiter = server.wait_in_queue("k", "ours");
    java.does("spin k unlock");
    waiter.read_within(AT_ONCE).held();
}

#[test]
fn the_two_kinds_of_fencing_token_do_not_disturb_each_other() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("fenced k lock");
    assert_eq!(java.ask("fenced k token"), "1");
    assert_eq!(server.run("RLOCK.INFO k").get("token"), &Reply::Null);
    java.does("fenced k unlock");
    let first = conn.take("k", "ours");
    assert_eq!(java.ask("fenced k token"), "1");
    assert_eq!(conn.let_go("k", "ours"), 0);
    java.does("fenced k lock");
    assert_eq!(java.ask("fenced k token"), "2");
    java.does("fenced k unlock");
    assert!(conn.take("k", "ours") > first);
}

#[test]
fn a_multi_lock_is_made_of_locks_like_ours() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.take("b", "ours");
    assert_eq!(java.ask("multi a,b trylock"), "false");
    assert_eq!(server.holder("a"), None);
    java.waits("multi a,b lock");
    assert_eq!(conn.let_go("b", "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
    let mut waiters = ["a", "b"].map(|name| server.wait_in_queue(name, "ours"));
    java.does("multi a,b unlock");
    for waiter in &mut waiters {
        waiter.read_within(AT_ONCE).held();
    }
}

/// Redisson's owners in the queue of its fair lock, next one first.
fn fair_queue(conn: &mut Conn) -> Vec<String> {
    conn.run("LRANGE redisson_lock_queue:{k} 0 -1").texts()
}

/// Puts one after the other in the queue.
fn queue_up(server: &Server, owners: &[Owner]) -> Vec<String> {
    let ids: Vec<_> = owners.iter().map(Owner::id).collect();
    for owner in owners {
        owner.waits("fair k lock");
    }
    assert_eq!(fair_queue(&mut server.connect()), ids);
    ids
}

#[test]
fn fair_head_wakes_on_our_release() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    let mut wake_ups = WakeUps::of(
        "RELEASE wakes the head of Redisson's fair queue",
        &[&server],
    );
    for _ in 0..20 {
        conn.take("k", "ours");
        java.waits("fair k lock");
        let freed = Instant::now();
        assert_eq!(conn.let_go("k", "ours"), 0);
        let answer = java.answer();
        assert_eq!(answer.text, "ok");
        wake_ups.add(freed, answer.ended);
        java.does("fair k unlock");
    }
    wake_ups.check();
}

#[test]
fn waiters_of_every_lock_wake_when_we_release_several() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let waiters = ["lock a lock", "fair b lock", "multi c,d lock"];
    let waiters = waiters.map(|words| (redisson.owner(), words));
    let mut conn = server.connect();
    conn.run("RLOCK.MACQUIRE ours 30000 4 a b c d").held();
    for (waiter, words) in &waiters {
        waiter.waits(words);
    }
    assert_eq!(conn.run("RLOCK.MRELEASE ours 4 a b c d"), 4);
    for (waiter, _) in &waiters {
        assert_eq!(waiter.answer_within(AT_ONCE).text, "ok");
    }
    // All or none, beside Redisson too.
    let ttl = conn.run("RLOCK.MACQUIRE ours 30000 2 e a").refused();
    assert!((20_000..=30_000).contains(&ttl), "{ttl}");
    assert_eq!(server.holder("e"), None);
}

#[test]
fn fair_waiters_keep_their_order_behind_us() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let mut conn = server.connect();
    conn.take("k", "ours");
    let waiters = [redisson.owner(), redisson.owner(), redisson.owner()];
    let ids = queue_up(&server, &waiters);
    let freed = Instant::now();
    assert_eq!(conn.let_go("k", "ours"), 0);
    for (waiter, id) in waiters.iter().zip(ids) {
        assert_eq!(waiter.answer_within(AT_ONCE).text, "ok");
        assert_eq!(server.holder("k"), Some(id));
        waiter.does("fair k unlock");
    }
    assert!(freed.elapsed() < AT_ONCE);
    assert!(fair_queue(&mut conn).is_empty());
}

#[test]
fn fair_head_wakes_on_break_and_on_the_end_of_a_session() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    server.connect().take("k", "ours");
    java.waits("fair k lock");
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
    java.does("fair k unlock");

    let session_connection = server.session_connection("s");
    server.connect().take_for("k", "ours", "s");
    java.waits("fair k lock");
    session_connection.close();
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
}

#[test]
fn the_first_living_fair_waiter_wakes_behind_a_dead_head() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.take("k", "ours");
    java.waits("fair k lock");
    // Redisson holds a waiter for dead when its time, by the wall clock, has passed.
    let passed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_millis()
        - 1000;
    assert_eq!(
        conn.run(format!("ZADD redisson_lock_timeout:{{k}} {passed} dead:1")),
        1
    );
    assert_eq!(conn.run("LPUSH redisson_lock_queue:{k} dead:1"), 2);
    assert_eq!(conn.let_go("k", "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
    assert!(fair_queue(&mut conn).is_empty());
}

#[test]
fn our_queue_goes_before_redissons_fair_queue() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut first) = (redisson.owner(), server.connect());
    first.take("k", "first");
    java.waits("fair k lock");
    let mut second = server.wait_in_queue("k", "second");
    // The queue is Redisson's own, and a hand-over leaves no free moment.
    assert_eq!(first.let_go("k", "first"), 0);
    second.read().held();
    java.sleeps();
    java.has_not_answered();
    assert_eq!(second.let_go("k", "second"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
}

/// Redisson's own, without us: what docs/redisson.md says of its fair lock.
#[test]
fn a_waiter_that_died_at_the_head_of_redissons_fair_queue_leaves_the_lock_idle() {
    let server = Server::start();
    let (living, dying) = (Redisson::of(&server), Redisson::of(&server));
    let (holder, next) = (living.owner(), living.owner());
    holder.does("fair k lock");
    dying.owner().waits("fair k lock");
    next.waits("fair k lock");
    drop(dying);
    holder.does("fair k unlock");
    // Its deadline is five minutes away. We are not bound by the queue.
    next.has_not_answered_within(2 * A_WHILE);
    assert_eq!(server.run("EXISTS k"), 0);
    let mut conn = server.connect();
    conn.take("k", "ours");
    assert_eq!(conn.let_go("k", "ours"), 0);
    // Nor is Redisson's own plain lock.
    assert_eq!(holder.ask("lock k trylock"), "true");
}

#[test]
fn whatever_stands_where_redisson_keeps_its_queue_does_no_harm() {
    let server = Server::start();
    let mut conn = server.connect();
    let nonsense = [
        "SET redisson_lock_queue:{k} v",
        "HSET redisson_lock_queue:{k} f v",
        "RPUSH redisson_lock_queue:{k} a b",
        "XADD redisson_lock_queue:{k} * f v",
    ];
    let timeouts = [
        "SET redisson_lock_timeout:{k} v",
        "ZADD redisson_lock_timeout:{k} -inf a inf b",
    ];
    for queue in nonsense {
        for timeouts in timeouts {
            conn.run("FLUSHALL");
            conn.run(queue);
            conn.run(timeouts);
            conn.take("k", "ours");
            assert_eq!(conn.let_go("k", "ours"), 0, "{queue}, {timeouts}");
        }
    }
}
