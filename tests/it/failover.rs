//! Replicas that become primaries, and primaries that become replicas, while all kinds of holds and
//! waits are there. Replicated holds stay, no lock is granted twice, tokens grow.

use rlock_tests::{Conn, Pair, Sentinels, in_sync, module_path, until};

use crate::everybody::{Everybody, holds};

/// The server's word for those it sends away because it is a replica now.
const DEMOTED: &[&str] = &["UNBLOCKED "];

#[test]
fn an_ordered_failover_keeps_the_holds_and_sends_the_waiters_away() {
    let watched = Sentinels::start();
    let (old, new) = (watched.primary(), watched.replica());
    let everybody = Everybody::at(old, "{t}");
    let largest = everybody.largest;
    in_sync(old, new);
    let before = holds(old);
    watched.fail_over();
    everybody.are_sent_away(DEMOTED);
    assert_eq!(holds(new), before);
    let error = old.run("RLOCK.RELEASE k{t} alice").error();
    assert!(error.starts_with("READONLY "), "{error}");
    Everybody::go_on(new, "{t}", largest);
    in_sync(new, old);
    until("the old one has the same", || holds(old) == holds(new));
}

#[test]
fn sentinels_that_replace_a_dead_primary_keep_the_holds() {
    let mut watched = Sentinels::start();
    let everybody = Everybody::at(watched.primary(), "{t}");
    let largest = everybody.largest;
    in_sync(watched.primary(), watched.replica());
    let before = holds(watched.primary());
    watched.kill_primary();
    assert_eq!(holds(watched.primary()), before);
    Everybody::go_on(watched.primary(), "{t}", largest);
    // And back: the one that was dead learns all, and is the primary again.
    watched.restart();
    let largest = watched.primary().connect().take("last", "alice");
    in_sync(watched.primary(), watched.replica());
    let before = holds(watched.primary());
    watched.fail_over();
    assert_eq!(holds(watched.primary()), before);
    assert!(watched.primary().connect().take("next", "alice") > largest);
}

/// A primary that is stopped is replaced, and goes on later: for a moment there are two. The old
/// one's grants of that moment have smaller tokens than all grants of the new one, so a store that
/// looks at tokens refuses it.
#[test]
fn what_a_deposed_primary_grants_has_smaller_tokens_than_its_successors_grants() {
    let watched = Sentinels::start();
    let (old, new) = (watched.primary(), watched.replica());
    let mut alice = old.connect();
    alice.run("RLOCK.ACQUIRE k alice 6000").held();
    let mut bob = old.wait_in_queue("k", "bob");
    in_sync(old, new);
    old.freeze();
    watched.await_failover(old.port());
    let mut carol = Conn::open(new.address()).unwrap();
    let token = carol.run("RLOCK.ACQUIRE k carol 60000 BLOCK 0").held().1;
    // By the wall clock the lease is over when the old one wakes up, and bob is first in its queue.
    old.thaw();
    let late = bob.read().held().1;
    assert!(late < token, "{late} beside {token}");
    watched.settle();
    for server in [old, new] {
        until("both know who holds it", || {
            server.run("HKEYS k").texts().contains(&"carol".to_owned())
        });
        assert_eq!(server.holder("k").as_deref(), Some("carol"));
    }
}

#[test]
fn a_failover_in_good_order_keeps_every_kind_of_hold() {
    let pair = Pair::start();
    let everybody = Everybody::at(&pair.primary, "{t}");
    let largest = everybody.largest;
    let before = holds(&pair.primary);
    assert_eq!(pair.primary.run("FAILOVER TIMEOUT 10000"), "OK");
    until("the replica is the primary", || {
        pair.replica
            .info("role")
            .is_some_and(|role| role == "master")
    });
    everybody.are_sent_away(DEMOTED);
    assert_eq!(holds(&pair.replica), before);
    Everybody::go_on(&pair.replica, "{t}", largest);
}

/// A replica without the module keeps the locks that it gets, also as a primary; with the module
/// loaded then, the locks are locks again.
#[test]
fn a_replica_without_the_module_can_be_promoted_and_get_it_later() {
    let pair = Pair::with_plain_replica();
    let largest = Everybody::at(&pair.primary, "{t}").largest;
    pair.settle();
    let before = holds(&pair.primary);
    let heir = &pair.replica;
    assert_eq!(heir.run("REPLICAOF NO ONE"), "OK");
    assert_eq!(holds(heir), before);
    assert!(heir.run("RLOCK.RENEW k{t} alice 60000").is_error());
    let module = module_path().display().to_string();
    assert_eq!(heir.connect().cmd(&["MODULE", "LOAD", &module]), "OK");
    assert_eq!(heir.run("RLOCK.RENEW k{t} alice 60000"), 1);
    Everybody::go_on(heir, "{t}", largest);
}
