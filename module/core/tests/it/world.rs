//! A driver for the core that works like the module in a server, step by step, with the twin beside
//! it and every invariant looked at after each step.

use crate::foreign::{self, Change};
use crate::invariants::{self, Granted, Ledger};
use crate::keyspace::{Keyspace, Place, Reading, Value, number as count_of};
use crate::life::{After, Call, Epoch, HoldName, Name};
use crate::twin::{Heard, PermitsRequest, Reply, Twin, TwinWaiter, Waits};
use rlock_core::request::{Acquire, Cancel, Release, Renew, WaitMode};
use rlock_core::{
    BlockedClient, Command, CommandError, Counters, DECISIONS_MAX, Effect, Grant, Keys, Known,
    Lease, LockKey, LockRef, Locks, Mode, Now, Outcome, Purpose, Read, ReadWrite, SessionLimits,
    SessionRef, Stored, Subject, Task, Token, Turn, Value as Written, Wait, WaitOutcome, WaiterId,
    Write,
};
use std::collections::{BTreeMap, BTreeSet};

/// The locks that histories are about: some in one database, and one of the same name in another.
/// The timeout keys of the second have its own tag.
pub(crate) const LOCKS: [(i32, &[u8]); 4] = [(0, b"a"), (0, b"x{b}y"), (1, b"a"), (0, b"\xff")];
/// Those in one database, which one command can name together.
pub(crate) const TOGETHER: [usize; 3] = [0, 1, 3];
/// The owners that want them: any bytes.
pub(crate) const OWNERS: [&[u8]; 3] = [b"A", b"B:rwlock_timeout:1", b"\xff\0"];
/// Their sessions: any bytes.
pub(crate) const SESSIONS: [&[u8]; 2] = [b"s", b"\xff\0"];
/// The users that send the commands.
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
        epoch: Option<Epoch>,
        after: Option<After>,
    },
    /// Makes one of these connections the command connection; nothing if it is blocked.
    Bind {
        session: Name,
        client: usize,
        epoch: Epoch,
    },
    /// Holds are from now on given back by this connection; without one, no session needs to know.
    By {
        client: Option<usize>,
    },
    /// Commands are this user's from now on.
    As {
        user: usize,
    },
    /// Commands for a session ask to be told when the lock is wanted, from now on or no more.
    AskIfWanted {
        asks: bool,
    },
    /// The limits of the server from now on.
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
        mode: Option<Mode>,
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
    /// A blocked client's connection closes: of the waiters, and then of the clients whose grant is
    /// still on its way, the one with this number, counted around.
    Disconnect {
        client: usize,
    },
    /// Messages in flight arrive, and clients that were called get their events.
    Deliver,
    /// Somebody else writes to the keys, all in one step; `told` is whether an event says so.
    Foreign {
        lock: usize,
        changes: Vec<Change>,
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
    /// Both in one step.
    Failover {
        guard_ms: i64,
    },
    /// The server starts, with its loaded data: for `delay_ms` nobody is granted a lock. Nothing
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
    /// The timer fires all the same, and makes no more than this many decisions.
    Tick {
        decisions: usize,
    },
    /// The next command has time for only this many decisions about others.
    ShortTurn {
        decisions: usize,
    },
    /// After this many more reads something comes between the next read and the decision by it:
    /// another module called us while a key was being opened.
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
#[allow(
    clippy::struct_excessive_bools,
    reason = "each says something of its own"
)]
pub(crate) struct World {
    locks: Locks,
    space: Keyspace,
    pub(crate) twin: Twin,
    ledger: Ledger,
    clock: Clock,
    how: Reading,
    /// The waiters: the core's name for each, by seat.
    waiting: BTreeMap<usize, WaiterId>,
    /// The core's names for all former and present waiters.
    ever_waited: Vec<WaiterId>,
    /// Grants that were told and have not arrived.
    under_way: Vec<UnderWay>,
    heard: Vec<(usize, Heard)>,
    /// The connections that EVENTS may come from, and how many there were.
    connections: [u64; 4],
    clients: u64,
    /// Of these the one that gives holds back.
    by: Option<usize>,
    listening: BTreeMap<usize, Listening>,
    called: Vec<(usize, Call)>,
    published: Vec<(Place, Mode)>,
    /// Locks from whose hashes the fields were taken of readers whose leases are over.
    swept: Vec<Place>,
    seats: usize,
    in_multi: bool,
    is_replica: bool,
    /// While several locks are being entered: the highest token from before.
    takes_several: Option<i64>,
    /// When the server started, on the monotonic clock.
    started_at: i64,
    timer: Timer,
    /// Locks that changed without an event, and were not looked at since.
    unseen: BTreeSet<Place>,
    /// Locks in which somebody else has written, or whose keys were swapped.
    written_by_others: BTreeSet<Place>,
    /// The same for holds of sessions, each with its token.
    unseen_holds: BTreeSet<(HoldName, Option<i64>)>,
}

