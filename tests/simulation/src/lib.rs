//! The real client against the real core, in one process, under a clock that stands still while
//! there is something to do. A seed decides everything: the clients' calls, the faults, and how
//! long each message is in flight. Same seed, same trace.

#![allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "a test tool: what cannot happen may end it"
)]

mod entries;
pub mod every;
pub mod hands;
pub mod judge;
mod kept;
mod limits;
pub mod listens;
pub mod moves;
pub mod nodes;
pub mod permits;
mod replicas;
pub mod run;
pub mod scenarios;
pub mod schedule;
pub mod sentinels;
pub mod shrink;
pub mod steps;
pub mod stops;
mod surplus;
mod task;
mod themes;
