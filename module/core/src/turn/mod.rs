//! The order of decisions, and the changes that time and closed connections cause.

pub(crate) mod life;
pub(crate) mod long_wait;
#[allow(clippy::module_inception, reason = "the loop, and what belongs to it")]
pub(crate) mod turn;
pub(crate) mod waiting;
