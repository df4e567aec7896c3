//! The naive read-write lock that always tells the truth: a list of waiters, searched from the
//! front, and the contract's sentences in the order in which they stand there.
//!
//! It shares no decision with the core: it writes its own keyspace by itself, and its error texts
//! are its own. Where the core and the twin disagree, one of them is wrong.

use super::keyspace::{Keyspace, Reader, Value, number, timeout_key, writer_field};
use super::life::{HoldName, Life, Name, News, TwinEnding, TwinEvent};
use rlock_core::{Kind, Mode, NEVER, Now};
use std::collections::{BTreeMap, BTreeSet};

mod wanted;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
const IS_READ_WRITE: &str = "WRONGKIND the key holds a read-write lock, not a plain one";
const IS_PLAIN: &str = "WRONGKIND the key holds a plain lock, not a read-write one";
const OVERFLOW: &str = "ERR hold count must stay within 1 to 2147483647";
const MALFORMED: &str = "ERR hold count of this owner is not an integer from 1 to 2147483647, \
                         it was written by somebody else";
pub(crate) const NO_SESSION: &str =
    "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first";
const DEMOTED: &str = "UNBLOCKED force unblock from blocking operation, \
                       instance state changed (master -> replica?)";
const WAITING: &str = "WAITING this owner waits for the lock already, ONCE takes that wait over";
const COUNT_MAX: i64 = 2_147_483_647;

/// What a client or the operator is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Held {
        count: i64,
        token: i64,
    },
    NotHeld {
        ttl_ms: i64,
    },
    Waits,
    Queued {
        position: i64,
    },
    /// The wait could never end.
    Deadlock,
    Events(Vec<TwinEvent>),
    Number(i64),
    Null,
    Refused(String),
    Nothing,
}

/// What a waiter hears in the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Granted { count: i64, token: i64 },
    NotAcquired { ttl_ms: i64 },
    Refused(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TwinWaiter {
    pub(crate) owner: Vec<u8>,
    pub(crate) mode: Mode,
    pub(crate) seat: usize,
    /// Whether it hears by an event of its session, and not on its own connection.
    pub(crate) is_queued: bool,
    pub(crate) session: Option<Name>,
    pub(crate) wanted: bool,
    pub(crate) lease_ms: i64,
    pub(crate) since: i64,
    /// On the monotonic clock; none without limit.
    pub(crate) wait_end: Option<i64>,
}

/// What has happened, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) grants: u64,
    pub(crate) reentries: u64,
    pub(crate) handovers: u64,
    pub(crate) timeouts: u64,
    pub(crate) cancels: u64,
    pub(crate) departures: u64,
    pub(crate) taken_back: u64,
    pub(crate) renewals: u64,
    pub(crate) renewals_lost: u64,
    pub(crate) releases: u64,
    pub(crate) breaks: u64,
    pub(crate) waiters_peak: u64,
    pub(crate) deadlocks_refused: u64,
    pub(crate) session_releases: u64,
    pub(crate) holds_lost: u64,
}

/// What this server knows of a lock's writer, and nobody else does.
#[derive(Clone, Debug)]
struct WriterToken {
    owner: Vec<u8>,
    token: i64,
    /// When the key was to expire when we last wrote to it.
    ends_at: Option<i64>,
}

#[derive(Debug, Default)]
pub(crate) struct Twin {
    pub(crate) space: Keyspace,
    pub(crate) lines: BTreeMap<Vec<u8>, Vec<TwinWaiter>>,
    pub(crate) heard: Vec<(usize, Heard)>,
    /// The unlock messages, by lock and by how it was held.
    pub(crate) published: Vec<(Vec<u8>, Mode)>,
    pub(crate) tally: Tally,
    /// Waiters that left because there is nothing to wait for.
    pub(crate) refused: u64,
    pub(crate) life: Life,
    /// Whether commands for a session ask to be told when the lock is wanted.
    pub(crate) asks_if_wanted: bool,
    /// Whether the core refused the present wait as one without an end.
    pub(crate) is_found: bool,
    writer_tokens: BTreeMap<Vec<u8>, WriterToken>,
    /// The locks that were freed in this turn by holds that had to end.
    pub(crate) freed: BTreeSet<Vec<u8>>,
    /// How often a lock became free by what was given back or ended.
    deletions: u64,
    /// The locks that this turn freed, or opened to more readers: whoever can have one is to have
    /// it before the turn is over.
    changed: BTreeSet<Vec<u8>>,
    /// Locks at which holds have ended and more must end: the last sets the key's end right.
    outlived: BTreeSet<Vec<u8>>,
    /// Whether the hold that ends is not the last that must end at its lock.
    others_end_too: bool,
    last_token: i64,
    /// What is left of the time after the start in which nobody is granted a lock.
    pub(crate) delay_left_ms: i64,
}

/// Whether and how an ACQUIRE waits, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    No,
    Block(i64),
    Queue(i64),
}

/// An ACQUIRE as it was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) mode: Mode,
    pub(crate) lease_ms: i64,
    pub(crate) waits: Waits,
    pub(crate) session: Option<Name>,
    pub(crate) once: bool,
    pub(crate) seat: usize,
    pub(crate) waiters_max: usize,
}

impl Asked<'_> {
    fn entry(&self) -> Entry {
        Entry {
            owner: self.owner.to_vec(),
            mode: self.mode,
            lease_ms: self.lease_ms,
            waited: false,
            session: self.session,
            once: self.once,
            looks_at_all: self.once || self.mode == Mode::Write && self.waits != Waits::No,
        }
    }
}

/// An entry that is to be made, by whoever asked for it.
#[derive(Clone, Debug)]
struct Entry {
    owner: Vec<u8>,
    mode: Mode,
    lease_ms: i64,
    session: Option<Name>,
    once: bool,
    /// Whether it has waited, and is granted now.
    waited: bool,
    /// Whether it is known when the leases of all other readers end.
    looks_at_all: bool,
}

pub(crate) fn mode_text(mode: Mode) -> &'static str {
    match mode {
        Mode::Plain => "has",
        Mode::Read => "reads",
        Mode::Write => "writes",
        Mode::Permits => crate::no_permits(),
    }
}

impl Twin {
    // --- Commands --------------------------------------------------------------------------------

