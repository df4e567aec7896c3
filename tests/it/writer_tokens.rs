//! A writer's token is in its field. It lasts as long as the hold, wherever the key goes, and a
//! hold that took its place has another.

use rlock_tests::{Cluster, Conn, Pair, Reply, Server, in_sync, until};

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

// --- Where the key goes --------------------------------------------------------------------------

/// Every command knows the token of `w`, which writes here, and refuses one from before.
#[track_caller]
fn is_held_with(conn: &mut Conn, name: &str, token: i64) {
    assert_eq!(conn.run(format!("RLOCK.INFO {name}")).get("token"), &token);
    let stale = token - 1;
    let renewed = conn.run(format!("RLOCK.RENEW {name} w 30000 WRITE TOKEN {stale}"));
    assert_eq!(renewed, 0);
    let released = conn.run(format!("RLOCK.RELEASE {name} w WRITE TOKEN {stale}"));
    assert_eq!(released, Reply::Null);
    let guard = |token: i64| format!("RLOCK.GUARD {name} w WRITE TOKEN {token} CALL GET {{k}}v");
    let refused = conn.run(guard(stale)).error();
    assert!(refused.contains(&token.to_string()), "{refused}");
    assert_eq!(conn.run(guard(token)), Reply::Null);
    let renewed = conn.run(format!("RLOCK.RENEW {name} w 30000 WRITE TOKEN {token}"));
    assert_eq!(renewed, 1);
    let again = conn.run(format!("RLOCK.ACQUIRE {name} w 30000 WRITE"));
    assert_eq!(again.held(), (2, token));
    let release = format!("RLOCK.RELEASE {name} w WRITE TOKEN {token}");
    assert_eq!(conn.run(&release), 1);
    assert_eq!(conn.run(&release), 0);
    assert_eq!(conn.run(format!("EXISTS {name}")), 0);
}

#[test]
fn a_writers_token_is_known_after_a_restart_from_either_file() {
    for is_rdb in [true, false] {
        let config = if is_rdb { "" } else { "appendonly yes" };
        let mut server = Server::builder().config(config).start();
        let token = granted(&mut server.connect());
        if is_rdb {
            assert_eq!(server.run("SAVE"), "OK");
        }
        server.restart();
        is_held_with(&mut server.connect(), "k", token);
    }
}

#[test]
fn a_writers_token_is_known_at_the_replica_that_is_promoted() {
    let pair = Pair::start();
    let token = granted(&mut pair.primary.connect());
    in_sync(&pair.primary, &pair.replica);
    assert_eq!(pair.replica.run("REPLICAOF NO ONE"), "OK");
    is_held_with(&mut pair.replica.connect(), "k", token);
}

#[test]
fn a_writers_token_goes_with_its_key() {
    let server = Server::start();
    let mut conn = server.connect();
    for to in ["RENAME k k2", "COPY k k2"] {
        let token = granted(&mut conn);
        assert!(!conn.run(to).is_error(), "{to}");
        is_held_with(&mut conn, "k2", token);
        conn.run("DEL k");
    }
    let token = granted(&mut conn);
    let Reply::Bulk(dump) = conn.run("DUMP k") else {
        panic!("there is no key")
    };
    conn.cmd(&[&b"RESTORE"[..], b"k2", b"30000", &dump]);
    is_held_with(&mut conn, "k2", token);
}

#[test]
fn a_writers_token_goes_with_its_slot() {
    let cluster = Cluster::start();
    let take = cluster.first.run("RLOCK.ACQUIRE {k}w w 30000 WRITE");
    cluster.open_slot_of("{k}w");
    cluster.migrate("{k}w");
    cluster.close_slot_of("{k}w");
    is_held_with(&mut cluster.second.connect(), "{k}w", take.held().1);
}

#[test]
fn a_scripts_writer_has_no_token_until_it_enters_again_here() {
    let server = Server::start();
    let mut conn = server.connect();
    for again in ["WRITE", "WRITE ONCE"] {
        written_by_a_script(&mut conn, "k");
        assert_eq!(conn.run("RLOCK.RENEW k w 30000 WRITE"), 1);
        assert_eq!(conn.run("HGET k w:write"), "1");
        let (count, token) = conn.run(format!("RLOCK.ACQUIRE k w 30000 {again}")).held();
        assert_eq!(conn.run("HGET k w:write"), format!("{count}:t{token}"));
        let release = format!("RLOCK.RELEASE k w WRITE TOKEN {token}");
        for left in (0..count).rev() {
            assert_eq!(conn.run(&release), left);
        }
    }
    // A release before that leaves a bare number.
    conn.run("HSET k mode write w:write 2");
    assert_eq!(conn.run("RLOCK.RELEASE k w WRITE"), 1);
    assert_eq!(conn.run("HGET k w:write"), "1");
}

#[test]
fn break_logs_the_writer_with_its_token_and_a_refusal_names_it() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = granted(&mut conn);
    conn.run("RLOCK.ACQUIRE k w 30000 READ").held();
    let refused = conn.run("RLOCK.GUARD k other WRITE CALL PING").error();
    assert!(refused.contains(&token.to_string()), "{refused}");
    assert_eq!(conn.run("RLOCK.BREAK k"), 1);
    let log = conn.run("RLOCK.LOG");
    let entry = &log.array()[0];
    assert_eq!(entry.get("event"), "broken");
    assert_eq!(entry.get("owner"), "w");
    assert_eq!(entry.get("token"), &token);
}

// --- What took its place -------------------------------------------------------------------------

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
        let field = server.run("HGET k alice:write").text();
        assert!(field.starts_with("1:t"), "{replacement}");
    }
}

/// Both in one turn of the event loop, before the timer's. The hold of a later session shows when
/// the timer has done its releases.
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
            let field = server.run("HGET k alice:write").text();
            assert!(field.starts_with("1:t"), "{commands:?}");
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
