//! The task that owns the command connection. Every command of a client goes through it, in the
//! order in which it was handed over, so that what undoes a command can never overtake it.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use redis::{Pipeline, Value};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::command::Command;
use crate::connection::{CommandConnection, Connector, ServerId};
use crate::error::Error;
use crate::locked;

/// The handle of the driver task; cheap to clone. The task ends with its last handle.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    requests: mpsc::UnboundedSender<Request>,
    tried: watch::Receiver<bool>,
}

impl Driver {
    /// Starts the task, which connects at once; what is handed over meanwhile waits for that.
    pub(crate) fn start(runtime: &Handle, connector: Connector) -> Self {
        let (requests, queue) = mpsc::unbounded_channel();
        let (has_tried, tried) = watch::channel(false);
        runtime.spawn(drive(connector, has_tried, queue));
        Self { requests, tried }
    }

    /// Waits until the first try to connect has ended.
    pub(crate) async fn tried(&self) {
        // If the task is gone, so is the runtime.
        let _ = self.tried.clone().wait_for(|tried| *tried).await;
    }

    /// Hands a command over, at once and without waiting: its place in the order is fixed when
    /// this returns. It is carried out even if the answer is dropped.
    pub(crate) fn send<T>(&self, command: Command<T>) -> Answer<T> {
        let mut pipeline = Pipeline::with_capacity(1);
        command.add_to(&mut pipeline);
        let replies = self.hand_over(pipeline, command.only.clone());
        Answer { command, replies }
    }

    /// Sends all commands as one pipeline, to the server of the first, and returns their replies in
    /// order.
    pub(crate) async fn send_all<T>(
        &self,
        commands: &[Command<T>],
    ) -> Result<Vec<Result<T, Error>>, Error> {
        let mut pipeline = Pipeline::with_capacity(commands.len());
        for command in commands {
            command.add_to(&mut pipeline);
        }
        let only = commands.first().and_then(|command| command.only.clone());
        let replies = self
            .hand_over(pipeline, only)
            .await
            .unwrap_or_else(|_| Err(Error::no_runtime()))?;
        let mut replies = replies.iter();
        let read = commands
            .iter()
            .map(|command| command.take_reply(&mut replies));
        Ok(read.collect())
    }

    fn hand_over(&self, pipeline: Pipeline, only: Option<ServerId>) -> oneshot::Receiver<Replies> {
        let (reply, replies) = oneshot::channel();
        let request = Request {
            pipeline,
            only,
            reply,
        };
        // If the task is gone, so is the runtime; the dropped `reply` then tells the caller.
        let _ = self.requests.send(request);
        replies
    }
}

/// The answer to a command that has been handed over.
#[must_use = "the answer says whether the command was carried out"]
pub(crate) struct Answer<T> {
    command: Command<T>,
    replies: oneshot::Receiver<Replies>,
}

impl<T> Future for Answer<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        Pin::new(&mut this.replies).poll(cx).map(|replies| {
            let replies = replies.unwrap_or_else(|_| Err(Error::no_runtime()))?;
            this.command.take_reply(&mut replies.iter())
        })
    }
}

/// The replies to a pipeline.
type Replies = Result<Vec<Value>, Error>;

#[derive(Debug)]
struct Request {
    pipeline: Pipeline,
    only: Option<ServerId>,
    reply: oneshot::Sender<Replies>,
}

async fn drive(
    connector: Connector,
    tried: watch::Sender<bool>,
    mut requests: mpsc::UnboundedReceiver<Request>,
) {
    // Why this one failed nobody wants to know: the first request tries again.
    let mut link = connect(&connector).await.ok();
    tried.send_replace(true);
    while let Some(request) = requests.recv().await {
        let good = match link.take_if(|link| !link.is_broken()) {
            Some(good) => Ok(good),
            None => connect(&connector).await,
        };
        match good.map(|good| link.insert(good)) {
            Ok(link) if link.leads_to(request.only.as_ref()) => link.carry(request).await,
            Ok(_) => {
                // The session is attached to a server that this connection has left, or not yet
                // reached.
                let _ = request.reply.send(Err(Error::elsewhere()));
            }
            Err(error) => refuse(request, &mut requests, &error),
        }
    }
}

