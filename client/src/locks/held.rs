//! A guard's part in a hold, and the release.

use std::sync::{Arc, Weak};

use futures_util::stream::{FuturesUnordered, StreamExt};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::{Error, LostReason};
use crate::locks::table::Turn;
use crate::locks::{Context, Hold, SlotId, State};
use crate::trace;
use crate::wire::Target;
use crate::wire::reply::{read_by, read_released};
use crate::wire::{Manner, Outcome, Request, request};

/// The receiver of the outcome of a command, if a caller waits for it.
pub(super) type Report<T = ()> = Option<oneshot::Sender<Result<T, Error>>>;

/// Tells the outcome, once.
pub(super) fn tell<T>(report: &mut Report<T>, outcome: Result<T, Error>) {
    if let Some(report) = report.take() {
        // If the receiver is dropped, the caller no longer waits.
        let _ = report.send(outcome);
    }
}

/// The result of a call: one part for each name, in the order of the names.
pub(crate) type Helds = SmallVec<[Held; 1]>;

/// A guard's part in the hold of one lock, in any mode. Dropping it releases it.
pub(crate) struct Held {
    pub(crate) context: Arc<Context>,
    pub(crate) hold: Arc<Hold>,
    pub(super) slot: SlotId,
    is_given_back: bool,
    /// Whether a kept lock stays here when this is given back: not before its caller has it.
    pub(super) stays: bool,
}

impl Held {
    /// A part in a hold, which counts it as a guard already.
    pub(super) fn new(context: &Arc<Context>, hold: Arc<Hold>, slot: SlotId) -> Self {
        Self {
            context: Arc::clone(context),
            hold,
            slot,
            is_given_back: false,
            stays: false,
        }
    }

    /// Whether callers of this process wait for it, where it is kept.
    pub(crate) fn is_waited_for_here(&self) -> bool {
        let has_line = |state: &mut State| state.at(self.slot).is_some_and(|slot| slot.has_line());
        self.hold.target.owner.is_kept && self.context.table.with(has_line)
    }

    /// Gives it back at once, and tells how that went.
    pub(crate) fn release(mut self) -> impl Future<Output = Result<(), Error>> + use<> {
        let (lost, left) = self.give_back();
        let context = Arc::clone(&self.context);
        let answer = left.map(|left| {
            let (report, answer) = oneshot::channel();
            context.send_release(&left, self.slot, Some(report));
            answer
        });
        async move {
            let outcome = match (lost, answer) {
                (Some(reason), _) => Err(Error::lost(reason)),
                (None, Some(answer)) => answer.await.unwrap_or_else(|_| Err(Error::shut_down())),
                (None, None) => Ok(()),
            };
            // The client lives on until this is answered.
            drop(context);
            outcome
        }
    }

    /// Gives the part back. Returns the reason if the hold is lost, and the hold if the caller has
    /// to release it: that is for the last guard, unless the lock is kept for the next caller.
    fn give_back(&mut self) -> (Option<LostReason>, Option<Arc<Hold>>) {
        self.is_given_back = true;
        let (hold, slot) = (&self.hold, self.slot);
        let is_kept = hold.target.owner.is_kept;
        if is_kept && !self.stays {
            // As if another client wanted it, it is not kept.
            hold.is_wanted();
        }
        let lost = hold.lost(Instant::now());
        let (left, gone, are_many) = self.context.table.with(|state| {
            hold.loses_guard();
            // If the slot has another hold by now, this one is over, and there is nothing to send.
            let place = state.at(slot).filter(|place| place.has(hold));
            // A call that has the turn has not asked yet, and has the hold released first.
            let place = place.filter(|place| matches!(place.turn, None | Some(Turn::Used)));
            let left = place.is_some().then(|| state.pass_turn(slot)).flatten();
            // If nothing is sent since another thread has heard of a loss, that is told.
            let gone = left.is_none().then(|| hold.lost(Instant::now()));
            (left, gone.flatten(), state.are_many_idle())
        });
        if are_many {
            self.context.make_room();
        }
        (lost.or(gone), left)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.is_given_back
            && let (_, Some(left)) = self.give_back()
        {
            self.context.send_release(&left, self.slot, None);
        }
    }
}

impl Context {
    /// Ends a turn. A hold that must go back is released before the next turn begins.
    pub(super) fn pass_turn(self: &Arc<Self>, slot: SlotId) {
        self.release_after(slot, |state| state.pass_turn(slot));
    }

    /// Does something with a slot, and sends the release of the hold that goes back because of it.
    pub(super) fn release_after(
        self: &Arc<Self>,
        slot: SlotId,
        work: impl FnOnce(&mut State) -> Option<Arc<Hold>>,
    ) {
        let (left, are_many) = self
            .table
            .with(|state| (work(state), state.are_many_idle()));
        if let Some(left) = left {
            self.send_release(&left, slot, None);
        }
        if are_many {
            self.make_room();
        }
    }

    /// Gives holds back, whose releases have the turns.
    pub(super) fn release_all(self: &Arc<Self>, left: Vec<(Arc<Hold>, SlotId)>) {
        for (hold, slot) in left {
            self.send_release(&hold, slot, None);
        }
    }

    /// Gives a hold back, whose release has the turn.
    pub(super) fn send_release(self: &Arc<Self>, hold: &Hold, slot: SlotId, report: Report) {
        // Ends the task that watches a kept lock.
        hold.changed.notify_waiters();
        self.release_at(&hold.target, Some(hold.token), slot, report);
    }

    /// Sends the RELEASE, and passes the turn on when it is answered.
    pub(super) fn release_at(
        self: &Arc<Self>,
        target: &Target,
        token: Option<u64>,
        slot: SlotId,
        mut report: Report,
    ) {
        let context = Arc::downgrade(self);
        // Waited for by a client that shuts down, for as long as a reply may take.
        let mut pending = Some(self.background.pending.token());
        let mut span = Some(trace::release(target.shown(), &target.owner, target.mode));
        let then = move |outcome| {
            drop((pending.take(), span.take()));
            match outcome {
                Outcome::Overdue(error) => tell(&mut report, Err(error)),
                Outcome::Told(reply, sending) => {
                    if let Some(context) = Weak::upgrade(&context) {
                        context.pass_turn(slot);
                    }
                    let released = read_by(reply, read_released).and_then(|was_held| {
                        let lost = || Error::lost(LostReason::NotHeld);
                        // Sent again: an earlier copy may have released it. A loss is told by an
                        // event.
                        let is_again = sending.is_some_and(|sending| sending.again);
                        (was_held || is_again).then_some(()).ok_or_else(lost)
                    });
                    tell(&mut report, released);
                }
            }
        };
        let cmd = request::release(target, token);
        let request = Request::new(cmd, &target.name, Manner::Twice, then);
        self.router.home(&target.name).link.send(request);
    }
}

/// Ends when one of these is lost; never, if there are none.
pub(crate) async fn lost<'a>(holds: impl Iterator<Item = &'a Arc<Hold>>) -> LostReason {
    // At the latest with its validity.
    let until_lost = |hold: &'a Arc<Hold>| {
        let lost = || hold.lost(Instant::now()).ok_or_else(|| hold.end());
        hold.until(lost)
    };
    let mut waiting: FuturesUnordered<_> = holds.map(until_lost).collect();
    match waiting.next().await {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}
