//! A server that refuses writes to its clients: its append-only file has no room, or it has too few
//! replicas. The end of a lease may not write when a command may not.

use std::thread;
use std::time::Duration;

use rlock_tests::{Cluster, Conn, Pair, Server, Version, aof, until};

/// Holds of every kind, and waiters for them.
fn holds_and_waits(server: &Server) -> Vec<(String, Conn)> {
    let mut conn = server.connect();
    for hold in [
        "RLOCK.ACQUIRE k alice 600000",
        "RLOCK.ACQUIRE r alice 600000 READ",
        "RLOCK.ACQUIRE w alice 600000 WRITE",
        "RLOCK.MACQUIRE alice 600000 2 x y",
        "RLOCK.ACQUIRE long alice 600000",
    ] {
        assert_eq!(conn.run(hold).held().0, 1, "{hold}");
    }
    [
        "RLOCK.ACQUIRE k bob 60000 BLOCK 0",
        "RLOCK.ACQUIRE r bob 60000 WRITE BLOCK 0",
        "RLOCK.ACQUIRE w bob 60000 READ BLOCK 0",
        "RLOCK.MACQUIRE bob 60000 3 x y z BLOCK 0",
    ]
    .map(|wait| (wait.to_owned(), server.blocked_in(wait)))
    .into()
}

/// All holds but one end soon, and `then` follows in the same turn of the event loop: it takes
/// effect before the leases end, however slow the machine is.
fn end_soon(server: &Server, then: &[&str]) {
    let renewals = [
        "MULTI",
        "RLOCK.RENEW k alice 500",
        "RLOCK.RENEW r alice 500 READ",
        "RLOCK.RENEW w alice 500 WRITE",
        "RLOCK.MRENEW alice 500 2 x y",
        "EXEC",
    ];
    let replies = server.connect().pipeline(&[&renewals, then].concat());
    assert_eq!(replies[5].ints(), [1, 1, 1, 2]);
    for (command, reply) in then.iter().zip(&replies[6..]) {
        assert_eq!(reply, &"OK", "{command}");
    }
}

/// Their leases are over, and a few turns of the event loop and of the module's timer as well.
fn leases_are_over(server: &Server) {
    until("all leases are over", || {
        let is_over = |name| server.run(format!("PTTL {name}")).int() < 0;
        ["k", "r", "w", "x", "y"].into_iter().all(is_over)
    });
    // The timer is due within milliseconds. Nothing can be waited for that should not happen.
    thread::sleep(Duration::from_millis(150));
}

fn nobody_is_granted(waits: &mut [(String, Conn)]) {
    for (wait, conn) in waits {
        let told = conn.read_now();
        assert_eq!(told, None, "{wait}");
    }
}

fn all_are_granted(waits: Vec<(String, Conn)>) {
    for (wait, mut conn) in waits {
        assert_eq!(conn.read().held().0, 1, "{wait}");
    }
}

/// `appendfsync no`: the server goes on and answers MISCONF. (So it does with `everysec`, but there
/// it may write, and notice, two seconds later.)
#[test]
fn without_room_for_the_append_only_file_no_waiter_is_granted() {
    let mut server = Server::builder().on_a_small_disk("no").start();
    let mut waits = holds_and_waits(&server);
    let mut life = server.session_connection("s");
    let hold = "RLOCK.ACQUIRE of-session sam 600000 SESSION s";
    server.run(hold).held();
    let mut dora = server.wait_in_queue("of-session", "dora");
    server.take_the_room();
    // The renewals find no room.
    end_soon(&server, &[]);
    until("the server refuses to write", || {
        let told = server.run("RLOCK.RENEW long alice 60000");
        told.is_error() && told.error().starts_with("MISCONF ")
    });
    // The end of a session is no command, either.
    life.run("RLOCK.EVENTS s").events();
    life.close();
    leases_are_over(&server);
    nobody_is_granted(&mut waits);
    assert_eq!(dora.read_now(), None);
    assert_eq!(server.holder("of-session").as_deref(), Some("sam"));
    let told = server.run("RLOCK.RELEASE long alice").error();
    assert!(told.starts_with("MISCONF "), "{told}");
    server.give_the_room_back();
    all_are_granted(waits);
    dora.read().held();
    until("all of it is on the disk", || {
        let written = aof(&server);
        let is_written = |(name, fields)| {
            let (name, fields) = (format!("RESTORE {name} "), format!(" [{fields} "));
            let is_it = |line: &String| line.starts_with(&name) && line.contains(&fields);
            written.iter().any(is_it)
        };
        [
            ("k", "bob"),
            ("of-session", "dora"),
            ("r", "mode write bob:write"),
            ("w", "mode read bob"),
            ("z", "bob"),
        ]
        .into_iter()
        .all(is_written)
    });
    server.kill();
    server.restart();
    let holder = |name| server.holder(name);
    for name in ["k", "x", "y", "z"] {
        assert_eq!(holder(name).as_deref(), Some("bob"), "{name}");
    }
    assert_eq!(holder("of-session").as_deref(), Some("dora"));
    assert!(server.run("HGET r bob:write").text().starts_with("1:t"));
    assert_eq!(server.run("HGET w bob"), "1");
}

