//! The task that owns the command connection. Every command of a client goes through it, in the
//! order in which it was handed over, so that what undoes a command can never overtake it.
//!
//! What waits to be sent goes out together, a few dozen commands in a write, and the task waits for
//! the replies itself: a call of `lock()` costs no task of its own. What is done with a reply is
//! said when its command is handed over, and done here, so it must not wait for anything.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisResult, Value};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{unconstrained, yield_now};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::backoff::Pace;
use crate::error::Error;
use crate::locked;
use crate::time::TIMEOUT_MAX;
use crate::wire::connection::{CommandConnection, Connector, Replies, ServerId};
use crate::wire::request::Command;

/// The handle of the task; cheap to clone. The task ends with its last handle.
#[derive(Clone, Debug)]
pub(crate) struct Commands {
    requests: mpsc::UnboundedSender<Request>,
    tried: watch::Receiver<bool>,
}

impl Commands {
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
    pub(crate) fn send<T: Send + 'static>(&self, command: Command<T>) -> Answer<T> {
        let (told, answer) = oneshot::channel();
        self.send_then(command, |answer| {
            // A caller that no longer listens has its own way of undoing what it asked for.
            let _ = told.send(answer);
        });
        Answer(answer)
    }

    /// As [`send`](Self::send), and says what to do with the answer, there in the task.
    /// If that has gone, and the runtime with it, this is dropped.
    pub(crate) fn send_then<T: 'static>(
        &self,
        command: Command<T>,
        then: impl FnOnce(Result<T, Error>) + Send + 'static,
    ) {
        let Command {
            cmd,
            reader,
            only,
            asking,
        } = command;
        let request = Request {
            cmd,
            only,
            asking,
            then: Box::new(move |reply| then(reply.and_then(|reply| reader.read(&reply)))),
        };
        let _ = self.requests.send(request);
    }
}

/// The answer to a command that has been handed over.
#[must_use = "the answer says whether the command was carried out"]
pub(crate) struct Answer<T>(oneshot::Receiver<Result<T, Error>>);

impl<T> Answer<T> {
    /// One that has come already.
    pub(crate) fn told(answer: Result<T, Error>) -> Self {
        let (told, receiver) = oneshot::channel();
        // The receiver is in our hand: it cannot have gone.
        let _ = told.send(answer);
        Self(receiver)
    }
}

impl<T> Future for Answer<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = Pin::new(&mut self.0).poll(cx);
        answer.map(|answer| answer.unwrap_or_else(|_| Err(Error::no_runtime())))
    }
}

/// A command that waits to be sent.
struct Request {
    cmd: Cmd,
    only: Option<ServerId>,
    asking: bool,
    then: Then,
}

/// What to do with a reply.
type Then = Box<dyn FnOnce(Result<Value, Error>) + Send>;

async fn drive(
    connector: Connector,
    tried: watch::Sender<bool>,
    mut queue: mpsc::UnboundedReceiver<Request>,
) {
    // Why this one failed nobody wants to know: the first request tries again.
    let mut link = connect(&connector).await.ok();
    tried.send_replace(true);
    let mut batch = Vec::new();
    let mut pace = Pace::new();
    while next_batch(link.as_mut(), &mut queue, &mut batch).await {
        let good = match link.take() {
            Some(good) if !good.is_broken() => Ok(good),
            given_up => {
                // What is still to come there keeps nobody waiting who asks elsewhere.
                given_up.map(|old| tokio::spawn(old.in_flight.end()));
                pace.keep().await;
                connect(&connector).await
            }
        };
        match good {
            Ok(good) => {
                link.insert(good).carry(&mut batch);
                // Written at once, and not only with the next.
                if !queue.is_empty() {
                    yield_now().await;
                }
            }
            Err(error) => refuse(&mut batch, &mut queue, &error),
        }
    }
    if let Some(last) = link {
        last.in_flight.end().await;
    }
}

