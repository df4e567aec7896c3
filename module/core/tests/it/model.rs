//! Random histories: the core against the twin after every step.
//!
//! A failure prints the shortest history found that still fails, as the code that replays it (put
//! it into [`REPLAYS`]), and the seed goes to `tests/proptest-regressions/`.

use crate::foreign::Change;
use crate::keyspace::Reading;
use crate::life::{After, Epoch, Name};
use crate::twin::Waits;
use crate::world::{Interruption, LOCKS, Named, OWNERS, Op, SESSIONS, TOGETHER, USERS, replay};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use rlock_core::{INTEGER_MAX, Mode};

/// Fewer where nothing is optimized.
const CASES: u32 = if cfg!(debug_assertions) {
    2_000
} else {
    20_000
};

pub(crate) fn lock() -> impl Strategy<Value = usize> {
    // Mostly one lock, so that owners meet.
    prop_oneof![4 => Just(0), 1 => 0..LOCKS.len()]
}

pub(crate) fn owner() -> impl Strategy<Value = usize> {
    0..OWNERS.len()
}

pub(crate) fn lease() -> impl Strategy<Value = i64> {
    prop_oneof![
        1 => Just(1),
        2 => Just(7),
        1 => Just(12),
        3 => Just(50),
        2 => Just(800),
        1 => Just(4000),
        1 => Just(INTEGER_MAX),
    ]
}

pub(crate) fn wait() -> impl Strategy<Value = i64> {
    prop_oneof![2 => Just(0), 1 => Just(1), 1 => Just(9), 1 => Just(60), 1 => Just(2500)]
}

pub(crate) fn token() -> impl Strategy<Value = Named> {
    prop_oneof![2 => Just(Named::No), 2 => Just(Named::Present), 1 => Just(Named::Stale)]
}

pub(crate) fn count_field() -> impl Strategy<Value = &'static str> {
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
    let write_lease = proptest::option::of(lease());
    let lease = prop_oneof![Just(None), lease().prop_map(Some)];
    prop_oneof![
        4 => Just(Change::Delete),
        2 => Just(Change::SetText),
        3 => (owner(), lease).prop_map(|(owner, lease_ms)| Change::Take { owner, lease_ms }),
        3 => (owner(), count_field()).prop_map(|(owner, value)| Change::SetCount { owner, value }),
        1 => fence_field().prop_map(|value| Change::SetFence { value }),
        1 => Just(Change::SetMode { value: "read" }),
        1 => write_lease.prop_map(|lease_ms| Change::TakeToWrite { lease_ms }),
        2 => owner().prop_map(|owner| Change::RemoveCount { owner }),
        2 => (0i64..2000).prop_map(|ms| Change::Expire { ms }),
        1 => Just(Change::Persist),
    ]
}

pub(crate) fn acquire(mode: impl Strategy<Value = Mode>) -> impl Strategy<Value = Op> {
    let block = prop_oneof![1 => Just(Waits::No), 4 => wait().prop_map(Waits::Block)];
    let alone = (Just(None), block);
    let waits = prop_oneof![
        1 => Just(Waits::No),
        1 => wait().prop_map(Waits::Block),
        3 => wait().prop_map(Waits::Queue),
    ];
    let how = prop_oneof![1 => alone, 1 => (session().prop_map(Some), waits)];
    let once = proptest::bool::weighted(0.3);
    let asked = (lock(), owner(), mode, lease(), how, once);
    asked.prop_map(
        |(lock, owner, mode, lease_ms, (session, waits), once)| Op::Acquire {
            lock,
            owner,
            mode,
            lease_ms,
            waits,
            session,
            once,
        },
    )
}

pub(crate) fn session() -> impl Strategy<Value = Name> {
    prop_oneof![4 => Just(0), 1 => 0..SESSIONS.len()]
}

fn client() -> impl Strategy<Value = usize> {
    0usize..3
}

fn epoch() -> impl Strategy<Value = Epoch> {
    prop_oneof![1 => Just(Epoch::Smaller), 2 => Just(Epoch::Equal), 4 => Just(Epoch::Larger)]
}

