//! `RLOCK.RENEW key owner lease-ms [READ | WRITE | PERMITS] [TOKEN token] [SESSION session]
//! [WANTED]`: start the lease anew.
//!
//! Replies 1 if the owner holds the lock (with that token), 0 if it is lost. Never revives a lock.
//! With `SESSION` the hold belongs to that session from now on. With `WANTED` the session is told
//! once that the hold keeps another owner out.
//!
//! Replicated as `PEXPIREAT`, a reader's timeout keys as `SET`, permits as `HSET`.

use super::wait::confirm;
use super::{
    END, KEY, LEASE_MS, MODE, OWNER, SESSION, TOKEN, WANTED, check_slot, name_user, reply_number,
    user_naming,
};
use crate::driving::turn::Named;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use rlock_core::{CommandError, request};

pub(super) struct Renew;

impl Command for Renew {
    const SPEC: Spec = Spec {
        name: c"rlock.renew",
        summary: c"Starts the lease of a held lock anew, or tells that the lock is lost.",
        complexity:
            c"O(1), of a reader or of permits O(N) with N holders if its lease is the longest, \
              or with WANTED while a writer waits",
        arity: -4,
        flags: c"write fast",
        categories: c"write fast lock",
        keys: Keys::First,
        arguments: &[KEY, OWNER, LEASE_MS, MODE, TOKEN, SESSION, WANTED, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::Renew::parse(args.bytes())?;
        let user = user_naming(ctx, request.session);
        name_user(&mut request.session, user.as_ref());
        check_slot(ctx, request.key, request.mode)?;
        let given = Named::One(args.at(1)?, args.at(2)?);
        let held = reply_number(ctx, rlock_core::Command::Renew(&request), given)?;
        if held > 0 {
            confirm(ctx, [request.key], request.owner, request.mode, false);
        }
        Ok(())
    }
}
