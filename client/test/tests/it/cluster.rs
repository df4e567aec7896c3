//! Slots that move between nodes while locks in them are held and waited for, and a node that is
//! replaced by its replica.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rlock_client::{Client, Error, LostReason};
use rlock_test::{Cluster, Direction, Host, Network};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

const NODES: [&str; 3] = ["one:6379", "two:6379", "three:6379"];

/// A cluster, and a client there with a grace of a minute, whose guards outlast a silent node.
async fn with_a_minute(network: &Network) -> Result<(Cluster, Host, Client), Error> {
    let (cluster, host) = (network.cluster(&NODES), network.host());
    let settings = Client::builder().dial(host.dial());
    let settings = settings.grace(Duration::from_secs(60));
    let client = settings.connect_cluster(["redis://one"]).await?;
    Ok((cluster, host, client))
}

async fn connect(network: &Network) -> Result<Client, Error> {
    let settings = Client::builder()
        .dial(network.host().dial())
        .grace(Duration::from_secs(20));
    settings.connect_cluster(["redis://one"]).await
}

fn other(cluster: &Cluster, name: &str) -> usize {
    cluster
        .node_of(name)
        .wrapping_add(1)
        .checked_rem(NODES.len())
        .unwrap_or(0)
}

#[test]
fn each_lock_is_at_the_node_that_serves_its_slot() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let cluster = network.cluster(&NODES);
        let client = connect(&network).await?;
        let mut used = [false; NODES.len()];
        for name in ["a", "b", "c", "d", "e"] {
            let guard = client.lock(name).lock().await?;
            let node = cluster.node_of(name);
            used[node] = true;
            assert_eq!(cluster.node(node).holders(name).len(), 1);
            guard.unlock().await?;
        }
        assert!(used.iter().filter(|used| **used).count() > 1);
        let guard = client.multi(["a", "b", "c"]).lock().await?;
        guard.unlock().await?;
        let (_writes, began) = (client.rw_lock("a").write().await?, Instant::now());
        let refused = client.lock("a").lock().await.map(drop);
        assert!(refused.is_err_and(|error| !error.is_unavailable()));
        assert!(began.elapsed() < Duration::from_millis(10), "it is final");
        Ok(())
    })
}

/// Each part is granted before the first must be renewed, but all together after its lease.
#[test]
fn parts_that_come_one_after_the_other_keep_the_first_for_longer_than_its_lease()
-> Result<(), Error> {
    rlock_test::run(3, async |network| {
        network.cluster(&NODES);
        let (client, other) = (connect(&network).await?, connect(&network).await?);
        let names: Vec<_> = (0..5).map(|number| format!("lock:{number}")).collect();
        for name in &names {
            let held = other.lock(name).lock().await?;
            tokio::spawn(async move {
                held.wanted().await?;
                sleep(Duration::from_millis(800)).await;
                held.unlock().await
            });
        }
        let several = client.multi(&names).lease(Duration::from_secs(3));
        several.lock().await?.unlock().await
    })
}

#[test]
fn a_slot_that_moves_takes_its_holder_and_its_waiter_along() -> Result<(), Error> {
    rlock_test::run(2, async |network| {
        let cluster = network.cluster(&NODES);
        let (one, two) = (connect(&network).await?, connect(&network).await?);
        let guard = one.lock("a").lock().await?;
        let lock = two.lock("a");
        let (from, to) = (cluster.node_of("a"), other(&cluster, "a"));
        let moves = async {
            sleep(Duration::from_secs(1)).await;
            assert_eq!(cluster.node(from).contents().waiters, 1);
            assert!(cluster.move_slot("a", to));
            sleep(Duration::from_secs(10)).await;
            assert_eq!(cluster.node(from).contents().waiters, 0);
            assert_eq!(cluster.node(from).contents().keys, 0);
            assert_eq!(cluster.node(to).contents().waiters, 1);
            assert!(!guard.is_lost());
            guard.unlock().await
        };
        let (next, unlocked) = tokio::join!(lock.lock(), moves);
        unlocked?;
        assert_eq!(cluster.node(to).holders("a").len(), 1);
        next?.unlock().await
    })
}

