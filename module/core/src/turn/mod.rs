//! The order of decisions, and the changes that time and closed connections cause.

pub(crate) mod decide;
pub(crate) mod long_wait;
pub(crate) mod sessions;
pub(crate) mod time;
#[allow(clippy::module_inception, reason = "the loop, and what belongs to it")]
pub(crate) mod turn;
pub(crate) mod waiting;
