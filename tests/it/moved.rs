//! Where waiters are sent whose slot has moved to another node: to where the server itself sends
//! the same client.

use std::process::{Child, Command, Stdio};

use rlock_tests::{Certificates, Cluster, Conn, Server, slot_of, until};

/// Gives the slot of `key` to the second node, whose epoch is the higher one: the first gives in,
/// and deletes its keys there. (While a slot is moved key by key, waiters are sent to the node that
/// still owns it.)
fn move_slot(cluster: &Cluster, key: &str) {
    let slot = slot_of(&cluster.first, key);
    let to = cluster.second.run("CLUSTER MYID").text();
    let set = format!("CLUSTER SETSLOT {slot} NODE {to}");
    assert_eq!(cluster.second.run(set), "OK");
}

/// The first node's answer to a client that asks for the key.
fn redirect(cluster: &Cluster, key: &str) -> String {
    cluster.first.run(format!("GET {key}")).error()
}

/// A blocked waiter, and one that is queued for a session.
fn wait(cluster: &Cluster, key: &str) -> (Conn, Conn) {
    cluster.first.connect().take(key, "alice");
    let blocked = cluster.first.wait_in_queue(key, "bob");
    let mut life = cluster.first.session_connection(&format!("s-{key}"));
    life.queue(key, "carol", &format!("s-{key}"));
    (blocked, life)
}

#[test]
fn waiters_are_sent_to_the_endpoint_that_the_server_prefers() {
    let cluster = Cluster::start();
    for node in [&cluster.first, &cluster.second] {
        let name = format!(
            "CONFIG SET cluster-announce-hostname node-{}.test",
            node.port()
        );
        assert_eq!(node.run(name), "OK");
    }
    until("the first node knows the second by name", || {
        let nodes = cluster.first.run("CLUSTER NODES").text();
        nodes.contains(&format!("node-{}.test", cluster.second.port()))
    });
    let mut seen = Vec::new();
    for (key, kind) in [("a", "ip"), ("b", "hostname"), ("c", "unknown-endpoint")] {
        let set = format!("CONFIG SET cluster-preferred-endpoint-type {kind}");
        assert_eq!(cluster.first.run(set), "OK");
        let (mut blocked, mut life) = wait(&cluster, key);
        move_slot(&cluster, key);
        let told = blocked.read().error();
        let event = life.run(format!("RLOCK.EVENTS s-{key} BLOCK 0"));
        assert_eq!(told, redirect(&cluster, key), "{kind}");
        assert_eq!(
            event.event(),
            (format!("error {key} carol"), told.as_str().into())
        );
        seen.push(told.split(' ').nth(2).map(str::to_owned));
    }
    let port = cluster.second.port();
    let expected = [
        "127.0.0.1".to_owned(),
        format!("node-{port}.test"),
        String::new(),
    ];
    assert_eq!(seen, expected.map(|host| Some(format!("{host}:{port}"))));
}

#[test]
fn waiters_over_tls_are_sent_to_the_port_for_tls() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    for node in [
        Server::builder().tls(&certificates),
        Server::builder().tls_among_servers(&certificates),
    ] {
        let cluster = Cluster::of(&node);
        let over_tls = |command: &str| {
            let mut cli = Command::new("redis-cli");
            let port = cluster.first.tls_address().port().to_string();
            cli.args(["--tls", "-p", &port, "--cacert"])
                .arg(certificates.authority())
                .args(command.split(' '))
                .stdout(Stdio::piped());
            cli.spawn()
                .expect("redis-cli, which scripts/install brings")
        };
        let answer = |cli: Child| {
            let output = cli.wait_with_output().expect("its output");
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        let (mut blocked, _life) = wait(&cluster, "k");
        let encrypted = over_tls("RLOCK.ACQUIRE k dora 30000 BLOCK 0");
        until("it waits", || cluster.first.waiting_owners("k").len() == 3);
        move_slot(&cluster, "k");
        assert_eq!(blocked.read().error(), redirect(&cluster, "k"));
        let told = answer(encrypted);
        assert!(told.starts_with("MOVED "), "{told}");
        assert_eq!(told, answer(over_tls("GET k")));
    }
}

/// The answer is as long as the cluster is large.
#[test]
fn the_owner_of_a_slot_is_asked_for_once_for_all_its_locks() {
    const LOCKS: usize = 300;
    let cluster = Cluster::start();
    let mut life = cluster.first.session_connection("s");
    for number in 0..LOCKS {
        let name = format!("{{k}}{number}");
        life.take(&name, "alice");
        life.queue(&name, "bob", "s");
    }
    let before = asked(&cluster.first);
    move_slot(&cluster, "k");
    let mut events = 0;
    while events < LOCKS {
        let told = life.run("RLOCK.EVENTS s BLOCK 0").events();
        assert!(
            told.iter().all(|(event, _)| event.starts_with("error ")),
            "{told:?}"
        );
        events += told.len();
    }
    let asked = asked(&cluster.first) - before;
    // Twice a run of the timer; on a busy machine there are many. For each lock it would be twice.
    let locks = i64::try_from(LOCKS).expect("a small number");
    assert!(asked < locks, "asked {asked} times");
}

/// How often the node was asked for the nodes of the cluster.
fn asked(node: &Server) -> i64 {
    let stats = node.run("INFO commandstats").text();
    let calls = |command: &str| {
        let line = stats.lines().find(|line| line.starts_with(command));
        let calls = line.and_then(|line| line.split("calls=").nth(1)?.split(',').next());
        calls.map_or(0, |calls| calls.parse::<i64>().expect("a number"))
    };
    calls("cmdstat_cluster|nodes:") + calls("cmdstat_cluster|shards:")
}
