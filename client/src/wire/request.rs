//! The wire: one function a server command, a typed reply for each. Nothing else speaks RESP.

use std::sync::Arc;
use std::time::Duration;

use redis::{Arg, Cmd, Pipeline, Value};
use tokio::time::Instant;

use crate::time::{Lease, MILLIS_MAX, up_to_whole_millis};
use crate::wire::reply::{
    Acquired, Range, Reader, Released, Told, read_acquired, read_acquired_permits,
    read_all_released, read_all_renewed, read_copied, read_count, read_released, read_slots,
    read_told,
};
use crate::wire::{Durability, ServerId};

/// How a lock is held, as commands say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Plain,
    Read,
    Write,
    Several,
    /// The limit counts where none is set for all.
    Permits {
        permits: u32,
        limit: Option<u32>,
    },
}

impl Mode {
    /// Whether the server can tell by its token whether a hold is this one. A writer's is kept in
    /// memory only, and the commands for several locks name none.
    pub(crate) fn has_token(self) -> bool {
        matches!(self, Self::Plain | Self::Read | Self::Permits { .. })
    }
}

/// What a command is about: an owner, at one lock or at several.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) mode: Mode,
    /// One, unless the mode is several.
    pub(crate) names: &'a [Arc<[u8]>],
    pub(crate) owner: &'a [u8],
}

/// The code word of the answer that the owner does not hold the lock.
pub(crate) const NOT_HELD: &str = "NOTHELD";

/// What a command is called for one lock, and for several.
type Verb = [&'static str; 2];

const ACQUIRE: Verb = ["RLOCK.ACQUIRE", "RLOCK.MACQUIRE"];
const RELEASE: Verb = ["RLOCK.RELEASE", "RLOCK.MRELEASE"];
/// There is none for several locks.
const GUARD: Verb = ["RLOCK.GUARD", "RLOCK.GUARD"];
const RENEW: Verb = ["RLOCK.RENEW", "RLOCK.MRENEW"];

impl Subject<'_> {
    /// `RLOCK.<verb> key owner [lease-ms] [READ | WRITE | PERMITS [n] [OF limit]]`, or
    /// `RLOCK.M<verb> owner [lease-ms] numkeys key …`.
    fn cmd(&self, [one, several]: Verb, lease: Option<Duration>) -> Cmd {
        let lease = lease.map(millis);
        let mut cmd = self.with_room();
        if self.mode == Mode::Several {
            cmd.arg(several).arg(self.owner).arg(lease);
            cmd.arg(self.names.len()).arg(self.names);
            return cmd;
        }
        cmd.arg(one).arg(self.names).arg(self.owner).arg(lease);
        cmd.arg(match self.mode {
            Mode::Read => Some("READ"),
            Mode::Write => Some("WRITE"),
            Mode::Permits { .. } => Some("PERMITS"),
            Mode::Plain | Mode::Several => None,
        });
        if let Mode::Permits { permits, limit } = self.mode {
            // Otherwise the hold says how many.
            let takes_or_gives = one == ACQUIRE[0] || one == RELEASE[0];
            cmd.arg(takes_or_gives.then_some(permits));
            let limit = limit.filter(|_| one == ACQUIRE[0]);
            cmd.arg(limit.map(|limit| ("OF", limit)));
        }
        cmd
    }

    /// An empty command in which the longest of these finds room.
    fn with_room(&self) -> Cmd {
        let names: usize = self.names.iter().map(|name| name.len()).sum();
        let bytes = names.saturating_add(self.owner.len());
        let arguments = self.names.len().saturating_add(OTHERS_MAX);
        Cmd::with_capacity(arguments, bytes.saturating_add(OTHERS_BYTES))
    }

    /// `TOKEN token`, where the server can compare it.
    fn token(&self, token: Option<u64>) -> Option<(&'static str, u64)> {
        let token = token.filter(|_| self.mode.has_token());
        token.map(|token| ("TOKEN", token))
    }
}

/// A command on its way out, and how to read what comes back.
pub(crate) struct Command<T> {
    pub(crate) call: Call,
    pub(crate) reader: Reader<T>,
}

