//! Shards that are kept: two workers apply changes to shards of data, each mostly to its own, and
//! take the shard's lock for each change. Kept locks make that cheap: the server is asked only when
//! a shard changes hands.
//!
//! `cargo run --example shards [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "an example tells what it does"
)]

use std::collections::BTreeSet;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rlock_client::Client;
use tokio::task::yield_now;

const SHARDS: usize = 8;
const CHANGES: usize = 10_000;
/// One change in this many is to a shard of the other worker.
const FOREIGN: usize = 100;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How often each shard was changed. It has no lock of its own: two who change a shard at the same
/// time lose a change.
type Data = Arc<[AtomicU64; SHARDS]>;

#[tokio::main]
async fn main() -> Result<()> {
    let data = Data::default();
    // Two clients stand for two processes.
    let (left, right) = (
        Client::connect(&url()).await?,
        Client::connect(&url()).await?,
    );
    let left = tokio::spawn(work(left, 0, Arc::clone(&data)));
    let right = tokio::spawn(work(right, 1, Arc::clone(&data)));
    let grants = left.await?? + right.await??;
    let changes: u64 = data.iter().map(|of| of.load(Ordering::SeqCst)).sum();
    let lost = 2 * CHANGES - usize::try_from(changes)?;
    println!("{changes} changes, {lost} lost, and the server was asked for a lock {grants} times");
    Ok(())
}

/// Applies changes, and tells how often the server was asked for a lock.
async fn work(client: Client, worker: usize, data: Data) -> Result<usize> {
    let name = |shard| format!("example:shard:{shard}");
    let keep = |shard| client.lock(name(shard)).keep(Duration::from_secs(10));
    let shards: Vec<_> = (0..SHARDS).map(keep).collect();
    // Each grant of the server has a new token. A kept lock has the same token as before.
    let mut grants = BTreeSet::new();
    for change in 0..CHANGES {
        let is_foreign = change % FOREIGN == FOREIGN - 1;
        let owner = if is_foreign { 1 - worker } else { worker };
        let shard = change % (SHARDS / 2) * 2 + owner;
        let guard = shards[shard].lock().await?;
        grants.insert(guard.token());
        let before = data[shard].load(Ordering::SeqCst);
        yield_now().await;
        data[shard].store(before + 1, Ordering::SeqCst);
        guard.unlock().await?;
    }
    client.shutdown().await; // gives the kept locks back
    Ok(grants.len())
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
