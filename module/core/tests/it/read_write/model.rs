//! Random histories: the core against the twin after every step.
//!
//! A failure prints the shortest history found that still fails, as the code that replays it (put
//! it into `sentences.rs`), and the seed goes to `tests/proptest-regressions/`.

use crate::foreign::Change;
use crate::keyspace::Reading;
use crate::model::{
    acquire, bind, cancel, events, interrupt, lease, lock, owner, release, renew, wait,
};
use crate::twin::Waits;
use crate::world::{Named, OWNERS, Op, SESSIONS, replay};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use rlock_core::Mode;

/// Fewer where nothing is optimized.
const CASES: u32 = if cfg!(debug_assertions) { 300 } else { 3_000 };

/// Mostly the modes of the read-write lock.
fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![6 => Just(Mode::Read), 5 => Just(Mode::Write), 1 => Just(Mode::Plain)]
}

/// The changes that Redisson makes, with leases like those of its users.
pub(crate) fn by_redisson() -> impl Strategy<Value = Change> {
    let lease_ms = || prop_oneof![Just(9i64), Just(30), Just(70)];
    prop_oneof![
        3 => (owner(), lease_ms()).prop_map(|(owner, lease_ms)| Change::Read { owner, lease_ms }),
        3 => owner().prop_map(|owner| Change::Unread { owner }),
        3 => (owner(), lease_ms()).prop_map(|(owner, lease_ms)| Change::Write { owner, lease_ms }),
        3 => owner().prop_map(|owner| Change::Unwrite { owner }),
        2 => owner().prop_map(|owner| Change::RenewRead { owner }),
        1 => owner().prop_map(|owner| Change::RenewWrite { owner }),
        1 => Just(Change::ForceUnread),
        1 => Just(Change::ForceUnwrite),
    ]
}

fn small_count_field() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec!["1", "2", "3", "0", "-1", "01", "", "one"])
}

/// The changes of a hand that knows nothing of locks.
pub(crate) fn by_hand() -> impl Strategy<Value = Change> {
    let number = || 1i64..4;
    let text = proptest::sample::select(vec!["1", "0", "77", "t9", "", "-3"]);
    let mode = proptest::sample::select(vec!["read", "write", "READ", ""]);
    let plain = (owner(), proptest::option::of(lease()));
    prop_oneof![
        3 => Just(Change::Delete),
        2 => Just(Change::Rename),
        1 => Just(Change::Persist),
        2 => (0i64..100).prop_map(|ms| Change::Expire { ms }),
        1 => Just(Change::SetText),
        1 => plain.prop_map(|(owner, lease_ms)| Change::Take { owner, lease_ms }),
        3 => (owner(), number()).prop_map(|(owner, number)| Change::DeleteTimeout {
            owner,
            number,
        }),
        1 => (owner(), number()).prop_map(|(owner, number)| Change::PersistTimeout {
            owner,
            number,
        }),
        2 => (owner(), number(), text, 0i64..90).prop_map(|(owner, number, value, ms)| {
            Change::SetTimeout { owner, number, value, ms }
        }),
        1 => mode.prop_map(|value| Change::SetMode { value }),
        1 => Just(Change::RemoveMode),
        2 => (owner(), small_count_field()).prop_map(|(owner, value)| Change::SetCount {
            owner,
            value,
        }),
        1 => (owner(), write_field()).prop_map(|(owner, value)| Change::SetWriteCount {
            owner,
            value,
        }),
        1 => owner().prop_map(|owner| Change::RemoveCount { owner }),
        1 => owner().prop_map(|owner| Change::RemoveWriteCount { owner }),
    ]
}

/// A writer's field: a script's, one with a token, or neither.
fn write_field() -> impl Strategy<Value = &'static str> {
    let ours = proptest::sample::select(vec!["1:t7", "2:t7", "1:t0", ":t7", "1:7"]);
    prop_oneof![small_count_field(), ours]
}

pub(crate) fn foreign<S: Strategy<Value = Change>>(change: fn() -> S) -> impl Strategy<Value = Op> {
    let changes = prop_oneof![
        4 => change().prop_map(|change| vec![change]),
        1 => proptest::collection::vec(change(), 2..4),
    ];
    let asked = (lock(), changes, proptest::bool::weighted(0.8));
    asked.prop_map(|(lock, changes, told)| Op::Foreign {
        lock,
        changes,
        told,
    })
}

