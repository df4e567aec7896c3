//! The session: by its life-line the server tells us of grants and losses, and we know that it has
//! not taken us for dead.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::command::{self, Event, News};
use crate::driver::Driver;
use crate::error::Error;
use crate::hold::{Hold, LostReason, drift};
use crate::locked;
use crate::owner::Place;

/// One client's session at the server.
pub(crate) struct Session {
    pub(crate) name: Box<str>,
    pub(crate) grace: Duration,
    driver: Driver,
    life: watch::Sender<Life>,
    waits: Mutex<HashMap<Spot, mpsc::UnboundedSender<Told>>>,
    holds: Mutex<HashMap<Spot, Weak<Hold>>>,
}

/// How the life-line is.
#[derive(Clone, Debug)]
enum Life {
    Attached(Arc<Attachment>),
    /// Nobody listens; why the last try to attach failed.
    Broken(Error),
    /// It will not come back.
    Over(LostReason),
}

/// An owner at a lock, as events name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Spot {
    name: Vec<u8>,
    owner: Vec<u8>,
}

impl Spot {
    pub(crate) fn of(place: &Place) -> Self {
        Self {
            name: place.name.to_vec(),
            owner: place.owner.as_bytes().to_vec(),
        }
    }
}

/// News for a wait.
pub(crate) struct Told {
    pub(crate) news: News,
    /// It has not happened before this.
    pub(crate) since: Instant,
}

impl Session {
    /// A session to which nobody listens yet.
    pub(crate) fn new(name: String, grace: Duration, driver: Driver) -> Arc<Self> {
        Arc::new(Self {
            name: name.into_boxed_str(),
            grace,
            driver,
            life: watch::Sender::new(Life::Broken(Error::not_attached())),
            waits: Mutex::default(),
            holds: Mutex::default(),
        })
    }

    /// The present attachment, if there is one.
    pub(crate) fn attachment(&self) -> Option<Arc<Attachment>> {
        match &*self.life.borrow() {
            Life::Attached(attachment) => Some(Arc::clone(attachment)),
            Life::Broken(_) | Life::Over(_) => None,
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
                Life::Attached(_) | Life::Broken(_) => {}
            }
            // The sender is `self`, so this is a change and never the end.
            let _ = changes.changed().await;
        }
    }

    /// As [`next_attachment`](Self::next_attachment), and after `patience` says why there is none.
    pub(crate) async fn attachment_within(
        &self,
        patience: Duration,
        known: Option<&Arc<Attachment>>,
    ) -> Result<Arc<Attachment>, Error> {
        let next = tokio::time::timeout(patience, self.next_attachment(known));
        next.await.unwrap_or_else(|_| Err(self.trouble()))
    }

    /// Why there is no attachment.
    pub(crate) fn trouble(&self) -> Error {
        match &*self.life.borrow() {
            Life::Broken(error) => error.clone(),
            Life::Attached(_) | Life::Over(_) => Error::not_attached(),
        }
    }

    /// The server has answered the first EVENTS of a connection, sent at `sent`.
    pub(crate) fn attached(&self, sent: Instant) -> Arc<Attachment> {
        let attachment = Attachment::new(sent, self.grace);
        self.life
            .send_replace(Life::Attached(Arc::clone(&attachment)));
        attachment
    }

    /// The life-line is broken; what is held keeps the confidence it has.
    pub(crate) fn broken(&self, error: Error) {
        self.life.send_replace(Life::Broken(error));
    }

    /// The life-line will not come back: no hold can be confirmed any more.
    pub(crate) fn over(&self, reason: LostReason) {
        self.life.send_replace(Life::Over(reason));
        for hold in self.holds() {
            hold.lose(reason);
        }
    }

    /// Listens for news of a wait, from now on. There is one wait of an owner at a lock at a time.
    pub(crate) fn listen(self: &Arc<Self>, place: &Place) -> Mailbox {
        let spot = Spot::of(place);
        let (sender, letters) = mpsc::unbounded_channel();
        locked(&self.waits).insert(spot.clone(), sender);
        Mailbox {
            session: Arc::clone(self),
            spot,
            letters,
        }
    }

    /// Counts this hold among those of the session.
    pub(crate) fn keep(&self, hold: &Arc<Hold>) {
        locked(&self.holds).insert(hold.spot(), Arc::downgrade(hold));
        // Beside a life-line that ended in this very moment.
        if let Life::Over(reason) = &*self.life.borrow() {
            hold.lose(*reason);
        }
    }

    /// The hold at a spot has gone, unless a newer one has taken its place.
    pub(crate) fn forget(&self, spot: &Spot) {
        let mut holds = locked(&self.holds);
        if holds.get(spot).is_some_and(|hold| hold.strong_count() == 0) {
            holds.remove(spot);
        }
    }

    /// All holds that have guards.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let holds = locked(&self.holds);
        holds.values().filter_map(Weak::upgrade).collect()
    }

    /// Brings an event to whom it concerns. A loss is returned with the hold that it may be about:
    /// the event does not say by its token whether it is this one or an earlier one of the owner.
    pub(crate) fn deliver(&self, event: Event, since: Instant) -> Option<(Arc<Hold>, LostReason)> {
        let Event { name, owner, news } = event;
        let spot = Spot { name, owner };
        if let News::Lost(reason) = news
            && let Some(hold) = self.hold_at(&spot)
        {
            return Some((hold, reason));
        }
        let waits = locked(&self.waits);
        let Some(wait) = waits.get(&spot) else {
            drop(waits);
            self.undeliverable(&spot, &news);
            return None;
        };
        // Under the lock: a mailbox that goes away now finds the letter when it looks through
        // what was not read.
        let told = Told { news, since };
        if let Err(mpsc::error::SendError(told)) = wait.send(told) {
            drop(waits);
            self.undeliverable(&spot, &told.news);
        }
        None
    }

    fn hold_at(&self, spot: &Spot) -> Option<Arc<Hold>> {
        locked(&self.holds).get(spot).and_then(Weak::upgrade)
    }

    /// A grant that nobody waits for is given back, unless a reply has brought the same grant
    /// before. All else is of no use to anybody.
    fn undeliverable(&self, spot: &Spot, news: &News) {
        let News::Granted { token } = *news else {
            return;
        };
        let known = self.hold_at(spot).is_some_and(|hold| hold.token() == token);
        if !known {
            let release = command::release(&spot.name, &spot.owner, Some(token));
            // Should it be lost with the connection, the hold ends with its lease.
            drop(self.driver.send(release));
        }
    }
}

