//! The guardian: a process beside `rlock run` that starts the command, and ends it.
//!
//! `rlock` holds the lock and may be killed at any moment, also by SIGKILL, which it cannot handle.
//! So the command is not its child but the guardian's, which waits for two things: the end of its
//! socket to `rlock`, and a deadline that `rlock` moves on as long as the lock is confirmed. With
//! either it kills the command's process group. That takes milliseconds; the server keeps the lock
//! of a connection that closed for the grace, which is a second at least. So the group is gone
//! before the lock can be granted to another, also when `rlock` is stopped or hangs.
//!
//! Why not other ways: the parent-death signal reaches one process, not its group (it is set all
//! the same, in case the guardian is killed itself; then `rlock` kills the group). A connection
//! that the command inherits would keep the lock, but does not say when the server stops
//! answering. Control groups and process namespaces need rights.
//!
//! It is this program again, under another name, so that `killall rlock` does not reach it. It has
//! one thread and no runtime, in a process group of its own, and all signals blocked: nothing that
//! is meant for `rlock` or for the command ends it.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_child_subreaper, set_name, set_pdeathsig};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid, getppid};

use crate::run::clock::since_boot;
use crate::run::group::Group;
use crate::run::message::{Inbox, Order, Report, Start};
use crate::run::terminal::Terminal;
use crate::sys;

/// Its name in the list of processes.
pub(crate) const NAME: &str = "lock-guardian";

/// Starts it. It waits for the order to start the command, and ends with the other end of the
/// socket that is returned.
pub(crate) fn spawn() -> io::Result<(Child, UnixStream)> {
    use std::os::fd::AsRawFd as _;
    let (ours, its) = UnixStream::pair()?;
    sys::keep_on_exec(&its)?;
    let child = Command::new(this_program()?)
        .arg0(NAME)
        .arg(its.as_raw_fd().to_string())
        .process_group(0)
        .spawn()?;
    Ok((child, ours))
}

/// The very file that runs, even if another version has been installed over it since.
fn this_program() -> io::Result<std::path::PathBuf> {
    let linked = Path::new("/proc/self/exe");
    if linked.exists() {
        return Ok(linked.to_owned());
    }
    std::env::current_exe()
}

/// The whole life of the guardian, with the number of its socket.
pub(crate) fn main(socket: Option<&str>) -> ExitCode {
    let socket = socket.and_then(|number| number.parse().ok());
    let Some(socket) = socket else {
        return ExitCode::FAILURE;
    };
    let lived = sys::inherited(socket)
        .and_then(Guardian::new)
        .and_then(Guardian::guard);
    match lived {
        Ok(()) => ExitCode::SUCCESS,
        // The end of the socket tells `rlock`, which kills the group.
        Err(_) => ExitCode::FAILURE,
    }
}

struct Guardian {
    link: UnixStream,
    inbox: Inbox,
    children: SignalFd,
    deadline: TimerFd,
    /// The signals that the caller has blocked, and so the command does.
    mask: SigSet,
    command: Option<Running>,
}

/// The command once it runs.
struct Running {
    group: Group,
    kill_after: Duration,
    /// Whether its lock is lost. Then the whole group has been told to end already.
    lost: bool,
    /// How its first process ended, and when the rest of the group is killed.
    ended: Option<(Report, Instant)>,
}

/// The events that the guardian waited for.
struct Events {
    orders: bool,
    children: bool,
    overdue: bool,
}

