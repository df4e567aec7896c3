//! Permits: a counting semaphore whose permits have owners.

use std::fs;
use std::time::Duration;

use rlock_tests::{Cluster, Conn, Feed, Pair, Reply, Server, aof, in_sync, slot_of, until};

use crate::read_write::fields;
use crate::replication::{end_of, restored, transaction};

/// Takes permits of `p` for the owner with a lease of 30 s.
#[track_caller]
fn takes(conn: &mut Conn, owner: &str, permits: &str) -> (i64, i64) {
    let acquire = format!("RLOCK.ACQUIRE p {owner} 30000 PERMITS {permits}");
    conn.run(acquire).held()
}

#[track_caller]
fn waits(server: &Server, owner: &str, permits: &str) -> Conn {
    server.blocked_in(&format!(
        "RLOCK.ACQUIRE p {owner} 30000 PERMITS {permits} BLOCK 0"
    ))
}

/// The value of an owner's field.
fn field(permits: i64, end: i64, token: i64) -> String {
    format!("{permits}:{end}:t{token}")
}

fn out(server: &Server) -> i64 {
    server.run("RLOCK.INFO p").get("permits").int()
}

// --- What is stored -----------------------------------------------------------------------------

#[test]
fn a_key_that_somebody_has_made_endless_does_not_end_with_a_shorter_lease() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "1 OF 3");
    takes(&mut conn, "bob", "2 OF 3");
    conn.run("PERSIST p");
    // Holders whose fields are not read may hold for longer.
    assert_eq!(conn.run("RLOCK.RELEASE p bob PERMITS 1"), 1);
    assert_eq!(conn.run("PTTL p"), -1);
    conn.run("RLOCK.RENEW p bob 50 PERMITS");
    assert_eq!(conn.run("PTTL p"), -1);
    until("bob's lease is over", || out(&server) == 1);
    // A hash that is read as a whole has an end again.
    takes(&mut conn, "carol", "1 OF 3");
    assert!(conn.run("PTTL p").int() > 0);
}

#[test]
fn permits_are_a_field_for_each_owner_and_the_longest_lease_is_the_keys() {
    let server = Server::start();
    let mut conn = server.connect();
    let (two, alices) = takes(&mut conn, "alice", "2 OF 5");
    assert_eq!(two, 2);
    let alices_end = end_of(&mut conn, "p");
    let (_, bobs) = conn.run("RLOCK.ACQUIRE p bob 60000 PERMITS 3 OF 5").held();
    assert!(bobs > alices, "a token of its own");
    let bobs_end = end_of(&mut conn, "p");
    assert!(bobs_end > alices_end + 20_000);
    let expected = [
        ("mode".to_owned(), "permits".to_owned()),
        ("alice".to_owned(), field(2, alices_end, alices)),
        ("bob".to_owned(), field(3, bobs_end, bobs)),
    ];
    assert_eq!(fields(&server, "p"), expected.into());
    let ttl = conn
        .run("RLOCK.ACQUIRE p carol 1000 PERMITS 1 OF 5")
        .refused();
    assert!((20_000..=30_000).contains(&ttl), "alice's end: {ttl}");
    let ttl = conn
        .run("RLOCK.ACQUIRE p carol 1000 PERMITS 3 OF 5")
        .refused();
    assert!((50_000..=60_000).contains(&ttl), "bob's end: {ttl}");

    assert_eq!(conn.run("RLOCK.RELEASE p bob PERMITS 2"), 1);
    assert_eq!(fields(&server, "p")["bob"], field(1, bobs_end, bobs));
    assert_eq!(conn.run("RLOCK.RELEASE p bob PERMITS 1"), 0);
    assert_eq!(end_of(&mut conn, "p"), alices_end, "the longest is alice's");
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 2"), 0);
    assert_eq!(conn.run("EXISTS p"), 0, "with the last hold the key goes");
}

