//! Waits that could never end are refused, and no others.

use std::thread;
use std::time::Duration;

use rlock_tests::{Conn, Server, patience, until};

/// `owner` asks for `name` and would have to wait for ever: the circle in words, or none if the
/// wait begins.
fn asks(conn: &mut Conn, name: &str, owner: &str) -> Option<String> {
    let reply = conn.run(format!(
        "RLOCK.ACQUIRE {name} {owner} 30000 QUEUE 0 SESSION s"
    ));
    if reply.is_error() {
        return Some(reply.error());
    }
    reply.queued();
    None
}

#[track_caller]
fn waits(conn: &mut Conn, name: &str, owner: &str) {
    let refused = asks(conn, name, owner);
    assert_eq!(refused, None, "{owner} may wait for {name}");
}

#[track_caller]
fn is_refused(conn: &mut Conn, name: &str, owner: &str) -> String {
    let refused = asks(conn, name, owner);
    let error = refused.unwrap_or_else(|| panic!("{owner} waits for {name}, for ever"));
    assert!(error.starts_with("DEADLOCK "), "{error}");
    error
}

/// The session connection of `s`, and each of the locks held by the owner beside it.
fn held(server: &Server, holds: &[(&str, &str)]) -> Conn {
    let mut conn = server.session_connection("s");
    for (name, owner) in holds {
        conn.take(name, owner);
    }
    conn
}

#[test]
fn two_owners_that_wait_for_each_other() {
    for (first, second) in [
        ("BLOCK 0", "BLOCK 0"),
        ("BLOCK 60000", "QUEUE 0 SESSION s"),
        ("QUEUE 60000 SESSION s", "BLOCK 60000"),
        ("QUEUE 0 SESSION s", "QUEUE 60000 SESSION s"),
    ] {
        let server = Server::start();
        let mut conn = held(&server, &[("x", "alice"), ("y", "bob")]);
        let mut waiting = server.connect();
        waiting.send(format!("RLOCK.ACQUIRE y alice 30000 {first}"));
        until("alice waits", || server.waiting_owners("y") == ["alice"]);
        let error = server.run(format!("RLOCK.ACQUIRE x bob 30000 {second}"));
        assert_eq!(
            error.error(),
            "DEADLOCK 2 owners would wait for each other: 'bob' waits for 'alice' at 'x', \
             'alice' waits for 'bob' at 'y'",
            "{first}, {second}"
        );
        // Nothing has happened: bob can go on, and so can alice then.
        assert!(server.waiting_owners("x").is_empty());
        assert_eq!(server.waiting_owners("y"), ["alice"]);
        assert_eq!(server.info_number("rlock_deadlocks_refused"), 1);
        assert_eq!(conn.let_go("y", "bob"), 0);
        assert_eq!(server.holder("y").as_deref(), Some("alice"));
    }
}

#[test]
fn three_owners_in_a_circle() {
    let server = Server::start();
    let mut conn = held(&server, &[("x", "alice"), ("y", "bob"), ("z", "carol")]);
    waits(&mut conn, "y", "alice");
    let mut bob = server.wait_in_queue("z", "bob");
    assert_eq!(
        is_refused(&mut conn, "x", "carol"),
        "DEADLOCK 3 owners would wait for each other: 'carol' waits for 'alice' at 'x', \
         'alice' waits for 'bob' at 'y', 'bob' waits for 'carol' at 'z'"
    );
    conn.let_go("z", "carol");
    bob.read().held();
}

#[test]
fn twenty_owners_in_a_circle() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    for i in 0..20 {
        conn.take(&format!("lock{i}"), &format!("owner{i}"));
    }
    for i in 0..19 {
        waits(&mut conn, &format!("lock{}", i + 1), &format!("owner{i}"));
    }
    let error = is_refused(&mut conn, "lock0", "owner19");
    let start = "DEADLOCK 20 owners would wait for each other: \
                 'owner19' waits for 'owner0' at 'lock0', 'owner0' waits for 'owner1' at 'lock1', ";
    assert!(error.starts_with(start), "{error}");
    assert!(error.ends_with(", and so on"), "{error}");
    assert_eq!(error.matches(" waits for ").count(), 16, "{error}");
    // The chain without its last link is none: all are served in turn.
    for i in (0..20).rev() {
        assert_eq!(conn.let_go(&format!("lock{i}"), &format!("owner{i}")), 0);
    }
    let granted = conn.run("RLOCK.EVENTS s").events();
    assert_eq!(granted.len(), 19, "{granted:?}");
}

