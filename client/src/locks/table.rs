//! The slots: for each owner, lock and mode the hold, and the call whose turn it is.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use slab::Slab;
use smallvec::SmallVec;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::backoff::Backoff;
use crate::error::Error;
use crate::locked;
use crate::locks::keep::{KeptKey, Place, is_fit};
use crate::locks::{Helds, Hold, Request};
use crate::owner::OwnerName;
use crate::wire::Target;
use crate::wire::{Event, Kind, Sending, Session};

/// The slots of all owners of a client, at all nodes: a lock may move from one node to another.
pub(crate) struct Table(Mutex<State>);

impl Table {
    /// A table that keeps this many idle locks at most.
    pub(super) fn new(kept_max: usize) -> Self {
        Self(Mutex::new(State {
            kept_max,
            ..State::default()
        }))
    }

    /// Does something with all of it. No caller is answered inside, and no guard dropped: that
    /// takes the lock again. Tasks are woken inside, which tokio does not run at once.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut locked(&self.0))
    }

    /// The calls that match.
    pub(super) fn calls(&self, is: impl Fn(&Call) -> bool) -> Vec<CallId> {
        self.with(|state| {
            let calls = state.calls.iter();
            let those = calls.filter_map(|(id, call)| is(call).then_some(*id));
            those.collect()
        })
    }

    /// The holds that match.
    pub(crate) fn holds(&self, is: impl Fn(&Arc<Hold>) -> bool) -> Vec<Arc<Hold>> {
        self.with(|state| {
            let holds = state
                .slots
                .iter()
                .filter_map(|(_, slot)| slot.hold.as_ref());
            holds.filter(|hold| is(hold)).cloned().collect()
        })
    }
}

/// All of it.
#[derive(Default)]
pub(super) struct State {
    ids: HashMap<Key, SlotId>,
    slots: Slab<Slot>,
    /// One that has come to its end is removed before it passes its turn.
    pub(super) calls: BTreeMap<CallId, Call>,
    /// The slots of kept locks, by their terms.
    pub(super) kept: HashMap<Arc<KeptKey>, SlotId>,
    /// The kept locks that are idle, oldest first.
    pub(super) idle: BTreeMap<Place, SlotId>,
    /// The largest number of idle locks.
    pub(super) kept_max: usize,
    /// Whether no lock is kept any more: nobody can take it.
    pub(super) keeps_none: bool,
    /// Calls or renewals were refused for want of a session. They ask again when one answers.
    pub(super) has_refused: bool,
    numbers: u64,
}

pub(super) type SlotId = usize;

/// The number of a call; it is never another's.
pub(super) type CallId = u64;

/// One owner at one lock in one mode. That of a kept lock is one owner's after the other's.
pub(super) struct Slot {
    key: Key,
    /// As long as it has guards. One without is released before the next call asks.
    pub(super) hold: Option<Arc<Hold>>,
    pub(super) turn: Option<Turn>,
    /// Callers that wait for the turn. It is empty for most owners, which take one lock once.
    line: VecDeque<Waiter>,
    /// If the lock is kept for its next use: on which terms.
    kept: Option<Arc<KeptKey>>,
    /// Where it stands among the idle locks, if it is idle.
    pub(super) place: Option<Place>,
}

/// The owner of the turn at a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A call's, from before its ACQUIRE until it has a hold or nothing.
    Call(CallId),
    /// Something is given back.
    Leaving(u64),
    /// A guard has the kept lock.
    Used,
}

#[derive(Clone)]
struct Waiter {
    /// The time until which it waits behind others; for a try that is over at once.
    until: Option<Instant>,
    caller: Arc<Notify>,
}

/// The turn that a caller must wait for.
pub(super) struct Outlook {
    /// None if nobody has the turn. Then others stand before it in line, and the first of them
    /// waits for another lock.
    pub(super) turn: Option<Turn>,
    /// Whether the turn may last: it waits in the server's queue, or is a use of a kept lock.
    pub(super) lasts: bool,
    /// The hold of the kept lock that is used.
    pub(super) used: Option<Arc<Hold>>,
}

/// Names, and the slots of an owner there.
pub(super) type NamedSlots = SmallVec<[(Arc<[u8]>, SlotId); 1]>;

