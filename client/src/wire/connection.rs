//! Opening connections, to a primary and to what tells of it, and asking on them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Cmd, ConnectionInfo, Pipeline, RedisResult, Value};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::task::unconstrained;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::ReusableBoxFuture;

use crate::error::{Code, Error};
use crate::wire::reply::{is_replica, read_by};
use crate::wire::{Address, Dialer, Pushes, Sentinel, Socket, request};

/// Opens connections to the server, wherever that is at the moment: it is looked up before each.
/// Clones open connections of the same client.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    /// How to connect; with sentinels its host is the name of the service.
    pub(super) server: ConnectionInfo,
    /// Those that are asked where the server is.
    pub(crate) sentinels: Arc<[Sentinel]>,
    /// What a majority of the sentinels named last, as long as that can be used.
    pub(super) agreed: Arc<Mutex<Option<Address>>>,
    pub(crate) dialer: Dialer,
    /// The server that is the one to use.
    pub(super) latest: watch::Sender<Latest>,
}

/// Where the server was found, by the question that was asked last of those that found one. `None`
/// if that cannot be reached.
#[derive(Clone, Debug, Default)]
pub(super) struct Latest {
    found: Option<Arc<str>>,
    asked: Option<Instant>,
}

impl Latest {
    fn is(&self, address: &str) -> bool {
        self.found.as_deref() == Some(address)
    }
}

impl Connector {
    /// Asks the server this one thing, on a connection of its own. A replica may answer it too.
    pub(crate) async fn ask<T>(
        &self,
        cmd: Cmd,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<T, Error> {
        let client = self.find().await?;
        let limit = self.dialer.response_timeout;
        let (mut socket, _) = self.dialer.open(&client, Some(limit)).await?;
        let reply = socket.redis.send_packed_command(&cmd);
        read_by(within(limit, reply).await, read)
    }

    /// Looks up where the server is and connects to it, if it is a primary.
    pub(crate) async fn open(&self) -> Result<Connection, Error> {
        let asked = Instant::now();
        let client = self.find().await?;
        let reached = self.reach(&client, asked).await;
        reached.inspect_err(|_| self.forget())
    }

    /// Connects to this server, if it is a primary, and tells the other connections that it is the
    /// one to use.
    async fn reach(&self, client: &redis::Client, asked: Instant) -> Result<Connection, Error> {
        // Both together have the time of one answer.
        let (limit, began) = (self.dialer.response_timeout, Instant::now());
        let (mut socket, pushes) = self.dialer.open(client, Some(limit)).await?;
        let hello = request::hello(self.dialer.label.as_deref());
        let answer = socket.redis.send_packed_command(&hello);
        let answer = within(limit.saturating_sub(began.elapsed()), answer).await;
        let answer = answer.map_err(Error::unasked)?;
        let address: Arc<str> = client.get_connection_info().addr().to_string().into();
        if is_replica(&answer) {
            return Err(Error::from_text(&format!(
                "READONLY the server at {address} is a replica"
            )));
        }
        self.has_found(Some(Arc::clone(&address)), asked);
        if !self.latest.borrow().is(&address) {
            return Err(Error::elsewhere());
        }
        Ok(Connection {
            socket,
            pushes,
            address,
            latest: self.latest.subscribe(),
        })
    }

    /// What a question has found that was asked then. A connection to another server that was
    /// opened by older knowledge follows; if newer knowledge has come meanwhile, while the server
    /// was slow to answer, it is this one that does.
    fn has_found(&self, found: Option<Arc<str>>, asked: Instant) {
        self.latest.send_if_modified(|latest| {
            let asked = Some(asked);
            let is_news = asked >= latest.asked;
            if is_news {
                *latest = Latest { found, asked };
            }
            is_news
        });
    }

    /// Asks the sentinels whether the server that was reached last is still the primary. If a
    /// majority names another, twice in a row, and that says so too, the connections to the old one
    /// are given up, also if it cannot be reached: what is held at the old one may be granted to
    /// others there. One that is a replica still changes nothing: it is asked about again.
    ///
    /// Sentinels that do not answer `within` this time count as silent. While the others do not
    /// agree yet, a silent one would otherwise delay the next question.
    ///
    /// Whether the server was given up for another.
    pub(crate) async fn ask_sentinels(&self, within: Duration) -> bool {
        let (within, asked) = (self.dialer.response_timeout.min(within), Instant::now());
        let client = self.named_otherwise(within).await;
        let Some(client) = client else { return false };
        let before = self.latest.borrow().clone();
        // While nothing is in use, whoever connects asks too, and has the time of a reply for one
        // that stands still. Waited for here as well, it would put off the next question, and be
        // in use when it goes on as a primary that was replaced meanwhile.
        let limit = before.found.is_none().then_some(within);
        let reached = timeout(limit.unwrap_or(Duration::MAX), self.reach(&client, asked));
        match reached.await {
            Err(_) => false,
            Ok(Ok(there)) => before.found.is_some() && !before.is(&there.address),
            Ok(Err(error)) if error.code() == Code::ReadOnly => {
                self.forget();
                false
            }
            Ok(Err(_)) => {
                self.has_found(None, asked);
                true
            }
        }
    }

    /// The server that a majority names twice in a row, if it is not the one that was reached last.
    async fn named_otherwise(&self, within: Duration) -> Option<redis::Client> {
        let other = async || {
            // However late each of them answers within this time.
            let (named, by_most) = self.primary(within, within).await.ok()?;
            (by_most && !self.is_at(&named)).then_some(named)
        };
        let first = other().await?;
        sleep(AGAIN_AFTER).await;
        let again = other().await.filter(|again| *again == first)?;
        self.client_of(&again).ok()
    }

    /// Whether the server that was reached last was found at this address.
    pub(crate) fn is_at(&self, address: &Address) -> bool {
        let latest = self.latest.borrow();
        latest.is(&self.other(address).shown())
    }
}

/// What is answered, if that comes within this time.
pub(super) async fn within<T>(
    limit: Duration,
    reply: impl Future<Output = RedisResult<T>>,
) -> Result<T, Error> {
    let reply = timeout(limit, reply).await;
    let reply = reply.map_err(|_| Error::no_reply(None))?;
    reply.map_err(|broken| Error::no_reply(Some(broken)))
}

/// A connection to a primary. Dropping it closes the socket.
pub(crate) struct Connection {
    socket: Socket,
    /// Nothing comes by it, but it ends with the connection.
    pushes: Pushes,
    /// Where it leads.
    address: Arc<str>,
    latest: watch::Receiver<Latest>,
}

/// Commands that are sent in one write, and kept to be sent again.
pub(crate) enum Batch {
    /// All there is if only one task locks; a pipeline of one would cost more.
    One(Cmd),
    /// With the places of the `ASKING`s in it.
    Many(Pipeline, Vec<usize>),
}

impl Batch {
    /// Each command, and whether it goes behind an `ASKING`.
    pub(crate) fn new(mut calls: impl ExactSizeIterator<Item = (Cmd, bool)>) -> Self {
        let mut first = calls.next();
        if calls.len() == 0
            && let Some((cmd, _)) = first.take_if(|(_, asking)| !*asking)
        {
            return Self::One(cmd);
        }
        let mut pipeline = Pipeline::with_capacity(calls.len().saturating_add(2));
        let mut asked = Vec::new();
        for (cmd, asking) in first.into_iter().chain(calls) {
            if asking {
                asked.push(pipeline.len());
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(cmd);
        }
        Self::Many(pipeline, asked)
    }

    /// The commands, without the `ASKING`s.
    pub(crate) fn cmds(&self) -> Vec<Cmd> {
        match self {
            Self::One(cmd) => vec![cmd.clone()],
            Self::Many(pipeline, asked) => {
                let all = pipeline.cmd_iter().enumerate();
                let cmds = all.filter(|(place, _)| !asked.contains(place));
                cmds.map(|(_, cmd)| cmd.clone()).collect()
            }
        }
    }
}

impl Connection {
    /// Whether the peer is known to have closed it, or another server has been found, by another
    /// connection or by the word of the sentinels.
    pub(crate) fn is_over(&self) -> bool {
        self.pushes.is_closed() || !self.latest.borrow().is(&self.address)
    }

