//! Commands as they come through a connection, and answers.

use std::io;

use bytes::{Bytes, BytesMut};
use redis_protocol::codec::Resp3;
use redis_protocol::error::RedisProtocolError;
use redis_protocol::resp3::types::BytesFrame as Frame;
use tokio_util::codec::{Decoder, Encoder};

/// Reads commands, and writes answers.
#[derive(Debug, Default)]
pub(crate) struct Resp(Resp3);

/// Bytes that cannot be read, or a frame that cannot be written.
#[derive(Debug)]
pub(crate) struct Garbled;

impl From<io::Error> for Garbled {
    fn from(_: io::Error) -> Self {
        Self
    }
}

impl From<RedisProtocolError> for Garbled {
    fn from(_: RedisProtocolError) -> Self {
        Self
    }
}

impl Encoder<Frame> for Resp {
    type Error = Garbled;

    fn encode(&mut self, answer: Frame, bytes: &mut BytesMut) -> Result<(), Garbled> {
        Ok(self.0.encode(answer, bytes)?)
    }
}

/// A command is an array of blob strings: `*2\r\n$4\r\nPING\r\n$1\r\nx\r\n`.
impl Decoder for Resp {
    type Item = Vec<Bytes>;
    type Error = Garbled;

    fn decode(&mut self, bytes: &mut BytesMut) -> Result<Option<Vec<Bytes>>, Garbled> {
        let mut rest = Rest { bytes, read: 0 };
        let Some(count) = rest.number(b'*')? else {
            return Ok(None);
        };
        let mut words = Vec::new();
        for _ in 0..count {
            match rest.word()? {
                Some(word) => words.push(word),
                None => return Ok(None),
            }
        }
        let read = rest.read;
        let command = bytes.split_to(read).freeze();
        let words = words.into_iter().map(|(from, to)| command.slice(from..to));
        Ok(Some(words.collect()))
    }
}

/// The bytes that have arrived, read up to somewhere.
struct Rest<'a> {
    bytes: &'a [u8],
    read: usize,
}

impl Rest<'_> {
    /// The number after this mark, if its line is there.
    fn number(&mut self, mark: u8) -> Result<Option<usize>, Garbled> {
        let rest = self.bytes.get(self.read..).unwrap_or_default();
        let Some(length) = rest.iter().position(|byte| *byte == b'\n') else {
            return Ok(None);
        };
        let line = rest.get(..length).and_then(|line| line.strip_suffix(b"\r"));
        let digits = line.and_then(|line| line.strip_prefix(&[mark]));
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let number = digits.and_then(|digits| digits.parse().ok());
        self.read = self.read.saturating_add(length).saturating_add(1);
        number.map(Some).ok_or(Garbled)
    }

    /// Where the next word is, if all of it is there.
    fn word(&mut self) -> Result<Option<(usize, usize)>, Garbled> {
        let Some(length) = self.number(b'$')? else {
            return Ok(None);
        };
        let word = (self.read, self.read.saturating_add(length));
        self.read = word.1.saturating_add(2);
        Ok((self.read <= self.bytes.len()).then_some(word))
    }
}
