//! The deadline of the command, on a clock that goes on while the machine is suspended.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Two clocks, read together: since the start of the machine, without and with the time for which
/// it was suspended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Now {
    pub(crate) awake: Duration,
    pub(crate) all: Duration,
}

impl Now {
    pub(crate) fn read() -> Self {
        // The clock without suspension first: a suspension between the two then looks like one
        // before, which is noticed.
        let awake = read(ClockId::CLOCK_MONOTONIC);
        let all = read(ClockId::CLOCK_BOOTTIME);
        Self { awake, all }
    }
}

/// The time since the start of the machine, with suspensions.
pub(crate) fn since_boot() -> Duration {
    read(ClockId::CLOCK_BOOTTIME)
}

/// The kernels on which this program runs have both clocks; without one the deadline is over.
fn read(clock: ClockId) -> Duration {
    clock_gettime(clock).map_or(Duration::MAX, Duration::from)
}

/// Translates what the guard says into a deadline that also holds across a suspension.
///
/// The guard counts on a clock that stands still while the machine is suspended, and the server's
/// clock does not. After a suspension the deadline that was there before stands, until the guard's
/// word rests on commands that were sent afterwards.
#[derive(Debug)]
pub(crate) struct Deadline {
    /// The end of the command, on the clock with suspensions.
    until: Duration,
    /// For how long the machine had been suspended when this was last looked at.
    suspended: Duration,
    /// The last suspension that the guard does not know of.
    resumed: Option<Resumed>,
    /// The validity of a guard at the moment of its confirmation.
    fresh: Duration,
    /// Taken off for the time that killing takes.
    margin: Duration,
}

#[derive(Debug)]
struct Resumed {
    /// When it was over, on the clock without suspensions.
    at: Duration,
    /// Whether the server has renewed the lease since.
    renewed: bool,
}

/// How far apart the two readings of a pair may lie on a busy machine.
const TOLERANCE: Duration = Duration::from_millis(50);

impl Deadline {
    /// For a lock that was granted just now, to a session with this grace, which is not longer
    /// than the lease.
    pub(crate) fn new(now: Now, valid_for: Duration, grace: Duration) -> Self {
        // As the client counts it: less a hundredth and 2 ms; and 1 ms for rounding.
        let drift = grace.checked_div(100).unwrap_or_default();
        let fresh = grace.saturating_sub(drift);
        let fresh = fresh.saturating_sub(Duration::from_millis(3));
        let margin = margin(grace);
        Self {
            until: now.all.saturating_add(valid_for.saturating_sub(margin)),
            suspended: now.all.saturating_sub(now.awake),
            resumed: None,
            fresh,
            margin,
        }
    }

    /// The deadline, if the guard's `valid_for` is this now.
    pub(crate) fn advance(&mut self, now: Now, valid_for: Duration) -> Duration {
        let suspended = now.all.saturating_sub(now.awake);
        if suspended > self.suspended.saturating_add(TOLERANCE) {
            self.suspended = suspended;
            self.resumed = Some(Resumed {
                at: now.awake,
                renewed: false,
            });
        }
        if let Some(resumed) = &self.resumed {
            // `valid_for` ends with the lease or with the session's grace, whichever is earlier.
            // The lease was renewed by a command that was sent since; this check shows the same of
            // the session.
            let end = now.awake.saturating_add(valid_for);
            if !resumed.renewed || end < resumed.at.saturating_add(self.fresh) {
                return self.until;
            }
            self.resumed = None;
        }
        let valid_for = valid_for.saturating_sub(self.margin);
        self.until = now.all.saturating_add(valid_for);
        self.until
    }

    /// The deadline as it stands.
    pub(crate) fn until(&self) -> Duration {
        self.until
    }

    /// Whether the guard has to be asked to renew before its word counts again.
    pub(crate) fn needs_renewal(&self) -> bool {
        self.resumed.as_ref().is_some_and(|one| !one.renewed)
    }

    /// The server has renewed the lease by a command that was sent at `sent`.
    pub(crate) fn renewed(&mut self, sent: Now) {
        // Else the machine was suspended in between.
        if sent.all.saturating_sub(sent.awake) >= self.suspended
            && let Some(resumed) = &mut self.resumed
        {
            resumed.renewed = true;
        }
    }
}

/// How long before the end of the lock the command has to be gone: it takes a moment to wake up
/// and to kill.
pub(crate) fn margin(grace: Duration) -> Duration {
    let part = grace.checked_div(20).unwrap_or_default();
    part.min(Duration::from_millis(250))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);
    const VALID: Duration = Duration::from_millis(4_948);

    fn at(awake_ms: u64, suspended_ms: u64) -> Now {
        let ms = Duration::from_millis;
        Now {
            awake: ms(awake_ms),
            all: ms(awake_ms).saturating_add(ms(suspended_ms)),
        }
    }

    #[test]
    fn it_follows_the_guard_while_the_machine_is_awake() {
        let mut deadline = Deadline::new(at(1_000, 0), VALID, GRACE);
        let until = deadline.advance(at(2_000, 0), VALID);
        assert_eq!(until, Duration::from_millis(2_000 + 4_948 - 250));
        assert!(!deadline.needs_renewal());
    }

    #[test]
    fn a_suspension_is_counted_although_the_guard_does_not_see_it() {
        let mut deadline = Deadline::new(at(1_000, 0), VALID, GRACE);
        let before = deadline.advance(at(1_500, 0), VALID);
        let resumed = at(1_600, 3_600_000);
        assert_eq!(deadline.advance(resumed, Duration::from_secs(4)), before);
        assert!(before < resumed.all, "it is over");
        assert!(deadline.needs_renewal());
    }

    #[test]
    fn after_a_short_suspension_only_what_was_confirmed_afterwards_counts() {
        let mut deadline = Deadline::new(at(1_000, 0), VALID, GRACE);
        let before = deadline.advance(at(1_500, 0), VALID);
        let old = Duration::from_secs(4);
        assert_eq!(deadline.advance(at(1_600, 1_000), old), before);
        assert_eq!(deadline.advance(at(1_700, 1_000), old), before);
        assert_eq!(deadline.advance(at(1_800, 1_000), VALID), before);
        deadline.renewed(at(1_500, 0));
        assert_eq!(deadline.advance(at(1_800, 1_000), VALID), before);
        deadline.renewed(at(1_750, 1_000));
        assert_eq!(deadline.advance(at(1_800, 1_000), old), before);
        let until = deadline.advance(at(1_800, 1_000), VALID);
        assert_eq!(until, Duration::from_millis(2_800 + 4_948 - 250));
        assert!(!deadline.needs_renewal());
    }
}
