//! A stock of 90, and 100 customers who want one each: read, decrement, write, under the lock.
//!
//! Without the lock two of them would read the same number and sell the same piece. With it exactly
//! 90 are served, 10 are refused, and the stock ends at 0. The customers read and write through
//! their guards: the server looks at the lock and runs the command in one step, so not even a
//! customer that was suspended for longer than its lease could write an outdated number.
//!
//! `cargo run --example stock [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    reason = "an example tells what it does"
)]

use std::error::Error;

use redis::{AsyncCommands, cmd};
use rlock_client::Client;

const STOCK: i64 = 90;
const CUSTOMERS: i64 = 100;
const KEY: &str = "example:stock";

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = url();
    let client = Client::connect(&url).await?;
    let mut store = redis::Client::open(url)?
        .get_multiplexed_async_connection()
        .await?;
    let _: () = store.set(KEY, STOCK).await?;

    let customers: Vec<_> = (0..CUSTOMERS)
        .map(|_| tokio::spawn(buy(client.clone())))
        .collect();
    let (mut sold, mut refused) = (0, 0);
    for customer in customers {
        let bought = customer.await??;
        sold += i64::from(bought);
        refused += i64::from(!bought);
    }

    let left: i64 = store.get(KEY).await?;
    println!("sold {sold}, refused {refused}, left {left}");
    if (sold, refused, left) != (STOCK, CUSTOMERS - STOCK, 0) {
        return Err("the lock did not keep the customers apart".into());
    }
    Ok(())
}

/// Buys one piece: whether there was one.
async fn buy(client: Client) -> Result<bool> {
    let guard = client.lock("example:stock:lock").lock().await?;
    let left: i64 = guard.call(cmd("GET").arg(KEY)).await?;
    if left > 0 {
        let _: () = guard.call(cmd("SET").arg(KEY).arg(left - 1)).await?;
    }
    guard.unlock().await?;
    Ok(left > 0)
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
