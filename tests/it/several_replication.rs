//! After any mix of readers, writers, waits for several locks and for one: replicas and the
//! append-only file agree with the primary, and no two owners held that exclude each other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread;

use rlock_tests::{Conn, Pair, Random, Reply, Server, until};

use crate::queue::OneLess;
use std::sync::atomic::AtomicUsize;

const CLIENTS: u64 = 8;
const COMMANDS_EACH: usize = 250;

/// Traffic of all clients at once; an observer looks for two holders that exclude each other.
fn traffic(server: &Server, seed: u64) {
    let working = AtomicUsize::new(usize::try_from(CLIENTS).unwrap());
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let working = &working;
            scope.spawn(move || {
                let _one_less = OneLess(working);
                one_client(server, client, seed);
            });
        }
        let mut observer = server.connect();
        while working.load(Ordering::Relaxed) > 0 {
            nobody_beside_whom_it_may_not(&mut observer, seed);
        }
    });
    until("the last sessions and waits are over", || {
        let left = |what| server.info_number(&format!("rlock_{what}"));
        left("sessions") + left("session_holds") + left("waiters") == 0
    });
}

/// Each hash has one owner, or readers alone, or a writer that may read as well.
#[track_caller]
fn nobody_beside_whom_it_may_not(observer: &mut Conn, seed: u64) {
    for name in ["p0", "p1", "p2", "r0", "r1", "r2"] {
        let flat = observer.run(format!("HGETALL {name}")).texts();
        let fields: BTreeMap<_, _> = flat
            .chunks(2)
            .map(|pair| (pair[0].as_str(), pair[1].as_str()))
            .collect();
        let writers = fields
            .keys()
            .filter(|field| field.ends_with(":write"))
            .count();
        let owners = fields
            .keys()
            .filter(|field| !["mode", "fence"].contains(field));
        let mut owners: Vec<_> = owners
            .map(|field| field.trim_end_matches(":write"))
            .collect();
        owners.dedup();
        let is_sound = match fields.get("mode") {
            None => owners.len() <= 1,
            Some(&"read") => writers == 0 && !owners.is_empty(),
            Some(_) => writers == 1 && owners.len() == 1,
        };
        assert!(is_sound, "{name} with seed {seed}: {fields:?}");
    }
}

fn one_client(server: &Server, client: u64, seed: u64) {
    let mut conn = server.connect();
    let session = format!("s{client}");
    let mut life = server.session_connection(&session);
    let mut random = Random::new(seed.wrapping_mul(31).wrapping_add(client));
    for _ in 0..COMMANDS_EACH {
        if random.below(20) == 0 {
            life = server.session_connection(&session);
        }
        let command = one_command(&mut random, &session);
        let replies = match random.below(8) {
            0 => {
                let other = one_command(&mut random, &session);
                let batch = ["MULTI", &command, &other, "EXEC"];
                conn.pipeline(&batch).remove(3).array().to_vec()
            }
            1 => vec![in_a_script(&mut conn, &command)],
            _ => vec![conn.run(&command)],
        };
        for reply in replies.iter().filter(|reply| reply.is_error()) {
            let error = reply.error();
            let expected = [
                "NOSESSION ",
                "DEADLOCK ",
                "TRYAGAIN ",
                "WRONGKIND ",
                "WAITING ",
            ];
            assert!(
                expected.iter().any(|code| error.starts_with(code)),
                "{command}: {error}"
            );
        }
        life.run(format!("RLOCK.EVENTS {session}")).events();
    }
}

fn in_a_script(conn: &mut Conn, command: &str) -> Reply {
    let script = "local reply = redis.pcall(unpack(ARGV))
        if type(reply) == 'table' and reply.err then return 0 end
        return 1";
    let words = command.split(' ').collect::<Vec<_>>();
    conn.cmd(&[&["EVAL", script, "0"], &words[..]].concat())
}

