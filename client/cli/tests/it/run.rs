//! Exit statuses, options, signals and the environment of `rlock run`.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use rlock_tests::{Pair, Server, eventually, until};

use crate::program::{
    Running, has_ended, output, quiet_status, rlock, state, status_and_line, time_to_end,
};

#[test]
fn the_status_is_the_commands_own() {
    let server = Server::start();
    assert_eq!(quiet_status(&server, &["run", "a", "--", "true"]), 0);
    assert_eq!(
        quiet_status(&server, &["run", "a", "--", "sh", "-c", "exit 7"]),
        7
    );
    assert_eq!(
        quiet_status(&server, &["run", "a", "--", "sh", "-c", "exit 255"]),
        255
    );
    assert_eq!(server.holder("a"), None);
}

#[test]
fn a_command_that_a_signal_ended_gives_128_and_its_number() {
    let server = Server::start();
    for (signal, status) in [("TERM", 143), ("KILL", 137), ("SEGV", 139)] {
        let script = format!("kill -{signal} $$; sleep 9");
        assert_eq!(
            quiet_status(&server, &["run", "a", "--", "sh", "-c", &script]),
            status
        );
    }
}

#[test]
fn a_command_that_is_missing_or_cannot_run_gives_127_and_126() {
    let server = Server::start();
    let (status, line) = status_and_line(&server, &["run", "a", "--", "no-such-command"]);
    assert_eq!(status, 127);
    assert!(
        line.starts_with("rlock: cannot run no-such-command: "),
        "{line}"
    );
    let (status, line) = status_and_line(&server, &["run", "a", "--", "/etc/passwd"]);
    assert_eq!(status, 126, "{line}");
    assert_eq!(server.holder("a"), None, "given back");
}

#[test]
fn wrong_use_gives_64_and_help_0() {
    let server = Server::start();
    for words in [
        &["run"][..],
        &["run", "a"],
        &["run", "--", "true"],
        &["run", "-n", "-w", "1", "a", "--", "true"],
        &["run", "-s", "-x", "a", "--", "true"],
        &["run", "-w", "soon", "a", "--", "true"],
        &["run", "--grace", "0", "a", "--", "true"],
        &["run", "--grace", "31s", "a", "--", "true"],
        &[
            "run", "--grace", "3601s", "--lease", "2h", "a", "--", "true",
        ],
        &["run", "--lease", "500ms", "a", "--", "true"],
        &["run", "--kill-after", "3s", "a", "--", "true"],
        &["run", "-E", "256", "a", "--", "true"],
        &["run", "--permits", "1/5", "-s", "a", "--", "true"],
        &["run", "--permits", "1/5", "-x", "a", "--", "true"],
        &["--tls-cert", "x.pem", "run", "a", "--", "true"],
        &["walk"],
    ] {
        let output = output(&server, words);
        assert_eq!(output.status.code(), Some(64), "{words:?}");
        assert!(!output.stderr.is_empty(), "{words:?}");
    }
    for words in [&["help"][..], &["run", "--help"], &["--version"]] {
        assert_eq!(quiet_status(&server, words), 0, "{words:?}");
        let mut full = rlock(&server, words);
        full.stdout(fs::File::create("/dev/full").unwrap());
        let output = full.output().unwrap();
        let line = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{words:?}");
        assert!(line.starts_with("rlock: cannot write: "), "{line}");
    }
    let (_, line) = status_and_line(&server, &["run", "--lease", "500ms", "a", "--", "true"]);
    assert!(line.contains("--lease 500ms: at least 1s"), "{line}");
    for (permits, wrong) in [
        ("0/5", "N is"),
        ("-1/5", "N is"),
        ("6/5", "N is"),
        ("1/x", "LIMIT is"),
    ] {
        let output = output(&server, &["run", "--permits", permits, "a", "--", "true"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{said}");
        let expected = format!("'{permits}' for '--permits <N[/LIMIT]>': {wrong}");
        assert!(said.contains(&expected), "{said}");
    }
    let words = ["run", "--permits", "1/5", "a", "b", "--", "true"];
    let (status, line) = status_and_line(&server, &words);
    assert_eq!(
        (status, &*line),
        (64, "rlock: --permits is for one NAME, and 2 are given\n")
    );
    let words = ["run", "--lease", "1s", "a", "--", "true"];
    assert_eq!(
        quiet_status(&server, &words),
        0,
        "any other lease works by itself"
    );
}

#[test]
fn who_lacks_a_right_to_lock_is_told_which() {
    let server = Server::start();
    server.run("ACL SETUSER bob on nopass ~job* +@all -rlock.acquire");
    let said = |name: &str| {
        let words = ["--user", "bob", "run", "-n", name, "--", "true"];
        let (status, line) = status_and_line(&server, &words);
        assert_eq!(status, 69, "{line}");
        assert!(!line.contains("refused: refused"), "{line}");
        line
    };
    let line = said("job");
    let wanted = "NOPERM the user bob needs the right +rlock.acquire\n";
    assert!(line.ends_with(wanted), "{line}");
    server.run("ACL SETUSER bob +rlock.acquire -rlock.events");
    let line = said("job");
    assert!(line.contains("the right +rlock.events\n"), "{line}");
    server.run("ACL SETUSER bob +rlock.events");
    let line = said("other");
    assert!(
        line.ends_with("NOPERM the user bob needs the right ~other\n"),
        "{line}"
    );
}

#[test]
fn a_server_that_cannot_be_used_gives_69_and_says_what_to_do() {
    let plain = Server::builder().without_module().start();
    let (status, line) = status_and_line(&plain, &["run", "a", "--", "true"]);
    assert_eq!(status, 69);
    assert!(line.contains("loadmodule"), "{line}");

    let server = Server::start();
    let mut nobody = rlock(&server, &["run", "a", "--", "true"]);
    nobody.env("RLOCK_URL", "redis://me:secret@127.0.0.1:1");
    let output = nobody.output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(69));
    assert!(
        line.contains("127.0.0.1:1 ") && line.contains("--url"),
        "{line}"
    );
    assert!(!line.contains("secret"), "{line}");

    server.run("SET text 1");
    let (status, line) = status_and_line(&server, &["run", "text", "--", "true"]);
    assert_eq!(status, 69);
    assert!(line.contains(" refused: WRONGTYPE"), "{line}");
}

#[test]
fn who_may_not_wait_or_not_for_so_long_gets_1_or_what_it_chose() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE a somebody 60000").held();
    assert_eq!(quiet_status(&server, &["run", "-n", "a", "--", "true"]), 1);
    assert_eq!(
        quiet_status(&server, &["run", "-n", "-E", "42", "a", "--", "true"]),
        42
    );
    let start = Instant::now();
    assert_eq!(
        quiet_status(&server, &["run", "-w", "0.3", "a", "--", "true"]),
        1
    );
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert_eq!(
        quiet_status(&server, &["run", "-w", "300ms", "a", "--", "true"]),
        1
    );
    assert_eq!(server.waiting_owners("a"), Vec::<String>::new());
}

