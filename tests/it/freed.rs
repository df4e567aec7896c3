//! The ways in which a lock becomes free without RLOCK.RELEASE: the next waiter is granted
//! without doing anything.

use std::time::{Duration, Instant, SystemTime};

use rlock_tests::{Cluster, Conn, Feed, Pair, Reply, Server, on_time, slot_of, until};

/// Alice holds `k`, bob waits for it.
fn held_with_a_waiter(server: &Server) -> (Conn, Conn) {
    let mut alice = server.connect();
    alice.take("k", "alice");
    let bob = server.wait_in_queue("k", "bob");
    (alice, bob)
}

/// Bob is granted as soon as `commands` have been run, and holds a lock as if he had taken it.
#[track_caller]
fn bob_gets_it_by(server: &Server, commands: &[&str]) {
    bob_gets_it(server, commands, Conn::read_promptly);
}

/// Bob is granted when the TTL of 50 ms is over that `commands` have set; long before the module
/// would have looked without an event.
#[track_caller]
fn bob_gets_it_50_ms_after(server: &Server, commands: &[&str]) {
    let what = commands.join(", ");
    on_time(&what, server, Duration::from_millis(10), |_| {
        let mut waited = Duration::ZERO;
        bob_gets_it(server, commands, |bob| {
            let set = Instant::now();
            let told = bob.read();
            waited = set.elapsed();
            told
        });
        waited.saturating_sub(Duration::from_millis(50))
    });
}

#[track_caller]
fn bob_gets_it(server: &Server, commands: &[&str], told: impl FnOnce(&mut Conn) -> Reply) {
    let (mut alice, mut bob) = held_with_a_waiter(server);
    for reply in alice.pipeline(commands) {
        assert!(!reply.is_error(), "{commands:?}: {reply:?}");
    }
    let (count, token) = told(&mut bob).held();
    assert_eq!(count, 1, "{commands:?}");
    assert_eq!(server.holder("k").as_deref(), Some("bob"), "{commands:?}");
    assert_eq!(server.run("HGET k fence"), format!("t{token}"));
    assert!(server.run("PTTL k").int() > 20_000, "{commands:?}");
    assert_eq!(
        server.run("RLOCK.RENEW k alice 1000"),
        0,
        "alice has lost it"
    );
    assert_eq!(bob.let_go("k", "bob"), 0);
}

/// Bob still waits after `commands`, and gets it when `then` has been run as well.
#[track_caller]
fn bob_stays_in_queue_after(server: &Server, commands: &[&str], then: &str) {
    let (mut alice, mut bob) = held_with_a_waiter(server);
    for reply in alice.pipeline(commands) {
        assert!(!reply.is_error(), "{commands:?}: {reply:?}");
    }
    bob.expect_nothing_yet();
    assert_eq!(server.waiting_owners("k"), ["bob"], "{commands:?}");
    assert!(!alice.run(then).is_error());
    bob.read().held();
}

/// How late after the lease's end the waiter knows of its grant, for several leases.
fn delay_after_lease_end(server: &Server, round: u32) -> Duration {
    let mut alice = server.connect();
    let name = format!("k{round}");
    alice.take(&name, "alice");
    let mut bob = server.wait_in_queue(&name, "bob");
    let lease = format!("RLOCK.RENEW {name} alice {}", 40 + round);
    // In one step: on a busy machine the lease might be over in between.
    let step = ["MULTI", &lease, &format!("PEXPIRETIME {name}"), "EXEC"];
    let end = alice.pipeline(&step)[3].ints()[1];
    bob.read().held();
    let end = SystemTime::UNIX_EPOCH + Duration::from_millis(end.try_into().unwrap());
    SystemTime::now()
        .duration_since(end)
        .expect("not granted before the end")
}

#[test]
fn a_lease_that_ends_is_handed_over_within_ten_milliseconds() {
    let server = Server::start();
    on_time("the grant", &server, Duration::from_millis(10), |round| {
        delay_after_lease_end(&server, round)
    });
}

