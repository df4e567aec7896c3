//! Every order in which two or three owners can get in each other's way, to a stated depth.
//!
//! The walk goes breadth first from an empty server through an alphabet of things that can happen;
//! a state that was met before, as far as anybody can tell it from outside, is not entered again by
//! the same last step. (By another it is: what a step leaves behind inside the core would show in
//! the next ones.) The first failure is therefore a shortest one; it prints the history that
//! replays it.

use crate::keyspace::Value;
use crate::world::{Change, Named, OWNERS, Op, World, place, replay};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// A hold's lease; a wait with a limit ends before it.
const LEASE_MS: i64 = 20;
const WAIT_MS: i64 = 8;
/// Holds and lines longer than this are not followed: their like was seen with shorter ones.
const SIZE_MAX: usize = 3;

#[test]
fn two_owners_in_any_order() {
    walk_and_tell(2, depth(8, 11));
}

#[test]
fn three_owners_in_any_order() {
    walk_and_tell(3, depth(5, 7));
}

fn walk_and_tell(owners: usize, depth: usize) {
    let Walked { states, steps } = walk(&alphabet(owners), depth);
    eprintln!("{owners} owners, {depth} steps deep: {states} states, {steps} histories");
    // A walk that goes nowhere proves nothing.
    assert!(states > 5_000, "only {states} states were met");
}

/// How deep the walk goes: less deep where nothing is optimized.
fn depth(debug: usize, release: usize) -> usize {
    if cfg!(debug_assertions) {
        debug
    } else {
        release
    }
}

/// Everything that can happen, to one lock.
fn alphabet(owners: usize) -> Vec<Op> {
    let lock = 0;
    let acquire = |owner, block_ms, once| Op::Acquire {
        lock,
        owner,
        lease_ms: LEASE_MS,
        block_ms,
        once,
    };
    let of_owner = |owner| {
        let token = Named::No;
        [
            acquire(owner, None, false),
            acquire(owner, Some(0), false),
            acquire(owner, Some(WAIT_MS), true),
            Op::Release {
                lock,
                owner,
                token,
                lease_ms: None,
            },
            Op::Renew {
                lock,
                owner,
                lease_ms: LEASE_MS,
                token,
            },
            Op::Cancel { lock, owner },
        ]
    };
    let mut ops: Vec<Op> = (0..owners).flat_map(of_owner).collect();
    ops.extend([
        Op::Break { lock },
        Op::Pass { ms: WAIT_MS },
        Op::Pass { ms: LEASE_MS + 1 },
        Op::PassDeadline { more_ms: 0 },
        Op::Deliver,
        Op::Foreign {
            lock,
            change: Change::Delete,
            told: true,
        },
        Op::Foreign {
            lock,
            change: Change::Delete,
            told: false,
        },
    ]);
    // Each of those who wait or whose grant is under way may be the one whose connection closes.
    ops.extend((0..SIZE_MAX).map(|client| Op::Disconnect { client }));
    ops
}

#[derive(Default)]
struct Walked {
    states: usize,
    steps: usize,
}

fn walk(alphabet: &[Op], depth: usize) -> Walked {
    let mut walked = Walked::default();
    let mut met = BTreeSet::new();
    let mut frontier: Vec<Vec<Op>> = vec![Vec::new()];
    for _ in 0..depth {
        let mut next = Vec::new();
        for history in &frontier {
            for (last, op) in alphabet.iter().enumerate() {
                let history: Vec<Op> = history.iter().chain([op]).cloned().collect();
                let world = replay(&history).unwrap_or_else(|wrong| panic!("{wrong}"));
                walked.steps += 1;
                if is_small(&world) && met.insert((seen(&world), last)) {
                    next.push(history);
                }
            }
        }
        frontier = next;
    }
    walked.states = met.len();
    walked
}

fn is_small(world: &World) -> bool {
    let held = OWNERS.iter().filter_map(|owner| count(world, owner)).max();
    held.is_none_or(|held| held.len() == 1 && held.as_slice() <= b"3")
        && world.twin.line(&place(0)).len() <= SIZE_MAX
        && world.under_way().count() <= SIZE_MAX
}

/// All that decides what can happen next, with times as distances: two histories that lead to the
/// same text have the same future.
fn seen(world: &World) -> String {
    let (now, lock) = (world.now(), place(0));
    let mut text = String::new();
    for owner in OWNERS {
        write!(text, "{:?} ", count(world, owner)).unwrap();
    }
    let lease_left = world.twin.ttl_ms(&lock, now);
    write!(text, "{lease_left} {:?}:", world.next_deadline()).unwrap();
    for waiter in world.twin.line(&lock) {
        let wait_left = waiter.wait_end.map(|end| end - now.mono_ms);
        write!(text, " {:?}/{wait_left:?}", waiter.owner).unwrap();
    }
    for grant in world.under_way() {
        write!(text, " {grant:?}").unwrap();
    }
    text
}

fn count(world: &World, owner: &[u8]) -> Option<Vec<u8>> {
    match &world.twin.space.get(&place(0))?.value {
        Value::Hash(fields) => fields.get(owner).cloned(),
        Value::Text => None,
    }
}
