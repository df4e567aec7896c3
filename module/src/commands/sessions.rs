//! `RLOCK.SESSIONS [MATCH pattern] [COUNT n]`: the sessions of this server, for operators.
//!
//! Replies an array of maps, sorted by name: `session`, `client-id`, `address`, `holds`, `waiters`,
//! `grace-ms`, `age-ms`, `listening` (1 while the session connection is open; else 0, and then
//! `client-id` and `address` are null), `epoch` (the largest number of a session connection, null
//! without one), `bound` (the client id of the command connection, null without one) and
//! `unacknowledged` (how many events are not acknowledged). Holds and waits are only counted; the
//! names of their locks are not in the reply.

use super::{COUNT, END, MATCH, matching};
use crate::clock;
use crate::ffi::{Args, Command, Ctx, Keys, Spec};
use crate::memory::state;
use crate::writing::reply;
use rlock_core::{CommandError, SessionView, request};

pub(super) struct Sessions;

impl Command for Sessions {
    const SPEC: Spec = Spec {
        name: c"rlock.sessions",
        summary:
            c"Lists the sessions with their connections and how many holds and waits they have.",
        complexity: c"O(N log N) with N sessions",
        arity: -1,
        flags: c"readonly admin",
        categories: c"read admin lock",
        keys: Keys::None,
        arguments: &[MATCH, COUNT, END],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let request = request::List::parse(args.bytes())?;
        let now = clock::now();
        let matches = matching(request.pattern);
        let mut sessions: Vec<SessionView> = state::with(|state| {
            let sessions = state.locks.session_views(now);
            sessions.filter(|session| matches(&session.name)).collect()
        });
        sessions.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        sessions.truncate(request.count.unwrap_or(usize::MAX));
        reply::sessions(ctx, &sessions);
        Ok(())
    }
}
