//! One hold: its token, and how long it may be called held.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::error::{Error, LostReason};
use crate::locks::Wanted;
use crate::time::{MILLI, drift, part, up_to_whole_millis, whole_millis};
use crate::wire::{Sending, Session, Target, Tied};
use crate::{locked, metrics, trace};

/// The terms of a hold, as its first guard has settled them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HoldOptions {
    pub(crate) lease: Duration,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    pub(crate) max_hold: Option<Duration>,
}

/// One hold of one owner, shared by all its guards.
pub(crate) struct Hold {
    pub(crate) target: Target,
    pub(crate) token: u64,
    pub(crate) options: HoldOptions,
    /// When it was asked for.
    begun: Instant,
    /// When it ends at the latest, however often it is renewed.
    cap: Option<Instant>,
    validity: Mutex<Validity>,
    /// Why it is lost, once it is.
    lost: OnceLock<LostReason>,
    /// The server has said so, and there is nothing to be released.
    is_gone: AtomicBool,
    /// Its renewal was refused for want of a session, and is sent again when one answers.
    pub(super) was_refused: AtomicBool,
    /// Tells those who wait for its end that this has moved.
    pub(crate) changed: Notify,
    /// Whether another owner waits for the lock.
    pub(crate) wanted: Wanted,
    /// How many guards have it: changed under the lock of the table.
    guards: AtomicUsize,
    /// Held by who renews it, until that is answered: one command at a time.
    renewing: OnceLock<Arc<tokio::sync::Mutex<()>>>,
    span: trace::Span,
}

impl Hold {
    /// A hold with one guard. Where grants must be acknowledged, its lease counts all the same:
    /// nobody hears of it before.
    pub(crate) fn new(target: Target, options: HoldOptions, token: u64, by: Sending) -> Arc<Self> {
        let begun = by.at;
        let cap = options.max_hold.and_then(|max| begun.checked_add(max));
        let (ends, until) = bounds(begun, options.lease, cap);
        let span = trace::hold(target.shown(), &target.owner, target.mode, token);
        Arc::new(Self {
            token,
            options,
            begun,
            cap,
            validity: Mutex::new(Validity {
                ends,
                until,
                by,
                or_by: SmallVec::new(),
                is_unacknowledged: false,
                is_fixed: false,
                is_asked_again: false,
            }),
            lost: OnceLock::new(),
            is_gone: AtomicBool::new(false),
            was_refused: AtomicBool::new(false),
            changed: Notify::new(),
            // The ACQUIRE of a kept lock asks for WANTED already.
            wanted: Wanted::new(target.owner.is_kept),
            guards: AtomicUsize::new(1),
            renewing: OnceLock::new(),
            span,
            target,
        })
    }

    /// One more guard has it.
    pub(crate) fn gains_guard(&self) {
        self.guards.fetch_add(1, Ordering::Relaxed);
    }

    /// One of its guards gives it back.
    pub(crate) fn loses_guard(&self) {
        if self.guards.fetch_sub(1, Ordering::Relaxed) == 1 {
            metrics::held(self.begun);
        }
    }

    pub(crate) fn has_guards(&self) -> bool {
        self.guards.load(Ordering::Relaxed) > 0
    }

    /// How long it may still be called held; zero once lost.
    pub(crate) fn valid_for(&self, now: Instant) -> Duration {
        match self.lost(now) {
            None => self.end().saturating_duration_since(now),
            Some(_) => Duration::ZERO,
        }
    }

    /// Whether half is left of a lease of its own, and of the longest that it may be held.
    pub(crate) fn leaves_half(&self, now: Instant) -> bool {
        let is_half =
            |end: Instant, of: Duration| end.saturating_duration_since(now) >= part(of, 2);
        let cap = self.cap.zip(self.options.max_hold);
        let lease = self.options.renewed || is_half(self.lease_end(), self.options.lease);
        lease && cap.is_none_or(|(cap, longest)| is_half(cap, longest))
    }

    /// How long the server keeps it if nothing more is asked.
    pub(crate) fn lease_left(&self, now: Instant) -> Duration {
        self.lease_end().saturating_duration_since(now)
    }

    /// The end of the lease, if the server's clock runs like ours.
    fn lease_end(&self) -> Instant {
        locked(&self.validity).ends
    }

