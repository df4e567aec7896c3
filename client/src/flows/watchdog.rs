//! When to renew, and the task that does: all holds of a client behind one another.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::flows::Context;
use crate::flows::renew::{self, Aim};
use crate::ledger::{Hold, Ledger};
use crate::locked;
use crate::time::part;
use crate::topology::Node;

/// Renews the holds of the ledger that were given no lease.
pub(crate) struct Watchdog {
    schedule: Mutex<Schedule>,
    wake: Notify,
}

impl Watchdog {
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            schedule: Mutex::new(Schedule::new(interval)),
            wake: Notify::new(),
        }
    }

    /// There is one more hold to renew, and the ledger has it.
    pub(crate) fn added(&self) {
        if locked(&self.schedule).added(Instant::now()) {
            self.wake.notify_one();
        }
    }

    fn interval(&self) -> Duration {
        locked(&self.schedule).interval
    }

    fn next_round(&self) -> Option<Instant> {
        locked(&self.schedule).next
    }

    /// A round has ended. Looks under the lock whether there is anything left to renew: a hold
    /// that comes now either is seen, or finds that no round is due.
    fn ended(&self, started: Instant, confirmed: bool, ledger: &Ledger) {
        let mut schedule = locked(&self.schedule);
        schedule.ended(started, confirmed, ledger.is_idle());
    }
}

/// The holds that are still worth a renewal.
fn live(ledger: &Ledger) -> Vec<Arc<Hold>> {
    let mut holds = ledger.holds();
    holds.retain(|hold| hold.is_renewed() && hold.lost(Instant::now()).is_none());
    holds
}

/// Renews until it is aborted, with the client.
pub(crate) async fn run(watchdog: Arc<Watchdog>, context: Weak<Context>) {
    let mut asked = JoinSet::new();
    loop {
        match watchdog.next_round() {
            None => watchdog.wake.notified().await,
            Some(round) => {
                sleep_until(round).await;
                let Some(context) = context.upgrade() else {
                    return;
                };
                let started = Instant::now();
                let interval = watchdog.interval();
                let confirmed = round_of(&context, live(&context.ledger), &mut asked);
                let confirmed = timeout(interval, confirmed).await.unwrap_or(false);
                watchdog.ended(started, confirmed, &context.ledger);
            }
        }
    }
}

/// Asks each node about its holds: whether all were confirmed or found lost. A node that is slow
/// does not keep the leases at the others from being renewed: its answer is waited for while they
/// have their next round, and until it comes it is asked nothing more.
async fn round_of(context: &Arc<Context>, live: Vec<Arc<Hold>>, asked: &mut JoinSet<bool>) -> bool {
    let mut confirmed = true;
    let mut nodes: Vec<(Arc<Node>, Vec<Arc<Hold>>)> = Vec::new();
    for hold in live {
        let node = context.router.route(hold.target().key()).node;
        match nodes.iter_mut().find(|(one, _)| one.number == node.number) {
            Some((_, holds)) => holds.push(hold),
            None => nodes.push((node, vec![hold])),
        }
    }
    for (node, holds) in nodes {
        let Ok(turn) = Arc::clone(&node.renewing).try_lock_owned() else {
            confirmed = false;
            continue;
        };
        let context = Arc::clone(context);
        asked.spawn(async move {
            let unconfirmed = renew::renew_all(&context.router, holds, Aim::Lease).await;
            drop(turn);
            unconfirmed.is_empty()
        });
    }
    while let Some(one) = asked.join_next().await {
        confirmed &= one.unwrap_or(false);
    }
    confirmed
}

/// When the next round is due. Pure: it is told the time and never sleeps.
#[derive(Debug, PartialEq, Eq)]
struct Schedule {
    interval: Duration,
    next: Option<Instant>,
}

impl Schedule {
    fn new(interval: Duration) -> Self {
        Self {
            interval,
            next: None,
        }
    }

    /// A hold was added: whether that calls for a round where none was due. Otherwise the next
    /// one comes within the interval anyway, and takes it along.
    fn added(&mut self, now: Instant) -> bool {
        let first = self.next.is_none();
        if first {
            self.next = after(now, self.interval);
        }
        first
    }

    /// A round that started at `started` has ended. One that failed is repeated soon, for the
    /// leases run.
    fn ended(&mut self, started: Instant, confirmed: bool, idle: bool) {
        let pause = if confirmed {
            self.interval
        } else {
            part(self.interval, RETRY_PART)
        };
        self.next = if idle { None } else { after(started, pause) };
    }
}

fn after(moment: Instant, pause: Duration) -> Option<Instant> {
    // So far away that it never comes is as good as not due.
    moment.checked_add(pause)
}

/// A failed round is repeated after this part of the interval.
const RETRY_PART: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    #[test]
    fn the_first_hold_is_due_after_an_interval_and_the_others_go_along() {
        let start = Instant::now();
        let mut schedule = Schedule::new(INTERVAL);
        assert_eq!(schedule.next, None);
        assert!(schedule.added(start));
        assert!(!schedule.added(start + INTERVAL / 2));
        assert_eq!(schedule.next, Some(start + INTERVAL));
    }

    #[test]
    fn rounds_are_counted_from_their_start_so_that_a_slow_server_does_not_stretch_them() {
        let start = Instant::now();
        let mut schedule = Schedule::new(INTERVAL);
        schedule.added(start);
        schedule.ended(start + INTERVAL, true, false);
        assert_eq!(schedule.next, Some(start + INTERVAL * 2));
    }

    #[test]
    fn a_failed_round_is_repeated_soon_and_an_idle_watchdog_sleeps() {
        let start = Instant::now();
        let mut schedule = Schedule::new(INTERVAL);
        schedule.ended(start, false, false);
        assert_eq!(schedule.next, Some(start + INTERVAL / 10));
        schedule.ended(start, true, true);
        assert_eq!(schedule.next, None);
        assert!(schedule.added(start));
    }
}
