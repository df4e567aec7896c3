//! A caller's way to its locks: it waits for its turn, has former holds released or confirmed, and
//! begins its call. One command at a time is under way for an owner, a name and a mode. A kept
//! lock has one turn for all callers of the process, so they have it one after the other.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::{Notify, oneshot};
use tokio::task::coop::{consume_budget, unconstrained};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::Owner;
use crate::backoff::Backoff;
use crate::error::Error;
use crate::locks::table::{NamedSlots, Outlook, Turn};
use crate::locks::{
    Aim, Call, CallId, Context, Held, Helds, Hold, HoldOptions, KeptKey, Phase, SlotId, State,
    renew,
};
use crate::wire::Target;
use crate::wire::{Mode, WaitMode};
use crate::{metrics, trace};

/// The arguments of a call.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) owner: Owner,
    /// One, but of plain locks there may be several, in a cluster of one slot.
    pub(crate) names: SmallVec<[Arc<[u8]>; 1]>,
    pub(crate) mode: Mode,
    pub(crate) options: HoldOptions,
    pub(crate) wait_mode: WaitMode,
    /// If the lock is kept for its next use: on which terms.
    pub(crate) kept: Option<Arc<KeptKey>>,
}

impl Request {
    pub(super) fn target(&self, name: &Arc<[u8]>) -> Target {
        Target {
            name: Arc::clone(name),
            owner: self.owner.clone(),
            mode: self.mode,
        }
    }

    pub(super) fn span(&self) -> trace::Span {
        let first = self.names.first().map_or(&[][..], |name| name);
        trace::wait(String::from_utf8_lossy(first), &self.owner, self.mode)
    }
}

/// A caller that takes locks. Dropping it undoes all that it has begun.
///
/// It takes its turn at all of them in one step, and begins in the same: nobody keeps a turn while
/// waiting for another.
pub(super) struct Caller {
    context: Arc<Context>,
    request: Request,
    /// It stands in line at each of these, if it has not begun.
    slots: NamedSlots,
    /// Wakes it, once it stands in line.
    line: Option<Arc<Notify>>,
    /// The turn that it last found before its own, and when it looks at that again.
    seen: Option<Turn>,
    look_at: Instant,
    /// The call, once it has asked the server.
    call: Option<CallId>,
    since: Instant,
    /// When it waits behind others no longer; at once, if it does not wait.
    deadline: Option<Instant>,
    /// Whether it has waited behind a wait in the server's queue, or a guard of a kept lock. The
    /// server was there then, and an outage since does not end the call.
    was_held_up: bool,
}

/// The next step of a caller. In all but the first two it stands in line.
enum Step {
    Held(Helds),
    Ask(CallId, oneshot::Receiver<Result<Helds, Error>>),
    /// It is not its turn yet.
    Wait(Outlook),
    /// This must be released first.
    Release(SlotId, Arc<Hold>),
    /// This must be confirmed first.
    Confirm(Arc<Hold>),
    /// The client shuts down.
    End,
}

impl Caller {
    pub(super) fn new(context: &Arc<Context>, request: Request) -> Self {
        let since = Instant::now();
        Self {
            context: Arc::clone(context),
            deadline: match request.wait_mode {
                WaitMode::None => Some(since),
                WaitMode::Until(deadline) => Some(deadline),
                WaitMode::Forever => None,
            },
            request,
            slots: NamedSlots::new(),
            line: None,
            seen: None,
            look_at: since,
            call: None,
            since,
            was_held_up: false,
        }
    }

    /// Takes the locks. The server's own word comes first; without one this ends a response timeout
    /// after the caller's time is up, however often it had to ask.
    pub(super) async fn take(mut self) -> Result<Helds, Error> {
        let (context, since) = (Arc::clone(&self.context), self.since);
        let waits = self.request.wait_mode.waits();
        let limit = context.router.response_timeout.saturating_add(LINK_FIRST);
        let limit = self.deadline.and_then(|time| time.checked_add(limit));
        // The first poll gives it its place, also where its task has used up tokio's budget.
        let helds = unconstrained(async {
            tokio::select! {
                biased;
                helds = self.helds() => helds,
                () = context.background.closing.cancelled() => Err(Error::shut_down()),
                () = sleep_until(limit.unwrap_or(since)), if limit.is_some() => {
                    Err(self.no_answer())
                }
            }
        })
        .await;
        // Without this, a task that does nothing else would starve the others of its thread.
        consume_budget().await;
        if waits && (self.call.is_some() || self.line.is_some()) {
            metrics::waited(since);
        }
        helds
    }

    /// The time is up, and the server's own word has not come.
    fn no_answer(&self) -> Error {
        let Some(id) = self.call else {
            return self.context.trouble_or(BUSY);
        };
        let may_be_held = self.context.table.with(|state| {
            let call = state.calls.get_mut(&id);
            call.is_none_or(|call| call.was_queued || matches!(call.phase, Phase::Asking))
        });
        if may_be_held {
            return Error::no_reply();
        }
        // The server refused all commands that were sent, and the reason has not passed.
        self.context.trouble_or("its connection is broken")
    }