fn one_command(random: &mut Random, session: &str) -> String {
    let lease = if random.below(4) == 0 {
        1 + random.below(20)
    } else {
        600_000
    };
    let owner = format!("owner{}", random.below(6));
    let wait = match random.below(4) {
        0 => String::new(),
        1 => format!(" QUEUE {} SESSION {session}", 1 + random.below(20)),
        2 => format!(" BLOCK {} SESSION {session}", 1 + random.below(20)),
        _ => format!(" BLOCK {}", 1 + random.below(20)),
    };
    let once = random.pick(&["", "", "", " ONCE"]);
    if random.below(2) == 0 {
        let name = random.pick(&["r0", "r1", "r2"]);
        let mode = random.pick(&["READ", "READ", "WRITE"]);
        return match random.below(16) {
            0..=7 => format!("RLOCK.ACQUIRE {name} {owner} {lease} {mode}{wait}{once}"),
            8..=10 => format!("RLOCK.RELEASE {name} {owner} {mode}"),
            11 => format!("RLOCK.RELEASE {name} {owner} {mode} LEASE {lease}"),
            12 => format!("RLOCK.RENEW {name} {owner} {lease} {mode}"),
            13 => format!("RLOCK.CANCEL {name} {owner}"),
            14 => format!("RLOCK.BREAK {name}"),
            _ => format!("DEL {name}"),
        };
    }
    let names: Vec<_> = (0..=random.below(3))
        .map(|_| random.pick(&["p0", "p1", "p2", "p2"]))
        .collect();
    let (count, names) = (names.len(), names.join(" "));
    let name = random.pick(&["p0", "p1", "p2", "r0"]);
    match random.below(16) {
        0..=5 => format!("RLOCK.MACQUIRE {owner} {lease} {count} {names}{wait}{once}"),
        6..=7 => format!("RLOCK.ACQUIRE {name} {owner} {lease}{wait}{once}"),
        8..=11 => format!("RLOCK.MRELEASE {owner} {count} {names}"),
        12 => format!("RLOCK.MRENEW {owner} {lease} {count} {names}"),
        13 => format!("RLOCK.CANCEL {name} {owner}"),
        14 => format!("RLOCK.BREAK {name}"),
        _ => format!("PEXPIRE {name} {lease}"),
    }
}

/// Holds at the end, long enough to compare, beside the leftovers of the traffic.
fn hold_some(server: &Server) {
    let mut conn = server.connect();
    for command in [
        "RLOCK.ACQUIRE left0 alice 600000 READ",
        "RLOCK.ACQUIRE left0 bob 600000 READ",
        "RLOCK.ACQUIRE left0 alice 600000 READ",
        "RLOCK.ACQUIRE left1 alice 600000 WRITE",
        "RLOCK.ACQUIRE left1 alice 600000 READ",
        "RLOCK.MACQUIRE alice 600000 2 left2 left3",
    ] {
        conn.run(command).held();
    }
    until("what runs out soon has run out", || {
        let names = conn.run("KEYS *").texts();
        names
            .iter()
            .all(|name| conn.run(format!("PTTL {name}")).int() > 60_000)
    });
}

/// All keys with their contents and expiries.
fn keyspace(server: &Server) -> BTreeMap<String, (Vec<String>, i64)> {
    let mut conn = server.connect();
    let mut names = Vec::new();
    // Those that have run out are named no more, but the server counts them until it removes them.
    until("what has run out is gone", || {
        names = conn.run("KEYS *").texts();
        conn.run("DBSIZE") == i64::try_from(names.len()).unwrap()
    });
    let keys = names.into_iter().map(|name| {
        let mut content = match conn.run(format!("TYPE {name}")).text().as_str() {
            "hash" => {
                let flat = conn.run(format!("HGETALL {name}")).texts();
                flat.chunks(2).map(|pair| pair.join("=")).collect()
            }
            _ => vec![conn.run(format!("GET {name}")).text()],
        };
        content.sort();
        let end = conn.run(format!("PEXPIRETIME {name}")).int();
        (name, (content, end))
    });
    keys.collect()
}

