//! A driver that does with the core what the module does in a server, step by step, with the twin
//! beside it and every invariant looked at after each step.

use super::foreign::{self, Change};
use super::invariants;
use super::keyspace::{Keyspace, Reading, Value, number};
use super::life::{HoldName, Name, News, TwinEnding, TwinEvent, in_any_order};
use super::twin::{Asked, Heard, Reply, Twin, TwinWaiter, Waits};
use rlock_core::request::{Acquire, Cancel, Events, Release, Renew, WaitMode};
use rlock_core::{
    Acquired, BlockedClient, CommandError, Counters, Due, Effect, Event, EventKind, Found, Grant,
    Lease, LockKey, LockRef, Locks, LostReason, Mode, Now, Overdue, PendingRelease, ReadDepth,
    SessionId, SessionLimits, Token, Wait, WaitOutcome, WaiterId,
};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The locks that histories are about. The timeout keys of the second have its own tag.
pub(crate) const LOCKS: [&[u8]; 2] = [b"a", b"x{b}y"];
/// Those who want them: any bytes.
pub(crate) const OWNERS: [&[u8]; 3] = [b"A", b"B:rwlock_timeout:1", b"\xff\0"];
/// Their sessions.
pub(crate) const SESSIONS: [&[u8]; 2] = [b"s", b"\xff\0"];
/// How many may wait for one lock.
pub(crate) const WAITERS_MAX: u32 = 6;

const A_DAY_MS: i64 = 86_400_000;

/// One thing that happens. Its `Debug` form is the code that makes it happen again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Acquire {
        lock: usize,
        owner: usize,
        mode: Mode,
        lease_ms: i64,
        waits: Waits,
        session: Option<Name>,
        once: bool,
    },
    Release {
        lock: usize,
        owner: usize,
        mode: Mode,
        token: Named,
        lease_ms: Option<i64>,
    },
    Renew {
        lock: usize,
        owner: usize,
        mode: Mode,
        lease_ms: i64,
        token: Named,
        session: Option<Name>,
    },
    /// From one of a few connections.
    Events {
        session: Name,
        client: usize,
        grace_ms: i64,
    },
    /// The connection closes.
    Close {
        client: usize,
    },
    Cancel {
        lock: usize,
        owner: usize,
    },
    Break {
        lock: usize,
    },
    /// Both clocks go on.
    Pass {
        ms: i64,
    },
    /// Both clocks go on to the next deadline, and this much past it.
    PassDeadline {
        more_ms: i64,
    },
    /// Somebody sets the wall clock.
    StepClock {
        ms: i64,
    },
    /// A blocked client's connection closes: of those who wait, then of those whose grant is still
    /// on its way, the one with this number, counted around.
    Disconnect {
        client: usize,
    },
    /// Whatever is on its way arrives.
    Deliver,
    /// Somebody else writes to the keys, all in one step; `told` is whether an event says so.
    Foreign {
        lock: usize,
        changes: Vec<Change>,
        told: bool,
    },
    /// The server becomes a replica, and primary again.
    Failover {
        guard_ms: i64,
    },
}

/// The token that a command names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    No,
    /// The hold's present one.
    Present,
    /// A smaller one.
    Stale,
}

