//! Statements that are true after every step (the contract's P1 and its consequences):
//!
//! 1. **One holder, or readers.** No hold is written into a lock that somebody else is in, but of
//!    readers beside readers (`Keyspace::carry_out` refuses it), and the keyspace is the same as
//!    the twin's.
//! 2. **First come first served.** A grant goes to the waiter that has been longest in the queue.
//! 3. **Nobody waits while the lock is free**, once the driver has settled the locks that were
//!    marked; but for the delay after a start, in which nobody is granted a lock.
//! 4. **Tokens grow**, over all locks and so for each.
//! 5. **One word each.** A waiter hears exactly once, of a grant or of its end; one that was
//!    cancelled, timed out or departed never holds; and a grant is written before it is told.
//! 6. **The views are true.** INFO and LIST show the twin's queues.
//! 7. **The timer is set.** While somebody waits there is a deadline, not later than the end of the
//!    first wait and just after the end of the lease; and at rest it is not due already.
//! 8. **The counters add up.** Every waiter that ever sat down is granted, gone, or still there.
//! 9. **Sessions end, and their holds with them.** None outlives its grace, none keeps a listener
//!    past its wait, no hold is on record without its session; and the timer is not later.
//! 10. **One event each.** A queued wait ends in exactly one event, or with its session or the
//!     session's life; and no event comes without a wait.
//! 11. **No hold is lost without word.** A hold on record is in the key, or the key is looked at
//!     just after the end of the lease.
//! 12. **The keys are the layout's**, as long as nobody else writes to them.

use crate::keyspace::{Entry, Keyspace, Place, Value, number, timeout_key, write_hold};
use crate::life::{HoldName, Name, TwinEvent, is_same};
use crate::twin::{PermitsRequest, Tally, Twin, TwinWaiter, Waits, field_of};
use crate::world::{LOCKS, OWNERS, SESSIONS, place};
use rlock_core::{FENCE_FIELD, LockRef, Locks, Mode, Now, Token};
use std::collections::{BTreeMap, BTreeSet};

/// The waiters that sat down, where and when: kept from requests and replies alone, apart from the
/// twin.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    lines: BTreeMap<Place, Vec<Seated>>,
    highest_token: i64,
    seated: u64,
    /// Queued waits whose event was not told yet.
    untold: BTreeMap<(Name, Place, Vec<u8>), i64>,
}

#[derive(Clone, Debug)]
struct Seated {
    seat: usize,
    owner: Vec<u8>,
    /// Whom the event goes to; none for a blocked client.
    queued_for: Option<Name>,
    /// Of a wait for several locks, all of them, as they were named.
    together: Option<Vec<Place>>,
}

/// The grant that a waiter is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted<'a> {
    pub(crate) place: &'a Place,
    pub(crate) seat: usize,
    pub(crate) mode: Mode,
    pub(crate) count: i64,
    pub(crate) token: i64,
    /// The locks that it took, each with the token of its hold; none if the one waited for.
    pub(crate) several: Option<&'a [(Place, i64)]>,
}

