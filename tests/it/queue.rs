//! The line: first come, first served; who leaves it holds nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply, Server, Version, on_time, patience, until};

#[test]
fn waiters_are_served_in_the_order_in_which_they_came() {
    let server = Server::start();
    let mut last = server.connect();
    let mut token = last.take("k", "first");
    let owners: Vec<_> = (0..20).map(|i| format!("owner-{i}")).collect();
    let line: Vec<_> = owners
        .iter()
        .map(|owner| server.wait_in_queue("k", owner))
        .collect();
    assert_eq!(server.waiting_owners("k"), owners);
    let mut holder = "first".to_owned();
    for (owner, mut conn) in owners.into_iter().zip(line) {
        assert_eq!(last.let_go("k", &holder), 0);
        let (count, next) = conn.read().held();
        assert_eq!(count, 1);
        assert!(next > token, "tokens grow along the queue");
        (last, holder, token) = (conn, owner, next);
    }
    assert_eq!(last.let_go("k", &holder), 0);
    assert_eq!(server.holder("k"), None);
}

#[test]
fn the_release_itself_hands_over_and_a_newcomer_in_the_same_turn_is_behind() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let replies = alice.pipeline(&[
        "RLOCK.RELEASE k alice",
        "HKEYS k",
        "RLOCK.ACQUIRE k alice 30000",
        "RLOCK.ACQUIRE k carol 30000",
    ]);
    assert_eq!(replies[0], 0);
    assert!(
        replies[1].texts().contains(&"bob".to_owned()),
        "no free moment: {:?}",
        replies[1]
    );
    assert!(replies[2].refused() > 20_000, "the lease is bob's");
    assert!(replies[3].refused() > 20_000);
    bob.read().held();
}

#[test]
fn a_newcomer_does_not_overtake_in_the_instant_the_lease_ends() {
    let server = Server::start();
    let mut conn = server.connect();
    for round in 0..20 {
        let name = format!("k{round}");
        conn.take(&name, "alice");
        let mut bob = server.wait_in_queue(&name, "bob");
        // The lease ends while the server sleeps; carol asks before any timer can have run.
        let lease = format!("RLOCK.RENEW {name} alice 10");
        let carol = format!("RLOCK.ACQUIRE {name} carol 30000");
        let replies = conn.pipeline(&[&lease, "DEBUG SLEEP 0.02", &carol, &carol]);
        assert!(replies[2].refused() >= 0);
        assert!(replies[3].refused() >= 0);
        bob.read().held();
        assert_eq!(server.holder(&name).as_deref(), Some("bob"));
    }
}

#[test]
fn a_lock_free_but_promised_answers_zero() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let replies = conn.pipeline(&["DEL k", "RLOCK.ACQUIRE k carol 30000"]);
    let left = replies[1].refused();
    assert!(
        left == 0 || left > 20_000,
        "promised to bob, or bob's already: {left}"
    );
    bob.read().held();
}

#[test]
fn a_holder_enters_again_past_the_queue() {
    let server = Server::start();
    let mut alice = server.connect();
    let token = alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    assert_eq!(alice.run("RLOCK.ACQUIRE k alice 30000").held(), (2, token));
    assert_eq!(
        alice.run("RLOCK.ACQUIRE k alice 30000 BLOCK 0").held(),
        (3, token)
    );
    for left in [2, 1] {
        assert_eq!(alice.let_go("k", "alice"), left);
        bob.expect_nothing_yet();
    }
    assert_eq!(alice.let_go("k", "alice"), 0);
    bob.read().held();
}

