//! Sessions, told as short stories: which users may name them, and how many sessions and events
//! there may be. (The twin is beside each step here, too.)

use crate::foreign::Change;
use crate::keyspace::Reading;
use crate::life::{After, Epoch, News, TwinTold};
use crate::twin::{Reply, Waits};
use crate::world::{Named, OWNERS, Op, World, place, replay_to};
use rlock_core::Mode;

mod bound;
mod endings;
mod lives;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

/// EVENTS for the first session, from the first connection.
fn listens(block_ms: Option<i64>, grace_ms: i64) -> Op {
    Op::Events {
        session: 0,
        client: 0,
        block_ms,
        grace_ms,
        epoch: None,
        after: None,
    }
}

fn acquire(owner: usize, lock: usize, waits: Waits, session: Option<usize>) -> Op {
    Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: 1_000_000,
        waits,
        session,
        once: false,
    }
}

fn takes(owner: usize, lock: usize) -> Op {
    acquire(owner, lock, Waits::No, None)
}

fn takes_for_session(owner: usize, lock: usize) -> Op {
    acquire(owner, lock, Waits::No, Some(0))
}

fn queues(owner: usize, lock: usize) -> Op {
    acquire(owner, lock, Waits::Queue(0), Some(0))
}

fn releases(owner: usize, lock: usize) -> Op {
    Op::Release {
        lock,
        owner,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    }
}

fn renews(owner: usize, lock: usize, session: Option<usize>) -> Op {
    Op::Renew {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: 1_000_000,
        token: Named::No,
        session,
    }
}

fn breaks(lock: usize) -> Op {
    Op::Break { lock }
}

fn allows(sessions: u32, events: u32) -> Op {
    Op::Allow {
        sessions,
        events,
        out_of_memory: false,
    }
}

/// EVENTS for the first session, from this connection.
fn asks(client: usize, epoch: Option<Epoch>, after: Option<After>) -> Op {
    Op::Events {
        session: 0,
        client,
        block_ms: None,
        grace_ms: 50,
        epoch,
        after,
    }
}

fn does(world: &mut World, op: &Op) -> Reply {
    world.step(op).unwrap_or_else(|wrong| panic!("{wrong}"))
}

fn told(world: &mut World, op: &Op) -> TwinTold {
    match does(world, op) {
        Reply::Events(mut told) => told.remove(0),
        other => panic!("{op:?}: {other:?}"),
    }
}

/// The events that this connection is told for the first session, and the number before them.
fn hears(world: &mut World, client: usize, heard: Option<After>) -> (u64, Vec<News>) {
    let told = told(world, &asks(client, None, heard));
    (told.after, news(told))
}

fn news(told: TwinTold) -> Vec<News> {
    told.events.into_iter().map(|event| event.news).collect()
}

fn after(history: &[Op]) -> World {
    replay_to(history, Reading::All).unwrap_or_else(|wrong| panic!("{wrong}"))
}

fn holders(world: &World, lock: usize) -> Vec<Vec<u8>> {
    let holders = world.space().holders(&place(lock)).into_iter();
    holders.map(Vec::from).collect()
}

/// Three events: a hold that was lost, and the grants of two waiters.
fn two_events() -> Vec<Op> {
    vec![
        takes_for_session(A, 2),
        takes(C, 0),
        queues(A, 0),
        queues(B, 2),
        breaks(2),
        releases(C, 0),
    ]
}

#[test]
fn a_session_with_too_many_unacknowledged_events_ends() {
    let story = [&[allows(2, 2), listens(None, 0)], &two_events()[..]].concat();
    let world = after(&story);
    assert_eq!(
        world.twin.life.sessions.len(),
        0,
        "three events are too many"
    );
    assert_eq!(world.counters().sessions_overflowed, 1);
    assert_eq!(holders(&world, 0), [[]; 0], "its holds ended with it");
    assert_eq!(holders(&world, 2), [[]; 0], "and so did the other");

    let story = [&[allows(2, 3), listens(None, 0)], &two_events()[..]].concat();
    let world = after(&story);
    assert_eq!(
        world.twin.life.sessions.len(),
        1,
        "three events are allowed"
    );
    assert_eq!(holders(&world, 0), [OWNERS[A]]);
}

#[test]
fn an_overflow_begins_another_life_and_leaves_the_holds_to_their_grace() {
    let story = [
        &[allows(2, 2), listens(None, 50), takes_for_session(C, 3)],
        &two_events()[..],
    ]
    .concat();
    let mut world = after(&story);
    assert_eq!(world.twin.life.client_of(0), None, "as if it had closed");
    for (lock, owner) in [(0, A), (2, B), (3, C)] {
        assert_eq!(holders(&world, lock), [OWNERS[owner]]);
    }
    let of_before = told(&mut after(&story[..2]), &listens(None, 50)).life;
    let anew = told(&mut world, &listens(None, 50));
    assert!(anew.life > of_before, "{anew:?} after {of_before}");
    assert_eq!((anew.after, anew.events), (0, Vec::new()));
    does(&mut world, &Op::Pass { ms: 60 });
    assert_eq!(holders(&world, 3), [OWNERS[C]]);

    let world = after(&[&story[..], &[Op::Pass { ms: 50 }]].concat());
    for lock in [0, 2, 3] {
        assert_eq!(holders(&world, lock), [[]; 0], "the grace is over");
    }
}

