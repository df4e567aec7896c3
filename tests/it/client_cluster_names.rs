//! Nodes of a cluster by several names: a node is who it says it is, not its address.

use std::time::Duration;

use rlock_client::Client;
use rlock_tests::{Proxy, Server, Shards, until};
use tokio::time::timeout;

use super::client::{calm, soon, url, wait_in_queue};
use super::client_cluster::{a_name_each, connect, other_than, until_nothing_is_left};
use super::client_faults::session_connections;
use super::client_session::session_of;

/// Nodes that have a hostname beside their address, and are called by their address.
fn with_hostnames() -> Shards {
    Shards::of(&Server::builder().config("cluster-announce-hostname localhost"))
}

fn prefer(node: &Server, endpoint: &str) {
    let set = format!("CONFIG SET cluster-preferred-endpoint-type {endpoint}");
    assert_eq!(node.run(set), "OK");
}

/// How often anybody has asked who serves what.
fn asked(shards: &Shards) -> u64 {
    let asked = |node: &Server| -> u64 {
        let stats = node.run("INFO commandstats").text();
        let prefix = "cmdstat_cluster|slots:calls=";
        let calls = stats.lines().find_map(|line| line.strip_prefix(prefix));
        calls.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    };
    shards.nodes().iter().map(asked).sum()
}

/// Waits until the clients have asked: each does when its session connection breaks.
fn until_asked(shards: &Shards) {
    let before = asked(shards);
    for node in shards.primaries() {
        for id in session_connections(node) {
            node.run(format!("CLIENT KILL ID {id}"));
        }
    }
    until("the clients have asked who serves what", || {
        asked(shards) >= before + 2
    });
}

/// Takes free locks at each primary, without waiting for any.
async fn try_locks(client: &Client, shards: &Shards) {
    for name in a_name_each(shards, "free") {
        for i in 0..10 {
            try_lock(client, &format!("{{{name}}}:{i}")).await;
        }
    }
}

/// The connections by which a client is connected to a node: it may have two.
fn connections(node: &Server) -> usize {
    let list = node.run("CLIENT LIST").text();
    list.lines().filter(|line| line.contains("resp=3")).count()
}

