//! When to renew, and the task that does: all holds of a client behind one another.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep_until, timeout};

use crate::flows::{Aim, Context, renew};
use crate::ledger::{Hold, Ledger};
use crate::topology::Node;
use crate::wire::SessionNumber;
use crate::{part, task};

/// When the holds of the ledger that were given no lease are renewed.
pub(crate) struct Watchdog {
    interval: Duration,
    /// When the next round is due; never, if there is nothing to renew.
    next: watch::Sender<Option<Instant>>,
}

impl Watchdog {
    pub(crate) fn new(interval: Duration) -> Self {
        let next = watch::Sender::new(None);
        Self { interval, next }
    }

    /// There is one more hold to renew, and the ledger has it. Where a round is due, that comes
    /// within the interval and takes it along.
    pub(crate) fn added(&self, now: Instant) {
        self.next.send_if_modified(|next| {
            let is_first = next.is_none();
            // So far away that it never comes is as good as not due.
            *next = next.or_else(|| now.checked_add(self.interval));
            is_first
        });
    }

    /// A round that started then has ended. One that failed is repeated soon, for the leases run.
    ///
    /// Looks under the lock whether there is anything left to renew: a hold that comes now either
    /// is seen, or finds that no round is due.
    fn ended(&self, started: Instant, confirmed: bool, ledger: &Ledger) {
        let parts = if confirmed { 1 } else { RETRY_PARTS };
        let next = started.checked_add(part(self.interval, parts));
        self.next
            .send_modify(|due| *due = next.filter(|_| ledger.holds().flatten().next().is_some()));
    }
}

/// Renews until it is aborted, with the client.
pub(crate) async fn run(watchdog: Arc<Watchdog>, context: Weak<Context>) {
    let mut asked = JoinSet::new();
    let mut next = watchdog.next.subscribe();
    loop {
        // The sender is there: this is never the end.
        let due = next.wait_for(Option::is_some).await.map(|due| *due);
        let Ok(Some(round)) = due else { return };
        sleep_until(round).await;
        let context = context.upgrade();
        let Some(context) = context else { return };
        let started = Instant::now();
        let confirmed = round_of(&context, &mut asked);
        let confirmed = timeout(watchdog.interval, confirmed).await;
        watchdog.ended(started, confirmed.unwrap_or(false), &context.ledger);
    }
}

/// Asks each node about its holds: whether all were confirmed or found lost. A node that is slow
/// does not keep the leases at the others from being renewed: its answer is waited for while they
/// have their next round, and until it comes it is asked nothing more.
async fn round_of(context: &Arc<Context>, asked: &mut JoinSet<bool>) -> bool {
    let mut confirmed = true;
    let mut nodes: BTreeMap<SessionNumber, (Arc<Node>, Vec<Arc<Hold>>)> = BTreeMap::new();
    for some in context.ledger.holds() {
        let is_looked_after = |hold: &Arc<Hold>| context.is_looked_after(&hold.options);
        for hold in some.into_iter().filter(is_looked_after) {
            let node = context.router.route(hold.target.key()).node;
            let number = node.session.number;
            let (_, holds) = nodes.entry(number).or_insert((node, Vec::new()));
            holds.push(hold);
        }
        yield_now().await;
    }
    for (node, holds) in nodes.into_values() {
        let Ok(turn) = Arc::clone(&node.renewing).try_lock_owned() else {
            confirmed = false;
            continue;
        };
        let context = Arc::clone(context);
        asked.spawn(task(async move {
            let unconfirmed = renew::renew_all(&context.router, holds, Aim::Lease).await;
            drop(turn);
            unconfirmed.is_empty()
        }));
    }
    while let Some(one) = asked.join_next().await {
        confirmed &= one.unwrap_or(false);
    }
    confirmed
}

/// A failed round is repeated after this part of the interval.
const RETRY_PARTS: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Grant, HoldOptions, Owner, Usage};
    use crate::wire::{Attachment, Mode};

    const INTERVAL: Duration = Duration::from_secs(10);

    /// A ledger with a hold.
    fn busy() -> (Arc<Ledger>, Arc<Hold>, Usage) {
        let ledger = Arc::<Ledger>::default();
        let options = HoldOptions {
            lease: INTERVAL,
            renewed: true,
            max_hold: None,
        };
        let target = Owner::new("client", 1).target(&ledger, Mode::Plain, &[Arc::from(*b"name")]);
        let mut usage = target.claim(options);
        let now = Instant::now();
        let grant = Grant {
            token: 7,
            lease: usage.lease(now).keep(),
            attachment: Attachment::new(None, now, Duration::ZERO),
            fresh: true,
        };
        let (hold, _) = Hold::enter(&mut usage, grant, true, now);
        (ledger, hold, usage)
    }

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
    fn rounds_are_counted_from_their_start_so_that_a_slow_server_does_not_stretch_them() {
        let start = Instant::now();
        let watchdog = Watchdog::new(INTERVAL);
        let (ledger, _hold, _usage) = busy();
        watchdog.added(start);
        watchdog.ended(start + INTERVAL, true, &ledger);
        assert_eq!(next(&watchdog), Some(start + INTERVAL * 2));
    }

    #[test]
    fn a_failed_round_is_repeated_soon_and_an_idle_watchdog_sleeps() {
        let start = Instant::now();
        let watchdog = Watchdog::new(INTERVAL);
        let (ledger, hold, usage) = busy();
        watchdog.ended(start, false, &ledger);
        assert_eq!(next(&watchdog), Some(start + INTERVAL / 10));
        drop((hold, usage));
        watchdog.ended(start, true, &ledger);
        assert_eq!(next(&watchdog), None);
        watchdog.added(start);
        assert_eq!(next(&watchdog), Some(start + INTERVAL));
    }
}