/// `appendfsync always`: the server ends rather than answer a write that it cannot store.
#[test]
fn a_grant_that_cannot_be_written_is_not_told() {
    let mut server = Server::builder().on_a_small_disk("always").start();
    let mut conn = server.connect();
    let token = conn.take("k", "alice");
    conn.take("m", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let mut multi_wait = server.blocked_in("RLOCK.MACQUIRE carol 60000 2 m n BLOCK 0");
    server.take_the_room();
    conn.send_all(&["RLOCK.RELEASE k alice", "RLOCK.RELEASE m alice"]);
    for conn in [&mut conn, &mut bob, &mut multi_wait] {
        assert!(conn.read_to_end().is_empty(), "an answer that is not true");
    }
    assert!(!server.await_end());
    server.restart();
    for name in ["k", "m"] {
        assert_eq!(server.holder(name).as_deref(), Some("alice"), "{name}");
    }
    assert_eq!(server.holder("n"), None);
    let mut bob = server.wait_in_queue("k", "bob");
    assert_eq!(server.connect().let_go("k", "alice"), 0);
    assert!(bob.read().held().1 > token);
}

#[test]
fn a_primary_that_lacks_replicas_grants_no_waiter_until_it_has_them() {
    let pair = Pair::start();
    let server = &pair.primary;
    let mut waits = holds_and_waits(server);
    assert_eq!(pair.replica.run("REPLICAOF NO ONE"), "OK");
    until("the server has noticed", || {
        server.info_number("connected_slaves") == 0
    });
    end_soon(server, &["CONFIG SET min-replicas-to-write 1"]);
    let told = server.run("RLOCK.RENEW long alice 60000").error();
    assert!(told.starts_with("NOREPLICAS "), "{told}");
    leases_are_over(server);
    nobody_is_granted(&mut waits);
    let again = format!("REPLICAOF 127.0.0.1 {}", server.port());
    assert_eq!(pair.replica.run(again), "OK");
    all_are_granted(waits);
    pair.settle();
    assert_eq!(pair.replica.holder("k").as_deref(), Some("bob"));
}

/// In a cluster the question whether anything may be written needs a key, which may be another
/// node's.
#[test]
fn in_a_cluster_it_is_the_same() {
    let cluster = Cluster::start();
    let server = &cluster.first;
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let refusing = "CONFIG SET min-replicas-to-write 1";
    let replies = alice.pipeline(&["RLOCK.RENEW k alice 500", refusing]);
    assert_eq!(replies[0], 1);
    assert_eq!(replies[1], "OK");
    until("the lease is over", || server.run("PTTL k").int() < 0);
    thread::sleep(Duration::from_millis(150));
    assert_eq!(bob.read_now(), None);
    assert_eq!(server.run("CONFIG SET min-replicas-to-write 0"), "OK");
    bob.read().held();
}

/// Offsets of the replication do not grow while clients are paused, also for waits of every kind.
#[test]
fn in_a_pause_no_waiter_is_granted_and_nothing_replicated() {
    let pair = Pair::of(
        Server::builder().config("repl-ping-replica-period 3600"),
        Server::builder(),
    );
    let server = &pair.primary;
    let mut waits = holds_and_waits(server);
    end_soon(server, &["CLIENT PAUSE 3600000 WRITE"]);
    let offset = server.info_number("master_repl_offset");
    leases_are_over(server);
    nobody_is_granted(&mut waits);
    assert_eq!(server.info_number("master_repl_offset"), offset);
    assert_eq!(server.run("CLIENT UNPAUSE"), "OK");
    all_are_granted(waits);
    pair.settle();
    assert_eq!(pair.replica.holder("z").as_deref(), Some("bob"));
}

/// A failover under way is a pause, too: the replica does not catch up, and in the end the primary
/// stays the primary.
#[test]
fn in_a_failover_that_is_given_up_no_waiter_is_granted_before() {
    let pair = Pair::start();
    let server = &pair.primary;
    let mut waits = holds_and_waits(server);
    pair.replica.freeze();
    end_soon(server, &["FAILOVER"]);
    leases_are_over(server);
    let state = server.info("master_failover_state");
    assert_eq!(state.as_deref(), Some("waiting-for-sync"));
    nobody_is_granted(&mut waits);
    assert_eq!(server.run("FAILOVER ABORT"), "OK");
    all_are_granted(waits);
    pair.replica.thaw();
    pair.settle();
    assert_eq!(pair.replica.holder("z").as_deref(), Some("bob"));
}

/// The module asks whether the server takes writes each time that the timer fires; no client sees
/// it. (On Redis 7.0 it is seen where `min-replicas-to-write` is set.)
#[test]
fn that_the_server_takes_writes_is_asked_without_a_trace() {
    let pair = Pair::start();
    let server = &pair.primary;
    if Version::at_hand().at_least((7, 2), (7, 2)) {
        server.run("CONFIG SET min-replicas-to-write 1");
        until("the replica counts", || !server.run("SET a b").is_error());
    }
    let before = server.run("INFO commandstats").text();
    assert!(!before.contains("spop"), "{before}");
    let mut monitor = server.connect();
    assert_eq!(monitor.run("MONITOR"), "OK");
    server.connect().take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    assert_eq!(server.run("DEL k"), 1);
    bob.read().held(); // by the timer
    let stats = server.run("INFO commandstats").text();
    assert!(!stats.contains("spop"), "{stats}");
    assert_eq!(server.run("PING end"), "end");
    loop {
        let line = monitor.read().text();
        assert!(!line.to_lowercase().contains("spop"), "{line}");
        if line.contains("\"end\"") {
            break;
        }
    }
}
