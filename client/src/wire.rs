//! The connections to one server and what is said on them. Nothing else speaks RESP.

mod connection;
pub(crate) use connection::Connector;
use connection::{Answered, Connection, Replies, Values};

mod endpoint;
pub(crate) use endpoint::Address;
use endpoint::Certificates;

mod dial;
pub(crate) use dial::Dialer;
use dial::{Pushes, Socket};

// Where the server is, if sentinels say so.
mod sentinel;
use sentinel::Sentinel;
pub(crate) mod sentinel_watch;

// The two connections to a server.
pub(crate) mod link;
pub(crate) use link::{Link, Manner, Outcome, Request, Sending};

pub(crate) mod session;
use session::part_of_grace;
pub(crate) use session::{Confidence, Listener, News, Session};

mod durability;
pub(crate) use durability::{Acknowledger, Durability};

// What is said, and answered.
pub(crate) mod request;
pub(crate) use request::{Kind, Mode, Subject, WaitMode};

pub(crate) mod reply;
#[cfg(test)]
pub(crate) use reply::named;
pub(crate) use reply::{Acquired, Event, Member, NAMELESS, Range, Redirect, SLOTS, Told, What};
