//! Small programs. Each is tried with every fault at every step.
//!
//! Each is a schedule that is written down and not drawn: one or two processes, one or two locks,
//! and about a dozen messages. Nothing goes wrong in most of them by themselves.

use std::time::Duration;

use crate::hands::{Ahead, Before};
use crate::listens::Listens;
use crate::moves::ByKeys;
use crate::nodes::Clustered;
use crate::permits::{Asked, SEMAPHORES, SetLimit};
use crate::schedule::{
    Client, End, Fault, FaultKind, Mode, Owning, Schedule, Small, Step, Task, Verb,
};
use crate::sentinels::{Failover, Old, Watched};

/// A program and its story.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// How it is called.
    pub name: &'static str,
    /// The course of the program without a fault.
    pub story: &'static str,
    /// The program.
    pub schedule: Schedule,
}

/// All of them.
pub fn all() -> Vec<Scenario> {
    let mut all = alone();
    all.extend(of_leases());
    all.extend(of_two());
    all.extend(of_who_is_wanted());
    all.extend(of_readers());
    all.extend(of_several());
    all.extend(of_permits());
    all.extend(elsewhere());
    all.push(in_line());
    all
}

/// One process.
fn alone() -> Vec<Scenario> {
    vec![
        scenario(
            "lock",
            "a free lock is taken and given back",
            [on(0, 0, [lock(0)])],
        ),
        scenario(
            "try",
            "a free lock is taken by try_lock() and dropped",
            [on(0, 0, [dropped(tried(lock(0)))])],
        ),
        scenario(
            "twice",
            "the same lock is taken twice, and the first unlock() is not waited for",
            [on(0, 0, [unheard(lock(0)), lock(0)])],
        ),
        scenario(
            "re-entry",
            "an owner takes its lock again inside, and gives back both",
            [of_task(on(0, 0, [around(lock(0), lock(0))]))],
        ),
        scenario(
            "reader-inside-writer",
            "a writer reads its own lock inside",
            [of_task(on(0, 0, [around(write(0), read(0))]))],
        ),
        scenario(
            "two-tasks",
            "two tasks of one process take the same lock",
            [on(0, 0, [held(lock(0), 20)]), on(0, 3, [lock(0)])],
        ),
        scenario(
            "hand-over-hand",
            "a task asks for the next lock before it gives back the last",
            [of_task(on(0, 0, [lock(0), ahead(within(lock(1), 500))]))],
        ),
        scenario(
            "renew",
            "a lock is renewed by hand",
            [on(0, 0, [renewed(lock(0))])],
        ),
        scenario(
            "guarded",
            "two commands are run under a lock",
            [on(0, 0, [calling(lock(0), 2)])],
        ),
        scenario(
            "kept",
            "a lock is kept, and taken again without a message",
            [on(0, 0, [kept(lock(0)), kept(lock(0))])],
        ),
        reconnects(),
    ]
}

/// One process, and a lock that is held for longer than its lease.
fn of_leases() -> Vec<Scenario> {
    vec![
        of_lease(
            Duration::from_millis(600),
            scenario(
                "renewals",
                "a lock is held for longer than its lease, which is renewed",
                [on(0, 0, [held(lock(0), 700)])],
            ),
        ),
        of_lease(
            Duration::from_secs(3),
            scenario(
                "watchdog",
                "a lock is held for longer than a third of its lease",
                [on(0, 0, [held(lock(0), 1_060)])],
            ),
        ),
        scenario(
            "lease-end",
            "a lock is held for longer than its lease, which nobody renews",
            [on(0, 0, [held(leased(lock(0), 80), 120)])],
        ),
    ]
}

