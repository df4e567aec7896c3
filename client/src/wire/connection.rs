//! Asking on an open connection.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisResult, Value};
use smallvec::{SmallVec, smallvec};
use tokio::sync::watch;
use tokio::task::unconstrained;
use tokio::time::{Instant, timeout};
use tokio_util::sync::ReusableBoxFuture;

use crate::error::Error;
use crate::wire::{Pushes, Socket};

/// The server's address, as the newest successful question found it. `None` if that server cannot
/// be reached.
#[derive(Clone, Debug, Default)]
pub(super) struct Latest {
    pub(super) found: Option<Arc<str>>,
    pub(super) asked: Option<Instant>,
}

impl Latest {
    pub(super) fn is(&self, address: &str) -> bool {
        self.found.as_deref() == Some(address)
    }
}

/// The reply, if it comes within this time.
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
    pub(super) socket: Socket,
    /// Nothing comes by it, but it ends with the connection.
    pub(super) pushes: Pushes,
    /// Where it leads.
    pub(super) address: Arc<str>,
    pub(super) latest: watch::Receiver<Latest>,
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

/// The future replies to a batch, one for each command. In a box, because it is large and moved a
/// few times. Unconstrained: if tokio's budget put off the first poll, later commands could go
/// before these.
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::{Connector, Dialer};
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
