//! The read-write lock: its storage, leases, unlock messages.

use std::collections::BTreeMap;

use rlock_tests::{Conn, Feed, Reply, Server, eventually, until};

use crate::replication::{end_of, restored, transaction};

/// The fields of the hash `name`.
pub(super) fn fields(server: &Server, name: &str) -> BTreeMap<String, String> {
    let flat = server.run(format!("HGETALL {name}")).texts();
    let pairs = flat.chunks(2).map(|pair| {
        // A writer's token differs each time: the count and a `t` are left of its field.
        let value = match pair[1].split_once(":t") {
            Some((count, _)) if pair[0].ends_with(":write") => format!("{count}:t"),
            _ => pair[1].clone(),
        };
        (pair[0].clone(), value)
    });
    pairs.collect()
}

/// `a=1 b=2` as fields.
pub(super) fn as_fields(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(' ').map(|pair| pair.split_once('=').unwrap());
    let owned = pairs.map(|(field, value)| (field.to_owned(), value.to_owned()));
    owned.collect()
}

/// The names of all keys, in order.
pub(super) fn keys(server: &Server) -> Vec<String> {
    let mut keys = server.run("KEYS *").texts();
    keys.sort();
    keys
}

/// Takes `k` for the owner in that mode with a lease of 30 s; `options` may follow.
#[track_caller]
pub(super) fn takes(conn: &mut Conn, owner: &str, mode: &str) -> (i64, i64) {
    conn.run(format!("RLOCK.ACQUIRE k {owner} 30000 {mode}"))
        .held()
}

/// The timeout key of a reader of `k`.
pub(super) fn timeout(owner: &str, number: u32) -> String {
    format!("{{k}}:{owner}:rwlock_timeout:{number}")
}

/// The holders in INFO: `owner mode count`, and the token of each.
fn holders(info: &Reply) -> Vec<(String, Reply)> {
    let told = info.get("holders").array().iter().map(|holder| {
        let word = |key| holder.get(key).text();
        let count = holder.get("count").int();
        let text = format!("{} {} {count}", word("owner"), word("mode"));
        (text, holder.get("token").clone())
    });
    let mut told: Vec<_> = told.collect();
    told.sort_by(|one, other| one.0.cmp(&other.0));
    told
}

// --- What is stored -----------------------------------------------------------------------------

#[test]
fn a_reader_is_a_field_and_one_timeout_key() {
    let server = Server::start();
    let mut conn = server.connect();
    let (count, token) = conn.run("RLOCK.ACQUIRE k alice 30000 READ").held();
    assert_eq!(count, 1);
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=1"));
    assert_eq!(
        conn.run(format!("GET {}", timeout("alice", 1))),
        token.to_string()
    );
    let end = end_of(&mut conn, "k");
    assert_eq!(end_of(&mut conn, &timeout("alice", 1)), end);
    let left = conn.run("PTTL k").int();
    assert!((20_000..=30_000).contains(&left), "{left}");

    let again = conn.run("RLOCK.ACQUIRE k alice 60000 READ").held();
    assert_eq!(again, (2, token), "the token stays");
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=2"));
    assert_eq!(
        conn.run(format!("GET {}", timeout("alice", 2))),
        token.to_string()
    );
    assert_eq!(
        end_of(&mut conn, &timeout("alice", 2)),
        end_of(&mut conn, "k")
    );
    let long = end_of(&mut conn, "k");
    assert!(long > end);
    assert_eq!(keys(&server), ["k".to_owned(), timeout("alice", 2)]);
    conn.run("RLOCK.ACQUIRE k alice 20000 READ").held();
    assert_eq!(keys(&server), ["k".to_owned(), timeout("alice", 3)]);
    assert_eq!(
        end_of(&mut conn, &timeout("alice", 3)),
        long,
        "READ never shortens the reader's lease"
    );

    let (count, bobs) = conn.run("RLOCK.ACQUIRE k bob 20000 READ").held();
    assert_eq!(count, 1);
    assert!(bobs > token, "a token of its own");
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=3 bob=1"));
    assert!(
        conn.run("PTTL k").int() > 50_000,
        "READ never shortens the hash's lease"
    );
    let mut expected = vec!["k".to_owned(), timeout("alice", 3), timeout("bob", 1)];
    expected.sort();
    assert_eq!(keys(&server), expected, "and nothing else");
}

