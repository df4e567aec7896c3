//! The command connection to a server, and the task that owns it. Every command goes through it in
//! the order of hand-over, so a command can never overtake an earlier one that it undoes.
//!
//! The link sends again: it binds each new connection to the session (RLOCK.BIND), and sends all
//! unanswered commands there, in order. BIND closes the former connection first, so the server
//! carries out no command from it afterwards. That makes it safe to give up a connection that is
//! only slow.
//!
//! Waiting commands go out together, a few dozen in a write. The task waits for the replies itself.
//! A command is handed over with a callback for its reply, which runs here and must not block.

use std::collections::VecDeque;
use std::future::{pending, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::Value;
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use crate::error::{Code, Error};
use crate::wire::command::Counted;
use crate::wire::connection::Batch;
use crate::wire::reply::{read_bound, read_by};
use crate::wire::session::Answers;
use crate::wire::{
    Answered, Connection, Connector, Expected, Listener, Manner, Outcome, Replies, Request,
    Sending, Session, request,
};
use crate::{PAUSE_MAX, Pace, task};

/// The handle of the task, which ends with it when all is answered.
pub(crate) struct Link {
    requests: mpsc::UnboundedSender<Request>,
    unanswered: Arc<AtomicUsize>,
}

impl Link {
    /// Starts the task, which connects as soon as the session is there.
    pub(crate) fn start(
        runtime: &Handle,
        connector: Connector,
        session: &Arc<Session>,
        listener: Weak<dyn Listener>,
    ) -> Self {
        // The alarm needs a runtime. A guard may be dropped outside of one, and its release may
        // start the link to a node that has taken the place of another.
        let _in_runtime = runtime.enter();
        let (requests, queue) = mpsc::unbounded_channel();
        let driver = Driver {
            connector,
            answers: session.answers(),
            session: Arc::clone(session),
            listener,
            pace: Pace::default(),
            queue,
            is_closed: false,
            unsent: VecDeque::new(),
            paused: Vec::new(),
            paused_until: None,
            alarm: Alarm::new(),
        };
        runtime.spawn(task(driver.run()));
        let unanswered = Arc::default();
        Self {
            requests,
            unanswered,
        }
    }

    /// Hands a command over, at once and without waiting: its place in the order is fixed when this
    /// returns.
    pub(crate) fn send(&self, request: Request) {
        if let Some(unsent) = self.hand_over(request) {
            unsent.fail(Error::unavailable("the runtime of the client has ended"));
        }
    }

    /// The same; the request comes back if the task has gone, and the runtime with it.
    #[must_use = "its caller is to hear of it"]
    pub(crate) fn hand_over(&self, mut request: Request) -> Option<Request> {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        request.expected.counted = Some(Counted(Arc::clone(&self.unanswered)));
        self.requests.send(request).err().map(|unsent| unsent.0)
    }

    /// Whether the limit of unanswered commands is reached.
    pub(crate) fn is_full(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) >= UNANSWERED_MAX
    }
}

/// The task.
struct Driver {
    connector: Connector,
    session: Arc<Session>,
    answers: Answers,
    listener: Weak<dyn Listener>,
    pace: Pace,
    queue: mpsc::UnboundedReceiver<Request>,
    /// No more will come.
    is_closed: bool,
    /// Commands to be sent, in order; some were sent before on another connection.
    unsent: VecDeque<Request>,
    /// Commands that the server refused for a passing reason, in order; and the end of the pause.
    paused: Vec<Request>,
    paused_until: Option<Instant>,
    alarm: Alarm,
}

impl Driver {
    async fn run(mut self) {
        while let Some((mut connection, life)) = self.bound().await {
            self.send_elsewhere();
            let unanswered = self.serve(&mut connection, life).await;
            drop(connection);
            self.send_again(unanswered);
            if self.is_over() {
                break;
            }
        }
    }

    /// Whether there is nothing more to do.
    fn is_over(&self) -> bool {
        self.is_closed && self.unsent.is_empty()
    }

