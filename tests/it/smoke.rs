//! A short representative set, also for valgrind: `RLOCK_VALGRIND=1 cargo test smoke`.

use rlock_tests::{Server, Version, module_path};

#[test]
fn smoke_take_reenter_renew_release() {
    let server = Server::start();
    let mut alice = server.connect();
    let token = alice.take("k", "alice");
    assert_eq!(alice.run("RLOCK.ACQUIRE k alice 30000").held(), (2, token));
    assert!(alice.run("RLOCK.ACQUIRE k bob 30000").refused() > 0);
    assert_eq!(alice.run("RLOCK.RENEW k alice 30000"), 1);
    assert_eq!(alice.run("RLOCK.INFO k").get("owner"), &"alice");
    assert_eq!(alice.run("RLOCK.GUARD k alice CALL SET of-k 1"), "OK");
    for refused in ["k bob CALL SET of-k 2", "k alice CALL EVAL code 0"] {
        assert!(alice.run(format!("RLOCK.GUARD {refused}")).is_error());
    }
    assert_eq!(alice.let_go("k", "alice"), 1);
    assert_eq!(alice.let_go("k", "alice"), 0);
}

#[test]
fn smoke_wait_and_hand_over() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let owners = ["bob", "carol", "dave"];
    let mut line: Vec<_> = owners
        .iter()
        .map(|owner| server.wait_in_queue("k", owner))
        .collect();
    assert_eq!(alice.run("RLOCK.LIST").array().len(), 1);
    alice.run("RLOCK.SESSIONS").array();
    alice.run("RLOCK.LOG").array();
    alice.let_go("k", "alice");
    line[0].read().held();
    alice.let_go("k", "bob");
    line[1].read().held();
    assert_eq!(alice.run("RLOCK.BREAK k"), 1);
    line[2].read().held();
}

#[test]
fn smoke_see_what_happens() {
    let server = Server::builder().config("rlock.log-waits-ms 1").start();
    let (mut conn, life) = (server.connect(), server.session_connection("s"));
    let patterns = ["CONFIG", "SET", "rlock.metrics-patterns", "k* *"];
    assert_eq!(conn.cmd(&patterns), "OK");
    conn.run("CONFIG GET rlock.*").texts();
    conn.take_for("k", "alice", "s");
    conn.run("RLOCK.ACQUIRE rw alice 30000 READ").held();
    let _waiters = [
        server.wait_in_queue("k", "bob"),
        server.blocked_in("RLOCK.ACQUIRE rw bob 30000 WRITE BLOCK 0"),
    ];
    rlock_tests::until("both waits are long", || {
        conn.run("RLOCK.LOG").array().len() == 2
    });
    assert_eq!(conn.run("RLOCK.SESSIONS").array().len(), 1);
    conn.run("RLOCK.BREAK rw");
    life.close();
    rlock_tests::until("the session's end is logged", || {
        conn.run("RLOCK.LOG").array().len() == 4
    });
    assert!(server.info("rlock_pattern_1").is_some());
    assert_eq!(conn.run("RLOCK.LOG RESET"), "OK");
}

#[test]
fn smoke_leave_the_queue_in_every_way() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    alice.run("RLOCK.ACQUIRE k bob 30000 BLOCK 20").refused();
    let mut cancelled = server.wait_in_queue("k", "cancelled");
    let mut replaced = server.wait_in_queue("k", "replaced");
    let mut replacing = server.blocked_in("RLOCK.ACQUIRE k replaced 30000 BLOCK 0 ONCE");
    replaced.read().refused();
    let mut killed = server.connect();
    let id = killed.id();
    killed.send("RLOCK.ACQUIRE k killed 30000 BLOCK 0");
    let closed = server.wait_in_queue("k", "closed");
    assert_eq!(alice.run("RLOCK.CANCEL k cancelled"), 1);
    cancelled.read().refused();
    assert_eq!(alice.run(format!("CLIENT KILL ID {id}")), 1);
    closed.close();
    rlock_tests::until("one is left", || server.waiting_owners("k") == ["replaced"]);
    alice.let_go("k", "alice");
    replacing.read().held();
}

#[test]
fn smoke_killed_in_the_turn_of_the_grant() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.connect();
    let id = bob.id();
    bob.send("RLOCK.ACQUIRE k bob 30000 BLOCK 0");
    bob.expect_nothing_yet();
    let mut carol = server.wait_in_queue("k", "carol");
    alice.pipeline(&["RLOCK.RELEASE k alice", &format!("CLIENT KILL ID {id}")]);
    carol.read().held();
}

