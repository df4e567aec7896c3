//! The command connection to a server, and the task that owns it. Every command goes through it in
//! the order of hand-over, so a command can never overtake an earlier one that it undoes.
//!
//! The link sends again: it binds each new connection to the session (RLOCK.BIND), and sends all
//! unanswered commands there, in order. BIND closes the former connection first, so the server
//! carries out no command from it afterwards. That makes it safe to give up a connection that is
//! only slow.
//!
//! The task waits for the replies itself. A command is handed over with a callback for its reply,
//! which runs here and must not block.

use std::collections::VecDeque;
use std::future::pending;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use redis::{Cmd, Pipeline, Value};
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::error::{Code, Error};
use crate::wire::reply::{read, read_by};
use crate::wire::session::State;
use crate::wire::{
    Connection, Connector, Listener, Manner, Replies, Request, Sending, Session, request,
};
use crate::{PAUSE_MAX, Pace, task};

/// The handle of the task, which ends with it when all is answered.
pub(crate) struct Link {
    requests: mpsc::UnboundedSender<Request>,
    /// Each command without an answer has a clone.
    unanswered: Arc<()>,
}

impl Link {
    /// Starts the task, which connects as soon as the session is there.
    pub(crate) fn start(
        runtime: &Handle,
        connector: Connector,
        session: &Arc<Session>,
        listener: Weak<dyn Listener>,
    ) -> Self {
        // A guard may be dropped outside of a runtime, and its release start a link to a node.
        let _in_runtime = runtime.enter();
        let (requests, queue) = mpsc::unbounded_channel();
        let binder = Arc::new(Binder {
            connector,
            session: Arc::clone(session),
            listener,
            tries: Mutex::default(),
        });
        let driver = Driver {
            state: session.state.subscribe(),
            binder: Arc::clone(&binder),
            commands: VecDeque::new(),
            in_flight: VecDeque::new(),
            refused: Vec::new(),
            spare: None,
            heard: Instant::now(),
            due: None,
            paused_until: None,
            alarm: Box::pin(sleep_until(Instant::now())),
            rings_at: None,
        };
        runtime.spawn(task(driver.run(queue)));
        Self {
            requests,
            unanswered: Arc::default(),
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
        request.counted = Some(Arc::clone(&self.unanswered));
        self.requests.send(request).err().map(|unsent| unsent.0)
    }

    /// Whether the limit of unanswered commands is reached.
    pub(crate) fn is_full(&self) -> bool {
        Arc::strong_count(&self.unanswered) > UNANSWERED_MAX
    }
}

/// Opens connections, and binds them to the session.
struct Binder {
    connector: Connector,
    session: Arc<Session>,
    listener: Weak<dyn Listener>,
    /// The pace of the tries, and the number of the session's answers after which the next one may
    /// succeed.
    tries: Mutex<(Pace, u64)>,
}

impl Binder {
    /// Tries to bind a connection in the present life of the session, when that may succeed. There
    /// is one try at a time.
    async fn bind(self: Arc<Self>) -> Result<Bound, Error> {
        let mut tries = self.tries.lock().await;
        let (pace, heard) = &mut *tries;
        let mut state = self.session.state.subscribe();
        if state.borrow().is_retired {
            pending::<()>().await;
        }
        // A connection of a session that is not there yet would be refused. The sender of this is
        // the session's, which is here.
        let is_next = |state: &State| state.is_retired || state.answers > *heard;
        let _ = state.wait_for(is_next).await;
        pace.keep(PAUSE_MAX).await;
        let answers = state.borrow().answers;
        let bound = tokio::select! {
            bound = self.try_to_bind() => bound,
            _ = state.wait_for(|state| state.is_retired) => Err(Error::elsewhere()),
        };
        let is_early = |error: &Error| matches!(error.code(), Code::NoSession | Code::Stale);
        *heard = if bound.as_ref().is_err_and(is_early) {
            answers
        } else {
            0
        };
        bound
    }

