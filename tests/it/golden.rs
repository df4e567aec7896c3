//! What earlier versions have left: the files that their servers wrote, and what their clients
//! send. They are in `tests/data/golden`, with how they were made.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rlock_tests::{Conn, Reply, Server, eventually, until};

use super::client::{client, soon, wait_in_queue};

const LEASE_MS: i64 = 3_600_000;
/// How long after the files were made a server finds them, by its own clock.
const LATER_S: i64 = 60;

fn folder(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.join("data/golden/0.1.0").join(name)
}

#[track_caller]
fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// One line of `holds`: what the server of then answered to whoever took a lock last.
struct Hold {
    lock: String,
    owner: String,
    /// `READ` or `WRITE`; empty for a plain lock.
    mode: String,
    count: i64,
    token: i64,
}

impl Hold {
    fn of_line(line: &str) -> Self {
        let words: Vec<_> = line.split(' ').collect();
        let [lock, owner, mode, count, token] = words[..] else {
            panic!("{line}");
        };
        Self {
            lock: lock.to_owned(),
            owner: owner.to_owned(),
            mode: mode.trim_end_matches("plain").to_owned(),
            count: count.parse().unwrap(),
            token: token.parse().unwrap(),
        }
    }

    /// What `RLOCK.INFO` tells of it: count, token and TTL.
    #[track_caller]
    fn told(&self, server: &Server) -> (i64, Reply, i64) {
        let mut info = server.run(format!("RLOCK.INFO {}", self.lock));
        if !self.mode.is_empty() {
            let holders = info.get("holders");
            let is_ours = |holder: &&Reply| {
                holder.get("owner").text() == self.owner
                    && holder.get("mode").text() == self.mode.to_lowercase()
            };
            info = holders
                .array()
                .iter()
                .find(is_ours)
                .expect(&self.lock)
                .clone();
        }
        assert_eq!(info.get("owner").text(), self.owner, "{}", self.lock);
        let (count, token) = (info.get("count").int(), info.get("token").clone());
        (count, token, info.get("ttl-ms").int())
    }

    fn command(&self, name: &str, rest: &str) -> String {
        format!(
            "RLOCK.{name} {} {} {rest} {}",
            self.lock, self.owner, self.mode
        )
    }
}

/// A server of today that has loaded these files, a minute after they were made; and the holds.
#[track_caller]
fn server_with(files: &str, settings: &[&str]) -> (Server, Vec<Hold>) {
    let files = folder(files);
    let made: i64 = text(&files.join("made")).trim().parse().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let behind = made + LATER_S - i64::try_from(now.as_secs()).unwrap();
    let builder = Server::builder().data(&files).clock_ahead(behind);
    let server = settings
        .iter()
        .fold(builder, |builder, line| builder.config(line));
    let holds = text(&files.join("holds"))
        .lines()
        .map(Hold::of_line)
        .collect();
    (server.start(), holds)
}

#[track_caller]
fn is_as_it_was(server: &Server, holds: &[Hold]) {
    assert!(holds.len() > 8, "nothing found is nothing looked at");
    for hold in holds {
        let (count, token, ttl) = hold.told(server);
        assert_eq!(count, hold.count, "{} {}", hold.lock, hold.owner);
        // What a writer was given only the server knew that granted it.
        if hold.mode == "WRITE" {
            assert_eq!(token, Reply::Null);
        } else {
            assert_eq!(token, hold.token, "{} {}", hold.lock, hold.owner);
        }
        // The clock goes on while this runs, and takes its time on a busy machine.
        let left = LEASE_MS - LATER_S * 1000;
        let longest = left + 60_000;
        assert!(
            (left - 300_000..=longest).contains(&ttl),
            "{}: {ttl}",
            hold.lock
        );
    }
    for free in ["golden:over", "golden:free"] {
        assert_eq!(server.holder(free), None);
    }
}

