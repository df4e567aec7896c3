//! The messages on a connection: commands, replies and events.
//!
//! `call` is a number of the model. It says for which call of a client a command was sent, so that
//! the checks can tell a command that hit another subject than was meant. The server decides
//! nothing by it.

use std::fmt;

/// The owner of the contender that has a plain connection and no session.
pub(crate) const CONTENDER: u8 = 99;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Mode {
    Plain,
    Read,
    Write,
}

/// A set of names of locks, a bit each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Names(u8);

impl Names {
    pub(crate) fn one(name: u8) -> Self {
        Self(1 << name)
    }

    pub(crate) fn up_to(count: u8) -> Self {
        Self((1 << count) - 1)
    }

    pub(crate) fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn each(self) -> impl Iterator<Item = Self> {
        (0..8).map(Self::one).filter(move |name| name.meets(self))
    }
}

/// Names a hold, which has one name, or a wait, which may have several. There is one of each for an
/// owner, a name and a mode.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Subject {
    pub(crate) names: Names,
    pub(crate) owner: u8,
    pub(crate) mode: Mode,
}

impl Subject {
    /// The holds that a grant makes.
    pub(crate) fn each(self) -> impl Iterator<Item = Self> {
        self.names.each().map(move |names| Self { names, ..self })
    }

    /// Its names but those of `others`, if any are left.
    pub(crate) fn without(self, others: &[Self]) -> Option<Self> {
        let names = others
            .iter()
            .fold(self.names.0, |names, other| names & !other.names.0);
        (names != 0).then_some(Self {
            names: Names(names),
            ..self
        })
    }

    /// The name that stands in events and in CANCEL.
    pub(crate) fn first(self) -> Self {
        self.each().next().expect("every subject has a name")
    }

    pub(crate) fn is_joint(self) -> bool {
        self.each().count() > 1
    }

    /// Whether both are of one owner and mode, and share a name.
    pub(crate) fn meets(self, other: Self) -> bool {
        let same = (self.owner, self.mode) == (other.owner, other.mode);
        same && self.names.meets(other.names)
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} {:?} of owner {}",
            self.mode, self.names, self.owner
        )
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = ('a'..='h')
            .zip(0..8)
            .filter(|(_, i)| Self::one(*i).meets(*self));
        f.write_str(&letters.map(|(letter, _)| letter).collect::<String>())
    }
}

/// A command about one subject.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    pub(crate) command: Command,
    pub(crate) subject: Subject,
    pub(crate) call: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Command {
    /// `ACQUIRE name owner lease [READ | WRITE] QUEUE 0 SESSION session ONCE`, or MACQUIRE
    Acquire,
    /// `RELEASE name owner [READ | WRITE] [TOKEN token]`
    Release { token: Option<u8> },
    /// `RENEW name owner lease [READ | WRITE] TOKEN token SESSION session`
    Renew { token: Option<u8> },
    /// `CANCEL name owner [READ | WRITE]`
    Cancel,
}

/// A message to the server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Up {
    /// `EVENTS session EPOCH epoch AFTER life seq BLOCK …`, or without BLOCK.
    Events {
        epoch: u8,
        after: (u8, u8),
        at_once: bool,
    },
    /// `BIND session EPOCH n`
    Bind(u8),
    Request(Request),
}

/// A message to the client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reply {
    /// `[count, token]`
    Held {
        token: u8,
    },
    /// `[-1, position, seq, life]`
    Queued {
        seq: u8,
        life: u8,
    },
    NoSession,
    /// The slot is at the other node: nothing was carried out.
    Moved,
    /// `WAITING` or `DEADLOCK`: the call ends with this error.
    Refused,
    /// Of RELEASE, RENEW and CANCEL: whether there was something to do.
    Done(bool),
    Bound {
        life: u8,
    },
    Stale,
    Events {
        life: u8,
        events: Vec<Event>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Granted,
    Timeout,
    Left,
    Lost,
    /// An event `error` with the text `MOVED …`. With a token it is about a hold.
    Moved,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event {
    pub(crate) seq: u8,
    pub(crate) kind: Kind,
    pub(crate) subject: Subject,
    pub(crate) token: u8,
    pub(crate) call: u8,
}
