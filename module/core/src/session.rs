//! Sessions: the life-lines of client processes, and what they have yet to be told.
//!
//! A session lives as long as the connection that last asked for its events. What belongs to it are
//! its waiters and its holds; what happened to them is kept until it is fetched, in order.

use crate::arena::{Arena, Id, ROOM_KEPT};
use crate::hold::HoldId;
use crate::table::WaiterId;
use crate::{CommandError, Grant, LockKey, LockRef, Mode, Now, Wait};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

/// The name of a session. It stays invalid after the session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(Id);

/// Something a session is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// To which lock.
    pub lock: LockKey,
    /// To whose wait or hold.
    pub owner: Rc<[u8]>,
}

impl Event {
    fn is_grant(&self) -> bool {
        matches!(self.kind, EventKind::Granted(_))
    }

    /// Whether it tells this owner that it holds the lock in this mode.
    fn grants(&self, lock: LockRef<'_>, owner: &[u8], mode: Mode) -> bool {
        let EventKind::Granted(grant) = &self.kind else {
            return false;
        };
        *self.owner == *owner && grant.mode == mode && grant.is_of(&self.lock, lock)
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A queued waiter holds the lock.
    Granted(Grant),
    /// A queued waiter left the line without it.
    Timeout {
        /// As in [`crate::Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// A hold has ended that its owner did not give back.
    Lost(LostReason),
    /// A queued waiter left the line because there is nothing to wait for.
    Error(CommandError),
}

/// Why a hold has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostReason {
    /// Its lease was over.
    Expired,
    /// BREAK ended it.
    Broken,
    /// The key is gone, or somebody else's.
    Deleted,
}

/// A client that waits for events: the driver's handle for it.
pub type Listener = usize;

#[derive(Debug)]
struct Session {
    name: Rc<[u8]>,
    /// The server's number of the client whose connection this session lives by; none while it is
    /// gone and the grace runs.
    client_id: Option<u64>,
    grace_ms: i64,
    /// When the grace ends, monotonic, in milliseconds.
    grace_end: Option<i64>,
    /// Who waits for events, and until when.
    listener: Option<(Listener, Option<i64>)>,
    events: VecDeque<Unfetched>,
    waiters: BTreeSet<WaiterId>,
    holds: BTreeSet<HoldId>,
}

/// An event that was not fetched yet.
#[derive(Debug)]
struct Unfetched {
    event: Event,
    /// The owner has heard of its grant by another way.
    confirmed: bool,
}

/// All sessions.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    arena: Arena<Session>,
    names: HashMap<Rc<[u8]>, SessionId>,
    clients: BTreeSet<(u64, SessionId)>,
    listen_ends: BTreeSet<(i64, SessionId)>,
    grace_ends: BTreeSet<(i64, SessionId)>,
    /// The owners that have yet to fetch a grant, and in which sessions.
    unfetched_grants: HashMap<Rc<[u8]>, Vec<SessionId>>,
}

/// What belonged to a session that lost its connection or ended.
#[derive(Debug, Default)]
pub(crate) struct Belongings {
    pub(crate) waiters: BTreeSet<WaiterId>,
    /// Holds to be released.
    pub(crate) holds: BTreeSet<HoldId>,
    /// Grants that were not fetched.
    pub(crate) unfetched: Vec<Event>,
}

impl Sessions {
    pub(crate) fn len(&self) -> usize {
        self.arena.len()
    }

    /// The session of this name, if somebody listens to it.
    pub(crate) fn listened(&self, name: &[u8]) -> Option<SessionId> {
        let id = *self.names.get(name)?;
        self.arena.get(id.0)?.client_id.map(|_| id)
    }

    /// The server's number of the client that a session lives by.
    pub(crate) fn client_of(&self, id: SessionId) -> Option<u64> {
        self.arena.get(id.0)?.client_id
    }

    // --- The life-line ---------------------------------------------------------------------------

