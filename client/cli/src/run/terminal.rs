//! The terminal, which one process group at a time may read from: the foreground.

use std::fs::{File, OpenOptions};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The terminal that controls this session.
#[derive(Debug)]
pub(crate) struct Terminal(File);

impl Terminal {
    /// None under cron, systemd and the like.
    pub(crate) fn open() -> Option<Self> {
        let tty = OpenOptions::new().read(true).write(true).open("/dev/tty");
        tty.ok().map(Self)
    }

    /// Whether this process's group is in the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        self.is_of(getpgrp())
    }

    pub(crate) fn is_of(&self, group: Pid) -> bool {
        tcgetpgrp(&self.0) == Ok(group)
    }

    /// Puts a group into the foreground. A caller in the background would be stopped by SIGTTOU,
    /// unless that is blocked. Makes system calls only.
    pub(crate) fn give_to(&self, group: Pid) -> nix::Result<()> {
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGTTOU);
        let before = blocked.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let given = tcsetpgrp(&self.0, group);
        before.thread_set_mask()?;
        given
    }
}