/// A call that has asked the server.
pub(super) struct Call {
    pub(super) request: Request,
    /// The names that the owner did not hold, and their slots, whose turn it is; at least one.
    pub(super) slots: NamedSlots,
    /// The parts in locks that the owner held already.
    pub(super) held: Helds,
    pub(super) phase: Phase,
    /// Where it was asked for last.
    pub(super) session: Arc<Session>,
    /// Whether that was behind an `ASKING`.
    pub(super) asking: bool,
    /// Whether its slot has moved to another node since.
    pub(super) has_moved: bool,
    /// Events that came before the answer, each with the life of the session that told it.
    pub(super) early: Vec<(i64, Event)>,
    pub(super) reply: oneshot::Sender<Result<Helds, Error>>,
    /// A client that shuts down waits for it.
    pub(super) pending: TaskTrackerToken,
    pub(super) since: Instant,
    /// How often it has asked.
    pub(super) asked: u32,
    /// Whether a server has taken it into its queue. Before that a lost server ends the call; after
    /// it the wait goes on until the server is back.
    pub(super) was_queued: bool,
    /// The token of a grant behind `ASKING` that was not counted on, and where it was given.
    pub(super) stray: Option<(u64, Arc<Session>)>,
    /// The token of one that was given back, which never counts.
    pub(super) given_back: Option<u64>,
    /// How often in a row the answer came too late, or from a wrong node.
    pub(super) tries: u32,
    pub(super) backoff: Backoff,
}

pub(super) enum Phase {
    /// The ACQUIRE is on its way.
    Asking,
    /// It was refused for a reason that passes, and is sent again.
    Pausing,
    /// It was refused for want of a session, and is sent again when one answers.
    Refused,
    /// It stands in the queue: an event of this life with a larger number tells of its end.
    Waiting { life: i64, seq: u64, asked: Sending },
}

impl Slot {
    /// Whether the hold stays when nobody has the turn.
    fn stays(&self, hold: &Hold, now: Instant) -> bool {
        match self.kept {
            Some(_) => is_fit(hold, now),
            None => hold.has_guards(),
        }
    }

    /// The hold that is there for one more guard.
    pub(super) fn live(&self, now: Instant) -> Option<&Arc<Hold>> {
        let hold = self.hold.as_ref()?;
        (hold.has_guards() && hold.lost(now).is_none()).then_some(hold)
    }

    pub(super) fn has(&self, hold: &Arc<Hold>) -> bool {
        self.hold.as_ref().is_some_and(|one| Arc::ptr_eq(one, hold))
    }

    /// Whether the hold must be released before the owner asks again: the server may have it still.
    pub(super) fn must_release(&self, now: Instant) -> bool {
        let is_over = |hold: &Arc<Hold>| hold.lost(now).is_some() || !self.stays(hold, now);
        let hold = self.hold.as_ref().filter(|hold| !hold.is_gone());
        hold.is_some_and(is_over)
    }

    pub(super) fn has_line(&self) -> bool {
        !self.line.is_empty()
    }

    /// Whether nobody has the turn, and the caller, if it stands in line, is the first.
    fn is_free_for(&self, caller: Option<&Arc<Notify>>) -> bool {
        let first = self.line.front().map(|waiter| &waiter.caller);
        self.turn.is_none() && first.map(Arc::as_ptr) == caller.map(Arc::as_ptr)
    }

    /// Wakes the callers whose time is over: the present turn lasts longer.
    fn wake_late(&self) {
        let now = Instant::now();
        let is_late = |waiter: &&Waiter| waiter.until.is_some_and(|until| until <= now);
        let late = self.line.iter().filter(is_late);
        late.for_each(|waiter| waiter.caller.notify_one());
    }

    /// The first in line begins, if there is a line. It shares a live hold. That needs no turn,
    /// unless the lock is kept, so the next in line may do the same.
    pub(super) fn begins(&mut self, now: Instant) -> Option<Arc<Hold>> {
        self.line.pop_front();
        let hold = self.live(now).cloned()?;
        hold.gains_guard();
        if self.kept.is_none() {
            self.wake_first();
        }
        Some(hold)
    }

    /// Wakes the first in line, to take the turn.
    fn wake_first(&self) {
        self.line.front().inspect(|first| first.caller.notify_one());
    }
}

