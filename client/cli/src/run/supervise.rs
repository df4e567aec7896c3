//! While the command runs: events of the lock, reports on the command, and signals from outside.

use std::io;
use std::os::unix::net::UnixStream as Link;
use std::pin::Pin;
use std::process::Child;
use std::time::Duration;

use nix::libc;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::{Pid, getpgrp};
use rlock_client::{Error, LostReason};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::args::OnLost;
use crate::duration::shown;
use crate::exit::{self, Failure, warn};
use crate::reply;
use crate::run::Plan;
use crate::run::clock::{Deadline, Now, margin, since_boot};
use crate::run::group::Group;
use crate::run::guardian::never;
use crate::run::held::Held;
use crate::run::message::{Order, REPORT, Report, Start};
use crate::run::signals::Signals;
use crate::run::terminal::Terminal;
use crate::sys;

/// One command under its lock.
pub(crate) struct Supervisor<'a> {
    plan: &'a Plan,
    held: &'a Held,
    signals: &'a mut Signals,
    guardian: Child,
    orders: OwnedWriteHalf,
    /// None once the guardian has died.
    reports: Option<Reports>,
    terminal: Option<Terminal>,
    deadline: Deadline,
    /// The command's, once it has one.
    group: Option<Group>,
    lost: bool,
    /// While the command stands stopped after this process was stopped with it, until the server
    /// has confirmed the lock: whether the command is given the terminal then.
    resuming: Option<bool>,
    /// A renewal in flight. It goes on while other events come: if each event began it anew, it
    /// would never end where the server is far away.
    renewing: Option<Renewing<'a>>,
    /// Whether SIGINT has ended the command.
    interrupted: bool,
    /// Whether this process was sent a SIGINT itself, and has passed it on.
    passed_interrupt_on: bool,
    /// The status instead of the command's own, once it has been told to end.
    told_to_end: Option<u8>,
    /// When to move the deadline on at the latest. If each event set this time anew, it would never
    /// come while signals come more often, and the guardian would kill the command.
    look_at: Instant,
    /// When it may not go on any more.
    ends_at: Option<Instant>,
    /// When it is killed.
    kill_at: Option<Instant>,
}

/// How a command has ended.
pub(crate) struct Ended {
    /// The status to end with.
    pub(crate) status: u8,
    /// Whether the user has been told that the lock was lost.
    pub(crate) lost: bool,
    /// Whether the user typed Ctrl-C, which reached the command's group alone.
    pub(crate) by_ctrl_c: bool,
    /// Whether a SIGINT that this process was sent has ended the command, or the time for which the
    /// lock was kept after it.
    pub(crate) interrupted: bool,
}

enum Event {
    Report(io::Result<Report>),
    Signal(i32),
    Lost(LostReason),
    Renewed(Now, Result<(), Error>),
    /// Time has passed.
    Tick,
}

