//! The changes of a key in few bytes, which `RLOCK.APPLY` carries in place of plain commands.
//!
//! A change is a list of steps. Each step is one plain command, or one field of an `HSET` of
//! several fields. A step begins with a byte for its kind, and its values follow:
//!
//! - a number: seven bits in a byte, the lowest first; the eighth bit says that more bytes follow
//! - a time: the milliseconds since the last token in this change, which is in microseconds, or
//!   since 1970 if there was no token before; it is written as a number whose last bit is the sign
//! - a name: 0, the sixteen bytes of a UUID and a number, for `<uuid>:<number>`; 1 for the same
//!   name as before; else its length plus 2, and its bytes
//!
//! Values that do not fit into these forms are written in full, so every change is read as it was
//! written. Any other bytes are refused: a reader never panics, and never allocates memory for a
//! number that the bytes claim.

use crate::interface::effect::{Field, Value, Write};
use crate::interface::stored::WriteHold;
use crate::interface::stored_permits::{Permits, PermitsHold};
use crate::values::mode::Mode;
use crate::values::names::{self, FENCE_FIELD, MODE_FIELD};
use crate::values::number::{self, Text};
use crate::values::token::Token;
use std::borrow::Cow;

/// One step, as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// `HSET` of a field.
    Set {
        /// The field.
        field: FieldName<'a>,
        /// Its value.
        value: FieldValue<'a>,
        /// Whether the next step sets another field with the same command.
        more: bool,
    },
    /// `HDEL` of a field.
    Remove(Name<'a>),
    /// `PEXPIREAT`, in milliseconds of the wall clock.
    ExpireAt(i64),
    /// `DEL`.
    Delete,
    /// `SET` of a reader's timeout key.
    SetTimeout {
        /// The reader.
        reader: Name<'a>,
        /// The number of the entry.
        number: i64,
        /// Its value.
        value: i64,
        /// When it expires, in milliseconds of the wall clock.
        at: i64,
    },
    /// `DEL` of the timeout key of this reader with this number.
    DeleteTimeout(Name<'a>, i64),
    /// `SET` of the key that stores the limit of permits.
    SetLimit(i64),
    /// `DEL` of that key.
    DeleteLimit,
    /// `PUBLISH` or `SPUBLISH` of the unlock message, or both.
    Publish(Message),
}

/// The name of a field, as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldName<'a> {
    /// The field of an owner, or any other.
    Named(Name<'a>),
    /// The field of an owner as the writer.
    Writer(Name<'a>),
    /// The field of the fencing token.
    Fence,
    /// The field that marks the hash as a read-write lock, or as permits.
    Mode,
}

impl FieldName<'_> {
    /// The field's name.
    pub fn bytes<'b>(&'b self, buffer: &'b mut NameBuffer) -> Cow<'b, [u8]> {
        match self {
            Self::Named(name) => Cow::Borrowed(name.bytes(buffer)),
            Self::Writer(name) => Cow::Owned(names::writer_field(name.bytes(buffer))),
            Self::Fence => Cow::Borrowed(FENCE_FIELD),
            Self::Mode => Cow::Borrowed(MODE_FIELD),
        }
    }
}

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldValue<'a> {
    /// A number, a token or a mode.
    Short(Value),
    /// An owner's permits.
    Permits(PermitsHold),
    /// Any other value.
    Plain(&'a [u8]),
}

impl FieldValue<'_> {
    /// The value's bytes, formatted in `buffer` if necessary.
    pub fn bytes<'b>(&'b self, buffer: &'b mut Text<52>) -> &'b [u8] {
        match self {
            Self::Short(value) => *buffer = Text::empty().after_all(value.text().bytes()),
            Self::Permits(hold) => *buffer = hold.text(),
            Self::Plain(bytes) => return bytes,
        }
        buffer.bytes()
    }
}