/// The events that a client says it has heard.
fn heard() -> impl Strategy<Value = Option<After>> {
    prop_oneof![
        4 => Just(None),
        2 => Just(Some(After::Told)),
        4 => (0u64..6).prop_map(|seq| Some(After::Seq(seq))),
        1 => (0u64..6).prop_map(|seq| Some(After::OtherLife(seq))),
    ]
}

pub(crate) fn events() -> impl Strategy<Value = Op> {
    let block = prop_oneof![1 => Just(None), 2 => wait().prop_map(Some)];
    let grace = prop_oneof![1 => Just(0), 2 => Just(30), 1 => Just(3000)];
    let epoch = proptest::option::weighted(0.2, epoch());
    let asked = (session(), client(), block, grace, epoch, heard());
    asked.prop_map(
        |(session, client, block_ms, grace_ms, epoch, after)| Op::Events {
            session,
            client,
            block_ms,
            grace_ms,
            epoch,
            after,
        },
    )
}

pub(crate) fn cancel(lock: impl Strategy<Value = usize>) -> impl Strategy<Value = Op> {
    let modes = vec![Mode::Plain, Mode::Read, Mode::Write];
    let mode = proptest::option::weighted(0.5, proptest::sample::select(modes));
    (lock, owner(), mode).prop_map(|(lock, owner, mode)| Op::Cancel { lock, owner, mode })
}

/// BIND, and the connection by which holds are given back.
pub(crate) fn bind() -> impl Strategy<Value = Op> {
    let asked = (session(), client(), epoch());
    prop_oneof![
        2 => asked.prop_map(|(session, client, epoch)| Op::Bind {
            session,
            client,
            epoch,
        }),
        1 => proptest::option::weighted(0.8, client()).prop_map(|client| Op::By { client }),
    ]
}

pub(crate) fn release(mode: impl Strategy<Value = Mode>) -> impl Strategy<Value = Op> {
    let lease = prop_oneof![2 => Just(None), 1 => lease().prop_map(Some)];
    let asked = (lock(), owner(), mode, token(), lease);
    asked.prop_map(|(lock, owner, mode, token, lease_ms)| Op::Release {
        lock,
        owner,
        mode,
        token,
        lease_ms,
    })
}

pub(crate) fn renew(mode: impl Strategy<Value = Mode>) -> impl Strategy<Value = Op> {
    let session = prop_oneof![2 => Just(None), 1 => session().prop_map(Some)];
    let asked = (lock(), owner(), mode, lease(), token(), session);
    asked.prop_map(|(lock, owner, mode, lease_ms, token, session)| Op::Renew {
        lock,
        owner,
        mode,
        lease_ms,
        token,
        session,
    })
}

fn foreign() -> impl Strategy<Value = Op> {
    (lock(), change(), proptest::bool::weighted(0.8)).prop_map(|(lock, change, told)| Op::Foreign {
        lock,
        changes: vec![change],
        told,
    })
}

/// The changes of somebody else's script or transaction in one step, to one lock.
fn script() -> impl Strategy<Value = Vec<Op>> {
    let told = proptest::bool::weighted(0.8);
    (lock(), proptest::collection::vec(change(), 2..4), told).prop_map(|(lock, changes, told)| {
        let change = |change| Op::Foreign {
            lock,
            changes: vec![change],
            told,
        };
        let changes = changes.into_iter().map(change);
        [Op::Multi]
            .into_iter()
            .chain(changes)
            .chain([Op::Exec])
            .collect()
    })
}

/// The user that asks from now on, and how many sessions and events there may be.
fn who_and_how_many() -> impl Strategy<Value = Op> {
    let allow = (0u32..3, 0u32..4, proptest::bool::weighted(0.2));
    prop_oneof![
        1 => (0..USERS.len()).prop_map(|user| Op::As { user }),
        1 => allow.prop_map(|(sessions, events, out_of_memory)| Op::Allow {
            sessions,
            events,
            out_of_memory,
        }),
    ]
}

