//! Work that shows whether a lock locks: a number is read, and then written plus one. Where two
//! are inside at once, an update is lost. `Driver.java` does the same.

use std::thread;
use std::time::Duration;

use rlock_client::{Client, ClientBuilder};
use rlock_tests::{Conn, Reply, Server};

/// The middle of a round: one more, to be called with the lock in hand.
pub(crate) fn count(conn: &mut Conn, name: &str, who: &str) {
    let next = number(conn, &format!("counter:{name}")) + 1;
    conn.run(format!("RPUSH rounds:{name} {who}")).int();
    assert_eq!(conn.run(format!("SET counter:{name} {next}")), "OK");
    assert_eq!(conn.run(format!("SET copy:{name} {next}")), "OK");
}

/// Both numbers, which no other client may change meanwhile; to be called while holding the lock.
#[track_caller]
pub(crate) fn compare(conn: &mut Conn, name: &str) {
    let copy = number(conn, &format!("copy:{name}"));
    assert_eq!(number(conn, &format!("counter:{name}")), copy);
}

fn number(conn: &mut Conn, key: &str) -> i64 {
    let seen = conn.run(format!("GET {key}"));
    if matches!(seen, Reply::Null) {
        return 0;
    }
    seen.text().parse().expect("a number")
}

/// Another time in each round, so that each side finds the lock free now and then.
pub(crate) fn pause(round: u32) -> Duration {
    Duration::from_micros(u64::from(round * 7919 % 3000))
}

/// A reader of Redisson that is just going to sleep may miss the message, and then sleeps out the
/// lease that it was told: one of these, in ms.
pub(crate) const LEASE: u64 = 5000;

/// That many rounds over one connection that waits in the server. A reader compares.
pub(crate) fn play(server: &Server, name: &str, owner: &str, mode: &str, rounds: u32) {
    let mut conn = server.connect();
    for round in 0..rounds {
        let acquire = format!("RLOCK.ACQUIRE {name} {owner} {LEASE} {mode} BLOCK 0");
        conn.run(acquire).held();
        if mode == "READ" {
            compare(&mut conn, name);
        } else {
            count(&mut conn, name, "plain");
        }
        assert_eq!(conn.run(format!("RLOCK.RELEASE {name} {owner} {mode}")), 0);
        thread::sleep(pause(round));
    }
}

/// Settings of the crate with which nothing is given up where a client or a server is stopped for
/// a while, as on a busy machine.
pub(crate) fn calm() -> ClientBuilder {
    let long = Duration::from_secs(300);
    Client::builder()
        .lease(long)
        .grace(long)
        .response_timeout(long)
}

/// The same by the crate.
pub(crate) async fn of_the_crate(client: Client, mut conn: Conn, name: String, rounds: u32) {
    for round in 0..rounds {
        let guard = client.lock(&*name).lock().await.expect("the lock");
        count(&mut conn, &name, "crate");
        guard.unlock().await.expect("still held");
        tokio::time::sleep(pause(round)).await;
    }
}

/// No update was lost, and the sides took turns at least that often: they did contend.
#[track_caller]
pub(crate) fn check(server: &Server, name: &str, rounds: u32, turns: usize) {
    assert_eq!(
        server.run(format!("GET counter:{name}")),
        rounds.to_string()
    );
    let players = server.run(format!("LRANGE rounds:{name} 0 -1")).texts();
    let changes = players.windows(2).filter(|two| two[0] != two[1]).count();
    println!("{name}: {rounds} rounds, {changes} times the turn of another side");
    assert!(changes >= turns, "{changes} turns");
    assert_eq!(server.run(format!("EXISTS {name}")), 0, "{name} is free");
}
