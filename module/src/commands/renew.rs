//! `RLOCK.RENEW key owner lease-ms [TOKEN token] [SESSION session]`: start the lease anew.
//!
//! Replies 1 if the owner holds the lock (with that token), 0 if it is lost. Never revives a
//! lock. With `SESSION` the hold belongs to that session from now on.
//!
//! Replicated as `PEXPIREAT`.

use super::{KEY, LEASE_MS, OWNER, SESSION, TOKEN};
use crate::ffi::{Access, Args, Command, Ctx, Spec};
use crate::keys::OpenLock;
use crate::{effects, state};
use rlock_core::{Refusal, request};

pub(super) struct Renew;

impl Command for Renew {
    const SPEC: Spec = Spec {
        name: c"rlock.renew",
        summary: c"Starts the lease of a held lock anew, or tells that the lock is lost.",
        complexity: c"O(1)",
        since: c"0.1.0",
        arity: -4,
        flags: c"write fast",
        categories: c"write fast lock",
        key: Some(Access::Update),
        arguments: &[KEY, OWNER, LEASE_MS, TOKEN, SESSION],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), Refusal> {
        let request = request::Renew::parse(args.bytes())?;
        let owner = args.at(2)?;
        let lock = OpenLock::to_write(ctx, args.at(1)?);
        let (at, stored) = (lock.at(), lock.load(owner));
        let held = effects::step(lock, Some(owner), |locks, at, now, effects| {
            locks.renew(at, stored, &request, now, effects)
        })?;
        if held {
            state::with(|state| state.confirm(at, request.owner));
        }
        ctx.reply_integer(i64::from(held));
        Ok(())
    }
}
