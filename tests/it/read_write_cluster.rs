//! Read-write locks in a cluster, where a lock's keys may be on their way to another node.

use rlock_tests::{Cluster, Conn, Reply, Server, slot_of, until};

use crate::read_write::{as_fields, fields};

/// Takes the lock with a lease of 30 s.
#[track_caller]
fn takes(server: &Server, name: &str, owner: &str, mode: &str) {
    let acquire = format!("RLOCK.ACQUIRE {name} {owner} 30000 {mode}");
    assert_eq!(server.run(acquire).held().0, 1);
}

#[track_caller]
fn waits(server: &Server, name: &str, owner: &str, mode: &str) -> Conn {
    server.blocked_in(&format!(
        "RLOCK.ACQUIRE {name} {owner} 30000 {mode} BLOCK 0"
    ))
}

fn timeout(name: &str, owner: &str) -> String {
    format!("{{{name}}}:{owner}:rwlock_timeout:1")
}

/// The slot stays where it is, after all.
fn keep_slot(cluster: &Cluster, name: &str) {
    let slot = slot_of(&cluster.first, name);
    for node in [&cluster.first, &cluster.second] {
        assert_eq!(node.run(format!("CLUSTER SETSLOT {slot} STABLE")), "OK");
    }
}

fn is_moved(server: &Server, name: &str, reply: &Reply) {
    let moved = format!("MOVED {} 127.0.0.1:", slot_of(server, name));
    let error = reply.error();
    assert!(error.starts_with(&moved), "{error}");
}

#[test]
fn in_a_cluster_only_names_with_braces_that_are_no_tag_are_refused() {
    let cluster = Cluster::start();
    let server = &cluster.first;
    takes(server, "k", "alice", "READ");
    let mut bob = waits(server, "k", "bob", "WRITE");
    let mut carol = waits(server, "k", "carol", "READ");
    assert_eq!(server.run("RLOCK.RENEW k alice 50 READ"), 1);
    bob.read().held();
    carol.expect_nothing_yet();
    assert_eq!(server.run("DEL k"), 1);
    carol.read().held();
    assert_eq!(fields(server, "k"), as_fields("mode=read carol=1"));
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    until("alice's timeout key has run out", || {
        server.run("DBSIZE") == 0
    });

    read_is_refused_where_timeout_keys_would_be_another_nodes(server);
    the_messages_go_to_both_kinds_of_subscribers_once(server);
}

fn read_is_refused_where_timeout_keys_would_be_another_nodes(server: &Server) {
    let mut conn = server.connect();
    for name in ["a{b", "{}x", "a}b", "}{", ""] {
        for command in [
            &["RLOCK.ACQUIRE", name, "alice", "30000", "READ"][..],
            &[
                "RLOCK.ACQUIRE",
                name,
                "alice",
                "30000",
                "READ",
                "BLOCK",
                "0",
            ],
            &["RLOCK.RELEASE", name, "alice", "READ"],
            &["RLOCK.RENEW", name, "alice", "30000", "READ"],
        ] {
            let error = conn.cmd(command).error();
            assert!(
                error.starts_with("CROSSSLOT "),
                "{name:?}, {command:?}: {error}"
            );
        }
        assert_eq!(conn.run("DBSIZE"), 0, "{name:?}");
        conn.cmd(&["RLOCK.ACQUIRE", name, "alice", "30000"]).held();
        assert_eq!(conn.cmd(&["RLOCK.RELEASE", name, "alice"]), 0);
    }
    for name in ["k", "{a}b", "a:{b}", "}a{b}", "{{}"] {
        let acquire = ["RLOCK.ACQUIRE", name, "alice", "30000", "READ"];
        conn.cmd(&acquire).held();
        assert_eq!(conn.cmd(&["RLOCK.RELEASE", name, "alice", "READ"]), 0);
        assert_eq!(conn.run("DBSIZE"), 0, "{name}");
    }
}

fn the_messages_go_to_both_kinds_of_subscribers_once(server: &Server) {
    let mut classic = server.connect();
    let mut sharded = server.connect();
    classic.run("SUBSCRIBE redisson_rwlock:{k}");
    sharded.run("SSUBSCRIBE redisson_rwlock:{k}");
    for (mode, text) in [("READ", "0"), ("WRITE", "1")] {
        takes(server, "k", "alice", mode);
        assert_eq!(server.run(format!("RLOCK.RELEASE k alice {mode}")), 0);
        for (listener, kind) in [(&mut classic, "message"), (&mut sharded, "smessage")] {
            assert_eq!(listener.read().texts(), [kind, "redisson_rwlock:{k}", text]);
            listener.expect_nothing_yet();
        }
    }
}

#[test]
fn while_a_slot_moves_no_waiter_is_granted_or_forgotten() {
    let cluster = Cluster::start();
    read_and_write_are_to_try_again_at_both_ends(&cluster, "k1");
    waiters_are_redirected_and_not_granted(&cluster, "k2", true);
    waiters_are_redirected_and_not_granted(&cluster, "k3", false);
    a_move_given_up_grants_who_waits(&cluster, "k4");
    the_end_of_a_session_grants_nobody_yet(&cluster, "k5");
    a_break_grants_nobody_yet(&cluster, "k6");
}

