//! The largest waits for several locks, and odd things under them: an answer, and soon.

use std::time::{Duration, Instant};

use rlock_tests::{Server, patience, until};

use crate::events::next_events;

const KEYS_MAX: i64 = 1024;
const WAITS: i64 = 20;

fn names() -> String {
    let names: Vec<_> = (0..KEYS_MAX).map(|i| format!("key{i}")).collect();
    names.join(" ")
}

/// The server answers, and since `before` was not at work for longer than a client would wait.
#[track_caller]
fn answers(server: &Server, before: &mut Duration, when: &str) {
    let now = server.processor_time();
    let took = now.saturating_sub(std::mem::replace(before, now));
    assert!(took < patience(Duration::from_secs(5)), "{when}: {took:?}");
}

/// A wait is looked at once, not once for each of its keys: what the server does in the background
/// once a second does not fill that second.
#[test]
fn many_waits_for_the_most_keys_do_not_keep_the_server_busy() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    let names = names();
    let of = |verb: &str| format!("RLOCK.{verb} {KEYS_MAX} {names}");
    conn.run(of("MACQUIRE holder 600000")).held();
    let mut at_work = server.processor_time();
    for waiter in 0..WAITS {
        let wait = of(&format!("MACQUIRE w{waiter} 600000")) + " QUEUE 0 SESSION s";
        assert_eq!(conn.run(wait).queued(), 1 + waiter);
        answers(&server, &mut at_work, "while they queue");
    }
    // Long enough for whatever is done once a second.
    let begun = Instant::now();
    std::thread::sleep(Duration::from_millis(2500));
    let took = server.processor_time().saturating_sub(at_work);
    let passed = begun.elapsed();
    assert!(took < passed / 4, "{took:?} of {passed:?}");
    assert_eq!(conn.run(of("MRELEASE holder")), KEYS_MAX);
    answers(&server, &mut at_work, "after the hand-over");
    assert_eq!(next_events(&mut life)[0].0, "granted key0 w0");
    assert_eq!(conn.run("FLUSHALL"), "OK");
    answers(&server, &mut at_work, "after all were deleted");
    let (mut lost, mut granted) = (0, Vec::new());
    while lost < KEYS_MAX || granted.is_empty() {
        for (event, _) in next_events(&mut life) {
            if event.starts_with("lost ") {
                lost += 1;
            } else {
                granted.push(event);
            }
        }
    }
    assert_eq!(granted, ["granted key0 w1"]);
    life.close();
    until("all has gone with the session", || conn.run("DBSIZE") == 0);
    answers(&server, &mut at_work, "at the end");
    assert_eq!(server.info_number("rlock_waiters"), 0);
}

/// Each waits for the locks on both its sides: every grant is looked for along the whole row.
#[test]
fn a_long_row_of_waits_for_two_locks_is_served_in_order() {
    const LOCKS: usize = 400;
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE lock0 holder 600000").held();
    for i in 0..LOCKS {
        let (left, right) = (format!("lock{i}"), format!("lock{}", i + 1));
        let wait = format!("RLOCK.MACQUIRE o{i} 30000 2 {left} {right} QUEUE 0 SESSION s");
        conn.run(wait).queued();
    }
    assert_eq!(conn.let_go("lock0", "holder"), 0);
    for i in 0..LOCKS {
        let (event, _) = next_events(&mut life).remove(0);
        assert_eq!(event, format!("granted lock{i} o{i}"));
        let release = format!("RLOCK.MRELEASE o{i} 2 lock{i} lock{}", i + 1);
        assert_eq!(conn.run(release), 2);
    }
    assert_eq!(server.run("DBSIZE"), 0);
    assert_eq!(server.info_number("rlock_waiters"), 0);
}

/// Written under waits for several: whatever is made of it, the waiters are told in the end.
#[test]
fn odd_things_under_waits_for_several_do_not_stop_the_server() {
    let server = Server::start();
    let mut conn = server.connect();
    for odd in [
        "SET y v",
        "RPUSH y a",
        "HSET y alice abc",
        "HSET y alice 2147483648",
        "HSET y alice 1 bob 1",
        "HSET y alice -1 fence t9223372036854775807",
        "HSET y fence t1",
        "HSET y mode read alice 2147483647",
        "HSET y mode write alice:write 1",
        "HSET y mode x",
        "HSET y bob 2147483647",
        "XADD y * a b",
    ] {
        conn.run("RLOCK.MACQUIRE alice 30000 2 x y").held();
        let mut bob = server.blocked_in("RLOCK.MACQUIRE bob 30000 3 x y z BLOCK 0");
        let mut carol = server.wait_in_queue("y", "carol");
        conn.pipeline(&["MULTI", "DEL y", odd, "PEXPIRE y 30", "EXEC"]);
        conn.run("RLOCK.MRELEASE alice 1 x");
        let told = bob.read();
        if !told.is_error() {
            assert!(told.held().0 >= 1, "{odd}");
            conn.run("RLOCK.MRELEASE bob 3 x y z");
            conn.run("DEL y");
        }
        let told = carol.read();
        assert!(told.is_error() || told.held().0 == 1, "{odd}: {told:?}");
        conn.run("FLUSHALL");
        assert_eq!(server.info_number("rlock_waiters"), 0, "{odd}");
    }
}
