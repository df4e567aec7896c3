//! The quorum lock of the client crate where servers stop, come back, jump in time, refuse, or turn
//! out to be one and the same.

use std::array;
use std::time::{Duration, Instant};

use rlock_client::{Client, ErrorKind, QuorumClient, QuorumError, QuorumLock};
use rlock_tests::{Proxy, Server, eventually, patience, until};
use tokio::time::sleep;

use super::client::{MS, calls, soon, url, wait_for};
use super::client_quorum::{
    Five, Store, by_lease, count, not_acquired, reasons, settings, try_now, within_grace,
};

const SECOND: Duration = Duration::from_secs(1);

/// Settings with which a stopped server is waited for, and nothing else is given up.
fn unhurried() -> rlock_client::ClientBuilder {
    by_lease().response_timeout(30 * SECOND)
}

/// Takes the lock and sees that every server has granted it.
async fn held_everywhere(lock: &QuorumLock) -> rlock_client::QuorumGuard {
    let guard = soon(lock.lock()).await.unwrap();
    until("all have joined", || guard.tokens().len() == 5);
    guard
}

/// Sees that the lock has been taken again on a server, by a new owner.
#[track_caller]
fn taken_again(server: &Server, name: &str, before: &str) {
    until("it is taken again", || {
        server
            .holder(name)
            .is_some_and(|holder| holder != before && holder != "somebody")
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_lock_is_not_taken_again_however_slow_the_servers_are() {
    let five = Five::start();
    let client = five.connect(settings().settings(by_lease())).await;
    let guard = held_everywhere(&client.lock("k")).await;
    five.0[..3].iter().for_each(Server::freeze);
    let asked = calls(&five.0[4], "acquire");
    let started = Instant::now();
    let error = soon(guard.unlock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    let took = started.elapsed();
    assert!(took > 1_500 * MS, "what is missing is looked for: {took:?}");
    assert_eq!(calls(&five.0[4], "acquire"), asked);
    five.0[..3].iter().for_each(Server::thaw);
    five.all_free("k", 0..5);
}

/// The client has stopped trying to give back when the server wakes, so only a RELEASE that lies
/// in the socket behind the ACQUIRE can undo it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_to_a_stopped_server_are_undone_when_it_wakes_after_the_lease() {
    let five = Five::start();
    let each = by_lease().lease(3 * SECOND).response_timeout(2 * SECOND);
    let client = five.connect(settings().settings(each)).await;
    // As long as a silent connection is kept: that nothing was asked is no silence.
    sleep(2_200 * MS).await;
    let server = &five.0[0];
    let asked = calls(server, "acquire");
    let done = ["rlock_grants", "rlock_releases"].map(|what| server.info_number(what));
    server.freeze();
    let guard = soon(client.lock("k").lock()).await.unwrap();
    soon(guard.unlock()).await.unwrap();
    soon(client.shutdown()).await;
    server.thaw();
    until("it is carried out late", || {
        calls(server, "acquire") > asked
    });
    five.all_free("k", 0..5);
    // Where the connection was given up all of it was sent again, in order.
    let now = ["rlock_grants", "rlock_releases"].map(|what| server.info_number(what));
    assert!(now[0] > done[0] && now[1] >= now[0], "{done:?}, {now:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_server_is_taken_again_although_it_still_holds() {
    let five = Five::start();
    let grace = 4 * SECOND;
    let client = five.connect(within_grace(grace)).await;
    let guard = held_everywhere(&client.lock("k")).await;
    let before = five.0[0].holder("k").unwrap();
    five.0[0].freeze();
    // By our clock it is lost there.
    sleep(grace + 300 * MS).await;
    five.0[0].thaw();
    taken_again(&five.0[0], "k", &before);
    assert!(!guard.is_lost());
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

/// One server is silent for as long as it may be. Another one, which refuses at first, is taken
/// meanwhile: then the lock outlives the end of a third.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_server_does_not_delay_that_others_are_taken() {
    let five = Five::start();
    let builder = settings().server_timeout(30 * SECOND).settings(unhurried());
    let client = five.connect(builder).await;
    let refusing = &five.0[4];
    refusing.connect().take("k", "somebody");
    five.0[3].freeze();
    let guard = soon(client.lock("k").lock()).await.unwrap();
    refusing.run("RLOCK.BREAK k");
    let started = Instant::now();
    taken_again(refusing, "k", "somebody");
    assert!(started.elapsed() < 15 * SECOND);
    five.0[3].thaw();
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_dropped_while_it_is_being_taken_again_leaves_nothing() {
    let five = Five::start();
    let builder = settings().server_timeout(30 * SECOND).settings(unhurried());
    let client = five.connect(builder).await;
    let guard = held_everywhere(&client.lock("k")).await;
    let server = &five.0[0];
    let asked = calls(server, "acquire");
    let mut somebody = server.blocked_in("RLOCK.ACQUIRE k somebody 6000 BLOCK 0");
    server.run("PEXPIRE k 100");
    somebody.read().held();
    // Somebody's, and then that of the guard, which is refused.
    until("it has been asked for again", || {
        calls(server, "acquire") > asked + 1
    });
    let asked = calls(server, "acquire");
    server.freeze();
    // By then the guard has asked once more, and a lease is over.
    sleep(6_200 * MS).await;
    assert!(!guard.is_lost());
    drop(guard);
    server.thaw();
    soon(client.shutdown()).await;
    assert!(calls(server, "acquire") > asked, "it is carried out late");
    for server in &five.0 {
        until("nothing is left", || server.run("DBSIZE") == 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_possible_majority_parts_are_given_back_before_the_slowest_reply() {
    let five = Five::start();
    let builder = settings().server_timeout(60 * SECOND).settings(unhurried());
    let client = five.connect(builder).await;
    for server in &five.0[1..4] {
        server.connect().take("k", "somebody");
    }
    five.0[0].freeze();
    let given_back = calls(&five.0[4], "release");
    let lock = client.lock("k");
    let trying = tokio::spawn(async move { lock.try_lock().await });
    until("the only grant is given back", || {
        calls(&five.0[4], "release") > given_back
    });
    assert!(!trying.is_finished(), "one has not answered yet");
    five.0[0].thaw();
    let error = soon(trying).await.unwrap().unwrap_err();
    assert!(error.is_not_acquired(), "{error}");
    five.all_free("k", [0, 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_confirmed_too_late_brings_nothing_back() {
    let servers = [(); 3].map(|()| Server::start());
    let proxies = servers.each_ref().map(|server| Proxy::to(server.address()));
    let urls = proxies
        .each_ref()
        .map(|proxy| format!("redis://{}", proxy.address()));
    let builder = settings().server_timeout(30 * SECOND).settings(unhurried());
    let client = soon(builder.connect(urls)).await.unwrap();
    let guard = soon(client.lock("k").lease(5 * SECOND).lock()).await;
    let guard = guard.unwrap();
    until("all have joined", || guard.tokens().len() == 3);
    sleep(500 * MS).await;
    proxies[..2].iter().for_each(Proxy::cut_to_client);
    let late = async {
        let why = soon(guard.lost()).await;
        // The servers keep it for a while longer, but the client cannot know that.
        let renewed = servers.each_ref().map(|server| calls(server, "renew"));
        proxies[..2].iter().for_each(Proxy::heal);
        (why, renewed)
    };
    let (told, (why, renewed)) = tokio::join!(guard.renew(), late);
    assert!(why.is_lost(), "{why}");
    // The third has been asked again by now if that took long: it has told of its lease's end.
    assert_eq!(renewed[..2], [1, 1]);
    let told = told.unwrap_err();
    assert!(told.is_lost(), "{told}");
    assert!(guard.is_lost() && guard.valid_for() == Duration::ZERO);
    for server in &servers {
        until("it is free", || server.holder("k").is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_hold_does_not_grow_when_a_part_is_taken_again() {
    let longest = 12 * SECOND;
    let five = Five::start();
    let client = five.connect(settings().settings(by_lease())).await;
    let before = Instant::now();
    let guard = held_everywhere(&client.lock("k").max_hold(longest)).await;
    let taken = Instant::now();
    for server in &five.0[..3] {
        let holder = server.holder("k").unwrap();
        server.run("PEXPIRE k 100");
        taken_again(server, "k", &holder);
    }
    // As soon as the client knows what the server has granted.
    until("a majority holds it", || guard.valid_for() > Duration::ZERO);
    sleep(500 * MS).await;
    let left = longest.saturating_sub(taken.elapsed());
    let valid = guard.valid_for();
    assert!(valid <= left + 100 * MS, "{valid:?} of {left:?}");
    let why = soon(guard.lost()).await;
    assert!(before.elapsed() + 500 * MS >= longest, "{why}");
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_clock_jumps_costs_its_own_part_and_no_more() {
    let five = Five(array::from_fn(|i| match i {
        0 | 1 => Server::builder().settable_clock().start(),
        _ => Server::start(),
    }));
    let client = five.connect(settings().settings(by_lease())).await;
    let guard = held_everywhere(&client.lock("k")).await;
    let tokens = guard.tokens();
    let before = [0, 1].map(|i| five.0[i].holder("k").unwrap());
    for (server, before) in five.0.iter().zip(&before) {
        server.step_clock(3_600);
        taken_again(server, "k", before);
    }
    // Now these leases have an hour more to run than they should.
    five.0[..2].iter().for_each(|server| server.step_clock(0));
    let rival = five.client().await;
    not_acquired(async || rival.lock("k").try_lock().await).await;
    assert!(!guard.is_lost());
    assert_eq!(guard.tokens(), tokens);
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

/// Takes the lock on the last three servers only.
async fn held_by_three(five: &Five, client: &QuorumClient) -> rlock_client::QuorumGuard {
    for server in &five.0[..2] {
        server.connect().take("k", "somebody");
    }
    let lock = client.lock("k").lease(60 * SECOND);
    let guard = soon(lock.lock()).await.unwrap();
    five.all_taken("k", 2..5);
    until("three have joined", || guard.tokens().len() == 3);
    for server in &five.0[..2] {
        server.run("RLOCK.BREAK k");
    }
    guard
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_by_hand_takes_lost_parts_again() {
    let five = Five::start();
    let client = five.connect(settings().settings(by_lease())).await;
    let guard = held_by_three(&five, &client).await;
    soon(guard.renew()).await.unwrap();
    five.all_taken("k", 0..5);
    until("the guard is told", || guard.tokens().len() == 5);
    let tokens = guard.tokens();
    // They count: with two others fewer it is still held.
    five.0[2].run("RLOCK.BREAK k");
    five.0[3].run("RLOCK.BREAK k");
    until("two are known to be lost, and the others renewed", || {
        let left = guard.valid_for();
        wait_for(guard.renew()).is_ok() && guard.valid_for() > left
    });
    assert!(!guard.is_lost());
    assert_eq!(guard.tokens(), tokens);
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_outlasts_a_time_without_a_majority() {
    let five = Five::start();
    let builder = settings().server_timeout(500 * MS).settings(unhurried());
    let client = five.connect(builder).await;
    five.0[..3].iter().for_each(Server::freeze);
    let asked = calls(&five.0[4], "acquire");
    let lock = client.lock("k");
    let taking = tokio::spawn(async move { lock.lock().await });
    until("it has tried a few times", || {
        calls(&five.0[4], "acquire") > asked + 2
    });
    assert!(!taking.is_finished());
    five.0[..3].iter().for_each(Server::thaw);
    let guard = soon(taking).await.unwrap().unwrap();
    assert!(!guard.is_lost());
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_was_away_for_longer_than_the_grace_makes_no_second_majority() {
    let mut five = Five::start();
    let grace = 4 * SECOND;
    let client = five.connect(within_grace(grace)).await;
    let rival = five.client().await;
    let guard = held_by_three(&five, &client).await;
    not_acquired(async || rival.lock("k").try_lock().await).await;
    five.0[4].kill();
    sleep(grace + 100 * MS).await;
    // It has forgotten its grant; by now no guard relies on it.
    assert!(guard.is_lost());
    five.0[4].restart();
    let next = soon(rival.lock("k").lock()).await.unwrap();
    assert!(guard.is_lost() && !next.is_lost());
}

/// A client that reaches the last server by a way that can be cut.
async fn connected_by(five: &Five, way: &Proxy, grace: Duration) -> QuorumClient {
    let mut urls = five.0.each_ref().map(url);
    urls[4] = format!("redis://{}", way.address());
    soon(within_grace(grace).connect(urls)).await.unwrap()
}

/// The way to the last server is cut, and it starts again without the hold that it had.
fn restart_empty_while_unreachable(five: &mut Five, way: &Proxy) {
    way.cut_to_server();
    way.cut_to_client();
    five.0[4].kill();
    five.0[4].restart();
}

/// Why quorum servers have a grant delay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_grant_delay_a_server_that_restarts_empty_makes_a_second_majority() {
    let mut five = Five::start();
    let way = Proxy::to(five.0[4].address());
    let client = connected_by(&five, &way, 30 * SECOND).await;
    let rival = five.connect(settings()).await;
    let former = held_by_three(&five, &client).await;
    not_acquired(async || rival.lock("k").try_lock().await).await;
    restart_empty_while_unreachable(&mut five, &way);
    let second = soon(rival.lock("k").lock()).await.unwrap();
    assert!(!former.is_lost() && !second.is_lost(), "the hole is closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_grant_delay_as_long_as_the_grace_a_server_that_restarts_empty_makes_none() {
    let mut five = Five::start();
    five.0[4] = Server::builder()
        .config("rlock.grant-delay-ms 4040")
        .start();
    five.0[4].run("CONFIG SET rlock.grant-delay-ms 0");
    let way = Proxy::to(five.0[4].address());
    let client = connected_by(&five, &way, 4 * SECOND).await;
    let rival = five.connect(settings()).await;
    let former = held_by_three(&five, &client).await;
    not_acquired(async || rival.lock("k").try_lock().await).await;
    restart_empty_while_unreachable(&mut five, &way);
    let next = soon(rival.lock("k").lock()).await.unwrap();
    assert!(former.is_lost() && !next.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgets_nothing_may_come_back_at_once() {
    let mut five = Five::start();
    five.0[4] = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always")
        .start();
    let each = Client::builder().grace(20 * SECOND);
    let client = five.connect(settings().settings(each)).await;
    let rival = five.connect(settings()).await;
    let guard = held_by_three(&five, &client).await;
    five.0[4].kill();
    five.0[4].restart();
    until("the rival is told by all three", || {
        let error = try_now(&rival);
        let why = reasons(&error);
        let told = |i| why[&five.address(i)].as_ref();
        (2..5).all(|i| told(i).is_some_and(rlock_client::Error::is_not_acquired))
    });
    assert!(!guard.is_lost());
    until("all three have confirmed it", || {
        wait_for(guard.renew()).is_ok()
    });
    soon(guard.unlock()).await.unwrap();
    five.all_free("k", 0..5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_over_restarts_of_servers_that_remember_nothing() {
    let mut five = Five::start();
    let client = five.connect(settings()).await;
    let mut store = Store::default();
    let former = held_everywhere(&client.lock("k")).await;
    assert!(store.takes(&former.tokens()));
    five.0.iter_mut().for_each(Server::kill);
    soon(former.lost()).await;
    five.0.iter_mut().for_each(Server::restart);
    let next = eventually("it is taken anew", || {
        wait_for(client.lock("k").try_lock()).ok()
    });
    assert!(store.takes(&next.tokens()));
    assert!(!store.takes(&former.tokens()), "{former:?} after {next:?}");
}

/// Whether this server's error is of this kind and has this word in it.
fn says(error: &QuorumError, address: &str, kind: ErrorKind, word: &str) -> bool {
    let why = reasons(error);
    let said = why[address].as_ref();
    said.is_some_and(|said| said.kind() == kind && said.to_string().contains(word))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_has_each_servers_reason_also_of_one_not_asked() {
    let mut servers: [Server; 7] = array::from_fn(|i| match i {
        5 => Server::builder().on_a_small_disk("everysec").start(),
        _ => Server::start(),
    });
    let urls = servers.each_ref().map(url);
    let client = soon(settings().connect(urls)).await.unwrap();
    soon(client.lock("k").lock())
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    servers[0].run("REPLICAOF 127.0.0.1 1");
    servers[1].run("CONFIG SET min-replicas-to-write 1");
    servers[2].run("CONFIG SET maxmemory 1");
    servers[3].run("ACL SETUSER default -rlock.acquire");
    servers[4].restart_without_module();
    servers[5].take_the_room();
    let mut operator = servers[6].connect();
    operator.run("ACL SETUSER default resetpass >hidden");
    operator.run("CLIENT KILL TYPE normal SKIPME yes");
    until("the disk is full", || {
        let told = servers[5].run("RLOCK.ACQUIRE padding somebody 60000 ONCE");
        told.is_error() && told.error().starts_with("MISCONF ")
    });
    let said = [
        ("is a replica", ErrorKind::Unavailable),
        ("NOREPLICAS", ErrorKind::Unavailable),
        ("OOM", ErrorKind::Refused),
        ("NOPERM", ErrorKind::Refused),
        ("unknown command", ErrorKind::ModuleNotLoaded),
        ("MISCONF", ErrorKind::Unavailable),
        ("NOAUTH", ErrorKind::Refused),
    ];
    let mut last = String::new();
    let give_up = Instant::now() + patience(15 * SECOND);
    loop {
        let error = try_now(&client);
        let mut each = servers.iter().zip(said);
        if each
            .all(|(server, (word, kind))| says(&error, &server.address().to_string(), kind, word))
        {
            // Four of seven have said no for good: there is nothing to wait for.
            assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
            let text = error.to_string();
            assert!(said.iter().all(|(word, _)| text.contains(word)), "{text}");
            break;
        }
        assert!(Instant::now() < give_up, "{last}");
        last = error.to_string();
    }
    servers[5].give_the_room_back();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_server_by_two_addresses_is_refused() {
    let servers = [Server::start(), Server::start()];
    let also = Proxy::to(servers[0].address());
    let [one, other] = servers.each_ref().map(url);
    // In another of its databases it would even grant the same lock twice.
    let urls = [one, other, format!("redis://{}/1", also.address())];
    let builder = settings().server_timeout(10 * SECOND);
    let error = soon(builder.connect(urls)).await.unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let (one, also) = (servers[0].address(), also.address());
    let text = format!("{one} and {also} are the same server");
    assert!(error.to_string().contains(&text), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_to_answer_for_another_counts_once() {
    let mut servers = [(); 3].map(|()| Server::start());
    let proxies = servers.each_ref().map(|server| Proxy::to(server.address()));
    let addresses = proxies.each_ref().map(|proxy| proxy.address().to_string());
    // In another of its databases it would grant the same lock twice.
    let databases = [0, 0, 1];
    let urls = addresses.iter().zip(databases);
    let urls = urls.map(|(address, database)| format!("redis://{address}/{database}"));
    let client = soon(settings().connect(urls)).await.unwrap();
    proxies[2].redirect(servers[0].address());
    servers[1].freeze();
    // Whichever of the two addresses is answered first.
    until("one of them has a vote, and the other none", || {
        let error = try_now(&client);
        let why = reasons(&error);
        let has_no_vote = |this: usize, other: usize| {
            let same = format!("the same server as {}", addresses[other]);
            let (this, other) = (&why[&addresses[this]], &why[&addresses[other]]);
            let this = this.as_ref().map(ToString::to_string);
            other.is_none() && this.is_some_and(|this| this.contains(&same))
        };
        has_no_vote(0, 2) || has_no_vote(2, 0)
    });
    servers[1].thaw();
    let guard = soon(client.lock("k").lock()).await.unwrap();
    // Nor does it get one when the lock is taken again where it is missing.
    let asked = calls(&servers[0], "acquire");
    until("it is taken again, and given back", || {
        calls(&servers[0], "acquire") > asked + 1
    });
    assert!(!guard.is_lost());
    servers[1].kill();
    let why = soon(guard.lost()).await;
    assert!(why.to_string().contains("1 of 3 servers"), "{why}");
}

/// Each client has a server that it reaches first, so each gets that one and no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_split_the_votes_are_granted_one_after_the_other() {
    let servers = [(); 3].map(|()| Server::start());
    let mut proxies = Vec::new();
    let mut clients = Vec::new();
    for near in 0..3 {
        let ways = servers.each_ref().map(|server| Proxy::to(server.address()));
        let urls = ways
            .each_ref()
            .map(|proxy| format!("redis://{}", proxy.address()));
        let builder = settings().server_timeout(2 * SECOND);
        clients.push(soon(builder.connect(urls)).await.unwrap());
        for (server, way) in ways.iter().enumerate() {
            if server != near {
                way.delay(15 * MS);
            }
        }
        proxies.push(ways);
    }
    count(&clients, 6).await;
    let asked = servers.iter().map(|server| calls(server, "acquire"));
    let asked: u64 = asked.sum();
    assert!(asked > 3 * 3 * 6, "nobody had to try again: {asked}");
    for client in &clients {
        soon(client.shutdown()).await;
    }
    for server in &servers {
        until("nothing is left", || server.run("DBSIZE") == 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_are_held_at_once_and_a_stopped_server_costs_none() {
    const LOCKS: usize = 300;
    let five = Five::start();
    // A busy machine takes its time, and must not be taken for a server that is down.
    let each = Client::builder().grace(10 * SECOND);
    let builder = settings().server_timeout(5 * SECOND).settings(each);
    let client = five.connect(builder).await;
    let names = (0..LOCKS).map(|i| format!("k{i}"));
    let taking: Vec<_> = names
        .map(|name| {
            let lock = client.lock(name);
            tokio::spawn(async move { lock.lock().await.unwrap() })
        })
        .collect();
    let mut guards = Vec::new();
    for one in taking {
        guards.push(soon(one).await.unwrap());
    }
    until("all have joined", || {
        guards.iter().all(|guard| guard.tokens().len() == 5)
    });
    five.0[0].freeze();
    sleep(1_500 * MS).await;
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    for guard in guards.drain(..LOCKS / 2) {
        soon(guard.unlock()).await.unwrap();
    }
    drop(guards);
    five.0[0].thaw();
    soon(client.shutdown()).await;
    for server in &five.0 {
        until("nothing is left", || server.run("DBSIZE") == 0);
    }
}

/// Two servers are slower than the others and grant the lock when the guard is there already; then
/// one of those that it began with does not answer any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_straight_after_the_lock_counts_servers_that_join_meanwhile() {
    let five = Five::start();
    let ways = [3, 4].map(|i| Proxy::to(five.0[i].address()));
    let mut urls = five.0.each_ref().map(url);
    for (url, way) in urls[3..].iter_mut().zip(&ways) {
        *url = format!("redis://{}", way.address());
    }
    let builder = settings().settings(by_lease().response_timeout(5 * SECOND));
    let client = soon(builder.connect(urls)).await.unwrap();
    until("it is connected to all", || {
        let guard = wait_for(client.lock("whole").lock()).unwrap();
        eventually("all have joined", || Some(guard.tokens().len()));
        guard.tokens().len() == 5
    });
    for way in &ways {
        way.delay(300 * MS);
    }
    for lease in [None, Some(60 * SECOND)] {
        let mut lock = client.lock("k");
        if let Some(lease) = lease {
            lock = lock.lease(lease);
        }
        let guard = soon(lock.lock()).await.unwrap();
        five.0[0].freeze();
        soon(guard.renew()).await.unwrap();
        five.0[0].thaw();
        soon(guard.unlock()).await.unwrap();
        five.all_free("k", 0..5);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_does_not_count_servers_that_lost_it_after_confirming() {
    let servers = [(); 3].map(|()| Server::start());
    let client = QuorumClient::builder()
        .settings(by_lease())
        .server_timeout(3 * SECOND)
        .connect(servers.each_ref().map(url))
        .await
        .unwrap();
    let lock = client.lock("k").lease(60 * SECOND);
    let guard = soon(lock.lock()).await.unwrap();
    until("all have joined", || guard.tokens().len() == 3);
    // One confirms, one confirms and is broken, one does not answer.
    servers[2].freeze();
    let asked = calls(&servers[1], "renew");
    let (renewed, ()) = tokio::join!(guard.renew(), async {
        sleep(SECOND).await;
        assert_eq!(calls(&servers[1], "renew"), asked + 1);
        assert_eq!(servers[1].run("RLOCK.BREAK k"), 1);
    });
    servers[2].thaw();
    let error = renewed.unwrap_err();
    assert!(error.to_string().contains("1 of 3"), "{error}");
    assert!(!guard.is_lost());
}
