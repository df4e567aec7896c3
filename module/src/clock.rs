//! The only place that asks for the time.

use rlock_core::Now;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// When the monotonic clock was first read. What it counts from does not matter, but it has to be
/// one moment for all.
static START: OnceLock<Instant> = OnceLock::new();

/// The moment, on both clocks.
pub(crate) fn now() -> Now {
    let wall = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    let since_start = START.get_or_init(Instant::now).elapsed();
    Now {
        wall_us: i64::try_from(wall.as_micros()).unwrap_or(i64::MAX),
        mono_ms: i64::try_from(since_start.as_millis()).unwrap_or(i64::MAX),
    }
}
