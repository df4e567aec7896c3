//! Much work at once: it is done in portions, and waiters cost little. Looks, readings and words
//! are counted here, never times.

use rlock_core::request::{Acquire, Events, Limit};
use rlock_core::{
    BlockedClient, Command, Count, DECISIONS_MAX, Effect, Field, Gauges, Hash, Holder, Known,
    LockRef, Locks, Now, Outcome, Permits, PermitsHolders, PermitsReading, Purpose, Read,
    SessionLimits, Stored, Subject, Task, Token, Turn, Wait, Write,
};
use std::collections::BTreeMap;

const START: Now = Now {
    wall_us: 1_000_000_000,
    mono_ms: 70,
};

fn words(command: &str) -> impl Iterator<Item = &[u8]> {
    command.split_whitespace().map(str::as_bytes)
}

/// Somebody else holds it until then.
pub(crate) fn held_until(ends_at: i64) -> Stored {
    Stored::Plain(Hash {
        own: None,
        token: Known::read(Token::new(7)),
        others: true,
        ends_at: Known::read(Some(ends_at)),
    })
}

/// The client with this handle waits for a lock that is stored like this.
fn waits(locks: &mut Locks, request: &str, handle: usize, stored: &Stored, now: Now) {
    let request = Acquire::parse(words(request)).unwrap();
    let mut turn = Turn::of(Command::Acquire(&request), 0, u32::MAX);
    let mut effects = Vec::new();
    while let Some(task) = locks.next_task(&mut turn, now) {
        let read = match task.purpose {
            Purpose::Holders => Read::Owners(&[]),
            _ => Read::One(stored),
        };
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    let outcome = turn.outcome();
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
    let client_id = 1;
    let client = BlockedClient { handle, client_id };
    locks.enqueue(&mut turn, Some(client), now, &mut effects);
}

/// `number` locks, each held for an hour, and one client waits for each.
fn waited_for(number: usize) -> Locks {
    let mut locks = Locks::default();
    let stored = held_until(START.wall_ms() + 3_600_000);
    for lock in 0..number {
        let request = format!("lock:{lock} bob 1000 BLOCK 0");
        waits(&mut locks, &request, lock, &stored, START);
    }
    locks
}

/// The name of the lock that a task is about.
fn name_of(task: &Task) -> Vec<u8> {
    match &task.subject {
        Subject::One(lock, _) => lock.name.to_vec(),
        other => panic!("{other:?}"),
    }
}

/// Fires the timer. Returns the locks that it looks at, and the effects.
fn fires(
    locks: &mut Locks,
    now: Now,
    decisions: usize,
    read: impl Fn(&Task) -> Read<'static>,
) -> (Vec<Vec<u8>>, Vec<Effect>) {
    let (mut looked_at, mut effects) = (Vec::new(), Vec::new());
    let no_wait_is_over = locks.next_task(&mut Turn::of_deadlines(), now);
    assert_eq!(no_wait_is_over, None);
    locks.passed(now, &mut effects);
    let mut turn = Turn::of_timer().with_budget(decisions);
    while let Some(task) = locks.next_task(&mut turn, now) {
        looked_at.push(name_of(&task));
        let read = read(&task);
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    (looked_at, effects)
}

fn leak(stored: Stored) -> Read<'static> {
    Read::One(Box::leak(Box::new(stored)))
}

/// How often each lock was looked at, and the longest time that one of them was not.
fn looks_in(locks: &mut Locks, for_ms: i64) -> (usize, usize, i64) {
    let held: &'static Stored = Box::leak(Box::new(held_until(START.wall_ms() + 3_600_000)));
    let (mut total, mut most_at_once, mut longest) = (0, 0, 0);
    let mut last: BTreeMap<Vec<u8>, i64> = BTreeMap::new();
    let mut passed = 0;
    while passed < for_ms {
        passed += locks.next_deadline(START.after(passed)).unwrap().max(0);
        let (looked_at, effects) = fires(locks, START.after(passed), DECISIONS_MAX, |_| {
            Read::One(held)
        });
        assert!(effects.is_empty(), "{effects:?}");
        total += looked_at.len();
        most_at_once = most_at_once.max(looked_at.len());
        for name in looked_at {
            longest = longest.max(passed - last.insert(name, passed).unwrap_or(0));
        }
    }
    let left = last.values().map(|last| passed - last).max().unwrap();
    (total, most_at_once, longest.max(left))
}

#[test]
fn few_locks_are_looked_at_every_second_each() {
    for number in [1, 100, 1000, 2500] {
        let mut locks = waited_for(number);
        let (total, most_at_once, longest) = looks_in(&mut locks, 10_000);
        assert!(total <= 10 * number + 75, "{number}: {total} looks in 10 s");
        assert!(most_at_once <= 75, "{number}: {most_at_once} at once");
        // All of them began in one moment. Looks that come together are spread over some of the
        // second.
        assert!(longest <= 1900, "{number}: not for {longest} ms");
    }
}

/// The timer fires more often than that when it has other work.
#[test]
fn locks_are_not_looked_at_more_often_because_the_timer_fires_again() {
    let mut locks = waited_for(200);
    let held: &'static Stored = Box::leak(Box::new(held_until(START.wall_ms() + 3_600_000)));
    let mut looked_at = |ms| {
        let read = |_: &Task| Read::One(held);
        fires(&mut locks, START.after(ms), DECISIONS_MAX, read)
            .0
            .len()
    };
    let each = [1000, 1001, 1025].map(&mut looked_at);
    assert_eq!(each, [75, 0, 75]);
}

#[test]
fn many_locks_are_looked_at_in_turn_three_thousand_a_second() {
    const LOCKS: usize = 20_000;
    let mut locks = waited_for(LOCKS);
    let (total, most_at_once, longest) = looks_in(&mut locks, 10_000);
    assert!(total <= 30_075, "{total} looks in 10 s");
    assert!(total > 24_000, "{total} looks in 10 s");
    assert!(most_at_once <= 75, "{most_at_once} at once");
    assert!(longest <= 7_800, "not for {longest} ms");
}

#[test]
fn the_end_of_a_lease_is_seen_at_once_among_many_locks_that_are_waited_for() {
    let mut locks = waited_for(20_000);
    let end = START.wall_ms() + 1500;
    let request = "soon carl 1000 BLOCK 0";
    waits(&mut locks, request, 99_999, &held_until(end), START);
    // A look that cannot tell the end must not overwrite the one that is known.
    let (db, name) = (0, &b"soon"[..]);
    locks.changed(LockRef { db, name });
    let (looked_at, _) = fires(&mut locks, START, DECISIONS_MAX, |_| Read::Unknown);
    assert_eq!(looked_at, [b"soon"]);
    let (mut passed, mut seen_at) = (0, None);
    while seen_at.is_none() {
        passed += locks.next_deadline(START.after(passed)).unwrap().max(0);
        let (looked_at, effects) = fires(&mut locks, START.after(passed), DECISIONS_MAX, |task| {
            if name_of(task) == b"soon" && START.wall_ms() + passed > end {
                leak(Stored::Free)
            } else {
                Read::Unknown
            }
        });
        let is_granted = effects
            .iter()
            .any(|effect| matches!(effect, Effect::Grant { .. }));
        seen_at = (looked_at.contains(&b"soon".to_vec()) && is_granted).then_some(passed);
        assert!(passed < 3000);
    }
    assert_eq!(seen_at, Some(1501));
    assert_eq!(
        locks.counters().expiries,
        1,
        "the end that was known was forgotten"
    );
}

fn dismissed(effects: &[Effect]) -> Vec<usize> {
    let client = |effect: &Effect| match effect {
        Effect::Leave { client, .. } => Some(*client),
        _ => None,
    };
    effects.iter().filter_map(client).collect()
}

#[test]
fn waiters_for_what_is_no_lock_are_told_in_portions_in_their_order() {
    const WAITERS: usize = 3500;
    let mut locks = Locks::default();
    let held = held_until(START.wall_ms() + 3_600_000);
    for waiter in 0..WAITERS {
        let request = format!("k owner:{waiter} 1000 BLOCK 0");
        waits(&mut locks, &request, waiter, &held, START);
    }
    let mut now = START.after(1000);
    let (_, effects) = fires(&mut locks, now, DECISIONS_MAX, |_| leak(Stored::OtherType));
    let mut told = dismissed(&effects);
    assert_eq!(told.len(), DECISIONS_MAX);
    // The rest is due, without waiting for the next look.
    assert_eq!(locks.next_deadline(now), Some(0));
    now = now.after(1);
    let (looked_at, effects) = fires(&mut locks, now, 250, |_| leak(Stored::OtherType));
    told.extend(dismissed(&effects));
    assert_eq!((looked_at.len(), told.len()), (3, DECISIONS_MAX + 300));
    assert!(told.is_sorted(), "{told:?}");
    // Somebody deletes the key: the first waiter that is left is granted.
    let (_, effects) = fires(&mut locks, now.after(1), DECISIONS_MAX, |_| {
        leak(Stored::Free)
    });
    let granted = effects.iter().find_map(|effect| match effect {
        Effect::Grant { client, .. } => Some(*client),
        _ => None,
    });
    assert_eq!(granted, Some(told.len()));
    assert_eq!(dismissed(&effects), []);
    assert_eq!(locks.gauges().waiters, WAITERS - told.len() - 1);
}

/// A hash of permits in place of a server.
#[derive(Default)]
struct Semaphore {
    fields: BTreeMap<Vec<u8>, Vec<u8>>,
    ends_at: Option<i64>,
    limit: Option<Vec<u8>>,
    readings: usize,
    granted: Vec<usize>,
    told: Vec<usize>,
}

impl Semaphore {
    fn read(&mut self, task: &Task, owner: &[u8], now: Now) -> (Stored, PermitsHolders) {
        self.readings += 1;
        let limit = self.limit.as_deref();
        let mut reading = PermitsReading::new(owner, task.asked, limit, now).for_queue();
        for (field, value) in &self.fields {
            reading.field(field, value);
        }
        let (hash, others) = reading.found_with_others(self.ends_at);
        (hash.stored(true), others)
    }

    fn run(&mut self, locks: &mut Locks, turn: &mut Turn<'_>, command: Option<&[u8]>, now: Now) {
        while let Some(task) = locks.next_task(turn, now) {
            let owner = match &task.subject {
                Subject::One(_, owner) => owner.to_vec(),
                _ => command.unwrap().to_vec(),
            };
            let (stored, others) = self.read(&task, &owner, now);
            let read = match &stored {
                Stored::Permits(hash) if task.is_about_queue_for_permits() => {
                    Read::Permits(hash, &others)
                }
                stored => Read::One(stored),
            };
            let mut effects = Vec::new();
            locks.decide(turn, task.found(read), now, &mut effects);
            for effect in &effects {
                self.carry_out(&owner, effect);
            }
        }
    }

    fn carry_out(&mut self, caller: &[u8], effect: &Effect) {
        match effect {
            Effect::Grant { client, owner, .. } => {
                assert!(
                    self.fields.contains_key(&**owner),
                    "told before it is written"
                );
                self.granted.push(*client);
            }
            Effect::Leave { client, .. } => self.told.push(*client),
            Effect::Write { write, .. } => match write {
                Write::SetPermits(holder, hold, _) => {
                    let name = holder.name(caller).to_vec();
                    self.fields.insert(name, hold.text().bytes().to_vec());
                }
                Write::Remove(Field::Owner(Holder::Caller)) => {
                    self.fields.remove(caller);
                }
                Write::ExpireAt(end) => self.ends_at = Some(*end),
                Write::Delete => self.fields.clear(),
                Write::SetLimit(value) => self.limit = Some(value.text().bytes().to_vec()),
                Write::DeleteLimit => self.limit = None,
                other => panic!("{other:?}"),
            },
            _ => {}
        }
    }

    /// LIMIT, and the timer as often as it is due. How often it was.
    fn set_limit(&mut self, locks: &mut Locks, limit: i64, now: Now) -> usize {
        let request = Limit {
            key: b"sem",
            limit: Permits::new(limit),
        };
        let mut turn = Turn::of(Command::Limit(&request), 0, u32::MAX);
        self.run(locks, &mut turn, Some(b""), now);
        let mut firings = 0;
        while locks.next_deadline(now) == Some(0) {
            firings += 1;
            locks.passed(now, &mut Vec::new());
            self.run(locks, &mut Turn::of_timer(), None, now);
        }
        firings
    }

    /// Alice has one permit, and `number` clients wait for one each.
    fn waited_for(number: usize) -> (Self, Locks) {
        let (mut semaphore, mut locks) = (Self::default(), Locks::default());
        semaphore.limit = Some(b"1".to_vec());
        semaphore
            .fields
            .insert(b"alice".to_vec(), b"1:9000000:t1".to_vec());
        semaphore.ends_at = Some(9_000_000);
        for waiter in 0..number {
            let request = format!("sem owner:{waiter} 1000 PERMITS 1 BLOCK 0");
            let request = Acquire::parse(words(&request)).unwrap();
            let mut turn = Turn::of(Command::Acquire(&request), 0, u32::MAX);
            let task = locks.next_task(&mut turn, START).unwrap();
            // The others need not be read for a caller that is to wait behind them.
            let mut reading = PermitsReading::new(request.owner, task.asked, Some(b"1"), START);
            reading.field(b"alice", b"1:9000000:t1");
            let stored = reading.found(Some(9_000_000)).stored(true);
            let mut effects = Vec::new();
            locks.decide(
                &mut turn,
                task.found(Read::One(&stored)),
                START,
                &mut effects,
            );
            let client = BlockedClient {
                handle: waiter,
                client_id: 1,
            };
            locks.enqueue(&mut turn, Some(client), START, &mut effects);
        }
        assert_eq!(locks.gauges().waiters, number);
        (semaphore, locks)
    }
}

#[test]
fn one_reading_lets_in_all_who_fit_as_far_as_the_turn_allows() {
    const WAITERS: usize = 3500;
    let (mut semaphore, mut locks) = Semaphore::waited_for(WAITERS);
    let limit = i64::try_from(WAITERS).unwrap();
    // With alice's all but one fit.
    let firings = semaphore.set_limit(&mut locks, limit, START);
    assert_eq!(semaphore.granted, (0..WAITERS - 1).collect::<Vec<_>>());
    assert_eq!(firings, 3);
    assert!(
        semaphore.readings <= 2 + 2 * 4,
        "{} readings",
        semaphore.readings
    );
    assert_eq!(locks.gauges().waiters, 1);
    // It is looked at when the first of them ends.
    assert!(locks.next_deadline(START).unwrap() <= 1001);
}

#[test]
fn a_waiter_for_whom_somebody_has_written_permits_is_refused_among_those_let_in() {
    let (mut semaphore, mut locks) = Semaphore::waited_for(10);
    semaphore
        .fields
        .insert(b"owner:4".to_vec(), b"2:9000000:t9".to_vec());
    semaphore.set_limit(&mut locks, 9, START);
    // Alice has one, the fourth has two already, and six are left.
    assert_eq!(semaphore.granted, [0, 1, 2, 3, 5, 6]);
    assert_eq!(semaphore.told, [4]);
    assert_eq!(semaphore.fields[&b"owner:4"[..]], b"2:9000000:t9");
}

#[test]
fn without_a_limit_those_who_named_none_are_told_in_portions() {
    let (mut semaphore, mut locks) = Semaphore::waited_for(2500);
    let firings = semaphore.set_limit(&mut locks, 0, START);
    assert_eq!(semaphore.told, (0..2500).collect::<Vec<_>>());
    assert_eq!((firings, locks.gauges().waiters), (2, 0));
}

fn sessions(locks: &mut Locks, number: usize, command: &str) -> Vec<rlock_core::SessionId> {
    let limits = SessionLimits {
        sessions: u32::MAX,
        events_per_session: 10,
        out_of_memory: false,
    };
    let begin = |client: usize| {
        let request = format!("s{client} {command}");
        let request = Events::parse(words(&request)).unwrap();
        let client_id = u64::try_from(client).unwrap() + 1;
        let session = locks.attach(&request, client_id, limits, START, &mut Vec::new());
        let session = session.unwrap().session;
        locks.take_events(session, START).unwrap();
        session
    };
    (0..number).map(begin).collect()
}

/// How much each firing brings, as `of` counts it, until nothing is due.
fn in_portions(locks: &mut Locks, now: Now, of: impl Fn(&Locks, &[Effect]) -> usize) -> Vec<usize> {
    let mut portions = Vec::new();
    while locks.next_deadline(now) == Some(0) {
        let (before, mut effects) = (of(locks, &[]), Vec::new());
        locks.passed(now, &mut effects);
        portions.push(of(locks, &effects) - before);
        let mut turn = Turn::of_timer();
        while let Some(task) = locks.next_task(&mut turn, now) {
            let own = Hash {
                own: Some(Count::Valid(1)),
                token: Known::read(None),
                others: false,
                ends_at: Known::read(Some(now.wall_ms() + 1000)),
            };
            locks.decide(
                &mut turn,
                task.found(Read::One(&Stored::Plain(own))),
                now,
                &mut effects,
            );
        }
    }
    portions
}

#[test]
fn calls_of_events_that_end_together_are_answered_a_thousand_at_once() {
    let mut locks = Locks::default();
    for (listener, session) in sessions(&mut locks, 2500, "").into_iter().enumerate() {
        locks.listen(session, listener, Wait::from_ms(50).unwrap(), START);
    }
    let woken = |_: &Locks, effects: &[Effect]| {
        effects
            .iter()
            .filter(|effect| matches!(effect, Effect::Wake(_)))
            .count()
    };
    assert_eq!(
        in_portions(&mut locks, START.after(50), woken),
        [1000, 1000, 500]
    );
}

#[test]
fn sessions_whose_graces_end_together_end_in_portions() {
    let mut locks = Locks::default();
    sessions(&mut locks, 2500, "GRACE 50");
    for client in 0..2500 {
        let request = format!("lock:{client} bob 9000 SESSION s{client}");
        let request = Acquire::parse(words(&request)).unwrap();
        let mut turn = Turn::of(Command::Acquire(&request), 0, 10);
        let task = locks.next_task(&mut turn, START).unwrap();
        locks.decide(
            &mut turn,
            task.found(Read::One(&Stored::Free)),
            START,
            &mut Vec::new(),
        );
        let client_id = u64::try_from(client).unwrap() + 1;
        locks.client_gone(client_id, START, &mut Vec::new());
    }
    assert_eq!(locks.gauges().session_holds, 2500);
    // Each is a session with one hold.
    let pending = |locks: &Locks, _: &[Effect]| locks.gauges().pending_releases;
    let portions = in_portions(&mut locks, START.after(50), pending);
    assert_eq!(portions, [500; 5]);
    assert_eq!(locks.gauges(), Gauges::default());
}

/// The slot of the lock was on its way when its lease ended. The lock's next look is behind those
/// of many others, and its waiter must not depend on that look to be told.
#[test]
fn a_lease_that_ended_while_nobody_knew_who_serves_the_key_is_looked_at_soon_among_many() {
    const LOCKS: usize = 20_000;
    let mut locks = waited_for(LOCKS);
    let ends_at = START.wall_ms() + 1500;
    let request = "k bob 1000 BLOCK 0";
    waits(&mut locks, request, LOCKS, &held_until(ends_at), START);
    let is_about_k = |task: &Task| name_of(task) == b"k";
    let held = || leak(held_until(START.wall_ms() + 3_600_000));
    let unknown = |task: &Task| {
        if is_about_k(task) {
            Read::Unknown
        } else {
            held()
        }
    };
    let (looked_at, _) = fires(&mut locks, START.after(1502), DECISIONS_MAX, unknown);
    assert!(looked_at.contains(&b"k".to_vec()));
    let free = |task: &Task| {
        if is_about_k(task) {
            leak(Stored::Free)
        } else {
            held()
        }
    };
    let (_, effects) = fires(&mut locks, START.after(2503), DECISIONS_MAX, free);
    let is_granted = |effect: &Effect| matches!(effect, Effect::Grant { .. });
    assert!(effects.iter().any(is_granted), "{effects:?}");
}