impl Ledger {
    pub(crate) fn sits_down(
        &mut self,
        places: &[Place],
        is_joint: bool,
        asked: PermitsRequest<'_>,
    ) {
        self.seated += 1;
        let queued_for = asked
            .session
            .filter(|_| matches!(asked.waits, Waits::Queue(_)));
        let set: BTreeSet<&Place> = places.iter().collect();
        let is_same = |of: &Seated| match &of.together {
            Some(together) => is_joint && together.iter().collect::<BTreeSet<_>>() == set,
            None => !is_joint,
        };
        let line = self.lines.get(&places[0]).map_or(&[][..], Vec::as_slice);
        let mut own = line
            .iter()
            .filter(|of| asked.once && of.owner == asked.owner);
        let old = own.find(|of| is_same(of)).cloned();
        let together = match &old {
            Some(old) => old.together.clone(),
            None => is_joint.then(|| places.to_vec()),
        };
        let new = Seated {
            seat: asked.seat,
            owner: asked.owner.to_vec(),
            queued_for,
            together,
        };
        let stays = old
            .as_ref()
            .is_some_and(|old| queued_for.is_some() && old.queued_for == queued_for);
        for place in places {
            let line = self.lines.entry(place.clone()).or_default();
            let at = line
                .iter()
                .position(|of| Some(of.seat) == old.as_ref().map(|old| old.seat));
            // The former caller there still gets its reply: it goes to the very end, where it can
            // only be dismissed, since a grant there would be a grant out of turn.
            match at.map(|at| std::mem::replace(&mut line[at], new.clone())) {
                Some(old) if old.queued_for.is_none() => line.push(old),
                Some(_) => {}
                None => line.push(new.clone()),
            }
        }
        if let Some(name) = queued_for.filter(|_| !stays) {
            let hears_under = new.together.map_or(places[0].clone(), |of| of[0].clone());
            let wait = (name, hears_under, asked.owner.to_vec());
            *self.untold.entry(wait).or_default() += 1;
        }
    }

    /// Forgets queued waiters that left without a message to their seat.
    pub(crate) fn forget_those_who_left(&mut self, twin: &Twin) {
        for line in self.lines.values_mut() {
            line.retain(|of| of.queued_for.is_none() || twin.waiter(of.seat).is_some());
        }
    }

    /// Invariants 2 and 5. Of several locks each is given in its turn, or was its owner's already.
    pub(crate) fn is_granted(
        &mut self,
        granted: &Granted<'_>,
        space: &Keyspace,
        twin: &Twin,
    ) -> Result<(), String> {
        let Granted {
            place,
            seat,
            mode,
            count,
            token,
            several,
        } = *granted;
        let mut joint = self.lines.get(place).into_iter().flatten();
        let joint = joint.find(|of| of.seat == seat);
        let joint = joint.and_then(|of| of.together.clone());
        for place in joint.as_ref().unwrap_or(&vec![place.clone()]) {
            let taken = several.map(|of| of.iter().find(|(of, _)| of == place));
            let line = self.lines.entry(place.clone()).or_default();
            let at = line.iter().position(|of| of.seat == seat);
            let at = at.ok_or_else(|| format!("{seat} is granted and does not wait"))?;
            let Seated { owner, .. } = line.remove(at);
            let stored = space.field(place, &field_of(&owner, mode));
            let stored = stored.and_then(|value| match mode {
                Mode::Write => write_hold(value).map(|(count, _)| count),
                _ => number(value),
            });
            // Queued waiters ahead of it were granted before it, and hear by events.
            let with_it = |of: &Seated| of.queued_for.is_some() && twin.waiter(of.seat).is_none();
            // ONCE counts no hold twice. The twin grants before the core does, or after it.
            let held_before = match twin.waiter(seat) {
                Some(waiter) => waiter.together.is_some() && twin.holds(place, &owner, mode),
                None => twin.held_before.contains(&(seat, place.clone())),
            };
            if matches!(taken, Some(None)) && !held_before && joint.is_some() {
                return Err(format!("{seat} is granted {place:?} and does not take it"));
            }
            if !held_before && !line[..at].iter().all(with_it) {
                return Err(format!("granted out of turn: {seat} at {at} of {line:?}"));
            }
            let own = taken.flatten().map_or(token, |(_, token)| *token);
            let is_its = match mode {
                // A hold that the owner had before keeps its token if nothing was newly taken.
                Mode::Plain if matches!(taken, Some(None)) && joint.is_some() => true,
                Mode::Plain => {
                    let fence = format!("t{own}").into_bytes();
                    space.field(place, FENCE_FIELD) == Some(&fence)
                }
                Mode::Read => space
                    .reader(place, &owner)
                    .is_some_and(|of| of.token == Some(own)),
                Mode::Write => space.write_token(place, &owner) == Some(own),
                Mode::Permits => crate::no_permits(),
            };
            let is_less = |stored: i64| joint.is_none() && stored < count;
            if stored.is_none_or(is_less) || !is_its {
                return Err("a grant is told before it is written".into());
            }
        }
        Ok(())
    }

