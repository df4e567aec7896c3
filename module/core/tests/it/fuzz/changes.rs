//! What `RLOCK.APPLY` carries: any bytes, and any writes, which come back as they were.

use super::choices::Choices;
use rlock_core::change::{ChangeWriter, Message, NameBuffer, Step, Steps};
use rlock_core::{
    Field, Holder, Mode, Permits, PermitsHold, Text, TimeoutKey, Token, Value, Write, names,
};

const KEY: &[u8] = b"k";
const CALLERS: [&[u8]; 5] = [
    b"alice",
    b"0b6bdc62-8d5c-4c0e-9d6f-6b8a5c1f2e3d:1234",
    b"0b6bdc62-8d5c-4c0e-9d6f-6b8a5c1f2e3d:0",
    b"",
    b"1",
];

/// Any bytes are steps, or none; and any writes are read as the plain commands that they are.
pub fn changes(data: &[u8]) {
    if let Some(steps) = Steps::of(data) {
        assert!(steps.count() > 0, "nothing is no change");
    }
    let mut choices = Choices::new(data);
    let caller = choices.of(&CALLERS).to_vec();
    let mut writer = ChangeWriter::default();
    let mut expected = Vec::new();
    for _ in 0..=choices.below(8) {
        if choices.one_in(8) {
            let message = Message {
                held_as: choices.of(&[Mode::Plain, Mode::Read, Mode::Write]),
                classic: choices.one_in(2),
                sharded: choices.one_in(2),
            };
            writer.publish(message);
            expected.push(format!("{message:?}"));
            continue;
        }
        let write = any_write(&mut choices);
        writer.add(&write, &caller);
        expected.extend(plain(&write, &caller));
    }
    let steps = Steps::of(writer.bytes()).expect("what was written is a change");
    let found: Vec<_> = steps.map(|step| read(&step)).collect();
    assert_eq!(found, expected, "{:?}", writer.bytes());
}

fn any_write(choices: &mut Choices<'_>) -> Write {
    match choices.below(12) {
        0 => Write::Remove(any_field(choices)),
        1..=2 => Write::ExpireAt(choices.number()),
        3 => Write::Delete,
        4 => Write::SetTimeout(any_timeout(choices), any_number(choices), choices.number()),
        5 => Write::DeleteTimeout(any_timeout(choices)),
        6 => {
            let hold = PermitsHold {
                permits: Permits::new(1 + choices.number().rem_euclid(1 << 31) / 2).expect("some"),
                ends_at: choices.number(),
                token: any_token(choices),
            };
            Write::SetPermits(any_holder(choices), hold, choices.one_in(2))
        }
        7 => Write::SetLimit(Value::Number(choices.number())),
        8 => Write::DeleteLimit,
        9 => {
            let (holder, token) = (any_holder(choices), any_token(choices));
            let count = choices.number().saturating_abs();
            Write::SetWriter(holder, count, token, choices.one_in(2))
        }
        _ => {
            let first = (any_field(choices), any_value(choices));
            let second = choices.maybe(|choices| (any_field(choices), any_value(choices)));
            Write::Set(first, second)
        }
    }
}

fn any_field(choices: &mut Choices<'_>) -> Field {
    match choices.below(5) {
        0 => Field::Fence,
        1 => Field::Mode,
        2 => Field::Writer(any_holder(choices)),
        3 => Field::Named(any_name(choices).into()),
        _ => Field::Owner(any_holder(choices)),
    }
}

fn any_holder(choices: &mut Choices<'_>) -> Holder {
    if choices.one_in(2) {
        Holder::Caller
    } else {
        Holder::Other(any_name(choices).into())
    }
}

/// Any bytes; or almost a UUID and a number.
fn any_name(choices: &mut Choices<'_>) -> Vec<u8> {
    if choices.one_in(2) {
        return choices.bytes(200);
    }
    let number = choices.number().to_string();
    let mut name = [&CALLERS[1][..37], number.as_bytes()].concat();
    if choices.one_in(2) {
        let [place, to] = choices.number().to_le_bytes()[..2] else {
            return name;
        };
        let place = usize::from(place) % name.len();
        name[place] = to;
    }
    name
}

fn any_timeout(choices: &mut Choices<'_>) -> TimeoutKey {
    let reader = any_holder(choices);
    let number = choices.number();
    TimeoutKey { reader, number }
}

fn any_token(choices: &mut Choices<'_>) -> Token {
    Token::new(choices.number().saturating_abs().max(1)).expect("it is positive")
}

