//! `RLOCK.BREAK key`: the operator's override.
//!
//! Ends the present hold of any owner, grants the next waiter, publishes the unlock message.
//! Replies 1, or 0 if the lock was free. The former holder learns of it at its next RENEW or
//! RELEASE, and its session by a `lost` event.
//!
//! All holds of a read-write lock end, the writer's and the readers'; so do all holds of permits.
//!
//! Replicated like a last release.

use super::{END, KEY, check_slot, reply_number};
use crate::driving::turn::Named;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use crate::reading::open_lock::{Access, OpenLock};
use rlock_core::{CommandError, Mode, request};

pub(super) struct Break;

impl Command for Break {
    const SPEC: Spec = Spec {
        name: c"rlock.break",
        summary: c"Ends the hold of a lock whoever has it, and hands the lock to the next waiter.",
        complexity: c"O(1), of a read-write lock or of permits O(N) with N holders",
        arity: 2,
        flags: c"write admin",
        categories: c"write admin dangerous lock",
        keys: Keys::First,
        arguments: &[KEY, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::KeyOnly::parse(args.bytes())?;
        let name = args.at(1)?;
        if ctx.in_cluster() && OpenLock::open(ctx, name, Access::Read).is_read_write() {
            check_slot(ctx, request.key, Mode::Write)?;
        }
        let command = rlock_core::Command::Break(request.key);
        reply_number(ctx, command, Named::Whoever(name))?;
        Ok(())
    }
}
