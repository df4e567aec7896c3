//! Philosophers around a table, with a fork between each two: a philosopher needs both neighbouring
//! forks to eat.
//!
//! If each took its left fork and waited for the right one, all could starve. Here each takes both
//! at once, so a waiting philosopher holds no fork, and all are fed.
//!
//! `cargo run --example philosophers [redis://127.0.0.1:6379]`, with the RLOCK module in the
//! server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    reason = "an example tells what it does"
)]

use std::error::Error;
use std::time::Duration;

use rlock_client::Client;

const SEATS: usize = 5;
const MEALS: usize = 10;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::connect(&url()).await?;
    let table: Vec<_> = (0..SEATS)
        .map(|seat| tokio::spawn(dine(client.clone(), seat)))
        .collect();
    let mut meals = 0;
    for philosopher in table {
        meals += philosopher.await??;
    }
    println!("{SEATS} philosophers had {meals} meals");
    Ok(())
}

/// Eats at this seat until it is full: how often.
async fn dine(client: Client, seat: usize) -> Result<usize> {
    let [left, right] = [seat, (seat + 1) % SEATS].map(|fork| format!("example:fork:{fork}"));
    let forks = client.multi([left, right]);
    for _ in 0..MEALS {
        let both = forks.lock().await?;
        tokio::time::sleep(Duration::from_millis(1)).await; // the meal
        both.unlock().await?;
    }
    Ok(MEALS)
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
