//! What must be done outside of any command: waits that are over, leases that have ended, keys that
//! others changed, grants that could not be delivered.
//!
//! All of it is done by one timer, in the event loop, because nowhere else is a write safe: within
//! a keyspace event it would reach the replicas before the change that caused it, and during a
//! pause or a failover a write from outside a command stops the server.

use crate::ffi::{self, Ctx, OwnedStr, Presence, Timer, Timers};
use crate::keys::OpenLock;
use crate::state::{self, Grant};
use crate::{clock, cluster, effects};
use rlock_core::{Dismissal, LockKey, Now};
use std::rc::Rc;

/// Makes sure that the timer fires when the next thing is due, and that there is none when nothing
/// is: the server refuses to unload a module that has a timer.
pub(crate) fn arm(ctx: Ctx<'_>, now: Now) {
    let (outdated, start_after_ms) = state::with(|state| {
        let undone = !state.to_take_back.is_empty();
        let after_ms = if undone {
            Some(0)
        } else {
            state.locks.next_deadline(now)
        };
        let due = after_ms.map(|after_ms| now.mono_ms.saturating_add(after_ms));
        match (state.timer, due) {
            // One that fires too early finds nothing to do, and is set anew.
            (Some((_, armed)), Some(due)) if armed <= due => (None, None),
            _ => (state.timer.take(), after_ms),
        }
    });
    if let Some((timer, _)) = outdated {
        timer.stop(ctx);
    }
    if let Some(after_ms) = start_after_ms {
        start(ctx, now, after_ms);
    }
}

/// Stops the timer for good: the module is being unloaded.
pub(crate) fn stop(ctx: Ctx<'_>) {
    if let Some((timer, _)) = state::with(|state| state.timer.take()) {
        timer.stop(ctx);
    }
}

fn start(ctx: Ctx<'_>, now: Now, after_ms: i64) {
    let timer = Timer::start::<Pump>(ctx, after_ms);
    let due = now.mono_ms.saturating_add(after_ms);
    state::with(|state| state.timer = Some((timer, due)));
}

/// While the server allows no write, it is asked again this often.
const RETRY_MS: i64 = 10;

/// Lines settled in one turn of the event loop; clients come between two turns.
const BATCH: usize = 1000;

struct Pump;

impl Timers for Pump {
    fn fire(ctx: Ctx<'_>) {
        state::with(|state| state.timer = None);
        let (flags, now) = (ctx.flags(), clock::now());
        if flags.loading() {
            start(ctx, now, RETRY_MS);
            return;
        }
        tell_timeouts(ctx, now);
        if flags.replica() {
            // The server has sent every waiter away, and what a primary granted is its to take
            // back.
            state::with(|state| state.to_take_back.clear());
            return;
        }
        if ffi::writes_are_paused() {
            start(ctx, now, RETRY_MS);
            return;
        }
        take_back_grants(ctx);
        settle_lines(ctx, now, flags.cluster());
        arm(ctx, clock::now());
    }
}

/// Waiters whose wait is over leave the line.
fn tell_timeouts(ctx: Ctx<'_>, now: Now) {
    while let Some((lock, seat)) = state::with(|state| state.locks.next_timeout(now)) {
        ctx.select_db(lock.db);
        let name = OwnedStr::new(&lock.name);
        let ttl_ms = OpenLock::to_read(ctx, name.as_str()).ttl_ms(now);
        effects::dismiss(seat, Dismissal::NotAcquired { ttl_ms });
    }
}

/// Grants whose client is gone are handed on.
fn take_back_grants(ctx: Ctx<'_>) {
    for Grant {
        lock, owner, token, ..
    } in state::with(|state| std::mem::take(&mut state.to_take_back))
    {
        ctx.select_db(lock.db);
        let (name, caller) = (OwnedStr::new(&lock.name), OwnedStr::new(&owner));
        let open = OpenLock::to_write(ctx, name.as_str());
        let stored = open.load(caller.as_str());
        effects::step(open, Some(caller.as_str()), |locks, at, now, effects| {
            locks.take_back(at, stored, &owner, token, now, effects);
        });
    }
}

/// Lines are brought in agreement with their keys.
fn settle_lines(ctx: Ctx<'_>, now: Now, in_cluster: bool) {
    state::with(|state| state.locks.passed(now));
    for _ in 0..BATCH {
        let Some((lock, first)) = state::with(|state| state.locks.next_to_settle()) else {
            return;
        };
        settle(ctx, &lock, &first, in_cluster);
    }
}

fn settle(ctx: Ctx<'_>, lock: &LockKey, first: &Rc<[u8]>, in_cluster: bool) {
    let name = OwnedStr::new(&lock.name);
    ctx.select_db(lock.db);
    let presence = if in_cluster {
        ctx.presence(name.as_str())
    } else {
        Presence::Here
    };
    let moved = match presence {
        Presence::Elsewhere => cluster::redirection(ctx, &lock.name),
        Presence::Here | Presence::Unknown => None,
    };
    let first = OwnedStr::new(first);
    let open = OpenLock::to_write(ctx, name.as_str());
    let stored = open.load(first.as_str());
    effects::step(open, None, |locks, at, now, effects| {
        match (presence, &moved) {
            (Presence::Here, _) => locks.settle(at, stored, now, effects),
            (_, Some(refusal)) => locks.dismiss_all(at, refusal, effects),
            // Nobody knows who serves the key. Here it looks free: a grant could be the second.
            (_, None) => locks.look_again(at, now),
        }
    });
}
