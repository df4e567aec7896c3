//! `rlock top` on a real terminal, which is tmux's.

use std::process::{Command, Stdio};

use rlock_tests::{Server, eventually};

use crate::program::{PROGRAM, status_and_line, url};

/// A tmux of its own with `rlock top` in it; dropping this ends it.
struct Screen {
    socket: String,
}

impl Screen {
    /// None where tmux is not installed.
    fn start(server: &Server) -> Option<Self> {
        Self::of(server, &format!("{}; sleep 60", top(server)))
    }

    /// With this line for a shell, or a shell if it is empty.
    fn of(server: &Server, line: &str) -> Option<Self> {
        let socket = format!("rlock-test-{}", server.port());
        let screen = Self { socket };
        let words = [
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            "120",
            "-y",
            "30",
            line,
        ];
        let started = screen.tmux(&words);
        if started.is_none() {
            eprintln!("skipped: no tmux here");
        }
        started.map(|_| screen)
    }

    fn tmux(&self, words: &[&str]) -> Option<String> {
        let mut command = Command::new("tmux");
        command.args(["-L", &self.socket]).args(words);
        // A test may itself run in a tmux.
        let output = command
            .env_remove("TMUX")
            .stdin(Stdio::null())
            .output()
            .ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn has_cursor(&self) -> bool {
        let flag = self.tmux(&["display-message", "-p", "#{cursor_flag}"]);
        flag.is_some_and(|flag| flag.trim() == "1")
    }

    /// Types keys, by tmux's names, and waits until the screen is as it should be.
    #[track_caller]
    fn press(&self, keys: &[&str], what: &str, is_so: impl Fn(&str) -> bool) -> String {
        if !keys.is_empty() {
            self.tmux(&[&["send-keys"], keys].concat());
        }
        let mut last = String::new();
        let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            eventually(what, || {
                last = self.tmux(&["capture-pane", "-p"]).unwrap();
                is_so(&last).then(|| last.clone())
            })
        }));
        seen.unwrap_or_else(|_| panic!("never so: {what}\n{last}"))
    }
}

