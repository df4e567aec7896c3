//! A list of prices that many read and one changes: read-write lock, and downgrade.
//!
//! Two prices must always add up to 100. Readers look at one and then at the other, together with
//! each other; the writer changes both, and then reads on without letting another writer in.
//!
//! `cargo run --example prices [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    reason = "an example tells what it does"
)]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use rlock_client::Client;

const READERS: u64 = 10;
const CHANGES: u64 = 10;
const LOCK: &str = "example:prices";
const TEA: &str = "example:prices:tea";
const CAKE: &str = "example:prices:cake";
const SUM: u64 = 100;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = url();
    let client = Client::connect(&url).await?;
    let mut store = redis::Client::open(url)?
        .get_multiplexed_async_connection()
        .await?;
    let _: () = store.mset(&[(TEA, SUM), (CAKE, 0)]).await?;

    let inside = Arc::new(AtomicU64::new(0));
    let readers: Vec<_> = (0..READERS)
        .map(|_| tokio::spawn(read(client.clone(), store.clone(), Arc::clone(&inside))))
        .collect();
    for change in 1..=CHANGES {
        let guard = client.rw_lock(LOCK).write().await?;
        let _: () = store.set(TEA, SUM - change).await?;
        let _: () = store.set(CAKE, change).await?;
        // From now on others may read as well, but no other writer changes the prices.
        let guard = guard.downgrade().await?;
        let cake: u64 = store.get(CAKE).await?;
        if cake != change {
            return Err("somebody wrote in between".into());
        }
        guard.unlock().await?;
    }
    let mut most = 0;
    for reader in readers {
        most = most.max(reader.await??);
    }
    println!("{CHANGES} changes, and no reader saw half of one");
    println!("up to {most} of {READERS} readers at a time");
    Ok(())
}

/// Looks at both prices again and again until all changes are made: how many looked at a time.
async fn read(
    client: Client,
    mut store: MultiplexedConnection,
    inside: Arc<AtomicU64>,
) -> Result<u64> {
    let mut most = 0;
    loop {
        let guard = client.rw_lock(LOCK).read().await?;
        most = most.max(inside.fetch_add(1, Ordering::SeqCst) + 1);
        let tea: u64 = store.get(TEA).await?;
        tokio::time::sleep(Duration::from_millis(2)).await;
        let cake: u64 = store.get(CAKE).await?;
        inside.fetch_sub(1, Ordering::SeqCst);
        guard.unlock().await?;
        if tea + cake != SUM {
            return Err(format!("{tea} and {cake} do not belong together").into());
        }
        if cake == CHANGES {
            return Ok(most);
        }
    }
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
