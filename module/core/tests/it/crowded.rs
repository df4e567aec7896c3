//! The timer removes the fields of readers, and of holders of permits, that never released: at
//! locks with more readers than one look may check, and at those where new holders give cause.

use rlock_core::request::{Acquire, WaitMode};
use rlock_core::{
    BlockedClient, Command, Count, Effect, Field, Known, Lease, Locks, Mode, Now, Outcome, Permits,
    PermitsReading, PermitsRequest, Purpose, Read, ReadHold, ReadWrite, Stored, Subject, Turn,
    Wait, Write,
};

const START: Now = Now {
    wall_us: 1_000_000_000,
    mono_ms: 70,
};

fn crowd(is_partial: bool) -> Stored {
    Stored::ReadWrite(ReadWrite {
        own_write: None,
        own_read: None,
        others_write: false,
        others_token: None,
        others_read: Some(9_000_000),
        ends_at: Known::read(Some(9_000_000)),
        is_partial,
    })
}

/// A writer waits, and was told of this.
fn waited_for(stored: Stored) -> Locks {
    let mut locks = Locks::default();
    let request = Acquire {
        key: b"k",
        owner: b"bob",
        lease: Lease::from_ms(50).unwrap(),
        mode: Mode::Write,
        asked: None,
        wait_mode: WaitMode::Block(Wait::from_ms(0).unwrap()),
        session: None,
        wanted: false,
        once: false,
    };
    let mut turn = Turn::of(Command::Acquire(&request), 0, 10);
    let mut effects = Vec::new();
    let task = locks.next_task(&mut turn, START).unwrap();
    locks.decide(
        &mut turn,
        task.found(Read::One(&stored)),
        START,
        &mut effects,
    );
    let outcome = turn.outcome();
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
    let client = BlockedClient {
        handle: 1,
        client_id: 1,
    };
    locks.enqueue(&mut turn, Some(client), START, &mut effects);
    assert_eq!(locks.next_task(&mut turn, START), None);
    assert!(effects.is_empty(), "{effects:?}");
    locks
}

