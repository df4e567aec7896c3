//! The content of a lock's key as plain values. It is read anew for each decision.

use crate::interface::error::CommandError;
use crate::interface::stored_permits::{PermitsHash, PermitsHold, Room};
use crate::values::known::Known;
use crate::values::limits::HOLD_COUNT_MAX;
use crate::values::mode::{Kind, Mode};
use crate::values::number::{self, Text};
use crate::values::time::{NEVER, Now, ttl_ms};
use crate::values::token::Token;

/// The content of a lock's key, as one owner sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// No key.
    Free,
    /// A hash without a holder: at most `fence`, `mode`, and readers whose leases are over. The
    /// lock is free, and the next grant removes the rest.
    NoHolder,
    /// A plain lock's hash with a holder.
    Plain(Hash),
    /// A read-write lock's hash with a holder.
    ReadWrite(ReadWrite),
    /// Permits. If a task asks for permits, also when nobody holds any.
    Permits(PermitsHash),
    /// A key of another type.
    OtherType,
    /// A hash that is no lock, ours or Redisson's: it has no TTL, and a field with a value that no
    /// lock has.
    Data,
}

impl Stored {
    /// Whether the lock has no holder.
    pub fn is_free(&self) -> bool {
        match self {
            Self::Free | Self::NoHolder => true,
            Self::Permits(hash) => hash.is_free(),
            Self::Plain(_) | Self::ReadWrite(_) | Self::OtherType | Self::Data => false,
        }
    }

    /// Whether the lock has no holder, but a key that the next grant must remove.
    pub(crate) fn leaves_hash(&self) -> bool {
        match self {
            Self::NoHolder => true,
            Self::Permits(hash) => hash.is_free() && hash.is_there,
            _ => false,
        }
    }

    /// The refusal of a key that is no lock.
    pub(crate) fn not_a_lock(&self) -> Option<CommandError> {
        match self {
            Self::OtherType => Some(CommandError::WrongType),
            Self::Data => Some(CommandError::Data),
            _ => None,
        }
    }

    /// The permits; an empty hash of them if the key holds none.
    pub(crate) fn permits(&self) -> PermitsHash {
        match self {
            Self::Permits(hash) => *hash,
            other => PermitsHash::free(other.leaves_hash()),
        }
    }

    /// The rest of the present lease in milliseconds; -1 if it has no end, 0 if the lock is free.
    /// For permits, the time until enough of them are free for the request.
    pub fn ttl_ms(&self, now: Now) -> i64 {
        match self {
            Self::Plain(_) | Self::ReadWrite(_) => ttl_ms(self.ends_at(), now),
            Self::Permits(hash) => hash.ttl_ms(now),
            Self::Free | Self::NoHolder | Self::OtherType | Self::Data => 0,
        }
    }

    /// The kind of lock, if it has a holder.
    pub(crate) fn kind(&self) -> Option<Kind> {
        match self {
            Self::Plain(_) => Some(Kind::Plain),
            Self::ReadWrite(_) => Some(Kind::ReadWrite),
            Self::Permits(hash) => (!hash.is_free()).then_some(Kind::Permits),
            Self::Free | Self::NoHolder | Self::OtherType | Self::Data => None,
        }
    }

    /// When the key expires; none if never, or if the lock has no holder.
    pub(crate) fn ends_at(&self) -> Option<i64> {
        match self {
            Self::Plain(hash) => hash.ends_at(),
            Self::ReadWrite(hash) => hash.ends_at(),
            Self::Permits(hash) => hash.ends_at.filter(|_| !hash.is_free()),
            Self::Free | Self::NoHolder | Self::OtherType | Self::Data => None,
        }
    }

    /// When the lock will be free for this mode, as far as is known.
    pub(crate) fn ends_for(&self, mode: Mode) -> Option<i64> {
        match self {
            Self::Permits(hash) if mode == Mode::Permits => hash.room.at(),
            // Also for a plain waiter, which is in this queue because a script made the lock a
            // read-write lock.
            Self::ReadWrite(hash) if mode != Mode::Read => hash.readers_end(),
            _ => self.ends_at(),
        }
    }