#[test]
fn it_waits_its_turn() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE a somebody 60000").held();
    let mut waiting = Running::start(rlock(&server, &["run", "a", "--", "true"]));
    until("it waits", || server.waiting_owners("a").len() == 1);
    assert!(waiting.command().is_none());
    conn.run("RLOCK.RELEASE a somebody");
    assert_eq!(waiting.status(), 0);
}

#[test]
fn readers_run_together_and_a_writer_alone() {
    let server = Server::start();
    let reader = Running::start(rlock(&server, &["run", "-s", "a", "--", "sleep", "60"]));
    reader.await_command();
    assert_eq!(
        quiet_status(&server, &["run", "-n", "-s", "a", "--", "true"]),
        0
    );
    assert_eq!(
        quiet_status(&server, &["run", "-n", "-x", "a", "--", "true"]),
        1
    );
    reader.signal(Signal::SIGTERM);
    assert_eq!(
        quiet_status(&server, &["run", "-x", "a", "b", "--", "true"]),
        0
    );
}

/// How many permits are out, and whether there are waiters.
fn permits(server: &Server, name: &str) -> (i64, bool) {
    let info = server.run(format!("RLOCK.INFO {name}"));
    let is_free = !info.keys().contains(&"permits".to_owned());
    let out = if is_free {
        0
    } else {
        info.get("permits").int()
    };
    (out, info.get("waiters").int() > 0)
}

