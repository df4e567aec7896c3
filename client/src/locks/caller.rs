//! A caller's way to its locks: it takes its turn at each, has former holds released or confirmed,
//! and begins its call. One command at a time is under way for an owner, a name and a mode. A kept
//! lock has one owner for all callers of the process, so they have it one after the other.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::task::coop::{consume_budget, unconstrained};
use tokio::time::{Instant, sleep_until};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::locks::table::{NamedSlots, Outlook, Turn};
use crate::locks::{Aim, Call, CallId, Context, Held, Helds, Hold, Phase, Request, SlotId, renew};
use crate::metrics;
use crate::wire::WaitMode;

/// A caller that takes locks. Dropping it undoes all that it has begun.
pub(super) struct Caller {
    context: Arc<Context>,
    request: Request,
    /// It is its turn at each of these, or not yet.
    slots: NamedSlots,
    /// Where it waits in line, if it does.
    line: Option<(SlotId, u64)>,
    /// The call, once it has asked the server.
    call: Option<CallId>,
    since: Instant,
    /// Whether it had to wait for its turn.
    has_waited: bool,
    /// Whether it has waited behind a wait in the server's queue, or a guard of a kept lock. The
    /// server was there then, and an outage since does not end the call.
    was_held_up: bool,
}

/// A place in a line: its number, and word of the turn.
type InLine = (u64, oneshot::Receiver<()>);

/// The next step of a caller, at its turn.
enum Step {
    Held(Helds),
    Ask(CallId, oneshot::Receiver<Result<Helds, Error>>),
    /// This must be released first.
    Release(SlotId, Arc<Hold>, InLine),
    /// This must be confirmed first.
    Confirm(Arc<Hold>),
}

impl Caller {
    pub(super) fn new(context: &Arc<Context>, request: Request) -> Self {
        Self {
            context: Arc::clone(context),
            request,
            slots: NamedSlots::new(),
            line: None,
            call: None,
            since: Instant::now(),
            has_waited: false,
            was_held_up: false,
        }
    }

    /// Takes the locks. The server's own word comes first; without one this ends a response timeout
    /// after the caller's time is up, however often it had to ask.
    pub(super) async fn take(mut self) -> Result<Helds, Error> {
        let (closing, waits) = (self.context.background.closing.clone(), self.waits());
        let since = self.since;
        let limit = self
            .context
            .router
            .response_timeout
            .saturating_add(LINK_FIRST);
        let limit = self.deadline().and_then(|time| time.checked_add(limit));
        // Whatever its task has done before, the first poll gives it its place.
        let helds = unconstrained(async {
            tokio::select! {
                biased;
                helds = self.helds() => helds,
                () = closing.cancelled(), if waits => Err(Error::shut_down()),
                () = sleep_until(limit.unwrap_or(since)), if limit.is_some() => {
                    Err(self.no_answer())
                }
            }
        })
        .await;
        // Without this, a task that does nothing else would starve the others of its thread.
        consume_budget().await;
        if waits && (self.call.is_some() || self.has_waited) {
            metrics::waited(since);
        }
        helds
    }

    fn waits(&self) -> bool {
        self.request.wait_mode.waits()
    }

    /// When it waits behind others no longer; at once, if it does not wait.
    fn deadline(&self) -> Option<Instant> {
        match self.request.wait_mode {
            WaitMode::None => Some(self.since),
            WaitMode::Until(deadline) => Some(deadline),
            WaitMode::Forever => None,
        }
    }

    /// The time is up, and the server's own word has not come.
    fn no_answer(&self) -> Error {
        let Some(id) = self.call else {
            return self.busy();
        };
        let may_be_held = self.context.table.with(|state| {
            let call = state.call(id);
            call.is_none_or(|call| call.was_queued || matches!(call.phase, Phase::Asking))
        });
        if may_be_held {
            return Error::no_reply(None);
        }
        // The server refused all commands that were sent, and the reason has not passed.
        let trouble = self.context.router.trouble();
        trouble.unwrap_or_else(Error::not_attached)
    }

