//! The state between turns, which the keyspace does not hold.

pub(crate) mod agenda;
pub(crate) mod bindings;
#[cfg(debug_assertions)]
mod check;
pub(crate) mod deadlines;
pub(crate) mod grant_delay;
pub(crate) mod hold;
pub(crate) mod log;
pub(crate) mod multi_waits;
pub(crate) mod pending;
pub(crate) mod position;
pub(crate) mod session;
pub(crate) mod state;
pub(crate) mod table;
