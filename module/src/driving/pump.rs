//! What must be done outside of any command: waits that are over, leases that have ended, keys that
//! others changed, grants that could not be delivered, sessions that have ended.
//!
//! All of it is done by one timer, in the event loop, because nowhere else is a write safe: within
//! a keyspace event it would reach the replicas before the change that caused it, and during a
//! pause or a failover a write from outside a command stops the server.

use crate::clock;
use crate::driving::turn::{self, Named};
use crate::ffi::{self, Ctx, Timer, Timers};
use crate::memory::state::{self, Armed};
use crate::reading::cluster;
use crate::writing::effects;
use rlock_core::{Effect, Locks, Now, Turn};

/// Makes sure that the timer fires when the next thing is due, and that there is none when nothing
/// is: the server refuses to unload a module that has a timer. So do we while anything is due.
///
/// For what is not due soon one of the server's next ticks will arm it. Most holds of sessions are
/// given back before that, and a timer made and stopped for each costs as much as its record.
pub(crate) fn arm(ctx: Ctx<'_>, now: Now) {
    arm_at(ctx, now, true);
}

/// The same. If the moment is not full, the wall clock alone was read for it: then both are read
/// where the other counts, for what is due or for the timer.
#[inline]
pub(crate) fn arm_at(ctx: Ctx<'_>, now: Now, is_full: bool) {
    // The common case: nobody waits, and no session holds anything.
    let is_idle = state::with(|state| state.timer.is_none() && state.locks.is_quiet());
    if !is_idle {
        arm_for_what_is_due(ctx, now, is_full);
    }
}

fn arm_for_what_is_due(ctx: Ctx<'_>, now: Now, is_full: bool) {
    let (outdated, start_after_ms, now) = state::with(|state| {
        if state.pumping {
            // It is armed when it is done; before, it would fire again for what it is doing.
            return (None, None, now);
        }
        let full = || if is_full { now } else { clock::now() };
        let by_now = if state.locks.is_timed() { full() } else { now };
        let after_ms = state.locks.next_deadline(by_now);
        let is_idle = after_ms.is_none() && state.timer.is_none();
        if is_idle || after_ms.is_some_and(|after_ms| after_ms > SOON_MS) {
            return (None, None, now);
        }
        let now = full();
        let due = after_ms.map(|after_ms| now.after(after_ms));
        match (&state.timer, due) {
            // One that fires too early finds nothing to do, and is set anew.
            (Some(armed), Some(due)) if armed.due.mono_ms <= due.mono_ms => (None, None, now),
            _ => (state.timer.take(), after_ms, now),
        }
    });
    if let Some(armed) = outdated {
        armed.timer.stop(ctx);
    }
    if let Some(after_ms) = start_after_ms {
        start(ctx, now, after_ms);
    }
}

/// The server ticks once a second or more often.
const SOON_MS: i64 = 2000;

/// Makes a change that writes nothing, and tells whom it concerns.
pub(crate) fn without_keys<R>(
    ctx: Ctx<'_>,
    change: impl FnOnce(&mut Locks, Now, &mut Vec<Effect>) -> R,
) -> R {
    without_keys_at(ctx, clock::now(), change)
}

/// The same at this moment, which both clocks were read for.
pub(crate) fn without_keys_at<R>(
    ctx: Ctx<'_>,
    now: Now,
    change: impl FnOnce(&mut Locks, Now, &mut Vec<Effect>) -> R,
) -> R {
    let (result, effects) = state::with(|state| {
        let mut effects = std::mem::take(&mut state.spare_effects);
        (change(&mut state.locks, now, &mut effects), effects)
    });
    effects::tell_all(ctx, effects);
    arm(ctx, now);
    result
}

/// Whether anything is due, if only later.
pub(crate) fn is_due() -> bool {
    let now = clock::now();
    state::with(|state| state.locks.next_deadline(now).is_some())
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

/// While the server allows no write, it is asked again this often.
const RETRY_MS: i64 = 10;

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

/// While it lives, nothing arms the timer. It ends with the work, however that ends: if the timer
/// were never armed again, no waiter would be granted or timed out.
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
    let flags = ctx.flags();
    if flags.loading() {
        return Some(Retry);
    }
    turn::run(ctx, &mut Turn::of_deadlines(), Named::Nothing);
    without_keys(ctx, Locks::passed);
    if flags.replica() {
        // What stays marked would keep the timer firing; at a promotion all is looked at.
        state::with(|state| state.locks.forget_what_is_due());
        return None;
    }
    // While commands may not write, a grant may not either: it would be on no disk and no replica,
    // for as long as the server is in trouble.
    if ffi::writes_are_paused() || ctx.writes_are_denied() {
        return Some(Retry);
    }
    turn::run(ctx, &mut Turn::of_timer(), Named::Nothing);
    None
}
