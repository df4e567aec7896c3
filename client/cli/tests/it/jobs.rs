//! Terminals, job control, and a container's process 1.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use nix::pty::openpty;
use nix::sys::signal::Signal;
use rlock_tests::{Proxy, Server, until};

use crate::program::{PROGRAM, Running, children, has_ended, name, state, url};

/// A shell on a terminal of its own, and the text on that terminal.
struct Shell {
    bash: Running,
    keys: File,
    screen: Arc<Mutex<String>>,
}

impl Shell {
    #[track_caller]
    fn start(server: &Server) -> Self {
        let pty = openpty(None, None).expect("a terminal");
        let end = || Stdio::from(pty.slave.try_clone().unwrap());
        // See `program::rlock`.
        let mut bash = Command::new("env");
        bash.args([
            "--default-signal",
            "setsid",
            "--ctty",
            "bash",
            "--norc",
            "--noediting",
            "-i",
        ]);
        bash.env("PS1", "$ ")
            .env("rlock", PROGRAM)
            .env("RLOCK_URL", url(server));
        bash.env("HISTFILE", "").env("TERM", "dumb");
        bash.stdin(end()).stdout(end()).stderr(end());
        let bash = Running::start(bash);
        let keys = File::from(pty.master);
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut output, shown) = (keys.try_clone().unwrap(), Arc::clone(&screen));
        drop(pty.slave);
        thread::spawn(move || {
            let mut part = [0; 1024];
            while let Ok(length @ 1..) = output.read(&mut part) {
                let text = String::from_utf8_lossy(&part[..length]);
                shown.lock().unwrap().push_str(&text);
            }
        });
        let mut shell = Self { bash, keys, screen };
        shell.type_and_see("echo re''ady\n", "ready");
        shell
    }

    fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Types, and waits until this text is seen that was not there before.
    #[track_caller]
    fn type_and_see(&mut self, keys: &str, expected: &str) {
        let before = self.screen.lock().unwrap().len();
        self.type_keys(keys);
        until(&format!("{keys:?} shows {expected:?}"), || {
            let screen = self.screen.lock().unwrap();
            let seen = screen[before..].contains(expected);
            if !seen && std::env::var_os("SCREEN").is_some() {
                eprintln!("{screen}");
            }
            seen
        });
    }

    /// The rlock that runs as its child.
    fn rlock(&self) -> nix::unistd::Pid {
        let mut children = children(self.bash.pid()).into_iter();
        children
            .find(|pid| name(*pid) == "rlock")
            .expect("rlock runs")
    }
}

#[test]
fn the_command_has_the_terminal_and_ctrl_c_ends_it() {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    shell.type_and_see("$rlock run a -- cat\n", "cat");
    until("it runs", || server.holder("a").is_some());
    shell.type_and_see("hello\n", "hello\r\nhello"); // the echo, and what cat read
    shell.type_keys("\u{3}");
    until("Ctrl-C has ended it", || server.holder("a").is_none());
    shell.type_and_see("\n", "$ ");
    shell.type_and_see("echo st''atus $?\n", "status 130");
    shell.type_and_see("$rlock run -n a -- echo fr''ee\n", "free");
}

/// After a second, and nothing if the lock is had before.
#[test]
fn on_a_terminal_it_says_who_holds_the_lock() {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    shell.type_and_see("$rlock run free -- echo do''ne\n", "done");
    server.run("RLOCK.ACQUIRE a alice 60000").held();
    shell.type_keys("$rlock run a -- echo go''t\n");
    until("it says so", || {
        let screen = shell.screen.lock().unwrap();
        assert!(!screen.contains("waiting for free"), "{screen}");
        screen.contains("waiting for a; a is held by alice for ")
    });
    server.run("RLOCK.RELEASE a alice");
    until("it gets the lock", || {
        shell.screen.lock().unwrap().contains("got\r\n")
    });
}

#[test]
fn break_asks_and_says_that_the_hash_may_be_data() {
    let server = Server::start();
    server.run("RLOCK.ACQUIRE a alice 60000").held();
    server.run("HSET stock 42 7 name bolts");
    let mut shell = Shell::start(&server);
    for (name, note) in [
        ("a", ""),
        (
            "stock",
            "stock: another program wrote it: it has no TTL, and may be data and no lock\r\n",
        ),
    ] {
        let before = shell.screen.lock().unwrap().len();
        for answer in ["n", "", "yes!"] {
            let words = format!("$rlock break {name}\n");
            shell.type_and_see(&words, "Break it? [y/N] ");
            let seen = shell.screen.lock().unwrap()[before..].to_owned();
            assert!(seen.contains(note), "{seen}");
            assert!(seen.contains(&format!("{name} is held by ")), "{seen}");
            shell.type_and_see(&format!("{answer}\n"), "$ ");
            shell.type_and_see("echo st''atus $?\n", "status 1");
            assert_eq!(server.run(format!("EXISTS {name}")), 1);
        }
    }
    shell.type_and_see("$rlock break a\n", "Break it? [y/N] ");
    shell.type_and_see("y\n", "hold ended");
    assert_eq!(server.holder("a"), None);
}

