//! `RLOCK.EVENTS session [BLOCK wait-ms] [GRACE grace-ms]`: make this the session connection, and
//! fetch what happened to the session's waits and holds.
//!
//! Replies an array of `[kind, key, owner, value]`, oldest first: `granted` with the token,
//! `timeout` with the ttl-ms, `lost` with `expired`, `broken` or `deleted`, `wanted` with the
//! number of waiters, `error` with the error that a blocked waiter would get. The array is empty
//! when wait-ms is over. Without `BLOCK` the reply comes at once.
//!
//! When the session connection closes, the session's waiters leave their queues, and grants that
//! were not fetched are taken back. Its holds are released at once, or after grace-ms unless a
//! connection has called this for the session by then. Another connection of the same user that
//! calls this takes the session over.

use super::user_of;
use crate::config;
use crate::driving::{blocking, changes, pump};
use crate::ffi::{Args, Argument, ArgumentKind, Command, Ctx, Keys, Spec};
use crate::memory::state::{self, Listening};
use crate::writing::reply;
use rlock_core::{CommandError, SessionLimits, request};

pub(super) struct Events;

impl Command for Events {
    const SPEC: Spec = Spec {
        name: c"rlock.events",
        summary: c"Makes the connection a session's own and tells what happened to its locks.",
        complexity: c"O(N) with N events",
        since: c"0.1.0",
        arity: -2,
        flags: c"blocking",
        categories: c"blocking lock",
        keys: Keys::None,
        arguments: &[
            Argument::new(c"session", ArgumentKind::Text),
            Argument::option(c"BLOCK", c"wait-ms", ArgumentKind::Integer),
            Argument::option(c"GRACE", c"grace-ms", ArgumentKind::Integer),
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
            sessions: config::sessions_max(),
            events_per_session: config::events_per_session_max(),
            out_of_memory: flags.out_of_memory(),
        };
        // Both before the session begins, or a change and a disconnect in between would be missed.
        changes::listen(ctx);
        changes::follow_clients(ctx);
        let client_id = ctx.client_id();
        let session = pump::without_keys(ctx, |locks, now, effects| {
            locks.attach(&request, client_id, limits, now, effects)
        })?;
        let events = state::with(|state| state.locks.fetch(session));
        if events.is_empty()
            && let Some(wait) = request.block
            && flags.may_block()
        {
            // An error if it cannot be blocked: an empty reply at once would make the client ask
            // again and again.
            let listens = blocking::listen(ctx, Listening { session, client_id }, wait);
            return listens.then_some(()).ok_or(CommandError::CannotBlock);
        }
        reply::events(ctx, &events);
        Ok(())
    }
}
