//! Sessions: one for each client process, with the events that it has not acknowledged yet.
//!
//! A session lives as long as its session connection, which is the one that last called EVENTS for
//! it, and after that until the grace of its holds is over. Waiters and holds belong to it. Its
//! events are numbered, and kept until the client has acknowledged them.

use crate::interface::error::CommandError;
use crate::interface::event::{Event, Moment, Told};
use crate::interface::request::Events;
use crate::memory::deadlines::Deadlines;
use crate::values::arena::{Arena, Id};
use crate::values::ids::{HoldId, Listener, SessionId, SessionRef, WaiterId};
use crate::values::limits::{EVENTS_TOLD_BYTES, EVENTS_TOLD_MAX, ROOM_KEPT};
use crate::values::must_exist::MustExist;
use crate::values::time::{Now, Wait, earlier};
use crate::values::token::TokenMint;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

/// The limits of sessions: two that an operator sets, and the server's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// The largest number of sessions.
    pub sessions: u32,
    /// The largest number of events that a session may leave unacknowledged.
    pub events_per_session: u32,
    /// Whether the server has reached `maxmemory` and evicts nothing: then no session begins.
    pub out_of_memory: bool,
}

/// A session as SESSIONS shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionView {
    /// Its name.
    pub name: Rc<[u8]>,
    /// The client id of the session connection; none while it is closed.
    pub client_id: Option<u64>,
    /// How many holds belong to the session.
    pub holds: usize,
    /// How many of its waits are in queues. A wait for several locks counts once.
    pub waiters: usize,
    /// How long its holds outlive the session connection, in milliseconds.
    pub grace_ms: i64,
    /// How long the session has existed, in milliseconds.
    pub age_ms: i64,
    /// The largest number that its client gave to a session connection; none if it gave none.
    pub epoch: Option<u64>,
    /// The client id of its command connection; none if no connection is bound.
    pub bound: Option<u64>,
    /// How many of its events are not acknowledged.
    pub unacknowledged: usize,
}

#[derive(Debug, Default)]
struct Session {
    name: Rc<[u8]>,
    /// The ACL user that began the session. No other user may name it.
    user: Rc<[u8]>,
    /// The client id of the session connection; none while it is closed and the grace runs.
    client_id: Option<u64>,
    /// When the session began, monotonic, in milliseconds.
    since: i64,
    grace_ms: i64,
    /// When the grace ends, monotonic, in milliseconds.
    grace_end: Option<i64>,
    /// The client that waits for events.
    listener: Option<Listener>,
    /// Until when it waits, monotonic, in milliseconds; none without limit.
    listen_end: Option<i64>,
    /// Whether a listener was woken and was not told yet. Until then the limit of unacknowledged
    /// events does not apply: one turn of the server's event loop can bring any number.
    is_woken: bool,
    /// The present life; none if the next EVENTS begins one.
    life: Option<i64>,
    /// The largest number that the client gave to a session connection.
    epoch: Option<u64>,
    /// The client id of the command connection.
    bound: Option<u64>,
    /// The largest number that the client gave to a command connection.
    bind_epoch: Option<u64>,
    /// The number of the last event in this life.
    last: u64,
    /// The number of the last event in the last reply.
    told: u64,
    /// The events that are not acknowledged: the latest ones, up to the number `last`.
    events: VecDeque<Event>,
    waiters: BTreeSet<WaiterId>,
    holds: BTreeSet<HoldId>,
}

impl Session {
    /// Whether it has left too many events unacknowledged. A session whose connection is closed
    /// does not count: it gets few more events, and ends with its grace.
    fn overflows(&self, events_max: Option<u32>) -> bool {
        let max = events_max.and_then(|max| usize::try_from(max).ok());
        let has_more = max.is_some_and(|max| self.events.len() > max);
        has_more && !self.is_woken && self.client_id.is_some()
    }

    /// The number of the last event that the client has acknowledged.
    fn acknowledged(&self) -> u64 {
        let kept = u64::try_from(self.events.len()).unwrap_or(u64::MAX);
        self.last.saturating_sub(kept)
    }

    /// Drops the events up to this number. Returns how many.
    fn acknowledge(&mut self, seq: u64) -> usize {
        let heard = seq.saturating_sub(self.acknowledged());
        let heard = usize::try_from(heard).unwrap_or(usize::MAX);
        let heard = heard.min(self.events.len());
        self.events.drain(..heard);
        if self.events.is_empty() {
            self.events.shrink_to(ROOM_KEPT);
        }
        heard
    }
}

