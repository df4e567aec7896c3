//! The only place that asks for the time.

use rlock_core::Now;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// When the monotonic clock was first read. What it counts from does not matter, but it has to be
/// one moment for all.
static START: OnceLock<Instant> = OnceLock::new();

/// The moment, on both clocks.
pub(crate) fn now() -> Now {
    let since_start = START.get_or_init(Instant::now).elapsed();
    let mono_ms = in_units(since_start, 1000, since_start.subsec_millis());
    LAST_MONO_MS.store(mono_ms, Ordering::Relaxed);
    let wall_us = wall_us();
    Now { wall_us, mono_ms }
}

/// The moment on the wall clock, and on the monotonic one when that was read last. For a decision
/// while nothing is timed by the latter: two readings in each command take longer than the core's
/// decision.
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

/// A duration in units of which a second has so many, with those beyond its whole seconds. The
/// library's `as_micros` counts in 128 bits, which every command would pay for.
fn in_units(duration: Duration, of_a_second: i64, rest: u32) -> i64 {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    seconds
        .saturating_mul(of_a_second)
        .saturating_add(rest.into())
}
