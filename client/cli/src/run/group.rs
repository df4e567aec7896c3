//! A process group: to signal it, and to know that it is gone.

use std::fs;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// The process group of the command, whose number is that of the command's first process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group(pub(crate) Pid);

impl Group {
    /// If the group has gone, there is nothing to signal.
    pub(crate) fn signal(self, signal: Signal) {
        let _ = killpg(self.0, signal);
    }

    /// Ends all that is in it. One call is enough: a member whose fork is under way either has its
    /// child in the group before the call, which then reaches both, or sees the signal and does not
    /// fork.
    pub(crate) fn kill(self) {
        self.signal(Signal::SIGKILL);
    }

    /// Whether no process of it runs any more. One that has ended and was not waited for yet by a
    /// parent elsewhere does not count: the kernel still signals it, so /proc has to tell.
    ///
    /// /proc is no picture of one moment. A member may fork while it is read, and end: the reader
    /// has passed the child's place already, and then finds that the parent has ended. However
    /// often it reads, a chain of such processes can be missed each time. So a group that seems to
    /// be gone is killed: from then on it only shrinks, and a second reading misses none that runs.
    pub(crate) fn is_gone(self) -> bool {
        if killpg(self.0, None) == Err(Errno::ESRCH) {
            return true;
        }
        if self.has_running_members() {
            return false;
        }
        self.kill();
        !self.has_running_members()
    }

    fn has_running_members(self) -> bool {
        let Ok(processes) = fs::read_dir("/proc") else {
            return true;
        };
        let mut processes = processes.flatten();
        processes.any(|process| self.runs_in_it(&process.path()).unwrap_or(false))
    }

    fn runs_in_it(self, process: &Path) -> Option<bool> {
        let stat = fs::read(process.join("stat")).ok()?;
        // The name stands in brackets, and may have any bytes.
        let stat = String::from_utf8_lossy(&stat);
        let (_, fields) = stat.rsplit_once(") ")?;
        let fields: Vec<_> = fields.split(' ').collect();
        let (state, group, threads) = (fields.first()?, fields.get(2)?, fields.get(17)?);
        // Its first thread may have ended, and others go on.
        let has_ended = ["Z", "X"].contains(state) && ["0", "1"].contains(threads);
        Some(*group == self.0.to_string() && !has_ended)
    }
}
