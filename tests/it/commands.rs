//! Each command: every reply and every error, in RESP2 and RESP3.

use rlock_tests::{Conn, Reply, Server};

const LEASE_MAX: &str = "9007199254740991";
const I64_EDGES: [&str; 4] = [
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "-9223372036854775809",
];

fn both_protocols(server: &Server) -> [Conn; 2] {
    [server.connect(), server.connect().resp3()]
}

/// The error that `command` gets, which must begin with `ERR ` and name each of `parts`.
#[track_caller]
fn refuses(conn: &mut Conn, command: &str, parts: &[&str]) {
    let error = conn.run(command).error();
    assert!(error.starts_with("ERR "), "{command}: {error}");
    for part in parts {
        assert!(error.contains(part), "{command}: no {part} in: {error}");
    }
}

#[test]
fn acquire_takes_a_free_lock_with_count_one_and_a_token() {
    let server = Server::start();
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        let raw = conn.raw(format!("RLOCK.ACQUIRE k{index} alice 30000"));
        let token = server
            .run(format!("HGET k{index} fence"))
            .text()
            .replace('t', "");
        assert_eq!(raw, format!("*2\r\n:1\r\n:{token}\r\n"));
    }
}

#[test]
fn acquire_reenters_with_one_more_hold_the_same_token_and_the_lease_anew() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, token) = conn.run("RLOCK.ACQUIRE k alice 30000").held();
    assert_eq!(conn.run("RLOCK.ACQUIRE k alice 60000").held(), (2, token));
    assert!(conn.run("PTTL k").int() > 50_000);
    assert_eq!(conn.run("RLOCK.ACQUIRE k alice 20000").held(), (3, token));
    assert!(
        conn.run("PTTL k").int() <= 20_000,
        "a re-entry can also shorten the lease"
    );
}

#[test]
fn acquire_tells_another_owner_what_is_left_of_the_lease() {
    let server = Server::start();
    server.connect().take("k", "alice");
    for mut conn in both_protocols(&server) {
        let left = conn.run("RLOCK.ACQUIRE k bob 30000").refused();
        assert!((20_000..=30_000).contains(&left), "{left}");
        let raw = conn.raw("RLOCK.ACQUIRE k bob 30000");
        assert!(raw.starts_with("*2\r\n:0\r\n:"), "{raw}");
    }
    server.run("PERSIST k");
    assert_eq!(server.run("RLOCK.ACQUIRE k bob 30000").refused(), -1);
}

#[test]
fn acquire_once_keeps_the_count_and_starts_the_lease_anew() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, token) = conn.run("RLOCK.ACQUIRE k alice 30000 ONCE").held();
    assert_eq!(
        conn.run("RLOCK.ACQUIRE k alice 60000 ONCE").held(),
        (1, token)
    );
    assert!(conn.run("PTTL k").int() > 50_000);
    conn.run("RLOCK.ACQUIRE k alice 30000").held();
    assert_eq!(
        conn.run("RLOCK.ACQUIRE k alice 60000 ONCE").held(),
        (2, token)
    );
}

#[test]
fn acquire_takes_its_options_in_any_order_and_case() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = conn.take("k", "alice");
    for options in [
        "BLOCK 10 ONCE",
        "ONCE BLOCK 10",
        "block 10 once",
        "OnCe BlOcK 10",
        "oNcE",
    ] {
        assert_eq!(
            conn.run(format!("rlock.acquire k alice 30000 {options}"))
                .held(),
            (1, token)
        );
    }
    assert_eq!(
        conn.run("Rlock.Acquire k alice 30000 Block 0").held(),
        (2, token)
    );
}

#[test]
fn acquire_blocks_until_it_is_granted() {
    let server = Server::start();
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        let name = format!("k{index}");
        let token = server.connect().take(&name, "alice");
        conn.send(format!("RLOCK.ACQUIRE {name} bob 30000 BLOCK 0"));
        conn.expect_nothing_yet();
        assert_eq!(server.run(format!("RLOCK.RELEASE {name} alice")), 0);
        let (count, next) = conn.read().held();
        assert_eq!(count, 1);
        assert!(next > token);
        assert!(
            server.run(format!("PTTL {name}")).int() > 20_000,
            "the lease starts at the grant"
        );
    }
}

#[test]
fn acquire_blocks_no_longer_than_asked() {
    let server = Server::start();
    server.connect().take("k", "alice");
    for mut conn in both_protocols(&server) {
        let left = conn.run("RLOCK.ACQUIRE k bob 30000 BLOCK 20").refused();
        assert!((20_000..=30_000).contains(&left), "{left}");
    }
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
}

#[test]
fn acquire_refuses_what_it_does_not_understand_and_names_it() {
    let server = Server::start();
    let mut conn = server.connect();
    refuses(&mut conn, "RLOCK.ACQUIRE k a 1000 SOON", &["SOON"]);
    refuses(&mut conn, "RLOCK.ACQUIRE k a 1000 ONCE later", &["later"]);
    refuses(&mut conn, "RLOCK.ACQUIRE k a 1000 ONCE ONCE", &["ONCE"]);
    refuses(
        &mut conn,
        "RLOCK.ACQUIRE k a 1000 BLOCK 1 ONCE BLOCK 1",
        &["BLOCK"],
    );
    refuses(&mut conn, "RLOCK.ACQUIRE k a 1000 ONCE BLOCK", &["BLOCK"]);
    refuses(
        &mut conn,
        "RLOCK.ACQUIRE k a 1000 BLOCK ONCE",
        &["wait-ms", "0", LEASE_MAX],
    );
    refuses(&mut conn, "RLOCK.ACQUIRE k a 1000 TOKEN 1", &["TOKEN"]);
    assert_eq!(conn.run("EXISTS k"), 0);
}

#[test]
fn leases_are_whole_milliseconds_within_their_bounds() {
    let server = Server::start();
    let mut conn = server.connect();
    for bad in [
        "0",
        "-1",
        "1.5",
        "1e3",
        "0x10",
        "+1",
        "01",
        "ten",
        "9007199254740992",
    ] {
        refuses(
            &mut conn,
            &format!("RLOCK.ACQUIRE k a {bad}"),
            &["lease-ms", "1", LEASE_MAX],
        );
        refuses(
            &mut conn,
            &format!("RLOCK.RENEW k a {bad}"),
            &["lease-ms", "1", LEASE_MAX],
        );
        refuses(
            &mut conn,
            &format!("RLOCK.RELEASE k a LEASE {bad}"),
            &["lease-ms", LEASE_MAX],
        );
    }
    for bad in I64_EDGES {
        refuses(
            &mut conn,
            &format!("RLOCK.ACQUIRE k a {bad}"),
            &["lease-ms"],
        );
    }
    for bad in ["", " 1", "1 ", "1\0"] {
        assert!(
            conn.cmd(&["RLOCK.ACQUIRE", "k", "a", bad])
                .error()
                .contains("lease-ms")
        );
    }
    assert_eq!(conn.run("EXISTS k"), 0);
    conn.run("RLOCK.ACQUIRE shortest a 1").held();
    conn.run(format!("RLOCK.ACQUIRE longest a {LEASE_MAX}"))
        .held();
    assert!(conn.run("PTTL longest").int() > 9_007_199_254_000_000);
}

#[test]
fn waits_are_whole_milliseconds_within_their_bounds() {
    let server = Server::start();
    let mut conn = server.connect();
    for bad in ["-1", "1.5", "soon", "9007199254740992"]
        .iter()
        .chain(&I64_EDGES)
    {
        refuses(
            &mut conn,
            &format!("RLOCK.ACQUIRE k a 1 BLOCK {bad}"),
            &["wait-ms", "0"],
        );
    }
    assert_eq!(conn.run("EXISTS k"), 0);
    conn.take("k", "alice");
    let mut bob = server.blocked_in(&format!("RLOCK.ACQUIRE k bob 1000 BLOCK {LEASE_MAX}"));
    conn.let_go("k", "alice");
    bob.read().held();
}

#[test]
fn owners_have_one_to_1024_bytes_and_no_reserved_name() {
    let server = Server::start();
    let mut conn = server.connect();
    let (longest, too_long) = ("o".repeat(1024), "o".repeat(1025));
    for owner in ["", &too_long, "fence", "mode"] {
        for command in [
            &["RLOCK.ACQUIRE", "k", owner, "1000"][..],
            &["RLOCK.RELEASE", "k", owner],
            &["RLOCK.RENEW", "k", owner, "1000"],
            &["RLOCK.CANCEL", "k", owner],
        ] {
            let error = conn.cmd(command).error();
            assert!(
                error.starts_with("ERR ") && error.contains("owner"),
                "{command:?}: {error}"
            );
        }
    }
    assert_eq!(conn.run("EXISTS k"), 0);
    conn.take("k", &longest);
    assert_eq!(conn.let_go("k", &longest), 0);
    for owner in ["Fence", "MODE", "fenc", "modes"] {
        conn.take(&format!("k{owner}"), owner); // only the exact names are taken
    }
}