/// A name, as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name<'a> {
    /// A name in full.
    InFull(&'a [u8]),
    /// `<uuid>:<number>`.
    OfUuid(&'a [u8; 16], i64),
}

/// A buffer in which a name is formatted.
#[derive(Debug)]
pub struct NameBuffer {
    bytes: [u8; UUID_LEN + 1 + 20],
}

impl Default for NameBuffer {
    fn default() -> Self {
        let bytes = [b'-'; UUID_LEN + 1 + 20];
        Self { bytes }
    }
}

impl Name<'_> {
    /// The name's bytes, formatted in `buffer` if necessary.
    pub fn bytes<'b>(&'b self, buffer: &'b mut NameBuffer) -> &'b [u8] {
        let (uuid, number) = match self {
            Self::InFull(name) => return name,
            Self::OfUuid(uuid, number) => (uuid, number),
        };
        let text = &mut buffer.bytes;
        let digit = |value: u8| HEX.get(usize::from(value & 0xf)).copied().unwrap_or(b'0');
        for (byte, [high, low]) in uuid.iter().zip(PLACES) {
            if let Some(place) = text.get_mut(high) {
                *place = digit(*byte >> 4);
            }
            if let Some(place) = text.get_mut(low) {
                *place = digit(*byte);
            }
        }
        let number = Text::<24>::number(*number);
        let colon = text.iter_mut().skip(UUID_LEN);
        let rest = std::iter::once(&b':').chain(number.bytes());
        for (place, byte) in colon.zip(rest) {
            *place = *byte;
        }
        let end = number.bytes().len().saturating_add(UUID_LEN + 1);
        text.get(..end).unwrap_or_default()
    }
}

/// The unlock message of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The mode in which the lock was held: plain, read or write.
    pub held_as: Mode,
    /// Whether it is sent with `PUBLISH`.
    pub classic: bool,
    /// Whether it is sent with `SPUBLISH`.
    pub sharded: bool,
}

/// The kind of a step: the lower five bits of its first byte.
mod kind {
    pub(super) const SET: u8 = 0;
    pub(super) const SET_WRITER: u8 = 1;
    pub(super) const SET_FENCE: u8 = 2;
    pub(super) const SET_READ: u8 = 3;
    pub(super) const SET_WRITE: u8 = 4;
    pub(super) const SET_OF_PERMITS: u8 = 5;
    pub(super) const SET_PERMITS: u8 = 6;
    pub(super) const SET_IN_FULL: u8 = 7;
    pub(super) const REMOVE: u8 = 8;
    pub(super) const EXPIRE_AT: u8 = 9;
    pub(super) const DELETE: u8 = 10;
    pub(super) const SET_TIMEOUT: u8 = 11;
    pub(super) const DELETE_TIMEOUT: u8 = 12;
    pub(super) const SET_LIMIT: u8 = 13;
    pub(super) const DELETE_LIMIT: u8 = 14;
    pub(super) const PUBLISH: u8 = 15;
    pub(super) const PUBLISH_READ: u8 = 16;
    pub(super) const PUBLISH_WRITE: u8 = 17;

    pub(super) const MASK: u8 = 0x1f;
    /// The next step sets another field with the same command.
    pub(super) const MORE: u8 = 0x80;
    pub(super) const CLASSIC: u8 = 0x20;
    pub(super) const SHARDED: u8 = 0x40;
}

// --- Writing -------------------------------------------------------------------------------------

/// Writes the changes of one key.
#[derive(Debug, Default)]
pub struct ChangeWriter {
    bytes: Vec<u8>,
    last_name: LastName,
    base_ms: i64,
}

/// The last name that was written.
#[derive(Debug, Default)]
enum LastName {
    #[default]
    None,
    /// A name in full, from one index of the bytes to another.
    InFull(usize, usize),
    OfUuid([u8; 16], i64),
}

impl ChangeWriter {
    /// A writer that uses this memory.
    pub fn with(mut bytes: Vec<u8>) -> Self {
        bytes.clear();
        Self {
            bytes,
            ..Self::default()
        }
    }

