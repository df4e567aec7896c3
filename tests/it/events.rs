//! The events of a session: grants, ends of waits, lost holds; many waits on one connection.

use std::time::{Duration, Instant};

use rlock_tests::{Cluster, Conn, Reply, Server, Version, on_time, slot_of, until};

pub(super) const ONE_HOUR: &str = "3600000";

/// A new session connection of `s`, with the longest grace: a waiter that leaves before the end of
/// that leaves because the connection has closed.
pub(super) fn life_with_a_long_grace(server: &Server) -> Conn {
    let mut life = server.connect();
    life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}"))
        .events();
    life
}

/// A connection that waits for the events of `s`, and the server's number for it.
pub(super) fn listener(server: &Server, options: &str) -> (Conn, i64) {
    let mut conn = server.connect();
    let id = conn.id();
    conn.run(format!("RLOCK.EVENTS s {options}")).events();
    conn.send(format!("RLOCK.EVENTS s BLOCK 0 {options}"));
    conn.expect_nothing_yet();
    (conn, id)
}

/// The events of `s`, as soon as it has some.
#[track_caller]
pub(super) fn next_events(life: &mut Conn) -> Vec<(String, Reply)> {
    life.run("RLOCK.EVENTS s BLOCK 0").events()
}

#[track_caller]
pub(super) fn no_events(life: &mut Conn) {
    life.settle();
    assert_eq!(life.run("RLOCK.EVENTS s").events(), []);
}

// --- Waiting for a session ---------------------------------------------------------------------

#[test]
fn blocked_and_queued_waiters_stand_in_the_same_queue() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut life = server.session_connection("s");
    let mut token = alice.take("k", "alice");
    assert_eq!(alice.queue("k", "bob", "s"), 1);
    let mut carol = server.wait_in_queue("k", "carol");
    assert_eq!(alice.queue("k", "dave", "s"), 3);
    let mut erin = server.wait_in_queue("k", "erin");
    assert_eq!(server.waiting_owners("k"), ["bob", "carol", "dave", "erin"]);

    alice.let_go("k", "alice");
    let mut larger = |next: i64| assert!(std::mem::replace(&mut token, next) < next);
    larger(life.run("RLOCK.EVENTS s").granted("k", "bob"));
    assert_eq!(server.run("HGET k bob"), "1");
    alice.let_go("k", "bob");
    larger(carol.read().held().1);
    no_events(&mut life);
    alice.let_go("k", "carol");
    larger(life.run("RLOCK.EVENTS s").granted("k", "dave"));
    erin.expect_nothing_yet();
    alice.let_go("k", "dave");
    larger(erin.read().held().1);
}

#[test]
fn one_connection_carries_any_number_of_waits() {
    const LOCKS: usize = 500;
    let server = Server::start();
    let mut alice = server.connect();
    let mut life = server.session_connection("s");
    let mut clients = Vec::new();
    for lock in 0..LOCKS {
        alice.take(&format!("k{lock}"), "alice");
        clients.push(format!(
            "RLOCK.ACQUIRE k{lock} bob{lock} 30000 QUEUE 0 SESSION s"
        ));
    }
    let places = alice.pipeline(&clients);
    assert!(places.iter().all(|place| place.queued() == 1), "{places:?}");
    for lock in (0..LOCKS).rev() {
        alice.let_go(&format!("k{lock}"), "alice");
    }
    let told: Vec<_> = life.run("RLOCK.EVENTS s").events();
    let told: Vec<_> = told.into_iter().map(|(event, _)| event).collect();
    let expected = (0..LOCKS).rev();
    let expected: Vec<_> = expected.map(|i| format!("granted k{i} bob{i}")).collect();
    assert_eq!(told, expected, "in the order of the grants");
}

#[test]
fn the_lease_of_a_queued_waiter_starts_at_its_grant() {
    let server = Server::start();
    let mut alice = server.connect();
    let _life = server.session_connection("s");
    alice.take("k", "alice");
    alice
        .run("RLOCK.ACQUIRE k bob 90000 QUEUE 0 SESSION s")
        .queued();
    alice.let_go("k", "alice");
    assert!(alice.run("PTTL k").int() > 80_000);
}

