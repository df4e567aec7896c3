//! When to renew.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::part;

/// When the holds that were given no lease are renewed.
pub(crate) struct Watchdog {
    interval: Duration,
    /// When the next round is due; never, if there is nothing to renew.
    pub(super) next: watch::Sender<Option<Instant>>,
}

impl Watchdog {
    pub(crate) fn new(interval: Duration) -> Self {
        let next = watch::Sender::new(None);
        Self { interval, next }
    }

    /// There is one more hold to renew, and the table has it. Where a round is due, that comes
    /// within the interval and takes it along.
    pub(crate) fn added(&self, now: Instant) {
        self.is_due_by(now.checked_add(self.interval), |next| next.is_none());
    }

    /// A renewal was refused, and is repeated soon, for the lease runs.
    pub(crate) fn has_failed(&self, now: Instant) {
        let soon = now.checked_add(part(self.interval, RETRY_PARTS));
        self.is_due_by(soon, |next| {
            next.is_none_or(|next| soon.is_some_and(|soon| soon < next))
        });
    }

    /// `None` stands for a moment so far away that it never comes.
    fn is_due_by(&self, at: Option<Instant>, is_news: impl Fn(Option<Instant>) -> bool) {
        self.next.send_if_modified(|next| {
            let is_news = is_news(*next);
            if is_news {
                *next = at;
            }
            is_news
        });
    }

    /// A round starts now. Whether another will be due is known when it has looked at the holds:
    /// one that comes meanwhile either is seen, or finds that no round is due.
    pub(super) fn starts(&self, now: Instant, are_any: impl FnOnce() -> bool) {
        let next = now.checked_add(self.interval);
        self.next
            .send_modify(|due| *due = next.filter(|_| are_any()));
    }
}

/// A renewal that was refused is repeated after this part of the interval.
const RETRY_PARTS: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    fn next(watchdog: &Watchdog) -> Option<Instant> {
        *watchdog.next.borrow()
    }

    #[test]
    fn the_first_hold_is_due_after_an_interval_and_the_others_go_along() {
        let start = Instant::now();
        let watchdog = Watchdog::new(INTERVAL);
        let mut changes = watchdog.next.subscribe();
        assert_eq!(next(&watchdog), None);
        watchdog.added(start);
        assert!(changes.has_changed().is_ok_and(|changed| changed));
        changes.mark_unchanged();
        watchdog.added(start + INTERVAL / 2);
        assert!(changes.has_changed().is_ok_and(|changed| !changed));
        assert_eq!(next(&watchdog), Some(start + INTERVAL));
    }

    #[test]
    fn rounds_are_counted_from_their_start_and_an_idle_watchdog_sleeps() {
        let start = Instant::now();
        let watchdog = Watchdog::new(INTERVAL);
        watchdog.added(start);
        watchdog.starts(start + INTERVAL, || true);
        assert_eq!(next(&watchdog), Some(start + INTERVAL * 2));
        watchdog.starts(start + INTERVAL * 2, || false);
        assert_eq!(next(&watchdog), None);
        watchdog.added(start);
        assert_eq!(next(&watchdog), Some(start + INTERVAL));
    }

    #[test]
    fn what_was_refused_is_repeated_soon() {
        let start = Instant::now();
        let watchdog = Watchdog::new(INTERVAL);
        watchdog.added(start);
        watchdog.has_failed(start);
        assert_eq!(next(&watchdog), Some(start + INTERVAL / 10));
        watchdog.has_failed(start + INTERVAL / 20);
        assert_eq!(next(&watchdog), Some(start + INTERVAL / 10));
    }
}
