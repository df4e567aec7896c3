//! Beside Redisson's read-write lock: its scripts, written anew from their known effects, on the
//! same keys as ours, in both directions.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply, Server};

use crate::read_write::{as_fields, fields, takes, timeout};

/// KEYS: the lock, the timeout key without its number. ARGV: lease, reader, writer.
const READ: &str = "
    local mode = redis.call('HGET', KEYS[1], 'mode')
    if mode == false then
        redis.call('HSET', KEYS[1], 'mode', 'read')
        redis.call('HSET', KEYS[1], ARGV[2], 1)
        redis.call('SET', KEYS[2] .. ':1', 1)
        redis.call('PEXPIRE', KEYS[2] .. ':1', ARGV[1])
        redis.call('PEXPIRE', KEYS[1], ARGV[1])
        return 'held'
    end
    if mode == 'read' or redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then
        local number = redis.call('HINCRBY', KEYS[1], ARGV[2], 1)
        local key = KEYS[2] .. ':' .. number
        redis.call('SET', key, 1)
        redis.call('PEXPIRE', key, ARGV[1])
        local left = redis.call('PTTL', KEYS[1])
        redis.call('PEXPIRE', KEYS[1], math.max(left, ARGV[1]))
        return 'held'
    end
    return redis.call('PTTL', KEYS[1])";

/// KEYS: the lock. ARGV: lease, reader, writer.
const WRITE: &str = "
    local mode = redis.call('HGET', KEYS[1], 'mode')
    if mode == false then
        redis.call('HSET', KEYS[1], 'mode', 'write')
        redis.call('HSET', KEYS[1], ARGV[3], 1)
        redis.call('PEXPIRE', KEYS[1], ARGV[1])
        return 'held'
    end
    if mode == 'write' and redis.call('HEXISTS', KEYS[1], ARGV[3]) == 1 then
        redis.call('HINCRBY', KEYS[1], ARGV[3], 1)
        redis.call('PEXPIRE', KEYS[1], redis.call('PTTL', KEYS[1]) + ARGV[1])
        return 'held'
    end
    return redis.call('PTTL', KEYS[1])";

/// KEYS: the lock, the timeout key without its number. ARGV: lease, reader, writer, the tagged
/// name. 1: free; 0: holds are left; nil: not held.
const RELEASE_READ: &str = "
    local channel = 'redisson_rwlock:' .. ARGV[4]
    if redis.call('HGET', KEYS[1], 'mode') == false then
        redis.call('PUBLISH', channel, 0)
        return nil
    end
    if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return nil end
    local left = redis.call('HINCRBY', KEYS[1], ARGV[2], -1)
    if left == 0 then redis.call('HDEL', KEYS[1], ARGV[2]) end
    redis.call('DEL', KEYS[2] .. ':' .. (left + 1))
    if redis.call('HLEN', KEYS[1]) > 1 then
        local longest = -3
        for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
            local count = tonumber(redis.call('HGET', KEYS[1], field))
            if type(count) == 'number' then
                for number = count, 1, -1 do
                    local key = ARGV[4] .. ':' .. field .. ':rwlock_timeout:' .. number
                    longest = math.max(longest, redis.call('PTTL', key))
                end
            end
        end
        if longest > 0 then
            redis.call('PEXPIRE', KEYS[1], longest)
            return 0
        end
        if redis.call('HGET', KEYS[1], 'mode') == 'write' then return 0 end
    end
    redis.call('DEL', KEYS[1])
    redis.call('PUBLISH', channel, 0)
    return 1";

/// As [`RELEASE_READ`].
const RELEASE_WRITE: &str = "
    local channel = 'redisson_rwlock:' .. ARGV[4]
    local mode = redis.call('HGET', KEYS[1], 'mode')
    if mode == false then
        redis.call('PUBLISH', channel, 1)
        return nil
    end
    if mode == 'read' or redis.call('HEXISTS', KEYS[1], ARGV[3]) == 0 then return nil end
    if redis.call('HINCRBY', KEYS[1], ARGV[3], -1) > 0 then
        redis.call('PEXPIRE', KEYS[1], ARGV[1])
        return 0
    end
    redis.call('HDEL', KEYS[1], ARGV[3])
    if redis.call('HLEN', KEYS[1]) == 1 then
        redis.call('DEL', KEYS[1])
        redis.call('PUBLISH', channel, 1)
    else
        redis.call('HSET', KEYS[1], 'mode', 'read')
    end
    return 1";