    pub(crate) fn acquire(&mut self, lock: &[u8], asked: Asked<'_>, now: Now) -> Reply {
        let reply = self.take_or_wait(lock, asked, now);
        let asks = self.asks_if_wanted(asked.session);
        self.asking(reply, (lock, asked.owner, asked.mode), asks)
    }

    fn take_or_wait(&mut self, lock: &[u8], asked: Asked<'_>, now: Now) -> Reply {
        if let Some(refused) = self
            .unfetched_grants(asked.session)
            .or(self.not_a_lock(lock))
        {
            return refused;
        }
        let refused = self.wrong_kind(lock, asked.mode);
        if let Some(refused) = refused.or(self.wrong_kind_of_first(lock, asked.mode)) {
            return refused;
        }
        let may_enter = match asked.mode {
            // Newcomers never overtake a waiter.
            _ if self.is_free(lock) => self.line(lock).is_empty() && !self.is_delayed(),
            Mode::Plain => self.holds(lock, asked.owner, Mode::Plain),
            Mode::Write => self.holds(lock, asked.owner, Mode::Write),
            // An owner that holds re-enters past the line, and a writer takes READ past it.
            // Readers that arrive after a waiting writer wait behind it.
            Mode::Read => {
                self.holds(lock, asked.owner, Mode::Read)
                    || self.holds(lock, asked.owner, Mode::Write)
                    || (!self.keeps_out(lock, asked.owner)
                        && self.line(lock).is_empty()
                        && !self.is_delayed())
            }
            Mode::Permits => crate::no_permits(),
        };
        if !may_enter {
            return self.wait_in_line(lock, asked, now);
        }
        let was_free = self.is_free(lock);
        if was_free {
            self.life.lose_all(lock, None, now);
        }
        match self.enter(lock, &asked.entry(), now) {
            Ok((count, token)) => {
                if asked.once && !was_free {
                    self.life.confirm(lock, asked.owner, asked.mode);
                }
                Reply::Held { count, token }
            }
            Err(text) => Reply::Refused(text.into()),
        }
    }

    fn wait_in_line(&mut self, lock: &[u8], asked: Asked<'_>, now: Now) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_ms(lock, now));
        let wait_ms = match asked.waits {
            Waits::No => {
                if !self.is_free(lock) {
                    let wants = (asked.owner.to_vec(), asked.mode);
                    self.tell_who_keeps_out(lock, &[wants]);
                }
                return Reply::NotHeld { ttl_ms };
            }
            Waits::Block(ms) | Waits::Queue(ms) => ms,
        };
        let place = self.place_in_line(lock, asked.owner, asked.mode);
        let place = place.filter(|_| asked.once);
        if asked.mode == Mode::Write && self.reads_before(lock, asked.owner, place) {
            self.tally.deadlocks_refused += 1;
            return Reply::Deadlock;
        }
        let newcomer = TwinWaiter {
            owner: asked.owner.to_vec(),
            mode: asked.mode,
            seat: asked.seat,
            is_queued: matches!(asked.waits, Waits::Queue(_)),
            session: asked.session,
            wanted: self.asks_if_wanted(asked.session),
            lease_ms: asked.lease_ms,
            since: now.mono_ms,
            wait_end: (wait_ms > 0).then(|| now.mono_ms + wait_ms),
        };
        let is_queued = newcomer.is_queued;
        let at = match place {
            Some(at) => {
                let ttl_ms = self.ttl_until(self.lease_before(lock, asked.mode), lock, now);
                let ttl_ms = self.or_delay(ttl_ms);
                self.move_to_seat(lock, at, newcomer, ttl_ms);
                at
            }
            _ if self.line(lock).iter().any(|of| of.owner == asked.owner) => {
                return Reply::Refused(WAITING.into());
            }
            _ if self.line(lock).len() >= asked.waiters_max => {
                let max = asked.waiters_max;
                return Reply::Refused(format!(
                    "QUEUEFULL too many waiters, rlock.max-waiters-per-lock is {max}"
                ));
            }
            _ if self.closes_a_circle(lock, &newcomer) => {
                self.tally.deadlocks_refused += 1;
                return Reply::Deadlock;
            }
            _ => {
                let line = self.lines.entry(lock.to_vec()).or_default();
                line.push(newcomer);
                let at = line.len() - 1;
                if !self.is_free(lock) {
                    let wants = (asked.owner.to_vec(), asked.mode);
                    self.tell_who_keeps_out(lock, &[wants]);
                }
                at
            }
        };
        self.tally.waiters_peak = self.tally.waiters_peak.max(self.waiting());
        if is_queued {
            let position = i64::try_from(at + 1).unwrap();
            Reply::Queued { position }
        } else {
            Reply::Waits
        }
    }

    /// A reader that would wait for WRITE waits for itself: also when its own READ waits before it.
    fn reads_before(&self, lock: &[u8], owner: &[u8], place: Option<usize>) -> bool {
        let before = &self.line(lock)[..place.unwrap_or(self.line(lock).len())];
        let mut own = before.iter().filter(|waiter| waiter.owner == owner);
        self.holds(lock, owner, Mode::Read) || own.any(|waiter| waiter.mode == Mode::Read)
    }

    /// An owner who asks again keeps its place; whoever sat there for it hears that it no longer
    /// waits, unless it is the very session that asks.
    fn move_to_seat(&mut self, lock: &[u8], at: usize, newcomer: TwinWaiter, ttl_ms: i64) {
        let line = self.lines.get_mut(lock).unwrap();
        let since = line[at].since;
        let old = std::mem::replace(&mut line[at], TwinWaiter { since, ..newcomer });
        let new = &line[at];
        let stays = old.is_queued && new.is_queued && old.session == new.session;
        self.tally.cancels += 1;
        if !stays {
            self.tell(lock, &old, Heard::NotAcquired { ttl_ms });
        }
    }

    pub(crate) fn release(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        mode: Mode,
        token: Option<i64>,
        lease_ms: Option<i64>,
        now: Now,
    ) -> Reply {
        let reply = self.give_back(lock, owner, mode, token, lease_ms, now);
        if let Reply::Number(_) = reply {
            self.tally.releases += 1;
        }
        reply
    }