#[test]
fn as_many_commands_run_as_there_are_permits() {
    let server = Server::start();
    let run = |permits: &str| {
        rlock(
            &server,
            &["run", "--permits", permits, "a", "--", "sleep", "60"],
        )
    };
    let status = |permits: &str| {
        quiet_status(
            &server,
            &["run", "-n", "--permits", permits, "a", "--", "true"],
        )
    };
    let mut first = Running::start(run("2/4"));
    first.await_command();
    let second = Running::start(run("1/4"));
    second.await_command();
    assert_eq!(permits(&server, "a"), (3, false));
    assert_eq!((status("1/4"), status("2/4")), (0, 1));
    let words = ["run", "-w", "0.3", "--permits", "2/4", "a", "--", "true"];
    assert_eq!(quiet_status(&server, &words), 1, "in time");
    // A limit that is set counts for waiters too, in place of the limit that they name.
    let third = Running::start(run("3/4"));
    until("it waits", || permits(&server, "a") == (3, true));
    assert_eq!(quiet_status(&server, &["limit", "a", "6"]), 0);
    third.await_command();
    assert_eq!((status("1"), status("1/9")), (1, 1), "all six are out");
    first.signal(Signal::SIGTERM);
    assert_eq!(first.status(), 143);
    assert_eq!(
        (permits(&server, "a").0, status("2"), status("3")),
        (4, 0, 1)
    );
    let (code, line) = status_and_line(&server, &["run", "--permits", "7", "a", "--", "true"]);
    assert_eq!(code, 69);
    assert!(
        line.contains("permits must not exceed their limit, which is 6"),
        "{line}"
    );
    let (code, line) = status_and_line(&server, &["run", "--permits", "1", "b", "--", "true"]);
    assert_eq!(code, 69);
    assert!(
        line.contains("NOLIMIT") && line.contains("rlock limit NAME"),
        "{line}"
    );
}

#[test]
fn a_command_under_permits_knows_them_and_ends_as_under_a_lock() {
    let server = Server::start();
    let run = |options: &[&'static str], command: &[&'static str]| {
        [&["run", "--permits", "2/2"], options, &["a", "--"], command].concat()
    };
    let script = r#"echo "$RLOCK_NAME $RLOCK_OWNER $RLOCK_TOKEN""#;
    let told = output(&server, &run(&[], &["sh", "-c", script])).stdout;
    let told = String::from_utf8(told).unwrap();
    let [name, owner, token] = told.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{told}");
    };
    assert!(name == "a" && owner.ends_with(":1"), "{told}");
    assert!(token.parse::<u64>().unwrap() > 1_000_000, "{told}");
    assert_eq!(permits(&server, "a").0, 0, "given back");

    let (status, line) = status_and_line(&server, &run(&["--max", "0.2"], &["sleep", "60"]));
    assert_eq!(status, 124, "{line}");
    let start = Instant::now();
    assert_eq!(
        quiet_status(&server, &run(&["--at-least", "0.4"], &["true"])),
        0
    );
    assert!(start.elapsed() >= Duration::from_millis(400));

    let mut command = rlock(&server, &run(&[], &["sleep", "60"]));
    command.stderr(Stdio::null());
    let mut running = Running::start(command);
    running.await_command();
    assert_eq!(server.run("RLOCK.BREAK a"), 1);
    assert_eq!(running.status(), 75);

    let mut running = Running::start(rlock(&server, &run(&["--grace", "1s"], &["sleep", "60"])));
    let command = running.await_command();
    running.signal(Signal::SIGKILL);
    let ended = time_to_end(command);
    assert!(ended < Duration::from_millis(500), "{ended:?}");
    assert_eq!(permits(&server, "a").0, 2, "the grace is not over");
    running.wait();
    until("they are given back", || permits(&server, "a").0 == 0);
}

#[test]
fn several_locks_are_taken_together() {
    let server = Server::start();
    let both = Running::start(rlock(&server, &["run", "a", "b", "--", "sleep", "60"]));
    both.await_command();
    for name in ["a", "b"] {
        assert_eq!(
            quiet_status(&server, &["run", "-n", name, "--", "true"]),
            1,
            "{name}"
        );
    }
}

#[test]
fn the_command_knows_its_lock() {
    let server = Server::start();
    let script = r#"printf '%s\n' "$RLOCK_NAME" "$RLOCK_TOKEN" "$RLOCK_OWNER"; cat"#;
    let mut command = rlock(&server, &["run", "a", "b", "--", "sh", "-c", script]);
    let told = command.output().unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines[..2], ["a", "b"]);
    assert_eq!(lines[2], lines[3], "one token for what was taken at once");
    assert!(lines[2].parse::<u64>().unwrap() > 1_000_000, "{told}");
    assert!(lines[4].ends_with(":1"), "{told}");
}

