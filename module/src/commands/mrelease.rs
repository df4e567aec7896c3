//! `RLOCK.MRELEASE owner numkeys key [key ...]`: give one hold of each of several locks back.
//!
//! Replies how many were given back. Locks that the owner does not hold are skipped. All are given
//! back before any waiter is granted.
//!
//! Replicated as `DEL`, or as `HSET` where holds are left; the grants to the next holders follow.

use super::{END, NUMKEYS, OWNER, SOME_KEYS, names, releasing_client, reply_number};
use crate::driving::turn::Named;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use rlock_core::{CommandError, request};

pub(super) struct Mrelease;

impl Command for Mrelease {
    const SPEC: Spec = Spec {
        name: c"rlock.mrelease",
        summary: c"Gives one hold of each of several locks back.",
        complexity: c"O(K) with K keys",
        arity: -4,
        flags: c"write getkeys-api",
        categories: c"write lock",
        keys: Keys::CountedAt(2),
        arguments: &[OWNER, NUMKEYS, SOME_KEYS, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::MultiRelease::parse(args.bytes())?;
        request.by = releasing_client(ctx);
        let names = names(args, &request.keys)?;
        let given = Named::Several(&names, args.at(1)?);
        reply_number(ctx, rlock_core::Command::MultiRelease(&request), given)?;
        Ok(())
    }
}