impl<'a> Supervisor<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        held: &'a Held,
        signals: &'a mut Signals,
        guardian: Child,
        link: Link,
    ) -> io::Result<Self> {
        let terminal = Terminal::open();
        signals.listen_to_more(terminal.is_some())?;
        // If the guardian dies, the command becomes a child of this process.
        set_child_subreaper(true)?;
        link.set_nonblocking(true)?;
        let (reports, orders) = UnixStream::from_std(link)?.into_split();
        let ends_at = plan.max.and_then(|max| Instant::now().checked_add(max));
        Ok(Self {
            plan,
            held,
            signals,
            guardian,
            orders,
            reports: Some(Reports::new(reports)),
            terminal,
            deadline: Deadline::new(Now::read(), held.valid_for(), plan.grace),
            group: None,
            lost: false,
            resuming: None,
            renewing: None,
            interrupted: false,
            passed_interrupt_on: false,
            told_to_end: None,
            look_at: Instant::now(),
            ends_at,
            kill_at: None,
        })
    }

    /// Starts the command. Ends when its whole group has gone, with the status to end with.
    pub(crate) async fn supervise(mut self) -> Result<Ended, Failure> {
        let start = Start {
            words: self.plan.words.clone(),
            variables: self.held.variables(),
            foreground: self.may_have_terminal(),
            kill_after: self.plan.kill_after,
        };
        self.tick().await;
        // One of several locks may be lost while `rlock` waits for another, or this process may
        // have stood still since. Then another owner may have the lock, so the command is not
        // started.
        if self.held.valid_for().is_zero() {
            warn("the lock was lost before the command was run");
            self.end_guardian();
            return Ok(Ended {
                status: exit::LOST,
                lost: true,
                by_ctrl_c: false,
                interrupted: false,
            });
        }
        self.order(&Order::Start(start)).await;
        let status = self.watch().await;
        let had_terminal = self.take_terminal_back();
        self.end_guardian();
        Ok(Ended {
            status: status?,
            lost: self.lost,
            by_ctrl_c: had_terminal && self.interrupted,
            interrupted: self.interrupted && self.passed_interrupt_on,
        })
    }

    /// It has ended, or has nothing left to do.
    fn end_guardian(&mut self) {
        let _ = self.guardian.kill();
        let _ = self.guardian.wait();
    }

    async fn watch(&mut self) -> Result<u8, Failure> {
        loop {
            match self.next().await {
                Event::Report(Ok(report)) => {
                    if let Some(status) = self.report(report).await? {
                        return Ok(status);
                    }
                }
                Event::Report(Err(_)) => {
                    if let Some(status) = self.without_guardian()? {
                        return Ok(status);
                    }
                }
                Event::Signal(libc::SIGCHLD) => reap(&self.guardian),
                Event::Signal(signal) => {
                    self.passed_interrupt_on |= signal == libc::SIGINT;
                    self.order(&Order::Signal(signal)).await;
                }
                Event::Lost(LostReason::NotHeld) => self.lose(NOT_HELD).await,
                Event::Lost(reason) => self.lose(&reason.to_string()).await,
                Event::Renewed(sent, renewed) => self.renewed(sent, renewed).await,
                Event::Tick => self.tick().await,
            }
            if self.look_at <= Instant::now() {
                self.tick().await;
            }
            if self.kill_now() {
                return Ok(self.status(exit::of_signal(libc::SIGKILL)));
            }
        }
    }

    async fn next(&mut self) -> Event {
        let wake_at = self.wake_at();
        let lost = self.lost;
        if self.resuming.is_some() || self.deadline.needs_renewal() {
            let held = self.held;
            self.renewing.get_or_insert_with(|| Box::pin(renew(held)));
        }
        tokio::select! {
            biased;
            report = next_of(&mut self.reports) => Event::Report(report),
            signal = self.signals.next() => Event::Signal(signal),
            reason = self.held.lost(), if !lost => Event::Lost(reason),
            (sent, renewed) = outcome_of(&mut self.renewing), if !lost => {
                self.renewing = None;
                Event::Renewed(sent, renewed)
            }
            () = sleep_until(wake_at) => Event::Tick,
        }
    }

    /// When to look next, if nothing happens.
    fn wake_at(&self) -> Instant {
        let now = Instant::now();
        let at = |pause| now.checked_add(pause).unwrap_or(now);
        let terminates = (!self.lost).then(|| at(self.time_to_go_on().max(SOON)));
        let killing = self.kill_at.map(|kill_at| kill_at.max(at(KILLED)));
        [terminates, self.ends_at, killing]
            .into_iter()
            .flatten()
            .fold(self.look_at, Instant::min)
    }

    /// How long the command may go on if nothing more is heard of the lock: as long as there is
    /// time left to end it in good order.
    fn time_to_go_on(&self) -> Duration {
        let left = self
            .held
            .valid_for()
            .saturating_sub(margin(self.plan.grace));
        match self.plan.on_lost {
            OnLost::Term => left.saturating_sub(self.plan.kill_after),
            OnLost::Kill | OnLost::Ignore => left,
        }
    }

    /// Moves the deadline on, and looks whether one has come.
    async fn tick(&mut self) {
        let now = Instant::now();
        let pause = self.plan.grace.checked_div(10).unwrap_or_default();
        self.look_at = now.checked_add(pause.max(SOON)).unwrap_or(now);
        // A guardian that somebody has stopped would never tell that the command has ended. One
        // that runs does not notice this.
        self.signal_guardian(Signal::SIGCONT);
        if self.ends_at.is_some_and(|end| end <= now) {
            self.ends_at = None;
            self.too_long().await;
        }
        if self.lost {
            return;
        }
        let until = self.advance();
        self.order(&Order::Until(until)).await;
        if self.time_to_go_on().is_zero() {
            self.lose("the server does not confirm it any more").await;
        }
    }

    /// A command that stands stopped goes on only now: while it stood, the lock may have been
    /// granted to another owner, and this process may not have been told.
    async fn renewed(&mut self, sent: Now, renewed: Result<(), Error>) {
        match renewed {
            Ok(()) => self.deadline.renewed(sent),
            Err(error) if error.is_lost() => return self.lose(&error.to_string()).await,
            Err(_) => return self.tick().await,
        }
        self.tick().await;
        if !self.lost {
            self.resume().await;
        }
    }

    /// Its number is its own until this process has waited for it.
    fn signal_guardian(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.guardian.id()) {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    fn advance(&mut self) -> Duration {
        if self.plan.on_lost == OnLost::Ignore {
            return never();
        }
        self.deadline.advance(Now::read(), self.held.valid_for())
    }

    /// The lock is lost, or will be before long.
    async fn lose(&mut self, why: &str) {
        self.lost = true;
        if self.plan.on_lost == OnLost::Ignore {
            warn(format!(
                "lost the lock ({why}); the command goes on (--on-lost ignore)"
            ));
            self.resume().await;
            return;
        }
        warn(format!("lost the lock ({why}); ending the command"));
        self.told_to_end.get_or_insert(exit::LOST);
        let left = self.deadline.until().saturating_sub(since_boot());
        let held = !self.held.valid_for().is_zero();
        let kill_after = match self.plan.on_lost {
            OnLost::Term if held => self.plan.kill_after.min(left),
            OnLost::Term if self.resuming.is_none() => self.plan.kill_after,
            _ => Duration::ZERO,
        };
        if !held {
            self.order(&Order::Lost).await;
        }
        self.end_within(kill_after, held).await;
        let until = since_boot().saturating_add(kill_after);
        self.order(&Order::Until(until)).await;
    }

    async fn too_long(&mut self) {
        let max = shown(self.plan.max.unwrap_or_default());
        warn(format!("the command ran for {max} (--max); ending it"));
        self.told_to_end.get_or_insert(exit::TOO_LONG);
        let may_go_on = !self.lost && self.resuming.is_none();
        self.end_within(self.plan.kill_after, may_go_on).await;
    }

    /// Asks the command to end, and kills it after this time. Stopped processes are continued, to
    /// end in good order, only if `may_go_on`: without the lock they would run beside the next
    /// owner.
    async fn end_within(&mut self, kill_after: Duration, may_go_on: bool) {
        let now = Instant::now();
        let kill_at = now.checked_add(kill_after).unwrap_or(now);
        self.kill_at = Some(self.kill_at.map_or(kill_at, |before| before.min(kill_at)));
        if !kill_after.is_zero() {
            self.order(&Order::Signal(libc::SIGTERM)).await;
        }
        if may_go_on && !kill_after.is_zero() {
            self.order(&Order::Signal(libc::SIGCONT)).await;
        }
    }

    /// Kills the group when it is time. True once it has gone without the guardian's word, for a
    /// guardian that was stopped, or has died, can neither kill nor tell. True as well if it cannot
    /// be killed and the lock is lost: then there is nothing left to keep.
    fn kill_now(&self) -> bool {
        let (Some(kill_at), Some(group)) = (self.kill_at, self.group) else {
            return false;
        };
        if kill_at > Instant::now() {
            return false;
        }
        group.kill();
        if (self.reports.is_none() || kill_at.elapsed() > KILLED) && group.is_gone() {
            return true;
        }
        let given_up = self.lost && kill_at.elapsed() > UNKILLABLE;
        if given_up {
            warn("a process of the command cannot be killed: it may go on without the lock");
        }
        given_up
    }

    /// Handles a report of the guardian. Returns the status, if the command has ended.
    async fn report(&mut self, report: Report) -> Result<Option<u8>, Failure> {
        match report {
            Report::Started(pid) => self.group = Some(Group(Pid::from_raw(pid))),
            Report::Stopped(signal) => self.stopped(signal).await,
            Report::Overdue => self.overdue(),
            Report::NotRun(errno) => return Err(self.not_run(errno)),
            Report::Exited(status) => {
                let status = u8::try_from(status).unwrap_or(u8::MAX);
                return Ok(Some(self.status(status)));
            }
            Report::Killed(signal) => {
                self.interrupted = signal == libc::SIGINT;
                return Ok(Some(self.status(exit::of_signal(signal))));
            }
        }
        Ok(None)
    }

    /// The status to end with, if this is the command's own.
    fn status(&self, own: u8) -> u8 {
        self.told_to_end.unwrap_or(own)
    }

    /// The guardian has killed the command, because this process sent no new deadline in time.
    fn overdue(&mut self) {
        if !self.lost {
            warn("the lock was not confirmed in time; the command was killed");
        }
        self.lost = true;
        self.told_to_end.get_or_insert(exit::LOST);
    }

    fn not_run(&self, errno: i32) -> Failure {
        let program = self.plan.words.first().cloned().unwrap_or_default();
        let status = match errno {
            libc::ENOENT => exit::NOT_FOUND,
            _ => exit::CANNOT_RUN,
        };
        let error = io::Error::from_raw_os_error(errno);
        Failure::new(
            status,
            format!(
                "cannot run {}: {error}",
                reply::shown(&reply::given(&program))
            ),
        )
    }

    /// The guardian has died, and with it the command's first process; the rest is killed from
    /// here. As long as it takes the lock is kept, if it is held. The status, if there is no
    /// command.
    fn without_guardian(&mut self) -> Result<Option<u8>, Failure> {
        self.reports = None;
        let Some(group) = self.group else {
            if self.held.valid_for().is_zero() {
                warn("the lock was lost before the command was run");
                return Ok(Some(exit::LOST));
            }
            let text = "the guardian process was killed before it ran the command";
            return Err(Failure::new(exit::CANNOT_RUN, text));
        };
        warn("the guardian process was killed, so the command is killed as well");
        group.kill();
        self.kill_at = Some(Instant::now());
        Ok(None)
    }

    /// The command was stopped, by Ctrl-Z or because it wants the terminal. This process stops with
    /// it, so that the shell has the terminal again, and goes on with it.
    async fn stopped(&mut self, signal: i32) {
        let wants_terminal = [libc::SIGTTIN, libc::SIGTTOU].contains(&signal);
        let Some(terminal) = &self.terminal else {
            return; // without a terminal nobody could tell this process to go on
        };
        if wants_terminal && terminal.is_ours() {
            self.give_terminal();
        } else {
            let had_terminal = self.take_terminal_back();
            // If that fails nothing was stopped.
            let _ = sys::stop_as_ctrl_z();
            self.resuming = Some(had_terminal || wants_terminal);
            // A renewal that was sent before says nothing of the time while this process stood
            // still.
            self.renewing = None;
            if self.advance() <= since_boot() {
                self.lose("it was stopped for too long").await;
            } else if self.plan.on_lost == OnLost::Ignore {
                self.resume().await;
            } else {
                // It goes on once the server has confirmed the lock.
                self.tick().await;
            }
            return;
        }
        self.order(&Order::Signal(libc::SIGCONT)).await;
    }

    /// Has the command go on, if it stands stopped.
    async fn resume(&mut self) {
        if let Some(with_terminal) = self.resuming.take() {
            if with_terminal {
                self.give_terminal();
            }
            self.order(&Order::Signal(libc::SIGCONT)).await;
        }
    }

    /// Whether the command is given the terminal when it starts: if this process has it and both
    /// ends lead there. Else it is one part of several (`rlock run … | less`), and is given the
    /// terminal when it asks for it.
    fn may_have_terminal(&self) -> bool {
        use std::io::IsTerminal as _;
        let both = io::stdin().is_terminal() && io::stdout().is_terminal();
        both && self.terminal.as_ref().is_some_and(Terminal::is_ours)
    }

    fn give_terminal(&self) {
        if let (Some(terminal), Some(group)) = (&self.terminal, self.group)
            && terminal.is_ours()
        {
            // Without it the command stops again.
            let _ = terminal.give_to(group.0);
        }
    }

    /// Whether the command had it.
    fn take_terminal_back(&self) -> bool {
        let (Some(terminal), Some(group)) = (&self.terminal, self.group) else {
            return false;
        };
        terminal.is_of(group.0) && terminal.give_to(getpgrp()).is_ok()
    }

    /// If the guardian has died, the end of its reports says so.
    /// A guardian that was stopped takes no more orders once the socket is full. Then it can end
    /// nothing either, and this process does.
    async fn order(&mut self, order: &Order) {
        let bytes = order.encode();
        let written = timeout(ORDERED, self.orders.write_all(&bytes)).await;
        if written.is_err() {
            self.lost = true;
            self.told_to_end.get_or_insert(exit::LOST);
            self.kill_at = Some(Instant::now());
        }
    }
}

