//! Times and durations, with their units in the type.

use crate::values::limits::INTEGER_MAX;

/// The moment of a decision, on two clocks.
///
/// Leases are stored in the keyspace as TTLs, so they follow the server's wall clock. Waits are
/// only in our memory, so they follow a clock that nobody can set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Wall clock, in microseconds since 1970.
    pub wall_us: i64,
    /// Monotonic clock, in milliseconds since any fixed moment.
    pub mono_ms: i64,
}

impl Now {
    /// Wall clock, in milliseconds since 1970: the unit of a key's expiry.
    pub fn wall_ms(self) -> i64 {
        self.wall_us.div_euclid(1000)
    }

    /// The moment `ms` milliseconds later, if nobody sets a clock.
    #[must_use]
    pub fn after(self, ms: i64) -> Self {
        Self {
            wall_us: self.wall_us.saturating_add(ms.saturating_mul(1000)),
            mono_ms: self.mono_ms.saturating_add(ms),
        }
    }
}

/// How long a hold lasts unless renewed: 1 to 2^53 - 1 milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease(i64);

impl Lease {
    /// A lease of `ms` milliseconds, if that is within the bounds.
    pub fn from_ms(ms: i64) -> Option<Self> {
        (1..=INTEGER_MAX).contains(&ms).then_some(Self(ms))
    }

    /// The moment at which a lease that starts now ends, in milliseconds of the wall clock.
    pub fn end(self, now: Now) -> i64 {
        now.wall_ms().saturating_add(self.0)
    }
}

/// How long a waiter waits: 0 (without limit) to 2^53 - 1 milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait(i64);

impl Wait {
    /// A wait of `ms` milliseconds, if that is within the bounds.
    pub fn from_ms(ms: i64) -> Option<Self> {
        (0..=INTEGER_MAX).contains(&ms).then_some(Self(ms))
    }

    /// How long, in milliseconds; 0 is without limit.
    pub fn ms(self) -> i64 {
        self.0
    }

    /// The moment at which a wait that starts now ends, on the monotonic clock; none without limit.
    pub fn end(self, now: Now) -> Option<i64> {
        (self.0 > 0).then(|| now.mono_ms.saturating_add(self.0))
    }
}

/// The earlier of two moments; either may be missing.
#[inline]
pub(crate) fn earlier(one: Option<i64>, other: Option<i64>) -> Option<i64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        _ => one.or(other),
    }
}

/// The end of a lease that never ends.
pub const NEVER: i64 = i64::MAX;

/// How long ago this moment of the wall clock was, in milliseconds.
pub(crate) fn held_ms(since_us: i64, now: Now) -> i64 {
    let held_us = now.wall_us.saturating_sub(since_us);
    held_us.div_euclid(1000).max(0)
}

/// The rest of a lease that ends at `ends_at`, in milliseconds; -1 if it has no end.
pub(crate) fn ttl_ms(ends_at: Option<i64>, now: Now) -> i64 {
    ends_at.map_or(-1, |end| end.saturating_sub(now.wall_ms()).max(0))
}
