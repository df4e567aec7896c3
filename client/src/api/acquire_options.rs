//! Who takes a lock, and on what terms: what can be said of a lock of any kind before it is taken.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::api::guard::{Guard, MultiGuard};
use crate::error::Error;
use crate::flows::acquire::{self, Request, WaitMode};
use crate::flows::{Context, lost};
use crate::ledger::{HoldOptions, Owner};
use crate::time::{part, whole_millis};
use crate::wire::request::Mode;

#[derive(Clone)]
pub(crate) struct AcquireOptions {
    context: Arc<Context>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) owner: Option<Owner>,
}

impl AcquireOptions {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            lease: None,
            max_hold: None,
            owner: None,
        }
    }

    /// The guard must be of the mode.
    pub(crate) async fn take<M>(
        &self,
        mode: Mode,
        names: &[Arc<[u8]>],
        wait_mode: WaitMode,
    ) -> Result<Guard<M>, Error> {
        let owner = self.owner.clone().unwrap_or_else(|| self.context.owner());
        self.take_for(&owner, mode, names, wait_mode).await
    }

    /// As [`take`](Self::take), for this owner: the one that was named, or one that was minted for
    /// this call and is nobody else's.
    async fn take_for<M>(
        &self,
        owner: &Owner,
        mode: Mode,
        names: &[Arc<[u8]>],
        wait_mode: WaitMode,
    ) -> Result<Guard<M>, Error> {
        let request = Request {
            context: Arc::clone(&self.context),
            target: owner.target(&self.context.ledger, mode, names),
            options: self.hold_options(),
            wait_mode,
            own: self.owner.is_none(),
        };
        // All that this future owns is the receiving end. If it is dropped here, the attempt sees
        // that and undoes what it has begun; what is in the channel already is dropped with it.
        let held = acquire::start(request).await;
        held.unwrap_or_else(|_| Err(Error::no_runtime()))
            .map(Guard::new)
    }

    /// Several locks; in a cluster part by part, if they are in several slots.
    ///
    /// Everybody takes the parts in the same order, so those who do nothing else cannot wait for
    /// each other in a circle. What has been taken is kept while the rest is waited for, and given
    /// back if that fails, or if this future is dropped: the guards of the parts are in it.
    pub(crate) async fn take_several(
        &self,
        names: &Arc<[Arc<[u8]>]>,
        wait_mode: WaitMode,
    ) -> Result<MultiGuard, Error> {
        let parts = self.context.router.parts(names);
        if let [_] = parts.as_slice() {
            return self.take(Mode::Several, names, wait_mode).await;
        }
        let owner = self.owner.clone().unwrap_or_else(|| self.context.owner());
        let mut taken: Vec<MultiGuard> = Vec::with_capacity(parts.len());
        if let Err(error) = self.take_parts(&owner, parts, wait_mode, &mut taken).await {
            self.give_back(names, taken, wait_mode).await;
            return Err(error);
        }
        Ok(Guard::whole(names, taken))
    }

    async fn take_parts(
        &self,
        owner: &Owner,
        parts: Vec<Arc<[Arc<[u8]>]>>,
        wait_mode: WaitMode,
        taken: &mut Vec<MultiGuard>,
    ) -> Result<(), Error> {
        for part in parts {
            let next = self.take_for(owner, Mode::Several, &part, wait_mode);
            let next = tokio::select! {
                next = next => next?,
                error = self.keep(taken) => return Err(error),
            };
            taken.push(next);
        }
        // The lease begins with the last of the grants.
        if let Some((_, waited)) = taken.split_last().filter(|_| self.lease.is_some()) {
            renew_all(waited).await?;
        }
        match taken.iter().find_map(MultiGuard::lost_already) {
            Some(reason) => Err(Error::lost(reason)),
            None => Ok(()),
        }
    }

    /// Gives back what was taken before the caller hears that the rest cannot be had: what it does
    /// next may count on that. A server that does not answer is not waited for beyond the time at
    /// which the call has to return; the background goes on.
    async fn give_back(
        &self,
        names: &Arc<[Arc<[u8]>]>,
        taken: Vec<MultiGuard>,
        wait_mode: WaitMode,
    ) {
        if taken.is_empty() {
            return;
        }
        let deadline = match wait_mode {
            WaitMode::Until(deadline) => deadline,
            WaitMode::None | WaitMode::Forever => Instant::now(),
        };
        let Some(at_the_latest) = deadline.checked_add(self.context.router.response_timeout) else {
            return;
        };
        // That a part was lost meanwhile changes nothing for the caller.
        let _ = timeout_at(at_the_latest, Guard::whole(names, taken).unlock()).await;
    }

    /// Keeps what has been taken while the rest is waited for: ends when that does not work.
    /// Without a lease of its own the watchdog renews it.
    async fn keep(&self, taken: &[MultiGuard]) -> Error {
        loop {
            let pause = self
                .lease
                .map(|_| part(self.hold_options().lease, KEEP_PARTS));
            let pause = async {
                match pause {
                    Some(pause) => sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                reason = lost(taken.iter().map(Guard::hold)) => return Error::lost(reason),
                () = pause => {}
            }
            // The lease goes on; that it has ended, if so it is, is heard above.
            let _ = renew_all(taken).await;
        }
    }

    fn hold_options(&self) -> HoldOptions {
        let lease = whole_millis(self.lease.unwrap_or(self.context.lease));
        let max_hold = self.max_hold.or(self.context.max_hold).map(whole_millis);
        HoldOptions {
            lease: max_hold.map_or(lease, |longest| lease.min(longest)),
            renewed: self.lease.is_none(),
            max_hold,
        }
    }
}

async fn renew_all(guards: &[MultiGuard]) -> Result<(), Error> {
    for guard in guards {
        guard.renew().await?;
    }
    Ok(())
}

/// A lease is renewed so often while locks of other nodes are waited for.
const KEEP_PARTS: u32 = 3;