/// Of all of the reader's holds, as its watchdog does. ARGV: lease, reader.
const RENEW_READ: &str = "
    if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return 0 end
    redis.call('PEXPIRE', KEYS[1], ARGV[1])
    for number = tonumber(redis.call('HGET', KEYS[1], ARGV[2])), 1, -1 do
        redis.call('PEXPIRE', KEYS[2] .. ':' .. number, ARGV[1])
    end
    return 1";

/// ARGV: the mode, the tagged name.
const FORCE: &str = "
    if redis.call('HGET', KEYS[1], 'mode') ~= ARGV[1] then return 0 end
    redis.call('DEL', KEYS[1])
    redis.call('PUBLISH', 'redisson_rwlock:' .. ARGV[2], ARGV[1] == 'read' and 0 or 1)
    return 1";

/// Runs a script for the lock `k` and its owner with that lease.
fn redisson(conn: &mut Conn, script: &str, owner: &str, lease_ms: u32) -> Reply {
    let (prefix, lease) = (
        format!("{{k}}:{owner}:rwlock_timeout"),
        lease_ms.to_string(),
    );
    let writer = format!("{owner}:write");
    conn.cmd(&[
        "EVAL", script, "2", "k", &prefix, &lease, owner, &writer, "{k}",
    ])
}

fn force(conn: &mut Conn, mode: &str) -> Reply {
    conn.cmd(&["EVAL", FORCE, "1", "k", mode, "{k}"])
}

/// A connection that waits for `k` as bob.
#[track_caller]
fn bob_waits(server: &Server, mode: &str) -> Conn {
    server.blocked_in(&format!("RLOCK.ACQUIRE k bob 30000 {mode} BLOCK 0"))
}

/// Redisson writes a timeout key for each entry, and asks for the longest: ours is the latest.
#[test]
fn both_write_the_same_hash_and_the_timeout_key_of_the_latest_entry() {
    let (ours, theirs) = (Server::start(), Server::start());
    let (mut our, mut their) = (ours.connect(), theirs.connect());
    let mut same = |command: &str, script: &str| {
        assert!(!our.run(command).is_error(), "{command}");
        assert!(
            !redisson(&mut their, script, "alice", 30_000).is_error(),
            "{command}"
        );
        // A writer's field has our token beside the count.
        let without_token = |(field, value): (String, String)| {
            let count = value.trim_end_matches(":t").to_owned();
            (field, count)
        };
        let our_fields = fields(&ours, "k").into_iter().map(without_token);
        let our_fields: BTreeMap<String, String> = our_fields.collect();
        assert_eq!(our_fields, fields(&theirs, "k"), "{command}");
        // The hash, and its timeout keys in order.
        let mut expected = crate::read_write::keys(&theirs);
        let latest = expected.len().saturating_sub(1);
        expected.drain(1.min(latest)..latest);
        assert_eq!(crate::read_write::keys(&ours), expected, "{command}");
        for key in expected {
            let left = |conn: &mut Conn| conn.run(format!("PTTL {key}")).int();
            let (our, their) = (left(&mut our), left(&mut their));
            assert!(
                (our - their).abs() < 10_000,
                "{command}: {key}, {our} and {their}"
            );
        }
    };
    same("RLOCK.ACQUIRE k alice 30000 READ", READ);
    same("RLOCK.ACQUIRE k alice 30000 READ", READ);
    same("RLOCK.RENEW k alice 30000 READ", RENEW_READ);
    same("RLOCK.RELEASE k alice READ", RELEASE_READ);
    same("RLOCK.RELEASE k alice READ", RELEASE_READ);
    same("RLOCK.ACQUIRE k alice 30000 WRITE", WRITE);
    same("RLOCK.ACQUIRE k alice 30000 READ", READ);
    same("RLOCK.RELEASE k alice WRITE", RELEASE_WRITE);
    same("RLOCK.RELEASE k alice READ", RELEASE_READ);
}