#[test]
fn streams_pass_through_and_a_pipe_can_break() {
    let server = Server::start();
    let script = format!(
        "echo hello | {} run a -- tr a-z A-Z; {0} run a -- yes | head -1",
        crate::program::PROGRAM
    );
    let output = std::process::Command::new("sh")
        .args(["-c", &script])
        .env("RLOCK_URL", crate::program::url(&server))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "HELLO\ny\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn a_signal_during_the_wait_leaves_the_queue() {
    let server = Server::start();
    server.run("RLOCK.ACQUIRE a somebody 60000").held();
    for (signal, number) in [(Signal::SIGINT, 2), (Signal::SIGTERM, 15)] {
        let mut waiting = Running::start(rlock(&server, &["run", "a", "--", "true"]));
        until("it waits", || server.waiting_owners("a").len() == 1);
        let guardian = eventually("its guardian has its name", || waiting.guardian());
        waiting.signal(signal);
        assert_eq!(waiting.wait().signal(), Some(number), "a shell sees it");
        until("the queue is empty", || {
            server.waiting_owners("a").is_empty()
        });
        time_to_end(guardian);
    }
}

#[test]
fn a_signal_is_passed_on_to_the_whole_group() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    for signal in ["HUP", "INT", "QUIT", "TERM", "USR1", "USR2"] {
        let seen = directory.path().join(signal);
        let seen = seen.display();
        // The shell waits for its child, which is in the group and is told as well.
        let script = format!("trap 'echo heard > {seen}; exit 9' {signal}; sleep 60 & wait; wait");
        let mut running = Running::start(rlock(&server, &["run", "a", "--", "sh", "-c", &script]));
        let shell = running.await_command();
        until("it sleeps", || !crate::program::children(shell).is_empty());
        running.signal(format!("SIG{signal}").parse().unwrap());
        assert_eq!(running.status(), 9, "{signal}");
        assert_eq!(
            fs::read_to_string(directory.path().join(signal)).unwrap(),
            "heard\n"
        );
        assert_eq!(server.holder("a"), None);
    }
}

/// Each of them comes before it would be time to look at the lock again.
#[test]
fn signals_without_end_cost_no_lock() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let ready = directory.path().join("ready");
    let listens = format!("trap : USR1; echo > {}", ready.display());
    // Each signal ends a sleep.
    let script = format!("{listens}; while [ $SECONDS -lt 5 ]; do sleep 0.1; done; exit 9");
    let words = ["run", "a", "--grace", "2s", "--", "bash", "-c", &script];
    let mut running = Running::start(rlock(&server, &words));
    until("it listens", || ready.exists());
    let status = loop {
        if let Some(status) = running.0.try_wait().unwrap() {
            break status;
        }
        running.signal(Signal::SIGUSR1);
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(status.code(), Some(9));
}

#[test]
fn an_interrupt_that_was_passed_on_and_ended_the_command_ends_rlock_too() {
    let server = Server::start();
    let mut running = Running::start(rlock(&server, &["run", "a", "--", "sleep", "60"]));
    running.await_command();
    running.signal(Signal::SIGINT);
    assert_eq!(running.wait().signal(), Some(2), "a script ends with it");
    assert_eq!(server.holder("a"), None);
    let words = ["run", "a", "--", "sh", "-c", "kill -INT $$"];
    assert_eq!(
        quiet_status(&server, &words),
        130,
        "nobody interrupted rlock"
    );
}

#[test]
fn what_the_caller_ignores_stays_ignored() {
    let server = Server::start();
    // The command sends SIGHUP to itself, to the guardian and to rlock.
    let command = r#"kill -HUP $$ $PPID $(cut -d" " -f4 /proc/$PPID/stat); echo alive"#;
    let program = crate::program::PROGRAM;
    let script = format!("trap '' HUP; exec {program} run a -- sh -c '{command}'");
    let output = std::process::Command::new("sh")
        .args(["-c", &script])
        .env("RLOCK_URL", crate::program::url(&server))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "alive\n");
    assert!(output.status.success());
}

#[test]
fn what_the_command_leaves_behind_in_its_group_ends_before_the_lock_is_given_back() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let pid_file = directory.path().join("pid");
    let path = pid_file.display();
    // One that ends when told to, and one that has to be killed.
    for (trap, kill_after) in [("", "15"), ("trap '' TERM;", "0.3")] {
        let script = format!("{trap} sleep 60 & echo $! > {path}; exit 3");
        let options = ["run", "--grace", "30", "--kill-after", kill_after];
        let start = Instant::now();
        let status = quiet_status(
            &server,
            &[&options[..], &["a", "--", "sh", "-c", &script]].concat(),
        );
        assert_eq!(status, 3);
        let waited: f64 = start.elapsed().as_secs_f64();
        assert_eq!(waited >= kill_after.parse().unwrap(), !trap.is_empty());
        let left = fs::read_to_string(&pid_file).unwrap();
        let left = nix::unistd::Pid::from_raw(left.trim().parse().unwrap());
        assert!(has_ended(left), "{:?}", state(left));
    }
}

