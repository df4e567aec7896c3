//! The wire: one function a server command, a typed reply for each. Nothing else speaks RESP.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};

use crate::acknowledge::Copies;
use crate::connection::ServerId;
use crate::error::Error;
use crate::hold::LostReason;
use crate::mode::Mode;
use crate::session::Attachment;
use crate::slots::{self, Range};

/// What a command is about: an owner, at one lock or at several.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) mode: Mode,
    /// One, unless the mode is several.
    pub(crate) names: &'a [Arc<[u8]>],
    pub(crate) owner: &'a [u8],
}

/// A command has one name for one lock and another for several.
struct Verb {
    one: &'static str,
    several: &'static str,
}

const ACQUIRE: Verb = Verb {
    one: "RLOCK.ACQUIRE",
    several: "RLOCK.MACQUIRE",
};

const RELEASE: Verb = Verb {
    one: "RLOCK.RELEASE",
    several: "RLOCK.MRELEASE",
};

const RENEW: Verb = Verb {
    one: "RLOCK.RENEW",
    several: "RLOCK.MRENEW",
};

impl Subject<'_> {
    /// `RLOCK.<verb> key owner [lease-ms] [READ | WRITE]`, or
    /// `RLOCK.M<verb> owner [lease-ms] numkeys key …`.
    fn cmd(&self, verb: &Verb, lease: Option<Duration>) -> Cmd {
        let lease = lease.map(millis);
        let mut cmd = self.with_room();
        if self.mode == Mode::Several {
            cmd.arg(verb.several);
            cmd.arg(self.owner).arg(lease).arg(self.names.len());
            return self.names.iter().fold(cmd, with_name);
        }
        cmd.arg(verb.one);
        let mut cmd = self.names.iter().fold(cmd, with_name);
        cmd.arg(self.owner).arg(lease);
        match self.mode {
            Mode::Read => cmd.arg("READ"),
            Mode::Write => cmd.arg("WRITE"),
            Mode::Plain | Mode::Several => &mut cmd,
        };
        cmd
    }

    /// An empty command in which the longest of these finds room.
    fn with_room(&self) -> Cmd {
        let names: usize = self.names.iter().map(|name| name.len()).sum();
        let bytes = names.saturating_add(self.owner.len());
        let arguments = self.names.len().saturating_add(OTHERS_MAX);
        Cmd::with_capacity(arguments, bytes.saturating_add(OTHERS_BYTES))
    }

    /// The token, where the server can compare it.
    fn token(&self, token: u64) -> Option<u64> {
        self.mode.has_token().then_some(token)
    }
}

fn with_name(mut cmd: Cmd, name: &Arc<[u8]>) -> Cmd {
    cmd.arg(&name[..]);
    cmd
}

/// A command on its way out, and how to read what comes back.
#[derive(Clone)]
pub(crate) struct Command<T> {
    pub(crate) cmd: Cmd,
    pub(crate) reader: Reader<T>,
    /// The only server to which it may go.
    pub(crate) only: Option<ServerId>,
    /// Whether it goes behind an `ASKING`: to a node to which its slot is on its way.
    pub(crate) asking: bool,
}

impl<T> Command<T> {
    fn new(cmd: Cmd, read: fn(&Value) -> Option<T>) -> Self {
        Self {
            cmd,
            reader: Reader::Any(read),
            only: None,
            asking: false,
        }
    }

    /// The same, only for the server to which the session is attached by this: what another says
    /// about a hold must not count on it.
    pub(crate) fn under(mut self, attachment: Option<&Arc<Attachment>>) -> Self {
        self.only = attachment.and_then(|one| one.server().cloned());
        self
    }

    /// Puts it on its way.
    pub(crate) fn add_to(&self, pipeline: &mut Pipeline) {
        if self.asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(self.cmd.clone());
    }

    /// Takes its reply out of those to the pipeline.
    pub(crate) fn take_reply<'a>(
        &self,
        replies: &mut impl Iterator<Item = &'a Value>,
    ) -> Result<T, Error> {
        if self.asking {
            replies.next();
        }
        let reply = replies.next().ok_or_else(|| Error::no_reply(None))?;
        self.reader.read(reply)
    }

    /// How many of the locks that it names a command concerned is its reply.
    fn counted(cmd: Cmd, locks: usize, read: fn(u64, u64) -> Option<T>) -> Self {
        let locks = u64::try_from(locks).unwrap_or(u64::MAX);
        Self {
            cmd,
            reader: Reader::Count { locks, read },
            only: None,
            asking: false,
        }
    }
}