fn any_number(choices: &mut Choices<'_>) -> Value {
    if choices.one_in(2) {
        Value::Number(choices.number())
    } else {
        Value::Number(any_token(choices).get())
    }
}

fn any_value(choices: &mut Choices<'_>) -> Value {
    match choices.below(3) {
        0 => Value::Fence(any_token(choices)),
        1 => Value::Mode(choices.of(&[Mode::Read, Mode::Write, Mode::Permits])),
        _ => Value::Number(choices.number()),
    }
}

fn text(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// A write as plain commands, one for each field, as the module tells of it.
fn plain(write: &Write, caller: &[u8]) -> Vec<String> {
    let set = |(field, value): &(Field, Value), more: bool| {
        let (field, value) = (text(&field.name(caller)), text(value.text().bytes()));
        format!("set {field}={value} {more}")
    };
    match write {
        Write::Set(first, second) => {
            let second_of_both = second.iter().map(|second| set(second, false));
            std::iter::once(set(first, second.is_some()))
                .chain(second_of_both)
                .collect()
        }
        Write::SetPermits(holder, hold, is_first) => {
            let (owner, value) = (text(holder.name(caller)), text(hold.text().bytes()));
            let mode = is_first.then(|| "set mode=permits true".to_owned());
            let own = format!("set {owner}={value} false");
            mode.into_iter().chain([own]).collect()
        }
        Write::SetWriter(holder, count, token, is_first) => {
            let field = text(&names::writer_field(holder.name(caller)));
            let mode = is_first.then(|| "set mode=write true".to_owned());
            let own = format!("set {field}={count}:t{} false", token.get());
            mode.into_iter().chain([own]).collect()
        }
        Write::Remove(field) => vec![format!("remove {}", text(&field.name(caller)))],
        Write::ExpireAt(at) => vec![format!("expire {at}")],
        Write::Delete => vec!["delete".to_owned()],
        Write::SetTimeout(key, value, at) => {
            let key = text(&key.name(KEY, caller));
            let value = text(value.text().bytes());
            vec![format!("side {key}={value} {:?}", Some(at))]
        }
        Write::DeleteTimeout(key) => vec![format!("no side {}", text(&key.name(KEY, caller)))],
        Write::SetLimit(value) => {
            let (key, value) = (text(&names::limit_key(KEY)), text(value.text().bytes()));
            vec![format!("side {key}={value} None")]
        }
        Write::DeleteLimit => vec![format!("no side {}", text(&names::limit_key(KEY)))],
    }
}

fn read(step: &Step<'_>) -> String {
    let mut buffer = NameBuffer::default();
    match step {
        Step::Set { field, value, more } => {
            let mut value_buffer = Text::empty();
            let value = text(value.bytes(&mut value_buffer));
            format!("set {}={value} {more}", text(&field.bytes(&mut buffer)))
        }
        Step::Remove(field) => format!("remove {}", text(field.bytes(&mut buffer))),
        Step::ExpireAt(at) => format!("expire {at}"),
        Step::Delete => "delete".to_owned(),
        Step::SetTimeout {
            reader,
            number,
            value,
            at,
        } => {
            let key = names::timeout_key(KEY, reader.bytes(&mut buffer), *number);
            format!("side {}={value} {:?}", text(&key), Some(at))
        }
        Step::DeleteTimeout(reader, number) => {
            let key = names::timeout_key(KEY, reader.bytes(&mut buffer), *number);
            format!("no side {}", text(&key))
        }
        Step::SetLimit(limit) => format!("side {}={limit} None", text(&names::limit_key(KEY))),
        Step::DeleteLimit => format!("no side {}", text(&names::limit_key(KEY))),
        Step::Publish(message) => format!("{message:?}"),
    }
}

/// A change that was cut off is none, or another: it does not panic.
#[test]
fn the_beginning_of_a_change_is_read_as_something() {
    let mut writer = ChangeWriter::default();
    let token = Token::new(1_795_000_000_000_000).expect("it is positive");
    let owner = Field::Owner(Holder::Caller);
    let grant = Write::Set(
        (owner, Value::Number(1)),
        Some((Field::Fence, Value::Fence(token))),
    );
    writer.add(&grant, CALLERS[1]);
    let before_end = writer.bytes().len();
    writer.add(&Write::ExpireAt(1_795_000_030_000), CALLERS[1]);
    let bytes = writer.bytes();
    // Sixteen bytes of a UUID, eight of a token, and few besides.
    assert_eq!(bytes.len(), 34, "{bytes:?}");
    for len in 0..bytes.len() {
        let is_change = Steps::of(&bytes[..len]).is_some();
        assert_eq!(is_change, len == before_end, "{len}");
    }
}