#[test]
fn neither_lets_the_other_in_where_it_may_not() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    assert!(redisson(&mut conn, WRITE, "java", 30_000).int() > 20_000);
    assert_eq!(redisson(&mut conn, READ, "java", 30_000), "held");
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=1 java=1"));
    assert!(conn.run("RLOCK.ACQUIRE k bob 30000 WRITE").refused() > 20_000);
    takes(&mut conn, "bob", "READ");
    conn.run("FLUSHALL");
    takes(&mut conn, "alice", "WRITE");
    assert!(redisson(&mut conn, READ, "java", 30_000).int() > 20_000);
    assert!(redisson(&mut conn, WRITE, "java", 30_000).int() > 20_000);
    conn.run("FLUSHALL");
    assert_eq!(redisson(&mut conn, WRITE, "java", 30_000), "held");
    for mode in ["READ", "WRITE"] {
        assert!(
            conn.run(format!("RLOCK.ACQUIRE k bob 30000 {mode}"))
                .refused()
                > 20_000
        );
    }
}

/// The messages on the lock's channel: which, and whether it is the last.
fn listener(server: &Server) -> Conn {
    let mut listener = server.connect();
    listener.run("SUBSCRIBE redisson_rwlock:{k}");
    listener
}

#[test]
fn our_writer_behind_their_reader_comes_in_with_its_release() {
    let server = Server::start();
    let mut conn = server.connect();
    redisson(&mut conn, READ, "java", 30_000);
    redisson(&mut conn, READ, "java", 30_000);
    let mut bob = bob_waits(&server, "WRITE");
    assert_eq!(redisson(&mut conn, RELEASE_READ, "java", 30_000), 0);
    bob.expect_nothing_yet();
    assert_eq!(redisson(&mut conn, RELEASE_READ, "java", 30_000), 1);
    bob.read_promptly().held();
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
    // Their next reader is told to wait, and gets the message of our release.
    let mut listener = listener(&server);
    assert!(redisson(&mut conn, READ, "java", 30_000).int() > 20_000);
    assert_eq!(conn.run("RLOCK.RELEASE k bob WRITE"), 0);
    assert_eq!(listener.read().texts()[2], "1");
    assert_eq!(redisson(&mut conn, READ, "java", 30_000), "held");
}

#[test]
fn our_writer_behind_their_reader_comes_in_when_its_lease_ends() {
    let server = Server::start();
    let mut conn = server.connect();
    let begun = Instant::now();
    redisson(&mut conn, READ, "java", 300);
    let told = conn.run("RLOCK.ACQUIRE k bob 30000 WRITE BLOCK 0");
    assert_eq!(told.held().0, 1);
    // The server counts from the millisecond in which its turn began.
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(295), "{took:?}");
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
}

#[test]
fn our_waiters_behind_their_writer_come_in_with_its_release() {
    for mode in ["READ", "WRITE"] {
        let server = Server::start();
        let mut conn = server.connect();
        redisson(&mut conn, WRITE, "java", 30_000);
        let mut bob = bob_waits(&server, mode);
        assert_eq!(redisson(&mut conn, RELEASE_WRITE, "java", 30_000), 1);
        bob.read_promptly().held();
        assert_eq!(conn.run(format!("RLOCK.RENEW k bob 30000 {mode}")), 1);
    }
}

#[test]
fn our_waiting_readers_come_in_after_their_downgrade_at_the_latest_at_the_leases_end() {
    let server = Server::start();
    let mut conn = server.connect();
    redisson(&mut conn, WRITE, "java", 30_000);
    redisson(&mut conn, READ, "java", 30_000);
    conn.run("PEXPIRE k 10000");
    let mut bob = bob_waits(&server, "READ");
    assert_eq!(redisson(&mut conn, RELEASE_WRITE, "java", 30_000), 1);
    // It publishes nothing.
    bob.read().held();
}

