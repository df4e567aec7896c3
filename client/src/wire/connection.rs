//! Opening the connections: one for commands, one for events, and one to wait on for replicas if
//! that is asked for.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, Pipeline, PushInfo, PushKind, RedisResult, Value};

use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use crate::error::Error;
use crate::wire::endpoint::{Address, Endpoint};
use crate::wire::reply::Handshake;
use crate::wire::request::{self, Command};

/// Opens connections to the server, wherever that is at the moment. Clones open connections of the
/// same client.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    endpoint: Endpoint,
    response_timeout: Duration,
    /// The server that was reached last.
    latest: Arc<watch::Sender<Option<Reached>>>,
}

/// A server, and where it was found.
#[derive(Clone, Debug)]
struct Reached {
    server: ServerId,
    address: String,
}

/// What the sentinels say of the server that was reached last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the primary.
    Confirmed,
    /// It has been replaced, and the connections to it are given up.
    Replaced,
    /// No majority of them agrees, or on a server that is a replica still: nothing changes.
    Unclear,
}

/// One life of one server: after a restart it is another.
///
/// Behind an address, and still more behind sentinels, there can be one server today and another
/// tomorrow, and the two connections of a client may meet different ones. What is held by the word
/// of the one is not confirmed by the other, so each connection knows to whom it speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerId {
    name: Arc<str>,
    /// Whether that is its own run id, and not only the address at which it was found.
    is_run_id: bool,
}

impl ServerId {
    /// Whether this is surely the same server in the same life: behind an address there may be
    /// another by now.
    pub(crate) fn is_surely(&self, other: &Self) -> bool {
        self.is_run_id && self == other
    }

    /// Whether this can be the same server: one that does not tell its run id can be any.
    pub(crate) fn may_be(&self, other: &Self) -> bool {
        self == other || !(self.is_run_id && other.is_run_id)
    }
}

impl Connector {
    pub(crate) fn new(endpoint: Endpoint, response_timeout: Duration) -> Self {
        Self {
            endpoint,
            response_timeout,
            latest: Arc::new(watch::Sender::new(None)),
        }
    }

    /// How long a command's reply may take.
    pub(crate) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    /// The address in the URL.
    pub(crate) fn address(&self) -> Address {
        self.endpoint.address()
    }

    /// Opens connections to another server in the same way.
    pub(crate) fn other(&self, address: &Address) -> Self {
        Self::new(self.endpoint.other(address), self.response_timeout)
    }

    /// Asks the server this one thing, on a connection of its own. A replica may answer it too.
    pub(crate) async fn ask<T>(&self, call: Command<T>) -> Result<T, Error> {
        let config = self.config(Some(self.response_timeout));
        let client = self.endpoint.find(self.response_timeout).await?;
        let opening = client.get_multiplexed_async_connection_with_config(&config);
        let mut connection = opening.await.map_err(Error::could_not_connect)?;
        let reply = connection.send_packed_command(&call.cmd).await;
        let reply = reply.map_err(|broken| Error::no_reply(Some(broken)))?;
        call.reader.read(&reply)
    }