#[test]
fn a_writer_is_a_field_and_no_more() {
    let server = Server::start();
    let mut conn = server.connect();
    let (count, token) = takes(&mut conn, "alice", "WRITE");
    assert_eq!(count, 1);
    assert_eq!(
        fields(&server, "k"),
        as_fields("mode=write alice:write=1:t")
    );
    let again = conn.run("RLOCK.ACQUIRE k alice 60000 WRITE").held();
    assert_eq!(again, (2, token));
    assert!(
        (50_000..=60_000).contains(&conn.run("PTTL k").int()),
        "anew, not added"
    );
    assert_eq!(takes(&mut conn, "alice", "WRITE"), (3, token));
    assert!(
        conn.run("PTTL k").int() <= 30_000,
        "a re-entry can also shorten the lease"
    );
    assert_eq!(
        fields(&server, "k"),
        as_fields("mode=write alice:write=3:t")
    );
    assert_eq!(keys(&server), ["k"]);
    for left in [2, 1, 0] {
        assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), left);
    }
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn a_writer_may_read_and_becomes_a_reader_by_releasing_write() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, write) = takes(&mut conn, "alice", "WRITE");
    let (count, read) = conn.run("RLOCK.ACQUIRE k alice 60000 READ").held();
    assert_eq!(count, 1);
    assert!(read > write, "a grant of its own");
    assert_eq!(
        fields(&server, "k"),
        as_fields("mode=write alice:write=1:t alice=1")
    );
    assert!(conn.run("PTTL k").int() > 50_000);
    takes(&mut conn, "alice", "WRITE");
    assert!(
        conn.run("PTTL k").int() > 50_000,
        "never below the owner's own READ"
    );
    assert_eq!(conn.run("RLOCK.RENEW k alice 1000 WRITE"), 1);
    assert!(conn.run("PTTL k").int() > 50_000, "nor by RENEW");
    conn.run("RLOCK.ACQUIRE k alice 90000 WRITE").held();
    conn.run("RLOCK.ACQUIRE k bob 30000 READ").refused();

    assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), 2);
    assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), 1);
    assert!(conn.run("PTTL k").int() > 80_000);
    assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), 0);
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=1"));
    let end = end_of(&mut conn, "k");
    assert_eq!(
        end,
        end_of(&mut conn, &timeout("alice", 1)),
        "the reader's own lease"
    );
    assert_eq!(
        conn.run(format!("RLOCK.RENEW k alice 30000 READ TOKEN {read}")),
        1
    );
    takes(&mut conn, "bob", "READ");
    for owner in ["bob", "alice"] {
        assert_eq!(conn.run(format!("RLOCK.RELEASE k {owner} READ")), 0);
    }
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn a_writer_that_releases_its_read_first_stays_the_writer() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "WRITE");
    takes(&mut conn, "alice", "READ");
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    assert_eq!(
        fields(&server, "k"),
        as_fields("mode=write alice:write=1:t")
    );
    assert_eq!(keys(&server), ["k"]);
    conn.run("RLOCK.ACQUIRE k bob 30000 READ").refused();
    assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), 0);
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn each_release_of_a_reader_moves_its_timeout_key_down_and_keeps_the_lease() {
    let server = Server::start();
    let mut conn = server.connect();
    for lease in [40_000, 90_000, 30_000] {
        conn.run(format!("RLOCK.ACQUIRE k alice {lease} READ"))
            .held();
    }
    conn.run("RLOCK.ACQUIRE k bob 60000 READ").held();
    let long = end_of(&mut conn, "k");
    for left in [2, 1] {
        assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), i64::from(left));
        let beside = ["k".to_owned(), timeout("alice", left), timeout("bob", 1)];
        assert_eq!(keys(&server), beside);
        assert_eq!(end_of(&mut conn, &timeout("alice", left)), long);
        assert_eq!(end_of(&mut conn, "k"), long);
    }
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    let bobs = end_of(&mut conn, &timeout("bob", 1));
    assert_eq!(end_of(&mut conn, "k"), bobs, "now bob's is the longest");
    assert_eq!(conn.run("RLOCK.RELEASE k bob READ"), 0);
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn once_renew_and_a_lease_at_release_set_the_lease_of_the_reader() {
    let server = Server::start();
    for command in [
        "RLOCK.ACQUIRE k alice 90000 READ ONCE",
        "RLOCK.RENEW k alice 90000 READ",
        "RLOCK.RENEW k alice 10000 READ",
        "RLOCK.RELEASE k alice READ LEASE 90000",
        "RLOCK.RELEASE k alice LEASE 10000 READ",
    ] {
        let mut conn = server.connect();
        let token = takes(&mut conn, "alice", "READ").1;
        conn.run("RLOCK.ACQUIRE k alice 40000 READ").held();
        conn.run("RLOCK.ACQUIRE k alice 20000 READ").held();
        conn.run("RLOCK.ACQUIRE k bob 12000 READ").held();
        let bobs = end_of(&mut conn, &timeout("bob", 1));
        conn.run(command);
        let number = if command.contains("RELEASE") { 2 } else { 3 };
        let own = timeout("alice", number);
        let mut expected = vec!["k".to_owned(), own.clone(), timeout("bob", 1)];
        expected.sort();
        assert_eq!(keys(&server), expected, "{command}");
        let left = conn.run(format!("PTTL {own}")).int();
        let is_long = command.contains("90000");
        assert_eq!(left > 80_000, is_long, "{command}: {left}");
        assert_eq!(left <= 10_000, !is_long, "{command}: {left}");
        let end = end_of(&mut conn, &own);
        assert_eq!(end_of(&mut conn, "k"), end.max(bobs), "{command}");
        assert_eq!(end_of(&mut conn, &timeout("bob", 1)), bobs, "{command}");
        assert_eq!(conn.run(format!("GET {own}")), token.to_string());
        assert_eq!(conn.run("RLOCK.BREAK k"), 1);
        assert_eq!(
            server.run("DBSIZE"),
            0,
            "BREAK deletes the timeout keys, {command}"
        );
    }
}

