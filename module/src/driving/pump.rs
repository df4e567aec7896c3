//! The work outside of commands: waits that time out, leases that end, keys that others changed,
//! grants that could not be delivered, sessions that ended.
//!
//! One timer in the event loop does all of it, because a write is safe nowhere else: within a
//! keyspace event it would reach the replicas before the change that caused it, and during a pause
//! or a failover a write from outside a command stops the server.

use crate::clock;
use crate::config;
use crate::driving::turn::{self, Named};
use crate::ffi::{self, Ctx, Timer, Timers};
use crate::memory::state::{self, Armed, Finally};
use crate::reading::cluster;
use crate::writing::effects;
use rlock_core::{Command, CommandError, Effect, Locks, Now, Outcome, Turn};

/// Begins the turn of a command.
pub(crate) fn begin<'c>(ctx: Ctx<'_>, command: Command<'c>) -> Turn<'c> {
    Turn::of(
        command,
        ctx.db(),
        config::count(&config::WAITERS_PER_LOCK_MAX),
    )
}

/// Runs the turn of a command, and arms the timer. Returns the moment of the last decision, if both
/// clocks were read for it.
///
/// If the caller must wait, the timer is armed later, when the caller has joined a queue or was
/// turned away: now the end of its wait is not known yet.
pub(crate) fn run_command(
    ctx: Ctx<'_>,
    turn: &mut Turn<'_>,
    given: Named<'_>,
    then: impl FnOnce(&Result<Outcome, CommandError>),
) -> Option<Now> {
    let (now, is_full) = turn::run(ctx, turn, given, then);
    if !matches!(turn.decided(), Some(Ok(Outcome::MustWait { .. }))) {
        arm_at(ctx, now, is_full);
    }
    is_full.then_some(now)
}

/// Arms the timer for the next deadline, or stops it if nothing is due: the server refuses to
/// unload a module that has a timer. So do we while anything is due.
///
/// A deadline that is not soon is left to one of the server's next ticks. Most holds of sessions
/// are given back before that, and making and stopping a timer for each would cost as much as its
/// record.
pub(crate) fn arm(ctx: Ctx<'_>, now: Now) {
    arm_at(ctx, now, true);
}

/// The same. If `is_full` is false, only the wall clock was read for `now`. Then both clocks are
/// read where the monotonic one counts: for the deadlines, or for the timer.
#[inline]
fn arm_at(ctx: Ctx<'_>, now: Now, is_full: bool) {
    // The common case: no client waits, and no session holds anything.
    let is_idle = state::with(|state| state.timer.is_none() && state.locks.is_quiet());
    if !is_idle {
        arm_for_what_is_due(ctx, now, is_full);
    }
}

fn arm_for_what_is_due(ctx: Ctx<'_>, now: Now, is_full: bool) {
    let (outdated, start_after_ms, now) = state::with(|state| {
        if state.pumping {
            // The timer's work arms it when it ends. Armed now, it would fire again for the same
            // work.
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
            // A timer that fires too early finds nothing to do, and is armed anew.
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

/// The server ticks at least once a second, so a tick can arm the timer for any later deadline.
const SOON_MS: i64 = 2000;

/// Makes a change that writes no key, and carries out its effects.
pub(crate) fn without_keys<R>(
    ctx: Ctx<'_>,
    change: impl FnOnce(&mut Locks, Now, &mut Vec<Effect>) -> R,
) -> R {
    without_keys_at(ctx, clock::now(), change)
}

/// The same at a moment for which both clocks were read.
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

/// Whether anything is due, now or later.
pub(crate) fn is_due() -> bool {
    let now = clock::now();
    state::with(|state| state.locks.next_deadline(now).is_some())
}

/// Stops the timer, for good or to arm it anew.
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

/// While the server allows no write, the timer fires this often to ask again.
const RETRY_MS: i64 = 10;

struct Pump;

impl Timers for Pump {
    fn fire(ctx: Ctx<'_>) {
        let armed = state::with(|state| {
            state.pumping = true;
            state.timer.take()
        });
        // While this lives, nothing arms the timer. If the timer were never armed again, no waiter
        // would be granted or timed out.
        let at_work = Finally(|state| state.pumping = false);
        let retry = run(ctx);
        drop(at_work);
        cluster::forget_owners();
        let now = clock::now();
        // The server reads the wall clock once, and fires all timers that are due by then. If the
        // clock was set back since, a timer that is armed here is due at once, and so is the next:
        // the server would do nothing else until the clock has caught up. So the next tick arms it.
        if armed.is_some_and(|armed| now.wall_us < armed.due.wall_us) {
            return;
        }
        match retry {
            Some(Retry) => start(ctx, now, RETRY_MS),
            None => arm(ctx, now),
        }
    }
}

/// The server allows no write now.
struct Retry;

fn run(ctx: Ctx<'_>) -> Option<Retry> {
    let flags = ctx.flags();
    if flags.loading() {
        return Some(Retry);
    }
    turn::run(ctx, &mut Turn::of_deadlines(), Named::Nothing, |_| ());
    without_keys(ctx, Locks::passed);
    if flags.replica() {
        // A replica grants and releases nothing, and marks that stay would keep the timer firing. A
        // promotion marks all locks again.
        state::with(|state| state.locks.forget_what_is_due());
        return None;
    }
    // While commands may not write, a grant may not either: as long as the server is in trouble,
    // the grant would reach no disk and no replica.
    if ffi::writes_are_paused() || ctx.writes_are_denied() {
        return Some(Retry);
    }
    turn::run(ctx, &mut Turn::of_timer(), Named::Nothing, |_| ());
    None
}