async fn connect(connector: &Connector) -> Result<Link, Error> {
    let connection = connector.for_commands().await?;
    Ok(Link::new(connection, connector.response_timeout()))
}

/// Tells everybody in line that there is no connection: had each of them waited for a try of its
/// own, the last would hear of it a timeout a caller later.
fn refuse(first: Request, queue: &mut mpsc::UnboundedReceiver<Request>, error: &Error) {
    let mut next = Some(first);
    while let Some(request) = next {
        // Nobody is left to be told if the caller has gone.
        let _ = request.reply.send(Err(error.clone()));
        next = queue.try_recv().ok();
    }
}

/// One connection, and whether it is still good.
#[derive(Clone)]
struct Link {
    connection: CommandConnection,
    health: Arc<Health>,
}

impl Link {
    fn new(connection: CommandConnection, response_timeout: Duration) -> Self {
        let silence_max = response_timeout.saturating_mul(SILENT_TIMEOUTS);
        Self {
            connection,
            health: Arc::new(Health::new(silence_max)),
        }
    }

    /// Whether it leads to this server, if it must be one.
    fn leads_to(&self, only: Option<&ServerId>) -> bool {
        only.is_none_or(|only| only == self.connection.server())
    }

    fn is_broken(&self) -> bool {
        self.connection.is_over() || self.health.broken.load(Ordering::Relaxed)
    }

    /// Sends the request, and leaves the wait for its replies to a task of its own.
    async fn carry(&self, request: Request) {
        // Polled once here: that puts the request into the connection's line, which has room for
        // all, and nothing that the driver sends later can get before it. Unconstrained, because a
        // poll that is put off for lack of budget would leave its place open.
        let exchange = tokio::task::unconstrained(self.clone().exchange(request));
        let mut exchange = Box::pin(exchange);
        if poll_fn(|cx| Poll::Ready(exchange.as_mut().poll(cx)))
            .await
            .is_pending()
        {
            tokio::spawn(exchange);
        }
    }

    async fn exchange(mut self, request: Request) {
        let replies = match self.connection.ask_all(&request.pipeline).await {
            Ok(replies) => {
                self.health.answered(&replies);
                Ok(replies)
            }
            Err(error) => {
                self.health.failed(&error);
                Err(Error::no_reply(Some(error)))
            }
        };
        // A caller that no longer listens has its own way of undoing what it asked for.
        let _ = request.reply.send(replies);
    }
}

/// Whether a connection still answers.
struct Health {
    broken: AtomicBool,
    answered: Mutex<Instant>,
    silence_max: Duration,
}

impl Health {
    fn new(silence_max: Duration) -> Self {
        let answered = Mutex::new(Instant::now());
        Self {
            broken: AtomicBool::new(false),
            answered,
            silence_max,
        }
    }

    /// A server that has been made a replica will not carry anything out: the next command looks
    /// for the primary.
    fn answered(&self, replies: &[Value]) {
        *locked(&self.answered) = Instant::now();
        if replies.iter().any(is_readonly) {
            self.broken.store(true, Ordering::Relaxed);
        }
    }

    /// A late reply alone does not cost the connection: whatever undoes the late command must
    /// travel behind it on the same one. Only after a longer silence is it given up.
    fn failed(&self, error: &redis::RedisError) {
        let silent = locked(&self.answered).elapsed();
        if !error.is_timeout() || silent >= self.silence_max {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

fn is_readonly(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(refusal) if refusal.code() == "READONLY")
}

/// After this many response timeouts without any reply a connection is replaced.
const SILENT_TIMEOUTS: u32 = 4;
