//! What reaches replicas and the disk: the server's own commands with absolute times, in the order
//! in which they happened; they replay without the module. `restore.rs` has more about `RESTORE`.

use std::collections::BTreeMap;
use std::thread;

use rlock_tests::{Cluster, Conn, Feed, Pair, Random, Server, aof, in_sync, until};

/// The command of a grant of a free lock.
pub(super) fn grant(name: &str, owner: &str, token: i64, end: i64) -> String {
    restored(name, &format!("{owner} 1 fence t{token}"), end)
}

/// The command that makes a hash of these fields, with its end.
pub(super) fn restored(name: &str, fields: &str, end: i64) -> String {
    format!("RESTORE {name} {end} [{fields}] REPLACE ABSTTL")
}

/// The commands of a grant with `rlock.replicate plain`.
pub(super) fn plain_grant(name: &str, owner: &str, token: i64, end: i64) -> [String; 2] {
    [
        format!("HSET {name} {owner} 1 fence t{token}"),
        format!("PEXPIREAT {name} {end}"),
    ]
}

pub(super) fn unlock_message(name: &str) -> String {
    format!("PUBLISH redisson_lock__channel:{{{name}}} 0")
}

/// `commands` as one transaction.
pub(super) fn transaction(commands: impl IntoIterator<Item = String>) -> Vec<String> {
    let multi = std::iter::once("MULTI".to_owned());
    multi.chain(commands).chain(["EXEC".to_owned()]).collect()
}

pub(super) fn end_of(conn: &mut Conn, name: &str) -> i64 {
    conn.run(format!("PEXPIRETIME {name}")).int()
}

#[test]
fn acquire_is_one_command() {
    let server = Server::start();
    let mut feed = Feed::of(&server);
    let mut alice = server.connect();
    let token = alice.take("k", "alice");
    let end = end_of(&mut alice, "k");
    assert_eq!(feed.news(), [grant("k", "alice", token, end)]);
}

#[test]
fn a_reentry_is_the_new_count_and_the_new_end() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut feed = Feed::of(&server);
    alice.run("RLOCK.ACQUIRE k alice 60000").held();
    let end = end_of(&mut alice, "k");
    let expected = ["HSET k alice 2".to_owned(), format!("PEXPIREAT k {end}")];
    assert_eq!(feed.news(), transaction(expected));
    alice.run("RLOCK.ACQUIRE k alice 90000 ONCE").held();
    let end = end_of(&mut alice, "k");
    assert_eq!(feed.news(), [format!("PEXPIREAT k {end}")]);
}

#[test]
fn a_release_is_the_new_count_or_the_deletion_and_then_the_message() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    alice.run("RLOCK.ACQUIRE k alice 30000").held();
    alice.run("RLOCK.ACQUIRE k alice 30000").held();
    let mut feed = Feed::of(&server);
    alice.let_go("k", "alice");
    assert_eq!(feed.news(), ["HSET k alice 2"]);
    alice.run("RLOCK.RELEASE k alice LEASE 60000");
    let end = end_of(&mut alice, "k");
    let expected = ["HSET k alice 1".to_owned(), format!("PEXPIREAT k {end}")];
    assert_eq!(feed.news(), transaction(expected));
    alice.let_go("k", "alice");
    assert_eq!(feed.news(), ["DEL k".to_owned(), unlock_message("k")]);
}

#[test]
fn a_renewal_is_the_new_end() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut feed = Feed::of(&server);
    alice.run("RLOCK.RENEW k alice 60000");
    let end = end_of(&mut alice, "k");
    assert_eq!(feed.news(), [format!("PEXPIREAT k {end}")]);
}

#[test]
fn a_hand_over_is_one_command() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let mut feed = Feed::of(&server);
    alice.let_go("k", "alice");
    let (_, token) = bob.read().held();
    let end = end_of(&mut alice, "k");
    let grant = grant("k", "bob", token, end);
    assert_eq!(feed.news(), [grant, unlock_message("k")]);
}

#[test]
fn break_is_replicated_as_a_release() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let mut feed = Feed::of(&server);
    alice.run("RLOCK.BREAK k");
    let (_, token) = bob.read().held();
    let end = end_of(&mut alice, "k");
    let grant = grant("k", "bob", token, end);
    assert_eq!(feed.news(), [grant, unlock_message("k")]);
    alice.run("RLOCK.BREAK k");
    assert_eq!(feed.news(), ["DEL k".to_owned(), unlock_message("k")]);
}