#[test]
fn a_queued_wait_ends_neither_early_nor_much_too_late() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut life = server.session_connection("s");
    alice.run("RLOCK.ACQUIRE k alice 600000").held();
    for wait_ms in [1, 10, 50, 100] {
        on_time("the end", &server, Duration::from_millis(10), |_| {
            let begun = Instant::now();
            let wait = format!("RLOCK.ACQUIRE k bob 1000 QUEUE {wait_ms} SESSION s");
            alice.run(wait).queued();
            let (event, ttl) = next_events(&mut life).remove(0);
            let (took, asked) = (begun.elapsed(), Duration::from_millis(wait_ms));
            assert_eq!(event, "timeout k bob");
            assert!((1..=600_000).contains(&ttl.int()), "{ttl:?}");
            assert!(took >= asked, "{took:?} is less than {asked:?}");
            took.saturating_sub(asked)
        });
    }
    assert!(server.waiting_owners("k").is_empty());
    alice.let_go("k", "alice");
    assert_eq!(server.holder("k"), None);
    no_events(&mut life);
}

#[test]
fn a_full_queue_refuses_queued_waits() {
    let server = Server::builder()
        .config("rlock.max-waiters-per-lock 2")
        .start();
    let mut conn = server.connect();
    let _life = server.session_connection("s");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    let _carol = server.wait_in_queue("k", "carol");
    let wait = "RLOCK.ACQUIRE k dave 30000 QUEUE 0 SESSION s";
    let error = conn.run(wait).error();
    assert!(error.starts_with("QUEUEFULL "), "{error}");
    let again = "RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION s ONCE";
    assert_eq!(conn.run(again).queued(), 1, "no new place");
    conn.run("RLOCK.CANCEL k bob");
    assert_eq!(conn.run(wait).queued(), 2);
}

#[test]
fn inside_multi_and_scripts_queue_waits_as_anywhere() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.take("k", "alice");
    let wait = "RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION s";
    let replies = conn.pipeline(&["MULTI", wait, "RLOCK.RELEASE k alice", "HKEYS k", "EXEC"]);
    let results = replies[4].array();
    assert_eq!(results[0].queued(), 1);
    assert!(results[2].texts().contains(&"bob".to_owned()));
    life.run("RLOCK.EVENTS s").granted("k", "bob");

    let script = "return redis.call('RLOCK.ACQUIRE', KEYS[1], 'carol', '30000', 'QUEUE', '0',
        'SESSION', 's')";
    assert_eq!(conn.cmd(&["EVAL", script, "1", "k"]).queued(), 1);
    conn.let_go("k", "bob");
    life.run("RLOCK.EVENTS s").granted("k", "carol");
}

#[test]
fn events_inside_multi_answers_at_once_and_not_at_all_inside_a_script() {
    let server = Server::start();
    let mut conn = server.connect();
    let replies = conn.pipeline(&["MULTI", "RLOCK.EVENTS s BLOCK 0", "EXEC"]);
    assert_eq!(replies[2].array()[0].events(), []);
    conn.take_for("k", "alice", "s"); // the session is there
    let script = "return redis.call('RLOCK.EVENTS', 'other')";
    let error = conn.cmd(&["EVAL", script, "0"]).error();
    assert!(error.contains("RLOCK.EVENTS needs a connection"), "{error}");
    server.load_c_module("caller");
    let error = conn.run("CALLER.CALL RLOCK.EVENTS other").error();
    assert!(error.contains("RLOCK.EVENTS needs a connection"), "{error}");
    let error = conn
        .run("RLOCK.ACQUIRE free bob 1000 SESSION other")
        .error();
    assert!(error.starts_with("NOSESSION "), "{error}");
    conn.close();
    until("the hold went with its session", || {
        server.holder("k").is_none()
    });
}

/// Valkey 8.1 and newer block no RESP3 connection that has subscriptions. An empty answer at once
/// would be asked for again at once.
#[test]
fn a_resp3_connection_with_subscriptions_waits_or_is_told_that_it_cannot() {
    let server = Server::start();
    server.connect().take("k", "alice");
    let mut conn = server.connect().resp3();
    conn.run("RLOCK.EVENTS s").events();
    conn.run("SUBSCRIBE news");
    let told = conn.run("RLOCK.EVENTS s BLOCK 1");
    if Version::at_hand().blocks_subscribers() {
        assert_eq!(told.events(), []);
    } else {
        let error = told.error();
        assert!(error.starts_with("ERR RLOCK.EVENTS cannot wait"), "{error}");
        let document = include_str!("../../docs/commands.md");
        assert!(document.contains(&format!("\n| `{error}` | `EVENTS` |")));
    }
    // All else is as anywhere.
    assert_eq!(conn.run("RLOCK.EVENTS s").events(), []);
    conn.run("RLOCK.ACQUIRE k bob 30000 BLOCK 1").refused();
    conn.queue("k", "bob", "s");
    server.connect().let_go("k", "alice");
    let events = conn.run("RLOCK.EVENTS s BLOCK 0");
    events.granted("k", "bob");
}