/// How to read the reply to a command.
#[derive(Clone)]
pub(crate) enum Reader<T> {
    /// By its shape.
    Any(fn(&Value) -> Option<T>),
    /// As a number of all the locks that were named.
    Count {
        locks: u64,
        read: fn(u64, u64) -> Option<T>,
    },
}

impl<T> Reader<T> {
    /// What the server's reply says.
    pub(crate) fn read(&self, reply: &Value) -> Result<T, Error> {
        if let Value::ServerError(refusal) = reply {
            return Err(Error::from_server(refusal));
        }
        // A reply of another shape comes from something that is not the module: what it has done
        // nobody can say.
        let read = match self {
            Self::Any(read) => read(reply),
            Self::Count { locks, read } => read_count(reply).and_then(|count| read(count, *locks)),
        };
        read.ok_or_else(|| {
            let text = "the reply is not one of an RLOCK command";
            Error::no_reply(Some(RedisError::from((
                redis::ErrorKind::UnexpectedReturnType,
                text,
            ))))
        })
    }
}

/// `HELLO` and `INFO server`: whom a new connection has reached. Any user may say the first.
pub(crate) fn introduce() -> Pipeline {
    let mut question = redis::pipe();
    question.cmd("HELLO").cmd("INFO").arg("server");
    question
}

/// What a server says of itself, as far as it does to this user.
pub(crate) struct Introduction {
    pub(crate) is_replica: bool,
    /// Another one in each life.
    pub(crate) run_id: Option<String>,
}

impl Introduction {
    /// Reads the answers to [`introduce`].
    pub(crate) fn read(answers: &[Value]) -> Self {
        let [hello, info] = answers else {
            return Self {
                is_replica: false,
                run_id: None,
            };
        };
        Self {
            is_replica: read_role(hello).is_some_and(|role| role != b"master"),
            run_id: read_run_id(info),
        }
    }
}

fn read_role(hello: &Value) -> Option<&[u8]> {
    let Value::Map(fields) = hello else {
        return None;
    };
    let role = fields.iter().find(|(key, _)| bytes(key) == Some(b"role"));
    role.and_then(|(_, role)| bytes(role))
}

fn read_run_id(info: &Value) -> Option<String> {
    let text = match info {
        Value::VerbatimString { text, .. } => text.as_str(),
        other => std::str::from_utf8(bytes(other)?).ok()?,
    };
    let mut lines = text.lines();
    let run_id = lines.find_map(|line| line.strip_prefix("run_id:"));
    run_id.map(str::to_owned)
}

/// What an ACQUIRE came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Held, with this fencing token.
    Granted {
        token: u64,
        /// Whether the owner held none of it before.
        fresh: bool,
    },
    /// In line; what comes of it is told by an event.
    Queued,
    /// Not held; what is left of the present lease, `None` if the key has no expiry.
    NotHeld { lease_left: Option<Duration> },
}

/// What a RELEASE came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// One hold less.
    Done,
    /// It was not held by this owner, or not with this token; of several not all.
    NotHeld,
}

/// How long an ACQUIRE may stand in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    No,
    Forever,
    /// At most this long, rounded up to a whole millisecond.
    For(Duration),
}

/// What has happened to one owner at one lock.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) name: Vec<u8>,
    pub(crate) owner: Vec<u8>,
    pub(crate) news: News,
}

/// The kinds of events.
#[derive(Clone, Debug)]
pub(crate) enum News {
    /// The wait is over: held, with this fencing token.
    Granted { token: u64 },
    /// The wait is over: not held; what is left of the present lease, `None` without an expiry.
    TimedOut { lease_left: Option<Duration> },
    /// The hold is over.
    Lost(LostReason),
    /// The wait is over, with an error.
    Failed(Error),
}

