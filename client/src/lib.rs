#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

// From the public API down to the socket. Each layer imports only from the layers below it; a test
// checks that.
#[cfg(feature = "blocking")]
pub mod blocking;
mod quorum;

mod api;
mod locks;
mod topology;
mod wire;

// Imported by all of them, and importing none.
mod background;
mod backoff;
mod chance;
mod error;
mod metrics;
mod owner;
#[cfg(feature = "test-util")]
pub mod test_util;
mod time;
mod trace;

// Helpers that most layers need.
use background::{Background, task};
use backoff::{Backoff, PAUSE_MAX, Pace};
use time::{GRACE_MAX, MILLI, MILLIS_MAX, TIMEOUT_MAX};
use time::{drift, part, whole_millis, within};

pub use api::{
    Client, ClientBuilder, Guard, Lock, MultiGuard, MultiLock, PermitsGuard, ReadGuard, RwLock,
    Scope, Semaphore, WriteGuard, mode,
};
pub use error::{Error, ErrorKind, LostReason};
pub use owner::Owner;
pub use quorum::{QuorumBuilder, QuorumClient, QuorumError, QuorumGuard, QuorumLock};
/// The library in whose types [`Guard::call`] takes commands and gives replies.
pub use redis;

/// Locks a mutex whose holders only read and write plain values: none can leave them half done.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