/// An interruption between reading and deciding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interruption {
    Timer,
    /// As [`Op::Close`].
    Close(usize),
    /// As [`Op::Disconnect`].
    Disconnect(usize),
}

/// When the timer fires in the midst of something else, and its state.
#[derive(Debug, Default)]
pub(crate) struct Timer {
    /// After how many reads an interruption comes between the read and its decision.
    pub(crate) comes_after: Option<(usize, Interruption)>,
    /// Whether the timer is firing, and the end of a turn is not the end of its work.
    pub(crate) is_part: bool,
    /// Whether it has left something to do.
    pub(crate) is_cut_short: bool,
    /// How much the next command's turn decides about others.
    pub(crate) next_turn: Option<usize>,
}

impl Timer {
    /// The turn of a command.
    pub(crate) fn turn_of<'a>(&mut self, command: Command<'a>, db: i32) -> Turn<'a> {
        let turn = Turn::of(command, db, WAITERS_MAX);
        match self.next_turn.take() {
            None => turn,
            Some(decisions) => {
                self.is_cut_short = true;
                turn.with_budget(decisions)
            }
        }
    }

    /// The interruption after this read, if it is due.
    pub(crate) fn comes_between(&mut self) -> Option<Interruption> {
        let (reads, by) = self.comes_after.take()?;
        self.comes_after = reads.checked_sub(1).map(|reads| (reads, by));
        (reads == 0).then_some(by)
    }
}

#[derive(Debug)]
struct UnderWay {
    lock: LockKey,
    owner: Vec<u8>,
    grant: Grant,
}

