//! Every order in which two or three owners, or a session, can get in each other's way at a
//! read-write lock, to a stated depth.

use crate::foreign::Change;
use crate::keyspace::Reading;
use crate::twin::{Reply, Waits};
use crate::walk::{all_waits_end, depth, fetch_all, seen, walk, walk_to_moments};
use crate::world::{Interruption, Named, OWNERS, Op, replay};
use rlock_core::Mode;

/// A hold's lease; a wait with a limit ends before it.
const LEASE_MS: i64 = 20;
const SHORT_MS: i64 = 6;
const WAIT_MS: i64 = 8;

#[test]
fn two_owners_in_any_order() {
    let walked = walk(&alphabet(2), depth(4, 5), seen, None);
    walked.is_more_than(1_500);
}

#[test]
fn three_owners_in_any_order() {
    let walked = walk(&alphabet_of_three(), depth(4, 6), seen, None);
    walked.is_more_than(1_500);
}

#[test]
fn one_session_in_any_order() {
    let walked = walk(&alphabet_of_a_session(), depth(4, 5), seen, Some(fetch_all));
    walked.is_more_than(700);
}

/// Two sessions, which have holds of both modes and wait, end in one moment; and the first command
/// to come after that, a timer that is cut short, or one that fires between any two steps, is the
/// first to see it.
#[test]
fn two_sessions_end_in_one_moment_in_any_order() {
    let letters = letters_of_two_sessions();
    let mut between = vec![None];
    between.extend([1, 2].map(|decisions| Some(Op::Tick { decisions })));
    between.extend([0, 1].map(|decisions| Some(Op::ShortTurn { decisions })));
    let by = Interruption::Timer;
    between.extend([0, 1, 2].map(|reads| Some(Op::Interrupt { reads, by })));
    let walked = walk_to_moments(&[], &letters, &moments(&between), depth(3, 5));
    walked.is_more_than(200);
}

/// One that writes for one session and reads for the other, so that two holds end at one lock.
#[test]
fn a_writer_that_reads_ends_with_both_sessions_in_any_order() {
    let both = [
        of_session(0, 0, Mode::Write, Waits::No),
        of_session(1, 0, Mode::Read, Waits::No),
    ];
    let touched = Op::Foreign {
        lock: 0,
        changes: vec![Change::Persist],
        told: true,
    };
    let between = [None, Some(Op::Tick { decisions: 1 }), Some(touched)];
    let letters = letters_of_two_sessions();
    let walked = walk_to_moments(&both, &letters, &moments(&between), depth(2, 3));
    walked.is_more_than(30);
}

/// With the deadlock check on there is no state in which everybody waits for somebody: owners that
/// wait for nothing give their holds back, and so on until nobody waits. One lock is a read-write
/// lock, the other a plain one.
#[test]
fn nobody_waits_for_ever_in_any_order() {
    let walked = walk(&alphabet_of_waits(), depth(4, 6), seen, Some(all_waits_end));
    walked.is_more_than(1_500);
    walked.has_refused(100);
}

fn acquire(lock: usize, owner: usize, mode: Mode, lease_ms: i64, waits: Waits) -> Op {
    Op::Acquire {
        lock,
        owner,
        mode,
        lease_ms,
        waits,
        session: None,
        once: false,
    }
}

fn release(lock: usize, owner: usize, mode: Mode) -> Op {
    Op::Release {
        lock,
        owner,
        mode,
        token: Named::No,
        lease_ms: None,
    }
}

/// Everything that can happen to one lock.
fn alphabet(owners: usize) -> Vec<Op> {
    let lock = 0;
    let of_owner = |owner| {
        let renew = |mode, lease_ms| Op::Renew {
            lock,
            owner,
            mode,
            lease_ms,
            token: Named::No,
            session: None,
        };
        [
            acquire(lock, owner, Mode::Read, SHORT_MS, Waits::No),
            acquire(lock, owner, Mode::Read, LEASE_MS, Waits::Block(0)),
            acquire(lock, owner, Mode::Write, LEASE_MS, Waits::Block(WAIT_MS)),
            release(lock, owner, Mode::Read),
            release(lock, owner, Mode::Write),
            renew(Mode::Read, SHORT_MS),
            renew(Mode::Write, SHORT_MS),
            Op::Cancel {
                lock,
                owner,
                mode: None,
            },
        ]
    };
    let mut ops: Vec<Op> = (0..owners).flat_map(of_owner).collect();
    ops.extend([
        Op::Break { lock },
        Op::Pass { ms: SHORT_MS + 1 },
        Op::PassDeadline { more_ms: 0 },
    ]);
    ops.extend((0..2).map(|client| Op::Disconnect { client }));
    ops
}

/// Three owners that wait in the queue, one of them for the plain kind too.
fn alphabet_of_three() -> Vec<Op> {
    let lock = 0;
    let of_owner = |owner| {
        [
            acquire(lock, owner, Mode::Read, LEASE_MS, Waits::Block(0)),
            acquire(lock, owner, Mode::Write, SHORT_MS, Waits::Block(0)),
            release(lock, owner, Mode::Read),
            release(lock, owner, Mode::Write),
        ]
    };
    let mut ops: Vec<Op> = (0..OWNERS.len()).flat_map(of_owner).collect();
    ops.extend([
        acquire(lock, 0, Mode::Plain, SHORT_MS, Waits::Block(0)),
        Op::Cancel {
            lock,
            owner: 1,
            mode: None,
        },
        Op::PassDeadline { more_ms: 0 },
    ]);
    ops
}