#[test]
fn the_hold_count_does_not_overflow() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("HSET k alice 2147483646 fence t5");
    conn.run("PEXPIRE k 30000");
    assert_eq!(
        conn.run("RLOCK.ACQUIRE k alice 30000").held(),
        (2_147_483_647, 5)
    );
    let before = server.run("HGETALL k");
    refuses(
        &mut conn,
        "RLOCK.ACQUIRE k alice 60000",
        &["hold count", "2147483647"],
    );
    assert_eq!(server.run("HGETALL k"), before);
    assert!(conn.run("PTTL k").int() <= 30_000);
    assert_eq!(
        conn.run("RLOCK.ACQUIRE k alice 30000 ONCE").held(),
        (2_147_483_647, 5)
    );
    assert_eq!(conn.let_go("k", "alice"), 2_147_483_646);
}

#[test]
fn acquire_queues_for_a_session_and_tells_the_place() {
    let server = Server::start();
    let mut life_line = server.session_connection("s");
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        let name = format!("k{index}");
        let wait = |owner| format!("RLOCK.ACQUIRE {name} {owner} 30000 QUEUE 0 SESSION s");
        let raw = conn.raw(wait("alice"));
        assert!(raw.starts_with("*2\r\n:1\r\n:"), "free, so taken: {raw}");
        assert_eq!(conn.run(wait("alice")).held().0, 2, "held, so entered");
        let (life, _) = life_line.run("RLOCK.EVENTS s").told();
        let queued = |position: u8| format!("*4\r\n:-1\r\n:{position}\r\n:0\r\n:{life}\r\n");
        assert_eq!(conn.raw(wait("bob")), queued(1));
        assert_eq!(conn.raw(wait("carol")), queued(2));
        let again = format!("{} ONCE", wait("carol"));
        assert_eq!(conn.raw(again), queued(2));
        let options = "once session s queue 9007199254740991";
        let last = conn.raw(format!("rlock.acquire {name} dave 1 {options}"));
        assert_eq!(last, queued(3));
        assert_eq!(server.waiting_owners(&name), ["bob", "carol", "dave"]);
    }
}

#[test]
fn acquire_for_a_session_answers_as_without() {
    let server = Server::start();
    let _life = server.session_connection("s");
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        let name = format!("k{index}");
        let raw = conn.raw(format!("RLOCK.ACQUIRE {name} alice 30000 SESSION s"));
        assert!(raw.starts_with("*2\r\n:1\r\n:"), "{raw}");
        let raw = conn.raw(format!("RLOCK.ACQUIRE {name} bob 30000 SESSION s"));
        assert!(raw.starts_with("*2\r\n:0\r\n:"), "{raw}");
        let raw = conn.raw(format!("RLOCK.RENEW {name} alice 30000 SESSION s"));
        assert_eq!(raw, ":1\r\n");
        let raw = conn.raw(format!("RLOCK.RENEW {name} bob 30000 SESSION s"));
        assert_eq!(raw, ":0\r\n");
    }
}

const SESSION_LENGTH: &str = "ERR session must have 1 to 1024 bytes";
const WAIT_BOUNDS: &str = "ERR wait-ms must be an integer from 0 to 9007199254740991";

/// `command` gets this error in both protocols, byte for byte.
#[track_caller]
fn answers_with(server: &Server, command: &str, error: &str) {
    for mut conn in both_protocols(server) {
        assert_eq!(conn.raw(command), format!("-{error}\r\n"), "{command}");
    }
}

#[test]
fn acquire_and_renew_refuse_what_is_wrong_about_a_session() {
    let server = Server::start();
    server.connect().take("held", "alice");
    let too_long = "s".repeat(1025);
    let no_session = "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first";
    let (length, wait) = (SESSION_LENGTH, WAIT_BOUNDS);
    let twice = |option| format!("ERR option '{option}' is given twice");
    for (command, error) in [
        (
            "RLOCK.ACQUIRE k a 1 QUEUE 0",
            "ERR option 'QUEUE' needs 'SESSION'",
        ),
        (
            "RLOCK.ACQUIRE k a 1 BLOCK 1 WANTED",
            "ERR option 'WANTED' needs 'SESSION'",
        ),
        (
            "RLOCK.RENEW held alice 1 WANTED",
            "ERR option 'WANTED' needs 'SESSION'",
        ),
        (
            "RLOCK.ACQUIRE k a 1 WANTED SESSION s wanted",
            &twice("wanted"),
        ),
        (
            "RLOCK.ACQUIRE k a 1 QUEUE 0 SESSION s BLOCK 0",
            "ERR option 'QUEUE' cannot be combined with 'BLOCK'",
        ),
        (
            "RLOCK.ACQUIRE k a 1 BLOCK 0 QUEUE 0",
            "ERR option 'QUEUE' cannot be combined with 'BLOCK'",
        ),
        (
            "RLOCK.ACQUIRE k a 1 QUEUE",
            "ERR option 'QUEUE' needs a value",
        ),
        (
            "RLOCK.ACQUIRE k a 1 SESSION",
            "ERR option 'SESSION' needs a value",
        ),
        ("RLOCK.ACQUIRE k a 1 SESSION s session s", &twice("session")),
        ("RLOCK.ACQUIRE k a 1 QUEUE 0 QUEUE 0", &twice("QUEUE")),
        ("RLOCK.ACQUIRE k a 1 GRACE 1", "ERR unknown option 'GRACE'"),
        ("RLOCK.ACQUIRE k a 1 QUEUE -1 SESSION s", wait),
        ("RLOCK.ACQUIRE k a 1 QUEUE SESSION s", wait),
        ("RLOCK.ACQUIRE k a 1 QUEUE 9007199254740992 SESSION s", wait),
        ("RLOCK.ACQUIRE k a 1 SESSION s", no_session),
        ("RLOCK.ACQUIRE held a 1 QUEUE 0 SESSION s", no_session),
        ("RLOCK.ACQUIRE held a 1 BLOCK 0 SESSION s", no_session),
        (&format!("RLOCK.ACQUIRE k a 1 SESSION {too_long}"), length),
        ("RLOCK.RENEW held alice 1 SESSION s", no_session),
        (
            "RLOCK.RENEW held alice 1 SESSION",
            "ERR option 'SESSION' needs a value",
        ),
        (
            "RLOCK.RENEW held alice 1 SESSION s SESSION s",
            &twice("SESSION"),
        ),
        (
            &format!("RLOCK.RENEW held alice 1 SESSION {too_long}"),
            length,
        ),
        (
            "RLOCK.RELEASE held alice SESSION s",
            "ERR unknown option 'SESSION'",
        ),
    ] {
        answers_with(&server, command, error);
    }
    for command in [
        &["RLOCK.ACQUIRE", "k", "a", "1", "SESSION", ""][..],
        &["RLOCK.RENEW", "held", "alice", "1", "SESSION", ""],
    ] {
        assert_eq!(server.connect().cmd(command).error(), length, "{command:?}");
    }
    assert_eq!(server.run("EXISTS k"), 0);
    assert!(server.waiting_owners("held").is_empty());
}

