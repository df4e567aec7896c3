//! The session: on its connection the server tells us of grants and losses, and we know that it has
//! not taken us for dead.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use smallvec::SmallVec;
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use crate::wire::ServerId;
use crate::{Error, chance, drift, locked, metrics, part, trace};

/// One client's session at one server.
pub(crate) struct Session {
    pub(crate) number: SessionNumber,
    /// The same at every server.
    pub(crate) name: Arc<str>,
    pub(crate) grace: Duration,
    life: watch::Sender<Life>,
    /// The server at which it was attached first.
    first: OnceLock<ServerId>,
    /// When the last call was sent whose answer has reached all whom it concerned. What has not
    /// been told in that answer has not happened before.
    pub(crate) told: watch::Sender<Instant>,
    /// Grants that waits have learnt of from answers, and since when: their events may be yet to
    /// come.
    untold: Mutex<Vec<(u64, Instant)>>,
}

/// Tells the sessions of a client at its servers apart.
pub(crate) type SessionNumber = Uuid;

/// How the session connection is.
enum Life {
    /// The first try to attach has not ended.
    New,
    Attached(Arc<Attachment>),
    /// Nobody listens; why the last try to attach failed.
    Broken(Error),
}

impl Session {
    /// A session to which nobody listens yet.
    pub(crate) fn new(name: Arc<str>, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            number: chance::uuid(),
            name,
            grace,
            life: watch::Sender::new(Life::New),
            first: OnceLock::new(),
            told: watch::Sender::new(Instant::now()),
            untold: Mutex::default(),
        })
    }

    /// Waits until the first try to attach has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        let mut changes = self.life.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = changes.wait_for(|life| !matches!(life, Life::New)).await;
        let attachment = self.attachment();
        attachment.map(drop).ok_or_else(|| self.trouble())
    }

    /// The present attachment, if there is one.
    pub(crate) fn attachment(&self) -> Option<Arc<Attachment>> {
        match &*self.life.borrow() {
            Life::Attached(attachment) => Some(Arc::clone(attachment)),
            Life::New | Life::Broken(_) => None,
        }
    }

    /// To which server it is attached.
    pub(crate) fn server(&self) -> Option<ServerId> {
        self.attachment()?.server().cloned()
    }

    /// Whether this is the present attachment.
    pub(crate) fn is_attached_by(&self, attachment: &Arc<Attachment>) -> bool {
        let present = self.attachment();
        present.is_some_and(|present| Arc::ptr_eq(&present, attachment))
    }

    /// Whether it is attached at the server at which it was attached first. One that does not tell
    /// its run id is taken for another.
    pub(crate) fn is_where_it_began(&self) -> bool {
        let there = self.server();
        there.is_some_and(|there| !self.began_elsewhere(&there))
    }

    /// Whether this is surely not the server at which it was attached first.
    pub(crate) fn began_elsewhere(&self, server: &ServerId) -> bool {
        let first = self.first.get();
        first.is_some_and(|first| !server.is_surely(first))
    }

    /// Waits for an attachment other than `known`.
    pub(crate) async fn next_attachment(
        &self,
        known: Option<&Arc<Attachment>>,
    ) -> Result<Arc<Attachment>, Error> {
        let mut changes = self.life.subscribe();
        loop {
            match &*changes.borrow_and_update() {
                Life::Attached(present) if !known.is_some_and(|one| Arc::ptr_eq(one, present)) => {
                    return Ok(Arc::clone(present));
                }
                // Tried again all the same: rights may be given back. Whoever waits is told.
                Life::Broken(error) if error.is_final() => return Err(error.clone()),
                Life::New | Life::Attached(_) | Life::Broken(_) => {}
            }
            // The sender is `self`, so this is a change and never the end.
            let _ = changes.changed().await;
        }
    }

    /// Why there is no attachment, and the server is not asked.
    pub(crate) fn trouble(&self) -> Error {
        match &*self.life.borrow() {
            Life::Broken(error) => error.clone().unasked(),
            Life::New | Life::Attached(_) => Error::not_attached(),
        }
    }

    /// This server has answered the first EVENTS of a connection, or the first after a silence that
    /// was too long, sent at `sent`. It is not the present attachment before it
    /// [goes on](Self::goes_on).
    pub(crate) fn attachment_at(&self, server: &ServerId, sent: Instant) -> Arc<Attachment> {
        self.first.get_or_init(|| server.clone());
        Attachment::new((self.number, server.clone()), sent, self.grace)
    }

    /// This attachment is the present one if there is none: it is new, or the same goes on after a
    /// silence, and whatever counts on it needs no other word.
    pub(crate) fn goes_on(&self, attachment: &Arc<Attachment>) {
        // Only the task of the session connection writes it, so nobody does in between.
        if self.attachment().is_none() {
            let present = Life::Attached(Arc::clone(attachment));
            if let Life::Broken(_) = self.life.send_replace(present) {
                trace::reconnected(&self.name);
                metrics::reconnected();
            }
        }
    }

    /// Ends when all that the server did before `moment` has reached whom it concerned, or never
    /// will. Answers come in order, and what went with an old connection comes by no new one: so
    /// when a call is answered that was sent later.
    pub(crate) async fn all_told(&self, moment: Instant) {
        // The sender is `self`: there is no other end to this.
        let mut told = self.told.subscribe();
        let _ = told.wait_for(|sent| *sent > moment).await;
    }

    /// A wait has learnt of this grant from an answer.
    pub(crate) fn learnt(&self, token: u64) {
        locked(&self.untold).push((token, Instant::now()));
    }

    /// The grants that waits have learnt of, and of which events may tell yet. By the answer to a
    /// call that was sent later, all has been told that happened before.
    pub(crate) fn untold(&self) -> impl Iterator<Item = u64> {
        let mut untold = locked(&self.untold);
        untold.retain(|(_, learnt)| *learnt >= *self.told.borrow());
        let tokens: SmallVec<[_; 1]> = untold.iter().map(|(token, _)| *token).collect();
        tokens.into_iter()
    }

    /// Nothing keeps it attached any more: the client has gone, or its runtime has.
    pub(crate) fn ended(&self) {
        self.life.send_replace(Life::Broken(Error::shut_down()));
    }

    /// The session connection is broken; what is held keeps the confidence it has.
    pub(crate) fn broken(&self, error: Error) {
        if let Life::Attached(_) = &*self.life.borrow() {
            trace::disconnected(&self.name, &error);
        }
        self.life.send_replace(Life::Broken(error));
    }
}

