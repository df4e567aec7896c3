//! `RLOCK.BIND session EPOCH n`: make this connection the session's command connection.
//!
//! Replies `[life, server]`: the session's present life, and the node's id in a cluster, else the
//! server's run id. The connection that was bound before is closed before the reply, so nothing
//! that the server has not read of it yet is ever carried out. The client may then send its
//! unanswered commands again, in order.
//!
//! An n that is not larger than an earlier one is refused and changes nothing. If the former
//! connection was also the session connection, its close ends the session or begins its grace: the
//! reply is `NOSESSION` then, and the connection is bound all the same.

use super::{END, user_of};
use crate::ffi::{self, Args, Argument, Command, Ctx, Keys, Spec};
use crate::memory::state;
use crate::writing::reply;
use rlock_core::{CommandError, request};

pub(super) struct Bind;

impl Command for Bind {
    const SPEC: Spec = Spec {
        name: c"rlock.bind",
        summary: c"Makes the connection a session's command connection and closes the one before.",
        complexity: c"O(1)",
        arity: 4,
        flags: c"fast",
        categories: c"fast connection lock",
        keys: Keys::None,
        arguments: &[
            Argument::text(c"session"),
            Argument::integer(c"n").after(c"EPOCH"),
            END,
        ],
    };

    fn run(ctx: Ctx<'_>, args: Args<'_>) -> Result<(), CommandError> {
        let mut request = request::Bind::parse(args.bytes())?;
        if !ctx.flags().may_block() || !ctx.has_known_client() {
            return Err(CommandError::CannotBind);
        }
        if !ffi::can_close_clients() {
            return Err(CommandError::CannotClose);
        }
        let user = ctx.user_name();
        request.session.user = user_of(user.as_ref());
        let client_id = ctx.client_id();
        let former = state::with(|state| state.locks.bind(&request, client_id))?;
        // Its commands that the server has read and not carried out go with it. This calls us back:
        // the client's waits and holds are given up as whenever a connection closes. If it was the
        // session connection as well, nobody listens to the session from now on.
        if let Some(former) = former {
            ctx.close_client(former);
        }
        let life = state::with(|state| state.locks.life_of(request.session))?;
        reply::bound(ctx, life, &ctx.server_id());
        Ok(())
    }
}
