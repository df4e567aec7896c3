//! A driver that does with the core what the module does in a server, step by step, with the twin
//! beside it and every invariant looked at after each step.

use crate::invariants::{self, Ledger};
use crate::keyspace::{Entry, Fields, Keyspace, Place, Value};
use crate::life::{Call, Name};
use crate::twin::{Asked, Heard, Reply, Twin, TwinWaiter, Waits};
use rlock_core::request::{Acquire, Cancel, Release, Renew, SessionRef, WaitMode};
use rlock_core::{
    Acquired, BlockedClient, CommandError, Counters, DeadlockSearch, Effect, Found, Grant, Lease,
    LockKey, LockRef, Locks, Mode, Now, Overdue, SessionLimits, Stored, Token, Wait, WaitOutcome,
    WaiterId,
};
use std::collections::{BTreeMap, BTreeSet};

/// The locks that histories are about: three in one database, and one of the same name in another.
pub(crate) const LOCKS: [(i32, &[u8]); 4] = [(0, b"a"), (0, b""), (1, b"a"), (0, b"\xff")];
/// Those in one database, which one command can name together.
pub(crate) const TOGETHER: [usize; 3] = [0, 1, 3];
/// Those who want them: any bytes.
pub(crate) const OWNERS: [&[u8]; 3] = [b"A", b"B", b"\xff\0"];
/// Their sessions: any bytes.
pub(crate) const SESSIONS: [&[u8]; 2] = [b"s", b"\xff\0"];
/// Whose commands they are.
pub(crate) const USERS: [&[u8]; 2] = [b"default", b"guest"];
/// How many may wait for one lock.
pub(crate) const WAITERS_MAX: u32 = 4;

mod sessions;
mod several;
use sessions::Listening;

const A_DAY_MS: i64 = 86_400_000;

/// One thing that happens. Its `Debug` form is the code that makes it happen again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Acquire {
        lock: usize,
        owner: usize,
        lease_ms: i64,
        waits: Waits,
        session: Option<Name>,
        once: bool,
    },
    Release {
        lock: usize,
        owner: usize,
        token: Named,
        lease_ms: Option<i64>,
    },
    Renew {
        lock: usize,
        owner: usize,
        lease_ms: i64,
        token: Named,
        session: Option<Name>,
    },
    /// Of locks in one database, any of them more than once.
    MultiAcquire {
        locks: Vec<usize>,
        owner: usize,
        lease_ms: i64,
        waits: Waits,
        session: Option<Name>,
        once: bool,
    },
    MultiRelease {
        locks: Vec<usize>,
        owner: usize,
    },
    MultiRenew {
        locks: Vec<usize>,
        owner: usize,
        lease_ms: i64,
        session: Option<Name>,
    },
    /// From one of a few connections; nothing if it is blocked already.
    Events {
        session: Name,
        client: usize,
        block_ms: Option<i64>,
        grace_ms: i64,
    },
    /// Commands are this user's from now on.
    As {
        user: usize,
    },
    /// The server allows so much from now on.
    Allow {
        sessions: u32,
        events: u32,
        out_of_memory: bool,
    },
    /// The connection closes; in a transaction, by CLIENT KILL.
    Close {
        client: usize,
    },
    /// CLIENT UNBLOCK of one that waits for events.
    Unblock {
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
    /// Whatever is on its way arrives, and those who were called get their events.
    Deliver,
    /// Somebody else writes to the key; `told` is whether an event says so.
    Foreign {
        lock: usize,
        change: Change,
        told: bool,
    },
    Flush {
        db: Option<i32>,
    },
    SwapDatabases,
    /// The server becomes a replica, until [`Op::StartTokens`].
    Demote,
    /// The server becomes primary again.
    StartTokens {
        guard_ms: i64,
    },
    /// MULTI: no timer, no settling and no blocking until [`Op::Exec`].
    Multi,
    Exec,
}

/// The token that a command names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    No,
    /// The lock's present one.
    Present,
    /// A smaller one.
    Stale,
}

/// What others do to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Delete,
    SetText,
    /// A script takes the lock, without a token.
    Take {
        owner: usize,
        lease_ms: Option<i64>,
    },
    /// A field is written as it stands.
    Write {
        owner: usize,
        value: &'static str,
    },
    WriteFence {
        value: &'static str,
    },
    /// What the hash names are readers from now on.
    WriteMode,
    /// A script takes the lock to write.
    TakeToWrite {
        lease_ms: Option<i64>,
    },
    /// An owner's field is deleted.
    Remove {
        owner: usize,
    },
    Expire {
        ms: i64,
    },
    Persist,
}

