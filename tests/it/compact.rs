//! `rlock.replicate compact`: replicas and the append-only file come to the same as with plain
//! commands. What is tested of plain commands elsewhere is tested here once more.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, thread};

use rlock_tests::{Conn, Feed, Pair, Random, Reply, Server, in_compact_form, in_sync, until};

use crate::several_replication::{hold_some, keyspace, traffic};

/// The tests of another module, in the compact form.
macro_rules! again {
    ($module:ident { $($test:ident),* $(,)? }) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    super::in_compact_form(crate::$module::$test);
                }
            )*
        }
    };
}

again!(replication {
    acquire_is_the_hash_and_the_end_of_the_lease,
    a_reentry_is_the_new_count_and_the_new_end,
    a_release_is_the_new_count_or_the_deletion_with_the_message,
    a_renewal_is_the_new_end,
    a_hand_over_is_one_transaction,
    break_is_replicated_as_a_release,
    the_message_is_not_kept_for_a_replica_that_is_away,
    a_lease_that_ends_is_a_deletion_and_the_grant_in_this_order,
    a_users_deletion_comes_before_the_grant,
    in_a_clients_transaction_there_is_one_transaction,
    refused_and_read_only_commands_propagate_nothing,
    the_message_is_not_in_the_append_only_file,
    a_refused_command_disturbs_nobodys_watch,
    keyspace_notifications_are_those_of_the_plain_commands,
    an_expired_lock_is_notified_once,
    the_unlock_message_is_told_once_for_each_last_release_hand_over_and_break,
    the_channel_is_the_one_where_redisson_listens,
    subscribers_of_a_replica_are_told_too,
    publishing_follows_its_option,
    in_a_cluster_the_message_goes_to_both_kinds_of_subscribers_once,
    a_replica_refuses_to_write_and_answers_questions,
    a_replica_equals_its_primary_after_random_traffic_with_waiters,
    holds_survive_a_restart_with_their_ends_and_tokens_go_on_growing
});
again!(several_replication {
    a_replica_equals_its_primary_after_random_traffic,
    an_append_only_file_written_anew_holds_the_same,
    no_writer_is_inside_beside_anybody_and_all_get_their_turn
});
again!(failover {
    an_ordered_failover_keeps_the_holds_and_sends_the_waiters_away,
    sentinels_that_replace_a_dead_primary_keep_the_holds,
    what_a_deposed_primary_grants_has_smaller_tokens_than_its_successors_grants,
    a_failover_in_good_order_keeps_every_kind_of_hold
});
again!(permits {
    permits_reach_replicas_as_plain_commands,
});
again!(read_write {
    a_writers_token_is_unknown_after_a_restart_and_a_reentry_mints_one,
    replicas_are_told_plain_commands_with_absolute_times,
    a_replica_that_is_told_of_readers_and_a_writer_tells_the_same
});
again!(sessions {
    nothing_is_released_while_clients_are_paused,
    a_hand_over_by_the_end_of_a_session_is_one_transaction,
    a_hand_over_of_an_unfetched_grant_is_one_transaction,
    the_end_of_a_session_without_waiters_is_replicated_as_a_last_release,
    several_holds_that_end_together_are_whole_on_the_disk,
    sessions_and_waits_themselves_are_not_replicated,
    a_restart_leaves_holds_without_a_session
});
again!(several {
    all_or_none,
    replicas_are_told_all_in_one_transaction,
    refused_and_fruitless_commands_write_nothing_and_break_no_watch,
    an_mrelease_frees_all_before_anyone_is_granted
});
again!(kill {
    with_every_write_on_disk_a_kill_loses_nothing_that_was_acknowledged,
    with_everysec_a_kill_loses_only_the_end_of_the_history
});
again!(freed {
    a_failover_keeps_the_hold_and_ends_the_waits,
    nothing_is_written_while_writes_are_paused
});
again!(read_write_queue {
    nothing_is_written_while_clients_are_paused
});

/// How the servers of a test are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Plain,
    Compact,
    /// Now this, now that.
    Switched,
}