/// All events before the listener can fetch them are one batch, however large.
#[test]
fn a_session_whose_listener_is_about_to_fetch_goes_on() {
    let story = [
        &[allows(2, 1), listens(None, 0), takes_for_session(C, 3)][..],
        &[listens(Some(0), 0)],
        &two_events()[..],
    ]
    .concat();
    let world = after(&story);
    assert_eq!(world.counters().sessions_overflowed, 0);
    let world = after(&[&story[..], &[Op::Deliver]].concat());
    let session = &world.twin.life.sessions[&0];
    assert_eq!((session.last, session.told), (3, 3));
    assert_eq!(world.counters().sessions_overflowed, 0);
}

#[test]
fn events_that_were_acknowledged_in_time_are_not_too_many() {
    let in_one_step = [
        &[allows(2, 1), listens(None, 0), Op::Multi],
        &two_events()[..],
        &[listens(None, 0), listens(None, 0), Op::Exec],
    ];
    let world = after(&in_one_step.concat());
    assert_eq!(world.counters().sessions_overflowed, 0);
    assert_eq!(holders(&world, 0), [OWNERS[A]]);
}

#[test]
fn no_more_sessions_begin_than_are_allowed() {
    let other = |client| Op::Events {
        session: 1,
        client,
        block_ms: None,
        grace_ms: 0,
        epoch: None,
        after: None,
    };
    let full = [allows(1, 9), listens(None, 0), other(1)];
    assert_eq!(after(&full).twin.life.sessions.len(), 1);
    let room = [&full[..], &[allows(2, 9), other(1)]].concat();
    assert_eq!(after(&room).twin.life.sessions.len(), 2);
    // A present session goes on, whatever is allowed.
    let goes_on = [&room[..], &[allows(1, 9), other(2)]].concat();
    assert!(after(&goes_on).twin.life.client_of(1).is_some());
    let no_memory = Op::Allow {
        sessions: 2,
        events: 9,
        out_of_memory: true,
    };
    let begun = [no_memory.clone(), listens(None, 0)];
    assert_eq!(after(&begun).twin.life.sessions.len(), 0);
    let before = [listens(None, 0), takes_for_session(A, 0), no_memory];
    let world = after(&[&before[..], &[listens(None, 0)]].concat());
    assert_eq!(world.twin.life.holds.len(), 1);
}

#[test]
fn a_session_is_its_users_alone() {
    let begun = [listens(None, 0), takes_for_session(A, 0), takes(B, 1)];
    let by_another = [
        Op::As { user: 1 },
        Op::Events {
            session: 0,
            client: 1,
            block_ms: None,
            grace_ms: 0,
            epoch: None,
            after: None,
        },
        takes_for_session(C, 2),
        queues(C, 0),
        renews(B, 1, Some(0)),
        Op::MultiRenew {
            locks: vec![1],
            owner: B,
            lease_ms: 7,
            session: Some(0),
        },
        Op::MultiAcquire {
            locks: vec![3],
            owner: C,
            lease_ms: 7,
            waits: Waits::No,
            session: Some(0),
            once: false,
        },
        Op::Close { client: 1 },
    ];
    let world = after(&[&begun[..], &by_another].concat());
    let life = &world.twin.life;
    assert_eq!((life.sessions.len(), life.holds.len()), (1, 1));
    assert_eq!(holders(&world, 0), [OWNERS[A]]);
    assert_eq!(holders(&world, 2), [[]; 0]);
    assert_eq!(holders(&world, 3), [[]; 0]);
    assert_eq!(world.twin.line(&place(0)).len(), 0);
    // Of its name another may make one of his own, once it is over.
    let over = [
        Op::Close { client: 0 },
        Op::As { user: 1 },
        listens(None, 0),
    ];
    let world = after(&[&begun[..], &over].concat());
    assert_eq!(world.twin.life.sessions[&0].user, 1);
}

/// The connection is killed and the lock broken in one step.
#[test]
fn what_ends_with_its_session_is_what_is_broken() {
    let story = [
        listens(None, 0),
        takes_for_session(A, 0),
        acquire(B, 0, Waits::Block(0), None),
        Op::Multi,
        Op::Close { client: 0 },
        breaks(0),
        Op::Exec,
    ];
    let world = after(&story);
    assert_eq!(
        holders(&world, 0),
        [OWNERS[B]],
        "who was next is not broken"
    );
    assert_eq!(world.counters().breaks, 0);
}