#[derive(Debug)]
pub(crate) struct World {
    locks: Locks,
    space: Keyspace,
    pub(crate) twin: Twin,
    clock: Clock,
    how: Reading,
    /// Who waits: the core's name for it, by seat.
    waiting: BTreeMap<usize, WaiterId>,
    /// Those who are blocked and have heard nothing yet.
    blocked: BTreeSet<usize>,
    /// Grants that were told and have not arrived.
    under_way: Vec<UnderWay>,
    heard: Vec<(usize, Heard)>,
    published: Vec<(Vec<u8>, Mode)>,
    /// Locks from whose hashes the fields were taken of readers whose leases are over.
    swept: Vec<Vec<u8>>,
    /// The connections that EVENTS may come from, and how many there were.
    connections: [u64; 3],
    clients: u64,
    seats: usize,
    seated: u64,
    /// Locks that changed without an event, and were not looked at since.
    unseen: BTreeSet<Vec<u8>>,
    /// The same for holds of sessions.
    unseen_holds: BTreeSet<HoldName>,
    /// Whether nobody but the module has written anything.
    is_alone: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct UnderWay {
    lock: LockKey,
    owner: Rc<[u8]>,
    grant: Grant,
}

#[derive(Clone, Copy, Debug)]
struct Clock {
    now: Now,
    /// How far the wall clock is behind the most it was ever ahead.
    set_back_ms: i64,
}

impl Default for World {
    fn default() -> Self {
        let clients = 1_000_002;
        let now = Now {
            wall_us: 1_000_000_500,
            mono_ms: 70,
        };
        let set_back_ms = 0;
        Self {
            locks: Locks::default(),
            space: Keyspace::default(),
            twin: Twin::default(),
            clock: Clock { now, set_back_ms },
            how: Reading::All,
            waiting: BTreeMap::new(),
            blocked: BTreeSet::new(),
            under_way: Vec::new(),
            heard: Vec::new(),
            published: Vec::new(),
            swept: Vec::new(),
            connections: [clients - 2, clients - 1, clients],
            clients,
            seats: 0,
            seated: 0,
            unseen: BTreeSet::new(),
            unseen_holds: BTreeSet::new(),
            is_alone: true,
        }
    }
}

/// Runs a history from the start, and fetches in the end what there is to be fetched.
///
/// # Errors
/// What was wrong, and after which step.
pub(crate) fn replay(history: &[Op], how: Reading) -> Result<World, String> {
    let mut world = replay_to(history, how)?;
    let tell = |wrong| format!("{wrong}\nat the end of this history:\n{history:?}");
    world.fetch_all().map_err(tell)?;
    Ok(world)
}

/// The same, and nobody has fetched yet what is there to be fetched.
pub(crate) fn replay_to(history: &[Op], how: Reading) -> Result<World, String> {
    let mut world = World::new(how);
    for (at, op) in history.iter().enumerate() {
        world.step(op).map_err(|wrong| {
            format!("{wrong}\nat step {at} of this history, which replays it:\n{history:?}")
        })?;
    }
    Ok(world)
}

impl World {
    pub(crate) fn new(how: Reading) -> Self {
        Self {
            how,
            ..Self::default()
        }
    }

    /// One thing happens, the driver does its part, and everything is compared. What was answered.
    pub(crate) fn step(&mut self, op: &Op) -> Result<Reply, String> {
        self.overlook_shared_holds();
        let (of_core, of_twin) = self.happen(op)?;
        if of_core != of_twin {
            return Err(format!("{op:?}: core {of_core:?}, twin {of_twin:?}"));
        }
        self.come_to_rest()?;
        self.overlook_shared_holds();
        let Clock { now, set_back_ms } = self.clock;
        invariants::is_at_rest(&self.locks, &self.twin, &self.unseen, set_back_ms, now)?;
        invariants::sessions_are_at_rest(&self.locks, &self.twin, &self.unseen_holds, now)?;
        self.compare()?;
        self.twin.remember_writers();
        Ok(of_core)
    }

    pub(crate) fn now(&self) -> Now {
        self.clock.now
    }

    pub(crate) fn next_deadline(&self) -> Option<i64> {
        self.locks.next_deadline(self.clock.now)
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.locks.counters()
    }

    /// Grants that have not arrived: whose, of which lock, and whether the hold is still that one.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (&[u8], &[u8], Mode, bool)> {
        self.under_way.iter().map(|under_way| {
            let UnderWay { lock, owner, grant } = under_way;
            let present = self.twin.token(&lock.name, owner, grant.mode);
            let is_present = present == Some(grant.token.get());
            (&*lock.name, &**owner, grant.mode, is_present)
        })
    }

    /// Where an owner reads both with us and with Redisson, which writes no token, what is on
    /// record cannot be told from what is there: as if that had changed without word.
    fn overlook_shared_holds(&mut self) {
        for ((lock, owner, mode), hold) in &self.twin.life.holds {
            let mut keys = self.space.timeouts(lock, owner).into_iter();
            let is_ours = |value: &Value| match value {
                Value::Text(value) => number(value) == hold.token,
                Value::Hash(_) => false,
            };
            if *mode == Mode::Read && keys.any(|(_, key)| !is_ours(&key.value)) {
                let of = (lock.clone(), owner.clone(), *mode);
                self.unseen_holds.insert(of);
            }
        }
    }

