//! The way back, as docs/operations.md has it: a server that goes on without the module, and one
//! with an older version of it.

use std::fs;
use std::process::Command;

use rlock_tests::{Builder, Server};

use super::tidy::read;

/// An option that no version of the module has.
const UNKNOWN: &str = "rlock.of-a-newer-version 1";

/// The commands for a shell in the section "Back out".
fn commands() -> Vec<String> {
    let page = read("docs/operations.md");
    let section = page.split("\n## Back out\n").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap();
    let block = section.split("```sh\n").nth(1).expect("the commands");
    let lines = block.lines().map(str::trim);
    let lines = lines.take_while(|line| *line != "```");
    lines
        .map(|line| line.split("   #").next().unwrap().trim_end().to_owned())
        .collect()
}

/// The users that `redis.conf` shows, each a line of an ACL file; and one with the category of the
/// commands, where the server has categories of modules.
fn users() -> String {
    let has_category = !Server::start().run("ACL CAT lock").is_error();
    let file = read("redis.conf");
    let users = file.lines().filter(|line| line.starts_with("# user "));
    let users = users.map(|line| line.trim_start_matches("# "));
    let mut users: Vec<_> = users.filter(|line| !line.contains(" default ")).collect();
    assert!(
        users.iter().any(|line| line.starts_with("user orders ")),
        "{users:?}"
    );
    let rights = if has_category { "+@lock " } else { "" };
    let other = format!("user other on >secret ~* {rights}+rlock.acquire -rlock.break +get");
    users.push(&other);
    users.push("user default on nopass ~* &* +@all");
    users.join("\n") + "\n"
}

fn with_file_of_users(path: &str) -> Builder {
    Server::builder()
        .config("appendonly yes")
        .config(&format!("aclfile {path}"))
}

/// A lock of each kind, held by alice, and a limit.
fn hold_all(server: &Server) {
    let mut conn = server.connect();
    conn.run("RLOCK.LIMIT permits 3");
    for words in [
        "plain alice 600000",
        "read alice 600000 READ",
        "write alice 600000 WRITE",
        "permits alice 600000 PERMITS 2",
    ] {
        conn.run(format!("RLOCK.ACQUIRE {words}")).held();
    }
}

#[track_caller]
fn all_are_held(server: &Server) {
    for (name, mode) in [
        ("plain", ""),
        ("read", "READ"),
        ("write", "WRITE"),
        ("permits", "PERMITS"),
    ] {
        let renewed = server.run(format!("RLOCK.RENEW {name} alice 600000 {mode}"));
        assert_eq!(renewed, 1, "{name}");
    }
}

#[test]
fn a_server_goes_on_without_the_module_after_the_steps_of_the_page_and_with_it_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("users.acl");
    let path = file.to_str().unwrap();
    fs::write(&file, users()).unwrap();
    let mut server = with_file_of_users(path).config("rlock.publish off").start();
    hold_all(&server);

    // Each step is needed: without it the server does not start when the module is gone.
    let log = with_file_of_users(path).without_module().refuses_to_start();
    assert!(
        log.contains("Unknown command or category name in ACL"),
        "{log}"
    );
    let options = Server::builder().config("rlock.publish off");
    let log = options.without_module().refuses_to_start();
    assert!(
        log.contains("Module Configuration detected without loadmodule directive"),
        "{log}"
    );

    // Step 3, while the module is still there.
    let [edit, load] = &commands()[..] else {
        panic!("two commands: {:?}", commands())
    };
    let edit = edit.replace("/etc/redis/users.acl", path);
    assert!(edit.contains(path), "{edit}");
    assert!(
        Command::new("sh")
            .args(["-c", &edit])
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(load, "redis-cli ACL LOAD");
    assert_eq!(server.run("ACL LOAD"), "OK");
    let left = fs::read_to_string(&file).unwrap();
    assert!(
        !left.contains("rlock.") && !left.contains("@lock"),
        "{left}"
    );
    assert!(left.contains(" +get"), "other rights stay: {left}");

    // Steps 4 and 5.
    server.stop();
    let without = with_file_of_users(path).without_module();
    let mut plain = without.data(server.directory()).start();
    assert!(plain.run("RLOCK.INFO plain").is_error());

    // Step 6: what remains.
    for name in ["plain", "read", "write", "permits"] {
        assert_eq!(plain.run(format!("TYPE {name}")), "hash");
    }
    let mut keys = plain.run("KEYS *").texts();
    keys.sort_unstable();
    let lasting: Vec<_> = keys
        .iter()
        .filter(|key| plain.run(format!("PTTL {key}")) == -1)
        .collect();
    assert_eq!(lasting, ["{permits}:rlock_limit"]);
    let (limit, reader) = ("{permits}:rlock_limit", "{read}:alice:rwlock_timeout:1");
    assert_eq!(keys, ["permits", "plain", "read", "write", limit, reader]);

    // And back in.
    plain.stop();
    let again = with_file_of_users(path).data(plain.directory()).start();
    all_are_held(&again);
}

/// A server does not start with an option that its version of the module does not know, and its log
/// does not name the option.
#[test]
fn an_older_version_starts_after_its_unknown_options_were_taken_out() {
    let log = Server::builder().config(UNKNOWN).refuses_to_start();
    assert!(log.contains("Module Configuration detected"), "{log}");
    let mut server = Server::builder().config("appendonly yes").start();
    hold_all(&server);
    server.restart();
    all_are_held(&server);
}
