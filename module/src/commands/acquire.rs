//! `RLOCK.ACQUIRE key owner lease-ms [READ | WRITE] [BLOCK wait-ms | QUEUE wait-ms]
//! [SESSION session] [ONCE]`: take the lock, or wait for it.
//!
//! Replies `[count, token]` when held, `[0, ttl-ms]` when not, `[-1, position]` when queued. A free
//! lock is taken with count 1 and a new token; an owner who holds it re-enters, and its lease
//! starts anew. `BLOCK` waits in line, first come first served, where the server can block the
//! client; elsewhere the reply is as without it. `QUEUE` waits in the same line for a session,
//! which is told by RLOCK.EVENTS. With `SESSION` the hold ends with the session. `ONCE` makes a
//! repeated ACQUIRE harmless: what the owner holds is not counted again, and a place in line is
//! kept. A wait that could never end is refused.
//!
//! `READ` and `WRITE` make it a read-write lock: any number of readers, or one writer, who may read
//! as well. Readers that come after a waiting writer stand behind it.
//!
//! Replicated as `HSET` and `PEXPIREAT` with final values, a reader's timeout key as `SET`; when
//! refused, not at all.

use super::{KEY, LEASE_MS, MODE, ONCE, OWNER, SESSION, WAIT, check_slot, named_by, user_naming};
use crate::ffi::{Access, Args, Command, Ctx, Keys, Spec, Str};
use crate::keys::OpenLock;
use crate::{blocking, changes, config, deadlock, effects, reply, settle, state};
use rlock_core::request::WaitMode;
use rlock_core::{Acquired, CommandError, LockRef, Mode, ReadDepth, request};

pub(super) struct Acquire;

impl Command for Acquire {
    const SPEC: Spec = Spec {
        name: c"rlock.acquire",
        summary: c"Takes a lock or enters it once more, and waits for it in line if asked to.",
        complexity: c"O(1); a wait O(N) with N owners that wait for each other in turn, \
            and a writer's with N reads",
        since: c"0.1.0",
        arity: -4,
        flags: c"write deny-oom fast",
        categories: c"write fast lock",
        keys: Keys::First(Access::Update),
        arguments: &[KEY, OWNER, LEASE_MS, MODE, WAIT, SESSION, ONCE],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::Acquire::parse(args.bytes())?;
        let user = user_naming(ctx, request.session);
        request.session = named_by(request.session, user.as_ref());
        if matches!(request.wait_mode, WaitMode::Block(_)) && !ctx.flags().may_block() {
            request.wait_mode = WaitMode::None;
        }
        let (name, owner) = (args.at(1)?, args.at(2)?);
        check_slot(ctx, request.key, request.mode)?;
        let mut acquired = acquire(ctx, name, owner, &request)?;
        if acquired == Acquired::SettleFirst {
            settle::first(ctx, name);
            acquired = acquire(ctx, name, owner, &request)?;
        }
        match acquired {
            Acquired::Held { count, token } => {
                if request.once {
                    confirm(ctx, &request);
                }
                reply::acquired(ctx, count, token);
            }
            Acquired::NotHeld { ttl_ms } => reply::not_acquired(ctx, ttl_ms),
            Acquired::SettleFirst => reply::not_acquired(ctx, 0),
            Acquired::MustWait { ends_at, ttl_ms } => {
                let at = LockRef {
                    db: ctx.db(),
                    name: request.key,
                };
                deadlock::refuse(ctx, |locks| locks.search_deadlock(at, &request))?;
                changes::listen(ctx);
                if !wait(ctx, at, &request, ends_at) {
                    reply::not_acquired(ctx, ttl_ms);
                }
            }
        }
        Ok(())
    }
}

fn acquire(
    ctx: Ctx<'_>,
    name: Str<'_>,
    owner: Str<'_>,
    request: &request::Acquire<'_>,
) -> Result<Acquired, CommandError> {
    let lock = OpenLock::to_write(ctx, name);
    // Who waits to write is to know when the last reader's lease ends; and ONCE may shorten the
    // longest.
    let waits_to_write = request.mode == Mode::Write && request.wait_mode != WaitMode::None;
    let depth = if waits_to_write || request.once {
        ReadDepth::Whole
    } else {
        ReadDepth::Brief
    };
    let stored = lock.load(owner, depth);
    let waiters_max = config::waiters_per_lock_max();
    effects::step(lock, Some(owner), |locks, at, now, effects| {
        locks.acquire(at, stored, request, waiters_max, now, effects)
    })
}

/// Puts the caller in line; a queued one is told its place at once. False if it cannot wait.
fn wait(
    ctx: Ctx<'_>,
    at: LockRef<'_>,
    request: &request::Acquire<'_>,
    ends_at: Option<i64>,
) -> bool {
    let join = |client| {
        effects::step_without_key(ctx, |locks, now, effects| {
            locks.join(at, request, client, ends_at, now, effects)
        })
    };
    if let WaitMode::Block(_) = request.wait_mode {
        return blocking::wait(ctx, |client| join(Some(client)));
    }
    let joined = join(None);
    if let Some(joined) = joined {
        reply::queued(ctx, joined.position);
    }
    joined.is_some()
}

fn confirm(ctx: Ctx<'_>, request: &request::Acquire<'_>) {
    let at = LockRef {
        db: ctx.db(),
        name: request.key,
    };
    state::with(|state| state.confirm(at, request.owner, request.mode));
}
