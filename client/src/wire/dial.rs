//! Opening a connection: over a socket, or in a test by what stands for one.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use redis::aio::{MultiplexedConnection, SendError};
use redis::{AsyncConnectionConfig, Cmd, ConnectionInfo, Pipeline, PushInfo, Value};
use tokio::sync::Semaphore;
use tokio::task::unconstrained;
use tokio::time::timeout;

use crate::error::Error;
use crate::wire::Certificates;

/// An open socket. Clones share it, and it closes with the last.
#[derive(Clone, Debug)]
pub(crate) struct Socket {
    redis: MultiplexedConnection,
    /// The task that reads and writes. It is aborted when the last clone is dropped.
    #[cfg(feature = "test-util")]
    _driver: Option<Arc<tokio_util::task::AbortOnDropHandle<()>>>,
}

/// The future replies to a pipeline, which come together or not at all.
pub(crate) type Replies = BoxFuture<'static, Result<Vec<Value>, Error>>;

impl Socket {
    /// Sends these in one write. They are in the socket's queue when this returns, so no later
    /// command can get ahead of them.
    pub(super) fn send(&self, pipeline: Arc<Pipeline>) -> Replies {
        let mut socket = self.clone();
        // Unconstrained: if tokio's budget put off the first poll, later commands could go before
        // these.
        let mut replies = Box::pin(unconstrained(async move {
            let count = pipeline.len();
            let replies = socket.redis.send_packed_commands(&pipeline, 0, count);
            replies
                .await
                .map_err(|broken| Error::no_reply().because(broken))
        }));
        // The first poll puts them into the queue. It needs no waker: the task that waits for the
        // replies polls again.
        match (&mut replies).now_or_never() {
            Some(told) => ready(told).boxed(),
            None => replies,
        }
    }

    /// Asks this one thing, which changes nothing, for no longer than that.
    pub(super) async fn ask(mut self, cmd: Cmd, limit: Duration) -> Result<Value, Error> {
        let reply = timeout(limit, self.redis.send_packed_command(&cmd)).await;
        let reply = reply.map_err(|_| Error::not_attached())?;
        reply.map_err(|cause| Error::not_attached().because(cause))
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
    /// Numbers the connections of a client, at whatever server: a node that gets another address is
    /// the same one still.
    pub(super) epochs: Arc<AtomicU64>,
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

    /// A connection to this very server, opened within the time of a reply. How long a reply there
    /// may take is for the caller to watch.
    ///
    /// The buffer has room for all commands that wait to be written. If senders had to wait for
    /// room, each would be woken by itself, and a later one might write first: a CANCEL or RELEASE
    /// would overtake the ACQUIRE that it undoes. The large buffer costs nothing, because the
    /// senders keep their commands in any case.
    pub(super) async fn open(
        &self,
        server: &ConnectionInfo,
        pushes: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> Result<Socket, Error> {
        let pushes = move |push| {
            pushes(push);
            Ok::<_, SendError>(())
        };
        let config = AsyncConnectionConfig::new()
            .set_pipeline_buffer_size(Semaphore::MAX_PERMITS)
            .set_connection_timeout(Some(self.response_timeout))
            .set_response_timeout(None)
            .set_push_sender(pushes);
        #[cfg(feature = "test-util")]
        if let Some(dial) = &self.instead {
            let opening = connect_instead(&**dial, server, config);
            let opened = timeout(self.response_timeout, opening).await;
            let opened = opened.map_err(|_| Error::not_attached())?;
            return opened.map_err(Error::could_not_connect);
        }
        let client = self.certificates.client(server.clone())?;
        let redis = client.get_multiplexed_async_connection_with_config(&config);
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
    server: &ConnectionInfo,
    config: AsyncConnectionConfig,
) -> redis::RedisResult<Socket> {
    let stream = dial.dial(&server.addr().to_string()).await?;
    let opened = MultiplexedConnection::new_with_config(server.redis_settings(), stream, config);
    let (redis, driver) = opened.await?;
    let driver = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(crate::task(driver)));
    Ok(Socket {
        redis,
        _driver: Some(Arc::new(driver)),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::TcpStream;

    /// Answers by `answer`, but the first commands of a connection as a primary does, until `QUIT`
    /// or the end of the connection. Returns the commands.
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
}
