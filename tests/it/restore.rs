//! `rlock.replicate restore`: a new lock reaches replicas and the append-only file as one
//! `RESTORE`. They have what the primary has, without the module, byte by byte. Where the primary
//! cannot use it, it tells them by plain commands.

use std::collections::BTreeMap;
use std::fs;
use std::thread;

use rlock_tests::{Builder, Conn, Feed, Pair, Random, Reply, Server, Version, aof, in_sync, until};

use crate::replication::{end_of, grant, plain_grant, transaction, unlock_message};

/// A key as its server dumps it, with its end. Only a hash of short values has one form.
#[derive(Debug, PartialEq)]
struct Content {
    dump: Option<Vec<u8>>,
    fields: Vec<String>,
    end: i64,
}

/// The first byte of such a dump.
const LISTPACK: u8 = 16;

/// The version and the checksum differ between servers.
const FOOTER: usize = 10;

fn keyspace(server: &Server) -> BTreeMap<String, Content> {
    let mut conn = server.connect();
    let names = conn.run("KEYS *").texts();
    let content = |name: String| {
        let of_hash = conn.cmd(&["HGETALL", &name]);
        let mut fields: Vec<String> = if of_hash.is_error() {
            vec![conn.cmd(&["GET", &name]).text()]
        } else {
            let pairs = of_hash.texts();
            pairs.chunks(2).map(|pair| pair.join("=")).collect()
        };
        fields.sort();
        let end = conn.cmd(&["PEXPIRETIME", &name]).int();
        let dump = dump(&mut conn, &name).filter(|dump| dump[0] == LISTPACK);
        (name, Content { dump, fields, end })
    };
    names.into_iter().map(content).collect()
}

fn fields_and_ends(server: &Server) -> BTreeMap<String, (Vec<String>, i64)> {
    let keys = keyspace(server).into_iter();
    keys.map(|(name, content)| (name, (content.fields, content.end)))
        .collect()
}

/// Without version and checksum. None if there is no such key.
fn dump(conn: &mut Conn, name: &str) -> Option<Vec<u8>> {
    let Reply::Bulk(mut dump) = conn.cmd(&["DUMP", name]) else {
        return None;
    };
    dump.truncate(dump.len() - FOOTER);
    Some(dump)
}

fn uncompressed() -> Builder {
    Server::builder().config("rdbcompression no")
}

fn with_aof(server: Builder) -> Builder {
    server.config("appendonly yes").config("appendfsync always")
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Owners of each length that fits, and all forms in which the server keeps numbers.
fn owners() -> Vec<String> {
    let lengths = (1..=64).map(|len| "o".repeat(len));
    let numbers = [
        0,
        1,
        9,
        127,
        128,
        4095,
        4096,
        32_767,
        32_768,
        8_388_607,
        8_388_608,
        2_147_483_647,
        2_147_483_648,
        i64::MAX,
        -1,
        -4096,
        -4097,
        -32_768,
        -32_769,
        -8_388_608,
        -8_388_609,
        -2_147_483_648,
        -2_147_483_649,
        i64::MIN,
    ];
    let odd = [
        "-0",
        "00",
        "+1",
        "1.0",
        "-",
        "9223372036854775808",
        "\u{fc}\u{1}",
    ];
    lengths
        .chain(numbers.map(|number| number.to_string()))
        .chain(odd.map(str::to_owned))
        .collect()
}

#[test]
fn a_new_lock_is_told_as_the_server_dumps_it() {
    let primary = with_aof(uncompressed());
    let replica = uncompressed().config("sanitize-dump-payload yes");
    let pair = Pair::of(primary, replica.without_module());
    let mut conn = pair.primary.connect();
    let modes = [
        &[][..],
        &["READ"],
        &["WRITE"],
        &["PERMITS", "300", "OF", "70000"],
    ];
    for (number, owner) in owners().iter().enumerate() {
        for mode in modes {
            let name = format!("k{number}{}", mode.concat());
            let command = ["RLOCK.ACQUIRE", &name, owner, "600000"];
            conn.cmd(&[&command[..], mode].concat()).held();
        }
    }
    pair.settle();
    let (expected, found) = (keyspace(&pair.primary), keyspace(&pair.replica));
    assert!(expected.len() > 4 * 90, "{}", expected.len());
    assert_eq!(found, expected);
    let folder = pair.primary.directory().join("appendonlydir");
    let files = fs::read_dir(folder).expect("an AOF");
    let written: Vec<u8> = files
        .flat_map(|file| fs::read(file.expect("an entry").path()).expect("a file"))
        .collect();
    // Redis 7.0 writes the same version, so the whole payload is its own.
    let writes_version_10 = !Version::at_hand().at_least((7, 2), (0, 0));
    let mut restored = 0;
    for name in expected.keys().filter(|name| name.starts_with('k')) {
        let Reply::Bulk(whole) = conn.cmd(&["DUMP", name]) else {
            panic!("{name} is gone");
        };
        if whole[0] != LISTPACK {
            assert!(name.ends_with("WRITE"), "{name}: a field that is too long");
            continue;
        }
        restored += 1;
        let body = if writes_version_10 {
            &whole[..]
        } else {
            &whole[..whole.len() - FOOTER]
        };
        assert!(has(&written, body), "{name}: {}", whole.escape_ascii());
    }
    assert!(restored > 4 * 90 - 10, "{restored}");
}

/// The server keeps longer owners in another kind of hash, and `RESTORE` would make a listpack.
#[test]
fn a_lock_with_a_long_owner_is_told_by_plain_commands() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    for (len, is_plain) in [(64, false), (65, true), (1024, true)] {
        let owner = "o".repeat(len);
        let token = conn.take("k", &owner);
        let end = end_of(&mut conn, "k");
        let expected = if is_plain {
            transaction(plain_grant("k", &owner, token, end))
        } else {
            vec![grant("k", &owner, token, end)]
        };
        assert_eq!(feed.news(), expected, "{len}");
        conn.let_go("k", &owner);
        assert_eq!(feed.news(), ["DEL k".to_owned(), unlock_message("k")]);
    }
}

