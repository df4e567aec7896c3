//! What a decision makes the driver do, in order: write keys, send the unlock message, tell those
//! who wait.
//!
//! What is written are operations on keys. Fields, values and keys are named and formatted here and
//! in [`crate::values::names`], and nowhere else.

use crate::interface::error::CommandError;
use crate::interface::stored_permits::PermitsHold;
use crate::values::ids::Listener;
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::Mode;
use crate::values::names::{self, FENCE_FIELD, MODE_FIELD, PERMITS_MODE};
use crate::values::number::Text;
use crate::values::token::Token;
use std::borrow::Cow;
use std::rc::Rc;

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write a key of the lock at this place among those that were read.
    Write {
        /// The place; 0 is the first.
        lock: usize,
        /// What is written.
        write: Write,
    },
    /// Tell the subscribers of the unlock message of the lock at this place.
    Publish {
        /// The place; 0 is the first.
        lock: usize,
        /// How the lock was held.
        held_as: Mode,
    },
    /// Tell a blocked client that it holds the lock.
    Grant {
        /// The client, which is out of the queue.
        client: usize,
        /// Which lock; of several the first.
        lock: LockKey,
        /// Whose it was; the driver needs it if the grant cannot be delivered.
        owner: Rc<[u8]>,
        /// Its hold count.
        count: i64,
        /// What it was granted.
        grant: Grant,
    },
    /// Tell a blocked client that it left the queue with nothing.
    Dismiss {
        /// The client, which is out of the queue.
        client: usize,
        /// Why.
        why: WaitOutcome,
    },
    /// A client waits for its session's events: it has some, or has waited for long enough.
    Wake(Listener),
    /// Another client listens to the session now: this one is told so.
    TakenOver {
        /// The client that listened.
        listener: Listener,
        /// The number of the other's connection.
        by: u64,
    },
    /// Write a line into the server's log.
    Log(String),
}

impl Effect {
    /// Whether the key of a lock is deleted.
    pub(crate) fn is_deletion(&self) -> bool {
        matches!(self, Self::Write { write, .. } if *write == Write::Delete)
    }
}

/// An operation on a lock's key, on a timeout key of one of its readers, or on the key of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// `HSET` of one field or two.
    Set((Field, Value), Option<(Field, Value)>),
    /// `HDEL`.
    Remove(Field),
    /// `PEXPIREAT`, in milliseconds of the wall clock.
    ExpireAt(i64),
    /// `DEL`.
    Delete,
    /// `SET` of a timeout key, with an expiry in milliseconds of the wall clock.
    SetTimeout(TimeoutKey, Value, i64),
    /// `DEL` of a timeout key, if it is there.
    DeleteTimeout(TimeoutKey),
    /// `HSET` of an owner's permits, and of the `mode` field before if these are the first. (Not
    /// with [`Write::Set`]: its values are short, and every decision carries some.)
    SetPermits(Holder, PermitsHold, bool),
    /// `SET` of the key of the limit of permits.
    SetLimit(Value),
    /// `DEL` of that key, if it is there.
    DeleteLimit,
}

/// A field of a lock's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// An owner's: of a plain lock, as a reader, or of permits.
    Owner(Holder),
    /// An owner's as the writer.
    Writer(Holder),
    /// That of the fencing token.
    Fence,
    /// That which makes it a read-write lock, or permits.
    Mode,
    /// One that was found there.
    Named(Rc<[u8]>),
}

impl Field {
    /// Its name; `caller` is the owner for whom the lock was read.
    pub fn name<'a>(&'a self, caller: &'a [u8]) -> Cow<'a, [u8]> {
        match self {
            Self::Owner(holder) => Cow::Borrowed(holder.name(caller)),
            Self::Writer(holder) => Cow::Owned(names::writer_field(holder.name(caller))),
            Self::Fence => Cow::Borrowed(FENCE_FIELD),
            Self::Mode => Cow::Borrowed(MODE_FIELD),
            Self::Named(name) => Cow::Borrowed(name),
        }
    }
}

/// A timeout key of a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeoutKey {
    /// Whose.
    pub reader: Holder,
    /// The number of the entry, from 1 on.
    pub number: i64,
}

impl TimeoutKey {
    /// Its name, for the lock of this name.
    pub fn name(&self, lock: &[u8], caller: &[u8]) -> Vec<u8> {
        names::timeout_key(lock, self.reader.name(caller), self.number)
    }
}

/// What is written into a field or a timeout key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// A hold count, or the value of a timeout key.
    Number(i64),
    /// A fencing token, as the field for it has it.
    Fence(Token),
    /// How the lock is held: [`Mode::Read`], [`Mode::Write`] or [`Mode::Permits`].
    Mode(Mode),
}

impl Value {
    /// The value as it is stored.
    pub fn text(self) -> Text {
        match self {
            Self::Number(number) => Text::number(number),
            Self::Fence(token) => Text::number(token.get()).after(b't'),
            Self::Mode(Mode::Write) => Text::word(b"write"),
            Self::Mode(Mode::Permits) => Text::word(PERMITS_MODE),
            Self::Mode(Mode::Read | Mode::Plain) => Text::word(b"read"),
        }
    }
}

/// Whose hold is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The owner for whom the lock was read: the caller, or the first in the queue.
    Caller,
    /// Another: a waiter that is granted, or an owner found in the hash.
    Other(Rc<[u8]>),
}

impl Holder {
    /// The owner's name.
    pub fn name<'a>(&'a self, caller: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Caller => caller,
            Self::Other(owner) => owner,
        }
    }
}

/// What a waiter was granted: what must be given back if word of it cannot be delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The token that the waiter is told.
    pub token: Token,
    /// How the lock is held.
    pub mode: Mode,
    /// Of a wait for several locks at once, each with the token of its hold; none of one for one.
    pub several: Option<Rc<[(LockKey, Token)]>>,
}

impl Grant {
    /// The owner was told that it holds this lock, perhaps with the hold count: this part of the
    /// grant must not be given back any more. Returns true if no part is left to be given back, and
    /// none if the owner cannot know of the grant by this.
    ///
    /// Of several locks it may have held some before. For these only the hold count tells it that
    /// it holds them once more.
    pub fn confirm(
        &mut self,
        told_under: &LockKey,
        lock: LockRef<'_>,
        knows_count: bool,
    ) -> Option<bool> {
        let Some(several) = &self.several else {
            return (told_under.as_ref() == lock).then_some(true);
        };
        let is_told = |(key, token): &(LockKey, Token)| {
            key.as_ref() == lock && (knows_count || *token == self.token)
        };
        if !several.iter().any(is_told) {
            return None;
        }
        let left: Rc<[_]> = several.iter().filter(|of| !is_told(of)).cloned().collect();
        let is_all = left.is_empty();
        self.several = Some(left);
        Some(is_all)
    }
}

/// Why a waiter leaves with nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// It did not get the lock; the present lease has so many milliseconds left.
    NotAcquired {
        /// As in [`crate::Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// It never can.
    Refused(CommandError),
}
