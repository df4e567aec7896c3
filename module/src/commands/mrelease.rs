//! `RLOCK.MRELEASE owner numkeys key [key ...]`: give one hold of each of several locks back.
//!
//! Replies of how many; locks that the owner does not hold are passed over. All are given back
//! before anybody in line is granted.
//!
//! Replicated as `DEL`, or `HSET` where holds are left, and the next holds.

use super::macquire::Several;
use super::{NUMKEYS, OWNER, SOME_KEYS};
use crate::ffi::{Access, Args, Command, Ctx, Keys, Spec};
use crate::keys::OpenLock;
use crate::{effects, settle};
use rlock_core::{CommandError, request};

pub(super) struct Mrelease;

impl Command for Mrelease {
    const SPEC: Spec = Spec {
        name: c"rlock.mrelease",
        summary: c"Gives one hold of each of several locks back.",
        complexity: c"O(K) with K keys",
        since: c"0.1.0",
        arity: -4,
        flags: c"write getkeys-api",
        categories: c"write lock",
        keys: Keys::CountedAt(2, Access::Update),
        arguments: &[OWNER, NUMKEYS, SOME_KEYS],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::MultiRelease::parse(args.bytes())?;
        let several = Several::new(ctx, args, args.at(1)?, &request.keys)?;
        let stored = several.load();
        effects::step_without_key(ctx, |locks, _, _| {
            locks.check_releasable(&several.at, &stored)
        })?;
        let mut released: i64 = 0;
        settle::together(ctx, || {
            for (name, stored) in several.names.iter().zip(stored) {
                let lock = OpenLock::to_write_as_it_is(ctx, *name);
                let one = effects::step(lock, Some(several.owner), |locks, at, now, effects| {
                    locks.release_one_of(at, stored, request.owner, now, effects)
                });
                released = released.saturating_add(i64::from(one));
            }
        });
        ctx.reply_integer(released);
        Ok(())
    }
}
