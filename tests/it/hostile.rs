//! A client may send any bytes and write any values: it gets an answer, and the server stays up.

use rlock_tests::{Conn, Reply, Server, eventually, until};

/// The commands, each with as many good arguments as it takes.
const COMMANDS: [&[&str]; 14] = [
    &["RLOCK.ACQUIRE", "k", "alice", "30000", "BLOCK", "1", "ONCE"],
    &["RLOCK.ACQUIRE", "k", "bob", "30000", "ONCE", "BLOCK", "1"],
    &["RLOCK.RELEASE", "k", "alice", "TOKEN", "1", "LEASE", "1000"],
    &["RLOCK.RENEW", "k", "alice", "30000", "TOKEN", "1"],
    &[
        "RLOCK.ACQUIRE",
        "k",
        "carol",
        "30000",
        "QUEUE",
        "1",
        "SESSION",
        "s",
        "ONCE",
    ],
    &["RLOCK.RENEW", "k", "alice", "30000", "SESSION", "s"],
    &["RLOCK.CANCEL", "k", "alice"],
    &["RLOCK.EVENTS", "s", "BLOCK", "1", "GRACE", "1"],
    &["RLOCK.BREAK", "k"],
    &["RLOCK.INFO", "k"],
    &["RLOCK.LIST", "MATCH", "*", "COUNT", "10"],
    &["RLOCK.SESSIONS", "MATCH", "*", "COUNT", "10"],
    &["RLOCK.LOG", "MATCH", "*", "COUNT", "10"],
    &["RLOCK.GUARD", "k", "alice", "CALL", "GET", "k"],
];

/// Arguments of odd types and sizes.
fn odd_arguments() -> Vec<Vec<u8>> {
    let mut odd: Vec<Vec<u8>> = [
        &b""[..],
        b"\0",
        b"a\0b",
        b"\xff",
        b"\xff\xfe\xc3\x28",
        b"\r\n-ERR not mine\r\n",
        b"%s%n%d",
        b"fence",
        b"mode",
        b"{",
        b"}{",
        b"*",
        b"[",
        b"\\",
        b"0",
        b"-1",
        b"00",
        b"+1",
        b" 1",
        b"1e9",
        b"nan",
        b"9223372036854775807",
        b"9223372036854775808",
        b"-9223372036854775808",
        b"-9223372036854775809",
        b"9007199254740991",
        b"9007199254740992",
        b"18446744073709551616",
        b"ONCE",
        b"BLOCK",
        b"TOKEN",
        b"LEASE",
        b"MATCH",
        b"COUNT",
        b"READ",
        b"WRITE",
        b"QUEUE",
        b"SESSION",
        b"GRACE",
    ]
    .map(<[u8]>::to_vec)
    .to_vec();
    odd.push(vec![b'x'; 1024 * 1024]);
    odd.push(vec![0xff; 1024 * 1024]);
    odd.push(vec![b'*'; 300]);
    odd
}

#[test]
fn any_bytes_in_any_argument_get_an_answer() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    for command in COMMANDS {
        for place in 1..command.len() {
            for odd in odd_arguments() {
                let mut arguments: Vec<_> = command.iter().map(|a| a.as_bytes().to_vec()).collect();
                arguments[place] = odd;
                conn.send_cmd(&arguments);
                answer(&server, &mut conn);
                conn.cmd(&["RLOCK.BREAK", "k"]);
            }
        }
        assert_eq!(conn.run("PING"), "PONG", "{command:?}");
    }
}

/// The answer to the last command. An EVENTS that waits without limit is answered when another
/// connection takes its session over.
fn answer(server: &Server, conn: &mut Conn) -> Reply {
    for _ in 0..2 {
        if let Some(reply) = conn.read_now() {
            return reply;
        }
        conn.settle();
    }
    eventually("an answer", || {
        let reply = conn.read_now();
        if reply.is_none() {
            server.session_connection("s");
        }
        reply
    })
}

