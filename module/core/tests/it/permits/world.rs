//! A driver for the core that works like the module in a server, with the twin beside it.

use super::twin::{Heard, Reply, Request, To, Twin, WAITERS_MAX};
use rlock_core::request::{Acquire, Cancel, Events, Limit, Release, Renew, WaitMode};
use rlock_core::{
    BlockedClient, Command, Effect, EventKind, Grant, Lease, LockKey, LockRef, Locks, LostReason,
    Mode, Now, Outcome, PERMITS_MODE, Permits, PermitsHolders, PermitsReading, PermitsRequest,
    Purpose, Read, ReadDepth, SessionId, SessionLimits, Stored, Subject, Task, Token, Turn, Wait,
    WaitOutcome, WaiterId, Write, names,
};
use std::collections::BTreeMap;
use std::rc::Rc;

const NAME: &[u8] = b"p";
const LIMIT_KEY: &[u8] = b"{p}:rlock_limit";
const SESSION: &[u8] = b"s";
/// The connection of the commands, which is bound to no session.
const NOT_BOUND: u64 = 1_000_000;
/// Any bytes; one is named as a part of a value is, and one as a writer's field.
pub(crate) const OWNERS: [&[u8]; 5] = [b"A", b"1:9:t1", b"w:write", b"\xff\0", b"E"];

/// One thing that happens. Its `Debug` form is the code that makes it happen again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Acquire {
        owner: usize,
        permits: i64,
        of: Option<i64>,
        lease_ms: i64,
        wait_ms: Option<i64>,
        is_blocked: bool,
        of_session: bool,
        once: bool,
    },
    Release {
        owner: usize,
        permits: i64,
        token: Named,
        lease_ms: Option<i64>,
    },
    Renew {
        owner: usize,
        lease_ms: i64,
        token: Named,
        of_session: bool,
    },
    Limit {
        limit: i64,
    },
    Cancel {
        owner: usize,
    },
    Break,
    Pass {
        ms: i64,
    },
    /// Both clocks go on to the next deadline.
    PassDeadline,
    /// A blocked client's connection closes, or of one whose grant is on its way.
    Disconnect {
        client: usize,
    },
    /// Messages in flight arrive.
    Deliver,
    /// The session's connection fetches its events, or closes.
    Fetch,
    Close,
    /// Commands for the session ask to be told when somebody waits, from now on or no more.
    AskIfWanted {
        asks: bool,
    },
    /// Somebody else deletes the key.
    Delete,
    /// Somebody else writes the limit's key, and it is noticed within a second.
    WriteLimit {
        value: &'static str,
    },
    /// Somebody else writes something into the hash that is no hold.
    WriteOdd {
        owner: usize,
        value: &'static str,
    },
    /// Somebody else writes a hold into the hash.
    WriteHold {
        owner: usize,
        permits: i64,
    },
    /// The server starts, and grants nothing for this time.
    Delay {
        ms: i64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    No,
    Present,
    Stale,
}

/// The hash, when it expires, and the limit beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) hash: Option<BTreeMap<Vec<u8>, Vec<u8>>>,
    ends_at: Option<i64>,
    limit: Option<Vec<u8>>,
}

type Told = Vec<(To, Heard)>;
type Counts = Vec<(Box<[u8]>, rlock_core::Count)>;
type Fields = Vec<Box<[u8]>>;

#[derive(Debug)]
pub(crate) struct World {
    locks: Locks,
    pub(crate) space: Space,
    twin: Twin,
    now: Now,
    session: Option<SessionId>,
    connection: u64,
    clients: usize,
    blocked: BTreeMap<usize, WaiterId>,
    under_way: Vec<(LockKey, Rc<[u8]>, Grant)>,
    told: Vec<(To, Heard)>,
    /// Whether somebody else has written into the hash.
    is_odd: bool,
    looks_at_all: bool,
}

fn at() -> LockRef<'static> {
    LockRef { db: 0, name: NAME }
}

