//! A client at a server: its session there, until when the server has surely not ended it, and the
//! commands that it has for it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::Error;
use crate::wire::{Connector, Durability, Told};
use crate::{Backoff, MILLI, drift, locked, metrics, trace};

/// A client, as each of its servers knows it.
#[derive(Debug)]
pub(crate) struct Identity {
    /// The name of its sessions, the same at every server.
    pub(crate) name: Arc<str>,
    pub(crate) grace: Duration,
    /// If grants must be acknowledged before they count.
    pub(crate) durability: Option<Durability>,
    pub(crate) listener: Weak<dyn Listener>,
    pub(crate) runtime: Handle,
    /// Renewals that are handed over while this is held share one wait for copies.
    pub(crate) gathering: tokio::sync::Mutex<()>,
}

/// Receives what a client hears from its servers, beside the replies to its commands.
pub(crate) trait Listener: Send + Sync {
    /// The session was answered, with events that it has not heard before; `is_new` if it has begun
    /// anew. None of them happened before `since`: when the last call was sent that was answered in
    /// this life with all that there was to tell.
    fn heard(&self, session: &Arc<Session>, told: &Told, is_new: bool, since: Option<Instant>);

    /// The outcome of the ACQUIRE of this call.
    fn answered(self: Arc<Self>, call: u64, outcome: Outcome);

    /// The session's server is not reached, and another may be in its place.
    fn broken(&self, session: &Arc<Session>);

    /// The session's server refuses command connections, or is not reached by them.
    fn refused(&self);

    /// A node has said that this request is for another one, or it cannot be reached and its slots
    /// may be at another.
    fn redirected(&self, session: &Arc<Session>, request: Request, error: Error);

    /// Whether this session's server serves the name, as far as is known.
    fn is_home(&self, session: &Arc<Session>, name: &[u8]) -> bool;

    /// These slots are served by another node than before, or nodes have been retired.
    fn moved(self: Arc<Self>, slots: &BTreeSet<u16>);
}

/// One client's session at one server.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) identity: Arc<Identity>,
    pub(crate) connector: Connector,
    pub(super) state: watch::Sender<State>,
    /// The node's id in a cluster, if it was told: another server may be at its address by now.
    expected: Option<Arc<str>>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The confidence in the present life; none before the first reply.
    present: Option<Arc<Confidence>>,
    /// Why the last try to reach the server failed, if it did.
    broken: Option<Error>,
    /// The number of answers so far.
    pub(super) answers: u64,
    /// The session connection that was answered last.
    pub(super) answered: Option<u64>,
    /// The session connection that may lead to another server than commands do.
    pub(super) doubted: Option<u64>,
    /// How many in a row were.
    doubts: u32,
    /// The life that BIND has told, and the node's id in a cluster, else the server's run id; or
    /// why the last try to bind a connection failed.
    bound: Option<Result<(i64, Arc<str>), Error>>,
    /// Its node is not used any more.
    pub(super) is_retired: bool,
}

/// The time until which the server cannot have ended the session, in one of its lives. Holds count
/// on it. Once it is over, guards have said that they are lost, and a later reply does not revive
/// them: the same life then gets a new confidence.
#[derive(Debug)]
pub(crate) struct Confidence {
    pub(crate) life: i64,
    /// Without a grace the session says nothing about how long a hold lasts.
    until: Mutex<Option<Instant>>,
}

impl Confidence {
    /// The confidence after the answer to a call that was sent at this time.
    pub(crate) fn new(life: i64, sent: Instant, grace: Duration) -> Arc<Self> {
        let until = Mutex::new(confident_until(sent, grace));
        Arc::new(Self { life, until })
    }

    /// `None`: without limit.
    pub(crate) fn until(&self) -> Option<Instant> {
        *locked(&self.until)
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| now >= until)
    }

    fn confirm(&self, sent: Instant, grace: Duration) {
        let mut until = locked(&self.until);
        *until = confident_until(sent, grace).max(*until);
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
    /// None before the first reply, and none once its node is retired: nobody confirms a hold by it
    /// any more, also one of whose grant or renewal is heard only now.
    pub(super) fn life(&self) -> Option<i64> {
        let present = self.present.as_ref().filter(|_| !self.is_retired);
        Some(present?.life)
    }

    fn is_attached(&self) -> bool {
        let is_doubted = self.doubted.is_some() && self.doubted == self.answered;
        let is_broken = self.broken.is_some() || is_doubted;
        self.present.is_some() && !is_broken && matches!(self.bound, Some(Ok(_)))
    }

    /// How the first try has ended. An answer that is only late does not end it; that its node is
    /// not used any more does.
    fn tried(&self) -> Option<Result<(), Error>> {
        let until = self.present.as_ref().and_then(|present| present.until());
        let is_heard = until.is_some_and(|until| Instant::now() < until);
        match (&self.broken, &self.bound) {
            _ if self.is_retired => Some(Err(Error::elsewhere())),
            _ if self.doubts >= DOUBTS_MAX => Some(Err(Error::two_servers())),
            (Some(error), _) if !is_heard => Some(Err(error.clone())),
            (_, Some(bound)) if self.present.is_some() => Some(bound.clone().map(|_| ())),
            _ => None,
        }
    }
}

