//! The effects of a decision, which the driver carries out in order: it writes keys, sends the
//! unlock message, and replies to waiters.
//!
//! All writes are operations on keys. Fields, values and keys are named and formatted only here, in
//! [`crate::values::names`], in [`PermitsHold::text`] and in [`crate::WriteHold::text`].

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

/// One action of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write a key of one of the locks that were read.
    Write {
        /// The lock's index; 0 is the first.
        lock: usize,
        /// The write.
        write: Write,
    },
    /// Send the unlock message of one of the locks that were read.
    Publish {
        /// The lock's index; 0 is the first.
        lock: usize,
        /// The mode in which the lock was held.
        held_as: Mode,
    },
    /// Tell a blocked client that it holds the lock.
    Grant {
        /// The client, which is not in the queue any more.
        client: usize,
        /// The lock; the first if there are several.
        lock: LockKey,
        /// The owner. The driver needs it if the grant cannot be delivered.
        owner: Rc<[u8]>,
        /// The hold count.
        count: i64,
        /// The grant.
        grant: Grant,
    },
    /// Tell a blocked client that it left the queue without the lock.
    Leave {
        /// The client, which is not in the queue any more.
        client: usize,
        /// The reason.
        why: WaitOutcome,
    },
    /// Wake a client that waits for its session's events: there are some, or it has waited long
    /// enough.
    Wake(Listener),
    /// Tell a client that listened to a session that another client listens to it now.
    TakenOver {
        /// The client that listened.
        listener: Listener,
        /// The client id of the other connection.
        by: u64,
    },
    /// Write a line into the server's log.
    Log(String),
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
    /// `DEL` of a timeout key, if the key exists.
    DeleteTimeout(TimeoutKey),
    /// `HSET` of an owner's permits, and of the `mode` field before if these are the first. It is
    /// not part of [`Write::Set`], whose values are short because every decision carries some.
    SetPermits(Holder, PermitsHold, bool),
    /// The same for the count and the token of the owner that writes.
    SetWriter(Holder, i64, Token, bool),
    /// `SET` of the key that stores the limit of permits.
    SetLimit(Value),
    /// `DEL` of that key, if the key exists.
    DeleteLimit,
}

/// A field of a lock's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// The field of an owner: of a plain lock, as a reader, or of permits.
    Owner(Holder),
    /// The field of an owner as the writer.
    Writer(Holder),
    /// The field of the fencing token.
    Fence,
    /// The field that marks the hash as a read-write lock, or as permits.
    Mode,
    /// A field with this name, which was found in the hash.
    Named(Rc<[u8]>),
}

impl Field {
    /// The field's name. `caller` is the owner that the lock was read for.
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
    /// The reader.
    pub reader: Holder,
    /// The number of the entry, from 1.
    pub number: i64,
}

impl TimeoutKey {
    /// The key's name for the lock of this name.
    pub fn name(&self, lock: &[u8], caller: &[u8]) -> Vec<u8> {
        names::timeout_key(lock, self.reader.name(caller), self.number)
    }
}

/// The value of a field or of a timeout key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// A hold count, or the value of a timeout key.
    Number(i64),
    /// A fencing token, in the format of its field.
    Fence(Token),
    /// The mode in which the lock is held: [`Mode::Read`], [`Mode::Write`] or [`Mode::Permits`].
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

/// The owner of the hold that is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The owner that the lock was read for: the caller, or the first in the queue.
    Caller,
    /// Another owner: a waiter that is granted, or an owner found in the hash.
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

/// The grant to a waiter. It must be given back if it cannot be delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The token that the waiter is told.
    pub token: Token,
    /// The mode in which the lock is held.
    pub mode: Mode,
    /// The locks that it took or entered once more, each with the token of its hold; none if that
    /// is the one lock that was waited for. With ONCE a hold that the owner had before is not among
    /// them: to give it back would end it.
    pub taken: Option<Rc<[(LockKey, Token)]>>,
}

impl Grant {
    /// The owner was told that it holds this lock, and the hold count if `knows_count`. This part
    /// of the grant must not be given back any more. Returns true if no part is left to be given
    /// back, and none if the reply did not tell the owner of this grant.
    ///
    /// Without ONCE the owner of a multi-wait may have held some of the locks before. Their tokens
    /// stay the same, so only the hold count tells the owner that it holds them once more.
    pub fn confirm(
        &mut self,
        told_under: &LockKey,
        lock: LockRef<'_>,
        knows_count: bool,
    ) -> Option<bool> {
        let Some(taken) = &self.taken else {
            return (told_under.as_ref() == lock).then_some(true);
        };
        let is_told = |(key, token): &(LockKey, Token)| {
            key.as_ref() == lock && (knows_count || *token == self.token)
        };
        if !taken.iter().any(is_told) {
            return None;
        }
        let left: Rc<[_]> = taken.iter().filter(|of| !is_told(of)).cloned().collect();
        let is_all = left.is_empty();
        self.taken = Some(left);
        Some(is_all)
    }
}

/// Why a waiter leaves without the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// It did not get the lock in time.
    NotAcquired {
        /// The rest of the present lease, as in [`crate::Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// It can never get the lock.
    Refused(CommandError),
}
