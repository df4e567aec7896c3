//! RLOCK beside a real Redisson: its Java client is told what to do line by line, and both sides
//! lock the same names. `make interop` runs these; the names are the promises.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::print_stdout,
    reason = "a test that meets the unexpected should fail, and what it counts is small"
)]

mod java; // the Java process
mod measure; // how soon, in figures
mod rounds; // a counter that loses updates if a lock does not lock

mod lock; // Redisson's RLock and ours
mod other_locks; // its fair, fenced and spin locks on a name of ours
mod read_write; // its RReadWriteLock and ours

mod semaphores; // its RSemaphore, its RPermitExpirableSemaphore, and our permits

mod cluster; // sharded messages

mod fleet; // moving over, and back

mod costs; // of handing a lock on
