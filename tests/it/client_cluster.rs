//! The client in a cluster: every lock at its node, also when that changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rlock_client::{Client, ClientBuilder, LostReason, blocking};
use rlock_tests::{Resharding, Server, Shards, in_sync, patience, until};
use tokio::time::timeout;

use super::client::{
    MS, calls, calm, once_in_ten, poll_once, see_in_queue, soon, url, wait_in_queue,
};
use super::client_faults::kill_session_connection;
use super::client_session::next_random;

pub(super) async fn connect(builder: ClientBuilder, shards: &Shards) -> Client {
    let urls = shards.nodes().iter().filter(|node| node.is_running());
    builder.connect_cluster(urls.map(url)).await.unwrap()
}

/// Nothing is left on any node: no lock, no waiter.
pub(super) fn until_nothing_is_left(shards: &Shards) {
    until("nothing is left", || {
        let empty =
            |node: &&Server| node.run("DBSIZE") == 0 && node.info_number("rlock_waiters") == 0;
        shards.primaries().iter().all(empty)
    });
}

fn refs(names: &[String]) -> impl Iterator<Item = &str> {
    names.iter().map(|name| &**name)
}

/// A name for each of the primaries.
pub(super) fn a_name_each(shards: &Shards, prefix: &str) -> Vec<String> {
    let primaries = shards.primaries();
    primaries
        .iter()
        .map(|node| shards.name_at(node, prefix))
        .collect()
}

/// Another primary than the one that serves the name.
pub(super) fn other_than<'a>(shards: &'a Shards, name: &str) -> &'a Server {
    let serving = shards.primary_of(name).port();
    let mut primaries = shards.primaries().into_iter();
    primaries.find(|node| node.port() != serving).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_lock_is_asked_for_at_the_node_that_serves_it() {
    let shards = Shards::start();
    // Nobody listens at the first, and the second is a replica.
    let seeds = [
        "redis://127.0.0.1:1".to_owned(),
        url(shards.replica_of("k")),
    ];
    let client = calm().connect_cluster(seeds).await.unwrap();
    let primaries = shards.primaries();
    for (node, name) in primaries.iter().zip(a_name_each(&shards, "k")) {
        let guard = client.lock(&*name).lock().await.unwrap();
        assert_eq!(node.holder(&name).as_deref(), Some(guard.owner().as_str()));
        let waiting = wait_in_queue(node, &client, &name);
        guard.unlock().await.unwrap();
        soon(waiting)
            .await
            .unwrap()
            .unwrap()
            .unlock()
            .await
            .unwrap();
        let made = ["acquire", "release", "renew"].map(|command| calls(node, command));
        assert_eq!(made, [2, 2, 0], "one command each, and none sent on");
        let reader = client.rw_lock(&*name).read().await.unwrap();
        drop(reader);
        let writer = soon(client.rw_lock(&*name).write()).await.unwrap();
        writer.downgrade().await.unwrap().unlock().await.unwrap();
    }
    client.shutdown().await;
    until_nothing_is_left(&shards);
}

