//! What the keyspace holds at a lock's key, as plain values: read anew for each decision.

use crate::interface::stored_permits::PermitsHash;
use crate::values::limits::HOLD_COUNT_MAX;
use crate::values::mode::{Kind, Mode};
use crate::values::number;
use crate::values::time::{NEVER, Now, ttl_ms};
use crate::values::token::Token;

/// What is stored at a lock's key, as seen by one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Nothing.
    Free,
    /// A hash in which nobody is any more: at most `fence`, `mode` and readers whose leases are
    /// over. The lock is free, and what is left goes with the next grant.
    NoHolder,
    /// A plain lock's hash that somebody is in.
    Plain(Hash),
    /// A read-write lock's hash that somebody is in.
    ReadWrite(ReadWrite),
    /// Permits; also where there are none out, if they were asked for.
    Permits(PermitsHash),
    /// A key of another type.
    OtherType,
}

impl Stored {
    /// Whether nobody has the lock.
    pub fn is_free(&self) -> bool {
        match self {
            Self::Free | Self::NoHolder => true,
            Self::Permits(hash) => hash.is_free(),
            Self::Plain(_) | Self::ReadWrite(_) | Self::OtherType => false,
        }
    }

    /// Whether nobody has the lock, but something is left of it that goes with the next grant.
    pub(crate) fn leaves_hash(&self) -> bool {
        match self {
            Self::NoHolder => true,
            Self::Permits(hash) => hash.is_free() && hash.is_there,
            _ => false,
        }
    }

    /// The permits that are there, if only none.
    pub(crate) fn permits(&self) -> PermitsHash {
        match self {
            Self::Permits(hash) => *hash,
            other => PermitsHash::free(other.leaves_hash()),
        }
    }

    /// What is left of the present lease in milliseconds; -1 if it has no end, 0 if the lock is
    /// free. Of permits, what is left until those that were asked for can be had.
    pub fn ttl_ms(&self, now: Now) -> i64 {
        match self {
            Self::Plain(Hash { ends_at, .. }) | Self::ReadWrite(ReadWrite { ends_at, .. }) => {
                ttl_ms(*ends_at, now)
            }
            Self::Permits(hash) => hash.ttl_ms(now),
            Self::Free | Self::NoHolder | Self::OtherType => 0,
        }
    }

    /// Which kind of lock it is, where somebody has it.
    pub(crate) fn kind(&self) -> Option<Kind> {
        match self {
            Self::Plain(_) => Some(Kind::Plain),
            Self::ReadWrite(_) => Some(Kind::ReadWrite),
            Self::Permits(hash) => (!hash.is_free()).then_some(Kind::Permits),
            Self::Free | Self::NoHolder | Self::OtherType => None,
        }
    }

    /// When the key expires; none if never, or if nobody has the lock.
    pub(crate) fn ends_at(&self) -> Option<i64> {
        match self {
            Self::Plain(Hash { ends_at, .. }) | Self::ReadWrite(ReadWrite { ends_at, .. }) => {
                *ends_at
            }
            Self::Permits(hash) => hash.ends_at.filter(|_| !hash.is_free()),
            Self::Free | Self::NoHolder | Self::OtherType => None,
        }
    }

    /// When the lock will be free for this mode, as far as can be told.
    pub(crate) fn ends_for(&self, mode: Mode) -> Option<i64> {
        match self {
            // Also for a plain one, which waits there because a script made it the other kind.
            Self::ReadWrite(hash) if mode != Mode::Read => hash.readers_end(),
            _ => self.ends_at(),
        }
    }

    /// When the owner's own hold ends; none if never, or if there is none.
    pub(crate) fn own_end(&self, mode: Mode) -> Option<i64> {
        match self {
            Self::ReadWrite(hash) if mode == Mode::Read => {
                let end = hash.own_read.map(|own| own.ends_at);
                // The key can end earlier: Redisson's renewal sets it to its own lease.
                end.min(hash.ends_at.or(end)).filter(|end| *end != NEVER)
            }
            Self::Permits(hash) if mode == Mode::Permits => hash.own_end(),
            _ => self.ends_at(),
        }
    }