/// Enters as alice, 10,000 times in all.
fn enter_ten_thousand_times(conn: &mut Conn, session: &str) {
    let entries = vec![format!("RLOCK.ACQUIRE k alice 600000 READ {session}"); 10_000];
    let last = conn.pipeline(&entries).pop().unwrap();
    assert_eq!(last.held().0, 10_000);
}

#[test]
fn ten_thousand_entries_of_a_reader_cost_no_more_than_one() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    enter_ten_thousand_times(&mut conn, "");
    feed.news();
    for (command, writes) in [
        ("RLOCK.RENEW k alice 600000 READ", 2),
        ("RLOCK.RENEW k alice 500000 READ", 2),
        ("RLOCK.ACQUIRE k alice 600000 READ ONCE", 2),
        ("RLOCK.ACQUIRE k alice 600000 READ", 4),
        ("RLOCK.RELEASE k alice READ", 4),
        ("RLOCK.RELEASE k alice READ LEASE 500000", 4),
        ("RLOCK.BREAK k", 3),
    ] {
        conn.run(command);
        let told = feed.news();
        let told: Vec<_> = told
            .iter()
            .filter(|of| !["MULTI", "EXEC"].contains(&of.as_str()))
            .collect();
        assert!(told.len() <= writes, "{command}: {:?}", told.first());
    }
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn ten_thousand_entries_of_a_session_end_with_one_deletion() {
    let server = Server::start();
    let mut conn = server.connect();
    let session = server.session_connection("s");
    let mut feed = Feed::of(&server);
    enter_ten_thousand_times(&mut conn, "SESSION s");
    feed.news();
    drop(session);
    until("the hold is over", || server.run("EXISTS k") == 0);
    let told = feed.news();
    let deleted = told.iter().filter(|of| of.starts_with("DEL ")).count();
    assert_eq!(deleted, 2, "the hash and one timeout key");
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn timeout_keys_of_names_with_braces_and_of_any_bytes() {
    let server = Server::start();
    let mut conn = server.connect();
    let names: [(&[u8], &[u8]); 6] = [
        (b"a:{b}", b"a:{b}"),
        (b"a{b", b"a{b"),
        (b"{}x", b"{}x"),
        (b"a}b", b"{a}b}"),
        (b"\xff\0 \r\n", b"{\xff\0 \r\n}"),
        (b"", b"{}"),
    ];
    for (name, tagged) in names {
        let owner: &[u8] = b"\xffo\0:1";
        let acquire = [b"RLOCK.ACQUIRE", name, owner, b"30000", b"READ"];
        let token = conn.cmd(&acquire).held().1;
        let key = [tagged, b":", owner, b":rwlock_timeout:1"].concat();
        assert_eq!(
            conn.cmd(&[b"GET", &key[..]]),
            token.to_string(),
            "{}",
            name.escape_ascii()
        );
        assert_eq!(conn.cmd(&[b"HGET", name, owner]), "1");
        assert_eq!(conn.cmd(&[b"RLOCK.RELEASE", name, owner, b"READ"]), 0);
        assert_eq!(conn.run("DBSIZE"), 0);
        let acquire = [b"RLOCK.ACQUIRE", name, owner, b"30000", b"WRITE"];
        conn.cmd(&acquire).held();
        let field = [owner, b":write"].concat();
        let value = conn.cmd(&[b"HGET", name, &field]).text();
        assert!(value.starts_with("1:t"), "{value}");
        assert_eq!(conn.cmd(&[b"RLOCK.BREAK", name]), 1);
        assert_eq!(conn.run("DBSIZE"), 0);
    }
}

// --- Leases -------------------------------------------------------------------------------------

/// Alice's lease of 30 ms is over and the hash lives on, because of bob or because somebody wrote
/// it so.
fn with_a_zombie(server: &Server, others: bool) -> Conn {
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    if others {
        takes(&mut conn, "bob", "READ");
    }
    conn.run(format!("PEXPIRE {} 1", timeout("alice", 1)));
    until("the timeout key has run out", || {
        conn.run(format!("EXISTS {}", timeout("alice", 1))) == 0
    });
    assert_eq!(conn.run("HGET k alice"), "1", "the hash still says so");
    conn
}

#[test]
fn a_reader_without_a_live_timeout_key_holds_nothing() {
    for others in [false, true] {
        let server = Server::start();
        let mut conn = with_a_zombie(&server, others);
        assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), Reply::Null);
        assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ"), 0);
        let info = conn.run("RLOCK.INFO k");
        if others {
            let told = holders(&info);
            assert_eq!(told.len(), 1, "{told:?}");
            assert_eq!(told[0].0, "bob read 1");
        } else {
            assert!(!info.keys().contains(&"holders".to_owned()), "{info:?}");
            assert_eq!(info.get("owner"), &Reply::Null, "free");
        }
        let (count, _) = takes(&mut conn, "alice", "READ");
        assert_eq!(count, 1, "a new hold");
        assert_eq!(conn.run("HGET k alice"), "1");
        assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
        assert_eq!(conn.run("EXISTS k"), i64::from(others));
    }
}

