//! Read-write locks as other programs may have written them, and odd arguments: an
//! answer, and soon.

use std::time::Duration;

use rlock_tests::{Conn, Reply, Server, patience, until};

use crate::read_write::{as_fields, fields, takes, timeout};

/// Every command that meets a read-write lock, as alice and as others.
const COMMANDS: [&str; 24] = [
    "RLOCK.ACQUIRE k alice 30000 READ",
    "RLOCK.ACQUIRE k alice 30000 READ ONCE",
    "RLOCK.ACQUIRE k alice 30000 WRITE",
    "RLOCK.ACQUIRE k alice 30000 WRITE ONCE",
    "RLOCK.ACQUIRE k bob 30000 READ BLOCK 1",
    "RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 1",
    "RLOCK.ACQUIRE k bob 30000 READ QUEUE 1 SESSION s",
    "RLOCK.ACQUIRE k bob 30000 WRITE QUEUE 1 SESSION s",
    "RLOCK.ACQUIRE k bob 30000",
    "RLOCK.RELEASE k alice READ",
    "RLOCK.RELEASE k alice READ LEASE 1000",
    "RLOCK.RELEASE k alice READ TOKEN 1",
    "RLOCK.RELEASE k alice WRITE",
    "RLOCK.RELEASE k alice WRITE LEASE 1000",
    "RLOCK.RENEW k alice 30000 READ",
    "RLOCK.RENEW k alice 1 READ",
    "RLOCK.RENEW k alice 30000 WRITE SESSION s",
    "RLOCK.RENEW k alice 30000 READ SESSION s",
    "RLOCK.CANCEL k bob",
    "RLOCK.INFO k",
    "RLOCK.BREAK k",
    "RLOCK.MACQUIRE bob 30000 2 k other BLOCK 1",
    "RLOCK.MRELEASE alice 2 k other",
    "RLOCK.MRENEW alice 30000 2 k other",
];

/// Values that no lock command writes at `k` and beside it: commands with semicolons between, and
/// `~` for a blank within a word.
const ODD: [&str; 43] = [
    "HSET k mode read",
    "HSET k mode write",
    "HSET k mode",
    "HSET k mode both alice 1",
    "HSET k mode READ alice 1",
    "HSET k mode 1 alice 1 alice:write 1",
    "HSET k mode read alice 1",
    "HSET k mode read alice 0",
    "HSET k mode read alice -1",
    "HSET k mode read alice abc",
    "HSET k mode read alice 1.5",
    "HSET k mode read alice 01",
    "HSET k mode read alice 99999999999999999999999",
    "HSET k mode read alice -9223372036854775808",
    "HSET k mode write alice:write 2147483647",
    "HSET k mode write alice:write 0",
    "HSET k mode write alice:write -1",
    "HSET k mode write alice:write abc",
    "HSET k mode write alice:write 1:t5",
    "HSET k mode write alice:write 2147483647:t9223372036854775807",
    "HSET k mode write alice:write 9223372036854775807:t9223372036854775807",
    "HSET k mode write alice:write 1:t9223372036854775808",
    "HSET k mode write alice:write 1:t0",
    "HSET k mode write alice:write 0:t5",
    "HSET k mode write alice:write 1:5",
    "HSET k mode write alice:write 1:t5:t6",
    "HSET k mode write alice:write :t5",
    "HSET k mode write alice:write 1:t",
    "HSET k mode write alice:write 1 bob:write 1",
    "HSET k mode write bob:write 1 alice 1",
    "HSET k mode write alice 1",
    "HSET k mode read alice:write 1",
    "HSET k mode read :write 1",
    "HSET k mode write :write 1",
    "HSET k mode read fence 1 alice 1",
    "HSET k mode write fence t1 alice:write 1",
    "HSET k mode read alice 3;SET {k}:alice:rwlock_timeout:1 1",
    "HSET k mode read alice 3;SET {k}:alice:rwlock_timeout:3 abc",
    "HSET k mode read alice 3;SET {k}:alice:rwlock_timeout:3 99999999999999999999",
    "HSET k mode read alice 3;HSET {k}:alice:rwlock_timeout:3 a b",
    "HSET k mode read alice 3;RPUSH {k}:alice:rwlock_timeout:2 a;SADD {k}:alice:rwlock_timeout:3 a",
    "HSET k mode read a 2;ZADD {k}:a:rwlock_timeout:1 1 a;SADD {k}:a:rwlock_timeout:2 a",
    "HSET k mode read alice 1;SET {k}:alice:rwlock_timeout:1 1 PXAT 9223372036854775807",
];