impl State {
    pub(super) fn number(&mut self) -> u64 {
        self.numbers = self.numbers.saturating_add(1);
        self.numbers
    }

    /// The slot of this owner, lock and mode; made on first use. It is removed when it has no hold
    /// and no turn.
    pub(super) fn slot(&mut self, target: &Target) -> SlotId {
        let slots = &mut self.slots;
        *self.ids.entry(Key::of(target)).or_insert_with_key(|key| {
            slots.insert(Slot {
                key: key.clone(),
                hold: None,
                turn: None,
                line: VecDeque::new(),
                kept: None,
                place: None,
            })
        })
    }

    /// The slot of the lock that is kept on these terms. It is that of the owner who asked last.
    pub(super) fn kept_slot(&mut self, key: &Arc<KeptKey>, target: &Target) -> SlotId {
        if let Some(id) = self.kept.get(key) {
            return *id;
        }
        let id = self.slot(target);
        self.kept.insert(Arc::clone(key), id);
        if let Some(slot) = self.slots.get_mut(id) {
            slot.kept = Some(Arc::clone(key));
        }
        id
    }

    /// The slot that an event names.
    pub(super) fn find(&self, event: &Event) -> Option<SlotId> {
        let owner = str::from_utf8(&event.owner).ok()?;
        let key = Key {
            name: event.name.as_slice().into(),
            // That of another has no slot here.
            owner: OwnerName::from(owner).ok()?,
            kind: event.kind,
        };
        self.ids.get(&key).copied()
    }

    pub(super) fn at(&mut self, slot: SlotId) -> Option<&mut Slot> {
        self.slots.get_mut(slot)
    }

    /// Sets the turn, whatever it was.
    pub(super) fn take_turn(&mut self, slot: SlotId, turn: Turn) {
        let Some(slot) = self.slots.get_mut(slot) else {
            return;
        };
        slot.turn = Some(turn);
        if let Some(place) = slot.place.take() {
            self.idle.remove(&place);
        }
    }

    /// Has a caller line up at all of these: so those that wait for each other never form a circle.
    /// Gives what wakes it there.
    pub(super) fn line_up(&mut self, slots: &NamedSlots, until: Option<Instant>) -> Arc<Notify> {
        let waiter = Waiter {
            until,
            caller: Arc::default(),
        };
        for (_, slot) in slots {
            if let Some(slot) = self.slots.get_mut(*slot) {
                slot.line.push_back(waiter.clone());
            }
        }
        waiter.caller
    }

    /// The turn that a caller must wait for, at the first of these slots where it must.
    pub(super) fn outlook(
        &self,
        slots: &NamedSlots,
        caller: Option<&Arc<Notify>>,
    ) -> Option<Outlook> {
        let mut slots = slots.iter().filter_map(|(_, slot)| self.slots.get(*slot));
        let slot = slots.find(|slot| !slot.is_free_for(caller))?;
        let is_used = slot.turn == Some(Turn::Used);
        let is_queued = |id| self.calls.get(&id).is_some_and(|call| call.was_queued);
        Some(Outlook {
            turn: slot.turn,
            lasts: is_used || matches!(slot.turn, Some(Turn::Call(id)) if is_queued(id)),
            used: slot.hold.clone().filter(|_| is_used),
        })
    }

    /// Wakes the callers whose time is over behind this call, if its turn lasts.
    pub(super) fn wake_late_behind(&self, id: CallId) {
        let is_queued = |call: &&Call| matches!(call.phase, Phase::Waiting { .. });
        let call = self.calls.get(&id).filter(is_queued);
        let slots = call.into_iter().flat_map(|call| &call.slots);
        let slots = slots.filter_map(|(_, slot)| self.slots.get(*slot));
        slots.for_each(Slot::wake_late);
    }

    /// A call has got this hold. If the lock is kept, a guard has it from now on.
    pub(super) fn enter(&mut self, id: SlotId, hold: &Arc<Hold>) {
        let Some(slot) = self.slots.get_mut(id) else {
            return;
        };
        // One that was here before is lost, and its guards give nothing back.
        let before = slot.hold.replace(Arc::clone(hold));
        if slot.kept.is_some() {
            // Being kept counts as one guard more.
            hold.gains_guard();
            before.inspect(|before| before.loses_guard());
            slot.wake_late();
            self.take_turn(id, Turn::Used);
        }
    }