    fn happen(&mut self, op: &Op) -> Result<(Reply, Reply), String> {
        match *op {
            Op::Acquire {
                lock,
                owner,
                mode,
                lease_ms,
                waits,
                session,
                once,
            } => {
                let asked = Asked {
                    owner: OWNERS[owner],
                    mode,
                    lease_ms,
                    waits,
                    session,
                    once,
                    seat: self.seats,
                    waiters_max: usize::try_from(WAITERS_MAX).unwrap(),
                };
                let of_core = self.acquire(LOCKS[lock], asked)?;
                self.twin.is_found = of_core == Reply::Deadlock;
                let now = self.clock.now;
                Ok((of_core, self.twin.acquire(LOCKS[lock], asked, now)))
            }
            Op::Release {
                lock,
                owner,
                mode,
                token,
                lease_ms,
            } => self.release(LOCKS[lock], OWNERS[owner], mode, token, lease_ms),
            Op::Renew {
                lock,
                owner,
                mode,
                lease_ms,
                token,
                session,
            } => self.renew(LOCKS[lock], OWNERS[owner], mode, lease_ms, token, session),
            Op::Events {
                session,
                client,
                grace_ms,
            } => self.events(session, self.connections[client], grace_ms),
            Op::Close { client } => self.close(client),
            Op::Cancel { lock, owner } => self.cancel(LOCKS[lock], OWNERS[owner]),
            Op::Break { lock } => self.break_hold(LOCKS[lock]),
            _ => {
                self.happen_around(op)?;
                Ok((Reply::Nothing, Reply::Nothing))
            }
        }
    }