/// Waits for the commands that go out next, and brings the answers that come meanwhile. Without
/// any there will be no more.
async fn next_batch(
    link: Option<&mut Link>,
    queue: &mut mpsc::UnboundedReceiver<Request>,
    batch: &mut Vec<Request>,
) -> bool {
    let next = queue.recv_many(batch, BATCH_MAX);
    let count = match link {
        Some(link) => link.in_flight.during(next).await,
        None => next.await,
    };
    count > 0
}

async fn connect(connector: &Connector) -> Result<Link, Error> {
    let connection = connector.for_commands().await?;
    Ok(Link::new(connection, connector.response_timeout()))
}

/// Tells all who wait that there is no connection: had each of them waited for a try of its
/// own, the last would hear of it a timeout a caller later.
fn refuse(batch: &mut Vec<Request>, queue: &mut mpsc::UnboundedReceiver<Request>, error: &Error) {
    for request in batch.drain(..) {
        (request.then)(Err(error.clone()));
    }
    while let Ok(request) = queue.try_recv() {
        (request.then)(Err(error.clone()));
    }
}

/// What has been sent and not been answered, in the order in which it was sent.
///
/// The server answers in that order, and time runs out in it too, so only the first is looked at.
struct InFlight {
    exchanges: VecDeque<Exchange>,
    /// Set for the time of the first, or of one before it: most replies come in time, and to set it
    /// for each would cost more than to look now and then in vain.
    alarm: Pin<Box<Sleep>>,
}

/// A batch that waits for its replies.
struct Exchange {
    /// When it ends by itself, if it is looked at.
    until: Instant,
    work: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl InFlight {
    fn new() -> Self {
        Self {
            exchanges: VecDeque::new(),
            alarm: Box::pin(sleep_until(Instant::now())),
        }
    }

    /// Begins an exchange that has until then, which is no earlier than with those before it.
    fn begin(&mut self, until: Instant, exchange: impl Future<Output = ()> + Send + 'static) {
        // Polled once here: that puts the request into the connection's line, which has room for
        // all, and nothing that is sent later can get before it. Unconstrained, because a poll that
        // is put off for lack of budget would leave its place open. Nobody is to be woken yet: it
        // is polled again when it is the first.
        let mut work = Box::pin(unconstrained(exchange));
        let mut nobody = Context::from_waker(Waker::noop());
        if work.as_mut().poll(&mut nobody).is_pending() {
            self.exchanges.push_back(Exchange { until, work });
        }
    }

    /// Waits for this, and for the answers that come meanwhile.
    async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                () = self.answered(), if !self.exchanges.is_empty() => {
                    // Those who have been answered ask anew before the next are told, so that the
                    // server has something to do meanwhile.
                    if !self.exchanges.is_empty() {
                        yield_now().await;
                    }
                }
                done = &mut work => return done,
            }
        }
    }

    /// Waits for all answers.
    async fn end(mut self) {
        while !self.exchanges.is_empty() {
            self.answered().await;
        }
    }

    /// Waits for the next answer, if there is one to come.
    async fn answered(&mut self) {
        poll_fn(|cx| {
            let Some(first) = self.exchanges.front_mut() else {
                return Poll::Ready(());
            };
            while first.work.as_mut().poll(cx).is_pending() {
                ready!(self.alarm.as_mut().poll(cx));
                self.alarm.as_mut().reset(first.until);
            }
            self.exchanges.pop_front();
            Poll::Ready(())
        })
        .await;
    }
}

/// One connection, what is under way on it, and whether it is still good.
struct Link {
    connection: CommandConnection,
    in_flight: InFlight,
    response_timeout: Duration,
    health: Arc<Health>,
}

