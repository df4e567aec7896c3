//! One connection to a server.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use crate::eventually::patience;
use crate::reply::Reply;

/// A connection that sends given commands, and waits with a deadline for the replies.
///
/// Commands are bytes and replies are [`Reply`]; `send` and `read` are apart, since a command that
/// waits in the server has no reply yet. Nothing is hidden: no retries, no reconnects.
#[derive(Debug)]
pub struct Conn {
    stream: TcpStream,
    address: SocketAddr,
    received: Vec<u8>,
    decoded_up_to: usize,
}

/// How long a reply may take before the test has failed.
const REPLY_DEADLINE: Duration = Duration::from_secs(20);

impl Conn {
    /// Connects to a server.
    ///
    /// # Errors
    /// The server does not accept the connection.
    pub fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            address,
            received: Vec::new(),
            decoded_up_to: 0,
        })
    }

    /// The same connection, speaking RESP3 from now on.
    #[must_use]
    #[track_caller]
    pub fn resp3(mut self) -> Self {
        assert_eq!(self.run("HELLO 3").get("proto"), &3);
        self
    }

    /// Sends the words of `command` and waits for the reply.
    #[track_caller]
    pub fn run(&mut self, command: impl AsRef<str>) -> Reply {
        self.send(command);
        self.read()
    }

    /// Sends a command whose arguments are any bytes, and waits for the reply.
    #[track_caller]
    pub fn cmd(&mut self, arguments: &[impl AsRef<[u8]>]) -> Reply {
        self.send_cmd(arguments);
        self.read()
    }

    /// Sends the words of `command`.
    #[track_caller]
    pub fn send(&mut self, command: impl AsRef<str>) {
        let words: Vec<&str> = command.as_ref().split_ascii_whitespace().collect();
        self.send_cmd(&words);
    }

    /// Sends a command whose arguments are any bytes.
    #[track_caller]
    pub fn send_cmd(&mut self, arguments: &[impl AsRef<[u8]>]) {
        self.send_bytes(&encode(arguments));
    }

    /// Sends bytes as they are.
    #[track_caller]
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.stream
            .write_all(bytes)
            .expect("the server reads what it is sent");
    }

    /// Sends all commands in one write, so that the server meets them in one turn of its event
    /// loop, and waits for their replies.
    #[track_caller]
    pub fn pipeline(&mut self, commands: &[impl AsRef<str>]) -> Vec<Reply> {
        self.send_all(commands);
        commands.iter().map(|_| self.read()).collect()
    }

    /// Sends all commands in one write.
    #[track_caller]
    pub fn send_all(&mut self, commands: &[impl AsRef<str>]) {
        self.send_bytes(&encode_all(commands));
    }

    /// [`Conn::send_all`] to a server that may be dead.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn try_send_all(&mut self, commands: &[impl AsRef<str>]) -> std::io::Result<()> {
        self.stream.write_all(&encode_all(commands))
    }

    /// Waits for the next reply.
    #[track_caller]
    pub fn read(&mut self) -> Reply {
        self.read_within(patience(REPLY_DEADLINE))
    }

    /// Waits for the next reply, at most this long.
    #[track_caller]
    pub fn read_within(&mut self, deadline: Duration) -> Reply {
        self.try_read(deadline)
            .unwrap_or_else(|e| panic!("no reply within {deadline:?}: {e}"))
    }

    /// [`Conn::run`] on a server that may die while it is asked.
    ///
    /// # Errors
    /// The connection is closed, or the deadline of a reply has passed.
    pub fn try_run(&mut self, command: &str) -> std::io::Result<Reply> {
        self.try_send(command)?;
        self.try_read(patience(REPLY_DEADLINE))
    }

    /// [`Conn::send`] to a server that may be dead.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn try_send(&mut self, command: &str) -> std::io::Result<()> {
        let words: Vec<&str> = command.split(' ').collect();
        self.stream.write_all(&encode(&words))
    }

    /// [`Conn::read_within`] from a server that may die meanwhile.
    ///
    /// # Errors
    /// The connection is closed, or the deadline has passed.
    pub fn try_read(&mut self, deadline: Duration) -> std::io::Result<Reply> {
        self.stream.set_read_timeout(Some(deadline))?;
        loop {
            if let Some((reply, _)) = self.decoded() {
                return Ok(reply);
            }
            if self.receive()? == 0 {
                return Err(std::io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "connection closed",
                ));
            }
        }
    }

    /// Sends the words of `command` and returns the bytes of the reply as they came.
    #[track_caller]
    pub fn raw(&mut self, command: impl AsRef<str>) -> String {
        let before = self.received.len();
        assert_eq!(
            before, self.decoded_up_to,
            "an earlier reply has not been read"
        );
        self.received.clear();
        self.decoded_up_to = 0;
        self.run(command);
        String::from_utf8_lossy(&self.received[..self.decoded_up_to]).into_owned()
    }

    /// The server has had its chance to reply, and has not.
    #[track_caller]
    pub fn expect_nothing_yet(&mut self) {
        self.settle();
        if let Some(reply) = self.read_now() {
            panic!("a reply too early: {reply:?}");
        }
    }

    /// Waits until the server has run all earlier commands, of every connection.
    ///
    /// Two round trips of another connection are two turns of the server's event loop: a reply that
    /// was due at the first would be here after the second.
    #[track_caller]
    pub fn settle(&self) {
        let mut other = Self::open(self.address).expect("one more connection");
        for _ in 0..2 {
            assert_eq!(other.run("PING"), "PONG");
        }
    }

    /// The next reply, which must come within a few turns of the server's event loop: it waits for
    /// no clock, however slow the machine is.
    #[track_caller]
    pub fn read_promptly(&mut self) -> Reply {
        for _ in 0..25 {
            self.settle();
            if let Some(reply) = self.read_now() {
                return reply;
            }
        }
        panic!("no reply within fifty turns of the event loop");
    }

    /// The next reply, if it is here already.
    #[track_caller]
    pub fn read_now(&mut self) -> Option<Reply> {
        self.stream.set_nonblocking(true).expect("a socket");
        let received = self.receive();
        self.stream.set_nonblocking(false).expect("a socket");
        match received {
            Ok(0) => panic!("the server closed the connection"),
            Err(error) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
            _ => self.decoded().map(|(reply, _)| reply),
        }
    }

    /// Waits for the server to close the connection; replies before that are returned.
    #[track_caller]
    pub fn read_to_end(&mut self) -> Vec<Reply> {
        self.stream
            .set_read_timeout(Some(patience(REPLY_DEADLINE)))
            .expect("a deadline");
        loop {
            match self.receive() {
                Ok(0) => break,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Ok(_) => {}
                Err(error) => panic!("the connection stays open: {error}"),
            }
        }
        std::iter::from_fn(|| self.decoded().map(|(reply, _)| reply)).collect()
    }

    /// Takes the free lock `name` for `owner` with a lease of 30 s, and returns the token.
    #[track_caller]
    pub fn take(&mut self, name: &str, owner: &str) -> i64 {
        let (count, token) = self
            .run(format!("RLOCK.ACQUIRE {name} {owner} 30000"))
            .held();
        assert_eq!(count, 1, "{name} was {owner}'s already");
        token
    }

    /// Releases one hold of `owner` on `name`, and returns how many are left.
    #[track_caller]
    pub fn let_go(&mut self, name: &str, owner: &str) -> i64 {
        self.run(format!("RLOCK.RELEASE {name} {owner}")).int()
    }

    /// Puts `owner` in the queue of the lock `name`, for the session and without limit, and returns
    /// its place.
    #[track_caller]
    pub fn queue(&mut self, name: &str, owner: &str, session: &str) -> i64 {
        let wait = format!("RLOCK.ACQUIRE {name} {owner} 30000 QUEUE 0 SESSION {session}");
        self.run(wait).queued()
    }

    /// The [events](Reply::events) of the session that this connection was not told yet. One reply
    /// may have only a part of them.
    #[track_caller]
    pub fn all_events(&mut self, session: &str) -> Vec<(String, Reply)> {
        let told = || self.run(format!("RLOCK.EVENTS {session}")).events();
        let replies = std::iter::repeat_with(told);
        replies
            .take_while(|events| !events.is_empty())
            .flatten()
            .collect()
    }

    /// Takes the free lock `name` for `owner` and the session, with a lease of 30 s, and returns
    /// the token.
    #[track_caller]
    pub fn take_for(&mut self, name: &str, owner: &str, session: &str) -> i64 {
        let acquire = format!("RLOCK.ACQUIRE {name} {owner} 30000 SESSION {session}");
        let (count, token) = self.run(acquire).held();
        assert_eq!(count, 1, "{name} was {owner}'s already");
        token
    }

    /// The server's number for this connection.
    #[track_caller]
    pub fn id(&mut self) -> i64 {
        self.run("CLIENT ID").int()
    }

    /// Shuts the socket: the server sees its client go.
    ///
    /// Dropping it may come too late for that: a process that another test is just starting has a
    /// copy of every socket until it runs its program.
    pub fn close(self) {
        // The server may have been quicker, and then there is nothing to shut.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Bytes that are not a reply, up to and with `end`: the beginning of a replication stream.
    pub(crate) fn read_through(&mut self, end: &[u8]) -> Vec<u8> {
        let window = end.len();
        loop {
            let rest = &self.received[self.decoded_up_to..];
            if let Some(at) = rest.windows(window).position(|bytes| bytes == end) {
                return self.consume(at + window);
            }
            self.receive_some();
        }
    }

    /// That many bytes which are not a reply.
    pub(crate) fn read_exactly(&mut self, count: usize) -> Vec<u8> {
        while self.received.len() < self.decoded_up_to + count {
            self.receive_some();
        }
        self.consume(count)
    }

    fn consume(&mut self, count: usize) -> Vec<u8> {
        let from = self.decoded_up_to;
        self.decoded_up_to += count;
        self.received[from..from + count].to_vec()
    }

    fn receive_some(&mut self) {
        self.stream
            .set_read_timeout(Some(patience(REPLY_DEADLINE)))
            .expect("a deadline");
        assert!(
            self.receive().expect("more bytes") > 0,
            "the server closed the connection"
        );
    }

    fn decoded(&mut self) -> Option<(Reply, usize)> {
        let found = Reply::decode(&self.received[self.decoded_up_to..])?;
        self.decoded_up_to += found.1;
        Some(found)
    }

    fn receive(&mut self) -> std::io::Result<usize> {
        if self.decoded_up_to == self.received.len() {
            self.received.clear();
            self.decoded_up_to = 0;
        }
        let mut chunk = [0; 16 * 1024];
        let count = loop {
            match self.stream.read(&mut chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => break result?,
            }
        };
        self.received.extend_from_slice(&chunk[..count]);
        Ok(count)
    }
}

fn encode_all(commands: &[impl AsRef<str>]) -> Vec<u8> {
    let words = |command: &str| encode(&command.split_ascii_whitespace().collect::<Vec<_>>());
    let encoded = commands.iter().flat_map(|command| words(command.as_ref()));
    encoded.collect()
}

fn encode(arguments: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments.iter().map(AsRef::as_ref) {
        bytes.extend(format!("${}\r\n", argument.len()).bytes());
        bytes.extend(argument);
        bytes.extend(b"\r\n");
    }
    bytes
}