#[test]
fn smoke_sessions() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut first = server.blocked_in("RLOCK.EVENTS s BLOCK 0");
    for name in ["k", "l", "m"] {
        alice.take(name, "alice");
        alice.queue(name, "bob", "s");
    }
    alice.let_go("k", "alice");
    first.read().granted("k", "bob");
    alice.run("RLOCK.CANCEL l bob");
    alice
        .run("RLOCK.ACQUIRE l bob 30000 QUEUE 20 SESSION s")
        .queued();
    alice.run("RLOCK.BREAK k");
    let listener = server.blocked_in("RLOCK.EVENTS other BLOCK 0");
    let mut second = server.connect();
    let mut told = second.run("RLOCK.EVENTS s GRACE 50").events();
    first.close();
    while told.len() < 3 {
        told.extend(second.run("RLOCK.EVENTS s BLOCK 0 GRACE 50").events());
    }
    let mut refused = server.session_connection("refused");
    refused.take_for("x", "carol", "refused");
    refused.queue("m", "carol", "refused");
    let error = alice.run("RLOCK.ACQUIRE x alice 30000 BLOCK 0").error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
    let mut carol = server.blocked_in("RLOCK.ACQUIRE m dave 30000 BLOCK 0 SESSION refused");
    alice.take_for("held", "bob", "s");
    let mut next = server.wait_in_queue("held", "next");
    second.close();
    refused.close();
    assert!(carol.read().is_error());
    next.read().held();
    listener.close();
    rlock_tests::until("all sessions are over", || {
        server.info_number("rlock_sessions") == 0
    });
}

#[test]
fn smoke_readers_and_writers() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 30000 READ").held();
    conn.run("RLOCK.ACQUIRE k alice 20000 READ").held();
    let mut writer = server.blocked_in("RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 0");
    let mut reader = server.blocked_in("RLOCK.ACQUIRE k carol 30000 READ BLOCK 0");
    conn.run("RLOCK.ACQUIRE k alice 30000 WRITE BLOCK 0")
        .error();
    conn.run("RLOCK.ACQUIRE k alice 30000").error();
    assert_eq!(conn.run("RLOCK.RENEW k alice 40000 READ"), 1);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 1);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    writer.read().held();
    conn.run("RLOCK.ACQUIRE k bob 30000 READ").held();
    assert_eq!(conn.run("RLOCK.INFO k").get("mode"), &"write");
    assert_eq!(conn.run("RLOCK.RELEASE k bob WRITE"), 0);
    reader.read().held();
    assert_eq!(conn.run("RLOCK.INFO k").get("holders").array().len(), 2);
    assert_eq!(conn.run("RLOCK.BREAK k"), 1);
    assert_eq!(conn.run("DBSIZE"), 0);
}

#[test]
fn smoke_several_at_once() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.blocked_in("RLOCK.EVENTS s BLOCK 0");
    conn.take("b", "bob");
    conn.run("RLOCK.MACQUIRE alice 30000 2 a c").held();
    let queued = "RLOCK.MACQUIRE alice 30000 3 a b c QUEUE 0 SESSION s";
    assert_eq!(conn.run(queued).queued(), 1);
    conn.run("RLOCK.MACQUIRE bob 30000 2 a b BLOCK 0").error();
    let gone = server.blocked_in("RLOCK.MACQUIRE carol 30000 2 b c BLOCK 0");
    gone.close();
    rlock_tests::until("she has left", || server.waiting_owners("b") == ["alice"]);
    conn.let_go("b", "bob");
    life.read().granted("a", "alice");
    assert_eq!(conn.run("RLOCK.MRENEW alice 40000 3 a b c"), 3);
    assert_eq!(conn.run("RLOCK.MRELEASE alice 3 a b c"), 3);
    life.close();
    rlock_tests::until("bound to the session, b went with it", || {
        conn.run("EXISTS b") == 0
    });
    assert_eq!(conn.run("EXISTS a c"), 0);
}