    /// When the owner's own hold ends; none if never, or if it has none.
    pub(crate) fn own_end(&self, mode: Mode) -> Option<i64> {
        match self {
            Self::ReadWrite(hash) if mode == Mode::Read => {
                hash.with_key(hash.own_read.map(|own| own.ends_at()))
            }
            Self::Permits(hash) if mode == Mode::Permits => hash.own_end(),
            _ => self.ends_at(),
        }
    }

    /// Whether the owner that this was read for, the first in the queue, can get the lock in this
    /// mode, with ONCE or without.
    pub(crate) fn lets_in(&self, mode: Mode, once: bool) -> bool {
        match self.own(mode) {
            None => self.has_room(mode),
            // Another client's script made the first waiter's owner the holder. An owner re-enters
            // its own hold and never waits for it.
            Some((Count::Valid(held), _)) => Count::entered(held, once).is_some(),
            Some((Count::Malformed, _)) => false,
        }
    }

    /// Whether an owner without a hold could enter beside the present holders, if nobody waited.
    pub(crate) fn has_room(&self, mode: Mode) -> bool {
        match (self, mode) {
            (_, Mode::Permits) => self.permits().room == Room::Now,
            (Self::ReadWrite(hash), Mode::Read) => hash.lets_read(),
            _ => self.is_free(),
        }
    }

    /// Whether an entry is a new grant to the owner that this was read for, and not a re-entry. A
    /// writer that begins to read lets no other owner in, so this is not a new grant.
    pub(crate) fn is_new_to_owner(&self, mode: Mode) -> bool {
        let writes = matches!(self, Self::ReadWrite(hash) if hash.own_write.is_some());
        self.own(mode).is_none() && !(mode == Mode::Read && writes)
    }

    /// The owner's own hold, with its token; none if another client's script took the hold.
    pub(crate) fn own(&self, mode: Mode) -> Option<(Count, Option<Token>)> {
        match (self, mode) {
            (Self::Plain(hash), Mode::Plain) => hash.own.map(|count| (count, hash.token())),
            (Self::ReadWrite(hash), Mode::Read | Mode::Write) => hash.own(mode),
            (Self::Permits(hash), Mode::Permits) => hash
                .own
                .map(|own| (Count::Valid(own.permits.get()), Some(own.token))),
            _ => None,
        }
    }

    /// Whether it is a hash that may have no TTL, as far as was read. No lock of ours has none.
    pub fn may_be_without_end(&self) -> bool {
        match self {
            Self::Plain(hash) => hash.ends_at == Known::read(None),
            Self::ReadWrite(hash) => hash.ends_at == Known::read(None),
            Self::Permits(hash) => hash.ends_at.is_none(),
            Self::NoHolder => true,
            Self::Free | Self::OtherType | Self::Data => false,
        }
    }

    /// The token of the present holder, if it has one. Each reader and each holder of permits has
    /// its own, so there it is the caller's.
    pub(crate) fn present_token(&self, mode: Mode) -> Option<Token> {
        match self {
            Self::Plain(hash) => hash.token(),
            Self::Permits(hash) => hash.own.map(|own| own.token),
            Self::ReadWrite(hash) => match (mode, hash.own_read, hash.own_write) {
                (Mode::Read, Some(own), _) => own.token,
                (_, _, Some(own)) => own.token,
                _ => hash.others_token,
            },
            Self::Free | Self::NoHolder | Self::OtherType | Self::Data => None,
        }
    }
}

impl PermitsHash {
    /// The stored value, for a task that [is about permits](crate::Task::is_about_permits) or not.
    pub fn stored(self, is_about_permits: bool) -> Stored {
        if self.is_free() && !is_about_permits {
            return Stored::NoHolder;
        }
        Stored::Permits(self)
    }
}

/// A holder of a lock: the only one, or one of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBy {
    /// The owner.
    pub owner: Box<[u8]>,
    /// The mode in which it is held.
    pub mode: Mode,
    /// The token, if it has one.
    pub token: Option<Token>,
    /// When the hold ends, in milliseconds of the wall clock, or [`NEVER`].
    pub ends_at: i64,
}