/// `RLOCK.ACQUIRE` or `RLOCK.MACQUIRE … [QUEUE wait-ms] SESSION session [ONCE]`.
pub(crate) fn acquire(
    subject: Subject<'_>,
    lease: Duration,
    queue: Queue,
    session: &str,
    once: bool,
) -> Command<Acquired> {
    let mut cmd = subject.cmd(&ACQUIRE, Some(lease));
    match queue {
        Queue::No => {}
        Queue::Forever => {
            cmd.arg("QUEUE").arg(0);
        }
        // Never 0, which is the word for "without limit".
        Queue::For(wait) => {
            cmd.arg("QUEUE").arg(millis_up(wait).max(1));
        }
    }
    cmd.arg("SESSION").arg(session);
    if once {
        cmd.arg("ONCE");
    }
    Command::new(cmd, read_acquired)
}

/// `RLOCK.EVENTS session [BLOCK wait-ms] GRACE grace-ms`. Without a wait it answers at once.
pub(crate) fn events(
    session: &str,
    wait: Option<Duration>,
    grace: Duration,
) -> Command<Vec<Event>> {
    let mut cmd = redis::cmd("RLOCK.EVENTS");
    cmd.arg(session);
    if let Some(wait) = wait {
        cmd.arg("BLOCK").arg(millis(wait).max(1));
    }
    cmd.arg("GRACE").arg(millis(grace));
    Command::new(cmd, read_events)
}

/// `RLOCK.RELEASE … [TOKEN token] [LEASE lease-ms]`, or `RLOCK.MRELEASE`. A lease starts anew for
/// what is left of a reader's hold.
pub(crate) fn release(
    subject: Subject<'_>,
    token: Option<u64>,
    lease: Option<Duration>,
) -> Command<Released> {
    let mut cmd = subject.cmd(&RELEASE, None);
    if subject.mode == Mode::Several {
        return Command::counted(cmd, subject.names.len(), read_all_released);
    }
    if let Some(token) = token.and_then(|token| subject.token(token)) {
        cmd.arg("TOKEN").arg(token);
    }
    if let Some(lease) = lease.filter(|_| subject.mode == Mode::Read) {
        cmd.arg("LEASE").arg(millis(lease));
    }
    Command::new(cmd, read_released)
}

/// `RLOCK.RENEW … [TOKEN token] SESSION session`, or `RLOCK.MRENEW`: whether it is still held, of
/// several locks whether all are.
pub(crate) fn renew(
    subject: Subject<'_>,
    lease: Duration,
    token: u64,
    session: &str,
) -> Command<bool> {
    let mut cmd = subject.cmd(&RENEW, Some(lease));
    if let Some(token) = subject.token(token) {
        cmd.arg("TOKEN").arg(token);
    }
    cmd.arg("SESSION").arg(session);
    Command::counted(cmd, subject.names.len(), read_all_renewed)
}

/// Who has what a connection has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    /// Whether the server has it on its disk, as far as that was asked.
    pub(crate) local: bool,
    pub(crate) replicas: u64,
}

/// `WAIT replicas ms`, or `WAITAOF 1 replicas ms`. Never 0 ms, which is the word for "without
/// limit".
pub(crate) fn wait_for_copies(copies: Copies) -> Command<Copied> {
    let within = millis_up(copies.within).max(1);
    let mut cmd = if copies.on_disk {
        let mut cmd = redis::cmd("WAITAOF");
        cmd.arg(1);
        cmd
    } else {
        redis::cmd("WAIT")
    };
    cmd.arg(copies.replicas).arg(within);
    Command::new(cmd, read_copied)
}

fn read_copied(reply: &Value) -> Option<Copied> {
    let (local, replicas) = match reply {
        Value::Array(counts) => match counts.as_slice() {
            [local, replicas] => (read_count(local)? > 0, replicas),
            _ => return None,
        },
        replicas => (false, replicas),
    };
    let replicas = read_count(replicas)?;
    Some(Copied { local, replicas })
}

/// `RLOCK.CANCEL key owner`: how many waiters have been taken out of the queue. A wait for several
/// locks stands in the queue of each, and leaves all with one.
pub(crate) fn cancel(subject: Subject<'_>) -> Command<u64> {
    let cmd = redis::cmd("RLOCK.CANCEL");
    let mut cmd = subject.names.iter().take(1).fold(cmd, with_name);
    cmd.arg(subject.owner);
    Command::new(cmd, read_count)
}

