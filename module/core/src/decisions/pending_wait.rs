//! A wait that is about to begin: its caller has not joined the queues yet.

use crate::values::time::{Now, ttl_ms};

/// A wait that is about to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PendingWait {
    /// The answer if the client cannot be blocked.
    pub(crate) ttl_ms: i64,
    lease_ends: LeaseEnds,
}

/// When the present leases end, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeaseEnds {
    /// The lock is free, and promised to others.
    Promised,
    One(Option<i64>),
    Several(Vec<Option<i64>>),
}

impl PendingWait {
    pub(crate) fn new(lease_ends: LeaseEnds, ttl_ms: i64) -> Self {
        Self { ttl_ms, lease_ends }
    }

    /// Whether others' holds keep the caller out, and not just its place behind other waiters.
    pub(crate) fn is_kept_out(&self) -> bool {
        !matches!(self.lease_ends, LeaseEnds::Promised)
    }

    pub(crate) fn lease_end(&self, place: usize) -> Option<i64> {
        match &self.lease_ends {
            LeaseEnds::Promised => None,
            LeaseEnds::One(end) => *end,
            LeaseEnds::Several(ends) => ends.get(place).copied().flatten(),
        }
    }

    /// The remaining lease that the former connection is told when another one takes its wait over.
    pub(crate) fn ttl_when_taken_over(&self, now: Now) -> i64 {
        match &self.lease_ends {
            LeaseEnds::One(end) => ttl_ms(*end, now),
            LeaseEnds::Promised | LeaseEnds::Several(_) => self.ttl_ms,
        }
    }
}