/// With so many doubted connections in a row, the address probably leads to two servers.
const DOUBTS_MAX: u32 = 5;

impl Session {
    /// `expected`: the node's id in a cluster, if it was told.
    pub(crate) fn new(
        connector: Connector,
        expected: Option<Arc<str>>,
        identity: &Arc<Identity>,
    ) -> Arc<Self> {
        Arc::new(Self {
            identity: Arc::clone(identity),
            connector,
            state: watch::Sender::default(),
            expected,
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.identity.name
    }

    /// The client; none when it is gone.
    pub(super) fn listener(&self) -> Option<Arc<dyn Listener>> {
        self.identity.listener.upgrade()
    }

    /// How long a reply may take.
    pub(super) fn response_timeout(&self) -> Duration {
        self.connector.dialer.response_timeout
    }

    /// A command connection was bound at this server, in this life of the session. An error, if it
    /// is not the right server.
    pub(super) fn set_bound(&self, life: i64, server: Arc<str>) -> Result<(), Error> {
        let expected = self.expected.as_ref();
        let is_right = expected.is_none_or(|expected| *expected == server);
        let right = is_right.then_some(()).ok_or_else(Error::elsewhere);
        let bound = right.clone().map(|()| (life, server));
        self.state.send_modify(|state| {
            state.bound = Some(bound);
            state.doubts = 0;
        });
        right
    }

    /// No command connection could be bound. `answered` is the session connection that had been
    /// answered when BIND was sent. If the server does not know the session, that connection may
    /// lead to another server. One that was answered later is not doubted: BIND may have arrived a
    /// moment before RLOCK.EVENTS began the session.
    pub(super) fn set_unbound(&self, error: &Error, answered: Option<u64>) {
        if error.code.is_early() {
            self.state.send_modify(|state| {
                state.doubted = answered;
                state.doubts = state.doubts.saturating_add(answered.is_some().into());
            });
        } else {
            let bound = Some(Err(error.clone()));
            self.state.send_modify(|state| state.bound = bound);
        }
    }

    /// Waits until this session connection is doubted.
    pub(super) async fn doubted(&self, connection: Option<u64>) {
        let mut changes = self.state.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = changes.wait_for(|state| state.doubted == connection).await;
    }

    /// Whether this life is surely one at the right server.
    pub(super) fn is_verified(&self, state: &State, life: i64) -> bool {
        self.expected.is_none() || matches!(state.bound, Some(Ok((bound, _))) if bound == life)
    }

    /// The server to which the last command connection was bound.
    pub(crate) fn server(&self) -> Option<Arc<str>> {
        Some(self.state.borrow().bound.clone()?.ok()?.1)
    }

    /// Retires the session's node: its remaining commands go to other nodes.
    pub(crate) fn retire(&self) {
        self.state.send_modify(|state| state.is_retired = true);
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.state.borrow().is_retired
    }

    /// The confidence in the last known life, which may be over.
    pub(crate) fn present(&self) -> Option<Arc<Confidence>> {
        self.state.borrow().present.clone()
    }

    pub(crate) fn life(&self) -> Option<i64> {
        self.state.borrow().life()
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
        let state = self.state.borrow();
        let unbound = || state.bound.as_ref()?.as_ref().err();
        let trouble = state.broken.as_ref().or_else(unbound);
        // The answer of another program than the module says nothing of the command.
        let trouble = trouble.filter(|error| !error.is_unknown());
        let otherwise = || {
            let are_two = state.doubts >= DOUBTS_MAX;
            if are_two {
                Error::two_servers()
            } else {
                Error::not_attached()
            }
        };
        trouble.map_or_else(otherwise, Error::clone)
    }

    /// A call that was sent then, on this connection, was answered in this life.
    pub(super) fn confirm(&self, life: i64, sent: Instant, connection: u64) {
        let (now, grace) = (Instant::now(), self.identity.grace);
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
            state.answered = Some(connection);
        });
        if was_broken {
            trace::reconnected(self.name());
            metrics::reconnected();
        }
    }

