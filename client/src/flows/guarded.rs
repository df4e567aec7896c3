//! A command that the server runs only if a hold is held.

use redis::{Cmd, Value};

use crate::error::{Error, LostReason};
use crate::ledger::Hold;
use crate::topology::{Redirects, Router};
use crate::wire::request;

/// Has the command run where the lock is. It is sent once: only a node that has not run it may send
/// it on. That the hold is not there is the server's word that it is lost.
pub(crate) async fn call(router: &Router, hold: &Hold, command: &Cmd) -> Result<Value, Error> {
    let target = &hold.target;
    let mut redirects = Redirects::new(router, target.key());
    let mut route = router.route(target.key());
    loop {
        // What another server says about the hold must not count.
        let attachment = route.node.session.attachment();
        let server = attachment.as_ref().and_then(|one| one.server());
        let guarded = request::guard(target.subject(), hold.token, command).only_for(server);
        let error = match route.send(guarded).await {
            Ok(reply) => return Ok(reply),
            Err(error) => error,
        };
        if error.has_code(request::NOT_HELD) {
            hold.lose(LostReason::NotHeld);
            return Err(error);
        }
        let next = redirects.next(error, &route, attachment.as_ref()).await?;
        route = next.route;
    }
}
