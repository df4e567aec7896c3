//! `RLOCK.CANCEL key owner`: take the owner's waiters out of the line.
//!
//! Each is told `[0, ttl-ms]` at once. Replies how many; touches no hold, and replicates nothing.

use super::{KEY, OWNER, decide_number};
use crate::ffi::{Access, Args, Command, Ctx, Keys, Spec};
use crate::turn::Named;
use rlock_core::{CommandError, request};

pub(super) struct Cancel;

impl Command for Cancel {
    const SPEC: Spec = Spec {
        name: c"rlock.cancel",
        summary: c"Takes an owner's waiters out of a lock's line.",
        complexity: c"O(N) with N waiters of this owner",
        since: c"0.1.0",
        arity: 3,
        flags: c"write fast",
        categories: c"write fast lock",
        keys: Keys::First(Access::Update),
        arguments: &[KEY, OWNER],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::Cancel::parse(args.bytes())?;
        let given = Named::One(args.at(1)?, args.at(2)?);
        let cancelled = decide_number(ctx, rlock_core::Command::Cancel(&request), given)?;
        ctx.reply_integer(cancelled);
        Ok(())
    }
}