#[test]
fn odd_bytes_in_a_circle_are_readable() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    let (odd, long) = (b"\xff\r\n\0'".to_vec(), vec![b'o'; 1024]);
    for (name, owner) in [(&odd, &long), (&long, &odd)] {
        let take: [&[u8]; 4] = [b"RLOCK.ACQUIRE", name, owner, b"30000"];
        conn.cmd(&take).held();
    }
    let wait = |conn: &mut Conn, name: &[u8], owner: &[u8]| {
        let options: [&[u8]; 4] = [b"QUEUE", b"0", b"SESSION", b"s"];
        let wait: [&[u8]; 4] = [b"RLOCK.ACQUIRE", name, owner, b"30000"];
        conn.cmd(&[wait, options].concat())
    };
    wait(&mut conn, &odd, &odd).queued();
    let error = wait(&mut conn, &long, &long).error();
    assert!(error.starts_with("DEADLOCK 2 owners "), "{error}");
    assert!(error.len() < 500, "{error}");
    assert!(!error.contains(|c: char| c.is_control()), "{error:?}");
    assert_eq!(conn.run("PING"), "PONG");
}

#[test]
fn a_wait_that_has_ended_closes_no_circle() {
    let server = Server::start();
    let mut conn = held(&server, &[("x", "alice"), ("y", "bob")]);
    let ends: [&dyn Fn(&mut Conn); 5] = [
        &|conn| {
            conn.run("RLOCK.ACQUIRE y alice 30000 BLOCK 5").refused();
        },
        &|conn| {
            let wait = "RLOCK.ACQUIRE y alice 30000 QUEUE 5 SESSION s";
            conn.run(wait).queued();
            let told = conn.run("RLOCK.EVENTS s BLOCK 0").event();
            assert_eq!(told.0, "timeout y alice");
        },
        &|conn| {
            waits(conn, "y", "alice");
            assert_eq!(conn.run("RLOCK.CANCEL y alice"), 1);
        },
        &|_| server.wait_in_queue("y", "alice").close(),
        &|conn| {
            let life = server.session_connection("other");
            conn.queue("y", "alice", "other");
            life.close();
        },
    ];
    for end in ends {
        end(&mut conn);
        until("the queue is empty", || {
            server.waiting_owners("y").is_empty()
        });
        waits(&mut conn, "x", "bob");
        assert_eq!(conn.run("RLOCK.CANCEL x bob"), 1);
        conn.run("RLOCK.EVENTS s").events();
    }
}

#[test]
fn a_hold_that_has_ended_closes_no_circle() {
    for end in [
        "RLOCK.RELEASE x alice",
        "RLOCK.BREAK x",
        "DEL x",
        "PEXPIREAT x 1",
    ] {
        let server = Server::start();
        let mut conn = held(&server, &[("x", "alice"), ("y", "bob")]);
        waits(&mut conn, "y", "alice");
        conn.pipeline(&[end, "RLOCK.ACQUIRE x carol 30000"]);
        waits(&mut conn, "x", "bob");
    }
}

#[test]
fn a_held_lock_is_reentered_and_never_waited_for() {
    let server = Server::start();
    let mut conn = held(&server, &[("x", "alice"), ("y", "bob")]);
    waits(&mut conn, "y", "alice");
    waits(&mut conn, "y", "carol");
    // Bob re-enters what alice and carol wait for, alice what she has.
    assert_eq!(conn.run("RLOCK.ACQUIRE y bob 30000 BLOCK 0").held().0, 2);
    assert_eq!(conn.run("RLOCK.ACQUIRE x alice 30000 BLOCK 0").held().0, 2);
    // Nobody stands in a queue twice.
    let refused = asks(&mut conn, "y", "alice").expect("alice waits already");
    assert!(refused.starts_with("WAITING "), "{refused}");
    is_refused(&mut conn, "x", "bob");
}

