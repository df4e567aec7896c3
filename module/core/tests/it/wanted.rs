//! A caller that must wait, but that the server cannot block, is refused: a holder that asks is
//! told of it. (The random histories know no such server.)

use rlock_core::request::{Acquire, Events, MultiAcquire};
use rlock_core::{
    Command, Count, EventKind, Hash, Known, Locks, Now, Outcome, Read, SessionId, SessionLimits,
    Stored, Token, Turn,
};

pub(crate) const NOW: Now = Now {
    wall_us: 1_000_000_000,
    mono_ms: 1,
};

pub(crate) fn words(command: &str) -> impl Iterator<Item = &[u8]> {
    command.split_whitespace().map(str::as_bytes)
}

pub(crate) const LIMITS: SessionLimits = SessionLimits {
    sessions: 10,
    events_per_session: 10,
    out_of_memory: false,
};

fn held(own: bool) -> Stored {
    Stored::Plain(Hash {
        own: own.then_some(Count::Valid(1)),
        token: Known::read(Token::new(7)),
        others: !own,
        ends_at: Known::read(Some(2_000_000)),
    })
}

/// The outcome of a command, where this is stored at its locks.
pub(crate) fn decide<'a>(
    locks: &mut Locks,
    command: Command<'a>,
    stored: &[Stored],
) -> (Turn<'a>, Outcome) {
    let mut turn = Turn::of(command, 0, 10);
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let read = match command {
            Command::MultiAcquire(_) => Read::Several(stored),
            _ => Read::One(&stored[0]),
        };
        assert!(locks.decide(&mut turn, task.found(read), NOW, &mut Vec::new()));
    }
    let outcome = turn.outcome().unwrap();
    (turn, outcome)
}

/// Alice has `k` for a session, and asks.
pub(crate) fn asked() -> (Locks, SessionId) {
    let mut locks = Locks::default();
    let listens = Events::parse(words("s")).unwrap();
    let session = locks.attach(&listens, 1, LIMITS, NOW, &mut Vec::new());
    let told = locks.take_events(session.as_ref().unwrap().session, NOW);
    assert!(told.unwrap().events.is_empty());
    let take = Acquire::parse(words("k alice 1000 SESSION s WANTED")).unwrap();
    let (_, outcome) = decide(&mut locks, Command::Acquire(&take), &[Stored::Free]);
    assert!(matches!(outcome, Outcome::Held { .. }), "{outcome:?}");
    let session = session.unwrap().session;
    (locks, session)
}

/// The events of alice's session when the caller of this command cannot be blocked.
fn heard_after(command: Command<'_>, stored: &[Stored]) -> Vec<(Vec<u8>, EventKind)> {
    let (mut locks, session) = asked();
    let (mut turn, outcome) = decide(&mut locks, command, stored);
    assert!(matches!(outcome, Outcome::MustWait { .. }), "{outcome:?}");
    let told = locks.take_events(session, NOW).unwrap();
    assert!(told.events.is_empty(), "it may wait yet");
    locks.turn_away(&mut turn, &mut Vec::new());
    let told = locks.take_events(session, NOW).unwrap();
    let events = told.events.into_iter();
    events
        .map(|event| (event.lock.name.to_vec(), event.kind))
        .collect()
}

#[test]
fn a_caller_that_cannot_be_blocked_wants_what_others_hold() {
    let wanted = [(b"k".to_vec(), EventKind::Wanted { waiters: 0 })];
    let waits = Acquire::parse(words("k bob 1000 BLOCK 0")).unwrap();
    assert_eq!(
        heard_after(Command::Acquire(&waits), &[held(false)]),
        wanted
    );
    let waits = MultiAcquire::parse(words("bob 1000 2 free k BLOCK 0")).unwrap();
    let stored = [Stored::Free, held(false)];
    assert_eq!(heard_after(Command::MultiAcquire(&waits), &stored), wanted);
    // Alice waits for another lock, and has this one.
    let waits = MultiAcquire::parse(words("alice 1000 2 other k BLOCK 0")).unwrap();
    let stored = [held(false), held(true)];
    assert_eq!(heard_after(Command::MultiAcquire(&waits), &stored), []);
}
