//! Several locks at once: all or none, one wait in all their queues.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rlock_tests::{Conn, Feed, Reply, Server, Version, on_time, until};

use crate::events::{ONE_HOUR, next_events, no_events};
use crate::replication::{end_of, grant, transaction, unlock_message};

/// Takes the locks for the owner with a lease of 30 s.
#[track_caller]
fn takes(conn: &mut Conn, owner: &str, names: &str) -> (i64, i64) {
    conn.run(macquire(owner, names)).held()
}

fn macquire(owner: &str, names: &str) -> String {
    let count = names.split(' ').count();
    format!("RLOCK.MACQUIRE {owner} 30000 {count} {names}")
}

fn mrelease(owner: &str, names: &str) -> String {
    format!(
        "RLOCK.MRELEASE {owner} {} {names}",
        names.split(' ').count()
    )
}

/// A connection that waits for the locks, without limit.
#[track_caller]
fn waits(server: &Server, owner: &str, names: &str) -> Conn {
    server.blocked_in(&format!("{} BLOCK 0", macquire(owner, names)))
}

/// A wait of the session `s`.
#[track_caller]
fn queues(conn: &mut Conn, owner: &str, names: &str) -> i64 {
    let wait = format!("{} QUEUE 0 SESSION s", macquire(owner, names));
    conn.run(wait).queued()
}

/// The holder of each of the locks; a dash for a free one.
fn holders(server: &Server, names: &str) -> Vec<String> {
    let of = |name| server.holder(name).unwrap_or_else(|| "-".to_owned());
    names.split(' ').map(of).collect()
}

// --- What is stored and told --------------------------------------------------------------------

#[test]
fn each_is_a_plain_lock_with_one_token_for_all_newly_taken() {
    let server = Server::start();
    let mut conn = server.connect();
    let (count, token) = takes(&mut conn, "alice", "x y z");
    assert_eq!(count, 1);
    for name in ["x", "y", "z"] {
        assert_eq!(conn.run(format!("HGET {name} alice")), "1");
        assert_eq!(conn.run(format!("HGET {name} fence")), format!("t{token}"));
        assert_eq!(conn.run(format!("HLEN {name}")), 2);
        let left = conn.run(format!("PTTL {name}")).int();
        assert!((20_000..=30_000).contains(&left), "{left}");
    }
    assert_eq!(server.run("DBSIZE"), 3);
    let info = conn.run("RLOCK.INFO y");
    assert_eq!(
        (info.get("owner"), info.get("token")),
        (&"alice".into(), &token.into())
    );
    assert_eq!(conn.let_go("y", "alice"), 0, "each can be released alone");
    assert_eq!(conn.run(mrelease("alice", "x y z")), 2);
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn held_locks_are_reentered_and_keep_their_tokens() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE x alice 15000").held();
    let old = conn.run("RLOCK.ACQUIRE x alice 15000").held().1;
    let (count, new) = takes(&mut conn, "alice", "x y");
    assert_eq!(count, 3, "the highest");
    assert!(new > old, "that of the newly taken");
    assert_eq!(conn.run("HGET x fence"), format!("t{old}"));
    assert_eq!(conn.run("HGET y fence"), format!("t{new}"));
    assert!(conn.run("PTTL x").int() > 20_000, "the lease starts anew");
    assert_eq!(
        takes(&mut conn, "alice", "y x"),
        (4, new),
        "none newly taken: the largest"
    );
    assert_eq!(
        conn.run(format!("{} ONCE", macquire("alice", "x y")))
            .held(),
        (4, new)
    );
    assert_eq!(conn.run("HGET x alice"), "4");
    assert_eq!(conn.run("HGET y alice"), "2");
    for left in [2, 2, 1, 1, 0] {
        assert_eq!(
            conn.run(mrelease("alice", "x y")),
            left,
            "those not held are passed over"
        );
    }
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn a_name_given_twice_counts_once() {
    let server = Server::start();
    let mut conn = server.connect();
    assert_eq!(takes(&mut conn, "alice", "x x y x").0, 1);
    assert_eq!(conn.run("HGET x alice"), "1");
    assert_eq!(conn.run("RLOCK.MRENEW alice 60000 3 x y x"), 2);
    let _bob = waits(&server, "bob", "x x x");
    assert_eq!(server.waiting_owners("x"), ["bob"]);
    assert_eq!(conn.run(mrelease("alice", "x x y")), 2);
    assert_eq!(holders(&server, "x y"), ["bob", "-"]);
}

#[test]
fn all_or_none() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE y bob 60000").held();
    conn.run("RLOCK.ACQUIRE z bob 20000").held();
    let mut feed = Feed::of(&server);
    let left = conn.run(macquire("alice", "x y z w")).refused();
    assert!(
        (50_000..=60_000).contains(&left),
        "the longest of those that others hold: {left}"
    );
    assert_eq!(holders(&server, "x y z w"), ["-", "bob", "bob", "-"]);
    conn.run("PERSIST z");
    assert_eq!(conn.run(macquire("alice", "x y z")).refused(), -1);
    assert_eq!(feed.news(), ["PERSIST z"], "what is refused writes nothing");
    conn.run("SET text v");
    for names in ["text x", "x text"] {
        for wait in ["", " BLOCK 0"] {
            let error = conn.run(macquire("alice", names) + wait).error();
            assert!(error.starts_with("WRONGTYPE "), "{names}: {error}");
        }
        let error = conn.run(mrelease("bob", names)).error();
        assert!(error.starts_with("WRONGTYPE "), "{names}: {error}");
        let error = conn.run(format!("RLOCK.MRENEW bob 1000 2 {names}")).error();
        assert!(error.starts_with("WRONGTYPE "), "{names}: {error}");
    }
    conn.run("RLOCK.ACQUIRE rw alice 30000 READ").held();
    for names in ["rw x", "x rw"] {
        let error = conn.run(macquire("alice", names)).error();
        assert!(error.starts_with("WRONGKIND "), "{names}: {error}");
    }
    assert_eq!(conn.run("EXISTS x"), 0);
}

