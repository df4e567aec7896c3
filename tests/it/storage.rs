//! The storage of locks, and the reading of hashes that other programs wrote.

use rlock_tests::{Conn, Reply, Server, Version};

fn hash(server: &Server, name: &str) -> Vec<String> {
    server.run(format!("HGETALL {name}")).texts()
}

/// A hash written by hand.
#[track_caller]
fn write(conn: &mut Conn, name: &str, fields: &[&str]) {
    conn.run(format!("DEL {name}"));
    conn.cmd(&[&["HSET", name], fields].concat()).int();
}

#[test]
fn a_lock_is_a_hash_of_its_owner_and_its_token() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = conn.take("k", "alice");
    assert_eq!(conn.run("TYPE k"), "hash");
    let mut fields = hash(&server, "k");
    if fields[0] == "fence" {
        fields.rotate_left(2);
    }
    assert_eq!(fields, ["alice", "1", "fence", &format!("t{token}")]);
    conn.run("RLOCK.ACQUIRE k alice 30000").held();
    assert_eq!(conn.run("HGET k alice"), "2");
    assert_eq!(conn.run("HGET k fence"), format!("t{token}"));
    assert_eq!(conn.run("HLEN k"), 2);
}

#[test]
fn the_lease_is_the_ttl_of_the_key() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 123456").held();
    let left = conn.run("PTTL k").int();
    assert!((100_000..=123_456).contains(&left), "{left}");
}

#[test]
fn a_free_lock_leaves_nothing_behind() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    alice.let_go("k", "alice");
    bob.read().held();
    bob.let_go("k", "bob");
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn names_and_owners_are_any_bytes() {
    let server = Server::start();
    let mut conn = server.connect();
    let (name, owner): (&[u8], &[u8]) = (b"\0\xff{ \r\n", b"\xffo\0 \r\n:1");
    let acquire = [b"RLOCK.ACQUIRE", name, owner, b"30000"];
    assert_eq!(conn.cmd(&acquire).held().0, 1);
    assert_eq!(conn.cmd(&acquire).held().0, 2);
    assert_eq!(conn.cmd(&[b"HGET", name, owner]), "2");
    let info = conn.cmd(&[b"RLOCK.INFO", name]);
    assert_eq!(info.get("owner"), &Reply::Bulk(owner.to_vec()));
    assert_eq!(conn.cmd(&[b"RLOCK.RELEASE", name, owner]), 1);
    assert_eq!(conn.cmd(&[b"RLOCK.RELEASE", name, owner]), 0);
    assert_eq!(conn.run("DBSIZE"), 0);
    assert_eq!(
        conn.cmd(&[&b"RLOCK.ACQUIRE"[..], b"", b"a", b"1000"])
            .held()
            .0,
        1
    );
    assert_eq!(conn.cmd(&["EXISTS", ""]), 1, "the empty name is a name");
}

#[test]
fn a_lock_without_a_ttl_is_held_by_the_owner_that_it_names() {
    let server = Server::start();
    let mut conn = server.connect();
    write(&mut conn, "k", &["alice", "1"]);
    assert_eq!(conn.run("RLOCK.ACQUIRE k bob 1000").refused(), -1);
    assert_eq!(conn.run("RLOCK.ACQUIRE k bob 1000 BLOCK 10").refused(), -1);
    assert_eq!(conn.run("RLOCK.RENEW k bob 1000"), 0);
    assert_eq!(conn.run("RLOCK.RELEASE k bob"), Reply::Null);
    assert_eq!(
        (conn.run("PTTL k"), conn.run("HLEN k")),
        (Reply::Int(-1), Reply::Int(1))
    );
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(
        (info.get("owner"), info.get("count")),
        (&"alice".into(), &1.into())
    );
    assert_eq!(
        (info.get("token"), info.get("ttl-ms")),
        (&Reply::Null, &Reply::Int(-1))
    );
    let (count, token) = conn.run("RLOCK.ACQUIRE k alice 30000").held();
    assert_eq!(count, 2);
    assert_eq!(
        conn.run("HGET k fence"),
        format!("t{token}"),
        "a re-entry mints what is missing"
    );
    assert_eq!(conn.let_go("k", "alice"), 1);
    assert_eq!(conn.let_go("k", "alice"), 0);
}

