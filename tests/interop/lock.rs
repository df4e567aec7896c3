//! Redisson's `RLock` and ours on the same names.

use std::thread;
use std::time::{Duration, Instant};

use rlock_client::{Client, ErrorKind, LostReason};
use rlock_tests::{Server, patience, until};
use tokio::time::timeout;

use crate::java::Redisson;
use crate::measure::{AT_ONCE, WakeUps, took_about};
use crate::rounds;

const MS: Duration = Duration::from_millis(1);
const NOT_THE_OWNER: &str = "error IllegalMonitorStateException";

async fn client(server: &Server) -> Client {
    let url = format!("redis://{}", server.address());
    rounds::calm().connect(&url).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_loses_no_update_however_java_and_rust_contend() {
    const ROUNDS: u32 = 400;
    let server = Server::start();
    let clients = [Redisson::of(&server), Redisson::of(&server)];
    let owners: Vec<_> = clients
        .iter()
        .flat_map(|c| [c.owner(), c.owner()])
        .collect();
    for owner in &owners {
        owner.tell(&format!("lock k rounds {ROUNDS} 1000"));
    }
    let ours = client(&server).await;
    let tasks: Vec<_> = (0..2)
        .map(|_| {
            let (client, conn) = (ours.clone(), server.connect());
            tokio::spawn(rounds::of_the_crate(client, conn, "k".to_owned(), ROUNDS))
        })
        .collect();
    thread::scope(|scope| {
        for owner in ["plain-1", "plain-2"] {
            let server = &server;
            scope.spawn(move || rounds::play(server, "k", owner, "", ROUNDS));
        }
    });
    for task in tasks {
        task.await.unwrap();
    }
    for owner in &owners {
        let deadline = Duration::from_secs(60);
        assert_eq!(owner.answer_within(deadline).text, ROUNDS.to_string());
    }
    ours.shutdown().await;
    rounds::check(&server, "k", ROUNDS * 8, 200);
}

#[test]
fn a_java_waiter_wakes_when_we_release() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (waiter, mut conn) = (redisson.owner(), server.connect());
    let mut wake_ups = WakeUps::of("RELEASE wakes Redisson's lock()", &[&server]);
    for _ in 0..50 {
        conn.take("k", "ours");
        waiter.waits("lock k lock");
        let freed = Instant::now();
        assert_eq!(conn.let_go("k", "ours"), 0);
        let answer = waiter.answer();
        assert_eq!(answer.text, "ok");
        wake_ups.add(freed, answer.ended);
        waiter.does("lock k unlock");
    }
    wake_ups.check();
}

#[test]
fn our_waiter_wakes_when_java_unlocks() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let holder = redisson.owner();
    let mut wake_ups = WakeUps::of("Redisson's unlock() wakes ACQUIRE … BLOCK", &[&server]);
    for _ in 0..50 {
        holder.does("lock k lock");
        let mut waiter = server.wait_in_queue("k", "ours");
        holder.tell("lock k unlock");
        waiter.read().held();
        let woken = Instant::now();
        let answer = holder.answer();
        assert_eq!(answer.text, "ok");
        wake_ups.add(answer.began, woken);
        assert_eq!(waiter.let_go("k", "ours"), 0);
    }
    wake_ups.check();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_and_java_wake_each_other() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, ours) = (redisson.owner(), client(&server).await);
    let mut java_wakes = WakeUps::of("Guard::unlock() wakes Redisson's lock()", &[&server]);
    let mut we_wake = WakeUps::of("Redisson's unlock() wakes Lock::lock()", &[&server]);
    let mut guard = ours.lock("k").lock().await.unwrap();
    for _ in 0..50 {
        java.waits("lock k lock");
        let freed = Instant::now();
        guard.unlock().await.unwrap();
        let answer = java.answer();
        assert_eq!(answer.text, "ok");
        java_wakes.add(freed, answer.ended);

        let lock = ours.lock("k");
        let waiting = tokio::spawn(async move { (lock.lock().await, Instant::now()) });
        until("ours waits", || server.waiting_owners("k").len() == 1);
        java.tell("lock k unlock");
        let (granted, woken) = waiting.await.unwrap();
        guard = granted.unwrap();
        let answer = java.answer();
        assert_eq!(answer.text, "ok");
        we_wake.add(answer.began, woken);
    }
    guard.unlock().await.unwrap();
    java_wakes.check();
    we_wake.check();
}

