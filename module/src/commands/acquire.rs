//! `RLOCK.ACQUIRE key owner lease-ms [BLOCK wait-ms | QUEUE wait-ms] [SESSION session] [ONCE]`:
//! take the lock, or wait for it.
//!
//! Replies `[count, token]` when held, `[0, ttl-ms]` when not, `[-1, position]` when queued. A free
//! lock is taken with count 1 and a new token; an owner who holds it re-enters, and its lease
//! starts anew. `BLOCK` waits in line, first come first served, where the server can block the
//! client; elsewhere the reply is as without it. `QUEUE` waits in the same line for a session,
//! which is told by RLOCK.EVENTS. With `SESSION` the hold ends with the session. `ONCE` makes a
//! repeated ACQUIRE harmless: what the owner holds is not counted again, and a place in line is
//! kept. A wait that could never end is refused.
//!
//! Replicated as `HSET` and `PEXPIREAT` with final values; when refused, not at all.

use super::{KEY, LEASE_MS, OWNER, SESSION};
use crate::ffi::{Access, Args, Argument, ArgumentKind, Command, Ctx, Spec};
use crate::keys::OpenLock;
use crate::{blocking, changes, config, deadlock, effects, reply, state};
use rlock_core::request::Patience;
use rlock_core::{Acquired, Refusal, request};

pub(super) struct Acquire;

impl Command for Acquire {
    const SPEC: Spec = Spec {
        name: c"rlock.acquire",
        summary: c"Takes a lock or enters it once more, and waits for it in line if asked to.",
        complexity: c"O(1); a wait O(N) with N owners that wait for each other in turn",
        since: c"0.1.0",
        arity: -4,
        flags: c"write deny-oom fast",
        categories: c"write fast lock",
        key: Some(Access::Update),
        arguments: &[
            KEY,
            OWNER,
            LEASE_MS,
            Argument::either(&[
                Argument::with_token(c"BLOCK", c"wait-ms", ArgumentKind::Integer),
                Argument::with_token(c"QUEUE", c"wait-ms", ArgumentKind::Integer),
            ]),
            SESSION,
            Argument::option(c"ONCE", c"once", ArgumentKind::Word),
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), Refusal> {
        let mut request = request::Acquire::parse(args.bytes())?;
        if matches!(request.patience, Patience::Block(_)) && !ctx.flags().may_block() {
            request.patience = Patience::None;
        }
        let (name, owner) = (args.at(1)?, args.at(2)?);
        let lock = OpenLock::to_write(ctx, name);
        let stored = lock.load(owner);
        let waiters_max = config::waiters_per_lock_max();
        let acquired = effects::step(lock, Some(owner), |locks, at, now, effects| {
            locks.acquire(at, stored, &request, waiters_max, now, effects)
        })?;
        match acquired {
            Acquired::Held { count, token } => {
                if request.once {
                    confirm(ctx, &request);
                }
                reply::acquired(ctx, count, token);
            }
            Acquired::NotHeld { ttl_ms } => reply::not_acquired(ctx, ttl_ms),
            Acquired::MustWait { ends_at, ttl_ms } => {
                deadlock::refuse(ctx, name, &request)?;
                changes::listen(ctx);
                if !wait(OpenLock::to_read(ctx, name), &request, ends_at) {
                    reply::not_acquired(ctx, ttl_ms);
                }
            }
        }
        Ok(())
    }
}

/// Puts the caller in line; a queued one is told its place at once. False if it cannot wait.
fn wait(lock: OpenLock<'_>, request: &request::Acquire<'_>, ends_at: Option<i64>) -> bool {
    if let Patience::Block(_) = request.patience {
        return blocking::wait(lock, request, ends_at);
    }
    let ctx = lock.ctx;
    let joined = effects::step(lock, None, |locks, at, now, effects| {
        locks.join(at, request, None, ends_at, now, effects)
    });
    if let Some(joined) = joined {
        reply::queued(ctx, joined.position);
    }
    joined.is_some()
}

fn confirm(ctx: Ctx<'_>, request: &request::Acquire<'_>) {
    let at = rlock_core::LockRef {
        db: ctx.db(),
        name: request.key,
    };
    state::with(|state| state.confirm(at, request.owner));
}