    /// Opens a connection for commands. How long a reply may take is for the caller to watch.
    pub(crate) async fn for_commands(&self) -> Result<CommandConnection, Error> {
        let closed = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&closed);
        let config = self.config(None).set_push_sender(
            move |push: PushInfo| -> Result<(), redis::aio::SendError> {
                if push.kind == PushKind::Disconnection {
                    seen.store(true, Ordering::Relaxed);
                }
                Ok(())
            },
        );
        let (commands, peer) = self.open(config).await?;
        Ok(CommandConnection {
            commands,
            closed,
            peer,
        })
    }

    /// Opens the connection that is the session connection.
    pub(crate) async fn for_events(&self) -> Result<EventsConnection, Error> {
        let (events, peer) = self.open(self.config(None)).await?;
        Ok(EventsConnection { events, peer })
    }

    /// With room for all commands that wait to be written. Of those that have to wait for room,
    /// each is told by itself that there is some, and the later one may be the first to use it: a
    /// CANCEL or RELEASE would get before the ACQUIRE that it undoes. That they may be many costs
    /// nothing: whoever handed them over keeps them in any case.
    fn config(&self, reply_within: Option<Duration>) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new()
            .set_pipeline_buffer_size(Semaphore::MAX_PERMITS)
            .set_connection_timeout(Some(self.response_timeout))
            .set_response_timeout(reply_within)
    }

    /// Looks up where the server is and connects to it, if it is a primary.
    async fn open(
        &self,
        config: AsyncConnectionConfig,
    ) -> Result<(MultiplexedConnection, Peer), Error> {
        let client = self.endpoint.find(self.response_timeout).await?;
        let reached = self.reach(&client, config).await;
        if reached.is_err() {
            self.endpoint.forget();
        }
        let (connection, server) = reached?;
        let latest = self.latest.subscribe();
        Ok((connection, Peer { server, latest }))
    }

    /// Connects to this server, if it is a primary, and tells the other connections that it was
    /// reached last.
    async fn reach(
        &self,
        client: &redis::Client,
        config: AsyncConnectionConfig,
    ) -> Result<(MultiplexedConnection, ServerId), Error> {
        let opening = client.get_multiplexed_async_connection_with_config(&config);
        let mut connection = opening.await.map_err(Error::could_not_connect)?;
        let handshake = handshake(&mut connection, self.response_timeout).await?;
        let address = client.get_connection_info().addr().to_string();
        if handshake.is_replica {
            return Err(Error::replica(&address));
        }
        let server = ServerId {
            is_run_id: handshake.run_id.is_some(),
            name: handshake.run_id.unwrap_or_else(|| address.clone()).into(),
        };
        // The other connection, if it is to another server, was opened earlier and so by older
        // knowledge: it follows.
        let reached = Reached {
            server: server.clone(),
            address,
        };
        self.latest.send_replace(Some(reached));
        Ok((connection, server))
    }

    /// Asks the sentinels whether the server that was reached last is still the primary. If a
    /// majority names another, twice in a row, and that says so too, the connections to the old one
    /// are given up, also if it cannot be reached: what is held at the old one may be granted to
    /// others there. One that is a replica still changes nothing: it is asked about again.
    ///
    /// Sentinels that do not answer `within` this time count as silent. While the others do not
    /// agree yet, a silent one would otherwise delay the next question.
    pub(crate) async fn ask_sentinels(&self, within: Duration) -> Verdict {
        let within = self.response_timeout.min(within);
        let mut named: Option<String> = None;
        let client = loop {
            let Some(client) = self.endpoint.find_agreed(within).await else {
                return Verdict::Unclear;
            };
            let address = client.get_connection_info().addr().to_string();
            if self.is_at(&address) {
                return Verdict::Confirmed;
            }
            match named {
                Some(named) if named == address => break client,
                Some(_) => return Verdict::Unclear,
                None => named = Some(address),
            }
            sleep(AGAIN_AFTER).await;
        };
        let before = self.latest.borrow().clone();
        match self.reach(&client, self.config(None)).await {
            // The same server under another name is no other.
            Ok((_, server)) if before.is_none_or(|before| before.server == server) => {
                Verdict::Confirmed
            }
            Ok(_) => Verdict::Replaced,
            Err(error) if error.is_replica() => {
                self.endpoint.forget();
                Verdict::Unclear
            }
            Err(_) => {
                self.latest.send_replace(None);
                Verdict::Replaced
            }
        }
    }

    /// Whether the server that was reached last was found at this address.
    pub(crate) fn is_at(&self, address: &str) -> bool {
        let latest = self.latest.borrow();
        latest.as_ref().is_some_and(|one| one.address == address)
    }

    /// Where the server is to be looked for.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
}

