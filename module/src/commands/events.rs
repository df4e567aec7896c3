//! `RLOCK.EVENTS session [EPOCH n] [AFTER life seq] [BLOCK wait-ms] [GRACE grace-ms]`: make this
//! the session connection, and hear what happened to the session's waits and holds.
//!
//! Replies `[life, [event, ...]]`, oldest first. An event is `[seq, kind, key, owner, value, token,
//! mode, db]`: `granted` with the token, `timeout` with the ttl-ms, `left` with 0 (the wait left
//! the queue when the session connection closed), `lost` with `expired`, `broken`, `deleted` or
//! `released`, `wanted` with the number of waiters, `error` with the error that a blocked waiter
//! would get. `token` is that of the hold that the event is about, 0 if there is none. There are no
//! events when wait-ms is over. Without `BLOCK` the reply comes at once.
//!
//! One reply has at most 1,000 events, or 256 KiB of names. The next call tells the rest at once.
//!
//! Events are kept until they are acknowledged: `AFTER` acknowledges those up to this number, and
//! without it a call acknowledges all that were told. The life changes when the session has begun
//! anew. A call that begins a life, or whose `AFTER` names another one, does not block. A call with
//! a smaller `EPOCH` than the session has seen is refused and changes nothing.
//!
//! When the session connection closes, the session's waiters leave their queues. Its holds are
//! released at once, or after grace-ms unless a connection has called this for the session by then.
//! Another connection of the same user that calls this takes the session over.

use super::{END, EPOCH, WAIT_MS, user_of};
use crate::clock;
use crate::config;
use crate::driving::{blocking, changes, pump};
use crate::ffi::{Args, Argument, Command, Ctx, Keys, Spec};
use crate::memory::state::{self, Listening};
use crate::writing::reply;
use rlock_core::{CommandError, SessionLimits, request};

pub(super) struct Events;

const LIFE: Argument = Argument::integer(c"life");
const SEQ: Argument = Argument::integer(c"seq");

impl Command for Events {
    const SPEC: Spec = Spec {
        name: c"rlock.events",
        summary: c"Makes the connection a session's own and tells what happened to its locks.",
        complexity: c"O(N) with N events",
        arity: -2,
        flags: c"blocking",
        categories: c"blocking lock",
        keys: Keys::None,
        arguments: &[
            Argument::text(c"session"),
            EPOCH,
            Argument::block(c"after", &[LIFE, SEQ, END])
                .after(c"AFTER")
                .optional(),
            WAIT_MS.after(c"BLOCK").optional(),
            Argument::integer(c"grace-ms").after(c"GRACE").optional(),
            END,
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::Events::parse(args.bytes())?;
        let flags = ctx.flags();
        if !flags.has_connection() || !ctx.has_known_client() {
            return Err(CommandError::NoSessionConnection);
        }
        let user = ctx.user_name();
        request.session.user = user_of(user.as_ref());
        let limits = SessionLimits {
            sessions: config::count(&config::SESSIONS_MAX),
            events_per_session: config::count(&config::EVENTS_PER_SESSION_MAX),
            out_of_memory: flags.out_of_memory(),
        };
        // Both before the session begins, or a change and a disconnect in between would be missed.
        changes::listen(ctx);
        changes::follow_clients(ctx);
        let client_id = ctx.client_id();
        let attached = pump::without_keys(ctx, |locks, now, effects| {
            locks.attach(&request, client_id, limits, now, effects)
        })?;
        let session = attached.session;
        if !attached.at_once
            && let Some(wait) = request.block
            && flags.may_block()
        {
            // An error if it cannot be blocked: an empty reply at once would make the client ask
            // again and again.
            let listens = blocking::listen(ctx, Listening { session, client_id }, wait);
            return listens.then_some(()).ok_or(CommandError::CannotBlock);
        }
        let now = clock::now();
        let told = state::with(|state| state.locks.take_events(session, now));
        reply::events(ctx, &told.ok_or(CommandError::NoSession)?);
        Ok(())
    }
}
