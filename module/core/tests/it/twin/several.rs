//! Several locks at once: all or none.

use super::{
    Asked, COUNT_MAX, Heard, MALFORMED, OVERFLOW, Reply, Twin, TwinWaiter, Waits, hold_count,
};
use crate::keyspace::Place;
use crate::life::Name;
use rlock_core::{Mode, Now};
use std::collections::BTreeSet;

impl Twin {
    pub(crate) fn acquire_several(
        &mut self,
        places: &[Place],
        asked: Asked<'_>,
        now: Now,
    ) -> Reply {
        if let Some(refused) = self.unfetched_grants(asked.session) {
            return refused;
        }
        for place in places {
            if let Some(refused) = self.not_plain(place) {
                return refused;
            }
            match self.hold(place, asked.owner).map(|held| hold_count(&held)) {
                Some(None) => return Reply::Refused(MALFORMED.into()),
                Some(Some(held)) if held >= COUNT_MAX && !asked.once => {
                    return Reply::Refused(OVERFLOW.into());
                }
                _ => {}
            }
        }
        // Newcomers never overtake a waiter.
        let is_to_be_had = |place: &Place| {
            let is_free = self.is_free(place) && self.line(place).is_empty() && !self.is_delayed();
            is_free || self.hold(place, asked.owner).is_some()
        };
        if places.iter().all(is_to_be_had) {
            let (count, token, _) = self.enter_all(places, asked, now);
            self.ask_of_all(places, asked);
            return Reply::Held { count, token };
        }
        self.wait_in_all_lines(places, asked, now)
    }

    /// The highest count, the token to be told, and the token of each hold.
    fn enter_all(
        &mut self,
        places: &[Place],
        asked: Asked<'_>,
        now: Now,
    ) -> (i64, i64, Vec<(Place, i64)>) {
        let any_new = places.iter().any(|place| self.is_free(place));
        let new = any_new.then(|| self.mint(now));
        let mut entered = Vec::new();
        for place in places {
            let held = self
                .hold(place, asked.owner)
                .and_then(|held| hold_count(&held));
            let (count, token) = match (held, new) {
                (Some(held), _) => self.reenter(place, held, asked, now),
                (None, Some(token)) => {
                    self.take(
                        place,
                        asked.owner,
                        token,
                        asked.lease_ms,
                        asked.session,
                        now,
                    );
                    (1, token)
                }
                (None, None) => unreachable!("it is free or held by the owner"),
            };
            self.changed
                .push((place.clone(), Some(asked.owner.to_vec())));
            entered.push((place.clone(), count, token));
        }
        let count = entered.iter().map(|(_, count, _)| *count).max().unwrap();
        let largest = entered.iter().map(|(_, _, token)| *token).max().unwrap();
        let each = entered.into_iter().map(|(place, _, token)| (place, token));
        (count, new.unwrap_or(largest), each.collect())
    }

