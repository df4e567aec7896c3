//! Sessions with thousands of holds and waits each, which end; and the waiters for their locks.

use std::io;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use super::Life;
use super::commands::{Locks, Use};
use super::pipelined::{PipelinedSession, up_to};
use crate::random::Random;

static PLAIN: LazyLock<Vec<String>> = LazyLock::new(|| names("m", 4000));
static READ_WRITE: LazyLock<Vec<String>> = LazyLock::new(|| names("w", 60));

/// Some of them are looked at from outside.
static LOOKED_AT: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let plain = PLAIN.iter().step_by(150);
    let all = plain.chain(READ_WRITE.iter().step_by(8));
    all.map(String::as_str).collect()
});

/// A session takes more than the server ends in one turn of its event loop, which is a thousand.
const HOLDS: std::ops::Range<u64> = 1200..2600;

/// How long waits are: they outlive the sessions that hold the locks.
const WAIT_MS: std::ops::Range<u64> = 300..6000;

/// How many waits and holds the surviving sessions have.
const WAITS: usize = 1500;

pub(crate) fn locks_looked_at() -> Locks {
    &LOOKED_AT
}

fn names(of: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{of}{number}")).collect()
}

/// Neighbours, so that those of two sessions either meet often or not at all.
fn some(random: &mut Random, count: u64) -> impl Iterator<Item = &'static str> + use<> {
    let of = PLAIN.len();
    let first = usize::try_from(random.next() % of as u64).expect("an index");
    let count = usize::try_from(count).expect("some thousands");
    (first..first + count).map(move |at| PLAIN[at % of].as_str())
}

/// Two sessions at a time, which take thousands of locks, are in the queues of some, and end in one
/// way or another.
pub(super) fn dies(life: &Life, mut random: Random) {
    while life.goes_on() {
        if take_and_die(life, &mut random).is_err() {
            thread::sleep(up_to(&mut random, 30));
        }
    }
}

fn take_and_die(life: &Life, random: &mut Random) -> io::Result<()> {
    let grace = *random.pick(&[0, 0, 300]);
    let mut sessions = [
        PipelinedSession::begin(life, grace)?,
        PipelinedSession::begin(life, grace)?,
    ];
    let count = random.within(HOLDS.start, HOLDS.end);
    let locks: Vec<_> = some(random, count).collect();
    let uses = locks.iter().map(|lock| Use::of(life.owner(), &[lock], ""));
    let (few, many): (Vec<_>, Vec<_>) = uses.partition(|_| random.percent(10));
    sessions[0].take(many)?;
    sessions[1].take(few)?;
    // A writer in one session reads in the other.
    for lock in READ_WRITE.iter() {
        if random.percent(70) {
            continue;
        }
        let write = Use::of(life.owner(), &[lock], "WRITE");
        let (one, other) = if random.percent(50) { (0, 1) } else { (1, 0) };
        let written = sessions[one].take(vec![write])?;
        let reads: Vec<_> = written.iter().filter_map(Use::reading).collect();
        sessions[other].take(reads)?;
    }
    // Other owners of its own stand in the queue before all others, or among them, and leave when
    // it ends.
    for session in &mut sessions {
        let waited_for = locks.iter().filter(|_| random.percent(8));
        let uses = waited_for.map(|lock| Use::of(life.owner(), &[lock], ""));
        session.join_queues(uses.collect(), 0, |_| Duration::ZERO)?;
    }
    let until = Instant::now() + Duration::from_millis(random.within(100, 1200));
    while Instant::now() < until && life.goes_on() {
        for session in &mut sessions {
            session.hear(10, |_| Duration::ZERO)?;
        }
    }
    if random.percent(30) {
        for session in &mut sessions {
            session.block()?;
        }
    }
    // Or else their sockets are closed, one directly after the other.
    if random.percent(65) {
        end_together(random, &mut sessions)?;
    }
    Ok(())
}

/// In one packet; and in the same turn every queue is looked at, as often as not.
fn end_together(random: &mut Random, sessions: &mut [PipelinedSession; 2]) -> io::Result<()> {
    let kills = sessions
        .iter()
        .map(|session| format!("CLIENT KILL ID {}", session.id));
    let sweeps = (0..random.within(0, 3)).map(|_| "SWAPDB 0 0".to_owned());
    let packet: Vec<_> = kills.chain(sweeps).collect();
    for session in &*sessions {
        session.life.closes();
    }
    // The connection of its commands goes on.
    sessions[0].commands.try_send_all(&packet)?;
    for _ in packet {
        sessions[0].read()?;
    }
    Ok(())
}

/// One session that goes on, and waits for others' locks, two and more owners a lock.
pub(super) fn lives(life: &Life, mut random: Random) {
    while life.goes_on() {
        if live(life, &mut random).is_err() {
            thread::sleep(up_to(&mut random, 30));
        }
    }
}

fn live(life: &Life, random: &mut Random) -> io::Result<()> {
    let mut session = PipelinedSession::begin(life, *random.pick(&[0, 300]))?;
    let mut kept = random.split();
    let mut keeps = |_: &Use| up_to(&mut kept, 30);
    while life.goes_on() {
        if session.waits() + session.holds() < WAITS {
            let count = random.within(20, 200);
            let locks: Vec<_> = some(random, count).collect();
            for _ in 0..2 {
                let uses = locks.iter().map(|lock| Use::of(life.owner(), &[lock], ""));
                let wait = random.within(WAIT_MS.start, WAIT_MS.end);
                session.join_queues(uses.collect(), wait, &mut keeps)?;
            }
            let mut uses = Vec::new();
            for _ in 0..8 {
                let lock = random.pick(&READ_WRITE);
                let mode = *random.pick(&["WRITE", "WRITE", "READ"]);
                uses.push(Use::of(life.owner(), &[lock], mode));
            }
            let wait = random.within(WAIT_MS.start, WAIT_MS.end);
            session.join_queues(uses, wait, &mut keeps)?;
        }
        session.hear(15, &mut keeps)?;
        session.release_due()?;
        if random.percent(1) {
            return Ok(());
        }
    }
    Ok(())
}
