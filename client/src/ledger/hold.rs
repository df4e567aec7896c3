//! What is known about one hold: its token, and until when it may be called held.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::ledger::entries;
use crate::ledger::usage::{HoldOptions, Reserved, Target, Usage};
use crate::locked;
use crate::lost_reason::LostReason;
use crate::time::{LEASE_MIN, Lease, drift, valid_until, whole_millis};
use crate::trace;
use crate::wire::connection::ServerId;
use crate::wire::request::{self, Command};
use crate::wire::session::Attachment;

/// One hold of one owner, shared by all its guards. A hold of several locks is lost with any.
pub(crate) struct Hold {
    target: Arc<Target>,
    token: u64,
    options: HoldOptions,
    /// When it ends at the latest, however often it is renewed.
    cap: Option<Instant>,
    validity: Mutex<Validity>,
    /// Tells those who wait for its end that this has moved.
    changed: Notify,
    span: trace::Span,
}

/// A command that started a lease, and was answered.
#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    pub(crate) lease: Lease,
    /// What the session was attached by before it was sent; `None` if by nothing: then the hold
    /// still counts on what it was confirmed under before.
    pub(crate) attachment: Option<Arc<Attachment>>,
    /// Whether the lease counts: where grants must be acknowledged, only if enough replicas or
    /// disks have it. Otherwise the server says that it is held by this session, and no more.
    pub(crate) acknowledged: bool,
}

/// What the server has granted.
pub(crate) struct Grant {
    pub(crate) token: u64,
    /// As it was asked for; it has not begun earlier.
    pub(crate) lease: Lease,
    pub(crate) attachment: Arc<Attachment>,
    /// Whether the owner is known to have held nothing of it before.
    pub(crate) fresh: bool,
}

impl Hold {
    pub(crate) fn new(usage: &Usage, grant: Grant) -> Arc<Self> {
        let options = usage.options();
        let begun = grant.lease.since;
        let cap = options.max_hold.and_then(|max| begun.checked_add(max));
        let validity = Validity::new(grant.lease, grant.attachment).within(cap);
        let target = usage.target();
        Arc::new(Self {
            target: Arc::clone(target),
            token: grant.token,
            options,
            cap,
            validity: Mutex::new(validity),
            changed: Notify::new(),
            span: trace::hold(target, target.owner(), target.mode(), grant.token),
        })
    }

    pub(crate) fn target(&self) -> &Arc<Target> {
        &self.target
    }

    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    /// Whether the watchdog renews it.
    pub(crate) fn is_renewed(&self) -> bool {
        self.options.renewed
    }

    /// How long it may still be called held; zero once lost.
    pub(crate) fn valid_for(&self) -> Duration {
        locked(&self.validity).left(Instant::now())
    }

    /// Why it is lost, if it is. Whoever has been told stays told, whatever is confirmed later.
    pub(crate) fn lost(&self) -> Option<LostReason> {
        let reason = self.reason(&locked(&self.validity), Instant::now());
        if let Some(reason) = reason {
            self.lose(reason);
        }
        reason
    }

    /// Ends when it is lost, at the latest with its validity.
    pub(crate) async fn until_lost(&self) -> LostReason {
        loop {
            // Listens before it looks: what changes in between is heard.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let end = locked(&self.validity).end();
            if let Some(reason) = self.lost() {
                return reason;
            }
            tokio::select! {
                () = sleep_until(end) => {}
                () = changed => {}
            }
        }
    }

    /// Whether it was last confirmed under this attachment.
    pub(crate) fn counts_on(&self, attachment: &Attachment) -> bool {
        std::ptr::eq(&raw const *locked(&self.validity).attachment, attachment)
    }

    /// The server that last confirmed it, if it is known.
    pub(crate) fn server(&self) -> Option<ServerId> {
        locked(&self.validity).attachment.server().cloned()
    }

    /// As much of the whole lease as the longest hold allows.
    pub(crate) fn lease_anew(&self, now: Instant) -> Duration {
        let left = self.cap.map(|cap| cap.saturating_duration_since(now));
        let lease = left.map_or(self.options.lease, |left| self.options.lease.min(left));
        whole_millis(lease).max(LEASE_MIN)
    }