#[test]
fn after_any_traffic_replica_and_files_have_what_the_primary_has() {
    for form in [Form::Plain, Form::Compact, Form::Switched] {
        let with_file = || Server::builder().config("appendonly yes");
        // The replica is plain, and applies what it is told.
        let pair = Pair::of(with_file(), with_file());
        set(&pair.primary, form == Form::Compact);
        let seed = u64::from(pair.primary.process_id());
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| permits_and_switches(&pair.primary, seed, form, &is_over));
            scope.spawn(|| foreign_writes(&pair.primary, seed, &is_over));
            // Also if the traffic fails.
            let _over = Over(&is_over);
            traffic(&pair.primary, seed);
        });
        hold_some(&pair.primary);
        let mut conn = pair.primary.connect();
        conn.run("RLOCK.LIMIT sem0 4").int();
        conn.run("RLOCK.ACQUIRE sem0 left 600000 PERMITS 2").held();
        pair.settle();
        let (applied, expected) = (
            pair.replica.info_number("rlock_changes_applied"),
            form != Form::Plain,
        );
        assert_eq!(applied > 0, expected, "{form:?}: {applied}");
        assert_eq!(pair.replica.info_number("rlock_changes_refused"), 0);
        let held = keyspace(&pair.primary);
        assert!(held.len() >= 8, "there is something to compare: {held:?}");
        let digest = |server: &Server| server.run("DEBUG DIGEST").text();
        let before = digest(&pair.primary);
        assert_eq!(held, keyspace(&pair.replica), "{form:?}, seed {seed}");
        assert_eq!(before, digest(&pair.replica), "{form:?}, seed {seed}");
        for server in [&pair.primary, &pair.replica] {
            assert_eq!(server.run("DEBUG LOADAOF"), "OK");
            assert_eq!(held, keyspace(server), "the file, {form:?}, seed {seed}");
            assert_eq!(before, digest(server), "the file, {form:?}, seed {seed}");
        }
    }
}

fn set(server: &Server, is_compact: bool) {
    let form = if is_compact { "compact" } else { "plain" };
    assert_eq!(
        server.run(format!("CONFIG SET rlock.replicate {form}")),
        "OK"
    );
}

/// Permits of all sizes and their limits, and the setting again and again.
fn permits_and_switches(server: &Server, seed: u64, form: Form, is_over: &AtomicBool) {
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
        if form == Form::Switched {
            set(server, random.below(2) == 0);
        }
    }
    conn.run("DEL sem0 sem1");
    conn.run("RLOCK.LIMIT sem0 0").int();
    conn.run("RLOCK.LIMIT sem1 0").int();
}

/// Says that it is over, at its end.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Readers, and what scripts of others do to their keys.
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
    // One without an end would stay.
    conn.run("DEL f0 f1");
}

/// What a listener at the replica hears, key by key and message by message.
fn heard_at_a_replica(commands: &[&str], is_compact: bool) -> Vec<String> {
    let replica = Server::builder().config("notify-keyspace-events KA");
    let pair = Pair::of(Server::builder(), replica);
    set(&pair.primary, is_compact);
    // The module looks for replicas at every tick.
    until("messages are told to replicas", || {
        let mut feed = Feed::of(&pair.primary);
        pair.primary.run("RLOCK.ACQUIRE first alice 30000").held();
        pair.primary.run("RLOCK.RELEASE first alice").int();
        feed.news().iter().any(|told| told.starts_with("PUBLISH "))
    });
    pair.settle();
    let mut listener = pair.replica.connect();
    listener.run("PSUBSCRIBE __keyspace@0__:* redisson_*");
    // The reply to the second pattern.
    listener.read();
    let mut waiters: Vec<Conn> = Vec::new();
    let mut conn = pair.primary.connect();
    for command in commands {
        if command.contains(" BLOCK ") {
            waiters.push(pair.primary.blocked_in(command));
        } else {
            assert!(!conn.run(command).is_error(), "{command}");
        }
    }
    for waiter in &mut waiters {
        waiter.read().held();
    }
    pair.settle();
    listener.settle();
    let mut heard = Vec::new();
    while let Some(told) = listener.read_now() {
        heard.push(told.texts()[2..].join(" "));
    }
    let applied = pair.replica.info_number("rlock_changes_applied");
    assert_eq!(applied > 0, is_compact, "{applied}");
    heard
}

