//! All that is `unsafe` in this program.
#![allow(
    unsafe_code,
    reason = "descriptors by number, code between fork and exec, and signal dispositions"
)]

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, raise, sigaction};
use nix::unistd::{Pid, getpid};

/// The socket that the parent left open for this process under that number. Nothing that is
/// started from here inherits it.
pub(crate) fn inherited(fd: RawFd) -> io::Result<UnixStream> {
    // SAFETY: the parent made this descriptor for this process alone and says its number on the
    // command line; nothing else here owns it, and this is called once, first of all.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(UnixStream::from(fd))
}

/// Calls `hook` in the child, between fork and exec. It may only make system calls: no memory is
/// allocated and no lock is taken there.
pub(crate) fn before_exec(
    command: &mut Command,
    hook: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) {
    // SAFETY: the one hook (`guardian::in_child`) makes system calls only, and its process has one
    // thread, so no lock of another thread can be held in the child.
    unsafe { command.pre_exec(hook) };
}

/// Stops this process and its group, as Ctrl-Z does; returns when it goes on.
///
/// It is SIGTSTP with its default action, and not SIGSTOP: where nobody could bring the group back
/// (a container, a session without a shell), the kernel drops it and this returns at once.
pub(crate) fn stop_as_ctrl_z() -> nix::Result<()> {
    let action = |handler| SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: to ignore it runs no code of ours.
    let handler = unsafe { sigaction(Signal::SIGTSTP, &action(SigHandler::SigIgn)) }?;
    let others = kill(Pid::from_raw(0), Signal::SIGTSTP);
    // SAFETY: nor does the default action.
    unsafe { sigaction(Signal::SIGTSTP, &action(SigHandler::SigDfl)) }?;
    // To this thread, which does not go on before it was stopped. One that is sent to the process
    // any thread may take, and later: this one would behave as if it had been stopped already.
    let stopped = others.and(raise(Signal::SIGTSTP));
    // SAFETY: this is the handler that was there before.
    unsafe { sigaction(Signal::SIGTSTP, &handler) }.map(drop)?;
    stopped
}

/// Ends this process and its group, as Ctrl-C does. A script that runs `rlock` then ends too, as it
/// would if the command were its own child: it goes by the signal, and not by a status.
pub(crate) fn end_as_ctrl_c() {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: the default action runs no code of ours.
    let reset = unsafe { sigaction(Signal::SIGINT, &default) };
    if reset.is_ok() {
        // The status says the same if it fails.
        let _ = kill(Pid::from_raw(0), Signal::SIGINT);
    }
}

/// Ends this process by this signal, if that is how a process is asked to end. A shell goes by it:
/// a status of 130 alone would have a script go on after Ctrl-C. Returns where the signal does
/// nothing, as in process 1 of a container; the status says the same then.
pub(crate) fn end_by(signal: i32) {
    let asked = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM];
    let Some(signal) = Signal::try_from(signal)
        .ok()
        .filter(|one| asked.contains(one))
    else {
        return;
    };
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: the default action runs no code of ours.
    let reset = unsafe { sigaction(signal, &default) };
    if reset.is_ok() {
        let _ = kill(getpid(), signal);
    }
}

/// Has children of this process wait until it has heard how they ended. A caller that ignores
/// SIGCHLD would have the kernel forget them.
pub(crate) fn wait_for_children() -> nix::Result<()> {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: the default action runs no code of ours.
    unsafe { sigaction(Signal::SIGCHLD, &default) }.map(drop)
}

/// Lets a child inherit the descriptor.
pub(crate) fn keep_on_exec(fd: &UnixStream) -> Result<(), Errno> {
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).map(drop)
}
