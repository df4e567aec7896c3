//! `rlock exporter`, and Debian's own Prometheus if it is installed (`make prometheus`).

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rlock_tests::{Pair, Server, Shards, eventually};
use serde_json::Value as Json;

use crate::program::{PROGRAM, Running, quiet_status, rlock, url};

/// An exporter that listens on a port of its own.
struct Exporter {
    process: Running,
    address: String,
}

impl Exporter {
    #[track_caller]
    fn start(words: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command
            .args(words)
            .args(["exporter", "--listen", "127.0.0.1:0"]);
        command.env_remove("RLOCK_URL").stderr(Stdio::piped());
        let mut process = Running::start(command);
        let stderr = process.0.stderr.take().unwrap();
        let line = BufReader::new(stderr)
            .lines()
            .next()
            .expect("a line")
            .unwrap();
        let address = line.split("http://").nth(1).expect("an address");
        let address = address.trim_end_matches("/metrics").to_owned();
        Self { process, address }
    }

    fn of(server: &Server) -> Self {
        Self::start(&["--url", &url(server)])
    }

    /// The head and the body of the answer.
    #[track_caller]
    fn get(&self, path: &str) -> (String, String) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        http(&self.address, &request)
    }

    #[track_caller]
    fn metrics(&self) -> String {
        let (head, body) = self.get("/metrics");
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        body
    }
}

#[track_caller]
fn http(address: &str, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    (head.to_owned(), body.to_owned())
}

/// A server on which something has happened, with metrics of every kind.
#[track_caller]
fn used_server() -> Server {
    let server = Server::start();
    server.run("CONFIG SET rlock.metrics-patterns job*");
    for name in ["job:1", "other"] {
        assert_eq!(quiet_status(&server, &["run", name, "--", "true"]), 0);
    }
    server
}

/// The names of the metrics, without the suffixes of histograms.
fn names(metrics: &str) -> BTreeSet<String> {
    let types = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    types
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect()
}

/// Nothing else would end process 1 of a container.
#[test]
fn it_ends_when_it_is_told_to() {
    let server = Server::start();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut exporter = Exporter::of(&server);
        exporter.process.signal(signal);
        assert_eq!(exporter.process.status(), 0, "{signal}");
    }
}

#[test]
fn each_field_of_info_is_a_metric_with_its_value() {
    let server = used_server();
    let exporter = Exporter::of(&server);
    let metrics = exporter.metrics();
    let told = server.run("INFO rlock").text();
    let node = server.address().to_string();
    let mut compared = 0;
    for (field, value) in told.lines().filter_map(|line| line.split_once(':')) {
        if field.starts_with("rlock_pattern_") || value.contains(',') {
            continue; // below
        }
        let lines = [
            format!("{field}_total{{node=\"{node}\"}} {value}"),
            format!("{field}{{node=\"{node}\"}} {value}"),
            format!(
                "{}_seconds{{node=\"{node}\"}} {value}",
                field.trim_end_matches("_ms")
            ),
        ];
        let found = lines
            .iter()
            .any(|line| metrics.lines().any(|one| one == line));
        assert!(found, "{field}:{value} is not among\n{metrics}");
        compared += 1;
    }
    assert!(compared > 20, "{told}");
    for line in [
        format!("rlock_up{{node=\"{node}\"}} 1"),
        format!("rlock_wait_seconds_count{{node=\"{node}\"}} 0"),
        format!("rlock_pattern_grants_total{{node=\"{node}\",pattern=\"job*\"}} 1"),
        format!(
            "rlock_pattern_hold_seconds_bucket{{node=\"{node}\",pattern=\"job*\",le=\"+Inf\"}} "
        ),
    ] {
        assert!(metrics.contains(&line), "{line} is not among\n{metrics}");
    }
}

#[test]
fn the_longest_present_wait_and_hold_are_gauges_also_by_pattern() {
    let server = used_server();
    let exporter = Exporter::of(&server);
    let mut job = Running::start(rlock(&server, &["run", "job:2", "--", "sleep", "60"]));
    job.await_command();
    let waiter = Running::start(rlock(&server, &["run", "job:2", "--", "true"]));
    for metric in ["wait", "hold"] {
        for name in ["rlock_longest", "rlock_pattern_longest"] {
            let start = format!("{name}_{metric}_seconds{{");
            eventually("it has lasted for 0.1 s", || {
                let metrics = exporter.metrics();
                let line = metrics.lines().find(|line| line.starts_with(&start));
                let value = line.expect(&start).split(' ').next_back().unwrap();
                (value.parse::<f64>().unwrap() >= 0.1).then_some(())
            });
        }
    }
    drop(waiter);
    job.signal(Signal::SIGTERM);
    job.wait();
    eventually("nobody waits and nothing is held", || {
        let metrics = exporter.metrics();
        let mut lines = metrics.lines();
        let longest = |line: &&str| line.starts_with("rlock_") && line.contains("_longest_");
        lines
            .by_ref()
            .filter(longest)
            .all(|line| line.ends_with(" 0"))
            .then_some(())
    });
}

