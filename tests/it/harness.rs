//! The harness itself, on plain servers: nets that are known to catch.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{
    Certificates, Cluster, Conn, Feed, Pair, Proxy, Reply, Sentinels, Server, Shards, aof, in_sync,
    on_time, under_valgrind, until,
};

#[test]
fn a_server_that_dies_by_itself_fails_the_test() {
    let server = Server::builder().without_module().start();
    let mut conn = server.connect();
    conn.send("DEBUG SEGFAULT");
    conn.read_to_end();
    until("its process is over", || {
        server.log().contains("crashed by signal")
    });
    let verdict = catch_unwind(AssertUnwindSafe(|| drop(server)));
    let complaint = *verdict.unwrap_err().downcast::<String>().unwrap();
    assert!(complaint.contains("signal: 11"), "{complaint}");
}

/// Part of the smoke set, which `make memcheck` runs: a net that catches nothing would pass too.
#[test]
fn smoke_valgrind_fails_the_test_for_a_leak() {
    let mut server = Server::builder().without_module().start();
    server.load_c_module("caller");
    assert_eq!(server.run("CALLER.LEAK").error(), "ERR forgotten");
    let verdict = catch_unwind(AssertUnwindSafe(|| server.stop()));
    assert_eq!(verdict.is_err(), under_valgrind());
}

#[test]
fn data_survive_a_restart_and_a_kill() {
    let mut server = Server::builder()
        .without_module()
        .config("appendonly yes")
        .start();
    assert_eq!(server.run("SET k v"), "OK");
    server.restart();
    assert_eq!(server.run("GET k"), "v");
    server.kill();
    server.restart();
    assert_eq!(server.run("GET k"), "v");
    assert_eq!(aof(&server), ["SET k v"]);
}

#[test]
fn a_frozen_server_says_nothing_until_it_thaws() {
    let server = Server::builder().without_module().start();
    let mut conn = server.connect();
    server.freeze();
    conn.send("PING");
    thread::sleep(Duration::from_millis(20));
    assert_eq!(conn.read_now(), None);
    server.thaw();
    assert_eq!(conn.read(), "PONG");
}

#[test]
fn expecting_nothing_fails_when_something_came() {
    let server = Server::builder().without_module().start();
    let mut conn = server.blocked_in("BLPOP list 0");
    conn.expect_nothing_yet();
    server.run("RPUSH list item");
    let verdict = catch_unwind(AssertUnwindSafe(|| conn.expect_nothing_yet()));
    assert!(verdict.is_err());
}

#[test]
fn late_in_most_rounds_is_on_time_and_late_in_all_is_not() {
    let server = Server::builder().without_module().start();
    let (bound, late) = (Duration::from_millis(10), Duration::from_secs(600));
    let in_ten = |round: u32| {
        if round % 10 == 9 {
            Duration::ZERO
        } else {
            late
        }
    };
    on_time("one in ten", &server, bound, in_ten);
    let verdict = catch_unwind(|| on_time("none", &server, bound, |_| late));
    assert!(verdict.is_err());
}

#[test]
fn a_feed_tells_the_exact_commands() {
    let server = Server::builder().without_module().start();
    server.run("SET before 1");
    let mut feed = Feed::of(&server);
    let mut conn = server.connect();
    conn.pipeline(&["MULTI", "SET k v", "INCR n", "EXEC"]);
    conn.run("PUBLISH news of-today");
    assert_eq!(
        feed.news(),
        [
            "MULTI",
            "SET k v",
            "INCR n",
            "EXEC",
            "PUBLISH news of-today"
        ]
    );
    assert!(feed.news().is_empty());
}

#[test]
fn a_replica_follows() {
    let plain = Server::builder().without_module();
    let pair = Pair::of(plain.clone(), plain);
    pair.primary.run("SET k v");
    in_sync(&pair.primary, &pair.replica);
    assert_eq!(pair.replica.run("GET k"), "v");
}

#[test]
fn a_slot_moves_between_the_nodes_of_a_cluster() {
    let cluster = Cluster::start_plain();
    assert_eq!(cluster.first.run("SET k v"), "OK");
    cluster.open_slot_of("k");
    cluster.migrate("k");
    cluster.close_slot_of("k");
    assert!(cluster.first.run("GET k").error().starts_with("MOVED "));
    assert_eq!(cluster.second.run("GET k"), "v");
}

