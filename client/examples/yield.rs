//! A long job that yields at a safe point: between two chapters of an index it hands the lock to a
//! waiter, and queues for the rest.
//!
//! So others wait for a chapter at most, not for the whole book. While nobody waits, the index is
//! made without giving the lock back once.
//!
//! `cargo run --example yield [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    reason = "an example tells what it does"
)]

use std::error::Error;
use std::time::{Duration, Instant};

use rlock_client::Client;
use tokio::time::{sleep, timeout};

const CHAPTERS: u32 = 100;
const LOOKS: u32 = 3;
const NAME: &str = "example:index";

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    // Two clients stand for two processes.
    let (job, reader) = (
        Client::connect(&url()).await?,
        Client::connect(&url()).await?,
    );
    let indexing = tokio::spawn(index(job));
    for look in 1..=LOOKS {
        sleep(Duration::from_millis(50)).await;
        let asked = Instant::now();
        let guard = reader.lock(NAME).lock().await?;
        println!("reader: look {look} after {:?}", asked.elapsed());
        guard.unlock().await?;
    }
    let yielded = indexing.await??;
    println!("{CHAPTERS} chapters, and the lock was given away {yielded} times in between");
    Ok(())
}

/// Makes the whole index. How often it has given the lock away meanwhile.
async fn index(client: Client) -> Result<u32> {
    let lock = client.lock(NAME);
    let mut guard = lock.lock().await?;
    let mut yielded = 0;
    for _chapter in 0..CHAPTERS {
        sleep(Duration::from_millis(5)).await; // a chapter, with the lock throughout
        // Between two chapters all is in order. Does anybody wait? This does not ask the server:
        // it has been asked to tell.
        if let Ok(wanted) = timeout(Duration::ZERO, guard.wanted()).await {
            wanted?; // an error if the lock was lost
            yielded += 1;
            guard.unlock().await?;
            // Behind those who wait.
            guard = lock.lock().await?;
        }
    }
    guard.unlock().await?;
    Ok(yielded)
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
