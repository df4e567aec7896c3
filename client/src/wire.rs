//! The connections to one server and what is said on them. Nothing else speaks RESP.

mod connection;
pub(crate) use connection::{Connector, ServerId};

mod endpoint;
pub(crate) use endpoint::Address;

mod dial;
pub(crate) use dial::Dialer;

// Where the server is, if sentinels say so.
mod sentinel;
pub(crate) mod sentinel_watch;

// What is carried by each of the connections to it, and which are to be closed.
mod commands;
pub(crate) use commands::{Answer, Commands, Then};

pub(crate) mod events;
pub(crate) use events::Listener;

mod session;
pub(crate) use session::{Attachment, Session, SessionNumber};

mod durability;
pub(crate) use durability::{Acknowledger, Durability};

mod former;

// What is said, and answered.
pub(crate) mod request;
pub(crate) use request::{Command, Mode, Subject, WaitMode};

mod reply;
#[cfg(test)]
pub(crate) use reply::named;
pub(crate) use reply::{
    Acquired, Event, EventKind, Member, NAMELESS, Range, Redirect, Released, SLOTS,
};
