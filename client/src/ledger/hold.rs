//! What is known about one hold: its token, and until when it may be called held.

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;

use crate::ledger::{Entry, HoldOptions, Reserved, Side, State, Target, Usage, Wanted};
use crate::wire::{Attachment, Mode};
use crate::{
    Error, Lease, LostReason, MILLI, drift, metrics, part, trace, valid_until, whole_millis,
};

/// One hold of one owner, shared by all its guards, which read it without a lock. A hold of several
/// locks is lost with any.
pub(crate) struct Hold {
    pub(crate) target: Arc<Target>,
    pub(crate) token: u64,
    /// Of several locks the token of each at the server, in the order of the names: one that was
    /// entered again has kept an earlier one.
    kept_tokens: OnceLock<Box<[u64]>>,
    pub(crate) options: HoldOptions,
    /// When it was asked for.
    begun: Instant,
    /// When it ends at the latest, however often it is renewed.
    cap: Option<Instant>,
    /// What it was granted with.
    first: Validity,
    /// What has come of that since, if anything: most holds are given back before. Replaced as a
    /// whole, so that who reads it waits for nobody.
    latest: OnceLock<ArcSwap<Validity>>,
    /// Why it is lost, once it is.
    lost: OnceLock<LostReason>,
    /// Tells those who wait for its end that this has moved.
    pub(crate) changed: Notify,
    /// Whether somebody waits whom it keeps out.
    pub(crate) wanted: Wanted,
    /// How many guards have it. Whoever renews it or asks about it may keep it for longer.
    guards: AtomicUsize,
    /// Held by who renews it and waits for the answer. Renewals go by two connections where grants
    /// must be acknowledged, so that one could overtake another that asked for less.
    pub(crate) renewing: Mutex<()>,
    span: trace::Span,
}

/// What the server said to a renewal.
#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    pub(crate) held: bool,
    pub(crate) lease: Lease,
    /// What the session was attached by before it was sent; `None` if by nothing: then the hold
    /// still counts on what it was confirmed under before.
    pub(crate) attachment: Option<Arc<Attachment>>,
    /// Whether enough replicas or disks have it, or none must: then the lease counts. `None` if
    /// they must, and were not asked: the server says that it is held by this session, and no more.
    pub(crate) acknowledged: Option<Result<(), Error>>,
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

impl Grant {
    pub(crate) fn new(token: u64, lease: Lease, attachment: Arc<Attachment>, fresh: bool) -> Self {
        Self {
            token,
            lease,
            attachment,
            fresh,
        }
    }
}

impl Hold {
    /// Makes a grant the hold of one more guard: one that is there already and has its token, or a
    /// new one. Whether it is new.
    ///
    /// What the owner was granted earlier of a fresh one is over, but for a writer who now reads
    /// too. Of holds that the server tells apart by their tokens it says so itself.
    ///
    /// Where grants must be `acknowledged`, see [`take_over`](Self::take_over).
    pub(crate) fn enter(
        usage: &mut Usage,
        grant: Grant,
        acknowledged: bool,
        now: Instant,
    ) -> (Arc<Self>, bool) {
        let target = Arc::clone(&usage.target);
        let fresh = grant.fresh;
        let granted = Self::new(usage, grant);
        // What was held before is dropped only when the ledger's lock is free again.
        let (before, hold, has_lost) = target.ledger.with(|state| {
            let before = target.held(state);
            let has_lost = granted.shows_a_loss(state, &before, now);
            // If a RELEASE may have taken an entry of it, one that is left is another guard's.
            if !fresh && !usage.is_in_doubt(state) {
                granted.keep_tokens_in(state, now);
            }
            // One that is only being given back has settled nothing for this one.
            let is_shared = target.is_shared(state);
            usage.settle(state);
            let mut shared = before.iter().rev().filter(|_| is_shared);
            let shared = shared.find(|hold| hold.take_over(&granted, acknowledged, now));
            if shared.is_none() {
                state.each_entry(&target.entries, |entry| entry.add(&granted));
            }
            let hold = Arc::clone(shared.unwrap_or(&granted));
            // Told ahead of the answer that brings the grant.
            if target.owner.is_kept() {
                state.each_entry(&target.entries, |entry| {
                    hold.wanted.tell(mem::take(&mut entry.wanted));
                });
            }
            hold.guards.fetch_add(1, Ordering::Relaxed);
            (before, hold, has_lost)
        });
        let may_be_lost = fresh || has_lost;
        for earlier in before
            .iter()
            .filter(|one| may_be_lost && one.is_superseded_by(&hold))
        {
            earlier.lose(LostReason::NotHeld);
        }
        let is_new = Arc::ptr_eq(&hold, &granted);
        if !is_new {
            hold.changed.notify_waiters();
        }
        (hold, is_new)
    }

