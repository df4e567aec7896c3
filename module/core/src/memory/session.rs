//! Sessions: one for each client process, with the events that it has not fetched yet.
//!
//! A session lives as long as its session connection, which is the one that last called EVENTS for
//! it, and after that until the grace of its holds is over. Waiters and holds belong to it. The
//! events about them are kept until they are fetched, in order.

use crate::interface::effect::Grant;
use crate::interface::error::CommandError;
use crate::values::arena::{Arena, Id};
use crate::values::few::Few;
use crate::values::ids::{HoldId, Listener, SessionId, SessionRef, WaiterId};
use crate::values::limits::ROOM_KEPT;
use crate::values::lock_key::{LockKey, LockRef};
use crate::values::mode::Mode;
use crate::values::must_exist::MustExist;
use crate::values::time::{Now, Wait, earlier};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// An event that a session fetches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The kind of event.
    pub kind: EventKind,
    /// The lock.
    pub lock: LockKey,
    /// The owner of the wait or of the hold.
    pub owner: Rc<[u8]>,
}

impl Event {
    /// The grant and the locks that it gives; none for another kind of event.
    fn grant(&self) -> Option<(Mode, impl Iterator<Item = &LockKey>)> {
        let EventKind::Granted(grant) = &self.kind else {
            return None;
        };
        let several = grant.several.as_deref();
        let one = several.is_none().then_some(&self.lock);
        let several = several.unwrap_or_default().iter().map(|(lock, _)| lock);
        Some((grant.mode, several.chain(one)))
    }
}

/// The kind of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A queued waiter holds the lock.
    Granted(Grant),
    /// A queued waiter left the queue without it.
    Timeout {
        /// As in [`crate::Stored::ttl_ms`].
        ttl_ms: i64,
    },
    /// A hold has ended, and its owner did not give it back.
    Lost(LostReason),
    /// A queued waiter left the queue because its wait was refused.
    Error(CommandError),
    /// Another owner wants the lock of a hold: it waits, or was refused because of the hold.
    Wanted {
        /// How many waiters there are.
        waiters: u32,
    },
}

/// The reason for which a hold was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostReason {
    /// Its lease was over.
    Expired,
    /// BREAK ended it.
    Broken,
    /// The key was deleted, or is another client's.
    Deleted,
}

/// The limits of sessions: two that an operator sets, and the server's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// The largest number of sessions.
    pub sessions: u32,
    /// The largest number of events that a session may leave unfetched.
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
}

#[derive(Debug)]
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
    /// The client that waits for events, and until when.
    listener: Option<(Listener, Option<i64>)>,
    /// Whether a listener was woken and has not fetched yet. Until it fetches, the limit of
    /// unfetched events does not apply: one turn of the server's event loop can bring any number.
    is_woken: bool,
    /// Events are only appended, or all taken at once, so an event keeps its index.
    events: Vec<Unfetched>,
    waiters: BTreeSet<WaiterId>,
    holds: BTreeSet<HoldId>,
}

impl Session {
    /// Whether it has left too many events unfetched. A session whose connection is closed does not
    /// count: it gets few more events, and ends with its grace.
    fn overflows(&self, events_max: Option<u32>) -> bool {
        let max = events_max.and_then(|max| usize::try_from(max).ok());
        let has_more = max.is_some_and(|max| self.events.len() > max);
        has_more && !self.is_woken && self.client_id.is_some()
    }
}

/// An event that was not fetched yet.
#[derive(Debug)]
struct Unfetched {
    event: Event,
    /// The owner has learned of its grant in another way.
    confirmed: bool,
}

/// At most this many ended sessions are remembered. Only a client that ends sessions on purpose can
/// make more; it is not told of the others.
const UNTOLD_ENDS_MAX: usize = 100_000;

/// At least this many grants are noted before they are indexed.
const NOTED_MAX: usize = 1000;

/// All sessions.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    arena: Arena<Session>,
    names: HashMap<Rc<[u8]>, SessionId>,
    clients: BTreeSet<(u64, SessionId)>,
    listen_ends: BTreeSet<(i64, SessionId)>,
    grace_ends: BTreeSet<(i64, SessionId)>,
    unfetched_grants: UnfetchedGrants,
    /// How many unfetched events all sessions have.
    unfetched: usize,
    /// As in [`SessionLimits`], from the last EVENTS; none before the first.
    events_max: Option<u32>,
    /// Sessions that were found with more unfetched events than `events_max`.
    overflowing: BTreeSet<SessionId>,
    /// Sessions that were ended although their connections live, until their clients are told: by
    /// the client id and the session's name.
    untold_ends: BTreeSet<(u64, Rc<[u8]>)>,
}