    fn busy(&self) -> Error {
        let busy = "an earlier command of this owner is not answered";
        let trouble = self.context.router.trouble();
        trouble.unwrap_or_else(|| Error::unavailable(busy))
    }

    /// Takes part in what the owner holds, and asks for the rest.
    ///
    /// It takes the turn at each slot, in the order of the names. All calls use this order, so two
    /// calls for several locks never wait for each other's turns in a circle.
    async fn helds(&mut self) -> Result<Helds, Error> {
        let mut names = self.request.names.clone();
        names.sort_unstable();
        for name in names {
            self.enter(name).await?;
        }
        loop {
            match self.step() {
                Step::Held(helds) => return Ok(helds),
                Step::Ask(id, answer) => {
                    self.call = Some(id);
                    self.context.ask(id, None);
                    let span = self.request.span();
                    let helds = answer.await.unwrap_or_else(|_| Err(Error::shut_down()));
                    span.waited(self.since);
                    return helds;
                }
                Step::Release(slot, hold, place) => {
                    // Its guards must not say otherwise, whatever is confirmed meanwhile.
                    hold.lost(Instant::now());
                    self.context.send_release(&hold, slot, None);
                    self.wait(slot, place).await?;
                }
                Step::Confirm(hold) => match renew::ask(&self.context, &hold, Aim::Hold).await {
                    Err(error) if !error.is_lost() => return Err(error),
                    _ => {}
                },
            }
        }
    }

    /// Takes the turn, or waits for it in line.
    async fn enter(&mut self, name: Arc<[u8]>) -> Result<(), Error> {
        let (target, until, waits) = (self.request.target(&name), self.deadline(), self.waits());
        let (slot, used, place) = self.context.table.with(|state| {
            let slot = match &self.request.kept {
                None => state.slot(&target),
                Some(key) => {
                    let (slot, owner) = state.kept_slot(key, &target);
                    self.request.owner = owner;
                    slot
                }
            };
            let Outlook { turn, used, lasts } = state.outlook(slot);
            let place = match turn {
                None => {
                    state.take_turn(slot, Turn::Next(NOT_IN_LINE));
                    Ok(None)
                }
                Some(_) if !waits && lasts => Err(refused(used.as_ref())),
                Some(_) => Ok(Some(state.line_up(slot, until, false))),
            };
            (slot, used, place)
        });
        if let Some(hold) = used {
            hold.is_wanted_here();
        }
        let place = place?;
        self.slots.push((name, slot));
        match place {
            Some(place) => self.wait(slot, place).await,
            None => Ok(()),
        }
    }

    /// Waits for the turn. Behind a call in the server's queue, or a use of a kept lock, it waits
    /// as long as its own caller would; behind any other command, no longer than a reply may take.
    async fn wait(&mut self, slot: SlotId, (number, mut told): InLine) -> Result<(), Error> {
        (self.line, self.has_waited) = (Some((slot, number)), true);
        let context = Arc::clone(&self.context);
        let (mut seen, mut look_at) = (None, Instant::now());
        loop {
            let now = Instant::now();
            let Outlook { turn, lasts, used } = context.table.with(|state| state.outlook(slot));
            self.was_held_up |= lasts;
            // A call that waits for its turn at another lock may take as long.
            let goes_on = lasts || matches!(turn, Some(Turn::Next(_)));
            let later = self.deadline().filter(|deadline| *deadline > now);
            let is_late = later.is_none() && self.deadline().is_some();
            if is_late && goes_on && seen.is_some() {
                return Err(refused(used.as_ref()));
            }
            if look_at <= now {
                if seen == turn && !goes_on && !self.was_held_up {
                    return Err(self.busy());
                }
                seen = turn;
                look_at = now
                    .checked_add(context.router.response_timeout)
                    .unwrap_or(now);
            }
            tokio::select! {
                biased;
                told = &mut told => {
                    // The turn before goes on for longer, and the caller's time is up.
                    told.map_err(|_| refused(None))?;
                    self.line = None;
                    return Ok(());
                }
                () = sleep_until(later.map_or(look_at, |later| later.min(look_at))) => {}
            }
        }
    }

