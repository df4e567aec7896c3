//! The queue of a read-write lock: phase-fair, and nobody waits for a lock that would let it in.

use std::time::{Duration, Instant, SystemTime};

use rlock_tests::{Conn, Feed, Reply, Server, Version, on_time, until};

use crate::events::{next_events, no_events};
use crate::read_write::{as_fields, fields, takes, timeout};

/// A connection that waits for `k` in this mode, without limit.
#[track_caller]
fn waits(server: &Server, owner: &str, mode: &str) -> Conn {
    server.blocked_in(&format!("RLOCK.ACQUIRE k {owner} 30000 {mode} BLOCK 0"))
}

#[track_caller]
fn releases(server: &Server, owner: &str, mode: &str) {
    assert_eq!(server.run(format!("RLOCK.RELEASE k {owner} {mode}")), 0);
}

/// A wait for `k` of the session `s`.
#[track_caller]
fn queues(conn: &mut Conn, owner: &str, mode: &str) -> i64 {
    conn.run(format!(
        "RLOCK.ACQUIRE k {owner} 30000 {mode} QUEUE 0 SESSION s"
    ))
    .queued()
}

/// A hold of `k` of the session `s`.
#[track_caller]
fn takes_for(conn: &mut Conn, owner: &str, mode: &str) -> i64 {
    conn.run(format!("RLOCK.ACQUIRE k {owner} 30000 {mode} SESSION s"))
        .held()
        .1
}

#[test]
fn readers_and_writers_take_turns() {
    let server = Server::start();
    takes(&mut server.connect(), "first", "READ");
    let mut a = waits(&server, "a", "WRITE");
    let mut b = waits(&server, "b", "READ");
    let mut c = waits(&server, "c", "READ");
    let mut d = waits(&server, "d", "WRITE");
    let mut e = waits(&server, "e", "READ");
    assert_eq!(server.waiting_owners("k"), ["a", "b", "c", "d", "e"]);
    releases(&server, "first", "READ");
    let mut tokens = vec![a.read().held().1];
    b.expect_nothing_yet();
    releases(&server, "a", "WRITE");
    tokens.push(b.read().held().1);
    tokens.push(c.read().held().1);
    assert_eq!(fields(&server, "k"), as_fields("mode=read b=1 c=1"));
    e.expect_nothing_yet();
    releases(&server, "b", "READ");
    d.expect_nothing_yet();
    releases(&server, "c", "READ");
    tokens.push(d.read().held().1);
    e.expect_nothing_yet();
    releases(&server, "d", "WRITE");
    tokens.push(e.read().held().1);
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    releases(&server, "e", "READ");
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn the_first_readers_are_granted_by_the_release_and_before_newcomers() {
    for freeing in ["RLOCK.RELEASE k alice WRITE", "RLOCK.BREAK k"] {
        let server = Server::start();
        let mut alice = server.connect();
        takes(&mut alice, "alice", "WRITE");
        let mut line = ["b", "c", "d"].map(|owner| waits(&server, owner, "READ"));
        let replies = alice.pipeline(&[
            freeing,
            "HGETALL k",
            "RLOCK.ACQUIRE k newcomer 30000 WRITE",
            "RLOCK.ACQUIRE k newcomer 30000 READ",
        ]);
        let mut seen = replies[1].texts();
        seen.sort();
        let mut expected = ["1", "1", "1", "b", "c", "d", "mode", "read"];
        expected.sort_unstable();
        assert_eq!(seen, expected, "{freeing}");
        assert!(replies[2].refused() > 20_000);
        assert_eq!(
            replies[3].held().0,
            1,
            "nobody waits, so a reader may come in"
        );
        for waiter in &mut line {
            waiter.read().held();
        }
    }
}

/// The server's time for a writer's release that lets this number of readers in, after these
/// commands.
fn time_to_come_in(server: &Server, readers: usize, before: &str) -> Duration {
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    conn.run("RLOCK.ACQUIRE k alice 600000 WRITE").held();
    let queue = |at| format!("RLOCK.ACQUIRE k r{at} 600000 READ QUEUE 0 SESSION s");
    let queued: Vec<String> = (0..readers).map(queue).collect();
    conn.pipeline(&queued);
    conn.run(before);
    let start = server.processor_time();
    releases(server, "alice", "WRITE");
    let mut told = 0;
    until("all come in with it", || {
        told += life.run("RLOCK.EVENTS s").events().len();
        told == readers
    });
    let taken = server.processor_time().saturating_sub(start);
    conn.run("FLUSHALL");
    conn.settle();
    taken
}

#[test]
fn readers_that_come_in_together_do_not_each_look_at_all_the_others() {
    let server = Server::start();
    // Four times the readers take four times as long; sixteen times if each looks at the others.
    // Others use the machine's caches: it is enough that one round shows it.
    let mut seen = Vec::new();
    for _ in 0..5 {
        let [few, many] = [750, 3000].map(|readers| time_to_come_in(&server, readers, "PING"));
        if many < few * 9 {
            return;
        }
        seen.push((few, many));
    }
    panic!("the time grows faster than the number: {seen:?}");
}

#[test]
fn nor_at_all_the_timeout_keys_that_a_field_claims_to_have() {
    let server = Server::start();
    let claim = "HSET k nobody 2147483647";
    // Nearly all of the time is one long look; twenty times as many if each looks for itself.
    let mut seen = Vec::new();
    for _ in 0..5 {
        let [few, many] = [10, 200].map(|readers| time_to_come_in(&server, readers, claim));
        if many < few * 8 {
            return;
        }
        seen.push((few, many));
    }
    panic!("each takes a long look: {seen:?}");
}

#[test]
fn the_timer_removes_many_readers_that_never_released_part_by_part() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    let read = |at| format!("RLOCK.ACQUIRE k r{at} 60000 READ");
    conn.pipeline(&(0..3000).map(read).collect::<Vec<_>>());
    // Before the leases end: the timer removes the first readers while the last are renewed.
    let mut feed = Feed::of(&server);
    let renew = |at| format!("RLOCK.RENEW k r{at} 1 READ");
    conn.pipeline(&(0..3000).map(renew).collect::<Vec<_>>());
    until("only alice is left", || {
        // A reader that begins may put the lock on the timer's list, but removes no field itself.
        let replies = conn.pipeline(&[
            "MULTI",
            "HLEN k",
            "RLOCK.ACQUIRE k bob 30000 READ",
            "RLOCK.RELEASE k bob READ",
            "HLEN k",
            "EXEC",
        ]);
        let in_transaction = replies[5].array();
        assert_eq!(in_transaction[0], in_transaction[3]);
        in_transaction[3] == 2
    });
    let news = feed.news();
    let is_removal = |line: &&String| line.starts_with("HDEL k r");
    let removed = |part: &[String]| part.iter().filter(is_removal).count();
    let parts: Vec<_> = news.split(|line| line == "MULTI").map(removed).collect();
    assert_eq!(parts.iter().sum::<usize>(), 3000);
    // Of a large hash the server shows a bucket at a time, which may hold a few more.
    assert!(parts.iter().all(|part| *part < 1100), "{parts:?}");
}

