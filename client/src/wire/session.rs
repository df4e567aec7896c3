//! The session of a client at a server: until when the server has surely not ended it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::error::Error;
use crate::{drift, metrics, part, trace};

/// One client's session at one server.
#[derive(Debug)]
pub(crate) struct Session {
    /// The same at every server.
    pub(crate) name: Arc<str>,
    pub(crate) grace: Duration,
    pub(super) state: watch::Sender<State>,
    /// The node's id in a cluster, if it was told: another server may be at its address by now.
    expected: Option<Arc<str>>,
    /// Numbers the connections of a client, at whatever server: a node that gets another address
    /// is the same one still.
    epochs: Arc<AtomicU64>,
    /// Tells that the command connection has reached a server that does not know the session: the
    /// server that the session connection listens to may not be the right one any more.
    pub(super) doubt: Notify,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The confidence in the present life; none before the first reply.
    present: Option<Arc<Confidence>>,
    /// Why the last try to reach the server failed, if it did.
    broken: Option<Error>,
    /// The number of answers so far.
    pub(super) answers: u64,
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
    until: ArcSwap<Option<Instant>>,
}

impl Confidence {
    /// The confidence after the answer to a call that was sent at this time.
    pub(crate) fn new(life: i64, sent: Instant, grace: Duration) -> Arc<Self> {
        let until = ArcSwap::from_pointee(confident_until(sent, grace));
        Arc::new(Self { life, until })
    }

    /// `None`: without limit.
    pub(crate) fn until(&self) -> Option<Instant> {
        **self.until.load()
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| now >= until)
    }

    /// Only the task of the session connection confirms, so nobody writes in between.
    fn confirm(&self, sent: Instant, grace: Duration) {
        let later = confident_until(sent, grace).max(self.until());
        self.until.store(Arc::new(later));
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
    pub(super) fn life(&self) -> Option<i64> {
        Some(self.present.as_ref()?.life)
    }

    fn is_attached(&self) -> bool {
        self.present.is_some() && self.broken.is_none() && matches!(self.bound, Some(Ok(_)))
    }

    /// How the first try has ended. An answer that is only late does not end it; that its node is
    /// not used any more does.
    fn tried(&self) -> Option<Result<(), Error>> {
        let until = self.present.as_ref().and_then(|present| present.until());
        let is_heard = until.is_some_and(|until| Instant::now() < until);
        match (&self.broken, &self.bound) {
            _ if self.is_retired => Some(Err(Error::elsewhere())),
            (Some(error), _) if !is_heard => Some(Err(error.clone())),
            (_, Some(bound)) if self.present.is_some() => Some(bound.clone().map(|_| ())),
            _ => None,
        }
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
            doubt: Notify::new(),
        })
    }

    pub(super) fn next_epoch(&self) -> u64 {
        self.epochs
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1)
    }

    /// A command connection was bound at this server, in this life of the session; or could not be.
    /// Whether it is the right one.
    pub(super) fn set_bound(&self, mut bound: Result<(i64, Arc<str>), Error>) -> bool {
        let expected = self.expected.as_ref();
        if let (Ok((_, server)), Some(expected)) = (&bound, expected)
            && server != expected
        {
            bound = Err(Error::elsewhere());
        }
        let is_right = bound.is_ok();
        self.state.send_modify(|state| state.bound = Some(bound));
        is_right
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
        trouble.map_or_else(Error::not_attached, |error| error.clone().unasked())
    }

    /// A call that was sent then was answered in this life.
    pub(super) fn confirm(&self, life: i64, sent: Instant) {
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

    pub(super) fn broken(&self, error: Error) {
        if self.is_attached() {
            trace::disconnected(&self.name, &error);
        }
        self.state.send_modify(|state| state.broken = Some(error));
    }
}

/// A part of the grace; without a grace there is no limit.
pub(super) fn part_of_grace(grace: Duration, of: u32) -> Duration {
    match part(grace, of) {
        Duration::ZERO => Duration::MAX,
        part => part,
    }
}

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