    fn give_back(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        mode: Mode,
        token: Option<i64>,
        lease_ms: Option<i64>,
        now: Now,
    ) -> Reply {
        let refused = self.not_a_lock(lock).or(self.wrong_kind(lock, mode));
        if let Some(refused) = refused {
            return refused;
        }
        let is_right = token.is_none() || token == self.token(lock, owner, mode);
        if !self.holds(lock, owner, mode) || !is_right {
            return Reply::Null;
        }
        let Some(held) = self.count(lock, owner, mode) else {
            return Reply::Refused(MALFORMED.into());
        };
        let left = held - 1;
        if mode == Mode::Read {
            return Reply::Number(self.give_back_reading(lock, owner, left, lease_ms, now));
        }
        if left == 0 {
            self.end_hold(lock, owner, mode, now);
            return Reply::Number(0);
        }
        let field = field_of(owner, mode);
        self.space.set_field(lock, &field, left.to_string());
        if let Some(lease_ms) = lease_ms {
            self.start_lease(lock, owner, mode, now.wall_ms() + lease_ms);
        }
        self.bind(lock, owner, mode, None);
        Reply::Number(left)
    }

    fn give_back_reading(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        left: i64,
        lease_ms: Option<i64>,
        now: Now,
    ) -> i64 {
        let token = self.token(lock, owner, Mode::Read);
        self.space.delete(&timeout_key(lock, owner, left + 1));
        if left > 0 {
            self.space.set_field(lock, owner, left.to_string());
            if let Some(lease_ms) = lease_ms {
                self.set_timeouts(lock, owner, (1, left), token, now.wall_ms() + lease_ms);
            }
        }
        // A reader with no live timeout key holds nothing.
        if left == 0 || !self.holds(lock, owner, Mode::Read) {
            self.end_hold(lock, owner, Mode::Read, now);
            return 0;
        }
        self.shrink(lock, owner);
        self.bind(lock, owner, Mode::Read, None);
        left
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "what a command names, one by one"
    )]
    pub(crate) fn renew(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        mode: Mode,
        lease_ms: i64,
        token: Option<i64>,
        session: Option<Name>,
        now: Now,
    ) -> Reply {
        let refused = self.unfetched_grants(session).or(self.not_a_lock(lock));
        if let Some(refused) = refused.or(self.wrong_kind(lock, mode)) {
            return refused;
        }
        let is_right = token.is_none() || token == self.token(lock, owner, mode);
        if !self.holds(lock, owner, mode) || !is_right {
            self.tally.renewals_lost += 1;
            return Reply::Number(0);
        }
        let end = now.wall_ms() + lease_ms;
        self.start_lease(lock, owner, mode, end);
        if mode == Mode::Read && self.count(lock, owner, mode).is_some() {
            self.shrink(lock, owner);
        }
        self.life.confirm(lock, owner, mode);
        self.bind(lock, owner, mode, session);
        self.tally.renewals += 1;
        let asks = self.asks_if_wanted(session);
        self.asking(Reply::Number(1), (lock, owner, mode), asks)
    }

    pub(crate) fn cancel(&mut self, lock: &[u8], owner: &[u8], now: Now) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_ms(lock, now));
        let own = self.line(lock).iter().filter(|of| of.owner == owner);
        let own: Vec<TwinWaiter> = own.cloned().collect();
        for waiter in &own {
            self.withdraw(waiter.seat);
            self.tell(lock, waiter, Heard::NotAcquired { ttl_ms });
            self.tally.cancels += 1;
        }
        Reply::Number(i64::try_from(own.len()).unwrap())
    }

    pub(crate) fn break_hold(&mut self, lock: &[u8], now: Now) -> Reply {
        if let Some(refused) = self.not_a_lock(lock) {
            return refused;
        }
        if self.freed.contains(lock) {
            return Reply::Number(1);
        }
        if self.is_free(lock) {
            return Reply::Number(0);
        }
        self.tally.breaks += 1;
        self.life.lose_all(lock, Some("broken"), now);
        self.forget_writer_token(lock);
        let mode = self.mode(lock);
        self.space.delete_all_timeouts(lock);
        self.free(lock, mode, now);
        Reply::Number(1)
    }

    // --- What happens without a command ----------------------------------------------------------

    pub(crate) fn depart(&mut self, seat: usize) {
        self.withdraw(seat);
        self.tally.departures += 1;
    }

    pub(crate) fn time_out(&mut self, seat: usize, now: Now) -> Result<(), String> {
        let lock = self.lock_of(seat);
        let ttl_ms = self.or_delay(self.ttl_ms(&lock, now));
        let waiter = self.take_out(seat).ok_or("one who is gone was timed out")?;
        self.tell(&lock, &waiter, Heard::NotAcquired { ttl_ms });
        self.tally.timeouts += 1;
        match waiter.wait_end {
            Some(end) if end <= now.mono_ms => Ok(()),
            _ => Err(format!("seat {seat} was timed out and had time left")),
        }
    }

    /// A connection is gone: the sessions that lived by it lose their waiters and what nobody
    /// fetched. Whether there were any.
    pub(crate) fn client_gone(&mut self, client: u64, now: Now) -> bool {
        self.life.untold_ends.retain(|(of, _)| *of != client);
        let names: Vec<Name> = (0..super::world::SESSIONS.len())
            .filter(|name| self.life.client_of(*name) == Some(client))
            .collect();
        for name in &names {
            self.life.detach(*name, now);
            for (lock, waiter) in self.take_out_all(|waiter| waiter.session == Some(*name)) {
                // A queued one has nobody left to hear of it.
                if !waiter.is_queued {
                    self.tell(&lock, &waiter, Heard::Refused(NO_SESSION.into()));
                }
                self.tally.departures += 1;
            }
        }
        !names.is_empty()
    }

    /// The server became a replica: nobody waits there, what is held is not ours, and the tokens of
    /// writers are forgotten.
    pub(crate) fn demoted(&mut self) {
        for hold in std::mem::take(&mut self.life.holds).into_values() {
            let client = self.life.client_of(hold.session);
            let untold = client.map(|client| (client, hold.session));
            self.life.untold_ends.extend(untold);
        }
        self.life.endings.clear();
        self.writer_tokens.clear();
        for (lock, waiter) in self.take_out_all(|_| true) {
            self.tell(&lock, &waiter, Heard::Refused(DEMOTED.into()));
            self.refused += 1;
        }
    }

    pub(crate) fn start_tokens(&mut self, guard_ms: i64, now: Now) {
        self.last_token = self.last_token.max(now.wall_us + guard_ms * 1000);
    }

    /// A hold that nobody is left to know of ends, if it is still there.
    pub(crate) fn end(&mut self, ending: &TwinEnding, now: Now) -> Result<(), String> {
        self.life.is_to_end(ending)?;
        let TwinEnding { hold, token, whole } = ending;
        let (lock, owner, mode) = hold;
        self.others_end_too = self.life.endings.iter().any(|of| of.hold.0 == *lock);
        let outlived = !self.others_end_too && self.outlived.remove(lock);
        if self.others_end_too {
            self.outlived.insert(lock.clone());
        }
        if !self.holds(lock, owner, *mode)
            || !is_same(*mode, *token, self.token(lock, owner, *mode))
        {
            if outlived && self.mode(lock) == Mode::Read && !self.space.holders(lock).is_empty() {
                self.shrink(lock, owner);
            }
            self.others_end_too = false;
            return Ok(());
        }
        let deletions = self.deletions;
        if *whole {
            if *mode == Mode::Read {
                let numbers = self.space.timeouts(lock, owner);
                let numbers: Vec<i64> = numbers.iter().map(|(number, _)| *number).collect();
                for number in numbers {
                    self.space.delete(&timeout_key(lock, owner, number));
                }
            }
            self.end_hold(lock, owner, *mode, now);
            self.tally.session_releases += 1;
        } else if let Reply::Number(_) = self.give_back(lock, owner, *mode, *token, None, now) {
            self.tally.taken_back += 1;
        }
        if self.deletions > deletions {
            self.freed.insert(lock.clone());
        }
        self.others_end_too = false;
        Ok(())
    }

    /// Somebody looks at the key, for the session that has a hold there.
    pub(crate) fn check_hold(&mut self, of: &HoldName, now: Now) {
        let (lock, owner, mode) = of;
        let is_there = self.holds(lock, owner, *mode);
        let (token, ends_at) = (
            self.token(lock, owner, *mode),
            self.ends_at(lock, owner, *mode),
        );
        match self.life.holds.get_mut(of) {
            Some(hold) if is_there && is_same(*mode, hold.token, token) => hold.ends_at = ends_at,
            _ => self.life.lose(of, None, now),
        }
    }

    /// Somebody looks at the key for the first in the queue, and grants that one if it can have the
    /// lock. Who may follow it is the next look's business.
    pub(crate) fn reconcile(&mut self, lock: &[u8], now: Now) {
        if self.is_other_type(lock) {
            for waiter in self.lines.remove(lock).unwrap_or_default() {
                self.tell(lock, &waiter, Heard::Refused(WRONG_TYPE.into()));
                self.refused += 1;
            }
            return;
        }
        let Some(first) = self.line(lock).first().map(|first| first.mode) else {
            return;
        };
        if self.is_free(lock) {
            // Who had it has lost it. How it was held nobody can say any more: for readers and
            // writers the message is that of the last reader.
            self.life.lose_all(lock, None, now);
            if self.is_delayed() {
                return;
            }
            let mode = match first {
                Mode::Plain => Mode::Plain,
                Mode::Read | Mode::Write => Mode::Read,
                Mode::Permits => crate::no_permits(),
            };
            self.published.push((lock.to_vec(), mode));
        } else if self.lets_first_in(lock) && first == Mode::Plain {
            // A script made the first in the queue the holder: the lock is handed over to it.
            self.published.push((lock.to_vec(), Mode::Plain));
        }
        if self.lets_first_in(lock) {
            self.grant_first(lock, now);
        } else if !self.is_free(lock) {
            self.tell_who_keeps_out_any(lock);
        }
    }

    /// What a turn did there is no longer so, and nobody was told.
    pub(crate) fn changed_unseen(&mut self, lock: &[u8]) {
        self.changed.remove(lock);
    }

    /// At the end of a turn: nobody was left to wait for what the turn freed or opened.
    pub(crate) fn all_are_served(&mut self) -> Result<(), String> {
        for lock in std::mem::take(&mut self.changed) {
            if self.lets_first_in(&lock) && !self.is_mixed(&lock) {
                let first = self.line(&lock).first();
                return Err(format!("{first:?} can have {lock:?}, and is left to wait"));
            }
        }
        Ok(())
    }

    // --- Looking ---------------------------------------------------------------------------------

    pub(crate) fn line(&self, lock: &[u8]) -> &[TwinWaiter] {
        self.lines.get(lock).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn waiter(&self, seat: usize) -> Option<&TwinWaiter> {
        let mut waiters = self.lines.values().flatten();
        waiters.find(|waiter| waiter.seat == seat)
    }

    /// Whether nobody is granted a lock yet.
    pub(crate) fn is_delayed(&self) -> bool {
        self.delay_left_ms > 0
    }

    /// What is left of a lease, or of the delay if that is more.
    fn or_delay(&self, ttl_ms: i64) -> i64 {
        if ttl_ms < 0 {
            ttl_ms
        } else {
            ttl_ms.max(self.delay_left_ms)
        }
    }

    /// The client that INFO shows for a waiter.
    pub(crate) fn client_of(&self, waiter: &TwinWaiter) -> Option<u64> {
        match waiter.session {
            Some(session) if waiter.is_queued => self.life.client_of(session),
            _ => u64::try_from(waiter.seat).ok(),
        }
    }

    /// For which lock somebody waits; none in particular if for none.
    pub(crate) fn lock_of(&self, seat: usize) -> Vec<u8> {
        let waits = |line: &[TwinWaiter]| line.iter().any(|waiter| waiter.seat == seat);
        let found = self.lines.iter().find(|(_, line)| waits(line));
        found.map(|(lock, _)| lock.clone()).unwrap_or_default()
    }

    pub(crate) fn waiting(&self) -> u64 {
        let waiters: usize = self.lines.values().map(Vec::len).sum();
        u64::try_from(waiters).unwrap()
    }

    pub(crate) fn is_other_type(&self, lock: &[u8]) -> bool {
        self.space.get(lock).is_some() && self.space.fields(lock).is_none()
    }

    /// A hash with nobody in it is free, and so is a key that is not there.
    pub(crate) fn is_free(&self, lock: &[u8]) -> bool {
        self.space.holders(lock).is_empty() && !self.is_other_type(lock)
    }

    fn kind(&self, lock: &[u8]) -> Option<Kind> {
        let held = !self.space.holders(lock).is_empty();
        held.then(|| match self.space.mode(lock) {
            Some(_) => Kind::ReadWrite,
            None => Kind::Plain,
        })
    }

    /// How a lock is held that somebody has.
    fn mode(&self, lock: &[u8]) -> Mode {
        match self.space.mode(lock) {
            None => Mode::Plain,
            Some(b"read") if self.space.writers(lock).is_empty() => Mode::Read,
            Some(_) => Mode::Write,
        }
    }

    pub(crate) fn reader(&self, lock: &[u8], owner: &[u8]) -> Option<Reader> {
        self.space.reader(lock, owner)
    }

    pub(crate) fn holds(&self, lock: &[u8], owner: &[u8], mode: Mode) -> bool {
        let among = |owners: Vec<Vec<u8>>| owners.iter().any(|of| of == owner);
        match mode {
            Mode::Plain => among(self.space.plain_owners(lock)),
            Mode::Read => self.reader(lock, owner).is_some(),
            Mode::Write => among(self.space.writers(lock)),
            Mode::Permits => crate::no_permits(),
        }
    }

    /// Whether somebody else writes, or the hash says so of nobody knows whom.
    fn keeps_out(&self, lock: &[u8], owner: &[u8]) -> bool {
        let writers = self.space.writers(lock);
        let says_read = self.space.mode(lock) == Some(b"read");
        writers.iter().any(|of| of != owner)
            || (!says_read && !writers.iter().any(|of| of == owner))
    }

    /// A hold's count; none of what is no count.
    fn count(&self, lock: &[u8], owner: &[u8], mode: Mode) -> Option<i64> {
        let value = self.space.field(lock, &field_of(owner, mode))?;
        number(value).filter(|count| *count >= 1)
    }

    /// A hold's token, where it is known.
    pub(crate) fn token(&self, lock: &[u8], owner: &[u8], mode: Mode) -> Option<i64> {
        match mode {
            Mode::Plain => {
                let value = self.space.field(lock, b"fence")?;
                number(value.strip_prefix(b"t")?).filter(|token| *token > 0)
            }
            Mode::Read => self.reader(lock, owner)?.token,
            Mode::Write => {
                let known = self.writer_tokens.get(lock)?;
                let ends_at = self.space.get(lock).and_then(|entry| entry.ends_at);
                let is_there = known.owner == owner && ends_at.is_some();
                (is_there && known.ends_at == ends_at).then_some(known.token)
            }
            Mode::Permits => crate::no_permits(),
        }
    }

    /// We have written: a writer whose token is known is the same one still.
    fn note_end(&mut self, lock: &[u8], before: Option<i64>) {
        let ends_at = self.space.get(lock).and_then(|entry| entry.ends_at);
        if let Some(known) = self.writer_tokens.get_mut(lock)
            && known.ends_at == before
        {
            known.ends_at = ends_at;
        }
    }

    /// Somebody else has written, and said so.
    pub(crate) fn forget_writer_token(&mut self, lock: &[u8]) {
        self.writer_tokens.remove(lock);
    }

    /// When a hold ends; none if never.
    fn ends_at(&self, lock: &[u8], owner: &[u8], mode: Mode) -> Option<i64> {
        match mode {
            Mode::Read => {
                let reader = self.reader(lock, owner)?.ends_at;
                let key = self.space.get(lock)?.ends_at.unwrap_or(NEVER);
                Some(reader.min(key)).filter(|end| *end != NEVER)
            }
            Mode::Plain | Mode::Write => self.space.get(lock)?.ends_at,
            Mode::Permits => crate::no_permits(),
        }
    }

    fn ttl_ms(&self, lock: &[u8], now: Now) -> i64 {
        let ends_at = self.space.get(lock).and_then(|entry| entry.ends_at);
        self.ttl_until(ends_at, lock, now)
    }

    fn ttl_until(&self, ends_at: Option<i64>, lock: &[u8], now: Now) -> i64 {
        if self.is_free(lock) || self.is_other_type(lock) {
            return 0;
        }
        ends_at.map_or(-1, |end| end - now.wall_ms())
    }

    /// When the lock is the first in line's if nobody does anything: when the key is gone, or with
    /// only readers in it when the last of them is. A reader would have it before.
    pub(crate) fn lease_before(&self, lock: &[u8], mode: Mode) -> Option<i64> {
        let key_end = self.space.get(lock).and_then(|entry| entry.ends_at);
        if mode == Mode::Read || self.space.mode(lock).is_none() || self.mode(lock) != Mode::Read {
            return key_end;
        }
        let readers = self.space.readers(lock).into_iter();
        let longest = readers.map(|(_, reader)| reader.ends_at).max();
        let longest = longest.filter(|end| *end != NEVER);
        key_end.into_iter().chain(longest).min()
    }

    fn not_a_lock(&self, lock: &[u8]) -> Option<Reply> {
        let refused = || Reply::Refused(WRONG_TYPE.into());
        self.is_other_type(lock).then(refused)
    }

    fn wrong_kind(&self, lock: &[u8], mode: Mode) -> Option<Reply> {
        Self::other_kind(self.kind(lock)?, mode)
    }

    /// The kind of a free lock is that of the first in line: during the delay after a start there
    /// may be one.
    fn wrong_kind_of_first(&self, lock: &[u8], mode: Mode) -> Option<Reply> {
        let first = self.line(lock).first().filter(|_| self.is_free(lock))?;
        Self::other_kind(first.mode.kind(), mode)
    }

    fn other_kind(kind: Kind, mode: Mode) -> Option<Reply> {
        match kind {
            kind if kind == mode.kind() => None,
            Kind::Plain => Some(Reply::Refused(IS_PLAIN.into())),
            Kind::ReadWrite => Some(Reply::Refused(IS_READ_WRITE.into())),
            Kind::Permits => crate::no_permits(),
        }
    }

    /// An ACQUIRE or RENEW for a session that nobody listens to.
    fn unfetched_grants(&self, session: Option<Name>) -> Option<Reply> {
        session
            .filter(|name| !self.life.is_listened(*name))
            .map(|_| Reply::Refused(NO_SESSION.into()))
    }

    /// Where an ACQUIRE with ONCE would take a place over.
    pub(crate) fn place_in_line(&self, lock: &[u8], owner: &[u8], mode: Mode) -> Option<usize> {
        let mut line = self.line(lock).iter();
        line.position(|waiter| waiter.owner == owner && waiter.mode == mode)
    }

    /// Whether the first in line need not wait any longer.
    pub(crate) fn lets_first_in(&self, lock: &[u8]) -> bool {
        let Some(first) = self.line(lock).first() else {
            return false;
        };
        let (owner, mode) = (&first.owner, first.mode);
        if self.is_free(lock) {
            return !self.is_delayed();
        }
        if self.kind(lock) != Some(mode.kind()) {
            return false;
        }
        if self.holds(lock, owner, mode) {
            let held = self.count(lock, owner, mode);
            return held.is_some_and(|held| held < COUNT_MAX);
        }
        let writes = self.holds(lock, owner, Mode::Write);
        let is_let_in = !self.is_delayed() && !self.keeps_out(lock, owner);
        mode == Mode::Read && (writes || is_let_in)
    }

    // --- Who waits for whom ----------------------------------------------------------------------

    fn closes_a_circle(&self, lock: &[u8], newcomer: &TwinWaiter) -> bool {
        let mut lines = self.lines.clone();
        if self.is_in_a_circle(&lines, &newcomer.owner) {
            // One that others made by what they wrote stands without this wait.
            return self.is_found;
        }
        lines
            .entry(lock.to_vec())
            .or_default()
            .push(newcomer.clone());
        self.is_in_a_circle(&lines, &newcomer.owner)
    }

    fn is_in_a_circle(&self, lines: &BTreeMap<Vec<u8>, Vec<TwinWaiter>>, owner: &[u8]) -> bool {
        let mut reached = BTreeSet::new();
        let mut to_visit = self.waits_for(lines, owner);
        while let Some(next) = to_visit.pop_first() {
            if next == owner {
                return true;
            }
            if reached.insert(next.clone()) {
                to_visit.extend(self.waits_for(lines, &next));
            }
        }
        false
    }

    /// An owner waits for the holders of all that it waits for, and for those before it in those
    /// lines who wait for another lock as well. What one holds is re-entered, never waited for.
    fn waits_for(
        &self,
        lines: &BTreeMap<Vec<u8>, Vec<TwinWaiter>>,
        owner: &[u8],
    ) -> BTreeSet<Vec<u8>> {
        let waits_elsewhere = |of: &Vec<u8>, lock: &Vec<u8>| {
            let mut others = lines.iter().filter(|(other, _)| *other != lock);
            others.any(|(_, line)| line.iter().any(|waiter| waiter.owner == *of))
        };
        let mut found = BTreeSet::new();
        for (lock, line) in lines {
            let Some(last) = line.iter().rposition(|waiter| waiter.owner == owner) else {
                continue;
            };
            let holders = self.space.holders(lock);
            if holders.iter().any(|holder| **holder == *owner) {
                // Also where a script gave it the lock while it stood in the queue.
                continue;
            }
            found.extend(holders.into_iter().map(<[u8]>::into_vec));
            let ahead = line[..last].iter().map(|waiter| &waiter.owner);
            let ahead = ahead.filter(|of| *of != owner && waits_elsewhere(of, lock));
            found.extend(ahead.cloned());
        }
        found
    }

    // --- Changing --------------------------------------------------------------------------------

    fn mint(&mut self, now: Now) -> i64 {
        self.last_token = (self.last_token + 1).max(now.wall_us);
        self.last_token
    }

    /// A hold is over, and with it perhaps the lock's being held.
    fn end_hold(&mut self, lock: &[u8], owner: &[u8], mode: Mode, now: Now) {
        let of = (lock.to_vec(), owner.to_vec(), mode);
        self.life.unbind(&of);
        self.forget_writer(lock, owner, mode);
        let held_as = self.mode(lock);
        self.space.remove_field(lock, &field_of(owner, mode));
        let writes = self.holds(lock, owner, Mode::Write);
        let reads_on = !self.space.readers(lock).is_empty();
        if mode == Mode::Read && held_as == Mode::Write && !writes && !reads_on {
            // The last reader that was beside somebody else's writer, or `mode`, is gone. What is
            // left may be nobody.
            self.changed.insert(lock.to_vec());
            return;
        }
        if self.space.holders(lock).is_empty() {
            return self.free(lock, held_as, now);
        }
        match mode {
            Mode::Plain => {}
            Mode::Read => self.shrink(lock, owner),
            Mode::Write if !self.space.writers(lock).is_empty() => {}
            // The writer becomes a reader.
            Mode::Write => {
                self.space.set_field(lock, b"mode", "read");
                self.shrink(lock, owner);
                self.published.push((lock.to_vec(), Mode::Write));
                self.changed.insert(lock.to_vec());
            }
            Mode::Permits => crate::no_permits(),
        }
    }

    fn forget_writer(&mut self, lock: &[u8], owner: &[u8], mode: Mode) {
        let known = self.writer_tokens.get(lock);
        if mode == Mode::Write && known.is_some_and(|known| known.owner == owner) {
            self.writer_tokens.remove(lock);
        }
    }

    /// Nobody has the lock any more, and this was how it was held.
    fn free(&mut self, lock: &[u8], mode: Mode, now: Now) {
        self.space.delete(lock);
        self.deletions += 1;
        self.published.push((lock.to_vec(), mode));
        self.changed.insert(lock.to_vec());
        if !self.line(lock).is_empty() && !self.first_is_ending(lock) && !self.is_delayed() {
            self.grant_first(lock, now);
        }
    }

    /// Whether a hold of the first in the queue must end before it can be granted.
    fn first_is_ending(&self, lock: &[u8]) -> bool {
        let first = self.line(lock).first();
        let mut endings = self.life.endings.iter();
        endings.any(|of| of.hold.0 == lock && first.is_some_and(|first| first.owner == of.hold.1))
    }

    /// Whether others wrote what cannot be: somebody beside a writer, two owners of a plain lock,
    /// or `write` with nobody who does. Those in line come in whenever somebody looks.
    pub(crate) fn is_mixed(&self, lock: &[u8]) -> bool {
        let Some(mode) = self.space.mode(lock) else {
            return self.space.plain_owners(lock).len() > 1;
        };
        if self.space.writers(lock).is_empty() {
            mode != b"read"
        } else {
            self.space.holders(lock).len() > 1
        }
    }

    /// The first in the queue has it.
    fn grant_first(&mut self, lock: &[u8], now: Now) {
        let waiter = self.lines.get_mut(lock).unwrap().remove(0);
        let entry = Entry {
            owner: waiter.owner.clone(),
            mode: waiter.mode,
            lease_ms: waiter.lease_ms,
            session: waiter.session,
            once: false,
            waited: true,
            looks_at_all: waiter.mode != Mode::Read,
        };
        let (count, token) = self.enter(lock, &entry, now).unwrap();
        self.tally.handovers += 1;
        // Readers that are next come in with it.
        self.changed.insert(lock.to_vec());
        self.tell(lock, &waiter, Heard::Granted { count, token });
        if waiter.wanted {
            self.ask_if_wanted(lock, &waiter.owner, waiter.mode);
        }
    }

    /// An owner enters a lock that lets it in.
    fn enter(&mut self, lock: &[u8], entry: &Entry, now: Now) -> Result<(i64, i64), &'static str> {
        let Entry { owner, mode, .. } = entry;
        let (mode, end) = (*mode, now.wall_ms() + entry.lease_ms);
        let is_held = self.holds(lock, owner, mode);
        let held = match self.count(lock, owner, mode) {
            _ if !is_held => 0,
            None => return Err(MALFORMED),
            Some(held) if !entry.once && held >= COUNT_MAX => return Err(OVERFLOW),
            Some(held) => held,
        };
        if self.is_free(lock) {
            // What is left of a hash with nobody in it goes.
            self.space.delete(lock);
            if mode != Mode::Plain {
                self.writer_tokens.remove(lock);
            }
        }
        let count = if is_held && entry.once {
            held
        } else {
            held + 1
        };
        if !is_held {
            // What a session had before of it is over, though nobody may have looked.
            self.life
                .lose(&(lock.to_vec(), owner.clone(), mode), None, now);
        }
        let kept = self.token(lock, owner, mode).filter(|_| is_held);
        let token = kept.unwrap_or_else(|| self.mint(now));
        self.put(lock, owner, mode, count, token);
        match mode {
            Mode::Read => {
                let first = if is_held && entry.once { 1 } else { count };
                self.set_timeouts(lock, owner, (first, count), Some(token), end);
                if is_held && entry.once {
                    self.shrink(lock, owner);
                } else {
                    self.prolong(lock, owner, end, entry.looks_at_all);
                }
            }
            Mode::Write if self.is_mixed(lock) && !entry.looks_at_all => {
                // Others read beside the writer, nobody has looked until when: but what it reads
                // itself is known.
                let present = self.space.get(lock).unwrap().ends_at;
                let mut readers = self.space.readers(lock).into_iter();
                let own = readers.find(|(of, _)| of == owner);
                let own = own.map(|(_, own)| own.ends_at).filter(|end| *end != NEVER);
                let end = own.max(Some(end)).unwrap();
                self.expire(lock, present.map(|present| present.max(end)));
            }
            // Who has waited keeps what is left, if that is more.
            Mode::Plain | Mode::Write if entry.waited && is_held && self.outlasts(lock, end) => {}
            Mode::Plain | Mode::Write => self.start_lease(lock, owner, mode, end),
            Mode::Permits => crate::no_permits(),
        }
        if is_held {
            self.tally.reentries += 1;
        } else {
            self.tally.grants += 1;
        }
        self.bind(lock, owner, mode, entry.session);
        Ok((count, token))
    }

    fn outlasts(&self, lock: &[u8], end: i64) -> bool {
        let present = self.space.get(lock).unwrap().ends_at;
        present.is_none_or(|present| present > end)
    }

    fn put(&mut self, lock: &[u8], owner: &[u8], mode: Mode, count: i64, token: i64) {
        let is_new = self.space.get(lock).is_none();
        match mode {
            Mode::Plain => self.space.set_field(lock, b"fence", format!("t{token}")),
            Mode::Read if is_new => self.space.set_field(lock, b"mode", "read"),
            Mode::Read => {}
            Mode::Write => {
                if is_new {
                    self.space.set_field(lock, b"mode", "write");
                }
                let owner = owner.to_vec();
                let ends_at = self.space.get(lock).and_then(|entry| entry.ends_at);
                let known = WriterToken {
                    owner,
                    token,
                    ends_at,
                };
                self.writer_tokens.insert(lock.to_vec(), known);
            }
            Mode::Permits => crate::no_permits(),
        }
        let field = field_of(owner, mode);
        self.space.set_field(lock, &field, count.to_string());
    }

    fn bind(&mut self, lock: &[u8], owner: &[u8], mode: Mode, session: Option<Name>) {
        let token = self.token(lock, owner, mode);
        self.bind_as(lock, owner, mode, session, token);
    }

    fn bind_as(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        mode: Mode,
        session: Option<Name>,
        token: Option<i64>,
    ) {
        let ends_at = self.ends_at(lock, owner, mode);
        let of = (lock.to_vec(), owner.to_vec(), mode);
        self.life.bind(of, session, token, ends_at);
    }

    // --- Leases ----------------------------------------------------------------------------------

    fn set_timeouts(
        &mut self,
        lock: &[u8],
        owner: &[u8],
        (first, last): (i64, i64),
        token: Option<i64>,
        end: i64,
    ) {
        let value = token.unwrap_or(1).to_string().into_bytes();
        for number in first..=last {
            let key = timeout_key(lock, owner, number);
            self.space.set(&key, Value::Text(value.clone()), Some(end));
        }
    }

    /// The owner's lease starts anew, whatever that does to it, and to nobody else's.
    fn start_lease(&mut self, lock: &[u8], owner: &[u8], mode: Mode, end: i64) {
        let present = self.space.get(lock).unwrap().ends_at;
        let others = |owners: Vec<Vec<u8>>| owners.iter().any(|of| of != owner);
        match mode {
            Mode::Read => {
                if let Some(count) = self.count(lock, owner, mode) {
                    let token = self.token(lock, owner, mode);
                    return self.set_timeouts(lock, owner, (1, count), token, end);
                }
                // A reader without a count has no keys of its own, and the lease of the hash.
                let readers = self.space.readers(lock).into_iter();
                let others = readers.filter(|(of, _)| of != owner);
                let longest = others.map(|(_, reader)| reader.ends_at).max();
                let present_stays = self.mode(lock) == Mode::Write || longest == Some(NEVER);
                let end = longest.filter(|end| *end != NEVER).max(Some(end));
                match present {
                    _ if !present_stays => self.expire(lock, end),
                    Some(_) => self.expire(lock, end.max(present)),
                    None => {}
                }
            }
            Mode::Plain if others(self.space.plain_owners(lock)) => {
                self.expire(lock, present.map(|present| present.max(end)));
            }
            Mode::Write if others(self.space.writers(lock)) => {
                let ends = self.ends_known_to(lock, owner).into_iter();
                let longest = ends.filter(|end| *end != NEVER).max();
                self.expire(
                    lock,
                    present.map(|_| present.max(longest).max(Some(end)).unwrap()),
                );
            }
            Mode::Plain => self.expire(lock, Some(end)),
            Mode::Write => {
                let ends = self.ends_known_to(lock, owner);
                let longest = ends.iter().copied().filter(|end| *end != NEVER).max();
                let wanted = longest.max(Some(end));
                // What one of them has without an end stays.
                let is_endless = ends.contains(&NEVER);
                let present = present.filter(|_| is_endless);
                if !is_endless || present.is_some() {
                    self.expire(lock, wanted.max(present));
                }
            }
            Mode::Permits => crate::no_permits(),
        }
    }

    /// READ never shortens it. Whoever looks at all readers puts right what others cut short.
    fn prolong(&mut self, lock: &[u8], owner: &[u8], lease_end: i64, looks_at_all: bool) {
        let readers = self.space.readers(lock);
        let looks_at_all = looks_at_all || readers.len() == 1;
        let ends = if looks_at_all {
            self.ends_known_to(lock, owner)
        } else {
            let own = readers.into_iter().filter(|(of, _)| of == owner);
            own.map(|(_, reader)| reader.ends_at).collect()
        };
        let ending = ends.iter().copied().filter(|end| *end != NEVER);
        // Also where another of its own timeout keys has no end.
        let longest = ending.max().max(Some(lease_end));
        let present = self.space.get(lock).unwrap().ends_at;
        // Somebody else took the expiry away: it comes back when it is known who reads until when.
        let is_known = looks_at_all && !ends.contains(&NEVER) && self.mode(lock) == Mode::Read;
        if present.is_some() || is_known {
            self.expire(lock, present.max(longest));
        }
    }

    /// The hash's expiry is the end of the longest live hold; a writer's hold is the hash's.
    fn shrink(&mut self, lock: &[u8], owner: &[u8]) {
        let readers = self.space.readers(lock);
        if self.others_end_too && readers.iter().any(|(of, _)| of != owner) {
            return;
        }
        let ends = self.ends_known_to(lock, owner);
        let longest = ends.iter().copied().filter(|end| *end != NEVER).max();
        let present = self.space.get(lock).unwrap().ends_at;
        if ends.contains(&NEVER) || self.mode(lock) == Mode::Write {
            if present.is_some() {
                self.expire(lock, present.max(longest));
            }
        } else {
            self.expire(lock, longest.or(present));
        }
    }

    /// When the owner's lease as a reader ends, and the last of the others': beside one without an
    /// end, which somebody else took away, nobody looks for the next.
    fn ends_known_to(&self, lock: &[u8], owner: &[u8]) -> Vec<i64> {
        let readers = self.space.readers(lock).into_iter();
        let (own, others): (Vec<_>, Vec<_>) = readers.partition(|(of, _)| of == owner);
        let end_of = |reader: &(_, Reader)| reader.1.ends_at;
        let last_of_others = others.iter().map(end_of).max();
        own.iter().map(end_of).chain(last_of_others).collect()
    }

    fn expire(&mut self, lock: &[u8], end: Option<i64>) {
        let entry = self.space.get_mut(lock).unwrap();
        let before = std::mem::replace(&mut entry.ends_at, end);
        self.note_end(lock, before);
    }

    // --- Those in line ---------------------------------------------------------------------------

    /// A waiter hears how its wait ended.
    fn tell(&mut self, lock: &[u8], waiter: &TwinWaiter, heard: Heard) {
        let Some(session) = waiter.session.filter(|_| waiter.is_queued) else {
            self.heard.push((waiter.seat, heard));
            return;
        };
        let news = match heard {
            Heard::Granted { token, .. } => News::Granted(token),
            Heard::NotAcquired { ttl_ms } => News::Timeout(ttl_ms),
            Heard::Refused(text) => News::Error(text),
        };
        let (owner, mode) = (&waiter.owner, waiter.mode);
        self.life.tell(session, news, lock, owner, mode);
    }

    /// Takes out all of whom this is true, in the order in which they stand.
    fn take_out_all(&mut self, of: impl Fn(&TwinWaiter) -> bool) -> Vec<(Vec<u8>, TwinWaiter)> {
        let mut out = Vec::new();
        for (lock, line) in &mut self.lines {
            if line.first().is_some_and(&of) {
                self.changed.remove(lock);
            }
            let (gone, rest): (Vec<_>, Vec<_>) = line.drain(..).partition(&of);
            *line = rest;
            out.extend(gone.into_iter().map(|waiter| (lock.clone(), waiter)));
        }
        out
    }

    /// Takes one out that gets nothing. Who is first after it is for the timer to look at.
    fn withdraw(&mut self, seat: usize) -> Option<TwinWaiter> {
        let lock = self.lock_of(seat);
        if self.line(&lock).first()?.seat == seat {
            self.changed.remove(&lock);
        }
        self.take_out(seat)
    }

    fn take_out(&mut self, seat: usize) -> Option<TwinWaiter> {
        let line = self
            .lines
            .values_mut()
            .find(|line| line.iter().any(|waiter| waiter.seat == seat))?;
        let at = line.iter().position(|waiter| waiter.seat == seat)?;
        Some(line.remove(at))
    }
}

/// Whether a hold on record is the one that is there. A writer whose token is not known cannot be
/// told from a later one; nor can a reader of whom only a script's timeout keys are left, nor a
/// script's plain hold, which has a token as soon as somebody else in the hash gets one.
pub(crate) fn is_same(mode: Mode, recorded: Option<i64>, present: Option<i64>) -> bool {
    let unknown = match mode {
        Mode::Plain => recorded,
        Mode::Read | Mode::Write => present,
        Mode::Permits => crate::no_permits(),
    };
    recorded == present || unknown.is_none()
}

/// The field of the lock's hash that counts an owner's holds of a mode.
pub(crate) fn field_of(owner: &[u8], mode: Mode) -> Vec<u8> {
    match mode {
        Mode::Plain | Mode::Read => owner.to_vec(),
        Mode::Write => writer_field(owner),
        Mode::Permits => crate::no_permits(),
    }
}