fn lease(ms: i64) -> Lease {
    Lease::from_ms(ms).unwrap()
}

fn index_of(owner: &[u8]) -> usize {
    OWNERS.iter().position(|of| *of == owner).unwrap()
}

/// Runs a history from the start.
///
/// # Errors
/// The fault, and the step after which it was found.
pub(crate) fn replay(history: &[Op], looks_at_all: bool) -> Result<World, String> {
    let mut world = World::new(looks_at_all);
    for (step, op) in history.iter().enumerate() {
        world.step(op).map_err(|wrong| {
            format!("{wrong}\nat step {step} of this history, which replays it:\n{history:?}")
        })?;
    }
    Ok(world)
}

impl World {
    fn new(looks_at_all: bool) -> Self {
        Self {
            locks: crate::locks_that_log(),
            space: Space::default(),
            twin: Twin::default(),
            now: Now {
                wall_us: 1_000_000_500,
                mono_ms: 70,
            },
            session: None,
            connection: 1,
            clients: 0,
            blocked: BTreeMap::new(),
            under_way: Vec::new(),
            told: Vec::new(),
            is_odd: false,
            looks_at_all,
        }
    }

    /// One thing happens, the driver does its part, and everything is compared.
    pub(crate) fn step(&mut self, op: &Op) -> Result<Reply, String> {
        let (of_core, of_twin) = self.happen(op)?;
        if of_core != of_twin {
            return Err(format!("{op:?}: core {of_core:?}, twin {of_twin:?}"));
        }
        crate::assert_invariants(&self.locks);
        self.come_to_rest()?;
        crate::assert_invariants(&self.locks);
        self.compare()?;
        Ok(of_core)
    }

    #[allow(clippy::too_many_lines, reason = "one table of what may happen")]
    fn happen(&mut self, op: &Op) -> Result<(Reply, Reply), String> {
        let now = self.now;
        Ok(match *op {
            Op::Acquire {
                owner,
                permits,
                of,
                lease_ms,
                wait_ms,
                is_blocked,
                of_session,
                once,
            } => {
                self.clients += 1;
                let request = Request {
                    owner,
                    permits,
                    of,
                    lease_ms,
                    wait_ms,
                    is_blocked,
                    of_session,
                    once,
                    client: self.clients,
                };
                (self.acquire(&request)?, self.twin.acquire(&request, now))
            }
            Op::Release {
                owner,
                permits,
                token,
                lease_ms,
            } => {
                let token = self.token(owner, token);
                let request = Release {
                    key: NAME,
                    owner: OWNERS[owner],
                    mode: Mode::Permits,
                    permits: Permits::new(permits),
                    token: token.and_then(Token::new),
                    lease: lease_ms.map(lease),
                    by: Some(NOT_BOUND),
                };
                let of_core = self.decide(Command::Release(&request))?;
                let of_twin = self.twin.release(owner, permits, token, lease_ms, now);
                (of_core, of_twin)
            }
            Op::Renew {
                owner,
                lease_ms,
                token,
                of_session,
            } => {
                let token = self.token(owner, token);
                let request = Renew {
                    key: NAME,
                    owner: OWNERS[owner],
                    lease: lease(lease_ms),
                    mode: Mode::Permits,
                    token: token.and_then(Token::new),
                    session: of_session.then_some(SESSION.into()),
                    wanted: of_session && self.twin.asks_if_wanted,
                };
                let of_core = self.decide(Command::Renew(&request))?;
                let of_twin = self.twin.renew(owner, lease_ms, token, of_session, now);
                (of_core, of_twin)
            }
            Op::Limit { limit } => {
                let request = Limit {
                    key: NAME,
                    limit: Permits::new(limit),
                };
                let of_core = self.decide(Command::Limit(&request))?;
                (of_core, self.twin.set_limit(limit, now))
            }
            Op::Cancel { owner } => {
                let request = Cancel {
                    key: NAME,
                    owner: OWNERS[owner],
                    mode: Some(Mode::Permits),
                };
                let of_core = self.decide(Command::Cancel(&request))?;
                (of_core, self.twin.cancel(owner, now))
            }
            Op::Break => (
                self.decide(Command::Break(NAME))?,
                self.twin.break_holds(now),
            ),
            _ => {
                self.happen_around(op)?;
                (Reply::Nothing, Reply::Nothing)
            }
        })
    }

