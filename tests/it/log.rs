//! RLOCK.LOG, and the lines of long waits in the server's log.

use std::time::Duration;

use rlock_tests::{Cluster, Conn, Pair, Reply, Server, in_sync, until};

/// An entry without what differs from run to run: event, key and owner.
fn short(entry: &Reply) -> String {
    let word = |field: &str| match entry.get(field) {
        Reply::Null => "-".to_owned(),
        text => text.text(),
    };
    format!("{} {} {}", word("event"), word("key"), word("owner"))
}

/// The entries of the log, newest first.
fn told(conn: &mut Conn, command: &str) -> Vec<String> {
    let reply = conn.run(command);
    reply.array().iter().map(short).collect()
}

fn text_of(conn: &mut Conn, key: &str) -> String {
    let reply = conn.run(format!("RLOCK.LOG MATCH {key}"));
    reply.array()[0].get("text").text()
}

/// A server on which waits are long soon, and which knows since when each lock is held.
fn server() -> Server {
    Server::builder()
        .config("rlock.fence-guard-ms 0")
        .config("rlock.log-waits-ms 20")
        .start()
}

fn long_waits(server: &Server) -> Vec<String> {
    let log = server.log();
    let lines = log.lines().filter(|line| line.contains("long wait"));
    lines.map(str::to_owned).collect()
}

#[test]
fn an_entry_is_a_map_with_its_fields_in_both_protocols() {
    let server = server();
    let token = server.connect().take("k", "alice");
    server.run("RLOCK.BREAK k");
    for mut conn in [server.connect(), server.connect().resp3()] {
        let reply = conn.run("RLOCK.LOG");
        let [entry] = reply.array() else {
            panic!("not one: {reply:?}")
        };
        let fields = [
            "id", "time-ms", "event", "db", "key", "owner", "token", "text",
        ];
        assert_eq!(entry.keys(), fields);
        assert_eq!(entry.get("id"), &1);
        assert_eq!(entry.get("event"), &"broken");
        assert_eq!(entry.get("db"), &0);
        assert_eq!(entry.get("key"), &"k");
        assert_eq!(entry.get("owner"), &"alice");
        assert_eq!(entry.get("token"), &token);
        let time = server.run("TIME").texts()[0].parse::<i64>().unwrap() * 1000;
        assert!((time - entry.get("time-ms").int()).abs() < 60_000);
    }
    let raw = server.connect().resp3().raw("RLOCK.LOG");
    assert!(raw.starts_with("*1\r\n%8\r\n$2\r\nid\r\n:1\r\n"), "{raw}");
    let raw = server.connect().raw("RLOCK.LOG");
    assert!(raw.starts_with("*1\r\n*16\r\n$2\r\nid\r\n:1\r\n"), "{raw}");
}

#[test]
fn holds_that_sessions_lose_are_logged_with_the_reason() {
    let server = server();
    let (mut conn, _life) = (server.connect(), server.session_connection("s"));
    let token = conn.take_for("deleted", "alice", "s");
    conn.take_for("written", "alice", "s");
    conn.run("RLOCK.ACQUIRE expired bob 20 SESSION s").held();
    conn.take_for("given-back", "alice", "s");
    conn.let_go("given-back", "alice");
    conn.run("DEL deleted");
    conn.run("DEL written");
    conn.run("SET written by-somebody");
    until("all three are logged", || {
        conn.run("RLOCK.LOG MATCH *e*").array().len() == 3
    });
    let reply = conn.run("RLOCK.LOG MATCH deleted");
    let entry = &reply.array()[0];
    assert_eq!(short(entry), "lost deleted alice");
    assert_eq!(entry.get("token"), &token);
    let text = entry.get("text").text();
    assert!(
        text.starts_with("its key was deleted") && text.ends_with("session 's'"),
        "{text}"
    );
    assert_eq!(
        told(&mut conn, "RLOCK.LOG MATCH expired"),
        ["lost expired bob"]
    );
    let text = text_of(&mut conn, "expired");
    assert!(text.starts_with("its lease was over, after "), "{text}");
    assert_eq!(
        told(&mut conn, "RLOCK.LOG MATCH written"),
        ["lost written alice"]
    );
}

