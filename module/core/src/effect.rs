//! What a decision makes the driver do, in order.

use crate::{Listener, Refusal, Token};
use std::rc::Rc;

/// One thing to do. What is written concerns the lock that the decision was about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write parts of a hold into the hash, which comes into being if it is not there.
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
    /// Take the caller's field out of a hash in which there are others.
    Leave,
    /// Delete the key.
    Free,
    /// Tell the subscribers of the unlock message.
    Publish,
    /// Tell a blocked client that it holds the lock.
    Grant {
        /// The client, which is out of the line.
        client: usize,
        /// Whose it was; the driver needs it if the grant cannot be delivered.
        owner: Rc<[u8]>,
        /// Its hold count.
        count: i64,
        /// Its token.
        token: Token,
    },
    /// Tell a blocked client that it left the line with nothing.
    Dismiss {
        /// The client, which is out of the line.
        client: usize,
        /// Why.
        why: Dismissal,
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

/// Why a waiter leaves with nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dismissal {
    /// It did not get the lock; the present lease has so many milliseconds left.
    NotAcquired {
        /// As in [`crate::Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// It never can.
    Refused(Refusal),
}
