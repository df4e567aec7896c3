//! What must be done outside of any command: waits that are over, leases that have ended, keys that
//! others changed, grants that could not be delivered, sessions that have ended.
//!
//! All of it is done by one timer, in the event loop, because nowhere else is a write safe: within
//! a keyspace event it would reach the replicas before the change that caused it, and during a
//! pause or a failover a write from outside a command stops the server.

use crate::ffi::{self, Ctx, OwnedStr, Presence, Timer, Timers};
use crate::keys::OpenLock;
use crate::read_write::slot_is_settled;
use crate::{clock, cluster, effects, settle, state};
use rlock_core::{LockKey, Locks, Mode, Now, ReadDepth, Stored};

/// Makes sure that the timer fires when the next thing is due, and that there is none when nothing
/// is: the server refuses to unload a module that has a timer.
pub(crate) fn arm(ctx: Ctx<'_>, now: Now) {
    let (outdated, start_after_ms) = state::with(|state| {
        if state.pumping {
            // It is armed when it is done; before, it would fire again for what it is doing.
            return (None, None);
        }
        let after_ms = state.locks.next_deadline(now);
        let due = after_ms.map(|after_ms| now.after(after_ms));
        match (&state.timer, due) {
            // One that fires too early finds nothing to do, and is set anew.
            (Some(armed), Some(due)) if armed.due.mono_ms <= due.mono_ms => (None, None),
            _ => (state.timer.take(), after_ms),
        }
    });
    if let Some(armed) = outdated {
        armed.timer.stop(ctx);
    }
    if let Some(after_ms) = start_after_ms {
        start(ctx, now, after_ms);
    }
}

/// Stops the timer: for good, or to be armed anew.
pub(crate) fn stop(ctx: Ctx<'_>) {
    if let Some(armed) = state::with(|state| state.timer.take()) {
        armed.timer.stop(ctx);
    }
}

fn start(ctx: Ctx<'_>, now: Now, after_ms: i64) {
    let timer = Timer::start::<Pump>(ctx, after_ms);
    let due = now.after(after_ms);
    state::with(|state| state.timer = Some(Armed { timer, due }));
}

/// A timer that has not fired, and when it is to.
pub(crate) struct Armed {
    timer: Timer,
    pub(crate) due: Now,
}

/// While the server allows no write, it is asked again this often.
const RETRY_MS: i64 = 10;

/// Lines settled, and holds ended or checked, in one turn of the event loop; clients come between
/// two turns.
const BATCH: usize = 1000;

struct Pump;

impl Timers for Pump {
    fn fire(ctx: Ctx<'_>) {
        let (at_work, armed) = AtWork::begin();
        let retry = run(ctx);
        drop(at_work);
        let now = clock::now();
        // The server looks at the wall clock once, and fires all that is due by then. If the clock
        // was set back since, a timer that is armed here is due at once, and so is the next: the
        // server would do nothing else until the clock is where it was. So the next tick arms it.
        if armed.is_some_and(|armed| now.wall_us < armed.due.wall_us) {
            return;
        }
        match retry {
            Some(Retry) => start(ctx, now, RETRY_MS),
            None => arm(ctx, now),
        }
    }
}

/// While it lives, nothing arms the timer. It ends with the work, however that ends: a timer that
/// is never armed again would leave every waiter standing.
struct AtWork;

impl AtWork {
    /// With the timer that has fired.
    fn begin() -> (Self, Option<Armed>) {
        let armed = state::with(|state| {
            state.pumping = true;
            state.timer.take()
        });
        (Self, armed)
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        state::with(|state| state.pumping = false);
        cluster::forget_owners();
    }
}

/// The server allows no write now.
struct Retry;

fn run(ctx: Ctx<'_>) -> Option<Retry> {
    let (flags, now) = (ctx.flags(), clock::now());
    if flags.loading() {
        return Some(Retry);
    }
    tell_timeouts(ctx, now);
    if flags.replica() {
        // What stays marked would keep the timer firing; at a promotion all is looked at.
        state::with(|state| state.locks.forget_what_is_due());
        return None;
    }
    // What commands may not write, a grant may not either: it would be on no disk and no replica,
    // for as long as the server is in trouble.
    if ffi::writes_are_paused() || ctx.writes_are_denied() {
        return Some(Retry);
    }
    end_holds(ctx, ctx.in_cluster());
    check_holds(ctx, ctx.in_cluster());
    settle_lines(ctx, ctx.in_cluster());
    None
}

/// Waiters whose wait is over leave the line; listeners and sessions whose time is over are done.
fn tell_timeouts(ctx: Ctx<'_>, now: Now) {
    while let Some(overdue) = state::with(|state| state.locks.next_timeout(now)) {
        let owner = OwnedStr::new(&overdue.owner);
        let load = |lock: &LockKey| {
            ctx.select_db(lock.db);
            let name = OwnedStr::new(&lock.name);
            OpenLock::to_read(ctx, name.as_str()).load(owner.as_str(), ReadDepth::Brief)
        };
        let stored: Vec<Stored> = overdue.locks.iter().map(load).collect();
        effects::step_without_key(ctx, |locks, _, effects| {
            locks.time_out(&stored, now, effects);
        });
    }
    effects::step_without_key(ctx, Locks::passed);
}

/// Holds are ended that nobody is left to know of: grants that could not be delivered, and what
/// belonged to sessions that are over.
fn end_holds(ctx: Ctx<'_>, in_cluster: bool) {
    for _ in 0..BATCH {
        let Some(ending) = state::with(|state| state.locks.next_ending()) else {
            return;
        };
        settle::ending(ctx, &ending, in_cluster);
    }
}

/// Sessions hear of holds that were lost.
fn check_holds(ctx: Ctx<'_>, in_cluster: bool) {
    for _ in 0..BATCH {
        let Some((lock, owner, mode)) = state::with(|state| state.locks.next_hold_to_check())
        else {
            return;
        };
        ctx.select_db(lock.db);
        let (name, holder) = (OwnedStr::new(&lock.name), OwnedStr::new(&owner));
        let presence = match settle::presence(ctx, name.as_str(), in_cluster) {
            Presence::Here
                if mode != Mode::Plain && in_cluster && !slot_is_settled(ctx, &lock.name) =>
            {
                Presence::Unknown
            }
            presence => presence,
        };
        let open = OpenLock::to_write(ctx, name.as_str());
        let stored = open.load(holder.as_str(), ReadDepth::Own);
        effects::step(open, None, |locks, at, now, effects| match presence {
            Presence::Here => locks.check_hold(at, &owner, mode, stored, now, effects),
            Presence::Elsewhere => locks.hold_moved(at, &owner, mode),
            Presence::Unknown => locks.check_hold_again(at, &owner, mode, now),
        });
    }
}

/// Lines are brought in agreement with their keys.
fn settle_lines(ctx: Ctx<'_>, in_cluster: bool) {
    for _ in 0..BATCH {
        let Some(lock) = state::with(|state| state.locks.next_to_settle()) else {
            return;
        };
        settle::line(ctx, &lock, in_cluster);
    }
}