#[test]
fn an_owner_has_one_hold_and_once_starts_its_lease_anew() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, token) = takes(&mut conn, "alice", "2 OF 3");
    let error = conn
        .run("RLOCK.ACQUIRE p alice 30000 PERMITS 1 OF 3")
        .error();
    assert!(error.starts_with("HELD "), "{error}");
    let again = conn.run("RLOCK.ACQUIRE p alice 90000 PERMITS 1 OF 3 ONCE");
    assert_eq!(again.held(), (2, token), "it keeps what it has");
    assert!(conn.run("PTTL p").int() > 60_000);
    assert_eq!(conn.run("RLOCK.RENEW p alice 20000 PERMITS TOKEN 1"), 0);
    let renew = format!("RLOCK.RENEW p alice 20000 PERMITS TOKEN {token}");
    assert_eq!(conn.run(renew), 1);
    assert!(conn.run("PTTL p").int() <= 20_000, "it may be shorter");
    assert_eq!(conn.run("RLOCK.RENEW p bob 20000 PERMITS"), 0);
    assert_eq!(
        conn.run("RLOCK.RELEASE p alice PERMITS 2 TOKEN 1"),
        Reply::Null
    );
    assert_eq!(conn.run("RLOCK.RELEASE p bob PERMITS 1"), Reply::Null);
    let error = conn.run("RLOCK.RELEASE p alice PERMITS 3").error();
    assert!(error.contains("whose number is 2"), "{error}");
}

#[test]
fn other_kinds_of_lock_and_permits_refuse_each_other() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "1 OF 2");
    for command in [
        "RLOCK.ACQUIRE p bob 1000",
        "RLOCK.ACQUIRE p bob 1000 READ",
        "RLOCK.RELEASE p alice",
        "RLOCK.RENEW p alice 1000 WRITE",
        "RLOCK.MACQUIRE bob 1000 2 other p",
    ] {
        let error = conn.run(command).error();
        assert!(
            error.starts_with("WRONGKIND the key holds permits"),
            "{command}: {error}"
        );
    }
    conn.take("plain", "alice");
    let error = conn.run("RLOCK.LIMIT plain 3").error();
    assert!(error.starts_with("WRONGKIND "), "{error}");
    // As Redisson's semaphore is.
    conn.run("SET semaphore 5");
    let error = conn
        .run("RLOCK.ACQUIRE semaphore bob 1000 PERMITS 1 OF 5")
        .error();
    assert!(error.starts_with("WRONGTYPE "), "{error}");
    // If no permits are out, the kind is that of the first in the queue.
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 0);
    conn.run("RLOCK.ACQUIRE p bob 1000").held();
    assert_eq!(conn.run("RLOCK.RELEASE p bob"), 0);
}

// --- The queue ----------------------------------------------------------------------------------

#[test]
fn one_release_lets_in_all_who_fit_in_their_order_and_nobody_passes() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "3 OF 3");
    let mut bob = waits(&server, "bob", "2 OF 3");
    let mut carol = waits(&server, "carol", "2 OF 3");
    let mut dave = waits(&server, "dave", "1 OF 3");
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 2);
    let nothing_free = conn.run("RLOCK.ACQUIRE p erin 1000 PERMITS 1 OF 3");
    assert_eq!(nothing_free.refused(), 0, "one fits, and is promised");
    assert_eq!(server.waiting_owners("p"), ["bob", "carol", "dave"]);
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 2"), 0);
    let (_, bobs) = bob.read().held();
    carol.expect_nothing_yet();
    dave.expect_nothing_yet();
    // A waiter that leaves from the front lets the next ones in.
    assert_eq!(conn.run("RLOCK.CANCEL p carol"), 1);
    carol.read().refused();
    let (one, daves) = dave.read().held();
    assert!(one == 1 && daves > bobs);
    assert_eq!(out(&server), 3);
}

#[test]
fn the_end_of_a_lease_lets_in_who_fits_then_and_timeouts_tell_when() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE p alice 150 PERMITS 1 OF 2").held();
    takes(&mut conn, "bob", "1 OF 2");
    let late = conn.run("RLOCK.ACQUIRE p erin 1000 PERMITS 2 OF 2 BLOCK 1");
    let ttl = late.refused();
    assert!((25_000..=30_000).contains(&ttl), "when bob's ends: {ttl}");
    let mut carol = waits(&server, "carol", "1 OF 2");
    carol.read().held();
    assert_eq!(out(&server), 2, "alice's is over, whatever the hash says");
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), Reply::Null);
    assert_eq!(conn.run("RLOCK.RENEW p alice 30000 PERMITS"), 0);
}