    /// Ends when it is over.
    pub(crate) async fn over(&mut self) {
        let is_other = |latest: &Latest| !latest.is(&self.address);
        tokio::select! {
            _ = self.latest.wait_for(is_other) => {}
            () = async { while self.pushes.recv().await.is_some() {} } => {}
        }
    }

    /// Sends these in one write and waits for the reply to each. `spare` is what an earlier one has
    /// left, and is used again.
    pub(crate) fn ask(&self, batch: Arc<Batch>, spare: Option<Replies>) -> Replies {
        let mut redis = self.socket.clone();
        let all = async move {
            let redis = &mut redis.redis;
            let replies: RedisResult<Values> = match &*batch {
                Batch::One(cmd) => redis
                    .send_packed_command(cmd)
                    .await
                    .map(|one| smallvec![one]),
                Batch::Many(pipeline, asked) => {
                    let count = pipeline.len();
                    let replies = redis.send_packed_commands(pipeline, 0, count).await;
                    replies.map(|mut replies| {
                        let mut places = 0..count;
                        let is_told = |place: usize| !asked.contains(&place);
                        replies.retain(|_| places.next().is_none_or(is_told));
                        replies.into()
                    })
                }
            };
            replies.map_err(|broken| Error::no_reply(Some(broken)))
        };
        replies(unconstrained(all), spare)
    }