    /// Invariant 5.
    pub(crate) fn leaves_from(&mut self, seat: usize) -> Result<(), String> {
        let mut left = false;
        for line in self.lines.values_mut() {
            let before = line.len();
            line.retain(|of| of.seat != seat);
            left |= line.len() < before;
        }
        if left {
            Ok(())
        } else {
            Err(format!("{seat} was told twice"))
        }
    }

    /// Invariant 10.
    pub(crate) fn is_told(&mut self, name: Name, event: &TwinEvent) -> Result<(), String> {
        if !event.ends_a_wait() {
            return Ok(());
        }
        let wait = (name, event.place.clone(), event.owner.clone());
        let untold = self.untold.entry(wait).or_default();
        *untold -= 1;
        if *untold < 0 {
            return Err(format!("{event:?} for a wait that was none, or twice"));
        }
        Ok(())
    }

    /// A client says that it has heard events which it was not told.
    pub(crate) fn hears_of(&mut self, name: Name, after: Option<(i64, u64)>, twin: &Twin) {
        let Some(session) = twin.life.sessions.get(&name) else {
            return;
        };
        let after = after.filter(|(life, _)| session.life == Some(*life));
        let heard = after.map_or(0, |(_, seq)| seq);
        for (seq, event) in &session.events {
            if session.told < *seq && *seq <= heard && event.ends_a_wait() {
                let wait = (name, event.place.clone(), event.owner.clone());
                *self.untold.entry(wait).or_default() -= 1;
            }
        }
    }

    /// Invariant 10: with everything told, only waiters have heard nothing.
    pub(crate) fn all_is_told(&self, name: Name, twin: &Twin) -> Result<(), String> {
        for ((of, place, owner), untold) in &self.untold {
            let is_such = |waiter: &&TwinWaiter| {
                let is_own = waiter.session == Some(name) && waiter.owner == *owner;
                waiter.is_queued && is_own && waiter.hears_under(place) == place
            };
            let waiting = twin.line(place).iter().filter(is_such).count();
            if *of == name && i64::try_from(waiting) != Ok(*untold) {
                return Err(format!(
                    "{untold} waits of {owner:?} for {place:?} are untold, {waiting} wait"
                ));
            }
        }
        Ok(())
    }

    /// The connection is gone, and with it the waits that had not ended by then. The events that
    /// are kept are still to be told.
    pub(crate) fn loses_its_line(&mut self, name: Name, twin: &Twin) {
        self.untold.retain(|(of, _, _), _| *of != name);
        let session = twin.life.sessions.get(&name);
        for (seq, event) in session.iter().flat_map(|session| &session.events) {
            let is_told = session.is_some_and(|session| *seq <= session.told);
            if !is_told && event.ends_a_wait() {
                let wait = (name, event.place.clone(), event.owner.clone());
                *self.untold.entry(wait).or_default() += 1;
            }
        }
    }

    /// Invariant 4. In `several` is the highest token from before a command for several locks,
    /// which has one new token for all, but a further one for each hold that has none.
    pub(crate) fn is_minted(&mut self, token: Token, several: Option<i64>) -> Result<(), String> {
        let token = token.get();
        let highest = several.unwrap_or(self.highest_token);
        if token <= highest {
            return Err(format!("token {token} after {highest}"));
        }
        self.highest_token = self.highest_token.max(token);
        Ok(())
    }

    pub(crate) fn highest_token(&self) -> i64 {
        self.highest_token
    }
}

