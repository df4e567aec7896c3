//! Servers that have no `DEL`, no `SPOP` and the like: `rename-command` in their configuration has
//! taken the names. Either locks work there, replicas and the append-only file included, or the
//! module does not load, and names the missing commands.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use rlock_tests::{Builder, Cluster, Conn, Pair, Reply, Server, aof, in_sync, until};

/// Commands that a hardened server usually lacks, and the names of some commands that we could
/// need.
const HARDENED: [&str; 12] = [
    "DEL", "SPOP", "KEYS", "FLUSHALL", "FLUSHDB", "CONFIG", "DEBUG", "COMMAND", "EXISTS",
    "PUBLISH", "SPUBLISH", "SCRIPT",
];

/// The server's own deletions of expired keys are `UNLINK`.
const UNLINKS: &str = "lazyfree-lazy-expire yes";

fn without(names: &[&str]) -> Builder {
    without_of(Server::builder(), names)
}

fn without_of(server: Builder, names: &[&str]) -> Builder {
    names.iter().fold(server, |server, name| {
        server.config(&format!("rename-command {name} \"\""))
    })
}

// --- Servers on which locks cannot be safe ---------------------------------------------------

/// The line of the log that says why the module does not load.
fn refusal(server: Builder) -> String {
    let log = server.refuses_to_start();
    let line = log.lines().find(|line| line.contains("rlock needs"));
    line.unwrap_or_else(|| panic!("{log}")).to_owned()
}

#[test]
fn without_a_command_that_locks_need_the_module_does_not_load() {
    for name in [
        "HSET",
        "HDEL",
        "PEXPIREAT",
        "SET",
        "GET",
        "MULTI",
        "EXEC",
        "SELECT",
    ] {
        let line = refusal(without(&[name]));
        assert!(line.contains(&format!(": {name}. ")), "{name}: {line}");
    }
}

#[test]
fn a_command_with_another_name_is_missing_and_each_is_named() {
    // The server is not asked by COMMAND INFO.
    let server = without(&["COMMAND"])
        .config("rename-command HSET another-name")
        .config("rename-command PEXPIREAT a-third");
    let line = refusal(server);
    assert!(line.contains(": HSET, PEXPIREAT. "), "{line}");
}

#[test]
fn without_any_of_several_commands_that_would_do_the_module_does_not_load() {
    let line = refusal(without(&["DEL", "UNLINK"]));
    assert!(line.contains(": DEL or UNLINK. "), "{line}");
    let writes = ["SPOP", "LPOP", "RPOP", "ZPOPMIN", "ZPOPMAX"];
    let line = refusal(without(&writes));
    assert!(line.contains(&writes.join(" or ")), "{line}");
}

#[test]
fn a_node_of_a_cluster_needs_to_know_which_keys_are_its_own() {
    for (names, missing) in [
        (&["EXISTS", "TOUCH"][..], "EXISTS or TOUCH"),
        (&["CLUSTER"], "CLUSTER"),
    ] {
        let line = refusal(without(names).cluster());
        assert!(line.contains(&format!(": {missing}. ")), "{line}");
        // Elsewhere nobody asks.
        without(names).start();
    }
}

// --- Servers on which they can ---------------------------------------------------------------

/// All keys, with their values and the ends of their leases.
fn keyspace(server: &Server) -> BTreeMap<String, (String, i64)> {
    let mut conn = server.connect();
    let found = conn.run("SCAN 0 COUNT 10000");
    let names = found.array()[1].texts();
    let entry = |name: String| {
        let value = match &*conn.run(format!("TYPE {name}")).text() {
            "none" => return None, // it has expired
            "hash" => {
                let flat = conn.run(format!("HGETALL {name}")).texts();
                let mut fields: Vec<_> = flat.chunks(2).map(|pair| pair.join("=")).collect();
                fields.sort();
                fields.join(" ")
            }
            "string" => conn.run(format!("GET {name}")).text(),
            other => other.to_owned(),
        };
        let end = conn.run(format!("PEXPIRETIME {name}")).int();
        Some((name, (value, end)))
    };
    names.into_iter().filter_map(entry).collect()
}