#[test]
fn java_waiters_behind_ours_wake_when_the_last_of_ours_releases() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let waiters = [redisson.owner(), redisson.owner()];
    let mut first = server.connect();
    first.take("k", "first");
    let mut second = server.wait_in_queue("k", "second");
    for waiter in &waiters {
        waiter.waits("lock k lock");
    }
    // Handed over: Java gets the message, finds the lock taken, and sleeps again.
    assert_eq!(first.let_go("k", "first"), 0);
    second.read().held();
    for waiter in &waiters {
        waiter.sleeps();
        waiter.has_not_answered();
    }
    let freed = Instant::now();
    assert_eq!(second.let_go("k", "second"), 0);
    until("one of them has it", || server.holder("k").is_some());
    assert!(freed.elapsed() < AT_ONCE);
}

#[test]
fn a_java_owner_re_enters_and_we_see_how_often() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    java.does("lock k lock");
    java.does("lock k lock");
    let info = server.run("RLOCK.INFO k");
    assert_eq!(info.get("owner"), &java.id());
    assert_eq!(info.get("count"), &2);
    assert!(java.id().starts_with(redisson.uuid()));
    let mut waiter = server.wait_in_queue("k", "ours");
    java.does("lock k unlock");
    assert_eq!(java.ask("lock k count"), "1");
    waiter.expect_nothing_yet();
    java.does("lock k unlock");
    waiter.read().held();
}

#[test]
fn we_re_enter_and_java_waits_for_the_last_release() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.take("k", "ours");
    assert_eq!(conn.run("RLOCK.ACQUIRE k ours 30000").held().0, 2);
    java.waits("lock k lock");
    assert_eq!(conn.let_go("k", "ours"), 1);
    java.sleeps();
    java.has_not_answered();
    assert_eq!(server.holder("k").as_deref(), Some("ours"));
    assert_eq!(conn.let_go("k", "ours"), 0);
    let answer = java.answer_within(AT_ONCE);
    assert_eq!(answer.text, "ok");
}

#[test]
fn java_reads_a_lock_that_we_hold_as_one_of_its_own() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    assert_eq!(java.ask("lock k islocked"), "false");
    assert_eq!(java.ask("lock k ttl"), "-2");
    let owner = format!("{}:4711", redisson.uuid());
    conn.take("k", &owner);
    assert_eq!(java.ask("lock k islocked"), "true");
    assert_eq!(java.ask("lock k isheld"), "false");
    assert_eq!(java.ask("lock k heldby 4711"), "true");
    assert_eq!(java.ask("lock k heldby 4712"), "false");
    assert_eq!(java.ask("lock k count"), "0");
    let ttl: u64 = java.ask("lock k ttl").parse().unwrap();
    assert!((20_000..=30_000).contains(&ttl), "{ttl}");
    assert_eq!(java.ask("lock k trylock"), "false");
    let refused = java.ask("lock k unlock");
    assert!(refused.starts_with(NOT_THE_OWNER), "{refused}");
    assert_eq!(conn.let_go("k", &owner), 0);
    assert_eq!(java.ask("lock k islocked"), "false");
}

#[test]
fn a_java_thread_enters_and_gives_back_what_we_took_in_its_name() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    let owner = java.id();
    let token = conn.take("k", &owner);
    assert_eq!(java.ask("lock k isheld"), "true");
    assert_eq!(java.ask("lock k count"), "1");
    java.does("lock k lock");
    assert_eq!(java.ask("lock k count"), "2");
    // `fence` stands beside the count, and nothing of Redisson's has touched it.
    let held = conn.run(format!("RLOCK.ACQUIRE k {owner} 30000 ONCE"));
    assert_eq!(held.held(), (2, token));
    java.does("lock k unlock");
    java.does("lock k unlock");
    assert_eq!(server.run("EXISTS k"), 0);
    // And the other way round.
    java.does("lock k lock");
    assert_eq!(conn.let_go("k", &owner), 0);
    let refused = java.ask("lock k unlock");
    assert!(refused.starts_with(NOT_THE_OWNER), "{refused}");
}