#[test]
fn a_waiter_that_is_gone_gives_its_grant_back() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "2 OF 2");
    let bob = waits(&server, "bob", "2 OF 2");
    let mut carol = waits(&server, "carol", "1 OF 2");
    bob.close();
    until("bob has left", || server.waiting_owners("p") == ["carol"]);
    // Granted and killed in one moment.
    let mut dave = waits(&server, "dave", "1 OF 2");
    let id = server.run("RLOCK.INFO p").get("queue").array()[0]
        .get("client-id")
        .int();
    let both = conn.pipeline(&[
        "MULTI".to_owned(),
        "RLOCK.RELEASE p alice PERMITS 2".to_owned(),
        format!("CLIENT KILL ID {id}"),
        "EXEC".to_owned(),
    ]);
    assert!(both.iter().all(|reply| !reply.is_error()), "{both:?}");
    dave.read().held();
    until("carol's grant is taken back", || out(&server) == 1);
    assert!(carol.try_read(Duration::from_secs(5)).is_err());
    assert_eq!(server.info_number("rlock_grants_taken_back"), 1);
}

#[test]
fn once_takes_a_wait_over_if_it_is_for_the_same() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    takes(&mut conn, "alice", "2 OF 2");
    let mut bob = waits(&server, "bob", "1 OF 2");
    let queue = |permits: &str| {
        format!("RLOCK.ACQUIRE p bob 30000 PERMITS {permits} QUEUE 0 SESSION s ONCE")
    };
    let error = conn.run(queue("2 OF 2")).error();
    assert!(error.starts_with("WAITING "), "{error}");
    assert_eq!(conn.run(queue("1 OF 2")).queued(), 1);
    bob.read().refused();
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 1);
    let token = conn.run("RLOCK.EVENTS s").granted("p", "bob");
    assert!(fields(&server, "p")["bob"].ends_with(&format!(":t{token}")));
}

// --- The limit ----------------------------------------------------------------------------------

#[test]
fn a_limit_that_is_set_counts_for_all_and_a_raised_one_lets_waiters_in() {
    let server = Server::start();
    let mut conn = server.connect();
    let error = conn.run("RLOCK.ACQUIRE p alice 30000 PERMITS 1").error();
    assert!(error.starts_with("NOLIMIT "), "{error}");
    assert_eq!(conn.run("RLOCK.LIMIT p 1"), 0);
    assert_eq!(conn.run("GET {p}:rlock_limit"), "1");
    assert_eq!(conn.run("TTL {p}:rlock_limit"), -1);
    takes(&mut conn, "alice", "1");
    let error = conn.run("RLOCK.ACQUIRE p bob 1000 PERMITS 2").error();
    assert!(error.ends_with("which is 1"), "{error}");
    // It overrides the limit that a caller names.
    let mut bob = waits(&server, "bob", "1 OF 9");
    let mut carol = waits(&server, "carol", "1");
    let mut dave = waits(&server, "dave", "1");
    assert_eq!(conn.run("RLOCK.LIMIT p 3"), 1);
    bob.read().held();
    carol.read().held();
    dave.expect_nothing_yet();
    assert_eq!(conn.run("RLOCK.LIMIT p 1"), 3);
    assert_eq!(out(&server), 3, "a lowered limit takes nothing away");
    assert_eq!(conn.run("RLOCK.RELEASE p bob PERMITS 1"), 0);
    dave.expect_nothing_yet();
    assert_eq!(conn.run("RLOCK.LIMIT p 0"), 1);
    let error = dave.read().error();
    assert!(error.starts_with("NOLIMIT "), "{error}");
    assert_eq!(conn.run("EXISTS {p}:rlock_limit"), 0);
    assert_eq!(conn.run("RLOCK.LIMIT p 0"), 0);
}

#[test]
fn a_waiter_whose_permits_are_above_a_lowered_limit_stays() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.LIMIT p 3");
    takes(&mut conn, "alice", "1");
    let mut bob = waits(&server, "bob", "3");
    conn.run("RLOCK.LIMIT p 2");
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 0);
    bob.expect_nothing_yet();
    // Never, as things are.
    let info = conn.run("RLOCK.INFO p");
    assert_eq!(info.get("limit"), &2);
    assert_eq!(info.get("mode"), &"permits");
    assert_eq!(info.get("queue").array()[0].get("permits"), &3);
    assert_eq!(conn.run("RLOCK.CANCEL p bob"), 1);
    assert_eq!(bob.read().refused(), -1);
}