    fn happen_around(&mut self, op: &Op) -> Result<(), String> {
        let now = self.now;
        match *op {
            Op::Pass { ms } => self.pass(ms),
            Op::PassDeadline => {
                let ms = self.locks.next_deadline(now).unwrap_or(0);
                self.pass(ms.min(100_000));
            }
            Op::Disconnect { client } => self.disconnect(client),
            Op::Deliver => self.under_way.clear(),
            Op::Fetch => self.fetch()?,
            Op::Close => {
                let mut effects = Vec::new();
                self.locks.client_gone(self.connection, now, &mut effects);
                self.carry_out(b"", &effects)?;
                (self.session, self.connection) = (None, self.connection + 1);
                self.twin.end_session(now);
            }
            Op::AskIfWanted { asks } => self.twin.asks_if_wanted = asks,
            Op::Delete => {
                (self.space.hash, self.space.ends_at) = (None, None);
                self.twin.lose_all("deleted", now);
                self.locks.changed(at());
                self.twin.settle(now);
            }
            Op::WriteLimit { value } => {
                self.space.limit = (!value.is_empty()).then(|| value.as_bytes().to_vec());
                self.twin.limit = Permits::from_limit(value.as_bytes()).map(Permits::get);
                self.pass(1001);
            }
            Op::WriteOdd { owner, value } => {
                let is_held = self.twin.holds.contains_key(&owner);
                if let Some(hash) = self.space.hash.as_mut().filter(|_| !is_held) {
                    hash.insert(OWNERS[owner].to_vec(), value.into());
                    self.is_odd = true;
                    self.locks.changed(at());
                }
            }
            Op::WriteHold { owner, permits } => self.write_hold(owner, permits),
            Op::Delay { ms } if self.twin.queue.is_empty() => {
                self.locks.start_grant_delay(now, ms);
                self.twin.delay_end = now.mono_ms + ms;
            }
            _ => {}
        }
        Ok(())
    }

    /// Writes a hold that ends with the key, for an owner without one.
    fn write_hold(&mut self, owner: usize, permits: i64) {
        let Space { hash, ends_at, .. } = &mut self.space;
        if self.twin.holds.contains_key(&owner) {
            return;
        }
        if let (Some(hash), Some(end)) = (hash, *ends_at) {
            let token = 9;
            hash.insert(
                OWNERS[owner].to_vec(),
                format!("{permits}:{end}:t{token}").into_bytes(),
            );
            let hold = super::twin::Hold {
                permits,
                end,
                token,
                of_session: false,
                asks_if_wanted: false,
            };
            self.twin.holds.insert(owner, hold);
            self.locks.changed(at());
            self.twin.settle(self.now);
        }
    }

    fn token(&self, owner: usize, named: Named) -> Option<i64> {
        let present = self.twin.holds.get(&owner).map_or(7, |hold| hold.token);
        match named {
            Named::No => None,
            Named::Present => Some(present),
            Named::Stale => Some(present - 1),
        }
    }

    fn pass(&mut self, ms: i64) {
        self.now = self.now.after(ms);
        if self
            .space
            .ends_at
            .is_some_and(|end| end < self.now.wall_ms())
        {
            (self.space.hash, self.space.ends_at) = (None, None);
        }
        self.twin.passed(self.now);
    }