/// A chain of forks: each child goes on in its parent's place and ignores SIGTERM. A reader of
/// /proc misses it now and then.
#[test]
fn a_chain_of_forks_does_not_outlive_the_lock() {
    let server = Server::start();
    let chain = "$SIG{TERM} = 'IGNORE'; my $end = time + 20; while (time < $end) { exit if fork }";
    for _ in 0..3 {
        let words = ["run", "--kill-after", "0.5", "a", "--", "perl", "-e", chain];
        let mut command = rlock(&server, &words);
        let mut running = Running::start({
            command.stdout(Stdio::piped());
            command
        });
        let mut stdout = running.0.stdout.take().unwrap();
        assert_eq!(running.status(), 0);
        // Each of them has the other end. It is closed once they have gone.
        let start = Instant::now();
        stdout.read_to_end(&mut Vec::new()).unwrap();
        assert!(start.elapsed() < Duration::from_secs(1), "one went on");
    }
}

#[test]
fn a_guardian_that_was_stopped_is_made_to_go_on() {
    let server = Server::start();
    // While the command runs, which then ends by itself.
    let mut running = Running::start(rlock(
        &server,
        &["run", "a", "--", "sh", "-c", "sleep .5; exit 7"],
    ));
    running.await_command();
    kill(running.guardian().unwrap(), Signal::SIGSTOP).unwrap();
    assert_eq!(running.status(), 7);
    // Before there is a command.
    server.run("RLOCK.ACQUIRE a alice 60000").held();
    let mut running = Running::start(rlock(&server, &["run", "a", "--", "true"]));
    until("it waits", || !server.waiting_owners("a").is_empty());
    let guardian = eventually("its guardian has its name", || running.guardian());
    kill(guardian, Signal::SIGSTOP).unwrap();
    server.run("RLOCK.BREAK a");
    assert_eq!(running.status(), 0);
    // The same when a signal has to be passed on.
    let mut running = Running::start(rlock(&server, &["run", "a", "--", "sleep", "60"]));
    running.await_command();
    kill(running.guardian().unwrap(), Signal::SIGSTOP).unwrap();
    running.signal(Signal::SIGTERM);
    assert_eq!(running.status(), 143);
}

#[test]
fn at_least_keeps_the_lock_also_after_a_sigterm_and_sigint_ends_that() {
    let server = Server::start();
    let start = Instant::now();
    assert_eq!(
        quiet_status(&server, &["run", "--at-least", "700ms", "a", "--", "true"]),
        0
    );
    assert!(start.elapsed() >= Duration::from_millis(700));

    let mut command = rlock(&server, &["run", "--at-least", "60s", "a", "--", "true"]);
    command.stderr(Stdio::piped());
    let mut running = Running::start(command);
    let guardian = eventually("it starts", || running.guardian());
    time_to_end(guardian);
    assert!(server.holder("a").is_some());
    // A service manager stops it: the promise is kept.
    running.signal(Signal::SIGTERM);
    let stderr = running.0.stderr.take().unwrap();
    let mut lines = BufReader::new(stderr).lines().map(Result::unwrap);
    let line = lines.next().expect("a line");
    assert!(line.contains("keeping the lock for "), "{line}");
    assert!(server.holder("a").is_some());
    running.signal(Signal::SIGINT);
    assert_eq!(running.wait().signal(), Some(2), "a script ends with it");
    assert_eq!(server.holder("a"), None);
}

#[test]
fn max_ends_the_command_with_124() {
    let server = Server::start();
    let words = ["run", "--max", "300ms", "a", "--", "sleep", "60"];
    let (status, line) = status_and_line(&server, &words);
    assert_eq!(status, 124);
    assert!(line.contains("300ms (--max)"), "{line}");
    // One that does not end by itself is killed, and its lock is held until then.
    let script = "trap '' TERM; while :; do sleep 0.1; done";
    let words = [
        "run",
        "--max",
        "0.3",
        "--kill-after",
        "0.5",
        "a",
        "--",
        "sh",
        "-c",
        script,
    ];
    let start = Instant::now();
    assert_eq!(status_and_line(&server, &words).0, 124);
    assert!(start.elapsed() >= Duration::from_millis(800));
}

