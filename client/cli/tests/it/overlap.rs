//! Two commands never run at once for one lock, whatever dies.
//!
//! Real processes write their token into one file for each lock, every few milliseconds. A later
//! grant has a larger token, so two commands ran at once, or the wrong one after the other, exactly
//! if a smaller token comes after a larger one.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use rlock_tests::{Random, Server};

use crate::program::{Running, rlock};

const LOCKS: u64 = 6;
const CONTENDERS: u64 = 3;

/// The last of the locks is a semaphore with one permit, which promises the same.
const LAST: &str = "lock-5";

/// The fate of a round. Most rounds have to be killed, since their command would take long.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Ends,
    RlockKilled,
    GuardianKilled,
    CommandKilled,
    RlockStopped,
    ConnectionsClosed,
}

const FATES: [Fate; 8] = [
    Fate::Ends,
    Fate::Ends,
    Fate::RlockKilled,
    Fate::RlockKilled,
    Fate::GuardianKilled,
    Fate::CommandKilled,
    Fate::RlockStopped,
    Fate::ConnectionsClosed,
];

#[test]
fn two_commands_never_run_at_once_whatever_dies() {
    storm(Duration::from_secs(20));
}

#[test]
#[ignore = "ten minutes; OVERLAP_SECONDS= sets others"]
fn two_commands_never_run_at_once_for_long() {
    let seconds = env::var("OVERLAP_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(600);
    storm(Duration::from_secs(seconds));
}

fn storm(time: Duration) {
    let server = Server::start();
    let seed = env::var("OVERLAP_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed: u64 = seed.unwrap_or(since.as_secs());
    eprintln!("OVERLAP_SEED={seed}");
    let (end, rounds) = (Instant::now() + time, AtomicUsize::new(0));
    let counts: [AtomicUsize; FATES.len()] = Default::default();
    thread::scope(|scope| {
        for number in 0..LOCKS * CONTENDERS {
            let (server, rounds, counts) = (&server, &rounds, &counts);
            let mut random = Random::new(seed.wrapping_mul(1_000_003) + number + 1);
            scope.spawn(move || {
                let name = format!("lock-{}", number % LOCKS);
                while Instant::now() < end {
                    let fate = usize::try_from(random.below(8)).unwrap();
                    if round(server, &name, FATES[fate], &mut random, end) {
                        counts[fate].fetch_add(1, Ordering::Relaxed);
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        scope.spawn(|| {
            // And now and then the server is silent for longer than the grace.
            while Instant::now() + Duration::from_secs(4) < end {
                thread::sleep(Duration::from_secs(5));
                server.freeze();
                thread::sleep(Duration::from_millis(1_500));
                server.thaw();
            }
        });
    });
    let rounds = rounds.into_inner();
    let mut lines = 0;
    for number in 0..LOCKS {
        lines += check(&file_of(&server, &format!("lock-{number}")));
    }
    let each: Vec<_> = FATES
        .iter()
        .zip(counts.map(AtomicUsize::into_inner))
        .collect();
    eprintln!("{rounds} rounds, {lines} lines: {each:?}");
    assert!(rounds > 100, "too few rounds to say anything: {rounds}");
}

/// One command under the lock, and its fate. Returns false if it did not get that far.
fn round(server: &Server, name: &str, fate: Fate, random: &mut Random, end: Instant) -> bool {
    let file = file_of(server, name);
    let ms = match fate {
        Fate::Ends => random.below(40),
        _ => 30_000,
    };
    let mut command = rlock(server, &["run", "--grace", "1s", "--lease", "3s"]);
    if name == LAST {
        command.args(["--permits", "1/1"]);
    }
    command.args([name, "--"]);
    command.arg(env::current_exe().unwrap()).args(WORKER);
    command
        .env("OVERLAP_FILE", &file)
        .env("OVERLAP_MS", ms.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = Running::start(command);
    let ours = loop {
        if let Some(pid) = running.command() {
            break pid;
        }
        if Instant::now() > end || running.0.try_wait().unwrap().is_some() {
            return matches!(fate, Fate::Ends) && Instant::now() < end;
        }
        thread::sleep(Duration::from_millis(2));
    };
    thread::sleep(Duration::from_millis(random.below(60)));
    match fate {
        Fate::Ends => {}
        Fate::RlockKilled => running.signal(Signal::SIGKILL),
        Fate::GuardianKilled => {
            // It may have gone with the server's silence.
            let _ = running
                .guardian()
                .map(|guardian| kill(guardian, Signal::SIGKILL));
        }
        Fate::CommandKilled => {
            let _ = kill(ours, Signal::SIGKILL);
        }
        Fate::RlockStopped => {
            running.signal(Signal::SIGSTOP);
            thread::sleep(Duration::from_millis(random.below(4_000)));
            running.signal(Signal::SIGCONT);
            running.signal(Signal::SIGTERM);
        }
        Fate::ConnectionsClosed => {
            let mut conn = server.connect();
            // Another round may close this connection in the same way.
            let _ = conn.try_run("CLIENT KILL TYPE normal SKIPME yes");
            running.signal(Signal::SIGTERM);
        }
    }
    let _ = running.0.wait();
    true
}

fn file_of(server: &Server, name: &str) -> PathBuf {
    server.directory().join(name)
}

/// Tokens never get smaller. Returns how many lines there are.
fn check(file: &Path) -> usize {
    let lines = fs::read_to_string(file).expect("commands ran");
    let lines: Vec<u64> = lines.lines().map(|line| line.parse().unwrap()).collect();
    for (number, pair) in lines.windows(2).enumerate() {
        assert!(
            pair[0] <= pair[1],
            "{}:{}: the command with token {} runs although {} was granted",
            file.display(),
            number + 2,
            pair[1],
            pair[0]
        );
    }
    lines.len()
}

#[test]
#[should_panic = "runs although"]
fn the_checker_sees_an_overlap() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "1\n1\n2\n1\n").unwrap();
    check(file.path());
}

/// This very program as the command: it writes, and so does a child of its own.
const WORKER: [&str; 4] = ["--ignored", "--exact", "--quiet", "overlap::worker"];

#[test]
#[ignore = "a command for the tests above"]
fn worker() {
    let Some(file) = env::var_os("OVERLAP_FILE") else {
        return; // among all ignored tests
    };
    let token = env::var("RLOCK_TOKEN").unwrap();
    let ms: u64 = env::var("OVERLAP_MS").unwrap().parse().unwrap();
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .unwrap();
    let is_first = env::var_os("OVERLAP_CHILD").is_none();
    let child = is_first.then(|| {
        let mut child = Command::new(env::current_exe().unwrap());
        child
            .args(WORKER)
            .env("OVERLAP_CHILD", "1")
            .stdout(Stdio::null());
        child.spawn().unwrap()
    });
    let end = Instant::now() + Duration::from_millis(ms);
    while Instant::now() < end {
        file.write_all(format!("{token}\n").as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(3));
    }
    let _ = child.map(|mut child| child.wait());
}