#[test]
fn the_holder_of_a_lock_without_a_token_releases_and_renews_it() {
    let server = Server::start();
    let mut conn = server.connect();
    write(&mut conn, "k", &["alice", "2"]);
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000"), 1);
    assert!(conn.run("PTTL k").int() > 20_000);
    assert_eq!(
        conn.run("RLOCK.RENEW k alice 30000 TOKEN 1"),
        0,
        "no token matches none"
    );
    assert_eq!(conn.run("RLOCK.RELEASE k alice TOKEN 1"), Reply::Null);
    assert_eq!(conn.let_go("k", "alice"), 1);
    assert_eq!(conn.let_go("k", "alice"), 0);
}

#[test]
fn odd_counts_hold_for_their_owner_and_are_never_repaired() {
    let server = Server::start();
    let mut conn = server.connect();
    let odd = [
        "x",
        "",
        "1.5",
        " 1",
        "0",
        "-1",
        "2147483648",
        "9223372036854775808",
        "\u{ff}\0",
    ];
    for count in odd {
        write(&mut conn, "k", &["alice", count]);
        conn.run("PEXPIRE k 30000");
        assert!(
            conn.run("RLOCK.ACQUIRE k bob 60000").refused() > 20_000,
            "{count:?}"
        );
        assert_eq!(conn.run("RLOCK.RELEASE k bob"), Reply::Null, "{count:?}");
        // The owner gets an answer, and the value stays or becomes a right one.
        for command in [
            "ACQUIRE k alice 30000",
            "ACQUIRE k alice 30000 ONCE",
            "RELEASE k alice",
        ] {
            conn.run(format!("RLOCK.{command}"));
            assert_eq!(
                conn.run("RLOCK.INFO k").keys().len(),
                9,
                "{count:?}, {command}"
            );
        }
        assert_eq!(conn.run("PING"), "PONG");
        conn.run("RLOCK.BREAK k").int();
        assert_eq!(conn.run("EXISTS k"), 0, "{count:?}");
    }
}

#[test]
fn an_odd_token_is_none() {
    let server = Server::start();
    let mut conn = server.connect();
    for token in [
        "",
        "t",
        "5",
        "t-5",
        "t0",
        "t05",
        "tx",
        "t9223372036854775808",
        "\0",
    ] {
        write(&mut conn, "k", &["alice", "1", "fence", token]);
        conn.run("PEXPIRE k 30000");
        assert_eq!(
            conn.run("RLOCK.INFO k").get("token"),
            &Reply::Null,
            "{token:?}"
        );
        assert_eq!(
            conn.run("RLOCK.RELEASE k alice TOKEN 5"),
            Reply::Null,
            "{token:?}"
        );
        let (count, minted) = conn.run("RLOCK.ACQUIRE k alice 30000").held();
        assert_eq!(count, 2);
        assert_eq!(conn.run("HGET k fence"), format!("t{minted}"), "{token:?}");
    }
}

#[test]
fn a_hash_without_an_owner_is_free() {
    let server = Server::start();
    let mut conn = server.connect();
    write(&mut conn, "k", &["fence", "t7"]);
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(
        (info.get("owner"), info.get("count")),
        (&Reply::Null, &Reply::Int(0))
    );
    assert_eq!(conn.run("RLOCK.RELEASE k alice"), Reply::Null);
    assert_eq!(conn.run("RLOCK.RENEW k alice 1000"), 0);
    assert_eq!(conn.run("RLOCK.BREAK k"), 0);
    let token = conn.take("k", "alice");
    assert_eq!(conn.run("HGET k fence"), format!("t{token}"));
    assert!(conn.run("PTTL k").int() > 20_000);
}

