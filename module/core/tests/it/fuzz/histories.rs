//! Histories: the core beside the twins, with every invariant looked at after each step. The first
//! byte says whether anything happens, or sessions end in one moment again and again; and whether
//! commands for sessions ask to be told when their locks are wanted.

use super::choices::Choices;
use crate::foreign::Change;
use crate::keyspace::Reading;
use crate::life::{After, Epoch};
use crate::twin::Waits;
use crate::walk::listens;
use crate::world::{Interruption, Named, OWNERS, Op, SESSIONS, TOGETHER, USERS, replay};
use rlock_core::{INTEGER_MAX, Mode};

/// More would make each run slow without telling more.
const STEPS: usize = 60;

const COUNTS: [&str; 14] = [
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
];

/// Plain locks, sessions and several locks at once: whatever happens, core and twin agree.
pub fn histories(data: &[u8]) {
    history_of(data, endings, |choices, history| history.push(op(choices)));
}

/// The same of read-write locks, among any hands: Redisson's and others.
pub fn read_write_histories(data: &[u8]) {
    history_of(data, read_write_endings, |choices, history| {
        history.push(read_write_op(choices));
    });
}

/// The same of all kinds at the same names.
pub fn mixed_histories(data: &[u8]) {
    let endings = |choices: &mut Choices<'_>, history: &mut Vec<Op>| match choices.below(2) {
        0 => endings(choices, history),
        _ => read_write_endings(choices, history),
    };
    history_of(data, endings, |choices, history| {
        history.push(match choices.below(2) {
            0 => op(choices),
            _ => read_write_op(choices),
        });
    });
}