#[test]
fn a_lock_in_which_only_such_readers_are_left_is_free_for_whoever_comes() {
    for mode in ["READ", "WRITE", ""] {
        let server = Server::start();
        let mut conn = with_a_zombie(&server, false);
        assert_eq!(
            conn.run(format!("RLOCK.ACQUIRE k carol 30000 {mode}"))
                .held()
                .0,
            1
        );
        let left = fields(&server, "k");
        assert!(!left.contains_key("alice"), "{left:?}");
        let mut expected = match mode {
            "READ" => as_fields("mode=read carol=1"),
            "WRITE" => as_fields("mode=write carol:write=1:t"),
            _ => as_fields("carol=1"),
        };
        if let Some(fence) = left.get("fence") {
            expected.insert("fence".to_owned(), fence.clone());
        }
        assert_eq!(left, expected);
    }
}

#[test]
fn a_new_reader_beside_a_zombie_gets_a_new_token() {
    let server = Server::start();
    let mut conn = server.connect();
    let old = takes(&mut conn, "alice", "READ").1;
    takes(&mut conn, "bob", "READ");
    conn.run(format!("DEL {}", timeout("alice", 1)));
    let (count, new) = takes(&mut conn, "alice", "READ");
    assert_eq!(count, 1);
    assert!(new > old);
    assert_eq!(
        conn.run(format!("RLOCK.RELEASE k alice READ TOKEN {old}")),
        Reply::Null
    );
    assert_eq!(
        conn.run(format!("RLOCK.RELEASE k alice READ TOKEN {new}")),
        0
    );
}

#[test]
fn renaming_and_copying_leave_the_readers_behind() {
    for command in ["RENAME k other", "COPY k other"] {
        let server = Server::start();
        let mut conn = server.connect();
        takes(&mut conn, "alice", "READ");
        conn.run(command);
        assert_eq!(
            conn.run("RLOCK.RENEW other alice 30000 READ"),
            0,
            "{command}"
        );
        assert_eq!(
            conn.run("RLOCK.ACQUIRE other bob 30000 WRITE").held().0,
            1,
            "{command}"
        );
        conn.run("FLUSHALL");
        takes(&mut conn, "alice", "WRITE");
        conn.run(command);
        assert_eq!(
            conn.run("RLOCK.RENEW other alice 30000 WRITE"),
            1,
            "a writer travels"
        );
        conn.run("RLOCK.ACQUIRE other bob 30000 READ").refused();
    }
}

#[test]
fn a_lease_that_runs_out_frees_the_lock_and_leaves_nothing() {
    for mode in ["READ", "WRITE"] {
        let server = Server::start();
        let mut conn = server.connect();
        conn.run(format!("RLOCK.ACQUIRE k alice 20 {mode}")).held();
        until("all has run out", || server.run("DBSIZE") == 0);
        assert_eq!(conn.run(format!("RLOCK.RENEW k alice 1000 {mode}")), 0);
        assert_eq!(
            conn.run(format!("RLOCK.RELEASE k alice {mode}")),
            Reply::Null
        );
        assert_eq!(server.run("DBSIZE"), 0);
    }
}

// --- What is told -------------------------------------------------------------------------------

