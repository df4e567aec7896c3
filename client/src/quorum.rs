//! The quorum lock: one lock over several servers that know nothing of each other.
//!
//! It is made of ordinary locks, one a server, and asks for no more than they promise: each
//! [`Guard`](crate::Guard) says "held" only while its server cannot have given the lock away. As
//! long as more than half of them say so nobody else can have more than half.

mod error;
pub use error::QuorumError;

mod majority; // the arithmetic
use majority::{Answers, done, doubt, majority, refusal, validity};

mod core;
pub use core::QuorumLock;
use core::{Core, Round};

mod parts; // what each server has granted
use parts::Parts;

mod guard;
pub use guard::QuorumGuard;

mod lock; // its verbs

mod client;
pub use client::{QuorumBuilder, QuorumClient};
