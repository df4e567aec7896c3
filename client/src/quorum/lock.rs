//! A named lock of a quorum, and one try to get a majority.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::api::Guard;
use crate::api::methods::setters;
use crate::error::{Error, ErrorKind};
use crate::flows::acquire::WaitMode;
use crate::quorum::client::{Core, put};
use crate::quorum::error::QuorumError;
use crate::quorum::guard::QuorumGuard;
use crate::quorum::majority::{refusal, validity};
use crate::quorum::member::Member;
use crate::quorum::pause::Pauses;
use crate::quorum::round::Round;

/// A lock by its name on every server of a quorum, made by
/// [`QuorumClient::lock`](crate::QuorumClient::lock). Cheap to clone; nothing is taken until one of
/// its verbs is called.
///
/// A try asks all servers at once and takes what is free, never waiting in a server's queue: two
/// clients that held a part each and waited for the other's would wait for ever. If no majority
/// has granted it, all is given back, and the next try follows after a pause of random length, at
/// most 200 ms. So there is no order among those who wait: whoever tries in the right moment gets
/// it.
///
/// Every call is an owner of its own: there is no re-entrance and no [`Scope`](crate::Scope), and
/// two tasks that take two locks in opposite orders wait for each other until a timeout.
///
/// # Lease
///
/// Without [`lease`](Self::lease) the lock is renewed on every server for as long as its guard
/// lives, as an ordinary [`Lock`](crate::Lock) is, and taken again where it was lost. With it the
/// lock is taken for that long and never renewed but by [`QuorumGuard::renew`].
#[derive(Clone)]
pub struct QuorumLock {
    core: Arc<Core>,
    name: Arc<[u8]>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
}

impl QuorumLock {
    pub(crate) fn new(core: Arc<Core>, name: Arc<[u8]>) -> Self {
        Self {
            core,
            name,
            lease: None,
            max_hold: None,
        }
    }

    /// The name: the key under which the servers keep the lock.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    setters! { self;
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
    /// Dropping the future leaves no hold on any server, at whatever await it is dropped: what was
    /// granted, also what is granted later, is given back in the background. See
    /// [`QuorumClient::shutdown`](crate::QuorumClient::shutdown) for waiting until it is done.
    ///
    /// # Errors
    ///
    /// - Unavailable: for one [response timeout](crate::ClientBuilder::response_timeout) too few
    ///   servers could be asked, or answered in time.
    /// - Refused, module not loaded: the answer of so many that no majority is left.
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
        self.acquire(WaitMode::Forever).await
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
    /// - Refused, module not loaded: the answer of so many that no majority is left.
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
        self.acquire(WaitMode::None).await
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
    /// - Refused, module not loaded: the answer of so many that no majority is left.
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
        let deadline = Instant::now().checked_add(timeout);
        self.acquire(deadline.map_or(WaitMode::Forever, WaitMode::Until))
            .await
    }

    async fn acquire(&self, wait_mode: WaitMode) -> Result<QuorumGuard, QuorumError> {
        let mut pauses = Pauses::new();
        let mut unasked_since = None;
        loop {
            // A try that fails has given back, or is giving back, all that it was granted.
            let error = match self.try_once().await {
                Ok(guard) => return Ok(guard),
                Err(error) => error,
            };
            let since = match error.kind() {
                ErrorKind::NotAcquired => None,
                ErrorKind::Unavailable => Some(unasked_since.unwrap_or_else(Instant::now)),
                _ => return Err(error),
            };
            unasked_since = since;
            let unasked = since.is_some_and(|since| since.elapsed() >= self.core.unasked_max);
            let left = match wait_mode {
                WaitMode::None => Duration::ZERO,
                WaitMode::Until(end) => end.saturating_duration_since(Instant::now()),
                WaitMode::Forever => Duration::MAX,
            };
            if unasked || left.is_zero() || self.core.background.is_closed() {
                return Err(error);
            }
            sleep(pauses.next().min(left)).await;
        }
    }

    /// Asks all servers at once, and keeps what they grant if that is a majority.
    ///
    /// All that is granted is in guards, and all that may yet be granted in pending calls of
    /// `try_lock`: wherever this is dropped, they give back what they have.
    async fn try_once(&self) -> Result<QuorumGuard, QuorumError> {
        let core = &self.core;
        let longest = self.max_hold.or(core.max_hold);
        let cap = longest.and_then(|longest| Instant::now().checked_add(longest));
        let mut round = Round::new();
        for (server, member) in core.members.iter().enumerate() {
            round.ask(server, self.take(member, longest));
        }
        let mut answers = core.unanswered();
        let mut granted: Vec<(usize, Guard)> = Vec::new();
        let mut grants: usize = 0;
        while let Some((server, answer)) = round.next().await {
            let held = granted.iter().map(|(other, guard)| (*other, guard));
            match answer.and_then(|guard| core.only_vote(guard, held)) {
                Ok(guard) => {
                    put(&mut answers, server, None);
                    granted.push((server, guard));
                    grants = grants.saturating_add(1);
                }
                Err(error) => put(&mut answers, server, Some(error)),
            }
            let left: Vec<_> = granted.iter().map(|(_, guard)| guard.valid_for()).collect();
            if !validity(left.iter().copied(), core.need).is_zero() {
                // What has ended before the others came was somebody else's to take, and with a
                // larger token: the guard must not show the one of ours.
                let mut left = left.into_iter();
                granted.retain(|_| left.next().is_some_and(|left| !left.is_zero()));
                return Ok(QuorumGuard::new(self.clone(), granted, answers, cap, round));
            }
            // Without hope of a majority a part is only in the way of others. What the rest
            // says is still of interest, for the error.
            if granted.len().saturating_add(round.open()) < core.need {
                granted.clear();
            }
        }
        for (server, guard) in &granted {
            // Enough have granted it, but too late.
            let late = guard.is_lost();
            put(&mut answers, *server, late.then(Error::too_late));
        }
        let kind = refusal(&answers, core.need);
        Err(core.error(kind, grants, "granted it", answers))
    }

    /// Takes the lock on one server, if that answers in time.
    pub(crate) fn take(
        &self,
        member: &Arc<Member>,
        max_hold: Option<Duration>,
    ) -> impl Future<Output = Result<Guard, Error>> + Send + 'static {
        let (member, name) = (Arc::clone(member), Arc::clone(&self.name));
        let (lease, within) = (self.lease, self.core.server_timeout);
        async move {
            let mut lock = member.client()?.lock(&*name);
            if let Some(lease) = lease {
                lock = lock.lease(lease);
            }
            if let Some(longest) = max_hold {
                lock = lock.max_hold(longest);
            }
            // Dropped when its time is up: a grant that comes later is given back.
            let answer = timeout(within, lock.try_lock()).await;
            answer.unwrap_or_else(|_| Err(Error::too_slow(within)))
        }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Whether it is renewed by itself.
    pub(crate) fn is_renewed(&self) -> bool {
        self.lease.is_none()
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