/// The line that starts it.
fn top(server: &Server) -> String {
    format!("{PROGRAM} --url {} top --every 200ms", url(server))
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

/// The first words of the rows under the heads.
fn first_words(screen: &str) -> Vec<String> {
    let rows = screen
        .lines()
        .skip_while(|line| !line.starts_with("LOCK"))
        .skip(1);
    let words = rows.map_while(|row| row.split_whitespace().next().map(str::to_owned));
    words.collect()
}

#[test]
fn it_shows_hot_locks_sorts_filters_looks_into_one_and_leaves() {
    let server = Server::start();
    let mut conn = server.connect();
    conn.run("RLOCK.ACQUIRE apple alice 60000 PERMITS 2 OF 2")
        .held();
    for name in ["pear", "plum"] {
        conn.run(format!("RLOCK.ACQUIRE {name} alice 60000")).held();
    }
    let waits = [("pear", "bob"), ("pear", "carol")];
    let _waiters = waits.map(|(name, owner)| server.wait_in_queue(name, owner));
    let _dora = server.blocked_in("RLOCK.ACQUIRE apple dora 60000 PERMITS 1 OF 2 BLOCK 0");
    let _session = server.session_connection("worker:7");
    let Some(screen) = Screen::start(&server) else {
        return;
    };
    let seen = screen.press(&[], "most waiters first, then those without", |screen| {
        first_words(screen) == ["pear", "apple", "plum"]
    });
    assert!(
        seen.contains("waiters 3  locks waited for 2  sessions 1"),
        "{seen}"
    );
    assert!(seen.contains("2 permits: alice"), "{seen}");
    screen.press(&[], "rates", |screen| screen.contains("grants 0.0/s"));
    // By the longest wait, by the longest hold, by the name.
    screen.press(&["s", "s", "s"], "by name", |screen| {
        screen.contains("sort (name)") && first_words(screen) == ["apple", "pear", "plum"]
    });
    let seen = screen.press(&["Enter"], "the permits", |screen| {
        screen.contains("apple: 2 permits out, no limit is set; 1 waiting, the first for 1")
    });
    let row = |first| seen.lines().find(|line| line.starts_with(first)).unwrap();
    let words = |first| row(first).split_whitespace().take(3).collect::<Vec<_>>();
    assert_eq!(words("alice")[..2], ["alice", "2"], "{seen}");
    assert_eq!(words("1"), ["1", "dora", "1"], "{seen}");
    screen.press(&["Escape"], "all locks", |screen| {
        first_words(screen).len() == 3
    });
    screen.press(&["/", "p", "e"], "the filter", |screen| {
        first_words(screen) == ["pear"]
    });
    let seen = screen.press(&["Enter", "Enter"], "one lock", |screen| {
        screen.contains("pear is held") && screen.contains("carol")
    });
    assert!(seen.contains("alice") && seen.contains("bob"), "{seen}");
    screen.press(&["Escape"], "all locks again", |screen| {
        first_words(screen).len() == 3
    });
    screen.press(&["Tab"], "sessions", |screen| screen.contains("worker:7"));
    screen.press(&["Tab"], "locks", |screen| first_words(screen).len() == 3);
    // A change shows on the screen.
    conn.run("RLOCK.CANCEL apple dora");
    conn.run("RLOCK.CANCEL pear carol");
    screen.press(&[], "a lock without waiters is still there", |screen| {
        let row = screen.lines().find(|line| line.starts_with("apple"));
        row.is_some_and(|row| row.split_whitespace().nth(1) == Some("0"))
    });
    conn.run("RLOCK.RELEASE plum alice");
    screen.press(&[], "a lock that was given back has gone", |screen| {
        first_words(screen) == ["apple", "pear"]
    });
    server.freeze();
    screen.press(&[], "that the server is silent", |screen| {
        screen.contains("rlock top: 127.0")
    });
    server.thaw();
    screen.press(&[], "it is back", |screen| {
        screen.contains("rlock top: 1 node")
    });
    // A user who wants to leave need not wait for a silent server.
    server.freeze();
    screen.press(&["q"], "the screen is given back", |screen| {
        !screen.contains("rlock top")
    });
}

/// Otherwise the next shell would not show the keys that are typed.
#[test]
fn a_signal_ends_it_and_the_terminal_is_given_back() {
    for signal in ["TERM", "HUP"] {
        let server = Server::start();
        let Some(screen) = Screen::start(&server) else {
            return;
        };
        screen.press(&[], "its screen", |screen| screen.contains("rlock top"));
        let panes = screen.tmux(&["list-panes", "-F", "#{pane_pid}"]).unwrap();
        // The shell's child, which its shell does not become, for something follows it.
        let killed = Command::new("pkill")
            .args([&format!("-{signal}"), "-P", panes.trim()])
            .status();
        assert!(killed.unwrap().success());
        screen.press(&[], "the screen is given back", |screen| {
            !screen.contains("rlock top")
        });
        screen.press(&["h", "i"], "what is typed is seen", |screen| {
            screen.contains("hi")
        });
        assert!(screen.has_cursor());
    }
}

#[test]
fn ctrl_z_stops_it_and_the_terminal_is_given_back_until_fg() {
    let server = Server::start();
    let Some(screen) = Screen::of(&server, "sh -i") else {
        return;
    };
    let line = top(&server);
    let on = |screen: &str| screen.starts_with("rlock top: 1 node");
    screen.press(&[&line, "Enter"], "its screen", on);
    screen.press(&["C-z"], "it is stopped", |screen| {
        screen.contains("Stopped") && !on(screen)
    });
    assert!(screen.has_cursor());
    screen.press(&["fg", "Enter"], "its screen again, whole", |screen| {
        on(screen) && screen.contains("q leave")
    });
    screen.press(&["q"], "it has heard that", |screen| !on(screen));
}

/// It must not go on without, whether SIGHUP does not come (its shell has that) or is ignored.
#[test]
fn it_ends_with_its_terminal() {
    for trap in ["trap : HUP", "trap '' HUP"] {
        let server = Server::start();
        let path = server.directory().join("status");
        let written = path.display();
        let line = format!("{trap}; {}; echo $? > {written}", top(&server));
        let Some(screen) = Screen::of(&server, &line) else {
            return;
        };
        screen.press(&[], "its screen", |screen| screen.contains("rlock top"));
        drop(screen);
        let ended = eventually("it has ended", || {
            let ended = std::fs::read_to_string(&path).unwrap_or_default();
            ended.ends_with('\n').then_some(ended)
        });
        assert_eq!(ended.trim(), "69", "{trap}");
    }
}

#[test]
fn it_needs_a_terminal() {
    let server = Server::start();
    let (status, line) = status_and_line(&server, &["top"]);
    assert_eq!(status, 64);
    assert!(line.contains("needs a terminal"), "{line}");
}