/// Holds a lock and waits for another at each primary while `rename` changes what the nodes are
/// called and sees to it that the client hears of it. No connection of the client may take the
/// session over from another.
async fn nothing_is_lost_while(
    client: &Client,
    shards: &Shards,
    rename: impl AsyncFnOnce(&Shards),
) {
    let other = connect(calm(), shards).await;
    let (mut guards, mut others, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    let primaries = shards.primaries();
    for (node, name) in primaries.iter().zip(a_name_each(shards, "k")) {
        let wanted = format!("{{{name}}}:wanted");
        guards.push(client.lock(&*name).lock().await.unwrap());
        others.push(other.lock(&*wanted).lock().await.unwrap());
        waiting.push(wait_in_queue(node, client, &wanted));
    }
    rename(shards).await;
    for guard in guards {
        assert!(!guard.is_lost(), "{:?}", soon(guard.lost()).await);
        soon(guard.renew()).await.unwrap();
        soon(guard.unlock()).await.unwrap();
    }
    for (guard, waiting) in others.into_iter().zip(waiting) {
        assert!(!guard.is_lost(), "{:?}", soon(guard.lost()).await);
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        soon(guard.unlock()).await.unwrap();
        let guard = soon(waiting).await.unwrap().unwrap();
        soon(guard.unlock()).await.unwrap();
    }
    soon(other.shutdown()).await;
    drop(other);
    until("each node has two connections of the client", || {
        primaries.iter().all(|node| connections(node) == 2)
    });
    for node in primaries {
        let errors = node.run("INFO errorstats").text();
        assert!(!errors.contains("TAKENOVER"), "{errors}");
    }
    until_nothing_is_left(shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_change_to_and_fro_cost_no_guard_no_wait_and_no_lock() {
    let shards = with_hostnames();
    let client = connect(calm(), &shards).await;
    nothing_is_lost_while(&client, &shards, async |shards| {
        for endpoint in ["hostname", "unknown-endpoint", "ip", "hostname"] {
            for node in shards.nodes() {
                prefer(node, endpoint);
            }
            until_asked(shards);
            try_locks(&client, shards).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_name_each_other_differently_cost_nothing() {
    let shards = with_hostnames();
    for (i, node) in shards.nodes().iter().enumerate() {
        prefer(node, ["hostname", "ip", "unknown-endpoint"][i % 3]);
    }
    // By a name that not all of them use.
    let seeds = shards.nodes().iter();
    let seeds = seeds.map(|node| format!("redis://localhost:{}", node.port()));
    let client = calm().connect_cluster(seeds).await.unwrap();
    nothing_is_lost_while(&client, &shards, async |shards| {
        for _ in 0..3 {
            try_locks(&client, shards).await;
            until_asked(shards);
        }
        try_locks(&client, shards).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_break_while_names_change_lead_to_the_same_nodes_again() {
    let shards = with_hostnames();
    let client = connect(calm(), &shards).await;
    nothing_is_lost_while(&client, &shards, async |shards| {
        for endpoint in ["hostname", "ip"] {
            for node in shards.nodes() {
                prefer(node, endpoint);
            }
            // Once before the client has heard of it, and once after.
            for _ in 0..2 {
                for node in shards.primaries() {
                    node.run("CLIENT KILL TYPE normal");
                }
                try_locks(&client, shards).await;
                until_asked(shards);
            }
        }
    })
    .await;
}

/// Has all nodes called by this hostname from now on.
fn announce(shards: &Shards, hostname: &str) {
    for node in shards.nodes() {
        prefer(node, "hostname");
        let announce = format!("CONFIG SET cluster-announce-hostname {hostname}");
        assert_eq!(node.run(announce), "OK");
    }
    let all_know = |node: &Server| {
        let nodes = node.run("CLUSTER NODES").text();
        // Behind it there may be more.
        nodes.matches(&format!(",{hostname}")).count() == shards.nodes().len()
    };
    until("all are called so", || shards.nodes().iter().all(all_know));
}

async fn try_lock(client: &Client, name: &str) {
    let tried = timeout(Duration::from_secs(5), client.lock(name).try_lock()).await;
    let guard = tried.expect("an answer").unwrap();
    soon(guard.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirect_to_a_name_that_leads_nowhere_costs_no_connection_that_is_there() {
    let shards = Shards::start();
    let client = connect(calm(), &shards).await;
    nothing_is_lost_while(&client, &shards, async |shards| {
        // Nobody listens there. That it is the same node the cluster tells by its id.
        announce(shards, "127.0.0.2");
        shards.move_slot("k", other_than(shards, "k"));
        try_lock(&client, "{k}").await;
        until_asked(shards);
        try_locks(&client, shards).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_a_stranger_takes_over_is_taken_back() {
    let shards = with_hostnames();
    let client = connect(calm(), &shards).await;
    let guard = client.lock("k").lock().await.unwrap();
    let stranger = shards
        .primary_of("k")
        .session_connection(&session_of(&client));
    try_lock(&client, "{k}").await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    drop(stranger);
}

/// Has the other nodes tell this port of the node.
pub(super) fn announce_port(shards: &Shards, node: &Server, port: u16) {
    let announce = format!("CONFIG SET cluster-announce-port {port}");
    assert_eq!(node.run(announce), "OK");
    let id = node.run("CLUSTER MYID").text();
    until("all call it so", || {
        shards.nodes().iter().all(|one| {
            let nodes = one.run("CLUSTER NODES").text();
            let line = nodes.lines().find(|line| line.starts_with(&id));
            line.unwrap().contains(&format!(":{port}@"))
        })
    });
}

/// Has the node that serves "k" called by the port of a proxy. Where to ask the others.
fn behind_a_proxy(shards: &Shards) -> (&Server, Proxy, Vec<String>) {
    let node = shards.primary_of("k");
    let proxy = Proxy::to(node.address());
    announce_port(shards, node, proxy.address().port());
    let others = shards.nodes().iter();
    let others = others.filter(|other| other.port() != node.port());
    (node, proxy, others.map(url).collect())
}

/// The address by which the node was called leads to another server, and then the node is called
/// by its own.
async fn give_the_address_to(other: &Server, proxy: &Proxy, shards: &Shards, node: &Server) {
    proxy.redirect(other.address());
    until("the client is there", || {
        other.run("CLIENT LIST").text().contains("cmd=rlock.events")
    });
    announce_port(shards, node, node.port());
    // The client asks every five seconds, maybe this server first.
    tokio::time::sleep(Duration::from_secs(11)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_at_the_old_address_of_a_node_grants_nothing() {
    let shards = Shards::start();
    let stranger = Server::start();
    let (node, proxy, urls) = behind_a_proxy(&shards);
    let client = calm().connect_cluster(&urls).await.unwrap();
    try_lock(&client, "k").await;
    give_the_address_to(&stranger, &proxy, &shards, node).await;
    let guard = soon(client.lock("k").lock()).await.unwrap();
    assert_eq!(node.holder("k").as_deref(), Some(guard.owner().as_str()));
    let rival = calm().connect_cluster(&urls).await.unwrap();
    let error = soon(rival.lock("k").try_lock()).await.unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    assert!(!guard.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_primary_at_the_old_address_of_a_node_keeps_nobody_from_it() {
    let shards = Shards::start();
    let empty = Server::builder().cluster().start();
    let (node, proxy, urls) = behind_a_proxy(&shards);
    let client = calm().connect_cluster(&urls).await.unwrap();
    try_lock(&client, "k").await;
    let nodes = empty.run("CLUSTER NODES").text();
    let (_, bus) = nodes.split_once('@').unwrap();
    let bus: String = bus.chars().take_while(char::is_ascii_digit).collect();
    let meet = format!("CLUSTER MEET 127.0.0.1 {} {bus}", empty.port());
    let known = shards.nodes().iter().find(|one| one.port() != node.port());
    assert_eq!(known.unwrap().run(meet), "OK");
    until("it has heard of all", || {
        let info = empty.run("CLUSTER INFO").text();
        info.contains("cluster_known_nodes:7") && info.contains("cluster_state:ok")
    });
    give_the_address_to(&empty, &proxy, &shards, node).await;
    for _ in 0..5 {
        try_lock(&client, "k").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_change_places_cost_no_guard_no_wait_and_few_connections() {
    let shards = Shards::start();
    let (x, y) = (shards.primary_of("k"), other_than(&shards, "k"));
    let proxies = [x, y].map(|node| Proxy::to(node.address()));
    let [first, second] = proxies.each_ref().map(|proxy| proxy.address().port());
    announce_port(&shards, x, first);
    announce_port(&shards, y, second);
    let at_y = shards.name_at(y, "y");
    // Until all nodes call each by its new address, the sessions may be without a connection.
    let client = connect(calm().grace(Duration::from_secs(60)), &shards).await;
    let other = connect(calm(), &shards).await;
    let (mut guards, mut others, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for (node, name) in [(x, "k"), (y, &*at_y)] {
        let wanted = format!("{{{name}}}:wanted");
        guards.push(client.lock(name).lock().await.unwrap());
        others.push(other.lock(&*wanted).lock().await.unwrap());
        waiting.push(wait_in_queue(node, &client, &wanted));
    }
    let received = || [x, y].map(|node| node.info_number("total_connections_received"));
    for (at_first, at_second) in [(y, x), (x, y)] {
        proxies[0].lead_to(at_first.address());
        proxies[1].lead_to(at_second.address());
        let set = format!("CONFIG SET cluster-announce-port {first}");
        assert_eq!(at_first.run(set), "OK");
        announce_port(&shards, at_second, second);
        announce_port(&shards, at_first, first);
        until_asked(&shards);
        for guard in &guards {
            assert!(!guard.is_lost(), "{:?}", soon(guard.lost()).await);
            soon(guard.renew()).await.unwrap();
        }
        assert!(waiting.iter().all(|wait| !wait.is_finished()));
        // On a busy machine it takes its time until both clients have connected anew.
        let mut windows = Vec::new();
        while windows
            .last()
            .is_none_or(|(open, tried)| *open > 9 || *tried >= 12)
        {
            assert!(windows.len() < 10, "(open, tried in 5 s): {windows:?}");
            let before = received();
            tokio::time::sleep(Duration::from_secs(5)).await;
            let after = received();
            let tried = after[0] + after[1] - before[0] - before[1];
            // Two clients have two to each.
            windows.push(([x, y].map(connections).iter().sum::<usize>(), tried));
        }
    }
}
