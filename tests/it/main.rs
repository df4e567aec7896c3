//! RLOCK against real servers: one binary, a module an aspect. The names are the promises.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    reason = "a test that meets the unexpected should fail, and what it counts is small"
)]

// In the order in which to read them.
mod commands; // every reply and every error
mod declared; // COMMAND INFO, DOCS and GETKEYS, permissions, options, metrics
mod storage; // the hash of a lock, and hashes of others

mod freed; // locks that become free by other ways
mod queue; // the line

mod deadlock; // waits that could never end
mod events; // what a session hears of
mod sessions; // what ends with a connection

mod clock;
mod replication; // replicas, AOF, RDB, messages, notifications // a wall clock that is set

mod hostile; // any bytes, any keyspace
mod memory; // given back is given back
mod smoke; // a short set of all, also for valgrind

mod client; // the client crate
mod client_faults; // what it says when processes and networks fail
mod client_session; // its two connections

mod commands_doc; // docs/commands.md
mod languages; // the programs in docs/languages.md
mod readme; // the transcript in README.md
mod tidy; // our own tree

mod harness; // the harness itself catches what it should catch
