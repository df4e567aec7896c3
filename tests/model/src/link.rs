//! A client's two connections to a server: the session's, and the one for commands.

use crate::message::{Command, Request, Subject};

/// A command without an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pending {
    pub(crate) request: Request,
    /// Part of an undo.
    pub(crate) is_undo: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) enum Binding {
    /// There is no command connection until the next EVENTS reply.
    #[default]
    Closed,
    /// BIND is not answered yet.
    Asked,
    Bound,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Link {
    // The session connection:
    /// Its number, which is its EPOCH.
    pub(crate) epoch: u8,
    /// As last heard; 0 = never.
    pub(crate) life: u8,
    /// The last event heard in that life.
    pub(crate) seq: u8,
    /// Ticks of grace left since the last EVENTS call answered in this life was sent.
    pub(crate) confirmed: u8,
    /// The same for the EVENTS call under way.
    pub(crate) asked_grace: u8,
    /// Ticks left of a lease that began when the EVENTS call under way was sent.
    pub(crate) asked_lease: u8,
    /// Ticks left of a lease that began when the last EVENTS call answered in this life was sent.
    pub(crate) told_lease: u8,

    // The command connection:
    pub(crate) binding: Binding,
    /// Its number, which is that of its BIND.
    pub(crate) number: u8,
    /// As BIND has told it.
    pub(crate) bound_life: u8,
    /// In order. They are all sent again when the connection is replaced.
    pub(crate) pending: Vec<Pending>,
    /// How many of them were sent on the present connection.
    pub(crate) sent: usize,
}

impl Link {
    pub(crate) fn push(&mut self, command: Command, subject: Subject, call: u8, is_undo: bool) {
        let request = Request {
            command,
            subject,
            call,
        };
        self.pending.push(Pending { request, is_undo });
    }

    /// Takes the command that this reply answers: replies come in the order of the commands.
    pub(crate) fn take_answered(&mut self) -> Pending {
        self.sent -= 1;
        self.pending.remove(0)
    }

    /// Whether a command of this call has no answer yet.
    pub(crate) fn has(&self, call: u8) -> bool {
        self.pending
            .iter()
            .any(|pending| pending.request.call == call)
    }

    pub(crate) fn tick(&mut self) {
        let clocks = [
            &mut self.confirmed,
            &mut self.asked_grace,
            &mut self.asked_lease,
            &mut self.told_lease,
        ];
        for ticks in clocks {
            *ticks = ticks.saturating_sub(1);
        }
    }
}