#[test]
fn a_limit_that_somebody_else_writes_is_noticed_within_a_second() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.LIMIT p 1");
    takes(&mut conn, "alice", "1");
    let mut bob = waits(&server, "bob", "1");
    for odd in ["two", "-1", "2147483648"] {
        conn.run(format!("SET {{p}}:rlock_limit {odd}"));
        let error = conn.run("RLOCK.ACQUIRE p carol 1000 PERMITS 1").error();
        assert!(error.starts_with("NOLIMIT "), "{odd}: {error}");
        assert_eq!(conn.run("RLOCK.INFO p").get("limit"), &Reply::Null);
        conn.run("RLOCK.LIMIT p 1");
    }
    conn.run("DEL {p}:rlock_limit");
    conn.run("RPUSH {p}:rlock_limit 7");
    let error = conn.run("RLOCK.ACQUIRE p carol 1000 PERMITS 1").error();
    assert!(error.starts_with("NOLIMIT "), "{error}");
    assert_eq!(conn.run("RLOCK.LIMIT p 1"), 0, "it is written over");
    // The wait was for a limit that is gone, or has heard nothing of it.
    if server.waiting_owners("p").is_empty() {
        bob.read().error();
        bob = waits(&server, "bob", "1");
    }
    conn.run("SET {p}:rlock_limit 2");
    bob.read_within(Duration::from_secs(5)).held();
}

// --- Sessions -----------------------------------------------------------------------------------

#[test]
fn permits_of_a_session_are_given_back_with_it_and_losses_are_told() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut session = server.session_connection("s");
    let alice = "RLOCK.ACQUIRE p alice 30000 PERMITS 2 OF 3 SESSION s";
    session.run(alice).held();
    conn.run("RLOCK.ACQUIRE p bob 30000 PERMITS 1 OF 3 SESSION s")
        .held();
    let mut carol = waits(&server, "carol", "3 OF 3");
    let holders = conn.run("RLOCK.INFO p");
    let sessions = holders.get("holders").array().iter();
    assert!(sessions.clone().all(|of| *of.get("session") == "s"));
    session.close();
    let (three, _) = carol.read().held();
    assert_eq!(three, 3);
    assert_eq!(server.info_number("rlock_session_releases"), 2);

    assert_eq!(conn.run("RLOCK.RELEASE p carol PERMITS 3"), 0);
    let mut session = server.session_connection("s");
    for owner in ["expired", "broken"] {
        let lease = if owner == "expired" { 60 } else { 30_000 };
        let take = format!("RLOCK.ACQUIRE p {owner} {lease} PERMITS 1 OF 3 SESSION s");
        session.run(take).held();
    }
    let mut told = Vec::new();
    until("the end of a lease is told while others hold on", || {
        told.extend(session.run("RLOCK.EVENTS s").events());
        !told.is_empty()
    });
    assert_eq!(told.remove(0).1, "expired");
    assert_eq!(conn.run("RLOCK.BREAK p"), 1);
    let told = session.run("RLOCK.EVENTS s").events();
    assert_eq!(told[0].1, "broken");
    assert_eq!(conn.run("RLOCK.BREAK p"), 0);
    assert_eq!(server.info_number("rlock_session_holds"), 0);
}

#[test]
fn many_permits_of_one_session_end_together() {
    const HOLDERS: usize = 3_000;
    let server = Server::start();
    let mut session = server.session_connection("s");
    conn_limit(&server, HOLDERS);
    for first in (0..HOLDERS).step_by(500) {
        let takes: Vec<_> = (first..first + 500)
            .map(|owner| format!("RLOCK.ACQUIRE p o{owner} 30000 PERMITS 1 SESSION s"))
            .collect();
        let replies = session.pipeline(&takes);
        assert!(replies.iter().all(|reply| reply.held().0 == 1));
    }
    let mut all = waits(&server, "all", &HOLDERS.to_string());
    session.close();
    all.read().held();
    assert_eq!(server.run("HLEN p"), 2);
}

fn conn_limit(server: &Server, limit: usize) {
    assert_eq!(server.run(format!("RLOCK.LIMIT p {limit}")), 0);
}

// --- Others write -------------------------------------------------------------------------------