    /// When it is lost unless something more is heard.
    pub(crate) fn end(&self) -> Instant {
        let validity = locked(&self.validity);
        let by = validity.by.confidence.until();
        let others = validity.or_by.iter().filter_map(Sending::until);
        by.into_iter()
            .chain(others)
            .fold(validity.until, Instant::min)
    }

    /// The reason of the loss, if the hold is lost. It is marked as lost then, as the caller acts
    /// on that: a renewal that another thread hears a moment later must not make it valid again.
    pub(crate) fn lost(&self, now: Instant) -> Option<LostReason> {
        if self.lost.get().is_none() && now >= self.end() {
            self.mark_lost(self.reason(now));
        }
        self.lost.get().copied()
    }

    /// Why it ends where it does.
    fn reason(&self, now: Instant) -> LostReason {
        let slack = MILLI.saturating_add(MILLI);
        let ends = self.lease_end().checked_add(slack);
        let is_capped = |cap| ends.is_none_or(|ends| ends >= cap);
        if now < locked(&self.validity).until {
            LostReason::SessionUnconfirmed
        } else if self.cap.is_some_and(is_capped) {
            LostReason::MaxHold
        } else if locked(&self.validity).is_unacknowledged {
            LostReason::NotAcknowledged
        } else {
            LostReason::Expired
        }
    }

    /// The first reason stands.
    fn mark_lost(&self, reason: LostReason) {
        if self.lost.set(reason).is_err() {
            return;
        }
        // A task that waits for the loss has a timer, which a renewal may have put off just before.
        self.changed.notify_waiters();
        // A loss after the last guard is not reported.
        if self.has_guards() {
            self.span.lost(reason);
            metrics::lost(reason);
        }
    }

    /// The server has said that it is lost. The reason that counts: if its own time is over, that,
    /// though nobody has looked.
    pub(crate) fn mark_gone(&self, reason: LostReason) -> LostReason {
        let reason = self.lost(Instant::now()).unwrap_or_else(|| {
            self.mark_lost(reason);
            self.lost.get().copied().unwrap_or(reason)
        });
        // The flag comes last: another thread that sees it looks for the reason.
        self.is_gone.store(true, Ordering::Release);
        reason
    }

    /// Whether the server has nothing of it any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// The session by whose word it is held.
    pub(crate) fn session(&self) -> Arc<Session> {
        Arc::clone(&locked(&self.validity).by.session)
    }

