//! Session connections: what ends with one, what another takes over, and what a grace is.

use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Feed, Reply, Server, aof, on_time, until};

use crate::events::{ONE_HOUR, life_with_a_long_grace, listener, next_events, no_events};
use crate::queue::work_while_killed;
use crate::replication::{end_of, grant, unlock_message};

// --- The end of the session connection -----------------------------------------------------------

#[test]
fn without_a_grace_all_goes_with_the_connection() {
    let server = Server::start();
    let mut conn = server.connect();
    for listening in [false, true] {
        let mut life = server.session_connection("s");
        conn.take_for("held", "bob", "s");
        conn.run("RLOCK.ACQUIRE held bob 30000").held(); // all its counts go
        conn.take("waited-for", "alice");
        conn.queue("waited-for", "bob", "s");
        conn.take("granted", "alice");
        conn.queue("granted", "bob", "s");
        let mut carols: Vec<_> = ["held", "waited-for", "granted"]
            .into_iter()
            .map(|name| server.wait_in_queue(name, "carol"))
            .collect();
        if listening {
            life.send("RLOCK.EVENTS s BLOCK 0");
            life.expect_nothing_yet();
        }
        conn.let_go("granted", "alice");
        life.close();
        carols[0].read().held();
        carols[2].read().held();
        until("bob has left the queue", || {
            server.waiting_owners("waited-for") == ["carol"]
        });
        conn.let_go("waited-for", "alice");
        carols[1].read().held();
        assert_eq!(server.info_number("rlock_sessions"), 0);
        assert_eq!(server.info_number("rlock_session_holds"), 0);
        conn.run("FLUSHALL");
    }
}

#[test]
fn the_grace_is_the_last_calls() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = life_with_a_long_grace(&server);
    conn.take_for("k", "bob", "s");
    life.run("RLOCK.EVENTS s").events(); // none, unless the call names one
    life.close();
    until("the hold is gone", || server.holder("k").is_none());
}

#[test]
fn holds_are_released_when_the_grace_is_over() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.connect();
    life.run("RLOCK.EVENTS s GRACE 200").events();
    conn.take_for("k", "bob", "s");
    conn.run("RLOCK.ACQUIRE k bob 30000").held();
    let mut carol = server.wait_in_queue("k", "carol");
    let begun = Instant::now();
    life.close();
    carol.read().held();
    let took = begun.elapsed();
    // The server counts from the millisecond in which its turn began.
    assert!(took >= Duration::from_millis(195), "{took:?}");
    assert_eq!(server.info_number("rlock_sessions"), 0);
}

#[test]
fn waiters_leave_with_the_connection_and_grants_stay_for_the_grace() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = life_with_a_long_grace(&server);
    let (number, _) = life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}")).told();
    for name in ["waited-for", "granted"] {
        conn.take(name, "alice");
        conn.queue(name, "bob", "s");
    }
    conn.let_go("granted", "alice");
    let token = server.run("RLOCK.INFO granted").get("token").int();
    let mut behind = server.wait_in_queue("granted", "carol");
    life.close();
    until("bob has left the queue", || {
        server.waiting_owners("waited-for").is_empty()
    });
    behind.expect_nothing_yet();
    assert_eq!(server.holder("granted").as_deref(), Some("bob"));
    assert_eq!(server.info_number("rlock_grants_taken_back"), 0);
    let (again, events) = server.connect().run("RLOCK.EVENTS s").told();
    assert_eq!(again, number, "the same life");
    let events: Vec<_> = events
        .iter()
        .map(|of| (of.seq, &*of.what, of.token))
        .collect();
    assert_eq!(
        events,
        [
            (1, "granted granted bob", token),
            (2, "left waited-for bob", 0)
        ]
    );
    // That connection has closed as well, and without a grace.
    behind.read().held();
}

/// A connection that dies before, within or after a reply costs no event.
#[test]
fn what_was_told_is_told_again_until_it_is_acknowledged() {
    const EVENTS: i64 = 5;
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = life_with_a_long_grace(&server);
    let (number, _) = life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}")).told();
    conn.take_for("kept", "bob", "s");
    for event in 1..=EVENTS {
        conn.take_for(&format!("k{event}"), "bob", "s");
        conn.run(format!("RLOCK.BREAK k{event}"));
    }
    for heard in 0..=EVENTS + 1 {
        for told in 0..3 {
            let call = format!("RLOCK.EVENTS s GRACE {ONE_HOUR} AFTER {number} {heard}");
            let reply = life.run(&call);
            // AFTER another life drops nothing and does not block.
            let stranger = life.run(format!("{call} BLOCK 0").replace(&number.to_string(), "1"));
            assert_eq!(reply, stranger, "after {heard}, told {told} times");
            let (again, events) = reply.told();
            let seqs: Vec<_> = events.iter().map(|event| event.seq).collect();
            let left: Vec<_> = (heard + 1..=EVENTS).collect();
            assert_eq!((again, seqs), (number, left), "after {heard}");
            let id = life.id();
            life.close();
            until("the connection is gone", || {
                server.run(format!("CLIENT LIST ID {id}")).text().is_empty()
            });
            life = server.connect();
        }
    }
    // An event that comes later has the next number.
    life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}"))
        .events();
    conn.run("RLOCK.BREAK kept");
    let (again, events) = life
        .run(format!("RLOCK.EVENTS s AFTER {number} {EVENTS}"))
        .told();
    assert_eq!((again, events[0].seq), (number, EVENTS + 1));
    let (_, events) = life.run("RLOCK.EVENTS s").told();
    assert_eq!(
        events,
        [],
        "without AFTER all that was told is acknowledged"
    );
}

#[test]
fn a_late_call_on_an_old_connection_takes_nothing_over() {
    let server = Server::start();
    let (mut old, mut new) = (server.connect(), server.connect());
    let (number, _) = old.run("RLOCK.EVENTS s EPOCH 3 GRACE 60000").told();
    old.take_for("k", "bob", "s");
    new.run("RLOCK.EVENTS s EPOCH 4 GRACE 60000").events();
    new.send("RLOCK.EVENTS s EPOCH 4 GRACE 60000 BLOCK 0");
    new.expect_nothing_yet();
    let stale = "STALE a later connection has named EPOCH 4 for this session";
    for call in ["EPOCH 3", "EPOCH 0 GRACE 0", "EPOCH 3 BLOCK 0"] {
        assert_eq!(old.run(format!("RLOCK.EVENTS s {call}")).error(), stale);
    }
    old.close();
    new.expect_nothing_yet();
    server.run("RLOCK.BREAK k");
    let (again, events) = new.read().told();
    assert_eq!((again, &*events[0].what), (number, "lost k bob"));
    // The same number, and a call without one, are not late.
    let told = new.run("RLOCK.EVENTS s EPOCH 4").told();
    assert_eq!(told, (number, vec![]));
    assert_eq!(new.run("RLOCK.EVENTS s").told().0, number);
}