/// What a wait hears. What it has not read when it goes is given back.
pub(crate) struct Mailbox {
    session: Arc<Session>,
    spot: Spot,
    letters: mpsc::UnboundedReceiver<Told>,
}

impl Mailbox {
    /// Waits for news.
    pub(crate) async fn next(&mut self) -> Told {
        match self.letters.recv().await {
            Some(told) => told,
            // The session keeps the sender for as long as this lives.
            None => std::future::pending().await,
        }
    }

    /// News that is here already.
    pub(crate) fn here(&mut self) -> Option<Told> {
        self.letters.try_recv().ok()
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        locked(&self.session.waits).remove(&self.spot);
        while let Some(told) = self.here() {
            self.session.undeliverable(&self.spot, &told.news);
        }
    }
}

/// One unbroken time in which the server knew that we live.
///
/// A hold counts on the attachment under which it was last confirmed, so one that a new connection
/// has not yet confirmed keeps the old one's end: the server may have given it away in between.
#[derive(Debug)]
pub(crate) struct Attachment {
    grace: Duration,
    /// Without a grace the session says nothing about how long a hold lasts.
    until: Mutex<Option<Instant>>,
}

impl Attachment {
    pub(crate) fn new(sent: Instant, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            grace,
            until: Mutex::new(confident_until(sent, grace)),
        })
    }

    /// Until when the server cannot have ended the session; `None` without limit.
    pub(crate) fn until(&self) -> Option<Instant> {
        *locked(&self.until)
    }

    /// An EVENTS call sent at `sent` was answered: whether in time. Once out of touch for too
    /// long, guards have said that they are lost; nothing may bring them back.
    pub(crate) fn confirm(&self, sent: Instant, now: Instant) -> bool {
        let mut until = locked(&self.until);
        if until.is_some_and(|until| now >= until) {
            return false;
        }
        *until = confident_until(sent, self.grace).max(*until);
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

    #[test]
    fn without_a_grace_the_session_sets_no_end() {
        let sent = Instant::now();
        let attachment = Attachment::new(sent, Duration::ZERO);
        assert_eq!(attachment.until(), None);
        assert!(attachment.confirm(sent, after(sent, 100_000)));
    }
}
