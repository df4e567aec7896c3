//! The effects of newer answers of the module on the client: WAITING, SESSIONSFULL, OOM, sessions
//! that end while their connection stays.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rlock_client::{Client, ErrorKind};
use rlock_tests::{Proxy, Server, Shards, until};
use tokio::time::sleep;

use super::client::{MS, calm, connect, see_in_queue, soon, url};
use super::client_faults::{
    LONG_GRACE, client_through, kill_session_connection, session_connection,
};
use super::client_session::waiters;

/// A peer that closes each connection on which this word comes: how many connections it was sent.
fn closes_at(server: SocketAddr, word: &'static str) -> (SocketAddr, Arc<AtomicUsize>) {
    let (address, count, _) = closes_later_at(server, word, true);
    (address, count)
}

/// The same from the moment on in which it is told to.
fn closes_later_at(
    server: SocketAddr,
    word: &'static str,
    at_once: bool,
) -> (SocketAddr, Arc<AtomicUsize>, Arc<AtomicBool>) {
    let closes = Arc::new(AtomicBool::new(at_once));
    let begins = Arc::clone(&closes);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let shared = Arc::clone(&count);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(server)) else {
                return;
            };
            shared.fetch_add(1, Ordering::SeqCst);
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            for (mut from, mut to) in [(client, server), back] {
                let closes = Arc::clone(&closes);
                thread::spawn(move || {
                    let mut bytes = [0; 16 * 1024];
                    loop {
                        let count = from.read(&mut bytes).unwrap_or(0);
                        let said = String::from_utf8_lossy(&bytes[..count]);
                        if count == 0
                            || closes.load(Ordering::SeqCst) && said.contains(word)
                            || to.write_all(&bytes[..count]).is_err()
                        {
                            let _ = from.shutdown(Shutdown::Both);
                            let _ = to.shutdown(Shutdown::Both);
                            return;
                        }
                    }
                });
            }
        }
    });
    (address, count, begins)
}

/// Attaching works, and the call that waits fails at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_closes_at_the_call_that_waits_is_connected_to_ever_more_slowly() {
    let server = Server::start();
    let (address, count, begins) = closes_later_at(server.address(), "BLOCK", false);
    let url = format!("redis://{address}");
    let _client = Client::connect(&url).await.unwrap();
    begins.store(true, Ordering::SeqCst);
    let before = count.load(Ordering::SeqCst);
    sleep(3_000 * MS).await;
    let count = count.load(Ordering::SeqCst) - before;
    assert!(count < 30, "{count} connections in 3 s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_closes_at_each_command_is_not_connected_to_for_each() {
    let server = Server::start();
    let (address, count) = closes_at(server.address(), "RLOCK.ACQUIRE");
    let client = Client::connect(&format!("redis://{address}"))
        .await
        .unwrap();
    let ends = Instant::now() + 3_000 * MS;
    while Instant::now() < ends {
        client.lock("k").try_lock().await.unwrap_err();
    }
    let count = count.load(Ordering::SeqCst);
    assert!(count < 100, "{count} connections in 3 s");
}

/// The node can do nothing for a while, so each command makes the client doubt who serves the slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doubts_that_change_nothing_are_looked_into_ever_more_slowly() {
    let node = Server::builder().cluster().start();
    assert_eq!(node.run("CLUSTER ADDSLOTSRANGE 0 16383"), "OK");
    until("it serves all slots", || {
        let state = node.run("CLUSTER INFO").text();
        state.contains("cluster_state:ok")
    });
    let client = Client::connect_cluster([url(&node)]).await.unwrap();
    assert_eq!(node.run("CONFIG SET min-replicas-to-write 1"), "OK");
    let looks = || {
        let stats = node.run("INFO commandstats").text();
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_cluster|slots:calls="));
        let calls = line.and_then(|line| line.split(',').next()?.parse().ok());
        calls.unwrap_or(0_u64)
    };
    let (before, ends) = (looks(), Instant::now() + 4_000 * MS);
    while Instant::now() < ends {
        let error = client.lock("k").try_lock().await.unwrap_err();
        assert!(error.is_unavailable(), "{error}");
        sleep(5 * MS).await;
    }
    let looks = looks() - before;
    assert!((1..20).contains(&looks), "{looks} looks in 4 s");
}

