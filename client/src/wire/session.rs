//! The session: on its connection the server tells us of grants and losses, and we know that it has
//! not taken us for dead. RLOCK.EVENTS is called on it again and again.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::error::Error;
use crate::wire::reply::{read_by, read_told};
use crate::wire::{Answered, Connection, Connector, Event, Replies, Request, Told, request};
use crate::{Backoff, Pace, drift, metrics, part, trace};

/// Receives the events of a client's sessions.
pub(crate) trait Listener: Send + Sync {
    /// The session was answered.
    fn heard(&self, session: &Arc<Session>, news: News);

    /// The session's server is not reached, and another may be in its place.
    fn broken(&self, session: &Arc<Session>);

    /// A node has said that this request is for another one, or it cannot be reached and its slots
    /// may be at another.
    fn redirected(&self, session: &Arc<Session>, request: Request, error: Error);

    /// Whether this session's server serves the name, as far as is known.
    fn is_home(&self, session: &Arc<Session>, name: &[u8]) -> bool;
}

/// An answer to EVENTS.
pub(crate) struct News {
    pub(crate) life: i64,
    /// Whether the session has begun anew.
    pub(crate) is_new: bool,
    /// Those that have not been heard before, in order.
    pub(crate) events: Vec<Event>,
    /// None of it happened before this: when the last call was sent that was answered in this life
    /// with all that there was to tell.
    pub(crate) since: Option<Instant>,
}

/// One client's session at one server.
pub(crate) struct Session {
    /// The same at every server.
    pub(crate) name: Arc<str>,
    pub(crate) grace: Duration,
    state: watch::Sender<State>,
    /// The node's id in a cluster, if it was told: another server may be at its address by now.
    expected: Option<Arc<str>>,
    /// Numbers the connections of a client, at whatever server: a node that gets another address
    /// is the same one still.
    epochs: Arc<AtomicU64>,
}

#[derive(Default)]
struct State {
    /// The confidence in the present life; none before the first reply.
    present: Option<Arc<Confidence>>,
    /// Why the last try to reach the server failed, if it did.
    broken: Option<Error>,
    /// So many answers there were.
    answers: u64,
    /// The node's id in a cluster, else the server's run id, as BIND has told it; or why the last
    /// try to bind a connection failed.
    bound: Option<Result<(i64, Arc<str>), Error>>,
    /// How often the command connection has reached a server that does not know the session.
    doubts: u64,
    /// Its node is not used any more.
    is_retired: bool,
}

/// The time until which the server cannot have ended the session, in one of its lives. Holds count
/// on it. Once it is over, guards have said that they are lost, and a later reply does not revive
/// them: the same life then gets a new confidence.
#[derive(Debug)]
pub(crate) struct Confidence {
    pub(crate) life: i64,
    /// Without a grace the session says nothing about how long a hold lasts.
    until: Option<ArcSwap<Instant>>,
}

impl Confidence {
    /// As a call that was sent then confirms it.
    pub(crate) fn new(life: i64, sent: Instant, grace: Duration) -> Arc<Self> {
        let until = confident_until(sent, grace).map(ArcSwap::from_pointee);
        Arc::new(Self { life, until })
    }

    /// `None`: without limit.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until.as_ref().map(|until| **until.load())
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| now >= until)
    }

    /// Only the task of the session connection confirms, so nobody writes in between.
    fn confirm(&self, sent: Instant, grace: Duration) {
        if let (Some(until), Some(later)) = (&self.until, confident_until(sent, grace)) {
            let present = **until.load();
            until.store(Arc::new(later.max(present)));
        }
    }
}

/// The connection was open when the server answered, so after the call was sent; from its closing
/// on the server waits for the grace.
fn confident_until(sent: Instant, grace: Duration) -> Option<Instant> {
    let confidence = grace.saturating_sub(drift(grace));
    let until = sent.checked_add(confidence).unwrap_or(sent);
    (!grace.is_zero()).then_some(until)
}

impl State {
    fn is_attached(&self) -> bool {
        self.present.is_some() && self.broken.is_none() && matches!(self.bound, Some(Ok(_)))
    }