fn read_and_write_are_to_try_again_at_both_ends(cluster: &Cluster, name: &str) {
    takes(&cluster.first, name, "alice", "READ");
    cluster.open_slot_of(name);
    let try_again = |server: &Server, asking: bool| {
        let mut conn = server.connect();
        for command in [
            "ACQUIRE # alice 30000 READ",
            "ACQUIRE # bob 30000 WRITE",
            "ACQUIRE # bob 30000 WRITE BLOCK 0",
            "RELEASE # alice READ",
            "RENEW # alice 30000 READ",
            "RENEW # alice 30000 WRITE",
        ] {
            if asking {
                assert_eq!(conn.run("ASKING"), "OK");
            }
            let told = conn.run(format!("RLOCK.{}", command.replace('#', name)));
            let is_told = told.is_error() && told.error().starts_with("TRYAGAIN ");
            assert!(is_told, "{command}, asking: {asking}: {told:?}");
        }
    };
    try_again(&cluster.first, false);
    assert_eq!(fields(&cluster.first, name), as_fields("mode=read alice=1"));
    cluster.migrate(name);
    // The hash is there, the timeout key still here: it proves nothing that it is missing.
    try_again(&cluster.second, true);
    cluster.migrate(&timeout(name, "alice"));
    cluster.close_slot_of(name);
    let second = &cluster.second;
    assert_eq!(
        second.run(format!("RLOCK.RENEW {name} alice 30000 READ")),
        1
    );
    let refused = second.run(format!("RLOCK.ACQUIRE {name} bob 30000 WRITE"));
    assert!(refused.refused() > 20_000);
    assert_eq!(second.run(format!("RLOCK.RELEASE {name} alice READ")), 0);
    assert_eq!(second.run("DBSIZE"), 0);
}

/// The timeout key leaves first, or the hash.
fn waiters_are_redirected_and_not_granted(cluster: &Cluster, name: &str, timeout_first: bool) {
    let (first, second) = (&cluster.first, &cluster.second);
    takes(first, name, "alice", "READ");
    let mut bob = waits(first, name, "bob", "WRITE");
    let mut carol = waits(first, name, "carol", "READ");
    cluster.open_slot_of(name);
    let mut keys = [timeout(name, "alice"), name.to_owned()];
    if !timeout_first {
        keys.reverse();
    }
    let mut told = [None, None];
    for key in keys {
        cluster.migrate(&key);
        for _ in 0..30 {
            for (waiter, told) in [&mut bob, &mut carol].into_iter().zip(&mut told) {
                *told = told.take().or_else(|| waiter.read_now());
            }
            first.run("PING");
        }
    }
    cluster.close_slot_of(name);
    for (waiter, told) in [&mut bob, &mut carol].into_iter().zip(told) {
        is_moved(first, name, &told.unwrap_or_else(|| waiter.read()));
    }
    assert_eq!(fields(second, name), as_fields("mode=read alice=1"));
    assert_eq!(second.run(format!("RLOCK.RELEASE {name} alice READ")), 0);
    assert_eq!(first.info_number("rlock_waiters"), 0);
}

fn a_move_given_up_grants_who_waits(cluster: &Cluster, name: &str) {
    let server = &cluster.first;
    takes(server, name, "alice", "READ");
    let mut bob = waits(server, name, "bob", "WRITE");
    cluster.open_slot_of(name);
    server.run(format!("PEXPIRE {} 50", timeout(name, "alice")));
    server.run(format!("PEXPIRE {name} 50"));
    until("the lease has ended", || {
        let left = server.run(format!("PTTL {name}"));
        left.is_error() || left.int() < 0
    });
    if is_granted_when_kept(cluster, name, &mut bob, || ()) {
        assert_eq!(fields(server, name), as_fields("mode=write bob:write=1:t"));
    }
}

/// Nobody is granted before the slot is kept; then the waiter is. But the look at the queue, once a
/// second, may fall into the time in which the key is missing and the slot on its way: that
/// redirects the waiter.
fn is_granted_when_kept(
    cluster: &Cluster,
    name: &str,
    waiting: &mut Conn,
    then: impl FnOnce(),
) -> bool {
    let is_sent_on = |told: &Reply| told.is_error() && told.error().starts_with("MOVED ");
    waiting.settle();
    let early = waiting.read_now();
    assert!(early.as_ref().is_none_or(is_sent_on), "{early:?}");
    keep_slot(cluster, name);
    then();
    let told = early.unwrap_or_else(|| waiting.read());
    if is_sent_on(&told) {
        return false;
    }
    told.held();
    true
}

/// This node does not know the holders at the other node: the lease ends the hold.
fn the_end_of_a_session_grants_nobody_yet(cluster: &Cluster, name: &str) {
    let server = &cluster.first;
    let life = server.session_connection("s");
    let acquire = format!("RLOCK.ACQUIRE {name} alice 30000 WRITE SESSION s");
    server.run(acquire).held();
    let mut bob = waits(server, name, "bob", "READ");
    cluster.open_slot_of(name);
    life.close();
    let end_soon = || drop(server.run(format!("RLOCK.RENEW {name} alice 50 WRITE")));
    if is_granted_when_kept(cluster, name, &mut bob, end_soon) {
        assert_eq!(fields(server, name), as_fields("mode=read bob=1"));
    }
}

fn a_break_grants_nobody_yet(cluster: &Cluster, name: &str) {
    let server = &cluster.first;
    takes(server, name, "alice", "WRITE");
    let mut bob = waits(server, name, "bob", "WRITE");
    cluster.open_slot_of(name);
    let broke = server.run(format!("RLOCK.BREAK {name}"));
    let is_granted = is_granted_when_kept(cluster, name, &mut bob, || {
        if broke.is_error() {
            assert!(broke.error().starts_with("TRYAGAIN "), "{broke:?}");
            assert_eq!(server.run(format!("RLOCK.BREAK {name}")), 1);
        }
    });
    if is_granted {
        assert_eq!(fields(server, name), as_fields("mode=write bob:write=1:t"));
    }
}