/// Two processes and a plain lock.
fn of_two() -> Vec<Scenario> {
    vec![
        scenario(
            "wait",
            "a lock is waited for, and granted when it is unlocked",
            [on(0, 0, [held(lock(0), 20)]), on(1, 8, [lock(0)])],
        ),
        scenario(
            "wait-for-a-dropped-guard",
            "a lock is waited for, and granted when its guard is dropped",
            [on(0, 0, [dropped(held(lock(0), 20))]), on(1, 8, [lock(0)])],
        ),
        of_grace(
            Duration::from_secs(2),
            scenario(
                "wait-in-time",
                "a lock is waited for by lock_timeout(), and granted while calls of EVENTS end",
                [
                    on(0, 0, [held(lock(0), 40)]),
                    on(1, 8, [within(lock(0), 500)]),
                ],
            ),
        ),
        scenario(
            "wait-for-a-short-lease",
            "a lock is waited for, and held for most of a lease of its own",
            [
                on(0, 0, [held(lock(0), 20)]),
                on(1, 8, [held(leased(lock(0), 300), 200)]),
            ],
        ),
        scenario(
            "timeout",
            "a lock is waited for in vain",
            [
                on(0, 0, [held(lock(0), 40)]),
                on(1, 8, [within(lock(0), 15)]),
            ],
        ),
        scenario(
            "refused",
            "a lock is tried that another holds",
            [on(0, 0, [held(lock(0), 20)]), on(1, 8, [tried(lock(0))])],
        ),
        scenario(
            "dropped-wait",
            "a call is dropped while it waits",
            [
                on(0, 0, [held(lock(0), 40)]),
                on(1, 8, [dropped_after(lock(0), 15)]),
            ],
        ),
        scenario(
            "dropped-at-the-grant",
            "a call is dropped at about the moment in which it is granted",
            [
                on(0, 0, [held(lock(0), 20)]),
                on(1, 8, [dropped_after(lock(0), 18)]),
            ],
        ),
        scenario(
            "taken-over",
            "a lock is waited for until its lease ends",
            [
                on(0, 0, [held(leased(lock(0), 80), 120)]),
                on(1, 8, [lock(0)]),
            ],
        ),
    ]
}

/// A process holds a lock, and another process wants it.
fn of_who_is_wanted() -> Vec<Scenario> {
    vec![
        foreign(scenario(
            "foreign",
            "a process asks for a lock as the owner of another, which holds it",
            [on(0, 0, [held(lock(0), 20)]), on(1, 8, [lock(0)])],
        )),
        scenario(
            "wanted",
            "a lock is given back when another wants it",
            [on(0, 0, [listening(lock(0))]), on(1, 20, [lock(0)])],
        ),
        scenario(
            "wanted-again",
            "a holder hears that it keeps one out, goes on, and hears of the next",
            [
                on(0, 0, [going_on(listening(lock(0)))]),
                on(1, 20, [tried(lock(0))]),
                on(1, 40, [lock(0)]),
            ],
        ),
        scenario(
            "kept-and-wanted",
            "a lock is kept until another process wants it",
            [on(0, 0, [kept_for(60_000, lock(0))]), on(1, 25, [lock(0)])],
        ),
    ]
}

/// A process reads or writes beside another that reads or writes.
fn of_readers() -> Vec<Scenario> {
    vec![
        scenario(
            "readers",
            "two processes read at the same time",
            [on(0, 0, [held(read(0), 20)]), on(1, 8, [read(0)])],
        ),
        scenario(
            "writer-behind-reader",
            "a writer waits for a reader",
            [on(0, 0, [held(read(0), 20)]), on(1, 8, [write(0)])],
        ),
        scenario(
            "reader-behind-writer",
            "a reader waits for a writer",
            [on(0, 0, [held(write(0), 20)]), on(1, 8, [read(0)])],
        ),
        scenario(
            "downgrade",
            "a reader waits for a writer, which becomes a reader",
            [
                on(0, 0, [downgraded(held(write(0), 30))]),
                on(1, 8, [read(0)]),
            ],
        ),
    ]
}

/// A process takes two locks at once, and another takes one of them.
fn of_several() -> Vec<Scenario> {
    vec![
        scenario(
            "several",
            "two locks are waited for together, of which another holds one",
            [on(0, 0, [held(lock(0), 20)]), on(1, 8, [several(&[0, 1])])],
        ),
        scenario(
            "several-held",
            "a lock is waited for that another holds together with a second one",
            [on(0, 0, [held(several(&[0, 1]), 20)]), on(1, 8, [lock(1)])],
        ),
        scenario(
            "several-tried",
            "two locks are tried together, of which another waits for one",
            [
                on(0, 0, [tried(held(several(&[0, 1]), 20))]),
                on(1, 8, [held(lock(1), 40)]),
            ],
        ),
        scenario(
            "several-in-time",
            "the same, and they are waited for up to a time",
            [
                on(0, 0, [within(held(several(&[0, 1]), 20), 30)]),
                on(1, 8, [held(lock(1), 60)]),
            ],
        ),
    ]
}