    /// The turn to renew it. Most holds are given back before they are renewed, and have none.
    pub(super) fn turn(&self) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(self.renewing.get_or_init(Arc::default))
    }

    /// Whether it is held by the word of this session, or may be.
    pub(crate) fn is_of(&self, session: &Arc<Session>) -> bool {
        let validity = locked(&self.validity);
        let mut all = std::iter::once(&validity.by).chain(&validity.or_by);
        all.any(|sending| Arc::ptr_eq(&sending.session, session))
    }

    /// Whether the sessions by whose word it is held, or may be, are connected, and would hear of
    /// its loss.
    pub(crate) fn is_watched(&self) -> bool {
        let validity = locked(&self.validity);
        validity.by.is_watched() && validity.or_by.iter().all(Sending::is_watched)
    }

    /// Whether the session has begun anew since this was confirmed.
    pub(crate) fn is_of_former_life(&self) -> bool {
        locked(&self.validity).by.is_of_former_life()
    }

    /// As much of the whole lease as the longest hold allows.
    pub(crate) fn lease_anew(&self, now: Instant) -> Duration {
        let left = self.cap.map(|cap| cap.saturating_duration_since(now));
        let lease = left.map_or(self.options.lease, |left| self.options.lease.min(left));
        whole_millis(lease).max(MILLI)
    }

    /// The lease for a renewal: the whole lease, or if none begins with it, the rest of the one
    /// that the caller has set. That is rounded up: cut to whole milliseconds, the lease would get
    /// shorter with each renewal, and end before the guard says so.
    pub(crate) fn lease_to_ask(&self, begins_anew: bool, now: Instant) -> Duration {
        if begins_anew {
            return self.lease_anew(now);
        }
        up_to_whole_millis(self.lease_left(now)).max(MILLI)
    }

    /// The options for what takes its place: it ends no later.
    pub(crate) fn options_left(&self, now: Instant) -> HoldOptions {
        let left = |cap: Instant| cap.saturating_duration_since(now);
        HoldOptions {
            lease: self.lease_anew(now),
            max_hold: self.cap.map(left).map(whole_millis),
            ..self.options
        }
    }

    /// Waits until this looks at something; it looks at each change, and again when it says.
    pub(super) async fn until<T>(&self, look: impl Fn() -> Result<T, Instant>) -> T {
        loop {
            // Listens before it looks: what changes in between is heard.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let next = match look() {
                Ok(found) => return found,
                Err(next) => next,
            };
            let _ = timeout_at(next, changed).await;
        }
    }

    /// The server has said yes to a renewal: whether it is still held, or why not. A hold once lost
    /// stays lost: somebody may have acted on it.
    ///
    /// The lease that `begins` with it counts if enough replicas or disks have it, or none must.
    /// `acknowledged` is `None` if they must, and were not asked: the server says that it is held
    /// by this session, and no more.
    pub(crate) fn renewed(
        &self,
        begins: Option<Duration>,
        by: Sending,
        acknowledged: Option<&Result<(), Error>>,
        now: Instant,
    ) -> Result<(), LostReason> {
        if let Some(reason) = self.lost(now) {
            return Err(reason);
        }
        let mut validity = locked(&self.validity);
        if let Some(acknowledged) = acknowledged {
            validity.is_unacknowledged = acknowledged.is_err();
        }
        let since = by.at;
        let begins = begins.filter(|_| matches!(acknowledged, Some(Ok(()))));
        if let Some(length) = begins.filter(|_| !validity.is_fixed) {
            let (ends, until) = bounds(since, length, self.cap);
            // A late reply does not shorten the validity.
            if until > validity.until {
                (validity.ends, validity.until) = (ends, until);
            }
        }
        // The renewal that was sent last says which node confirms the hold: after a move the former
        // node must not count any more.
        if since >= validity.by.at {
            validity.by = by.at_present();
            validity.or_by.clear();
        }
        Ok(())
    }

    /// A renewal that leaves the lease its end was given up, and may arrive yet. It would give that
    /// end to a lease which has begun anew by then, so none does.
    pub(super) fn may_be_cut(&self) {
        locked(&self.validity).is_fixed = true;
    }

    pub(super) fn is_fixed(&self) -> bool {
        locked(&self.validity).is_fixed
    }

    /// Sets whether another renewal is asked for behind the one under way. Returns whether one was.
    pub(super) fn ask_again(&self, is_asked_again: bool) -> bool {
        std::mem::replace(&mut locked(&self.validity).is_asked_again, is_asked_again)
    }
}

impl Tied for Hold {
    fn may_be_tied(&self, sending: &Sending) {
        let mut validity = locked(&self.validity);
        let is_known = |known: &Sending| Arc::ptr_eq(&known.confidence, &sending.confidence);
        if !is_known(&validity.by) && !validity.or_by.iter().any(is_known) {
            validity.or_by.push(sending.clone());
            drop(validity);
            // It may end earlier than those who wait for that have seen.
            self.changed.notify_waiters();
        }
    }
}

/// Until when a hold may be called held. Time is an argument.
#[derive(Debug)]
struct Validity {
    /// The end of the lease that ends last, and that of our confidence in it.
    ends: Instant,
    until: Instant,
    /// By whose word it is held, and since when that is confirmed.
    by: Sending,
    /// The renewals that were sent to other sessions since, until one is answered with yes. The
    /// server may have carried out any of them, and then ends the hold with that session. Without
    /// these a guard counted on the node that its slot had left: the test is
    /// `client_moves::an_unanswered_renewal_at_the_new_node_makes_no_second_owner`.
    or_by: SmallVec<[Sending; 1]>,
    /// Whether the last renewal that was to be acknowledged was not.
    is_unacknowledged: bool,
    /// Whether a lease that begins anew does not count.
    is_fixed: bool,
    /// Whether another renewal was asked for since the last one was sent.
    is_asked_again: bool,
}