#[test]
fn free_but_promised_is_zero() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("x", "alice");
    let _bob = waits(&server, "bob", "x y");
    // y is free, and bob's as soon as he can have x.
    assert_eq!(conn.run(macquire("carol", "y z")).refused(), 0);
    assert_eq!(conn.run("RLOCK.ACQUIRE y carol 30000").refused(), 0);
    assert_eq!(holders(&server, "x y z"), ["alice", "-", "-"]);
    assert!(conn.run(macquire("carol", "x y")).refused() > 20_000);
}

/// As for the commands of one lock: there is nothing to count with, but it is held.
#[test]
fn a_hold_without_a_count_is_renewed_and_not_given_back() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("free", "alice");
    conn.run("HSET odd alice much");
    conn.run("PEXPIRE odd 15000");
    for (one, several) in [
        (
            "RLOCK.RENEW odd alice 30000",
            "RLOCK.MRENEW alice 30000 2 odd free",
        ),
        ("RLOCK.RELEASE odd alice", "RLOCK.MRELEASE alice 2 odd free"),
    ] {
        let (one, several) = (conn.run(one), conn.run(several));
        match one {
            Reply::Int(1) => assert_eq!(several, 2),
            refused => assert_eq!(several.error(), refused.error()),
        }
    }
    assert!(conn.run("PTTL odd").int() > 15_000);
    assert_eq!(server.holder("free").as_deref(), Some("alice"));
}

#[test]
fn a_renewal_and_a_release_count_what_they_did() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "x y");
    conn.take("z", "bob");
    assert_eq!(conn.run("RLOCK.MRENEW alice 60000 4 x y z free"), 2);
    assert!(conn.run("PTTL x").int() > 50_000);
    assert!(conn.run("PTTL z").int() <= 30_000);
    assert_eq!(conn.run("RLOCK.MRENEW carol 60000 4 x y z free"), 0);
    assert_eq!(conn.run(mrelease("carol", "x y z free")), 0);
    assert_eq!(conn.run(mrelease("alice", "free z y")), 1);
    assert_eq!(holders(&server, "x y z"), ["alice", "-", "bob"]);
    assert_eq!(conn.run("EXISTS free"), 0);
}

#[test]
fn replicas_are_told_all_in_one_transaction() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut feed = Feed::of(&server);
    let token = takes(&mut conn, "alice", "x y x").1;
    let of = |name, owner| {
        let end = end_of(&mut server.connect(), name);
        grant(name, owner, token, end)
    };
    let expected = [of("x", "alice"), of("y", "alice")];
    assert_eq!(feed.news(), transaction(expected));

    assert_eq!(conn.run("RLOCK.MRENEW alice 60000 3 y free x"), 2);
    let ends = ["y", "x"].map(|name| format!("PEXPIREAT {name} {}", end_of(&mut conn, name)));
    assert_eq!(feed.news(), transaction(ends));

    assert_eq!(conn.run(mrelease("alice", "x free y")), 2);
    let writes = transaction(["DEL x", "DEL y"].map(str::to_owned));
    let messages = transaction(["x", "y"].map(unlock_message));
    assert_eq!(feed.news(), [writes, messages].concat());
}

#[test]
fn refused_and_fruitless_commands_write_nothing_and_break_no_watch() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "x y");
    let _life = server.session_connection("s");
    let mut watcher = server.connect();
    let mut feed = Feed::of(&server);
    for command in [
        "RLOCK.MACQUIRE bob 30000 2 x free",
        "RLOCK.MACQUIRE bob 30000 2 free x BLOCK 5",
        "RLOCK.MACQUIRE bob 30000 2 free x QUEUE 0 SESSION s",
        "RLOCK.MACQUIRE bob 0 2 free x",
        "RLOCK.MACQUIRE bob 30000 3 free x",
        "RLOCK.CANCEL free bob",
        "RLOCK.MRELEASE bob 3 x y free",
        "RLOCK.MRENEW bob 30000 3 x y free",
    ] {
        watcher.run("WATCH x y free");
        conn.run(command);
        let replies = watcher.pipeline(&["MULTI", "PING", "EXEC"]);
        assert_eq!(replies[2].array()[0], "PONG", "{command}");
        assert_eq!(feed.news(), Vec::<String>::new(), "{command}");
    }
    for command in [
        "RLOCK.MACQUIRE alice 30000 2 x free",
        "RLOCK.MRENEW alice 30000 2 x y",
        "RLOCK.MRELEASE alice 1 x",
    ] {
        watcher.run("WATCH x");
        conn.run(command);
        let replies = watcher.pipeline(&["MULTI", "PING", "EXEC"]);
        assert_eq!(replies[2], Reply::Null, "{command} is a change");
    }
}

#[test]
fn notifications_and_messages_are_those_of_the_single_commands_once_each() {
    let server = Server::builder()
        .config("notify-keyspace-events EA")
        .start();
    let mut listener = server.connect();
    listener.run("PSUBSCRIBE *");
    let mut conn = server.connect();
    let mut told = |command: &str, expected: &[&str]| {
        assert!(!conn.run(command).is_error(), "{command}");
        let mut heard: Vec<_> = expected
            .iter()
            .map(|_| {
                let words = listener.read().texts();
                let channel = words[2].trim_start_matches("__keyevent@0__:");
                format!("{channel} {}", words[3])
            })
            .collect();
        let mut expected = expected.to_vec();
        // Of two locks neither is said to be first.
        heard.sort();
        expected.sort_unstable();
        assert_eq!(heard, expected, "{command}");
        listener.expect_nothing_yet();
    };
    told(
        "RLOCK.MACQUIRE alice 30000 3 x y x",
        &["hset x", "expire x", "hset y", "expire y"],
    );
    told("RLOCK.MACQUIRE bob 30000 2 x z", &[]);
    told("RLOCK.MRENEW alice 60000 2 x z", &["expire x"]);
    told("RLOCK.MRENEW bob 60000 2 x z", &[]);
    let (x, y) = (
        "redisson_lock__channel:{x} 0",
        "redisson_lock__channel:{y} 0",
    );
    told("RLOCK.MRELEASE alice 3 x z y", &["del x", x, "del y", y]);
    told("RLOCK.MRELEASE alice 2 x y", &[]);
    told("RLOCK.MACQUIRE alice 30000 1 x", &["hset x", "expire x"]);
    told("RLOCK.MACQUIRE alice 40000 1 x", &["hset x", "expire x"]);
    told("RLOCK.MRELEASE alice 1 x", &["hset x"]);
    // A hand-over of both, told once for each.
    told("RLOCK.MACQUIRE alice 30000 1 y", &["hset y", "expire y"]);
    let mut bob = waits(&server, "bob", "x y");
    let hand_over = |name: &'static str| [["del", "hset", "expire"].map(|event| (event, name))];
    let events = [hand_over("x"), hand_over("y")].concat().concat();
    let events: Vec<_> = events
        .iter()
        .map(|(event, name)| format!("{event} {name}"))
        .collect();
    let mut expected: Vec<&str> = events.iter().map(String::as_str).collect();
    expected.extend([x, y]);
    told("RLOCK.MRELEASE alice 2 x y", &expected);
    bob.read().held();
}

