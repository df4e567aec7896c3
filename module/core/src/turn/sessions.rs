//! The connections of sessions: what begins with one, and what ends with it.

use crate::interface::effect::{Effect, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::request::Events;
use crate::memory::log::event_log::LogEvent;
use crate::memory::log::metrics::count;
use crate::memory::pending::PendingRelease;
use crate::memory::session::{Event, EventKind, SessionLimits};
use crate::memory::state::Locks;
use crate::memory::table::ReplyTarget;
use crate::values::ids::{HoldId, Listener, SessionId, SessionRef};
use crate::values::mode::Mode;
use crate::values::time::{Now, Wait};
use crate::values::word::Word;
use std::collections::BTreeSet;
use std::rc::Rc;

impl Locks {
    /// RLOCK.EVENTS: makes this client's connection the session connection. Another client that
    /// waited for the session's events is told that it no longer does.
    ///
    /// # Errors
    /// The session is another user's; there is no room for a new session; or the session ended and
    /// this client was not told yet.
    pub fn attach(
        &mut self,
        request: &Events<'_>,
        client_id: u64,
        limits: SessionLimits,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<SessionId, CommandError> {
        let (session, former) =
            self.sessions
                .attach(request.session, client_id, request.grace_ms, limits, now)?;
        effects.extend(former.map(|listener| Effect::TakenOver {
            listener,
            by: client_id,
        }));
        Ok(session)
    }

    /// Whether this client's connection is the session connection.
    pub fn lives_by(&self, session: SessionId, client_id: u64) -> bool {
        self.sessions.client_of(session) == Some(client_id)
    }

    /// Takes the session's events since the last time, oldest first.
    pub fn fetch(&mut self, session: SessionId) -> Vec<Event> {
        self.sessions.fetch(session)
    }

    /// The same, for a client that was woken to take them.
    ///
    /// # Errors
    /// Another client has taken the session over since: the events are for that client.
    pub fn fetch_as(
        &mut self,
        session: SessionId,
        client_id: u64,
    ) -> Result<Vec<Event>, CommandError> {
        let present = self.sessions.client_of(session);
        if present == Some(client_id) {
            return Ok(self.fetch(session));
        }
        Err(CommandError::TakenOver(present.unwrap_or_default()))
    }

    /// The session's client waits for the next event.
    pub fn listen(&mut self, session: SessionId, listener: Listener, wait: Wait, now: Now) {
        self.sessions.listen(session, listener, wait, now);
    }

    /// The client no longer waits for events, though its connection may live on.
    pub fn listen_no_more(&mut self, session: SessionId, listener: Listener) {
        self.sessions.stop_listening_as(session, listener);
    }

    /// A client that was woken to fetch a session's events disconnected before it did.
    pub fn woken_no_more(&mut self, session: SessionId) {
        self.sessions.woken_no_more(session);
    }

    /// A connection closed: detaches the sessions that had it as their session connection. Returns
    /// whether there was one.
    pub fn client_gone(&mut self, client_id: u64, now: Now, effects: &mut Vec<Effect>) -> bool {
        let mut any = false;
        self.sessions.forget_ends_of(client_id);
        while let Some(session) = self.sessions.of_client(client_id) {
            any = true;
            self.detach(session, now, effects);
        }
        any
    }

    /// The session connection closed, or counts as closed.
    pub(super) fn detach(&mut self, session: SessionId, now: Now, effects: &mut Vec<Effect>) {
        self.invalidate();
        let name = self.sessions.name_of(session).cloned();
        let belongings = self.sessions.detach(session, now);
        self.log_session_ended(name, &belongings.holds, now);
        for id in belongings.waiters {
            let waiter = self.leave_untold(id);
            count(&mut self.counters.departures);
            // A waiter that would be told by an event cannot be told any more. One that is blocked
            // on a connection of its own can.
            if let Some(ReplyTarget::Client { handle, .. }) = waiter.map(|waiter| waiter.reply_to) {
                let why = WaitOutcome::Refused(CommandError::NoSession);
                effects.push(Effect::Leave {
                    client: handle,
                    why,
                });
            }
        }
        let (reads, others) = self.reads_first(belongings.holds);
        self.end_holds_later(reads);
        for event in belongings.unfetched {
            if let EventKind::Granted(grant) = &event.kind {
                self.end_grant_later(&event.lock, &event.owner, grant);
            }
        }
        self.end_holds_later(others);
    }

    /// Logs that a session has ended, and these holds with it.
    pub(super) fn log_session_ended(
        &mut self,
        name: Option<Rc<[u8]>>,
        holds: &BTreeSet<HoldId>,
        now: Now,
    ) {
        let Some(name) = name.filter(|_| !holds.is_empty() && self.log.is_on()) else {
            return;
        };
        let text = format!(
            "the session '{}' ended with {} holds",
            Word::new(&name),
            holds.len()
        );
        let locks = holds.iter().filter_map(|id| self.holds.get(*id));
        let locks = locks.map(|hold| &hold.lock);
        self.log
            .add_of_several(LogEvent::SessionEnded, locks, text, now);
    }

    /// A writer's read hold ends before its write hold. In the other order the writer would become
    /// a reader in between, and a waiter of the same owner that entered this read hold would lose
    /// it at once.
    pub(super) fn reads_first(&self, holds: BTreeSet<HoldId>) -> (Vec<HoldId>, Vec<HoldId>) {
        let reads = |id: &HoldId| {
            self.holds
                .get(*id)
                .is_some_and(|hold| hold.mode == Mode::Read)
        };
        holds.into_iter().partition(reads)
    }

    pub(super) fn end_holds_later(&mut self, holds: Vec<HoldId>) {
        for id in holds {
            let Some(hold) = self.forget_hold(id) else {
                continue;
            };
            let release = PendingRelease {
                token: hold.token,
                owner: hold.owner,
                mode: hold.mode,
                whole: true,
            };
            self.end_later(hold.lock.as_ref(), release);
        }
    }

    pub(crate) fn listened(
        &self,
        session: Option<SessionRef<'_>>,
    ) -> Result<Option<SessionId>, CommandError> {
        session
            .map(|session| self.sessions.listened(session))
            .transpose()
    }
}
