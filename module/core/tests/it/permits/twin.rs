//! Permits as a list of holders and a list of waiters, walked from the start for every question.

use rlock_core::Now;
use std::collections::BTreeMap;

/// A hold of permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) permits: i64,
    /// In milliseconds of the wall clock.
    pub(crate) end: i64,
    pub(crate) token: i64,
    pub(crate) of_session: bool,
    /// Whether the session asks to hear when somebody waits for these permits.
    pub(crate) asks_if_wanted: bool,
}

/// A waiter for permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiter {
    pub(crate) owner: usize,
    pub(crate) permits: i64,
    pub(crate) of: Option<i64>,
    pub(crate) lease_ms: i64,
    pub(crate) of_session: bool,
    pub(crate) wanted: bool,
    /// The blocked client; none if the wait is queued for the session.
    pub(crate) client: Option<usize>,
    /// Monotonic, in milliseconds.
    pub(crate) wait_end: Option<i64>,
}

/// The reply to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Nothing,
    Held { permits: i64, token: i64 },
    NotHeld { ttl_ms: i64 },
    Waits,
    Queued,
    Number(i64),
    Null,
    Refused(String),
}

/// The message to a blocked client, or the event of this owner for its session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Heard {
    Granted { token: i64 },
    NotAcquired { ttl_ms: i64 },
    Refused(String),
    Lost(&'static str),
    Wanted(usize),
}

/// The receiver of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum To {
    Client(usize),
    Session(usize),
}

/// A request for permits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) owner: usize,
    pub(crate) permits: i64,
    pub(crate) of: Option<i64>,
    pub(crate) lease_ms: i64,
    pub(crate) wait_ms: Option<i64>,
    pub(crate) is_blocked: bool,
    pub(crate) of_session: bool,
    pub(crate) once: bool,
    pub(crate) client: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Twin {
    pub(crate) holds: BTreeMap<usize, Hold>,
    pub(crate) limit: Option<i64>,
    pub(crate) queue: Vec<Waiter>,
    pub(crate) told: Vec<(To, Heard)>,
    pub(crate) is_attached: bool,
    /// Whether commands for the session ask to be told when somebody waits.
    pub(crate) asks_if_wanted: bool,
    pub(crate) delay_end: i64,
    last_token: i64,
}

pub(crate) const WAITERS_MAX: usize = 4;

pub(crate) const HELD: &str =
    "HELD this owner holds permits of this key already, ONCE begins their lease anew";
pub(crate) const NO_LIMIT: &str =
    "NOLIMIT no limit is set with RLOCK.LIMIT, and PERMITS names none with OF";
const NO_SESSION: &str =
    "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first";
const WAITING: &str = "WAITING this owner waits for the lock already, ONCE takes that wait over";

fn refused(text: &str) -> Reply {
    Reply::Refused(text.into())
}

