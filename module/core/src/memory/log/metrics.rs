//! Counters and histograms of everything that happened since the start.

/// Counters since start, for `INFO rlock`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Grants of locks to owners that did not hold them, hand-overs included.
    pub grants: u64,
    /// Holds entered once more by their owner.
    pub reentries: u64,
    /// Grants to a waiter in a queue.
    pub handovers: u64,
    /// Waits that ended without the lock because their time was over.
    pub timeouts: u64,
    /// Waiters taken out by CANCEL, or replaced by their owner's newer connection.
    pub cancels: u64,
    /// Waiters that left because their connection closed, or because they were unblocked.
    pub departures: u64,
    /// Grants taken back because the waiter's connection closed before it was told.
    pub grants_taken_back: u64,
    /// Successful RENEWs.
    pub renewals: u64,
    /// RENEWs of a hold that was lost.
    pub renewals_lost: u64,
    /// RELEASEs, each of one hold.
    pub releases: u64,
    /// Locks that BREAK ended.
    pub breaks: u64,
    /// Waits refused because they could never have ended.
    pub deadlocks_refused: u64,
    /// Holds that were released because their session ended.
    pub session_releases: u64,
    /// Holds whose session was told that they were lost.
    pub holds_lost: u64,
    /// Sessions that ended because they left too many events unacknowledged.
    pub sessions_overflowed: u64,
    /// Leases whose end was noticed while the lock had waiters.
    pub expiries: u64,
    /// The largest number of waiters at one time.
    pub waiters_peak: u64,
    /// How long granted waiters had waited, in milliseconds.
    pub wait_ms: Histogram,
    /// How long locks were held from grant to last release, in milliseconds.
    pub hold_ms: Histogram,
}

/// Adds one to a counter.
pub(crate) fn count(counter: &mut u64) {
    *counter = counter.saturating_add(1);
}

/// A histogram: how many values fell below each bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct Histogram {
    /// For each bound, the number of values that are not above it but above the bound before.
    within: [u64; Self::BOUNDS.len()],
    count: u64,
    sum: u64,
}

impl Histogram {
    /// The upper bounds, inclusive.
    pub const BOUNDS: [u64; 11] = [
        1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576,
    ];

    pub(crate) fn record(&mut self, value: i64) {
        let value = u64::try_from(value).unwrap_or(0);
        let bucket = Self::BOUNDS.iter().position(|bound| value <= *bound);
        if let Some(within) = bucket.and_then(|bucket| self.within.get_mut(bucket)) {
            count(within);
        }
        count(&mut self.count);
        self.sum = self.sum.saturating_add(value);
    }

    /// Each bound, and how many values are not above it.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let add = |below: &mut u64, within: u64| {
            *below = below.saturating_add(within);
            Some(*below)
        };
        let below = self.within.into_iter().scan(0, add);
        Self::BOUNDS.into_iter().zip(below)
    }

    /// The number of values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum
    }
}
