//! Locks that were given back leave no memory behind.

use rlock_tests::{Conn, Reply, Server, until};

/// Bytes in use, after the server has had time for its deferred frees.
fn used_memory(server: &Server) -> i64 {
    server.run("MEMORY PURGE");
    server.info_number("used_memory")
}

/// Sends the commands in bulk and counts the replies. None may be an error.
fn run_all(conn: &mut Conn, commands: &[String]) {
    for reply in conn.pipeline(commands) {
        assert!(!reply.is_error(), "{reply:?}");
    }
}

#[test]
fn a_million_locks_taken_and_released_leave_nothing() {
    const LOCKS: usize = 1_000_000;
    const AT_ONCE: usize = 5_000;
    let server = Server::start();
    let mut conn = server.connect();
    let commands = |from: usize, verb: &str, rest: &str| -> Vec<String> {
        (from..from + AT_ONCE)
            .map(|i| format!("RLOCK.{verb} lock:{i} alice{rest}"))
            .collect()
    };
    let mut churn = |first: usize, last: usize| {
        for from in (first..last).step_by(AT_ONCE) {
            run_all(&mut conn, &commands(from, "ACQUIRE", " 30000"));
            run_all(&mut conn, &commands(from, "RELEASE", ""));
        }
    };
    churn(0, 2 * AT_ONCE); // what the server allocates once and keeps
    let before = used_memory(&server);
    churn(0, LOCKS);
    assert_eq!(server.run("DBSIZE"), 0);
    let grown = used_memory(&server) - before;
    assert!(
        grown < 500_000,
        "{grown} bytes more: half a byte a lock would be a leak already"
    );
}

#[test]
fn waiters_that_have_left_give_their_memory_back() {
    const WAITERS: usize = 300;
    let server = Server::start();
    let mut alice = server.connect();
    let mut round = || {
        alice.take("k", "alice");
        let mut line: Vec<_> = (0..WAITERS).map(|_| server.connect()).collect();
        for (number, conn) in line.iter_mut().enumerate() {
            conn.send(format!("RLOCK.ACQUIRE k owner{number} 30000 BLOCK 0"));
        }
        until("all wait", || server.waiting_owners("k").len() == WAITERS);
        // Some are cancelled, some hang up, some are granted.
        for number in 0..100 {
            assert_eq!(alice.run(format!("RLOCK.CANCEL k owner{number}")), 1);
        }
        line.drain(200..);
        until("a hundred are left", || {
            server.waiting_owners("k").len() == 100
        });
        alice.let_go("k", "alice");
        for (number, conn) in (100..200).zip(&mut line[100..]) {
            conn.read().held();
            conn.let_go("k", &format!("owner{number}"));
        }
        drop(line);
        until("all have gone", || {
            server.info_number("connected_clients") <= 3
        });
        used_memory(&server)
    };
    round();
    let before = round();
    for _ in 0..3 {
        round();
    }
    // For each that it tells in one turn of its event loop the server has a client of its own, of
    // 16 KB, and lets them go bit by bit: more of them where a slow machine made a turn long.
    until("it is given back", || {
        used_memory(&server) - before < 200_000
    });
}

/// Puts owners in queues, one for each command, for the session `s`. `lock` names the lock, with
/// the mode if it is not plain.
fn queue_all(conn: &mut Conn, waiters: usize, lock: impl Fn(usize) -> String) {
    for from in (0..waiters).step_by(1000) {
        let wait = |i| {
            let lock = lock(i);
            let (name, mode) = lock.split_once(' ').unwrap_or((&lock, ""));
            format!("RLOCK.ACQUIRE {name} owner{i} 600000 {mode} QUEUE 0 SESSION s")
        };
        let waits: Vec<_> = (from..waiters.min(from + 1000)).map(wait).collect();
        for reply in conn.pipeline(&waits) {
            reply.queued();
        }
    }
}