#[test]
fn info_of_readers_a_writer_and_their_queue() {
    let server = Server::start();
    let mut conn = server.connect();
    let write = takes(&mut conn, "alice", "WRITE").1;
    takes(&mut conn, "alice", "WRITE");
    let read = takes(&mut conn, "alice", "READ").1;
    let mut bob = server.connect();
    let bobs_id = bob.id();
    bob.send("RLOCK.ACQUIRE k bob 30000 READ BLOCK 20000");
    bob.expect_nothing_yet();
    let _carol = server.blocked_in("RLOCK.ACQUIRE k carol 30000 BLOCK 0 WRITE");
    for mut conn in [server.connect(), server.connect().resp3()] {
        let info = conn.run("RLOCK.INFO k");
        let mut names = info.keys();
        names.sort();
        let expected = [
            "client-id",
            "count",
            "held-ms",
            "holders",
            "mode",
            "owner",
            "queue",
            "session",
            "token",
            "ttl-ms",
            "waiters",
        ];
        assert_eq!(names, expected);
        assert_eq!(info.get("mode"), &"write");
        assert_eq!(info.get("owner"), &"alice");
        assert_eq!(info.get("count"), &2);
        assert_eq!(info.get("token"), &write);
        assert!((20_000..=30_000).contains(&info.get("ttl-ms").int()));
        assert_eq!(info.get("waiters"), &2);
        let told = holders(&info);
        let expected = [
            ("alice read 1".to_owned(), Reply::from(read)),
            ("alice write 2".to_owned(), Reply::from(write)),
        ];
        assert_eq!(told, expected);
        let holder = &info.get("holders").array()[0];
        let mut names = holder.keys();
        names.sort();
        assert_eq!(
            names,
            [
                "client-id",
                "count",
                "held-ms",
                "mode",
                "owner",
                "session",
                "token",
                "ttl-ms"
            ]
        );
        assert!((20_000..=30_000).contains(&holder.get("ttl-ms").int()));
        let queue = info.get("queue").array();
        let mut names = queue[0].keys();
        names.sort();
        assert_eq!(
            names,
            [
                "client-id",
                "left-ms",
                "mode",
                "owner",
                "session",
                "waited-ms"
            ]
        );
        assert_eq!(queue[0].get("owner"), &"bob");
        assert_eq!(queue[0].get("mode"), &"read");
        assert_eq!(queue[0].get("client-id"), &bobs_id);
        assert_eq!(queue[1].get("owner"), &"carol");
        assert_eq!(queue[1].get("mode"), &"write");
        assert_eq!(queue[1].get("left-ms"), &-1);
    }
    let raw = server.connect().resp3().raw("RLOCK.INFO k");
    assert!(raw.starts_with("%11\r\n"), "{raw}");
    assert!(raw.contains("\r\nholders\r\n*2\r\n%8\r\n"), "{raw}");
    assert!(raw.contains("\r\nqueue\r\n*2\r\n%6\r\n"), "{raw}");
    let raw = server.connect().raw("RLOCK.INFO k");
    assert!(raw.starts_with("*22\r\n"), "{raw}");
    assert!(raw.contains("\r\nholders\r\n*2\r\n*16\r\n"), "{raw}");
}

#[test]
fn info_of_readers_alone_names_no_owner() {
    let server = Server::start();
    let mut conn = server.connect();
    let alices = takes(&mut conn, "alice", "READ").1;
    conn.run("RLOCK.ACQUIRE k bob 60000 READ").held();
    let bobs = conn.run("RLOCK.ACQUIRE k bob 90000 READ").held().1;
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(info.get("mode"), &"read");
    let (owner, token) = (info.get("owner"), info.get("token"));
    assert_eq!(
        (owner, info.get("count"), token),
        (&Reply::Null, &0.into(), &Reply::Null)
    );
    assert!(info.get("ttl-ms").int() > 80_000);
    let expected = [
        ("alice read 1".to_owned(), Reply::from(alices)),
        ("bob read 2".to_owned(), Reply::from(bobs)),
    ];
    assert_eq!(holders(&info), expected);
    for holder in info.get("holders").array() {
        let left = holder.get("ttl-ms").int();
        let longest = if *holder.get("owner") == "bob" {
            90_000
        } else {
            30_000
        };
        assert!((longest - 10_000..=longest).contains(&left), "{holder:?}");
    }
}

#[test]
fn tokens_of_both_modes_are_known_after_a_restart() {
    let mut server = Server::builder().config("appendonly yes").start();
    let mut conn = server.connect();
    let token = takes(&mut conn, "alice", "WRITE").1;
    let read = conn.run("RLOCK.ACQUIRE r alice 30000 READ").held().1;
    server.restart();
    let mut conn = server.connect();
    assert_eq!(conn.run("RLOCK.INFO k").get("token"), &token);
    assert_eq!(takes(&mut conn, "alice", "WRITE"), (2, token));
    let again = conn.run("RLOCK.ACQUIRE r alice 30000 READ").held();
    assert_eq!(again, (2, read));
}