    fn disconnect(&mut self, client: usize) {
        let count = self.blocked.len() + self.under_way.len();
        let which = client.checked_rem(count).unwrap_or(0);
        if let Some((&client, &id)) = self.blocked.iter().nth(which) {
            self.blocked.remove(&client);
            assert!(self.locks.asked_by(id).is_some(), "it waits for permits");
            assert!(self.locks.waiter_gone(id).is_some(), "it waits");
            self.twin.depart(client, self.now);
        } else if count > 0 {
            let place = which - self.blocked.len();
            let (lock, owner, grant) = self.under_way.remove(place);
            self.locks.end_grant_later(&lock, &owner, &grant);
            self.twin
                .take_back(index_of(&owner), grant.token.get(), self.now);
        }
    }

    fn fetch(&mut self) -> Result<(), String> {
        let request = Events {
            session: SESSION.into(),
            epoch: None,
            after: None,
            block: None,
            grace_ms: 0,
        };
        let limits = SessionLimits {
            sessions: 10,
            events_per_session: 1000,
            out_of_memory: false,
        };
        let mut effects = Vec::new();
        let attached = self
            .locks
            .attach(&request, self.connection, limits, self.now, &mut effects);
        let session = attached.map_err(|refusal| refusal.to_string())?.session;
        self.session = Some(session);
        self.twin.is_attached = true;
        self.hear_events(session);
        let is_events = |to: &To| matches!(to, To::Session(_));
        let mut heard = take_those(&mut self.told, is_events);
        let mut should = take_those(&mut self.twin.told, is_events);
        heard.sort();
        should.sort();
        if heard == should {
            Ok(())
        } else {
            Err(format!("events {heard:?}\n  should {should:?}"))
        }
    }

    fn hear_events(&mut self, session: SessionId) {
        let told = self.locks.take_events(session, self.now).unwrap();
        for event in told.events {
            assert_eq!(event.mode, Mode::Permits, "{event:?}");
            let heard = match &event.kind {
                EventKind::Granted => Heard::Granted {
                    token: event.token.unwrap().get(),
                },
                EventKind::Left => Heard::Refused("left".into()),
                EventKind::Lost(LostReason::Released) => Heard::Lost("released"),
                EventKind::Lost(LostReason::Taken) => Heard::Lost("taken"),
                EventKind::Timeout { ttl_ms } => Heard::NotAcquired { ttl_ms: *ttl_ms },
                EventKind::Lost(LostReason::Expired) => Heard::Lost("expired"),
                EventKind::Lost(LostReason::Broken) => Heard::Lost("broken"),
                EventKind::Lost(LostReason::Deleted) => Heard::Lost("deleted"),
                EventKind::Error(refusal) => Heard::Refused(refusal.to_string()),
                EventKind::Wanted { waiters } => Heard::Wanted(usize::try_from(*waiters).unwrap()),
            };
            self.told.push((To::Session(index_of(&event.owner)), heard));
        }
    }

    // --- Turns -----------------------------------------------------------------------------------

    fn acquire(&mut self, of: &Request) -> Result<Reply, String> {
        let wait = of.wait_ms.map(|ms| Wait::from_ms(ms).unwrap());
        let request = Acquire {
            key: NAME,
            owner: OWNERS[of.owner],
            lease: lease(of.lease_ms),
            mode: Mode::Permits,
            asked: Some(PermitsRequest {
                permits: Permits::new(of.permits).unwrap(),
                limit: of.of.map(|limit| Permits::new(limit).unwrap()),
            }),
            wait_mode: match wait {
                None => WaitMode::None,
                Some(wait) if of.is_blocked => WaitMode::Block(wait),
                Some(wait) => WaitMode::Queue(wait),
            },
            session: of.of_session.then_some(SESSION.into()),
            wanted: of.of_session && self.twin.asks_if_wanted,
            once: of.once,
        };
        let command = Command::Acquire(&request);
        let mut turn = Turn::of(command, 0, u32::try_from(WAITERS_MAX).unwrap());
        self.drive(&mut turn, Some(command))?;
        Ok(match turn.outcome() {
            Ok(Outcome::Held { count, token }) => Reply::Held {
                permits: count,
                token: token.get(),
            },
            Ok(Outcome::NotHeld { ttl_ms }) => Reply::NotHeld { ttl_ms },
            Ok(Outcome::MustWait { .. }) => {
                let client = of.is_blocked.then_some(BlockedClient {
                    handle: of.client,
                    client_id: 0,
                });
                let mut effects = Vec::new();
                let joined = self
                    .locks
                    .enqueue(&mut turn, client, self.now, &mut effects);
                self.carry_out(request.owner, &effects)?;
                let joined = joined.ok_or("no room for a waiter")?;
                if of.is_blocked {
                    self.blocked.insert(of.client, joined.waiter);
                    Reply::Waits
                } else {
                    Reply::Queued
                }
            }
            Ok(other) => return Err(format!("an answer of another command: {other:?}")),
            Err(refusal) => Reply::Refused(refusal.to_string()),
        })
    }

