//! The only place that asks for the time.

use rlock_core::Now;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The first reading of the monotonic clock, from which all others count. Any moment would do, but
/// it must be the same for all.
static START: OnceLock<Instant> = OnceLock::new();

/// The present moment, on both clocks.
pub(crate) fn now() -> Now {
    let since_start = START.get_or_init(Instant::now).elapsed();
    let mono_ms = in_units(since_start, 1000, since_start.subsec_millis());
    LAST_MONO_MS.store(mono_ms, Ordering::Relaxed);
    let wall_us = wall_us();
    Now { wall_us, mono_ms }
}

/// The present moment on the wall clock, with the last reading of the monotonic clock. For
/// decisions while no deadline counts on the monotonic clock: reading both clocks in each command
/// takes longer than the core's decision.
pub(crate) fn wall_now() -> Now {
    let (wall_us, mono_ms) = (wall_us(), LAST_MONO_MS.load(Ordering::Relaxed));
    Now { wall_us, mono_ms }
}

static LAST_MONO_MS: AtomicI64 = AtomicI64::new(0);

fn wall_us() -> i64 {
    let wall = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    in_units(wall, 1_000_000, wall.subsec_micros())
}

/// Converts a duration. A second has `of_a_second` units; `rest` are the units beyond the whole
/// seconds. The library's `as_micros` computes in 128 bits, which would cost every command time.
fn in_units(duration: Duration, of_a_second: i64, rest: u32) -> i64 {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    seconds
        .saturating_mul(of_a_second)
        .saturating_add(rest.into())
}
