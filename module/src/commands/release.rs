//! `RLOCK.RELEASE key owner [READ | WRITE | PERMITS n] [TOKEN token] [LEASE lease-ms]`: give one
//! hold back.
//!
//! Replies the number of holds left: 0 when the lock is free or handed over, null if the owner does
//! not hold it or holds it with another token. The last release grants the next waiter in the same
//! step, and publishes the unlock message. With holds left, `LEASE` starts the lease anew; without
//! it the TTL stays. With `READ` or `WRITE` only the holds in that mode count; a writer that also
//! reads becomes a reader by its last release with `WRITE`. With `PERMITS` the owner gives n of its
//! permits back, and the reply is the number it has left.
//!
//! Replicated as `DEL`; with the next hold, as one `RESTORE` in its place.

use super::{END, KEY, OWNER, PERMITS_N, READ, TOKEN, WRITE, check_slot, decide, releasing_client};
use crate::driving::turn::Named;
use crate::ffi::{Args, Argument, Command, Ctx, Keys, Spec};
use crate::writing::reply;
use rlock_core::{CommandError, Outcome, request};

pub(super) struct Release;

impl Command for Release {
    const SPEC: Spec = Spec {
        name: c"rlock.release",
        summary: c"Gives one hold of a lock back; the last one hands the lock to the next waiter.",
        complexity:
            c"O(1), of a reader or of permits O(N) with N holders if its lease is the longest, \
            and of permits for each waiter that is let in",
        arity: -3,
        flags: c"write fast",
        categories: c"write fast lock",
        keys: Keys::First,
        arguments: &[
            KEY,
            OWNER,
            Argument::one_of(&[READ, WRITE, PERMITS_N, END]).optional(),
            TOKEN,
            Argument::integer(c"lease-ms").after(c"LEASE").optional(),
            END,
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::Release::parse(args.bytes())?;
        request.by = releasing_client(ctx);
        check_slot(ctx, request.key, request.mode)?;
        let given = Named::One(args.at(1)?, args.at(2)?);
        match decide(ctx, rlock_core::Command::Release(&request), given)? {
            Outcome::Left(left) => reply::integer_or_null(ctx, left),
            _ => return Err(CommandError::Unsettled),
        }
        Ok(())
    }
}
