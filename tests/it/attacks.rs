//! Findings of attacks on the core's loop: the name of each function is the rule that must hold.

use std::thread::sleep;
use std::time::{Duration, Instant};

use rlock_tests::{Cluster, Conn, Reply, Server, Version, slot_of, until};

// --- Other modules, in the midst of our commands -------------------------------------------------

/// A server with a module that answers an event of a key with a command, and without an active
/// expiry, so that keys expire where our command opens them.
fn with_meddler() -> Server {
    let server = Server::start();
    server.load_c_module("meddler");
    server.run("DEBUG SET-ACTIVE-EXPIRE 0");
    server
}

/// The reply to the caller and the stored state must agree.
fn assert_one_truth(server: &Server, conn: &mut Conn, command: &str) {
    assert_one_truth_of(server, conn, command, "bob");
}

fn assert_one_truth_of(server: &Server, conn: &mut Conn, command: &str, field: &str) {
    let reply = conn.try_run(command);
    assert!(server.is_running() && reply.is_ok(), "{command}: {reply:?}");
    assert!(server.run("MEDDLER.DONE").int() > 0, "nobody meddled");
    let reply = reply.unwrap();
    let is_told = matches!(&reply, Reply::Array(items) if items[0] == Reply::Int(1));
    let is_stored = server.run(format!("HEXISTS k {field}")) == Reply::Int(1);
    assert_eq!(
        is_told, is_stored,
        "what was told and what is stored: {reply:?}"
    );
}

#[test]
fn a_module_may_write_a_string_when_the_lock_that_is_acquired_expires() {
    let server = with_meddler();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 5").held();
    sleep(Duration::from_millis(20));
    conn.run("MEDDLER.ON expired k 0 SET k value").int();
    assert_one_truth(&server, &mut conn, "RLOCK.ACQUIRE k bob 30000");
}

#[test]
fn a_script_like_holder_may_come_in_when_the_lock_that_is_acquired_expires() {
    let server = with_meddler();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 5").held();
    sleep(Duration::from_millis(20));
    conn.run("MEDDLER.ON expired k 0 HSET k carol 1").int();
    assert_one_truth(&server, &mut conn, "RLOCK.ACQUIRE k bob 30000");
}

#[test]
fn a_module_may_delete_the_lock_when_a_readers_timeout_key_expires() {
    let server = with_meddler();
    let mut conn = server.connect();
    let commands = [
        "RLOCK.RENEW k bob 60000 READ",
        "RLOCK.RELEASE k bob READ",
        "RLOCK.ACQUIRE k carol 5 WRITE",
        "RLOCK.INFO k",
    ];
    for command in commands {
        for meddling in ["DEL k", "UNLINK k", "SET k value"] {
            conn.run("FLUSHALL");
            conn.run("RLOCK.ACQUIRE k bob 3600000 READ").held();
            conn.run("RLOCK.ACQUIRE k bob 3600000 READ").held();
            for reader in 0..20 {
                conn.run(format!("RLOCK.ACQUIRE k r{reader} 3600000 READ"))
                    .held();
            }
            conn.run("PEXPIRE {k}:bob:rwlock_timeout:1 5");
            sleep(Duration::from_millis(20));
            let meddler = format!("MEDDLER.ON expired timeout 0 {meddling}");
            let before = conn.run(meddler).int();
            let reply = conn.try_run(command);
            assert!(reply.is_ok(), "{command}, {meddling}: the server is gone");
            // Where a look at a key lets it expire: on servers from before 7.2.
            let is_done = server.run("MEDDLER.DONE").int() > before;
            let kind = server.run("TYPE k").text();
            let must_be = match &meddling[..3] {
                _ if !is_done => "hash",
                "SET" => "string",
                _ => "none",
            };
            assert_eq!(kind, must_be, "{command}, {meddling}: {reply:?}");
        }
    }
}