#[test]
fn plain_tells_of_the_same_by_several_commands() {
    let server = Server::builder().config("rlock.replicate plain").start();
    let mut alice = server.connect();
    let mut feed = Feed::of(&server);
    let token = alice.take("k", "alice");
    let end = end_of(&mut alice, "k");
    let taken = plain_grant("k", "alice", token, end);
    assert_eq!(feed.news(), transaction(taken));
    let mut bob = server.wait_in_queue("k", "bob");
    alice.let_go("k", "alice");
    let (_, token) = bob.read().held();
    let end = end_of(&mut alice, "k");
    let [hold, end] = plain_grant("k", "bob", token, end);
    let mut expected = transaction(["DEL k".to_owned(), hold, end]);
    expected.push(unlock_message("k"));
    assert_eq!(feed.news(), expected);
    assert_eq!(bob.run("CONFIG SET rlock.replicate restore"), "OK");
    bob.let_go("k", "bob");
    let token = alice.take("k", "alice");
    let taken = grant("k", "alice", token, end_of(&mut alice, "k"));
    let expected = ["DEL k".to_owned(), unlock_message("k"), taken];
    assert_eq!(feed.news(), expected);
}

/// The bytes that a pair adds to the replication stream.
fn pair_in_stream(server: &Server) -> i64 {
    let mut conn = server.connect();
    let before = server.info_number("master_repl_offset");
    conn.take("k", "alice");
    conn.run("RLOCK.RELEASE k alice").int();
    server.info_number("master_repl_offset") - before
}

#[test]
fn the_message_is_not_kept_for_a_replica_that_is_away() {
    let server = Server::start();
    let mut feed = Feed::of(&server);
    let with_message = pair_in_stream(&server);
    assert!(feed.news().contains(&unlock_message("k")));
    drop(feed);
    until("the replica is gone", || {
        server.info_number("connected_slaves") == 0
    });
    let without = pair_in_stream(&server);
    let message = i64::try_from(unlock_message("k").len()).expect("a length");
    assert!(
        without + message < with_message,
        "{without}, {with_message}"
    );
    let mut feed = Feed::of(&server);
    pair_in_stream(&server);
    assert!(feed.news().contains(&unlock_message("k")));
}

#[test]
fn a_lease_that_ends_is_a_deletion_and_the_grant_in_this_order() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let mut feed = Feed::of(&server);
    alice.run("RLOCK.RENEW k alice 50");
    let (_, token) = bob.read().held();
    let end = end_of(&mut alice, "k");
    let mut news = feed.news();
    news.retain(|command| !command.starts_with("PUBLISH"));
    let writes: Vec<_> = news
        .into_iter()
        .filter(|command| command != "MULTI" && command != "EXEC")
        .collect();
    assert!(writes[0].starts_with("PEXPIREAT"), "the renewal");
    let deletion = writes[1].clone();
    assert!(deletion == "DEL k" || deletion == "UNLINK k", "{writes:?}");
    assert_eq!(writes[2..], [grant("k", "bob", token, end)]);
}

#[test]
fn a_users_deletion_comes_before_the_grant() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let mut feed = Feed::of(&server);
    alice.run("DEL k");
    let (_, token) = bob.read().held();
    let end = end_of(&mut alice, "k");
    let mut news = feed.news();
    assert_eq!(news.remove(0), "DEL k");
    news.retain(|command| !command.starts_with("PUBLISH"));
    assert_eq!(news, [grant("k", "bob", token, end)]);
}

#[test]
fn in_a_clients_transaction_there_is_one_transaction() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut feed = Feed::of(&server);
    alice.pipeline(&[
        "MULTI",
        "RLOCK.ACQUIRE k alice 30000",
        "SET other v",
        "EXEC",
    ]);
    let news = feed.news();
    let shape: Vec<_> = news
        .iter()
        .map(|command| command.split(' ').next().unwrap())
        .collect();
    assert_eq!(shape, ["MULTI", "RESTORE", "SET", "EXEC"]);
}

