//! A client keeps a lock for its next use, until somebody else wants it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rlock_client::{Client, Guard, Lock, LostReason, blocking};
use rlock_tests::{Proxy, Server, until};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::client::{
    calls, calm, client, connect, poll_once, see_in_queue, soon, two_clients, url,
};
use super::ways::two_ways;

/// Longer than any test.
const LONG: Duration = Duration::from_secs(600);

fn kept(client: &Client, name: &str) -> Lock {
    client.lock(name).keep(LONG)
}

/// Takes it and gives it back.
async fn leave_idle(lock: &Lock) -> u64 {
    let guard = soon(lock.lock()).await.unwrap();
    let token = guard.token();
    guard.unlock().await.unwrap();
    token
}

fn is_held(server: &Server, name: &str) -> bool {
    server.holder(name).is_some()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_is_asked_once_and_has_it_back_when_it_was_idle_for_long_enough() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.lock("k").keep(Duration::from_millis(300));
    let first = lock.lock().await.unwrap();
    let token = first.token();
    drop(first);
    let mut used = Instant::now();
    for _ in 0..10_000 {
        // Stopped for so long, it has given it back.
        if used.elapsed() > Duration::from_millis(200) {
            return;
        }
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.token(), token);
        assert!(!guard.is_lost());
        guard.unlock().await.unwrap();
        used = Instant::now();
    }
    assert_eq!(calls(&server, "acquire"), 1);
    assert_eq!(calls(&server, "release"), 0);
    until("it is given back", || !is_held(&server, "k"));
    assert!(used.elapsed() >= Duration::from_millis(299));
    assert!(lock.lock().await.unwrap().token() > token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_wants_it_has_it_at_once_if_it_is_idle() {
    let server = Server::start();
    let [client, rival] = two_clients(&server).await;
    let lock = kept(&client, "k");
    for round in 0..20 {
        let token = leave_idle(&lock).await;
        let other = rival.lock("k");
        let guard = if round % 2 == 0 {
            soon(other.lock()).await.unwrap()
        } else {
            // A caller that does not wait is refused once.
            assert!(other.try_lock().await.unwrap_err().is_not_acquired());
            until("it is given back", || !is_held(&server, "k"));
            other.try_lock().await.unwrap()
        };
        assert!(guard.token() > token);
        guard.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_wants_it_has_it_after_its_present_use_and_before_those_who_wait_here() {
    let server = Server::start();
    let [client, rival] = two_clients(&server).await;
    let lock = kept(&client, "k");
    let guard = lock.lock().await.unwrap();
    let (second, third) = (lock.lock(), lock.lock());
    tokio::pin!(second, third);
    assert!(poll_once(second.as_mut()).await.is_pending());
    assert!(poll_once(third.as_mut()).await.is_pending());
    assert_eq!(calls(&server, "acquire"), 1, "they wait here");
    let other = rival.lock("k");
    let other = other.lock();
    tokio::pin!(other);
    assert!(poll_once(other.as_mut()).await.is_pending());
    until("it waits in the server", || {
        server.waiting_owners("k").len() == 1
    });
    // Until the holder's process has heard of it, the lock would go to the next caller here.
    until("the holder's process has heard of it", || {
        server.info_number("rlock_unacknowledged_events") == 0
    });
    soon(guard.wanted()).await.unwrap();
    let fourth = lock.lock();
    tokio::pin!(fourth);
    assert!(poll_once(fourth.as_mut()).await.is_pending());
    let first = guard.token();
    guard.unlock().await.unwrap();
    let others = soon(other).await.unwrap();
    assert!(others.token() > first);
    assert!(poll_once(second.as_mut()).await.is_pending());
    // One of those who wait here joins the end of the server's queue.
    until("the next waits in the server", || {
        server.waiting_owners("k").len() == 1
    });
    others.unlock().await.unwrap();
    let second = soon(second).await.unwrap();
    assert!(poll_once(third.as_mut()).await.is_pending());
    drop(second);
    let third = soon(third).await.unwrap();
    assert!(poll_once(fourth.as_mut()).await.is_pending());
    drop(third);
    let fourth = soon(fourth).await.unwrap();
    let token = fourth.token();
    fourth.unlock().await.unwrap();
    // Nobody waits any more: it is kept again.
    assert_eq!(lock.lock().await.unwrap().token(), token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_wait_here_are_served_in_order_and_may_go() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = kept(&client, "k");
    let guard = lock.lock().await.unwrap();
    let token = guard.token();
    // Refused, in its time, and without asking the server.
    let error = lock.try_lock().await.unwrap_err();
    assert!(error.is_not_acquired());
    assert!(error.lease_left().unwrap() > Duration::ZERO);
    let waited = lock.lock_timeout(Duration::from_millis(20)).await;
    assert!(waited.unwrap_err().is_not_acquired());
    let mut waits = Vec::new();
    for _ in 0..6 {
        let mut wait = Box::pin(lock.lock());
        assert!(poll_once(wait.as_mut()).await.is_pending());
        waits.push(wait);
    }
    drop(waits.remove(3));
    drop(waits.remove(0));
    guard.unlock().await.unwrap();
    for _ in 0..4 {
        for later in waits.iter_mut().skip(1) {
            assert!(poll_once(later.as_mut()).await.is_pending());
        }
        let guard = soon(waits.remove(0)).await.unwrap();
        assert_eq!(guard.token(), token);
        drop(guard);
    }
    // One that was given the lock, and never looked.
    let guard = lock.lock().await.unwrap();
    let mut wait = Box::pin(lock.lock());
    assert!(poll_once(wait.as_mut()).await.is_pending());
    drop(guard);
    drop(wait);
    assert_eq!(lock.try_lock().await.unwrap().token(), token);
    assert_eq!(calls(&server, "acquire"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_lost_is_not_handed_on() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = kept(&client, "k");
    let token = leave_idle(&lock).await;
    let told = calls(&server, "events");
    server.run("RLOCK.BREAK k");
    // Word of it is acknowledged by the next call, behind which the client knows.
    until("the client knows", || {
        calls(&server, "events") > told && server.info_number("rlock_unacknowledged_events") == 0
    });
    let guard = lock.lock().await.unwrap();
    assert!(guard.token() > token);
    // And while it is used: a waiter here asks the server.
    let waiting = lock.lock();
    tokio::pin!(waiting);
    assert!(poll_once(waiting.as_mut()).await.is_pending());
    server.run("RLOCK.BREAK k");
    let next = soon(waiting).await.unwrap();
    assert_eq!(soon(guard.lost()).await, LostReason::Broken);
    assert!(next.token() > guard.token());
    assert!(guard.unlock().await.unwrap_err().is_lost());
    assert!(!next.is_lost());
    next.unlock().await.unwrap();
}

/// The client asks the server once more whether it is lost. A caller that asked for the lock
/// meanwhile would be handed a lock that another owner may have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_said_was_lost_is_not_handed_on_before_that_is_confirmed() {
    let server = Server::start();
    let (client, near, _far) = two_ways(&server, calm()).await;
    let lock = kept(&client, "k");
    leave_idle(&lock).await;
    near.cut_to_server();
    server.run("RLOCK.BREAK k");
    let handed_on = async || {
        let taken = tokio::time::timeout(Duration::from_millis(50), lock.lock()).await;
        taken.is_ok()
    };
    let told = async { while handed_on().await {} };
    soon(told).await;
    near.heal();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_handed_on_while_half_of_a_lease_and_of_the_longest_hold_are_left() {
    let server = Server::start();
    let client = client(&server).await;
    let limited = |name| {
        let lock = client.lock(name);
        [
            lock.clone().lease(Duration::from_secs(2)),
            lock.max_hold(Duration::from_secs(2)),
        ]
    };
    for (name, lock) in ["lease", "longest"].into_iter().zip(limited("k")) {
        let lock = lock.keep(LONG);
        let begun = Instant::now();
        let token = lock.lock().await.unwrap().token();
        let guard = lock.lock().await.unwrap();
        // Unless this was stopped for a second.
        assert!(guard.token() == token || begun.elapsed() > Duration::from_millis(900));
        drop(guard);
        tokio::time::sleep_until(begun + Duration::from_millis(1_050)).await;
        let guard = lock.lock().await.unwrap();
        assert!(guard.token() > token, "{name}");
        drop(guard);
        until("it is free", || {
            server.run("RLOCK.BREAK k");
            !is_held(&server, "k")
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_handed_on_with_a_lease_that_is_longer_than_the_grace() {
    let server = Server::start();
    let client = connect(calm().grace(Duration::from_secs(15)), &server).await;
    let lock = kept(&client, "k").lease(Duration::from_secs(300));
    for _ in 0..3 {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    assert_eq!(calls(&server, "acquire"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_owner_takes_nothing_else_and_it_has_no_other_owner() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = kept(&client, "k");
    let guard = lock.lock().await.unwrap();
    for other in ["k", "other"] {
        let again = client.lock(other).owner(guard.owner());
        let refused = again.lock().await.unwrap_err();
        assert!(refused.is_refused(), "{refused}");
        assert!(again.try_lock().await.unwrap_err().is_refused());
    }
    let several = client.multi(["l", "m"]).owner(guard.owner());
    assert!(several.try_lock().await.unwrap_err().is_refused());
    let refused = kept(&client, "k").owner(&client.owner()).lock().await;
    assert!(refused.unwrap_err().is_refused());
    let refused = client.scope().lock("k").keep(LONG).try_lock().await;
    assert!(refused.unwrap_err().is_refused());
    for idle in [Duration::ZERO, Duration::MAX] {
        let refused = client.lock("k").keep(idle).lock().await.unwrap_err();
        assert!(refused.is_refused(), "{refused}");
        let text = refused.to_string();
        assert!(
            text.contains("keep from 1 to 9007199254740991 ms"),
            "{text}"
        );
    }
    assert_eq!(calls(&server, "acquire"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_are_kept_than_may_be_and_the_oldest_go_first() {
    let server = Server::start();
    let client = connect(calm().kept_max(3), &server).await;
    let names = ["a", "b", "c", "d", "e"];
    let use_it = async |name: &str| soon(kept(&client, name).lock()).await.unwrap();
    for name in ["a", "b", "c"] {
        use_it(name).await.unlock().await.unwrap();
    }
    // Not the oldest any more.
    drop(use_it("a").await);
    // A lock in use does not count.
    let used = use_it("d").await;
    assert!(["a", "b", "c"].iter().all(|name| is_held(&server, name)));
    used.unlock().await.unwrap();
    until("one has gone", || !is_held(&server, "b"));
    use_it("e").await.unlock().await.unwrap();
    until("another has gone", || !is_held(&server, "c"));
    let held: Vec<_> = names.iter().filter(|name| is_held(&server, name)).collect();
    assert_eq!(held, [&"a", &"d", &"e"]);

    let none = connect(calm().kept_max(0), &server).await;
    soon(kept(&none, "none").lock())
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    until("it is given back", || !is_held(&server, "none"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_goes_back_with_the_client() {
    let server = Server::start();
    let [client, other] = two_clients(&server).await;
    let idle = leave_idle(&kept(&client, "idle")).await;
    let used = kept(&client, "used").lock().await.unwrap();
    let waiting = kept(&client, "used");
    let waiting = waiting.lock();
    tokio::pin!(waiting);
    assert!(poll_once(waiting.as_mut()).await.is_pending());
    soon(client.shutdown()).await;
    assert!(!is_held(&server, "idle"));
    let ended = soon(waiting).await.unwrap_err();
    assert!(ended.is_unavailable(), "{ended}");
    assert!(!used.is_lost());
    used.unlock().await.unwrap();
    soon(client.shutdown()).await;
    assert!(!is_held(&server, "used"));

    // With its last handle; a lock in use, with its guard.
    assert!(leave_idle(&kept(&other, "idle")).await > idle);
    let used = kept(&other, "used").lock().await.unwrap();
    drop(other);
    until("it is given back", || !is_held(&server, "idle"));
    assert!(is_held(&server, "used"));
    drop(used);
    until("it is given back", || !is_held(&server, "used"));
}

/// The ACQUIRE itself asks for the event. If a later command did, a caller refused in between would
/// not be reported, and would be refused again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_tries_is_refused_once_at_most() {
    let server = Server::start();
    let [client, other] = two_clients(&server).await;
    let (lock, others) = (kept(&client, "k"), other.lock("k"));
    for _ in 0..20 {
        leave_idle(&lock).await;
        let refused = soon(others.try_lock()).await.unwrap_err();
        assert!(refused.is_not_acquired(), "{refused}");
        until("it has gone back", || !is_held(&server, "k"));
        soon(others.try_lock())
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    assert_eq!(calls(&server, "renew"), 0);
}

/// Takes the lock again and again, by all its verbs, and counts beside a counter that nothing else
/// protects. Some give up, and some calls are dropped.
async fn count(lock: Lock, inside: Arc<AtomicU64>, total: Arc<AtomicU64>, number: u64) {
    for round in 0..400_u64 {
        let patience = Duration::from_micros(number * 97 % 500 + round % 50);
        let guard = match (round + number) % 4 {
            0 => lock.try_lock().await.ok(),
            1 => lock.lock_timeout(patience).await.ok(),
            2 => {
                let taken = tokio::time::timeout(patience, lock.lock()).await;
                taken.ok().map(Result::unwrap)
            }
            _ => Some(soon(lock.lock()).await.unwrap()),
        };
        let Some(guard) = guard else { continue };
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two owners");
        if round.is_multiple_of(8) {
            tokio::task::yield_now().await;
        }
        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1, "two owners");
        total.fetch_add(1, Ordering::SeqCst);
        check(guard, round).await;
    }
}

async fn check(guard: Guard, round: u64) {
    assert!(!guard.is_lost());
    if round.is_multiple_of(3) {
        guard.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_of_several_processes_exclude_each_other_and_leave_nothing_behind() {
    let server = Server::start();
    let (inside, total) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
    let mut tasks = JoinSet::new();
    let clients = two_clients(&server).await;
    let strangers = client(&server).await;
    let locks = clients.iter().map(|client| kept(client, "k"));
    let short = clients[0].lock("k").keep(Duration::from_millis(1));
    let locks: Vec<_> = locks.chain([short, strangers.lock("k")]).collect();
    for number in 0..12_u64 {
        let lock = locks[usize::try_from(number).unwrap() % locks.len()].clone();
        tasks.spawn(count(lock, inside.clone(), total.clone(), number));
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    assert!(total.load(Ordering::SeqCst) >= 1_200);
    for client in clients.iter().chain([&strangers]) {
        soon(client.shutdown()).await;
    }
    assert!(!is_held(&server, "k"));
    assert!(server.waiting_owners("k").is_empty());
}

#[tokio::test]
async fn who_does_nothing_else_hears_of_others_all_the_same() {
    let server = Server::start();
    let lock = kept(&client(&server).await, "k");
    let url = url(&server);
    let others = std::thread::spawn(move || {
        let client = blocking::Client::connect(&url).unwrap();
        for _ in 0..10 {
            client.lock("k").lock().unwrap().unlock().unwrap();
        }
    });
    let deadline = Instant::now() + Duration::from_secs(30);
    while !others.is_finished() {
        assert!(Instant::now() < deadline, "they wait for ever");
        drop(lock.lock().await.unwrap());
    }
    others.join().unwrap();
}

/// Nobody but this one task ever wants the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_tries_is_not_refused_by_what_it_keeps_itself() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.lock("k");
    let terms = [
        lock.clone().lease(Duration::from_secs(1)),
        lock.max_hold(Duration::from_secs(1)),
    ];
    let mut refused = Vec::new();
    for lock in terms.map(|lock| lock.keep(LONG)) {
        lock.try_lock().await.unwrap().unlock().await.unwrap();
        tokio::time::sleep(Duration::from_millis(600)).await;
        match lock.try_lock().await {
            Ok(guard) => guard.unlock().await.unwrap(),
            Err(error) => refused.push(error.to_string()),
        }
        server.run("RLOCK.BREAK k");
        until("it is free", || !is_held(&server, "k"));
    }
    assert!(refused.is_empty(), "refused by nobody: {refused:?}");
}

/// The server does not answer, and both say so without `keep`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn that_the_server_does_not_answer_is_not_told_as_refused() {
    for keeps in [false, true] {
        let server = Server::start();
        let builder = Client::builder()
            .grace(Duration::from_secs(300))
            .response_timeout(Duration::from_secs(2));
        let client = connect(builder, &server).await;
        let lock = client.lock("k");
        let lock = if keeps { lock.keep(LONG) } else { lock };
        server.freeze();
        let patience = Duration::from_millis(200);
        let (first, second) =
            tokio::join!(lock.lock_timeout(patience), lock.lock_timeout(patience));
        server.thaw();
        let told = [first, second].map(|one| one.unwrap_err());
        assert!(
            told.iter().all(|error| !error.is_not_acquired()),
            "keeps {keeps}: {told:?}"
        );
    }
}

/// The first call has failed, and its caller does something else: the next is told of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_behind_a_call_that_has_failed_is_told_too() {
    for keeps in [false, true] {
        let mut server = Server::start();
        let builder = Client::builder()
            .grace(Duration::from_secs(300))
            .response_timeout(Duration::from_millis(500));
        let client = connect(builder, &server).await;
        let lock = client.lock("k");
        let lock = if keeps { lock.keep(LONG) } else { lock };
        server.kill();
        let first = lock.lock();
        tokio::pin!(first);
        if poll_once(first.as_mut()).await.is_ready() {
            // On a busy machine the client knew already that the server is gone.
            continue;
        }
        let second = tokio::time::timeout(Duration::from_secs(8), lock.lock()).await;
        assert!(second.is_ok(), "keeps {keeps}: it never came");
        client.shutdown().await;
    }
}

/// Both are polled, one after the other, while another guard has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_are_served_in_the_order_in_which_they_are_first_polled() {
    for keeps in [false, true] {
        let server = Server::start();
        let client = client(&server).await;
        let lock = client.lock("k");
        let lock = if keeps { lock.keep(LONG) } else { lock };
        let held = lock.lock().await.unwrap();
        let (told, mut order) = tokio::sync::mpsc::unbounded_channel();
        let (polled, is_polled) = std::sync::mpsc::channel();
        let (next, go_on) = std::sync::mpsc::channel::<()>();
        let first = lock.clone();
        let second: &'static Lock = Box::leak(Box::new(lock.clone()));
        let (one, two) = (told.clone(), told);
        tokio::spawn(async move {
            // Its task has had its share, as one that reads from a channel at times has.
            while tokio::task::coop::has_budget_remaining() {
                tokio::task::coop::consume_budget().await;
            }
            let mut first = Box::pin(first.lock());
            assert!(poll_once(first.as_mut()).await.is_pending());
            polled.send(()).unwrap();
            tokio::task::block_in_place(|| go_on.recv().unwrap());
            let guard = first.await.unwrap();
            one.send(1).unwrap();
            drop(guard);
        });
        tokio::task::block_in_place(|| is_polled.recv().unwrap());
        let mut second = Box::pin(second.lock());
        assert!(poll_once(second.as_mut()).await.is_pending());
        next.send(()).unwrap();
        tokio::spawn(async move {
            let guard = second.await.unwrap();
            two.send(2).unwrap();
            drop(guard);
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(held);
        assert_eq!(soon(order.recv()).await, Some(1), "keeps {keeps}");
    }
}

/// Used again, they are not idle, and do not count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_used_does_not_count_against_what_is_idle() {
    let server = Server::start();
    let client = connect(calm().kept_max(3), &server).await;
    let use_it = async |name: &str| soon(kept(&client, name).lock()).await.unwrap();
    for name in ["x", "a", "b"] {
        use_it(name).await.unlock().await.unwrap();
    }
    let used = [use_it("a").await, use_it("b").await];
    use_it("c").await.unlock().await.unwrap();
    // Idle are x and c.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(is_held(&server, "c"));
    assert!(
        is_held(&server, "x"),
        "two of three were idle, and one went"
    );
    drop(used);
}

/// With a grace of zero the server frees it with the connection. The client knows that it has none,
/// and goes on to hand the lock to calls that come long after somebody else has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_went_with_the_connection_is_not_handed_on() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let builder = calm().grace(Duration::ZERO);
    let builder = builder.response_timeout(Duration::from_secs(1));
    let url = format!("redis://{}", proxy.address());
    let client = builder.connect(&url).await.unwrap();
    let lock = kept(&client, "k");
    let first = leave_idle(&lock).await;
    proxy.cut_to_server();
    proxy.cut_to_client();
    proxy.sever();
    until("the server frees it", || !is_held(&server, "k"));
    let others = server.run("RLOCK.ACQUIRE k alice 600000").held();
    until("the client knows that it is not connected", || {
        let plain = tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(client.lock("k").try_lock())
        });
        plain.is_err_and(|error| error.is_unavailable())
    });
    let mut handed_on = Vec::new();
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if let Ok(guard) = lock.lock_timeout(Duration::from_millis(10)).await {
            handed_on.push((guard.is_lost(), guard.token() == first));
        }
    }
    assert!(handed_on.is_empty(), "{others:?} has it: {handed_on:?}");
}

#[test]
fn without_async_it_is_the_same() {
    let server = Server::start();
    let client = blocking::Client::connect(&url(&server)).unwrap();
    let lock = client.lock("k").keep(LONG);
    let token = lock.lock().unwrap().token();
    for _ in 0..100 {
        let guard = lock.lock().unwrap();
        assert_eq!(guard.token(), token);
        guard.unlock().unwrap();
    }
    assert_eq!(calls(&server, "acquire"), 1);
}

/// Its session has ended with its connections, and nobody would hear of a loss: grace zero, so that
/// the server has given the lock to another at once.
#[test]
fn what_a_runtime_has_kept_that_has_ended_is_not_handed_on() {
    let server = Server::start();
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let settings = Client::builder().grace(Duration::ZERO);
    let connecting = async { settings.connect(&url(&server)).await.unwrap() };
    let lock = kept(&first.block_on(connecting), "k");
    first.block_on(leave_idle(&lock));
    assert!(is_held(&server, "k"));
    first.shutdown_timeout(LONG);
    second.block_on(async {
        let rival = connect(Client::builder(), &server).await;
        let guard = soon(rival.lock("k").lock()).await.unwrap();
        assert!(soon(lock.lock()).await.is_err());
        guard.unlock().await.unwrap();
    });
}

/// Nobody is left who could answer it.
#[test]
fn a_call_ends_that_waits_when_the_runtime_of_its_client_ends() {
    let server = Server::start();
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let connecting = async { Client::builder().connect(&url(&server)).await.unwrap() };
    let client = first.block_on(connecting);
    second.block_on(async {
        let rival = connect(Client::builder(), &server).await;
        let _guard = soon(rival.lock("k").lock()).await.unwrap();
        let lock = client.lock("k");
        let waiting = see_in_queue(&server, "k", async move { lock.lock().await });
        first.shutdown_background();
        assert!(soon(waiting).await.unwrap().is_err());
    });
}