#[test]
fn events_refuses_what_it_does_not_understand_and_names_it() {
    let server = Server::start();
    let too_long = "s".repeat(1025);
    let grace = "ERR grace-ms must be an integer from 0 to 3600000";
    let epoch = "ERR EPOCH must be an integer from 0 to 9007199254740991";
    let after = "ERR AFTER must be a life and the number of an event, \
                 integers from 0 to 9007199254740991";
    let (length, wait) = (SESSION_LENGTH, WAIT_BOUNDS);
    let twice = |option| format!("ERR option '{option}' is given twice");
    for (command, error) in [
        ("RLOCK.EVENTS s soon", "ERR unknown option 'soon'"),
        ("RLOCK.EVENTS s QUEUE 0", "ERR unknown option 'QUEUE'"),
        (&format!("RLOCK.EVENTS {too_long}"), length),
        ("RLOCK.EVENTS s BLOCK", "ERR option 'BLOCK' needs a value"),
        ("RLOCK.EVENTS s GRACE", "ERR option 'GRACE' needs a value"),
        ("RLOCK.EVENTS s BLOCK 1 BLOCK 1", &twice("BLOCK")),
        ("RLOCK.EVENTS s GRACE 1 grace 1", &twice("grace")),
        ("RLOCK.EVENTS s EPOCH", "ERR option 'EPOCH' needs a value"),
        ("RLOCK.EVENTS s EPOCH 1 EPOCH 1", &twice("EPOCH")),
        ("RLOCK.EVENTS s EPOCH -1", epoch),
        ("RLOCK.EVENTS s EPOCH 9007199254740992", epoch),
        ("RLOCK.EVENTS s AFTER 1", "ERR option 'AFTER' needs a value"),
        ("RLOCK.EVENTS s AFTER 1 1 AFTER 1 1", &twice("AFTER")),
        ("RLOCK.EVENTS s AFTER 1 -1", after),
        ("RLOCK.EVENTS s AFTER x 1", after),
        ("RLOCK.EVENTS s AFTER 9007199254740992 1", after),
        ("RLOCK.EVENTS s BLOCK -1", wait),
        ("RLOCK.EVENTS s BLOCK x", wait),
        ("RLOCK.EVENTS s GRACE -1", grace),
        ("RLOCK.EVENTS s GRACE 1.5", grace),
        ("RLOCK.EVENTS s GRACE 3600001", grace),
        ("RLOCK.EVENTS s GRACE 9223372036854775808", grace),
    ] {
        answers_with(&server, command, error);
    }
    assert_eq!(server.connect().cmd(&["RLOCK.EVENTS", ""]).error(), length);
    assert_eq!(server.info_number("rlock_sessions"), 0);
}

#[test]
fn events_has_its_bounds_too() {
    let server = Server::start();
    let longest = "s".repeat(1024);
    let mut conn = server.connect();
    let largest = "epoch 9007199254740991 after 9007199254740991 9007199254740991";
    let events = format!("rlock.events {longest} grace 3600000 block 1 {largest}");
    assert_eq!(conn.run(events).events(), []);
    assert_eq!(
        conn.run(format!("RLOCK.EVENTS {longest} GRACE 0")).events(),
        []
    );
    conn.take_for("k", "alice", &longest);
    let mut waiting = server.blocked_in(&format!("RLOCK.EVENTS {longest} BLOCK {LEASE_MAX}"));
    conn.run("RLOCK.BREAK k");
    assert_eq!(waiting.read().event().0, "lost k alice");
}

#[test]
fn events_tells_all_about_its_subject() {
    let server = Server::start();
    for mut life in both_protocols(&server) {
        let mut conn = server.connect();
        let (number, _) = life.run("RLOCK.EVENTS s").told();
        let told = |events: &[String]| {
            let events = events.iter().enumerate();
            let events = events.map(|(at, event)| format!("*8\r\n:{}\r\n{event}", at + 1));
            let events: Vec<_> = events.collect();
            let count = events.len();
            format!("*2\r\n:{number}\r\n*{count}\r\n{}", events.concat())
        };
        assert_eq!(life.raw("RLOCK.EVENTS s BLOCK 1"), told(&[]));
        conn.take("k", "alice");
        conn.queue("k", "bob", "s");
        conn.let_go("k", "alice");
        let token = |conn: &mut Conn| conn.run("HGET k fence").text().replace('t', "");
        let event = |kind: &str, value: &str, token: &str| {
            let [key, owner, mode] = ["$1\r\nk", "$3\r\nbob", "$5\r\nplain"];
            format!("${kind}\r\n{key}\r\n{owner}\r\n{value}\r\n:{token}\r\n{mode}\r\n:0\r\n")
        };
        let is = token(&mut conn);
        let mut all = vec![event("7\r\ngranted", &format!(":{is}"), &is)];
        let mut is_told = |life: &mut Conn, event: String| {
            all.push(event);
            let raw = life.raw(format!("RLOCK.EVENTS s AFTER {number} 0 BLOCK 0"));
            assert_eq!(raw, told(&all));
        };
        for (end, reason) in [
            ("RLOCK.BREAK k", "$6\r\nbroken"),
            ("DEL k", "$7\r\ndeleted"),
            ("RLOCK.RENEW k bob 1", "$7\r\nexpired"),
            ("RLOCK.RELEASE k bob", "$8\r\nreleased"),
        ] {
            conn.run("RLOCK.ACQUIRE k bob 30000 ONCE SESSION s").held();
            let is = token(&mut conn);
            conn.run(end);
            rlock_tests::until("the server has seen it", || {
                server.info_number("rlock_session_holds") == 0
            });
            is_told(&mut life, event("4\r\nlost", reason, &is));
        }
        conn.pipeline(&["HSET k alice 1", "RLOCK.ACQUIRE k bob 1 QUEUE 1 SESSION s"]);
        let waits = |conn: &mut Conn| conn.run("RLOCK.INFO k").get("waiters") != &0;
        rlock_tests::until("the wait is over", || !waits(&mut conn));
        is_told(&mut life, event("7\r\ntimeout", ":-1", "0"));
        conn.queue("k", "bob", "s");
        conn.pipeline(&["SET text v", "RENAME text k"]);
        let text = "WRONGTYPE Operation against a key holding the wrong kind of value";
        let error = event("5\r\nerror", &format!("${}\r\n{text}", text.len()), "0");
        rlock_tests::until("it is refused", || server.info_number("rlock_waiters") == 0);
        is_told(&mut life, error);
        conn.run("DEL k");
        let last = life.run("RLOCK.EVENTS s").told();
        assert_eq!(last, (number, vec![]), "all is acknowledged without AFTER");
        life.close();
        rlock_tests::until("it is over", || server.info_number("rlock_sessions") == 0);
    }
}

#[test]
fn bind_tells_the_life_and_the_server() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let (number, _) = life.run("RLOCK.EVENTS s").told();
    for (epoch, mut conn) in (1..).zip(both_protocols(&server)) {
        let raw = conn.raw(format!("rlock.bind s epoch {epoch}"));
        assert!(
            raw.starts_with(&format!("*2\r\n:{number}\r\n$40\r\n")),
            "{raw}"
        );
    }
    for (command, error) in [
        ("RLOCK.BIND s LATER 1", "ERR unknown option 'LATER'"),
        (
            "RLOCK.BIND s EPOCH -1",
            "ERR EPOCH must be an integer from 0 to 9007199254740991",
        ),
    ] {
        answers_with(&server, command, error);
    }
    let longest = "s".repeat(1024);
    let _life = server.session_connection(&longest);
    let bind = format!("RLOCK.BIND {longest} EPOCH 9007199254740991");
    assert_eq!(server.run(bind).array().len(), 2);
}

#[test]
fn events_tells_the_mode_and_the_database() {
    let server = Server::start();
    let (mut life, mut conn) = (server.session_connection("s"), server.connect());
    conn.run("SELECT 2");
    for (key, mode) in [
        ("a", ""),
        ("b", "READ"),
        ("c", "WRITE"),
        ("d", "PERMITS 1 OF 1"),
    ] {
        conn.run(format!("RLOCK.ACQUIRE {key} bob 30000 {mode} SESSION s"))
            .held();
        conn.run(format!("RLOCK.BREAK {key}"));
    }
    let (_, events) = life.run("RLOCK.EVENTS s").told();
    let modes: Vec<_> = events
        .iter()
        .map(|event| (&*event.mode, event.db))
        .collect();
    assert_eq!(
        modes,
        [("plain", 2), ("read", 2), ("write", 2), ("permits", 2)]
    );
}

#[test]
fn events_tells_the_one_that_was_taken_over() {
    let server = Server::start();
    for mut first in both_protocols(&server) {
        first.run("RLOCK.EVENTS s").events();
        first.send("RLOCK.EVENTS s BLOCK 0");
        first.expect_nothing_yet();
        let mut second = server.session_connection("s");
        let id = second.id();
        let expected = format!("TAKENOVER the connection that listens to this session now is {id}");
        assert_eq!(first.read().error(), expected);
    }
}

#[test]
fn a_wait_that_could_never_end_is_refused_with_the_circle_in_words() {
    let server = Server::start();
    let _life = server.session_connection("s");
    let mut conn = server.connect();
    conn.take("x", "alice");
    conn.take("y", "bob");
    conn.queue("y", "alice", "s");
    for mut conn in both_protocols(&server) {
        assert_eq!(
            conn.raw("RLOCK.ACQUIRE x bob 1000 BLOCK 0"),
            "-DEADLOCK 2 owners would wait for each other: \
             'bob' waits for 'alice' at 'x', 'alice' waits for 'bob' at 'y'\r\n"
        );
    }
}