#[test]
fn a_module_may_delete_the_lock_when_a_timeout_key_that_is_written_anew_expires() {
    let server = with_meddler();
    let mut conn = server.connect();
    for meddling in ["DEL k", "UNLINK k", "SET k value", "HSET k carol 1"] {
        conn.run("FLUSHALL");
        conn.run("SET {k}:alice:rwlock_timeout:1 1 PX 5");
        sleep(Duration::from_millis(20));
        let done = conn
            .run(format!("MEDDLER.ON expired timeout 0 {meddling}"))
            .int();
        let reply = conn.try_run("RLOCK.ACQUIRE k alice 60000 READ");
        assert!(reply.is_ok(), "{meddling}: the server is gone");
        assert_eq!(server.run("MEDDLER.DONE").int(), done + 1, "{meddling}");
        // As if the other module had done it right after the command.
        let kind = server.run("TYPE k").text();
        let must_be = match &meddling[..4] {
            "SET " => "string",
            "HSET" => "hash",
            _ => "none",
        };
        assert_eq!(kind, must_be, "{meddling}: {reply:?}");
    }
}

#[test]
fn a_module_may_delete_one_of_several_locks_when_anothers_timeout_key_expires() {
    let server = with_meddler();
    let mut conn = server.connect();
    for meddling in ["DEL j", "UNLINK j"] {
        conn.run("FLUSHALL");
        conn.take("j", "bob");
        conn.run("RLOCK.ACQUIRE k dead 3600000 READ").held();
        conn.run("PEXPIRE {k}:dead:rwlock_timeout:1 5");
        sleep(Duration::from_millis(20));
        conn.run(format!("MEDDLER.ON expired timeout 0 {meddling}"))
            .int();
        conn.run("RLOCK.MACQUIRE bob 60000 2 j k").held();
        for lock in ["j", "k"] {
            let is_stored = server.run(format!("HEXISTS {lock} bob")).int();
            assert_eq!(is_stored, 1, "{lock}, {meddling}");
        }
    }
}

#[test]
fn nobody_comes_in_between_a_readers_field_and_its_timeout_key() {
    let server = with_meddler();
    let mut conn = server.connect();
    for mode in ["READ", "WRITE"] {
        conn.run("FLUSHALL");
        conn.run("SET {k}:alice:rwlock_timeout:1 1 PX 5");
        sleep(Duration::from_millis(20));
        conn.run(format!(
            "MEDDLER.ON expired timeout 0 RLOCK.ACQUIRE k bob 60000 {mode}"
        ))
        .int();
        assert_one_truth_of(
            &server,
            &mut conn,
            "RLOCK.ACQUIRE k alice 60000 READ",
            "alice",
        );
        assert_eq!(server.run("HEXISTS k bob:write").int(), 0, "{mode}");
    }
}

#[test]
fn a_command_within_anothers_turn_acts_in_its_own_database() {
    let server = with_meddler();
    let mut conn = server.connect();
    let _life = server.session_connection("s");
    conn.run("RLOCK.ACQUIRE k writer 60000 WRITE").held();
    for reader in ["r1", "r2", "r3"] {
        conn.run(format!(
            "RLOCK.ACQUIRE k {reader} 60000 READ QUEUE 0 SESSION s"
        ))
        .queued();
    }
    conn.run("MEDDLER.ON hset k 1 RLOCK.ACQUIRE other zoe 60000")
        .int();
    conn.run("RLOCK.RELEASE k writer WRITE").int();
    assert_eq!(conn.run("EXISTS other").int(), 0, "in database 0");
    conn.run("SELECT 1");
    assert_eq!(conn.run("EXISTS other").int(), 1, "in database 1");
}

/// How a module gets rid of the waiter whose grant is being written: of its client, or of all.
const RIDS: [&str; 4] = [
    "CLIENT KILL ID {id}",
    "CLIENT UNBLOCK {id}",
    "CLIENT UNBLOCK {id} ERROR",
    "REPLICAOF 127.0.0.1 1",
];