/// A plain lock's hash, as far as a decision about one owner needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash {
    /// The owner's own field, if it exists.
    pub own: Option<Count>,
    /// The token, if the hash has one that we wrote, and [the decision needs
    /// it](crate::Task::needs_token).
    pub token: Known<Option<Token>>,
    /// Whether the hash has another owner's field. Our own writes never lead to `own` and `others`
    /// at the same time. Another client's may, and then each field's owner is a holder, and no
    /// holder's lease may be shortened.
    pub others: bool,
    /// When the key expires, in milliseconds of the wall clock; none if never.
    pub ends_at: Known<Option<i64>>,
}

impl Hash {
    /// When the key expires; none if never.
    pub fn ends_at(&self) -> Option<i64> {
        self.ends_at.get_or(None)
    }

    /// The token, if the hash has one that we wrote.
    pub fn token(&self) -> Option<Token> {
        self.token.get_or(None)
    }
}

/// A read-write lock's hash with its readers' timeout keys, as far as a decision about one owner
/// needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadWrite {
    /// The owner's own hold as the writer.
    pub own_write: Option<WriteHold>,
    /// The owner's own hold as a reader, if its lease is not over.
    pub own_read: Option<ReadHold>,
    /// Whether other readers are kept out: another owner writes, or the `mode` field does not say
    /// `read` and this owner does not write either.
    pub others_write: bool,
    /// The token of another owner that writes, if its field was read and has one.
    pub others_token: Option<Token>,
    /// When the last of the other readers' leases ends, in milliseconds of the wall clock;
    /// [`NEVER`] without an end, none if no other owner reads.
    pub others_read: Option<i64>,
    /// When the key expires, in milliseconds of the wall clock; none if never.
    pub ends_at: Known<Option<i64>>,
    /// Whether some readers were not looked at because of [`Self::TIMEOUTS_MAX`]; their leases may
    /// be over.
    pub is_partial: bool,
}

impl ReadWrite {
    /// At most this many timeout keys are looked at for one decision, the latest of each reader
    /// first. Readers beyond it count as readers for as long as the key lives, until the fields of
    /// those whose leases are over are removed from the hash. Without this bound a field that
    /// claims any number of timeout keys could keep the server busy.
    pub const TIMEOUTS_MAX: usize = 50_000;

    /// When the key expires; none if never.
    pub fn ends_at(&self) -> Option<i64> {
        self.ends_at.get_or(None)
    }

    /// The owner's own hold in this mode, with its token if it has one.
    pub(crate) fn own(&self, mode: Mode) -> Option<(Count, Option<Token>)> {
        match mode {
            Mode::Write => self.own_write.map(|write| (write.count, write.token)),
            _ => self.own_read.map(|read| (read.count, read.token)),
        }
    }

    /// The mode in which the lock is held.
    pub(crate) fn mode(&self) -> Mode {
        if self.own_write.is_some() || self.others_write {
            Mode::Write
        } else {
            Mode::Read
        }
    }

    /// Whether the owner may begin to read.
    pub(crate) fn lets_read(&self) -> bool {
        self.own_write.is_some() || !self.others_write
    }

    /// When the last reader's lease ends. The lock ends with it, unless it has a writer.
    fn readers_end(&self) -> Option<i64> {
        if self.mode() == Mode::Write {
            return self.ends_at();
        }
        let own = self.own_read.map(|own| own.ends_at());
        self.with_key(own.max(self.others_read))
    }

    /// When a lease ends with the key at the latest: Redisson's renewal sets its expiry to its own
    /// lease. None if never.
    fn with_key(&self, end: Option<i64>) -> Option<i64> {
        let end = end.min(self.ends_at().or(end));
        end.filter(|end| *end != NEVER)
    }

    /// When the key must expire if the owner's own reading ends at `own_read`, or is over; none if
    /// its expiry need not change. A writer's lease is the key's expiry, so with a writer the key
    /// never ends earlier.
    pub(crate) fn key_end(&self, own_read: Option<i64>) -> Option<i64> {
        self.end_of(&[own_read, self.others_read], self.mode() == Mode::Write)
    }