    /// Notes which tokens the locks have that were entered again, as far as is known.
    pub(crate) fn keep_tokens(&self, now: Instant) {
        // What is held is dropped when the ledger's lock is free again.
        let _held = self.target.ledger.with(|state| {
            let held = self.target.held(state);
            self.keep_tokens_in(state, now);
            held
        });
    }

    fn keep_tokens_in(&self, state: &State, now: Instant) {
        if self.target.mode != Mode::Several {
            return;
        }
        let entries = state.entries(&self.target.entries);
        let tokens = self.target.names.iter().zip(entries).map(|(name, entry)| {
            let live = entry.held().filter(|hold| !hold.is_over(now));
            let kept = live.map(|hold| hold.token_at(name)).min();
            // Of what was granted later, when this one was over, it has no entry.
            kept.map_or(self.token, |kept| kept.min(self.token))
        });
        // Nobody else sets it.
        let _ = self.kept_tokens.set(tokens.collect());
    }

    /// Whether its owner, who writes, has a newer hold, of which the server does not tell it apart:
    /// that was granted when this one was over there already, or entered it. It may have been heard
    /// of, and be asked about before it is given to anybody.
    pub(crate) fn is_overtaken(&self) -> bool {
        let is_newer = |side: &Side| side.last_token > self.token;
        self.target.any_side(is_newer)
    }

    /// Whether it has an entry of each of its locks, with whatever token.
    pub(crate) fn is_whole(&self) -> bool {
        self.kept_tokens.get().is_some()
    }

    /// The token of one of its locks, as far as is known.
    pub(crate) fn token_at(&self, name: &[u8]) -> u64 {
        let mut names = self.target.names.iter();
        let place = names.position(|one| **one == *name);
        let kept = self.kept_tokens.get().zip(place);
        let kept = kept.and_then(|(tokens, place)| tokens.get(place));
        kept.copied().unwrap_or(self.token)
    }

    /// Whether this grant of several locks shows that one of them was lost: each had a guard, and
    /// yet one was granted anew, for the token is new. Which of them nobody says. A RELEASE that
    /// takes back what is `before` it names no token, and would take this.
    fn shows_a_loss(&self, state: &State, before: &[Arc<Self>], now: Instant) -> bool {
        let has_guard = |entry: &Entry| {
            let mut held = entry.held();
            entry.side(Mode::Several).guards > 0 && held.any(|hold| !hold.is_over(now))
        };
        self.target.mode == Mode::Several
            && before.iter().all(|hold| hold.token < self.token)
            && state.entries(&self.target.entries).all(has_guard)
    }

    fn is_superseded_by(&self, granted: &Self) -> bool {
        let (mode, granted_mode) = (self.target.mode, granted.target.mode);
        let beside = (mode, granted_mode) == (Mode::Write, Mode::Read);
        !beside && !mode.has_token() && self.token < granted.token
    }