    /// Whether the owner for whom this was read, first in line, can have the lock in this mode.
    pub(crate) fn lets_in(&self, mode: Mode) -> bool {
        let may_enter = |own: Option<Count>| match own {
            Some(Count::Valid(held)) => Count::next(held).is_some(),
            _ => false,
        };
        match (self, mode) {
            (free, _) if free.is_free() => true,
            // Somebody else's script made the first in line the holder: what one holds is
            // re-entered, never waited for.
            (Self::Plain(hash), Mode::Plain) => may_enter(hash.own),
            (Self::ReadWrite(hash), Mode::Write) => may_enter(hash.own_write),
            (Self::ReadWrite(hash), Mode::Read) => match hash.own_read {
                Some(own) => may_enter(Some(own.count)),
                None => hash.lets_read(),
            },
            _ => false,
        }
    }

    /// Whether to be let in is a new grant to the owner for whom this was read, and not one more
    /// entry into what it holds. A writer who reads as well lets nobody in.
    pub(crate) fn is_new_to_owner(&self, mode: Mode) -> bool {
        match (self, mode) {
            (Self::Plain(hash), Mode::Plain) => hash.own.is_none(),
            (Self::ReadWrite(hash), Mode::Write) => hash.own_write.is_none(),
            (Self::ReadWrite(hash), Mode::Read) => {
                hash.own_read.is_none() && hash.own_write.is_none()
            }
            _ => true,
        }
    }

    /// The owner's own hold, with its token where the keyspace holds one.
    pub(crate) fn own(&self, mode: Mode) -> Option<(Count, Option<Token>)> {
        match (self, mode) {
            (Self::Plain(hash), Mode::Plain) => hash.own.map(|count| (count, hash.token)),
            (Self::ReadWrite(hash), Mode::Read) => {
                hash.own_read.map(|read| (read.count, read.token))
            }
            (Self::ReadWrite(hash), Mode::Write) => hash.own_write.map(|count| (count, None)),
            (Self::Permits(hash), Mode::Permits) => hash
                .own
                .map(|own| (Count::Valid(own.permits.get()), Some(own.token))),
            _ => None,
        }
    }
}

/// Who has a lock: the one, or one of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBy {
    /// The owner.
    pub owner: Box<[u8]>,
    /// How it is held.
    pub mode: Mode,
    /// The token, where the keyspace holds one.
    pub token: Option<Token>,
    /// When the hold ends, in milliseconds of the wall clock, or [`NEVER`].
    pub ends_at: i64,
}

/// A plain lock's hash, as far as a decision about one owner needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash {
    /// The owner's own field, if it is there.
    pub own: Option<Count>,
    /// The token, if the hash has one that we wrote, and [it counts](crate::Task::needs_token).
    pub token: Option<Token>,
    /// Whether anybody else's field is there. Our own writes never lead to `own` and `others` at
    /// once; somebody else's may, and then each field's owner is a holder whom nothing may cut
    /// short.
    pub others: bool,
    /// When the key expires, in milliseconds of the wall clock; none if never.
    pub ends_at: Option<i64>,
}

/// A read-write lock's hash with its readers' timeout keys, as far as a decision about one owner
/// needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadWrite {
    /// The owner's own field as a writer.
    pub own_write: Option<Count>,
    /// The owner's own hold as a reader, if its lease is not over.
    pub own_read: Option<ReadHold>,
    /// Whether other readers are kept out: somebody else writes, or the hash does not say that it
    /// is read.
    pub others_write: bool,
    /// When the last of the other readers' leases ends, in milliseconds of the wall clock;
    /// [`NEVER`] without an end, none if nobody else reads.
    pub others_read: Option<i64>,
    /// When the key expires, in milliseconds of the wall clock; none if never.
    pub ends_at: Option<i64>,
    /// Whether there are readers beyond [`Self::TIMEOUTS_MAX`], who may be gone.
    pub is_partial: bool,
}

