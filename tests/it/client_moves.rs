//! The client, when a slot moves and answers are lost or late meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::cmd;
use rlock_client::{Client, Error};
use rlock_tests::{Cluster, Proxy, Resharding, Server, Shards, slot_of, until};
use tokio::task::block_in_place;
use tokio::time::timeout;

use super::client::{MS, url};
use super::client_cluster::{a_name_each, other_than};
use super::client_cluster_names::announce_port;
use super::client_faults::session_connections;

/// Gives the replicas of this node to another. Valkey asks them before a slot may move, and they
/// would answer through the proxy.
fn leave_without_replica(shards: &Shards, node: &Server, other: &Server) {
    let id = other.run("CLUSTER MYID").text();
    let replica = shards.replica_of(shards.name_at(node, "any").as_str());
    assert_eq!(replica.run(format!("CLUSTER REPLICATE {id}")), "OK");
    until("it has none", || node.info_number("connected_slaves") == 0);
}

/// Waits until all primaries say that this one serves the slot of the name, and that it stays.
fn until_all_know(shards: &Shards, name: &str, serving: &Server) {
    let slot = slot_of(serving, name);
    let id = serving.run("CLUSTER MYID").text();
    until("all know who serves it", || {
        shards.primaries().iter().all(|one| {
            let nodes = one.run("CLUSTER NODES").text();
            let line = nodes.lines().find(|line| line.starts_with(&id)).unwrap();
            let has = line.split(' ').skip(8).any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (first, last) = (first.parse::<i64>(), last.parse::<i64>());
                first.is_ok_and(|first| first <= slot) && last.is_ok_and(|last| slot <= last)
            });
            has && !nodes.contains(&format!("[{slot}-"))
        })
    });
}

/// The new node carries the renewal out, and its answer is lost: the hold belongs to the session
/// there from then on, and that session ends. The guard must not count on the session at the node
/// that the slot has left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unanswered_renewal_at_the_new_node_makes_no_second_owner() {
    let shards = Shards::start();
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let proxy = Proxy::to(to.address());
    leave_without_replica(&shards, to, from);
    announce_port(&shards, to, proxy.address().port());
    let builder = Client::builder().grace(1_000 * MS).lease(20_000 * MS);
    let client = builder.connect_cluster([url(from)]).await.unwrap();
    let _there = client
        .lock(shards.name_at(to, "there"))
        .lock()
        .await
        .unwrap();
    let guard = client.lock("k").lock().await.unwrap();

    proxy.cut_to_client();
    shards.move_slot("k", to);
    until("it belongs to the session at its new node", || {
        to.info_number("rlock_session_holds") == 2
    });
    // Its connections break, and new ones get no answer.
    proxy.sever();
    let granted = block_in_place(|| {
        let mut rival = to.connect();
        rival.send("RLOCK.ACQUIRE k rival 600000 BLOCK 60000");
        rival.read_within(Duration::from_secs(70))
    });
    let (is_lost, valid_for) = (guard.is_lost(), guard.valid_for());
    assert_eq!(granted.held().0, 1);
    assert!(
        is_lost,
        "a guard is held for {valid_for:?} beside another owner"
    );
}

/// A command that was sent on with `ASK` arrives late: the slot has come back meanwhile, and is on
/// its way once more. The node at which it arrives cannot know that the other has granted the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_command_behind_an_ask_makes_no_second_owner() {
    late_behind_an_ask(false).await;
}

/// The same, and the caller has dropped its call before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_command_behind_an_ask_of_a_caller_who_has_gone_leaves_nothing() {
    late_behind_an_ask(true).await;
}

async fn late_behind_an_ask(has_gone: bool) {
    let shards = Shards::start();
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let is_other = |node: &&Server| ![from.port(), to.port()].contains(&node.port());
    let bystanders: Vec<_> = shards.primaries().into_iter().filter(is_other).collect();
    let proxy = Proxy::to(to.address());
    leave_without_replica(&shards, to, from);
    announce_port(&shards, to, proxy.address().port());
    let client = Client::builder()
        .connect_cluster([url(from)])
        .await
        .unwrap();
    let rival = Client::builder()
        .connect_cluster([url(from)])
        .await
        .unwrap();
    drop(
        client
            .lock(shards.name_at(to, "there"))
            .lock()
            .await
            .unwrap(),
    );

    let there = Resharding::of("k", from, to);
    let back = Resharding::of("k", to, from);
    there.open();
    let asked = from.info("errorstat_ASK");
    proxy.cut_to_server();
    let lock = client.lock("k");
    let waiting = tokio::spawn(async move { lock.lock().await });
    until("it is told to ask the other", || {
        from.info("errorstat_ASK") != asked
    });
    there.close(&bystanders);
    until_all_know(&shards, "k", to);
    back.open();
    back.close(&bystanders);
    until_all_know(&shards, "k", from);
    let theirs = rival.lock("k").lock().await.unwrap();
    assert_eq!(from.holder("k").as_deref(), Some(theirs.owner().as_str()));
    there.open();
    if has_gone {
        waiting.abort();
    }
    proxy.heal();
    until("the late command has arrived", || {
        let waiting = from.waiting_owners("k").len();
        to.info("cmdstat_rlock.acquire").is_some() && (has_gone || waiting == 1)
    });
    assert!((has_gone || !waiting.is_finished()) && !theirs.is_lost());
    // It would be in the way of the lock that moves, and be taken for that the next time.
    until("what the late command has got is given back", || {
        to.info_number("rlock_session_holds") == 0
    });
    theirs.unlock().await.unwrap();
    if !has_gone {
        let mine = timeout(10_000 * MS, waiting).await.unwrap();
        assert!(!mine.unwrap().unwrap().is_lost());
    }
}