#[test]
fn readers_that_never_release_leave_no_more_fields_for_each_that_comes() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    for round in 0..5 {
        let read = |at| format!("RLOCK.ACQUIRE k r{round}:{at} 1 READ");
        conn.pipeline(&(0..1000).map(read).collect::<Vec<_>>());
        until("few are left", || {
            conn.run("RLOCK.ACQUIRE k bob 1 READ").held();
            conn.run("HLEN k").int() < 100
        });
    }
}

#[test]
fn a_writer_at_the_head_comes_in_with_the_last_readers_release() {
    let server = Server::start();
    let mut alice = server.connect();
    takes(&mut alice, "alice", "READ");
    takes(&mut alice, "alice", "READ");
    let mut bob = waits(&server, "bob", "WRITE");
    assert_eq!(alice.run("RLOCK.RELEASE k alice READ"), 1);
    bob.expect_nothing_yet();
    let replies = alice.pipeline(&[
        "RLOCK.RELEASE k alice READ",
        "RLOCK.ACQUIRE k carol 30000 READ",
        "RLOCK.ACQUIRE k alice 30000 READ",
    ]);
    assert_eq!(replies[0], 0);
    assert!(replies[1].refused() > 20_000);
    assert!(replies[2].refused() > 20_000);
    bob.read().held();
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
}

#[test]
fn a_holder_enters_again_past_the_queue() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    let mut bob = waits(&server, "bob", "WRITE");
    assert_eq!(takes(&mut conn, "alice", "READ").0, 2, "a reader");
    conn.run("RLOCK.ACQUIRE k carol 30000 READ").refused();
    for left in [1, 0] {
        assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), left);
    }
    bob.read().held();
    let mut carol = waits(&server, "carol", "READ");
    assert_eq!(takes(&mut conn, "bob", "WRITE").0, 2, "a writer");
    assert_eq!(takes(&mut conn, "bob", "READ").0, 1, "and as a reader");
    carol.expect_nothing_yet();
    assert_eq!(server.waiting_owners("k"), ["carol"]);
}

