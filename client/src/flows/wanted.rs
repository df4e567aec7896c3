//! Hearing that a lock is wanted: the server is asked to tell, by a renewal, and does so once.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use futures_util::future::try_join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep, sleep_until};

use crate::background::task;
use crate::backoff::Backoff;
use crate::error::{Error, LostReason};
use crate::flows::{Aim, Context, renew};
use crate::ledger::{Hold, Next};
use crate::topology::Router;
use crate::wire::Mode;

/// Ends when one of these is wanted that were not `heard` of yet, or is lost.
pub(crate) async fn wanted<'a>(
    context: &Arc<Context>,
    holds: impl Iterator<Item = &'a Arc<Hold>> + Clone,
    heard: &AtomicU64,
) -> Result<(), Error> {
    let lost = holds.clone().find_map(|hold| hold.lost(Instant::now()));
    if let Some(reason) = lost {
        return Err(Error::lost(reason));
    }
    let told = || -> u64 { holds.clone().map(|hold| hold.wanted.heard()).sum() };
    // Each is looked at once: what is told after this look, by another thread, ends the wait.
    let mut known: u64 = 0;
    let mut waiting = FuturesUnordered::new();
    for hold in holds.clone() {
        hold.wanted.forgets_refusal();
        let told = hold.wanted.heard();
        known = known.saturating_add(told);
        waiting.push(until_wanted(context, hold, told));
    }
    // Told while nobody waited for it, or to another guard.
    if heard.swap(known, Ordering::Relaxed) < known {
        return Ok(());
    }
    let word = waiting.next().await;
    heard.store(told(), Ordering::Relaxed);
    // A guard has something.
    word.unwrap_or(Ok(()))
}

/// Ends when it was told more often than is known.
async fn until_wanted(context: &Arc<Context>, hold: &Arc<Hold>, known: u64) -> Result<(), Error> {
    loop {
        // Listens before it looks: what changes in between is heard.
        let mut changed = pin!(hold.changed.notified());
        changed.as_mut().enable();
        let end = hold.end();
        if let Some(reason) = hold.lost(Instant::now()) {
            return Err(Error::lost(reason));
        }
        if hold.wanted.heard() > known {
            return Ok(());
        }
        listen(context, hold)?;
        tokio::select! {
            () = sleep_until(end) => {}
            () = changed => {}
        }
    }
}

/// Sees to it that the server tells when it is wanted.
pub(super) fn listen(context: &Arc<Context>, hold: &Arc<Hold>) -> Result<(), Error> {
    match hold.wanted.next() {
        Next::Wait => Ok(()),
        // In a task of its own: whoever looks again and again, and never waits for long, would
        // otherwise ask again and again.
        Next::Ask => {
            let asking = ask_until_answered(Arc::downgrade(context), Arc::downgrade(hold));
            context.background.runtime.spawn(task(asking));
            Ok(())
        }
        Next::Fail(error) => Err(error),
    }
}

/// Asks until there is an answer, or nobody is left whom it concerns.
async fn ask_until_answered(context: Weak<Context>, hold: Weak<Hold>) {
    let mut backoff = Backoff::new();
    // In the pauses nothing is kept: the client may end with its last guard.
    while let (Some(context), Some(hold)) = (context.upgrade(), hold.upgrade()) {
        let is_over = !hold.has_guards() || hold.lost(Instant::now()).is_some();
        let told = hold.wanted.told();
        let outcome = if is_over {
            Some(None)
        } else {
            match ask(&context.router, &hold).await {
                Ok(()) => {
                    hold.wanted.agreed(told);
                    hold.changed.notify_waiters();
                    return;
                }
                Err(error) if error.is_unanswered() => None,
                Err(error) => Some(Some(error)),
            }
        };
        if let Some(error) = outcome {
            hold.wanted.failed(error);
            hold.changed.notify_waiters();
            return;
        }
        drop((context, hold));
        sleep(backoff.next()).await;
    }
}

/// Asks the server to tell. A renewal of one lock does so while its hold listens. One of several
/// cannot: each lock is asked about by itself, and of each its owner has one hold, whatever its
/// token.
async fn ask(router: &Router, hold: &Arc<Hold>) -> Result<(), Error> {
    if hold.target.mode != Mode::Several {
        return renew::renew(router, hold, Aim::Hold, Hold::kept).await;
    }
    let _turn = hold.renewing.lock().await;
    let lease = |now| hold.kept(now);
    let each = hold.target.names.iter().map(|name| async move {
        let one = hold.target.one(name);
        renew::ask(router, &one, None, (Aim::Hold, true), lease).await
    });
    let told = try_join_all(each).await?;
    if told.iter().all(|told| told.held) {
        return Ok(());
    }
    hold.lose(LostReason::NotHeld);
    Err(Error::lost(LostReason::NotHeld))
}
