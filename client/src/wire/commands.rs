//! The task that owns the command connection. Every command of a client goes through it, in the
//! order in which it was handed over, so that what undoes a command can never overtake it.
//!
//! What waits to be sent goes out together, a few dozen commands in a write, and the task waits for
//! the replies itself: a call of `lock()` costs no task of its own. What is done with a reply is
//! said when its command is handed over, and done here, so it must not wait for anything.

use std::collections::VecDeque;
use std::future::{self, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use redis::{RedisResult, Value};
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::wire::{Call, Command, Connection, Connector, Purpose, Replies, Values};
use crate::{Error, PAUSE_MAX, Pace, task};

/// The handle of the task, which ends with it.
pub(crate) struct Commands {
    requests: mpsc::UnboundedSender<Request>,
    link: watch::Receiver<u64>,
}

impl Commands {
    /// Starts the task, which connects at once; what is handed over meanwhile waits for that.
    pub(crate) fn start(runtime: &Handle, connector: Connector) -> Self {
        let (requests, queue) = mpsc::unbounded_channel();
        let (links, link) = watch::channel(0);
        runtime.spawn(task(drive(connector, links, queue)));
        Self { requests, link }
    }

    /// Waits until the first try to connect has ended, or the task with the runtime.
    pub(crate) async fn tried(&self) {
        let _ = self.link.clone().wait_for(|link| *link > 0).await;
    }

    /// The number of the present connection: it is another from the moment in which that is given
    /// up. As long as it is the same, commands are carried out and answered in the order in which
    /// they were handed over.
    pub(crate) fn link(&self) -> u64 {
        *self.link.borrow()
    }

    /// Hands a command over, at once and without waiting: its place in the order is fixed when
    /// this returns. What to do with the answer is done there in the task.
    /// If that has gone, and the runtime with it, this comes back.
    pub(crate) fn send_then<T: 'static>(
        &self,
        command: Command<T>,
        then: impl FnOnce(Result<T, Error>) + Send + 'static,
    ) -> Option<Then> {
        let Command { call, reader } = command;
        let then: Then = Box::new(move |reply| then(reply.and_then(|reply| reader.read(&reply))));
        let unsent = self.requests.send(Request { call, then }).err();
        unsent.map(|unsent| unsent.0.then)
    }
}

/// The answer to a command that has been handed over, or to what goes on apart from its caller.
#[must_use = "the answer says whether the command was carried out"]
pub(crate) struct Answer<T>(oneshot::Receiver<Result<T, Error>>);

impl<T> Answer<T> {
    /// One that is yet to come, and where it is told.
    pub(crate) fn open() -> (oneshot::Sender<Result<T, Error>>, Self) {
        let (told, answer) = oneshot::channel();
        (told, Self(answer))
    }

    /// One that has come already.
    pub(crate) fn told(answer: Result<T, Error>) -> Self {
        let (told, receiver) = Self::open();
        // The receiver is in our hand: it cannot have gone.
        let _ = told.send(answer);
        receiver
    }
}

impl<T> Future for Answer<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = Pin::new(&mut self.0).poll(cx);
        let no_runtime = || Error::unavailable("the runtime of the client has ended");
        answer.map(|answer| answer.unwrap_or_else(|_| Err(no_runtime())))
    }
}

/// A command that waits to be sent.
struct Request {
    call: Call,
    then: Then,
}

/// What to do with a reply.
pub(crate) type Then = Box<dyn FnOnce(Result<Value, Error>) + Send>;

type Queue = mpsc::UnboundedReceiver<Request>;