/// One unbroken time in which the server knew that we live.
///
/// A hold counts on the attachment under which it was last confirmed, so one that a new connection
/// has not yet confirmed keeps the old one's end: the server may have given it away in between.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Which session is attached by it, and which server knows it.
    by: Option<(SessionNumber, ServerId)>,
    grace: Duration,
    /// Without a grace the session says nothing about how long a hold lasts.
    until: Option<ArcSwap<Instant>>,
}

impl Attachment {
    /// One that was confirmed by a call which was sent then; `None` if no server knows it.
    pub(crate) fn new(
        by: impl Into<Option<(SessionNumber, ServerId)>>,
        sent: Instant,
        grace: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            by: by.into(),
            grace,
            until: confident_until(sent, grace).map(ArcSwap::from_pointee),
        })
    }

    pub(crate) fn server(&self) -> Option<&ServerId> {
        self.by.as_ref().map(|(_, server)| server)
    }

    /// Whether this session is, or was, attached by it.
    pub(crate) fn is_of(&self, session: &Session) -> bool {
        matches!(&self.by, Some((by, _)) if *by == session.number)
    }

    /// Until when the server cannot have ended the session; `None` without limit.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until.as_ref().map(|until| **until.load())
    }

    /// Whether nothing can count on it any more.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| now >= until)
    }

    /// An EVENTS call sent at `sent` was answered: whether in time. Once out of touch for too
    /// long, guards have said that they are lost; nothing may bring them back.
    pub(crate) fn confirm(&self, sent: Instant, now: Instant) -> bool {
        let Some(end) = &self.until else { return true };
        // Only the task of the session connection confirms, so nobody writes in between.
        let present = **end.load();
        if now >= present {
            return false;
        }
        if let Some(confident) = confident_until(sent, self.grace) {
            end.store(Arc::new(confident.max(present)));
        }
        true
    }
}

/// The connection was open when the server answered, so after the call was sent; from its closing
/// on the server waits for the grace.
fn confident_until(sent: Instant, grace: Duration) -> Option<Instant> {
    let confidence = grace.saturating_sub(drift(grace));
    let until = sent.checked_add(confidence).unwrap_or(sent);
    (!grace.is_zero()).then_some(until)
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

    #[test]
    fn confidence_lasts_from_the_sending_for_the_grace_less_the_drift() {
        let sent = Instant::now();
        assert_eq!(confident_until(sent, GRACE), Some(after(sent, 988)));
        let attachment = Attachment::new(None, sent, GRACE);
        assert!(attachment.confirm(after(sent, 250), after(sent, 500)));
        assert_eq!(attachment.until(), Some(after(sent, 1_238)));
    }

    #[test]
    fn an_answer_that_comes_too_late_brings_nothing_back() {
        let sent = Instant::now();
        let attachment = Attachment::new(None, sent, GRACE);
        assert!(!attachment.confirm(after(sent, 250), after(sent, 988)));
        assert_eq!(attachment.until(), Some(after(sent, 988)));
    }

    #[tokio::test]
    async fn all_is_told_when_a_call_sent_later_is_answered() {
        let session = Session::new("client".into(), GRACE);
        let moment = Instant::now();
        let mut waiting = Box::pin(session.all_told(moment));
        let mut is_over = async || {
            tokio::select! {
                biased;
                () = &mut waiting => true,
                () = tokio::task::yield_now() => false,
            }
        };
        let earlier = moment.checked_sub(Duration::from_millis(1));
        session.told.send_replace(earlier.expect("a moment ago"));
        assert!(!is_over().await);
        session.told.send_replace(after(moment, 1));
        assert!(is_over().await);
    }

    #[test]
    fn without_a_grace_the_session_sets_no_end() {
        let sent = Instant::now();
        let attachment = Attachment::new(None, sent, Duration::ZERO);
        assert_eq!(attachment.until(), None);
        assert!(attachment.confirm(sent, after(sent, 100_000)));
    }
}
