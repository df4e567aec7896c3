//! The client when another server takes the place of the one that it knows: behind sentinels, by
//! an operator's word, or behind an address.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rlock_client::{Client, ClientBuilder, Guard, LostReason, blocking};
use rlock_tests::{Pair, Proxy, Sentinels, Server, in_sync, patience, until};

use super::client::{MS, once_in_ten, soon, wait_in_queue};
use super::client_faults::kill_session_connection;

/// Longer than any failover takes.
const LONG: Duration = Duration::from_secs(60);

fn urls(watched: &Sentinels) -> Vec<String> {
    let addresses = watched.addresses().into_iter();
    addresses
        .map(|address| format!("redis://{address}"))
        .collect()
}

fn service() -> String {
    format!("redis://{}", Sentinels::SERVICE)
}

async fn connect(builder: ClientBuilder, watched: &Sentinels) -> Client {
    let builder = builder.sentinels(urls(watched));
    soon(builder.connect(&service())).await.unwrap()
}

/// Settings with which a failover costs no hold that the new primary has.
fn steadfast() -> ClientBuilder {
    Client::builder()
        .grace(LONG)
        .lease(LONG)
        .response_timeout(Duration::from_secs(5))
}

/// Kills the connection that carries the commands of the only client.
pub(super) fn kill_command_connection(server: &Server) {
    let list = server.run("CLIENT LIST").text();
    let mut lines = list.lines();
    let line = lines.find(|line| line.contains("cmd=rlock.acquire"));
    let mut words = line.expect("it has taken a lock").split(' ');
    let id = words.find_map(|word| word.strip_prefix("id="));
    let kill = format!("CLIENT KILL ID {}", id.unwrap());
    assert_eq!(server.run(kill), 1);
}