#[test]
fn a_writer_that_becomes_a_reader_lets_the_readers_behind_it_in() {
    let server = Server::start();
    let mut alice = server.connect();
    takes(&mut alice, "alice", "WRITE");
    takes(&mut alice, "alice", "READ");
    let mut bob = waits(&server, "bob", "READ");
    let mut carol = waits(&server, "carol", "READ");
    let mut dave = waits(&server, "dave", "WRITE");
    let mut erin = waits(&server, "erin", "READ");
    let replies = alice.pipeline(&["RLOCK.RELEASE k alice WRITE", "HLEN k"]);
    assert_eq!(
        (&replies[0], &replies[1]),
        (&0.into(), &4.into()),
        "mode and three readers"
    );
    bob.read().held();
    carol.read().held();
    dave.expect_nothing_yet();
    erin.expect_nothing_yet();
    for owner in ["alice", "bob", "carol"] {
        releases(&server, owner, "READ");
    }
    dave.read().held();
    erin.expect_nothing_yet();
}

#[test]
fn a_writer_that_leaves_the_queue_lets_the_readers_behind_it_in() {
    let ways: [(&str, &dyn Fn(&Server, Conn, i64)); 4] = [
        ("cancelled", &|server, mut bob, _| {
            assert_eq!(server.run("RLOCK.CANCEL k bob"), 1);
            assert!(bob.read().refused() > 20_000);
        }),
        ("killed", &|server, mut bob, id| {
            assert_eq!(server.run(format!("CLIENT KILL ID {id}")), 1);
            bob.read_to_end();
        }),
        ("gone", &|_, bob, _| bob.close()),
        ("unblocked", &|server, mut bob, id| {
            if Version::at_hand().can_unblock_waiters() {
                assert_eq!(server.run(format!("CLIENT UNBLOCK {id}")), 1);
                assert!(bob.read().refused() > 20_000);
            } else {
                assert_eq!(server.run(format!("CLIENT UNBLOCK {id}")), 0);
                server.run("RLOCK.CANCEL k bob");
            }
        }),
    ];
    for (way, leave) in ways {
        let server = Server::start();
        takes(&mut server.connect(), "alice", "READ");
        let bob = waits(&server, "bob", "WRITE");
        let id = server.run("RLOCK.INFO k").get("queue").array()[0]
            .get("client-id")
            .int();
        let mut carol = waits(&server, "carol", "READ");
        let mut dave = waits(&server, "dave", "READ");
        let mut erin = waits(&server, "erin", "WRITE");
        leave(&server, bob, id);
        assert_eq!(carol.read().held().0, 1, "{way}");
        assert_eq!(dave.read().held().0, 1, "{way}");
        erin.expect_nothing_yet();
        assert_eq!(
            fields(&server, "k"),
            as_fields("mode=read alice=1 carol=1 dave=1"),
            "{way}"
        );
    }
}

#[test]
fn a_writer_whose_wait_is_over_lets_the_readers_behind_it_in() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    takes(&mut conn, "alice", "READ");
    // In one turn: on a busy machine the one wait might be over before the other begins.
    let places = conn.pipeline(&[
        "RLOCK.ACQUIRE k bob 30000 WRITE QUEUE 100 SESSION s",
        "RLOCK.ACQUIRE k carol 30000 READ QUEUE 0 SESSION s",
    ]);
    assert_eq!([places[0].queued(), places[1].queued()], [1, 2]);
    let told = next_events(&mut life);
    let kinds: Vec<_> = told.iter().map(|(event, _)| event.as_str()).collect();
    assert_eq!(kinds, ["timeout k bob", "granted k carol"]);
}

/// How late after the end of the lease a waiting writer knows of its grant. The reader's lease is
/// made short and its end asked for in one step: it cannot be over in between.
fn delay_of_a_writer(server: &Server, shorten: &[&str]) -> Duration {
    let mut conn = server.connect();
    conn.run("FLUSHALL");
    takes(&mut conn, "alice", "READ");
    let mut bob = waits(server, "bob", "WRITE");
    let ask = format!("PEXPIRETIME {}", timeout("alice", 1));
    let step = [&["MULTI", RENEW_SHORT], shorten, &[&*ask, "EXEC"]].concat();
    let replies = conn.pipeline(&step).pop().unwrap();
    let replies = replies.array();
    assert_eq!(replies[0], 1, "{replies:?}");
    let end = replies.last().unwrap().int();
    bob.read().held();
    let end = SystemTime::UNIX_EPOCH + Duration::from_millis(end.try_into().unwrap());
    let now = SystemTime::now().duration_since(end);
    now.expect("not granted before the end")
}

const RENEW_SHORT: &str = "RLOCK.RENEW k alice 60 READ";