    pub(super) fn broken(&self, error: Error) {
        if self.is_attached() {
            trace::disconnected(self.name(), &error);
        }
        self.state.send_modify(|state| state.broken = Some(error));
    }
}

/// A command that waits to be sent, or for its answer.
pub(crate) struct Request {
    pub(super) cmd: Cmd,
    pub(super) then: Then,
    /// The lock that it is about.
    pub(crate) name: Arc<[u8]>,
    pub(crate) manner: Manner,
    /// Whether it goes behind an `ASKING`: to a node to which its slot is on its way.
    pub(super) asking: bool,
    /// Whether a node has said behind an `ASKING` that nothing is held, which was not believed.
    pub(super) is_doubted: bool,
    /// When its caller is told that no answer has come, if it was not told yet.
    pub(super) until: Option<Instant>,
    /// The number of links that have had it.
    pub(crate) hops: u32,
    /// The last sending.
    pub(super) sent: Option<Sending>,
    /// The hold that it ties to the session of each server that carries it out.
    pub(super) hold: Option<Arc<dyn Tied>>,
    /// Counts it among the commands without an answer.
    pub(super) counted: Option<Arc<()>>,
}

/// A hold, as it is tied to sessions.
pub(crate) trait Tied: Send + Sync {
    /// A command is about to be sent so, which ties it to that session.
    fn may_be_tied(&self, sending: &Sending);
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

/// The outcome of a command.
pub(crate) enum Outcome {
    /// It was answered; or it was not carried out, or may not have been, and is sent no more.
    Told(Result<Value, Error>, Option<Sending>),
    /// No answer yet: the time of a reply is over, or the command is sent again after a pause. An
    /// answer that still comes is told too.
    Overdue(Error),
}

/// The receiver of the outcome of a command.
pub(super) enum Then {
    /// A call of the client, by its number. It needs no memory of its own: this is in every lock.
    Call(Weak<dyn Listener>, u64),
    Told(Box<dyn FnMut(Outcome) + Send>),
}

impl Then {
    fn hears(&mut self, outcome: Outcome) {
        match self {
            Self::Call(client, call) => {
                if let Some(client) = client.upgrade() {
                    client.answered(*call, outcome);
                }
            }
            Self::Told(then) => then(outcome),
        }
    }
}

/// The time of a sending, and the session's state at that time.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) at: Instant,
    /// Whether it had been sent before, and may have been carried out then.
    pub(crate) again: bool,
    /// Whether it went behind an `ASKING`.
    pub(crate) asking: bool,
    pub(crate) session: Arc<Session>,
    pub(crate) confidence: Arc<Confidence>,
}

impl Sending {
    /// The same with the session's confidence for a reply that arrives now. If the session has
    /// another life by now, it is the confidence at the time of sending.
    pub(crate) fn at_present(self) -> Self {
        let present = self.session.present();
        let present = present.filter(|present| present.life == self.confidence.life);
        let confidence = present.unwrap_or_else(|| Arc::clone(&self.confidence));
        Self { confidence, ..self }
    }

    /// Until when the server cannot have ended the session, if it has carried this out: the session
    /// was there then. `None`: without limit.
    pub(crate) fn until(&self) -> Option<Instant> {
        let of_sending = confident_until(self.at, self.session.identity.grace);
        self.confidence.until().max(of_sending)
    }

    /// Whether the session is connected, and has not begun anew since.
    pub(crate) fn is_watched(&self) -> bool {
        let state = self.session.state.borrow();
        state.is_attached() && state.life() == Some(self.confidence.life)
    }

    /// Whether the session has begun anew since.
    pub(crate) fn is_of_former_life(&self) -> bool {
        self.session.life() != Some(self.confidence.life)
    }
}

impl Request {
    pub(crate) fn new(
        cmd: Cmd,
        name: &Arc<[u8]>,
        manner: Manner,
        then: impl FnMut(Outcome) + Send + 'static,
    ) -> Self {
        Self::told_to(Then::Told(Box::new(then)), cmd, name, manner)
    }