impl ReadWrite {
    /// In one look at a lock no more timeout keys are looked at than this, the latest of each
    /// reader first; readers beyond are taken to read for as long as the key lives, until those who
    /// are gone are taken out of the hash. A field can claim any number of timeout keys, and must
    /// not keep the server busy.
    pub const TIMEOUTS_MAX: usize = 50_000;

    /// How the lock is held.
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

    /// When the last reader's lease ends, and with it the lock if nobody writes.
    fn readers_end(&self) -> Option<i64> {
        if self.mode() == Mode::Write {
            return self.ends_at;
        }
        let own = self.own_read.map(|own| own.ends_at);
        let end = own.max(self.others_read);
        // The key can end earlier: Redisson's renewal sets it to its own lease.
        end.min(self.ends_at.or(end)).filter(|end| *end != NEVER)
    }

    /// When the key must expire if the owner's own reading ends then, or is over; none if that is
    /// when it expires now. A writer's lease is the key's, so with one it never ends earlier.
    pub(crate) fn key_end(&self, own_read: Option<i64>) -> Option<i64> {
        self.end_of(&[own_read, self.others_read], self.mode() == Mode::Write)
    }

    /// When the key must expire if the owner reads on until then at least; none if it does not
    /// expire earlier now.
    pub(crate) fn key_end_prolonged(&self, own_read: i64) -> Option<i64> {
        let is_later = |end: &i64| self.ends_at.is_none_or(|at| *end > at);
        self.key_end(Some(own_read)).filter(is_later)
    }

    /// When the key must expire if the owner's lease as the writer is to end then; none if that is
    /// when it expires now. Never before the end of a reader's.
    pub(crate) fn write_end(&self, wanted: i64) -> Option<i64> {
        let own_read = self.own_read.map(|own| own.ends_at);
        self.end_of(
            &[Some(wanted), own_read, self.others_read],
            self.others_write,
        )
    }

    /// The last of these ends, and none before the key's present one if that is to stay or if one
    /// of them is [`NEVER`]; none if that is when the key expires now.
    fn end_of(&self, ends: &[Option<i64>], present_stays: bool) -> Option<i64> {
        let ending = ends.iter().flatten().filter(|end| **end != NEVER);
        let mut end = ending.copied().max();
        if present_stays || ends.contains(&Some(NEVER)) {
            end = end.max(Some(self.ends_at?));
        }
        end.filter(|end| Some(*end) != self.ends_at)
    }
}

/// A reader's hold whose lease is not over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadHold {
    /// The value of its field.
    pub count: Count,
    /// The value of the latest timeout key that we wrote, if one is there.
    pub token: Option<Token>,
    /// When the longest of its timeout keys expires, in milliseconds of the wall clock, or
    /// [`NEVER`]: of that one and of those that somebody else's script wrote since. Ours has the
    /// longest lease that the reader had when we wrote it.
    pub ends_at: i64,
}

/// The value of an owner's field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// A hold count, 1 or more. One that somebody else wrote may pass our largest.
    Valid(i64),
    /// Anything else. Its owner holds the lock all the same, but there is nothing to count with.
    Malformed,
}

impl Count {
    /// Reads the value of an owner's field.
    pub fn from_field(value: &[u8]) -> Self {
        match number::integer(value) {
            Some(count) if count >= 1 => Self::Valid(count),
            _ => Self::Malformed,
        }
    }

    /// The count after one more entry; none past the largest.
    pub(crate) fn next(count: i64) -> Option<i64> {
        count.checked_add(1).filter(|next| *next <= HOLD_COUNT_MAX)
    }
}
