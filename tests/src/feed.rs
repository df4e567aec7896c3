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

/// A command as one text, its name in capitals.
fn words(command: &Reply) -> String {
    let mut words = command.texts();
    words[0] = words[0].to_uppercase();
    words.join(" ")
}
