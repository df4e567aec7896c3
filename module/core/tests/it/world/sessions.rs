//! What the driver does for sessions: EVENTS, those who wait there, and connections that close.

use super::{SESSIONS, World, each_of};
use crate::life::{Call, Life, Name, News, TwinEvent, in_any_order};
use crate::twin::Reply;
use rlock_core::request::Events;
use rlock_core::{Effect, Event, EventKind, LostReason, SessionId, Wait};

/// A client that waits for events.
#[derive(Clone, Debug)]
pub(super) struct Listening {
    name: Name,
    session: SessionId,
    client_id: u64,
    /// What it is to hear as soon as whatever is on its way arrives.
    called: Option<Call>,
}

impl World {
    pub(super) fn events(
        &mut self,
        name: Name,
        client: usize,
        block_ms: Option<i64>,
        grace_ms: i64,
    ) -> Result<(Reply, Reply), String> {
        let client_id = self.connections[client];
        if self.is_blocked(client_id) {
            return Ok((Reply::Nothing, Reply::Nothing));
        }
        let request = Events {
            session: self.session(name),
            block: block_ms.map(|ms| Wait::from_ms(ms).unwrap()),
            grace_ms,
        };
        if !self.twin.life.sessions.contains_key(&name) {
            // What the last session of this name was to be told ended with it.
            self.ledger.loses_its_line(name, &self.twin);
        }
        let now = self.clock.now;
        let mut effects = Vec::new();
        let limits = self.twin.life.limits;
        let session = self
            .locks
            .attach(&request, client_id, limits, now, &mut effects);
        self.twin.life.limits_are_heard();
        let refused = self.twin.cannot_attach(name, client_id);
        let session = match (session, refused) {
            (Ok(session), None) => session,
            (Err(refusal), Some(refused)) => {
                return Ok((Reply::Refused(refusal.to_string()), refused));
            }
            (session, refused) => return Err(format!("EVENTS: {session:?}, {refused:?}")),
        };
        self.call(&effects)?;
        self.twin.life.attach(name, client_id, grace_ms);
        let (events, should) = self.fetch(name, session)?;
        let is_news = !events.is_empty();
        let (of_core, of_twin) = (Reply::Events(events), Reply::Events(should));
        let Some(block_ms) = block_ms.filter(|_| !is_news && !self.in_multi) else {
            return Ok((of_core, of_twin));
        };
        let listener = self.seats;
        self.seats += 1;
        let wait = Wait::from_ms(block_ms).unwrap();
        self.locks.listen(session, listener, wait, now);
        self.twin.life.listen(name, listener, block_ms, now);
        let listening = Listening {
            name,
            session,
            client_id,
            called: None,
        };
        self.listening.insert(listener, listening);
        Ok((of_core, of_twin))
    }

    /// Takes the events of a session, and what they should be.
    fn fetch(
        &mut self,
        name: Name,
        session: SessionId,
    ) -> Result<(Vec<TwinEvent>, Vec<TwinEvent>), String> {
        let events: Vec<TwinEvent> = self.locks.fetch(session).iter().map(shown).collect();
        if !self.locks.fetch(session).is_empty() {
            return Err("events are there to be fetched twice".into());
        }
        for event in &events {
            self.ledger.is_told(name, event)?;
        }
        let should = self.twin.life.fetch(name);
        self.ledger.all_is_told(name, &self.twin)?;
        Ok((in_any_order(events), in_any_order(should)))
    }

    /// Those who were called get their events, or hear that they are no longer the ones to.
    pub(super) fn deliver(&mut self) -> Result<(Reply, Reply), String> {
        self.under_way.clear();
        let called: Vec<(usize, Call)> = self
            .listening
            .iter()
            .filter_map(|(listener, listening)| Some((*listener, listening.called?)))
            .collect();
        let (mut all, mut should) = (Vec::new(), Vec::new());
        for (listener, call) in called {
            let listening = self.listening.remove(&listener).unwrap();
            if call == Call::Woken {
                let (events, twins) = self.fetch_if_ours(&listening)?;
                all.extend(events);
                should.extend(twins);
            }
        }
        Ok((Reply::Events(all), Reply::Events(should)))
    }

    /// Another may have taken the session over meanwhile: the events are its to get.
    fn fetch_if_ours(
        &mut self,
        listening: &Listening,
    ) -> Result<(Vec<TwinEvent>, Vec<TwinEvent>), String> {
        let Listening {
            name,
            session,
            client_id,
            ..
        } = *listening;
        let is_ours = self.locks.lives_by(session, client_id);
        if is_ours != (self.twin.life.client_of(name) == Some(client_id)) {
            return Err(format!("whether {name} lives by {client_id}: {is_ours}"));
        }
        if is_ours {
            self.fetch(name, session)
        } else {
            Ok((Vec::new(), Vec::new()))
        }
    }

