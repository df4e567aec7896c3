//! The quorum lock of the client crate, over five real servers.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rlock_client::blocking;
use rlock_client::{
    Client, ClientBuilder, Error, ErrorKind, QuorumBuilder, QuorumClient, QuorumError, QuorumGuard,
};
use rlock_tests::{Server, patience, until};
use tokio::time::{sleep, sleep_until, timeout};

use super::client::{MS, calls, example_with, soon, url, wait_for};

/// The servers of a quorum.
pub(super) struct Five(pub(super) [Server; 5]);

impl Five {
    pub(super) fn start() -> Self {
        Self(std::array::from_fn(|_| Server::start()))
    }

    fn urls(&self) -> [String; 5] {
        std::array::from_fn(|i| url(&self.0[i]))
    }

    /// A client of those that are there.
    pub(super) async fn client(&self) -> QuorumClient {
        self.some(settings()).await
    }

    /// The same with these settings. On a busy machine a majority may not answer in time.
    async fn some(&self, builder: QuorumBuilder) -> QuorumClient {
        let connected = async {
            loop {
                match builder.clone().connect(self.urls()).await {
                    Ok(client) => return client,
                    Err(error) => assert!(error.is_unavailable(), "{error}"),
                }
            }
        };
        soon(connected).await
    }

    /// A client that is seen to be connected to all.
    pub(super) async fn connect(&self, builder: QuorumBuilder) -> QuorumClient {
        let client = self.some(builder).await;
        self.whole(&client).await;
        client
    }

    /// Sees that the client is connected to all.
    async fn whole(&self, client: &QuorumClient) {
        let guard = soon(client.lock("whole").lock()).await.unwrap();
        until("all have joined", || guard.tokens().len() == 5);
        soon(guard.unlock()).await.unwrap();
        self.all_free("whole", 0..5);
    }

    pub(super) fn address(&self, i: usize) -> String {
        self.0[i].address().to_string()
    }

    /// Sees that the lock is free on all of these servers.
    #[track_caller]
    pub(super) fn all_free(&self, name: &str, among: impl IntoIterator<Item = usize>) {
        for i in among {
            until(&format!("server {i} is free"), || {
                self.0[i].holder(name).is_none()
            });
        }
    }

    /// Sees that all of these servers have the lock taken.
    #[track_caller]
    pub(super) fn all_taken(&self, name: &str, among: impl IntoIterator<Item = usize>) {
        for i in among {
            until(&format!("server {i} is taken"), || {
                self.0[i].holder(name).is_some()
            });
        }
    }
}

/// A busy machine answers late; a server that is slow on purpose never answers.
pub(super) fn settings() -> QuorumBuilder {
    within_grace(Duration::from_secs(5))
}

/// The same, for tests in which it matters how long a server may be silent.
pub(super) fn within_grace(grace: Duration) -> QuorumBuilder {
    let each = Client::builder()
        .grace(grace)
        .response_timeout(Duration::from_secs(5));
    QuorumClient::builder()
        .server_timeout(Duration::from_secs(3))
        .settings(each)
}

/// Settings of each server with which only the lease says how long it counts.
pub(super) fn by_lease() -> ClientBuilder {
    Client::builder().grace(Duration::ZERO)
}

/// Tries until it is told that the lock is held: on a busy machine a majority may not answer
/// in time.
pub(super) async fn not_acquired(
    mut attempt: impl AsyncFnMut() -> Result<QuorumGuard, QuorumError>,
) {
    let told = async {
        loop {
            let error = attempt().await.unwrap_err();
            if error.is_not_acquired() {
                return;
            }
            assert!(
                error.is_unavailable() || error.kind() == ErrorKind::Unknown,
                "{error}"
            );
        }
    };
    soon(told).await;
}

/// Each server's part in an error, by its address.
pub(super) fn reasons(error: &QuorumError) -> HashMap<String, Option<Error>> {
    let servers = error.servers();
    servers
        .map(|(address, error)| (address.to_owned(), error.cloned()))
        .collect()
}

