//! What a guard has.

use std::pin::pin;
use std::sync::Arc;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Instant, sleep_until};

use crate::flows::{Aim, Context, Kept, Report, dispatch, release, renew};
use crate::ledger::{Grant, Hold, Usage};
use crate::wire::Answer;
use crate::{Error, LostReason, task};

/// What a guard has, in whatever mode; dropping it gives it back.
pub(crate) struct Held {
    pub(crate) context: Arc<Context>,
    pub(crate) hold: Arc<Hold>,
    /// `None` once the hold has been given back.
    usage: Option<Usage>,
    /// Where it is kept for its next use, instead of being given back to the server.
    pub(super) kept: Option<Arc<Kept>>,
}

impl Held {
    pub(crate) fn new(context: &Arc<Context>, mut usage: Usage, grant: Grant) -> Self {
        let node = context.router.route(usage.target.key()).node;
        let counts = node.acknowledger.is_none();
        let now = Instant::now();
        let (hold, is_new) = Hold::enter(&mut usage, grant, counts, now);
        if is_new {
            let session = &node.session;
            if context.is_looked_after(&usage.options) {
                context.watchdog.added(now);
            }
            // Beside a session that was attached in this very moment, and has had the holds
            // confirmed that there were.
            let present = session.attachment();
            if present.is_some_and(|present| !Arc::ptr_eq(&present, &hold.attachment())) {
                let holds = vec![Arc::clone(&hold)];
                let confirming = renew::confirm(Arc::clone(context), holds, || true);
                context.background.runtime.spawn(task(confirming));
            }
        }
        if let Some(reason) = usage.doubt() {
            // Word of the loss came ahead of the answer: until the server has said so once more,
            // the next caller would be handed what another client may have by now.
            if hold.target.owner.is_kept() {
                hold.wanted.must_go_back();
            }
            let verifying = dispatch::verify(Arc::clone(context), Arc::clone(&hold), reason);
            context.background.runtime.spawn(task(verifying));
        }
        Self::of(context, hold, usage, None)
    }

    /// A guard's part in a hold that is there already.
    pub(super) fn of(
        context: &Arc<Context>,
        hold: Arc<Hold>,
        usage: Usage,
        kept: Option<Arc<Kept>>,
    ) -> Self {
        Self {
            context: Arc::clone(context),
            hold,
            usage: Some(usage),
            kept,
        }
    }

    /// Whether callers of this process wait for it, where it is kept.
    pub(crate) fn is_waited_for_here(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.has_line())
    }

    /// For another guard: nothing is given back.
    pub(super) fn into_usage(mut self) -> Option<Usage> {
        self.usage.take()
    }

    /// The same once it is where it should be; without that it is given back.
    pub(crate) async fn acknowledged(self) -> Result<Self, Error> {
        let (router, hold) = (&self.context.router, &self.hold);
        let node = router.route(hold.target.key()).node;
        if node.acknowledger.is_some() {
            let renewed = renew::renew(router, hold, Aim::Lease, Hold::kept).await;
            renewed.map_err(Error::unacknowledged)?;
        }
        Ok(self)
    }

    /// Gives it back at once, and tells how that went.
    pub(crate) fn release(&mut self) -> Answer<()> {
        let (report, outcome) = Answer::open();
        self.give_back(Some(report));
        outcome
    }

    fn give_back(&mut self, report: Report) {
        let usage = self.usage.take();
        let Some(usage) = usage else { return };
        let left = match self.kept.take() {
            Some(kept) => kept.put_back(&self.context, &self.hold, usage),
            None => Some(usage),
        };
        if let Some(mut usage) = left {
            usage.give_back();
            self.hold.loses_guard();
            release::start(&self.context, usage, Some(Arc::clone(&self.hold)), report);
        } else if let Some(report) = report {
            // Whoever asked has gone, if it hears nothing.
            let _ = report.send(Ok(()));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give_back(None);
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
    use crate::ledger::{HoldOptions, Renewal, a_hold};
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
                held: true,
                lease,
                attachment: None,
                acknowledged: Some(Ok(())),
            };
            assert_eq!(hold.renewed(&renewal, Instant::now()), Ok(()));
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