#[test]
fn the_messages_are_told_once_each_on_the_read_write_channel_alone() {
    let server = Server::start();
    let mut listener = server.connect();
    listener.run("SUBSCRIBE redisson_rwlock:{k}");
    listener.run("SUBSCRIBE redisson_lock__channel:{k}");
    let mut conn = server.connect();
    let mut told = |conn: &mut Conn, command: &str, messages: &[&str]| {
        assert!(!conn.run(command).is_error(), "{command}");
        for message in messages {
            let expected = ["message", "redisson_rwlock:{k}", message];
            assert_eq!(listener.read().texts(), expected, "{command}");
        }
        listener.expect_nothing_yet();
    };
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 READ", &[]);
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 READ", &[]);
    told(&mut conn, "RLOCK.ACQUIRE k bob 30000 READ", &[]);
    told(&mut conn, "RLOCK.RELEASE k bob READ", &[]);
    told(&mut conn, "RLOCK.RELEASE k alice READ", &[]);
    told(&mut conn, "RLOCK.RELEASE k alice WRITE", &[]);
    told(&mut conn, "RLOCK.RELEASE k alice READ", &["0"]);
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 WRITE", &[]);
    told(&mut conn, "RLOCK.RELEASE k alice WRITE", &["1"]);
    // A downgrade, and then the last reader.
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 WRITE", &[]);
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 READ", &[]);
    told(&mut conn, "RLOCK.RELEASE k alice WRITE", &["1"]);
    told(&mut conn, "RLOCK.BREAK k", &["0"]);
    told(&mut conn, "RLOCK.BREAK k", &[]);
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 WRITE", &[]);
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 READ", &[]);
    told(&mut conn, "RLOCK.BREAK k", &["1"]);
    // A hand-over to many is one message.
    told(&mut conn, "RLOCK.ACQUIRE k alice 30000 WRITE", &[]);
    let read =
        |owner: &str| server.blocked_in(&format!("RLOCK.ACQUIRE k {owner} 30000 READ BLOCK 0"));
    let mut line = ["bob", "carol", "dave"].map(read);
    told(&mut conn, "RLOCK.RELEASE k alice WRITE", &["1"]);
    for waiter in &mut line {
        waiter.read().held();
    }
    let mut writer = server.blocked_in("RLOCK.ACQUIRE k erin 30000 WRITE BLOCK 0");
    told(&mut conn, "RLOCK.RELEASE k bob READ", &[]);
    told(&mut conn, "RLOCK.RELEASE k carol READ", &[]);
    told(&mut conn, "RLOCK.RELEASE k dave READ", &["0"]);
    writer.read().held();
    told(&mut conn, "RLOCK.RENEW k erin 30000 WRITE", &[]);
    told(&mut conn, "RLOCK.RELEASE k erin WRITE", &["1"]);
}

#[test]
fn notifications_are_those_of_the_plain_commands() {
    let server = Server::builder()
        .config("notify-keyspace-events EA")
        .start();
    let mut listener = server.connect();
    listener.run("PSUBSCRIBE __keyevent@0__:*");
    let mut conn = server.connect();
    let one = timeout("alice", 1);
    let mut events = |command: &str, of_hash: &[&str], beside: &[String]| {
        assert!(!conn.run(command).is_error(), "{command}");
        let mut told = (Vec::new(), Vec::new());
        for _ in 0..of_hash.len() + beside.len() {
            let [_, _, channel, key] = &listener.read().texts()[..] else {
                panic!("no message of a pattern")
            };
            let event = channel.split(':').nth(1).unwrap().to_owned();
            if key == "k" {
                told.0.push(event);
            } else {
                told.1.push(format!("{event} {key}"));
            }
        }
        assert_eq!(told.0, of_hash, "{command}, of the hash");
        assert_eq!(told.1, beside, "{command}, of timeout keys");
        listener.expect_nothing_yet();
    };
    let set = |n| {
        [
            format!("set {}", timeout("alice", n)),
            format!("expire {}", timeout("alice", n)),
        ]
    };
    let del = |n| [format!("del {}", timeout("alice", n))];
    events(
        "RLOCK.ACQUIRE k alice 30000 READ",
        &["hset", "expire"],
        &set(1),
    );
    let moved = |from, to| [&set(to)[..], &del(from)].concat();
    events(
        "RLOCK.ACQUIRE k alice 40000 READ",
        &["hset", "expire"],
        &moved(1, 2),
    );
    events("RLOCK.ACQUIRE k bob 30000 WRITE", &[], &[]);
    events("RLOCK.RENEW k alice 50000 READ", &["expire"], &set(2));
    events("RLOCK.RENEW k alice 30000 WRITE", &[], &[]);
    events("RLOCK.RELEASE k alice READ", &["hset"], &moved(2, 1));
    events("RLOCK.ACQUIRE k alice 20000 READ", &["hset"], &moved(1, 2));
    events(
        "RLOCK.RELEASE k alice READ LEASE 30000",
        &["hset", "expire"],
        &moved(2, 1),
    );
    events("RLOCK.RELEASE k alice WRITE", &[], &[]);
    events("RLOCK.RELEASE k alice READ", &["del"], &del(1));
    events(
        "RLOCK.ACQUIRE k alice 30000 WRITE",
        &["hset", "expire"],
        &[],
    );
    events(
        "RLOCK.ACQUIRE k alice 40000 WRITE",
        &["hset", "expire"],
        &[],
    );
    events("RLOCK.ACQUIRE k alice 20000 READ", &["hset"], &set(1));
    events("RLOCK.RELEASE k alice WRITE", &["hset"], &[]);
    events(
        "RLOCK.RELEASE k alice WRITE",
        &["hdel", "hset", "expire"],
        &[],
    );
    events("RLOCK.BREAK k", &["del"], &[format!("del {one}")]);
}

