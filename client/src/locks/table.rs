//! The slots: for each owner, lock and mode the hold, and the call whose turn it is.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use slab::Slab;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::backoff::Backoff;
use crate::error::Error;
use crate::locked;
use crate::locks::{Helds, Hold, Request, Target};
use crate::wire::{Event, Kind, Sending, Session};

/// The slots of all owners of a client, at all nodes: a lock may move from one node to another.
#[derive(Default)]
pub(crate) struct Table(Mutex<State>);

impl Table {
    /// Does something with all of it. Nobody is told anything inside, and no guard dropped: that
    /// takes the lock again.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut locked(&self.0))
    }

    /// The holds with guards that match.
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
    ids: HashMap<Key, SlotId, BuildHasherDefault<Hashed>>,
    slots: Slab<Slot>,
    calls: Slab<Call>,
    with_session: WithSession,
    /// The number of calls and places in the queue that have been numbered.
    numbers: u64,
}

pub(super) type SlotId = usize;

/// One owner at one lock in one mode.
pub(super) struct Slot {
    key: Key,
    /// As long as it has guards.
    pub(super) hold: Option<Arc<Hold>>,
    /// A hold whose last guard was dropped while a call had the turn: the server may still have it.
    pub(super) left: Option<Arc<Hold>>,
    pub(super) turn: Option<Turn>,
    /// Calls that wait for the turn. It is empty for most owners, which take one lock once.
    line: VecDeque<Waiter>,
}

/// See [`State::unsettled`].
pub(super) enum Unsettled {
    /// It is lost here, or given back, and the server may have it still.
    Lost(Arc<Hold>),
    /// It was last confirmed in an earlier life of the session.
    OfFormerLife(Arc<Hold>),
}

/// The owner of the turn at a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// A call's, from before its ACQUIRE until it has a hold or nothing.
    Call(CallId),
    /// One's from the line, which has not begun yet.
    Next(u64),
    /// Something is given back.
    Leaving,
}

struct Waiter {
    number: u64,
    /// False for a try, which does not wait behind a wait in the server's queue.
    waits: bool,
    told: oneshot::Sender<()>,
}

/// A call that has asked the server.
pub(super) struct Call {
    pub(super) number: u64,
    pub(super) request: Arc<Request>,
    /// The names that the owner did not hold, and their slots. It is their turn.
    pub(super) names: SmallVec<[Arc<[u8]>; 1]>,
    pub(super) slots: SmallVec<[SlotId; 1]>,
    /// The parts in locks that the owner held already.
    pub(super) held: Helds,
    pub(super) phase: Phase,
    /// Where it was asked for last.
    pub(super) session: Arc<Session>,
    /// Events that came before the answer.
    pub(super) early: Vec<Event>,
    pub(super) reply: oneshot::Sender<Result<Helds, Error>>,
    /// A client that shuts down waits for it.
    pub(super) pending: TaskTrackerToken,
    pub(super) since: Instant,
    /// How often it has asked.
    pub(super) asked: u32,
    /// Whether a server has taken it into its queue. Before that a lost server ends the call; after
    /// it the wait goes on until the server is back.
    pub(super) was_queued: bool,
    /// How often in a row the answer came too late, or from a wrong node.
    pub(super) tries: u32,
    pub(super) backoff: Backoff,
}

pub(super) enum Phase {
    /// The ACQUIRE is on its way.
    Asking,
    /// It was refused for a reason that passes, and is sent again.
    Pausing,
    /// It stands in the queue: an event of this life with a larger number tells of its end.
    Waiting { life: i64, seq: u64, asked: Sending },
}

/// Names a call; its place may be another's later, the number never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallId {
    place: usize,
    number: u64,
}

impl State {
    fn number(&mut self) -> u64 {
        self.numbers = self.numbers.saturating_add(1);
        self.numbers
    }

