//! A command for a server, from its hand-over to its answer.

use std::sync::Arc;

use redis::{Cmd, Value};
use tokio::time::Instant;

use crate::error::Error;
use crate::wire::{Confidence, Session};

/// A command that waits to be sent, or for its answer.
pub(crate) struct Request {
    pub(super) cmd: Cmd,
    pub(super) then: Then,
    /// The lock that it is about.
    pub(crate) name: Arc<[u8]>,
    pub(crate) manner: Manner,
    /// Whether it goes behind an `ASKING`: to a node to which its slot is on its way.
    pub(super) asking: bool,
    /// When its caller is told that no answer has come, if it was not told yet.
    pub(super) until: Option<Instant>,
    /// The number of links that have had it.
    pub(crate) hops: u32,
    /// The last sending.
    pub(super) sent: Option<Sending>,
    /// Counts it among the commands without an answer.
    pub(super) counted: Option<Arc<()>>,
}

/// How a command is treated that was not answered, or was sent to the wrong node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// It is sent again; where else, its call decides.
    Asks,
    /// It is sent again, also to where its lock is by now.
    Twice,
    /// The same, if it was surely not carried out.
    Once,
}

/// The outcome of a command.
pub(crate) enum Outcome {
    /// It was answered; or it was not carried out, or may not have been, and is sent no more.
    Told(Result<Value, Error>, Option<Sending>),
    /// No answer yet: the time of a reply is over, or the command is sent again after a pause. An
    /// answer that still comes is told too.
    Overdue(Error),
}

/// The callback of a command.
pub(crate) type Then = Box<dyn FnMut(Outcome) + Send>;

/// The time of a sending, and the session's state at that time.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) at: Instant,
    /// Whether it had been sent before, and may have been carried out then.
    pub(crate) again: bool,
    pub(crate) session: Arc<Session>,
    pub(crate) confidence: Arc<Confidence>,
}

impl Sending {
    /// The same with the session's confidence for a reply that arrives now. If the session has
    /// another life by now, it is the confidence at the time of sending.
    pub(crate) fn at_present(self) -> Self {
        let present = self.session.present();
        let present = present.filter(|present| present.life == self.confidence.life);
        let confidence = present.unwrap_or_else(|| Arc::clone(&self.confidence));
        Self { confidence, ..self }
    }

    /// Whether the session has begun anew since.
    pub(crate) fn is_of_former_life(&self) -> bool {
        self.session.life() != Some(self.confidence.life)
    }
}

impl Request {
    pub(crate) fn new(cmd: Cmd, name: &Arc<[u8]>, manner: Manner, then: Then) -> Self {
        Self {
            cmd,
            then,
            name: Arc::clone(name),
            manner,
            asking: false,
            until: None,
            hops: 0,
            sent: None,
            counted: None,
        }
    }

    /// To the node to which its slot is on its way.
    pub(crate) fn asking(mut self, asking: bool) -> Self {
        self.asking = asking;
        self
    }

    /// It is given up.
    pub(crate) fn fail(mut self, error: Error) {
        self.told(Err(error));
    }

    pub(super) fn told(&mut self, reply: Result<Value, Error>) {
        // It counts no more when its caller hears of it.
        drop(self.counted.take());
        (self.then)(Outcome::Told(reply, self.sent.take()));
    }

    /// Its caller hears why there is no answer yet.
    pub(super) fn put_off(&mut self, why: Error) {
        self.until = None;
        (self.then)(Outcome::Overdue(why));
    }

    /// No answer has come in time: whether its caller goes on waiting for one.
    pub(super) fn overdue(&mut self, trouble: &Error) -> bool {
        if self.sent.is_none() && self.manner != Manner::Twice {
            self.told(Err(trouble.clone()));
            return false;
        }
        let is_sent = self.sent.is_some();
        self.put_off(if is_sent {
            Error::no_reply(None)
        } else {
            trouble.clone()
        });
        true
    }
}
