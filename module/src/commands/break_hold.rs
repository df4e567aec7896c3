//! `RLOCK.BREAK key`: the operator's override.
//!
//! Ends the present hold whoever has it, grants the next in line, publishes the unlock message.
//! Replies 1, or 0 if the lock was free. A hold that ends with its session in this very command is
//! the one that is meant: nobody who is granted the lock by that is broken. The former holder hears
//! of it at its next RENEW or RELEASE.
//!
//! Of a read-write lock all holds end, the writer's and the readers'.
//!
//! Replicated like a last release.

use super::{KEY, check_slot};
use crate::ffi::{Access, Args, Command, Ctx, Keys, Spec};
use crate::keys::OpenLock;
use crate::{effects, settle};
use rlock_core::{CommandError, Mode, Stored, request};

pub(super) struct Break;

impl Command for Break {
    const SPEC: Spec = Spec {
        name: c"rlock.break",
        summary: c"Ends the hold of a lock whoever has it, and hands the lock to the next in line.",
        complexity: c"O(1), of a read-write lock O(N) with N reads",
        since: c"0.1.0",
        arity: 2,
        flags: c"write admin",
        categories: c"write admin dangerous lock",
        keys: Keys::First(Access::Update),
        arguments: &[KEY],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        request::KeyOnly::parse(args.bytes())?;
        let name = args.at(1)?;
        // The operator means the hold that stood. If that was about to end with its session, it has
        // ended now, and who was granted the lock by it is nobody's to break.
        if settle::endings(ctx, name) {
            ctx.reply_integer(1);
            return Ok(());
        }
        let lock = OpenLock::to_write_as_it_is(ctx, name);
        let (stored, _) = lock.load_for_holder();
        if let Stored::ReadWrite(_) = stored {
            check_slot(ctx, lock.at().name, Mode::Write)?;
        }
        let broken = effects::step(lock, None, |locks, at, now, effects| {
            locks.break_hold(at, stored, now, effects)
        })?;
        ctx.reply_integer(i64::from(broken));
        Ok(())
    }
}
