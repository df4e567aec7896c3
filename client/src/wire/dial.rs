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
#[derive(Clone, Debug)]
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::Connector;
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_secs(10);

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

    fn command(words: &str) -> Arc<Cmd> {
        let mut cmd = Cmd::new();
        Arc::new(cmd.arg(words.split(' ').collect::<Vec<_>>()).take())
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
        let mut spare = None;
        for asking in [true, false] {
            let all = [false, true, true, false, asking];
            let send = |(number, asking): (i64, bool)| {
                let echo = command(&format!("ECHO {number}"));
                connection.socket.send(&echo, asking, spare.take())
            };
            let replies: Vec<_> = (0..).zip(all).map(send).collect();
            for (number, mut reply) in (0..).zip(replies) {
                let told = timeout(LIMIT, &mut reply).await.expect("in time");
                assert_eq!(told.expect("a reply"), Value::Int(number));
                spare = Some(reply);
            }
        }
        let quit = connection.socket.ask(Cmd::new().arg("QUIT").take(), LIMIT);
        assert_eq!(quit.await.expect("a reply"), Value::Okay);
        let asked = server.await.expect("it ends");
        let asked: Vec<_> = asked.iter().map(String::as_str).collect();
        let asked = asked
            .rsplit(|words| words.starts_with("HELLO") || words.starts_with("CLIENT"))
            .next();
        let expected = "ECHO 0, ASKING, ECHO 1, ASKING, ECHO 2, ECHO 3, ASKING, ECHO 4, \
            ECHO 0, ASKING, ECHO 1, ASKING, ECHO 2, ECHO 3, ECHO 4, QUIT";
        assert_eq!(asked.expect("commands").join(", "), expected);
        timeout(LIMIT, connection.over())
            .await
            .expect("it is known to be closed");
    }
}