/// Otherwise a granted owner would wait behind others for its own lock, and a circle that its
/// second wait closes could not be seen before.
#[test]
fn an_owner_stands_in_a_queue_once() {
    let server = Server::start();
    let mut alice = server.connect();
    let _life = server.session_connection("s");
    alice.take("k", "alice");
    alice.take("m", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    for second in [
        "RLOCK.ACQUIRE k bob 30000 BLOCK 0",
        "RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION s",
        "RLOCK.MACQUIRE bob 30000 2 m k BLOCK 0",
        "RLOCK.MACQUIRE bob 30000 1 k BLOCK 0 ONCE",
    ] {
        let error = alice.run(second).error();
        assert!(error.starts_with("WAITING "), "{second}: {error}");
    }
    assert!(alice.run("RLOCK.ACQUIRE k bob 30000").refused() > 20_000);
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    assert!(
        server.waiting_owners("m").is_empty(),
        "what is refused waits nowhere"
    );
    // Another connection takes the wait over.
    let mut again = server.blocked_in("RLOCK.ACQUIRE k bob 30000 BLOCK 0 ONCE");
    bob.read().refused();
    alice.let_go("k", "alice");
    assert_eq!(again.read().held().0, 1);
    // An owner enters its own lock again, without waiting.
    assert_eq!(alice.run("RLOCK.ACQUIRE k bob 30000 BLOCK 0").held().0, 2);
}

#[test]
fn an_owner_stands_in_the_queue_of_a_read_write_lock_once() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.run("RLOCK.ACQUIRE k alice 30000 WRITE").held();
    for (first, second, code) in [
        ("READ", "READ", "WAITING "),
        ("WRITE", "WRITE", "WAITING "),
        ("WRITE", "READ", "WAITING "),
        ("READ", "WRITE", "DEADLOCK "),
        ("READ", "WRITE ONCE", "DEADLOCK "),
    ] {
        let mut bob = server.blocked_in(&format!("RLOCK.ACQUIRE k bob 30000 {first} BLOCK 0"));
        let error = alice
            .run(format!("RLOCK.ACQUIRE k bob 30000 {second} BLOCK 0"))
            .error();
        assert!(error.starts_with(code), "{first}, {second}: {error}");
        assert_eq!(alice.run("RLOCK.CANCEL k bob"), 1);
        bob.read().refused();
    }
}

#[test]
fn once_takes_over_the_place_in_the_queue() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut old = server.wait_in_queue("k", "bob");
    let mut carol = server.wait_in_queue("k", "carol");
    let mut new = server.blocked_in("RLOCK.ACQUIRE k bob 30000 BLOCK 0 ONCE");
    assert!(old.read().refused() > 20_000, "the old connection is told");
    assert_eq!(
        server.waiting_owners("k"),
        ["bob", "carol"],
        "the place is kept"
    );
    alice.let_go("k", "alice");
    assert_eq!(new.read().held().0, 1);
    carol.expect_nothing_yet();
    assert_eq!(alice.let_go("k", "bob"), 0);
    carol.read().held();
}

#[test]
fn once_without_blocking_leaves_the_place_in_the_queue_alone() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    assert!(alice.run("RLOCK.ACQUIRE k bob 30000 ONCE").refused() > 20_000);
    bob.expect_nothing_yet();
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    alice.let_go("k", "alice");
    bob.read().held();
}

#[test]
fn the_lease_of_a_place_taken_over_is_the_new_one() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut old = server.wait_in_queue("k", "bob");
    let mut new = server.blocked_in("RLOCK.ACQUIRE k bob 90000 BLOCK 0 ONCE");
    old.read().refused();
    alice.let_go("k", "alice");
    new.read().held();
    assert!(server.run("PTTL k").int() > 60_000);
}

#[test]
fn a_wait_ends_neither_early_nor_much_too_late() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 600000").held();
    // The server's own timeouts wait for its tick; a module's timer does not.
    for wait_ms in [1, 10, 50, 100] {
        on_time("the end", &server, Duration::from_millis(10), |_| {
            let begun = Instant::now();
            conn.run(format!("RLOCK.ACQUIRE k bob 1000 BLOCK {wait_ms}"))
                .refused();
            let (took, asked) = (begun.elapsed(), Duration::from_millis(wait_ms));
            assert!(took >= asked, "{took:?} is less than {asked:?}");
            took.saturating_sub(asked)
        });
    }
    assert_eq!(server.waiting_owners("k").len(), 0);
}

#[test]
fn a_waiter_that_timed_out_is_passed_over() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.connect();
    bob.send("RLOCK.ACQUIRE k bob 30000 BLOCK 100");
    bob.settle();
    let mut carol = server.wait_in_queue("k", "carol");
    bob.read().refused();
    alice.let_go("k", "alice");
    carol.read().held();
    assert_eq!(server.holder("k").as_deref(), Some("carol"));
}

