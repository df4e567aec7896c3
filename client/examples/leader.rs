//! Leader election: of three candidates one leads at a time, and does what only one may do.
//!
//! Who leads holds a lock, and the others wait for it in the server's queue. A leader that dies, or
//! loses touch with the server, is followed by the next in milliseconds after its grace; one that
//! resigns at once. What it writes is guarded: a command of a former leader changes nothing.
//!
//! `cargo run --example leader [redis://127.0.0.1:6379]`, with the RLOCK module in the server.

#![allow(
    clippy::print_stdout,
    clippy::arithmetic_side_effects,
    reason = "an example tells what it does"
)]

use std::error::Error;
use std::time::{Duration, Instant};

use rlock_client::redis::cmd;
use rlock_client::{Client, Guard};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

const NAME: &str = "{example}:leader";
const LOG: &str = "{example}:log";
/// For so long a leader stays before it hands over to whoever waits.
const TERM: Duration = Duration::from_millis(200);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let mut candidates = JoinSet::new();
    // Three clients stand for three processes. The label is what `rlock info` shows.
    for name in ["ann", "bob", "cyd"] {
        let client = Client::builder().label(name).connect(&url()).await?;
        candidates.spawn(candidate(name, client));
    }
    while let Some(ended) = candidates.join_next().await {
        ended??;
    }
    let client = Client::connect(&url()).await?;
    let guard = client.lock(NAME).lock().await?;
    let log: Vec<String> = guard.call(cmd("LRANGE").arg(LOG).arg(0).arg(-1)).await?;
    guard.call::<()>(cmd("DEL").arg(LOG)).await?;
    guard.unlock().await?;
    let mut terms = log;
    terms.dedup();
    println!("{} terms, one after the other", terms.len());
    Ok(())
}

/// Campaigns, leads for a term, resigns and ends.
async fn candidate(name: &str, client: Client) -> Result<()> {
    loop {
        let guard = client.lock(NAME).lock().await?; // the campaign: waits its turn
        println!("{name} leads, with token {}", guard.token());
        let resigned = tokio::select! {
            // This does not ask the server, and ends before anybody else leads.
            reason = guard.lost() => {
                println!("{name} leads no more: {reason}");
                false
            }
            outcome = lead(name, &guard) => outcome?,
        };
        if resigned {
            // What was begun has been ended by now. The next leads with the reply to this.
            guard.unlock().await?;
            client.shutdown().await;
            return Ok(());
        }
    }
}

/// The work, in steps. Whether the term is over: false if leadership was lost under a step.
async fn lead(name: &str, guard: &Guard) -> Result<bool> {
    let since = Instant::now();
    loop {
        sleep(Duration::from_millis(20)).await;
        // Only the leader of this very term writes, however late the command arrives.
        match guard.call::<()>(cmd("RPUSH").arg(LOG).arg(name)).await {
            Err(error) if error.is_lost() => return Ok(false),
            written => written?,
        }
        // A planned move: at the end of its term it resigns if another waits, and stays otherwise.
        // To look does not ask the server: it has been asked to tell.
        if let Ok(wanted) = timeout(Duration::ZERO, guard.wanted()).await
            && since.elapsed() >= TERM
        {
            return Ok(wanted.is_ok()); // not if leadership was lost
        }
        // The last one has nobody to hand over to.
        if since.elapsed() >= TERM * 2 {
            return Ok(true);
        }
    }
}

fn url() -> String {
    let given = std::env::args()
        .nth(1)
        .or_else(|| std::env::var("RLOCK_URL").ok());
    given.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned())
}
