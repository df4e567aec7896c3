//! What must be true after every step, whatever happened, beyond that the core does what the twin
//! does:
//!
//! 1. **One writer, or readers.** Nobody is let in beside a writer, and no writer beside anybody
//!    (`Keyspace::carry_out` refuses it); a grant is written before it is told, and told once.
//! 2. **Nobody waits who could have it**, once the driver has settled what was marked.
//! 3. **The views are true.** INFO and LIST show the twin's lines.
//! 4. **The timer is set**: not later than the end of the first wait, of the lease that the first
//!    in line waits for, of a session's grace or of a session's hold; and at rest not due already.
//! 5. **Sessions end, and their holds with them**; no hold is lost without word.
//! 6. **The counters add up.** Every waiter that ever sat down is granted, gone, or still there.
//! 7. **The keys are the layout's**, as long as nobody else writes to them.

use super::keyspace::{self, Entry, Keyspace, Value, timeout_key};
use super::life::HoldName;
use super::twin::{Tally, Twin, is_same};
use super::world::{LOCKS, OWNERS};
use rlock_core::{LockRef, Locks, Now};
use std::collections::BTreeSet;

/// Invariant 3.
pub(crate) fn views_are_true(locks: &Locks, twin: &Twin, now: Now) -> Result<(), String> {
    for name in LOCKS {
        let line = twin.line(name);
        let shown = locks.queue(LockRef { db: 0, name }, now);
        let is_same = shown.len() == line.len()
            && shown.iter().zip(line).all(|(shown, waiter)| {
                let left_ms = waiter.wait_end.map_or(-1, |end| (end - now.mono_ms).max(0));
                *shown.owner == *waiter.owner
                    && shown.mode == waiter.mode
                    && Some(shown.client_id) == twin.client_of(waiter)
                    && shown.waited_ms == now.mono_ms - waiter.since
                    && shown.left_ms == left_ms
            });
        if !is_same {
            return Err(format!("INFO shows {shown:?}\n  the twin has {line:?}"));
        }
        let mut views = locks.views(0, now);
        let view = views.find(|view| *view.name == *name);
        let length = view.map_or(0, |view| usize::try_from(view.waiters).unwrap());
        if length != line.len() {
            return Err(format!("LIST shows {length} of {line:?}"));
        }
    }
    if u64::try_from(locks.gauges().waiters).unwrap() != twin.waiting() {
        return Err(format!("the gauges is {:?}", locks.gauges()));
    }
    Ok(())
}

/// Invariants 2 and 4. In `unseen` are the locks that were changed without any event: those are
/// found by the periodic look, once a second of a wall clock that was set back by `set_back_ms`.
pub(crate) fn is_at_rest(
    locks: &Locks,
    twin: &Twin,
    unseen: &BTreeSet<Vec<u8>>,
    set_back_ms: i64,
    now: Now,
) -> Result<(), String> {
    let deadline = locks.next_deadline(now);
    let due_in = deadline.unwrap_or(i64::MAX);
    if deadline == Some(0) {
        return Err("the timer is due again at once".into());
    }
    for (lock, line) in twin.lines.iter().filter(|(_, line)| !line.is_empty()) {
        let wait_end = line.iter().filter_map(|waiter| waiter.wait_end).min();
        if wait_end.is_some_and(|end| due_in > end - now.mono_ms) {
            return Err(format!("due in {due_in}: a wait for {lock:?} ends before"));
        }
        if due_in > 1000 + set_back_ms {
            return Err(format!("due in {due_in}: no look at {lock:?} in time"));
        }
        if twin.is_delayed() && due_in > twin.delay_left_ms {
            return Err(format!("due in {due_in}: grants begin before"));
        }
        if unseen.contains(lock) || twin.is_mixed(lock) {
            continue;
        }
        if twin.is_other_type(lock) || twin.lets_first_in(lock) {
            return Err(format!("{line:?} wait for {lock:?}, and need not"));
        }
        let lease_end = twin.lease_before(lock, line[0].mode);
        if lease_end.is_some_and(|end| due_in > (end + 1).saturating_sub(now.wall_ms())) {
            return Err(format!(
                "due in {due_in}: the lease of {lock:?} ends before"
            ));
        }
    }
    Ok(())
}

/// Invariant 5, at any moment.
pub(crate) fn sessions_are_true(locks: &Locks, twin: &Twin) -> Result<(), String> {
    let (gauges, life) = (locks.gauges(), &twin.life);
    if (gauges.sessions, gauges.session_holds) != (life.sessions.len(), life.holds.len()) {
        return Err(format!(
            "the gauges is {gauges:?}\n  should be {:?}",
            life.shown()
        ));
    }
    let mut holds = life.holds.values();
    match holds.find(|hold| !life.sessions.contains_key(&hold.session)) {
        Some(hold) => Err(format!("{hold:?} outlives its session")),
        None => Ok(()),
    }
}