#[test]
fn without_a_listener_there_is_no_session_and_nothing_happens() {
    let server = Server::start();
    let mut conn = server.connect();
    server.session_connection("ended").close();
    let mut waiting = server.connect();
    waiting.run(format!("RLOCK.EVENTS graced GRACE {ONE_HOUR}"));
    waiting.close();
    until("both connections are gone", || {
        server.info_number("connected_clients") <= 2
    });
    conn.take("k", "alice");
    let before = conn.run("PEXPIRETIME k");
    for session in ["never", "ended", "graced"] {
        for command in [
            "RLOCK.ACQUIRE k bob 1000 QUEUE 0",
            "RLOCK.ACQUIRE k bob 1000 BLOCK 0",
        ] {
            let error = conn.run(format!("{command} SESSION {session}")).error();
            assert!(error.starts_with("NOSESSION "), "{command}: {error}");
        }
        for command in [
            "RLOCK.ACQUIRE free bob 1000",
            "RLOCK.ACQUIRE k alice 90000",
            "RLOCK.RENEW k alice 90000",
        ] {
            let error = conn.run(format!("{command} SESSION {session}")).error();
            assert!(error.starts_with("NOSESSION "), "{command}: {error}");
        }
    }
    assert!(server.waiting_owners("k").is_empty());
    assert_eq!(server.holder("free"), None);
    assert_eq!(conn.run("HGET k alice"), "1");
    assert_eq!(conn.run("PEXPIRETIME k"), before);
}

#[test]
fn a_wait_in_another_database() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.run("SELECT 1");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    server.run("RLOCK.BREAK k"); // of the same name, but not the same lock
    no_events(&mut life);
    conn.let_go("k", "alice");
    life.run("RLOCK.EVENTS s").granted("k", "bob");
    assert_eq!(conn.run("HGET k bob"), "1");
    life.close();
    until("the hold went too", || conn.run("EXISTS k") == 0);
}

// --- Hearing of it ------------------------------------------------------------------------------

#[test]
fn events_come_once_and_in_the_order_in_which_they_happened() {
    let server = Server::start();
    for mut life in [server.connect(), server.connect().resp3()] {
        let mut conn = server.connect();
        life.run("RLOCK.EVENTS s").events();
        conn.take("k", "alice");
        conn.take("l", "alice");
        conn.queue("k", "bob", "s");
        conn.queue("l", "carol", "s");
        conn.take_for("m", "dave", "s");
        conn.let_go("k", "alice");
        conn.run("RLOCK.CANCEL l carol");
        conn.run("RLOCK.BREAK m");
        conn.run("RLOCK.BREAK k");
        let told = life.run("RLOCK.EVENTS s").events();
        let names: Vec<_> = told.iter().map(|(event, _)| event.as_str()).collect();
        let expected = [
            "granted k bob",
            "timeout l carol",
            "lost m dave",
            "lost k bob",
        ];
        assert_eq!(names, expected);
        assert_eq!(
            (&told[2].1, &told[3].1),
            (&"broken".into(), &"broken".into())
        );
        no_events(&mut life);
        conn.run("FLUSHALL");
    }
}

#[test]
fn events_wait_no_longer_than_asked() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    for wait_ms in [1, 20, 100] {
        on_time("the end", &server, Duration::from_millis(10), |_| {
            let begun = Instant::now();
            let told = life.run(format!("RLOCK.EVENTS s BLOCK {wait_ms}"));
            let (took, asked) = (begun.elapsed(), Duration::from_millis(wait_ms));
            assert_eq!(told.events(), []);
            assert!(took >= asked, "{took:?} is less than {asked:?}");
            took.saturating_sub(asked)
        });
    }
    // The session lives on between the calls.
    life.take_for("k", "alice", "s");
    assert_eq!(life.run("RLOCK.EVENTS s BLOCK 1").events(), []);
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
}