async fn drive(connector: Connector, links: watch::Sender<u64>, mut queue: Queue) {
    // Why this one failed nobody wants to know: the first request tries again.
    let mut link = Link::open(&connector).await.ok();
    let next_link = || links.send_modify(|link| *link = link.saturating_add(1));
    next_link();
    let mut batch = Vec::new();
    let mut pace = Pace::default();
    loop {
        // What goes out next; meanwhile the answers come.
        let next = queue.recv_many(&mut batch, BATCH_MAX);
        let count = match &mut link {
            Some(link) => link.in_flight.during(next).await,
            None => next.await,
        };
        if count == 0 {
            break;
        }
        if link.as_ref().is_none_or(Link::is_broken) {
            next_link();
            if let Some(old) = link.take() {
                // What is still to come there keeps nobody waiting who asks elsewhere.
                tokio::spawn(task(old.in_flight.end()));
            }
            pace.keep(PAUSE_MAX).await;
            match Link::open(&connector).await {
                Ok(good) => link = Some(good),
                Err(error) => {
                    // Told to all who wait: had each of them waited for a try of its own, the last
                    // would hear of it a timeout a caller later.
                    let queued = std::iter::from_fn(|| queue.try_recv().ok());
                    for refused in batch.drain(..).chain(queued) {
                        (refused.then)(Err(error.clone()));
                    }
                }
            }
        }
        if let Some(good) = &mut link {
            good.carry(&mut batch);
            // Written at once, and not only with the next.
            if !queue.is_empty() {
                yield_now().await;
            }
        }
    }
    if let Some(last) = link {
        last.in_flight.end().await;
    }
}

/// One connection and what is under way on it.
struct Link {
    connection: Connection,
    in_flight: InFlight,
}

impl Link {
    async fn open(connector: &Connector) -> Result<Self, Error> {
        Ok(Self {
            connection: connector.open_next(Purpose::Commands).await?,
            in_flight: InFlight::new(connector.dialer.response_timeout),
        })
    }

    fn is_broken(&self) -> bool {
        self.in_flight.is_broken || self.connection.is_over()
    }

    /// Sends the batch in one write.
    fn carry(&mut self, batch: &mut Vec<Request>) {
        let server = &self.connection.server;
        for stray in batch.extract_if(.., |request| !request.call.may_go_to(server)) {
            // The session is attached to a server that this connection has left, or not yet
            // reached.
            (stray.then)(Err(Error::elsewhere()));
        }
        if batch.is_empty() {
            return;
        }
        let mut expected = SmallVec::with_capacity(batch.len());
        let calls = batch.drain(..).map(|request| {
            expected.push(request.then);
            request.call
        });
        let replies = self.connection.ask(calls, self.in_flight.spare.take());
        self.in_flight.begin(replies, expected);
    }
}

/// What has been sent and not been answered, in the order in which it was sent, and whether the
/// connection still answers.
///
/// The server answers in that order, and time runs out in it too, so only the first is looked at.
struct InFlight {
    exchanges: VecDeque<Exchange>,
    /// The memory of one that has been answered, for the next.
    spare: Option<Replies>,
    /// Set for the time of the first, or of one before it: most replies come in time, and to set it
    /// for each would cost more than to look now and then in vain.
    alarm: Pin<Box<Sleep>>,
    is_broken: bool,
    /// Since when nothing has come that was asked for.
    silent_since: Option<Instant>,
    /// How long that was when there was nothing more to come. The time in which nothing is asked is
    /// no silence: the first late reply on an idle connection would cost it otherwise.
    silent_for: Duration,
    response_timeout: Duration,
}

/// A batch that waits for its replies.
struct Exchange {
    /// When it ends by itself, if it is looked at.
    until: Instant,
    replies: Replies,
    /// What to do with each of them.
    expected: SmallVec<[Then; 1]>,
}

impl InFlight {
    fn new(response_timeout: Duration) -> Self {
        Self {
            exchanges: VecDeque::new(),
            spare: None,
            alarm: Box::pin(sleep_until(Instant::now())),
            is_broken: false,
            silent_since: None,
            silent_for: Duration::ZERO,
            response_timeout,
        }
    }

