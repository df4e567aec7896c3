//! Forty exports in a fleet of processes, five at a time in all of them together: a semaphore.
//!
//! Half of them are large and take two permits. The small ones cannot keep them waiting for ever,
//! because no caller passes an earlier one. In the middle the limit is raised for all.
//!
//! `cargo run --example exports [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    reason = "an example tells what it does"
)]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rlock_client::Client;

const EXPORTS: u32 = 40;
const AT_A_TIME: u32 = 5;
const RAISED: u32 = 8;
const NAME: &str = "example:exports";

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How many permits are in use, and the most that ever were.
#[derive(Default)]
struct Running {
    now: AtomicU32,
    most: AtomicU32,
}

#[tokio::main]
async fn main() -> Result<()> {
    // Two clients stand for two processes.
    let fleet = [
        Client::connect(&url()).await?,
        Client::connect(&url()).await?,
    ];
    fleet[0].set_limit(NAME, AT_A_TIME).await?;
    let running = Arc::new(Running::default());
    let exports: Vec<_> = (0..EXPORTS)
        .zip(fleet.iter().cycle())
        .map(|(number, client)| {
            let size = 1 + number % 2;
            tokio::spawn(export(client.clone(), size, Arc::clone(&running)))
        })
        .collect();
    for (number, export) in exports.into_iter().enumerate() {
        export.await??;
        if number == 20 {
            let most = running.most.load(Ordering::SeqCst);
            if most > AT_A_TIME {
                return Err(format!("{most} at a time").into());
            }
            fleet[1].set_limit(NAME, RAISED).await?;
        }
    }
    let most = running.most.load(Ordering::SeqCst);
    fleet[0].set_limit(NAME, None).await?;
    if most > RAISED {
        return Err(format!("{most} at a time").into());
    }
    println!("{EXPORTS} exports, never more than the limit at a time");
    Ok(())
}

async fn export(client: Client, size: u32, running: Arc<Running>) -> Result<()> {
    // The limit is the one that `set_limit` has set; without one, name a limit here.
    let permits = client.semaphore(NAME, None).acquire_many(size).await?;
    let now = running.now.fetch_add(size, Ordering::SeqCst) + size;
    running.most.fetch_max(now, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(5)).await; // the work
    running.now.fetch_sub(size, Ordering::SeqCst);
    permits.unlock().await?;
    Ok(())
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
