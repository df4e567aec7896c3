//! The commands that a server sends to its replicas and writes to its disk, exactly.

use std::fs;

use crate::conn::Conn;
use crate::reply::Reply;
use crate::server::{Server, append_only_files};

/// A replica that only takes notes: the commands that the server propagates, as text.
///
/// ```no_run
/// # let server = rlock_tests::Server::start();
/// let mut feed = rlock_tests::Feed::of(&server);
/// server.run("SET k v");
/// assert_eq!(feed.news(), ["SET k v"]);
/// ```
#[derive(Debug)]
pub struct Feed {
    stream: Conn,
    primary: Conn,
    marks: u32,
}

impl Feed {
    /// Begins to listen; earlier writes are not reported.
    #[track_caller]
    pub fn of(server: &Server) -> Self {
        let mut stream = server.connect();
        stream.send("PSYNC ? -1");
        stream.read_through(b"+FULLRESYNC");
        stream.read_through(b"\r\n");
        // The snapshot: `$length` and that many bytes, after line feeds that keep us patient.
        stream.read_through(b"$");
        let length = String::from_utf8(stream.read_through(b"\r\n")).expect("a length");
        stream.read_exactly(length.trim().parse().expect("a length"));
        let mut feed = Self {
            stream,
            primary: server.connect(),
            marks: 0,
        };
        feed.news();
        feed
    }

    /// The commands since the last call, in order, one text each; `SELECT 0` and the replication's
    /// own words are left out, `MULTI` and `EXEC` are not.
    ///
    /// A mark is sent through the server: everything done before the call comes before it.
    #[track_caller]
    pub fn news(&mut self) -> Vec<String> {
        self.marks += 1;
        let mark = format!("rlock-tests:mark:{}", self.marks);
        // A server in a cluster does not replicate PUBLISH; there the mark has to be a key.
        let is_cluster = self
            .primary
            .run("INFO cluster")
            .text()
            .contains("cluster_enabled:1");
        let command = if is_cluster {
            format!("DEL {mark}")
        } else {
            format!("PUBLISH {mark} 0")
        };
        if is_cluster {
            self.primary.run(format!("SET {mark} 0"));
        }
        self.primary.run(&command);
        self.up_to(&command)
    }

    #[track_caller]
    fn up_to(&mut self, last: &str) -> Vec<String> {
        let mut news = Vec::new();
        loop {
            let command = words(&self.stream.read());
            if command == last {
                return news;
            }
            let is_ours = ["SELECT 0", "PING", "REPLCONF", "SET rlock-tests:mark"];
            if !is_ours.iter().any(|own| command.starts_with(own)) {
                news.push(command);
            }
        }
    }
}

/// The commands in the append-only file of a server that was started with `appendonly yes`, in
/// order; `SELECT 0` left out.
#[track_caller]
pub fn aof(server: &Server) -> Vec<String> {
    let mut files = append_only_files(server.directory());
    files.retain(|path| path.to_string_lossy().ends_with(".incr.aof"));
    let bytes: Vec<u8> = files
        .iter()
        .flat_map(|path| fs::read(path).expect("a file"))
        .collect();
    let mut commands = Vec::new();
    let mut at = 0;
    while let Some((command, length)) = Reply::decode(&bytes[at..]) {
        commands.push(words(&command));
        at += length;
    }
    commands.retain(|command| command != "SELECT 0");
    commands
}

/// A command as one text, its name in capitals. The hash that `RESTORE` makes is written as its
/// fields and values in brackets.
fn words(command: &Reply) -> String {
    let mut words = command.texts();
    words[0] = words[0].to_uppercase();
    if words[0] == "RESTORE"
        && let Reply::Bulk(payload) = &command.array()[3]
    {
        words[3] = format!("[{}]", restored_hash(payload).join(" "));
    }
    words.join(" ")
}

/// The fields and values of a short hash as `DUMP` tells it: the type, the length of a list, the
/// list, and ten bytes of version and checksum. Only servers check those.
#[track_caller]
fn restored_hash(payload: &[u8]) -> Vec<String> {
    let (&[kind, length], rest) = payload.split_first_chunk::<2>().expect("a payload");
    assert_eq!(kind, 16, "a hash as a listpack");
    let head = usize::from(length >= 0x40);
    let elements = rest[head + 6..].iter().copied();
    let mut bytes = elements.take(rest.len() - head - 6 - 10);
    let mut texts = Vec::new();
    loop {
        let mut next = || bytes.next().expect("an end of the list");
        let first = next();
        let number = |len: usize, next: &mut dyn FnMut() -> u8| {
            let mut number = [0; 8];
            number[8 - len..].fill_with(next);
            (i64::from_le_bytes(number) >> (8 * (8 - len))).to_string()
        };
        let text = |len: usize, next: &mut dyn FnMut() -> u8| {
            let text: Vec<u8> = (0..len).map(|_| next()).collect();
            String::from_utf8_lossy(&text).into_owned()
        };
        texts.push(match first {
            0xff => return texts,
            0..0x80 => first.to_string(),
            0x80..0xc0 => text(usize::from(first & 0x3f), &mut next),
            0xc0..0xe0 => {
                let number = i64::from(first & 0x1f) << 8 | i64::from(next());
                (number - (number >> 12 << 13)).to_string()
            }
            0xe0..=0xef => text(
                usize::from(first & 0xf) << 8 | usize::from(next()),
                &mut next,
            ),
            0xf1 => number(2, &mut next),
            0xf2 => number(3, &mut next),
            0xf3 => number(4, &mut next),
            0xf4 => number(8, &mut next),
            other => panic!("no element begins with {other:#x}"),
        });
        // The length of the element, with which a list is read backwards.
        next();
    }
}