#[test]
fn what_the_server_keeps_in_no_listpack_is_told_by_plain_commands() {
    let server = Server::builder()
        .config("hash-max-listpack-value 20")
        .start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    let (short, long) = ("o".repeat(20), "o".repeat(21));
    let mut told_as = |settings: &[&str], owner: &str, first: &str| {
        for setting in settings {
            assert_eq!(conn.run(format!("CONFIG SET {setting}")), "OK");
        }
        conn.take("k", owner);
        let told = feed.news().remove(0);
        assert!(told.starts_with(first), "{settings:?}, {owner}: {told}");
        let form = conn.run("OBJECT ENCODING k").text();
        assert_eq!(form == "listpack", first == "RESTORE", "{settings:?}");
        conn.let_go("k", owner);
        feed.news();
    };
    told_as(&[], &short, "RESTORE");
    told_as(&[], &long, "MULTI");
    told_as(&["hash-max-listpack-value 21"], &long, "RESTORE");
}

#[test]
fn few_entries_in_a_listpack_are_told_by_plain_commands() {
    let server = Server::builder()
        .config("hash-max-listpack-entries 1")
        .start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    conn.take("k", "alice");
    assert_eq!(feed.news()[0], "MULTI");
    assert_eq!(conn.run("CONFIG SET hash-max-listpack-entries 2"), "OK");
    conn.take("l", "alice");
    assert!(feed.news()[0].starts_with("RESTORE l "));
}

// --- Replicas and files --------------------------------------------------------------------------

#[test]
fn a_chained_replica_without_the_module_has_the_locks() {
    let pair = Pair::with_plain_replica();
    let last = Server::builder().without_module().start();
    last.run(format!("REPLICAOF 127.0.0.1 {}", pair.replica.port()));
    until("the chained replica is connected", || {
        last.info("master_link_status").as_deref() == Some("up")
    });
    let mut conn = pair.primary.connect();
    conn.take("k", "alice");
    let mut bob = pair.primary.wait_in_queue("k", "bob");
    conn.let_go("k", "alice");
    bob.read().held();
    pair.settle();
    in_sync(&pair.primary, &last);
    assert_eq!(last.run("HGET k bob"), "1");
    assert_eq!(keyspace(&last), keyspace(&pair.primary));
}

#[test]
fn a_replica_that_has_reached_its_memory_limit_has_the_locks() {
    let pair = Pair::with_plain_replica();
    assert_eq!(pair.replica.run("CONFIG SET maxmemory 1"), "OK");
    let mut conn = pair.primary.connect();
    conn.take("k", "alice");
    let mut bob = pair.primary.wait_in_queue("k", "bob");
    conn.let_go("k", "alice");
    bob.read().held();
    pair.settle();
    assert_eq!(keyspace(&pair.replica), keyspace(&pair.primary));
}

