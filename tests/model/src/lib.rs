//! A model of the protocol between client and server, and an exhaustive search of its states within
//! bounds. The real code is not in it: it finds holes in the protocol's text, and a shortest trace
//! to each.
//!
//! A [`Setup`] is the bounds and the rules; [`search`] walks every state that can be reached and
//! checks the properties of each. Every field of [`Rules`] is one sentence of the protocol.
//! `--off=RULE` takes it away, and `tests/rules.rs` shows that the search then finds a violation.

#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::expect_used,
    reason = "a model that meets the unexpected should stop, and what it counts is small"
)]

mod setup; // the bounds, and the rules that can be switched off

mod client; // a client's calls and holds
mod link; // a client's two connections to a server
mod locks; // holds and queues
mod message; // commands, replies and events
mod server; // sessions and commands

mod world; // the servers, the clients and the connections between them at one moment

mod acts; // the steps that may come next
mod properties; // states that must never be, and leftovers
mod state; // when two states count as the same
mod walk; // the search

pub use setup::{Budget, Rules, Setup, Size};
pub use walk::{Report, Violation, search};