// --- The wait -----------------------------------------------------------------------------------

#[test]
fn one_wait_stands_in_all_queues_and_is_granted_when_it_is_first_in_all() {
    let server = Server::start();
    let mut conn = server.connect();
    let first = conn.take("x", "alice");
    conn.take("y", "bob");
    let mut carol = waits(&server, "carol", "x y z");
    let id = carol_id(&server);
    for name in ["x", "y", "z"] {
        let info = conn.run(format!("RLOCK.INFO {name}"));
        assert_eq!(info.get("waiters"), &1, "{name}");
        assert_eq!(info.get("queue").array()[0].get("owner"), &"carol");
        assert_eq!(info.get("queue").array()[0].get("client-id"), &id);
    }
    let listed = conn.run("RLOCK.LIST");
    let names: Vec<_> = listed
        .array()
        .iter()
        .map(|row| row.array()[0].text())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
    assert_eq!(
        holders(&server, "x y z"),
        ["alice", "bob", "-"],
        "it holds nothing"
    );
    conn.let_go("x", "alice");
    carol.expect_nothing_yet();
    assert_eq!(holders(&server, "x y z"), ["-", "bob", "-"]);
    let replies = conn.pipeline(&["RLOCK.RELEASE y bob", "RLOCK.ACQUIRE z dave 30000"]);
    assert!(
        replies[1].refused() > 20_000,
        "granted in the command that frees"
    );
    let (count, token) = carol.read().held();
    assert_eq!(count, 1);
    assert!(token > first);
    assert_eq!(holders(&server, "x y z"), ["carol"; 3]);
    for name in ["x", "y", "z"] {
        assert_eq!(
            server.run(format!("HGET {name} fence")),
            format!("t{token}")
        );
        assert!(server.run(format!("PTTL {name}")).int() > 20_000);
    }
    assert_eq!(server.info_number("rlock_waiters"), 0);
    assert_eq!(server.info_number("rlock_locks_waited_for"), 0);
}

fn carol_id(server: &Server) -> i64 {
    let clients = server.run("CLIENT LIST").text();
    let blocked = clients
        .lines()
        .find(|line| line.contains("cmd=rlock.macquire"))
        .unwrap();
    let id = blocked.split(['=', ' ']).nth(1).unwrap();
    id.parse().unwrap()
}

#[test]
fn waits_for_one_and_for_several_are_served_first_come_first_served() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("x", "alice");
    let mut bob = waits(&server, "bob", "x y");
    let mut carol = server.wait_in_queue("y", "carol"); // behind bob, though y is free
    let mut dave = waits(&server, "dave", "y z");
    let mut erin = server.wait_in_queue("x", "erin");
    carol.expect_nothing_yet();
    conn.let_go("x", "alice");
    bob.read().held();
    carol.expect_nothing_yet();
    assert_eq!(conn.run(mrelease("bob", "x y")), 2);
    erin.read().held();
    carol.read().held();
    dave.expect_nothing_yet();
    conn.let_go("y", "carol");
    dave.read().held();
    assert_eq!(holders(&server, "x y z"), ["erin", "dave", "dave"]);
}

#[test]
fn an_mrelease_frees_all_before_anyone_is_granted() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "x y");
    let mut bob = waits(&server, "bob", "y x");
    let mut carol = server.wait_in_queue("x", "carol");
    let replies = conn.pipeline(&[
        mrelease("alice", "x y"),
        macquire("alice", "x y"),
        "RLOCK.ACQUIRE x dave 30000".to_owned(),
    ]);
    assert_eq!(replies[0], 2);
    assert!(replies[1].refused() > 20_000);
    assert!(replies[2].refused() > 20_000);
    bob.read().held();
    carol.expect_nothing_yet();
    assert_eq!(holders(&server, "x y"), ["bob", "bob"]);

    // With one waiter for each, a replica sees both free before either is taken.
    let mut dave = server.wait_in_queue("y", "dave");
    let mut feed = Feed::of(&server);
    assert_eq!(conn.run(mrelease("bob", "x y")), 2);
    carol.read().held();
    dave.read().held();
    let mut news = feed.news();
    let messages = transaction(["x", "y"].map(unlock_message));
    assert_eq!(news.split_off(news.len() - 4), messages);
    let verbs: Vec<_> = news
        .iter()
        .map(|command| command.split(' ').next().unwrap())
        .collect();
    let expected = ["MULTI", "DEL", "DEL", "RESTORE", "RESTORE", "EXEC"];
    assert_eq!(verbs, expected, "{news:?}");
}

#[test]
fn an_owner_that_holds_some_of_them_waits_for_the_others() {
    let server = Server::start();
    let mut conn = server.connect();
    let old = conn.take("x", "alice");
    conn.take("y", "bob");
    let mut carol = server.wait_in_queue("x", "carol");
    let mut alice = waits(&server, "alice", "x y");
    conn.let_go("y", "bob");
    let (count, new) = alice.read().held();
    assert_eq!(count, 2, "entered once more, past the queue");
    assert!(new > old);
    assert_eq!(conn.run("HGET x fence"), format!("t{old}"));
    carol.expect_nothing_yet();
    assert_eq!(conn.run(mrelease("alice", "x y")), 2);
    carol.expect_nothing_yet();
    assert_eq!(conn.let_go("x", "alice"), 0);
    carol.read().held();
}

