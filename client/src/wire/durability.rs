//! Waiting until replicas, or disks, have what was granted: `WAIT` and `WAITAOF`.
//!
//! The server answers WAIT for what this very connection has written, and for a connection that has
//! written nothing it says that all have it (Redis 7.2 and newer, and Valkey). The grant may have
//! been written by anybody's RELEASE. So each hold is renewed on the connection that waits:
//! replicas are told things in the order in which they happened, and whoever has the renewal has
//! the grant. Later renewals go the same way: a lease counts only as far as it was acknowledged.

use std::time::Duration;

use redis::Pipeline;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::backoff::Pace;
use crate::error::Error;
use crate::wire::connection::{CommandConnection, Connector};
use crate::wire::reply::Copied;
use crate::wire::request::{self, Command};

/// Who must have a grant before it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Durability {
    pub(crate) replicas: u32,
    /// On their disks, and on that of the server.
    pub(crate) on_disk: bool,
    pub(crate) within: Duration,
}

impl Durability {
    /// Whether these are enough.
    fn is_met_by(self, there: Copied) -> bool {
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
    renewal: Command<bool>,
    reply: oneshot::Sender<Result<Acknowledged, Error>>,
}

/// The answer to a renewal on the connection that waits.
pub(crate) struct Acknowledged {
    /// Whether it is still held.
    pub(crate) held: bool,
    /// Whether enough have it, and if not, who has.
    pub(crate) by_enough: Result<(), Error>,
}

impl Acknowledger {
    /// Nothing is connected before it is needed.
    pub(crate) fn start(runtime: &Handle, connector: Connector, durability: Durability) -> Self {
        let (requests, queue) = mpsc::unbounded_channel();
        let waiting = Waiting {
            connector,
            durability,
            connection: None,
            pace: Pace::new(),
        };
        runtime.spawn(waiting.run(queue));
        Self { requests }
    }

    /// Renews a hold and waits until enough have that, and so the grant before it. It is handed
    /// over at once; what is waited for already is answered first.
    pub(crate) fn renew(
        &self,
        renewal: Command<bool>,
    ) -> impl Future<Output = Result<Acknowledged, Error>> + use<> {
        let (reply, outcome) = oneshot::channel();
        // If the task is gone, so is the runtime; the dropped `reply` then tells the caller.
        let _ = self.requests.send(Request { renewal, reply });
        async { outcome.await.unwrap_or_else(|_| Err(Error::no_runtime())) }
    }
}

struct Waiting {
    connector: Connector,
    durability: Durability,
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
                self.answer(batch).await;
            }
        }
    }

    async fn answer(&mut self, mut batch: Vec<Request>) {
        let answers = match self.ask(&mut batch).await {
            Ok(answers) => answers,
            Err(error) => batch.iter().map(|_| Err(error.clone())).collect(),
        };
        for (request, answer) in batch.into_iter().zip(answers) {
            // Whoever has gone does not keep the lock either.
            let _ = request.reply.send(answer);
        }
    }

    /// Renews the holds and waits for the copies: one answer each, or why there is none for all.
    async fn ask(
        &mut self,
        batch: &mut Vec<Request>,
    ) -> Result<Vec<Result<Acknowledged, Error>>, Error> {
        let durability = self.durability;
        let for_the_reply = self.connector.response_timeout();
        let within = durability.within.saturating_add(for_the_reply);
        let connection = self.connected().await?;
        let server = connection.server().clone();
        for elsewhere in batch.extract_if(.., |one| !one.renewal.may_go_to(&server)) {
            let _ = elsewhere.reply.send(Err(Error::elsewhere()));
        }
        let wait = request::wait_for_copies(durability);
        let mut pipeline = Pipeline::with_capacity(batch.len().saturating_add(1));
        for request in batch.iter() {
            request.renewal.add_to(&mut pipeline);
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
        let held: Vec<_> = batch
            .iter()
            .map(|request| request.renewal.take_reply(&mut replies))
            .collect();
        let copied = wait.take_reply(&mut replies).map_err(Error::of_wait)?;
        let acknowledged = |held| Acknowledged {
            held,
            by_enough: if durability.is_met_by(copied) {
                Ok(())
            } else {
                Err(durability.missed_by(copied))
            },
        };
        let answers = held.into_iter().map(|held| held.map(acknowledged));
        Ok(answers.collect())
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

    fn durability(replicas: u32, on_disk: bool) -> Durability {
        Durability {
            replicas,
            on_disk,
            within: Duration::from_millis(100),
        }
    }

    #[test]
    fn enough_are_as_many_as_were_asked_for_and_the_own_disk_if_it_was() {
        let copied = |local, replicas| Copied { local, replicas };
        assert!(durability(1, false).is_met_by(copied(false, 1)));
        assert!(durability(1, false).is_met_by(copied(false, 2)));
        assert!(!durability(2, false).is_met_by(copied(true, 1)));
        assert!(durability(0, true).is_met_by(copied(true, 0)));
        assert!(!durability(0, true).is_met_by(copied(false, 3)));
        let error = durability(2, false).missed_by(copied(false, 1));
        assert_eq!(
            error.to_string(),
            "not acknowledged: 1 of 2 replicas have it within 100 ms"
        );
    }
}
