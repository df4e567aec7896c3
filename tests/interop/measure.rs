//! How soon a waiter wakes.

use std::time::{Duration, Instant};

use rlock_tests::Server;

use crate::java::clock_inaccuracy;

/// A waiter of Redisson that missed its message sleeps for the rest of a lease, which is 30 s in
/// these tests, and a guard of ours learns of its loss with the next renewal, later than that. A
/// machine that is busy takes less.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(10);

/// Long enough for an event that must not happen.
pub(crate) const A_WHILE: Duration = Duration::from_secs(1);

/// One of ours that was not told finds out when the server next looks at the key: every second, or
/// at its next tick, and these are a second apart while it is measured. Of such wake-ups one in a
/// hundred would be as fast.
const FAST: Duration = Duration::from_millis(10);

/// It took that long, give or take: both servers and clients count in whole milliseconds, by clocks
/// that they do not look at every time.
#[track_caller]
pub(crate) fn took_about(took: Duration, expected: Duration) {
    let least = expected * 9 / 10;
    assert!(least < took && took < expected + AT_ONCE, "{took:?}");
}

/// Times from the call that frees a lock to the return of the call that waited for it.
pub(crate) struct WakeUps {
    what: &'static str,
    times: Vec<Duration>,
}

impl WakeUps {
    pub(crate) fn of(what: &'static str, servers: &[&Server]) -> Self {
        for server in servers {
            assert_eq!(server.run("CONFIG SET hz 1"), "OK");
        }
        let times = Vec::new();
        Self { what, times }
    }

    /// One that must have come at once. The two may have been taken by two clocks.
    #[track_caller]
    pub(crate) fn add(&mut self, freed: Instant, woken: Instant) {
        let took = woken.saturating_duration_since(freed);
        assert!(took < AT_ONCE, "{}: woken after {took:?}", self.what);
        self.times.push(took);
    }

    /// They come within milliseconds, but for those that a busy machine delays: a tenth must, or it
    /// is not the machine. Prints the figures.
    #[track_caller]
    pub(crate) fn check(mut self) {
        self.times.sort_unstable();
        let [tenth, median] = [10, 2].map(|part| self.times[self.times.len() / part]);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!(
            "{}: a tenth within {:.2} ms, half within {:.2} ms, longest {:.2} ms of {} \
                (clocks agree to {:.2} ms)",
            self.what,
            ms(tenth),
            ms(median),
            ms(self.times[self.times.len() - 1]),
            self.times.len(),
            ms(clock_inaccuracy()),
        );
        assert!(
            tenth < FAST,
            "{}: nine in ten took {tenth:?} or longer",
            self.what
        );
    }
}