    /// Begins an exchange. It has the time for a reply, and so ends no earlier than those before.
    fn begin(&mut self, mut replies: Replies, expected: SmallVec<[Then; 1]>) {
        let now = Instant::now();
        let until = now.checked_add(self.response_timeout).unwrap_or(now);
        if self.exchanges.is_empty() {
            self.silent_since = now.checked_sub(self.silent_for);
        }
        // Polled once here: that puts the request into the connection's line, which has room for
        // all, and nothing that is sent later can get before it. Nobody is to be woken yet: it is
        // polled again when it is the first.
        let mut nobody = Context::from_waker(Waker::noop());
        if let Poll::Ready(told) = replies.poll(&mut nobody) {
            // The thread stood still meanwhile. Those before it have their replies too, and are to
            // hear them first: who counts what the server grants and takes back counts in order.
            replies.set(future::ready(told));
        }
        self.exchanges.push_back(Exchange {
            until,
            replies,
            expected,
        });
    }

    /// Waits for this, and for the answers that come meanwhile.
    async fn during<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                true = self.answered() => {
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
        while self.answered().await {}
    }

    /// Waits for the next answer: whether there was one to come.
    async fn answered(&mut self) -> bool {
        let replies = poll_fn(|cx| {
            let Some(first) = self.exchanges.front_mut() else {
                return Poll::Ready(None);
            };
            loop {
                if let Poll::Ready(replies) = first.replies.poll(cx) {
                    return Poll::Ready(Some(replies));
                }
                if Instant::now() >= first.until {
                    return Poll::Ready(Some(Err(io::Error::from(io::ErrorKind::TimedOut).into())));
                }
                ready!(self.alarm.as_mut().poll(cx));
                self.alarm.as_mut().reset(first.until);
            }
        });
        let replies = replies.await;
        let (Some(replies), Some(first)) = (replies, self.exchanges.pop_front()) else {
            return false;
        };
        // One that was not answered is dropped: nobody waits for it any more.
        self.spare = replies.is_ok().then_some(first.replies);
        self.end_one(replies, first.expected);
        true
    }

