//! The connections to one server, their commands and their replies. No other module speaks RESP.

// How a server is found and connected to.
mod endpoint;
pub(crate) use endpoint::Address;
use endpoint::Certificates;

mod dial;
pub(crate) use dial::Dialer;
use dial::{Replies, Socket};

mod sentinel;
use sentinel::Sentinels;

mod connector;
use connector::Connection;
pub(crate) use connector::Connector;

// A client at a server: its session, its commands, and the two connections.
pub(crate) mod session;
#[cfg(test)]
pub(crate) use session::Confidence;
pub(crate) use session::{Identity, Listener, Session};
pub(crate) use session::{Manner, Outcome, Request, Sending, Tied};

pub(crate) mod listening;

pub(crate) mod link;
pub(crate) use link::Link;

mod durability;
pub(crate) use durability::{Acknowledger, acknowledger};

// Commands and replies.
pub(crate) mod request;
pub(crate) use request::{Durability, Kind, Mode, Target, WaitMode};

pub(crate) mod reply;
pub(crate) use reply::{Acquired, Cluster, Event, Id, NAMELESS, Primaries, SLOTS, Told, What};
