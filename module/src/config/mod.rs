//! The module's options: `CONFIG SET rlock.*`, `redis.conf`, `MODULE LOADEX`.

mod choice;

pub(crate) use choice::{PublishMode, ReplicateMode};

use crate::ffi::{OwnedStr, ServerLocked};
use redis_module::configuration::{
    ConfigurationContext, ConfigurationFlags, ConfigurationValue, EnumConfigurationValue,
    register_bool_configuration, register_enum_configuration, register_i64_configuration,
    register_string_configuration,
};
use redis_module::{Context, RedisError, RedisString};
use rlock_core::{INTEGER_MAX, LogOptions, PATTERN_LEN_MAX, PATTERNS_MAX, are_patterns};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// `rlock.max-waiters-per-lock`: how many waiters one lock may have; one more is refused with
/// QUEUEFULL.
pub(crate) static WAITERS_PER_LOCK_MAX: AtomicI64 = AtomicI64::new(0);

/// `rlock.max-sessions`: how many sessions there may be; EVENTS that would begin one more is
/// refused with SESSIONSFULL.
pub(crate) static SESSIONS_MAX: AtomicI64 = AtomicI64::new(0);

/// `rlock.max-events-per-session`: how many events a session may leave unacknowledged; with one
/// more it counts as if its connection had closed, and its next EVENTS begins another life. Takes
/// effect with the next EVENTS of any session.
pub(crate) static EVENTS_PER_SESSION_MAX: AtomicI64 = AtomicI64::new(0);

/// `rlock.fence-guard-ms`: how far ahead of the clock tokens begin after a start or a promotion, so
/// that they grow even if the clocks of two servers differ. Takes effect at the next start or
/// promotion.
pub(crate) static FENCE_GUARD_MS: AtomicI64 = AtomicI64::new(0);

/// `rlock.grant-delay-ms`: for how long after a start no new grant is made. Takes effect at once,
/// counted from the start.
pub(crate) static GRANT_DELAY_MS: AtomicI64 = AtomicI64::new(0);

/// `rlock.log-max-len`: how many entries RLOCK.LOG keeps. Takes effect at once.
pub(crate) static LOG_LEN_MAX: AtomicI64 = AtomicI64::new(0);

/// `rlock.log-holds-ms`: a hold that lasted this long is logged in RLOCK.LOG when it is given back;
/// 0 is never. Takes effect at once.
pub(crate) static LOG_HOLDS_MS: AtomicI64 = AtomicI64::new(0);

/// `rlock.log-waits-ms`: a wait that lasts this long is logged in RLOCK.LOG and in the server's
/// log; 0 is never. Takes effect at once, also for present waiters.
pub(crate) static LOG_WAITS_MS: AtomicI64 = AtomicI64::new(0);

/// `rlock.publish`: where the unlock message goes.
pub(crate) static PUBLISH: ServerLocked<PublishMode> = ServerLocked::new();

/// `rlock.replicate`: the commands by which replicas and the append-only file get a new lock. Takes
/// effect with the next command.
pub(crate) static REPLICATE: ServerLocked<ReplicateMode> = ServerLocked::new();

/// `rlock.wake-fair-queue`: whether a lock that becomes free wakes the first waiter of Redisson's
/// fair lock of that name. Takes effect with the next command.
pub(crate) static WAKE_FAIR_QUEUE: AtomicBool = AtomicBool::new(false);

/// `rlock.metrics-patterns`: the patterns of lock names for which INFO counts. Takes effect at
/// once.
static METRICS_PATTERNS: ServerLocked<OwnedStr> = ServerLocked::new();

impl ConfigurationValue<RedisString> for ServerLocked<OwnedStr> {
    fn get(&self, _ctx: &ConfigurationContext) -> RedisString {
        self.with(|text| text.as_option())
    }

    fn set(&self, _ctx: &ConfigurationContext, text: RedisString) -> Result<(), RedisError> {
        if !are_patterns(text.as_slice()) {
            return Err(RedisError::String(format!(
                "rlock.metrics-patterns must be up to {PATTERNS_MAX} patterns of 1 to \
                 {PATTERN_LEN_MAX} bytes, separated by spaces"
            )));
        }
        let patterns = OwnedStr::new(text.as_slice());
        self.with(|kept| *kept = patterns);
        Ok(())
    }
}

/// Frees the text: the module is being unloaded.
pub(crate) fn clear() {
    METRICS_PATTERNS.clear();
}

/// The present value of `rlock.metrics-patterns`.
pub(crate) fn metrics_patterns() -> Vec<u8> {
    METRICS_PATTERNS.with(|text| text.as_str().bytes().to_vec())
}

/// The present values of the options of the log.
pub(crate) fn log_options() -> LogOptions {
    LogOptions {
        max_len: usize::try_from(now(&LOG_LEN_MAX)).unwrap_or(0),
        holds_ms: now(&LOG_HOLDS_MS),
        waits_ms: now(&LOG_WAITS_MS),
    }
}

/// The options that are numbers, each with its default, its least and its largest value.
static NUMBERS: [(&str, &AtomicI64, i64, i64, i64); 8] = [
    (
        "max-waiters-per-lock",
        &WAITERS_PER_LOCK_MAX,
        100_000,
        1,
        10_000_000,
    ),
    ("max-sessions", &SESSIONS_MAX, 100_000, 1, 10_000_000),
    (
        "max-events-per-session",
        &EVENTS_PER_SESSION_MAX,
        100_000,
        1,
        10_000_000,
    ),
    ("fence-guard-ms", &FENCE_GUARD_MS, 10_000, 0, 86_400_000),
    ("grant-delay-ms", &GRANT_DELAY_MS, 0, 0, INTEGER_MAX),
    ("log-max-len", &LOG_LEN_MAX, 128, 0, 100_000),
    ("log-holds-ms", &LOG_HOLDS_MS, 0, 0, INTEGER_MAX),
    ("log-waits-ms", &LOG_WAITS_MS, 1000, 0, INTEGER_MAX),
];

/// Declares the options. The server then sets each of them, at the latest when it has loaded its
/// configuration.
pub(crate) fn register(context: &Context) {
    const FLAGS: ConfigurationFlags = ConfigurationFlags::DEFAULT;
    for (name, option, default, min, max) in NUMBERS {
        register_i64_configuration(context, name, option, default, min, max, FLAGS, None);
    }
    register_bool_configuration(
        context,
        "wake-fair-queue",
        &WAKE_FAIR_QUEUE,
        true,
        FLAGS,
        None,
    );
    let (publish, replicate) = (PublishMode::default(), ReplicateMode::default());
    register_enum_configuration(context, "publish", &PUBLISH, publish, FLAGS, None);
    register_enum_configuration(context, "replicate", &REPLICATE, replicate, FLAGS, None);
    let patterns = &METRICS_PATTERNS;
    register_string_configuration(context, "metrics-patterns", patterns, "", FLAGS, None);
}

/// The present value of an option that is a number.
pub(crate) fn now(option: &AtomicI64) -> i64 {
    option.load(Ordering::Relaxed)
}

/// How many there may be, by an option.
pub(crate) fn count(option: &AtomicI64) -> u32 {
    u32::try_from(now(option)).unwrap_or(u32::MAX)
}

/// An option whose values are words.
impl<T: EnumConfigurationValue + Default> ConfigurationValue<T> for ServerLocked<T> {
    fn get(&self, _ctx: &ConfigurationContext) -> T {
        self.with(|value| value.clone())
    }

    fn set(&self, _ctx: &ConfigurationContext, value: T) -> Result<(), RedisError> {
        self.with(|kept| *kept = value);
        Ok(())
    }
}
