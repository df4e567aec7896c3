//! Moving over, step by step, and back: docs/redisson.md.

use std::collections::BTreeSet;
use std::time::Duration;

use rlock_tests::{Pair, Server, Version, module_path, until};

use crate::java::Redisson;
use crate::measure::{A_WHILE, AT_ONCE};
use crate::rounds;

#[track_caller]
fn load_module(server: &Server) {
    let load = format!("MODULE LOAD {}", module_path().display());
    assert_eq!(server.run(load), "OK");
}

#[test]
fn the_module_comes_and_goes_while_java_works() {
    const ROUNDS: u32 = 300;
    if !Version::at_hand().can_unload_modules() {
        return;
    }
    let server = Server::builder().without_module().start();
    let redisson = Redisson::of(&server);
    let owners = [redisson.owner(), redisson.owner()];
    for owner in &owners {
        owner.tell(&format!("lock k rounds {ROUNDS} 1000"));
        // Asked for now; it is done when the module may be unloaded again.
        owner.tell("lock k rounds 50 1000");
    }
    until("Java is at work", || server.run("LLEN rounds:k").int() > 50);
    load_module(&server);
    rounds::play(&server, "k", "ours", "", ROUNDS);
    assert_eq!(server.run("MODULE UNLOAD rlock"), "OK");
    for owner in &owners {
        for rounds in [ROUNDS, 50] {
            let answer = owner.answer_within(Duration::from_secs(120));
            assert_eq!(answer.text, rounds.to_string());
        }
        assert_eq!(owner.ask("lock k rounds 50 0"), "50");
    }
    rounds::check(&server, "k", ROUNDS * 3 + 200, 50);
}

#[test]
fn what_we_hold_is_respected_by_java_when_the_module_is_gone() {
    if !Version::at_hand().can_unload_modules() {
        return;
    }
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    conn.run("RLOCK.ACQUIRE k ours 6000").held();
    assert_eq!(server.run("MODULE UNLOAD rlock"), "OK");
    assert_eq!(java.ask("lock k trylock"), "false");
    assert_eq!(java.ask("lock k islocked"), "true");
    java.does("lock k lock");
    assert_eq!(server.holder("k"), Some(java.id()));
    java.does("lock k unlock");
}

#[test]
fn what_java_holds_is_respected_when_the_module_comes() {
    let server = Server::builder().without_module().start();
    let redisson = Redisson::of(&server);
    let java = redisson.owner();
    java.does("lock k lock");
    java.does("lock k lock");
    load_module(&server);
    let mut waiter = server.wait_in_queue("k", "ours");
    java.does("lock k unlock");
    waiter.expect_nothing_yet();
    java.does("lock k unlock");
    waiter.read().held();
}

#[test]
fn the_module_is_loaded_on_replicas_first_and_is_there_when_one_is_promoted() {
    let plain = || Server::builder().without_module();
    let pair = Pair::of(plain(), plain());
    let redisson = Redisson::of(&pair.primary);
    let java = redisson.owner();
    java.does("lock k lock");
    load_module(&pair.replica);
    load_module(&pair.primary);
    for server in [&pair.primary, &pair.replica] {
        assert!(format!("{:?}", server.run("MODULE LIST")).contains("rlock"));
        assert_eq!(server.info_number("rlock_grants"), 0);
        // Java's locks may still be under way to the replica.
        until("it is known who holds it", || {
            server.run("RLOCK.INFO k").get("owner") == &java.id()
        });
    }
    let mut waiter = pair.primary.wait_in_queue("k", "ours");
    java.does("lock k unlock");
    let (_, token) = waiter.read().held();
    pair.settle();
    assert_eq!(pair.replica.run("REPLICAOF NO ONE"), "OK");
    let mut promoted = pair.replica.connect();
    let held = promoted.run("RLOCK.ACQUIRE k ours 30000 ONCE").held();
    assert_eq!(held, (1, token));
    assert_eq!(promoted.let_go("k", "ours"), 0);
    assert!(promoted.take("k", "next") > token);
}