#[test]
fn replicas_are_told_plain_commands_with_absolute_times() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    let mut told = |conn: &mut Conn, command: &str| -> Vec<String> {
        assert!(!conn.run(command).is_error(), "{command}");
        feed.news()
    };
    let set = |conn: &mut Conn, number: u32, token: i64| {
        let key = timeout("alice", number);
        format!("SET {key} {token} PXAT {}", end_of(conn, &key))
    };
    let end = |conn: &mut Conn| format!("PEXPIREAT k {}", end_of(conn, "k"));

    let news = told(&mut conn, "RLOCK.ACQUIRE k alice 30000 READ");
    let token = conn
        .run(format!("GET {}", timeout("alice", 1)))
        .text()
        .parse()
        .unwrap();
    let expected = [
        restored("k", "mode read alice 1", end_of(&mut conn, "k")),
        set(&mut conn, 1, token),
    ];
    assert_eq!(news, transaction(expected));

    let news = told(&mut conn, "RLOCK.ACQUIRE k alice 60000 READ");
    let expected = [
        "HSET k alice 2".to_owned(),
        end(&mut conn),
        set(&mut conn, 2, token),
        format!("DEL {}", timeout("alice", 1)),
    ];
    assert_eq!(news, transaction(expected));

    let news = told(&mut conn, "RLOCK.RENEW k alice 50000 READ");
    let expected = [end(&mut conn), set(&mut conn, 2, token)];
    assert_eq!(news, transaction(expected));

    let news = told(&mut conn, "RLOCK.RELEASE k alice READ LEASE 20000");
    let expected = [
        "HSET k alice 1".to_owned(),
        end(&mut conn),
        set(&mut conn, 1, token),
        format!("DEL {}", timeout("alice", 2)),
    ];
    assert_eq!(news, transaction(expected));

    let news = told(&mut conn, "RLOCK.RELEASE k alice READ");
    let message = |text: &str| format!("PUBLISH redisson_rwlock:{{k}} {text}");
    let expected = ["DEL k".to_owned(), format!("DEL {}", timeout("alice", 1))];
    let mut expected = transaction(expected);
    expected.push(message("0"));
    assert_eq!(news, expected);

    let news = told(&mut conn, "RLOCK.ACQUIRE k alice 30000 WRITE");
    let token = conn.run("RLOCK.INFO k").get("token").int();
    let fields = format!("mode write alice:write 1:t{token}");
    assert_eq!(news, [restored("k", &fields, end_of(&mut conn, "k"))]);

    told(&mut conn, "RLOCK.ACQUIRE k alice 20000 READ");
    let news = told(&mut conn, "RLOCK.RELEASE k alice WRITE");
    let hash = ["HDEL k alice:write", "HSET k mode read"].map(str::to_owned);
    let mut expected = transaction([&hash[..], &[end(&mut conn)]].concat());
    expected.push(message("1"));
    assert_eq!(news, expected);

    for refused in [
        "RLOCK.ACQUIRE k bob 30000 WRITE",
        "RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 5",
        "RLOCK.RENEW k bob 30000 READ",
        "RLOCK.RENEW k alice 30000 WRITE",
        "RLOCK.RENEW k alice 30000 READ TOKEN 1",
        "RLOCK.RELEASE k bob READ",
        "RLOCK.RELEASE k alice WRITE",
        "RLOCK.RELEASE k alice READ TOKEN 1",
        "RLOCK.CANCEL k bob",
        "RLOCK.INFO k",
    ] {
        assert_eq!(told(&mut conn, refused), Vec::<String>::new(), "{refused}");
    }
}