/// Two processes that take permits.
fn of_permits() -> Vec<Scenario> {
    let raised = SetLimit {
        at: at(20),
        client: 0,
        lock: SEMAPHORES,
        limit: Some(2),
    };
    let mut limit = scenario(
        "limit",
        "a permit is waited for until the limit is raised",
        [
            on(0, 10, [held(permits(1, None), 50)]),
            on(1, 30, [permits(1, None)]),
        ],
    );
    limit.schedule.limits = vec![
        SetLimit {
            at: at(0),
            limit: Some(1),
            ..raised
        },
        SetLimit {
            at: at(45),
            ..raised
        },
    ];
    vec![
        scenario(
            "permits",
            "two permits of three are waited for while two are out",
            [
                on(0, 0, [held(permits(2, Some(3)), 20)]),
                on(1, 8, [permits(2, Some(3))]),
            ],
        ),
        limit,
    ]
}

/// Other places than a single server.
fn elsewhere() -> Vec<Scenario> {
    let waits = || [on(0, 0, [held(lock(0), 60)]), on(1, 8, [lock(0)])];
    // Of one process, since the steps of a second one would be the same.
    let waits_here = || [on(0, 0, [held(lock(0), 60)]), on(0, 8, [lock(0)])];
    let one_move = FaultKind::MoveSlot {
        lock: 0,
        to: 1,
        by_keys: None,
    };
    let by_keys = FaultKind::MoveSlot {
        lock: 0,
        to: 0,
        by_keys: Some(ByKeys {
            stays: Duration::from_millis(5),
            every: Duration::from_millis(5),
            order: 0,
            apart: Duration::from_millis(5),
            source_first: false,
        }),
    };
    let failover = |old| FaultKind::Failover(failover(old));
    vec![
        of_cluster(scenario(
            "cluster",
            "a lock of a cluster is waited for",
            waits(),
        )),
        connected(going_wrong(
            25,
            one_move,
            of_cluster(scenario(
                "moved-slot",
                "a slot moves while its lock is held",
                [on(0, 0, [held(lock(0), 60)])],
            )),
        )),
        connected(going_wrong(
            25,
            by_keys,
            of_cluster(scenario(
                "moved-by-keys",
                "a slot moves key by key while its lock is held and waited for",
                waits_here(),
            )),
        )),
        watched(scenario(
            "replica",
            "a lock is waited for at a primary with a replica, which sentinels watch",
            waits(),
        )),
        going_wrong(
            25,
            failover(Old::Waits),
            watched(scenario(
                "planned-failover",
                "the replica becomes the primary by order while a lock is held and waited for",
                waits_here(),
            )),
        ),
        at_three(scenario(
            "majority",
            "a lock is taken at a majority of three servers",
            [on(0, 0, [lock(0)])],
        )),
        at_three(scenario(
            "majority-refused",
            "a lock is tried that another task holds at a majority",
            [on(0, 0, [held(lock(0), 20)]), on(0, 8, [tried(lock(0))])],
        )),
    ]
}

/// One process, whose tasks are one owner.
fn in_line() -> Scenario {
    scenario(
        "in-line",
        "a call waits in line behind another one of its owner, which is dropped",
        [
            of_shared(on(0, 0, [dropped_after(lock(0), 1)])),
            of_shared(on(0, 0, [lock(0)])),
        ],
    )
}

fn reconnects() -> Scenario {
    let end = FaultKind::ResetOne {
        client: 0,
        connection: 1,
    };
    going_wrong(
        12,
        end,
        scenario(
            "reconnect",
            "one of the two connections ends while a lock is held",
            [on(0, 0, [held(lock(0), 60)])],
        ),
    )
}

