//! `RLOCK.ACQUIRE key owner lease-ms [BLOCK wait-ms] [ONCE]`: take the lock, or wait for it.
//!
//! Replies `[count, token]` when held, `[0, ttl-ms]` when not. A free lock is taken with count 1
//! and a new token; an owner who holds it re-enters, and its lease starts anew. `BLOCK` waits in
//! line, first come first served, where the server can block the client; elsewhere the reply is as
//! without it. `ONCE` makes a repeated ACQUIRE harmless: what the owner holds is not counted again,
//! and a place in line is kept.
//!
//! Replicated as `HSET` and `PEXPIREAT` with final values; when refused, not at all.

use super::{KEY, LEASE_MS, OWNER};
use crate::ffi::{Access, Args, Argument, ArgumentKind, Command, Ctx, Spec};
use crate::keys::OpenLock;
use crate::{blocking, config, effects, reply, state};
use rlock_core::{Acquired, Refusal, request};

pub(super) struct Acquire;

impl Command for Acquire {
    const SPEC: Spec = Spec {
        name: c"rlock.acquire",
        summary: c"Takes a lock or enters it once more, and waits for it in line if asked to.",
        complexity: c"O(1)",
        since: c"0.1.0",
        arity: -4,
        flags: c"write deny-oom fast",
        categories: c"write fast lock",
        key: Some(Access::Update),
        arguments: &[
            KEY,
            OWNER,
            LEASE_MS,
            Argument::option(c"BLOCK", c"wait-ms", ArgumentKind::Integer),
            Argument::option(c"ONCE", c"once", ArgumentKind::Word),
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), Refusal> {
        let mut request = request::Acquire::parse(args.bytes())?;
        if request.block.is_some() && !ctx.flags().may_block() {
            request.block = None;
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
                if !blocking::wait(OpenLock::to_read(ctx, name), &request, ends_at) {
                    reply::not_acquired(ctx, ttl_ms);
                }
            }
        }
        Ok(())
    }
}

fn confirm(ctx: Ctx<'_>, request: &request::Acquire<'_>) {
    let at = rlock_core::LockRef {
        db: ctx.db(),
        name: request.key,
    };
    state::with(|state| state.confirm(at, request.owner));
}
