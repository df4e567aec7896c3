//! The session: by its life-line the server tells us of grants and losses, and we know that it has
//! not taken us for dead.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::command::{self, Event, News, Subject};
use crate::connection::ServerId;
use crate::driver::Driver;
use crate::error::Error;
use crate::hold::{Hold, LostReason, drift};
use crate::locked;
use crate::mode::Mode;
use crate::owner::{Claim, Target, Terms};

/// One client's session at the server.
pub(crate) struct Session {
    pub(crate) name: Box<str>,
    pub(crate) grace: Duration,
    driver: Driver,
    life: watch::Sender<Life>,
    waits: Mutex<HashMap<Spot, mpsc::UnboundedSender<Told>>>,
    /// An owner may have several at a spot: as a reader and as a writer, or with other locks.
    holds: Mutex<HashMap<Spot, Vec<Weak<Hold>>>>,
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
struct Spot {
    name: Vec<u8>,
    owner: Vec<u8>,
}

/// The spots of several locks are as many.
fn spots(target: &Target) -> impl Iterator<Item = Spot> + '_ {
    target.names().iter().map(|name| Spot {
        name: name.to_vec(),
        owner: target.owner().as_bytes().to_vec(),
    })
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
                // Tried again all the same: rights may be given back. Whoever waits is told.
                Life::Broken(error) if error.is_final() => return Err(error.clone()),
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

    /// This server has answered the first EVENTS of a connection, sent at `sent`.
    pub(crate) fn attached(&self, sent: Instant, server: &ServerId) -> Arc<Attachment> {
        let attachment = Attachment::at(server.clone(), sent, self.grace);
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
    pub(crate) fn listen(self: &Arc<Self>, claim: &Claim) -> Mailbox {
        let (sender, letters) = mpsc::unbounded_channel();
        let mut waits = locked(&self.waits);
        for spot in spots(claim.target()) {
            waits.insert(spot, sender.clone());
        }
        Mailbox {
            session: Arc::clone(self),
            target: Arc::clone(claim.target()),
            terms: claim.terms(),
            letters,
        }
    }

    /// Counts this hold among those of the session.
    pub(crate) fn keep(&self, hold: &Arc<Hold>) {
        let mut holds = locked(&self.holds);
        for spot in spots(hold.target()) {
            holds.entry(spot).or_default().push(Arc::downgrade(hold));
        }
        drop(holds);
        // Beside a life-line that ended in this very moment.
        if let Life::Over(reason) = &*self.life.borrow() {
            hold.lose(*reason);
        }
    }

    /// A hold of this has gone.
    pub(crate) fn forget(&self, target: &Target) {
        let mut holds = locked(&self.holds);
        for spot in spots(target) {
            if let Entry::Occupied(mut here) = holds.entry(spot) {
                here.get_mut().retain(|hold| hold.strong_count() > 0);
                if here.get().is_empty() {
                    here.remove();
                }
            }
        }
    }

    /// All holds that have guards.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let holds = locked(&self.holds);
        let all = holds.values().flatten().filter_map(Weak::upgrade);
        let mut all: Vec<_> = all.collect();
        drop(holds);
        // Of several locks at once it is the same one at each.
        all.sort_unstable_by_key(Arc::as_ptr);
        all.dedup_by(|one, other| Arc::ptr_eq(one, other));
        all
    }

    fn holds_at(&self, spot: &Spot) -> Vec<Arc<Hold>> {
        let holds = locked(&self.holds);
        let here = holds.get(spot).into_iter().flatten();
        here.filter_map(Weak::upgrade).collect()
    }

    /// The owner has been granted this with a new token, and had nothing of it before: what it was
    /// granted earlier is over, but for a writer who now reads too. Of holds that the server tells
    /// apart by their tokens it says so itself.
    pub(crate) fn supersede(&self, target: &Target, token: u64) {
        for hold in spots(target).flat_map(|spot| self.holds_at(&spot)) {
            let mode = hold.target().mode();
            let beside = (mode, target.mode()) == (Mode::Write, Mode::Read);
            if !beside && !mode.has_token() && hold.token() != token {
                hold.lose(LostReason::NotHeld);
            }
        }
    }

    /// Brings an event to whom it concerns. A loss is returned with the holds that it may be about:
    /// the event does not say which of them it is, nor whether it is an earlier one of the owner.
    pub(crate) fn deliver(&self, event: Event, since: Instant) -> Vec<(Arc<Hold>, LostReason)> {
        let Event { name, owner, news } = event;
        let spot = Spot { name, owner };
        if let News::Lost(reason) = news {
            let mut holds = self.holds_at(&spot);
            holds.retain(|hold| hold.lost().is_none());
            if !holds.is_empty() {
                return holds.into_iter().map(|hold| (hold, reason)).collect();
            }
        }
        let waits = locked(&self.waits);
        let Some(wait) = waits.get(&spot) else {
            drop(waits);
            self.stray(&spot, &news);
            return Vec::new();
        };
        // Under the lock: a mailbox that goes away now finds the letter when it looks through
        // what was not read.
        let told = Told { news, since };
        if let Err(mpsc::error::SendError(told)) = wait.send(told) {
            drop(waits);
            self.stray(&spot, &told.news);
        }
        Vec::new()
    }

    /// News for which nobody listens. A wait is heard to its end, so it is not one of ours: what it
    /// was for is not known, and the token says what to give back if it was one plain lock.
    fn stray(&self, spot: &Spot, news: &News) {
        let subject = Subject {
            mode: Mode::Plain,
            names: &[Arc::from(&*spot.name)],
            owner: &spot.owner,
        };
        self.undeliverable(spot, subject, None, news);
    }

