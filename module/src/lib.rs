//! RLOCK: distributed locks as a native feature of Redis and Valkey.
//!
//! This is the shell around `rlock-core`, which decides. From the top down; each folder imports
//! only from those below it:
//!
//! - `module`: the load and unload; `info`: the metrics
//! - `commands`: one file for each command; each reads the stored state, lets the core decide, and
//!   replies. `guarded`: which commands of the server RLOCK.GUARD runs
//! - `driving`: `turn`: the core's loop; `pump`: the timer, for all work outside of commands;
//!   `changes`: changes that others make, to keys and to the server; `blocking`: clients that wait,
//!   for a lock or for events
//! - `writing`: `effects`: the one place that acts on the server; `new_hash`, `restore`: a new lock
//!   as replicas and the append-only file get it; `fields`: the fields that a write sets;
//!   `publish`: the unlock message; `reply`: replies
//! - `reading`: `load`: a lock's key as plain values; `read_write`: the keys of a read-write lock;
//!   `permits`: those of permits; `cluster`: which node serves a key that is not served here
//! - `memory`: the state between the server's calls
//! - `config`: the options; `clock`: the time
//! - `ffi`: the server's C interface, and all our `unsafe`
#![deny(unsafe_code)]
#![allow(
    missing_docs,
    reason = "the macro's entry points; everything else here is private"
)]

mod clock;
mod commands;
mod config;
mod driving;
#[allow(unsafe_code, reason = "the one place for it")]
mod ffi;
mod info;
mod memory;
mod module;
mod reading;
mod writing;