/// A broken hold is one entry, and not a loss as well.
#[test]
fn broken_holds_are_logged_once_of_every_kind() {
    let server = server();
    let (mut conn, _life) = (server.connect(), server.session_connection("s"));
    conn.take_for("plain", "alice", "s");
    conn.run("RLOCK.ACQUIRE written alice 30000 WRITE").held();
    for owner in ["alice", "bob"] {
        conn.run(format!("RLOCK.ACQUIRE read {owner} 30000 READ"))
            .held();
    }
    for key in ["plain", "written", "read"] {
        assert_eq!(conn.run(format!("RLOCK.BREAK {key}")), 1);
        assert_eq!(conn.run(format!("RLOCK.BREAK {key}")), 0);
    }
    let expected = [
        "broken read -",
        "broken written alice",
        "broken plain alice",
    ];
    assert_eq!(told(&mut conn, "RLOCK.LOG"), expected);
    assert!(text_of(&mut conn, "plain").ends_with("session 's'"));
    assert_eq!(
        text_of(&mut conn, "read"),
        "the holds of 2 readers were broken"
    );
}

/// Redisson's reader, and one of several, have none to be named.
#[test]
fn the_one_reader_or_holder_of_permits_that_is_broken_is_logged_with_its_token() {
    let server = server();
    let (mut conn, _life) = (server.connect(), server.session_connection("s"));
    for kind in ["", "READ", "WRITE", "PERMITS 2 OF 3"] {
        let taken = conn.run(format!("RLOCK.ACQUIRE k alice 30000 {kind} SESSION s"));
        let (_, token) = taken.held();
        assert_eq!(conn.run("RLOCK.BREAK k"), 1, "{kind}");
        let reply = conn.run("RLOCK.LOG COUNT 1");
        let entry = &reply.array()[0];
        assert_eq!(short(entry), "broken k alice", "{kind}");
        assert_eq!(entry.get("token"), &token, "{kind}");
        let text = entry.get("text").text();
        assert!(text.ends_with("session 's'"), "{kind}: {text}");
    }
    for kind in ["READ", "PERMITS 1 OF 3"] {
        for owner in ["alice", "bob"] {
            conn.run(format!("RLOCK.ACQUIRE k {owner} 30000 {kind}"))
                .held();
        }
        assert_eq!(conn.run("RLOCK.BREAK k"), 1, "{kind}");
        let reply = conn.run("RLOCK.LOG COUNT 1");
        assert_eq!(short(&reply.array()[0]), "broken k -", "{kind}");
        assert_eq!(reply.array()[0].get("token"), &Reply::Null, "{kind}");
    }
}

#[test]
fn a_refused_deadlock_is_logged_with_its_circle() {
    let server = server();
    let (mut conn, _life) = (server.connect(), server.session_connection("s"));
    conn.take("a", "alice");
    conn.take("b", "bob");
    conn.queue("b", "alice", "s");
    for _ in 0..3 {
        assert!(conn.run("RLOCK.ACQUIRE a bob 1000 BLOCK 0").is_error());
    }
    assert_eq!(told(&mut conn, "RLOCK.LOG MATCH a"), ["deadlock a bob"]);
    let circle = "2 owners would wait for each other: 'bob' waits for 'alice' at 'a', 'alice' \
                  waits for 'bob' at 'b'; and 2 more after it";
    assert_eq!(text_of(&mut conn, "a"), circle);
    conn.run("RLOCK.ACQUIRE rw alice 30000 READ").held();
    assert!(
        conn.run("RLOCK.ACQUIRE rw alice 30000 WRITE BLOCK 0")
            .is_error()
    );
    assert_eq!(told(&mut conn, "RLOCK.LOG MATCH rw"), ["deadlock rw alice"]);
    conn.run("RLOCK.ACQUIRE rw alice 30000 WRITE").refused();
    assert_eq!(
        text_of(&mut conn, "rw").matches("more after").count(),
        0,
        "who does not wait"
    );
}