    /// Clears up the owner's former holds at these locks, one in each step, and then begins.
    ///
    /// A lost hold that the server may still have is released first. The reply to a MACQUIRE names
    /// one token for all locks, so it would give a lock with an earlier token the wrong one. A hold
    /// of a former life of the session is renewed first. The server may have granted the lock to
    /// another owner since; the hold's guards end in time, but a new guard must not begin on it.
    fn step(&mut self) -> Step {
        let (context, now, until) = (Arc::clone(&self.context), Instant::now(), self.deadline());
        let mut entered = SmallVec::<[SlotId; 1]>::new();
        let step = context.table.with(|state| {
            for (_, id) in &self.slots {
                let must_release = state.at(*id).is_some_and(|slot| slot.must_release(now));
                let release = must_release.then(|| state.release_first(*id));
                if let Some(hold) = release.flatten() {
                    return Step::Release(*id, hold, state.line_up(*id, until, true));
                }
                let live = state.at(*id).and_then(|slot| slot.live(now));
                if let Some(former) = live.filter(|hold| hold.is_of_former_life()) {
                    return Step::Confirm(Arc::clone(former));
                }
            }
            let (mut helds, mut slots) = (Helds::new(), NamedSlots::new());
            for (name, id) in std::mem::take(&mut self.slots) {
                let live = state.at(id).and_then(|slot| slot.live(now).cloned());
                let Some(hold) = live else {
                    slots.push((name, id));
                    continue;
                };
                hold.gains_guard();
                let mut part = Held::new(&context, Arc::clone(&hold), id);
                if self.request.kept.is_some() {
                    part.stays = true;
                    hold.wanted.begins_anew();
                    state.take_turn(id, Turn::Used);
                } else {
                    entered.push(id);
                }
                helds.push(part);
            }
            let Some((first, _)) = slots.first() else {
                return Step::Held(self.request.in_order(helds));
            };
            let session = Arc::clone(&context.router.home(first).session);
            let (reply, answer) = oneshot::channel();
            let id = state.begin(Call {
                request: self.request.clone(),
                slots,
                held: helds,
                phase: Phase::Pausing,
                asked: 0,
                session,
                early: Vec::new(),
                reply,
                pending: context.background.pending.token(),
                since: now,
                was_queued: self.was_held_up,
                tries: 0,
                backoff: Backoff::new(),
            });
            Step::Ask(id, answer)
        });
        entered.iter().for_each(|slot| context.pass_turn(*slot));
        step
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let context = &self.context;
        let call = self
            .call
            .and_then(|id| context.table.with(|state| state.end(id)));
        if let Some(call) = call {
            context.undo(call);
        }
        for (_, slot) in std::mem::take(&mut self.slots) {
            let is_turn = match self.line {
                Some((line, number)) if line == slot => {
                    context.table.with(|state| state.leave_line(slot, number))
                }
                _ => true,
            };
            if is_turn {
                context.pass_turn(slot);
            }
        }
    }
}

/// Others have it, or wait for it.
fn refused(used: Option<&Arc<Hold>>) -> Error {
    let left = used.map(|hold| hold.lease_left(Instant::now()));
    Error::not_acquired(Some(left.unwrap_or(Duration::ZERO)))
}

/// The number of a turn that was free, so that no call waited for it.
const NOT_IN_LINE: u64 = 0;

/// A call gives up on an answer this much later than the link does.
const LINK_FIRST: Duration = Duration::from_millis(20);