    /// A grant that nobody waits for is given back, unless a reply has brought the same grant
    /// before. All else is of no use to anybody.
    fn undeliverable(
        &self,
        spot: &Spot,
        subject: Subject<'_>,
        lease: Option<Duration>,
        news: &News,
    ) {
        let News::Granted { token } = *news else {
            return;
        };
        let mut known = self.holds_at(spot).into_iter();
        if !known.any(|hold| hold.token() == token) {
            let release = command::release(subject, Some(token), lease);
            // Should it be lost with the connection, the hold ends with its lease.
            drop(self.driver.send(release));
        }
    }
}

/// What a wait hears. What it has not read when it goes is given back.
pub(crate) struct Mailbox {
    session: Arc<Session>,
    target: Arc<Target>,
    terms: Terms,
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
        let target = Arc::clone(&self.target);
        let mut waits = locked(&self.session.waits);
        for spot in spots(&target) {
            waits.remove(&spot);
        }
        drop(waits);
        // Grants of several locks are told under the first.
        let Some(spot) = spots(&target).next() else {
            return;
        };
        while let Some(told) = self.here() {
            // Were the lease of a reader not to start anew, the entry that goes could be that of
            // another guard, and the others end earlier.
            let lease = Some(self.terms.lease);
            let subject = target.subject();
            self.session
                .undeliverable(&spot, subject, lease, &told.news);
        }
    }
}

/// One unbroken time in which the server knew that we live.
///
/// A hold counts on the attachment under which it was last confirmed, so one that a new connection
/// has not yet confirmed keeps the old one's end: the server may have given it away in between.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Which server knows it.
    server: Option<ServerId>,
    grace: Duration,
    /// Without a grace the session says nothing about how long a hold lasts.
    until: Mutex<Option<Instant>>,
}

impl Attachment {
    /// One that no server knows.
    pub(crate) fn new(sent: Instant, grace: Duration) -> Arc<Self> {
        Arc::new(Self::of(None, sent, grace))
    }

    fn at(server: ServerId, sent: Instant, grace: Duration) -> Arc<Self> {
        Arc::new(Self::of(Some(server), sent, grace))
    }

    fn of(server: Option<ServerId>, sent: Instant, grace: Duration) -> Self {
        Self {
            server,
            grace,
            until: Mutex::new(confident_until(sent, grace)),
        }
    }

    pub(crate) fn server(&self) -> Option<&ServerId> {
        self.server.as_ref()
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
    use crate::hold::Grant;
    use crate::owner::Owner;

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

    /// A hold of this session, with its claim.
    fn hold(
        session: &Arc<Session>,
        owner: &Owner,
        mode: Mode,
        names: &[&str],
    ) -> (Arc<Hold>, Claim) {
        let names: Vec<_> = names.iter().map(|n| Arc::from(n.as_bytes())).collect();
        let claim = owner.target(mode, &names).claim(Terms {
            lease: Duration::from_secs(30),
            renewed: true,
            max_hold: None,
        });
        let since = Instant::now();
        let grant = Grant {
            token: 7,
            lease: claim.lease(),
            attachment: Attachment::new(since, Duration::ZERO),
            fresh: true,
        };
        let hold = Hold::new(session, &claim, grant);
        session.keep(&hold);
        (hold, claim)
    }

    #[tokio::test]
    async fn a_fresh_grant_says_that_earlier_ones_without_a_token_are_lost() {
        let session = Session::new("client".to_owned(), GRACE, Driver::idle());
        let (owner, other) = (Owner::new("client", 1), Owner::new("client", 2));
        let hold = |owner, mode, names: &[&str]| hold(&session, owner, mode, names);
        let is_lost = |(hold, _): &(Arc<Hold>, Claim)| hold.lost().is_some();

        let writer = hold(&owner, Mode::Write, &["a"]);
        let reader = hold(&owner, Mode::Read, &["a"]);
        session.supersede(reader.1.target(), 8);
        assert!(!is_lost(&writer), "a writer may read");
        session.supersede(writer.1.target(), 7);
        assert!(!is_lost(&writer), "the same grant, told twice");
        session.supersede(writer.1.target(), 8);
        assert!(is_lost(&writer));
        assert!(!is_lost(&reader), "the server will say so");

        let both = hold(&owner, Mode::Several, &["b", "c"]);
        let next = hold(&owner, Mode::Several, &["d"]);
        let others = hold(&other, Mode::Several, &["c", "b"]);
        let one = hold(&owner, Mode::Plain, &["c"]);
        session.supersede(one.1.target(), 8);
        assert!(is_lost(&both) && !is_lost(&next) && !is_lost(&others));
    }

    #[tokio::test]
    async fn holds_are_counted_once_each_and_forgotten_when_they_go() {
        let session = Session::new("client".to_owned(), GRACE, Driver::idle());
        let owner = Owner::new("client", 1);
        let both = hold(&session, &owner, Mode::Several, &["b", "c"]);
        let one = hold(&session, &owner, Mode::Plain, &["c"]);
        assert_eq!(session.holds().len(), 2);
        let broken = |name: &str| Event {
            name: name.into(),
            owner: owner.as_bytes().to_vec(),
            news: News::Lost(LostReason::Broken),
        };
        let lost = session.deliver(broken("c"), Instant::now());
        assert_eq!(lost.len(), 2, "which of them it was is to be asked");
        drop(lost);
        drop(one);
        assert_eq!(session.deliver(broken("c"), Instant::now()).len(), 1);
        both.0.lose(LostReason::Broken);
        assert!(session.deliver(broken("b"), Instant::now()).is_empty());
        drop(both);
        assert!(locked(&session.holds).is_empty());
    }
}
