//! What a guard has.

use std::sync::Arc;

use crate::error::Error;
use crate::flows::{Context, acknowledge, dispatch, release, renew};
use crate::ledger::entries;
use crate::ledger::hold::{Grant, Hold};
use crate::ledger::usage::Usage;
use crate::lost_reason::LostReason;

/// What a guard has, in whatever mode; dropping it gives it back.
pub(crate) struct Held {
    pub(crate) context: Arc<Context>,
    pub(crate) hold: Arc<Hold>,
    /// `None` once the hold has been given back.
    usage: Option<Usage>,
}

impl Held {
    pub(crate) fn new(context: &Arc<Context>, mut usage: Usage, grant: Grant) -> Self {
        usage.is_guards(true);
        let target = usage.target();
        if grant.fresh {
            entries::supersede(target, grant.token);
        }
        let granted = Hold::new(&usage, grant);
        let node = context.router.route(target.key()).node;
        let hold = target.share(Arc::clone(&granted), node.acknowledger.is_none());
        if Arc::ptr_eq(&hold, &granted) {
            entries::keep(&hold);
            // Beside a life-line that ended in this very moment.
            if let Some(reason) = context.router.route(target.key()).node.session.ended() {
                hold.lose(reason);
            }
            if usage.options().renewed {
                context.watchdog.added();
            }
            // And beside one that began in this very moment, and has confirmed the holds it found.
            let present = context.router.route(target.key()).node.session.attachment();
            if present.is_some_and(|present| !hold.counts_on(&present)) {
                let (runtime, hold) = (&context.runtime, Arc::clone(&hold));
                let context = Arc::clone(context);
                let confirming = async move { renew::confirm(&context, vec![hold], || true).await };
                runtime.spawn(confirming);
            }
        }
        Self {
            context: Arc::clone(context),
            hold,
            usage: Some(usage),
        }
    }

    pub(crate) fn lose(&self, reason: LostReason) {
        self.hold.lose(reason);
    }

    /// The server has told of a loss, of this hold or of an earlier one of its owner.
    pub(crate) fn verify(&self, reason: LostReason) {
        let (context, lost) = (Arc::clone(&self.context), Arc::clone(&self.hold));
        let verifying = async move { dispatch::verify(&context, vec![(lost, reason)]).await };
        self.context.runtime.spawn(verifying);
    }

    /// The same once it is where it should be; without that it is given back.
    pub(crate) async fn acknowledged(self) -> Result<Self, Error> {
        acknowledge::acknowledged(&self.context.router, &self.hold).await?;
        Ok(self)
    }

    /// Gives it back at once, and tells how that went.
    pub(crate) fn release(&mut self) -> impl Future<Output = Result<(), Error>> + 'static {
        let usage = self.take_claim();
        let outcome =
            usage.map(|usage| release::told(&self.context, usage, Arc::clone(&self.hold)));
        async move {
            match outcome {
                Some(outcome) => outcome.await.unwrap_or_else(|_| Err(Error::no_runtime())),
                None => Ok(()),
            }
        }
    }

    /// To give it back.
    fn take_claim(&mut self) -> Option<Usage> {
        let mut usage = self.usage.take()?;
        usage.is_guards(false);
        Some(usage)
    }

    pub(crate) fn names(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.hold.target().names().iter().map(|name| &**name)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(usage) = self.take_claim() {
            release::in_background(&self.context, usage, Some(Arc::clone(&self.hold)));
        }
    }
}
