//! `RLOCK.LOG [MATCH pattern] [COUNT n] | RESET`: past events of locks, for operators.
//!
//! Replies an array of maps, newest first, 10 unless COUNT says otherwise: `id`, `time-ms`,
//! `event`, `db`, `key`, `owner`, `token`, `text`. Entries of locks that the caller's user may not
//! read are left out, and no text names such a lock. RESET forgets all entries and replies OK.

use super::{COUNT, END, MATCH};
use crate::ffi::{Args, Argument, Command, Ctx, Keys, Spec};
use crate::memory::state;
use crate::writing::reply;
use rlock_core::{CommandError, Glob, LogEntry, LogView, request};
use std::rc::Rc;

pub(super) struct Log;

/// The number of entries without COUNT.
const COUNT_DEFAULT: usize = 10;

impl Command for Log {
    const SPEC: Spec = Spec {
        name: c"rlock.log",
        summary: c"Tells what happened to locks lately that an operator may ask about.",
        complexity: c"O(N) with N entries",
        arity: -1,
        flags: c"readonly",
        categories: c"read lock",
        keys: Keys::None,
        arguments: &[
            Argument::one_of(&[
                Argument::block(c"entries", &[MATCH, COUNT, END]),
                Argument::word(c"RESET", c"reset"),
                END,
            ]),
            END,
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = match request::Log::parse(args.bytes())? {
            request::Log::Entries(request) => request,
            request::Log::Reset => {
                state::with(|state| state.locks.reset_log());
                ctx.reply_ok();
                return Ok(());
            }
        };
        // Copied first: the checks below ask the server about the caller's permissions, and the
        // state must not be lent meanwhile.
        let entries: Vec<Rc<LogEntry>> =
            state::with(|state| state.locks.log_entries().cloned().collect());
        let may_read = ctx.may_read();
        // A name that the caller may not read matches no pattern. Otherwise patterns could guess
        // it.
        let pattern = request.pattern.map(Glob::new);
        let is_about = |entry: &&Rc<LogEntry>| {
            let mut pattern = pattern.iter();
            pattern.all(|of| entry.is_about(|key| of.matches(key) && may_read(key)))
        };
        let entries = entries
            .iter()
            .filter(is_about)
            .filter_map(|entry| entry.seen_by(|key| may_read(key)));
        let entries: Vec<LogView> = entries
            .take(request.count.unwrap_or(COUNT_DEFAULT))
            .collect();
        reply::log(ctx, &entries);
        Ok(())
    }
}
