//! Opening connections, to a primary and to what tells of it, and asking on them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{ConnectionInfo, Pipeline, RedisResult, Value};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::task::unconstrained;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::ReusableBoxFuture;

use crate::error::Error;
use crate::wire::reply::read_handshake;
use crate::wire::{Address, Call, ClientId, Command, Dialer, Former, Pushes, Socket, request};

/// Opens connections to the server, wherever that is at the moment: it is looked up before each.
/// Clones open connections of the same client.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    /// How to connect; with sentinels its host is the name of the service.
    pub(super) server: ConnectionInfo,
    /// Those that are asked where the server is.
    pub(crate) sentinels: Arc<[redis::Client]>,
    /// What a majority of the sentinels named last, as long as that can be used.
    pub(super) agreed: Arc<Mutex<Option<Address>>>,
    pub(crate) dialer: Dialer,
    /// The server that is the one to use.
    pub(super) latest: watch::Sender<Latest>,
    /// What the client has opened before.
    pub(super) former: Former,
}

/// A server, and where it was found, by the question that was asked last of those that found one.
/// `None` if that cannot be reached.
#[derive(Clone, Debug, Default)]
pub(super) struct Latest {
    server: Option<(ServerId, String)>,
    asked: Option<Instant>,
}

impl Latest {
    fn is(&self, server: &ServerId) -> bool {
        self.server.as_ref().is_some_and(|(one, _)| one == server)
    }
}

/// One life of one server: after a restart it is another.
///
/// Behind an address, and still more behind sentinels, there can be one server today and another
/// tomorrow, and the two connections of a client may meet different ones. What is held by the word
/// of the one is not confirmed by the other, so each connection knows to whom it speaks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ServerId {
    RunId(Arc<str>),
    /// It does not tell its run id: at which address it was found.
    At(Arc<str>),
}

impl ServerId {
    /// Whether this is surely the same server in the same life: behind an address there may be
    /// another by now.
    pub(crate) fn is_surely(&self, other: &Self) -> bool {
        matches!(self, Self::RunId(_)) && self == other
    }
}

impl Connector {
    /// Asks the server this one thing, on a connection of its own. A replica may answer it too.
    pub(crate) async fn ask<T>(&self, command: Command<T>) -> Result<T, Error> {
        let client = self.find().await?;
        let limit = self.dialer.response_timeout;
        let (mut socket, _) = self.dialer.open(&client, Some(limit)).await?;
        let reply = socket.redis.send_packed_command(&command.call.cmd);
        let reply = within(limit, reply).await?;
        command.reader.read(&reply)
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
        let asked_for = request::handshake(self.dialer.label.as_deref());
        let (redis, count) = (&mut socket.redis, asked_for.len());
        let answers = redis.send_packed_commands(&asked_for, 0, count);
        let answers = within(limit.saturating_sub(began.elapsed()), answers).await;
        let answers = answers.map_err(Error::unasked)?;
        let address = client.get_connection_info().addr().to_string();
        let (is_replica, client_id, run_id) = read_handshake(&answers);
        if is_replica {
            let readonly = format!("READONLY the server at {address} is a replica");
            return Err(Error::unavailable(readonly));
        }
        let server = match run_id {
            Some(run_id) => ServerId::RunId(run_id.into()),
            None => ServerId::At(address.as_str().into()),
        };
        self.has_found(Some((server.clone(), address)), asked);
        if !self.latest.borrow().is(&server) {
            return Err(Error::elsewhere());
        }
        Ok(Connection {
            socket,
            pushes,
            server,
            client_id,
            latest: self.latest.subscribe(),
        })
    }