#[test]
fn a_life_is_another_after_the_grace_and_after_a_restart() {
    let mut server = Server::start();
    let mut lives = Vec::new();
    for _ in 0..2 {
        let mut life = server.connect();
        lives.push(life.run("RLOCK.EVENTS s").told().0);
        // A session without holds ends with its connection.
        life.close();
        until("it is over", || server.info_number("rlock_sessions") == 0);
    }
    server.restart();
    lives.push(server.connect().run("RLOCK.EVENTS s").told().0);
    assert!(lives.is_sorted_by(|one, next| one < next), "{lives:?}");
}

#[test]
fn a_release_is_told_unless_the_bound_connection_made_it() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let (mut bound, mut other) = (server.connect(), server.connect());
    bound.run("RLOCK.BIND s EPOCH 1").array();
    let releases = [
        ("", "RLOCK.RELEASE k bob"),
        ("READ", "RLOCK.RELEASE k bob READ"),
        ("WRITE", "RLOCK.RELEASE k bob WRITE"),
        ("PERMITS 2 OF 2", "RLOCK.RELEASE k bob PERMITS 2"),
        ("", "RLOCK.MRELEASE bob 1 k"),
    ];
    for (mode, release) in releases {
        for is_bound in [true, false] {
            let take = format!("RLOCK.ACQUIRE k bob 30000 {mode} SESSION s");
            let token = bound.run(take).held().1;
            let by = if is_bound { &mut bound } else { &mut other };
            by.run(release).int();
            let (_, events) = life.run("RLOCK.EVENTS s").told();
            if is_bound {
                assert_eq!(events, [], "{release}");
                continue;
            }
            let told: Vec<_> = events
                .iter()
                .map(|of| (&*of.what, &of.value, of.token))
                .collect();
            assert_eq!(
                told,
                [("lost k bob", &"released".into(), token)],
                "{release}"
            );
        }
    }
    // A transaction is the connection's own. The server tells no module who runs a script.
    let script = "EVAL return(redis.call('RLOCK.RELEASE',KEYS[1],'bob')) 1 k";
    for (release, is_told) in [
        (&["MULTI", "RLOCK.RELEASE k bob", "EXEC"][..], false),
        (&[script], true),
    ] {
        bound.run("RLOCK.ACQUIRE k bob 30000 SESSION s").held();
        let replies = bound.pipeline(release);
        assert_eq!(server.run("EXISTS k"), 0, "{replies:?}");
        let (_, events) = life.run("RLOCK.EVENTS s").told();
        assert_eq!(!events.is_empty(), is_told, "{release:?}: {events:?}");
    }
    // One of two holds given back is no loss.
    for count in [1, 2] {
        let held = bound.run("RLOCK.ACQUIRE k bob 30000 SESSION s").held();
        assert_eq!(held.0, count);
    }
    assert_eq!(other.let_go("k", "bob"), 1);
    assert_eq!(life.run("RLOCK.EVENTS s").told().1, []);
}

#[test]
fn a_session_that_comes_back_within_its_grace_keeps_its_holds_and_its_news() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.connect();
    life.run("RLOCK.EVENTS s GRACE 5000").events();
    for name in ["k", "broken-before", "broken-after"] {
        conn.take_for(name, "bob", "s");
    }
    conn.run("RLOCK.BREAK broken-before");
    let id = life.id();
    life.close();
    until("the connection is gone", || {
        server.run(format!("CLIENT LIST ID {id}")).text().is_empty()
    });
    conn.run("RLOCK.BREAK broken-after");

    let mut again = server.connect();
    let told = again.run("RLOCK.EVENTS s GRACE 5000").events();
    let expected = ["broken-before", "broken-after"];
    let expected = expected.map(|name| (format!("lost {name} bob"), "broken".into()));
    assert_eq!(told, expected);
    // Another session, whose grace begins later and is as long, serves as the clock.
    let mut clock = server.connect();
    clock.run("RLOCK.EVENTS clock GRACE 5000").events();
    clock.take_for("ticking", "dave", "clock");
    clock.close();
    until("a grace has passed", || server.holder("ticking").is_none());
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    // And it is as good as new.
    conn.queue("k", "carol", "s");
    conn.let_go("k", "bob");
    again.run("RLOCK.EVENTS s").granted("k", "carol");
    again.close();
    until("the hold went with it", || server.holder("k").is_none());
}

/// No command ends a session, so one that nobody comes back to must not stay for its grace.
#[test]
fn a_session_without_connection_ends_with_its_last_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    let _other = server.session_connection("other");
    for last in [
        "RLOCK.RELEASE k bob",
        "RLOCK.BREAK k",
        "DEL k",
        "RLOCK.RENEW k bob 30000 SESSION other",
        "PEXPIRE k 1",
        "SET k v",
    ] {
        let mut life = life_with_a_long_grace(&server);
        for name in ["k", "first"] {
            conn.take_for(name, "bob", "s");
        }
        let id = life.id();
        life.close();
        until("the connection is gone", || {
            server.run(format!("CLIENT LIST ID {id}")).text().is_empty()
        });
        conn.let_go("first", "bob");
        assert_eq!(server.info_number("rlock_sessions"), 2, "{last}");
        assert!(!conn.run(last).is_error(), "{last}");
        if last.starts_with("SET") {
            // Nothing announces that: the next command finds it.
            assert!(conn.run("RLOCK.RENEW k carol 30000").is_error());
        }
        until(&format!("it is over after {last}"), || {
            server.info_number("rlock_sessions") == 1
        });
        conn.run("DEL k");
    }
}

#[test]
fn a_connection_that_was_no_session_connection_ends_nothing() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.take_for("k", "bob", "s");
    conn.queue("k", "carol", "s");
    conn.close();
    life.settle();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    assert_eq!(server.waiting_owners("k"), ["carol"]);
    life.let_go("k", "bob");
    life.run("RLOCK.EVENTS s").granted("k", "carol");
}