/// The server's own expiry takes seconds to find one key among these.
#[test]
fn a_lease_that_ends_among_many_other_keys_is_handed_over_within_ten_milliseconds() {
    let server = Server::start();
    let fill = "for i = 1, 200000 do
        redis.call('SET', 'other:' .. i, 'v', 'PX', 1000 + (i % 60) * 1000) end";
    server.connect().cmd(&["EVAL", fill, "0"]);
    on_time("the grant", &server, Duration::from_millis(10), |round| {
        delay_after_lease_end(&server, round)
    });
}

#[test]
fn a_lease_that_ends_is_handed_over_without_the_servers_own_expiry() {
    let server = Server::start();
    server.run("DEBUG SET-ACTIVE-EXPIRE 0");
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    alice.run("RLOCK.RENEW k alice 50");
    bob.read().held();
    assert!(
        server.run("PTTL k").int() > 20_000,
        "bob's lease starts at the grant"
    );
}

#[test]
fn a_renewed_lease_ends_when_the_renewal_says() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let begun = Instant::now();
    alice.pipeline(&["RLOCK.RENEW k alice 50", "RLOCK.RENEW k alice 300"]);
    bob.read().held();
    assert!(begun.elapsed() >= Duration::from_millis(300));
}

#[test]
fn del_and_unlink() {
    let server = Server::start();
    bob_gets_it_by(&server, &["DEL k"]);
    bob_gets_it_by(&server, &["UNLINK k"]);
    bob_gets_it_by(&server, &["MULTI", "DEL k", "EXEC"]);
    bob_gets_it_by(&server, &["HDEL k alice fence"]);
}

#[test]
fn a_hash_emptied_of_its_holder() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    // No event tells that only `fence` is left; at the latest the end of the lease does.
    let replies = alice.pipeline(&["MULTI", "PEXPIRE k 300", "HDEL k alice", "EXEC"]);
    assert_eq!(replies[3].ints(), [1, 1]);
    bob.read().held();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
}

#[test]
fn a_scripts_del() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let script = "redis.call('DEL', KEYS[1]) return redis.call('EXISTS', KEYS[1])";
    assert_eq!(
        alice.cmd(&["EVAL", script, "1", "k"]),
        0,
        "nothing is granted inside a script"
    );
    bob.read_promptly().held();
}

#[test]
fn taken_by_a_script_in_between_the_waiters_stay_in_the_queue() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let script = "redis.call('DEL', KEYS[1]) redis.call('HSET', KEYS[1], 'script', '1')
        return redis.call('PEXPIRE', KEYS[1], 30000)";
    assert_eq!(alice.cmd(&["EVAL", script, "1", "k"]), 1);
    bob.expect_nothing_yet();
    assert_eq!(server.holder("k").as_deref(), Some("script"));
    assert_eq!(alice.let_go("k", "script"), 0);
    bob.read().held();
}

#[test]
fn a_lock_taken_by_a_script_ends_with_its_own_lease() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let script = "redis.call('DEL', KEYS[1]) redis.call('HSET', KEYS[1], 'script', '1')
        return redis.call('PEXPIRE', KEYS[1], 100)";
    alice.cmd(&["EVAL", script, "1", "k"]);
    bob.read().held();
}

#[test]
fn a_ttl_shortened_lengthened_and_taken_away() {
    let server = Server::start();
    bob_gets_it_50_ms_after(&server, &["PEXPIRE k 50"]);
    bob_gets_it_by(&server, &["PEXPIREAT k 1"]);
    bob_gets_it_50_ms_after(&server, &["PERSIST k", "PEXPIRE k 50"]);
    bob_stays_in_queue_after(&server, &["PERSIST k"], "DEL k");
    server.run("DEL k");

    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let begun = Instant::now();
    alice.pipeline(&["PEXPIRE k 50", "PEXPIRE k 300"]);
    bob.read().held();
    assert!(begun.elapsed() >= Duration::from_millis(300));
}

#[test]
fn renamed_away() {
    let server = Server::start();
    bob_gets_it_by(&server, &["RENAME k away"]);
    assert_eq!(
        server.holder("away").as_deref(),
        Some("alice"),
        "the hold has moved"
    );
    assert_eq!(server.run("RLOCK.RELEASE away alice"), 0);
    bob_gets_it_by(&server, &["RENAMENX k away2"]);
}