#[test]
fn a_writer_comes_in_within_ten_milliseconds_of_the_last_readers_end() {
    let server = Server::start();
    server.run("DEBUG SET-ACTIVE-EXPIRE 0");
    let carols = format!("PSETEX {} 30000 1", timeout("carol", 1));
    let script = "EVAL redis.call('PEXPIRE',KEYS[1],30000) 1 k";
    let shrinks: [(&str, &[&str]); 3] = [
        ("renewed to a shorter lease", &[]),
        (
            "beside another reader that leaves",
            &[
                "HINCRBY k carol 1",
                "PEXPIRE k 30000",
                &carols,
                "RLOCK.RELEASE k carol READ",
            ],
        ),
        // The module learns of it when the lease it knows of ends, and looks anew.
        ("a hash that somebody else let live longer", &[script]),
    ];
    for (what, shrink) in shrinks {
        on_time(what, &server, Duration::from_millis(10), |_| {
            delay_of_a_writer(&server, shrink)
        });
    }
}

/// As Redisson leaves it: a hash that lives longer than the reader in it.
#[test]
fn a_writer_behind_a_zombie_comes_in_when_the_timeout_key_ends() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("HSET k mode read alice 1 dead 3");
    conn.run("PEXPIRE k 30000");
    let begun = Instant::now();
    conn.run(format!("PSETEX {} 400 1", timeout("alice", 1)));
    let told = conn.run("RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 0");
    assert_eq!(told.held().0, 1);
    // The server counts from the millisecond in which its turn began.
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(395), "{took:?}");
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
    assert!(conn.run("PTTL k").int() > 20_000);
}

#[test]
fn a_timeout_key_deleted_by_others_is_noticed_by_the_leases_end() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    let mut bob = waits(&server, "bob", "WRITE");
    let delete = format!("DEL {}", timeout("alice", 1));
    let replies = conn.pipeline(&["RLOCK.RENEW k alice 500 READ", &delete]);
    assert_eq!(replies, [1, 1]);
    bob.read().held();
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
}

#[test]
fn whatever_frees_a_read_write_lock_lets_the_next_in() {
    let server = Server::start();
    for (held, waiting) in [("READ", "WRITE"), ("WRITE", "READ"), ("WRITE", "WRITE")] {
        for freeing in [
            "DEL k",
            "UNLINK k",
            "FLUSHALL",
            "FLUSHDB",
            "RENAME k elsewhere",
            "MOVE k 1",
            "SWAPDB 0 2",
            "PEXPIREAT k 1",
            "PEXPIRE k 30",
            "EVAL redis.call('DEL',KEYS[1]) 1 k",
        ] {
            let mut conn = server.connect();
            takes(&mut conn, "alice", held);
            let mut bob = waits(&server, "bob", waiting);
            // Not on this connection: Valkey 8.1 leaves one in the other database after MOVE.
            server.run(freeing);
            let (count, _) = bob.read().held();
            assert_eq!(count, 1, "{freeing}, {held}, {waiting}");
            let expected = match waiting {
                "READ" => as_fields("mode=read bob=1"),
                _ => as_fields("mode=write bob:write=1:t"),
            };
            assert_eq!(fields(&server, "k"), expected, "{freeing}");
            assert_eq!(
                conn.run(format!("RLOCK.RENEW k alice 30000 {held}")),
                0,
                "{freeing}"
            );
            assert_eq!(
                conn.run(format!("RLOCK.RENEW k bob 30000 {waiting}")),
                1,
                "{freeing}"
            );
            conn.run("FLUSHALL");
        }
    }
}

#[test]
fn evicted_locks_and_timeout_keys_let_the_next_in() {
    let server = Server::builder()
        .config("maxmemory-policy volatile-ttl")
        .start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 10000 READ").held();
    let mut bob = waits(&server, "bob", "WRITE");
    until("all is evicted", || {
        conn.pipeline(&[
            "CONFIG SET maxmemory 1",
            "EXISTS k",
            "CONFIG SET maxmemory 0",
        ]);
        server.info_number("evicted_keys") > 0
    });
    bob.read().held();
}