    fn wait_in_all_lines(&mut self, places: &[Place], asked: Asked<'_>, now: Now) -> Reply {
        let ttl_ms = self.or_delay(self.ttl_of_others(places, asked.owner, now));
        let wait_ms = match asked.waits {
            Waits::No => {
                for place in places {
                    if !self.is_free(place) && self.hold(place, asked.owner).is_none() {
                        self.is_wanted_by(place, asked.owner);
                    }
                }
                return Reply::NotHeld { ttl_ms };
            }
            Waits::Block(ms) | Waits::Queue(ms) => ms,
        };
        let is_queued = matches!(asked.waits, Waits::Queue(_));
        let newcomer = TwinWaiter {
            owner: asked.owner.to_vec(),
            seat: asked.seat,
            is_queued,
            session: asked.session,
            wanted: asked.wanted,
            lease_ms: asked.lease_ms,
            since: now.mono_ms,
            wait_end: (wait_ms > 0).then(|| now.mono_ms + wait_ms),
            together: Some(places.to_vec()),
        };
        let present = self
            .joint_of(places, asked.owner)
            .filter(|_| asked.once)
            .cloned();
        if let Some(old) = present {
            self.move_joint(&old, newcomer, ttl_ms);
        } else {
            if places
                .iter()
                .any(|place| self.waits_there(place, asked.owner))
            {
                return Reply::Refused(super::WAITING.into());
            }
            let is_full = |place: &Place| self.line(place).len() >= asked.waiters_max;
            if places.iter().any(is_full) {
                let max = asked.waiters_max;
                return Reply::Refused(format!(
                    "QUEUEFULL too many waiters, rlock.max-waiters-per-lock is {max}"
                ));
            }
            if self.closes_a_circle(places, asked.owner, Some(asked.seat)) {
                self.tally.deadlocks_refused += 1;
                return Reply::Deadlock;
            }
            for place in places {
                let line = self.lines.entry(place.clone()).or_default();
                line.push(newcomer.clone());
            }
            for place in places {
                self.is_wanted_by(place, asked.owner);
            }
        }
        let place_in = |place| {
            let mut line = self.line(place).iter();
            line.position(|of| of.seat == asked.seat).unwrap() + 1
        };
        let position = places.iter().map(place_in).max().unwrap();
        if is_queued {
            let position = i64::try_from(position).unwrap();
            Reply::Queued { position }
        } else {
            Reply::Waits
        }
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
        self.tally.cancels += 1;
        let stays = old.is_queued && moved.is_queued && old.session == moved.session;
        if !stays {
            self.tell(&Place::default(), old, Heard::NotAcquired { ttl_ms });
        }
    }

    /// The owner's foremost wait for just these locks together.
    pub(crate) fn joint_of(&self, places: &[Place], owner: &[u8]) -> Option<&TwinWaiter> {
        let set: BTreeSet<&Place> = places.iter().collect();
        let mut line = self.line(places.first()?).iter();
        line.find(|waiter| {
            let together = waiter.together.as_ref();
            waiter.owner == owner
                && together.is_some_and(|of| of.iter().collect::<BTreeSet<_>>() == set)
        })
    }

