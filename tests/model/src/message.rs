//! The messages on a connection: commands, replies and events.
//!
//! `call` is a number of the model. It says for which call of a client a command was sent, so that
//! the checks can tell a command that hit another subject than was meant. The server decides
//! nothing by it.

/// The owner of the contender that has a plain connection and no session.
pub(crate) const CONTENDER: u8 = 99;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Mode {
    Plain,
    Read,
    Write,
}

/// Names a hold or a wait: there is one of each for an owner, a name and a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Subject {
    pub(crate) name: u8,
    pub(crate) owner: u8,
    pub(crate) mode: Mode,
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
    /// `ACQUIRE name owner lease [READ | WRITE] QUEUE 0 SESSION session ONCE`
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
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event {
    pub(crate) seq: u8,
    pub(crate) kind: Kind,
    pub(crate) subject: Subject,
    pub(crate) token: u8,
    pub(crate) call: u8,
}