    /// The whole, or, if it was taken with a lease of its own, what is left of that.
    fn lease_kept(&self, now: Instant) -> Duration {
        if self.options.renewed {
            return self.lease_anew(now);
        }
        let ends = locked(&self.validity).ends;
        let left = ends.saturating_duration_since(now);
        whole_millis(left).max(LEASE_MIN)
    }

    /// The whole lease, to be asked for now.
    pub(crate) fn anew(&self) -> Reserved {
        self.target.lease(self.lease_anew(Instant::now()))
    }

    /// The lease with which it is renewed by itself, to be asked for now.
    pub(crate) fn kept(&self) -> Reserved {
        self.target.lease(self.lease_kept(Instant::now()))
    }

    /// The options for what takes its place: it ends no later.
    pub(crate) fn terms_left(&self) -> HoldOptions {
        let left = |cap: Instant| cap.saturating_duration_since(Instant::now());
        HoldOptions {
            max_hold: self.cap.map(left).map(whole_millis),
            ..self.options
        }
    }

    /// The command that renews it, for this session.
    pub(crate) fn renewal(&self, lease: Lease, session: &str) -> Command<bool> {
        request::renew(self.target.subject(), lease.length, self.token, session)
    }

    /// Takes note of what the server said to a renewal: whether it is still held, or why not.
    pub(crate) fn renewed(&self, held: bool, renewal: &Renewal) -> Result<(), LostReason> {
        if !held {
            self.lose(LostReason::NotHeld);
        }
        // A hold once lost stays lost: somebody may have acted on it.
        if let Some(reason) = self.lost() {
            return Err(reason);
        }
        let mut validity = locked(&self.validity);
        if renewal.acknowledged {
            validity.extend(renewal, self.cap);
        } else {
            validity.confirm(renewal);
        }
        drop(validity);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Makes `granted` part of this hold, if it is the same one entered again and not yet lost.
    /// Where grants must be `acknowledged`, its lease does not count before it is.
    pub(crate) fn take_over(&self, granted: &Self, acknowledged: bool) -> bool {
        if self.token != granted.token || self.lost().is_some() {
            return false;
        }
        let mut again = locked(&granted.validity).clone().within(self.cap);
        let mut validity = locked(&self.validity);
        if !acknowledged {
            again.until = validity.until;
        }
        validity.join(again);
        drop(validity);
        self.changed.notify_waiters();
        true
    }

    /// Says that it is lost. The first reason stands.
    pub(crate) fn lose(&self, reason: LostReason) {
        let mut validity = locked(&self.validity);
        if validity.lost.is_some() {
            return;
        }
        validity.lost = Some(reason);
        drop(validity);
        self.changed.notify_waiters();
        trace::lost(&self.span, reason);
    }

    fn reason(&self, validity: &Validity, now: Instant) -> Option<LostReason> {
        let reason = validity.lost(now)?;
        let capped = self.cap.is_some_and(|cap| {
            let slack = LEASE_MIN.saturating_add(LEASE_MIN);
            validity
                .ends
                .checked_add(slack)
                .is_none_or(|end| end >= cap)
        });
        Some(match reason {
            LostReason::Expired if capped && validity.lost.is_none() => LostReason::MaxHold,
            reason => reason,
        })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        entries::forget(&self.target);
    }
}

/// Ends when one of these is lost; never, if there are none.
pub(crate) async fn lost<'a>(holds: impl Iterator<Item = &'a Arc<Hold>>) -> LostReason {
    let mut waiting: Vec<_> = holds.map(|hold| Box::pin(hold.until_lost())).collect();
    poll_fn(|cx| {
        let told = waiting.iter_mut().map(|one| one.as_mut().poll(cx));
        told.fold(Poll::Pending, |first, next| match first {
            Poll::Ready(reason) => Poll::Ready(reason),
            Poll::Pending => next,
        })
    })
    .await
}

/// Until when a hold may be called held. Time is an argument.
#[derive(Clone, Debug)]
struct Validity {
    /// The end of the lease, if the server's clock runs like ours.
    ends: Instant,
    /// The end of our confidence in the lease.
    until: Instant,
    /// And in the session.
    attachment: Arc<Attachment>,
    /// When that was confirmed.
    since: Instant,
    /// Whether the last renewal was not acknowledged.
    unacknowledged: bool,
    lost: Option<LostReason>,
}