    /// Makes a client's connection the life-line of the session, which comes into being with it.
    /// Returns the client that waited there before, for it has lost its place. None only when four
    /// billion sessions are there already.
    pub(crate) fn attach(
        &mut self,
        name: &[u8],
        client_id: u64,
        grace_ms: i64,
    ) -> Option<(SessionId, Option<Listener>)> {
        let id = match self.names.get(name) {
            Some(id) => *id,
            None => self.open(name)?,
        };
        let replaced = self.stop_listening(id);
        let session = self.arena.get_mut(id.0)?;
        session.grace_ms = grace_ms;
        if let Some(end) = session.grace_end.take() {
            self.grace_ends.remove(&(end, id));
        }
        if let Some(former) = session.client_id.replace(client_id) {
            self.clients.remove(&(former, id));
        }
        self.clients.insert((client_id, id));
        Some((id, replaced))
    }

    fn open(&mut self, name: &[u8]) -> Option<SessionId> {
        let name: Rc<[u8]> = Rc::from(name);
        let id = SessionId(self.arena.insert(Session {
            name: Rc::clone(&name),
            client_id: None,
            grace_ms: 0,
            grace_end: None,
            listener: None,
            events: VecDeque::new(),
            waiters: BTreeSet::new(),
            holds: BTreeSet::new(),
        })?);
        self.names.insert(name, id);
        Some(id)
    }

    /// A session that lives by this client's connection.
    pub(crate) fn of_client(&self, client_id: u64) -> Option<SessionId> {
        let first = SessionId(Id::FIRST);
        let (client, id) = self.clients.range((client_id, first)..).next()?;
        (*client == client_id).then_some(*id)
    }

    /// The connection is gone: the waiters and the unfetched grants have to go at once, the holds
    /// when the grace is over.
    pub(crate) fn detach(&mut self, id: SessionId, now: Now) -> Belongings {
        self.stop_listening(id);
        let Some(session) = self.arena.get_mut(id.0) else {
            return Belongings::default();
        };
        if let Some(client_id) = session.client_id.take() {
            self.clients.remove(&(client_id, id));
        }
        let events = std::mem::take(&mut session.events);
        let (unfetched_grants, kept): (VecDeque<_>, VecDeque<_>) = events
            .into_iter()
            .partition(|unfetched| unfetched.event.is_grant() && !unfetched.confirmed);
        session.events = kept;
        let unfetched: Vec<Event> = unfetched_grants
            .into_iter()
            .map(|unfetched| unfetched.event)
            .collect();
        let waiters = std::mem::take(&mut session.waiters);
        let holds = if session.grace_ms > 0 {
            let end = now.mono_ms.saturating_add(session.grace_ms);
            session.grace_end = Some(end);
            self.grace_ends.insert((end, id));
            BTreeSet::new()
        } else {
            self.end(id)
        };
        for event in &unfetched {
            self.mark_delivered(id, event);
        }
        Belongings {
            waiters,
            holds,
            unfetched,
        }
    }

    /// The session is over. Returns its holds.
    pub(crate) fn end(&mut self, id: SessionId) -> BTreeSet<HoldId> {
        self.fetch(id);
        let Some(session) = self.arena.remove(id.0) else {
            return BTreeSet::new();
        };
        if let Some(end) = session.grace_end {
            self.grace_ends.remove(&(end, id));
        }
        self.names.remove(&session.name);
        session.holds
    }

    /// A session whose grace is over.
    pub(crate) fn grace_over(&self, now: Now) -> Option<SessionId> {
        let (end, id) = self.grace_ends.first()?;
        (*end <= now.mono_ms).then_some(*id)
    }

    // --- Events ----------------------------------------------------------------------------------

    /// Keeps an event until it is fetched. Returns who waits for one.
    pub(crate) fn tell(&mut self, id: SessionId, event: Event) -> Option<Listener> {
        let session = self.arena.get_mut(id.0)?;
        if event.is_grant() {
            self.unfetched_grants
                .entry(Rc::clone(&event.owner))
                .or_default()
                .push(id);
        }
        session.events.push_back(Unfetched {
            event,
            confirmed: false,
        });
        self.stop_listening(id)
    }