/// Its first request may ask for less than its owner has been promised since.
#[test]
fn a_grant_after_a_wait_for_several_shortens_no_lease() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "x");
    takes(&mut conn, "bob", "y");
    let mut waiting = server.blocked_in("RLOCK.MACQUIRE bob 1000 2 x y BLOCK 0");
    conn.run("RLOCK.RENEW y bob 100000");
    assert_eq!(conn.let_go("x", "alice"), 0);
    waiting.read().held();
    let left = |name| server.run(format!("PTTL {name}")).int();
    assert!(left("x") <= 1000, "{}", left("x"));
    assert!(left("y") > 30_000, "{}", left("y"));
    // Without a wait the lease starts anew.
    conn.run("RLOCK.MACQUIRE bob 1000 2 x y").held();
    assert!(left("y") <= 1000, "{}", left("y"));
}

#[test]
fn a_wait_for_several_leaves_all_queues_at_once() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE x alice 600000").held();
    let ways: [(&str, &dyn Fn(&Server, Conn, i64)); 6] = [
        ("timed out", &|server, bob, _| {
            bob.close();
            let wait = format!("{} BLOCK 30", macquire("bob", "x y z"));
            assert!(server.run(wait).refused() > 20_000);
        }),
        ("cancelled at the first", &|server, mut bob, _| {
            assert_eq!(server.run("RLOCK.CANCEL x bob"), 1);
            assert!(bob.read().refused() > 20_000);
        }),
        ("cancelled at the last", &|server, mut bob, _| {
            assert_eq!(server.run("RLOCK.CANCEL z bob"), 1);
            bob.read().refused();
        }),
        ("killed", &|server, mut bob, id| {
            assert_eq!(server.run(format!("CLIENT KILL ID {id}")), 1);
            bob.read_to_end();
        }),
        ("gone", &|_, bob, _| bob.close()),
        ("unblocked", &|server, mut bob, id| {
            let is_safe = Version::at_hand().can_unblock_waiters();
            let unblocked = server.run(format!("CLIENT UNBLOCK {id}"));
            assert_eq!(unblocked, i64::from(is_safe));
            if is_safe {
                assert!(bob.read().refused() > 20_000);
            } else {
                bob.close();
            }
        }),
    ];
    for (way, leave) in ways {
        let bob = waits(&server, "bob", "x y z");
        let id = server.run("RLOCK.INFO z").get("queue").array()[0]
            .get("client-id")
            .int();
        let mut carol = server.wait_in_queue("y", "carol");
        leave(&server, bob, id);
        carol.read().held();
        for name in ["x", "y", "z"] {
            assert!(server.waiting_owners(name).is_empty(), "{way}: {name}");
        }
        assert_eq!(holders(&server, "x y z"), ["alice", "carol", "-"], "{way}");
        assert_eq!(server.info_number("rlock_waiters"), 0, "{way}");
        conn.let_go("y", "carol");
    }
}

#[test]
fn a_wait_for_several_ends_neither_early_nor_much_too_late() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE x alice 600000").held();
    for wait_ms in [1, 20, 50, 80] {
        on_time("the end", &server, Duration::from_millis(10), |_| {
            let begun = Instant::now();
            conn.run(format!("{} BLOCK {wait_ms}", macquire("bob", "y x")))
                .refused();
            let took = begun.elapsed();
            took.checked_sub(Duration::from_millis(wait_ms))
                .expect("not early")
        });
    }
}

#[test]
fn whatever_frees_the_last_of_them_grants_all() {
    let server = Server::start();
    for freeing in [
        "RLOCK.RELEASE y alice",
        "RLOCK.MRELEASE alice 1 y",
        "RLOCK.BREAK y",
        "DEL y",
        "UNLINK y",
        "RENAME y elsewhere",
        "MOVE y 1",
        "PEXPIREAT y 1",
        "PEXPIRE y 30",
        "RLOCK.RENEW y alice 30",
        "FLUSHALL",
        "SWAPDB 0 2",
    ] {
        let mut conn = server.connect();
        conn.take("y", "alice");
        let mut bob = waits(&server, "bob", "x y z");
        server.run(freeing);
        assert_eq!(bob.read().held().0, 1, "{freeing}");
        assert_eq!(holders(&server, "x y z"), ["bob"; 3], "{freeing}");
        conn.run("FLUSHALL");
    }
}

#[test]
fn a_lease_that_ends_is_handed_over_within_ten_milliseconds() {
    let server = Server::start();
    server.run("DEBUG SET-ACTIVE-EXPIRE 0");
    on_time("the grant", &server, Duration::from_millis(10), |round| {
        let mut conn = server.connect();
        conn.run("FLUSHALL");
        conn.take("x", "alice");
        conn.take("y", "bob");
        let mut carol = waits(&server, "carol", "x y");
        // The one ends earlier, and nobody is granted then.
        let renewals = [
            "MULTI",
            "RLOCK.RENEW x alice 20",
            &format!("RLOCK.RENEW y bob {}", 50 + round),
            "PEXPIRETIME y",
            "EXEC",
        ];
        let end = conn.pipeline(&renewals).pop().unwrap().ints()[2];
        carol.read().held();
        let end = SystemTime::UNIX_EPOCH + Duration::from_millis(end.try_into().unwrap());
        let now = SystemTime::now().duration_since(end);
        now.expect("not granted before the end")
    });
}

#[test]
fn a_key_promised_to_a_wait_may_be_taken_by_a_script() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("x", "alice");
    let mut bob = waits(&server, "bob", "x y");
    conn.run("HSET y java 1");
    conn.run("PEXPIRE y 30000");
    conn.let_go("x", "alice");
    bob.expect_nothing_yet();
    assert_eq!(holders(&server, "x y"), ["-", "java"]);
    conn.run("DEL y");
    bob.read().held();
    assert_eq!(holders(&server, "x y"), ["bob", "bob"]);
}

#[test]
fn a_wrong_kind_or_type_over_one_of_them_ends_the_wait() {
    for (odd, code) in [
        ("SET y v", "WRONGTYPE "),
        ("HSET y mode read alice 1", "WRONGKIND "),
    ] {
        let server = Server::start();
        let mut conn = server.connect();
        conn.take("x", "alice");
        conn.take("y", "alice");
        let mut bob = waits(&server, "bob", "x y z");
        let mut life = server.session_connection("s");
        queues(&mut conn, "carol", "y z");
        let mut dave = server.wait_in_queue("z", "dave");
        conn.pipeline(&[
            "MULTI",
            "PEXPIRE y 100",
            "DEL y",
            odd,
            "SET {y}:alice:rwlock_timeout:1 1",
            "EXEC",
        ]);
        let told = bob.read();
        assert!(told.error().starts_with(code), "{odd}: {told:?}");
        let (event, error) = next_events(&mut life).remove(0);
        assert_eq!(event, "error y carol");
        assert!(error.text().starts_with(code), "{error:?}");
        dave.read().held();
        assert_eq!(server.waiting_owners("x").len(), 0);
        assert_eq!(server.holder("x").as_deref(), Some("alice"));
    }
}