#[test]
fn odd_fields_hold_nothing_and_are_shown() {
    let server = Server::start();
    let mut conn = server.session_connection("s");
    let odd = ["", "1", "1:2:3", "0:99999999999999:t1", "-1:9:t1", "a:b:c"];
    for odd in odd {
        conn.run("FLUSHALL");
        takes(&mut conn, "alice", "1 OF 2");
        conn.cmd(&["HSET", "p", "bob", odd]);
        let info = conn.run("RLOCK.INFO p");
        assert_eq!(info.get("permits"), &1, "{odd}");
        let holders = info.get("holders").array();
        let bob = holders.iter().find(|of| *of.get("owner") == "bob");
        assert_eq!(bob.unwrap().get("permits"), &Reply::Null, "{odd}");
        assert_eq!(conn.run("RLOCK.RELEASE p bob PERMITS 1"), Reply::Null);
        for command in [
            "RLOCK.RENEW p bob 1000 PERMITS SESSION s",
            "RLOCK.ACQUIRE p carol 1 PERMITS 2 OF 2 BLOCK 1",
            "RLOCK.ACQUIRE p bob 30000 PERMITS 1 OF 2 ONCE",
        ] {
            conn.run(command);
        }
        assert!(fields(&server, "p")["bob"].starts_with("1:"), "{odd}");
        assert_eq!(conn.run("RLOCK.RELEASE p bob PERMITS 1"), 0);
        conn.cmd(&["HSET", "p", "bob", odd]);
        assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 0);
        assert_eq!(conn.run("EXISTS p"), 0, "with the last live hold it goes");
    }
    // Only such fields: nobody has any, and every kind can be had.
    conn.pipeline(&["HSET p mode permits bob odd", "PEXPIRE p 30000"]);
    conn.run("RLOCK.ACQUIRE p carol 30000").held();
    assert_eq!(conn.run("HEXISTS p bob"), 0);
}

#[test]
fn a_key_that_others_take_away_frees_all_its_permits() {
    let server = Server::start();
    let mut conn = server.connect();
    for command in ["DEL p", "RENAME p q", "FLUSHALL", "PEXPIRE p 20"] {
        takes(&mut conn, "alice", "1 OF 1");
        let mut bob = waits(&server, "bob", "1 OF 1");
        conn.run(command);
        bob.read().held();
        conn.run("DEL p q");
    }
    // Renamed, it moves with its holders.
    takes(&mut conn, "alice", "1 OF 1");
    conn.run("RENAME p q");
    conn.run("RLOCK.ACQUIRE q bob 1000 PERMITS 1 OF 1")
        .refused();
    assert_eq!(conn.run("RLOCK.RELEASE q alice PERMITS 1"), 0);
}

#[test]
fn holders_that_never_release_leave_no_fields_for_long() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "stays", "1 OF 1000");
    for owner in 0..200 {
        conn.run(format!("RLOCK.ACQUIRE p o{owner} 1 PERMITS 1 OF 1000"))
            .held();
    }
    until("they are taken out", || {
        let last = conn.run("RLOCK.ACQUIRE p last 1 PERMITS 1 OF 1000 ONCE");
        last.held();
        server.run("HLEN p").int() < 25
    });
}

// --- Replication --------------------------------------------------------------------------------

#[test]
fn permits_reach_replicas_as_plain_commands() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    let (_, token) = takes(&mut conn, "alice", "2 OF 2");
    let end = end_of(&mut conn, "p");
    let fields = format!("mode permits alice {}", field(2, end, token));
    assert_eq!(feed.news(), [restored("p", &fields, end)]);
    conn.run("RLOCK.ACQUIRE p bob 1000 PERMITS 1 OF 2")
        .refused();
    conn.run("RLOCK.ACQUIRE p bob 1000 PERMITS 3 OF 2");
    assert!(feed.news().is_empty(), "what is refused is not replicated");
    let mut bob = waits(&server, "bob", "1 OF 2");
    conn.run("RLOCK.LIMIT p 3");
    let (_, bobs) = bob.read().held();
    let bobs_end = end_of(&mut conn, "p");
    let mut granted = vec![
        "SET {p}:rlock_limit 3".to_owned(),
        format!("HSET p bob {}", field(1, bobs_end, bobs)),
    ];
    if bobs_end != end {
        granted.push(format!("PEXPIREAT p {bobs_end}"));
    }
    assert_eq!(feed.news(), transaction(granted));
    conn.run("RLOCK.RELEASE p alice PERMITS 2");
    assert_eq!(feed.news(), ["HDEL p alice"]);
    let mut all = waits(&server, "all", "3");
    conn.run("RLOCK.RELEASE p bob PERMITS 1");
    let (_, alls) = all.read().held();
    let end = end_of(&mut conn, "p");
    let fields = format!("mode permits all {}", field(3, end, alls));
    // The former hash is deleted by one decision, and the next one made by another.
    let handed_over = ["DEL p".to_owned(), restored("p", &fields, end)];
    assert_eq!(feed.news(), transaction(handed_over));
    conn.run("RLOCK.LIMIT p 0");
    assert_eq!(feed.news(), ["DEL {p}:rlock_limit"]);
}