#[test]
fn try_lock_of_java_keeps_to_its_wait_and_its_lease() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.take("k", "ours");
    java.tell("lock k trylock 300 5000");
    let answer = java.answer();
    assert_eq!(answer.text, "false");
    let waited = answer.ended - answer.began;
    took_about(waited, 300 * MS);

    java.waits("lock k trylock 15000 15000");
    assert_eq!(conn.let_go("k", "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "true");
    let ttl = conn.run("RLOCK.ACQUIRE k ours 30000").refused();
    assert!((1..=15_000).contains(&ttl), "{ttl}");
    java.does("lock k unlock");
}

#[test]
fn the_watchdog_of_java_keeps_us_out() {
    let server = Server::start();
    let redisson = Redisson::with_watchdog(&server, 6000 * MS);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("lock k lock");
    // More than a lease long.
    let ttl = conn.run("RLOCK.ACQUIRE k ours 30000 BLOCK 8000").refused();
    assert!((1..=6000).contains(&ttl), "{ttl}");
    java.does("lock k unlock");
    conn.take("k", "ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_watchdog_keeps_java_out() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let builder = rounds::calm().lease(6000 * MS).renew_every(500 * MS);
    let url = format!("redis://{}", server.address());
    let ours = builder.connect(&url).await.unwrap();
    let guard = ours.lock("k").lock().await.unwrap();
    let java = redisson.owner();
    assert_eq!(java.ask("lock k trylock 8000 5000"), "false");
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    assert_eq!(java.ask("lock k trylock"), "true");
}

#[test]
fn a_lease_of_java_that_runs_out_is_our_waiters() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    java.tell("lock k lock 400");
    let taken = java.answer();
    let mut waiter = server.connect();
    waiter.run("RLOCK.ACQUIRE k ours 30000 BLOCK 0").held();
    let took = taken.began.elapsed();
    took_about(took, 400 * MS);
    let refused = java.ask("lock k unlock");
    assert!(refused.starts_with(NOT_THE_OWNER), "{refused}");
    assert_eq!(waiter.let_go("k", "ours"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_ours_that_runs_out_is_javas() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, ours) = (redisson.owner(), client(&server).await);
    let guard = ours.lock("k").lease(400 * MS).lock().await.unwrap();
    java.tell("lock k lock");
    let answer = java.answer();
    assert_eq!(answer.text, "ok");
    let waited = answer.ended - answer.began;
    assert!(waited < 400 * MS + AT_ONCE, "{waited:?}");
    let reason = timeout(patience(AT_ONCE), guard.lost()).await;
    assert_eq!(reason.expect("word of it"), LostReason::Expired);
    assert!(matches!(guard.unlock().await, Err(e) if e.kind() == ErrorKind::Lost));
    assert_eq!(java.ask("lock k isheld"), "true");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn force_unlock_of_java_tells_our_guard_and_grants_our_next() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, ours) = (redisson.owner(), client(&server).await);
    let guard = ours.lock("k").lock().await.unwrap();
    let mut waiter = server.wait_in_queue("k", "next");
    let forced = Instant::now();
    assert_eq!(java.ask("lock k force"), "true");
    waiter.read().held();
    let reason = timeout(patience(AT_ONCE), guard.lost()).await;
    assert_eq!(reason.expect("word of it"), LostReason::Deleted);
    assert!(forced.elapsed() < AT_ONCE);
    assert!(guard.is_lost());
    assert_eq!(server.holder("k").as_deref(), Some("next"));
}

#[test]
fn break_wakes_java_and_what_it_broke_cannot_be_unlocked() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (holder, waiter) = (redisson.owner(), redisson.owner());
    holder.does("lock k lock");
    waiter.waits("lock k lock");
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    assert_eq!(waiter.answer_within(AT_ONCE).text, "ok");
    let refused = holder.ask("lock k unlock");
    assert!(refused.starts_with(NOT_THE_OWNER), "{refused}");
    waiter.does("lock k unlock");
}

#[test]
fn a_dead_java_processs_lock_is_ours_when_its_lease_is_over() {
    let server = Server::start();
    let watchdog = 4000 * MS;
    let redisson = Redisson::with_watchdog(&server, watchdog);
    redisson.owner().does("lock k lock");
    let mut waiter = server.wait_in_queue("k", "ours");
    drop(redisson);
    let gone = Instant::now();
    waiter.read().held();
    assert!(gone.elapsed() < watchdog + AT_ONCE);
}

#[test]
fn the_end_of_our_session_wakes_java() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    let session_connection = server.session_connection("s");
    server.connect().take_for("k", "ours", "s");
    java.waits("lock k lock");
    session_connection.close();
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
}