/// Locks of every kind are taken, entered again, handed over and given back, by all the ways there
/// are. `check` looks at what replicas have after each.
fn story(server: &Server, mut check: impl FnMut(&str)) {
    let mut conn = server.connect();
    let mut step = |conn: &mut Conn, command: &str| {
        let reply = conn.run(command);
        assert!(!reply.is_error(), "{command}: {reply:?}");
        check(command);
        reply
    };
    // A plain lock, and a hand-over.
    step(&mut conn, "RLOCK.ACQUIRE k alice 600000").held();
    step(&mut conn, "RLOCK.ACQUIRE k alice 600000").held();
    let mut bob = server.wait_in_queue("k", "bob");
    step(&mut conn, "RLOCK.RELEASE k alice").int();
    step(&mut conn, "RLOCK.RENEW k alice 500000").int();
    step(&mut conn, "RLOCK.RELEASE k alice").int();
    bob.read().held();
    step(&mut conn, "RLOCK.BREAK k").int();
    step(&mut conn, "RLOCK.ACQUIRE k carol 600000").held();
    // Readers and writers.
    step(&mut conn, "RLOCK.ACQUIRE rw alice 600000 READ").held();
    step(&mut conn, "RLOCK.ACQUIRE rw alice 600000 READ").held();
    step(&mut conn, "RLOCK.ACQUIRE rw bob 600000 READ").held();
    let mut writer = server.blocked_in("RLOCK.ACQUIRE rw wendy 600000 WRITE BLOCK 0");
    step(&mut conn, "RLOCK.RELEASE rw alice READ").int();
    step(&mut conn, "RLOCK.RELEASE rw alice READ").int();
    step(&mut conn, "RLOCK.RELEASE rw bob READ").int();
    writer.read().held();
    step(&mut conn, "RLOCK.ACQUIRE rw wendy 600000 READ").held();
    step(&mut conn, "RLOCK.RELEASE rw wendy WRITE").int();
    // Permits.
    step(&mut conn, "RLOCK.LIMIT p 3").int();
    step(&mut conn, "RLOCK.ACQUIRE p alice 600000 PERMITS 2").held();
    step(&mut conn, "RLOCK.ACQUIRE p bob 600000 PERMITS 1").held();
    step(&mut conn, "RLOCK.RELEASE p alice PERMITS 1").int();
    step(&mut conn, "RLOCK.RELEASE p bob PERMITS 1").int();
    // Several.
    step(&mut conn, "RLOCK.MACQUIRE alice 600000 3 x y z").held();
    step(&mut conn, "RLOCK.RELEASE y alice").int();
    // The end of a session, with a hold that is handed over and one that nobody waits for.
    let life = server.session_connection("s");
    step(&mut conn, "RLOCK.ACQUIRE own sam 600000 SESSION s").held();
    step(&mut conn, "RLOCK.ACQUIRE wanted sam 600000 SESSION s").held();
    let mut dora = server.wait_in_queue("wanted", "dora");
    life.close();
    dora.read().held();
    until("the other hold has ended as well", || {
        server.run("HLEN own") == 0
    });
    // The end of a lease, once noticed by the next command and once by the module's timer. While it
    // ends, a look at one server may be earlier than that at the other.
    conn.run("RLOCK.ACQUIRE late alice 1").held();
    until("the lease is over", || {
        let told = conn.run("RLOCK.ACQUIRE late bob 600000");
        told.array()[0] == 1
    });
    conn.run("RLOCK.ACQUIRE later alice 50").held();
    step(&mut conn, "RLOCK.ACQUIRE later bob 600000 BLOCK 0").held();
    let words = ["bob=1", "dora=1", "alice=1"];
    for (name, word) in ["late", "wanted", "x"].into_iter().zip(words) {
        let found = keyspace(server);
        let (fields, _) = &found[name];
        assert!(fields.contains(word), "{name}: {fields}");
    }
    assert_eq!(server.info_number("rlock_calls_refused"), 0);
}