#[test]
fn a_lock_whose_key_has_gone_ahead_is_asked_for_where_it_is() -> Result<(), Error> {
    rlock_test::run(4, async |network| {
        let cluster = network.cluster(&NODES);
        let (one, two) = (connect(&network).await?, connect(&network).await?);
        let goes = one.lock("{a}goes").lock().await?;
        let stays = one.lock("{a}stays").lock().await?;
        let reads = one.rw_lock("{a}reads").read().await?;
        let (from, to) = (cluster.node_of("{a}"), other(&cluster, "{a}"));
        let resharding = cluster.reshard("{a}", to).expect("it is not there yet");
        assert!(cluster.reshard("{a}", to).is_none() && !cluster.move_slot("{a}", to));
        assert!(resharding.migrate("{a}goes") && !resharding.migrate("{a}goes"));
        // The hash has gone ahead of the key of the reader's lease.
        assert!(resharding.migrate("{a}reads"));
        assert_eq!(cluster.holders("{a}reads"), [reads.owner().to_string()]);
        let began = Instant::now();
        goes.renew().await?;
        stays.renew().await?;
        assert!(
            began.elapsed() < Duration::from_millis(10),
            "no pause helps"
        );
        assert!(reads.renew().await.is_err());
        assert!(two.lock("{a}goes").try_lock().await.is_err());
        let both = two.multi(["{a}goes", "{a}stays"]).try_lock().await;
        assert!(both.is_err(), "they are apart");
        // A lock that does not exist yet is taken at the node that the slot goes to.
        let fresh = two.lock("{a}fresh").lock().await?;
        assert_eq!(cluster.node(to).holders("{a}fresh").len(), 1);
        goes.unlock().await?;
        assert!(!resharding.tell(from), "it has keys still");
        for key in resharding.keys_left() {
            assert!(resharding.migrate(&key));
        }
        for node in [to, from, 3 - from - to] {
            assert_eq!(cluster.node_of("{a}"), from);
            assert!(resharding.tell(node));
        }
        assert_eq!(cluster.node_of("{a}"), to);
        let of = cluster.node(from).stats();
        let (asked, tried_again) = (of.asked, of.tried_again);
        assert!(asked > 3 && tried_again > 1, "{asked}, {tried_again}");
        for unlocked in [stays.unlock().await, fresh.unlock().await] {
            unlocked?;
        }
        reads.unlock().await?;
        assert_eq!(cluster.node(to).contents().keys, 0);
        Ok(())
    })
}

#[test]
fn a_replica_takes_the_place_of_its_node_with_what_it_has() -> Result<(), Error> {
    rlock_test::run(3, async |network| {
        let cluster = network.cluster(&NODES);
        let node = cluster.node_of("a");
        let old = cluster.node(node);
        let replica = network.server("replica:6379");
        cluster.add_replica(node, &replica);
        let client = connect(&network).await?;
        let kept = client.lock("a").lock().await?;
        sleep(Duration::from_secs(2)).await;
        replica.cut_replication();
        let tail = client.lock("{a}2").lock().await?;
        old.crash(false);
        sleep(Duration::from_secs(3)).await;
        cluster.replace(node, "replica:6379", &replica);
        assert_eq!(tail.lost().await, LostReason::NotHeld);
        sleep(Duration::from_secs(5)).await;
        assert!(!kept.is_lost());
        assert_eq!(replica.holders("a").len(), 1);
        kept.unlock().await
    })
}

/// The release goes to a node that the client has not used before, and starts its link.
#[test]
fn a_guard_is_dropped_outside_of_a_runtime_after_its_node_was_replaced() -> Result<(), Error> {
    rlock_test::run(4, async |network| {
        let cluster = network.cluster(&NODES);
        let node = cluster.node_of("a");
        let old = cluster.node(node);
        let replica = network.server("replica:6379");
        cluster.add_replica(node, &replica);
        let client = connect(&network).await?;
        // With a lease of its own it is not renewed, which would start the link.
        let guard = client
            .lock("a")
            .lease(Duration::from_secs(600))
            .lock()
            .await?;
        sleep(Duration::from_secs(2)).await;
        old.crash(false);
        guard.lost().await;
        cluster.replace(node, "replica:6379", &replica);
        sleep(Duration::from_secs(5)).await;
        assert_eq!(replica.holders("a").len(), 1);
        let dropped = std::thread::spawn(move || drop(guard)).join();
        assert!(dropped.is_ok(), "it panicked");
        sleep(Duration::from_secs(5)).await;
        assert_eq!(replica.holders("a").len(), 0);
        Ok(())
    })
}

/// A node forgets that it was asked to tell as soon as another serves the slot, and the client does
/// not notice a slot that is back soon.
#[test]
fn who_waits_is_heard_of_when_a_slot_has_left_and_come_back() -> Result<(), Error> {
    rlock_test::run(9, async |network| {
        let cluster = network.cluster(&NODES);
        let (one, two) = (connect(&network).await?, connect(&network).await?);
        let long = Duration::from_secs(3_600);
        let kept = one.lock("{a}kept").keep(long).lock().await?;
        kept.unlock().await?;
        // Which the watchdog need not renew.
        let leased = one.lock("{a}leased").lease(long).keep(long).lock().await?;
        leased.unlock().await?;
        let held = one.lock("{a}held").lock().await?;
        let several = one.multi(["{a}one", "{a}two"]).lock().await?;
        let yields_several = async {
            several.wanted().await?;
            several.unlock().await
        };
        let yields = async {
            held.wanted().await?;
            held.unlock().await
        };
        let comes_back = async {
            sleep(Duration::from_secs(1)).await;
            let (from, to) = (cluster.node_of("{a}"), other(&cluster, "{a}"));
            assert!(cluster.move_slot("{a}", to));
            sleep(Duration::from_secs(1)).await;
            assert!(cluster.move_slot("{a}", from));
            for name in ["{a}kept", "{a}leased", "{a}held", "{a}two"] {
                let lock = two.lock(name);
                let guard = lock.lock_timeout(Duration::from_secs(30)).await?;
                guard.unlock().await?;
            }
            Ok::<_, Error>(())
        };
        tokio::try_join!(yields, yields_several, comes_back)?;
        Ok(())
    })
}