    /// The same for one.
    pub(crate) fn ask_one(&self, cmd: Cmd) -> Replies {
        self.ask(Arc::new(Batch::One(cmd)), None)
    }
}

/// What comes back, as many as were asked for. In a box: it is large, and handed on a few times.
/// Unconstrained, because a first poll that is put off for lack of budget would leave the place in
/// the connection's line open.
pub(crate) type Replies = ReusableBoxFuture<'static, Answered>;

fn replies(
    work: impl Future<Output = Answered> + Send + 'static,
    spare: Option<Replies>,
) -> Replies {
    let Some(mut spare) = spare else {
        return ReusableBoxFuture::new(work);
    };
    spare.set(work);
    spare
}

pub(crate) type Values = SmallVec<[Value; 1]>;

/// The replies to a batch; they come together or not at all.
pub(crate) type Answered = Result<Values, Error>;

/// Sentinels that do not agree yet are given this time to say something else: connections must not
/// go to and fro between two servers.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_secs(10);

    /// Answers as told, and what it is asked at first as a primary does, until it is told to `QUIT`
    /// or nobody is left. What it was asked.
    pub(crate) async fn serve(
        socket: TcpStream,
        answer: impl Fn(&[String]) -> String,
    ) -> Vec<String> {
        let mut socket = BufReader::new(socket);
        let mut asked = Vec::new();
        let mut line = String::new();
        while asked.last().is_none_or(|last| last != "QUIT") {
            let mut words = Vec::new();
            line.clear();
            if socket.read_line(&mut line).await.unwrap_or_default() == 0 {
                break;
            }
            let count: usize = line.trim_start_matches('*').trim().parse().expect("words");
            for _ in 0..count {
                line.clear();
                socket.read_line(&mut line).await.expect("a length");
                let length: usize = line.trim_start_matches('$').trim().parse().expect("one");
                let mut word = vec![0; length.saturating_add(2)];
                socket.read_exact(&mut word).await.expect("a word");
                words.push(String::from_utf8_lossy(&word).trim().to_owned());
            }
            let reply = match words[0].as_str() {
                "HELLO" => "%1\r\n$4\r\nrole\r\n$6\r\nmaster\r\n".to_owned(),
                "CLIENT" | "ASKING" | "QUIT" => "+OK\r\n".to_owned(),
                _ => answer(&words),
            };
            socket.write_all(reply.as_bytes()).await.expect("it reads");
            asked.push(words.join(" "));
        }
        asked
    }

    fn call(words: &str, asking: bool) -> (Cmd, bool) {
        let mut cmd = Cmd::new();
        cmd.arg(words.split(' ').collect::<Vec<_>>());
        (cmd, asking)
    }

    #[tokio::test]
    async fn an_asking_goes_before_its_command_and_what_it_is_answered_is_told_to_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("redis://{}", listener.local_addr().expect("a port"));
        let server = tokio::spawn(async move {
            let (socket, _) = listener.accept().await.expect("it connects");
            serve(socket, |words| format!(":{}\r\n", words[1])).await
        });
        let connector = Connector::new(&url, &[], &Dialer::within(LIMIT));
        let connection = connector.expect("a URL").open().await.expect("a primary");
        for asking in [
            &[false][..],
            &[true],
            &[false, false],
            &[true, false, true, true, false],
        ] {
            let calls = (0..).zip(asking);
            let calls: Vec<_> = calls
                .map(|(number, asking)| call(&format!("ECHO {number}"), *asking))
                .collect();
            let batch = Arc::new(Batch::new(calls.into_iter()));
            assert_eq!(batch.cmds().len(), asking.len());
            let replies = timeout(LIMIT, connection.ask(batch, None)).await;
            let replies = replies.expect("in time");
            let numbers = (0..).take(asking.len()).map(Value::Int);
            assert_eq!(
                replies.expect("replies").to_vec(),
                numbers.collect::<Vec<_>>()
            );
        }
        assert!(!connection.is_over());
        let replies = timeout(LIMIT, connection.ask_one(call("QUIT", false).0)).await;
        let replies = replies.expect("in time").expect("replies");
        assert_eq!(replies.to_vec(), [Value::Okay]);
        let asked = server.await.expect("it ends");
        let asked: Vec<_> = asked.iter().map(String::as_str).collect();
        let asked = asked
            .rsplit(|words| words.starts_with("HELLO") || words.starts_with("CLIENT"))
            .next();
        let expected = "ECHO 0, ASKING, ECHO 0, ECHO 0, ECHO 1, \
            ASKING, ECHO 0, ECHO 1, ASKING, ECHO 2, ASKING, ECHO 3, ECHO 4, QUIT";
        assert_eq!(asked.expect("commands").join(", "), expected);
        let closed = async {
            while !connection.is_over() {
                tokio::task::yield_now().await;
            }
        };
        timeout(LIMIT, closed)
            .await
            .expect("it is known to be closed");
    }
}
