//! What has been given back is given back.

use rlock_tests::{Conn, Server, until};

/// Bytes in use, after the server has had time to free what it frees later.
fn used_memory(server: &Server) -> i64 {
    server.run("MEMORY PURGE");
    server.info_number("used_memory")
}

/// Sends the commands in bulk and counts the replies, of which none may be an error.
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
fn waiters_that_have_gone_give_their_memory_back() {
    const WAITERS: usize = 300;
    let server = Server::start();
    let mut alice = server.connect();
    let mut round = || {
        alice.take("k", "alice");
        let mut line: Vec<_> = (0..WAITERS).map(|_| server.connect()).collect();
        for (number, conn) in line.iter_mut().enumerate() {
            conn.send(format!("RLOCK.ACQUIRE k owner{number} 30000 BLOCK 0"));
        }
        until("all wait", || server.line("k").len() == WAITERS);
        // Some are cancelled, some hang up, some are granted.
        for number in 0..100 {
            assert_eq!(alice.run(format!("RLOCK.CANCEL k owner{number}")), 1);
        }
        line.drain(200..);
        until("a hundred are left", || server.line("k").len() == 100);
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
    let after = (0..3).map(|_| round()).min().unwrap();
    assert!(after - before < 200_000, "{} bytes more", after - before);
}
