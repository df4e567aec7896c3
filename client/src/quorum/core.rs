//! The servers of a quorum, questions to them, and a named lock there.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::timeout;

use crate::api::{Client, Guard};
use crate::quorum::{Answers, QuorumError, done, doubt, refusal};
use crate::{Background, Error, ErrorKind};

/// The state that the clones of a client, its locks and its guards share.
pub(crate) struct Core {
    /// The client of each server, which connects by itself as soon as it can.
    pub(crate) members: Box<[Client]>,
    /// The number of servers that are a majority.
    pub(crate) need: usize,
    /// For how long each server may be asked.
    pub(crate) server_timeout: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) background: Background,
}

impl Core {
    /// Waits until a majority is connected, and a little for the rest; or until none can be.
    pub(super) async fn connected(&self) -> Result<(), QuorumError> {
        let routers = self.members.iter().map(|one| &one.context.router);
        let mut trying = pin!(join_all(routers.clone().map(|one| one.tried())));
        let servers = routers.clone().map(|one| one.home(&[]));
        let mut reaching: FuturesUnordered<_> = servers
            .map(async |server| server.session.attached().await)
            .collect();
        let mut all_tried = false;
        // All are looked at each time: one that was reached may be gone again.
        loop {
            let answers: Answers = routers.clone().map(|one| one.trouble()).collect();
            if done(&answers) >= self.need {
                break;
            }
            if all_tried {
                let kind = refusal(&answers, self.need);
                return Err(self.error(kind, "could be connected to", answers));
            }
            tokio::select! {
                _ = &mut trying => all_tried = true,
                Some(()) = reaching.next() => {}
            }
        }
        if !all_tried {
            // Servers that take longer join when they are connected.
            let _ = timeout(self.server_timeout, trying).await;
        }
        self.all_different()
    }

    /// Looks for one server behind two addresses. Such a server grants a lock once and would refuse
    /// our second request, so the majority would be of fewer servers than there seem to be. Under
    /// two of its databases it would have two votes that fail together.
    ///
    /// `Parts::join` finds a twin that shows up later, when it grants a lock.
    fn all_different(&self) -> Result<(), QuorumError> {
        let mut addresses = HashMap::new();
        for router in self.members.iter().map(|one| &one.context.router) {
            let (address, there) = (router.address(), router.server());
            let other = there.and_then(|server| addresses.insert(server, address.clone()));
            if let Some(other) = other {
                let what = format!("{other} and {address} are the same server");
                return Err(QuorumError::new(ErrorKind::Unavailable, what));
            }
        }
        Ok(())
    }

    /// A server's answer if it comes in time; otherwise drops the call and says "too slow".
    pub(crate) async fn in_time<T>(
        &self,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let limit = self.server_timeout;
        let answer = timeout(limit, answer).await;
        answer.unwrap_or_else(|_| Err(Error::too_slow(limit)))
    }

    /// Whether a majority has confirmed a renewal or a release.
    pub(crate) fn confirmed(&self, what: &str, answers: Answers) -> Result<(), QuorumError> {
        if done(&answers) >= self.need {
            return Ok(());
        }
        Err(self.error(doubt(&answers, self.need), what, answers))
    }

    /// An error with each server's answer; `None` stands for success.
    pub(crate) fn error(&self, kind: ErrorKind, what: &str, answers: Answers) -> QuorumError {
        let (did, servers, need) = (done(&answers), self.members.len(), self.need);
        let what = format!("{did} of {servers} servers {what}, {need} are needed");
        let addresses = self.members.iter().map(|one| one.context.router.address());
        QuorumError {
            servers: addresses.zip(answers).collect(),
            ..QuorumError::new(kind, what)
        }
    }
}

/// A lock by its name on every server of a quorum, made by
/// [`QuorumClient::lock`](crate::QuorumClient::lock). Cheap to clone; nothing is taken until one of
/// its verbs is called.
///
/// A try asks all servers at once for the lock. It never waits in a server's queue,
/// because two clients that each hold a part and wait for the other's would wait for ever. If no
/// majority has granted it, the client releases all grants and tries again after a random pause of
/// at most 200 ms. So waiters have no order: the first one to try after a release gets the lock.
///
/// Every call is a separate owner: there is no re-entrance and no [`Scope`](crate::Scope), and two
/// tasks that take two locks in opposite orders wait for each other until a timeout.
///
/// # Lease
///
/// Without [`lease`](Self::lease) the lock is renewed on every server for as long as its guard
/// lives, as an ordinary [`Lock`](crate::Lock) is, and taken again where it was lost. With it the
/// lock is taken for that long and never renewed but by
/// [`QuorumGuard::renew`](crate::QuorumGuard::renew).
#[derive(Clone)]
pub struct QuorumLock {
    pub(crate) core: Arc<Core>,
    pub(crate) name: Arc<[u8]>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
}

impl QuorumLock {
    /// Takes the lock on one server, if it answers in time.
    pub(crate) async fn take(
        self,
        client: Client,
        max_hold: Option<Duration>,
    ) -> Result<Guard, Error> {
        // A call to all servers does not wait for one whose connection is known to be broken.
        client.context.router.trouble().map_or(Ok(()), Err)?;
        let mut lock = client.lock(&*self.name);
        lock.options.lease = self.lease;
        lock.options.max_hold = max_hold;
        // `in_time` drops the call when its time is up: a grant that comes later is released.
        self.core.in_time(lock.try_lock()).await
    }
}

/// The pending requests for the lock, each with its server's number. Dropping them releases any
/// grants that still arrive.
pub(crate) type Round = FuturesUnordered<BoxFuture<'static, (usize, Result<Guard, Error>)>>;
