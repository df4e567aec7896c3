//! The naive lock, plain or read-write, that always tells the truth: a list of waiters, searched
//! from the front, and the contract's sentences in their order.
//!
//! It shares no decision with the core: it writes its own keyspace by itself, and its error texts
//! are its own. Where the core and the twin disagree, one of them is wrong.

use crate::circles::{Graph, Standing};
use crate::keyspace::{
    Keyspace, Place, Reader, Value, number, timeout_key, write_hold, writer_field,
};
use crate::life::{HoldName, Life, Name, News, TwinEnding, TwinTold, event_of, is_same};
use rlock_core::{INTEGER_MAX, Kind, Mode, NEVER, Now};
use std::collections::{BTreeMap, BTreeSet};

mod several;
mod wanted;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
const IS_READ_WRITE: &str = "WRONGKIND the key holds a read-write lock, not a plain one";
const IS_PLAIN: &str = "WRONGKIND the key holds a plain lock, not a read-write one";
const OVERFLOW: &str = "ERR hold count must stay within 1 to 2147483647";
const MALFORMED: &str = "ERR hold count of this owner is not an integer from 1 to 2147483647, \
                         it was written by somebody else";
const NO_SESSION: &str =
    "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first";
const BOUND_TO_ANOTHER: &str = "ERR this connection is bound to another session already";
const NOT_THEIRS: &str = "NOPERM this session belongs to another ACL user, who began it";
const DEMOTED: &str = "UNBLOCKED force unblock from blocking operation, \
                       instance state changed (master -> replica?)";
const WAITING: &str = "WAITING this owner waits for the lock already, ONCE takes that wait over";
const NO_MEMORY: &str = "OOM command not allowed when used memory > 'maxmemory'.";
const COUNT_MAX: i64 = 2_147_483_647;

/// The reply to a client or the operator.
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
    /// Of each session that was told something.
    Events(Vec<TwinTold>),
    /// BIND: the session's life, and the connection that was bound before.
    Bound {
        life: i64,
        former: Option<u64>,
    },
    Number(i64),
    Null,
    Refused(String),
    Nothing,
}

/// The message that ends a wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Granted {
        count: i64,
        token: i64,
        /// The locks that it took, each with the token of its hold; none if the one waited for.
        several: Option<Vec<(Place, i64)>>,
    },
    NotAcquired {
        ttl_ms: i64,
    },
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
    pub(crate) once: bool,
    pub(crate) lease_ms: i64,
    pub(crate) since: i64,
    /// On the monotonic clock; none without limit.
    pub(crate) wait_end: Option<i64>,
    /// Of a wait for several locks, all of them, as they were named: it stands in each queue.
    pub(crate) together: Option<Vec<Place>>,
}

impl TwinWaiter {
    fn new(
        asked: PermitsRequest<'_>,
        wait_ms: i64,
        together: Option<Vec<Place>>,
        now: Now,
    ) -> Self {
        Self {
            owner: asked.owner.to_vec(),
            mode: asked.mode,
            seat: asked.seat,
            is_queued: matches!(asked.waits, Waits::Queue(_)),
            session: asked.session,
            wanted: asked.wanted,
            once: asked.once,
            lease_ms: asked.lease_ms,
            since: now.mono_ms,
            wait_end: (wait_ms > 0).then(|| now.mono_ms + wait_ms),
            together,
        }
    }

    /// The lock under which it hears, standing in the queue of this one.
    pub(crate) fn hears_under<'a>(&'a self, place: &'a Place) -> &'a Place {
        let first = self.together.as_ref().and_then(|places| places.first());
        first.unwrap_or(place)
    }
}

/// Counts of the events so far.
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
    pub(crate) sessions_overflowed: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Twin {
    pub(crate) space: Keyspace,
    pub(crate) lines: BTreeMap<Place, Vec<TwinWaiter>>,
    pub(crate) heard: Vec<(usize, Heard)>,
    /// The unlock messages, by lock and by how it was held.
    pub(crate) published: Vec<(Place, Mode)>,
    pub(crate) tally: Tally,
    /// Waiters that left because there is nothing to wait for.
    pub(crate) refused: u64,
    pub(crate) life: Life,
    /// Whether commands for a session ask to be told when the lock is wanted.
    pub(crate) asks_if_wanted: bool,
    /// Whether the core refused the present wait as one without an end.
    pub(crate) is_found: bool,
    /// The connection that gives a hold back; none if no session needs to know of it.
    by: Option<u64>,
    /// The locks that were freed in this turn by holds that had to end.
    pub(crate) freed: BTreeSet<Place>,
    /// How often a release or the end of a hold made a lock free.
    deletions: u64,
    /// The locks that this turn freed, or opened to more readers: a waiter that can have one gets
    /// it before the turn is over. And the locks that it gave to an owner, which may have waited
    /// for them together with others.
    changed: Vec<(Place, Option<Vec<u8>>)>,
    /// The lock that was in the way of each waiter for several locks, by seat, when it was last
    /// looked at.
    blocked: BTreeMap<usize, Place>,
    /// Which of them could have had all then, but for the delay after the start.
    kept_back: BTreeSet<usize>,
    /// The locks that were not taken by a grant of several, since the owner held them, by seat.
    pub(crate) held_before: BTreeSet<(usize, Place)>,
    /// Locks at which holds have ended and more must end: the last sets the key's end right.
    outlived: BTreeSet<Place>,
    /// Whether the hold that ends is not the last that must end at its lock.
    others_end_too: bool,
    last_token: i64,
    /// The rest of the time after the start in which nobody is granted a lock.
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
pub(crate) struct PermitsRequest<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) mode: Mode,
    pub(crate) lease_ms: i64,
    pub(crate) waits: Waits,
    pub(crate) session: Option<Name>,
    pub(crate) wanted: bool,
    pub(crate) once: bool,
    pub(crate) seat: usize,
    pub(crate) waiters_max: usize,
}

impl PermitsRequest<'_> {
    fn entry(&self) -> Entry {
        Entry {
            owner: self.owner.to_vec(),
            mode: self.mode,
            lease_ms: self.lease_ms,
            waited: false,
            session: self.session,
            once: self.once,
            token: None,
            looks_at_all: self.mode == Mode::Write && self.waits != Waits::No,
        }
    }
}

/// An entry to make, for its owner.
#[derive(Clone, Debug)]
struct Entry {
    owner: Vec<u8>,
    mode: Mode,
    lease_ms: i64,
    session: Option<Name>,
    once: bool,
    /// Whether it has waited, and is granted now.
    waited: bool,
    /// The token of a new hold, unless it gets a token of its own.
    token: Option<i64>,
    /// Whether it is known when the leases of all other readers end.
    looks_at_all: bool,
}

impl Entry {
    fn granted(waiter: &TwinWaiter) -> Self {
        Self {
            owner: waiter.owner.clone(),
            mode: waiter.mode,
            lease_ms: waiter.lease_ms,
            session: waiter.session,
            once: waiter.once,
            waited: true,
            token: None,
            looks_at_all: waiter.mode != Mode::Read,
        }
    }
}

