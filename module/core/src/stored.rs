//! What the keyspace holds at a lock's key, as plain values: read anew for each decision.

use crate::{HOLD_COUNT_MAX, Now, Token, parse};

/// What is stored at a lock's key, as seen by one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Nothing, or a hash in which nobody is: no live field but `fence`.
    Free,
    /// A hash that somebody is in.
    Held(Hash),
    /// A key of another type.
    OtherType,
}

impl Stored {
    /// What is left of the present lease in milliseconds; -1 if it has no end, 0 if the lock is
    /// free.
    pub fn ttl_ms(&self, now: Now) -> i64 {
        match self {
            Self::Held(Hash {
                ends_at: Some(end), ..
            }) => end.saturating_sub(now.wall_ms()).max(0),
            Self::Held(Hash { ends_at: None, .. }) => -1,
            Self::Free | Self::OtherType => 0,
        }
    }
}

/// A lock's hash, as far as a decision about one owner needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash {
    /// Which kind of lock it is.
    pub kind: Kind,
    /// The owner's own field, if it is there.
    pub own: Option<Count>,
    /// The token, if the hash has one that we wrote.
    pub token: Option<Token>,
    /// Whether anybody else's field is there. Our own writes never lead to `own` and `others` at
    /// once; somebody else's may, and then each field's owner is a holder whom nothing may cut
    /// short.
    pub others: bool,
    /// When the key expires, in milliseconds of the wall clock; none if never.
    pub ends_at: Option<i64>,
}

/// The kinds of lock that a hash can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A re-entrant lock.
    Plain,
    /// A read-write lock: the hash has a `mode` field.
    ReadWrite,
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
        match parse::integer(value) {
            Some(count) if count >= 1 => Self::Valid(count),
            _ => Self::Malformed,
        }
    }

    /// The count after one more entry; none past the largest.
    pub(crate) fn next(count: i64) -> Option<i64> {
        count.checked_add(1).filter(|next| *next <= HOLD_COUNT_MAX)
    }
}