    pub(crate) fn release_several(&mut self, places: &[Place], owner: &[u8], now: Now) -> Reply {
        if let Some(refused) = self.cannot_count(places, owner) {
            return refused;
        }
        let (mut released, mut freed) = (0, Vec::new());
        for place in places {
            let Some(held) = self.hold(place, owner).and_then(|held| hold_count(&held)) else {
                continue;
            };
            released += 1;
            self.tally.releases += 1;
            if held > 1 {
                self.put(place, owner, held - 1, None);
                self.bind(place, owner, None);
                continue;
            }
            if self.others(place, owner) {
                self.end_hold_of(place, owner, now);
            } else {
                // All are released before anyone is granted.
                self.life.unbind(place, owner);
                self.space.delete(place);
                freed.push(place);
            }
        }
        for place in freed {
            self.pass_on(place, Mode::Plain, now);
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
        if let Some(refused) = refused.or(self.unfetched_grants(session)) {
            return refused;
        }
        let renewed = places
            .iter()
            .map(|place| self.renew_one(place, owner, lease_ms, None, session, now))
            .filter(|reply| *reply == Reply::Number(1));
        Reply::Number(i64::try_from(renewed.count()).unwrap())
    }

    /// One of the keys is no plain lock, or the owner has something else there than a count.
    fn cannot_count(&self, places: &[Place], owner: &[u8]) -> Option<Reply> {
        places.iter().find_map(|place| {
            let held = self.hold(place, owner).map(|held| hold_count(&held));
            let malformed = (held == Some(None)).then(|| Reply::Refused(MALFORMED.into()));
            self.not_plain(place).or(malformed)
        })
    }

    // --- Who waits for several -------------------------------------------------------------------

    /// Somebody looks at all keys of the wait for several that sits there. Its locks and owner do
    /// not say which it is: an owner may wait more than once for the same.
    pub(crate) fn settle_joint(&mut self, seat: usize, now: Now) {
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
        match self.hold(place, &waiter.owner) {
            Some(held) => hold_count(&held).is_some_and(|held| held < COUNT_MAX),
            None => self.is_free(place) && self.line(place)[0].seat == waiter.seat,
        }
    }

    fn grant_joint(&mut self, waiter: &TwinWaiter, now: Now) {
        self.take_out(waiter.seat);
        let places = waiter.together.clone().unwrap();
        let asked = Asked::granted(waiter);
        let (count, token, several) = self.enter_all(&places, asked, now);
        self.tally.handovers += 1;
        let heard = Heard::Granted {
            count,
            token,
            several,
        };
        self.tell(&places[0], waiter, heard);
        self.ask_of_all(&places, asked);
    }

    /// Each of the holds asks whether its lock is wanted, if they are to.
    fn ask_of_all(&mut self, places: &[Place], asked: Asked<'_>) {
        for place in places.iter().filter(|_| asked.wanted) {
            self.ask_if_wanted(place, asked.owner);
        }
    }

    /// There is nothing to wait for.
    pub(super) fn refuse_wait(&mut self, place: &Place, waiter: &TwinWaiter, text: &str) {
        self.take_out(waiter.seat);
        self.tell(place, waiter, Heard::Refused(text.into()));
        self.refused += 1;
    }

    /// Whether the first in line waits for this lock alone.
    pub(super) fn is_for_one_lock(&self, place: &Place) -> bool {
        let first = self.line(place).first();
        first.is_some_and(|first| first.together.is_none())
    }

    /// The longest of what is left of the leases that others have; -1 if one has no end.
    pub(crate) fn ttl_of_others(&self, places: &[Place], owner: &[u8], now: Now) -> i64 {
        let of_others =
            |place: &&Place| self.not_plain(place).is_none() && self.others(place, owner);
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

    /// What one whose wait is over hears.
    pub(super) fn ttl_of_wait(&self, seat: usize, now: Now) -> i64 {
        let waiter = self.waiter(seat);
        let together = waiter.and_then(|of| Some((of.together.as_ref()?, &of.owner)));
        match together {
            Some((places, owner)) if places.len() > 1 => self.ttl_of_others(places, owner, now),
            _ => self.ttl_ms(&self.place_of(seat), now),
        }
    }

    /// What this step did there is no longer so, and nobody was told.
    pub(crate) fn changed_unseen(&mut self, place: &Place) {
        self.changed.retain(|(of, _)| of != place);
    }

    /// At the end of a step: nobody was left to wait for what it freed, or gave to its owner.
    pub(crate) fn all_are_served(&mut self) -> Result<(), String> {
        for (place, to) in std::mem::take(&mut self.changed) {
            let first = self.line(&place).first();
            let is_free = self.is_free(&place);
            let alone = first.is_some_and(|first| first.together.is_none());
            if is_free && alone && !self.is_delayed() {
                return Err(format!("{place:?} was left free with somebody in line"));
            }
            let concerned = self.line(&place).iter().filter(|waiter| match &to {
                None => first.is_some_and(|first| first.seat == waiter.seat),
                Some(owner) => waiter.owner == *owner,
            });
            for waiter in concerned.filter(|waiter| waiter.together.is_some()) {
                // Where something else was in its way, it is looked at when that has changed.
                let blocked_elsewhere = self
                    .blocked
                    .get(&waiter.seat)
                    .is_some_and(|at| *at != place);
                // Who is kept back by the delay is looked at when that ends.
                let kept_back = self.is_delayed() && self.kept_back.contains(&waiter.seat);
                if self.can_have_all(waiter) && !blocked_elsewhere && !kept_back {
                    return Err(format!("{waiter:?} can have all, and is left to wait"));
                }
            }
        }
        Ok(())
    }
}