#[test]
fn whoever_waits_for_events_is_told_at_once() {
    let server = Server::start();
    let mut conn = server.connect();
    for listener in [server.connect(), server.connect().resp3()] {
        let mut listener = listener;
        listener.run("RLOCK.EVENTS s").events();
        for block in ["0", "60000"] {
            listener.send(format!("RLOCK.EVENTS s BLOCK {block}"));
            listener.expect_nothing_yet();
            conn.take("k", "alice");
            conn.queue("k", "bob", "s");
            listener.expect_nothing_yet();
            conn.let_go("k", "alice");
            listener.read_promptly().granted("k", "bob");
            conn.let_go("k", "bob");
            listener.run("RLOCK.EVENTS s").events();
        }
    }
}

#[test]
fn events_between_two_calls_are_kept() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    for round in 0..20 {
        let name = format!("k{round}");
        conn.take(&name, "alice");
        conn.queue(&name, "bob", "s");
        conn.let_go(&name, "alice");
        // The event is there already: BLOCK does not wait.
        life.run("RLOCK.EVENTS s BLOCK 0").granted(&name, "bob");
    }
}

#[test]
fn events_of_one_turn_come_in_one_reply() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    for name in ["k", "l"] {
        conn.take(name, "alice");
        conn.queue(name, "bob", "s");
    }
    conn.pipeline(&["RLOCK.RELEASE k alice", "RLOCK.RELEASE l alice"]);
    let told = listener.read().events();
    let names: Vec<_> = told.iter().map(|(event, _)| event.as_str()).collect();
    assert_eq!(names, ["granted k bob", "granted l bob"]);
}

#[test]
fn each_session_gets_its_own_events() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut both = server.connect();
    let mut third = server.session_connection("u");
    for session in ["s", "t"] {
        both.run(format!("RLOCK.EVENTS {session}")).events();
    }
    for (name, session) in [("k", "s"), ("l", "t"), ("m", "u")] {
        conn.take(name, "alice");
        conn.queue(name, "bob", session);
        conn.let_go(name, "alice");
    }
    both.run("RLOCK.EVENTS t").granted("l", "bob");
    both.run("RLOCK.EVENTS s").granted("k", "bob");
    third.run("RLOCK.EVENTS u").granted("m", "bob");
    both.close();
    until("both sessions of the connection are over", || {
        ["k", "l"].iter().all(|name| server.holder(name).is_none())
    });
    assert_eq!(server.holder("m").as_deref(), Some("bob"));
}

#[test]
fn client_unblock_ends_a_listeners_wait_and_not_the_session() {
    for how in ["TIMEOUT", "ERROR"] {
        let server = Server::start();
        let mut conn = server.connect();
        let (mut listener, id) = listener(&server, "");
        conn.take_for("held", "dave", "s");
        conn.take("k", "alice");
        conn.queue("k", "bob", "s");
        let unblocked = conn.run(format!("CLIENT UNBLOCK {id} {how}"));
        if Version::at_hand().can_unblock_waiters() {
            assert_eq!(unblocked, 1);
            let told = listener.read();
            match how {
                "TIMEOUT" => assert_eq!(told.events(), []),
                _ => assert!(told.error().starts_with("UNBLOCKED "), "{told:?}"),
            }
            listener.send("RLOCK.EVENTS s BLOCK 0");
        } else {
            assert_eq!(unblocked, 0);
        }
        listener.expect_nothing_yet();
        conn.let_go("k", "alice");
        listener.read().granted("k", "bob");
        assert_eq!(server.holder("held").as_deref(), Some("dave"));
    }
}

#[test]
fn client_unblock_in_the_turn_of_an_event_loses_none() {
    for how in ["TIMEOUT", "ERROR"] {
        let server = Server::start();
        let mut conn = server.connect();
        let (mut listener, id) = listener(&server, "");
        conn.take("k", "alice");
        conn.queue("k", "bob", "s");
        let unblock = format!("CLIENT UNBLOCK {id} {how}");
        conn.pipeline(&["RLOCK.RELEASE k alice", &unblock]);
        let told = listener.read();
        let later = listener.run("RLOCK.EVENTS s");
        let told_at_once = !told.is_error() && !told.events().is_empty();
        let (with_it, without) = if told_at_once {
            (told, later)
        } else {
            (later, told)
        };
        with_it.granted("k", "bob");
        assert!(
            without.is_error() || without.events().is_empty(),
            "{without:?}"
        );
    }
}