impl Twin {
    // --- Commands --------------------------------------------------------------------------------

    pub(crate) fn acquire(&mut self, place: &Place, asked: PermitsRequest<'_>, now: Now) -> Reply {
        let reply = self.take_or_wait(place, asked, now);
        self.asking(reply, (place, asked.owner, asked.mode), asked.wanted)
    }

    fn take_or_wait(&mut self, place: &Place, asked: PermitsRequest<'_>, now: Now) -> Reply {
        if let Some(refused) = self.not_listened(asked.session).or(self.not_a_lock(place)) {
            return refused;
        }
        let refused = self.wrong_kind(place, asked.mode);
        if let Some(refused) = refused.or(self.wrong_kind_of_first(place, asked.mode)) {
            return refused;
        }
        let may_enter = match asked.mode {
            // Newcomers never overtake a waiter.
            _ if self.is_free(place) => self.line(place).is_empty() && !self.is_delayed(),
            Mode::Plain => self.holds(place, asked.owner, Mode::Plain),
            Mode::Write => self.holds(place, asked.owner, Mode::Write),
            // An owner that holds re-enters past the queue, and a writer takes READ past it.
            // Readers that arrive after a waiting writer wait behind it.
            Mode::Read => {
                self.holds(place, asked.owner, Mode::Read)
                    || self.holds(place, asked.owner, Mode::Write)
                    || (!self.keeps_out(place, asked.owner)
                        && self.line(place).is_empty()
                        && !self.is_delayed())
            }
            Mode::Permits => crate::no_permits(),
        };
        if !may_enter {
            return self.wait_in_line(place, asked, now);
        }
        if self.is_free(place) {
            self.life.lose_all(place, None, now);
        }
        match self.enter(place, &asked.entry(), now) {
            Ok((count, token)) => Reply::Held { count, token },
            Err(text) => Reply::Refused(text.into()),
        }
    }

    fn wait_in_line(&mut self, place: &Place, asked: PermitsRequest<'_>, now: Now) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_ms(place, now));
        let wait_ms = match asked.waits {
            Waits::No => {
                if !self.is_free(place) {
                    self.is_wanted_by(place, asked);
                }
                return Reply::NotHeld { ttl_ms };
            }
            Waits::Block(ms) | Waits::Queue(ms) => ms,
        };
        let present = self.place_in_line(place, asked.owner, asked.mode);
        let present = present.filter(|_| asked.once);
        if asked.mode == Mode::Write && self.reads_before(place, asked.owner, present) {
            self.tally.deadlocks_refused += 1;
            return Reply::Deadlock;
        }
        let newcomer = TwinWaiter::new(asked, wait_ms, None, now);
        let at = if let Some(at) = present {
            let ttl_ms = self.ttl_until(self.lease_before(place, asked.mode), place, now);
            let ttl_ms = self.or_delay(ttl_ms);
            self.move_to_seat(place, at, newcomer, ttl_ms);
            at
        } else if let Some(refused) = self.cannot_wait(std::slice::from_ref(place), asked, None) {
            return refused;
        } else {
            let line = self.lines.entry(place.clone()).or_default();
            line.push(newcomer);
            let at = line.len() - 1;
            if !self.is_free(place) {
                self.is_wanted_by(place, asked);
            }
            at
        };
        waits_at(asked, at + 1)
    }

    /// Why there is no place in these queues for a wait, which may be for all of them together.
    fn cannot_wait(
        &mut self,
        places: &[Place],
        asked: PermitsRequest<'_>,
        joint: Option<usize>,
    ) -> Option<Reply> {
        // An owner stands in a queue once.
        let mut waiting = places.iter().flat_map(|place| self.line(place));
        if waiting.any(|waiter| waiter.owner == asked.owner) {
            return Some(Reply::Refused(WAITING.into()));
        }
        let is_full = |place| self.line(place).len() >= asked.waiters_max;
        if places.iter().any(is_full) {
            let max = asked.waiters_max;
            return Some(Reply::Refused(format!(
                "QUEUEFULL too many waiters, rlock.max-waiters-per-lock is {max}"
            )));
        }
        let is_circle = self.closes_a_circle(places, asked.owner, joint);
        self.tally.deadlocks_refused += u64::from(is_circle);
        is_circle.then_some(Reply::Deadlock)
    }

    /// A reader that would wait for WRITE waits for itself: also when its own READ waits before it.
    fn reads_before(&self, place: &Place, owner: &[u8], at: Option<usize>) -> bool {
        let before = &self.line(place)[..at.unwrap_or(self.line(place).len())];
        let mut own = before.iter().filter(|waiter| waiter.owner == owner);
        self.holds(place, owner, Mode::Read) || own.any(|waiter| waiter.mode == Mode::Read)
    }

    /// An owner that asks again keeps its place.
    fn move_to_seat(&mut self, place: &Place, at: usize, newcomer: TwinWaiter, ttl_ms: i64) {
        let line = self.lines.get_mut(place).unwrap();
        let since = line[at].since;
        let old = std::mem::replace(&mut line[at], TwinWaiter { since, ..newcomer });
        let new = &line[at];
        let new = new.clone();
        self.is_taken_over(place, &old, &new, ttl_ms);
    }

    /// The former caller of the seat hears that it no longer waits, unless it is the very session
    /// that asks.
    fn is_taken_over(&mut self, place: &Place, old: &TwinWaiter, new: &TwinWaiter, ttl_ms: i64) {
        let stays = old.is_queued && new.is_queued && old.session == new.session;
        self.tally.cancels += 1;
        if !stays {
            self.tell(place, old, Heard::NotAcquired { ttl_ms });
        }
    }

    pub(crate) fn release(
        &mut self,
        of: (&Place, &[u8], Mode),
        token: Option<i64>,
        lease_ms: Option<i64>,
        by: Option<u64>,
        now: Now,
    ) -> Reply {
        self.by = by;
        let reply = self.give_back(of, token, lease_ms, now);
        self.by = None;
        if let Reply::Number(_) = reply {
            self.tally.releases += 1;
        }
        reply
    }

    fn give_back(
        &mut self,
        (place, owner, mode): (&Place, &[u8], Mode),
        token: Option<i64>,
        lease_ms: Option<i64>,
        now: Now,
    ) -> Reply {
        let refused = self.not_a_lock(place).or(self.wrong_kind(place, mode));
        if let Some(refused) = refused {
            return refused;
        }
        let is_right = token.is_none() || token == self.token(place, owner, mode);
        if !self.holds(place, owner, mode) || !is_right {
            return Reply::Null;
        }
        let Some(held) = self.count(place, owner, mode) else {
            return Reply::Refused(MALFORMED.into());
        };
        if mode == Mode::Read {
            return Reply::Number(self.give_back_reading(place, owner, held - 1, lease_ms, now));
        }
        Reply::Number(self.leave(place, owner, mode, lease_ms, now))
    }

