//! A driver that does with the core what the module does in a server, step by step, with the twin
//! beside it and every invariant looked at after each step.

use crate::invariants::{self, Ledger};
use crate::keyspace::{Entry, Fields, Keyspace, Place, Value};
use crate::twin::{Asked, Heard, Reply, Twin};
use rlock_core::request::{Acquire, Cancel, Release, Renew};
use rlock_core::{
    Acquired, Counters, Dismissal, Effect, Lease, LockRef, Locks, Now, Refusal, Seat,
};
use rlock_core::{Token, Wait, WaiterId};
use std::collections::{BTreeMap, BTreeSet};

/// The locks that histories are about: two in one database, and one of the same name in another.
pub(crate) const LOCKS: [(i32, &[u8]); 3] = [(0, b"a"), (0, b""), (1, b"a")];
/// Those who want them: any bytes.
pub(crate) const OWNERS: [&[u8]; 3] = [b"A", b"B", b"\xff\0"];
/// How many may wait for one lock.
pub(crate) const WAITERS_MAX: u32 = 4;

/// One thing that happens. Its `Debug` form is the code that makes it happen again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Acquire {
        lock: usize,
        owner: usize,
        lease_ms: i64,
        block_ms: Option<i64>,
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
    WriteMode,
    /// An owner's field is deleted.
    Remove {
        owner: usize,
    },
    Expire {
        ms: i64,
    },
    Persist,
}

#[derive(Debug, Default)]
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
    published: u64,
    seats: usize,
    in_multi: bool,
    /// Locks that changed without an event, and were not looked at since.
    unseen: BTreeSet<Place>,
}

#[derive(Debug)]
struct UnderWay {
    place: Place,
    owner: Vec<u8>,
    token: Token,
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
        if of_core != of_twin {
            return Err(format!("{op:?}: core {of_core:?}, twin {of_twin:?}"));
        }
        if !self.in_multi {
            self.come_to_rest()?;
            let Clock { now, set_back_ms } = self.clock;
            invariants::is_at_rest(&self.locks, &self.twin, &self.unseen, set_back_ms, now)?;
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

    /// Whose grants are under way, and whether they would be taken back for good.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (&[u8], bool)> {
        self.under_way.iter().map(|grant| {
            let present = self.twin.token(&grant.place) == Some(grant.token.get());
            (grant.owner.as_slice(), present)
        })
    }