#[test]
fn a_full_queue_is_logged_once_however_often_it_refuses() {
    let server = Server::builder()
        .config("rlock.max-waiters-per-lock 1")
        .start();
    let mut conn = server.connect();
    for key in ["k", "other"] {
        conn.take(key, "alice");
    }
    let _waiters = ["k", "other"].map(|key| server.wait_in_queue(key, "bob"));
    for number in 0..5 {
        let command = format!("RLOCK.ACQUIRE k carol{number} 1000 BLOCK 0");
        assert!(conn.run(command).is_error());
    }
    assert!(
        conn.run("RLOCK.MACQUIRE dave 1000 2 other free BLOCK 0")
            .is_error()
    );
    assert_eq!(
        told(&mut conn, "RLOCK.LOG"),
        ["queue-full other dave", "queue-full k carol0"]
    );
    let text = text_of(&mut conn, "k");
    assert!(text.ends_with("is 1; and 4 more after it"), "{text}");
}

#[test]
fn a_long_hold_is_logged_when_it_ends() {
    let server = server();
    let (mut conn, mut life) = (server.connect(), server.session_connection("s"));
    life.run("RLOCK.EVENTS s");
    let held = |conn: &mut Conn, key: &str| {
        until("it is held for some time", || {
            let info = conn.run(format!("RLOCK.INFO {key}"));
            let writers = info.get("held-ms").clone();
            writers.int() >= 20
        });
    };
    conn.take("before", "alice");
    held(&mut conn, "before");
    conn.let_go("before", "alice");
    assert!(
        told(&mut conn, "RLOCK.LOG").is_empty(),
        "never is the default"
    );
    conn.run("CONFIG SET rlock.log-holds-ms 20");
    conn.take("short", "alice");
    conn.let_go("short", "alice");
    conn.take("long", "alice");
    conn.run("RLOCK.MACQUIRE alice 30000 2 one two").held();
    conn.run("RLOCK.ACQUIRE write alice 30000 WRITE").held();
    conn.take_for("session", "alice", "s");
    for key in ["long", "two", "write", "session"] {
        held(&mut conn, key);
    }
    assert_eq!(conn.let_go("long", "alice"), 0);
    assert_eq!(conn.run("RLOCK.MRELEASE alice 2 one two"), 2);
    assert_eq!(conn.run("RLOCK.RELEASE write alice WRITE"), 0);
    let expected = ["write", "two", "one", "long"].map(|key| format!("long-hold {key} alice"));
    assert_eq!(told(&mut conn, "RLOCK.LOG"), expected);
    life.close();
    until("what the session held is logged", || {
        told(&mut conn, "RLOCK.LOG MATCH session").contains(&"long-hold session alice".to_owned())
    });
}

#[test]
fn a_session_that_ends_with_holds_is_logged_and_one_without_is_not() {
    let server = server();
    let mut conn = server.connect();
    let [none, one, many] = ["none", "one", "many"].map(|name| server.session_connection(name));
    conn.take_for("a", "alice", "one");
    for number in 0..20 {
        conn.take_for(&format!("k{number:02}"), "alice", "many");
    }
    none.close();
    one.close();
    until("the first is logged", || {
        conn.run("RLOCK.LOG").array().len() == 1
    });
    let reply = conn.run("RLOCK.LOG MATCH a");
    let entry = &reply.array()[0];
    assert_eq!(short(entry), "session-ended - -");
    let expected = "the session 'one' ended with 1 holds, among them 'a'";
    assert_eq!(entry.get("text"), &expected);
    many.close();
    until("the other is logged", || {
        conn.run("RLOCK.LOG").array().len() == 2
    });
    let reply = conn.run("RLOCK.LOG COUNT 1");
    let text = reply.array()[0].get("text").text();
    assert!(
        text.starts_with("the session 'many' ended with 20 holds"),
        "{text}"
    );
    assert_eq!(text.matches("'k").count(), 8, "{text}");
}

#[test]
fn a_session_with_a_grace_ends_when_that_is_over() {
    let server = server();
    let (mut conn, mut life) = (server.connect(), server.connect());
    life.run("RLOCK.EVENTS s GRACE 50").events();
    conn.take_for("k", "alice", "s");
    life.close();
    until("its connection is gone", || {
        conn.run("RLOCK.SESSIONS")
            .array()
            .iter()
            .all(|one| one.get("listening") == &0)
    });
    until("its end is logged", || {
        told(&mut conn, "RLOCK.LOG") == ["session-ended - -"]
    });
    assert!(conn.run("RLOCK.SESSIONS").array().is_empty());
}