#[test]
fn any_number_of_arguments_gets_an_answer() {
    let server = Server::start();
    let mut conn = server.connect();
    for command in COMMANDS {
        for count in 0..command.len() {
            conn.cmd(&command[..count + usize::from(count == 0)]);
        }
        for filler in ["ONCE", "x", "1", "BLOCK"] {
            for count in [10, 100, 10_000] {
                let many: Vec<_> = command
                    .iter()
                    .copied()
                    .chain((0..count).map(|_| filler))
                    .collect();
                assert!(
                    conn.cmd(&many).is_error(),
                    "{command:?} and {count} times {filler}"
                );
            }
        }
    }
    assert_eq!(conn.run("PING"), "PONG");
}

#[test]
fn errors_are_one_line_and_not_longer_than_what_is_readable() {
    let server = Server::start();
    let mut conn = server.connect();
    for odd in odd_arguments() {
        let refused = conn.cmd(&[&b"RLOCK.ACQUIRE"[..], b"k", b"a", b"1000", &odd]);
        if odd.eq_ignore_ascii_case(b"READ") || odd.eq_ignore_ascii_case(b"WRITE") {
            continue;
        }
        if odd.eq_ignore_ascii_case(b"ONCE") {
            refused.held();
            continue;
        }
        let error = refused.error();
        assert!(error.len() < 500, "an error of {} bytes", error.len());
        assert!(error.starts_with("ERR "), "{error}");
        assert!(!error.contains(|c: char| c.is_control()), "{error:?}");
        assert_eq!(conn.run("PING"), "PONG", "replies still match commands");
    }
}

#[test]
fn a_bad_argument_changes_nothing() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = conn.take("k", "alice");
    let before = (conn.run("HGETALL k"), conn.run("PEXPIRETIME k"));
    for bad in ["0", "-1", "x", "", "9223372036854775808"] {
        for command in [
            &["RLOCK.ACQUIRE", "k", "alice", bad][..],
            &[
                "RLOCK.ACQUIRE",
                "k",
                "alice",
                "1000",
                "BLOCK",
                if bad == "0" { "x" } else { bad },
            ],
            &["RLOCK.RELEASE", "k", "alice", "TOKEN", bad],
            &["RLOCK.RELEASE", "k", "alice", "LEASE", bad],
            &[
                "RLOCK.RELEASE",
                "k",
                "alice",
                "TOKEN",
                &token.to_string(),
                "LEASE",
                bad,
            ],
            &["RLOCK.RENEW", "k", "alice", bad],
            &["RLOCK.RENEW", "k", "alice", "1000", "TOKEN", bad],
            &["RLOCK.RENEW", "k", "alice", "1000", "SESSION", bad],
            &["RLOCK.ACQUIRE", "k", "alice", "1000", "SESSION", bad],
        ] {
            assert!(conn.cmd(command).is_error(), "{command:?}");
            assert_eq!(
                (conn.run("HGETALL k"), conn.run("PEXPIRETIME k")),
                before,
                "{command:?}"
            );
        }
    }
}

/// Commands that write something at `k` that no lock command would write.
fn odd_writes() -> Vec<Vec<Vec<u8>>> {
    let mut writes: Vec<Vec<Vec<u8>>> = [
        "SET k v",
        "RPUSH k alice 1",
        "SADD k alice",
        "ZADD k 1 alice",
        "XADD k * alice 1",
        "HSET k alice 1 fence t1", // without an end
        "HSET k alice much fence t1",
        "HSET k alice 99999999999999999999999 fence t1",
        "HSET k alice 0 fence t1",
        "HSET k alice -9223372036854775808 fence t1",
        "HSET k fence t1",
        "HSET k alice 1 fence t9223372036854775807",
        "HSET k mode read alice 1",
    ]
    .iter()
    .map(|line| {
        line.split(' ')
            .map(|word| word.as_bytes().to_vec())
            .collect()
    })
    .collect();
    let thousands = "for i = 1, 5000 do redis.call('HSET', KEYS[1], 'owner' .. i, i) end";
    let digits = "9".repeat(1 << 20);
    let more: [&[&[u8]]; 5] = [
        &[b"SET", b"k", b""],
        &[b"HSET", b"k", b"alice", b"", b"fence", b""],
        &[b"HSET", b"k", b"alice", b"1", b"fence", b"\xff\0"],
        &[b"HSET", b"k", b"alice", digits.as_bytes()],
        &[b"EVAL", thousands.as_bytes(), b"1", b"k"],
    ];
    writes.extend(more.map(|words| words.iter().map(|word| word.to_vec()).collect()));
    writes
}

