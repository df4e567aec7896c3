//! The connections to one server and what is said on them. Nothing else speaks RESP.

pub(crate) mod connection;
pub(crate) mod endpoint;
mod sentinel;
pub(crate) mod sentinel_watch;

pub(crate) mod commands;
pub(crate) mod durability;
pub(crate) mod events;
pub(crate) mod session;

pub(crate) mod reply;
pub(crate) mod request;