/// The operations where the module is alone with its clients.
fn ours() -> impl Strategy<Value = Op> {
    prop_oneof![
        14 => acquire(mode()),
        9 => release(mode()),
        4 => renew(mode()),
        3 => events(),
        1 => bind(),
        2 => (0usize..3).prop_map(|client| Op::Close { client }),
        1 => cancel(lock()),
        1 => lock().prop_map(|lock| Op::Break { lock }),
        3 => (0i64..40).prop_map(|ms| Op::Pass { ms }),
        1 => (800i64..2600).prop_map(|ms| Op::Pass { ms }),
        3 => (0i64..3).prop_map(|more_ms| Op::PassDeadline { more_ms }),
        2 => (0usize..9).prop_map(|client| Op::Disconnect { client }),
        1 => Just(Op::Deliver),
        2 => Just(Op::Multi),
        3 => Just(Op::Exec),
        1 => tick_or_interrupt(),
    ]
}

pub(crate) fn tick_or_interrupt() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => (1usize..4).prop_map(|decisions| Op::Tick { decisions }),
        1 => (0usize..3).prop_map(|decisions| Op::ShortTurn { decisions }),
        1 => interrupt(),
    ]
}

/// Holds and waits of sessions at one lock, in both modes, of owners that meet.
fn belongs_to_a_session() -> impl Strategy<Value = Op> {
    let mode = || prop_oneof![Just(Mode::Read), Just(Mode::Write)];
    let waits = prop_oneof![
        3 => Just(Waits::No),
        3 => wait().prop_map(Waits::Queue),
        1 => wait().prop_map(Waits::Block),
    ];
    let asked = (0..SESSIONS.len(), owner(), mode(), waits);
    let acquire = asked.prop_map(|(session, owner, mode, waits)| Op::Acquire {
        lock: 0,
        owner,
        mode,
        lease_ms: 800,
        waits,
        session: Some(session),
        once: false,
    });
    let alone = (owner(), mode(), wait()).prop_map(|(owner, mode, ms)| Op::Acquire {
        lock: 0,
        owner,
        mode,
        lease_ms: 800,
        waits: Waits::Block(ms),
        session: None,
        once: false,
    });
    let given_back = (owner(), mode()).prop_map(|(owner, mode)| Op::Release {
        lock: 0,
        owner,
        mode,
        token: Named::No,
        lease_ms: None,
    });
    prop_oneof![
        8 => acquire,
        3 => alone,
        2 => given_back,
        1 => renew(mode()),
        1 => Just(Op::Deliver),
        1 => (0i64..60).prop_map(|ms| Op::Pass { ms }),
    ]
}

/// Sessions end in one moment, and commands come before anything else has seen that. Then they are
/// there again.
fn sessions_end_together() -> impl Strategy<Value = Vec<Op>> {
    let closed = prop_oneof![
        3 => Just(vec![0, 1]),
        2 => Just(vec![1, 0]),
        1 => (0usize..2).prop_map(|client| vec![client]),
    ];
    let meanwhile = prop_oneof![
        4 => belongs_to_a_session(),
        2 => tick_or_interrupt(),
        1 => Just(Op::Break { lock: 0 }),
        1 => cancel(Just(0)),
        1 => foreign(by_redisson),
        // Queue and holds of the lock are looked at, and nothing else has changed.
        1 => Just(Op::Foreign {
            lock: 0,
            changes: vec![Change::Persist],
            told: true,
        }),
    ];
    let before = proptest::option::weighted(0.3, interrupt());
    let meanwhile = proptest::collection::vec(meanwhile, 0..4);
    (before, closed, meanwhile).prop_map(|(before, closed, meanwhile)| {
        let ends = closed.into_iter().map(|client| Op::Close { client });
        let again = (0..SESSIONS.len()).map(|session| Op::Events {
            session,
            client: session,
            block_ms: None,
            grace_ms: 0,
            epoch: None,
            after: None,
        });
        let moment = [Op::Multi].into_iter().chain(before).chain(ends);
        moment
            .chain(meanwhile)
            .chain([Op::Exec])
            .chain(again)
            .collect()
    })
}

