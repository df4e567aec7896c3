//! The wire: one function a server command, a typed reply for each. Nothing else speaks RESP.

use std::time::Duration;

use redis::{Cmd, RedisError, Value};

use crate::error::Error;

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

/// How long an ACQUIRE may wait in the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    No,
    Forever,
    /// At most this long, rounded up to a whole millisecond.
    For(Duration),
}

/// `RLOCK.ACQUIRE key owner lease-ms [BLOCK wait-ms] [ONCE]`.
pub(crate) fn acquire(
    name: &[u8],
    owner: &[u8],
    lease: Duration,
    block: Block,
    once: bool,
) -> Command<Acquired> {
    let mut cmd = redis::cmd("RLOCK.ACQUIRE");
    cmd.arg(name).arg(owner).arg(millis(lease));
    match block {
        Block::No => {}
        Block::Forever => {
            cmd.arg("BLOCK").arg(0);
        }
        // Never 0, which is the word for "without limit".
        Block::For(wait) => {
            cmd.arg("BLOCK").arg(millis_up(wait).max(1));
        }
    }
    if once {
        cmd.arg("ONCE");
    }
    Command::new(cmd, read_acquired)
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

/// `RLOCK.RENEW key owner lease-ms TOKEN token`: whether it is still held.
pub(crate) fn renew(name: &[u8], owner: &[u8], lease: Duration, token: u64) -> Command<bool> {
    let mut cmd = redis::cmd("RLOCK.RENEW");
    cmd.arg(name)
        .arg(owner)
        .arg(millis(lease))
        .arg("TOKEN")
        .arg(token);
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
            let lease_left = u64::try_from(*ttl_ms).ok().map(Duration::from_millis);
            Some(Acquired::NotHeld { lease_left })
        }
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
                words(&acquire(b"n", b"o", lease, Block::No, false)),
                "RLOCK.ACQUIRE n o 30000",
            ),
            (
                words(&acquire(b"n", b"o", lease, Block::Forever, true)),
                "RLOCK.ACQUIRE n o 30000 BLOCK 0 ONCE",
            ),
            (words(&release(b"n", b"o", None)), "RLOCK.RELEASE n o"),
            (
                words(&release(b"n", b"o", Some(7))),
                "RLOCK.RELEASE n o TOKEN 7",
            ),
            (
                words(&renew(b"n", b"o", lease, 7)),
                "RLOCK.RENEW n o 30000 TOKEN 7",
            ),
            (words(&cancel(b"n", b"o")), "RLOCK.CANCEL n o"),
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
            let block = Block::For(Duration::from_nanos(wait));
            let written = words(&acquire(b"n", b"o", Duration::from_secs(1), block, false));
            assert_eq!(written, format!("RLOCK.ACQUIRE n o 1000 BLOCK {sent}"));
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
        assert_eq!(read_acquired(&pair(-1, 1)), None);
        assert_eq!(read_acquired(&Value::Okay), None);
        assert_eq!(read_released(&Value::Nil), Some(Released::NotHeld));
        assert_eq!(read_released(&Value::Int(0)), Some(Released::Done));
        assert_eq!(read_renewed(&Value::Int(2)), None);
    }

    #[test]
    fn a_reply_of_another_shape_leaves_unknown_what_was_done() {
        let error = renew(b"n", b"o", Duration::from_secs(1), 1)
            .reader
            .read(&Value::Okay);
        assert!(error.expect_err("no such reply").is_unknown());
    }
}
