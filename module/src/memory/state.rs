//! The state that the module keeps between the server's calls.

use crate::ffi::{Handle, OwnedStr, Publish, Scan, ServerLocked, Str, Timer};
use rlock_core::guarded::Guarded;
use rlock_core::{
    Effect, FENCE_FIELD, Grant, LockKey, LockRef, Locks, MODE_FIELD, Mode, NotGuarded, Now,
    PERMITS_MODE, ROOM_KEPT, SessionId, Task, Turn, Value, WaitOutcome, WaiterId,
};
use rustc_hash::FxHashMap;
use std::collections::HashMap;
use std::ffi::c_int;
use std::rc::Rc;

static STATE: ServerLocked<State> = ServerLocked::new();

/// Lends the state. The body must call no function of the server that may call us back.
pub(crate) fn with<R>(body: impl FnOnce(&mut State) -> R) -> R {
    STATE.with(body)
}

/// Changes the state when it is dropped, also after a panic.
pub(crate) struct Finally(pub(crate) fn(&mut State));

impl Drop for Finally {
    fn drop(&mut self) {
        with(self.0);
    }
}

/// Forgets everything: the module is being unloaded.
pub(crate) fn clear() {
    STATE.clear();
}

/// The module's memory.
#[allow(
    clippy::struct_excessive_bools,
    reason = "each says something of its own, and none follows from another"
)]
#[derive(Default)]
pub(crate) struct State {
    /// Queues, sessions, and the last token.
    pub(crate) locks: Locks,
    /// The clients that the server keeps blocked for us.
    pub(crate) blocked: BlockedClients,
    /// Clients whose grant is written but not delivered: all from this turn of the event loop, and
    /// usually none.
    pub(crate) undelivered: Undelivered,
    /// The timer that fires next.
    pub(crate) timer: Option<Armed>,
    /// How far the wall clock was ahead of the monotonic one at the server's last tick.
    pub(crate) wall_ahead_ms: Option<i64>,
    /// Whether the timer's work is under way.
    pub(crate) pumping: bool,
    /// Whether a decision is only partly written.
    pub(crate) is_unfinished: bool,
    /// Whether we listen to changed keys.
    pub(crate) hears_key_events: bool,
    /// Whether we listen to the ends of the event loop's turns.
    pub(crate) hears_turns: bool,
    /// The unlock messages of this turn, which replicas get at its end.
    pub(crate) messages: Vec<Message>,
    /// Whether we listen to clients that disconnect.
    pub(crate) hears_client_events: bool,
    /// The address of the key's string, while we emit an event of this key ourselves.
    pub(crate) own_event: Option<usize>,
    /// An empty list that is used again, so that a decision allocates nothing.
    pub(crate) spare_effects: Vec<Effect>,
    /// The lock that is being swept, and how far it was.
    pub(crate) sweep: Option<(LockKey, Scan)>,
    /// The decisions about commands that RLOCK.GUARD was asked to run.
    pub(crate) guarded: HashMap<Box<[u8]>, Result<Guarded, NotGuarded>>,
    /// Strings of the server that every command uses.
    pub(crate) words: Rc<Words>,
}

/// A timer that has not fired, and the moment at which it is due.
pub(crate) struct Armed {
    pub(crate) timer: Timer,
    pub(crate) due: Now,
}

/// An unlock message that replicas have not got yet.
pub(crate) struct Message {
    pub(crate) db: c_int,
    pub(crate) channel: OwnedStr,
    /// Whether a writer has released the lock.
    pub(crate) is_of_writer: bool,
    pub(crate) kinds: &'static [Publish],
}

/// Strings that are made once and used again.
pub(crate) struct Words {
    pub(crate) fence: OwnedStr,
    pub(crate) mode: OwnedStr,
    pub(crate) permits: OwnedStr,
    pub(crate) read: OwnedStr,
    pub(crate) write: OwnedStr,
    pub(crate) one: OwnedStr,
    pub(crate) zero: OwnedStr,
    pub(crate) replace: OwnedStr,
    pub(crate) abs_ttl: OwnedStr,
}

impl Words {
    /// The text of an unlock message.
    pub(crate) fn unlock_message(&self, is_of_writer: bool) -> Str<'_> {
        let text = if is_of_writer { &self.one } else { &self.zero };
        text.as_str()
    }
}

impl Default for Words {
    fn default() -> Self {
        Self {
            fence: OwnedStr::new(FENCE_FIELD),
            mode: OwnedStr::new(MODE_FIELD),
            permits: OwnedStr::new(PERMITS_MODE),
            read: OwnedStr::new(Value::Mode(Mode::Read).text().bytes()),
            write: OwnedStr::new(Value::Mode(Mode::Write).text().bytes()),
            one: OwnedStr::new(b"1"),
            zero: OwnedStr::new(b"0"),
            replace: OwnedStr::new(b"REPLACE"),
            abs_ttl: OwnedStr::new(b"ABSTTL"),
        }
    }
}

/// Clients by their handles. No client can choose its handle, so the map needs no hash that resists
/// attacks, which would take longer than the work for the client.
type BlockedClients = FxHashMap<Handle, Blocked>;

/// A client that the server keeps blocked for us.
pub(crate) enum Blocked {
    /// It waits in the queue.
    Waiting(WaiterId),
    /// It was unblocked with the lock; the reply is sent in this turn of the event loop.
    Granted(Granted),
    /// It was unblocked without the lock.
    Left(WaitOutcome),
    /// It waits for a session's events.
    Listening(Listening),
    /// It was unblocked, because the session has events or its wait is over.
    Woken(Listening),
    /// It was unblocked: the client with this number listens to the session now.
    TakenOver(u64),
    /// It disconnected, or its reply was sent: only its record is left.
    Gone,
}

