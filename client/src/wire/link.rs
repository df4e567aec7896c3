//! The command connection to a server, and the task that owns it. Every command goes through it, in
//! the order in which it was handed over, so that what undoes a command can never overtake it.
//!
//! The link sends again: a connection is bound to the session (RLOCK.BIND), and what was not
//! answered on the one before is sent anew, in order. The server has closed that by then, and
//! carries nothing out any more that it has not read. So a connection that is merely slow may be
//! given up at any time.
//!
//! What waits to be sent goes out together, a few dozen commands in a write, and the task waits for
//! the replies itself. What is done with a reply is said when its command is handed over, and done
//! here, so it must not wait for anything.

use std::collections::VecDeque;
use std::future::{pending, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use crate::error::Error;
use crate::wire::connection::Batch;
use crate::wire::reply::{read_bound, read_by};
use crate::wire::session::Answers;
use crate::wire::{
    Answered, Confidence, Connection, Connector, Listener, Replies, Session, request,
};
use crate::{PAUSE_MAX, Pace, task};

/// The handle of the task, which ends with it when all is answered.
pub(crate) struct Link {
    requests: mpsc::UnboundedSender<Request>,
    unanswered: Arc<AtomicUsize>,
}

/// A command that waits to be sent, or for its answer.
pub(crate) struct Request {
    pub(crate) cmd: Cmd,
    pub(crate) expected: Expected,
}

/// What is known of a command beside its words.
pub(crate) struct Expected {
    then: Then,
    /// The lock that it is about.
    pub(crate) name: Arc<[u8]>,
    manner: Manner,
    /// Whether it goes behind an `ASKING`: to a node to which its slot is on its way.
    asking: bool,
    /// When its caller is told that no answer has come, if it was not told yet.
    until: Option<Instant>,
    /// So many links had it.
    pub(crate) hops: u32,
    /// When it was sent last, and what it counts on.
    sent: Option<Sending>,
    counted: Option<Counted>,
}

/// How a command is treated that was not answered, or was sent to the wrong node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// It is sent again; where else, its call decides.
    Asks,
    /// It is sent again, also to where its lock is by now.
    Twice,
    /// The same, if it was surely not carried out.
    Once,
}

/// What comes of a command.
pub(crate) enum Outcome {
    /// It was answered; or it was not carried out, or may not have been, and is sent no more.
    Told(Result<Value, Error>, Option<Sending>),
    /// Not for as long as a reply may take. An answer is still to come, if somebody wants it.
    Overdue(Error),
}

/// What to do with it.
pub(crate) type Then = Box<dyn FnMut(Outcome) + Send>;

/// When a command was sent, and what was known of the session then.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) at: Instant,
    /// Whether it had been sent before, and may have been carried out then.
    pub(crate) again: bool,
    pub(crate) session: Arc<Session>,
    pub(crate) confidence: Arc<Confidence>,
}

impl Sending {
    /// What counts for an answer now: once the session has another life, what was known before.
    pub(crate) fn confidence(&self) -> Arc<Confidence> {
        let present = self.session.present();
        let present = present.filter(|present| present.life == self.confidence.life);
        present.unwrap_or_else(|| Arc::clone(&self.confidence))
    }

    /// Whether the session has begun anew since.
    pub(crate) fn is_of_former_life(&self) -> bool {
        self.session.life() != Some(self.confidence.life)
    }
}

/// One of the commands without an answer.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Request {
    pub(crate) fn new(cmd: Cmd, name: &Arc<[u8]>, manner: Manner, then: Then) -> Self {
        let expected = Expected {
            then,
            name: Arc::clone(name),
            manner,
            asking: false,
            until: None,
            hops: 0,
            sent: None,
            counted: None,
        };
        Self { cmd, expected }
    }

    /// To the node to which its slot is on its way.
    pub(crate) fn asking(mut self, asking: bool) -> Self {
        self.expected.asking = asking;
        self
    }

    /// It is given up.
    pub(crate) fn fail(mut self, error: Error) {
        self.expected.told(Err(error));
    }
}

impl Expected {
    fn told(&mut self, reply: Result<Value, Error>) {
        drop(self.counted.take());
        (self.then)(Outcome::Told(reply, self.sent.take()));
    }