#[test]
fn the_kind_is_the_holders_or_that_of_the_first_waiter() {
    let server = Server::start();
    let mut conn = server.connect();
    let wrong = |conn: &mut Conn, command: &str| {
        let error = conn.run(command).error();
        assert!(error.starts_with("WRONGKIND "), "{command}: {error}");
    };
    conn.take("k", "alice");
    for mode in ["READ", "WRITE", "READ BLOCK 0", "WRITE BLOCK 0"] {
        wrong(&mut conn, &format!("RLOCK.ACQUIRE k bob 1000 {mode}"));
    }
    for mode in ["READ", "WRITE"] {
        wrong(&mut conn, &format!("RLOCK.RELEASE k alice {mode}"));
        wrong(&mut conn, &format!("RLOCK.RENEW k alice 1000 {mode}"));
    }
    let mut bob = server.wait_in_queue("k", "bob");
    // A script makes it the other kind: the waiters stay.
    conn.run("MULTI");
    conn.pipeline(&[
        "DEL k",
        "HSET k mode write carol:write 1",
        "PEXPIRE k 30000",
    ]);
    conn.run("EXEC");
    bob.expect_nothing_yet();
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    wrong(&mut conn, "RLOCK.ACQUIRE k dave 1000");
    wrong(&mut conn, "RLOCK.RELEASE k carol");
    // And is served when that hold ends.
    assert_eq!(conn.run("RLOCK.RELEASE k carol WRITE"), 0);
    assert_eq!(bob.read().held().0, 1);
    assert_eq!(server.holder("k").as_deref(), Some("bob"));
    // Free, and promised to a reader.
    conn.run("DEL k");
    takes(&mut conn, "alice", "WRITE");
    let mut erin = waits(&server, "erin", "READ");
    let replies = conn.pipeline(&["DEL k", "RLOCK.ACQUIRE k frank 1000"]);
    assert!(replies[1].error().starts_with("WRONGKIND "), "{replies:?}");
    erin.read().held();
}

#[test]
fn a_reader_that_would_wait_to_write_is_refused() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "bob", "READ");
    let upgrade = "RLOCK.ACQUIRE k alice 30000 WRITE";
    assert!(conn.run(upgrade).refused() > 20_000, "without waiting");
    for wait in [
        "BLOCK 0",
        "BLOCK 60000",
        "QUEUE 0 SESSION s",
        "QUEUE 5 SESSION s",
    ] {
        let error = conn.run(format!("{upgrade} {wait}")).error();
        assert!(error.starts_with("DEADLOCK "), "{wait}: {error}");
        assert!(
            error.contains("'alice'") && error.contains("'k'"),
            "{error}"
        );
    }
    assert_eq!(server.info_number("rlock_deadlocks_refused"), 4);
    // Alone, too: it is the holder that it would wait for.
    releases(&server, "bob", "READ");
    let error = conn.run(format!("{upgrade} BLOCK 0")).error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
    // Also while it only waits to read, ahead of its own wait.
    releases(&server, "alice", "READ");
    takes(&mut conn, "carol", "WRITE");
    queues(&mut conn, "alice", "READ");
    let error = conn.run(format!("{upgrade} BLOCK 0")).error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
    assert_eq!(server.waiting_owners("k"), ["alice"]);
    releases(&server, "carol", "WRITE");
    life.run("RLOCK.EVENTS s").granted("k", "alice");
}

#[test]
fn readers_and_writers_in_a_circle_of_two_locks() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "bob", "READ");
    conn.take("plain", "carol");
    let _alice = server.wait_in_queue("plain", "alice");
    let error = conn
        .run("RLOCK.ACQUIRE k carol 30000 WRITE BLOCK 0")
        .error();
    assert_eq!(
        error,
        "DEADLOCK 2 owners would wait for each other: 'carol' waits for 'alice' at 'k', \
         'alice' waits for 'carol' at 'plain'"
    );
    takes(&mut conn, "carol", "READ"); // reading waits for nobody
    releases(&server, "carol", "READ");
    releases(&server, "alice", "READ");
    let _carol = waits(&server, "carol", "WRITE"); // for bob alone
    let error = conn.run("RLOCK.ACQUIRE plain bob 30000 BLOCK 0").error();
    assert!(error.starts_with("DEADLOCK "), "{error}");
}

#[test]
fn once_looks_at_the_mode_named() {
    let server = Server::start();
    let _life = server.session_connection("s");
    let mut conn = server.connect();
    let token = takes(&mut conn, "alice", "WRITE").1;
    assert_eq!(takes(&mut conn, "alice", "WRITE ONCE"), (1, token));
    let (count, read) = takes(&mut conn, "alice", "READ ONCE");
    assert_eq!(count, 1, "a first hold to read");
    assert_eq!(takes(&mut conn, "alice", "ONCE READ"), (1, read));
    assert_eq!(
        fields(&server, "k"),
        as_fields("mode=write alice:write=1:t alice=1")
    );
    assert_eq!(queues(&mut conn, "bob", "WRITE"), 1);
    let once = |mode| format!("RLOCK.ACQUIRE k bob 30000 {mode} QUEUE 0 SESSION s ONCE");
    assert_eq!(conn.run(once("WRITE")).queued(), 1, "the same place");
    let error = conn.run(once("READ")).error();
    assert!(error.starts_with("WAITING "), "another wait: {error}");
    assert_eq!(server.waiting_owners("k"), ["bob"]);
    assert_eq!(conn.run("RLOCK.CANCEL k bob"), 1);
    assert!(server.waiting_owners("k").is_empty());
}

