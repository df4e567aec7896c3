//! The outcome of a command.

use crate::values::token::Token;

/// The outcome of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The caller holds the lock.
    Held {
        /// The hold count; for several locks the highest.
        count: i64,
        /// The token.
        token: Token,
    },
    /// The caller does not hold the lock.
    NotHeld {
        /// As in [`crate::Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// The caller must wait: the driver blocks its client, unless the wait is for a session's
    /// event, and calls [`crate::Locks::enqueue`].
    MustWait {
        /// The answer if the client cannot be blocked after all.
        ttl_ms: i64,
    },
    /// RELEASE: the holds or permits left; none if the owner does not hold the lock.
    Left(Option<i64>),
    /// GUARD: the owner has the lock. The driver runs the guarded command before it asks for the
    /// next task, which may end the hold.
    Guards,
    /// How many locks were released, renewed or broken, or how many waiters left; for LIMIT the
    /// former limit, 0 if there was none.
    Number(i64),
}