/// The lease is over when the replica and the file's reader see the command.
#[test]
fn a_lease_that_is_over_leaves_nothing() {
    let primary = with_aof(Server::builder());
    let mut pair = Pair::of(primary, Server::builder().without_module());
    let mut conn = pair.primary.connect();
    pair.replica.freeze();
    conn.run("RLOCK.ACQUIRE k alice 1").held();
    conn.run("RLOCK.ACQUIRE r alice 1 READ").held();
    until("the leases are over", || conn.run("EXISTS k r") == 0);
    conn.run("RLOCK.ACQUIRE left alice 600000").held();
    pair.replica.thaw();
    pair.settle();
    assert_eq!(pair.replica.run("EXISTS k r"), 0);
    assert_eq!(pair.replica.run("HGET left alice"), "1");
    conn.run("DEBUG SET-ACTIVE-EXPIRE 0");
    conn.run("RLOCK.ACQUIRE last alice 1").held();
    pair.primary.kill();
    pair.primary.restart();
    assert_eq!(pair.primary.run("EXISTS k r last"), 0);
    assert_eq!(pair.primary.run("HGET left alice"), "1");
}

/// A file or a replica that cannot read `RESTORE`, as docs/operations.md says.
#[test]
fn without_restore_a_file_that_has_it_is_not_loaded() {
    let server = with_aof(Server::builder()).start();
    server.connect().take("k", "alice");
    assert!(aof(&server)[0].starts_with("RESTORE k "));
    let log = with_aof(Server::builder())
        .data(server.directory())
        .config("rename-command RESTORE \"\"")
        .refuses_to_start();
    let log = log.to_lowercase();
    assert!(log.contains("unknown command 'restore'"), "{log}");
}

/// Many servers load a file as the user `default`, and skip what that user may not run: beside a
/// `RESTORE` that is skipped, the rest of its transaction would make half a lock, held for ever.
#[test]
fn a_default_user_without_restore_loses_no_lock_at_a_restart() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let users = "user default on nopass ~* &* +@all -restore\nuser admin on nopass ~* &* +@all\n";
    fs::write(file.path(), users).unwrap();
    let path = file.path().display();
    let mut server = with_aof(Server::builder())
        .config(&format!("aclfile {path}"))
        .start();
    let mut conn = server.connect();
    let seen = |conn: &mut Conn| {
        let kinds = ["HGETALL r", "HGETALL m1", "HGETALL m2", "HGETALL w"];
        let ends = [
            "PEXPIRETIME r",
            "PEXPIRETIME m1",
            "PEXPIRETIME m2",
            "PEXPIRETIME w",
        ];
        let all = kinds.into_iter().chain(ends);
        all.map(|command| conn.run(command)).collect::<Vec<_>>()
    };
    conn.run("RLOCK.ACQUIRE r alice 400000 READ");
    conn.run("RLOCK.ACQUIRE r bob 300000 READ");
    conn.run("RLOCK.MACQUIRE alice 600000 2 m1 m2");
    conn.run("RLOCK.ACQUIRE w alice 600000 WRITE");
    let mut bob = server.connect();
    bob.send("RLOCK.ACQUIRE w bob 600000 READ BLOCK 0");
    until("bob waits", || server.waiting_owners("w").len() == 1);
    conn.run("RLOCK.RELEASE w alice WRITE");
    bob.read().held();
    let before = seen(&mut conn);
    server.restart();
    assert_eq!(seen(&mut server.connect()), before);
}

/// The rights are looked at again and again: no event tells of them.
#[test]
fn a_right_to_restore_that_is_taken_away_counts_soon() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    let mut is_restored = |name: &str| {
        conn.take(name, "alice");
        let news = feed.news();
        news.iter().any(|command| command.starts_with("RESTORE"))
    };
    let mut numbers = (0..).map(|number| format!("k{number}"));
    let mut until_it_is = |expected| {
        until("the right counts", || {
            is_restored(&numbers.next().unwrap()) == expected
        });
    };
    until_it_is(true);
    assert_eq!(server.run("ACL SETUSER default -restore"), "OK");
    until_it_is(false);
    assert_eq!(server.run("ACL SETUSER default +@all"), "OK");
    until_it_is(true);
}

#[test]
fn a_replica_without_restore_lacks_new_locks_unless_told_by_plain_commands() {
    let primary = Server::start();
    let replica = Server::builder()
        .without_module()
        .config("rename-command RESTORE \"\"")
        .start();
    replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    until("the replica is connected", || {
        replica.info("master_link_status").as_deref() == Some("up")
    });
    let mut conn = primary.connect();
    conn.take("k", "alice");
    in_sync(&primary, &replica);
    assert_eq!(replica.run("EXISTS k"), 0);
    assert_eq!(replica.info_number("unexpected_error_replies"), 1);
    assert_eq!(conn.run("CONFIG SET rlock.replicate plain"), "OK");
    conn.take("l", "alice");
    in_sync(&primary, &replica);
    assert_eq!(replica.run("HGET l alice"), "1");
}