/// The end of a lease, if the server's clock runs like ours, and that of our confidence in it;
/// neither is later than that of the longest hold. `since` is when the command that asked for it
/// was sent: the server starts the lease when it arrives, so not before; and its clock may run
/// faster than ours by as much as the drift.
fn bounds(since: Instant, lease: Duration, cap: Option<Instant>) -> (Instant, Instant) {
    let after = |time| since.checked_add(time).unwrap_or(since);
    let (ends, until) = (after(lease), after(lease.saturating_sub(drift(lease))));
    let cap_until = cap.and_then(|cap| cap.checked_sub(drift(Duration::ZERO)));
    let earlier = |one: Instant, cap: Option<Instant>| cap.map_or(one, |cap| cap.min(one));
    (earlier(ends, cap), earlier(until, cap_until))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Owner;
    use crate::wire::session::tests::session;
    use crate::wire::{Confidence, Mode};

    const LEASE: Duration = Duration::from_secs(1);
    const GRACE: Duration = Duration::from_secs(5);

    fn by(at: Instant, grace: Duration) -> Sending {
        Sending {
            at,
            again: false,
            asking: false,
            session: session(grace),
            confidence: Confidence::new(1, at, grace),
        }
    }

    pub(crate) fn hold(since: Instant, grace: Duration, max_hold: Option<Duration>) -> Arc<Hold> {
        hold_of(since, grace, max_hold, true)
    }

    fn hold_of(
        since: Instant,
        grace: Duration,
        max_hold: Option<Duration>,
        renewed: bool,
    ) -> Arc<Hold> {
        let target = Target {
            name: Arc::from(*b"name"),
            owner: Owner::new("client", 1),
            mode: Mode::Plain,
        };
        let options = HoldOptions {
            lease: LEASE,
            renewed,
            max_hold,
        };
        Hold::new(target, options, 7, by(since, grace))
    }

    fn after(start: Instant, ms: u64) -> Instant {
        start
            .checked_add(Duration::from_millis(ms))
            .expect("a moment soon")
    }

    fn renew(
        hold: &Hold,
        sent: Instant,
        acknowledged: &Result<(), Error>,
        now: Instant,
    ) -> Result<(), LostReason> {
        hold.renewed(Some(LEASE), by(sent, GRACE), Some(acknowledged), now)
    }

    #[test]
    fn what_takes_its_place_ends_no_later() {
        let start = Instant::now();
        let left = |max_hold, ms| {
            let options = hold(start, GRACE, max_hold).options_left(after(start, ms));
            (options.lease, options.max_hold)
        };
        let max_hold = Duration::from_millis(1500);
        assert_eq!(left(None, 1000), (LEASE, None));
        assert_eq!(left(Some(max_hold), 0), (LEASE, Some(max_hold)));
        let half = Duration::from_millis(500);
        assert_eq!(left(Some(max_hold), 1000), (half, Some(half)));
    }

    #[test]
    fn it_is_held_from_the_sending_for_the_lease_less_the_drift() {
        let start = Instant::now();
        let hold = hold(start, GRACE, None);
        assert_eq!(hold.valid_for(start), Duration::from_millis(988));
        assert_eq!(hold.lost(after(start, 987)), None);
        assert_eq!(hold.lost(after(start, 988)), Some(LostReason::Expired));
    }

    #[test]
    fn a_renewal_counts_from_its_sending_and_brings_nothing_back() {
        let start = Instant::now();
        let renewed = hold(start, GRACE, None);
        let told = renew(&renewed, after(start, 500), &Ok(()), after(start, 900));
        assert_eq!(told, Ok(()));
        assert_eq!(renewed.end(), after(start, 1_488));
        let late = hold(start, GRACE, None);
        let told = renew(&late, after(start, 500), &Ok(()), after(start, 988));
        assert_eq!(told, Err(LostReason::Expired));
        assert!(late.lost(after(start, 989)).is_some() && !late.is_gone());
        // Once it has been found over, a renewal whose answer is heard after that changes nothing.
        let over = hold(start, GRACE, None);
        assert!(over.lost(over.end()).is_some());
        let told = renew(&over, after(start, 500), &Ok(()), after(start, 900));
        assert_eq!(told, Err(LostReason::Expired));
        assert!(over.lost(after(start, 900)).is_some());
    }

    /// For another life of the session, another node, or to hear who wants it: however often, and
    /// also if the rest of it is rounded up each time.
    #[test]
    fn such_renewals_leave_a_lease_of_its_own_its_end() {
        let start = Instant::now();
        let own = hold_of(start, GRACE, None, false);
        let (end, mut now) = (own.end(), start);
        for _ in 0..500 {
            now = now
                .checked_add(Duration::from_micros(300))
                .expect("a moment soon");
            let left = own.lease_to_ask(false, now);
            assert!(now.checked_add(left) >= Some(after(start, 1_000)));
            let told = own.renewed(None, by(now, GRACE), Some(&Ok(())), now);
            assert_eq!((told, own.end()), (Ok(()), end));
        }
    }

    /// It may arrive yet, and cuts a lease that has begun anew by then.
    #[test]
    fn after_a_renewal_was_given_up_that_leaves_the_end_no_lease_begins_anew() {
        let start = Instant::now();
        let own = hold_of(start, GRACE, None, false);
        let end = own.end();
        own.may_be_cut();
        let told = renew(&own, after(start, 500), &Ok(()), after(start, 600));
        assert_eq!((told, own.end()), (Ok(()), end));
    }

    #[test]
    fn a_kept_lock_is_handed_on_with_half_of_its_own_lease_and_of_its_longest_hold() {
        let start = Instant::now();
        let leaves = |hold: &Hold, ms| hold.leaves_half(after(start, ms));
        let own = hold_of(start, GRACE, None, false);
        assert!(leaves(&own, 500) && !leaves(&own, 501));
        let renewed = hold(start, GRACE, None);
        assert!(leaves(&renewed, 900));
        let capped = hold(start, GRACE, Some(LEASE));
        assert!(leaves(&capped, 500) && !leaves(&capped, 501));
    }

    #[test]
    fn word_of_a_loss_after_its_own_end_does_not_change_the_reason() {
        let now = Instant::now();
        let start = now.checked_sub(LEASE).expect("a moment ago");
        let capped = hold(start, GRACE, Some(LEASE));
        capped.mark_gone(LostReason::Expired);
        assert_eq!(capped.lost(now), Some(LostReason::MaxHold));
        assert!(capped.is_gone());
    }

    #[test]
    fn a_renewal_without_an_answer_ties_it_to_the_session_that_may_have_it() {
        let start = Instant::now();
        let short = Duration::from_millis(500);
        let tied = hold(start, GRACE, None);
        tied.may_be_tied(&by(start, short));
        assert_eq!(tied.end(), after(start, 493));
        // However little was heard of that session before: it was there when it carried this out.
        let late = Sending {
            at: after(start, 400),
            ..by(start, short)
        };
        let tied = hold(start, GRACE, None);
        tied.may_be_tied(&late);
        assert_eq!(tied.end(), after(start, 893));
        assert!(tied.is_of(&late.session));
        // The yes to a renewal ties it to one session.
        let told = renew(&tied, after(start, 500), &Ok(()), after(start, 600));
        assert_eq!((told, tied.end()), (Ok(()), after(start, 1_488)));
        assert!(!tied.is_of(&late.session));
    }

    #[test]
    fn without_the_session_and_beyond_the_longest_hold_it_is_lost() {
        let start = Instant::now();
        let short = Duration::from_millis(100);
        let reason = hold(start, short, None).lost(after(start, 97));
        assert_eq!(reason, Some(LostReason::SessionUnconfirmed));
        let capped = hold(start, GRACE, Some(short));
        assert_eq!(
            capped.lease_anew(after(start, 40)),
            Duration::from_millis(60)
        );
        let told = renew(&capped, after(start, 50), &Ok(()), after(start, 60));
        assert_eq!(told, Ok(()));
        assert_eq!(capped.lost(after(start, 98)), Some(LostReason::MaxHold));
    }

    #[test]
    fn what_is_not_acknowledged_ends_as_before() {
        let start = Instant::now();
        let hold = hold(start, GRACE, None);
        let refused = Err(Error::refused("too few"));
        let told = renew(&hold, after(start, 500), &refused, after(start, 600));
        assert_eq!(told, Ok(()));
        assert_eq!(
            hold.lost(after(start, 988)),
            Some(LostReason::NotAcknowledged)
        );
    }
}
