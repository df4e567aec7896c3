//! Builds the commands: one function each. Nothing else speaks RESP.

use std::borrow::Cow;
use std::mem::Discriminant;
use std::sync::Arc;
use std::time::Duration;

use redis::{Arg, Cmd};
use tokio::time::Instant;

use crate::Owner;
use crate::time::{MILLIS_MAX, up_to_whole_millis};

/// The copies of a grant that are needed before it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Durability {
    pub(crate) replicas: u32,
    /// On their disks, and on that of the server.
    pub(crate) on_disk: bool,
    pub(crate) within: Duration,
}

/// How a lock is held, as commands say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    Read,
    Write,
    /// The limit counts where none is set for all.
    Permits {
        permits: u32,
        limit: Option<u32>,
    },
}

/// The mode alone, by which events and the table name a hold.
pub(crate) type Kind = Discriminant<Mode>;

impl Mode {
    pub(crate) fn kind(self) -> Kind {
        std::mem::discriminant(&self)
    }

    /// The mode of this name, without a number of permits. That of no other is the plain one.
    pub(super) fn named(word: &[u8]) -> Self {
        let (permits, limit) = (0, None);
        let others = [Self::Read, Self::Write, Self::Permits { permits, limit }];
        let word = word.to_ascii_uppercase();
        let mut named = others.into_iter().filter(|mode| mode.word() == Some(&word));
        named.next().unwrap_or(Self::Plain)
    }

    fn word(self) -> Option<&'static [u8]> {
        match self {
            Self::Plain => None,
            Self::Read => Some(b"READ"),
            Self::Write => Some(b"WRITE"),
            Self::Permits { .. } => Some(b"PERMITS"),
        }
    }
}

/// One owner at one lock.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) name: Arc<[u8]>,
    pub(crate) owner: Owner,
    pub(crate) mode: Mode,
}

impl Target {
    /// The name, for people.
    pub(crate) fn shown(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.name)
    }

    /// `<verb> key owner [lease-ms] [READ | WRITE | PERMITS]`.
    fn cmd(&self, verb: &str, lease: Option<Duration>) -> Cmd {
        let (name, owner) = (&*self.name, self.owner.as_str());
        let bytes = name.len().saturating_add(owner.len());
        let mut cmd = Cmd::with_capacity(ARGUMENTS, bytes.saturating_add(OTHERS_BYTES));
        let (lease, mode) = (lease.map(millis), self.mode.word());
        cmd.arg((verb, name, owner, lease, mode));
        cmd
    }

    /// The same; permits are counted where they are taken and given back.
    fn counted(&self, verb: &str, lease: Option<Duration>) -> Cmd {
        let mut cmd = self.cmd(verb, lease);
        if let Mode::Permits { permits, .. } = self.mode {
            cmd.arg(permits);
        }
        cmd
    }
}

/// How long a caller waits for a lock that is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitMode {
    None,
    Until(Instant),
    Forever,
}

impl WaitMode {
    /// For at most this long; not at all for a time of zero.
    pub(crate) fn of(timeout: Duration) -> Self {
        match Instant::now().checked_add(timeout) {
            _ if timeout.is_zero() => Self::None,
            Some(deadline) => Self::Until(deadline),
            None => Self::Forever,
        }
    }

    pub(crate) fn waits(self) -> bool {
        !matches!(self, Self::None)
    }

    /// `QUEUE wait-ms`, from now on.
    fn queue(self, now: Instant) -> Option<(&'static str, u64)> {
        let wait = match self {
            Self::None => return None,
            Self::Forever => 0,
            Self::Until(deadline) => {
                let left = up_to_whole_millis(deadline.saturating_duration_since(now));
                // Never 0, which is the word for "without limit".
                millis(left.min(MILLIS_MAX)).max(1)
            }
        };
        Some(("QUEUE", wait))
    }
}

/// `RLOCK.ACQUIRE … [QUEUE wait-ms] SESSION session ONCE [WANTED]`, or `RLOCK.MACQUIRE` for several
/// plain locks. Sent twice it takes the lock once.
pub(crate) fn acquire<'a>(
    target: &Target,
    names: impl ExactSizeIterator<Item = &'a Arc<[u8]>>,
    lease: Duration,
    wait_mode: WaitMode,
    session: &str,
) -> Cmd {
    let mut cmd = if names.len() > 1 {
        let mut cmd = redis::cmd("RLOCK.MACQUIRE");
        cmd.arg((target.owner.as_str(), millis(lease), names.len()));
        names.for_each(|name| _ = cmd.arg(&**name));
        cmd
    } else {
        target.counted("RLOCK.ACQUIRE", Some(lease))
    };
    if let Mode::Permits { limit, .. } = target.mode {
        cmd.arg(limit.map(|limit| ("OF", limit)));
    }
    cmd.arg((wait_mode.queue(Instant::now()), "SESSION", session, "ONCE"));
    cmd
}

