//! What is remembered between the server's calls.

pub(crate) mod state;
