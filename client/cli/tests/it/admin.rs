//! The commands for operators, against real locks.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use rlock_tests::{Pair, Server, until};
use serde_json::Value as Json;

use crate::program::{output, quiet_status, rlock, status_and_line};

/// The output of a command that ends with this status.
#[track_caller]
fn printed(server: &Server, words: &[&str], status: i32) -> String {
    let Output {
        status: ended,
        stdout,
        stderr,
    } = output(server, words);
    assert_eq!(String::from_utf8_lossy(&stderr), "", "{words:?}");
    assert_eq!(ended.code(), Some(status), "{words:?}");
    String::from_utf8(stdout).unwrap()
}

#[track_caller]
fn json(server: &Server, words: &[&str], status: i32) -> Json {
    let words = [words, &["--json"]].concat();
    serde_json::from_str(&printed(server, &words, status)).expect("JSON")
}

#[test]
fn ls_lists_locks_and_no_other_keys() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE held alice 60000").held();
    conn.run("RLOCK.ACQUIRE read bob 60000 READ").held();
    conn.run("RLOCK.ACQUIRE read carol 60000 READ").held();
    conn.run("RLOCK.ACQUIRE both dora 60000 WRITE").held();
    conn.run("RLOCK.ACQUIRE both dora 60000 READ").held();
    conn.run("HSET user:7 name dora");
    conn.run("SET text 1");
    let _waiter = server.wait_in_queue("held", "erin");
    let text = printed(&server, &["ls"], 0);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(
        lines[1].starts_with("held  lock   alice"),
        "most waiters first: {text}"
    );
    assert!(lines[1].ends_with('1'), "{text}");
    for held in ["read  read   2 readers", "both  write  dora "] {
        assert!(
            lines[2..].iter().any(|line| line.starts_with(held)),
            "{text}"
        );
    }
    let found = json(&server, &["ls", "--match", "r*"], 0);
    assert_eq!(found.as_array().unwrap().len(), 1);
    assert_eq!(found[0]["name"], "read");
}

#[test]
fn ls_walks_many_keys_and_leaves_the_server_to_others() {
    let server = Server::start();
    server.run("DEBUG POPULATE 300000 key 10");
    server.run("RLOCK.ACQUIRE held alice 60000").held();
    server.run("CONFIG RESETSTAT");
    let start = Instant::now();
    let found = json(&server, &["ls"], 0);
    let took = start.elapsed();
    assert_eq!(found.as_array().unwrap().len(), 1);
    let busy = server.median_cost("scan");
    assert!(busy < 2_000.0, "half of the looks take {busy} us or less");
    eprintln!("300,000 keys in {took:?}, a look {busy} us");
}

#[test]
fn info_shows_holders_and_the_queue() {
    let server = Server::start();
    assert_eq!(printed(&server, &["info", "a"], 0), "a is free\n");
    server.run("RLOCK.ACQUIRE a alice 60000").held();
    let _waiter = server.wait_in_queue("a", "bob");
    let text = printed(&server, &["info", "a"], 0);
    assert!(text.contains("\nalice   lock  1"), "{text}");
    assert!(text.contains("\n1       bob"), "{text}");
    let info = json(&server, &["info", "a"], 0);
    assert_eq!(
        (&info["owner"], &info["queue"][0]["owner"]),
        (&"alice".into(), &"bob".into())
    );
}

#[test]
fn why_follows_five_owners_over_three_locks() {
    let server = Server::start();
    let mut conn = server.connect();
    // carol works; bob waits for her, alice for bob; dora and erin wait for alice.
    conn.run("RLOCK.ACQUIRE one alice 60000").held();
    conn.run("RLOCK.ACQUIRE two bob 60000").held();
    conn.run("RLOCK.ACQUIRE three carol 60000").held();
    let _waiters = [
        ("two", "alice"),
        ("three", "bob"),
        ("one", "dora"),
        ("one", "erin"),
    ]
    .map(|(name, owner)| server.wait_in_queue(name, owner));
    let of = |who: &str| {
        let steps = json(&server, &["why", who], 0);
        let steps = steps.as_array().unwrap().iter().map(|step| {
            let text = |name: &str| step[name].as_str().unwrap_or_default().to_owned();
            format!(
                "{}{} {}{}",
                text("lock"),
                text("owner"),
                text("holder"),
                text("waits-for")
            )
        });
        steps.collect::<Vec<_>>()
    };
    let from_one = [
        "one alice",
        "alice two",
        "two bob",
        "bob three",
        "three carol",
        "carol ",
    ];
    assert_eq!(of("one"), from_one);
    assert_eq!(of("erin"), [&["erin one"], &from_one[..]].concat());
    assert_eq!(of("bob"), from_one[3..]);
    let text = printed(&server, &["why", "erin"], 0);
    assert!(
        text.starts_with("erin waits for one, place 2, for "),
        "{text}"
    );
    assert!(
        text.ends_with("            carol waits for no lock: it works, or hangs\n"),
        "{text}"
    );
    let text = printed(&server, &["why", "nobody"], 1);
    assert_eq!(text, "nobody is free, and no owner of that name waits\n");
}

