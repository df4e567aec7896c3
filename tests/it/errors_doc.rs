//! The errors of docs/commands.md against those that real servers answer with, both ways: each
//! command is given everything that is wrong about any command. An answer that the document does
//! not have, for this command, is as wrong as one that it has and that is never answered.

use std::collections::BTreeSet;

use rlock_tests::{Cluster, Conn, Pair, Server};

use super::commands_doc::tables;

/// Each command, and where in it what could be wrong stands.
const COMMANDS: [(&str, &str); 16] = [
    ("ACQUIRE", "KEY OWNER LEASE OPTIONS"),
    ("RELEASE", "KEY OWNER OPTIONS"),
    ("RENEW", "KEY OWNER LEASE OPTIONS"),
    ("CANCEL", "KEY OWNER OPTIONS"),
    ("BREAK", "KEY OPTIONS"),
    ("LIMIT", "KEY LIMIT"),
    ("BIND", "SESSION EPOCH OPTIONS"),
    ("EVENTS", "SESSION OPTIONS"),
    ("INFO", "KEY OPTIONS"),
    ("LIST", "OPTIONS"),
    ("LOG", "OPTIONS"),
    ("SESSIONS", "OPTIONS"),
    ("MACQUIRE", "OWNER LEASE NUMKEYS KEY OPTIONS"),
    ("MRELEASE", "OWNER NUMKEYS KEY OPTIONS"),
    ("MRENEW", "OWNER LEASE NUMKEYS KEY OPTIONS"),
    ("GUARD", "KEY OWNER OPTIONS CALL"),
];

/// The default words. `#` is another number in each round, so that none meets what another has
/// left.
const RIGHT: [(&str, &str); 9] = [
    ("KEY", "free#"),
    ("OWNER", "alice"),
    ("LEASE", "1000"),
    ("LIMIT", "5"),
    ("SESSION", "s#"),
    ("EPOCH", "EPOCH 1"),
    ("NUMKEYS", "1"),
    ("OPTIONS", ""),
    ("CALL", "CALL PING"),
];