#[test]
fn listeners_at_a_replica_hear_the_same_in_both_forms() {
    // The later a lease begins the longer it is: whether it ends later, and moves the end of the
    // key, must not depend on the clock.
    let commands = [
        "RLOCK.ACQUIRE k alice 30000",
        "RLOCK.ACQUIRE k alice 30000",
        "RLOCK.ACQUIRE k bob 30000 BLOCK 0",
        "RLOCK.RENEW k alice 30000",
        "RLOCK.RELEASE k alice",
        "RLOCK.RELEASE k alice",
        "RLOCK.RELEASE k bob",
        "RLOCK.ACQUIRE k 0b6bdc62-8d5c-4c0e-9d6f-6b8a5c1f2e3d:1234 30000",
        "RLOCK.BREAK k",
        "RLOCK.ACQUIRE r alice 30000 READ",
        "RLOCK.ACQUIRE r bob 35000 READ",
        "RLOCK.ACQUIRE r bob 40000 READ",
        "RLOCK.RENEW r bob 50000 READ",
        "RLOCK.RELEASE r bob READ LEASE 60000",
        "RLOCK.RELEASE r bob READ",
        "RLOCK.RELEASE r alice READ",
        "RLOCK.ACQUIRE r alice 30000 WRITE",
        "RLOCK.ACQUIRE r alice 35000 READ",
        "RLOCK.RELEASE r alice WRITE",
        "RLOCK.ACQUIRE r bob 30000 WRITE BLOCK 0",
        "RLOCK.RELEASE r alice READ",
        "RLOCK.RELEASE r bob WRITE",
        "RLOCK.LIMIT s 3",
        "RLOCK.ACQUIRE s alice 30000 PERMITS 2",
        "RLOCK.ACQUIRE s bob 35000 PERMITS 1",
        "RLOCK.RELEASE s alice PERMITS 1",
        "RLOCK.RELEASE s alice PERMITS 1",
        "RLOCK.RENEW s bob 40000 PERMITS",
        "RLOCK.LIMIT s 0",
        "RLOCK.RELEASE s bob PERMITS 1",
        "RLOCK.MACQUIRE alice 30000 3 a b c",
        "RLOCK.ACQUIRE b bob 30000 BLOCK 0",
        "RLOCK.MRENEW alice 30000 3 a b c",
        "RLOCK.MRELEASE alice 3 a b c",
        "RLOCK.RELEASE b bob",
        "SET k text",
        "DEL k",
    ];
    let [plain, compact] = [false, true].map(|form| heard_at_a_replica(&commands, form));
    assert!(plain.len() > 80, "{plain:?}");
    assert_eq!(plain, compact);
}

/// A primary that says what it is told to say.
struct FalsePrimary {
    stream: TcpStream,
}

