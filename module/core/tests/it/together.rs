//! Several locks at once, told as short stories: the contract's promises for them, and their
//! outcome. (The twin is beside each step here, too.)

use crate::foreign::Change;
use crate::keyspace::Reading;
use crate::twin::Waits;
use crate::world::{Named, OWNERS, Op, SESSIONS, place, replay_to};
use rlock_core::INTEGER_MAX;
use rlock_core::Mode;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

fn take(owner: usize, lock: usize) -> Op {
    acquire(owner, lock, Waits::No)
}

fn wait(owner: usize, lock: usize) -> Op {
    acquire(owner, lock, Waits::Block(0))
}

fn acquire(owner: usize, lock: usize, waits: Waits) -> Op {
    Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: INTEGER_MAX,
        waits,
        session: None,
        once: false,
    }
}

fn take_all(owner: usize, locks: &[usize]) -> Op {
    acquire_all(owner, locks, Waits::No)
}

fn wait_for_all(owner: usize, locks: &[usize]) -> Op {
    acquire_all(owner, locks, Waits::Block(0))
}

fn acquire_all(owner: usize, locks: &[usize], waits: Waits) -> Op {
    Op::MultiAcquire {
        locks: locks.to_vec(),
        owner,
        lease_ms: INTEGER_MAX,
        waits,
        session: None,
        once: false,
    }
}

/// For the first session.
fn queue_for_all(owner: usize, locks: &[usize], once: bool) -> Op {
    Op::MultiAcquire {
        locks: locks.to_vec(),
        owner,
        lease_ms: INTEGER_MAX,
        waits: Waits::Queue(0),
        session: Some(0),
        once,
    }
}

fn release(owner: usize, lock: usize) -> Op {
    Op::Release {
        lock,
        owner,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    }
}

fn release_all(owner: usize, locks: &[usize]) -> Op {
    let locks = locks.to_vec();
    Op::MultiRelease { locks, owner }
}

fn listen(session: usize, grace_ms: i64) -> Op {
    Op::Events {
        session,
        client: session,
        block_ms: None,
        grace_ms,
        epoch: None,
        after: None,
    }
}

fn by_others(lock: usize, change: Change) -> Op {
    let told = true;
    Op::Foreign {
        lock,
        changes: vec![change],
        told,
    }
}

/// In a transaction nothing is done but the command's own work.
fn in_one_step(op: Op) -> Vec<Op> {
    vec![Op::Multi, op]
}

/// The holders of the first two locks in the end, and the owners in their queues.
fn ends_with(history: &[Op], [first, second]: [(&[usize], &[usize]); 2]) {
    let world = replay_to(history, Reading::All).unwrap_or_else(|wrong| panic!("{wrong}"));
    let graph = world.twin.graph();
    for (lock, (holders, line)) in [first, second].into_iter().enumerate() {
        let name = |owner: &usize| OWNERS[*owner].to_vec();
        let holding: Vec<_> = graph
            .holders
            .get(&place(lock))
            .into_iter()
            .flatten()
            .collect();
        let standing = graph.lines.get(&place(lock)).into_iter().flatten();
        let standing: Vec<_> = standing.map(|of| of.owner.clone()).collect();
        let (holders, line): (Vec<_>, Vec<_>) = (
            holders.iter().map(name).collect(),
            line.iter().map(name).collect(),
        );
        assert_eq!(
            holding,
            holders.iter().collect::<Vec<_>>(),
            "who holds {lock} after {history:?}"
        );
        assert_eq!(standing, line, "who waits for {lock} after {history:?}");
    }
}