/// Asks whom we have reached.
async fn handshake(
    connection: &mut MultiplexedConnection,
    within: Duration,
) -> Result<Handshake, Error> {
    let question = request::handshake();
    let answers = connection.send_packed_commands(&question, 0, question.len());
    let answers = timeout(within, answers).await;
    let answers = answers.map_err(|_| Error::no_reply(None))?;
    let answers = answers.map_err(Error::could_not_connect)?;
    Ok(Handshake::read(&answers))
}

/// Whom a connection has reached, and whether that is still the one to talk to.
struct Peer {
    server: ServerId,
    latest: watch::Receiver<Option<Reached>>,
}

impl Peer {
    /// Whether another connection has found another server since.
    fn is_outdated(&self) -> bool {
        !is(self.latest.borrow().as_ref(), &self.server)
    }

    /// Ends when another connection has found another server.
    async fn outdated(&mut self) {
        let Self { server, latest } = self;
        let other = latest.wait_for(|latest| !is(latest.as_ref(), server));
        if other.await.is_err() {
            // Nobody is left who could find another.
            std::future::pending::<()>().await;
        }
    }
}

/// Whether this server was reached last.
fn is(latest: Option<&Reached>, server: &ServerId) -> bool {
    latest.is_some_and(|latest| latest.server == *server)
}

/// The connection that carries the commands.
pub(crate) struct CommandConnection {
    commands: MultiplexedConnection,
    closed: Arc<AtomicBool>,
    peer: Peer,
}

impl CommandConnection {
    /// Whether the peer is known to have closed it: what is not sent then has surely not been
    /// carried out, while a command sent regardless would leave that unknown. Or whether another
    /// server has been found, by the session connection or by the word of the sentinels.
    pub(crate) fn is_over(&self) -> bool {
        self.closed.load(Ordering::Relaxed) || self.peer.is_outdated()
    }

    /// To whom it leads.
    pub(crate) fn server(&self) -> &ServerId {
        &self.peer.server
    }

    /// Sends the command and waits for its reply.
    pub(crate) fn ask(&self, command: Cmd) -> Replies<[Value; 1]> {
        let mut commands = self.commands.clone();
        Box::pin(async move {
            let reply = commands.send_packed_command(&command).await?;
            Ok([reply])
        })
    }

    /// Sends the commands in one write and waits for all replies.
    pub(crate) fn ask_all(&self, pipeline: Pipeline) -> Replies<Vec<Value>> {
        let mut commands = self.commands.clone();
        Box::pin(async move {
            let count = pipeline.len();
            commands.send_packed_commands(&pipeline, 0, count).await
        })
    }
}

/// What comes back, of which `R` are as many as were asked for. In a box: it is large, and handed
/// on a few times.
pub(crate) type Replies<R> = Pin<Box<dyn Future<Output = RedisResult<R>> + Send>>;

/// The connection that carries RLOCK.EVENTS, one call at a time. Dropping it closes the socket.
pub(crate) struct EventsConnection {
    events: MultiplexedConnection,
    peer: Peer,
}

impl EventsConnection {
    /// To whom it leads.
    pub(crate) fn server(&self) -> &ServerId {
        &self.peer.server
    }

    /// Sends the call and waits for its reply, but not if meanwhile the connection for commands
    /// finds another server. How long to wait is for the caller to say.
    pub(crate) async fn ask<T>(&mut self, call: Command<T>) -> Result<T, Error> {
        let reply = tokio::select! {
            reply = self.events.send_packed_command(&call.cmd) => reply,
            () = self.peer.outdated() => return Err(Error::elsewhere()),
        };
        let reply: Value = reply.map_err(|broken| Error::no_reply(Some(broken)))?;
        call.reader.read(&reply)
    }
}

/// Sentinels that do not agree yet are given this time to say something else: connections must not
/// go to and fro between two servers.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
