//! Decisions about one lock, or about several at once.

pub(crate) mod deadlock;
pub(crate) mod decision;
pub(crate) mod ending;
pub(crate) mod grant;
pub(crate) mod kinds;
pub(crate) mod log_texts;
pub(crate) mod pending_wait;
pub(crate) mod permits;
pub(crate) mod plain;
pub(crate) mod read_write;
pub(crate) mod several;
pub(crate) mod telling;
pub(crate) mod verbs;
pub(crate) mod wanted;