#[test]
fn all_or_none() {
    ends_with(&[take_all(A, &[0, 1])], [(&[A], &[]), (&[A], &[])]);
    let held = take(A, 0);
    ends_with(
        &[held.clone(), take_all(B, &[1, 0])],
        [(&[A], &[]), (&[], &[])],
    );
    // A wait stands in each line, and holds nothing.
    ends_with(
        &[held.clone(), wait_for_all(B, &[1, 0])],
        [(&[A], &[B]), (&[], &[B])],
    );
    // A lock that the owner holds already is entered once more, or not at all.
    let story = [held, take(B, 1), take_all(B, &[0, 1]), release(B, 1)];
    ends_with(&story, [(&[A], &[]), (&[], &[])]);
    let story = [take(B, 1), take_all(B, &[0, 1]), release(B, 1)];
    ends_with(&story, [(&[B], &[]), (&[B], &[])]);
}

/// The answer to a command that was sent twice names the token of each.
#[test]
fn once_gives_all_the_token_of_those_that_it_takes() {
    let once = Op::MultiAcquire {
        locks: vec![0, 1],
        owner: A,
        lease_ms: INTEGER_MAX,
        waits: Waits::No,
        session: None,
        once: true,
    };
    let tokens = |history: &[Op]| {
        let world = replay_to(history, Reading::All).unwrap_or_else(|wrong| panic!("{wrong}"));
        [0, 1].map(|lock| world.twin.token(&place(lock), OWNERS[A], Mode::Plain))
    };
    let [before, none] = tokens(&[take(A, 0)]);
    assert_eq!(none, None);
    let [first, second] = tokens(&[take(A, 0), once.clone()]);
    assert!(first > before && first == second, "{first:?}, {second:?}");
    let again = tokens(&[take(A, 0), once.clone(), once]);
    assert_eq!(again, [first, second], "nothing was taken");
}

/// Its reply was lost, and one of its locks was deleted before the command was sent again: now the
/// owner waits for that one, and has the other still.
#[test]
fn once_gives_one_token_and_counts_no_hold_twice_after_a_wait_too() {
    let story = |once| {
        let deleted = Op::Foreign {
            lock: 1,
            changes: vec![Change::Delete],
            told: true,
        };
        let again = queue_for_all(A, &[0, 1], once);
        let history = [
            listen(0, 0),
            take_all(A, &[0, 1]),
            deleted,
            take(B, 1),
            again,
            release(B, 1),
        ];
        let world = replay_to(&history, Reading::All).unwrap_or_else(|wrong| panic!("{wrong}"));
        [0, 1].map(|lock| {
            let of = (&place(lock), OWNERS[A], Mode::Plain);
            (
                world.twin.count(of.0, of.1, of.2),
                world.twin.token(of.0, of.1, of.2),
            )
        })
    };
    let [first, second] = story(true);
    assert_eq!(first, second, "one token, as the event says");
    assert_eq!(first.0, Some(1));
    let [first, second] = story(false);
    assert!(
        first.0 == Some(2) && first.1 < second.1,
        "{first:?}, {second:?}"
    );
}

#[test]
fn the_last_release_hands_all_over_in_its_step() {
    let held = [take(A, 0), take(A, 1), wait_for_all(B, &[1, 0])];
    let one = [&held[..], &in_one_step(release(A, 0))].concat();
    ends_with(&one, [(&[], &[B]), (&[A], &[B])]);
    let both = [&one[..], &[release(A, 1)]].concat();
    ends_with(&both, [(&[B], &[]), (&[B], &[])]);
    let together = [&held[..], &in_one_step(release_all(A, &[0, 1]))].concat();
    ends_with(&together, [(&[B], &[]), (&[B], &[])]);
    let broken = [
        &held[..],
        &[release(A, 0)],
        &in_one_step(Op::Break { lock: 1 }),
    ]
    .concat();
    ends_with(&broken, [(&[B], &[]), (&[B], &[])]);
}