/// There is nothing to ask, and nobody answers `y` to the loss of data.
#[test]
fn break_of_a_hash_of_data_does_not_ask_and_says_why() {
    let server = Server::start();
    server.run("HSET account:2 name bob balance 5");
    let mut shell = Shell::start(&server);
    let note = "account:2: another program's hash of data: it is no lock, and cannot be one";
    shell.type_and_see("$rlock break account:2\n", note);
    shell.type_and_see("echo st''atus $?\n", "status 69");
    assert!(!shell.screen.lock().unwrap().contains("Break it?"));
    assert_eq!(server.run("HLEN account:2"), 2);
}

#[test]
fn ctrl_c_ends_the_script_around_it_too() {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    shell.type_and_see("bash -c '$rlock run a -- cat; echo went\\on'\n", "cat");
    until("it runs", || server.holder("a").is_some());
    shell.type_and_see("\u{3}", "$ ");
    until("the lock is free", || server.holder("a").is_none());
    shell.type_and_see("echo do''ne\n", "done");
    let screen = shell.screen.lock().unwrap();
    assert!(!screen.contains("wenton"), "{screen}");
}

#[test]
fn ctrl_c_during_the_wait_ends_the_script_around_it_too() {
    let server = Server::start();
    server.run("RLOCK.ACQUIRE a somebody 60000").held();
    let mut shell = Shell::start(&server);
    shell.type_keys("bash -c '$rlock run a -- true; echo went\\on'\n");
    until("it waits", || server.waiting_owners("a").len() == 1);
    shell.type_and_see("\u{3}", "$ ");
    shell.type_and_see("echo st''atus $?\n", "status 130");
    let screen = shell.screen.lock().unwrap();
    assert!(!screen.contains("wenton"), "{screen}");
}

/// Stops a command that writes without a pause and ends by nothing but SIGKILL, takes its lock
/// away, and has it go on in this way.
fn is_not_continued(word: &str) {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().display();
    let command = format!("trap \"\" TERM; while :; do echo x >>{path}; done");
    shell.type_keys(&format!(
        "$rlock run --grace 30s --kill-after 5s a -- bash -c '{command}'\n"
    ));
    let written = || file.as_file().metadata().unwrap().len();
    until("it writes", || written() > 0);
    shell.type_and_see("\u{1a}", "Stopped");
    let before = written();
    server.run("RLOCK.BREAK a");
    server.run("RLOCK.ACQUIRE a other 60000").held();
    shell.type_and_see(&format!("{word}\n"), "lost the lock");
    until("rlock has ended", || {
        let mut children = children(shell.bash.pid()).into_iter();
        children.all(|pid| has_ended(pid) || name(pid) != "rlock")
    });
    assert_eq!(
        written(),
        before,
        "it has not run a step beside the next owner"
    );
}

#[test]
fn who_has_lost_the_lock_while_it_was_stopped_is_not_continued() {
    is_not_continued("fg");
    is_not_continued("bg");
}

#[test]
fn ctrl_z_stops_both_and_fg_goes_on() {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    shell.type_and_see("$rlock run a -- cat\n", "cat");
    until("it runs", || server.holder("a").is_some());
    shell.type_and_see("one\n", "one\r\none");
    shell.type_and_see("\u{1a}", "Stopped");
    let rlock = shell.rlock();
    assert_eq!(state(rlock), Some('T'));
    shell.type_and_see("fg\n", "run a -- cat");
    shell.type_and_see("two\n", "two\r\ntwo");
    shell.type_and_see("\u{4}echo st''atus $?\n", "status 0");
}

/// The server confirms each lock after more than a tenth of the grace, and other things happen
/// meanwhile.
#[test]
fn ctrl_z_and_fg_with_a_server_that_is_far_away() {
    let server = Server::start();
    let proxy = Proxy::to(server.address());
    proxy.delay(Duration::from_millis(150));
    let mut shell = Shell::start(&server);
    shell.type_keys(&format!("export RLOCK_URL=redis://{}\n", proxy.address()));
    shell.type_and_see("$rlock run --grace 2s -s a b c -- cat\n", "cat");
    until("it runs", || server.run("EXISTS c") == 1);
    shell.type_and_see("one\n", "one\r\none");
    shell.type_and_see("\u{1a}", "Stopped");
    shell.type_and_see("fg\n", "run --grace");
    shell.type_and_see("two\n", "two\r\ntwo");
    shell.type_and_see("\u{4}echo st''atus $?\n", "status 0");
}