// --- The parts -----------------------------------------------------------------------------------

/// Tasks begin from here on, when all processes have connected.
const BEGIN: u64 = 60;

fn at(ms: u64) -> Duration {
    Duration::from_millis(BEGIN + ms)
}

fn scenario<const N: usize>(name: &'static str, story: &'static str, tasks: [Task; N]) -> Scenario {
    let count = tasks.iter().map(|task| task.client).max().unwrap_or(0) + 1;
    // A client that stands still for two graces loses its session. A hold that nobody gives back
    // lasts until a judge has looked.
    let client = Client {
        grace: Duration::from_secs(4),
        lease: Duration::from_secs(20),
        response_timeout: Duration::from_millis(400),
        acknowledged: None,
        copies: 1,
    };
    let connect = (0..count).map(|client| Task {
        client,
        at: Duration::ZERO,
        owner: Owning::Call,
        steps: Vec::new(),
    });
    let schedule = Schedule {
        seed: 1,
        latency: Duration::from_millis(2),
        servers: 1,
        watched: None,
        clustered: None,
        grant_delay: Duration::ZERO,
        clients: vec![client; count],
        tasks: connect.chain(tasks).collect(),
        limits: Vec::new(),
        faults: Vec::new(),
        is_busy: false,
        small: Some(Small {
            begins: at(0),
            // Longer than entries need to settle.
            rests: Duration::from_millis(350),
        }),
    };
    Scenario {
        name,
        story,
        schedule,
    }
}

/// It begins later, when its first process has connected to the second node too.
fn connected(mut scenario: Scenario) -> Scenario {
    let Schedule {
        tasks,
        faults,
        small,
        ..
    } = &mut scenario.schedule;
    let begins = small.iter_mut().map(|small| &mut small.begins);
    let tasks_begin = tasks.iter_mut().map(|task| &mut task.at);
    let faults_begin = faults.iter_mut().map(|fault| &mut fault.at);
    let all = begins.chain(tasks_begin.skip(1)).chain(faults_begin);
    all.for_each(|at| *at += Duration::from_millis(30));
    let first = tasks.iter_mut().take(1);
    first.for_each(|task| task.steps.push(lock(AT_THE_SECOND_NODE)));
    scenario
}

/// A lock whose slot the second node of two serves.
const AT_THE_SECOND_NODE: u8 = 2;

/// A task of this client that begins after `ms` milliseconds.
fn on<const N: usize>(client: usize, ms: u64, steps: [Step; N]) -> Task {
    Task {
        client,
        at: at(ms),
        owner: Owning::Call,
        steps: steps.into(),
    }
}

/// Its locks are renewed for this long.
fn of_lease(lease: Duration, mut scenario: Scenario) -> Scenario {
    let clients = scenario.schedule.clients.iter_mut();
    clients.for_each(|client| client.lease = lease);
    scenario
}

/// The second process asks as the owner of the first.
fn foreign(mut scenario: Scenario) -> Scenario {
    let tasks = scenario.schedule.tasks.iter_mut().rev();
    let owners = [Owning::Foreign, Owning::Shared];
    tasks
        .zip(owners)
        .for_each(|(task, owner)| task.owner = owner);
    scenario
}

/// Its sessions have this grace.
fn of_grace(grace: Duration, mut scenario: Scenario) -> Scenario {
    let clients = scenario.schedule.clients.iter_mut();
    clients.for_each(|client| client.grace = grace);
    scenario
}

/// All its calls are one owner's.
fn of_task(task: Task) -> Task {
    let owner = Owning::Task;
    Task { owner, ..task }
}

/// Its calls are those of the owner that the tasks of its process share.
fn of_shared(task: Task) -> Task {
    let owner = Owning::Shared;
    Task { owner, ..task }
}

fn of_mode(mode: Mode, locks: &[u8]) -> Step {
    Step {
        locks: locks.to_vec(),
        mode,
        asked: None,
        kept: None,
        verb: Verb::Lock,
        lease: None,
        drop_after: None,
        drop_when_woken: None,
        stop: None,
        ahead: None,
        hold: Duration::from_millis(4),
        inside: Vec::new(),
        renews: false,
        downgrades: false,
        calls: 0,
        listens: None,
        end: End::Unlock,
    }
}

