//! Waiting until replicas, or disks, have what was granted: `WAIT` and `WAITAOF`.
//!
//! The server answers WAIT for what this very connection has written, and for a connection that has
//! written nothing it says that all have it (Redis 7.2 and newer, and Valkey). The grant may have
//! been written by anybody's RELEASE. So each hold is renewed on the connection that waits:
//! replicas are told things in the order in which they happened, and whoever has the renewal has
//! the grant.

use std::sync::Arc;
use std::time::Duration;

use redis::Pipeline;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::backoff::Pace;
use crate::command::{self, Command, Copied};
use crate::connection::{CommandConnection, Connector};
use crate::error::Error;
use crate::hold::{Hold, Renewal};
use crate::session::Session;

/// Who must have a grant before it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copies {
    pub(crate) replicas: u32,
    /// On their disks, and on that of the server.
    pub(crate) on_disk: bool,
    pub(crate) within: Duration,
}

impl Copies {
    /// Whether these are enough.
    fn are_met_by(self, there: Copied) -> bool {
        there.replicas >= u64::from(self.replicas) && (there.local || !self.on_disk)
    }

    fn missed_by(self, there: Copied) -> Error {
        let server = match (self.on_disk, there.local) {
            (false, _) => "",
            (true, true) => "the server's disk and ",
            (true, false) => "not the server's disk, and ",
        };
        let (replicas, wanted) = (there.replicas, self.replicas);
        let limit = self.within.as_millis();
        let have = format!("{server}{replicas} of {wanted} replicas have it within {limit} ms");
        Error::not_acknowledged(have)
    }
}

/// The handle of the task that has a connection of its own to wait on; it ends with it.
#[derive(Debug)]
pub(crate) struct Acknowledger {
    requests: mpsc::UnboundedSender<Request>,
}

struct Request {
    hold: Arc<Hold>,
    /// See [`Command::asking`].
    asking: bool,
    reply: oneshot::Sender<Result<(), Error>>,
}

impl Acknowledger {
    /// Nothing is connected before it is needed.
    pub(crate) fn start(
        runtime: &Handle,
        connector: Connector,
        session: Arc<Session>,
        copies: Copies,
    ) -> Self {
        let (requests, queue) = mpsc::unbounded_channel();
        let waiting = Waiting {
            connector,
            session,
            copies,
            connection: None,
            pace: Pace::new(),
        };
        runtime.spawn(waiting.run(queue));
        Self { requests }
    }

    /// Waits until the copies have this hold.
    pub(crate) async fn acknowledged(&self, hold: &Arc<Hold>, asking: bool) -> Result<(), Error> {
        let (reply, outcome) = oneshot::channel();
        let request = Request {
            hold: Arc::clone(hold),
            asking,
            reply,
        };
        // If the task is gone, so is the runtime; the dropped `reply` then tells the caller.
        let _ = self.requests.send(request);
        outcome.await.unwrap_or_else(|_| Err(Error::no_runtime()))
    }
}

struct Waiting {
    connector: Connector,
    session: Arc<Session>,
    copies: Copies,
    connection: Option<CommandConnection>,
    pace: Pace,
}

impl Waiting {
    async fn run(mut self, mut requests: mpsc::UnboundedReceiver<Request>) {
        while let Some(first) = requests.recv().await {
            // All that have come while the last wait lasted share the next.
            let mut batch = vec![first];
            while let Ok(next) = requests.try_recv() {
                batch.push(next);
            }
            batch.retain(|request| !request.reply.is_closed());
            if !batch.is_empty() {
                self.settle(batch).await;
            }
        }
    }

    async fn settle(&mut self, batch: Vec<Request>) {
        let outcomes = match self.ask(&batch).await {
            Ok(outcomes) => outcomes,
            Err(error) => batch.iter().map(|_| Err(error.clone())).collect(),
        };
        for (request, outcome) in batch.into_iter().zip(outcomes) {
            // Whoever has gone does not keep the lock either.
            let _ = request.reply.send(outcome);
        }
    }

    /// Renews the holds and waits for the copies: one answer each, or why there is none for all.
    async fn ask(&mut self, batch: &[Request]) -> Result<Vec<Result<(), Error>>, Error> {
        let (session, copies) = (Arc::clone(&self.session), self.copies);
        let for_the_reply = self.connector.response_timeout();
        let within = copies.within.saturating_add(for_the_reply);
        // Taken before anything is sent: what is confirmed now counts on this or a later one.
        let attachment = session.attachment().ok_or_else(Error::not_attached)?;
        let connection = self.connected().await?;
        if Some(connection.server()) != attachment.server() {
            return Err(Error::elsewhere());
        }
        let leases: Vec<_> = batch.iter().map(|request| request.hold.kept()).collect();
        let renewals = batch.iter().zip(&leases).map(|(request, lease)| Command {
            asking: request.asking,
            ..request.hold.renewal(lease.lease, &session.name)
        });
        let renewals: Vec<_> = renewals.collect();
        let wait = command::wait_for_copies(copies);
        let mut pipeline = Pipeline::with_capacity(batch.len().saturating_add(1));
        for renewal in &renewals {
            renewal.add_to(&mut pipeline);
        }
        wait.add_to(&mut pipeline);
        let replies = match timeout(within, connection.ask_all(pipeline)).await {
            Ok(Ok(replies)) => replies,
            failed => {
                // What it has not answered it may answer late: the next wait has another.
                self.connection = None;
                return Err(Error::no_reply(failed.ok().and_then(Result::err)));
            }
        };
        let mut replies = replies.iter();
        let told: Vec<_> = renewals
            .iter()
            .map(|renewal| renewal.take_reply(&mut replies))
            .collect();
        let counted = wait.take_reply(&mut replies).map_err(Error::of_wait)?;
        let outcomes = batch
            .iter()
            .zip(leases)
            .zip(told)
            .map(|((request, lease), held)| {
                let (held, attachment) = (held?, Some(Arc::clone(&attachment)));
                let lease = lease.answered(held);
                let renewal = Renewal { lease, attachment };
                // The time that went by counts: the lease began when this was sent.
                request.hold.renewed(held, &renewal).map_err(Error::lost)?;
                if copies.are_met_by(counted) {
                    Ok(())
                } else {
                    Err(copies.missed_by(counted))
                }
            });
        Ok(outcomes.collect())
    }

    /// A connection that is good, as far as is known.
    async fn connected(&mut self) -> Result<&mut CommandConnection, Error> {
        let good = match self.connection.take() {
            Some(good) if !good.is_over() => good,
            _ => {
                self.pace.keep().await;
                self.connector.for_commands().await?
            }
        };
        Ok(self.connection.insert(good))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(replicas: u32, on_disk: bool) -> Copies {
        Copies {
            replicas,
            on_disk,
            within: Duration::from_millis(100),
        }
    }

    #[test]
    fn enough_are_as_many_as_were_asked_for_and_the_own_disk_if_it_was() {
        let copied = |local, replicas| Copied { local, replicas };
        assert!(copies(1, false).are_met_by(copied(false, 1)));
        assert!(copies(1, false).are_met_by(copied(false, 2)));
        assert!(!copies(2, false).are_met_by(copied(true, 1)));
        assert!(copies(0, true).are_met_by(copied(true, 0)));
        assert!(!copies(0, true).are_met_by(copied(false, 3)));
        let error = copies(2, false).missed_by(copied(false, 1));
        assert_eq!(
            error.to_string(),
            "not acknowledged: 1 of 2 replicas have it within 100 ms"
        );
    }
}
