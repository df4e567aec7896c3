//! The module's declarations to the server: commands, keys, permissions, options, metrics.

use std::collections::{BTreeMap, BTreeSet};

use rlock_tests::{Conn, Server, Version, module_path, until};

/// Command, arity, flags, standard ACL categories.
const COMMANDS: [(&str, i64, &[&str], &[&str]); 16] = [
    (
        "rlock.acquire",
        -4,
        &["write", "fast", "denyoom"],
        &["write", "fast"],
    ),
    ("rlock.release", -3, &["write", "fast"], &["write", "fast"]),
    ("rlock.renew", -4, &["write", "fast"], &["write", "fast"]),
    ("rlock.cancel", -3, &["write", "fast"], &["write", "fast"]),
    (
        "rlock.break",
        2,
        &["write", "admin"],
        &["write", "admin", "dangerous"],
    ),
    ("rlock.limit", 3, &["write", "admin"], &["write", "admin"]),
    ("rlock.events", -2, &["blocking"], &["blocking"]),
    ("rlock.bind", 4, &["fast"], &["fast", "connection"]),
    ("rlock.info", 2, &["readonly"], &["read"]),
    ("rlock.list", -1, &["readonly"], &["read"]),
    ("rlock.log", -1, &["readonly"], &["read"]),
    (
        "rlock.sessions",
        -1,
        &["readonly", "admin"],
        &["read", "admin"],
    ),
    ("rlock.macquire", -5, &["write", "denyoom"], &["write"]),
    ("rlock.mrelease", -4, &["write"], &["write"]),
    ("rlock.mrenew", -5, &["write"], &["write"]),
    ("rlock.guard", -5, &["write"], &["write"]),
];

/// As other modules do, so that operators see the loaded version.
#[test]
fn the_version_is_the_crates() {
    let server = Server::start();
    let list = server.run("MODULE LIST");
    let mut modules = list.array().iter();
    let ours = modules.find(|module| module.get("name").text() == "rlock");
    let parts = env!("CARGO_PKG_VERSION").split('.');
    let version = parts.fold(0, |all, part| all * 100 + part.parse::<i64>().unwrap());
    assert_eq!(ours.unwrap().get("ver").int(), version);
}

