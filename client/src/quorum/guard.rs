//! A lock that is held on a majority.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::api::Guard;
use crate::error::Error;
use crate::quorum::client::put;
use crate::quorum::error::QuorumError;
use crate::quorum::keeper;
use crate::quorum::lock::QuorumLock;
use crate::quorum::majority::doubt;
use crate::quorum::parts::Parts;
use crate::quorum::round::Round;

/// A lock that is held on a majority of servers; made by [`QuorumLock::lock`] and its siblings.
///
/// Dropping it gives the lock back on all servers, in the background. [`unlock`](Self::unlock) does
/// the same and tells how it went.
///
/// # What it promises
///
/// It says that the lock is held only while a majority of the servers cannot have given it away,
/// each counted as a [`Guard`](crate::Guard#what-a-guard-promises) counts: on the monotonic clock,
/// from the moment in which the last successful command to that server was sent, less the drift.
/// When fewer than a majority are left it is lost, [says so](Self::lost) with every server's
/// reason, and stays lost: what is left is given back at once.
///
/// A lock that was given no lease is renewed on each server by itself. Where it is not held (the
/// server was down or slow, has restarted, was out of touch) it is taken again within a second or
/// so, as long as a majority is held all the while; but not where an operator broke or deleted it.
///
/// Like any guard it cannot stop what has been started: see [`tokens`](Self::tokens).
#[must_use = "dropping the guard gives the lock back at once"]
pub struct QuorumGuard {
    lock: QuorumLock,
    parts: Arc<Parts>,
    keeper: Option<JoinHandle<()>>,
}

/// What a server answers to a renewal: with a guard if the lock was taken there again.
type Renewal = Result<Option<Guard>, Error>;

impl QuorumGuard {
    /// `round` has the servers that have not answered yet.
    pub(crate) fn new(
        lock: QuorumLock,
        granted: Vec<(usize, Guard)>,
        answers: Vec<Option<Error>>,
        cap: Option<Instant>,
        round: Round<Result<Guard, Error>>,
    ) -> Self {
        let parts = Parts::new(lock.core(), granted, answers, cap);
        let keeping = keeper::keep(Arc::clone(&parts), lock.clone(), round);
        let keeper = Some(lock.core().runtime.spawn(keeping));
        Self {
            lock,
            parts,
            keeper,
        }
    }

    /// The lock's name.
    pub fn name(&self) -> &[u8] {
        self.lock.name()
    }

