//! The messages between `rlock run` and its guardian, over a socket between the two.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::time::Duration;

/// An order to the guardian.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Run the command.
    Start(Start),
    /// The command has to be gone at this time, by the clock that counts suspensions.
    Until(Duration),
    /// Send this signal to the command's process group.
    Signal(i32),
    /// The lock is lost: nothing that stands stopped may go on.
    Lost,
}

/// The command, and how to run it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Start {
    /// The program and its arguments.
    pub(crate) words: Vec<OsString>,
    /// Names and values, beside the environment that is there.
    pub(crate) variables: Vec<(OsString, OsString)>,
    /// Whether it is given the terminal.
    pub(crate) foreground: bool,
    /// Between SIGTERM and SIGKILL for processes that the command leaves behind.
    pub(crate) kill_after: Duration,
}

/// A report of the guardian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The process of the command, which is its group too. Sent by the command's own process
    /// before it becomes the command, so that `rlock` knows the group before it exists.
    Started(i32),
    /// It could not be run: the error's number.
    NotRun(i32),
    /// A signal has stopped it.
    Stopped(i32),
    /// The deadline has come, and its group was killed.
    Overdue,
    /// It ended with this status, and its group is gone.
    Exited(i32),
    /// A signal has ended it, and its group is gone.
    Killed(i32),
}

/// As long as every report.
pub(crate) const REPORT: usize = 5;

impl Report {
    pub(crate) fn encode(self) -> [u8; REPORT] {
        let (kind, value) = match self {
            Self::Started(pid) => (b'+', pid),
            Self::NotRun(errno) => (b'!', errno),
            Self::Stopped(signal) => (b's', signal),
            Self::Overdue => (b'd', 0),
            Self::Exited(status) => (b'e', status),
            Self::Killed(signal) => (b'k', signal),
        };
        let [a, b, c, d] = value.to_le_bytes();
        [kind, a, b, c, d]
    }

    pub(crate) fn decode([kind, a, b, c, d]: [u8; REPORT]) -> io::Result<Self> {
        let value = i32::from_le_bytes([a, b, c, d]);
        Ok(match kind {
            b'+' => Self::Started(value),
            b'!' => Self::NotRun(value),
            b's' => Self::Stopped(value),
            b'd' => Self::Overdue,
            b'e' => Self::Exited(value),
            b'k' => Self::Killed(value),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        })
    }

    /// Allocates nothing, so that it may be called between fork and exec.
    pub(crate) fn send(self, mut link: impl Write) -> io::Result<()> {
        link.write_all(&self.encode())
    }
}

