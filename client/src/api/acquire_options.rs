//! The locks that a call takes, their owner, and the terms.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, timeout_at};

use crate::api::Guard;
use crate::locks::Helds;
use crate::locks::acquire::acquire;
use crate::locks::{Context, HoldOptions, Keeper, KeptKey, Owner, Request};
use crate::wire::{Mode, WaitMode};
use crate::{Error, MILLIS_MAX, part, whole_millis, within};

#[derive(Clone)]
pub(crate) struct AcquireOptions {
    pub(crate) context: Arc<Context>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) names: SmallVec<[Arc<[u8]>; 1]>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) owner: Option<Owner>,
    /// For how long it is kept after its use.
    pub(crate) kept_for: Option<Duration>,
}

impl AcquireOptions {
    /// The first name, and the only one unless several locks are taken at once.
    pub(crate) fn name(&self) -> &[u8] {
        self.names.first().map_or(&[], |name| name)
    }

    /// Takes the lock; `mode` must be that of the guard.
    ///
    /// If the future is dropped, all that it has begun is undone.
    pub(crate) async fn take<M>(&self, mode: Mode, wait_mode: WaitMode) -> Result<Guard<M>, Error> {
        if let Some(idle) = self.kept_for {
            return self.take_kept(idle, wait_mode).await;
        }
        self.check()?;
        let parts = match self.names.as_slice() {
            [] => return Err(Error::refused("several locks at once need a name")),
            [_] => Vec::new(),
            names => self.context.router.parts(names),
        };
        let owner = self.owner.clone().unwrap_or_else(|| self.context.owner());
        if parts.len() > 1 {
            // Most calls do not come here, and their futures need not have the room for it.
            return Box::pin(self.take_parts(&owner, mode, parts, wait_mode)).await;
        }
        let taken = self.take_part(&owner, mode, &self.names, wait_mode).await;
        taken.map(Guard::of)
    }

    /// Refuses values out of their bounds, also where the owner's first guard has settled the
    /// options.
    fn check(&self) -> Result<(), Error> {
        let max_hold = self
            .max_hold
            .map_or(Ok(()), |longest| within("max_hold", longest, MILLIS_MAX));
        let lease = self
            .lease
            .map_or(Ok(()), |lease| within("lease", lease, MILLIS_MAX));
        lease.and(max_hold).map_err(Error::refused)?;
        // It would be entered beside the guard that has it then.
        if self.owner.as_ref().is_some_and(Owner::is_kept) {
            return Err(Error::refused(
                "the owner is that of a kept lock, which others use next",
            ));
        }
        Ok(())
    }

    /// Takes a lock that is kept for its next use here.
    async fn take_kept<M>(&self, idle: Duration, wait_mode: WaitMode) -> Result<Guard<M>, Error> {
        within("keep", idle, MILLIS_MAX).map_err(Error::refused)?;
        self.check()?;
        if self.owner.is_some() {
            let both = "a lock is kept for whoever comes next here, or has an owner: not both";
            return Err(Error::refused(both));
        }
        if self.context.background.closing.is_cancelled() {
            return Err(Error::shut_down());
        }
        let kept = self.keeper.lock(KeptKey {
            name: self.names.first().cloned().unwrap_or_default(),
            options: self.hold_options(),
            idle,
        });
        if let Some(held) = kept.take_now() {
            // Without this, a task that only takes a kept lock again and again would block the
            // other tasks of its thread, and so never hear that the lock is wanted.
            consume_budget().await;
            return Ok(Guard::of(smallvec![held]));
        }
        // As above.
        let taken = Box::pin(kept.take(&self.context, wait_mode)).await;
        taken.map(|held| Guard::of(smallvec![held]))
    }

    async fn take_part(
        &self,
        owner: &Owner,
        mode: Mode,
        names: &[Arc<[u8]>],
        wait_mode: WaitMode,
    ) -> Result<Helds, Error> {
        let request = Request {
            owner: owner.clone(),
            names: names.iter().cloned().collect(),
            mode,
            options: self.hold_options(),
            wait_mode,
            was_held_up: false,
        };
        acquire(&self.context, request).await
    }

