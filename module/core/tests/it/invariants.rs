//! What must be true after every step, whatever happened (the contract's P1 and its consequences):
//!
//! 1. **One holder.** No hold is written into a lock that somebody else is in
//!    (`Keyspace::carry_out` refuses it), and what is stored is what the twin stores.
//! 2. **First come first served.** A grant goes to the waiter that has been longest in line.
//! 3. **Nobody waits while the lock is free**, once the driver has settled what was marked.
//! 4. **Tokens grow**, over all locks and so for each.
//! 5. **One word each.** A waiter hears exactly once, of a grant or of its end; one that was
//!    cancelled, timed out or departed never holds; and a grant is written before it is told.
//! 6. **The views are true.** INFO and LIST show the twin's lines.
//! 7. **The timer is set.** While somebody waits there is a deadline, not later than the end of the
//!    first wait and just after the end of the lease; and at rest it is not due already.
//! 8. **The counters add up.** Every waiter that ever sat down is granted, gone, or still there.

use crate::keyspace::{Keyspace, Place, Value};
use crate::twin::{Tally, Twin};
use rlock_core::{FENCE_FIELD, LockRef, Locks, Now, Seat, Token};
use std::collections::{BTreeMap, BTreeSet};

/// Who sat down where and when: kept from what is asked and told alone, apart from the twin.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    lines: BTreeMap<Place, Vec<(Seat, Vec<u8>)>>,
    highest_token: i64,
    seated: u64,
    refused: u64,
}

impl Ledger {
    pub(crate) fn sits_down(&mut self, place: &Place, seat: Seat, owner: &[u8], once: bool) {
        self.seated += 1;
        let line = self.lines.entry(place.clone()).or_default();
        let at = line.iter().position(|(_, of)| once && of == owner);
        // The old seat still has its word to come: it goes to the very end, whence it may only be
        // dismissed, since a grant there would be a grant out of turn.
        if let Some(at) = at {
            let old = std::mem::replace(&mut line[at], (seat, owner.to_vec()));
            line.push(old);
        } else {
            line.push((seat, owner.to_vec()));
        }
    }

    /// Invariants 2 and 5.
    pub(crate) fn is_granted(
        &mut self,
        place: &Place,
        seat: Seat,
        (count, token): (i64, Token),
        space: &Keyspace,
    ) -> Result<(), String> {
        let line = self.lines.entry(place.clone()).or_default();
        if line.first().is_none_or(|(first, _)| *first != seat) {
            let place_of = line.iter().position(|(of, _)| *of == seat);
            return Err(format!("granted out of turn: {seat:?} at {place_of:?}"));
        }
        let (_, owner) = line.remove(0);
        let Some(Value::Hash(fields)) = space.get(place).map(|entry| &entry.value) else {
            return Err("a grant is told and nothing is stored".into());
        };
        let stored = fields.get(&owner).and_then(|count| number(count));
        let fence = format!("t{}", token.get()).into_bytes();
        if stored.is_none_or(|stored| stored < count) || fields.get(FENCE_FIELD) != Some(&fence) {
            return Err("a grant is told before it is written".into());
        }
        Ok(())
    }

    /// Invariant 5.
    pub(crate) fn leaves(&mut self, place: &Place, seat: Seat) -> Result<(), String> {
        let line = self.lines.entry(place.clone()).or_default();
        match line.iter().position(|(of, _)| *of == seat) {
            Some(at) => line.remove(at),
            None => return Err(format!("{seat:?} was told twice")),
        };
        Ok(())
    }

    pub(crate) fn is_refused(&mut self) {
        self.refused += 1;
    }

    /// Invariant 4.
    pub(crate) fn is_minted(&mut self, token: Token) -> Result<(), String> {
        if token.get() <= self.highest_token {
            let highest = self.highest_token;
            return Err(format!("token {} after {highest}", token.get()));
        }
        self.highest_token = token.get();
        Ok(())
    }
}

/// Invariant 6.
pub(crate) fn views_are_true(locks: &Locks, twin: &Twin, now: Now) -> Result<(), String> {
    for (place, line) in &twin.lines {
        let lock = LockRef {
            db: place.0,
            name: &place.1,
        };
        let shown: Vec<_> = locks.lines().waiters_of(lock, now).collect();
        let same = shown.len() == line.len()
            && shown.iter().zip(line).all(|(shown, waiter)| {
                let left_ms = waiter.wait_end.map_or(-1, |end| (end - now.mono_ms).max(0));
                *shown.owner == *waiter.owner
                    && usize::try_from(shown.client_id) == Ok(waiter.seat)
                    && shown.waited_ms == now.mono_ms - waiter.since
                    && shown.left_ms == left_ms
            });
        if !same {
            return Err(format!("INFO shows {shown:?}\n  the twin has {line:?}"));
        }
        let length = usize::try_from(locks.lines().waiting_for(lock)).unwrap();
        if length != line.len() {
            return Err(format!("{length} are counted in a line of {}", line.len()));
        }
        list_shows(locks, place, line.first().map(|first| first.since), now)?;
    }
    let waiting = u64::try_from(locks.lines().crowd().waiters).unwrap();
    let lines = twin.lines.values().filter(|line| !line.is_empty()).count();
    if waiting != twin.waiting() || locks.lines().crowd().locks != lines {
        return Err(format!("the crowd is {:?}", locks.lines().crowd()));
    }
    Ok(())
}

fn list_shows(locks: &Locks, place: &Place, since: Option<i64>, now: Now) -> Result<(), String> {
    let mut views = locks.lines().views(place.0, now);
    let view = views.find(|view| *view.name == *place.1);
    match (view.map(|view| view.longest_wait_ms), since) {
        (None, None) => Ok(()),
        (Some(longest), Some(since)) if longest == now.mono_ms - since => Ok(()),
        (shown, since) => Err(format!("LIST shows {shown:?}, first waits since {since:?}")),
    }
}

/// Invariants 3 and 7. In `unseen` are the locks that were changed without any event: those are
/// found by the periodic look, once a second of a wall clock that was set back by `set_back_ms`.
pub(crate) fn is_at_rest(
    locks: &Locks,
    twin: &Twin,
    unseen: &BTreeSet<Place>,
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
        if unseen.contains(place) {
            continue;
        }
        if twin.is_free(place) || twin.is_other_type(place) {
            return Err(format!("{line:?} wait for {place:?}, which is free"));
        }
        let lease_end = twin.space.get(place).and_then(|entry| entry.ends_at);
        if lease_end.is_some_and(|end| due_in > end + 1 - now.wall_ms()) {
            return Err(format!(
                "due in {due_in}: the lease of {place:?} ends before"
            ));
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
    };
    if counted != twin.tally {
        return Err(format!("counted {counted:?}\n  happened {:?}", twin.tally));
    }
    let gone = counted.timeouts + counted.cancels + counted.departures + ledger.refused;
    let here = u64::try_from(locks.lines().crowd().waiters).unwrap();
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

fn number(value: &[u8]) -> Option<i64> {
    str::from_utf8(value).ok()?.parse().ok()
}