#[test]
fn refused_and_read_only_commands_propagate_nothing() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    conn.run("SET text v");
    let _bob = server.wait_in_queue("k", "bob");
    let mut feed = Feed::of(&server);
    for command in [
        "RLOCK.ACQUIRE k carol 30000",
        "RLOCK.ACQUIRE k carol 30000 BLOCK 5",
        "RLOCK.ACQUIRE k carol 0",
        "RLOCK.ACQUIRE text carol 1000",
        "RLOCK.RELEASE k carol",
        "RLOCK.RELEASE k alice TOKEN 1",
        "RLOCK.RELEASE free alice",
        "RLOCK.RENEW k carol 1000",
        "RLOCK.RENEW free alice 1000",
        "RLOCK.CANCEL k carol",
        "RLOCK.CANCEL k bob",
        "RLOCK.BREAK free",
        "RLOCK.BREAK text",
        "RLOCK.EVENTS s",
        "RLOCK.ACQUIRE k carol 30000 QUEUE 0 SESSION s",
        "RLOCK.ACQUIRE k carol 30000 QUEUE 0 SESSION other",
        "RLOCK.CANCEL k carol",
        "RLOCK.RENEW k alice 30000 SESSION other",
        "RLOCK.INFO k",
        "RLOCK.LIST",
        "RLOCK.LOG",
        "RLOCK.LOG RESET",
        "RLOCK.SESSIONS",
    ] {
        conn.run(command);
        assert_eq!(feed.news(), Vec::<String>::new(), "{command}");
    }
}

#[test]
fn the_message_is_not_in_the_append_only_file() {
    let server = Server::builder()
        .config("appendonly yes")
        .config("appendfsync always")
        .start();
    let mut alice = server.connect();
    let first = alice.take("k", "alice");
    let first_end = end_of(&mut alice, "k");
    let mut bob = server.wait_in_queue("k", "bob");
    alice.let_go("k", "alice");
    let (_, second) = bob.read().held();
    let second_end = end_of(&mut alice, "k");
    bob.let_go("k", "bob");
    let expected = [
        grant("k", "alice", first, first_end),
        grant("k", "bob", second, second_end),
        "DEL k".to_owned(),
    ];
    assert_eq!(aof(&server), expected);
}

#[test]
fn a_refused_command_disturbs_nobodys_watch() {
    let server = Server::start();
    let mut conn = server.connect();
    let mut watcher = server.connect();
    let token = conn.take("k", "alice");
    for command in [
        "RLOCK.ACQUIRE k bob 30000",
        "RLOCK.ACQUIRE k bob 30000 BLOCK 5",
        "RLOCK.RELEASE k bob",
        "RLOCK.RELEASE k alice TOKEN 1",
        "RLOCK.RENEW k bob 30000",
        "RLOCK.CANCEL k bob",
        "RLOCK.EVENTS s",
        "RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION s",
        "RLOCK.ACQUIRE k bob 30000 QUEUE 0 SESSION other",
        "RLOCK.CANCEL k bob",
        "RLOCK.INFO k",
        "RLOCK.BREAK other",
    ] {
        watcher.run("WATCH k other");
        conn.run(command);
        let replies = watcher.pipeline(&["MULTI", "PING", "EXEC"]);
        assert_eq!(replies[2].array()[0], "PONG", "{command}");
    }
    for command in [
        "RLOCK.ACQUIRE k alice 30000".to_owned(),
        "RLOCK.RENEW k alice 30000".to_owned(),
        format!("RLOCK.RELEASE k alice TOKEN {token}"),
        "RLOCK.RELEASE k alice".to_owned(),
        "RLOCK.ACQUIRE k alice 30000".to_owned(),
        "RLOCK.BREAK k".to_owned(),
    ] {
        watcher.run("WATCH k");
        conn.run(&command);
        let replies = watcher.pipeline(&["MULTI", "PING", "EXEC"]);
        assert_eq!(
            replies[2],
            rlock_tests::Reply::Null,
            "{command} is a change"
        );
    }
}

