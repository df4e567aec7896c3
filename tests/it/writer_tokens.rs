//! A writer's token is known only as long as its very hold is provably there: what took its place
//! is another hold, and ended holds keep no memory.

use rlock_tests::{Conn, Reply, Server, until};

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

// --- Another key in the place of the lock --------------------------------------------------------

/// Session `s` has the lock k as the writer alice. Other keys are of the same owner, with another
/// lease, and [`REPLACEMENTS`] put one of them in the place of k.
fn beside_another_key() -> (Server, Conn) {
    let server = Server::start();
    let life = server.session_connection("s");
    let mut conn = server.connect();
    let commands = [
        "RLOCK.ACQUIRE k alice 600000 WRITE SESSION s",
        "RLOCK.ACQUIRE k2 alice 500000 WRITE",
        "SELECT 1",
        "RLOCK.ACQUIRE k alice 500000 WRITE",
    ];
    for reply in conn.pipeline(&commands) {
        assert!(!reply.is_error(), "{reply:?}");
    }
    (server, life)
}

const REPLACEMENTS: [&str; 3] = ["RENAME k2 k", "COPY k2 k REPLACE", "SWAPDB 0 1"];

#[test]
fn a_writer_whose_key_is_replaced_by_another_of_the_same_owner_has_lost_it() {
    for replacement in REPLACEMENTS {
        let (server, mut life) = beside_another_key();
        assert!(!server.run(replacement).is_error(), "{replacement}");
        let told = life.run("RLOCK.EVENTS s BLOCK 10000").events();
        let lost = ("lost k alice".to_owned(), Reply::from("deleted"));
        assert_eq!(told, [lost], "{replacement}");
        life.close();
        until("the session is over", || {
            server.info_number("rlock_sessions") == 0
        });
        assert_eq!(server.run("HGET k alice:write"), "1", "{replacement}");
    }
}

/// Both in one turn of the event loop, before the timer's. The hold of a later session tells when
/// the timer has released what it had to.
#[test]
fn a_session_that_ends_as_its_writers_key_is_replaced_releases_nothing() {
    for replacement in REPLACEMENTS {
        for is_killed_first in [true, false] {
            let (server, mut life) = beside_another_key();
            let kill = format!("CLIENT KILL ID {}", life.id());
            let mut commands = ["MULTI", &kill, replacement, "EXEC"];
            if !is_killed_first {
                commands.swap(1, 2);
            }
            let mut conn = server.connect();
            let done = conn.pipeline(&commands);
            assert_eq!(done[3].array().len(), 2, "{done:?}");
            let later = server.session_connection("t");
            conn.take_for("z", "zoe", "t");
            later.close();
            until("the later session's hold is released", || {
                conn.run("EXISTS z") == 0
            });
            assert_eq!(server.run("HGET k alice:write"), "1", "{commands:?}");
        }
    }
}

#[test]
fn a_writer_whose_expiry_others_change_keeps_its_lock() {
    for change in ["PEXPIRE k 700000", "PERSIST k"] {
        let (server, mut life) = beside_another_key();
        assert_eq!(server.run(change), 1);
        assert!(life.run("RLOCK.EVENTS s BLOCK 200").events().is_empty());
        life.close();
        until("the session's hold is released", || {
            server.run("EXISTS k") == 0
        });
    }
}

/// A reading prolongs the key, and with it the writer's hold: it is the same one afterwards.
#[test]
fn a_writer_that_reads_for_longer_keeps_its_lock_when_its_database_is_swapped_away_and_back() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 9000 WRITE SESSION s")
        .held();
    conn.run("RLOCK.ACQUIRE k alice 600000 READ SESSION s")
        .held();
    conn.pipeline(&["MULTI", "SWAPDB 0 1", "SWAPDB 0 1", "EXEC"]);
    assert!(life.run("RLOCK.EVENTS s BLOCK 200").events().is_empty());
    life.close();
    until("both holds are released", || conn.run("EXISTS k") == 0);
}
