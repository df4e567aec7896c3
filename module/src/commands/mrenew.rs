//! `RLOCK.MRENEW owner lease-ms numkeys key [key ...] [SESSION session]`: start the leases of
//! several locks anew.
//!
//! Replies of how many; locks that the owner does not hold are passed over: they are lost. With
//! `SESSION` the holds belong to that session from now on.
//!
//! Replicated as `PEXPIREAT`.

use super::macquire::Several;
use super::{LEASE_MS, NUMKEYS, OWNER, SESSION, SOME_KEYS, named_by, user_naming};
use crate::effects;
use crate::ffi::{Access, Args, Command, Ctx, Keys, Spec};
use crate::keys::OpenLock;
use crate::state;
use rlock_core::{CommandError, Mode, request};

pub(super) struct Mrenew;

impl Command for Mrenew {
    const SPEC: Spec = Spec {
        name: c"rlock.mrenew",
        summary: c"Starts the leases of several held locks anew, and tells how many are held.",
        complexity: c"O(K) with K keys",
        since: c"0.1.0",
        arity: -5,
        flags: c"write getkeys-api",
        categories: c"write lock",
        keys: Keys::CountedAt(3, Access::Update),
        arguments: &[OWNER, LEASE_MS, NUMKEYS, SOME_KEYS, SESSION],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::MultiRenew::parse(args.bytes())?;
        let user = user_naming(ctx, request.session);
        request.session = named_by(request.session, user.as_ref());
        let several = Several::new(ctx, args, args.at(1)?, &request.keys)?;
        let stored = several.load();
        effects::step_without_key(ctx, |locks, _, _| {
            locks.check_renewable(&several.at, &stored)
        })?;
        let mut renewed: i64 = 0;
        for (name, stored) in several.names.iter().zip(stored) {
            let lock = OpenLock::to_write_as_it_is(ctx, *name);
            let at = lock.at();
            let one = effects::step(lock, Some(several.owner), |locks, at, now, effects| {
                locks.renew_one_of(at, stored, &request, now, effects)
            })?;
            if one {
                state::with(|state| state.confirm(at, request.owner, Mode::Plain));
            }
            renewed = renewed.saturating_add(i64::from(one));
        }
        ctx.reply_integer(renewed);
        Ok(())
    }
}