    /// The slot of this owner, lock and mode; made on first use. It is removed when it has no hold
    /// and no turn.
    pub(super) fn slot(&mut self, target: &Target) -> SlotId {
        let owner = Arc::clone(&target.owner.name);
        let key = Key::new(Arc::clone(&target.name), owner.into(), target.mode.kind());
        let slots = &mut self.slots;
        *self.ids.entry(key).or_insert_with_key(|key| {
            slots.insert(Slot {
                key: key.clone(),
                hold: None,
                left: None,
                turn: None,
                line: VecDeque::new(),
            })
        })
    }

    /// The slot that an event names.
    pub(super) fn find(&self, event: &Event) -> Option<SlotId> {
        let (name, owner) = (event.name.as_slice(), event.owner.as_slice());
        let key = Key::new(name.into(), owner.into(), event.kind);
        self.ids.get(&key).copied()
    }

    pub(super) fn at(&mut self, slot: SlotId) -> Option<&mut Slot> {
        self.slots.get_mut(slot)
    }

    pub(super) fn hold(&self, slot: SlotId) -> Option<&Arc<Hold>> {
        self.slots.get(slot)?.hold.as_ref()
    }

    /// The first hold at these slots whose state must be cleared up before the owner asks again.
    pub(super) fn unsettled(&self, slots: &[SlotId]) -> Option<Unsettled> {
        let now = Instant::now();
        slots
            .iter()
            .filter_map(|slot| self.slots.get(*slot))
            .find_map(|slot| {
                let is_there = |hold: &&Arc<Hold>| !hold.is_gone();
                let over = slot.hold.iter().filter(|hold| hold.is_over(now));
                let lost = over.chain(&slot.left).find(is_there);
                let present = slot.hold.iter().find(|hold| hold.is_of_former_life());
                let former = present.filter(|hold| !hold.is_over(now));
                let lost = lost.map(|hold| Unsettled::Lost(Arc::clone(hold)));
                lost.or_else(|| Some(Unsettled::OfFormerLife(Arc::clone(former?))))
            })
    }

    /// The hold that is there for one more guard.
    pub(super) fn live(&self, slot: SlotId, now: Instant) -> Option<Arc<Hold>> {
        let hold = self.slots.get(slot)?.hold.as_ref()?;
        (!hold.is_over(now)).then(|| Arc::clone(hold))
    }

    pub(super) fn turn(&self, slot: SlotId) -> Option<Turn> {
        self.slots.get(slot)?.turn
    }

    /// Sets the turn, whatever it was.
    pub(super) fn take_turn(&mut self, slot: SlotId, turn: Turn) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.turn = Some(turn);
        }
    }

    /// Lines up: told when it is its turn.
    pub(super) fn line_up(&mut self, slot: SlotId, waits: bool) -> (u64, oneshot::Receiver<()>) {
        let (number, (told, turn)) = (self.number(), oneshot::channel());
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.line.push_back(Waiter {
                number,
                waits,
                told,
            });
        }
        (number, turn)
    }

    /// The call has joined the server's queue: refuses the tries that wait for its turn.
    pub(super) fn refuse_tries(&mut self, id: CallId) {
        let slots = self.call(id).map(|call| call.slots.clone());
        for slot in slots.unwrap_or_default() {
            if let Some(slot) = self.slots.get_mut(slot) {
                slot.line.retain(|waiter| waiter.waits);
            }
        }
    }

    /// Leaves the wait for a turn. True if the turn had come already: the caller passes it on.
    pub(super) fn leave_line(&mut self, id: SlotId, number: u64) -> bool {
        let Some(slot) = self.slots.get_mut(id) else {
            return false;
        };
        slot.line.retain(|waiter| waiter.number != number);
        slot.turn == Some(Turn::Next(number))
    }

    /// The turn is over: it is that of the next in line. Without one the slot goes, unless
    /// something is held.
    pub(super) fn pass_turn(&mut self, id: SlotId) {
        let Some(slot) = self.slots.get_mut(id) else {
            return;
        };
        slot.turn = None;
        while let Some(Waiter { number, told, .. }) = slot.line.pop_front() {
            if told.send(()).is_ok() {
                slot.turn = Some(Turn::Next(number));
                return;
            }
        }
        self.tidy(id);
    }

    /// Forgets a slot that is of no use.
    pub(super) fn tidy(&mut self, id: SlotId) {
        let is_idle = |slot: &Slot| slot.hold.is_none() && slot.turn.is_none();
        if self.slots.get(id).is_some_and(is_idle) {
            let slot = self.slots.remove(id);
            self.ids.remove(&slot.key);
        }
    }

    /// Adds a call, whose turn it is at its slots.
    pub(super) fn begin(&mut self, call: impl FnOnce(u64) -> Call) -> CallId {
        let number = self.number();
        let call = call(number);
        let slots = call.slots.clone();
        let place = self.calls.insert(call);
        let id = CallId { place, number };
        for slot in slots {
            self.take_turn(slot, Turn::Call(id));
        }
        id
    }

    pub(super) fn call(&mut self, id: CallId) -> Option<&mut Call> {
        let call = self.calls.get_mut(id.place);
        call.filter(|call| call.number == id.number)
    }

    /// The call has come to its end. Its slots are still its own.
    pub(super) fn end(&mut self, id: CallId) -> Option<Call> {
        self.call(id)?;
        Some(self.calls.remove(id.place))
    }

    /// The call whose turn it is.
    pub(super) fn call_at(&mut self, slot: SlotId) -> Option<(CallId, &mut Call)> {
        let Some(Turn::Call(id)) = self.turn(slot) else {
            return None;
        };
        Some((id, self.call(id)?))
    }

    pub(super) fn calls(&mut self) -> impl Iterator<Item = (CallId, &mut Call)> {
        self.calls.iter_mut().map(|(place, call)| {
            let number = call.number;
            (CallId { place, number }, call)
        })
    }
}