    /// When the key must expire if the owner reads on at least until `own_read`; none if its expiry
    /// is late enough already. A key without an expiry gets one, unless it has a writer.
    pub(crate) fn key_end_prolonged(&self, own_read: i64) -> Option<i64> {
        let is_later = |end: &i64| self.ends_at().is_none_or(|at| *end > at);
        self.key_end(Some(own_read)).filter(is_later)
    }

    /// When the key must expire if the owner's lease as the writer shall end at `wanted`; none if
    /// its expiry need not change. Never before the end of a reader's lease.
    pub(crate) fn write_end(&self, wanted: i64) -> Option<i64> {
        let own_read = self.own_read.map(|own| own.ends_at());
        self.end_of(
            &[Some(wanted), own_read, self.others_read],
            self.others_write,
        )
    }

    /// The last of these ends. It is not before the key's present expiry if `present_stays`, or if
    /// one of the ends is [`NEVER`]. None if the key's expiry need not change.
    fn end_of(&self, ends: &[Option<i64>], present_stays: bool) -> Option<i64> {
        let ending = ends.iter().flatten().filter(|end| **end != NEVER);
        let mut end = ending.copied().max();
        if present_stays || ends.contains(&Some(NEVER)) {
            end = end.max(Some(self.ends_at()?));
        }
        end.filter(|end| Some(*end) != self.ends_at())
    }
}

/// A writer's hold, as it is stored in the owner's field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteHold {
    /// The hold count.
    pub count: Count,
    /// The token; none if another client's script took the hold.
    pub token: Option<Token>,
}

impl WriteHold {
    /// Parses the value of a writer's field: `<count>:t<token>`. Redisson writes a bare count.
    pub fn from_field(value: &[u8]) -> Self {
        let Some(at) = value.iter().position(|byte| *byte == b':') else {
            let count = Count::from_field(value);
            return Self { count, token: None };
        };
        let (count, token) = value.split_at(at);
        let token = Token::from_field(token.get(1..).unwrap_or_default());
        let count = token.map_or(Count::Malformed, |_| Count::from_field(count));
        Self {
            count,
            token: token.filter(|_| count != Count::Malformed),
        }
    }

    /// The value of a writer's field: two numbers, a separator, and a `t`.
    pub fn text(count: i64, token: Token) -> Text<40> {
        Text::empty()
            .after_all(Text::number(token.get()).bytes())
            .after_all(b":t")
            .after_all(Text::number(count).bytes())
    }
}

/// A reader's hold whose lease is not over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadHold {
    /// The value of its field.
    pub count: Count,
    /// The value of the latest timeout key that we wrote, if it exists.
    pub token: Option<Token>,
    /// When the last of its timeout keys expires, in milliseconds of the wall clock, or [`NEVER`].
    /// They are the latest that we wrote, and those that another client's script wrote since. Ours
    /// has the longest lease that the reader had when we wrote it.
    pub ends_at: Known<i64>,
}

impl ReadHold {
    /// When its lease ends, in milliseconds of the wall clock, or [`NEVER`].
    pub fn ends_at(&self) -> i64 {
        self.ends_at.get_or(NEVER)
    }
}

/// Whether this is the value of an owner's field in a lock of any kind: a count, a writer's hold,
/// or permits.
pub fn is_value_of_lock(value: &[u8]) -> bool {
    WriteHold::from_field(value).count != Count::Malformed
        || PermitsHold::from_field(value).is_some()
}

/// The value of an owner's field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// A hold count, 1 or more. A count that another client wrote may be above our largest.
    Valid(i64),
    /// Any other value. Its owner holds the lock, but the value cannot be counted up or down.
    Malformed,
}

impl Count {
    /// Parses the value of an owner's field.
    pub fn from_field(value: &[u8]) -> Self {
        match number::integer(value) {
            Some(count) if count >= 1 => Self::Valid(count),
            _ => Self::Malformed,
        }
    }

    /// The count after one more entry; none if it would be above the largest. ONCE does not count
    /// a hold a second time.
    pub(crate) fn entered(count: i64, once: bool) -> Option<i64> {
        if once && count > 0 {
            return Some(count);
        }
        count.checked_add(1).filter(|next| *next <= HOLD_COUNT_MAX)
    }
}
