//! What goes into the core and what comes out of it: requests and what is stored, tasks, effects
//! and refusals.

pub mod change;
pub(crate) mod depth;
pub(crate) mod effect;
pub(crate) mod error;
pub mod guarded;
pub(crate) mod parse;
pub mod request;
pub(crate) mod stored;
pub(crate) mod stored_permits;
pub(crate) mod task;
