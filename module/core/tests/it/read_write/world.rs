//! A driver that does with the core what the module does in a server, step by step, with the twin
//! beside it and every invariant looked at after each step.

use super::foreign::{self, Change};
use super::invariants;
use super::keyspace::{Keyspace, Reading, Value, number};
use super::life::{HoldName, Name, News, TwinEnding, TwinEvent, in_any_order};
use super::twin::{Asked, Heard, NO_SESSION, Reply, Twin, TwinWaiter, Waits};
use crate::world::{Interruption, Timer, as_needed};
use rlock_core::request::{Acquire, Cancel, Events, Release, Renew, WaitMode};
use rlock_core::{
    BlockedClient, Command, CommandError, Counters, DECISIONS_MAX, Effect, Event, EventKind, Grant,
    Keys, Lease, LockKey, LockRef, Locks, LostReason, Mode, Now, Outcome, Purpose, Read, SessionId,
    SessionLimits, Subject, Task, Token, Turn, Wait, WaitOutcome, WaiterId,
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
    /// The connection closes; in a transaction, by CLIENT KILL.
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
    /// Commands for a session ask to be told when the lock is wanted, from now on or no more.
    AskIfWanted {
        asks: bool,
    },
    /// The server becomes a replica, and primary again.
    Failover {
        guard_ms: i64,
    },
    /// The server starts, with what it has loaded: for so long nobody is granted a lock. Nothing
    /// where somebody waits already.
    Start {
        delay_ms: i64,
    },
    /// CONFIG SET rlock.grant-delay-ms.
    SetDelay {
        delay_ms: i64,
    },
    /// MULTI: no timer and no blocking until [`Op::Exec`], whatever ends meanwhile.
    Multi,
    Exec,
    /// The timer fires all the same, and decides no more than so much.
    Tick {
        decisions: usize,
    },
    /// The next command has so little time for what is not its own.
    ShortTurn {
        decisions: usize,
    },
    /// After so many more reads something comes between what is read next and what is decided by
    /// it: another module called us while a key was being opened.
    Interrupt {
        reads: usize,
        by: Interruption,
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
    in_multi: bool,
    /// When the server started, on the monotonic clock.
    started_at: i64,
    timer: Timer,
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
            locks: crate::locks_that_log(),
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
            in_multi: false,
            started_at: 0,
            timer: Timer::default(),
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
        self.forget_those_who_left();
        if !self.in_multi {
            self.come_to_rest()?;
            self.overlook_shared_holds();
            let Clock { now, set_back_ms } = self.clock;
            crate::is_log_sound(&self.locks)?;
            invariants::is_at_rest(&self.locks, &self.twin, &self.unseen, set_back_ms, now)?;
            invariants::sessions_are_at_rest(&self.locks, &self.twin, &self.unseen_holds, now)?;
            if self.unseen.is_empty() {
                self.twin.nobody_is_left_to_be_told()?;
            }
        }
        self.compare()?;
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
                let waits = match waits {
                    Waits::Block(_) if self.in_multi => Waits::No,
                    _ => waits,
                };
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
                self.acquire(LOCKS[lock], asked)
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

    /// What is no command of ours. In a transaction there is neither time nor I/O.
    fn happen_around(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Pass { ms } if !self.in_multi => self.pass(*ms),
            Op::PassDeadline { more_ms } if !self.in_multi => {
                let deadline = self.locks.next_deadline(self.clock.now);
                self.pass(deadline.unwrap_or(0).min(A_DAY_MS) + more_ms);
            }
            Op::StepClock { ms } if !self.in_multi => {
                self.clock.now.wall_us += ms * 1000;
                self.clock.set_back_ms = (self.clock.set_back_ms - ms).max(0);
                self.expire();
            }
            Op::Disconnect { client } if !self.in_multi => self.disconnect(*client)?,
            Op::Deliver if !self.in_multi => self.under_way.clear(),
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
            Op::Start { delay_ms } if self.twin.waiting() == 0 => {
                self.started_at = self.clock.now.mono_ms;
                self.locks.start_grant_delay(self.clock.now, *delay_ms);
                self.twin.delay_left_ms = *delay_ms;
            }
            Op::SetDelay { delay_ms } => {
                self.locks.set_grant_delay(*delay_ms);
                let end = self.started_at + delay_ms;
                self.twin.delay_left_ms = (end - self.clock.now.mono_ms).max(0);
            }
            Op::AskIfWanted { asks } => self.twin.asks_if_wanted = *asks,
            Op::Multi => self.in_multi = true,
            Op::Exec => self.in_multi = false,
            Op::Tick { decisions } => self.tick(*decisions)?,
            Op::ShortTurn { decisions } => self.timer.next_turn = Some(*decisions),
            Op::Interrupt { reads, by } => self.timer.comes_after = Some((*reads, *by)),
            _ => {}
        }
        Ok(())
    }

    // --- Commands --------------------------------------------------------------------------------

    /// Drives a turn as the module does: reads what is asked for, and carries out what is decided.
    /// The twin does the same after each task; the command itself when it is decided.
    fn drive(
        &mut self,
        turn: &mut Turn<'_>,
        command: Option<Command<'_>>,
        twin: impl FnOnce(&mut Twin, &Result<Outcome, CommandError>, Now) -> Reply,
    ) -> Result<Reply, String> {
        let now = self.clock.now;
        let (mut twin, mut of_twin) = (Some(twin), Reply::Nothing);
        self.twin.freed.clear();
        for _ in 0..1000 {
            let Some(task) = self.locks.next_task(turn, now) else {
                // What a turn that was cut short has left is served when the timer fires again.
                if !self.timer.is_part && !self.timer.is_cut_short {
                    self.twin.all_are_served()?;
                }
                return Ok(of_twin);
            };
            let (lock, owner) = match (&task.subject, command) {
                (Subject::Command, Some(command)) => {
                    let Keys::One(name) = command.keys() else {
                        return Err("several, and nobody asks for several".into());
                    };
                    (name.to_vec(), command.owner().to_vec())
                }
                (Subject::One(lock, owner), _) => (lock.name.to_vec(), owner.to_vec()),
                (subject, _) => return Err(format!("{subject:?}, and nobody asks for it")),
            };
            let purpose = task.purpose;
            let mut effects = Vec::new();
            if !self.read_and_decide(turn, &task, command, &lock, &owner, &mut effects)? {
                continue;
            }
            self.all_has_ended(purpose, &lock, &owner)?;
            let is_refused = purpose == Purpose::Command && matches!(turn.decided(), Some(Err(_)));
            if is_refused && !effects.is_empty() {
                return Err(format!("refused, and yet {effects:?}"));
            }
            if purpose == Purpose::Sweep {
                // When that is done is nobody else's business, as long as nobody can tell.
                self.swept.push(lock.clone());
            }
            self.carry_out(&lock, &owner, &effects)?;
            if let Some(outcome) = turn.decided()
                && let Some(twin) = twin.take()
            {
                of_twin = twin(&mut self.twin, outcome, now);
            }
            self.twin_follows(purpose, &lock, &owner)?;
            if purpose != Purpose::Command {
                self.forget_those_who_left();
            }
        }
        Err("there is always something more to decide".into())
    }

    fn read_and_decide(
        &mut self,
        turn: &mut Turn<'_>,
        task: &Task,
        command: Option<Command<'_>>,
        lock: &[u8],
        owner: &[u8],
        effects: &mut Vec<Effect>,
    ) -> Result<bool, String> {
        let stored = as_needed(task, self.space.read(lock, owner, task.depth, self.how));
        let (holders, gone) = (self.space.holders(lock), self.space.readers_gone(lock));
        let readers = self.space.reader_counts(lock);
        let read = match (task.purpose, command) {
            (Purpose::Holders, _) => Read::Owners(&holders),
            (Purpose::Sweep, _) => Read::Gone {
                readers: &gone,
                more: false,
            },
            (Purpose::Command, Some(Command::Break(_))) => Read::Holds(stored, &readers),
            (Purpose::LongWait, _) => Read::Holder(crate::first_of(&holders)),
            _ => Read::One(&stored),
        };
        if let Some(by) = self.timer.comes_between() {
            self.interrupted(by)?;
            self.forget_those_who_left();
        }
        Ok(self
            .locks
            .decide(turn, task.found(read), self.clock.now, effects))
    }

    fn interrupted(&mut self, by: Interruption) -> Result<(), String> {
        match by {
            Interruption::Timer => self.tick(DECISIONS_MAX),
            Interruption::Disconnect(client) => self.disconnect(client),
            Interruption::Close(client) => match self.close(client)? {
                (of_core, of_twin) if of_core == of_twin => Ok(()),
                told => Err(format!("{by:?}: {told:?}")),
            },
        }
    }

    /// Nobody is granted at a lock, and no command is decided there, while a hold is still to end
    /// at it. In a turn that is cut short a command may come before the end of others' holds.
    fn all_has_ended(&self, purpose: Purpose, lock: &[u8], owner: &[u8]) -> Result<(), String> {
        let is_at_once = matches!(
            purpose,
            Purpose::Command | Purpose::Reconcile(_) | Purpose::CheckHold(_)
        );
        let mut endings = self.twin.life.endings.iter();
        let is_others = |of: &TwinEnding| {
            purpose == Purpose::Command && self.timer.is_cut_short && of.hold.1 != owner
        };
        match endings.find(|of| of.hold.0 == lock && !is_others(of)) {
            Some(left) if is_at_once => Err(format!("{purpose:?}, and before it ends {left:?}")),
            _ => Ok(()),
        }
    }

    /// What the core has just decided without a command, the twin does as well.
    fn twin_follows(&mut self, purpose: Purpose, lock: &[u8], owner: &[u8]) -> Result<(), String> {
        let now = self.clock.now;
        match purpose {
            Purpose::Release(mode) => {
                let mut endings = self.twin.life.endings.iter();
                let next = endings.find(|of| {
                    let (name, holder, held_as) = &of.hold;
                    name == lock && holder == owner && *held_as == mode
                });
                let next = next.ok_or("nothing of this owner is to end there")?.clone();
                self.twin.end(&next, now)
            }
            Purpose::Reconcile(_) => {
                self.twin.reconcile(lock, now);
                self.unseen.remove(lock);
                Ok(())
            }
            Purpose::CheckHold(mode) => {
                let of = (lock.to_vec(), owner.to_vec(), mode);
                self.twin.check_hold(&of, now);
                self.unseen_holds.remove(&of);
                Ok(())
            }
            Purpose::TimeOut => {
                let mut line = self.twin.line(lock).iter();
                let waiter = line.find(|waiter| waiter.owner == owner);
                let seat = waiter.ok_or("nobody waits that could be timed out")?.seat;
                self.is_earliest(seat)?;
                self.twin.time_out(seat, now)
            }
            Purpose::Command
            | Purpose::Holders
            | Purpose::LongWait
            | Purpose::Sweep
            | Purpose::CheckWriter => Ok(()),
            Purpose::GrantSeveral(_) => Err("nobody waits for several".into()),
        }
    }

    /// Whose wait has ended first leaves first. Of several that end together any may.
    fn is_earliest(&self, seat: usize) -> Result<(), String> {
        let waiters = self.twin.lines.values().flatten();
        let earliest = waiters.filter_map(|waiter| waiter.wait_end).min();
        if self.twin.waiter(seat).and_then(|waiter| waiter.wait_end) == earliest {
            return Ok(());
        }
        Err(format!("seat {seat} is timed out before its time"))
    }

    fn acquire(&mut self, lock: &[u8], asked: Asked<'_>) -> Result<(Reply, Reply), String> {
        let request = Acquire {
            key: lock,
            owner: asked.owner,
            lease: Lease::from_ms(asked.lease_ms).unwrap(),
            mode: asked.mode,
            asked: None,
            wait_mode: match asked.waits {
                Waits::No => WaitMode::None,
                Waits::Block(ms) => WaitMode::Block(Wait::from_ms(ms).unwrap()),
                Waits::Queue(ms) => WaitMode::Queue(Wait::from_ms(ms).unwrap()),
            },
            session: asked.session.map(|name| SESSIONS[name].into()),
            wanted: self.twin.asks_if_wanted(asked.session),
            once: asked.once,
        };
        let command = Command::Acquire(&request);
        let mut turn = self.timer.turn_of(command, 0);
        let of_twin = self.drive(&mut turn, Some(command), |twin, decided, now| {
            if let Err(error @ CommandError::ChainTooLong) = decided {
                // Given up in a turn that was cut short, of which the twin knows nothing.
                twin.tally.deadlocks_refused += 1;
                return Reply::Refused(error.to_string());
            }
            twin.is_found = matches!(decided, Err(CommandError::Deadlock(_)));
            twin.acquire(lock, asked, now)
        })?;
        let of_core = match turn.outcome() {
            Err(CommandError::Deadlock(_)) => Reply::Deadlock,
            Err(error) => Reply::Refused(error.to_string()),
            Ok(Outcome::Held { count, token }) => {
                let token = token.get();
                Reply::Held { count, token }
            }
            Ok(Outcome::NotHeld { ttl_ms }) => Reply::NotHeld { ttl_ms },
            Ok(Outcome::MustWait { .. }) => self.join(&mut turn, lock, asked)?,
            Ok(other) => return Err(format!("an answer of another command: {other:?}")),
        };
        Ok((of_core, of_twin))
    }

    fn join(
        &mut self,
        turn: &mut Turn<'_>,
        lock: &[u8],
        asked: Asked<'_>,
    ) -> Result<Reply, String> {
        let (now, seat) = (self.clock.now, asked.seat);
        self.seats += 1;
        self.seated += 1;
        let is_blocked = matches!(asked.waits, Waits::Block(_));
        let client = is_blocked.then(|| BlockedClient {
            handle: seat,
            client_id: u64::try_from(seat).unwrap(),
        });
        let mut effects = Vec::new();
        let joined = self.locks.enqueue(turn, client, now, &mut effects);
        let joined = joined.ok_or("no room for a waiter")?;
        self.carry_out(lock, asked.owner, &effects)?;
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

    /// A command that does not wait.
    fn decide(
        &mut self,
        command: Command<'_>,
        twin: impl FnOnce(&mut Twin, Now) -> Reply,
    ) -> Result<(Reply, Reply), String> {
        let mut turn = self.timer.turn_of(command, 0);
        let of_twin = self.drive(&mut turn, Some(command), |of, _, now| twin(of, now))?;
        let of_core = match turn.outcome() {
            Ok(Outcome::Left(left)) => left.map_or(Reply::Null, Reply::Number),
            Ok(Outcome::Number(number)) => Reply::Number(number),
            Ok(other) => return Err(format!("an answer of another command: {other:?}")),
            Err(error) => Reply::Refused(error.to_string()),
        };
        Ok((of_core, of_twin))
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
            permits: None,
            token: token.and_then(Token::new),
            lease: lease_ms.map(|ms| Lease::from_ms(ms).unwrap()),
        };
        self.decide(Command::Release(&request), |twin, now| {
            twin.release(lock, owner, mode, token, lease_ms, now)
        })
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
            wanted: self.twin.asks_if_wanted(session),
        };
        self.decide(Command::Renew(&request), |twin, now| {
            twin.renew(lock, owner, mode, lease_ms, token, session, now)
        })
    }

    fn cancel(&mut self, lock: &[u8], owner: &[u8]) -> Result<(Reply, Reply), String> {
        let request = Cancel { key: lock, owner };
        self.decide(Command::Cancel(&request), |twin, now| {
            twin.cancel(lock, owner, now)
        })
    }

    fn break_hold(&mut self, lock: &[u8]) -> Result<(Reply, Reply), String> {
        self.decide(Command::Break(lock), |twin, now| twin.break_hold(lock, now))
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
        let session = self
            .locks
            .attach(&request, client_id, limits, self.clock.now, &mut effects);
        if self.twin.life.untold_ends.remove(&(client_id, name)) {
            let of_core = session.map_or_else(
                |refusal| Reply::Refused(refusal.to_string()),
                |_| Reply::Nothing,
            );
            return Ok((of_core, Reply::Refused(NO_SESSION.into())));
        }
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

    /// Time passes, and the timer is late.
    pub(crate) fn pass_without_timer(&mut self, ms: i64) {
        self.pass(ms);
    }

    fn pass(&mut self, ms: i64) {
        self.clock.now.wall_us += ms * 1000;
        self.clock.now.mono_ms += ms;
        self.twin.delay_left_ms = (self.twin.delay_left_ms - ms).max(0);
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
            self.locks.give_back_later(&lock, &owner, &grant);
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
            if told {
                self.twin.forget_writer_token(LOCKS[lock]);
                self.locks.changed(lock_ref(LOCKS[lock]));
            } else {
                self.unseen.insert(LOCKS[lock].to_vec());
                self.twin.changed_unseen(LOCKS[lock]);
                let holds = self.twin.life.holds.keys();
                let holds = holds.filter(|(of, ..)| *of == LOCKS[lock]);
                self.unseen_holds.extend(holds.cloned());
            }
        }
        self.expire();
    }

    /// The timer, as often as it is due.
    fn come_to_rest(&mut self) -> Result<(), String> {
        let now = self.clock.now;
        for _ in 0..1000 {
            if self.locks.next_deadline(now) != Some(0) {
                self.timer.is_cut_short = false;
                return self.twin.all_are_served();
            }
            self.tick(DECISIONS_MAX)?;
        }
        Err("there is always something more to do".into())
    }

    /// The timer fires once, and decides at most so much.
    fn tick(&mut self, decisions: usize) -> Result<(), String> {
        let is_part = std::mem::replace(&mut self.timer.is_part, true);
        // What ended in the turn that it interrupts is that turn's own.
        let freed = std::mem::take(&mut self.twin.freed);
        self.timer.is_cut_short |= decisions < DECISIONS_MAX;
        self.fire(decisions)?;
        self.twin.freed = freed;
        self.timer.is_part = is_part;
        Ok(())
    }

    fn fire(&mut self, decisions: usize) -> Result<(), String> {
        let now = self.clock.now;
        let nothing = |_: &mut Twin, _: &_, _| Reply::Nothing;
        self.drive(&mut Turn::of_deadlines(), None, nothing)?;
        let mut effects = Vec::new();
        self.locks.passed(now, &mut effects);
        self.carry_out(b"", b"", &effects)?;
        self.twin.life.passed(now);
        let mut turn = Turn::of_timer().with_budget(decisions);
        self.drive(&mut turn, None, nothing)?;
        self.forget_those_who_left();
        Ok(())
    }

    /// Queued waiters leave without a word to us.
    fn forget_those_who_left(&mut self) {
        let twin = &self.twin;
        self.waiting.retain(|seat, _| twin.waiter(*seat).is_some());
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
        match effect {
            Effect::Write { write, .. } => self.space.carry_out(lock, caller, write)?,
            Effect::Publish { held_as, .. } => self.published.push((lock.to_vec(), *held_as)),
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
            Effect::Log(_) => {}
            Effect::Dismiss { client, why } => {
                let heard = match why {
                    WaitOutcome::NotAcquired { ttl_ms } => Heard::NotAcquired { ttl_ms: *ttl_ms },
                    WaitOutcome::Refused(refusal) => Heard::Refused(refusal.to_string()),
                };
                self.hears(*client, heard)?;
            }
            Effect::Wake(listener) | Effect::TakenOver { listener, .. } => {
                return Err(format!("{listener} is called, who does not listen"));
            }
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

fn shown(event: &Event) -> TwinEvent {
    let news = match &event.kind {
        EventKind::Granted(grant) => News::Granted(grant.token.get()),
        EventKind::Timeout { ttl_ms } => News::Timeout(*ttl_ms),
        EventKind::Lost(LostReason::Expired) => News::Lost("expired"),
        EventKind::Lost(LostReason::Broken) => News::Lost("broken"),
        EventKind::Lost(LostReason::Deleted) => News::Lost("deleted"),
        EventKind::Error(refusal) => News::Error(refusal.to_string()),
        EventKind::Wanted { waiters } => News::Wanted((*waiters).into()),
    };
    TwinEvent {
        news,
        lock: event.lock.name.to_vec(),
        owner: event.owner.to_vec(),
    }
}