impl Twin {
    /// Whether `permits` more fit, when only these are held.
    fn fits<'h>(
        &self,
        permits: i64,
        of: Option<i64>,
        holds: impl Iterator<Item = &'h Hold>,
    ) -> bool {
        let out: i64 = holds.map(|hold| hold.permits).sum();
        let limit = self.limit.or(of);
        limit.is_some_and(|limit| out + permits <= limit)
    }

    /// When `permits` would fit if nobody renewed, as a caller is told that does not get them.
    pub(crate) fn ttl_ms(&self, permits: i64, of: Option<i64>, now: Now) -> i64 {
        let mut ends: Vec<i64> = self.holds.values().map(|hold| hold.end).collect();
        ends.push(now.wall_ms() - 1);
        ends.sort_unstable();
        let fits_after = |end: &&i64| {
            let left = self.holds.values().filter(|hold| hold.end > **end);
            self.fits(permits, of, left)
        };
        match ends.iter().find(fits_after) {
            Some(end) => (end - now.wall_ms()).max(self.delay_left(now)),
            None => -1,
        }
    }

    fn delay_left(&self, now: Now) -> i64 {
        (self.delay_end - now.mono_ms).max(0)
    }

    pub(crate) fn mint(&mut self, now: Now) -> i64 {
        self.last_token = (self.last_token + 1).max(now.wall_us);
        self.last_token
    }

    // --- Commands --------------------------------------------------------------------------------

    pub(crate) fn acquire(&mut self, request: &Request, now: Now) -> Reply {
        let reply = self.take_or_wait(request, now);
        if let Reply::Held { .. } = reply {
            self.ask_if_wanted(
                request.owner,
                request.of_session && self.asks_if_wanted,
                now,
            );
        }
        reply
    }

    fn take_or_wait(&mut self, request: &Request, now: Now) -> Reply {
        let Request {
            owner, permits, of, ..
        } = *request;
        if request.of_session && !self.is_attached {
            return refused(NO_SESSION);
        }
        if let Some(hold) = self.holds.get_mut(&owner) {
            if !request.once {
                return refused(HELD);
            }
            hold.end = now.wall_ms() + request.lease_ms;
            hold.of_session |= request.of_session;
            let (permits, token) = (hold.permits, hold.token);
            return Reply::Held { permits, token };
        }
        let is_same =
            |of: &Waiter| of.owner == owner && of.permits == permits && of.of == request.of;
        let place = self.queue.iter().position(is_same);
        let place = place.filter(|_| request.once);
        match self.limit.or(of) {
            _ if place.is_some() => {}
            None => return refused(NO_LIMIT),
            Some(limit) if permits > limit => {
                let text = format!("ERR permits must not exceed their limit, which is {limit}");
                return Reply::Refused(text);
            }
            Some(_) => {}
        }
        let fits = self.fits(permits, of, self.holds.values());
        if fits && self.queue.is_empty() && self.delay_left(now) == 0 {
            let token = self.grant(owner, permits, request.lease_ms, request.of_session, now);
            return Reply::Held { permits, token };
        }
        self.wait_in_queue(request, place, fits, now)
    }

    fn wait_in_queue(
        &mut self,
        request: &Request,
        place: Option<usize>,
        fits: bool,
        now: Now,
    ) -> Reply {
        let Request {
            owner, permits, of, ..
        } = *request;
        let ttl_ms = self.ttl_ms(permits, of, now);
        let Some(wait_ms) = request.wait_ms else {
            if !fits {
                self.tell_who_keeps_out(&[owner]);
            }
            return Reply::NotHeld { ttl_ms };
        };
        let waiter = Waiter {
            owner,
            permits,
            of,
            lease_ms: request.lease_ms,
            of_session: request.of_session,
            wanted: request.of_session && self.asks_if_wanted,
            client: request.is_blocked.then_some(request.client),
            wait_end: (wait_ms > 0).then(|| now.mono_ms + wait_ms),
        };
        match place {
            Some(place) => {
                let before = std::mem::replace(&mut self.queue[place], waiter);
                if before.client.is_some() || request.is_blocked {
                    self.tell(&before, Heard::NotAcquired { ttl_ms });
                }
            }
            None if self.queue.iter().any(|of| of.owner == owner) => return refused(WAITING),
            None if self.queue.len() == WAITERS_MAX => {
                let limit = "rlock.max-waiters-per-lock is";
                return Reply::Refused(format!(
                    "QUEUEFULL too many waiters, {limit} {WAITERS_MAX}"
                ));
            }
            None => {
                self.queue.push(waiter);
                if !fits {
                    self.tell_who_keeps_out(&[owner]);
                }
            }
        }
        if request.is_blocked {
            Reply::Waits
        } else {
            Reply::Queued
        }
    }

    pub(crate) fn release(
        &mut self,
        owner: usize,
        permits: i64,
        token: Option<i64>,
        lease_ms: Option<i64>,
        now: Now,
    ) -> Reply {
        let hold = self.holds.get_mut(&owner);
        let Some(hold) = hold.filter(|of| token.is_none_or(|token| token == of.token)) else {
            return Reply::Null;
        };
        if permits > hold.permits {
            return Reply::Refused(format!(
                "ERR permits given back must not exceed those held, whose number is {}",
                hold.permits
            ));
        }
        hold.permits -= permits;
        let left = hold.permits;
        match lease_ms {
            _ if left == 0 => {
                // The connection that gives it back is bound to no session.
                let hold = self.holds.remove(&owner).unwrap();
                let told = (To::Session(owner), Heard::Lost("released"));
                self.told.extend(hold.of_session.then_some(told));
            }
            Some(lease_ms) => hold.end = now.wall_ms() + lease_ms,
            None => {}
        }
        self.settle(now);
        Reply::Number(left)
    }

    pub(crate) fn renew(
        &mut self,
        owner: usize,
        lease_ms: i64,
        token: Option<i64>,
        of_session: bool,
        now: Now,
    ) -> Reply {
        if of_session && !self.is_attached {
            return refused(NO_SESSION);
        }
        let hold = self.holds.get_mut(&owner);
        let Some(hold) = hold.filter(|of| token.is_none_or(|token| token == of.token)) else {
            return Reply::Number(0);
        };
        hold.end = now.wall_ms() + lease_ms;
        hold.of_session |= of_session;
        self.ask_if_wanted(owner, of_session && self.asks_if_wanted, now);
        Reply::Number(1)
    }

    pub(crate) fn set_limit(&mut self, limit: i64, now: Now) -> Reply {
        let before = std::mem::replace(&mut self.limit, (limit > 0).then_some(limit));
        self.settle(now);
        Reply::Number(before.unwrap_or(0))
    }

    pub(crate) fn cancel(&mut self, owner: usize, now: Now) -> Reply {
        let place = self.queue.iter().position(|of| of.owner == owner);
        let Some(place) = place else {
            return Reply::Number(0);
        };
        let waiter = self.queue.remove(place);
        let ttl_ms = self.ttl_ms(waiter.permits, waiter.of, now);
        self.tell(&waiter, Heard::NotAcquired { ttl_ms });
        self.settle(now);
        Reply::Number(1)
    }

    pub(crate) fn break_holds(&mut self, now: Now) -> Reply {
        let broken = !self.holds.is_empty();
        self.lose_all("broken", now);
        self.settle(now);
        Reply::Number(broken.into())
    }

    // --- What happens without a command ----------------------------------------------------------

    /// All holds are gone, and nobody gave them back. Where a lease ends just now, that is why.
    pub(crate) fn lose_all(&mut self, why: &'static str, now: Now) {
        for (owner, hold) in std::mem::take(&mut self.holds) {
            if hold.of_session {
                let ends_now = why == "deleted" && hold.end <= now.wall_ms();
                let reason = if ends_now { "expired" } else { why };
                self.told.push((To::Session(owner), Heard::Lost(reason)));
            }
        }
    }

    /// A blocked client goes: it waits no more.
    pub(crate) fn depart(&mut self, client: usize, now: Now) {
        self.queue.retain(|of| of.client != Some(client));
        self.settle(now);
    }

    /// The hold with this token ends, if it is there.
    pub(crate) fn take_back(&mut self, owner: usize, token: i64, now: Now) {
        self.holds
            .retain(|of, hold| *of != owner || hold.token != token);
        self.settle(now);
    }

    /// The session ends, with its holds, its waits and its undelivered events.
    pub(crate) fn end_session(&mut self, now: Now) {
        self.is_attached = false;
        self.holds.retain(|_, hold| !hold.of_session);
        let waits = self.queue.clone();
        self.queue.retain(|of| !of.of_session);
        let blocked = waits.iter().filter(|of| of.of_session);
        for waiter in blocked.filter(|of| of.client.is_some()) {
            self.tell(waiter, Heard::Refused(NO_SESSION.into()));
        }
        self.told.retain(|(to, _)| matches!(to, To::Client(_)));
        self.settle(now);
    }

    /// Time has passed: waits that are over, and then leases.
    pub(crate) fn passed(&mut self, now: Now) {
        let is_over = |of: &Waiter| of.wait_end.is_some_and(|end| end <= now.mono_ms);
        let (over, left) = std::mem::take(&mut self.queue)
            .into_iter()
            .partition(is_over);
        self.queue = left;
        self.expire(now);
        let over: Vec<Waiter> = over;
        for waiter in over {
            let ttl_ms = self.ttl_ms(waiter.permits, waiter.of, now);
            self.tell(&waiter, Heard::NotAcquired { ttl_ms });
        }
        self.settle(now);
    }

    /// Leases that are over hold nothing.
    pub(crate) fn expire(&mut self, now: Now) {
        let is_over = |hold: &Hold| hold.end < now.wall_ms();
        let over = self.holds.iter().filter(|(_, hold)| is_over(hold));
        let lost = over.filter(|(_, hold)| hold.of_session);
        let lost = lost.map(|(owner, _)| (To::Session(*owner), Heard::Lost("expired")));
        self.told.extend(lost);
        self.holds.retain(|_, hold| !is_over(hold));
    }

    /// Strictly one after the other: the first waits until its permits fit.
    pub(crate) fn settle(&mut self, now: Now) {
        loop {
            let without = |of: &Waiter| self.limit.is_none() && of.of.is_none();
            if let Some(place) = self.queue.iter().position(without) {
                let waiter = self.queue.remove(place);
                self.tell(&waiter, Heard::Refused(NO_LIMIT.into()));
                continue;
            }
            let Some(first) = self.queue.first().cloned() else {
                return;
            };
            if self.holds.contains_key(&first.owner) {
                self.queue.remove(0);
                self.tell(&first, Heard::Refused(HELD.into()));
                continue;
            }
            let fits = self.fits(first.permits, first.of, self.holds.values());
            if !fits {
                let waiting: Vec<usize> = self.queue.iter().map(|of| of.owner).collect();
                return self.tell_who_keeps_out(&waiting);
            }
            if self.delay_left(now) > 0 {
                return;
            }
            self.queue.remove(0);
            let (owner, permits) = (first.owner, first.permits);
            let token = self.grant(owner, permits, first.lease_ms, first.of_session, now);
            self.tell(&first, Heard::Granted { token });
            let hold = self.holds.get_mut(&owner).unwrap();
            hold.asks_if_wanted = first.wanted;
        }
    }

    fn grant(
        &mut self,
        owner: usize,
        permits: i64,
        lease_ms: i64,
        of_session: bool,
        now: Now,
    ) -> i64 {
        let token = self.mint(now);
        let hold = Hold {
            permits,
            end: now.wall_ms() + lease_ms,
            token,
            of_session,
            asks_if_wanted: false,
        };
        self.holds.insert(owner, hold);
        token
    }

    /// A hold asks, and hears at once if the first in the queue cannot come in.
    fn ask_if_wanted(&mut self, owner: usize, asks: bool, now: Now) {
        if asks {
            self.holds.get_mut(&owner).unwrap().asks_if_wanted = true;
            self.settle(now);
        }
    }

    /// Tells each holder that asked that another of these owners does not get its permits.
    fn tell_who_keeps_out(&mut self, owners: &[usize]) {
        let length = self.queue.len();
        for (holder, hold) in &mut self.holds {
            let keeps_out = owners.iter().any(|owner| owner != holder);
            if hold.asks_if_wanted && keeps_out {
                hold.asks_if_wanted = false;
                self.told
                    .push((To::Session(*holder), Heard::Wanted(length)));
            }
        }
    }

    fn tell(&mut self, waiter: &Waiter, heard: Heard) {
        let to = waiter.client.map_or(To::Session(waiter.owner), To::Client);
        self.told.push((to, heard));
    }
}