fn lock(lock: u8) -> Step {
    of_mode(Mode::Plain, &[lock])
}

fn read(lock: u8) -> Step {
    of_mode(Mode::Read, &[lock])
}

fn write(lock: u8) -> Step {
    of_mode(Mode::Write, &[lock])
}

fn several(locks: &[u8]) -> Step {
    of_mode(Mode::Several, locks)
}

fn permits(permits: u32, limit: Option<u32>) -> Step {
    let asked = Some(Asked { permits, limit });
    let step = of_mode(Mode::Permits, &[SEMAPHORES]);
    Step { asked, ..step }
}

fn tried(step: Step) -> Step {
    let verb = Verb::Try;
    Step { verb, ..step }
}

fn within(step: Step, ms: u64) -> Step {
    let verb = Verb::Within(Duration::from_millis(ms));
    Step { verb, ..step }
}

fn held(step: Step, ms: u64) -> Step {
    let hold = Duration::from_millis(ms);
    Step { hold, ..step }
}

fn leased(step: Step, ms: u64) -> Step {
    let lease = Some(Duration::from_millis(ms));
    Step { lease, ..step }
}

fn kept(step: Step) -> Step {
    kept_for(300, step)
}

fn kept_for(ms: u64, step: Step) -> Step {
    let kept = Some(Duration::from_millis(ms));
    Step { kept, ..step }
}

fn renewed(step: Step) -> Step {
    let renews = true;
    Step { renews, ..step }
}

fn downgraded(step: Step) -> Step {
    let downgrades = true;
    Step { downgrades, ..step }
}

fn calling(step: Step, calls: u8) -> Step {
    Step { calls, ..step }
}

fn listening(step: Step) -> Step {
    let listens = Some(Listens {
        every: None,
        ignores: 0,
        longest: Duration::from_secs(5),
    });
    Step { listens, ..step }
}

/// It is told once and goes on.
fn going_on(mut step: Step) -> Step {
    step.listens
        .iter_mut()
        .for_each(|listens| listens.ignores = 1);
    step
}

fn dropped(step: Step) -> Step {
    let end = End::Drop;
    Step { end, ..step }
}

fn unheard(step: Step) -> Step {
    let end = End::UnlockUnheard;
    Step { end, ..step }
}

fn dropped_after(step: Step, ms: u64) -> Step {
    let drop_after = Some(Duration::from_millis(ms));
    Step { drop_after, ..step }
}

fn around(step: Step, inner: Step) -> Step {
    let inside = vec![inner];
    Step { inside, ..step }
}

fn ahead(step: Step) -> Step {
    let ahead = Some(Ahead {
        of: Before::Guard,
        polls: 1,
        every: Duration::ZERO,
    });
    Step { ahead, ..step }
}

/// The same with something that goes wrong in any case.
fn going_wrong(ms: u64, kind: FaultKind, mut scenario: Scenario) -> Scenario {
    scenario.schedule.faults.push(Fault {
        at: at(ms),
        kind,
        server: 0,
        step: None,
    });
    scenario
}

fn of_cluster(mut scenario: Scenario) -> Scenario {
    scenario.schedule.clustered = Some(Clustered {
        nodes: 2,
        lag: Duration::from_millis(1),
        second: None,
    });
    scenario
}

fn watched(mut scenario: Scenario) -> Scenario {
    scenario.schedule.watched = Some(Watched {
        sentinels: 1,
        lag: Duration::from_millis(10),
        are_mute: false,
        second: None,
    });
    scenario
}

fn at_three(mut scenario: Scenario) -> Scenario {
    scenario.schedule.servers = 3;
    scenario
}

/// A failover in which the old primary goes this way.
pub(crate) fn failover(old: Old) -> Failover {
    Failover {
        old,
        tail: Duration::ZERO,
        lasts: Duration::from_millis(300),
        wakes: Duration::from_millis(100),
        spread: Duration::ZERO,
        first: 0,
        to: 0,
    }
}