#[test]
fn why_ends_at_a_circle() {
    let server = Server::start();
    let mut conn = server.connect();
    // Scripts can close a circle that the module would refuse: alice takes over what dora holds.
    conn.run("RLOCK.ACQUIRE one alice 60000").held();
    conn.run("RLOCK.ACQUIRE two bob 60000").held();
    let _waiters =
        [("two", "alice"), ("one", "carol")].map(|(name, owner)| server.wait_in_queue(name, owner));
    conn.run("HDEL two bob");
    conn.run("HSET two carol 1");
    let steps = json(&server, &["why", "one"], 0);
    let steps = steps.as_array().unwrap();
    assert_eq!(steps.last().unwrap()["circle"], true, "{steps:?}");
    assert!(steps.len() < 8, "{steps:?}");
}

/// A session whose owners wait without a connection each.
fn session(server: &Server) -> rlock_tests::Conn {
    let mut session = server.connect();
    session.run("RLOCK.EVENTS queued");
    session
}

fn queue(conn: &mut rlock_tests::Conn, name: &str, owner: &str) {
    let words = "600000 QUEUE 600000 SESSION queued";
    conn.run(format!("RLOCK.ACQUIRE {name} {owner} {words}"));
}

#[test]
fn why_follows_a_chain_of_any_length_and_shows_its_beginning() {
    let server = Server::start();
    let _session = session(&server);
    let mut conn = server.connect();
    let links = 3_000;
    for link in 0..=links {
        conn.run(format!("RLOCK.ACQUIRE lock:{link} owner:{link} 600000"))
            .held();
    }
    for link in 0..links {
        let next = link + 1;
        queue(&mut conn, &format!("lock:{next}"), &format!("owner:{link}"));
    }
    let steps = json(&server, &["why", "lock:0"], 0);
    let steps = steps.as_array().unwrap();
    assert_eq!(steps.len(), 2 * links + 2);
    assert_eq!(steps.last().unwrap()["owner"], format!("owner:{links}"));
    let text = printed(&server, &["why", "lock:0"], 0);
    assert_eq!(text.lines().count(), 101, "{text}");
    let end = format!(
        "… and {} more steps: --json tells them\n",
        steps.len() - 100
    );
    assert!(text.ends_with(&end), "{text}");
}

#[test]
fn why_calls_nothing_a_circle_that_is_none() {
    let server = Server::start();
    let _session = session(&server);
    let mut conn = server.connect();
    // Both readers wait for one owner, which waits for another lock.
    conn.run("RLOCK.ACQUIRE a bob 60000 READ").held();
    conn.run("RLOCK.ACQUIRE a carol 60000 READ").held();
    conn.run("RLOCK.ACQUIRE b dora 60000").held();
    conn.run("RLOCK.ACQUIRE c erin 60000").held();
    queue(&mut conn, "b", "bob");
    queue(&mut conn, "b", "carol");
    queue(&mut conn, "c", "dora");
    let text = printed(&server, &["why", "a"], 0);
    assert!(!text.contains("circle"), "{text}");
    assert!(text.ends_with("      dora, as above\n"), "{text}");
    assert_eq!(text.matches("erin waits for no lock").count(), 1, "{text}");
}

#[test]
fn why_says_what_it_cannot_know() {
    let server = Server::start();
    let _session = session(&server);
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE secret alice 60000").held();
    conn.run("RLOCK.ACQUIRE public bob 60000").held();
    queue(&mut conn, "secret", "bob");
    queue(&mut conn, "public", "carol");
    server.run("ACL SETUSER some on nopass ~public +@read +rlock.info +rlock.list");
    let text = printed(&server, &["--user", "some", "why", "public"], 0);
    assert!(text.contains("whether it works cannot be known"), "{text}");
    let steps = json(&server, &["--user", "some", "why", "public"], 0);
    assert_eq!(steps[1]["works"], Json::Null, "{steps}");
    let text = printed(&server, &["why", "public"], 0);
    assert!(text.contains("bob waits for secret"), "{text}");
}

