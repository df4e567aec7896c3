//! Driving the core as the module does (`module/src/driving/turn.rs`, `pump.rs`,
//! `writing/effects.rs`): read the state that it asks for, let it decide, carry out the effects,
//! and look again when something is due.

use std::collections::BTreeMap;

use bytes::Bytes;
use rlock_core::request::{self, WaitMode};
use rlock_core::{
    Command, CommandError, Effect, Gauges, Joined, Keys, LockKey, LockRef, Locks, Mode, Now,
    Outcome, PermitsHolders, Purpose, Read, SessionId, SessionLimits, SessionRef, Stored, Subject,
    Task, Told, Turn, Wait, names,
};

use crate::chance::Chance;
use crate::keyspace::{Entry, Keyspace, Lock, ReaderCounts};
use crate::server::Membership;

/// A call of RLOCK.EVENTS that waits.
pub(crate) type Listener = usize;

/// One life of a server: its memory and its keys.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    locks: Locks,
    keys: Keyspace,
    listeners: BTreeMap<Listener, Listening>,
    /// Calls that are answered at the end of this turn of the event loop.
    woken: Vec<Woken>,
    latest_listener: Listener,
    /// In a cluster.
    membership: Option<Membership>,
    /// Whether the command that is carried out came behind `ASKING`.
    is_asking: bool,
    /// If the server is busy: turns end early, and are interrupted.
    strain: Option<Chance>,
    is_interrupted: bool,
    /// Connections that have closed, before the server notices it.
    closing: Vec<Closing>,
    /// The latest command that was run under a lock, until the server takes it.
    guarded: Option<Guarded>,
}

/// A connection that is gone, with the call that waited on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closing {
    pub(crate) client_id: u64,
    pub(crate) listener: Option<Listener>,
}

/// A command that was run under a lock, by `RLOCK.GUARD`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guarded {
    /// The lock.
    pub name: String,
    /// The owner that it was run for.
    pub owner: String,
    /// The arguments of the command.
    pub words: Vec<String>,
    /// All holders of the lock at that time, by the stored fields.
    pub holders: Vec<String>,
}

/// The connection that listens to a session.
#[derive(Clone, Copy, Debug)]
struct Listening {
    session: SessionId,
    client_id: u64,
}

#[derive(Clone, Copy, Debug)]
struct Woken {
    listener: Listener,
    /// Or the client that has taken the session over.
    listening: Result<Listening, u64>,
}

/// The result of RLOCK.EVENTS.
#[derive(Debug)]
pub(crate) enum Listened {
    Events(Told),
    /// It is answered later.
    Waits(Listener),
}

/// The result of an acquiring command.
#[derive(Debug)]
pub(crate) enum Acquired {
    Held { count: i64, token: i64 },
    NotHeld { ttl_ms: i64 },
    Queued(Joined),
}

const WAITERS_MAX: u32 = 10_000;

const LIMITS: SessionLimits = SessionLimits {
    sessions: 10_000,
    events_per_session: 10_000,
    out_of_memory: false,
};

/// The one user there is.
pub(crate) const USER: &[u8] = b"default";