/// Without the mend each of these unblocks the client a second time, and the server dies of it or
/// leaves the lock with nobody.
#[test]
fn a_waiter_that_is_gotten_rid_of_within_the_event_of_its_grant_leaves_the_lock_to_the_next() {
    let kinds = [
        ("RLOCK.ACQUIRE k", ""),
        ("RLOCK.ACQUIRE k", "WRITE"),
        ("RLOCK.ACQUIRE k", "PERMITS 1 OF 1"),
        ("RLOCK.MACQUIRE", ""),
    ];
    let command = |(verb, mode): (&str, &str), owner: &str| {
        if verb == "RLOCK.MACQUIRE" {
            format!("{verb} {owner} 30000 2 k k2")
        } else {
            format!("{verb} {owner} 30000 {mode}")
        }
    };
    let server = with_meddler();
    for kind in kinds {
        for event in ["del", "hset", "expire"] {
            for rid in RIDS {
                let what = format!("{kind:?}, {event}, {rid}");
                let mut conn = server.connect();
                conn.run(command(kind, "alice")).held();
                let mut bob = server.connect();
                let rid = rid.replace("{id}", &bob.id().to_string());
                bob.send(format!("{} BLOCK 0", command(kind, "bob")));
                until("bob waits", || server.waiting_owners("k") == ["bob"]);
                let mut carol = server.blocked_in(&format!("{} BLOCK 0", command(kind, "carol")));
                let before = conn.run(format!("MEDDLER.ON {event} k 0 {rid}")).int();
                let release = match kind {
                    ("RLOCK.MACQUIRE", _) => "RLOCK.MRELEASE alice 2 k k2",
                    (_, "WRITE") => "RLOCK.RELEASE k alice WRITE",
                    (_, "") => "RLOCK.RELEASE k alice",
                    (..) => "RLOCK.RELEASE k alice PERMITS 1",
                };
                let told = conn.try_run(release);
                assert!(server.is_running() && told.is_ok(), "{what}: {told:?}");
                if conn.run("MEDDLER.DONE").int() == before {
                    // A grant of permits into a hash that stays emits no `del`, for example.
                    conn.run("MEDDLER.ON none k 0 PING").int();
                    bob.read().held();
                } else if rid.starts_with("REPLICAOF") {
                    assert_eq!(conn.run("REPLICAOF NO ONE"), "OK");
                    assert!(server.is_running(), "{what}");
                } else {
                    // On Redis 7.0 a client may not be unblocked, and bob keeps his grant.
                    let told = bob.try_read(Duration::from_secs(10));
                    if !matches!(&told, Ok(Reply::Array(told)) if told[0] == Reply::Int(1)) {
                        carol.read().held();
                    }
                }
                assert!(server.is_running(), "{what}");
                bob.close();
                carol.close();
                until("nobody waits", || server.info_number("rlock_waiters") == 0);
                conn.run("FLUSHALL");
            }
        }
    }
}

/// The same of a client that is told that it has waited in vain, and of one that waits for events.
#[test]
fn a_client_that_is_gotten_rid_of_within_an_event_is_told_nothing() {
    let server = with_meddler();
    for rid in &RIDS[..3] {
        let mut conn = server.connect();
        conn.run("RLOCK.LIMIT k 1").int();
        conn.run("RLOCK.ACQUIRE k alice 30000 PERMITS 1").held();
        let mut bob = server.connect();
        let rid_of = |id: i64| rid.replace("{id}", &id.to_string());
        let of_bob = rid_of(bob.id());
        bob.send("RLOCK.ACQUIRE k bob 30000 PERMITS 1 BLOCK 0");
        until("bob waits", || server.waiting_owners("k") == ["bob"]);
        conn.run(format!("MEDDLER.ON del limit 0 {of_bob}")).int();
        conn.run("RLOCK.LIMIT k 0").int();
        until("bob does not wait", || {
            server.info_number("rlock_waiters") == 0
        });

        conn.run("FLUSHALL");
        conn.run("RLOCK.ACQUIRE k alice 30000").held();
        let mut life = server.session_connection("s");
        let of_life = rid_of(life.id());
        conn.queue("k", "bob", "s");
        life.send("RLOCK.EVENTS s BLOCK 0");
        until("somebody listens", || {
            server.info_number("blocked_clients") == 1
        });
        conn.run(format!("MEDDLER.ON expire k 0 {of_life}")).int();
        let told = conn.try_run("RLOCK.RELEASE k alice");
        assert!(server.is_running() && told.is_ok(), "{rid}: {told:?}");
        life.close();
        until("the session's grant has ended", || {
            conn.run("EXISTS k") == 0 && server.info_number("rlock_sessions") == 0
        });
        assert!(server.is_running(), "{rid}");
        bob.close();
    }
}