#[test]
fn renamed_over() {
    let server = Server::start();
    server.connect().take("carols", "carol");
    bob_stays_in_queue_after(&server, &["RENAME carols k"], "RLOCK.RELEASE k carol");
    server.run("FLUSHALL");
    server.run("HSET nobodys fence t1");
    bob_gets_it_by(&server, &["RENAME nobodys k"]);
}

#[test]
fn copied_over() {
    let server = Server::start();
    server.connect().take("carols", "carol");
    bob_stays_in_queue_after(&server, &["COPY carols k REPLACE"], "RLOCK.RELEASE k carol");
    server.run("FLUSHALL");
    server.run("HSET nobodys fence t1");
    bob_gets_it_by(&server, &["COPY nobodys k REPLACE"]);
}

#[test]
fn moved_to_another_database() {
    let server = Server::start();
    bob_gets_it_by(&server, &["MOVE k 1"]);
    let mut other = server.connect();
    other.run("SELECT 1");
    assert_eq!(other.let_go("k", "alice"), 0, "the hold has moved");
}

#[test]
fn databases_swapped() {
    let server = Server::start();
    bob_gets_it_by(&server, &["SWAPDB 0 1"]);
    server.run("FLUSHALL");

    let mut other = server.connect();
    other.run("SELECT 1");
    other.take("k", "carol");
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    alice.run("SWAPDB 0 1");
    bob.expect_nothing_yet();
    assert_eq!(
        server.holder("k").as_deref(),
        Some("carol"),
        "bob is now behind carol"
    );
    assert_eq!(alice.let_go("k", "carol"), 0);
    bob.read().held();
}

#[test]
fn the_same_name_in_two_databases_is_two_locks() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let mut other = server.connect();
    other.run("SELECT 1");
    other.take("k", "carol");
    assert_eq!(other.let_go("k", "carol"), 0);
    bob.expect_nothing_yet();
    alice.let_go("k", "alice");
    bob.read().held();
    other.run("FLUSHDB");
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
}

#[test]
fn a_waiter_in_another_database() {
    let server = Server::start();
    for free in [
        "RLOCK.RELEASE k alice",
        "DEL k",
        "PEXPIRE k 50",
        "FLUSHDB",
        "SWAPDB 1 2",
    ] {
        let mut alice = server.connect();
        let mut bob = server.connect();
        alice.run("SELECT 1");
        bob.run("SELECT 1");
        alice.take("k", "alice");
        bob.send("RLOCK.ACQUIRE k bob 30000 BLOCK 0");
        bob.settle();
        server.run("RLOCK.BREAK k"); // of the same name, but not the same lock
        bob.expect_nothing_yet();
        alice.run(free);
        bob.read().held();
        assert!(
            alice.run("HKEYS k").texts().contains(&"bob".to_owned()),
            "{free}"
        );
        assert_eq!(server.holder("k"), None, "{free}");
        server.run("FLUSHALL");
    }
}

#[test]
fn everything_flushed() {
    let server = Server::start();
    bob_gets_it_by(&server, &["FLUSHALL"]);
    bob_gets_it_by(&server, &["FLUSHDB"]);
    bob_gets_it_by(&server, &["FLUSHALL ASYNC"]);
    bob_gets_it_by(&server, &["FLUSHDB ASYNC"]);
    bob_gets_it_by(&server, &["MULTI", "FLUSHALL", "EXEC"]);
}

#[test]
fn evicted() {
    for policy in ["volatile-lru", "volatile-ttl", "allkeys-random"] {
        let server = Server::builder()
            .config(&format!("maxmemory-policy {policy}"))
            .start();
        // The second command finds the memory full, and frees what the policy allows.
        let squeeze = [
            "CONFIG SET maxmemory 1",
            "EXISTS k",
            "CONFIG SET maxmemory 0",
        ];
        let (mut alice, mut bob) = held_with_a_waiter(&server);
        until("the lock is evicted", || {
            alice.pipeline(&squeeze);
            server.info_number("evicted_keys") > 0
        });
        bob.read_promptly().held();
        assert_eq!(
            server.run("RLOCK.RENEW k alice 1000"),
            0,
            "alice has lost it"
        );
    }
}