impl Link {
    fn new(connection: CommandConnection, response_timeout: Duration) -> Self {
        let silence_max = response_timeout.saturating_mul(SILENT_TIMEOUTS);
        Self {
            connection,
            in_flight: InFlight::new(),
            response_timeout: response_timeout.min(TIMEOUT_MAX),
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

    /// Sends the batch in one write.
    fn carry(&mut self, batch: &mut Vec<Request>) {
        for stray in batch.extract_if(.., |request| !self.leads_to(request.only.as_ref())) {
            // The session is attached to a server that this connection has left, or not yet
            // reached.
            (stray.then)(Err(Error::elsewhere()));
        }
        if let [Request { asking: false, .. }] = batch.as_slice()
            && let Some(one) = batch.pop()
        {
            // All there is if only one task locks; a pipeline of one would cost more.
            self.begin(self.connection.ask(one.cmd), [(false, one.then)]);
        } else if !batch.is_empty() {
            self.carry_all(batch);
        }
    }

    fn carry_all(&mut self, batch: &mut Vec<Request>) {
        let mut pipeline = Pipeline::with_capacity(batch.len());
        let mut expected = Vec::with_capacity(batch.len());
        for request in batch.drain(..) {
            if request.asking {
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(request.cmd);
            expected.push((request.asking, request.then));
        }
        self.begin(self.connection.ask_all(pipeline), expected);
    }

    fn begin<R: AsRef<[Value]> + IntoIterator<Item = Value> + 'static>(
        &mut self,
        replies: Replies<R>,
        expected: impl IntoIterator<Item = (bool, Then)> + Send + 'static,
    ) {
        let now = Instant::now();
        let until = now.checked_add(self.response_timeout).unwrap_or(now);
        if self.in_flight.exchanges.is_empty() {
            self.health.asked();
        }
        let health = Arc::clone(&self.health);
        let exchange = exchange(by(until, replies), expected, health);
        self.in_flight.begin(until, exchange);
    }
}

/// Fails if they have not come by then. Whoever looks at this must look at that time.
async fn by<R>(until: Instant, mut replies: Replies<R>) -> RedisResult<R> {
    poll_fn(|cx| match replies.as_mut().poll(cx) {
        Poll::Pending if Instant::now() >= until => {
            Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut).into()))
        }
        polled => polled,
    })
    .await
}

/// Waits for the replies to a batch, and does with each what is to be done with it. They come
/// together or not at all: if the connection breaks in between, all are unknown.
async fn exchange<R: AsRef<[Value]> + IntoIterator<Item = Value>>(
    replies: impl Future<Output = RedisResult<R>>,
    expected: impl IntoIterator<Item = (bool, Then)>,
    health: Arc<Health>,
) {
    match replies.await {
        Ok(replies) => {
            health.answered(replies.as_ref());
            let mut replies = replies.into_iter();
            for (asking, then) in expected {
                if asking {
                    replies.next();
                }
                then(replies.next().ok_or_else(|| Error::no_reply(None)));
            }
        }
        Err(error) => {
            health.failed(&error);
            let error = Error::no_reply(Some(error));
            for (_, then) in expected {
                then(Err(error.clone()));
            }
        }
    }
}

/// Whether a connection still answers.
struct Health {
    broken: AtomicBool,
    silence: Mutex<Silence>,
    silence_max: Duration,
}

/// How long nothing has come that was asked for.
struct Silence {
    since: Instant,
    /// Whether a reply has stayed away since then.
    in_vain: bool,
}

impl Health {
    fn new(silence_max: Duration) -> Self {
        let silence = Mutex::new(Silence::from_now());
        Self {
            broken: AtomicBool::new(false),
            silence,
            silence_max,
        }
    }

    /// Something is asked while nothing else is under way. The time in which nothing was asked is
    /// no silence: the first late reply on an idle connection would cost it otherwise.
    fn asked(&self) {
        let mut silence = locked(&self.silence);
        if !silence.in_vain {
            *silence = Silence::from_now();
        }
    }

    /// A server that has been made a replica will not carry anything out: the next command looks
    /// for the primary.
    fn answered(&self, replies: &[Value]) {
        *locked(&self.silence) = Silence::from_now();
        if replies.iter().any(is_readonly) {
            self.broken.store(true, Ordering::Relaxed);
        }
    }

