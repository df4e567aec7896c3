//! An RLOCK server in memory, for tests without a Redis.
//!
//! A [`Server`] decides with the very code that runs in the module, over a map of keys instead of a
//! keyspace, and `rlock-client` speaks to it as to any other server, over links in memory. Time is
//! tokio's paused clock: a lease of 30 s ends as soon as nothing else has work left. And it has
//! switches for faults that are hard to produce with a real server: a link that is cut in one
//! direction, a server that stands still or loses its keys, a clock that is set back, a replica
//! that is promoted before it has all that its primary has granted.
//!
//! # Examples
//!
//! ```
//! use std::time::Duration;
//!
//! rlock_test::run(1, async |network| {
//!     let server = network.server("locks:6379");
//!     let host = network.host();
//!     let client = rlock_client::Client::builder()
//!         .dial(host.dial())
//!         .connect("redis://locks:6379")
//!         .await?;
//!
//!     let guard = client.lock("orders").lock().await?;
//!     // Somebody deletes the lock: the guard says so, and the program can be seen to stop.
//!     server.delete("orders");
//!     let reason = guard.lost().await;
//!     assert_eq!(reason, rlock_client::LostReason::Deleted);
//!     Ok::<_, rlock_client::Error>(())
//! })
//! # .unwrap(); // as any test does
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

use rlock_client::Client;

mod chance;
mod commands;
mod courier;
mod engine;
mod keyspace;
mod life;
mod moments;
mod network;
mod resp;
mod sentinel;
mod server;
mod wire;

pub use engine::Guarded;
pub use moments::{ConnectionId, Moment};
pub use network::{CutOne, Direction, Host, KEEPALIVE, Network};
pub use sentinel::Sentinel;
pub use server::{Cluster, Contents, Resharding, Server, Stats};

/// Runs a test with one server and a client that is connected to it: all that most tests need. Its
/// clock stands still under `#[tokio::test(start_paused = true)]`, and jumps as with [`run`].
///
/// ```
/// # fn with_paused_clock(test: impl Future<Output = ()>) {
/// #     let mut runtime = tokio::runtime::Builder::new_current_thread();
/// #     runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
/// # }
/// // #[tokio::test(start_paused = true)]
/// async fn a_job_whose_lock_is_broken_stops() {
///     rlock_test::with_server(async |server, client| {
///         let guard = client.lock("orders").lock().await.unwrap();
///         server.break_lock("orders");
///         assert_eq!(guard.lost().await, rlock_client::LostReason::Broken);
///     })
///     .await;
/// }
/// # with_paused_clock(a_job_whose_lock_is_broken_stops());
/// ```
///
/// # Panics
/// If the client cannot connect, which no server in memory refuses.
pub async fn with_server<T>(test: impl AsyncFnOnce(Server, Client) -> T) -> T {
    const SEED: u64 = 1;
    rlock_client::test_util::seed_chance(SEED);
    let local = tokio::task::LocalSet::new();
    let work = async {
        let network = Network::new(SEED);
        let server = network.server("locks:6379");
        let client = Client::builder().dial(network.host().dial());
        let client = client.connect("redis://locks:6379").await;
        #[expect(clippy::expect_used, reason = "a test that cannot begin has failed")]
        let client = client.expect("a server in memory is there at once");
        test(server, client).await
    };
    local.run_until(work).await
}

/// Runs a test on one thread, with a clock that stands still while there is something to do and
/// jumps to the next thing when there is not.
///
/// The seed decides every random choice of clients, servers and links. tokio's own random choices,
/// such as which of several waiting tasks is woken first, follow from it only with `--cfg
/// tokio_unstable`: then the same seed has the same course of events.
///
/// # Panics
/// If the runtime cannot be made.
pub fn run<T>(seed: u64, test: impl AsyncFnOnce(Network) -> T) -> T {
    rlock_client::test_util::seed_chance(seed);
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true);
    #[cfg(tokio_unstable)]
    runtime.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
    let runtime = runtime.build();
    #[expect(clippy::expect_used, reason = "a test that cannot begin has failed")]
    let runtime = runtime.expect("a runtime without I/O needs nothing that could be missing");
    let local = tokio::task::LocalSet::new();
    // A client's own tasks may cause local tasks to be started: see `Network::observe`.
    let _entered = local.enter();
    local.block_on(&runtime, async { test(Network::new(seed)).await })
}
