//! The log and the counters that an operator can ask for.

pub(crate) mod ages;
pub(crate) mod event_log;
pub(crate) mod metrics;
pub(crate) mod pattern;