/// A command, whatever is answered.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) cmd: Cmd,
    /// The only server to which it may go.
    only: Option<ServerId>,
    /// Whether it goes behind an `ASKING`: to a node to which its slot is on its way.
    pub(crate) asking: bool,
}

impl Call {
    pub(crate) fn may_go_to(&self, server: &ServerId) -> bool {
        self.only.as_ref().is_none_or(|only| only == server)
    }
}

impl<T> Command<T> {
    /// One whose reply is read by its shape, and by the number of locks that it names.
    fn new(cmd: Cmd, locks: usize, read: fn(&Value, usize) -> Option<T>) -> Self {
        let (only, asking) = (None, false);
        Self {
            call: Call { cmd, only, asking },
            reader: Reader { locks, read },
        }
    }

    /// `WANTED`: the session is to be told when the lock is wanted. Of several it cannot be asked.
    pub(crate) fn wanted(mut self, wanted: bool) -> Self {
        self.call.cmd.arg(wanted.then_some("WANTED"));
        self
    }

    /// The same, for this server only: what another says about a hold must not count here.
    pub(crate) fn only_for(mut self, server: Option<&ServerId>) -> Self {
        self.call.only = server.cloned();
        self
    }
}

/// `HELLO [3 SETNAME label]` and `INFO server`: whom a new connection has reached, and what it is
/// called there. Any user may say the first.
pub(crate) fn handshake(label: Option<&str>) -> Pipeline {
    let mut question = redis::pipe();
    question.cmd("HELLO");
    if let Some(label) = label {
        question.arg(3).arg("SETNAME").arg(label);
    }
    question.cmd("INFO").arg("server");
    question
}

/// `CLIENT KILL ID client`: the server closes that connection, and reads nothing more from it.
pub(crate) fn kill(client: u64) -> Call {
    let cmd = redis::cmd("CLIENT")
        .arg("KILL")
        .arg("ID")
        .arg(client)
        .take();
    Command::new(cmd, 0, |reply, _| read_count(reply)).call
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
}

/// `RLOCK.ACQUIRE` or `RLOCK.MACQUIRE … [QUEUE wait-ms] SESSION session [ONCE]`.
pub(crate) fn acquire(
    subject: Subject<'_>,
    lease: Lease,
    wait_mode: WaitMode,
    session: &str,
    once: bool,
) -> Command<Acquired> {
    let mut cmd = subject.cmd(ACQUIRE, Some(lease.length));
    let wait = match wait_mode {
        WaitMode::None => None,
        WaitMode::Forever => Some(0),
        WaitMode::Until(deadline) => {
            let left = up_to_whole_millis(deadline.saturating_duration_since(lease.since));
            // Never 0, which is the word for "without limit".
            Some(millis(left.min(MILLIS_MAX)).max(1))
        }
    };
    cmd.arg(wait.map(|wait| ("QUEUE", wait)));
    // The owner of permits is one call's, which has one hold.
    let is_permits = matches!(subject.mode, Mode::Permits { .. });
    let once = (once || is_permits).then_some("ONCE");
    cmd.arg("SESSION").arg(session).arg(once);
    let read = if is_permits {
        |reply: &Value, _| read_acquired_permits(reply)
    } else {
        |reply: &Value, _| read_acquired(reply)
    };
    Command::new(cmd, subject.names.len(), read)
}

/// `RLOCK.LIMIT key limit`: the limit before, 0 if there was none.
pub(crate) fn limit(name: &Arc<[u8]>, limit: u32) -> Command<u64> {
    let cmd = redis::cmd("RLOCK.LIMIT").arg(&**name).arg(limit).take();
    Command::new(cmd, 1, |reply, _| read_count(reply))
}

/// `RLOCK.EVENTS session [BLOCK wait-ms] GRACE grace-ms`. Without a wait it answers at once.
pub(crate) fn events(name: &str, wait: Option<Duration>, grace: Duration) -> Command<Told> {
    let mut cmd = redis::cmd("RLOCK.EVENTS");
    let wait = wait.map(|wait| ("BLOCK", millis(wait).max(1)));
    cmd.arg(name).arg(wait);
    cmd.arg("GRACE").arg(millis(grace));
    Command::new(cmd, 0, |reply, _| read_told(reply))
}

