//! The harness of the integration tests: real servers, in temporary directories, on free ports.
//!
//! ```no_run
//! use rlock_tests::Server;
//!
//! let server = Server::start();
//! let mut alice = server.connect();
//! let (count, token) = alice.run("RLOCK.ACQUIRE stock alice 30000").held();
//! let mut bob = server.wait_in_queue("stock", "bob"); // blocked in the server, seen there
//! assert_eq!(alice.run("RLOCK.RELEASE stock alice"), 0);
//! assert!(bob.read().held().1 > token);
//! # let _ = count;
//! ```
//!
//! - [`Server`]: one server; dies with the value, prints its log when the test fails
//! - [`Conn`]: one connection, bytes in and [`Reply`] out; `send` and `read` apart for what blocks
//! - [`Pair`], [`Cluster`]: a primary with its replica, and a cluster of two
//! - [`Sentinels`], [`Shards`]: a pair that three sentinels watch, and a cluster with replicas
//! - [`Certificates`]: servers that speak TLS
//! - [`Feed`], [`aof`]: the exact commands that a server sends to replicas and writes to disk
//! - [`eventually()`]: wait until, with a deadline; no test sleeps and hopes
//! - [`on_time()`]: how late something is, on a machine that is busy at any time
//! - [`Random`]: chance that a seed replays
//! - [`Version`]: what the server at hand can do
//!
//! Environment: `RLOCK_SERVER` (path of the server, else `redis-server`), `RLOCK_MODULE` (path of
//! the module, else the one that cargo built beside the test), `RLOCK_VALGRIND=1` (the servers run
//! under valgrind, and must end without an error).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::print_stderr,
    clippy::missing_panics_doc,
    reason = "a harness that meets the unexpected should fail the test, loudly and there"
)]

pub mod scripts;

mod certificates;
mod conn;
mod eventually;
mod feed;
mod nodes_file;
mod proxy;
mod random;
mod reply;
mod server;
mod topology;
mod version;

pub use certificates::Certificates;
pub use conn::Conn;
pub use eventually::{eventually, on_time, patience, until};
pub use feed::{Feed, aof};
pub use proxy::Proxy;
pub use random::Random;
pub use reply::{Event, Reply};
pub use server::{Builder, Server, compile, module_path, under_valgrind};
pub use topology::{Cluster, Pair, Resharding, Sentinels, Shards, Trio, cut_off, in_sync, slot_of};
pub use version::Version;
