//! Every order in which two or three owners, or a session, can get in each other's way, to a stated
//! depth.

use crate::circles::Standing;
use crate::foreign::Change;
use crate::twin::Waits;
use crate::walk::{
    SIZE_MAX, all_waits_end, depth, fetch_all, seen, walk, walk_to_moments, walk_where,
};
use crate::world::{Interruption, Named, OWNERS, Op, World, place};
use rlock_core::{INTEGER_MAX, Mode};

/// A hold's lease; a wait with a limit ends before it.
const LEASE_MS: i64 = 20;
const WAIT_MS: i64 = 8;

#[test]
fn two_owners_in_any_order() {
    let walked = walk(&alphabet(2), depth(7, 11), seen, None);
    walked.is_more_than(2_000);
}

#[test]
fn three_owners_in_any_order() {
    let walked = walk(&alphabet(3), depth(5, 7), seen, None);
    walked.is_more_than(3_500);
}

/// The server starts with its data, and grants nothing for a while.
#[test]
fn two_owners_after_a_start_in_any_order() {
    let mut alphabet = alphabet(2);
    alphabet.extend([
        Op::Start {
            delay_ms: LEASE_MS + WAIT_MS,
        },
        Op::SetDelay { delay_ms: 0 },
    ]);
    let seen = |world: &World| {
        let text = seen(world)?;
        Some(format!("{text} {}", world.twin.delay_left_ms))
    };
    let walked = walk(&alphabet, depth(6, 8), seen, None);
    walked.is_more_than(3_000);
}

#[test]
fn one_session_in_any_order() {
    let walked = walk(&alphabet_of_a_session(), depth(5, 7), seen, Some(fetch_all));
    walked.is_more_than(2_000);
}

/// Two sessions with holds and waits at two locks, some of them for both locks together, end in one
/// moment; and the first command to come after that, a timer that is cut short, or one that fires
/// between any two steps, is the first to see it.
#[test]
fn two_sessions_end_in_one_moment_in_any_order() {
    let walked = walk_to_moments(&[], &letters_of_two_sessions(), &moments(), depth(3, 5));
    walked.is_more_than(150);
}

/// The same where more than the end of the sessions is seen first: the key was touched by others,
/// or another session ends while a key is read.
#[test]
fn two_sessions_end_beside_other_changes_in_any_order() {
    let letters = letters_of_two_holders();
    let walked = walk_to_moments(&[], &letters, &moments_of_changes(), depth(3, 5));
    walked.is_more_than(50);
}

#[test]
fn two_locks_together_in_any_order() {
    let walked = walk(&alphabet_of_several(), depth(4, 6), seen, None);
    walked.is_more_than(2_000);
}

/// With the deadlock check on there is no state in which everybody waits for somebody: owners that
/// wait for nothing give their holds back, and so on until nobody waits.
#[test]
fn nobody_waits_for_ever_in_any_order() {
    let walked = walk(
        &alphabet_of_waits(),
        depth(5, 20),
        |world| Some(seen_of_waits(world)),
        Some(all_waits_end),
    );
    walked.is_more_than(1_000);
    // Where it is optimized the walk goes to the end: there is no further state.
    assert!(walked.is_complete || cfg!(debug_assertions));
    walked.has_refused(100);
}

/// The same with waits for both locks together. (Nobody gives back a lock that it waits for
/// together with others: it would stand behind the waiters that came before it.)
#[test]
fn nobody_waits_together_for_ever_in_any_order() {
    let together = |owner| Op::MultiAcquire {
        locks: vec![0, 1],
        owner,
        lease_ms: INTEGER_MAX,
        waits: Waits::Block(0),
        session: None,
        once: true,
    };
    let together = (0..OWNERS.len()).map(together);
    let alphabet: Vec<Op> = alphabet_of_waits().into_iter().chain(together).collect();
    let walked = walk_where(
        keeps_what_it_waits_for,
        &alphabet,
        depth(4, 6),
        |world| Some(seen_of_waits(world)),
        Some(all_waits_end),
    );
    walked.is_more_than(1_000);
    walked.has_refused(100);
}

/// Everything that can happen, to one lock.
fn alphabet(owners: usize) -> Vec<Op> {
    let lock = 0;
    let acquire = |owner, waits, once| Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: LEASE_MS,
        waits,
        session: None,
        once,
    };
    let of_owner = |owner| {
        let token = Named::No;
        [
            acquire(owner, Waits::No, false),
            acquire(owner, Waits::Block(0), false),
            acquire(owner, Waits::Block(WAIT_MS), true),
            Op::Release {
                lock,
                owner,
                mode: Mode::Plain,
                token,
                lease_ms: None,
            },
            Op::Renew {
                lock,
                owner,
                mode: Mode::Plain,
                lease_ms: LEASE_MS,
                token,
                session: None,
            },
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
        Op::Pass { ms: WAIT_MS },
        Op::Pass { ms: LEASE_MS + 1 },
        Op::PassDeadline { more_ms: 0 },
        Op::Deliver,
        Op::Foreign {
            lock,
            changes: vec![Change::Delete],
            told: true,
        },
        Op::Foreign {
            lock,
            changes: vec![Change::Delete],
            told: false,
        },
    ]);
    // The connection of each waiter, or of each client whose grant is under way, may close.
    ops.extend((0..SIZE_MAX).map(|client| Op::Disconnect { client }));
    ops
}

