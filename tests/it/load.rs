//! Excessive load: many clients that end at once, clients that never read, noise at the
//! port. Traffic of others goes on, and nothing is left.

use std::io::Write as _;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply, Server, patience, under_valgrind, until};

use crate::noise::Noise;

/// Somebody takes and gives back a lock of its own all the while, and must never wait for long
/// while the server is at work on something else.
fn undisturbed(server: &Server, trouble: impl FnOnce()) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            let mut conn = server.connect();
            let (mut rounds, mut longest) = (0, Duration::ZERO);
            while !over.load(Ordering::Relaxed) || rounds < 10 {
                let before = server.processor_time();
                conn.take("own", "walter");
                assert_eq!(conn.let_go("own", "walter"), 0);
                longest = longest.max(server.processor_time().saturating_sub(before));
                rounds += 1;
            }
            (rounds, longest)
        });
        trouble();
        over.store(true, Ordering::Relaxed);
        let (rounds, longest) = traffic.join().expect("traffic goes on");
        assert!(
            longest < patience(Duration::from_secs(5)),
            "{rounds} rounds of others, the longest {longest:?}"
        );
    });
}

fn is_empty(server: &Server) {
    until("nobody waits, and nothing is held", || {
        server.info_number("rlock_waiters") == 0
            && server.info_number("rlock_sessions") == 0
            && server.info_number("rlock_session_holds") == 0
            && server.run("DBSIZE") == 0
    });
}

/// Connections of the user `crowd` that wait, each for one of the kinds of lock. Few wait for two,
/// since later waits look at each of them for a deadlock.
fn crowd(server: &Server, size: usize) -> Vec<Conn> {
    server.run("ACL SETUSER crowd on nopass ~* &* +@all");
    let join = |_| {
        let mut conn = server.connect();
        assert_eq!(conn.run("AUTH crowd x"), "OK");
        conn
    };
    let mut crowd: Vec<Conn> = (0..size).map(join).collect();
    let mut in_queue = 0;
    for (number, conn) in crowd.iter_mut().enumerate() {
        conn.send(match number % 20 {
            0 => format!("RLOCK.MACQUIRE {number} 30000 2 plain other BLOCK 0"),
            1..8 => format!("RLOCK.ACQUIRE plain {number} 30000 BLOCK 0"),
            8..14 => format!("RLOCK.ACQUIRE shared {number} 30000 READ BLOCK 0"),
            _ => format!("RLOCK.ACQUIRE shared {number} 30000 WRITE BLOCK 0"),
        });
        in_queue += if number % 20 == 0 { 2 } else { 1 };
        // On a busy machine a server that met all of them in one turn would be silent for long.
        if number % 250 == 249 || number + 1 == size {
            until("all so far wait", || {
                server.info_number("rlock_waiters") == in_queue
            });
        }
    }
    crowd
}

fn waiters_that_are_killed_at_once_leave_nothing(size: usize) {
    let server = Server::builder().config("maxclients 10000").start();
    let mut holder = server.connect();
    holder.run("RLOCK.ACQUIRE plain holder 600000").held();
    holder
        .run("RLOCK.ACQUIRE shared holder 600000 WRITE")
        .held();
    let crowd = crowd(&server, size);
    undisturbed(&server, || {
        let killed = holder.run("CLIENT KILL USER crowd").int();
        assert!(usize::try_from(killed).unwrap() >= size, "{killed}");
    });
    drop(crowd);
    until("all have left", || server.info_number("rlock_waiters") == 0);
    assert_eq!(holder.let_go("plain", "holder"), 0);
    assert_eq!(holder.run("RLOCK.RELEASE shared holder WRITE"), 0);
    is_empty(&server);
}

#[test]
fn five_thousand_that_wait_and_are_killed_at_once_leave_nothing() {
    waiters_that_are_killed_at_once_leave_nothing(5_000);
}

#[test]
fn smoke_three_hundred_that_wait_and_are_killed_at_once_leave_nothing() {
    waiters_that_are_killed_at_once_leave_nothing(300);
}