#[test]
fn cancel_tells_queued_waiters_by_an_event() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    assert_eq!(conn.raw("RLOCK.CANCEL k bob"), ":1\r\n");
    let (event, ttl) = life.run("RLOCK.EVENTS s").event();
    assert_eq!(event, "timeout k bob");
    assert!(ttl.int() > 20_000);
}

#[test]
fn release_counts_down_and_frees() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        conn.take("k", "alice");
        conn.run("RLOCK.ACQUIRE k alice 30000").held();
        assert_eq!(conn.raw("RLOCK.RELEASE k alice"), ":1\r\n");
        assert_eq!(conn.run("EXISTS k"), 1);
        assert_eq!(conn.raw("RLOCK.RELEASE k alice"), ":0\r\n");
        assert_eq!(conn.run("EXISTS k"), 0);
    }
}

#[test]
fn release_by_anybody_but_the_owner_is_null_and_changes_nothing() {
    let server = Server::start();
    let [mut two, mut three] = both_protocols(&server);
    assert_eq!(two.raw("RLOCK.RELEASE k alice"), "$-1\r\n", "free");
    assert_eq!(three.raw("RLOCK.RELEASE k alice"), "_\r\n", "free");
    two.take("k", "alice");
    let before = server.run("HGETALL k");
    assert_eq!(two.raw("RLOCK.RELEASE k bob"), "$-1\r\n");
    assert_eq!(three.raw("RLOCK.RELEASE k Alice"), "_\r\n");
    assert_eq!(server.run("HGETALL k"), before);
}

#[test]
fn release_with_a_token_frees_only_that_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    let old = conn.take("k", "alice");
    conn.let_go("k", "alice");
    let new = conn.take("k", "alice");
    assert_eq!(
        conn.run(format!("RLOCK.RELEASE k alice TOKEN {old}")),
        Reply::Null
    );
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
    assert_eq!(
        conn.run(format!("RLOCK.RELEASE k bob TOKEN {new}")),
        Reply::Null
    );
    assert_eq!(conn.run(format!("RLOCK.RELEASE k alice token {new}")), 0);
    assert_eq!(server.holder("k"), None);
}

#[test]
fn release_leaves_the_lease_alone_unless_told() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 30000").held();
    conn.run("RLOCK.ACQUIRE k alice 30000").held();
    let token = conn.run("RLOCK.ACQUIRE k alice 30000").held().1;
    let end = conn.run("PEXPIRETIME k").int();
    assert_eq!(conn.let_go("k", "alice"), 2);
    assert_eq!(conn.run("PEXPIRETIME k"), end);
    assert_eq!(
        conn.run(format!("RLOCK.RELEASE k alice LEASE 60000 TOKEN {token}")),
        1
    );
    assert!(conn.run("PTTL k").int() > 50_000);
    assert_eq!(conn.run("RLOCK.RELEASE k alice LEASE 60000"), 0);
    assert_eq!(conn.run("EXISTS k"), 0, "a lease for no holds is no lease");
}

#[test]
fn release_refuses_what_it_does_not_understand_and_names_it() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = conn.take("k", "alice");
    refuses(&mut conn, "RLOCK.RELEASE k alice NOW", &["NOW"]);
    refuses(&mut conn, "RLOCK.RELEASE k alice TOKEN", &["TOKEN"]);
    refuses(&mut conn, "RLOCK.RELEASE k alice LEASE", &["LEASE"]);
    refuses(&mut conn, "RLOCK.RELEASE k alice ONCE", &["ONCE"]);
    refuses(
        &mut conn,
        "RLOCK.RELEASE k alice LEASE 5 LEASE 5",
        &["LEASE"],
    );
    let twice = format!("RLOCK.RELEASE k alice TOKEN {token} TOKEN {token}");
    refuses(&mut conn, &twice, &["TOKEN"]);
    for bad in ["0", "-1", "t5", "x", "9223372036854775808"] {
        refuses(
            &mut conn,
            &format!("RLOCK.RELEASE k alice TOKEN {bad}"),
            &["token", "1"],
        );
    }
    let largest = "RLOCK.RELEASE k alice TOKEN 9223372036854775807";
    assert_eq!(conn.run(largest), Reply::Null);
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
}

#[test]
fn renew_starts_the_lease_anew_for_the_holder_alone() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        let token = conn.take("k", "alice");
        assert_eq!(conn.raw("RLOCK.RENEW k alice 60000"), ":1\r\n");
        assert!(conn.run("PTTL k").int() > 50_000);
        assert_eq!(
            conn.run("RLOCK.RENEW k alice 20000"),
            1,
            "it may also shorten"
        );
        assert!(conn.run("PTTL k").int() <= 20_000);
        assert_eq!(
            conn.run(format!("RLOCK.RENEW k alice 60000 TOKEN {token}")),
            1
        );
        let end = conn.run("PEXPIRETIME k");
        assert_eq!(conn.raw("RLOCK.RENEW k bob 90000"), ":0\r\n");
        assert_eq!(
            conn.run(format!("RLOCK.RENEW k alice 90000 TOKEN {}", token - 1)),
            0
        );
        assert_eq!(conn.run("PEXPIRETIME k"), end);
        assert_eq!(
            conn.run("RLOCK.ACQUIRE k alice 1000").held(),
            (2, token),
            "no count changed"
        );
        conn.run("DEL k");
    }
}

#[test]
fn renew_never_revives_a_lock() {
    let server = Server::start();
    let mut conn = server.connect();
    assert_eq!(conn.run("RLOCK.RENEW k alice 1000"), 0);
    conn.run("RLOCK.ACQUIRE k alice 1").held();
    conn.run("DEBUG SLEEP 0.01");
    assert_eq!(conn.run("RLOCK.RENEW k alice 1000"), 0);
    assert_eq!(conn.run("EXISTS k"), 0);
}

#[test]
fn renew_refuses_what_it_does_not_understand_and_names_it() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    refuses(&mut conn, "RLOCK.RENEW k alice 1000 AGAIN", &["AGAIN"]);
    refuses(&mut conn, "RLOCK.RENEW k alice 1000 TOKEN", &["TOKEN"]);
    refuses(
        &mut conn,
        "RLOCK.RENEW k alice 1000 TOKEN 1 TOKEN 1",
        &["TOKEN"],
    );
    refuses(&mut conn, "RLOCK.RENEW k alice 1000 TOKEN zero", &["token"]);
    assert!(conn.run("PTTL k").int() > 20_000);
}

/// The rest is in `guard.rs`.
#[test]
fn guard_replies_byte_for_byte_what_the_command_replies() {
    let server = Server::start();
    server.connect().take("k", "alice");
    server.run("HSET hash f v");
    let [mut resp2, mut resp3] = both_protocols(&server);
    for (command, in_two, in_three) in [
        ("PING", "+PONG\r\n", "+PONG\r\n"),
        ("HLEN hash", ":1\r\n", ":1\r\n"),
        ("GET none", "$-1\r\n", "_\r\n"),
        (
            "HGETALL hash",
            "*2\r\n$1\r\nf\r\n$1\r\nv\r\n",
            "%1\r\n$1\r\nf\r\n$1\r\nv\r\n",
        ),
    ] {
        let command = format!("RLOCK.GUARD k alice CALL {command}");
        assert_eq!(resp2.raw(&command), in_two, "{command}");
        assert_eq!(resp3.raw(&command), in_three, "{command}");
    }
    for (command, error) in [
        (
            "k alice TOKEN",
            "ERR wrong number of arguments for 'rlock.guard' command",
        ),
        (
            "k alice READ CALL",
            "ERR CALL and the command to be run must follow",
        ),
        (
            "k alice READ TOKEN 7",
            "ERR CALL and the command to be run must follow",
        ),
        // The missing command is named before an owner that cannot be.
        (
            "k o:write READ TOKEN 7",
            "ERR CALL and the command to be run must follow",
        ),
        ("k alice ONCE CALL PING", "ERR unknown option 'ONCE'"),
        (
            "k alice READ READ CALL PING",
            "ERR option 'READ' is given twice",
        ),
        (
            "k alice READ WRITE CALL PING",
            "ERR option 'WRITE' cannot be combined with 'READ'",
        ),
        (
            "k alice TOKEN CALL PING",
            "ERR token must be an integer from 1 to 9223372036854775807",
        ),
        (
            "k alice CALL CONFIG GET save",
            "ERR command 'CONFIG|GET' cannot be guarded, the server does not let scripts run it",
        ),
        (
            "k alice CALL HLEN",
            "ERR wrong number of arguments for 'hlen' command",
        ),
    ] {
        let reply = resp2.run(format!("RLOCK.GUARD {command}"));
        assert_eq!(reply.error(), error, "{command}");
    }
}