/// The server does not say more. The command may do so itself: it knows owner and token.
const NOT_HELD: &str = "it is no longer held: given back in its owner's name, or forgotten by the \
                        server";

/// The clock's timers are not finer.
const SOON: Duration = Duration::from_millis(1);

/// How long a guardian may take to make room for an order.
const ORDERED: Duration = Duration::from_millis(100);

/// How long after the kill `rlock` waits for the guardian's report.
const KILLED: Duration = Duration::from_millis(100);

/// How long `rlock` waits for a killed process to end once the lock is lost.
const UNKILLABLE: Duration = Duration::from_secs(10);

/// Between a renewal that failed and the next.
const AGAIN: Duration = Duration::from_millis(20);

async fn renew(held: &Held) -> (Now, Result<(), Error>) {
    let sent = Now::read();
    let renewed = held.renew().await;
    if renewed.is_err() {
        sleep(AGAIN).await;
    }
    (sent, renewed)
}

/// When it was sent, and how it went.
type Renewing<'a> = Pin<Box<dyn Future<Output = (Now, Result<(), Error>)> + 'a>>;

/// Nothing comes of a renewal that is not under way.
async fn outcome_of(renewing: &mut Option<Renewing<'_>>) -> (Now, Result<(), Error>) {
    match renewing {
        Some(renewing) => renewing.await,
        None => std::future::pending().await,
    }
}