/// Operations about sessions, on one lock and with two connections, so that they meet.
fn of_sessions() -> impl Strategy<Value = Op> {
    let lock = || prop_oneof![6 => Just(0usize), 1 => Just(2usize)];
    let acquire = (
        lock(),
        owner(),
        waits_of_sessions(),
        proptest::bool::weighted(0.4),
    );
    let acquire = acquire.prop_map(|(lock, owner, (session, waits), once)| Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: 50,
        waits,
        session,
        once,
    });
    let bound = proptest::option::of(0..SESSIONS.len());
    let renew = (lock(), owner(), bound).prop_map(|(lock, owner, session)| Op::Renew {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: 50,
        token: Named::No,
        session,
    });
    let listen = (0..SESSIONS.len(), 0usize..2, proptest::option::of(wait()));
    let epoch = proptest::option::weighted(0.2, epoch());
    let listen = (listen, prop_oneof![Just(0i64), Just(20)], epoch, heard());
    let events =
        listen.prop_map(
            |((session, client, block_ms), grace_ms, epoch, after)| Op::Events {
                session,
                client,
                block_ms,
                grace_ms,
                epoch,
                after,
            },
        );
    prop_oneof![
        8 => acquire,
        6 => events,
        2 => bind(),
        4 => release(Just(Mode::Plain)),
        3 => renew,
        3 => (0usize..2).prop_map(|client| Op::Close { client }),
        2 => Just(Op::Deliver),
        2 => who_and_how_many(),
        1 => (0usize..4).prop_map(|client| Op::Disconnect { client }),
        1 => (0usize..2).prop_map(|client| Op::Unblock { client }),
        1 => cancel(lock()),
        1 => lock().prop_map(|lock| Op::Break { lock }),
        1 => (lock(), change()).prop_map(|(lock, change)| Op::Foreign {
            lock,
            changes: vec![change],
            told: true,
        }),
        2 => (0i64..60).prop_map(|ms| Op::Pass { ms }),
        2 => (0i64..2).prop_map(|more_ms| Op::PassDeadline { more_ms }),
    ]
}

fn waits_of_sessions() -> impl Strategy<Value = (Option<Name>, Waits)> {
    let named = || (0..SESSIONS.len()).prop_map(Some);
    prop_oneof![
        6 => (named(), wait().prop_map(Waits::Queue)),
        2 => (named(), wait().prop_map(Waits::Block)),
        2 => (named(), Just(Waits::No)),
        1 => (Just(None), Just(Waits::No)),
        1 => (Just(None), wait().prop_map(Waits::Block)),
    ]
}