/// One session, two connections, two owners that wait for one lock through it or without it.
fn alphabet_of_a_session() -> Vec<Op> {
    let (lock, session, token) = (0, 0, Named::No);
    let acquire = |owner, waits, session, once| Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: LEASE_MS,
        waits,
        session,
        once,
    };
    let of_owner = |owner| {
        [
            acquire(owner, Waits::Queue(0), Some(session), false),
            Op::Release {
                lock,
                owner,
                mode: Mode::Plain,
                token,
                lease_ms: None,
            },
        ]
    };
    let events = |client, block_ms, grace_ms| Op::Events {
        session,
        client,
        block_ms,
        grace_ms,
        epoch: None,
        after: None,
    };
    let mut ops: Vec<Op> = (0..2).flat_map(of_owner).collect();
    ops.extend([
        events(0, Some(0), 0),
        events(1, Some(WAIT_MS), WAIT_MS),
        Op::Close { client: 0 },
        Op::Close { client: 1 },
        acquire(0, Waits::No, Some(session), false),
        acquire(0, Waits::Block(WAIT_MS), Some(session), true),
        acquire(1, Waits::Queue(WAIT_MS), Some(session), true),
        Op::Renew {
            lock,
            owner: 1,
            mode: Mode::Plain,
            lease_ms: LEASE_MS,
            token,
            session: Some(session),
        },
        Op::Cancel {
            lock,
            owner: 1,
            mode: None,
        },
        Op::Break { lock },
        Op::Deliver,
        Op::PassDeadline { more_ms: 0 },
        Op::Foreign {
            lock,
            changes: vec![Change::Delete],
            told: true,
        },
    ]);
    ops
}

fn both(owner: usize, waits: Waits, session: Option<usize>) -> Op {
    Op::MultiAcquire {
        locks: vec![0, 1],
        owner,
        lease_ms: LEASE_MS,
        waits,
        session,
        once: false,
    }
}

fn one(lock: usize, owner: usize, waits: Waits, session: Option<usize>) -> Op {
    Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: LEASE_MS,
        waits,
        session,
        once: false,
    }
}

/// The holds and waits that two sessions, and owners without one, can have when the sessions end.
fn letters_of_two_sessions() -> Vec<Op> {
    let (block, queue) = (Waits::Block(0), Waits::Queue(0));
    vec![
        one(0, 0, Waits::No, Some(0)),
        one(1, 0, Waits::No, Some(1)),
        one(1, 1, Waits::No, Some(0)),
        one(0, 0, Waits::No, None),
        one(0, 1, block, None),
        one(0, 2, block, None),
        one(0, 1, queue, Some(1)),
        both(0, block, None),
        both(1, queue, Some(0)),
        both(2, block, None),
    ]
}

/// The holds of two sessions, and the waits for these locks.
fn letters_of_two_holders() -> Vec<Op> {
    let block = Waits::Block(0);
    vec![
        one(0, 0, Waits::No, Some(0)),
        one(1, 0, Waits::No, Some(1)),
        one(0, 1, block, None),
        one(0, 2, block, None),
        both(0, block, None),
    ]
}

/// The sessions end, and others change the key of the first lock, or only touch it.
fn moments_of_changes() -> Vec<Vec<Op>> {
    let change = |change| Op::Foreign {
        lock: 0,
        changes: vec![change],
        told: true,
    };
    let taken = Change::Take {
        owner: 0,
        lease_ms: None,
    };
    let changes = [change(Change::Persist), change(taken)];
    let by = |client| Op::Interrupt {
        reads: 0,
        by: Interruption::Close(client),
    };
    let newcomer = || one(0, 1, Waits::No, None);
    let close = |client| Op::Close { client };
    let mut moments: Vec<Vec<Op>> = Vec::new();
    for (first, second) in [(0, 1), (1, 0)] {
        for change in &changes {
            moments.push(vec![close(first), change.clone()]);
            moments.push(vec![close(first), close(second), change.clone()]);
            moments.push(vec![close(first), change.clone(), newcomer()]);
        }
        moments.push(vec![close(first), by(second), newcomer()]);
    }
    let in_one_moment = |moment: Vec<Op>| {
        let moment = [Op::Multi].into_iter().chain(moment);
        moment.chain([Op::Exec]).collect()
    };
    moments.into_iter().map(in_one_moment).collect()
}

/// The sessions end, and the next operations are all that come before the timer.
fn moments() -> Vec<Vec<Op>> {
    let release = |lock, owner| Op::Release {
        lock,
        owner,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    };
    let commands = [
        None,
        Some(one(0, 0, Waits::No, None)),
        Some(one(1, 2, Waits::No, None)),
        Some(release(0, 0)),
        Some(Op::Break { lock: 0 }),
        Some(both(0, Waits::No, None)),
        Some(Op::MultiRelease {
            locks: vec![0, 1],
            owner: 0,
        }),
        Some(Op::MultiRelease {
            locks: vec![1, 0],
            owner: 0,
        }),
    ];
    moments_of(&commands, &[vec![0, 1], vec![1, 0], vec![1]])
}

