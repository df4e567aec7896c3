//! Opening connections: the shared one for commands, and one for a wait.

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
        // Without it a lock() that waits on a peer which has vanished would wait for ever.
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

    /// Opens a connection for one wait, whose reply may take as long as it likes.
    pub(crate) async fn for_a_wait(&self) -> Result<WaitConnection, Error> {
        self.open(self.config(None)).await.map(WaitConnection)
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

/// A connection that carries one blocking command. Dropping it closes the socket.
pub(crate) struct WaitConnection(MultiplexedConnection);

impl WaitConnection {
    /// Sends the command and waits for its reply, without limit.
    pub(crate) async fn ask<T>(mut self, command: Command<T>) -> Result<T, Error> {
        let reply = self.0.send_packed_command(&command.cmd).await;
        let reply: Value = reply.map_err(|broken| Error::no_reply(Some(broken)))?;
        command.reader.read(&reply)
    }
}

/// A silent connection is probed after this long, and then as often.
const KEEPALIVE: Duration = Duration::from_secs(10);
