//! The ways in which a lock is held or asked for.

/// How a lock is held or asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// A plain lock: one holder.
    Plain,
    /// A read-write lock, shared with other readers.
    Read,
    /// A read-write lock, exclusive: only the writer itself may also read.
    Write,
    /// Some of the permits of a semaphore.
    Permits,
}

impl Mode {
    /// The kind of lock that is held in this mode.
    pub fn kind(self) -> Kind {
        match self {
            Self::Plain => Kind::Plain,
            Self::Read | Self::Write => Kind::ReadWrite,
            Self::Permits => Kind::Permits,
        }
    }

    /// The mode whose unlock message is sent when a free lock is handed over to a waiter of this
    /// mode, and nobody knows in which mode it was held before.
    pub(crate) fn message_when_free(self) -> Self {
        match self {
            Self::Plain => Self::Plain,
            Self::Read | Self::Write => Self::Read,
            // Permits have no unlock message.
            Self::Permits => Self::Permits,
        }
    }
}

/// The kinds of lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A re-entrant lock.
    Plain,
    /// A read-write lock: its hash has a `mode` field.
    ReadWrite,
    /// Permits: the `mode` field of its hash says so.
    Permits,
}