#[test]
fn keyspace_notifications_are_those_of_the_plain_commands() {
    let server = Server::builder()
        .config("notify-keyspace-events KA")
        .start();
    let mut listener = server.connect();
    listener.run("SUBSCRIBE __keyspace@0__:k");
    let mut conn = server.connect();
    let mut events = |command: &str, expected: &[&str]| {
        conn.run(command);
        let told: Vec<_> = expected
            .iter()
            .map(|_| listener.read().texts()[2].clone())
            .collect();
        assert_eq!(told, expected, "{command}");
        listener.expect_nothing_yet();
    };
    events("RLOCK.ACQUIRE k alice 30000", &["hset", "expire"]);
    events("RLOCK.ACQUIRE k alice 30000", &["hset", "expire"]);
    events("RLOCK.ACQUIRE k alice 30000 ONCE", &["expire"]);
    events("RLOCK.ACQUIRE k bob 30000", &[]);
    events("RLOCK.RENEW k alice 30000", &["expire"]);
    events("RLOCK.RENEW k bob 30000", &[]);
    events("RLOCK.RELEASE k alice", &["hset"]);
    events("RLOCK.RELEASE k bob", &[]);
    events("RLOCK.RELEASE k alice", &["del"]);
    events("RLOCK.RELEASE k alice", &[]);
    events("RLOCK.ACQUIRE k alice 30000", &["hset", "expire"]);
    let mut bob = server.wait_in_queue("k", "bob");
    events("RLOCK.RELEASE k alice", &["del", "hset", "expire"]);
    bob.read().held();
    events("RLOCK.BREAK k", &["del"]);
}

/// The events of each key, and the messages of each channel, in order.
fn heard(listener: &mut Conn) -> BTreeMap<String, Vec<String>> {
    listener.settle();
    let mut heard = BTreeMap::<_, Vec<_>>::new();
    while let Some(told) = listener.read_now() {
        let [_, _, channel, text] = <[String; 4]>::try_from(told.texts()).expect("a pmessage");
        heard.entry(channel).or_default().push(text);
    }
    heard
}

#[test]
fn a_listener_hears_of_each_key_the_same_at_a_replica_as_at_the_primary() {
    let notifying = || Server::builder().config("notify-keyspace-events KA");
    // With `restore` a replica tells of a new lock by the event `restore`.
    let primary = notifying().config("rlock.replicate plain");
    let pair = Pair::of(primary, notifying().without_module());
    until("the replica is online", || {
        let replication = pair.primary.run("INFO replication").text();
        replication.contains("state=online")
    });
    let mut listeners = [&pair.primary, &pair.replica].map(|server| {
        let mut listener = server.connect();
        listener.run("PSUBSCRIBE __keyspace@0__:* redisson_*");
        // The reply to the second pattern.
        listener.read();
        listener
    });
    let mut waiters: Vec<Conn> = Vec::new();
    let mut conn = pair.primary.connect();
    // The later a lease begins, the longer it is: whether it ends later and moves the end of the
    // key must not depend on the clock.
    for command in [
        "RLOCK.ACQUIRE k alice 30000",
        "RLOCK.ACQUIRE k alice 30000",
        "RLOCK.ACQUIRE k bob 30000 BLOCK 0",
        "RLOCK.RENEW k alice 30000",
        "RLOCK.RELEASE k alice",
        "RLOCK.RELEASE k alice",
        "RLOCK.RELEASE k bob",
        "RLOCK.ACQUIRE k alice 30000",
        "RLOCK.BREAK k",
        "RLOCK.ACQUIRE r alice 30000 READ",
        "RLOCK.ACQUIRE r bob 35000 READ",
        "RLOCK.ACQUIRE r bob 40000 READ",
        "RLOCK.RENEW r bob 50000 READ",
        "RLOCK.RELEASE r bob READ LEASE 60000",
        "RLOCK.RELEASE r bob READ",
        "RLOCK.RELEASE r alice READ",
        "RLOCK.ACQUIRE r alice 30000 WRITE",
        "RLOCK.ACQUIRE r alice 35000 READ",
        "RLOCK.RELEASE r alice WRITE",
        "RLOCK.ACQUIRE r bob 30000 WRITE BLOCK 0",
        "RLOCK.RELEASE r alice READ",
        "RLOCK.RELEASE r bob WRITE",
        "RLOCK.LIMIT s 3",
        "RLOCK.ACQUIRE s alice 30000 PERMITS 2",
        "RLOCK.ACQUIRE s bob 35000 PERMITS 1",
        "RLOCK.RELEASE s alice PERMITS 1",
        "RLOCK.RELEASE s alice PERMITS 1",
        "RLOCK.RENEW s bob 40000 PERMITS",
        "RLOCK.LIMIT s 0",
        "RLOCK.RELEASE s bob PERMITS 1",
        "RLOCK.MACQUIRE alice 30000 3 a b c",
        "RLOCK.ACQUIRE b bob 30000 BLOCK 0",
        "RLOCK.MRENEW alice 30000 3 a b c",
        "RLOCK.MRELEASE alice 3 a b c",
        "RLOCK.RELEASE b bob",
        "SET k text",
        "DEL k",
    ] {
        if command.contains(" BLOCK ") {
            waiters.push(pair.primary.blocked_in(command));
        } else {
            assert!(!conn.run(command).is_error(), "{command}");
        }
    }
    for waiter in &mut waiters {
        waiter.read().held();
    }
    pair.settle();
    let [at_primary, at_replica] = listeners.each_mut().map(heard);
    let events: usize = at_primary.values().map(Vec::len).sum();
    assert!(events > 80, "{at_primary:?}");
    assert_eq!(at_primary, at_replica);
}