/// One session, two owners that wait for one lock through it or hold the lock in it.
fn alphabet_of_a_session() -> Vec<Op> {
    let (lock, session) = (0, 0);
    let of_session = |owner, mode, lease_ms, waits, once| Op::Acquire {
        lock,
        owner,
        mode,
        lease_ms,
        waits,
        session: Some(session),
        once,
    };
    let events = |client, grace_ms| Op::Events {
        session,
        client,
        block_ms: None,
        grace_ms,
        epoch: None,
        after: None,
    };
    let queue = Waits::Queue(0);
    vec![
        events(0, 0),
        events(1, WAIT_MS),
        of_session(0, Mode::Read, SHORT_MS, queue, false),
        of_session(0, Mode::Write, LEASE_MS, queue, false),
        of_session(1, Mode::Read, LEASE_MS, queue, true),
        of_session(1, Mode::Write, LEASE_MS, Waits::Queue(WAIT_MS), true),
        acquire(lock, 2, Mode::Read, SHORT_MS, Waits::No),
        release(lock, 0, Mode::Read),
        release(lock, 0, Mode::Write),
        release(lock, 1, Mode::Write),
        Op::Renew {
            lock,
            owner: 2,
            mode: Mode::Read,
            lease_ms: LEASE_MS,
            token: Named::No,
            session: Some(session),
        },
        Op::Close { client: 0 },
        Op::Close { client: 1 },
        Op::Break { lock },
        Op::PassDeadline { more_ms: 0 },
    ]
}

fn of_session(session: usize, owner: usize, mode: Mode, waits: Waits) -> Op {
    Op::Acquire {
        lock: 0,
        owner,
        mode,
        lease_ms: LEASE_MS,
        waits,
        session: Some(session),
        once: false,
    }
}

/// The holds and waits that two sessions, and owners without one, can have when the sessions end.
fn letters_of_two_sessions() -> Vec<Op> {
    let (block, queue) = (Waits::Block(0), Waits::Queue(0));
    vec![
        of_session(0, 0, Mode::Write, Waits::No),
        of_session(1, 0, Mode::Read, Waits::No),
        of_session(1, 1, Mode::Read, queue),
        of_session(0, 2, Mode::Write, queue),
        acquire(0, 1, Mode::Write, LEASE_MS, block),
        acquire(0, 2, Mode::Read, LEASE_MS, block),
        acquire(0, 2, Mode::Write, LEASE_MS, block),
        acquire(0, 1, Mode::Read, LEASE_MS, block),
        acquire(0, 0, Mode::Read, LEASE_MS, Waits::No),
        Op::Deliver,
    ]
}

/// The sessions end, and the next operations are all that come before the timer.
fn moments(between: &[Option<Op>]) -> Vec<Vec<Op>> {
    let commands = [
        None,
        Some(acquire(0, 0, Mode::Read, LEASE_MS, Waits::No)),
        Some(acquire(0, 0, Mode::Write, LEASE_MS, Waits::No)),
        Some(acquire(0, 2, Mode::Write, LEASE_MS, Waits::No)),
        Some(acquire(0, 1, Mode::Read, LEASE_MS, Waits::No)),
        Some(release(0, 0, Mode::Write)),
        Some(release(0, 0, Mode::Read)),
        Some(Op::Break { lock: 0 }),
    ];
    let mut moments = Vec::new();
    for closed in [&[0, 1][..], &[1, 0], &[0]] {
        for between in between {
            for command in &commands {
                let ends = closed.iter().map(|client| Op::Close { client: *client });
                let then = between.iter().chain(command).cloned();
                let moment = [Op::Multi].into_iter().chain(ends).chain(then);
                moments.push(moment.chain([Op::Exec]).collect());
            }
        }
    }
    moments
}

/// Three owners that wait for a read-write lock and a plain one.
fn alphabet_of_waits() -> Vec<Op> {
    // With ONCE an owner that waits for a lock does not wait for it twice.
    let wait = |lock, owner, mode| Op::Acquire {
        lock,
        owner,
        mode,
        lease_ms: 1_000_000,
        waits: Waits::Block(0),
        session: None,
        once: true,
    };
    let of_owner = |owner| {
        [
            wait(0, owner, Mode::Read),
            wait(0, owner, Mode::Write),
            wait(1, owner, Mode::Plain),
            release(0, owner, Mode::Read),
            release(0, owner, Mode::Write),
            release(1, owner, Mode::Plain),
            Op::Cancel {
                lock: 0,
                owner,
                mode: None,
            },
        ]
    };
    (0..OWNERS.len()).flat_map(of_owner).collect()
}

/// A short history of the walk: two readers wait for a writer, and both are granted.
#[test]
fn the_walk_meets_what_it_is_for() {
    let lock = 0;
    let history = [
        acquire(lock, 0, Mode::Write, LEASE_MS, Waits::No),
        acquire(lock, 1, Mode::Read, LEASE_MS, Waits::Block(0)),
        acquire(lock, 2, Mode::Read, LEASE_MS, Waits::Block(0)),
    ];
    let mut world = replay(&history, Reading::Short).unwrap();
    assert_eq!(world.line(lock).len(), 2);
    let left = world.step(&release(lock, 0, Mode::Write)).unwrap();
    assert_eq!(left, Reply::Number(0));
    assert_eq!(world.line(lock).len(), 0);
}
