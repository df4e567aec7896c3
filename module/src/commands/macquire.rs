//! `RLOCK.MACQUIRE owner lease-ms numkeys key [key ...] [BLOCK wait-ms | QUEUE wait-ms]
//! [SESSION session] [ONCE]`: take several locks at once, all or none, or wait for all of them.
//!
//! Replies `[count, token]` when held: the highest hold count, and the token of those that are
//! newly taken, or the largest if none is; `[0, ttl-ms]` when not, with what is left of the longest
//! lease of others; `[-1, position]` when queued, the largest. Locks that the owner holds already
//! are re-entered. The wait stands in the line of each lock and holds nothing: it is granted when
//! it is first, or its owner the holder, in all of them.
//!
//! Replicated as `HSET` and `PEXPIREAT` with final values; when refused, not at all.

use super::{LEASE_MS, NUMKEYS, ONCE, OWNER, SESSION, SOME_KEYS, WAIT, named_by, user_naming};
use crate::ffi::{Access, Args, Command, Ctx, Keys, Spec, Str};
use crate::keys::OpenLock;
use crate::{blocking, changes, config, deadlock, effects, reply, settle, state};
use rlock_core::request::WaitMode;
use rlock_core::{
    AcquiredSeveral, BlockedClient, CommandError, Entering, Joined, LockRef, ReadDepth, Stored,
    Token, request,
};

pub(super) struct Macquire;

impl Command for Macquire {
    const SPEC: Spec = Spec {
        name: c"rlock.macquire",
        summary:
            c"Takes several locks at once, all or none, and waits for them in line if asked to.",
        complexity: c"O(K) with K keys; a wait O(N) with N owners that wait for each other in turn",
        since: c"0.1.0",
        arity: -5,
        flags: c"write deny-oom getkeys-api",
        categories: c"write lock",
        keys: Keys::CountedAt(3, Access::Update),
        arguments: &[OWNER, LEASE_MS, NUMKEYS, SOME_KEYS, WAIT, SESSION, ONCE],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::MultiAcquire::parse(args.bytes())?;
        let user = user_naming(ctx, request.session);
        request.session = named_by(request.session, user.as_ref());
        if matches!(request.wait_mode, WaitMode::Block(_)) && !ctx.flags().may_block() {
            request.wait_mode = WaitMode::None;
        }
        let several = Several::new(ctx, args, args.at(1)?, &request.keys)?;
        several.settle_free_ones();
        let stored = several.load();
        let waiters_max = config::waiters_per_lock_max();
        let acquired = effects::step_without_key(ctx, |locks, now, _| {
            locks.acquire_several(&several.at, &stored, &request, waiters_max, now)
        })?;
        match acquired {
            AcquiredSeveral::Enter(entering) => {
                if let Some((count, token)) = enter(&several, &stored, &request, entering) {
                    reply::acquired(ctx, count, token);
                }
            }
            AcquiredSeveral::NotHeld { ttl_ms } => reply::not_acquired(ctx, ttl_ms),
            AcquiredSeveral::MustWait { ttl_ms } => {
                let at = &several.at;
                deadlock::refuse(ctx, |locks| locks.search_deadlock_of_several(at, &request))?;
                changes::listen(ctx);
                if !wait(&several, &stored, &request) {
                    reply::not_acquired(ctx, ttl_ms);
                }
            }
        }
        Ok(())
    }
}

fn enter(
    several: &Several<'_>,
    stored: &[Stored],
    request: &request::MultiAcquire<'_>,
    mut entering: Entering,
) -> Option<(i64, Token)> {
    settle::together(several.ctx, || {
        for (name, stored) in several.names.iter().zip(stored) {
            let lock = OpenLock::to_write_as_it_is(several.ctx, *name);
            effects::step(lock, Some(several.owner), |locks, at, now, effects| {
                locks.enter_one_of(at, *stored, request, &mut entering, now, effects);
            });
        }
    });
    if request.once {
        several.confirm(request.owner);
    }
    entering.held()
}

/// Puts the caller in all lines; a queued one is told its place at once. False if it cannot wait.
fn wait(several: &Several<'_>, stored: &[Stored], request: &request::MultiAcquire<'_>) -> bool {
    let join = |client: Option<BlockedClient>| -> Option<Joined> {
        effects::step_without_key(several.ctx, |locks, now, effects| {
            locks.join_several(&several.at, stored, request, client, now, effects)
        })
    };
    if let WaitMode::Block(_) = request.wait_mode {
        return blocking::wait(several.ctx, |client| join(Some(client)));
    }
    let joined = join(None);
    if let Some(joined) = joined {
        reply::queued(several.ctx, joined.position);
    }
    joined.is_some()
}

/// The locks that a command names.
pub(super) struct Several<'a> {
    pub(super) ctx: Ctx<'a>,
    pub(super) owner: Str<'a>,
    pub(super) names: Vec<Str<'a>>,
    pub(super) at: Vec<LockRef<'a>>,
}

impl<'a> Several<'a> {
    pub(super) fn new(
        ctx: Ctx<'a>,
        args: Args<'a>,
        owner: Str<'a>,
        keys: &[request::NamedKey<'_>],
    ) -> Result<Self, CommandError> {
        let names = keys.iter().map(|key| args.at(key.place));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        let db = ctx.db();
        let at = names.iter().map(|name| LockRef {
            db,
            name: name.bytes(),
        });
        Ok(Self {
            ctx,
            owner,
            at: at.collect(),
            names,
        })
    }

    /// Those in line for a lock that is free come before any newcomer.
    fn settle_free_ones(&self) {
        for (name, at) in self.names.iter().zip(&self.at) {
            let waited_for = state::with(|state| state.locks.is_waited_for(*at));
            let is_free = || {
                OpenLock::to_write(self.ctx, *name)
                    .load(self.owner, ReadDepth::Brief)
                    .is_free()
            };
            if waited_for && is_free() {
                settle::first(self.ctx, *name);
            }
        }
    }

    /// What is stored, as the owner sees it.
    ///
    /// First all ends that must end at any of them: what ends at a later one may let the owner in
    /// at an earlier one, by a wait for both, and what was read there would no longer be so.
    pub(super) fn load(&self) -> Vec<Stored> {
        for name in &self.names {
            settle::endings(self.ctx, *name);
        }
        let load = |name: &Str<'a>| {
            OpenLock::to_write_as_it_is(self.ctx, *name).load(self.owner, ReadDepth::Brief)
        };
        self.names.iter().map(load).collect()
    }

    /// The owner is told that it holds these.
    pub(super) fn confirm(&self, owner: &[u8]) {
        state::with(|state| {
            for at in &self.at {
                state.confirm(*at, owner, rlock_core::Mode::Plain);
            }
        });
    }
}
