//! One of the programs, running.

use std::env;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// A program that is told lines and prints lines. It dies with the value.
pub(crate) struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

/// How long until the next line: longer than its longest wait, and a virtual machine starts slowly.
pub(crate) const DEADLINE: Duration = Duration::from_secs(40);

impl Program {
    /// Starts the one in this language on the server, or what else is at this address.
    #[track_caller]
    pub(crate) fn start(language: &str, address: SocketAddr) -> Self {
        let programs = env::var("RLOCK_PROGRAMS");
        let programs = programs.expect("RLOCK_PROGRAMS: start these tests by `make languages`");
        let mut child = Command::new(Path::new(&programs).join(language).join("take"))
            .env("REDIS_URL", format!("redis://{address}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("the program in {language} does not start: {error}"));
        let input = child.stdin.take();
        let printed = BufReader::new(child.stdout.take().expect("its output"));
        let mut complaints = child.stderr.take().expect("its errors");
        let (sender, output) = channel();
        thread::spawn(move || {
            for line in printed.lines().map_while(Result::ok) {
                // Nobody listens any more when the test is over.
                let _ = sender.send(line);
            }
        });
        let errors = thread::spawn(move || {
            let mut text = String::new();
            complaints.read_to_string(&mut text).expect("text");
            text
        });
        Self {
            child,
            input,
            output,
            errors: Some(errors),
        }
    }

    /// Gives it a line to write.
    #[track_caller]
    pub(crate) fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().expect("not at its end");
        writeln!(input, "{line}").expect("it reads");
    }

    /// Ctrl-C.
    pub(crate) fn interrupt(&self) {
        let process = Pid::from_child(&self.child);
        kill_process(process, Signal::INT).expect("it runs");
    }

    /// The next line that it prints; after its end the text of its complaint.
    #[track_caller]
    fn line(&mut self) -> Result<String, String> {
        match self.output.recv_timeout(DEADLINE) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => panic!("no line, and no end, within {DEADLINE:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                let errors = self.errors.take().expect("one end");
                Err(errors.join().expect("read"))
            }
        }
    }

    /// It prints this line next.
    #[track_caller]
    pub(crate) fn says(&mut self, expected: &str) {
        assert_eq!(self.line().as_deref(), Ok(expected));
    }

    /// It prints that it holds the lock; with this token.
    #[track_caller]
    pub(crate) fn token(&mut self) -> i64 {
        let line = self.line().unwrap_or_else(|end| panic!("it ended: {end}"));
        let token = line.strip_prefix("held, token ");
        token
            .and_then(|token| token.parse().ok())
            .unwrap_or_else(|| panic!("not a token: {line}"))
    }

    /// It has no more lines to write, and says at last that it has released the lock.
    #[track_caller]
    pub(crate) fn releases(mut self) {
        self.input = None;
        self.says("released");
        self.line().expect_err("it should end");
        assert!(self.child.wait().expect("a child").success());
    }

    /// It ends by itself without another line, with a failure and this complaint.
    #[track_caller]
    pub(crate) fn fails_with(mut self, complaint: &str) {
        let complaints = self.line().expect_err("it should have ended");
        assert!(complaints.contains(complaint), "{complaints}");
        assert!(!self.child.wait().expect("a child").success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