#[test]
fn overwritten_by_another_type_the_waiters_are_told_at_the_end_of_the_lease() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let mut carol = server.wait_in_queue("k", "carol");
    // In one step: on a busy machine the lease might be over in between.
    let replies = alice.pipeline(&["MULTI", "RLOCK.RENEW k alice 200", "SET k v", "EXEC"]);
    assert_eq!(replies[3].array()[0], 1);
    for waiter in [&mut bob, &mut carol] {
        let error = waiter.read().error();
        assert!(error.starts_with("WRONGTYPE "), "{error}");
    }
    assert_eq!(alice.run("GET k"), "v");
    assert_eq!(server.info_number("blocked_clients"), 0);
}

#[test]
fn renamed_over_by_another_type() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    alice.run("SET text v");
    assert_eq!(alice.run("RENAME text k"), "OK");
    assert!(bob.read_promptly().error().starts_with("WRONGTYPE "));
}

#[test]
fn debug_reload_keeps_the_hold_and_the_queue() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    assert_eq!(alice.run("DEBUG RELOAD"), "OK");
    bob.expect_nothing_yet();
    assert_eq!(server.holder("k").as_deref(), Some("alice"));
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    assert_eq!(alice.let_go("k", "alice"), 0);
    bob.read().held();
}

#[test]
fn a_lease_that_ends_before_debug_reload_is_handed_over() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    alice.pipeline(&["PEXPIRE k 1", "DEBUG SLEEP 0.01", "DEBUG RELOAD"]);
    bob.read().held();
}

#[test]
fn a_server_that_becomes_a_replica_tells_its_waiters() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    assert_eq!(alice.run("REPLICAOF 127.0.0.1 1"), "OK");
    // Told by the server, which closes the connection then, or by the module, if that is first.
    let told = bob.read();
    assert!(told.error().starts_with("UNBLOCKED "), "{told:?}");
    assert_eq!(
        server
            .run("RLOCK.RELEASE k alice")
            .error()
            .split(' ')
            .next(),
        Some("READONLY")
    );
    assert_eq!(server.run("REPLICAOF NO ONE"), "OK");
    assert_eq!(server.waiting_owners("k").len(), 0);
    assert_eq!(
        server.holder("k").as_deref(),
        Some("alice"),
        "the hold is still there"
    );
    let mut carol = server.wait_in_queue("k", "carol");
    assert_eq!(server.run("RLOCK.RELEASE k alice"), 0);
    carol.read().held();
}

#[test]
fn a_failover_keeps_the_hold_and_ends_the_waits() {
    let pair = Pair::start();
    let (_alice, mut bob) = held_with_a_waiter(&pair.primary);
    let token = pair.primary.run("RLOCK.INFO k").get("token").int();
    pair.settle();
    assert_eq!(pair.primary.run("FAILOVER TIMEOUT 10000"), "OK");
    // Told by the server, which closes the connection then, or by the module, if that is first.
    let told = bob.read();
    assert!(told.error().starts_with("UNBLOCKED "), "{told:?}");
    until("the replica is the primary", || {
        pair.replica
            .info("role")
            .is_some_and(|role| role == "master")
    });
    assert_eq!(pair.replica.holder("k").as_deref(), Some("alice"));
    let mut bob = pair.replica.wait_in_queue("k", "bob");
    assert_eq!(pair.replica.run("RLOCK.RELEASE k alice"), 0);
    assert!(bob.read().held().1 > token, "tokens grow across a failover");
}

#[test]
fn nothing_is_written_while_writes_are_paused() {
    let server = Server::builder()
        .config("repl-ping-replica-period 3600")
        .start();
    let _feed = Feed::of(&server); // without a replica the offset would not count
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    alice.pipeline(&["RLOCK.RENEW k alice 50", "CLIENT PAUSE 3600000 WRITE"]);
    until("the lease has ended", || server.run("PTTL k").int() < 0);
    let offset = server.info_number("master_repl_offset");
    bob.expect_nothing_yet();
    assert_eq!(server.info_number("master_repl_offset"), offset);
    assert_eq!(alice.run("CLIENT UNPAUSE"), "OK");
    bob.read().held();
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
}

