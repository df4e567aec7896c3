//! Random histories in which the same names are asked for in every way: plain, to read, to write,
//! and several at once, beside Redisson and any other hands.
//!
//! A failure prints the shortest history found that still fails, as the code that replays it (put
//! it into `model.rs`), and the seed goes to `tests/proptest-regressions/`.

use crate::foreign::Change;
use crate::keyspace::Reading;
use crate::model::{
    acquire, acquire_several, bind, cancel, clock_step, events, lease, lock, release,
    release_several, renew, renew_several,
};
use crate::read_write::model::{by_hand, by_redisson, foreign, tick_or_interrupt};
use crate::twin::Waits;
use crate::walk::listens;
use crate::world::{Named, OWNERS, Op, place, replay};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use rlock_core::Mode;

/// Fewer where nothing is optimized.
const CASES: u32 = if cfg!(debug_assertions) { 600 } else { 6_000 };

fn mode() -> impl Strategy<Value = Mode> {
    proptest::sample::select(vec![Mode::Plain, Mode::Read, Mode::Write])
}

/// The operations where the module is alone with its clients.
fn ours() -> impl Strategy<Value = Op> {
    let delay = || prop_oneof![Just(0i64), 1i64..60, Just(1200)];
    prop_oneof![
        14 => acquire(mode()),
        9 => release(mode()),
        3 => renew(mode()),
        5 => acquire_several(),
        2 => release_several(),
        1 => renew_several(),
        3 => events(),
        1 => bind(),
        2 => (0usize..3).prop_map(|client| Op::Close { client }),
        1 => cancel(lock()),
        1 => lock().prop_map(|lock| Op::Break { lock }),
        3 => (0i64..60).prop_map(|ms| Op::Pass { ms }),
        1 => (800i64..2600).prop_map(|ms| Op::Pass { ms }),
        3 => (0i64..3).prop_map(|more_ms| Op::PassDeadline { more_ms }),
        2 => (0usize..9).prop_map(|client| Op::Disconnect { client }),
        1 => Just(Op::Deliver),
        2 => Just(Op::Multi),
        3 => Just(Op::Exec),
        2 => tick_or_interrupt(),
        1 => proptest::bool::ANY.prop_map(|asks| Op::AskIfWanted { asks }),
        1 => delay().prop_map(|delay_ms| Op::Start { delay_ms }),
    ]
}

/// Changes that are of no use to the tests of one kind alone.
fn by_a_script() -> impl Strategy<Value = Change> {
    let fence = proptest::sample::select(vec!["t1", "t77", "7", "", "t07"]);
    prop_oneof![
        proptest::option::of(lease()).prop_map(|lease_ms| Change::TakeToWrite { lease_ms }),
        fence.prop_map(|value| Change::SetFence { value }),
    ]
}

fn among_any_hands() -> impl Strategy<Value = Op> {
    prop_oneof![
        40 => ours(),
        8 => foreign(by_redisson),
        6 => foreign(by_hand),
        1 => foreign(by_a_script),
        1 => clock_step().prop_map(|ms| Op::StepClock { ms }),
        1 => prop_oneof![
            Just(Op::Failover { guard_ms: 0 }),
            Just(Op::Flush { db: Some(0) }),
            Just(Op::SwapDatabases),
        ],
    ]
}

/// Both sessions are there to begin with.
fn history(op: impl Strategy<Value = Op>) -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op, 1..60)
        .prop_map(|ops| [listens(0), listens(1)].into_iter().chain(ops).collect())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        max_shrink_iters: 20_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/proptest-regressions/mixed.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn core_and_twin_agree_on_any_history(history in history(ours())) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
        replay(&history, Reading::Short).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_among_any_hands(history in history(among_any_hands())) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }
}

/// A script turns a read-write lock with a queue into a plain one, and somebody waits for it
/// together with another. When it goes to the writer ahead, that wait is over within a second.
#[test]
fn a_wait_for_several_ends_when_one_of_them_goes_to_a_writer() {
    let lease_ms = 4000;
    let acquire = |owner, mode, waits| Op::Acquire {
        lock: 0,
        owner,
        mode,
        lease_ms,
        waits,
        session: None,
        once: false,
    };
    let taken = Change::Take {
        owner: 2,
        lease_ms: Some(lease_ms),
    };
    let mut history = vec![
        acquire(1, Mode::Read, Waits::No),
        acquire(0, Mode::Write, Waits::Block(0)),
        Op::Foreign {
            lock: 0,
            changes: vec![taken],
            told: true,
        },
        Op::MultiAcquire {
            locks: vec![0, 1],
            owner: 1,
            lease_ms,
            waits: Waits::Block(0),
            session: None,
            once: false,
        },
    ];
    let world = replay(&history, Reading::All).unwrap();
    assert_eq!(world.line(0).len(), 2);
    history.push(Op::Release {
        lock: 0,
        owner: 2,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    });
    history.push(Op::Pass { ms: 1000 });
    let world = replay(&history, Reading::All).unwrap();
    assert!(world.twin.holds(&place(0), OWNERS[0], Mode::Write));
    assert_eq!((world.twin.waiting(), world.twin.refused), (0, 1));
}