    /// Connects and binds until it works. Returns the session's life as well; `None` when no caller
    /// waits for it any more.
    async fn bound(&mut self) -> Option<(Connection, i64)> {
        // A connection of a session that is not there yet would be refused.
        let (mut heard, mut strangers) = (0, 0_u32);
        loop {
            if self.session.is_retired() {
                self.hand_on().await?;
            }
            let mut answers = self.session.answers();
            self.meanwhile(async move { answers.more_than(heard).await })
                .await?;
            let mut pace = std::mem::take(&mut self.pace);
            pace = self
                .meanwhile(async move {
                    pace.keep(PAUSE_MAX).await;
                    pace
                })
                .await?;
            self.pace = pace;
            let count = self.answers.count();
            let (connector, limit) = (
                self.connector.clone(),
                self.connector.dialer.response_timeout,
            );
            let bind = request::bind(&self.session.name, self.session.next_epoch());
            let mut answers = self.session.answers();
            let binding = async move {
                let opened = tokio::select! {
                    connection = connector.open() => connection,
                    () = answers.retired() => Err(Error::elsewhere()),
                };
                let connection = opened?;
                let reply = timeout(limit, connection.ask_one(bind)).await;
                let mut replies = reply.unwrap_or_else(|_| Err(Error::no_reply(None)))?;
                let reply = replies.pop().ok_or_else(|| Error::no_reply(None));
                Ok::<_, Error>((connection, read_by(reply, read_bound)?))
            };
            match self.meanwhile(binding).await? {
                Ok((connection, (life, server))) => {
                    if !self.session.set_bound(Ok((life, server.into()))) {
                        // Another server is at this address. The client asks it which node serves
                        // which slot.
                        if let Some(client) = self.listener.upgrade() {
                            client.broken(&self.session);
                        }
                    } else if self.answers.life() == Some(life) {
                        return Some((connection, life));
                    }
                    heard = count;
                }
                Err(error) => {
                    let is_refused =
                        error.code().is_without_session() || error.code() == Code::Stale;
                    heard = if is_refused { count } else { 0 };
                    strangers = if is_refused {
                        strangers.saturating_add(1)
                    } else {
                        0
                    };
                    if strangers >= STRANGERS_MAX {
                        strangers = 0;
                        self.session.add_doubt();
                    }
                    if !is_refused {
                        self.session.set_bound(Err(error.clone()));
                    }
                    self.could_not(&error);
                }
            }
        }
    }

