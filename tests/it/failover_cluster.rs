//! Replicas of a cluster that become primaries, and a node that is cut off from the others.

use std::thread;
use std::time::Duration;

use rlock_tests::{Conn, Reply, Server, Shards, eventually, in_sync, until};

use crate::everybody::{Everybody, holds};

/// The error for clients that are to go to another node.
const SENT_ON: &[&str] = &["UNBLOCKED ", "MOVED ", "CLUSTERDOWN "];

#[test]
fn a_replica_takes_over_in_good_order_and_then_because_its_primary_dies() {
    let mut shards = Shards::start();
    let tag = format!("{{{}}}", shards.name_at(shards.primaries()[0], "t"));
    let name = format!("k{tag}");

    let (old, new) = (shards.primary_of(&name), shards.replica_of(&name));
    let everybody = Everybody::at(old, &tag);
    let largest = everybody.largest;
    let before = holds(old);
    shards.fail_over(&name);
    assert_eq!(shards.primary_of(&name).port(), new.port());
    everybody.are_sent_away(SENT_ON);
    assert_eq!(holds(new), before);
    let error = old.run(format!("RLOCK.RELEASE {name} alice")).error();
    assert!(error.starts_with("MOVED "), "{error}");
    Everybody::go_on(new, &tag, largest);
    new.run("FLUSHALL");

    let everybody = Everybody::at(new, &tag);
    let largest = everybody.largest;
    in_sync(new, shards.replica_of(&name));
    let before = holds(new);
    shards.kill_primary_of(&name);
    assert_eq!(holds(shards.primary_of(&name)), before);
    Everybody::go_on(shards.primary_of(&name), &tag, largest);
    shards.restart();
    let (primary, replica) = (shards.primary_of(&name), shards.replica_of(&name));
    in_sync(primary, replica);
    assert_eq!(holds(replica), holds(primary));
}

/// A node that cannot reach the majority cannot know whether it still serves its slots. It grants
/// nobody until it knows.
#[test]
fn a_node_that_is_cut_off_grants_nobody() {
    let shards = Shards::start();
    let [node, others @ ..] = &shards.primaries()[..] else {
        panic!("three primaries")
    };
    let name = shards.name_at(node, "k");
    let mut conn = node.connect();
    let mut life = node.session_connection("s");
    conn.take(&name, "alice");
    conn.queue(&name, "bob", "s");
    // The replicas are stopped for longer, so that none of them takes the slots over.
    let replicas = shards.nodes().iter().filter(|other| {
        let is_primary = |primary: &&Server| primary.port() == other.port();
        !shards.primaries().iter().any(is_primary)
    });
    let replicas: Vec<_> = replicas.collect();
    for replica in &replicas {
        replica.freeze();
    }
    for primary in others {
        primary.freeze();
    }
    // Until then alice renews, so that the lease ends after that.
    let renewal = [
        "MULTI",
        &format!("RLOCK.RENEW {name} alice 5000"),
        &format!("PEXPIRETIME {name}"),
        "EXEC",
    ];
    let mut end = 0;
    until("the node knows that it is alone", || {
        let replies = conn.pipeline(&renewal);
        let renewed = replies.iter().all(|reply| !reply.is_error());
        if renewed {
            let told = replies[3].ints();
            assert_eq!(told[0], 1, "she has it still");
            end = told[1];
        }
        let is_down = |told: &Reply| told.is_error() && told.error().starts_with("CLUSTERDOWN ");
        replies.iter().any(is_down)
    });
    until("the lease is over", || time_ms(&mut conn) > end);
    // Nothing can be waited for that should not happen.
    thread::sleep(Duration::from_millis(150));
    assert!(life.run("RLOCK.EVENTS s").events().is_empty());
    for primary in others {
        primary.thaw();
    }
    let granted = eventually("bob is told", || {
        life.run("RLOCK.EVENTS s").events().into_iter().next()
    });
    assert_eq!(granted.0, format!("granted {name} bob"), "{:?}", granted.1);
    for replica in &replicas {
        replica.thaw();
    }
    shards.settle();
    assert_eq!(node.holder(&name).as_deref(), Some("bob"));
}

fn time_ms(conn: &mut Conn) -> i64 {
    let time = conn.run("TIME").texts();
    let [seconds, us] = [0, 1].map(|at| time[at].parse::<i64>().expect("a number"));
    seconds * 1000 + us / 1000
}
