//! The contract's sentences about permits, as short histories.

use super::twin::Reply;
use super::world::{Named, OWNERS, Op, replay};

fn acquire(owner: usize, permits: i64, of: i64, wait_ms: Option<i64>) -> Op {
    Op::Acquire {
        owner,
        permits,
        of: Some(of),
        lease_ms: 4000,
        wait_ms,
        is_blocked: true,
        of_session: false,
        once: false,
    }
}

fn release(owner: usize, permits: i64) -> Op {
    Op::Release {
        owner,
        permits,
        token: Named::No,
        lease_ms: None,
    }
}

#[test]
fn a_large_request_is_not_passed_by_small_ones() {
    let mut world = replay(
        &[
            acquire(0, 2, 3, None),
            acquire(1, 3, 3, Some(0)),
            acquire(2, 1, 3, Some(0)),
        ],
        false,
    )
    .unwrap();
    // One would fit, and is promised.
    let refused = world.step(&acquire(3, 1, 3, None)).unwrap();
    assert_eq!(refused, Reply::NotHeld { ttl_ms: 0 });
    world.step(&release(0, 2)).unwrap();
    let fields = world.space.hash.as_ref().unwrap();
    assert!(
        fields.contains_key(OWNERS[1]) && fields.len() == 2,
        "{fields:?}"
    );
}

#[test]
fn a_raised_limit_lets_in_all_who_fit_at_once() {
    let mut world = replay(&[Op::Limit { limit: 1 }], false).unwrap();
    for owner in 0..4 {
        world.step(&acquire(owner, 1, 1, Some(0))).unwrap();
    }
    world.step(&Op::Limit { limit: 3 }).unwrap();
    assert_eq!(world.space.hash.as_ref().unwrap().len(), 1 + 3);
    // A lowered one takes nothing away.
    world.step(&Op::Limit { limit: 1 }).unwrap();
    assert_eq!(world.space.hash.as_ref().unwrap().len(), 1 + 3);
}

#[test]
fn holders_that_never_release_are_cleared_away() {
    let mut world = replay(&[acquire(4, 1, 9, None)], false).unwrap();
    let long = Op::Renew {
        owner: 4,
        lease_ms: 1_000_000,
        token: Named::No,
        of_session: false,
    };
    world.step(&long).unwrap();
    // The fields that expired holders leave, one each.
    let hash = world.space.hash.as_mut().unwrap();
    for number in 0..20 {
        hash.insert(format!("gone{number}").into_bytes(), b"1:9:t1".to_vec());
    }
    world.step(&acquire(0, 1, 9, None)).unwrap();
    assert_eq!(world.space.hash.as_ref().unwrap().len(), 1 + 2);
}
