//! Clusters, sentinels, TLS, users: each option that says where the server is, with a real one.

use std::net::SocketAddr;
use std::process::Command;

use rlock_tests::{Certificates, Sentinels, Server, Shards};
use serde_json::Value as Json;

use crate::program::PROGRAM;

/// Runs a command under the locks, and shows one of them, with these options of the server.
#[track_caller]
fn works(place: &[&str], names: &[&str]) {
    works_with(&[], place, names);
}

/// With these variables too.
#[track_caller]
fn works_with(variables: &[(&str, &str)], place: &[&str], names: &[&str]) {
    let run = [
        place,
        &["run", "--timeout", "5"],
        names,
        &["--", "sh", "-c"],
    ]
    .concat();
    let quoted: Vec<_> = place.iter().map(|word| format!("'{word}'")).collect();
    let shows = format!("{PROGRAM} {} info --json {}", quoted.join(" "), names[0]);
    let mut command = Command::new(PROGRAM);
    let output = command
        .args(run)
        .arg(shows)
        .env_remove("RLOCK_URL")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{place:?}: {complaint}");
    let info: Json = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(info["count"], 1, "{info}");
}

#[test]
fn a_cluster() {
    let shards = Shards::start();
    let nodes: Vec<String> = shards
        .nodes()
        .iter()
        .map(|node| format!("redis://{}", node.address()))
        .collect();
    let both = nodes[..2].join(",");
    let place = ["--cluster", "--url", &both];
    let names: Vec<String> = shards
        .primaries()
        .iter()
        .map(|node| shards.name_at(node, "job"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // Each at another node.
    for name in &names {
        works(&place, &[name]);
    }
    works(&place, &names);
    for name in &names {
        let mut limit = Command::new(PROGRAM);
        let output = limit.args(place).args(["limit", name, "3"]).output();
        let said = String::from_utf8(output.unwrap().stdout).unwrap();
        assert_eq!(said, "the limit is 3, and none was set before\n", "{name}");
    }
    for node in shards.primaries() {
        let name = shards.name_at(node, "held");
        node.run(format!("RLOCK.ACQUIRE {name} alice 60000")).held();
    }
    let mut command = Command::new(PROGRAM);
    let output = command.args(place).args(["ls", "--json"]).output().unwrap();
    let found: Json = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        found.as_array().unwrap().len(),
        shards.primaries().len(),
        "of every node"
    );
}

#[test]
fn a_node_that_knows_of_no_slots_is_no_answer() {
    let alone = Server::builder().cluster().start();
    let shards = Shards::start();
    let node = shards.primaries()[0];
    node.run(format!(
        "RLOCK.ACQUIRE {} alice 60000",
        shards.name_at(node, "held")
    ))
    .held();
    let lonely = format!("redis://{}", alone.address());
    let told = |urls: &str, words: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(["--cluster", "--url", urls]).args(words);
        command.output().unwrap()
    };
    for word in ["doctor", "ls", "log", "sessions"] {
        let output = told(&lonely, &[word]);
        let line = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{word}: {line}");
        assert!(line.contains("knows of no slots"), "{word}: {line}");
        assert!(output.stdout.is_empty(), "{word}");
    }
    let both = format!("{lonely},redis://{}", node.address());
    let output = told(&both, &["ls"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("alice"), "the other node is asked: {text}");
}

#[test]
fn doctor_tells_of_slots_without_a_primary() {
    let alone = Server::builder().cluster().start();
    alone.run("CLUSTER ADDSLOTSRANGE 0 16000");
    let mut command = Command::new(PROGRAM);
    let url = format!("redis://{}", alone.address());
    command.args(["--cluster", "--url", &url, "doctor"]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("383 slots of the cluster have no primary"),
        "{text}"
    );
}

fn urls(scheme: &str, addresses: &[SocketAddr]) -> String {
    let urls: Vec<_> = addresses
        .iter()
        .map(|at| format!("{scheme}://{at}"))
        .collect();
    urls.join(",")
}

#[test]
fn sentinels() {
    let watched = Sentinels::start();
    let urls = urls("redis", &watched.addresses());
    works(
        &["--sentinel", Sentinels::SERVICE, "--url", &urls],
        &["job"],
    );
}

#[test]
fn tls_with_an_authority_and_a_certificate() {
    if !Certificates::are_understood() {
        return;
    }
    let certificates = Certificates::new();
    let server = Server::builder()
        .tls_with_client_certificates(&certificates)
        .start();
    let path = |path: std::path::PathBuf| path.display().to_string();
    let (authority, own, key) = (
        path(certificates.authority()),
        path(certificates.client_certificate()),
        path(certificates.client_key()),
    );
    let address = server.tls_address();
    let trusts = [
        "--tls-ca",
        &authority,
        "--tls-cert",
        &own,
        "--tls-key",
        &key,
    ];
    for url in [format!("rediss://{address}"), format!("redis://{address}")] {
        works(&[&["--url", &url], &trusts[..]].concat(), &["job"]);
    }
    let mut stranger = Command::new(PROGRAM);
    stranger.args([
        "--tls",
        "--url",
        &format!("redis://{address}"),
        "info",
        "job",
    ]);
    assert_eq!(
        stranger.output().unwrap().status.code(),
        Some(69),
        "the authority is unknown"
    );
}

/// By the URL, by options and by variables, at a port and at a socket.
#[test]
fn name_and_password_reach_the_server_wherever_they_stand() {
    const PASSWORD: &str = "s:e@c/r,e?t&=%";
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("a b&c");
    let server = Server::builder()
        .config(&format!("unixsocket \"{}\"", socket.display()))
        .start();
    server.run("ACL SETUSER bob on nopass ~job* +@all");
    server.run("ACL SETUSER default off");
    let mut bob = server.connect();
    bob.run("AUTH bob x");
    bob.cmd(&[
        "ACL",
        "SETUSER",
        "bob",
        "resetpass",
        &format!(">{PASSWORD}"),
    ]);
    let path = socket.display().to_string();
    let path = path.replace(' ', "%20");
    let (port, socket) = (
        format!("redis://{}", server.address()),
        format!("unix://{path}"),
    );
    let with_user = format!("redis://bob@{}", server.address());
    let given = [("RLOCK_PASSWORD", PASSWORD)];
    let both = [("RLOCK_USER", "bob"), given[0]];
    for url in [&port, &socket] {
        works_with(&given, &["--user", "bob", "--url", url], &["job"]);
        works_with(&both, &["--url", url], &["job"]);
    }
    works_with(&given, &["--url", &with_user], &["job"]);
    works_with(
        &given,
        &["--url", &format!("{socket}?db=0&user=bob")],
        &["job"],
    );
    let encoded = "s%3Ae%40c%2Fr%2Ce%3Ft%26%3D%25";
    works(
        &["--url", &format!("{socket}?user=bob&pass={encoded}")],
        &["job"],
    );
}

/// In every command, and without a word of the URL, which may have a password.
#[test]
fn a_url_that_cannot_be_read_has_one_status_and_the_part_is_named() {
    for words in [
        &["run", "a", "--", "true"][..],
        &["info", "a"],
        &["ls"],
        &["doctor"],
        &["exporter", "--listen", "127.0.0.1:0"],
    ] {
        for (url, part) in [
            ("redis://me:sec/ret@h", "percent-encode it (%2F"),
            ("redis://me:12,secret@h", "%2C"),
            ("redis://h:port", "the port is no number"),
        ] {
            let mut command = Command::new(PROGRAM);
            let output = command.args(["--url", url, "--cluster"]).args(words);
            let output = output.output().unwrap();
            let line = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(64), "{words:?} {line}");
            assert!(
                line.contains(part) && !line.contains("sec"),
                "{words:?} {line}"
            );
        }
    }
}