    /// Begins another change.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.last_name = LastName::None;
        self.base_ms = 0;
    }

    /// The change that was written.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The memory, to be reused.
    pub fn into_memory(self) -> Vec<u8> {
        self.bytes
    }

    /// Adds a write that was decided for this caller.
    pub fn add(&mut self, write: &Write, caller: &[u8]) {
        match write {
            Write::Set(first, second) => {
                self.set(first, caller, second.is_some());
                if let Some(second) = second {
                    self.set(second, caller, false);
                }
            }
            Write::SetPermits(holder, hold, is_first) => {
                if *is_first {
                    self.bytes.push(kind::SET_OF_PERMITS | kind::MORE);
                }
                self.bytes.push(kind::SET_PERMITS);
                self.name(holder.name(caller));
                self.number(hold.permits.get());
                self.token(hold.token);
                self.time(hold.ends_at);
            }
            Write::SetWriter(holder, count, token, is_first) => {
                if *is_first {
                    self.bytes.push(kind::SET_WRITE | kind::MORE);
                }
                self.bytes.push(kind::SET_IN_FULL);
                self.name(&names::writer_field(holder.name(caller)));
                self.plain(WriteHold::text(*count, *token).bytes());
            }
            Write::Remove(field) => {
                self.bytes.push(kind::REMOVE);
                self.name(&field.name(caller));
            }
            Write::ExpireAt(at) => {
                self.bytes.push(kind::EXPIRE_AT);
                self.time(*at);
            }
            Write::Delete => self.bytes.push(kind::DELETE),
            Write::SetTimeout(key, value, at) => {
                self.bytes.push(kind::SET_TIMEOUT);
                self.name(key.reader.name(caller));
                self.number(key.number);
                let value = as_number(*value);
                self.number(value);
                self.base_ms = base_of(value, self.base_ms);
                self.time(*at);
            }
            Write::DeleteTimeout(key) => {
                self.bytes.push(kind::DELETE_TIMEOUT);
                self.name(key.reader.name(caller));
                self.number(key.number);
            }
            Write::SetLimit(value) => {
                self.bytes.push(kind::SET_LIMIT);
                self.number(as_number(*value));
            }
            Write::DeleteLimit => self.bytes.push(kind::DELETE_LIMIT),
        }
    }

    /// Adds the unlock message. Permits have none.
    pub fn publish(&mut self, message: Message) {
        let kind = match message.held_as {
            Mode::Plain => kind::PUBLISH,
            Mode::Read => kind::PUBLISH_READ,
            Mode::Write => kind::PUBLISH_WRITE,
            Mode::Permits => return,
        };
        let flag = |is: bool, flag: u8| if is { flag } else { 0 };
        let classic = flag(message.classic, kind::CLASSIC);
        self.bytes
            .push(kind | classic | flag(message.sharded, kind::SHARDED));
    }

    fn set(&mut self, (field, value): &(Field, Value), caller: &[u8], more: bool) {
        let more = if more { kind::MORE } else { 0 };
        match (field, value) {
            (Field::Owner(holder), Value::Number(count)) => {
                self.bytes.push(kind::SET | more);
                self.name(holder.name(caller));
                self.number(*count);
            }
            (Field::Named(name), Value::Number(count)) => {
                self.bytes.push(kind::SET | more);
                self.name(name);
                self.number(*count);
            }
            (Field::Writer(holder), Value::Number(count)) => {
                self.bytes.push(kind::SET_WRITER | more);
                self.name(holder.name(caller));
                self.number(*count);
            }
            (Field::Fence, Value::Fence(token)) => {
                self.bytes.push(kind::SET_FENCE | more);
                self.token(*token);
            }
            (Field::Mode, Value::Mode(Mode::Read)) => self.bytes.push(kind::SET_READ | more),
            (Field::Mode, Value::Mode(Mode::Write)) => self.bytes.push(kind::SET_WRITE | more),
            (Field::Mode, Value::Mode(Mode::Permits)) => {
                self.bytes.push(kind::SET_OF_PERMITS | more);
            }
            (field, value) => {
                self.bytes.push(kind::SET_IN_FULL | more);
                self.name(&field.name(caller));
                self.plain(value.text().bytes());
            }
        }
    }

    fn token(&mut self, token: Token) {
        self.number(token.get());
        self.base_ms = base_of(token.get(), self.base_ms);
    }

    fn time(&mut self, at_ms: i64) {
        let from_base = at_ms.wrapping_sub(self.base_ms);
        // The sign goes into the lowest bit, so that numbers near 0 are short in both directions.
        self.number(from_base.wrapping_shl(1) ^ (from_base >> 63));
    }

    fn name(&mut self, name: &[u8]) {
        let of_uuid = uuid_and_number(name);
        let is_last = match (&self.last_name, &of_uuid) {
            (LastName::OfUuid(uuid, number), Some(new)) => (uuid, number) == (&new.0, &new.1),
            (LastName::InFull(start, end), None) => self.bytes.get(*start..*end) == Some(name),
            _ => false,
        };
        if is_last {
            return self.bytes.push(SAME_NAME);
        }
        if let Some((uuid, number)) = of_uuid {
            self.bytes.push(NAME_OF_UUID);
            self.bytes.extend_from_slice(&uuid);
            self.number(number);
            self.last_name = LastName::OfUuid(uuid, number);
            return;
        }
        self.length(name.len(), NAME_IN_FULL);
        let start = self.bytes.len();
        self.bytes.extend_from_slice(name);
        self.last_name = LastName::InFull(start, self.bytes.len());
    }

    fn plain(&mut self, bytes: &[u8]) {
        self.length(bytes.len(), 0);
        self.bytes.extend_from_slice(bytes);
    }

    fn length(&mut self, len: usize, more: u8) {
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        self.number(len.saturating_add(more.into()));
    }

    fn number(&mut self, number: i64) {
        let mut rest = number.cast_unsigned();
        loop {
            let [low, ..] = rest.to_le_bytes();
            rest >>= 7;
            if rest == 0 {
                return self.bytes.push(low & 0x7f);
            }
            self.bytes.push(low | 0x80);
        }
    }
}

