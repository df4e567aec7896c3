//! A caller's turn: one command at a time is under way for an owner, a name and a mode. A kept lock
//! has one owner for all callers of the process, so that they have it one after the other.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::locks::acquire::Pending;
use crate::locks::table::{Outlook, Turn};
use crate::locks::{Aim, Call, Context, Held, Helds, Hold, Phase, Request, SlotId, renew};
use crate::wire::WaitMode;

/// It is a caller's turn at each of these, or not yet.
pub(super) struct Turns {
    context: Arc<Context>,
    pub(super) request: Request,
    slots: SmallVec<[(Arc<[u8]>, SlotId); 1]>,
    /// Where it waits in line, if it does.
    line: Option<(SlotId, u64)>,
    since: Instant,
    /// Whether it had to wait.
    pub(super) has_waited: bool,
    /// Whether it has waited for a guard of a kept lock. The server was there then, and an outage
    /// since does not end the call.
    was_held_up: bool,
}

/// How the call goes on when it is its turn everywhere.
pub(super) enum Begun {
    Held(Helds),
    Asked(Pending),
}

type Told = oneshot::Receiver<bool>;

/// The next step of a caller who has the turn.
enum Step {
    Begun(Begun),
    /// This must be released first.
    Release(SlotId, Option<Arc<Hold>>, (u64, Told)),
    /// This must be confirmed first.
    Confirm(Arc<Hold>),
}

impl Turns {
    pub(super) fn new(context: &Arc<Context>, request: Request) -> Self {
        Self {
            context: Arc::clone(context),
            request,
            slots: SmallVec::new(),
            line: None,
            since: Instant::now(),
            has_waited: false,
            was_held_up: false,
        }
    }

    /// Takes the turn at each slot, in the order of the names. All calls use this order, so two
    /// calls for several locks never wait for each other's turns in a circle.
    pub(super) async fn take(&mut self) -> Result<(), Error> {
        let mut names = self.request.names.clone();
        names.sort_unstable();
        for name in names {
            if let Some((slot, place)) = self.enter(name)? {
                self.wait(slot, place).await?;
            }
        }
        Ok(())
    }

    /// Takes the turn, or a place in the line.
    fn enter(&mut self, name: Arc<[u8]>) -> Result<Option<(SlotId, (u64, Told))>, Error> {
        let (target, until) = (self.request.target(&name), self.deadline());
        let waits = self.request.wait_mode.waits();
        let (mut lost, now) = (None, Instant::now());
        let (slot, used, place) = self.context.table.with(|state| {
            let slot = match &self.request.kept {
                None => state.slot(&target),
                Some(key) => {
                    // Its guard does not know yet that it has lost it.
                    if let Some(over) = state.used_in_vain(key, now) {
                        lost = state.pass_turn(over).map(|hold| (hold, over));
                    }
                    let (slot, owner) = state.kept_slot(key, &target);
                    self.request.owner = owner;
                    slot
                }
            };
            let Outlook {
                turn, used, lasts, ..
            } = state.outlook(slot, NOT_IN_LINE);
            let place = match turn {
                None => {
                    state.take_turn(slot, Turn::Next(NOT_IN_LINE));
                    Some(None)
                }
                Some(Turn::Call(_) | Turn::Used) if !waits && lasts => None,
                Some(_) => Some(Some(state.line_up(slot, until, false))),
            };
            (slot, used, place)
        });
        if let Some((lost, slot)) = lost {
            self.context.send_release(&lost, slot, None);
        }
        if let Some(hold) = &used {
            hold.is_wanted_here();
        }
        let place = place.ok_or_else(|| refused(used.as_ref()))?;
        self.slots.push((name, slot));
        Ok(place.map(|place| (slot, place)))
    }

    /// When it waits behind others no longer; at once, if it does not wait.
    fn deadline(&self) -> Option<Instant> {
        match self.request.wait_mode {
            WaitMode::None => Some(self.since),
            WaitMode::Until(deadline) => Some(deadline),
            WaitMode::Forever => None,
        }
    }