#[test]
fn ls_asks_only_for_what_it_prints() {
    let server = Server::start();
    let _session = session(&server);
    let mut conn = server.connect();
    for lock in 0..250 {
        conn.run(format!("RLOCK.ACQUIRE lock:{lock} alice 60000"))
            .held();
        queue(&mut conn, &format!("lock:{lock}"), "bob");
    }
    server.run("CONFIG RESETSTAT");
    let found = json(&server, &["ls", "--count", "1"], 0);
    assert_eq!(found.as_array().unwrap().len(), 1);
    let told = server.run("INFO commandstats").text();
    let asked = told.to_lowercase();
    assert!(asked.contains("cmdstat_rlock.info:calls=1,"), "{asked}");
    let found = json(&server, &["ls"], 0);
    assert_eq!(found.as_array().unwrap().len(), 250);
}

#[test]
fn log_and_sessions_tell_what_the_server_tells() {
    let server = Server::start();
    let mut session = server.session_connection("worker:7");
    session
        .run("RLOCK.ACQUIRE a alice 60000 SESSION worker:7")
        .held();
    let text = printed(&server, &["sessions"], 0);
    assert!(
        text.lines()
            .nth(1)
            .unwrap()
            .starts_with("worker:7  listens  1      0"),
        "{text}"
    );
    server.run("RLOCK.BREAK a");
    let text = printed(&server, &["log", "--match", "a"], 0);
    let line = text.lines().nth(1).unwrap();
    assert!(line.starts_with("20") && line.contains("broken"), "{text}");
    assert_eq!(json(&server, &["log", "--count", "1"], 0)[0]["key"], "a");
    assert_eq!(
        json(&server, &["sessions", "--match", "x*"], 0),
        Json::Array(Vec::new())
    );
}

#[test]
fn break_needs_a_yes_and_cancel_a_waiter() {
    let server = Server::start();
    server.run("RLOCK.ACQUIRE a alice 60000").held();
    let (status, line) = status_and_line(&server, &["break", "a"]);
    assert_eq!(status, 64);
    assert!(line.contains("--yes"), "{line}");
    let mut piped = rlock(&server, &["break", "a"]);
    let mut piped = piped
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // It may have refused before the test writes to it.
    let _ = piped.stdin.take().unwrap().write_all(b"y\n");
    assert_eq!(
        piped.wait().unwrap().code(),
        Some(64),
        "what is no terminal gives no consent"
    );
    assert_eq!(server.holder("a").as_deref(), Some("alice"));

    let mut waiter = server.wait_in_queue("a", "bob");
    assert_eq!(quiet_status(&server, &["cancel", "a", "bob"]), 0);
    waiter.read().refused();
    assert_eq!(quiet_status(&server, &["cancel", "a", "bob"]), 1);
    assert_eq!(json(&server, &["break", "--yes", "a"], 0)["broken"], true);
    assert_eq!(json(&server, &["break", "--yes", "a"], 1)["broken"], false);
    assert_eq!(server.holder("a"), None);
}

/// The printed text, without the parts that differ from run to run.
#[track_caller]
fn lines(server: &Server, words: &[&str], status: i32) -> Vec<String> {
    let text = printed(server, words, status);
    let lines = text.lines().map(|line| {
        let blanks = line.len() - line.trim_start().len();
        let words = line.split_whitespace().map(|word| {
            let is_time = word.starts_with(|first: char| first.is_ascii_digit())
                && word.trim_end_matches([',', ';']).ends_with('s');
            if is_time || word.len() >= 16 {
                "…"
            } else {
                word
            }
        });
        " ".repeat(blanks) + &words.collect::<Vec<_>>().join(" ")
    });
    lines.collect()
}