/// `RLOCK.RELEASE … [TOKEN token] [LEASE lease-ms]`, or `RLOCK.MRELEASE`. A lease starts anew for
/// what is left of a reader's hold.
pub(crate) fn release(
    subject: Subject<'_>,
    token: Option<u64>,
    lease: Option<Duration>,
) -> Command<Released> {
    let mut cmd = subject.cmd(RELEASE, None);
    if subject.mode == Mode::Several {
        return Command::new(cmd, subject.names.len(), read_all_released);
    }
    let lease = lease.filter(|_| subject.mode == Mode::Read);
    cmd.arg(subject.token(token));
    cmd.arg(lease.map(|lease| ("LEASE", millis(lease))));
    Command::new(cmd, 1, |reply, _| read_released(reply))
}

/// `RLOCK.RENEW … [TOKEN token] SESSION session`, or `RLOCK.MRENEW`: whether it is still held, of
/// several locks whether all are.
pub(crate) fn renew(
    subject: Subject<'_>,
    lease: Duration,
    token: Option<u64>,
    session: &str,
) -> Command<bool> {
    let mut cmd = subject.cmd(RENEW, Some(lease));
    cmd.arg(subject.token(token)).arg("SESSION").arg(session);
    Command::new(cmd, subject.names.len(), read_all_renewed)
}

/// `RLOCK.GUARD key owner [READ | WRITE | PERMITS] [TOKEN token] CALL command …`: of one lock.
pub(crate) fn guard(subject: Subject<'_>, token: u64, command: &Cmd) -> Command<Value> {
    let mut cmd = subject.cmd(GUARD, None);
    cmd.arg(subject.token(Some(token))).arg("CALL");
    for arg in command.args_iter() {
        // Whoever sends a cursor that is kept apart has been refused before.
        if let Arg::Simple(arg) = arg {
            cmd.arg(arg);
        }
    }
    Command::new(cmd, 1, |reply, _| Some(reply.clone()))
}

/// `WAIT replicas ms`, or `WAITAOF 1 replicas ms`. Never 0 ms, which is the word for "without
/// limit".
pub(crate) fn wait_for_copies(durability: Durability) -> Command<(bool, u64)> {
    let on_disk = durability.on_disk;
    let mut cmd = redis::cmd(if on_disk { "WAITAOF" } else { "WAIT" });
    cmd.arg(on_disk.then_some(1)).arg(durability.replicas);
    cmd.arg(millis(up_to_whole_millis(durability.within)).max(1));
    Command::new(cmd, 0, |reply, _| read_copied(reply))
}

/// `RLOCK.CANCEL key owner`: how many waiters have been taken out of the queue. A wait for several
/// locks stands in the queue of each, and leaves all with one.
pub(crate) fn cancel(subject: Subject<'_>) -> Command<u64> {
    let mut cmd = redis::cmd("RLOCK.CANCEL");
    cmd.arg(subject.names.first()).arg(subject.owner);
    Command::new(cmd, 1, |reply, _| read_count(reply))
}