/// The node that a slot goes to tells of a loss before its answer to the renewal has come, by which
/// the hold would be its own.
#[test]
fn the_loss_of_a_hold_that_has_just_moved_is_heard() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (cluster, host) = (network.cluster(&NODES), network.host());
        let settings = Client::builder().dial(host.dial());
        let client = settings.connect_cluster(["redis://one"]).await?;
        let to = other(&cluster, "a");
        // Both connections to that node are used.
        let name = (0..100).map(|number| format!("lock:{number}"));
        let name = name.into_iter().find(|name| cluster.node_of(name) == to);
        let name = name.expect("it has a third of the slots");
        client.lock(name).lock().await?.unlock().await?;
        let guard = client.lock("a").lock().await?;
        let seen = Rc::new(Cell::new(false));
        let (is_seen, node) = (Rc::clone(&seen), cluster.node(to));
        node.observe(move |line| is_seen.set(is_seen.get() || line.contains("RENEW a")));
        let cut = host.cut_one(NODES[to], 1, Direction::ToHost);
        assert!(cluster.move_slot("a", to));
        let renewed = async {
            while !seen.get() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let renewed = timeout(Duration::from_secs(60), renewed).await;
        renewed.expect("it is renewed there");
        node.delete("a");
        sleep(Duration::from_millis(100)).await;
        cut.expect("it is connected").end(true);
        sleep(Duration::from_millis(100)).await;
        assert!(guard.is_lost());
        Ok(())
    })
}

/// Of a slot that goes to another node, that one has not heard yet: the two send each command to
/// each other. A call ends in time, and one that waits goes on without haste.
#[test]
fn nodes_that_send_a_command_to_each_other_are_not_hurried() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (cluster, host) = (network.cluster(&NODES), network.host());
        let settings = Client::builder().dial(host.dial());
        let settings = settings.response_timeout(Duration::from_millis(500));
        let client = settings.connect_cluster(["redis://one"]).await?;
        let held = connect(&network).await?.lock("{a}held").lock().await?;
        let lock = client.lock("{a}held");
        let waits = spawn_local(async move { lock.lock().await });
        let (from, to) = (cluster.node_of("{a}"), other(&cluster, "{a}"));
        while cluster.node(from).contents().waiters == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        host.set_latency(Duration::from_millis(1));
        let sent = Rc::new(Cell::new(0));
        for node in [from, to] {
            let sent = Rc::clone(&sent);
            let count =
                move |line: &str| sent.set(sent.get() + u32::from(line.contains("ACQUIRE")));
            cluster.node(node).observe(count);
        }
        let resharding = cluster.reshard("{a}", to).expect("it is not there yet");
        assert!(resharding.migrate("{a}held"));
        assert!(resharding.tell(from));
        let began = Instant::now();
        let told = timeout(Duration::from_secs(10), client.lock("{a}new").lock()).await;
        let told = told.expect("it ends in time").map(drop);
        assert!(told.is_err_and(|error| error.is_unavailable()));
        assert!(
            began.elapsed() < Duration::from_millis(700),
            "{:?}",
            began.elapsed()
        );
        sleep(Duration::from_secs(10)).await;
        assert!(
            !waits.is_finished() && sent.get() < 200,
            "{} times",
            sent.get()
        );
        for node in [to, 3 - from - to] {
            assert!(resharding.tell(node));
        }
        held.unlock().await?;
        let guard = timeout(Duration::from_secs(10), waits).await;
        guard.expect("it is free").expect("it ends")?.unlock().await
    })
}