/// The session connection is killed in the turn of the grant, by a command right behind the
/// release.
#[test]
fn a_grant_to_a_session_killed_in_the_same_turn_goes_to_the_next_without_a_grace() {
    for transaction in [false, true] {
        for grace in ["0", ONE_HOUR] {
            let server = Server::start();
            let mut alice = server.connect();
            let (mut life, id) = listener(&server, &format!("GRACE {grace}"));
            alice.take("k", "alice");
            alice.queue("k", "bob", "s");
            let mut carol = server.wait_in_queue("k", "carol");
            let (release, kill) = ("RLOCK.RELEASE k alice", format!("CLIENT KILL ID {id}"));
            if transaction {
                alice.pipeline(&["MULTI", release, &kill, "EXEC"]);
            } else {
                alice.pipeline(&[release, &kill]);
            }
            life.read_to_end();
            if grace != "0" {
                carol.expect_nothing_yet();
                assert_eq!(server.holder("k").as_deref(), Some("bob"));
                continue;
            }
            assert_eq!(carol.read().held().0, 1);
            assert_eq!(server.holder("k").as_deref(), Some("carol"));
        }
    }
}

/// The hold ends as soon as a write is allowed, and that is the owner's next command: were it
/// entered again instead, the new entry would end as soon as it was told.
#[test]
fn a_hold_whose_session_was_killed_in_the_same_turn_is_not_entered_again() {
    let server = Server::start();
    let mut conn = server.connect();
    for mode in ["", "READ", "WRITE"] {
        let mut life = server.session_connection("s");
        let taken = conn.run(format!("RLOCK.ACQUIRE k bob 30000 {mode} SESSION s"));
        let (_, before) = taken.held();
        let kill = format!("CLIENT KILL ID {}", life.id());
        let taking = format!("RLOCK.ACQUIRE k bob 30000 {mode}");
        let replies = conn.pipeline(&["MULTI", &kill, &taking, "EXEC"]);
        let (count, token) = replies.last().expect("of EXEC").array()[1].held();
        assert_eq!(count, 1, "{mode}");
        assert!(token > before, "{mode}");
        until("the session is over", || {
            server.info_number("rlock_sessions") == 0
        });
        assert_eq!(conn.run(format!("RLOCK.RENEW k bob 30000 {mode}")), 1);
        assert_eq!(conn.run(format!("RLOCK.RELEASE k bob {mode}")), 0);
        assert_eq!(conn.run("EXISTS k {k}:bob:rwlock_timeout:1"), 0);
    }
}

#[test]
fn a_hold_whose_session_was_killed_in_the_same_turn_is_over() {
    let server = Server::start();
    let mut conn = server.connect();
    for (asked, told) in [
        ("RLOCK.RENEW k bob 30000", Reply::Int(0)),
        ("RLOCK.MRENEW bob 30000 1 k", Reply::Int(0)),
        ("RLOCK.RELEASE k bob", Reply::Null),
        ("RLOCK.MRELEASE bob 1 k", Reply::Int(0)),
        // The hold that was meant has ended, and no other is broken.
        ("RLOCK.BREAK k", Reply::Int(1)),
    ] {
        let mut life = server.session_connection("s");
        conn.take_for("k", "bob", "s");
        let kill = format!("CLIENT KILL ID {}", life.id());
        let replies = conn.pipeline(&["MULTI", &kill, asked, "EXEC"]);
        let replies = replies.last().expect("of EXEC").array();
        assert_eq!(replies[1], told, "{asked}");
        assert!(server.holder("k").is_none(), "{asked}");
    }
}

/// The operator wants to break the present hold, and not the one that its end grants.
#[test]
fn a_break_behind_the_kill_of_the_holders_session_ends_no_other_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    for mode in ["", "WRITE"] {
        let mut life = server.session_connection("s");
        conn.run(format!("RLOCK.ACQUIRE k bob 30000 {mode} SESSION s"))
            .held();
        let wait = format!("RLOCK.ACQUIRE k carol 30000 {mode} BLOCK 0");
        let mut carol = server.blocked_in(&wait);
        let kill = format!("CLIENT KILL ID {}", life.id());
        let replies = conn.pipeline(&[&kill, "RLOCK.BREAK k"]);
        assert_eq!(replies[1], 1, "{mode}");
        carol.read().held();
        assert_eq!(conn.run(format!("RLOCK.RELEASE k carol {mode}")), 0);
        assert_eq!(server.info_number("rlock_breaks"), 0);
    }
}

#[test]
fn a_break_behind_the_kill_of_one_readers_session_ends_the_others() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.run("RLOCK.ACQUIRE k bob 30000 READ SESSION s").held();
    conn.run("RLOCK.ACQUIRE k carol 30000 READ").held();
    let mut dave = server.blocked_in("RLOCK.ACQUIRE k dave 30000 WRITE BLOCK 0");
    let kill = format!("CLIENT KILL ID {}", life.id());
    let replies = conn.pipeline(&[&kill, "RLOCK.BREAK k"]);
    assert_eq!(replies[1], 1);
    dave.read().held();
    assert_eq!(conn.run("RLOCK.RENEW k carol 30000 READ"), 0);
}

/// The session connection's socket is closed and the release arrives while the server does not run:
/// it finds both in one turn, in either order. The wait has left, or it was granted and told.
#[test]
fn a_session_connection_closed_in_the_turn_of_the_grant_is_told_what_came_of_it() {
    for release_first in [false, true] {
        for listening in [false, true] {
            let server = Server::start();
            let mut alice = server.connect();
            let mut life = life_with_a_long_grace(&server);
            alice.take_for("kept", "bob", "s");
            if listening {
                life.send(format!("RLOCK.EVENTS s BLOCK 0 GRACE {ONE_HOUR}"));
                life.expect_nothing_yet();
            }
            alice.take("k", "alice");
            alice.queue("k", "bob", "s");
            server.freeze();
            if release_first {
                alice.send("RLOCK.RELEASE k alice");
                life.close();
            } else {
                life.close();
                alice.send("RLOCK.RELEASE k alice");
            }
            server.thaw();
            assert_eq!(alice.read(), 0);
            until("the connection is gone", || {
                server.run("RLOCK.SESSIONS").array()[0].get("listening") == &0
            });
            let (_, events) = server
                .connect()
                .run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}"))
                .told();
            let told: Vec<_> = events.iter().map(|event| &*event.what).collect();
            let is_held = server.holder("k").as_deref() == Some("bob");
            let expected = if is_held {
                "granted k bob"
            } else {
                "left k bob"
            };
            assert_eq!(told, [expected], "{release_first} {listening}");
        }
    }
}