    /// Takes the names of one slot after the other, in the order in which everybody does.
    async fn take_parts<M>(
        &self,
        owner: &Owner,
        mode: Mode,
        parts: Vec<Arc<[Arc<[u8]>]>>,
        wait_mode: WaitMode,
    ) -> Result<Guard<M>, Error> {
        let mut parts = parts.into_iter();
        let first = parts.next().unwrap_or_default();
        let first = self.take_part(owner, mode, &first, wait_mode).await?;
        let mut taken: Guard<M> = Guard::of(first);
        // A server that does not answer is not waited for beyond the time at which the call has to
        // return; the background goes on.
        let response_timeout = self.context.router.response_timeout;
        let limit = match wait_mode {
            WaitMode::Until(deadline) => deadline.checked_add(response_timeout),
            WaitMode::None | WaitMode::Forever => None,
        };
        // One deadline for all parts: if each part began a new one, quick parts would put off the
        // renewal for ever.
        let mut renew_at = self.renewal_after(Instant::now());
        let rest = async {
            while let Some(part) = parts.next() {
                let next = tokio::select! {
                    next = self.take_part(owner, mode, &part, wait_mode) => next?,
                    error = self.keep(&taken, &mut renew_at) => return Err(error),
                };
                // The lease begins with the last of the grants.
                let begins_anew = parts.len() == 0 && self.lease.is_some();
                let renewed = match limit {
                    _ if !begins_anew => Ok(Ok(())),
                    Some(limit) => timeout_at(limit, taken.renew()).await,
                    None => Ok(taken.renew().await),
                };
                taken.add(next, &self.names);
                renewed.unwrap_or_else(|_| Err(Error::no_reply(None)))?;
            }
            taken.still_held()
        };
        let rest = rest.await;
        let Err(error) = rest else { return Ok(taken) };
        // Release the parts before the call fails: the caller's next step may count on that.
        let limit = limit.or_else(|| Instant::now().checked_add(response_timeout));
        if let Some(at_the_latest) = limit {
            // If a part was lost meanwhile, nothing changes for the caller.
            let _ = timeout_at(at_the_latest, taken.unlock()).await;
        }
        Err(error)
    }

    /// Keeps the taken parts while the call waits for the rest. Ends when one of them is lost.
    async fn keep<M>(&self, taken: &Guard<M>, renew_at: &mut Option<Instant>) -> Error {
        while let Some(at) = *renew_at {
            if let Ok(reason) = timeout_at(at, taken.lost()).await {
                return Error::lost(reason);
            }
            *renew_at = self.renewal_after(Instant::now());
            // The lease goes on; that it has ended, if so it is, is heard above.
            let _ = taken.renew().await;
        }
        Error::lost(taken.lost().await)
    }

    /// The next renewal of a part that has a lease of its own. Without one the watchdog renews it.
    fn renewal_after(&self, now: Instant) -> Option<Instant> {
        let lease = self.lease.map(|_| self.hold_options().lease)?;
        now.checked_add(part(lease, KEEP_PARTS))
    }

    fn hold_options(&self) -> HoldOptions {
        let settings = &self.context.settings;
        let lease = whole_millis(self.lease.unwrap_or(settings.lease));
        let max_hold = self.max_hold.or(settings.max_hold).map(whole_millis);
        HoldOptions {
            lease: max_hold.map_or(lease, |longest| lease.min(longest)),
            renewed: self.lease.is_none(),
            max_hold,
        }
    }
}

impl fmt::Debug for AcquireOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names.iter().map(|name| String::from_utf8_lossy(name));
        f.debug_struct("AcquireOptions")
            .field("names", &names.collect::<Vec<_>>())
            .field("lease", &self.lease)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

/// Parts are renewed this many times in a lease, while the call waits for locks of other nodes.
const KEEP_PARTS: u32 = 3;