    /// How the first try has ended. An answer that is only late does not end it.
    fn tried(&self) -> Option<Result<(), Error>> {
        let until = self.present.as_ref().and_then(|present| present.until());
        let is_heard = until.is_some_and(|until| Instant::now() < until);
        match (&self.broken, &self.bound) {
            (Some(error), _) if !is_heard => Some(Err(error.clone())),
            (_, Some(bound)) if self.present.is_some() => Some(bound.clone().map(|_| ())),
            _ => None,
        }
    }

    fn trouble(&self) -> Option<Error> {
        let unbound = || self.bound.as_ref()?.as_ref().err();
        self.broken.as_ref().or_else(unbound).cloned()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Session {
    pub(crate) fn new(
        name: Arc<str>,
        grace: Duration,
        expected: Option<Arc<str>>,
        epochs: Arc<AtomicU64>,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            grace,
            state: watch::Sender::default(),
            expected,
            epochs,
        })
    }

    pub(super) fn next_epoch(&self) -> u64 {
        self.epochs
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1)
    }

    /// A command connection was bound at this server, in this life of the session; or could not be.
    /// Whether it is the right one.
    pub(super) fn set_bound(&self, bound: Result<(i64, Arc<str>), Error>) -> bool {
        let is_meant = |server: &Arc<str>| self.expected.as_ref().is_none_or(|one| one == server);
        let is_right = bound.as_ref().is_ok_and(|(_, server)| is_meant(server));
        let bound = if is_right || bound.is_err() {
            bound
        } else {
            Err(Error::elsewhere())
        };
        self.state.send_modify(|state| state.bound = Some(bound));
        is_right
    }

    /// Whether this life is surely one at the right server.
    fn is_verified(&self, life: i64) -> bool {
        let state = self.state.borrow();
        let is_it = || matches!(state.bound, Some(Ok((bound, _))) if bound == life);
        self.expected.is_none() || is_it()
    }

    /// The command connection has reached a server that does not know the session, again and again:
    /// the one that is listened to may not be the one to use any more.
    pub(super) fn add_doubt(&self) {
        self.state
            .send_modify(|state| state.doubts = state.doubts.saturating_add(1));
    }

    /// The server to which the last command connection was bound.
    pub(crate) fn server(&self) -> Option<Arc<str>> {
        Some(self.state.borrow().bound.clone()?.ok()?.1)
    }

    /// Retires the session's node: its remaining commands go to other nodes.
    pub(crate) fn retire(&self) {
        self.state.send_modify(|state| {
            state.is_retired = true;
            state.answers = state.answers.saturating_add(1);
        });
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.state.borrow().is_retired
    }

    /// The confidence in the last known life, which may be over.
    pub(crate) fn present(&self) -> Option<Arc<Confidence>> {
        self.state.borrow().present.clone()
    }

    pub(crate) fn life(&self) -> Option<i64> {
        Some(self.state.borrow().present.as_ref()?.life)
    }

    /// Whether the last try to reach the server was answered.
    pub(crate) fn is_attached(&self) -> bool {
        self.state.borrow().is_attached()
    }

    /// Waits until the first try to reach the server has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        let mut changes = self.state.subscribe();
        // The sender is `self`: there is no other end to this.
        let tried = changes.wait_for(|state| state.tried().is_some()).await.ok();
        tried.and_then(|state| state.tried()).unwrap_or(Ok(()))
    }

    /// Waits until the server answers.
    pub(crate) async fn attached(&self) {
        let mut changes = self.state.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = changes.wait_for(State::is_attached).await;
    }

    /// Why nothing is heard of the server.
    pub(crate) fn trouble(&self) -> Error {
        let trouble = self.state.borrow().trouble();
        trouble.map_or_else(Error::not_attached, Error::unasked)
    }

    /// A receiver for the session's replies.
    pub(super) fn answers(&self) -> Answers {
        Answers(self.state.subscribe())
    }

    /// A call that was sent then was answered in this life.
    fn confirm(&self, life: i64, sent: Instant) {
        let (now, grace) = (Instant::now(), self.grace);
        let mut was_broken = false;
        self.state.send_modify(|state| {
            match &state.present {
                Some(present) if present.life == life && !present.is_over(now) => {
                    present.confirm(sent, grace);
                }
                _ => state.present = Some(Confidence::new(life, sent, grace)),
            }
            was_broken = state.broken.take().is_some() && state.answers > 0;
            state.answers = state.answers.saturating_add(1);
        });
        if was_broken {
            trace::reconnected(&self.name);
            metrics::reconnected();
        }
    }

    fn broken(&self, error: Error) {
        if self.is_attached() {
            trace::disconnected(&self.name, &error);
        }
        self.state.send_modify(|state| state.broken = Some(error));
    }
}

