//! `rlock.grant-delay-ms`: after a start the server makes no new grant for a while, and loaded
//! holds go on.

use std::time::{Duration, Instant};

use rlock_tests::{Conn, Pair, Server, in_sync, module_path, until};

use super::client::{client, soon};

const AN_HOUR: i64 = 3600;

/// A delay that does not end by itself while a test runs.
const LONG_MS: i64 = 600_000;

/// A server that has just started and grants nothing for so long.
fn started(delay_ms: i64) -> Server {
    let delay = format!("rlock.grant-delay-ms {delay_ms}");
    Server::builder().config(&delay).start()
}

/// One that keeps its data, was filled, died and has started again, and grants nothing.
fn restarted(fill: impl FnOnce(&mut Conn)) -> Server {
    let mut server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always")
        .config(&format!("rlock.grant-delay-ms {LONG_MS}"))
        .start();
    end_delay(&server);
    fill(&mut server.connect());
    server.kill();
    server.restart();
    assert!(left_ms(&server) > 0);
    server
}

#[track_caller]
fn end_delay(server: &Server) {
    assert_eq!(server.run("CONFIG SET rlock.grant-delay-ms 0"), "OK");
}

/// Of a server with the long delay: it ends by itself after so much more.
#[track_caller]
fn end_delay_after(server: &Server, ms: i64) {
    let since_start = LONG_MS - left_ms(server);
    let delay = format!("CONFIG SET rlock.grant-delay-ms {}", since_start + ms);
    assert_eq!(server.run(delay), "OK");
}

fn left_ms(server: &Server) -> i64 {
    server.info_number("rlock_grant_delay_left_ms")
}

/// Every way to ask for a lock.
const ASKS: [&str; 4] = [
    "RLOCK.ACQUIRE plain{t} alice 30000",
    "RLOCK.ACQUIRE read{t} alice 30000 READ",
    "RLOCK.ACQUIRE write{t} alice 30000 WRITE",
    "RLOCK.MACQUIRE alice 30000 2 one{t} two{t}",
];

#[test]
fn in_the_delay_every_kind_is_refused_with_what_is_left_of_it() {
    let server = started(LONG_MS);
    let mut conn = server.connect();
    let mut before = left_ms(&server);
    assert!(before <= LONG_MS);
    for ask in ASKS {
        let refused = conn.run(ask).refused();
        assert!((1..=before).contains(&refused), "{ask}: {refused}");
        before = refused;
    }
    // Also where nobody can wait.
    let script = "return redis.call('RLOCK.ACQUIRE', KEYS[1], 'alice', 30000, 'BLOCK', 0)";
    let refused = conn.cmd(&["EVAL", script, "1", "k"]).refused();
    assert!((1..=before).contains(&refused), "{refused}");
    assert_eq!(conn.run("DBSIZE"), 0);
    assert_eq!(server.info_number("rlock_grants"), 0);
    end_delay(&server);
    assert_eq!(left_ms(&server), 0);
    for ask in ASKS {
        conn.run(ask).held();
    }
}

#[test]
fn without_the_option_there_is_no_delay() {
    let server = Server::start();
    assert_eq!(left_ms(&server), 0);
    server.connect().take("k", "alice");
}

#[test]
fn those_who_wait_are_granted_in_order_when_it_ends() {
    let server = started(LONG_MS);
    let mut waits = [
        server.blocked_in("RLOCK.ACQUIRE k alice 30000 BLOCK 0"),
        server.blocked_in("RLOCK.ACQUIRE k bob 30000 BLOCK 0"),
    ];
    let mut reads: Vec<Conn> = ["alice", "bob"]
        .map(|owner| server.blocked_in(&format!("RLOCK.ACQUIRE r {owner} 30000 READ BLOCK 0")))
        .into();
    let mut several = server.blocked_in("RLOCK.MACQUIRE alice 30000 2 one two BLOCK 0");
    let mut session = server.session_connection("s");
    assert_eq!(session.queue("q", "alice", "s"), 1);
    session.send("RLOCK.EVENTS s BLOCK 0");
    let before = Instant::now();
    end_delay_after(&server, 1000);
    for conn in waits.iter_mut().take(1).chain(&mut reads) {
        conn.read().held();
    }
    assert!(before.elapsed() >= Duration::from_millis(990));
    several.read().held();
    session.read().granted("q", "alice");
    waits[1].expect_nothing_yet();
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    server.connect().let_go("k", "alice");
    waits[1].read().held();
}