#[test]
fn a_granted_lock_can_be_released_before_its_event_is_fetched() {
    let server = Server::start();
    let mut alice = server.connect();
    let life = server.session_connection("s");
    alice.take("k", "alice");
    alice.queue("k", "bob", "s");
    alice.let_go("k", "alice");
    assert_eq!(alice.let_go("k", "bob"), 0);
    let token = alice.take("k", "bob"); // without the session
    life.close();
    alice.settle();
    let info = server.run("RLOCK.INFO k");
    assert_eq!(
        (info.get("owner"), info.get("token")),
        (&"bob".into(), &token.into())
    );
}

#[test]
fn thousands_of_waiters_and_holds_go_with_their_session() {
    const EACH: usize = 10_000;
    let server = Server::start();
    let mut conn = server.connect();
    let mut alice = server.connect();
    let life = server.session_connection("s");
    alice.run("RLOCK.ACQUIRE k alice 600000").held();
    let wait = |i| format!("RLOCK.ACQUIRE k waiter{i} 30000 QUEUE 600000 SESSION s");
    let take = |i| format!("RLOCK.ACQUIRE held{i} bob 600000 SESSION s");
    for from in (0..EACH).step_by(1000) {
        let waits: Vec<_> = (from..from + 1000).map(wait).collect();
        conn.pipeline(&waits).iter().for_each(|reply| {
            reply.queued();
        });
        let takes: Vec<_> = (from..from + 1000).map(take).collect();
        conn.pipeline(&takes).iter().for_each(|reply| {
            reply.held();
        });
    }
    assert_eq!(server.info_number("rlock_waiters"), 10_000);
    let mut carol = server.wait_in_queue("held9999", "carol");
    life.close();
    carol.read().held();
    until("all the others are free", || alice.run("DBSIZE") == 2);
    assert_eq!(server.info_number("rlock_waiters"), 0);
    assert_eq!(server.info_number("rlock_sessions"), 0);
    assert_eq!(alice.let_go("k", "alice"), 0);
    assert_eq!(server.holder("k"), None);
}

#[test]
fn nothing_is_released_while_clients_are_paused() {
    let server = Server::builder()
        .config("repl-ping-replica-period 3600")
        .start();
    let _feed = Feed::of(&server); // without a replica the offset would not count
    let mut conn = server.connect();
    let life = server.session_connection("s");
    conn.take_for("k", "bob", "s");
    conn.take("granted", "alice");
    conn.queue("granted", "bob", "s");
    conn.let_go("granted", "alice");
    let mut carol = server.wait_in_queue("k", "carol");
    let mut dave = server.wait_in_queue("granted", "dave");
    conn.run("CLIENT PAUSE 3600000 WRITE");
    let offset = server.info_number("master_repl_offset");
    life.close();
    until("the session is over", || {
        server.info_number("rlock_sessions") == 0
    });
    carol.expect_nothing_yet();
    dave.expect_nothing_yet();
    assert_eq!(server.info_number("master_repl_offset"), offset);
    assert_eq!(conn.run("CLIENT UNPAUSE"), "OK");
    carol.read().held();
    dave.read().held();
}

#[test]
fn a_queued_wait_that_ends_during_a_pause_is_told() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut listener, _) = listener(&server, "");
    conn.take("k", "alice");
    conn.run("RLOCK.ACQUIRE k bob 30000 QUEUE 50 SESSION s")
        .queued();
    conn.run("CLIENT PAUSE 300 WRITE");
    assert_eq!(listener.read().event().0, "timeout k bob");
}

// --- Taking over --------------------------------------------------------------------------------

#[test]
fn a_second_connection_takes_the_session_over() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut first, _) = listener(&server, "");
    conn.take_for("held", "dave", "s");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    let mut second = server.session_connection("s");
    let error = first.read_promptly().error();
    assert!(error.starts_with("TAKENOVER "), "{error}");
    assert_eq!(first.run("PING"), "PONG");
    let second_id = second.id();
    let in_queue = server.run("RLOCK.INFO k");
    assert_eq!(
        in_queue.get("queue").array()[0].get("client-id"),
        &second_id
    );

    // The end of the first means nothing any more.
    first.close();
    conn.settle();
    assert_eq!(server.holder("held").as_deref(), Some("dave"));
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    conn.let_go("k", "alice");
    second.run("RLOCK.EVENTS s").granted("k", "bob");
    second.close();
    until("all went with the second", || conn.run("DBSIZE") == 0);
}

#[test]
fn a_second_connection_gets_what_the_first_has_not_fetched() {
    let server = Server::start();
    let mut conn = server.connect();
    let first = server.session_connection("s");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    conn.let_go("k", "alice");
    let mut second = server.connect();
    second.run("RLOCK.EVENTS s").granted("k", "bob");
    first.close();
    conn.settle();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    no_events(&mut second);

    // Back and forth: the last caller has it.
    let mut third = server.connect();
    no_events(&mut third);
    no_events(&mut second);
    third.close();
    conn.settle();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    second.close();
    until("the hold is gone", || server.holder("k").is_none());
}

/// The first listener is woken for an event and has not yet replied when the session is another's.
#[test]
fn a_take_over_in_the_turn_of_an_event_gets_it() {
    let server = Server::start();
    let mut conn = server.connect();
    let (mut first, _) = listener(&server, "");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    let replies = conn.pipeline(&["RLOCK.RELEASE k alice", "RLOCK.EVENTS s"]);
    replies[1].granted("k", "bob");
    let error = first.read().error();
    assert!(error.starts_with("TAKENOVER "), "{error}");
    first.close();
    conn.settle();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    no_events(&mut conn);
}