#[test]
fn smoke_a_session_connection_killed_in_the_turn_of_the_grant() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut life = server.connect();
    let id = life.id();
    life.run("RLOCK.EVENTS s").events();
    life.send("RLOCK.EVENTS s BLOCK 0");
    life.expect_nothing_yet();
    alice.queue("k", "bob", "s");
    let mut carol = server.wait_in_queue("k", "carol");
    alice.pipeline(&["RLOCK.RELEASE k alice", &format!("CLIENT KILL ID {id}")]);
    carol.read().held();
}

#[test]
fn smoke_a_connection_is_bound_and_the_one_before_closed() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut alice = server.connect();
    alice.take("k", "alice");
    for (epoch, waits) in [true, false, true].into_iter().enumerate() {
        let mut old = server.connect();
        old.run(format!("RLOCK.BIND s EPOCH {}", 2 * epoch)).array();
        old.take_for(&format!("k{epoch}"), "bob", "s");
        if waits {
            old.send("RLOCK.ACQUIRE k bob 30000 BLOCK 0 SESSION s");
            old.expect_nothing_yet();
        }
        let mut new = server.connect();
        new.run(format!("RLOCK.BIND s EPOCH {}", 2 * epoch + 1))
            .array();
        old.read_to_end();
        assert_eq!(new.let_go(&format!("k{epoch}"), "bob"), 0);
    }
    assert_eq!(life.run("RLOCK.EVENTS s AFTER 1 0").events(), []);
}

#[test]
fn smoke_freed_in_other_ways() {
    let server = Server::start();
    let mut conn = server.connect();
    for free in [
        "DEL k",
        "PEXPIRE k 20",
        "RENAME k away",
        "FLUSHALL",
        "SWAPDB 0 1",
        "FLUSHDB",
    ] {
        conn.run("DEL k");
        conn.take("k", "alice");
        let mut bob = server.wait_in_queue("k", "bob");
        conn.run(free);
        bob.read().held();
    }
    conn.run("FLUSHALL");
    conn.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    conn.pipeline(&["SET k v", "PEXPIRE k 20"]);
    // Either it is told of the string, or the string has run out before anybody looked.
    bob.read();
    assert_eq!(conn.run("DEBUG RELOAD"), "OK");
}

#[test]
fn smoke_errors_options_and_odd_bytes() {
    let server = Server::start();
    let mut conn = server.connect();
    for command in [
        "RLOCK.ACQUIRE k a 0",
        "RLOCK.ACQUIRE k a 1 ONCE ONCE",
        "RLOCK.LIST COUNT 0",
    ] {
        assert!(conn.run(command).is_error());
    }
    assert!(
        conn.cmd(&[&b"RLOCK.ACQUIRE"[..], b"\xff\0", b"\xff\0", b"\xff"])
            .is_error()
    );
    conn.cmd(&[&b"RLOCK.ACQUIRE"[..], b"\xff\0", b"\xff\0", b"1000"])
        .held();
    conn.pipeline(&["HSET odd alice many", "PEXPIRE odd 30000"]);
    assert!(conn.run("RLOCK.ACQUIRE odd bob 1000").refused() > 0);
    assert_eq!(conn.run("CONFIG SET rlock.publish both"), "OK");
    assert_eq!(conn.run("RLOCK.BREAK odd"), 1);
    assert!(!conn.run("INFO rlock").text().is_empty());
}

#[test]
fn smoke_waiters_at_shutdown() {
    let mut server = Server::start();
    server.connect().take("k", "alice");
    let _line = ["bob", "dave", "erin"].map(|owner| server.wait_in_queue("k", owner));
    let mut life = server.session_connection("s");
    life.queue("k", "carol", "s");
    life.take_for("l", "carol", "s");
    let _listener = server.blocked_in("RLOCK.EVENTS s BLOCK 0");
    server.stop();
}

#[test]
fn smoke_load_and_unload() {
    let server = Server::builder().without_module().start();
    let mut conn = server.connect();
    let path = module_path().display().to_string();
    assert_eq!(conn.cmd(&["MODULE", "LOAD", &path]), "OK");
    conn.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    assert!(
        conn.run("MODULE UNLOAD rlock").is_error(),
        "refused while somebody waits"
    );
    conn.let_go("k", "alice");
    bob.read().held();
    if !Version::at_hand().can_unload_modules() {
        return;
    }
    assert_eq!(conn.run("MODULE UNLOAD rlock"), "OK");
    assert_eq!(conn.run("PING"), "PONG");
    assert_eq!(
        conn.run("HGET k bob"),
        "1",
        "the keys of locks are plain keys"
    );
}