/// A session, as the one user names it.
pub(crate) fn named_by_user(session: Option<SessionRef<'_>>) -> Option<SessionRef<'_>> {
    session.map(|session| SessionRef {
        user: USER,
        ..session
    })
}

/// Whether a hold in this mode is in several keys.
fn is_of_several_keys(mode: Mode) -> bool {
    matches!(mode, Mode::Read | Mode::Write)
}

impl Engine {
    /// The server starts, with the keys that it has loaded.
    pub(crate) fn start(keys: Keyspace, now: Now, grant_delay_ms: i64) -> Self {
        let mut engine = Self {
            keys,
            ..Self::default()
        };
        engine.locks.start_tokens(now, FENCE_GUARD_MS);
        engine.locks.start_grant_delay(now, grant_delay_ms);
        engine
    }

    /// A server that is down: its keys are not served.
    pub(crate) fn dead(keys: Keyspace) -> Self {
        Self {
            keys,
            ..Self::default()
        }
    }

    /// The keys, which outlive the server.
    pub(crate) fn into_keys(self) -> Keyspace {
        self.keys
    }

    pub(crate) fn keys(&self) -> &Keyspace {
        &self.keys
    }

    pub(crate) fn gauges(&self) -> Gauges {
        self.locks.gauges()
    }

    /// The holders of this lock.
    pub(crate) fn holders(&mut self, db: i32, name: &[u8], now: Now) -> Vec<Box<[u8]>> {
        self.keys.open(db, name, now).holders()
    }

    /// How many wait for this lock.
    pub(crate) fn waiting(&self, db: i32, name: &[u8], now: Now) -> usize {
        self.locks.queue(LockRef { db, name }, now).len()
    }

    /// A command is run under this lock, for this owner.
    pub(crate) fn runs_guarded(
        &mut self,
        request: &request::Guard<'_>,
        words: &[Bytes],
        db: i32,
        now: Now,
    ) {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let holders = self.holders(db, request.key, now);
        self.guarded = Some(Guarded {
            name: text(request.key),
            owner: text(request.owner),
            words: words.iter().map(|word| text(word)).collect(),
            holders: holders.iter().map(|holder| text(holder)).collect(),
        });
    }

    /// The latest command that was run under a lock, if there was one since the last call.
    pub(crate) fn take_guarded(&mut self) -> Option<Guarded> {
        self.guarded.take()
    }

    /// How often this owner has this lock.
    pub(crate) fn count(&mut self, db: i32, name: &[u8], owner: &[u8], now: Now) -> u64 {
        self.keys.open(db, name, now).count(owner)
    }

    /// Milliseconds until the lease of this lock ends.
    pub(crate) fn lease_left_ms(&mut self, db: i32, name: &[u8], now: Now) -> Option<i64> {
        let ends_at = self.keys.open(db, name, now).ends_at();
        ends_at.map(|end| end.saturating_sub(now.wall_ms()).max(0))
    }

    // --- Commands --------------------------------------------------------------------------------

    /// ACQUIRE or MACQUIRE.
    pub(crate) fn acquire(
        &mut self,
        command: Command<'_>,
        wait_mode: WaitMode,
        db: i32,
        now: Now,
    ) -> Result<Acquired, CommandError> {
        let mut turn = self.shortened(Turn::of(command, db, WAITERS_MAX));
        self.run(&mut turn, Some((command, db)), now);
        match turn.outcome()? {
            Outcome::Held { count, token } => Ok(Acquired::Held {
                count,
                token: token.get(),
            }),
            Outcome::NotHeld { ttl_ms } => Ok(Acquired::NotHeld { ttl_ms }),
            Outcome::MustWait { ttl_ms } => {
                let joined = match wait_mode {
                    WaitMode::Queue(_) => {
                        self.change(|locks, effects| locks.enqueue(&mut turn, None, now, effects))
                    }
                    WaitMode::None | WaitMode::Block(_) => None,
                };
                Ok(joined.map_or(Acquired::NotHeld { ttl_ms }, Acquired::Queued))
            }
            Outcome::Left(_) | Outcome::Number(_) | Outcome::Guards => Err(CommandError::Unsettled),
        }
    }

    /// Runs a command whose result is the time left or a number; GUARD has neither.
    pub(crate) fn decide(
        &mut self,
        command: Command<'_>,
        db: i32,
        now: Now,
    ) -> Result<Option<i64>, CommandError> {
        let mut turn = self.shortened(Turn::of(command, db, WAITERS_MAX));
        self.run(&mut turn, Some((command, db)), now);
        match turn.outcome()? {
            Outcome::Left(left) => Ok(left),
            Outcome::Number(number) => Ok(Some(number)),
            Outcome::Guards => Ok(None),
            Outcome::Held { .. } | Outcome::NotHeld { .. } | Outcome::MustWait { .. } => {
                Err(CommandError::Unsettled)
            }
        }
    }

    pub(crate) fn listen(
        &mut self,
        request: &request::Events<'_>,
        client_id: u64,
        now: Now,
    ) -> Result<Listened, CommandError> {
        let attached =
            self.change(|locks, effects| locks.attach(request, client_id, LIMITS, now, effects));
        let attached = attached?;
        let session = attached.session;
        if let Some(wait) = request.block.filter(|_| !attached.at_once) {
            return Ok(Listened::Waits(self.wait(session, client_id, wait, now)));
        }
        let told = self.locks.take_events(session, now);
        told.map(Listened::Events).ok_or(CommandError::NoSession)
    }

    /// BIND. The connection that was bound before is yet to be closed.
    pub(crate) fn bind(
        &mut self,
        request: &request::Bind<'_>,
        client_id: u64,
    ) -> Result<Option<u64>, CommandError> {
        self.locks.bind(request, client_id)
    }

    /// The present life of a session.
    pub(crate) fn life_of(&self, session: SessionRef<'_>) -> Result<i64, CommandError> {
        self.locks.life_of(session)
    }

    fn wait(&mut self, session: SessionId, client_id: u64, wait: Wait, now: Now) -> Listener {
        self.latest_listener = self.latest_listener.saturating_add(1);
        let listener = self.latest_listener;
        let listening = Listening { session, client_id };
        self.listeners.insert(listener, listening);
        self.locks.listen(session, listener, wait, now);
        listener
    }

    /// Answers the calls that were woken, as at the end of a turn of the event loop.
    pub(crate) fn answers(&mut self, now: Now) -> Vec<(Listener, Result<Told, CommandError>)> {
        let woken = std::mem::take(&mut self.woken);
        let answers = woken.into_iter().map(|woken| {
            // Another connection may have taken the session over in this turn.
            let listening = woken.listening.map_err(CommandError::TakenOver);
            let take = |of: Listening| self.locks.take_events_as(of.session, of.client_id, now);
            (woken.listener, listening.and_then(take))
        });
        answers.collect()
    }

    /// Whether any calls wait for their reply.
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.is_empty()
    }

    /// A connection is gone, with the call that waited on it.
    pub(crate) fn client_gone(&mut self, client_id: u64, listener: Option<Listener>, now: Now) {
        self.change(|locks, effects| {
            locks.client_gone(client_id, now, effects);
        });
        let Some(listener) = listener else { return };
        if let Some(listening) = self.listeners.remove(&listener) {
            self.locks.listen_no_more(listening.session, listener);
        }
        self.woken.retain(|woken| {
            let is_gone = woken.listener == listener;
            if let Some(listening) = woken.listening.ok().filter(|_| is_gone) {
                self.locks.woken_no_more(listening.session);
            }
            !is_gone
        });
    }

    // --- What happens without a command ----------------------------------------------------------

    /// Milliseconds until something is due.
    pub(crate) fn next_deadline(&self, now: Now) -> Option<i64> {
        self.locks.next_deadline(now)
    }

    /// The timer fires. A replica writes nothing: its primary does the work that is due.
    pub(crate) fn fire(&mut self, now: Now, is_replica: bool) {
        let mut turn = self.shortened(Turn::of_deadlines());
        self.run(&mut turn, None, now);
        self.change(|locks, effects| locks.passed(now, effects));
        if is_replica {
            self.locks.forget_what_is_due();
        } else {
            let mut turn = self.shortened(Turn::of_timer());
            self.run(&mut turn, None, now);
        }
    }

    /// Deletes expired keys, as a server does a few times a second. Returns whether there were any.
    pub(crate) fn expire(&mut self, now: Now) -> bool {
        self.keys.expire(now);
        self.tell_expired()
    }

    /// The server was made a primary.
    pub(crate) fn promoted(&mut self, now: Now) {
        self.locks.start_tokens(now, self.fence_guard_ms());
        self.locks.all_changed(None);
    }

    /// All servers here have one clock, and nodes start in one microsecond: without this two could
    /// grant the same lock with the same token.
    fn fence_guard_ms(&self) -> i64 {
        let membership = self.membership.as_ref();
        let node = membership.map_or(0, Membership::node);
        let node = i64::try_from(node).unwrap_or_default();
        FENCE_GUARD_MS.saturating_add(node.saturating_mul(NODES_APART_MS))
    }

    /// The server was made a replica.
    pub(crate) fn demoted(&mut self) {
        self.change(Locks::demoted);
    }

    /// A replica has the keys of its primary.
    pub(crate) fn copy(&mut self, keys: Keyspace) {
        self.keys = keys;
    }

    /// The server is a node of a cluster.
    pub(crate) fn join(&mut self, membership: Membership, now: Now) {
        self.membership = Some(membership);
        self.locks.start_tokens(now, self.fence_guard_ms());
    }

    /// Takes the keys of a slot out, which is another node's from now on.
    pub(crate) fn take_slot(&mut self, slot: u16) -> Keyspace {
        self.keys.take_slot(slot)
    }

    /// Takes the keys of a slot in, which is this node's from now on.
    pub(crate) fn put(&mut self, keys: Keyspace) {
        self.keys.put(keys);
    }

    /// Takes out a key that goes to another node. The waiters of that lock are told.
    pub(crate) fn take_key(&mut self, name: &[u8], now: Now) -> Option<Entry> {
        let taken = self.keys.take(name, now);
        self.tell_expired();
        if taken.is_some() {
            self.locks.changed(LockRef { db: 0, name });
        }
        taken
    }

    /// Puts a key in that was taken out at another node.
    pub(crate) fn put_key(&mut self, name: &[u8], entry: Entry, now: Now) {
        self.keys.put_one(name, entry, now);
        self.locks.changed(LockRef { db: 0, name });
    }

    /// Whether a key is there.
    pub(crate) fn has(&mut self, db: i32, name: &[u8], now: Now) -> bool {
        let has = self.keys.has(db, name, now);
        self.tell_expired();
        has
    }

    /// The command that comes next came behind `ASKING`, or not.
    pub(crate) fn set_asking(&mut self, is_asking: bool) {
        self.is_asking = is_asking;
    }

    /// In a cluster, refuses READ and WRITE where the keys of a read-write lock are not all here.
    pub(crate) fn check_slot(&self, name: &[u8], mode: Mode) -> Result<(), CommandError> {
        let of_several_keys = is_of_several_keys(mode);
        let Some(membership) = self.membership.as_ref().filter(|_| of_several_keys) else {
            return Ok(());
        };
        match names::side_keys_share_slot(name) {
            false if mode == Mode::Read => Err(CommandError::TimeoutsInOtherSlot),
            true if !membership.is_settled(name) => Err(CommandError::SlotOnItsWay),
            _ => Ok(()),
        }
    }

    /// In a cluster, refuses permits where the limit that is set for all cannot be read.
    pub(crate) fn check_limit_slot(
        &self,
        name: &[u8],
        names_its_own: bool,
    ) -> Result<(), CommandError> {
        let Some(membership) = self.membership.as_ref() else {
            return Ok(());
        };
        match names::side_keys_share_slot(name) {
            false if !names_its_own => Err(CommandError::LimitInOtherSlot),
            true if !membership.is_settled(name) => Err(CommandError::LimitOnItsWay),
            _ => Ok(()),
        }
    }

    /// As [`check_slot`](Self::check_slot) for BREAK, which may be about a lock of any kind.
    pub(crate) fn check_slot_of_any(
        &mut self,
        db: i32,
        name: &[u8],
        now: Now,
    ) -> Result<(), CommandError> {
        if self.keys.open(db, name, now).is_read_write() {
            return self.check_slot(name, Mode::Write);
        }
        Ok(())
    }

    /// A slot is another node's from now on, or this one's.
    pub(crate) fn slot_has_moved(&mut self) {
        self.locks.all_changed(None);
    }

    /// The wall clock was set.
    pub(crate) fn clock_was_set(&mut self) {
        self.locks.all_changed(None);
    }

    /// Another client deletes a key.
    pub(crate) fn delete(&mut self, db: i32, name: &[u8]) {
        if self.keys.delete(db, name) {
            self.locks.changed(LockRef { db, name });
        }
    }

    /// Another client deletes all keys.
    pub(crate) fn flush(&mut self) {
        self.keys.clear();
        self.locks.all_changed(None);
    }

    /// Whether there is anything to tell.
    fn tell_expired(&mut self) -> bool {
        let expired = self.keys.take_expired();
        for (db, name) in &expired {
            self.locks.changed(LockRef { db: *db, name });
        }
        !expired.is_empty()
    }

    // --- A busy server ---------------------------------------------------------------------------

    /// From now on turns end early and are interrupted, by chance.
    pub(crate) fn strain(&mut self, chance: Chance) {
        self.strain = Some(chance);
    }

    /// Whether something happens now that happens only to a busy server.
    fn is_strained(&self, one_in: u64) -> bool {
        let strain = self.strain.as_ref();
        strain.is_some_and(|chance| chance.below(one_in) == 0)
    }

    /// A turn may find that it has taken too long after any decision.
    fn shortened<'a>(&self, turn: Turn<'a>) -> Turn<'a> {
        match &self.strain {
            Some(chance) if self.is_strained(2) => {
                let decisions = chance.below(3).saturating_add(1);
                turn.with_budget(usize::try_from(decisions).unwrap_or(1))
            }
            _ => turn,
        }
    }

    /// A connection has closed. The server notices it a moment later, or in the middle of a turn.
    pub(crate) fn closes(&mut self, closing: Closing) {
        self.closing.push(closing);
    }

    /// The server notices it now, if it has not yet.
    pub(crate) fn is_closed(&mut self, closing: Closing, now: Now) {
        let place = self.closing.iter().position(|other| *other == closing);
        if let Some(place) = place {
            self.closing.remove(place);
            self.client_gone(closing.client_id, closing.listener, now);
        }
    }

    /// Between reading and deciding: another module may be told of the key that is opened, and
    /// whatever it does may be done then.
    fn interrupt(&mut self, now: Now) {
        if self.is_interrupted || !self.is_strained(2) {
            return;
        }
        self.is_interrupted = true;
        let is_asking = std::mem::take(&mut self.is_asking);
        while let Some(closing) = self.closing.first().copied() {
            self.is_closed(closing, now);
        }
        if self.is_strained(2) {
            self.fire(now, false);
        }
        self.is_interrupted = false;
        self.is_asking = is_asking;
    }

    // --- The loop --------------------------------------------------------------------------------

    /// A change that writes nothing.
    fn change<R>(&mut self, change: impl FnOnce(&mut Locks, &mut Vec<Effect>) -> R) -> R {
        let mut effects = Vec::new();
        let result = change(&mut self.locks, &mut effects);
        self.carry_out(&[], &[], effects);
        result
    }

    fn run(&mut self, turn: &mut Turn<'_>, command: Option<(Command<'_>, i32)>, now: Now) {
        while let Some(task) = self.locks.next_task(turn, now) {
            let is_break = matches!(command, Some((Command::Break(_), _)));
            let (locks, owner) = subject(&task, command);
            let mut effects = Vec::new();
            if let Some(read) = self.not_here(&task, &locks, now) {
                let reading = task.found(read);
                self.locks.decide(turn, reading, now, &mut effects);
                self.carry_out(&locks, &owner, effects);
                continue;
            }
            match (&*locks, &task.subject) {
                ([lock_key], Subject::Command | Subject::One(..))
                    if !is_of_several(command, &task) =>
                {
                    let lock = self.keys.open(lock_key.db, &lock_key.name, now);
                    let found = Found::at(&lock, &task, &owner, is_break);
                    self.interrupt(now);
                    let read = match &found {
                        Found::Stored(stored) | Found::ForQueue(stored, _)
                            if !self.is_whole(&task, lock_key, stored) =>
                        {
                            Read::Unknown
                        }
                        found => found.read(),
                    };
                    self.tell_expired();
                    let reading = task.found(read);
                    self.locks.decide(turn, reading, now, &mut effects);
                }
                _ => {
                    let load = |place: &LockKey| {
                        let lock = self.keys.open(place.db, &place.name, now);
                        lock.load(&owner, &task)
                    };
                    let stored: Vec<Stored> = locks.iter().map(load).collect();
                    self.interrupt(now);
                    let missing = self.first_torn(&task, &locks, &stored);
                    let read = match (missing, task.purpose) {
                        (Some(place), Purpose::GrantSeveral(_)) => Read::NotHere(place),
                        (Some(_), _) => Read::Unknown,
                        (None, _) => Read::Several(&stored),
                    };
                    self.tell_expired();
                    let reading = task.found(read);
                    self.locks.decide(turn, reading, now, &mut effects);
                }
            }
            self.carry_out(&locks, &owner, effects);
        }
    }

    /// The reading of a lock that is not here, or only in part (`not_here` in the module).
    fn not_here(&mut self, task: &Task, locks: &[LockKey], now: Now) -> Option<Read<'static>> {
        let membership = self.membership.clone()?;
        let (asks_where, of_several_keys) = match task.purpose {
            Purpose::Reconcile(_) => (true, false),
            Purpose::CheckHold(mode) => (true, is_of_several_keys(mode)),
            // A plain one that is not here is no longer held, and so are permits.
            Purpose::Release(mode) => (is_of_several_keys(mode), is_of_several_keys(mode)),
            Purpose::Sweep | Purpose::LongWait => (false, true),
            Purpose::GrantSeveral(_) => {
                let place = locks.iter().position(|lock| !self.is_here(lock, now));
                return place.map(Read::NotHere);
            }
            Purpose::Command | Purpose::TimeOut | Purpose::Holders => return None,
        };
        let lock = locks.first()?;
        if asks_where && !self.is_here(lock, now) {
            return Some(Read::Elsewhere(membership.served_at(&lock.name)));
        }
        (of_several_keys && !self.is_settled(&lock.name)).then_some(Read::Unknown)
    }

    /// Whether this node serves a key now, as `EXISTS` would tell.
    fn is_here(&mut self, lock: &LockKey, now: Now) -> bool {
        let Some(membership) = self.membership.clone() else {
            return true;
        };
        let is_asking = self.is_asking;
        let has = |name: &[u8]| self.has(lock.db, name, now);
        membership.route(&[&lock.name], is_asking, has).is_ok()
    }

    /// Whether all the keys of a read-write lock are here.
    fn is_settled(&self, name: &[u8]) -> bool {
        let membership = self.membership.as_ref();
        membership.is_none_or(|of| !names::side_keys_share_slot(name) || of.is_settled(name))
    }

    /// Whether this node has all that is stored of a lock (`is_whole` in the module).
    fn is_whole(&self, task: &Task, lock: &LockKey, stored: &Stored) -> bool {
        let mode = match task.purpose {
            Purpose::Reconcile(mode) => mode,
            Purpose::Command | Purpose::GrantSeveral(_) => Mode::Plain,
            _ => return true,
        };
        let of_several_keys =
            mode != Mode::Plain || matches!(stored, Stored::NoHolder | Stored::ReadWrite(_));
        !of_several_keys || self.is_settled(&lock.name)
    }

    /// The first of several locks that are here only in part.
    fn first_torn(&self, task: &Task, locks: &[LockKey], stored: &[Stored]) -> Option<usize> {
        let mut each = locks.iter().zip(stored);
        each.position(|(lock, stored)| !self.is_whole(task, lock, stored))
    }

    fn carry_out(&mut self, locks: &[LockKey], caller: &[u8], effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Write { lock, write } => {
                    if let Some(lock) = locks.get(lock) {
                        self.keys.write(lock, caller, &write);
                    }
                }
                Effect::Wake(listener) => {
                    let listening = self.listeners.remove(&listener);
                    let woken = listening.map(|listening| Woken {
                        listener,
                        listening: Ok(listening),
                    });
                    self.woken.extend(woken);
                }
                Effect::TakenOver { listener, by } => {
                    self.listeners.remove(&listener);
                    self.woken.push(Woken {
                        listener,
                        listening: Err(by),
                    });
                }
                // Nobody subscribes, and nobody is blocked for a lock.
                Effect::Publish { .. }
                | Effect::Grant { .. }
                | Effect::Leave { .. }
                | Effect::Log(_) => {}
            }
        }
        self.tell_expired();
    }
}

