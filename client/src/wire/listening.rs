//! The task that calls RLOCK.EVENTS again and again, on a connection of its own.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, OptionFuture};
use redis::Value;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::error::Error;
use crate::time::part_of_grace;
use crate::wire::reply::{read_by, read_told};
use crate::wire::{Connection, Session, Told, request};
use crate::{PAUSE_MAX, Pace, TIMEOUT_MAX, part};

/// The task that listens. It does not keep the client alive.
struct Listening {
    session: Arc<Session>,
    pace: Pace,
    /// The last life and event.
    life: i64,
    seq: u64,
    /// When the last call was sent that was answered in this life, with all that there was to tell.
    told: Option<Instant>,
    /// How late the answers come. Without this, a long round trip would make each of them overdue.
    late: Duration,
}

/// A call under way.
struct Call {
    connection: Connection,
    sent: Instant,
    /// How long the server holds it, if it does not answer at once.
    wait: Option<Duration>,
    /// When its answer is overdue.
    due: Instant,
    reply: BoxFuture<'static, Result<Value, Error>>,
}

impl Call {
    /// Its answer, or why none will come; `None` when it is overdue.
    async fn end(&mut self) -> Option<Result<Value, Error>> {
        tokio::select! {
            biased;
            answer = &mut self.reply => return Some(answer),
            () = sleep_until(self.due) => return None,
            // Another server is the one to use.
            () = self.connection.over() => {}
        }
        Some(Err(Error::elsewhere()))
    }
}

/// Listens until it is aborted, with the node. If another connection takes the session over, it is
/// taken back: with pauses, so two clients with one session name cannot flood the server.
pub(crate) async fn run(session: Arc<Session>) {
    let listening = Listening {
        session,
        pace: Pace::default(),
        life: 0,
        seq: 0,
        told: None,
        late: Duration::ZERO,
    };
    listening.listen().await;
}

impl Listening {
    /// An overdue call may be answered yet, if the server only stood still. It is waited for while
    /// the next connection is opened, and until the first call there is answered or overdue too: to
    /// close its connection earlier would cost our waiters their places.
    async fn listen(mut self) {
        let session = Arc::clone(&self.session);
        let (mut call, mut overdue) = (None::<Call>, None::<Call>);
        loop {
            let late_answer = overdue.as_mut().map(|old| &mut old.reply);
            let asked = call.as_ref().map(|call| call.connection.epoch);
            let end = call.as_mut().map(Call::end);
            let is_asked = asked.is_some();
            tokio::select! {
                biased;
                Some(answer) = OptionFuture::from(late_answer) => match overdue.take() {
                    // Another server is the one to use, or this one has closed it.
                    Some(old) if old.connection.is_over() => {}
                    // The call under way tells whether the session is there. Until then this
                    // connection stays: its end could reach the server first.
                    Some(old) if is_asked => {
                        let told = read_by(answer, read_told).ok();
                        overdue = told.map(|told| {
                            self.hear(&old, told);
                            let reply = pending().boxed();
                            Call { reply, ..old }
                        });
                    }
                    Some(old) if self.hears(&old, answer) => {
                        call = Some(self.next(old).await);
                    }
                    _ => {}
                },
                Some(end) = OptionFuture::from(end) => match (call.take(), end) {
                    (Some(last), Some(answer)) => {
                        overdue = None;
                        if self.hears(&last, answer) {
                            call = Some(self.next(last).await);
                        }
                    }
                    (last, _) => {
                        self.broken(Error::not_attached());
                        overdue = last;
                    }
                },
                // The command connection leads to another server. Nothing is known to be broken.
                () = session.doubted(asked), if is_asked => call = None,
                connection = self.open(), if !is_asked => {
                    // Answered at once, and so it confirms at once.
                    call = Some(self.call(connection, None, session.response_timeout()));
                }
            }
        }
    }

    /// The call after one that was answered.
    ///
    /// At once when the answer was late, which says nothing of the time since it was asked for:
    /// another silence would come on top of that. But not again and again.
    async fn next(&mut self, last: Call) -> Call {
        let (session, life) = (Arc::clone(&self.session), self.life);
        let late = last.sent.elapsed();
        let late = late.saturating_sub(last.wait.unwrap_or_default());
        // The lateness decays: one silence says little about later answers.
        self.late = late.max(part(self.late, 8).saturating_mul(7));
        let was_late = late >= part_of_grace(session.identity.grace, 8);
        let mut state = session.state.subscribe();
        let verified = state.wait_for(|state| session.is_verified(state, life));
        // An event of a server that was not verified cannot be acknowledged, so a call is answered
        // at once.
        let limit = part_of_grace(session.identity.grace, 8).min(PAUSE_MAX);
        let _ = timeout(limit, verified).await;
        let is_at_once = was_late && last.wait.is_some();
        let wait = (!is_at_once).then(|| wait_in(session.identity.grace));
        let limit = wait.unwrap_or_default().saturating_add(self.slack());
        self.call(last.connection, wait, limit)
    }

