//! Holds and waits of every kind, all in one slot of a cluster, to be carried through what happens
//! to servers.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::Duration;

use rlock_tests::{Conn, Reply, Server, patience, until};

/// The holds of alice and amy, for ten minutes.
const HOLDS: [&str; 5] = [
    "RLOCK.ACQUIRE k alice 600000",
    "RLOCK.ACQUIRE r alice 600000 READ",
    "RLOCK.ACQUIRE r amy 600000 READ",
    "RLOCK.ACQUIRE w alice 600000 WRITE",
    "RLOCK.MACQUIRE alice 600000 2 x y",
];

/// The waits of bob, each blocked on a connection.
const BLOCKED: [&str; 4] = [
    "RLOCK.ACQUIRE k bob 60000 BLOCK 0",
    "RLOCK.ACQUIRE r bob 60000 WRITE BLOCK 0",
    "RLOCK.ACQUIRE w bob 60000 READ BLOCK 0",
    "RLOCK.MACQUIRE bob 60000 2 x z BLOCK 0",
];

/// The waits of carol behind him, queued for a session.
const QUEUED: [&str; 4] = [
    "RLOCK.ACQUIRE k carol 60000 QUEUE 0 SESSION s",
    "RLOCK.ACQUIRE r carol 60000 READ QUEUE 0 SESSION s",
    "RLOCK.ACQUIRE w carol 60000 WRITE QUEUE 0 SESSION s",
    "RLOCK.MACQUIRE carol 60000 2 y z QUEUE 0 SESSION s",
];

const RELEASES: [&str; 5] = [
    "RLOCK.RELEASE k alice",
    "RLOCK.RELEASE r alice READ",
    "RLOCK.RELEASE r amy READ",
    "RLOCK.RELEASE w alice WRITE",
    "RLOCK.MRELEASE alice 2 x y",
];

const RELEASES_OF_BOB: [&str; 4] = [
    "RLOCK.RELEASE k bob",
    "RLOCK.RELEASE r bob WRITE",
    "RLOCK.RELEASE w bob READ",
    "RLOCK.MRELEASE bob 2 x z",
];

/// All of them at one server.
pub(super) struct Everybody {
    blocked: Vec<(String, Conn)>,
    life: Conn,
    /// The largest token that anybody was told of.
    pub(super) largest: i64,
}

impl Everybody {
    /// The names end in `tag`, so that they lie in one slot: `{t}`.
    pub(super) fn at(server: &Server, tag: &str) -> Self {
        let mut conn = server.connect();
        let held = HOLDS.map(|hold| conn.run(tagged(hold, tag)).held());
        let largest = held.map(|(count, token)| {
            assert_eq!(count, 1);
            token
        });
        let largest = largest.into_iter().max().expect("some");
        let (blocked, life) = wait(server, tag);
        Self {
            blocked,
            life,
            largest,
        }
    }

    /// Nobody has been told that a lock is theirs; the server has sent them all away, with `code`
    /// or another word of its own, or by closing the connection.
    pub(super) fn are_sent_away(mut self, codes: &[&str]) {
        let is_sent_away = |text: &str| codes.iter().any(|code| text.starts_with(code));
        for (wait, conn) in &mut self.blocked {
            match conn.try_read(patience(Duration::from_secs(20))) {
                Ok(told) => assert!(
                    told.is_error() && is_sent_away(&told.error()),
                    "{wait}: {told:?}"
                ),
                Err(error) => assert_ne!(error.kind(), ErrorKind::WouldBlock, "{wait}: nothing"),
            }
        }
        // The session's connection may live on.
        let Ok(events) = self.life.try_run("RLOCK.EVENTS s") else {
            return;
        };
        for (event, why) in events.events() {
            assert!(event.starts_with("error "), "{event} {why:?}");
            assert!(is_sent_away(&why.text()), "{event} {why:?}");
        }
    }

    /// All queue again at this server, and whoever held a lock gives it back: each is granted
    /// once and in order, with a token larger than any before.
    pub(super) fn go_on(server: &Server, tag: &str, largest: i64) {
        let (blocked, mut life) = wait(server, tag);
        let mut conn = server.connect();
        for release in RELEASES {
            assert!(conn.run(tagged(release, tag)).int() >= 0, "{release}");
        }
        for (wait, mut bob) in blocked {
            let (count, token) = bob.read().held();
            assert_eq!(count, 1, "{wait}");
            assert!(token > largest, "{wait}: {token} after {largest}");
            bob.expect_nothing_yet();
        }
        for release in RELEASES_OF_BOB {
            assert!(conn.run(tagged(release, tag)).int() >= 0, "{release}");
        }
        let mut granted = Vec::new();
        until("carol is granted everything", || {
            granted.extend(life.run("RLOCK.EVENTS s").events());
            granted.len() >= QUEUED.len()
        });
        granted.extend(life.run("RLOCK.EVENTS s").events());
        let mut events: Vec<_> = granted
            .into_iter()
            .map(|(event, token)| {
                assert!(token.int() > largest, "{event}");
                event
            })
            .collect();
        events.sort();
        let expected = ["k", "r", "w", "y"].map(|name| format!("granted {name}{tag} carol"));
        assert_eq!(events, expected);
        assert_eq!(server.info_number("rlock_waiters"), 0);
    }
}

/// Bob's connections, and carol's session connection.
fn wait(server: &Server, tag: &str) -> (Vec<(String, Conn)>, Conn) {
    let blocked = BLOCKED.map(|wait| {
        let conn = server.blocked_in(&tagged(wait, tag));
        (wait.to_owned(), conn)
    });
    let life = server.session_connection("s");
    let mut conn = server.connect();
    for queued in QUEUED {
        assert!(conn.run(tagged(queued, tag)).queued() > 0, "{queued}");
    }
    (blocked.into(), life)
}

/// The command with the tag behind the names of locks, which are single letters.
fn tagged(command: &str, tag: &str) -> String {
    let words = command.split(' ').map(|word| {
        let is_name = word.len() == 1 && word != "s" && word.chars().all(char::is_alphabetic);
        if is_name {
            format!("{word}{tag}")
        } else {
            word.to_owned()
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// All keys with their contents and expiries: the holds, token by token. Of a key that goes
/// meanwhile, as when a replica is loaded anew, there is nothing.
pub(super) fn holds(server: &Server) -> BTreeMap<String, (Vec<String>, i64)> {
    let mut conn = server.connect();
    let names = conn.run("KEYS *").texts();
    let keys = names.into_iter().map(|name| {
        let mut content = if conn.run(format!("TYPE {name}")) == "hash" {
            let flat = conn.run(format!("HGETALL {name}")).texts();
            flat.chunks(2).map(|pair| pair.join("=")).collect()
        } else {
            let value = conn.run(format!("GET {name}"));
            let value = (value != Reply::Null).then(|| value.text());
            Vec::from_iter(value)
        };
        content.sort();
        let end = conn.run(format!("PEXPIRETIME {name}")).int();
        (name, (content, end))
    });
    keys.collect()
}