#[test]
fn permits_and_their_limit_survive_a_restart_and_a_failover() {
    let pair = Pair::start();
    let mut conn = pair.primary.connect();
    conn.run("RLOCK.LIMIT p 3");
    takes(&mut conn, "alice", "2");
    conn.run("RLOCK.ACQUIRE p gone 1 PERMITS 1").held();
    in_sync(&pair.primary, &pair.replica);
    assert_eq!(pair.replica.run("REPLICAOF NO ONE"), "OK");
    let mut conn = pair.replica.connect();
    let ttl = conn.run("RLOCK.ACQUIRE p bob 1000 PERMITS 2").refused();
    assert!(ttl > 20_000, "{ttl}");
    until("the short lease is over here too", || {
        out(&pair.replica) == 2
    });
    takes(&mut conn, "carol", "1");
    assert_eq!(conn.run("RLOCK.RENEW p alice 30000 PERMITS"), 1);
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 2"), 0);

    let mut server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always")
        .start();
    let mut conn = server.connect();
    conn.run("RLOCK.LIMIT p 3");
    let (_, token) = takes(&mut conn, "alice", "2");
    assert!(aof(&server).contains(&"SET {p}:rlock_limit 3".to_owned()));
    server.kill();
    server.restart();
    let mut conn = server.connect();
    assert_eq!(conn.run("RLOCK.INFO p").get("permits"), &2);
    let (_, later) = takes(&mut conn, "bob", "1");
    assert!(later > token);
    conn.run("RLOCK.ACQUIRE p carol 1000 PERMITS 1").refused();
    server.restart_without_module();
    assert_eq!(server.run("HLEN p"), 3, "it is read without the module");
}

// --- A cluster ----------------------------------------------------------------------------------

#[test]
fn in_a_cluster_a_limit_needs_a_name_whose_slot_its_key_shares() {
    let cluster = Cluster::start();
    let mut conn = cluster.first.connect();
    for name in ["a{b", "{}x", "a}b"] {
        for command in [
            &["RLOCK.LIMIT", name, "3"][..],
            &["RLOCK.ACQUIRE", name, "o", "1000", "PERMITS", "1"],
        ] {
            let error = conn.cmd(command).error();
            assert!(
                error.starts_with("CROSSSLOT key cannot have a limit"),
                "{error}"
            );
        }
        let with_limit = [
            "RLOCK.ACQUIRE",
            name,
            "o",
            "1000",
            "PERMITS",
            "1",
            "OF",
            "1",
        ];
        conn.cmd(&with_limit).held();
        assert_eq!(conn.cmd(&["RLOCK.RELEASE", name, "o", "PERMITS", "1"]), 0);
    }
    assert_eq!(conn.run("RLOCK.LIMIT {a}b 3"), 0);
    assert_eq!(conn.run("RLOCK.LIMIT p 1"), 0);
    takes(&mut conn, "alice", "1");
    let mut bob = waits(&cluster.first, "bob", "1");
    // While the limit may be at the other node, nobody is measured by it.
    cluster.open_slot_of("p");
    for command in [
        "RLOCK.ACQUIRE p carol 1000 PERMITS 1 OF 9",
        "RLOCK.LIMIT p 9",
    ] {
        let error = conn.run(command).error();
        assert!(error.starts_with("TRYAGAIN "), "{command}: {error}");
    }
    assert_eq!(conn.run("RLOCK.RENEW p alice 30000 PERMITS"), 1);
    cluster.migrate("{p}:rlock_limit");
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 0);
    let moved = format!("MOVED {} ", slot_of(&cluster.first, "p"));
    let error = bob.read_within(Duration::from_secs(5)).error();
    assert!(error.starts_with(&moved), "not granted: {error}");
    cluster.close_slot_of("p");
    let mut conn = cluster.second.connect();
    takes(&mut conn, "bob", "1");
    conn.run("RLOCK.ACQUIRE p carol 1000 PERMITS 1").refused();
}

