//! Clients that wait in line, blocked on their connection.
//!
//! A waiter's client can go away at any moment, also in the turn of the event loop in which it is
//! granted: the lock is written in its name by then, but it never hears so. Each way to go ends in
//! one of the callbacks below, and each of them asks what the client was: one that still waits
//! leaves the line, one whose grant is on its way gives it back.

use crate::ffi::{self, Blocking, Ctx, Handle, OwnedStr};
use crate::keys::OpenLock;
use crate::state::{self, Blocked};
use crate::{changes, clock, effects, pump, reply};
use rlock_core::request::Acquire;
use rlock_core::{Dismissal, Seat};

/// Blocks the client of an ACQUIRE that must wait and puts it in line. False if it cannot be
/// blocked.
pub(crate) fn wait(lock: OpenLock<'_>, request: &Acquire<'_>, ends_at: Option<i64>) -> bool {
    let ctx = lock.ctx;
    let Some(handle) = ffi::block::<Waiters>(ctx) else {
        return false;
    };
    let seat = Seat {
        handle,
        client_id: ctx.client_id(),
    };
    changes::listen(ctx);
    let waiter = effects::step(lock, None, |locks, at, now, effects| {
        locks.join(at, request, seat, ends_at, now, effects)
    });
    let Some(waiter) = waiter else {
        ffi::abort_block(handle);
        return false;
    };
    state::with(|state| state.blocked.insert(handle, Blocked::Waiting(waiter)));
    true
}

struct Waiters;

impl Blocking for Waiters {
    fn reply(ctx: Ctx<'_>, handle: Handle) {
        let told = state::with(|state| state.told(handle));
        match told {
            Some(Blocked::Granted(grant)) => reply::acquired(ctx, grant.count, grant.token),
            Some(Blocked::Dismissed(why)) => reply::dismissed(ctx, &why),
            Some(Blocked::Waiting(_) | Blocked::Gone) | None => ctx.reply_null(),
        }
    }

    fn unblocked_by_others(ctx: Ctx<'_>, handle: Handle) {
        let told = state::with(|state| state.told(handle));
        match told {
            Some(Blocked::Waiting(waiter)) => {
                let lock = state::with(|state| state.locks.depart(waiter));
                let ttl_ms = lock.map_or(0, |lock| {
                    ctx.select_db(lock.db);
                    let name = OwnedStr::new(&lock.name);
                    OpenLock::to_read(ctx, name.as_str()).ttl_ms(clock::now())
                });
                reply::dismissed(ctx, &Dismissal::NotAcquired { ttl_ms });
                ffi::unblock(handle);
                pump::arm(ctx, clock::now());
            }
            // It was unblocked by us in this very turn: then it gets what it was to get.
            Some(Blocked::Granted(grant)) => reply::acquired(ctx, grant.count, grant.token),
            Some(Blocked::Dismissed(why)) => reply::dismissed(ctx, &why),
            Some(Blocked::Gone) | None => ctx.reply_null(),
        }
    }

    fn disconnected(ctx: Ctx<'_>, handle: Handle) {
        let told = state::with(|state| state.told(handle));
        match told {
            Some(Blocked::Waiting(waiter)) => {
                state::with(|state| state.locks.depart(waiter));
                ffi::unblock(handle);
                pump::arm(ctx, clock::now());
            }
            // Not here: a write in this callback could come in the middle of somebody's command.
            Some(Blocked::Granted(grant)) if !grant.confirmed => {
                state::with(|state| state.to_take_back.push(grant));
                pump::arm(ctx, clock::now());
            }
            _ => {}
        }
    }

    fn forget(handle: Handle) {
        state::with(|state| state.blocked.remove(&handle));
    }
}