    fn happen(&mut self, op: &Op) -> Result<(Reply, Reply), String> {
        match *op {
            Op::Acquire {
                lock,
                owner,
                lease_ms,
                block_ms,
                once,
            } => {
                let block_ms = block_ms.filter(|_| !self.in_multi);
                let asked = Asked {
                    owner: OWNERS[owner],
                    lease_ms,
                    block_ms,
                    once,
                    seat: self.seats,
                    waiters_max: usize::try_from(WAITERS_MAX).unwrap(),
                };
                let of_core = self.acquire(&place(lock), asked)?;
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
            } => self.renew(&place(lock), OWNERS[owner], lease_ms, token),
            Op::Cancel { lock, owner } => self.cancel(&place(lock), OWNERS[owner]),
            Op::Break { lock } => self.break_hold(&place(lock)),
            Op::StartTokens { guard_ms } => {
                self.locks.start_tokens(self.clock.now, guard_ms);
                self.twin.start_tokens(guard_ms, self.clock.now);
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
            Op::Pass { ms } if !self.in_multi => self.pass(ms),
            Op::PassDeadline { more_ms } if !self.in_multi => {
                let deadline = self.locks.next_deadline(self.clock.now);
                self.pass(deadline.unwrap_or(0) + more_ms);
            }
            Op::StepClock { ms } if !self.in_multi => {
                self.clock.now.wall_us += ms * 1000;
                self.clock.set_back_ms = (self.clock.set_back_ms - ms).max(0);
                self.expire();
            }
            Op::Disconnect { client } if !self.in_multi => self.disconnect(client)?,
            Op::Deliver if !self.in_multi => self.under_way.clear(),
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
            block: asked.block_ms.map(|ms| Wait::from_ms(ms).unwrap()),
            once: asked.once,
        };
        let (now, stored) = (self.clock.now, self.space.read(place, asked.owner));
        let mut effects = Vec::new();
        let acquired = self.locks.acquire(
            lock_ref(place),
            stored,
            &request,
            WAITERS_MAX,
            now,
            &mut effects,
        );
        if acquired.is_err() && !effects.is_empty() {
            return Err(format!("refused, and yet {effects:?}"));
        }
        self.carry_out(place, asked.owner, &effects)?;
        let ends_at = match acquired {
            Err(refusal) => return Ok(Reply::Refused(refusal.to_string())),
            Ok(Acquired::Held { count, token }) => {
                let token = token.get();
                return Ok(Reply::Held { count, token });
            }
            Ok(Acquired::NotHeld { ttl_ms }) => return Ok(Reply::NotHeld { ttl_ms }),
            Ok(Acquired::MustWait { ends_at, .. }) => ends_at,
        };
        let seat = seat_of(asked.seat);
        self.seats += 1;
        self.ledger.sits_down(place, seat, asked.owner, asked.once);
        let mut effects = Vec::new();
        let id = self
            .locks
            .join(lock_ref(place), &request, seat, ends_at, now, &mut effects)
            .ok_or("no room for a waiter")?;
        // A waiter that changes its seat, and dismisses the old one, keeps its name.
        if effects.is_empty() && self.ever_waited.contains(&id) {
            return Err(format!("{id:?} was somebody else's name before"));
        }
        self.carry_out(place, asked.owner, &effects)?;
        self.waiting.insert(seat.handle, id);
        self.ever_waited.push(id);
        Ok(Reply::Waits)
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
            token: token.and_then(Token::new),
            lease: lease_ms.map(|ms| Lease::from_ms(ms).unwrap()),
        };
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
    ) -> Result<(Reply, Reply), String> {
        let token = self.token(place, token);
        let request = Renew {
            key: &place.1,
            owner,
            lease: Lease::from_ms(lease_ms).unwrap(),
            token: token.and_then(Token::new),
        };
        let (now, stored) = (self.clock.now, self.space.read(place, owner));
        let mut effects = Vec::new();
        let held = self
            .locks
            .renew(lock_ref(place), stored, &request, now, &mut effects);
        let of_core = answer(held.map(|held| Reply::Number(i64::from(held))), &effects)?;
        self.carry_out(place, owner, &effects)?;
        let of_twin = self.twin.renew(place, owner, lease_ms, token, now);
        Ok((of_core, of_twin))
    }

    fn cancel(&mut self, place: &Place, owner: &[u8]) -> Result<(Reply, Reply), String> {
        let request = Cancel {
            key: &place.1,
            owner,
        };
        let (now, stored) = (self.clock.now, self.space.read(place, owner));
        let mut effects = Vec::new();
        let left = self
            .locks
            .cancel(lock_ref(place), stored, &request, now, &mut effects);
        self.carry_out(place, owner, &effects)?;
        Ok((Reply::Number(left), self.twin.cancel(place, owner, now)))
    }

    fn break_hold(&mut self, place: &Place) -> Result<(Reply, Reply), String> {
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
        let clients = self.waiting.len() + self.under_way.len();
        let client = client.checked_rem(clients).unwrap_or(0);
        if let Some((&seat, &id)) = self.waiting.iter().nth(client) {
            let place = self.place_of(seat);
            let left = self
                .locks
                .depart(id)
                .map(|lock| (lock.db, lock.name.to_vec()));
            if left.as_ref() != Some(&place) || self.locks.depart(id).is_some() {
                return Err(format!(
                    "seat {seat} departs from {left:?}, not once from {place:?}"
                ));
            }
            self.ledger.leaves(&place, seat_of(seat))?;
            self.waiting.remove(&seat);
            self.twin.depart(seat);
        } else if clients > 0 {
            let grant = self.under_way.remove(client - self.waiting.len());
            let (now, place) = (self.clock.now, grant.place);
            let stored = self.space.read(&place, &grant.owner);
            let mut effects = Vec::new();
            self.locks.take_back(
                lock_ref(&place),
                stored,
                &grant.owner,
                grant.token,
                now,
                &mut effects,
            );
            self.carry_out(&place, &grant.owner, &effects)?;
            let token = grant.token.get();
            self.twin.take_back(&place, &grant.owner, token, now);
        }
        Ok(())
    }