#[test]
fn cancel_takes_the_owners_waiters_out_and_tells_them_at_once() {
    let server = Server::start();
    server.connect().take("k", "alice");
    for mut conn in both_protocols(&server) {
        let mut one = server.wait_in_queue("k", "bob");
        let mut other = server.wait_in_queue("k", "carol");
        assert_eq!(conn.raw("RLOCK.CANCEL k bob"), ":1\r\n");
        assert!(one.read().refused() > 20_000);
        other.expect_nothing_yet();
        assert_eq!(server.waiting_owners("k"), ["carol"]);
        assert_eq!(conn.run("RLOCK.CANCEL k carol"), 1);
        assert_eq!(conn.run("RLOCK.CANCEL k carol"), 0);
        assert_eq!(conn.run("RLOCK.CANCEL k alice"), 0, "it touches no hold");
        assert_eq!(server.holder("k").as_deref(), Some("alice"));
    }
}

#[test]
fn break_ends_the_hold_whoever_has_it() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        assert_eq!(conn.raw("RLOCK.BREAK k"), ":0\r\n");
        conn.take("k", "alice");
        conn.run("RLOCK.ACQUIRE k alice 30000").held();
        assert_eq!(conn.raw("RLOCK.BREAK k"), ":1\r\n");
        assert_eq!(conn.run("EXISTS k"), 0);
        assert_eq!(conn.run("RLOCK.RELEASE k alice"), Reply::Null);
    }
}

#[test]
fn break_grants_the_next_waiter() {
    let server = Server::start();
    let token = server.connect().take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    assert!(bob.read().held().1 > token);
    assert_eq!(server.run("RLOCK.RENEW k alice 1000"), 0);
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
}

#[test]
fn info_of_a_free_lock() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        let info = conn.run("RLOCK.INFO k");
        assert_eq!(
            info.keys(),
            [
                "owner",
                "count",
                "token",
                "ttl-ms",
                "held-ms",
                "session",
                "client-id",
                "waiters",
                "queue"
            ]
        );
        assert_eq!(info.get("owner"), &Reply::Null);
        assert_eq!(info.get("count"), &0);
        for unknown in ["token", "held-ms", "session", "client-id"] {
            assert_eq!(info.get(unknown), &Reply::Null, "{unknown}");
        }
        assert_eq!(info.get("waiters"), &0);
        assert!(info.get("queue").array().is_empty());
    }
}

#[test]
fn info_tells_the_holder_and_the_queue_in_order() {
    let server = Server::start();
    let mut alice = server.connect();
    let token = alice.take("k", "alice");
    alice.run("RLOCK.ACQUIRE k alice 30000").held();
    let mut bob = server.connect();
    let bobs_id = bob.id();
    bob.send("RLOCK.ACQUIRE k bob 30000 BLOCK 20000");
    bob.expect_nothing_yet();
    let _carol = server.wait_in_queue("k", "carol");
    for mut conn in both_protocols(&server) {
        let info = conn.run("RLOCK.INFO k");
        assert_eq!(info.get("owner"), &"alice");
        assert_eq!(info.get("count"), &2);
        assert_eq!(info.get("token"), &token);
        assert!((20_000..=30_000).contains(&info.get("ttl-ms").int()));
        assert_eq!(info.get("waiters"), &2);
        let queue = info.get("queue").array();
        assert_eq!(
            queue[0].keys(),
            ["owner", "session", "client-id", "waited-ms", "left-ms"]
        );
        assert_eq!(queue[0].get("owner"), &"bob");
        assert_eq!(queue[0].get("client-id"), &bobs_id);
        let (waited, left) = (
            queue[0].get("waited-ms").int(),
            queue[0].get("left-ms").int(),
        );
        assert!(
            waited >= 0 && left > 0 && waited + left <= 20_001,
            "{waited} + {left}"
        );
        assert_eq!(queue[1].get("owner"), &"carol");
        assert_eq!(queue[1].get("left-ms"), &-1, "without limit");
    }
}

#[test]
fn info_tells_how_long_a_lock_is_held_and_for_which_session() {
    let server = Server::builder().config("rlock.fence-guard-ms 0").start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    let id = life.id();
    conn.take_for("k", "alice", "s");
    conn.take("alone", "alice");
    conn.run("HSET script alice 1");
    let _others = server.session_connection("t");
    conn.run("RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION t")
        .queued();
    rlock_tests::until("some time has passed", || {
        let mut held = |name| {
            let info = conn.run(format!("RLOCK.INFO {name}"));
            info.get("held-ms").int()
        };
        held("k") >= 20 && held("alone") >= 20
    });
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(info.get("session"), &"s");
    assert_eq!(info.get("client-id"), &id);
    assert_eq!(info.get("queue").array()[0].get("session"), &"t");
    let held = conn.run("RLOCK.INFO alone").get("held-ms").int();
    assert!(held < 60_000, "{held}, by its token");
    for name in ["alone", "script"] {
        let info = conn.run(format!("RLOCK.INFO {name}"));
        assert_eq!(info.get("session"), &Reply::Null, "{name}");
        assert_eq!(info.get("client-id"), &Reply::Null, "{name}");
    }
    assert_eq!(conn.run("RLOCK.INFO script").get("held-ms"), &Reply::Null);
    // A hold that another session takes over is as old as before.
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 SESSION t"), 1);
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(info.get("session"), &"t");
    assert!(info.get("held-ms").int() >= 20);
}

/// In the guard's time tokens do not tell when they were minted.
#[test]
fn info_tells_how_long_a_session_holds_a_lock_also_after_a_start() {
    let server = Server::start();
    let mut conn = server.connect();
    let life = server.session_connection("s");
    conn.run("RLOCK.EVENTS s GRACE 60000");
    conn.take_for("k", "alice", "s");
    conn.take("alone", "alice");
    conn.take("last", "alice");
    // Renewed for its session it is the same hold.
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 SESSION s"), 1);
    for (name, is_known) in [("k", true), ("alone", false), ("last", true)] {
        let info = conn.run(format!("RLOCK.INFO {name}"));
        assert_eq!(info.get("held-ms") != &Reply::Null, is_known, "{name}");
    }
    drop(life);
    conn.run("RLOCK.ACQUIRE rw alice 30000 READ SESSION s")
        .held();
    conn.run("RLOCK.ACQUIRE rw bob 30000 READ").held();
    let info = conn.run("RLOCK.INFO rw");
    assert_eq!(info.get("session"), &Reply::Null, "there is no writer");
    for holder in info.get("holders").array() {
        let is_sessions = *holder.get("owner") == "alice";
        assert_eq!(*holder.get("session") == "s", is_sessions);
    }
}

#[test]
fn sessions_are_listed_with_their_connections_and_what_they_have() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        assert_eq!(conn.raw("RLOCK.SESSIONS"), "*0\r\n");
    }
    let mut conn = server.connect();
    let (a, mut b) = (server.session_connection("a"), server.connect());
    b.run("RLOCK.EVENTS b GRACE 60000 EPOCH 7").events();
    conn.run("RLOCK.BIND b EPOCH 1");
    let bound = conn.id().into();
    conn.take_for("lost", "alice", "b");
    conn.run("DEL lost");
    conn.take_for("k", "alice", "a");
    conn.take_for("m", "alice", "b");
    conn.queue("k", "bob", "b");
    conn.run("RLOCK.MACQUIRE carol 30000 2 k m QUEUE 0 SESSION b")
        .queued();
    let client = b.run("CLIENT INFO").text();
    let mut words = client.split(' ');
    let address = words.find_map(|word| word.strip_prefix("addr=")).unwrap();
    let id = b.id();
    for mut conn in both_protocols(&server) {
        let told = conn.run("RLOCK.SESSIONS");
        let [a, b] = told.array() else {
            panic!("not two: {told:?}")
        };
        assert_eq!(
            a.keys(),
            [
                "session",
                "client-id",
                "address",
                "holds",
                "waiters",
                "grace-ms",
                "age-ms",
                "listening",
                "epoch",
                "bound",
                "unacknowledged"
            ]
        );
        assert_eq!(a.get("session"), &"a");
        assert_eq!((a.get("holds"), a.get("waiters")), (&1.into(), &0.into()));
        assert_eq!(a.get("grace-ms"), &0);
        assert_eq!(b.get("client-id"), &id);
        assert_eq!(b.get("address").text(), address);
        assert_eq!((b.get("holds"), b.get("waiters")), (&1.into(), &2.into()));
        assert_eq!(b.get("grace-ms"), &60_000);
        assert!((0..60_000).contains(&b.get("age-ms").int()));
        assert_eq!(b.get("listening"), &1);
        assert_eq!((a.get("epoch"), b.get("epoch")), (&Reply::Null, &7.into()));
        assert_eq!((a.get("bound"), b.get("bound")), (&Reply::Null, &bound));
        assert_eq!(b.get("unacknowledged"), &1);
    }
    assert!(
        conn.resp3()
            .raw("RLOCK.SESSIONS COUNT 1")
            .starts_with("*1\r\n%11\r\n")
    );
    drop((a, b));
    let mut conn = server.connect();
    rlock_tests::until("only the one with a grace is left", || {
        conn.run("RLOCK.SESSIONS").array().len() == 1
    });
    rlock_tests::until("its connection is gone", || {
        conn.run("RLOCK.SESSIONS").array()[0].get("listening") == &0
    });
    let told = conn.run("RLOCK.SESSIONS");
    for field in ["client-id", "address"] {
        assert_eq!(told.array()[0].get(field), &Reply::Null, "{field}");
    }
}