#[test]
fn a_timeout_in_the_turn_of_the_grant_tells_the_truth() {
    let server = Server::start();
    let mut alice = server.connect();
    for round in 0..20 {
        let name = format!("k{round}");
        alice.take(&name, "alice");
        let mut bob = server.connect();
        bob.send(format!("RLOCK.ACQUIRE {name} bob 30000 BLOCK 50"));
        bob.settle();
        // Bob's wait ends while the server sleeps, and then comes the release.
        let replies = alice.pipeline(&[
            "DEBUG SLEEP 0.06".to_owned(),
            format!("RLOCK.RELEASE {name} alice"),
            format!("RLOCK.RENEW {name} bob 20000"),
        ]);
        assert_eq!(replies[1], 0);
        let told = bob.read();
        let has_it = server.holder(&name).as_deref() == Some("bob");
        assert_eq!(told.ints()[0] == 1, has_it, "{told:?}");
    }
}

#[test]
fn a_full_queue_refuses_more() {
    let server = Server::builder()
        .config("rlock.max-waiters-per-lock 2")
        .start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    alice.take("other", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let _carol = server.wait_in_queue("k", "carol");
    let error = alice.run("RLOCK.ACQUIRE k dave 1000 BLOCK 0").error();
    assert!(
        error.contains("max-waiters-per-lock") && error.contains('2'),
        "{error}"
    );
    assert!(
        alice.run("RLOCK.ACQUIRE k dave 1000").refused() > 20_000,
        "without waiting: as ever"
    );
    let _elsewhere = server.wait_in_queue("other", "dave");
    let mut again = server.blocked_in("RLOCK.ACQUIRE k bob 30000 BLOCK 0 ONCE");
    bob.read().refused(); // a place taken over is no new place
    alice.let_go("k", "alice");
    again.read().held();
    let _dave = server.wait_in_queue("k", "dave");
}

#[test]
fn inside_multi_and_scripts_a_wait_is_answered_at_once() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    let acquire = "RLOCK.ACQUIRE k bob 30000 BLOCK 0";
    let replies = conn.pipeline(&[
        "MULTI",
        acquire,
        "RLOCK.ACQUIRE free bob 30000 BLOCK 0",
        "EXEC",
    ]);
    let results = replies[3].array();
    assert!(results[0].refused() > 20_000);
    assert_eq!(results[1].held().0, 1, "what is free is taken");

    let script = "return redis.call('RLOCK.ACQUIRE', KEYS[1], 'bob', '30000', 'BLOCK', '0')";
    assert!(conn.cmd(&["EVAL", script, "1", "k"]).refused() > 20_000);
    assert_eq!(conn.cmd(&["EVAL", script, "1", "free2"]).held().0, 1);

    let library = format!(
        "#!lua name=waiting\nredis.register_function('wait', function(KEYS, ARGV) {script} end)"
    );
    assert_eq!(conn.cmd(&["FUNCTION", "LOAD", &library]), "waiting");
    assert!(conn.run("FCALL wait 1 k").refused() > 20_000);
    assert_eq!(conn.run("FCALL wait 1 free3").held().0, 1);

    assert_eq!(server.waiting_owners("k").len(), 0, "nobody waits");
    assert_eq!(conn.let_go("k", "alice"), 0);
    assert_eq!(
        server.holder("k"),
        None,
        "nobody was granted behind its back"
    );
}

#[test]
fn a_release_inside_multi_and_scripts_hands_over() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let mut carol = server.wait_in_queue("k", "carol");
    let replies = alice.pipeline(&["MULTI", "RLOCK.RELEASE k alice", "HKEYS k", "EXEC"]);
    assert!(replies[3].array()[1].texts().contains(&"bob".to_owned()));
    bob.read().held();
    let script = "return redis.call('RLOCK.RELEASE', KEYS[1], 'bob')";
    assert_eq!(alice.cmd(&["EVAL", script, "1", "k"]), 0);
    carol.read().held();
}

