//! A store that refuses old tokens: safe even from a holder that does not know it has lost.
//!
//! The first writer takes the lock, stops for longer than its lease (a long garbage collection, a
//! suspended machine) and then writes without looking. By then the second has had the lock and
//! written, with a larger token. The store refuses the late write.
//!
//! `cargo run --example fencing [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(clippy::print_stdout, reason = "an example tells what it does")]

use std::error::Error;
use std::time::Duration;

use rlock_client::Client;

const LEASE: Duration = Duration::from_millis(300);

/// Remembers the largest token it has seen, and takes no write with a smaller one.
#[derive(Default)]
struct Store {
    token: u64,
    text: String,
}

impl Store {
    fn write(&mut self, token: u64, text: &str) -> Result<(), String> {
        if token < self.token {
            return Err(format!("token {token} is older than {}", self.token));
        }
        self.token = token;
        text.clone_into(&mut self.text);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let client = Client::connect(&url()).await?;
    let lock = client.lock("example:fencing").lease(LEASE);
    let mut store = Store::default();

    let first = lock.lock().await?;
    store.write(first.token(), "the first writer was here")?;
    // The first writer stops here. The second waits in the queue until the lease has run out.
    let second = lock.lock().await?;
    store.write(second.token(), "the second writer was here")?;

    match store.write(first.token(), "the first writer again, too late") {
        Ok(()) => return Err("the store took a write of a lost lock".into()),
        Err(refusal) => println!("late write refused: {refusal}"),
    }
    if !first.is_lost() || store.text != "the second writer was here" {
        return Err("the first writer should have lost the lock".into());
    }
    println!("the store holds what the second writer wrote");
    Ok(())
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