#[test]
fn sessions_can_be_narrowed_and_refuse_what_they_do_not_understand() {
    let server = Server::start();
    let mut conn = server.connect();
    for name in ["web:2", "cron", "web:1"] {
        conn.run(format!("RLOCK.EVENTS {name}")).events();
    }
    let mut names = |command: &str| -> Vec<String> {
        let told = conn.run(command);
        let sessions = told.array().iter();
        sessions.map(|one| one.get("session").text()).collect()
    };
    assert_eq!(names("RLOCK.SESSIONS"), ["cron", "web:1", "web:2"]);
    assert_eq!(names("RLOCK.SESSIONS MATCH web:*"), ["web:1", "web:2"]);
    assert_eq!(names("rlock.sessions count 1 match web:*"), ["web:1"]);
    assert_eq!(names("RLOCK.SESSIONS MATCH nothing").len(), 0);
    refuses(&mut conn, "RLOCK.SESSIONS web:1", &["web:1"]);
    refuses(&mut conn, "RLOCK.SESSIONS MATCH", &["MATCH"]);
    for bad in ["0", "-1", "x", "9223372036854775808"] {
        refuses(
            &mut conn,
            &format!("RLOCK.SESSIONS COUNT {bad}"),
            &["COUNT", "1 to"],
        );
    }
}

/// The tests of its entries are in `log.rs`.
#[test]
fn the_log_is_empty_at_first_and_reset_answers_ok() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        assert_eq!(conn.raw("RLOCK.LOG"), "*0\r\n");
        assert_eq!(conn.raw("RLOCK.LOG RESET"), "+OK\r\n");
    }
}

#[test]
fn info_is_a_map_in_resp3_and_a_flat_array_in_resp2() {
    let server = Server::start();
    server.connect().take("k", "alice");
    let _bob = server.wait_in_queue("k", "bob");
    let [mut two, mut three] = both_protocols(&server);
    let raw = two.raw("RLOCK.INFO k");
    assert!(
        raw.starts_with("*18\r\n$5\r\nowner\r\n$5\r\nalice\r\n$5\r\ncount\r\n:1\r\n"),
        "{raw}"
    );
    assert!(
        raw.contains("$5\r\nqueue\r\n*1\r\n*10\r\n$5\r\nowner\r\n$3\r\nbob\r\n"),
        "{raw}"
    );
    let raw = three.raw("RLOCK.INFO k");
    assert!(
        raw.starts_with("%9\r\n$5\r\nowner\r\n$5\r\nalice\r\n$5\r\ncount\r\n:1\r\n"),
        "{raw}"
    );
    assert!(
        raw.contains("$5\r\nqueue\r\n*1\r\n%5\r\n$5\r\nowner\r\n$3\r\nbob\r\n"),
        "{raw}"
    );
}

#[test]
fn list_names_the_locks_with_waiters_most_waiters_first() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        assert_eq!(conn.raw("RLOCK.LIST"), "*0\r\n");
    }
    let mut alice = server.connect();
    let mut lines = Vec::new();
    for (name, waiters) in [("one", 1), ("three", 3), ("two", 2), ("held-only", 0)] {
        alice.take(name, "alice");
        let waiter = |at| server.wait_in_queue(name, &format!("bob{at}"));
        lines.extend((0..waiters).map(waiter));
    }
    for mut conn in both_protocols(&server) {
        let reply = conn.run("RLOCK.LIST");
        let rows: Vec<_> = reply.array().iter().map(Reply::array).collect();
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row[0].text(), row[1].int()))
            .collect();
        assert_eq!(
            told,
            [("three".into(), 3), ("two".into(), 2), ("one".into(), 1)]
        );
        assert!(rows.iter().all(|row| row.len() == 3 && row[2].int() >= 0));
        assert!(
            rows[2][2].int() >= rows[0][2].int(),
            "the queue of `one` is the oldest"
        );
    }
}

#[test]
fn list_can_be_narrowed() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut lines = Vec::new();
    for (name, waiters) in [("order:1", 1), ("order:2", 2), ("stock", 3)] {
        alice.take(name, "alice");
        let waiter = |at| server.wait_in_queue(name, &format!("bob{at}"));
        lines.extend((0..waiters).map(waiter));
    }
    let mut names = |command: &str| -> Vec<String> {
        let reply = alice.run(command);
        reply
            .array()
            .iter()
            .map(|row| row.array()[0].text())
            .collect()
    };
    assert_eq!(names("RLOCK.LIST MATCH order:*"), ["order:2", "order:1"]);
    assert_eq!(names("RLOCK.LIST COUNT 2"), ["stock", "order:2"]);
    assert_eq!(names("rlock.list count 1 match order:?"), ["order:2"]);
    assert_eq!(names("RLOCK.LIST MATCH s[a-z]*k"), ["stock"]);
    assert_eq!(names("RLOCK.LIST MATCH nothing").len(), 0);
}

#[test]
fn list_refuses_what_it_does_not_understand_and_names_it() {
    let server = Server::start();
    let mut conn = server.connect();
    refuses(&mut conn, "RLOCK.LIST everything", &["everything"]);
    refuses(&mut conn, "RLOCK.LIST MATCH", &["MATCH"]);
    refuses(&mut conn, "RLOCK.LIST COUNT", &["COUNT"]);
    refuses(&mut conn, "RLOCK.LIST COUNT 1 COUNT 1", &["COUNT"]);
    refuses(&mut conn, "RLOCK.LIST MATCH a MATCH a", &["MATCH"]);
    let (long, longer) = ("*".repeat(1024), "*".repeat(1025));
    for list in ["LIST", "LOG", "SESSIONS"] {
        assert!(!conn.run(format!("RLOCK.{list} MATCH {long}")).is_error());
        let longer = format!("RLOCK.{list} MATCH {longer}");
        refuses(&mut conn, &longer, &["pattern", "1024 bytes"]);
    }
    for bad in ["0", "-1", "x", "9223372036854775808"] {
        refuses(&mut conn, &format!("RLOCK.LIST COUNT {bad}"), &["COUNT"]);
    }
}

#[test]
fn too_few_and_too_many_arguments_are_refused() {
    let server = Server::start();
    let mut conn = server.connect();
    for command in [
        "RLOCK.ACQUIRE",
        "RLOCK.ACQUIRE k",
        "RLOCK.ACQUIRE k a",
        "RLOCK.RELEASE",
        "RLOCK.RELEASE k",
        "RLOCK.RENEW k",
        "RLOCK.RENEW k a",
        "RLOCK.CANCEL k",
        "RLOCK.BREAK",
        "RLOCK.BREAK k more",
        "RLOCK.EVENTS",
        "RLOCK.BIND",
        "RLOCK.BIND s",
        "RLOCK.BIND s EPOCH",
        "RLOCK.BIND s EPOCH 1 more",
        "RLOCK.INFO",
        "RLOCK.INFO k more",
        "RLOCK.MACQUIRE",
        "RLOCK.MACQUIRE a 1000",
        "RLOCK.MACQUIRE a 1000 1",
        "RLOCK.MRELEASE a",
        "RLOCK.MRELEASE a 1",
        "RLOCK.MRENEW a 1000",
        "RLOCK.MRENEW a 1000 1",
    ] {
        refuses(&mut conn, command, &["wrong number of arguments"]);
    }
}

