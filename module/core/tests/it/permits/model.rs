//! Random histories: the core against the twin after every step.
//!
//! A failure prints the shortest history found that still fails, as the code that replays it (put
//! it into `sentences.rs`), and the seed goes to `tests/proptest-regressions/`.

use super::world::{Named, OWNERS, Op, replay};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// Fewer where nothing is optimized.
const CASES: u32 = if cfg!(debug_assertions) {
    1_000
} else {
    10_000
};

fn owner() -> impl Strategy<Value = usize> {
    0..OWNERS.len()
}

fn lease() -> impl Strategy<Value = i64> {
    prop_oneof![
        Just(1i64),
        Just(7),
        Just(12),
        Just(50),
        Just(800),
        Just(4000)
    ]
}

fn acquire() -> impl Strategy<Value = Op> {
    let wait = prop_oneof![
        1 => Just(None),
        3 => Just(Some(0i64)),
        1 => Just(Some(9)),
        1 => Just(Some(60)),
    ];
    let of = prop_oneof![1 => Just(None), 3 => (0i64..3).prop_map(Some)];
    let how =
        prop_oneof![2 => Just((true, false)), 1 => Just((true, true)), 3 => Just((false, true))];
    let asked = (
        owner(),
        1i64..4,
        of,
        lease(),
        wait,
        how,
        proptest::bool::weighted(0.2),
    );
    asked.prop_map(
        |(owner, permits, more, lease_ms, wait_ms, (is_blocked, of_session), once)| Op::Acquire {
            owner,
            permits,
            of: more.map(|more| permits + more),
            lease_ms,
            wait_ms,
            is_blocked,
            of_session,
            once,
        },
    )
}

fn token() -> impl Strategy<Value = Named> {
    prop_oneof![3 => Just(Named::No), 2 => Just(Named::Present), 1 => Just(Named::Stale)]
}

fn release() -> impl Strategy<Value = Op> {
    let lease = prop_oneof![2 => Just(None), 1 => lease().prop_map(Some)];
    (owner(), 1i64..4, token(), lease).prop_map(|(owner, permits, token, lease_ms)| Op::Release {
        owner,
        permits,
        token,
        lease_ms,
    })
}

fn renew() -> impl Strategy<Value = Op> {
    (owner(), lease(), token(), any::<bool>()).prop_map(|(owner, lease_ms, token, of_session)| {
        Op::Renew {
            owner,
            lease_ms,
            token,
            of_session,
        }
    })
}

fn ours() -> impl Strategy<Value = Op> {
    prop_oneof![
        14 => acquire(),
        9 => release(),
        3 => renew(),
        2 => (0i64..6).prop_map(|limit| Op::Limit { limit }),
        2 => owner().prop_map(|owner| Op::Cancel { owner }),
        1 => Just(Op::Break),
        3 => (0i64..40).prop_map(|ms| Op::Pass { ms }),
        1 => (800i64..2600).prop_map(|ms| Op::Pass { ms }),
        4 => Just(Op::PassDeadline),
        2 => (0usize..6).prop_map(|client| Op::Disconnect { client }),
        1 => Just(Op::Deliver),
        3 => Just(Op::Fetch),
        1 => Just(Op::Close),
        1 => (0i64..60).prop_map(|ms| Op::Delay { ms }),
    ]
}

fn among_any_hands() -> impl Strategy<Value = Op> {
    let value = proptest::sample::select(vec!["", "3", "5", "0", "-1", "two", "2147483648"]);
    let odd = proptest::sample::select(vec!["", "1", "1:2", "1:2:3", "x:y:z", "3:9:t1", "t4"]);
    prop_oneof![
        12 => ours(),
        1 => Just(Op::Delete),
        1 => value.prop_map(|value| Op::WriteLimit { value }),
        1 => (owner(), odd).prop_map(|(owner, value)| Op::WriteOdd { owner, value }),
        1 => (owner(), 1i64..4).prop_map(|(owner, permits)| Op::WriteHold { owner, permits }),
    ]
}

/// The session is there to begin with, and fetches in the end.
fn history(op: impl Strategy<Value = Op>) -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op, 1..60).prop_map(|ops| {
        let fetch = || [Op::Fetch].into_iter();
        fetch().chain(ops).chain(fetch()).collect()
    })
}

/// The session asks to be told when somebody waits, mostly.
fn asking() -> impl Strategy<Value = Op> {
    let asks = proptest::bool::weighted(0.8).prop_map(|asks| Op::AskIfWanted { asks });
    prop_oneof![10 => ours(), 3 => among_any_hands(), 2 => asks]
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: CASES,
        max_shrink_iters: 10_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/proptest-regressions/permits.txt",
        ))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn core_and_twin_agree_on_any_history(history in history(ours())) {
        replay(&history, true).map_err(TestCaseError::fail)?;
        replay(&history, false).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_when_holds_ask_if_wanted(history in history(asking())) {
        replay(&history, false).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_among_any_hands(history in history(among_any_hands())) {
        replay(&history, false).map_err(TestCaseError::fail)?;
    }
}