#[test]
fn a_wait_through_another_modules_call_is_answered_at_once() {
    let server = Server::start();
    server.load_c_module("caller");
    let mut conn = server.connect();
    conn.take("k", "alice");
    let reply = conn.run("CALLER.CALL RLOCK.ACQUIRE k bob 30000 BLOCK 0");
    assert!(reply.refused() > 20_000);
    assert_eq!(
        conn.run("CALLER.CALL RLOCK.ACQUIRE free bob 30000 BLOCK 0")
            .held()
            .0,
        1
    );
    assert_eq!(server.waiting_owners("k").len(), 0, "nobody waits");
    let mut carol = server.wait_in_queue("k", "carol");
    assert_eq!(conn.run("CALLER.CALL RLOCK.RELEASE k alice"), 0);
    carol.read().held();
}

#[test]
fn a_killed_or_disconnected_waiter_is_passed_over() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let killed = server.wait_in_queue("k", "killed");
    let gone = server.wait_in_queue("k", "gone");
    let mut carol = server.wait_in_queue("k", "carol");
    let id = server.run("RLOCK.INFO k").get("queue").array()[0]
        .get("client-id")
        .int();
    assert_eq!(alice.run(format!("CLIENT KILL ID {id}")), 1);
    drop(killed);
    gone.close();
    until("both have left the queue", || {
        server.waiting_owners("k") == ["carol"]
    });
    alice.let_go("k", "alice");
    carol.read().held();
}

/// A waiter is killed in the turn in which it is granted, by a command right behind the release.
#[test]
fn a_grant_to_a_waiter_killed_in_the_same_turn_goes_to_the_next() {
    for transaction in [false, true] {
        let server = Server::start();
        let mut alice = server.connect();
        alice.take("k", "alice");
        let (mut bob, bobs_id) = waiter_with_id(&server, "k", "bob");
        let mut carol = server.wait_in_queue("k", "carol");
        let (release, kill) = ("RLOCK.RELEASE k alice", format!("CLIENT KILL ID {bobs_id}"));
        if transaction {
            alice.pipeline(&["MULTI", release, &kill, "EXEC"]);
        } else {
            alice.pipeline(&[release, &kill]);
        }
        bob.read_to_end();
        assert_eq!(carol.read().held().0, 1);
        assert_eq!(server.holder("k").as_deref(), Some("carol"));
    }
}

#[test]
fn a_grant_to_the_last_waiter_killed_in_the_same_turn_frees_the_lock() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let (_bob, id) = waiter_with_id(&server, "k", "bob");
    alice.pipeline(&["RLOCK.RELEASE k alice", &format!("CLIENT KILL ID {id}")]);
    until("the undelivered hold is gone", || {
        server.holder("k").is_none()
    });
    alice.take("k", "alice");
}

#[test]
fn client_unblock_ends_a_wait_where_that_is_safe() {
    for how in ["TIMEOUT", "ERROR"] {
        let server = Server::start();
        let mut alice = server.connect();
        alice.take("k", "alice");
        let (mut bob, id) = waiter_with_id(&server, "k", "bob");
        let unblocked = alice.run(format!("CLIENT UNBLOCK {id} {how}"));
        if !Version::at_hand().can_unblock_waiters() {
            assert_eq!(unblocked, 0, "on this server a grant could be lost by it");
            bob.expect_nothing_yet();
            continue;
        }
        assert_eq!(unblocked, 1);
        let told = bob.read();
        match how {
            "TIMEOUT" => assert!(told.refused() > 20_000),
            _ => assert!(told.error().starts_with("UNBLOCKED "), "{told:?}"),
        }
        assert_eq!(alice.let_go("k", "alice"), 0);
        assert_eq!(server.holder("k"), None);
        assert_eq!(bob.run("PING"), "PONG", "the connection is as good as new");
    }
}

#[test]
fn client_unblock_in_the_turn_of_the_grant_tells_the_truth() {
    for how in ["TIMEOUT", "ERROR"] {
        let server = Server::start();
        let mut alice = server.connect();
        alice.take("k", "alice");
        let (mut bob, id) = waiter_with_id(&server, "k", "bob");
        let mut carol = server.wait_in_queue("k", "carol");
        let unblock = format!("CLIENT UNBLOCK {id} {how}");
        alice.pipeline(&["RLOCK.RELEASE k alice", &unblock]);
        let told = bob.read();
        if matches!(&told, Reply::Array(reply) if reply[0] == 1) {
            assert_eq!(server.holder("k").as_deref(), Some("bob"), "{how}");
            carol.expect_nothing_yet();
            assert_eq!(alice.let_go("k", "bob"), 0);
        }
        carol.read().held();
        assert_eq!(server.holder("k").as_deref(), Some("carol"), "{how}");
    }
}

