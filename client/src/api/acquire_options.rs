//! The locks that a call takes, their owner, and the terms.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, timeout_at};

use crate::Owner;
use crate::api::Guard;
use crate::locks::Helds;
use crate::locks::acquire::acquire;
use crate::locks::{Handle, HoldOptions, KeptKey, LINK_FIRST, Request};
use crate::wire::{Mode, WaitMode};
use crate::{Error, MILLIS_MAX, part, whole_millis, within};

#[derive(Clone)]
pub(crate) struct AcquireOptions {
    pub(crate) context: Arc<Handle>,
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
        self.check()?;
        let kept = self.kept_key();
        if let Some(held) = kept.as_ref().and_then(|key| self.context.take_idle(key)) {
            // Without this, a task that only takes a kept lock again and again would block the
            // other tasks of its thread, and so never hear that the lock is wanted.
            consume_budget().await;
            return Ok(Guard::of(smallvec![held]));
        }
        let owner = self.owner.clone();
        let mut owner = owner.unwrap_or_else(|| self.context.owner());
        owner.is_kept = kept.is_some();
        let request = Request {
            owner,
            names: self.names.clone(),
            mode,
            options: self.hold_options(),
            wait_mode,
            kept: kept.map(Arc::new),
        };
        let parts = self.context.router.parts(&self.names);
        if parts.len() > 1 {
            // Most calls do not come here, and their futures need not have the room for it.
            return Box::pin(self.take_parts(request, parts)).await;
        }
        let helds = acquire(&self.context, request).await?;
        let mut guard = Guard::of(Helds::new());
        guard.add(helds, &self.names);
        Ok(guard)
    }

    /// Refuses values out of their bounds, also where the owner's first guard has settled the
    /// options.
    fn check(&self) -> Result<(), Error> {
        for (setting, time) in [
            ("lease", self.lease),
            ("max_hold", self.max_hold),
            ("keep", self.kept_for),
        ] {
            let checked = time.map_or(Ok(()), |time| within(setting, time, MILLIS_MAX));
            checked.map_err(Error::refused)?;
        }
        Err(Error::refused(match &self.owner {
            _ if self.names.is_empty() => "several locks at once need a name",
            // It would be entered beside the guard that has it then.
            Some(owner) if owner.is_kept => {
                "the owner is that of a kept lock, which others use next"
            }
            Some(_) if self.kept_for.is_some() => {
                "a lock is kept for whoever comes next here, or has an owner: not both"
            }
            _ => return Ok(()),
        }))
    }

    fn kept_key(&self) -> Option<KeptKey> {
        Some(KeptKey {
            idle: self.kept_for?,
            name: self.names.first().cloned()?,
            options: self.hold_options(),
        })
    }

    /// Takes the names of one slot after the other, in the order in which everybody does.
    async fn take_parts<M>(
        &self,
        request: Request,
        parts: Vec<Arc<[Arc<[u8]>]>>,
    ) -> Result<Guard<M>, Error> {
        let mut taken: Guard<M> = Guard::of(Helds::new());
        // A server that does not answer is not waited for beyond the time at which the call has to
        // return; the background goes on.
        let response_timeout = self.context.router.response_timeout;
        let limit = match request.wait_mode {
            WaitMode::Until(deadline) => deadline.checked_add(response_timeout),
            WaitMode::None => Instant::now().checked_add(response_timeout),
            WaitMode::Forever => None,
        };
        // One for all parts: if each part began a new one, quick parts would put off the renewal
        // for ever.
        let mut pace = interval(part(request.options.lease, KEEP_PARTS));
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        pace.reset();
        let rest = async {
            for part in parts {
                let part = Request {
                    names: part.iter().cloned().collect(),
                    ..request.clone()
                };
                let next = tokio::select! {
                    next = acquire(&self.context, part) => next?,
                    error = self.keep(&taken, &mut pace) => return Err(error),
                };
                taken.add(next, &self.names);
            }
            if self.lease.is_some() {
                // The lease begins with the last of the grants.
                let renewed = match limit {
                    Some(limit) => timeout_at(limit, taken.renew()).await,
                    None => Ok(taken.renew().await),
                };
                renewed.unwrap_or_else(|_| Err(Error::no_reply()))?;
            }
            taken.still_held()
        };
        // Parts that wait have one end; each of those that do not would have a response timeout of
        // its own.
        let end = limit.filter(|_| !request.wait_mode.waits());
        let end = end.and_then(|limit| limit.checked_add(LINK_FIRST));
        let told = match end {
            Some(end) => timeout_at(end, rest).await,
            None => Ok(rest.await),
        };
        let Err(error) = told.unwrap_or_else(|_| Err(Error::no_reply())) else {
            return Ok(taken);
        };
        // Release the parts before the call fails: the caller's next step may count on that.
        // If there is no time left, those of nodes that answer at once.
        let now = Instant::now();
        let at_least = now.checked_add(LINK_FIRST);
        let limit = limit
            .or_else(|| now.checked_add(response_timeout))
            .max(at_least);
        if let Some(at_the_latest) = limit {
            // If a part was lost meanwhile, nothing changes for the caller.
            let _ = timeout_at(at_the_latest, taken.unlock()).await;
        }
        Err(error)
    }

    /// Keeps the taken parts while the call waits for the rest. Ends when one of them is lost. The
    /// watchdog renews parts without a lease of their own.
    async fn keep<M>(&self, taken: &Guard<M>, pace: &mut Interval) -> Error {
        loop {
            tokio::select! {
                reason = taken.lost() => return Error::lost(reason),
                // If the lease has ended, that is heard above.
                _ = pace.tick(), if self.lease.is_some() => drop(taken.renew().await),
            }
        }
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