/// The session of an EVENTS call.
#[derive(Clone, Copy, Debug)]
pub struct Attached {
    /// The session.
    pub session: SessionId,
    /// Whether the call must be answered at once: there are events; or it begins a life, or its
    /// client knows another one.
    pub at_once: bool,
}

/// All sessions.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    arena: Arena<Session>,
    names: HashMap<Rc<[u8]>, SessionId>,
    clients: BTreeSet<(u64, SessionId)>,
    /// When waits for events end, and when graces do; both monotonic.
    pub(crate) listen_ends: Deadlines<SessionId>,
    pub(crate) grace_ends: Deadlines<SessionId>,
    /// How many unacknowledged events all sessions have.
    pub(crate) unacknowledged: usize,
    /// As in [`SessionLimits`], from the last EVENTS; none before the first.
    events_max: Option<u32>,
    /// Sessions that were found with more unacknowledged events than `events_max`.
    overflowing: BTreeSet<SessionId>,
    /// A life is named as a grant is, so no server gives the same name twice.
    pub(crate) lives: TokenMint,
}

impl Sessions {
    pub(crate) fn len(&self) -> usize {
        self.arena.len()
    }

    /// The session that this user names, if it has a connection and that has heard of its life.
    pub(crate) fn listened(&self, session: SessionRef<'_>) -> Result<SessionId, CommandError> {
        match self.find(session)? {
            Some((id, found)) if found.client_id.and(found.life).is_some() => Ok(id),
            _ => Err(CommandError::NoSession),
        }
    }

    /// The session with this name, or none. A session of another user is refused: otherwise any
    /// user could receive its grants and end its holds by knowing its name.
    fn find(&self, session: SessionRef<'_>) -> Result<Option<(SessionId, &Session)>, CommandError> {
        let id = self.names.get(session.name);
        match id.and_then(|id| Some((*id, self.arena.get(id.0)?))) {
            Some((_, found)) if *found.user != *session.user => Err(CommandError::SessionOfAnother),
            found => Ok(found),
        }
    }

    /// The client id of the session connection.
    pub(crate) fn client_of(&self, id: SessionId) -> Option<u64> {
        self.arena.get(id.0)?.client_id
    }

    /// The name of a session.
    pub(crate) fn name_of(&self, id: SessionId) -> Option<&Rc<[u8]>> {
        self.arena.get(id.0).map(|session| &session.name)
    }