#[test]
fn refused_commands_break_no_watch() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    let mut watcher = server.connect();
    let watched = format!("WATCH k {}", timeout("alice", 1));
    let mut after = |command: &str| -> Reply {
        watcher.run(&watched);
        conn.run(command);
        watcher.pipeline(&["MULTI", "PING", "EXEC"]).remove(2)
    };
    for command in [
        "RLOCK.ACQUIRE k bob 30000 WRITE",
        "RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 5",
        "RLOCK.ACQUIRE k alice 30000 WRITE BLOCK 5",
        "RLOCK.ACQUIRE k bob 30000",
        "RLOCK.RELEASE k bob READ",
        "RLOCK.RELEASE k alice READ TOKEN 1",
        "RLOCK.RENEW k bob 30000 READ",
        "RLOCK.RENEW k alice 30000 WRITE",
        "RLOCK.CANCEL k bob",
        "RLOCK.INFO k",
    ] {
        assert_eq!(
            after(command),
            Reply::Array(vec![Reply::Simple(b"PONG".into())]),
            "{command}"
        );
    }
    for command in [
        "RLOCK.ACQUIRE k bob 30000 READ",
        "RLOCK.RENEW k alice 30000 READ",
        "RLOCK.RELEASE k bob READ",
        "RLOCK.BREAK k",
    ] {
        assert_eq!(after(command), Reply::Null, "{command} is a change");
    }
}

#[test]
fn a_replica_that_is_told_of_readers_and_a_writer_tells_the_same() {
    let pair = rlock_tests::Pair::start();
    let mut conn = pair.primary.connect();
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "bob", "READ");
    pair.settle();
    let mut there = pair.replica.connect();
    assert_eq!(
        holders(&there.run("RLOCK.INFO k")),
        holders(&conn.run("RLOCK.INFO k"))
    );
    for command in [
        "RLOCK.ACQUIRE k alice 1000 READ",
        "RLOCK.ACQUIRE k carol 1000 WRITE BLOCK 0",
        "RLOCK.RELEASE k alice READ",
        "RLOCK.RENEW k alice 1000 READ",
    ] {
        let error = there.run(command).error();
        assert!(error.starts_with("READONLY "), "{command}: {error}");
    }
    // Promoted, it knows the readers by their timeout keys, and their tokens.
    let token = conn.run(format!("GET {}", timeout("alice", 1))).text();
    assert_eq!(there.run("REPLICAOF NO ONE"), "OK");
    assert_eq!(
        there.run(format!("RLOCK.RENEW k alice 30000 READ TOKEN {token}")),
        1
    );
    let refused = there.run("RLOCK.ACQUIRE k carol 30000 WRITE").refused();
    assert!(refused > 20_000);
    let granted = eventually("both have left", || {
        there.run("RLOCK.RELEASE k alice READ");
        there.run("RLOCK.RELEASE k bob READ");
        let reply = there.run("RLOCK.ACQUIRE k carol 30000 WRITE");
        (reply.ints()[0] == 1).then_some(reply)
    });
    assert!(granted.held().1 > token.parse::<i64>().unwrap());
}

/// The server keeps a short string in a compact form, a number as one. A command that only reads it
/// must not change that.
#[test]
fn info_and_waits_leave_the_timeout_keys_as_they_are_stored() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = conn.run("RLOCK.ACQUIRE k alice 60000 READ").held().1;
    conn.run("RLOCK.ACQUIRE k bob 60000 READ").held();
    conn.run("SET {k}:bob:rwlock_timeout:1 12345 KEEPTTL");
    let encodings = || {
        ["alice", "bob"]
            .map(|owner| server.run(format!("OBJECT ENCODING {{k}}:{owner}:rwlock_timeout:1")))
            .map(|encoding| encoding.text())
    };
    let before = encodings();
    assert_eq!(before[1], "int");
    let info = conn.run("RLOCK.INFO k");
    let holders = info.get("holders").array();
    let tokens: Vec<_> = holders
        .iter()
        .map(|holder| holder.get("token").int())
        .collect();
    assert_eq!(tokens.len(), 2);
    assert!(
        tokens.contains(&token) && tokens.contains(&12_345),
        "{tokens:?}"
    );
    assert_eq!(encodings(), before, "after INFO");
    // Others, and the deadlock check, look at the holders too.
    conn.take("l", "carol");
    conn.run("RLOCK.ACQUIRE k carol 60000 WRITE BLOCK 1")
        .refused();
    let _dora = server.blocked_in("RLOCK.ACQUIRE k dora 60000 WRITE BLOCK 0");
    conn.run("RLOCK.ACQUIRE l alice 60000 BLOCK 1").refused();
    conn.run("RLOCK.ACQUIRE k carol 60000 READ").refused();
    assert_eq!(encodings(), before, "after waits of others");
}