/// Hears of the answers to EVENTS.
pub(super) struct Answers(watch::Receiver<State>);

impl Answers {
    /// The life that was heard of last.
    pub(super) fn life(&self) -> Option<i64> {
        Some(self.0.borrow().present.as_ref()?.life)
    }

    /// So many there were.
    pub(super) fn count(&self) -> u64 {
        self.0.borrow().answers
    }

    /// Waits for one more than these. It never comes once the session has gone.
    pub(super) async fn more_than(&mut self, count: u64) {
        if self
            .0
            .wait_for(|state| state.answers > count)
            .await
            .is_err()
        {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the node is retired.
    pub(super) async fn retired(&mut self) {
        if self.0.wait_for(|state| state.is_retired).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until another life is heard of, or there will be none.
    pub(super) async fn other_life(&mut self, than: i64) {
        let is_present = |state: &State| state.present.as_ref().is_some_and(|one| one.life == than);
        let is_other = |state: &State| state.is_retired || !is_present(state);
        if self.0.wait_for(is_other).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// The task that listens. It does not keep the client alive.
pub(super) struct Listening {
    session: Arc<Session>,
    connector: Connector,
    listener: Weak<dyn Listener>,
    pace: Pace,
    /// The number of the present connection.
    epoch: u64,
    /// The last life and event.
    life: i64,
    seq: u64,
    /// When the last call was sent that was answered in this life, with all that there was to tell.
    told: Option<Instant>,
    /// Whether the last answer was late: the next call then confirms the session at once.
    was_late: bool,
    /// How late the answers come. Where the way is long each of them would be overdue.
    late: Duration,
}

/// A connection that is asked, and since when.
struct Asked {
    connection: Connection,
    sent: Instant,
    replies: Replies,
}

/// Listens until it is aborted, with the node. If another connection takes the session over, it is
/// taken back: with pauses, so two clients with one session name cannot flood the server.
pub(crate) async fn run(connector: Connector, session: Arc<Session>, listener: Weak<dyn Listener>) {
    let mut listening = Listening {
        session,
        connector,
        listener,
        pace: Pace::default(),
        epoch: 0,
        life: 0,
        seq: 0,
        told: None,
        was_late: false,
        late: Duration::ZERO,
    };
    let mut connection = listening.attach(None).await;
    loop {
        let overdue = listening.listen(connection).await;
        connection = listening.attach(overdue).await;
    }
}

impl Listening {
    /// Calls until a call fails; or is overdue, and may be answered yet.
    async fn listen(&mut self, mut connection: Connection) -> Option<Asked> {
        let longest = wait_in(self.session.grace);
        let (mut at_once, mut was_late) = (false, std::mem::take(&mut self.was_late));
        let mut pauses = Backoff::new();
        loop {
            // At once after a silence that was too long, and when an answer was late, which says
            // nothing of the time since it was asked for: before the next another silence would
            // come on top of that. But not again and again.
            let is_over = || {
                let present = self.session.present();
                present.is_none_or(|present| present.is_over(Instant::now()))
            };
            at_once = !at_once && (was_late || is_over());
            let wait = Some(longest).filter(|_| !at_once);
            let mut asked = self.ask(connection, wait);
            let within = longest.saturating_add(self.slack());
            let mut state = self.session.state.subscribe();
            let doubts = state.borrow().doubts;
            let answer = tokio::select! {
                answer = timeout(within, &mut asked.replies) => answer,
                // Another server is the one to use.
                _ = state.wait_for(|state| state.doubts > doubts) => return None,
                () = asked.connection.over() => {
                    self.broken(Error::elsewhere());
                    return None;
                }
            };
            let Ok(answer) = answer else {
                self.broken(Error::no_reply(None));
                return Some(asked);
            };
            if let Some(late) = asked.sent.elapsed().checked_sub(wait.unwrap_or_default()) {
                was_late = late >= part_of_grace(self.session.grace, 8);
                // Forgotten by and by: one silence says little about those to come.
                self.late = late.max(part(self.late, 8).saturating_mul(7));
            }
            if !self.answered(asked.sent, answer) {
                return None;
            }
            if !self.session.is_verified(self.life) {
                let longest = part_of_grace(self.session.grace, 8);
                sleep(pauses.next_up_to(longest)).await;
            }
            connection = asked.connection;
        }
    }

    /// Until BIND has confirmed the server, this acknowledges no event: the events may be for
    /// another node of this client. The server answers such a call at once.
    fn ask(&self, connection: Connection, wait: Option<Duration>) -> Asked {
        let is_verified = self.session.is_verified(self.life);
        let after = if is_verified {
            (self.life, self.seq)
        } else {
            (0, 0)
        };
        let name = &self.session.name;
        let call = request::events(name, self.epoch, after, wait, self.session.grace);
        let sent = Instant::now();
        let replies = connection.ask_one(call);
        Asked {
            connection,
            sent,
            replies,
        }
    }

    /// A call was answered, maybe late: whether the session is there.
    fn answered(&mut self, sent: Instant, replies: Answered) -> bool {
        let told = replies.and_then(|replies| {
            let reply = replies.into_iter().next();
            read_by(reply.ok_or_else(|| Error::no_reply(None)), read_told)
        });
        match told {
            Ok(told) => {
                self.hear(sent, told);
                true
            }
            Err(error) => {
                self.broken(error);
                false
            }
        }
    }

    /// The order matters: first the session's new state, which commands sent from now on count on;
    /// then the events; then the consequences of another life.
    fn hear(&mut self, sent: Instant, told: Told) {
        let Told {
            life,
            mut events,
            is_all,
        } = told;
        let is_new = life != self.life;
        if is_new {
            (self.life, self.seq, self.told) = (life, 0, None);
        }
        self.session.confirm(life, sent);
        // Told again after a reply that was lost, or by the connection before as well.
        events.retain(|event| event.seq > self.seq);
        self.seq = events.last().map_or(self.seq, |last| last.seq);
        let since = self.told;
        if is_all {
            self.told = Some(sent);
        }
        if let Some(client) = self.listener.upgrade() {
            client.heard(
                &self.session,
                News {
                    life,
                    is_new,
                    events,
                    since,
                },
            );
        }
    }

    /// Connects and calls until a call is answered. An `overdue` call on the former connection may
    /// still be answered meanwhile, if the server only stood still. The former connection stays
    /// open until the new one is answered: closing it earlier would cost our waiters their places.
    async fn attach(&mut self, mut overdue: Option<Asked>) -> Connection {
        loop {
            if self.session.is_retired() {
                // Until it is aborted: another listens in its place.
                std::future::pending::<()>().await;
            }
            let connection = match &mut overdue {
                None => self.open().await,
                Some(asked) => tokio::select! {
                    biased;
                    answer = &mut asked.replies => {
                        let old = overdue.take();
                        let old = old.filter(|old| self.answered(old.sent, answer));
                        match old {
                            Some(old) => {
                                self.was_late = true;
                                return old.connection;
                            }
                            None => continue,
                        }
                    }
                    connection = self.open() => connection,
                },
            };
            if let Some(attached) = self.attach_on(connection, overdue.take()).await {
                return attached;
            }
        }
    }

    /// The first call on a connection is answered at once, and so confirms at once.
    async fn attach_on(
        &mut self,
        connection: Connection,
        mut old: Option<Asked>,
    ) -> Option<Connection> {
        self.epoch = self.session.next_epoch();
        let asked = self.ask(connection, None);
        let mut answer = Box::pin(timeout(
            self.connector.dialer.response_timeout,
            asked.replies,
        ));
        while let Some(before) = &mut old {
            tokio::select! {
                biased;
                late = &mut before.replies => {
                    if late.is_ok() {
                        self.answered(before.sent, late);
                    }
                    old = None;
                }
                answer = &mut answer => {
                    let answer = answer.unwrap_or_else(|_| Err(Error::no_reply(None)));
                    return self.answered(asked.sent, answer).then_some(asked.connection);
                }
            }
        }
        let answer = answer.await.unwrap_or_else(|_| Err(Error::no_reply(None)));
        self.answered(asked.sent, answer)
            .then_some(asked.connection)
    }

    /// Connects until it succeeds, with pauses between the tries. Within the grace they are short
    /// enough to keep the guards. Afterwards they grow, whatever the grace is.
    async fn open(&mut self) -> Connection {
        loop {
            let grace = self.session.grace;
            let in_grace = self.told.is_some_and(|told| told.elapsed() < grace);
            let longest = in_grace.then(|| part_of_grace(grace, 4));
            self.pace.keep(longest.unwrap_or(Duration::MAX)).await;
            match self.connector.open().await {
                Ok(connection) => return connection,
                Err(error) => self.broken(error),
            }
        }
    }

    fn broken(&self, error: Error) {
        self.session.broken(error);
        if let Some(client) = self.listener.upgrade() {
            client.broken(&self.session);
        }
    }

    /// How long after its time an answer is overdue: later than answers usually come. With a grace
    /// there must be time left to connect anew.
    fn slack(&self) -> Duration {
        let grace = |of| part_of_grace(self.session.grace, of);
        let usual = self.late.saturating_mul(2).min(grace(2));
        grace(4)
            .max(usual)
            .min(self.connector.dialer.response_timeout)
    }
}

/// A runtime that ends takes this along.
impl Drop for Listening {
    fn drop(&mut self) {
        self.session.broken(Error::shut_down());
    }
}

/// A part of the grace; without a grace there is no limit.
pub(super) fn part_of_grace(grace: Duration, of: u32) -> Duration {
    match part(grace, of) {
        Duration::ZERO => Duration::MAX,
        part => part,
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

/// So often at least the session connection is tried, whatever the grace.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(1);

    fn after(start: Instant, ms: u64) -> Instant {
        start
            .checked_add(Duration::from_millis(ms))
            .expect("a moment soon")
    }

    #[tokio::test(start_paused = true)]
    async fn confidence_lasts_from_the_sending_for_the_grace_less_the_drift() {
        let session = Session::new("client".into(), GRACE, None, Arc::default());
        let sent = Instant::now();
        session.confirm(1, sent);
        let first = session.present().expect("it was confirmed");
        assert_eq!(first.until(), Some(after(sent, 988)));
        tokio::time::advance(Duration::from_millis(500)).await;
        session.confirm(1, after(sent, 250));
        assert_eq!(first.until(), Some(after(sent, 1_238)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_comes_too_late_brings_nothing_back() {
        let session = Session::new("client".into(), GRACE, None, Arc::default());
        let sent = Instant::now();
        session.confirm(1, sent);
        let first = session.present().expect("it was confirmed");
        tokio::time::advance(Duration::from_millis(988)).await;
        session.confirm(1, after(sent, 250));
        assert_eq!(first.until(), Some(after(sent, 988)));
        let next = session.present().expect("it was confirmed");
        assert_eq!((next.life, next.until()), (1, Some(after(sent, 1_238))));
    }

    #[test]
    fn without_a_grace_the_session_sets_no_end() {
        let unlimited = Confidence::new(1, Instant::now(), Duration::ZERO);
        assert_eq!(unlimited.until(), None);
    }
}