    /// What a question has found that was asked then. A connection to another server that was
    /// opened by older knowledge follows; if newer knowledge has come meanwhile, while the server
    /// was slow to answer, it is this one that does.
    fn has_found(&self, server: Option<(ServerId, String)>, asked: Instant) {
        self.latest.send_if_modified(|latest| {
            let asked = Some(asked);
            let is_news = asked >= latest.asked;
            if is_news {
                *latest = Latest { server, asked };
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
        let limit = before.server.is_none().then_some(within);
        let reached = timeout(limit.unwrap_or(Duration::MAX), self.reach(&client, asked));
        match reached.await {
            Err(_) => false,
            // The same server under another name is no other.
            Ok(Ok(there)) => before.server.is_some() && !before.is(&there.server),
            Ok(Err(error)) if error.has_code("READONLY") => {
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
        let found = latest.server.as_ref();
        found.is_some_and(|(_, found)| *found == self.other(address).shown())
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
    /// To whom it leads.
    pub(crate) server: ServerId,
    pub(super) client_id: Option<u64>,
    latest: watch::Receiver<Latest>,
}

impl Connection {
    /// Which client it is there, if the server says so.
    pub(crate) fn id(&self) -> Option<ClientId> {
        Some((self.server.clone(), self.client_id?))
    }

    /// Whether the peer is known to have closed it: what is not sent then has surely not been
    /// carried out, while a command sent regardless would leave that unknown. Or whether another
    /// server has been found, by another connection or by the word of the sentinels.
    pub(crate) fn is_over(&self) -> bool {
        self.pushes.is_closed() || !self.latest.borrow().is(&self.server)
    }

    /// Sends the calls in one write and waits for the reply to each. `spare` is what an earlier one
    /// has left, and is used again.
    pub(crate) fn ask(
        &self,
        calls: impl ExactSizeIterator<Item = Call>,
        spare: Option<Replies>,
    ) -> Replies {
        let mut socket = self.socket.clone();
        let mut calls = calls.peekable();
        if calls.len() == 1
            && let Some(Call { cmd, .. }) = calls.next_if(|call| !call.asking)
        {
            // All there is if only one task locks; a pipeline of one would cost more.
            let reply = async move { Ok(smallvec![socket.redis.send_packed_command(&cmd).await?]) };
            return replies(unconstrained(reply), spare);
        }
        let mut pipeline = Pipeline::with_capacity(calls.len());
        let mut asked = Vec::new();
        for call in calls {
            if call.asking {
                asked.push(pipeline.len());
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(call.cmd);
        }
        let all = async move {
            let count = pipeline.len();
            let replies = socket.redis.send_packed_commands(&pipeline, 0, count);
            let mut replies = replies.await?;
            let mut places = 0..count;
            replies.retain(|_| places.next().is_none_or(|place| !asked.contains(&place)));
            Ok(replies.into())
        };
        replies(unconstrained(all), spare)
    }

    /// Sends the call, with these behind it in one write, and waits for its reply, but not if
    /// meanwhile another connection finds another server. How long to wait is for the caller to
    /// say.
    pub(crate) async fn ask_here<T>(
        &mut self,
        command: Command<T>,
        behind: Vec<Call>,
    ) -> Result<T, Error> {
        let calls: Vec<_> = std::iter::once(command.call).chain(behind).collect();
        let replies = self.ask(calls.into_iter(), None);
        let is_other = |latest: &Latest| !latest.is(&self.server);
        let replies = tokio::select! {
            replies = replies => replies,
            // Without a sender nobody is left who could find another.
            Ok(_) = self.latest.wait_for(is_other) => return Err(Error::elsewhere()),
        };
        let replies = replies.map_err(|broken| Error::no_reply(Some(broken)))?;
        let reply = replies.first().ok_or_else(|| Error::no_reply(None))?;
        command.reader.read(reply)
    }
}

/// What comes back, as many as were asked for. In a box: it is large, and handed on a few times.
/// Unconstrained, because a first poll that is put off for lack of budget would leave the place in
/// the connection's line open.
pub(crate) type Replies = ReusableBoxFuture<'static, RedisResult<Values>>;

fn replies(
    work: impl Future<Output = RedisResult<Values>> + Send + 'static,
    spare: Option<Replies>,
) -> Replies {
    let Some(mut spare) = spare else {
        return ReusableBoxFuture::new(work);
    };
    spare.set(work);
    spare
}

pub(crate) type Values = SmallVec<[Value; 1]>;

/// Sentinels that do not agree yet are given this time to say something else: connections must not
/// go to and fro between two servers.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use redis::Cmd;
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
                "INFO" => "$12\r\nrun_id:one\r\n\r\n".to_owned(),
                "CLIENT" | "ASKING" | "QUIT" => "+OK\r\n".to_owned(),
                _ => answer(&words),
            };
            socket.write_all(reply.as_bytes()).await.expect("it reads");
            asked.push(words.join(" "));
        }
        asked
    }

    fn call(words: &str, asking: bool) -> Call {
        let mut cmd = Cmd::new();
        cmd.arg(words.split(' ').collect::<Vec<_>>());
        let mut call = request::slots().call;
        (call.cmd, call.asking) = (cmd, asking);
        call
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
        assert_eq!(connection.server, ServerId::RunId("one".into()));
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
            let replies = within(LIMIT, connection.ask(calls.into_iter(), None)).await;
            let numbers = (0..).take(asking.len()).map(Value::Int);
            assert_eq!(
                replies.expect("replies").to_vec(),
                numbers.collect::<Vec<_>>()
            );
        }
        assert!(!connection.is_over());
        let quit = [call("QUIT", false)].into_iter();
        let replies = within(LIMIT, connection.ask(quit, None)).await;
        assert_eq!(replies.expect("replies").to_vec(), [Value::Okay]);
        let asked = server.await.expect("it ends");
        let asked: Vec<_> = asked.iter().map(String::as_str).collect();
        let asked = asked.rsplit(|words| words.starts_with("INFO")).next();
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