// --- Losing a hold ------------------------------------------------------------------------------

/// Bob holds `k` for `s` and is told `reason` when `commands` have been run, and nothing else.
#[track_caller]
fn is_lost_by(commands: &[&str], reason: &str) {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    conn.take_for("k", "bob", "s");
    for reply in conn.pipeline(commands) {
        assert!(!reply.is_error(), "{commands:?}: {reply:?}");
    }
    let told = listener.read().event();
    assert_eq!(
        told,
        ("lost k bob".to_owned(), reason.into()),
        "{commands:?}"
    );
    no_events(&mut listener);
    let holds = server.info_number("rlock_session_holds");
    assert_eq!(holds, 0, "{commands:?}");
}

#[test]
fn a_hold_that_is_broken_or_deleted_is_lost() {
    is_lost_by(&["RLOCK.BREAK k"], "broken");
    is_lost_by(&["DEL k"], "deleted");
    is_lost_by(&["UNLINK k"], "deleted");
    is_lost_by(
        &["MULTI", "DEL k", "RLOCK.ACQUIRE k carol 30000", "EXEC"],
        "deleted",
    );
    is_lost_by(&["FLUSHALL"], "deleted");
    is_lost_by(&["FLUSHDB ASYNC"], "deleted");
    is_lost_by(&["SWAPDB 0 1"], "deleted");
    is_lost_by(&["RENAME k away"], "deleted");
    is_lost_by(&["MOVE k 1"], "deleted");
    is_lost_by(&["HDEL k bob fence"], "deleted");
    is_lost_by(
        &[
            "HSET other carol 1 fence t5",
            "PEXPIRE other 30000",
            "COPY other k REPLACE",
        ],
        "deleted",
    );
    // The same owner's again, but not the hold it was.
    is_lost_by(&["DEL k", "RLOCK.ACQUIRE k bob 30000"], "deleted");
    is_lost_by(&["DEL k", "HSET k bob 1", "PEXPIRE k 30000"], "deleted");
}

#[test]
fn a_hold_whose_lease_ends_is_lost() {
    is_lost_by(
        &["DEBUG SET-ACTIVE-EXPIRE 0", "RLOCK.RENEW k bob 30"],
        "expired",
    );
    is_lost_by(&["DEBUG SET-ACTIVE-EXPIRE 0", "PEXPIRE k 30"], "expired");
    is_lost_by(
        &["RLOCK.RENEW k bob 30", "DEBUG SLEEP 0.05", "EXISTS k"],
        "expired",
    );
}

/// Its end is too far away for a timer at once: a tick of the server sees to that.
#[test]
fn a_hold_whose_lease_of_several_ticks_ends_is_lost() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    conn.run("DEBUG SET-ACTIVE-EXPIRE 0");
    conn.run("RLOCK.ACQUIRE k bob 2500 SESSION s").held();
    let told = listener.read().event();
    assert_eq!(told, ("lost k bob".to_owned(), "expired".into()));
}

#[test]
fn a_hold_that_was_overwritten_is_lost_as_soon_as_anybody_asks_for_it() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    conn.take_for("k", "bob", "s");
    conn.run("SET k v");
    let error = conn.run("RLOCK.RENEW k bob 1000").error();
    assert!(error.starts_with("WRONGTYPE "), "{error}");
    let told = listener.read_promptly().event();
    assert_eq!(told, ("lost k bob".to_owned(), "deleted".into()));
}

#[test]
fn a_hold_that_was_overwritten_is_lost_at_the_latest_at_the_leases_end() {
    for overwrite in ["SET k v", "HDEL k bob", "HSET k fence t5"] {
        let server = Server::start();
        let mut conn = server.connect();
        let (mut listener, _) = listener(&server, "");
        conn.take_for("k", "bob", "s");
        conn.pipeline(&[
            "MULTI",
            "RLOCK.RENEW k bob 100",
            overwrite,
            "PERSIST k",
            "EXEC",
        ]);
        let (event, _) = listener.read().event();
        assert_eq!(event, "lost k bob", "{overwrite}");
        assert_eq!(conn.run("EXISTS k"), 1, "{overwrite}");
    }
}

