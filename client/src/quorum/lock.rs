//! The verbs of a named lock of a quorum, and one try to get a majority.

use std::fmt;
use std::time::Duration;

use futures_util::stream::StreamExt;
use tokio::time::{Instant, sleep};

use crate::api::setters;
use crate::quorum::{Parts, QuorumError, QuorumGuard, QuorumLock, Round};
use crate::{Backoff, Error, ErrorKind};

impl QuorumLock {
    /// The name: the key under which the servers keep the lock.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    setters! { self, self;
        /// Much longer than a server may take to [answer](crate::QuorumBuilder::server_timeout).
        ///
        /// # Examples
        ///
        /// ```no_run
        /// # async fn example(
        /// #     client: rlock_client::QuorumClient,
        /// # ) -> Result<(), rlock_client::QuorumError> {
        /// use std::time::Duration;
        ///
        /// let nightly = client.lock("nightly").lease(Duration::from_secs(600));
        /// let guard = nightly.lock().await?;
        /// println!("ours for {:?}", guard.valid_for());
        /// # Ok(())
        /// # }
        /// ```
        lease;
        /// This also counts where it is taken again.
        max_hold;
    }

    /// Takes the lock, trying for as long as somebody else has it.
    ///
    /// One round trip to the majority that answers first, if the lock is free.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future at any await leaves no hold on any server: grants, including later ones,
    /// are released in the background. [`QuorumClient::shutdown`](crate::QuorumClient::shutdown)
    /// waits until that is done.
    ///
    /// # Errors
    ///
    /// - Unavailable: for one [response timeout](crate::ClientBuilder::response_timeout) too few
    ///   servers could be asked, or answered in time.
    /// - Refused, module not loaded: too many servers answered this to leave a majority.
    ///
    /// The error has [every server's own](QuorumError::servers).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// let guard = client.lock("orders").lock().await?;
    /// // … nobody else is here …
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lock(&self) -> Result<QuorumGuard, QuorumError> {
        self.acquire(None).await
    }

    /// Takes the lock if a majority of the servers grants it at the first try.
    ///
    /// # Cancel safety
    ///
    /// As with [`lock`](Self::lock): dropping the future leaves no hold on any server.
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody else has it, or tried at the same moment.
    /// - Unavailable: too few servers could be asked, or answered in time.
    /// - Refused, module not loaded: too many servers answered this to leave a majority.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// match client.lock("nightly").try_lock().await {
    ///     Ok(guard) => guard.unlock().await?,
    ///     Err(error) if error.is_not_acquired() => println!("somebody else is at it"),
    ///     Err(error) => {
    ///         for (server, error) in error.servers() {
    ///             println!("{server}: {error:?}");
    ///         }
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_lock(&self) -> Result<QuorumGuard, QuorumError> {
        self.acquire(Some(Instant::now())).await
    }

    /// Takes the lock, trying for at most `timeout` and the
    /// [time](crate::QuorumBuilder::server_timeout) that a server has to answer the last try. With
    /// a timeout of zero it tries once.
    ///
    /// # Cancel safety
    ///
    /// As with [`lock`](Self::lock): dropping the future leaves no hold on any server.
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody else still has it.
    /// - Unavailable: for one [response timeout](crate::ClientBuilder::response_timeout), or in
    ///   the last try, too few servers could be asked, or answered in time.
    /// - Refused, module not loaded: too many servers answered this to leave a majority.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: rlock_client::QuorumClient,
    /// # ) -> Result<(), rlock_client::QuorumError> {
    /// use std::time::Duration;
    ///
    /// let guard = client.lock("orders").lock_timeout(Duration::from_secs(5)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lock_timeout(&self, timeout: Duration) -> Result<QuorumGuard, QuorumError> {
        self.acquire(Instant::now().checked_add(timeout)).await
    }

    async fn acquire(&self, deadline: Option<Instant>) -> Result<QuorumGuard, QuorumError> {
        let mut pauses = Backoff::new();
        let mut unasked_since = None;
        loop {
            // A try that fails has given back, or is giving back, all that it was granted.
            let tried = self.try_once().await;
            unasked_since = match tried.as_ref().map_err(QuorumError::kind) {
                Err(ErrorKind::NotAcquired) => None,
                Err(ErrorKind::Unavailable) => unasked_since.or_else(|| Some(Instant::now())),
                _ => return tried,
            };
            // For how long too few servers may answer before the call fails.
            let unasked_max = self.core.response_timeout;
            let unasked = unasked_since.is_some_and(|since| since.elapsed() >= unasked_max);
            let now = Instant::now();
            let left = deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(now));
            if self.core.background.closing.is_cancelled() {
                let answers = vec![Some(Error::shut_down()); self.core.members.len()];
                return Err(self
                    .core
                    .error(ErrorKind::Unavailable, "were asked", answers));
            }
            if unasked || left.is_zero() {
                return tried;
            }
            // Random, because two clients that took half of the servers each would otherwise do so
            // again and again.
            sleep(pauses.next_up_to(PAUSE_MAX).min(left)).await;
        }
    }

    /// Asks all servers at once, and keeps the grants if they are a majority.
    ///
    /// Every grant is in a guard, and every request in flight in a pending call of `try_lock`: if
    /// this future is dropped, both release their holds.
    async fn try_once(&self) -> Result<QuorumGuard, QuorumError> {
        let longest = self.max_hold.or(self.core.max_hold);
        let mut parts = Parts::new(self, longest);
        let mut round = Round::new();
        parts.ask_missing(longest, &mut round);
        while let Some((server, answer)) = round.next().await {
            parts.join(server, answer);
            if parts.are_majority() {
                return Ok(QuorumGuard::new(parts, round));
            }
            // Without hope of a majority our grants only block other clients. The remaining answers
            // are still awaited, because the error names each of them.
            if parts.kept().saturating_add(round.len()) < self.core.need {
                parts.give_back();
            }
        }
        Err(parts.refusal())
    }
}

impl fmt::Debug for QuorumLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLock")
            .field("name", &String::from_utf8_lossy(&self.name))
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

/// Short, because no server tells a client that the lock is free: it may lie idle for this long.
const PAUSE_MAX: Duration = Duration::from_millis(200);