// --- Bounds --------------------------------------------------------------------------------------

#[test]
fn a_session_whose_listener_was_unblocked_with_an_error_is_bounded() {
    if !Version::at_hand().can_unblock_waiters() {
        return;
    }
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("CONFIG SET rlock.max-events-per-session 100");
    let mut life = server.session_connection("s");
    let id = life.id();
    life.send("RLOCK.EVENTS s BLOCK 0");
    life.expect_nothing_yet();
    assert_eq!(conn.run(format!("CLIENT UNBLOCK {id} ERROR")).int(), 1);
    life.read().error();
    conn.take("k", "alice");
    let waits: Vec<String> = (0..2000)
        .map(|n| format!("RLOCK.ACQUIRE k o{n} 30000 QUEUE 1 SESSION s"))
        .collect();
    conn.pipeline(&waits);
    until("nobody waits", || server.info_number("rlock_waiters") == 0);
    sleep(Duration::from_millis(50));
    let unacknowledged = server.info_number("rlock_unacknowledged_events");
    assert!(
        unacknowledged <= 101,
        "{unacknowledged} unacknowledged events"
    );
}

/// On a busy machine. Each of these once took several seconds.
const STALL_MAX: Duration = Duration::from_secs(1);

/// The longest time in which the server answered nobody, until `done`.
fn longest_stall(server: &Server, mut done: impl FnMut(&mut Conn) -> bool) -> Duration {
    let mut conn = server.connect();
    let mut longest = Duration::ZERO;
    loop {
        let asked = Instant::now();
        let is_done = done(&mut conn);
        longest = longest.max(asked.elapsed());
        if is_done {
            return longest;
        }
    }
}

/// A session that reads one lock as many owners, each with a shorter lease than the one before.
fn many_reads(server: &Server, reads: usize) -> Conn {
    let life = server.session_connection("s");
    let acquires: Vec<String> = (0..reads)
        .map(|n| {
            let lease = 3_600_000 + 1000 * (reads - n);
            format!("RLOCK.ACQUIRE k o{n} {lease} READ SESSION s")
        })
        .collect();
    server.connect().pipeline(&acquires);
    life
}

#[test]
fn the_end_of_a_session_with_many_reads_of_a_lock_does_not_keep_the_server_busy() {
    let server = Server::start();
    let life = many_reads(&server, 4000);
    life.close();
    let stall = longest_stall(&server, |conn| conn.run("EXISTS k").int() == 0);
    assert!(stall < STALL_MAX, "{stall:?}");
}

#[test]
fn a_command_does_not_pay_for_all_that_ends_at_its_lock() {
    let server = Server::start();
    let mut life = many_reads(&server, 4000);
    let id = life.id();
    let mut conn = server.connect();
    let (kill, acquire) = (
        format!("CLIENT KILL ID {id}"),
        "RLOCK.ACQUIRE k bob 1000".to_owned(),
    );
    let begun = Instant::now();
    conn.pipeline(&["MULTI".to_owned(), kill, acquire, "EXEC".to_owned()]);
    let taken = begun.elapsed();
    assert!(taken < STALL_MAX, "{taken:?}");
}

#[test]
fn waits_that_end_together_do_not_keep_the_server_busy() {
    let server = Server::start();
    let mut conn = server.connect();
    let _life = server.session_connection("s");
    let reads: Vec<String> = (0..3000)
        .map(|n| format!("RLOCK.ACQUIRE k dead{n} 4000 READ"))
        .collect();
    conn.pipeline(&reads);
    conn.run("RLOCK.ACQUIRE k alive 3600000 READ").held();
    sleep(Duration::from_millis(4100));
    let begun = Instant::now();
    for n in 0..1000 {
        let left = Duration::from_secs(20).saturating_sub(begun.elapsed());
        let left = left.as_millis().max(1);
        conn.run(format!(
            "RLOCK.ACQUIRE k w{n} 1000 WRITE QUEUE {left} SESSION s"
        ))
        .queued();
    }
    let is_done = |_: &mut Conn| server.info_number("rlock_waiters") == 0;
    let stall = longest_stall(&server, is_done);
    assert!(stall < STALL_MAX, "{stall:?}");
}