    /// CLIENT UNBLOCK, of a client that waits for events.
    pub(super) fn unblock(&mut self, client: usize) -> Result<(Reply, Reply), String> {
        let client_id = self.connections[client];
        let waits =
            |listening: &Listening| listening.client_id == client_id && listening.called.is_none();
        let found = self.listening.iter().find(|(_, of)| waits(of));
        let Some((&listener, _)) = found else {
            return Ok((Reply::Nothing, Reply::Nothing));
        };
        let listening = self.listening.remove(&listener).unwrap();
        self.locks.listen_no_more(listening.session, listener);
        self.twin.life.listen_no_more(listening.name, listener);
        let (events, should) = self.fetch_if_ours(&listening)?;
        Ok((Reply::Events(events), Reply::Events(should)))
    }

    /// A connection closes; the next on this place is another client's.
    pub(super) fn close(&mut self, client: usize) -> Result<(Reply, Reply), String> {
        let client_id = self.connections[client];
        self.clients += 1;
        self.connections[client] = self.clients;
        let now = self.clock.now;
        let mut effects = Vec::new();
        let any = self.locks.client_gone(client_id, now, &mut effects);
        self.carry_out(&[], b"", &effects)?;
        if self.locks.client_gone(client_id, now, &mut effects) {
            return Err("a client is gone twice".into());
        }
        let theirs: Vec<usize> = self
            .listening
            .iter()
            .filter(|(_, listening)| listening.client_id == client_id)
            .map(|(listener, _)| *listener)
            .collect();
        for listener in theirs {
            let Listening { name, session, .. } = self.listening.remove(&listener).unwrap();
            self.locks.listen_no_more(session, listener);
            self.twin.life.listen_no_more(name, listener);
        }
        let gone: Vec<Name> = (0..SESSIONS.len())
            .filter(|name| self.twin.life.client_of(*name) == Some(client_id))
            .collect();
        let should = self.twin.client_gone(client_id, now);
        for name in gone {
            self.ledger.loses_its_line(name, &self.twin);
        }
        let told = |any| Reply::Number(i64::from(any));
        Ok((told(any), told(should)))
    }

    fn is_blocked(&self, client_id: u64) -> bool {
        let mut blocked = self.listening.values();
        blocked.any(|listening| listening.client_id == client_id)
    }

    /// Carries out what concerns listeners.
    pub(super) fn call(&mut self, effects: &[Effect]) -> Result<(), String> {
        for effect in effects {
            let (listener, call) = match effect {
                Effect::Wake(listener) => (*listener, Call::Woken),
                Effect::TakenOver { listener, by } => (*listener, Call::TakenOver(*by)),
                _ => continue,
            };
            self.called.push((listener, call));
            let listening = self
                .listening
                .get_mut(&listener)
                .ok_or_else(|| format!("{call:?}: {listener}, who does not listen"))?;
            if let Some(before) = listening.called.replace(call) {
                return Err(format!("{call:?}: {listener}, after {before:?}"));
            }
        }
        Ok(())
    }

    /// The place that a client's connection has among those of EVENTS.
    pub(crate) fn connection_of(&self, client_id: u64) -> Option<usize> {
        self.connections.iter().position(|of| *of == client_id)
    }

    /// Which connections are blocked, and what they are called for.
    pub(crate) fn called_and_blocked(&self) -> Vec<(Option<usize>, Option<Call>)> {
        let listening = self.listening.values();
        listening
            .map(|of| (self.connection_of(of.client_id), of.called))
            .collect()
    }

    /// Everybody fetches what there is: nothing that was told may stay unread in the end.
    pub(crate) fn fetch_all(&mut self) -> Result<(), String> {
        self.twin.life.limits = Life::default().limits;
        for name in 0..SESSIONS.len() {
            if let Some(session) = self.twin.life.sessions.get(&name) {
                self.twin.life.user = session.user;
            }
            // From a connection that nobody else uses.
            let client = self.connections.len() - 1;
            let (of_core, of_twin) = self.events(name, client, None, 0)?;
            if of_core != of_twin {
                return Err(format!("in the end: core {of_core:?}, twin {of_twin:?}"));
            }
        }
        self.compare()
    }
}

fn shown(event: &Event) -> TwinEvent {
    let news = match &event.kind {
        EventKind::Granted(grant) => News::Granted {
            token: grant.token.get(),
            several: each_of(grant),
        },
        EventKind::Timeout { ttl_ms } => News::Timeout(*ttl_ms),
        EventKind::Lost(LostReason::Expired) => News::Lost("expired"),
        EventKind::Lost(LostReason::Broken) => News::Lost("broken"),
        EventKind::Lost(LostReason::Deleted) => News::Lost("deleted"),
        EventKind::Error(refusal) => News::Error(refusal.to_string()),
        EventKind::Wanted { waiters } => News::Wanted((*waiters).into()),
    };
    TwinEvent {
        news,
        place: (event.lock.db, event.lock.name.to_vec()),
        owner: event.owner.to_vec(),
    }
}