#[test]
fn a_hold_that_is_evicted_is_lost() {
    let server = Server::builder()
        .config("maxmemory-policy allkeys-random")
        .start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    conn.take_for("k", "bob", "s");
    let squeeze = [
        "CONFIG SET maxmemory 1",
        "EXISTS k",
        "CONFIG SET maxmemory 0",
    ];
    until("the lock is evicted", || {
        conn.pipeline(&squeeze);
        server.info_number("evicted_keys") > 0
    });
    let told = listener.read().event();
    assert_eq!(told, ("lost k bob".to_owned(), "deleted".into()));
}

#[test]
fn the_holder_is_told_of_its_loss_and_the_next_waiter_of_its_grant() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    for (round, end) in ["RLOCK.BREAK", "DEL", "PEXPIREAT"].into_iter().enumerate() {
        let name = format!("k{round}");
        conn.take_for(&name, "bob", "s");
        conn.queue(&name, "carol", "s");
        conn.run(format!(
            "{end} {name} {}",
            if end == "PEXPIREAT" { "1" } else { "" }
        ));
        let mut told = next_events(&mut life);
        while told.len() < 2 {
            told.extend(next_events(&mut life));
        }
        let names: Vec<_> = told.into_iter().map(|(event, _)| event).collect();
        let expected = [format!("lost {name} bob"), format!("granted {name} carol")];
        assert_eq!(names, expected, "{end}");
    }
}

#[test]
fn an_owners_own_commands_lose_no_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.take_for("k", "bob", "s");
    for command in [
        "RLOCK.RENEW k bob 20000",
        "RLOCK.RENEW k bob 30000",
        "RLOCK.ACQUIRE k bob 30000",
        "RLOCK.ACQUIRE k bob 30000 ONCE",
        "RLOCK.ACQUIRE k bob 30000 BLOCK 0",
        "RLOCK.RELEASE k bob LEASE 60000",
        "RLOCK.RELEASE k bob",
        "PEXPIRE k 30000",
        "PERSIST k",
        "PEXPIRE k 30000",
        "DEBUG RELOAD",
        "RLOCK.RELEASE k bob",
        "RLOCK.BREAK k",
        "RLOCK.ACQUIRE k bob 30000",
        "RLOCK.BREAK k",
    ] {
        let reply = conn.run(command);
        assert!(!reply.is_error(), "{command}: {reply:?}");
        no_events(&mut life);
    }
}

#[test]
fn a_lease_that_was_renewed_in_time_is_not_lost_at_its_first_end() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.pipeline(&[
        "RLOCK.ACQUIRE k bob 50 SESSION s",
        "RLOCK.RENEW k bob 30000",
    ]);
    // Another lease, which began later and is as long, serves as the clock.
    conn.run("RLOCK.ACQUIRE clock dave 50 SESSION s").held();
    let told = next_events(&mut life);
    assert_eq!(told, [("lost clock dave".to_owned(), "expired".into())]);
    no_events(&mut life);
}

// --- Errors that end a wait ---------------------------------------------------------------------

#[test]
fn queued_waiters_of_an_overwritten_lock_get_an_error() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    conn.pipeline(&["SET text v", "RENAME text k"]);
    let (event, error) = listener.read().event();
    assert_eq!(event, "error k bob");
    let expected = "WRONGTYPE Operation against a key holding the wrong kind of value";
    assert_eq!(error, expected);
    assert!(conn.run("RLOCK.LIST").array().is_empty());
}

#[test]
fn a_slot_that_moves_away_redirects_queued_waiters_and_loses_no_hold() {
    let cluster = Cluster::start();
    let server = &cluster.first;
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    let others = "{k}held";
    conn.take("k", "alice");
    conn.take_for(others, "dave", "s");
    conn.queue("k", "bob", "s");
    conn.queue("k", "carol", "s");
    cluster.open_slot_of("k");
    cluster.migrate("k");
    cluster.migrate(others);
    cluster.close_slot_of("k");
    let mut told = Vec::new();
    while told.len() < 2 {
        told.extend(next_events(&mut life));
    }
    let moved = format!("MOVED {} 127.0.0.1:", slot_of(server, "k"));
    for ((event, error), owner) in told.iter().zip(["bob", "carol"]) {
        assert_eq!(*event, format!("error k {owner}"));
        assert!(error.text().starts_with(&moved), "{error:?}");
    }
    // Dave has his lock on the other node; the end of this session must not end it there.
    life.close();
    until("the session is over", || {
        server.info_number("rlock_sessions") == 0
    });
    assert_eq!(cluster.second.holder(others).as_deref(), Some("dave"));
    assert_eq!(cluster.second.holder("k").as_deref(), Some("alice"));
}