    /// Does with the replies to a batch what is to be done with each. They come together or not at
    /// all: if the connection breaks in between, all are unknown.
    fn end_one(&mut self, replies: RedisResult<Values>, expected: SmallVec<[Then; 1]>) {
        match replies {
            Ok(replies) => {
                self.silent_for = Duration::ZERO;
                self.silent_since = self.exchanges.front().map(|_| Instant::now());
                // A server that has been made a replica will not carry anything out: the next
                // command looks for the primary.
                self.is_broken |= replies.iter().any(is_readonly);
                let mut replies = replies.into_iter();
                for then in expected {
                    then(replies.next().ok_or_else(|| Error::no_reply(None)));
                }
            }
            Err(error) => {
                // A late reply alone does not cost the connection: whatever undoes the late
                // command must travel behind it on the same one. Only after a longer silence is it
                // given up.
                let silence_max = self.response_timeout.saturating_mul(SILENT_TIMEOUTS);
                let silent = self.silent_since.map(|since| since.elapsed());
                self.silent_for = silent.unwrap_or_default();
                self.is_broken |= !error.is_timeout() || self.silent_for >= silence_max;
                let error = Error::no_reply(Some(error));
                for then in expected {
                    then(Err(error.clone()));
                }
            }
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
    use std::sync::{Arc, Mutex};

    use crate::locked;
    use tokio::sync::Notify;

    const SECOND: Duration = Duration::from_secs(1);

    fn begin(
        in_flight: &mut InFlight,
        reply: impl Future<Output = Value> + Send + 'static,
        then: impl FnOnce(Result<Value, Error>) + Send + 'static,
    ) {
        let replies = Replies::new(async { Ok(SmallVec::from([reply.await])) });
        let expected: [Then; 1] = [Box::new(then)];
        in_flight.begin(replies, expected.into());
    }

    #[tokio::test]
    async fn exchanges_begin_at_once_and_end_in_their_order_while_other_work_is_waited_for() {
        let log = Arc::<Mutex<Vec<i64>>>::default();
        let mut in_flight = InFlight::new(SECOND * 60);
        let mut go = Vec::new();
        for number in 0..3 {
            let (tell, told) = oneshot::channel();
            // Notes its number when it is first looked at, and the same plus a hundred at its end.
            let (begun, ended) = (Arc::clone(&log), Arc::clone(&log));
            let reply = async move {
                locked(&begun).push(number);
                told.await.expect("told to go")
            };
            begin(&mut in_flight, reply, move |reply| {
                assert_eq!(reply.expect("a reply"), Value::Int(number));
                locked(&ended).push(number.saturating_add(100));
            });
            go.push((tell, number));
        }
        assert_eq!(*locked(&log), [0, 1, 2]);
        let (all, seen) = (Notify::new(), Arc::clone(&log));
        let others = async {
            for (tell, number) in go.into_iter().rev() {
                tell.send(Value::Int(number)).expect("it listens");
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
        let wait = |seconds| tokio::time::advance(Duration::from_secs(seconds));
        let mut in_flight = InFlight::new(SECOND * 2);
        let late = async |in_flight: &mut InFlight| {
            let silent = future::pending();
            begin(in_flight, silent, |reply| {
                assert!(reply.expect_err("no reply").is_unknown());
            });
            assert!(in_flight.answered().await);
        };
        for _ in 0..2 {
            wait(3_600).await;
            // Seven seconds in vain, with pauses, and then an answer.
            for pause in [0, 0, 1] {
                wait(pause).await;
                late(&mut in_flight).await;
                assert!(!in_flight.is_broken);
            }
            begin(&mut in_flight, future::ready(Value::Okay), drop);
            assert!(in_flight.answered().await);
        }
        for _ in 0..3 {
            late(&mut in_flight).await;
            wait(60).await;
            assert!(!in_flight.is_broken);
        }
        late(&mut in_flight).await;
        assert!(in_flight.is_broken);
    }

    /// A thread that stands still between handing a batch over and looking for its replies finds
    /// them there, and those of the batches before it too.
    #[tokio::test]
    async fn replies_that_are_there_at_once_are_heard_behind_those_before_them() {
        let log = Arc::<Mutex<Vec<i64>>>::default();
        let mut in_flight = InFlight::new(SECOND * 60);
        let hear = |number| {
            let log = Arc::clone(&log);
            move |_| locked(&log).push(number)
        };
        let soon = async {
            yield_now().await;
            Value::Okay
        };
        begin(&mut in_flight, soon, hear(0));
        begin(&mut in_flight, future::ready(Value::Okay), hear(1));
        in_flight.end().await;
        assert_eq!(*locked(&log), [0, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn each_fails_at_its_own_time_whoever_was_answered_before() {
        let log = Arc::<Mutex<Vec<_>>>::default();
        let mut in_flight = InFlight::new(SECOND * 60);
        let started = Instant::now();
        for seconds in [1, 2, 3] {
            let log = Arc::clone(&log);
            let silent = future::pending();
            in_flight.response_timeout = SECOND * seconds;
            begin(&mut in_flight, silent, move |reply| {
                let error = reply.expect_err("no reply");
                let timed_out = error.is_unknown() && !error.is_broken_connection();
                locked(&log).push((started.elapsed().as_secs(), timed_out));
            });
            if seconds == 1 {
                // Answered in time: the alarm that was set for it goes off for the next.
                in_flight.exchanges.clear();
                let answered = async {
                    yield_now().await;
                    Value::Okay
                };
                begin(&mut in_flight, answered, drop);
            }
        }
        in_flight.end().await;
        assert_eq!(*locked(&log), [(2, true), (3, true)]);
    }

    #[tokio::test]
    async fn a_connection_to_a_replica_is_not_used_any_more() {
        let mut in_flight = InFlight::new(SECOND * 60);
        let refusal = redis::parse_redis_value(b"-READONLY no\r\n").expect("a reply");
        begin(&mut in_flight, future::ready(refusal), drop);
        assert!(in_flight.answered().await);
        assert!(in_flight.is_broken);
    }
}