#[test]
fn renew_takes_a_hold_along_to_another_session() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut first = server.session_connection("s");
    let mut second = server.session_connection("t");
    let token = conn.take("k", "bob"); // nobody's yet
    let of_l = conn.take_for("l", "bob", "s");
    assert_eq!(conn.run("RLOCK.RENEW k bob 30000 SESSION s"), 1);
    let renew = format!("RLOCK.RENEW k bob 30000 TOKEN {} SESSION t", token - 1);
    assert_eq!(conn.run(renew), 0, "not that hold: it stays where it is");
    assert_eq!(conn.run("RLOCK.RENEW l bob 30000 SESSION t"), 1);
    assert_eq!(conn.run("RLOCK.RENEW l bob 30000"), 1, "it stays with t");
    let (_, told) = first.run("RLOCK.EVENTS s").told();
    let [taken] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!((&*taken.what, taken.token), ("lost l bob", of_l));
    assert_eq!((&taken.value, &*taken.mode), (&"taken".into(), "plain"));
    assert_eq!(second.run("RLOCK.EVENTS t").told().1, []);
    first.close();
    until("k went with s", || server.holder("k").is_none());
    conn.settle();
    assert_eq!(server.holder("l").as_deref(), Some("bob"));
    second.close();
    until("l went with t", || server.holder("l").is_none());
}

#[test]
fn the_reply_of_renew_in_the_turn_in_which_the_session_ends_is_true() {
    let server = Server::start();
    let mut sleeper = server.connect();
    for mode in ["", " READ", " WRITE"] {
        for _ in 0..5 {
            let mut conn = server.connect();
            let (first, second) = (
                server.session_connection("s"),
                server.session_connection("t"),
            );
            let taken = conn.run(format!("RLOCK.ACQUIRE k bob 30000{mode} SESSION s"));
            assert_eq!(taken.held().0, 1);
            // Both arrive while the server does something else, and it sees them in one turn, the
            // close first or last; without another command the hold ends at the end of the turn.
            sleeper.send("DEBUG SLEEP 0.05");
            first.close();
            let renewed = conn.run(format!("RLOCK.RENEW k bob 30000{mode} SESSION t"));
            sleeper.read();
            conn.settle();
            assert_eq!(server.run("EXISTS k"), renewed, "what RENEW said{mode}");
            second.close();
            until("k went with t", || server.run("EXISTS k") == 0);
        }
    }
}

#[test]
fn a_reentry_for_another_session_moves_the_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut first = server.session_connection("s");
    let mut second = server.session_connection("t");
    conn.take_for("k", "bob", "s");
    first.send("RLOCK.EVENTS s BLOCK 0");
    first.expect_nothing_yet();
    conn.run("RLOCK.ACQUIRE k bob 30000 SESSION t").held();
    let told = first.read().event();
    assert_eq!(told, ("lost k bob".to_owned(), "taken".into()));
    first.close();
    conn.settle();
    assert_eq!(server.run("HGET k bob"), "2");
    conn.run("RLOCK.BREAK k");
    let told = second.run("RLOCK.EVENTS t").event();
    assert_eq!(told, ("lost k bob".to_owned(), "broken".into()));
}

#[test]
fn a_scripts_hold_belongs_to_the_session_with_which_it_is_entered_again() {
    let server = Server::start();
    let mut conn = server.connect();
    let life = server.session_connection("s");
    conn.pipeline(&["HSET k bob 1", "PEXPIRE k 30000"]);
    assert_eq!(conn.run("RLOCK.ACQUIRE k bob 30000 SESSION s").held().0, 2);
    life.close();
    until("the hold is gone", || server.holder("k").is_none());
}

#[test]
fn once_moves_a_place_from_blocked_to_queued_and_back() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.take("k", "alice");
    let mut blocked = server.wait_in_queue("k", "bob");
    assert_eq!(conn.queue("k", "carol", "s"), 2);
    let queue_once = "RLOCK.ACQUIRE k bob 90000 QUEUE 0 SESSION s ONCE";
    assert_eq!(conn.run(queue_once).queued(), 1, "the place is kept");
    assert!(blocked.read().refused() > 20_000, "the old one is told");
    no_events(&mut life);
    assert_eq!(
        conn.run(queue_once).queued(),
        1,
        "the same session: no news"
    );
    no_events(&mut life);

    let mut blocked = server.blocked_in("RLOCK.ACQUIRE k bob 60000 BLOCK 0 ONCE");
    let (event, ttl) = life.run("RLOCK.EVENTS s").event();
    assert_eq!(event, "timeout k bob");
    assert!(ttl.int() > 20_000);
    assert_eq!(server.waiting_owners("k"), ["bob", "carol"]);
    conn.let_go("k", "alice");
    blocked.read().held();
    let lease = conn.run("PTTL k").int();
    assert!((50_000..=60_000).contains(&lease), "{lease}");
    // Its wait is no session's any more, and neither is its hold.
    life.close();
    conn.settle();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    assert!(server.waiting_owners("k").is_empty());
}

#[test]
fn once_moves_a_place_from_one_session_to_another() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut first = server.session_connection("s");
    let mut second = server.session_connection("t");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    let once = "RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION t ONCE";
    assert_eq!(conn.run(once).queued(), 1);
    assert_eq!(first.run("RLOCK.EVENTS s").event().0, "timeout k bob");
    first.close();
    conn.settle();
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    conn.let_go("k", "alice");
    second.run("RLOCK.EVENTS t").granted("k", "bob");
}

// --- Blocked, and a session's -------------------------------------------------------------------

#[test]
fn a_hold_waited_for_on_a_blocked_connection_can_be_a_sessions() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut life = server.session_connection("s");
    alice.take("k", "alice");
    let mut bob = server.blocked_in("RLOCK.ACQUIRE k bob 30000 BLOCK 0 SESSION s");
    alice.let_go("k", "alice");
    bob.read().held();
    bob.close();
    no_events(&mut life); // the reply told it
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    life.close();
    until("the hold went with the session", || {
        server.holder("k").is_none()
    });
}

#[test]
fn a_blocked_wait_ends_with_its_session_and_with_its_connection() {
    let server = Server::start();
    let mut alice = server.connect();
    let life = life_with_a_long_grace(&server);
    alice.take("k", "alice");
    let wait = |owner| format!("RLOCK.ACQUIRE k {owner} 30000 BLOCK 0 SESSION s");
    let gone = server.blocked_in(&wait("gone"));
    let mut bob = server.blocked_in(&wait("bob"));
    let mut carol = server.wait_in_queue("k", "carol");
    gone.close();
    until("one has left", || {
        server.waiting_owners("k") == ["bob", "carol"]
    });
    life.close();
    let error = bob.read().error();
    assert!(error.starts_with("NOSESSION "), "{error}");
    assert_eq!(server.waiting_owners("k"), ["carol"]);
    alice.let_go("k", "alice");
    carol.read().held();
}