#[test]
fn an_expired_lock_is_notified_once() {
    let server = Server::builder()
        .config("notify-keyspace-events KA")
        .start();
    let mut listener = server.connect();
    listener.run("SUBSCRIBE __keyspace@0__:k");
    let mut conn = server.connect();
    conn.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    conn.run("RLOCK.RENEW k alice 30");
    bob.read().held();
    let told: Vec<_> = (0..6).map(|_| listener.read().texts()[2].clone()).collect();
    assert_eq!(
        told,
        ["hset", "expire", "expire", "expired", "hset", "expire"]
    );
    listener.expect_nothing_yet();
}

#[test]
fn the_unlock_message_is_told_once_for_each_last_release_hand_over_and_break() {
    let server = Server::start();
    let mut listener = server.connect();
    listener.run("SUBSCRIBE redisson_lock__channel:{k}");
    let mut alice = server.connect();
    let mut told = |conn: &mut Conn, command: &str, times: usize| {
        conn.run(command);
        for _ in 0..times {
            let message = ["message", "redisson_lock__channel:{k}", "0"];
            assert_eq!(listener.read().texts(), message, "{command}");
        }
        listener.expect_nothing_yet();
    };
    told(&mut alice, "RLOCK.ACQUIRE k alice 30000", 0);
    told(&mut alice, "RLOCK.ACQUIRE k alice 30000", 0);
    told(&mut alice, "RLOCK.RELEASE k alice", 0);
    told(&mut alice, "RLOCK.RELEASE k bob", 0);
    let _bob = server.wait_in_queue("k", "bob");
    told(&mut alice, "RLOCK.RELEASE k alice", 1);
    told(&mut alice, "RLOCK.RELEASE k bob", 1);
    told(&mut alice, "RLOCK.BREAK k", 0);
    told(&mut alice, "RLOCK.ACQUIRE k alice 30000", 0);
    told(&mut alice, "RLOCK.BREAK k", 1);
}

#[test]
fn the_channel_is_the_one_where_redisson_listens() {
    let server = Server::start();
    let mut listener = server.connect();
    let mut alice = server.connect();
    // The longest channel's name that is put together without an allocation, and one beyond.
    let [short, long] = [231, 232].map(|len| "n".repeat(len));
    let [in_braces, long_in_braces] = [&short, &long].map(|name| format!("{{{name}}}"));
    let names: [(&[u8], &[u8]); 8] = [
        (b"k", b"{k}"),
        (b"a:{b}", b"a:{b}"),
        (b"a{b", b"a{b"),
        (b"{}x", b"{}x"),
        (b"a}b", b"{a}b}"),
        (b"\xff\0", b"{\xff\0}"),
        (short.as_bytes(), in_braces.as_bytes()),
        (long.as_bytes(), long_in_braces.as_bytes()),
    ];
    for (name, tagged) in names {
        let channel = [b"redisson_lock__channel:", tagged].concat();
        listener.cmd(&[b"SUBSCRIBE", &channel[..]]);
        alice
            .cmd(&[b"RLOCK.ACQUIRE", name, b"alice", b"30000"])
            .held();
        assert_eq!(alice.cmd(&[b"RLOCK.RELEASE", name, b"alice"]), 0);
        let told = listener.read();
        assert_eq!(told.array()[1], rlock_tests::Reply::Bulk(channel));
        assert_eq!(told.array()[2], "0");
    }
}