#[test]
fn flags_and_arity() {
    let server = Server::start();
    let mut conn = server.connect();
    for (name, arity, flags, _) in COMMANDS {
        let told = conn.run(format!("COMMAND INFO {name}"));
        let info = told.array()[0].array();
        assert_eq!(info[0], name);
        assert_eq!(info[1], arity, "{name}");
        let mut found: BTreeSet<_> = info[2].texts().into_iter().collect();
        assert!(found.remove("module"), "{name}");
        // How the server itself says that the keys are described in full.
        found.remove("movablekeys");
        let expected: BTreeSet<_> = flags.iter().map(|&flag| flag.to_owned()).collect();
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn keys() {
    let server = Server::start();
    let mut conn = server.connect();
    for command in [
        "RLOCK.ACQUIRE key owner 1000 BLOCK 0 ONCE",
        "RLOCK.RELEASE key owner TOKEN 1 LEASE 1000",
        "RLOCK.RENEW key owner 1000 TOKEN 1",
        "RLOCK.ACQUIRE key owner 1000 QUEUE 0 SESSION session ONCE",
        "RLOCK.RENEW key owner 1000 SESSION session",
        "RLOCK.ACQUIRE key owner 1000 READ BLOCK 0",
        "RLOCK.RELEASE key owner WRITE LEASE 1000",
        "RLOCK.RENEW key owner 1000 READ SESSION session",
        "RLOCK.CANCEL key owner",
        "RLOCK.BREAK key",
        "RLOCK.ACQUIRE key owner 1000 PERMITS 1 OF 2",
        "RLOCK.LIMIT key 3",
        "RLOCK.INFO key",
        "RLOCK.MACQUIRE owner 1000 1 key",
        "RLOCK.MRELEASE owner 1 key",
        "RLOCK.MRENEW owner 1000 1 key SESSION session",
        "RLOCK.GUARD key owner READ TOKEN 1 CALL PING",
        "RLOCK.GUARD key owner PERMITS TOKEN 1 CALL PING",
    ] {
        assert_eq!(
            conn.run(format!("COMMAND GETKEYS {command}")).texts(),
            ["key"],
            "{command}"
        );
    }
    for command in [
        "RLOCK.MACQUIRE owner 1000 3 a b c BLOCK 0 ONCE",
        "RLOCK.MACQUIRE owner 1000 3 a b c QUEUE 0 SESSION session",
        "RLOCK.MRELEASE owner 3 a b c",
        "RLOCK.MRENEW owner 1000 3 a b c SESSION session",
    ] {
        let told = conn.run(format!("COMMAND GETKEYS {command}"));
        assert_eq!(told.texts(), ["a", "b", "c"], "{command}");
    }
    for odd in ["0", "-1", "3", "x", "99999999999999999999", "2147483648"] {
        for command in [
            format!("COMMAND GETKEYS RLOCK.MACQUIRE owner 1000 {odd} a b"),
            format!("COMMAND GETKEYS RLOCK.MRELEASE owner {odd} a b"),
            format!("COMMAND GETKEYSANDFLAGS RLOCK.MRENEW owner 1000 {odd} a b"),
        ] {
            assert!(conn.run(&command).is_error(), "{command}");
        }
    }
    for without in [
        "RLOCK.LIST MATCH key",
        "RLOCK.LOG MATCH key",
        "RLOCK.SESSIONS MATCH key",
        "RLOCK.EVENTS session BLOCK 0",
    ] {
        let told = conn.run(format!("COMMAND GETKEYS {without}"));
        assert!(told.is_error(), "{without} has no keys: {told:?}");
    }
}

#[test]
fn documentation() {
    let server = Server::start();
    let mut conn = server.connect();
    for (name, ..) in COMMANDS {
        let docs = conn.run(format!("COMMAND DOCS {name}"));
        let docs = docs.get(name);
        for field in ["summary", "since", "complexity", "group"] {
            assert!(!docs.get(field).text().is_empty(), "{name}: {field}");
        }
        if name.starts_with("rlock.m") {
            let arguments = docs.get("arguments").array();
            let names: Vec<_> = arguments.iter().map(|one| one.get("name").text()).collect();
            let expected = match name {
                "rlock.mrelease" => &["owner", "numkeys", "key"][..],
                _ => &["owner", "lease-ms", "numkeys", "key"],
            };
            assert_eq!(&names[..expected.len()], expected, "{name}");
            let key = &arguments[expected.len() - 1];
            assert_eq!(key.get("type"), &"key", "{name}");
            assert!(
                key.get("flags").texts().contains(&"multiple".to_owned()),
                "{name}"
            );
        } else if !WITHOUT_KEY.contains(&name) {
            let first = &docs.get("arguments").array()[0];
            assert_eq!(
                (first.get("name"), first.get("type")),
                (&"key".into(), &"key".into())
            );
        }
    }
}

const WITHOUT_KEY: [&str; 5] = [
    "rlock.list",
    "rlock.log",
    "rlock.sessions",
    "rlock.events",
    "rlock.bind",
];

#[test]
fn acl_categories() {
    if !Version::at_hand().has_module_categories() {
        return;
    }
    let server = Server::start();
    let mut conn = server.connect();
    for (name, _, _, expected) in COMMANDS {
        let told = conn.run(format!("COMMAND INFO {name}"));
        let told = told.array()[0].array()[6].texts();
        let found: BTreeSet<_> = told
            .iter()
            .map(|name| name.trim_start_matches('@'))
            .collect();
        for category in expected {
            assert!(
                found.contains(category),
                "{name} is not in @{category}: {found:?}"
            );
        }
        if Version::at_hand().has_own_categories() {
            assert!(found.contains("lock"), "{name}: {found:?}");
        }
    }
}

/// A connection of a user who may run everything on `orders:*` alone.
fn orders_only(server: &Server) -> Conn {
    assert_eq!(
        server.run("ACL SETUSER clerk on nopass ~orders:* &* +@all"),
        "OK"
    );
    let mut conn = server.connect();
    assert_eq!(conn.run("AUTH clerk anything"), "OK");
    conn
}

#[test]
fn key_permissions_apply() {
    let server = Server::start();
    server.connect().take("stock", "alice");
    let mut clerk = orders_only(&server);
    clerk.take("orders:1", "clerk");
    for command in [
        "RLOCK.ACQUIRE stock clerk 1000",
        "RLOCK.ACQUIRE free clerk 1000",
        "RLOCK.RELEASE stock alice",
        "RLOCK.RENEW stock alice 1000",
        "RLOCK.CANCEL stock alice",
        "RLOCK.BREAK stock",
        "RLOCK.INFO stock",
        "RLOCK.LIMIT stock 3",
        "RLOCK.ACQUIRE free clerk 1000 READ",
        "RLOCK.MACQUIRE clerk 1000 1 free",
        "RLOCK.MACQUIRE clerk 1000 2 orders:1 stock",
        "RLOCK.MACQUIRE clerk 1000 2 free orders:1 BLOCK 0",
        "RLOCK.MRELEASE clerk 2 orders:1 stock",
        "RLOCK.MRELEASE alice 2 stock orders:1",
        "RLOCK.MRENEW alice 1000 2 orders:1 stock",
    ] {
        let error = clerk.run(command).error();
        assert!(error.starts_with("NOPERM "), "{command}: {error}");
    }
    assert_eq!(
        clerk.run("HGET orders:1 clerk"),
        "1",
        "nothing has happened to it"
    );
    clerk
        .run("RLOCK.MACQUIRE clerk 1000 2 orders:2 orders:3")
        .held();
    assert_eq!(clerk.run("RLOCK.MRELEASE clerk 2 orders:2 orders:3"), 2);
    assert_eq!(server.holder("stock").as_deref(), Some("alice"));
    assert_eq!(clerk.let_go("orders:1", "clerk"), 0);
}

#[test]
fn reading_needs_less_than_writing() {
    let server = Server::start();
    assert_eq!(server.run("ACL SETUSER reader on nopass %R~* +@all"), "OK");
    server.connect().take("k", "alice");
    let mut reader = server.connect();
    reader.run("AUTH reader anything");
    assert_eq!(reader.run("RLOCK.INFO k").get("owner"), &"alice");
    let error = reader.run("RLOCK.BREAK k").error();
    assert!(error.starts_with("NOPERM "), "{error}");
}

#[test]
fn list_hides_the_names_that_the_caller_may_not_touch() {
    let server = Server::start();
    let mut alice = server.connect();
    let mut line = Vec::new();
    for name in ["orders:1", "stock", "orders:2"] {
        alice.take(name, "alice");
        line.push(server.wait_in_queue(name, "bob"));
    }
    let names = |conn: &mut Conn, command: &str| -> BTreeSet<String> {
        let reply = conn.run(command);
        reply
            .array()
            .iter()
            .map(|row| row.array()[0].text())
            .collect()
    };
    let mut clerk = orders_only(&server);
    let visible = BTreeSet::from(["orders:1".to_owned(), "orders:2".to_owned()]);
    assert_eq!(names(&mut clerk, "RLOCK.LIST"), visible);
    assert_eq!(
        names(&mut clerk, "RLOCK.LIST COUNT 2"),
        visible,
        "what is hidden does not count"
    );
    assert!(names(&mut clerk, "RLOCK.LIST MATCH stock").is_empty());
    assert_eq!(names(&mut alice, "RLOCK.LIST").len(), 3);
}

/// Up to Redis 8.0 and Valkey 8.1 a module that asks for the caller of a call without one,
/// stops it.
#[test]
fn list_called_by_another_module_shows_what_that_call_may_read() {
    let server = Server::start();
    server.load_c_module("caller");
    let mut alice = server.connect();
    let mut line = Vec::new();
    for name in ["orders:1", "stock"] {
        alice.take(name, "alice");
        line.push(server.wait_in_queue(name, "bob"));
    }
    assert_eq!(
        server.run("ACL SETUSER clerk on nopass ~orders:* +@all"),
        "OK"
    );
    let mut clerk = server.connect();
    clerk.run("AUTH clerk anything");
    let mut names = |command: &str| -> Vec<String> {
        let reply = clerk.run(command);
        reply
            .array()
            .iter()
            .map(|row| row.array()[0].text())
            .collect()
    };
    let all = ["orders:1", "stock"];
    // In its own name a module may read every key.
    assert_eq!(names("CALLER.CALL RLOCK.LIST"), all);
    let script = "EVAL return(redis.call('RLOCK.LIST')) 0";
    assert_eq!(names(&format!("CALLER.CALL {script}")), all);
    // In its caller's name it may not, nor may a script.
    for command in ["CALLER.AS-USER RLOCK.LIST", script, "RLOCK.LIST"] {
        assert_eq!(names(command), ["orders:1"], "{command}");
    }
    // The rights of a user that the ACL does not have are unknown.
    assert!(names("CALLER.AS-MADE-USER RLOCK.LIST").is_empty());
}

#[test]
fn a_waiter_needs_no_permission_beyond_its_own() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("orders:1", "alice");
    let mut clerk = orders_only(&server);
    clerk.send("RLOCK.ACQUIRE orders:1 clerk 30000 BLOCK 0");
    clerk.expect_nothing_yet();
    alice.let_go("orders:1", "alice");
    clerk.read().held();
}

#[test]
fn options_with_their_defaults() {
    let server = Server::start();
    let told = server.run("CONFIG GET rlock.*").texts();
    let told: BTreeMap<_, _> = told
        .chunks(2)
        .map(|p| (p[0].as_str(), p[1].as_str()))
        .collect();
    assert_eq!(told["rlock.publish"], "auto");
    assert_eq!(told["rlock.replicate"], "restore");
    assert_eq!(told["rlock.wake-fair-queue"], "yes");
    assert_eq!(told["rlock.max-waiters-per-lock"], "100000");
    assert_eq!(told["rlock.max-sessions"], "100000");
    assert_eq!(told["rlock.max-events-per-session"], "100000");
    assert_eq!(told["rlock.fence-guard-ms"], "10000");
    assert_eq!(told["rlock.grant-delay-ms"], "0");
    assert_eq!(told["rlock.log-max-len"], "128");
    assert_eq!(told["rlock.log-holds-ms"], "0");
    assert_eq!(told["rlock.log-waits-ms"], "1000");
    assert_eq!(told["rlock.metrics-patterns"], "");
}

#[test]
fn options_have_bounds() {
    let server = Server::start();
    let mut conn = server.connect();
    let (long, too_long) = ("p".repeat(256), "p".repeat(257));
    let (many, too_many) = ("* ".repeat(16), "* ".repeat(17));
    for (option, good, bad) in [
        (
            "publish",
            &["auto", "classic", "sharded", "both", "off"][..],
            &["on", "", "1"][..],
        ),
        (
            "replicate",
            &["plain", "restore"],
            &["compact", "yes", "", "1"],
        ),
        ("wake-fair-queue", &["no", "yes"], &["auto", "", "1"]),
        (
            "max-waiters-per-lock",
            &["1", "100000"],
            &["-1", "x", "99999999999999999999"],
        ),
        ("max-sessions", &["1", "10000000"], &["0", "10000001", "x"]),
        (
            "max-events-per-session",
            &["1", "10000000"],
            &["0", "10000001", "x"],
        ),
        (
            "fence-guard-ms",
            &["0", "60000"],
            &["-1", "x", "99999999999999999999"],
        ),
        (
            "grant-delay-ms",
            &["0", "10000", "9007199254740991"],
            &["-1", "x", "9007199254740992", "99999999999999999999"],
        ),
        (
            "log-max-len",
            &["0", "1", "100000"],
            &["-1", "x", "100001", "99999999999999999999"],
        ),
        (
            "log-holds-ms",
            &["0", "10000", "9007199254740991"],
            &["-1", "x", "9007199254740992"],
        ),
        (
            "log-waits-ms",
            &["0", "10000", "9007199254740991"],
            &["-1", "x", "9007199254740992"],
        ),
        (
            "metrics-patterns",
            &["orders:*", "  a [b-c]?\\*  \u{fc}", &long, &many, ""],
            &[&too_long, &too_many],
        ),
    ] {
        let name = format!("rlock.{option}");
        for value in good {
            assert_eq!(
                conn.cmd(&["CONFIG", "SET", &name, value]),
                "OK",
                "{name} {value}"
            );
            assert_eq!(conn.run(format!("CONFIG GET {name}")).texts()[1], *value);
        }
        let last = conn.run(format!("CONFIG GET {name}"));
        for value in bad {
            let reply = conn.cmd(&["CONFIG", "SET", &name, value]);
            assert!(reply.is_error(), "{name} {value:?}: {reply:?}");
            assert_eq!(conn.run(format!("CONFIG GET {name}")), last);
        }
    }
}

#[test]
fn options_are_read_from_the_configuration_file_and_written_back() {
    let mut server = Server::builder()
        .config("rlock.publish off")
        .config("rlock.max-waiters-per-lock 7")
        .start();
    assert_eq!(server.run("CONFIG GET rlock.publish").texts()[1], "off");
    assert_eq!(
        server.run("CONFIG GET rlock.max-waiters-per-lock").texts()[1],
        "7"
    );
    assert_eq!(server.run("CONFIG SET rlock.fence-guard-ms 5"), "OK");
    assert_eq!(server.run("CONFIG REWRITE"), "OK");
    let file = std::fs::read_to_string(server.directory().join("redis.conf")).unwrap();
    assert!(file.contains("rlock.fence-guard-ms 5"), "{file}");
    server.stop();
}

#[test]
fn options_can_be_given_to_loadex() {
    let server = Server::builder().without_module().start();
    let path = module_path().display().to_string();
    let mut conn = server.connect();
    let load = ["MODULE", "LOADEX", &path, "CONFIG", "rlock.publish", "both"];
    assert_eq!(conn.cmd(&load), "OK");
    assert_eq!(conn.run("CONFIG GET rlock.publish").texts()[1], "both");
}

/// docs/operations.md and docs/redisson.md say how to load it: the server's default is `no`.
#[test]
fn without_enable_module_command_it_is_loaded_by_the_configuration_alone() {
    let path = module_path().display().to_string();
    let refused = "enable-module-command no";
    let plain = Server::builder().without_module().config(refused).start();
    let error = plain.connect().cmd(&["MODULE", "LOAD", &path]).error();
    assert!(error.contains("enable-module-command"), "{error}");
    let loaded = Server::builder().config(refused).start();
    loaded.connect().take("k", "alice");
    assert!(loaded.run("MODULE UNLOAD rlock").is_error());
}

#[test]
fn a_wrong_option_keeps_the_module_from_loading() {
    let server = Server::builder().without_module().start();
    let path = module_path().display().to_string();
    let mut conn = server.connect();
    let load = [
        "MODULE",
        "LOADEX",
        &path,
        "CONFIG",
        "rlock.publish",
        "loudly",
    ];
    assert!(conn.cmd(&load).is_error());
    assert!(conn.run("RLOCK.LIST").is_error());
}

/// A word that is passed over would be an option that is missing.
#[test]
fn a_module_with_arguments_is_not_loaded_and_the_log_says_why() {
    let server = Server::builder().without_module().start();
    let path = module_path().display().to_string();
    let mut conn = server.connect();
    for arguments in [
        &["LOADEX", &path, "ARGS", "x"][..],
        &["LOADEX", &path, "ARGS", "publish", "both"],
        &[
            "LOADEX",
            &path,
            "CONFIG",
            "rlock.publish",
            "both",
            "ARGS",
            "x",
        ],
        &["LOAD", &path, "rlock.publish", "both"],
        &["LOAD", &path, ""],
        &["LOAD", &path, "%n%s"],
    ] {
        let command = [&["MODULE"], arguments].concat();
        assert!(conn.cmd(&command).is_error(), "{arguments:?}");
        assert!(conn.run("RLOCK.LIST").is_error(), "{arguments:?}");
        assert!(conn.run("CONFIG GET rlock.*").array().is_empty());
    }
    for word in ["x", "publish", "rlock.publish", "", "%n%s"] {
        let said = format!("rlock takes no arguments, and '{word}' is one: options are lines");
        assert!(server.log().contains(&said), "{word}: {}", server.log());
    }
    let load = ["MODULE", "LOADEX", &path, "CONFIG", "rlock.publish", "both"];
    assert_eq!(conn.cmd(&load), "OK");
    assert_eq!(conn.run("CONFIG GET rlock.publish").texts()[1], "both");
}

/// The numbers of `INFO rlock`, without the module's prefix.
fn metrics(server: &Server) -> BTreeMap<String, i64> {
    let text = server.run("INFO rlock").text();
    let fields = text
        .lines()
        .filter_map(|line| line.strip_prefix("rlock_")?.split_once(':'));
    fields
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect()
}

#[test]
fn info_counts_what_happens() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    alice.run("RLOCK.ACQUIRE k alice 30000").held();
    alice.run("RLOCK.RENEW k alice 30000");
    alice.run("RLOCK.RENEW k bob 30000");
    alice.run("RLOCK.ACQUIRE k bob 1000 BLOCK 5").refused();
    let mut bob = server.wait_in_queue("k", "bob");
    let _carol = server.wait_in_queue("k", "carol");
    alice.run("RLOCK.CANCEL k carol");
    alice.let_go("k", "alice");
    let waiting = metrics(&server);
    assert_eq!(waiting["waiters"], 1, "{waiting:?}");
    assert_eq!(waiting["locks_waited_for"], 1, "{waiting:?}");
    alice.let_go("k", "alice");
    bob.read().held();
    alice.run("RLOCK.BREAK k");
    alice.take("short", "alice");
    let mut dave = server.wait_in_queue("short", "dave");
    alice.run("RLOCK.RENEW short alice 20");
    dave.read().held();
    let counted = metrics(&server);
    for (name, expected) in [
        ("grants", 4),
        ("reentries", 1),
        ("handovers", 2), // the release, and the end of the short lease
        ("timeouts", 1),
        ("cancels", 1),
        ("renewals", 2),
        ("renewals_lost", 1),
        ("releases", 2),
        ("breaks", 1),
        ("expiries_noticed", 1),
        ("waiters", 0),
        ("waiters_peak", 2),
        ("locks_waited_for", 0),
    ] {
        assert_eq!(counted.get(name), Some(&expected), "{name} in {counted:?}");
    }
}

