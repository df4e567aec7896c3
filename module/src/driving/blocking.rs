//! Clients that the server keeps blocked for us: for a lock, or for a session's events.
//!
//! Such a client can disconnect at any moment, even in the turn of the event loop in which it is
//! unblocked: its grant may be written by then, and it never gets the reply. Each end of a block
//! calls one of the callbacks below, and each of them looks up the client's wait: a waiter leaves
//! the queue, and a grant that is not delivered yet is given back.

use crate::clock;
use crate::driving::pump;
use crate::ffi::{self, Blocking, Ctx, Handle, OwnedStr};
use crate::memory::state::{self, Blocked, Granted, Listening};
use crate::reading::open_lock::{Access, OpenLock};
use crate::reading::read_write::begin_looks;
use crate::writing::reply;
use rlock_core::{BlockedClient, CommandError, Joined, Wait, WaitOutcome};

/// Blocks the client of a command that must wait; `join` puts it in the queue. False if it cannot
/// be blocked or cannot join.
pub(crate) fn wait(ctx: Ctx<'_>, join: impl FnOnce(BlockedClient) -> Option<Joined>) -> bool {
    let Some(handle) = ffi::block::<Clients>(ctx) else {
        return false;
    };
    let client = BlockedClient {
        handle,
        client_id: ctx.client_id(),
    };
    let joined = join(client);
    let Some(joined) = joined else {
        ffi::abort_block(handle);
        return false;
    };
    let waiting = Blocked::Waiting(joined.waiter);
    state::with(|state| state.blocked.insert(handle, waiting));
    true
}

/// Blocks the client of an EVENTS until its session has events. False if it cannot be blocked.
pub(crate) fn listen(ctx: Ctx<'_>, listening: Listening, wait: Wait) -> bool {
    let Some(handle) = ffi::block::<Clients>(ctx) else {
        return false;
    };
    let now = clock::now();
    state::with(|state| {
        state.blocked.insert(handle, Blocked::Listening(listening));
        state.locks.listen(listening.session, handle, wait, now);
    });
    pump::arm(ctx, now);
    true
}

struct Clients;

impl Blocking for Clients {
    fn reply(ctx: Ctx<'_>, handle: Handle) {
        match state::with(|state| state.told(handle)) {
            Some(Blocked::Waiting(waiter)) => {
                let (asked, lock) = state::with(|state| {
                    let asked = state.locks.asked_by(waiter);
                    (asked, state.locks.waiter_gone(waiter))
                });
                let ttl_ms = lock.map_or(0, |lock| {
                    ctx.select_db(lock.db);
                    begin_looks();
                    let name = OwnedStr::new(&lock.name);
                    let now = clock::now();
                    let lock = OpenLock::open(ctx, name.as_str(), Access::Read);
                    let ttl_ms = lock.ttl_ms(asked, now);
                    state::with(|state| state.locks.ttl_or_delay_ms(ttl_ms, now))
                });
                reply::left(ctx, &WaitOutcome::NotAcquired { ttl_ms });
            }
            Some(Blocked::Listening(listening)) => {
                state::with(|state| state.locks.listen_no_more(listening.session, handle));
                reply_to(ctx, Blocked::Woken(listening));
            }
            // We have unblocked it.
            Some(blocked) => return reply_to(ctx, blocked),
            None => return ctx.reply_null(),
        }
        ffi::unblock(handle);
        pump::arm(ctx, clock::now());
    }

    fn disconnected(ctx: Ctx<'_>, handle: Handle) {
        match state::with(|state| state.told(handle)) {
            Some(Blocked::Waiting(waiter)) => {
                state::with(|state| state.locks.waiter_gone(waiter));
                ffi::unblock(handle);
            }
            Some(Blocked::Listening(listening)) => {
                state::with(|state| state.locks.listen_no_more(listening.session, handle));
                ffi::unblock(handle);
            }
            // Given back later: a write in this callback could come in the middle of another
            // client's command.
            Some(Blocked::Granted(granted)) if !granted.confirmed => state::with(|state| {
                let Granted {
                    lock, owner, grant, ..
                } = granted;
                state.locks.end_grant_later(&lock, &owner, &grant);
            }),
            Some(Blocked::Woken(listening)) => {
                state::with(|state| state.locks.woken_no_more(listening.session));
            }
            _ => {}
        }
        pump::arm(ctx, clock::now());
    }

    fn forget(handle: Handle) {
        state::with(|state| state.forget(handle));
    }
}

/// The reply to a client that was unblocked.
fn reply_to(ctx: Ctx<'_>, blocked: Blocked) {
    match blocked {
        Blocked::Granted(granted) => reply::acquired(ctx, granted.count, granted.grant.token),
        Blocked::Left(why) => reply::left(ctx, &why),
        Blocked::Woken(Listening { session, client_id }) => {
            // Another client may have taken the session over in this turn; then the events belong
            // to that client.
            let now = clock::now();
            match state::with(|state| state.locks.take_events_as(session, client_id, now)) {
                Ok(told) => reply::events(ctx, &told),
                Err(error) => ctx.reply_error(&error.to_string()),
            }
        }
        Blocked::TakenOver(by) => ctx.reply_error(&CommandError::TakenOver(by).to_string()),
        Blocked::Waiting(_) | Blocked::Listening(_) | Blocked::Gone => ctx.reply_null(),
    }
}