#[test]
fn permits_are_shown_with_their_limit_holders_and_waiters() {
    let server = Server::builder().config("rlock.fence-guard-ms 0").start();
    let mut conn = server.session_connection("worker:7");
    let acquire = |owner: &str, rest: &str| format!("RLOCK.ACQUIRE exports {owner} 60000 {rest}");
    conn.run(acquire("alice", "PERMITS 2 OF 5 SESSION worker:7"))
        .held();
    let listed = "exports permits 2 permits: alice … … 0";
    assert_eq!(lines(&server, &["ls"], 0)[1], listed);
    assert_eq!(quiet_status(&server, &["limit", "exports", "5"]), 0);
    conn.run(acquire("bob", "PERMITS 2")).held();
    let _dora = server.blocked_in(&acquire("dora", "PERMITS 3 BLOCK 0"));
    // One permit is free, and no waiter passes dora.
    let _erin = server.blocked_in(&acquire("erin", "PERMITS 1 BLOCK 60000"));
    conn.cmd(&["HSET", "exports", "odd", "1"]);
    let listed = "exports permits 4/5 permits: 2 holders … … 2";
    assert_eq!(lines(&server, &["ls"], 0)[1..], [listed]);
    let head = "exports: 4 of 5 permits out; 2 waiting, the first for 3";
    let told = lines(&server, &["info", "exports"], 0);
    assert_eq!(
        told[..2],
        [head, "HOLDER PERMITS HELD LEASE LEFT TOKEN SESSION CLIENT"]
    );
    assert!(told[2].starts_with("alice 2 … … … worker:7 "), "{told:?}");
    assert_eq!(told[3], "bob 2 … … … - -");
    let strange = "another program wrote, and it is no hold: odd";
    let heads = "WAITER OWNER PERMITS WAITED LEFT SESSION CLIENT";
    assert_eq!(told[4..7], [strange, "", heads]);
    assert!(told[7].starts_with("1 dora 3 … no limit - "), "{told:?}");
    assert!(told[8].starts_with("2 erin 1 … … - "), "{told:?}");
    let told = lines(&server, &["why", "erin"], 0);
    assert_eq!(
        told[0],
        "erin waits for 1 permit of exports, place 2, for …"
    );
    assert_eq!(told[1], format!("  {head}"));
    let of_alice = "  exports: alice has 2 permits for … lease left … session worker:7, client ";
    assert!(told[2].starts_with(of_alice), "{told:?}");
    assert_eq!(told[3], "    alice waits for no lock: it works, or hangs");
    let of_bob = "  exports: bob has 2 permits for … lease left … no session";
    assert_eq!(told[4], of_bob);
    assert_eq!(told.len(), 6, "and not the odd field: {told:?}");
    assert_eq!(quiet_status(&server, &["cancel", "exports", "erin"]), 0);
    assert_eq!(quiet_status(&server, &["limit", "exports", "1"]), 0);
    assert_eq!(
        json(&server, &["break", "--yes", "exports"], 0)["broken"],
        true
    );
    // dora waits for more than there may be now.
    let head = "exports: 0 of 1 permits out; 1 waiting, the first for 3";
    assert_eq!(lines(&server, &["why", "exports"], 0), [head]);
    assert_eq!(
        lines(&server, &["ls"], 0)[1],
        "exports permits 0/1 permits - … 1"
    );
    assert_eq!(quiet_status(&server, &["cancel", "exports", "dora"]), 0);
    assert_eq!(
        lines(&server, &["info", "exports"], 0),
        ["exports: 0 of 1 permits out"]
    );
    let free = "exports is free, and no owner of that name waits";
    assert_eq!(lines(&server, &["why", "exports"], 1), [free]);
    conn.run("HSET exports mode permits odd 1");
    assert_eq!(lines(&server, &["ls"], 0).len(), 1, "nobody has any");
}

