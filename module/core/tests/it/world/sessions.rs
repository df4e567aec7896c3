//! The driver's part for sessions: EVENTS, clients that wait there, and connections that close.

use super::{Op, SESSIONS, World};
use crate::life::{After, Call, Epoch, Life, Name, News, TwinEvent, TwinTold, in_any_order};
use crate::twin::Reply;
use rlock_core::request::{Bind, Events};
use rlock_core::{Effect, Event, EventKind, LostReason, Moment, SessionId, Token, Told, Wait};

/// The options of EVENTS.
#[derive(Clone, Copy, Debug)]
struct Asked {
    epoch: Option<Epoch>,
    after: Option<After>,
    block_ms: Option<i64>,
    grace_ms: i64,
}

/// A client that waits for events.
#[derive(Clone, Debug)]
pub(super) struct Listening {
    name: Name,
    session: SessionId,
    client_id: u64,
    /// The call that it gets as soon as the messages in flight arrive.
    called: Option<Call>,
}

impl World {
    pub(super) fn happen_to_sessions(&mut self, op: &Op) -> Result<(Reply, Reply), String> {
        match *op {
            Op::Events {
                session,
                client,
                block_ms,
                grace_ms,
                epoch,
                after,
            } => {
                let asked = Asked {
                    epoch,
                    after,
                    block_ms,
                    grace_ms,
                };
                self.events(session, client, asked)
            }
            Op::Close { client } => self.close(client),
            // In a transaction nothing is sent, and nobody is blocked.
            _ if self.in_multi => Ok((Reply::Nothing, Reply::Nothing)),
            Op::Bind {
                session,
                client,
                epoch,
            } => self.bind(session, client, epoch),
            Op::Unblock { client } => self.unblock(client),
            Op::Deliver => self.deliver(),
            _ => Err(format!("{op:?} is not about sessions")),
        }
    }

    fn events(
        &mut self,
        name: Name,
        client: usize,
        asked: Asked,
    ) -> Result<(Reply, Reply), String> {
        let client_id = self.connections[client];
        if self.is_blocked(client_id) {
            return Ok((Reply::Nothing, Reply::Nothing));
        }
        let life = &self.twin.life;
        let known = life.sessions.get(&name).and_then(|of| of.epoch);
        let epoch = asked.epoch.map(|epoch| epoch.number(known));
        let after = asked.after.map(|after| life.moment(name, after));
        let request = Events {
            session: self.session(name),
            epoch,
            after: after.map(|(life, seq)| Moment { life, seq }),
            block: asked.block_ms.map(|ms| Wait::from_ms(ms).unwrap()),
            grace_ms: asked.grace_ms,
        };
        if !self.twin.life.sessions.contains_key(&name) {
            // Undelivered events of the last session of this name ended with it.
            self.ledger.loses_its_line(name, &self.twin);
        }
        let now = self.clock.now;
        let mut effects = Vec::new();
        let limits = self.twin.life.limits;
        let attached = self
            .locks
            .attach(&request, client_id, limits, now, &mut effects);
        self.twin.life.limits_are_heard();
        let attached = match (attached, self.twin.cannot_attach(name, epoch)) {
            (Ok(attached), None) => attached,
            (Err(refusal), Some(refused)) => {
                return Ok((Reply::Refused(refusal.to_string()), refused));
            }
            (attached, refused) => return Err(format!("EVENTS: {attached:?}, {refused:?}")),
        };
        self.call(&effects)?;
        // An acknowledgement of events that the client was not told.
        self.ledger.hears_of(name, after, &self.twin);
        let life = &mut self.twin.life;
        let at_once = life.attach(name, client_id, epoch, after, asked.grace_ms);
        if attached.at_once != at_once {
            return Err(format!("EVENTS: {attached:?}, at once {at_once}"));
        }
        let waits = asked.block_ms.filter(|_| !at_once && !self.in_multi);
        let Some(block_ms) = waits else {
            let (told, should) = self.take_events(name, attached.session)?;
            return Ok((Reply::Events(vec![told]), Reply::Events(vec![should])));
        };
        let listener = self.seats;
        self.seats += 1;
        let wait = Wait::from_ms(block_ms).unwrap();
        self.locks.listen(attached.session, listener, wait, now);
        self.twin.life.listen(name, listener, block_ms, now);
        let listening = Listening {
            name,
            session: attached.session,
            client_id,
            called: None,
        };
        self.listening.insert(listener, listening);
        Ok((Reply::Waits, Reply::Waits))
    }

    /// Takes the events of a session from the core, and from the twin.
    fn take_events(
        &mut self,
        name: Name,
        session: SessionId,
    ) -> Result<(TwinTold, TwinTold), String> {
        let now = self.clock.now;
        let told = self.locks.take_events(session, now);
        let again = self.locks.take_events(session, now);
        if told != again {
            return Err(format!("told {told:?}, and then {again:?}"));
        }
        let told = shown(&told.ok_or("the session has ended")?);
        let before = &self.twin.life.sessions[&name];
        let told_before = if before.life.is_some() {
            before.told
        } else {
            0
        };
        let should = self.twin.life.take_events(name, now);
        let numbered = (told.after + 1..).zip(&told.events);
        for (_, event) in numbered.filter(|(seq, _)| *seq > told_before) {
            self.ledger.is_told(name, event)?;
        }
        self.ledger.all_is_told(name, &self.twin)?;
        // Those that were told before are told in the same order.
        let again = told_before.saturating_sub(should.after);
        let again = usize::try_from(again).unwrap().min(should.events.len());
        if told.events.get(..again) != Some(&should.events[..again]) {
            return Err(format!("told again {told:?}\n  should {should:?}"));
        }
        let (in_order, should) = (sorted(told.clone()), sorted(should));
        if in_order == should {
            self.twin.life.are_in_order(name, &told.events);
        }
        Ok((in_order, should))
    }