    /// A caller leaves the line. If nobody has the turn it is that of the next, as in
    /// [`Self::pass_turn`].
    #[must_use = "it is to be released"]
    pub(super) fn leave_line(&mut self, id: SlotId, caller: &Arc<Notify>) -> Option<Arc<Hold>> {
        let slot = self.slots.get_mut(id)?;
        slot.line
            .retain(|waiter| !Arc::ptr_eq(&waiter.caller, caller));
        let is_free = slot.turn.is_none();
        is_free.then(|| self.pass_turn(id)).flatten()
    }

    /// Takes out the hold at a slot, for its release before the owner asks again. The release has
    /// the turn. Nothing, if the server has no hold.
    pub(super) fn release_first(&mut self, id: SlotId) -> Option<Arc<Hold>> {
        let slot = self.slots.get_mut(id)?;
        let hold = slot.hold.take()?;
        if slot.kept.is_some() {
            hold.loses_guard();
        }
        if hold.is_gone() {
            return None;
        }
        let leaving = Turn::Leaving(self.number());
        self.take_turn(id, leaving);
        Some(hold)
    }

    /// The turn is over. A hold that must go back is returned, and its release has the turn;
    /// otherwise the first in line is woken, to take it. Without one the slot goes, unless
    /// something is held.
    #[must_use = "it is to be released"]
    pub(super) fn pass_turn(&mut self, id: SlotId) -> Option<Arc<Hold>> {
        let (number, now) = (self.number(), Instant::now());
        let slot = self.slots.get_mut(id)?;
        let goes_back = self.keeps_none && slot.kept.is_some();
        slot.turn = None;
        // A caller may have stood in line at one that is idle, and leave it.
        slot.place.take().and_then(|place| self.idle.remove(&place));
        let hold = slot.hold.as_ref();
        if hold.is_some_and(|hold| goes_back || !slot.stays(hold, now)) {
            let out = self.release_first(id);
            if out.is_some() {
                return out;
            }
        }
        let slot = self.slots.get_mut(id)?;
        if slot.has_line() {
            slot.wake_first();
        } else if slot.hold.is_none() {
            let slot = self.slots.remove(id);
            self.ids.remove(&slot.key);
            slot.kept.and_then(|kept| self.kept.remove(&kept));
        } else if slot.kept.is_some() {
            let place = (now, number);
            slot.place = Some(place);
            self.idle.insert(place, id);
        }
        None
    }

    /// Adds a call, whose turn it is at its slots. That of a kept lock is its owner's from now on.
    pub(super) fn begin(&mut self, call: Call) -> CallId {
        let id = self.number();
        for (name, slot) in &call.slots {
            self.take_turn(*slot, Turn::Call(id));
            if let Some(kept) = self.slots.get_mut(*slot).filter(|slot| slot.kept.is_some()) {
                let key = Key::of(&call.request.target(name));
                self.ids
                    .remove(&std::mem::replace(&mut kept.key, key.clone()));
                self.ids.insert(key, *slot);
            }
        }
        self.calls.insert(id, call);
        id
    }

    /// Takes the calls that match out of the table, for `Context::undo`.
    #[must_use = "they are to be undone"]
    pub(super) fn end_calls(&mut self, which: impl Fn(&Call) -> bool) -> Vec<Call> {
        let those = self.calls.iter().filter(|(_, call)| which(call));
        let those: Vec<CallId> = those.map(|(id, _)| *id).collect();
        let ended = those.iter().filter_map(|id| self.calls.remove(id));
        ended.collect()
    }

    /// The call whose turn it is.
    pub(super) fn call_at(&mut self, slot: SlotId) -> Option<(CallId, &mut Call)> {
        let Some(Turn::Call(id)) = self.slots.get(slot)?.turn else {
            return None;
        };
        Some((id, self.calls.get_mut(&id)?))
    }
}

/// An owner at a lock in a mode, as events name it.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    name: Arc<[u8]>,
    owner: OwnerName,
    kind: Kind,
}

impl Key {
    fn of(target: &Target) -> Self {
        Self {
            name: Arc::clone(&target.name),
            owner: target.owner.name,
            kind: target.mode.kind(),
        }
    }
}