/// `CLUSTER SLOTS`: who serves which slots.
pub(crate) fn slots() -> Command<Vec<Range>> {
    let mut cmd = redis::cmd("CLUSTER");
    cmd.arg("SLOTS");
    Command::new(cmd, read_slots)
}

fn read_slots(reply: &Value) -> Option<Vec<Range>> {
    let Value::Array(ranges) = reply else {
        return None;
    };
    ranges.iter().map(read_range).collect()
}

fn read_range(range: &Value) -> Option<Range> {
    let Value::Array(parts) = range else {
        return None;
    };
    let [Value::Int(first), Value::Int(last), nodes @ ..] = parts.as_slice() else {
        return None;
    };
    let nodes: Vec<_> = nodes.iter().map(read_node).collect::<Option<_>>()?;
    // Without its primary nothing can be said of the range.
    let is_known = nodes.first().is_some_and(Option::is_some);
    let nodes = nodes.into_iter().filter(|_| is_known);
    Some(Range {
        first: u16::try_from(*first).ok()?,
        last: u16::try_from(*last).ok()?,
        nodes: nodes.flatten().collect(),
    })
}

/// A node, if it can be said where it is. With no host it is where the one that was asked is. One
/// that should be called by its name and has none is `?`, and has its address beside it.
#[expect(clippy::option_option, reason = "no node, and a node that is nowhere")]
fn read_node(node: &Value) -> Option<Option<(Option<Box<str>>, u16)>> {
    let Value::Array(parts) = node else {
        return None;
    };
    let [host, Value::Int(port), more @ ..] = parts.as_slice() else {
        return None;
    };
    let port = u16::try_from(*port).ok()?;
    let host = match bytes(host) {
        Some(b"?") => match more.get(1).and_then(read_ip) {
            None => return Some(None),
            ip => ip,
        },
        host => host,
    };
    let host = host.and_then(|host| std::str::from_utf8(host).ok());
    Some(Some((host.and_then(slots::named), port)))
}

/// The address in what else is said of a node: names and values, as a map or behind one another.
fn read_ip(details: &Value) -> Option<&[u8]> {
    let is_ip = |name: &Value| bytes(name) == Some(b"ip");
    let ip = match details {
        Value::Map(pairs) => pairs.iter().find(|(name, _)| is_ip(name)).map(|(_, ip)| ip),
        Value::Array(words) => words
            .chunks_exact(2)
            .find_map(|pair| is_ip(pair.first()?).then(|| pair.get(1))?),
        _ => None,
    };
    ip.and_then(bytes).filter(|ip| !ip.is_empty())
}

fn read_acquired(reply: &Value) -> Option<Acquired> {
    let Value::Array(values) = reply else {
        return None;
    };
    match values.as_slice() {
        [Value::Int(count), Value::Int(token)] if *count >= 1 => Some(Acquired::Granted {
            token: u64::try_from(*token).ok()?,
            fresh: *count == 1,
        }),
        [Value::Int(0), Value::Int(ttl_ms)] => {
            let lease_left = time_left(*ttl_ms);
            Some(Acquired::NotHeld { lease_left })
        }
        [Value::Int(-1), Value::Int(1..)] => Some(Acquired::Queued),
        _ => None,
    }
}

fn time_left(ttl_ms: i64) -> Option<Duration> {
    u64::try_from(ttl_ms).ok().map(Duration::from_millis)
}

fn read_events(reply: &Value) -> Option<Vec<Event>> {
    let Value::Array(events) = reply else {
        return None;
    };
    let mut read = Vec::with_capacity(events.len());
    for event in events {
        let Value::Array(parts) = event else {
            return None;
        };
        let [kind, name, owner, value] = parts.as_slice() else {
            return None;
        };
        let (name, owner) = (bytes(name)?.to_vec(), bytes(owner)?.to_vec());
        // A kind that a later server may add is nothing to us.
        if let Some(read_news) = reader_of(bytes(kind)?) {
            let news = read_news(value)?;
            read.push(Event { name, owner, news });
        }
    }
    Some(read)
}

fn reader_of(kind: &[u8]) -> Option<fn(&Value) -> Option<News>> {
    match kind {
        b"granted" => Some(read_granted),
        b"timeout" => Some(read_timeout),
        b"lost" => Some(read_lost),
        b"error" => Some(read_error),
        _ => None,
    }
}