#[derive(Debug)]
pub(crate) struct World {
    locks: Locks,
    space: Keyspace,
    pub(crate) twin: Twin,
    ledger: Ledger,
    clock: Clock,
    /// Who waits: the core's name for it, by seat.
    waiting: BTreeMap<usize, WaiterId>,
    /// The core's names for all who ever waited.
    ever_waited: Vec<WaiterId>,
    /// Grants that were told and have not arrived.
    under_way: Vec<UnderWay>,
    heard: Vec<(usize, Heard)>,
    /// The connections that EVENTS may come from, and how many there were.
    connections: [u64; 4],
    clients: u64,
    listening: BTreeMap<usize, Listening>,
    called: Vec<(usize, Call)>,
    published: Vec<(Place, Mode)>,
    seats: usize,
    in_multi: bool,
    is_replica: bool,
    /// While several locks are being entered: the highest token from before.
    takes_several: Option<i64>,
    /// Locks that changed without an event, and were not looked at since.
    unseen: BTreeSet<Place>,
    /// Locks in which somebody else has written.
    written_by_others: BTreeSet<Place>,
    /// The same for holds of sessions, each with its token.
    unseen_holds: BTreeSet<(Place, Vec<u8>, Option<i64>)>,
}

#[derive(Debug)]
struct UnderWay {
    lock: LockKey,
    owner: Vec<u8>,
    grant: Grant,
}

