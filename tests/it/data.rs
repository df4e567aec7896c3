//! Hashes of data at the name of a lock: they are no locks, and nothing changes them.

use rlock_tests::{Reply, Server, until};

const DATA: &str = "WRONGTYPE the key holds a hash of data, which is no lock: \
                    it has no TTL, and a field that is no hold";

/// Each has no TTL, and a field beside `mode` and `fence` that is no hold.
const HASHES: [&str; 8] = [
    "name Ada",
    "alice 1 note hello",
    "alice 0",
    "alice -1",
    "mode dark name Ada",
    "mode read alice 1 name Ada",
    "mode permits alice 1:2",
    "fence t5 alice:write 1:5",
];

#[test]
fn a_hash_of_data_is_not_taken_not_waited_for_and_not_broken() {
    let server = Server::start();
    let _life = server.session_connection("s");
    let mut conn = server.connect();
    for fields in HASHES {
        conn.run(format!("HSET k {fields}"));
        let before = conn.run("HGETALL k");
        for command in [
            "RLOCK.ACQUIRE k alice 1000",
            "RLOCK.ACQUIRE k name 1000 ONCE",
            "RLOCK.ACQUIRE k bob 1000 BLOCK 0",
            "RLOCK.ACQUIRE k bob 1000 QUEUE 0 SESSION s",
            "RLOCK.ACQUIRE k bob 1000 READ",
            "RLOCK.ACQUIRE k bob 1000 WRITE BLOCK 0",
            "RLOCK.ACQUIRE k bob 1000 PERMITS 1 OF 2",
            "RLOCK.MACQUIRE bob 1000 2 free k",
            "RLOCK.MACQUIRE alice 1000 1 k BLOCK 0",
            "RLOCK.BREAK k",
        ] {
            assert_eq!(conn.run(command).error(), DATA, "{fields}: {command}");
        }
        for command in [
            "RLOCK.RELEASE k bob",
            "RLOCK.RENEW k bob 1000",
            "RLOCK.CANCEL k bob",
            "RLOCK.MRELEASE bob 1 k",
        ] {
            conn.run(command);
        }
        assert_eq!(conn.run("HGETALL k"), before, "{fields}");
        assert_eq!(conn.run("TTL k"), -1);
        assert!(!conn.run("RLOCK.INFO k").is_error(), "{fields}");
        conn.run("DEL k");
    }
    assert_eq!(server.run("DBSIZE"), 0);
}

/// Redisson's layouts and ours, by whoever wrote them: they may have lost their TTL.
#[test]
fn a_lock_that_has_no_ttl_is_a_lock() {
    let server = Server::start();
    let mut conn = server.connect();
    for fields in [
        "alice 1",
        "alice 1 fence t7",
        "alice 2147483648",
        "alice 1 bob 3",
        "mode write alice:write 1",
        "mode write alice:write 1:t17",
    ] {
        conn.run(format!("HSET k {fields}"));
        let reply = conn.run("RLOCK.ACQUIRE k carol 1000");
        let is_of_plain = !fields.starts_with("mode");
        assert_eq!(reply.is_error(), !is_of_plain, "{fields}: {reply:?}");
        if is_of_plain {
            assert_eq!(reply.refused(), -1, "{fields}");
        } else {
            assert!(reply.error().starts_with("WRONGKIND"), "{fields}");
        }
        assert_eq!(conn.run("RLOCK.BREAK k"), 1, "{fields}");
    }
    // With a TTL it may be a lock with an odd value: whoever its fields name holds it.
    conn.pipeline(&["HSET k name Ada", "PEXPIRE k 30000"]);
    assert!(conn.run("RLOCK.ACQUIRE k carol 1000").refused() > 0);
}

#[test]
fn waiters_of_a_lock_that_becomes_data_are_told() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    let mut conn = server.connect();
    conn.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    conn.queue("k", "carol", "s");
    conn.run("RLOCK.MACQUIRE dave 30000 2 k free QUEUE 0 SESSION s")
        .queued();
    conn.pipeline(&["DEL k", "HSET k name Ada"]);
    assert_eq!(bob.read().error(), DATA);
    let mut told = Vec::new();
    until("both are told", || {
        told.extend(life.run("RLOCK.EVENTS s").events());
        told.len() == 2
    });
    let expected = ["error k carol", "error k dave"];
    assert_eq!(
        told,
        expected.map(|event| (event.to_owned(), Reply::from(DATA)))
    );
    assert_eq!(conn.run("HGETALL k").texts(), ["name", "Ada"]);
    assert_eq!(server.info_number("rlock_waiters"), 0);
}

/// A thousand fields are looked at.
#[test]
fn a_hash_of_many_counts_is_a_lock_whatever_comes_last() {
    let server = Server::start();
    let mut conn = server.connect();
    let fields: Vec<String> = (0..2_000)
        .map(|owner| format!("HSET k o{owner} 1"))
        .collect();
    conn.pipeline(&fields);
    assert_eq!(conn.run("RLOCK.ACQUIRE k carol 1000").refused(), -1);
}