/// A node that no other has met does not know its own address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_say_where_it_is_is_where_it_was_asked() {
    let node = Server::builder().cluster().start();
    assert_eq!(node.run("CLUSTER ADDSLOTSRANGE 0 16383"), "OK");
    until("it serves all slots", || {
        let state = node.run("CLUSTER INFO").text();
        state.contains("cluster_state:ok")
    });
    let slots = node.run("CLUSTER SLOTS");
    let host = &slots.array()[0].array()[2].array()[0];
    assert_eq!(host, &"", "else this test shows nothing");
    let client = calm().connect_cluster([url(&node)]).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(&node, &client, "k");
    guard.renew().await.unwrap();
    // A later answer about itself names no other node either.
    let list = node.run("CLIENT LIST").text();
    let ours = list.lines().filter(|line| line.contains("cmd=rlock."));
    assert_eq!(ours.count(), 2, "{list}");
    soon(guard.unlock()).await.unwrap();
    soon(soon(waiting).await.unwrap().unwrap().unlock())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_node_that_answers_there_is_no_client() {
    let nobody: [&str; 0] = [];
    let error = Client::connect_cluster(nobody).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let error = Client::connect_cluster(["redis://127.0.0.1:1"])
        .await
        .unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let alone = Server::start();
    let error = Client::connect_cluster([url(&alone)]).await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert!(
        error.to_string().contains("cluster support disabled"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_lock_goes_along_with_its_slot_and_is_renewed_where_it_is() {
    let shards = Shards::start();
    let builder = calm().lease(6_000 * MS).renew_every(300 * MS);
    let client = connect(builder, &shards).await;
    let other = connect(calm(), &shards).await;
    let plain = client.lock("{k}").lock().await.unwrap();
    let (reader, writer) = (client.rw_lock("{k}:r"), client.rw_lock("{k}:w"));
    let (reader, writer) = (reader.read().await.unwrap(), writer.write().await.unwrap());
    let several = client.multi(["{k}:1", "{k}:2"]).lock().await.unwrap();
    let leased = client
        .lock("{k}:l")
        .lease(60_000 * MS)
        .lock()
        .await
        .unwrap();

    let to = other_than(&shards, "k");
    let renewed = calls(to, "renew");
    shards.move_slot("k", to);
    // The watchdog's, and that of the lock which it does not renew.
    until("all are renewed there", || {
        calls(to, "renew") >= renewed + 8
    });
    let lost = [
        plain.is_lost(),
        reader.is_lost(),
        writer.is_lost(),
        several.is_lost(),
    ];
    assert_eq!(lost, [false; 4]);
    assert!(!leased.is_lost());
    let info = to.run("RLOCK.INFO {k}");
    assert_eq!(info.get("owner").text(), plain.owner().as_str());
    assert_eq!(u64::try_from(info.get("token").int()), Ok(plain.token()));
    for name in ["{k}", "{k}:1", "{k}:l"] {
        let error = other.lock(name).try_lock().await.unwrap_err();
        assert!(error.is_not_acquired(), "{error}");
    }
    assert!(
        other
            .rw_lock("{k}:r")
            .try_write()
            .await
            .unwrap_err()
            .is_not_acquired()
    );
    plain.renew().await.unwrap();
    leased.renew().await.unwrap();
    for unlocked in [
        plain.unlock().await,
        reader.unlock().await,
        writer.unlock().await,
        several.unlock().await,
        leased.unlock().await,
    ] {
        unlocked.unwrap();
    }
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_has_moved_does_not_count_on_the_node_it_has_left() {
    let mut shards = Shards::start();
    let grace = 10_000 * MS;
    let client = connect(calm().grace(grace), &shards).await;
    let mut guards = Vec::new();
    for i in 0..20 {
        let lock = client.lock(format!("{{k}}:{i}")).lease(600_000 * MS);
        guards.push(lock.lock().await.unwrap());
    }
    let to = other_than(&shards, "k");
    let at_to = shards.name_at(to, "at-");
    // Attached there for a while when the locks come.
    let always_there = client.lock(&*at_to).lock().await.unwrap();
    let from = shards.primary_of("k").port();
    shards.move_slot("k", to);
    // Not how often it was asked: one may be renewed twice before another is at all.
    until("all are confirmed there", || {
        to.info_number("rlock_session_holds") == 21
    });
    let at_from = |shards: &Shards| {
        let node = shards
            .primaries()
            .into_iter()
            .find(|node| node.port() == from);
        node.map(|node| shards.name_at(node, "at-"))
    };
    let name = at_from(&shards).unwrap();
    shards.kill_primary_of(&name);
    let killed = Instant::now();
    until("half the grace is over", || killed.elapsed() > grace / 2);
    until("and the other half", || killed.elapsed() > grace);
    for guard in &guards {
        assert!(!guard.is_lost(), "{:?}", soon(guard.lost()).await);
    }
    assert!(!always_there.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_has_moved_belongs_to_the_session_at_its_new_node() {
    let shards = Shards::start();
    let other = connect(calm(), &shards).await;
    let urls: Vec<_> = shards.nodes().iter().map(url).collect();
    let process = tokio::runtime::Runtime::new().unwrap();
    // Not renewed by itself, and for longer than this test may take.
    let held = process.spawn(async move {
        let builder = calm().grace(5_000 * MS);
        let client = builder.connect_cluster(urls).await.unwrap();
        client.lock("k").lease(600_000 * MS).lock().await.unwrap()
    });
    let guard = held.await.unwrap();
    let to = other_than(&shards, "k");
    shards.move_slot("k", to);
    until("it is confirmed there", || {
        to.info_number("rlock_session_holds") == 1
    });
    let waiting = wait_in_queue(to, &other, "k");
    // The process dies: it gives nothing back, and its connections close.
    std::mem::forget(guard);
    process.shutdown_background();
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_for_a_lock_that_moves_gets_it_at_its_new_node() {
    let shards = Shards::start();
    let clients = [
        connect(calm(), &shards).await,
        connect(calm(), &shards).await,
    ];
    let guard = clients[0].lock("{k}").lock().await.unwrap();
    let from = shards.primary_of("k");
    let mut waiting: Vec<_> = (0..6)
        .map(|i| wait_in_queue(from, &clients[i % 2], "{k}"))
        .collect();
    let both = clients[1].multi(["{k}:2", "{k}"]);
    let both = see_in_queue(from, "{k}:2", async move { both.lock().await });
    let to = other_than(&shards, "k");
    shards.move_slot("k", to);
    until("all wait there", || to.info_number("rlock_waiters") == 8);
    assert_eq!(from.info_number("rlock_waiters"), 0);
    // Dropped where it stands now.
    waiting.pop().unwrap().abort();
    until("one has left", || to.info_number("rlock_waiters") == 7);
    assert!(!guard.is_lost());
    let both = tokio::spawn(async move { drop(soon(both).await.unwrap().unwrap()) });
    guard.unlock().await.unwrap();
    // They queue again, in a new order.
    let served = waiting.into_iter().map(|waiting| {
        tokio::spawn(async move {
            let guard = soon(waiting).await.unwrap().unwrap();
            guard.unlock().await.unwrap();
        })
    });
    for served in served.collect::<Vec<_>>() {
        soon(served).await.unwrap();
    }
    soon(both).await.unwrap();
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_slot_moves_a_key_is_asked_for_where_it_is() {
    let shards = Shards::start();
    let builder = calm().lease(6_000 * MS).renew_every(200 * MS);
    let client = connect(builder, &shards).await;
    let other = connect(calm(), &shards).await;
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let stays = client.lock("{k}:stays").lock().await.unwrap();
    let goes = client.lock("{k}:goes").lock().await.unwrap();
    let resharding = Resharding::of("k", from, to);
    resharding.open();
    resharding.migrate(&["{k}:goes"]);
    let renewed = (calls(from, "renew"), calls(to, "renew"));
    until("each is renewed where it is", || {
        calls(from, "renew") > renewed.0 + 4 && calls(to, "renew") > renewed.1 + 4
    });
    assert!(!stays.is_lost() && !goes.is_lost());
    for name in ["{k}:stays", "{k}:goes"] {
        let error = other.lock(name).try_lock().await.unwrap_err();
        assert!(error.is_not_acquired(), "{name}: {error}");
    }
    // A name that was not locked yet is taken at the node to which the slot moves.
    let fresh = client.lock("{k}:fresh").lock().await.unwrap();
    let owner = fresh.owner().as_str().to_owned();
    fresh.renew().await.unwrap();
    goes.unlock().await.unwrap();
    let waits = |name: &'static str| {
        let lock = other.lock(name);
        tokio::spawn(async move { lock.lock().await })
    };
    let waiting = [waits("{k}:stays"), waits("{k}:fresh")];
    while resharding.migrate_some(10) {}
    resharding.close(&[]);
    assert_eq!(to.holder("{k}:fresh"), Some(owner));
    assert!(!stays.is_lost() && !fresh.is_lost());
    stays.unlock().await.unwrap();
    fresh.unlock().await.unwrap();
    for waiting in waiting {
        soon(waiting)
            .await
            .unwrap()
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_ahead_of_its_slot_outlives_a_broken_session_connection() {
    let shards = Shards::start();
    let grace = Duration::from_secs(3);
    let client = connect(calm().grace(grace), &shards).await;
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let goes = client.lock("{k}:goes").lock().await.unwrap();
    let stays = client.lock("{k}:stays").lock().await.unwrap();
    let resharding = Resharding::of("k", from, to);
    resharding.open();
    resharding.migrate(&["{k}:goes"]);
    soon(goes.renew()).await.unwrap();
    for node in [from, to] {
        assert_eq!(node.info_number("rlock_session_holds"), 1);
    }
    kill_session_connection(to);
    let lost = timeout(2 * grace, goes.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    assert!(!stays.is_lost());
    assert_eq!(to.info_number("rlock_session_holds"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_ahead_of_its_slot_outlives_it_with_the_defaults_too() {
    let shards = Shards::start();
    let client = connect(Client::builder(), &shards).await;
    let (from, to) = (shards.primary_of("k"), other_than(&shards, "k"));
    let guard = client.lock("{k}:goes").lock().await.unwrap();
    let resharding = Resharding::of("k", from, to);
    resharding.open();
    resharding.migrate(&["{k}:goes"]);
    until("the watchdog has renewed it there", || {
        calls(to, "renew") > 0 && to.info_number("rlock_session_holds") == 1
    });
    kill_session_connection(to);
    let lost = timeout(Duration::from_secs(9), guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_primary_loses_no_replicated_hold_and_no_wait() {
    let mut shards = Shards::start();
    let client = connect(calm(), &shards).await;
    let names = a_name_each(&shards, "k");
    let name = names[0].clone();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(client.lock(&**name).lock().await.unwrap());
    }
    let leased = format!("{{{name}}}:leased");
    let leased = client
        .lock(&*leased)
        .lease(600_000 * MS)
        .lock()
        .await
        .unwrap();
    let broken = format!("{{{name}}}:broken");
    let broken = client.lock(broken).lock().await.unwrap();
    let waiting = wait_in_queue(shards.primary_of(&name), &client, &name);
    shards.settle();
    in_sync(shards.primary_of(&name), shards.replica_of(&name));
    shards.kill_primary_of(&name);

    let heir = shards.primary_of(&name);
    until("the holds are confirmed there", || {
        calls(heir, "renew") >= 3
    });
    until("the wait is there", || {
        heir.waiting_owners(&name).len() == 1
    });
    for guard in &guards {
        guard.renew().await.unwrap();
    }
    leased.renew().await.unwrap();
    assert_eq!(heir.run(format!("RLOCK.BREAK {{{name}}}:broken")), 1);
    assert_eq!(soon(broken.lost()).await, LostReason::Broken);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    leased.unlock().await.unwrap();
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replaced_primary_is_not_connected_to_for_a_wait_that_has_left() {
    let mut shards = Shards::start();
    let client = connect(calm().response_timeout(2_000 * MS), &shards).await;
    let guard = client.lock("k").lock().await.unwrap();
    let old = shards.primary_of("k").port();
    let waiting = wait_in_queue(shards.primary_of("k"), &client, "k");
    in_sync(shards.primary_of("k"), shards.replica_of("k"));
    shards.kill_primary_of("k");
    until("it waits at the new primary", || {
        shards.primary_of("k").waiting_owners("k").len() == 1
    });
    shards.restart();
    soon(guard.renew()).await.unwrap();
    // It is left as soon as the client has asked who serves what.
    tokio::time::sleep(Duration::from_secs(11)).await;
    let node = shards.nodes().iter().find(|node| node.port() == old);
    let received = || node.unwrap().info_number("total_connections_received");
    let before = received();
    tokio::time::sleep(Duration::from_secs(10)).await;
    // One of them asks for this number.
    assert_eq!(received() - before, 1);
    guard.unlock().await.unwrap();
    let next = soon(waiting).await.unwrap().unwrap();
    next.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_the_new_primary_does_not_have_is_lost() {
    let mut shards = Shards::start();
    let client = connect(calm(), &shards).await;
    let guard = client.lock("k").lock().await.unwrap();
    shards.settle();
    let replica = shards.replica_of("k");
    in_sync(shards.primary_of("k"), replica);
    // As if the grant had not reached it in time.
    assert_eq!(replica.run("CONFIG SET replica-read-only no"), "OK");
    assert_eq!(replica.run("FLUSHALL"), "OK");
    shards.kill_primary_of("k");
    assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
    assert!(guard.unlock().await.unwrap_err().is_lost());
    let again = soon(client.lock("k").lock()).await.unwrap();
    again.unlock().await.unwrap();
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_in_good_order_costs_nothing() {
    let shards = Shards::start();
    let builder = calm().lease(10_000 * MS).renew_every(500 * MS);
    let client = connect(builder, &shards).await;
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(shards.primary_of("k"), &client, "k");
    shards.fail_over("k");
    let heir = shards.primary_of("k");
    until("the hold is confirmed there", || calls(heir, "renew") > 0);
    until("the wait is there", || heir.waiting_owners("k").len() == 1);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    soon(waiting)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_of_several_nodes_are_all_or_none() {
    let shards = Shards::start();
    let client = connect(calm(), &shards).await;
    let other = connect(calm(), &shards).await;
    let names = a_name_each(&shards, "k");
    let guard = client.multi(refs(&names)).lock().await.unwrap();
    let named: Vec<_> = guard.names().map(<[u8]>::to_vec).collect();
    assert_eq!(
        named,
        names
            .iter()
            .map(|name| name.clone().into_bytes())
            .collect::<Vec<_>>()
    );
    for name in &names {
        let info = shards.primary_of(name).run(format!("RLOCK.INFO {name}"));
        assert_eq!(info.get("owner").text(), guard.owner().as_str());
        let token = u64::try_from(info.get("token").int()).ok();
        assert_eq!(guard.token_of(name), token);
    }
    assert_eq!(guard.token_of(&names[0]), Some(guard.token()));
    assert_eq!(guard.token_of("another"), None);
    guard.renew().await.unwrap();
    guard.unlock().await.unwrap();
    until_nothing_is_left(&shards);

    // Whichever of them is taken, the others are free when the call returns.
    let all_free_but = |taken: &String| {
        for name in names.iter().filter(|name| *name != taken) {
            let info = shards.primary_of(name).run(format!("RLOCK.INFO {name}"));
            assert_eq!(info.get("count").int(), 0, "{name} beside {taken}");
        }
    };
    let locks = client.multi(refs(&names));
    for taken in &names {
        let held = other.lock(&**taken).lock().await.unwrap();
        for _ in 0..20 {
            let error = locks.try_lock().await.unwrap_err();
            assert!(error.is_not_acquired(), "{error}");
            all_free_but(taken);
        }
        let error = locks.lock_timeout(50 * MS).await.unwrap_err();
        assert!(error.is_not_acquired(), "{error}");
        all_free_but(taken);
        held.unlock().await.unwrap();
    }
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_dropped_half_taken_leave_nothing() {
    let shards = Shards::start();
    let client = connect(calm(), &shards).await;
    let other = connect(calm(), &shards).await;
    let names = a_name_each(&shards, "k");
    for taken in &names {
        let held = other.lock(&**taken).lock().await.unwrap();
        let locks = client.multi(refs(&names));
        let waiting = see_in_queue(shards.primary_of(taken), taken, async move {
            locks.lock().await
        });
        waiting.abort();
        for name in names.iter().filter(|name| *name != taken) {
            soon(other.lock(&**name).lock())
                .await
                .unwrap()
                .unlock()
                .await
                .unwrap();
        }
        held.unlock().await.unwrap();
        until_nothing_is_left(&shards);
    }
    let mut random = 0x9E37_79B9_7F4A_7C15;
    for _ in 0..100 {
        let locks = client.multi(refs(&names));
        let mut pending = Box::pin(locks.lock());
        for _ in 0..next_random(&mut random) % 8 {
            if poll_once(pending.as_mut()).await.is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_micros(next_random(&mut random) % 400)).await;
        }
    }
    client.shutdown().await;
    until_nothing_is_left(&shards);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_of_its_own_begins_with_the_last_part() {
    let shards = Shards::start();
    let client = connect(calm(), &shards).await;
    let other = connect(calm(), &shards).await;
    let names = a_name_each(&shards, "k");
    let lease = 3_500 * MS;
    for taken in &names {
        once_in_ten("the guard is valid", async || {
            let held = other.lock(&**taken).lock().await.unwrap();
            let locks = client.multi(refs(&names)).lease(lease);
            let began = Instant::now();
            let waiting = see_in_queue(shards.primary_of(taken), taken, async move {
                locks.lock().await
            });
            until("the lease would have ended", || began.elapsed() > lease);
            held.unlock().await.unwrap();
            let guard = soon(waiting).await.unwrap().unwrap();
            let is_valid = guard.valid_for() > Duration::ZERO;
            drop(guard);
            until_nothing_is_left(&shards);
            is_valid
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_of_several_nodes_is_lost_with_any_of_its_locks() {
    let shards = Shards::start();
    let client = connect(calm(), &shards).await;
    let names = a_name_each(&shards, "k");
    for name in &names {
        let guard = client.multi(refs(&names)).lock().await.unwrap();
        let broken = shards.primary_of(name).run(format!("RLOCK.BREAK {name}"));
        assert_eq!(broken, 1);
        assert_eq!(soon(guard.lost()).await, LostReason::Broken);
        assert!(guard.is_lost());
        assert_eq!(guard.valid_for(), Duration::ZERO);
        assert!(guard.renew().await.unwrap_err().is_lost());
        assert!(guard.unlock().await.unwrap_err().is_lost());
        until_nothing_is_left(&shards);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn philosophers_at_several_nodes_are_fed() {
    let shards = Shards::start();
    let clients = [
        connect(calm(), &shards).await,
        connect(calm(), &shards).await,
    ];
    let forks: Arc<Vec<_>> = Arc::new((0..5).map(|i| format!("fork {i}")).collect());
    let eaten = Arc::new((0..5).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let dinner: Vec<_> = (0..5_usize)
        .map(|seat| {
            let (forks, eaten) = (Arc::clone(&forks), Arc::clone(&eaten));
            let client = clients[seat % 2].clone();
            tokio::spawn(async move {
                let places = [seat, (seat + 1) % 5];
                let locks = client.multi(places.map(|place| &*forks[place]));
                for _ in 0..20 {
                    let guard = locks.lock().await.unwrap();
                    let seen = places.map(|place| eaten[place].load(Ordering::SeqCst));
                    tokio::task::yield_now().await;
                    for (place, seen) in places.into_iter().zip(seen) {
                        eaten[place].store(seen + 1, Ordering::SeqCst);
                    }
                    guard.unlock().await.unwrap();
                }
            })
        })
        .collect();
    for philosopher in dinner {
        let fed = timeout(patience(Duration::from_secs(60)), philosopher);
        fed.await.unwrap().unwrap();
    }
    let counts: Vec<_> = eaten.iter().map(|one| one.load(Ordering::SeqCst)).collect();
    assert_eq!(counts, [40; 5], "no update was lost");
    until_nothing_is_left(&shards);
}

/// Takes locks of one slot and gives them back until it is told to stop, some of the calls dropped
/// while pending, some entered twice: how often each was held.
async fn work(client: Client, seed: u64, held: Arc<[AtomicU64; 3]>, stop: Arc<AtomicBool>) -> u64 {
    let mut random = 0x9E37_79B9_7F4A_7C15 ^ (seed << 9);
    let mut counted = 0;
    while !stop.load(Ordering::SeqCst) {
        let which = (next_random(&mut random) % 3) as usize;
        let owner = client.owner();
        let lock = client.lock(format!("{{k}}:{which}")).owner(&owner);
        if next_random(&mut random).is_multiple_of(4) {
            let pause = Duration::from_micros(next_random(&mut random) % 3_000);
            let _ = timeout(pause, lock.lock()).await;
            continue;
        }
        let guard = soon(lock.lock()).await.unwrap();
        let seen = held[which].load(Ordering::SeqCst);
        if next_random(&mut random).is_multiple_of(4) {
            let again = soon(lock.lock()).await.unwrap();
            assert_eq!(again.token(), guard.token());
            drop(again);
        }
        tokio::task::yield_now().await;
        assert!(
            !guard.is_lost(),
            "{guard:?}: {:?}",
            soon(guard.lost()).await
        );
        held[which].store(seen + 1, Ordering::SeqCst);
        counted += 1;
        guard.unlock().await.unwrap();
    }
    counted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_to_and_fro_under_traffic_loses_no_update() {
    let shards = Shards::start();
    let builder = calm();
    let clients = [
        connect(builder.clone(), &shards).await,
        connect(builder, &shards).await,
    ];
    let held = Arc::new([const { AtomicU64::new(0) }; 3]);
    let stop = Arc::new(AtomicBool::new(false));
    let work = |i: u64| {
        let client = clients[(i % 2) as usize].clone();
        tokio::spawn(work(client, i, Arc::clone(&held), Arc::clone(&stop)))
    };
    let workers: Vec<_> = (0..8).map(work).collect();
    for _ in 0..6 {
        let sum = || {
            held.iter()
                .map(|one| one.load(Ordering::SeqCst))
                .sum::<u64>()
        };
        let before = sum();
        until("work goes on", || sum() > before + 20);
        shards.move_slot("k", other_than(&shards, "k"));
    }
    stop.store(true, Ordering::SeqCst);
    let mut counted = 0;
    for worker in workers {
        counted += soon(worker).await.unwrap();
    }
    let sum: u64 = held.iter().map(|one| one.load(Ordering::SeqCst)).sum();
    assert_eq!(sum, counted, "no update was lost");
    for client in clients {
        soon(client.shutdown()).await;
    }
    until_nothing_is_left(&shards);
}

#[test]
fn without_async_too() {
    let shards = Shards::start();
    let client = blocking::ClientBuilder::from(calm())
        .connect_cluster([url(&shards.nodes()[0])])
        .unwrap();
    let names = a_name_each(&shards, "k");
    let guard = client.multi(refs(&names)).lock().unwrap();
    assert!(guard.token_of(&names[2]).is_some());
    guard.unlock().unwrap();
    until_nothing_is_left(&shards);
}
