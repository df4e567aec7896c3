//! Work that takes longer than the lease: the watchdog renews it, and nobody else gets in.
//!
//! `cargo run --example watchdog [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    reason = "an example tells what it does"
)]

use std::error::Error;
use std::time::Duration;

use rlock_client::Client;

const LEASE: Duration = Duration::from_millis(600);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = url();
    let worker = Client::builder().lease(LEASE).connect(&url).await?;
    let rival = Client::connect(&url).await?;

    let guard = worker.lock("example:watchdog").lock().await?;
    println!(
        "{} holds the lock, with a lease of {LEASE:?}",
        guard.owner()
    );
    for tenth in 1..=10 {
        tokio::time::sleep(LEASE / 3).await; // the work
        match rival.lock("example:watchdog").try_lock().await {
            Ok(_) => return Err("somebody else got in".into()),
            Err(refusal) if refusal.is_not_acquired() => println!("{tenth}0 %, rival: {refusal}"),
            Err(error) => return Err(error.into()),
        }
    }
    if guard.is_lost() {
        return Err("the lock was lost".into());
    }
    guard.unlock().await?;

    rival
        .lock("example:watchdog")
        .try_lock()
        .await?
        .unlock()
        .await?;
    println!("held for more than three leases, then given back");
    Ok(())
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