/// A primary that lacks these commands, with a plain replica that has them all, and an append-only
/// file.
fn agrees_with_its_replica_and_its_file(lacks: &[&str], lines: &[&str]) {
    let add = |server: Builder, line: &&str| server.config(line);
    let primary = lines.iter().fold(without(lacks), add);
    let primary = primary
        .config("appendonly yes")
        .config("appendfsync always");
    let mut pair = Pair::of(primary, Server::builder().without_module());
    story(&pair.primary, |step| {
        pair.settle();
        let (primary, replica) = (keyspace(&pair.primary), keyspace(&pair.replica));
        assert_eq!(primary, replica, "without {lacks:?}, after {step}");
    });
    let before = keyspace(&pair.primary);
    assert!(before.len() > 6, "{before:?}");
    pair.primary.kill();
    pair.primary.restart();
    assert_eq!(keyspace(&pair.primary), before, "without {lacks:?}");
}

#[test]
fn a_hardened_server_its_replica_and_its_file_agree() {
    agrees_with_its_replica_and_its_file(&HARDENED, &[UNLINKS]);
}

#[test]
fn a_server_without_del_its_replica_and_its_file_agree() {
    agrees_with_its_replica_and_its_file(&["DEL"], &[UNLINKS]);
}

#[test]
fn a_server_without_unlink_its_replica_and_its_file_agree() {
    agrees_with_its_replica_and_its_file(&["UNLINK"], &["lazyfree-lazy-expire no"]);
}

#[test]
fn a_server_without_spop_its_replica_and_its_file_agree() {
    agrees_with_its_replica_and_its_file(&["SPOP"], &[]);
}

/// It tells of new locks by plain commands.
#[test]
fn a_server_without_restore_its_replica_and_its_file_agree() {
    agrees_with_its_replica_and_its_file(&["RESTORE"], &[]);
}

#[test]
fn a_server_with_all_commands_its_replica_and_its_file_agree() {
    agrees_with_its_replica_and_its_file(&[], &[]);
}

/// The server tells that a lock has expired by a command that neither it nor its replica has.
#[test]
fn what_is_left_of_an_expired_lock_does_not_become_part_of_the_next() {
    for (name, unlinks) in [("DEL", "no"), ("UNLINK", "yes")] {
        let hardened = || without(&[name]).config(&format!("lazyfree-lazy-expire {unlinks}"));
        let (primary, replica) = (hardened().start(), hardened().start());
        replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
        until("the replica is connected", || {
            replica.info("master_link_status").as_deref() == Some("up")
        });
        let mut conn = primary.connect();
        for (lock, how) in [
            ("k", ""),
            ("r", " READ"),
            ("w", " WRITE"),
            ("p", " PERMITS 1 OF 1"),
        ] {
            conn.run(format!("RLOCK.ACQUIRE {lock} alice 60{how}"))
                .held();
            in_sync(&primary, &replica);
            let next = format!("RLOCK.ACQUIRE {lock} bob 600000{how}");
            until("the lease is over", || {
                // A reader comes in beside another.
                let is_over = conn.run(format!("HLEN {lock}")) == 0;
                is_over && conn.run(&next).array()[0] == 1
            });
        }
        in_sync(&primary, &replica);
        let mut found = keyspace(&replica);
        found.retain(|name, _| !name.contains("rwlock_timeout"));
        let mut expected = keyspace(&primary);
        expected.retain(|name, _| !name.contains("rwlock_timeout"));
        assert_eq!(found, expected, "without {name}");
        assert!(!format!("{found:?}").contains("alice"), "{found:?}");
    }
}

/// The log names each missing command that locks can do without, and nothing else.
#[test]
fn what_is_lacking_but_not_needed_is_logged() {
    for (name, lack) in [
        ("DEL", "no DEL: rlock replicates UNLINK"),
        ("UNLINK", "no UNLINK: the server itself writes UNLINK"),
        ("RESTORE", "no RESTORE: replicas and the append-only file"),
        ("COMMAND", "no COMMAND: RLOCK.GUARD refuses every command"),
        ("PUBLISH", "no PUBLISH: subscribers at replicas"),
        ("SPUBLISH", "no SPUBLISH: subscribers at replicas"),
    ] {
        let log = without(&[name]).start().log();
        let lines = log
            .lines()
            .filter(|line| line.contains("this server has no"));
        let lines: Vec<_> = lines.collect();
        assert!(lines.len() == 1 && lines[0].contains(lack), "{lines:?}");
    }
    let log = without(&["SPOP", "EXISTS", "KEYS"]).start().log();
    assert!(!log.contains("this server has no"), "{log}");
}