    /// One of which the ledger does not know.
    pub(crate) fn new(usage: &Usage, grant: Grant) -> Arc<Self> {
        let options = usage.options;
        let begun = grant.lease.since;
        let cap = options.max_hold.and_then(|max| begun.checked_add(max));
        let first = Validity::new(grant.lease, grant.attachment).within(cap);
        let target = &usage.target;
        Arc::new(Self {
            target: Arc::clone(target),
            token: grant.token,
            kept_tokens: OnceLock::new(),
            options,
            begun,
            cap,
            first,
            latest: OnceLock::new(),
            lost: OnceLock::new(),
            changed: Notify::new(),
            // What is kept has asked with its ACQUIRE.
            wanted: Wanted::new(target.owner.is_kept()),
            guards: AtomicUsize::new(0),
            renewing: Mutex::default(),
            span: trace::hold(target, &target.owner, target.mode, grant.token),
        })
    }

    /// One of its guards gives it back.
    pub(crate) fn loses_guard(&self) {
        if self.guards.fetch_sub(1, Ordering::Relaxed) == 1 {
            metrics::held(self.begun);
        }
    }

    /// Whether guards have it.
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
        let lease_end = self.lease_end();
        let lease = self.options.renewed || is_half(lease_end, self.options.lease);
        lease && cap.is_none_or(|(cap, longest)| is_half(cap, longest))
    }

    /// How long the server keeps it if nothing more is asked.
    pub(crate) fn lease_left(&self, now: Instant) -> Duration {
        self.lease_end().saturating_duration_since(now)
    }

    fn lease_end(&self) -> Instant {
        self.validity(|validity| validity.ends)
    }

    fn validity<T>(&self, read: impl FnOnce(&Validity) -> T) -> T {
        match self.latest.get() {
            Some(latest) => read(&latest.load()),
            None => read(&self.first),
        }
    }

    fn set_validity(&self, change: impl Fn(&mut Validity)) {
        let first = || ArcSwap::from_pointee(self.first.clone());
        self.latest.get_or_init(first).rcu(|latest| {
            let mut next = Validity::clone(latest);
            change(&mut next);
            next
        });
    }

    /// When it is lost unless something more is heard.
    pub(crate) fn end(&self) -> Instant {
        self.validity(|validity| {
            let session = validity.attachment.until();
            session.map_or(validity.until, |session| session.min(validity.until))
        })
    }

    /// Why it is lost, if it is. Whoever has been told stays told, whatever is confirmed later.
    pub(crate) fn lost(&self, now: Instant) -> Option<LostReason> {
        if self.lost.get().is_none() && now >= self.end() {
            self.lose(self.reason(now));
        }
        self.lost.get().copied()
    }

    /// Whether it is lost, without saying so: under the ledger's lock nobody may be told, for
    /// whoever hears of it may drop a guard, and that takes the lock.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.lost.get().is_some() || now >= self.end()
    }

    /// Why it ends where it does.
    fn reason(&self, now: Instant) -> LostReason {
        let Validity {
            ends,
            until,
            is_unacknowledged,
            ..
        } = self.validity(Validity::clone);
        let slack = MILLI.saturating_add(MILLI);
        let ends = ends.checked_add(slack);
        let is_capped = |cap| ends.is_none_or(|ends| ends >= cap);
        if now < until {
            LostReason::SessionUnconfirmed
        } else if self.cap.is_some_and(is_capped) {
            LostReason::MaxHold
        } else if is_unacknowledged {
            LostReason::NotAcknowledged
        } else {
            LostReason::Expired
        }
    }

    /// Says that it is lost. The first reason stands.
    pub(crate) fn lose(&self, reason: LostReason) {
        if self.lost.set(reason).is_ok() {
            self.changed.notify_waiters();
            // Of what is being given back nobody wants to know.
            if !self.target.guarded().is_empty() {
                self.span.lost(reason);
                metrics::lost(reason);
            }
        }
    }

    /// What it was last confirmed under.
    pub(crate) fn attachment(&self) -> Arc<Attachment> {
        self.validity(|validity| Arc::clone(&validity.attachment))
    }

    /// As much of the whole lease as the longest hold allows.
    pub(crate) fn lease_anew(&self, now: Instant) -> Duration {
        let left = self.cap.map(|cap| cap.saturating_duration_since(now));
        let lease = left.map_or(self.options.lease, |left| self.options.lease.min(left));
        whole_millis(lease).max(MILLI)
    }

    /// The whole lease, to be asked for now.
    pub(crate) fn anew(&self, now: Instant) -> Reserved {
        self.target.lease(self.lease_anew(now), now)
    }

    /// The lease with which it is renewed by itself, to be asked for now: the whole, or, if it was
    /// taken with a lease of its own, what is left of that.
    pub(crate) fn kept(&self, now: Instant) -> Reserved {
        if self.options.renewed {
            return self.anew(now);
        }
        let left = whole_millis(self.lease_left(now));
        self.target.lease(left.max(MILLI), now)
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

    /// Takes note of what the server said to a renewal: whether it is still held, or why not.
    pub(crate) fn renewed(&self, renewal: &Renewal, now: Instant) -> Result<(), LostReason> {
        if !renewal.held {
            self.lose(LostReason::NotHeld);
        }
        // A hold once lost stays lost: somebody may have acted on it.
        if let Some(reason) = self.lost(now) {
            return Err(reason);
        }
        self.confirm(renewal);
        self.changed.notify_waiters();
        Ok(())
    }

    fn confirm(&self, renewal: &Renewal) {
        self.set_validity(|present| {
            let attachment = renewal.attachment.as_ref().unwrap_or(&present.attachment);
            let mut renewed = Validity::new(renewal.lease, Arc::clone(attachment)).within(self.cap);
            // Where nobody was asked, the lease ends for the same reason as before.
            if let Some(acknowledged) = &renewal.acknowledged {
                present.is_unacknowledged = acknowledged.is_err();
            }
            if !matches!(renewal.acknowledged, Some(Ok(()))) {
                // The server's word alone: the session keeps the hold, and its lease ends as
                // before.
                (renewed.ends, renewed.until) = (present.ends, present.until);
            }
            present.join(renewed);
        });
    }

    /// Makes `granted` part of this hold, if it is the same one entered again and not yet lost.
    /// Where grants must be `acknowledged`, its lease does not count before it is.
    fn take_over(&self, granted: &Self, acknowledged: bool, now: Instant) -> bool {
        let is_same = self.token == granted.token && self.target.shares_with(&granted.target);
        if !is_same || self.is_over(now) {
            return false;
        }
        let again = granted.validity(Validity::clone).within(self.cap);
        self.set_validity(|present| {
            let mut again = again.clone();
            if !acknowledged {
                again.until = present.until;
            }
            present.join(again);
        });
        true
    }

    /// Whether it is this hold that the server means when it says that its owner holds it: it knows
    /// it by its token; or no guard of the owner has another there that is not lost. None while a
    /// command is under way that may become one, or end one. A reader and a writer are told apart
    /// in any case.
    pub(crate) fn is_meant(self: &Arc<Self>, now: Instant) -> Option<bool> {
        let (target, mode) = (&self.target, self.target.mode);
        if mode.has_token() {
            return Some(true);
        }
        let look = |state: &mut State| (target.is_at_rest(state), target.held(state));
        let (at_rest, held) = target.ledger.with(look);
        let mut others = held.iter().filter(|other| !Arc::ptr_eq(other, self));
        let is_only = others.all(|other| {
            let beside = other.target.mode == Mode::Read && mode == Mode::Write;
            beside || !other.has_guards() || other.lost(now).is_some()
        });
        at_rest.then_some(is_only)
    }

    /// What is known before the server is asked about it.
    pub(crate) fn look(self: &Arc<Self>, now: Instant) -> Look {
        let (is_meant, number) = (self.is_meant(now), self.target.ledger.with(State::number));
        Look { is_meant, number }
    }

    /// Whether the server meant this hold when it was asked behind that look, and said yes. None if
    /// that cannot be told: what was granted in between may have gone again, be it that its release
    /// went out with the question, and is answered.
    pub(crate) fn was_meant(self: &Arc<Self>, before: &Look, now: Instant) -> Option<bool> {
        match (before.is_meant, self.is_meant(now)) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (Some(true), Some(true)) if !self.target.is_released_since(before.number) => Some(true),
            _ => None,
        }
    }
}

