//! Leftovers of others in the keyspace: any fields and values, any ends, any timeout keys, any
//! type.
//!
//! The keyspace of the read-write lock's tests reads it as the module does, and refuses to write
//! what would let a second holder in.

use super::choices::Choices;
use crate::keyspace::{Fields, Keyspace, Place, Reading, Value, number, timeout_key, writer_field};
use rlock_core::request::{Acquire, Release, Renew, WaitMode};
use rlock_core::{
    Command, CommandError, Count, Effect, Lease, Locks, Mode, Now, Outcome, Purpose, Read,
    ReadDepth, Stored, Token, Turn,
};

const NAMES: [&[u8]; 2] = [b"a", b"x{b}y"];
const OWNERS: [&[u8]; 4] = [b"A", b"B:rwlock_timeout:1", b"\xff\0", b""];
const MODES: [Mode; 3] = [Mode::Plain, Mode::Read, Mode::Write];
const WAITERS_MAX: u32 = 4;

/// Any stored value is read as something, and by all commands in the same way; and each command's
/// reply agrees with the keys afterwards.
pub fn stored(data: &[u8]) {
    let mut choices = Choices::new(data);
    fields_are_numbers(&choices.bytes(24));
    let mut world = World::new(&mut choices);
    world.looks_agree();
    for _ in 0..8 {
        if choices.are_over() {
            break;
        }
        world.command(&mut choices);
        world.looks_agree();
    }
}

/// A count and a token are texts that are printed again as they were read.
fn fields_are_numbers(value: &[u8]) {
    let count = match number(value).filter(|count| *count >= 1) {
        Some(count) => Count::Valid(count),
        None => Count::Malformed,
    };
    assert_eq!(Count::from_field(value), count);
    let token = number(value).filter(|token| *token > 1);
    assert_eq!(Token::from_timeout(value).map(Token::get), token);
    let fence = [b"t", value].concat();
    let token = number(value).filter(|token| *token > 0);
    assert_eq!(Token::from_field(&fence).map(Token::get), token);
}

struct World {
    at: Place,
    space: Keyspace,
    locks: Locks,
    now: Now,
}

impl World {
    /// A lock's keys as anybody may have written them.
    fn new(choices: &mut Choices<'_>) -> Self {
        let (wall_us, mono_ms) = (1_000_000_500, 70);
        let mut world = Self {
            at: (0, choices.of(&NAMES).to_vec()),
            space: Keyspace::default(),
            locks: crate::locks_that_log(),
            now: Now { wall_us, mono_ms },
        };
        world.write(choices);
        world
    }

    fn write(&mut self, choices: &mut Choices<'_>) {
        let (at, wall_ms) = (self.at.clone(), self.now.wall_ms());
        if choices.one_in(8) {
            let ends_at = end(choices, wall_ms);
            self.space.set(&at, Value::Text(choices.bytes(4)), ends_at);
            return;
        }
        let mut fields = Fields::new();
        for _ in 0..choices.below(6) {
            fields.insert(field(choices), value(choices));
        }
        if !fields.is_empty() {
            let ends_at = end(choices, wall_ms);
            self.space.set(&at, Value::Hash(fields), ends_at);
        }
        for _ in 0..choices.below(6) {
            let number = choices.of(&[1, 2, 3, 2_147_483_647, i64::MAX]);
            let key = timeout_key(&at, choices.of(&OWNERS), number);
            let value = if choices.one_in(6) {
                Value::Hash(Fields::from([(Vec::new(), value(choices))]))
            } else {
                Value::Text(value(choices))
            };
            let ends_at = end(choices, wall_ms);
            self.space.set(&key, value, ends_at);
        }
        self.space.expire(wall_ms);
    }

    fn read(&self, owner: &[u8], look: ReadDepth, how: Reading) -> Stored {
        self.space.read(&self.at, owner, look, how)
    }