#[test]
fn subscribers_of_a_replica_are_told_too() {
    for pair in [Pair::start(), Pair::with_plain_replica()] {
        let mut listener = pair.replica.connect();
        listener.run("SUBSCRIBE redisson_lock__channel:{k}");
        until("the primary has heard from its replica", || {
            let replication = pair.primary.run("INFO replication").text();
            replication.contains("state=online")
        });
        let mut alice = pair.primary.connect();
        alice.take("k", "alice");
        let mut bob = pair.primary.wait_in_queue("k", "bob");
        alice.let_go("k", "alice");
        bob.read().held();
        bob.let_go("k", "bob");
        for _ in 0..2 {
            assert_eq!(listener.read().texts()[2], "0");
        }
        pair.settle();
        listener.expect_nothing_yet();
    }
}

#[test]
fn publishing_follows_its_option() {
    let server = Server::start();
    let mut classic = server.connect();
    let mut sharded = server.connect();
    classic.run("SUBSCRIBE redisson_lock__channel:{k}");
    sharded.run("SSUBSCRIBE redisson_lock__channel:{k}");
    let mut alice = server.connect();
    let modes = [
        ("auto", 1, 0),
        ("classic", 1, 0),
        ("sharded", 0, 1),
        ("both", 1, 1),
        ("off", 0, 0),
    ];
    for (mode, to_classic, to_sharded) in modes {
        assert_eq!(alice.run(format!("CONFIG SET rlock.publish {mode}")), "OK");
        alice.take("k", "alice");
        alice.let_go("k", "alice");
        for (listener, times) in [(&mut classic, to_classic), (&mut sharded, to_sharded)] {
            for _ in 0..times {
                assert_eq!(listener.read().texts()[2], "0", "{mode}");
            }
            listener.expect_nothing_yet();
        }
    }
}

#[test]
fn the_head_of_redissons_fair_queue_is_woken_unless_an_option_says_no() {
    let server = Server::start();
    let mut head = server.connect();
    head.run("SUBSCRIBE redisson_lock__channel:{k}:java:1");
    let mut alice = server.connect();
    alice.run("RPUSH redisson_lock_queue:{k} java:1 java:2");
    for (wakes, times) in [("yes", 1), ("no", 0), ("yes", 1)] {
        let set = format!("CONFIG SET rlock.wake-fair-queue {wakes}");
        assert_eq!(alice.run(set), "OK");
        alice.take("k", "alice");
        alice.let_go("k", "alice");
        for _ in 0..times {
            assert_eq!(head.read().texts()[2], "0", "{wakes}");
        }
        head.expect_nothing_yet();
    }
}

#[test]
fn in_a_cluster_the_message_goes_to_both_kinds_of_subscribers_once() {
    let cluster = Cluster::start();
    let mut classic = cluster.first.connect();
    let mut sharded = cluster.first.connect();
    classic.run("SUBSCRIBE redisson_lock__channel:{k}");
    sharded.run("SSUBSCRIBE redisson_lock__channel:{k}");
    let mut alice = cluster.first.connect();
    alice.take("k", "alice");
    alice.let_go("k", "alice");
    for (listener, kind) in [(&mut classic, "message"), (&mut sharded, "smessage")] {
        assert_eq!(
            listener.read().texts(),
            [kind, "redisson_lock__channel:{k}", "0"]
        );
    }
    sharded.expect_nothing_yet();
    classic.expect_nothing_yet();
}

