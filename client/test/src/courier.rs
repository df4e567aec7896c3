//! Delivery of messages to the ends of connections.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::network::Direction;
use crate::wire::Wire;

/// One courier for all hosts: messages that are due at the same time arrive in one order.
#[derive(Debug, Default)]
pub(crate) struct Courier {
    inner: Mutex<Round>,
    /// Something is due before the time that is waited for.
    sooner: Notify,
}

#[derive(Debug, Default)]
struct Round {
    /// Of each host, by its number.
    delays: Vec<Delays>,
    expected: BinaryHeap<Reverse<Expected>>,
    /// Numbers the sends: bytes that are due at the same time arrive in the order of sending.
    count: u64,
}

/// How long messages from and to a host are in flight.
#[derive(Debug)]
struct Delays {
    chance: fastrand::Rng,
    longest: Duration,
}

#[derive(Debug)]
struct Expected {
    at: (Instant, u64),
    wire: Arc<Wire>,
    direction: Direction,
}

impl PartialEq for Expected {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Expected {}

impl PartialOrd for Expected {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Expected {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Courier {
    fn round(&self) -> MutexGuard<'_, Round> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the next host. Its delays follow from this seed.
    pub(crate) fn add_host(&self, seed: u64) {
        let chance = fastrand::Rng::with_seed(seed);
        let longest = Duration::ZERO;
        self.round().delays.push(Delays { chance, longest });
    }

    pub(crate) fn set_latency(&self, host: usize, longest: Duration) {
        if let Some(delays) = self.round().delays.get_mut(host) {
            delays.longest = longest;
        }
    }

    /// How long something is in flight from or to this host.
    pub(crate) fn delay(&self, host: usize) -> Duration {
        let round = &mut *self.round();
        let Some(delays) = round.delays.get_mut(host) else {
            return Duration::ZERO;
        };
        let longest = u64::try_from(delays.longest.as_micros()).unwrap_or(u64::MAX);
        match longest {
            0 => Duration::ZERO,
            _ => Duration::from_micros(delays.chance.u64(..=longest)),
        }
    }

    /// Something is due on this connection then.
    pub(crate) fn expect(&self, due: Instant, wire: &Arc<Wire>, direction: Direction) {
        let mut round = self.round();
        round.count = round.count.saturating_add(1);
        let first = round.expected.peek().map(|Reverse(first)| first.at.0);
        let at = (due, round.count);
        let wire = Arc::clone(wire);
        round.expected.push(Reverse(Expected {
            at,
            wire,
            direction,
        }));
        if first.is_none_or(|first| due < first) {
            self.sooner.notify_one();
        }
    }

    /// Until it is dropped.
    pub(crate) async fn run(&self) {
        loop {
            let first = self
                .round()
                .expected
                .peek()
                .map(|Reverse(first)| first.at.0);
            let due = async {
                match first {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.sooner.notified() => continue,
                () = due => {}
            }
            self.deliver(Instant::now());
        }
    }

    fn deliver(&self, now: Instant) {
        loop {
            let mut round = self.round();
            if round
                .expected
                .peek()
                .is_none_or(|Reverse(first)| first.at.0 > now)
            {
                return;
            }
            let first = round.expected.pop();
            drop(round);
            if let Some(Reverse(first)) = first {
                first.wire.deliver(first.direction, now);
            }
        }
    }
}