    /// Waits for this while commands are handed over, and callers' time runs out.
    async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = Box::pin(work);
        let mut batch = Vec::new();
        loop {
            self.alarm
                .set(self.unsent.iter().find_map(|one| one.expected.until));
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                count = self.queue.recv_many(&mut batch, BATCH_MAX), if !self.is_closed => {
                    self.is_closed = count == 0;
                    self.take(&mut batch);
                }
                () = self.alarm.rings() => {
                    let trouble = self.session.trouble();
                    let stays = |one: &mut Request| {
                        !one.expected.is_due() || one.expected.overdue(&trouble)
                    };
                    self.unsent.retain_mut(stays);
                }
            }
            if self.is_closed && self.listener.upgrade().is_none() {
                // The client is gone: commands without an answer within their time are dropped.
                self.unsent.retain(|one| one.expected.until.is_some());
            }
            if self.is_over() {
                return None;
            }
        }
    }

    /// The node is retired: passes its commands on to other nodes.
    async fn hand_on(&mut self) -> Option<()> {
        loop {
            self.listener.upgrade()?;
            self.could_not(&Error::elsewhere());
            let mut batch = Vec::new();
            self.is_closed = self.queue.recv_many(&mut batch, BATCH_MAX).await == 0;
            self.take(&mut batch);
            if self.is_over() {
                return None;
            }
        }
    }

    /// Queues new commands. Their response timeout starts now.
    fn take(&mut self, batch: &mut Vec<Request>) {
        let until = Instant::now().checked_add(self.connector.dialer.response_timeout);
        self.unsent.extend(batch.drain(..).map(|mut request| {
            if request.expected.hops == 0 {
                request.expected.until = until;
            }
            request.expected.hops = request.expected.hops.saturating_add(1);
            request
        }));
    }

    /// The server was not reached, or it has refused the connection. Calls that cannot succeed fail
    /// now, and commands for slots of another node go there.
    fn could_not(&mut self, error: &Error) {
        let listener = self.listener.upgrade();
        for mut request in std::mem::take(&mut self.unsent) {
            let is_home =
                |client: &Arc<dyn Listener>| client.is_home(&self.session, &request.expected.name);
            let client = listener.as_ref().filter(|client| !is_home(client));
            let is_unsent = request.expected.sent.is_none();
            match (client, request.expected.manner) {
                (Some(_), Manner::Asks) => request.fail(Error::elsewhere()),
                (Some(client), _) => client.redirected(&self.session, request, Error::elsewhere()),
                (None, Manner::Asks | Manner::Once) if error.is_final() && is_unsent => {
                    request.expected.told(Err(error.clone()));
                }
                (None, _) => self.unsent.push_back(request),
            }
        }
    }

    /// Passes on the unanswered commands that were meant to follow an `ASKING`: the slot may have
    /// moved since.
    fn send_elsewhere(&mut self) {
        let unsent = std::mem::take(&mut self.unsent);
        let (asking, others): (Vec<_>, Vec<_>) =
            unsent.into_iter().partition(|one| one.expected.asking);
        self.unsent = others.into();
        for request in asking {
            match self.listener.upgrade() {
                Some(client) if request.expected.manner != Manner::Asks => {
                    client.redirected(&self.session, request, Error::elsewhere());
                }
                _ => request.fail(Error::elsewhere()),
            }
        }
    }

    /// Sends commands and handles replies until the connection is over. Returns the unanswered
    /// commands.
    async fn serve(&mut self, connection: &mut Connection, life: i64) -> InFlight {
        let mut in_flight = InFlight::new(self.connector.dialer.response_timeout);
        let mut batch = Vec::new();
        while !in_flight.is_broken && !connection.is_over() {
            let is_quiet = self.unsent.is_empty() && self.paused.is_empty();
            if self.is_closed && is_quiet && in_flight.exchanges.is_empty() {
                break;
            }
            // In another life of the session nothing is sent here any more.
            while !self.unsent.is_empty() && self.carry(connection, life, &mut in_flight) {
                // Written at once, and not only with the next.
                if !self.queue.is_empty() || !self.unsent.is_empty() {
                    yield_now().await;
                }
            }
            let next = in_flight.next_look().into_iter().chain(self.paused_until);
            let takes_more = !self.is_closed && self.unsent.is_empty();
            self.alarm.set(next.min());
            tokio::select! {
                biased;
                () = self.answers.other_life(life) => break,
                answer = in_flight.answer() => {
                    self.end(&mut in_flight, answer);
                    // Yields between replies: callers that were answered can send their next
                    // command before the rest are told, which keeps the server busy.
                    if !in_flight.exchanges.is_empty() {
                        yield_now().await;
                    }
                }
                count = self.queue.recv_many(&mut batch, BATCH_MAX), if takes_more => {
                    self.is_closed = count == 0;
                    self.take(&mut batch);
                }
                () = self.alarm.rings() => {
                    in_flight.look();
                    if self.paused_until.is_some_and(|until| until <= Instant::now()) {
                        self.paused_until = None;
                        self.unsent.extend(self.paused.drain(..));
                    }
                }
                () = connection.over() => break,
            }
        }
        in_flight
    }

    /// Sends the next in one write.
    fn carry(&mut self, connection: &Connection, life: i64, in_flight: &mut InFlight) -> bool {
        // Only in the life to which the connection is bound. In another life the reply would count
        // for the wrong session.
        let present = self.session.present();
        let Some(confidence) = present.filter(|present| present.life == life) else {
            return false;
        };
        let session = Arc::clone(&self.session);
        let sent = Sending {
            at: Instant::now(),
            again: false,
            session,
            confidence,
        };
        let count = self.unsent.len().min(BATCH_MAX);
        let mut expected = SmallVec::with_capacity(count);
        let calls = self.unsent.drain(..count).map(
            |Request {
                 cmd,
                 expected: mut one,
             }| {
                let again = one.sent.is_some();
                one.sent = Some(Sending {
                    again,
                    ..sent.clone()
                });
                let asking = one.asking;
                expected.push(one);
                (cmd, asking)
            },
        );
        let batch = Arc::new(Batch::new(calls));
        let replies = connection.ask(Arc::clone(&batch), in_flight.spare.take());
        in_flight.begin(replies, batch, expected);
        true
    }

    /// Calls the callback of each command in a batch.
    fn end(&mut self, in_flight: &mut InFlight, answer: Answered) {
        let Some(exchange) = in_flight.exchanges.pop_front() else {
            return;
        };
        let Ok(replies) = answer else {
            in_flight.exchanges.push_front(exchange);
            in_flight.is_broken = true;
            return;
        };
        in_flight.has_answered();
        in_flight.spare = Some(exchange.replies);
        let mut replies = replies.into_iter();
        for (place, mut one) in exchange.expected.into_iter().enumerate() {
            let reply = replies.next().ok_or_else(|| Error::no_reply(None));
            if let Ok(Value::ServerError(refusal)) = &reply
                && let Some(error) = misdirected(refusal, one.manner)
                && let Some(cmd) = exchange.batch.cmds().into_iter().nth(place)
            {
                // This copy was not carried out; one before it may have been.
                one.sent.take_if(|sent| !sent.again);
                let request = Request { cmd, expected: one };
                if !error.code().is_misdirection() {
                    self.pause(request, error);
                } else if error.code() == Code::ReadOnly {
                    // A server that has been made a replica carries nothing out: the next
                    // connection looks for the primary.
                    in_flight.is_broken = true;
                    in_flight.put_back.push(request);
                } else if let Some(client) = self.listener.upgrade() {
                    client.redirected(&self.session, request, error);
                }
                continue;
            }
            one.told(reply);
        }
    }

    /// The server cannot do it just now: its caller hears why, and it is sent again after a pause.
    fn pause(&mut self, mut request: Request, error: Error) {
        request.expected.until = None;
        (request.expected.then)(Outcome::Overdue(error));
        self.paused.push(request);
        let until = Instant::now().checked_add(PAUSE_MAX);
        self.paused_until = self.paused_until.or(until);
    }

    /// The connection is over: queues its unanswered commands again, in order, if they may be sent
    /// twice.
    fn send_again(&mut self, in_flight: InFlight) {
        let mut again = std::mem::take(&mut self.paused);
        self.paused_until = None;
        again.extend(in_flight.put_back);
        for exchange in in_flight.exchanges {
            drop(exchange.replies);
            for (cmd, mut one) in exchange.batch.cmds().into_iter().zip(exchange.expected) {
                if one.manner == Manner::Once {
                    one.told(Err(Error::no_reply(None)));
                } else {
                    again.push(Request { cmd, expected: one });
                }
            }
        }
        for request in again.into_iter().rev() {
            self.unsent.push_front(request);
        }
    }
}

