//! Runs the turns of the core: for commands, for the timer, and after changes by others.

pub(crate) mod blocking;
pub(crate) mod changes;
pub(crate) mod pump;
pub(crate) mod turn;