/// Invariant 6.
pub(crate) fn views_are_true(locks: &Locks, twin: &Twin, now: Now) -> Result<(), String> {
    for (place, line) in &twin.lines {
        let lock = LockRef {
            db: place.0,
            name: &place.1,
        };
        let shown: Vec<_> = locks.queue(lock, now);
        let same = shown.len() == line.len()
            && shown.iter().zip(line).all(|(shown, waiter)| {
                let left_ms = waiter.wait_end.map_or(-1, |end| (end - now.mono_ms).max(0));
                *shown.owner == *waiter.owner
                    && shown.mode == waiter.mode
                    && Some(shown.client_id) == twin.client_of(waiter)
                    && shown.waited_ms == now.mono_ms - waiter.since
                    && shown.left_ms == left_ms
            });
        if !same {
            return Err(format!("INFO shows {shown:?}\n  the twin has {line:?}"));
        }
        let first = line.first().map(|first| (line.len(), first.since));
        list_shows(locks, place, first, now)?;
    }
    let waiting = u64::try_from(locks.gauges().waiters).unwrap();
    let lines = twin.lines.values().filter(|line| !line.is_empty()).count();
    if waiting != twin.waiting() || locks.gauges().locks != lines {
        return Err(format!("the gauges is {:?}", locks.gauges()));
    }
    Ok(())
}

fn list_shows(
    locks: &Locks,
    place: &Place,
    first: Option<(usize, i64)>,
    now: Now,
) -> Result<(), String> {
    let mut views = locks.views(place.0, now);
    let view = views.find(|view| *view.name == *place.1);
    let shown = view.map(|view| (usize::try_from(view.waiters).unwrap(), view.longest_wait_ms));
    let should = first.map(|(length, since)| (length, now.mono_ms - since));
    if shown != should {
        return Err(format!("LIST shows {shown:?}, should {should:?}"));
    }
    Ok(())
}

/// Invariants 3 and 7. In `unseen` are the locks that were changed without any event: those are
/// found by the periodic look, once a second of a wall clock that was set back by `set_back_ms`.
pub(crate) fn is_at_rest(
    locks: &Locks,
    twin: &Twin,
    unseen: &BTreeSet<Place>,
    written_by_others: &BTreeSet<Place>,
    set_back_ms: i64,
    now: Now,
) -> Result<(), String> {
    let deadline = locks.next_deadline(now);
    let due_in = deadline.unwrap_or(i64::MAX);
    if deadline == Some(0) {
        return Err("the timer is due again at once".into());
    }
    for (place, line) in twin.lines.iter().filter(|(_, line)| !line.is_empty()) {
        let wait_end = line.iter().filter_map(|waiter| waiter.wait_end).min();
        if wait_end.is_some_and(|end| due_in > end - now.mono_ms) {
            return Err(format!("due in {due_in}: a wait for {place:?} ends before"));
        }
        if due_in > 1000 + set_back_ms {
            return Err(format!("due in {due_in}: no look at {place:?} in time"));
        }
        if twin.is_delayed() && due_in > twin.delay_left_ms {
            return Err(format!("due in {due_in}: grants begin before"));
        }
        let is_mixed = twin.is_mixed(place);
        if unseen.contains(place) || is_mixed && twin.space.mode(place).is_some() {
            continue;
        }
        if twin.is_other_type(place) {
            return Err(format!("{line:?} wait for {place:?}, which is no lock"));
        }
        let first = &line[0];
        match &first.together {
            None if twin.lets_first_in(place) && (!is_mixed || twin.is_free(place)) => {
                return Err(format!("{line:?} wait for {place:?}, and need not"));
            }
            // It may be free while the first in the queue waits for others with it.
            Some(together) if together.iter().all(|place| !unseen.contains(place)) => {
                // That a script took a lock for a waiter is seen by the periodic look.
                let is_late =
                    |place: &Place| !twin.is_free(place) && written_by_others.contains(place);
                if !together.iter().any(is_late) && twin.can_have_all(first) {
                    return Err(format!("{first:?} waits, and can have all"));
                }
            }
            _ => {}
        }
        let lease_end = twin.lease_before(place, first.mode);
        let lease_end = lease_end.filter(|_| !twin.is_free(place));
        if lease_end.is_some_and(|end| due_in > (end + 1).saturating_sub(now.wall_ms())) {
            return Err(format!(
                "due in {due_in}: the lease of {place:?} ends before"
            ));
        }
    }
    Ok(())
}