    /// Waits for the turn. Behind a call in the server's queue, or a use of a kept lock, it waits as
    /// long as its own caller would; behind any other command, no longer than a reply may take.
    async fn wait(&mut self, slot: SlotId, (number, mut told): (u64, Told)) -> Result<(), Error> {
        self.line = Some((slot, number));
        self.has_waited = true;
        let context = Arc::clone(&self.context);
        let timeout = context.router.response_timeout;
        let (deadline, mut seen) = (self.deadline(), None);
        let mut look_at = Instant::now();
        loop {
            let now = Instant::now();
            let outlook = context.table.with(|state| state.outlook(slot, number));
            let is_late = deadline.is_some_and(|deadline| deadline <= now);
            if is_late && outlook.lasts && seen.is_some() {
                return Err(refused(outlook.used.as_ref()));
            }
            let limit = deadline.and_then(|deadline| deadline.checked_add(timeout));
            let is_stuck = look_at <= now && seen == outlook.turn && !outlook.lasts;
            if limit.is_some_and(|limit| limit <= now) || is_stuck && !outlook.was_held_up {
                return Err(self.busy());
            }
            if look_at <= now {
                seen = outlook.turn;
                look_at = now.checked_add(timeout).unwrap_or(now);
            }
            let ends = if is_late { limit } else { deadline };
            tokio::select! {
                biased;
                told = &mut told => {
                    // What has the turn will not end at once, and its time is up.
                    self.was_held_up |= told.map_err(|_| refused(None))?;
                    self.line = None;
                    return Ok(());
                }
                () = context.background.closing.cancelled() => return Err(Error::shut_down()),
                () = sleep_until(ends.map_or(look_at, |ends| ends.min(look_at))) => {}
            }
        }
    }

    fn busy(&self) -> Error {
        let busy = "an earlier command of this owner is not answered";
        let trouble = self.context.router.trouble();
        trouble.unwrap_or_else(|| Error::unavailable(busy))
    }

    /// It is its turn everywhere: takes part in what the owner holds, and asks for the rest.
    pub(super) async fn begin(&mut self) -> Result<Begun, Error> {
        loop {
            match self.step() {
                Step::Begun(begun) => return Ok(begun),
                Step::Release(slot, hold, place) => {
                    if let Some(hold) = hold {
                        // Its guards must not say otherwise, whatever is confirmed meanwhile.
                        hold.lost(Instant::now());
                        self.context.send_release(&hold, slot, None);
                    }
                    self.wait(slot, place).await?;
                }
                Step::Confirm(hold) => {
                    let since = match self.request.wait_mode {
                        WaitMode::None => self.since,
                        WaitMode::Until(_) | WaitMode::Forever => Instant::now(),
                    };
                    let limit = since.checked_add(self.context.router.response_timeout);
                    let asking = renew::ask(&self.context, &hold, Aim::Hold);
                    match timeout_at(limit.unwrap_or(since), asking).await {
                        Ok(Err(error)) if !error.is_lost() => return Err(error),
                        Ok(_) => {}
                        Err(_) => return Err(self.busy()),
                    }
                }
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
                let Some(slot) = state.at(*id) else { continue };
                if slot.must_release(now) {
                    let place = state.line_up(*id, until, true);
                    return Err(Step::Release(*id, state.release_first(*id), place));
                }
                let live = slot.live(now);
                if let Some(former) = live.filter(|hold| hold.is_of_former_life()) {
                    return Err(Step::Confirm(Arc::clone(former)));
                }
            }
            let mut held = Helds::new();
            let mut names = SmallVec::<[Arc<[u8]>; 1]>::new();
            let mut slots = SmallVec::new();
            for (name, id) in std::mem::take(&mut self.slots) {
                let live = state.at(id).and_then(|slot| slot.live(now).cloned());
                let Some(hold) = live else {
                    names.push(name);
                    slots.push(id);
                    continue;
                };
                hold.gains_guard();
                if self.request.kept.is_some() {
                    hold.wanted.begins_anew();
                    state.take_turn(id, Turn::Used);
                } else {
                    entered.push(id);
                }
                held.push(Held::new(&context, hold, id));
            }
            let Some(first) = names.first() else {
                return Ok(Err(held));
            };
            let session = Arc::clone(&context.router.home(first).session);
            let (reply, answer) = oneshot::channel();
            let id = state.begin(Call {
                request: Arc::new(self.request.clone()),
                names,
                slots,
                held,
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
            let wait_mode = self.request.wait_mode;
            let context = Arc::clone(&context);
            Ok(Ok(Pending::new(context, wait_mode, id, answer)))
        });
        entered.iter().for_each(|slot| context.pass_turn(*slot));
        match step {
            Err(step) => step,
            Ok(Err(held)) => Step::Begun(Begun::Held(self.request.in_order(held))),
            Ok(Ok(pending)) => {
                pending.ask();
                Step::Begun(Begun::Asked(pending))
            }
        }
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        for (_, slot) in std::mem::take(&mut self.slots) {
            let is_turn = match self.line {
                Some((line, number)) if line == slot => {
                    let leaves = |state: &mut super::State| state.leave_line(slot, number);
                    self.context.table.with(leaves)
                }
                _ => true,
            };
            if is_turn {
                self.context.pass_turn(slot);
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
