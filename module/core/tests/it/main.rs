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

use rlock_core::{HeldBy, Locks, LogOptions, Mode, NEVER};

/// A core that logs all that it can, in a short log and with low thresholds.
fn locks_that_log() -> Locks {
    let mut locks = Locks::default();
    locks.set_log_options(LogOptions {
        max_len: 3,
        holds_ms: 1,
        waits_ms: 7,
    });
    locks.set_metrics_patterns(b"a* *");
    locks
}

/// The statements that hold within the core between two calls. A fast build has no such checks.
fn assert_invariants(locks: &Locks) {
    #[cfg(debug_assertions)]
    locks.assert_invariants();
    let _ = locks;
}

/// The owner that the log names as the holder.
fn first_of(holders: &[Box<[u8]>]) -> Option<HeldBy> {
    holders.first().map(|owner| HeldBy {
        owner: owner.clone(),
        mode: Mode::Plain,
        token: None,
        ends_at: NEVER,
    })
}

/// Where nobody asks for permits.
fn no_permits() -> ! {
    panic!("nobody asks for permits here")
}

/// A user that may read nothing sees nothing, and the others see the latest entries, each once.
fn is_log_sound(locks: &Locks) -> Result<(), String> {
    let seen = |may_read: bool| {
        let entries = locks.log_entries();
        let seen = entries.filter_map(move |entry| entry.seen_by(|_| may_read));
        seen.collect::<Vec<_>>()
    };
    let (none, all) = (seen(false), seen(true));
    let is_in_order = all.windows(2).all(|two| two[0].id > two[1].id);
    if none.is_empty() && is_in_order && all.len() <= 3 {
        Ok(())
    } else {
        Err(format!("the log: {all:?}, and to nobody {none:?}"))
    }
}

// The stand-in for the server: a map, the changes that others make to it, and a driver that works
// like the module.
mod foreign;
mod keyspace;
mod world;
// The judges of the core: a lock too simple to be wrong, and the promises in words.
mod circles;
mod invariants;
mod life;
mod twin;
// The tests: random histories, all short ones, and tables of arguments.
mod corners;
mod crowded;
mod deadlock;
mod exhaustive;
mod model;
mod parsing;
mod portions;
mod questions;
mod sessions;
mod timer;
mod together;
mod walk;
mod wanted;
// Locks of all kinds at the same names.
mod mixed;
// The log that operators read.
mod log;
// The read-write lock: questions of its own.
mod read_write;
// Permits: a server, a twin and questions of their own.
mod permits;
// The bodies for a fuzzer. Public, because module/core/fuzz builds this file as its library.
pub mod fuzz;
mod guard;