/// Word of a grant comes before the answer to the call, which is lost. At the node that the slot
/// has gone to, the call waits for another owner.
#[test]
fn the_word_of_a_grant_at_another_node_grants_nothing() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (cluster, host, client) = with_a_minute(&network).await?;
        let others = connect(&network).await?;
        let (from, to) = (cluster.node_of("a"), other(&cluster, "a"));
        // The session there has told of more than the other node's.
        for _ in 0..3 {
            let held = others.lock("a").lock().await?;
            let lock = client.lock("a");
            let waits = spawn_local(async move { lock.lock().await?.unlock().await });
            sleep(Duration::from_millis(100)).await;
            held.unlock().await?;
            waits.await.expect("it ends")?;
        }
        let held = others.lock("a").lock().await?;
        let answers = host.cut_one(NODES[from], 1, Direction::ToHost);
        let lock = client.lock("a");
        let waits = spawn_local(async move { lock.lock().await });
        sleep(Duration::from_millis(100)).await;
        held.unlock().await?;
        sleep(Duration::from_millis(100)).await;
        assert_eq!(cluster.node(from).holders("a").len(), 1);
        let _events = host.cut_one(NODES[from], 0, Direction::ToHost);
        cluster.node(from).delete("a");
        assert!(cluster.move_slot("a", to));
        let _held = others.lock("a").lock().await?;
        answers.expect("it is connected").end(false);
        let early = timeout(Duration::from_secs(1), waits).await;
        assert!(early.is_err(), "two have it");
        assert_eq!(cluster.node(to).contents().waiters, 1);
        Ok(())
    })
}

/// A slot moves before the answer to a call has come, and so does the word of that. The new node
/// must know whose the hold is, to tell of its loss.
#[test]
fn a_hold_that_has_moved_before_it_was_heard_of_is_confirmed_where_it_is() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (cluster, host, client) = with_a_minute(&network).await?;
        client.lock("a").lock().await?.unlock().await?;
        let (from, to) = (cluster.node_of("a"), other(&cluster, "a"));
        let answers = host.cut_one(NODES[from], 1, Direction::ToHost);
        let lock = client.lock("a").lease(Duration::from_secs(600));
        let call = spawn_local(async move { lock.lock().await });
        sleep(Duration::from_millis(100)).await;
        assert_eq!(cluster.node(from).holders("a").len(), 1);
        assert!(cluster.move_slot("a", to));
        sleep(Duration::from_millis(100)).await;
        answers.expect("it is connected").end(true);
        let guard = call.await.expect("it ends")?;
        sleep(Duration::from_secs(2)).await;
        cluster.node(to).delete("a");
        sleep(Duration::from_secs(1)).await;
        assert!(guard.is_lost());
        Ok(())
    })
}

/// The slot of a lock moves while a renewal is in flight that its former node has carried out. The
/// new node must know whose the hold is, to tell of its loss.
#[test]
fn a_hold_that_moves_while_it_is_renewed_is_confirmed_where_it_is() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (cluster, host, client) = with_a_minute(&network).await?;
        let (from, to) = (cluster.node_of("a"), other(&cluster, "a"));
        let lease = Duration::from_secs(600);
        let guard = client.lock("a").lease(lease).lock().await?;
        let answers = host.cut_one(NODES[from], 1, Direction::ToHost);
        let renews = async { guard.renew().await };
        let moves = async {
            sleep(Duration::from_millis(100)).await;
            assert!(cluster.move_slot("a", to));
            sleep(Duration::from_millis(100)).await;
            answers.expect("it is connected").end(true);
            Ok(())
        };
        tokio::try_join!(renews, moves)?;
        sleep(Duration::from_secs(2)).await;
        cluster.node(to).delete("a");
        sleep(Duration::from_secs(1)).await;
        assert!(guard.is_lost());
        Ok(())
    })
}

/// The client learns that the slot has moved before it hears of the grant, and from another than
/// its former node, which then stands still. The guard must not count on that.
#[test]
fn a_grant_of_a_node_that_its_slot_has_left_is_confirmed_where_it_is() -> Result<(), Error> {
    rlock_test::run(1, async |network| {
        let (cluster, host, client) = with_a_minute(&network).await?;
        let (from, to) = (cluster.node_of("a"), other(&cluster, "a"));
        for name in ["a", "b"] {
            client.lock(name).lock().await?.unlock().await?;
        }
        assert_ne!(cluster.node_of("b"), from);
        let answers = host.cut_one(NODES[from], 1, Direction::ToHost);
        let _events = host.cut_one(NODES[from], 0, Direction::ToHost);
        let lock = client.lock("a").lease(Duration::from_secs(600));
        let call = spawn_local(async move { lock.lock().await });
        sleep(Duration::from_millis(100)).await;
        assert_eq!(cluster.node(from).holders("a").len(), 1);
        assert!(cluster.move_slot("a", to));
        assert!(cluster.move_slot("b", from));
        let told = timeout(Duration::from_millis(100), client.lock("b").try_lock()).await;
        assert!(told.is_err(), "the answer of the former node does not come");
        sleep(Duration::from_millis(400)).await;
        answers.expect("it is connected").end(true);
        cluster.node(from).pause();
        let guard = call.await.expect("it ends")?;
        sleep(Duration::from_secs(300)).await;
        assert!(!guard.is_lost());
        Ok(())
    })
}