/// Invariants 4 and 5, when nothing is due. In `unseen` are the holds whose keys were changed
/// without any event.
pub(crate) fn sessions_are_at_rest(
    locks: &Locks,
    twin: &Twin,
    unseen: &BTreeSet<HoldName>,
    now: Now,
) -> Result<(), String> {
    let due_in = locks.next_deadline(now).unwrap_or(i64::MAX);
    for (name, session) in &twin.life.sessions {
        if let Some(end) = session.grace_end
            && (end <= now.mono_ms || due_in > end - now.mono_ms)
        {
            return Err(format!(
                "due in {due_in}: the grace of {name} is over before"
            ));
        }
        if session.client.is_none() && session.grace_end.is_none() {
            return Err(format!("{name}, {session:?} lives by nothing"));
        }
    }
    for (of, hold) in &twin.life.holds {
        if unseen.contains(of) {
            continue;
        }
        if let Some(end) = hold.ends_at
            && due_in > (end + 1).saturating_sub(now.wall_ms())
        {
            return Err(format!("due in {due_in}: {hold:?} ends before"));
        }
        let (lock, owner, mode) = of;
        let is_there = twin.holds(lock, owner, *mode)
            && is_same(*mode, hold.token, twin.token(lock, owner, *mode));
        if !is_there {
            return Err(format!("{of:?} is lost and nobody says so"));
        }
    }
    Ok(())
}

/// Invariant 6.
pub(crate) fn counters_add_up(locks: &Locks, twin: &Twin, seated: u64) -> Result<(), String> {
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
    };
    let happened = Tally {
        holds_lost: twin.life.lost,
        ..twin.tally
    };
    if counted != happened {
        return Err(format!("counted {counted:?}\n  happened {happened:?}"));
    }
    let gone = counted.timeouts + counted.cancels + counted.departures + twin.refused;
    let here = u64::try_from(locks.gauges().waiters).unwrap();
    if seated != counted.handovers + gone + here {
        return Err(format!("{seated} sat down, but {counted:?}"));
    }
    if counters.wait_ms.count() != counted.handovers {
        return Err("the wait histogram has not every hand-over once".into());
    }
    Ok(())
}

/// Invariant 7: no field and no key but those of the layout, none without an expiry, and no hash
/// that ends before a hold in it.
pub(crate) fn keys_are_ours(space: &Keyspace, twin: &Twin) -> Result<(), String> {
    for name in LOCKS {
        let Some(entry) = space.get(name) else {
            continue;
        };
        let Value::Hash(fields) = &entry.value else {
            return Err(format!("{entry:?} is no lock"));
        };
        let is_plain = space.mode(name).is_none();
        if is_plain != fields.contains_key(&b"fence"[..]) {
            return Err(format!("{entry:?} is neither kind"));
        }
        let (writers, readers) = (space.writers(name), space.readers(name));
        let says_write = space.mode(name) == Some(b"write");
        if says_write == writers.is_empty() && !is_plain {
            return Err(format!("{entry:?} says a wrong mode"));
        }
        let is_alone = readers.iter().all(|(owner, _)| writers.contains(owner));
        if writers.len() > 1 || (!writers.is_empty() && !is_alone) {
            return Err(format!("{entry:?} has too many in it"));
        }
        let longest = readers.iter().map(|(_, reader)| reader.ends_at).max();
        if longest > entry.ends_at {
            return Err(format!("{entry:?} ends before {readers:?}"));
        }
        if twin.is_free(name) && !twin.line(name).is_empty() {
            return Err(format!("{entry:?} is free, and somebody waits"));
        }
    }
    let is_timeout = |key: &[u8]| {
        let number = key
            .iter()
            .rposition(|byte| *byte == b':')
            .map_or(0, |at| at + 1);
        let Some(number) = keyspace::number(&key[number..]) else {
            return false;
        };
        let of_lock = |name| {
            OWNERS
                .iter()
                .any(|owner| timeout_key(name, owner, number) == key)
        };
        LOCKS.into_iter().any(of_lock)
    };
    let is_ours = |key: &[u8], entry: &Entry| {
        entry.ends_at.is_some() && (LOCKS.contains(&key) || is_timeout(key))
    };
    match space.entries().find(|(key, entry)| !is_ours(key, entry)) {
        Some((key, entry)) => Err(format!("{:?}: {entry:?}", key.escape_ascii().to_string())),
        None => Ok(()),
    }
}