/// The index of the unfetched grants: by database, owner, lock and mode. With it a confirmation
/// finds its grants without walking all unfetched events.
///
/// Most grants are fetched at once, and few are confirmed. So they are only noted at first, and
/// indexed when a confirmation needs the index.
#[derive(Debug, Default)]
struct UnfetchedGrants {
    places: BTreeMap<i32, HashMap<Rc<[u8]>, OfOwner>>,
    noted: Vec<(SessionId, usize)>,
}

/// The unfetched grants of one owner, by lock. Mostly there is only one of each lock.
type OfOwner = HashMap<Rc<[u8]>, Few<Place, ()>>;

/// An unfetched grant: its mode, its session, and the index of its event there.
type Place = (Mode, SessionId, usize);

impl UnfetchedGrants {
    fn add(&mut self, event: &Event, session: SessionId, at: usize) {
        let Some((mode, locks)) = event.grant() else {
            return;
        };
        let place = (mode, session, at);
        for lock in locks {
            let owners = self.places.entry(lock.db).or_default();
            let of_owner = owners.entry(Rc::clone(&event.owner)).or_default();
            let places = of_owner.entry(Rc::clone(&lock.name)).or_default();
            places.insert(place, ());
        }
    }

    fn remove(&mut self, event: &Event, session: SessionId, at: usize) {
        let Some((mode, locks)) = event.grant() else {
            return;
        };
        if self.places.is_empty() {
            return;
        }
        for lock in locks {
            self.remove_one(lock.as_ref(), &event.owner, (mode, session, at));
        }
    }

    fn remove_one(&mut self, lock: LockRef<'_>, owner: &[u8], place: Place) {
        let Some(owners) = self.places.get_mut(&lock.db) else {
            return;
        };
        let Some(of_owner) = owners.get_mut(owner) else {
            return;
        };
        if let Some(places) = of_owner.get_mut(lock.name) {
            places.remove(&place);
            if places.is_empty() {
                of_owner.remove(lock.name);
            }
        }
        if of_owner.is_empty() {
            owners.remove(owner);
        }
        if owners.is_empty() {
            self.places.remove(&lock.db);
        }
    }

    fn find(&self, lock: LockRef<'_>, owner: &[u8], mode: Mode) -> Vec<Place> {
        let of_owner = self
            .places
            .get(&lock.db)
            .and_then(|owners| owners.get(owner));
        let places = of_owner.and_then(|of_owner| of_owner.get(lock.name));
        let places = places.into_iter().flat_map(Few::iter);
        let places = places.map(|(place, ())| *place);
        places.filter(|(of, ..)| *of == mode).collect()
    }
}

/// The waiters, holds and unfetched grants of a session that lost its connection or ended.
#[derive(Debug, Default)]
pub(crate) struct Belongings {
    pub(crate) waiters: BTreeSet<WaiterId>,
    /// Holds that must be released.
    pub(crate) holds: BTreeSet<HoldId>,
    /// Grants that were not fetched.
    pub(crate) unfetched: Vec<Event>,
}

impl Sessions {
    pub(crate) fn len(&self) -> usize {
        self.arena.len()
    }

    pub(crate) fn unfetched(&self) -> usize {
        self.unfetched
    }

    /// The session that this user names, if it has a connection.
    pub(crate) fn listened(&self, session: SessionRef<'_>) -> Result<SessionId, CommandError> {
        let id = self.find(session)?.ok_or(CommandError::NoSession)?;
        self.client_of(id)
            .map(|_| id)
            .ok_or(CommandError::NoSession)
    }

