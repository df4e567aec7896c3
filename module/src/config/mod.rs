//! The module's options: `CONFIG SET rlock.*`, `redis.conf`, `MODULE LOADEX`.

mod choice;

pub(crate) use choice::{Choice, PublishMode, ReplicateMode};

use crate::ffi::{OwnedStr, ServerLocked};
use redis_module::configuration::{ConfigurationContext, ConfigurationValue};
use redis_module::{RedisError, RedisString};
use rlock_core::{INTEGER_MAX, LogOptions, PATTERN_LEN_MAX, PATTERNS_MAX, are_patterns};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// An option that is a number, and its bounds.
pub(crate) struct Number {
    value: AtomicI64,
    pub(crate) default: i64,
    pub(crate) min: i64,
    pub(crate) max: i64,
}

impl Number {
    const fn new(default: i64, min: i64, max: i64) -> Self {
        Self {
            value: AtomicI64::new(default),
            default,
            min,
            max,
        }
    }

    pub(crate) fn now(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }

    /// How many there may be.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.now()).unwrap_or(u32::MAX)
    }
}

impl ConfigurationValue<i64> for Number {
    fn get(&self, _ctx: &ConfigurationContext) -> i64 {
        self.now()
    }

    fn set(&self, _ctx: &ConfigurationContext, value: i64) -> Result<(), RedisError> {
        self.value.store(value, Ordering::Relaxed);
        Ok(())
    }
}

/// `rlock.max-waiters-per-lock`: how many waiters one lock may have; one more is refused with
/// QUEUEFULL.
pub(crate) static WAITERS_PER_LOCK_MAX: Number = Number::new(100_000, 1, 10_000_000);

/// `rlock.max-sessions`: how many sessions there may be; EVENTS that would begin one more is
/// refused with SESSIONSFULL.
pub(crate) static SESSIONS_MAX: Number = Number::new(100_000, 1, 10_000_000);

/// `rlock.max-events-per-session`: how many events a session may leave unacknowledged; with one
/// more it counts as if its connection had closed, and its next EVENTS begins another life. Takes
/// effect with the next EVENTS of any session.
pub(crate) static EVENTS_PER_SESSION_MAX: Number = Number::new(100_000, 1, 10_000_000);

/// `rlock.fence-guard-ms`: how far ahead of the clock tokens begin after a start or a promotion, so
/// that they grow even if the clocks of two servers differ. Takes effect at the next start or
/// promotion.
pub(crate) static FENCE_GUARD_MS: Number = Number::new(10_000, 0, 86_400_000);

/// `rlock.grant-delay-ms`: for how long after a start no new grant is made. Takes effect at once,
/// counted from the start.
pub(crate) static GRANT_DELAY_MS: Number = Number::new(0, 0, INTEGER_MAX);

/// `rlock.log-max-len`: how many entries RLOCK.LOG keeps. Takes effect at once.
pub(crate) static LOG_LEN_MAX: Number = Number::new(128, 0, 100_000);

/// `rlock.log-holds-ms`: a hold that lasted this long is logged in RLOCK.LOG when it is given back;
/// 0 is never. Takes effect at once.
pub(crate) static LOG_HOLDS_MS: Number = Number::new(0, 0, INTEGER_MAX);

/// `rlock.log-waits-ms`: a wait that lasts this long is logged in RLOCK.LOG and in the server's
/// log; 0 is never. Takes effect at once, also for present waiters.
pub(crate) static LOG_WAITS_MS: Number = Number::new(1000, 0, INTEGER_MAX);

/// `rlock.publish`: where the unlock message goes.
pub(crate) static PUBLISH: Choice<PublishMode> = Choice::new(PublishMode::auto);

/// `rlock.replicate`: the commands by which replicas and the append-only file get a new lock. Takes
/// effect with the next command.
pub(crate) static REPLICATE: Choice<ReplicateMode> = Choice::new(ReplicateMode::restore);

/// `rlock.wake-fair-queue`: whether a lock that becomes free wakes the first waiter of Redisson's
/// fair lock of that name. Takes effect with the next command.
pub(crate) static WAKE_FAIR_QUEUE: AtomicBool = AtomicBool::new(WAKE_FAIR_QUEUE_DEFAULT);
pub(crate) const WAKE_FAIR_QUEUE_DEFAULT: bool = true;

/// `rlock.metrics-patterns`: the patterns of lock names for which INFO counts. Takes effect at
/// once.
pub(crate) static METRICS_PATTERNS: MetricsPatterns = MetricsPatterns;
pub(crate) const METRICS_PATTERNS_DEFAULT: &str = "";

/// Where `rlock.metrics-patterns` is kept.
pub(crate) struct MetricsPatterns;

static PATTERNS: ServerLocked<PatternsText> = ServerLocked::new();

struct PatternsText(OwnedStr);

impl Default for PatternsText {
    fn default() -> Self {
        Self(OwnedStr::new(METRICS_PATTERNS_DEFAULT.as_bytes()))
    }
}

impl ConfigurationValue<RedisString> for MetricsPatterns {
    fn get(&self, _ctx: &ConfigurationContext) -> RedisString {
        PATTERNS.with(|text| text.0.as_option())
    }

    fn set(&self, _ctx: &ConfigurationContext, text: RedisString) -> Result<(), RedisError> {
        if !are_patterns(text.as_slice()) {
            return Err(RedisError::String(format!(
                "rlock.metrics-patterns must be up to {PATTERNS_MAX} patterns of 1 to \
                 {PATTERN_LEN_MAX} bytes, separated by spaces"
            )));
        }
        let kept = PatternsText(OwnedStr::new(text.as_slice()));
        PATTERNS.with(|text| *text = kept);
        Ok(())
    }
}

/// Frees the text: the module is being unloaded.
pub(crate) fn clear() {
    PATTERNS.clear();
}

/// The present value of `rlock.metrics-patterns`.
pub(crate) fn metrics_patterns() -> Vec<u8> {
    PATTERNS.with(|text| text.0.as_str().bytes().to_vec())
}

/// The present values of the options of the log.
pub(crate) fn log_options() -> LogOptions {
    LogOptions {
        max_len: usize::try_from(LOG_LEN_MAX.now()).unwrap_or(0),
        holds_ms: LOG_HOLDS_MS.now(),
        waits_ms: LOG_WAITS_MS.now(),
    }
}