/// Fires the timer. A sweep finds these fields `gone`, and any other look finds a hash without a
/// holder. Returns the purposes and the effects.
fn fires(locks: &mut Locks, now: Now, gone: &[&[u8]], more: bool) -> (Vec<Purpose>, Vec<Effect>) {
    let (mut turn, mut purposes, mut effects) = (Turn::of_timer(), Vec::new(), Vec::new());
    let gone: Vec<Box<[u8]>> = gone.iter().map(|field| Box::from(*field)).collect();
    while let Some(task) = locks.next_task(&mut turn, now) {
        purposes.push(task.purpose);
        let read = match task.purpose {
            Purpose::Sweep => Read::Gone {
                readers: &gone,
                more,
            },
            _ => Read::One(&Stored::NoHolder),
        };
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    (purposes, effects)
}

fn removal(field: &[u8]) -> Effect {
    let write = Write::Remove(Field::Named(field.into()));
    Effect::Write { lock: 0, write }
}

#[test]
fn those_who_are_gone_are_taken_out_a_few_at_a_time_and_then_the_queue_is_looked_at() {
    let mut locks = waited_for(crowd(true));
    assert_eq!(locks.next_deadline(START), Some(0));
    let (asked, effects) = fires(&mut locks, START, &[b"a"], true);
    assert_eq!(asked, [Purpose::Sweep]);
    assert_eq!(effects, [removal(b"a")]);
    // Clients come between.
    let (asked, _) = fires(&mut locks, START, &[b"b"], true);
    assert_eq!(asked, []);
    let pause = locks.next_deadline(START).unwrap();
    assert!((1..=10).contains(&pause), "{pause}");
    let (asked, effects) = fires(&mut locks, START.after(pause), &[], false);
    assert_eq!(asked, [Purpose::Sweep, Purpose::Reconcile(Mode::Write)]);
    let is_grant = |effect: &Effect| matches!(effect, Effect::Grant { .. });
    assert!(effects.iter().any(is_grant), "{effects:?}");
    assert_eq!(locks.next_deadline(START.after(pause)), None);
}

#[test]
fn where_nobody_is_gone_the_timer_does_not_go_on_and_on() {
    let mut locks = waited_for(crowd(true));
    let (asked, effects) = fires(&mut locks, START, &[], false);
    assert_eq!(asked, [Purpose::Sweep]);
    assert_eq!(effects, []);
    // Until the next look at the lock.
    let next = locks.next_deadline(START).unwrap();
    assert!(next > 500, "{next}");
}

#[test]
fn where_all_could_be_looked_at_nobody_is_asked_for() {
    let mut locks = waited_for(crowd(false));
    assert_eq!(fires(&mut locks, START, &[b"a"], true), (vec![], vec![]));
}

#[test]
fn a_release_that_could_not_look_at_all_asks_for_the_rest() {
    let mut locks = Locks::default();
    let request = rlock_core::request::Release {
        key: b"k",
        owner: b"alice",
        mode: Mode::Read,
        permits: None,
        token: None,
        lease: None,
        by: None,
    };
    let Stored::ReadWrite(mut hash) = crowd(true) else {
        unreachable!()
    };
    hash.own_read = Some(ReadHold {
        count: Count::Valid(1),
        token: None,
        ends_at: Known::read(9_000_000),
    });
    let stored = Stored::ReadWrite(hash);
    let (mut turn, mut effects) = (Turn::of(Command::Release(&request), 0, 10), Vec::new());
    let task = locks.next_task(&mut turn, START).unwrap();
    locks.decide(
        &mut turn,
        task.found(Read::One(&stored)),
        START,
        &mut effects,
    );
    assert_eq!(turn.outcome(), Ok(Outcome::Left(Some(0))));
    assert_eq!(locks.next_task(&mut turn, START), None);
    // Nobody waits: then only the hash is left to clear.
    let (asked, _) = fires(&mut locks, START, &[b"a"], false);
    assert_eq!(asked, [Purpose::Sweep]);
    assert_eq!(locks.next_deadline(START), None);
}

// --- Fields that are left behind -----------------------------------------------------------------

/// The whole turn of an ACQUIRE that finds this. It sweeps nothing itself.
fn acquires(locks: &mut Locks, key: &[u8], asked: Option<PermitsRequest>, stored: Stored) {
    let request = Acquire {
        key,
        owner: b"new",
        lease: Lease::from_ms(50).unwrap(),
        mode: asked.map_or(Mode::Read, |_| Mode::Permits),
        asked,
        wait_mode: WaitMode::None,
        session: None,
        wanted: false,
        once: false,
    };
    let (mut turn, mut effects) = (Turn::of(Command::Acquire(&request), 0, 10), Vec::new());
    let task = locks.next_task(&mut turn, START).unwrap();
    locks.decide(
        &mut turn,
        task.found(Read::One(&stored)),
        START,
        &mut effects,
    );
    let outcome = turn.outcome();
    assert!(matches!(outcome, Ok(Outcome::Held { .. })), "{outcome:?}");
    assert_eq!(locks.next_task(&mut turn, START), None, "for the timer");
}

/// A new reader. One in 64 has a token that asks for a sweep; the first token is the clock's.
fn reads(locks: &mut Locks, key: &[u8]) {
    acquires(locks, key, None, crowd(false));
}

/// A grant that finds this many holders of permits whose leases are over.
fn takes_a_permit(locks: &mut Locks, over: usize) {
    let asked = PermitsRequest {
        permits: Permits::new(1).unwrap(),
        limit: Permits::new(9),
    };
    let mut reading = PermitsReading::new(b"new", Some(asked), None, START);
    reading.field(b"alive", b"1:9000000:t1");
    for at in 0..over {
        reading.field(format!("over{at}").as_bytes(), b"1:1:t1");
    }
    let stored = reading.found(Some(9_000_000)).stored(true);
    acquires(locks, b"p", Some(asked), stored);
}

#[test]
fn one_reader_in_64_has_the_timer_sweep_the_lock() {
    let mut locks = Locks::default();
    reads(&mut locks, b"k");
    let (asked, effects) = fires(&mut locks, START, &[b"a"], false);
    assert_eq!(
        (asked, effects),
        (vec![Purpose::Sweep], vec![removal(b"a")])
    );
    for _ in 1..64 {
        reads(&mut locks, b"k");
        assert_eq!(locks.next_deadline(START), None);
    }
    reads(&mut locks, b"k");
    let pause = locks.next_deadline(START).unwrap();
    assert!(pause > 0, "the last part was swept just now");
    let (asked, _) = fires(&mut locks, START.after(pause), &[], false);
    assert_eq!(asked, [Purpose::Sweep]);
}

#[test]
fn sixteen_holders_of_permits_whose_leases_are_over_are_removed() {
    let mut locks = Locks::default();
    takes_a_permit(&mut locks, 15);
    assert_eq!(locks.next_deadline(START), None);
    takes_a_permit(&mut locks, 16);
    let (asked, effects) = fires(&mut locks, START, &[b"over0"], false);
    let removed = vec![removal(b"over0")];
    assert_eq!((asked, effects), (vec![Purpose::Sweep], removed));
    assert_eq!(locks.next_deadline(START), None);
}

#[test]
fn a_lock_is_on_the_list_once_and_the_next_one_comes_when_it_is_done() {
    let mut locks = Locks::default();
    for key in [b"k", b"j"] {
        for _ in 0..=128 {
            reads(&mut locks, key);
        }
    }
    let (mut now, mut swept) = (START, Vec::new());
    while let Some(pause) = locks.next_deadline(now) {
        now = now.after(pause);
        let mut turn = Turn::of_timer();
        while let Some(task) = locks.next_task(&mut turn, now) {
            let Subject::One(lock, _) = &task.subject else {
                panic!("{task:?}")
            };
            swept.push(lock.name.to_vec());
            let (readers, more) = (&[][..], swept.len() == 1);
            let read = Read::Gone { readers, more };
            locks.decide(&mut turn, task.found(read), now, &mut Vec::new());
        }
    }
    assert_eq!(swept, [b"k", b"k", b"j"]);
}

#[test]
fn a_replica_sweeps_nothing() {
    let mut locks = Locks::default();
    reads(&mut locks, b"k");
    locks.forget_what_is_due();
    assert_eq!(locks.next_deadline(START), None);
}
