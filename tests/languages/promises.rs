//! The promises that each of the programs keeps, in every language.

use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Pair, Proxy, Server};

use crate::program::{DEADLINE, Program};

const LEASE_MS: i64 = 30_000;

/// Alice takes the lock, and keeps it for longer than any program takes to start. Her token.
#[track_caller]
fn alice_takes_it(conn: &mut Conn) -> i64 {
    conn.run("RLOCK.ACQUIRE stock:42 alice 600000").held().1
}

/// The owner that waits for the lock, and the number of its connection.
#[track_caller]
fn waiter(server: &Server) -> (String, i64) {
    let deadline = Instant::now() + DEADLINE;
    while server.waiting_owners("stock:42").is_empty() {
        assert!(Instant::now() < deadline, "the program waits");
        thread::sleep(Duration::from_millis(5));
    }
    let info = server.run("RLOCK.INFO stock:42");
    let queue = info.get("queue").array();
    assert_eq!(queue.len(), 1, "only the program waits: {queue:?}");
    (
        queue[0].get("owner").text(),
        queue[0].get("client-id").int(),
    )
}

/// A uuid or another random text, and a number.
#[track_caller]
fn assert_is_an_owner(owner: &str) {
    let (client, number) = owner.split_once(':').expect("a client and a number");
    assert!(client.len() >= 26, "{client} is unique");
    assert!(number.parse::<u64>().is_ok(), "{number} is a number");
}

/// The hold that the server knows of is that of the program: once, with this token.
#[track_caller]
fn assert_holds(server: &Server, owner: &str, token: i64) {
    let info = server.run("RLOCK.INFO stock:42");
    assert_eq!(info.get("owner"), owner);
    assert_eq!(info.get("count"), &1);
    assert_eq!(info.get("token"), &token);
    assert!(token < 1 << 53, "{token} is exact in JavaScript");
}

pub(crate) fn hand_over(language: &str) {
    let server = Server::start();
    let mut alice = server.connect();
    let before = alice_takes_it(&mut alice);
    let mut program = Program::start(language, server.address());
    let (owner, _) = waiter(&server);
    assert_is_an_owner(&owner);

    assert_eq!(alice.let_go("stock:42", "alice"), 0);
    let token = program.token();
    assert!(token > before);
    assert_holds(&server, &owner, token);

    assert_eq!(server.run("PEXPIRE stock:42 5000"), 1);
    program.tell("seven left");
    program.says("written");
    let left = server.run("PTTL stock:42").int();
    assert!((5_001..=LEASE_MS).contains(&left), "renewed: {left}");
    assert_eq!(server.run("HGET store:42 text"), "seven left");
    assert_eq!(server.run("HGET store:42 token"), token.to_string());
    assert_holds(&server, &owner, token);

    let mut bob = server.wait_in_queue("stock:42", "bob");
    program.releases();
    assert!(bob.read().held().1 > token);
}

pub(crate) fn patience(language: &str) {
    let server = Server::start();
    alice_takes_it(&mut server.connect());
    let program = Program::start(language, server.address());
    program.fails_with("stock:42 is busy, its lease has ");
    assert_eq!(server.info_number("rlock_timeouts"), 1);
    assert_eq!(server.info_number("rlock_departures"), 0);
    assert_eq!(server.waiting_owners("stock:42"), Vec::<String>::new());
}

pub(crate) fn once(language: &str) {
    let server = Server::start();
    let mut alice = server.connect();
    alice_takes_it(&mut alice);
    let network = Proxy::to(server.address());
    let mut program = Program::start(language, network.address());
    let (owner, _) = waiter(&server);

    network.cut_to_client();
    assert_eq!(alice.let_go("stock:42", "alice"), 0);
    let granted = server.run("RLOCK.INFO stock:42").get("token").int();
    alice.settle(); // the reply has left the server, and the grant cannot be taken back
    network.sever();
    network.heal();

    let token = program.token();
    assert_eq!(token, granted);
    assert_holds(&server, &owner, token);
    program.releases();
    assert_eq!(server.holder("stock:42"), None);
}

pub(crate) fn loss(language: &str) {
    let server = Server::start();
    let mut program = Program::start(language, server.address());
    program.token();
    let mut bob = server.wait_in_queue("stock:42", "bob");
    assert_eq!(server.run("RLOCK.BREAK stock:42"), 1);
    bob.read().held();

    program.tell("too late");
    program.fails_with("lost: stock:42 is not ours any more");
    assert_eq!(server.run("EXISTS store:42"), 0);
    assert_eq!(server.holder("stock:42").as_deref(), Some("bob"));
}

pub(crate) fn fence(language: &str) {
    let server = Server::start();
    let mut program = Program::start(language, server.address());
    let token = program.token();
    let newer = token + 1;
    server.run(format!("HSET store:42 token {newer} text newer"));

    program.tell("older");
    program.fails_with("refused: the store has seen a larger token");
    assert_eq!(server.run("HGET store:42 text"), "newer");
    assert_eq!(server.holder("stock:42"), None);
}

/// The program waits for alice's lock. When its connection breaks, alice begins to wait for a lock
/// of the program's. When the program queues again, that would close a circle.
pub(crate) fn deadlock(language: &str) {
    let server = Server::start();
    let mut alice = server.session_connection("alice's");
    alice_takes_it(&mut alice);
    let program = Program::start(language, server.address());
    let (owner, connection) = waiter(&server);
    alice.take("stock:43", &owner);

    let replies = alice.pipeline(&[
        format!("CLIENT KILL ID {connection}"),
        "RLOCK.ACQUIRE stock:43 alice 30000 QUEUE 0 SESSION alice's".to_owned(),
    ]);
    assert_eq!(replies[1].queued(), 1);
    program.fails_with("DEADLOCK 2 owners would wait for each other");
}

pub(crate) fn replica(language: &str) {
    let pair = Pair::start();
    let program = Program::start(language, pair.replica.address());
    program.fails_with("You can't write against a read only replica");
}

/// The program's connection stays open when its wait is cancelled: the server learns of it by a
/// command.
pub(crate) fn cancelled_wait(language: &str) {
    let server = Server::start();
    let mut alice = server.connect();
    alice_takes_it(&mut alice);
    let program = Program::start(language, server.address());
    waiter(&server);
    program.interrupt();
    program.fails_with("context canceled");
    assert_eq!(server.info_number("rlock_cancels"), 1);
    assert_eq!(alice.let_go("stock:42", "alice"), 0);
    assert_eq!(server.holder("stock:42"), None);
}