    fn decide(&mut self, command: Command<'_>) -> Result<Reply, String> {
        let mut turn = Turn::of(command, 0, u32::try_from(WAITERS_MAX).unwrap());
        self.drive(&mut turn, Some(command))?;
        Ok(match turn.outcome() {
            Ok(Outcome::Left(left)) => left.map_or(Reply::Null, Reply::Number),
            Ok(Outcome::Number(number)) => Reply::Number(number),
            Ok(other) => return Err(format!("an answer of another command: {other:?}")),
            Err(refusal) => Reply::Refused(refusal.to_string()),
        })
    }

    fn drive(&mut self, turn: &mut Turn<'_>, command: Option<Command<'_>>) -> Result<(), String> {
        for _ in 0..1000 {
            let Some(task) = self.locks.next_task(turn, self.now) else {
                return Ok(());
            };
            let owner = match (&task.subject, command) {
                (Subject::Command, Some(command)) => command.owner().to_vec(),
                (Subject::One(_, owner), _) => owner.to_vec(),
                (subject, _) => return Err(format!("{subject:?}, and nobody asks for it")),
            };
            let (stored, others) = self.read(&owner, &task);
            let (holders, gone) = self.holders();
            let read = match (task.purpose, command) {
                (Purpose::Sweep, _) => Read::Gone {
                    readers: &gone,
                    more: false,
                },
                (Purpose::Command, Some(Command::Break(_))) => Read::Holds(stored, &holders, None),
                (Purpose::LongWait, _) => Read::Holder(None),
                (Purpose::Holders, _) => return Err("permits are not looked at".into()),
                (Purpose::Reconcile(Mode::Permits), _) => match &stored {
                    Stored::Permits(hash) => Read::Permits(hash, &others),
                    stored => Read::One(stored),
                },
                _ => Read::One(&stored),
            };
            let mut effects = Vec::new();
            self.locks
                .decide(turn, task.found(read), self.now, &mut effects);
            let is_refused =
                task.purpose == Purpose::Command && matches!(turn.decided(), Some(Err(_)));
            if is_refused && !effects.is_empty() {
                return Err(format!("refused, and yet {effects:?}"));
            }
            self.carry_out(&owner, &effects)?;
        }
        Err("there is always something more to decide".into())
    }

    /// As the module reads.
    fn read(&self, owner: &[u8], task: &Task) -> (Stored, PermitsHolders) {
        let is_about_permits = task.is_about_permits();
        let limit = self.space.limit.as_deref().filter(|_| is_about_permits);
        let mut reading = PermitsReading::new(owner, task.asked, limit, self.now);
        let Some(hash) = &self.space.hash else {
            let stored = if is_about_permits {
                reading.found(None).stored(true)
            } else {
                Stored::Free
            };
            return (stored, PermitsHolders::default());
        };
        if task.is_about_queue_for_permits() {
            reading = reading.for_queue();
        }
        let own = hash.get_key_value(owner);
        let (own, others): (Vec<_>, Vec<_>) = hash
            .iter()
            .partition(|(field, _)| own.is_some_and(|(own, _)| own == *field));
        for (field, value) in own {
            reading.field(field, value);
        }
        if reading.needs_others(task.depth, self.space.ends_at) || self.looks_at_all {
            for (field, value) in others {
                reading.field(field, value);
            }
        } else if task.depth != ReadDepth::Own {
            others
                .into_iter()
                .any(|(_, value)| reading.other_in_brief(value));
        }
        let (hash, others) = reading.found_with_others(self.space.ends_at);
        (hash.stored(is_about_permits), others)
    }

