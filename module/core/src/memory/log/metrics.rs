//! What happened so far, in numbers.

/// Counters since start, for `INFO rlock`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Locks given to somebody who did not hold them, hand-overs included.
    pub grants: u64,
    /// Holds entered once more by their owner.
    pub reentries: u64,
    /// Grants to a waiter in a queue.
    pub handovers: u64,
    /// Waiters whose wait ended without the lock.
    pub timeouts: u64,
    /// Waiters taken out by CANCEL, or replaced by their owner's newer connection.
    pub cancels: u64,
    /// Waiters that left with their connection, or were unblocked.
    pub departures: u64,
    /// Grants taken back because their waiter was gone before it could hear of them.
    pub grants_taken_back: u64,
    /// Successful RENEWs.
    pub renewals: u64,
    /// RENEWs of a hold that was lost.
    pub renewals_lost: u64,
    /// RELEASEs of one hold each.
    pub releases: u64,
    /// Locks broken.
    pub breaks: u64,
    /// Waits refused because they could never have ended.
    pub deadlocks_refused: u64,
    /// Holds whose session ended before them, and that were released with it.
    pub session_releases: u64,
    /// Holds whose session was told that they were lost.
    pub holds_lost: u64,
    /// Sessions that ended because they left too many events unfetched.
    pub sessions_overflowed: u64,
    /// Leases whose end was noticed while somebody waited.
    pub expiries: u64,
    /// The most waiters there ever were at once.
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

/// How many values fell below each bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct Histogram {
    /// Those above the bound before and not above this one.
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

    /// Each bound, and how many values were not above it.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let add = |below: &mut u64, within: u64| {
            *below = below.saturating_add(within);
            Some(*below)
        };
        let below = self.within.into_iter().scan(0, add);
        Self::BOUNDS.into_iter().zip(below)
    }

    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// What they add up to.
    pub fn sum(&self) -> u64 {
        self.sum
    }
}