#[test]
fn a_replica_equals_its_primary_after_random_traffic() {
    for plain in [true, false] {
        let pair = if plain {
            Pair::with_plain_replica()
        } else {
            Pair::start()
        };
        let seed = u64::from(pair.primary.process_id());
        traffic(&pair.primary, seed);
        hold_some(&pair.primary);
        pair.settle();
        let primary = keyspace(&pair.primary);
        assert!(
            primary.len() >= 8,
            "there is something to compare: {primary:?}"
        );
        assert_eq!(
            primary,
            keyspace(&pair.replica),
            "plain: {plain}, seed {seed}"
        );
        let digest = |server: &Server| server.run("DEBUG DIGEST").text();
        assert_eq!(
            digest(&pair.primary),
            digest(&pair.replica),
            "plain: {plain}, seed {seed}"
        );
    }
}

/// Permits of all sizes, and their limits.
fn permits(server: &Server, seed: u64, is_over: &AtomicBool) {
    let (mut conn, mut random) = (server.connect(), Random::new(seed ^ 7));
    while !is_over.load(Ordering::Relaxed) {
        let name = random.pick(&["sem0", "sem1"]);
        let owner = format!("owner{}", random.below(5));
        let (n, lease) = (1 + random.below(3), random.pick(&["9", "600000"]));
        let command = match random.below(10) {
            0..=3 => format!("RLOCK.ACQUIRE {name} {owner} {lease} PERMITS {n} OF 5 ONCE"),
            4 => format!("RLOCK.ACQUIRE {name} {owner} {lease} PERMITS 1 OF 5 ONCE BLOCK 5"),
            5..=6 => format!("RLOCK.RELEASE {name} {owner} PERMITS 1"),
            7 => format!("RLOCK.RENEW {name} {owner} {lease} PERMITS"),
            8 => format!("RLOCK.LIMIT {name} {}", random.below(5)),
            _ => format!("RLOCK.BREAK {name}"),
        };
        conn.run(command);
    }
    conn.run("DEL sem0 sem1");
    conn.run("RLOCK.LIMIT sem0 0").int();
    conn.run("RLOCK.LIMIT sem1 0").int();
}

/// Readers and writers, and scripts of other programs that write to their keys.
fn foreign_writes(server: &Server, seed: u64, is_over: &AtomicBool) {
    let (mut conn, mut random) = (server.connect(), Random::new(seed ^ 0b1101));
    while !is_over.load(Ordering::Relaxed) {
        let name = random.pick(&["f0", "f1"]);
        let owner = format!("owner{}", random.below(4));
        let mode = random.pick(&["READ", "READ", "WRITE", ""]);
        let command = match random.below(10) {
            0..=3 => format!("RLOCK.ACQUIRE {name} {owner} 600000 {mode}"),
            4 => format!("RLOCK.RELEASE {name} {owner} {mode}"),
            5 => format!("HDEL {name} {owner}"),
            6 => format!("DEL {{{name}}}:{owner}:rwlock_timeout:1"),
            7 => format!("PEXPIRE {{{name}}}:{owner}:rwlock_timeout:1 5"),
            8 => format!("HINCRBY {name} {owner} 1"),
            _ => format!("PEXPIRE {name} {}", 1 + random.below(20)),
        };
        conn.run(command.trim_end());
    }
    // A hash without an expiry would stay.
    conn.run("DEL f0 f1");
}

/// Sets the flag at its end, also if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn replica_and_files_equal_the_primary_with_permits_and_foreign_writes_too() {
    let with_file = || Server::builder().config("appendonly yes");
    let pair = Pair::of(with_file(), with_file());
    let seed = u64::from(pair.primary.process_id());
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| permits(&pair.primary, seed, &is_over));
        scope.spawn(|| foreign_writes(&pair.primary, seed, &is_over));
        let _over = Over(&is_over);
        traffic(&pair.primary, seed);
    });
    hold_some(&pair.primary);
    let mut conn = pair.primary.connect();
    conn.run("RLOCK.LIMIT sem0 4").int();
    conn.run("RLOCK.ACQUIRE sem0 left 600000 PERMITS 2").held();
    pair.settle();
    let held = keyspace(&pair.primary);
    assert!(held.len() >= 10, "there is something to compare: {held:?}");
    let digest = |server: &Server| server.run("DEBUG DIGEST").text();
    let before = digest(&pair.primary);
    assert_eq!(held, keyspace(&pair.replica), "seed {seed}");
    assert_eq!(before, digest(&pair.replica), "seed {seed}");
    for server in [&pair.primary, &pair.replica] {
        assert_eq!(server.run("DEBUG LOADAOF"), "OK");
        assert_eq!(held, keyspace(server), "the file, seed {seed}");
        assert_eq!(before, digest(server), "the file, seed {seed}");
    }
}

