//! The session: on its connection the server tells us of grants and losses, and we know that it has
//! not taken us for dead.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::Error;
use crate::lost_reason::LostReason;
use crate::time::{AtomicInstant, drift};
use crate::wire::connection::ServerId;

/// One client's session at one server.
pub(crate) struct Session {
    this: Weak<Self>,
    /// The same at every server.
    pub(crate) name: Arc<str>,
    pub(crate) grace: Duration,
    life: watch::Sender<Life>,
    /// The server at which it was attached first.
    first: OnceLock<ServerId>,
    /// When the last call was sent whose answer has reached all whom it concerned.
    told: watch::Sender<Option<Instant>>,
}

/// How the session connection is.
#[derive(Clone, Debug)]
enum Life {
    /// The first try to attach has not ended.
    New,
    Attached(Arc<Attachment>),
    /// Nobody listens; why the last try to attach failed.
    Broken(Error),
    /// It will not come back.
    Over(LostReason),
}

impl Session {
    /// A session to which nobody listens yet.
    pub(crate) fn new(name: Arc<str>, grace: Duration) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            name,
            grace,
            life: watch::Sender::new(Life::New),
            first: OnceLock::new(),
            told: watch::Sender::new(None),
        })
    }

    /// Waits until the first try to attach has ended: the error, if it failed.
    pub(crate) async fn tried(&self) -> Result<(), Error> {
        let mut changes = self.life.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = changes.wait_for(|life| !matches!(life, Life::New)).await;
        self.attachment()
            .map_or_else(|| Err(self.trouble()), |_| Ok(()))
    }

    /// The present attachment, if there is one.
    pub(crate) fn attachment(&self) -> Option<Arc<Attachment>> {
        match &*self.life.borrow() {
            Life::Attached(attachment) => Some(Arc::clone(attachment)),
            Life::New | Life::Broken(_) | Life::Over(_) => None,
        }
    }

    /// Whether it is attached at the server at which it was attached first. One that does not tell
    /// its run id is taken for another.
    pub(crate) fn is_where_it_began(&self) -> bool {
        let attachment = self.attachment();
        let there = attachment.as_ref().and_then(|one| one.server());
        let first = self.first.get();
        there.is_some_and(|there| first.is_some_and(|first| there.is_surely(first)))
    }

    /// Why it will not come back, if it will not.
    pub(crate) fn ended(&self) -> Option<LostReason> {
        match &*self.life.borrow() {
            Life::Over(reason) => Some(*reason),
            Life::New | Life::Attached(_) | Life::Broken(_) => None,
        }
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
                Life::Over(_) => return Err(Error::taken_over()),
                // Tried again all the same: rights may be given back. Whoever waits is told.
                Life::Broken(error) if error.is_final() => return Err(error.clone()),
                Life::New | Life::Attached(_) | Life::Broken(_) => {}
            }
            // The sender is `self`, so this is a change and never the end.
            let _ = changes.changed().await;
        }
    }

    /// Why there is no attachment.
    pub(crate) fn trouble(&self) -> Error {
        match &*self.life.borrow() {
            Life::Broken(error) => error.clone(),
            Life::Over(_) => Error::taken_over(),
            Life::New | Life::Attached(_) => Error::not_attached(),
        }
    }

    /// This server has answered the first EVENTS of a connection, sent at `sent`.
    pub(crate) fn attached(&self, sent: Instant, server: &ServerId) -> Arc<Attachment> {
        let attachment = self.attachment_at(server, sent);
        self.life
            .send_replace(Life::Attached(Arc::clone(&attachment)));
        attachment
    }

    /// The same; but if the answer came too late for anything to count on it, it is not present.
    pub(crate) fn attached_if_present(&self, sent: Instant, server: &ServerId) -> Arc<Attachment> {
        let attachment = self.attachment_at(server, sent);
        if !attachment.is_over(Instant::now()) {
            self.goes_on(&attachment);
        }
        attachment
    }

    fn attachment_at(&self, server: &ServerId, sent: Instant) -> Arc<Attachment> {
        self.first.get_or_init(|| server.clone());
        Arc::new(Attachment {
            session: Weak::clone(&self.this),
            server: Some(server.clone()),
            ..Attachment::unknown(sent, self.grace)
        })
    }

    /// The same attachment goes on after a silence, and whatever counts on it needs no other word.
    pub(crate) fn goes_on(&self, attachment: &Arc<Attachment>) {
        self.life.send_if_modified(|life| {
            let silent = !matches!(life, Life::Attached(_));
            if silent {
                *life = Life::Attached(Arc::clone(attachment));
            }
            silent
        });
    }

    /// What the answer to the call sent at `sent` told has reached all whom it concerned.
    pub(crate) fn told(&self, sent: Instant) {
        self.told.send_replace(Some(sent));
    }

    /// Ends when all that the server did before `moment` has reached whom it concerned, or never
    /// will. Answers come in order, and what went with an old connection comes by no new one: so
    /// when a call is answered that was sent later, or nobody calls any more.
    pub(crate) async fn all_told(&self, moment: Instant) {
        let (mut told, mut life) = (self.told.subscribe(), self.life.subscribe());
        // The senders are `self`: there is no other end to this.
        tokio::select! {
            _ = told.wait_for(|sent| *sent >= Some(moment)) => {}
            _ = life.wait_for(|life| matches!(life, Life::Over(_))) => {}
        }
    }

    /// The session connection is broken; what is held keeps the confidence it has.
    pub(crate) fn broken(&self, error: Error) {
        self.life.send_replace(Life::Broken(error));
    }

    /// The session will not come back: no hold can be confirmed any more.
    pub(crate) fn over(&self, reason: LostReason) {
        self.life.send_replace(Life::Over(reason));
    }
}