#[test]
fn nobody_comes_out_of_turn() {
    // Lock 1 is free, but promised: a newcomer stands behind, and is next.
    let held = [take(A, 0), wait_for_all(B, &[0, 1]), wait(C, 1)];
    ends_with(&held, [(&[A], &[B]), (&[], &[B, C])]);
    let given = [&held[..], &[release(A, 0)]].concat();
    ends_with(&given, [(&[B], &[]), (&[B], &[C])]);
    let given = [&given[..], &[release_all(B, &[0, 1])]].concat();
    ends_with(&given, [(&[], &[]), (&[C], &[])]);
    // And so does a waiter for several locks.
    let held = [take(A, 0), wait_for_all(B, &[0, 1]), wait_for_all(C, &[1])];
    ends_with(&held, [(&[A], &[B]), (&[], &[B, C])]);
    // Also where lock 1 is promised to another waiter for several locks.
    let held = [
        take_all(A, &[0, 3]),
        wait_for_all(C, &[1, 3]),
        wait_for_all(B, &[0, 1]),
    ];
    let story = [&held[..], &[release(A, 0)]].concat();
    ends_with(&story, [(&[], &[B]), (&[], &[C, B])]);
    let story = [&story[..], &[release(A, 3), release_all(C, &[3, 1])]].concat();
    ends_with(&story, [(&[B], &[]), (&[B], &[])]);
    // A waiter behind another at one lock waits for that other, whatever is free elsewhere.
    let held = [take_all(A, &[0, 1]), wait(C, 1), wait_for_all(B, &[0, 1])];
    let story = [&held[..], &in_one_step(release_all(A, &[0, 1]))].concat();
    ends_with(&story, [(&[], &[B]), (&[C], &[B])]);
    let story = [&story[..], &[release(C, 1)]].concat();
    ends_with(&story, [(&[B], &[]), (&[B], &[])]);
}

#[test]
fn a_lock_that_the_owner_holds_is_entered_past_its_line() {
    let held = [take(A, 0), take(B, 1), wait(C, 1), wait_for_all(B, &[0, 1])];
    ends_with(&held, [(&[A], &[B]), (&[B], &[C, B])]);
    let story = [&held[..], &in_one_step(release(A, 0))].concat();
    ends_with(&story, [(&[B], &[]), (&[B], &[C])]);
    let story = [&story[..], &[release(B, 1)]].concat();
    ends_with(&story, [(&[B], &[]), (&[B], &[C])]);
    // A script gives it one of them.
    let held = [
        take(A, 0),
        take(A, 1),
        wait_for_all(B, &[0, 1]),
        release(A, 1),
    ];
    let lease_ms = None;
    let given = by_others(0, Change::Take { owner: B, lease_ms });
    ends_with(&[&held[..], &[given]].concat(), [(&[B], &[]), (&[B], &[])]);
}

/// Behind another waiter, at whose queue nobody looks again while nothing comes of it.
#[test]
fn who_has_entered_too_often_to_be_granted_is_granted_when_that_is_over() {
    let (owner, value) = (B, "2147483646");
    let blocked = [
        listen(0, 0),
        take(B, 0),
        by_others(0, Change::SetCount { owner, value }),
        take(A, 1),
        wait(C, 0),
        wait_for_all(B, &[0, 1]),
        take(B, 0),
        release(A, 1),
    ];
    ends_with(&blocked, [(&[B], &[C, B]), (&[], &[B])]);
    for once_more in [release(B, 0), queue_for_all(B, &[0, 1], true)] {
        let story = [&blocked[..], &[once_more, Op::Pass { ms: 0 }]].concat();
        ends_with(&story, [(&[B], &[C]), (&[B], &[])]);
    }
}

