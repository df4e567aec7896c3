//! Leader election: of several processes one leads at a time, and does what only one may do.
//!
//! The leader holds a lock, and the others wait for it in the server's queue. A leader that dies is
//! followed by the next after its grace, one that stands still at the end of its lease, and one
//! that resigns at once. The writes of a leader are guarded: a command of a former leader changes
//! nothing.
//!
//! In as many terminals as you like, with the RLOCK module in the server:
//! `cargo run --example leader redis://127.0.0.1:6379 ann`, then `bob`, then `cyd`. Each tells what
//! it believes, with the time in microseconds. Kill one, stop one (Ctrl-Z) and let it go on (`fg`),
//! or end one in good order (Ctrl-C).

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example tells what it does"
)]

use std::env;
use std::error::Error;
use std::process;
use std::time::{Duration, Instant, SystemTime};

use rlock_client::redis::cmd;
use rlock_client::{Client, Guard};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{sleep, timeout};

const NAME: &str = "{example}:leader";
const STEPS: &str = "{example}:steps";
/// A leader that dies is followed after this time, and one that hears nothing from the server for
/// as long leads no more.
const GRACE: Duration = Duration::from_millis(500);
/// A leader that stands still, with its connections open, is followed within this time.
const LEASE: Duration = Duration::from_secs(2);
/// A leader stays for at least this long before it hands over to a waiter.
const TERM: Duration = Duration::from_secs(1);
/// One piece of work.
const STEP: Duration = Duration::from_millis(20);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How leading has ended.
enum End {
    Lost,
    /// The term is over, and another waits.
    Moves,
    /// This process was told to end.
    Leaves,
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let url = arguments.next().or_else(|| env::var("RLOCK_URL").ok());
    let url = url.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    let name = arguments
        .next()
        .unwrap_or_else(|| process::id().to_string());
    // The label is what `rlock info` and `rlock sessions` show.
    let client = Client::builder().label(&name).grace(GRACE).lease(LEASE);
    let client = client.connect(&url).await?;
    candidate(&name, &client).await?;
    // When this ends, the server knows of the release.
    client.shutdown().await;
    Ok(())
}

/// Campaigns and leads, again and again, until the process is told to end.
async fn candidate(name: &str, client: &Client) -> Result<()> {
    let mut told_to_end = [
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    ];
    loop {
        let lock = client.lock(NAME);
        let guard = tokio::select! {
            guard = lock.lock() => guard, // the campaign: waits its turn
            // Dropped, the call leaves the queue.
            () = is_told(&mut told_to_end) => return Ok(()),
        };
        let guard = match guard {
            Err(error) if error.is_unavailable() || error.is_unknown() => {
                eprintln!("{name} campaigns once more: {error}");
                sleep(Duration::from_secs(1)).await;
                continue;
            }
            guard => guard?,
        };
        let end = tokio::select! {
            biased;
            // This does not ask the server, and ends before anybody else leads. The step that was
            // begun ends here, at its `await`.
            _reason = guard.lost() => End::Lost,
            end = lead(name, &guard, &mut told_to_end) => end?,
        };
        if matches!(end, End::Lost) {
            println!("{} {name} leads no more", micros());
            continue;
        }
        println!("{} {name} resigns", micros());
        // No step is under way any more. The next leads with the reply to this.
        if let Err(error) = guard.unlock().await {
            eprintln!("{name} had lost it, or does not know: {error}");
        }
        if matches!(end, End::Leaves) {
            return Ok(());
        }
    }
}

/// The work, in steps, and why there is no other one.
async fn lead(name: &str, guard: &Guard, told_to_end: &mut [Signal; 2]) -> Result<End> {
    let since = Instant::now();
    loop {
        // The time comes first. The guard speaks of that moment and of the present one, but after
        // that the process may be stopped for as long as you like before it comes to print.
        let at = micros();
        if guard.is_lost() {
            return Ok(End::Lost);
        }
        println!("{at} {name} leads, with token {}", guard.token());
        sleep(STEP).await;
        // Only the leader of this very term writes, however late the command arrives.
        let mut count = cmd("HINCRBY");
        match guard.call::<()>(count.arg(STEPS).arg(name).arg(1)).await {
            Err(error) if error.is_lost() => return Ok(End::Lost),
            // The step may or may not have been counted. The guard knows whether it still leads.
            Err(error) if error.is_unavailable() || error.is_unknown() => {}
            written => written?,
        }
        if timeout(Duration::ZERO, is_told(told_to_end)).await.is_ok() {
            return Ok(End::Leaves);
        }
        // A planned move: at the end of its term it resigns if another waits, and stays otherwise.
        // To look does not ask the server each time: it has been asked to tell.
        if since.elapsed() >= TERM
            && let Ok(wanted) = timeout(Duration::ZERO, guard.wanted()).await
        {
            return match wanted {
                Err(error) if error.is_lost() => Ok(End::Lost),
                wanted => Ok(wanted.map(|()| End::Moves)?),
            };
        }
    }
}

/// Ends when a signal tells this process to end.
async fn is_told([terminate, interrupt]: &mut [Signal; 2]) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// The time, on a clock that all processes of this machine share.
fn micros() -> u128 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_micros()
}
