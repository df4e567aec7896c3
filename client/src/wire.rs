//! The connections to one server and what is said on them. Nothing else speaks RESP.

mod connection;
use connection::{Connection, Replies, Values, within};
pub(crate) use connection::{Connector, ServerId};

mod endpoint;
pub(crate) use endpoint::Address;
use endpoint::Certificates;

mod dial;
pub(crate) use dial::Dialer;
use dial::{Pushes, Socket};

// Where the server is, if sentinels say so.
mod sentinel;
pub(crate) mod sentinel_watch;

// What is carried by each of the connections to it, and which are to be closed.
mod commands;
pub(crate) use commands::{Answer, Commands, Then};

pub(crate) mod events;
pub(crate) use events::Listener;

mod session;
use session::part_of_grace;
pub(crate) use session::{Attachment, Session, SessionNumber};

mod durability;
pub(crate) use durability::{Acknowledger, Durability};

mod former;
use former::{ClientId, Former, Purpose, kills};

// What is said, and answered.
pub(crate) mod request;
use request::Call;
pub(crate) use request::{Command, Mode, Subject, WaitMode};

mod reply;
#[cfg(test)]
pub(crate) use reply::named;
pub(crate) use reply::{
    Acquired, Event, EventKind, Member, NAMELESS, Range, Redirect, Released, SLOTS, Told,
};