/// A command that notes SIGTERM and goes on, and its `rlock`, with this end of a lock.
#[track_caller]
fn when_broken(on_lost: &str) -> (Server, Running, nix::unistd::Pid, Duration, bool) {
    let server = Server::start();
    let noted = server.directory().join("noted");
    let script = format!(
        "trap 'echo TERM > {}' TERM; while :; do sleep 0.02; done",
        noted.display()
    );
    let words = [
        "run",
        "--on-lost",
        on_lost,
        "--kill-after",
        "0.5",
        "a",
        "--",
        "sh",
        "-c",
        &script,
    ];
    let mut command = rlock(&server, &words);
    command.stderr(Stdio::piped());
    let running = Running::start(command);
    let shell = running.await_command();
    // The trap is set once the loop runs.
    until("the loop runs", || {
        !crate::program::children(shell).is_empty()
    });
    assert_eq!(server.run("RLOCK.BREAK a"), 1);
    let start = Instant::now();
    let ended = loop {
        if has_ended(shell) || start.elapsed() > Duration::from_secs(2) {
            break start.elapsed();
        }
    };
    let noted = noted.exists();
    (server, running, shell, ended, noted)
}

#[test]
fn on_lost_term_gives_the_command_time_to_end() {
    let (_server, mut running, _, ended, noted) = when_broken("term");
    assert!(noted);
    assert!(
        ended >= Duration::from_millis(450) && ended < Duration::from_secs(2),
        "{ended:?}"
    );
    assert_eq!(running.status(), 75);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut running.0.stderr.take().unwrap(), &mut said).unwrap();
    let said: Vec<_> = said
        .lines()
        .filter(|line| line.starts_with("rlock: "))
        .collect();
    assert_eq!(
        said,
        ["rlock: lost the lock (an operator broke it); ending the command"]
    );
}

#[test]
fn what_stands_stopped_does_not_go_on_when_the_lock_is_lost() {
    let server = Server::start();
    let written = server.directory().join("written");
    // The child ends by SIGKILL alone, and its parent by SIGTERM.
    let script = format!(
        "sh -c 'trap : TERM; kill -STOP $$; while :; do echo x >>{}; done' & \
         trap 'exit 0' TERM; while :; do sleep 0.02; done",
        written.display()
    );
    let words = ["run", "--kill-after", "1", "a", "--", "sh", "-c", &script];
    let mut command = rlock(&server, &words);
    command.stderr(Stdio::null());
    let mut running = Running::start(command);
    let shell = running.await_command();
    until("the child stands stopped", || {
        let mut members = crate::program::children(shell).into_iter();
        members.any(|pid| state(pid) == Some('T'))
    });
    assert_eq!(server.run("RLOCK.BREAK a"), 1);
    assert_eq!(running.status(), 75);
    assert!(!written.exists(), "it ran beside the next owner");
}

#[test]
fn on_lost_kill_does_not() {
    let (_server, mut running, _, ended, noted) = when_broken("kill");
    assert!(!noted);
    assert!(ended < Duration::from_millis(450), "{ended:?}");
    assert_eq!(running.status(), 75);
}

#[test]
fn on_lost_ignore_says_it_and_goes_on() {
    let (_server, mut running, shell, _, noted) = when_broken("ignore");
    assert!(!noted && !has_ended(shell));
    running.signal(Signal::SIGKILL);
    assert_eq!(running.wait().signal(), Some(9));
    time_to_end(shell); // of a death of rlock itself it says nothing
}

#[test]
fn a_server_that_stops_answering_costs_the_command_in_time() {
    let server = Server::start();
    for on_lost in ["term", "kill"] {
        let words = [
            "run",
            "--grace",
            "2s",
            "--on-lost",
            on_lost,
            "a",
            "--",
            "sleep",
            "60",
        ];
        let mut command = rlock(&server, &words);
        command.stderr(Stdio::null());
        let mut running = Running::start(command);
        let command = running.await_command();
        server.freeze();
        let ended = time_to_end(command);
        assert!(ended < Duration::from_secs(2), "{on_lost}: {ended:?}");
        server.thaw();
        assert_eq!(running.status(), 75, "{on_lost}");
        until("the lock is free", || server.holder("a").is_none());
    }
}

#[test]
fn the_command_dies_with_rlock_and_before_its_lock_is_free() {
    let server = Server::start();
    let words = [
        "run",
        "--grace",
        "1s",
        "a",
        "--",
        "sh",
        "-c",
        "sleep 60 & sleep 61; true",
    ];
    let mut running = Running::start(rlock(&server, &words));
    let shell = running.await_command();
    let members = eventually("both sleep", || {
        let members = crate::program::children(shell);
        (members.len() == 2).then_some(members)
    });
    running.signal(Signal::SIGKILL);
    for member in [&[shell][..], &members].concat() {
        let ended = time_to_end(member);
        assert!(ended < Duration::from_millis(500), "{ended:?}");
    }
    assert!(server.holder("a").is_some(), "the grace is not over");
    running.wait();
    until("the lock is free", || server.holder("a").is_none());
}

