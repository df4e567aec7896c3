//! Changes that others make: to keys, and to the server as a whole. Nothing is written here: locks
//! are marked dirty, and the timer reconciles them when the server allows writes.

use crate::clock;
use crate::config;
use crate::driving::pump;
use crate::ffi::{self, Ctx, KeyEvents, ServerEvent, ServerEvents, Str};
use crate::memory::state::{self, Armed};
use crate::writing::{publish, restore};
use rlock_core::{LockRef, Now};
use std::sync::atomic::{AtomicBool, Ordering};

/// Listens to changed keys from now on. Called when a client waits, or a session begins.
pub(crate) fn listen(ctx: Ctx<'_>) {
    let heard_before = state::with(|state| std::mem::replace(&mut state.hears_key_events, true));
    if !heard_before {
        ffi::subscribe_to_key_events::<Changes>(ctx);
        // The first tick compares with this.
        let now = clock::now();
        state::with(|state| state.wall_ahead_ms = Some(wall_ahead_ms(now)));
    }
}

/// Listens to clients that disconnect, from now on. Called when a session begins.
pub(crate) fn follow_clients(ctx: Ctx<'_>) {
    let heard_before = state::with(|state| std::mem::replace(&mut state.hears_client_events, true));
    if !heard_before {
        ffi::subscribe_to_client_events::<Changes>(ctx);
    }
}

/// Listens to the server's changes from now on.
pub(crate) fn follow_server(ctx: Ctx<'_>) {
    ffi::subscribe_to_server_events::<Changes>(ctx);
    ffi::count_expired_keys(ctx);
    look_for_replicas(ctx);
    restore::look_for_limits(ctx);
    let is_starting = ctx.flags().starting();
    if !is_starting {
        // While the server starts it has not read its users yet.
        restore::look_for_rights();
    }
    AT_WORK.store(is_starting, Ordering::Relaxed);
}

/// Looks whether the server has replicas. From the first one on we listen to the ends of the event
/// loop's turns, when unlock messages go to them.
fn look_for_replicas(ctx: Ctx<'_>) {
    publish::look_for_replicas(ctx);
    if publish::has_replicas() {
        let heard_before = state::with(|state| std::mem::replace(&mut state.hears_turns, true));
        if !heard_before {
            ffi::subscribe_to_turns::<Changes>(ctx);
        }
    }
}

/// Raises the token mark. Called after every change that may have brought another server's tokens
/// here.
pub(crate) fn start_tokens() {
    let (now, guard_ms) = (clock::now(), config::now(&config::FENCE_GUARD_MS));
    state::with(|state| state.locks.start_tokens(now, guard_ms));
}

/// Starts the grant delay when the module is loaded. A promotion does not start it again: the delay
/// is for a server that lost its data, not for a failover.
pub(crate) fn start_grant_delay() {
    let (now, delay_ms) = (clock::now(), config::now(&config::GRANT_DELAY_MS));
    state::with(|state| state.locks.start_grant_delay(now, delay_ms));
}

/// Applies the options of the log and of the counters, at the load and whenever an option is set.
pub(crate) fn take_options() {
    let (log, patterns) = (config::log_options(), config::metrics_patterns());
    state::with(|state| {
        state.locks.set_log_options(log);
        state.locks.set_metrics_patterns(&patterns);
    });
}

/// The server's timers and the leases follow the wall clock. After it was set back, timers fire
/// late by as much; after it was set forwards, leases end sooner than timers fire. In both cases
/// all locks are marked dirty and the timer is armed anew. The same is done if the timer is overdue
/// by the monotonic clock: it was armed while the wall clock was wrong, and the clock was corrected
/// before this tick.
fn tick(ctx: Ctx<'_>) {
    let now = clock::now();
    let ahead_ms = wall_ahead_ms(now);
    let was_set = state::with(|state| {
        let before = state.wall_ahead_ms.replace(ahead_ms);
        let was_set = before.is_some_and(|before| before.abs_diff(ahead_ms) > STEP_MS);
        let is_overdue = |armed: &Armed| now.mono_ms.saturating_sub(armed.due.mono_ms) > OVERDUE_MS;
        let was_set = was_set || state.timer.as_ref().is_some_and(is_overdue);
        if was_set {
            state.locks.all_changed(None);
        }
        was_set
    });
    if was_set {
        pump::stop(ctx);
    }
    // In any case: the pump may have left the timer to this tick, and a later deadline may be soon
    // by now.
    pump::arm(ctx, now);
}

fn wall_ahead_ms(now: Now) -> i64 {
    now.wall_ms().saturating_sub(now.mono_ms)
}

/// A smaller step of the clock delays nothing that matters.
const STEP_MS: u64 = 20;

/// A busy server also fires its timers late, but not by this much.
const OVERDUE_MS: i64 = 200;

/// Whether clients may have sent commands of ours. Not before the first tick after `MODULE LOAD`,
/// since the load may still fail and then unloads us. Nor while the server ends: Valkey 9 then
/// unloads its modules.
pub(crate) fn at_work() -> bool {
    AT_WORK.load(Ordering::Relaxed)
}

static AT_WORK: AtomicBool = AtomicBool::new(false);

struct Changes;

impl KeyEvents for Changes {
    fn changed(ctx: Ctx<'_>, key: Str<'_>) {
        // An event of our own write changes nothing.
        if state::with(|state| state.take_own_event(key)) {
            return;
        }
        let lock = LockRef {
            db: ctx.db(),
            name: key.bytes(),
        };
        if state::with(|state| state.locks.changed(lock)) {
            pump::arm(ctx, clock::now());
        }
    }
}

impl ServerEvents for Changes {
    fn happened(ctx: Ctx<'_>, event: ServerEvent) {
        match event {
            ServerEvent::HasNewData => {
                start_tokens();
                state::with(|state| state.locks.all_changed(None));
            }
            ServerEvent::Demoted => {
                pump::without_keys(ctx, |locks, _, effects| locks.demoted(effects));
            }
            ServerEvent::ReplicasChanged => return look_for_replicas(ctx),
            ServerEvent::TurnEnds => return publish::tell_replicas(ctx),
            ServerEvent::ClientGone(client_id) => {
                pump::without_keys(ctx, |locks, now, effects| {
                    locks.client_gone(client_id, now, effects)
                });
            }
            ServerEvent::Tick => {
                AT_WORK.store(true, Ordering::Relaxed);
                // The server announces a replica only when it is online, not when it begins to
                // sync.
                look_for_replicas(ctx);
                restore::look_for_rights();
                return tick(ctx);
            }
            ServerEvent::Configured => {
                let delay_ms = config::now(&config::GRANT_DELAY_MS);
                state::with(|state| state.locks.set_grant_delay(delay_ms));
                take_options();
                restore::look_for_limits(ctx);
                restore::look_for_rights();
            }
            ServerEvent::Shutdown => return AT_WORK.store(false, Ordering::Relaxed),
            ServerEvent::Flushed(db) => state::with(|state| state.locks.all_changed(db)),
            ServerEvent::Swapped(first, second) => state::with(|state| {
                state.locks.all_changed(Some(first));
                state.locks.all_changed(Some(second));
            }),
        }
        pump::arm(ctx, clock::now());
    }
}