#[test]
fn several_fields_are_several_holders() {
    let server = Server::start();
    let mut conn = server.connect();
    write(&mut conn, "k", &["alice", "1", "bob", "1"]);
    conn.run("PEXPIRE k 30000");
    conn.run("RLOCK.ACQUIRE k carol 1000").refused();
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000"), 1);
    assert_eq!(conn.run("RLOCK.RENEW k bob 30000"), 1);
    assert_eq!(conn.let_go("k", "alice"), 0);
    conn.run("RLOCK.ACQUIRE k carol 1000").refused();
    assert_eq!(
        server.holder("k").as_deref(),
        Some("bob"),
        "bob's hold is not alice's to end"
    );
    assert_eq!(conn.let_go("k", "bob"), 0);
    conn.take("k", "carol");
}

#[test]
fn break_ends_all_holds_of_several_holders() {
    let server = Server::start();
    let mut conn = server.connect();
    write(&mut conn, "k", &["alice", "1", "bob", "1"]);
    assert_eq!(conn.run("RLOCK.BREAK k"), 1);
    assert_eq!(conn.run("EXISTS k"), 0);
}

#[test]
fn a_read_write_lock_is_another_kind() {
    let server = Server::start();
    let mut conn = server.connect();
    for (mode, field) in [
        ("read", "alice"),
        ("write", "alice:write"),
        ("odd", "alice"),
    ] {
        write(&mut conn, "k", &["mode", mode, field, "1"]);
        conn.run("SET {k}:alice:rwlock_timeout:1 1 PX 30000");
        conn.run("PEXPIRE k 30000");
        let before = hash(&server, "k");
        for command in [
            "ACQUIRE k alice 1000",
            "ACQUIRE k bob 1000",
            "ACQUIRE k bob 1000 BLOCK 0",
            "RELEASE k alice",
            "RENEW k alice 1000",
        ] {
            let error = conn.run(format!("RLOCK.{command}")).error();
            assert!(
                error.starts_with("WRONGKIND "),
                "{mode}, {command}: {error}"
            );
        }
        assert_eq!(hash(&server, "k"), before);
        assert!(conn.run("PTTL k").int() > 20_000);
    }
}

#[test]
fn fields_that_have_run_out_hold_nothing() {
    if !Version::at_hand().has_field_expiry() {
        return;
    }
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("DEBUG SET-ACTIVE-EXPIRE 0");
    conn.take("k", "alice");
    conn.run("HPEXPIRE k 1 FIELDS 1 alice");
    conn.run("DEBUG SLEEP 0.01");
    assert_eq!(conn.run("RLOCK.RELEASE k alice"), Reply::Null);
    conn.take("k", "bob");
    assert_eq!(conn.run("RLOCK.RENEW k bob 1000"), 1);
}

/// The other field is counted until the server removes it.
#[test]
fn a_release_beside_a_field_that_has_run_out_hands_over() {
    if !Version::at_hand().has_field_expiry() {
        return;
    }
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("DEBUG SET-ACTIVE-EXPIRE 0");
    conn.take("k", "alice");
    conn.run("HSET k x 1");
    let mut bob = server.wait_in_queue("k", "bob");
    conn.run("HPEXPIRE k 1 FIELDS 1 x");
    conn.run("DEBUG SLEEP 0.01");
    // In one step: at the next look at the queue it would be handed over, too.
    let step = ["MULTI", "RLOCK.RELEASE k alice", "RLOCK.LIST", "EXEC"];
    assert_eq!(conn.pipeline(&step)[3].array()[1].array().len(), 0);
    bob.read().held();
}

#[test]
fn readers_that_never_release_do_not_pile_up() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k keeper 600000 READ").held();
    // Each is over before the next batch, and none gives back.
    for batch in 0..40 {
        let commands: Vec<String> = (0..500)
            .map(|reader| format!("RLOCK.ACQUIRE k {batch}-{reader} 1 READ"))
            .collect();
        for reply in conn.pipeline(&commands) {
            reply.held();
        }
    }
    let fields = conn.run("HLEN k").int();
    assert!(fields < 15_000, "{fields} of 20,000 readers are left");
    assert_eq!(conn.run("RLOCK.RENEW k keeper 600000 READ"), 1);
}