#[test]
fn a_node_of_a_cluster_without_the_option_says_what_to_do() {
    let shards = Shards::start();
    let primaries = shards.primaries();
    let elsewhere = shards.name_at(primaries[1], "job");
    let url = format!("redis://{}", primaries[0].address());
    for words in [
        &["run", &elsewhere, "--", "true"][..],
        &["info", &elsewhere],
        &["break", "--yes", &elsewhere],
    ] {
        let mut command = Command::new(PROGRAM);
        let output = command.args(["--url", &url]).args(words).output().unwrap();
        let line = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{words:?} {line}");
        assert!(line.contains("add --cluster"), "{words:?} {line}");
    }
}

#[test]
fn a_user_who_may_use_locks() {
    let server = Server::start();
    server.run(
        "ACL SETUSER bob on >s:e@c/ret ~job* +rlock.acquire +rlock.release +rlock.renew \
        +rlock.events +rlock.bind +rlock.cancel +rlock.info",
    );
    server.run("ACL SETUSER default off");
    let url = format!("redis://bob:s%3Ae%40c%2Fret@{}", server.address());
    works(&["--url", &url], &["job"]);
    let mut shown = Command::new(PROGRAM);
    shown.args([
        "--user",
        "bob",
        "--url",
        &format!("redis://{}", server.address()),
    ]);
    let output = shown
        .args(["info", "job"])
        .env("RLOCK_PASSWORD", "s:e@c/ret")
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"job is free\n");
    let mut other = Command::new(PROGRAM);
    let output = other
        .args(["--url", &url, "info", "other"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(69));
    assert!(String::from_utf8_lossy(&output.stderr).contains("NOPERM"));
}
