//! The task that asks the sentinels again and again whether the server in use is still the primary.
//!
//! A primary that is cut off from sentinels and replicas, but not from us, does not know that it
//! has been replaced. It goes on renewing locks that other clients may hold at the new primary by
//! then.

use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use crate::backoff::part_of;
use crate::chance::random;
use crate::part;
use crate::wire::Connector;
use crate::wire::session::part_of_grace;

/// Asks until it is aborted, with the node. The promises rest on this asking alone; that sentinels
/// tell of a new primary only makes it quicker.
pub(crate) async fn run(connector: Connector, grace: Duration) {
    let every = interval(grace);
    loop {
        // Counted from the start of the last question: silent sentinels do not put off the next.
        let next = Instant::now().checked_add(pause(every));
        // Without this pause, a sentinel that reports switches without end would make us ask
        // without end.
        sleep(PAUSE_MIN).await;
        tokio::select! {
            () = sleep_until(next.unwrap_or_else(Instant::now)) => {}
            () = connector.sentinels.switched.notified() => {}
        }
        connector.ask_sentinels(part(every, ANSWER_PART)).await;
    }
}

/// Within which time to ask at least once.
fn interval(grace: Duration) -> Duration {
    part_of_grace(grace, 1).clamp(INTERVAL_MIN, INTERVAL_MAX)
}

/// From one question to the next: from a half to three quarters of the interval, by chance, so that
/// clients do not ask all at once. The rest is for the answers, and to confirm the holds or lose
/// them.
fn pause(interval: Duration) -> Duration {
    part(interval, 2).saturating_add(part_of(part(interval, 4), random()))
}

/// The longest interval, for any grace and for none: it bounds how long a client stays with a
/// primary that was replaced.
const INTERVAL_MAX: Duration = Duration::from_secs(5);

const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// A sentinel may take this part of the interval to answer: two questions and what lies between
/// them are over before the next is due.
const ANSWER_PART: u32 = 4;

/// From the end of one question to the next, whatever a sentinel tells.
const PAUSE_MIN: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_asked_once_in_three_quarters_of_the_grace_and_at_most_twice_in_it() {
        for ms in [100, 500, 1_000, 5_000] {
            let grace = Duration::from_millis(ms);
            for _ in 0..100 {
                let pause = pause(interval(grace));
                assert!(pause <= part(grace.saturating_mul(3), 4), "{grace:?}");
                assert!(pause >= part(grace, 2), "{grace:?}");
            }
        }
        assert_eq!(interval(Duration::ZERO), INTERVAL_MAX);
        assert_eq!(interval(Duration::from_secs(3_600)), INTERVAL_MAX);
        assert_eq!(interval(Duration::from_millis(1)), INTERVAL_MIN);
    }
}