#[test]
fn one_full_queue_refuses_the_wait_in_all() {
    let server = Server::builder()
        .config("rlock.max-waiters-per-lock 1")
        .start();
    let mut conn = server.connect();
    conn.take("x", "alice");
    conn.take("y", "alice");
    let _bob = server.wait_in_queue("y", "bob");
    let error = conn
        .run(format!("{} BLOCK 0", macquire("carol", "x y")))
        .error();
    assert!(error.starts_with("QUEUEFULL "), "{error}");
    assert!(server.waiting_owners("x").is_empty());
    let _carol = waits(&server, "carol", "x z");
    let error = conn.run("RLOCK.ACQUIRE z dave 1000 BLOCK 0").error();
    assert!(
        error.starts_with("QUEUEFULL "),
        "it counts in each: {error}"
    );
}

#[test]
fn once_keeps_the_place_of_the_same_set() {
    let server = Server::start();
    let _life = server.session_connection("s");
    let mut conn = server.connect();
    conn.take("x", "alice");
    let mut old = waits(&server, "bob", "x y");
    let mut carol = server.wait_in_queue("x", "carol");
    let mut new = server.blocked_in(&format!("{} BLOCK 0 ONCE", macquire("bob", "y x y")));
    assert!(old.read().refused() > 20_000, "the old connection is told");
    assert_eq!(server.waiting_owners("x"), ["bob", "carol"]);
    assert_eq!(server.waiting_owners("y"), ["bob"]);
    // Another set would be a second wait, and so would one for a single lock.
    for second in [
        format!("{} QUEUE 0 SESSION s ONCE", macquire("bob", "x y z")),
        "RLOCK.ACQUIRE x bob 30000 QUEUE 0 SESSION s ONCE".to_owned(),
    ] {
        let error = conn.run(&second).error();
        assert!(error.starts_with("WAITING "), "{second}: {error}");
    }
    assert!(server.waiting_owners("z").is_empty());
    assert_eq!(conn.run("RLOCK.CANCEL x bob"), 1);
    assert!(new.read().refused() > 20_000);
    assert_eq!(server.waiting_owners("x"), ["carol"]);
    conn.let_go("x", "alice");
    carol.read().held();
}

/// A client that has not heard the reply asks again. One of its locks was deleted meanwhile and is
/// another's, so it waits beside its own hold of the other.
#[test]
fn a_wait_with_once_counts_no_hold_twice_and_all_have_one_token() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, unheard) = takes(&mut conn, "alice", "x y");
    conn.run("DEL y");
    conn.run("RLOCK.ACQUIRE y bob 60000").held();
    let mut again = server.blocked_in(&format!("{} BLOCK 0 ONCE", macquire("alice", "x y")));
    conn.let_go("y", "bob");
    let (count, token) = again.read().held();
    assert!(count == 1 && token > unheard, "{count}, {token}");
    for name in ["x", "y"] {
        assert_eq!(conn.run(format!("HGET {name} fence")), format!("t{token}"));
        let release = format!("RLOCK.RELEASE {name} alice TOKEN {token}");
        assert_eq!(conn.run(release), 0, "nothing of {name} is left");
    }
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn inside_multi_and_scripts_no_command_waits_and_hand_overs_happen() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "x y");
    let mut bob = waits(&server, "bob", "x y");
    let replies = conn.pipeline(&[
        "MULTI",
        "RLOCK.MACQUIRE carol 30000 2 x z BLOCK 0",
        "RLOCK.MACQUIRE carol 30000 2 z w BLOCK 0",
        "RLOCK.MRELEASE alice 2 x y",
        "HGET y bob",
        "EXEC",
    ]);
    let results = replies[5].array();
    assert!(results[0].refused() > 20_000);
    assert_eq!(results[1].held().0, 1);
    assert_eq!((&results[2], &results[3]), (&2.into(), &"1".into()));
    bob.read().held();
    let mut dave = waits(&server, "dave", "y z w");
    let script = "local held = redis.call('RLOCK.MACQUIRE', 'erin', '30000', 2, KEYS[1], KEYS[2],
            'BLOCK', '0')
        redis.call('RLOCK.MRELEASE', 'carol', 2, KEYS[2], KEYS[3])
        redis.call('RLOCK.MRELEASE', 'bob', 1, KEYS[1])
        return {held[1], redis.call('HGET', KEYS[1], 'dave')}";
    let told = conn.cmd(&["EVAL", script, "3", "y", "z", "w"]);
    assert_eq!(
        (&told.array()[0], &told.array()[1]),
        (&0.into(), &"1".into())
    );
    dave.read().held();
    assert_eq!(holders(&server, "x y z w"), ["bob", "dave", "dave", "dave"]);
    assert_eq!(server.info_number("rlock_waiters"), 0);
}

#[test]
fn grants_whose_waiters_disconnect_in_the_same_turn_are_taken_back() {
    for transaction in [false, true] {
        let server = Server::start();
        let mut alice = server.connect();
        takes(&mut alice, "alice", "x y");
        let mut bob = waits(&server, "bob", "x y z");
        let id = server.run("RLOCK.INFO z").get("queue").array()[0]
            .get("client-id")
            .int();
        let mut carol = server.wait_in_queue("y", "carol");
        let mut dave = server.wait_in_queue("z", "dave");
        let (release, kill) = (mrelease("alice", "x y"), format!("CLIENT KILL ID {id}"));
        if transaction {
            alice.pipeline(&["MULTI", &release, &kill, "EXEC"]);
        } else {
            alice.pipeline(&[&release, &kill]);
        }
        bob.read_to_end();
        carol.read().held();
        dave.read().held();
        until("x is free", || server.holder("x").is_none());
        assert_eq!(holders(&server, "x y z"), ["-", "carol", "dave"]);
        assert_eq!(server.info_number("rlock_grants_taken_back"), 3);
    }
}