/// The value of a timeout key or of a limit. A mode is never written there.
fn as_number(value: Value) -> i64 {
    match value {
        Value::Number(number) => number,
        Value::Fence(token) => token.get(),
        Value::Mode(_) => 0,
    }
}

const NAME_OF_UUID: u8 = 0;
const SAME_NAME: u8 = 1;
/// The first number of a name in full is its length plus this.
const NAME_IN_FULL: u8 = 2;

/// The base of the times that follow: the moment of a token, in milliseconds. A token is in
/// microseconds of the wall clock, or somewhat ahead. A number that is too small for a token leaves
/// the base as it is.
fn base_of(token: i64, before: i64) -> i64 {
    if token > LEAST_TOKEN {
        token / 1000
    } else {
        before
    }
}

/// Every token is larger. The `1` that Redisson writes into a timeout key is not.
const LEAST_TOKEN: i64 = 1_000_000_000;

/// The length of a UUID as text, and the places of its dashes.
const UUID_LEN: usize = 36;
const DASHES: [usize; 4] = [8, 13, 18, 23];

/// Parses a UUID in lower case, a colon, and a number in plain decimal.
fn uuid_and_number(name: &[u8]) -> Option<([u8; 16], i64)> {
    let (text, rest) = name.split_at_checked(UUID_LEN)?;
    let [b':', digits @ ..] = rest else {
        return None;
    };
    let number = number::integer(digits).filter(|number| *number >= 0)?;
    if !DASHES.iter().all(|at| text.get(*at) == Some(&b'-')) {
        return None;
    }
    let text = text.first_chunk::<UUID_LEN>()?;
    let (mut uuid, mut wrong) = ([0; 16], 0);
    for (byte, [high, low]) in uuid.iter_mut().zip(PLACES) {
        let (high, low) = (hex_digit(*text.get(high)?), hex_digit(*text.get(low)?));
        wrong |= (high | low) & 0xf0;
        *byte = (high << 4) | (low & 0xf);
    }
    (wrong == 0).then_some((uuid, number))
}

/// The places of the two digits of each byte.
const PLACES: [[usize; 2]; 16] = {
    let starts = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];
    let (mut places, mut at) = ([[0, 1]; 16], 0);
    #[allow(clippy::indexing_slicing, reason = "the compiler runs it")]
    while at < starts.len() {
        places[at] = [starts[at], starts[at] + 1];
        at += 1;
    }
    places
};

/// The value of a hexadecimal digit in lower case; [`NO_DIGIT`] for any other byte.
fn hex_digit(digit: u8) -> u8 {
    HEX_DIGITS
        .get(usize::from(digit))
        .copied()
        .unwrap_or(NO_DIGIT)
}

const NO_DIGIT: u8 = 0xff;
#[allow(clippy::indexing_slicing, reason = "the compiler runs it")]
const HEX_DIGITS: [u8; 256] = {
    let (mut digits, mut value) = ([NO_DIGIT; 256], 0);
    while value < HEX.len() {
        #[allow(
            clippy::as_conversions,
            clippy::cast_possible_truncation,
            reason = "fifteen at most, and a byte is an index"
        )]
        {
            digits[HEX[value] as usize] = value as u8;
        }
        value += 1;
    }
    digits
};
const HEX: [u8; 16] = *b"0123456789abcdef";

// --- Reading -------------------------------------------------------------------------------------

/// The steps of a change, all of them checked.
#[derive(Clone, Debug)]
pub struct Steps<'a> {
    rest: &'a [u8],
    last_name: Option<Name<'a>>,
    base_ms: i64,
}

impl<'a> Steps<'a> {
    /// Reads a change of a key. None if these bytes are not a change.
    pub fn of(bytes: &'a [u8]) -> Option<Self> {
        let steps = Self {
            rest: bytes,
            last_name: None,
            base_ms: 0,
        };
        let mut look = steps.clone();
        let mut more = bytes.is_empty();
        while !look.rest.is_empty() {
            let step = look.step()?;
            // The step after a field with `MORE` must be another field.
            let is_field = matches!(step, Step::Set { .. });
            if more && !is_field {
                return None;
            }
            more = matches!(step, Step::Set { more: true, .. });
        }
        (!more).then_some(steps)
    }