#[test]
fn another_type_at_the_key_is_wrongtype() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("SET k v");
    for command in [
        "RLOCK.ACQUIRE k a 1000",
        "RLOCK.ACQUIRE k a 1000 BLOCK 0",
        "RLOCK.RELEASE k a",
        "RLOCK.RENEW k a 1000",
        "RLOCK.BREAK k",
        "RLOCK.INFO k",
    ] {
        let error = conn.run(command).error();
        assert!(error.starts_with("WRONGTYPE "), "{command}: {error}");
    }
    assert_eq!(conn.run("GET k"), "v");
}

#[test]
fn tokens_grow_with_every_grant() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut last = 0;
    for round in 0..100 {
        let name = format!("k{}", round % 7);
        let token = conn.take(&name, "alice");
        assert!(token > last, "{token} after {last}");
        last = token;
        conn.let_go(&name, "alice");
    }
    let seconds = conn.run("TIME").texts()[0].parse::<i64>().unwrap();
    let ahead = last / 1_000_000 - seconds;
    assert!((-15..=15).contains(&ahead), "{ahead} s from the clock");
}

#[test]
fn read_and_write_reply_as_plain_ones_do() {
    let server = Server::start();
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        let key = format!("k{index}");
        let (count, token) = conn
            .run(format!("RLOCK.ACQUIRE {key} alice 30000 READ"))
            .held();
        assert_eq!(count, 1);
        let again = conn
            .run(format!("RLOCK.ACQUIRE {key} alice 30000 READ"))
            .held();
        assert_eq!(again, (2, token));
        let other = conn
            .run(format!("RLOCK.ACQUIRE {key} bob 30000 READ"))
            .held();
        assert!(other.1 > token, "each grant has a larger one");
        let left = conn
            .run(format!("RLOCK.ACQUIRE {key} carol 30000 WRITE"))
            .refused();
        assert!((20_000..=30_000).contains(&left), "{left}");
        assert_eq!(conn.run(format!("RLOCK.RENEW {key} alice 1000 READ")), 1);
        assert_eq!(conn.run(format!("RLOCK.RENEW {key} alice 1000 WRITE")), 0);
        assert_eq!(conn.run(format!("RLOCK.RELEASE {key} alice READ")), 1);
        assert_eq!(
            conn.run(format!("RLOCK.RELEASE {key} alice WRITE")),
            Reply::Null
        );
    }
}

#[test]
fn permits_reply_how_many_and_limit_what_it_was() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    assert_eq!(conn.run("RLOCK.LIMIT p 3"), 0);
    assert_eq!(conn.run("RLOCK.LIMIT p 2"), 3);
    let (permits, _) = conn.run("RLOCK.ACQUIRE p alice 30000 PERMITS 2").held();
    assert_eq!(permits, 2);
    conn.run("RLOCK.ACQUIRE p bob 30000 PERMITS 1").refused();
    let queue = "RLOCK.ACQUIRE p bob 30000 PERMITS 1 QUEUE 0 SESSION s";
    assert_eq!(conn.run(queue).queued(), 1);
    assert_eq!(conn.run("RLOCK.RENEW p alice 30000 PERMITS"), 1);
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 1);
    conn.run("RLOCK.EVENTS s").granted("p", "bob");
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 0);
    assert_eq!(conn.run("RLOCK.LIMIT p 0"), 2);
}

#[test]
fn macquire_takes_all_or_none() {
    let server = Server::start();
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        let [a, b] = ["a", "b"].map(|name| format!("{name}{index}"));
        let all = format!("RLOCK.MACQUIRE alice 30000 3 {a} {b} {a}");
        let (count, token) = conn.run(&all).held();
        assert_eq!(count, 1);
        assert_eq!(conn.run(&all).held(), (2, token));
        let left = conn
            .run(format!("RLOCK.MACQUIRE bob 30000 2 free {a}"))
            .refused();
        assert!((20_000..=30_000).contains(&left), "{left}");
        assert_eq!(conn.run("EXISTS free"), 0);
    }
}

#[test]
fn mrelease_and_mrenew_tell_how_many() {
    let server = Server::start();
    for mut conn in both_protocols(&server) {
        conn.run("RLOCK.MACQUIRE alice 30000 2 a b").held();
        assert_eq!(conn.run("RLOCK.MRENEW alice 60000 3 a b c"), 2);
        assert!(conn.run("PTTL a").int() > 30_000);
        assert_eq!(conn.run("RLOCK.MRELEASE alice 3 a b c"), 2);
        assert_eq!(conn.run("EXISTS a b"), 0);
        assert_eq!(conn.run("RLOCK.MRENEW alice 60000 1 a"), 0);
    }
}

#[test]
fn several_keys_are_as_many_as_numkeys_says() {
    let server = Server::start();
    let mut conn = server.connect();
    for command in [
        "RLOCK.MACQUIRE alice 1000 0 a",
        "RLOCK.MACQUIRE alice 1000 1025 a",
        "RLOCK.MACQUIRE alice 1000 2 a",
        "RLOCK.MRELEASE alice x a",
        "RLOCK.MRENEW alice 1000 -1 a",
    ] {
        refuses(&mut conn, command, &["numkeys", "1 to 1024"]);
    }
    refuses(&mut conn, "RLOCK.MACQUIRE alice 1000 1 a b", &["'b'"]);
    refuses(
        &mut conn,
        "RLOCK.MRELEASE alice 1 a ONCE",
        &["unknown option 'ONCE'"],
    );
}

#[test]
fn acquire_with_read_or_write_waits_and_queues_as_without() {
    let server = Server::start();
    let _life = server.session_connection("s");
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        for mode in ["READ", "WRITE"] {
            let key = format!("{mode}{index}");
            let token = conn
                .run(format!("RLOCK.ACQUIRE {key} alice 30000 WRITE"))
                .held()
                .1;
            let raw = conn.raw(format!("RLOCK.ACQUIRE {key} bob 30000 {mode}"));
            assert!(raw.starts_with("*2\r\n:0\r\n:"), "{raw}");
            let raw = conn.raw(format!("RLOCK.ACQUIRE {key} bob 30000 {mode} BLOCK 5"));
            assert!(raw.starts_with("*2\r\n:0\r\n:"), "{raw}");
            let queue = format!("rlock.acquire {key} bob 30000 once queue 0 session s {mode}");
            assert_eq!(conn.run(&queue).queued(), 1);
            assert_eq!(conn.run(&queue).queued(), 1);
            conn.send(format!("RLOCK.ACQUIRE {key} carol 30000 BLOCK 0 {mode}"));
            conn.expect_nothing_yet();
            assert_eq!(server.run(format!("RLOCK.CANCEL {key} bob")), 1);
            let release = format!("RLOCK.RELEASE {key} alice WRITE TOKEN {token}");
            assert_eq!(server.run(release), 0);
            assert!(conn.read().held().1 > token);
            assert_eq!(conn.raw(format!("RLOCK.BREAK {key}")), ":1\r\n");
            let raw = conn.raw(format!("RLOCK.RELEASE {key} carol {mode}"));
            assert_eq!(raw, ["$-1\r\n", "_\r\n"][index]);
            assert_eq!(
                conn.raw(format!("RLOCK.RENEW {key} carol 1 {mode}")),
                ":0\r\n"
            );
        }
    }
}