#[test]
fn waiting_for_owners_that_wait_for_nothing_is_no_circle() {
    let server = Server::start();
    let holds = [("x", "alice"), ("y", "bob"), ("z", "carol")];
    let mut conn = held(&server, &holds);
    for (name, owner) in [
        ("x", "dave"),
        ("y", "dave"), // from here on, whoever is behind dave at x waits for bob, too
        ("x", "carol"),
        ("x", "erin"),
        ("z", "erin"),
        ("z", "frank"),
    ] {
        waits(&mut conn, name, owner);
    }
    is_refused(&mut conn, "x", "bob");
}

/// Paul waits for both locks. When the first is free it is his, and he goes on waiting for Xenia,
/// who would wait for him by then.
#[test]
fn a_circle_that_only_a_grant_would_close() {
    let server = Server::start();
    let mut conn = held(&server, &[("l", "henry"), ("m", "xenia")]);
    waits(&mut conn, "l", "paul");
    waits(&mut conn, "m", "paul");
    assert_eq!(
        is_refused(&mut conn, "l", "xenia"),
        "DEADLOCK 2 owners would wait for each other: 'xenia' waits for 'paul' at 'l', \
         'paul' waits for 'xenia' at 'm'"
    );
    conn.run("RLOCK.CANCEL m paul");
    waits(&mut conn, "l", "xenia"); // who waits for Paul, who waits for Henry alone
    is_refused(&mut conn, "m", "paul"); // the same circle, closed from the other side
    conn.run("RLOCK.CANCEL l paul");
    waits(&mut conn, "m", "paul");
    waits(&mut conn, "l", "paul"); // behind Xenia now: she does not wait for him
}

#[test]
fn owners_are_compared_as_text_whatever_connection_and_session_they_use() {
    let server = Server::start();
    let _sessions = [
        server.session_connection("s"),
        server.session_connection("t"),
    ];
    server.connect().take_for("x", "alice", "s");
    server.connect().take("y", "bob");
    server.connect().queue("y", "alice", "t");
    let error = server.run("RLOCK.ACQUIRE x bob 30000 BLOCK 0").error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
    let _other = server.blocked_in("RLOCK.ACQUIRE x Bob 30000 BLOCK 0");
    assert_eq!(server.waiting_owners("x"), ["Bob"]);
}

#[test]
fn the_same_name_in_two_databases_is_two_locks() {
    let server = Server::start();
    let mut conn = held(&server, &[("x", "alice"), ("y", "bob")]);
    let mut other = server.connect();
    other.run("SELECT 1");
    other.take("x", "carol");
    waits(&mut conn, "y", "alice");
    waits(&mut other, "x", "bob"); // carol's
    other.run("RLOCK.CANCEL x bob");

    // Alice waits there for what bob has there, and he asks here for what she has here.
    conn.run("RLOCK.CANCEL y alice");
    other.take("z", "bob");
    waits(&mut other, "z", "alice");
    is_refused(&mut conn, "x", "bob");
    waits(&mut conn, "y", "carol"); // the search has left both connections where they were
    assert_eq!(other.run("HGET z bob"), "1");
    assert_eq!(conn.run("HGET y bob"), "1");
}

#[test]
fn a_lock_that_a_script_took() {
    let server = Server::start();
    let mut conn = held(&server, &[("y", "bob")]);
    conn.pipeline(&["HSET x script 1", "PEXPIRE x 30000"]);
    waits(&mut conn, "y", "script");
    is_refused(&mut conn, "x", "bob");
    // Several owners in one hash, as only other programs write it: one in the circle is enough.
    conn.pipeline(&[
        "DEL x",
        "HSET x nobody 1 script 1 other 1",
        "PEXPIRE x 30000",
    ]);
    is_refused(&mut conn, "x", "bob");
    conn.run("HDEL x script");
    waits(&mut conn, "x", "bob");
}