    /// What is no command of ours.
    fn happen_around(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Pass { ms } => self.pass(*ms),
            Op::PassDeadline { more_ms } => {
                let deadline = self.locks.next_deadline(self.clock.now);
                self.pass(deadline.unwrap_or(0).min(A_DAY_MS) + more_ms);
            }
            Op::StepClock { ms } => {
                self.clock.now.wall_us += ms * 1000;
                self.clock.set_back_ms = (self.clock.set_back_ms - ms).max(0);
                self.expire();
            }
            Op::Disconnect { client } => self.disconnect(*client)?,
            Op::Deliver => self.under_way.clear(),
            Op::Foreign {
                lock,
                changes,
                told,
            } => self.foreign(*lock, changes, *told),
            Op::Failover { guard_ms } => {
                let (now, mut effects) = (self.clock.now, Vec::new());
                self.locks.demoted(&mut effects);
                self.carry_out(b"", b"", &effects)?;
                self.twin.demoted();
                // Their grants are the new primary's to end.
                self.under_way.clear();
                self.locks.start_tokens(now, *guard_ms);
                self.twin.start_tokens(*guard_ms, now);
            }
            _ => {}
        }
        Ok(())
    }

    fn load(&self, lock: &[u8], owner: &[u8]) -> rlock_core::Stored {
        self.space.read(lock, owner, ReadDepth::Whole, self.how)
    }

    /// What the first in line is shown, as in the driver's `settle.rs`.
    fn load_for_first(&self, lock: &[u8], owner: &[u8]) -> rlock_core::Stored {
        let depth = match self.locks.first_mode(lock_ref(lock)) {
            Some(Mode::Read) => ReadDepth::Brief,
            _ => ReadDepth::Whole,
        };
        self.space.read(lock, owner, depth, self.how)
    }

    /// What is left to be decided within this step.
    fn go_on(&mut self) -> Result<(), String> {
        for _ in 0..100 {
            let lock = match self.locks.next_due() {
                None => return Ok(()),
                Some(Due::Line(lock)) => lock,
                Some(due) => return Err(format!("{due:?}, and nobody waits for several")),
            };
            let Some(first) = self.locks.first_owner(lock.as_ref()) else {
                continue;
            };
            let now = self.clock.now;
            let stored = self.load_for_first(&lock.name, &first);
            let mut effects = Vec::new();
            self.locks.settle(lock.as_ref(), stored, now, &mut effects);
            self.carry_out(&lock.name, b"", &effects)?;
        }
        Err("there is always something more due".into())
    }

    // --- Commands --------------------------------------------------------------------------------

    fn acquire(&mut self, lock: &[u8], asked: Asked<'_>) -> Result<Reply, String> {
        let request = Acquire {
            key: lock,
            owner: asked.owner,
            lease: Lease::from_ms(asked.lease_ms).unwrap(),
            mode: asked.mode,
            wait_mode: match asked.waits {
                Waits::No => WaitMode::None,
                Waits::Block(ms) => WaitMode::Block(Wait::from_ms(ms).unwrap()),
                Waits::Queue(ms) => WaitMode::Queue(Wait::from_ms(ms).unwrap()),
            },
            session: asked.session.map(|name| SESSIONS[name].into()),
            once: asked.once,
        };
        let now = self.clock.now;
        let how_much = match asked.waits {
            Waits::No if !asked.once => ReadDepth::Brief,
            _ => ReadDepth::Whole,
        };
        self.end_holds_of(lock)?;
        for _ in 0..3 {
            let stored = self.space.read(lock, asked.owner, how_much, self.how);
            let mut effects = Vec::new();
            let acquired = self.locks.acquire(
                lock_ref(lock),
                stored,
                &request,
                WAITERS_MAX,
                now,
                &mut effects,
            );
            if acquired.is_err() && !effects.is_empty() {
                return Err(format!("refused, and yet {effects:?}"));
            }
            self.carry_out(lock, asked.owner, &effects)?;
            self.go_on()?;
            let ends_at = match acquired {
                Err(CommandError::Deadlock(_)) => return Ok(Reply::Deadlock),
                Err(refusal) => return Ok(Reply::Refused(refusal.to_string())),
                Ok(Acquired::Held { count, token }) => {
                    let token = token.get();
                    return Ok(Reply::Held { count, token });
                }
                Ok(Acquired::NotHeld { ttl_ms }) => return Ok(Reply::NotHeld { ttl_ms }),
                Ok(Acquired::SettleFirst) => {
                    self.settle_first(lock)?;
                    continue;
                }
                Ok(Acquired::MustWait { ends_at, .. }) => ends_at,
            };
            if self.is_refused_for_good(lock, &request)? {
                return Ok(Reply::Deadlock);
            }
            return self.join(lock, asked, &request, ends_at);
        }
        Err("those in line are never settled".into())
    }

    /// Settles a line before a newcomer is looked at.
    fn settle_first(&mut self, lock: &[u8]) -> Result<(), String> {
        let now = self.clock.now;
        let queue = self.locks.queue(lock_ref(lock), now);
        let first = queue.first().ok_or("nobody is there to be settled first")?;
        self.end_holds_of(lock)?;
        let stored = self.load_for_first(lock, &first.owner);
        let mut effects = Vec::new();
        self.locks.settle(lock_ref(lock), stored, now, &mut effects);
        self.carry_out(lock, b"", &effects)?;
        self.go_on()
    }

    /// Walks the search for a deadlock as the driver does.
    fn is_refused_for_good(&mut self, lock: &[u8], request: &Acquire<'_>) -> Result<bool, String> {
        let search = self.locks.search_deadlock(lock_ref(lock), request);
        let Some((mut search, mut found)) = search else {
            return Ok(false);
        };
        for _ in 0..100 {
            let of = match found {
                Found::Nothing => return Ok(false),
                Found::Circle(CommandError::Deadlock(_)) => return Ok(true),
                Found::Circle(other) => return Err(format!("refused with {other}")),
                Found::Ask(of) => of,
            };
            let holders = self.space.holders(&of.name);
            found = self.locks.search_on(&mut search, &holders);
        }
        Err("the search for a circle has no end".into())
    }

    fn join(
        &mut self,
        lock: &[u8],
        asked: Asked<'_>,
        request: &Acquire<'_>,
        ends_at: Option<i64>,
    ) -> Result<Reply, String> {
        let (now, seat) = (self.clock.now, asked.seat);
        self.seats += 1;
        self.seated += 1;
        let client = BlockedClient {
            handle: seat,
            client_id: u64::try_from(seat).unwrap(),
        };
        let is_blocked = matches!(asked.waits, Waits::Block(_));
        let client = is_blocked.then_some(client);
        let mut effects = Vec::new();
        let at = lock_ref(lock);
        let joined = self
            .locks
            .join(at, request, client, ends_at, now, &mut effects)
            .ok_or("no room for a waiter")?;
        self.carry_out(lock, asked.owner, &effects)?;
        self.go_on()?;
        self.waiting.insert(seat, joined.waiter);
        if is_blocked {
            self.blocked.insert(seat);
        }
        let position = joined.position;
        Ok(if is_blocked {
            Reply::Waits
        } else {
            Reply::Queued { position }
        })
    }

    fn release(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        mode: Mode,
        token: Named,
        lease_ms: Option<i64>,
    ) -> Result<(Reply, Reply), String> {
        let token = self.token(lock, owner, mode, token);
        let request = Release {
            key: lock,
            owner,
            mode,
            token: token.and_then(Token::new),
            lease: lease_ms.map(|ms| Lease::from_ms(ms).unwrap()),
        };
        self.end_holds_of(lock)?;
        let (now, stored) = (self.clock.now, self.load(lock, owner));
        let mut effects = Vec::new();
        let left = self
            .locks
            .release(lock_ref(lock), stored, &request, now, &mut effects);
        let left = left.map(|left| left.map_or(Reply::Null, Reply::Number));
        let of_core = answer(left, &effects)?;
        self.carry_out(lock, owner, &effects)?;
        self.go_on()?;
        let of_twin = self.twin.release(lock, owner, mode, token, lease_ms, now);
        Ok((of_core, of_twin))
    }

    fn renew(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        mode: Mode,
        lease_ms: i64,
        token: Named,
        session: Option<Name>,
    ) -> Result<(Reply, Reply), String> {
        let token = self.token(lock, owner, mode, token);
        let request = Renew {
            key: lock,
            owner,
            lease: Lease::from_ms(lease_ms).unwrap(),
            mode,
            token: token.and_then(Token::new),
            session: session.map(|name| SESSIONS[name].into()),
        };
        self.end_holds_of(lock)?;
        let (now, stored) = (self.clock.now, self.load(lock, owner));
        let mut effects = Vec::new();
        let held = self
            .locks
            .renew(lock_ref(lock), stored, &request, now, &mut effects);
        let of_core = answer(held.map(|held| Reply::Number(i64::from(held))), &effects)?;
        self.carry_out(lock, owner, &effects)?;
        self.go_on()?;
        let twin = &mut self.twin;
        let of_twin = twin.renew(lock, owner, mode, lease_ms, token, session, now);
        Ok((of_core, of_twin))
    }

    fn cancel(&mut self, lock: &[u8], owner: &[u8]) -> Result<(Reply, Reply), String> {
        let request = Cancel { key: lock, owner };
        self.end_holds_of(lock)?;
        let (now, stored) = (self.clock.now, self.load(lock, owner));
        let mut effects = Vec::new();
        let left = self
            .locks
            .cancel(lock_ref(lock), stored, &request, now, &mut effects);
        self.carry_out(lock, owner, &effects)?;
        self.go_on()?;
        Ok((Reply::Number(left), self.twin.cancel(lock, owner, now)))
    }

    fn break_hold(&mut self, lock: &[u8]) -> Result<(Reply, Reply), String> {
        self.end_holds_of(lock)?;
        let (now, stored) = (self.clock.now, self.load(lock, b""));
        let mut effects = Vec::new();
        let broken = self
            .locks
            .break_hold(lock_ref(lock), stored, now, &mut effects);
        let broken = broken.map(|broken| Reply::Number(i64::from(broken)));
        let of_core = answer(broken, &effects)?;
        self.carry_out(lock, b"", &effects)?;
        self.go_on()?;
        Ok((of_core, self.twin.break_hold(lock, now)))
    }

    fn token(&self, lock: &[u8], owner: &[u8], mode: Mode, named: Named) -> Option<i64> {
        let present = self.twin.token(lock, owner, mode).unwrap_or(2);
        match named {
            Named::No => None,
            Named::Present => Some(present),
            Named::Stale => Some((present - 1).max(1)),
        }
    }

    // --- Sessions --------------------------------------------------------------------------------

    fn events(
        &mut self,
        name: Name,
        client_id: u64,
        grace_ms: i64,
    ) -> Result<(Reply, Reply), String> {
        let request = Events {
            session: SESSIONS[name].into(),
            block: None,
            grace_ms,
        };
        let mut effects = Vec::new();
        let limits = SessionLimits {
            sessions: 10,
            events_per_session: 1000,
            out_of_memory: false,
        };
        let session = self.locks.attach(&request, client_id, limits, &mut effects);
        let session = session.map_err(|refusal| refusal.to_string())?;
        if !effects.is_empty() {
            return Err(format!("nobody listens, and yet {effects:?}"));
        }
        self.twin.life.attach(name, client_id, grace_ms);
        Ok(self.fetch(name, session))
    }

    /// Takes the events of a session, and what they should be.
    fn fetch(&mut self, name: Name, session: SessionId) -> (Reply, Reply) {
        let events = self.locks.fetch(session);
        let events = events.iter().map(shown).collect();
        let should = self.twin.life.fetch(name);
        let told = |events| Reply::Events(in_any_order(events));
        (told(events), told(should))
    }

    /// A connection closes; the next on this place is another client's.
    fn close(&mut self, client: usize) -> Result<(Reply, Reply), String> {
        let client_id = self.connections[client];
        self.clients += 1;
        self.connections[client] = self.clients;
        let now = self.clock.now;
        let mut effects = Vec::new();
        let any = self.locks.client_gone(client_id, now, &mut effects);
        self.carry_out(b"", b"", &effects)?;
        let should = self.twin.client_gone(client_id, now);
        let told = |any| Reply::Number(i64::from(any));
        Ok((told(any), told(should)))
    }

    /// Everybody fetches what there is: nothing that was told may stay unread in the end.
    pub(crate) fn fetch_all(&mut self) -> Result<(), String> {
        for name in 0..SESSIONS.len() {
            let (of_core, of_twin) = self.events(name, 7, 0)?;
            if of_core != of_twin {
                return Err(format!("in the end: core {of_core:?}, twin {of_twin:?}"));
            }
        }
        self.compare()
    }

    // --- What happens without a command ----------------------------------------------------------

    fn pass(&mut self, ms: i64) {
        self.clock.now.wall_us += ms * 1000;
        self.clock.now.mono_ms += ms;
        self.expire();
    }

    fn expire(&mut self) {
        let wall_ms = self.clock.now.wall_ms();
        self.space.expire(wall_ms);
        self.twin.space.expire(wall_ms);
    }

    fn disconnect(&mut self, client: usize) -> Result<(), String> {
        let is_blocked = |seat| self.twin.waiter(seat).is_some_and(|of| !of.is_queued);
        let blocked: Vec<(usize, WaiterId)> = self
            .waiting
            .iter()
            .filter(|(seat, _)| is_blocked(**seat))
            .map(|(seat, id)| (*seat, *id))
            .collect();
        let clients = blocked.len() + self.under_way.len();
        let client = client.checked_rem(clients).unwrap_or(0);
        if let Some(&(seat, id)) = blocked.get(client) {
            let lock = self.twin.lock_of(seat);
            let left = self.locks.depart(id).map(|lock| lock.name.to_vec());
            if left.as_ref() != Some(&lock) || self.locks.depart(id).is_some() {
                return Err(format!(
                    "seat {seat} departs from {left:?}, not once from {lock:?}"
                ));
            }
            self.waiting.remove(&seat);
            self.blocked.remove(&seat);
            self.twin.depart(seat);
        } else if clients > 0 {
            let UnderWay { lock, owner, grant } = self.under_way.remove(client - blocked.len());
            self.twin.life.endings.push(TwinEnding {
                hold: (lock.name.to_vec(), owner.to_vec(), grant.mode),
                token: Some(grant.token.get()),
                whole: false,
            });
            self.locks.give_back_later(lock, &owner, grant);
        }
        Ok(())
    }

    fn foreign(&mut self, lock: usize, changes: &[Change], told: bool) {
        let wall_ms = self.clock.now.wall_ms();
        let mut space = self.space.clone();
        let mut locks = BTreeSet::new();
        for change in changes {
            foreign::make(&mut space, lock, *change, wall_ms);
            locks.extend(foreign::changed(lock, *change));
        }
        // What others write in the name of a writer whose token is still known cannot be told from
        // what it had, and is left out.
        let poses = |lock: &[u8], owner: &Vec<u8>| {
            let is_known = self.twin.token(lock, owner, Mode::Write).is_some();
            is_known && !self.space.writers(lock).contains(owner)
        };
        if LOCKS
            .iter()
            .any(|lock| space.writers(lock).iter().any(|of| poses(lock, of)))
        {
            return;
        }
        self.is_alone = false;
        self.space = space;
        for change in changes {
            foreign::make(&mut self.twin.space, lock, *change, wall_ms);
        }
        for lock in locks {
            self.keep_in_time(LOCKS[lock]);
            if told {
                self.locks.touched(lock_ref(LOCKS[lock]));
            } else {
                self.unseen.insert(LOCKS[lock].to_vec());
                let holds = self.twin.life.holds.keys();
                let holds = holds.filter(|(of, ..)| *of == LOCKS[lock]);
                self.unseen_holds.extend(holds.cloned());
            }
        }
        self.expire();
    }

    /// A server may forget a writer's token when the lease is over as far as it heard of it. Here
    /// nobody else makes a lease longer that a token is known of; what is promised then all the
    /// same has a test of its own.
    fn keep_in_time(&mut self, lock: &[u8]) {
        let Some(until) = self.twin.known_writer_until(lock) else {
            return;
        };
        for space in [&mut self.space, &mut self.twin.space] {
            if let Some(entry) = space.get_mut(lock) {
                entry.ends_at = Some(entry.ends_at.map_or(until, |end| end.min(until)));
            }
        }
    }

    /// The timer, as often as it is due.
    fn come_to_rest(&mut self) -> Result<(), String> {
        let now = self.clock.now;
        for _ in 0..100 {
            if self.locks.next_deadline(now) != Some(0) {
                return Ok(());
            }
            while let Some(overdue) = self.locks.next_timeout(now) {
                self.time_out(&overdue, now)?;
            }
            let mut effects = Vec::new();
            self.locks.passed(now, &mut effects);
            self.carry_out(b"", b"", &effects)?;
            self.twin.life.passed(now);
            self.end_holds()?;
            self.check_holds()?;
            self.settle_lines()?;
            self.forget_those_who_left();
        }
        Err("there is always something more to do".into())
    }

    /// Ends holds that nobody is left to know of.
    fn end_holds(&mut self) -> Result<(), String> {
        while let Some(ending) = self.locks.next_ending() {
            self.end(&ending)?;
        }
        if self.twin.life.endings.is_empty() {
            return Ok(());
        }
        Err(format!("not ended: {:?}", self.twin.life.endings))
    }

    /// Those of one lock, before a command does anything there.
    fn end_holds_of(&mut self, lock: &[u8]) -> Result<(), String> {
        while let Some(ending) = self.locks.next_ending_of(lock_ref(lock)) {
            self.end(&ending)?;
        }
        let left = &self.twin.life.endings;
        if left.iter().all(|ending| ending.hold.0 != lock) {
            return Ok(());
        }
        Err(format!("not ended: {left:?}"))
    }

    fn end(&mut self, ending: &PendingRelease) -> Result<(), String> {
        let PendingRelease {
            lock,
            owner,
            mode,
            token,
            whole,
        } = ending;
        let now = self.clock.now;
        let stored = self.load(&lock.name, owner);
        let mut effects = Vec::new();
        self.locks.end(ending, stored, now, &mut effects);
        self.carry_out(&lock.name, owner, &effects)?;
        self.go_on()?;
        let should = TwinEnding {
            hold: (lock.name.to_vec(), owner.to_vec(), *mode),
            token: token.map(Token::get),
            whole: *whole,
        };
        self.twin.end(&should, now)?;
        self.forget_those_who_left();
        Ok(())
    }

    /// Looks at the keys of the holds that may be lost.
    fn check_holds(&mut self) -> Result<(), String> {
        let now = self.clock.now;
        for _ in 0..100 {
            let Some((lock, owner, mode)) = self.locks.next_hold_to_check() else {
                return Ok(());
            };
            let stored = self
                .space
                .read(&lock.name, &owner, ReadDepth::Own, self.how);
            let (at, mut effects) = (lock.as_ref(), Vec::new());
            self.locks
                .check_hold(at, &owner, mode, stored, now, &mut effects);
            self.carry_out(&lock.name, b"", &effects)?;
            self.go_on()?;
            let of = (lock.name.to_vec(), owner.to_vec(), mode);
            self.twin.check_hold(&of, now);
            self.unseen_holds.remove(&of);
        }
        Err("there is always one more hold to check".into())
    }

    fn settle_lines(&mut self) -> Result<(), String> {
        let now = self.clock.now;
        for _ in 0..100 {
            let Some(lock) = self.locks.next_to_settle() else {
                return Ok(());
            };
            let Some(first) = self.locks.first_owner(lock.as_ref()) else {
                continue;
            };
            let stored = self.load_for_first(&lock.name, &first);
            let mut effects = Vec::new();
            self.locks.settle(lock.as_ref(), stored, now, &mut effects);
            self.carry_out(&lock.name, b"", &effects)?;
            self.go_on()?;
            self.twin.settle(&lock.name, now);
            self.unseen.remove(&*lock.name);
        }
        Err("there is always something more to settle".into())
    }

    /// Queued waiters leave without a word to us.
    fn forget_those_who_left(&mut self) {
        let twin = &self.twin;
        self.waiting.retain(|seat, _| twin.waiter(*seat).is_some());
    }

    /// Whose wait has ended first leaves first. Of several that end together any may.
    fn time_out(&mut self, overdue: &Overdue, now: Now) -> Result<(), String> {
        let end_of = |seat| self.twin.waiter(seat).and_then(|waiter| waiter.wait_end);
        let first = self
            .waiting
            .iter()
            .filter_map(|(seat, id)| Some((end_of(*seat)?, id, *seat)))
            .min();
        let (_, _, seat) = first.ok_or("nobody waits that could be timed out")?;
        let [lock] = overdue.locks.as_slice() else {
            return Err(format!("{overdue:?}, and nobody waits for several"));
        };
        let stored = self.load(&lock.name, &overdue.owner);
        let mut effects = Vec::new();
        self.locks.time_out(&[stored], now, &mut effects);
        self.carry_out(&lock.name, b"", &effects)?;
        self.go_on()?;
        self.twin.time_out(seat, now)?;
        self.forget_those_who_left();
        Ok(())
    }

    // --- Effects and comparison ------------------------------------------------------------------

    fn carry_out(&mut self, lock: &[u8], caller: &[u8], effects: &[Effect]) -> Result<(), String> {
        for effect in effects {
            self.carry_out_one(lock, caller, effect)
                .map_err(|wrong| format!("{wrong}: {effect:?} of {effects:?}"))?;
        }
        Ok(())
    }

    fn carry_out_one(&mut self, lock: &[u8], caller: &[u8], effect: &Effect) -> Result<(), String> {
        self.space.carry_out(lock, caller, effect)?;
        match effect {
            // When that is done is nobody else's business, as long as nobody can tell.
            Effect::SweepReaders => self.swept.push(lock.to_vec()),
            Effect::Publish(mode) => self.published.push((lock.to_vec(), *mode)),
            Effect::Grant {
                client,
                lock,
                owner,
                count,
                grant,
            } => {
                if !self.space.holders(&lock.name).contains(&(**owner).into()) {
                    return Err("a grant is told before it is written".into());
                }
                let granted = Heard::Granted {
                    count: *count,
                    token: grant.token.get(),
                };
                self.hears(*client, granted)?;
                self.under_way.push(UnderWay {
                    lock: lock.clone(),
                    owner: Rc::clone(owner),
                    grant: grant.clone(),
                });
            }
            Effect::Dismiss { client, why } => {
                let heard = match why {
                    WaitOutcome::NotAcquired { ttl_ms } => Heard::NotAcquired { ttl_ms: *ttl_ms },
                    WaitOutcome::Refused(refusal) => Heard::Refused(refusal.to_string()),
                };
                self.hears(*client, heard)?;
            }
            Effect::Wake(listener) | Effect::TakenOver(listener) => {
                return Err(format!("{listener} is called, who does not listen"));
            }
            _ => {}
        }
        Ok(())
    }

    fn hears(&mut self, seat: usize, heard: Heard) -> Result<(), String> {
        self.heard.push((seat, heard));
        self.waiting.remove(&seat);
        if self.blocked.remove(&seat) {
            Ok(())
        } else {
            Err(format!("{seat} hears something twice"))
        }
    }

    fn compare(&mut self) -> Result<(), String> {
        let heard = left_in_any_order(std::mem::take(&mut self.heard));
        let should = left_in_any_order(std::mem::take(&mut self.twin.heard));
        if heard != should {
            return Err(format!("heard {heard:?}\n  should {should:?}"));
        }
        let published = std::mem::take(&mut self.published);
        let should = std::mem::take(&mut self.twin.published);
        if published != should {
            return Err(format!("published {published:?}\n  should {should:?}"));
        }
        for lock in std::mem::take(&mut self.swept) {
            self.twin.space.sweep_readers(&lock);
        }
        if self.space != self.twin.space {
            return Err(format!(
                "stored {:?}\n  should {:?}",
                self.space, self.twin.space
            ));
        }
        let Self {
            locks, twin, clock, ..
        } = self;
        invariants::views_are_true(locks, twin, clock.now)?;
        invariants::sessions_are_true(locks, twin)?;
        invariants::counters_add_up(locks, twin, self.seated)?;
        if self.is_alone {
            invariants::keys_are_ours(&self.space, twin)?;
        }
        Ok(())
    }

    /// Who waits for a lock, in order.
    pub(crate) fn line(&self, lock: usize) -> &[TwinWaiter] {
        self.twin.line(LOCKS[lock])
    }

    /// What stands in the keyspace.
    pub(crate) fn space(&self) -> &Keyspace {
        &self.space
    }
}