#[test]
fn errors_about_read_and_write_are_exact() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("plain", "alice");
    conn.run("RLOCK.ACQUIRE rw alice 30000 READ").held();
    conn.run("SET text v");
    let both = "ERR option 'WRITE' cannot be combined with 'READ'";
    let writer = "ERR owner must not end in ':write' with READ or WRITE, as a writer's field does";
    let is_plain = "WRONGKIND the key holds a plain lock, not a read-write one";
    let is_read_write = "WRONGKIND the key holds a read-write lock, not a plain one";
    let wrong_type = "WRONGTYPE Operation against a key holding the wrong kind of value";
    let upgrade = "DEADLOCK a reader cannot become the writer: 'alice' waits for 'alice' at 'rw'";
    let twice = |option| format!("ERR option '{option}' is given twice");
    for (command, error) in [
        ("RLOCK.ACQUIRE k a 1 READ WRITE", both),
        ("RLOCK.ACQUIRE k a 1 WRITE BLOCK 0 READ", both),
        ("RLOCK.RELEASE k a WRITE READ", both),
        ("RLOCK.RENEW k a 1 READ WRITE", both),
        ("RLOCK.ACQUIRE k a 1 READ READ", &twice("READ")),
        ("RLOCK.RELEASE k a WRITE write", &twice("write")),
        ("RLOCK.RENEW k a 1 READ READ", &twice("READ")),
        ("RLOCK.ACQUIRE k a:write 1 READ", writer),
        ("RLOCK.ACQUIRE k :write 1 WRITE", writer),
        ("RLOCK.RELEASE k a:write READ", writer),
        ("RLOCK.RENEW k a:write 1 WRITE", writer),
        ("RLOCK.ACQUIRE plain alice 1 READ", is_plain),
        ("RLOCK.ACQUIRE plain alice 1 WRITE BLOCK 0", is_plain),
        ("RLOCK.RELEASE plain alice READ", is_plain),
        ("RLOCK.RENEW plain alice 1 WRITE", is_plain),
        ("RLOCK.ACQUIRE rw alice 1", is_read_write),
        ("RLOCK.ACQUIRE rw bob 1 BLOCK 0", is_read_write),
        ("RLOCK.RELEASE rw alice", is_read_write),
        ("RLOCK.RENEW rw alice 1", is_read_write),
        ("RLOCK.MACQUIRE alice 1 2 k rw", is_read_write),
        ("RLOCK.MRELEASE alice 2 k rw", is_read_write),
        ("RLOCK.MRENEW alice 1 2 rw k", is_read_write),
        ("RLOCK.ACQUIRE text alice 1 READ", wrong_type),
        ("RLOCK.RELEASE text alice WRITE", wrong_type),
        ("RLOCK.RENEW text alice 1 READ", wrong_type),
        ("RLOCK.ACQUIRE rw alice 1 WRITE BLOCK 0", upgrade),
        ("RLOCK.CANCEL rw alice READ WRITE", both),
        ("RLOCK.CANCEL rw alice READ READ", &twice("READ")),
        ("RLOCK.BREAK rw READ", "ERR wrong number of arguments"),
    ] {
        for mut conn in both_protocols(&server) {
            let told = conn.raw(command);
            // The server has a text of its own for the number of arguments.
            assert!(told.starts_with(&format!("-{error}")), "{command}: {told}");
        }
    }
    assert_eq!(conn.run("EXISTS k"), 0);
    // A plain lock's owner may be called so, and a word is not an owner.
    conn.take("k", "a:write");
    conn.run("RLOCK.ACQUIRE k2 READ 1000 READ").held();
    assert_eq!(conn.run("HGET k2 READ"), "1");
}

#[test]
fn macquire_waits_and_queues() {
    let server = Server::start();
    let _life = server.session_connection("s");
    for (index, mut conn) in both_protocols(&server).into_iter().enumerate() {
        let [a, b, c] = ["a", "b", "c"].map(|name| format!("{name}{index}"));
        let mut other = server.connect();
        other.take(&a, "alice");
        other.take(&b, "dave");
        let wait = format!("RLOCK.MACQUIRE bob 30000 3 {a} {b} {c}");
        let raw = conn.raw(&wait);
        assert!(raw.starts_with("*2\r\n:0\r\n:"), "{raw}");
        let raw = conn.raw(format!("{wait} BLOCK 5"));
        assert!(raw.starts_with("*2\r\n:0\r\n:"), "{raw}");
        assert_eq!(other.queue(&a, "carol", "s"), 1);
        assert_eq!(
            conn.run(format!("{wait} ONCE QUEUE 0 SESSION s")).queued(),
            2
        );
        assert_eq!(conn.raw(format!("RLOCK.CANCEL {c} bob")), ":1\r\n");
        conn.send(format!("rlock.macquire bob 30000 2 {b} {c} block 0"));
        conn.expect_nothing_yet();
        other.let_go(&b, "dave");
        let (count, token) = conn.read().held();
        assert_eq!(count, 1);
        assert_eq!(conn.run(format!("HGET {c} fence")), format!("t{token}"));
        assert_eq!(
            conn.raw(format!("RLOCK.MRELEASE bob 3 {a} {b} {c}")),
            ":2\r\n"
        );
    }
}

#[test]
fn errors_about_several_locks_are_exact() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.MACQUIRE alice 30000 2 x y").held();
    let numkeys = "ERR numkeys must be an integer from 1 to 1024, and so many keys must follow";
    let lease = "ERR lease-ms must be an integer from 1 to 9007199254740991";
    let reserved = "ERR owner must not be 'fence' or 'mode', fields of the lock itself";
    let no_session = "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first";
    let twice = |option| format!("ERR option '{option}' is given twice");
    let unknown = |option| format!("ERR unknown option '{option}'");
    for (command, error) in [
        ("RLOCK.MACQUIRE a 1 0 k", numkeys),
        ("RLOCK.MACQUIRE a 1 2 k", numkeys),
        ("RLOCK.MACQUIRE a 1 -1 k", numkeys),
        ("RLOCK.MACQUIRE a 1 01 k", numkeys),
        ("RLOCK.MACQUIRE a 1 1025 k", numkeys),
        ("RLOCK.MACQUIRE a 1 9223372036854775808 k", numkeys),
        ("RLOCK.MRELEASE a 0 k", numkeys),
        ("RLOCK.MRELEASE a 3 k k", numkeys),
        ("RLOCK.MRENEW a 1 two k", numkeys),
        ("RLOCK.MACQUIRE a 0 1 k", lease),
        ("RLOCK.MRENEW a -1 1 k", lease),
        ("RLOCK.MACQUIRE fence 1 1 k", reserved),
        ("RLOCK.MRELEASE mode 1 k", reserved),
        ("RLOCK.MRENEW fence 1 1 k", reserved),
        ("RLOCK.MACQUIRE a 1 1 k READ", &unknown("READ")),
        ("RLOCK.MACQUIRE a 1 1 k k", &unknown("k")),
        ("RLOCK.MACQUIRE a 1 1 k TOKEN 1", &unknown("TOKEN")),
        ("RLOCK.MRELEASE alice 1 x LEASE 1", &unknown("LEASE")),
        ("RLOCK.MRENEW alice 1 1 x TOKEN 1", &unknown("TOKEN")),
        ("RLOCK.MACQUIRE a 1 1 k ONCE ONCE", &twice("ONCE")),
        ("RLOCK.MACQUIRE a 1 1 k BLOCK 1 BLOCK 1", &twice("BLOCK")),
        (
            "RLOCK.MACQUIRE a 1 1 k BLOCK",
            "ERR option 'BLOCK' needs a value",
        ),
        (
            "RLOCK.MACQUIRE a 1 1 k BLOCK 0 QUEUE 0",
            "ERR option 'QUEUE' cannot be combined with 'BLOCK'",
        ),
        (
            "RLOCK.MACQUIRE a 1 1 k QUEUE 0",
            "ERR option 'QUEUE' needs 'SESSION'",
        ),
        (
            "RLOCK.MACQUIRE a 1 1 k WANTED",
            "ERR option 'WANTED' needs 'SESSION'",
        ),
        (
            "RLOCK.MRENEW alice 1 1 x SESSION s WANTED",
            &unknown("WANTED"),
        ),
        ("RLOCK.MACQUIRE a 1 1 k BLOCK -1", WAIT_BOUNDS),
        ("RLOCK.MACQUIRE a 1 1 k SESSION s", no_session),
        ("RLOCK.MACQUIRE a 1 2 x k QUEUE 0 SESSION s", no_session),
        ("RLOCK.MRENEW alice 1 1 x SESSION s", no_session),
    ] {
        answers_with(&server, command, error);
    }
    assert_eq!(conn.run("EXISTS k"), 0);
    assert!(conn.run("PTTL x").int() > 20_000);
    let most: Vec<_> = (0..1024).map(|i| format!("key{i}")).collect();
    let most = most.join(" ");
    assert_eq!(
        conn.run(format!("RLOCK.MACQUIRE a 30000 1024 {most}"))
            .held()
            .0,
        1
    );
    assert_eq!(conn.run(format!("RLOCK.MRENEW a 30000 1024 {most}")), 1024);
    assert_eq!(conn.run(format!("RLOCK.MRELEASE a 1024 {most}")), 1024);
}

#[test]
fn the_hold_count_of_several_does_not_overflow() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("HSET y alice 2147483647 fence t5");
    conn.run("PEXPIRE y 30000");
    refuses(
        &mut conn,
        "RLOCK.MACQUIRE alice 60000 2 x y",
        &["hold count", "2147483647"],
    );
    assert_eq!(conn.run("EXISTS x"), 0);
    let once = "RLOCK.MACQUIRE alice 60000 2 x y ONCE";
    let (count, token) = conn.run(once).held();
    assert_eq!(count, 2_147_483_647);
    assert_eq!(conn.run("HGET x fence"), format!("t{token}"));
}
