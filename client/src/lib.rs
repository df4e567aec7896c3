#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

mod client;
pub use client::Client;

mod options;
pub use options::ClientBuilder;

mod lock;
pub use lock::Lock;

mod rw_lock;
pub use rw_lock::RwLock;

mod multi;
pub use multi::MultiLock;

mod guard;
pub use guard::{Guard, MultiGuard, ReadGuard, WriteGuard};

pub mod mode;

mod owner;
pub use owner::Owner;

mod hold;
pub use hold::LostReason;

mod error;
pub use error::{Error, ErrorKind};

mod quorum;
pub use quorum::{QuorumBuilder, QuorumClient, QuorumError, QuorumGuard, QuorumLock};

#[cfg(feature = "blocking")]
pub mod blocking;

// Behind the scenes, in the order in which a call of `lock()` passes through.
mod taker;

mod attempt;
mod wait;

mod acknowledge;

mod release;
mod renewal;
mod watchdog;

mod cluster;
mod detour;
mod nodes;
mod registry;
mod slots;

mod lifeline;
mod node;
mod session;

mod driver;

mod command;
mod connection;
mod place;
mod sentinel;

mod background;
mod backoff;
mod trace;

/// Locks a mutex whose holders only read and write plain values: none can leave them half done.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The `of`-th part of a time; nothing of it for 0.
fn part(whole: Duration, of: u32) -> Duration {
    whole.checked_div(of).unwrap_or_default()
}