/// The grant did not enter the hold of `x` once more, so to give that back would end it.
#[test]
fn a_grant_with_once_that_is_taken_back_leaves_what_its_owner_had() {
    for entries in 1..=2 {
        let server = Server::start();
        let mut conn = server.connect();
        for _ in 0..entries {
            conn.run("RLOCK.ACQUIRE x alice 30000").held();
        }
        conn.take("y", "bob");
        let mut alice = server.blocked_in(&format!("{} BLOCK 0 ONCE", macquire("alice", "x y")));
        let queue = server.run("RLOCK.INFO y");
        let id = queue.get("queue").array()[0].get("client-id").int();
        conn.pipeline(&["RLOCK.RELEASE y bob", &format!("CLIENT KILL ID {id}")]);
        alice.read_to_end();
        until("y is free", || server.holder("y").is_none());
        assert_eq!(conn.run("HGET x alice"), entries.to_string());
        assert_eq!(server.info_number("rlock_grants_taken_back"), 1);
        // Nobody was told the token that `x` has now; the same command names one for both.
        let again = conn.run(format!("{} ONCE", macquire("alice", "x y")));
        let token = format!("t{}", again.held().1);
        assert_eq!(conn.run("HGET x fence"), token);
        assert_eq!(conn.run("HGET y fence"), token);
    }
}

/// At the largest count ONCE is granted after a wait as it is at once.
#[test]
fn a_wait_with_once_ends_at_the_largest_count_too() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("x", "alice");
    conn.run("HSET x alice 2147483647");
    conn.take("y", "bob");
    let mut alice = server.blocked_in(&format!("{} BLOCK 0 ONCE", macquire("alice", "x y")));
    conn.let_go("y", "bob");
    assert_eq!(alice.read().held().0, 2_147_483_647);
}

#[test]
fn a_socket_closed_in_the_turn_of_the_grant_keeps_nothing() {
    for release_first in [false, true] {
        let server = Server::start();
        let mut alice = server.connect();
        takes(&mut alice, "alice", "x y");
        let bob = waits(&server, "bob", "x y");
        let mut carol = waits(&server, "carol", "y x");
        server.freeze();
        if release_first {
            alice.send(mrelease("alice", "x y"));
            bob.close();
        } else {
            bob.close();
            alice.send(mrelease("alice", "x y"));
        }
        server.thaw();
        assert_eq!(alice.read(), 2);
        carol.read().held();
        assert_eq!(holders(&server, "x y"), ["carol", "carol"]);
    }
}

#[test]
fn client_unblock_in_the_turn_of_the_grant_tells_the_truth() {
    for how in ["TIMEOUT", "ERROR"] {
        let server = Server::start();
        let mut alice = server.connect();
        takes(&mut alice, "alice", "x y");
        let mut bob = waits(&server, "bob", "x y");
        let id = server.run("RLOCK.INFO x").get("queue").array()[0]
            .get("client-id")
            .int();
        let mut carol = waits(&server, "carol", "y x");
        let unblock = format!("CLIENT UNBLOCK {id} {how}");
        alice.pipeline(&[mrelease("alice", "x y"), unblock]);
        let told = bob.read();
        if matches!(&told, Reply::Array(reply) if reply[0] == 1) {
            assert_eq!(holders(&server, "x y"), ["bob", "bob"], "{how}");
            carol.expect_nothing_yet();
            assert_eq!(alice.run(mrelease("bob", "x y")), 2);
        }
        carol.read().held();
        assert_eq!(holders(&server, "x y"), ["carol", "carol"], "{how}");
    }
}

// --- Sessions -----------------------------------------------------------------------------------

#[test]
fn one_event_under_the_first_key_named() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    takes(&mut conn, "alice", "x y");
    assert_eq!(queues(&mut conn, "bob", "y x z"), 1);
    let short = format!("{} QUEUE 20 SESSION s", macquire("carol", "z x"));
    assert_eq!(conn.run(short).queued(), 2);
    let told = next_events(&mut life);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0].0, "timeout z carol");
    assert!(told[0].1.int() > 20_000);
    assert_eq!(conn.run(mrelease("alice", "x y")), 2);
    let token = life.run("RLOCK.EVENTS s").granted("y", "bob");
    for name in ["x", "y", "z"] {
        assert_eq!(conn.run(format!("HGET {name} fence")), format!("t{token}"));
    }
    no_events(&mut life);
    queues(&mut conn, "dave", "x y");
    assert_eq!(conn.run("RLOCK.CANCEL y dave"), 1);
    let (event, ttl) = next_events(&mut life).remove(0);
    assert_eq!(event, "timeout x dave");
    assert!(ttl.int() > 20_000);
}

#[test]
fn each_lock_lost_is_told() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.run(format!("{} SESSION s", macquire("alice", "x y z")))
        .held();
    assert_eq!(server.info_number("rlock_session_holds"), 3);
    for (command, event, reason) in [
        ("RLOCK.BREAK x", "lost x alice", "broken"),
        ("DEL y", "lost y alice", "deleted"),
        ("RLOCK.RENEW z alice 20", "lost z alice", "expired"),
    ] {
        conn.run(command);
        assert_eq!(next_events(&mut life), [(event.to_owned(), reason.into())]);
    }
    assert_eq!(server.info_number("rlock_session_holds"), 0);
}

#[test]
fn all_end_with_their_session() {
    for grace in [0, 100] {
        let server = Server::start();
        let mut conn = server.connect();
        let mut life = server.connect();
        life.run(format!("RLOCK.EVENTS s GRACE {grace}")).events();
        conn.run(format!("{} SESSION s", macquire("alice", "x y")))
            .held();
        takes(&mut conn, "alice", "z");
        assert_eq!(conn.run("RLOCK.MRENEW alice 30000 2 z free SESSION s"), 1);
        takes(&mut conn, "other", "w");
        queues(&mut conn, "alice", "w v");
        let mut bob = waits(&server, "bob", "x y z v");
        bob.expect_nothing_yet();
        life.close();
        bob.read().held();
        assert_eq!(holders(&server, "x y z v"), ["bob"; 4], "grace {grace}");
        assert!(server.waiting_owners("w").is_empty());
        assert_eq!(server.info_number("rlock_sessions"), 0);
        assert_eq!(server.info_number("rlock_session_holds"), 0);
    }
}

