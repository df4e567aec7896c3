//! Every order of operations, to a stated depth.
//!
//! A walk goes breadth first from an empty server through an alphabet of operations. A state that
//! was met before, as far as anybody can tell it from outside, is not entered again by the same
//! last step. (It is by another step: a difference that a step leaves inside the core would show in
//! the next steps.) The first failure is therefore a shortest one; it prints the history that
//! replays it.

use crate::keyspace::{Place, Reading, Value};
use crate::twin::TwinWaiter;
use crate::world::{LOCKS, Named, OWNERS, Op, World, place, replay, replay_to};
use rlock_core::Mode;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Holds and queues longer than this are not followed: their like was seen with shorter ones.
pub(crate) const SIZE_MAX: usize = 3;

#[derive(Default)]
pub(crate) struct Walked {
    states: usize,
    steps: usize,
    refused: u64,
    /// Whether every state was met that there is, as far as the walk was to go.
    pub(crate) is_complete: bool,
}

impl Walked {
    pub(crate) fn has_refused(&self, waits: u64) {
        let refused = self.refused;
        assert!(refused > waits, "only {refused} waits were refused");
    }

    /// A walk that goes nowhere proves nothing.
    pub(crate) fn is_more_than(&self, states: usize) {
        eprintln!("{} states, {} histories", self.states, self.steps);
        assert!(self.states > states, "only {} states were met", self.states);
    }

    /// The world after a history. A short look at the readers is enough where nobody shortens their
    /// leases.
    fn to(&mut self, history: &[Op]) -> World {
        let world = replay_to(history, Reading::Short);
        let world = world.unwrap_or_else(|wrong| panic!("{wrong}\nin history {}", self.steps));
        self.refused += world.counters().deadlocks_refused;
        world
    }
}

/// How deep a walk goes: less deep where nothing is optimized.
pub(crate) fn depth(debug: usize, release: usize) -> usize {
    if cfg!(debug_assertions) {
        debug
    } else {
        release
    }
}

/// `seen` shows all that decides the future, with times as distances: two histories that lead to
/// the same text have the same future. It is none where the walk goes no further. `checked` looks
/// at each state.
pub(crate) fn walk(
    alphabet: &[Op],
    depth: usize,
    seen: impl Fn(&World) -> Option<String>,
    checked: Option<fn(World) -> Result<(), String>>,
) -> Walked {
    walk_where(|_, _| true, alphabet, depth, seen, checked)
}

/// The same, with only the operations that are `allowed` next.
pub(crate) fn walk_where(
    allowed: impl Fn(&World, &Op) -> bool,
    alphabet: &[Op],
    depth: usize,
    seen: impl Fn(&World) -> Option<String>,
    checked: Option<fn(World) -> Result<(), String>>,
) -> Walked {
    let mut walked = Walked::default();
    let mut met = BTreeSet::new();
    let allowed = |world: &World| -> Vec<usize> {
        let letters = 0..alphabet.len();
        letters
            .filter(|at| allowed(world, &alphabet[*at]))
            .collect()
    };
    let mut frontier = vec![(Vec::new(), allowed(&walked.to(&[])))];
    for _ in 0..depth {
        let mut next = Vec::new();
        for (history, letters) in &frontier {
            for &last in letters {
                let history: Vec<Op> = history.iter().chain([&alphabet[last]]).cloned().collect();
                let world = walked.to(&history);
                walked.steps += 1;
                let Some(state) = seen(&world) else {
                    continue;
                };
                if met.insert((state, last)) {
                    let letters = allowed(&world);
                    let checked = checked.map_or(Ok(()), |checked| checked(world));
                    checked.unwrap_or_else(|wrong| panic!("{wrong}\nafter {history:?}"));
                    next.push((history, letters));
                }
            }
        }
        frontier = next;
    }
    walked.states = met.len();
    walked.is_complete = frontier.is_empty();
    walked
}

/// From two sessions and the history `begun`, through all histories of these letters; and then each
/// of these moments.
pub(crate) fn walk_to_moments(
    begun: &[Op],
    letters: &[Op],
    moments: &[Vec<Op>],
    depth: usize,
) -> Walked {
    let mut walked = Walked::default();
    let mut met = BTreeSet::new();
    let mut frontier = vec![[&[listens(0), listens(1)], begun].concat()];
    for _ in 0..=depth {
        let mut next = Vec::new();
        for history in &frontier {
            for moment in moments {
                let history: Vec<Op> = history.iter().chain(moment).cloned().collect();
                replay(&history, Reading::Short)
                    .unwrap_or_else(|wrong| panic!("{wrong}\nin history {}", walked.steps));
                walked.steps += 1;
            }
            for letter in letters {
                let history: Vec<Op> = history.iter().chain([letter]).cloned().collect();
                let world = walked.to(&history);
                if seen(&world).is_some_and(|state| met.insert(state)) {
                    next.push(history);
                }
            }
        }
        frontier = next;
    }
    walked.states = met.len();
    walked
}