#[test]
fn a_replica_that_was_restarted_with_the_module_takes_over_what_java_holds() {
    let pair = Pair::of(Server::builder().without_module(), Server::builder());
    let former = Redisson::of(&pair.primary);
    let holder = former.owner();
    holder.does("lock k lock");
    assert_eq!(pair.primary.run("FAILOVER TIMEOUT 10000"), "OK");
    until("the replica is the primary", || {
        pair.replica
            .info("role")
            .is_some_and(|role| role == "master")
    });
    let redisson = Redisson::of(&pair.replica);
    let java = redisson.owner();
    let mut waiter = pair.replica.wait_in_queue("k", "ours");
    assert_eq!(java.ask("lock k trylock"), "false");
    let mut conn = pair.replica.connect();
    assert_eq!(conn.let_go("k", &holder.id()), 0); // as its process would
    waiter.read().held();
    java.waits("lock k lock");
    assert_eq!(waiter.let_go("k", "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
    // The former primary, still without the module, follows.
    until("it is told", || {
        pair.primary.holder("k").as_deref() == Some(&*java.id())
    });
}

#[test]
fn users_need_no_permission_to_publish_and_java_needs_what_it_had() {
    let server = Server::builder().without_module().start();
    for user in [
        "java on >secret ~* &redisson* +@all -@admin -@dangerous",
        "orders on >secret resetchannels ~orders:*",
    ] {
        assert_eq!(server.run(format!("ACL SETUSER {user}")), "OK");
    }
    let redisson = Redisson::as_user(&server, "java secret");
    let java = redisson.owner();
    java.does("lock orders:1 pass");
    load_module(&server);
    // As redis.conf has it.
    let rights = "ACL SETUSER orders +rlock.acquire +rlock.release +rlock.renew";
    assert_eq!(server.run(rights), "OK");
    let dry = |key: &str| server.run(format!("ACL DRYRUN orders RLOCK.ACQUIRE {key} o 30000"));
    assert_eq!(dry("orders:1"), "OK");
    assert_ne!(dry("stock:1"), "OK");
    let mut ours = server.connect();
    assert_eq!(ours.run("AUTH orders secret"), "OK");
    for kind in ["lock", "fair"] {
        ours.take("orders:1", "ours");
        java.waits(&format!("{kind} orders:1 lock"));
        assert_eq!(ours.let_go("orders:1", "ours"), 0);
        assert_eq!(java.answer_within(AT_ONCE).text, "ok");
        ours.run("RLOCK.ACQUIRE orders:1 ours 30000").refused();
        java.does(&format!("{kind} orders:1 unlock"));
    }
    assert_eq!(server.run("ACL LOG").array().len(), 0, "nobody was refused");
}

#[test]
fn the_server_tells_who_of_both_kinds_holds_and_who_waits() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (holder, waiter) = (redisson.owner(), redisson.owner());
    holder.does("lock k lock");
    waiter.waits("lock k lock");
    let _line = server.wait_in_queue("k", "ours");
    assert_eq!(server.run("RLOCK.INFO k").get("owner"), &holder.id());
    assert!(holder.id().starts_with(redisson.uuid()));
    // Ours are in the list; of Redisson's, the processes that listen can be counted.
    let list = server.run("RLOCK.LIST");
    let row = list.array()[0].array();
    assert_eq!((row[0].text().as_str(), row[1].int()), ("k", 1));
    let listening = server.run("PUBSUB NUMSUB redisson_lock__channel:{k}");
    assert_eq!(listening.array()[1], 1);
    // Which way locks are taken on this server.
    let calls = |command: &str| {
        let calls = server
            .info(&format!("cmdstat_{command}"))
            .unwrap_or_default();
        let calls = calls
            .strip_prefix("calls=")
            .and_then(|rest| rest.split(',').next());
        calls.map_or(0, |calls| calls.parse::<i64>().expect("a number"))
    };
    // Newer servers count a command that waits when it is done.
    server.connect().take("other", "ours");
    assert!(calls("rlock.acquire") >= 1);
    assert!(calls("evalsha") >= 2);
}

#[test]
fn without_messages_java_sleeps_and_with_them_it_wakes() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    assert_eq!(server.run("CONFIG SET rlock.publish off"), "OK");
    conn.take("k", "ours");
    java.waits("lock k lock");
    let mut next = server.wait_in_queue("k", "next");
    assert_eq!(conn.let_go("k", "ours"), 0);
    next.read_within(AT_ONCE).held();
    assert_eq!(next.let_go("k", "next"), 0);
    java.has_not_answered_within(A_WHILE);
    assert_eq!(server.run("CONFIG SET rlock.publish auto"), "OK");
    conn.take("k", "ours");
    assert_eq!(conn.let_go("k", "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
}

#[test]
fn what_redisson_leaves_behind_for_ever_is_known() {
    let server = Server::start();
    let (redisson, dying) = (Redisson::of(&server), Redisson::of(&server));
    let (java, mut conn) = (redisson.owner(), server.connect());
    for kind in ["lock", "fair", "fenced", "spin", "multi", "read", "write"] {
        java.does(&format!("{kind} {kind}-k lock"));
        java.does(&format!("{kind} {kind}-k unlock"));
    }
    conn.take("fair-k", "ours");
    dying.owner().waits("fair fair-k lock");
    drop(dying);
    assert_eq!(conn.let_go("fair-k", "ours"), 0);
    let endless = || -> BTreeSet<String> {
        let keys = server.run("KEYS *").texts().into_iter();
        keys.filter(|key| server.run(format!("PTTL {key}")) == -1)
            .collect()
    };
    let expected = [
        "redisson_lock_queue:{fair-k}",
        "redisson_lock_timeout:{fair-k}",
        "redisson_lock_token:{fenced-k}",
    ];
    assert_eq!(endless(), expected.map(str::to_owned).into());
}

#[test]
fn a_fenced_lock_goes_on_from_our_tokens_when_its_counter_is_set() {
    let server = Server::start();
    let redisson = Redisson::of(&server);
    let (java, mut conn) = (redisson.owner(), server.connect());
    java.does("fenced k lock");
    java.does("fenced k unlock");
    let token = conn.take("k", "ours");
    assert_eq!(conn.let_go("k", "ours"), 0);
    // Ours count microseconds since 1970 and are the larger ones.
    assert!(java.ask("fenced k token").parse::<i64>().unwrap() < token);
    assert_eq!(
        server.run(format!("SET redisson_lock_token:{{k}} {token}")),
        "OK"
    );
    java.does("fenced k lock");
    assert_eq!(java.ask("fenced k token"), (token + 1).to_string());
}