/// A history of one or the other.
fn history_of(
    data: &[u8],
    endings: impl Fn(&mut Choices<'_>, &mut Vec<Op>),
    any: impl Fn(&mut Choices<'_>, &mut Vec<Op>),
) {
    let mut choices = Choices::new(data);
    let mut history = Vec::new();
    // Whether sessions end in one moment, and whether they ask to be told when their locks are
    // wanted.
    let kind = choices.below(4);
    let (is_of_endings, asks) = (kind % 2 == 1, kind >= 2);
    history.extend(asks.then_some(Op::AskIfWanted { asks }));
    if is_of_endings {
        history.extend([0, 1].map(listens));
    }
    while !choices.are_over() && history.len() < STEPS {
        if is_of_endings {
            endings(&mut choices, &mut history);
        } else {
            any(&mut choices, &mut history);
        }
    }
    agree(&history);
}

/// Core and twin, whichever way the keys are read: a short look is enough only where nobody
/// shortens the leases of others.
fn agree(history: &[Op]) {
    let mut ops = history.iter();
    let is_alone = !ops.any(|op| matches!(op, Op::Foreign { .. }));
    let short = is_alone.then_some(Reading::Short);
    for how in [Reading::All].into_iter().chain(short) {
        if let Err(wrong) = replay(history, how) {
            panic!("{wrong}");
        }
    }
}

fn lease(choices: &mut Choices<'_>) -> i64 {
    choices.of(&[50, 1, 7, 12, 800, 4000, INTEGER_MAX])
}

fn wait(choices: &mut Choices<'_>) -> i64 {
    choices.of(&[0, 1, 7, 60, 2500])
}

fn step_ms(choices: &mut Choices<'_>) -> i64 {
    choices.of(&[-5000, -40, -3, -1, 0, 1, 2, 45, 4000])
}

/// How long to wait, and the session that is named.
fn waits(choices: &mut Choices<'_>) -> (Option<usize>, Waits) {
    let session = choices.below(SESSIONS.len());
    match choices.below(5) {
        0 => (None, Waits::Block(wait(choices))),
        1 => (Some(session), Waits::Queue(wait(choices))),
        2 => (Some(session), Waits::Block(wait(choices))),
        3 => (Some(session), Waits::No),
        _ => (None, Waits::No),
    }
}

fn locks_together(choices: &mut Choices<'_>) -> Vec<usize> {
    (0..=choices.below(4))
        .map(|_| choices.of(&TOGETHER))
        .collect()
}

fn named(choices: &mut Choices<'_>) -> Named {
    choices.of(&[Named::No, Named::Present, Named::Stale])
}

fn op(choices: &mut Choices<'_>) -> Op {
    // Mostly one lock, so that owners meet.
    let lock = choices.of(&[0, 0, 0, 1, 2, 3]);
    let owner = choices.below(OWNERS.len());
    match choices.below(16) {
        0..4 => {
            let (session, waits) = waits(choices);
            Op::Acquire {
                lock,
                owner,
                mode: Mode::Plain,
                lease_ms: lease(choices),
                waits,
                session,
                once: choices.one_in(3),
            }
        }
        4 => Op::Release {
            lock,
            owner,
            mode: Mode::Plain,
            token: named(choices),
            lease_ms: choices.maybe(lease),
        },
        5 => Op::Renew {
            lock,
            owner,
            mode: Mode::Plain,
            lease_ms: lease(choices),
            token: named(choices),
            session: choices.maybe(|choices| choices.below(SESSIONS.len())),
        },
        6 => {
            let (session, waits) = waits(choices);
            Op::MultiAcquire {
                locks: locks_together(choices),
                owner,
                lease_ms: lease(choices),
                waits,
                session,
                once: choices.one_in(3),
            }
        }
        7 => Op::MultiRelease {
            locks: locks_together(choices),
            owner,
        },
        8 => Op::MultiRenew {
            locks: locks_together(choices),
            owner,
            lease_ms: lease(choices),
            session: choices.maybe(|choices| choices.below(SESSIONS.len())),
        },
        9 => Op::Events {
            session: choices.below(SESSIONS.len()),
            client: choices.below(3),
            block_ms: choices.maybe(wait),
            grace_ms: choices.of(&[0, 30, 3000]),
            epoch: epoch(choices),
            after: heard(choices),
        },
        10 => Op::Foreign {
            lock,
            changes: vec![change(choices)],
            told: !choices.one_in(5),
        },
        11 => Op::Pass {
            ms: choices.of(&[0, 1, 6, 20, 49, 50, 51, 70, 900, 2600]),
        },
        12 => Op::PassDeadline {
            more_ms: choices.of(&[0, 1, 2]),
        },
        13 => Op::Disconnect {
            client: choices.below(12),
        },
        _ => seldom(lock, owner, choices),
    }
}

fn interruption(choices: &mut Choices<'_>) -> Interruption {
    let client = choices.below(6);
    match choices.below(3) {
        0 => Interruption::Timer,
        1 => Interruption::Close(client % 3),
        _ => Interruption::Disconnect(client),
    }
}

fn seldom(lock: usize, owner: usize, choices: &mut Choices<'_>) -> Op {
    let client = choices.below(3);
    match choices.below(17) {
        0 => Op::Cancel {
            lock,
            owner,
            mode: choices.maybe(|choices| choices.of(&[Mode::Plain, Mode::Read])),
        },
        1 => Op::Break { lock },
        2 => Op::Close { client },
        3 => Op::Unblock { client },
        4 => Op::Deliver,
        5 => Op::Multi,
        6 => Op::Exec,
        7 => Op::Flush {
            db: choices.maybe(|_| 0),
        },
        8 => Op::SwapDatabases,
        9 => choices
            .of(&[Demoted::Now, Demoted::NoMore(0), Demoted::NoMore(10_000)])
            .op(),
        10 => Op::Tick {
            decisions: choices.of(&[1, 2, 3]),
        },
        11 => Op::Interrupt {
            reads: choices.below(4),
            by: interruption(choices),
        },
        12 => Op::As {
            user: choices.below(USERS.len()),
        },
        13 => Op::Allow {
            sessions: choices.of(&[10, 2, 1, 0]),
            events: choices.of(&[1000, 3, 1, 0]),
            out_of_memory: choices.one_in(5),
        },
        14 => Op::Bind {
            session: choices.below(SESSIONS.len()),
            client,
            epoch: choices.of(&[Epoch::Larger, Epoch::Larger, Epoch::Equal, Epoch::Smaller]),
        },
        15 => Op::By {
            client: choices.maybe(|_| client),
        },
        _ => Op::StepClock {
            ms: step_ms(choices),
        },
    }
}

fn epoch(choices: &Choices<'_>) -> Option<Epoch> {
    let mut choices = choices.again();
    let epochs = [Epoch::Larger, Epoch::Equal, Epoch::Smaller];
    choices.one_in(4).then(|| choices.of(&epochs))
}

/// The events that a client says it has heard.
fn heard(choices: &Choices<'_>) -> Option<After> {
    let mut choices = choices.again();
    let seq = u64::try_from(choices.below(6)).unwrap();
    match choices.below(6) {
        0 => Some(After::Told),
        1 | 2 => Some(After::Seq(seq)),
        3 => Some(After::OtherLife(seq)),
        _ => None,
    }
}

#[derive(Clone, Copy)]
enum Demoted {
    Now,
    NoMore(i64),
}

impl Demoted {
    fn op(self) -> Op {
        match self {
            Self::Now => Op::Demote,
            Self::NoMore(guard_ms) => Op::StartTokens { guard_ms },
        }
    }
}

fn change(choices: &mut Choices<'_>) -> Change {
    let owner = choices.below(OWNERS.len());
    match choices.below(10) {
        0 => Change::Delete,
        1 => Change::SetText,
        2 => Change::Take {
            owner,
            lease_ms: choices.maybe(lease),
        },
        3 => Change::SetCount {
            owner,
            value: choices.of(&COUNTS),
        },
        4 => Change::SetFence {
            value: choices.of(&["t1", "t77", "7", "t0", "t-4", "t", "", "t07", "T7"]),
        },
        5 => Change::SetMode { value: "read" },
        6 => Change::TakeToWrite {
            lease_ms: choices.maybe(lease),
        },
        7 => Change::RemoveCount { owner },
        8 => Change::Expire {
            ms: choices.of(&[0, 1, 49, 50, 51, 700, 1999]),
        },
        _ => Change::Persist,
    }
}

// --- Sessions that end in one moment -------------------------------------------------------------

fn endings(choices: &mut Choices<'_>, history: &mut Vec<Op>) {
    let kind = choices.below(7);
    if kind == 2 {
        return asked_for_in_the_moment(choices, history);
    }
    if kind > 2 {
        return history.push(belongs_to_a_session(choices));
    }
    if kind == 0 {
        // A session has a lock for which two others wait.
        let (lock, holder) = (choices.of(&[0, 0, 1]), choices.below(OWNERS.len()));
        for after in 0..OWNERS.len() {
            let (session, waits) = match after {
                0 => (Some(choices.below(SESSIONS.len())), Waits::No),
                _ => of_two_ways(choices),
            };
            history.push(Op::Acquire {
                lock,
                owner: (holder + after) % OWNERS.len(),
                mode: Mode::Plain,
                lease_ms: 800,
                waits,
                session,
                once: false,
            });
        }
    }
    history.push(Op::Multi);
    history.extend(closed(choices).map(|client| Op::Close { client }));
    for _ in 0..choices.below(4) {
        history.push(meanwhile(choices));
    }
    history.push(Op::Exec);
    history.extend([0, 1].map(listens));
}

/// One has a lock and waits for it together with another, which a session has. The session ends,
/// and a command about both comes before anything else has seen that.
fn asked_for_in_the_moment(choices: &mut Choices<'_>, history: &mut Vec<Op>) {
    let (lock, session) = (choices.below(2), choices.below(SESSIONS.len()));
    let (holder, lease_ms, block) = (choices.below(OWNERS.len()), 800, Waits::Block(0));
    let acquire = |lock, after, waits, session| Op::Acquire {
        lock,
        owner: (holder + after) % OWNERS.len(),
        mode: Mode::Plain,
        lease_ms,
        waits,
        session,
        once: false,
    };
    let (owner, locks) = (holder, vec![lock, 1 - lock]);
    let together = |waits| Op::MultiAcquire {
        locks: vec![lock, 1 - lock],
        owner,
        lease_ms,
        waits,
        session: None,
        once: false,
    };
    history.extend([
        acquire(lock, 0, Waits::No, None),
        acquire(1 - lock, 1, Waits::No, Some(session)),
        together(block),
        acquire(lock, 2, block, None),
        Op::Multi,
        Op::Close { client: session },
    ]);
    history.push(match choices.below(3) {
        0 => Op::MultiRelease { locks, owner },
        1 => together(Waits::No),
        _ => Op::MultiRenew {
            locks,
            owner,
            lease_ms,
            session: None,
        },
    });
    history.extend([Op::Exec, listens(session)]);
}

/// Which connections close.
fn closed(choices: &mut Choices<'_>) -> impl Iterator<Item = usize> + use<> {
    let (first, both) = (choices.below(2), !choices.one_in(4));
    [first].into_iter().chain(both.then_some(1 - first))
}

/// How to wait for as long as it takes.
fn of_two_ways(choices: &mut Choices<'_>) -> (Option<usize>, Waits) {
    match choices.below(3) {
        0 => (Some(choices.below(SESSIONS.len())), Waits::Queue(0)),
        _ => (None, Waits::Block(0)),
    }
}

fn belongs_to_a_session(choices: &mut Choices<'_>) -> Op {
    let (lock, owner) = (choices.of(&[0, 0, 1]), choices.below(OWNERS.len()));
    let locks = vec![lock, 1 - lock];
    match choices.below(9) {
        0..4 => {
            let (session, waits) = waits(choices);
            Op::Acquire {
                lock,
                owner,
                mode: Mode::Plain,
                lease_ms: 800,
                waits,
                session,
                once: choices.one_in(8),
            }
        }
        4 | 5 => {
            let (session, waits) = waits(choices);
            Op::MultiAcquire {
                locks,
                owner,
                lease_ms: 800,
                waits,
                session,
                once: choices.one_in(8),
            }
        }
        6 => Op::Release {
            lock,
            owner,
            mode: Mode::Plain,
            token: Named::No,
            lease_ms: None,
        },
        7 => Op::MultiRelease { locks, owner },
        _ => choices.of(&[Passing::Delivered, Passing::Ms(7)]).op(),
    }
}

#[derive(Clone, Copy)]
enum Passing {
    Delivered,
    Ms(i64),
}

impl Passing {
    fn op(self) -> Op {
        match self {
            Self::Delivered => Op::Deliver,
            Self::Ms(ms) => Op::Pass { ms },
        }
    }
}

/// An operation that comes before the timer, once sessions have ended.
fn meanwhile(choices: &mut Choices<'_>) -> Op {
    let lock = choices.below(2);
    let change = match choices.below(9) {
        0..4 => return belongs_to_a_session(choices),
        4 => {
            let (reads, by) = (choices.below(4), interruption(choices));
            return Op::Interrupt { reads, by };
        }
        5 => {
            let decisions = choices.of(&[1, 2, 3]);
            return Op::Tick { decisions };
        }
        6 => return Op::Break { lock },
        7 => change(choices),
        // Queue and holds of the lock are looked at, and nothing else has changed.
        _ => Change::Persist,
    };
    let told = true;
    Op::Foreign {
        lock,
        changes: vec![change],
        told,
    }
}

// --- Read-write locks ----------------------------------------------------------------------------

fn read_write_endings(choices: &mut Choices<'_>, history: &mut Vec<Op>) {
    let kind = choices.below(6);
    if kind > 1 {
        return history.push(read_write_belongs_to_a_session(choices));
    }
    if kind == 0 {
        // One writes for one session and reads for the other, and two wait.
        let (holder, session) = (choices.below(3), choices.below(2));
        let writes = (0, Mode::Write, Some(session), Waits::No);
        let mut asked = vec![writes, (0, Mode::Read, Some(1 - session), Waits::No)];
        for after in [1, 2] {
            let mode = choices.of(&[Mode::Write, Mode::Write, Mode::Read]);
            let (session, waits) = of_two_ways(choices);
            asked.push((after, mode, session, waits));
        }
        for (after, mode, session, waits) in asked {
            history.push(Op::Acquire {
                lock: 0,
                owner: (holder + after) % OWNERS.len(),
                mode,
                lease_ms: 800,
                waits,
                session,
                once: false,
            });
        }
    }
    history.push(Op::Multi);
    history.extend(closed(choices).map(|client| Op::Close { client }));
    for _ in 0..choices.below(4) {
        history.push(match choices.below(8) {
            0..4 => read_write_belongs_to_a_session(choices),
            4 => Op::Interrupt {
                reads: choices.below(4),
                by: interruption(choices),
            },
            5 => Op::Tick {
                decisions: choices.of(&[1, 2, 3]),
            },
            6 => Op::Break { lock: 0 },
            // Queue and holds of the lock are looked at, and nothing else has changed.
            _ => Op::Foreign {
                lock: 0,
                changes: vec![Change::Persist],
                told: true,
            },
        });
    }
    history.push(Op::Exec);
    history.extend([0, 1].map(listens));
}

fn read_write_belongs_to_a_session(choices: &mut Choices<'_>) -> Op {
    let (lock, owner) = (0, choices.below(OWNERS.len()));
    let mode = choices.of(&[Mode::Read, Mode::Write]);
    match choices.below(7) {
        0..5 => {
            let (session, waits) = waits(choices);
            Op::Acquire {
                lock,
                owner,
                mode,
                lease_ms: 800,
                waits,
                session,
                once: choices.one_in(8),
            }
        }
        5 => Op::Release {
            lock,
            owner,
            mode,
            token: Named::No,
            lease_ms: None,
        },
        _ => Op::Deliver,
    }
}

fn read_write_op(choices: &mut Choices<'_>) -> Op {
    let lock = choices.of(&[0, 0, 0, 1]);
    let owner = choices.below(OWNERS.len());
    let mode = choices.of(&[
        Mode::Read,
        Mode::Write,
        Mode::Read,
        Mode::Write,
        Mode::Plain,
    ]);
    match choices.below(14) {
        0..4 => {
            let (session, waits) = waits(choices);
            Op::Acquire {
                lock,
                owner,
                mode,
                lease_ms: lease(choices),
                waits,
                session,
                once: choices.one_in(4),
            }
        }
        4 | 5 => Op::Release {
            lock,
            owner,
            mode,
            token: named(choices),
            lease_ms: choices.maybe(lease),
        },
        6 => Op::Renew {
            lock,
            owner,
            mode,
            lease_ms: lease(choices),
            token: named(choices),
            session: choices.maybe(|choices| choices.below(SESSIONS.len())),
        },
        7 => Op::Events {
            session: choices.below(SESSIONS.len()),
            client: choices.below(3),
            block_ms: None,
            grace_ms: choices.of(&[0, 30]),
            epoch: epoch(choices),
            after: heard(choices),
        },
        8 | 9 => Op::Foreign {
            lock,
            changes: (0..=choices.below(3))
                .map(|_| read_write_change(choices))
                .collect(),
            told: !choices.one_in(5),
        },
        10 => Op::Pass {
            ms: choices.of(&[0, 1, 6, 20, 30, 49, 50, 51, 70, 900, 2600]),
        },
        11 => Op::PassDeadline {
            more_ms: choices.of(&[0, 1, 2]),
        },
        12 => Op::Disconnect {
            client: choices.below(9),
        },
        _ => match choices.below(11) {
            0 => Op::Cancel {
                lock,
                owner,
                mode: choices
                    .again()
                    .maybe(|choices| choices.of(&[Mode::Read, Mode::Write])),
            },
            1 => Op::Break { lock },
            2 => Op::Close {
                client: choices.below(3),
            },
            3 => Op::Deliver,
            4 => Op::Failover {
                guard_ms: choices.of(&[0, 3000]),
            },
            5 | 6 => Op::Multi,
            7 => Op::Exec,
            8 => Op::Tick {
                decisions: choices.of(&[1, 2, 3]),
            },
            9 => Op::Interrupt {
                reads: choices.below(4),
                by: interruption(choices),
            },
            _ => Op::StepClock {
                ms: step_ms(choices),
            },
        },
    }
}

fn read_write_change(choices: &mut Choices<'_>) -> Change {
    let owner = choices.below(OWNERS.len());
    let number = choices.of(&[1, 2, 3]);
    let lease_ms = choices.of(&[9, 30, 70]);
    let value = choices.of(&["1", "2", "3", "0", "-1", "01", "", "one"]);
    match choices.below(23) {
        0 => Change::Read { owner, lease_ms },
        1 => Change::Unread { owner },
        2 => Change::Write { owner, lease_ms },
        3 => Change::Unwrite { owner },
        4 => Change::RenewRead { owner },
        5 => Change::RenewWrite { owner },
        6 => Change::ForceUnread,
        7 => Change::ForceUnwrite,
        8 => Change::Delete,
        9 => Change::Rename,
        10 => Change::Persist,
        11 => Change::Expire {
            ms: choices.of(&[0, 1, 12, 49, 50, 51, 99]),
        },
        12 => Change::SetText,
        13 => Change::Take {
            owner,
            lease_ms: choices.maybe(lease),
        },
        14 => Change::DeleteTimeout { owner, number },
        15 => Change::SetTimeout {
            owner,
            number,
            value: choices.of(&["1", "0", "77", "t9", "", "-3"]),
            ms: choices.of(&[0, 1, 12, 50, 89]),
        },
        16 => Change::SetMode {
            value: choices.of(&["read", "write", "READ", ""]),
        },
        17 => Change::RemoveMode,
        18 => Change::SetCount { owner, value },
        19 => Change::SetWriteCount {
            owner,
            value: choices.of(&[value, "1:t7", "2:t7", "1:t0", ":t7", "1:7"]),
        },
        20 => Change::RemoveCount { owner },
        21 => Change::PersistTimeout { owner, number },
        _ => Change::RemoveWriteCount { owner },
    }
}