#[test]
fn config_set_zero_grants_the_waiting_at_once() {
    let server = started(LONG_MS);
    let mut each: Vec<Conn> = ASKS
        .map(|ask| server.blocked_in(&format!("{ask} BLOCK 0")))
        .into();
    let mut second = server.wait_in_queue("plain{t}", "bob");
    end_delay(&server);
    for conn in &mut each {
        conn.read_promptly().held();
    }
    second.expect_nothing_yet();
}

#[test]
fn a_later_caller_does_not_overtake_those_who_waited_for_the_end() {
    let server = started(LONG_MS);
    let mut bob = server.wait_in_queue("k", "bob");
    // One batch: the timer does not fire between the two.
    let end = [
        "CONFIG SET rlock.grant-delay-ms 0",
        "RLOCK.ACQUIRE k carol 30000",
    ];
    let replies = server.connect().pipeline(&end);
    assert!(replies[1].refused() > 20_000, "the lease is bob's");
    bob.read().held();
}

#[test]
fn a_changed_delay_counts_from_the_start() {
    let server = started(LONG_MS);
    let mut conn = server.connect();
    conn.run(format!("CONFIG SET rlock.grant-delay-ms {}", LONG_MS / 2));
    let left = left_ms(&server);
    assert!((1..=LONG_MS / 2).contains(&left), "{left}");
    conn.run(format!("CONFIG SET rlock.grant-delay-ms {LONG_MS}"));
    assert!(conn.run("RLOCK.ACQUIRE k alice 30000").refused() > LONG_MS / 2);
    // The longest delay, with a waiter for its end.
    conn.run("CONFIG SET rlock.grant-delay-ms 9007199254740991");
    let refused = conn.run("RLOCK.ACQUIRE k alice 9 BLOCK 5").refused();
    assert!(refused > 9_000_000_000_000_000, "{refused}");
    // One that is over by now ends it.
    until("the server is older than that", || {
        conn.run("CONFIG SET rlock.grant-delay-ms 500");
        left_ms(&server) == 0
    });
    conn.take("k", "alice");
}

#[test]
fn loaded_holds_are_entered_renewed_and_released() {
    let server = restarted(|conn| {
        for ask in ASKS {
            conn.run(ask).held();
        }
    });
    let mut alice = server.connect();
    for ask in ASKS {
        assert_eq!(alice.run(ask).held().0, 2, "{ask}");
    }
    for renew in [
        "RLOCK.RENEW plain{t} alice 30000",
        "RLOCK.RENEW read{t} alice 30000 READ",
        "RLOCK.RENEW write{t} alice 30000 WRITE",
    ] {
        assert_eq!(alice.run(renew), 1, "{renew}");
    }
    assert_eq!(alice.run("RLOCK.MRENEW alice 30000 2 one{t} two{t}"), 2);
    // A writer may read as well.
    alice.run("RLOCK.ACQUIRE write{t} alice 30000 READ").held();
    for left in [1, 0] {
        assert_eq!(alice.run("RLOCK.RELEASE plain{t} alice"), left);
        assert_eq!(alice.run("RLOCK.RELEASE read{t} alice READ"), left);
        assert_eq!(alice.run("RLOCK.RELEASE write{t} alice WRITE"), left);
        assert_eq!(alice.run("RLOCK.MRELEASE alice 2 one{t} two{t}"), 2);
    }
    // A lock that is given back is not granted again.
    assert!(alice.run(ASKS[0]).refused() > 0);
    // All but one are held, so several are not.
    assert!(alice.run("RLOCK.MACQUIRE alice 30000 1 one{t}").refused() > 0);
}

#[test]
fn what_is_released_or_broken_in_the_delay_is_handed_over_at_its_end() {
    let server = restarted(|conn| {
        for ask in ASKS {
            conn.run(ask).held();
        }
    });
    let mut waits: Vec<Conn> = ASKS
        .map(|ask| server.blocked_in(&format!("{} BLOCK 0", ask.replace("alice", "bob"))))
        .into();
    let mut alice = server.connect();
    alice.let_go("plain{t}", "alice");
    alice.run("RLOCK.BREAK read{t}");
    alice.run("DEL write{t}");
    alice.run("RLOCK.MRELEASE alice 2 one{t} two{t}");
    for conn in &mut waits {
        conn.expect_nothing_yet();
    }
    assert_eq!(
        alice.run("EXISTS plain{t} read{t} write{t} one{t} two{t}"),
        0
    );
    end_delay(&server);
    for conn in &mut waits {
        conn.read_promptly().held();
    }
}