/// Nobody can ask or end anything in such a pause, so it ends by itself.
#[test]
fn no_waiter_is_granted_while_all_clients_are_paused() {
    let server = Server::start();
    let (mut alice, mut bob) = held_with_a_waiter(&server);
    let begun = Instant::now();
    alice.pipeline(&["RLOCK.RENEW k alice 50", "CLIENT PAUSE 400 ALL"]);
    bob.read().held();
    // The server counts from the millisecond in which its turn began.
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(390), "{took:?}");
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
}

#[test]
fn a_wait_that_ends_during_a_pause_is_told() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.connect();
    bob.send("RLOCK.ACQUIRE k bob 30000 BLOCK 100");
    bob.settle();
    alice.run("CLIENT PAUSE 300 WRITE");
    bob.read().refused();
}

#[test]
fn a_grant_taken_back_during_a_pause_goes_to_the_next_waiter_after_it() {
    let server = Server::start();
    let (mut alice, _bob) = held_with_a_waiter(&server);
    let mut carol = server.wait_in_queue("k", "carol");
    let id = server.run("RLOCK.INFO k").get("queue").array()[0]
        .get("client-id")
        .int();
    let kill = format!("CLIENT KILL ID {id}");
    alice.pipeline(&["RLOCK.RELEASE k alice", "CLIENT PAUSE 200 WRITE", &kill]);
    carol.read().held();
    assert_eq!(server.holder("k").as_deref(), Some("carol"));
}

#[test]
fn a_slot_that_moves_away_takes_the_hold_along_and_the_waiters_are_redirected() {
    let cluster = Cluster::start();
    let (_alice, mut bob) = held_with_a_waiter(&cluster.first);
    let mut carol = cluster.first.wait_in_queue("k", "carol");
    cluster.open_slot_of("k");
    cluster.migrate("k");
    // Between the key and the slot: the key is gone here, and yet nobody may be granted.
    let mut told = [None, None];
    for _ in 0..20 {
        for (waiter, told) in [&mut bob, &mut carol].into_iter().zip(&mut told) {
            *told = told.take().or_else(|| waiter.read_now());
        }
        cluster.first.run("PING");
    }
    cluster.close_slot_of("k");
    // Told while the slot was moving: the first node still owned it, and redirects callers.
    let moved = format!("MOVED {} 127.0.0.1:", slot_of(&cluster.first, "k"));
    for (waiter, told) in [&mut bob, &mut carol].into_iter().zip(told) {
        let error = told.unwrap_or_else(|| waiter.read()).error();
        assert!(error.starts_with(&moved), "{error}");
    }
    assert_eq!(cluster.second.holder("k").as_deref(), Some("alice"));
    let mut bob = cluster.second.wait_in_queue("k", "bob");
    assert_eq!(cluster.second.run("RLOCK.RELEASE k alice"), 0);
    bob.read().held();
    assert!(
        cluster.first.run("HKEYS k").is_error(),
        "never a second holder"
    );
}

#[test]
fn a_slot_that_moves_without_its_key_redirects_the_waiters_too() {
    let cluster = Cluster::start();
    let (_alice, mut bob) = held_with_a_waiter(&cluster.first);
    let to = cluster.second.run("CLUSTER MYID").text();
    let slot = slot_of(&cluster.first, "k");
    // The second node's epoch is the higher one: the first gives in, and deletes its keys there.
    assert_eq!(
        cluster
            .second
            .run(format!("CLUSTER SETSLOT {slot} NODE {to}")),
        "OK"
    );
    let error = bob.read().error();
    assert!(error.starts_with("MOVED "), "{error}");
}

#[test]
fn a_deleted_lock_in_a_cluster_is_handed_over() {
    let cluster = Cluster::start();
    bob_gets_it_by(&cluster.first, &["DEL k"]);
    bob_gets_it_50_ms_after(&cluster.first, &["PEXPIRE k 50"]);
}
