//! The connections of sessions: what begins with one, and what ends with it.

use crate::interface::effect::{Effect, WaitOutcome};
use crate::interface::error::CommandError;
use crate::interface::event::Told;
use crate::interface::request::{Bind, Events};
use crate::memory::log::event_log::LogEvent;
use crate::memory::log::metrics::count;
use crate::memory::pending::PendingRelease;
use crate::memory::session::{Attached, SessionLimits};
use crate::memory::state::Locks;
use crate::values::ids::{HoldId, Listener, SessionId, SessionRef};
use crate::values::mode::Mode;
use crate::values::must_exist::MustExist;
use crate::values::time::{Now, Wait};
use crate::values::word::Word;
use std::collections::BTreeSet;
use std::rc::Rc;

impl Locks {
    /// RLOCK.EVENTS: makes this client's connection the session connection, and drops the events
    /// that its client has acknowledged. Another client that waited for the session's events is
    /// told that it no longer does.
    ///
    /// # Errors
    /// The session is another user's; there is no room for a new session; or the client has called
    /// with a larger EPOCH before.
    pub fn attach(
        &mut self,
        request: &Events<'_>,
        client_id: u64,
        limits: SessionLimits,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Result<Attached, CommandError> {
        let (attached, former) = self.sessions.attach(request, client_id, limits, now)?;
        effects.extend(former.map(|listener| Effect::TakenOver {
            listener,
            by: client_id,
        }));
        Ok(attached)
    }

    /// RLOCK.BIND: makes this client's connection the session's command connection. Returns the
    /// client whose connection was bound before. It must be closed before the reply, which has the
    /// [life](Self::life_of) that the session has then.
    ///
    /// # Errors
    /// Nobody listens to the session, or it is another user's; the client has bound a connection
    /// with such an EPOCH or a larger one before; or this connection is bound to another session.
    pub fn bind(
        &mut self,
        request: &Bind<'_>,
        client_id: u64,
    ) -> Result<Option<u64>, CommandError> {
        let (session, epoch) = (self.sessions.listened(request.session)?, request.epoch);
        let known = self.sessions.bind_epoch(session);
        let former = self
            .bindings
            .bind(request.session, client_id, epoch, known)?;
        self.sessions.bind(session, client_id, epoch);
        Ok(former)
    }

    /// The present life of a session.
    ///
    /// # Errors
    /// Nobody listens to the session, or it is another user's.
    pub fn life_of(&self, session: SessionRef<'_>) -> Result<i64, CommandError> {
        let moment = self.sessions.moment(self.sessions.listened(session)?);
        Ok(moment.must_exist().map_or(0, |moment| moment.life))
    }

    /// Whether this client's connection is the session connection.
    pub fn lives_by(&self, session: SessionId, client_id: u64) -> bool {
        self.sessions.client_of(session) == Some(client_id)
    }

    /// Tells the session the events that were not acknowledged, the oldest first, as many as one
    /// reply may have. None if the session has ended.
    pub fn take_events(&mut self, session: SessionId, now: Now) -> Option<Told> {
        self.sessions.take_events(session, now)
    }

    /// The same for a client that was woken to hear them.
    ///
    /// # Errors
    /// Another client has taken the session over since: the events are for that client.
    pub fn take_events_as(
        &mut self,
        session: SessionId,
        client_id: u64,
        now: Now,
    ) -> Result<Told, CommandError> {
        let present = self.sessions.client_of(session);
        let told = (present == Some(client_id)).then(|| self.take_events(session, now));
        told.flatten()
            .ok_or_else(|| CommandError::TakenOver(present.unwrap_or_default()))
    }

    /// The session's client waits for the next event.
    pub fn listen(&mut self, session: SessionId, listener: Listener, wait: Wait, now: Now) {
        self.sessions.listen(session, listener, wait, now);
    }

    /// The client no longer waits for events, though its connection may live on.
    pub fn listen_no_more(&mut self, session: SessionId, listener: Listener) {
        self.sessions.stop_listening_as(session, listener);
    }

    /// A client that was woken to hear a session's events disconnected before it did.
    pub fn woken_no_more(&mut self, session: SessionId) {
        self.sessions.woken_no_more(session);
    }

    /// A connection closed: detaches the sessions that had it as their session connection. Returns
    /// whether there was one.
    pub fn client_gone(&mut self, client_id: u64, now: Now, effects: &mut Vec<Effect>) -> bool {
        let mut any = false;
        if let Some((user, name)) = self.bindings.closed(client_id) {
            let (user, name) = (&*user, &*name);
            self.sessions.unbind(SessionRef { name, user }, client_id);
        }
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
        let (waiters, holds) = self.sessions.detach(session, now);
        self.log_session_ended(name, &holds, now);
        for id in waiters {
            self.leave(id, WaitOutcome::Refused(CommandError::NoSession), effects);
            count(&mut self.counters.departures);
        }
        self.end_holds_later(holds);
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

    /// Ends the holds of a session that has ended. A writer's read hold ends before its write hold.
    /// In the other order the writer would become a reader in between, and a waiter of the same
    /// owner that entered this read hold would lose it at once.
    pub(super) fn end_holds_later(&mut self, holds: BTreeSet<HoldId>) {
        let reads = |id: &HoldId| {
            self.holds
                .get(*id)
                .is_some_and(|hold| hold.mode == Mode::Read)
        };
        let (reads, others): (Vec<_>, Vec<_>) = holds.into_iter().partition(reads);
        for id in reads.into_iter().chain(others) {
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
