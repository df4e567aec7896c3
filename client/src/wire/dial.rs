//! Opening a connection: over a socket, or in a test by what stands for one.

use std::sync::Arc;
use std::time::Duration;

use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tokio::sync::{Semaphore, mpsc};

use crate::error::Error;
use crate::wire::Certificates;

/// An open socket. Clones share it, and it closes with the last.
#[derive(Clone)]
pub(crate) struct Socket {
    pub(super) redis: MultiplexedConnection,
    /// The task that reads and writes. It is aborted when the last clone is dropped.
    #[cfg(feature = "test-util")]
    _driver: Option<Arc<tokio_util::task::AbortOnDropHandle<()>>>,
}

/// The server's push messages. They end when the connection is closed.
pub(super) type Pushes = mpsc::UnboundedReceiver<redis::PushInfo>;

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

    /// A connection to this very server. How long a reply may take is for the caller to watch.
    ///
    /// The buffer has room for all commands that wait to be written. If senders had to wait for
    /// room, each would be woken by itself, and a later one might write first: a CANCEL or RELEASE
    /// would overtake the ACQUIRE that it undoes. The large buffer costs nothing, because the
    /// senders keep their commands in any case.
    pub(super) async fn open(
        &self,
        server: &redis::Client,
        within: Option<Duration>,
    ) -> Result<(Socket, Pushes), Error> {
        let (sender, pushes) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new()
            .set_pipeline_buffer_size(Semaphore::MAX_PERMITS)
            .set_connection_timeout(within)
            .set_response_timeout(None)
            .set_push_sender(sender);
        #[cfg(feature = "test-util")]
        if let Some(dial) = &self.instead {
            let opening = tokio::time::timeout(
                within.unwrap_or(crate::time::TIMEOUT_MAX),
                connect_instead(&**dial, server, config),
            );
            let opened = opening.await.map_err(|_| Error::not_attached())?;
            return Ok((opened.map_err(Error::could_not_connect)?, pushes));
        }
        let redis = server.get_multiplexed_async_connection_with_config(&config);
        let socket = Socket {
            redis: redis.await.map_err(Error::could_not_connect)?,
            #[cfg(feature = "test-util")]
            _driver: None,
        };
        Ok((socket, pushes))
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