    /// All sessions, in no particular order.
    pub(crate) fn views(&self, now: Now) -> impl Iterator<Item = SessionView> + '_ {
        let sessions = self.arena.iter().map(|(_, session)| session);
        sessions.map(move |session| SessionView {
            name: Rc::clone(&session.name),
            client_id: session.client_id,
            holds: session.holds.len(),
            waiters: session.waiters.len(),
            grace_ms: session.grace_ms,
            age_ms: now.mono_ms.saturating_sub(session.since),
            epoch: session.epoch,
            bound: session.bound,
            unacknowledged: session.events.len(),
        })
    }

    // --- The session connection ------------------------------------------------------------------

    /// Makes a client's connection the session connection, begins the session if it does not exist,
    /// and drops the events that the client has acknowledged. Returns also the client that waited
    /// for events before: it must be told that it does so no longer.
    pub(crate) fn attach(
        &mut self,
        request: &Events<'_>,
        client_id: u64,
        limits: SessionLimits,
        now: Now,
    ) -> Result<(Attached, Option<Listener>), CommandError> {
        self.events_max = Some(limits.events_per_session);
        let id = self.find_or_open(request, limits, now)?;
        let replaced = self.stop_listening(id);
        let Some(session) = self.arena.get_mut(id.0).must_exist() else {
            return Err(CommandError::NoSession);
        };
        session.grace_ms = request.grace_ms;
        session.epoch = session.epoch.max(request.epoch);
        session.is_woken = false;
        self.grace_ends.set(id, &mut session.grace_end, None);
        if let Some(former) = session.client_id.replace(client_id) {
            self.clients.remove(&(former, id));
        }
        self.clients.insert((client_id, id));
        let heard = request.after.map_or(session.told, |after| after.seq);
        let life = request.after.map(|after| after.life).or(session.life);
        let knows_life = life.is_some() && life == session.life;
        if knows_life {
            let dropped = session.acknowledge(heard);
            self.unacknowledged = self.unacknowledged.saturating_sub(dropped);
        }
        let attached = Attached {
            session: id,
            at_once: !knows_life || !session.events.is_empty(),
        };
        Ok((attached, replaced))
    }

    fn find_or_open(
        &mut self,
        request: &Events<'_>,
        limits: SessionLimits,
        now: Now,
    ) -> Result<SessionId, CommandError> {
        if let Some((id, session)) = self.find(request.session)? {
            return match session.epoch {
                Some(known) if request.epoch.is_some_and(|epoch| epoch < known) => {
                    Err(CommandError::Stale(known))
                }
                _ => Ok(id),
            };
        }
        if limits.out_of_memory {
            return Err(CommandError::OutOfMemory);
        }
        let has_room = usize::try_from(limits.sessions).is_ok_and(|max| self.len() < max);
        let opened = has_room.then(|| self.open(request.session, now)).flatten();
        opened.ok_or(CommandError::TooManySessions(limits.sessions))
    }

    /// None only if there are four billion sessions already.
    fn open(&mut self, session: SessionRef<'_>, now: Now) -> Option<SessionId> {
        let name: Rc<[u8]> = Rc::from(session.name);
        let id = SessionId(self.arena.insert(Session {
            name: Rc::clone(&name),
            user: Rc::from(session.user),
            since: now.mono_ms,
            ..Session::default()
        })?);
        self.names.insert(name, id);
        Some(id)
    }

    /// A session whose session connection is this client's.
    pub(crate) fn of_client(&self, client_id: u64) -> Option<SessionId> {
        let first = SessionId(Id::FIRST);
        let (client, id) = self.clients.range((client_id, first)..).next()?;
        (*client == client_id).then_some(*id)
    }

    /// The session connection closed: the waiters leave at once, the holds end when the grace is
    /// over. Returns the waiters, and the holds that end now.
    pub(crate) fn detach(
        &mut self,
        id: SessionId,
        now: Now,
    ) -> (BTreeSet<WaiterId>, BTreeSet<HoldId>) {
        self.stop_listening(id);
        let Some(session) = self.arena.get_mut(id.0).must_exist() else {
            return Default::default();
        };
        if let Some(client_id) = session.client_id.take() {
            self.clients.remove(&(client_id, id));
        }
        session.is_woken = false;
        let waiters = std::mem::take(&mut session.waiters);
        // The grace is for the holds. A session without holds would only take up one of the
        // `rlock.max-sessions`.
        let holds = if session.grace_ms > 0 && !session.holds.is_empty() {
            let end = now.mono_ms.saturating_add(session.grace_ms);
            let field = &mut session.grace_end;
            self.grace_ends.set(id, field, Some(end));
            BTreeSet::new()
        } else {
            self.end(id)
        };
        (waiters, holds)
    }

    /// The next EVENTS begins another life: the events of this one are dropped. Returns the client
    /// that waits for events, which must be woken.
    pub(crate) fn end_life(&mut self, id: SessionId) -> Option<Listener> {
        let listener = self.stop_listening(id);
        let session = self.arena.get_mut(id.0)?;
        let dropped = session.acknowledge(session.last);
        self.unacknowledged = self.unacknowledged.saturating_sub(dropped);
        session.life = None;
        listener
    }

    /// Ends the session. Returns its holds.
    pub(crate) fn end(&mut self, id: SessionId) -> BTreeSet<HoldId> {
        self.end_life(id);
        self.overflowing.remove(&id);
        let Some(mut session) = self.arena.remove(id.0).must_exist() else {
            return BTreeSet::new();
        };
        self.grace_ends.set(id, &mut session.grace_end, None);
        self.names.remove(&session.name);
        if self.names.is_empty() {
            self.names.shrink_to(ROOM_KEPT);
        }
        session.holds
    }

    /// How many events, waits and holds end with a session, plus one for the session itself.
    pub(crate) fn size_of(&self, id: SessionId) -> usize {
        self.arena.get(id.0).map_or(1, |session| {
            let held = session.holds.len().saturating_add(session.waiters.len());
            held.saturating_add(session.events.len()).saturating_add(1)
        })
    }

    // --- Events ----------------------------------------------------------------------------------

    /// Keeps an event until it is acknowledged. Returns the client that waits for one.
    pub(crate) fn tell(&mut self, id: SessionId, event: Event) -> Option<Listener> {
        let session = self.arena.get_mut(id.0)?;
        // Before the first event of a life its client has to hear of the life.
        session.life?;
        session.events.push_back(event);
        session.last = session.last.saturating_add(1);
        self.unacknowledged = self.unacknowledged.saturating_add(1);
        let woken = self.stop_listening(id);
        let session = self.arena.get(id.0)?;
        if session.overflows(self.events_max) {
            self.overflowing.insert(id);
        }
        woken
    }

    /// The present moment in a session's life.
    pub(crate) fn moment(&self, id: SessionId) -> Option<Moment> {
        let session = self.arena.get(id.0)?;
        let (life, seq) = (session.life?, session.last);
        Some(Moment { life, seq })
    }

    /// A session that was found with too many unacknowledged events, and has as many still.
    pub(crate) fn next_overflowing(&mut self) -> Option<SessionId> {
        while let Some(id) = self.overflowing.pop_first() {
            let session = self.arena.get(id.0);
            if session.is_some_and(|session| session.overflows(self.events_max)) {
                return Some(id);
            }
        }
        None
    }

    /// Returns the events that are not acknowledged, as many as one reply may have. A session
    /// without a life begins one.
    pub(crate) fn take_events(&mut self, id: SessionId, now: Now) -> Option<Told> {
        let session = self.arena.get_mut(id.0)?;
        session.is_woken = false;
        let life = *session.life.get_or_insert_with(|| {
            (session.last, session.told) = (0, 0);
            self.lives.mint(now.wall_us).get()
        });
        let seq = session.acknowledged();
        let after = Moment { life, seq };
        let mut bytes = 0_usize;
        let has_room = |event: &&Event| {
            let before = bytes;
            bytes = before.saturating_add(event.lock.name.len());
            bytes = bytes.saturating_add(event.owner.len());
            before < EVENTS_TOLD_BYTES
        };
        let events = session.events.iter().take(EVENTS_TOLD_MAX);
        let events: Vec<_> = events.take_while(has_room).cloned().collect();
        session.told = seq.saturating_add(u64::try_from(events.len()).unwrap_or(u64::MAX));
        Some(Told { after, events })
    }

    // --- The command connection ------------------------------------------------------------------

    /// The largest number that the client gave to a command connection.
    pub(crate) fn bind_epoch(&self, id: SessionId) -> Option<u64> {
        self.arena.get(id.0)?.bind_epoch
    }

    /// This client's connection is the command connection, with this number.
    pub(crate) fn bind(&mut self, id: SessionId, client_id: u64, epoch: u64) {
        if let Some(session) = self.arena.get_mut(id.0).must_exist() {
            (session.bound, session.bind_epoch) = (Some(client_id), Some(epoch));
        }
    }

    /// The command connection has closed.
    pub(crate) fn unbind(&mut self, session: SessionRef<'_>, client_id: u64) {
        if let Ok(Some((id, _))) = self.find(session)
            && let Some(session) = self.arena.get_mut(id.0)
            && session.bound == Some(client_id)
        {
            session.bound = None;
        }
    }

    /// Whether this client's connection is the command connection.
    pub(crate) fn is_bound(&self, id: SessionId, client_id: u64) -> bool {
        let session = self.arena.get(id.0);
        session.is_some_and(|session| session.bound == Some(client_id))
    }

    /// A client waits for the next event.
    pub(crate) fn listen(&mut self, id: SessionId, listener: Listener, wait: Wait, now: Now) {
        let Some(session) = self.arena.get_mut(id.0) else {
            return;
        };
        session.listener = Some(listener);
        let field = &mut session.listen_end;
        self.listen_ends.set(id, field, wait.end(now));
    }

    /// Ends the wait for events. Returns the client that waited.
    pub(crate) fn stop_listening(&mut self, id: SessionId) -> Option<Listener> {
        let session = self.arena.get_mut(id.0)?;
        let listener = session.listener.take()?;
        session.is_woken = true;
        self.listen_ends.set(id, &mut session.listen_end, None);
        Some(listener)
    }

    /// The same, if this client is the one that waits.
    pub(crate) fn stop_listening_as(&mut self, id: SessionId, listener: Listener) {
        let present = self.arena.get(id.0).and_then(|session| session.listener);
        if present == Some(listener) {
            self.stop_listening(id);
            self.woken_no_more(id);
        }
    }

    /// A listener that was woken is not told, or was not woken to be told: the limit of
    /// unacknowledged events applies again.
    pub(crate) fn woken_no_more(&mut self, id: SessionId) {
        let Some(session) = self.arena.get_mut(id.0) else {
            return;
        };
        session.is_woken = false;
        if session.overflows(self.events_max) {
            self.overflowing.insert(id);
        }
    }

    /// Whether a session was found that has left too many events unacknowledged.
    pub(crate) fn any_overflowing(&self) -> bool {
        !self.overflowing.is_empty()
    }

    /// When the nearest wait for events or grace ends, monotonic, in milliseconds.
    pub(crate) fn next_deadline(&self) -> Option<i64> {
        earlier(self.listen_ends.next(), self.grace_ends.next())
    }

    // --- Waiters and holds of a session ----------------------------------------------------------

    pub(crate) fn add_waiter(&mut self, id: SessionId, waiter: WaiterId) {
        if let Some(session) = self.arena.get_mut(id.0).must_exist() {
            session.waiters.insert(waiter);
        }
    }

    pub(crate) fn remove_waiter(&mut self, id: SessionId, waiter: WaiterId) {
        if let Some(session) = self.arena.get_mut(id.0) {
            session.waiters.remove(&waiter);
        }
    }

    pub(crate) fn add_hold(&mut self, id: SessionId, hold: HoldId) {
        if let Some(session) = self.arena.get_mut(id.0).must_exist() {
            session.holds.insert(hold);
        }
    }

    /// The hold has ended, or belongs to another session now. A session without a connection ends
    /// with its last hold. If it were kept for its grace, many such sessions would use up
    /// `rlock.max-sessions`.
    pub(crate) fn remove_hold(&mut self, id: SessionId, hold: HoldId) {
        let Some(session) = self.arena.get_mut(id.0) else {
            return;
        };
        session.holds.remove(&hold);
        if session.holds.is_empty() && session.grace_end.is_some() {
            self.end(id);
        }
    }
}

