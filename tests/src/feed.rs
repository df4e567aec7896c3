//! What a server tells its replicas and writes to its disk: the exact commands.

use std::fs;

use crate::compact::plain_commands;
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
    /// Begins to listen; what was written before is not reported.
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
    /// own words are left out, `MULTI` and `EXEC` are not. `RLOCK.APPLY` is told as those commands
    /// that it stands for.
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
        let mut news = News::default();
        loop {
            let commands = plain_commands(&self.stream.read());
            if commands == [last] {
                return news.commands;
            }
            let is_ours = ["SELECT 0", "PING", "REPLCONF", "SET rlock-tests:mark"];
            let is_ours = |command: &str| is_ours.iter().any(|own| command.starts_with(own));
            if !commands.iter().any(|command| is_ours(command)) {
                news.add(commands);
            }
        }
    }
}

/// What was propagated so far, as plain commands.
#[derive(Default)]
struct News {
    commands: Vec<String>,
    is_in_transaction: bool,
}

impl News {
    /// Adds a command that was propagated: several plain ones, of which it stands for all, are a
    /// transaction.
    fn add(&mut self, commands: Vec<String>) {
        match commands.first().map(String::as_str) {
            Some("MULTI") => self.is_in_transaction = true,
            Some("EXEC") => self.is_in_transaction = false,
            _ => {}
        }
        if commands.len() > 1 && !self.is_in_transaction {
            self.commands.push("MULTI".to_owned());
            self.commands.extend(commands);
            self.commands.push("EXEC".to_owned());
        } else {
            self.commands.extend(commands);
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
    let mut news = News::default();
    let mut at = 0;
    while let Some((command, length)) = Reply::decode(&bytes[at..]) {
        let mut commands = plain_commands(&command);
        // A message has no effect when the file is read, so it may be in it.
        if commands.len() > 1 {
            commands.retain(|command| !command.contains("PUBLISH "));
        }
        news.add(commands);
        at += length;
    }
    news.commands.retain(|command| command != "SELECT 0");
    news.commands
}