/// The wrong words. An empty word is written as `''`, and LONG is a pattern of a byte too many.
const WRONG: [&[(&str, &str)]; 100] = [
    &[],
    &[("KEY", "data#")],
    &[("SESSION", "nobody")],
    &[("EPOCH", "EPOCH -1")],
    &[("EPOCH", "LATER 1")],
    &[("OPTIONS", "EPOCH -1")],
    &[("OPTIONS", "EPOCH")],
    &[("OPTIONS", "EPOCH 1 EPOCH 1")],
    &[("OPTIONS", "AFTER x 1")],
    &[("OPTIONS", "AFTER 1")],
    &[("OPTIONS", "AFTER 1 1 AFTER 1 1")],
    &[("OPTIONS", "PERMITS READ")],
    &[("LEASE", "0")],
    &[("LEASE", "9007199254740992")],
    &[("OWNER", "''")],
    &[("OWNER", "fence")],
    &[("OWNER", "mode")],
    &[("SESSION", "''")],
    &[("NUMKEYS", "0")],
    &[("NUMKEYS", "2")],
    &[("KEY", "text#")],
    &[("KEY", "text#"), ("OPTIONS", "READ")],
    &[("KEY", "plain#"), ("OPTIONS", "READ")],
    &[("KEY", "plain#"), ("OPTIONS", "WRITE")],
    &[("KEY", "readers#")],
    &[("KEY", "readers#"), ("OPTIONS", "BLOCK 1")],
    &[("KEY", "readers#"), ("OPTIONS", "WRITE BLOCK 1")],
    &[("KEY", "odd#")],
    &[("KEY", "odd#"), ("OPTIONS", "ONCE")],
    &[("KEY", "full#")],
    &[("KEY", "circle#"), ("OPTIONS", "BLOCK 1")],
    &[("KEY", "circle#"), ("OPTIONS", "QUEUE 1 SESSION s#")],
    &[("KEY", "busy#"), ("OPTIONS", "BLOCK 1")],
    &[("KEY", "busy#"), ("OPTIONS", "QUEUE 1 SESSION s#")],
    &[("KEY", "busy#"), ("OWNER", "dave"), ("OPTIONS", "BLOCK 1")],
    &[("OWNER", "alice:write"), ("OPTIONS", "READ")],
    &[("OWNER", "alice:write"), ("OPTIONS", "WRITE")],
    &[("OPTIONS", "NONSENSE")],
    &[("OPTIONS", "READ")],
    &[("OPTIONS", "READ READ")],
    &[("OPTIONS", "READ WRITE")],
    &[("OPTIONS", "WRITE READ")],
    &[("OPTIONS", "PERMITS 0")],
    &[("OPTIONS", "PERMITS 1")],
    &[("OPTIONS", "PERMITS 1 OF 0")],
    &[("OPTIONS", "PERMITS 6 OF 5")],
    &[("OPTIONS", "OF 5")],
    &[("OPTIONS", "READ PERMITS 1")],
    &[("LIMIT", "-1")],
    &[("KEY", "permits#")],
    &[("KEY", "permits#"), ("OPTIONS", "READ")],
    &[("KEY", "permits#"), ("OPTIONS", "PERMITS 2")],
    &[("KEY", "plain#"), ("OPTIONS", "PERMITS 1")],
    &[("KEY", "plain#"), ("OPTIONS", "PERMITS")],
    &[("KEY", "readers#"), ("OPTIONS", "PERMITS 1")],
    &[("KEY", "readers#"), ("OPTIONS", "PERMITS")],
    &[("OPTIONS", "BLOCK 1")],
    &[("OPTIONS", "BLOCK -1")],
    &[("OPTIONS", "BLOCK")],
    &[("OPTIONS", "BLOCK 1 BLOCK 1")],
    &[("OPTIONS", "QUEUE 1")],
    &[("OPTIONS", "QUEUE x")],
    &[("OPTIONS", "QUEUE")],
    &[("OPTIONS", "QUEUE 1 QUEUE 1")],
    &[("OPTIONS", "QUEUE 1 BLOCK 1")],
    &[("OPTIONS", "SESSION s#")],
    &[("OPTIONS", "WANTED")],
    &[("OPTIONS", "SESSION nobody")],
    &[("OPTIONS", "SESSION theirs")],
    &[("SESSION", "theirs")],
    &[("OPTIONS", "SESSION ''")],
    &[("OPTIONS", "SESSION")],
    &[("OPTIONS", "SESSION s# SESSION s#")],
    &[("OPTIONS", "ONCE")],
    &[("OPTIONS", "ONCE ONCE")],
    &[("OPTIONS", "TOKEN 0")],
    &[("OPTIONS", "TOKEN")],
    &[("OPTIONS", "TOKEN 1 TOKEN 1")],
    &[("OPTIONS", "LEASE 0")],
    &[("OPTIONS", "LEASE")],
    &[("OPTIONS", "LEASE 1 LEASE 1")],
    &[("OPTIONS", "GRACE -1")],
    &[("OPTIONS", "GRACE")],
    &[("OPTIONS", "GRACE 1 GRACE 1")],
    &[("OPTIONS", "MATCH")],
    &[("OPTIONS", "MATCH * MATCH *")],
    &[("OPTIONS", "MATCH LONG")],
    &[("OPTIONS", "COUNT 0")],
    &[("OPTIONS", "COUNT")],
    &[("OPTIONS", "COUNT 1 COUNT 1")],
    &[("KEY", "busy#"), ("CALL", "CALL PING")],
    &[("CALL", "CALL")],
    &[("OPTIONS", "TOKEN 1"), ("CALL", "")],
    &[("OPTIONS", "READ TOKEN"), ("CALL", "")],
    &[("CALL", "CALL NONSENSE")],
    &[("CALL", "CALL EVAL code 0")],
    &[("CALL", "CALL MULTI")],
    &[("CALL", "CALL SELECT 1")],
    &[("CALL", "CALL RLOCK.INFO free#")],
    &[("CALL", "CALL CALLER.CALL PING")],
];

