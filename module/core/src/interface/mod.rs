//! The interface of the core: requests and stored values go in; tasks, effects and refusals come
//! out.

pub(crate) mod depth;
pub(crate) mod effect;
pub(crate) mod error;
pub(crate) mod event;
pub mod guarded;
pub(crate) mod options;
pub(crate) mod outcome;
pub(crate) mod parse;
pub mod request;
pub(crate) mod stored;
pub(crate) mod stored_permits;
pub(crate) mod task;