    fn foreign(&mut self, place: &Place, change: Change, told: bool) {
        change_key(&mut self.space, place, change, self.clock.now);
        change_key(&mut self.twin.space, place, change, self.clock.now);
        if told {
            self.locks.touched(lock_ref(place));
        } else {
            self.unseen.insert(place.clone());
        }
        self.expire();
    }

    /// The timer, if it is due, and then whatever is marked.
    fn come_to_rest(&mut self) -> Result<(), String> {
        let now = self.clock.now;
        if self.locks.next_deadline(now) == Some(0) {
            self.locks.passed(now);
            while let Some((lock, seat)) = self.locks.next_timeout(now) {
                let place = (lock.db, lock.name.to_vec());
                self.ledger.leaves(&place, seat)?;
                self.waiting
                    .remove(&seat.handle)
                    .ok_or("somebody who does not wait was timed out")?;
                self.twin.time_out(seat.handle, now)?;
            }
        }
        for _ in 0..100 {
            let Some((lock, first)) = self.locks.next_to_settle() else {
                return Ok(());
            };
            let place = (lock.db, lock.name.to_vec());
            let stored = self.space.read(&place, &first);
            let mut effects = Vec::new();
            self.locks.settle(lock.as_ref(), stored, now, &mut effects);
            self.carry_out(&place, b"", &effects)?;
            self.twin.settle(&place, now);
            self.unseen.remove(&place);
        }
        Err("there is always something more to settle".into())
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
            } => self.ledger.is_minted(*token),
            Effect::Publish => {
                self.published += 1;
                Ok(())
            }
            Effect::Grant {
                seat,
                owner,
                count,
                token,
            } => {
                self.waiting.remove(&seat.handle);
                self.under_way.push(UnderWay {
                    place: place.clone(),
                    owner: owner.to_vec(),
                    token: *token,
                });
                let (count, token) = (*count, *token);
                let granted = Heard::Granted {
                    count,
                    token: token.get(),
                };
                self.heard.push((seat.handle, granted));
                self.ledger
                    .is_granted(place, *seat, (count, token), &self.space)
            }
            Effect::Dismiss { seat, why } => {
                self.waiting.remove(&seat.handle);
                let heard = match why {
                    Dismissal::NotAcquired { ttl_ms } => Heard::NotAcquired { ttl_ms: *ttl_ms },
                    Dismissal::Refused(refusal) => {
                        self.ledger.is_refused();
                        Heard::Refused(refusal.to_string())
                    }
                };
                self.heard.push((seat.handle, heard));
                self.ledger.leaves(place, *seat)
            }
            _ => Ok(()),
        }
    }

    fn compare(&mut self) -> Result<(), String> {
        let (heard, should) = (
            std::mem::take(&mut self.heard),
            std::mem::take(&mut self.twin.heard),
        );
        if heard != should {
            return Err(format!("heard {heard:?}\n  should {should:?}"));
        }
        if self.space != self.twin.space {
            let (space, twin) = (&self.space, &self.twin.space);
            return Err(format!("stored {space:?}\n  should {twin:?}"));
        }
        if self.published != self.twin.published {
            let (sent, should) = (self.published, self.twin.published);
            return Err(format!("{sent} unlock messages, should be {should}"));
        }
        invariants::views_are_true(&self.locks, &self.twin, self.clock.now)?;
        invariants::counters_add_up(&self.locks, &self.twin, &self.ledger)
    }

    fn place_of(&self, seat: usize) -> Place {
        let waits = |line: &[crate::twin::TwinWaiter]| line.iter().any(|w| w.seat == seat);
        let found = self.twin.lines.iter().find(|(_, line)| waits(line));
        found.map(|(place, _)| place.clone()).unwrap_or_default()
    }
}

pub(crate) fn place(lock: usize) -> Place {
    let (db, name) = LOCKS[lock];
    (db, name.to_vec())
}

fn seat_of(handle: usize) -> Seat {
    let client_id = u64::try_from(handle).unwrap();
    Seat { handle, client_id }
}

fn lock_ref(place: &Place) -> LockRef<'_> {
    LockRef {
        db: place.0,
        name: &place.1,
    }
}

/// An answer; a refusal must have changed nothing.
fn answer(reply: Result<Reply, Refusal>, effects: &[Effect]) -> Result<Reply, String> {
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