#[test]
fn a_server_that_becomes_a_replica_tells_queued_waiters() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    let mut other = server.session_connection("t");
    let (began, _) = life.run("RLOCK.EVENTS s").told();
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    conn.queue("k", "carol", "t");
    conn.take_for("held", "dave", "s");
    assert_eq!(conn.run("REPLICAOF 127.0.0.1 1"), "OK");
    // A session with a hold begins another life: its client must confirm its holds at the new
    // primary, and ask for its waits again.
    let (life_now, events) = life.run("RLOCK.EVENTS s").told();
    assert!(life_now > began && events.is_empty(), "{events:?}");
    let (event, error) = other.run("RLOCK.EVENTS t").event();
    assert_eq!(event, "error k carol");
    assert!(error.text().starts_with("UNBLOCKED "), "{error:?}");
    other.close();
    // The new primary ends and watches the holds of its sessions.
    assert_eq!(server.info_number("rlock_session_holds"), 0);
    life.close();
    conn.settle();
    assert_eq!(server.run("REPLICAOF NO ONE"), "OK");
    conn.settle();
    assert_eq!(server.holder("held").as_deref(), Some("dave"));
    assert!(server.waiting_owners("k").is_empty());
    assert_eq!(server.info_number("rlock_sessions"), 0);
}

#[test]
fn a_server_that_becomes_a_replica_tells_its_listeners() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    assert_eq!(conn.run("REPLICAOF 127.0.0.1 1"), "OK");
    // By the server, which closes the connection then, or by the module, if that is first.
    let told = listener.read();
    let is_told = match &told {
        Reply::Error(text) => text.starts_with(b"UNBLOCKED "),
        other => other.event().0 == "error k bob",
    };
    assert!(is_told, "{told:?}");
    listener.close();
    until("the session is over", || {
        server.info_number("rlock_sessions") == 0
    });
    assert!(server.waiting_owners("k").is_empty());
}

// --- What operators see -------------------------------------------------------------------------

#[test]
fn info_and_list_show_queued_waiters() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    let (life_id, alice_id) = (life.id(), conn.id());
    assert_ne!(life_id, alice_id);
    conn.take("k", "alice");
    conn.run("RLOCK.ACQUIRE k bob 30000 QUEUE 20000 SESSION s")
        .queued();
    let _carol = server.wait_in_queue("k", "carol");
    conn.queue("k", "dave", "s");
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(info.get("waiters"), &3);
    let queue = info.get("queue").array();
    for (waiter, owner) in queue.iter().zip(["bob", "carol", "dave"]) {
        assert_eq!(
            waiter.keys(),
            ["owner", "session", "client-id", "waited-ms", "left-ms"]
        );
        assert_eq!(waiter.get("owner"), &owner);
        let is_sessions = owner != "carol";
        assert_eq!(*waiter.get("client-id") == life_id, is_sessions, "{owner}");
        assert_eq!(*waiter.get("session") == "s", is_sessions, "{owner}");
    }
    let left = queue[0].get("left-ms").int();
    assert!((1..=20_000).contains(&left), "{left}");
    assert_eq!(queue[2].get("left-ms"), &-1);
    let listed = conn.run("RLOCK.LIST");
    let row = listed.array()[0].array();
    assert_eq!((&row[0], &row[1]), (&"k".into(), &3.into()));
}

/// Redis 8 deletes a key in the millisecond in which its lease ends, and the session is told of it
/// in the same.
#[test]
fn a_lease_that_ends_in_this_very_millisecond_has_expired() {
    let server = Server::builder().config("hz 500").start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    for _ in 0..5 {
        for mode in ["", "READ", "WRITE"] {
            for n in 0..20 {
                let (name, lease) = (format!("k{mode}{n}"), 20 + n);
                conn.run(format!("RLOCK.ACQUIRE {name} alice 30000 {mode} SESSION s"))
                    .held();
                conn.run(format!("RLOCK.RENEW {name} alice {lease} {mode}"));
            }
            let mut told = 0;
            while told < 20 {
                for (event, reason) in next_events(&mut life) {
                    assert_eq!(reason, "expired", "{event}");
                    told += 1;
                }
            }
        }
    }
}
