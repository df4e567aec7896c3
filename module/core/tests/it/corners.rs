//! Corners that the random histories seldom reach: single turns, each with the readings that lead
//! there.

use crate::portions::held_until;
use crate::wanted::{LIMITS, NOW, asked, decide, words};
use rlock_core::request::{Acquire, Cancel, Events, MultiAcquire, Release, Renew};
use rlock_core::{
    BlockedClient, CHAIN_MAX, Command, CommandError, Count, Effect, Field, Hash, Holder, Known,
    LockRef, Locks, Mode, Now, Outcome, Permits, PermitsHash, PermitsHold, PermitsHolders, Purpose,
    Read, ReadDepth, ReadHold, ReadWrite, Room, SessionId, Stored, Subject, Task, Token, Turn,
    Wait, WaitOutcome, Write,
};

mod ends;
mod queues;
mod search;
mod sessions;
mod unread;

const END: i64 = 2_000_000;

fn at(name: &[u8]) -> LockRef<'_> {
    LockRef { db: 0, name }
}

/// The owner that it is read for holds it, alone.
fn owned_by(token: Token) -> Stored {
    Stored::Plain(Hash {
        own: Some(Count::Valid(1)),
        token: Known::read(Some(token)),
        others: false,
        ends_at: Known::read(Some(END)),
    })
}

fn is_grant(effect: &Effect) -> bool {
    matches!(effect, Effect::Grant { .. })
}

fn permits(own: Option<PermitsHold>, others_end: Option<i64>, ends_at: i64) -> PermitsHash {
    PermitsHash {
        own,
        others_end,
        room: Room::Now,
        limit: Permits::new(9),
        ends_at: Some(ends_at),
        is_there: true,
        ..PermitsHash::default()
    }
}

/// Readers: the owner that it is read for, and others, until these moments; and the key's end.
fn read_write(own_read: Option<i64>, others_read: Option<i64>, ends_at: i64) -> ReadWrite {
    ReadWrite {
        own_write: None,
        own_read: own_read.map(|end| ReadHold {
            count: Count::Valid(1),
            token: Token::new(7),
            ends_at: Known::read(end),
        }),
        others_write: false,
        others_token: None,
        others_read,
        ends_at: Known::read(Some(ends_at)),
        is_partial: false,
    }
}

/// A client waits with this request, for a lock that is stored like this.
fn waits(locks: &mut Locks, request: &str, handle: usize, stored: &Stored) {
    let request = Acquire::parse(words(request)).unwrap();
    begin(
        locks,
        Command::Acquire(&request),
        handle,
        &Read::One(stored),
    );
}

/// The same for a wait for several locks.
fn waits_for_several(locks: &mut Locks, request: &str, handle: usize, stored: &[Stored]) {
    let request = MultiAcquire::parse(words(request)).unwrap();
    let command = Command::MultiAcquire(&request);
    begin(locks, command, handle, &Read::Several(stored));
}

/// Runs a command where this is stored. Returns the purposes of its tasks, and the effects.
fn runs(locks: &mut Locks, mut turn: Turn<'_>, stored: &Stored) -> (Vec<Purpose>, Vec<Effect>) {
    let (mut purposes, mut effects) = (Vec::new(), Vec::new());
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        purposes.push(task.purpose);
        locks.decide(&mut turn, task.found(Read::One(stored)), NOW, &mut effects);
    }
    (purposes, effects)
}

fn begin(locks: &mut Locks, command: Command<'_>, handle: usize, read: &Read<'_>) {
    let (mut turn, mut effects) = (Turn::of(command, 0, u32::MAX), Vec::new());
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let read = match task.purpose {
            Purpose::Holders => Read::Owners(&[]),
            _ => read.clone(),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut effects);
    }
    let client = BlockedClient {
        handle,
        client_id: 5,
    };
    let joined = locks.enqueue(&mut turn, Some(client), NOW, &mut effects);
    assert!(joined.is_some(), "{:?}", turn.outcome());
}

/// Fires the timer once. `read` answers each task. Returns the purposes and the effects.
fn fires<'r>(
    locks: &mut Locks,
    now: Now,
    mut read: impl FnMut(&Task) -> Read<'r>,
) -> (Vec<Purpose>, Vec<Effect>) {
    let (mut purposes, mut effects) = (Vec::new(), Vec::new());
    locks.passed(now, &mut effects);
    let mut turn = Turn::of_timer();
    while let Some(task) = locks.next_task(&mut turn, now) {
        purposes.push(task.purpose);
        let read = read(&task);
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    (purposes, effects)
}

/// The lock that a task is about.
fn name_of(task: &Task) -> Vec<u8> {
    match &task.subject {
        Subject::One(lock, _) => lock.name.to_vec(),
        other => panic!("{other:?}"),
    }
}

fn writes(effects: &[Effect]) -> Vec<&Write> {
    let mut writes = Vec::new();
    for effect in effects {
        if let Effect::Write { write, .. } = effect {
            writes.push(write);
        }
    }
    writes
}

/// The handles of the clients that leave with nothing.
fn refused(effects: &[Effect]) -> Vec<usize> {
    let client = |effect: &Effect| match effect {
        Effect::Leave {
            client,
            why: WaitOutcome::Refused(_),
        } => Some(*client),
        _ => None,
    };
    effects.iter().filter_map(client).collect()
}

/// A session with these holds, each taken with this request where this is stored. Returns their
/// tokens as well.
fn session_with(holds: &[(&str, Stored)]) -> (Locks, SessionId, Vec<Token>) {
    let mut locks = Locks::default();
    let listens = Events::parse(words("s")).unwrap();
    let session = locks.attach(&listens, 1, LIMITS, NOW, &mut Vec::new());
    let session = session.unwrap().session;
    let told = locks.take_events(session, NOW);
    assert!(told.unwrap().events.is_empty());
    let tokens = holds.iter().map(|(request, stored)| {
        let request = Acquire::parse(words(request)).unwrap();
        match decide(&mut locks, Command::Acquire(&request), &[*stored]).1 {
            Outcome::Held { token, .. } => token,
            other => panic!("{other:?}"),
        }
    });
    let tokens = tokens.collect();
    (locks, session, tokens)
}

/// The session has ended with its connection.
fn ends(mut locks: Locks) -> Locks {
    locks.client_gone(1, NOW, &mut Vec::new());
    locks
}
