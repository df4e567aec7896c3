//! A writer's token is known only as long as its very hold is provably there: what took its place
//! is another hold, and ended holds keep no memory.

use rlock_tests::{Conn, Reply, Server};

/// A writer's hold of `name` as a Redisson client writes it, with another end than ours has.
fn written_by_a_script(conn: &mut Conn, name: &str) {
    conn.run(format!("HSET {name} mode write w:write 1"));
    assert_eq!(conn.run(format!("PEXPIRE {name} 20000")), 1);
}

/// The hold at `k` is not the one that was granted with this token, and is not taken for it.
#[track_caller]
fn is_another_hold(conn: &mut Conn, token: i64) {
    let stale = format!("RLOCK.RELEASE k w WRITE TOKEN {token}");
    assert_eq!(conn.run(stale), Reply::Null, "frees the newer hold");
    assert_eq!(conn.run("RLOCK.INFO k").get("token"), &Reply::Null);
    let since = conn.take("other", "somebody");
    let (count, known) = conn.run("RLOCK.ACQUIRE k w 30000 WRITE ONCE").held();
    assert_eq!(count, 1);
    assert!(known > since, "{known} is told after {since}");
}

/// The token with which `w` takes `k` to write.
fn granted(conn: &mut Conn) -> i64 {
    conn.run("RLOCK.ACQUIRE k w 30000 WRITE").held().1
}

#[test]
fn a_key_renamed_over_a_writers_is_another_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = granted(&mut conn);
    written_by_a_script(&mut conn, "moved");
    assert_eq!(conn.run("RENAME moved k"), "OK");
    is_another_hold(&mut conn, token);
}

#[test]
fn a_key_copied_over_a_writers_is_another_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = granted(&mut conn);
    written_by_a_script(&mut conn, "there");
    assert_eq!(conn.run("COPY there k REPLACE"), 1);
    is_another_hold(&mut conn, token);
}

#[test]
fn after_swapdb_a_writers_key_is_another_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = granted(&mut conn);
    assert_eq!(conn.run("SELECT 1"), "OK");
    written_by_a_script(&mut conn, "k");
    assert_eq!(conn.run("SELECT 0"), "OK");
    assert_eq!(conn.run("SWAPDB 0 1"), "OK");
    is_another_hold(&mut conn, token);
}

#[test]
fn writers_that_have_left_keep_no_memory() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut begin = |first: usize| {
        let commands: Vec<String> = (first..first + 5_000)
            .flat_map(|at| {
                [
                    format!("RLOCK.ACQUIRE k{at} w 600000 WRITE"),
                    format!("DEL k{at}"),
                ]
            })
            .collect();
        conn.pipeline(&commands);
        server.info_number("used_memory")
    };
    let before = begin(0);
    let grown = (1..10).map(|at| begin(at * 5_000)).last().unwrap() - before;
    // Of each that is kept it would be 200 bytes at least: here some nine million.
    assert!(grown < 2_000_000, "{grown}");
}
