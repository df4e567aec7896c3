//! A lock over several independent servers, and a store that refuses the late write of a former
//! holder.
//!
//! There is no single fencing token, since each server counts for itself. The store remembers the
//! largest token of each server and refuses a write with a smaller one: of two holders one after
//! the other, at least one server has granted the lock to both.
//!
//! `cargo run --example quorum [redis://127.0.0.1:7001 redis://127.0.0.1:7002 …]`, with the RLOCK
//! module in each server; three of them, or five.

#![allow(clippy::print_stdout, reason = "an example tells what it does")]

use std::collections::HashMap;
use std::error::Error;
use std::time::Duration;

use rlock_client::QuorumClient;

const LEASE: Duration = Duration::from_secs(1);

/// Remembers the largest token of each server, and takes no write with a smaller one.
struct Store {
    majority: usize,
    tokens: HashMap<String, u64>,
    text: String,
}

impl Store {
    fn write(&mut self, tokens: &[(String, u64)], text: &str) -> Result<(), String> {
        if tokens.len() < self.majority {
            return Err("the tokens of a majority are needed".to_owned());
        }
        for (server, token) in tokens {
            if let Some(known) = self.tokens.get(server)
                && token < known
            {
                return Err(format!("token {token} of {server} is older than {known}"));
            }
        }
        self.tokens.extend(tokens.iter().cloned());
        text.clone_into(&mut self.text);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let urls = urls();
    let mut store = Store {
        majority: urls.len().div_ceil(2),
        tokens: HashMap::new(),
        text: String::new(),
    };
    let client = QuorumClient::connect(&urls).await?;
    let lock = client.lock("example:quorum").lease(LEASE);

    let first = lock.lock().await?;
    store.write(&first.tokens(), "the first writer was here")?;
    match lock.try_lock().await {
        Ok(_) => return Err("two hold the lock".into()),
        Err(refusal) => println!("meanwhile: {refusal}"),
    }
    // The first writer stops here. The second tries until the lease has run out on a majority.
    let second = lock.lock().await?;
    store.write(&second.tokens(), "the second writer was here")?;

    println!("the first hears: {}", first.lost().await);
    match store.write(&first.tokens(), "the first writer again, too late") {
        Ok(()) => return Err("the store took a write of a lost lock".into()),
        Err(refusal) => println!("late write refused: {refusal}"),
    }
    second.unlock().await?;
    println!("the store says: {}", store.text);
    Ok(())
}

/// The servers: an odd number of them, three or more.
fn urls() -> Vec<String> {
    let given: Vec<_> = std::env::args().skip(1).collect();
    if given.is_empty() {
        let ports = [7001, 7002, 7003];
        return ports.map(|port| format!("redis://127.0.0.1:{port}")).into();
    }
    given
}