#[test]
fn a_session_connection_can_wait_in_a_queue_itself() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut life = life_with_a_long_grace(&server);
    let id = life.id();
    alice.take("k", "alice");
    life.send("RLOCK.ACQUIRE k bob 30000 BLOCK 0 SESSION s");
    life.expect_nothing_yet();
    alice.let_go("k", "alice");
    life.read().held();
    alice.take("l", "alice");
    life.send("RLOCK.ACQUIRE l bob 30000 BLOCK 0 SESSION s");
    life.expect_nothing_yet();
    let mut carol = server.wait_in_queue("l", "carol");
    // It is granted, and killed in the same turn.
    alice.pipeline(&["RLOCK.RELEASE l alice", &format!("CLIENT KILL ID {id}")]);
    carol.read().held();
    assert_eq!(
        server.holder("k").as_deref(),
        Some("bob"),
        "within the grace"
    );
}

#[test]
fn a_sessions_blocked_waiter_killed_in_the_turn_of_its_grant_has_lost_nothing() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut life = server.session_connection("s");
    alice.take("k", "alice");
    let mut bob = server.connect();
    let id = bob.id();
    bob.send("RLOCK.ACQUIRE k bob 30000 BLOCK 0 SESSION s");
    bob.expect_nothing_yet();
    let mut carol = server.wait_in_queue("k", "carol");
    alice.pipeline(&["RLOCK.RELEASE k alice", &format!("CLIENT KILL ID {id}")]);
    carol.read().held();
    no_events(&mut life);
    assert_eq!(server.info_number("rlock_session_holds"), 0);
}

// --- What replicas and the disk see -------------------------------------------------------------

#[test]
fn a_hand_over_by_the_end_of_a_session_is_one_command() {
    let server = Server::start();
    let mut conn = server.connect();
    let life = server.session_connection("s");
    conn.take_for("k", "bob", "s");
    let mut carol = server.wait_in_queue("k", "carol");
    let mut feed = Feed::of(&server);
    life.close();
    let (_, token) = carol.read().held();
    let end = end_of(&mut conn, "k");
    let grant = grant("k", "carol", token, end);
    assert_eq!(feed.news(), [grant, unlock_message("k")]);
}

#[test]
fn the_end_of_a_session_without_waiters_is_replicated_as_a_last_release() {
    let server = Server::start();
    let mut conn = server.connect();
    let life = server.session_connection("s");
    conn.take_for("k", "bob", "s");
    conn.run("RLOCK.ACQUIRE k bob 30000").held();
    let mut feed = Feed::of(&server);
    life.close();
    until("the hold is gone", || server.holder("k").is_none());
    let expected = ["DEL k".to_owned(), unlock_message("k")];
    assert_eq!(feed.news(), expected);
}

#[test]
fn several_holds_that_end_together_are_whole_on_the_disk() {
    let server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always")
        .start();
    let mut conn = server.connect();
    let life = server.session_connection("s");
    let names = ["k0", "k1", "k2"];
    let mut waiting = Vec::new();
    for name in names {
        conn.take_for(name, "bob", "s");
        waiting.push(server.wait_in_queue(name, "carol"));
    }
    let before = aof(&server).len();
    life.close();
    let tokens: Vec<_> = waiting
        .iter_mut()
        .map(|conn| conn.read().held().1)
        .collect();
    let written = aof(&server).split_off(before);
    // No lock is free in between.
    assert!(
        written.iter().all(|command| !command.starts_with("DEL")),
        "{written:?}"
    );
    for (name, token) in names.into_iter().zip(tokens) {
        let grant = grant(name, "carol", token, end_of(&mut conn, name));
        assert!(written.contains(&grant), "{written:?}");
    }
}

#[test]
fn sessions_and_waits_themselves_are_not_replicated() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    let mut feed = Feed::of(&server);
    let mut life = server.session_connection("s");
    conn.queue("k", "bob", "s");
    conn.run("RLOCK.ACQUIRE k carol 1000 QUEUE 1 SESSION s")
        .queued();
    assert_eq!(next_events(&mut life)[0].0, "timeout k carol");
    conn.run("RLOCK.ACQUIRE k bob 1000 QUEUE 0 SESSION s ONCE")
        .queued();
    life.close();
    until("the session is over", || {
        server.info_number("rlock_sessions") == 0
    });
    assert_eq!(feed.news(), Vec::<String>::new());
}

#[test]
fn a_restart_leaves_holds_without_a_session() {
    let mut server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always")
        .start();
    let mut life = server.session_connection("s");
    life.take_for("k", "bob", "s");
    server.kill();
    server.restart();
    assert_eq!(server.info_number("rlock_sessions"), 0);
    let mut conn = server.connect();
    let error = conn.run("RLOCK.RENEW k bob 30000 SESSION s").error();
    assert!(error.starts_with("NOSESSION "), "{error}");
    let life = server.session_connection("s");
    assert_eq!(conn.run("RLOCK.RENEW k bob 30000 SESSION s"), 1);
    life.close();
    until("the hold went with the session", || {
        server.holder("k").is_none()
    });
}

// --- Everything at once -------------------------------------------------------------------------

/// A client that is killed while it waits for events does not know whether it holds the lock, and
/// gives it back in case it does.
#[test]
fn one_owner_works_at_a_time_whichever_session_connection_is_killed() {
    let server = Server::start();
    work_while_killed(&server, 8, 300, queue_and_work);
}

/// One round of a client. Its session connection may be killed at any moment; its holds stay for a
/// day, so it may go on working.
fn queue_and_work(server: &Server, number: usize, tokens: &Mutex<Vec<i64>>) {
    let mut work = server.connect();
    let mut life = server.connect();
    let events = format!("RLOCK.EVENTS s{number} GRACE {ONE_HOUR}");
    // These events are of a round before.
    if life.try_run(&events).is_ok() {
        let options = format!("QUEUE {} SESSION s{number}", 20 + number);
        let acquire = format!("RLOCK.ACQUIRE k owner-{number} 60000 {options}");
        let reply = work.run(acquire);
        let token = match &reply {
            Reply::Error(_) => None, // killed already
            reply if reply.ints()[0] > 0 => Some(reply.ints()[1]),
            _ => heard_of_grant(&mut life, &events),
        };
        if let Some(token) = token {
            assert_eq!(work.run("INCR inside"), 1, "somebody else is inside");
            tokens.lock().unwrap().push(token);
            assert_eq!(work.run("DECR inside"), 0);
        }
    }
    work.run(format!("RLOCK.RELEASE k owner-{number}"));
}

