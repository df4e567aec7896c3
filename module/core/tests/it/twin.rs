//! The naive lock that always tells the truth: a list of waiters, searched from the front, and the
//! contract's sentences in the order in which they stand there.
//!
//! It shares no decision with the core: it writes its own keyspace by itself, and its error texts
//! are its own. Where the core and the twin disagree, one of them is wrong.

use crate::circles::{Graph, Standing};
use crate::keyspace::{Entry, Fields, Keyspace, Place, Value, owners};
use crate::life::{Life, Name, News, TwinEnding, TwinEvent};
use rlock_core::{Mode, Now};
use std::collections::{BTreeMap, BTreeSet};

mod several;
mod wanted;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
const WRONG_KIND: &str = "WRONGKIND the key holds a read-write lock, not a plain one";
const OVERFLOW: &str = "ERR hold count must stay within 1 to 2147483647";
const MALFORMED: &str = "ERR hold count of this owner is not an integer from 1 to 2147483647, \
                         it was written by somebody else";
const NO_SESSION: &str =
    "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first";
const NOT_THEIRS: &str = "NOPERM this session belongs to another ACL user, who began it";
const DEMOTED: &str = "UNBLOCKED force unblock from blocking operation, \
                       instance state changed (master -> replica?)";
const WAITING: &str = "WAITING this owner waits for the lock already, ONCE takes that wait over";
const NO_MEMORY: &str = "OOM command not allowed when used memory > 'maxmemory'.";
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
    Granted {
        count: i64,
        token: i64,
        /// Of several locks at once, each with the token of its hold.
        several: Vec<(Place, i64)>,
    },
    NotAcquired {
        ttl_ms: i64,
    },
    Refused(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TwinWaiter {
    pub(crate) owner: Vec<u8>,
    pub(crate) seat: usize,
    /// Whether it hears by an event of its session, and not on its own connection.
    pub(crate) is_queued: bool,
    pub(crate) session: Option<Name>,
    pub(crate) wanted: bool,
    pub(crate) lease_ms: i64,
    pub(crate) since: i64,
    /// On the monotonic clock; none without limit.
    pub(crate) wait_end: Option<i64>,
    /// Of a wait for several locks, all of them, as they were named: it stands in the line of each.
    pub(crate) together: Option<Vec<Place>>,
}

impl TwinWaiter {
    /// The lock under which it hears, standing in the line of this one.
    pub(crate) fn hears_under<'a>(&'a self, place: &'a Place) -> &'a Place {
        let first = self.together.as_ref().and_then(|places| places.first());
        first.unwrap_or(place)
    }
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
    pub(crate) sessions_overflowed: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Twin {
    pub(crate) space: Keyspace,
    pub(crate) lines: BTreeMap<Place, Vec<TwinWaiter>>,
    pub(crate) heard: Vec<(usize, Heard)>,
    /// The unlock messages of this step, each with the way in which the lock was held.
    pub(crate) published: Vec<(Place, Mode)>,
    pub(crate) tally: Tally,
    /// Waiters that left because there is nothing to wait for.
    pub(crate) refused: u64,
    pub(crate) life: Life,
    /// Whether commands for a session ask to be told when the lock is wanted.
    pub(crate) asks_if_wanted: bool,
    /// Whether the core refused the present wait as one without an end.
    pub(crate) is_found: bool,
    last_token: i64,
    /// What is left of the time after the start in which nobody is granted a lock.
    pub(crate) delay_left_ms: i64,
    /// What was freed, or given to whom, in this step: who has waited for that is to have it within
    /// the step.
    changed: Vec<(Place, Option<Vec<u8>>)>,
    /// What was in the way of those who wait for several locks, by seat, when they were last looked
    /// at.
    blocked: BTreeMap<usize, Place>,
    /// Which of them could have had all then, but for the delay after the start.
    kept_back: BTreeSet<usize>,
    /// The locks that were freed in this turn by holds that had to end.
    pub(crate) freed: BTreeSet<Place>,
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
    pub(crate) lease_ms: i64,
    pub(crate) waits: Waits,
    pub(crate) session: Option<Name>,
    pub(crate) wanted: bool,
    pub(crate) once: bool,
    /// Whether it has waited, and is granted now.
    pub(crate) waited: bool,
    pub(crate) seat: usize,
    pub(crate) waiters_max: usize,
}

impl<'a> Asked<'a> {
    /// As it was sent by one whose wait is over.
    pub(super) fn granted(waiter: &'a TwinWaiter) -> Self {
        Self {
            owner: &waiter.owner,
            lease_ms: waiter.lease_ms,
            waits: Waits::No,
            session: waiter.session,
            wanted: waiter.wanted,
            once: false,
            waited: true,
            seat: waiter.seat,
            waiters_max: 0,
        }
    }
}

impl Twin {
    pub(crate) fn acquire(&mut self, place: &Place, asked: Asked<'_>, now: Now) -> Reply {
        let reply = self.take_or_wait(place, asked, now);
        self.asking(reply, place, asked.owner, asked.wanted)
    }

    fn take_or_wait(&mut self, place: &Place, asked: Asked<'_>, now: Now) -> Reply {
        if let Some(refused) = self
            .unfetched_grants(asked.session)
            .or(self.not_plain(place))
        {
            return refused;
        }
        // Newcomers never overtake a waiter.
        if self.is_free(place) && self.line(place).is_empty() && !self.is_delayed() {
            let token = self.mint(now);
            self.take(
                place,
                asked.owner,
                token,
                asked.lease_ms,
                asked.session,
                now,
            );
            return Reply::Held { count: 1, token };
        }
        match self.hold(place, asked.owner) {
            Some(value) => self.enter_again(place, &value, asked, now),
            None => self.wait_in_line(place, asked, now),
        }
    }

    fn enter_again(&mut self, place: &Place, value: &[u8], asked: Asked<'_>, now: Now) -> Reply {
        let Some(held) = hold_count(value) else {
            return Reply::Refused(MALFORMED.into());
        };
        if !asked.once && held >= COUNT_MAX {
            return Reply::Refused(OVERFLOW.into());
        }
        let (count, token) = self.reenter(place, held, asked, now);
        Reply::Held { count, token }
    }

    /// A free lock is taken, whatever is left in its hash.
    fn take(
        &mut self,
        place: &Place,
        owner: &[u8],
        token: i64,
        lease_ms: i64,
        session: Option<Name>,
        now: Now,
    ) {
        self.life.lose_all(place, None, now);
        self.space.delete(place);
        self.put(place, owner, 1, Some(token));
        self.start_lease(place, owner, lease_ms, now);
        self.bind(place, owner, session);
        self.tally.grants += 1;
        self.changed.push((place.clone(), Some(owner.to_vec())));
    }

    fn reenter(&mut self, place: &Place, held: i64, asked: Asked<'_>, now: Now) -> (i64, i64) {
        let count = if asked.once { held } else { held + 1 };
        let kept = self.token(place);
        let token = kept.unwrap_or_else(|| self.mint(now));
        self.put(place, asked.owner, count, Some(token));
        self.start_lease_of_holder(place, asked, now);
        if asked.once {
            self.life.confirm(place, asked.owner, true);
        }
        self.bind(place, asked.owner, asked.session);
        self.tally.reentries += 1;
        (count, token)
    }

    fn wait_in_line(&mut self, place: &Place, asked: Asked<'_>, now: Now) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_ms(place, now));
        let wait_ms = match asked.waits {
            Waits::No => {
                if !self.is_free(place) {
                    self.is_wanted_by(place, asked.owner);
                }
                return Reply::NotHeld { ttl_ms };
            }
            Waits::Block(ms) | Waits::Queue(ms) => ms,
        };
        let newcomer = TwinWaiter {
            owner: asked.owner.to_vec(),
            seat: asked.seat,
            is_queued: matches!(asked.waits, Waits::Queue(_)),
            session: asked.session,
            wanted: asked.wanted,
            lease_ms: asked.lease_ms,
            since: now.mono_ms,
            wait_end: (wait_ms > 0).then(|| now.mono_ms + wait_ms),
            together: None,
        };
        let is_queued = newcomer.is_queued;
        let at = match self.place_in_line(place, asked.owner) {
            Some(at) if asked.once => {
                self.move_to_seat(place, at, newcomer, ttl_ms);
                at
            }
            _ if self.waits_there(place, asked.owner) => {
                return Reply::Refused(WAITING.into());
            }
            _ if self.line(place).len() >= asked.waiters_max => {
                let max = asked.waiters_max;
                return Reply::Refused(format!(
                    "QUEUEFULL too many waiters, rlock.max-waiters-per-lock is {max}"
                ));
            }
            _ if self.closes_a_circle(std::slice::from_ref(place), asked.owner, None) => {
                self.tally.deadlocks_refused += 1;
                return Reply::Deadlock;
            }
            _ => {
                let line = self.lines.entry(place.clone()).or_default();
                line.push(newcomer);
                let at = line.len() - 1;
                if !self.is_free(place) {
                    self.is_wanted_by(place, asked.owner);
                }
                at
            }
        };
        let position = i64::try_from(at + 1).unwrap();
        if is_queued {
            Reply::Queued { position }
        } else {
            Reply::Waits
        }
    }

    /// An owner who asks again keeps its place; whoever sat there for it hears that it no longer
    /// waits, unless it is the very session that asks.
    fn move_to_seat(&mut self, place: &Place, at: usize, newcomer: TwinWaiter, ttl_ms: i64) {
        let line = self.lines.get_mut(place).unwrap();
        let since = line[at].since;
        let old = std::mem::replace(&mut line[at], TwinWaiter { since, ..newcomer });
        let new = line[at].clone();
        self.tally.cancels += 1;
        let stays = old.is_queued && new.is_queued && old.session == new.session;
        if !stays {
            self.tell(place, &old, Heard::NotAcquired { ttl_ms });
        }
    }

    fn closes_a_circle(&self, places: &[Place], owner: &[u8], joint: Option<usize>) -> bool {
        let mut graph = self.graph();
        if graph.is_in_a_circle(owner) {
            // One that others made by what they wrote stands without this wait.
            return self.is_found;
        }
        for place in places {
            let line = graph.lines.entry(place.clone()).or_default();
            let owner = owner.to_vec();
            line.push(Standing { owner, joint });
        }
        graph.is_in_a_circle(owner)
    }

    /// Who holds and who waits.
    pub(crate) fn graph(&self) -> Graph {
        let stands = |waiter: &TwinWaiter| Standing {
            owner: waiter.owner.clone(),
            joint: waiter.together.as_ref().map(|_| waiter.seat),
        };
        let standing = |line: &Vec<TwinWaiter>| line.iter().map(stands).collect();
        let lines = self.lines.iter();
        let held = self.space.entries().filter_map(|(place, entry)| {
            let Value::Hash(fields) = &entry.value else {
                return None;
            };
            let holders = owners(fields).map(<[u8]>::to_vec).collect();
            Some((place.clone(), holders))
        });
        Graph {
            lines: lines
                .map(|(place, line)| (place.clone(), standing(line)))
                .collect(),
            holders: held.collect(),
        }
    }

    pub(crate) fn release(
        &mut self,
        place: &Place,
        owner: &[u8],
        token: Option<i64>,
        lease_ms: Option<i64>,
        now: Now,
    ) -> Reply {
        let reply = self.give_back(place, owner, token, lease_ms, now);
        if let Reply::Number(_) = reply {
            self.tally.releases += 1;
        }
        reply
    }

    fn give_back(
        &mut self,
        place: &Place,
        owner: &[u8],
        token: Option<i64>,
        lease_ms: Option<i64>,
        now: Now,
    ) -> Reply {
        if let Some(refused) = self.not_plain(place) {
            return refused;
        }
        let Some(value) = self.hold(place, owner) else {
            return Reply::Null;
        };
        if token.is_some() && token != self.token(place) {
            return Reply::Null;
        }
        let Some(held) = hold_count(&value) else {
            return Reply::Refused(MALFORMED.into());
        };
        if held > 1 {
            self.put(place, owner, held - 1, None);
            if let Some(lease_ms) = lease_ms {
                self.start_lease(place, owner, lease_ms, now);
            }
            self.bind(place, owner, None);
        } else {
            self.end_hold_of(place, owner, now);
        }
        Reply::Number(held - 1)
    }

    pub(super) fn end_hold_of(&mut self, place: &Place, owner: &[u8], now: Now) {
        self.life.unbind(place, owner);
        if self.others(place, owner) {
            self.fields_mut(place).unwrap().remove(owner);
        } else {
            self.end_hold(place, Mode::Plain, now);
        }
    }

    pub(crate) fn renew(
        &mut self,
        place: &Place,
        owner: &[u8],
        lease_ms: i64,
        token: Option<i64>,
        session: Option<Name>,
        now: Now,
    ) -> Reply {
        let reply = self.renew_one(place, owner, lease_ms, token, session, now);
        let asks = self.asks_if_wanted(session);
        self.asking(reply, place, owner, asks)
    }

    pub(super) fn renew_one(
        &mut self,
        place: &Place,
        owner: &[u8],
        lease_ms: i64,
        token: Option<i64>,
        session: Option<Name>,
        now: Now,
    ) -> Reply {
        if let Some(refused) = self.unfetched_grants(session).or(self.not_plain(place)) {
            return refused;
        }
        let right_hold = token.is_none() || token == self.token(place);
        if self.hold(place, owner).is_none() || !right_hold {
            self.tally.renewals_lost += 1;
            return Reply::Number(0);
        }
        self.start_lease(place, owner, lease_ms, now);
        self.life.confirm(place, owner, false);
        self.bind(place, owner, session);
        self.tally.renewals += 1;
        Reply::Number(1)
    }

    pub(crate) fn cancel(&mut self, place: &Place, owner: &[u8], now: Now) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_ms(place, now));
        let line = self.line(place).to_vec();
        let own: Vec<_> = line.iter().filter(|of| of.owner == owner).collect();
        for waiter in &own {
            self.withdraw(waiter.seat);
            self.tell(place, waiter, Heard::NotAcquired { ttl_ms });
            self.tally.cancels += 1;
        }
        Reply::Number(i64::try_from(own.len()).unwrap())
    }

    pub(crate) fn break_hold(&mut self, place: &Place, now: Now) -> Reply {
        if self.is_other_type(place) {
            return Reply::Refused(WRONG_TYPE.into());
        }
        if self.freed.contains(place) {
            // The hold that was meant has ended already.
            return Reply::Number(1);
        }
        if self.is_free(place) {
            return Reply::Number(0);
        }
        let held_as = match self.not_plain(place) {
            Some(_) => Mode::Write,
            None => Mode::Plain,
        };
        self.tally.breaks += 1;
        self.life.lose_all(place, Some("broken"), now);
        self.end_hold(place, held_as, now);
        Reply::Number(1)
    }

    /// Who has the lock, each with the token.
    pub(crate) fn holds_of(&self, place: &Place) -> Vec<(Vec<u8>, Option<i64>)> {
        let entry = self.space.get(place).map(|entry| &entry.value);
        let Some(Value::Hash(fields)) = entry else {
            return Vec::new();
        };
        let token = self.token(place);
        owners(fields)
            .map(|owner| (owner.to_vec(), token))
            .collect()
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

    /// A connection is gone: the sessions that lived by it lose their waiters and what nobody
    /// fetched. Whether there were any.
    pub(crate) fn client_gone(&mut self, client: u64, now: Now) -> bool {
        self.life.untold_ends.retain(|(of, _)| *of != client);
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
            // A queued one has nobody left to hear of it.
            if !waiter.is_queued {
                self.tell(&place, &waiter, Heard::Refused(NO_SESSION.into()));
            }
            self.tally.departures += 1;
        }
    }

    /// Sessions that left too much unfetched end as if their connections had closed.
    pub(crate) fn overflow(&mut self, now: Now) -> Vec<Name> {
        let names = self.life.overflowing();
        for name in &names {
            let client = self.life.client_of(*name);
            let untold = client.map(|client| (client, *name));
            self.life.untold_ends.extend(untold);
            self.detach(*name, now);
            self.tally.sessions_overflowed += 1;
        }
        names
    }

    /// The server became a replica: nobody waits there, and what is held is not ours.
    pub(crate) fn demoted(&mut self) {
        for hold in std::mem::take(&mut self.life.holds).into_values() {
            let client = self.life.client_of(hold.session);
            let untold = client.map(|client| (client, hold.session));
            self.life.untold_ends.extend(untold);
        }
        self.life.endings.clear();
        for (place, waiter) in self.take_out_all(|_| true) {
            self.tell(&place, &waiter, Heard::Refused(DEMOTED.into()));
            self.refused += 1;
        }
    }

    /// A hold that nobody is left to know of ends, if it is still there.
    pub(crate) fn end(&mut self, ending: &TwinEnding, now: Now) -> Result<(), String> {
        self.life.is_to_end(ending)?;
        let TwinEnding {
            place,
            owner,
            token,
            whole,
        } = ending;
        let is_same = token.is_none() || *token == self.token(place);
        if self.hold(place, owner).is_none() || !is_same {
            return Ok(());
        }
        let is_last = !self.others(place, owner);
        if *whole {
            self.freed.extend(is_last.then(|| place.clone()));
            self.end_hold_of(place, owner, now);
            self.tally.session_releases += 1;
        } else if let Reply::Number(left) = self.give_back(place, owner, *token, None, now) {
            self.freed
                .extend((is_last && left == 0).then(|| place.clone()));
            self.tally.taken_back += 1;
        }
        Ok(())
    }

    /// Somebody looks at the key, for the session that has a hold there.
    pub(crate) fn check_hold(&mut self, place: &Place, owner: &[u8], now: Now) {
        let token = self.hold(place, owner).map(|_| self.token(place));
        let ends_at = self.space.get(place).and_then(|entry| entry.ends_at);
        let at = (place.clone(), owner.to_vec());
        match self.life.holds.get_mut(&at) {
            Some(hold) if token.is_some_and(|token| hold.is(token)) => hold.ends_at = ends_at,
            _ => self.life.lose(place, owner, None, now),
        }
    }

    /// Somebody looks at the key, for those in line.
    pub(crate) fn settle(&mut self, place: &Place, now: Now) {
        let Some(first) = self.line(place).first().map(|first| first.owner.clone()) else {
            return;
        };
        match self.not_plain(place) {
            Some(Reply::Refused(text)) => {
                // Another type is nothing to wait for. Another kind may be gone again one day, but
                // not for those who wait for others with it.
                let ends = |of: &&TwinWaiter| text == WRONG_TYPE || of.together.is_some();
                let line = self.line(place).to_vec();
                for waiter in line.iter().filter(ends) {
                    self.refuse_wait(place, waiter, &text);
                    // Where it was first at another lock, somebody looks a moment later.
                    let others = waiter.together.clone().unwrap_or_default();
                    self.changed.retain(|(place, _)| !others.contains(place));
                }
                self.tell_who_keeps_out(place, None);
            }
            Some(_) => {}
            None if self.is_free(place) => self.find_free(place, now),
            // It is looked at by itself.
            None if self.line(place)[0].together.is_some() => {}
            // What one holds is re-entered, never waited for.
            None => {
                let held = self
                    .hold(place, &first)
                    .and_then(|value| hold_count(&value));
                if held.is_some_and(|held| held < COUNT_MAX) {
                    self.published.push((place.clone(), Mode::Plain));
                    self.grant_first(place, now);
                } else {
                    self.tell_who_keeps_out(place, None);
                }
            }
        }
    }

    pub(crate) fn start_tokens(&mut self, guard_ms: i64, now: Now) {
        self.last_token = self.last_token.max(now.wall_us + guard_ms * 1000);
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

    /// For which lock somebody waits, of several the first; any if for none.
    pub(crate) fn place_of(&self, seat: usize) -> Place {
        let mut all = self.lines.iter().flat_map(|(place, line)| {
            let with_place = move |waiter| (place, waiter);
            line.iter().map(with_place)
        });
        let found = all.find(|(_, waiter)| waiter.seat == seat);
        found.map_or_else(Place::default, |(place, waiter)| {
            waiter.hears_under(place).clone()
        })
    }

    pub(crate) fn waiting(&self) -> u64 {
        let waiters: usize = self.lines.values().map(Vec::len).sum();
        u64::try_from(waiters).unwrap()
    }

    /// A hash with nobody in it is free, and so is a key that is not there.
    pub(crate) fn is_free(&self, place: &Place) -> bool {
        match self.space.get(place).map(|entry| &entry.value) {
            None => true,
            Some(Value::Hash(fields)) => owners(fields).next().is_none(),
            Some(Value::Text) => false,
        }
    }

    pub(crate) fn is_other_type(&self, place: &Place) -> bool {
        matches!(self.space.get(place), Some(entry) if entry.value == Value::Text)
    }

    pub(crate) fn token(&self, place: &Place) -> Option<i64> {
        let value = self.field(place, b"fence")?;
        let digits = str::from_utf8(value.strip_prefix(b"t")?).ok()?;
        let number: i64 = digits.parse().ok()?;
        (number > 0 && digits == number.to_string()).then_some(number)
    }

    pub(crate) fn ttl_ms(&self, place: &Place, now: Now) -> i64 {
        match self.space.get(place) {
            Some(entry) if !self.is_free(place) && !self.is_other_type(place) => {
                entry.ends_at.map_or(-1, |end| end - now.wall_ms())
            }
            _ => 0,
        }
    }

    fn field(&self, place: &Place, name: &[u8]) -> Option<Vec<u8>> {
        match &self.space.get(place)?.value {
            Value::Hash(fields) => fields.get(name).cloned(),
            Value::Text => None,
        }
    }

    /// What the owner holds, as a plain lock.
    fn hold(&self, place: &Place, owner: &[u8]) -> Option<Vec<u8>> {
        let is_plain = self.field(place, b"mode").is_none();
        self.field(place, owner).filter(|_| is_plain)
    }

    fn others(&self, place: &Place, owner: &[u8]) -> bool {
        match self.space.get(place).map(|entry| &entry.value) {
            Some(Value::Hash(fields)) => owners(fields).any(|of| of != owner),
            _ => false,
        }
    }

    fn not_plain(&self, place: &Place) -> Option<Reply> {
        if self.is_other_type(place) {
            return Some(Reply::Refused(WRONG_TYPE.into()));
        }
        let mode = self.field(place, b"mode");
        mode.filter(|_| !self.is_free(place))
            .map(|_| Reply::Refused(WRONG_KIND.into()))
    }

    /// An ACQUIRE or RENEW for another user's session, or for one that nobody listens to.
    fn unfetched_grants(&self, session: Option<Name>) -> Option<Reply> {
        let name = session?;
        let text = match () {
            () if self.life.is_of_another(name) => NOT_THEIRS,
            () if !self.life.is_listened(name) => NO_SESSION,
            () => return None,
        };
        Some(Reply::Refused(text.into()))
    }

    /// Whether EVENTS is refused: for another user's session, or for one that would begin.
    pub(crate) fn cannot_attach(&mut self, name: Name, client: u64) -> Option<Reply> {
        if self.life.untold_ends.remove(&(client, name)) {
            return Some(Reply::Refused(NO_SESSION.into()));
        }
        let limits = self.life.limits;
        let full = format!(
            "SESSIONSFULL too many sessions, rlock.max-sessions is {}",
            limits.sessions
        );
        let text = match () {
            () if self.life.is_of_another(name) => NOT_THEIRS,
            () if self.life.sessions.contains_key(&name) => return None,
            () if limits.out_of_memory => NO_MEMORY,
            () if self.life.sessions.len() >= usize::try_from(limits.sessions).unwrap() => &full,
            () => return None,
        };
        Some(Reply::Refused(text.into()))
    }

    fn place_in_line(&self, place: &Place, owner: &[u8]) -> Option<usize> {
        self.line(place)
            .iter()
            .position(|waiter| waiter.owner == owner && waiter.together.is_none())
    }

    /// An owner stands in a line once.
    fn waits_there(&self, place: &Place, owner: &[u8]) -> bool {
        self.line(place).iter().any(|waiter| waiter.owner == owner)
    }

    // --- Changing --------------------------------------------------------------------------------

    fn mint(&mut self, now: Now) -> i64 {
        self.last_token = (self.last_token + 1).max(now.wall_us);
        self.last_token
    }

    fn end_hold(&mut self, place: &Place, held_as: Mode, now: Now) {
        self.space.delete(place);
        self.pass_on(place, held_as, now);
    }

    pub(super) fn pass_on(&mut self, place: &Place, held_as: Mode, now: Now) {
        self.published.push((place.clone(), held_as));
        if self.is_delayed() {
            return;
        }
        self.changed.push((place.clone(), None));
        if self.is_for_one_lock(place) && !self.first_is_ending(place) {
            self.grant_first(place, now);
        }
    }

    /// Whether a hold of the first in the queue must end before it can be granted.
    fn first_is_ending(&self, place: &Place) -> bool {
        let first = self.line(place).first();
        let mut endings = self.life.endings.iter();
        endings.any(|of| of.place == *place && first.is_some_and(|first| first.owner == of.owner))
    }

    /// Somebody finds the lock free: who had it has lost it, and who is first in line has it.
    pub(crate) fn find_free(&mut self, place: &Place, now: Now) {
        if self.is_free(place) {
            self.life.lose_all(place, None, now);
            if self.is_delayed() {
                return;
            }
            self.changed.push((place.clone(), None));
            if self.is_for_one_lock(place) {
                self.published.push((place.clone(), Mode::Plain));
                self.space.delete(place);
                self.grant_first(place, now);
            }
        }
    }

    fn bind(&mut self, place: &Place, owner: &[u8], session: Option<Name>) {
        let ends_at = self.space.get(place).and_then(|entry| entry.ends_at);
        let token = self.token(place);
        self.life.bind(place, owner, session, token, ends_at);
    }

    /// A waiter hears how its wait ended.
    fn tell(&mut self, place: &Place, waiter: &TwinWaiter, heard: Heard) {
        let Some(session) = waiter.session.filter(|_| waiter.is_queued) else {
            self.heard.push((waiter.seat, heard));
            return;
        };
        let news = match heard {
            Heard::Granted { token, several, .. } => News::Granted { token, several },
            Heard::NotAcquired { ttl_ms } => News::Timeout(ttl_ms),
            Heard::Refused(text) => News::Error(text),
        };
        let place = waiter.hears_under(place);
        self.life.tell(session, news, place, &waiter.owner);
    }

    /// The first in line has it.
    fn grant_first(&mut self, place: &Place, now: Now) {
        let waiter = self.lines.get_mut(place).unwrap().remove(0);
        let owner = waiter.owner.clone();
        let held = self.hold(place, &owner);
        let kept = held.as_ref().and_then(|_| self.token(place));
        let token = kept.unwrap_or_else(|| self.mint(now));
        let count = held.map_or(0, |value| hold_count(&value).unwrap()) + 1;
        self.put(place, &owner, count, Some(token));
        if count == 1 {
            self.start_lease(place, &owner, waiter.lease_ms, now);
        } else {
            self.start_lease_of_holder(place, Asked::granted(&waiter), now);
        }
        let heard = Heard::Granted {
            count,
            token,
            several: Vec::new(),
        };
        self.tell(place, &waiter, heard);
        self.tally.handovers += 1;
        if count == 1 {
            self.tally.grants += 1;
        } else {
            self.tally.reentries += 1;
        }
        self.bind(place, &owner, waiter.session);
        if waiter.wanted {
            self.ask_if_wanted(place, &owner);
        }
        self.changed.push((place.clone(), Some(owner)));
    }

    fn put(&mut self, place: &Place, owner: &[u8], count: i64, token: Option<i64>) {
        if self.space.get(place).is_none() {
            let value = Value::Hash(Fields::new());
            let ends_at = None;
            self.space.set(place, Entry { value, ends_at });
        }
        let fields = self.fields_mut(place).unwrap();
        fields.insert(owner.to_vec(), count.to_string().into_bytes());
        if let Some(token) = token {
            fields.insert(b"fence".to_vec(), format!("t{token}").into_bytes());
        }
    }

    /// Whoever has waited keeps what is left, if that is more.
    fn start_lease_of_holder(&mut self, place: &Place, asked: Asked<'_>, now: Now) {
        let left = self.space.get(place).unwrap().ends_at;
        self.start_lease(place, asked.owner, asked.lease_ms, now);
        let entry = self.space.get_mut(place).unwrap();
        if asked.waited && left.is_none_or(|end| Some(end) > entry.ends_at) {
            entry.ends_at = left;
        }
    }

    /// Nothing cuts short what others have in the same hash.
    fn start_lease(&mut self, place: &Place, owner: &[u8], lease_ms: i64, now: Now) {
        let others = self.others(place, owner);
        let wanted = now.wall_ms() + lease_ms;
        let entry = self.space.get_mut(place).unwrap();
        entry.ends_at = match entry.ends_at {
            _ if !others => Some(wanted),
            Some(end) => Some(end.max(wanted)),
            None => None,
        };
    }

    fn fields_mut(&mut self, place: &Place) -> Option<&mut Fields> {
        match &mut self.space.get_mut(place)?.value {
            Value::Hash(fields) => Some(fields),
            Value::Text => None,
        }
    }

    /// Takes out all of whom this is true, each with the lock under which it hears.
    fn take_out_all(&mut self, of: impl Fn(&TwinWaiter) -> bool) -> Vec<(Place, TwinWaiter)> {
        let seats: BTreeSet<usize> = self
            .lines
            .values()
            .flatten()
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

    /// Its place in the line; of several the largest, 1 is next.
    pub(crate) fn position(&self, seat: usize) -> i64 {
        let places = self.lines.values().filter_map(|line| {
            let at = line.iter().position(|waiter| waiter.seat == seat)?;
            i64::try_from(at + 1).ok()
        });
        places.max().unwrap_or(0)
    }

    /// Takes one out that gets nothing. Who is first after it is for the timer to look at.
    fn withdraw(&mut self, seat: usize) -> Option<TwinWaiter> {
        let first_in = |place: &Place| {
            let first = self.lines.get(place).and_then(|line| line.first());
            first.is_some_and(|first| first.seat == seat)
        };
        self.changed.retain(|(place, _)| !first_in(place));
        self.take_out(seat)
    }

    /// Takes somebody out of all lines in which it stands.
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

/// A hold count is a decimal number of 1 or more, as a computer writes it.
fn hold_count(value: &[u8]) -> Option<i64> {
    let text = str::from_utf8(value).ok()?;
    let number: i64 = text.parse().ok()?;
    (number >= 1 && number.to_string() == text).then_some(number)
}