/// Both sessions are there to begin with.
fn history_of_sessions() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(of_sessions(), 1..40).prop_map(|ops| {
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

/// Some of the locks of one database, any of them more than once.
fn locks_together() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(proptest::sample::select(TOGETHER.to_vec()), 1..5)
}

pub(crate) fn acquire_several() -> impl Strategy<Value = Op> {
    let waits = prop_oneof![
        2 => (Just(None), wait().prop_map(Waits::Block)),
        1 => waits_of_sessions(),
    ];
    let once = proptest::bool::weighted(0.3);
    let asked = (locks_together(), owner(), lease(), waits, once);
    asked.prop_map(
        |(locks, owner, lease_ms, (session, waits), once)| Op::MultiAcquire {
            locks,
            owner,
            lease_ms,
            waits,
            session,
            once,
        },
    )
}

pub(crate) fn release_several() -> impl Strategy<Value = Op> {
    (locks_together(), owner()).prop_map(|(locks, owner)| Op::MultiRelease { locks, owner })
}

pub(crate) fn renew_several() -> impl Strategy<Value = Op> {
    let session = proptest::option::weighted(0.3, session());
    (locks_together(), owner(), lease(), session).prop_map(|(locks, owner, lease_ms, session)| {
        Op::MultiRenew {
            locks,
            owner,
            lease_ms,
            session,
        }
    })
}

/// Operations about locks that are wanted together, so that they meet.
fn of_several() -> impl Strategy<Value = Op> {
    let lock = || proptest::sample::select(TOGETHER.to_vec());
    let waits = prop_oneof![
        3 => wait().prop_map(Waits::Block).prop_map(|waits| (None, waits)),
        1 => waits_of_sessions(),
    ];
    let once = proptest::bool::weighted(0.3);
    let acquire = (lock(), owner(), lease(), waits, once).prop_map(
        |(lock, owner, lease_ms, (session, waits), once)| Op::Acquire {
            lock,
            owner,
            mode: Mode::Plain,
            lease_ms,
            waits,
            session,
            once,
        },
    );
    let release = (lock(), owner()).prop_map(|(lock, owner)| Op::Release {
        lock,
        owner,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    });
    let foreign = (lock(), change(), proptest::bool::weighted(0.8));
    prop_oneof![
        10 => acquire_several(),
        6 => acquire,
        5 => release_several(),
        6 => release,
        2 => renew_several(),
        2 => cancel(lock()),
        1 => lock().prop_map(|lock| Op::Break { lock }),
        2 => events(),
        1 => bind(),
        1 => client().prop_map(|client| Op::Close { client }),
        2 => (0usize..6).prop_map(|client| Op::Disconnect { client }),
        1 => Just(Op::Deliver),
        2 => foreign.prop_map(|(lock, change, told)| Op::Foreign {
        lock,
        changes: vec![change],
        told,
    }),
        2 => (0i64..70).prop_map(|ms| Op::Pass { ms }),
        3 => (0i64..2).prop_map(|more_ms| Op::PassDeadline { more_ms }),
        1 => prop_oneof![
            Just(Op::Flush { db: Some(0) }),
            Just(Op::SwapDatabases),
            Just(Op::Demote),
            Just(Op::StartTokens { guard_ms: 0 }),
        ],
        1 => Just(Op::Multi),
        2 => Just(Op::Exec),
        2 => (1usize..4).prop_map(|decisions| Op::Tick { decisions }),
        2 => (0usize..3).prop_map(|decisions| Op::ShortTurn { decisions }),
        2 => interrupt(),
    ]
}

pub(crate) fn interrupt() -> impl Strategy<Value = Op> {
    let by = prop_oneof![
        3 => Just(Interruption::Timer),
        2 => (0usize..2).prop_map(Interruption::Close),
        1 => (0usize..6).prop_map(Interruption::Disconnect),
    ];
    (0usize..4, by).prop_map(|(reads, by)| Op::Interrupt { reads, by })
}

/// Holds and waits of sessions at two locks, one by one and together, of owners that meet.
fn belongs_to_a_session() -> impl Strategy<Value = Op> {
    let lock = || prop_oneof![2 => Just(0usize), 1 => Just(1)];
    let both = || prop_oneof![Just(vec![0, 1]), Just(vec![1, 0])];
    let waits = || {
        let named = || (0..SESSIONS.len()).prop_map(Some);
        prop_oneof![
            3 => (named(), Just(Waits::No)),
            3 => (named(), wait().prop_map(Waits::Queue)),
            1 => (named(), wait().prop_map(Waits::Block)),
            2 => (Just(None), wait().prop_map(Waits::Block)),
        ]
    };
    let asked = (lock(), owner(), waits());
    let one = asked.prop_map(|(lock, owner, (session, waits))| Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: 800,
        waits,
        session,
        once: false,
    });
    let asked = (both(), owner(), waits());
    let several = asked.prop_map(|(locks, owner, (session, waits))| Op::MultiAcquire {
        locks,
        owner,
        lease_ms: 800,
        waits,
        session,
        once: false,
    });
    let given_back = (lock(), owner()).prop_map(|(lock, owner)| Op::Release {
        lock,
        owner,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    });
    let both_back = (both(), owner());
    prop_oneof![
        8 => one,
        5 => several,
        2 => given_back,
        2 => both_back.prop_map(|(locks, owner)| Op::MultiRelease { locks, owner }),
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
        5 => belongs_to_a_session(),
        1 => interrupt(),
        1 => (1usize..4).prop_map(|decisions| Op::Tick { decisions }),
        1 => (0usize..3).prop_map(|decisions| Op::ShortTurn { decisions }),
        1 => (0usize..2).prop_map(|lock| Op::Break { lock }),
        1 => cancel(0usize..2),
        1 => Just(Op::SwapDatabases),
        1 => (0usize..2, change()).prop_map(|(lock, change)| touched(lock, change)),
        // Queue and holds of the lock are looked at, and nothing else has changed.
        1 => (0usize..2).prop_map(|lock| touched(lock, Change::Persist)),
    ];
    let before = proptest::option::weighted(0.3, interrupt());
    let meanwhile = proptest::collection::vec(meanwhile, 0..4);
    (before, closed, meanwhile).prop_map(|(before, closed, meanwhile)| {
        let ends = closed.into_iter().map(|client| Op::Close { client });
        let again = (0..SESSIONS.len()).map(listens_without_grace);
        let moment = [Op::Multi].into_iter().chain(before).chain(ends);
        moment
            .chain(meanwhile)
            .chain([Op::Exec])
            .chain(again)
            .collect()
    })
}