fn read_granted(value: &Value) -> Option<News> {
    let token = read_count(value)?;
    Some(News::Granted { token })
}

fn read_timeout(value: &Value) -> Option<News> {
    let Value::Int(ttl_ms) = value else {
        return None;
    };
    let lease_left = time_left(*ttl_ms);
    Some(News::TimedOut { lease_left })
}

fn read_lost(value: &Value) -> Option<News> {
    bytes(value).map(|reason| News::Lost(LostReason::from_server(reason)))
}

fn read_error(value: &Value) -> Option<News> {
    let text = String::from_utf8_lossy(bytes(value)?);
    Some(News::Failed(Error::from_text(&text)))
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        _ => None,
    }
}

fn read_released(reply: &Value) -> Option<Released> {
    match reply {
        Value::Nil => Some(Released::NotHeld),
        Value::Int(0..) => Some(Released::Done),
        _ => None,
    }
}

fn read_all_released(released: u64, locks: u64) -> Option<Released> {
    let all = read_all_renewed(released, locks)?;
    Some(if all {
        Released::Done
    } else {
        Released::NotHeld
    })
}

fn read_all_renewed(renewed: u64, locks: u64) -> Option<bool> {
    (renewed <= locks).then_some(renewed == locks)
}

fn read_count(reply: &Value) -> Option<u64> {
    match reply {
        Value::Int(count) => u64::try_from(*count).ok(),
        _ => None,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn millis_up(duration: Duration) -> u64 {
    millis(duration.saturating_add(Duration::from_nanos(999_999)))
}

/// As many arguments an ACQUIRE may have beside the names, and as long they usually are: its own
/// name, the owner, the lease, a mode, QUEUE, SESSION, ONCE.
const OTHERS_MAX: usize = 9;
const OTHERS_BYTES: usize = 112;

#[cfg(test)]
mod tests {
    use super::*;

    fn words<T>(command: &Command<T>) -> String {
        String::from_utf8(command.cmd.get_packed_command())
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

    #[test]
    fn commands_are_written_as_the_contract_spells_them() {
        let cases = [
            (
                plain(|o| acquire(o, LEASE, Queue::No, "s", false)),
                "RLOCK.ACQUIRE n o 30000 SESSION s",
            ),
            (
                plain(|o| acquire(o, LEASE, Queue::Forever, "s", true)),
                "RLOCK.ACQUIRE n o 30000 QUEUE 0 SESSION s ONCE",
            ),
            (plain(|o| release(o, None, None)), "RLOCK.RELEASE n o"),
            (
                plain(|o| release(o, Some(7), Some(LEASE))),
                "RLOCK.RELEASE n o TOKEN 7",
            ),
            (
                plain(|o| renew(o, LEASE, 7, "s")),
                "RLOCK.RENEW n o 30000 TOKEN 7 SESSION s",
            ),
            (plain(cancel), "RLOCK.CANCEL n o"),
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
        let acquire = |o: Subject<'_>| acquire(o, LEASE, Queue::Forever, "s", true);
        let release = |o: Subject<'_>| release(o, Some(7), Some(LEASE));
        let renew = |o: Subject<'_>| renew(o, LEASE, 7, "s");
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
            (read(cancel), "RLOCK.CANCEL n o"),
            (write(cancel), "RLOCK.CANCEL n o"),
        ];
        for (written, expected) in cases {
            assert_eq!(written, expected);
        }
    }

    #[test]
    fn several_locks_are_named_in_one_command_and_cancelled_by_the_first() {
        let cases = [
            (
                several(|o| acquire(o, LEASE, Queue::Forever, "s", true)),
                "RLOCK.MACQUIRE o 30000 2 b a QUEUE 0 SESSION s ONCE",
            ),
            (
                several(|o| release(o, Some(7), Some(LEASE))),
                "RLOCK.MRELEASE o 2 b a",
            ),
            (
                several(|o| renew(o, LEASE, 7, "s")),
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
            let renewal = renew(subject, LEASE, 7, "s");
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
            let queue = Queue::For(Duration::from_nanos(wait));
            let written = plain(|o| acquire(o, LEASE, queue, "s", false));
            assert_eq!(
                written,
                format!("RLOCK.ACQUIRE n o 30000 QUEUE {sent} SESSION s")
            );
        }
    }

    #[test]
    fn replies_are_read_by_shape() {
        let pair = |a, b| Value::Array(vec![Value::Int(a), Value::Int(b)]);
        let held = |token, fresh| Some(Acquired::Granted { token, fresh });
        let not_held = |lease_left| Some(Acquired::NotHeld { lease_left });
        assert_eq!(read_acquired(&pair(1, 9)), held(9, true));
        assert_eq!(read_acquired(&pair(2, 9)), held(9, false));
        assert_eq!(read_acquired(&pair(0, -1)), not_held(None));
        assert_eq!(
            read_acquired(&pair(0, 5)),
            not_held(Some(Duration::from_millis(5)))
        );
        assert_eq!(read_acquired(&pair(-1, 1)), Some(Acquired::Queued));
        assert_eq!(read_acquired(&pair(-1, 0)), None);
        assert_eq!(read_acquired(&Value::Okay), None);
        assert_eq!(read_released(&Value::Nil), Some(Released::NotHeld));
        assert_eq!(read_released(&Value::Int(0)), Some(Released::Done));
    }

    #[test]
    fn a_node_without_a_name_is_at_its_address_and_not_at_that_of_the_one_asked() {
        let text = |text: &str| Value::BulkString(text.into());
        let node = |host, details| Value::Array(vec![host, Value::Int(7), text("id"), details]);
        let range = |nodes: Vec<Value>| {
            let parts = [Value::Int(0), Value::Int(9)].into_iter().chain(nodes);
            let ranges = read_slots(&Value::Array(vec![Value::Array(parts.collect())]));
            ranges.expect("well formed").remove(0).nodes
        };
        let map = Value::Map(vec![(text("ip"), text("10.0.0.1"))]);
        let flat = Value::Array(vec![text("ip"), text("10.0.0.2")]);
        let nothing = Value::Array(vec![]);
        let at = |host: &str| (Some(Box::from(host)), 7);
        let nodes = vec![
            node(text("?"), map),
            node(text("?"), flat),
            node(text("?"), nothing.clone()),
            node(text("a"), nothing.clone()),
            node(Value::Nil, nothing.clone()),
            node(text(""), nothing.clone()),
        ];
        let known = [
            at("10.0.0.1"),
            at("10.0.0.2"),
            at("a"),
            (None, 7),
            (None, 7),
        ];
        assert_eq!(range(nodes), known);
        let replica = node(text("a"), nothing.clone());
        assert_eq!(range(vec![node(text("?"), nothing), replica]), []);
    }

    #[test]
    fn a_reply_of_another_shape_leaves_unknown_what_was_done() {
        let subject = Subject {
            mode: Mode::Plain,
            names: &[Arc::from(*b"n")],
            owner: b"o",
        };
        for reply in [Value::Okay, Value::Int(2)] {
            let error = renew(subject, LEASE, 1, "s").reader.read(&reply);
            assert!(error.expect_err("no such reply").is_unknown());
        }
    }

    #[test]
    fn events_are_read_in_order_and_kinds_of_the_future_are_passed_over() {
        let text = |text: &str| Value::BulkString(text.into());
        let event = |kind: &str, value| Value::Array(vec![text(kind), text("n"), text("o"), value]);
        let reply = Value::Array(vec![
            event("granted", Value::Int(7)),
            event("invented", Value::Nil),
            event("timeout", Value::Int(-1)),
            event("lost", text("broken")),
            event("error", text("WRONGTYPE not a lock")),
        ]);
        let events = read_events(&reply).expect("well formed");
        assert!(
            events
                .iter()
                .all(|event| event.name == b"n" && event.owner == b"o")
        );
        let news: Vec<_> = events.into_iter().map(|event| event.news).collect();
        let [
            News::Granted { token: 7 },
            News::TimedOut { lease_left: None },
            News::Lost(LostReason::Broken),
            News::Failed(error),
        ] = news.as_slice()
        else {
            panic!("{news:?}")
        };
        assert!(error.is_refused(), "{error}");
        assert!(read_events(&Value::Array(vec![event("granted", Value::Nil)])).is_none());
        assert!(read_events(&Value::Array(vec![Value::Nil])).is_none());
        assert!(read_events(&Value::Array(vec![])).is_some_and(|events| events.is_empty()));
    }
}