    fn bind(&mut self, name: Name, client: usize, epoch: Epoch) -> Result<(Reply, Reply), String> {
        let client_id = self.connections[client];
        if self.is_blocked(client_id) {
            return Ok((Reply::Nothing, Reply::Nothing));
        }
        let request = Bind {
            session: self.session(name),
            epoch: epoch.number(self.twin.life.bind_epoch(name)),
        };
        let bound = self.locks.bind(&request, client_id);
        let of_twin = self.twin.bind_connection(name, client_id, request.epoch);
        let (former, should) = match (bound, of_twin) {
            (Ok(former), Ok(should)) => (former, should),
            (Err(error), Err(should)) => return Ok((Reply::Refused(error.to_string()), should)),
            other => return Err(format!("BIND: {other:?}")),
        };
        if former != should {
            return Err(format!("BIND closes {former:?}, should {should:?}"));
        }
        if let Some(former) = former {
            let former = self.connection_of(former);
            let former = former.ok_or("a connection is bound that has closed")?;
            let (any, should) = self.close(former)?;
            if any != should {
                return Err(format!("BIND closes {former}: {any:?}, {should:?}"));
            }
        }
        // The former connection may have been the session connection as well.
        let of_core = match self.locks.life_of(request.session) {
            Ok(life) => Reply::Bound { life, former },
            Err(error) => Reply::Refused(error.to_string()),
        };
        Ok((of_core, self.twin.bound(name, former)))
    }

    /// Clients that were called get their events, or hear that another connection has taken over.
    fn deliver(&mut self) -> Result<(Reply, Reply), String> {
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
                let told = self.take_if_ours(&listening)?;
                all.extend(told.iter().map(|(told, _)| told.clone()));
                should.extend(told.map(|(_, should)| should));
            }
        }
        Ok((Reply::Events(all), Reply::Events(should)))
    }

    /// Another may have taken the session over meanwhile: the events are its to get.
    fn take_if_ours(
        &mut self,
        listening: &Listening,
    ) -> Result<Option<(TwinTold, TwinTold)>, String> {
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
            return self.take_events(name, session).map(Some);
        }
        let now = self.clock.now;
        match self.locks.take_events_as(session, client_id, now) {
            Err(_) => Ok(None),
            Ok(told) => Err(format!("{told:?} is another's to hear")),
        }
    }

    /// CLIENT UNBLOCK, of a client that waits for events.
    fn unblock(&mut self, client: usize) -> Result<(Reply, Reply), String> {
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
        let told = self.take_if_ours(&listening)?;
        let (told, should) = told.into_iter().unzip();
        Ok((Reply::Events(told), Reply::Events(should)))
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

    /// The client id of a connection.
    pub(crate) fn client_id(&self, client: usize) -> u64 {
        self.connections[client]
    }

    /// The place that a client's connection has among those of EVENTS.
    pub(crate) fn connection_of(&self, client_id: u64) -> Option<usize> {
        self.connections.iter().position(|of| *of == client_id)
    }

    /// The connections that wait for events, and the calls that they get.
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
            let asked = Asked {
                epoch: None,
                after: None,
                block_ms: None,
                grace_ms: 0,
            };
            let (of_core, of_twin) = self.events(name, client, asked)?;
            if of_core != of_twin {
                return Err(format!("in the end: core {of_core:?}, twin {of_twin:?}"));
            }
        }
        self.compare()
    }
}

fn sorted(told: TwinTold) -> TwinTold {
    TwinTold {
        events: in_any_order(told.events),
        ..told
    }
}

fn shown(told: &Told) -> TwinTold {
    TwinTold {
        life: told.after.life,
        after: told.after.seq,
        events: told.events.iter().map(event_shown).collect(),
    }
}

fn event_shown(event: &Event) -> TwinEvent {
    let news = match &event.kind {
        EventKind::Granted => News::Granted,
        EventKind::Timeout { ttl_ms } => News::Timeout(*ttl_ms),
        EventKind::Left => News::Left,
        EventKind::Lost(LostReason::Expired) => News::Lost("expired"),
        EventKind::Lost(LostReason::Broken) => News::Lost("broken"),
        EventKind::Lost(LostReason::Deleted) => News::Lost("deleted"),
        EventKind::Lost(LostReason::Released) => News::Lost("released"),
        EventKind::Lost(LostReason::Taken) => News::Lost("taken"),
        EventKind::Error(refusal) => News::Error(refusal.to_string()),
        EventKind::Wanted { waiters } => News::Wanted((*waiters).into()),
    };
    TwinEvent {
        news,
        place: (event.lock.db, event.lock.name.to_vec()),
        owner: event.owner.to_vec(),
        mode: event.mode,
        token: event.token.map(Token::get),
    }
}