#[test]
fn once_keeps_a_place_and_begins_no_wait() {
    let server = Server::start();
    let mut conn = held(&server, &[("x", "alice"), ("y", "bob")]);
    waits(&mut conn, "y", "alice");
    let once = "RLOCK.ACQUIRE y alice 30000 QUEUE 0 SESSION s ONCE";
    assert_eq!(conn.run(once).queued(), 1);
    let error = conn.run("RLOCK.ACQUIRE x bob 30000 QUEUE 0 SESSION s ONCE");
    assert!(error.error().starts_with("DEADLOCK "), "{error:?}");
}

#[test]
fn acquire_without_a_wait_is_not_refused() {
    let server = Server::start();
    let mut conn = held(&server, &[("x", "alice"), ("y", "bob")]);
    waits(&mut conn, "y", "alice");
    assert!(conn.run("RLOCK.ACQUIRE x bob 30000").refused() > 20_000);
    let wait = "RLOCK.ACQUIRE x bob 30000 BLOCK 0";
    let replies = conn.pipeline(&["MULTI", wait, "EXEC"]);
    assert!(replies[2].array()[0].refused() > 20_000);
    let queue = "RLOCK.ACQUIRE x bob 30000 QUEUE 0 SESSION s";
    let replies = conn.pipeline(&["MULTI", queue, "EXEC"]);
    let error = replies[2].array()[0].error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
}

/// Only what the new wait adds is followed, not all that its owner waits for already.
#[test]
fn a_wait_costs_the_same_however_many_its_owner_has() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    let mut cost_of_100_more = |waits: usize| {
        let commands = |from: usize, to: usize, verb: &str| -> Vec<String> {
            (from..to)
                .map(|i| format!("RLOCK.ACQUIRE lock{i} {verb}"))
                .collect()
        };
        let (hold, wait) = ("alice 600000 ONCE", "bob 30000 QUEUE 0 SESSION s ONCE");
        conn.pipeline(&commands(0, waits + 100, hold));
        conn.pipeline(&commands(0, waits, wait));
        server.run("CONFIG RESETSTAT");
        for reply in conn.pipeline(&commands(waits, waits + 100, wait)) {
            reply.queued();
        }
        server.median_cost("rlock.acquire")
    };
    // The best of several, since others use the machine's caches.
    let mut best = |waits: [usize; 3]| {
        let costs = waits.map(&mut cost_of_100_more).into_iter();
        costs.fold(f64::INFINITY, f64::min)
    };
    let (few, many) = (best([100, 200, 300]), best([4_000, 4_100, 4_200]));
    assert!(
        many < 3.0 * few,
        "{many} us beside 4,000 waits, {few} us beside 100"
    );
}

/// Eight clients take up to three locks each in any order and wait without limit: one circle that
/// is missed, and they hang.
#[test]
fn owners_that_release_when_refused_never_hang() {
    const CLIENTS: u64 = 8;
    const ROUNDS: u64 = 100;
    let server = Server::start();
    let seed = u64::from(server.process_id());
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let server = &server;
            scope.spawn(move || {
                let mut conn = server.connect();
                for round in 0..ROUNDS {
                    let random =
                        (seed + client * 1_000 + round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    while !took_all(&mut conn, client, random) {}
                }
            });
        }
    });
    assert!(
        server.info_number("rlock_deadlocks_refused") > 0,
        "they never met, seed {seed}"
    );
    assert_eq!(server.run("DBSIZE"), 0);
    assert_eq!(server.info_number("rlock_waiters"), 0);
}

/// Takes three of five locks, one after the other, and gives them back. False if it was refused.
fn took_all(conn: &mut Conn, client: u64, random: u64) -> bool {
    let mut taken: Vec<String> = Vec::new();
    let mut refused = false;
    for shift in [60, 50, 40] {
        let name = format!("lock{}", (random >> shift) % 5);
        conn.send(format!(
            "RLOCK.ACQUIRE {name} client{client} 600000 BLOCK 0"
        ));
        // Much less than the lease, with which a circle that was missed would end.
        let reply = conn.read_within(patience(Duration::from_secs(30)));
        if reply.is_error() {
            assert!(reply.error().starts_with("DEADLOCK "), "{reply:?}");
            refused = true;
            break;
        }
        reply.held();
        taken.push(name);
    }
    for name in taken {
        conn.let_go(&name, &format!("client{client}"));
    }
    !refused
}
