//! What is known about one hold: its token, and until when it may be called held.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::command::{self, Command};
use crate::owner::{Claim, Owner, Place};
use crate::part;

/// Why a hold is over although nobody unlocked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease may have run out: it was not renewed, or no renewal was confirmed in time.
    Expired,
    /// The server says that this owner does not hold the lock with this token: it was broken or
    /// deleted, or its lease had run out.
    NotHeld,
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "no renewal was confirmed within its lease",
            Self::NotHeld => "the server says that it is no longer held",
        })
    }
}

/// One hold of one owner, shared by all its guards.
pub(crate) struct Hold {
    place: Arc<Place>,
    token: u64,
    lease: Duration,
    validity: watch::Sender<Validity>,
}

impl Hold {
    /// A hold granted by a command that was sent at `sent`.
    pub(crate) fn new(claim: &Claim, token: u64, sent: Instant) -> Arc<Self> {
        let lease = claim.terms().lease;
        Arc::new(Self {
            place: Arc::clone(claim.place()),
            token,
            lease,
            validity: watch::Sender::new(Validity::new(sent, lease)),
        })
    }

    pub(crate) fn name(&self) -> &[u8] {
        &self.place.name
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.place.owner
    }

    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    /// How long it may still be called held; zero once lost.
    pub(crate) fn valid_for(&self) -> Duration {
        self.validity.borrow().left(Instant::now())
    }

    /// Why it is lost, if it is.
    pub(crate) fn lost(&self) -> Option<LostReason> {
        self.validity.borrow().lost(Instant::now())
    }

    /// Ends when it is lost, at the latest with its validity.
    pub(crate) async fn until_lost(&self) -> LostReason {
        let mut changes = self.validity.subscribe();
        loop {
            let validity = *changes.borrow_and_update();
            if let Some(reason) = validity.lost(Instant::now()) {
                // Whoever has been told stays told, even if a renewal is confirmed just now.
                self.lose(reason);
                return reason;
            }
            tokio::select! {
                () = sleep_until(validity.until) => {}
                // The sender is `self`, so this is a change and never the end.
                _ = changes.changed() => {}
            }
        }
    }

    /// The command that renews it.
    pub(crate) fn renewal(&self) -> Command<bool> {
        let place = &self.place;
        command::renew(&place.name, place.owner.as_bytes(), self.lease, self.token)
    }

    /// Takes note of what the server said to a renewal that was sent at `sent`: whether it is
    /// still held, or why not.
    pub(crate) fn renewed(&self, held: bool, sent: Instant) -> Result<(), LostReason> {
        if !held {
            self.lose(LostReason::NotHeld);
        }
        let now = Instant::now();
        let mut outcome = Ok(());
        self.validity.send_if_modified(|validity| {
            outcome = validity.confirm(sent, self.lease, now);
            true
        });
        outcome
    }

    /// Makes `granted` part of this hold, if it is the same one entered again and not yet lost.
    pub(crate) fn take_over(&self, granted: &Self) -> bool {
        let until = granted.validity.borrow().until;
        let now = Instant::now();
        self.token == granted.token
            && self
                .validity
                .send_if_modified(|validity| validity.extend(until, now).is_ok())
    }

    fn lose(&self, reason: LostReason) {
        self.validity.send_if_modified(|validity| {
            let first = validity.lost.is_none();
            validity.lost.get_or_insert(reason);
            first
        });
    }
}

/// Until when a hold may be called held. Time is an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Validity {
    until: Instant,
    lost: Option<LostReason>,
}

impl Validity {
    fn new(sent: Instant, lease: Duration) -> Self {
        Self {
            until: valid_until(sent, lease),
            lost: None,
        }
    }

    fn lost(&self, now: Instant) -> Option<LostReason> {
        self.lost
            .or((now >= self.until).then_some(LostReason::Expired))
    }

    fn left(&self, now: Instant) -> Duration {
        match self.lost {
            None => self.until.saturating_duration_since(now),
            Some(_) => Duration::ZERO,
        }
    }

    fn confirm(&mut self, sent: Instant, lease: Duration, now: Instant) -> Result<(), LostReason> {
        self.extend(valid_until(sent, lease), now)
    }

    /// A hold once lost stays lost: somebody may have acted on it.
    fn extend(&mut self, until: Instant, now: Instant) -> Result<(), LostReason> {
        self.lost = self.lost(now);
        if let Some(reason) = self.lost {
            return Err(reason);
        }
        self.until = self.until.max(until);
        Ok(())
    }
}