/// Everything that is done with a lock is done with these.
#[track_caller]
fn goes_on(server: &Server, holds: &[Hold]) {
    let latest = holds.iter().map(|hold| hold.token).max().unwrap();
    let mut conn = server.connect();
    assert!(conn.take("golden:free", "zoe") > latest, "tokens grow");
    for hold in holds {
        let mode = if hold.mode.is_empty() { "" } else { "WRITE" };
        let stranger = format!("RLOCK.ACQUIRE {} zoe 1000 {mode}", hold.lock);
        assert!(server.run(stranger).refused() > 0, "{}", hold.lock);
        assert_eq!(
            conn.run(hold.command("RENEW", "7200000")),
            1,
            "{}",
            hold.lock
        );
        let (_, _, ttl) = hold.told(server);
        assert!(ttl > LEASE_MS, "{}: {ttl}", hold.lock);
    }
    // Those who wait get their lock from the last release, with a later token.
    let mut waiting = HashMap::new();
    for hold in holds {
        let mode = if hold.mode.is_empty() { "" } else { "WRITE" };
        waiting.entry(&hold.lock).or_insert_with(|| {
            let command = format!("RLOCK.ACQUIRE {} zoe 30000 {mode} BLOCK 0", hold.lock);
            server.blocked_in(&command)
        });
    }
    for hold in holds {
        for left in (0..hold.count).rev() {
            assert_eq!(conn.run(hold.command("RELEASE", "")), left, "{}", hold.lock);
        }
    }
    for (lock, mut waiter) in waiting {
        let (count, token) = waiter.read().held();
        assert_eq!(count, 1, "{lock}");
        assert!(token > latest, "{lock}: {token}");
    }
}

#[track_caller]
fn is_read_and_goes_on(files: &str, settings: &[&str]) {
    let (server, holds) = server_with(files, settings);
    is_as_it_was(&server, &holds);
    goes_on(&server, &holds);
}

#[test]
fn locks_in_a_snapshot_of_0_1_0_are_held_renewed_and_handed_over() {
    is_read_and_goes_on("rdb", &[]);
}

#[test]
fn locks_in_an_append_only_file_of_0_1_0_are_held_renewed_and_handed_over() {
    is_read_and_goes_on("aof", &["appendonly yes", "aof-use-rdb-preamble no"]);
}

#[test]
fn locks_in_an_append_only_file_of_0_1_0_that_begins_with_a_snapshot_are_too() {
    is_read_and_goes_on("aof-after-rdb", &["appendonly yes"]);
}

#[test]
fn locks_of_0_1_0_that_are_over_are_free() {
    let files = folder("rdb");
    // An hour after today, if the files were made just now.
    let server = Server::builder()
        .data(&files)
        .clock_ahead(LEASE_MS / 1000 + 1)
        .start();
    for line in text(&files.join("holds")).lines() {
        let hold = Hold::of_line(line);
        let (count, _) = server
            .run(format!("RLOCK.ACQUIRE {} zoe 1000", hold.lock))
            .held();
        assert!(count >= 1);
    }
}

/// One line of `traffic`.
struct Passed {
    connection: String,
    is_command: bool,
    /// `None`: a reply that is not compared.
    message: Option<Reply>,
}

impl Passed {
    fn of_line(line: &str) -> Self {
        let mut words = line.splitn(3, ' ');
        let connection = words.next().unwrap().to_owned();
        let is_command = words.next().unwrap() == ">";
        let message = words.next().map(|escaped| {
            let bytes = unescaped(escaped);
            let (message, length) = Reply::decode(&bytes).expect(line);
            assert_eq!(length, bytes.len(), "{line}");
            message
        });
        Self {
            connection,
            is_command,
            message,
        }
    }

    /// Whether it asks for events and waits for them.
    fn polls(&self) -> bool {
        let words = self
            .is_command
            .then(|| self.message.as_ref().unwrap().texts());
        words.is_some_and(|words| words[0] == "RLOCK.EVENTS" && words.iter().any(|w| w == "BLOCK"))
    }
}

fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'\\' => match rest.next().unwrap() {
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'x' => {
                    let digits = [rest.next().unwrap(), rest.next().unwrap()];
                    u8::from_str_radix(str::from_utf8(&digits).unwrap(), 16).unwrap()
                }
                other => other,
            },
            other => other,
        });
    }
    bytes
}