impl World {
    pub(crate) fn new(how: Reading) -> Self {
        let clients = 1_000_003;
        Self {
            locks: crate::locks_that_log(),
            space: Keyspace::default(),
            twin: Twin::default(),
            ledger: Ledger::default(),
            clock: Clock::default(),
            how,
            waiting: BTreeMap::new(),
            ever_waited: Vec::new(),
            under_way: Vec::new(),
            heard: Vec::new(),
            connections: [clients - 3, clients - 2, clients - 1, clients],
            clients,
            by: None,
            listening: BTreeMap::new(),
            called: Vec::new(),
            published: Vec::new(),
            swept: Vec::new(),
            seats: 0,
            in_multi: false,
            is_replica: false,
            takes_several: None,
            started_at: 0,
            timer: Timer::default(),
            unseen: BTreeSet::new(),
            written_by_others: BTreeSet::new(),
            unseen_holds: BTreeSet::new(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Clock {
    now: Now,
    /// The time that a turn has read.
    read: Now,
    /// How far the wall clock is behind the most it was ever ahead.
    set_back_ms: i64,
}

impl Default for Clock {
    fn default() -> Self {
        let now = Now {
            wall_us: 1_000_000_500,
            mono_ms: 70,
        };
        let (read, set_back_ms) = (now, 0);
        Self {
            now,
            read,
            set_back_ms,
        }
    }
}

/// Runs a history from the start.
///
/// # Errors
/// The fault, and the step after which it was found.
pub(crate) fn replay(history: &[Op], how: Reading) -> Result<World, String> {
    let mut world = replay_to(history, how)?;
    let tell = |wrong| format!("{wrong}\nat the end of this history:\n{history:?}");
    world.fetch_all().map_err(tell)?;
    Ok(world)
}

/// The same, but the events at the end are not fetched yet.
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
    /// One operation happens, the driver does its part, and everything is compared. Returns the
    /// reply.
    pub(crate) fn step(&mut self, op: &Op) -> Result<Reply, String> {
        self.overlook_shared_holds();
        let (of_core, of_twin) = self.happen(op)?;
        crate::assert_invariants(&self.locks);
        self.forget_those_who_left();
        if of_core != of_twin {
            return Err(format!("{op:?}: core {of_core:?}, twin {of_twin:?}"));
        }
        if !self.in_multi {
            self.come_to_rest()?;
            crate::assert_invariants(&self.locks);
            self.overlook_shared_holds();
            let Clock {
                now, set_back_ms, ..
            } = self.clock;
            let (unseen, others) = (&self.unseen, &self.written_by_others);
            crate::is_log_sound(&self.locks)?;
            invariants::is_at_rest(&self.locks, &self.twin, unseen, others, set_back_ms, now)?;
            invariants::sessions_are_at_rest(&self.locks, &self.twin, &self.unseen_holds, now)?;
            // A script may take a lock that was promised to a waiter for several locks: only the
            // periodic look sees that.
            let is_known = self.written_by_others.is_empty() || !self.twin.any_waits_for_several();
            if self.unseen.is_empty() && is_known {
                self.twin.nobody_is_left_to_be_told()?;
            }
        }
        self.compare()?;
        Ok(of_core)
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

    /// The owners of grants under way, their locks, and whether these would be taken back for good.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (&[u8], Mode, Vec<(Place, bool)>)> {
        self.under_way
            .iter()
            .map(|UnderWay { lock, owner, grant }| {
                let one = || vec![(place_of(lock), grant.token.get())];
                let each = each_of(grant).unwrap_or_else(one).into_iter();
                let each = each.map(|(place, token)| {
                    let present = self.twin.token(&place, owner, grant.mode) == Some(token);
                    (place, present)
                });
                (owner.as_slice(), grant.mode, each.collect())
            })
    }

    /// The waiters of a lock, in order.
    pub(crate) fn line(&self, lock: usize) -> &[TwinWaiter] {
        self.twin.line(&place(lock))
    }

    /// The keyspace.
    pub(crate) fn space(&self) -> &Keyspace {
        &self.space
    }

    /// Where an owner reads both with us and with Redisson, which writes no token, the hold on
    /// record cannot be told from the one in the keys: it counts as changed without word.
    fn overlook_shared_holds(&mut self) {
        for (of, hold) in &self.twin.life.holds {
            let (place, owner, mode) = of;
            let mut keys = self.space.timeouts(place, owner).into_iter();
            let is_ours = |value: &Value| match value {
                Value::Text(value) => count_of(value) == hold.token,
                Value::Hash(_) => false,
            };
            if *mode == Mode::Read && keys.any(|(_, key)| !is_ours(&key.value)) {
                self.unseen_holds.insert((of.clone(), hold.token));
            }
        }
    }

    fn happen(&mut self, op: &Op) -> Result<(Reply, Reply), String> {
        if self.is_replica && writes(op) {
            return Ok((Reply::Nothing, Reply::Nothing));
        }
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
                let asked = PermitsRequest {
                    owner: OWNERS[owner],
                    mode,
                    lease_ms,
                    waits,
                    session,
                    wanted: self.twin.asks_if_wanted(session),
                    once,
                    seat: self.seats,
                    waiters_max: usize::try_from(WAITERS_MAX).unwrap(),
                };
                self.acquire(&place(lock), asked)
            }
            Op::Release {
                lock,
                owner,
                mode,
                token,
                lease_ms,
            } => self.release((&place(lock), OWNERS[owner], mode), token, lease_ms),
            Op::Renew {
                lock,
                owner,
                mode,
                lease_ms,
                token,
                session,
            } => self.renew(
                (&place(lock), OWNERS[owner], mode),
                lease_ms,
                token,
                session,
            ),
            Op::MultiAcquire { .. } | Op::MultiRelease { .. } | Op::MultiRenew { .. } => {
                self.happen_to_several(op)
            }
            Op::Events { .. }
            | Op::Bind { .. }
            | Op::Close { .. }
            | Op::Unblock { .. }
            | Op::Deliver => self.happen_to_sessions(op),
            Op::Cancel { lock, owner, mode } => self.cancel(&place(lock), OWNERS[owner], mode),
            Op::Break { lock } => self.break_hold(&place(lock)),
            _ => {
                self.happen_around(op)?;
                Ok((Reply::Nothing, Reply::Nothing))
            }
        }
    }

    /// An operation that is no command of ours. In a transaction there is neither time nor I/O.
    fn happen_around(&mut self, op: &Op) -> Result<(), String> {
        match *op {
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
            Op::Foreign {
                lock,
                ref changes,
                told,
            } => self.foreign(lock, changes, told),
            Op::Flush { db } => {
                self.space.flush(db);
                self.twin.space.flush(db);
                self.locks.all_changed(db);
            }
            Op::SwapDatabases => {
                self.space.swap(0, 1);
                self.twin.space.swap(0, 1);
                // The holds that are there now were not granted there.
                self.written_by_others.extend((0..LOCKS.len()).map(place));
                self.locks.all_changed(Some(0));
                self.locks.all_changed(Some(1));
            }
            Op::Demote => self.demote()?,
            Op::StartTokens { guard_ms } => self.start_tokens(guard_ms),
            Op::Failover { guard_ms } => {
                self.demote()?;
                self.start_tokens(guard_ms);
            }
            Op::Start { delay_ms } if self.twin.waiting() == 0 => {
                self.started_at = self.clock.now.mono_ms;
                self.locks.start_grant_delay(self.clock.now, delay_ms);
                self.twin.delay_left_ms = delay_ms;
            }
            Op::SetDelay { delay_ms } => {
                self.locks.set_grant_delay(delay_ms);
                let end = self.started_at + delay_ms;
                self.twin.delay_left_ms = (end - self.clock.now.mono_ms).max(0);
            }
            Op::As { user } => self.twin.life.user = user,
            Op::By { client } => self.by = client,
            Op::AskIfWanted { asks } => self.twin.asks_if_wanted = asks,
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
            Op::Multi => self.in_multi = true,
            Op::Exec => self.in_multi = false,
            Op::Tick { decisions } => self.tick(decisions)?,
            Op::ShortTurn { decisions } => self.timer.next_turn = Some(decisions),
            Op::Interrupt { reads, by } => self.timer.comes_after = Some((reads, by)),
            _ => {}
        }
        Ok(())
    }

    fn demote(&mut self) -> Result<(), String> {
        let mut effects = Vec::new();
        self.locks.demoted(&mut effects);
        self.carry_out(&[], b"", &effects)?;
        for name in self.twin.demoted() {
            self.ledger.loses_its_line(name, &self.twin);
        }
        // Their grants are the new primary's to end.
        self.under_way.clear();
        self.is_replica = true;
        Ok(())
    }

    fn start_tokens(&mut self, guard_ms: i64) {
        self.locks.start_tokens(self.clock.now, guard_ms);
        self.twin.start_tokens(guard_ms, self.clock.now);
        self.is_replica = false;
    }

    // --- Commands --------------------------------------------------------------------------------

    fn acquire(
        &mut self,
        place: &Place,
        asked: PermitsRequest<'_>,
    ) -> Result<(Reply, Reply), String> {
        let request = Acquire {
            key: &place.1,
            owner: asked.owner,
            lease: Lease::from_ms(asked.lease_ms).unwrap(),
            wait_mode: wait_mode(asked.waits),
            session: asked.session.map(|name| self.session(name)),
            mode: asked.mode,
            asked: None,
            wanted: asked.wanted,
            once: asked.once,
        };
        let command = Command::Acquire(&request);
        let mut turn = self.timer.turn_of(command, place.0);
        let of_twin = self.drive(&mut turn, Some((command, place.0)), |world, decided| {
            if let Some(given_up) = world.given_up(decided) {
                return given_up;
            }
            world.twin.is_found = is_deadlock(decided);
            if decided.is_ok() && asked.mode == Mode::Plain {
                world.is_seen(place);
            }
            world.twin.acquire(place, asked, world.clock.now)
        })?;
        self.answer(
            &mut turn,
            std::slice::from_ref(place),
            false,
            asked,
            of_twin,
        )
    }

    /// A circle through a lock where something is due is none yet. The twin has done by then what
    /// the timer is yet to do.
    pub(crate) fn given_up(&mut self, decided: &Result<Outcome, CommandError>) -> Option<Reply> {
        let Err(error @ CommandError::Unsettled) = decided else {
            return None;
        };
        let is_due = self.locks.next_deadline(self.clock.read) == Some(0);
        is_due.then(|| Reply::Refused(error.to_string()))
    }

    /// The replies to an ACQUIRE or MACQUIRE, after it has begun to wait if it must.
    fn answer(
        &mut self,
        turn: &mut Turn<'_>,
        places: &[Place],
        several: bool,
        asked: PermitsRequest<'_>,
        of_twin: Reply,
    ) -> Result<(Reply, Reply), String> {
        let of_core = match turn.outcome() {
            Err(CommandError::Deadlock(_)) => Reply::Deadlock,
            Err(error) => Reply::Refused(error.to_string()),
            Ok(Outcome::Held { count, token }) => {
                let token = token.get();
                Reply::Held { count, token }
            }
            Ok(Outcome::NotHeld { ttl_ms }) => Reply::NotHeld { ttl_ms },
            Ok(Outcome::MustWait { .. }) => self.join(turn, places, several, asked)?,
            Ok(other) => return Err(format!("an answer of another command: {other:?}")),
        };
        self.twin.note_peak();
        Ok((of_core, of_twin))
    }

    /// A command has looked at a lock. That others took it for the first in its queue, it cannot
    /// tell.
    fn is_seen(&mut self, place: &Place) {
        if self.twin.is_free(place) || !self.twin.lets_first_in(place) {
            self.unseen.remove(place);
        }
    }

    /// Drives a turn as the module does: reads as the task asks, and carries out the effects. The
    /// twin does the same after each task; the command itself when it is `decided`.
    fn drive(
        &mut self,
        turn: &mut Turn<'_>,
        command: Option<(Command<'_>, i32)>,
        decided: impl FnOnce(&mut Self, &Result<Outcome, CommandError>) -> Reply,
    ) -> Result<Reply, String> {
        self.clock.read = self.clock.now;
        if !self.locks.is_timed() {
            // The module reads the monotonic clock only where something is timed by it.
            self.clock.read.mono_ms = 0;
        }
        let (mut decided, mut of_twin) = (Some(decided), Reply::Nothing);
        self.twin.freed.clear();
        for number in 0..1000 {
            let Some(task) = self.locks.next_task(turn, self.clock.read) else {
                // The work that a turn left when it was cut short is done when the timer fires
                // again.
                if !self.timer.is_part && !self.timer.is_cut_short {
                    self.twin.all_are_served()?;
                }
                return Ok(of_twin);
            };
            if number > 0 {
                self.clock.read = self.clock.now;
            }
            let (places, owner) = match (&task.subject, command) {
                (Subject::Command, Some((command, db))) => {
                    (places_named(command, db), command.owner().to_vec())
                }
                (Subject::Command, None) => return Err("a command that nobody sent".into()),
                (Subject::One(lock, owner), _) => (vec![place_of(lock)], owner.to_vec()),
                (Subject::Several(locks, owner), _) => {
                    (locks.iter().map(place_of).collect(), owner.to_vec())
                }
            };
            let purpose = task.purpose;
            let mut effects = Vec::new();
            let command = command.map(|(command, _)| command);
            if !self.read_and_decide(turn, &task, command, &places, &owner, &mut effects)? {
                continue;
            }
            self.all_has_ended(purpose, &places, &owner)?;
            let is_refused = purpose == Purpose::Command && matches!(turn.decided(), Some(Err(_)));
            if is_refused && !effects.is_empty() {
                return Err(format!("refused, and yet {effects:?}"));
            }
            if purpose == Purpose::Sweep {
                // When that is done is nobody else's business, as long as nobody can tell.
                self.swept.push(places[0].clone());
            }
            self.carry_out(&places, &owner, &effects)?;
            if let Some(outcome) = turn.decided()
                && let Some(decided) = decided.take()
            {
                let outcome = outcome.clone();
                of_twin = decided(self, &outcome);
            }
            self.twin_follows(purpose, &places, &owner)?;
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
        places: &[Place],
        owner: &[u8],
        effects: &mut Vec<Effect>,
    ) -> Result<bool, String> {
        let now = self.clock.read;
        let read = |place| as_needed(task, self.space.read(place, owner, task.depth, self.how));
        let stored: Vec<Stored> = places.iter().map(read).collect();
        let (first, space) = (&places[0], &self.space);
        let (holders, gone) = (space.holders(first), space.readers_gone(first));
        let readers = space.reader_counts(first);
        let names_several = match &task.subject {
            Subject::Command => {
                command.is_some_and(|command| matches!(command.keys(), Keys::Several(_)))
            }
            Subject::One(..) => false,
            Subject::Several(..) => true,
        };
        let read = match (task.purpose, command) {
            (Purpose::Holders, _) => Read::Owners(&holders),
            (Purpose::Sweep, _) => Read::Gone {
                readers: &gone,
                more: false,
            },
            (Purpose::Command, Some(Command::Break(_))) => {
                Read::Holds(stored[0], &readers, space.first_hold(first))
            }
            (Purpose::LongWait, _) => Read::Holder(crate::first_of(&holders)),
            _ if names_several => Read::Several(&stored),
            _ => Read::One(&stored[0]),
        };
        if let Some(by) = self.timer.comes_between() {
            self.interrupted(by)?;
            self.forget_those_who_left();
        }
        self.takes_several = (places.len() > 1).then(|| self.ledger.highest_token());
        Ok(self.locks.decide(turn, task.found(read), now, effects))
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
    /// at it; of several locks, at any of them. In a turn that is cut short a command may come
    /// before the end of others' holds.
    fn all_has_ended(
        &self,
        purpose: Purpose,
        places: &[Place],
        owner: &[u8],
    ) -> Result<(), String> {
        let is_at_once = matches!(
            purpose,
            Purpose::Command
                | Purpose::Reconcile(_)
                | Purpose::GrantSeveral(_)
                | Purpose::CheckHold(_)
        );
        let mut endings = self.twin.life.endings.iter();
        let is_others = |of: &crate::life::TwinEnding| {
            purpose == Purpose::Command && self.timer.is_cut_short && of.hold.1 != owner
        };
        match endings.find(|of| places.contains(&of.hold.0) && !is_others(of)) {
            Some(left) if is_at_once => Err(format!("{purpose:?}, and before it ends {left:?}")),
            _ => Ok(()),
        }
    }

    /// The twin follows a decision that the core has just made without a command.
    fn twin_follows(
        &mut self,
        purpose: Purpose,
        places: &[Place],
        owner: &[u8],
    ) -> Result<(), String> {
        let (now, place) = (self.clock.now, &places[0]);
        match purpose {
            Purpose::Release(mode) => {
                let hold = (place.clone(), owner.to_vec(), mode);
                let mut endings = self.twin.life.endings.iter();
                let next = endings.find(|of| of.hold == hold);
                let next = next.ok_or("nothing of this owner is to end there")?.clone();
                self.twin.end(&next, now)
            }
            Purpose::Reconcile(_) => {
                self.twin.reconcile(place, now);
                self.unseen.remove(place);
                Ok(())
            }
            Purpose::GrantSeveral(_) => {
                let seat = self.seat_of(places, owner);
                self.twin
                    .reconcile_joint(seat.ok_or("nobody waits, and is due")?, now);
                Ok(())
            }
            Purpose::CheckHold(mode) => {
                let of = (place.clone(), owner.to_vec(), mode);
                self.twin.check_hold(&of, now);
                self.unseen_holds.retain(|(hold, _)| *hold != of);
                Ok(())
            }
            Purpose::TimeOut => {
                let seat = self.seat_of(places, owner);
                let seat = seat.ok_or("nobody waits that could be timed out")?;
                self.is_earliest(seat)?;
                self.twin.time_out(seat, now)
            }
            Purpose::Command | Purpose::Holders | Purpose::LongWait | Purpose::Sweep => Ok(()),
        }
    }

    /// The seat of this owner's wait for just these locks.
    fn seat_of(&self, places: &[Place], owner: &[u8]) -> Option<usize> {
        let is_meant = |waiter: &&TwinWaiter| {
            let together = waiter.together.as_deref();
            waiter.owner == owner && together.is_none_or(|together| together == places)
        };
        let waiter = self.twin.line(&places[0]).iter().find(is_meant);
        waiter.map(|waiter| waiter.seat)
    }

    /// The wait that ends first leaves first. Of several that end together any may.
    fn is_earliest(&self, seat: usize) -> Result<(), String> {
        let waiters = self.twin.lines.values().flatten();
        let earliest = waiters.filter_map(|waiter| waiter.wait_end).min();
        if self.twin.waiter(seat).and_then(|waiter| waiter.wait_end) == earliest {
            return Ok(());
        }
        Err(format!("seat {seat} is timed out before its time"))
    }

    fn join(
        &mut self,
        turn: &mut Turn<'_>,
        places: &[Place],
        several: bool,
        asked: PermitsRequest<'_>,
    ) -> Result<Reply, String> {
        let (now, seat) = (self.clock.now, asked.seat);
        self.seats += 1;
        self.ledger.sits_down(places, several, asked);
        let is_blocked = matches!(asked.waits, Waits::Block(_));
        let client = is_blocked.then(|| BlockedClient {
            handle: seat,
            client_id: u64::try_from(seat).unwrap(),
        });
        let mut effects = Vec::new();
        let joined = self.locks.enqueue(turn, client, now, &mut effects);
        let joined = joined.ok_or("no room for a waiter")?;
        // A waiter that changes its seat keeps its name. No other name comes twice.
        let moved = self.ever_waited.contains(&joined.waiter);
        if moved && !asked.once {
            return Err(format!("{:?} comes twice", joined.waiter));
        }
        self.carry_out(places, asked.owner, &effects)?;
        if several && !moved {
            for place in places {
                self.is_seen(place);
            }
        }
        self.waiting.insert(seat, joined.waiter);
        self.ever_waited.push(joined.waiter);
        let position = joined.position;
        Ok(if is_blocked {
            Reply::Waits
        } else {
            Reply::Queued { position }
        })
    }

    /// A command about one lock that does not wait.
    fn decide_one(
        &mut self,
        command: Command<'_>,
        place: &Place,
        twin: impl FnOnce(&mut Twin, Now) -> Reply,
    ) -> Result<(Reply, Reply), String> {
        let mut turn = self.timer.turn_of(command, place.0);
        let of_twin = self.drive(&mut turn, Some((command, place.0)), |world, _| {
            twin(&mut world.twin, world.clock.now)
        })?;
        Ok((number(turn.outcome())?, of_twin))
    }

    fn release(
        &mut self,
        (place, owner, mode): (&Place, &[u8], Mode),
        token: Named,
        lease_ms: Option<i64>,
    ) -> Result<(Reply, Reply), String> {
        let of = (place, owner, mode);
        let (token, by) = (self.token(of, token), self.by());
        let request = Release {
            key: &place.1,
            owner,
            mode,
            permits: None,
            token: token.and_then(Token::new),
            lease: lease_ms.map(|ms| Lease::from_ms(ms).unwrap()),
            by,
        };
        let was_full = self.twin.is_full(of);
        let replies = self.decide_one(Command::Release(&request), place, |twin, now| {
            twin.release(of, token, lease_ms, by, now)
        })?;
        self.may_make_room(place, was_full);
        Ok(replies)
    }

    /// The count that others wrote for the first in the queue was full: it is not looked at at once
    /// whether that one can come in now.
    fn may_make_room(&mut self, place: &Place, was_full: bool) {
        if was_full {
            self.unseen.insert(place.clone());
        }
    }

    fn renew(
        &mut self,
        (place, owner, mode): (&Place, &[u8], Mode),
        lease_ms: i64,
        token: Named,
        session: Option<Name>,
    ) -> Result<(Reply, Reply), String> {
        let of = (place, owner, mode);
        let token = self.token(of, token);
        let request = Renew {
            key: &place.1,
            owner,
            lease: Lease::from_ms(lease_ms).unwrap(),
            mode,
            token: token.and_then(Token::new),
            session: session.map(|name| self.session(name)),
            wanted: self.twin.asks_if_wanted(session),
        };
        self.decide_one(Command::Renew(&request), place, |twin, now| {
            twin.renew(of, lease_ms, token, session, now)
        })
    }

    fn cancel(
        &mut self,
        place: &Place,
        owner: &[u8],
        mode: Option<Mode>,
    ) -> Result<(Reply, Reply), String> {
        let key = &place.1;
        let request = Cancel { key, owner, mode };
        self.decide_one(Command::Cancel(&request), place, |twin, now| {
            twin.cancel(place, owner, mode, now)
        })
    }

    fn break_hold(&mut self, place: &Place) -> Result<(Reply, Reply), String> {
        self.decide_one(Command::Break(&place.1), place, |twin, now| {
            twin.break_hold(place, now)
        })
    }

    /// The connection that gives holds back.
    pub(super) fn by(&self) -> Option<u64> {
        self.by.map(|client| self.connections[client])
    }

    /// A session, as the present user names it.
    pub(super) fn session(&self, name: Name) -> SessionRef<'static> {
        SessionRef {
            name: SESSIONS[name],
            user: USERS[self.twin.life.user],
        }
    }

    fn token(&self, (place, owner, mode): (&Place, &[u8], Mode), named: Named) -> Option<i64> {
        let present = self.twin.token(place, owner, mode).unwrap_or(2);
        match named {
            Named::No => None,
            Named::Present => Some(present),
            Named::Stale => Some((present - 1).max(1)),
        }
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
        for id in &self.ever_waited {
            // A name that outlived its waiter must not fit a later one. (With ONCE the waiter lives
            // on, under its name, for another seat.)
            let is_there = self.waiting.values().any(|waiting| waiting == id);
            if !is_there && self.locks.waiter_gone(*id).is_some() {
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
                .waiter_gone(id)
                .map(|lock| (lock.db, lock.name.to_vec()));
            if left.as_ref() != Some(&place) || self.locks.waiter_gone(id).is_some() {
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
            twin.take_back(place_of(&lock), &owner, grant.mode, token, several);
            let owner = owner.as_slice().into();
            self.locks.end_grant_later(&lock, &owner, &grant);
        }
        Ok(())
    }

    fn foreign(&mut self, lock: usize, changes: &[Change], told: bool) {
        let wall_ms = self.clock.now.wall_ms();
        for change in changes {
            foreign::make(&mut self.space, lock, *change, wall_ms);
        }
        for change in changes {
            foreign::make(&mut self.twin.space, lock, *change, wall_ms);
        }
        let touched = changes
            .iter()
            .flat_map(|change| foreign::changed(lock, *change));
        for place in touched.collect::<BTreeSet<_>>().into_iter().map(place) {
            self.written_by_others.insert(place.clone());
            if told {
                self.locks.changed(lock_ref(&place));
            } else {
                self.twin.changed_unseen(&place);
                let holds = self.twin.life.holds.iter();
                let holds = holds.filter(|((of, ..), _)| *of == place);
                self.unseen_holds
                    .extend(holds.map(|(of, hold)| (of.clone(), hold.token)));
                self.unseen.insert(place);
            }
        }
        self.expire();
    }

    /// The timer, as often as it is due. A replica writes nothing, and must come to rest too.
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

    /// The timer fires once, and makes at most this many decisions.
    fn tick(&mut self, decisions: usize) -> Result<(), String> {
        let is_part = std::mem::replace(&mut self.timer.is_part, true);
        // Locks that were freed in the interrupted turn are that turn's own.
        let freed = std::mem::take(&mut self.twin.freed);
        self.timer.is_cut_short |= decisions < DECISIONS_MAX;
        self.fire(decisions)?;
        self.twin.freed = freed;
        self.timer.is_part = is_part;
        Ok(())
    }

    fn fire(&mut self, decisions: usize) -> Result<(), String> {
        let now = self.clock.now;
        let nothing: fn(&mut Self, &Result<Outcome, CommandError>) -> Reply = |_, _| Reply::Nothing;
        self.drive(&mut Turn::of_deadlines(), None, nothing)?;
        let mut effects = Vec::new();
        self.locks.passed(now, &mut effects);
        self.carry_out(&[], b"", &effects)?;
        for name in self.twin.overflow(now) {
            self.ledger.loses_its_line(name, &self.twin);
        }
        self.twin.life.passed(now);
        if self.is_replica {
            self.locks.forget_what_is_due();
            self.twin.life.endings.clear();
        } else {
            let mut turn = Turn::of_timer().with_budget(decisions);
            self.drive(&mut turn, None, nothing)?;
        }
        self.forget_those_who_left();
        Ok(())
    }

    /// Queued waiters leave without a word to us.
    fn forget_those_who_left(&mut self) {
        let twin = &self.twin;
        self.waiting.retain(|seat, _| twin.waiter(*seat).is_some());
        self.ledger.forget_those_who_left(twin);
    }

    // --- Effects and comparison ------------------------------------------------------------------

    fn carry_out(
        &mut self,
        places: &[Place],
        caller: &[u8],
        effects: &[Effect],
    ) -> Result<(), String> {
        for effect in effects {
            self.carry_out_one(places, caller, effect)
                .map_err(|wrong| format!("{wrong}: {effect:?} of {effects:?}"))?;
        }
        // A new hold has a token, and an end.
        let begun = effects.iter().filter_map(|effect| match effect {
            Effect::Write {
                lock,
                write: Write::Set((_, Written::Number(1)), Some(_)) | Write::SetWriter(.., true),
            } => Some(&places[*lock]),
            _ => None,
        });
        match begun.into_iter().find(|place| self.space.is_endless(place)) {
            Some(place) => Err(format!("{place:?} has no end: {effects:?}")),
            None => Ok(()),
        }
    }

    fn carry_out_one(
        &mut self,
        places: &[Place],
        caller: &[u8],
        effect: &Effect,
    ) -> Result<(), String> {
        match effect {
            Effect::Write { lock, write } => {
                self.space.carry_out(&places[*lock], caller, write)?;
                let token = match write {
                    Write::Set((_, Written::Fence(token)), _)
                    | Write::Set(_, Some((_, Written::Fence(token))))
                    | Write::SetWriter(.., token, true) => *token,
                    _ => return Ok(()),
                };
                self.ledger.is_minted(token, self.takes_several)
            }
            Effect::Publish { lock, held_as } => {
                self.published.push((places[*lock].clone(), *held_as));
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
                let granted = Granted {
                    place: &place_of(lock),
                    seat: *client,
                    mode: grant.mode,
                    count,
                    token: token.get(),
                    several: several.as_deref(),
                };
                self.ledger.is_granted(&granted, &self.space, &self.twin)?;
                let granted = Heard::Granted {
                    count,
                    token: token.get(),
                    several,
                };
                self.heard.push((*client, granted));
                Ok(())
            }
            Effect::Log(_) => Ok(()),
            Effect::Leave { client, why } => {
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
        for place in std::mem::take(&mut self.swept) {
            self.twin.space.sweep_readers(&place);
        }
        if self.space != self.twin.space {
            let (space, twin) = (&self.space, &self.twin.space);
            return Err(format!("stored {space:?}\n  should {twin:?}"));
        }
        let (mut sent, mut should) = (
            std::mem::take(&mut self.published),
            std::mem::take(&mut self.twin.published),
        );
        sent.sort_by(|one, other| one.0.cmp(&other.0));
        should.sort_by(|one, other| one.0.cmp(&other.0));
        if sent != should {
            return Err(format!("published {sent:?}\n  should {should:?}"));
        }
        invariants::views_are_true(&self.locks, &self.twin, self.clock.now)?;
        invariants::sessions_are_true(&self.locks, &self.twin, self.clock.now)?;
        invariants::counters_add_up(&self.locks, &self.twin, &self.ledger)?;
        if self.written_by_others.is_empty() {
            invariants::keys_are_ours(&self.space, &self.twin)?;
        }
        Ok(())
    }
}

/// The operations that a replica refuses.
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

/// Brings waiters into one order that leave together, because nothing is left to wait for.
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

/// The locks that a grant took, each with the token of its hold; none if the one that was waited
/// for.
fn each_of(grant: &Grant) -> Option<Vec<(Place, i64)>> {
    let each = grant.taken.as_ref()?.iter();
    let each = each.map(|(lock, token)| (place_of(lock), token.get()));
    Some(each.collect())
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

fn wait_mode(waits: Waits) -> WaitMode {
    match waits {
        Waits::No => WaitMode::None,
        Waits::Block(ms) => WaitMode::Block(Wait::from_ms(ms).unwrap()),
        Waits::Queue(ms) => WaitMode::Queue(Wait::from_ms(ms).unwrap()),
    }
}

fn is_deadlock(decided: &Result<Outcome, CommandError>) -> bool {
    matches!(decided, Err(CommandError::Deadlock(_)))
}

/// The answer of a command that takes nothing.
fn number(outcome: Result<Outcome, CommandError>) -> Result<Reply, String> {
    match outcome {
        Ok(Outcome::Left(left)) => Ok(left.map_or(Reply::Null, Reply::Number)),
        Ok(Outcome::Number(number)) => Ok(Reply::Number(number)),
        Ok(other) => Err(format!("an answer of another command: {other:?}")),
        Err(error) => Ok(Reply::Refused(error.to_string())),
    }
}

fn places_named(command: Command<'_>, db: i32) -> Vec<Place> {
    match command.keys() {
        Keys::One(name) => vec![(db, name.to_vec())],
        Keys::Several(keys) => keys.iter().map(|key| (db, key.name.to_vec())).collect(),
    }
}

/// The reading for a task, without the ends and tokens that the decision does not need.
pub(crate) fn as_needed(task: &Task, stored: Stored) -> Stored {
    match stored {
        Stored::Plain(mut hash) => {
            if !task.needs_end(hash.own, hash.others) {
                hash.ends_at = Known::NOT_READ;
            }
            if !task.needs_token(hash.own) {
                hash.token = Known::NOT_READ;
            }
            Stored::Plain(hash)
        }
        Stored::ReadWrite(mut hash) if !needs_readers_ends(task, &hash) => {
            hash.ends_at = Known::NOT_READ;
            if let Some(own) = &mut hash.own_read {
                own.ends_at = Known::NOT_READ;
            }
            Stored::ReadWrite(hash)
        }
        _ => stored,
    }
}

fn needs_readers_ends(task: &Task, hash: &ReadWrite) -> bool {
    let others = hash.own_write.is_some() || hash.others_write || hash.others_read.is_some();
    task.needs_readers_ends(hash.own_read.map(|own| own.count), others)
}