#[test]
fn limit_tells_sets_and_takes_away() {
    let server = Server::start();
    let mut conn = server.connect();
    let told = json(&server, &["limit", "exports"], 0);
    assert_eq!(
        told,
        serde_json::json!({ "limit": null, "permits": 0, "waiters": 0 })
    );
    let set = json(&server, &["limit", "exports", "2"], 0);
    assert_eq!(set, serde_json::json!({ "before": null, "limit": 2 }));
    conn.run("RLOCK.ACQUIRE exports alice 60000 PERMITS 2")
        .held();
    let mut bob = server.blocked_in("RLOCK.ACQUIRE exports bob 60000 PERMITS 1 BLOCK 0");
    let told = json(&server, &["limit", "exports"], 0);
    assert_eq!(
        told,
        serde_json::json!({ "limit": 2, "permits": 2, "waiters": 1 })
    );
    let said = printed(&server, &["limit", "exports", "3"], 0);
    assert_eq!(said, "the limit is 3, and was 2 before\n");
    bob.read().held();
    let told = printed(&server, &["limit", "exports"], 0);
    assert_eq!(told, "exports: 3 of 3 permits out\n");
    let said = printed(&server, &["limit", "exports", "0"], 0);
    assert_eq!(said, "the limit was 3, and none is set now\n");
    let told = printed(&server, &["limit", "exports"], 0);
    assert_eq!(told, "exports: 3 permits out, no limit is set\n");
    assert_eq!(
        printed(&server, &["limit", "exports", "0"], 0),
        "no limit was set\n"
    );
    // A lock without permits has no limit.
    conn.run("RLOCK.ACQUIRE lock alice 60000").held();
    conn.run("RLOCK.ACQUIRE read alice 60000 READ").held();
    for name in ["lock", "read"] {
        let (status, line) = status_and_line(&server, &["limit", name]);
        assert_eq!(status, 69);
        assert!(
            line.contains(&format!("{name} is a lock, which has no permits")),
            "{line}"
        );
        let (status, line) = status_and_line(&server, &["limit", name, "3"]);
        assert_eq!(status, 69);
        assert!(line.contains("WRONGKIND"), "{line}");
    }
    for wrong in ["-1", "some", "2147483648"] {
        let output = output(&server, &["limit", "exports", wrong]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(
            said.contains("'[N]': N is a number from 0 to 2147483647"),
            "{said}"
        );
    }
}

/// The subjects of the doctor's findings.
#[track_caller]
fn found(server: &Server, status: i32) -> Vec<String> {
    let report = json(server, &["doctor"], status);
    let findings = report["findings"].as_array().unwrap().iter();
    let about = findings.map(|one| one["about"].as_str().unwrap().to_owned());
    about.collect()
}

#[test]
fn doctor_has_nothing_to_say_of_a_sound_server() {
    let server = Server::builder().config("appendonly yes").start();
    assert_eq!(found(&server, 0), Vec::<String>::new());
    let text = printed(&server, &["doctor"], 0);
    assert!(
        text.contains("module rlock 0.2.0, a primary with 0 replicas"),
        "{text}"
    );
    assert!(text.ends_with("nothing is unsafe for locks\n"), "{text}");
}

#[test]
fn doctor_finds_each_thing_that_is_unsafe() {
    let server = Server::start();
    assert_eq!(found(&server, 1), ["persistence"]);
    for line in printed(&server, &["doctor"], 1).lines() {
        assert!(line.len() <= 120, "{line}");
    }
    server.run("CONFIG SET rlock.grant-delay-ms 5000");
    assert_eq!(found(&server, 0), Vec::<String>::new());
    server.run("CONFIG SET maxmemory-policy allkeys-lru");
    assert_eq!(found(&server, 0), Vec::<String>::new(), "there is no limit");
    server.run("CONFIG SET maxmemory 1gb");
    assert_eq!(found(&server, 1), ["eviction"]);
    server.run("CONFIG SET maxmemory-policy noeviction");
    assert_eq!(found(&server, 0), Vec::<String>::new(), "there is room");
    server.run("CONFIG SET maxmemory 100kb");
    assert!(
        server
            .run("RLOCK.ACQUIRE a alice 1000")
            .error()
            .starts_with("OOM")
    );
    assert_eq!(found(&server, 1), ["memory"]);
    server.run("CONFIG SET maxmemory-policy allkeys-lru");
    server.run("CONFIG SET maxmemory 0");
    server.run("CONFIG SET appendonly yes");
    // The server does not end before the first AOF is there.
    until("the first AOF is written", || {
        server.info_number("aof_rewrite_in_progress") == 0
    });
    server.run("CONFIG SET appendfsync no");
    assert_eq!(found(&server, 1), ["appendfsync"]);
    server.run("CONFIG SET appendfsync everysec");
    server.run("CONFIG SET maxclients 6");
    let _many: Vec<_> = (0..4).map(|_| server.connect()).collect();
    until("connections are counted", || {
        found(&server, 1) == ["maxclients"]
    });
}

#[test]
fn doctor_finds_a_missing_module_and_missing_rights() {
    let plain = Server::builder()
        .without_module()
        .config("appendonly yes")
        .start();
    assert_eq!(found(&plain, 1), ["module"]);
    let server = Server::builder().config("appendonly yes").start();
    server.run("ACL SETUSER default -config");
    assert_eq!(found(&server, 1), ["rights"]);
    let text = printed(&server, &["doctor"], 1);
    assert!(
        text.contains("module rlock") && text.contains("+config|get"),
        "{text}"
    );
    server.run("ACL SETUSER default -info -time -module");
    assert_eq!(
        found(&server, 1),
        ["rights"; 3],
        "and not that there is no module"
    );
    let text = printed(&server, &["doctor"], 1);
    for right in ["+info", "+config|get", "+time"] {
        assert!(text.contains(&format!("the right {right}\n")), "{text}");
    }
}

/// Commands removed by `rename-command`; also at a replica, where the primary does not see it.
#[test]
fn doctor_finds_missing_commands() {
    let without = |names: &[&str]| {
        let server = Server::builder().config("appendonly yes");
        names.iter().fold(server, |server, name| {
            server.config(&format!("rename-command {name} \"\""))
        })
    };
    let plain = without(&["HDEL", "EXEC"]).without_module().start();
    assert_eq!(found(&plain, 1), ["commands", "module"]);
    let text = printed(&plain, &["doctor"], 1);
    assert!(text.contains("no command HDEL, EXEC:"), "{text}");
    // An expired key's deletion cannot be read again.
    let server = without(&["DEL", "SPOP", "KEYS"]).start();
    server.run("CONFIG SET lazyfree-lazy-expire no");
    assert_eq!(found(&server, 1), ["append-only-file"]);
    let text = printed(&server, &["doctor"], 1);
    assert!(text.contains("it has no DEL, but writes it"), "{text}");
    server.run("CONFIG SET lazyfree-lazy-expire yes");
    assert_eq!(found(&server, 0), Vec::<String>::new());
    // A primary without RESTORE tells of new locks by other commands; a replica misses them.
    let hardened = without(&["RESTORE"]).start();
    assert_eq!(found(&hardened, 0), Vec::<String>::new());
    let primary = Server::start();
    hardened.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    assert!(found(&hardened, 1).contains(&"commands".to_owned()));
    let text = printed(&hardened, &["doctor"], 1);
    assert!(
        text.contains("it has no RESTORE: unless its primary"),
        "{text}"
    );
    // A primary does not hear of a command that its replica cannot carry out.
    let replica = without(&["DEL"]).without_module().start();
    let primary = Server::start();
    replica.run(format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    assert!(found(&replica, 1).contains(&"commands".to_owned()));
    let text = printed(&replica, &["doctor"], 1);
    assert!(text.contains("it has no DEL: if its primary has"), "{text}");
    until("it has errors", || {
        let mut conn = primary.connect();
        conn.take("k", "alice");
        conn.let_go("k", "alice");
        replica.info_number("unexpected_error_replies") > 0
    });
    assert!(found(&replica, 1).contains(&"replication".to_owned()));
    // A server that refuses to tell.
    let silent = without(&["COMMAND", "CONFIG"]).start();
    assert_eq!(found(&silent, 1), ["rights"; 2]);
    let text = printed(&silent, &["doctor"], 1);
    let told = "it does not answer COMMAND INFO: it has no command of this name";
    assert!(text.contains(told), "{text}");
}

/// Many servers load the append-only file with that user's rights, and drop the holds in it.
#[test]
fn doctor_finds_that_default_may_not_do_everything_where_there_is_an_aof() {
    let server = Server::builder()
        .config("appendonly yes")
        .config("user looker on nopass +@all")
        .user("looker", "any")
        .start();
    let found_as = |server: &Server, user: &str, status| {
        let report = json(server, &["--user", user, "doctor"], status);
        let findings = report["findings"].as_array().unwrap().iter();
        let about = findings.map(|one| one["about"].as_str().unwrap().to_owned());
        about.collect::<Vec<_>>()
    };
    assert_eq!(found_as(&server, "looker", 0), [""; 0]);
    for rights in [
        "off reset",
        "on nopass ~* &* +@all -hset",
        "~* &* -@all +@read +@write",
        "~locks:* &* +@all",
        "~* resetchannels +@all",
    ] {
        let told = server.run(format!("ACL SETUSER default reset {rights}"));
        assert_eq!(told, "OK", "{rights}");
        assert_eq!(found_as(&server, "looker", 1), ["default-user"], "{rights}");
    }
    let text = printed(&server, &["--user", "looker", "doctor"], 1);
    assert!(
        text.contains("ACL SETUSER default off ~* &* +@all"),
        "{text}"
    );
    server.run("ACL SETUSER default off ~* &* +@all");
    assert_eq!(found_as(&server, "looker", 0), [""; 0]);

    // It says so if it may not ask, and does not say that all is well.
    server.run("ACL SETUSER default reset");
    server.run("ACL SETUSER asks on nopass +info +config|get +command|info +time");
    assert_eq!(found_as(&server, "asks", 1), ["rights"]);
    let text = printed(&server, &["--user", "asks", "doctor"], 1);
    assert!(text.contains("it does not answer ACL GETUSER: "), "{text}");
    assert!(text.contains("the right +acl|getuser\n"), "{text}");
    // Without an AOF the rights do not matter.
    server.run("CONFIG SET appendonly no");
    assert_eq!(found_as(&server, "asks", 1), ["persistence"]);
}

#[test]
fn doctor_finds_that_default_may_not_do_everything_at_a_replica_too() {
    let pair = Pair::start();
    pair.replica.run("CONFIG SET appendonly yes");
    until("the first AOF is written", || {
        pair.replica.info_number("aof_rewrite_in_progress") == 0
    });
    pair.replica.run("ACL SETUSER default resetkeys ~a*");
    assert_eq!(found(&pair.replica, 1), ["role", "default-user"]);
}

#[test]
fn a_hash_of_data_is_shown_as_it_is_and_not_broken() {
    let server = Server::start();
    server.run("HSET account:2 name bob balance 5");
    server.run("HSET stock 42 7 name bolts");
    for (name, note) in [("account:2", "it is no lock"), ("stock", "may be data")] {
        let text = printed(&server, &["info", name], 0);
        assert!(text.contains(note), "{text}");
        let (status, line) = status_and_line(&server, &["break", "--yes", name]);
        assert_eq!(status, 69, "{line}");
        assert!(line.contains(&format!("WRONGTYPE {name}: ")), "{line}");
        assert_eq!(server.run(format!("HLEN {name}")), 2);
    }
}

#[test]
fn who_lacks_a_right_is_told_which() {
    let server = Server::start();
    server.run("RLOCK.ACQUIRE a alice 60000").held();
    server.run("ACL SETUSER bob on nopass ~job* +@all");
    let said = |words: &[&str]| {
        let words = [&["--user", "bob"], words].concat();
        let (status, line) = status_and_line(&server, &words);
        assert_eq!(status, 69, "{line}");
        line
    };
    for words in [
        &["why", "a"][..],
        &["info", "a"],
        &["break", "--yes", "a"],
        &["limit", "a", "1"],
    ] {
        let line = said(words);
        assert!(
            line.ends_with("NOPERM the user bob needs the right ~a\n"),
            "{line}"
        );
    }
    assert_eq!(found(&server, 1), ["persistence"]);
    for (command, words) in [
        ("rlock.list", &["ls"][..]),
        ("scan", &["ls"]),
        ("hmget", &["ls"]),
        ("rlock.info", &["why", "job"]),
        ("rlock.list", &["why", "job"]),
        ("rlock.log", &["log"]),
        ("rlock.sessions", &["sessions"]),
        ("rlock.break", &["break", "--yes", "job"]),
        ("rlock.cancel", &["cancel", "job", "alice"]),
        ("rlock.info", &["limit", "job"]),
        ("rlock.limit", &["limit", "job", "3"]),
    ] {
        // A lock of alice's, so that there is something to ask about.
        server.run("RLOCK.ACQUIRE job alice 60000").held();
        server.run(format!("ACL SETUSER bob -{command}"));
        let line = said(words);
        assert!(
            line.contains(&format!("the right +{command}\n")),
            "{words:?}: {line}"
        );
        server.run(format!("ACL SETUSER bob +{command}"));
    }
}

/// No text, and a part of one; what steers a terminal; quotes and backslashes.
const ODD: &[u8] = b"lock'\"\\\xff\x1b[2J\xc3";
/// As it is shown.
const ODD_SHOWN: &str = r#"lock'"\\xff\u{1b}[2J\xc3"#;

#[test]
fn names_of_any_bytes_are_asked_for_and_shown_escaped() {
    let server = Server::start();
    let mut conn = server.connect();
    let acquire =
        |name: &[u8], owner: &[u8]| [b"RLOCK.ACQUIRE", name, owner, b"60000"].map(<[u8]>::to_vec);
    conn.cmd(&acquire(ODD, b"own\xff")).held();
    conn.cmd(&acquire(b"lock\xfe", b"other")).held();
    let mut session = server.session_connection("s");
    let wait = [
        &acquire(b"lock\xfe", b"own\xff")[..],
        &words_of("QUEUE 0 SESSION s"),
    ]
    .concat();
    session.cmd(&wait);
    let wait = [
        &acquire(ODD, b"\xfewaits")[..],
        &words_of("QUEUE 0 SESSION s"),
    ]
    .concat();
    session.cmd(&wait);
    let printed = |words: &[&[u8]]| {
        let mut command = rlock(&server, &[]);
        let output = command
            .args(words.iter().map(|word| OsStr::from_bytes(word)))
            .output();
        let Output { stdout, stderr, .. } = output.unwrap();
        assert_eq!(String::from_utf8_lossy(&stderr), "", "{words:?}");
        String::from_utf8(stdout).expect("text")
    };
    let held = format!("{ODD_SHOWN} is held by own\\xff, lease left ");
    let chain = printed(&[b"why", ODD]);
    assert!(chain.starts_with(&held), "{chain}");
    assert!(
        chain.contains("own\\xff waits for lock\\xfe, place 1, "),
        "{chain}"
    );
    assert!(chain.contains("lock\\xfe is held by other"), "{chain}");
    let chain = printed(&[b"why", b"\xfewaits"]);
    assert!(chain.contains(&held), "by an owner: {chain}");
    let steps: Json = serde_json::from_str(&printed(&[b"why", ODD, b"--json"])).unwrap();
    assert_eq!(steps[0]["lock"], ODD_SHOWN.replace("\\u{1b}", "\u{1b}"));
    assert!(printed(&[b"info", ODD]).contains("own\\xff"));
    for (pattern, rows) in [(&b"*\xff*"[..], 1), (b"*\xfe", 1), (b"*", 2)] {
        let listed = printed(&[b"ls", b"--match", pattern]);
        assert_eq!(listed.lines().count(), 1 + rows, "{listed}");
    }
    assert!(printed(&[b"ls"]).contains(ODD_SHOWN));
    assert!(printed(&[b"cancel", ODD, b"\xfewaits"]).contains("waits no longer"));
    assert!(printed(&[b"break", b"--yes", ODD]).contains("hold ended"));
    let told = printed(&[b"log", b"--match", b"*\xff*"]);
    assert!(
        told.contains(ODD_SHOWN) && told.contains("own\\xff"),
        "{told}"
    );
    let free = printed(&[b"info", b"fr\xffee"]);
    assert_eq!(free, "fr\\xffee is free\n");
    let ran = printed(&[
        b"run",
        ODD,
        b"--",
        b"sh",
        b"-c",
        b"printenv RLOCK_NAME | od -c | head -1",
    ]);
    assert!(ran.contains("377"), "the command gets the bytes: {ran}");
}

fn words_of(line: &str) -> Vec<Vec<u8>> {
    line.split(' ')
        .map(|word| word.as_bytes().to_vec())
        .collect()
}

#[test]
fn doctor_looks_at_replicas_and_at_clocks() {
    let pair = Pair::start();
    assert_eq!(found(&pair.primary, 1), ["min-replicas-to-write"]);
    assert!(found(&pair.replica, 1).contains(&"role".to_owned()));
    let server = Server::builder()
        .settable_clock()
        .config("appendonly yes")
        .start();
    server.step_clock(3_600);
    assert_eq!(found(&server, 1), ["clock"]);
}

#[test]
fn a_server_that_does_not_answer_is_69() {
    let server = Server::start();
    let mut nobody = rlock(&server, &["ls"]);
    let output = nobody
        .env("RLOCK_URL", "redis://me:pw@127.0.0.1:1")
        .output()
        .unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(69), "{line}");
    assert!(
        line.contains("127.0.0.1:1") && !line.contains("pw"),
        "{line}"
    );
    let plain = Server::builder().without_module().start();
    let (status, line) = status_and_line(&plain, &["info", "a"]);
    assert_eq!(status, 69);
    assert!(line.contains("rlock doctor"), "{line}");
    server.freeze();
    let start = Instant::now();
    assert_eq!(output_of_frozen(&server), Some(69));
    assert!(start.elapsed() < Duration::from_secs(20));
    server.thaw();
}

fn output_of_frozen(server: &Server) -> Option<i32> {
    let mut command = rlock(server, &["info", "a"]);
    command.stderr(Stdio::null()).status().unwrap().code()
}