    /// The fencing tokens: each server that granted the lock, by its address, with the token of its
    /// first grant to this guard. At least a majority of the servers, also when the lock is lost.
    ///
    /// There is no single token: each server counts for itself, and the numbers of two servers
    /// cannot be compared. What can be said is this: of two holders one after the other, at least
    /// one server has granted it to both, and to the later with the larger token. So a resource
    /// that remembers the largest token *of each server*, and refuses a write in which any token is
    /// smaller than the one it remembers for that server, refuses the late write of a former holder
    /// once the later one has written. It must refuse a list that is shorter than a majority.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// for (server, token) in guard.tokens() {
    ///     println!("{server}: {token}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn tokens(&self) -> Vec<(String, u64)> {
        let members = &self.lock.core().members;
        let named = self.parts.tokens().into_iter();
        named
            .filter_map(|(server, token)| Some((members.get(server)?.address.to_string(), token)))
            .collect()
    }

    /// How long the lock may still be called held if nothing more is heard from any server; zero
    /// once lost. With a [grace](crate::ClientBuilder::grace) this is never much more than that.
    pub fn valid_for(&self) -> Duration {
        self.parts.valid_for()
    }

    /// Whether the lock is lost, or may be: see [above](Self#what-it-promises). Once true it stays
    /// true.
    pub fn is_lost(&self) -> bool {
        self.parts.lost().is_some()
    }

    /// Ends when the lock is lost, with every server's reason. Never ends while it is held.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing; it may be awaited again.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn work() {}
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// tokio::select! {
    ///     () = work() => guard.unlock().await?,
    ///     reasons = guard.lost() => println!("stopped half-way: {reasons}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lost(&self) -> QuorumError {
        self.parts.until_lost().await
    }

    /// Starts the lease anew on every server. A lock that was given a lease is also taken again
    /// where it is not held; one that was not is renewed and taken again by itself.
    ///
    /// Returns when all servers have answered, or their
    /// [time](crate::QuorumBuilder::server_timeout) is up.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lease may or may not have been renewed on each server; the
    /// guard then counts on what it knows.
    ///
    /// # Errors
    ///
    /// - Lost: fewer than a majority still hold it.
    /// - Unavailable, unknown: fewer than a majority have confirmed it, or granted it meanwhile;
    ///   the guard stays valid for as long as it was.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// use std::time::Duration;
    ///
    /// let lock = client.lock("import").lease(Duration::from_secs(60));
    /// let guard = lock.lock().await?;
    /// for _batch in 0..100 {
    ///     guard.renew().await?;
    ///     // … not longer than a minute …
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn renew(&self) -> Result<(), QuorumError> {
        let core = self.lock.core();
        let mut round = self.take_missing();
        let asked = self.parts.live();
        self.renew_parts(&asked, &mut round);
        // Looked at after: what has been lost meanwhile is not asked, and must not count as if it
        // had confirmed.
        let mut answers = self.parts.troubles();
        while let Some((server, answer)) = round.next().await {
            let error = match answer {
                Ok(Some(guard)) => self.parts.join(server, Ok(guard)),
                Ok(None) => None,
                Err(error) => Some(error),
            };
            put(&mut answers, server, error);
        }
        // What has confirmed it and was lost since, to an operator for one, is not held any more.
        let troubles = self.parts.troubles().into_iter().enumerate();
        for (server, trouble) in troubles.filter(|(_, trouble)| trouble.is_some()) {
            if answers.get(server).is_some_and(Option::is_none) {
                put(&mut answers, server, trouble);
            }
        }
        // Servers that were slower than the majority of lock() may grant it only now. Without them
        // the renewal would be in doubt as soon as one of that majority does not answer.
        for (server, guard) in self.parts.live() {
            if !asked.iter().any(|(_, asked)| Arc::ptr_eq(asked, &guard)) {
                put(&mut answers, server, None);
            }
        }
        if let Some(lost) = self.parts.lost() {
            return Err(lost);
        }
        let confirmed = answers.iter().filter(|error| error.is_none()).count();
        if confirmed >= core.need {
            return Ok(());
        }
        let kind = doubt(&answers, core.need);
        Err(core.error(kind, confirmed, "have confirmed the renewal", answers))
    }

    /// Asks the servers where it is missing for the lock. One that was given no lease is taken
    /// again there by itself.
    fn take_missing(&self) -> Round<Renewal> {
        let core = self.lock.core();
        let mut round = Round::new();
        if self.lock.is_renewed() {
            return round;
        }
        let (missing, longest) = self.parts.missing();
        let members = core.members.iter().enumerate();
        for (server, member) in members.filter(|(server, _)| missing.contains(server)) {
            let taking = self.lock.take(member, longest);
            round.ask(server, async move { taking.await.map(Some) });
        }
        round
    }

    /// Asks the servers that hold it to renew it.
    fn renew_parts(&self, parts: &[(usize, Arc<Guard>)], round: &mut Round<Renewal>) {
        let within = self.lock.core().server_timeout;
        for (server, guard) in parts {
            let guard = Arc::clone(guard);
            round.ask(*server, async move {
                let renewal = timeout(within, guard.renew()).await;
                let renewal = renewal.unwrap_or_else(|_| Err(Error::too_slow(within)));
                renewal.map(|()| None)
            });
        }
    }

    /// Gives the lock back on all servers and waits until a majority has confirmed it.
    ///
    /// # Cancel safety
    ///
    /// The lock is given back in any case, in the background if the future is dropped.
    ///
    /// # Errors
    ///
    /// - Lost: fewer than a majority still held it. Somebody else may have had the lock in the
    ///   meantime; their holds are untouched.
    /// - Unavailable, unknown: fewer than a majority have confirmed it. The background goes on
    ///   trying until the leases have ended.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// if let Err(error) = guard.unlock().await {
    ///     assert!(!error.is_lost(), "what was done under the lock is in doubt");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn unlock(self) -> Result<(), QuorumError> {
        let core = self.lock.core();
        let mut answers = self.parts.troubles();
        let mut round = Round::new();
        for (server, guard) in self.parts.close()? {
            put(&mut answers, server, Some(Error::no_reply(None)));
            round.ask(server, guard.unlock());
        }
        let mut confirmed: usize = 0;
        while let Some((server, answer)) = round.next().await {
            confirmed = confirmed.saturating_add(answer.is_ok().into());
            // The others have been told too; their answers change nothing.
            if confirmed >= core.need {
                return Ok(());
            }
            put(&mut answers, server, answer.err());
        }
        let kind = doubt(&answers, core.need);
        Err(core.error(kind, confirmed, "have confirmed the release", answers))
    }
}

impl Drop for QuorumGuard {
    fn drop(&mut self) {
        // What is taken out is dropped here, and so given back; unless unlock() has done so.
        drop(self.parts.close());
        if let Some(keeper) = self.keeper.take() {
            keeper.abort();
            // What it had still asked for is given back when it has ended, which shutdown() waits
            // for.
            let ended = async move { drop(keeper.await) };
            self.lock.core().background.spawn(ended);
        }
    }
}

impl fmt::Debug for QuorumGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumGuard")
            .field("name", &String::from_utf8_lossy(self.name()))
            .field("tokens", &self.tokens())
            .field("valid_for", &self.valid_for())
            .finish_non_exhaustive()
    }
}