#[test]
fn a_long_wait_is_one_entry_and_one_line_that_name_the_holder() {
    let server = server();
    let (mut alice, _life) = (server.connect(), server.session_connection("s"));
    let token = alice.take_for("k%s%n", "alice", "s");
    let mut bob = server.wait_in_queue("k%s%n", "bob");
    let _carol = server.wait_in_queue("k%s%n", "carol");
    until("both waits are long", || long_waits(&server).len() == 2);
    let expected = ["long-wait k%s%n carol", "long-wait k%s%n bob"];
    assert_eq!(told(&mut alice, "RLOCK.LOG"), expected);
    let [line, second] = &long_waits(&server)[..] else {
        panic!("not two")
    };
    for part in [
        "<rlock> long wait for the lock 'k%s%n' of database 0: 'bob' has waited for ",
        " ms, number 1 in the queue; held by 'alice' for ",
        &format!(" ms, token {token}, session 's', "),
        " ms of its lease are left",
    ] {
        assert!(line.contains(part), "no {part} in {line}");
    }
    assert!(second.contains("number 2 in the queue"), "{second}");
    // Once a wait: also with a lower threshold, a higher one, and another connection.
    alice.run("CONFIG SET rlock.log-waits-ms 10");
    let _again = server.blocked_in("RLOCK.ACQUIRE k%s%n carol 30000 BLOCK 0 ONCE");
    alice.run("CONFIG SET rlock.log-waits-ms 30");
    alice.let_go("k%s%n", "alice");
    bob.read().held();
    let mut third = server.wait_in_queue("k%s%n", "dave");
    until("the third wait is long", || long_waits(&server).len() == 3);
    assert!(long_waits(&server)[2].contains("number 2 in the queue; held by 'bob'"));
    third.expect_nothing_yet();
}

#[test]
fn a_short_wait_is_not_logged_and_zero_is_never() {
    let server = Server::builder().config("rlock.log-waits-ms 200").start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    alice.run("RLOCK.ACQUIRE k bob 1000 BLOCK 20").refused();
    let mut long = server.blocked_in("RLOCK.ACQUIRE k carol 1000 BLOCK 200");
    long.read().refused();
    until("only what lasts so long is logged", || {
        told(&mut alice, "RLOCK.LOG") == ["long-wait k carol"]
    });
    alice.run("CONFIG SET rlock.log-waits-ms 0");
    let waiter = server.wait_in_queue("k", "dave");
    std::thread::sleep(Duration::from_millis(250));
    assert_eq!(long_waits(&server).len(), 1);
    // A present waiter is noticed when the option is set.
    alice.run("CONFIG SET rlock.log-waits-ms 100");
    until("it is noticed now", || long_waits(&server).len() == 2);
    drop(waiter);
}

#[test]
fn long_waits_of_every_kind_name_who_keeps_them_waiting() {
    let server = server();
    let mut conn = server.connect();
    let _life = server.session_connection("s");
    conn.run("RLOCK.ACQUIRE written alice 30000 WRITE").held();
    conn.run("RLOCK.ACQUIRE read alice 30000 READ").held();
    conn.take("second", "alice");
    conn.run("HSET script alice 1");
    conn.run("RLOCK.ACQUIRE written bob 30000 READ QUEUE 0 SESSION s")
        .queued();
    conn.run("RLOCK.ACQUIRE read bob 30000 WRITE QUEUE 0 SESSION s")
        .queued();
    conn.run("RLOCK.MACQUIRE bob 30000 2 first second QUEUE 0 SESSION s")
        .queued();
    conn.run("RLOCK.ACQUIRE script bob 30000 QUEUE 0 SESSION s")
        .queued();
    until("all are long", || conn.run("RLOCK.LOG").array().len() == 4);
    for (key, parts) in [
        ("written", &["held by 'alice' for ", ", token "][..]),
        ("read", &["held by 'alice' for ", ", token "]),
        ("second", &["this lock and others", "held by 'alice' for "]),
        ("script", &["held by 'alice', its lease has no end"]),
    ] {
        let text = text_of(&mut conn, key);
        for part in parts {
            assert!(text.contains(part), "{key}: no {part} in {text}");
        }
    }
}