#[test]
fn an_owner_stands_in_a_queue_once_whatever_the_mode() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "WRITE");
    let mut bob = waits(&server, "bob", "WRITE");
    let mut carol = waits(&server, "carol", "READ");
    for (owner, mode, refusal) in [
        ("bob", "WRITE", "WAITING "),
        ("bob", "READ", "WAITING "),
        ("carol", "READ", "WAITING "),
        // She would wait for herself.
        ("carol", "WRITE", "DEADLOCK "),
    ] {
        let again = format!("RLOCK.ACQUIRE k {owner} 30000 {mode} BLOCK 0");
        let error = conn.run(again).error();
        assert!(error.starts_with(refusal), "{owner} {mode}: {error}");
    }
    bob.expect_nothing_yet();
    carol.expect_nothing_yet();
    assert_eq!(server.waiting_owners("k"), ["bob", "carol"]);
}

#[test]
fn inside_multi_and_scripts_no_command_waits_and_hand_overs_happen() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "WRITE");
    let mut readers = ["bob", "carol"].map(|owner| waits(&server, owner, "READ"));
    let replies = conn.pipeline(&[
        "MULTI",
        "RLOCK.ACQUIRE k dave 30000 WRITE BLOCK 0",
        "RLOCK.RELEASE k alice WRITE",
        "HLEN k",
        "RLOCK.ACQUIRE k dave 30000 READ BLOCK 0",
        "EXEC",
    ]);
    let results = replies[5].array();
    assert!(results[0].refused() > 20_000);
    assert_eq!(results[2], 3, "granted inside: {results:?}");
    assert_eq!(results[3].held().0, 1);
    for reader in &mut readers {
        reader.read().held();
    }
    let mut erin = waits(&server, "erin", "WRITE");
    let script = "for i, owner in ipairs(ARGV) do
        redis.call('RLOCK.RELEASE', KEYS[1], owner, 'READ') end
        return {redis.call('HGET', KEYS[1], 'erin:write'),
            redis.call('RLOCK.ACQUIRE', KEYS[1], 'bob', '30000', 'READ', 'BLOCK', '0')[1]}";
    let told = conn.cmd(&["EVAL", script, "1", "k", "bob", "carol", "dave"]);
    assert!(told.array()[0].text().starts_with("1:t"), "{told:?}");
    assert_eq!(told.array()[1], 0);
    erin.read().held();
    assert!(server.waiting_owners("k").is_empty());
}

#[test]
fn a_reader_killed_in_the_turn_of_its_grant_keeps_nothing() {
    let server = Server::start();
    let mut alice = server.connect();
    takes(&mut alice, "alice", "WRITE");
    let _bob = waits(&server, "bob", "READ");
    let mut carol = waits(&server, "carol", "READ");
    let id = server.run("RLOCK.INFO k").get("queue").array()[0]
        .get("client-id")
        .int();
    let kill = format!("CLIENT KILL ID {id}");
    alice.pipeline(&["RLOCK.RELEASE k alice WRITE", &kill]);
    carol.read().held();
    until("bob's hold is taken back", || {
        fields(&server, "k") == as_fields("mode=read carol=1")
    });
    assert_eq!(server.run(format!("EXISTS {}", timeout("bob", 1))), 0);

    // Of a writer killed so, the lock goes on to the readers behind it.
    let mut dave = waits(&server, "dave", "WRITE");
    let id = server.run("RLOCK.INFO k").get("queue").array()[0]
        .get("client-id")
        .int();
    let mut line = ["erin", "frank"].map(|owner| waits(&server, owner, "READ"));
    let kill = format!("CLIENT KILL ID {id}");
    alice.pipeline(&["RLOCK.RELEASE k carol READ", &kill]);
    dave.read_to_end();
    for reader in &mut line {
        reader.read().held();
    }
    assert_eq!(fields(&server, "k"), as_fields("mode=read erin=1 frank=1"));
}