fn touched(lock: usize, change: Change) -> Op {
    let told = true;
    Op::Foreign {
        lock,
        changes: vec![change],
        told,
    }
}

/// A session has a lock for which two others wait, so that its end may grant one too many.
fn held_and_waited_for() -> impl Strategy<Value = Vec<Op>> {
    let waits = || {
        prop_oneof![
            2 => Just((None, Waits::Block(0))),
            1 => (0..SESSIONS.len()).prop_map(|session| (Some(session), Waits::Queue(0))),
        ]
    };
    let lock = prop_oneof![2 => Just(0usize), 1 => Just(1)];
    let asked = (lock, owner(), 0..SESSIONS.len(), waits(), waits());
    asked.prop_map(|(lock, holder, session, first, second)| {
        let holds = (Some(session), Waits::No);
        let acquire = |(after, (session, waits))| Op::Acquire {
            lock,
            owner: (holder + after) % OWNERS.len(),
            mode: Mode::Plain,
            lease_ms: 800,
            waits,
            session,
            once: false,
        };
        [holds, first, second]
            .into_iter()
            .enumerate()
            .map(acquire)
            .collect()
    })
}

/// One has a lock and waits for it together with another, which a session has. The session ends,
/// and a command about both comes before anything else has seen that.
fn asked_for_in_the_moment() -> impl Strategy<Value = Vec<Op>> {
    let asked = (0usize..2, owner(), 0..SESSIONS.len(), 0usize..3);
    asked.prop_map(|(lock, holder, session, command)| {
        let (block, lease_ms) = (Waits::Block(0), 800);
        let acquire = |lock, after, waits, session| Op::Acquire {
            lock,
            owner: (holder + after) % OWNERS.len(),
            mode: Mode::Plain,
            lease_ms,
            waits,
            session,
            once: false,
        };
        let locks = vec![lock, 1 - lock];
        let together = |waits| Op::MultiAcquire {
            locks: vec![lock, 1 - lock],
            owner: holder,
            lease_ms,
            waits,
            session: None,
            once: false,
        };
        let owner = holder;
        let command = match command {
            0 => Op::MultiRelease { locks, owner },
            1 => together(Waits::No),
            _ => Op::MultiRenew {
                locks,
                owner,
                lease_ms,
                session: None,
            },
        };
        vec![
            acquire(lock, 0, Waits::No, None),
            acquire(1 - lock, 1, Waits::No, Some(session)),
            together(block),
            acquire(lock, 2, block, None),
            Op::Multi,
            Op::Close { client: session },
            command,
            Op::Exec,
            listens_without_grace(session),
        ]
    })
}

fn listens_without_grace(session: Name) -> Op {
    Op::Events {
        session,
        client: session,
        block_ms: None,
        grace_ms: 0,
        epoch: None,
        after: None,
    }
}

fn history_of_endings() -> impl Strategy<Value = Vec<Op>> {
    let steps = prop_oneof![
        12 => belongs_to_a_session().prop_map(|op| vec![op]),
        2 => sessions_end_together(),
        1 => (held_and_waited_for(), sessions_end_together())
            .prop_map(|(held, end)| [held, end].concat()),
        1 => asked_for_in_the_moment(),
    ];
    proptest::collection::vec(steps, 1..40).prop_map(|steps| {
        let listen = (0..SESSIONS.len()).map(listens_without_grace);
        listen.chain(steps.concat()).collect()
    })
}

