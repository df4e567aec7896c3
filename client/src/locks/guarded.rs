//! Commands that are not sent twice: one that the server runs only if a hold is held, and the limit
//! of permits, which is about no owner.

use std::sync::Arc;

use redis::{Cmd, Value};
use tokio::sync::oneshot;

use crate::error::{Code, Error, LostReason};
use crate::locks::held::tell;
use crate::locks::{Context, Hold};
use crate::wire::reply::{read, read_by};
use crate::wire::{Manner, Outcome, Request, request};

/// Has the command run where the lock is. That the hold is not there is the server's word that it
/// is lost.
pub(crate) async fn call(context: &Context, hold: &Hold, command: &Cmd) -> Result<Value, Error> {
    let target = &hold.target;
    let guarded = request::guard(target, hold.token, command);
    let reply = once(context, &target.name, guarded).await;
    read_by(reply, |reply| Some(reply.clone())).inspect_err(|error| {
        if error.code == Code::NotHeld {
            hold.mark_gone(LostReason::NotHeld);
        }
    })
}

/// Sets the limit where the permits are; the limit before, if there was one. The second of two such
/// commands would tell what the first has set.
pub(crate) async fn set_limit(
    context: &Context,
    name: &Arc<[u8]>,
    limit: u32,
) -> Result<Option<u32>, Error> {
    if context.background.closing.is_cancelled() {
        return Err(Error::shut_down());
    }
    let reply = once(context, name, request::limit(name, limit)).await;
    let before = read_by(reply, read::<u64>)?;
    Ok(u32::try_from(before).ok().filter(|before| *before > 0))
}

async fn once(context: &Context, name: &Arc<[u8]>, cmd: Cmd) -> Result<Value, Error> {
    let node = context.node_with_room(name)?;
    let (told, answer) = oneshot::channel();
    let mut told = Some(told);
    let then = move |outcome| match outcome {
        Outcome::Told(reply, _) => tell(&mut told, reply),
        Outcome::Overdue(error) => tell(&mut told, Err(error)),
    };
    node.link.send(Request::new(cmd, name, Manner::Once, then));
    answer.await.unwrap_or_else(|_| Err(Error::shut_down()))
}