#[test]
fn the_search_for_a_deadlock_does_not_keep_the_server_busy() {
    let server = Server::start();
    let mut conn = server.connect();
    let _life = server.session_connection("s");
    let names: Vec<String> = (0..1024).map(|n| format!("k{n}")).collect();
    let names = names.join(" ");
    conn.run(format!("RLOCK.MACQUIRE alice 3600000 1024 {names}"))
        .held();
    let waits: Vec<Reply> = (0..120)
        .map(|n| format!("RLOCK.MACQUIRE m{n} 60000 1024 {names} QUEUE 0 SESSION s"))
        .map(|wait| conn.run(wait))
        .collect();
    waits[0].queued();
    // Before the last of these there is too much to be looked at.
    let last = waits[119].error();
    assert!(last.starts_with("QUEUEFULL"), "{last}");
    let begun = Instant::now();
    conn.run("RLOCK.ACQUIRE k0 bob 60000 QUEUE 0 SESSION s");
    let taken = begun.elapsed();
    assert!(taken < STALL_MAX, "{taken:?}");
}

// --- Free, and nobody is let in ------------------------------------------------------------------

#[test]
fn the_last_readers_release_lets_a_writer_in_beside_a_reader_whose_timeout_key_was_evicted() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k dead 3600000 READ").held();
    conn.run("RLOCK.ACQUIRE k alice 60000 READ").held();
    assert_eq!(conn.run("DEL {k}:dead:rwlock_timeout:1").int(), 1);
    let mut writer = server.blocked_in("RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 0");
    conn.run("RLOCK.RELEASE k alice READ").int();
    assert_eq!(conn.run("HEXISTS k bob:write").int(), 1, "in the same step");
    writer.read().held();
    conn.run("FLUSHALL");
    conn.run("RLOCK.ACQUIRE k dead 3600000 READ").held();
    conn.run("RLOCK.ACQUIRE k alice 60000 READ").held();
    assert_eq!(conn.run("DEL {k}:dead:rwlock_timeout:1").int(), 1);
    conn.run("RLOCK.RELEASE k alice READ").int();
    assert_eq!(
        conn.run("EXISTS k").int(),
        0,
        "Redisson waits for the TTL of what is left"
    );
}

#[test]
fn a_writer_comes_in_although_fifty_thousand_readers_never_released() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 600000 READ").held();
    // The rest of readers that never released: a field, and no timeout key.
    let dead: Vec<String> = (0..50_500).map(|n| format!("HSET k dead{n} 1")).collect();
    for some in dead.chunks(1000) {
        conn.pipeline(some);
    }
    let mut writer = server.blocked_in("RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 0");
    conn.run("RLOCK.RELEASE k alice READ").int();
    writer.read_within(Duration::from_secs(3)).held();
}

// --- Deadlocks that are none ---------------------------------------------------------------------

#[test]
fn a_hold_that_is_about_to_end_with_its_session_closes_no_circle() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut dying = server.session_connection("dying");
    let _life = server.session_connection("s");
    conn.take_for("a", "alice", "dying");
    conn.take("b", "bob");
    conn.queue("a", "bob", "s");
    let kill = format!("CLIENT KILL ID {}", dying.id());
    let wait = "RLOCK.ACQUIRE b alice 30000 QUEUE 0 SESSION s".to_owned();
    let replies = conn.pipeline(&["MULTI".to_owned(), kill, wait, "EXEC".to_owned()]);
    // It is too early to tell, and a moment later there is no circle.
    let told = &replies[3].array()[1];
    assert!(told.error().starts_with("TRYAGAIN "), "{told:?}");
    until("the hold has ended", || {
        conn.run("HEXISTS a bob").int() == 1
    });
    conn.queue("b", "alice", "s");
}

// --- What a dead process leaves behind -----------------------------------------------------------