#[test]
fn a_wait_ends_in_all_lines_at_once() {
    let held = [take(A, 0), wait_for_all(B, &[0, 1]), wait(C, 1)];
    let gone: [(&[usize], &[usize]); 2] = [(&[A], &[]), (&[C], &[])];
    for end in [
        Op::Cancel {
            lock: 0,
            owner: B,
            mode: None,
        },
        Op::Cancel {
            lock: 1,
            owner: B,
            mode: None,
        },
        Op::Disconnect { client: 0 },
    ] {
        ends_with(&[&held[..], &[end]].concat(), gone);
    }
    let timed_out = [
        take(A, 0),
        acquire_all(B, &[0, 1], Waits::Block(8)),
        wait(C, 1),
        Op::Pass { ms: 8 },
    ];
    ends_with(&timed_out, gone);
    let with_its_session = [
        listen(0, 0),
        take(A, 0),
        queue_for_all(B, &[0, 1], false),
        wait(C, 1),
        Op::Close { client: 0 },
    ];
    ends_with(&with_its_session, gone);
    // The other kind, or another type, over one of them: whether an event says so, or it is found
    // when the wait could have all.
    let lease_ms = None;
    for change in [Change::SetText, Change::TakeToWrite { lease_ms }] {
        let (lock, told) = (3, false);
        let story = [
            take(A, 0),
            wait_for_all(B, &[0, 3]),
            wait(C, 0),
            Op::Foreign {
                lock,
                changes: vec![change],
                told,
            },
            release(A, 0),
        ];
        ends_with(&story, [(&[C], &[]), (&[], &[])]);
    }
    // Also of one that is not the first there.
    let story = [
        take(A, 3),
        wait(C, 3),
        wait_for_all(B, &[3, 1]),
        by_others(3, Change::TakeToWrite { lease_ms }),
    ];
    ends_with(&story, [(&[], &[]), (&[], &[])]);
    for change in [Change::SetText, Change::TakeToWrite { lease_ms }] {
        let held = [
            take(A, 3),
            wait_for_all(B, &[1, 3]),
            wait(C, 1),
            by_others(3, change),
        ];
        ends_with(&held, [(&[], &[]), (&[C], &[])]);
    }
}

#[test]
fn a_grant_that_does_not_arrive_is_taken_back_at_all_locks() {
    let held = [
        take(A, 0),
        wait_for_all(B, &[0, 1]),
        wait(C, 1),
        release(A, 0),
    ];
    let story = [&held[..], &[Op::Disconnect { client: 1 }]].concat();
    ends_with(&story, [(&[], &[]), (&[C], &[])]);
}

#[test]
fn a_grant_to_a_session_is_held_at_all_locks_until_its_grace_is_over() {
    let granted = |grace_ms| {
        [
            listen(0, grace_ms),
            take(A, 0),
            queue_for_all(B, &[0, 1], false),
            wait(C, 1),
            release(A, 0),
            Op::Close { client: 0 },
        ]
    };
    ends_with(&granted(3000), [(&[B], &[]), (&[B], &[C])]);
    let over = [&granted(3000)[..], &[Op::Pass { ms: 3000 }]].concat();
    ends_with(&over, [(&[], &[]), (&[C], &[])]);
    ends_with(&granted(0), [(&[], &[]), (&[C], &[])]);
}

/// Were the one freed first while its owner still counts as the holder of the other, the wait would
/// enter that once more, and the session's end would take it away again.
#[test]
fn what_ends_with_a_session_is_taken_anew_and_not_entered_again() {
    let bound = |owner, lock| Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: INTEGER_MAX,
        waits: Waits::No,
        session: Some(0),
        once: false,
    };
    let closed = Op::Close { client: 0 };
    for taken in [[bound(A, 0), bound(B, 1)], [bound(B, 1), bound(A, 0)]] {
        let waits = [wait_for_all(A, &[0, 1]), closed.clone()];
        let story = [&[listen(0, 0)], &taken[..], &waits].concat();
        ends_with(&story, [(&[A], &[]), (&[A], &[])]);
    }
}