    async fn try_to_bind(&self) -> Result<Bound, Error> {
        let session = &self.session;
        let bound = async {
            let connection = self.connector.open().await?;
            let bind = request::bind(&session.name, session.next_epoch());
            let limit = self.connector.dialer.response_timeout;
            let reply = connection.socket.ask(bind, limit).await;
            Ok::<_, Error>((connection, read_by(reply, read::<(i64, String)>)?))
        };
        match bound.await {
            Ok((connection, (life, server))) => {
                if !session.set_bound(Ok((life, server.into()))) {
                    // Another server is at this address. The client asks it which node serves which
                    // slot.
                    if let Some(client) = self.listener.upgrade() {
                        client.broken(session);
                    }
                    return Err(Error::elsewhere());
                }
                let is_present = session.life() == Some(life);
                let unheard = || Error::from_text("STALE the session lives another life");
                is_present
                    .then_some(Bound { connection, life })
                    .ok_or_else(unheard)
            }
            Err(error) if matches!(error.code(), Code::NoSession | Code::Stale) => {
                // The session's connection may lead to another server.
                session.doubt.notify_waiters();
                Err(error)
            }
            Err(error) => {
                session.set_bound(Err(error.clone()));
                Err(error)
            }
        }
    }
}

/// A connection, and the life of the session to which it is bound.
struct Bound {
    connection: Connection,
    life: i64,
}

/// The state of the connection.
enum Line {
    Binding(BoxFuture<'static, Result<Bound, Error>>),
    Bound(Bound),
}

impl Line {
    /// Waits for the end of a try to bind; or, with `None`, until the connection is of no use: it
    /// is over, or the session is not in its life any more.
    async fn changes(
        &mut self,
        state: &mut watch::Receiver<State>,
    ) -> Option<Result<Bound, Error>> {
        match self {
            Self::Binding(binding) => Some(binding.await),
            Self::Bound(Bound { connection, life }) => {
                tokio::select! {
                    _ = state.wait_for(|now| now.is_retired || now.life() != Some(*life)) => {}
                    () = connection.over() => {}
                }
                None
            }
        }
    }
}

/// Commands that were sent in one write, and wait for their replies. The pipeline has their words.
struct Exchange {
    requests: SmallVec<[Request; 1]>,
    pipeline: Arc<Pipeline>,
    replies: Replies,
}

/// The task.
struct Driver {
    binder: Arc<Binder>,
    state: watch::Receiver<State>,
    /// The commands to be sent, in order.
    commands: VecDeque<Request>,
    /// Those that were sent on the present connection, in order.
    in_flight: VecDeque<Exchange>,
    /// Those that the server has refused as a replica. They precede all others.
    refused: Vec<Request>,
    /// The memory of replies, for the next ones.
    spare: Option<Replies>,
    /// When a reply came last, or the first of these was sent.
    heard: Instant,
    /// When a caller's time is up next.
    due: Option<Instant>,
    /// The server cannot do it just now.
    paused_until: Option<Instant>,
    /// Most replies come before it rings, so it is set for later only when it has rung: to set it
    /// for each would cost more than to look now and then in vain.
    alarm: Pin<Box<Sleep>>,
    rings_at: Option<Instant>,
}

impl Driver {
    async fn run(mut self, mut queue: mpsc::UnboundedReceiver<Request>) {
        let response_timeout = self.binder.connector.dialer.response_timeout;
        let mut line = Line::Binding(Arc::clone(&self.binder).bind().boxed());
        let (mut batch, mut is_closed) = (Vec::new(), false);
        while !(is_closed && self.commands.is_empty() && self.in_flight.is_empty()) {
            let mut is_broken = false;
            match &line {
                Line::Bound(bound) => self.carry(bound).await,
                Line::Binding(_) if self.binder.session.is_retired() => {
                    self.could_not(&Error::elsewhere());
                }
                // The client is gone: commands without an answer within their time are dropped.
                Line::Binding(_) if is_closed && self.binder.listener.strong_count() == 0 => {
                    self.commands.retain(|one| one.until.is_some());
                }
                Line::Binding(_) => {}
            }
            self.set_alarm(response_timeout);
            tokio::select! {
                biased;
                change = line.changes(&mut self.state) => match change {
                    Some(Ok(bound)) => {
                        // A slot that was on its way may have arrived, or stayed.
                        self.pass_on(|request| request.asking);
                        line = Line::Bound(bound);
                    }
                    Some(Err(error)) => {
                        self.could_not(&error);
                        is_broken = true;
                    }
                    None => is_broken = true,
                },
                replies = next_replies(&mut self.in_flight) => {
                    is_broken = !self.answered(replies);
                    // Callers that were answered can send their next commands before the others are
                    // told, which keeps the server busy.
                    yield_now().await;
                }
                count = queue.recv_many(&mut batch, BATCH_MAX), if !is_closed => {
                    is_closed = count == 0;
                    self.take(&mut batch, Instant::now().checked_add(response_timeout));
                }
                () = &mut self.alarm, if self.rings_at.is_some() => {
                    is_broken = !self.look(response_timeout);
                }
            }
            if is_broken {
                line = Line::Binding(Arc::clone(&self.binder).bind().boxed());
                self.begin_anew();
            }
        }
    }