    /// All owners see the same at every look: whether somebody has the lock, and whether it is a
    /// lock at all; and nobody is told a time that cannot be.
    fn looks_agree(&self) {
        let holders = self.space.holders(&self.at);
        for owner in OWNERS.into_iter().chain([&b"fence"[..]]) {
            let looks = [
                self.read(owner, ReadDepth::Whole, Reading::All),
                self.read(owner, ReadDepth::Whole, Reading::Short),
                self.read(owner, ReadDepth::Brief, Reading::All),
                self.read(owner, ReadDepth::Brief, Reading::Short),
                self.read(owner, ReadDepth::WholeUnlessOutlived, Reading::Short),
            ];
            for stored in looks {
                let is_other = stored == Stored::OtherType;
                let is_held = !stored.is_free() && !is_other;
                assert_eq!(is_held, !holders.is_empty(), "{stored:?}, {holders:?}");
                let ttl_ms = stored.ttl_ms(self.now);
                assert!(ttl_ms >= -1 && (is_held || ttl_ms == 0), "{stored:?}");
                let (own, is_in_it) = (own(stored), holders.iter().any(|of| **of == *owner));
                if owner != b"fence" {
                    assert_eq!(!own.is_empty(), is_in_it, "{stored:?}, {holders:?}");
                }
            }
        }
    }

    /// One command of one owner, by itself: nobody waits.
    fn command(&mut self, choices: &mut Choices<'_>) {
        let (owner, mode) = (choices.of(&OWNERS[..3]), choices.of(&MODES));
        let lease = Lease::from_ms(choices.of(&[50, 1, 800, 9_007_199_254_740_991])).unwrap();
        match choices.below(6) {
            0 | 1 => self.acquire(owner, mode, lease, choices.one_in(3)),
            2 => {
                let token = choices
                    .maybe(|choices| Token::new(choices.number()))
                    .flatten();
                let lease = choices.maybe(|_| lease);
                self.release(owner, mode, token, lease);
            }
            3 => self.renew(owner, mode, lease),
            4 => self.break_hold(),
            _ => {
                // Time, and somebody else again.
                self.now.wall_us += choices.of(&[0, 1_000, 50_000, 51_000, 900_000_000]);
                self.space.expire(self.now.wall_ms());
                if choices.one_in(2) {
                    self.write(choices);
                }
            }
        }
        self.space.expire(self.now.wall_ms());
    }

    /// The whole turn of a command. Returns the effects of its decision; later effects of the turn
    /// are carried out as well.
    fn decide(
        &mut self,
        command: Command<'_>,
        stored: Stored,
    ) -> (Result<Outcome, CommandError>, Vec<Effect>) {
        let mut turn = Turn::of(command, 0, WAITERS_MAX);
        let mut of_command = Vec::new();
        for _ in 0..100 {
            let Some(task) = self.locks.next_task(&mut turn, self.now) else {
                return (turn.outcome(), of_command);
            };
            let (purpose, mut effects) = (task.purpose, Vec::new());
            let readers = self.space.reader_counts(&self.at);
            let gone = self.space.readers_gone(&self.at);
            let read = match purpose {
                Purpose::Sweep => Read::Gone {
                    readers: &gone,
                    more: false,
                },
                Purpose::Command if matches!(command, Command::Break(_)) => {
                    Read::Holds(stored, &readers, self.space.first_hold(&self.at))
                }
                _ => Read::One(&stored),
            };
            self.locks
                .decide(&mut turn, task.found(read), self.now, &mut effects);
            let is_refused = matches!(turn.decided(), Some(Err(_)));
            self.carry_out(command.owner(), is_refused, &effects);
            if purpose == Purpose::Command {
                of_command = effects;
            }
        }
        panic!("there is always something more to decide");
    }

