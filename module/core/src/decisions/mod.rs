//! Decisions about one lock, or about several at once.

pub(crate) mod deadlock;
pub(crate) mod decision;
pub(crate) mod pending_wait;
pub(crate) mod permits;
pub(crate) mod plain;
pub(crate) mod read_write;
pub(crate) mod several;
pub(crate) mod wanted;
