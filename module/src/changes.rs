//! Changes that others make: to keys, and to the server as a whole. Nothing is written here; lines
//! are marked, and the pump looks at them when it is safe to.

use crate::ffi::{self, Ctx, KeyEvents, ServerEvent, ServerEvents};
use crate::{clock, config, effects, pump, state};
use rlock_core::LockRef;

/// Hears of changed keys from now on. Called when somebody waits, or there is a session.
pub(crate) fn listen(ctx: Ctx<'_>) {
    let heard_before = state::with(|state| std::mem::replace(&mut state.hears_key_events, true));
    if !heard_before {
        ffi::subscribe_to_key_events::<Changes>(ctx);
    }
}

/// Hears of clients that go, from now on. Called when there is a session.
pub(crate) fn follow_clients(ctx: Ctx<'_>) {
    let heard_before = state::with(|state| std::mem::replace(&mut state.hears_client_events, true));
    if !heard_before {
        ffi::subscribe_to_client_events::<Changes>(ctx);
    }
}

/// Hears of the server's changes from now on.
pub(crate) fn follow_server(ctx: Ctx<'_>) {
    ffi::subscribe_to_server_events::<Changes>(ctx);
}

/// Lifts the token mark, as after anything that may have brought another server's tokens here.
pub(crate) fn start_tokens() {
    let (now, guard_ms) = (clock::now(), config::fence_guard_ms());
    state::with(|state| state.locks.start_tokens(now, guard_ms));
}

struct Changes;

impl KeyEvents for Changes {
    fn changed(ctx: Ctx<'_>, key: &[u8]) {
        let db = ctx.db();
        let marked = state::with(|state| {
            // Our own doing: the line knows already.
            state.acting == 0 && state.locks.touched(LockRef { db, name: key })
        });
        if marked {
            pump::arm(ctx, clock::now());
        }
    }
}

impl ServerEvents for Changes {
    fn happened(ctx: Ctx<'_>, event: ServerEvent) {
        match event {
            ServerEvent::Promoted => {
                start_tokens();
                state::with(|state| state.locks.all_touched(None));
            }
            ServerEvent::Demoted => {
                effects::step_without_key(ctx, |locks, _, effects| locks.demoted(effects));
            }
            ServerEvent::ClientGone(client_id) => {
                effects::step_without_key(ctx, |locks, now, effects| {
                    locks.client_gone(client_id, now, effects)
                });
            }
            ServerEvent::Loaded => {
                start_tokens();
                state::with(|state| state.locks.all_touched(None));
            }
            ServerEvent::Flushed(db) => state::with(|state| state.locks.all_touched(db)),
            ServerEvent::Swapped(first, second) => state::with(|state| {
                state.locks.all_touched(Some(first));
                state.locks.all_touched(Some(second));
            }),
        }
        pump::arm(ctx, clock::now());
    }
}