    /// Queues new commands. Their response timeout starts now.
    fn take(&mut self, batch: &mut Vec<Request>, until: Option<Instant>) {
        for mut request in batch.drain(..) {
            if request.hops == 0 {
                request.until = until;
            }
            request.hops = request.hops.saturating_add(1);
            self.due = self.due.into_iter().chain(request.until).min();
            self.commands.push_back(request);
        }
    }

    /// Sends all that may be sent. In another life of the session than the connection's, a reply
    /// would count for the wrong one.
    async fn carry(&mut self, bound: &Bound) {
        while !self.commands.is_empty() && self.paused_until.is_none() {
            let present = self.binder.session.present();
            let Some(confidence) = present.filter(|present| present.life == bound.life) else {
                return;
            };
            let at = Instant::now();
            if self.in_flight.is_empty() {
                self.heard = at;
            }
            let count = self.commands.len().min(BATCH_MAX);
            let mut requests: SmallVec<[Request; 1]> = self.commands.drain(..count).collect();
            let mut pipeline = Pipeline::with_capacity(count);
            for request in &mut requests {
                request.sent = Some(Sending {
                    at,
                    again: request.sent.is_some(),
                    session: Arc::clone(&self.binder.session),
                    confidence: Arc::clone(&confidence),
                });
                if request.asking {
                    pipeline.cmd("ASKING");
                }
                pipeline.add_command(std::mem::take(&mut request.cmd));
            }
            let pipeline = Arc::new(pipeline);
            let replies = bound.connection.socket.send(&pipeline, self.spare.take());
            self.in_flight.push_back(Exchange {
                requests,
                pipeline,
                replies,
            });
            if !self.commands.is_empty() {
                // These are written at once, and not only with the next.
                yield_now().await;
            }
        }
    }

    /// Tells the callers of the first replies. Whether the connection is of use still.
    fn answered(&mut self, replies: Result<Vec<Value>, Error>) -> bool {
        let Ok(replies) = replies else { return false };
        self.heard = Instant::now();
        let Some(exchange) = self.in_flight.pop_front() else {
            return true;
        };
        let (mut replies, mut cmds) = (replies.into_iter(), exchange.pipeline.cmd_iter());
        for request in exchange.requests {
            if request.asking {
                // Told to nobody. An error would be that of the command, too.
                replies.next();
                cmds.next();
            }
            self.ends(request, replies.next(), cmds.next());
        }
        self.spare = Some(exchange.replies);
        self.refused.is_empty()
    }

    /// Ends a command with this reply, unless it must be sent once more.
    fn ends(&mut self, mut request: Request, reply: Option<Value>, cmd: Option<&Cmd>) {
        let error = reply.as_ref();
        let error = error.and_then(|reply| not_carried_out(reply, request.manner));
        let Some((error, cmd)) = error.zip(cmd) else {
            return request.told(reply.ok_or_else(|| Error::no_reply(None)));
        };
        request.cmd = cmd.clone();
        // This copy was not carried out; one before it may have been.
        request.sent.take_if(|sent| !sent.again);
        if error.code() == Code::ReadOnly {
            // A server that has been made a replica carries nothing out: the next connection looks
            // for the primary.
            self.refused.push(request);
        } else if error.code().is_misdirection() {
            self.elsewhere(request, error);
        } else {
            request.put_off(error);
            self.commands.push_back(request);
            self.paused_until = Instant::now().checked_add(PAUSE_MAX);
        }
    }

