//! GUARD: it finds the holder by the lock's key, and tells a caller that does not hold the lock.

use rlock_core::request::Guard;
use rlock_core::{
    Command, CommandError, Count, Hash, Kind, Known, Locks, Now, Outcome, PermitsReading, Read,
    ReadHold, ReadWrite, Stored, Token, Turn, WriteHold,
};

const NOW: Now = Now {
    wall_us: 1_000_000_000,
    mono_ms: 1,
};

/// The outcome of GUARD with these words, where this is stored.
fn guard(words: &str, stored: Stored) -> Result<Outcome, CommandError> {
    let command = format!("lock alice {words} CALL PING");
    let request = Guard::parse(command.split_whitespace().map(str::as_bytes)).unwrap();
    let (mut locks, mut effects) = (Locks::default(), Vec::new());
    let mut turn = Turn::of(Command::Guard(&request), 0, 1);
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        assert!(locks.decide(&mut turn, task.found(Read::One(&stored)), NOW, &mut effects));
    }
    assert_eq!(effects, [], "whether it is held or not, nothing changes");
    turn.outcome()
}

fn token(number: i64) -> Option<Token> {
    Token::new(number)
}

fn wrong_kind(held: Kind, asked: Kind) -> Result<Outcome, CommandError> {
    Err(CommandError::WrongKind { held, asked })
}

fn plain(own: Option<Count>, others: bool) -> Stored {
    Stored::Plain(Hash {
        own,
        token: Known::read(token(7)),
        others,
        ends_at: Known::read(None),
    })
}

const EMPTY: ReadWrite = ReadWrite {
    own_write: None,
    own_read: None,
    others_write: false,
    others_token: None,
    others_read: None,
    ends_at: Known::read(Some(2_000_000)),
    is_partial: false,
};

#[test]
fn a_plain_lock_guards_for_its_holder_and_others_are_told_its_token() {
    let one = Some(Count::Valid(1));
    let not_held = |present| Err(CommandError::NotHeld(present));
    let held = Ok(Outcome::Guards);
    for (words, stored, expected) in [
        ("", plain(one, false), held.clone()),
        ("TOKEN 7", plain(one, false), held.clone()),
        ("TOKEN 6", plain(one, false), not_held(token(7))),
        ("", plain(None, true), not_held(token(7))),
        ("", Stored::Free, not_held(None)),
        ("", Stored::NoHolder, not_held(None)),
        // An owner that a field names holds the lock, whatever the field's value is.
        ("", plain(Some(Count::Malformed), false), held),
        ("", Stored::OtherType, Err(CommandError::WrongType)),
        (
            "READ",
            plain(one, false),
            wrong_kind(Kind::Plain, Kind::ReadWrite),
        ),
    ] {
        assert_eq!(guard(words, stored), expected, "{words:?} {stored:?}");
    }
}

#[test]
fn a_read_write_lock_guards_for_its_holder_in_this_mode() {
    let reads = ReadWrite {
        own_read: Some(ReadHold {
            count: Count::Valid(1),
            token: token(7),
            ends_at: Known::read(2_000_000),
        }),
        ..EMPTY
    };
    let writes = ReadWrite {
        own_write: Some(WriteHold {
            count: Count::Valid(1),
            token: token(7),
        }),
        ..EMPTY
    };
    let scripts_write = ReadWrite {
        own_write: Some(WriteHold {
            count: Count::Valid(1),
            token: None,
        }),
        ..EMPTY
    };
    let others_write = ReadWrite {
        others_write: true,
        others_token: token(8),
        ..EMPTY
    };
    let others_read = ReadWrite {
        others_read: Some(2_000_000),
        ..EMPTY
    };
    let not_held = |present| Err(CommandError::NotHeld(present));
    for (words, stored, expected) in [
        ("READ", reads, Ok(Outcome::Guards)),
        ("READ TOKEN 7", reads, Ok(Outcome::Guards)),
        ("READ TOKEN 8", reads, not_held(token(7))),
        ("WRITE", reads, not_held(None)),
        ("WRITE", writes, Ok(Outcome::Guards)),
        ("READ", writes, not_held(token(7))),
        ("WRITE TOKEN 7", writes, Ok(Outcome::Guards)),
        ("WRITE TOKEN 8", writes, not_held(token(7))),
        // A script's hold has no token.
        ("WRITE", scripts_write, Ok(Outcome::Guards)),
        ("WRITE TOKEN 7", scripts_write, not_held(None)),
        ("WRITE", others_write, not_held(token(8))),
        ("READ", others_write, not_held(token(8))),
        ("READ", others_read, not_held(None)),
        ("", reads, wrong_kind(Kind::ReadWrite, Kind::Plain)),
    ] {
        let found = guard(words, Stored::ReadWrite(stored));
        assert_eq!(found, expected, "{words:?} {stored:?}");
    }
}

#[test]
fn permits_guard_for_whoever_holds_any_and_each_has_its_own_token() {
    let now_ms = NOW.wall_us / 1000;
    let permits = |fields: &[(&[u8], String)]| {
        let mut reading = PermitsReading::new(b"alice", None, None, NOW);
        for (field, value) in fields {
            reading.field(field, value.as_bytes());
        }
        reading.found(None).stored(false)
    };
    let own = |ends_at: i64| (&b"alice"[..], format!("3:{ends_at}:t7"));
    let bob = || (&b"bob"[..], format!("1:{}:t8", now_ms + 1));
    let not_held = |present| Err(CommandError::NotHeld(present));
    for (words, stored, expected) in [
        ("PERMITS", permits(&[own(now_ms)]), Ok(Outcome::Guards)),
        (
            "TOKEN 7 PERMITS",
            permits(&[own(now_ms), bob()]),
            Ok(Outcome::Guards),
        ),
        (
            "PERMITS TOKEN 8",
            permits(&[own(now_ms), bob()]),
            not_held(token(7)),
        ),
        // Its lease is over, and others may have some.
        ("PERMITS", permits(&[own(now_ms - 1)]), not_held(None)),
        (
            "PERMITS",
            permits(&[own(now_ms - 1), bob()]),
            not_held(None),
        ),
        ("PERMITS", permits(&[bob()]), not_held(None)),
        ("PERMITS", Stored::Free, not_held(None)),
        (
            "",
            permits(&[own(now_ms)]),
            wrong_kind(Kind::Permits, Kind::Plain),
        ),
        (
            "PERMITS",
            plain(Some(Count::Valid(1)), false),
            wrong_kind(Kind::Plain, Kind::Permits),
        ),
    ] {
        assert_eq!(guard(words, stored), expected, "{words:?} {stored:?}");
    }
}