#[test]
fn the_append_only_file_replays_without_the_module() {
    let mut server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync no")
        .start();
    let seed = u64::from(server.process_id());
    traffic(&server, seed);
    hold_some(&server);
    let before = (keyspace(&server), server.run("DEBUG DIGEST").text());
    server.restart_without_module();
    let after = (keyspace(&server), server.run("DEBUG DIGEST").text());
    assert_eq!(before, after, "seed {seed}");
}

#[test]
fn an_append_only_file_written_anew_holds_the_same() {
    let mut server = Server::builder().config("appendonly yes").start();
    traffic(&server, u64::from(server.process_id()));
    hold_some(&server);
    assert!(!server.run("BGREWRITEAOF").is_error());
    until("it is written", || {
        server.info_number("aof_rewrite_in_progress") == 0
    });
    let before = keyspace(&server);
    server.restart();
    assert_eq!(before, keyspace(&server));
    assert_eq!(server.run("RLOCK.RENEW left0 alice 60000 READ"), 1);
    assert_eq!(server.run("RLOCK.RENEW left1 alice 60000 WRITE"), 1);
    assert_eq!(server.run("RLOCK.MRELEASE alice 2 left2 left3"), 2);
}

/// Readers and writers of a few locks; each checks that the others inside are compatible.
#[test]
fn no_writer_is_inside_beside_anybody_and_all_get_their_turn() {
    const THREADS: usize = 10;
    const ROUNDS: usize = 60;
    let server = Server::start();
    let readers = [AtomicI64::new(0), AtomicI64::new(0)];
    let writing = [AtomicBool::new(false), AtomicBool::new(false)];
    let together = AtomicI64::new(0);
    thread::scope(|scope| {
        for number in 0..THREADS {
            let (server, readers, writing, together) = (&server, &readers, &writing, &together);
            scope.spawn(move || {
                let mut conn = server.connect();
                for round in 0..ROUNDS {
                    let lock = (number + round) % 2;
                    let mode = if (number * 7 + round) % 4 == 0 {
                        "WRITE"
                    } else {
                        "READ"
                    };
                    let acquire = format!("RLOCK.ACQUIRE rw{lock} o{number} 30000 {mode} BLOCK 0");
                    assert_eq!(conn.run(acquire).held().0, 1);
                    if mode == "WRITE" {
                        assert!(!writing[lock].swap(true, Ordering::SeqCst), "two writers");
                        assert_eq!(readers[lock].load(Ordering::SeqCst), 0, "beside readers");
                        conn.run("PING");
                        assert_eq!(readers[lock].load(Ordering::SeqCst), 0, "beside readers");
                        writing[lock].store(false, Ordering::SeqCst);
                    } else {
                        let inside = readers[lock].fetch_add(1, Ordering::SeqCst) + 1;
                        together.fetch_max(inside, Ordering::SeqCst);
                        assert!(!writing[lock].load(Ordering::SeqCst), "beside a writer");
                        conn.run("PING");
                        assert!(!writing[lock].load(Ordering::SeqCst), "beside a writer");
                        readers[lock].fetch_sub(1, Ordering::SeqCst);
                    }
                    let release = format!("RLOCK.RELEASE rw{lock} o{number} {mode}");
                    assert_eq!(conn.run(release), 0);
                }
            });
        }
    });
    assert!(
        together.load(Ordering::SeqCst) > 1,
        "readers are inside together"
    );
    assert_eq!(server.run("DBSIZE"), 0);
    assert_eq!(server.info_number("rlock_waiters"), 0);
}
