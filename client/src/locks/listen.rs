//! Listening for other owners that wait for a held lock.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep, sleep_until};

use crate::error::Error;
use crate::locks::wanted::Next;
use crate::locks::{Aim, Context, Hold, renew};
use crate::{Backoff, task};

impl Hold {
    /// The server tells that it is wanted: all guards hear it.
    pub(crate) fn is_wanted(&self) {
        self.wanted.tell(1);
        self.changed.notify_waiters();
    }

    /// The same for a waiting or refused caller of this process.
    pub(crate) fn is_wanted_here(&self) {
        self.wanted.told_here.fetch_add(1, Ordering::Release);
        self.changed.notify_waiters();
    }
}

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
    // Reads each counter once: a report by another thread after this look ends the wait.
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

/// Sees to it that the server tells when it is wanted: a renewal asks it to, once.
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

/// Asks until the server answers or the guards are gone. Each renewal asks too, while a task
/// listens.
async fn ask_until_answered(context: Weak<Context>, hold: Weak<Hold>) {
    let mut backoff = Backoff::new();
    // In the pauses nothing is kept: the client may end with its last guard.
    while let (Some(context), Some(hold)) = (context.upgrade(), hold.upgrade()) {
        let is_over = !hold.has_guards() || hold.lost(Instant::now()).is_some();
        let told = hold.wanted.told();
        let outcome = if is_over {
            Some(None)
        } else {
            let asking = renew::ask(&context, &hold, Aim::Hold);
            drop(context);
            match asking.await {
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
        drop(hold);
        sleep(backoff.next()).await;
    }
}