/// The waiter's socket is closed and the release arrives while the server does not run: it finds
/// both in one turn, in either order.
#[test]
fn a_socket_closed_in_the_turn_of_the_grant_keeps_nothing() {
    for release_first in [false, true] {
        let server = Server::start();
        let mut alice = server.connect();
        alice.take("k", "alice");
        let bob = server.wait_in_queue("k", "bob");
        let mut carol = server.wait_in_queue("k", "carol");
        server.freeze();
        if release_first {
            alice.send("RLOCK.RELEASE k alice");
            bob.close();
        } else {
            bob.close();
            alice.send("RLOCK.RELEASE k alice");
        }
        server.thaw();
        assert_eq!(alice.read(), 0);
        carol.read().held();
        assert_eq!(server.holder("k").as_deref(), Some("carol"));
    }
}

#[test]
fn commands_pipelined_behind_a_wait_run_after_it() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.connect();
    bob.send_all(&[
        "RLOCK.ACQUIRE k bob 30000 BLOCK 0",
        "RLOCK.RELEASE k bob",
        "PING",
    ]);
    bob.expect_nothing_yet();
    alice.let_go("k", "alice");
    bob.read().held();
    assert_eq!(bob.read(), 0);
    assert_eq!(bob.read(), "PONG");
}

#[test]
fn a_waiter_that_hangs_up_many_times_leaves_no_trace() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    for _ in 0..50 {
        server.connect().send("RLOCK.ACQUIRE k bob 30000 BLOCK 0");
    }
    until("the queue is empty", || {
        server.waiting_owners("k").is_empty()
    });
    let blocked = || server.info_number("blocked_clients");
    until("nobody is blocked", || blocked() == 0);
    assert_eq!(alice.let_go("k", "alice"), 0);
    assert_eq!(server.holder("k"), None);
}

/// A client that is killed in the very turn of its grant does not know whether it holds the lock,
/// and gives it back in case it does.
#[test]
fn one_owner_works_at_a_time_whichever_client_is_killed() {
    let server = Server::start();
    work_while_killed(&server, 12, 500, lock_and_work);
}

/// A number of clients play rounds, while another kills waiters, until there have been enough
/// grants and kills. A round may push the token under which it worked.
pub(super) fn work_while_killed(
    server: &Server,
    clients: usize,
    many: usize,
    round: impl Fn(&Server, usize, &Mutex<Vec<i64>>) + Sync,
) {
    let tokens = Mutex::new(Vec::new());
    let (working, over, mut killed) = (AtomicUsize::new(clients), AtomicBool::new(false), 0);
    thread::scope(|scope| {
        for number in 0..clients {
            let (round, tokens, working, over) = (&round, &tokens, &working, &over);
            scope.spawn(move || {
                let _one_less = OneLess(working);
                while !over.load(Ordering::Relaxed) {
                    round(server, number, tokens);
                }
            });
        }
        let mut killer = server.connect();
        let deadline = Instant::now() + patience(Duration::from_secs(60));
        let few_grants = || tokens.lock().is_ok_and(|tokens| tokens.len() < many);
        let nobody_failed = || working.load(Ordering::Relaxed) == clients;
        while (few_grants() || killed < many) && nobody_failed() && Instant::now() < deadline {
            let list = killer.run("CLIENT LIST TYPE normal").text();
            let waiting = list.lines().rfind(|line| line.contains("flags=b"));
            let victim = waiting.and_then(|line| line.split(['=', ' ']).nth(1));
            // It may have disconnected by now; then no client is killed.
            let mut kill = |id| killer.run(format!("CLIENT KILL ID {id}"));
            killed += usize::from(victim.is_some_and(|id| kill(id) == 1));
        }
        over.store(true, Ordering::Relaxed);
    });
    let tokens = tokens.into_inner().unwrap();
    assert!(killed >= many, "{killed} killed");
    assert!(tokens.len() >= many, "{} granted", tokens.len());
    assert!(
        tokens.is_sorted_by(|one, next| one < next),
        "tokens grow from grant to grant"
    );
    until("the lock is free", || server.holder("k").is_none());
    assert!(server.waiting_owners("k").is_empty());
    assert_eq!(server.run("GET inside"), "0");
}