fn history() -> impl Strategy<Value = Vec<Op>> {
    let steps = prop_oneof![30 => op().prop_map(|op| vec![op]), 1 => script()];
    proptest::collection::vec(steps, 1..60).prop_map(|steps| steps.concat())
}

pub(crate) fn clock_step() -> impl Strategy<Value = i64> {
    prop_oneof![Just(-5000), Just(-40), -3i64..3, Just(45), Just(4000)]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => acquire(Just(Mode::Plain)),
        8 => events(),
        2 => bind(),
        3 => client().prop_map(|client| Op::Close { client }),
        1 => client().prop_map(|client| Op::Unblock { client }),
        6 => release(Just(Mode::Plain)),
        3 => renew(Just(Mode::Plain)),
        3 => acquire_several(),
        1 => release_several(),
        1 => renew_several(),
        2 => cancel(lock()),
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
            Just(Op::Demote),
            Just(Op::StartTokens { guard_ms: 10_000 }),
            Just(Op::StartTokens { guard_ms: 0 }),
        ],
        2 => Just(Op::Multi),
        3 => Just(Op::Exec),
        1 => (1usize..4).prop_map(|decisions| Op::Tick { decisions }),
        1 => (0usize..3).prop_map(|decisions| Op::ShortTurn { decisions }),
        1 => interrupt(),
    ]
}