/// The traffic without polls that nothing came of, or that were still waiting at the end: when one
/// ends without an event is a matter of time.
fn without_idle_polls(mut traffic: Vec<Passed>) -> Vec<Passed> {
    let mut idle = Vec::new();
    for (at, passed) in traffic
        .iter()
        .enumerate()
        .filter(|(_, passed)| passed.polls())
    {
        let later = traffic.iter().enumerate().skip(at + 1);
        let mut later = later.filter(|(_, next)| next.connection == passed.connection);
        match later.next() {
            Some((_, reply)) if reply.message != Some(Reply::Array(Vec::new())) => {}
            reply => idle.extend([at].into_iter().chain(reply.map(|(reply, _)| reply))),
        }
    }
    let mut at = 0;
    traffic.retain(|_| {
        at += 1;
        !idle.contains(&(at - 1))
    });
    traffic
}

/// Fails unless two replies are alike: of the same types, with the same texts and the same small
/// numbers. What is larger are tokens and times; the tokens of then are told of those of today.
fn compare(then: &Reply, now: &Reply, tokens: &mut HashMap<String, String>, of: &str) {
    match (then, now) {
        (Reply::Int(then), Reply::Int(now)) if *then > 1_000_000_000_000 => {
            assert!(*now > 1_000_000_000_000, "{of}: {now} is no token");
            tokens.insert(then.to_string(), now.to_string());
        }
        // What is left of a lease or has been waited.
        (Reply::Int(then), Reply::Int(now)) if *then > 1_000 => {
            assert!((0..=60_000).contains(now), "{of}: {now}, and {then} then");
        }
        (Reply::Array(then), Reply::Array(now)) => {
            assert_eq!(then.len(), now.len(), "{of}: {now:?}, and {then:?} then");
            for (then, now) in then.iter().zip(now) {
                compare(then, now, tokens, of);
            }
        }
        (then, now) => assert_eq!(then, now, "{of}"),
    }
}

#[test]
fn a_client_of_0_1_0_is_answered_as_it_was_then() {
    let lines = text(&folder("traffic"));
    let traffic = without_idle_polls(lines.lines().map(Passed::of_line).collect());
    let server = Server::start();
    let mut connections: HashMap<&str, Conn> = HashMap::new();
    let mut unanswered: HashMap<&str, Vec<Vec<String>>> = HashMap::new();
    let mut tokens = HashMap::new();
    let mut compared = 0;
    for passed in &traffic {
        let name = passed.connection.as_str();
        let conn = connections.entry(name).or_insert_with(|| server.connect());
        let asked = unanswered.entry(name).or_default();
        if passed.is_command {
            let mut words = passed.message.as_ref().unwrap().texts();
            for word in &mut words {
                if let Some(today) = tokens.get(word) {
                    word.clone_from(today);
                }
            }
            conn.send_cmd(&words);
            asked.push(words);
            continue;
        }
        let command = asked.remove(0);
        let Some(then) = &passed.message else {
            conn.read();
            continue;
        };
        // A poll may end while this machine stands still: then it is sent again.
        let now = eventually("a reply that is no idle poll's", || {
            let reply = conn.read();
            let is_idle = reply == Reply::Array(Vec::new()) && reply != *then;
            if is_idle {
                conn.send_cmd(&command);
            }
            (!is_idle).then_some(reply)
        });
        compare(then, &now, &mut tokens, &command.join(" "));
        compared += 1;
    }
    assert!(compared > 30, "nothing found is nothing looked at");
    assert!(tokens.len() > 5, "{tokens:?}");
}

/// The commands of a client, as 0.1.0 knew them: how many words come before the names or options,
/// whether names follow, with their number in front, and the options without a value and with one.
const OF_0_1_0: [(&str, usize, bool, &[&str], &[&str]); 8] = [
    (
        "ACQUIRE",
        3,
        false,
        &["READ", "WRITE", "ONCE"],
        &["BLOCK", "QUEUE", "SESSION"],
    ),
    ("RELEASE", 2, false, &["READ", "WRITE"], &["TOKEN", "LEASE"]),
    ("RENEW", 3, false, &["READ", "WRITE"], &["TOKEN", "SESSION"]),
    ("CANCEL", 2, false, &[], &[]),
    ("EVENTS", 1, false, &[], &["BLOCK", "GRACE"]),
    (
        "MACQUIRE",
        2,
        true,
        &["ONCE"],
        &["BLOCK", "QUEUE", "SESSION"],
    ),
    ("MRELEASE", 1, true, &[], &[]),
    ("MRENEW", 2, true, &[], &["SESSION"]),
];

