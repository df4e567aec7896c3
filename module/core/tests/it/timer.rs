//! The timer's work beside the commands, and how much of it is done in one turn.

use rlock_core::request::{Acquire, MultiAcquire, Release};
use rlock_core::{
    BlockedClient, Command, Count, Effect, Hash, Known, LockRef, Locks, LogOptions, Now, Outcome,
    PermitsReading, Purpose, Read, ReadDepth, ReadWrite, Stored, Subject, Token, Turn,
};

const START: Now = Now {
    wall_us: 1_000_000_000,
    mono_ms: 70,
};

const FAR: i64 = 9_000_000;

fn words(command: &str) -> impl Iterator<Item = &[u8]> {
    command.split_whitespace().map(str::as_bytes)
}

fn plain(own: Option<i64>) -> Stored {
    Stored::Plain(Hash {
        own: own.map(Count::Valid),
        token: Known::read(Token::new(7)),
        others: true,
        ends_at: Known::read(Some(FAR)),
    })
}

fn readers(is_partial: bool) -> Stored {
    Stored::ReadWrite(ReadWrite {
        own_write: None,
        own_read: None,
        others_write: false,
        others_token: None,
        others_read: Some(FAR),
        ends_at: Known::read(Some(FAR)),
        is_partial,
    })
}

/// A lock table that logs waits of a second.
fn logs_waits() -> Locks {
    let mut locks = Locks::default();
    locks.set_log_options(LogOptions {
        max_len: 10,
        holds_ms: 0,
        waits_ms: 1000,
    });
    locks
}

fn wait(locks: &mut Locks, command: &str, handle: usize, stored: &Stored, now: Now) {
    let request = Acquire::parse(words(command)).unwrap();
    begin_wait(locks, Command::Acquire(&request), handle, now, || {
        Read::One(stored)
    });
}