/// A server that starts, with holds or without, and makes no grant for a while.
fn history_with_a_delay() -> impl Strategy<Value = Vec<Op>> {
    let delay = || prop_oneof![1 => Just(0i64), 1 => 1i64..90, 2 => Just(1200), 1 => Just(4000)];
    let steps = prop_oneof![
        12 => op(),
        8 => of_several(),
        3 => delay().prop_map(|delay_ms| Op::Start { delay_ms }),
        1 => delay().prop_map(|delay_ms| Op::SetDelay { delay_ms }),
    ];
    (delay(), proptest::collection::vec(steps, 1..60)).prop_map(|(delay_ms, steps)| {
        let start = Op::Start { delay_ms };
        [start].into_iter().chain(steps).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        max_shrink_iters: 20_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/proptest-regressions/model.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn core_and_twin_agree_on_any_history(history in history()) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_on_any_history_of_sessions(history in history_of_sessions()) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_on_any_history_with_a_delay(history in history_with_a_delay()) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_on_any_history_of_several_locks(
        history in proptest::collection::vec(of_several(), 1..50),
    ) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }
}

/// Sessions that ask to be told when their locks are wanted, mostly.
fn history_of_asking() -> impl Strategy<Value = Vec<Op>> {
    let asks = || proptest::bool::weighted(0.8).prop_map(|asks| Op::AskIfWanted { asks });
    let steps = prop_oneof![
        8 => of_sessions(),
        4 => of_several(),
        4 => belongs_to_a_session(),
        2 => op(),
        1 => prop_oneof![Just(40i64), Just(1200)].prop_map(|delay_ms| Op::Start { delay_ms }),
        2 => asks(),
    ];
    proptest::collection::vec(steps, 1..50).prop_map(|steps| {
        let listens = |session| Op::Events {
            session,
            client: session,
            block_ms: None,
            grace_ms: 20,
            epoch: None,
            after: None,
        };
        [listens(0), listens(1), Op::AskIfWanted { asks: true }]
            .into_iter()
            .chain(steps)
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES / 4,
        max_shrink_iters: 20_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/proptest-regressions/model.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn core_and_twin_agree_when_holds_ask_if_wanted(history in history_of_asking()) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn core_and_twin_agree_when_sessions_end_together(history in history_of_endings()) {
        replay(&history, Reading::All).map_err(TestCaseError::fail)?;
    }
}

/// Histories that failed once, each with its fault.
#[test]
fn what_once_failed_holds() {
    for (what, history) in once_failed() {
        if let Err(wrong) = replay(&history, Reading::All) {
            panic!("{what}: {wrong}");
        }
    }
}

fn once_failed() -> Vec<(&'static str, Vec<Op>)> {
    let acquire = |owner, lease_ms, waits| Op::Acquire {
        lock: 0,
        owner,
        mode: Mode::Plain,
        lease_ms,
        waits,
        session: None,
        once: false,
    };
    let foreign = |change| Op::Foreign {
        lock: 0,
        changes: vec![change],
        told: true,
    };
    let (owner, value) = (0, "1");
    vec![(
        "a script puts the first in the queue into the hash and shortens the lease: the next is \
         granted at that lease's end",
        vec![
            acquire(1, 4000, Waits::No),
            acquire(0, 7, Waits::Block(0)),
            acquire(2, 7, Waits::Block(0)),
            Op::Multi,
            foreign(Change::SetCount { owner, value }),
            foreign(Change::Expire { ms: 50 }),
            Op::Exec,
        ],
    ),
    (
        "a script takes the lock for the first in the queue, whose wait is granted on top of that: \
         the next is granted at the end of the script's lease",
        vec![
            acquire(1, 50, Waits::No),
            acquire(0, 1, Waits::Block(0)),
            acquire(2, 1, Waits::Block(60)),
            foreign(Change::Take {
                owner,
                lease_ms: Some(7),
            }),
            Op::Pass { ms: 7 },
        ],
    )]
    .into_iter()
    .chain(once_failed_with_sessions())
    .chain(once_failed_when_interrupted())
    .chain([two_multi_waits_of_one_owner(), search_that_ends_a_hold()])
    .collect()
}

/// The second of two waits of one owner for the same locks is looked at alone, before the lease
/// that is in the way of the first is found to be over.
fn two_multi_waits_of_one_owner() -> (&'static str, Vec<Op>) {
    let several = |owner, locks: &[usize]| Op::MultiAcquire {
        locks: locks.to_vec(),
        owner,
        lease_ms: 1,
        waits: Waits::Block(0),
        session: None,
        once: false,
    };
    let alone = Op::Acquire {
        lock: 1,
        owner: 1,
        mode: Mode::Plain,
        lease_ms: 1,
        waits: Waits::Block(0),
        session: None,
        once: false,
    };
    let history = vec![
        several(2, &[0, 1]),
        alone,
        several(1, &[0, 3, 1]),
        several(2, &[1, 0]),
        several(1, &[0, 3, 1]),
        several(0, &[0]),
        Op::Pass { ms: 2 },
    ];
    ("of two equal waits the first is served first", history)
}

/// The search for a circle finds a hold that must end. Its end lets somebody in, with a lease,
/// where the caller is about to wait.
fn search_that_ends_a_hold() -> (&'static str, Vec<Op>) {
    let acquire = |lock, waits, session| Op::Acquire {
        lock,
        owner: 0,
        mode: Mode::Plain,
        lease_ms: 800,
        waits,
        session: Some(session),
        once: false,
    };
    let together = Op::MultiAcquire {
        locks: vec![0, 1],
        owner: 1,
        lease_ms: 800,
        waits: Waits::Block(0),
        session: None,
        once: false,
    };
    let history = vec![
        listens_without_grace(0),
        listens_without_grace(1),
        acquire(0, Waits::No, 1),
        together,
        // The wait for both is looked at, and is known to be blocked at the first.
        acquire(1, Waits::No, 0),
        Op::Multi,
        Op::Close { client: 1 },
        acquire(1, Waits::Queue(0), 0),
        Op::Exec,
    ];
    (
        "the end of a lease that began while the search went on is waited for",
        history,
    )
}

/// A script takes the lock.
fn by_script(owner: usize) -> Op {
    Op::Foreign {
        lock: 0,
        changes: vec![Change::Take {
            owner,
            lease_ms: None,
        }],
        told: true,
    }
}

/// A session that ends 20 ms after its connection.
fn listens(session: Name) -> Op {
    Op::Events {
        session,
        client: session,
        block_ms: None,
        grace_ms: 20,
        epoch: None,
        after: None,
    }
}

fn queues(owner: usize, session: Name) -> Op {
    Op::Acquire {
        lock: 0,
        owner,
        mode: Mode::Plain,
        lease_ms: 50,
        waits: Waits::Queue(0),
        session: Some(session),
        once: false,
    }
}

fn blocks(owner: usize) -> Op {
    Op::Acquire {
        lock: 0,
        owner,
        mode: Mode::Plain,
        lease_ms: 50,
        waits: Waits::Block(0),
        session: None,
        once: false,
    }
}

fn renews(owner: usize, session: Option<Name>) -> Op {
    Op::Renew {
        lock: 0,
        owner,
        mode: Mode::Plain,
        lease_ms: 50,
        token: Named::No,
        session,
    }
}

fn once_failed_with_sessions() -> Vec<(&'static str, Vec<Op>)> {
    let granted_to_0 = [queues(1, 0), queues(0, 1), Op::Break { lock: 0 }];
    let begin = [listens(0), listens(1)];
    vec![
        (
            "a grant that RENEW has confirmed is not taken back",
            [
                &begin[..],
                &granted_to_0,
                &[renews(0, None), Op::Close { client: 1 }],
            ]
            .concat(),
        ),
        (
            "nor is it when the hold belongs to another session by then",
            [
                &begin[..],
                &granted_to_0,
                &[queues(0, 0), renews(0, None), Op::Close { client: 1 }],
            ]
            .concat(),
        ),
        (
            "after a demotion nothing is due",
            vec![blocks(1), blocks(0), blocks(0), Op::Demote],
        ),
    ]
    .into_iter()
    .chain(once_failed_with_scripts())
    .collect()
}

/// A connection closes while a command's keys are read.
fn once_failed_when_interrupted() -> Vec<(&'static str, Vec<Op>)> {
    let acquire = |lock, owner, waits, session| Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: 50,
        waits,
        session,
        once: false,
    };
    let closes = |reads| Op::Interrupt {
        reads,
        by: Interruption::Close(0),
    };
    let together = Op::MultiAcquire {
        locks: vec![1],
        owner: 1,
        lease_ms: 50,
        waits: Waits::Block(0),
        session: None,
        once: false,
    };
    vec![
        (
            "a hold that is to end by then is not entered again before it has ended",
            vec![
                listens_without_grace(0),
                listens_without_grace(1),
                acquire(0, 1, Waits::No, Some(0)),
                acquire(1, 0, Waits::No, Some(1)),
                Op::Multi,
                Op::Close { client: 1 },
                closes(0),
                acquire(0, 1, Waits::No, None),
                Op::Exec,
            ],
        ),
        (
            "who is about to wait for a session that is gone is told so, and does not wait",
            vec![
                acquire(0, 0, Waits::No, None),
                acquire(1, 0, Waits::No, None),
                listens_without_grace(0),
                together,
                closes(1),
                acquire(0, 1, Waits::Queue(0), Some(0)),
            ],
        ),
    ]
}

fn once_failed_with_scripts() -> Vec<(&'static str, Vec<Op>)> {
    vec![
        (
            "a script's hold that is given a token later is not lost",
            vec![
                listens(0),
                by_script(0),
                renews(0, Some(0)),
                blocks(0),
                Op::Close { client: 0 },
                Op::Pass { ms: 20 },
            ],
        ),
        (
            "nor is one of two in a hash when the other is given a token",
            vec![
                listens(0),
                by_script(0),
                Op::Foreign {
                    lock: 0,
                    changes: vec![Change::SetCount {
                        owner: 1,
                        value: "1",
                    }],
                    told: true,
                },
                renews(1, Some(0)),
                blocks(0),
                Op::Pass { ms: 30 },
                Op::StepClock { ms: 1 },
            ],
        ),
    ]
}

#[test]
fn what_took_time_is_counted() {
    let acquire = |owner, waits| Op::Acquire {
        lock: 0,
        owner,
        mode: Mode::Plain,
        lease_ms: 50,
        waits,
        session: None,
        once: false,
    };
    let release = |owner| Op::Release {
        lock: 0,
        owner,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    };
    let history = [
        acquire(0, Waits::No),
        Op::Pass { ms: 7 },
        acquire(1, Waits::Block(0)),
        Op::Pass { ms: 20 },
        release(0),
        acquire(2, Waits::Block(0)),
        // The lease of the second holder ends while the third waits, and nobody sees the third's.
        Op::Pass { ms: 51 },
        Op::Pass { ms: 60 },
        release(2),
    ];
    let world = replay(&history, Reading::All).unwrap();
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