/// Writes one of [`ODD`].
fn write(conn: &mut Conn, odd: &str, with_end: bool) {
    conn.run("FLUSHALL");
    for command in odd.split(';') {
        // Some of it a server refuses, as a field without a value.
        let words: Vec<_> = command
            .split(' ')
            .map(|word| word.replace('~', " "))
            .collect();
        conn.cmd(&words);
    }
    if with_end {
        conn.run("PEXPIRE k 30000");
    }
}

#[test]
fn odd_locks_get_an_answer_from_every_command() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    for odd in ODD {
        for with_end in [false, true] {
            for command in COMMANDS {
                write(&mut conn, odd, with_end);
                conn.run(command);
                conn.run("RLOCK.EVENTS s");
            }
        }
        assert_eq!(conn.run("PING"), "PONG", "{odd}");
    }
}

#[test]
fn odd_locks_under_waiters_do_not_stop_the_server() {
    let server = Server::start();
    let mut conn = server.connect();
    for odd in ODD {
        for (held, waiting) in [("READ", "WRITE"), ("WRITE", "READ")] {
            conn.run("FLUSHALL");
            takes(&mut conn, "alice", held);
            let wait = format!("RLOCK.ACQUIRE k bob 30000 {waiting} BLOCK 0");
            let mut bob = server.blocked_in(&wait);
            conn.run("MULTI");
            conn.run("DEL k");
            for command in odd.split(';') {
                conn.cmd(&command.split(' ').collect::<Vec<_>>());
            }
            conn.run("PEXPIRE k 20");
            conn.run("EXEC");
            // In the end everything is gone, and then it is bob's turn.
            conn.run("PEXPIRE k 20");
            let told = bob.read();
            assert!(told.is_error() || told.held().0 >= 1, "{odd}: {told:?}");
            assert_eq!(conn.run("PING"), "PONG", "{odd}");
        }
    }
}

#[test]
fn odd_locks_over_a_sessions_hold_do_not_stop_the_server() {
    let server = Server::start();
    let mut conn = server.connect();
    for odd in ODD {
        for mode in ["READ", "WRITE"] {
            conn.run("FLUSHALL");
            let life = server.session_connection("s");
            conn.run(format!("RLOCK.ACQUIRE k alice 30000 {mode} SESSION s"))
                .held();
            write(&mut conn, odd, true);
            life.close();
            until("the session is over", || {
                server.info_number("rlock_sessions") == 0
            });
            assert_eq!(conn.run("PING"), "PONG", "{odd}");
        }
    }
}

/// Each of these claims more than two thousand million holds to read.
#[test]
fn impossible_counts_do_not_keep_the_server_busy() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    let fill = "EVAL for~i=1,1000~do~redis.call('HSET',KEYS[1],'owner'..i,'2147483647')end~\
        redis.call('HSET',KEYS[1],'mode','read') 1 k";
    let odd = [
        "HSET k mode read alice 2147483647",
        "HSET k mode read alice 2147483647 bob 2147483647 carol 2147483647",
        "HSET k mode write alice:write 1 alice 2147483647",
        "HSET k mode read alice 2147483647;SET {k}:alice:rwlock_timeout:2147483647 1 PX 30000",
        "HSET k mode read alice 2147483647;SET {k}:alice:rwlock_timeout:1 1 PX 30000",
        "HSET k mode read alice 9223372036854775807",
        fill,
    ];
    let commands = COMMANDS.iter().skip(1).step_by(2);
    for (command, odd) in commands.zip(odd.iter().cycle()) {
        write(&mut conn, odd, true);
        let before = server.processor_time();
        conn.run(command);
        let took = server.processor_time().saturating_sub(before);
        assert!(
            took < patience(Duration::from_secs(5)),
            "{command}: {took:?}, {odd}"
        );
        conn.run("RLOCK.EVENTS s");
    }
    assert_eq!(conn.run("PING"), "PONG");
}