    /// The ACQUIRE of a call.
    pub(crate) fn of_call(
        call: u64,
        client: Weak<dyn Listener>,
        cmd: Cmd,
        name: &Arc<[u8]>,
    ) -> Self {
        Self::told_to(Then::Call(client, call), cmd, name, Manner::Asks)
    }

    fn told_to(then: Then, cmd: Cmd, name: &Arc<[u8]>, manner: Manner) -> Self {
        Self {
            cmd,
            then,
            name: Arc::clone(name),
            manner,
            asking: false,
            is_doubted: false,
            until: None,
            hops: 0,
            sent: None,
            hold: None,
            counted: None,
        }
    }

    /// To the node to which its slot is on its way.
    pub(crate) fn asking(mut self, asking: bool) -> Self {
        self.asking = asking;
        self
    }

    /// The pause before it is sent once more: so long that the link can still tell its caller in
    /// time.
    pub(crate) fn pause(&self) -> Duration {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let left = self.until.map_or(Duration::MAX, left);
        Backoff::after(self.hops).min(left.max(MILLI))
    }

    /// It ties this hold to the session.
    pub(crate) fn tying(mut self, hold: Arc<dyn Tied>) -> Self {
        self.hold = Some(hold);
        self
    }

    /// It is given up.
    pub(crate) fn fail(mut self, error: Error) {
        self.told(Err(error));
    }

    pub(super) fn told(&mut self, reply: Result<Value, Error>) {
        // It counts no more when its caller hears of it.
        drop(self.counted.take());
        self.then.hears(Outcome::Told(reply, self.sent.take()));
    }

    /// Its caller hears why there is no answer yet.
    pub(super) fn put_off(&mut self, why: Error) {
        self.until = None;
        self.then.hears(Outcome::Overdue(why));
    }

    /// No answer has come in time: whether its caller goes on waiting for one.
    pub(super) fn overdue(&mut self, trouble: &Error) -> bool {
        let no_reply = self.sent.as_ref().map(|_| Error::no_reply());
        let goes_on = no_reply.is_some() || self.manner == Manner::Twice;
        let error = no_reply.unwrap_or_else(|| trouble.clone());
        if goes_on {
            self.put_off(error);
        } else {
            self.told(Err(error));
        }
        goes_on
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::locks::Context;
    use crate::wire::Dialer;

    const GRACE: Duration = Duration::from_secs(1);

    pub(crate) fn identity(grace: Duration) -> Arc<Identity> {
        Arc::new(Identity {
            name: "client".into(),
            grace,
            durability: None,
            listener: Weak::<Context>::new(),
            runtime: Handle::try_current().unwrap_or_else(|_| runtime()),
            gathering: tokio::sync::Mutex::default(),
        })
    }

    fn runtime() -> Handle {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").handle().clone()
    }

    pub(crate) fn session(grace: Duration) -> Arc<Session> {
        let connector = Connector::new("redis://127.0.0.1", &[], &Dialer::within(GRACE));
        Session::new(connector.expect("it can be read"), None, &identity(grace))
    }

    #[test]
    fn a_command_pauses_no_longer_than_its_caller_waits() {
        let now = Instant::now();
        let mut request = Request::new(Cmd::new(), &Arc::from(*b"k"), Manner::Twice, |_| {});
        request.hops = 100;
        assert!(request.pause() > Duration::from_millis(400));
        request.until = Some(after(now, 50));
        assert!(request.pause() <= Duration::from_millis(50));
        request.until = Some(now);
        assert_eq!(request.pause(), MILLI);
    }

    fn after(start: Instant, ms: u64) -> Instant {
        start
            .checked_add(Duration::from_millis(ms))
            .expect("a moment soon")
    }

    #[tokio::test(start_paused = true)]
    async fn confidence_lasts_from_the_sending_for_the_grace_less_the_drift() {
        let session = session(GRACE);
        let sent = Instant::now();
        session.confirm(1, sent, 0);
        let first = session.present().expect("it was confirmed");
        assert_eq!(first.until(), Some(after(sent, 988)));
        tokio::time::advance(Duration::from_millis(500)).await;
        session.confirm(1, after(sent, 250), 0);
        assert_eq!(first.until(), Some(after(sent, 1_238)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_comes_too_late_brings_nothing_back() {
        let session = session(GRACE);
        let sent = Instant::now();
        session.confirm(1, sent, 0);
        let first = session.present().expect("it was confirmed");
        tokio::time::advance(Duration::from_millis(988)).await;
        session.confirm(1, after(sent, 250), 0);
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
