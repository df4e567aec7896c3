//! The core without a server: against a naive twin, in all small cases, and argument by argument.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::print_stderr,
    reason = "a test that cannot set up should fail, and its numbers are small"
)]

// What stands in for the server: a map, and a driver that does what the module does.
mod keyspace;
mod world;
// What says whether the core is right: a lock too simple to be wrong, and the promises in words.
mod circles;
mod invariants;
mod life;
mod twin;
// What asks the questions: random histories, all short ones, and tables of arguments.
mod crowded;
mod deadlock;
mod exhaustive;
mod model;
mod parsing;
mod sessions;
mod together;
// The read-write lock: a server, a twin and questions of its own.
mod read_write;
// What a fuzzer asks. Public, because module/core/fuzz builds this file as its library.
pub mod fuzz;