#[test]
fn ten_thousand_readers_come_and_go() {
    const READERS: usize = 10_000;
    let server = Server::start();
    let mut conn = server.connect();
    let each = |verb: &str| -> Vec<String> {
        (0..READERS)
            .map(|i| verb.replace('#', &i.to_string()))
            .collect()
    };
    let before = server.processor_time();
    for reply in conn.pipeline(&each("RLOCK.ACQUIRE k reader# 600000 READ")) {
        assert_eq!(reply.held().0, 1);
    }
    let mut writer = server.blocked_in("RLOCK.ACQUIRE k writer 30000 WRITE BLOCK 0");
    assert_eq!(conn.run("HLEN k"), i64::try_from(1 + READERS).unwrap());
    for renewed in conn.pipeline(&each("RLOCK.RENEW k reader# 500000 READ")[..100]) {
        assert_eq!(renewed, 1);
    }
    for released in conn.pipeline(&each("RLOCK.RELEASE k reader# READ")[..9_900]) {
        assert_eq!(released, 0);
    }
    writer.expect_nothing_yet();
    for released in conn.pipeline(&each("RLOCK.RELEASE k reader# READ")[9_900..]) {
        assert_eq!(released, 0);
    }
    writer.read().held();
    assert_eq!(
        fields(&server, "k"),
        as_fields("mode=write writer:write=1:t")
    );
    assert_eq!(server.run("DBSIZE"), 1);
    let took = server.processor_time().saturating_sub(before);
    assert!(took < patience(Duration::from_secs(60)), "{took:?}");
}

#[test]
fn a_hash_with_ten_thousand_foreign_fields_gets_an_answer() {
    let server = Server::start();
    let mut conn = server.connect();
    let fill = "redis.call('HSET', KEYS[1], 'mode', 'read')
        for i = 1, 10000 do redis.call('HSET', KEYS[1], 'owner' .. i, 1 + i % 5) end
        redis.call('SET', '{k}:owner9999:rwlock_timeout:1', '1', 'PX', 400)
        return redis.call('PEXPIRE', KEYS[1], 30000)";
    for command in COMMANDS {
        conn.run("FLUSHALL");
        assert_eq!(conn.cmd(&["EVAL", fill, "1", "k"]), 1);
        conn.run(command);
        assert_eq!(conn.run("PING"), "PONG", "{command}");
    }
    conn.run("FLUSHALL");
    assert_eq!(conn.cmd(&["EVAL", fill, "1", "k"]), 1);
    let mut bob = server.connect();
    bob.send("RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 0");
    bob.read().held();
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
}

#[test]
fn a_lock_without_an_end_is_held_as_long_as_its_readers_are() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("HSET k mode write alice:write 1");
    assert_eq!(conn.run("RLOCK.ACQUIRE k bob 1000 READ").refused(), -1);
    assert_eq!(
        conn.run("RLOCK.ACQUIRE k bob 1000 WRITE BLOCK 5").refused(),
        -1
    );
    assert_eq!(conn.run("RLOCK.INFO k").get("ttl-ms"), &-1);
    assert_eq!(conn.run("RLOCK.RENEW k bob 1000 WRITE"), 0);
    assert_eq!(conn.run("PTTL k"), -1, "never repaired");
    assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), 0);
    assert_eq!(conn.run("EXISTS k"), 0);

    conn.run("HSET k mode read alice 1");
    conn.run(format!("SET {} 1", timeout("alice", 1)));
    assert_eq!(conn.run("RLOCK.ACQUIRE k bob 1000 WRITE").refused(), -1);
    takes(&mut conn, "bob", "READ");
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    assert_eq!(conn.run("RLOCK.RELEASE k bob READ"), 0);
    assert_eq!(conn.run("DBSIZE"), 0);

    conn.run("HSET k mode read alice 1");
    assert_eq!(takes(&mut conn, "bob", "WRITE").0, 1, "nobody reads");
}

