//! A command that the server runs only if a hold is held.

use redis::{Cmd, Value};

use crate::error::{Error, LostReason};
use crate::ledger::Hold;
use crate::topology::Router;
use crate::wire::request;

/// Has the command run where the lock is. It is sent once: only a node that has not run it may send
/// it on. That the hold is not there is the server's word that it is lost.
pub(crate) async fn call(router: &Router, hold: &Hold, command: &Cmd) -> Result<Value, Error> {
    let target = &hold.target;
    let guarded = router.carry_out(target.key(), false, |route, attachment| {
        // What another server says about the hold must not count.
        let server = attachment.as_ref().and_then(|one| one.server());
        route.send(request::guard(target.subject(), hold.token, command).only_for(server))
    });
    let outcome = guarded.await;
    let has_gone = |error: &Error| error.has_code(request::NOT_HELD);
    if outcome.as_ref().is_err_and(has_gone) {
        hold.lose(LostReason::NotHeld);
    }
    outcome
}