/// Each has a hold, a wait, a listener, and unacknowledged events.
#[test]
fn smoke_sessions_that_die_at_once_leave_nothing() {
    const SESSIONS: usize = 60;
    let server = Server::start();
    server.run("ACL SETUSER crowd on nopass ~* &* +@all");
    let mut holder = server.connect();
    holder.run("RLOCK.ACQUIRE plain holder 600000").held();
    let mut lives: Vec<Conn> = (0..SESSIONS).map(|_| server.connect()).collect();
    for (number, life) in lives.iter_mut().enumerate() {
        assert_eq!(life.run("AUTH crowd x"), "OK");
        let grace = if number % 2 == 0 { 0 } else { 30 };
        let listen = format!("RLOCK.EVENTS s{number} GRACE {grace}");
        life.run(&listen).events();
        life.take_for(&format!("own{number}"), "me", &format!("s{number}"));
        life.queue("plain", &format!("o{number}"), &format!("s{number}"));
        let shared = format!("RLOCK.ACQUIRE shared o{number} 600000 READ SESSION s{number}");
        life.run(shared).held();
        if number % 3 == 0 {
            holder.run(format!("RLOCK.BREAK own{number}"));
        } else {
            life.send(format!("{listen} BLOCK 0"));
        }
    }
    undisturbed(&server, || {
        // In one turn: the lock is granted to a session, and they are all gone.
        holder.pipeline(&["RLOCK.RELEASE plain holder", "CLIENT KILL USER crowd"]);
    });
    drop(lives);
    is_empty(&server);
}

#[test]
fn smoke_many_waiters_granted_and_killed_leave_nothing() {
    let server = Server::start();
    let mut holder = server.connect();
    holder.run("RLOCK.ACQUIRE plain holder 600000").held();
    holder
        .run("RLOCK.ACQUIRE shared holder 600000 WRITE")
        .held();
    let crowd = crowd(&server, if under_valgrind() { 100 } else { 400 });
    undisturbed(&server, || {
        // In one turn: all are granted in order to clients that have disconnected.
        holder.pipeline(&[
            "RLOCK.RELEASE plain holder",
            "RLOCK.RELEASE shared holder WRITE",
            "CLIENT KILL USER crowd",
        ]);
    });
    drop(crowd);
    is_empty(&server);
}

#[test]
fn smoke_a_client_that_never_reads_harms_only_itself() {
    let server = Server::builder()
        .config("client-output-buffer-limit normal 1mb 1mb 1")
        .start();
    let mut deaf = TcpStream::connect(server.address()).expect("the server listens");
    deaf.set_write_timeout(Some(patience(Duration::from_secs(10))))
        .expect("a timeout");
    let mut life = server.blocked_in("RLOCK.EVENTS deaf BLOCK 0");
    undisturbed(&server, || {
        let command = "RLOCK.INFO mine\r\nRLOCK.ACQUIRE mine me 30000\r\n";
        let batch = command.repeat(500);
        // Until the server reads no more of it, or has closed it.
        let deadline = Instant::now() + patience(Duration::from_secs(20));
        while deaf.write_all(batch.as_bytes()).is_ok() {
            assert!(Instant::now() < deadline, "the server takes anything");
        }
    });
    drop(deaf);
    let mut conn = server.connect();
    until("the server has closed it", || {
        !conn.run("CLIENT LIST").text().contains("cmd=rlock.acquire")
    });
    assert_eq!(conn.run("RLOCK.BREAK mine"), 1);
    conn.send("PING");
    assert_eq!(conn.read(), "PONG");
    assert!(life.read_now().is_none(), "a session nearby lives on");
    life.close();
    is_empty(&server);
}

#[test]
fn noise_at_the_port_disturbs_nobody() {
    let server = Server::start();
    let seed = u64::from(server.process_id());
    let mut noise = Noise::new(seed);
    let mut waiting = {
        server.run("RLOCK.ACQUIRE held alice 600000").held();
        server.wait_in_queue("held", "bob")
    };
    undisturbed(&server, || {
        noise.at_the_port(&server, 400);
    });
    assert_eq!(server.connect().let_go("held", "alice"), 0);
    waiting.read().held();
    assert_eq!(server.run("PING"), "PONG", "with seed {seed}");
}

