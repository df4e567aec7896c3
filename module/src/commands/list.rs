//! `RLOCK.LIST [MATCH pattern] [COUNT n]`: the locks of this database that have waiters.
//!
//! Replies an array of `[name, waiters, longest-wait-ms]`, most waiters first. Names that the
//! caller's user may not read are left out. A caller without a user gets all names, a caller whose
//! user is unknown none. Held locks without waiters are plain keys: SCAN finds them.

use super::{COUNT, END, MATCH, matching};
use crate::clock;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use crate::memory::state;
use crate::writing::reply;
use rlock_core::{CommandError, QueueView, request};
use std::cmp::Reverse;

pub(super) struct List;

impl Command for List {
    const SPEC: Spec = Spec {
        name: c"rlock.list",
        summary: c"Lists the locks that somebody waits for, most waiters first.",
        complexity: c"O(N log N) with N locks that somebody waits for",
        arity: -1,
        flags: c"readonly",
        categories: c"read lock",
        keys: Keys::None,
        arguments: &[MATCH, COUNT, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::List::parse(args.bytes())?;
        let (db, now) = (ctx.db(), clock::now());
        let matches = matching(request.pattern);
        let mut queues: Vec<QueueView> = state::with(|state| {
            let queues = state.locks.views(db, now);
            queues.filter(|queue| matches(&queue.name)).collect()
        });
        let may_read = ctx.may_read();
        queues.retain(|queue| may_read(&queue.name));
        // Queues of the same length are sorted by name: otherwise their order would be arbitrary.
        queues.sort_unstable_by(|a, b| {
            (Reverse(a.waiters), &a.name).cmp(&(Reverse(b.waiters), &b.name))
        });
        queues.truncate(request.count.unwrap_or(usize::MAX));
        reply::queues(ctx, &queues);
        Ok(())
    }
}
