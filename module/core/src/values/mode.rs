//! The ways in which a lock is held or asked for.

/// How a lock is held or asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// A plain lock: one holder.
    Plain,
    /// A read-write lock, together with other readers.
    Read,
    /// A read-write lock, alone but for one's own reading.
    Write,
    /// Some of a number of permits.
    Permits,
}

impl Mode {
    /// The kind of lock that is held so.
    pub fn kind(self) -> Kind {
        match self {
            Self::Plain => Kind::Plain,
            Self::Read | Self::Write => Kind::ReadWrite,
            Self::Permits => Kind::Permits,
        }
    }
}

impl Mode {
    /// The mode whose unlock message is sent when a lock that was found free is handed over to
    /// somebody who waits for it in this one, and it is not known how it was held.
    pub(crate) fn message_when_free(self) -> Self {
        match self {
            Self::Plain => Self::Plain,
            Self::Read | Self::Write => Self::Read,
            // Of permits there is none.
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
