//! The quorum lock: one lock over several servers that know nothing of each other.
//!
//! It is made of ordinary locks, one a server, and asks for no more than they promise: each
//! [`Guard`](crate::Guard) says "held" only while its server cannot have given the lock away. As
//! long as more than half of them say so nobody else can have more than half.

mod client;
pub use client::{QuorumBuilder, QuorumClient};

mod lock;
pub use lock::QuorumLock;

mod guard;
pub use guard::QuorumGuard;

mod error;
pub use error::QuorumError;

// Behind the scenes.
mod keeper; // the task that looks after them
mod majority; // the arithmetic
mod member; // one of the servers
mod parts; // the holds behind a guard
mod pause; // between two tries
mod round; // all of them asked at once