    /// One entry of a plain owner or of a writer is given back. How many are left.
    fn leave(
        &mut self,
        place: &Place,
        owner: &[u8],
        mode: Mode,
        lease_ms: Option<i64>,
        now: Now,
    ) -> i64 {
        let left = self.count(place, owner, mode).unwrap() - 1;
        if left == 0 {
            self.end_hold(place, owner, mode, now);
            return 0;
        }
        let token = self.token(place, owner, mode);
        self.set_count(place, owner, mode, left, token);
        if let Some(lease_ms) = lease_ms {
            self.start_lease(place, owner, mode, now.wall_ms() + lease_ms, now);
        }
        self.bind(place, owner, mode, None);
        left
    }

    fn give_back_reading(
        &mut self,
        place: &Place,
        owner: &[u8],
        left: i64,
        lease_ms: Option<i64>,
        now: Now,
    ) -> i64 {
        let present = self.lease_of_reader(place, owner, now);
        let token = self.token(place, owner, Mode::Read);
        self.space.delete(&timeout_key(place, owner, left + 1));
        if left == 0 {
            self.end_hold(place, owner, Mode::Read, now);
            return 0;
        }
        let token = token.unwrap_or_else(|| self.mint(now));
        let lease_end = lease_ms.map(|lease_ms| now.wall_ms() + lease_ms);
        let end = lease_end.or(present).unwrap();
        self.space.set_field(place, owner, left.to_string());
        self.set_timeout(place, owner, left, token, end);
        self.shrink(place, owner);
        self.bind(place, owner, Mode::Read, None);
        left
    }

    pub(crate) fn renew(
        &mut self,
        (place, owner, mode): (&Place, &[u8], Mode),
        lease_ms: i64,
        token: Option<i64>,
        session: Option<Name>,
        now: Now,
    ) -> Reply {
        let of = (place, owner, mode);
        let reply = self.renew_one(of, lease_ms, token, session, now);
        let asks = self.asks_if_wanted(session);
        self.asking(reply, of, asks)
    }

    fn renew_one(
        &mut self,
        (place, owner, mode): (&Place, &[u8], Mode),
        lease_ms: i64,
        token: Option<i64>,
        session: Option<Name>,
        now: Now,
    ) -> Reply {
        let refused = self.not_listened(session).or(self.not_a_lock(place));
        if let Some(refused) = refused.or(self.wrong_kind(place, mode)) {
            return refused;
        }
        let is_right = token.is_none() || token == self.token(place, owner, mode);
        if !self.holds(place, owner, mode) || !is_right {
            self.tally.renewals_lost += 1;
            return Reply::Number(0);
        }
        let end = now.wall_ms() + lease_ms;
        self.start_lease(place, owner, mode, end, now);
        if mode == Mode::Read && self.count(place, owner, mode).is_some() {
            self.shrink(place, owner);
        }
        self.bind(place, owner, mode, session);
        self.tally.renewals += 1;
        Reply::Number(1)
    }

