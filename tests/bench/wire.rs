//! A connection that costs its user as little as possible: requests are bytes made beforehand, and
//! replies are looked at line by line, where they were received.

use std::io::{Read, Write};
use std::net::TcpStream;

use rlock_tests::Server;

/// A request as it goes over the wire.
pub(crate) fn request(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}

pub(crate) struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Wire {
    pub(crate) fn open(server: &Server) -> Self {
        let stream = TcpStream::connect(server.address()).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            buffer: vec![0; 64 * 1024],
        }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Reads that many lines, or several times as many if they are here already, and returns them.
    /// An error reply stops the benchmark.
    #[allow(clippy::naive_bytecount, reason = "replies are short")]
    pub(crate) fn lines(&mut self, count: usize) -> &[u8] {
        let mut len = 0;
        let mut seen = 0;
        // A message that has come only half is waited for: its rest would pass for the next one.
        while seen < count || seen % count != 0 {
            let read = self.stream.read(&mut self.buffer[len..]).unwrap();
            assert!(read > 0, "the server hung up");
            seen += self.buffer[len..len + read]
                .iter()
                .filter(|byte| **byte == b'\n')
                .count();
            len += read;
        }
        let reply = &self.buffer[..len];
        assert!(
            reply[0] != b'-' && !reply.windows(2).any(|pair| pair == b"\n-"),
            "{}",
            reply.escape_ascii()
        );
        reply
    }

    /// Reads the lines of a reply. One that says anything else stops the benchmark: a lock that
    /// was not given would be counted as one that was. `:` stands for any number.
    pub(crate) fn expect<'a>(&mut self, lines: impl ExactSizeIterator<Item = &'a str>) {
        let reply = self.lines(lines.len());
        let said = reply.split(|byte| *byte == b'\n');
        for (said, expected) in said.zip(lines) {
            let said = said.strip_suffix(b"\r").unwrap_or(said);
            let fits = match expected {
                ":" => said.first() == Some(&b':'),
                exactly => said == exactly.as_bytes(),
            };
            assert!(fits, "{expected} expected: {}", reply.escape_ascii());
        }
    }

    pub(crate) fn ask(&mut self, words: &[&str], lines: usize) -> &[u8] {
        self.send(&request(words));
        self.lines(lines)
    }
}

/// Loads a script and returns its name for EVALSHA.
pub(crate) fn load(wire: &mut Wire, script: &str) -> String {
    let reply = wire.ask(&["SCRIPT", "LOAD", script], 2);
    String::from_utf8_lossy(reply)
        .lines()
        .nth(1)
        .unwrap()
        .to_owned()
}