#[test]
fn without_command_nothing_is_run_under_a_lock() {
    let server = without(&["COMMAND"]).start();
    server.connect().take("k", "alice");
    let told = server.run("RLOCK.GUARD k alice CALL SET data 1").error();
    assert!(told.contains("cannot be guarded"), "{told}");
    assert_eq!(server.run("GET data"), Reply::Null);
}

/// A message is a hint: that replicas cannot be told of it hinders no release.
#[test]
fn without_publish_releases_are_told_to_replicas_all_the_same() {
    let pair = Pair::of(without(&["PUBLISH"]), Server::builder().without_module());
    let mut conn = pair.primary.connect();
    conn.take("k", "alice");
    conn.let_go("k", "alice");
    pair.settle();
    assert_eq!(keyspace(&pair.replica), BTreeMap::new());
    assert_eq!(pair.primary.info_number("rlock_calls_refused"), 0);
}

/// Each of the writes by which the server is asked whether it takes writes gets the answer, and
/// changes nothing.
#[test]
fn without_spop_no_waiter_is_granted_where_writes_are_refused() {
    let writes = ["SPOP", "LPOP", "RPOP", "ZPOPMIN", "ZPOPMAX"];
    for lacking in 0..writes.len() {
        let server = without(&writes[..lacking]).start();
        let mut conn = server.connect();
        // The key that is tried, with something to take out of it.
        let data = match writes[lacking] {
            "SPOP" => "SADD rlock:no-set a",
            "ZPOPMIN" | "ZPOPMAX" => "ZADD rlock:no-set 1 a",
            _ => "RPUSH rlock:no-set a",
        };
        conn.run(data).int();
        conn.take("k", "alice");
        let mut bob = server.wait_in_queue("k", "bob");
        let replies = conn.pipeline(&[
            "RLOCK.RENEW k alice 300",
            "CONFIG SET min-replicas-to-write 1",
        ]);
        assert_eq!(replies[0], 1);
        assert_eq!(replies[1], "OK");
        until("the lease is over", || conn.run("PTTL k").int() < 0);
        // The module's timer is due within milliseconds. Nothing can be waited for that should not
        // happen.
        thread::sleep(Duration::from_millis(150));
        let without = &writes[..lacking];
        assert_eq!(bob.read_now(), None, "without {without:?}");
        assert_eq!(conn.run("CONFIG SET min-replicas-to-write 0"), "OK");
        bob.read().held();
        let kept = conn.run("TYPE rlock:no-set").text();
        assert_ne!(kept, "none", "without {without:?}");
        assert_eq!(server.info_number("rlock_calls_refused"), 0);
    }
}

/// A waiter is granted when the lease has ended, or hears that the slot of its lock has moved.
#[test]
fn without_exists_a_node_knows_which_keys_are_its_own() {
    let cluster = Cluster::of(&without(&["EXISTS"]));
    let mut conn = cluster.first.connect();
    conn.run("RLOCK.ACQUIRE late alice 300").held();
    let late = "RLOCK.ACQUIRE late bob 30000 BLOCK 10000";
    conn.run(late).held();
    cluster.first.connect().take("k", "alice");
    let mut bob = cluster.first.wait_in_queue("k", "bob");
    cluster.open_slot_of("k");
    cluster.migrate("k");
    cluster.close_slot_of("k");
    let told = bob.read().error();
    assert!(told.starts_with("MOVED "), "{told}");
}

/// The file of a server without `DEL` has none in it.
#[test]
fn a_server_without_del_writes_unlink() {
    let server = without(&["DEL"])
        .config("appendonly yes")
        .config("appendfsync always")
        .start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    conn.let_go("k", "alice");
    let written = aof(&server);
    let last = written.iter().rfind(|line| line.ends_with(" k"));
    assert_eq!(last.map(String::as_str), Some("UNLINK k"), "{written:?}");
}