#[test]
fn the_command_dies_with_the_guardian() {
    let server = Server::start();
    let words = ["run", "a", "--", "sh", "-c", "sleep 60 & sleep 61; true"];
    let mut command = rlock(&server, &words);
    command.stderr(Stdio::null());
    let mut running = Running::start(command);
    let shell = running.await_command();
    let members = eventually("both sleep", || {
        let members = crate::program::children(shell);
        (members.len() == 2).then_some(members)
    });
    kill(running.guardian().unwrap(), Signal::SIGKILL).unwrap();
    assert_eq!(running.status(), 137);
    assert!(members.into_iter().all(has_ended), "before rlock ends");
    assert_eq!(server.holder("a"), None);
}

#[test]
fn one_of_the_two_that_is_stopped_does_not_save_the_command() {
    let server = Server::start();
    // rlock itself: the guardian hears no more of it.
    let words = [
        "run", "--grace", "1s", "--lease", "3s", "a", "--", "sleep", "60",
    ];
    let mut command = rlock(&server, &words);
    command.stderr(Stdio::null());
    let mut running = Running::start(command);
    let command = running.await_command();
    running.signal(Signal::SIGSTOP);
    let ended = time_to_end(command);
    assert!(ended < Duration::from_secs(1), "{ended:?}");
    running.signal(Signal::SIGCONT);
    assert_eq!(running.status(), 75);
    // The guardian: rlock kills in its place.
    let mut command = rlock(
        &server,
        &["run", "--kill-after", "0.2", "a", "--", "sleep", "60"],
    );
    command.stderr(Stdio::null());
    let mut running = Running::start(command);
    let command = running.await_command();
    kill(running.guardian().unwrap(), Signal::SIGSTOP).unwrap();
    server.run("RLOCK.BREAK a");
    assert!(time_to_end(command) < Duration::from_secs(1));
    assert_eq!(running.status(), 75);
}

#[test]
fn users_have_passwords_that_the_command_line_does_not_show() {
    let server = Server::start();
    let rights =
        "~* +rlock.acquire +rlock.release +rlock.renew +rlock.events +rlock.bind +rlock.cancel";
    server.run(format!("ACL SETUSER bob on >s:e@c/ret {rights}"));
    server.run("ACL SETUSER default off");
    let words = ["--user", "bob", "run", "a", "--", "true"];
    let mut command = rlock(&server, &words);
    command.env("RLOCK_PASSWORD", "s:e@c/ret");
    assert_eq!(command.output().unwrap().status.code(), Some(0));
    let (status, line) = status_and_line(&server, &words);
    assert_eq!(status, 69);
    assert!(line.contains("refused"), "{line}");
}

/// One of several locks is lost while `rlock` waits for another.
#[test]
fn nothing_is_begun_without_the_lock() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let told = folder.path().join("ran");
    let touch = ["touch", told.to_str().unwrap()];
    let words = [&["run", "-x", "a", "b", "--"][..], &touch].concat();
    let mut other = server.connect();
    other.run("RLOCK.ACQUIRE b other 60000 WRITE");
    let mut waiting = Running::start(rlock(&server, &words));
    until("it waits", || server.waiting_owners("b").len() == 1);
    server.run("RLOCK.BREAK a");
    let _next = Running::start(rlock(&server, &["run", "-x", "a", "--", "sleep", "60"]));
    other.run("RLOCK.RELEASE b other WRITE");
    assert_eq!(waiting.status(), 75);
    assert!(!told.exists(), "it has been run");
}

/// And the locks taken until then are given back at once, not after the grace.
#[test]
fn what_was_taken_of_several_is_given_back() {
    let server = Server::start();
    server.run("RLOCK.ACQUIRE b other 60000 WRITE");
    assert_eq!(
        quiet_status(&server, &["run", "-n", "-x", "a", "b", "--", "true"]),
        1
    );
    assert_eq!(
        quiet_status(&server, &["run", "-n", "-x", "a", "--", "true"]),
        0
    );
}

/// The kernel cuts names, within a character too.
#[test]
fn what_is_left_behind_is_ended_whatever_its_name() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("éééééééé");
    fs::copy("/bin/sleep", &program).unwrap();
    let told = folder.path().join("pid");
    let script = format!(
        "{} 60 >/dev/null 2>&1 & echo $! >{}; sleep .2",
        program.display(),
        told.display()
    );
    assert_eq!(
        quiet_status(&server, &["run", "a", "--", "sh", "-c", &script]),
        0
    );
    let left: i32 = fs::read_to_string(told).unwrap().trim().parse().unwrap();
    assert!(has_ended(nix::unistd::Pid::from_raw(left)));
}

