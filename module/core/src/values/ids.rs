//! Ids of waiters, of locks' records, of holds, of sessions, and of waits for several locks.

use crate::values::arena::Id;

/// The id of a waiter. It stays invalid after the waiter has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub(crate) Id);

/// The id of a lock's record. It stays invalid after the record was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RecordId(pub(crate) Id);

/// The id of a hold that belongs to a session. It stays invalid after the hold has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct HoldId(pub(crate) Id);

/// The id of a session. It stays invalid after the session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub(crate) Id);

/// The id of a wait for several locks. It stays invalid after the wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MultiId(pub(crate) Id);

/// A session as a command names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRef<'a> {
    /// The session's name.
    pub name: &'a [u8],
    /// The ACL user that names it. It is not among the arguments: it is empty, which is no user,
    /// until the driver has asked the server.
    pub user: &'a [u8],
}

impl<'a> From<&'a [u8]> for SessionRef<'a> {
    fn from(name: &'a [u8]) -> Self {
        Self { name, user: &[] }
    }
}

/// The driver's handle for a client that waits for events.
pub type Listener = usize;