    /// No answer has come in time: whether its caller goes on waiting for one.
    fn overdue(&mut self, trouble: &Error) -> bool {
        self.until = None;
        if self.sent.is_some() {
            (self.then)(Outcome::Overdue(Error::no_reply(None)));
            return true;
        }
        match self.manner {
            Manner::Twice => {
                (self.then)(Outcome::Overdue(trouble.clone()));
                true
            }
            Manner::Asks | Manner::Once => {
                self.told(Err(trouble.clone()));
                false
            }
        }
    }
}

impl Link {
    /// Starts the task, which connects as soon as the session is there.
    pub(crate) fn start(
        runtime: &Handle,
        connector: Connector,
        session: &Arc<Session>,
        listener: Weak<dyn Listener>,
    ) -> Self {
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

    /// Whether so many wait for their answers that no more may.
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
    /// What is to be sent, or to be sent again, in order.
    unsent: VecDeque<Request>,
    /// What the server has refused for a reason that passes, in order; and until when it is not
    /// asked again.
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

    /// Connects and binds until it works; with which life of the session. `None` if nobody waits
    /// for it any more.
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
                    if !self.session.is_bound(Ok((life, server.into()))) {
                        // A stranger is at its address: it is asked who serves what.
                        if let Some(client) = self.listener.upgrade() {
                            client.broken(&self.session);
                        }
                    } else if self.answers.life() == Some(life) {
                        return Some((connection, life));
                    }
                    heard = count;
                }
                Err(error) => {
                    let is_refused = error.has_code("NOSESSION") || error.has_code("STALE");
                    heard = if is_refused { count } else { 0 };
                    strangers = if is_refused {
                        strangers.saturating_add(1)
                    } else {
                        0
                    };
                    if strangers >= STRANGERS_MAX {
                        strangers = 0;
                        self.session.is_doubted();
                    }
                    if !is_refused {
                        self.session.is_bound(Err(error.clone()));
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
                // What has no answer in time has none: whoever was to have one has gone.
                self.unsent.retain(|one| one.expected.until.is_some());
            }
            if self.is_over() {
                return None;
            }
        }
    }

    /// The node is not used any more: another has what is handed over here.
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

    /// What was handed over has the time for a reply from now on.
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

    /// The server was not reached, or has refused. Whoever cannot hope hears of it at once, and
    /// what is for a node that serves it no more goes elsewhere.
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

    /// What was to go behind an `ASKING` and was not answered: the slot may have moved since, to
    /// here or back.
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

    /// Sends and hears answers until the connection is over: what was not answered.
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
                    // Those who have been answered ask anew before the next are told, so that the
                    // server has something to do meanwhile.
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
        // What it counts on is known: the connection is bound to the session's life.
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

    /// Does with the replies to a batch what is to be done with each.
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
                one.sent = None;
                let request = Request { cmd, expected: one };
                if !error.is_misdirection() {
                    self.pause(request, error);
                } else if error.has_code("READONLY") {
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

    /// The connection is over. What may be sent twice is, in order.
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
        Manner::Asks => error.has_code("READONLY"),
        Manner::Once => error.is_misdirection(),
        // Of a session that is not there its hold hears.
        Manner::Twice => {
            error.is_misdirection() || error.is_unavailable() && !error.has_code("NOSESSION")
        }
    };
    is_again.then_some(error)
}

/// What has been sent on a connection and not been answered, in order.
///
/// The server answers in that order, and time runs out in it too.
struct InFlight {
    exchanges: VecDeque<Exchange>,
    /// The memory of one that has been answered, for the next.
    spare: Option<Replies>,
    is_broken: bool,
    /// What the server would not carry out, before all that is in flight.
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
        // Polled once here: that puts the request into the connection's line, which has room for
        // all, and nothing that is sent later can get before it. Nobody is to be woken yet: it is
        // polled again when it is the first.
        let mut nobody = Context::from_waker(Waker::noop());
        if let Poll::Ready(told) = replies.poll(&mut nobody) {
            // The thread stood still meanwhile. Those before it have their replies too, and are to
            // hear them first.
            replies.set(ready(told));
        }
        self.exchanges.push_back(Exchange {
            replies,
            batch,
            expected,
        });
    }

    /// The next answer; never, if there is none to come.
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

impl Expected {
    fn is_due(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
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

/// At most so many commands go out in one write: a reply waits for those behind it in the same, and
/// the server works on one while the next is made.
const BATCH_MAX: usize = 32;

/// So often in a row a server may not know the session although that was answered in between.
const STRANGERS_MAX: u32 = 2;

/// So many commands may wait for their answers.
const UNANSWERED_MAX: usize = 100_000;