#[test]
fn once_keeps_the_place_in_all_lines() {
    assert_eq!(SESSIONS.len(), 2);
    let asked_twice = |locks: &[usize]| {
        vec![
            listen(0, 0),
            take(A, 0),
            wait_for_all(B, &[0, 1]),
            wait_for_all(C, &[0, 1]),
            queue_for_all(B, locks, true),
        ]
    };
    ends_with(&asked_twice(&[0, 1]), [(&[A], &[B, C]), (&[], &[B, C])]);
    ends_with(&asked_twice(&[1, 0, 1]), [(&[A], &[B, C]), (&[], &[B, C])]);
    // Another set would be a second wait.
    for locks in [&[0][..], &[0, 1, 3]] {
        let story = [
            listen(0, 0),
            take(A, 0),
            wait_for_all(B, &[0, 1]),
            queue_for_all(B, locks, true),
        ];
        ends_with(&story, [(&[A], &[B]), (&[], &[B])]);
    }
}

#[test]
fn a_circle_is_refused() {
    // Through a hold of an owner and its wait.
    let story = [take(A, 0), take(B, 1), wait(A, 1), wait_for_all(B, &[3, 0])];
    ends_with(&story, [(&[A], &[]), (&[B], &[A])]);
    let story = [take(A, 0), take(B, 1), wait_for_all(A, &[3, 1]), wait(B, 0)];
    ends_with(&story, [(&[A], &[]), (&[B], &[A])]);
    // Through a waiter before it at a lock that is free.
    let story = [take(C, 1), wait_for_all(B, &[0, 1]), wait(C, 0)];
    ends_with(&story, [(&[], &[B]), (&[C], &[B])]);
    // A lock that the owner holds is no reason to wait, so neither are the waiters there.
    let story = [take(A, 0), take(C, 3), wait(B, 0), wait_for_all(A, &[0, 3])];
    ends_with(&story, [(&[A], &[B, A]), (&[], &[])]);
    // A wait that has left is no reason either.
    let left = Op::Cancel {
        lock: 1,
        owner: A,
        mode: None,
    };
    let story = [
        take(A, 0),
        take(B, 1),
        wait_for_all(A, &[3, 1]),
        left,
        wait(B, 0),
    ];
    ends_with(&story, [(&[A], &[B]), (&[B], &[])]);
}

#[test]
fn a_free_lock_that_is_promised_may_be_taken_by_a_script() {
    let held = [take(A, 0), wait_for_all(B, &[0, 1])];
    let lease_ms = None;
    let taken = by_others(1, Change::Take { owner: C, lease_ms });
    let story = [&held[..], &[taken, release(A, 0)]].concat();
    ends_with(&story, [(&[], &[B]), (&[C], &[B])]);
    let story = [&story[..], &[by_others(1, Change::Delete)]].concat();
    ends_with(&story, [(&[B], &[]), (&[B], &[])]);
}

#[test]
fn during_the_delay_after_a_start_several_are_entered_only_if_all_are_held() {
    let start = Op::Start { delay_ms: 100 };
    let is_over = Op::Pass { ms: 100 };
    let nobody = [(&[][..], &[][..]), (&[][..], &[][..])];
    ends_with(&[start.clone(), take_all(A, &[0, 1])], nobody);
    let held = [take_all(A, &[0, 1]), start.clone()];
    let story = [&held[..], &[take_all(A, &[0, 1]), release_all(A, &[0, 1])]].concat();
    ends_with(&story, [(&[A], &[]), (&[A], &[])]);
    // One of them is free.
    let story = [
        take(A, 0),
        start.clone(),
        take_all(A, &[0, 1]),
        wait_for_all(A, &[0, 1]),
    ];
    ends_with(&story, [(&[A], &[A]), (&[], &[A])]);
    ends_with(
        &[&story[..], std::slice::from_ref(&is_over)].concat(),
        [(&[A], &[]), (&[A], &[])],
    );
    // The waiters are served in the order in which they came.
    let waiting = [&held[..], &[wait_for_all(B, &[1, 0]), wait(C, 0)]].concat();
    let freed = [&waiting[..], &[release_all(A, &[0, 1])]].concat();
    ends_with(&freed, [(&[], &[B, C]), (&[], &[B])]);
    ends_with(
        &[&freed[..], &[is_over]].concat(),
        [(&[B], &[C]), (&[B], &[])],
    );
}