    fn step(&mut self) -> Option<Step<'a>> {
        let first = self.byte()?;
        let more = first & kind::MORE != 0;
        let set = |field, value| Step::Set { field, value, more };
        let short = |field, value| set(field, FieldValue::Short(value));
        let step = match first & kind::MASK {
            kind::SET => short(
                FieldName::Named(self.name()?),
                Value::Number(self.number()?),
            ),
            kind::SET_WRITER => short(
                FieldName::Writer(self.name()?),
                Value::Number(self.number()?),
            ),
            kind::SET_FENCE => short(FieldName::Fence, Value::Fence(self.token()?)),
            kind::SET_READ => short(FieldName::Mode, Value::Mode(Mode::Read)),
            kind::SET_WRITE => short(FieldName::Mode, Value::Mode(Mode::Write)),
            kind::SET_OF_PERMITS => short(FieldName::Mode, Value::Mode(Mode::Permits)),
            kind::SET_PERMITS => {
                let owner = FieldName::Named(self.name()?);
                let permits = Permits::new(self.number()?)?;
                let token = self.token()?;
                let ends_at = self.time()?;
                let hold = PermitsHold {
                    permits,
                    ends_at,
                    token,
                };
                set(owner, FieldValue::Permits(hold))
            }
            kind::SET_IN_FULL => {
                let field = FieldName::Named(self.name()?);
                set(field, FieldValue::Plain(self.plain()?))
            }
            kind::REMOVE => Step::Remove(self.name()?),
            kind::EXPIRE_AT => Step::ExpireAt(self.time()?),
            kind::DELETE => Step::Delete,
            kind::SET_TIMEOUT => {
                let (reader, number, value) = (self.name()?, self.number()?, self.number()?);
                self.base_ms = base_of(value, self.base_ms);
                Step::SetTimeout {
                    reader,
                    number,
                    value,
                    at: self.time()?,
                }
            }
            kind::DELETE_TIMEOUT => Step::DeleteTimeout(self.name()?, self.number()?),
            kind::SET_LIMIT => Step::SetLimit(self.number()?),
            kind::DELETE_LIMIT => Step::DeleteLimit,
            kind::PUBLISH => message(first, Mode::Plain),
            kind::PUBLISH_READ => message(first, Mode::Read),
            kind::PUBLISH_WRITE => message(first, Mode::Write),
            _ => return None,
        };
        // No other step has a meaning for these bits.
        let may_have = match step {
            Step::Set { .. } => kind::MORE,
            Step::Publish(_) => kind::CLASSIC | kind::SHARDED,
            _ => 0,
        };
        (first & !kind::MASK & !may_have == 0).then_some(step)
    }

    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<i64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // The tenth byte has room for one bit.
            if shift == 63 && bits > 1 {
                return None;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(number.cast_signed());
            }
        }
        None
    }

    fn length(&mut self, less: u8) -> Option<usize> {
        let len = self.number()?.checked_sub(less.into())?;
        usize::try_from(len).ok()
    }

    fn token(&mut self) -> Option<Token> {
        let token = Token::new(self.number()?)?;
        self.base_ms = base_of(token.get(), self.base_ms);
        Some(token)
    }

    fn time(&mut self) -> Option<i64> {
        let number = self.number()?;
        let sign = (number & 1).wrapping_neg();
        let from_base = (number.cast_unsigned() >> 1).cast_signed() ^ sign;
        Some(self.base_ms.wrapping_add(from_base))
    }

    fn name(&mut self) -> Option<Name<'a>> {
        let name = match *self.rest.first()? {
            NAME_OF_UUID => {
                self.byte()?;
                let (uuid, rest) = self.rest.split_first_chunk::<16>()?;
                self.rest = rest;
                Name::OfUuid(uuid, self.number().filter(|number| *number >= 0)?)
            }
            SAME_NAME => {
                self.byte()?;
                self.last_name?
            }
            _ => {
                let len = self.length(NAME_IN_FULL)?;
                Name::InFull(self.take(len)?)
            }
        };
        self.last_name = Some(name);
        Some(name)
    }

    fn plain(&mut self) -> Option<&'a [u8]> {
        let len = self.length(0)?;
        self.take(len)
    }
}

impl<'a> Iterator for Steps<'a> {
    type Item = Step<'a>;

    fn next(&mut self) -> Option<Step<'a>> {
        self.step()
    }
}

fn message(first: u8, held_as: Mode) -> Step<'static> {
    Step::Publish(Message {
        held_as,
        classic: first & kind::CLASSIC != 0,
        sharded: first & kind::SHARDED != 0,
    })
}