/// One after the other is freed, and the wait has its turn when all are: were it granted after the
/// first, since its owner still has the other, that would be taken from it again.
#[test]
fn holds_that_end_with_a_session_are_taken_anew_by_their_owners_other_wait() {
    for [first, second] in [["x alice", "y bob"], ["y bob", "x alice"]] {
        for grace in [0, 100] {
            let server = Server::start();
            let mut life = server.connect();
            life.run(format!("RLOCK.EVENTS s GRACE {grace}")).events();
            for taken in [first, second] {
                life.run(format!("RLOCK.ACQUIRE {taken} 30000 SESSION s"))
                    .held();
            }
            let mut alice = waits(&server, "alice", "x y");
            life.close();
            let (count, token) = alice.read().held();
            assert_eq!(count, 1, "{first}, then {second}, grace {grace}");
            assert_eq!(server.info_number("rlock_session_holds"), 0);
            for name in ["x", "y"] {
                assert_eq!(server.run(format!("HGET {name} alice")), "1");
                assert_eq!(
                    server.run(format!("HGET {name} fence")),
                    format!("t{token}")
                );
            }
        }
    }
}

#[test]
fn a_session_without_a_connection_is_refused() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "x");
    for command in [
        "RLOCK.MACQUIRE alice 30000 2 x y SESSION nobody",
        "RLOCK.MACQUIRE bob 30000 2 x y QUEUE 0 SESSION nobody",
        "RLOCK.MRENEW alice 30000 2 x y SESSION nobody",
    ] {
        let error = conn.run(command).error();
        assert!(error.starts_with("NOSESSION "), "{command}: {error}");
    }
    assert_eq!(conn.run("HGET x alice"), "1");
}

#[test]
fn a_grant_of_all_is_the_sessions_at_once_told_or_not() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.connect();
    life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}"))
        .events();
    takes(&mut conn, "alice", "x y");
    queues(&mut conn, "bob", "x y z");
    conn.run(mrelease("alice", "x y"));
    assert_eq!(holders(&server, "x y z"), ["bob"; 3]);
    life.close();
    conn.settle();
    assert_eq!(holders(&server, "x y z"), ["bob"; 3]);
    // The next connection is told, and its end with no grace ends them.
    let mut life = server.connect();
    life.run("RLOCK.EVENTS s").granted("x", "bob");
    life.close();
    until("all are free", || holders(&server, "x y z") == ["-"; 3]);
}

#[test]
fn a_grant_confirmed_in_part_is_taken_back_in_part_or_not_at_all() {
    for (confirm, kept) in [
        ("RLOCK.MACQUIRE bob 30000 2 x y ONCE", "x y"),
        ("RLOCK.MRENEW bob 30000 2 x y", "x y"),
    ] {
        let server = Server::start();
        let mut conn = server.connect();
        let mut life = server.connect();
        life.run(format!("RLOCK.EVENTS s GRACE {ONE_HOUR}"))
            .events();
        takes(&mut conn, "alice", "x");
        queues(&mut conn, "bob", "x y");
        conn.let_go("x", "alice");
        assert!(!conn.run(confirm).is_error());
        life.close();
        conn.settle();
        for name in kept.split(' ') {
            assert_eq!(
                server.holder(name).as_deref(),
                Some("bob"),
                "{confirm}: {name}"
            );
        }
    }
}

#[test]
fn waits_for_several_end_with_a_server_that_becomes_a_replica() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    takes(&mut conn, "alice", "x");
    let mut bob = waits(&server, "bob", "x y");
    queues(&mut conn, "carol", "y x");
    assert_eq!(conn.run("REPLICAOF 127.0.0.1 1"), "OK");
    let told = bob.read();
    assert!(told.error().starts_with("UNBLOCKED "), "{told:?}");
    let (event, error) = life.run("RLOCK.EVENTS s BLOCK 0").event();
    assert_eq!(event, "error y carol");
    assert!(error.text().starts_with("UNBLOCKED "), "{error:?}");
    for command in [
        "RLOCK.MACQUIRE alice 1000 2 x y",
        "RLOCK.MACQUIRE alice 1000 2 x y BLOCK 0",
        "RLOCK.MRELEASE alice 2 x y",
        "RLOCK.MRENEW alice 1000 2 x y",
    ] {
        let error = conn.run(command).error();
        assert!(error.starts_with("READONLY "), "{command}: {error}");
    }
    assert_eq!(conn.run("REPLICAOF NO ONE"), "OK");
    assert!(server.waiting_owners("x").is_empty() && server.waiting_owners("y").is_empty());
    assert_eq!(server.holder("x").as_deref(), Some("alice"));
    let mut dave = waits(&server, "dave", "y x");
    conn.let_go("x", "alice");
    dave.read().held();
}

#[test]
fn the_same_names_in_two_databases_are_other_locks() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut other = server.connect();
    other.run("SELECT 1");
    takes(&mut conn, "alice", "x y");
    takes(&mut other, "bob", "x y");
    let mut carol = server.connect();
    carol.run("SELECT 1");
    carol.send(format!("{} BLOCK 0", macquire("carol", "x y")));
    carol.settle();
    let mut dave = waits(&server, "dave", "y x");
    assert_eq!(conn.run(mrelease("alice", "x y")), 2);
    dave.read().held();
    carol.expect_nothing_yet();
    assert_eq!(other.run(mrelease("bob", "x y")), 2);
    carol.read().held();
    assert_eq!(other.run("HGET y carol"), "1");
}

#[test]
fn under_memory_pressure_only_macquire_is_refused() {
    let server = Server::builder()
        .config("maxmemory-policy noeviction")
        .start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "x y");
    let mut bob = waits(&server, "bob", "x y");
    conn.run("CONFIG SET maxmemory 1");
    for command in [macquire("alice", "x y") + " ONCE", macquire("carol", "z")] {
        let error = conn.run(&command).error();
        assert!(error.starts_with("OOM "), "{command}: {error}");
    }
    assert_eq!(conn.run("RLOCK.MRENEW alice 30000 2 x y"), 2);
    assert_eq!(conn.run(mrelease("alice", "x y")), 2);
    bob.read().held();
}