impl Default for World {
    fn default() -> Self {
        let clients = 1_000_003;
        Self {
            locks: Locks::default(),
            space: Keyspace::default(),
            twin: Twin::default(),
            ledger: Ledger::default(),
            clock: Clock::default(),
            waiting: BTreeMap::new(),
            ever_waited: Vec::new(),
            under_way: Vec::new(),
            heard: Vec::new(),
            connections: [clients - 3, clients - 2, clients - 1, clients],
            clients,
            listening: BTreeMap::new(),
            called: Vec::new(),
            published: Vec::new(),
            seats: 0,
            in_multi: false,
            is_replica: false,
            takes_several: None,
            unseen: BTreeSet::new(),
            written_by_others: BTreeSet::new(),
            unseen_holds: BTreeSet::new(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Clock {
    now: Now,
    /// How far the wall clock is behind the most it was ever ahead.
    set_back_ms: i64,
}

impl Default for Clock {
    fn default() -> Self {
        let now = Now {
            wall_us: 1_000_000_500,
            mono_ms: 70,
        };
        let set_back_ms = 0;
        Self { now, set_back_ms }
    }
}

/// Runs a history from the start.
///
/// # Errors
/// What was wrong, and after which step.
pub(crate) fn replay(history: &[Op]) -> Result<World, String> {
    let mut world = replay_to(history)?;
    let tell = |wrong| format!("{wrong}\nat the end of this history:\n{history:?}");
    world.fetch_all().map_err(tell)?;
    Ok(world)
}

/// The same, and nobody has fetched yet what is there to be fetched.
pub(crate) fn replay_to(history: &[Op]) -> Result<World, String> {
    let mut world = World::default();
    for (at, op) in history.iter().enumerate() {
        world.step(op).map_err(|wrong| {
            format!("{wrong}\nat step {at} of this history, which replays it:\n{history:?}")
        })?;
    }
    Ok(world)
}

impl World {
    /// One thing happens, the driver does its part, and everything is compared.
    pub(crate) fn step(&mut self, op: &Op) -> Result<(), String> {
        let (of_core, of_twin) = self.happen(op)?;
        self.go_on()?;
        self.forget_those_who_left();
        if of_core != of_twin {
            return Err(format!("{op:?}: core {of_core:?}, twin {of_twin:?}"));
        }
        if !self.in_multi {
            self.come_to_rest()?;
            let Clock { now, set_back_ms } = self.clock;
            let (unseen, others) = (&self.unseen, &self.written_by_others);
            invariants::is_at_rest(&self.locks, &self.twin, unseen, others, set_back_ms, now)?;
            invariants::sessions_are_at_rest(&self.locks, &self.twin, &self.unseen_holds, now)?;
        }
        self.compare()
    }

    pub(crate) fn now(&self) -> Now {
        self.clock.now
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.locks.counters()
    }

    pub(crate) fn next_deadline(&self) -> Option<i64> {
        self.locks.next_deadline(self.clock.now)
    }

    /// Whose grants are under way, of which locks, and whether they would be taken back for good.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (&[u8], Vec<(Place, bool)>)> {
        self.under_way
            .iter()
            .map(|UnderWay { lock, owner, grant }| {
                let several = each_of(grant);
                let one = several
                    .is_empty()
                    .then(|| (place_of(lock), grant.token.get()));
                let each = several.into_iter().chain(one).map(|(place, token)| {
                    let present = self.twin.token(&place) == Some(token);
                    (place, present)
                });
                (owner.as_slice(), each.collect())
            })
    }

    fn happen(&mut self, op: &Op) -> Result<(Reply, Reply), String> {
        if self.is_replica && writes(op) {
            return Ok((Reply::Nothing, Reply::Nothing));
        }
        match *op {
            Op::Acquire {
                lock,
                owner,
                lease_ms,
                waits,
                session,
                once,
            } => {
                let waits = match waits {
                    Waits::Block(_) if self.in_multi => Waits::No,
                    _ => waits,
                };
                let asked = Asked {
                    owner: OWNERS[owner],
                    lease_ms,
                    waits,
                    session,
                    once,
                    seat: self.seats,
                    waiters_max: usize::try_from(WAITERS_MAX).unwrap(),
                };
                let of_core = self.acquire(&place(lock), asked)?;
                self.twin.is_found = of_core == Reply::Deadlock;
                let now = self.clock.now;
                Ok((of_core, self.twin.acquire(&place(lock), asked, now)))
            }
            Op::Release {
                lock,
                owner,
                token,
                lease_ms,
            } => self.release(&place(lock), OWNERS[owner], token, lease_ms),
            Op::Renew {
                lock,
                owner,
                lease_ms,
                token,
                session,
            } => self.renew(&place(lock), OWNERS[owner], lease_ms, token, session),
            Op::MultiAcquire { .. } | Op::MultiRelease { .. } | Op::MultiRenew { .. } => {
                self.happen_to_several(op)
            }
            Op::Events {
                session,
                client,
                block_ms,
                grace_ms,
            } => self.events(session, client, block_ms, grace_ms),
            Op::Close { client } => self.close(client),
            Op::Unblock { client } if !self.in_multi => self.unblock(client),
            Op::Deliver if !self.in_multi => self.deliver(),
            Op::Cancel { lock, owner } => self.cancel(&place(lock), OWNERS[owner]),
            Op::Break { lock } => self.break_hold(&place(lock)),
            Op::StartTokens { guard_ms } => {
                self.locks.start_tokens(self.clock.now, guard_ms);
                self.twin.start_tokens(guard_ms, self.clock.now);
                self.is_replica = false;
                Ok((Reply::Nothing, Reply::Nothing))
            }
            _ => {
                self.happen_around(op)?;
                Ok((Reply::Nothing, Reply::Nothing))
            }
        }
    }

    /// What is no command of ours. In a transaction there is neither time nor I/O.
    fn happen_around(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::As { user } => self.twin.life.user = user,
            Op::Allow {
                sessions,
                events,
                out_of_memory,
            } => {
                self.twin.life.limits = SessionLimits {
                    sessions,
                    events_per_session: events,
                    out_of_memory,
                };
            }
            Op::Pass { ms } if !self.in_multi => self.pass(ms),
            Op::PassDeadline { more_ms } if !self.in_multi => {
                let deadline = self.locks.next_deadline(self.clock.now);
                // The longest lease is longer than a clock of microseconds can go twice.
                self.pass(deadline.unwrap_or(0).min(A_DAY_MS) + more_ms);
            }
            Op::StepClock { ms } if !self.in_multi => {
                self.clock.now.wall_us += ms * 1000;
                self.clock.set_back_ms = (self.clock.set_back_ms - ms).max(0);
                self.expire();
            }
            Op::Disconnect { client } if !self.in_multi => self.disconnect(client)?,
            Op::Foreign { lock, change, told } => self.foreign(&place(lock), change, told),
            Op::Flush { db } => {
                self.space.flush(db);
                self.twin.space.flush(db);
                self.locks.all_touched(db);
            }
            Op::SwapDatabases => {
                self.space.swap(0, 1);
                self.twin.space.swap(0, 1);
                self.locks.all_touched(Some(0));
                self.locks.all_touched(Some(1));
            }
            Op::Demote => {
                let mut effects = Vec::new();
                self.locks.demoted(&mut effects);
                self.carry_out(&Place::default(), b"", &effects)?;
                self.twin.demoted();
                // Their grants are the new primary's to end.
                self.under_way.clear();
                self.is_replica = true;
            }
            Op::Multi => self.in_multi = true,
            Op::Exec => self.in_multi = false,
            _ => {}
        }
        Ok(())
    }

    // --- Commands --------------------------------------------------------------------------------

    fn acquire(&mut self, place: &Place, asked: Asked<'_>) -> Result<Reply, String> {
        let request = Acquire {
            key: &place.1,
            owner: asked.owner,
            lease: Lease::from_ms(asked.lease_ms).unwrap(),
            wait_mode: match asked.waits {
                Waits::No => WaitMode::None,
                Waits::Block(ms) => WaitMode::Block(Wait::from_ms(ms).unwrap()),
                Waits::Queue(ms) => WaitMode::Queue(Wait::from_ms(ms).unwrap()),
            },
            session: asked.session.map(|name| self.session(name)),
            mode: Mode::Plain,
            once: asked.once,
        };
        let mut acquired = self.ask(place, &request)?;
        if acquired == Ok(Acquired::SettleFirst) {
            self.settle_first(place)?;
            acquired = self.ask(place, &request)?;
        }
        if acquired.is_ok() {
            self.unseen.remove(place);
        }
        let ends_at = match acquired {
            Err(refusal) => return Ok(Reply::Refused(refusal.to_string())),
            Ok(Acquired::Held { count, token }) => {
                let token = token.get();
                return Ok(Reply::Held { count, token });
            }
            Ok(Acquired::NotHeld { ttl_ms }) => return Ok(Reply::NotHeld { ttl_ms }),
            Ok(Acquired::MustWait { ends_at, .. }) => ends_at,
            Ok(Acquired::SettleFirst) => return Err("the line was settled a moment ago".into()),
        };
        let search = self.locks.search_deadlock(lock_ref(place), &request);
        if self.is_refused_for_good(search)? {
            return Ok(Reply::Deadlock);
        }
        self.join(place, asked, &request, ends_at)
    }

    fn ask(
        &mut self,
        place: &Place,
        request: &Acquire<'_>,
    ) -> Result<Result<Acquired, CommandError>, String> {
        self.end_holds_first(place)?;
        let (now, stored) = (self.clock.now, self.space.read(place, request.owner));
        let (at, mut effects) = (lock_ref(place), Vec::new());
        let acquired = self
            .locks
            .acquire(at, stored, request, WAITERS_MAX, now, &mut effects);
        if acquired.is_err() && !effects.is_empty() {
            return Err(format!("refused, and yet {effects:?}"));
        }
        self.carry_out(place, request.owner, &effects)?;
        Ok(acquired)
    }

    /// Those in line for a lock that was found free come before a newcomer.
    pub(super) fn settle_first(&mut self, place: &Place) -> Result<(), String> {
        let first = self.locks.first_owner(lock_ref(place));
        let first = first.ok_or("nobody is in line, and is to be settled first")?;
        self.end_holds_first(place)?;
        let (now, stored) = (self.clock.now, self.space.read(place, &first));
        let mut effects = Vec::new();
        self.locks
            .settle(lock_ref(place), stored, now, &mut effects);
        self.carry_out(place, b"", &effects)?;
        self.twin.find_free(place, now);
        self.go_on()
    }

    /// Walks the search for a deadlock as the driver does.
    fn is_refused_for_good(
        &mut self,
        search: Option<(DeadlockSearch, Found)>,
    ) -> Result<bool, String> {
        let Some((mut search, mut found)) = search else {
            return Ok(false);
        };
        for _ in 0..100 {
            let lock = match found {
                Found::Nothing => return Ok(false),
                Found::Circle(CommandError::Deadlock(_)) => return Ok(true),
                Found::Circle(other) => return Err(format!("refused with {other}")),
                Found::Ask(lock) => lock,
            };
            let holders = self.space.holders(&(lock.db, lock.name.to_vec()));
            found = self.locks.search_on(&mut search, &holders);
        }
        Err("the search for a circle has no end".into())
    }

    fn join(
        &mut self,
        place: &Place,
        asked: Asked<'_>,
        request: &Acquire<'_>,
        ends_at: Option<i64>,
    ) -> Result<Reply, String> {
        let (now, seat) = (self.clock.now, asked.seat);
        self.seats += 1;
        self.ledger
            .sits_down(std::slice::from_ref(place), false, asked);
        let client = BlockedClient {
            handle: seat,
            client_id: u64::try_from(seat).unwrap(),
        };
        let is_blocked = matches!(asked.waits, Waits::Block(_));
        let client = is_blocked.then_some(client);
        let mut effects = Vec::new();
        let at = lock_ref(place);
        let joined = self
            .locks
            .join(at, request, client, ends_at, now, &mut effects)
            .ok_or("no room for a waiter")?;
        // A waiter that changes its seat keeps its name. No other name comes twice.
        let moved = asked.once && self.twin.has_place(place, asked.owner);
        if moved != self.ever_waited.contains(&joined.waiter) {
            return Err(format!("{:?} moved: {moved}", joined.waiter));
        }
        self.carry_out(place, asked.owner, &effects)?;
        self.waiting.insert(seat, joined.waiter);
        self.ever_waited.push(joined.waiter);
        let position = joined.position;
        Ok(if is_blocked {
            Reply::Waits
        } else {
            Reply::Queued { position }
        })
    }

    fn release(
        &mut self,
        place: &Place,
        owner: &[u8],
        token: Named,
        lease_ms: Option<i64>,
    ) -> Result<(Reply, Reply), String> {
        let token = self.token(place, token);
        let request = Release {
            key: &place.1,
            owner,
            mode: Mode::Plain,
            token: token.and_then(Token::new),
            lease: lease_ms.map(|ms| Lease::from_ms(ms).unwrap()),
        };
        self.end_holds_first(place)?;
        let (now, stored) = (self.clock.now, self.space.read(place, owner));
        let mut effects = Vec::new();
        let left = self
            .locks
            .release(lock_ref(place), stored, &request, now, &mut effects);
        let of_core = answer(
            left.map(|left| left.map_or(Reply::Null, Reply::Number)),
            &effects,
        )?;
        self.carry_out(place, owner, &effects)?;
        let of_twin = self.twin.release(place, owner, token, lease_ms, now);
        Ok((of_core, of_twin))
    }

    fn renew(
        &mut self,
        place: &Place,
        owner: &[u8],
        lease_ms: i64,
        token: Named,
        session: Option<Name>,
    ) -> Result<(Reply, Reply), String> {
        let token = self.token(place, token);
        let request = Renew {
            key: &place.1,
            owner,
            lease: Lease::from_ms(lease_ms).unwrap(),
            mode: Mode::Plain,
            token: token.and_then(Token::new),
            session: session.map(|name| self.session(name)),
        };
        self.end_holds_first(place)?;
        let (now, stored) = (self.clock.now, self.space.read(place, owner));
        let mut effects = Vec::new();
        let held = self
            .locks
            .renew(lock_ref(place), stored, &request, now, &mut effects);
        let of_core = answer(held.map(|held| Reply::Number(i64::from(held))), &effects)?;
        self.carry_out(place, owner, &effects)?;
        let of_twin = self.twin.renew(place, owner, lease_ms, token, session, now);
        Ok((of_core, of_twin))
    }

    fn cancel(&mut self, place: &Place, owner: &[u8]) -> Result<(Reply, Reply), String> {
        let request = Cancel {
            key: &place.1,
            owner,
        };
        self.end_holds_first(place)?;
        let (now, stored) = (self.clock.now, self.space.read(place, owner));
        let mut effects = Vec::new();
        let left = self
            .locks
            .cancel(lock_ref(place), stored, &request, now, &mut effects);
        self.carry_out(place, owner, &effects)?;
        Ok((Reply::Number(left), self.twin.cancel(place, owner, now)))
    }

    fn break_hold(&mut self, place: &Place) -> Result<(Reply, Reply), String> {
        // As long as one of those who had it has it still, that is what is broken.
        let before = self.twin.holds_of(place);
        let freed = self.end_holds_first(place)?;
        let after = self.twin.holds_of(place);
        let is_ended = !before.is_empty() && !before.iter().any(|hold| after.contains(hold));
        if freed || is_ended {
            let number = |is: bool| Reply::Number(i64::from(is));
            return Ok((number(freed), number(is_ended)));
        }
        let (now, stored) = (self.clock.now, self.space.read(place, b""));
        let mut effects = Vec::new();
        let broken = self
            .locks
            .break_hold(lock_ref(place), stored, now, &mut effects);
        let of_core = answer(
            broken.map(|broken| Reply::Number(i64::from(broken))),
            &effects,
        )?;
        self.carry_out(place, b"", &effects)?;
        Ok((of_core, self.twin.break_hold(place, now)))
    }

    /// A session, as the present user names it.
    pub(super) fn session(&self, name: Name) -> SessionRef<'static> {
        SessionRef {
            name: SESSIONS[name],
            user: USERS[self.twin.life.user],
        }
    }

    fn token(&self, place: &Place, named: Named) -> Option<i64> {
        let present = self.twin.token(place).unwrap_or(2);
        match named {
            Named::No => None,
            Named::Present => Some(present),
            Named::Stale => Some((present - 1).max(1)),
        }
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
        for id in &self.ever_waited {
            // A name that outlived its waiter must not fit a later one. (With ONCE the waiter lives
            // on, under its name, for another seat.)
            let is_there = self.waiting.values().any(|waiting| waiting == id);
            if !is_there && self.locks.depart(*id).is_some() {
                return Err(format!("{id:?}, long gone, departs in somebody's place"));
            }
        }
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
            let place = self.twin.place_of(seat);
            let left = self
                .locks
                .depart(id)
                .map(|lock| (lock.db, lock.name.to_vec()));
            if left.as_ref() != Some(&place) || self.locks.depart(id).is_some() {
                return Err(format!(
                    "seat {seat} departs from {left:?}, not once from {place:?}"
                ));
            }
            self.ledger.leaves_from(seat)?;
            self.waiting.remove(&seat);
            self.twin.depart(seat);
        } else if clients > 0 {
            let grant = self.under_way.remove(client - blocked.len());
            let UnderWay { lock, owner, grant } = grant;
            let (token, several) = (grant.token.get(), each_of(&grant));
            let twin = &mut self.twin.life;
            twin.take_back(place_of(&lock), &owner, token, several);
            self.locks
                .give_back_later(lock, &owner.as_slice().into(), grant);
        }
        Ok(())
    }