#[test]
fn at_most_ten_lines_a_second_are_written_and_then_how_many_were_left_out() {
    let server = server();
    let mut conn = server.connect();
    conn.take("k", "alice");
    let _life = server.session_connection("s");
    let waits = (0..50).map(|n| format!("RLOCK.ACQUIRE k bob{n} 30000 QUEUE 0 SESSION s"));
    conn.pipeline(&waits.collect::<Vec<_>>());
    until("it is said how many were left out", || {
        server
            .log()
            .contains("40 more long waits were left out of this log")
    });
    let lines = long_waits(&server);
    assert_eq!(lines.len(), 11, "{lines:#?}");
    assert_eq!(
        conn.run("RLOCK.LOG COUNT 100").array().len(),
        50,
        "the log has them all"
    );
}

#[test]
fn the_log_can_be_narrowed_counted_and_reset() {
    let server = server();
    let mut conn = server.connect();
    for number in 0..12 {
        let key = if number % 2 == 0 { "even" } else { "odd" };
        conn.take(&format!("{key}:{number}"), "alice");
        conn.run(format!("RLOCK.BREAK {key}:{number}"));
    }
    let newest = told(&mut conn, "RLOCK.LOG");
    assert_eq!(newest.len(), 10, "unless COUNT says otherwise");
    assert_eq!(newest[0], "broken odd:11 alice");
    assert_eq!(told(&mut conn, "RLOCK.LOG COUNT 100").len(), 12);
    assert_eq!(
        told(&mut conn, "rlock.log count 1 match even:*"),
        ["broken even:10 alice"]
    );
    assert_eq!(told(&mut conn, "RLOCK.LOG MATCH odd:? COUNT 100").len(), 5);
    assert_eq!(conn.raw("RLOCK.LOG RESET"), "+OK\r\n");
    assert_eq!(conn.raw("RLOCK.LOG"), "*0\r\n");
    conn.take("k", "alice");
    conn.run("RLOCK.BREAK k");
    assert_eq!(
        conn.run("RLOCK.LOG").array()[0].get("id"),
        &13,
        "numbers go on"
    );
    for (command, part) in [
        ("RLOCK.LOG everything", "'everything'"),
        ("RLOCK.LOG RESET now", "'now'"),
        ("RLOCK.LOG COUNT 1 RESET", "'RESET'"),
        ("RLOCK.LOG MATCH", "'MATCH'"),
        ("RLOCK.LOG COUNT 1 COUNT 1", "'COUNT'"),
        (
            "RLOCK.LOG COUNT 0",
            "COUNT must be an integer from 1 to 9007199254740991",
        ),
        (
            "RLOCK.LOG COUNT x",
            "COUNT must be an integer from 1 to 9007199254740991",
        ),
    ] {
        let error = conn.run(command).error();
        assert!(
            error.starts_with("ERR ") && error.contains(part),
            "{command}: {error}"
        );
    }
}

#[test]
fn no_more_entries_are_kept_than_are_allowed() {
    let server = server();
    let mut conn = server.connect();
    let mut fill = |from: u32, to: u32| {
        for number in from..to {
            conn.take(&format!("k{number}"), "alice");
            conn.run(format!("RLOCK.BREAK k{number}"));
        }
        conn.run("RLOCK.LOG COUNT 1000").array().len()
    };
    assert_eq!(fill(0, 140), 128);
    assert_eq!(server.run("CONFIG SET rlock.log-max-len 5"), "OK");
    assert_eq!(fill(0, 0), 5, "at once");
    assert_eq!(fill(0, 10), 5);
    assert_eq!(server.run("CONFIG SET rlock.log-max-len 0"), "OK");
    assert_eq!(fill(0, 10), 0);
}

