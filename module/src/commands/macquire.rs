//! `RLOCK.MACQUIRE owner lease-ms numkeys key [key ...] [BLOCK wait-ms | QUEUE wait-ms]
//! [SESSION session] [WANTED] [ONCE]`: take several locks at once, all or none, or wait for all of
//! them.
//!
//! Replies `[count, token]` when held: the highest hold count, and the token of the locks that were
//! newly taken, or the largest token if none was; `[0, ttl-ms]` when not held, with the rest of the
//! longest lease of others; `[-1, position, seq, life]` when queued, with the largest position.
//! Locks that the owner holds already are re-entered. The wait stands in the queue of each lock and
//! holds nothing. It is granted when, in each queue, it is first or its owner is the holder.
//!
//! Replicated like ACQUIRE, with final values. A refused MACQUIRE is not replicated.

use super::wait::{acquire, confirm, wait_if_allowed};
use super::{
    END, LEASE_MS, NUMKEYS, ONCE, OWNER, SESSION, SOME_KEYS, WAIT, WANTED, name_user, names,
    user_naming,
};
use crate::driving::turn::Named;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use rlock_core::{CommandError, Mode, request};

pub(super) struct Macquire;

impl Command for Macquire {
    const SPEC: Spec = Spec {
        name: c"rlock.macquire",
        summary:
            c"Takes several locks at once, all or none, and waits in their queues if asked to.",
        complexity: c"O(K) with K keys; a wait O(N) with N owners that wait for each other in turn",
        arity: -5,
        flags: c"write deny-oom getkeys-api",
        categories: c"write lock",
        keys: Keys::CountedAt(3),
        arguments: &[
            OWNER, LEASE_MS, NUMKEYS, SOME_KEYS, WAIT, SESSION, WANTED, ONCE, END,
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::MultiAcquire::parse(args.bytes())?;
        let user = user_naming(ctx, request.session);
        name_user(&mut request.session, user.as_ref());
        wait_if_allowed(ctx, &mut request.wait_mode);
        let names = names(args, &request.keys)?;
        let given = Named::Several(&names, args.at(1)?);
        let command = rlock_core::Command::MultiAcquire(&request);
        let is_held = acquire(ctx, command, request.wait_mode, given)?;
        if is_held && request.once {
            let names = request.keys.iter().map(|key| key.name);
            confirm(ctx, names, request.owner, Mode::Plain, true);
        }
        Ok(())
    }
}