    fn foreign(&mut self, place: &Place, change: Change, told: bool) {
        change_key(&mut self.space, place, change, self.clock.now);
        change_key(&mut self.twin.space, place, change, self.clock.now);
        self.written_by_others.insert(place.clone());
        if told {
            self.locks.touched(lock_ref(place));
        } else {
            self.unseen.insert(place.clone());
            let holds = self
                .twin
                .life
                .holds
                .iter()
                .filter(|((of, _), _)| of == place);
            self.unseen_holds
                .extend(holds.map(|((of, owner), hold)| (of.clone(), owner.clone(), hold.token)));
        }
        self.expire();
    }

    /// The timer, as often as it is due. A replica writes nothing, and must come to rest too.
    fn come_to_rest(&mut self) -> Result<(), String> {
        let now = self.clock.now;
        for _ in 0..100 {
            if self.locks.next_deadline(now) != Some(0) {
                return Ok(());
            }
            while let Some(Overdue { locks, owner }) = self.locks.next_timeout(now) {
                let places = locks.iter().map(place_of);
                let places: Vec<Place> = places.collect();
                self.time_out(&places, &owner, now)?;
            }
            let mut effects = Vec::new();
            self.locks.passed(now, &mut effects);
            self.carry_out(&Place::default(), b"", &effects)?;
            for name in self.twin.overflow(now) {
                self.ledger.loses_its_line(name, &self.twin);
            }
            self.twin.life.passed(now);
            if self.is_replica {
                self.locks.forget_what_is_due();
                self.twin.life.endings.clear();
            } else {
                self.end_holds()?;
                self.check_holds()?;
                self.settle_lines()?;
            }
            self.forget_those_who_left();
        }
        Err("there is always something more to do".into())
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
            let place = (lock.db, lock.name.to_vec());
            let stored = self.space.read(&place, &first);
            let mut effects = Vec::new();
            self.locks.settle(lock.as_ref(), stored, now, &mut effects);
            self.carry_out(&place, b"", &effects)?;
            self.twin.settle(&place, now);
            self.unseen.remove(&place);
            self.go_on()?;
            self.forget_those_who_left();
        }
        Err("there is always something more to settle".into())
    }

    /// Queued waiters leave without a word to us.
    fn forget_those_who_left(&mut self) {
        let twin = &self.twin;
        self.waiting.retain(|seat, _| twin.waiter(*seat).is_some());
        self.ledger.forget_those_who_left(twin);
    }

    /// Whose wait has ended first leaves first. Of several that end together any may.
    fn time_out(&mut self, places: &[Place], owner: &[u8], now: Now) -> Result<(), String> {
        let ends = self.waiting.iter().filter_map(|(seat, id)| {
            let waiter = self.twin.waiter(*seat)?;
            Some((waiter.wait_end?, waiter, *id, *seat))
        });
        let earliest = ends.clone().map(|(end, ..)| end).min();
        let is_meant = |waiter: &TwinWaiter, seat| {
            let one = [self.twin.place_of(seat)];
            waiter.owner == owner && waiter.together.as_deref().unwrap_or(&one) == places
        };
        let first = ends
            .filter(|(end, waiter, _, seat)| Some(*end) == earliest && is_meant(waiter, *seat))
            .min_by_key(|(_, _, id, _)| *id);
        let (_, _, _, seat) = first.ok_or("nobody waits that could be timed out")?;
        let read = |place| self.space.read(place, owner);
        let stored: Vec<Stored> = places.iter().map(read).collect();
        let mut effects = Vec::new();
        self.locks.time_out(&stored, now, &mut effects);
        self.carry_out(&Place::default(), b"", &effects)?;
        self.twin.time_out(seat, now)?;
        self.forget_those_who_left();
        Ok(())
    }

    // --- Effects and comparison ------------------------------------------------------------------

    fn carry_out(
        &mut self,
        place: &Place,
        caller: &[u8],
        effects: &[Effect],
    ) -> Result<(), String> {
        for effect in effects {
            self.carry_out_one(place, caller, effect)
                .map_err(|wrong| format!("{wrong}: {effect:?} of {effects:?}"))?;
        }
        Ok(())
    }

    fn carry_out_one(
        &mut self,
        place: &Place,
        caller: &[u8],
        effect: &Effect,
    ) -> Result<(), String> {
        self.space.carry_out(place, caller, effect)?;
        match effect {
            Effect::Write {
                token: Some(token), ..
            } => self.ledger.is_minted(*token, self.takes_several),
            Effect::Publish(mode) => {
                self.published.push((place.clone(), *mode));
                Ok(())
            }
            Effect::Grant {
                client,
                lock,
                owner,
                count,
                grant,
            } => {
                self.waiting.remove(client);
                self.under_way.push(UnderWay {
                    lock: lock.clone(),
                    owner: owner.to_vec(),
                    grant: grant.clone(),
                });
                let (count, token) = (*count, grant.token);
                let several = each_of(grant);
                self.ledger.is_granted(
                    &place_of(lock),
                    *client,
                    (count, token),
                    &several,
                    &self.space,
                )?;
                let granted = Heard::Granted {
                    count,
                    token: token.get(),
                    several,
                };
                self.heard.push((*client, granted));
                Ok(())
            }
            Effect::Dismiss { client, why } => {
                self.waiting.remove(client);
                let heard = match why {
                    WaitOutcome::NotAcquired { ttl_ms } => Heard::NotAcquired { ttl_ms: *ttl_ms },
                    WaitOutcome::Refused(refusal) => Heard::Refused(refusal.to_string()),
                };
                self.heard.push((*client, heard));
                self.ledger.leaves_from(*client)
            }
            _ => self.call(std::slice::from_ref(effect)),
        }
    }

    fn compare(&mut self) -> Result<(), String> {
        let (heard, should) = (
            std::mem::take(&mut self.heard),
            std::mem::take(&mut self.twin.heard),
        );
        let (heard, should) = (left_in_any_order(heard), left_in_any_order(should));
        if heard != should {
            return Err(format!("heard {heard:?}\n  should {should:?}"));
        }
        let (mut called, mut should) = (
            std::mem::take(&mut self.called),
            std::mem::take(&mut self.twin.life.called),
        );
        called.sort_unstable();
        should.sort_unstable();
        if called != should {
            return Err(format!("called {called:?}\n  should {should:?}"));
        }
        if self.space != self.twin.space {
            let (space, twin) = (&self.space, &self.twin.space);
            return Err(format!("stored {space:?}\n  should {twin:?}"));
        }
        let (mut sent, mut should) = (
            std::mem::take(&mut self.published),
            std::mem::take(&mut self.twin.published),
        );
        sent.sort_unstable();
        should.sort_unstable();
        if sent != should {
            return Err(format!("published {sent:?}\n  should {should:?}"));
        }
        invariants::views_are_true(&self.locks, &self.twin, self.clock.now)?;
        invariants::sessions_are_true(&self.locks, &self.twin)?;
        invariants::counters_add_up(&self.locks, &self.twin, &self.ledger)
    }
}

