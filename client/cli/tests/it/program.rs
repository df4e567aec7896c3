//! Starts `rlock`, and knows its processes.

use std::fs;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rlock_tests::{Server, eventually};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_rlock");

/// The program, at that server, with these words.
pub(crate) fn rlock(server: &Server, words: &[&str]) -> Command {
    // A caller in the background of a script has signals ignored, and so would all that it starts.
    let mut command = Command::new("env");
    command.args(["--default-signal", PROGRAM]);
    command.args(words).stdin(Stdio::null());
    command
        .env("RLOCK_URL", url(server))
        .env_remove("RLOCK_PASSWORD");
    command
}

pub(crate) fn url(server: &Server) -> String {
    format!("redis://{}", server.address())
}

/// Its output and its status.
#[track_caller]
pub(crate) fn output(server: &Server, words: &[&str]) -> Output {
    rlock(server, words).output().expect("the program runs")
}

/// Its status, and that it was quiet.
#[track_caller]
pub(crate) fn quiet_status(server: &Server, words: &[&str]) -> i32 {
    let output = output(server, words);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{words:?}");
    output.status.code().expect("a status")
}

/// Its status, and its one line on standard error.
#[track_caller]
pub(crate) fn status_and_line(server: &Server, words: &[&str]) -> (i32, String) {
    let output = output(server, words);
    let text = String::from_utf8(output.stderr).expect("text");
    assert_eq!(text.lines().count(), 1, "{words:?}: {text}");
    (output.status.code().expect("a status"), text)
}

/// A running `rlock`; dropping this kills it.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    #[track_caller]
    pub(crate) fn start(mut command: Command) -> Self {
        Self(command.spawn().expect("the program runs"))
    }

    pub(crate) fn pid(&self) -> Pid {
        pid(self.0.id())
    }

    #[track_caller]
    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("it is there");
    }

    /// Its guardian's process.
    pub(crate) fn guardian(&self) -> Option<Pid> {
        let children = children(self.pid());
        children
            .into_iter()
            .find(|pid| name(*pid) == "lock-guardian")
    }

    /// The command's first process, once it runs.
    pub(crate) fn command(&self) -> Option<Pid> {
        let mut children = children(self.guardian()?).into_iter();
        // Between fork and exec it has the guardian's name.
        children.find(|pid| name(*pid) != "lock-guardian")
    }

    #[track_caller]
    pub(crate) fn await_command(&self) -> Pid {
        eventually("the command runs", || self.command())
    }

    #[track_caller]
    pub(crate) fn wait(&mut self) -> ExitStatus {
        eventually("rlock ends", || self.0.try_wait().expect("our child"))
    }

    #[track_caller]
    pub(crate) fn status(&mut self) -> i32 {
        self.wait().code().expect("a status")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn pid(id: u32) -> Pid {
    Pid::from_raw(i32::try_from(id).expect("a process id"))
}

pub(crate) fn children(of: Pid) -> Vec<Pid> {
    let listed = fs::read_to_string(format!("/proc/{of}/task/{of}/children"));
    let listed = listed.unwrap_or_default();
    let ids = listed.split_whitespace().map(|id| id.parse().unwrap());
    ids.map(Pid::from_raw).collect()
}

pub(crate) fn name(of: Pid) -> String {
    let name = fs::read_to_string(format!("/proc/{of}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// The state of a process as `ps` shows it; none once it has gone.
pub(crate) fn state(of: Pid) -> Option<char> {
    let stat = fs::read(format!("/proc/{of}/stat")).ok()?;
    // A name may have any bytes.
    let stat = String::from_utf8_lossy(&stat);
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether it has ended, waited for or not.
pub(crate) fn has_ended(pid: Pid) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

/// How long it takes until a process has ended.
#[track_caller]
pub(crate) fn time_to_end(pid: Pid) -> Duration {
    let start = Instant::now();
    eventually("it ends", || has_ended(pid).then(|| start.elapsed()))
}
