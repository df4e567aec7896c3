//! `RLOCK.LIMIT key limit`: how many permits may be out, for all who ask for them.
//!
//! Replies the limit before, 0 if there was none. It counts in the place of what callers name with
//! `OF`, which they may then leave out; with 0 it is deleted, and waiters that named none are told
//! `NOLIMIT`. A raised one lets in at once all who fit, in their order; a lowered one takes nothing
//! from anybody.
//!
//! Replicated as `SET` or `DEL` of the key of the limit, and grants as ever.

use super::{KEY, LimitOf, check_limit_slot, decide_number};
use crate::driving::turn::Named;
use crate::ffi::{Access, Args, Argument, ArgumentKind, Command, Ctx, Keys, OwnedStr, Spec};
use rlock_core::{CommandError, request};

pub(super) struct Limit;

impl Command for Limit {
    const SPEC: Spec = Spec {
        name: c"rlock.limit",
        summary: c"Sets how many permits may be out, and lets in the waiters that fit.",
        complexity: c"O(N) with N holders for each waiter that is let in",
        since: c"0.2.0",
        arity: 3,
        flags: c"write admin",
        categories: c"write admin lock",
        keys: Keys::First(Access::Update),
        arguments: &[KEY, Argument::new(c"limit", ArgumentKind::Integer)],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::Limit::parse(args.bytes())?;
        check_limit_slot(ctx, request.key, LimitOf::All)?;
        let name = args.at(1)?;
        let command = rlock_core::Command::Limit(&request);
        let before = decide_number(ctx, command, Named::One(name, OwnedStr::new(b"").as_str()))?;
        ctx.reply_integer(before);
        Ok(())
    }
}