/// These connections close, whether or not the timer comes between, and then a command comes.
fn moments_of(commands: &[Option<Op>], closed: &[Vec<usize>]) -> Vec<Vec<Op>> {
    let mut between = vec![None];
    between.extend([1, 2].map(|decisions| Some(Op::Tick { decisions })));
    between.push(Some(Op::ShortTurn { decisions: 0 }));
    between.push(Some(Op::ShortTurn { decisions: 1 }));
    let by = Interruption::Timer;
    between.extend([0, 1, 2].map(|reads| Some(Op::Interrupt { reads, by })));
    let mut moments = Vec::new();
    for closed in closed {
        for between in &between {
            for command in commands {
                let ends = closed.iter().map(|client| Op::Close { client: *client });
                let then = between.iter().chain(command).cloned();
                let moment = [Op::Multi].into_iter().chain(ends).chain(then);
                moments.push(moment.chain([Op::Exec]).collect());
            }
        }
    }
    moments
}

/// Two owners that want two locks, together or one by one.
fn alphabet_of_several() -> Vec<Op> {
    let both = || vec![0, 1];
    let acquire = |owner, lock| Op::Acquire {
        lock,
        owner,
        mode: Mode::Plain,
        lease_ms: LEASE_MS,
        waits: Waits::Block(0),
        session: None,
        once: false,
    };
    let together = |owner, locks, waits, once| Op::MultiAcquire {
        locks,
        owner,
        lease_ms: LEASE_MS,
        waits,
        session: None,
        once,
    };
    let release = |owner, lock| Op::Release {
        lock,
        owner,
        mode: Mode::Plain,
        token: Named::No,
        lease_ms: None,
    };
    let of_owner = |owner| {
        [
            acquire(owner, 0),
            acquire(owner, 1),
            together(owner, both(), Waits::Block(0), false),
            together(owner, vec![1, 0], Waits::Block(WAIT_MS), true),
            release(owner, 0),
            release(owner, 1),
            Op::MultiRelease {
                locks: both(),
                owner,
            },
            Op::MultiRenew {
                locks: both(),
                owner,
                lease_ms: 2 * LEASE_MS,
                session: None,
            },
            Op::Cancel {
                lock: 1,
                owner,
                mode: None,
            },
        ]
    };
    let changed = |change, told| Op::Foreign {
        lock: 1,
        changes: vec![change],
        told,
    };
    let mut ops: Vec<Op> = (0..2).flat_map(of_owner).collect();
    ops.extend([
        Op::Break { lock: 0 },
        Op::PassDeadline { more_ms: 0 },
        Op::Deliver,
        changed(Change::Delete, true),
        changed(Change::Delete, false),
        changed(Change::SetText, true),
    ]);
    ops.extend((0..2).map(|client| Op::Disconnect { client }));
    ops
}

/// Three owners that wait for two locks.
fn alphabet_of_waits() -> Vec<Op> {
    let of_both = |owner| {
        (0..2).flat_map(move |lock| {
            [
                // With ONCE an owner that waits for a lock does not wait for it twice.
                Op::Acquire {
                    lock,
                    owner,
                    mode: Mode::Plain,
                    lease_ms: INTEGER_MAX,
                    waits: Waits::Block(0),
                    session: None,
                    once: true,
                },
                Op::Release {
                    lock,
                    owner,
                    mode: Mode::Plain,
                    token: Named::No,
                    lease_ms: None,
                },
                Op::Cancel {
                    lock,
                    owner,
                    mode: None,
                },
            ]
        })
    };
    let ops = (0..OWNERS.len()).flat_map(of_both);
    ops.chain((0..2).map(|lock| Op::Break { lock })).collect()
}

/// Whether the operation takes no lock from an owner that waits for it together with others.
fn keeps_what_it_waits_for(world: &World, op: &Op) -> bool {
    let (Op::Release { lock, .. } | Op::Break { lock }) = op else {
        return true;
    };
    let graph = world.twin.graph();
    let holders = graph.holders.get(&place(*lock));
    let mut line = graph.lines.get(&place(*lock)).into_iter().flatten();
    let holds = |of: &Standing| holders.is_some_and(|holders| holders.contains(&of.owner));
    !line.any(|of| of.joint.is_some() && holds(of))
}

fn seen_of_waits(world: &World) -> String {
    let graph = world.twin.graph();
    let line = |line: &Vec<Standing>| {
        let one = |of: &Standing| (of.owner.clone(), of.joint.is_some());
        line.iter().map(one).collect::<Vec<_>>()
    };
    let lines: Vec<_> = graph.lines.iter().map(|(at, of)| (at, line(of))).collect();
    format!("{:?} {lines:?}", graph.holders)
}
