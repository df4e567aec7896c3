//! The calls and guards of one owner do nothing to each other that was not asked for.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rlock_client::{Client, LostReason};
use rlock_tests::{Proxy, Server, until};
use tokio::time::{sleep, timeout};

use super::client::{
    MS, calls, calm, client, once_in_ten, patient, see_in_queue, soon, two_clients,
};
use super::client_faults::{
    LONG_GRACE, kill_session_connection, session_connection, session_connections,
};
use super::client_sentinel::kill_command_connection;

const EVENTS: &str = "RLOCK.EVENTS";
const ACQUIRE: &str = "RLOCK.ACQUIRE";
const HELLO: &str = "HELLO";
const BIND: &str = "RLOCK.BIND";

/// A proxy that can hold back what the server sends on connections on which a word was said.
struct Valve {
    address: SocketAddr,
    closed: Closed,
}

/// The words whose connections hear nothing.
type Closed = Arc<Mutex<Vec<&'static str>>>;

impl Valve {
    fn to(server: &Server) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (server, closed) = (server.address(), Closed::default());
        let shared = Arc::clone(&closed);
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(server).unwrap());
                let said =
                    [EVENTS, ACQUIRE, HELLO, BIND].map(|word| (word, AtomicBool::new(false)));
                let said = Arc::new(said);
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let heard = Arc::clone(&said);
                thread::spawn(move || {
                    pass(client, server, |bytes| {
                        for (word, is_said) in &*heard {
                            is_said.fetch_or(bytes.contains(word), Ordering::SeqCst);
                        }
                    });
                });
                let closed = Arc::clone(&shared);
                thread::spawn(move || {
                    pass(back.0, back.1, |_| {
                        let is_closed = |(word, is_said): &(&str, AtomicBool)| {
                            is_said.load(Ordering::SeqCst) && closed.lock().unwrap().contains(word)
                        };
                        while said.iter().any(is_closed) {
                            thread::sleep(MS);
                        }
                    });
                });
            }
        });
        Self { address, closed }
    }

    fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    fn close(&self, word: &'static str) {
        self.closed.lock().unwrap().push(word);
    }

    fn open(&self, word: &str) {
        self.closed.lock().unwrap().retain(|one| *one != word);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, before: impl Fn(&str)) {
    let mut bytes = [0; 16 * 1024];
    loop {
        let count = from.read(&mut bytes).unwrap_or(0);
        if count > 0 {
            before(&String::from_utf8_lossy(&bytes[..count]));
        }
        if count == 0 || to.write_all(&bytes[..count]).is_err() {
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
}

/// Sees that the client has heard what the server has told its session so far.
fn see_told(server: &Server) {
    let before = calls(server, "events");
    until("the session is told", || calls(server, "events") > before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_of_another_client_is_refused() {
    let server = Server::start();
    let [one, other] = two_clients(&server).await;
    let owner = one.owner();
    let held = one.lock("k").owner(&owner).lock().await.unwrap();
    let (lock, both) = (other.lock("k"), other.multi(["k", "l"]));
    let (lock, both) = (lock.owner(&owner), both.owner(&owner));
    let prices = other.rw_lock("r").owner(&owner);
    let errors = [
        lock.try_lock().await.map(drop),
        lock.lock().await.map(drop),
        lock.lock_timeout(Duration::from_secs(1)).await.map(drop),
        both.try_lock().await.map(drop),
        prices.read().await.map(drop),
        prices.try_write().await.map(drop),
        other
            .lock("free")
            .owner(held.owner())
            .lock()
            .await
            .map(drop),
    ];
    for error in errors {
        let error = error.unwrap_err();
        assert!(error.is_refused(), "{error}");
        assert!(error.to_string().contains("another client"), "{error}");
    }
    assert_eq!(calls(&server, "acquire"), 1, "the server is not asked");
    let clone = one.clone().lock("k").owner(&owner);
    drop(clone.try_lock().await.unwrap());
    held.unlock().await.unwrap();
}

fn lease_of(server: &Server, name: &str) -> Duration {
    let ms = server.run(format!("PTTL {name}")).int();
    Duration::from_millis(u64::try_from(ms).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_lease_that_was_not_granted_is_not_given_to_other_guards() {
    let server = Server::start();
    let client = client(&server).await;
    let mut alice = server.connect();
    alice.take("b", "alice");
    let owner = client.owner();
    let short = Duration::from_secs(30);
    let held = client.lock("a").owner(&owner).lease(short).lock().await;
    let held = held.unwrap();
    let both = client.multi(["a", "b"]).owner(&owner);
    let both = both.lease(Duration::from_secs(3_600));
    let not_now = both.try_lock().await.unwrap_err();
    assert!(not_now.is_not_acquired(), "{not_now}");
    held.renew().await.unwrap();
    assert!(lease_of(&server, "a") <= short);
    // The same of one that waits: its lease begins when it is granted.
    let waiting = see_in_queue(&server, "b", async move { both.lock().await });
    // Until it has heard that it is in the queue, it may have been granted.
    let unpromised = async {
        loop {
            held.renew().await.unwrap();
            if lease_of(&server, "a") <= short {
                return;
            }
        }
    };
    soon(unpromised).await;
    alice.let_go("b", "alice");
    let granted = soon(waiting).await.unwrap().unwrap();
    held.renew().await.unwrap();
    // The first guard of a hold has settled its lease.
    assert!(lease_of(&server, "a") <= short);
    assert!(granted.valid_for() <= short);
    assert!(lease_of(&server, "b") > short);
    granted.unlock().await.unwrap();
    held.unlock().await.unwrap();
}

/// A longer lease, asked for with another lock as well, may yet be granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_beside_a_long_lease_under_way_is_no_promise_of_it() {
    let server = Server::start();
    let valve = Valve::to(&server);
    let client = patient().connect(&valve.url()).await.unwrap();
    let mut alice = server.connect();
    alice.take("b", "alice");
    let owner = client.owner();
    let short = Duration::from_secs(30);
    let held = client.lock("a").owner(&owner).lease(short).lock().await;
    let held = Arc::new(held.unwrap());
    let both = client.multi(["a", "b"]).owner(&owner);
    let both = both.lease(Duration::from_secs(3_600));
    valve.close(ACQUIRE);
    let asked = calls(&server, "acquire");
    let trying = tokio::spawn(async move { both.try_lock().await.map(drop) });
    until("it has tried", || calls(&server, "acquire") > asked);
    let renewed = Arc::clone(&held);
    let renewing = tokio::spawn(async move { renewed.renew().await });
    until("it is renewed", || calls(&server, "renew") == 1);
    valve.open(ACQUIRE);
    let not_now = soon(trying).await.unwrap().unwrap_err();
    assert!(not_now.is_not_acquired(), "{not_now}");
    soon(renewing).await.unwrap().unwrap();
    assert!(held.valid_for() <= short);
    held.renew().await.unwrap();
    assert!(lease_of(&server, "a") <= short);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_was_refused_does_not_harm_other_guards() {
    let server = Server::start();
    let client = client(&server).await;
    let owner = client.owner();
    let short = Duration::from_secs(30);
    let held = client.lock("a").owner(&owner).lease(short).lock().await;
    let held = held.unwrap();
    let both = client.multi(["a", "b"]).owner(&owner);
    let refused = both.lease(Duration::from_millis(1 << 60)).try_lock().await;
    let refused = refused.unwrap_err();
    assert!(refused.is_refused(), "{refused}");
    held.renew().await.unwrap();
    assert!(lease_of(&server, "a") <= short);
    held.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn news_of_an_earlier_hold_does_not_end_the_next_one() {
    let server = Server::start();
    let valve = Valve::to(&server);
    let client = patient().connect(&valve.url()).await.unwrap();
    let owner = client.owner();
    let lock = client.lock("k").owner(&owner);
    let lose = async |lock: &rlock_client::Lock| {
        let first = lock.lock().await.unwrap();
        valve.close(EVENTS);
        server.run("RLOCK.BREAK k");
        assert!(first.unlock().await.unwrap_err().is_lost());
    };

    // Told before the grant is heard.
    lose(&lock).await;
    valve.close(ACQUIRE);
    let again = lock.clone();
    let next = tokio::spawn(async move { again.lock().await });
    until("it is granted", || server.holder("k").is_some());
    valve.open(EVENTS);
    see_told(&server);
    valve.open(ACQUIRE);
    let next = soon(next).await.unwrap().unwrap();
    let early = timeout(200 * MS, next.lost()).await;
    assert!(early.is_err(), "{early:?}");
    next.unlock().await.unwrap();

    // Told while it waits in the queue.
    lose(&lock).await;
    let mut alice = server.connect();
    alice.take("k", "alice");
    let again = lock.clone();
    let waiting = see_in_queue(&server, "k", async move { again.lock().await });
    let asked = calls(&server, "acquire");
    valve.open(EVENTS);
    see_told(&server);
    alice.let_go("k", "alice");
    let next = soon(waiting).await.unwrap().unwrap();
    assert!(!next.is_lost());
    next.unlock().await.unwrap();
    assert_eq!(calls(&server, "acquire"), asked, "it kept its place");

    // A loss of this very hold, told before the grant is heard.
    valve.close(ACQUIRE);
    let again = lock.clone();
    let next = tokio::spawn(async move { again.lock().await });
    until("it is granted", || server.holder("k").is_some());
    server.run("RLOCK.BREAK k");
    see_told(&server);
    valve.open(ACQUIRE);
    let next = soon(next).await.unwrap().unwrap();
    assert_eq!(soon(next.lost()).await, LostReason::Broken);
}

/// The same of a writer and of several locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn news_of_an_earlier_writer_or_of_several_locks_does_not_end_the_next_one() {
    let server = Server::start();
    let valve = Valve::to(&server);
    let client = patient().connect(&valve.url()).await.unwrap();
    let owner = client.owner();

    let prices = client.rw_lock("r").owner(&owner);
    let first = prices.write().await.unwrap();
    valve.close(EVENTS);
    server.run("RLOCK.BREAK r");
    assert!(first.unlock().await.unwrap_err().is_lost());
    let next = prices.write().await.unwrap();
    valve.open(EVENTS);
    let early = timeout(200 * MS, next.lost()).await;
    assert!(early.is_err(), "{early:?}");
    server.run("RLOCK.BREAK r");
    assert_eq!(soon(next.lost()).await, LostReason::Broken);

    let both = client.multi(["a", "b"]).owner(&owner);
    let first = both.lock().await.unwrap();
    valve.close(EVENTS);
    server.run("RLOCK.BREAK a");
    server.run("RLOCK.BREAK b");
    assert!(first.unlock().await.unwrap_err().is_lost());
    let next = both.lock().await.unwrap();
    valve.open(EVENTS);
    let early = timeout(200 * MS, next.lost()).await;
    assert!(early.is_err(), "{early:?}");
    server.run("RLOCK.BREAK a");
    assert_eq!(soon(next.lost()).await, LostReason::Broken);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_that_is_granted_across_a_reconnect_is_held() {
    let server = Server::start();
    let valve = Valve::to(&server);
    let builder = calm().grace(LONG_GRACE);
    let client = builder.connect(&valve.url()).await.unwrap();
    let prices = client.rw_lock("r");
    let writer = prices.write().await.unwrap();
    let lock = client.lock("k");
    valve.close(ACQUIRE);
    let plain = tokio::spawn(async move { lock.try_lock().await });
    let reader = tokio::spawn(writer.downgrade());
    until("they are granted", || calls(&server, "acquire") == 3);
    let before = session_connection(&server).unwrap();
    kill_session_connection(&server);
    until("the session is attached anew", || {
        session_connections(&server).iter().any(|id| *id != before)
    });
    valve.open(ACQUIRE);
    let plain = soon(plain).await.unwrap().unwrap();
    let reader = soon(reader).await.unwrap().unwrap();
    let lost = async {
        tokio::select! {
            reason = plain.lost() => reason,
            reason = reader.lost() => reason,
        }
    };
    let lost = timeout(LONG_GRACE + Duration::from_secs(1), lost).await;
    assert!(lost.is_err(), "{lost:?}");
    plain.unlock().await.unwrap();
    reader.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_call_of_an_owner_in_line_ends_in_time_while_it_connects() {
    once_in_ten("it ends in time", async || {
        let server = Server::start();
        let valve = Valve::to(&server);
        let response = Duration::from_secs(2);
        let builder = Client::builder().grace(Duration::from_secs(60));
        let builder = builder.response_timeout(response);
        let client = builder.connect(&valve.url()).await.unwrap();
        let mut alice = server.connect();
        alice.take("k", "alice");
        let lock = client.lock("k").owner(&client.owner());
        let first = lock.clone();
        let waiting = see_in_queue(&server, "k", async move { first.lock().await });
        // Connecting takes nearly as long as it may. The second waits behind the first, here.
        server.run("CLIENT PAUSE 60000 WRITE");
        valve.close(HELLO);
        kill_command_connection(&server);
        sleep(100 * MS).await;
        let started = Instant::now();
        let second = tokio::spawn(async move { lock.lock_timeout(100 * MS).await });
        sleep(1_500 * MS).await;
        valve.open(HELLO);
        let error = soon(second).await.unwrap().unwrap_err();
        let took = started.elapsed();
        // Unless the connection was killed before it told the first call that it is queued: then
        // that call may end without an answer.
        let was_queued = error.is_not_acquired();
        server.run("CLIENT UNPAUSE");
        alice.let_go("k", "alice");
        match soon(waiting).await.unwrap() {
            Ok(first) => first.unlock().await.unwrap(),
            Err(error) => assert!(!was_queued && error.is_unknown(), "{error:?}"),
        }
        client.shutdown().await;
        assert_eq!(server.run("EXISTS k"), 0);
        was_queued && took < response + 600 * MS
    })
    .await;
}

/// Several locks are granted, and one of them is deleted. The event arrives before the reply with
/// the grant: both locks have one token, and only the deleted one is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_loss_of_one_of_several_leaves_the_others_to_be_released() {
    let server = Server::start();
    let valve = Valve::to(&server);
    let client = patient().connect(&valve.url()).await.unwrap();
    valve.close(BIND);
    let locks = client.multi(["a", "b"]);
    let taking = tokio::spawn(async move { locks.lock().await });
    until("both are granted", || server.holder("b").is_some());
    server.run("DEL a");
    see_told(&server);
    see_told(&server);
    valve.open(BIND);
    let guard = soon(taking).await.unwrap().unwrap();
    assert!(guard.is_lost(), "of a it has heard already");
    drop(guard);
    until("b is given back", || server.holder("b").is_none());
}

/// A wait is dropped in the moment of its grant. It is given back, and that is waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_waits_until_a_grant_to_nobody_is_given_back() {
    let server = Server::start();
    let valve = Valve::to(&server);
    let client = patient().connect(&valve.url()).await.unwrap();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let lock = client.lock("k");
    let waiting = see_in_queue(&server, "k", async move { lock.lock().await });
    valve.close(EVENTS);
    valve.close(ACQUIRE);
    alice.let_go("k", "alice");
    until("it is granted", || server.holder("k").is_some());
    waiting.abort();
    until("it is given back", || server.holder("k").is_none());
    let early = timeout(200 * MS, client.shutdown()).await;
    assert!(early.is_err(), "nobody has heard that it was");
    valve.open(ACQUIRE);
    soon(client.shutdown()).await;
    assert_eq!(server.run("DBSIZE"), 0);
}

/// A lock was broken, and its guard has not heard of it. The guard is dropped, and the same owner
/// takes the lock anew. The release of the first hold leaves the second alone, and so does the late
/// event of the first one's loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_of_a_lost_hold_leaves_no_guard_that_lies() {
    let server = Server::start();
    let valve = Valve::to(&server);
    let client = patient().connect(&valve.url()).await.unwrap();
    let owner = client.owner();
    let (shared, both) = (client.rw_lock("k"), client.multi(["k", "l"]));
    let (shared, both) = (shared.owner(&owner), both.owner(&owner));

    let writer = shared.write().await.unwrap();
    valve.close(EVENTS);
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    valve.close(ACQUIRE);
    let released = calls(&server, "release");
    drop(writer);
    let next = tokio::spawn(async move { shared.write().await });
    until("the release is carried out", || {
        calls(&server, "release") > released
    });
    valve.open(ACQUIRE);
    let next = soon(next).await.unwrap().unwrap();
    assert_eq!(server.run("EXISTS k"), 1);
    valve.open(EVENTS);
    see_told(&server);
    assert!(!next.is_lost());
    next.unlock().await.unwrap();
    assert_eq!(server.run("DBSIZE"), 0);

    let first = both.lock().await.unwrap();
    valve.close(EVENTS);
    assert_eq!(server.run("RLOCK.BREAK k"), 1);
    assert_eq!(server.run("RLOCK.BREAK l"), 1);
    valve.close(ACQUIRE);
    let released = calls(&server, "release");
    drop(first);
    let next = tokio::spawn(async move { both.lock().await });
    until("the releases are carried out", || {
        calls(&server, "release") == released + 2
    });
    valve.open(ACQUIRE);
    let next = soon(next).await.unwrap().unwrap();
    assert_eq!(server.run("EXISTS k l"), 2);
    valve.open(EVENTS);
    see_told(&server);
    assert!(!next.is_lost());
    next.unlock().await.unwrap();
    assert_eq!(server.run("DBSIZE"), 0);
}

/// Several locks are granted, and the word of it is lost with the connection. The owner holds one
/// of them by another guard, so it may not ask again as if it held nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_of_several_whose_word_is_lost_is_not_entered_twice() {
    let server = Server::start();
    let (near, far) = (Proxy::to(server.address()), Proxy::to(server.address()));
    let client = calm().grace(LONG_GRACE);
    let address = format!("redis://{}", near.address());
    let client = client.connect(&address).await.unwrap();
    near.lead_to(far.address());
    kill_session_connection(&server);
    let owner = client.owner();
    let held = client.lock("a").owner(&owner).lock().await.unwrap();
    let mut alice = server.connect();
    alice.take("b", "alice");
    let both = client.multi(["a", "b"]).owner(&owner);
    let waiting = see_in_queue(&server, "b", async move { both.lock().await });
    far.cut_to_client();
    alice.let_go("b", "alice");
    until("it is granted", || server.holder("b").is_some());
    // The reply is lost with the connection, and the next call acknowledges it.
    until("it is told", || {
        server.info_number("rlock_unacknowledged_events") > 0
    });
    far.sever();
    far.heal();
    let both = soon(waiting).await.unwrap().unwrap();
    both.unlock().await.unwrap();
    assert!(server.holder("b").is_none());
    held.unlock().await.unwrap();
    assert_eq!(server.run("DBSIZE"), 0);
}

/// The second call of an owner stands in the queue once the first has left it. Its time is up while
/// it waits for that, and again while it asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_wait_of_an_owner_whose_time_is_up_says_that_the_lock_is_taken() {
    let server = Server::start();
    let client = client(&server).await;
    let mut alice = server.connect();
    alice.take("k", "alice");
    for _ in 0..3 {
        let calls = (0..400).map(|n| {
            let lock = client.lock("k").owner(&client.owner());
            tokio::spawn(async move {
                // About when the first one's time is up, the second has its turn.
                let late = Duration::from_micros(n * 10);
                let first = lock.lock_timeout(20 * MS);
                let second = lock.lock_timeout(20 * MS + late);
                let (first, second) = tokio::join!(first, second);
                [first.unwrap_err(), second.unwrap_err()]
            })
        });
        for call in calls.collect::<Vec<_>>() {
            for error in call.await.unwrap() {
                assert!(error.is_not_acquired(), "{error}");
            }
        }
    }
}