    /// The holders, and the fields of holders whose leases are over.
    fn holders(&self) -> (Counts, Fields) {
        let (mut holders, mut gone) = (Vec::new(), Vec::new());
        for (field, value) in self.space.hash.iter().flatten() {
            match rlock_core::PermitsHold::from_field(value) {
                Some(hold) if hold.is_over(self.now) => gone.push(field.clone().into()),
                Some(_) => holders.push((field.clone().into(), rlock_core::Count::Valid(1))),
                None => {}
            }
        }
        (holders, gone)
    }

    fn come_to_rest(&mut self) -> Result<(), String> {
        for _ in 0..1000 {
            if self.locks.next_deadline(self.now) != Some(0) {
                return Ok(());
            }
            self.drive(&mut Turn::of_deadlines(), None)?;
            let mut effects = Vec::new();
            self.locks.passed(self.now, &mut effects);
            self.carry_out(b"", &effects)?;
            self.drive(&mut Turn::of_timer(), None)?;
        }
        Err("there is always something more to do".into())
    }

    // --- Effects and comparison ------------------------------------------------------------------

    fn carry_out(&mut self, caller: &[u8], effects: &[Effect]) -> Result<(), String> {
        for effect in effects {
            match effect {
                Effect::Write { write, .. } => self.write(caller, write)?,
                Effect::Grant {
                    client,
                    lock,
                    owner,
                    count,
                    grant,
                } => {
                    let hold = self.space.hash.as_ref().and_then(|hash| hash.get(&**owner));
                    let text = format!("{count}:");
                    let is_written = hold.is_some_and(|hold| hold.starts_with(text.as_bytes()));
                    if !is_written {
                        return Err(format!("told before it is written: {effect:?}"));
                    }
                    let token = grant.token.get();
                    self.hears(*client, Heard::Granted { token })?;
                    self.under_way
                        .push((lock.clone(), Rc::clone(owner), grant.clone()));
                }
                Effect::Leave { client, why } => {
                    let heard = match why {
                        WaitOutcome::NotAcquired { ttl_ms } => {
                            Heard::NotAcquired { ttl_ms: *ttl_ms }
                        }
                        WaitOutcome::Refused(refusal) => Heard::Refused(refusal.to_string()),
                    };
                    self.hears(*client, heard)?;
                }
                Effect::Log(_) => {}
                Effect::Publish { .. } => return Err("nothing is published of permits".into()),
                other => return Err(format!("{other:?}")),
            }
        }
        Ok(())
    }

    fn write(&mut self, caller: &[u8], write: &Write) -> Result<(), String> {
        assert_eq!(names::limit_key(NAME), LIMIT_KEY);
        let Space {
            hash,
            ends_at,
            limit,
        } = &mut self.space;
        match write {
            Write::SetPermits(holder, hold, is_first) => {
                let fields = hash.get_or_insert_default();
                if *is_first {
                    fields.insert(b"mode".to_vec(), PERMITS_MODE.to_vec());
                }
                let value = hold.text().bytes().to_vec();
                fields.insert(holder.name(caller).to_vec(), value);
                if fields.get(&b"mode"[..]).map(Vec::as_slice) != Some(PERMITS_MODE) {
                    return Err("a hold in a hash that is not of permits".into());
                }
            }
            Write::Remove(field) => {
                let removed = hash.as_mut().and_then(|of| of.remove(&*field.name(caller)));
                removed.ok_or("an owner leaves a hash in which it is not")?;
            }
            Write::ExpireAt(end) if hash.is_some() => *ends_at = Some(*end),
            Write::Delete if hash.is_some() => (*hash, *ends_at) = (None, None),
            Write::SetLimit(value) => *limit = Some(value.text().bytes().to_vec()),
            Write::DeleteLimit => *limit = None,
            other => return Err(format!("{other:?} of what is not there")),
        }
        Ok(())
    }