#[test]
fn every_node_of_a_cluster_is_there_and_a_replica_that_takes_over() {
    let mut shards = Shards::start();
    let urls: Vec<_> = shards.nodes().iter().map(url).collect();
    let exporter = Exporter::start(&["--cluster", "--url", &urls.join(",")]);
    let primaries: Vec<_> = shards
        .primaries()
        .iter()
        .map(|node| node.address())
        .collect();
    let metrics = exporter.metrics();
    for node in &primaries {
        assert!(
            metrics.contains(&format!("rlock_up{{node=\"{node}\"}} 1\n")),
            "{metrics}"
        );
    }
    shards.kill_primary_of("a");
    eventually("its replica is there in its place", || {
        let metrics = exporter.metrics();
        let killed = primaries
            .iter()
            .find(|node| !metrics.contains(&line(node, 1)));
        let mut now = shards.primaries().into_iter();
        let all = now.all(|node| metrics.contains(&line(&node.address(), 1)));
        (killed.is_some() && all).then_some(())
    });
}

/// One exporter is enough for both, before and after a failover.
#[test]
fn a_primary_and_its_replica_are_two_nodes_of_one_exporter() {
    let mut pair = Pair::start();
    let urls = [url(&pair.primary), url(&pair.replica)].join(",");
    let exporter = Exporter::start(&["--url", &urls]);
    let (primary, replica) = (pair.primary.address(), pair.replica.address());
    let metrics = exporter.metrics();
    for node in [&primary, &replica] {
        assert!(metrics.contains(&line(node, 1)), "{metrics}");
    }
    pair.primary.kill();
    let metrics = exporter.metrics();
    assert!(metrics.contains(&line(&primary, 0)), "{metrics}");
    assert!(metrics.contains(&line(&replica, 1)), "{metrics}");
    // Other commands would not know which of the two to ask.
    assert_eq!(quiet_or_not(&["--url", &urls, "ls"]), Some(64));
}

#[test]
fn a_node_that_knows_of_no_slots_is_down() {
    let alone = Server::builder().cluster().start();
    let exporter = Exporter::start(&["--cluster", "--url", &url(&alone)]);
    let metrics = exporter.metrics();
    assert!(metrics.contains(&line(&alone.address(), 0)), "{metrics}");
}

#[test]
fn nodes_that_hang_cost_the_others_nothing() {
    let shards = Shards::start();
    // The kernel connects to these, and no process answers.
    let silent: Vec<_> = (0..8)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let silent_urls = silent
        .iter()
        .map(|one| format!("redis://{}", one.local_addr().unwrap()));
    let urls: Vec<_> = silent_urls.chain(shards.nodes().iter().map(url)).collect();
    let exporter = Exporter::start(&["--cluster", "--url", &urls.join(",")]);
    let primaries = shards.primaries();
    let (up, hanging) = primaries.split_first().unwrap();
    for node in hanging {
        node.freeze();
    }
    let start = Instant::now();
    let metrics = exporter.metrics();
    let took = start.elapsed();
    for node in hanging {
        node.thaw();
    }
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert!(metrics.contains(&line(&up.address(), 1)), "{metrics}");
    for node in hanging {
        assert!(metrics.contains(&line(&node.address(), 0)), "{metrics}");
    }
}

#[test]
fn who_asks_slowly_is_cut_off_and_leaves_room_for_others() {
    let server = Server::start();
    let exporter = Exporter::of(&server);
    let mut slow: Vec<_> = (0..80)
        .map(|_| {
            let mut stream = TcpStream::connect(&exporter.address).unwrap();
            stream
                .write_all(b"GET /metrics HTTP/1.1\r\nHost: ")
                .unwrap();
            stream
        })
        .collect();
    let descriptors = format!("/proc/{}/fd", exporter.process.0.id());
    let most = fs::read_dir(descriptors).unwrap().count();
    assert!(most < 60, "{most} descriptors for 80 connections");
    // Those before it are cut off in turn.
    let start = Instant::now();
    assert!(exporter.metrics().contains(&line(&server.address(), 1)));
    eprintln!("80 slow ones before it: served in {:?}", start.elapsed());
    let first = &mut slow[0];
    first
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let mut rest = Vec::new();
    first.read_to_end(&mut rest).expect("it was cut off");
    // An answer ends the connection, also for a client that would go on.
    let mut stream = TcpStream::connect(&exporter.address).unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    stream.read_to_end(&mut rest).expect("closed");
}

fn line(node: &std::net::SocketAddr, up: u8) -> String {
    format!("rlock_up{{node=\"{node}\"}} {up}\n")
}