    fn acquire(&mut self, owner: &[u8], mode: Mode, lease: Lease, once: bool) {
        let stored = self.read(owner, ReadDepth::Whole, Reading::All);
        let request = Acquire {
            key: &self.at.1.clone(),
            owner,
            lease,
            mode,
            asked: None,
            wait_mode: WaitMode::None,
            session: None,
            wanted: false,
            once,
        };
        let (acquired, effects) = self.decide(Command::Acquire(&request), stored);
        let now = self.now;
        match acquired {
            Ok(Outcome::Held { count, .. }) => {
                let of_mode = self.own_count(owner, mode);
                assert_eq!(of_mode, Some(Count::Valid(count)), "{effects:?}");
                // A key can live on for others; it never ends before this.
                let ends = self.own_end(owner, mode);
                assert!(ends >= lease.end(now), "{effects:?}");
            }
            Ok(Outcome::NotHeld { ttl_ms }) => {
                assert!(ttl_ms >= -1 && effects.is_empty(), "{effects:?}");
                assert!(!stored.is_free(), "{stored:?} is not to be had");
            }
            Ok(other) => panic!("{other:?}, and nobody waits"),
            Err(refusal) => is_of_what_is_stored(&refusal, stored),
        }
    }

    fn release(&mut self, owner: &[u8], mode: Mode, token: Option<Token>, lease: Option<Lease>) {
        let stored = self.read(owner, ReadDepth::Whole, Reading::All);
        let request = Release {
            key: &self.at.1.clone(),
            owner,
            mode,
            permits: None,
            token,
            lease,
            by: None,
        };
        let (left, effects) = self.decide(Command::Release(&request), stored);
        match left {
            Ok(Outcome::Left(None)) => assert!(effects.is_empty(), "{effects:?}"),
            Ok(Outcome::Left(Some(0))) => {
                assert_eq!(self.own_count(owner, mode), None, "{effects:?}");
            }
            Ok(Outcome::Left(Some(left))) => {
                // Of several entries as a reader, those that are left may be over already.
                let own = self.own_count(owner, mode);
                assert_eq!(own, Some(Count::Valid(left)), "{effects:?}");
            }
            Ok(other) => panic!("{other:?}"),
            Err(refusal) => is_of_what_is_stored(&refusal, stored),
        }
    }

    fn renew(&mut self, owner: &[u8], mode: Mode, lease: Lease) {
        let stored = self.read(owner, ReadDepth::Whole, Reading::All);
        let before = self.own_count(owner, mode);
        let request = Renew {
            key: &self.at.1.clone(),
            owner,
            lease,
            mode,
            token: None,
            session: None,
            wanted: false,
        };
        let (renewed, effects) = self.decide(Command::Renew(&request), stored);
        match renewed {
            Ok(Outcome::Number(1)) => {
                assert!(before.is_some(), "{effects:?}");
                assert_eq!(self.own_count(owner, mode), before, "{effects:?}");
            }
            Ok(Outcome::Number(0)) => assert!(effects.is_empty(), "{effects:?}"),
            Ok(other) => panic!("{other:?}"),
            Err(refusal) => is_of_what_is_stored(&refusal, stored),
        }
    }

    fn break_hold(&mut self) {
        let stored = self.read(b"fence", ReadDepth::Whole, Reading::All);
        let (broken, effects) = self.decide(Command::Break(&self.at.1.clone()), stored);
        match broken {
            Ok(Outcome::Number(1)) => assert_eq!(self.space.get(&self.at), None, "{effects:?}"),
            Ok(Outcome::Number(0)) => {
                assert!(stored.is_free() && effects.is_empty(), "{effects:?}");
            }
            Ok(other) => panic!("{other:?}"),
            Err(refusal) => is_of_what_is_stored(&refusal, stored),
        }
    }

    fn own_count(&self, owner: &[u8], mode: Mode) -> Option<Count> {
        let mut own = own(self.read(owner, ReadDepth::Whole, Reading::All)).into_iter();
        own.find_map(|(of, count)| (of == mode).then_some(count))
    }