/// A key goes ahead of its slot, and comes back before a command that was sent after it has
/// arrived. The node that says that nothing is held is not the one that has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_goes_ahead_of_its_slot_and_comes_back_is_held_still() {
    let shards = Shards::start();
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let proxy = Proxy::to(to.address());
    leave_without_replica(&shards, to, from);
    announce_port(&shards, to, proxy.address().port());
    // A machine may be slow.
    let client = Client::builder().response_timeout(20_000 * MS);
    let client = client.lease(60_000 * MS).grace(60_000 * MS);
    let client = client.connect_cluster([url(from)]).await.unwrap();
    let there = client.lock(shards.name_at(to, "there"));
    drop(there.lock().await.unwrap());
    let guard = client.lock("k").lock().await.unwrap();
    let (ahead, back) = (Resharding::of("k", from, to), Resharding::of("k", to, from));
    let guard = Arc::new(guard);
    for verb in ["renew", "guard"] {
        let mine = Arc::clone(&guard);
        let told = late(&ahead, &back, from, &proxy, verb, async move {
            match verb {
                "renew" => mine.renew().await,
                _ => mine.call::<i64>(cmd("EXISTS").arg("k")).await.map(drop),
            }
        });
        told.await.unwrap();
    }
    let guard = Arc::into_inner(guard).unwrap();
    assert!(!guard.is_lost());
    let told = late(&ahead, &back, from, &proxy, "release", guard.unlock());
    told.await.unwrap();
    assert_eq!(from.holder("k"), None);
}

/// Does something while the key is ahead, which arrives when it has come back.
async fn late(
    ahead: &Resharding<'_>,
    back: &Resharding<'_>,
    from: &Server,
    proxy: &Proxy,
    verb: &str,
    what: impl Future<Output = Result<(), Error>> + Send + 'static,
) -> Result<(), Error> {
    let asked = || from.info(&format!("cmdstat_rlock.{verb}"));
    ahead.open();
    proxy.cut_to_server();
    let before = asked();
    ahead.migrate(&["k"]);
    let told = tokio::spawn(what);
    until("it is told to ask the other", || asked() != before);
    // It does not move after all, and the other has not heard of that yet.
    let stable = format!("CLUSTER SETSLOT {} STABLE", slot_of(from, "k"));
    assert_eq!(from.run(stable), "OK");
    back.migrate(&["k"]);
    proxy.heal();
    timeout(30_000 * MS, told).await.unwrap().unwrap()
}

/// "It is renewed where its key is (`ASK`)", also where replicas have to acknowledge it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledged_hold_is_renewed_where_its_key_is() {
    let shards = Shards::start();
    let builder = Client::builder().lease(3_000 * MS).renew_every(300 * MS);
    let builder = builder.acknowledged_by(1, 1_000 * MS);
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let client = builder.connect_cluster([url(from)]).await.unwrap();
    let guard = client.lock("{k}:goes").lock().await.unwrap();
    let resharding = Resharding::of("k", from, to);
    resharding.open();
    resharding.migrate(&["{k}:goes"]);
    guard.renew().await.unwrap();
    let fresh = client.lock("{k}:fresh").lock().await.unwrap();
    let lost = timeout(5_000 * MS, guard.lost()).await;
    assert!(lost.is_err() && !fresh.is_lost(), "{lost:?}");
}

/// The same once the slot has moved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledged_lock_of_a_slot_that_has_moved_is_taken_and_renewed() {
    let shards = Shards::start();
    let builder = Client::builder().acknowledged_by(1, 1_000 * MS);
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let client = builder.connect_cluster([url(from)]).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    shards.move_slot("k", to);
    guard.renew().await.unwrap();
    let fresh = client.lock("{k}:fresh").lock().await.unwrap();
    assert!(!guard.is_lost() && !fresh.is_lost());
}

/// A node without a slot is known like others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_slot_of_a_new_node_moves_like_others() {
    let cluster = Cluster::start();
    let builder = Client::builder().lease(3_000 * MS).renew_every(300 * MS);
    let seed = [url(&cluster.first)];
    let client = builder.connect_cluster(seed).await.unwrap();
    let guard = client.lock("{k}:goes").lock().await.unwrap();
    cluster.open_slot_of("{k}:goes");
    cluster.migrate("{k}:goes");
    guard.renew().await.unwrap();
    let fresh = client.lock("{k}:fresh").lock().await.unwrap();
    let lost = timeout(5_000 * MS, guard.lost()).await;
    assert!(lost.is_err() && !fresh.is_lost(), "{lost:?}");
    let connections = session_connections(&cluster.second);
    cluster.close_slot_of("{k}:goes");
    let sent_on = || cluster.first.info("errorstat_MOVED");
    let began = Instant::now();
    loop {
        let before = sent_on();
        guard.renew().await.unwrap();
        if sent_on() == before {
            break;
        }
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "it is not at home there"
        );
    }
    // The session there has kept its connection.
    assert_eq!(session_connections(&cluster.second), connections);
    fresh.unlock().await.unwrap();
    let fresh = client.lock("{k}:fresh").lock().await.unwrap();
    assert!(!guard.is_lost() && !fresh.is_lost());
}

