//! The moments in the course of a message, told to a test.

use std::cell::RefCell;
use std::rc::Rc;

use crate::network::Direction;

/// A moment in the course of a message between a client and a server or a sentinel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Moment {
    /// It is about to be sent in this direction.
    Sends(Direction),
    /// It is in flight in this direction.
    Sent(Direction),
    /// The server has read a command, and is about to carry it out.
    CarriesOut,
    /// The server has carried a command out, and its reply waits for something else.
    Waits,
    /// The host is about to read the bytes that have arrived.
    Reads,
}

/// The connection on which a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionId {
    /// Hosts are numbered as they are made.
    pub host: usize,
    /// Servers are numbered as they are started. `None`: it is to a sentinel.
    pub server: Option<usize>,
    /// The number of connections that the host had opened before to the same server or sentinel.
    pub number: usize,
}

type Observer = Rc<dyn Fn(Moment, ConnectionId)>;

thread_local! {
    // A host's end of a connection may be sent to another thread, and the observer may not: the
    // ends do not own it. All of a network runs on one thread.
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// From now on this observer is told of each moment in this thread.
pub(crate) fn set_observer(observer: Option<Observer>) {
    OBSERVER.set(observer);
}

/// The observer may do anything to servers and hosts: no lock may be held here.
pub(crate) fn tell(moment: Moment, connection: ConnectionId) {
    let observer = OBSERVER.with_borrow(Clone::clone);
    if let Some(observer) = observer {
        observer(moment, connection);
    }
}
