//! Random histories: the core against the twin after every step.
//!
//! A failure prints the shortest history found that still fails, as the code that replays it (put
//! it into [`REPLAYS`]), and the seed goes to `tests/proptest-regressions/`.

use crate::world::{Change, LOCKS, Named, OWNERS, Op, replay};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use rlock_core::INTEGER_MAX;

fn lock() -> impl Strategy<Value = usize> {
    // Mostly one lock, so that owners meet.
    prop_oneof![4 => Just(0), 1 => 0..LOCKS.len()]
}

fn owner() -> impl Strategy<Value = usize> {
    0..OWNERS.len()
}

fn lease() -> impl Strategy<Value = i64> {
    prop_oneof![
        Just(1),
        Just(7),
        Just(50),
        Just(800),
        Just(4000),
        Just(INTEGER_MAX)
    ]
}

fn wait() -> impl Strategy<Value = i64> {
    prop_oneof![2 => Just(0), 1 => Just(1), 1 => Just(7), 1 => Just(60), 1 => Just(2500)]
}

fn token() -> impl Strategy<Value = Named> {
    prop_oneof![2 => Just(Named::No), 2 => Just(Named::Present), 1 => Just(Named::Stale)]
}

fn count_field() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec![
        "1",
        "2",
        "2147483646",
        "2147483647",
        "2147483648",
        "9223372036854775807",
        "9223372036854775808",
        "0",
        "-1",
        "01",
        "+1",
        " 1",
        "",
        "one",
    ])
}

fn fence_field() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec!["t1", "t77", "7", "t0", "t-4", "t", "", "t07", "T7"])
}

fn change() -> impl Strategy<Value = Change> {
    let lease = prop_oneof![Just(None), lease().prop_map(Some)];
    prop_oneof![
        4 => Just(Change::Delete),
        2 => Just(Change::SetText),
        3 => (owner(), lease).prop_map(|(owner, lease_ms)| Change::Take { owner, lease_ms }),
        3 => (owner(), count_field()).prop_map(|(owner, value)| Change::Write { owner, value }),
        1 => fence_field().prop_map(|value| Change::WriteFence { value }),
        1 => Just(Change::WriteMode),
        2 => owner().prop_map(|owner| Change::Remove { owner }),
        2 => (0i64..2000).prop_map(|ms| Change::Expire { ms }),
        1 => Just(Change::Persist),
    ]
}

fn acquire() -> impl Strategy<Value = Op> {
    let block = prop_oneof![1 => Just(None), 4 => wait().prop_map(Some)];
    let once = proptest::bool::weighted(0.3);
    (lock(), owner(), lease(), block, once).prop_map(|(lock, owner, lease_ms, block_ms, once)| {
        Op::Acquire {
            lock,
            owner,
            lease_ms,
            block_ms,
            once,
        }
    })
}

fn release() -> impl Strategy<Value = Op> {
    let lease = prop_oneof![2 => Just(None), 1 => lease().prop_map(Some)];
    (lock(), owner(), token(), lease).prop_map(|(lock, owner, token, lease_ms)| Op::Release {
        lock,
        owner,
        token,
        lease_ms,
    })
}

fn renew() -> impl Strategy<Value = Op> {
    (lock(), owner(), lease(), token()).prop_map(|(lock, owner, lease_ms, token)| Op::Renew {
        lock,
        owner,
        lease_ms,
        token,
    })
}

fn foreign() -> impl Strategy<Value = Op> {
    (lock(), change(), proptest::bool::weighted(0.8)).prop_map(|(lock, change, told)| Op::Foreign {
        lock,
        change,
        told,
    })
}

/// What a script or a transaction of somebody else does in one step, about one lock.
fn script() -> impl Strategy<Value = Vec<Op>> {
    let told = proptest::bool::weighted(0.8);
    (lock(), proptest::collection::vec(change(), 2..4), told).prop_map(|(lock, changes, told)| {
        let change = |change| Op::Foreign { lock, change, told };
        let changes = changes.into_iter().map(change);
        [Op::Multi]
            .into_iter()
            .chain(changes)
            .chain([Op::Exec])
            .collect()
    })
}