/// A node with its first slot on its way stands still for a part of the grace. That costs no guard:
/// it is asked again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_node_that_stands_still_for_a_while_costs_no_guard() {
    let cluster = Cluster::start();
    let builder = Client::builder().renew_every(300 * MS);
    let seed = [url(&cluster.first)];
    let client = builder.connect_cluster(seed).await.unwrap();
    let guard = client.lock("{k}:goes").lock().await.unwrap();
    cluster.open_slot_of("{k}:goes");
    cluster.migrate("{k}:goes");
    guard.renew().await.unwrap();
    let since = Instant::now();
    assert_eq!(cluster.second.run("CLIENT PAUSE 2500 ALL"), "OK");
    let mut renewed = None;
    while since.elapsed() < 20_000 * MS && renewed.is_none() {
        assert!(!guard.is_lost(), "after {:?}", since.elapsed());
        renewed = guard
            .renew()
            .await
            .ok()
            .filter(|()| since.elapsed() > 3_000 * MS);
    }
    assert!(renewed.is_some() && !guard.is_lost());
}

/// Locks that have two keys find them at no node while one of them has gone ahead, or may have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_wait_until_the_keys_of_a_slot_are_together() {
    let shards = Shards::start();
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let builder = Client::builder().response_timeout(500 * MS);
    let client = builder.connect_cluster([url(from)]).await.unwrap();
    let resharding = Resharding::of("k", from, to);
    resharding.open();
    let (lock, semaphore) = (client.rw_lock("{k}:rw"), client.semaphore("{k}:s", 2));
    let writing = tokio::spawn(async move { lock.write().await });
    let entering = tokio::spawn(async move { semaphore.acquire().await });
    let tried = client.rw_lock("{k}:rw").try_write().await;
    assert!(tried.unwrap_err().is_unavailable());
    let began = Instant::now();
    until("they have asked for longer than a reply may take", || {
        began.elapsed() > 2_000 * MS && to.info("errorstat_TRYAGAIN").is_some()
    });
    assert!(!writing.is_finished() && !entering.is_finished());
    resharding.close(&[]);
    for outcome in [
        writing.await.unwrap().map(drop),
        entering.await.unwrap().map(drop),
    ] {
        outcome.unwrap();
    }
}

/// Two of three nodes are slow, and the last is silent: a call that does not wait has the time of
/// one answer for all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_does_not_wait_ends_in_time_however_many_nodes_it_asks() {
    let shards = Shards::start();
    let primaries = shards.primaries();
    let proxies = primaries.iter().map(|node| {
        let proxy = Proxy::to(node.address());
        announce_port(&shards, node, proxy.address().port());
        proxy
    });
    let proxies: Vec<_> = proxies.collect();
    let response_timeout = 2_000 * MS;
    let builder = Client::builder().response_timeout(response_timeout);
    let urls = proxies
        .iter()
        .map(|one| format!("redis://{}", one.address()));
    let client = builder.connect_cluster(urls).await.unwrap();
    let mut names = a_name_each(&shards, "n");
    names.sort_by_key(|name| slot_of(primaries[0], name));
    for name in &names {
        client
            .lock(name)
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    // They are asked in this order, as the slots are theirs in the order of their start.
    proxies[0].delay(800 * MS);
    proxies[1].delay(800 * MS);
    proxies[2].cut_to_client();
    let began = Instant::now();
    let told = client.multi(&names).lock_timeout(Duration::ZERO).await;
    let took = began.elapsed();
    assert!(!told.unwrap_err().is_not_acquired());
    // Each had a time of its own before: 5.2 s.
    assert!(took < 2 * response_timeout, "{took:?}");
}

/// A slot that nobody serves is an outage: a call that meets it at its beginning ends in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_for_a_slot_that_nobody_serves_is_unavailable() {
    let cluster = Cluster::start();
    let builder = Client::builder().response_timeout(500 * MS);
    let seed = [url(&cluster.first)];
    let client = builder.connect_cluster(seed).await.unwrap();
    let slot = slot_of(&cluster.first, "k");
    assert_eq!(cluster.first.run(format!("CLUSTER DELSLOTS {slot}")), "OK");
    until("the cluster is down", || {
        let told = cluster.first.run("RLOCK.ACQUIRE k probe 1000");
        told.is_error() && told.error().starts_with("CLUSTERDOWN ")
    });
    let told = timeout(20_000 * MS, client.lock("k").lock()).await;
    assert!(told.unwrap().unwrap_err().is_unavailable());
}