    fn hears(&mut self, client: usize, heard: Heard) -> Result<(), String> {
        self.told.push((To::Client(client), heard));
        let is_first = self.blocked.remove(&client).is_some();
        is_first
            .then_some(())
            .ok_or_else(|| format!("{client} hears something twice"))
    }

    fn compare(&mut self) -> Result<(), String> {
        let is_client = |to: &To| matches!(to, To::Client(_));
        let heard = in_any_order(take_those(&mut self.told, is_client));
        let should = in_any_order(take_those(&mut self.twin.told, is_client));
        if heard != should {
            return Err(format!("heard {heard:?}\n  should {should:?}"));
        }
        let live = self.live_fields();
        let should: BTreeMap<Vec<u8>, Vec<u8>> = self
            .twin
            .holds
            .iter()
            .map(|(owner, of)| {
                let text = format!("{}:{}:t{}", of.permits, of.end, of.token);
                (OWNERS[*owner].to_vec(), text.into_bytes())
            })
            .collect();
        if live != should {
            return Err(format!("stored {live:?}\n  should {should:?}"));
        }
        let last = self.twin.holds.values().map(|hold| hold.end).max();
        let is_there = self.space.hash.is_some();
        if is_there && last.is_some() && self.space.ends_at != last {
            let ends_at = self.space.ends_at;
            return Err(format!("the key ends {ends_at:?}, its last hold {last:?}"));
        }
        if is_there && last.is_none() && !self.is_odd {
            return Err("nobody holds any, and the key is there".into());
        }
        let limit = self.space.limit.as_deref().and_then(Permits::from_limit);
        if limit.map(Permits::get) != self.twin.limit {
            return Err(format!("the limit is {limit:?}"));
        }
        let queue = self.locks.queue(at(), self.now);
        let queue = queue.iter().map(|of| (index_of(&of.owner), of.permits));
        let should = self.twin.queue.iter();
        if !queue.eq(should.map(|of| (of.owner, Some(of.permits)))) {
            return Err(format!("the queue should be {:?}", self.twin.queue));
        }
        self.is_never_too_many()
    }

    fn live_fields(&self) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let fields = self.space.hash.iter().flatten();
        let live = fields.filter(|(_, value)| {
            let hold = rlock_core::PermitsHold::from_field(value);
            hold.is_some_and(|hold| !hold.is_over(self.now))
        });
        live.map(|(field, value)| (field.clone(), value.clone()))
            .collect()
    }

    /// The core counts the twin's waiters and session holds, and no pending release.
    fn is_never_too_many(&self) -> Result<(), String> {
        let gauges = self.locks.gauges();
        let of_session = self.twin.holds.values().filter(|hold| hold.of_session);
        let should = (self.twin.queue.len(), of_session.count(), 0);
        let is = (
            gauges.waiters,
            gauges.session_holds,
            gauges.pending_releases,
        );
        if is == should {
            Ok(())
        } else {
            Err(format!("on record {gauges:?}, should be {should:?}"))
        }
    }
}

fn take_those(told: &mut Told, is_it: impl Fn(&To) -> bool) -> Told {
    let (taken, left) = std::mem::take(told)
        .into_iter()
        .partition(|of| is_it(&of.0));
    *told = left;
    taken
}

/// Grants in their order; waiters that leave with nothing, in any.
fn in_any_order(told: Told) -> (Told, Told) {
    let is_grant = |of: &(To, Heard)| matches!(of.1, Heard::Granted { .. });
    let (grants, mut others): (Vec<_>, Vec<_>) = told.into_iter().partition(is_grant);
    others.sort();
    (grants, others)
}