#[test]
fn waits_for_permits_are_no_part_of_the_search_for_a_deadlock() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "1 OF 1");
    conn.take("k", "bob");
    let mut bob = waits(&server, "bob", "1 OF 1");
    let mut alice = server.wait_in_queue("k", "alice");
    assert_eq!(conn.run("RLOCK.RELEASE p alice PERMITS 1"), 0);
    bob.read().held();
    alice.expect_nothing_yet();
    conn.let_go("k", "bob");
    alice.read().held();
}

// --- What an attack has found -------------------------------------------------------------------

/// A wait of m for several locks is first at p, and ends when p becomes the permits of q. Returns
/// the session's events then, if o has queued behind it with this command.
fn told_behind_several(conn: &mut Conn, session: &mut Conn, queue: &str) -> Vec<(String, Reply)> {
    conn.take("p", "a");
    conn.run("RLOCK.MACQUIRE m 30000 2 p j QUEUE 0 SESSION s")
        .queued();
    let replies = conn.pipeline(&["RENAME q p", queue]);
    assert_eq!(replies[1].queued(), 2);
    let mut told = Vec::new();
    until("the wait for several is told", || {
        told.extend(session.run("RLOCK.EVENTS s").events());
        !told.is_empty()
    });
    told
}

#[test]
fn who_waits_behind_one_for_several_locks_is_measured_by_the_limit_that_is_set() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut session = server.session_connection("s");
    conn.run("RLOCK.LIMIT p 1");
    conn.run("RLOCK.ACQUIRE q holder 30000 PERMITS 1 OF 1")
        .held();
    let queue = "RLOCK.ACQUIRE p o 30000 PERMITS 1 QUEUE 0 SESSION s";
    let told = told_behind_several(&mut conn, &mut session, queue);
    assert_eq!(told.len(), 1, "the limit is set all the time: {told:?}");
    assert_eq!(server.waiting_owners("p"), ["o"]);
}

#[test]
fn who_waits_behind_one_for_several_locks_is_not_told_that_it_holds_what_the_other_does() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut session = server.session_connection("s");
    conn.run("RLOCK.ACQUIRE q m 30000 PERMITS 1 OF 1").held();
    let queue = "RLOCK.ACQUIRE p o 30000 PERMITS 1 OF 1 QUEUE 0 SESSION s";
    let told = told_behind_several(&mut conn, &mut session, queue);
    assert_eq!(told.len(), 1, "o holds nothing: {told:?}");
}

/// No owner can be called so, and BREAK leaves such fields out: they keep no permits.
#[test]
fn fields_of_the_lock_itself_keep_no_permits() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("HSET p mode permits fence 2:9999999999999:t5");
    takes(&mut conn, "alice", "2 OF 2");
    assert_eq!(out(&server), 2);
    assert_eq!(conn.run("RLOCK.BREAK p"), 1);
}

/// Another program may have written anything where the limit is kept. Copied at each look, a
/// large value would stop the server.
#[test]
fn a_large_value_where_the_limit_is_kept_is_no_limit_and_is_not_copied() {
    const SIZE_KIB: u64 = 64 * 1024;
    let server = Server::start();
    let mut conn = server.connect();
    conn.run(format!("SETRANGE {{p}}:rlock_limit {} x", SIZE_KIB * 1024));
    let most = || most_resident_kib(server.process_id());
    let before = most();
    takes(&mut conn, "alice", "1 OF 2");
    let error = conn.run("RLOCK.ACQUIRE p bob 30000 PERMITS 1").error();
    assert!(error.starts_with("NOLIMIT "), "{error}");
    let grown = most() - before;
    assert!(grown < SIZE_KIB / 2, "{grown} KiB");
    assert_eq!(conn.run("RLOCK.LIMIT p 3"), 0);
    takes(&mut conn, "bob", "1");
}

/// The most memory that a process has ever had.
fn most_resident_kib(process_id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process_id}/status")).unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let most = most.unwrap().split_whitespace().next().unwrap();
    most.parse().unwrap()
}

/// The server stores a module's string itself. If it were one that the module goes on using, a
/// thread that frees the keys would count its users at the same time as the module does.
#[test]
fn a_stored_limit_shares_its_string_with_nobody() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.LIMIT p 1");
    assert_eq!(conn.run("OBJECT REFCOUNT {p}:rlock_limit").int(), 1);
    conn.run("RLOCK.LIMIT p 7");
    assert_eq!(conn.run("OBJECT REFCOUNT {p}:rlock_limit").int(), 1);
}