    /// When the owner's hold ends; the end of all times if never.
    fn own_end(&self, owner: &[u8], mode: Mode) -> i64 {
        let key_end = self.space.get(&self.at).and_then(|entry| entry.ends_at);
        let own_end = match self.read(owner, ReadDepth::Whole, Reading::All) {
            Stored::ReadWrite(hash) if mode == Mode::Read => hash.own_read.map(|own| own.ends_at()),
            _ => None,
        };
        let end = key_end.unwrap_or(i64::MAX);
        own_end.map_or(end, |own_end| own_end.min(end))
    }

    fn carry_out(&mut self, caller: &[u8], is_refused: bool, effects: &[Effect]) {
        assert!(!is_refused || effects.is_empty(), "refused: {effects:?}");
        for effect in effects {
            if let Effect::Write { write, .. } = effect
                && let Err(wrong) = self.space.carry_out(&self.at, caller, write)
            {
                panic!("{wrong}: {effect:?} of {effects:?} at {:?}", self.space);
            }
        }
    }
}

/// The holds of the owner, each with its mode.
fn own(stored: Stored) -> Vec<(Mode, Count)> {
    let all = match stored {
        Stored::Plain(hash) => vec![(Mode::Plain, hash.own)],
        Stored::ReadWrite(hash) => vec![
            (Mode::Read, hash.own_read.map(|own| own.count)),
            (Mode::Write, hash.own_write.map(|own| own.count)),
        ],
        Stored::Free | Stored::NoHolder | Stored::Permits(_) | Stored::OtherType | Stored::Data => {
            Vec::new()
        }
    };
    let some = all.into_iter();
    some.filter_map(|(mode, count)| Some((mode, count?)))
        .collect()
}

/// A command that is well formed is refused for the stored value, and for nothing else.
fn is_of_what_is_stored(refusal: &CommandError, stored: Stored) {
    let own = || own(stored).into_iter().map(|(_, count)| count);
    let fits = match refusal {
        CommandError::WrongType => stored == Stored::OtherType,
        CommandError::Data => stored == Stored::Data,
        CommandError::WrongKind { .. } => matches!(stored, Stored::Plain(_) | Stored::ReadWrite(_)),
        CommandError::HoldCountMalformed => own().any(|count| count == Count::Malformed),
        CommandError::HoldCountOverflow => {
            own().any(|count| matches!(count, Count::Valid(held) if held >= 2_147_483_647))
        }
        _ => false,
    };
    assert!(fits, "{refusal} at {stored:?}");
}

fn field(choices: &mut Choices<'_>) -> Vec<u8> {
    let owner = choices.of(&OWNERS);
    match choices.below(8) {
        0..3 => owner.to_vec(),
        3 => writer_field(owner),
        4 => b"fence".to_vec(),
        5 | 6 => b"mode".to_vec(),
        _ => choices.bytes(8),
    }
}

fn value(choices: &mut Choices<'_>) -> Vec<u8> {
    let known: [&[u8]; 18] = [
        b"read",
        b"write",
        b"1",
        b"2",
        b"3",
        b"2147483646",
        b"2147483647",
        b"2147483648",
        b"9223372036854775807",
        b"9223372036854775808",
        b"t77",
        b"77",
        b"0",
        b"-1",
        b"2:t78",
        b"2147483648:t9223372036854775807",
        b"0:t78",
        b"1:t0",
    ];
    match choices.below(6) {
        0 => choices.bytes(8),
        1 => choices.number().to_string().into_bytes(),
        _ => choices.of(&known).to_vec(),
    }
}

/// Any end, or none. A key with an end before now is gone already.
fn end(choices: &mut Choices<'_>, wall_ms: i64) -> Option<i64> {
    let near = choices.of(&[50, 0, 1, 7, 900]);
    match choices.below(4) {
        0 => None,
        1 => Some(choices.number().max(wall_ms)),
        _ => Some(wall_ms + near),
    }
}
