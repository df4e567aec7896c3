//! Several locks that are taken at once.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::api::acquire_options::AcquireOptions;
use crate::api::guard::MultiGuard;
use crate::error::Error;
use crate::flows::acquire::WaitMode;
use crate::ledger::Owner;

/// Several locks by their names, made by [`Client::multi`](crate::Client::multi), which are taken
/// at once: all or none. Cheap to clone; nothing is taken until one of its verbs is called.
///
/// The locks are plain ones; a [`Lock`](crate::Lock) of one of the names excludes this and the
/// other way round. While it waits it holds none of them, so nobody is kept waiting by who waits,
/// and callers who name the same locks in different orders do not get in each other's way. It
/// stands in the line of each, and has its turn when it is the first in all.
///
/// # In a cluster
///
/// Names of one slot (`{order:7}:items` and `{order:7}:bill`) are taken as above. Names of several
/// slots may lie at several nodes, and no command reaches more than one slot: they are taken slot
/// by slot, in an order that is the same for all callers. What is different then:
///
/// - While it waits for one part it holds those before. Nobody who only takes several locks in this
///   way can be part of a circle; somebody who holds a lock and then asks for others can, and no
///   node sees a circle that leads through another. Prefer names of one slot, or a timeout.
/// - If a part cannot be had, those before are given back before the call returns, and others can
///   get them at once. `timeout` is for all parts together.
/// - Each part has a token of its own: see [`MultiGuard::token_of`](crate::MultiGuard::token_of).
/// - The guard is lost with any part.
///
/// # Lease
///
/// One for all: renewed by the watchdog in one command, unless [`lease`](Self::lease) gives them
/// one of their own.
///
/// # Owner
///
/// Without [`owner`](Self::owner) every call is an owner of its own. With it the locks that the
/// owner holds already are entered again, and the others taken. Guards of one lock that were taken
/// alone and together are given back each by itself, and none of them cuts the lease of another
/// short. An owner stands in line for a lock once: a second call waits here until the first has
/// ended.
///
/// If one of the locks is lost beside other guards of the same owner, those of the rest that this
/// guard was the first to take are given back with it. What it had entered again is not, since that
/// could take what is theirs: it ends with its lease.
#[derive(Clone)]
pub struct MultiLock {
    options: AcquireOptions,
    names: Arc<[Arc<[u8]>]>,
}

impl MultiLock {
    pub(crate) fn new(options: AcquireOptions, names: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut distinct: Vec<Arc<[u8]>> = Vec::new();
        let mut seen = HashSet::new();
        for name in names.map(Arc::from) {
            if seen.insert(Arc::clone(&name)) {
                distinct.push(name);
            }
        }
        Self {
            options,
            names: distinct.into(),
        }
    }

    /// The names: the keys under which the server keeps the locks, as they were given, each once.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.names.iter().map(|name| &**name)
    }

    /// Takes the locks for this long and does not renew them: see
    /// [`Lock::lease`](crate::Lock::lease).
    #[must_use = "this gives locks with the lease, and takes nothing"]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = Some(lease);
        self
    }

    /// Holds the locks for this long at most: see
    /// [`ClientBuilder::max_hold`](crate::ClientBuilder::max_hold), which this overrides.
    #[must_use = "this gives locks with the limit, and takes nothing"]
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.options.max_hold = Some(longest);
        self
    }

    /// Takes the locks for this owner: see [above](Self#owner).
    #[must_use = "this gives locks with the owner, and takes nothing"]
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.options.owner = Some(owner.clone());
        self
    }

    /// Takes all the locks, waiting in their lines for as long as it takes.
    ///
    /// One round trip if they are free. The wait survives a lost connection or a restart of the
    /// server as that of [`Lock::lock`](crate::Lock::lock) does.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the places in line, and locks that were granted meanwhile are
    /// given back in the background; nothing stays behind, at whatever await it is dropped.
    ///
    /// # Errors
    ///
    /// - Deadlock: the wait would close a circle of owners that wait for each other.
    /// - Refused: no name, more than 1,024 of them, one that is no plain lock, or another answer of
    ///   the server.
    /// - Module not loaded: the server's answer.
    /// - Could not ask: the server could not be reached when this was called, the client has been
    ///   shut down, or another connection has taken over its session.
    /// - Unknown: no reply came; see [`Error`] for what then happens to a grant.
    /// - Not acknowledged, lost: only where
    ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
    /// - Not acquired: only if somebody else took this owner out of a queue with `RLOCK.CANCEL`.
    /// - Lost: a part was lost while the others were waited for, in a cluster.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.multi(["left fork", "right fork"]).lock().await?;
    /// // … both are ours …
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lock(&self) -> Result<MultiGuard, Error> {
        self.take(WaitMode::Forever).await
    }

    /// Takes all the locks if each is free, or held by the same owner; does not wait. One round
    /// trip.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, locks that were granted meanwhile are given back in the
    /// background.
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody else has one of them, or waits for it; [`Error::lease_left`] says
    ///   what is left of the longest lease.
    /// - Refused: no name, more than 1,024 of them, one that is no plain lock, or another answer of
    ///   the server.
    /// - Module not loaded: the server's answer.
    /// - Could not ask: the server could not be reached, or the client has been shut down.
    /// - Unknown: no reply came; see [`Error`] for what then happens to a grant.
    /// - Not acknowledged, lost: only where
    ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// match client.multi(["account:1", "account:2"]).try_lock().await {
    ///     Ok(guard) => guard.unlock().await?,
    ///     Err(error) if error.is_not_acquired() => println!("one of them is taken"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_lock(&self) -> Result<MultiGuard, Error> {
        self.take(WaitMode::None).await
    }

    /// Takes all the locks, waiting in their lines for at most `timeout`. With a timeout of zero it
    /// does not wait.
    ///
    /// Without an answer from the server this returns at the latest one
    /// [response timeout](crate::ClientBuilder::response_timeout) after `timeout`.
    ///
    /// # Cancel safety
    ///
    /// As with [`lock`](Self::lock): dropping the future leaves neither a hold nor a waiter behind.
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody else still has one of them; [`Error::lease_left`] says what is left
    ///   of the longest lease.
    /// - Deadlock, refused, module not loaded: the server's answer, as with [`lock`](Self::lock).
    /// - Could not ask: the server could not be reached, or the client has been shut down.
    /// - Unknown: no reply came; see [`Error`] for what then happens to a grant.
    /// - Not acknowledged, lost: only where
    ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    ///
    /// let locks = client.multi(["account:1", "account:2"]);
    /// let guard = locks.lock_timeout(Duration::from_secs(5)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lock_timeout(&self, timeout: Duration) -> Result<MultiGuard, Error> {
        self.take(WaitMode::of(timeout)).await
    }

    async fn take(&self, wait_mode: WaitMode) -> Result<MultiGuard, Error> {
        if self.names.is_empty() {
            return Err(Error::no_names());
        }
        self.options.take_several(&self.names, wait_mode).await
    }
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names().map(String::from_utf8_lossy);
        f.debug_struct("MultiLock")
            .field("names", &names.collect::<Vec<_>>())
            .field("lease", &self.options.lease)
            .field("owner", &self.options.owner)
            .finish_non_exhaustive()
    }
}