/// The server starts the lease when the command arrives, so not before it was sent; and its clock
/// may run faster than ours by as much as the drift.
fn valid_until(sent: Instant, lease: Duration) -> Instant {
    sent.checked_add(lease.saturating_sub(drift(lease)))
        .unwrap_or(sent)
}

/// What is taken off a lease for clocks that run at different speeds: a hundredth of it, and 2 ms
/// because the server counts in whole milliseconds.
fn drift(lease: Duration) -> Duration {
    part(lease, 100).saturating_add(Duration::from_millis(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::Terms;

    const LEASE: Duration = Duration::from_secs(10);
    const VALID: Duration = Duration::from_millis(9_898);

    fn after(start: Instant, ms: u64) -> Instant {
        start
            .checked_add(Duration::from_millis(ms))
            .expect("a moment soon")
    }

    #[test]
    fn valid_from_the_sending_for_the_lease_less_the_drift() {
        let sent = Instant::now();
        let validity = Validity::new(sent, LEASE);
        assert_eq!(validity.left(sent), VALID);
        assert_eq!(validity.lost(after(sent, 9_897)), None);
        assert_eq!(validity.lost(after(sent, 9_898)), Some(LostReason::Expired));
        assert_eq!(validity.left(after(sent, 9_999)), Duration::ZERO);
    }

    #[test]
    fn a_renewal_counts_from_its_sending_not_from_its_reply() {
        let sent = Instant::now();
        let mut validity = Validity::new(sent, LEASE);
        assert_eq!(
            validity.confirm(after(sent, 3_000), LEASE, after(sent, 5_000)),
            Ok(())
        );
        assert_eq!(
            validity.left(after(sent, 5_000)),
            VALID.saturating_sub(LEASE / 5)
        );
    }

    #[test]
    fn a_reply_that_comes_out_of_order_does_not_shorten() {
        let sent = Instant::now();
        let mut validity = Validity::new(after(sent, 1_000), LEASE);
        assert_eq!(validity.confirm(sent, LEASE, after(sent, 1_100)), Ok(()));
        assert_eq!(validity.left(after(sent, 1_000)), VALID);
    }

    #[test]
    fn lost_stays_lost() {
        let sent = Instant::now();
        let mut validity = Validity::new(sent, LEASE);
        let late = after(sent, 9_898);
        assert_eq!(
            validity.confirm(after(sent, 9_000), LEASE, late),
            Err(LostReason::Expired)
        );
        assert_eq!(validity.left(sent), Duration::ZERO);
        let again = validity.confirm(late, LEASE, after(sent, 9_899));
        assert_eq!(again, Err(LostReason::Expired));
    }

    #[test]
    fn a_lease_no_longer_than_its_drift_is_never_valid() {
        let sent = Instant::now();
        let validity = Validity::new(sent, Duration::from_millis(2));
        assert_eq!(validity.lost(sent), Some(LostReason::Expired));
    }

    fn hold(sent: Instant) -> Arc<Hold> {
        let place = Owner::new("client", 1).place(&Arc::from(*b"name"));
        Hold::new(
            &place.claim(Terms {
                lease: LEASE,
                renewed: true,
            }),
            7,
            sent,
        )
    }

    #[tokio::test(start_paused = true)]
    async fn lost_is_told_at_the_end_of_the_validity_and_not_before() {
        let start = Instant::now();
        let hold = hold(start);
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
        let hold = hold(start);
        let waiting = tokio::spawn({
            let hold = Arc::clone(&hold);
            async move { hold.until_lost().await }
        });
        sleep_until(after(start, 5_000)).await;
        assert_eq!(hold.renewed(true, Instant::now()), Ok(()));
        sleep_until(after(start, 14_000)).await;
        assert!(!waiting.is_finished());
        assert_eq!(waiting.await.expect("no panic"), LostReason::Expired);
        assert!(start.elapsed() >= VALID + Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn the_servers_no_is_told_at_once() {
        let hold = hold(Instant::now());
        assert_eq!(
            hold.renewed(false, Instant::now()),
            Err(LostReason::NotHeld)
        );
        assert_eq!(hold.until_lost().await, LostReason::NotHeld);
        assert_eq!(hold.renewed(true, Instant::now()), Err(LostReason::NotHeld));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_has_been_told_of_a_loss_is_not_contradicted() {
        let start = Instant::now();
        let hold = hold(start);
        hold.until_lost().await;
        assert_eq!(
            hold.renewed(true, after(start, 9_000)),
            Err(LostReason::Expired)
        );
    }
}