/// The beginning of a command, for a failure's message.
fn shown(command: &[Vec<u8>]) -> String {
    let start = command.concat();
    start[..start.len().min(60)].escape_ascii().to_string()
}

#[test]
fn odd_things_in_the_keyspace_get_an_answer_from_every_command() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    for odd in odd_writes() {
        for command in COMMANDS {
            for with_end in [false, true] {
                conn.run("DEL k");
                conn.cmd(&odd);
                if with_end {
                    conn.run("PEXPIRE k 30000");
                }
                conn.cmd(command);
                assert_eq!(conn.run("PING"), "PONG", "{}, {command:?}", shown(&odd));
            }
        }
    }
}

#[test]
fn odd_things_written_under_waiters_do_not_stop_the_server() {
    let server = Server::start();
    let mut conn = server.connect();
    for odd in odd_writes() {
        conn.run("DEL k");
        conn.run("RLOCK.ACQUIRE k alice 30000").held();
        let mut bob = server.wait_in_queue("k", "bob");
        // In one turn: the module finds the odd thing where it left a lock.
        conn.run("MULTI");
        conn.run("DEL k");
        conn.cmd(&odd);
        conn.run("EXEC");
        conn.run("PEXPIRE k 20");
        let told = bob.read();
        assert!(
            told.is_error() || told.ints()[0] == 1,
            "{}: {told:?}",
            shown(&odd)
        );
        assert_eq!(conn.run("PING"), "PONG", "{}", shown(&odd));
    }
}

#[test]
fn odd_things_written_over_a_sessions_hold_do_not_stop_the_server() {
    let server = Server::start();
    let mut conn = server.connect();
    for odd in odd_writes() {
        conn.run("DEL k");
        let mut life = server.session_connection("s");
        conn.take_for("k", "alice", "s");
        conn.queue("k", "bob", "s");
        conn.run("MULTI");
        conn.run("DEL k");
        conn.cmd(&odd);
        conn.run("PEXPIRE k 20");
        conn.run("EXEC");
        let mut heard = Vec::new();
        while heard.len() < 2 {
            heard.extend(life.run("RLOCK.EVENTS s BLOCK 0").events());
        }
        let [lost, ended] = &heard[..] else {
            panic!("{}: {heard:?}", shown(&odd))
        };
        assert_eq!(lost.0, "lost k alice", "{}: {heard:?}", shown(&odd));
        assert!(
            ["granted k bob", "error k bob"].contains(&ended.0.as_str()),
            "{}: {heard:?}",
            shown(&odd)
        );
        life.close();
        assert_eq!(conn.run("PING"), "PONG", "{}", shown(&odd));
        until("the session is over", || {
            server.info_number("rlock_sessions") == 0
        });
    }
}

#[test]
fn half_a_command_and_a_closed_socket() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    for cut in 1..60 {
        let whole = b"*6\r\n$13\r\nRLOCK.ACQUIRE\r\n$1\r\nk\r\n$3\r\nbob\r\n$2\r\n10\r\n\
            $5\r\nBLOCK\r\n$1\r\n0\r\n";
        let mut conn = server.connect();
        conn.send_bytes(&whole[..cut.min(whole.len())]);
        conn.close();
    }
    until("the queue is empty", || {
        server.waiting_owners("k").is_empty()
    });
    assert_eq!(alice.let_go("k", "alice"), 0);
}

#[test]
fn a_script_that_swallows_errors_gets_them_as_values() {
    let server = Server::start();
    let script = "return redis.pcall('RLOCK.ACQUIRE', KEYS[1], '', '0').err";
    let told = server.connect().cmd(&["EVAL", script, "1", "k"]);
    assert!(
        matches!(&told, Reply::Bulk(text) if text.starts_with(b"ERR ")),
        "{told:?}"
    );
}