impl Validity {
    fn new(lease: Lease, attachment: Arc<Attachment>) -> Self {
        Self {
            ends: lease.ends(),
            until: valid_until(lease),
            attachment,
            since: lease.since,
            unacknowledged: false,
            lost: None,
        }
    }

    /// The same, but for no longer than until `cap`: the lease may have been asked for longer for
    /// another guard's sake.
    fn within(mut self, cap: Option<Instant>) -> Self {
        if let Some(cap) = cap {
            let until = cap.checked_sub(drift(Duration::ZERO)).unwrap_or(cap);
            (self.ends, self.until) = (self.ends.min(cap), self.until.min(until));
        }
        self
    }

    /// The earlier end.
    fn end(&self) -> Instant {
        let session = self.attachment.until();
        session.map_or(self.until, |session| session.min(self.until))
    }

    fn lost(&self, now: Instant) -> Option<LostReason> {
        if self.lost.is_some() || now < self.end() {
            return self.lost;
        }
        Some(if now >= self.until && self.unacknowledged {
            LostReason::NotAcknowledged
        } else if now >= self.until {
            LostReason::Expired
        } else {
            LostReason::OutOfTouch
        })
    }

    fn left(&self, now: Instant) -> Duration {
        match self.lost {
            None => self.end().saturating_duration_since(now),
            Some(_) => Duration::ZERO,
        }
    }

    fn extend(&mut self, renewal: &Renewal, cap: Option<Instant>) {
        let attachment = renewal.attachment.as_ref().unwrap_or(&self.attachment);
        self.join(Self::new(renewal.lease, Arc::clone(attachment)).within(cap));
        self.unacknowledged = false;
    }

    /// The server's word alone: the session keeps the hold, and its lease ends as before.
    fn confirm(&mut self, renewal: &Renewal) {
        self.unacknowledged = true;
        let since = renewal.lease.since;
        if let Some(attachment) = &renewal.attachment
            && since >= self.since
        {
            (self.attachment, self.since) = (Arc::clone(attachment), since);
        }
    }

