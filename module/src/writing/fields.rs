//! The fields of a lock's hash that a decision sets, as strings of the server.

use crate::ffi::{self, OwnedStr, Str};
use crate::memory::state::Words;
use crate::reading::read_write::writer_field;
use rlock_core::{Field, Holder, Mode, Value, Write, WriteHold};

/// The one or two fields that this write sets; none if it sets no field.
pub(crate) fn of_write<'a>(
    write: &Write,
    caller: Str<'a>,
    words: &'a Words,
) -> Option<(Pair<'a>, Option<Pair<'a>>)> {
    match write {
        Write::Set(first, second) => {
            let second = second.as_ref().map(|pair| Pair::of(pair, caller, words));
            Some((Pair::of(first, caller, words), second))
        }
        Write::SetPermits(holder, hold, is_first) => {
            let owner = OwnedStr::new(holder.name(caller.bytes()));
            let own = Pair::made(owner, hold.text().bytes());
            Some(of_hold(own, *is_first, words.permits.as_str(), words))
        }
        Write::SetWriter(holder, count, token, is_first) => {
            let field = writer_field(holder.name(caller.bytes()));
            let own = Pair::made(field, WriteHold::text(*count, *token).bytes());
            Some(of_hold(own, *is_first, words.write.as_str(), words))
        }
        _ => None,
    }
}

/// The field of a hold, and the `mode` field before it if this is the first hold.
fn of_hold<'a>(
    own: Pair<'a>,
    is_first: bool,
    mode: Str<'a>,
    words: &'a Words,
) -> (Pair<'a>, Option<Pair<'a>>) {
    if is_first {
        let mode = Pair(Word::Known(words.mode.as_str()), Word::Known(mode));
        (mode, Some(own))
    } else {
        (own, None)
    }
}

/// A field with its value.
pub(crate) struct Pair<'a>(Word<'a>, Word<'a>);

impl<'a> Pair<'a> {
    fn of((field, value): &(Field, Value), caller: Str<'a>, words: &'a Words) -> Self {
        let field = Word::of_field(field, caller, words);
        Self(field, Word::of_value(*value, words))
    }

    fn made(field: OwnedStr, value: &[u8]) -> Self {
        Self(Word::Made(field), Word::Made(OwnedStr::new(value)))
    }

    pub(crate) fn as_field(&self) -> ffi::Field<'_> {
        (self.0.as_str(), self.1.as_str())
    }
}

/// A string of the server: one that exists already, or one that is made for this write.
pub(crate) enum Word<'a> {
    Known(Str<'a>),
    Made(OwnedStr),
}

impl<'a> Word<'a> {
    pub(crate) fn of_field(field: &Field, caller: Str<'a>, words: &'a Words) -> Self {
        match field {
            Field::Owner(Holder::Caller) => Self::Known(caller),
            Field::Fence => Self::Known(words.fence.as_str()),
            Field::Mode => Self::Known(words.mode.as_str()),
            Field::Writer(holder) => Self::Made(writer_field(holder.name(caller.bytes()))),
            Field::Owner(_) | Field::Named(_) => {
                Self::Made(OwnedStr::new(&field.name(caller.bytes())))
            }
        }
    }

    pub(crate) fn of_value(value: Value, words: &'a Words) -> Self {
        match value {
            Value::Number(1) => Self::Known(words.one.as_str()),
            Value::Mode(Mode::Read) => Self::Known(words.read.as_str()),
            Value::Mode(Mode::Write) => Self::Known(words.write.as_str()),
            _ => Self::Made(OwnedStr::new(value.text().bytes())),
        }
    }

    pub(crate) fn as_str(&self) -> Str<'_> {
        match self {
            Self::Known(known) => *known,
            Self::Made(made) => made.as_str(),
        }
    }
}