/// `CLUSTER SLOTS`: who serves which slots.
pub(crate) fn slots() -> Command<Vec<Range>> {
    let cmd = redis::cmd("CLUSTER").arg("SLOTS").take();
    Command::new(cmd, 0, |reply, _| read_slots(reply))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// As many arguments an ACQUIRE may have beside the names, and as long they usually are: its own
/// name, the owner, the lease, a mode or WANTED, QUEUE, SESSION, ONCE.
const OTHERS_MAX: usize = 9;
const OTHERS_BYTES: usize = 112;

#[cfg(test)]
mod tests {
    use super::*;

    fn words<T>(command: &Command<T>) -> String {
        String::from_utf8(command.call.cmd.get_packed_command())
            .expect("text")
            .split("\r\n")
            .filter(|part| !part.starts_with(['*', '$']))
            .collect::<Vec<_>>()
            .join(" ")
            .trim_end()
            .to_owned()
    }

    /// What is said about `o` at these locks.
    fn about<T>(mode: Mode, names: &[&str], say: impl Fn(Subject<'_>) -> Command<T>) -> String {
        let names: Vec<_> = names.iter().map(|n| Arc::from(n.as_bytes())).collect();
        words(&say(Subject {
            mode,
            names: &names,
            owner: b"o",
        }))
    }

    fn plain<T>(say: impl Fn(Subject<'_>) -> Command<T>) -> String {
        about(Mode::Plain, &["n"], say)
    }

    fn read<T>(say: impl Fn(Subject<'_>) -> Command<T>) -> String {
        about(Mode::Read, &["n"], say)
    }

    fn write<T>(say: impl Fn(Subject<'_>) -> Command<T>) -> String {
        about(Mode::Write, &["n"], say)
    }

    fn several<T>(say: impl Fn(Subject<'_>) -> Command<T>) -> String {
        about(Mode::Several, &["b", "a"], say)
    }

    const LEASE: Duration = Duration::from_secs(30);

    fn lease() -> Lease {
        let (since, length) = (Instant::now(), LEASE);
        Lease { since, length }
    }

    #[test]
    fn commands_are_written_as_the_contract_spells_them() {
        let cases = [
            (
                plain(|o| acquire(o, lease(), WaitMode::None, "s", false)),
                "RLOCK.ACQUIRE n o 30000 SESSION s",
            ),
            (
                plain(|o| acquire(o, lease(), WaitMode::Forever, "s", true)),
                "RLOCK.ACQUIRE n o 30000 QUEUE 0 SESSION s ONCE",
            ),
            (plain(|o| release(o, None, None)), "RLOCK.RELEASE n o"),
            (
                plain(|o| release(o, Some(7), Some(LEASE))),
                "RLOCK.RELEASE n o TOKEN 7",
            ),
            (
                plain(|o| renew(o, LEASE, Some(7), "s")),
                "RLOCK.RENEW n o 30000 TOKEN 7 SESSION s",
            ),
            (
                plain(|o| renew(o, LEASE, None, "s").wanted(true)),
                "RLOCK.RENEW n o 30000 SESSION s WANTED",
            ),
            (plain(cancel), "RLOCK.CANCEL n o"),
            (
                plain(|o| guard(o, 7, redis::cmd("SET").arg("k").arg(1))),
                "RLOCK.GUARD n o TOKEN 7 CALL SET k 1",
            ),
            (
                words(&events("s", None, Duration::ZERO)),
                "RLOCK.EVENTS s GRACE 0",
            ),
            (
                words(&events("s", Some(LEASE), Duration::from_secs(1))),
                "RLOCK.EVENTS s BLOCK 30000 GRACE 1000",
            ),
        ];
        for (written, expected) in cases {
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn readers_and_writers_say_so_and_a_writer_names_no_token() {
        let acquire = |o: Subject<'_>| acquire(o, lease(), WaitMode::Forever, "s", true);
        let release = |o: Subject<'_>| release(o, Some(7), Some(LEASE));
        let renew = |o: Subject<'_>| renew(o, LEASE, Some(7), "s");
        let cases = [
            (
                read(acquire),
                "RLOCK.ACQUIRE n o 30000 READ QUEUE 0 SESSION s ONCE",
            ),
            (
                write(acquire),
                "RLOCK.ACQUIRE n o 30000 WRITE QUEUE 0 SESSION s ONCE",
            ),
            (read(release), "RLOCK.RELEASE n o READ TOKEN 7 LEASE 30000"),
            (write(release), "RLOCK.RELEASE n o WRITE"),
            (read(renew), "RLOCK.RENEW n o 30000 READ TOKEN 7 SESSION s"),
            (write(renew), "RLOCK.RENEW n o 30000 WRITE SESSION s"),
            (
                read(|o| guard(o, 7, &redis::cmd("PING"))),
                "RLOCK.GUARD n o READ TOKEN 7 CALL PING",
            ),
            (
                write(|o| guard(o, 7, &redis::cmd("PING"))),
                "RLOCK.GUARD n o WRITE CALL PING",
            ),
            (read(cancel), "RLOCK.CANCEL n o"),
            (write(cancel), "RLOCK.CANCEL n o"),
        ];
        for (written, expected) in cases {
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn permits_say_how_many_and_are_always_asked_for_once() {
        let permits = |limit| {
            let permits = 2;
            Mode::Permits { permits, limit }
        };
        let acquire = |o: Subject<'_>| acquire(o, lease(), WaitMode::Forever, "s", false);
        let cases = [
            (
                about(permits(Some(5)), &["n"], acquire),
                "RLOCK.ACQUIRE n o 30000 PERMITS 2 OF 5 QUEUE 0 SESSION s ONCE",
            ),
            (
                about(permits(None), &["n"], acquire),
                "RLOCK.ACQUIRE n o 30000 PERMITS 2 QUEUE 0 SESSION s ONCE",
            ),
            (
                about(permits(Some(5)), &["n"], |o| release(o, Some(7), None)),
                "RLOCK.RELEASE n o PERMITS 2 TOKEN 7",
            ),
            (
                about(permits(Some(5)), &["n"], |o| renew(o, LEASE, Some(7), "s")),
                "RLOCK.RENEW n o 30000 PERMITS TOKEN 7 SESSION s",
            ),
            (
                about(permits(Some(5)), &["n"], |o| {
                    guard(o, 7, &redis::cmd("PING"))
                }),
                "RLOCK.GUARD n o PERMITS TOKEN 7 CALL PING",
            ),
            (words(&limit(&Arc::from(*b"n"), 8)), "RLOCK.LIMIT n 8"),
        ];
        for (written, expected) in cases {
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn several_locks_are_named_in_one_command_and_cancelled_by_the_first() {
        let cases = [
            (
                several(|o| acquire(o, lease(), WaitMode::Forever, "s", true)),
                "RLOCK.MACQUIRE o 30000 2 b a QUEUE 0 SESSION s ONCE",
            ),
            (
                several(|o| release(o, Some(7), Some(LEASE))),
                "RLOCK.MRELEASE o 2 b a",
            ),
            (
                several(|o| renew(o, LEASE, Some(7), "s")),
                "RLOCK.MRENEW o 30000 2 b a SESSION s",
            ),
            (several(cancel), "RLOCK.CANCEL b o"),
        ];
        for (written, expected) in cases {
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn of_several_locks_all_must_have_been_there() {
        let names = [Arc::from(*b"a"), Arc::from(*b"b")];
        let subject = Subject {
            mode: Mode::Several,
            names: &names,
            owner: b"o",
        };
        let renewed = |n| {
            let renewal = renew(subject, LEASE, Some(7), "s");
            renewal.reader.read(&Value::Int(n)).ok()
        };
        assert_eq!(
            [renewed(0), renewed(1), renewed(2), renewed(3)],
            [Some(false), Some(false), Some(true), None]
        );
        let released = |n| {
            let release = release(subject, None, None);
            release.reader.read(&Value::Int(n)).ok()
        };
        assert_eq!(released(1), Some(Released::NotHeld));
        assert_eq!(released(2), Some(Released::Done));
    }

    #[test]
    fn a_limited_wait_is_never_sent_as_zero_which_means_no_limit() {
        for (wait, sent) in [
            (0, "1"),
            (1, "1"),
            (999_999, "1"),
            (1_000_000, "1"),
            (1_000_001, "2"),
        ] {
            let lease = lease();
            let wait = WaitMode::Until(lease.since + Duration::from_nanos(wait));
            let written = plain(|o| acquire(o, lease, wait, "s", false));
            assert_eq!(
                written,
                format!("RLOCK.ACQUIRE n o 30000 QUEUE {sent} SESSION s")
            );
        }
    }

    #[test]
    fn a_reply_of_another_shape_leaves_unknown_what_was_done() {
        let subject = Subject {
            mode: Mode::Plain,
            names: &[Arc::from(*b"n")],
            owner: b"o",
        };
        for reply in [Value::Okay, Value::Int(2)] {
            let error = renew(subject, LEASE, Some(1), "s").reader.read(&reply);
            assert!(error.expect_err("no such reply").is_unknown());
        }
    }
}