#[test]
fn their_release_of_a_reader_beside_ours_keeps_ours() {
    let server = Server::start();
    let mut conn = server.connect();
    let token = takes(&mut conn, "alice", "READ").1;
    redisson(&mut conn, READ, "java", 60_000);
    assert!(conn.run("PTTL k").int() > 50_000);
    assert_eq!(redisson(&mut conn, RELEASE_READ, "java", 30_000), 0);
    let left = conn.run("PTTL k").int();
    assert!((20_000..=30_000).contains(&left), "shrunk to ours: {left}");
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=1"));
    let renew = format!("RLOCK.RENEW k alice 30000 READ TOKEN {token}");
    assert_eq!(conn.run(renew), 1);
    assert!(redisson(&mut conn, WRITE, "java", 30_000).int() > 20_000);
    // And the other way round.
    redisson(&mut conn, READ, "java", 30_000);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    assert_eq!(fields(&server, "k"), as_fields("mode=read java=1"));
    assert_eq!(redisson(&mut conn, RELEASE_READ, "java", 30_000), 1);
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn each_may_end_holds_that_the_other_has_begun() {
    let server = Server::start();
    let mut conn = server.connect();
    // One owner, which enters by their script, then by our command, then by their script.
    assert_eq!(redisson(&mut conn, READ, "alice", 30_000), "held");
    let (count, token) = takes(&mut conn, "alice", "READ");
    assert_eq!(count, 2);
    assert_eq!(redisson(&mut conn, READ, "alice", 30_000), "held");
    assert_eq!(
        conn.run(format!("GET {}", timeout("alice", 2))),
        token.to_string()
    );
    assert_eq!(redisson(&mut conn, RELEASE_READ, "alice", 30_000), 0);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 1);
    assert_eq!(redisson(&mut conn, RELEASE_READ, "alice", 30_000), 1);
    assert_eq!(server.run("DBSIZE"), 0);

    assert_eq!(redisson(&mut conn, WRITE, "alice", 30_000), "held");
    assert_eq!(redisson(&mut conn, WRITE, "alice", 30_000), "held");
    assert_eq!(conn.run("RLOCK.RELEASE k alice WRITE"), 1);
    assert_eq!(redisson(&mut conn, READ, "alice", 30_000), "held");
    assert_eq!(takes(&mut conn, "alice", "READ").0, 2);
    assert_eq!(redisson(&mut conn, RELEASE_WRITE, "alice", 30_000), 1);
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=2"));
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 1);
    assert_eq!(redisson(&mut conn, RELEASE_READ, "alice", 30_000), 1);
    assert_eq!(server.run("DBSIZE"), 0);
}

/// Their scripts count up and down in the field, and ours has a token in it.
#[test]
fn their_scripts_cannot_count_a_write_hold_of_the_same_owner_that_is_ours() {
    let server = Server::start();
    let mut conn = server.connect();
    // By their script, and then by ours: from then on it has a token.
    assert_eq!(redisson(&mut conn, WRITE, "alice", 30_000), "held");
    let (count, token) = takes(&mut conn, "alice", "WRITE");
    assert_eq!(count, 2);
    for script in [WRITE, RELEASE_WRITE] {
        let error = redisson(&mut conn, script, "alice", 30_000).error();
        assert!(error.contains("not an integer"), "{error}");
        let left = format!("2:t{token}");
        assert_eq!(conn.run("HGET k alice:write"), left);
    }
    // It may read beside it.
    assert_eq!(redisson(&mut conn, READ, "alice", 30_000), "held");
    assert_eq!(redisson(&mut conn, RELEASE_READ, "alice", 30_000), 0);
    let release = format!("RLOCK.RELEASE k alice WRITE TOKEN {token}");
    assert_eq!(conn.run(&release), 1);
    assert_eq!(conn.run(&release), 0);
    assert_eq!(server.run("DBSIZE"), 0);
}