/// The user of the entries' locks sees them, and nobody else does; also in texts.
#[test]
fn locks_that_the_caller_may_not_read_are_in_no_entry_and_no_text() {
    let server = server();
    let (mut conn, life) = (server.connect(), server.session_connection("s"));
    assert_eq!(
        conn.run("ACL SETUSER clerk on nopass ~orders:* &* +@all"),
        "OK"
    );
    assert_eq!(
        conn.run("ACL SETUSER other on nopass ~others:* &* +@all"),
        "OK"
    );
    for key in ["orders:1", "stock"] {
        conn.take(key, "alice");
        conn.run(format!("RLOCK.BREAK {key}"));
    }
    conn.take("orders:2", "alice");
    conn.take("secret", "bob");
    conn.queue("secret", "alice", "s");
    assert!(
        conn.run("RLOCK.ACQUIRE orders:2 bob 1000 BLOCK 0")
            .is_error()
    );
    for key in ["orders:3", "hidden"] {
        conn.take_for(key, "carol", "s");
    }
    life.close();
    until("its end is logged", || {
        told(&mut conn, "RLOCK.LOG").contains(&"session-ended - -".to_owned())
    });
    let as_user = |user: &str| {
        let mut conn = server.connect();
        conn.run(format!("AUTH {user} anything"));
        conn.run("RLOCK.LOG COUNT 100")
    };
    // Nor can their names be guessed.
    let mut clerk = server.connect();
    clerk.run("AUTH clerk anything");
    assert_eq!(clerk.run("RLOCK.LOG MATCH orders:3").array().len(), 1);
    assert_eq!(clerk.run("RLOCK.LOG MATCH hid*").array().len(), 0);
    let seen = as_user("clerk");
    let all: Vec<_> = seen.array().iter().map(short).collect();
    let expected = [
        "session-ended - -",
        "deadlock orders:2 bob",
        "broken orders:1 alice",
    ];
    assert_eq!(all, expected);
    let texts: Vec<_> = seen
        .array()
        .iter()
        .map(|one| one.get("text").text())
        .collect();
    assert!(
        texts[0].ends_with("ended with 2 holds, among them 'orders:3'"),
        "{texts:?}"
    );
    assert!(texts[1].contains("at 'orders:2'"), "{texts:?}");
    let all = format!("{seen:?}");
    for hidden in ["stock", "secret", "hidden"] {
        assert!(!all.contains(hidden), "{all}");
    }
    assert!(as_user("other").array().is_empty());
    let unlimited = conn.run("RLOCK.LOG COUNT 100");
    assert!(unlimited.array().len() >= 4);
    assert!(format!("{unlimited:?}").contains("secret"));
}

/// In a script and in another module's call it is the caller's permissions that count.
#[test]
fn in_a_script_the_log_shows_what_the_caller_may_read() {
    let server = server();
    server.load_c_module("caller");
    let mut conn = server.connect();
    assert_eq!(
        conn.run("ACL SETUSER clerk on nopass ~orders:* &* +@all"),
        "OK"
    );
    for key in ["orders:1", "stock"] {
        conn.take(key, "alice");
        conn.run(format!("RLOCK.BREAK {key}"));
    }
    let mut clerk = server.connect();
    clerk.run("AUTH clerk anything");
    for (command, expected) in [
        ("CALLER.CALL RLOCK.LOG", 2), // in its own name a module may read every key
        ("CALLER.AS-USER RLOCK.LOG", 1),
        ("CALLER.AS-MADE-USER RLOCK.LOG", 0),
        ("EVAL return(redis.call('RLOCK.LOG')) 0", 1),
    ] {
        assert_eq!(clerk.run(command).array().len(), expected, "{command}");
    }
}

#[test]
fn databases_are_told_apart() {
    let server = server();
    let mut conn = server.connect();
    conn.take("k", "alice");
    conn.run("SELECT 3");
    conn.take("k", "bob");
    conn.run("RLOCK.BREAK k");
    let reply = conn.run("RLOCK.LOG");
    assert_eq!(reply.array().len(), 1);
    assert_eq!(reply.array()[0].get("db"), &3);
    let _waiter = {
        let mut waiter = server.connect();
        waiter.run("SELECT 3");
        conn.take("k", "carol");
        waiter.send("RLOCK.ACQUIRE k dave 1000 BLOCK 0");
        waiter
    };
    until("the wait is long", || long_waits(&server).len() == 1);
    let line = &long_waits(&server)[0];
    assert!(
        line.contains("of database 3: 'dave'") && line.contains("held by 'carol'"),
        "{line}"
    );
}