fn begin_wait<'r>(
    locks: &mut Locks,
    command: Command<'_>,
    handle: usize,
    now: Now,
    read: impl Fn() -> Read<'r>,
) {
    let (mut turn, mut effects) = (Turn::of(command, 0, u32::MAX), Vec::new());
    while let Some(task) = locks.next_task(&mut turn, now) {
        let read = match task.purpose {
            Purpose::Holders => Read::Owners(&[]),
            _ => read(),
        };
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    let outcome = turn.outcome();
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
    let client = BlockedClient {
        handle,
        client_id: 1,
    };
    let joined = locks.enqueue(&mut turn, Some(client), now, &mut effects);
    assert!(joined.is_some());
}

/// The turns of one firing of the timer. `read` answers each task. Returns the effects.
fn fire(locks: &mut Locks, now: Now, mut read: impl FnMut(&Subject) -> Stored) -> Vec<Effect> {
    let mut effects = Vec::new();
    let mut turn = Turn::of_deadlines();
    while let Some(task) = locks.next_task(&mut turn, now) {
        let stored = read(&task.subject);
        let found = match task.purpose {
            Purpose::LongWait => Read::Holder(None),
            _ => Read::One(&stored),
        };
        locks.decide(&mut turn, task.found(found), now, &mut effects);
    }
    locks.passed(now, &mut effects);
    let mut turn = Turn::of_timer();
    while let Some(task) = locks.next_task(&mut turn, now) {
        let stored = read(&task.subject);
        let both = [stored, Stored::Free];
        let found = match task.purpose {
            Purpose::GrantSeveral(_) => Read::Several(&both),
            _ => Read::One(&stored),
        };
        locks.decide(&mut turn, task.found(found), now, &mut effects);
    }
    effects
}

/// To note a long wait its lock's holders are read, and that can take long. A waiter whose wait is
/// over is told before the next one is noted.
#[test]
fn long_waits_do_not_delay_timeouts() {
    let mut locks = logs_waits();
    let held = plain(None);
    for number in 0..200 {
        let command = format!("k o{number} 1000 BLOCK 0");
        wait(&mut locks, &command, number, &held, START);
    }
    wait(&mut locks, "other bob 1000 BLOCK 1000", 999, &held, START);
    let mut now = START.after(1001);
    let (mut turn, mut noted) = (Turn::of_deadlines(), 0);
    while let Some(task) = locks.next_task(&mut turn, now) {
        let purpose = task.purpose;
        let read = match purpose {
            Purpose::LongWait => Read::Holder(None),
            _ => Read::One(&held),
        };
        locks.decide(&mut turn, task.found(read), now, &mut Vec::new());
        match purpose {
            Purpose::LongWait => {
                noted += 1;
                now = now.after(10);
            }
            _ => break,
        }
    }
    assert_eq!(noted, 1, "and then the waiter whose wait is over");
}

/// Waiters that become long one after the other are noted in time. The first waiter's key, which is
/// read with the leases of all readers, is still read once a second only.
#[test]
fn a_look_for_a_long_wait_does_not_read_the_key() {
    let mut locks = logs_waits();
    let held = readers(false);
    wait(&mut locks, "k w 1000 WRITE BLOCK 0", 0, &held, START);
    let (mut whole, mut joined) = (0, 1);
    for ms in 1..4000 {
        let now = START.after(ms);
        if ms % 10 == 0 {
            let command = format!("k r{joined} 1000 READ BLOCK 0");
            wait(&mut locks, &command, joined, &held, now);
            joined += 1;
        }
        fire(&mut locks, now, |_| {
            whole += usize::from(ms >= 2000);
            held
        });
    }
    // In two seconds 200 waits have become long: each reads the holder, and two looks the key.
    assert!((200..=206).contains(&whole), "{whole} readings");
}

/// A part of a sweep that takes longer than the pause between two parts is the last of its turn, as
/// soon as the turn has taken long enough.
#[test]
fn a_slow_sweep_ends_the_turn() {
    let mut locks = Locks::default();
    let crowd = readers(true);
    wait(&mut locks, "k w 1000 WRITE BLOCK 0", 0, &crowd, START);
    let (mut now, mut parts) = (START, 0);
    let mut turn = Turn::of_timer();
    while let Some(task) = locks.next_task(&mut turn, now) {
        let is_sweep = task.purpose == Purpose::Sweep;
        let read = match task.purpose {
            Purpose::Sweep => Read::Gone {
                readers: &[],
                more: true,
            },
            _ => Read::One(&crowd),
        };
        locks.decide(&mut turn, task.found(read), now, &mut Vec::new());
        if is_sweep {
            parts += 1;
            now = now.after(11);
        }
        assert!(parts < 10, "the turn does not end");
    }
    assert!(parts > 0);
}

/// A script made the owners of both waiters holders. The second waits for another lock too, which
/// is free: it is granted in the same turn as the first.
#[test]
fn a_wait_for_several_is_granted_right_after_a_reentry() {
    let mut locks = Locks::default();
    let held = plain(None);
    wait(&mut locks, "k w1 1000 BLOCK 0", 1, &held, START);
    let request = MultiAcquire::parse(words("m 1000 2 k j BLOCK 0")).unwrap();
    let stored = [held, Stored::Free];
    begin_wait(
        &mut locks,
        Command::MultiAcquire(&request),
        2,
        START,
        || Read::Several(&stored),
    );
    assert!(locks.changed(LockRef { db: 0, name: b"k" }));
    let effects = fire(&mut locks, START.after(10), |_| plain(Some(1)));
    let granted = effects.iter().filter_map(|effect| match effect {
        Effect::Grant { owner, .. } => Some(&**owner),
        _ => None,
    });
    assert_eq!(granted.collect::<Vec<_>>(), [&b"w1"[..], b"m"]);
}

/// A script made the lock permits while others waited. The last permit is given back: the next
/// waiter is granted by a reading of its own, with the unlock message of its kind.
#[test]
fn permits_pass_to_a_plain_waiter_with_a_message() {
    let mut locks = Locks::default();
    wait(&mut locks, "k w1 1000 BLOCK 0", 1, &plain(None), START);
    let mut reading = PermitsReading::new(b"a", None, None, START);
    reading.field(b"mode", b"permits");
    reading.field(b"a", b"1:5000000:t3");
    let permits = reading.found(Some(5_000_000));
    let request = Release::parse(words("k a PERMITS 1")).unwrap();
    let mut turn = Turn::of(Command::Release(&request), 0, 10);
    let (mut effects, mut depths) = (Vec::new(), Vec::new());
    while let Some(task) = locks.next_task(&mut turn, START) {
        let stored = match task.purpose {
            Purpose::Command => Stored::Permits(permits),
            _ => Stored::Free,
        };
        depths.push(task.depth);
        locks.decide(
            &mut turn,
            task.found(Read::One(&stored)),
            START,
            &mut effects,
        );
    }
    assert_eq!(
        depths.last(),
        Some(&ReadDepth::Whole),
        "a reading of its own"
    );
    let messages = effects.iter();
    let messages = messages.filter(|effect| matches!(effect, Effect::Publish { .. }));
    assert_eq!(messages.count(), 1);
}
