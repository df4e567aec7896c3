//! Locks that count once replicas, or disks, have the grant.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rlock_client::{ClientBuilder, Error, LostReason};
use rlock_tests::{Pair, Proxy, Sentinels, Server, Shards, Version, cut_off, until};
use tokio::task::JoinHandle;

use super::client::{MS, calls, calm, connect, once_in_ten, patient, soon, url, wait_in_queue};
use super::client_faults::{kill_session_connection, session_connection};

/// Longer than any replica takes that answers at all.
const LONG: Duration = Duration::from_secs(10);

/// Settings with which only the lease and one replica count.
fn acknowledged(within: Duration) -> ClientBuilder {
    patient().acknowledged_by(1, within)
}

/// Takes something where a replica may be late now and then: again, until it has answered in time.
async fn at_last<T>(mut take: impl AsyncFnMut() -> Result<T, Error>) -> T {
    let taken = async {
        loop {
            match take().await {
                Ok(guard) => return guard,
                Err(error) => assert!(error.is_not_acknowledged(), "{error}"),
            }
        }
    };
    soon(taken).await
}

/// How often the server has ended a WAIT.
fn waits(server: &Server) -> u64 {
    let stats = server.run("INFO commandstats").text();
    let line = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_wait:calls="));
    line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}

/// Waits until a client of this server waits for replicas.
fn see_waiting(server: &Server) {
    until("somebody waits for the replica", || {
        let list = server.run("CLIENT LIST").text();
        list.lines().any(|line| line.contains("cmd=wait"))
    });
}