/// What a replica refuses.
fn writes(op: &Op) -> bool {
    matches!(
        op,
        Op::Acquire { .. }
            | Op::Release { .. }
            | Op::Renew { .. }
            | Op::MultiAcquire { .. }
            | Op::MultiRelease { .. }
            | Op::MultiRenew { .. }
            | Op::Cancel { .. }
            | Op::Break { .. }
    )
}

/// Brings those into one order who leave together, because nothing is left to wait for.
fn left_in_any_order(mut heard: Vec<(usize, Heard)>) -> Vec<(usize, Heard)> {
    let together = |one: &(usize, Heard), next: &(usize, Heard)| {
        matches!(one.1, Heard::Refused(_)) && one.1 == next.1
    };
    for run in heard.chunk_by_mut(together) {
        run.sort_by_key(|(seat, _)| *seat);
    }
    heard
}

pub(crate) fn place(lock: usize) -> Place {
    let (db, name) = LOCKS[lock];
    (db, name.to_vec())
}

/// Each of several locks that were granted at once, with the token of its hold.
fn each_of(grant: &Grant) -> Vec<(Place, i64)> {
    let each = grant.several.iter().flat_map(|several| several.iter());
    each.map(|(lock, token)| (place_of(lock), token.get()))
        .collect()
}

