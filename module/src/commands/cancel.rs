//! `RLOCK.CANCEL key owner [READ | WRITE | PERMITS]`: take the owner's waiter out of the queue.
//!
//! An owner has at most one waiter there. A blocked waiter is told `[0, ttl-ms]` at once; the
//! session of a queued one gets a `timeout` event. Replies 1, or 0 if the owner had no waiter in
//! the queue. With a mode, only a waiter in this mode leaves. Ends no hold, and replicates nothing.

use super::{END, KEY, MODE, OWNER, reply_number};
use crate::driving::turn::Named;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use rlock_core::{CommandError, request};

pub(super) struct Cancel;

impl Command for Cancel {
    const SPEC: Spec = Spec {
        name: c"rlock.cancel",
        summary: c"Takes an owner's waiter out of a lock's queue.",
        complexity: c"O(1), of a wait for several locks O(K) with K locks",
        arity: -3,
        flags: c"write fast",
        categories: c"write fast lock",
        keys: Keys::First,
        arguments: &[KEY, OWNER, MODE, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::Cancel::parse(args.bytes())?;
        let given = Named::One(args.at(1)?, args.at(2)?);
        reply_number(ctx, rlock_core::Command::Cancel(&request), given)?;
        Ok(())
    }
}