fn heard_of_grant(life: &mut Conn, events: &str) -> Option<i64> {
    let told = life.try_run(&format!("{events} BLOCK 0")).ok()?;
    let (event, value) = told.event();
    event.starts_with("granted ").then(|| value.int())
}

// --- A process that is killed -------------------------------------------------------------------

/// A process that holds `name` for a session of the same name, by this call of EVENTS.
fn victim(server: &Server, name: &str, events: &str) -> Child {
    let child = Command::new(env!("CARGO_BIN_EXE_victim"))
        .arg(server.address().to_string())
        .arg(format!("RLOCK.EVENTS {name}"))
        .arg(format!("RLOCK.ACQUIRE {name} victim 30000 SESSION {name}"))
        .arg(format!("RLOCK.EVENTS {name} {events}"))
        .spawn()
        .expect("a process");
    until("the victim holds the lock", || {
        server.holder(name).is_some()
    });
    child
}

/// How long after the process was killed the next waiter has the lock.
fn delay_after_kill(server: &Server, name: &str, events: &str) -> Duration {
    let mut victim = victim(server, name, events);
    let mut next = server.wait_in_queue(name, "next");
    let begun = Instant::now();
    victim.kill().expect("our child"); // SIGKILL
    next.read().held();
    let took = begun.elapsed();
    victim.wait().expect("our child");
    took
}

#[test]
fn the_lock_of_a_killed_process_is_handed_over_within_fifty_milliseconds() {
    let server = Server::start();
    for events in ["BLOCK 0", "GRACE 0"] {
        on_time(events, &server, Duration::from_millis(50), |round| {
            delay_after_kill(&server, &format!("{}{round}", &events[..1]), events)
        });
    }
}

// --- Whose a session is, and how much there may be of it ----------------------------------------

/// A connection of a user who may do everything.
fn of_user(server: &Server, name: &str) -> Conn {
    server.run(format!("ACL SETUSER {name} on nopass ~* &* +@all"));
    let mut conn = server.connect();
    assert_eq!(conn.run(format!("AUTH {name} anything")), "OK");
    conn
}

const NOT_THEIRS: &str = "NOPERM this session belongs to another ACL user, who began it";

#[test]
fn a_session_belongs_to_the_user_who_began_it() {
    let server = Server::start();
    let mut mallory = of_user(&server, "mallory");
    let mut life = of_user(&server, "alice");
    life.run("RLOCK.EVENTS s").events();
    let mut colleague = of_user(&server, "alice");
    colleague.take_for("k", "bob", "s");
    mallory.take("own", "mallory");
    for transaction in [false, true] {
        for command in [
            "RLOCK.EVENTS s",
            "RLOCK.EVENTS s BLOCK 0",
            "RLOCK.ACQUIRE free mallory 1000 SESSION s",
            "RLOCK.ACQUIRE k mallory 1000 QUEUE 0 SESSION s",
            "RLOCK.ACQUIRE k mallory 1000 BLOCK 0 SESSION s",
            "RLOCK.RENEW own mallory 30000 SESSION s",
            "RLOCK.RENEW k bob 1 SESSION s",
            "RLOCK.MACQUIRE mallory 1000 2 free too SESSION s",
            "RLOCK.MRENEW mallory 30000 1 own SESSION s",
        ] {
            let error = if transaction {
                let replies = mallory.pipeline(&["MULTI", command, "EXEC"]);
                replies[2].array()[0].error()
            } else {
                mallory.run(command).error()
            };
            assert_eq!(error, NOT_THEIRS, "{command}");
        }
    }
    assert_eq!(mallory.run("EXISTS free too"), 0);
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    assert_eq!(server.info_number("rlock_session_holds"), 1);
    // The one who calls counts: another connection of hers, and this one under another name.
    colleague.run("RLOCK.EVENTS s").events();
    assert_eq!(life.run("AUTH mallory anything"), "OK");
    assert_eq!(life.run("RLOCK.EVENTS s").error(), NOT_THEIRS);
    assert_eq!(colleague.run("RLOCK.RENEW k bob 30000 SESSION s"), 1);
    // When it is over, its name is anybody's.
    colleague.close();
    until("the session is over", || {
        server.info_number("rlock_sessions") == 0
    });
    mallory.run("RLOCK.EVENTS s").events();
}

#[test]
fn within_its_grace_a_session_is_still_its_users() {
    let server = Server::start();
    let mut life = of_user(&server, "alice");
    life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}"))
        .events();
    life.take_for("k", "bob", "s");
    life.close();
    let mut mallory = of_user(&server, "mallory");
    assert_eq!(mallory.run("RLOCK.EVENTS s").error(), NOT_THEIRS);
    of_user(&server, "alice").run("RLOCK.EVENTS s").events();
}

/// Asked for its user, an old server stops where another module calls: that call has none.
#[test]
fn a_script_names_the_sessions_of_its_user_and_another_module_none() {
    let server = Server::start();
    let mut alice = of_user(&server, "alice");
    let mut mallory = of_user(&server, "mallory");
    alice.run("RLOCK.EVENTS s").events();
    let script = "return redis.call('RLOCK.ACQUIRE', KEYS[1], 'bob', 30000, 'SESSION', 's')";
    let eval = |key| ["EVAL", script, "1", key];
    alice.cmd(&eval("by-script")).held();
    let error = mallory.cmd(&eval("free")).error();
    assert!(error.contains(NOT_THEIRS), "{error}");
    let function =
        format!("#!lua name=f\nredis.register_function('f', function(KEYS) {script} end)");
    assert_eq!(alice.cmd(&["FUNCTION", "LOAD", &function]), "f");
    alice.cmd(&["FCALL", "f", "1", "by-function"]).held();

    server.load_c_module("caller");
    let call = "CALLER.CALL RLOCK.ACQUIRE free bob 30000 SESSION s";
    assert_eq!(alice.run(call).error(), NOT_THEIRS);
    let replies = alice.pipeline(&["MULTI", call, "CALLER.CALL RLOCK.EVENTS s", "EXEC"]);
    let replies = replies[3].array();
    assert_eq!(replies[0].error(), NOT_THEIRS);
    assert!(replies[1].error().contains("needs a connection"));
    let script = "return redis.call('CALLER.CALL', 'RLOCK.ACQUIRE', 'free', 'bob', '30000', \
                  'SESSION', 's')";
    let error = alice.cmd(&["EVAL", script, "0"]).error();
    assert!(error.contains(NOT_THEIRS), "{error}");
    alice.run("CALLER.CALL RLOCK.ACQUIRE free bob 30000").held();
    alice.take_for("by-herself", "bob", "s");
}

