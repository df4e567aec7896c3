//! `RLOCK.MRENEW owner lease-ms numkeys key [key ...] [SESSION session]`: start the leases of
//! several locks anew.
//!
//! Replies how many were renewed. Locks that the owner does not hold are skipped: they are lost.
//! With `SESSION` the holds belong to that session from now on.
//!
//! Replicated as `PEXPIREAT`.

use super::wait::confirm;
use super::{
    END, LEASE_MS, NUMKEYS, OWNER, SESSION, SOME_KEYS, name_user, names, reply_number, user_naming,
};
use crate::driving::turn::Named;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use rlock_core::{CommandError, Mode, request};

pub(super) struct Mrenew;

impl Command for Mrenew {
    const SPEC: Spec = Spec {
        name: c"rlock.mrenew",
        summary: c"Starts the leases of several held locks anew, and tells how many are held.",
        complexity: c"O(K) with K keys",
        arity: -5,
        flags: c"write getkeys-api",
        categories: c"write lock",
        keys: Keys::CountedAt(3),
        arguments: &[OWNER, LEASE_MS, NUMKEYS, SOME_KEYS, SESSION, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::MultiRenew::parse(args.bytes())?;
        let user = user_naming(ctx, request.session);
        name_user(&mut request.session, user.as_ref());
        let names = names(args, &request.keys)?;
        let given = Named::Several(&names, args.at(1)?);
        let renewed = reply_number(ctx, rlock_core::Command::MultiRenew(&request), given)?;
        if renewed > 0 {
            let names = request.keys.iter().map(|key| key.name);
            confirm(ctx, names, request.owner, Mode::Plain, false);
        }
        Ok(())
    }
}