/// One round of a client. It waits on a connection that may be killed, and works on another.
fn lock_and_work(server: &Server, number: usize, tokens: &Mutex<Vec<i64>>) {
    let mut work = server.connect();
    let acquire = format!("RLOCK.ACQUIRE k owner-{number} 60000 BLOCK {}", 20 + number);
    if let Ok(reply) = server.connect().try_run(&acquire) {
        let [count, token] = reply.ints()[..] else {
            panic!("{reply:?}")
        };
        if count > 0 {
            assert_eq!(work.run("INCR inside"), 1, "somebody else is inside");
            tokens.lock().unwrap().push(token);
            assert_eq!(work.run("DECR inside"), 0);
        }
    }
    work.run(format!("RLOCK.RELEASE k owner-{number}"));
}

/// Counts its client out, also when that fails.
pub(super) struct OneLess<'a>(pub(super) &'a AtomicUsize);

impl Drop for OneLess<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn fifty_connections_need_one_attempt_a_grant_and_win_alike() {
    const CONNECTIONS: usize = 50;
    const ROUNDS: usize = 10_000;
    let server = Server::start();
    let granted = AtomicUsize::new(0);
    // Nobody begins before all wait: who came first would win alone for a while.
    let mut referee = server.connect();
    referee.take("k", "referee");
    let wins: Vec<usize> = thread::scope(|scope| {
        let fighters = (0..CONNECTIONS).map(|number| {
            let (server, granted) = (&server, &granted);
            scope.spawn(move || fight(server, number, granted, ROUNDS))
        });
        let fighters: Vec<_> = fighters.collect();
        until("all are in the queue", || {
            server.waiting_owners("k").len() == CONNECTIONS
        });
        referee.let_go("k", "referee");
        let wins = fighters.into_iter().map(|fighter| fighter.join().unwrap());
        wins.collect()
    });
    let (least, most) = (*wins.iter().min().unwrap(), *wins.iter().max().unwrap());
    assert!(
        most - least <= most.div_ceil(20),
        "wins differ by more than 5 %: {wins:?}"
    );
    let stats = server.info("cmdstat_rlock.acquire").unwrap();
    let attempts = wins.iter().sum::<usize>() + 1; // the referee's
    assert!(
        stats.starts_with(&format!("calls={attempts},")),
        "{attempts} grants, {stats}"
    );
}

/// Takes the lock and gives it back until all have had `rounds` grants together; returns how many
/// were ours. A client that gives it back is in the queue again in the same turn of the server: one
/// that queued later would miss some grants.
fn fight(server: &Server, number: usize, granted: &AtomicUsize, rounds: usize) -> usize {
    let mut conn = server.connect();
    let acquire = format!("RLOCK.ACQUIRE k owner-{number} 30000 BLOCK 0");
    let release = format!("RLOCK.RELEASE k owner-{number}");
    let mut wins = 0;
    conn.send(&acquire);
    loop {
        assert_eq!(conn.read().held().0, 1);
        wins += 1;
        if granted.fetch_add(1, Ordering::Relaxed) >= rounds {
            assert_eq!(conn.run(&release), 0);
            return wins;
        }
        conn.send_all(&[&release, &acquire]);
        assert_eq!(conn.read(), 0);
    }
}

/// [`Server::wait_in_queue`], and the server's number for the connection.
fn waiter_with_id(server: &Server, name: &str, owner: &str) -> (Conn, i64) {
    let conn = server.wait_in_queue(name, owner);
    let info = server.run(format!("RLOCK.INFO {name}"));
    let last = info.get("queue").array().last().unwrap().clone();
    assert_eq!(last.get("owner"), &owner);
    (conn, last.get("client-id").int())
}
