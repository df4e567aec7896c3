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

pub(crate) mod sentinel_watch;

// A client at a server: its session, its commands, and the two connections.
mod session;
pub(crate) use session::{Confidence, Session};

mod command;
pub(crate) use command::{Manner, Outcome, Request, Sending};

mod listener;
pub(crate) use listener::Listener;

pub(crate) mod listening;

pub(crate) mod link;
pub(crate) use link::Link;

mod durability;
pub(crate) use durability::Acknowledger;

// Commands and replies.
pub(crate) mod request;
pub(crate) use request::{Durability, Kind, Mode, Subject, WaitMode};

pub(crate) mod reply;
#[cfg(test)]
pub(crate) use reply::named;
pub(crate) use reply::{Acquired, Event, Member, NAMELESS, Range, Redirect, SLOTS, Told, What};