#[test]
fn a_reader_beside_loaded_readers_is_a_new_grant() {
    let server = restarted(|conn| {
        conn.run("RLOCK.ACQUIRE r alice 30000 READ").held();
    });
    let mut bob = server.blocked_in("RLOCK.ACQUIRE r bob 30000 READ BLOCK 0");
    let mut conn = server.connect();
    assert!(conn.run("RLOCK.ACQUIRE r carol 30000 READ").refused() > 0);
    end_delay(&server);
    bob.read_promptly().held();
    conn.run("RLOCK.ACQUIRE r carol 30000 READ").held();
}

#[test]
fn what_is_left_is_the_longer_of_the_lease_and_the_delay() {
    let server = restarted(|conn| {
        conn.take("k", "alice");
    });
    let mut conn = server.connect();
    let left = left_ms(&server);
    let delay = conn.run("RLOCK.ACQUIRE k bob 30000").refused();
    assert!((30_001..=left).contains(&delay), "{delay}");
    assert_eq!(conn.run(format!("RLOCK.RENEW k alice {}", 10 * LONG_MS)), 1);
    let lease = conn.run("RLOCK.ACQUIRE k bob 30000").refused();
    assert!(lease > LONG_MS, "{lease}");
    assert_eq!(conn.run("PERSIST k"), 1);
    assert_eq!(conn.run("RLOCK.ACQUIRE k bob 30000").refused(), -1);
}

#[test]
fn whoever_leaves_the_queue_in_the_delay_is_told_what_is_left_of_it() {
    let server = started(LONG_MS);
    let mut conn = server.connect();
    let timed_out = conn.run("RLOCK.ACQUIRE k alice 30000 BLOCK 50").refused();
    assert!((1..=LONG_MS).contains(&timed_out), "{timed_out}");
    let mut waiting = server.wait_in_queue("k", "alice");
    assert_eq!(conn.run("RLOCK.CANCEL k alice"), 1);
    assert!((1..=LONG_MS).contains(&waiting.read().refused()));
    let mut waiting = server.connect();
    let id = waiting.id();
    waiting.send("RLOCK.ACQUIRE k bob 30000 BLOCK 0");
    until("bob waits", || server.waiting_owners("k") == ["bob"]);
    // Some servers cannot do that safely, and say so.
    if conn.run(format!("CLIENT UNBLOCK {id}")) == 1 {
        assert!((1..=LONG_MS).contains(&waiting.read().refused()));
        assert!(server.waiting_owners("k").is_empty());
    }
}

/// Each queue of such a wait is looked at every second, and a look must not read all the others.
#[test]
fn waits_for_many_locks_cost_no_more_in_the_delay_than_without() {
    let (delayed, other) = (started(LONG_MS), Server::start());
    let waits = (0..8).map(|wait| {
        let names: Vec<String> = (0..1000).map(|n| format!("{wait}.{n}")).collect();
        let taken: Vec<String> = names
            .iter()
            .map(|name| format!("RLOCK.ACQUIRE {name} alice 600000"))
            .collect();
        other.connect().pipeline(&taken);
        let all = names.join(" ");
        let all = format!("RLOCK.MACQUIRE bob{wait} 60000 1000 {all} BLOCK 0");
        [delayed.blocked_in(&all), other.blocked_in(&all)]
    });
    let _waits: Vec<_> = waits.collect();
    // They drift apart, and so cost ever more.
    let began = Instant::now();
    until("they were looked at several times", || {
        began.elapsed() > Duration::from_secs(4)
    });
    let times = || [&delayed, &other].map(Server::processor_time);
    let before = times();
    until("and again", || began.elapsed() > Duration::from_secs(8));
    let after = times();
    let [cost, usual] = [0, 1].map(|n| after[n].saturating_sub(before[n]));
    assert!(
        cost < 3 * usual + Duration::from_millis(200),
        "{cost:?}, {usual:?}"
    );
}

