//! What a decision makes the driver do, in order.

use crate::{CommandError, Listener, LockKey, LockRef, Mode, Token};
use std::rc::Rc;

/// One thing to do. What is written concerns the lock that the decision was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write parts of a plain hold into the hash, which comes into being if it is not there.
    Write {
        /// Whose field.
        holder: Holder,
        /// The hold count, if it changes.
        count: Option<i64>,
        /// The token, if it changes.
        token: Option<Token>,
        /// When the key is to expire, in milliseconds of the wall clock, if that changes.
        ends_at: Option<i64>,
    },
    /// Take the caller's field out of a plain lock's hash in which there are others.
    Leave,
    /// Write the `mode` field of a read-write lock: [`Mode::Read`] or [`Mode::Write`].
    WriteMode(Mode),
    /// Write the hold count of a reader or a writer.
    WriteCount {
        /// Whose field.
        holder: Holder,
        /// Which of its two.
        mode: Mode,
        /// The hold count; none takes the field out.
        count: Option<i64>,
    },
    /// Write a reader's timeout keys with these numbers.
    WriteTimeouts {
        /// Whose.
        holder: Holder,
        /// The first and the last.
        numbers: (i64, i64),
        /// Their value; none is Redisson's, which says nothing.
        token: Option<Token>,
        /// When they are to expire, in milliseconds of the wall clock.
        ends_at: i64,
    },
    /// Delete a reader's timeout keys with these numbers, first and last, where they are there.
    DeleteTimeouts {
        /// Whose.
        holder: Holder,
        /// The first and the last.
        numbers: (i64, i64),
    },
    /// Delete the timeout keys of every reader in the hash.
    DeleteAllTimeouts,
    /// Take the fields of those readers out of the hash whose leases are over.
    SweepReaders,
    /// Let the key of a read-write lock expire then, in milliseconds of the wall clock.
    Expire(i64),
    /// Delete the key.
    Free,
    /// Tell the subscribers of the unlock message: that of a lock which was held in this mode.
    Publish(Mode),
    /// Tell a blocked client that it holds the lock.
    Grant {
        /// The client, which is out of the line.
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
    /// Tell a blocked client that it left the line with nothing.
    Dismiss {
        /// The client, which is out of the line.
        client: usize,
        /// Why.
        why: WaitOutcome,
    },
    /// A client waits for its session's events: it has some, or has waited for long enough.
    Wake(Listener),
    /// Another client listens to the session now: this one is told so.
    TakenOver(Listener),
}

/// Whose hold is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The owner that the command named.
    Caller,
    /// The owner of a waiter that is granted.
    Waiter(Rc<[u8]>),
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
    /// Whether a lock is what was granted, where the grant was told under this one.
    pub fn is_of(&self, told_under: &LockKey, lock: LockRef<'_>) -> bool {
        match &self.several {
            None => told_under.as_ref() == lock,
            Some(several) => several.iter().any(|(key, _)| key.as_ref() == lock),
        }
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
