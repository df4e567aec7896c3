//! What the driver does for several locks at once, and for what a step leaves to be decided within
//! it.

use super::{LOCKS, OWNERS, Op, SESSIONS, WAITERS_MAX, World, lock_ref, place, place_of};
use crate::keyspace::Place;
use crate::life::Name;
use crate::twin::{Asked, Reply, Waits};
use rlock_core::request::{MultiAcquire, MultiRelease, MultiRenew};
use rlock_core::{
    AcquiredSeveral, BlockedClient, CommandError, Due, LockKey, LockRef, MultiId, Stored,
};

impl World {
    pub(super) fn happen_to_several(&mut self, op: &Op) -> Result<(Reply, Reply), String> {
        match op {
            Op::MultiAcquire {
                locks,
                owner,
                lease_ms,
                waits,
                session,
                once,
            } => {
                let waits = match *waits {
                    Waits::Block(_) if self.in_multi => Waits::No,
                    waits => waits,
                };
                let places = distinct(locks);
                let asked = Asked {
                    owner: OWNERS[*owner],
                    lease_ms: *lease_ms,
                    waits: self.with_an_end_of_its_own(&places, OWNERS[*owner], waits),
                    session: *session,
                    once: *once,
                    seat: self.seats,
                    waiters_max: usize::try_from(WAITERS_MAX).unwrap(),
                };
                let of_core = self.acquire_several(locks, asked)?;
                self.twin.is_found = of_core == Reply::Deadlock;
                let now = self.clock.now;
                Ok((of_core, self.twin.acquire_several(&places, asked, now)))
            }
            Op::MultiRelease { locks, owner } => self.release_several(locks, OWNERS[*owner]),
            Op::MultiRenew {
                locks,
                owner,
                lease_ms,
                session,
            } => self.renew_several(locks, OWNERS[*owner], *lease_ms, *session),
            _ => Err(format!("{op:?} is not about several locks")),
        }
    }

    /// Of waits of one owner for the same locks that end together, nobody could say which was timed
    /// out.
    fn with_an_end_of_its_own(&self, places: &[Place], owner: &[u8], waits: Waits) -> Waits {
        let (Waits::Block(ms) | Waits::Queue(ms)) = waits else {
            return waits;
        };
        let ends_then = |ms: i64| {
            let end = self.clock.now.mono_ms + ms;
            let mut line = self.twin.line(&places[0]).iter();
            line.any(|of| of.owner == owner && of.together.is_some() && of.wait_end == Some(end))
        };
        let mut later = ms..ms + 1000;
        let ms = later.find(|ms| *ms == 0 || !ends_then(*ms)).unwrap_or(ms);
        match waits {
            Waits::Block(_) => Waits::Block(ms),
            _ => Waits::Queue(ms),
        }
    }

    fn acquire_several(&mut self, locks: &[usize], asked: Asked<'_>) -> Result<Reply, String> {
        let mut args = vec![asked.owner.to_vec(), digits(asked.lease_ms)];
        args.extend(named(locks));
        match asked.waits {
            Waits::No => {}
            Waits::Block(ms) => args.extend([b"block".to_vec(), digits(ms)]),
            Waits::Queue(ms) => args.extend([b"QUEUE".to_vec(), digits(ms)]),
        }
        let session = asked.session.map(|name| SESSIONS[name].to_vec());
        args.extend(
            session
                .into_iter()
                .flat_map(|name| [b"SESSION".to_vec(), name]),
        );
        args.extend(asked.once.then(|| b"ONCE".to_vec()));
        let mut request = MultiAcquire::parse(args.iter().map(Vec::as_slice))
            .map_err(|refusal| format!("{args:?}: {refusal}"))?;
        request.session = asked.session.map(|name| self.session(name));
        let places = distinct(locks);
        let at: Vec<LockRef<'_>> = places.iter().map(lock_ref).collect();

        // Those in line for what is free come before any newcomer.
        for place in &places {
            self.end_holds_first(place)?;
            let is_waited_for = self.locks.is_waited_for(lock_ref(place));
            if is_waited_for && self.space.read(place, asked.owner).is_free() {
                self.settle_first(place)?;
            }
        }
        let stored = self.read_all(&places, asked.owner);
        let now = self.clock.now;
        let acquired = self
            .locks
            .acquire_several(&at, &stored, &request, WAITERS_MAX, now);
        let mut entering = match acquired {
            Err(refusal) => return Ok(Reply::Refused(refusal.to_string())),
            Ok(AcquiredSeveral::NotHeld { ttl_ms }) => return Ok(Reply::NotHeld { ttl_ms }),
            Ok(AcquiredSeveral::MustWait { ttl_ms }) => {
                self.told_if_not_blocked(&places, asked, ttl_ms)?;
                let search = self.locks.search_deadlock_of_several(&at, &request);
                if self.is_refused_for_good(search)? {
                    return Ok(Reply::Deadlock);
                }
                return self.join_several(&places, &stored, asked, &request);
            }
            Ok(AcquiredSeveral::Enter(entering)) => entering,
        };
        self.takes_several = Some(self.ledger.highest_token());
        for (place, stored) in places.iter().zip(stored) {
            let mut effects = Vec::new();
            let entering = &mut entering;
            self.locks.enter_one_of(
                lock_ref(place),
                stored,
                &request,
                entering,
                now,
                &mut effects,
            );
            self.carry_out(place, asked.owner, &effects)?;
        }
        self.takes_several = None;
        let held = entering.held().ok_or("all is entered, and nothing held")?;
        let (count, token) = (held.0, held.1.get());
        Ok(Reply::Held { count, token })
    }