/// An owner that writes for one session and reads for another, and two waiters: when all ends in
/// one moment, a wrong core may grant one too many.
fn held_twice_and_waited_for() -> impl Strategy<Value = Vec<Op>> {
    let mode = || prop_oneof![1 => Just(Mode::Read), 2 => Just(Mode::Write)];
    let waits = || {
        prop_oneof![
            2 => Just((None, Waits::Block(0))),
            1 => (0..SESSIONS.len()).prop_map(|session| (Some(session), Waits::Queue(0))),
        ]
    };
    let waiter = || (mode(), waits());
    let asked = (owner(), 0..SESSIONS.len(), waiter(), waiter());
    asked.prop_map(|(holder, session, first, second)| {
        let acquire = |(after, (mode, (session, waits)))| Op::Acquire {
            lock: 0,
            owner: (holder + after) % OWNERS.len(),
            mode,
            lease_ms: 800,
            waits,
            session,
            once: false,
        };
        let writes = (Mode::Write, (Some(session), Waits::No));
        let reads = (Mode::Read, (Some(1 - session), Waits::No));
        [(0, writes), (0, reads), (1, first), (2, second)]
            .map(acquire)
            .to_vec()
    })
}

fn history_of_endings() -> impl Strategy<Value = Vec<Op>> {
    let steps = prop_oneof![
        12 => belongs_to_a_session().prop_map(|op| vec![op]),
        2 => sessions_end_together(),
        1 => (held_twice_and_waited_for(), sessions_end_together())
            .prop_map(|(held, end)| [held, end].concat()),
    ];
    proptest::collection::vec(steps, 1..40).prop_map(|steps| {
        let listens = |session| Op::Events {
            session,
            client: session,
            block_ms: None,
            grace_ms: 0,
            epoch: None,
            after: None,
        };
        [listens(0), listens(1)]
            .into_iter()
            .chain(steps.concat())
            .collect()
    })
}

fn beside_redisson() -> impl Strategy<Value = Op> {
    let step = prop_oneof![Just(-5000), Just(-40), -3i64..3, Just(45), Just(4000)];
    prop_oneof![
        40 => ours(),
        12 => foreign(by_redisson),
        1 => step.prop_map(|ms| Op::StepClock { ms }),
        1 => prop_oneof![Just(0), Just(3_000)].prop_map(|guard_ms| Op::Failover { guard_ms }),
    ]
}

fn among_any_hands() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => beside_redisson(),
        2 => foreign(by_hand),
    ]
}

/// A server that starts, with holds or without, and makes no grant for a while.
fn with_a_delay() -> impl Strategy<Value = Op> {
    let delay = || prop_oneof![1 => Just(0i64), 1 => 1i64..60, 2 => Just(1200)];
    prop_oneof![
        20 => beside_redisson(),
        3 => delay().prop_map(|delay_ms| Op::Start { delay_ms }),
        1 => delay().prop_map(|delay_ms| Op::SetDelay { delay_ms }),
    ]
}

/// Both sessions are there to begin with.
fn history(op: impl Strategy<Value = Op>) -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op, 1..50).prop_map(|ops| {
        let events = |session| Op::Events {
            session,
            client: session,
            block_ms: None,
            grace_ms: 20,
            epoch: None,
            after: None,
        };
        [events(0), events(1)].into_iter().chain(ops).collect()
    })
}

/// Sessions that ask to be told when their locks are wanted, mostly.
fn asking() -> impl Strategy<Value = Op> {
    let asks = || proptest::bool::weighted(0.8).prop_map(|asks| Op::AskIfWanted { asks });
    prop_oneof![
        8 => belongs_to_a_session(),
        8 => ours(),
        2 => with_a_delay(),
        3 => asks(),
    ]
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: CASES,
        max_shrink_iters: 10_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/proptest-regressions/read_write.txt",
        ))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn core_and_twin_agree_on_any_history(history in history(ours())) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
        replay(&history, Reading::Short).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_when_sessions_end_together(history in history_of_endings()) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
        // A short look is enough only where nobody shortens the leases of others.
        if !history.iter().any(|op| matches!(op, Op::Foreign { .. })) {
            replay(&history, Reading::Short).map_err(TestCaseError::fail)?;
        }
    }

    #[test]
    fn core_and_twin_agree_beside_redisson(history in history(beside_redisson())) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_when_holds_ask_if_wanted(history in history(asking())) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_with_a_delay(history in history(with_a_delay())) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_among_any_hands(history in history(among_any_hands())) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }
}