/// The content of the keys above.
const SETTING: [&str; 16] = [
    "HSET data# name Ada",
    "RLOCK.EVENTS s#",
    "SET text# v",
    "RLOCK.ACQUIRE plain# alice 30000",
    "RLOCK.ACQUIRE readers# alice 30000 READ",
    "RLOCK.ACQUIRE permits# alice 30000 PERMITS 1 OF 5",
    "HSET odd# alice odd",
    "PEXPIRE odd# 30000",
    "HSET full# alice 2147483647",
    "PEXPIRE full# 30000",
    // Alice would wait for Bob, and he waits for her.
    "RLOCK.ACQUIRE hers# alice 30000",
    "RLOCK.ACQUIRE circle# bob 30000",
    "RLOCK.ACQUIRE hers# bob 30000 QUEUE 0 SESSION s#",
    // One more than `rlock.max-waiters-per-lock`.
    "RLOCK.ACQUIRE busy# carol 30000",
    "RLOCK.ACQUIRE busy# dave 30000 QUEUE 0 SESSION s#",
    "PING",
];

/// An error as the document writes it, and a command that answers with it.
type Answer = (String, &'static str);

#[test]
fn every_error_is_documented_for_the_commands_that_answer_with_it() {
    let server = Server::builder()
        .config("rlock.max-waiters-per-lock 1")
        .start();
    server.load_c_module("caller");
    server.run("ACL SETUSER another on nopass ~* &* +@all");
    let mut another = server.connect();
    assert_eq!(another.run("AUTH another anything"), "OK");
    another.run("RLOCK.EVENTS theirs").events();
    let documented = documented(0);
    let mut seen = BTreeSet::new();
    for (round, wrong) in WRONG.iter().enumerate() {
        for (command, shape) in COMMANDS {
            let number = format!("{round}{}", command.to_lowercase());
            let mut session_connection = server.connect();
            for line in SETTING {
                let reply = session_connection.run(line.replace('#', &number));
                assert!(!reply.is_error(), "{line}: {reply:?}");
            }
            let words = words(command, shape, wrong, &number);
            note(
                &mut seen,
                &documented,
                &mut server.connect(),
                command,
                &words,
            );
        }
    }
    let mut conn = server.connect();
    for (command, _) in COMMANDS {
        note(
            &mut seen,
            &documented,
            &mut conn,
            command,
            &[format!("RLOCK.{command}")],
        );
    }
    let _chain = a_chain_too_long_to_search(&server);
    for command in ["ACQUIRE chain1 first 1000", "MACQUIRE first 1000 1 chain1"] {
        let words: Vec<_> = format!("RLOCK.{command} BLOCK 1")
            .split(' ')
            .map(str::to_owned)
            .collect();
        let command = if command.starts_with('M') {
            "MACQUIRE"
        } else {
            "ACQUIRE"
        };
        note(&mut seen, &documented, &mut conn, command, &words);
    }
    let script = "return redis.pcall('RLOCK.EVENTS', 's')";
    let words = ["EVAL", script, "0"].map(str::to_owned);
    note(&mut seen, &documented, &mut conn, "EVENTS", &words);
    note_errors_of_bind(&server, &mut seen, &documented);
    let mut listener = server.blocked_in("RLOCK.EVENTS s BLOCK 0");
    conn.run("RLOCK.EVENTS s").events();
    conn.run("CONFIG SET rlock.max-sessions 1");
    let words = ["RLOCK.EVENTS", "one-more"].map(str::to_owned);
    note(&mut seen, &documented, &mut conn, "EVENTS", &words);
    let taken_over = listener.read().error();
    seen.insert((as_documented(&taken_over, &documented), "EVENTS"));
    agree(&seen, &documented);
}

/// The errors of BIND, and of late calls, that need more than one call.
fn note_errors_of_bind(
    server: &Server,
    seen: &mut BTreeSet<Answer>,
    documented: &BTreeSet<Answer>,
) {
    let mut conn = server.connect();
    conn.run("RLOCK.EVENTS late EPOCH 5").events();
    let mut life = server.session_connection("other");
    conn.run("RLOCK.BIND late EPOCH 5").array();
    let script = "return redis.pcall('RLOCK.BIND', 'late', 'EPOCH', '6')";
    for (command, words) in [
        ("EVENTS", &["RLOCK.EVENTS", "late", "EPOCH", "4"][..]),
        ("BIND", &["RLOCK.BIND", "late", "EPOCH", "5"]),
        ("BIND", &["RLOCK.BIND", "other", "EPOCH", "1"]),
        ("BIND", &["EVAL", script, "0"]),
    ] {
        let words: Vec<_> = words.iter().copied().map(str::to_owned).collect();
        note(seen, documented, &mut conn, command, &words);
    }
    life.run("RLOCK.EVENTS other").events();
    let renamed = Server::builder()
        .config("rename-command CLIENT HIDDEN")
        .start();
    let mut conn = renamed.connect();
    conn.run("RLOCK.EVENTS s").events();
    let words = ["RLOCK.BIND", "s", "EPOCH", "1"].map(str::to_owned);
    note(seen, documented, &mut conn, "BIND", &words);
}

/// Owner n holds the lock n and waits for the lock n + 1. Each waits for one that does not wait
/// yet, so only a waiter before the first looks along the whole chain.
fn a_chain_too_long_to_search(server: &Server) -> Conn {
    let mut conn = server.connect();
    conn.run("RLOCK.EVENTS chain").events();
    for first in (1..=10_001).step_by(1_000) {
        let numbers = || first..first + 1_000;
        let holds = numbers().map(|n| format!("RLOCK.ACQUIRE chain{n} o{n} 600000"));
        conn.pipeline(&holds.collect::<Vec<_>>());
    }
    for first in (1..=10_001).step_by(1_000) {
        let waits = (first..first + 1_000).map(|n| {
            let next = n + 1;
            format!("RLOCK.ACQUIRE chain{next} o{n} 600000 QUEUE 0 SESSION chain")
        });
        conn.pipeline(&waits.collect::<Vec<_>>());
    }
    conn
}

#[test]
fn every_error_of_a_cluster_and_of_a_replica_is_documented() {
    let cluster = Cluster::start();
    let mut conn = cluster.first.connect();
    conn.run("RLOCK.ACQUIRE moving alice 30000 READ").held();
    cluster.open_slot_of("moving");
    assert_eq!(cluster.first.run("CLUSTER DELSLOTS 12182"), "OK"); // that of `foo`
    assert_eq!(cluster.second.run("CLUSTER DELSLOTS 12182"), "OK");
    assert_eq!(cluster.second.run("CLUSTER ADDSLOTS 12182"), "OK");
    rlock_tests::until("the first node knows whose slot it is", || {
        let told = cluster.first.run("GET foo");
        told.is_error() && told.error().starts_with("MOVED ")
    });
    let documented = documented(1);
    let mut seen = BTreeSet::new();
    let wrong: [&[(&str, &str)]; 7] = [
        &[("KEY", "a{b"), ("OPTIONS", "READ")],
        &[("KEY", "moving"), ("OPTIONS", "READ")],
        &[("KEY", "moving"), ("OPTIONS", "WRITE")],
        &[("KEY", "a{b"), ("OPTIONS", "PERMITS 1")],
        &[("KEY", "moving"), ("OPTIONS", "PERMITS 1")],
        &[("KEY", "moving")],
        &[("KEY", "foo")],
    ];
    for wrong in wrong {
        for (command, shape) in COMMANDS {
            if !shape.contains("KEY") {
                continue;
            }
            let words = words(command, shape, wrong, "");
            let reply = conn.cmd(&words);
            let elsewhere = ["ERR", "WRONGKIND"]; // those are the other test's
            if reply.is_error() && !elsewhere.iter().any(|code| reply.error().starts_with(code)) {
                seen.insert((as_documented(&reply.error(), &documented), command));
            }
        }
    }
    let pair = Pair::start();
    for (command, name, wait) in [
        ("ACQUIRE", "k", "RLOCK.ACQUIRE k bob 30000 BLOCK 0"),
        ("MACQUIRE", "l", "RLOCK.MACQUIRE carol 30000 1 l BLOCK 0"),
    ] {
        // Anew each time: meanwhile it may have loaded what the other had, which may be less.
        pair.primary.connect().take(name, "alice");
        let mut waiter = pair.primary.blocked_in(wait);
        let port = pair.replica.port();
        pair.primary.run(format!("REPLICAOF 127.0.0.1 {port}"));
        let error = waiter.read().error();
        seen.insert((as_documented(&error, &documented), command));
        assert_eq!(pair.primary.run("REPLICAOF NO ONE"), "OK");
    }
    agree(&seen, &documented);
}

/// The rows of the table with this number after the heading.
#[track_caller]
fn documented(table: usize) -> BTreeSet<Answer> {
    let tables = tables("docs/commands.md", "# Errors");
    let mut answers = BTreeSet::new();
    for row in &tables[table] {
        let error = row[0].trim_matches('`');
        let said = |command: &str, shape: &str| match row[1].as_str() {
            "all but `LIST`, `LOG` and `SESSIONS`" => {
                !["LIST", "LOG", "SESSIONS"].contains(&command)
            }
            "all with a key" => shape.contains("KEY"),
            named => {
                let named = named.replace("`M…`", "`MACQUIRE` `MRELEASE` `MRENEW`");
                named.split(['`', ' ']).any(|word| word == command)
            }
        };
        let such = COMMANDS
            .iter()
            .filter(|(command, shape)| said(command, shape));
        let such: Vec<_> = such
            .map(|(command, _)| (error.to_owned(), *command))
            .collect();
        assert!(!such.is_empty(), "{error}: which commands are {}?", row[1]);
        answers.extend(such);
    }
    answers
}

/// The command, with these wrong words in place of the right ones.
fn words(command: &str, shape: &str, wrong: &[(&str, &str)], number: &str) -> Vec<String> {
    let mut words = vec![format!("RLOCK.{command}")];
    for place in shape.split(' ') {
        let all = wrong.iter().chain(&RIGHT);
        let (_, value) = all
            .clone()
            .find(|(name, _)| *name == place)
            .expect("a value");
        let value = value.replace('#', number);
        let parts = value.split_ascii_whitespace();
        let long = "*".repeat(1025);
        words.extend(parts.map(|part| part.replace("''", "").replace("LONG", &long)));
    }
    words
}

fn note(
    seen: &mut BTreeSet<Answer>,
    documented: &BTreeSet<Answer>,
    conn: &mut Conn,
    command: &'static str,
    words: &[String],
) {
    let reply = conn.cmd(words);
    if reply.is_error() {
        let answer = (as_documented(&reply.error(), documented), command);
        assert!(documented.contains(&answer), "{words:?} answers {answer:?}");
        seen.insert(answer);
    }
}

/// The text with the document's placeholders where that has them.
fn as_documented(error: &str, documented: &BTreeSet<Answer>) -> String {
    let quoted: Vec<_> = error.split('\'').collect();
    let named = quoted.iter().enumerate();
    let named = named.map(|(place, &part)| if place % 2 == 1 { "X" } else { part });
    let named = named.collect::<Vec<_>>().join("'");
    let words = named.split(' ').map(|word| match word.parse::<u64>() {
        Ok(_) => "N",
        Err(_) => word,
    });
    let counted = words.collect::<Vec<_>>().join(" ");
    let moved = error
        .starts_with("MOVED ")
        .then(|| "MOVED slot host:port".to_owned());
    let is_known = |text: &String| documented.iter().any(|(known, _)| known == text);
    let candidates = [error.to_owned(), named, counted];
    let found = moved.into_iter().chain(candidates).find(is_known);
    found.unwrap_or_else(|| panic!("docs/commands.md has no error {error}"))
}

#[track_caller]
fn agree(seen: &BTreeSet<Answer>, documented: &BTreeSet<Answer>) {
    let only_seen: Vec<_> = seen.difference(documented).collect();
    assert!(only_seen.is_empty(), "not documented: {only_seen:#?}");
    let only_said: Vec<_> = documented.difference(seen).collect();
    assert!(
        only_said.is_empty(),
        "documented, and nobody gets it: {only_said:#?}"
    );
}