/// See [`Hold::look`].
pub(crate) struct Look {
    is_meant: Option<bool>,
    /// That of the question.
    pub(crate) number: u64,
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
    /// Whether the last renewal that was to be acknowledged was not.
    is_unacknowledged: bool,
}

impl Validity {
    fn new(lease: Lease, attachment: Arc<Attachment>) -> Self {
        Self {
            ends: lease.ends(),
            until: valid_until(lease),
            attachment,
            since: lease.since,
            is_unacknowledged: false,
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
pub(crate) mod tests {
    use super::*;
    use crate::ledger::entries::HOLDS_AT_ONCE;
    use crate::ledger::{Ledger, Owner};

    const LEASE: Duration = Duration::from_secs(10);
    const VALID: Duration = Duration::from_millis(9_898);
    const GRACE: Duration = Duration::from_secs(1);

    fn after(start: Instant, ms: u64) -> Instant {
        start
            .checked_add(Duration::from_millis(ms))
            .expect("a moment soon")
    }

    fn lease_from(since: Instant, length: Duration) -> Lease {
        Lease { since, length }
    }

    fn renewal(sent: Instant) -> Renewal {
        Renewal {
            held: true,
            lease: lease_from(sent, LEASE),
            attachment: None,
            acknowledged: Some(Ok(())),
        }
    }

    const OPTIONS: HoldOptions = HoldOptions {
        lease: LEASE,
        renewed: true,
        max_hold: None,
    };

    /// A plain hold under this attachment, which it was granted with a lease that was asked for
    /// then.
    fn granted(attachment: Arc<Attachment>, lease: Lease, options: HoldOptions) -> Arc<Hold> {
        let owner = Owner::new("client", 1);
        let target = owner.target(&Arc::default(), Mode::Plain, &[Arc::from(*b"name")]);
        let grant = Grant {
            token: 7,
            lease,
            attachment,
            fresh: true,
        };
        Hold::new(&target.claim(options), grant)
    }

    /// One whose session sets no end.
    pub(crate) fn hold(sent: Instant, options: HoldOptions) -> Arc<Hold> {
        let attachment = Attachment::new(None, sent, Duration::ZERO);
        granted(attachment, lease_from(sent, options.lease), options)
    }

    #[test]
    fn valid_from_the_sending_for_the_lease_less_the_drift() {
        let sent = Instant::now();
        let hold = hold(sent, OPTIONS);
        assert_eq!(hold.valid_for(sent), VALID);
        assert_eq!(hold.lost(after(sent, 9_897)), None);
        assert_eq!(hold.lost(after(sent, 9_898)), Some(LostReason::Expired));
        assert_eq!(
            hold.valid_for(sent),
            Duration::ZERO,
            "once lost it stays so"
        );
    }

    #[test]
    fn a_renewal_counts_from_its_sending_not_from_its_reply() {
        let sent = Instant::now();
        let hold = hold(sent, OPTIONS);
        let told = hold.renewed(&renewal(after(sent, 3_000)), after(sent, 5_000));
        assert_eq!(told, Ok(()));
        let left = VALID.saturating_sub(LEASE / 5);
        assert_eq!(hold.valid_for(after(sent, 5_000)), left);
    }

    #[test]
    fn a_reply_that_comes_out_of_order_does_not_shorten() {
        let sent = Instant::now();
        let hold = hold(after(sent, 1_000), OPTIONS);
        let told = hold.renewed(&renewal(sent), after(sent, 1_000));
        assert_eq!(told, Ok(()));
        assert_eq!(hold.valid_for(after(sent, 1_000)), VALID);
    }

    #[test]
    fn a_lease_no_longer_than_its_drift_is_never_valid() {
        let sent = Instant::now();
        let options = HoldOptions {
            lease: Duration::from_millis(2),
            ..OPTIONS
        };
        assert_eq!(hold(sent, options).lost(sent), Some(LostReason::Expired));
    }

    #[test]
    fn the_session_ends_it_when_that_comes_first() {
        let sent = Instant::now();
        let attachment = Attachment::new(None, sent, GRACE);
        let hold = || granted(Arc::clone(&attachment), lease_from(sent, LEASE), OPTIONS);
        let confirmed = hold();
        assert_eq!(confirmed.valid_for(sent), Duration::from_millis(988));
        let unconfirmed = hold().lost(after(sent, 988));
        assert_eq!(unconfirmed, Some(LostReason::SessionUnconfirmed));
        assert!(attachment.confirm(after(sent, 500), after(sent, 600)));
        assert_eq!(confirmed.lost(after(sent, 1_487)), None);
    }

    #[test]
    fn a_new_attachment_counts_only_once_the_hold_is_confirmed_under_it() {
        let sent = Instant::now();
        let first = Attachment::new(None, sent, GRACE);
        let hold = granted(first, lease_from(sent, LEASE), OPTIONS);
        let next = Attachment::new(None, after(sent, 900), GRACE);
        assert_eq!(hold.end(), after(sent, 988));
        assert!(!Arc::ptr_eq(&hold.attachment(), &next));
        let confirmed = Renewal {
            attachment: Some(Arc::clone(&next)),
            ..renewal(after(sent, 950))
        };
        assert_eq!(hold.renewed(&confirmed, after(sent, 960)), Ok(()));
        assert_eq!(hold.end(), after(sent, 1_888));
        assert!(Arc::ptr_eq(&hold.attachment(), &next));
    }

    #[test]
    fn what_was_asked_for_last_says_on_which_session_a_hold_counts() {
        let sent = Instant::now();
        let left = Attachment::new(None, after(sent, 400), GRACE);
        let hold = granted(Arc::clone(&left), lease_from(sent, LEASE), OPTIONS);
        // The node to which the lock has moved was heard from a little earlier.
        let confirmed = Renewal {
            attachment: Some(Attachment::new(None, after(sent, 300), GRACE)),
            ..renewal(after(sent, 500))
        };
        assert_eq!(hold.renewed(&confirmed, after(sent, 600)), Ok(()));
        assert_eq!(hold.end(), after(sent, 1_288));
        let late = Renewal {
            attachment: Some(left),
            ..renewal(after(sent, 450))
        };
        assert_eq!(hold.renewed(&late, after(sent, 700)), Ok(()));
        assert_eq!(hold.end(), after(sent, 1_288));
    }

    #[test]
    fn without_an_acknowledgement_the_session_is_confirmed_and_the_lease_ends_as_before() {
        let sent = Instant::now();
        let grace = Duration::from_secs(4);
        let first = Attachment::new(None, sent, grace);
        let hold = || granted(Arc::clone(&first), lease_from(sent, LEASE), OPTIONS);
        let (lost, acknowledged_late) = (hold(), hold());
        let unacknowledged = Renewal {
            attachment: Some(Attachment::new(None, after(sent, 8_000), grace)),
            acknowledged: Some(Err(Error::no_reply(None))),
            ..renewal(after(sent, 3_000))
        };
        for hold in [&lost, &acknowledged_late] {
            let told = hold.renewed(&unacknowledged, after(sent, 3_500));
            assert_eq!(told, Ok(()));
            assert_eq!(hold.lost(after(sent, 9_897)), None);
        }
        let reason = lost.lost(after(sent, 9_898));
        assert_eq!(reason, Some(LostReason::NotAcknowledged));
        // To confirm the session nobody is asked, which changes nothing about the reason.
        for (before, reason) in [
            (None, LostReason::Expired),
            (Some(&unacknowledged), LostReason::NotAcknowledged),
        ] {
            let hold = hold();
            let not_asked = Renewal {
                acknowledged: None,
                ..unacknowledged.clone()
            };
            for renewal in before.into_iter().chain([&not_asked]) {
                let told = hold.renewed(renewal, after(sent, 3_500));
                assert_eq!(told, Ok(()));
            }
            assert_eq!(hold.lost(after(sent, 9_898)), Some(reason));
        }
        // That of a renewal that was sent before still counts.
        let late = renewal(after(sent, 1_000));
        assert_eq!(acknowledged_late.renewed(&late, after(sent, 9_000)), Ok(()));
        assert_eq!(acknowledged_late.lost(after(sent, 10_897)), None);
        let reason = acknowledged_late.lost(after(sent, 10_898));
        assert_eq!(reason, Some(LostReason::Expired));
    }

    #[test]
    fn a_hold_entered_again_counts_on_the_new_lease_once_it_is_acknowledged() {
        let start = Instant::now();
        let options = HoldOptions {
            renewed: false,
            ..OPTIONS
        };
        let (first, again) = (hold(start, options), hold(after(start, 5_000), options));
        let later = after(start, 6_000);
        let take_over = |acknowledged| first.take_over(&again, acknowledged, later);
        assert!(take_over(false));
        assert_eq!(first.valid_for(start), VALID);
        // It is renewed up to the end of the new one.
        assert_eq!(first.kept(later).counted().length, Duration::from_secs(9));
        assert!(take_over(true));
        assert_eq!(first.valid_for(after(start, 5_000)), VALID);
    }

    #[test]
    fn the_servers_no_is_final() {
        let sent = Instant::now();
        let hold = hold(sent, OPTIONS);
        let not_held = Err(LostReason::NotHeld);
        let no = Renewal {
            held: false,
            ..renewal(sent)
        };
        assert_eq!(hold.renewed(&no, sent), not_held);
        assert_eq!(hold.renewed(&renewal(sent), sent), not_held);
        hold.lose(LostReason::Broken);
        assert_eq!(hold.lost(sent), Some(LostReason::NotHeld));
    }

    #[test]
    fn whoever_has_been_told_of_a_loss_is_not_contradicted() {
        let sent = Instant::now();
        let hold = hold(sent, OPTIONS);
        assert_eq!(hold.lost(after(sent, 9_898)), Some(LostReason::Expired));
        let told = hold.renewed(&renewal(after(sent, 9_000)), after(sent, 9_900));
        assert_eq!(told, Err(LostReason::Expired));
    }

    #[test]
    fn the_longest_hold_shortens_the_last_lease_and_gives_the_reason() {
        let sent = Instant::now();
        let longest = Duration::from_secs(15);
        let options = HoldOptions {
            max_hold: Some(longest),
            ..OPTIONS
        };
        let hold = hold(sent, options);
        assert_eq!(hold.lease_anew(sent), LEASE);
        let late = after(sent, 9_000);
        let lease = hold.lease_anew(late);
        assert_eq!(lease, Duration::from_secs(6));
        let renewal = |length| Renewal {
            held: true,
            lease: lease_from(late, length),
            attachment: None,
            acknowledged: Some(Ok(())),
        };
        assert_eq!(hold.renewed(&renewal(lease), late), Ok(()));
        assert_eq!(hold.options_left(late).max_hold, Some(lease));
        // It may have been asked for longer for another guard's sake.
        assert_eq!(hold.renewed(&renewal(LEASE), late), Ok(()));
        let end = after(sent, 14_998);
        assert_eq!(hold.end(), end);
        assert_eq!(hold.lost(end), Some(LostReason::MaxHold));
    }

    #[test]
    fn a_lease_of_its_own_is_confirmed_but_not_made_longer() {
        let sent = Instant::now();
        let options = HoldOptions {
            renewed: false,
            ..OPTIONS
        };
        let hold = hold(sent, options);
        let later = after(sent, 4_000);
        assert_eq!(hold.kept(later).counted().length, Duration::from_secs(6));
        assert_eq!(hold.anew(later).counted().length, LEASE);
    }

    /// What a test knows of an owner: a hold of it with its usage.
    fn entered(
        ledger: &Arc<Ledger>,
        owner: &Owner,
        (mode, names): (Mode, &[&str]),
        token: u64,
    ) -> (Arc<Hold>, Usage) {
        let now = Instant::now();
        let names: Vec<_> = names.iter().map(|n| Arc::from(n.as_bytes())).collect();
        let mut usage = owner.target(ledger, mode, &names).claim(OPTIONS);
        let grant = Grant {
            token,
            lease: usage.lease(now).keep(),
            attachment: Attachment::new(None, now, Duration::ZERO),
            fresh: true,
        };
        let (hold, _) = Hold::enter(&mut usage, grant, true, now);
        (hold, usage)
    }

    #[test]
    fn a_fresh_grant_says_that_earlier_ones_without_a_token_are_lost() {
        let ledger = Arc::default();
        let (owner, other) = (Owner::new("client", 1), Owner::new("client", 2));
        let is_lost = |(hold, _): &(Arc<Hold>, Usage)| hold.lost(Instant::now()).is_some();

        let writer = entered(&ledger, &owner, (Mode::Write, &["a"]), 7);
        let reader = entered(&ledger, &owner, (Mode::Read, &["a"]), 8);
        assert!(!is_lost(&writer), "a writer may read");
        let again = entered(&ledger, &owner, (Mode::Write, &["a"]), 7);
        assert!(Arc::ptr_eq(&again.0, &writer.0), "the same, told twice");
        let anew = entered(&ledger, &owner, (Mode::Write, &["a"]), 9);
        assert!(is_lost(&writer) && !is_lost(&anew));
        assert!(!is_lost(&reader), "the server will say so");

        let both = entered(&ledger, &owner, (Mode::Several, &["b", "c"]), 7);
        let next = entered(&ledger, &owner, (Mode::Several, &["d"]), 7);
        let others = entered(&ledger, &other, (Mode::Several, &["c", "b"]), 7);
        let _one = entered(&ledger, &owner, (Mode::Plain, &["c"]), 8);
        assert!(is_lost(&both) && !is_lost(&next) && !is_lost(&others));
    }

    #[test]
    fn it_is_meant_by_its_token_or_if_there_is_no_other() {
        let ledger = Arc::default();
        let owner = Owner::new("client", 1);
        let now = Instant::now();
        let (one, _usage) = entered(&ledger, &owner, (Mode::Plain, &["b"]), 7);
        let (both, _second) = entered(&ledger, &owner, (Mode::Several, &["b", "c"]), 7);
        assert_eq!(one.is_meant(now), Some(true), "it has a token");
        assert_eq!(both.is_meant(now), Some(false), "it may be the other");
        one.lose(LostReason::Broken);
        assert_eq!(both.is_meant(now), Some(true));
        let names = [Arc::from(*b"c")];
        let _under_way = owner.target(&ledger, Mode::Plain, &names).claim(OPTIONS);
        assert_eq!(both.is_meant(now), None, "it may be the one to come");
    }

    #[test]
    fn holds_are_counted_once_each_and_forgotten_when_they_go() {
        let ledger = Arc::<Ledger>::default();
        let owner = Owner::new("client", 1);
        let both = entered(&ledger, &owner, (Mode::Several, &["b", "c"]), 7);
        let one = entered(&ledger, &owner, (Mode::Plain, &["c"]), 7);
        assert_eq!(ledger.holds().flatten().count(), 2);
        drop(one);
        assert_eq!(ledger.holds().flatten().count(), 1);
        assert!(!ledger.is_empty());
        drop(both);
        assert_eq!(ledger.holds().flatten().count(), 0);
        assert!(ledger.is_empty());
    }

    #[test]
    fn holds_come_a_few_at_a_time_and_none_is_left_out() {
        let ledger = Arc::<Ledger>::default();
        let owner = Owner::new("client", 1);
        let names: Vec<_> = (0..1_500).map(|number| number.to_string()).collect();
        let enter = |name: &String| entered(&ledger, &owner, (Mode::Plain, &[name]), 7);
        let _held: Vec<_> = names.iter().map(enter).collect();
        assert!(ledger.holds().all(|some| some.len() <= HOLDS_AT_ONCE));
        assert_eq!(ledger.holds().flatten().count(), names.len());
    }
}
