//! The client when processes stop or die and networks are cut.

#![allow(
    clippy::print_stdout,
    reason = "a process that others listen to, and a figure for the documents"
)]

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rlock_client::{Client, LostReason};
use rlock_tests::{Proxy, Server, on_time, until};

use super::client::{
    MS, calls, calm, client, connect, once_in_ten, patient, see_in_queue, soon, take_for_long, url,
    wait_for, wait_in_queue,
};
use super::ways::three_ways;

const GRACE: Duration = Duration::from_secs(1);

/// Another process that holds a lock.
struct Holder {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Holder {
    /// Starts the process and sees it hold `k`.
    fn start(server: &Server, grace: Duration) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "client_faults::a_process_that_holds",
                "--ignored",
                "--nocapture",
            ])
            .env("RLOCK_HOLDER_URL", url(server))
            .env("RLOCK_HOLDER_GRACE", grace.as_millis().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        let mut holder = Self { child, says };
        holder.hear("held");
        holder
    }

    /// Reads until it says a line with this word, and returns the line.
    fn hear(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(
                self.says.read_line(&mut line).unwrap() > 0,
                "it ended without {word}"
            );
            if line.contains(word) {
                return line;
            }
        }
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
#[ignore = "not a test: the process that others start"]
async fn a_process_that_holds() {
    let Ok(url) = env::var("RLOCK_HOLDER_URL") else {
        return;
    };
    let grace = env::var("RLOCK_HOLDER_GRACE").unwrap().parse().unwrap();
    let builder = calm().grace(Duration::from_millis(grace));
    let client = builder.connect(&url).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    println!("held");
    println!("lost: {:?}", guard.lost().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_holders_lock_is_the_next_waiters_within_50_ms() {
    let server = Server::start();
    let client = client(&server).await;
    on_time("the guard", &server, 50 * MS, |_| {
        let mut holder = Holder::start(&server, Duration::ZERO);
        let waiting = wait_in_queue(&server, &client, "k");
        let killed = Instant::now();
        holder.child.kill().unwrap();
        wait_for(async {
            let guard = soon(waiting).await.unwrap().unwrap();
            let delay = killed.elapsed();
            println!("from kill -9 of the holder to the next one's guard: {delay:?}");
            guard.unlock().await.unwrap();
            delay
        })
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_holder_with_a_grace_keeps_its_lock_for_just_the_grace() {
    let server = Server::start();
    let client = client(&server).await;
    let mut holder = Holder::start(&server, GRACE);
    let waiting = wait_in_queue(&server, &client, "k");
    let killed = Instant::now();
    holder.child.kill().unwrap();
    drop(soon(waiting).await.unwrap().unwrap());
    let taken = killed.elapsed();
    assert!(
        taken + 10 * MS >= GRACE && taken < Duration::from_secs(10),
        "{taken:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_stopped_for_longer_than_its_grace_says_lost() {
    let server = Server::start();
    let mut holder = Holder::start(&server, GRACE);
    holder.signal("STOP");
    tokio::time::sleep(GRACE + 300 * MS).await;
    holder.signal("CONT");
    assert!(holder.hear("lost").contains("SessionUnconfirmed"));
    until("its process ends and the lock is free", || {
        server.holder("k").is_none()
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_makes_guards_say_lost_within_the_grace() {
    let server = Server::start();
    let client = connect(calm().grace(GRACE), &server).await;
    let guard = client.lock("k").lock().await.unwrap();
    server.freeze();
    tokio::time::sleep(GRACE).await;
    assert!(guard.is_lost(), "the server may do as it likes from now on");
    assert_eq!(soon(guard.lost()).await, LostReason::SessionUnconfirmed);
    server.thaw();
    assert!(guard.is_lost(), "nothing brings it back");
    drop(guard);
    once_in_ten("the lock works", async || {
        let again = soon(client.lock("k").lock()).await.unwrap();
        let valid = !again.is_lost();
        let unlocked = soon(again.unlock()).await;
        unlocked.is_ok() && valid
    })
    .await;
}

/// The server stands still for nine tenths of the grace less 100 ms, three times, while a client
/// has `holds` guards and a wait. Whether all guards are still held, and nothing was asked for them
/// or for the wait that would not have been asked anyway.
async fn a_silence_is_survived(grace: Duration, holds: usize) -> bool {
    let server = Server::start();
    let builder = Client::builder().lease(Duration::from_secs(600));
    let client = connect(builder.grace(grace), &server).await;
    let taking: Vec<_> = (0..holds)
        .map(|number| {
            let lock = client.lock(format!("held{number}"));
            tokio::spawn(async move { lock.lock().await })
        })
        .collect();
    let mut guards = Vec::new();
    for taken in taking {
        guards.push(taken.await.unwrap().unwrap());
    }
    server.connect().take("k", "alice");
    let _waiting = wait_in_queue(&server, &client, "k");
    let acquired = calls(&server, "acquire");
    let silence = (grace * 9 / 10).saturating_sub(100 * MS);
    let mut in_time = true;
    for _ in 0..3 {
        let began = Instant::now();
        server.freeze();
        tokio::time::sleep(silence.saturating_sub(began.elapsed())).await;
        server.thaw();
        in_time &= began.elapsed() < silence + 20 * MS;
        let asked = calls(&server, "events");
        until("it is asked as ever", || {
            calls(&server, "events") > asked + 3
        });
    }
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    let renewed = calls(&server, "renew");
    println!("{grace:?}: {lost} of {holds} guards lost, {renewed} renewed, in time: {in_time}");
    in_time && (lost, renewed) == (0, 0) && calls(&server, "acquire") == acquired
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silence_of_nine_tenths_of_the_grace_less_100_ms_costs_no_guard_and_no_renewal() {
    for (grace, holds) in [(1, 1_000), (2, 3_000), (5, 10_000)] {
        let grace = Duration::from_secs(grace);
        once_in_ten("all guards are held", async || {
            a_silence_is_survived(grace, holds).await
        })
        .await;
    }
}

/// A grace within which a busy machine answers.
pub(super) const LONG_GRACE: Duration = Duration::from_secs(4);

/// A client whose network can be cut: it takes a while to call it so.
pub(super) async fn client_through(proxy: &Proxy) -> Client {
    let builder = Client::builder()
        .grace(LONG_GRACE)
        .response_timeout(Duration::from_secs(3));
    let url = format!("redis://{}", proxy.address());
    builder.connect(&url).await.unwrap()
}

/// Cuts the network with `cut`; the guard must say so within the grace.
async fn cut_one_direction(cut: impl Fn(&Proxy)) {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    let client = client_through(&proxy).await;
    let guard = client.lock("k").lock().await.unwrap();
    let wait = client.lock("k");
    let waiting = tokio::spawn(async move { wait.lock().await });
    until("it waits", || server.waiting_owners("k").len() == 1);
    // And has been told so, for replies come in order.
    client
        .lock("other")
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    cut(&proxy);
    tokio::time::sleep(LONG_GRACE).await;
    assert!(guard.is_lost(), "the server may do as it likes from now on");
    assert_eq!(soon(guard.lost()).await, LostReason::SessionUnconfirmed);
    // By then the server has not granted the lock to another owner.
    assert_eq!(server.holder("k").as_deref(), Some(guard.owner().as_str()));
    drop(guard);
    proxy.heal();
    let next = soon(waiting).await.unwrap().unwrap();
    assert!(!next.is_lost());
    soon(next.unlock()).await.unwrap();
    soon(client.shutdown()).await;
    until("nothing is left", || {
        server.holder("k").is_none() && server.waiting_owners("k").is_empty()
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_says_lost_when_nothing_reaches_the_server() {
    cut_one_direction(Proxy::cut_to_server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_says_lost_when_nothing_comes_from_the_server() {
    cut_one_direction(Proxy::cut_to_client).await;
}

/// The id of the only client's session connection, if it has one now.
pub(super) fn session_connection(server: &Server) -> Option<String> {
    session_connections(server).into_iter().next()
}

/// The same, with those that a router has forgotten: in the order of the server.
pub(super) fn session_connections(server: &Server) -> Vec<String> {
    connections_with(server, "cmd=rlock.events")
}

/// The ids of the connections whose line in the server's list contains this.
fn connections_with(server: &Server, what: &str) -> Vec<String> {
    let list = server.run("CLIENT LIST").text();
    let lines = list.lines().filter(|line| line.contains(what));
    let ids = lines.filter_map(|line| {
        let mut words = line.split(' ');
        words.find_map(|word| Some(word.strip_prefix("id=")?.to_owned()))
    });
    ids.collect()
}

/// Kills that connection.
pub(super) fn kill_session_connection(server: &Server) {
    // There may be none for a moment, if one was killed just before.
    until("the session connection is killed", || {
        session_connection(server).is_some_and(|id| server.run(format!("CLIENT KILL ID {id}")) == 1)
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_session_connection_costs_nothing_within_the_grace() {
    let server = Server::start();
    let client = connect(calm().grace(LONG_GRACE), &server).await;
    let guard = client.lock("held").lock().await.unwrap();
    let leased = client.lock("leased").lease(Duration::from_secs(60));
    let leased = leased.lock().await.unwrap();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let waiting = wait_in_queue(&server, &client, "k");
    for _ in 0..3 {
        kill_session_connection(&server);
        until("it waits again", || server.waiting_owners("k").len() == 1);
    }
    tokio::time::sleep(LONG_GRACE + 200 * MS).await;
    assert!(!guard.is_lost() && !leased.is_lost());
    // The session goes on as it was.
    assert_eq!(calls(&server, "renew"), 0);
    alice.let_go("k", "alice");
    drop(soon(waiting).await.unwrap().unwrap());
    leased.unlock().await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_grace_a_broken_session_connection_loses_the_holds_and_guards_say_so() {
    let server = Server::start();
    let client = connect(patient(), &server).await;
    let guard = client.lock("k").lock().await.unwrap();
    kill_session_connection(&server);
    assert_eq!(soon(guard.lost()).await, LostReason::NotHeld);
    let again = soon(client.lock("k").lock()).await.unwrap();
    assert!(again.token() > guard.token());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_waits_survive_a_restart_of_the_server() {
    let mut server = Server::start();
    let client = client(&server).await;
    let guard = client.lock("k").lock().await.unwrap();
    let waiting: Vec<_> = (0..200)
        .map(|_| {
            let lock = client.lock("k");
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
        })
        .collect();
    until("all are in the queue", || {
        server.waiting_owners("k").len() == 200
    });
    server.restart();
    for waiting in waiting {
        soon(waiting).await.unwrap();
    }
    assert!(soon(guard.unlock()).await.unwrap_err().is_lost());
    assert_eq!(server.holder("k"), None);
}

/// The disk is full for a while, so every write is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_released_while_the_server_cannot_write_are_free_when_it_can() {
    let server = Server::builder().on_a_small_disk("everysec").start();
    server.connect().take("long", "alice");
    let client = client(&server).await;
    let unlocked = client.lock("unlocked").lock().await.unwrap();
    let dropped = client.lock("dropped").lock().await.unwrap();
    server.take_the_room();
    until("the server refuses to write", || {
        let told = server.run("RLOCK.RENEW long alice 60000");
        told.is_error() && told.error().starts_with("MISCONF ")
    });
    let error = unlocked.unlock().await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    drop(dropped);
    let error = client.lock("free").try_lock().await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    for name in ["unlocked", "dropped"] {
        assert!(server.holder(name).is_some(), "{name}");
    }
    server.give_the_room_back();
    // Long before their leases end.
    until("both are given back", || {
        ["unlocked", "dropped"]
            .iter()
            .all(|name| server.holder(name).is_none())
    });
    assert_eq!(server.info_number("rlock_releases"), 2);
}

/// A call of the session connection reaches the server late, when the client has another
/// connection already, or is just making it: `meets` says whether the new one takes the session
/// over while the old call waits at the server. Whether it came so.
async fn a_call_comes_late(meets: bool) -> bool {
    let server = Server::start();
    let address = server.address();
    let (near, far, gate) = (Proxy::to(address), Proxy::to(address), Proxy::to(address));
    let builder = Client::builder()
        .lease(Duration::from_secs(300))
        .grace(Duration::from_secs(5));
    let through = format!("redis://{}", near.address());
    let client = builder.connect(&through).await.unwrap();
    near.lead_to(far.address());
    kill_session_connection(&server);
    let guard = client.lock("held").lock().await.unwrap();
    near.lead_to(gate.address());
    server.connect().take("k", "alice");
    let waiting = wait_in_queue(&server, &client, "k");
    let asked = [calls(&server, "acquire"), calls(&server, "renew")];
    // Its last command was another while it closes the one that was killed.
    until("its session is attached", || {
        session_connection(&server).is_some()
    });
    let old = session_connection(&server).unwrap();
    if meets {
        gate.cut_to_server();
    }
    far.cut_to_server();
    if meets {
        // The call is overdue after a quarter of the grace and the time for which it waits.
        let connections = || server.run("CLIENT LIST").text().lines().count();
        let before = connections();
        until("it connects anew", || connections() > before);
        far.heal();
        gate.heal();
    } else {
        until("it is attached anew", || {
            session_connections(&server).iter().any(|id| *id != old)
        });
        far.heal();
    }
    let events = calls(&server, "events");
    until("it is asked as ever", || {
        calls(&server, "events") > events + 5
    });
    until("there is one session connection", || {
        session_connections(&server).len() == 1
    });
    let taken_over = server.run("INFO errorstats").text().contains("TAKENOVER");
    println!("meets: {meets}, taken over: {taken_over}");
    assert!(!guard.is_lost());
    assert_eq!([calls(&server, "acquire"), calls(&server, "renew")], asked);
    assert_eq!(server.waiting_owners("k").len(), 1);
    server.connect().let_go("k", "alice");
    assert!(!soon(waiting).await.unwrap().unwrap().is_lost());
    taken_over == meets
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_call_and_a_new_connection_cost_neither_a_guard_nor_a_place_in_the_queue() {
    for meets in [false, true] {
        once_in_ten("it comes so", async || a_call_comes_late(meets).await).await;
    }
}

/// The other connection must not be taken for dead only because its answers have a long way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_connection_that_breaks_far_from_the_server_costs_no_guard() {
    let server = Server::start();
    let near = Proxy::to(server.address());
    let grace = Duration::from_secs(4);
    let through = format!("redis://{}", near.address());
    let builder = Client::builder().grace(grace);
    let client = builder.connect(&through).await.unwrap();
    let guard = client.lock("k").lock().await.unwrap();
    let of_commands = connections_with(&server, "cmd=rlock.acquire");
    near.delay(300 * MS);
    kill_session_connection(&server);
    tokio::time::sleep(grace).await;
    assert!(!guard.is_lost());
    assert!(connections_with(&server, "id=").contains(&of_commands[0]));
    soon(guard.unlock()).await.unwrap();
}

/// For longer than the client's shutdown would wait.
const LONG_CUT: Duration = Duration::from_secs(33);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_dropped_during_a_long_cut_are_withdrawn_and_all_that_they_got_is_given_back() {
    let server = Server::start();
    let address = server.address();
    let nowhere = Proxy::to(address);
    nowhere.cut_to_server();
    let builder = calm().response_timeout(1_000 * MS);
    let (client, [near, far, _session]) = three_ways(&server, builder).await;
    let mut alice = server.connect();
    for name in ["a", "b", "q"] {
        take_for_long(&mut alice, name);
    }
    alice.run("RLOCK.ACQUIRE rw alice 600000 WRITE");
    let (both, writer) = (client.multi(["a", "b"]), client.rw_lock("rw"));
    let (both, owner) = (both.owner(&client.owner()), client.owner());
    let writer = writer.owner(&owner);
    let dropped = [
        see_in_queue(&server, "b", async move { drop(both.lock().await) }),
        see_in_queue(&server, "rw", async move { drop(writer.write().await) }),
        see_in_queue(&server, "q", {
            let lock = client.lock("q");
            async move { drop(lock.lock().await) }
        }),
    ];
    far.cut_to_server();
    near.lead_to(nowhere.address());
    for wait in dropped {
        wait.abort();
    }
    tokio::time::sleep(LONG_CUT).await;
    for name in ["a", "b"] {
        alice.let_go(name, "alice");
    }
    alice.run("RLOCK.RELEASE rw alice WRITE");
    assert!(server.holder("b").is_some_and(|owner| owner != "alice"));
    near.lead_to(address);
    until("the wait is withdrawn", || {
        server.waiting_owners("q").is_empty()
    });
    alice.let_go("q", "alice");
    until("all is given back", || server.run("DBSIZE") == 0);
    client.shutdown().await;
}
