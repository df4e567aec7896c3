//! A guard's part in a hold, and the release.

use std::pin::pin;
use std::sync::{Arc, Weak};

use futures_util::stream::{FuturesUnordered, StreamExt};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::error::{Error, LostReason};
use crate::locks::report::{Report, tell};
use crate::locks::table::Turn;
use crate::locks::{Context, Hold, SlotId, Target};
use crate::topology::Node;
use crate::trace;
use crate::wire::reply::{read_by, read_released};
use crate::wire::{Manner, Outcome, Request, request};

/// The result of a call: one part for each name, in the order of the names.
pub(crate) type Helds = SmallVec<[Held; 1]>;

/// Where a lock stays for its next use, instead of being given back to the server.
pub(super) trait Keeps: Send + Sync {
    /// Whether callers of this process wait for it.
    fn has_line(&self) -> bool;

    /// A guard gives the lock back: whether it stays here.
    fn put_back(self: Arc<Self>, held: &mut Held) -> bool;

    /// The lock has been given back to the server.
    fn went_back(self: Arc<Self>, context: &Context, hold: &Arc<Hold>);
}

/// A guard's part in the hold of one lock, in any mode. Dropping it releases it.
pub(crate) struct Held {
    pub(crate) context: Arc<Context>,
    pub(crate) hold: Arc<Hold>,
    slot: SlotId,
    /// Nobody has it any more, or another guard has.
    is_given_back: bool,
    /// Where it is kept, if it is.
    pub(super) kept: Option<Arc<dyn Keeps>>,
}

impl Held {
    /// A part in a hold, which counts it as a guard already.
    pub(super) fn new(context: &Arc<Context>, hold: Arc<Hold>, slot: SlotId) -> Self {
        Self {
            context: Arc::clone(context),
            hold,
            slot,
            is_given_back: false,
            kept: None,
        }
    }

    /// The same, handed to the next guard by the one before.
    pub(super) fn hand_over(&mut self) -> Self {
        self.is_given_back = true;
        Self::new(&self.context, Arc::clone(&self.hold), self.slot)
    }

    /// Whether callers of this process wait for it, where it is kept.
    pub(crate) fn is_waited_for_here(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.has_line())
    }

    /// Gives it back at once, and tells how that went.
    pub(crate) fn release(&mut self) -> impl Future<Output = Result<(), Error>> + use<> {
        let (report, outcome) = oneshot::channel();
        self.give_back(Some(report));
        async { outcome.await.unwrap_or_else(|_| Err(Error::shut_down())) }
    }

    fn give_back(&mut self, report: Report) {
        if self.is_given_back {
            return;
        }
        let kept = self.kept.take();
        if let Some(kept) = &kept
            && Arc::clone(kept).put_back(self)
        {
            return tell(report, Ok(()));
        }
        self.is_given_back = true;
        self.context.release(&self.hold, self.slot, report);
        if let Some(kept) = kept {
            kept.went_back(&self.context, &self.hold);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give_back(None);
    }
}

impl Context {
    /// A guard gives its part back; the last one gives the hold back.
    fn release(self: &Arc<Self>, hold: &Arc<Hold>, slot: SlotId, mut report: Report) {
        let lost = hold.lost(Instant::now());
        let sends = self.table.with(|state| {
            let is_last = hold.loses_guard();
            let place = state.at(slot).filter(|_| is_last)?;
            // If the slot has another hold by now, this one is over, and there is nothing to send.
            place.hold.take_if(|one| Arc::ptr_eq(one, hold))?;
            if hold.is_gone() {
                state.tidy(slot);
                return None;
            }
            if place.turn.is_none() {
                state.take_turn(slot, Turn::Leaving);
                return Some(Some(slot));
            }
            // The call that has the turn has not asked yet. It waits for the answer to this RELEASE
            // first.
            place.left = Some(Arc::clone(hold));
            Some(None)
        });
        // Ends the task that watches a kept lock.
        hold.changed.notify_waiters();
        if let Some(reason) = lost {
            tell(report.take(), Err(Error::lost(reason)));
        }
        let Some(slot) = sends else {
            return tell(report, Ok(()));
        };
        let node = self.router.home(&hold.target.name);
        self.send_release(&node, &hold.target, Some(hold.token), slot, report);
    }

    /// Ends a turn. A hold that was left at the slot is released before the next turn begins.
    pub(super) fn pass_turn(self: &Arc<Self>, slot: SlotId) {
        let left = self.table.with(|state| {
            let left = state.at(slot).and_then(|slot| slot.left.take());
            let left = left.filter(|left| !left.is_gone());
            match &left {
                Some(_) => state.take_turn(slot, Turn::Leaving),
                None => state.pass_turn(slot),
            }
            left
        });
        if let Some(left) = left {
            let node = self.router.home(&left.target.name);
            self.send_release(&node, &left.target, Some(left.token), Some(slot), None);
        }
    }

    /// Gives back a hold that is lost here, and waits until the server has nothing of it any more.
    pub(super) async fn release_lost(self: &Arc<Self>, hold: &Arc<Hold>) -> Result<(), Error> {
        let (report, outcome) = oneshot::channel();
        let node = self.router.home(&hold.target.name);
        // Its guards must not say otherwise any more, whatever is confirmed meanwhile.
        hold.lost(Instant::now());
        self.send_release(&node, &hold.target, Some(hold.token), None, Some(report));
        let released = outcome.await.unwrap_or_else(|_| Err(Error::shut_down()));
        if released.as_ref().err().is_none_or(Error::is_lost) {
            hold.mark_gone(LostReason::NotHeld);
        }
        released
    }

    /// Sends the RELEASE, and passes the turn on when it is answered, if it has one.
    pub(super) fn send_release(
        self: &Arc<Self>,
        node: &Node,
        target: &Target,
        token: Option<u64>,
        slot: Option<SlotId>,
        mut report: Report,
    ) {
        let context = Arc::downgrade(self);
        // Waited for by a client that shuts down, for as long as a reply may take.
        let mut pending = Some(self.background.pending.token());
        let mut span = Some(trace::release(
            String::from_utf8_lossy(&target.name),
            &target.owner,
            target.mode,
        ));
        let then = Box::new(move |outcome| {
            drop((pending.take(), span.take()));
            match outcome {
                Outcome::Overdue(error) => tell(report.take(), Err(error)),
                Outcome::Told(reply, sending) => {
                    let context = Weak::upgrade(&context);
                    if let Some((context, slot)) = context.zip(slot) {
                        context.table.with(|state| state.pass_turn(slot));
                    }
                    let released = read_by(reply, read_released).and_then(|was_held| {
                        let lost = || Error::lost(LostReason::NotHeld);
                        // Without a turn of its own: the call that has the turn may have released
                        // the hold first. Sent again: an earlier copy may have. A loss is told by
                        // an event.
                        let is_again = sending.is_some_and(|sending| sending.again);
                        let is_done = was_held || slot.is_none() || is_again;
                        is_done.then_some(()).ok_or_else(lost)
                    });
                    tell(report.take(), released);
                }
            }
        });
        let cmd = request::release(target.subject(), token);
        node.link
            .send(Request::new(cmd, &target.name, Manner::Twice, then));
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
