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
use std::pin::{Pin, pin};
use std::sync::Arc;

use futures_util::future::OptionFuture;
use futures_util::stream::{FuturesUnordered, StreamExt, unfold};
use redis::{Cmd, Pipeline, Value};
use smallvec::SmallVec;
use tokio::sync::mpsc;
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::error::{Code, Error};
use crate::wire::reply::{read, read_by};
use crate::wire::session::State;
use crate::wire::{Connection, Manner, Replies, Request, Sending, Session, request};
use crate::{PAUSE_MAX, Pace, task};

/// The handle of the task, which ends with it when all is answered.
pub(crate) struct Link {
    requests: mpsc::UnboundedSender<Request>,
    /// Each command without an answer has a clone.
    unanswered: Arc<()>,
}

impl Link {
    /// Starts the task, which connects as soon as the session is there.
    pub(crate) fn start(session: &Arc<Session>) -> Self {
        let (requests, queue) = mpsc::unbounded_channel();
        let driver = Driver {
            session: Arc::clone(session),
            commands: VecDeque::new(),
            in_flight: VecDeque::new(),
            refused: Vec::new(),
            heard: Instant::now(),
            due: None,
            paused_until: None,
        };
        let runtime = &session.identity.runtime;
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

/// A connection, and the life of the session to which it is bound.
struct Bound {
    connection: Connection,
    life: i64,
}

impl Bound {
    /// Tries to bind a connection in the present life of the session, when that may succeed: after
    /// more answers than `heard`. Also returns the number for the next try.
    async fn next(session: &Session, pace: &mut Pace, heard: u64) -> (Result<Self, Error>, u64) {
        let mut state = session.state.subscribe();
        if session.is_retired() {
            pending::<()>().await;
        }
        // A connection of a session that is not there yet would be refused. The sender of this is
        // the session's, which is here.
        let is_next = |state: &State| state.is_retired || state.answers > heard;
        let _ = state.wait_for(is_next).await;
        pace.keep(PAUSE_MAX).await;
        let answers = state.borrow().answers;
        let bound = tokio::select! {
            bound = Self::try_once(session) => bound,
            _ = state.wait_for(|state| state.is_retired) => Err(Error::elsewhere()),
        };
        let is_early = bound.as_ref().is_err_and(|error| error.code.is_early());
        (bound, if is_early { answers } else { 0 })
    }

    async fn try_once(session: &Session) -> Result<Self, Error> {
        let connection = session.connector.open().await;
        // Read now: an answer that comes after BIND is sent says nothing of what BIND will find.
        let answered = session.state.borrow().answered;
        let unbound = |error: &Error| session.set_unbound(error, answered);
        let connection = connection.inspect_err(unbound)?;
        let bind = request::bind(session.name(), connection.epoch);
        let socket = connection.socket.clone();
        let reply = socket.ask(bind, session.response_timeout()).await;
        let bound = read_by(reply, read::<(i64, String)>);
        let (life, server) = bound.inspect_err(unbound)?;
        session.set_bound(life, server.into())?;
        let is_present = session.life() == Some(life);
        let unheard = || Error::from_text("STALE the session lives another life");
        let bound = is_present.then_some(Self { connection, life });
        bound.ok_or_else(unheard)
    }

    /// Ends when the connection is of no use: it is over, or the session is not in its life any
    /// more.
    fn over(&self, session: &Session) -> impl Future<Output = ()> + use<> {
        let (life, mut state) = (self.life, session.state.subscribe());
        let over = self.connection.over();
        async move {
            tokio::select! {
                biased;
                _ = state.wait_for(|now| now.life() != Some(life)) => {}
                () = over => {}
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
    session: Arc<Session>,
    /// The commands to be sent, in order.
    commands: VecDeque<Request>,
    /// Those that were sent on the present connection, in order.
    in_flight: VecDeque<Exchange>,
    /// Those that the server has refused as a replica. They precede all others.
    refused: Vec<Request>,
    /// When a reply came last, or the first of these was sent.
    heard: Instant,
    /// When a caller's time is up next.
    due: Option<Instant>,
    /// The server cannot do it just now.
    paused_until: Option<Instant>,
}

impl Driver {
    async fn run(mut self, mut queue: mpsc::UnboundedReceiver<Request>) {
        let session = Arc::clone(&self.session);
        let bindings = unfold((Pace::default(), 0), async |(mut pace, heard)| {
            let (bound, heard) = Bound::next(&session, &mut pace, heard).await;
            Some((bound, (pace, heard)))
        });
        let (mut bindings, mut bound) = (pin!(bindings), None::<Bound>);
        // At most one. It is looked at only when it was woken: to listen anew for each command took
        // a seventh of the instructions of a lock.
        let mut over = FuturesUnordered::new();
        let (mut batch, mut is_closed, mut taken) = (Vec::new(), false, 0_usize);
        let mut alarm = pin!(sleep_until(self.heard));
        loop {
            match &bound {
                Some(bound) => self.carry(bound).await,
                None => self.wait_for_connection(is_closed),
            }
            if is_closed && self.commands.is_empty() && self.in_flight.is_empty() {
                return;
            }
            let is_set = self.set_alarm(alarm.as_mut());
            let first = self.in_flight.front_mut().map(|first| &mut first.replies);
            let is_of_use = tokio::select! {
                biased;
                Some(()) = over.next() => false,
                Some(tried) = bindings.next(), if bound.is_none() => {
                    // Commands whose way has changed go it before the others are sent: a slot that
                    // was on its way may have arrived, or stayed.
                    let tried = tried.inspect(|_| self.pass_on(|request| request.asking));
                    bound = tried.inspect_err(|error| self.could_not(error)).ok();
                    over.extend(bound.as_ref().map(|bound| bound.over(&session)));
                    bound.is_some()
                }
                // Before the replies: the server works on these while callers hear of those. Not
                // for ever: while many are handed over, the replies and the alarm have their turn.
                count = queue.recv_many(&mut batch, BATCH_MAX),
                    if !is_closed && taken < IN_A_ROW =>
                {
                    (is_closed, taken) = (count == 0, taken.saturating_add(1));
                    self.take(&mut batch);
                    true
                }
                Some(replies) = OptionFuture::from(first) => {
                    taken = 0;
                    let is_of_use = self.answered(replies);
                    if !self.in_flight.is_empty() {
                        // Callers that were answered can send their next commands before the others
                        // are told, which keeps the server busy.
                        yield_now().await;
                    }
                    is_of_use
                }
                () = alarm.as_mut(), if is_set => self.look(),
                () = yield_now(), if taken >= IN_A_ROW => {
                    taken = 0;
                    true
                }
            };
            if !is_of_use {
                bound = None;
                over.clear();
                self.begin_anew();
            }
        }
    }

    /// Ends commands that no connection will carry.
    fn wait_for_connection(&mut self, is_closed: bool) {
        let is_retired = self.session.is_retired();
        if is_closed && self.session.listener().is_none() {
            // The client is gone: commands without an answer within their time are dropped; and all
            // of them, if no connection will come.
            let stays = |one: &Request| one.until.is_some() && !is_retired;
            self.commands.retain(stays);
        } else if is_retired {
            self.could_not(&Error::elsewhere());
        }
    }

    /// Queues new commands. Their response timeout starts now.
    fn take(&mut self, batch: &mut Vec<Request>) {
        let until = Instant::now().checked_add(self.session.response_timeout());
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
            let present = self.session.present();
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
                let sending = Sending {
                    at,
                    again: request.sent.is_some(),
                    asking: request.asking,
                    session: Arc::clone(&self.session),
                    confidence: Arc::clone(&confidence),
                };
                if let Some(hold) = &request.hold {
                    hold.may_be_tied(&sending);
                }
                request.sent = Some(sending);
                if request.asking {
                    pipeline.cmd("ASKING");
                }
                pipeline.add_command(std::mem::take(&mut request.cmd));
            }
            let pipeline = Arc::new(pipeline);
            let replies = bound.connection.socket.send(Arc::clone(&pipeline));
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
        let mut answered = replies.into_iter().zip(exchange.pipeline.cmd_iter());
        for request in exchange.requests {
            // The answer to ASKING is told to nobody. An error would be that of the command, too.
            if let Some((reply, cmd)) = answered.nth(usize::from(request.asking)) {
                self.ends(request, reply, cmd);
            }
        }
        self.refused.is_empty()
    }

    /// Ends a command with this reply, unless it must be sent once more.
    fn ends(&mut self, mut request: Request, reply: Value, cmd: &Cmd) {
        let Some(error) = not_carried_out(&reply, &request) else {
            return request.told(Ok(reply));
        };
        request.is_doubted |= error.code == Code::Elsewhere;
        request.cmd = cmd.clone();
        // This copy was not carried out; one before it may have been.
        request.sent.take_if(|sent| !sent.again);
        if error.code == Code::ReadOnly {
            // A server that has been made a replica carries nothing out: the next connection looks
            // for the primary.
            self.refused.push(request);
        } else if error.code.is_misdirection() || error.code == Code::Elsewhere {
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
        let session = Arc::clone(&self.session);
        if let Some(client) = session.listener() {
            client.refused();
            self.pass_on(|request| !client.is_home(&session, &request.name));
        }
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
        match self.session.listener() {
            Some(client) => client.redirected(&self.session, request, error),
            None => request.fail(error),
        }
    }

    /// The connection is over: its unanswered commands are sent again, in order, if they may be
    /// sent twice.
    fn begin_anew(&mut self) {
        self.paused_until = None;
        let mut again = VecDeque::from(std::mem::take(&mut self.refused));
        for exchange in std::mem::take(&mut self.in_flight) {
            let mut cmds = exchange.pipeline.cmd_iter();
            for mut request in exchange.requests {
                let cmd = cmds.nth(usize::from(request.asking));
                match cmd.filter(|_| request.manner != Manner::Once) {
                    Some(cmd) => {
                        request.cmd = cmd.clone();
                        again.push_back(request);
                    }
                    None => request.told(Err(Error::no_reply())),
                }
            }
        }
        again.append(&mut self.commands);
        self.commands = again;
    }

    /// Sets the alarm, if it would ring too late. Most replies come before it rings, so it is set
    /// for later only when it has rung: to set it for each would cost more than to look now and
    /// then in vain. Whether it must ring at all.
    fn set_alarm(&self, alarm: Pin<&mut Sleep>) -> bool {
        let silent = self.heard.checked_add(self.session.response_timeout());
        let silent = silent.filter(|_| !self.in_flight.is_empty());
        let next = [self.due, self.paused_until, silent].into_iter().flatten();
        let next = next.min();
        if let Some(next) = next
            && (alarm.is_elapsed() || next < alarm.deadline())
        {
            alarm.reset(next);
        }
        next.is_some()
    }

    /// Tells the callers whose time is up. Whether the connection is of use still: it has not been
    /// silent for too long.
    fn look(&mut self) -> bool {
        let (now, trouble) = (Instant::now(), self.session.trouble());
        self.paused_until.take_if(|until| *until <= now);
        let mut due = None::<Instant>;
        let mut stays = |request: &mut Request| match request.until {
            Some(until) if until <= now => request.overdue(&trouble),
            until => {
                due = due.into_iter().chain(until).min();
                true
            }
        };
        for exchange in &mut self.in_flight {
            // They were sent: they stay.
            exchange.requests.iter_mut().for_each(|one| _ = stays(one));
        }
        self.commands.retain_mut(stays);
        self.due = due;
        self.in_flight.is_empty() || self.heard.elapsed() < self.session.response_timeout()
    }
}

/// Why a command is sent again by itself, if it is: it has reached the wrong server, or one that
/// cannot carry it out just now.
///
/// Behind `ASKING` a node says that nothing is held also if the key was there, and has gone back
/// since the other node sent us here. So that is believed only when it is said once more: the test
/// is `client_moves::what_goes_ahead_of_its_slot_and_comes_back_is_held_still`.
fn not_carried_out(reply: &Value, request: &Request) -> Option<Error> {
    let is_doubtful = request.asking && !request.is_doubted;
    let is_twice = request.manner == Manner::Twice;
    let error = match reply {
        // A RELEASE and a RENEW, which ties its hold, say it so. A GUARD says it by an error.
        Value::Nil if is_doubtful && is_twice => return Some(Error::elsewhere()),
        Value::Int(0) if is_doubtful && request.hold.is_some() => return Some(Error::elsewhere()),
        Value::ServerError(error) => Error::from_server(error.code(), error.details()),
        _ => return None,
    };
    if is_doubtful && error.code == Code::NotHeld {
        return Some(Error::elsewhere());
    }
    // A missing session is for the hold to handle.
    let passes = error.is_unavailable() && error.code != Code::NoSession;
    let is_again = error.code.is_misdirection() || passes && is_twice;
    is_again.then_some(error)
}

/// The most commands in one write. A larger batch delays its first reply, and leaves the server
/// idle while the next batch is built; a smaller one costs more memory for each command.
const BATCH_MAX: usize = 16;

/// The most batches that are sent before replies are looked at. Tokio ends a task's turn after 128
/// steps and looks at nothing more then, so in a longer row no reply would be heard.
const IN_A_ROW: usize = 8;

/// The number of commands that may wait for their answers.
const UNANSWERED_MAX: usize = 100_000;