/// Whether a server of 0.1.0 would have carried it out.
fn was_known_to_0_1_0(name: &str, words: &[&str]) -> bool {
    let Some((_, before, has_names, flags, options)) = OF_0_1_0.iter().find(|of| of.0 == name)
    else {
        return false;
    };
    let mut words = words.iter().skip(*before);
    if *has_names {
        let names = words.next().unwrap().parse::<usize>().unwrap();
        words.nth(names - 1).unwrap();
    }
    while let Some(word) = words.next() {
        if options.contains(word) {
            words.next().expect("a value");
        } else if !flags.contains(word) {
            return false;
        }
    }
    true
}

/// So a new client works with an old server as well: what that answers is what today's server
/// answers to the client of then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn todays_client_sends_0_1_0_only_what_that_knows_unless_it_is_asked_for_newer_things() {
    let server = Server::start();
    let mut monitor = server.connect();
    monitor.run("MONITOR");
    let client = client(&server).await;
    let guard = client.lock("k").lock().await.unwrap();
    let refused = client.lock("k").try_lock().await;
    assert!(refused.unwrap_err().is_not_acquired());
    let waiting = wait_in_queue(&server, &client, "k");
    let dropped = wait_in_queue(&server, &client, "k");
    dropped.abort();
    until("it has left the queue", || {
        server.waiting_owners("k").len() == 1
    });
    soon(guard.renew()).await.unwrap();
    soon(guard.unlock()).await.unwrap();
    let guard = soon(waiting).await.unwrap().unwrap();
    soon(guard.unlock()).await.unwrap();
    let scope = client.scope();
    let outer = scope.lock("k").lock().await.unwrap();
    let inner = scope.lock("k").lock().await.unwrap();
    soon(inner.unlock()).await.unwrap();
    soon(outer.unlock()).await.unwrap();
    let prices = client.rw_lock("prices");
    soon(prices.read().await.unwrap().unlock()).await.unwrap();
    let writer = prices.write().await.unwrap();
    soon(writer.renew()).await.unwrap();
    let reader = soon(writer.downgrade()).await.unwrap();
    soon(reader.renew()).await.unwrap();
    soon(reader.unlock()).await.unwrap();
    let both = client.multi(["a", "b"]).lock().await.unwrap();
    soon(both.renew()).await.unwrap();
    soon(both.unlock()).await.unwrap();
    soon(client.shutdown()).await;
    server.run("ECHO over");

    let mut seen = HashMap::new();
    loop {
        let line = monitor.read().text();
        let words: Vec<_> = line.split('"').skip(1).step_by(2).collect();
        if words == ["ECHO", "over"] {
            break;
        }
        if let Some(name) = words[0].strip_prefix("RLOCK.") {
            // The harness looks into queues.
            if name == "INFO" {
                continue;
            }
            assert!(was_known_to_0_1_0(name, &words[1..]), "{line}");
            *seen.entry(name.to_owned()).or_insert(0) += 1;
        }
    }
    assert_eq!(seen.len(), OF_0_1_0.len(), "{seen:?}");
}

#[test]
fn what_0_1_0_did_not_know_is_noticed() {
    for (line, known) in [
        ("ACQUIRE k o 1 QUEUE 0 SESSION s ONCE", true),
        ("ACQUIRE k o 1 SESSION s WANTED", false),
        ("ACQUIRE k o 1 PERMITS 2", false),
        ("MACQUIRE o 1 2 QUEUE ONCE SESSION s ONCE", true),
        ("MACQUIRE o 1 1 a b", false),
        ("RELEASE k o WRITE TOKEN 7", true),
        ("RENEW k o 1 SESSION s WANTED", false),
        ("GUARD k o CALL PING", false),
    ] {
        let words: Vec<_> = line.split(' ').collect();
        assert_eq!(was_known_to_0_1_0(words[0], &words[1..]), known, "{line}");
    }
}