/// Whether a command was not carried out because it has reached the wrong node, or the server
/// cannot do it just now, and is sent again by itself.
fn misdirected(refusal: &redis::ServerError, manner: Manner) -> Option<Error> {
    let error = Error::from_server(refusal.code(), refusal.details());
    let is_again = match manner {
        Manner::Asks => error.code() == Code::ReadOnly,
        Manner::Once => error.code().is_misdirection(),
        // The hold handles a missing session.
        Manner::Twice => {
            error.code().is_misdirection()
                || error.is_unavailable() && error.code() != Code::NoSession
        }
    };
    is_again.then_some(error)
}

/// Sent and unanswered commands, in order. Replies arrive in this order, and timeouts end in it.
struct InFlight {
    exchanges: VecDeque<Exchange>,
    /// The memory of an answered exchange, for the next one.
    spare: Option<Replies>,
    is_broken: bool,
    /// Commands that the server refused as a replica. They precede all others in flight.
    put_back: Vec<Request>,
    /// Since when nothing has come that was asked for.
    silent_since: Instant,
    response_timeout: Duration,
}

/// A batch that waits for its replies.
struct Exchange {
    replies: Replies,
    batch: Arc<Batch>,
    expected: SmallVec<[Expected; 1]>,
}

impl InFlight {
    fn new(response_timeout: Duration) -> Self {
        Self {
            exchanges: VecDeque::new(),
            spare: None,
            is_broken: false,
            put_back: Vec::new(),
            silent_since: Instant::now(),
            response_timeout,
        }
    }