fn history() -> impl Strategy<Value = Vec<Op>> {
    let steps = prop_oneof![30 => op().prop_map(|op| vec![op]), 1 => script()];
    proptest::collection::vec(steps, 1..60).prop_map(|steps| steps.concat())
}

fn clock_step() -> impl Strategy<Value = i64> {
    prop_oneof![Just(-5000), Just(-40), -3i64..3, Just(45), Just(4000)]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => acquire(),
        6 => release(),
        3 => renew(),
        2 => (lock(), owner()).prop_map(|(lock, owner)| Op::Cancel { lock, owner }),
        1 => lock().prop_map(|lock| Op::Break { lock }),
        3 => (0i64..70).prop_map(|ms| Op::Pass { ms }),
        1 => (800i64..2600).prop_map(|ms| Op::Pass { ms }),
        4 => (-1i64..3).prop_map(|more_ms| Op::PassDeadline { more_ms: more_ms.max(0) }),
        1 => clock_step().prop_map(|ms| Op::StepClock { ms }),
        4 => (0usize..12).prop_map(|client| Op::Disconnect { client }),
        2 => Just(Op::Deliver),
        4 => foreign(),
        1 => prop_oneof![
            Just(Op::Flush { db: None }),
            Just(Op::Flush { db: Some(0) }),
            Just(Op::SwapDatabases),
            Just(Op::StartTokens { guard_ms: 10_000 }),
        ],
        2 => Just(Op::Multi),
        3 => Just(Op::Exec),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3_000,
        max_shrink_iters: 20_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/proptest-regressions/model.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn core_and_twin_agree_on_any_history(history in history()) {
        replay(&history).map_err(TestCaseError::fail)?;
    }
}

/// Histories that once failed, each with what was wrong.
#[test]
fn what_once_failed_holds() {
    for (what, history) in once_failed() {
        if let Err(wrong) = replay(&history) {
            panic!("{what}: {wrong}");
        }
    }
}

fn once_failed() -> Vec<(&'static str, Vec<Op>)> {
    let acquire = |owner, lease_ms, block_ms| Op::Acquire {
        lock: 0,
        owner,
        lease_ms,
        block_ms,
        once: false,
    };
    let foreign = |change| Op::Foreign {
        lock: 0,
        change,
        told: true,
    };
    let (owner, value) = (0, "1");
    vec![(
        "a script puts the first in line into the hash and shortens the lease: the next in line is \
         granted at that lease's end",
        vec![
            acquire(1, 4000, None),
            acquire(0, 7, Some(0)),
            acquire(2, 7, Some(0)),
            Op::Multi,
            foreign(Change::Write { owner, value }),
            foreign(Change::Expire { ms: 50 }),
            Op::Exec,
        ],
    )]
}

#[test]
fn what_took_time_is_counted() {
    let acquire = |owner, block_ms| Op::Acquire {
        lock: 0,
        owner,
        lease_ms: 50,
        block_ms,
        once: false,
    };
    let release = |owner| Op::Release {
        lock: 0,
        owner,
        token: Named::No,
        lease_ms: None,
    };
    let history = [
        acquire(0, None),
        Op::Pass { ms: 7 },
        acquire(1, Some(0)),
        Op::Pass { ms: 20 },
        release(0),
        acquire(2, Some(0)),
        // The lease of the second holder ends while the third waits, and nobody sees the third's.
        Op::PassDeadline { more_ms: 0 },
        Op::Pass { ms: 60 },
        release(2),
    ];
    let world = replay(&history).unwrap();
    let counters = world.counters();
    assert_eq!(counters.expiries, 1);
    assert_eq!((counters.hold_ms.count(), counters.hold_ms.sum()), (1, 27));
    assert_eq!(
        (counters.wait_ms.count(), counters.wait_ms.sum()),
        (2, 20 + 51)
    );
    let up_to_64: Vec<u64> = counters.wait_ms.buckets().map(|(_, n)| n).take(4).collect();
    assert_eq!(up_to_64, [0, 0, 0, 2]);
}