#[test]
fn a_replica_refuses_to_write_and_answers_questions() {
    let pair = Pair::start();
    let token = pair.primary.connect().take("k", "alice");
    pair.settle();
    let mut conn = pair.replica.connect();
    for command in [
        "RLOCK.ACQUIRE k alice 1000",
        "RLOCK.ACQUIRE k bob 1000 BLOCK 0",
        "RLOCK.RELEASE k alice",
        "RLOCK.RENEW k alice 1000",
        "RLOCK.CANCEL k alice",
        "RLOCK.BREAK k",
    ] {
        let error = conn.run(command).error();
        assert!(error.starts_with("READONLY "), "{command}: {error}");
    }
    let info = conn.run("RLOCK.INFO k");
    assert_eq!(
        (info.get("owner"), info.get("token")),
        (&"alice".into(), &token.into())
    );
    assert!(conn.run("RLOCK.LIST").array().is_empty());
    assert_eq!(conn.run("RLOCK.EVENTS s").events(), []);
}

#[test]
fn a_replica_equals_its_primary_after_random_traffic_with_waiters() {
    for plain in [true, false] {
        let pair = if plain {
            Pair::with_plain_replica()
        } else {
            Pair::start()
        };
        let seed = u64::from(pair.primary.process_id());
        thread::scope(|scope| {
            for client in 0..8 {
                let server = &pair.primary;
                scope.spawn(move || random_traffic(server, client, seed));
            }
        });
        until("the last sessions and waits are over", || {
            let left = |what| pair.primary.info_number(&format!("rlock_{what}"));
            left("sessions") + left("session_holds") + left("waiters") == 0
        });
        // Beside the leftovers of the traffic, these are held at the end, and long enough to
        // compare.
        for name in 0..4 {
            pair.primary
                .run(format!("RLOCK.ACQUIRE left{name} alice 600000"))
                .held();
        }
        pair.settle();
        let in_a_minute = pair.primary.run("TIME").texts()[0].parse::<i64>().unwrap() + 60;
        let [primary, replica] =
            [&pair.primary, &pair.replica].map(|server| keyspace(server, in_a_minute * 1000));
        assert!(primary.len() >= 4, "there is something to compare");
        assert_eq!(primary, replica, "plain: {plain}, seed {seed}");
    }
}

/// Three hundred commands of one client among eight, about four locks. The owners of each lock are
/// its own, so they cannot wait for each other in a circle.
fn random_traffic(server: &Server, client: u64, seed: u64) {
    let mut conn = server.connect();
    let mut life = server.session_connection(&format!("s{client}"));
    let mut random = Random::new(seed.wrapping_mul(31).wrapping_add(client));
    for _ in 0..300 {
        if random.below(20) == 0 {
            life = server.session_connection(&format!("s{client}"));
        }
        let command = random_command(&mut random, client);
        let reply = conn.run(&command);
        // The session connection that was left behind may have been the session's still, and the
        // owner may wait already.
        let may = ["NOSESSION ", "WAITING "];
        let is_one = |error: String| may.iter().any(|code| error.starts_with(code));
        assert!(
            !reply.is_error() || is_one(reply.error()),
            "{command}: {reply:?}"
        );
        life.run(format!("RLOCK.EVENTS s{client}")).events();
    }
}

fn random_command(random: &mut Random, client: u64) -> String {
    let name = format!("k{}", random.below(4));
    let owner = format!("{name}-owner{}", random.below(6));
    let lease = if random.below(4) == 0 {
        1 + random.below(20)
    } else {
        600_000
    };
    let acquire = format!("RLOCK.ACQUIRE {name} {owner} {lease}");
    match random.below(16) {
        0..=4 => format!("{acquire} BLOCK {}", 1 + random.below(20)),
        5 => format!("{acquire} ONCE"),
        6..=8 => format!("{acquire} QUEUE {} SESSION s{client}", random.below(20)),
        9 => format!("{acquire} BLOCK {} SESSION s{client}", 1 + random.below(20)),
        10..=11 => format!("RLOCK.RELEASE {name} {owner}"),
        12 => format!("RLOCK.RENEW {name} {owner} {lease}"),
        13 => format!("RLOCK.CANCEL {name} {owner}"),
        14 => format!("RLOCK.BREAK {name}"),
        _ => format!("DEL {name}"),
    }
}