/// Waits until this guard is confirmed by another server.
async fn confirmed(guard: &Guard) {
    let renewed = async {
        while let Err(error) = guard.renew().await {
            assert!(!error.is_lost(), "{error}");
            tokio::time::sleep(20 * MS).await;
        }
    };
    soon(renewed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_primary_is_found_as_long_as_a_sentinel_lives() {
    let mut watched = Sentinels::start();
    watched.kill_sentinel(0);
    let client = connect(steadfast(), &watched).await;
    let guard = client.lock("k").lock().await.unwrap();
    let primary = watched.primary();
    assert_eq!(primary.holder("k").as_deref(), Some(guard.owner().as_str()));
    // One that accepts connections and says nothing costs little time.
    watched.sentinel(1).freeze();
    let without_async = blocking_lock(&watched);
    soon(without_async).await;
    watched.sentinel(1).thaw();

    let builder = Client::builder().sentinels(urls(&watched));
    let error = soon(builder.connect("redis://other")).await.unwrap_err();
    assert!(
        error.to_string().contains("no service called other"),
        "{error}"
    );
    for number in 1..3 {
        watched.kill_sentinel(number);
    }
    let builder = Client::builder().sentinels(urls(&watched));
    let error = soon(builder.connect(&service())).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let address = watched.addresses()[2].to_string();
    assert!(error.to_string().contains(&address), "{error}");
    assert!(!guard.is_lost(), "who is connected needs no sentinel");
}

async fn blocking_lock(watched: &Sentinels) {
    let builder = steadfast().sentinels(urls(watched));
    let locked = tokio::task::spawn_blocking(move || {
        let client = blocking::ClientBuilder::from(builder)
            .connect(&service())
            .unwrap();
        client.lock("other").lock().unwrap().unlock().unwrap();
    });
    locked.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_no_sentinel_knows_is_refused() {
    let watched = Sentinels::start();
    let builder = Client::builder().sentinels(urls(&watched));
    let error = soon(builder.connect("redis://other")).await.unwrap_err();
    assert!(error.is_refused(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_primary_is_killed_holds_and_waits_go_on_at_the_new_one() {
    let mut watched = Sentinels::start();
    let client = connect(steadfast(), &watched).await;
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(watched.primary(), &client, "k");
    in_sync(watched.primary(), watched.replica());
    watched.kill_primary();
    confirmed(&guard).await;
    assert!(!guard.is_lost());
    let primary = watched.primary();
    until("the wait is in the queue there", || {
        primary.waiting_owners("k").len() == 1
    });
    assert_eq!(primary.holder("k").as_deref(), Some(guard.owner().as_str()));
    soon(guard.unlock()).await.unwrap();
    let next = soon(waiting).await.unwrap().unwrap();
    assert_eq!(primary.holder("k").as_deref(), Some(next.owner().as_str()));
    soon(next.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_the_new_primary_does_not_have_is_said_to_be_lost() {
    let mut watched = Sentinels::start();
    let client = connect(steadfast(), &watched).await;
    let first = client.lock("k").lock().await.unwrap();
    let token = first.token();
    soon(first.unlock()).await.unwrap();
    in_sync(watched.primary(), watched.replica());
    // From here on nothing reaches the replica.
    watched.replica().freeze();
    watched.primary().run("CLIENT KILL TYPE replica");
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(watched.primary(), &client, "k");
    let (primary, replica) = (watched.primary().address(), watched.replica().process_id());
    let thaw = thread::spawn(move || {
        until("the primary is dead", || {
            TcpStream::connect(primary).is_err()
        });
        let kill = Command::new("sh")
            .args(["-c", &format!("kill -CONT {replica}")])
            .status();
        assert!(kill.unwrap().success());
    });
    watched.kill_primary();
    thaw.join().unwrap();
    let next = soon(waiting).await.unwrap().unwrap();
    assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
    assert!(next.token() > guard.token() && guard.token() > token);
    drop(guard);
    soon(next.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_by_order_costs_neither_a_hold_nor_a_wait_and_tokens_grow() {
    let watched = Sentinels::start();
    let client = connect(steadfast(), &watched).await;
    let held = client.lock("held").lock().await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(watched.primary(), &client, "k");
    in_sync(watched.primary(), watched.replica());
    for _ in 0..2 {
        watched.fail_over();
        confirmed(&held).await;
        confirmed(&guard).await;
        let primary = watched.primary();
        until("the wait is in the queue there", || {
            primary.waiting_owners("k").len() == 1
        });
        let other = soon(client.lock("other").lock()).await.unwrap();
        assert!(other.token() > guard.token());
        soon(other.unlock()).await.unwrap();
        in_sync(watched.primary(), watched.replica());
    }
    let token = guard.token();
    soon(guard.unlock()).await.unwrap();
    let next = soon(waiting).await.unwrap().unwrap();
    assert!(next.token() > token);
    assert!(!held.is_lost());
    soon(held.unlock()).await.unwrap();
    soon(next.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_primary_that_wakes_as_a_replica_keeps_no_guard_valid() {
    let watched = Sentinels::start();
    // With a longer grace the hold would be confirmed at the new primary.
    let builder = Client::builder().grace(Duration::from_secs(1));
    let builder = builder.response_timeout(Duration::from_secs(3));
    let client = connect(builder, &watched).await;
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(watched.primary(), &client, "k");
    in_sync(watched.primary(), watched.replica());
    let frozen = watched.primary();
    let old = frozen.port();
    frozen.freeze();
    assert_eq!(soon(guard.lost()).await, LostReason::SessionUnconfirmed);
    watched.await_failover(old);
    drop(guard);
    // The hold ends with the client's release there, or as it is not renewed.
    let next = soon(waiting).await.unwrap().unwrap();
    assert_eq!(
        watched.primary().holder("k").as_deref(),
        Some(next.owner().as_str())
    );
    frozen.thaw();
    watched.settle();
    once_in_ten("a lock is held", async || {
        let other = soon(client.lock("other").lock()).await.unwrap();
        let valid = !other.is_lost();
        soon(other.unlock()).await.is_ok() && valid
    })
    .await;
    drop(next);
    let primary = watched.primary();
    until("it is given back", || primary.holder("k").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_sentinels_a_server_that_is_a_replica_for_a_while_is_waited_for() {
    let pair = Pair::start();
    let url = format!("redis://{}", pair.primary.address());
    let client = steadfast().connect(&url).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(&pair.primary, &client, "k");
    pair.settle();
    pair.replica.run("REPLICAOF NO ONE");
    let demote = format!("REPLICAOF 127.0.0.1 {}", pair.replica.port());
    assert_eq!(pair.primary.run(demote), "OK");
    let error = soon(client.lock("other").lock()).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(error.to_string().contains("READONLY"), "{error}");
    let error = soon(Client::connect(&url)).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(error.to_string().contains("replica"), "{error}");
    assert!(!waiting.is_finished());

    assert_eq!(pair.primary.run("REPLICAOF NO ONE"), "OK");
    confirmed(&guard).await;
    until("the wait is in the queue again", || {
        pair.primary.waiting_owners("k").len() == 1
    });
    soon(guard.unlock()).await.unwrap();
    let next = soon(waiting).await.unwrap().unwrap();
    soon(next.unlock()).await.unwrap();
}

/// New connections to an address suddenly lead to another server, while
/// one of the client's two connections still leads to the first. `kill` ends the other.
async fn another_server_behind_the_address(kill: impl Fn(&Server)) {
    let (first, second) = (Server::start(), Server::start());
    let proxy = Proxy::to(first.address());
    let url = format!("redis://{}", proxy.address());
    let client = steadfast().connect(&url).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let waiting = wait_in_queue(&first, &client, "k");
    proxy.lead_to(second.address());
    kill(&first);
    // A hold that the second server does not know is not kept alive by what the first one says.
    let lost = async {
        while !guard.is_lost() {
            // A request makes the client look.
            let _ = guard.renew().await;
            tokio::time::sleep(20 * MS).await;
        }
    };
    soon(lost).await;
    assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
    let next = soon(waiting).await.unwrap().unwrap();
    assert_eq!(second.holder("k").as_deref(), Some(next.owner().as_str()));
    soon(next.renew()).await.unwrap();
    drop(guard);
    soon(next.unlock()).await.unwrap();
    let list = first.run("CLIENT LIST").text();
    assert!(!list.contains("cmd=rlock"), "{list}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_connection_follows_the_session_connection_to_another_server() {
    another_server_behind_the_address(kill_session_connection).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_connection_follows_the_command_connection_to_another_server() {
    another_server_behind_the_address(kill_command_connection).await;
}

/// A false sentinel, which names the server that it is told to name.
struct Impostor {
    address: SocketAddr,
    state: Arc<ImpostorState>,
}

struct ImpostorState {
    /// In turn.
    named: Mutex<Vec<SocketAddr>>,
    asked: AtomicUsize,
    /// Whether it tells without end that the first of these is the new primary.
    floods: bool,
}

impl Impostor {
    fn naming(server: SocketAddr) -> Self {
        Self::start(server, false)
    }

    /// One that also tells of switches without end to whoever listens.
    fn flooding(server: SocketAddr) -> Self {
        Self::start(server, true)
    }

    fn start(server: SocketAddr, floods: bool) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(ImpostorState {
            named: Mutex::new(vec![server]),
            asked: AtomicUsize::new(0),
            floods,
        });
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, state) = (client.unwrap(), Arc::clone(&shared));
                thread::spawn(move || state.answer(client));
            }
        });
        Self { address, state }
    }

    fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Names these from now on, one after the other.
    fn name(&self, servers: &[SocketAddr]) {
        *self.state.named.lock().unwrap() = servers.to_vec();
    }

    fn asked(&self) -> usize {
        self.state.asked.load(Ordering::SeqCst)
    }

    /// Waits until it has been asked so often from now on.
    fn be_asked(&self, times: usize) {
        let before = self.asked();
        until("the sentinel is asked again", || {
            self.asked() >= before + times
        });
    }
}

impl ImpostorState {
    /// Answers until the client has gone.
    fn answer(&self, mut client: TcpStream) {
        let mut lines = BufReader::new(client.try_clone().unwrap()).lines();
        let mut line = || lines.next().and_then(Result::ok);
        while let Some(count) = line() {
            let count: usize = count.trim_start_matches('*').parse().unwrap();
            let words: Vec<_> = (0..count)
                .filter_map(|_| {
                    line();
                    line()
                })
                .collect();
            let answer = match &*words[0].to_lowercase() {
                "hello" => "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned(),
                "sentinel" => {
                    let asked = self.asked.fetch_add(1, Ordering::SeqCst);
                    let named = self.named.lock().unwrap();
                    let port = named[asked % named.len()].port().to_string();
                    format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len())
                }
                "client" => "+OK\r\n".to_owned(),
                "subscribe" if self.floods => return self.flood(&mut client),
                _ => "-NOPERM not here\r\n".to_owned(),
            };
            if client.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }

    /// Tells of a switch some two thousand times a second until the client has gone.
    fn flood(&self, client: &mut TcpStream) {
        let port = self.named.lock().unwrap()[0].port();
        let text = format!("{} 127.0.0.1 1 127.0.0.1 {port}", Sentinels::SERVICE);
        let length = text.len();
        let head = "$14\r\n+switch-master\r\n";
        let subscribed = format!(">3\r\n$9\r\nsubscribe\r\n{head}:1\r\n");
        let switched = format!(">3\r\n$7\r\nmessage\r\n{head}${length}\r\n{text}\r\n");
        let mut told = client.write_all(subscribed.as_bytes());
        while told.is_ok() {
            told = client.write_all(switched.as_bytes());
            thread::sleep(Duration::from_micros(500));
        }
    }
}

/// A client of three sentinels that name the first of two servers, which do not know each other,
/// and its guard.
async fn among_impostors(servers: &[Server; 2]) -> ([Impostor; 3], Client, Guard) {
    let impostors = [(); 3].map(|()| Impostor::naming(servers[0].address()));
    let builder = steadfast().grace(Duration::ZERO);
    let builder = builder.sentinels(impostors.iter().map(Impostor::url));
    let client = soon(builder.connect(&service())).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    (impostors, client, guard)
}

/// Whether a client of ours is connected to this server.
fn is_used(server: &Server) -> bool {
    server.run("CLIENT LIST").text().contains("cmd=rlock")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_majority_of_the_sentinels_says_changes_nothing() {
    let servers = [Server::start(), Server::start()];
    let [first, second] = [servers[0].address(), servers[1].address()];
    let (impostors, _client, guard) = among_impostors(&servers).await;
    impostors[0].name(&[second]);
    impostors[0].be_asked(2);
    // Nor if one of them says now this and now that.
    impostors[1].name(&[first, second]);
    for _ in 0..2 {
        impostors[1].be_asked(3);
    }
    assert!(!guard.is_lost());
    let asked = servers[1].run("INFO commandstats").text();
    assert!(!asked.contains("cmdstat_hello"), "never connected to");
    soon(guard.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_primary_costs_no_guard_before_it_says_that_it_is_one() {
    let servers = [Server::start(), Server::start()];
    let (impostors, _client, guard) = among_impostors(&servers).await;
    let [first, second] = [&servers[0], &servers[1]];
    let demote = format!("REPLICAOF 127.0.0.1 {}", first.port());
    assert_eq!(second.run(demote), "OK");
    for impostor in &impostors {
        impostor.name(&[second.address()]);
    }
    impostors[0].be_asked(3);
    assert!(!guard.is_lost(), "it is a replica");
    in_sync(first, second);
    assert_eq!(second.run("REPLICAOF NO ONE"), "OK");
    until("it is given up", || !is_used(first));
    // It has come along.
    confirmed(&guard).await;
    assert!(!guard.is_lost() && is_used(second));
    soon(guard.unlock()).await.unwrap();
    assert_eq!(second.holder("k"), None);
}

/// A lock at a primary that was replaced may be granted to others, whether or not the client
/// reaches the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_lost_although_the_new_primary_cannot_be_reached() {
    let server = Server::start();
    let impostors = [(); 3].map(|()| Impostor::naming(server.address()));
    let builder = steadfast().grace(Duration::from_secs(1));
    let builder = builder.sentinels(impostors.iter().map(Impostor::url));
    let client = soon(builder.connect(&service())).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let nowhere = nobody.local_addr().unwrap();
    drop(nobody);
    for impostor in &impostors {
        impostor.name(&[nowhere]);
    }
    assert_eq!(soon(guard.lost()).await, LostReason::SessionUnconfirmed);
    drop(guard);
    for impostor in &impostors {
        impostor.name(&[server.address()]);
    }
    drop(soon(client.lock("k").lock()).await.unwrap());
}

/// A primary is cut off from sentinels and replica and not from its clients. These sentinels' users
/// may do this.
async fn behind_its_back(rights: &str) {
    let watched = Sentinels::start();
    for server in [watched.primary(), watched.replica()] {
        let told = server.run("ACL SETUSER clerk on >secret ~* &* +@all");
        assert_eq!(told, "OK");
    }
    for number in 0..3 {
        let user = format!("ACL SETUSER watcher on >hidden resetchannels {rights}");
        assert_eq!(watched.sentinel(number).run(user), "OK");
    }
    let addresses = watched.addresses();
    let urls = addresses.iter();
    let urls = urls.map(|address| format!("redis://watcher:hidden@{address}"));
    let grace = Duration::from_secs(10);
    let builder = Client::builder().lease(LONG).grace(grace).sentinels(urls);
    let service = format!("redis://clerk:secret@{}", Sentinels::SERVICE);
    let client = soon(builder.clone().connect(&service)).await.unwrap();
    once_in_ten("it is held", async || {
        let guard = client.lock("first").lock().await.unwrap();
        !guard.is_lost()
    })
    .await;
    watched.cut_off_primary();
    let guard = soon(client.lock("k").lock()).await.unwrap();
    watched.replace_primary();
    let agreed = Instant::now();
    let rival = soon(builder.connect(&service)).await.unwrap();
    let rivals = soon(rival.lock("k").lock()).await.unwrap();
    // Its session is kept up there, and its lease is long: only the new primary can say so.
    assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
    assert!(agreed.elapsed() < patience(grace), "two held it for longer");
    assert!(rivals.token() > guard.token() && guard.is_lost() && !rivals.is_lost());
    // From now on all that the client takes it takes at the new primary.
    let error = soon(client.lock("k").try_lock()).await.unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    drop(guard);
    soon(rivals.unlock()).await.unwrap();
    let again = soon(client.lock("k").lock()).await.unwrap();
    let primary = watched.primary();
    assert_eq!(primary.holder("k").as_deref(), Some(again.owner().as_str()));
    soon(again.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_at_a_primary_that_was_replaced_behind_its_back_is_lost() {
    behind_its_back("+sentinel|get-master-addr-by-name").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_at_a_replaced_primary_is_lost_where_the_sentinels_are_listened_to() {
    behind_its_back("+sentinel|get-master-addr-by-name +subscribe &+switch-master").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_sentinel_is_listened_to_on_the_connection_on_which_it_is_asked() {
    let watched = Sentinels::start();
    let client = connect(steadfast(), &watched).await;
    let listeners = |number: usize| {
        let list = watched.sentinel(number).run("CLIENT LIST").text();
        let listening = list.lines().filter(|line| line.contains("sub=1"));
        let id = |line: &str| line.split(' ').next().unwrap().replace("id=", "");
        listening.map(id).collect::<Vec<_>>()
    };
    until("each of them is listened to on one connection", || {
        (0..3).all(|number| listeners(number).len() == 1)
    });
    let before = listeners(1);
    assert_eq!(
        watched
            .sentinel(1)
            .run(format!("CLIENT KILL ID {}", before[0])),
        1
    );
    until("it is on another", || {
        let now = listeners(1);
        now.len() == 1 && now != before
    });
    drop(client);
    until("none is", || {
        (0..3).all(|number| listeners(number).is_empty())
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_floods_makes_the_client_ask_every_50_ms_at_most() {
    let server = Server::start();
    let honest = [(); 2].map(|()| Impostor::naming(server.address()));
    let flooding = Impostor::flooding(server.address());
    let urls = honest.iter().chain([&flooding]).map(Impostor::url);
    let client = soon(steadfast().sentinels(urls).connect(&service())).await;
    let client = client.unwrap();
    // It is listened to; the others refuse that.
    honest[0].be_asked(20);
    let (asked, began) = (honest[0].asked(), Instant::now());
    tokio::time::sleep(Duration::from_secs(5)).await;
    let asked = honest[0].asked() - asked;
    let bound = began.elapsed().as_millis() / 50;
    assert!(asked as u128 <= bound, "{asked} times, not {bound}");
    drop(client);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_sentinel_does_not_delay_the_loss_at_a_replaced_primary() {
    let servers = [Server::start(), Server::start()];
    let [old, new] = [servers[0].address(), servers[1].address()];
    let sentinels = [(); 2].map(|()| Impostor::naming(old));
    // Accepts connections and says nothing, as one whose machine is cut off or stopped.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let silent_url = format!("redis://{}", silent.local_addr().unwrap());
    let urls = sentinels.iter().map(Impostor::url).chain([silent_url]);
    // The default grace of 5 s.
    let builder = Client::builder().response_timeout(Duration::from_secs(30));
    let client = soon(builder.sentinels(urls).connect(&service()))
        .await
        .unwrap();
    let guard = soon(client.lock("k").lock()).await.unwrap();
    assert!(servers[0].holder("k").is_some());
    // One hears of the new primary a moment before the other.
    sentinels[0].name(&[new]);
    sentinels[1].be_asked(1);
    sentinels[1].name(&[new]);
    let agreed = Instant::now();
    let lost = tokio::time::timeout(LONG, guard.lost()).await;
    let after = agreed.elapsed();
    assert!(
        after < patience(Duration::from_secs(5)),
        "{lost:?} after {after:?}"
    );
}
