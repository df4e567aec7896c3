//! The task behind a guard: takes in what is granted late, takes the lock again where it was lost,
//! and gives back the rest when it is lost as a whole.
//!
//! It does not renew: each server's hold is renewed by the watchdog of that server's client.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::api::Guard;
use crate::error::Error;
use crate::quorum::lock::QuorumLock;
use crate::quorum::parts::Parts;
use crate::quorum::round::Round;

/// Looks after a hold until it is lost, or the task is aborted with the guard.
pub(crate) async fn keep(
    parts: Arc<Parts>,
    lock: QuorumLock,
    mut round: Round<Result<Guard, Error>>,
) {
    let start = Instant::now();
    let first = start.checked_add(RETAKE_EVERY).unwrap_or(start);
    let mut retake = interval_at(first, RETAKE_EVERY);
    retake.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let lost = parts.until_lost();
    tokio::pin!(lost);
    loop {
        tokio::select! {
            _ = &mut lost => return,
            Some((server, answer)) = round.next() => drop(parts.join(server, answer)),
            _ = retake.tick(), if lock.is_renewed() => ask_again(&parts, &lock, &mut round),
        }
    }
}

/// Asks the servers where nothing is held.
fn ask_again(parts: &Parts, lock: &QuorumLock, round: &mut Round<Result<Guard, Error>>) {
    let (missing, longest) = parts.missing();
    let members = lock.core().members.iter().enumerate();
    for (server, member) in members.filter(|(server, _)| missing.contains(server)) {
        if !round.waits_for(server) {
            round.ask(server, lock.take(member, longest));
        }
    }
}

/// Servers that come back are found within this time: fewer may then fail before it comes to a
/// loss. Where a server is known to be down, nothing is sent.
const RETAKE_EVERY: Duration = Duration::from_secs(1);