    /// A late reply alone does not cost the connection: whatever undoes the late command must
    /// travel behind it on the same one. Only after a longer silence is it given up.
    fn failed(&self, error: &redis::RedisError) {
        let mut silence = locked(&self.silence);
        silence.in_vain = true;
        let silent = silence.since.elapsed();
        drop(silence);
        if !error.is_timeout() || silent >= self.silence_max {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

impl Silence {
    fn from_now() -> Self {
        Self {
            since: Instant::now(),
            in_vain: false,
        }
    }
}

fn is_readonly(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(refusal) if refusal.code() == "READONLY")
}

/// After this many response timeouts without any reply a connection is replaced.
const SILENT_TIMEOUTS: u32 = 4;

/// At most so many commands go out in one write: a reply waits for those behind it in the same, and
/// the server works on one while the next is made.
const BATCH_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::Notify;

    /// Notes its number when it is first looked at, and the same plus a hundred once it is told to.
    async fn exchange(log: Arc<Mutex<Vec<usize>>>, number: usize, go: oneshot::Receiver<()>) {
        locked(&log).push(number);
        go.await.expect("told to go");
        locked(&log).push(number.saturating_add(100));
    }

    fn soon(seconds: u64) -> Instant {
        let now = Instant::now();
        now.checked_add(Duration::from_secs(seconds))
            .expect("a moment soon")
    }

    #[tokio::test]
    async fn exchanges_begin_at_once_and_end_in_their_order_while_other_work_is_waited_for() {
        let (log, mut in_flight) = (Arc::default(), InFlight::new());
        let mut go = Vec::new();
        for number in 0..3 {
            let (tell, told) = oneshot::channel();
            in_flight.begin(soon(60), exchange(Arc::clone(&log), number, told));
            go.push(tell);
        }
        assert_eq!(*locked(&log), [0, 1, 2]);
        let (all, seen) = (Notify::new(), Arc::clone(&log));
        let others = async {
            for tell in go.into_iter().rev() {
                tell.send(()).expect("it listens");
                yield_now().await;
            }
            all.notify_one();
        };
        let work = async {
            all.notified().await;
            // Nobody but `during` could have brought them.
            locked(&seen).clone()
        };
        let (during, ()) = tokio::join!(in_flight.during(work), others);
        assert_eq!(during, [0, 1, 2, 100, 101, 102]);
        assert!(in_flight.exchanges.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn only_time_in_which_something_was_asked_in_vain_is_silence() {
        let late = || io::Error::from(io::ErrorKind::TimedOut).into();
        let wait = |seconds| tokio::time::advance(Duration::from_secs(seconds));
        let health = Health::new(Duration::from_secs(8));
        let is_broken = || health.broken.load(Ordering::Relaxed);
        for _ in 0..2 {
            wait(3_600).await;
            // Seven seconds in vain, with pauses, and then an answer.
            for pause in [2, 3, 2] {
                health.asked();
                wait(pause).await;
                health.failed(&late());
                assert!(!is_broken());
            }
            health.answered(&[]);
        }
        health.asked();
        wait(2).await;
        health.failed(&late());
        wait(4).await;
        health.asked();
        wait(2).await;
        health.failed(&late());
        assert!(is_broken());
    }

    #[tokio::test(start_paused = true)]
    async fn each_fails_at_its_own_time_whoever_was_answered_before() {
        let log = Arc::<Mutex<Vec<_>>>::default();
        let mut in_flight = InFlight::new();
        let started = Instant::now();
        for seconds in [1, 2, 3] {
            let log = Arc::clone(&log);
            let until = soon(seconds);
            let silent = Box::pin(std::future::pending::<RedisResult<()>>());
            in_flight.begin(until, async move {
                let error = by(until, silent).await.expect_err("no reply");
                locked(&log).push((started.elapsed().as_secs(), error.is_timeout()));
            });
            if seconds == 1 {
                // Answered in time: the alarm that was set for it goes off for the next.
                in_flight.exchanges.clear();
                in_flight.begin(until, yield_now());
            }
        }
        in_flight.end().await;
        assert_eq!(*locked(&log), [(2, true), (3, true)]);
    }
}
