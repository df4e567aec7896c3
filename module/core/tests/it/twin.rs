//! The naive lock that always tells the truth: a list of waiters, searched from the front, and the
//! contract's sentences in the order in which they stand there.
//!
//! It shares no decision with the core: it writes its own keyspace by itself, and its error texts
//! are its own. Where the core and the twin disagree, one of them is wrong.

use crate::keyspace::{Entry, Fields, Keyspace, Place, Value, owners};
use rlock_core::Now;
use std::collections::BTreeMap;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";
const WRONG_KIND: &str = "WRONGKIND the key holds a read-write lock, not a plain one";
const OVERFLOW: &str = "ERR hold count must stay within 1 to 2147483647";
const MALFORMED: &str = "ERR hold count of this owner is not an integer from 1 to 2147483647, \
                         it was written by somebody else";
const COUNT_MAX: i64 = 2_147_483_647;

/// What a client or the operator is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Held { count: i64, token: i64 },
    NotHeld { ttl_ms: i64 },
    Waits,
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
    pub(crate) seat: usize,
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
}

#[derive(Debug, Default)]
pub(crate) struct Twin {
    pub(crate) space: Keyspace,
    pub(crate) lines: BTreeMap<Place, Vec<TwinWaiter>>,
    pub(crate) heard: Vec<(usize, Heard)>,
    pub(crate) published: u64,
    pub(crate) tally: Tally,
    last_token: i64,
}

/// An ACQUIRE as it was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) owner: &'a [u8],
    pub(crate) lease_ms: i64,
    pub(crate) block_ms: Option<i64>,
    pub(crate) once: bool,
    pub(crate) seat: usize,
    pub(crate) waiters_max: usize,
}