#[test]
fn a_read_that_cannot_be_delivered_leaves_those_granted_with_it() {
    let server = Server::start();
    let mut alice = server.connect();
    takes(&mut alice, "alice", "WRITE");
    let _killed = waits(&server, "bob", "READ");
    let id = server.run("RLOCK.INFO k").get("queue").array()[0]
        .get("client-id")
        .int();
    let mut carol = waits(&server, "carol", "READ");
    let kill = format!("CLIENT KILL ID {id}");
    alice.pipeline(&["RLOCK.RELEASE k alice WRITE", &kill]);
    let token = carol.read().held().1;
    until("one is left", || {
        fields(&server, "k") == as_fields("mode=read carol=1")
    });
    let renew = format!("RLOCK.RENEW k carol 30000 READ TOKEN {token}");
    assert_eq!(alice.run(renew), 1);
    releases(&server, "carol", "READ");
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn sessions_hear_of_reads_and_writes_granted_and_timed_out() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    takes(&mut conn, "alice", "WRITE");
    assert_eq!(queues(&mut conn, "bob", "READ"), 1);
    assert_eq!(queues(&mut conn, "carol", "READ"), 2);
    assert_eq!(queues(&mut conn, "dave", "WRITE"), 3);
    let short = "RLOCK.ACQUIRE k erin 30000 READ QUEUE 20 SESSION s";
    assert_eq!(conn.run(short).queued(), 4);
    let told = next_events(&mut life);
    assert_eq!(told[0].0, "timeout k erin");
    assert!(told[0].1.int() > 20_000);
    releases(&server, "alice", "WRITE");
    let told = next_events(&mut life);
    let kinds: Vec<_> = told.iter().map(|(event, _)| event.as_str()).collect();
    assert_eq!(kinds, ["granted k bob", "granted k carol"]);
    let bobs = told[0].1.int();
    assert_eq!(
        conn.run(format!("GET {}", timeout("bob", 1))),
        bobs.to_string()
    );
    releases(&server, "bob", "READ");
    no_events(&mut life);
    releases(&server, "carol", "READ");
    life.run("RLOCK.EVENTS s").granted("k", "dave");
}

#[test]
fn sessions_are_told_of_lost_holds_and_each_reader_at_its_own_end() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    takes(&mut conn, "other", "READ");
    conn.run("RLOCK.ACQUIRE k alice 60 READ SESSION s").held();
    let told = next_events(&mut life);
    assert_eq!(
        told,
        [("lost k alice".to_owned(), "expired".into())],
        "beside a reader that lives"
    );
    assert_eq!(server.info_number("rlock_session_holds"), 0);
    for (command, mode, reason) in [
        ("RLOCK.BREAK k", "READ", "broken"),
        ("DEL k", "READ", "deleted"),
        ("RLOCK.RENEW k alice 30 READ", "READ", "expired"),
        ("RLOCK.BREAK k", "WRITE", "broken"),
        ("DEL k", "WRITE", "deleted"),
        ("RLOCK.RENEW k alice 30 WRITE", "WRITE", "expired"),
    ] {
        conn.run("FLUSHALL");
        takes_for(&mut conn, "alice", mode);
        conn.run(command);
        let told = next_events(&mut life);
        assert_eq!(
            told,
            [("lost k alice".to_owned(), reason.into())],
            "{command} of {mode}"
        );
        no_events(&mut life);
    }
}

#[test]
fn reads_and_writes_end_with_their_session() {
    for grace in [0, 100] {
        let server = Server::start();
        let mut conn = server.connect();
        let mut life = server.connect();
        life.run(format!("RLOCK.EVENTS s GRACE {grace}")).events();
        takes_for(&mut conn, "alice", "WRITE");
        takes_for(&mut conn, "alice", "READ");
        takes_for(&mut conn, "alice", "READ");
        let mut bob = waits(&server, "bob", "READ");
        let mut carol = waits(&server, "carol", "WRITE");
        life.close();
        bob.read().held();
        assert_eq!(
            fields(&server, "k"),
            as_fields("mode=read bob=1"),
            "grace {grace}"
        );
        assert_eq!(server.run("DBSIZE"), 2);
        releases(&server, "bob", "READ");
        carol.read().held();
        assert_eq!(server.info_number("rlock_sessions"), 0);
        assert_eq!(server.info_number("rlock_session_holds"), 0);
    }
}

#[test]
fn one_mode_of_an_owner_ends_with_its_session_and_the_other_stays() {
    let server = Server::start();
    let mut conn = server.connect();
    let life = server.session_connection("s");
    takes_for(&mut conn, "alice", "WRITE");
    takes(&mut conn, "alice", "READ");
    let mut bob = waits(&server, "bob", "READ");
    life.close();
    bob.read().held();
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=1 bob=1"));
    let life = server.session_connection("s");
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ SESSION s"), 1);
    let mut carol = waits(&server, "carol", "WRITE");
    releases(&server, "bob", "READ");
    carol.expect_nothing_yet();
    life.close();
    carol.read().held();
}

#[test]
fn grants_that_a_session_was_not_told_live_for_its_grace() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.connect();
    life.run("RLOCK.EVENTS s GRACE 200").events();
    takes(&mut conn, "alice", "WRITE");
    queues(&mut conn, "bob", "READ");
    let mut carol = waits(&server, "carol", "READ");
    releases(&server, "alice", "WRITE");
    carol.read().held();
    let begun = Instant::now();
    life.close();
    until("bob's grant is over", || {
        fields(&server, "k") == as_fields("mode=read carol=1")
    });
    // The server counts from the millisecond in which its turn began.
    assert!(begun.elapsed() >= Duration::from_millis(195));
    assert_eq!(server.run(format!("EXISTS {}", timeout("bob", 1))), 0);
}

