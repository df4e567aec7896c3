//! A lock's keys as plain values, and which node serves a key.

pub(crate) mod cluster;
pub(crate) mod keys;
pub(crate) mod permits;
pub(crate) mod read_write;