/// `RLOCK.RELEASE … [TOKEN token]`. Only the undo of a call omits the token, since it knows none.
pub(crate) fn release(target: &Target, token: Option<u64>) -> Cmd {
    let token = token.map(|token| ("TOKEN", token));
    target.counted("RLOCK.RELEASE", None).arg(token).take()
}

/// `RLOCK.RENEW … TOKEN token SESSION session [WANTED]`.
pub(crate) fn renew(
    target: &Target,
    lease: Duration,
    token: u64,
    session: &str,
    wanted: bool,
) -> Cmd {
    let mut cmd = target.cmd("RLOCK.RENEW", Some(lease));
    cmd.arg(("TOKEN", token, "SESSION", session));
    cmd.arg(wanted.then_some("WANTED"));
    cmd
}

/// `RLOCK.CANCEL key owner [mode]`: takes the owner's wait out of the queues in which it stands.
pub(crate) fn cancel(target: &Target) -> Cmd {
    target.cmd("RLOCK.CANCEL", None)
}

/// `RLOCK.GUARD … TOKEN token CALL command …`.
pub(crate) fn guard(target: &Target, token: u64, command: &Cmd) -> Cmd {
    let mut cmd = target.cmd("RLOCK.GUARD", None);
    cmd.arg(("TOKEN", token, "CALL"));
    for arg in command.args_iter() {
        // A command with a cursor argument was refused before this.
        if let Arg::Simple(arg) = arg {
            cmd.arg(arg);
        }
    }
    cmd
}

/// `RLOCK.LIMIT key limit`: the limit before, 0 if there was none.
pub(crate) fn limit(name: &[u8], limit: u32) -> Cmd {
    redis::cmd("RLOCK.LIMIT").arg((name, limit)).take()
}

/// `RLOCK.EVENTS session EPOCH n AFTER life seq [BLOCK wait-ms] GRACE grace-ms`. Without a wait it
/// answers at once.
pub(crate) fn events(
    session: &str,
    epoch: u64,
    (life, seq): (i64, u64),
    wait: Option<Duration>,
    grace: Duration,
) -> Cmd {
    let mut cmd = redis::cmd("RLOCK.EVENTS");
    let wait = wait.map(|wait| ("BLOCK", millis(wait).max(1)));
    cmd.arg((session, "EPOCH", epoch, "AFTER", life, seq, wait));
    cmd.arg(("GRACE", millis(grace))).take()
}

/// `RLOCK.BIND session EPOCH n`.
pub(crate) fn bind(session: &str, epoch: u64) -> Cmd {
    let mut cmd = redis::cmd("RLOCK.BIND");
    cmd.arg((session, "EPOCH", epoch)).take()
}

/// `HELLO [3 SETNAME label]`: tells whether the server is a primary, and names the connection.
/// Every user may run it.
pub(crate) fn hello(label: Option<&str>) -> Cmd {
    let label = label.map(|label| (3, "SETNAME", label));
    redis::cmd("HELLO").arg(label).take()
}

/// `WAIT replicas ms`, or `WAITAOF 1 replicas ms`. Never 0 ms, which is the word for "without
/// limit".
pub(crate) fn wait_for_copies(durability: Durability) -> Cmd {
    let (on_disk, replicas) = (durability.on_disk, durability.replicas);
    let within = millis(up_to_whole_millis(durability.within)).max(1);
    let mut cmd = redis::cmd(if on_disk { "WAITAOF" } else { "WAIT" });
    cmd.arg((on_disk.then_some(1), replicas, within)).take()
}

/// `CLUSTER SHARDS`: which nodes there are; or `CLUSTER SLOTS`: which of them serve which slots.
pub(super) fn cluster(what: &str) -> Cmd {
    redis::cmd("CLUSTER").arg(what).take()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The most arguments of an ACQUIRE, and the usual length of those beside the name and the owner:
/// the command's name, the lease, a mode, QUEUE, SESSION, ONCE, WANTED.
const ARGUMENTS: usize = 12;
const OTHERS_BYTES: usize = 112;