#[test]
fn no_more_sessions_begin_than_the_option_allows() {
    let server = Server::builder().config("rlock.max-sessions 2").start();
    let mut life = server.session_connection("s");
    let other = server.session_connection("t");
    let mut conn = server.connect();
    let full = "SESSIONSFULL too many sessions, rlock.max-sessions is 2";
    assert_eq!(conn.run("RLOCK.EVENTS u").error(), full);
    assert_eq!(conn.run("RLOCK.EVENTS u BLOCK 0").error(), full);
    life.run("RLOCK.EVENTS s").events(); // one that is there goes on
    other.close();
    until("the other is over", || {
        server.info_number("rlock_sessions") == 1
    });
    conn.run("RLOCK.EVENTS u").events();
    conn.run("CONFIG SET rlock.max-sessions 1");
    life.run("RLOCK.EVENTS s").events();
    conn.run("RLOCK.EVENTS u").events();
}

/// A session that is told something it does not fetch, as often as this.
fn lose_holds(conn: &mut Conn, times: usize) {
    for _ in 0..times {
        conn.take_for("lost", "dave", "s");
        assert_eq!(conn.run("RLOCK.BREAK lost"), 1);
    }
}

#[test]
fn a_session_that_acknowledges_nothing_ends_as_if_its_connection_had_closed() {
    let server = Server::builder()
        .config("rlock.max-events-per-session 10")
        .start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    let (number, _) = life.run("RLOCK.EVENTS s").told();
    conn.take_for("held", "bob", "s");
    for name in ["granted", "waited-for"] {
        conn.take(name, "alice");
        conn.queue(name, "bob", "s");
    }
    conn.let_go("granted", "alice");
    let mut behind = server.wait_in_queue("granted", "carol");
    let wait = "RLOCK.ACQUIRE waited-for erin 30000 BLOCK 0 SESSION s";
    let mut blocked = server.blocked_in(wait);
    lose_holds(&mut conn, 9);
    life.settle();
    assert_eq!(server.info_number("rlock_unacknowledged_events"), 10);
    assert_eq!(server.info_number("rlock_sessions"), 1);

    lose_holds(&mut conn, 1);
    behind.read().held();
    assert!(blocked.read().error().starts_with("NOSESSION "));
    until("all is over", || server.info_number("rlock_sessions") == 0);
    assert!(server.holder("held").is_none());
    assert!(server.waiting_owners("waited-for").is_empty());
    assert_eq!(server.info_number("rlock_unacknowledged_events"), 0);
    assert_eq!(server.info_number("rlock_sessions_overflowed"), 1);
    // The connection is not closed, and may begin anew.
    let error = life.run("RLOCK.ACQUIRE k bob 1000 SESSION s").error();
    assert!(error.starts_with("NOSESSION "), "{error}");
    let (again, events) = life.run("RLOCK.EVENTS s BLOCK 0").told();
    assert!(again > number && events.is_empty(), "{again} {events:?}");
    life.take_for("k", "bob", "s");
}

#[test]
fn a_session_that_ended_so_may_come_back_within_its_grace() {
    let server = Server::builder()
        .config("rlock.max-events-per-session 10")
        .start();
    let mut conn = server.connect();
    let mut life = life_with_a_long_grace(&server);
    let (number, _) = life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}")).told();
    conn.take_for("held", "bob", "s");
    lose_holds(&mut conn, 11);
    until("it was found", || {
        server.info_number("rlock_sessions_overflowed") == 1
    });
    assert_eq!(server.holder("held").as_deref(), Some("bob"));
    let error = conn.run("RLOCK.ACQUIRE k bob 1000 SESSION s").error();
    assert!(error.starts_with("NOSESSION "), "{error}");
    let call = format!("RLOCK.EVENTS s AFTER {number} 0 BLOCK 0");
    let (again, events) = life.run(call).told();
    assert!(again > number && events.is_empty(), "{again} {events:?}");
    assert_eq!(conn.run("RLOCK.RENEW held bob 30000 SESSION s"), 1);
    life.close();
    until("its holds went with it", || server.holder("held").is_none());
}

#[test]
fn a_session_that_listens_bears_any_number_of_events_at_once() {
    const EVENTS: usize = 1000;
    let server = Server::builder()
        .config("rlock.max-events-per-session 10")
        .start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.take("k", "alice");
    for i in 0..EVENTS {
        let wait = format!("RLOCK.ACQUIRE k bob{i} 30000 QUEUE 0 SESSION s");
        conn.run(wait).queued();
    }
    life.send("RLOCK.EVENTS s BLOCK 0");
    life.expect_nothing_yet();
    conn.run("SET k v"); // whoever comes next finds no lock
    assert!(conn.run("RLOCK.RENEW k alice 1").is_error());
    assert_eq!(life.read().events().len(), EVENTS);
    assert_eq!(server.info_number("rlock_sessions"), 1);
    assert_eq!(server.info_number("rlock_sessions_overflowed"), 0);
}

#[test]
fn events_beyond_a_thousand_are_told_by_the_next_calls_at_once() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    for owner in ["a", "b", "c"] {
        let names: Vec<_> = (0..1000).map(|lock| format!("{owner}{lock}")).collect();
        let names = names.join(" ");
        let take = format!("RLOCK.MACQUIRE {owner} 30000 1000 {names} SESSION s");
        conn.run(take).held();
    }
    conn.run("FLUSHALL");
    until("all are told", || {
        server.info_number("rlock_unacknowledged_events") == 3000
    });
    for since in [0, 1000, 2000] {
        let (_, told) = life.run("RLOCK.EVENTS s BLOCK 0").told();
        let seqs = told.iter().map(|event| event.seq);
        assert!(seqs.eq(since + 1..=since + 1000), "{since}: {told:?}");
    }
    no_events(&mut life);
}