/// Each renewal looks for the grants of that lock alone, and not through all that are on their way
/// to its owner, which would be the square of their number. So renewals by an owner with no grant
/// on its way cost as much, in a transaction with as many hand-overs.
#[test]
fn renewals_beside_thousands_of_undelivered_grants_cost_what_others_do() {
    let server = Server::builder().config("maxclients 10000").start();
    let mut admin = server.connect();
    let size = 3_000;
    let all = |command: fn(usize) -> String| (0..size).map(command).collect::<Vec<_>>();
    admin.pipeline(&all(|n| format!("RLOCK.ACQUIRE {n} h 600000")));
    admin.pipeline(&all(|n| format!("RLOCK.ACQUIRE y{n} y 600000")));
    let mut waiting: Vec<_> = (0..size).map(|_| server.connect()).collect();
    let mut took = |waiter: &str, release: Vec<String>, renew: Vec<String>| {
        for (number, conn) in waiting.iter_mut().enumerate() {
            conn.send(format!("RLOCK.ACQUIRE {number} {waiter} 600000 BLOCK 0"));
        }
        until("all wait", || server.info_number("rlock_waiters") == 3_000);
        let begin = vec!["MULTI".to_owned()];
        admin.pipeline(&[begin, release, renew].concat());
        let before = server.processor_time();
        let Reply::Array(replies) = admin.run("EXEC") else {
            panic!("not carried out")
        };
        let took = server.processor_time().saturating_sub(before);
        assert!(replies.iter().skip(size).all(|reply| *reply == 1));
        for conn in &mut waiting {
            conn.read();
        }
        took
    };
    let (from_h, from_x) = (
        all(|n| format!("RLOCK.RELEASE {n} h")),
        all(|n| format!("RLOCK.RELEASE {n} x")),
    );
    let own = took("x", from_h, all(|n| format!("RLOCK.RENEW {n} x 600000")));
    let others = took("z", from_x, all(|n| format!("RLOCK.RENEW y{n} y 600000")));
    let least = Duration::from_millis(20);
    assert!(
        own < others.max(least) * 4,
        "{own:?}, and {others:?} of somebody else"
    );
}

/// So many owners of one session wait for a lock, with these words behind each ACQUIRE.
fn queue_many(server: &Server, name: &str, words: &str, size: usize) -> Conn {
    let life = server.session_connection("s");
    let wait = |n| format!("RLOCK.ACQUIRE {name} owner{n} 600000 {words} QUEUE 0 SESSION s");
    server
        .connect()
        .pipeline(&(0..size).map(wait).collect::<Vec<_>>());
    life
}

/// The session's events, until their number is `size`; and how many the first call brought.
fn events_of_many(life: &mut Conn, size: usize) -> (usize, Vec<String>) {
    let mut all = Vec::new();
    let mut first = None;
    while all.len() < size {
        let events = life.read().events();
        first.get_or_insert(events.len());
        all.extend(events.into_iter().map(|(event, _)| event));
        if all.len() < size {
            life.send("RLOCK.EVENTS s BLOCK 0");
        }
    }
    (first.unwrap_or_default(), all)
}

/// In one step a hundred thousand would keep all other clients waiting.
#[test]
fn thousands_whose_lock_was_overwritten_are_told_in_portions_in_their_order() {
    let server = Server::builder().start();
    let size = 3_500;
    server.connect().take("k", "holder");
    let mut life = queue_many(&server, "k", "", size);
    life.send("RLOCK.EVENTS s BLOCK 0");
    server.run("SET k v");
    let (first, events) = events_of_many(&mut life, size);
    assert!(first <= 1_000, "{first} were told in one turn");
    let expected: Vec<_> = (0..size).map(|n| format!("error k owner{n}")).collect();
    assert!(events == expected, "not in their order, or not all of them");
}

/// One reading of the holders serves all grants of a turn. With one for each the time would grow
/// with the square of their number: 64 times as much for 8 times as many.
#[test]
fn letting_eight_times_as_many_in_for_permits_costs_about_eight_times_as_much() {
    let took = |size: usize| {
        let server = Server::builder().start();
        server.run("RLOCK.LIMIT k 1");
        server.run("RLOCK.ACQUIRE k holder 600000 PERMITS 1");
        let mut life = queue_many(&server, "k", "PERMITS 1", size);
        life.send("RLOCK.EVENTS s BLOCK 0");
        let before = server.processor_time();
        server.run(format!("RLOCK.LIMIT k {}", size + 1));
        let (_, events) = events_of_many(&mut life, size);
        let took = server.processor_time().saturating_sub(before);
        let expected: Vec<_> = (0..size).map(|n| format!("granted k owner{n}")).collect();
        assert!(events == expected, "not in their order, or not all of them");
        took
    };
    let (few, many) = (took(500), took(4_000));
    let least = Duration::from_millis(20);
    assert!(many < few.max(least) * 24, "{many:?}, and {few:?} for 500");
}
