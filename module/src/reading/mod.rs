//! Reads a lock's keys as plain values, and finds the node that serves a key.

pub(crate) mod cluster;
pub(crate) mod load;
pub(crate) mod open_lock;
pub(crate) mod permits;
pub(crate) mod read_write;
pub(crate) mod sweep;