#[test]
fn a_session_that_ends_while_its_slot_is_on_its_way_leaves_no_hold_if_the_slot_stays() {
    let cluster = Cluster::start();
    let server = &cluster.first;
    let mut conn = server.connect();
    for mode in ["READ", "WRITE"] {
        let life = server.session_connection("s");
        conn.run(format!("RLOCK.ACQUIRE k alice 3600000 {mode} SESSION s"))
            .held();
        cluster.open_slot_of("k");
        life.close();
        until("the session is over", || {
            server.info_number("rlock_sessions") == 0
        });
        sleep(Duration::from_millis(100));
        let slot = slot_of(server, "k");
        for node in [&cluster.first, &cluster.second] {
            node.run(format!("CLUSTER SETSLOT {slot} STABLE"));
        }
        sleep(Duration::from_millis(2500));
        assert_eq!(
            conn.run("EXISTS k").int(),
            0,
            "{mode}: held for an hour by nobody"
        );
    }
}

// --- What was found by the second attack ---------------------------------------------------------

#[test]
fn a_plain_acquire_does_not_take_a_read_write_lock_whose_slot_is_on_its_way() {
    let cluster = Cluster::start();
    let server = &cluster.first;
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k r1 600000 READ").held();
    cluster.open_slot_of("k");
    let (to, key) = (cluster.second.port(), "{k}:r1:rwlock_timeout:1");
    let moved = conn.run(format!("MIGRATE 127.0.0.1 {to} {key} 0 5000"));
    assert_eq!(moved, "OK");
    for command in [
        "RLOCK.ACQUIRE k p1 600000",
        "RLOCK.MACQUIRE p1 600000 1 k",
        "RLOCK.MRELEASE p1 1 k",
    ] {
        let reply = conn.run(command);
        assert!(
            reply.error().starts_with("TRYAGAIN"),
            "{command}: {reply:?}"
        );
    }
    assert_eq!(conn.run("HEXISTS k r1").int(), 1, "r1 reads");
    assert_eq!(conn.run("RLOCK.CANCEL k p1").int(), 0);
}

#[test]
fn a_queue_is_served_although_others_holds_are_touched_again_and_again() {
    let server = Server::start();
    let _life = many_reads(&server, 5000);
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE v holder 500").held();
    let mut waiter = server.blocked_in("RLOCK.ACQUIRE v next 60000 BLOCK 0");
    let begun = Instant::now();
    while server.run("HEXISTS v next").int() == 0 {
        // Each marks all the holds of the session.
        let touches: Vec<String> = (0..20).map(|n| format!("EXPIRE k {}", 9000 + n)).collect();
        conn.pipeline(&touches);
        assert!(begun.elapsed() < Duration::from_secs(20), "it waits still");
    }
    waiter.read().held();
}

/// Read-write locks, each with a field that claims as many timeout keys as one decision looks at.
fn claiming_locks(conn: &mut Conn, number: usize) -> String {
    let names: Vec<String> = (0..number).map(|n| format!("claim{n}")).collect();
    let claims: Vec<String> = names
        .iter()
        .map(|name| format!("HSET {name} mode read ghost 50000"))
        .collect();
    conn.pipeline(&claims);
    names.join(" ")
}

#[test]
fn one_decision_looks_at_a_bounded_number_of_timeout_keys_at_all_its_locks() {
    let server = Server::start();
    let mut conn = server.connect();
    let names = claiming_locks(&mut conn, 100);
    for command in [
        format!("RLOCK.MACQUIRE me 1000 100 {names}"),
        format!("RLOCK.MRELEASE me 100 {names}"),
        format!("RLOCK.MRENEW me 1000 100 {names}"),
    ] {
        let begun = Instant::now();
        conn.run(&command).error();
        let taken = begun.elapsed();
        assert!(taken < 3 * STALL_MAX, "{taken:?}");
    }
}

#[test]
fn the_search_for_a_deadlock_looks_at_a_bounded_number_of_timeout_keys() {
    let server = Server::start();
    let mut conn = server.connect();
    let _life = server.session_connection("s");
    conn.take("first", "holder");
    conn.queue("first", "x", "s");
    for n in 0..50 {
        conn.run(format!("RLOCK.ACQUIRE claim{n} reader 600000 READ"))
            .held();
        conn.run(format!(
            "RLOCK.ACQUIRE claim{n} x 60000 WRITE QUEUE 0 SESSION s"
        ));
    }
    claiming_locks(&mut conn, 50);
    let begun = Instant::now();
    let refused = conn.run("RLOCK.ACQUIRE first y 60000 QUEUE 0 SESSION s");
    let taken = begun.elapsed();
    assert!(refused.error().starts_with("QUEUEFULL"), "{refused:?}");
    assert!(taken < 3 * STALL_MAX, "{taken:?}");
}

