//! Opening the two connections: one for commands, one for events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    AsyncConnectionConfig, IntoConnectionInfo, Pipeline, ProtocolVersion, PushInfo, PushKind,
    RedisResult, Value,
};

use tokio::time::timeout;

use crate::command::Command;
use crate::error::Error;

/// Knows where the server is.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    client: redis::Client,
    response_timeout: Duration,
}

impl Connector {
    /// Reads the URL; no I/O.
    pub(crate) fn new(url: &str, response_timeout: Duration) -> Result<Self, Error> {
        let info = url
            .into_connection_info()
            .map_err(Error::could_not_connect)?;
        // The server, too, learns by it that a peer has vanished, and ends its session.
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE);
        let settings = TcpSettings::default()
            .set_nodelay(true)
            .set_keepalive(keepalive);
        // Only with RESP3 does the library tell when a connection has closed.
        let redis = info
            .redis_settings()
            .clone()
            .set_protocol(ProtocolVersion::RESP3);
        let info = info.set_redis_settings(redis).set_tcp_settings(settings);
        let client = redis::Client::open(info);
        Ok(Self {
            client: client.map_err(Error::could_not_connect)?,
            response_timeout,
        })
    }

    /// How long a command's reply may take.
    pub(crate) fn response_timeout(&self) -> Duration {
        self.response_timeout
    }

    /// Opens the connection that carries the commands.
    pub(crate) async fn for_commands(&self) -> Result<CommandConnection, Error> {
        let closed = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&closed);
        let config = self.config(Some(self.response_timeout)).set_push_sender(
            move |push: PushInfo| -> Result<(), redis::aio::SendError> {
                if push.kind == PushKind::Disconnection {
                    seen.store(true, Ordering::Relaxed);
                }
                Ok(())
            },
        );
        self.open(config)
            .await
            .map(|commands| CommandConnection { commands, closed })
    }

    /// Opens the connection that is the session's life-line.
    pub(crate) async fn for_events(&self) -> Result<EventsConnection, Error> {
        self.open(self.config(None)).await.map(EventsConnection)
    }

    fn config(&self, reply_within: Option<Duration>) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.response_timeout))
            .set_response_timeout(reply_within)
    }

    async fn open(&self, config: AsyncConnectionConfig) -> Result<MultiplexedConnection, Error> {
        let opening = self
            .client
            .get_multiplexed_async_connection_with_config(&config);
        opening.await.map_err(Error::could_not_connect)
    }
}

/// The connection that carries the commands.
#[derive(Clone)]
pub(crate) struct CommandConnection {
    commands: MultiplexedConnection,
    closed: Arc<AtomicBool>,
}

impl CommandConnection {
    /// Whether the peer is known to have closed it: what is not sent then has surely not been
    /// carried out, while a command sent regardless would leave that unknown.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Sends the commands in one write and waits for all replies.
    pub(crate) async fn ask_all(&mut self, pipeline: &Pipeline) -> RedisResult<Vec<Value>> {
        self.commands
            .send_packed_commands(pipeline, 0, pipeline.len())
            .await
    }
}

/// The connection that carries RLOCK.EVENTS, one call at a time. Dropping it closes the socket.
pub(crate) struct EventsConnection(MultiplexedConnection);

impl EventsConnection {
    /// Sends the call and waits for its reply, at most this long.
    pub(crate) async fn ask<T>(&mut self, call: Command<T>, within: Duration) -> Result<T, Error> {
        let reply = timeout(within, self.0.send_packed_command(&call.cmd)).await;
        let reply = reply.map_err(|_| Error::no_reply(None))?;
        let reply: Value = reply.map_err(|broken| Error::no_reply(Some(broken)))?;
        call.reader.read(&reply)
    }
}

/// A silent connection is probed after this long, and then as often.
const KEEPALIVE: Duration = Duration::from_secs(10);