/// Two clients exclude each other, and the lock goes from one to the other.
async fn works_and_excludes(one: &QuorumClient, other: &QuorumClient) {
    let guard = soon(one.lock("k").lock()).await.unwrap();
    assert!(!guard.is_lost() && guard.valid_for() > Duration::ZERO);
    not_acquired(async || other.lock("k").try_lock().await).await;
    not_acquired(async || other.lock("k").lock_timeout(50 * MS).await).await;
    let lock = other.lock("k");
    let waiting = tokio::spawn(async move { lock.lock().await });
    sleep(30 * MS).await;
    assert!(!waiting.is_finished() && !guard.is_lost());
    soon(guard.unlock()).await.unwrap();
    let guard = soon(waiting).await.unwrap().unwrap();
    assert!(!guard.is_lost());
    soon(guard.unlock()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_free_lock_is_taken_on_every_server_and_given_back_on_every_server() {
    let five = Five::start();
    let client = five.connect(settings()).await;
    let guard = client.lock("k").lock().await.unwrap();
    assert_eq!(guard.name(), b"k");
    five.all_taken("k", 0..5);
    until("all are told to the guard", || guard.tokens().len() == 5);
    for (i, (address, token)) in guard.tokens().into_iter().enumerate() {
        assert_eq!(address, five.address(i));
        let info = five.0[i].run("RLOCK.INFO k").get("token").int();
        assert_eq!(token, u64::try_from(info).unwrap(), "server {i}");
    }
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
    drop(client.lock("k").lock().await.unwrap());
    soon(client.shutdown()).await;
    for server in &five.0 {
        assert_eq!(server.holder("k"), None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_and_two_killed_servers_do_no_harm() {
    let mut five = Five::start();
    let clients = [five.client().await, five.client().await];
    let held = clients[0].lock("long").lock().await.unwrap();
    for dead in 0..2 {
        five.0[dead].kill();
        works_and_excludes(&clients[0], &clients[1]).await;
        // One that comes later finds a majority too.
        let late = five.client().await;
        works_and_excludes(&late, &clients[1]).await;
        not_acquired(async || late.lock("long").try_lock().await).await;
    }
    assert!(!held.is_lost());
    soon(held.unlock()).await.unwrap();
    five.all_free("long", 2..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_and_two_stopped_servers_do_no_harm() {
    let five = Five::start();
    let clients = [five.client().await, five.client().await];
    let held = clients[0].lock("long").lock().await.unwrap();
    for stopped in 0..2 {
        five.0[stopped].freeze();
        works_and_excludes(&clients[0], &clients[1]).await;
        let late = five.client().await;
        works_and_excludes(&late, &clients[1]).await;
    }
    assert!(!held.is_lost());
    soon(held.unlock()).await.unwrap();
    five.0[..2].iter().for_each(Server::thaw);
    five.all_free("long", 0..5);
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_held_and_the_error_says_why_of_each_server() {
    let mut five = Five::start();
    let client = five.connect(settings()).await;
    five.0[0].kill();
    five.0[1].freeze();
    five.0[2].run("SET k text");
    five.0[3].connect().take("k", "alice");
    let error = soon(client.lock("k").lock()).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let why = reasons(&error);
    let of = |i: usize| why[&five.address(i)].as_ref();
    assert!(of(0).unwrap().is_unavailable(), "{error}");
    let stopped = of(1).unwrap();
    assert!(stopped.is_unknown() || stopped.is_unavailable(), "{error}");
    assert!(of(2).unwrap().to_string().contains("WRONGTYPE"), "{error}");
    let left = of(3).unwrap().lease_left().unwrap();
    assert!(left > Duration::from_secs(20), "{left:?}");
    assert!(of(4).is_none(), "granted, and given back: {error}");
    five.all_free("k", [4]);

    // Once it is known that a server is down, the error says so.
    until("the client knows", || {
        let error = try_now(&client);
        let why = reasons(&error);
        let down = why[&five.address(0)].as_ref().unwrap();
        down.to_string().contains("refused")
    });
    let text = error.to_string();
    for i in 0..4 {
        assert!(text.contains(&five.address(i)), "{text}");
    }
    five.0[1].thaw();
    five.all_free("k", [1]);
}

/// One try from a thread that may block.
pub(super) fn try_now(client: &QuorumClient) -> QuorumError {
    wait_for(client.lock("k").try_lock()).unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connecting_needs_a_majority_and_finds_the_others_later() {
    let mut five = Five::start();
    five.0[..3].iter_mut().for_each(Server::kill);
    let error = soon(settings().connect(five.urls())).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let why = reasons(&error);
    for i in 0..5 {
        let of = why[&five.address(i)].as_ref();
        assert_eq!(of.is_some_and(Error::is_unavailable), i < 3, "{error}");
    }
    five.0[0].restart();
    let client = five.client().await;
    let guard = client.lock("k").lock().await.unwrap();
    five.0[1].restart();
    five.all_taken("k", [0, 1, 3, 4]);
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", [0, 1, 3, 4]);
    // Gone for good is killed, not died.
    five.0[2].restart();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_without_the_module_and_refusals_are_named_as_such() {
    let with = [Server::start(), Server::start()];
    let without = [(); 3].map(|()| Server::builder().without_module().start());
    let urls: Vec<_> = with.iter().chain(&without).map(url).collect();
    let error = soon(settings().connect(&urls)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ModuleNotLoaded, "{error}");

    let five = Five::start();
    let client = five.client().await;
    let error = client.lock("k").lease(Duration::ZERO).lock().await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("lease"), "{error}");
}

/// Each of these clients adds to the counter so often, under the lock.
pub(super) async fn count(clients: &[QuorumClient], times: u64) {
    let (counter, inside) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut tasks = Vec::new();
    for client in clients {
        let lock = client.lock("k");
        let (counter, inside) = (Arc::clone(&counter), Arc::clone(&inside));
        tasks.push(tokio::spawn(async move {
            for _ in 0..times {
                let guard = lock.lock().await.unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two at a time");
                let seen = counter.load(Ordering::SeqCst);
                sleep(MS).await;
                counter.store(seen + 1, Ordering::SeqCst);
                inside.store(false, Ordering::SeqCst);
                assert!(!guard.is_lost());
                guard.unlock().await.unwrap();
            }
        }));
    }
    let wanted = times * clients.len() as u64;
    for task in tasks {
        let done = timeout(patience(Duration::from_secs(60)), task).await;
        done.expect("everybody gets the lock in the end").unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_contend_lose_no_update_and_never_queue() {
    let mut five = Five::start();
    let mut clients = Vec::new();
    for _ in 0..5 {
        clients.push(five.client().await);
    }
    count(&clients, 20).await;
    five.0[4].freeze();
    count(&clients, 8).await;
    five.0[3].kill();
    count(&clients, 8).await;
    five.0[4].thaw();
    for i in [0, 1, 2, 4] {
        five.all_free("k", [i]);
        assert_eq!(five.0[i].info_number("rlock_waiters_peak"), 0);
    }
}

/// Whether it came within that time; dropped otherwise.
async fn comes_within<T>(time: Duration, what: impl Future<Output = T>) -> bool {
    timeout(time, what).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_dropped_at_any_moment_leaves_nothing_on_any_server() {
    let five = Five::start();
    let clients = [five.client().await, five.client().await];
    let over = Arc::new(AtomicBool::new(false));
    let traffic = tokio::spawn({
        let (lock, over) = (clients[0].lock("k"), Arc::clone(&over));
        async move {
            while !over.load(Ordering::Relaxed) {
                // On a busy machine a majority may not confirm it in time.
                drop(lock.lock().await.unwrap().unlock().await);
                sleep(2 * MS).await;
            }
        }
    });
    let (mut granted, mut dropped) = (0, 0);
    for i in 0..1_000_u32 {
        if i == 700 {
            five.0[1].freeze();
        }
        let lock = clients[1].lock("k");
        // From before the first answer to after the last, and some to the end.
        let time = match i % 100 {
            99 => Duration::from_secs(15),
            _ => Duration::from_micros(u64::from(i * 7919 % 6_000)),
        };
        if comes_within(time, async { drop(lock.lock().await.unwrap()) }).await {
            granted += 1;
        } else {
            dropped += 1;
        }
    }
    assert!(granted > 0 && dropped > 0, "{granted} and {dropped}");
    over.store(true, Ordering::Relaxed);
    soon(traffic).await.unwrap();
    five.0[1].thaw();
    for client in &clients {
        soon(client.shutdown()).await;
    }
    for server in &five.0 {
        until("nothing is left", || server.run("DBSIZE") == 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_grants_of_stopped_servers_are_given_back() {
    let five = Five::start();
    let client = five.connect(settings()).await;
    let acquired = calls(&five.0[0], "acquire");
    let grants = five.0[0].info_number("rlock_grants");
    five.0[..3].iter().for_each(Server::freeze);
    let error = soon(client.lock("k").try_lock()).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let why = reasons(&error);
    for i in 0..3 {
        let slow = why[&five.address(i)].as_ref().unwrap();
        assert!(slow.is_unknown() && slow.to_string().contains("too slow"));
    }
    five.all_free("k", 3..5);
    five.0[..3].iter().for_each(Server::thaw);
    until("it is carried out late", || {
        calls(&five.0[0], "acquire") > acquired
    });
    five.all_free("k", 0..3);
    soon(client.shutdown()).await;
    for server in &five.0 {
        until("nothing is left", || server.run("DBSIZE") == 0);
    }
    assert_eq!(five.0[0].info_number("rlock_grants"), grants + 1);
}

/// Takes servers away from a guard until too few are left, and sees it say so in time.
async fn lost_in_time(guard: &QuorumGuard, take_away: impl FnOnce()) {
    let end = tokio::time::Instant::now() + guard.valid_for();
    take_away();
    let end = end.max(tokio::time::Instant::now() + guard.valid_for());
    let why = soon(guard.lost()).await;
    let told = tokio::time::Instant::now();
    assert!(why.is_lost(), "{why}");
    // A renewal or two may have been under way. From now on none is.
    let late = told.saturating_duration_since(end);
    assert!(late < Duration::from_secs(5), "{late:?}");
    sleep_until(end).await;
    assert!(guard.is_lost() && guard.valid_for() == Duration::ZERO);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_says_lost_before_its_validity_ends_when_a_majority_goes() {
    let five = Five::start();
    let grace = Duration::from_secs(4);
    let (client, rival) = (five.connect(within_grace(grace)).await, five.client().await);
    let guard = client.lock("k").lock().await.unwrap();
    until("all have joined", || guard.tokens().len() == 5);
    five.0[..2].iter().for_each(Server::freeze);
    sleep(grace + 200 * MS).await;
    assert!(!guard.is_lost(), "three are left");
    five.0[2].freeze();
    let stopped = tokio::time::Instant::now();
    let why = soon(guard.lost()).await;
    assert_eq!(guard.valid_for(), Duration::ZERO);
    // The grace, less its drift, since the last answer; and not when the leases would have ended.
    let told_after = stopped.elapsed();
    assert!(told_after < 2 * grace, "{told_after:?}");
    let reasons = reasons(&why);
    for i in 0..5 {
        let gone = reasons[&five.address(i)].is_some();
        assert_eq!(gone, i < 3, "{why}");
    }
    // The remaining holds are given back at once, and nothing brings the guard back.
    five.all_free("k", 3..5);
    five.0[..3].iter().for_each(Server::thaw);
    five.all_free("k", 0..3);
    let next = soon(rival.lock("k").lock()).await.unwrap();
    assert!(guard.is_lost() && !next.is_lost());
    assert!(guard.renew().await.unwrap_err().is_lost());
    assert!(guard.unlock().await.unwrap_err().is_lost());
    assert!(!next.is_lost());
    five.all_taken("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_renewals_a_guard_ends_with_the_lease_of_its_majority() {
    let mut five = Five::start();
    let lease = Duration::from_secs(3);
    let each = by_lease().lease(lease).renew_every(200 * MS);
    let client = five.connect(settings().settings(each)).await;
    let guard = client.lock("k").lock().await.unwrap();
    until("all have joined", || guard.tokens().len() == 5);
    let started = Instant::now();
    while started.elapsed() < lease + 300 * MS {
        assert!(!guard.is_lost(), "it is renewed");
        sleep(20 * MS).await;
    }
    // Killed, they no longer renew; the session connections break, but without a grace only leases
    // count.
    lost_in_time(&guard, || five.0[..3].iter_mut().for_each(Server::kill)).await;

    five.0[..3].iter_mut().for_each(Server::restart);
    five.whole(&client).await;
    let guard = soon(client.lock("once").lease(lease).lock()).await.unwrap();
    assert!(guard.valid_for() < lease);
    sleep(300 * MS).await;
    let renewed = Instant::now();
    guard.renew().await.unwrap();
    let why = soon(guard.lost()).await;
    assert!(renewed.elapsed() + 100 * MS > lease, "the renewal counts");
    assert!(why.to_string().contains("within its lease"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_needs_a_majority() {
    let five = Five::start();
    let client = five.connect(settings().settings(by_lease())).await;
    let guard = client
        .lock("k")
        .lease(Duration::from_secs(20))
        .lock()
        .await
        .unwrap();
    until("all have joined", || guard.tokens().len() == 5);
    five.0[..2].iter().for_each(Server::freeze);
    let end = Instant::now() + guard.valid_for();
    sleep(20 * MS).await;
    guard.renew().await.unwrap();
    let renewed = Instant::now() + guard.valid_for();
    assert!(renewed >= end + 15 * MS, "three have renewed it");
    five.0[2].freeze();
    let end = Instant::now() + guard.valid_for();
    let error = guard.renew().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    assert!(!guard.is_lost());
    let left = end.saturating_duration_since(Instant::now());
    assert!(guard.valid_for() <= left + MS, "the lease is as it was");
    // It may not have been sent: the connections were given up, and the next ones do not answer.
    let error = soon(guard.unlock()).await.unwrap_err();
    let kinds = [ErrorKind::Unknown, ErrorKind::Unavailable];
    assert!(kinds.contains(&error.kind()), "{error}");
    five.0[..3].iter().for_each(Server::thaw);
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_may_fail_one_after_the_other_since_lost_parts_are_taken_again() {
    let mut five = Five::start();
    let client = five.client().await;
    let guard = client.lock("k").lock().await.unwrap();
    until("all have joined", || guard.tokens().len() == 5);
    let tokens = guard.tokens();
    for i in 0..5 {
        let owner = five.0[i].holder("k");
        five.0[i].kill();
        five.0[i].restart();
        five.all_taken("k", [i]);
        assert_ne!(
            five.0[i].holder("k"),
            owner,
            "each grant is to an owner of its own"
        );
    }
    assert!(!guard.is_lost());
    assert_eq!(guard.tokens(), tokens, "those of the first grants");
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_ended_by_operators_are_not_taken_again() {
    let five = Five::start();
    let client = five.client().await;
    let guard = client.lock("k").lock().await.unwrap();
    until("all have joined", || guard.tokens().len() == 5);
    five.0[0].run("RLOCK.BREAK k");
    five.0[1].run("DEL k");
    // Two rounds in which it would be taken again.
    let watched = Instant::now();
    while watched.elapsed() < Duration::from_millis(2_200) {
        assert!(five.0[0].holder("k").is_none() && five.0[1].holder("k").is_none());
        sleep(50 * MS).await;
    }
    assert!(!guard.is_lost());
    five.0[2].run("RLOCK.BREAK k");
    let why = soon(guard.lost()).await;
    for (i, word) in [(0, "broke"), (1, "deleted"), (2, "broke")] {
        let reason = reasons(&why)[&five.address(i)].clone().unwrap();
        assert!(
            reason.is_lost() && reason.to_string().contains(word),
            "{why}"
        );
    }
    five.all_free("k", 3..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_longest_hold_ends_it_on_every_server() {
    let five = Five::start();
    let client = five.client().await;
    let lock = client.lock("k").max_hold(700 * MS);
    let started = Instant::now();
    let guard = lock.lock().await.unwrap();
    let why = soon(guard.lost()).await;
    let held = started.elapsed();
    // Long before the lease, which is longer than we wait, and not before its time.
    assert!(held > 400 * MS, "{held:?}: {why}");
    assert!(why.to_string().contains("as long as is allowed"), "{why}");
    five.all_free("k", 0..5);
}

/// A resource that remembers the largest token of each server.
#[derive(Default)]
pub(super) struct Store(HashMap<String, u64>);

impl Store {
    pub(super) fn takes(&mut self, tokens: &[(String, u64)]) -> bool {
        let known = |(server, token): &(String, u64)| {
            self.0.get(server).is_none_or(|largest| token >= largest)
        };
        let takes = tokens.len() >= 3 && tokens.iter().all(known);
        if takes {
            self.0.extend(tokens.iter().cloned());
        }
        takes
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_compares_tokens_server_by_server_refuses_the_former_holder() {
    let five = Five::start();
    let client = five.connect(settings()).await;
    let mut store = Store::default();
    // Any two majorities, as far apart as they can be.
    for (away, then) in [([0, 1], [3, 4]), ([0, 4], [1, 2]), ([1, 3], [0, 2])] {
        let hold_only_elsewhere = |name: &'static str, servers: [usize; 2]| {
            for i in servers {
                five.0[i].connect().take(name, "somebody");
            }
        };
        let free = |servers: [usize; 2]| {
            for i in servers {
                five.0[i].run("RLOCK.BREAK k");
            }
        };
        hold_only_elsewhere("k", away);
        let former = client.lock("k").lease(200 * MS).lock().await.unwrap();
        free(away);
        assert!(store.takes(&former.tokens()));
        soon(former.lost()).await;
        five.all_free("k", 0..5);
        hold_only_elsewhere("k", then);
        let next = soon(client.lock("k").lock()).await.unwrap();
        free(then);
        assert!(store.takes(&next.tokens()));
        assert!(!store.takes(&former.tokens()), "{former:?} after {next:?}");
        soon(next.unlock()).await.unwrap();
        five.all_free("k", 0..5);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_calls_that_wait_and_leaves_guards_alone() {
    let five = Five::start();
    let client = five.client().await;
    let guard = client.lock("k").lock().await.unwrap();
    let lock = client.lock("k");
    let waiting = tokio::spawn(async move { lock.lock().await });
    soon(client.shutdown()).await;
    let error = soon(waiting).await.unwrap().unwrap_err();
    assert!(error.is_unavailable() || error.is_not_acquired(), "{error}");
    let error = soon(client.lock("other").lock()).await.unwrap_err();
    assert!(error.to_string().contains("shut down"), "{error}");
    sleep(Duration::from_millis(1_200)).await;
    assert!(!guard.is_lost());
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

#[test]
fn the_example_runs() {
    let five = Five::start();
    let said = example_with(&five.urls(), "quorum");
    let lines: Vec<_> = said.lines().collect();
    let [meanwhile, hears, late, last] = lines.as_slice() else {
        panic!("{said}")
    };
    assert!(meanwhile.starts_with("meanwhile: not acquired"), "{said}");
    assert!(
        hears.starts_with("the first hears: the lock was lost"),
        "{said}"
    );
    assert!(late.starts_with("late write refused: token"), "{said}");
    assert_eq!(*last, "the store says: the second writer was here");
    five.all_free("example:quorum", 0..5);
}

#[test]
fn a_guard_may_be_dropped_outside_a_runtime_and_after_its_end() {
    let five = Five::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (here, after) = runtime.block_on(async {
        let client = five.client().await;
        let lock = client.lock("after").lease(Duration::from_secs(1));
        (
            client.lock("here").lock().await.unwrap(),
            lock.lock().await.unwrap(),
        )
    });
    drop(here);
    five.all_free("here", 0..5);
    runtime.shutdown_timeout(Duration::from_secs(5));
    drop(after);
    five.all_free("after", 0..5);
}

#[test]
fn a_program_without_async_locks_the_same_way() {
    let mut five = Five::start();
    five.0[0].kill();
    let client = blocking::QuorumBuilder::from(settings())
        .connect(five.urls())
        .unwrap();
    let lock = client.lock("k");
    let guard = lock.lock().unwrap();
    assert!(!guard.is_lost() && guard.tokens().len() >= 3);
    assert!(lock.try_lock().unwrap_err().is_not_acquired());
    assert!(lock.lock_timeout(20 * MS).unwrap_err().is_not_acquired());
    assert!(guard.lost_within(20 * MS).is_none());
    guard.renew().unwrap();
    guard.unlock().unwrap();
    five.all_free("k", 1..5);
    drop(lock.lock().unwrap());
    five.all_free("k", 1..5);
}