fn place_of(lock: &LockKey) -> Place {
    (lock.db, lock.name.to_vec())
}

fn lock_ref(place: &Place) -> LockRef<'_> {
    LockRef {
        db: place.0,
        name: &place.1,
    }
}

/// An answer; a refusal must have changed nothing.
fn answer(reply: Result<Reply, CommandError>, effects: &[Effect]) -> Result<Reply, String> {
    match reply {
        Ok(reply) => Ok(reply),
        Err(refusal) if effects.is_empty() => Ok(Reply::Refused(refusal.to_string())),
        Err(_) => Err(format!("refused, and yet {effects:?}")),
    }
}

fn change_key(space: &mut Keyspace, place: &Place, change: Change, now: Now) {
    match change {
        Change::Delete => {
            space.delete(place);
        }
        Change::SetText => {
            let (value, ends_at) = (Value::Text, None);
            space.set(place, Entry { value, ends_at });
        }
        Change::Take { owner, lease_ms } => {
            let fields = Fields::from([(OWNERS[owner].to_vec(), b"1".to_vec())]);
            let value = Value::Hash(fields);
            let ends_at = lease_ms.map(|ms| now.wall_ms() + ms);
            space.set(place, Entry { value, ends_at });
        }
        Change::Write { owner, value } => write_field(space, place, OWNERS[owner], value),
        Change::WriteFence { value } => write_field(space, place, b"fence", value),
        Change::WriteMode => write_field(space, place, b"mode", "read"),
        Change::TakeToWrite { lease_ms } => {
            let fields = [("mode", "write"), ("W:write", "1")];
            let bytes = |text: &str| text.as_bytes().to_vec();
            let fields = fields.map(|(field, value)| (bytes(field), bytes(value)));
            let value = Value::Hash(Fields::from(fields));
            let ends_at = lease_ms.map(|ms| now.wall_ms() + ms);
            space.set(place, Entry { value, ends_at });
        }
        Change::Remove { owner } => {
            if let Some(entry) = space.get_mut(place)
                && let Value::Hash(fields) = &mut entry.value
            {
                fields.remove(OWNERS[owner]);
                if fields.is_empty() {
                    space.delete(place);
                }
            }
        }
        Change::Expire { ms } => {
            if let Some(entry) = space.get_mut(place) {
                entry.ends_at = Some(now.wall_ms() + ms);
            }
        }
        Change::Persist => {
            if let Some(entry) = space.get_mut(place) {
                entry.ends_at = None;
            }
        }
    }
}

/// `HSET`, which makes the hash if there is none and does nothing to another type.
fn write_field(space: &mut Keyspace, place: &Place, field: &[u8], value: &str) {
    if space.get(place).is_none() {
        let value = Value::Hash(Fields::new());
        let ends_at = None;
        space.set(place, Entry { value, ends_at });
    }
    if let Some(Value::Hash(fields)) = space.get_mut(place).map(|entry| &mut entry.value) {
        fields.insert(field.to_vec(), value.as_bytes().to_vec());
    }
}
