//! The events of a session, and the numbers by which its client acknowledges them.

use crate::interface::error::CommandError;
use crate::values::lock_key::LockKey;
use crate::values::mode::Mode;
use crate::values::token::Token;
use std::rc::Rc;

/// An event of a session. It names the wait or the hold that it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The kind of event.
    pub kind: EventKind,
    /// The lock; of a wait for several locks the first.
    pub lock: LockKey,
    /// The owner of the wait or of the hold.
    pub owner: Rc<[u8]>,
    /// The mode of the wait or of the hold.
    pub mode: Mode,
    /// The token of the hold; none if the event is about a wait, or if the hold has none.
    pub token: Option<Token>,
}

/// The kind of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A queued waiter holds the lock, with the event's token.
    Granted,
    /// A queued waiter left the queue without it.
    Timeout {
        /// As in [`crate::Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// A queued waiter left the queue because the session connection closed.
    Left,
    /// A hold has ended, and its owner did not give it back on the session's own connection.
    Lost(LostReason),
    /// A queued waiter left the queue because its wait was refused. Or another node serves the key
    /// of a hold from now on.
    Error(CommandError),
    /// Another owner wants the lock of a hold: it waits, or was refused because of the hold.
    Wanted {
        /// How many waiters there are.
        waiters: u32,
    },
}

/// The reason for which a hold was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostReason {
    /// Its lease was over.
    Expired,
    /// BREAK ended it.
    Broken,
    /// The key was deleted, or is another client's.
    Deleted,
    /// A connection that is not bound to the session gave it back.
    Released,
    /// It belongs to another session now: an ACQUIRE or RENEW of its owner named that session.
    Taken,
}

/// A moment in the life of a session: after the event with this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The life.
    pub life: i64,
    /// The number of the last event, 0 before the first.
    pub seq: u64,
}

/// The events that a session is told at once, the oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// The moment before the first of them.
    pub after: Moment,
    /// The events, as many as one reply may have. The next call tells the rest.
    pub events: Vec<Event>,
}
