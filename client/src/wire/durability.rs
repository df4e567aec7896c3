//! Waiting until replicas, or disks, have a grant: `WAIT` and `WAITAOF`.
//!
//! The server answers WAIT for the writes of this very connection. To a connection without writes
//! it says that all replicas have them (Redis 7.2 and newer, and Valkey). The grant may be a write
//! of another client's RELEASE. So each hold is renewed on the connection that waits: replicas
//! apply writes in their order, so a replica that has the renewal has the grant. Later renewals go
//! the same way: a lease counts only as far as it was acknowledged.

use std::sync::Arc;

use futures_util::FutureExt;
use redis::{Cmd, Pipeline, Value};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::wire::reply::{read_by, read_copied, read_renewed};
use crate::wire::{Connection, Durability, Session, request};
use crate::{Error, ErrorKind, PAUSE_MAX, Pace, task};

impl Durability {
    /// Whether this many replicas, and the server's disk if `local`, are enough. If not, the error
    /// names the copies.
    fn check(self, local: bool, replicas: u64) -> Result<(), Error> {
        let wanted = self.replicas;
        if replicas >= u64::from(wanted) && (local || !self.on_disk) {
            return Ok(());
        }
        let server = match (self.on_disk, local) {
            (false, _) => "",
            (true, true) => "the server's disk and ",
            (true, false) => "not the server's disk, and ",
        };
        let limit = self.within.as_millis();
        let have = format!("{server}{replicas} of {wanted} replicas have it within {limit} ms");
        Err(Error::new(ErrorKind::NotAcknowledged, have))
    }
}

/// Takes renewals to a task that waits on a connection of its own, until enough copies have them,
/// and so the grants before them. One is queued at once; a wait in progress ends first. The task
/// ends with this.
pub(crate) type Acknowledger = mpsc::UnboundedSender<Renewal>;

/// The command, whether it needs an `ASKING` before it, and the callback for its answer.
pub(crate) type Renewal = (Cmd, bool, Acknowledged);

/// Hears the answer to a renewal: whether the lock is still held, and an error unless enough copies
/// have the renewal.
pub(crate) type Acknowledged = Box<dyn FnOnce(Result<(bool, Result<(), Error>), Error>) + Send>;

/// Connects when the first renewal comes. No wait begins while a caller is `gathering` renewals.
pub(crate) fn acknowledger(session: &Arc<Session>, durability: Durability) -> Acknowledger {
    let (renewals, queue) = mpsc::unbounded_channel();
    let runtime = &session.identity.runtime;
    runtime.spawn(task(run(Arc::clone(session), durability, queue)));
    renewals
}

async fn run(
    session: Arc<Session>,
    durability: Durability,
    mut queue: mpsc::UnboundedReceiver<Renewal>,
) {
    let limit = session.response_timeout();
    let limit = limit.saturating_add(durability.within);
    let (mut batch, mut pace, mut present) = (Vec::new(), Pace::default(), None::<(_, Connection)>);
    // All that have come while the last wait lasted share the next.
    while queue.recv_many(&mut batch, usize::MAX).await > 0 {
        // Those that are handed over in one go share this wait.
        drop(session.identity.gathering.lock().await);
        batch.extend(std::iter::from_fn(|| queue.try_recv().ok()));
        let mut pipeline = Pipeline::with_capacity(batch.len().saturating_add(1));
        let callers = batch.drain(..).map(|(renewal, asking, then)| {
            if asking {
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(renewal);
            (asking, then)
        });
        let callers: Vec<_> = callers.collect();
        pipeline.add_command(request::wait_for_copies(durability));
        let asked: Result<(Vec<Value>, _), Error> = async {
            // A connection that is not known to be broken is used again, in the same life of the
            // session: in another, the address may lead to another server.
            let life = session.life();
            let is_over = |one: &Connection| one.over().now_or_never().is_some();
            present.take_if(|(of, one)| *of != life || is_over(one));
            let connection = if let Some((_, good)) = present.take() {
                good
            } else {
                pace.keep(PAUSE_MAX).await;
                session.connector.open().await?
            };
            let replies = timeout(limit, connection.socket.send(Arc::new(pipeline))).await;
            // A missing reply may come late, so the next wait needs another connection.
            let mut replies = replies.unwrap_or_else(|_| Err(Error::no_reply()))?;
            let copied = replies.pop().ok_or_else(Error::no_reply);
            let copied = read_by(copied, read_copied);
            // A server that refuses may have become a replica: the next wait looks for the primary.
            present = copied.is_ok().then_some((life, connection));
            let by_enough = copied.map_err(Error::of_wait);
            let check = |(local, replicas)| durability.check(local, replicas);
            Ok((replies, by_enough.and_then(check)))
        }
        .await;
        match asked {
            Ok((renewed, by_enough)) => {
                let mut replies = renewed.into_iter();
                for (asking, then) in callers {
                    let reply = replies.nth(usize::from(asking));
                    let reply = reply.ok_or_else(Error::no_reply);
                    let is_held = read_by(reply, read_renewed);
                    then(is_held.map(|is_held| (is_held, by_enough.clone())));
                }
            }
            Err(error) => callers
                .into_iter()
                .for_each(|(_, then)| then(Err(error.clone()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn durability(replicas: u32, on_disk: bool) -> Durability {
        Durability {
            replicas,
            on_disk,
            within: Duration::from_millis(100),
        }
    }

    #[test]
    fn enough_are_as_many_as_were_asked_for_and_the_own_disk_if_it_was() {
        assert!(durability(1, false).check(false, 1).is_ok());
        assert!(durability(1, false).check(false, 2).is_ok());
        assert!(durability(2, false).check(true, 1).is_err());
        assert!(durability(0, true).check(true, 0).is_ok());
        assert!(durability(0, true).check(false, 3).is_err());
        let error = durability(2, false).check(false, 1);
        assert_eq!(
            error.expect_err("too few").to_string(),
            "not acknowledged: 1 of 2 replicas have it within 100 ms"
        );
    }
}
