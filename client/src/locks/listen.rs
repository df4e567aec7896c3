//! Listening for other owners that wait for a held lock: a renewal asks the server to tell, which
//! it does once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use crate::error::Error;
use crate::locks::{Aim, Context, Hold, renew};

impl Hold {
    /// The server tells that it is wanted: all guards hear it, and it is not kept here.
    pub(super) fn is_wanted(&self) {
        self.wanted.told.fetch_add(1, Ordering::Release);
        self.changed.notify_waiters();
    }

    /// The same for a waiting or refused caller of this process.
    pub(super) fn is_wanted_here(&self) {
        self.wanted.told_here.fetch_add(1, Ordering::Release);
        self.changed.notify_waiters();
    }

    /// Sees to it that the server tells when it is wanted.
    pub(super) fn listen(self: &Arc<Self>, context: &Arc<Context>) -> Result<(), Error> {
        if let Some(refused) = self.wanted.refusal() {
            return Err(refused);
        }
        if self.wanted.asks().is_none() {
            self.wanted.must_be_asked();
            renew::one(context, self, Aim::Hold);
        }
        Ok(())
    }
}

/// Ends when one of these is wanted that were not `heard` of yet, or is lost.
pub(crate) async fn wanted<'a>(
    context: &Arc<Context>,
    holds: impl Iterator<Item = &'a Arc<Hold>> + Clone,
    heard: &AtomicU64,
) -> Result<(), Error> {
    // Reads each counter once: a report by another thread after this look ends the wait.
    let mut known: u64 = 0;
    let mut waiting = FuturesUnordered::new();
    for hold in holds.clone() {
        if let Some(reason) = hold.lost(Instant::now()) {
            return Err(Error::lost(reason));
        }
        // An earlier one's, and perhaps that of another server.
        hold.wanted.refusal();
        let told = hold.wanted.heard();
        known = known.saturating_add(told);
        waiting.push(until_wanted(context, hold, told));
    }
    // Told while nobody waited for it, or to another guard.
    if heard.swap(known, Ordering::Relaxed) < known {
        return Ok(());
    }
    let word = waiting.next().await;
    let told = holds.map(|hold| hold.wanted.heard()).sum();
    heard.store(told, Ordering::Relaxed);
    // A guard has something.
    word.unwrap_or(Ok(()))
}

/// Ends when it was told more often than is known.
async fn until_wanted(context: &Arc<Context>, hold: &Arc<Hold>, known: u64) -> Result<(), Error> {
    hold.until(|| {
        if let Some(reason) = hold.lost(Instant::now()) {
            return Ok(Err(Error::lost(reason)));
        }
        if hold.wanted.heard() > known {
            return Ok(Ok(()));
        }
        let listens = hold.listen(context);
        listens.map_or_else(|error| Ok(Err(error)), |()| Err(hold.end()))
    })
    .await
}