/// Invariants 9 and 11, at any moment.
pub(crate) fn sessions_are_true(locks: &Locks, twin: &Twin, now: Now) -> Result<(), String> {
    let (gauges, life) = (locks.gauges(), &twin.life);
    if (gauges.sessions, gauges.session_holds) != (life.sessions.len(), life.holds.len()) {
        return Err(format!("the gauges is {gauges:?}\n  should be {life:?}"));
    }
    let kept: usize = life.sessions.values().map(|of| of.events.len()).sum();
    if gauges.unacknowledged_events != kept {
        return Err(format!("the gauges is {gauges:?}, with {kept} kept"));
    }
    for view in locks.session_views(now) {
        let name = SESSIONS.iter().position(|name| **name == *view.name);
        let name = name.ok_or("a session that nobody began")?;
        let session = &life.sessions[&name];
        let holds = life.holds.values().filter(|hold| hold.session == name);
        let should = (session.client, session.epoch, session.bound);
        let should = (should, session.events.len(), holds.count());
        let shown = (view.client_id, view.epoch, view.bound);
        if (shown, view.unacknowledged, view.holds) != should {
            return Err(format!("shown {view:?}\n  should {session:?}"));
        }
    }
    let mut holds = life.holds.values();
    match holds.find(|hold| !life.sessions.contains_key(&hold.session)) {
        Some(hold) => Err(format!("{hold:?} outlives its session")),
        None => Ok(()),
    }
}

/// Invariants 9 and 11, when nothing is due. In `unseen` are the holds, with their tokens, whose
/// keys were changed without any event.
pub(crate) fn sessions_are_at_rest(
    locks: &Locks,
    twin: &Twin,
    unseen: &BTreeSet<(HoldName, Option<i64>)>,
    now: Now,
) -> Result<(), String> {
    let due_in = locks.next_deadline(now).unwrap_or(i64::MAX);
    for (name, session) in &twin.life.sessions {
        let listens_until = session.listener.and_then(|(_, until)| until);
        for end in listens_until.into_iter().chain(session.grace_end) {
            if end <= now.mono_ms || due_in > end - now.mono_ms {
                return Err(format!(
                    "due in {due_in}: {name}, {session:?} is over before"
                ));
            }
        }
        if session.client.is_none() && session.grace_end.is_none() {
            return Err(format!("{name}, {session:?} lives by nothing"));
        }
        if session.listener.is_some() && !session.events.is_empty() {
            return Err(format!("{name}, {session:?} waits for what is there"));
        }
    }
    for (of, hold) in &twin.life.holds {
        let (place, owner, mode) = of;
        let is_unseen = unseen.contains(&(of.clone(), hold.token));
        if is_unseen && *mode != Mode::Plain {
            continue;
        }
        if let Some(end) = hold.ends_at
            && due_in > (end + 1).saturating_sub(now.wall_ms())
        {
            return Err(format!("due in {due_in}: {hold:?} ends before"));
        }
        let is_there = twin.holds(place, owner, *mode)
            && is_same(*mode, hold.token, twin.token(place, owner, *mode));
        if !is_there && !is_unseen {
            return Err(format!("{of:?} is lost and nobody says so"));
        }
    }
    Ok(())
}