    fn begin(
        &mut self,
        mut replies: Replies,
        batch: Arc<Batch>,
        expected: SmallVec<[Expected; 1]>,
    ) {
        if self.exchanges.is_empty() {
            self.silent_since = Instant::now();
        }
        // The first poll puts the request into the connection's queue, so no later command can get
        // ahead of it. It needs no waker: the batch is polled again when it is the first.
        let mut nobody = Context::from_waker(Waker::noop());
        if let Poll::Ready(told) = replies.poll(&mut nobody) {
            // The thread stood still meanwhile. Earlier commands have their replies too, and must
            // be told first.
            replies.set(ready(told));
        }
        self.exchanges.push_back(Exchange {
            replies,
            batch,
            expected,
        });
    }

    /// The next reply; pending while nothing is in flight.
    async fn answer(&mut self) -> Answered {
        match self.exchanges.front_mut() {
            Some(first) => (&mut first.replies).await,
            None => pending().await,
        }
    }

    fn has_answered(&mut self) {
        self.silent_since = Instant::now();
    }

    /// When the first caller's time is up; the connection is given up at that time too.
    fn next_look(&self) -> Option<Instant> {
        let first = self.exchanges.front()?;
        let due = first.expected.iter().find_map(|one| one.until);
        let silent = self.silent_since.checked_add(self.response_timeout);
        due.into_iter().chain(silent).min()
    }

    /// Time has run out.
    fn look(&mut self) {
        let all = self
            .exchanges
            .iter_mut()
            .flat_map(|exchange| &mut exchange.expected);
        for one in all.filter(|one| one.is_due()) {
            // It was sent: it stays.
            one.overdue(&Error::not_attached());
        }
        let is_silent = self.silent_since.elapsed() >= self.response_timeout;
        self.is_broken |= is_silent && !self.exchanges.is_empty();
    }
}

/// Rings at a time. Most replies come before it, so it is set for later only when it has rung: to
/// set it for each would cost more than to look now and then in vain.
struct Alarm {
    sleep: Pin<Box<Sleep>>,
    set: Option<Instant>,
}

impl Alarm {
    fn new() -> Self {
        let sleep = Box::pin(sleep_until(Instant::now()));
        Self { sleep, set: None }
    }

    fn set(&mut self, at: Option<Instant>) {
        let is_early_enough = at.is_none_or(|at| self.set.is_some_and(|set| set <= at));
        if !is_early_enough && let Some(at) = at {
            self.sleep.as_mut().reset(at);
            self.set = Some(at);
        }
    }

    async fn rings(&mut self) {
        if self.set.is_none() {
            pending::<()>().await;
        }
        self.sleep.as_mut().await;
        self.set = None;
    }
}

/// The most commands in one write. A larger batch delays its first reply, and leaves the server
/// idle while the next batch is built.
const BATCH_MAX: usize = 32;

/// How often in a row a server may not know the session although the session was answered in
/// between.
const STRANGERS_MAX: u32 = 2;

/// The number of commands that may wait for their answers.
const UNANSWERED_MAX: usize = 100_000;
