//! Commands that are sent once, and followed to where they are carried out: one that the server
//! runs only if a hold is held, and the limit of permits, which is about no owner.

use std::sync::Arc;

use redis::{Cmd, Value};

use crate::error::{Error, LostReason};
use crate::flows::Context;
use crate::ledger::Hold;
use crate::topology::{Route, Router};
use crate::wire::request;

/// Has the command run where the lock is. It is sent once: only a node that has not run it may send
/// it on. That the hold is not there is the server's word that it is lost.
pub(crate) async fn guarded(router: &Router, hold: &Hold, command: &Cmd) -> Result<Value, Error> {
    let target = &hold.target;
    let guarded = router.carry_out(target.key(), false, |route, attachment| {
        // What another server says about the hold must not count.
        let server = attachment.as_ref().and_then(|one| one.server());
        route.send(request::guard(target.subject(), hold.token, command).only_for(server))
    });
    guarded.await.inspect_err(|error| {
        if error.has_code(request::NOT_HELD) {
            hold.lose(LostReason::NotHeld);
        }
    })
}

/// Sets the limit where the permits are; the limit before, if there was one. It is sent once: the
/// second of two commands would tell what the first has set.
pub(crate) async fn set_limit(
    context: &Context,
    name: &Arc<[u8]>,
    limit: u32,
) -> Result<Option<u32>, Error> {
    if context.background.closing.is_cancelled() {
        return Err(Error::shut_down());
    }
    let ask = |route: Route, _| route.send(request::limit(name, limit));
    let before = context.router.carry_out(name, false, ask).await?;
    Ok(u32::try_from(before).ok().filter(|before| *before > 0))
}