// --- Deadlock -----------------------------------------------------------------------------------

#[test]
fn circles_through_waits_for_several_are_refused_and_nothing_else_is() {
    let server = Server::start();
    let _life = server.session_connection("s");
    let mut conn = server.connect();
    conn.take("x", "alice");
    conn.take("y", "bob");
    queues(&mut conn, "alice", "y z");
    let error = conn
        .run(format!("{} BLOCK 0", macquire("bob", "w x")))
        .error();
    assert_eq!(
        error,
        "DEADLOCK 2 owners would wait for each other: 'bob' waits for 'alice' at 'x', \
         'alice' waits for 'bob' at 'y'"
    );
    assert!(server.waiting_owners("w").is_empty());
    // z is free, but promised to alice, and she waits for bob.
    let error = conn
        .run("RLOCK.ACQUIRE z bob 30000 QUEUE 0 SESSION s")
        .error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
    conn.run("RLOCK.ACQUIRE z bob 30000").refused();
    // Behind her at z, and she waits for the holder of y, is carol; not in a circle.
    queues(&mut conn, "carol", "z w");
    let error = conn
        .run(format!("{} BLOCK 0", macquire("bob", "w v")))
        .error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
    // It does not wait for its own locks.
    assert_eq!(queues(&mut conn, "dave", "y x"), 2);
    conn.let_go("y", "bob");
    assert_eq!(holders(&server, "y z"), ["alice", "alice"]);
    queues(&mut conn, "bob", "w v"); // carol waits for alice, and she for nobody
}

#[test]
fn two_sets_in_another_order_wait_one_behind_the_other() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "holder", "a b c");
    let mut line: Vec<_> = ["a b", "b a", "c b a", "a c", "b c", "c a"]
        .iter()
        .enumerate()
        .map(|(i, names)| {
            (
                format!("o{i}"),
                *names,
                waits(&server, &format!("o{i}"), names),
            )
        })
        .collect();
    assert_eq!(conn.run(mrelease("holder", "a b c")), 3);
    for (owner, names, waiter) in &mut line {
        waiter.read().held();
        assert_eq!(
            conn.run(mrelease(owner, names)),
            2 + i64::from(names.len() > 3)
        );
    }
    assert_eq!(server.run("DBSIZE"), 0);
    assert_eq!(server.info_number("rlock_deadlocks_refused"), 0);
}

/// Each philosopher takes both forks at once or waits for both. With a circle of forks nobody
/// starves and nobody is refused.
#[test]
fn dining_philosophers() {
    const SEATS: usize = 5;
    const MEALS: usize = 200;
    let server = Server::start();
    let eating: Vec<_> = (0..SEATS).map(|_| AtomicUsize::new(0)).collect();
    thread::scope(|scope| {
        for seat in 0..SEATS {
            let (server, eating) = (&server, &eating);
            scope.spawn(move || {
                let (left, right) = (seat, (seat + 1) % SEATS);
                let forks = format!("fork{left} fork{right}");
                let mut conn = server.connect();
                for _ in 0..MEALS {
                    let wait = format!("{} BLOCK 0", macquire(&format!("p{seat}"), &forks));
                    assert_eq!(conn.run(wait).held().0, 1);
                    for fork in [left, right] {
                        assert_eq!(
                            eating[fork].fetch_add(1, Ordering::SeqCst),
                            0,
                            "fork {fork}"
                        );
                    }
                    for fork in [left, right] {
                        eating[fork].fetch_sub(1, Ordering::SeqCst);
                    }
                    assert_eq!(conn.run(mrelease(&format!("p{seat}"), &forks)), 2);
                }
            });
        }
    });
    assert_eq!(server.run("DBSIZE"), 0);
    assert_eq!(server.info_number("rlock_waiters"), 0);
    assert_eq!(server.info_number("rlock_deadlocks_refused"), 0);
}

/// Fifty of them on one connection and one session connection.
#[test]
fn fifty_dining_philosophers_of_one_session() {
    const SEATS: usize = 50;
    const MEALS: usize = 20;
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    let forks = |seat: usize| format!("fork{seat} fork{}", (seat + 1) % SEATS);
    let mut meals: BTreeMap<usize, usize> = BTreeMap::new();
    let mut in_use = [false; SEATS];
    let mut eating: Vec<usize> = Vec::new();
    let ask = |conn: &mut Conn, seat: usize| -> bool {
        let wait = format!(
            "{} QUEUE 0 SESSION s",
            macquire(&format!("p{seat}"), &forks(seat))
        );
        match conn.run(wait).ints()[..] {
            [-1, ..] => false,
            [1, _] => true,
            ref other => panic!("neither held nor queued: {other:?}"),
        }
    };
    let sit = |seat: usize, in_use: &mut [bool; SEATS]| {
        for fork in [seat, (seat + 1) % SEATS] {
            assert!(
                !std::mem::replace(&mut in_use[fork], true),
                "fork {fork} is in use"
            );
        }
    };
    for seat in 0..SEATS {
        if ask(&mut conn, seat) {
            sit(seat, &mut in_use);
            eating.push(seat);
        }
    }
    while meals.values().sum::<usize>() < SEATS * MEALS {
        for seat in std::mem::take(&mut eating) {
            for fork in [seat, (seat + 1) % SEATS] {
                in_use[fork] = false;
            }
            assert_eq!(conn.run(mrelease(&format!("p{seat}"), &forks(seat))), 2);
            *meals.entry(seat).or_default() += 1;
            if meals[&seat] < MEALS && ask(&mut conn, seat) {
                sit(seat, &mut in_use);
                eating.push(seat);
            }
            for (event, _) in life.run("RLOCK.EVENTS s").events() {
                let seat = event.rsplit_once(" p").unwrap().1.parse().unwrap();
                assert_eq!(event, format!("granted fork{seat} p{seat}"));
                sit(seat, &mut in_use);
                eating.push(seat);
            }
        }
        assert!(
            !eating.is_empty() || meals.len() == SEATS,
            "everybody waits: {meals:?}"
        );
    }
    assert!(meals.values().all(|fed| *fed == MEALS), "{meals:?}");
    assert_eq!(server.run("DBSIZE"), 0);
    assert_eq!(server.info_number("rlock_deadlocks_refused"), 0);
}
