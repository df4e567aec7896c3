//! The wire: one function a server command, a typed reply for each. Nothing else speaks RESP.

use std::time::Duration;

use redis::{Cmd, RedisError, Value};

use crate::error::Error;
use crate::hold::LostReason;

/// A command on its way out, and how to read what comes back.
#[derive(Clone)]
pub(crate) struct Command<T> {
    pub(crate) cmd: Cmd,
    pub(crate) reader: Reader<T>,
}

impl<T> Command<T> {
    fn new(cmd: Cmd, read: fn(&Value) -> Option<T>) -> Self {
        Self {
            cmd,
            reader: Reader(read),
        }
    }
}

/// How to read the reply to a command.
#[derive(Clone)]
pub(crate) struct Reader<T>(fn(&Value) -> Option<T>);

impl<T> Reader<T> {
    /// What the server's reply says.
    pub(crate) fn read(&self, reply: &Value) -> Result<T, Error> {
        if let Value::ServerError(refusal) = reply {
            return Err(Error::from_server(refusal));
        }
        // A reply of another shape comes from something that is not the module: what it has done
        // nobody can say.
        (self.0)(reply).ok_or_else(|| {
            let text = "the reply is not one of an RLOCK command";
            Error::no_reply(Some(RedisError::from((
                redis::ErrorKind::UnexpectedReturnType,
                text,
            ))))
        })
    }
}

/// What an ACQUIRE came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Held, with this fencing token.
    Granted { token: u64 },
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
    /// It was not held by this owner, or not with this token.
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

/// `RLOCK.ACQUIRE key owner lease-ms [QUEUE wait-ms] SESSION session [ONCE]`.
pub(crate) fn acquire(
    name: &[u8],
    owner: &[u8],
    lease: Duration,
    queue: Queue,
    session: &str,
    once: bool,
) -> Command<Acquired> {
    let mut cmd = redis::cmd("RLOCK.ACQUIRE");
    cmd.arg(name).arg(owner).arg(millis(lease));
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

/// `RLOCK.RELEASE key owner [TOKEN token]`.
pub(crate) fn release(name: &[u8], owner: &[u8], token: Option<u64>) -> Command<Released> {
    let mut cmd = redis::cmd("RLOCK.RELEASE");
    cmd.arg(name).arg(owner);
    if let Some(token) = token {
        cmd.arg("TOKEN").arg(token);
    }
    Command::new(cmd, read_released)
}

/// `RLOCK.RENEW key owner lease-ms TOKEN token SESSION session`: whether it is still held.
pub(crate) fn renew(
    name: &[u8],
    owner: &[u8],
    lease: Duration,
    token: u64,
    session: &str,
) -> Command<bool> {
    let mut cmd = redis::cmd("RLOCK.RENEW");
    cmd.arg(name)
        .arg(owner)
        .arg(millis(lease))
        .arg("TOKEN")
        .arg(token)
        .arg("SESSION")
        .arg(session);
    Command::new(cmd, read_renewed)
}

/// `RLOCK.CANCEL key owner`: how many waiters have been taken out of the queue.
pub(crate) fn cancel(name: &[u8], owner: &[u8]) -> Command<u64> {
    let mut cmd = redis::cmd("RLOCK.CANCEL");
    cmd.arg(name).arg(owner);
    Command::new(cmd, read_count)
}

fn read_acquired(reply: &Value) -> Option<Acquired> {
    let Value::Array(values) = reply else {
        return None;
    };
    match values.as_slice() {
        [Value::Int(count), Value::Int(token)] if *count >= 1 => Some(Acquired::Granted {
            token: u64::try_from(*token).ok()?,
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

fn read_renewed(reply: &Value) -> Option<bool> {
    match reply {
        Value::Int(1) => Some(true),
        Value::Int(0) => Some(false),
        _ => None,
    }
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

    #[test]
    fn commands_are_written_as_the_contract_spells_them() {
        let lease = Duration::from_secs(30);
        let cases = [
            (
                words(&acquire(b"n", b"o", lease, Queue::No, "s", false)),
                "RLOCK.ACQUIRE n o 30000 SESSION s",
            ),
            (
                words(&acquire(b"n", b"o", lease, Queue::Forever, "s", true)),
                "RLOCK.ACQUIRE n o 30000 QUEUE 0 SESSION s ONCE",
            ),
            (words(&release(b"n", b"o", None)), "RLOCK.RELEASE n o"),
            (
                words(&release(b"n", b"o", Some(7))),
                "RLOCK.RELEASE n o TOKEN 7",
            ),
            (
                words(&renew(b"n", b"o", lease, 7, "s")),
                "RLOCK.RENEW n o 30000 TOKEN 7 SESSION s",
            ),
            (words(&cancel(b"n", b"o")), "RLOCK.CANCEL n o"),
            (
                words(&events("s", None, Duration::ZERO)),
                "RLOCK.EVENTS s GRACE 0",
            ),
            (
                words(&events("s", Some(lease), Duration::from_secs(1))),
                "RLOCK.EVENTS s BLOCK 30000 GRACE 1000",
            ),
        ];
        for (written, expected) in cases {
            assert_eq!(written, expected);
        }
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
            let lease = Duration::from_secs(1);
            let written = words(&acquire(b"n", b"o", lease, queue, "s", false));
            assert_eq!(
                written,
                format!("RLOCK.ACQUIRE n o 1000 QUEUE {sent} SESSION s")
            );
        }
    }

    #[test]
    fn replies_are_read_by_shape() {
        let pair = |a, b| Value::Array(vec![Value::Int(a), Value::Int(b)]);
        let not_held = |lease_left| Some(Acquired::NotHeld { lease_left });
        assert_eq!(
            read_acquired(&pair(2, 9)),
            Some(Acquired::Granted { token: 9 })
        );
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
        assert_eq!(read_renewed(&Value::Int(2)), None);
    }

    #[test]
    fn a_reply_of_another_shape_leaves_unknown_what_was_done() {
        let error = renew(b"n", b"o", Duration::from_secs(1), 1, "s")
            .reader
            .read(&Value::Okay);
        assert!(error.expect_err("no such reply").is_unknown());
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
