//! What an operator can ask about afterwards.

pub(crate) mod event_log;
pub(crate) mod metrics;
pub(crate) mod pattern;
