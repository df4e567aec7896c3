//! The state between the server's calls.

pub(crate) mod state;
