//! Holds that end outside of a command, while others write to the same keys.

use super::{A, B, C, after, does, holders, listens};
use crate::foreign::Change;
use crate::twin::{Reply, Waits};
use crate::world::{OWNERS, Op, World, place};
use rlock_core::Mode;

const LONG_MS: i64 = 1_000_000;

fn reads(owner: usize, lease_ms: i64, waits: Waits, session: Option<usize>) -> Op {
    Op::Acquire {
        lock: 0,
        owner,
        mode: Mode::Read,
        lease_ms,
        waits,
        session,
        once: false,
    }
}

fn others(changes: &[Change]) -> Op {
    Op::Foreign {
        lock: 0,
        changes: changes.to_vec(),
        told: true,
    }
}

/// The session's connection closes, and others come between that and the end of its holds.
fn ends_while(changes: &[Change]) -> Vec<Op> {
    let close = Op::Close { client: 0 };
    vec![Op::Multi, close, others(changes), Op::Exec]
}

/// How long the key lasts.
fn lasts_ms(world: &World) -> i64 {
    let entry = world.space().get(&place(0)).unwrap();
    entry.ends_at.unwrap() - world.now().wall_ms()
}

/// The first of two ends, and leaves the key's end to the second. That one is no hold any more.
#[test]
fn the_last_of_several_ends_sets_the_keys_end_even_if_it_ends_nothing() {
    let two = [
        listens(None, 0),
        reads(A, LONG_MS, Waits::No, Some(0)),
        reads(B, LONG_MS, Waits::No, Some(0)),
        reads(C, 50, Waits::No, None),
    ];
    for gone in [A, B] {
        let gone = ends_while(&[Change::RemoveCount { owner: gone }]);
        let world = after(&[&two[..], &gone].concat());
        assert_eq!(holders(&world, 0), [OWNERS[C]]);
        assert_eq!(lasts_ms(&world), 50);
    }
}

#[test]
fn an_end_that_ends_nothing_leaves_the_key_as_others_made_it() {
    let one = [
        listens(None, 0),
        reads(A, 50, Waits::No, Some(0)),
        reads(C, 50, Waits::No, None),
    ];
    let others_now_hold_it = Change::SetTimeout {
        owner: A,
        number: 1,
        value: "7",
        ms: 50,
    };
    for gone in [Change::RemoveCount { owner: A }, others_now_hold_it] {
        let gone = [gone, Change::Expire { ms: 500 }];
        let world = after(&[&one[..], &ends_while(&gone)].concat());
        assert_eq!(lasts_ms(&world), 500);
    }
}

/// A reader's grant is on its way when another client writes over the timeout key that names it.
/// The session's record tells that it is the hold of this grant.
#[test]
fn a_grant_is_taken_back_although_others_wrote_over_its_token() {
    let granted = [
        listens(None, 50),
        Op::Acquire {
            lock: 0,
            owner: C,
            mode: Mode::Write,
            lease_ms: LONG_MS,
            waits: Waits::No,
            session: None,
            once: false,
        },
        reads(A, LONG_MS, Waits::Block(0), Some(0)),
        Op::Release {
            lock: 0,
            owner: C,
            mode: Mode::Write,
            token: crate::world::Named::No,
            lease_ms: None,
        },
    ];
    let overwrites = Change::SetTimeout {
        owner: A,
        number: 1,
        value: "1",
        ms: 500,
    };
    let cut = [others(&[overwrites]), Op::Disconnect { client: 0 }];
    let mut world = after(&[&granted[..], &cut].concat());
    assert_eq!(holders(&world, 0), [[]; 0]);
    assert_eq!(does(&mut world, &reads(B, 50, Waits::No, None)), {
        let token = world.twin.token(&place(0), OWNERS[B], Mode::Read);
        Reply::Held {
            count: 1,
            token: token.unwrap(),
        }
    });
}