    /// What a wait is answered where it cannot be, is what it would be without one.
    fn told_if_not_blocked(
        &self,
        places: &[Place],
        asked: Asked<'_>,
        ttl_ms: i64,
    ) -> Result<(), String> {
        let should = self.twin.ttl_of_others(places, asked.owner, self.clock.now);
        if ttl_ms == should {
            Ok(())
        } else {
            Err(format!("{ttl_ms} ms are left, should {should}"))
        }
    }

    fn join_several(
        &mut self,
        places: &[Place],
        stored: &[Stored],
        asked: Asked<'_>,
        request: &MultiAcquire<'_>,
    ) -> Result<Reply, String> {
        let (now, seat) = (self.clock.now, asked.seat);
        self.seats += 1;
        self.ledger.sits_down(places, true, asked);
        let is_blocked = matches!(asked.waits, Waits::Block(_));
        let client = is_blocked.then(|| BlockedClient {
            handle: seat,
            client_id: u64::try_from(seat).unwrap(),
        });
        let at: Vec<LockRef<'_>> = places.iter().map(lock_ref).collect();
        let mut effects = Vec::new();
        let joined = self
            .locks
            .join_several(&at, stored, request, client, now, &mut effects)
            .ok_or("no room for a waiter")?;
        let moved = asked.once && self.twin.joint_of(places, asked.owner).is_some();
        if moved != self.ever_waited.contains(&joined.waiter) {
            return Err(format!("{:?} moved: {moved}", joined.waiter));
        }
        self.carry_out(&Place::default(), asked.owner, &effects)?;
        if !moved {
            for place in places {
                self.unseen.remove(place);
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

    fn release_several(&mut self, locks: &[usize], owner: &[u8]) -> Result<(Reply, Reply), String> {
        let args: Vec<_> = [owner.to_vec()].into_iter().chain(named(locks)).collect();
        let request = MultiRelease::parse(args.iter().map(Vec::as_slice))
            .map_err(|refusal| format!("{args:?}: {refusal}"))?;
        let places = distinct(locks);
        let at: Vec<LockRef<'_>> = places.iter().map(lock_ref).collect();
        for place in &places {
            self.end_holds_first(place)?;
        }
        let (now, stored) = (self.clock.now, self.read_all(&places, owner));
        let mut released = 0;
        let checked = self.locks.check_releasable(&at, &stored);
        if checked.is_ok() {
            for (place, stored) in places.iter().zip(stored) {
                let (at, mut effects) = (lock_ref(place), Vec::new());
                let one = self
                    .locks
                    .release_one_of(at, stored, request.owner, now, &mut effects);
                self.carry_out(place, owner, &effects)?;
                released += i64::from(one);
            }
        }
        let of_core = told(checked.map(|()| released));
        Ok((of_core, self.twin.release_several(&places, owner)))
    }

    fn renew_several(
        &mut self,
        locks: &[usize],
        owner: &[u8],
        lease_ms: i64,
        session: Option<Name>,
    ) -> Result<(Reply, Reply), String> {
        let mut args = vec![owner.to_vec(), digits(lease_ms)];
        args.extend(named(locks));
        let name = session.map(|name| SESSIONS[name].to_vec());
        args.extend(
            name.into_iter()
                .flat_map(|name| [b"session".to_vec(), name]),
        );
        let mut request = MultiRenew::parse(args.iter().map(Vec::as_slice))
            .map_err(|refusal| format!("{args:?}: {refusal}"))?;
        request.session = session.map(|name| self.session(name));
        let places = distinct(locks);
        let at: Vec<LockRef<'_>> = places.iter().map(lock_ref).collect();
        for place in &places {
            self.end_holds_first(place)?;
        }
        let (now, stored) = (self.clock.now, self.read_all(&places, owner));
        let mut renewed = self.locks.check_renewable(&at, &stored).map(|()| 0);
        for (place, stored) in places.iter().zip(stored) {
            let Ok(number) = &mut renewed else { break };
            let mut effects = Vec::new();
            let one = self
                .locks
                .renew_one_of(lock_ref(place), stored, &request, now, &mut effects);
            self.carry_out(place, owner, &effects)?;
            match one {
                Ok(one) => *number += i64::from(one),
                Err(refusal) => renewed = Err(refusal),
            }
        }
        let twin = &mut self.twin;
        let of_twin = twin.renew_several(&places, owner, lease_ms, session, now);
        Ok((told(renewed), of_twin))
    }

    /// Whatever a step has left to be decided is decided before anybody else comes.
    pub(super) fn go_on(&mut self) -> Result<(), String> {
        let now = self.clock.now;
        for _ in 0..100 {
            match self.locks.next_due() {
                None => return self.twin.all_are_served(),
                Some(Due::Line(lock)) => {
                    let place = place_of(&lock);
                    self.end_holds_of(&place)?;
                    // Only now: what has ended may have let the first in.
                    let Some(first) = self.locks.first_owner(lock.as_ref()) else {
                        continue;
                    };
                    let stored = self.space.read(&place, &first);
                    let mut effects = Vec::new();
                    self.locks.settle(lock.as_ref(), stored, now, &mut effects);
                    self.carry_out(&place, b"", &effects)?;
                    self.twin.settle(&place, now);
                }
                Some(Due::MultiWait(id, locks, owner)) => {
                    let seat = self.seat_of(id).ok_or("nobody waits, and is due")?;
                    let places: Vec<Place> = locks.iter().map(place_of).collect();
                    for place in &places {
                        self.end_holds_of(place)?;
                    }
                    let stored = self.read_all(&places, &owner);
                    let mut effects = Vec::new();
                    let granted = self.locks.settle_joint(id, &stored, now, &mut effects);
                    self.carry_out(&Place::default(), b"", &effects)?;
                    if let Some(granted) = granted {
                        self.enter_granted(&locks, stored, &owner, granted)?;
                    }
                    self.twin.settle_joint(seat, now);
                }
            }
            self.forget_those_who_left();
        }
        Err("there is always something more to decide".into())
    }

    /// Where the wait for several sits that the core names so.
    fn seat_of(&self, id: MultiId) -> Option<usize> {
        let waiter = self.locks.waiter_of(id)?;
        let mut waiting = self.waiting.iter();
        waiting.find_map(|(seat, of)| (*of == waiter).then_some(*seat))
    }

    fn enter_granted(
        &mut self,
        locks: &[LockKey],
        stored: Vec<Stored>,
        owner: &[u8],
        mut granted: rlock_core::MultiGrant,
    ) -> Result<(), String> {
        let now = self.clock.now;
        self.takes_several = Some(self.ledger.highest_token());
        for (lock, stored) in locks.iter().zip(stored) {
            let (at, mut effects) = (lock.as_ref(), Vec::new());
            let granted = &mut granted;
            self.locks
                .enter_granted(at, stored, granted, now, &mut effects);
            self.carry_out(&place_of(lock), owner, &effects)?;
        }
        self.takes_several = None;
        let mut effects = Vec::new();
        self.locks.tell_joint_granted(granted, now, &mut effects);
        self.carry_out(&Place::default(), owner, &effects)
    }

    fn read_all(&self, places: &[Place], owner: &[u8]) -> Vec<Stored> {
        let read = |place| self.space.read(place, owner);
        places.iter().map(read).collect()
    }
}

/// The places of locks, each once.
fn distinct(locks: &[usize]) -> Vec<Place> {
    let mut places = Vec::new();
    for lock in locks {
        let place = place(*lock);
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// As arguments: how many, and each.
fn named(locks: &[usize]) -> impl Iterator<Item = Vec<u8>> {
    let number = i64::try_from(locks.len()).unwrap();
    let names = locks.iter().map(|lock| LOCKS[*lock].1.to_vec());
    [digits(number)].into_iter().chain(names)
}

fn digits(number: i64) -> Vec<u8> {
    number.to_string().into_bytes()
}

fn told(reply: Result<i64, CommandError>) -> Reply {
    reply.map_or_else(|refusal| Reply::Refused(refusal.to_string()), Reply::Number)
}