/// The session connection breaks while a wait stands in the queue, and asking anew is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_is_refused_when_it_asks_anew_leaves_no_waiter() {
    let server = Server::start();
    let client = connect(Client::builder().grace(LONG_GRACE), &server).await;
    // Without it the session would end with its connection, and could not begin anew.
    let held = client.lock("held").lock().await.unwrap();
    let mut alice = server.connect();
    assert_eq!(alice.run("RLOCK.ACQUIRE k alice 60000 WRITE").held().0, 1);
    let lock = client.rw_lock("k");
    let waiting = see_in_queue(&server, "k", async move { lock.write().await });
    assert_eq!(server.run("CONFIG SET maxmemory 1"), "OK");
    kill_session_connection(&server);
    let error = soon(waiting).await.unwrap().unwrap_err();
    assert!(
        error.is_refused() && error.to_string().contains("OOM"),
        "{error}"
    );
    until("nobody waits", || waiters(&server) == 0);
    assert_eq!(server.run("CONFIG SET maxmemory 0"), "OK");
    alice.run("RLOCK.RELEASE k alice WRITE");
    assert_eq!(server.run("EXISTS k"), 0);
    assert!(!held.is_lost());
}

async fn refuse_the_session_for_a_while(begin: &str, end: &str, kind: ErrorKind) {
    let server = Server::start();
    let builder = Client::builder()
        .grace(Duration::ZERO)
        .response_timeout(Duration::from_secs(2));
    let client = connect(builder, &server).await;
    let mut alice = server.connect();
    alice.take("k", "alice");
    let lock = client.lock("k");
    let waiting = see_in_queue(&server, "k", async move { lock.lock().await });
    let _other = server.session_connection("other");
    let id = session_connection(&server).unwrap();
    assert_eq!(server.run(begin), "OK");
    assert_eq!(server.run(format!("CLIENT KILL ID {id}")), 1);
    until("it has left the queue", || waiters(&server) == 0);
    let error = client.lock("new").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(!waiting.is_finished(), "it waits for the server");
    assert_eq!(server.run(end), "OK");
    until("it waits again", || server.waiting_owners("k").len() == 1);
    alice.let_go("k", "alice");
    drop(soon(waiting).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_survive_a_server_that_is_full_of_sessions_for_a_while() {
    let (begin, end) = (
        "CONFIG SET rlock.max-sessions 1",
        "CONFIG SET rlock.max-sessions 9",
    );
    refuse_the_session_for_a_while(begin, end, ErrorKind::Unavailable).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_survive_a_server_without_memory_for_a_session_for_a_while() {
    let (begin, end) = ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0");
    refuse_the_session_for_a_while(begin, end, ErrorKind::Refused).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_can_be_used_with_a_node_that_has_no_room_for_a_session() {
    let shards = Shards::start();
    for full in shards.primaries() {
        for (begin, end) in [
            ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
            (
                "CONFIG SET rlock.max-sessions 1",
                "CONFIG SET rlock.max-sessions 100",
            ),
        ] {
            let other = full.session_connection("other");
            assert_eq!(full.run(begin), "OK");
            let urls = shards.primaries().into_iter().map(url);
            let client = Client::builder().connect_cluster(urls).await;
            assert!(client.is_ok(), "{begin}: {:?}", client.err());
            drop(other);
            assert_eq!(full.run(end), "OK");
        }
    }
}

/// More is told in a moment than the session may leave unacknowledged, while replies stay away.
async fn overflow(server: &Server, proxy: &Proxy) {
    let limit = "CONFIG SET rlock.max-events-per-session 1";
    assert_eq!(server.run(limit), "OK");
    // It takes effect with the next RLOCK.EVENTS of any session.
    server.session_connection("any");
    proxy.cut_to_client();
    for name in ["x1", "x2", "x3", "x4"] {
        server.run(format!("DEL {name}"));
        sleep(20 * MS).await;
    }
    until("the session has overflown", || {
        server.info_number("rlock_sessions_overflowed") > 0
    });
    proxy.heal();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_survives_a_session_that_overflows() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let client = client_through(&proxy).await;
    let mut guards = Vec::new();
    for name in ["x1", "x2", "x3", "x4"] {
        guards.push(client.lock(name).lock().await.unwrap());
    }
    let mut alice = server.connect();
    alice.take("k", "alice");
    let lock = client.lock("k");
    let waiting = see_in_queue(&server, "k", async move { lock.lock().await });
    overflow(&server, &proxy).await;
    alice.let_go("k", "alice");
    drop(soon(waiting).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_told_that_its_session_has_overflowed() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let builder = Client::builder().grace(Duration::ZERO);
    let through = format!("redis://{}", proxy.address());
    let client = builder.connect(&through).await.unwrap();
    let mut guards = Vec::new();
    for name in ["x1", "x2", "x3", "x4"] {
        guards.push(client.lock(name).lock().await.unwrap());
    }
    let lock = client.lock("k").lease(Duration::from_secs(60));
    let held = lock.lock().await.unwrap();
    overflow(&server, &proxy).await;
    let other = connect(calm(), &server).await;
    let second = soon(other.lock("k").lock()).await.unwrap();
    soon(held.lost()).await;
    assert!(!second.is_lost());
}