impl FalsePrimary {
    /// With this server as its replica, in sync.
    fn of(replica: &Server) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(replica.run(format!("REPLICAOF 127.0.0.1 {port}")), "OK");
        let (mut stream, _) = listener.accept().unwrap();
        let mut heard = Vec::new();
        let mut is_asked = false;
        while !is_asked {
            let mut chunk = [0; 1024];
            let count = stream.read(&mut chunk).unwrap();
            assert!(count > 0, "the replica has gone");
            heard.extend_from_slice(&chunk[..count]);
            while let Some((command, length)) = Reply::decode(&heard) {
                heard.drain(..length);
                is_asked = command.texts()[0].eq_ignore_ascii_case("PSYNC");
                if !is_asked {
                    stream.write_all(b"+OK\r\n").unwrap();
                }
            }
        }
        let id = "0123456789012345678901234567890123456789";
        write!(stream, "+FULLRESYNC {id} 0\r\n").unwrap();
        // A snapshot of nothing, without a checksum.
        let snapshot = b"REDIS0009\xff\0\0\0\0\0\0\0\0";
        write!(stream, "${}\r\n", snapshot.len()).unwrap();
        stream.write_all(snapshot).unwrap();
        Self { stream }
    }

    fn says(&mut self, words: &[&[u8]]) {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend(format!("${}\r\n", word.len()).bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        self.stream.write_all(&bytes).unwrap();
        // What the replica says in turn must not pile up.
        self.stream.set_nonblocking(true).unwrap();
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk) {
            Ok(count) => assert!(count > 0, "the replica has gone"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        self.stream.set_nonblocking(false).unwrap();
    }

    /// Waits until the replica has done all that was said.
    fn settle(&mut self, replica: &Server, mark: &str) {
        self.says(&[b"SET", b"mark", mark.as_bytes()]);
        until("the replica has read it", || {
            replica.run("GET mark") == mark
        });
    }
}

/// A grant to alice, which ends in thirty years.
const GRANT: &[u8] =
    b"\x80\x07alice\x01\x02\x80\xe0\xfc\x8a\xb0\x91\x98\x03\x09\x80\xc0\xa8\xca\x9a\x3a";

#[test]
fn whatever_bytes_a_primary_sends_the_replica_lives_and_changes_nothing_by_nonsense() {
    let replica = Server::builder().config("appendonly yes").start();
    let mut primary = FalsePrimary::of(&replica);
    primary.says(&[b"RLOCK.APPLY", b"lock", GRANT]);
    primary.settle(&replica, "granted");
    assert_eq!(replica.holder("lock").as_deref(), Some("alice"));
    let end = replica.run("PEXPIRETIME lock").int();
    assert!(end > 1_790_000_000_000, "{end}");
    let before = digest_without_mark(&replica);
    // All of a command is looked at first.
    let nonsense: [&[&[u8]]; 6] = [
        &[b"RLOCK.APPLY", b"lock", b""],
        &[b"RLOCK.APPLY", b"lock", b"\xff"],
        &[b"RLOCK.APPLY", b"lock", &GRANT[..12]],
        &[b"RLOCK.APPLY", b"lock", b"\x0a", b"other"],
        &[b"RLOCK.APPLY", b"lock", b"\x0a", b"other", b"\x1e"],
        &[b"RLOCK.APPLY", b"lock", b"\x0a\x0b"],
    ];
    for (number, words) in nonsense.iter().enumerate() {
        primary.says(words);
        primary.settle(&replica, &number.to_string());
        assert_eq!(digest_without_mark(&replica), before, "{words:?}");
        let refused = replica.info_number("rlock_changes_refused");
        assert_eq!(refused, i64::try_from(number).unwrap() + 1, "{words:?}");
    }
    let lines = replica.log();
    let told = lines.matches("RLOCK.APPLY cannot be understood").count();
    assert_eq!(told, nonsense.len(), "one line for each:\n{lines}");
    // A key of another type, as an error of the plain command.
    primary.says(&[b"SET", b"text", b"v"]);
    primary.says(&[b"RLOCK.APPLY", b"text", GRANT]);
    primary.settle(&replica, "of another type");
    assert_eq!(replica.run("GET text"), "v");

    let mut random = Random::new(20_261_123);
    for _ in 0..3000 {
        let mut change = GRANT.to_vec();
        match random.below(3) {
            0 => change.truncate(random.index(change.len())),
            1 => {
                let bytes = 0..random.below(40);
                change = bytes.map(|_| any_byte(&mut random)).collect();
            }
            _ => {
                let place = random.index(change.len());
                change[place] = any_byte(&mut random);
            }
        }
        primary.says(&[b"RLOCK.APPLY", b"any", &change, b"any", GRANT]);
    }
    primary.settle(&replica, "last");
    assert_eq!(replica.run("PING"), "PONG");
    assert_eq!(replica.run("DEBUG LOADAOF"), "OK");
    assert!(replica.info_number("rlock_changes_applied") > 1);
}

/// Of all keys but the one that the primary sets to be waited for.
fn digest_without_mark(server: &Server) -> Vec<String> {
    let mut names = server.run("KEYS *").texts();
    names.retain(|name| name != "mark");
    names.sort();
    let digest = |name: String| {
        server
            .run(format!("DEBUG DIGEST-VALUE {name}"))
            .texts()
            .concat()
    };
    names.into_iter().map(digest).collect()
}

fn any_byte(random: &mut Random) -> u8 {
    u8::try_from(random.below(256)).unwrap()
}

#[test]
fn what_is_no_change_in_the_append_only_file_changes_nothing() {
    let mut server = Server::builder()
        .config("appendonly yes")
        .config("rlock.replicate compact")
        .start();
    server.connect().take("k", "alice");
    server.kill();
    let folder = server.directory().join("appendonlydir");
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    let mut logs = files.filter(|path| path.to_string_lossy().ends_with(".incr.aof"));
    let path = logs.next().unwrap();
    let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
    let nonsense = b"*3\r\n$11\r\nRLOCK.APPLY\r\n$1\r\nk\r\n$2\r\n\x0a\xff\r\n";
    file.write_all(nonsense).unwrap();
    drop(file);
    server.restart();
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
    assert_eq!(server.info_number("rlock_changes_refused"), 1);
    assert_eq!(server.info_number("rlock_changes_applied"), 1);
}

/// A module hears of a new key in the midst of a change. What it does then must not come before
/// what was done before it.
#[test]
fn what_another_module_does_when_a_key_is_made_keeps_its_place() {
    let pair = Pair::of(
        Server::builder().config("rlock.replicate compact"),
        Server::builder(),
    );
    let (primary, replica) = (&pair.primary, &pair.replica);
    primary.load_c_module("meddler");
    let mut conn = primary.connect();
    let mut meddle = |before: &[&str], on: &str, command: &str| {
        for command in before {
            conn.run(*command);
        }
        conn.run(format!("MEDDLER.ON new {on}"));
        conn.run(command);
        in_sync(primary, replica);
        let (ours, theirs) = (digest_without_mark(primary), digest_without_mark(replica));
        assert_eq!(ours, theirs, "{on}: {command}");
        let ends = |server: &Server| server.run("PEXPIRETIME a");
        assert_eq!(ends(primary), ends(replica), "{on}: {command}");
        conn.run("FLUSHALL");
    };
    meddle(&[], "b 0 DEL a", "RLOCK.MACQUIRE o 600000 2 a b");
    meddle(&[], "b 0 EXPIRE a 5", "RLOCK.MACQUIRE o 600000 2 a b");
    let reads = ["RLOCK.ACQUIRE l o 600000 READ"; 2];
    let timeout = "{l}:o:rwlock_timeout";
    let deletes = format!("{timeout}:3 0 DEL {timeout}:2");
    meddle(&reads, &deletes, "RLOCK.ACQUIRE l o 700000 READ");
    let waits = ["RLOCK.ACQUIRE k o1 600000", "RLOCK.EVENTS s GRACE 60000"];
    let waits = [&waits[..], &["RLOCK.ACQUIRE k o2 600000 QUEUE 0 SESSION s"]].concat();
    meddle(&waits, "k 0 HSET k created 1", "RLOCK.RELEASE k o1");
    assert_eq!(primary.run("MEDDLER.DONE"), Reply::Int(4));
}

/// A replica that lacks the module has none of the locks, and says so in its log and in INFO.
#[test]
fn a_replica_without_the_module_has_no_lock_and_counts_errors() {
    let replica = Server::builder().without_module().start();
    let primary = Server::builder().config("rlock.replicate compact").start();
    primary.connect().take("before", "alice");
    replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    until("the replica has the snapshot", || {
        replica.holder("before").is_some()
    });
    let mut conn = primary.connect();
    conn.take("k", "alice");
    conn.run("RLOCK.ACQUIRE k alice 30000").held();
    conn.run("RLOCK.RELEASE k alice").int();
    in_sync(&primary, &replica);
    // Not even one without an end, as from a lone HSET.
    assert_eq!(replica.run("KEYS *").texts(), ["before"]);
    let log = replica.log().to_lowercase();
    assert!(log.contains("unknown command 'rlock.apply'"), "{log}");
    assert_eq!(replica.info_number("unexpected_error_replies"), 3);
    // It gets the module, and all of it with the next sync.
    assert_eq!(replica.run("REPLICAOF NO ONE"), "OK");
    let module = rlock_tests::module_path().display().to_string();
    assert_eq!(replica.connect().cmd(&["MODULE", "LOAD", &module]), "OK");
    replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    until("the replica has it", || replica.holder("k").is_some());
    conn.let_go("k", "alice");
    until("the replica knows", || replica.holder("k").is_none());
}

#[test]
fn a_change_of_the_setting_takes_effect_with_the_next_command() {
    // Each command is in the file at once: beside a sync of a busy disk it may be later.
    let server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync no")
        .start();
    let mut conn = server.connect();
    let grows = |conn: &mut Conn, form: &str, name: &str| {
        conn.run(format!("CONFIG SET rlock.replicate {form}"));
        let before = server.info_number("aof_current_size");
        conn.take(name, "alice");
        server.info_number("aof_current_size") - before
    };
    // The first writes the number of the database as well.
    conn.take("first", "alice");
    let plain = grows(&mut conn, "plain", "k1");
    let compact = grows(&mut conn, "compact", "k2");
    assert!(compact * 2 < plain, "{compact}, {plain}");
    assert_eq!(server.info_number("rlock_replicate_compact"), 1);
    assert_eq!(grows(&mut conn, "plain", "k3"), plain);
    // Within a transaction, too.
    let in_both = [
        "MULTI",
        "RLOCK.ACQUIRE k4 alice 30000",
        "CONFIG SET rlock.replicate compact",
        "RLOCK.ACQUIRE k5 alice 30000",
        "EXEC",
    ];
    let replies = conn.pipeline(&in_both);
    assert!(replies.iter().all(|reply| !Reply::is_error(reply)));
    assert_eq!(conn.run("DEBUG LOADAOF"), "OK");
    for name in ["k1", "k2", "k3", "k4", "k5"] {
        assert_eq!(server.holder(name).as_deref(), Some("alice"), "{name}");
    }
}