    /// Until BIND has confirmed the server, this acknowledges no event: the events may be for
    /// another node of this client.
    fn call(&self, connection: Connection, wait: Option<Duration>, limit: Duration) -> Call {
        let session = &*self.session;
        let is_verified = session.is_verified(&session.state.borrow(), self.life);
        let after = is_verified.then_some((self.life, self.seq));
        let (after, grace) = (after.unwrap_or_default(), session.identity.grace);
        let call = request::events(session.name(), connection.epoch, after, wait, grace);
        let sent = Instant::now();
        Call {
            reply: connection.socket.clone().ask(call, TIMEOUT_MAX).boxed(),
            connection,
            sent,
            wait,
            due: sent.checked_add(limit).unwrap_or(sent),
        }
    }

    /// A call was answered, maybe late: whether the session is there.
    fn hears(&mut self, call: &Call, answer: Result<Value, Error>) -> bool {
        let told = read_by(answer, read_told);
        let heard = told.map(|told| self.hear(call, told));
        heard.map_err(|error| self.broken(error)).is_ok()
    }

    /// The order matters: first the session's new state, which commands sent from now on count on;
    /// then the events; then the consequences of another life.
    fn hear(&mut self, call: &Call, mut told: Told) {
        let is_new = told.life != self.life;
        if is_new {
            (self.life, self.seq, self.told) = (told.life, 0, None);
        }
        let (sent, connection) = (call.sent, call.connection.epoch);
        self.session.confirm(told.life, sent, connection);
        // Told again after a reply that was lost, or by the connection before as well.
        told.events.retain(|event| event.seq > self.seq);
        self.seq = told.events.last().map_or(self.seq, |last| last.seq);
        let since = self.told;
        if told.is_all {
            self.told = Some(sent);
        }
        if let Some(client) = self.session.listener() {
            client.heard(&self.session, &told, is_new, since);
        }
    }

    /// Connects until it succeeds, with pauses between the tries.
    ///
    /// Within the grace a try that takes long goes on beside another, which is begun anew now and
    /// then: where packets are lost, the kernel asks for a connection again only after a second,
    /// and guards may be lost by then. But a server may only be slow. With sentinels a try is more
    /// than a connection, and goes on alone.
    async fn open(&mut self) -> Connection {
        let session = Arc::clone(&self.session);
        let are_beside = session.connector.sentinels.is_empty();
        let (mut first, mut beside) = (None, None);
        loop {
            if session.is_retired() {
                // Until it is aborted: another listens in its place.
                pending::<()>().await;
            }
            let (left, is_under_way) = (self.grace_left(), first.is_some());
            let next = async {
                match left {
                    // There are few tries then.
                    Some(left) if is_under_way && are_beside => sleep(self.pause(left, 2)).await,
                    _ if is_under_way => pending().await,
                    Some(left) => self.pace.keep(self.pause(left, 4)).await,
                    None => self.pace.keep(Duration::MAX).await,
                }
            };
            let tried = tokio::select! {
                biased;
                Some(tried) = OptionFuture::from(first.as_mut()) => {
                    first = beside.take();
                    tried
                }
                Some(tried) = OptionFuture::from(beside.as_mut()) => {
                    beside = None;
                    tried
                }
                () = next => {
                    let slot = if is_under_way { &mut beside } else { &mut first };
                    *slot = Some(session.connector.open().boxed());
                    continue;
                }
            };
            match tried {
                Ok(connection) => return connection,
                Err(error) => self.broken(error),
            }
        }
    }

    fn grace_left(&self) -> Option<Duration> {
        let grace = self.session.identity.grace;
        let left = grace.checked_sub(self.told?.elapsed())?;
        (!left.is_zero()).then_some(left)
    }

    /// The longest pause between two tries: the time left in the grace, divided by `of`. So a
    /// server that comes back within the grace is tried within it. The pause is never shorter than
    /// a fiftieth of the grace. Otherwise all clients would try at once near its end.
    fn pause(&self, left: Duration, of: u32) -> Duration {
        part(left, of).max(part(self.session.identity.grace, 50))
    }

    fn broken(&self, error: Error) {
        self.session.broken(error);
        if let Some(client) = self.session.listener() {
            client.broken(&self.session);
        }
    }

    /// How long after its time an answer is overdue: later than answers usually come. With a grace
    /// there must be time left to connect anew.
    fn slack(&self) -> Duration {
        let grace = |of| part_of_grace(self.session.identity.grace, of);
        let usual = self.late.saturating_mul(2).min(grace(2));
        grace(4).max(usual).min(self.session.response_timeout())
    }
}

/// A runtime that ends takes this along.
impl Drop for Listening {
    fn drop(&mut self) {
        self.session.broken(Error::shut_down());
    }
}

/// How long the server holds a call before it answers that nothing has happened.
///
/// An answer confirms the moment in which its call was sent. So when a silence begins just before
/// an answer, the last confirmed moment is twice this ago by its end, and a silence of nine tenths
/// of the grace, less 100 ms, must fit into the rest: the contract asks for a third at most, and a
/// guard needs this.
fn wait_in(grace: Duration) -> Duration {
    let wait = part_of_grace(grace, 33).saturating_add(WAIT_ON_TOP);
    wait.min(part_of_grace(grace, 3)).min(LONGEST_WAIT)
}

const WAIT_ON_TOP: Duration = Duration::from_millis(25);

/// The session connection is tried at least this often, whatever the grace.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