    pub(crate) fn cancel(
        &mut self,
        place: &Place,
        owner: &[u8],
        mode: Option<Mode>,
        now: Now,
    ) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_ms(place, now));
        let is_meant =
            |of: &&TwinWaiter| of.owner == owner && mode.is_none_or(|mode| of.mode == mode);
        let own = self.line(place).iter().filter(is_meant);
        let own: Vec<TwinWaiter> = own.cloned().collect();
        for waiter in &own {
            self.withdraw(waiter.seat);
            self.tell(place, waiter, Heard::NotAcquired { ttl_ms });
            self.tally.cancels += 1;
        }
        Reply::Number(i64::try_from(own.len()).unwrap())
    }

    pub(crate) fn break_hold(&mut self, place: &Place, now: Now) -> Reply {
        if let Some(refused) = self.not_a_lock(place) {
            return refused;
        }
        if self.freed.contains(place) {
            return Reply::Number(1);
        }
        if self.is_free(place) {
            return Reply::Number(0);
        }
        self.tally.breaks += 1;
        self.life.lose_all(place, Some("broken"), now);
        let mode = self.mode(place);
        self.space.delete_latest_timeouts(place);
        self.free(place, mode, now);
        Reply::Number(1)
    }

    // --- What happens without a command ----------------------------------------------------------

    pub(crate) fn depart(&mut self, seat: usize) {
        self.withdraw(seat);
        self.tally.departures += 1;
    }

    pub(crate) fn time_out(&mut self, seat: usize, now: Now) -> Result<(), String> {
        let place = self.place_of(seat);
        let ttl_ms = self.or_delay(self.ttl_of_wait(seat, now));
        let waiter = self.take_out(seat).ok_or("one who is gone was timed out")?;
        self.tell(&place, &waiter, Heard::NotAcquired { ttl_ms });
        self.tally.timeouts += 1;
        match waiter.wait_end {
            Some(end) if end <= now.mono_ms => Ok(()),
            _ => Err(format!("seat {seat} was timed out and had time left")),
        }
    }

    /// A connection is gone: the sessions that lived by it lose their waiters. Whether there were
    /// any.
    pub(crate) fn client_gone(&mut self, client: u64, now: Now) -> bool {
        self.life.unbind_connection(client);
        let names: Vec<Name> = (0..crate::world::SESSIONS.len())
            .filter(|name| self.life.client_of(*name) == Some(client))
            .collect();
        for name in &names {
            self.detach(*name, now);
        }
        !names.is_empty()
    }

    fn detach(&mut self, name: Name, now: Now) {
        self.life.detach(name, now);
        for (place, waiter) in self.take_out_all(|waiter| waiter.session == Some(name)) {
            if waiter.is_queued {
                self.tell_session(name, &place, &waiter, News::Left, None);
            } else {
                self.tell(&place, &waiter, Heard::Refused(NO_SESSION.into()));
            }
            self.tally.departures += 1;
        }
    }

    /// Sessions that left too many events unacknowledged begin another life. The rest is as if
    /// their connections had closed.
    pub(crate) fn overflow(&mut self, now: Now) -> Vec<Name> {
        let names = self.life.overflowing();
        for name in &names {
            self.life.end_life(*name);
            self.detach(*name, now);
            self.tally.sessions_overflowed += 1;
        }
        names
    }

    /// The server became a replica: it has no waiters, and its holds are the new primary's. The
    /// sessions that had some, which begin anew.
    pub(crate) fn demoted(&mut self) -> BTreeSet<Name> {
        let holds = std::mem::take(&mut self.life.holds).into_values();
        let names: BTreeSet<Name> = holds.map(|hold| hold.session).collect();
        self.life.end_without_holds();
        for name in &names {
            self.life.end_life(*name);
        }
        self.life.endings.clear();
        for (place, waiter) in self.take_out_all(|_| true) {
            self.tell(&place, &waiter, Heard::Refused(DEMOTED.into()));
            self.refused += 1;
        }
        names
    }

    pub(crate) fn start_tokens(&mut self, guard_ms: i64, now: Now) {
        self.last_token = self.last_token.max(now.wall_us + guard_ms * 1000);
        self.life.start_lives(guard_ms, now);
    }

    /// A hold that nobody is left to know of ends, if it is still there.
    pub(crate) fn end(&mut self, ending: &TwinEnding, now: Now) -> Result<(), String> {
        self.life.is_to_end(ending)?;
        let TwinEnding { hold, token, whole } = ending;
        let (place, owner, mode) = hold;
        self.others_end_too = self.life.endings.iter().any(|of| of.hold.0 == *place);
        let outlived = !self.others_end_too && self.outlived.remove(place);
        if self.others_end_too {
            self.outlived.insert(place.clone());
        }
        if !self.holds(place, owner, *mode)
            || !is_same(*mode, *token, self.token(place, owner, *mode))
        {
            if outlived && self.mode(place) == Mode::Read && !self.space.holders(place).is_empty() {
                self.shrink(place, owner);
            }
            self.others_end_too = false;
            return Ok(());
        }
        let deletions = self.deletions;
        if *whole {
            if *mode == Mode::Read {
                self.space.delete_latest_timeout(place, owner);
            }
            self.end_hold(place, owner, *mode, now);
            self.tally.session_releases += 1;
        } else {
            // The session that has the hold still knows that it is this one, whatever others have
            // written meanwhile.
            let has_it = self.life.holds.get(hold);
            let has_it = has_it.is_some_and(|has| has.token == *token && *mode != Mode::Plain);
            let token = token.filter(|_| !has_it);
            if let Reply::Number(_) = self.give_back((place, owner, *mode), token, None, now) {
                self.tally.taken_back += 1;
            }
        }
        if self.deletions > deletions {
            self.freed.insert(place.clone());
        }
        self.others_end_too = false;
        Ok(())
    }

    /// Somebody looks at the key, for the session that has a hold there.
    pub(crate) fn check_hold(&mut self, of: &HoldName, now: Now) {
        let (place, owner, mode) = of;
        let is_there = self.holds(place, owner, *mode);
        let (token, ends_at) = (
            self.token(place, owner, *mode),
            self.ends_at(place, owner, *mode),
        );
        match self.life.holds.get_mut(of) {
            Some(hold) if is_there && is_same(*mode, hold.token, token) => hold.ends_at = ends_at,
            _ => self.life.lose(of, None, now),
        }
    }

    /// Somebody looks at the key for the first in the queue, and grants that one if it can have the
    /// lock. The next look decides about the waiter after it.
    pub(crate) fn reconcile(&mut self, place: &Place, now: Now) {
        if let Some(Reply::Refused(text)) = self.not_plain(place)
            && self.none_to_wait_for(place, &text)
        {
            return;
        }
        let Some(first) = self.line(place).first() else {
            return;
        };
        let (mode, is_for_several) = (first.mode, first.together.is_some());
        if self.is_free(place) {
            // The holder has lost the lock. Nobody can say any more how it was held: for readers
            // and writers the message is that of the last reader.
            self.life.lose_all(place, None, now);
            if self.is_delayed() {
                return;
            }
            self.changed.push((place.clone(), None));
            if is_for_several {
                return;
            }
            let mode = match mode {
                Mode::Plain => Mode::Plain,
                Mode::Read | Mode::Write => Mode::Read,
                Mode::Permits => crate::no_permits(),
            };
            self.published.push((place.clone(), mode));
        } else if is_for_several {
            // It is looked at by itself.
            return;
        } else if self.lets_first_in(place) && mode == Mode::Plain {
            // A script made the first in the queue the holder: the lock is handed over to it.
            self.published.push((place.clone(), Mode::Plain));
        }
        if self.lets_first_in(place) {
            self.grant_first(place, now);
        } else if !self.is_free(place) {
            self.tell_who_keeps_out_any(place);
        }
    }

    /// Nobody waits for a key of another type. Another kind than plain may be gone again one day,
    /// but not for waiters for several locks. Whether nobody is left, or another is the first.
    fn none_to_wait_for(&mut self, place: &Place, text: &str) -> bool {
        let is_other_type = self.is_other_type(place);
        let line = self.line(place).to_vec();
        for waiter in &line {
            if is_other_type || waiter.together.is_some() {
                self.refuse_wait(place, waiter, text);
                // Where it was first at another lock, somebody looks a moment later.
                let others = waiter.together.clone().unwrap_or_default();
                self.changed.retain(|(place, _)| !others.contains(place));
            }
        }
        let seat = |line: &[TwinWaiter]| line.first().map(|first| first.seat);
        seat(&line) != seat(self.line(place))
    }

    /// A lock that a turn changed has changed again, and nobody was told.
    pub(crate) fn changed_unseen(&mut self, place: &Place) {
        self.changed.retain(|(of, _)| of != place);
    }

    /// At the end of a turn: nobody was left to wait for a lock that the turn freed or opened, or
    /// gave to that owner.
    pub(crate) fn all_are_served(&mut self) -> Result<(), String> {
        for (place, to) in std::mem::take(&mut self.changed) {
            let line = self.line(&place);
            if to.is_none() && self.lets_first_in(&place) && !self.is_mixed(&place) {
                let first = line.first();
                return Err(format!("{first:?} can have {place:?}, and is left to wait"));
            }
            let first = line.first().map(|first| first.seat);
            let concerned = line.iter().filter(|waiter| match &to {
                None => first == Some(waiter.seat),
                Some(owner) => waiter.owner == *owner,
            });
            for waiter in concerned.filter(|waiter| waiter.together.is_some()) {
                // Where something else was in its way, it is looked at when that has changed.
                let blocked = self.blocked.get(&waiter.seat);
                let blocked_elsewhere = blocked.is_some_and(|at| *at != place);
                // A waiter that the delay keeps back is looked at when the delay ends.
                let kept_back = self.is_delayed() && self.kept_back.contains(&waiter.seat);
                if self.can_have_all(waiter) && !blocked_elsewhere && !kept_back {
                    return Err(format!("{waiter:?} can have all, and is left to wait"));
                }
            }
        }
        Ok(())
    }

    // --- Looking ---------------------------------------------------------------------------------

    pub(crate) fn line(&self, place: &Place) -> &[TwinWaiter] {
        self.lines.get(place).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn waiter(&self, seat: usize) -> Option<&TwinWaiter> {
        let mut waiters = self.lines.values().flatten();
        waiters.find(|waiter| waiter.seat == seat)
    }

    /// Whether nobody is granted a lock yet.
    pub(crate) fn is_delayed(&self) -> bool {
        self.delay_left_ms > 0
    }

    /// The rest of a lease, or of the delay if that is longer.
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

    /// For which lock somebody waits, of several the first; any if for none.
    pub(crate) fn place_of(&self, seat: usize) -> Place {
        let mut lines = self.lines.iter();
        let found = lines.find_map(|(place, line)| {
            let waiter = line.iter().find(|waiter| waiter.seat == seat)?;
            Some(waiter.hears_under(place).clone())
        });
        found.unwrap_or_default()
    }

    pub(crate) fn any_waits_for_several(&self) -> bool {
        let mut waiters = self.lines.values().flatten();
        waiters.any(|waiter| waiter.together.is_some())
    }

    pub(crate) fn waiting(&self) -> u64 {
        let waiters: usize = self.lines.values().map(Vec::len).sum();
        u64::try_from(waiters).unwrap()
    }

    pub(crate) fn is_other_type(&self, place: &Place) -> bool {
        self.space.get(place).is_some() && self.space.fields(place).is_none()
    }

    /// A hash with nobody in it is free, and so is a key that is not there.
    pub(crate) fn is_free(&self, place: &Place) -> bool {
        self.space.holders(place).is_empty() && !self.is_other_type(place)
    }

    fn kind(&self, place: &Place) -> Option<Kind> {
        let held = !self.space.holders(place).is_empty();
        held.then(|| match self.space.mode(place) {
            Some(_) => Kind::ReadWrite,
            None => Kind::Plain,
        })
    }

    /// How a lock is held that somebody has.
    fn mode(&self, place: &Place) -> Mode {
        match self.space.mode(place) {
            None => Mode::Plain,
            Some(b"read") if self.space.writers(place).is_empty() => Mode::Read,
            Some(_) => Mode::Write,
        }
    }

    pub(crate) fn reader(&self, place: &Place, owner: &[u8]) -> Option<Reader> {
        self.space.reader(place, owner)
    }

    pub(crate) fn holds(&self, place: &Place, owner: &[u8], mode: Mode) -> bool {
        let among = |owners: Vec<Vec<u8>>| owners.iter().any(|of| of == owner);
        match mode {
            Mode::Plain => among(self.space.plain_owners(place)),
            Mode::Read => self.reader(place, owner).is_some(),
            Mode::Write => among(self.space.writers(place)),
            Mode::Permits => crate::no_permits(),
        }
    }

    /// Whether somebody else writes, or the hash says that somebody writes and names nobody.
    fn keeps_out(&self, place: &Place, owner: &[u8]) -> bool {
        let writers = self.space.writers(place);
        let says_read = self.space.mode(place) == Some(b"read");
        writers.iter().any(|of| of != owner)
            || (!says_read && !writers.iter().any(|of| of == owner))
    }

    /// A hold's count; none if the value is no count.
    pub(crate) fn count(&self, place: &Place, owner: &[u8], mode: Mode) -> Option<i64> {
        let value = self.space.field(place, &field_of(owner, mode))?;
        if mode == Mode::Write {
            return Some(write_hold(value)?.0);
        }
        number(value).filter(|count| *count >= 1)
    }

    /// A hold's token, where it is known.
    pub(crate) fn token(&self, place: &Place, owner: &[u8], mode: Mode) -> Option<i64> {
        match mode {
            Mode::Plain => {
                let value = self.space.field(place, b"fence")?;
                number(value.strip_prefix(b"t")?).filter(|token| *token > 0)
            }
            Mode::Read => self.reader(place, owner)?.token,
            Mode::Write => self.space.write_token(place, owner),
            Mode::Permits => crate::no_permits(),
        }
    }

    /// When a hold ends; none if never.
    fn ends_at(&self, place: &Place, owner: &[u8], mode: Mode) -> Option<i64> {
        match mode {
            Mode::Read => {
                let reader = self.reader(place, owner)?.ends_at;
                let key = self.space.get(place)?.ends_at.unwrap_or(NEVER);
                Some(reader.min(key)).filter(|end| *end != NEVER)
            }
            Mode::Plain | Mode::Write => self.space.get(place)?.ends_at,
            Mode::Permits => crate::no_permits(),
        }
    }

    pub(crate) fn ttl_ms(&self, place: &Place, now: Now) -> i64 {
        let ends_at = self.space.get(place).and_then(|entry| entry.ends_at);
        self.ttl_until(ends_at, place, now)
    }

    fn ttl_until(&self, ends_at: Option<i64>, place: &Place, now: Now) -> i64 {
        if self.is_free(place) || self.is_other_type(place) {
            return 0;
        }
        ends_at.map_or(-1, |end| end - now.wall_ms())
    }

    /// When the first in the queue gets the lock if nobody does anything: when the key is gone, or,
    /// with only readers in it, when the last of them is. A reader would have it before.
    pub(crate) fn lease_before(&self, place: &Place, mode: Mode) -> Option<i64> {
        let key_end = self.space.get(place).and_then(|entry| entry.ends_at);
        if mode == Mode::Read || self.space.mode(place).is_none() || self.mode(place) != Mode::Read
        {
            return key_end;
        }
        let readers = self.space.readers(place).into_iter();
        let longest = readers.map(|(_, reader)| reader.ends_at).max();
        let longest = longest.filter(|end| *end != NEVER);
        key_end.into_iter().chain(longest).min()
    }

    fn not_a_lock(&self, place: &Place) -> Option<Reply> {
        let refused = || Reply::Refused(WRONG_TYPE.into());
        self.is_other_type(place).then(refused)
    }

    fn wrong_kind(&self, place: &Place, mode: Mode) -> Option<Reply> {
        Self::other_kind(self.kind(place)?, mode)
    }

    /// The kind of a free lock is that of the first in its queue: during the delay after a start
    /// there may be one.
    fn wrong_kind_of_first(&self, place: &Place, mode: Mode) -> Option<Reply> {
        let first = self.line(place).first().filter(|_| self.is_free(place))?;
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

    /// The refusal for a key that can be no plain lock.
    fn not_plain(&self, place: &Place) -> Option<Reply> {
        self.not_a_lock(place)
            .or(self.wrong_kind(place, Mode::Plain))
    }

    /// An ACQUIRE or RENEW for another user's session, or for one that nobody listens to.
    fn not_listened(&self, session: Option<Name>) -> Option<Reply> {
        let name = session?;
        let text = match () {
            () if self.life.is_of_another(name) => NOT_THEIRS,
            () if !self.life.is_listened(name) => NO_SESSION,
            () => return None,
        };
        Some(Reply::Refused(text.into()))
    }

    /// Whether EVENTS is refused: for another user's session, for one that would begin, or on a
    /// connection that is not the client's latest.
    pub(crate) fn cannot_attach(&self, name: Name, epoch: Option<u64>) -> Option<Reply> {
        let limits = self.life.limits;
        let full = format!(
            "SESSIONSFULL too many sessions, rlock.max-sessions is {}",
            limits.sessions
        );
        let session = self.life.sessions.get(&name);
        let known = session.and_then(|session| session.epoch);
        let text = match known {
            _ if self.life.is_of_another(name) => NOT_THEIRS,
            Some(known) if epoch.is_some_and(|epoch| epoch < known) => return Some(stale(known)),
            _ if session.is_some() => return None,
            _ if limits.out_of_memory => NO_MEMORY,
            _ if self.life.sessions.len() >= usize::try_from(limits.sessions).unwrap() => &full,
            _ => return None,
        };
        Some(Reply::Refused(text.into()))
    }

    /// BIND, until it closes the former connection: which one.
    pub(crate) fn bind_connection(
        &mut self,
        name: Name,
        client: u64,
        epoch: u64,
    ) -> Result<Option<u64>, Reply> {
        if let Some(refused) = self.not_listened(Some(name)) {
            return Err(refused);
        }
        match self.life.bind_epoch(name) {
            Some(known) if epoch <= known => return Err(stale(known)),
            _ => {}
        }
        if self.life.is_bound_to_another(name, client) {
            return Err(Reply::Refused(BOUND_TO_ANOTHER.into()));
        }
        Ok(self.life.bind_connection(name, client, epoch))
    }

    /// The answer to BIND, after it has closed the former connection.
    pub(crate) fn bound(&self, name: Name, former: Option<u64>) -> Reply {
        self.not_listened(Some(name)).unwrap_or_else(|| {
            let life = self.life.sessions[&name].life.unwrap();
            Reply::Bound { life, former }
        })
    }

    /// Where an ACQUIRE with ONCE would take a place over.
    pub(crate) fn place_in_line(&self, place: &Place, owner: &[u8], mode: Mode) -> Option<usize> {
        let mut line = self.line(place).iter();
        line.position(|waiter| {
            waiter.owner == owner && waiter.mode == mode && waiter.together.is_none()
        })
    }

    /// Whether its owner can enter it no more.
    pub(crate) fn is_full(&self, (place, owner, mode): (&Place, &[u8], Mode)) -> bool {
        self.count(place, owner, mode) == Some(COUNT_MAX)
    }

    /// Whether the first in the queue, if it waits for this lock alone, need not wait any longer.
    pub(crate) fn lets_first_in(&self, place: &Place) -> bool {
        let first = self.line(place).first();
        let Some(first) = first.filter(|first| first.together.is_none()) else {
            return false;
        };
        let (owner, mode) = (&first.owner, first.mode);
        if self.is_free(place) {
            return !self.is_delayed();
        }
        if self.kind(place) != Some(mode.kind()) {
            return false;
        }
        if self.holds(place, owner, mode) {
            let held = self.count(place, owner, mode);
            return held.is_some_and(|held| first.once || held < COUNT_MAX);
        }
        let writes = self.holds(place, owner, Mode::Write);
        let is_let_in = !self.is_delayed() && !self.keeps_out(place, owner);
        mode == Mode::Read && (writes || is_let_in)
    }

    // --- Circles of waits ------------------------------------------------------------------------

    fn closes_a_circle(&self, places: &[Place], owner: &[u8], joint: Option<usize>) -> bool {
        let mut graph = self.graph();
        if graph.is_in_a_circle(owner) {
            // A circle that others made by their writes stands without this wait.
            return self.is_found;
        }
        for place in places {
            let line = graph.lines.entry(place.clone()).or_default();
            let owner = owner.to_vec();
            line.push(Standing { owner, joint });
        }
        graph.is_in_a_circle(owner)
    }

    /// The holders and the waiters.
    pub(crate) fn graph(&self) -> Graph {
        let stands = |waiter: &TwinWaiter| Standing {
            owner: waiter.owner.clone(),
            joint: waiter.together.as_ref().map(|_| waiter.seat),
        };
        let standing = |line: &Vec<TwinWaiter>| line.iter().map(stands).collect();
        let lines = self.lines.iter();
        let holders = self.space.entries().map(|(place, _)| {
            let holders = self.space.holders(place).into_iter().map(Vec::from);
            (place.clone(), holders.collect())
        });
        Graph {
            lines: lines
                .map(|(place, line)| (place.clone(), standing(line)))
                .collect(),
            holders: holders.collect(),
        }
    }

    // --- Changing --------------------------------------------------------------------------------

    fn mint(&mut self, now: Now) -> i64 {
        self.last_token = (self.last_token + 1).max(now.wall_us);
        self.last_token
    }

    /// A hold is over, and with it perhaps the lock's being held.
    fn end_hold(&mut self, place: &Place, owner: &[u8], mode: Mode, now: Now) {
        let of = (place.clone(), owner.to_vec(), mode);
        if let Some(by) = self.by {
            self.life.given_back(&of, by);
        }
        self.life.unbind(&of);
        let held_as = self.mode(place);
        self.space.remove_field(place, &field_of(owner, mode));
        let writes = self.holds(place, owner, Mode::Write);
        let reads_on = !self.space.readers(place).is_empty();
        if mode == Mode::Read && held_as == Mode::Write && !writes && !reads_on {
            // The last reader beside somebody else's writer, or beside `mode` alone, is gone.
            // Nobody may be left.
            self.changed.push((place.clone(), None));
            return;
        }
        if self.space.holders(place).is_empty() {
            return self.free(place, held_as, now);
        }
        match mode {
            Mode::Plain => {}
            Mode::Read => self.shrink(place, owner),
            Mode::Write if !self.space.writers(place).is_empty() => {}
            // The writer becomes a reader.
            Mode::Write => {
                self.space.set_field(place, b"mode", "read");
                self.shrink(place, owner);
                self.published.push((place.clone(), Mode::Write));
                self.changed.push((place.clone(), None));
            }
            Mode::Permits => crate::no_permits(),
        }
    }

    /// Nobody has the lock any more, and this was how it was held.
    fn free(&mut self, place: &Place, mode: Mode, now: Now) {
        self.space.delete(place);
        self.deletions += 1;
        self.published.push((place.clone(), mode));
        self.changed.push((place.clone(), None));
        let first = self.line(place).first();
        let is_alone = first.is_some_and(|first| first.together.is_none());
        if is_alone && !self.first_is_ending(place) && !self.is_delayed() {
            self.grant_first(place, now);
        }
    }

    /// Whether a hold of the first in the queue must end before it can be granted.
    fn first_is_ending(&self, place: &Place) -> bool {
        let first = self.line(place).first();
        let mut endings = self.life.endings.iter();
        endings.any(|of| of.hold.0 == *place && first.is_some_and(|first| first.owner == of.hold.1))
    }

    /// Whether others wrote a state that no command makes: somebody beside a writer, two owners of
    /// a plain lock, or `write` without a writer. Waiters come in whenever somebody looks.
    pub(crate) fn is_mixed(&self, place: &Place) -> bool {
        let Some(mode) = self.space.mode(place) else {
            return self.space.plain_owners(place).len() > 1;
        };
        if self.space.writers(place).is_empty() {
            mode != b"read"
        } else {
            self.space.holders(place).len() > 1
        }
    }

    /// The first in the queue has it.
    fn grant_first(&mut self, place: &Place, now: Now) {
        let waiter = self.lines.get_mut(place).unwrap().remove(0);
        let takes_none = waiter.once && self.holds(place, &waiter.owner, waiter.mode);
        let (count, token) = self.enter(place, &Entry::granted(&waiter), now).unwrap();
        self.tally.handovers += 1;
        // Readers that are next come in with it.
        self.changed.push((place.clone(), None));
        let heard = Heard::Granted {
            count,
            token,
            several: takes_none.then(Vec::new),
        };
        self.tell(place, &waiter, heard);
        if waiter.wanted {
            self.ask_if_wanted(place, &waiter.owner, waiter.mode);
        }
    }

    /// An owner enters a lock that lets it in.
    fn enter(
        &mut self,
        place: &Place,
        entry: &Entry,
        now: Now,
    ) -> Result<(i64, i64), &'static str> {
        let Entry { owner, mode, .. } = entry;
        let (mode, end) = (*mode, now.wall_ms() + entry.lease_ms);
        let is_held = self.holds(place, owner, mode);
        // An owner that takes its own hold over with ONCE may cut it short.
        let has_own = [Mode::Read, Mode::Write].map(|mode| self.holds(place, owner, mode));
        let takes_over = entry.once && !entry.waited;
        let looks_at_all = entry.looks_at_all || takes_over && has_own.contains(&true);
        let held = match self.count(place, owner, mode) {
            _ if !is_held => 0,
            None => return Err(MALFORMED),
            Some(held) if !entry.once && held >= COUNT_MAX => return Err(OVERFLOW),
            Some(held) => held,
        };
        if self.is_free(place) {
            // A hash without a holder goes.
            self.space.delete(place);
        }
        let count = if is_held && entry.once {
            held
        } else {
            held + 1
        };
        if !is_held {
            // An earlier hold of this owner for a session is over, though nobody may have seen.
            self.life
                .lose(&(place.clone(), owner.clone(), mode), None, now);
        }
        let present = self.lease_of_reader(place, owner, now);
        let kept = self.token(place, owner, mode).filter(|_| is_held);
        let token = match (kept, entry.token) {
            // ONCE names one token for all that is taken together, but for one that is also
            // another's.
            (_, Some(token)) if entry.once && !self.is_mixed(place) => token,
            (Some(token), _) => token,
            (None, Some(token)) if !is_held => token,
            (None, _) => self.mint(now),
        };
        self.put(place, owner, mode, count, token);
        match mode {
            Mode::Read => {
                if is_held && takes_over {
                    self.set_timeout(place, owner, count, token, end);
                    self.shrink(place, owner);
                } else {
                    let end = present.max(Some(end)).unwrap();
                    // A new hold has no earlier entry, whatever key a script left.
                    if is_held && !entry.once {
                        self.space.delete(&timeout_key(place, owner, count - 1));
                    }
                    self.set_timeout(place, owner, count, token, end);
                    self.prolong(place, owner, end, looks_at_all);
                }
            }
            Mode::Write if self.is_mixed(place) && !looks_at_all => {
                // Others read beside the writer, and nobody has looked when their leases end; but
                // the writer's own lease as a reader is known.
                let present = self.space.get(place).unwrap().ends_at;
                let mut readers = self.space.readers(place).into_iter();
                let own = readers.find(|(of, _)| of == owner);
                let own = own.map(|(_, own)| own.ends_at).filter(|end| *end != NEVER);
                let end = own.max(Some(end)).unwrap();
                self.expire(place, present.map(|present| present.max(end)));
            }
            // A waiter that holds the lock keeps the rest of its lease, if that is longer.
            Mode::Plain | Mode::Write if entry.waited && is_held && self.outlasts(place, end) => {}
            Mode::Plain | Mode::Write => self.start_lease(place, owner, mode, end, now),
            Mode::Permits => crate::no_permits(),
        }
        if is_held {
            self.tally.reentries += 1;
        } else {
            self.tally.grants += 1;
            self.changed.push((place.clone(), Some(owner.clone())));
        }
        self.bind(place, owner, mode, entry.session);
        Ok((count, token))
    }

    fn outlasts(&self, place: &Place, end: i64) -> bool {
        let present = self.space.get(place).unwrap().ends_at;
        present.is_none_or(|present| present > end)
    }

    fn put(&mut self, place: &Place, owner: &[u8], mode: Mode, count: i64, token: i64) {
        let is_new = self.space.get(place).is_none();
        match mode {
            Mode::Plain => self.space.set_field(place, b"fence", format!("t{token}")),
            Mode::Read if is_new => self.space.set_field(place, b"mode", "read"),
            Mode::Write if is_new => self.space.set_field(place, b"mode", "write"),
            Mode::Read | Mode::Write => {}
            Mode::Permits => crate::no_permits(),
        }
        self.set_count(place, owner, mode, count, Some(token));
    }

    /// A writer's field has its token as well.
    fn set_count(
        &mut self,
        place: &Place,
        owner: &[u8],
        mode: Mode,
        count: i64,
        token: Option<i64>,
    ) {
        let token = token.filter(|_| mode == Mode::Write);
        let token = token.map_or(String::new(), |token| format!(":t{token}"));
        let field = field_of(owner, mode);
        self.space
            .set_field(place, &field, format!("{count}{token}"));
    }

    fn bind(&mut self, place: &Place, owner: &[u8], mode: Mode, session: Option<Name>) {
        let token = self.token(place, owner, mode);
        self.bind_as(place, owner, mode, session, token);
    }

    fn bind_as(
        &mut self,
        place: &Place,
        owner: &[u8],
        mode: Mode,
        session: Option<Name>,
        token: Option<i64>,
    ) {
        let ends_at = self.ends_at(place, owner, mode);
        let of = (place.clone(), owner.to_vec(), mode);
        self.life.bind(&of, session, token, ends_at);
    }

    // --- Leases ----------------------------------------------------------------------------------

    fn set_timeout(&mut self, place: &Place, owner: &[u8], number: i64, token: i64, end: i64) {
        let value = Value::Text(token.to_string().into_bytes());
        let key = timeout_key(place, owner, number);
        self.space.set(&key, value, Some(end));
    }

    /// When a reader's lease ends; one without an end has the hash's.
    fn lease_of_reader(&self, place: &Place, owner: &[u8], now: Now) -> Option<i64> {
        let reader = self.reader(place, owner)?.ends_at;
        let key = self.space.get(place)?.ends_at;
        let ends_at = Some(reader).filter(|end| *end != NEVER).or(key);
        Some(ends_at.unwrap_or(now.wall_ms() + INTEGER_MAX))
    }

    /// The owner's lease starts anew, whatever that does to it, and to nobody else's.
    fn start_lease(&mut self, place: &Place, owner: &[u8], mode: Mode, end: i64, now: Now) {
        let present = self.space.get(place).unwrap().ends_at;
        let others = |owners: Vec<Vec<u8>>| owners.iter().any(|of| of != owner);
        match mode {
            Mode::Read => {
                if let Some(count) = self.count(place, owner, mode) {
                    let token = self.token(place, owner, mode);
                    let token = token.unwrap_or_else(|| self.mint(now));
                    return self.set_timeout(place, owner, count, token, end);
                }
                // A reader without a count has no keys of its own, and the lease of the hash.
                let readers = self.space.readers(place).into_iter();
                let others = readers.filter(|(of, _)| of != owner);
                let longest = others.map(|(_, reader)| reader.ends_at).max();
                let present_stays = self.mode(place) == Mode::Write || longest == Some(NEVER);
                let end = longest.filter(|end| *end != NEVER).max(Some(end));
                match present {
                    _ if !present_stays => self.expire(place, end),
                    Some(_) => self.expire(place, end.max(present)),
                    None => {}
                }
            }
            Mode::Plain if others(self.space.plain_owners(place)) => {
                self.expire(place, present.map(|present| present.max(end)));
            }
            Mode::Write if others(self.space.writers(place)) => {
                let ends = self.ends_known_to(place, owner).into_iter();
                let longest = ends.filter(|end| *end != NEVER).max();
                self.expire(
                    place,
                    present.map(|_| present.max(longest).max(Some(end)).unwrap()),
                );
            }
            Mode::Plain => self.expire(place, Some(end)),
            Mode::Write => {
                let ends = self.ends_known_to(place, owner);
                let longest = ends.iter().copied().filter(|end| *end != NEVER).max();
                let wanted = longest.max(Some(end));
                // A reader whose lease has no end keeps the present expiry from being shortened.
                let is_endless = ends.contains(&NEVER);
                let present = present.filter(|_| is_endless);
                if !is_endless || present.is_some() {
                    self.expire(place, wanted.max(present));
                }
            }
            Mode::Permits => crate::no_permits(),
        }
    }

    /// READ never shortens the expiry. A command that looks at all readers mends one that others
    /// cut short.
    fn prolong(&mut self, place: &Place, owner: &[u8], lease_end: i64, looks_at_all: bool) {
        let readers = self.space.readers(place);
        let looks_at_all = looks_at_all || readers.len() == 1;
        let ends = if looks_at_all {
            self.ends_known_to(place, owner)
        } else {
            let own = readers.into_iter().filter(|(of, _)| of == owner);
            own.map(|(_, reader)| reader.ends_at).collect()
        };
        let ending = ends.iter().copied().filter(|end| *end != NEVER);
        let longest = ending.max().max(Some(lease_end));
        let present = self.space.get(place).unwrap().ends_at;
        // Somebody else took the expiry away: it comes back once the ends of all readers' leases
        // are known.
        let is_known = looks_at_all && !ends.contains(&NEVER) && self.mode(place) == Mode::Read;
        if present.is_some() || is_known {
            self.expire(place, present.max(longest));
        }
    }

    /// The hash's expiry is the end of the longest live hold; a writer's hold is the hash's.
    fn shrink(&mut self, place: &Place, owner: &[u8]) {
        let readers = self.space.readers(place);
        if self.others_end_too && readers.iter().any(|(of, _)| of != owner) {
            return;
        }
        let ends = self.ends_known_to(place, owner);
        let longest = ends.iter().copied().filter(|end| *end != NEVER).max();
        let present = self.space.get(place).unwrap().ends_at;
        if ends.contains(&NEVER) || self.mode(place) == Mode::Write {
            if present.is_some() {
                self.expire(place, present.max(longest));
            }
        } else {
            self.expire(place, longest.or(present));
        }
    }

    /// When the owner's lease as a reader ends, and the last of the others': beside one without an
    /// end, which somebody else took away, nobody looks for the next.
    fn ends_known_to(&self, place: &Place, owner: &[u8]) -> Vec<i64> {
        let readers = self.space.readers(place).into_iter();
        let (own, others): (Vec<_>, Vec<_>) = readers.partition(|(of, _)| of == owner);
        let end_of = |reader: &(_, Reader)| reader.1.ends_at;
        let last_of_others = others.iter().map(end_of).max();
        own.iter().map(end_of).chain(last_of_others).collect()
    }

    fn expire(&mut self, place: &Place, end: Option<i64>) {
        let entry = self.space.get_mut(place).unwrap();
        entry.ends_at = end;
    }

    // --- Waiters ---------------------------------------------------------------------------------

    /// A waiter hears how its wait ended.
    fn tell(&mut self, place: &Place, waiter: &TwinWaiter, heard: Heard) {
        let Some(session) = waiter.session.filter(|_| waiter.is_queued) else {
            self.heard.push((waiter.seat, heard));
            return;
        };
        let (news, token) = match heard {
            Heard::Granted { token, .. } => (News::Granted, Some(token)),
            Heard::NotAcquired { ttl_ms } => (News::Timeout(ttl_ms), None),
            Heard::Refused(text) => (News::Error(text), None),
        };
        self.tell_session(session, place, waiter, news, token);
    }

    fn tell_session(
        &mut self,
        session: Name,
        place: &Place,
        waiter: &TwinWaiter,
        news: News,
        token: Option<i64>,
    ) {
        let place = waiter.hears_under(place).clone();
        let of = (place, waiter.owner.clone(), waiter.mode);
        self.life.tell(session, event_of(&of, news, token));
    }

    /// Takes out all waiters for which `of` is true, each with the lock under which it hears.
    fn take_out_all(&mut self, of: impl Fn(&TwinWaiter) -> bool) -> Vec<(Place, TwinWaiter)> {
        let waiters = self.lines.values().flatten();
        let seats: BTreeSet<usize> = waiters
            .filter(|waiter| of(waiter))
            .map(|waiter| waiter.seat)
            .collect();
        let out = seats.into_iter().map(|seat| {
            let place = self.place_of(seat);
            (place, self.withdraw(seat).unwrap())
        });
        out.collect()
    }

    pub(crate) fn note_peak(&mut self) {
        self.tally.waiters_peak = self.tally.waiters_peak.max(self.waiting());
    }

    /// Its place in the queue; of several the largest, 1 is next.
    pub(crate) fn position(&self, seat: usize) -> i64 {
        let places = self.lines.values().filter_map(|line| {
            let at = line.iter().position(|waiter| waiter.seat == seat)?;
            i64::try_from(at + 1).ok()
        });
        places.max().unwrap_or(0)
    }

    /// Takes a waiter out that gets nothing. The timer looks at the first waiter after it.
    fn withdraw(&mut self, seat: usize) -> Option<TwinWaiter> {
        let first_in = |place: &Place| {
            let first = self.lines.get(place).and_then(|line| line.first());
            first.is_some_and(|first| first.seat == seat)
        };
        self.changed.retain(|(place, _)| !first_in(place));
        self.take_out(seat)
    }

    /// Takes somebody out of all queues in which it stands.
    fn take_out(&mut self, seat: usize) -> Option<TwinWaiter> {
        let mut out = None;
        for line in self.lines.values_mut() {
            if let Some(at) = line.iter().position(|waiter| waiter.seat == seat) {
                out = Some(line.remove(at));
            }
        }
        out
    }
}

fn stale(known: u64) -> Reply {
    Reply::Refused(format!(
        "STALE a later connection has named EPOCH {known} for this session"
    ))
}

/// The reply to a caller that waits, at this place in the queue.
fn waits_at(asked: PermitsRequest<'_>, position: usize) -> Reply {
    match asked.waits {
        Waits::Queue(_) => Reply::Queued {
            position: i64::try_from(position).unwrap(),
        },
        Waits::Block(_) | Waits::No => Reply::Waits,
    }
}

/// The field of the lock's hash that counts an owner's holds of a mode.
pub(crate) fn field_of(owner: &[u8], mode: Mode) -> Vec<u8> {
    match mode {
        Mode::Plain | Mode::Read => owner.to_vec(),
        Mode::Write => writer_field(owner),
        Mode::Permits => crate::no_permits(),
    }
}