#[test]
fn their_release_of_an_entry_of_ours_ends_the_readers_hold() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "alice", "READ");
    assert_eq!(redisson(&mut conn, RELEASE_READ, "alice", 30_000), 1);
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ"), 0);
    assert_eq!(server.run("DBSIZE"), 0);
    // Beside another reader the hash stays, and the field says nothing.
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "bob", "READ");
    assert_eq!(redisson(&mut conn, RELEASE_READ, "alice", 30_000), 0);
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ"), 0);
    assert_eq!(takes(&mut conn, "alice", "READ").0, 1, "a new hold");
}

#[test]
fn their_entry_in_the_name_of_our_reader_leaves_it_its_token_and_its_lease() {
    let server = Server::start();
    let mut conn = server.connect();
    let (_, token) = conn.run("RLOCK.ACQUIRE k alice 90000 READ").held();
    assert_eq!(redisson(&mut conn, READ, "alice", 20_000), "held");
    let holder = conn.run("RLOCK.INFO k").get("holders").array()[0].clone();
    assert_eq!(holder.get("token"), &Reply::Int(token));
    assert!(holder.get("ttl-ms").int() > 60_000, "{holder:?}");
    // Its token is in the timeout key of the next entry.
    assert_eq!(takes(&mut conn, "alice", "READ"), (3, token));
    assert!(conn.run(format!("PTTL {}", timeout("alice", 3))).int() > 60_000);
    let renew = format!("RLOCK.RENEW k alice 40000 READ TOKEN {token}");
    assert_eq!(conn.run(renew), 1);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 2);
    let left = conn.run(format!("PTTL {}", timeout("alice", 2))).int();
    assert!((30_000..=40_000).contains(&left), "{left}");
}

#[test]
fn of_several_entries_of_theirs_the_longest_counts() {
    let server = Server::start();
    let mut conn = server.connect();
    for lease in [20_000, 90_000, 30_000] {
        redisson(&mut conn, READ, "java", lease);
    }
    conn.run("RLOCK.ACQUIRE k alice 95000 READ").held();
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    let left = conn.run("PTTL k").int();
    assert!((60_000..=90_000).contains(&left), "{left}");
    // A key of ours has it too, and is looked at alone.
    takes(&mut conn, "java", "READ");
    conn.run("RLOCK.ACQUIRE k alice 95000 READ").held();
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    let left = conn.run("PTTL k").int();
    assert!((60_000..=90_000).contains(&left), "{left}");
}

#[test]
fn their_renewal_and_their_release_see_the_one_timeout_key_of_our_reader() {
    let server = Server::start();
    let mut conn = server.connect();
    for _ in 0..5 {
        conn.run("RLOCK.ACQUIRE k alice 20000 READ").held();
    }
    assert_eq!(redisson(&mut conn, RENEW_READ, "alice", 60_000), 1);
    assert!(conn.run(format!("PTTL {}", timeout("alice", 5))).int() > 30_000);
    redisson(&mut conn, READ, "java", 90_000);
    assert_eq!(redisson(&mut conn, RELEASE_READ, "java", 90_000), 0);
    let left = conn.run("PTTL k").int();
    assert!((30_000..=60_000).contains(&left), "{left}");
    assert_eq!(fields(&server, "k"), as_fields("mode=read alice=5"));
}

#[test]
fn a_hold_without_a_token_gets_one_with_the_next_entry() {
    let server = Server::start();
    let mut conn = server.connect();
    redisson(&mut conn, READ, "alice", 30_000);
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(info.get("holders").array()[0].get("token"), &Reply::Null);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ TOKEN 1"), Reply::Null);
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ TOKEN 1"), 0);
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ"), 1);
    let token = takes(&mut conn, "alice", "READ").1;
    assert_eq!(
        conn.run(format!("RLOCK.RENEW k alice 30000 READ TOKEN {token}")),
        1
    );
}