/// Which locks a task is about, and whose.
fn subject(task: &Task, command: Option<(Command<'_>, i32)>) -> (Vec<LockKey>, Vec<u8>) {
    match (&task.subject, command) {
        (Subject::One(lock, owner), _) => (vec![lock.clone()], owner.to_vec()),
        (Subject::Several(locks, owner), _) => (locks.to_vec(), owner.to_vec()),
        (Subject::Command, Some((command, db))) => {
            let lock = |name| LockKey::from(LockRef { db, name });
            let locks = match command.keys() {
                Keys::One(name) => vec![lock(name)],
                Keys::Several(names) => names.iter().map(|key| lock(key.name)).collect(),
            };
            (locks, command.owner().to_vec())
        }
        (Subject::Command, None) => (Vec::new(), Vec::new()),
    }
}

/// Whether a task is about a command that names its locks by their number.
fn is_of_several(command: Option<(Command<'_>, i32)>, task: &Task) -> bool {
    task.subject == Subject::Command
        && command.is_some_and(|(command, _)| matches!(command.keys(), Keys::Several(_)))
}

/// The state that was found at one lock.
enum Found {
    Stored(Stored),
    ForQueue(Stored, PermitsHolders),
    Holds(Stored, ReaderCounts),
    Owners(Vec<Box<[u8]>>),
    Gone(Vec<Box<[u8]>>),
}

impl Found {
    fn at(lock: &Lock<'_>, task: &Task, owner: &[u8], is_break: bool) -> Self {
        match task.purpose {
            Purpose::Holders => Self::Owners(lock.holders()),
            Purpose::Sweep => Self::Gone(lock.readers_gone()),
            Purpose::Command if is_break => {
                let (stored, readers) = lock.load_for_holder();
                Self::Holds(stored, readers)
            }
            _ if task.is_about_queue_for_permits() => {
                let (stored, others) = lock.load_for_queue(owner, task);
                Self::ForQueue(stored, others)
            }
            _ => Self::Stored(lock.load(owner, task)),
        }
    }

    fn read(&self) -> Read<'_> {
        match self {
            Self::ForQueue(Stored::Permits(hash), others) => Read::Permits(hash, others),
            Self::Stored(stored) | Self::ForQueue(stored, _) => Read::One(stored),
            // The log of BREAK names nobody here.
            Self::Holds(stored, readers) => Read::Holds(*stored, readers, None),
            Self::Owners(owners) => Read::Owners(owners),
            Self::Gone(readers) => Read::Gone {
                readers,
                more: false,
            },
        }
    }
}

/// As `rlock.fence-guard-ms` by default.
const FENCE_GUARD_MS: i64 = 10_000;

/// How far the tokens of one node are ahead of the other's, in thousands.
const NODES_APART_MS: i64 = 100;