/// Invariant 8.
pub(crate) fn counters_add_up(locks: &Locks, twin: &Twin, ledger: &Ledger) -> Result<(), String> {
    let counters = locks.counters();
    let counted = Tally {
        grants: counters.grants,
        reentries: counters.reentries,
        handovers: counters.handovers,
        timeouts: counters.timeouts,
        cancels: counters.cancels,
        departures: counters.departures,
        taken_back: counters.grants_taken_back,
        renewals: counters.renewals,
        renewals_lost: counters.renewals_lost,
        releases: counters.releases,
        breaks: counters.breaks,
        waiters_peak: counters.waiters_peak,
        deadlocks_refused: counters.deadlocks_refused,
        session_releases: counters.session_releases,
        holds_lost: counters.holds_lost,
        sessions_overflowed: counters.sessions_overflowed,
    };
    let happened = Tally {
        holds_lost: twin.life.lost,
        ..twin.tally
    };
    if counted != happened {
        return Err(format!("counted {counted:?}\n  happened {happened:?}"));
    }
    let gone = counted.timeouts + counted.cancels + counted.departures + twin.refused;
    let seats: BTreeSet<usize> = twin.lines.values().flatten().map(|of| of.seat).collect();
    let here = u64::try_from(seats.len()).unwrap();
    if ledger.seated != counted.handovers + gone + here {
        return Err(format!("{} sat down, but {counted:?}", ledger.seated));
    }
    let told: u64 = counters
        .wait_ms
        .buckets()
        .map(|(_, below)| below)
        .max()
        .unwrap();
    if counters.wait_ms.count() != counted.handovers || told > counted.handovers {
        return Err("the wait histogram has not every hand-over once".into());
    }
    Ok(())
}

/// Invariant 12: no field and no key but those of the layout, none without an expiry, and no hash
/// that ends before a hold in it.
pub(crate) fn keys_are_ours(space: &Keyspace, twin: &Twin) -> Result<(), String> {
    for at in (0..LOCKS.len()).map(place) {
        let Some(entry) = space.get(&at) else {
            continue;
        };
        let Value::Hash(fields) = &entry.value else {
            return Err(format!("{entry:?} is no lock"));
        };
        let is_plain = space.mode(&at).is_none();
        if is_plain != fields.contains_key(&b"fence"[..]) {
            return Err(format!("{entry:?} is neither kind"));
        }
        let (writers, readers) = (space.writers(&at), space.readers(&at));
        let says_write = space.mode(&at) == Some(b"write");
        if says_write == writers.is_empty() && !is_plain {
            return Err(format!("{entry:?} says a wrong mode"));
        }
        let is_alone = readers.iter().all(|(owner, _)| writers.contains(owner));
        if writers.len() > 1 || (!writers.is_empty() && !is_alone) {
            return Err(format!("{entry:?} has too many in it"));
        }
        if writers
            .iter()
            .any(|of| space.write_token(&at, of).is_none())
        {
            return Err(format!("{entry:?} has a writer without a token"));
        }
        let with_more = |owner: &[u8]| space.timeouts(&at, owner).len() > 1;
        if readers.iter().any(|(owner, _)| with_more(owner)) {
            return Err(format!("more than one timeout key for each of {readers:?}"));
        }
        let longest = readers.iter().map(|(_, reader)| reader.ends_at).max();
        if longest > entry.ends_at {
            return Err(format!("{entry:?} ends before {readers:?}"));
        }
        let first = twin.line(&at).first();
        let is_alone = first.is_some_and(|first| first.together.is_none());
        if is_alone && twin.is_free(&at) && !twin.is_delayed() {
            return Err(format!("{entry:?} is free, and somebody waits"));
        }
    }
    let is_timeout = |key: &Place| {
        let digits = key.1.iter().rposition(|byte| *byte == b':');
        let Some(number) = number(&key.1[digits.map_or(0, |at| at + 1)..]) else {
            return false;
        };
        let of_lock = |at: Place| {
            let mut owners = OWNERS.iter();
            owners.any(|owner| timeout_key(&at, owner, number) == *key)
        };
        (0..LOCKS.len()).map(place).any(of_lock)
    };
    let is_lock = |key: &Place| (0..LOCKS.len()).any(|lock| place(lock) == *key);
    let is_ours =
        |key: &Place, entry: &Entry| entry.ends_at.is_some() && (is_lock(key) || is_timeout(key));
    match space.entries().find(|(key, entry)| !is_ours(key, entry)) {
        Some((key, entry)) => Err(format!("{key:?}: {entry:?}")),
        None => Ok(()),
    }
}