/// A client that listens to a session's events.
#[derive(Clone, Copy)]
pub(crate) struct Listening {
    pub(crate) session: SessionId,
    pub(crate) client_id: u64,
}

/// A grant to a waiter.
#[derive(Clone)]
pub(crate) struct Granted {
    /// The lock; the first one if there are several.
    pub(crate) lock: LockKey,
    pub(crate) owner: Rc<[u8]>,
    pub(crate) count: i64,
    pub(crate) grant: Grant,
    /// The owner was told in another way that it holds the lock, so the grant must not be taken
    /// back.
    pub(crate) confirmed: bool,
}

impl Granted {
    fn names(&self) -> impl Iterator<Item = &Rc<[u8]>> {
        let taken = self.grant.taken.as_deref();
        let one = taken.is_none().then_some(&self.lock.name);
        let taken = taken.into_iter().flatten();
        one.into_iter().chain(taken.map(|(lock, _)| &lock.name))
    }
}

type OwnerAndName = (Rc<[u8]>, Rc<[u8]>);

/// The clients with an undelivered grant.
#[derive(Default)]
pub(crate) struct Undelivered {
    /// All clients that were granted since `count` was last 0; some grants may be delivered
    /// already.
    clients: Vec<Handle>,
    count: usize,
    /// The first `indexed` clients, by owner and name of the lock: one owner may have thousands of
    /// undelivered grants, and confirm each. Built when a confirmation asks, which is rare, so that
    /// a hand-over does not pay for it.
    by_owner: HashMap<OwnerAndName, Vec<Handle>>,
    indexed: usize,
}

impl Undelivered {
    pub(crate) fn add(&mut self, client: Handle) {
        self.clients.push(client);
        self.count = self.count.saturating_add(1);
    }

    pub(crate) fn delivered(&mut self) {
        self.count = self.count.saturating_sub(1);
        if self.count == 0 {
            *self = Self::default();
        }
    }

    /// The clients with an undelivered grant to this owner, of a lock with this name.
    fn of(&mut self, owner: &[u8], name: &[u8], blocked: &BlockedClients) -> &[Handle] {
        for client in self.clients.iter().skip(self.indexed) {
            if let Some(Blocked::Granted(granted)) = blocked.get(client) {
                for name in granted.names() {
                    let granted = (Rc::clone(&granted.owner), Rc::clone(name));
                    self.by_owner.entry(granted).or_default().push(*client);
                }
            }
        }
        self.indexed = self.clients.len();
        let granted = self.by_owner.get(&(owner.into(), name.into()));
        granted.map_or(&[], Vec::as_slice)
    }
}

impl State {
    /// The next reading of a turn. None while another turn's decision is being written.
    #[inline]
    pub(crate) fn next_task(&mut self, turn: &mut Turn<'_>, now: Now) -> Option<Task> {
        if self.is_unfinished {
            return None;
        }
        self.locks.next_task(turn, now)
    }

    /// The record of a client that waits in a queue; none if its wait has ended.
    pub(crate) fn waiting(&mut self, client: Handle) -> Option<&mut Blocked> {
        let blocked = self.blocked.get_mut(&client)?;
        matches!(blocked, Blocked::Waiting(_)).then_some(blocked)
    }

    /// The record of a client that waits for a session's events, and the session.
    pub(crate) fn listening(&mut self, client: Handle) -> Option<(&mut Blocked, Listening)> {
        let blocked = self.blocked.get_mut(&client)?;
        match *blocked {
            Blocked::Listening(listening) => Some((blocked, listening)),
            _ => None,
        }
    }

    /// Notes that we are about to emit an event of this key. True if we listen to such events.
    pub(crate) fn begin_own_event(&mut self, key: Str<'_>) -> bool {
        self.own_event = self.hears_key_events.then(|| key.address());
        self.own_event.is_some()
    }

    /// Whether an event of this key is the one that we emit ourselves. Later events are not.
    pub(crate) fn take_own_event(&mut self, key: Str<'_>) -> bool {
        let is_own = self.own_event == Some(key.address());
        if is_own {
            self.own_event = None;
        }
        is_own
    }

    /// Forgets a client that the server keeps blocked no longer.
    pub(crate) fn forget(&mut self, client: Handle) {
        self.blocked.remove(&client);
        if self.blocked.is_empty() {
            self.blocked.shrink_to(ROOM_KEPT);
        }
    }

    /// Takes a client's wait out of its record, when its block ends. A grant counts as undelivered
    /// no longer.
    pub(crate) fn told(&mut self, client: Handle) -> Option<Blocked> {
        let told = self.blocked.get_mut(&client);
        let told = told.map(|told| std::mem::replace(told, Blocked::Gone));
        if let Some(Blocked::Granted(_)) = told {
            self.undelivered.delivered();
        }
        told
    }

    /// Notes that the owner was just told that it holds this lock, by an answer to ONCE or RENEW.
    /// If the grant is still on its way to a former connection of the owner, the end of that
    /// connection must not take the lock away again.
    pub(crate) fn confirm(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        mode: Mode,
        knows_count: bool,
    ) {
        if self.undelivered.count == 0 {
            return;
        }
        for client in self.undelivered.of(owner, lock.name, &self.blocked) {
            if let Some(Blocked::Granted(granted)) = self.blocked.get_mut(client)
                && granted.grant.mode == mode
                && *granted.owner == *owner
                && let Some(is_all) = granted.grant.confirm(&granted.lock, lock, knows_count)
            {
                granted.confirmed |= is_all;
            }
        }
    }
}
