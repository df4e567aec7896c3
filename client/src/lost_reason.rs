//! Why a hold is over.

use std::fmt;

/// Why a hold is over although nobody unlocked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease has run out, or may have: it was not renewed, or no renewal was confirmed in
    /// time.
    Expired,
    /// The server renewed the lease, but too few replicas, or disks, acknowledged that in time: the
    /// last lease that [enough of them](crate::ClientBuilder::acknowledged_by) know of has run out,
    /// or may have.
    NotAcknowledged,
    /// An operator ended it, with `RLOCK.BREAK`.
    Broken,
    /// The lock's key was deleted, evicted or flushed.
    Deleted,
    /// The server says that this owner does not hold the lock with this token, and not why.
    NotHeld,
    /// The session was not confirmed for the [grace](crate::ClientBuilder::grace): the server may
    /// have taken this client for dead.
    SessionUnconfirmed,
    /// It was held for as long as [`max_hold`](crate::ClientBuilder::max_hold) allows.
    MaxHold,
    /// Another connection has taken over the session of this client.
    SessionTakenOver,
}

impl LostReason {
    /// The word in the server's event.
    pub(crate) fn from_server(word: &[u8]) -> Self {
        match word {
            b"expired" => Self::Expired,
            b"broken" => Self::Broken,
            b"deleted" => Self::Deleted,
            _ => Self::NotHeld,
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "no renewal was confirmed within its lease",
            Self::NotAcknowledged => "no renewal was acknowledged within its lease",
            Self::Broken => "an operator broke it",
            Self::Deleted => "its key was deleted",
            Self::NotHeld => "the server says that it is no longer held",
            Self::SessionUnconfirmed => "the session was not confirmed within the grace",
            Self::MaxHold => "it was held for as long as is allowed",
            Self::SessionTakenOver => "another connection has taken over this client's session",
        })
    }
}