#[cfg(debug_assertions)]
#[allow(clippy::arithmetic_side_effects, reason = "only tests run it")]
impl Sessions {
    /// Asserts that each session is on the lists that its fields name, and on no others.
    pub(crate) fn check(&self) {
        let sessions = || self.arena.iter().map(|(id, of)| (SessionId(id), of));
        self.grace_ends
            .check(sessions().map(|(id, of)| (of.grace_end, id)));
        let listen_ends = sessions().map(|(id, of)| (of.listen_end, id));
        self.listen_ends.check(listen_ends);
        let clients = sessions().filter_map(|(id, of)| Some((of.client_id?, id)));
        assert_eq!(self.clients, clients.collect());
        let mut unacknowledged = 0;
        for (id, session) in sessions() {
            let (client, grace) = (session.client_id, session.grace_end);
            assert_eq!(self.names.get(&session.name), Some(&id));
            // It has a connection, or its grace runs because it has holds.
            assert_eq!(client.is_some(), grace.is_none(), "{session:?}");
            assert!(client.is_some() || !session.holds.is_empty(), "{session:?}");
            assert!(
                client.is_some() || session.listener.is_none(),
                "{session:?}"
            );
            unacknowledged += session.events.len();
        }
        assert_eq!(
            (self.names.len(), self.unacknowledged),
            (self.len(), unacknowledged)
        );
        let mut overflowing = self.overflowing.iter();
        assert!(overflowing.all(|id| self.arena.get(id.0).is_some()));
    }

    /// How many waits and holds all sessions have.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let count = |(waits, holds), (_, session): (_, &Session)| {
            (waits + session.waiters.len(), holds + session.holds.len())
        };
        self.arena.iter().fold((0, 0), count)
    }

    pub(crate) fn has_waiter(&self, id: SessionId, waiter: WaiterId) -> bool {
        let session = self.arena.get(id.0);
        session.is_some_and(|session| session.waiters.contains(&waiter))
    }

    pub(crate) fn has_hold(&self, id: SessionId, hold: HoldId) -> bool {
        let session = self.arena.get(id.0);
        session.is_some_and(|session| session.holds.contains(&hold))
    }
}
