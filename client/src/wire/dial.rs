//! Opening a connection: over a socket, or in a test by what stands for one.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join;
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, Value};
use tokio::sync::Semaphore;
use tokio::task::unconstrained;
use tokio::time::timeout;
use tokio_util::sync::ReusableBoxFuture;

use crate::error::Error;
use crate::wire::Certificates;

/// An open socket. Clones share it, and it closes with the last.
#[derive(Clone)]
pub(crate) struct Socket {
    redis: MultiplexedConnection,
    /// The task that reads and writes. It is aborted when the last clone is dropped.
    #[cfg(feature = "test-util")]
    _driver: Option<Arc<tokio_util::task::AbortOnDropHandle<()>>>,
}

/// The future reply to a command, in a box, because it is large and moved a few times.
pub(crate) type Reply = ReusableBoxFuture<'static, Result<Value, Error>>;

impl Socket {
    /// Sends a command. It is in the socket's queue when this returns, so no later command can get
    /// ahead of it. `spare` is the memory of an earlier reply.
    pub(super) fn send(&self, cmd: &Arc<Cmd>, asking: bool, spare: Option<Reply>) -> Reply {
        let (mut socket, cmd) = (self.clone(), Arc::clone(cmd));
        // Unconstrained: if tokio's budget put off the first poll, later commands could go before
        // this one.
        let work = unconstrained(async move {
            let reply = if asking {
                let (mut before, asking) = (socket.redis.clone(), redis::cmd("ASKING"));
                let asked = before.send_packed_command(&asking);
                join(asked, socket.redis.send_packed_command(&cmd)).await.1
            } else {
                socket.redis.send_packed_command(&cmd).await
            };
            reply.map_err(|broken| Error::no_reply(Some(broken)))
        });
        let mut reply = match spare {
            Some(mut spare) => {
                spare.set(work);
                spare
            }
            None => ReusableBoxFuture::new(work),
        };
        // The first poll puts it into the queue. It needs no waker: whoever waits polls again.
        if let Some(told) = (&mut reply).now_or_never() {
            reply.set(ready(told));
        }
        reply
    }

    /// Asks this one thing, for no longer than that.
    pub(super) async fn ask(&self, cmd: Cmd, limit: Duration) -> Result<Value, Error> {
        let reply = timeout(limit, self.send(&Arc::new(cmd), false, None)).await;
        reply.unwrap_or_else(|_| Err(Error::no_reply(None)))
    }
}

/// The settings of new connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dialer {
    /// The name of the connections at the server.
    pub(crate) label: Option<Arc<str>>,
    pub(crate) certificates: Certificates,
    /// How long a command's reply may take.
    pub(crate) response_timeout: Duration,
    #[cfg(feature = "test-util")]
    pub(crate) instead: Option<Arc<dyn crate::test_util::Dial>>,
}

impl Dialer {
    /// The default settings, with this limit for replies.
    pub(crate) fn within(response_timeout: Duration) -> Self {
        Self {
            response_timeout,
            ..Self::default()
        }
    }

    /// A connection to this very server, and what hears its push messages. How long a reply may
    /// take is for the caller to watch.
    ///
    /// The buffer has room for all commands that wait to be written. If senders had to wait for
    /// room, each would be woken by itself, and a later one might write first: a CANCEL or RELEASE
    /// would overtake the ACQUIRE that it undoes. The large buffer costs nothing, because the
    /// senders keep their commands in any case.
    pub(super) async fn open(
        &self,
        server: &redis::Client,
        within: Option<Duration>,
        pushes: impl AsyncPushSender,
    ) -> Result<Socket, Error> {
        let config = AsyncConnectionConfig::new()
            .set_pipeline_buffer_size(Semaphore::MAX_PERMITS)
            .set_connection_timeout(within)
            .set_response_timeout(None)
            .set_push_sender(pushes);
        #[cfg(feature = "test-util")]
        if let Some(dial) = &self.instead {
            let opening = timeout(
                within.unwrap_or(crate::time::TIMEOUT_MAX),
                connect_instead(&**dial, server, config),
            );
            let opened = opening.await.map_err(|_| Error::not_attached())?;
            return opened.map_err(Error::could_not_connect);
        }
        let redis = server.get_multiplexed_async_connection_with_config(&config);
        Ok(Socket {
            redis: redis.await.map_err(Error::could_not_connect)?,
            #[cfg(feature = "test-util")]
            _driver: None,
        })
    }
}

#[cfg(feature = "test-util")]
async fn connect_instead(
    dial: &dyn crate::test_util::Dial,
    server: &redis::Client,
    config: AsyncConnectionConfig,
) -> redis::RedisResult<Socket> {
    let info = server.get_connection_info();
    let stream = dial.dial(&info.addr().to_string()).await?;
    let opened = MultiplexedConnection::new_with_config(info.redis_settings(), stream, config);
    let (redis, driver) = opened.await?;
    let driver = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(crate::task(driver)));
    Ok(Socket {
        redis,
        _driver: Some(Arc::new(driver)),
    })
}