#[test]
fn a_server_that_becomes_a_replica_tells_its_readers_and_writers() {
    let server = Server::start();
    takes(&mut server.connect(), "alice", "READ");
    let mut line =
        [("bob", "WRITE"), ("carol", "READ")].map(|(owner, mode)| waits(&server, owner, mode));
    assert_eq!(server.run("REPLICAOF 127.0.0.1 1"), "OK");
    for waiter in &mut line {
        let told = waiter.read();
        assert!(told.error().starts_with("UNBLOCKED "), "{told:?}");
    }
    assert_eq!(server.run("REPLICAOF NO ONE"), "OK");
    assert!(server.waiting_owners("k").is_empty());
    let mut dave = waits(&server, "dave", "WRITE");
    releases(&server, "alice", "READ");
    dave.read().held();
}

#[test]
fn under_memory_pressure_only_acquire_is_refused() {
    let server = Server::builder()
        .config("maxmemory-policy noeviction")
        .start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "alice", "READ");
    let mut bob = waits(&server, "bob", "WRITE");
    let mut carol = waits(&server, "carol", "READ");
    conn.run("CONFIG SET maxmemory 1");
    for command in [
        "RLOCK.ACQUIRE free carol 1000 READ",
        "RLOCK.ACQUIRE k alice 1000 READ",
        "RLOCK.ACQUIRE k alice 1000 READ ONCE",
    ] {
        let error = conn.run(command).error();
        assert!(error.starts_with("OOM "), "{command}: {error}");
    }
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ"), 1);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ LEASE 30000"), 1);
    releases(&server, "alice", "READ");
    bob.read().held();
    assert_eq!(conn.run("RLOCK.RENEW k bob 30000 WRITE"), 1);
    assert_eq!(conn.run("RLOCK.BREAK k"), 1);
    carol.read().held();
}

#[test]
fn nothing_is_written_while_clients_are_paused() {
    let server = Server::builder()
        .config("repl-ping-replica-period 3600")
        .start();
    let _feed = Feed::of(&server); // without a replica the offset would not count
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    let mut bob = waits(&server, "bob", "WRITE");
    let mut carol = waits(&server, "carol", "READ");
    conn.pipeline(&["RLOCK.RENEW k alice 50 READ", "CLIENT PAUSE 3600000 WRITE"]);
    until("the lease has ended", || server.run("PTTL k").int() < 0);
    let offset = server.info_number("master_repl_offset");
    bob.expect_nothing_yet();
    assert_eq!(server.info_number("master_repl_offset"), offset);
    assert_eq!(conn.run("CLIENT UNPAUSE"), "OK");
    bob.read().held();
    carol.expect_nothing_yet();
}

#[test]
fn a_full_queue_refuses_readers_and_writers() {
    let server = Server::builder()
        .config("rlock.max-waiters-per-lock 2")
        .start();
    takes(&mut server.connect(), "alice", "WRITE");
    let _line =
        [("bob", "READ"), ("carol", "WRITE")].map(|(owner, mode)| waits(&server, owner, mode));
    for mode in ["READ", "WRITE"] {
        let error = server
            .run(format!("RLOCK.ACQUIRE k dave 1000 {mode} BLOCK 0"))
            .error();
        assert!(error.starts_with("QUEUEFULL "), "{error}");
    }
    assert_eq!(
        server.run("RLOCK.LIST").array()[0].array()[1],
        Reply::Int(2)
    );
}

/// A wait for several locks ends when its key becomes a read-write lock. The next waiter is let in
/// by its own owner's holds, and not by those of the other's owner.
#[test]
fn who_waits_behind_one_for_several_locks_is_not_let_in_beside_the_writer() {
    for mode in ["READ", "WRITE"] {
        let server = Server::start();
        let mut conn = server.connect();
        let mut session = server.session_connection("s");
        conn.run("RLOCK.ACQUIRE w m 30000 WRITE").held();
        conn.take("k", "a");
        conn.run("RLOCK.MACQUIRE m 30000 2 k j QUEUE 0 SESSION s")
            .queued();
        let queue = format!("RLOCK.ACQUIRE k o 30000 {mode} QUEUE 0 SESSION s");
        let replies = conn.pipeline(&["RENAME w k", &queue]);
        assert_eq!(replies[1].queued(), 2);
        let mut told = Vec::new();
        until("the wait for several is told", || {
            told.extend(session.run("RLOCK.EVENTS s").events());
            !told.is_empty()
        });
        assert_eq!(conn.run("RLOCK.RENEW k m 30000 WRITE"), 1);
        let renewed = conn.run(format!("RLOCK.RENEW k o 30000 {mode}"));
        assert_eq!(renewed, 0, "{mode} beside the writer m: {told:?}");
    }
}
