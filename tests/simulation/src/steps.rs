//! The steps of a run, and faults that come at a step in place of a time.
//!
//! A step is a moment in the course of a message, or a poll of a call. A run is deterministic, so
//! until its fault comes it is the run without a fault: a step has the same number and time in
//! both. Steps of small programs are counted from the moment at which their tasks begin.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use rlock_test::Direction::{self, ToServer};
use rlock_test::{ConnectionId, Moment};
use tokio::task::spawn_local;

use crate::judge::Report;
use crate::run::run;
use crate::schedule::{FaultKind, Schedule};

/// A step.
#[derive(Clone, Debug)]
pub struct Step {
    /// When it happens.
    pub at: Duration,
    /// The step.
    pub place: Place,
    /// How often everything was used before it, in a small program.
    pub(crate) uses: Uses,
}

/// Of each open connection its number and how often each of its directions was changed; and how
/// often the link was used.
pub(crate) type LinkUses = (Vec<(usize, [u64; 2])>, u64);

/// How often each process, link and server was used before a step. If a count is the same at two
/// steps, a fault finds that thing as it was.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses {
    /// If the step is one of a message: the number of its connection among those that the host has
    /// open to the same server.
    pub(crate) open: Option<usize>,
    /// Each client.
    pub(crate) clients: Vec<u64>,
    /// For each client, its link to each server, and then to each sentinel.
    pub(crate) links: Vec<Vec<LinkUses>>,
    /// Each server: asked whether it runs, and changed.
    pub(crate) servers: Vec<(u64, u64)>,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A moment of a message, on this connection.
    Message(Moment, ConnectionId),
    /// A call of this client is about to be polled.
    Poll(usize),
}

impl Place {
    /// Whether this may go wrong there: a call is dropped at a poll, and nothing else is.
    pub fn suits(self, kind: &FaultKind) -> bool {
        matches!(self, Self::Poll(_)) == matches!(kind, FaultKind::DropCall)
    }

    /// The client that does something here: it has sent something, or is about to, or to read.
    pub(crate) fn client(self) -> Option<usize> {
        use Moment::{Reads, Sends, Sent};
        match self {
            Self::Poll(client) => Some(client),
            Self::Message(Reads | Sends(ToServer) | Sent(ToServer), id) => Some(id.host),
            Self::Message(..) => None,
        }
    }

    /// The server that does something here.
    pub(crate) fn server(self) -> Option<usize> {
        match self {
            Self::Message(_, id) if self.client().is_none() => id.server,
            _ => None,
        }
    }

    /// Whether a message is in flight from here on in this direction, from or to this client, to or
    /// from this server.
    pub(crate) fn is_in_flight(self, client: usize, server: usize, to: Direction) -> bool {
        match self {
            Self::Message(Moment::Sent(direction), id) => {
                (id.host, id.server) == (client, Some(server)) && direction == to
            }
            _ => false,
        }
    }
}

/// Begins a fault at once, before anything else is done; its later part is a task.
pub(crate) fn begin(fault: impl Future<Output = ()> + 'static) {
    let mut fault: Pin<Box<dyn Future<Output = ()>>> = Box::pin(fault);
    let mut nobody = Context::from_waker(Waker::noop());
    if fault.as_mut().poll(&mut nobody).is_pending() {
        spawn_local(fault);
    }
}

/// Carries a schedule out whose faults may come at steps, and gives each of them the time at which
/// its step happens: judges go by it. None if a step does not happen, or does not suit its fault.
pub fn settle(schedule: &Schedule) -> Option<(Schedule, Report)> {
    let mut schedule = schedule.clone();
    for _ in 0..=schedule.faults.len() {
        let report = run(&schedule, false);
        let mut is_settled = true;
        for fault in &mut schedule.faults {
            let Some(number) = fault.step else { continue };
            let step = report.steps.get(number)?;
            if !step.place.suits(&fault.kind) {
                return None;
            }
            is_settled &= step.at == fault.at;
            fault.at = step.at;
        }
        if is_settled {
            return Some((schedule, report));
        }
    }
    None
}