/// Ten thousand waiters of one session; `lock` says where each stands.
fn queued_waiters_are_small_and_leave_nothing(lock: impl Fn(usize) -> String) {
    const WAITERS: usize = 10_000;
    let server = Server::start();
    let mut conn = server.connect();
    for from in (0..WAITERS).step_by(1000) {
        let takes: Vec<_> = (from..from + 1000)
            .map(|i| {
                let lock = lock(i);
                let (name, mode) = lock.split_once(' ').unwrap_or((&lock, ""));
                format!("RLOCK.ACQUIRE {name} alice 600000 {mode} ONCE")
            })
            .collect();
        run_all(&mut conn, &takes);
    }
    let mut cost = || {
        let before = used_memory(&server);
        let life = server.session_connection("s");
        queue_all(&mut conn, WAITERS, &lock);
        assert_eq!(server.info_number("rlock_waiters"), 10_000);
        let with_them = used_memory(&server);
        life.close();
        until("the session is over", || {
            server.info_number("rlock_sessions") == 0
        });
        assert_eq!(server.info_number("rlock_waiters"), 0);
        (before, with_them - before)
    };
    cost(); // what the server allocates once and keeps
    let (before, grown) = cost();
    assert!(grown < 1024 * 10_000, "{grown} bytes for ten thousand");
    // On a busy machine more was there still for a moment: it may be buffers of clients.
    until("it is given back", || {
        used_memory(&server) - before < 100_000
    });
}

#[test]
fn ten_thousand_queued_waiters_on_as_many_locks_need_less_than_a_kilobyte_each() {
    queued_waiters_are_small_and_leave_nothing(|i| format!("lock{i}"));
}

#[test]
fn ten_thousand_queued_waiters_on_one_lock_need_less_than_a_kilobyte_each() {
    queued_waiters_are_small_and_leave_nothing(|_| "lock".to_owned());
}

#[test]
fn ten_thousand_queued_waiters_for_permits_need_less_than_a_kilobyte_each() {
    queued_waiters_are_small_and_leave_nothing(|_| "exports PERMITS 5 OF 5".to_owned());
}

#[test]
fn holders_of_permits_need_less_than_a_kilobyte_each_and_leave_nothing() {
    const HOLDERS: usize = 2_000;
    let server = Server::start();
    let mut conn = server.connect();
    let mut cost = || {
        let before = used_memory(&server);
        let life = server.session_connection("s");
        let take = |i| format!("RLOCK.ACQUIRE k owner{i} 600000 PERMITS 1 OF {HOLDERS} SESSION s");
        run_all(&mut conn, &(0..HOLDERS).map(take).collect::<Vec<_>>());
        assert_eq!(
            server.run("RLOCK.INFO k").get("permits"),
            &Reply::Int(2_000)
        );
        let with_them = used_memory(&server);
        life.close();
        until("all have been given back", || server.run("DBSIZE") == 0);
        assert_eq!(server.info_number("rlock_session_holds"), 0);
        (before, with_them - before)
    };
    cost(); // what the server allocates once and keeps
    let (before, grown) = cost();
    assert!(grown < 1024 * 2_000, "{grown} bytes for two thousand");
    until("it is given back", || {
        used_memory(&server) - before < 50_000
    });
}

#[test]
fn holders_of_permits_whose_leases_end_do_not_add_up() {
    let server = Server::start();
    let mut conn = server.connect();
    // With it the key stays, and their fields in it.
    conn.run("RLOCK.ACQUIRE k stays 600000 PERMITS 1 OF 100000")
        .held();
    for round in 0..20 {
        let take = |i| format!("RLOCK.ACQUIRE k owner{round}-{i} 1 PERMITS 1 OF 100000");
        run_all(&mut conn, &(0..200).map(take).collect::<Vec<_>>());
    }
    // So many may stay until the next grant.
    until("their fields are gone", || {
        conn.run("RLOCK.ACQUIRE k looks 1 PERMITS 1 OF 100000 ONCE")
            .held();
        server.run("HLEN k").int() <= 20
    });
}

/// The time of one of a hundred hand-overs with this number of waiters, in microseconds.
fn cost_of_hand_overs(waiters: usize, lock: impl Fn(usize) -> String) -> f64 {
    const HAND_OVERS: usize = 100;
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    for i in 0..waiters {
        conn.run(format!("RLOCK.ACQUIRE {} alice 600000 ONCE", lock(i)))
            .held();
    }
    queue_all(&mut conn, waiters, &lock);
    server.run("CONFIG RESETSTAT");
    for i in 0..HAND_OVERS {
        let name = lock(i);
        let holder = server.holder(&name).expect("a holder");
        assert_eq!(conn.let_go(&name, &holder), 0);
    }
    assert_eq!(life.run("RLOCK.EVENTS s").events().len(), HAND_OVERS);
    server.median_cost("rlock.release")
}

