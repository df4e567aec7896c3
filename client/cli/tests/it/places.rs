//! Clusters, sentinels, TLS, users: each option that says where the server is, with a real one.

use std::net::SocketAddr;
use std::process::Command;

use rlock_tests::{Certificates, Sentinels, Server, Shards};
use serde_json::Value as Json;

use crate::program::PROGRAM;

/// Runs a command under the locks, and shows one of them, with these options of the server.
#[track_caller]
fn works(place: &[&str], names: &[&str]) {
    let run = [
        place,
        &["run", "--timeout", "5"],
        names,
        &["--", "sh", "-c"],
    ]
    .concat();
    let shows = format!("{PROGRAM} {} info --json {}", place.join(" "), names[0]);
    let mut command = Command::new(PROGRAM);
    let output = command
        .args(run)
        .arg(shows)
        .env_remove("RLOCK_URL")
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