/// Calls and holds that go on after the session's next reply.
#[derive(Default)]
struct WithSession {
    calls: Vec<CallId>,
    holds: Vec<(Weak<Hold>, Arc<Session>)>,
}

impl State {
    pub(super) fn ask_with_session(&mut self, id: CallId) {
        self.with_session.calls.push(id);
    }

    pub(super) fn renew_with_session(&mut self, hold: &Arc<Hold>, asked: &Arc<Session>) {
        let hold = (Arc::downgrade(hold), Arc::clone(asked));
        self.with_session.holds.push(hold);
    }

    /// The calls that wait for this session, or for a session that will never be heard of again.
    pub(super) fn calls_with_session(&mut self, session: &Arc<Session>) -> Vec<CallId> {
        let all = std::mem::take(&mut self.with_session.calls);
        let mut now = Vec::new();
        for id in all {
            match self.call(id) {
                Some(call) if is_heard(session, &call.session) => now.push(id),
                Some(_) => self.with_session.calls.push(id),
                None => {}
            }
        }
        now
    }

    pub(super) fn holds_with_session(&mut self, session: &Arc<Session>) -> Vec<Arc<Hold>> {
        let all = std::mem::take(&mut self.with_session.holds);
        let (now, later): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|(_, asked)| is_heard(session, asked));
        self.with_session.holds = later;
        now.iter().filter_map(|(hold, _)| hold.upgrade()).collect()
    }
}

fn is_heard(session: &Arc<Session>, asked: &Arc<Session>) -> bool {
    Arc::ptr_eq(session, asked) || asked.is_retired()
}

/// An owner at a lock in a mode, as events name it. Hashed once: most come, are found once more,
/// and go.
#[derive(Clone, PartialEq, Eq)]
struct Key {
    hash: u64,
    name: Arc<[u8]>,
    owner: Arc<[u8]>,
    kind: Kind,
}

impl Key {
    fn new(name: Arc<[u8]>, owner: Arc<[u8]>, kind: Kind) -> Self {
        static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let mut hasher = STATE.build_hasher();
        // Both in as few pieces as can be: each costs more than its bytes.
        hasher.write(&name);
        hasher.write(&owner);
        hasher.write_usize(name.len());
        let hash = hasher.finish();
        Self {
            hash,
            name,
            owner,
            kind,
        }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(self.hash);
    }
}

/// Passes the hash of a [`Key`] through.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, _: &[u8]) {}

    fn finish(&self) -> u64 {
        self.0
    }
}