#[test]
fn a_server_that_is_away_or_has_no_module_is_down_and_other_paths_are_not_there() {
    let mut server = Server::builder().without_module().start();
    let exporter = Exporter::of(&server);
    let down = line(&server.address(), 0);
    assert!(exporter.metrics().contains(&down));
    server.kill();
    assert!(exporter.metrics().contains(&down), "the same label");
    assert!(exporter.get("/other").0.starts_with("HTTP/1.1 404 "));
    assert!(exporter.get("/").0.starts_with("HTTP/1.1 200 "));
    let (head, _) = http(&exporter.address, "POST /metrics HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.0 405 "), "{head}");
    assert_eq!(
        quiet_or_not(&["exporter", "--listen", &exporter.address]),
        Some(69)
    );
}

fn quiet_or_not(words: &[&str]) -> Option<i32> {
    let mut command = Command::new(PROGRAM);
    command
        .args(words)
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .code()
}

fn ours(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The metrics that an expression names.
fn used(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let words = words.filter(|word| word.starts_with("rlock_"));
    let own = |word: &str| {
        let histogram = ["_bucket", "_count", "_sum"].iter();
        let mut histogram = histogram.filter_map(|end| word.strip_suffix(end));
        histogram.next().unwrap_or(word).to_owned()
    };
    words.map(own).collect()
}

#[test]
fn dashboard_and_rules_use_only_metrics_that_there_are() {
    let metrics = names(&Exporter::of(&used_server()).metrics());
    let dashboard = fs::read_to_string(ours("grafana/dashboard.json")).unwrap();
    let dashboard: Json = serde_json::from_str(&dashboard).expect("JSON");
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut expressions: Vec<String> = targets
        .map(|target| target["expr"].as_str().unwrap().to_owned())
        .collect();
    assert!(expressions.len() > 10);
    let rules = fs::read_to_string(ours("prometheus/rules.yml")).unwrap();
    let rules = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("expr: "));
    expressions.extend(rules.map(str::to_owned));
    for expression in expressions {
        let used = used(&expression);
        let is_of_prometheus = expression.contains("up{job=\"rlock\"}");
        assert!(!used.is_empty() || is_of_prometheus, "{expression}");
        assert!(
            used.is_subset(&metrics),
            "{expression} uses {used:?} of {metrics:?}"
        );
    }
}

/// Whether the program is installed, as by `make prometheus`.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    let needed = std::env::var_os("RLOCK_PROMETHEUS").is_some();
    assert!(found || !needed, "{program} is not installed");
    if !found {
        eprintln!("skipped: no {program} here");
    }
    found
}

#[test]
fn promtool_finds_nothing_wrong_with_metrics_and_rules() {
    if !has("promtool") {
        return;
    }
    let metrics = Exporter::of(&used_server()).metrics();
    let mut check = Command::new("promtool");
    let check = check.args(["check", "metrics"]).stdin(Stdio::piped());
    let mut check = check
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    check
        .stdin
        .take()
        .unwrap()
        .write_all(metrics.as_bytes())
        .unwrap();
    let output = check.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert_eq!(String::from_utf8_lossy(&said), "");
    assert!(output.status.success());
    let mut check = Command::new("promtool");
    let output = check
        .args(["check", "rules"])
        .arg(ours("prometheus/rules.yml"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("10 rules found"),
        "{said}"
    );
}

/// `rules_test.yml` has series on which an alert must fire, and series on which it must not.
#[test]
fn alerts_fire_when_they_should_and_only_then() {
    if !has("promtool") {
        return;
    }
    let mut test = Command::new("promtool");
    let test = test.args(["test", "rules"]);
    let output = test.arg(ours("prometheus/rules_test.yml")).output();
    let output = output.unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&said)
    );
}

#[test]
fn prometheus_itself_scrapes_it() {
    if !has("prometheus") {
        return;
    }
    let server = used_server();
    let exporter = Exporter::of(&server);
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("prometheus.yml");
    let rules = ours("prometheus/rules.yml");
    let text = format!(
        "global:\n  scrape_interval: 200ms\n  scrape_timeout: 200ms\nrule_files: [{}]\n\
         scrape_configs:\n  - job_name: rlock\n    static_configs:\n      - targets: ['{}']\n",
        rules.display(),
        exporter.address
    );
    fs::write(&config, text).unwrap();
    // A port that is free now.
    let address = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut command = Command::new("prometheus");
    command.arg(format!("--config.file={}", config.display()));
    command.arg(format!(
        "--storage.tsdb.path={}",
        directory.path().join("data").display()
    ));
    command.arg(format!("--web.listen-address={address}"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let _prometheus = Running::start(command);
    let request = "GET /api/v1/query?query=rlock_grants_total HTTP/1.0\r\nHost: x\r\n\r\n";
    let told = eventually("Prometheus has scraped it", || {
        TcpStream::connect(address).ok()?;
        let (_, body) = http(&address.to_string(), request);
        body.contains("\"value\"").then_some(body)
    });
    assert!(told.contains(r#","2"]"#), "both grants are there: {told}");
}
