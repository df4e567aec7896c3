//! `RLOCK.LIMIT key limit`: how many permits all owners together may hold.
//!
//! Replies the limit before, 0 if none was set. The limit replaces the one that callers name with
//! `OF`, so they may leave `OF` out. 0 deletes it, and then waiters that named none get the error
//! `NOLIMIT`. A raised limit grants at once all waiters that fit, in their order; a lowered one
//! takes no permits back.
//!
//! Replicated as `SET` or `DEL` of the limit's key; the grants as those of ACQUIRE.

use super::{END, KEY, check_limit_slot, reply_number};
use crate::driving::turn::Named;
use crate::ffi::{Args, Argument, Command, Ctx, Keys, OwnedStr, Spec};
use rlock_core::{CommandError, request};

pub(super) struct Limit;

impl Command for Limit {
    const SPEC: Spec = Spec {
        name: c"rlock.limit",
        summary: c"Sets how many permits may be out, and lets in the waiters that fit.",
        complexity: c"O(N) with N holders for each waiter that is let in",
        arity: 3,
        flags: c"write admin",
        categories: c"write admin lock",
        keys: Keys::First,
        arguments: &[KEY, Argument::integer(c"limit"), END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::Limit::parse(args.bytes())?;
        check_limit_slot(ctx, request.key, false)?;
        let name = args.at(1)?;
        let command = rlock_core::Command::Limit(&request);
        reply_number(ctx, command, Named::One(name, OwnedStr::new(b"").as_str()))?;
        Ok(())
    }
}
