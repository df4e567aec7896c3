//! The driver's part for several locks at once.

use super::{LOCKS, OWNERS, Op, SESSIONS, WAITERS_MAX, World, is_deadlock, number, place};
use crate::keyspace::Place;
use crate::life::Name;
use crate::twin::{PermitsRequest, Reply, Twin, Waits};
use rlock_core::request::{MultiAcquire, MultiRelease, MultiRenew};
use rlock_core::{Command, Mode, Now};

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
                let asked = PermitsRequest {
                    owner: OWNERS[*owner],
                    mode: Mode::Plain,
                    lease_ms: *lease_ms,
                    waits,
                    session: *session,
                    wanted: self.twin.asks_if_wanted(*session),
                    once: *once,
                    seat: self.seats,
                    waiters_max: usize::try_from(WAITERS_MAX).unwrap(),
                };
                self.acquire_several(locks, &places, asked)
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

    fn acquire_several(
        &mut self,
        locks: &[usize],
        places: &[Place],
        asked: PermitsRequest<'_>,
    ) -> Result<(Reply, Reply), String> {
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
        args.extend(asked.wanted.then(|| b"wanted".to_vec()));
        args.extend(asked.once.then(|| b"ONCE".to_vec()));
        let mut request = MultiAcquire::parse(args.iter().map(Vec::as_slice))
            .map_err(|refusal| format!("{args:?}: {refusal}"))?;
        request.session = asked.session.map(|name| self.session(name));
        let (command, db) = (Command::MultiAcquire(&request), places[0].0);
        let mut turn = self.timer.turn_of(command, db);
        let of_twin = self.drive(&mut turn, Some((command, db)), |world, decided| {
            if let Some(given_up) = world.given_up(decided) {
                return given_up;
            }
            world.twin.is_found = is_deadlock(decided);
            world.twin.acquire_several(places, asked, world.clock.now)
        })?;
        self.answer(&mut turn, places, true, asked, of_twin)
    }

    fn release_several(&mut self, locks: &[usize], owner: &[u8]) -> Result<(Reply, Reply), String> {
        let args: Vec<_> = [owner.to_vec()].into_iter().chain(named(locks)).collect();
        let mut request = MultiRelease::parse(args.iter().map(Vec::as_slice))
            .map_err(|refusal| format!("{args:?}: {refusal}"))?;
        let by = self.by();
        request.by = by;
        let places = distinct(locks);
        let are_full = places
            .iter()
            .map(|place| self.twin.is_full((place, owner, Mode::Plain)));
        let are_full: Vec<_> = are_full.collect();
        let replies =
            self.decide_several(Command::MultiRelease(&request), places[0].0, |twin, now| {
                twin.release_several(&places, owner, by, now)
            })?;
        for (place, was_full) in places.iter().zip(are_full) {
            self.may_make_room(place, was_full);
        }
        Ok(replies)
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
        self.decide_several(Command::MultiRenew(&request), places[0].0, |twin, now| {
            twin.renew_several(&places, owner, lease_ms, session, now)
        })
    }

    fn decide_several(
        &mut self,
        command: Command<'_>,
        db: i32,
        twin: impl FnOnce(&mut Twin, Now) -> Reply,
    ) -> Result<(Reply, Reply), String> {
        let mut turn = self.timer.turn_of(command, db);
        let of_twin = self.drive(&mut turn, Some((command, db)), |world, _| {
            twin(&mut world.twin, world.clock.now)
        })?;
        Ok((number(turn.outcome())?, of_twin))
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
