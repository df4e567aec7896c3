//! The public API: how a lock is named, taken, held and given back.

mod client;
pub use client::Client;

mod builder;
pub use builder::ClientBuilder;

mod lock;
pub use lock::Lock;

mod rw_lock;
pub use rw_lock::RwLock;

mod multi;
pub use multi::MultiLock;

mod semaphore;
pub use semaphore::Semaphore;

mod scope;
pub use scope::Scope;

mod guard;
pub use guard::{Guard, MultiGuard, PermitsGuard, ReadGuard, WriteGuard};

pub mod mode;

// The options of a call for a lock of any kind.
mod acquire_options;
use acquire_options::AcquireOptions;

// The methods that these have in common, written once.
mod methods;
use methods::awaited;
pub(crate) use methods::{setters, verbs};
