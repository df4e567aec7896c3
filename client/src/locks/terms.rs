//! On which terms a lock is held, and kept.

use std::sync::Arc;
use std::time::Duration;

/// The terms of a hold, as its first guard has settled them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HoldOptions {
    pub(crate) lease: Duration,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    pub(crate) max_hold: Option<Duration>,
}

/// Calls that ask for other terms are strangers to each other: one would have what the other asked
/// for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeptKey {
    pub(crate) name: Arc<[u8]>,
    pub(crate) options: HoldOptions,
    pub(crate) idle: Duration,
}
