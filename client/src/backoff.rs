//! How long to pause between two tries.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::chance::random;
use crate::time::part;

/// Pauses that double from 10 ms to 1 s: a restarted server is found at once, and one that is
/// gone is not hammered. Each is shorter than that by up to a half, by chance, so that clients
/// which lost a server in the same moment do not come back in the same moment.
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { next: FIRST }
    }

    /// The pause after this number of tries.
    pub(crate) fn after(tries: u32) -> Duration {
        let factor = 1_u32.checked_shl(tries.min(7)).unwrap_or(1);
        let next = FIRST.saturating_mul(factor).min(LONGEST);
        Self { next }.next()
    }

    pub(crate) fn next(&mut self) -> Duration {
        self.next_up_to(LONGEST)
    }

    /// The same, but none is longer than this, except that the first may be.
    pub(crate) fn next_up_to(&mut self, longest: Duration) -> Duration {
        let pause = self.next.min(longest.max(FIRST));
        self.next = self.next.saturating_mul(2).min(LONGEST);
        pause.saturating_sub(part_of(part(pause, 2), random()))
    }
}

/// How fast connections may follow each other: a peer that closes each at its first command is
/// asked ever more slowly, however fast the commands come, and so are two servers between which our
/// connections follow each other. The pauses begin anew only when one has lasted.
#[derive(Default)]
pub(crate) struct Pace {
    /// When the last connection was tried, and the pauses between connections that did not last.
    last: Option<(Instant, Backoff)>,
}

impl Pace {
    /// Waits until there may be another connection; for no longer than this, or the first pause.
    pub(crate) async fn keep(&mut self, longest: Duration) {
        let pauses = match self.last.take() {
            Some((since, mut pauses)) if since.elapsed() < LASTING => {
                sleep(pauses.next_up_to(longest)).await;
                pauses
            }
            Some(_) | None => Backoff::new(),
        };
        self.last = Some((Instant::now(), pauses));
    }
}

/// As much of a time as `share` is of all that 32 bits can hold.
pub(crate) fn part_of(longest: Duration, share: u32) -> Duration {
    part(longest.saturating_mul(share), u32::MAX)
}

/// After a connection that was tried this long ago, the next needs no pause.
const LASTING: Duration = Duration::from_secs(1);

/// The longest pause where commands wait for the connection.
pub(crate) const PAUSE_MAX: Duration = Duration::from_millis(100);

const FIRST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_the_longest_and_two_clients_differ() {
        let (mut one, mut other) = (Backoff::new(), Backoff::new());
        let mut differ = false;
        for full in [10, 20, 40, 80, 160, 320, 640, 1000, 1000] {
            let full = Duration::from_millis(full);
            let pauses = (one.next(), other.next());
            for pause in [pauses.0, pauses.1] {
                assert!(
                    pause >= part(full, 2) && pause <= full,
                    "{pause:?} of {full:?}"
                );
            }
            differ |= pauses.0 != pauses.1;
        }
        assert!(differ);
        let (mut short, longest) = (Backoff::new(), Duration::from_millis(15));
        short.next();
        assert!(short.next_up_to(longest) <= longest);
    }
}