/// Waits for every child that has ended, and as process 1 of a container for those of others; but
/// not for the guardian: its number must not become another's while it can be killed.
fn reap(guardian: &Child) {
    let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    while let Ok(status) = waitid(Id::All, peek) {
        let Some(pid) = status.pid() else {
            return;
        };
        if u32::try_from(pid.as_raw()) == Ok(guardian.id()) || waitpid(pid, None).is_err() {
            return;
        }
    }
}

/// Nothing comes without a guardian.
async fn next_of(reports: &mut Option<Reports>) -> io::Result<Report> {
    match reports {
        Some(reports) => reports.next().await,
        None => std::future::pending().await,
    }
}

/// Reports as they arrive, in whatever pieces.
struct Reports {
    link: OwnedReadHalf,
    bytes: Vec<u8>,
}

impl Reports {
    fn new(link: OwnedReadHalf) -> Self {
        let bytes = Vec::new();
        Self { link, bytes }
    }

    /// An error is the end of the guardian.
    ///
    /// Dropping the future loses nothing.
    async fn next(&mut self) -> io::Result<Report> {
        loop {
            if let Some((report, rest)) = self.bytes.split_first_chunk::<REPORT>() {
                let report = Report::decode(*report);
                self.bytes = rest.to_vec();
                return report;
            }
            if self.link.read_buf(&mut self.bytes).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