#[test]
fn what_is_released_in_the_delay_has_not_expired() {
    let server = restarted(|conn| {
        conn.run("RLOCK.ACQUIRE k alice 60000").held();
    });
    let mut conn = server.connect();
    conn.run("RLOCK.RENEW k alice 800").int();
    let _waiter = server.blocked_in("RLOCK.ACQUIRE k bob 30000 BLOCK 0");
    assert_eq!(conn.run("RLOCK.RELEASE k alice"), 0);
    let released = Instant::now();
    until("its lease would be over", || {
        released.elapsed() > Duration::from_millis(2_200)
    });
    assert_eq!(server.info_number("rlock_expiries_noticed"), 0);
}

#[test]
fn a_clock_that_is_set_forwards_does_not_end_it() {
    let delay = format!("rlock.grant-delay-ms {LONG_MS}");
    let server = Server::builder().settable_clock().config(&delay).start();
    let mut bob = server.wait_in_queue("k", "bob");
    server.step_clock(AN_HOUR);
    let left = left_ms(&server);
    until("the server has ticked", || left_ms(&server) < left - 300);
    bob.expect_nothing_yet();
    let refused = server.run("RLOCK.ACQUIRE j carol 30000").refused();
    assert!((LONG_MS / 2..left).contains(&refused), "{refused}");
}

#[test]
fn a_clock_that_is_set_back_does_not_prolong_it() {
    let delay = format!("rlock.grant-delay-ms {LONG_MS}");
    let server = Server::builder().settable_clock().config(&delay).start();
    let mut bob = server.wait_in_queue("k", "bob");
    end_delay_after(&server, 1000);
    server.step_clock(-AN_HOUR);
    bob.read().held();
    assert_eq!(left_ms(&server), 0);
}

#[test]
fn it_counts_from_the_load_of_the_module_into_a_running_server() {
    let server = Server::builder().without_module().start();
    let path = module_path().display().to_string();
    let delay = LONG_MS.to_string();
    let name = "rlock.grant-delay-ms";
    let mut conn = server.connect();
    let load = ["MODULE", "LOADEX", &path, "CONFIG", name, &delay];
    assert_eq!(conn.cmd(&load), "OK");
    assert!(conn.run("RLOCK.ACQUIRE k alice 30000").refused() > 0);
    end_delay(&server);
    conn.take("k", "alice");
}

#[test]
fn neither_a_reload_nor_a_promotion_is_a_start() {
    let pair = Pair::of(
        Server::builder(),
        Server::builder().config("rlock.grant-delay-ms 300"),
    );
    pair.primary.connect().take("held", "alice");
    in_sync(&pair.primary, &pair.replica);
    until("its delay is over", || left_ms(&pair.replica) == 0);
    pair.replica.run("REPLICAOF NO ONE");
    let mut conn = pair.replica.connect();
    conn.take("k", "alice");
    conn.run("CONFIG SET save \"\"");
    assert_eq!(conn.run("DEBUG RELOAD"), "OK");
    conn.take("j", "alice");
}

/// The delay is the server's, not the keyspace's: what reaches a replica is the grant alone.
#[test]
fn a_replica_sees_nothing_of_it_but_the_grants_at_its_end() {
    let delay = format!("rlock.grant-delay-ms {LONG_MS}");
    let pair = Pair::of(Server::builder().config(&delay), Server::builder());
    let mut waiting = pair.primary.wait_in_queue("k", "alice");
    assert!(
        pair.primary
            .connect()
            .run("RLOCK.ACQUIRE k bob 9")
            .refused()
            > 0
    );
    in_sync(&pair.primary, &pair.replica);
    assert_eq!(pair.replica.run("DBSIZE"), 0);
    end_delay(&pair.primary);
    waiting.read_promptly().held();
    in_sync(&pair.primary, &pair.replica);
    assert_eq!(pair.replica.holder("k").as_deref(), Some("alice"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_waits_for_the_end_and_a_single_try_is_told_that_it_has_not_got_it() {
    let server = started(LONG_MS);
    let client = client(&server).await;
    let error = soon(client.lock("k").try_lock()).await.unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    let lock = client.lock("k");
    let waiting = tokio::spawn(async move { lock.lock().await });
    until("it waits", || server.waiting_owners("k").len() == 1);
    end_delay(&server);
    let guard = soon(waiting).await.unwrap().unwrap();
    assert!(!guard.is_lost());
    soon(guard.unlock()).await.unwrap();
}
