//! What a guard has.

use std::pin::pin;
use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep_until};

use crate::error::Error;
use crate::flows::renew::{self, Aim};
use crate::flows::{Context, dispatch, release};
use crate::ledger::{Grant, Hold, Usage};
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
        let node = context.router.route(usage.target().key()).node;
        let counts = node.acknowledger.is_none();
        let (hold, is_new) = Hold::enter(&mut usage, grant, counts, Instant::now());
        if is_new {
            let session = &node.session;
            // Beside a session that ended in this very moment.
            if let Some(reason) = session.ended() {
                hold.lose(reason);
            }
            if usage.options().renewed {
                context.watchdog.added();
            }
            // And beside one that began in this very moment, and has confirmed the holds it found.
            let present = session.attachment();
            if present.is_some_and(|present| !hold.counts_on(&present)) {
                let (runtime, hold) = (&context.runtime, Arc::clone(&hold));
                let context = Arc::clone(context);
                let confirming = async move { renew::confirm(&context, vec![hold], || true).await };
                runtime.spawn(confirming);
            }
        }
        let doubt = usage.doubt();
        let new = Self {
            context: Arc::clone(context),
            hold,
            usage: Some(usage),
        };
        if let Some(reason) = doubt {
            new.verify(reason);
        }
        new
    }

    /// The server has told of a loss, of this hold or of an earlier one of its owner.
    pub(crate) fn verify(&self, reason: LostReason) {
        let (context, lost) = (Arc::clone(&self.context), Arc::clone(&self.hold));
        let verifying = async move { dispatch::verify(&context, lost, reason).await };
        self.context.runtime.spawn(verifying);
    }

    /// The same once it is where it should be; without that it is given back.
    pub(crate) async fn acknowledged(self) -> Result<Self, Error> {
        let (router, hold) = (&self.context.router, &self.hold);
        let node = router.route(hold.target().key()).node;
        if node.acknowledger.is_some() {
            let renewed = renew::renew(router, hold, Aim::Lease, Hold::kept).await;
            renewed.map_err(Error::unacknowledged)?;
        }
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

/// Ends when one of these is lost; never, if there are none.
pub(crate) async fn lost<'a>(holds: impl Iterator<Item = &'a Arc<Hold>>) -> LostReason {
    let mut waiting: FuturesUnordered<_> = holds.map(|hold| until_lost(hold)).collect();
    match waiting.next().await {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}

/// Ends when it is lost, at the latest with its validity.
async fn until_lost(hold: &Hold) -> LostReason {
    loop {
        // Listens before it looks: what changes in between is heard.
        let mut changed = pin!(hold.changed.notified());
        changed.as_mut().enable();
        let end = hold.end();
        if let Some(reason) = hold.lost(Instant::now()) {
            return reason;
        }
        tokio::select! {
            () = sleep_until(end) => {}
            () = changed => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::HoldOptions;
    use crate::ledger::a_hold;
    use crate::ledger::{Acknowledgement, Renewal};
    use crate::time::Lease;
    use std::time::Duration;

    const LEASE: Duration = Duration::from_secs(10);
    const VALID: Duration = Duration::from_millis(9_898);

    fn hold() -> Arc<Hold> {
        let options = HoldOptions {
            lease: LEASE,
            renewed: true,
            max_hold: None,
        };
        a_hold(Instant::now(), options)
    }

    #[tokio::test(start_paused = true)]
    async fn lost_is_told_at_the_end_of_the_validity_and_not_before() {
        let start = Instant::now();
        let hold = hold();
        assert_eq!(lost([&hold].into_iter()).await, LostReason::Expired);
        // The timer counts in whole milliseconds.
        let told = start.elapsed();
        assert!(
            told >= VALID && told <= VALID + Duration::from_millis(1),
            "{told:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_confirmed_renewal_puts_the_loss_off() {
        let start = Instant::now();
        let hold = hold();
        let renewed = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            let lease = Lease {
                since: Instant::now(),
                length: LEASE,
            };
            let renewal = Renewal {
                lease,
                attachment: None,
                acknowledgement: Acknowledgement::Given,
            };
            assert_eq!(hold.renewed(true, &renewal, Instant::now()), Ok(()));
        };
        let (reason, ()) = tokio::join!(until_lost(&hold), renewed);
        assert_eq!(reason, LostReason::Expired);
        assert!(start.elapsed().saturating_sub(VALID) >= Duration::from_secs(5));
    }

    #[tokio::test(start_paused = true)]
    async fn the_servers_word_is_told_at_once() {
        let start = Instant::now();
        let (one, other) = (hold(), hold());
        let (reason, ()) = tokio::join!(lost([&one, &other].into_iter()), async {
            tokio::task::yield_now().await;
            other.lose(LostReason::Broken);
        });
        assert_eq!(reason, LostReason::Broken);
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