#[test]
fn a_replica_tells_its_own_log() {
    let pair = Pair::start();
    let mut conn = pair.primary.connect();
    conn.take("k", "alice");
    conn.run("RLOCK.BREAK k");
    in_sync(&pair.primary, &pair.replica);
    assert_eq!(told(&mut pair.replica.connect(), "RLOCK.LOG").len(), 0);
    assert_eq!(pair.replica.run("RLOCK.LOG RESET"), "OK");
    assert_eq!(pair.replica.run("RLOCK.SESSIONS").array().len(), 0);
    assert_eq!(pair.replica.run("REPLICAOF NO ONE"), "OK");
    let mut conn = pair.replica.connect();
    conn.take("k", "bob");
    conn.run("RLOCK.BREAK k");
    assert_eq!(told(&mut conn, "RLOCK.LOG"), ["broken k bob"]);
    assert_eq!(
        told(&mut pair.primary.connect(), "RLOCK.LOG"),
        ["broken k alice"]
    );
}

#[test]
fn each_node_of_a_cluster_logs_what_happens_there() {
    let cluster = Cluster::start();
    cluster.first.run("CONFIG SET rlock.log-waits-ms 20");
    let mut conn = cluster.first.connect();
    conn.take("k", "alice");
    let mut waiter = cluster.first.wait_in_queue("k", "bob");
    until("the wait is long", || long_waits(&cluster.first).len() == 1);
    assert!(long_waits(&cluster.first)[0].contains("held by 'alice'"));
    assert_eq!(conn.run("RLOCK.BREAK k"), 1);
    waiter.read().held();
    assert_eq!(
        told(&mut conn, "RLOCK.LOG"),
        ["broken k alice", "long-wait k bob"]
    );
    assert!(cluster.second.run("RLOCK.LOG").array().is_empty());
}

#[test]
fn a_hundred_thousand_events_leave_a_bounded_log() {
    let server = Server::builder().config("rlock.log-max-len 1000").start();
    let (mut conn, _life) = (server.connect(), server.session_connection("s"));
    let owner = "o".repeat(1024);
    let mut round = |from: u32, to: u32| {
        for first in (from..to).step_by(500) {
            let commands = (first..first + 500).flat_map(|number| {
                let name = format!("{number:0>500}");
                [
                    format!("RLOCK.ACQUIRE {name} {owner} 30000"),
                    format!("RLOCK.BREAK {name}"),
                ]
            });
            conn.pipeline(&commands.collect::<Vec<_>>());
        }
        conn.settle();
        server.run("MEMORY PURGE");
        server.info_number("used_memory")
    };
    let before = round(0, 2000);
    let after = round(2000, 100_000);
    assert!(after - before < 1_000_000, "{before}, then {after} bytes");
    let reply = server.run("RLOCK.LOG COUNT 1");
    assert_eq!(reply.array()[0].get("id"), &100_000);
    assert_eq!(server.run("RLOCK.LOG RESET"), "OK");
    let reset = server.info_number("used_memory");
    assert!(after - reset > 1_000_000, "{after}, then {reset} bytes");
}

/// Names and texts together take 8 MiB at most, and longer ones than 4,096 bytes are not logged.
#[test]
fn entries_with_long_names_are_bounded_in_bytes() {
    let server = Server::builder().config("rlock.log-max-len 100000").start();
    let mut conn = server.connect();
    for number in 0..3000 {
        let name = format!("{number:0>4096}");
        conn.take(&name, "alice");
        conn.run(format!("RLOCK.BREAK {name}"));
    }
    let kept = conn.run("RLOCK.LOG COUNT 100000").array().len();
    assert!((1500..=2048).contains(&kept), "{kept}");
    assert_eq!(conn.run("RLOCK.LOG RESET"), "OK");
    let name = "n".repeat(4097);
    conn.take(&name, "alice");
    assert_eq!(conn.run(format!("RLOCK.BREAK {name}")), 1);
    assert!(conn.run("RLOCK.LOG").array().is_empty());
}
