//! The delay after a start, in which no new grant is made.
//!
//! A server that restarts without its data does not know which locks it granted before, and would
//! grant them again at once. With `rlock.grant-delay-ms` it waits until the old leases are over.
//!
//! The delay counts from the load of the module. The former process had ended when this one began,
//! so all of its grants are older than the load, and a lease no longer than the delay ends before
//! the delay does. It counts on the monotonic clock: a wall clock that is set forward would end it
//! too early.

use crate::values::time::Now;

/// The moment from which grants are made.
#[derive(Debug, Default)]
pub(crate) struct GrantDelay {
    /// When the server started, monotonic, in milliseconds.
    started_at: i64,
    delay_ms: i64,
    /// When the delay ends, monotonic, in milliseconds; none once the queues are marked dirty.
    ends_at: Option<i64>,
}

impl GrantDelay {
    /// The server starts.
    pub(crate) fn start(&mut self, now: Now, delay_ms: i64) {
        (self.started_at, self.delay_ms, self.ends_at) = (now.mono_ms, 0, None);
        self.set(delay_ms);
    }

    /// Sets the length of the delay, counted from the start. If that moment has passed, as it
    /// always has with 0, the delay is over.
    pub(crate) fn set(&mut self, delay_ms: i64) {
        if delay_ms != self.delay_ms {
            self.delay_ms = delay_ms;
            self.ends_at = Some(self.started_at.saturating_add(delay_ms));
        }
    }

    #[inline]
    pub(crate) fn lasts(&self, now: Now) -> bool {
        self.ends_at.is_some_and(|end| now.mono_ms < end)
    }

    /// How long the delay still lasts, in milliseconds; 0 if it is over.
    pub(crate) fn left_ms(&self, now: Now) -> i64 {
        let left = self.ends_at.map(|end| end.saturating_sub(now.mono_ms));
        left.unwrap_or(0).max(0)
    }

    /// Whether there is no delay, or its end was noticed.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.ends_at.is_none()
    }

    /// Milliseconds until the delay ends and the queues must be marked dirty; none if they were.
    pub(crate) fn deadline(&self, now: Now) -> Option<i64> {
        (!self.is_over()).then(|| self.left_ms(now))
    }

    /// Whether the delay has ended since the last call.
    pub(crate) fn take_end(&mut self, now: Now) -> bool {
        let has_ended = !self.is_over() && !self.lasts(now);
        if has_ended {
            self.ends_at = None;
        }
        has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(mono_ms: i64) -> Now {
        Now {
            wall_us: 0,
            mono_ms,
        }
    }

    #[test]
    fn it_counts_from_the_start_whenever_it_is_set() {
        let mut delay = GrantDelay::default();
        assert!(!delay.lasts(at(0)) && delay.deadline(at(0)).is_none());
        delay.start(at(70), 1000);
        assert!(delay.lasts(at(1069)) && !delay.lasts(at(1070)));
        assert_eq!((delay.left_ms(at(70)), delay.left_ms(at(2000))), (1000, 0));
        delay.set(200);
        assert_eq!(delay.left_ms(at(170)), 100);
        delay.set(5000);
        assert_eq!(delay.left_ms(at(170)), 4900);
        delay.set(i64::MAX);
        assert!(delay.lasts(at(i64::MAX - 1)));
    }

    #[test]
    fn its_end_is_told_once_also_of_one_that_is_cut_short() {
        let mut delay = GrantDelay::default();
        delay.start(at(70), 1000);
        assert!(!delay.take_end(at(1069)));
        delay.set(0);
        assert_eq!(delay.deadline(at(1069)), Some(0));
        assert!(delay.take_end(at(1069)) && !delay.take_end(at(1069)));
        delay.set(0);
        assert!(!delay.take_end(at(1070)) && delay.deadline(at(1070)).is_none());
        delay.set(2000);
        assert_eq!(delay.deadline(at(1070)), Some(1000), "it lasts again");
    }
}