    /// What has happened since the last time, oldest first.
    pub(crate) fn fetch(&mut self, id: SessionId) -> Vec<Event> {
        let events = self
            .arena
            .get_mut(id.0)
            .map(|session| std::mem::take(&mut session.events));
        let events = events
            .into_iter()
            .flatten()
            .map(|unfetched| unfetched.event);
        let events: Vec<Event> = events.collect();
        for event in &events {
            self.mark_delivered(id, event);
        }
        events
    }

    /// The owner was just told that it holds the lock, as an answer to ONCE or RENEW. If the event
    /// is still to be fetched, in whichever session it waited, the end of that session's connection
    /// must not take the lock away again.
    pub(crate) fn confirm(&mut self, lock: LockRef<'_>, owner: &[u8], mode: Mode) {
        for id in self.unfetched_grants.get(owner).into_iter().flatten() {
            let Some(session) = self.arena.get_mut(id.0) else {
                continue;
            };
            for Unfetched { event, confirmed } in &mut session.events {
                *confirmed |= event.grants(lock, owner, mode);
            }
        }
    }

    /// An event has left the session.
    fn mark_delivered(&mut self, id: SessionId, event: &Event) {
        if !event.is_grant() {
            return;
        }
        if let Some(sessions) = self.unfetched_grants.get_mut(&event.owner) {
            if let Some(at) = sessions.iter().position(|session| *session == id) {
                sessions.swap_remove(at);
            }
            if sessions.is_empty() {
                self.unfetched_grants.remove(&event.owner);
            }
        }
        if self.unfetched_grants.is_empty() {
            self.unfetched_grants.shrink_to(ROOM_KEPT);
        }
    }

    /// A client waits for the next event.
    pub(crate) fn listen(&mut self, id: SessionId, listener: Listener, wait: Wait, now: Now) {
        let Some(session) = self.arena.get_mut(id.0) else {
            return;
        };
        let until = wait.end(now);
        session.listener = Some((listener, until));
        self.listen_ends.extend(until.map(|until| (until, id)));
    }

    /// Nobody waits for events any more. Returns who did.
    pub(crate) fn stop_listening(&mut self, id: SessionId) -> Option<Listener> {
        let (listener, until) = self.arena.get_mut(id.0)?.listener.take()?;
        if let Some(until) = until {
            self.listen_ends.remove(&(until, id));
        }
        Some(listener)
    }

    /// The same, if this is who waits.
    pub(crate) fn stop_listening_as(&mut self, id: SessionId, listener: Listener) {
        let present = self.arena.get(id.0).and_then(|session| session.listener);
        if present.is_some_and(|(present, _)| present == listener) {
            self.stop_listening(id);
        }
    }

    /// A session whose listener has waited for as long as it wanted.
    pub(crate) fn listened_enough(&self, now: Now) -> Option<SessionId> {
        let (until, id) = self.listen_ends.first()?;
        (*until <= now.mono_ms).then_some(*id)
    }

    /// When the nearest wait for events or grace ends, monotonic, in milliseconds.
    pub(crate) fn next_deadline(&self) -> Option<i64> {
        let listen = self.listen_ends.first().map(|(until, _)| *until);
        let grace = self.grace_ends.first().map(|(end, _)| *end);
        listen.into_iter().chain(grace).min()
    }

    // --- What belongs to a session ---------------------------------------------------------------

    pub(crate) fn add_waiter(&mut self, id: SessionId, waiter: WaiterId) {
        if let Some(session) = self.arena.get_mut(id.0) {
            session.waiters.insert(waiter);
        }
    }

    pub(crate) fn remove_waiter(&mut self, id: SessionId, waiter: WaiterId) {
        if let Some(session) = self.arena.get_mut(id.0) {
            session.waiters.remove(&waiter);
        }
    }

    pub(crate) fn add_hold(&mut self, id: SessionId, hold: HoldId) {
        if let Some(session) = self.arena.get_mut(id.0) {
            session.holds.insert(hold);
        }
    }

    pub(crate) fn remove_hold(&mut self, id: SessionId, hold: HoldId) {
        if let Some(session) = self.arena.get_mut(id.0) {
            session.holds.remove(&hold);
        }
    }
}