#[test]
fn a_timeout_key_of_ones_own_without_an_end_cuts_no_lease_short() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("HSET k mode read alice 1");
    conn.run("PEXPIRE k 20000");
    conn.run(format!("SET {} 1", timeout("alice", 1)));
    assert_eq!(conn.run("RLOCK.ACQUIRE k alice 40000 READ").held().0, 2);
    assert!(conn.run("PTTL k").int() > 30_000);
}

#[test]
fn the_hold_counts_do_not_overflow() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("HSET k mode write alice:write 2147483646");
    conn.run("PEXPIRE k 30000");
    assert_eq!(takes(&mut conn, "alice", "WRITE").0, 2_147_483_647);
    let before = fields(&server, "k");
    let error = conn.run("RLOCK.ACQUIRE k alice 30000 WRITE").error();
    assert!(error.contains("hold count"), "{error}");
    assert_eq!(fields(&server, "k"), before);
    assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), 2_147_483_646);

    conn.run("FLUSHALL");
    conn.run("HSET k mode read alice 2147483646");
    conn.run("PEXPIRE k 30000");
    conn.run("SET {k}:alice:rwlock_timeout:2147483646 1 PX 30000");
    assert_eq!(takes(&mut conn, "alice", "READ").0, 2_147_483_647);
    let error = conn.run("RLOCK.ACQUIRE k alice 30000 READ").error();
    assert!(error.contains("hold count"), "{error}");
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 2_147_483_646);
    assert_eq!(conn.run("EXISTS {k}:alice:rwlock_timeout:2147483647"), 0);
}

/// The new words of ACQUIRE, RELEASE and RENEW and the commands for several locks, with arguments
/// that nobody expects in every place.
#[test]
fn any_bytes_in_any_argument_get_an_answer() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    let big = vec![b'x'; 1 << 20];
    let odd: [&[u8]; 26] = [
        b"",
        b"\0",
        b"\xff\xfe",
        b"\r\n-ERR not mine\r\n",
        b"%s%n",
        b"fence",
        b"mode",
        b"alice:write",
        b":write",
        b"{",
        b"{}",
        b"0",
        b"-1",
        b"1",
        b"3",
        b"1024",
        b"1025",
        b"+1",
        b"9223372036854775807",
        b"9223372036854775808",
        b"-9223372036854775809",
        b"18446744073709551616",
        b"READ",
        b"ONCE",
        b"SESSION",
        &big,
    ];
    for command in COMMANDS {
        let words: Vec<_> = command
            .split(' ')
            .map(|word| word.as_bytes().to_vec())
            .collect();
        for place in 1..words.len() {
            for odd in odd {
                let mut arguments = words.clone();
                arguments[place] = odd.to_vec();
                conn.send_cmd(&arguments);
                answer(&server, &mut conn);
            }
        }
        for count in 1..words.len() {
            conn.cmd(&words[..count]);
        }
        for filler in ["READ", "x", "1", "ONCE", "k"] {
            let more = (0..3000).map(|_| filler.as_bytes().to_vec());
            let many: Vec<_> = words.iter().cloned().chain(more).collect();
            assert!(conn.cmd(&many).is_error(), "{command} and many {filler}");
        }
        conn.run("FLUSHALL");
        assert_eq!(conn.run("PING"), "PONG", "{command}");
    }
}

/// The answer to the last command; a wait without limit is cancelled.
fn answer(server: &Server, conn: &mut Conn) -> Reply {
    for _ in 0..2 {
        if let Some(reply) = conn.read_now() {
            return reply;
        }
        conn.settle();
    }
    let mut freeing = server.connect();
    rlock_tests::eventually("an answer", || {
        let reply = conn.read_now();
        if reply.is_none() {
            freeing.run("FLUSHALL");
            for owner in ["alice", "bob"] {
                freeing.run(format!("RLOCK.CANCEL k {owner}"));
            }
        }
        reply
    })
}