    /// The session with this name, or none. A session of another user is refused: otherwise any
    /// user could receive its grants and end its holds by knowing its name.
    fn find(&self, session: SessionRef<'_>) -> Result<Option<SessionId>, CommandError> {
        let Some(id) = self.names.get(session.name) else {
            return Ok(None);
        };
        let begun_by = self.arena.get(id.0).map(|session| &*session.user);
        if begun_by == Some(session.user) {
            Ok(Some(*id))
        } else {
            Err(CommandError::SessionOfAnother)
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
        })
    }

    // --- The session connection ------------------------------------------------------------------

    /// Makes a client's connection the session connection, and begins the session if it does not
    /// exist. Returns the client that waited for events before: it must be told that it does so no
    /// longer.
    pub(crate) fn attach(
        &mut self,
        session: SessionRef<'_>,
        client_id: u64,
        grace_ms: i64,
        limits: SessionLimits,
        now: Now,
    ) -> Result<(SessionId, Option<Listener>), CommandError> {
        self.events_max = Some(limits.events_per_session);
        if self
            .untold_ends
            .remove(&(client_id, Rc::from(session.name)))
        {
            return Err(CommandError::NoSession);
        }
        let full = CommandError::TooManySessions(limits.sessions);
        let id = match self.find(session)? {
            Some(id) => id,
            None if limits.out_of_memory => return Err(CommandError::OutOfMemory),
            None if !self.has_room(limits.sessions) => return Err(full),
            None => self.open(session, now).ok_or_else(|| full.clone())?,
        };
        let replaced = self.stop_listening(id);
        let session = self.arena.get_mut(id.0).ok_or(full)?;
        session.grace_ms = grace_ms;
        if let Some(end) = session.grace_end.take() {
            self.grace_ends.remove(&(end, id));
        }
        if let Some(former) = session.client_id.replace(client_id) {
            self.clients.remove(&(former, id));
        }
        self.clients.insert((client_id, id));
        Ok((id, replaced))
    }

    fn has_room(&self, sessions_max: u32) -> bool {
        usize::try_from(sessions_max).is_ok_and(|max| self.len() < max)
    }

    /// None only if there are four billion sessions already.
    fn open(&mut self, session: SessionRef<'_>, now: Now) -> Option<SessionId> {
        let name: Rc<[u8]> = Rc::from(session.name);
        let id = SessionId(self.arena.insert(Session {
            name: Rc::clone(&name),
            user: Rc::from(session.user),
            client_id: None,
            since: now.mono_ms,
            grace_ms: 0,
            grace_end: None,
            listener: None,
            is_woken: false,
            events: Vec::new(),
            waiters: BTreeSet::new(),
            holds: BTreeSet::new(),
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

    /// The session connection closed: the waiters and the unfetched grants end at once, the holds
    /// when the grace is over.
    pub(crate) fn detach(&mut self, id: SessionId, now: Now) -> Belongings {
        self.stop_listening(id);
        let Some(session) = self.arena.get_mut(id.0).must_exist() else {
            return Belongings::default();
        };
        if let Some(client_id) = session.client_id.take() {
            self.clients.remove(&(client_id, id));
        }
        session.is_woken = false;
        let mut unfetched = Vec::new();
        for (at, kept) in std::mem::take(&mut session.events).into_iter().enumerate() {
            // The events that stay get other indexes. The grants among them are confirmed already,
            // so they need no place in the index of unfetched grants.
            self.unfetched_grants.remove(&kept.event, id, at);
            match kept.event.kind {
                EventKind::Granted(_) if !kept.confirmed => unfetched.push(kept.event),
                _ => session.events.push(kept),
            }
        }
        self.unfetched = self.unfetched.saturating_sub(unfetched.len());
        let waiters = std::mem::take(&mut session.waiters);
        // The grace is for the holds. A session without holds would only take up one of the
        // `rlock.max-sessions`.
        let holds = if session.grace_ms > 0 && !session.holds.is_empty() {
            let end = now.mono_ms.saturating_add(session.grace_ms);
            session.grace_end = Some(end);
            self.grace_ends.insert((end, id));
            BTreeSet::new()
        } else {
            self.end(id)
        };
        Belongings {
            waiters,
            holds,
            unfetched,
        }
    }

    /// Ends the session. Returns its holds.
    pub(crate) fn end(&mut self, id: SessionId) -> BTreeSet<HoldId> {
        self.fetch(id);
        self.overflowing.remove(&id);
        let Some(session) = self.arena.remove(id.0).must_exist() else {
            return BTreeSet::new();
        };
        if let Some(end) = session.grace_end {
            self.grace_ends.remove(&(end, id));
        }
        self.names.remove(&session.name);
        if self.names.is_empty() {
            self.names.shrink_to(ROOM_KEPT);
        }
        session.holds
    }

    /// How many events, waits and holds end with a session, plus one for the session itself.
    pub(crate) fn size_of(&self, id: SessionId) -> usize {
        let session = self.arena.get(id.0);
        let belongings = session.map_or(0, |session| {
            let events = session.events.len();
            let waits = session.waiters.len();
            session
                .holds
                .len()
                .saturating_add(waits)
                .saturating_add(events)
        });
        belongings.saturating_add(1)
    }

    /// A session whose grace is over.
    pub(crate) fn grace_over(&self, now: Now) -> Option<SessionId> {
        let (end, id) = self.grace_ends.first()?;
        (*end <= now.mono_ms).then_some(*id)
    }

    // --- Events ----------------------------------------------------------------------------------

    /// Keeps an event until it is fetched. Returns the client that waits for one.
    pub(crate) fn tell(&mut self, id: SessionId, event: Event) -> Option<Listener> {
        let session = self.arena.get_mut(id.0)?;
        if matches!(event.kind, EventKind::Granted(_)) {
            self.unfetched_grants.noted.push((id, session.events.len()));
        }
        session.events.push(Unfetched {
            event,
            confirmed: false,
        });
        self.unfetched = self.unfetched.saturating_add(1);
        if self.unfetched_grants.noted.len() > self.unfetched.saturating_mul(2).max(NOTED_MAX) {
            self.place_grants();
        }
        let woken = self.stop_listening(id);
        let session = self.arena.get(id.0)?;
        if session.overflows(self.events_max) {
            self.overflowing.insert(id);
        }
        woken
    }

    /// Refuses the next EVENTS for this session on its connection, which lives on although the
    /// session ended. Otherwise the client would take the events of the next session for a complete
    /// list.
    pub(crate) fn tell_of_end(&mut self, id: SessionId) {
        let session = self.arena.get(id.0);
        let end = session.and_then(|session| Some((session.client_id?, Rc::clone(&session.name))));
        if self.untold_ends.len() < UNTOLD_ENDS_MAX {
            self.untold_ends.extend(end);
        }
    }

    /// The client disconnected: it cannot be told any more.
    pub(crate) fn forget_ends_of(&mut self, client_id: u64) {
        let first = (client_id, Rc::from([]));
        while let Some(end) = self.untold_ends.range(first.clone()..).next().cloned() {
            if end.0 != client_id {
                return;
            }
            self.untold_ends.remove(&end);
        }
    }

    /// A session that was found with too many unfetched events, and has not fetched them since.
    pub(crate) fn next_overflowing(&mut self) -> Option<SessionId> {
        while let Some(id) = self.overflowing.pop_first() {
            let session = self.arena.get(id.0);
            if session.is_some_and(|session| session.overflows(self.events_max)) {
                return Some(id);
            }
        }
        None
    }

    /// Takes all unfetched events, the oldest first.
    pub(crate) fn fetch(&mut self, id: SessionId) -> Vec<Event> {
        let Some(session) = self.arena.get_mut(id.0) else {
            return Vec::new();
        };
        session.is_woken = false;
        let events = std::mem::take(&mut session.events);
        self.unfetched = self.unfetched.saturating_sub(events.len());
        if self.unfetched == 0 {
            self.unfetched_grants.noted.clear();
        }
        let events = events.into_iter().enumerate().map(|(at, unfetched)| {
            self.unfetched_grants.remove(&unfetched.event, id, at);
            unfetched.event
        });
        events.collect()
    }

    /// The owner was just told by a reply to ONCE or RENEW that it holds the lock. If the grant's
    /// event is still unfetched, in any session, the end of that session's connection must not take
    /// the lock away again.
    pub(crate) fn confirm(
        &mut self,
        lock: LockRef<'_>,
        owner: &[u8],
        mode: Mode,
        knows_count: bool,
    ) {
        if self.unfetched == 0 {
            return;
        }
        self.place_grants();
        for (mode, id, at) in self.unfetched_grants.find(lock, owner, mode) {
            let session = self.arena.get_mut(id.0);
            let unfetched = session.and_then(|session| session.events.get_mut(at));
            let Some(Unfetched { event, confirmed }) = unfetched else {
                continue;
            };
            let EventKind::Granted(grant) = &mut event.kind else {
                continue;
            };
            if let Some(is_all) = grant.confirm(&event.lock, lock, knows_count) {
                *confirmed |= is_all;
                // A confirmed grant leaves the index, so confirming again costs no more.
                self.unfetched_grants
                    .remove_one(lock, owner, (mode, id, at));
            }
        }
    }

    /// Indexes the grants that were noted. If one was fetched since, another event may have its
    /// index in the session by now. Then that event is indexed instead, which does no harm.
    fn place_grants(&mut self) {
        for (id, at) in std::mem::take(&mut self.unfetched_grants.noted) {
            let session = self.arena.get(id.0);
            if let Some(unfetched) = session.and_then(|session| session.events.get(at)) {
                self.unfetched_grants.add(&unfetched.event, id, at);
            }
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

    /// Ends the wait for events. Returns the client that waited.
    pub(crate) fn stop_listening(&mut self, id: SessionId) -> Option<Listener> {
        let session = self.arena.get_mut(id.0)?;
        let (listener, until) = session.listener.take()?;
        session.is_woken = true;
        if let Some(until) = until {
            self.listen_ends.remove(&(until, id));
        }
        Some(listener)
    }

    /// The same, if this client is the one that waits.
    pub(crate) fn stop_listening_as(&mut self, id: SessionId, listener: Listener) {
        let present = self.arena.get(id.0).and_then(|session| session.listener);
        if present.is_some_and(|(present, _)| present == listener) {
            self.stop_listening(id);
            // It was not woken to fetch, so the limit of unfetched events applies again.
            if let Some(session) = self.arena.get_mut(id.0) {
                session.is_woken = false;
            }
        }
    }

    /// A listener was woken, but its client disconnected before it fetched: the limit of unfetched
    /// events applies again.
    pub(crate) fn woken_no_more(&mut self, id: SessionId) {
        let Some(session) = self.arena.get_mut(id.0) else {
            return;
        };
        session.is_woken = false;
        if session.overflows(self.events_max) {
            self.overflowing.insert(id);
        }
    }

    /// A session whose listener has waited for as long as it wanted.
    pub(crate) fn listened_enough(&self, now: Now) -> Option<SessionId> {
        let (until, id) = self.listen_ends.first()?;
        (*until <= now.mono_ms).then_some(*id)
    }

    /// Whether a session was found that has left too many events unfetched.
    pub(crate) fn any_overflowing(&self) -> bool {
        !self.overflowing.is_empty()
    }

    /// When the nearest wait for events or grace ends, monotonic, in milliseconds.
    pub(crate) fn next_deadline(&self) -> Option<i64> {
        let listen = self.listen_ends.first().map(|(until, _)| *until);
        let grace = self.grace_ends.first().map(|(end, _)| *end);
        earlier(listen, grace)
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
#[allow(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "only tests run it"
)]
impl Sessions {
    /// Asserts that each session is on the lists that its fields name, and on no others.
    pub(crate) fn check(&self) {
        let (mut counts, mut unfetched) = ([0; 3], 0);
        for (id, session) in self.arena.iter() {
            let id = SessionId(id);
            let until = session.listener.and_then(|(_, until)| until);
            let (client, grace) = (session.client_id, session.grace_end);
            for (count, is_some) in
                counts
                    .iter_mut()
                    .zip([client.is_some(), grace.is_some(), until.is_some()])
            {
                *count += usize::from(is_some);
            }
            assert_eq!(self.names.get(&session.name), Some(&id));
            assert!(
                client.is_none_or(|of| self.clients.contains(&(of, id))),
                "{session:?}"
            );
            assert!(
                grace.is_none_or(|end| self.grace_ends.contains(&(end, id))),
                "{session:?}"
            );
            assert!(
                until.is_none_or(|end| self.listen_ends.contains(&(end, id))),
                "{session:?}"
            );
            // It has a connection, or its grace runs because it has holds.
            assert_eq!(client.is_some(), grace.is_none(), "{session:?}");
            assert!(client.is_some() || !session.holds.is_empty(), "{session:?}");
            assert!(
                client.is_some() || session.listener.is_none(),
                "{session:?}"
            );
            unfetched += session.events.len();
        }
        let noted = [&self.grace_ends, &self.listen_ends].map(BTreeSet::len);
        assert_eq!(counts, [self.clients.len(), noted[0], noted[1]]);
        assert_eq!((self.names.len(), self.unfetched), (self.len(), unfetched));
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