#[test]
fn a_hand_over_costs_the_same_however_many_are_queued() {
    let one_lock = |_| "lock".to_owned();
    let many_locks = |i| format!("lock{i}");
    // The best of several, since others use the machine's caches.
    let best = |waiters, lock: &dyn Fn(usize) -> String| {
        let costs = (0..3).map(|_| cost_of_hand_overs(waiters, lock));
        costs.fold(f64::INFINITY, f64::min)
    };
    for lock in [&one_lock as &dyn Fn(usize) -> String, &many_locks] {
        let (few, many) = (best(100, lock), best(10_000, lock));
        assert!(
            many < 3.0 * few,
            "{many} us among 10,000, {few} us among 100"
        );
    }
}

/// The time of a RENEW while its owner has this number of grants to fetch, in microseconds.
fn cost_of_renewals(unacknowledged: usize) -> f64 {
    let server = Server::start();
    let mut conn = server.connect();
    let mut life = server.session_connection("s");
    let all = |rest: &str| -> Vec<String> {
        let command = |i: usize| rest.replace('#', &i.to_string());
        (0..unacknowledged).map(command).collect()
    };
    run_all(&mut conn, &all("RLOCK.ACQUIRE lock# alice 600000"));
    run_all(
        &mut conn,
        &all("RLOCK.ACQUIRE lock# bob 600000 QUEUE 0 SESSION s"),
    );
    run_all(&mut conn, &all("RLOCK.RELEASE lock# alice"));
    run_all(&mut conn, &all("RLOCK.RENEW lock# bob 600000"));
    let cost = server.median_cost("rlock.renew");
    assert_eq!(life.all_events("s").len(), unacknowledged);
    cost
}

#[test]
fn a_renewal_costs_the_same_however_many_grants_are_unacknowledged() {
    let best = |unacknowledged| {
        let costs = (0..3).map(|_| cost_of_renewals(unacknowledged));
        costs.fold(f64::INFINITY, f64::min)
    };
    let (few, many) = (best(20), best(2000));
    assert!(many < 4.0 * few, "{many} us with 2,000, {few} us with 20");
}

#[test]
fn sessions_that_have_ended_give_their_memory_back() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut round = || {
        for session in 0..200 {
            let name = format!("session{session}");
            let life = server.session_connection(&name);
            conn.take_for("k", "bob", &name);
            conn.queue("k", "carol", &name);
            conn.take_for("lost", "bob", &name);
            conn.run("RLOCK.BREAK lost"); // told to nobody
            life.close();
            until("the hold is gone", || server.holder("k").is_none());
        }
        assert_eq!(server.info_number("rlock_session_holds"), 0);
        used_memory(&server)
    };
    round();
    let before = round();
    let after = (0..2).map(|_| round()).min().unwrap();
    assert!(after - before < 50_000, "{} bytes more", after - before);
}

/// Memory in use is as it was before the crowd came, once all of it has left.
#[track_caller]
fn leaves_nothing(size: usize, crowd: impl Fn(&Server, usize) -> Vec<Conn>) {
    // The log keeps its entries.
    let server = Server::builder().config("rlock.log-waits-ms 0").start();
    server.connect().take("k", "alice");
    let left = |crowd: Vec<Conn>| {
        drop(crowd);
        until("all have gone", || {
            server.info_number("connected_clients") <= 2
                && server.info_number("rlock_waiters") == 0
                && server.info_number("rlock_sessions") == 0
        });
    };
    // The server allocates this once and keeps it.
    left(crowd(&server, 50));
    let before = used_memory(&server);
    left(crowd(&server, size));
    // For seconds the server itself keeps clients of its own, of 16 KB each.
    until("their memory is given back", || {
        used_memory(&server) - before < 100_000
    });
}

#[test]
fn thousands_that_were_blocked_leave_nothing() {
    leaves_nothing(1_500, |server, size| {
        let wait = |number| {
            let mut conn = server.connect();
            conn.send(format!("RLOCK.ACQUIRE k owner{number} 600000 BLOCK 0"));
            conn
        };
        let crowd = (0..size).map(wait).collect();
        let size = i64::try_from(size).unwrap();
        until("all wait", || server.info_number("rlock_waiters") == size);
        crowd
    });
}

#[test]
fn thousands_of_sessions_leave_nothing() {
    leaves_nothing(20_000, |server, size| {
        let mut conn = server.connect();
        let events = |number| format!("RLOCK.EVENTS session-of-process-{number}");
        run_all(&mut conn, &(0..size).map(events).collect::<Vec<_>>());
        let size = i64::try_from(size).unwrap();
        assert_eq!(server.info_number("rlock_sessions"), size);
        vec![conn]
    });
}
