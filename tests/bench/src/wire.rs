//! A connection that costs its user as little as possible: requests are bytes made beforehand, and
//! replies are looked at line by line, where they were received.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rlock_tests::Server;

/// A request as it goes over the wire.
pub(crate) fn request(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}

/// A request, and the lines of its replies. A line that is `:` stands for any number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Step {
    pub(crate) bytes: Vec<u8>,
    pub(crate) lines: Vec<&'static str>,
}

impl Step {
    pub(crate) fn of(words: &[&str], lines: &[&'static str]) -> Self {
        Self {
            bytes: request(words),
            lines: lines.to_vec(),
        }
    }

    pub(crate) fn append(&mut self, other: Self) {
        self.bytes.extend(other.bytes);
        self.lines.extend(other.lines);
    }

    /// All of them, sent at once.
    pub(crate) fn joined(steps: impl IntoIterator<Item = Self>) -> Self {
        steps.into_iter().fold(Self::default(), |mut all, step| {
            all.append(step);
            all
        })
    }
}

/// The lines of a message on a channel.
pub(crate) const MESSAGE: usize = 7;

/// Any reply of a benchmark fits twice: more than one unread reply is rare.
const BUFFER: usize = 32 * 1024;

#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The received bytes that are not parsed yet.
    from: usize,
    to: usize,
}

impl Wire {
    pub(crate) fn open(server: &Server) -> Self {
        let stream = TcpStream::connect(server.address()).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            buffer: vec![0; BUFFER],
            from: 0,
            to: 0,
        }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Waits for more bytes.
    pub(crate) fn receive(&mut self) {
        self.buffer.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        let read = self.stream.read(&mut self.buffer[self.to..]).unwrap();
        assert!(read > 0, "the server hung up, or a reply is too long");
        self.to += read;
    }

    /// Takes the next line if it is here. An error stops the benchmark.
    pub(crate) fn line_now(&mut self) -> Option<&[u8]> {
        let here = &self.buffer[self.from..self.to];
        let len = here.iter().position(|byte| *byte == b'\n')?;
        let line = &here[..len];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        assert!(line.first() != Some(&b'-'), "{}", line.escape_ascii());
        self.from += len + 1;
        Some(line)
    }

    /// Takes the next line, and waits for it.
    pub(crate) fn line(&mut self) -> &[u8] {
        while !self.has_lines(1) {
            self.receive();
        }
        self.line_now().unwrap()
    }

    /// Whether that many lines are here.
    pub(crate) fn has_lines(&self, count: usize) -> bool {
        let here = &self.buffer[self.from..self.to];
        here.iter()
            .filter(|byte| **byte == b'\n')
            .take(count)
            .count()
            == count
    }

    /// Reads the lines of a reply. One that says anything else stops the benchmark: a lock that
    /// was not given would be counted as one that was.
    pub(crate) fn expect(&mut self, lines: &[&str]) {
        for expected in lines {
            let said = self.line();
            let fits = match *expected {
                ":" => said.first() == Some(&b':'),
                exactly => said == exactly.as_bytes(),
            };
            assert!(fits, "{expected} expected: {}", said.escape_ascii());
        }
    }

    /// Reads this number of lines and drops them.
    pub(crate) fn skip(&mut self, lines: usize) {
        for _ in 0..lines {
            self.line();
        }
    }

    pub(crate) fn carry_out(&mut self, step: &Step) {
        self.send(&step.bytes);
        self.expect(&step.lines);
    }

    /// Sends a command, and expects this reply.
    pub(crate) fn ask(&mut self, words: &[&str], lines: &[&'static str]) {
        self.carry_out(&Step::of(words, lines));
    }

    /// Lets the server run all earlier commands, of every connection.
    ///
    /// A waiter's command lies in the server's socket when PING is sent, so it is run in the same
    /// turn of the event loop at the latest, and PING is answered at the end of that turn.
    pub(crate) fn settle(&mut self) {
        self.ask(&["PING"], &["+PONG"]);
    }

    /// Loads a script and returns its name for EVALSHA.
    pub(crate) fn load(&mut self, script: &str) -> String {
        self.send(&request(&["SCRIPT", "LOAD", script]));
        self.expect(&["$40"]);
        String::from_utf8_lossy(self.line()).into_owned()
    }

    /// Subscribes to a channel.
    pub(crate) fn subscribe(&mut self, channel: &str) {
        self.send(&request(&["SUBSCRIBE", channel]));
        self.skip(6);
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