pub(crate) fn listens(session: usize) -> Op {
    Op::Events {
        session,
        client: session,
        block_ms: None,
        grace_ms: 0,
        epoch: None,
        after: None,
    }
}

/// Everything that can be told from outside.
pub(crate) fn seen(world: &World) -> Option<String> {
    let (now, twin) = (world.now(), &world.twin);
    let mut text = format!("{:?} ", world.next_deadline());
    for (key, entry) in world.space().entries() {
        let left = entry.ends_at.map(|end| end - now.wall_ms());
        write!(text, "{key:?} {left:?} ").unwrap();
        if let Value::Hash(fields) = &entry.value {
            let counts = || fields.iter().filter(|(field, _)| *field != b"fence");
            if counts().any(|(_, count)| count.len() == 1 && count.as_slice() > b"3") {
                return None;
            }
            write!(text, "{:?} ", counts().collect::<Vec<_>>()).unwrap();
        }
    }
    for lock in 0..LOCKS.len() {
        if world.line(lock).len() > SIZE_MAX {
            return None;
        }
        write!(text, ":").unwrap();
        for waiter in world.line(lock) {
            let wait_left = waiter.wait_end.map(|end| end - now.mono_ms);
            let TwinWaiter {
                owner,
                mode,
                is_queued,
                wanted,
                once,
                together,
                ..
            } = waiter;
            let how = (mode, wait_left, is_queued, wanted, once, together);
            write!(text, " {owner:?} {how:?}").unwrap();
        }
    }
    let mut under_way = 0;
    for grant in world.under_way() {
        under_way += 1;
        write!(text, " {grant:?}").unwrap();
    }
    let (mut unfetched, life) = (0, &twin.life);
    let present = |at: &Place, owner: &[u8], mode| twin.token(at, owner, mode);
    for session in life.sessions.values() {
        let grace_left = session.grace_end.map(|end| end - now.mono_ms);
        let until = |(_, until): (usize, Option<i64>)| until.map(|end| end - now.mono_ms);
        let listens = session.listener.map(until);
        let at = session.client.map(|client| world.connection_of(client));
        let events = session.events_shown(present);
        unfetched += events.len();
        write!(text, "; {at:?} {grace_left:?} {listens:?} {events:?}").unwrap();
    }
    for (of, hold) in &life.holds {
        let lease_left = hold.ends_at.map(|end| end - now.wall_ms());
        let (session, asks) = (hold.session, hold.asks_if_wanted);
        write!(text, "; {of:?} {session} {lease_left:?} {asks}").unwrap();
    }
    write!(text, "; {:?}", world.called_and_blocked()).unwrap();
    (under_way <= SIZE_MAX && unfetched <= SIZE_MAX).then_some(text)
}

pub(crate) fn fetch_all(mut world: World) -> Result<(), String> {
    world.fetch_all()
}

/// Owners that wait for nothing give their holds back, and so on until nobody waits.
pub(crate) fn all_waits_end(mut world: World) -> Result<(), String> {
    loop {
        let graph = world.twin.graph();
        let modes = [Mode::Plain, Mode::Write, Mode::Read];
        let owners = (0..OWNERS.len()).filter(|owner| graph.waits_for(OWNERS[*owner]).is_empty());
        let holds = owners.flat_map(|owner| (0..2).map(move |lock| (owner, lock)));
        let holds = holds.flat_map(|(owner, lock)| modes.map(|mode| (owner, lock, mode)));
        let given_back: Vec<Op> = holds
            .filter(|(owner, lock, mode)| world.twin.holds(&place(*lock), OWNERS[*owner], *mode))
            .map(|(owner, lock, mode)| Op::Release {
                lock,
                owner,
                mode,
                token: Named::No,
                lease_ms: None,
            })
            .collect();
        if given_back.is_empty() {
            break;
        }
        for op in &given_back {
            world.step(op)?;
        }
    }
    match world.twin.waiting() {
        0 => Ok(()),
        _ => Err(format!(
            "these wait for each other: {:?}",
            world.twin.graph()
        )),
    }
}