#[test]
fn who_is_stopped_for_longer_than_the_lock_is_sure_does_not_go_on() {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    shell.type_and_see("$rlock run --grace 1s --lease 2s a -- cat\n", "cat");
    // A Ctrl-Z before it runs would stop rlock alone, and the guardian would have nothing to kill.
    until("it runs", || {
        let rlocks = children(shell.bash.pid());
        let guardians = rlocks.into_iter().flat_map(children);
        guardians.flat_map(children).any(|pid| name(pid) == "cat")
    });
    shell.type_and_see("\u{1a}", "Stopped");
    let rlock = shell.rlock();
    let guardian = children(rlock)[0];
    until("the guardian has killed it", || has_ended(guardian));
    until("the lock is free", || server.holder("a").is_none());
    shell.type_and_see("fg\n", "stopped for too long");
    shell.type_and_see("echo st''atus $?\n", "status 75");
}

#[test]
fn in_the_background_it_stops_when_it_reads_and_fg_gives_it_the_terminal() {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    // A job in the shell's background may not give the terminal away.
    shell.type_keys("$rlock run --grace 60s --lease 60s a -- cat &\n");
    until("it runs", || server.holder("a").is_some());
    until("rlock stops with its command", || {
        let children = children(shell.bash.pid());
        children.iter().any(|pid| state(*pid) == Some('T'))
    });
    shell.type_and_see("fg\n", "a -- cat");
    shell.type_and_see("hello\n", "hello\r\nhello");
    shell.type_and_see("\u{4}echo st''atus $?\n", "status 0");
}

#[test]
fn a_part_of_a_pipeline_leaves_the_terminal_to_the_others_until_it_reads() {
    let server = Server::start();
    let mut shell = Shell::start(&server);
    shell.type_keys("$rlock run a -- head -1 | sed s/x/y/g\n");
    until("it runs", || server.holder("a").is_some());
    thread::sleep(Duration::from_millis(100));
    shell.type_and_see("axa\n", "aya");
    shell.type_and_see("$rlock run a -- sleep 60 | cat\n", "cat");
    until("it runs", || server.holder("a").is_some());
    shell.type_and_see("\u{3}echo st''atus $? fr''ee\n", "free");
    until("Ctrl-C has ended it", || server.holder("a").is_none());
}

/// Under this prefix rlock is process 1 of a namespace, as in a container.
const NAMESPACE: [&str; 6] = [
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
];

/// Whether this machine lets its users make namespaces.
fn has_namespaces() -> bool {
    let mut try_it = Command::new("unshare");
    let tried = try_it
        .args(NAMESPACE)
        .arg("true")
        .stderr(Stdio::null())
        .status();
    let has = tried.is_ok_and(|status| status.success());
    if !has {
        eprintln!("skipped: no namespaces for this user");
    }
    has
}

#[test]
fn as_process_1_it_passes_statuses_and_signals_on_and_waits_for_orphans() {
    if !has_namespaces() {
        return;
    }
    let server = Server::start();
    // An orphan outside of the group becomes a child of the guardian, and is waited for.
    let script = "(setsid true &); sleep 0.3; \
                  ps -eo stat= | grep -c Z; test $(cut -d' ' -f4 /proc/$PPID/stat) = 1; exit 5";
    let mut command = Command::new("unshare");
    command
        .args(NAMESPACE)
        .args([PROGRAM, "run", "a", "--", "sh", "-c", script]);
    let output = command.env("RLOCK_URL", url(&server)).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n");
    assert_eq!(output.status.code(), Some(5));

    let mut command = Command::new("unshare");
    command
        .args(NAMESPACE)
        .args([PROGRAM, "run", "a", "--", "sleep", "60"]);
    command.env("RLOCK_URL", url(&server));
    let mut unshare = Running::start(command);
    until("it runs", || server.holder("a").is_some());
    let rlock = children(unshare.pid())[0];
    until("the command runs", || {
        let guardian = children(rlock);
        guardian
            .first()
            .is_some_and(|pid| !children(*pid).is_empty())
    });
    thread::sleep(Duration::from_millis(50));
    nix::sys::signal::kill(rlock, Signal::SIGTERM).unwrap();
    assert_eq!(unshare.status(), 143);
    assert_eq!(server.holder("a"), None);
}