    /// A reply that comes out of order does not shorten, and what was asked for last says where the
    /// lock is: one that has moved must not go on counting on the node that it has left.
    fn join(&mut self, other: Self) {
        self.ends = self.ends.max(other.ends);
        self.until = self.until.max(other.until);
        if other.since >= self.since {
            (self.attachment, self.since) = (other.attachment, other.since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Owner;
    use crate::wire::request::Mode;

    const LEASE: Duration = Duration::from_secs(10);
    const VALID: Duration = Duration::from_millis(9_898);

    fn after(start: Instant, ms: u64) -> Instant {
        start
            .checked_add(Duration::from_millis(ms))
            .expect("a moment soon")
    }

    /// The validity of a session that sets no end.
    fn validity(sent: Instant, lease: Duration) -> Validity {
        let lease = lease_from(sent, lease);
        Validity::new(lease, Attachment::new(sent, Duration::ZERO))
    }

    fn lease_from(since: Instant, length: Duration) -> Lease {
        Lease { since, length }
    }

    fn renewal(sent: Instant) -> Renewal {
        Renewal {
            lease: lease_from(sent, LEASE),
            attachment: None,
            acknowledged: true,
        }
    }

    #[test]
    fn valid_from_the_sending_for_the_lease_less_the_drift() {
        let sent = Instant::now();
        let validity = validity(sent, LEASE);
        assert_eq!(validity.left(sent), VALID);
        assert_eq!(validity.lost(after(sent, 9_897)), None);
        assert_eq!(validity.lost(after(sent, 9_898)), Some(LostReason::Expired));
        assert_eq!(validity.left(after(sent, 9_999)), Duration::ZERO);
    }

    #[test]
    fn a_renewal_counts_from_its_sending_not_from_its_reply() {
        let sent = Instant::now();
        let mut validity = validity(sent, LEASE);
        validity.extend(&renewal(after(sent, 3_000)), None);
        assert_eq!(
            validity.left(after(sent, 5_000)),
            VALID.saturating_sub(LEASE / 5)
        );
    }

    #[test]
    fn a_reply_that_comes_out_of_order_does_not_shorten() {
        let sent = Instant::now();
        let mut validity = validity(after(sent, 1_000), LEASE);
        validity.extend(&renewal(sent), None);
        assert_eq!(validity.left(after(sent, 1_000)), VALID);
    }

    #[test]
    fn a_lease_no_longer_than_its_drift_is_never_valid() {
        let sent = Instant::now();
        let validity = validity(sent, Duration::from_millis(2));
        assert_eq!(validity.lost(sent), Some(LostReason::Expired));
    }

    #[test]
    fn the_session_ends_it_when_that_comes_first() {
        let sent = Instant::now();
        let attachment = Attachment::new(sent, Duration::from_secs(1));
        let validity = Validity::new(lease_from(sent, LEASE), Arc::clone(&attachment));
        assert_eq!(validity.left(sent), Duration::from_millis(988));
        assert_eq!(
            validity.lost(after(sent, 988)),
            Some(LostReason::OutOfTouch)
        );
        assert!(attachment.confirm(after(sent, 500), after(sent, 600)));
        assert_eq!(validity.lost(after(sent, 1_487)), None);
    }

    #[test]
    fn a_new_attachment_counts_only_once_the_hold_is_confirmed_under_it() {
        let sent = Instant::now();
        let grace = Duration::from_secs(1);
        let first = Attachment::new(sent, grace);
        let mut validity = Validity::new(lease_from(sent, LEASE), first);
        let next = Attachment::new(after(sent, 900), grace);
        assert_eq!(validity.end(), after(sent, 988));
        let confirmed = Renewal {
            attachment: Some(next),
            ..renewal(after(sent, 950))
        };
        validity.extend(&confirmed, None);
        assert_eq!(validity.end(), after(sent, 1_888));
    }

    #[test]
    fn what_was_asked_for_last_says_on_which_session_a_hold_counts() {
        let sent = Instant::now();
        let grace = Duration::from_secs(1);
        let left = Attachment::new(after(sent, 400), grace);
        let mut validity = Validity::new(lease_from(sent, LEASE), Arc::clone(&left));
        // The node to which the lock has moved was heard from a little earlier.
        let confirmed = Renewal {
            attachment: Some(Attachment::new(after(sent, 300), grace)),
            ..renewal(after(sent, 500))
        };
        validity.extend(&confirmed, None);
        assert_eq!(validity.end(), after(sent, 1_288));
        let late = Renewal {
            attachment: Some(left),
            ..renewal(after(sent, 450))
        };
        validity.extend(&late, None);
        assert_eq!(validity.end(), after(sent, 1_288));
    }

    fn hold(sent: Instant, renewed: bool, max_hold: Option<Duration>) -> Arc<Hold> {
        let owner = Owner::new("client", 1);
        let target = owner.target(&Arc::default(), Mode::Plain, &[Arc::from(*b"name")]);
        let usage = target.usage(HoldOptions {
            lease: LEASE,
            renewed,
            max_hold,
        });
        let grant = Grant {
            token: 7,
            lease: lease_from(sent, LEASE),
            attachment: Attachment::new(sent, Duration::ZERO),
            fresh: true,
        };
        Hold::new(&usage, grant)
    }

    #[tokio::test(start_paused = true)]
    async fn lost_is_told_at_the_end_of_the_validity_and_not_before() {
        let start = Instant::now();
        let hold = hold(start, true, None);
        assert_eq!(hold.until_lost().await, LostReason::Expired);
        // The timer counts in whole milliseconds.
        let told = start.elapsed();
        assert!(
            told >= VALID && told <= VALID + Duration::from_millis(1),
            "{told:?}"
        );
        assert_eq!(hold.valid_for(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_confirmed_renewal_puts_the_loss_off() {
        let start = Instant::now();
        let hold = hold(start, true, None);
        let waiting = tokio::spawn({
            let hold = Arc::clone(&hold);
            async move { hold.until_lost().await }
        });
        sleep_until(after(start, 5_000)).await;
        assert_eq!(hold.renewed(true, &renewal(Instant::now())), Ok(()));
        sleep_until(after(start, 14_000)).await;
        assert!(!waiting.is_finished());
        assert_eq!(waiting.await.expect("no panic"), LostReason::Expired);
        assert!(start.elapsed() >= VALID + Duration::from_secs(5));
    }

    #[test]
    fn without_an_acknowledgement_the_session_is_confirmed_and_the_lease_ends_as_before() {
        let sent = Instant::now();
        let grace = Duration::from_secs(4);
        let mut validity = Validity::new(lease_from(sent, LEASE), Attachment::new(sent, grace));
        let unacknowledged = Renewal {
            attachment: Some(Attachment::new(after(sent, 8_000), grace)),
            acknowledged: false,
            ..renewal(after(sent, 9_000))
        };
        validity.confirm(&unacknowledged);
        assert_eq!(validity.lost(after(sent, 9_897)), None);
        let reason = validity.lost(after(sent, 9_898));
        assert_eq!(reason, Some(LostReason::NotAcknowledged));
        // An acknowledgement that comes late, of a renewal sent before, still counts.
        validity.extend(&renewal(after(sent, 1_000)), None);
        assert_eq!(validity.lost(after(sent, 10_897)), None);
        let reason = validity.lost(after(sent, 10_898));
        assert_eq!(reason, Some(LostReason::Expired));
    }

    #[test]
    fn a_hold_entered_again_counts_on_the_new_lease_once_it_is_acknowledged() {
        let start = Instant::now();
        let (first, again) = (
            hold(start, false, None),
            hold(after(start, 5_000), false, None),
        );
        assert!(first.take_over(&again, false));
        let end = locked(&first.validity).end();
        assert_eq!(end, start.checked_add(VALID).expect("a moment soon"));
        // It is renewed up to the end of the new one.
        let left = first.lease_kept(after(start, 6_000));
        assert_eq!(left, Duration::from_secs(9));
        assert!(first.take_over(&again, true));
        let end = locked(&first.validity).end();
        assert_eq!(end, after(start, 5_000).checked_add(VALID).expect("soon"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_servers_no_is_told_at_once() {
        let hold = hold(Instant::now(), true, None);
        let renewal = renewal(Instant::now());
        assert_eq!(hold.renewed(false, &renewal), Err(LostReason::NotHeld));
        assert_eq!(hold.until_lost().await, LostReason::NotHeld);
        assert_eq!(hold.renewed(true, &renewal), Err(LostReason::NotHeld));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_has_been_told_of_a_loss_is_not_contradicted() {
        let start = Instant::now();
        let hold = hold(start, true, None);
        hold.until_lost().await;
        assert_eq!(
            hold.renewed(true, &renewal(after(start, 9_000))),
            Err(LostReason::Expired)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_hold_shortens_the_last_lease_and_gives_the_reason() {
        let start = Instant::now();
        let hold = hold(start, true, Some(Duration::from_secs(15)));
        assert_eq!(hold.lease_anew(start), LEASE);
        sleep_until(after(start, 9_000)).await;
        let lease = hold.lease_anew(Instant::now());
        assert_eq!(lease, Duration::from_secs(6));
        let renewal = Renewal {
            lease: lease_from(Instant::now(), lease),
            attachment: None,
            acknowledged: true,
        };
        assert_eq!(hold.renewed(true, &renewal), Ok(()));
        assert_eq!(hold.terms_left().max_hold, Some(lease));
        assert_eq!(hold.until_lost().await, LostReason::MaxHold);
        assert!(start.elapsed() <= Duration::from_secs(15));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_was_asked_for_longer_does_not_outlast_the_longest_hold() {
        let start = Instant::now();
        let hold = hold(start, true, Some(Duration::from_secs(15)));
        assert_eq!(hold.renewed(true, &renewal(after(start, 9_000))), Ok(()));
        assert_eq!(hold.valid_for(), Duration::from_millis(14_998));
        assert_eq!(hold.until_lost().await, LostReason::MaxHold);
    }

    #[test]
    fn a_lease_of_its_own_is_confirmed_but_not_made_longer() {
        let start = Instant::now();
        let hold = hold(start, false, None);
        assert_eq!(hold.lease_kept(after(start, 4_000)), Duration::from_secs(6));
        assert_eq!(hold.lease_anew(after(start, 4_000)), LEASE);
    }
}
