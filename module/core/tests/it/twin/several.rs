//! Several locks at once: all or none.

use super::{
    COUNT_MAX, Entry, Heard, MALFORMED, OVERFLOW, PermitsRequest, Reply, Twin, TwinWaiter, Waits,
    waits_at,
};
use crate::keyspace::Place;
use crate::life::Name;
use rlock_core::{Mode, Now};
use std::collections::BTreeSet;

impl Twin {
    pub(crate) fn acquire_several(
        &mut self,
        places: &[Place],
        asked: PermitsRequest<'_>,
        now: Now,
    ) -> Reply {
        if let Some(refused) = self.not_listened(asked.session) {
            return refused;
        }
        for place in places {
            let kind = self.not_plain(place);
            if let Some(refused) = kind.or(self.wrong_kind_of_first(place, Mode::Plain)) {
                return refused;
            }
            if !self.holds(place, asked.owner, Mode::Plain) {
                continue;
            }
            match self.count(place, asked.owner, Mode::Plain) {
                None => return Reply::Refused(MALFORMED.into()),
                Some(held) if held >= COUNT_MAX && !asked.once => {
                    return Reply::Refused(OVERFLOW.into());
                }
                Some(_) => {}
            }
        }
        // Newcomers never overtake a waiter.
        let is_to_be_had = |place: &Place| {
            let is_free = self.is_free(place) && self.line(place).is_empty() && !self.is_delayed();
            is_free || self.holds(place, asked.owner, Mode::Plain)
        };
        if places.iter().all(is_to_be_had) {
            let (count, token, _) = self.enter_all(places, asked.entry(), now);
            self.ask_of_all(places, asked.owner, asked.wanted);
            return Reply::Held { count, token };
        }
        self.wait_in_all_lines(places, asked, now)
    }

    /// The highest count, the token to be told, and the locks that it took with their tokens.
    fn enter_all(
        &mut self,
        places: &[Place],
        mut entry: Entry,
        now: Now,
    ) -> (i64, i64, Vec<(Place, i64)>) {
        let any_new = places.iter().any(|place| self.is_free(place));
        entry.token = any_new.then(|| self.mint(now));
        let mut entered = Vec::new();
        for place in places {
            if self.is_free(place) {
                self.life.lose_all(place, None, now);
            }
            let is_taken = !entry.once || !self.holds(place, &entry.owner, Mode::Plain);
            let (count, token) = self.enter(place, &entry, now).unwrap();
            let to = Some(entry.owner.clone());
            self.changed.push((place.clone(), to));
            entered.push((place.clone(), count, token, is_taken));
        }
        let count = entered.iter().map(|(_, count, ..)| *count).max().unwrap();
        let largest = entered.iter().map(|(_, _, token, _)| *token).max().unwrap();
        let taken = entered.into_iter().filter(|(.., is_taken)| *is_taken);
        let taken = taken.map(|(place, _, token, _)| (place, token));
        (count, entry.token.unwrap_or(largest), taken.collect())
    }