    /// Takes part in what the owner holds, and asks for the rest.
    async fn helds(&mut self) -> Result<Helds, Error> {
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
                Step::Wait(outlook) => self.wait(outlook).await?,
                Step::End => return Err(Error::shut_down()),
                Step::Release(slot, hold) => self.context.send_release(&hold, slot, None),
                Step::Confirm(hold) => match renew::ask(&self.context, &hold, Aim::Hold).await {
                    Err(error) if !error.is_lost() => return Err(error),
                    _ => {}
                },
            }
        }
    }

    /// Waits until it is woken, or it is time to look again. Behind a call in the server's queue,
    /// or a use of a kept lock, it waits as long as its own caller would; behind any other command,
    /// no longer than a reply may take.
    async fn wait(&mut self, before: Outlook) -> Result<(), Error> {
        let Outlook { turn, lasts, used } = before;
        let now = Instant::now();
        let is_first_look = self.look_at == self.since;
        if let Some(used) = used.as_ref().filter(|_| is_first_look) {
            used.is_wanted_here();
        }
        self.was_held_up |= lasts;
        // Without a turn the first in line waits for another lock, for as long as it likes.
        let is_late = self.deadline.is_some_and(|deadline| deadline <= now);
        if is_late && (lasts || turn.is_none() && !is_first_look) {
            // Others have it, or wait for it.
            let left = used.map(|hold| hold.lease_left(now));
            return Err(Error::not_acquired(left));
        }
        if self.look_at <= now {
            if turn.is_some() && self.seen == turn && !self.was_held_up {
                return Err(self.context.trouble_or(BUSY));
            }
            let timeout = self.context.router.response_timeout;
            self.seen = turn;
            self.look_at = now.checked_add(timeout).unwrap_or(now);
        }
        let deadline = self.deadline.filter(|_| !is_late);
        let next = deadline.map_or(self.look_at, |deadline| deadline.min(self.look_at));
        let woken = self.line.clone().unwrap_or_default();
        // The time is over, or it is woken.
        let _ = timeout_at(next, woken.notified()).await;
        Ok(())
    }

    /// Clears up the owner's former holds at these locks, one in each step, and then begins.
    ///
    /// A lost hold that the server may still have is released first. The reply to a MACQUIRE names
    /// one token for all locks, so it would give a lock with an earlier token the wrong one. A hold
    /// of a former life of the session is renewed first. The server may have granted the lock to
    /// another owner since; the hold's guards end in time, but a new guard must not begin on it.
    fn step(&mut self) -> Step {
        let (context, now) = (Arc::clone(&self.context), Instant::now());
        context.table.with(|state| {
            // Under the table's lock, as in `Context::shut_down`: otherwise a call could begin
            // after the client has ended all.
            if context.background.closing.is_cancelled() {
                return Step::End;
            }
            if let Some(step) = self.is_not_yet(state, now) {
                // It is the first there when it has found nobody before it.
                let line_up = || state.line_up(&self.slots, self.deadline);
                self.line.get_or_insert_with(line_up);
                return step;
            }
            let (mut helds, mut slots) = (Helds::new(), NamedSlots::new());
            for (name, id) in std::mem::take(&mut self.slots) {
                let live = state.at(id).and_then(|slot| slot.begins(now));
                let Some(hold) = live else {
                    slots.push((name, id));
                    continue;
                };
                let mut part = Held::new(&context, hold, id);
                if self.request.kept.is_some() {
                    part.is_next_use(state);
                }
                helds.push(part);
            }
            let Some((first, _)) = slots.first() else {
                return Step::Held(helds);
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
                asking: false,
                has_moved: false,
                early: Vec::new(),
                reply,
                pending: context.background.pending.token(),
                since: now,
                was_queued: self.was_held_up,
                stray: None,
                given_back: None,
                tries: 0,
                backoff: Backoff::new(),
            });
            Step::Ask(id, answer)
        })
    }

    /// The step that must come before it can begin; none if it can begin now.
    fn is_not_yet(&mut self, state: &mut State, now: Instant) -> Option<Step> {
        if self.slots.is_empty() {
            let slots = self.request.names.iter().map(|name| {
                let target = self.request.target(name);
                let slot = match &self.request.kept {
                    None => state.slot(&target),
                    Some(key) => state.kept_slot(key, &target),
                };
                (Arc::clone(name), slot)
            });
            self.slots = slots.collect();
        }
        if let Some(before) = state.outlook(&self.slots, self.line.as_ref()) {
            return Some(Step::Wait(before));
        }
        self.slots.iter().find_map(|(_, id)| {
            if state.at(*id)?.must_release(now)
                && let Some(hold) = state.release_first(*id)
            {
                return Some(Step::Release(*id, hold));
            }
            let live = state.at(*id)?.live(now);
            let former = live.filter(|hold| hold.is_of_former_life())?;
            Some(Step::Confirm(Arc::clone(former)))
        })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let context = &self.context;
        let call = self
            .call
            .and_then(|id| context.table.with(|state| state.calls.remove(&id)));
        if let Some(call) = call {
            context.undo(call);
        }
        for (_, slot) in std::mem::take(&mut self.slots) {
            let caller = self.line.as_ref();
            context.release_after(slot, |state| state.leave_line(slot, caller?));
        }
    }
}

const BUSY: &str = "an earlier command of this owner is not answered";

/// A call gives up on an answer this much later than the link does.
pub(crate) const LINK_FIRST: Duration = Duration::from_millis(20);