/// All keys of all locks with their fields and the ends of their leases; what ends before `from_ms`
/// is left out, since a replica deletes it later.
fn keyspace(server: &Server, from_ms: i64) -> BTreeMap<String, (BTreeMap<String, String>, i64)> {
    let mut conn = server.connect();
    let names = conn.run("KEYS *").texts();
    let locks = names.into_iter().map(|name| {
        let flat = conn.run(format!("HGETALL {name}")).texts();
        let fields = flat
            .chunks(2)
            .map(|pair| (pair[0].clone(), pair[1].clone()))
            .collect();
        let end = end_of(&mut conn, &name);
        (name, (fields, end))
    });
    locks.filter(|(_, (_, end))| *end > from_ms).collect()
}

/// A module hears of a new key in the midst of a change. Its write must reach replicas after our
/// writes that came before it.
#[test]
fn a_write_of_another_module_when_a_key_is_made_keeps_its_place() {
    let pair = Pair::start();
    pair.primary.load_c_module("meddler");
    let mut conn = pair.primary.connect();
    let mut meddle = |before: &[&str], on: &str, command: &str| {
        for command in before {
            conn.run(*command);
        }
        conn.run(format!("MEDDLER.ON new {on}"));
        conn.run(command);
        pair.settle();
        for what in ["DEBUG DIGEST", "PEXPIRETIME a", "PEXPIRETIME k"] {
            let [primary, replica] = [&pair.primary, &pair.replica].map(|server| server.run(what));
            assert_eq!(primary, replica, "{what}, {on}: {command}");
        }
        conn.run("FLUSHALL");
    };
    meddle(&[], "b 0 DEL a", "RLOCK.MACQUIRE o 600000 2 a b");
    meddle(&[], "b 0 EXPIRE a 500", "RLOCK.MACQUIRE o 600000 2 a b");
    let reads = ["RLOCK.ACQUIRE l o 600000 READ"; 2];
    let timeout = "{l}:o:rwlock_timeout";
    let deletes = format!("{timeout}:3 0 DEL {timeout}:2");
    meddle(&reads, &deletes, "RLOCK.ACQUIRE l o 700000 READ");
    let waits = [
        "RLOCK.ACQUIRE k o1 600000",
        "RLOCK.EVENTS s GRACE 60000",
        "RLOCK.ACQUIRE k o2 600000 QUEUE 0 SESSION s",
    ];
    meddle(&waits, "k 0 HSET k created 1", "RLOCK.RELEASE k o1");
    assert_eq!(pair.primary.run("MEDDLER.DONE"), 4);
}

#[test]
fn holds_survive_a_restart_with_their_ends_and_tokens_go_on_growing() {
    for persistence in ["appendonly yes", "save 3600 1"] {
        let mut server = Server::builder().config(persistence).start();
        let mut alice = server.connect();
        let token = alice.take("k", "alice");
        let end = end_of(&mut alice, "k");
        alice.run("RLOCK.ACQUIRE short alice 20").held();
        if persistence.starts_with("save") {
            assert_eq!(alice.run("SAVE"), "OK");
        }
        server.restart();
        assert_eq!(server.holder("k").as_deref(), Some("alice"));
        let mut alice = server.connect();
        assert_eq!(end_of(&mut alice, "k"), end, "{persistence}");
        assert_eq!(alice.run("RLOCK.RENEW k alice 30000"), 1);
        assert!(alice.take("other", "alice") > token, "{persistence}");
        until("what has run out is free", || {
            server.holder("short").is_none()
        });
    }
}

#[test]
fn a_server_without_the_module_reads_the_locks_as_they_are() {
    for persistence in ["appendonly yes", "save 3600 1"] {
        let mut server = Server::builder().config(persistence).start();
        let mut alice = server.connect();
        let token = alice.take("k", "alice");
        let mut bob = server.wait_in_queue("k", "bob");
        alice.let_go("k", "alice");
        let next = bob.read().held().1;
        assert!(next > token);
        alice.run("SAVE");
        server.restart_without_module();
        assert_eq!(server.run("HGET k bob"), "1");
        assert_eq!(server.run("HGET k fence"), format!("t{next}"));
        assert!(server.run("PTTL k").int() > 0);
    }
}

#[test]
fn a_replica_that_joins_later_knows_the_holds() {
    let primary = Server::start();
    let token = primary.connect().take("k", "alice");
    let replica = Server::builder().without_module().start();
    replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    until("the replica has it", || replica.holder("k").is_some());
    in_sync(&primary, &replica);
    assert_eq!(replica.run("HGET k fence"), format!("t{token}"));
}