#[test]
fn a_replica_hears_of_a_new_lock_by_the_event_of_restore() {
    let notifying = Server::builder().without_module();
    let replica = notifying.config("notify-keyspace-events KA");
    let pair = Pair::of(Server::builder(), replica);
    let mut listener = pair.replica.connect();
    listener.run("SUBSCRIBE __keyspace@0__:k");
    let mut conn = pair.primary.connect();
    conn.take("k", "alice");
    conn.let_go("k", "alice");
    for event in ["restore", "del"] {
        assert_eq!(listener.read().texts()[2], event);
    }
}

/// Another module hears of the new key, and writes to it, before the hash is written.
#[test]
fn what_a_listener_writes_into_a_new_lock_reaches_replicas_and_the_file() {
    let pair = Pair::of(with_aof(Server::builder()), Server::builder());
    pair.primary.load_c_module("meddler");
    let mut conn = pair.primary.connect();
    for (number, write) in ["created 1", "fence t1", "bob 7 created 1", "bob 7"]
        .into_iter()
        .enumerate()
    {
        let name = format!("k{number}");
        // A lock that is new, and one that is handed over.
        conn.run(format!("MEDDLER.ON new {name} 0 HSET {name} {write}"));
        conn.run(format!("RLOCK.ACQUIRE {name} bob 600000")).held();
        let mut carol = pair.primary.wait_in_queue(&name, "bob2");
        conn.run(format!("MEDDLER.ON new {name} 0 HSET {name} {write}"));
        conn.run(format!("RLOCK.BREAK {name}"));
        carol.read().held();
        pair.settle();
        // In another order perhaps.
        let [primary, replica] = [&pair.primary, &pair.replica].map(fields_and_ends);
        assert_eq!(replica, primary, "{write}");
    }
    assert_eq!(conn.run("MEDDLER.DONE"), 8);
    assert_eq!(conn.run("HGET k0 created"), "1");
    let before = fields_and_ends(&pair.primary);
    assert_eq!(conn.run("DEBUG LOADAOF"), "OK");
    assert_eq!(fields_and_ends(&pair.primary), before);
}

// --- The message beside the change ---------------------------------------------------------------

#[test]
fn messages_go_to_replicas_from_every_database() {
    let pair = Pair::with_plain_replica();
    until("the replica is online", || {
        let told = pair.primary.run("INFO replication").text();
        told.contains("state=online")
    });
    let mut listener = pair.replica.connect();
    listener.run("SUBSCRIBE redisson_lock__channel:{k}");
    let mut conn = pair.primary.connect();
    for db in [0, 5] {
        conn.run(format!("SELECT {db}"));
        conn.take("k", "alice");
        conn.let_go("k", "alice");
        assert_eq!(listener.read().texts()[2], "0");
    }
}

/// The server must not replicate anything while it is paused, and would end.
#[test]
fn a_message_waits_until_a_pause_is_over() {
    let pair = Pair::with_plain_replica();
    until("the replica is online", || {
        let told = pair.primary.run("INFO replication").text();
        told.contains("state=online")
    });
    let mut listener = pair.replica.connect();
    listener.run("SUBSCRIBE redisson_lock__channel:{k}");
    let mut conn = pair.primary.connect();
    for _ in 0..5 {
        conn.take("k", "alice");
        // Both in one turn of the server, and the message would come at its end.
        let replies = conn.pipeline(&["RLOCK.RELEASE k alice", "CLIENT PAUSE 100 WRITE"]);
        assert_eq!(replies[0], 0);
        assert_eq!(replies[1], "OK");
        assert_eq!(listener.read().texts()[2], "0");
    }
}

/// A RELEASE right behind the blocked ACQUIRE runs when the server's turn is nearly over.
#[test]
fn the_message_of_a_client_that_was_just_unblocked_arrives() {
    let pair = Pair::with_plain_replica();
    until("the replica is online", || {
        let told = pair.primary.run("INFO replication").text();
        told.contains("state=online")
    });
    let mut listener = pair.replica.connect();
    listener.run("SUBSCRIBE redisson_lock__channel:{k}");
    let mut conn = pair.primary.connect();
    conn.take("k", "alice");
    let mut bob = pair.primary.wait_in_queue("k", "bob");
    bob.send("RLOCK.RELEASE k bob");
    bob.settle();
    conn.let_go("k", "alice");
    bob.read().held();
    assert_eq!(bob.read(), 0);
    for _ in 0..2 {
        assert_eq!(listener.read().texts()[2], "0");
    }
}