#[test]
fn their_renewal_sets_the_hash_to_its_own_lease() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE k alice 90000 READ").held();
    redisson(&mut conn, READ, "java", 30_000);
    assert_eq!(redisson(&mut conn, RENEW_READ, "java", 30_000), 1);
    assert!(conn.run("PTTL k").int() <= 30_000, "as the documents say");
    assert_eq!(conn.run("RLOCK.RENEW k alice 60000 READ"), 1);
    assert!(conn.run("PTTL k").int() > 50_000);
    assert!(conn.run(format!("PTTL {}", timeout("java", 1))).int() > 20_000);
}

#[test]
fn their_force_frees_ours_and_grants_the_next() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "READ");
    takes(&mut conn, "alice", "READ");
    assert_eq!(force(&mut conn, "write"), 0, "of another mode");
    let mut bob = bob_waits(&server, "WRITE");
    assert_eq!(force(&mut conn, "read"), 1);
    bob.read_promptly().held();
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
    // The timeout keys of the reader are left to run out, and mean nothing.
    assert_eq!(conn.run(format!("EXISTS {}", timeout("alice", 2))), 1);
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 READ"), 0);
    assert_eq!(force(&mut conn, "write"), 1);
    assert_eq!(conn.run("RLOCK.RELEASE k bob WRITE"), Reply::Null);
    // And do not count for a new hold.
    takes(&mut conn, "carol", "READ");
    assert_eq!(takes(&mut conn, "alice", "READ").0, 1);
    assert_eq!(conn.run("RLOCK.RELEASE k alice READ"), 0);
    assert_eq!(fields(&server, "k"), as_fields("mode=read carol=1"));
}

#[test]
fn a_new_hold_is_not_kept_by_timeout_keys_of_an_earlier_one() {
    let server = Server::start();
    let mut conn = server.connect();
    // Left behind by a force unlock, with a long TTL.
    conn.run(format!("PSETEX {} 60000 1", timeout("alice", 2)));
    conn.run("RLOCK.ACQUIRE k alice 30000 READ").held();
    assert!(conn.run("PTTL k").int() <= 30_000);
    let (count, _) = conn.run("RLOCK.ACQUIRE k alice 20000 READ").held();
    assert_eq!(count, 2, "which writes the second one");
    let left = conn.run(format!("PTTL {}", timeout("alice", 2))).int();
    assert!(left <= 30_000, "{left}");
}

#[test]
fn a_script_may_take_the_lock_in_a_free_moment_and_the_queue_stays() {
    let server = Server::start();
    let mut conn = server.connect();
    takes(&mut conn, "alice", "WRITE");
    let mut bob = bob_waits(&server, "READ");
    let mut carol = server.blocked_in("RLOCK.ACQUIRE k carol 30000 WRITE BLOCK 0");
    conn.run("MULTI");
    conn.run("DEL k");
    redisson(&mut conn, READ, "java", 30_000);
    conn.run("EXEC");
    // Their reader and ours do not exclude each other.
    bob.read_promptly().held();
    carol.expect_nothing_yet();
    assert_eq!(redisson(&mut conn, RELEASE_READ, "java", 30_000), 0);
    assert_eq!(conn.run("RLOCK.RELEASE k bob READ"), 0);
    carol.read().held();
}

/// Run by mistake on a plain lock of ours, their read release counts down from the number in every
/// field; the token is no number.
#[test]
fn their_read_release_on_a_plain_lock_of_ours_returns() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    for _ in 0..2 {
        redisson(&mut conn, RELEASE_READ, "alice", 30_000);
    }
    assert_eq!(conn.run("PING"), "PONG");
}

#[test]
fn dead_readers_of_theirs_do_not_keep_our_writer_out() {
    let server = Server::start();
    let mut conn = server.connect();
    redisson(&mut conn, READ, "dead", 200);
    redisson(&mut conn, READ, "java", 30_000);
    let mut bob = bob_waits(&server, "WRITE");
    assert_eq!(
        redisson(&mut conn, RELEASE_READ, "java", 30_000).int() & !1,
        0
    );
    bob.read().held();
    assert_eq!(fields(&server, "k"), as_fields("mode=write bob:write=1:t"));
}