/// Starts a call in a task of its own.
fn started<T: Send + 'static>(call: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(call)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_a_lock_is_held_the_replica_has_it() {
    let pair = Pair::start();
    let client = connect(acknowledged(LONG), &pair.primary).await;
    let fields = |name: &str| pair.replica.run(format!("HGETALL {name}")).texts();
    for round in 0..20 {
        let name = format!("k{round}");
        let guard = client.lock(&*name).lock().await.unwrap();
        assert!(fields(&name).contains(&guard.owner().to_string()));
        let again = client.lock(&*name).owner(guard.owner());
        let again = again.try_lock().await.unwrap();
        drop(again);
        assert!(fields(&name).contains(&guard.owner().to_string()), "shared");

        let lock = client.rw_lock(format!("rw{round}"));
        let writer = lock.write().await.unwrap();
        let field = format!("{}:write", writer.owner());
        assert!(fields(&format!("rw{round}")).contains(&field));
        let reader = writer.downgrade().await.unwrap();
        let field = reader.owner().to_string();
        assert!(fields(&format!("rw{round}")).contains(&field));

        let names = [format!("a{round}"), format!("b{round}")];
        let both = client.multi(names.clone()).lock().await.unwrap();
        for name in &names {
            assert!(fields(name).contains(&both.owner().to_string()));
        }
        drop((guard, reader, both));
    }
    soon(client.shutdown()).await;
    assert_eq!(pair.primary.run("DBSIZE"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unacknowledged_grant_is_given_back_and_said_to_be() {
    let pair = Pair::start();
    let client = connect(acknowledged(1_000 * MS), &pair.primary).await;
    // Something is written on the connection that waits, long before.
    drop(at_last(async || client.lock("first").lock().await).await);
    pair.settle();
    let holder = client.rw_lock("both").owner(&client.owner());
    let (holder, longer) = (holder.clone().lease(3 * LONG), holder.lease(6 * LONG));
    let writer = at_last(async || holder.write().await).await;
    let reader = at_last(async || longer.read().await).await;
    pair.settle();
    pair.replica.freeze();
    let rw = client.rw_lock("rw");
    let all = client.multi(["a", "b"]);
    let errors = [
        // First of all, before anything is unacknowledged on the connection that waits: here the
        // lease as the writer changes nothing about the key's, and a renewal might write nothing.
        soon(holder.write()).await.unwrap_err(),
        soon(client.lock("k").lock()).await.unwrap_err(),
        soon(client.lock("k").try_lock()).await.unwrap_err(),
        soon(client.lock("k").lease(LONG).lock_timeout(LONG))
            .await
            .unwrap_err(),
        soon(rw.read()).await.unwrap_err(),
        soon(rw.write()).await.unwrap_err(),
        soon(all.lock()).await.unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_not_acknowledged(), "{error}");
        assert!(error.to_string().contains("0 of 1"), "{error}");
    }
    assert!(!writer.is_lost() && !reader.is_lost());
    drop((writer, reader));
    soon(client.shutdown()).await;
    assert_eq!(pair.primary.run("DBSIZE"), 0);
    pair.replica.thaw();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_by_another_clients_release_is_acknowledged_too() {
    let pair = Pair::start();
    let mut alice = pair.primary.connect();
    for frozen in [false, true] {
        let within = if frozen { 100 * MS } else { LONG };
        let client = connect(acknowledged(within), &pair.primary).await;
        alice.take("k", "alice");
        let waiting = wait_in_queue(&pair.primary, &client, "k");
        if frozen {
            pair.settle();
            pair.replica.freeze();
        }
        alice.let_go("k", "alice");
        match soon(waiting).await.unwrap() {
            Ok(guard) => {
                assert!(!frozen, "nobody has it but the primary");
                soon(guard.unlock()).await.unwrap();
            }
            Err(error) => assert!(frozen && error.is_not_acknowledged(), "{error}"),
        }
        until("it is given back", || pair.primary.holder("k").is_none());
    }
    pair.replica.thaw();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_at_the_same_time_share_one_wait() {
    let pair = Pair::start();
    let client = connect(acknowledged(LONG), &pair.primary).await;
    pair.settle();
    pair.replica.freeze();
    let lock = |name: String| {
        let lock = client.lock(name);
        started(async move { lock.lock().await })
    };
    let mut calls = vec![lock("first".to_owned())];
    see_waiting(&pair.primary);
    calls.extend((0..50).map(|number| lock(format!("k{number}"))));
    until("all are granted", || pair.primary.run("DBSIZE") == 51);
    assert!(calls.iter().all(|call| !call.is_finished()));
    pair.replica.thaw();
    for call in calls {
        drop(soon(call).await.unwrap().unwrap());
    }
    // One for the first, and then one for all that were granted meanwhile.
    assert!(waits(&pair.primary) <= 10, "{}", waits(&pair.primary));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_of_one_call_share_one_wait() {
    let pair = Pair::start();
    let client = connect(acknowledged(LONG), &pair.primary).await;
    pair.settle();
    let before = waits(&pair.primary);
    let names: Vec<_> = (0..20).map(|number| format!("k{number}")).collect();
    let guard = soon(client.multi(&names).lock()).await.unwrap();
    // One more where a round of renewals comes between.
    let more = waits(&pair.primary) - before;
    assert!((1..=2).contains(&more), "{more} waits");
    drop(guard);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_that_it_takes_counts_against_the_lease() {
    let pair = Pair::start();
    let client = connect(acknowledged(LONG), &pair.primary).await;
    pair.settle();
    pair.replica.freeze();
    let begun = Instant::now();
    let lock = client.lock("k").lease(LONG);
    let call = started(async move { lock.lock().await });
    see_waiting(&pair.primary);
    let waiting = Instant::now();
    while waiting.elapsed() < 500 * MS {
        tokio::time::sleep(10 * MS).await;
    }
    pair.replica.thaw();
    let guard = soon(call).await.unwrap().unwrap();
    let ends = begun.elapsed() + guard.valid_for();
    // Counted from the renewal, which was sent before we saw it.
    let sent = waiting - begun;
    assert!(ends <= LONG + sent, "{ends:?} after {sent:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_dropped_meanwhile_leaves_nothing_behind() {
    let pair = Pair::start();
    let client = connect(acknowledged(LONG), &pair.primary).await;
    pair.settle();
    pair.replica.freeze();
    let lock = client.lock("k");
    let call = started(async move { lock.lock().await });
    see_waiting(&pair.primary);
    assert!(pair.primary.holder("k").is_some());
    call.abort();
    until("it is given back", || pair.primary.holder("k").is_none());
    pair.replica.thaw();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledged_hold_survives_the_death_of_the_primary() {
    let mut watched = Sentinels::start();
    let urls = watched.addresses().into_iter();
    let client = calm()
        .acknowledged_by(1, Duration::from_secs(3))
        .sentinels(urls.map(|address| format!("redis://{address}")))
        .connect("redis://rlock");
    let client = soon(client).await.unwrap();
    let guard = at_last(async || client.lock("k").lock().await).await;
    watched.kill_primary();
    // The new primary has it, and no replica now that could acknowledge a renewal.
    let asked = async {
        loop {
            let error = guard.renew().await.unwrap_err();
            assert!(!error.is_lost(), "{error}");
            if error.is_not_acknowledged() {
                return;
            }
            tokio::time::sleep(20 * MS).await;
        }
    };
    soon(asked).await;
    let primary = watched.primary();
    assert_eq!(primary.holder("k").as_deref(), Some(guard.owner().as_str()));
    let error = soon(client.lock("other").lock_timeout(LONG)).await;
    assert!(error.unwrap_err().is_not_acknowledged());
    watched.restart();
    drop(at_last(async || client.lock("other").lock().await).await);
    at_last(async || guard.renew().await).await;
    soon(guard.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_lost_with_the_last_lease_that_a_replica_knows_of() {
    let pair = Pair::start();
    let builder = acknowledged(200 * MS).lease(4_000 * MS);
    let client = connect(builder.renew_every(200 * MS), &pair.primary).await;
    let guard = at_last(async || client.lock("k").lock().await).await;
    let before = calls(&pair.primary, "renew");
    until("it has been renewed a few times", || {
        calls(&pair.primary, "renew") > before + 30
    });
    assert!(!guard.is_lost(), "its renewals are acknowledged");
    pair.replica.freeze();
    assert_eq!(soon(guard.lost()).await, LostReason::NotAcknowledged);
    // The server itself kept it all the time.
    assert_eq!(
        pair.primary.holder("k").as_deref(),
        Some(guard.owner().as_str())
    );
    pair.replica.thaw();
    assert!(guard.is_lost());
    drop(guard);
    let again = at_last(async || client.lock("k").lock().await).await;
    soon(again.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_grants_nothing_before_the_guard_at_the_old_primary_is_lost() {
    let pair = Pair::start();
    for server in [&pair.primary, &pair.replica] {
        let told = server.run("ACL SETUSER clerk on >secret ~* &* +@all");
        assert_eq!(told, "OK");
    }
    let of_clerk = |server| url(server).replace("redis://", "redis://clerk:secret@");
    let builder = acknowledged(200 * MS).lease(4_000 * MS);
    let builder = builder.renew_every(200 * MS);
    let client = builder.connect(&of_clerk(&pair.primary)).await.unwrap();
    let guard = at_last(async || client.lock("k").lock().await).await;
    // Cut off from its replica, which takes its place; the client goes on reaching it.
    cut_off(&pair.primary);
    assert_eq!(pair.replica.run("REPLICAOF NO ONE"), "OK");
    let rival = patient().connect(&of_clerk(&pair.replica)).await.unwrap();
    let rivals = soon(rival.lock("k").lock()).await.unwrap();
    assert!(guard.is_lost(), "two hold it: {:?}", guard.valid_for());
    assert_eq!(soon(guard.lost()).await, LostReason::NotAcknowledged);
    let mut conn = pair.primary.connect();
    conn.run("AUTH clerk secret");
    let holder = conn.run("HKEYS k").texts();
    assert!(holder.contains(&guard.owner().to_string()), "{holder:?}");
    soon(rivals.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_not_acknowledged_is_an_error_and_extends_nothing() {
    let pair = Pair::start();
    let client = connect(acknowledged(500 * MS), &pair.primary).await;
    let lock = client.lock("k").lease(30 * LONG);
    let guard = at_last(async || lock.lock().await).await;
    let again = client.lock("k").owner(guard.owner()).lease(30 * LONG);
    at_last(async || guard.renew().await).await;
    pair.settle();
    pair.replica.freeze();
    // Read in this order it is not before the end, and in the other not after it.
    let valid_for = guard.valid_for();
    let end = Instant::now() + valid_for;
    let error = soon(guard.renew()).await.unwrap_err();
    assert!(error.is_not_acknowledged(), "{error}");
    assert!(Instant::now() + guard.valid_for() <= end);
    // Nor does entering it again.
    let error = soon(again.lock()).await.unwrap_err();
    assert!(error.is_not_acknowledged(), "{error}");
    assert!(Instant::now() + guard.valid_for() <= end);
    assert!(!guard.is_lost());
    pair.replica.thaw();
    at_last(async || guard.renew().await).await;
    assert!(Instant::now() + guard.valid_for() > end);
    let inner = at_last(async || again.lock().await).await;
    drop((guard, inner));
    until("it is given back", || pair.primary.holder("k").is_none());
}

/// It was renewed all the same: who began to listen meanwhile is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_listens_beside_a_renewal_that_is_not_acknowledged_hears_who_wants_it() {
    let pair = Pair::start();
    let client = connect(acknowledged(2_000 * MS), &pair.primary).await;
    let lock = client.lock("k").lease(30 * LONG);
    let guard = Arc::new(at_last(async || lock.lock().await).await);
    pair.settle();
    pair.replica.freeze();
    let renews = Arc::clone(&guard);
    let renewals = || pair.primary.info("cmdstat_rlock.renew");
    let before = renewals();
    let renewing = started(async move { renews.renew().await });
    until("it is renewed, and waits for the replica", || {
        renewals() != before
    });
    let listens = Arc::clone(&guard);
    let listening = started(async move { listens.wanted().await });
    let error = soon(renewing).await.unwrap().unwrap_err();
    assert!(error.is_not_acknowledged(), "{error}");
    let rival = connect(patient(), &pair.primary).await;
    let waiting = started(async move { rival.lock("k").lock().await });
    soon(listening).await.unwrap().unwrap();
    assert!(!guard.is_lost());
    drop(guard);
    drop(soon(waiting).await.unwrap().unwrap());
    pair.replica.thaw();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_renewals_of_many_holds_share_one_wait_a_round() {
    const HOLDS: u64 = 40;
    let pair = Pair::start();
    let builder = acknowledged(LONG).renew_every(200 * MS);
    let client = connect(builder, &pair.primary).await;
    let mut guards = Vec::new();
    for number in 0..HOLDS {
        guards.push(client.lock(format!("k{number}")).lock().await.unwrap());
    }
    let (waited, renewed) = (waits(&pair.primary), calls(&pair.primary, "renew"));
    until("all have been renewed ten times", || {
        calls(&pair.primary, "renew") >= renewed + 10 * HOLDS
    });
    // Each in the round that was under way at the beginning, or begins now, may be counted apart.
    let rounds = (calls(&pair.primary, "renew") - renewed) / HOLDS + 2;
    let waited = waits(&pair.primary) - waited;
    assert!(
        (9..=rounds).contains(&waited),
        "{waited} in {rounds} rounds"
    );
    assert!(guards.iter().all(|guard| !guard.is_lost()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnect_beside_a_silent_replica_costs_no_guard_within_its_lease() {
    let pair = Pair::start();
    let grace = Duration::from_secs(1);
    let client = connect(acknowledged(LONG).grace(grace), &pair.primary).await;
    let lock = client.lock("k").lease(30 * LONG);
    once_in_ten("it is held beyond the grace", async || {
        let guard = soon(lock.lock()).await.unwrap();
        pair.settle();
        pair.replica.freeze();
        kill_session_connection(&pair.primary);
        let killed = Instant::now();
        while killed.elapsed() < 3 * grace && !guard.is_lost() {
            tokio::time::sleep(10 * MS).await;
        }
        pair.replica.thaw();
        let kept = !guard.is_lost();
        let _ = soon(guard.unlock()).await;
        kept
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_counts_when_it_is_on_the_disk_of_the_server() {
    let server = Server::builder().config("appendonly yes").start();
    let client = connect(patient().acknowledged_on_disk(0, LONG), &server).await;
    let taken = soon(client.lock("k").lock()).await;
    if !Version::at_hand().at_least((7, 2), (7, 2)) {
        let error = taken.unwrap_err();
        assert!(error.is_refused(), "{error}");
        assert!(error.to_string().contains("WAITAOF"), "{error}");
        return;
    }
    let mut server = server;
    let guard = taken.unwrap();
    server.kill();
    server.restart();
    assert_eq!(server.holder("k").as_deref(), Some(guard.owner().as_str()));
    drop(guard);

    let plain = Server::start();
    let client = connect(patient().acknowledged_on_disk(0, LONG), &plain).await;
    let error = soon(client.lock("k").lock()).await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("appendonly"), "{error}");
    until("it is given back", || plain.holder("k").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_who_may_not_wait_is_refused() {
    let pair = Pair::start();
    let told = pair
        .primary
        .run("ACL SETUSER clerk on >secret ~* &* +@all -wait");
    assert_eq!(told, "OK");
    let url = url(&pair.primary).replace("redis://", "redis://clerk:secret@");
    let client = acknowledged(LONG).connect(&url).await.unwrap();
    let error = soon(client.lock("k").lock()).await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("NOPERM"), "{error}");
    until("it is given back", || pair.primary.holder("k").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_each_primary_waits_for_its_own_replica() {
    let shards = Shards::start();
    let urls = shards.primaries().into_iter().map(url);
    let builder = acknowledged(Duration::from_secs(3));
    let client = soon(builder.connect_cluster(urls)).await.unwrap();
    let at = |node: usize| shards.name_at(shards.primaries()[node], "k");
    let names = [at(0), at(1)];
    let both = client.multi(names.clone());
    let guards = at_last(async || both.lock().await).await;
    for name in &names {
        let mut replica = shards.replica_of(name).connect();
        replica.run("READONLY");
        let has = replica.run(format!("HKEYS {name}"));
        assert!(has.texts().contains(&guards.owner().to_string()), "{name}");
    }
    drop(guards);
    let frozen = shards.replica_of(&names[0]);
    frozen.freeze();
    let error = soon(client.lock(&*names[0]).lock()).await.unwrap_err();
    assert!(error.is_not_acknowledged(), "{error}");
    let other = client.lock(&*names[1]);
    let other = at_last(async || other.lock().await).await;
    soon(other.unlock()).await.unwrap();
    frozen.thaw();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_ends_after_a_reconnect_is_said_to_have_expired() {
    let pair = Pair::start();
    let client = connect(calm().acknowledged_by(1, LONG), &pair.primary).await;
    let lock = client.lock("k").lease(Duration::from_secs(4));
    let guard = at_last(async || lock.lock().await).await;
    let before = session_connection(&pair.primary);
    kill_session_connection(&pair.primary);
    until("the session has another connection", || {
        let now = session_connection(&pair.primary);
        now.is_some() && now != before
    });
    assert_eq!(soon(guard.lost()).await, LostReason::Expired);
}

/// The address of the primary leads to its replica, which is promoted. The connection that waits
/// for copies was open, and finds the new primary too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_find_the_new_primary_at_the_same_address() {
    let Pair { primary, replica } = Pair::start();
    let proxy = Proxy::to(primary.address());
    let address = format!("redis://{}", proxy.address());
    let client = acknowledged(LONG).connect(&address).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    proxy.lead_to(replica.address());
    assert_eq!(replica.run("REPLICAOF NO ONE"), "OK");
    let port = replica.port();
    assert_eq!(primary.run(format!("REPLICAOF 127.0.0.1 {port}")), "OK");
    at_last(async || guard.renew().await).await;
    assert!(waits(&replica) > 0 && !guard.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_connections_that_break_again_and_again_cost_no_lock() {
    let pair = Pair::start();
    let client = connect(calm().acknowledged_by(1, LONG), &pair.primary).await;
    let stop = Arc::new(AtomicBool::new(false));
    let workers = (0..8).map(|i| {
        let (lock, stop) = (client.lock(format!("k{i}")), Arc::clone(&stop));
        started(async move {
            while !stop.load(Ordering::SeqCst) {
                drop(lock.lock().await?);
            }
            Ok::<_, Error>(())
        })
    });
    let workers: Vec<_> = workers.collect();
    for _ in 0..60 {
        kill_session_connection(&pair.primary);
        tokio::time::sleep(50 * MS).await;
    }
    stop.store(true, Ordering::SeqCst);
    for worker in workers {
        soon(worker).await.unwrap().unwrap();
    }
}