impl Order {
    /// Its length, its kind, and its content.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        match self {
            Self::Start(start) => {
                body.extend([b'r', u8::from(start.foreground)]);
                put_time(&mut body, start.kill_after);
                put_number(&mut body, start.words.len());
                start.words.iter().for_each(|word| put(&mut body, word));
                for (name, value) in &start.variables {
                    put(&mut body, name);
                    put(&mut body, value);
                }
            }
            Self::Until(time) => {
                body.push(b'u');
                put_time(&mut body, *time);
            }
            Self::Signal(signal) => {
                body.push(b's');
                body.extend(signal.to_le_bytes());
            }
            Self::Lost => body.push(b'l'),
        }
        let mut whole = Vec::new();
        put_number(&mut whole, body.len());
        whole.extend(body);
        whole
    }

    fn decode(mut body: &[u8]) -> io::Result<Self> {
        let body = &mut body;
        match take(body)? {
            [b'r'] => Start::decode(body).map(Self::Start),
            [b'u'] => Ok(Self::Until(take_time(body)?)),
            [b's'] => Ok(Self::Signal(i32::from_le_bytes(take(body)?))),
            [b'l'] => Ok(Self::Lost),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Start {
    fn decode(body: &mut &[u8]) -> io::Result<Self> {
        let [foreground] = take(body)?;
        let kill_after = take_time(body)?;
        let words = (0..take_number(body)?).map(|_| take_text(body));
        let words = words.collect::<io::Result<_>>()?;
        let mut variables = Vec::new();
        while !body.is_empty() {
            variables.push((take_text(body)?, take_text(body)?));
        }
        Ok(Self {
            words,
            variables,
            foreground: foreground != 0,
            kill_after,
        })
    }
}

/// Orders that have arrived so far.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    bytes: Vec<u8>,
}

impl Inbox {
    /// Reads the bytes that have arrived. False once the other side has gone.
    pub(crate) fn receive(&mut self, mut link: impl Read) -> io::Result<bool> {
        let mut part = [0; 4096];
        let length = link.read(&mut part)?;
        self.bytes.extend(part.iter().take(length));
        Ok(length > 0)
    }

    /// The next order that is there as a whole.
    pub(crate) fn next(&mut self) -> io::Result<Option<Order>> {
        let mut rest = &self.bytes[..];
        let Ok(length) = take_number(&mut rest) else {
            return Ok(None);
        };
        let Some((body, rest)) = rest.split_at_checked(length) else {
            return Ok(None);
        };
        let order = Order::decode(body)?;
        self.bytes = rest.to_vec();
        Ok(Some(order))
    }
}

fn put(bytes: &mut Vec<u8>, text: &OsStr) {
    put_number(bytes, text.len());
    bytes.extend(text.as_bytes());
}

fn put_number(bytes: &mut Vec<u8>, number: usize) {
    bytes.extend(u64::try_from(number).unwrap_or(u64::MAX).to_le_bytes());
}

fn put_time(bytes: &mut Vec<u8>, time: Duration) {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    bytes.extend(nanos.to_le_bytes());
}

fn take<const N: usize>(bytes: &mut &[u8]) -> io::Result<[u8; N]> {
    let mut taken = [0; N];
    bytes.read_exact(&mut taken)?;
    Ok(taken)
}

fn take_number(bytes: &mut &[u8]) -> io::Result<usize> {
    let number = u64::from_le_bytes(take(bytes)?);
    usize::try_from(number).map_err(|_| io::ErrorKind::InvalidData.into())
}

fn take_time(bytes: &mut &[u8]) -> io::Result<Duration> {
    Ok(Duration::from_nanos(u64::from_le_bytes(take(bytes)?)))
}

fn take_text(bytes: &mut &[u8]) -> io::Result<OsString> {
    let length = take_number(bytes)?;
    let (text, rest) = bytes
        .split_at_checked(length)
        .ok_or(io::ErrorKind::UnexpectedEof)?;
    *bytes = rest;
    Ok(OsString::from_vec(text.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_arrive_whole_however_they_are_cut() {
        let start = Start {
            words: vec!["sh".into(), "-c".into(), OsString::from_vec(vec![0xff])],
            variables: vec![("RLOCK_NAME".into(), "a\nb".into())],
            foreground: true,
            kill_after: Duration::from_secs(1),
        };
        let orders = [
            Order::Until(Duration::from_nanos(17)),
            Order::Start(start),
            Order::Signal(15),
            Order::Lost,
        ];
        let sent: Vec<u8> = orders.iter().flat_map(Order::encode).collect();
        let mut inbox = Inbox::default();
        let mut read = Vec::new();
        for byte in sent {
            assert!(inbox.receive(&[byte][..]).unwrap());
            read.extend(inbox.next().unwrap());
        }
        assert_eq!(read, orders);
        assert!(!inbox.receive(&[][..]).unwrap(), "the end");
    }

    #[test]
    fn reports_come_back_as_they_were() {
        for report in [
            Report::Started(7),
            Report::NotRun(2),
            Report::Stopped(20),
            Report::Overdue,
            Report::Exited(255),
            Report::Killed(9),
        ] {
            assert_eq!(Report::decode(report.encode()).unwrap(), report);
        }
    }
}