/// The holder is named by its label, which says host and process.
#[test]
fn with_verbose_it_says_who_holds_the_lock_and_how_long_the_wait_took() {
    let server = Server::start();
    let mut holder = Running::start(rlock(&server, &["run", "a", "--", "sleep", "60"]));
    holder.await_command();
    let mut command = rlock(&server, &["run", "--verbose", "a", "--", "true"]);
    let mut waiter = Running::start({
        command.stderr(Stdio::piped());
        command
    });
    let stderr = waiter.0.stderr.take().unwrap();
    let mut lines = BufReader::new(stderr).lines().map(Result::unwrap);
    let line = lines.next().expect("a line");
    let label = format!(":{} (", holder.0.id());
    let start = line.starts_with("rlock: waiting for a; a is held by rlock:");
    assert!(start && line.contains(&label), "{line}");
    assert!(line.contains(":1) for "), "{line}");
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.status(), 143);
    let line = lines.next().expect("a line");
    assert!(line.starts_with("rlock: got a after "), "{line}");
    assert_eq!((waiter.status(), lines.next()), (0, None));
}

/// Two commands must not run at once, also if the first one gave its lock back itself.
#[test]
fn a_command_that_gives_its_lock_back_early_is_ended() {
    let server = Server::start();
    let directory = tempfile::tempdir().unwrap();
    let owner = directory.path().join("owner");
    let script = format!("echo $RLOCK_OWNER > {}; exec sleep 60", owner.display());
    let start = |words: &[&str]| {
        let words = [&["run"], words, &["a", "--", "sh", "-c", &script]].concat();
        let mut command = rlock(&server, &words);
        command.stderr(Stdio::piped());
        let mut running = Running::start(command);
        running.await_command();
        let owner = eventually("it has said its owner", || {
            let owner = fs::read_to_string(&owner).ok()?;
            owner.ends_with('\n').then_some(owner)
        });
        fs::remove_file(directory.path().join("owner")).unwrap();
        let stderr = running.0.stderr.take().unwrap();
        // As the command could do it itself, and long before the grace is over.
        assert_eq!(server.run(format!("RLOCK.RELEASE a {}", owner.trim())), 0);
        let mut lines = BufReader::new(stderr).lines().map(Result::unwrap);
        let line = lines.next().expect("a line");
        assert!(line.contains("given back in its owner's name"), "{line}");
        running
    };
    let begun = Instant::now();
    assert_eq!(start(&["--grace", "20s"]).status(), 75);
    assert!(begun.elapsed() < Duration::from_secs(10), "at once");
    let mut goes_on = start(&["--on-lost", "ignore"]);
    assert!(!has_ended(goes_on.command().expect("it goes on")));
    goes_on.signal(Signal::SIGTERM);
    assert_eq!(goes_on.status(), 143);
}

#[test]
fn a_hash_of_data_is_not_waited_for() {
    let server = Server::start();
    server.run("HSET account:2 name bob balance 5");
    let (status, line) = status_and_line(&server, &["run", "account:2", "--", "true"]);
    assert_eq!(status, 69, "{line}");
    assert!(
        line.contains("WRONGTYPE the key holds a hash of data"),
        "{line}"
    );
    assert!(
        line.contains("the lock account:2 needs a name of its own"),
        "{line}"
    );
    assert_eq!(server.run("HLEN account:2"), 2);
}

/// The lock stays at the new primary, which `rlock` does not know.
#[test]
fn after_a_failover_away_from_its_address_it_says_where_the_lock_is() {
    let pair = Pair::start();
    let words = ["run", "--grace", "1s", "a", "--", "sleep", "60"];
    let mut command = rlock(&pair.primary, &words);
    command.stderr(Stdio::piped());
    let mut running = Running::start(command);
    running.await_command();
    pair.replica.run("REPLICAOF NO ONE");
    let (host, port) = (pair.replica.address().ip(), pair.replica.port());
    pair.primary.run(format!("REPLICAOF {host} {port}"));
    assert_eq!(running.status(), 75);
    let mut text = String::new();
    let mut stderr = running.0.stderr.take().unwrap();
    stderr.read_to_string(&mut text).unwrap();
    assert!(
        text.contains("keeps the lock for the rest of its lease, 30s"),
        "{text}"
    );
    assert!(text.contains("--sentinel"), "{text}");
    let (status, line) = status_and_line(&pair.primary, &["run", "a", "--", "true"]);
    assert_eq!(status, 69, "{line}");
    assert!(
        line.contains("it is a replica: --url has to lead to the primary"),
        "{line}"
    );
}