#[test]
fn a_renewal_of_an_older_hold_confirms_no_grant_of_several() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("a", "o");
    conn.take("b", "other");
    let mut waiter = server.connect();
    let id = waiter.id();
    waiter.send("RLOCK.MACQUIRE o 30000 2 a b BLOCK 0");
    until("it waits", || server.info_number("rlock_waiters") > 0);
    conn.pipeline(&[
        "RLOCK.RELEASE b other".to_owned(),
        "RLOCK.RENEW a o 30000".to_owned(),
        format!("CLIENT KILL ID {id}"),
    ]);
    until("what was granted is given back", || {
        server.run("EXISTS b").int() == 0
    });
    assert_eq!(conn.run("HGET a o").text(), "1");
}

#[test]
fn what_one_was_told_of_several_stays_and_the_rest_is_given_back() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("b", "other");
    let mut waiter = server.connect();
    let id = waiter.id();
    waiter.send("RLOCK.MACQUIRE o 30000 2 a b BLOCK 0");
    until("it waits", || server.info_number("rlock_waiters") > 0);
    let replies = conn.pipeline(&[
        "RLOCK.RELEASE b other".to_owned(),
        "RLOCK.ACQUIRE a o 30000 ONCE".to_owned(),
        format!("CLIENT KILL ID {id}"),
    ]);
    replies[1].held();
    until("the rest is given back", || {
        server.run("EXISTS b").int() == 0
    });
    assert_eq!(conn.run("HGET a o").text(), "1");
}

#[test]
fn a_session_whose_holds_a_demotion_forgot_is_told_to_confirm_them() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    let (began, _) = life.run("RLOCK.EVENTS s").told();
    conn.take_for("k", "alice", "s");
    assert_eq!(conn.run("REPLICAOF 127.0.0.1 1"), "OK");
    assert_eq!(conn.run("REPLICAOF NO ONE"), "OK");
    let error = conn.run("RLOCK.RENEW k alice 30000 SESSION s").error();
    assert!(error.starts_with("NOSESSION"), "{error}");
    let (life_now, events) = life.run("RLOCK.EVENTS s BLOCK 0").told();
    assert!(
        life_now > began && events.is_empty(),
        "{life_now} {events:?}"
    );
    conn.run("RLOCK.RENEW k alice 30000 SESSION s").int();
    conn.run("RLOCK.BREAK k").int();
    assert_eq!(
        life.run("RLOCK.EVENTS s").events().len(),
        1,
        "it is told again"
    );
}

#[test]
fn sessions_with_nothing_end_with_their_connection_whatever_their_grace() {
    let server = Server::start();
    let mut conn = server.connect();
    let sessions: Vec<String> = (0..100)
        .map(|n| format!("RLOCK.EVENTS z{n} GRACE 3600000"))
        .collect();
    conn.pipeline(&sessions);
    assert_eq!(server.info_number("rlock_sessions"), 100);
    conn.close();
    until("they are over", || {
        server.info_number("rlock_sessions") == 0
    });
}

#[test]
fn a_listener_that_was_woken_and_unblocked_with_an_error_leaves_a_bounded_session() {
    if !Version::at_hand().can_unblock_waiters() {
        return;
    }
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("CONFIG SET rlock.max-events-per-session 100");
    conn.take("k", "alice");
    let mut life = server.session_connection("s");
    let id = life.id();
    conn.queue("k", "bob", "s");
    life.send("RLOCK.EVENTS s BLOCK 0");
    life.expect_nothing_yet();
    conn.pipeline(&[
        "RLOCK.BREAK k".to_owned(),
        format!("CLIENT UNBLOCK {id} ERROR"),
    ]);
    let waits: Vec<String> = (0..2000)
        .map(|n| format!("RLOCK.ACQUIRE k o{n} 30000 QUEUE 1 SESSION s"))
        .collect();
    conn.pipeline(&waits);
    until("nobody waits", || server.info_number("rlock_waiters") == 0);
    until("they are bounded", || {
        server.info_number("rlock_unacknowledged_events") <= 101
    });
}