impl Twin {
    pub(crate) fn acquire(&mut self, place: &Place, asked: Asked<'_>, now: Now) -> Reply {
        if let Some(refused) = self.not_plain(place) {
            return refused;
        }
        // Newcomers never overtake a waiter.
        if self.is_free(place) && !self.line(place).is_empty() {
            self.grant_first(place, now);
        }
        if self.is_free(place) {
            let token = self.mint(now);
            self.put(place, asked.owner, 1, Some(token));
            self.start_lease(place, asked.owner, asked.lease_ms, now);
            self.tally.grants += 1;
            return Reply::Held { count: 1, token };
        }
        match self.field(place, asked.owner) {
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
        let count = if asked.once { held } else { held + 1 };
        let kept = self.token(place);
        let token = kept.unwrap_or_else(|| self.mint(now));
        self.put(place, asked.owner, count, Some(token));
        self.start_lease(place, asked.owner, asked.lease_ms, now);
        self.tally.reentries += 1;
        Reply::Held { count, token }
    }

    fn wait_in_line(&mut self, place: &Place, asked: Asked<'_>, now: Now) -> Reply {
        let ttl_ms = self.ttl_ms(place, now);
        let Some(block_ms) = asked.block_ms else {
            return Reply::NotHeld { ttl_ms };
        };
        let newcomer = TwinWaiter {
            owner: asked.owner.to_vec(),
            seat: asked.seat,
            lease_ms: asked.lease_ms,
            since: now.mono_ms,
            wait_end: (block_ms > 0).then(|| now.mono_ms + block_ms),
        };
        let line = self.lines.entry(place.clone()).or_default();
        let has_place = line.iter().position(|waiter| waiter.owner == asked.owner);
        match has_place {
            Some(at) if asked.once => {
                let since = line[at].since;
                let old = std::mem::replace(&mut line[at], TwinWaiter { since, ..newcomer });
                self.heard.push((old.seat, Heard::NotAcquired { ttl_ms }));
                self.tally.cancels += 1;
            }
            _ if line.len() >= asked.waiters_max => {
                let max = asked.waiters_max;
                return Reply::Refused(format!(
                    "QUEUEFULL too many waiters, rlock.max-waiters-per-lock is {max}"
                ));
            }
            _ => line.push(newcomer),
        }
        self.tally.waiters_peak = self.tally.waiters_peak.max(self.waiting());
        Reply::Waits
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
        let Some(value) = self.field(place, owner) else {
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
        } else if self.others(place, owner) {
            self.fields_mut(place).unwrap().remove(owner);
        } else {
            self.end_hold(place, now);
        }
        Reply::Number(held - 1)
    }

    pub(crate) fn renew(
        &mut self,
        place: &Place,
        owner: &[u8],
        lease_ms: i64,
        token: Option<i64>,
        now: Now,
    ) -> Reply {
        if let Some(refused) = self.not_plain(place) {
            return refused;
        }
        let right_hold = token.is_none() || token == self.token(place);
        if self.field(place, owner).is_none() || !right_hold {
            self.tally.renewals_lost += 1;
            return Reply::Number(0);
        }
        self.start_lease(place, owner, lease_ms, now);
        self.tally.renewals += 1;
        Reply::Number(1)
    }

    pub(crate) fn cancel(&mut self, place: &Place, owner: &[u8], now: Now) -> Reply {
        let ttl_ms = self.ttl_ms(place, now);
        let line = self.lines.entry(place.clone()).or_default();
        let (own, rest): (Vec<_>, Vec<_>) = line.drain(..).partition(|w| w.owner == owner);
        *line = rest;
        for waiter in &own {
            let heard = Heard::NotAcquired { ttl_ms };
            self.heard.push((waiter.seat, heard));
            self.tally.cancels += 1;
        }
        Reply::Number(i64::try_from(own.len()).unwrap())
    }

    pub(crate) fn break_hold(&mut self, place: &Place, now: Now) -> Reply {
        if let Some(refused) = self.not_plain(place) {
            return refused;
        }
        if self.is_free(place) {
            if !self.line(place).is_empty() {
                self.grant_first(place, now);
            }
            return Reply::Number(0);
        }
        self.tally.breaks += 1;
        self.end_hold(place, now);
        Reply::Number(1)
    }

    // --- What happens without a command ----------------------------------------------------------

    pub(crate) fn depart(&mut self, seat: usize) {
        self.take_out(seat);
        self.tally.departures += 1;
    }

    pub(crate) fn time_out(&mut self, seat: usize, now: Now) -> Result<(), String> {
        let waiter = self.take_out(seat);
        self.tally.timeouts += 1;
        match waiter.and_then(|waiter| waiter.wait_end) {
            Some(end) if end <= now.mono_ms => Ok(()),
            _ => Err(format!("seat {seat} was timed out and had time left")),
        }
    }

    pub(crate) fn take_back(&mut self, place: &Place, owner: &[u8], token: i64, now: Now) {
        if let Reply::Number(_) = self.give_back(place, owner, Some(token), None, now) {
            self.tally.taken_back += 1;
        }
    }

    /// Somebody looks at the key, for those in line.
    pub(crate) fn settle(&mut self, place: &Place, now: Now) {
        let Some(first) = self.line(place).first().map(|first| first.owner.clone()) else {
            return;
        };
        match self.not_plain(place) {
            Some(Reply::Refused(text)) if text == WRONG_TYPE => {
                for waiter in self.lines.remove(place).unwrap_or_default() {
                    let heard = Heard::Refused(text.clone());
                    self.heard.push((waiter.seat, heard));
                }
            }
            Some(_) => {}
            None if self.is_free(place) => self.grant_first(place, now),
            // What one holds is re-entered, never waited for.
            None => {
                let held = self
                    .field(place, &first)
                    .and_then(|value| hold_count(&value));
                if held.is_some_and(|held| held < COUNT_MAX) {
                    self.grant_first(place, now);
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

    pub(crate) fn waiting(&self) -> u64 {
        let waiters: usize = self.lines.values().map(Vec::len).sum();
        u64::try_from(waiters).unwrap()
    }

    /// A hash with nobody in it is free, and so is a key that is not there.
    pub(crate) fn is_free(&self, place: &Place) -> bool {
        match self.space.get(place).map(|entry| &entry.value) {
            None => true,
            Some(Value::Hash(fields)) => fields.keys().all(|field| field == b"fence"),
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
        mode.map(|_| Reply::Refused(WRONG_KIND.into()))
    }

    // --- Changing --------------------------------------------------------------------------------

    fn mint(&mut self, now: Now) -> i64 {
        self.last_token = (self.last_token + 1).max(now.wall_us);
        self.last_token
    }

    fn end_hold(&mut self, place: &Place, now: Now) {
        self.space.delete(place);
        if self.line(place).is_empty() {
            self.published += 1;
        } else {
            self.grant_first(place, now);
        }
    }

    /// The first in line has it, and so have those of the same owner directly behind it.
    fn grant_first(&mut self, place: &Place, now: Now) {
        let owner = self.line(place)[0].owner.clone();
        let holds = self.field(place, &owner).is_some();
        let kept = if holds { self.token(place) } else { None };
        let token = kept.unwrap_or_else(|| self.mint(now));
        self.published += 1;
        let before = self.space.get(place).and_then(|entry| entry.ends_at);
        loop {
            let waiter = self.lines.get_mut(place).unwrap().remove(0);
            let held = self.field(place, &owner);
            let held = held.map_or(0, |value| hold_count(&value).unwrap());
            let count = held + 1;
            self.put(place, &owner, count, Some(token));
            // What others have in the same hash is what they had before; each entry starts the
            // owner's own lease anew.
            self.space.get_mut(place).unwrap().ends_at = before;
            self.start_lease(place, &owner, waiter.lease_ms, now);
            let heard = Heard::Granted { count, token };
            self.heard.push((waiter.seat, heard));
            self.tally.handovers += 1;
            if count == 1 {
                self.tally.grants += 1;
            } else {
                self.tally.reentries += 1;
            }
            let next = self.line(place).first();
            if count == COUNT_MAX || next.is_none_or(|next| next.owner != owner) {
                return;
            }
        }
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

    fn take_out(&mut self, seat: usize) -> Option<TwinWaiter> {
        let line = self
            .lines
            .values_mut()
            .find(|line| line.iter().any(|waiter| waiter.seat == seat))?;
        let at = line.iter().position(|waiter| waiter.seat == seat)?;
        Some(line.remove(at))
    }
}

/// A hold count is a decimal number of 1 or more, as a computer writes it.
fn hold_count(value: &[u8]) -> Option<i64> {
    let text = str::from_utf8(value).ok()?;
    let number: i64 = text.parse().ok()?;
    (number >= 1 && number.to_string() == text).then_some(number)
}