#[test]
fn info_has_histograms_of_waiting_and_holding() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    alice.let_go("k", "alice");
    bob.read().held();
    bob.let_go("k", "bob");
    let text = server.run("INFO rlock").text();
    for histogram in ["wait", "hold"] {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("rlock_{histogram}")));
        assert!(
            line.is_some(),
            "no histogram of {histogram} times in {text}"
        );
    }
}

/// The lines of `INFO rlock` for the pattern with this number.
fn by_pattern(server: &Server, number: usize) -> Vec<String> {
    let text = server.run("INFO rlock").text();
    let name = format!("rlock_pattern_{number}");
    let lines = text.lines().filter(|line| line.starts_with(&name));
    lines.map(|line| line.replace(&name, "")).collect()
}

#[test]
fn info_counts_by_pattern_and_the_first_that_matches_counts() {
    let server = Server::builder()
        .config("rlock.fence-guard-ms 0")
        .config(r#"rlock.metrics-patterns "orders:* *:1 a,b*""#)
        .start();
    let (mut conn, mut life) = (server.connect(), server.session_connection("s"));
    for name in ["orders:1", "orders:2", "stock:1", "stock:2"] {
        conn.take(name, "alice");
    }
    let mut bob = server.wait_in_queue("orders:1", "bob");
    conn.run("RLOCK.MACQUIRE carol 30000 2 orders:2 stock:1 QUEUE 0 SESSION s")
        .queued();
    conn.let_go("orders:1", "alice");
    bob.read().held();
    for name in ["orders:2", "stock:1"] {
        conn.let_go(name, "alice");
    }
    life.run("RLOCK.EVENTS s").granted("orders:2", "carol");
    conn.run("RLOCK.ACQUIRE orders:3 dave 30000 WRITE SESSION s")
        .held();
    conn.run("DEL stock:1 orders:3");
    until("the losses are noticed", || {
        server.info_number("rlock_holds_lost") == 2
    });
    let told = by_pattern(&server, 1);
    assert!(
        told[0].starts_with(":pattern=orders:*,grants=5,waits=2,lost=1,longest_wait_ms=0,"),
        "{told:?}"
    );
    assert!(
        told[1].starts_with("_wait_ms:le_1=") && told[1].contains(",count=2,"),
        "{told:?}"
    );
    assert!(
        told[2].starts_with("_hold_ms:le_1=") && told[2].contains(",count=2,"),
        "{told:?}"
    );
    let told = by_pattern(&server, 2);
    assert!(
        told[0].starts_with(":pattern=*:1,grants=2,waits=1,lost=1,"),
        "{told:?}"
    );
    let nothing = ",grants=0,waits=0,lost=0,longest_wait_ms=0,longest_hold_ms=0";
    let told = by_pattern(&server, 3);
    assert_eq!(told[0], format!(r":pattern=a\x2cb*{nothing}"), "{told:?}");
    assert!(by_pattern(&server, 4).is_empty());
    // Any other option leaves them as they are; other patterns begin from zero.
    conn.run("CONFIG SET rlock.publish off");
    assert!(by_pattern(&server, 1)[0].contains("grants=5"));
    assert_eq!(conn.run("CONFIG SET rlock.metrics-patterns *"), "OK");
    assert!(by_pattern(&server, 1)[0].starts_with(":pattern=*,grants=0,waits=0,lost=0,"));
    assert!(by_pattern(&server, 2).is_empty());
    let error = conn.cmd(&["CONFIG", "SET", "rlock.metrics-patterns", &"p ".repeat(17)]);
    let error = error.error();
    assert!(
        error.contains("up to 16 patterns of 1 to 256 bytes"),
        "{error}"
    );
}

/// The longest present wait and hold, in milliseconds: of all locks, then by pattern.
fn longest(server: &Server) -> Vec<(i64, i64)> {
    let text = server.run("INFO rlock").text();
    let number = |part: &str| part.split(['=', ':']).next_back()?.parse::<i64>().ok();
    let parts = text.split([',', '\r', '\n']);
    let parts = parts.filter(|part| part.contains("longest_"));
    let numbers: Vec<i64> = parts.map(|part| number(part).expect(part)).collect();
    let pairs = numbers.chunks(2).map(|pair| (pair[0], pair[1]));
    pairs.collect()
}

#[test]
fn info_tells_the_longest_present_wait_and_hold_also_by_pattern() {
    let server = Server::builder()
        .config("rlock.fence-guard-ms 0")
        .config(r#"rlock.metrics-patterns "leader* *""#)
        .start();
    let (mut conn, mut life) = (server.connect(), server.session_connection("s"));
    assert_eq!(longest(&server), [(0, 0); 3]);
    conn.take_for("leader", "ann", "s");
    let mut bob = server.wait_in_queue("leader", "bob");
    until("the leader leads for a while", || {
        longest(&server)[0].0 >= 60
    });
    conn.take_for("stock", "eve", "s");
    conn.take_for("stock:2", "eve", "s");
    conn.queue("stock", "fay", "s");
    let [all, leader, others]: [_; 3] = longest(&server).try_into().unwrap();
    assert_eq!(all, leader, "the leader and its candidate are the longest");
    // Of two clocks, each rounded down.
    assert!(leader.1 + 2 > leader.0, "the hold began first: {leader:?}");
    assert!(others.0 + 50 < leader.0, "{others:?} {leader:?}");
    assert!(others.1 + 50 < leader.1, "{others:?} {leader:?}");
    // The numbers go on under other patterns, at once.
    conn.run("CONFIG SET rlock.metrics-patterns stock:2");
    let [all, of_stock_2]: [_; 2] = longest(&server).try_into().unwrap();
    assert!(all.0 >= leader.0 && all.1 >= leader.1, "{all:?}");
    assert!(of_stock_2.0 == 0 && of_stock_2.1 < all.1, "{of_stock_2:?}");
    // A wait counts while it lasts. Bob's hold is not a session's and does not count.
    conn.let_go("leader", "ann");
    bob.read().held();
    let rest = longest(&server)[0];
    assert!(rest.0 < all.0 && rest.1 < all.1, "{rest:?} {all:?}");
    // The next waiter of a queue is the longest after the first one has left.
    until("fay waits for a while", || longest(&server)[0].0 >= 30);
    conn.queue("stock", "gil", "s");
    conn.run("RLOCK.CANCEL stock fay");
    let before = longest(&server)[0].0;
    let listed = conn.run("RLOCK.LIST").array()[0].array()[2].int();
    let after = longest(&server)[0].0;
    assert!(
        (before..=after).contains(&listed),
        "{before} {listed} {after}"
    );
    conn.run("RLOCK.CANCEL stock gil");
    assert_eq!(longest(&server)[0].0, 0, "nobody waits");
    conn.let_go("stock", "eve");
    conn.run("RLOCK.BREAK stock:2");
    assert_eq!(longest(&server), [(0, 0); 2]);
    life.run("RLOCK.EVENTS s");
}

/// A hold of a script has no token. Its beginning is known from the first re-entry on.
#[test]
fn a_scripts_hold_counts_as_a_present_hold_once_it_has_a_token() {
    let server = Server::builder().config("rlock.fence-guard-ms 0").start();
    let (mut conn, _life) = (server.connect(), server.session_connection("s"));
    conn.run("HSET k o 1");
    conn.run("PEXPIRE k 60000");
    assert_eq!(conn.run("RLOCK.RENEW k o 60000 SESSION s").int(), 1);
    assert_eq!(longest(&server), [(0, 0)]);
    conn.run("RLOCK.ACQUIRE k o 60000");
    until("it lasts", || longest(&server)[0].1 > 0);
    conn.run("RLOCK.BREAK k");
    assert_eq!(longest(&server), [(0, 0)]);
}

#[test]
fn metrics_patterns_are_written_back_and_given_to_loadex() {
    let server = Server::builder().without_module().start();
    let path = module_path().display().to_string();
    let mut conn = server.connect();
    let option = ["CONFIG", "rlock.metrics-patterns", "orders:* *"];
    let load = [&["MODULE", "LOADEX", path.as_str()][..], &option].concat();
    assert_eq!(conn.cmd(&load), "OK");
    assert!(by_pattern(&server, 2)[0].starts_with(":pattern=*,"));
    assert_eq!(conn.run("CONFIG REWRITE"), "OK");
    let file = std::fs::read_to_string(server.directory().join("redis.conf")).unwrap();
    assert!(
        file.contains(r#"rlock.metrics-patterns "orders:* *""#),
        "{file}"
    );
    conn.run("CONFIG SET rlock.metrics-patterns x");
    for _ in 0..100 {
        assert_eq!(
            conn.run("CONFIG GET rlock.metrics-patterns").texts()[1],
            "x"
        );
    }
}

#[test]
fn under_memory_pressure_only_acquire_and_new_sessions_are_refused() {
    let server = Server::builder()
        .config("maxmemory-policy noeviction")
        .start();
    let mut conn = server.connect();
    conn.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    let mut life = server.session_connection("s");
    conn.run("CONFIG SET maxmemory 1");
    for command in [
        "RLOCK.ACQUIRE free carol 1000",
        "RLOCK.ACQUIRE k carol 1000",
        "RLOCK.ACQUIRE k alice 1000",
        "RLOCK.ACQUIRE k alice 1000 ONCE",
        "RLOCK.ACQUIRE k carol 1000 QUEUE 0 SESSION s",
        "RLOCK.EVENTS new",
    ] {
        let error = conn.run(command).error();
        let text = "OOM command not allowed when used memory > 'maxmemory'.";
        assert_eq!(error, text, "{command}");
    }
    assert_eq!(conn.run("RLOCK.RENEW k alice 30000 SESSION s"), 1);
    assert_eq!(conn.run("RLOCK.INFO k").get("waiters"), &1);
    assert_eq!(conn.run("RLOCK.LIST").array().len(), 1);
    assert_eq!(conn.run("RLOCK.CANCEL k nobody"), 0);
    assert_eq!(conn.let_go("k", "alice"), 0);
    bob.read().held();
    assert_eq!(conn.run("RLOCK.RENEW k bob 30000 SESSION s"), 1);
    assert_eq!(conn.run("RLOCK.BREAK k"), 1);
    let lost = life.run("RLOCK.EVENTS s").event();
    assert_eq!(lost, ("lost k bob".to_owned(), "broken".into()));
    // Where something is evicted, or there is room again, sessions begin.
    conn.run("CONFIG SET maxmemory-policy allkeys-lru");
    conn.run("RLOCK.EVENTS new").events();
    conn.run("CONFIG SET maxmemory-policy noeviction");
    conn.run("CONFIG SET maxmemory 0");
    conn.run("RLOCK.EVENTS newer").events();
}

#[test]
fn info_counts_sessions_and_what_happens_to_them() {
    let server = Server::start();
    let mut conn = server.connect();
    let life = server.session_connection("s");
    let _other = server.session_connection("t");
    conn.take("k", "alice");
    conn.queue("k", "bob", "s");
    conn.queue("k", "carol", "s");
    conn.take_for("m", "dave", "s");
    conn.take_for("n", "erin", "s");
    let refused = conn.run("RLOCK.ACQUIRE m alice 1000 QUEUE 0 SESSION t");
    refused.queued();
    let refused = conn.run("RLOCK.ACQUIRE k dave 1000 QUEUE 0 SESSION t");
    assert!(refused.is_error(), "alice waits for dave");
    let now = metrics(&server);
    for (name, expected) in [
        ("sessions", 2),
        ("session_holds", 2),
        ("unacknowledged_events", 0),
        ("waiters", 3),
        ("locks_waited_for", 2),
        ("deadlocks_refused", 1),
    ] {
        assert_eq!(now.get(name), Some(&expected), "{name} in {now:?}");
    }
    conn.run("DEL n");
    conn.let_go("k", "alice"); // to bob, who is not told of it yet
    // And erin lost the deleted locks.
    until("both have something to fetch", || {
        metrics(&server)["unacknowledged_events"] == 2
    });
    life.close();
    until("the session is over", || metrics(&server)["sessions"] == 1);
    until("all is given back", || server.holder("k").is_none());
    let after = metrics(&server);
    for (name, expected) in [
        ("unacknowledged_events", 1), // that alice has what she waited for
        ("sessions_overflowed", 0),
        ("session_holds", 1), // alice has dave's, in the other session
        ("waiters", 0),
        ("holds_lost", 1),
        ("grants_taken_back", 0),
        ("session_releases", 2), // and what bob was not told of
        ("departures", 1),       // carol
    ] {
        assert_eq!(after.get(name), Some(&expected), "{name} in {after:?}");
    }
}

#[test]
fn unloading_is_refused_while_a_session_waits() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut life = server.session_connection("s");
    alice.queue("k", "bob", "s");
    assert!(alice.run("MODULE UNLOAD rlock").is_error());
    alice.let_go("k", "alice");
    life.run("RLOCK.EVENTS s").granted("k", "bob");
    let mut listener = server.blocked_in("RLOCK.EVENTS s BLOCK 0");
    assert!(
        alice.run("MODULE UNLOAD rlock").is_error(),
        "somebody listens"
    );
    life.run("RLOCK.EVENTS s").events();
    assert!(listener.read().is_error(), "taken over");
    assert_eq!(alice.let_go("k", "bob"), 0);
    if !Version::at_hand().can_unload_modules() {
        return;
    }
    assert_eq!(alice.run("MODULE UNLOAD rlock"), "OK");
    // No session is left that could be told of its end.
    life.close();
    alice.settle();
    let path = module_path().display().to_string();
    assert_eq!(alice.cmd(&["MODULE", "LOAD", &path]), "OK");
    assert_eq!(server.info_number("rlock_sessions"), 0);
}

#[test]
fn unloading_is_refused_while_a_session_holds() {
    let server = Server::start();
    let mut life = server.session_connection("s");
    life.take_for("k", "bob", "s");
    assert!(life.run("MODULE UNLOAD rlock").is_error());
    life.let_go("k", "bob");
    if Version::at_hand().can_unload_modules() {
        assert_eq!(life.run("MODULE UNLOAD rlock"), "OK");
    }
}

#[test]
fn unloading_is_refused_while_a_client_waits() {
    let server = Server::start();
    let mut alice = server.connect();
    alice.take("k", "alice");
    let mut bob = server.wait_in_queue("k", "bob");
    assert!(alice.run("MODULE UNLOAD rlock").is_error());
    alice.let_go("k", "alice");
    bob.read().held();
    if !Version::at_hand().can_unload_modules() {
        return;
    }
    assert_eq!(alice.run("MODULE UNLOAD rlock"), "OK");
    assert_eq!(alice.run("HGET k bob"), "1", "a plain key");
    let path = module_path().display().to_string();
    assert_eq!(alice.cmd(&["MODULE", "LOAD", &path]), "OK");
    assert_eq!(alice.let_go("k", "bob"), 0);
}

/// Servers that parse pipelined commands before they run them would run one of ours when we are no
/// longer there, and stop.
#[test]
fn unloading_under_a_pipeline_is_refused_or_harmless() {
    let server = Server::start();
    let mut client = server.connect();
    client.send_all(&["BLPOP list 0", "RLOCK.INFO k", "PING"]);
    client.expect_nothing_yet();
    let told = server.run("MODULE UNLOAD rlock");
    assert_eq!(server.run("LPUSH list x"), 1);
    assert_eq!(client.read().texts(), ["list", "x"]);
    let info = client.read();
    assert_eq!(client.read(), "PONG");
    if Version::at_hand().can_unload_modules() {
        assert_eq!(told, "OK");
        assert!(info.error().starts_with("ERR unknown command"));
    } else {
        assert!(told.is_error());
        assert_eq!(info.get("count"), &0);
        let log = server.log();
        assert!(log.contains("rlock cannot be unloaded"), "{log}");
        assert!(log.contains("loadmodule"), "{log}");
    }
}