#[test]
fn replies_of_resp3_are_read_as_they_are() {
    let server = Server::builder().without_module().start();
    let mut conn = server.connect().resp3();
    conn.run("HSET h field value");
    let map = Reply::Map(vec![(
        Reply::Bulk(b"field".into()),
        Reply::Bulk(b"value".into()),
    )]);
    assert_eq!(conn.run("HGETALL h"), map);
    assert_eq!(conn.raw("GET nothing"), "_\r\n");
    assert_eq!(conn.raw("ECHO x"), "$1\r\nx\r\n");
    assert_eq!(conn.run("DEBUG PROTOCOL true"), Reply::Bool(true));
    assert!(conn.run("NONSENSE").is_error());
}

#[test]
fn a_proxy_is_slow_breaks_off_and_changes_its_server() {
    let [first, second] = [Server::start(), Server::start()];
    second.run("SET which second");
    let proxy = Proxy::to(first.address());
    let mut conn = Conn::open(proxy.address()).unwrap();
    let delay = Duration::from_millis(30);
    proxy.delay(delay);
    let since = Instant::now();
    assert_eq!(conn.run("PING"), "PONG");
    assert!(since.elapsed() >= 2 * delay, "{:?}", since.elapsed());
    proxy.heal();
    proxy.break_off_the_next_reply();
    assert!(conn.try_run("PING").is_err());
    let mut conn = Conn::open(proxy.address()).unwrap();
    assert_eq!(conn.run("GET which"), Reply::Null);
    proxy.redirect(second.address());
    assert!(conn.try_run("PING").is_err());
    let mut conn = Conn::open(proxy.address()).unwrap();
    assert_eq!(conn.run("GET which"), "second");
}

#[test]
fn sentinels_replace_a_primary_by_order_and_when_it_dies() {
    let plain = || Server::builder().without_module();
    let mut watched = Sentinels::of(plain(), plain());
    let first = watched.primary().port();
    watched.primary().run("SET k v");
    in_sync(watched.primary(), watched.replica());
    watched.fail_over();
    assert_eq!(watched.replica().port(), first);
    assert_eq!(watched.primary().run("GET k"), "v");
    watched.kill_sentinel(0);
    watched.kill_primary();
    assert_eq!(watched.primary().port(), first);
    watched.restart();
    assert_ne!(watched.replica().port(), first);
}

#[test]
fn a_cluster_with_replicas_fails_over_and_is_resharded() {
    let mut shards = Shards::of(&Server::builder().without_module());
    let primaries = shards.primaries();
    let names: Vec<_> = primaries
        .iter()
        .map(|node| shards.name_at(node, "k"))
        .collect();
    for name in &names {
        assert_eq!(shards.primary_of(name).run(format!("SET {name} v")), "OK");
    }
    let to = shards.primary_of(&names[1]);
    shards.move_slot(&names[0], to);
    assert_eq!(shards.primary_of(&names[0]).port(), to.port());
    assert_eq!(to.run(format!("GET {}", names[0])), "v");
    let replica = shards.replica_of(&names[2]).port();
    shards.fail_over(&names[2]);
    assert_eq!(shards.primary_of(&names[2]).port(), replica);
    let old = shards.primary_of(&names[1]).port();
    in_sync(shards.primary_of(&names[1]), shards.replica_of(&names[1]));
    shards.kill_primary_of(&names[1]);
    assert_eq!(
        shards
            .primary_of(&names[1])
            .run(format!("GET {}", names[1])),
        "v"
    );
    shards.restart();
    assert_eq!(shards.replica_of(&names[1]).port(), old);
}

#[test]
fn a_server_speaks_tls_and_may_demand_a_certificate() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let plain = Server::builder().without_module();
    let open = plain.clone().tls(&certificates).start();
    let strict = plain.tls_with_client_certificates(&certificates).start();
    let path = |path: std::path::PathBuf| path.display().to_string();
    let authority = path(certificates.authority());
    let (certificate, key) = (
        path(certificates.client_certificate()),
        path(certificates.client_key()),
    );
    let ping = |server: &Server, trusts: &[&str]| {
        let port = server.tls_address().port().to_string();
        let output = Command::new("redis-cli")
            .args(["--tls", "-p", &port])
            .args(trusts)
            .arg("PING")
            .output();
        let output = output.expect("redis-cli, which scripts/install brings");
        String::from_utf8_lossy(&output.stdout).trim() == "PONG"
    };
    let trusts = ["--cacert", &authority];
    let shows = [&trusts[..], &["--cert", &certificate, "--key", &key]].concat();
    assert!(ping(&open, &trusts));
    assert!(!ping(&open, &[]), "nobody else trusts that authority");
    assert!(!ping(&strict, &trusts));
    assert!(ping(&strict, &shows));
}