/// Brings those into one order who leave together, because nothing is left to wait for.
fn left_in_any_order(mut heard: Vec<(usize, Heard)>) -> Vec<(usize, Heard)> {
    let is_together = |one: &(usize, Heard), next: &(usize, Heard)| {
        matches!(one.1, Heard::Refused(_)) && one.1 == next.1
    };
    for run in heard.chunk_by_mut(is_together) {
        run.sort_by_key(|(seat, _)| *seat);
    }
    heard
}

fn lock_ref(lock: &[u8]) -> LockRef<'_> {
    LockRef { db: 0, name: lock }
}

/// An answer; a refusal must have changed nothing.
fn answer(reply: Result<Reply, CommandError>, effects: &[Effect]) -> Result<Reply, String> {
    match reply {
        Ok(reply) => Ok(reply),
        Err(refusal) if effects.is_empty() => Ok(Reply::Refused(refusal.to_string())),
        Err(_) => Err(format!("refused, and yet {effects:?}")),
    }
}

fn shown(event: &Event) -> TwinEvent {
    let news = match &event.kind {
        EventKind::Granted(grant) => News::Granted(grant.token.get()),
        EventKind::Timeout { ttl_ms } => News::Timeout(*ttl_ms),
        EventKind::Lost(LostReason::Expired) => News::Lost("expired"),
        EventKind::Lost(LostReason::Broken) => News::Lost("broken"),
        EventKind::Lost(LostReason::Deleted) => News::Lost("deleted"),
        EventKind::Error(refusal) => News::Error(refusal.to_string()),
    };
    TwinEvent {
        news,
        lock: event.lock.name.to_vec(),
        owner: event.owner.to_vec(),
    }
}