impl Guardian {
    fn new(link: UnixStream) -> io::Result<Self> {
        // An `rlock` that was stopped reads nothing: the deadline is watched all the same.
        link.set_write_timeout(Some(TOLD))?;
        let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        sys::wait_for_children()?;
        set_name(c"lock-guardian")?;
        // Orphans of the command become children of the guardian, which waits for them: so it knows
        // when the group is gone, even where process 1 waits for no orphans.
        set_child_subreaper(true)?;
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGCHLD);
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let flags_of_timer = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        Ok(Self {
            link,
            inbox: Inbox::default(),
            children: SignalFd::with_flags(&signals, flags)?,
            // It goes on while the machine is suspended, and so ends at once when it resumes.
            deadline: TimerFd::new(ClockId::CLOCK_BOOTTIME, flags_of_timer)?,
            mask,
            command: None,
        })
    }

    /// Until the command and its group have gone, or there is no need for one.
    fn guard(mut self) -> io::Result<()> {
        // Any error kills as well. Not least the one that a socket gives when `rlock` was killed
        // with a report in it that it had not read.
        match self.watch() {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => self.kill(),
        }
    }

    /// True when the group has gone by itself, false when it has to be killed.
    fn watch(&mut self) -> io::Result<bool> {
        loop {
            let events = self.wait()?;
            if events.overdue {
                self.tell(Report::Overdue);
                return Ok(false);
            }
            if events.orders && !self.obey()? {
                return Ok(false);
            }
            if events.children {
                // The content of the signals does not matter: every child is asked.
                while self.children.read_signal()?.is_some() {}
                self.reap();
            }
            if let Some(report) = self.end_of_group() {
                self.tell(report);
                return Ok(true);
            }
        }
    }

    fn wait(&self) -> io::Result<Events> {
        let mut waits = [
            PollFd::new(self.link.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.children.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.deadline.as_fd(), PollFlags::POLLIN),
        ];
        let ending = self.command.as_ref().is_some_and(|one| one.ended.is_some());
        let timeout = if ending {
            PollTimeout::from(GROUP_MS)
        } else {
            PollTimeout::NONE
        };
        match poll(&mut waits, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [orders, children, overdue] = waits.map(|wait| wait.any().unwrap_or(true));
        Ok(Events {
            orders,
            children,
            overdue,
        })
    }

    /// Carries out the orders. False once `rlock` has gone.
    fn obey(&mut self) -> io::Result<bool> {
        if !self.inbox.receive(&self.link)? {
            return Ok(false);
        }
        while let Some(order) = self.inbox.next()? {
            match order {
                Order::Until(deadline) => self.set_deadline(deadline)?,
                Order::Signal(signal) => self.signal(signal),
                Order::Lost => self.lose(),
                Order::Start(start) => self.start(&start)?,
            }
        }
        Ok(true)
    }

    fn set_deadline(&self, deadline: Duration) -> io::Result<()> {
        // Zero would stop the timer.
        let deadline = deadline.max(Duration::from_nanos(1));
        let at = Expiration::OneShot(deadline.into());
        Ok(self
            .deadline
            .set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME)?)
    }

    fn lose(&mut self) {
        if let Some(command) = &mut self.command {
            command.lost = true;
        }
    }

    fn signal(&self, signal: i32) {
        if let (Some(command), Ok(signal)) = (&self.command, Signal::try_from(signal)) {
            command.group.signal(signal);
        }
    }

    /// Runs the command. `rlock` has been told of its group when this returns.
    fn start(&mut self, start: &Start) -> io::Result<()> {
        let Some((program, arguments)) = start.words.split_first() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let mut command = Command::new(program);
        command.args(arguments).process_group(0);
        command.envs(start.variables.iter().map(|(name, value)| (name, value)));
        let terminal = start.foreground.then(Terminal::open).flatten();
        let (guardian, link, mask) = (getpid(), self.link.try_clone()?, self.mask);
        sys::before_exec(&mut command, move || {
            in_child(guardian, &link, &mask, terminal.as_ref())
        });
        match command.spawn() {
            Ok(child) => {
                let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
                self.command = Some(Running {
                    group: Group(Pid::from_raw(pid)),
                    kill_after: start.kill_after,
                    lost: false,
                    ended: None,
                });
            }
            Err(error) => {
                let number = error.raw_os_error().unwrap_or_default();
                self.tell(Report::NotRun(number));
            }
        }
        Ok(())
    }

    /// Waits for every child that has ended or stopped, those too that the command left behind.
    fn reap(&mut self) {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        while let Ok(status) = waitpid(None, Some(flags)) {
            let report = match status {
                WaitStatus::Exited(_, status) => Report::Exited(status),
                WaitStatus::Signaled(_, signal, _) => Report::Killed(i32_of(signal)),
                WaitStatus::Stopped(_, signal) => Report::Stopped(i32_of(signal)),
                WaitStatus::StillAlive => return,
                _ => continue,
            };
            let first = self.command.as_ref().map(|command| command.group.0);
            if status.pid() != first {
                continue;
            }
            if matches!(report, Report::Stopped(_)) {
                self.tell(report);
            } else {
                self.end(report);
            }
        }
    }

    /// The command has ended. Processes that it left in its group are told to end as well, since
    /// the lock is given back as soon as the group has gone.
    fn end(&mut self, report: Report) {
        let Some(command) = &mut self.command else {
            return;
        };
        if !command.group.is_gone() && !command.lost {
            command.group.signal(Signal::SIGTERM);
            command.group.signal(Signal::SIGCONT);
        }
        let now = Instant::now();
        let kill_at = now.checked_add(command.kill_after).unwrap_or(now);
        command.ended = Some((report, kill_at));
    }

    /// How the command ended, once its whole group has gone.
    fn end_of_group(&self) -> Option<Report> {
        let command = self.command.as_ref()?;
        let (report, kill_at) = command.ended?;
        if command.group.is_gone() {
            return Some(report);
        }
        if Instant::now() >= kill_at {
            command.group.kill();
        }
        None
    }

    /// Kills the group, and ends when it has gone.
    fn kill(mut self) -> io::Result<()> {
        let Some(group) = self.command.as_ref().map(|command| command.group) else {
            return Ok(());
        };
        group.kill();
        while !group.is_gone() {
            self.wait_for_child()?;
            self.reap();
        }
        self.reap();
        let ended = self.command.as_ref().and_then(|command| command.ended);
        let killed = Report::Killed(i32_of(Signal::SIGKILL));
        self.tell(ended.map_or(killed, |(report, _)| report));
        Ok(())
    }

    fn wait_for_child(&self) -> io::Result<()> {
        let mut wait = [PollFd::new(self.children.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wait, PollTimeout::from(GROUP_MS)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        while self.children.read_signal()?.is_some() {}
        Ok(())
    }

    /// If `rlock` has gone, there is nobody to be told.
    fn tell(&self, report: Report) {
        let _ = report.send(&self.link);
    }
}

/// How long `rlock` may take to make room for a report.
const TOLD: Duration = Duration::from_millis(10);

/// Runs in the child, between fork and exec: system calls only. The child is in its own group.
fn in_child(
    guardian: Pid,
    link: &UnixStream,
    mask: &SigSet,
    terminal: Option<&Terminal>,
) -> io::Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    if getppid() != guardian {
        return Err(Errno::ESRCH.into()); // it died before that, so its death gives no signal
    }
    Report::Started(getpid().as_raw()).send(link)?;
    if let Some(terminal) = terminal {
        // Without the terminal the command runs all the same.
        let _ = terminal.give_to(getpid());
    }
    Ok(mask.thread_set_mask()?)
}

/// How often a group that is ending is looked at: not all of its members are children here.
const GROUP_MS: u16 = 10;

#[allow(clippy::as_conversions, reason = "an enum of the signals' numbers")]
fn i32_of(signal: Signal) -> i32 {
    signal as i32
}

/// The deadline that never comes, for `--on-lost ignore`.
pub(crate) fn never() -> Duration {
    since_boot().saturating_add(Duration::from_secs(1 << 32))
}