    fn wait_in_all_lines(
        &mut self,
        places: &[Place],
        asked: PermitsRequest<'_>,
        now: Now,
    ) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_of_others(places, asked.owner, now));
        let (Waits::Block(wait_ms) | Waits::Queue(wait_ms)) = asked.waits else {
            for place in places {
                if !self.is_free(place) && !self.holds(place, asked.owner, Mode::Plain) {
                    self.is_wanted_by(place, asked);
                }
            }
            return Reply::NotHeld { ttl_ms };
        };
        let newcomer = TwinWaiter::new(asked, wait_ms, Some(places.to_vec()), now);
        let present = self.joint_of(places, asked.owner);
        if let Some(old) = present.filter(|_| asked.once).cloned() {
            self.move_joint(&old, newcomer, ttl_ms);
        } else if let Some(refused) = self.cannot_wait(places, asked, Some(asked.seat)) {
            return refused;
        } else {
            for place in places {
                let line = self.lines.entry(place.clone()).or_default();
                line.push(newcomer.clone());
            }
            for place in places {
                self.is_wanted_by(place, asked);
            }
        }
        waits_at(asked, usize::try_from(self.position(asked.seat)).unwrap())
    }

    fn move_joint(&mut self, old: &TwinWaiter, newcomer: TwinWaiter, ttl_ms: i64) {
        if let Some(place) = self.blocked.remove(&old.seat) {
            self.blocked.insert(newcomer.seat, place);
        }
        if self.kept_back.remove(&old.seat) {
            self.kept_back.insert(newcomer.seat);
        }
        let moved = TwinWaiter {
            since: old.since,
            together: old.together.clone(),
            ..newcomer
        };
        for line in self.lines.values_mut() {
            for waiter in line.iter_mut().filter(|of| of.seat == old.seat) {
                *waiter = moved.clone();
            }
        }
        self.is_taken_over(&Place::default(), old, &moved, ttl_ms);
    }

    /// The owner's foremost wait for just these locks together.
    fn joint_of(&self, places: &[Place], owner: &[u8]) -> Option<&TwinWaiter> {
        let set: BTreeSet<&Place> = places.iter().collect();
        let mut line = self.line(places.first()?).iter();
        line.find(|waiter| {
            let together = waiter.together.as_ref();
            waiter.owner == owner
                && together.is_some_and(|of| of.iter().collect::<BTreeSet<_>>() == set)
        })
    }

    pub(crate) fn release_several(
        &mut self,
        places: &[Place],
        owner: &[u8],
        by: Option<u64>,
        now: Now,
    ) -> Reply {
        if let Some(refused) = self.cannot_count(places, owner) {
            return refused;
        }
        self.by = by;
        let (mut released, mut freed) = (0, Vec::new());
        for place in places {
            if !self.holds(place, owner, Mode::Plain) {
                continue;
            }
            released += 1;
            self.tally.releases += 1;
            let is_last = self.count(place, owner, Mode::Plain) == Some(1);
            if is_last && self.space.plain_owners(place).len() == 1 {
                // All are released before anyone is granted.
                let of = (place.clone(), owner.to_vec(), Mode::Plain);
                if let Some(by) = by {
                    self.life.given_back(&of, by);
                }
                self.life.unbind(&of);
                self.space.delete(place);
                freed.push(place);
            } else {
                self.leave(place, owner, Mode::Plain, None, now);
            }
        }
        self.by = None;
        for place in freed {
            self.free(place, Mode::Plain, now);
        }
        Reply::Number(released)
    }

    pub(crate) fn renew_several(
        &mut self,
        places: &[Place],
        owner: &[u8],
        lease_ms: i64,
        session: Option<Name>,
        now: Now,
    ) -> Reply {
        let refused = places.iter().find_map(|place| self.not_plain(place));
        if let Some(refused) = refused.or(self.not_listened(session)) {
            return refused;
        }
        let renewed = places
            .iter()
            .map(|place| {
                let of = (place, owner, Mode::Plain);
                self.renew_one(of, lease_ms, None, session, now)
            })
            .filter(|reply| *reply == Reply::Number(1));
        Reply::Number(i64::try_from(renewed.count()).unwrap())
    }

    /// One of the keys is no plain lock, or the owner has something else there than a count.
    fn cannot_count(&self, places: &[Place], owner: &[u8]) -> Option<Reply> {
        places.iter().find_map(|place| {
            let is_held = self.holds(place, owner, Mode::Plain);
            let malformed = is_held && self.count(place, owner, Mode::Plain).is_none();
            let malformed = malformed.then(|| Reply::Refused(MALFORMED.into()));
            self.not_plain(place).or(malformed)
        })
    }

    // --- Who waits for several -------------------------------------------------------------------

    /// Somebody looks at all keys of the wait for several that sits there. Its locks and owner do
    /// not say which it is: an owner may wait more than once for the same.
    pub(crate) fn reconcile_joint(&mut self, seat: usize, now: Now) {
        let Some(waiter) = self.waiter(seat).cloned() else {
            return;
        };
        for place in waiter.together.iter().flatten() {
            if let Some(Reply::Refused(text)) = self.not_plain(place) {
                return self.refuse_wait(place, &waiter, &text);
            }
        }
        self.kept_back.remove(&waiter.seat);
        let mut places = waiter.together.iter().flatten();
        let blocked_at = places.find(|place| !self.can_have(place, &waiter)).cloned();
        if let Some(place) = blocked_at {
            self.blocked.insert(waiter.seat, place);
        } else if self.must_await_the_delay(&waiter) {
            self.blocked.remove(&waiter.seat);
            self.kept_back.insert(waiter.seat);
        } else {
            self.grant_joint(&waiter, now);
            self.blocked.remove(&waiter.seat);
        }
    }

    /// It is first, or its owner the holder, in all of them.
    pub(crate) fn can_have_all(&self, waiter: &TwinWaiter) -> bool {
        let mut places = waiter.together.iter().flatten();
        places.all(|place| self.can_have(place, waiter)) && !self.must_await_the_delay(waiter)
    }

    /// Nobody is granted a lock yet, and it does not hold all of them.
    fn must_await_the_delay(&self, waiter: &TwinWaiter) -> bool {
        let mut places = waiter.together.iter().flatten();
        self.is_delayed() && places.any(|place| self.is_free(place))
    }

    fn can_have(&self, place: &Place, waiter: &TwinWaiter) -> bool {
        if self.holds(place, &waiter.owner, Mode::Plain) {
            let held = self.count(place, &waiter.owner, Mode::Plain);
            return held.is_some_and(|held| waiter.once || held < COUNT_MAX);
        }
        self.is_free(place) && self.line(place)[0].seat == waiter.seat
    }

    fn grant_joint(&mut self, waiter: &TwinWaiter, now: Now) {
        self.take_out(waiter.seat);
        let places = waiter.together.clone().unwrap();
        for place in &places {
            if self.holds(place, &waiter.owner, Mode::Plain) {
                self.held_before.insert((waiter.seat, place.clone()));
            }
        }
        let (count, token, several) = self.enter_all(&places, Entry::granted(waiter), now);
        self.tally.handovers += 1;
        let heard = Heard::Granted {
            count,
            token,
            several: Some(several),
        };
        self.tell(&places[0], waiter, heard);
        self.ask_of_all(&places, &waiter.owner, waiter.wanted);
    }

    /// Each of the holds asks whether its lock is wanted, if they are to.
    fn ask_of_all(&mut self, places: &[Place], owner: &[u8], asks: bool) {
        for place in places.iter().filter(|_| asks) {
            self.ask_if_wanted(place, owner, Mode::Plain);
        }
    }

    /// There is nothing to wait for.
    pub(super) fn refuse_wait(&mut self, place: &Place, waiter: &TwinWaiter, text: &str) {
        self.take_out(waiter.seat);
        self.tell(place, waiter, Heard::Refused(text.into()));
        self.refused += 1;
    }

    /// The longest rest of the leases that others have; -1 if one has no end.
    fn ttl_of_others(&self, places: &[Place], owner: &[u8], now: Now) -> i64 {
        let of_others = |place: &&Place| {
            let owners = self.space.plain_owners(place);
            owners.iter().any(|of| of != owner)
        };
        let left: Vec<i64> = places
            .iter()
            .filter(of_others)
            .map(|place| self.ttl_ms(place, now))
            .collect();
        if left.contains(&-1) {
            return -1;
        }
        left.into_iter().max().unwrap_or(0)
    }

    /// The TTL in the message to a waiter whose wait is over.
    pub(super) fn ttl_of_wait(&self, seat: usize, now: Now) -> i64 {
        let waiter = self.waiter(seat);
        let together = waiter.and_then(|of| Some((of.together.as_ref()?, &of.owner)));
        match together {
            Some((places, owner)) if places.len() > 1 => self.ttl_of_others(places, owner, now),
            _ => self.ttl_ms(&self.place_of(seat), now),
        }
    }
}
