//! Leases and other spans of time. Nothing here asks what time it is.

use std::time::Duration;

/// The margin of a lease for clocks that run at different speeds: a hundredth of it, and 2 ms
/// because the server counts in whole milliseconds.
pub(crate) fn drift(lease: Duration) -> Duration {
    part(lease, 100).saturating_add(Duration::from_millis(2))
}

/// Cuts a lease to whole milliseconds, as the server counts it: a longer lease here than there
/// would be held too long.
pub(crate) fn whole_millis(lease: Duration) -> Duration {
    Duration::from_millis(u64::try_from(lease.as_millis()).unwrap_or(u64::MAX))
}

pub(crate) fn up_to_whole_millis(left: Duration) -> Duration {
    whole_millis(left.saturating_add(Duration::from_nanos(999_999)))
}

/// The `of`-th part of a time; nothing of it for 0.
pub(crate) fn part(whole: Duration, of: u32) -> Duration {
    whole.checked_div(of).unwrap_or_default()
}

/// A part of the grace; without a grace there is no limit.
pub(crate) fn part_of_grace(grace: Duration, of: u32) -> Duration {
    match part(grace, of) {
        Duration::ZERO => Duration::MAX,
        part => part,
    }
}

/// Refuses a time below one millisecond or above the longest.
pub(crate) fn within(setting: &str, time: Duration, longest: Duration) -> Result<(), String> {
    if (MILLI..=longest).contains(&time) {
        return Ok(());
    }
    let longest = longest.as_millis();
    Err(format!(
        "{setting} from 1 to {longest} ms, and not {time:?}"
    ))
}

/// The server's unit of time, and so the shortest lease that it knows.
pub(crate) const MILLI: Duration = Duration::from_millis(1);

/// The longest time that a command may name.
pub(crate) const MILLIS_MAX: Duration = Duration::from_millis((1 << 53) - 1);

/// The longest grace that the server allows.
pub(crate) const GRACE_MAX: Duration = Duration::from_secs(3_600);

/// As good as never, but short enough that its end can always be computed.
pub(crate) const TIMEOUT_MAX: Duration = Duration::from_secs(1 << 30);