/// One unbroken time in which the server knew that we live.
///
/// A hold counts on the attachment under which it was last confirmed, so one that a new connection
/// has not yet confirmed keeps the old one's end: the server may have given it away in between.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Which session is attached by it.
    session: Weak<Session>,
    /// Which server knows it.
    server: Option<ServerId>,
    grace: Duration,
    /// Without a grace the session says nothing about how long a hold lasts.
    until: Option<AtomicInstant>,
}

impl Attachment {
    /// One that no server knows.
    pub(crate) fn new(sent: Instant, grace: Duration) -> Arc<Self> {
        Arc::new(Self::unknown(sent, grace))
    }

    fn unknown(sent: Instant, grace: Duration) -> Self {
        Self {
            session: Weak::new(),
            server: None,
            grace,
            until: confident_until(sent, grace).map(AtomicInstant::new),
        }
    }

    pub(crate) fn server(&self) -> Option<&ServerId> {
        self.server.as_ref()
    }

    /// Whether this session is, or was, attached by it.
    pub(crate) fn is_of(&self, session: &Session) -> bool {
        std::ptr::eq(self.session.as_ptr(), session)
    }

    /// Until when the server cannot have ended the session; `None` without limit.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until.as_ref().map(AtomicInstant::get)
    }

    /// Whether nothing can count on it any more.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| now >= until)
    }

    /// An EVENTS call sent at `sent` was answered: whether in time. Once out of touch for too
    /// long, guards have said that they are lost; nothing may bring them back.
    pub(crate) fn confirm(&self, sent: Instant, now: Instant) -> bool {
        let Some(until) = &self.until else {
            return true;
        };
        // Only the task of the session connection confirms, so nobody writes in between.
        let present = until.get();
        if now >= present {
            return false;
        }
        if let Some(confident) = confident_until(sent, self.grace) {
            until.set(confident.max(present));
        }
        true
    }
}

/// The connection was open when the server answered, so after the call was sent; from its closing
/// on the server waits for the grace.
fn confident_until(sent: Instant, grace: Duration) -> Option<Instant> {
    if grace.is_zero() {
        return None;
    }
    let confidence = grace.saturating_sub(drift(grace));
    Some(sent.checked_add(confidence).unwrap_or(sent))
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
        let attachment = Attachment::new(sent, GRACE);
        assert!(attachment.confirm(after(sent, 250), after(sent, 500)));
        assert_eq!(attachment.until(), Some(after(sent, 1_238)));
    }

    #[test]
    fn an_answer_that_comes_too_late_brings_nothing_back() {
        let sent = Instant::now();
        let attachment = Attachment::new(sent, GRACE);
        assert!(!attachment.confirm(after(sent, 250), after(sent, 988)));
        assert_eq!(attachment.until(), Some(after(sent, 988)));
    }

    #[tokio::test]
    async fn all_is_told_when_a_call_sent_later_is_answered_or_none_will_be() {
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
        session.told(earlier.expect("a moment ago"));
        assert!(!is_over().await);
        session.told(after(moment, 1));
        assert!(is_over().await);

        let mut waiting = Box::pin(session.all_told(after(moment, 2)));
        assert!(
            tokio::time::timeout(Duration::ZERO, &mut waiting)
                .await
                .is_err()
        );
        session.over(LostReason::SessionTakenOver);
        waiting.await;
    }

    #[test]
    fn without_a_grace_the_session_sets_no_end() {
        let sent = Instant::now();
        let attachment = Attachment::new(sent, Duration::ZERO);
        assert_eq!(attachment.until(), None);
        assert!(attachment.confirm(sent, after(sent, 100_000)));
    }
}