    /// The server was not reached, or it has refused the connection. Calls that cannot succeed fail
    /// now, and commands for slots of another node go there.
    fn could_not(&mut self, error: &Error) {
        let (listener, session) = (
            self.binder.listener.upgrade(),
            Arc::clone(&self.binder.session),
        );
        listener.as_ref().inspect(|client| client.refused());
        self.pass_on(|request| {
            let client = listener.as_ref();
            client.is_some_and(|client| !client.is_home(&session, &request.name))
        });
        if error.is_final() {
            self.commands.retain_mut(|request| {
                let stays = request.manner == Manner::Twice || request.sent.is_some();
                if !stays {
                    request.told(Err(error.clone()));
                }
                stays
            });
        }
    }

    /// Passes these on, to where their locks are.
    fn pass_on(&mut self, is_meant: impl Fn(&Request) -> bool) {
        let all = std::mem::take(&mut self.commands);
        let (meant, others): (Vec<_>, Vec<_>) = all.into_iter().partition(is_meant);
        self.commands = others.into();
        for request in meant {
            self.elsewhere(request, Error::elsewhere());
        }
    }

    fn elsewhere(&self, request: Request, error: Error) {
        match self.binder.listener.upgrade() {
            Some(client) => client.redirected(&self.binder.session, request, error),
            None => request.fail(error),
        }
    }

    /// The connection is over: its unanswered commands are sent again, in order, if they may be
    /// sent twice.
    fn begin_anew(&mut self) {
        self.paused_until = None;
        let mut again = std::mem::take(&mut self.refused);
        for exchange in std::mem::take(&mut self.in_flight) {
            let mut cmds = exchange.pipeline.cmd_iter();
            for mut request in exchange.requests {
                let cmd = cmds.by_ref().nth(usize::from(request.asking));
                match cmd.filter(|_| request.manner != Manner::Once) {
                    Some(cmd) => {
                        request.cmd = cmd.clone();
                        again.push(request);
                    }
                    None => request.told(Err(Error::no_reply(None))),
                }
            }
        }
        again.extend(self.commands.drain(..));
        self.commands = again.into();
    }

    /// Sets the alarm, if it would ring too late.
    fn set_alarm(&mut self, response_timeout: Duration) {
        let silent = self.heard.checked_add(response_timeout);
        let silent = silent.filter(|_| !self.in_flight.is_empty());
        let next = [self.due, self.paused_until, silent].into_iter().flatten();
        if let Some(next) = next.min()
            && self.rings_at.is_none_or(|at| next < at)
        {
            self.alarm.as_mut().reset(next);
            self.rings_at = Some(next);
        }
    }

    /// Tells the callers whose time is up. Whether the connection is of use still: it has not been
    /// silent for too long.
    fn look(&mut self, response_timeout: Duration) -> bool {
        let (now, trouble) = (Instant::now(), self.binder.session.trouble());
        self.rings_at = None;
        self.paused_until.take_if(|until| *until <= now);
        let mut due = None::<Instant>;
        let mut stays = |request: &mut Request| match request.until {
            Some(until) if until <= now => request.overdue(&trouble),
            until => {
                due = due.into_iter().chain(until).min();
                true
            }
        };
        let in_flight = self.in_flight.iter_mut();
        for request in in_flight.flat_map(|exchange| &mut exchange.requests) {
            // It was sent: it stays.
            stays(request);
        }
        self.commands.retain_mut(stays);
        self.due = due;
        let silent = now.saturating_duration_since(self.heard);
        self.in_flight.is_empty() || silent < response_timeout
    }
}

/// Why a command is sent again by itself, if it is: it has reached the wrong server, or one that
/// cannot carry it out just now.
fn not_carried_out(reply: &Value, manner: Manner) -> Option<Error> {
    let Value::ServerError(error) = reply else {
        return None;
    };
    let error = Error::from_server(error.code(), error.details());
    // A missing session is for the hold to handle.
    let passes = error.is_unavailable() && error.code() != Code::NoSession;
    let is_again = error.code().is_misdirection() || passes && manner == Manner::Twice;
    is_again.then_some(error)
}

/// The first replies; pending while nothing is in flight.
async fn next_replies(in_flight: &mut VecDeque<Exchange>) -> Result<Vec<Value>, Error> {
    match in_flight.front_mut() {
        Some(first) => (&mut first.replies).await,
        None => pending().await,
    }
}

/// The most commands in one write. A larger batch delays its first reply, and leaves the server
/// idle while the next batch is built.
const BATCH_MAX: usize = 32;

/// The number of commands that may wait for their answers.
const UNANSWERED_MAX: usize = 100_000;