// --- All of it -----------------------------------------------------------------------------------

/// Random commands of all kinds by clients at once: the replica and the file are what the primary
/// is, with both ways to replicate and while they change.
#[test]
fn replicas_and_the_file_never_differ_from_the_primary() {
    for ways in [&["restore"][..], &["plain"], &["restore", "plain"]] {
        let pair = Pair::of(
            with_aof(Server::builder()),
            Server::builder().without_module(),
        );
        let seed = u64::from(pair.primary.process_id());
        thread::scope(|scope| {
            for client in 0..4 {
                let server = &pair.primary;
                scope.spawn(move || traffic(server, ways, client, seed));
            }
        });
        until("the last waits are over", || {
            pair.primary.info_number("rlock_waiters") == 0
        });
        let mut conn = pair.primary.connect();
        for (number, owner) in ["a", "17", &"x".repeat(80)].into_iter().enumerate() {
            for (name, mode) in [
                ("p", ""),
                ("r", " READ"),
                ("w", " WRITE"),
                ("s", " PERMITS 1 OF 1"),
            ] {
                conn.run(format!(
                    "RLOCK.ACQUIRE left{name}{number} {owner} 600000{mode}"
                ))
                .held();
            }
        }
        until("short leases are over", || {
            let names = conn.run("KEYS *").texts();
            let is_long = |name: &String| conn.cmd(&["PTTL", name]).int() > 60_000;
            names.iter().all(is_long)
        });
        pair.settle();
        let expected = keyspace(&pair.primary);
        assert!(expected.len() >= 12, "there is something to compare");
        assert_eq!(keyspace(&pair.replica), expected, "{ways:?}, seed {seed}");
        assert_eq!(conn.run("DEBUG LOADAOF"), "OK");
        assert_eq!(keyspace(&pair.primary), expected, "{ways:?}, seed {seed}");
        assert_eq!(pair.primary.info_number("rlock_calls_refused"), 0);
    }
}

fn traffic(server: &Server, ways: &[&str], client: u64, seed: u64) {
    let mut conn = server.connect();
    let mut random = Random::new(seed.wrapping_mul(31).wrapping_add(client));
    for _ in 0..400 {
        if random.below(30) == 0 {
            let way = random.pick(ways);
            assert_eq!(conn.run(format!("CONFIG SET rlock.replicate {way}")), "OK");
        }
        let command = random_command(&mut random);
        let reply = conn.run(&command);
        // More permits may be given back than are held.
        let may = [
            "WAITING ",
            "DEADLOCK ",
            "HELD ",
            "WRONGKIND ",
            "ERR permits ",
        ];
        let is_one = |error: String| may.iter().any(|code| error.starts_with(code));
        assert!(
            !reply.is_error() || is_one(reply.error()),
            "{command}: {reply:?}"
        );
    }
}

fn random_command(random: &mut Random) -> String {
    let long = "y".repeat(60 + random.index(10));
    let owner = random.pick(&["a", "b", "-7", "70000", "c:1", &long]);
    let lease = random.pick(&["1", "9", "600000", "600000", "700000"]);
    let wait = random.pick(&["", "", " BLOCK 5", " BLOCK 15", " ONCE"]);
    let (kind, mode) = match random.below(5) {
        0 => ("r", "READ"),
        1 => ("r", "WRITE"),
        2 => ("s", "PERMITS"),
        _ => ("p", ""),
    };
    let name = format!("{kind}{}", random.below(3));
    let (n, of) = match mode {
        "PERMITS" => (random.pick(&[" 1", " 2"]), " OF 3"),
        _ => ("", ""),
    };
    match random.below(16) {
        0..=6 => format!("RLOCK.ACQUIRE {name} {owner} {lease} {mode}{n}{of}{wait}"),
        7..=10 => format!("RLOCK.RELEASE {name} {owner} {mode}{n}"),
        11 => format!("RLOCK.RENEW {name} {owner} {lease} {mode}"),
        12 => format!("RLOCK.MACQUIRE {owner} {lease} 2 p0 p1{wait}"),
        13 => format!("RLOCK.MRELEASE {owner} 3 p0 p1 p2"),
        14 => format!("RLOCK.BREAK {name}"),
        _ => format!("DEL {name}"),
    }
}
