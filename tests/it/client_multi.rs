//! Several locks at once, by the client and against real servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rlock_client::{Client, Error, Guard, LostReason, MultiGuard, MultiLock, blocking};
use rlock_tests::{Proxy, Server, patience, until};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::client::{
    MS, begin_and_drop, calls, calm, client, connect, once_in_ten, patient, poll_once,
    see_in_queue, soon, take_for_long, two_clients, url, wait_in_queue,
};
use super::client_faults::{
    LONG_GRACE, client_through, kill_session_connection, session_connection,
};
use super::client_session::{DROPPING, drops, is_granted_within, next_random, waiters};

/// Nothing is left: no lock, no waiter.
fn assert_nothing_left(server: &Server) {
    let left = (server.run("DBSIZE").int(), waiters(server));
    assert_eq!(left, (0, 0), "{:?}", server.run("KEYS *"));
}

/// Waits for these locks in a task of its own, and is seen in the queue of `name`.
fn waits(server: &Server, name: &str, locks: &MultiLock) -> JoinHandle<Result<MultiGuard, Error>> {
    let locks = locks.clone();
    see_in_queue(server, name, async move { locks.lock().await })
}

fn count(server: &Server, name: &str) -> i64 {
    server.run(format!("RLOCK.INFO {name}")).get("count").int()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taken_in_one_command_and_given_back_by_name_and_token() {
    let server = Server::start();
    let client = client(&server).await;
    let locks = client.multi(["b", "a", "c", "a"]);
    assert_eq!(locks.names().collect::<Vec<_>>(), [b"b", b"a", b"c"]);
    let guard = locks.lock().await.unwrap();
    assert_eq!(guard.names().collect::<Vec<_>>(), [b"b", b"a", b"c"]);
    for name in ["a", "b", "c"] {
        let info = server.run(format!("RLOCK.INFO {name}"));
        assert_eq!(info.get("owner").text(), guard.owner().as_str());
        assert_eq!(info.get("count"), &1, "a name given twice counts once");
        let token = info.get("token").int();
        assert_eq!(guard.token(), u64::try_from(token).unwrap());
    }
    guard.renew().await.unwrap();
    guard.unlock().await.unwrap();
    let commands = ["macquire", "renew", "release", "acquire"];
    let made = commands.map(|command| calls(&server, command));
    assert_eq!(made, [1, 3, 3, 0]);
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_name_is_refused_and_one_is_enough() {
    let server = Server::start();
    let client = client(&server).await;
    let error = client.multi::<&str>([]).lock().await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert_eq!(
        error.to_string(),
        "refused: several locks at once need a name"
    );
    let many = (0..1_025).map(|i| format!("k{i}"));
    let error = client.multi(many).try_lock().await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    let guard = client.multi(["k"]).try_lock().await.unwrap();
    assert_eq!(server.holder("k").as_deref(), Some(guard.owner().as_str()));
    guard.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_or_none_and_nothing_is_held_while_waiting() {
    let server = Server::start();
    let client = client(&server).await;
    let held = client
        .lock("b")
        .lease(Duration::from_secs(60))
        .lock()
        .await
        .unwrap();
    let locks = client.multi(["a", "b", "c"]);
    for error in [
        locks.try_lock().await.unwrap_err(),
        locks.lock_timeout(20 * MS).await.unwrap_err(),
    ] {
        assert!(error.is_not_acquired(), "{error}");
        let left = error.lease_left().unwrap();
        assert!(left > Duration::from_secs(40), "{left:?}");
    }
    assert_eq!((server.run("DBSIZE").int(), waiters(&server)), (1, 0));
    let waiting = waits(&server, "a", &locks);
    for name in ["a", "b", "c"] {
        assert_eq!(server.waiting_owners(name).len(), 1, "{name}");
    }
    assert_eq!(server.run("DBSIZE"), 1);
    held.unlock().await.unwrap();
    let guard = soon(waiting).await.unwrap().unwrap();
    assert!(!guard.is_lost());
    // And who wants one of them waits for all to go.
    let one = wait_in_queue(&server, &client, "c");
    guard.unlock().await.unwrap();
    soon(one).await.unwrap().unwrap().unlock().await.unwrap();
    assert_nothing_left(&server);
}

/// Philosophers who sit around a table, half of them with another client: all must be fed.
async fn dine(seats: usize, meals: u64) {
    let server = Server::start();
    let clients = two_clients(&server).await;
    let forks: Arc<Vec<_>> = Arc::new((0..seats).map(|_| AtomicBool::new(false)).collect());
    let table: Vec<_> = (0..seats)
        .map(|seat| {
            let (client, forks) = (clients[seat % 2].clone(), Arc::clone(&forks));
            tokio::spawn(async move {
                let mine = [seat, (seat + 1) % seats];
                let both = client.multi(mine.map(|fork| format!("fork{fork}")));
                for _ in 0..meals {
                    let guard = both.lock().await.unwrap();
                    for fork in mine {
                        assert!(!forks[fork].swap(true, Ordering::SeqCst), "one fork, two");
                    }
                    tokio::task::yield_now().await;
                    for fork in mine {
                        forks[fork].store(false, Ordering::SeqCst);
                    }
                    guard.unlock().await.unwrap();
                }
                meals
            })
        })
        .collect();
    for philosopher in table {
        let fed = timeout(patience(Duration::from_secs(60)), philosopher).await;
        assert_eq!(fed.expect("nobody starves").unwrap(), meals);
    }
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_philosophers_are_fed() {
    dine(5, 100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_philosophers_are_fed() {
    dine(50, 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_two_or_three_of_five_in_any_order_are_kept_apart() {
    let server = Server::start();
    let clients = two_clients(&server).await;
    let counters: Arc<Vec<_>> = Arc::new((0..5).map(|_| AtomicU64::new(0)).collect());
    let taken = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..50_u64)
        .map(|i| {
            let client = clients[(i % 2) as usize].clone();
            let (counters, taken) = (Arc::clone(&counters), Arc::clone(&taken));
            let mut random = 0x9E37_79B9_7F4A_7C15 ^ (i << 7);
            tokio::spawn(async move {
                for _ in 0..5 {
                    let some = |_| (next_random(&mut random) % 5) as usize;
                    let mut names: Vec<_> = (0..=i % 3).map(some).collect();
                    let locks = client.multi(names.iter().map(|name| format!("k{name}")));
                    names.sort_unstable();
                    names.dedup();
                    let guard = locks.lock().await.unwrap();
                    let seen: Vec<_> = names
                        .iter()
                        .map(|name| counters[*name].load(Ordering::SeqCst))
                        .collect();
                    tokio::task::yield_now().await;
                    for (name, seen) in names.iter().zip(seen) {
                        counters[*name].store(seen + 1, Ordering::SeqCst);
                        taken.fetch_add(1, Ordering::SeqCst);
                    }
                    guard.unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(patience(Duration::from_secs(60)), task)
            .await
            .unwrap()
            .unwrap();
    }
    let counted: u64 = counters.iter().map(|one| one.load(Ordering::SeqCst)).sum();
    assert_eq!(counted, taken.load(Ordering::SeqCst), "no update was lost");
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_as_soon_as_one_of_them_is() {
    let server = Server::start();
    let client = client(&server).await;
    for (command, reason) in [
        ("DEL b", LostReason::Deleted),
        ("RLOCK.BREAK a", LostReason::Broken),
        ("FLUSHALL", LostReason::Deleted),
    ] {
        let guard = client.multi(["a", "b", "c"]).lock().await.unwrap();
        assert!(!guard.is_lost());
        server.run(command);
        assert_eq!(soon(guard.lost()).await, reason, "{command}");
        assert!(guard.is_lost() && guard.valid_for() == Duration::ZERO);
        assert!(guard.renew().await.unwrap_err().is_lost());
        assert!(guard.unlock().await.unwrap_err().is_lost());
        // And the others are given back.
        assert_nothing_left(&server);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_misses_one_of_them_says_lost() {
    let server = Server::start();
    let client = connect(patient().renew_every(50 * MS), &server).await;
    let guard = client.multi(["a", "b"]).lock().await.unwrap();
    let by_hand = client
        .multi(["c", "d"])
        .lease(Duration::from_secs(20))
        .lock()
        .await
        .unwrap();
    // The server has not noticed that a field is gone: the renewal finds out.
    server.run(format!("HDEL b {}", guard.owner()));
    server.run(format!("HDEL d {}", by_hand.owner()));
    let reason = soon(guard.lost()).await;
    assert!(
        matches!(reason, LostReason::NotHeld | LostReason::Deleted),
        "by the answer, or by the event that the server sends with it: {reason:?}"
    );
    assert!(by_hand.renew().await.unwrap_err().is_lost());
    assert!(by_hand.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_watchdog_renews_each_of_them_and_stops_with_the_guard() {
    let server = Server::start();
    let (lease, interval) = (Duration::from_secs(5), 100 * MS);
    let client = connect(calm().lease(lease).renew_every(interval), &server).await;
    let names: Vec<_> = (0..20).map(|i| format!("k{i}")).collect();
    let guard = client.multi(names).lock().await.unwrap();
    let plain = client.lock("plain").lock().await.unwrap();
    let started = Instant::now();
    while started.elapsed() < lease + 500 * MS {
        assert!(!guard.is_lost() && !plain.is_lost());
        assert_eq!(server.run("DBSIZE"), 21);
        sleep(10 * MS).await;
    }
    guard.unlock().await.unwrap();
    let renewals = calls(&server, "renew");
    assert!(renewals >= 21, "{renewals}");
    sleep(6 * interval).await; // six rounds, had it gone on
    let more = calls(&server, "renew") - renewals;
    assert!(more < 20, "one lock is renewed still: {more}");
    assert!(!plain.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_valid_for_no_longer_than_the_lease_in_the_server() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let alice = client.lock("b").lock().await.unwrap();
    let locks = client.multi(["a", "b"]).lease(Duration::from_secs(60));
    let waiting = waits(&server, "b", &locks);
    alice.unlock().await.unwrap();
    let guard = soon(waiting).await.unwrap().unwrap();
    let within_the_lease = || {
        // Both are asked for at one time, and the guard later: it can only be valid for less.
        let asked = ["MULTI", "PTTL a", "PTTL b", "EXEC"];
        let ttls = server.connect().pipeline(&asked).pop().unwrap().ints();
        let left = u64::try_from(ttls.into_iter().min().unwrap()).unwrap();
        guard.valid_for() <= Duration::from_millis(left)
    };
    assert!(within_the_lease() && guard.valid_for() > Duration::from_secs(50));
    guard.renew().await.unwrap();
    assert!(within_the_lease() && guard.valid_for() > Duration::from_secs(50));
    let capped = locks.max_hold(200 * MS);
    guard.unlock().await.unwrap();
    let guard = capped.lock().await.unwrap();
    assert!(server.run("PTTL a").int() <= 200);
    assert_eq!(soon(guard.lost()).await, LostReason::MaxHold);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_enters_again_alone_and_together_and_the_last_guard_of_each_gives_back() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let alone = client.lock("a").owner(&owner).lock().await.unwrap();
    let locks = client.multi(["a", "b"]).owner(&owner);
    let both = locks.lock().await.unwrap();
    assert!(both.token() > alone.token());
    let again = locks.try_lock().await.unwrap();
    let inner = client.lock("b").owner(&owner).try_lock().await.unwrap();
    assert_eq!([count(&server, "a"), count(&server, "b")], [1, 1]);
    assert_eq!(inner.token(), both.token());
    both.unlock().await.unwrap();
    assert_eq!([count(&server, "a"), count(&server, "b")], [1, 1]);
    inner.unlock().await.unwrap();
    alone.unlock().await.unwrap();
    assert_eq!([count(&server, "a"), count(&server, "b")], [1, 1]);
    assert!(!again.is_lost());
    again.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_taken_alone_and_together_do_not_cut_each_others_lease_short() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let owner = client.owner();
    let long = client
        .lock("a")
        .owner(&owner)
        .lease(Duration::from_secs(120));
    let short = client
        .multi(["a", "b"])
        .owner(&owner)
        .lease(Duration::from_secs(30));
    let promised = |guard: &Guard| {
        let ttl = Duration::from_millis(u64::try_from(server.run("PTTL a").int()).unwrap());
        let valid = guard.valid_for();
        assert!(valid > Duration::from_secs(90) && ttl > valid);
    };
    let first = long.lock().await.unwrap();
    let both = short.lock().await.unwrap();
    promised(&first);
    both.renew().await.unwrap();
    promised(&first);
    // A wait in between, which gets more than the owner held.
    let busy = server.connect().take("c", "busy");
    let three = client
        .multi(["a", "b", "c"])
        .owner(&owner)
        .lease(Duration::from_secs(30));
    let waiting = waits(&server, "c", &three);
    server.run("RLOCK.RELEASE c busy");
    let three = soon(waiting).await.unwrap().unwrap();
    assert!(three.token() > u64::try_from(busy).unwrap());
    assert!(!first.is_lost() && !both.is_lost() && !three.is_lost());
    promised(&first);
    drop((first, both, three));
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_granted_lease_is_not_cut_short_by_a_shorter_one_of_its_owner() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let owner = client.owner();
    let both = client.multi(["a", "b"]).owner(&owner);
    let mut alice = server.connect();
    alice.take("b", "alice");
    let waiting = waits(&server, "b", &both.lease(Duration::from_secs(12)));
    // Two calls of the session connection long: a grant is counted from the last but one, so from
    // later than it was asked for.
    sleep(4_600 * MS).await;
    alice.let_go("b", "alice");
    let both = soon(waiting).await.unwrap().unwrap();
    let short = client.lock("a").owner(&owner).lease(Duration::from_secs(2));
    let inner = short.lock().await.unwrap();
    let ttl = Duration::from_millis(u64::try_from(server.run("PTTL a").int()).unwrap());
    let left = both.valid_for();
    assert!(ttl >= left, "{left:?} of {ttl:?}");
    drop((both, inner));
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_unlock_does_not_free_a_newer_hold_of_the_same_owner() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let locks = client.multi(["a", "b"]).owner(&owner);
    let old = locks.lock().await.unwrap();
    server.run("FLUSHALL");
    soon(old.lost()).await;
    let new = locks.lock().await.unwrap();
    assert!(old.unlock().await.unwrap_err().is_lost());
    assert_eq!([count(&server, "a"), count(&server, "b")], [1, 1]);
    drop(new);

    let old = locks.lock().await.unwrap();
    server.run("DEL a");
    soon(old.lost()).await;
    let new = client.lock("a").owner(&owner).lock().await.unwrap();
    drop(old);
    // The old guard still gives b back, and the new guard keeps a.
    until("b is given back", || server.holder("b").is_none());
    assert!(!new.is_lost());
    new.renew().await.unwrap();
    assert_eq!(count(&server, "a"), 1);
    new.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_guard_gives_back_what_it_took_and_leaves_other_guards_theirs() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let before = client.lock("a").owner(&owner).lock().await.unwrap();
    let lost = client.multi(["a", "b", "c", "d"]).owner(&owner);
    let lost = lost.lock().await.unwrap();
    let after = client.lock("b").owner(&owner).lock().await.unwrap();
    server.run("DEL d");
    soon(lost.lost()).await;
    assert!(lost.unlock().await.unwrap_err().is_lost());
    until("c is given back", || server.holder("c").is_none());
    assert_eq!(count(&server, "b"), 1, "the later guard's");
    assert_eq!(count(&server, "a"), 1, "the earlier guard's");
    before.unlock().await.unwrap();
    assert!(!after.is_lost());
    after.unlock().await.unwrap();
    assert_eq!([count(&server, "a"), count(&server, "b")], [0, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_circle_through_several_locks_is_refused_and_named() {
    let server = Server::start();
    let client = client(&server).await;
    let (ann, ben) = (client.owner(), client.owner());
    let first = client.lock("a").owner(&ann).lock().await.unwrap();
    let second = client.multi(["b", "c"]).owner(&ben).lock().await.unwrap();
    let waiting = waits(&server, "c", &client.multi(["c", "d"]).owner(&ann));
    for error in [
        client.lock("a").owner(&ben).lock().await.unwrap_err(),
        client
            .multi(["e", "a"])
            .owner(&ben)
            .lock_timeout(Duration::from_secs(9))
            .await
            .unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(error.is_deadlock(), "{text}");
        assert!(
            text.contains(ann.as_str()) && text.contains(ben.as_str()),
            "{text}"
        );
    }
    second.unlock().await.unwrap();
    drop(soon(waiting).await.unwrap().unwrap());
    first.unlock().await.unwrap();
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owners_second_call_waits_when_the_first_was_dropped() {
    let server = Server::start();
    let client = client(&server).await;
    let mut alice = server.connect();
    alice.take("b", "alice");
    let owner = client.owner();
    let first = waits(&server, "b", &client.multi(["a", "b"]).owner(&owner));
    let asked = (calls(&server, "macquire"), calls(&server, "acquire"));
    let locks = client.multi(["c", "b"]).owner(&owner);
    let second = tokio::spawn(async move { locks.lock().await });
    let lock = client.lock("b").owner(&owner);
    let third = tokio::spawn(async move { lock.lock().await });
    // They wait for their turn, here.
    sleep(50 * MS).await;
    assert_eq!(
        (calls(&server, "macquire"), calls(&server, "acquire")),
        asked
    );
    assert_eq!(waiters(&server), 2, "CANCEL would take out all");
    first.abort();
    until("the first has left the queue of a", || {
        server.waiting_owners("a").is_empty()
    });
    alice.let_go("b", "alice");
    let (second, third) = (
        soon(second).await.unwrap().unwrap(),
        soon(third).await.unwrap().unwrap(),
    );
    assert_eq!([count(&server, "b"), count(&server, "c")], [1, 1]);
    drop((second, third));
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_call_leaves_nothing_behind() {
    let server = Server::start();
    for round in 0..40 {
        let client = client(&server).await;
        begin_and_drop(client.multi(["a", "b"]).lock(), round).await;
        client.shutdown().await;
        assert_nothing_left(&server);
    }
    let mut alice = server.connect();
    take_for_long(&mut alice, "b");
    for round in 0..60 {
        let client = client(&server).await;
        begin_and_drop(client.multi(["a", "b"]).lock(), round).await;
        until("nobody waits", || waiters(&server) == 0);
        client.shutdown().await;
        assert_eq!((server.run("DBSIZE").int(), waiters(&server)), (1, 0));
    }
    assert!(calls(&server, "cancel") > 0, "no round got into the queue");
    assert_eq!(alice.let_go("b", "alice"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_a_pending_call_in_the_moment_of_its_grant_leaves_nothing_behind() {
    let server = Server::start();
    let mut alice = server.connect();
    for round in 0..60 {
        let client = client(&server).await;
        alice.take("b", "alice");
        let locks = client.multi(["a", "b"]);
        // Those of an owner who may have others, and one minted for the call.
        let locks = match round % 2 {
            0 => locks,
            _ => locks.owner(&client.owner()),
        };
        let mut pending = Box::pin(locks.lock());
        assert!(poll_once(pending.as_mut()).await.is_pending());
        until("it waits", || server.waiting_owners("b").len() == 1);
        alice.send("RLOCK.RELEASE b alice");
        let ends = Instant::now() + round * 10 * Duration::from_micros(1);
        while Instant::now() < ends {
            tokio::task::yield_now().await;
        }
        drop(pending);
        assert_eq!(alice.read(), 0);
        client.shutdown().await;
        assert_nothing_left(&server);
    }
}

/// The event of the grant comes when the client has long given the wait up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_locks_of_a_late_grant_are_given_back() {
    let server = Server::start();
    // The second stands in the way of the session connection alone.
    let (near, far) = (Proxy::to(server.address()), Proxy::to(server.address()));
    let reply_within = Duration::from_secs(3);
    let client = Client::builder()
        .grace(Duration::from_secs(60))
        .lease(Duration::from_secs(60))
        .response_timeout(reply_within)
        .connect(&format!("redis://{}", near.address()))
        .await
        .unwrap();
    near.lead_to(far.address());
    kill_session_connection(&server);
    for held_before in [false, true] {
        once_in_ten("the session connection stays", async || {
            heard_late(&server, &client, &far, held_before).await
        })
        .await;
    }
    client.shutdown().await;
}

/// One such grant. Whether the session connection has stayed meanwhile: events on one that is given
/// up are lost.
async fn heard_late(server: &Server, client: &Client, far: &Proxy, held_before: bool) -> bool {
    let mut alice = server.connect();
    let owner = client.owner();
    let lock = client.lock("a").owner(&owner);
    let outer = if held_before {
        Some(lock.lock().await.unwrap())
    } else {
        None
    };
    alice.take("b", "alice");
    let waiting = waits(server, "b", &client.multi(["a", "b"]).owner(&owner));
    // Told of a grant, the session connection has just begun to listen again: for two seconds, and
    // for the reply as long as for any.
    alice.take("c", "alice");
    let other = wait_in_queue(server, client, "c");
    alice.let_go("c", "alice");
    soon(soon(other).await.unwrap().unwrap().unlock())
        .await
        .unwrap();
    let before = (session_connection(server), calls(server, "cancel"));
    far.cut_to_client();
    alice.let_go("b", "alice");
    waiting.abort();
    until("it is called back", || calls(server, "cancel") > before.1);
    until("it is given back", || server.holder("b").is_none());
    sleep(Duration::from_secs(1)).await;
    far.heal();
    let stays = || session_connection(server) == before.0;
    until("all is given back", || {
        server.holder("b").is_none() || !stays()
    });
    if !stays() {
        drop(outer);
        server.run("FLUSHALL");
        until("nothing is left", || server.run("DBSIZE") == 0);
        return false;
    }
    assert_eq!(count(server, "a"), i64::from(held_before));
    if let Some(outer) = outer {
        assert!(!outer.is_lost());
        soon(outer.unlock()).await.unwrap();
    }
    assert_nothing_left(server);
    true
}

/// The grant and the caller's cancel cross, and its event is lost with the session
/// connection. Nothing else of the owner is there, so whatever it may have is given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_whose_event_is_lost_is_given_back() {
    let server = Server::start();
    let (near, far) = (Proxy::to(server.address()), Proxy::to(server.address()));
    let address = format!("redis://{}", near.address());
    let client = calm().connect(&address).await.unwrap();
    near.lead_to(far.address());
    kill_session_connection(&server);
    let mut alice = server.connect();
    for names in [&["b"][..], &["a", "b"]] {
        let locks = client.multi(names.iter().copied()).owner(&client.owner());
        until("alice has it", || {
            alice.run("RLOCK.ACQUIRE b alice 300000").ints()[0] > 0
        });
        let waiting = waits(&server, "b", &locks);
        let cancels = calls(&server, "cancel");
        far.cut_to_client();
        assert_eq!(alice.let_go("b", "alice"), 0);
        waiting.abort();
        until("it is called back", || calls(&server, "cancel") > cancels);
        far.sever();
        far.heal();
        until("all is given back", || server.run("DBSIZE") == 0);
    }
    client.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_dropped_at_random_moments_under_traffic_leave_no_key_and_no_waiter() {
    let server = Server::start();
    let clients = two_clients(&server).await;
    let over = Arc::new(AtomicBool::new(false));
    let traffic: Vec<_> = (0..4)
        .map(|i| {
            let client = &clients[i % 2];
            let locks = client.multi([format!("k{}", i % 3), format!("k{}", (i + 1) % 3)]);
            let lock = client.lock("k1");
            let over = Arc::clone(&over);
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    locks.lock().await.unwrap().unlock().await.unwrap();
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    let droppers: Vec<_> = (0..4_u64)
        .map(|i| {
            let client = clients[(i % 2) as usize].clone();
            let owner = (i < 2).then(|| client.owner());
            let mut random = 0x9E37_79B9_7F4A_7C15 + i;
            let ends = Instant::now() + DROPPING;
            tokio::spawn(async move {
                for _ in 0..drops() / 20 {
                    if Instant::now() > ends {
                        break;
                    }
                    let mut name = || format!("k{}", next_random(&mut random) % 3);
                    let mut locks = client.multi([name(), name()]);
                    if let Some(owner) = &owner {
                        locks = locks.owner(owner);
                    }
                    let patience = Duration::from_micros(next_random(&mut random) % 1_500);
                    is_granted_within(patience, locks.lock()).await;
                }
            })
        })
        .collect();
    // Most of the calls stand in the three queues at once where the machine is busy.
    let long = patience(Duration::from_secs(120));
    for dropper in droppers {
        timeout(long, dropper).await.unwrap().unwrap();
    }
    over.store(true, Ordering::Relaxed);
    for task in traffic {
        timeout(long, task).await.unwrap().unwrap();
    }
    for client in &clients {
        timeout(long, client.shutdown()).await.unwrap();
    }
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_connections_cost_neither_a_hold_nor_a_wait() {
    let server = Server::start();
    let grace = LONG_GRACE;
    let client = connect(calm().renew_every(50 * MS).grace(grace), &server).await;
    let guard = client.multi(["a", "b"]).lock().await.unwrap();
    let waiting = waits(&server, "a", &client.multi(["c", "a"]));
    let mut observer = server.connect();
    for _ in 0..3 {
        observer.run("CLIENT KILL TYPE normal SKIPME yes");
        let renewals = calls(&server, "renew");
        until("renewed on a new connection", || {
            calls(&server, "renew") > renewals
        });
        until("they wait on a new connection", || waiters(&server) == 2);
    }
    kill_session_connection(&server);
    until("they wait again", || waiters(&server) == 2);
    sleep(grace + 200 * MS).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    let next = soon(waiting).await.unwrap().unwrap();
    next.unlock().await.unwrap();
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_that_survive_a_restart_are_confirmed_and_others_are_lost() {
    let mut server = Server::builder().config("appendonly yes").start();
    let client = connect(calm().renew_every(50 * MS), &server).await;
    let guard = client.multi(["a", "b"]).lock().await.unwrap();
    let waiting = waits(&server, "b", &client.multi(["b", "c"]));
    server.restart();
    until("it was renewed after the restart", || {
        calls(&server, "renew") > 0
    });
    guard.renew().await.unwrap();
    assert!(!guard.is_lost());
    until("it waits again", || server.waiting_owners("b").len() == 1);
    server.run("DEL a");
    // By the event or by the next renewal.
    soon(guard.lost()).await;
    assert!(guard.unlock().await.unwrap_err().is_lost());
    let next = soon(waiting).await.unwrap().unwrap();
    next.unlock().await.unwrap();
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_says_lost_when_the_network_is_cut() {
    for cut in [Proxy::cut_to_server, Proxy::cut_to_client] {
        let server = Server::start();
        let proxy = Proxy::to(server.address());
        let client = client_through(&proxy).await;
        let guard = client.multi(["a", "b"]).lock().await.unwrap();
        let waiting = waits(&server, "b", &client.multi(["b", "c"]));
        // And has been told so, for replies come in order.
        drop(client.lock("told").lock().await.unwrap());
        cut(&proxy);
        sleep(LONG_GRACE).await;
        assert!(guard.is_lost(), "the server may do as it likes from now on");
        assert_eq!(soon(guard.lost()).await, LostReason::SessionUnconfirmed);
        drop(guard);
        proxy.heal();
        let next = soon(waiting).await.unwrap().unwrap();
        assert!(!next.is_lost());
        soon(next.unlock()).await.unwrap();
        soon(client.shutdown()).await;
        until("nothing is left", || {
            server.run("DBSIZE") == 0 && waiters(&server) == 0
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_possible_grant_of_a_stopped_server_is_given_back() {
    let server = Server::start();
    let client = connect(calm().response_timeout(3_000 * MS), &server).await;
    let locks = client.multi(["a", "b"]);
    for locks in [locks.clone(), locks.owner(&client.owner())] {
        server.freeze();
        let error = locks.try_lock().await.unwrap_err();
        assert!(error.is_unknown(), "{error}");
        server.thaw();
        until("it is given back", || {
            calls(&server, "release") > 0 && server.run("DBSIZE") == 0
        });
    }
    client.shutdown().await;
    assert_nothing_left(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_kind_is_refused_with_the_words_of_the_server() {
    let server = Server::start();
    let client = client(&server).await;
    server.run("SET b text");
    let locks = client.multi(["a", "b"]);
    let error = locks.lock().await.unwrap_err();
    assert!(
        error.is_refused() && error.to_string().contains("WRONGTYPE"),
        "{error}"
    );
    server.run("DEL b");
    let reader = client.rw_lock("b").read().await.unwrap();
    let error = locks.lock().await.unwrap_err();
    assert!(
        error.is_refused() && error.to_string().contains("WRONGKIND"),
        "{error}"
    );
    assert_eq!(server.holder("a"), None);
    reader.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_what_is_pending() {
    let server = Server::start();
    let client = client(&server).await;
    server.connect().take("b", "alice");
    let waiting = waits(&server, "a", &client.multi(["a", "b"]));
    soon(client.shutdown()).await;
    assert!(soon(waiting).await.unwrap().unwrap_err().is_unavailable());
    assert_eq!(waiters(&server), 0);
}

#[test]
fn programs_without_async_have_the_same_locks() {
    let server = Server::start();
    let client = blocking::ClientBuilder::from(calm())
        .connect(&url(&server))
        .unwrap();
    let locks = client.multi(["a", "b"]);
    let guard = locks.lock().unwrap();
    assert_eq!(guard.names().len(), 2);
    assert!(locks.try_lock().unwrap_err().is_not_acquired());
    assert!(locks.lock_timeout(20 * MS).unwrap_err().is_not_acquired());
    guard.renew().unwrap();
    let again = locks
        .lease(Duration::from_secs(60))
        .max_hold(Duration::from_secs(40))
        .owner(guard.owner());
    again.lock().unwrap().unlock().unwrap();
    server.run("RLOCK.BREAK b");
    let reason = guard.lost_within(patience(Duration::from_secs(15)));
    assert_eq!(reason, Some(LostReason::Broken));
    drop(guard);
    client.shutdown();
    assert_nothing_left(&server);
}
