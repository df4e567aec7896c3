//! Races between a client's calls and its events, on real servers; more of them are in
//! `client/test/tests/it/races.rs`.

use std::time::{Duration, Instant};

use rlock_tests::{Server, Shards, until};
use tokio::time::{sleep, timeout};

use super::client::{MS, calm, patient, see_in_queue, soon};
use super::ways::two_ways;

/// A call of EVENTS is on its way while a grant is made and the lock broken: one answer tells
/// of both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loss_that_is_told_together_with_its_grant_is_heard() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, patient()).await;
    let mut alice = server.connect();
    alice.take("k", "alice");
    let lock = client.lock("k");
    let waiting = see_in_queue(&server, "k", async move { lock.lock().await });
    far.cut_to_server();
    // The call that the server has is answered by then.
    sleep(2_500 * MS).await;
    alice.let_go("k", "alice");
    until("it is granted", || server.holder("k").is_some());
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    far.heal();
    let guard = soon(waiting).await.unwrap().unwrap();
    alice.take("k", "alice");
    let told = timeout(5_000 * MS, guard.lost()).await;
    assert!(
        told.is_ok(),
        "alice has the lock, and the guard says that it is held for {:?}",
        guard.valid_for()
    );
}

/// Locks of several slots with a lease of their own: with the last grant all before are
/// renewed, one after the other, and the caller's time is not watched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_timeout_of_several_slots_keeps_its_time() {
    let shards = Shards::start();
    let rt = 1_000 * MS;
    let builder = calm().response_timeout(rt);
    let client = super::client_cluster::connect(builder, &shards).await;
    let mut nodes = shards.primaries();
    nodes.sort_by_key(|node| {
        let slot = node.run(format!("CLUSTER KEYSLOT {}", shards.name_at(node, "s")));
        slot.int()
    });
    // Parts are taken in the order of their slots, so the last is at the last node.
    let slow = nodes[0];
    let mut names: Vec<String> = (0..6)
        .map(|number| shards.name_at(slow, &format!("slow{number}-")))
        .collect();
    let last = shards.name_at(nodes[nodes.len() - 1], "last");
    names.push(last.clone());
    let at_last = shards.primary_of(&last);
    let mut alice = at_last.connect();
    alice.take(&last, "alice");
    // The sessions are there.
    for name in &names[..6] {
        client
            .lock(&**name)
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    let multi = client.multi(names).lease(Duration::from_secs(100));
    let began = Instant::now();
    let call = tokio::spawn(async move { multi.lock_timeout(2_000 * MS).await });
    until("it waits", || !at_last.waiting_owners(&last).is_empty());
    // From now on each answer of the slow node takes less than the response timeout.
    sleep((1_900 * MS).saturating_sub(began.elapsed())).await;
    slow.freeze();
    alice.let_go(&last, "alice");
    let mut slowed = 0;
    while !call.is_finished() && slowed < 40 {
        sleep(600 * MS).await;
        slow.thaw();
        slow.freeze();
        slowed += 1;
    }
    slow.thaw();
    let told = call.await.unwrap();
    let took = began.elapsed();
    assert!(
        took < 2_000 * MS + rt + 500 * MS,
        "took {took:?}, of 2 s and a response timeout of {rt:?}: {}",
        told.is_ok()
    );
}
