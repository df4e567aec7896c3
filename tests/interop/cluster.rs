//! Redisson in a cluster, where it subscribes to sharded channels.

use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Cluster, Server, slot_of, until};

use crate::java::Redisson;
use crate::measure::{A_WHILE, AT_ONCE, WakeUps};
use crate::rounds;

/// A cluster in which each of the two nodes has half of the slots.
fn halves() -> Cluster {
    let cluster = Cluster::start();
    // Slots of the second node as both see them; its epoch is the higher, so its claim wins.
    assert_eq!(cluster.first.run("CLUSTER DELSLOTSRANGE 8192 16383"), "OK");
    assert_eq!(cluster.second.run("CLUSTER DELSLOTSRANGE 8192 16383"), "OK");
    assert_eq!(cluster.second.run("CLUSTER ADDSLOTSRANGE 8192 16383"), "OK");
    until("both nodes agree on the halves", || {
        [&cluster.first, &cluster.second].iter().all(|node| {
            node.run("CLUSTER INFO").text().contains("cluster_state:ok")
                && node.run("CLUSTER SLOTS").array().len() == 2
        })
    });
    cluster
}

/// A name whose slot lies with the first node, and one whose slot lies with the second.
fn names(cluster: &Cluster) -> [(&Server, String); 2] {
    names_like(cluster, "lock-#")
}

/// Such names, with a number where the `#` stands.
fn names_like<'a>(cluster: &'a Cluster, like: &str) -> [(&'a Server, String); 2] {
    let name = |is_first: bool| {
        let name = (0..).map(|number: u32| like.replace('#', &number.to_string()));
        let mut name = name.filter(|name| (slot_of(&cluster.first, name) < 8192) == is_first);
        name.next().expect("one of a few")
    };
    [(&cluster.first, name(true)), (&cluster.second, name(false))]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_on_every_node_of_a_cluster_lose_no_update() {
    const ROUNDS: u32 = 300;
    let cluster = halves();
    let url = format!("redis://{}", cluster.first.address());
    let ours = rounds::calm().connect_cluster([&*url]).await.unwrap();
    let clients = [(); 2].map(|()| Redisson::of_cluster(&cluster.first));
    // With braces, so that the counter is where its lock is.
    let names = names_like(&cluster, "{lock-#}");
    let mut owners = Vec::new();
    let mut tasks = Vec::new();
    for (node, name) in &names {
        for client in &clients {
            let owner = client.owner();
            owner.tell(&format!("lock {name} rounds {ROUNDS} 1000"));
            owners.push(owner);
        }
        let rounds = rounds::of_the_crate(ours.clone(), node.connect(), name.clone(), ROUNDS);
        tasks.push(tokio::spawn(rounds));
    }
    thread::scope(|scope| {
        for (node, name) in &names {
            scope.spawn(move || rounds::play(node, name, "plain-1", "", ROUNDS));
        }
    });
    for task in tasks {
        task.await.unwrap();
    }
    for owner in &owners {
        let deadline = Duration::from_secs(120);
        assert_eq!(owner.answer_within(deadline).text, ROUNDS.to_string());
    }
    ours.shutdown().await;
    for (node, name) in &names {
        rounds::check(node, name, ROUNDS * 4, 100);
    }
}

/// Redisson has subscribed to the sharded channel alone, so it gets only that message.
#[test]
fn it_is_the_sharded_message_that_wakes_java() {
    let cluster = halves();
    let redisson = Redisson::of_cluster(&cluster.first);
    let java = redisson.owner();
    let [(node, name), _] = names(&cluster);
    let mut conn = node.connect();
    conn.take(&name, "ours");
    java.waits(&format!("lock {name} lock"));
    let channels = node.run("PUBSUB CHANNELS redisson*");
    assert_eq!(channels.texts(), Vec::<String>::new());
    assert_eq!(node.run("CONFIG SET rlock.publish classic"), "OK");
    assert_eq!(conn.let_go(&name, "ours"), 0);
    java.has_not_answered_within(A_WHILE);
    assert_eq!(node.run("CONFIG SET rlock.publish sharded"), "OK");
    conn.take(&name, "ours");
    assert_eq!(conn.let_go(&name, "ours"), 0);
    assert_eq!(java.answer_within(AT_ONCE).text, "ok");
}

#[test]
fn wake_ups_go_both_ways_on_every_node_of_a_cluster() {
    let cluster = halves();
    let redisson = Redisson::of_cluster(&cluster.first);
    let java = redisson.owner();
    let nodes = [&cluster.first, &cluster.second];
    let mut java_wakes = WakeUps::of("in a cluster, RELEASE wakes Redisson's lock()", &nodes);
    let mut we_wake = WakeUps::of(
        "in a cluster, Redisson's unlock() wakes ACQUIRE … BLOCK",
        &nodes,
    );
    for (node, name) in names(&cluster) {
        let mut conn = node.connect();
        for _ in 0..10 {
            conn.take(&name, "ours");
            java.waits(&format!("lock {name} lock"));
            let channels = node.run("PUBSUB SHARDCHANNELS redisson_lock__channel:*");
            assert_eq!(
                channels.texts(),
                [format!("redisson_lock__channel:{{{name}}}")]
            );
            let freed = Instant::now();
            assert_eq!(conn.let_go(&name, "ours"), 0);
            let answer = java.answer();
            assert_eq!(answer.text, "ok");
            java_wakes.add(freed, answer.ended);

            let mut waiter = node.wait_in_queue(&name, "ours");
            java.tell(&format!("lock {name} unlock"));
            waiter.read().held();
            let woken = Instant::now();
            we_wake.add(java.answer().began, woken);
            assert_eq!(waiter.let_go(&name, "ours"), 0);
        }
    }
    java_wakes.check();
    we_wake.check();
}

#[test]
fn a_fair_head_wakes_in_a_cluster() {
    let cluster = halves();
    let redisson = Redisson::of_cluster(&cluster.first);
    let java = redisson.owner();
    for (node, name) in names(&cluster) {
        let mut conn = node.connect();
        conn.take(&name, "ours");
        java.waits(&format!("fair {name} lock"));
        assert_eq!(conn.let_go(&name, "ours"), 0);
        assert_eq!(java.answer_within(AT_ONCE).text, "ok");
        java.does(&format!("fair {name} unlock"));
    }
}

#[test]
fn a_read_write_lock_wakes_both_ways_in_a_cluster() {
    let cluster = halves();
    let redisson = Redisson::of_cluster(&cluster.first);
    let java = redisson.owner();
    for (node, name) in names(&cluster) {
        let mut conn = node.connect();
        for (ours, theirs) in [("READ", "write"), ("WRITE", "read")] {
            conn.run(format!("RLOCK.ACQUIRE {name} ours 30000 {ours}"))
                .held();
            java.waits(&format!("{theirs} {name} lock"));
            assert_eq!(conn.run(format!("RLOCK.RELEASE {name} ours {ours}")), 0);
            assert_eq!(java.answer_within(AT_ONCE).text, "ok");
            let wait = format!("RLOCK.ACQUIRE {name} ours 30000 WRITE BLOCK 0");
            let mut waiter = node.blocked_in(&wait);
            java.does(&format!("{theirs} {name} unlock"));
            waiter.read_within(AT_ONCE).held();
            assert_eq!(waiter.run(format!("RLOCK.RELEASE {name} ours WRITE")), 0);
        }
    }
}