/// The hold of one lock ends beside a script's, and frees the other.
#[test]
fn what_else_ends_in_its_step_is_not_what_a_break_was_for() {
    let both = |owner, waits, session| Op::MultiAcquire {
        locks: vec![0, 1],
        owner,
        lease_ms: 1_000_000,
        waits,
        session,
        once: false,
    };
    let story = [
        listens(None, 0),
        both(C, Waits::No, Some(0)),
        both(A, Waits::Block(0), None),
        Op::Multi,
        Op::Close { client: 0 },
        Op::Foreign {
            lock: 0,
            changes: vec![Change::SetCount {
                owner: A,
                value: "1",
            }],
            told: true,
        },
        breaks(0),
        Op::Exec,
    ];
    let world = after(&story);
    assert_eq!(holders(&world, 0), [[]; 0]);
    assert_eq!(world.counters().breaks, 1);
}

/// A script has the lock meanwhile, and no event told of that.
#[test]
fn what_is_granted_to_an_owner_anew_is_not_what_its_session_had() {
    let is_now = |change| Op::Foreign {
        lock: 0,
        changes: vec![change],
        told: false,
    };
    let story = [
        listens(None, 0),
        takes_for_session(A, 0),
        Op::Multi,
        is_now(Change::Delete),
        is_now(Change::Take {
            owner: B,
            lease_ms: None,
        }),
        Op::Exec,
        acquire(A, 0, Waits::Block(0), None),
        releases(B, 0),
        Op::Close { client: 0 },
    ];
    let world = after(&story);
    assert_eq!(holders(&world, 0), [OWNERS[A]]);
}

/// Its client would otherwise believe in a hold that ends with the other session.
#[test]
fn a_session_whose_hold_moves_to_another_is_told() {
    let other = Op::Events {
        session: 1,
        client: 1,
        block_ms: None,
        grace_ms: 50,
        epoch: None,
        after: None,
    };
    let begun = [listens(None, 50), other.clone(), takes_for_session(A, 0)];
    let once = Op::MultiAcquire {
        locks: vec![0],
        owner: A,
        lease_ms: 1_000_000,
        waits: Waits::No,
        session: Some(1),
        once: true,
    };
    let moves = [
        renews(A, 0, Some(1)),
        acquire(A, 0, Waits::No, Some(1)),
        once,
    ];
    for moved in moves {
        let mut world = after(&begun);
        let token = world.twin.token(&place(0), OWNERS[A], Mode::Plain);
        does(&mut world, &moved);
        let first = told(&mut world, &asks(0, None, None));
        assert_eq!(
            (first.after, first.events[0].token),
            (0, token),
            "{moved:?}"
        );
        assert_eq!(news(first), [News::Lost("taken")], "{moved:?}");
        assert_eq!(news(told(&mut world, &other)), [], "{moved:?}");
        does(&mut world, &renews(A, 0, Some(1)));
        assert_eq!(
            hears(&mut world, 0, None),
            (1, Vec::new()),
            "it has no more to lose"
        );
    }
}

/// The holds of a session outlive its connection for the grace; the session ends with its last
/// hold, however that ends.
#[test]
fn a_session_without_connection_ends_with_its_last_hold() {
    let other = Op::Events {
        session: 1,
        client: 1,
        block_ms: None,
        grace_ms: 0,
        epoch: None,
        after: None,
    };
    let detached = [
        listens(None, 3_600_000),
        other,
        takes_for_session(A, 0),
        takes_for_session(B, 1),
        Op::Close { client: 0 },
    ];
    let deleted = Op::Foreign {
        lock: 0,
        changes: vec![Change::Delete],
        told: true,
    };
    let ends: [(&str, &[Op]); 5] = [
        ("released", &[releases(A, 0)]),
        ("broken", &[breaks(0)]),
        ("moved", &[renews(A, 0, Some(1))]),
        ("deleted", &[deleted]),
        ("expired", &[Op::Pass { ms: 1_000_001 }]),
    ];
    for (how, ends) in ends {
        let world = after(&[&detached[..], ends].concat());
        let both_ended = how == "expired";
        let is_there = world.twin.life.sessions.contains_key(&0);
        assert_eq!(is_there, !both_ended, "{how}: one of two holds");
        let world = after(&[&detached[..], &[releases(B, 1)], ends].concat());
        assert!(!world.twin.life.sessions.contains_key(&0), "{how}");
    }
}

/// Nothing of it can be lost any more.
#[test]
fn a_session_that_holds_nothing_ends_with_its_connection_and_its_events() {
    let story = [
        listens(None, 3_600_000),
        takes_for_session(A, 0),
        breaks(0),
        Op::Close { client: 0 },
    ];
    assert_eq!(after(&story).twin.life.sessions.len(), 0);
}
