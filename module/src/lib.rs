//! RLOCK: distributed locks as a native feature of Redis and Valkey.
//!
//! This is the shell around `rlock-core`, which decides. From the top down; each folder imports
//! only from those below it:
//!
//! - `module`: its load and unload, and its options as they are declared; `info`: the metrics
//! - `commands`: one file a command; each loads what is stored, lets the core decide, replies.
//!   `guarded`: which commands of the server RLOCK.GUARD runs
//! - `driving`: `turn`: the core's loop; `pump`: what must be done outside of any command;
//!   `changes`: changes that others make, to keys and to the server; `blocking`: clients that wait,
//!   for a lock or for events
//! - `writing`: `effects`: the one place that acts on the server; `replicate`: what replicas and
//!   the append-only file are told; `publish`: the unlock message; `reply`: answers
//! - `reading`: `keys`: a lock's key as plain values; `read_write`: a read-write lock's keys;
//!   `permits`: those of permits; `cluster`: where a key is served that is not served here
//! - `memory`: what is remembered between calls
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
