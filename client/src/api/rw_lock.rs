//! A named read-write lock and the ways of taking it.

use std::fmt;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use crate::api::acquire_options::AcquireOptions;
use crate::api::guard::{ReadGuard, WriteGuard};
use crate::error::Error;
use crate::flows::acquire::WaitMode;
use crate::ledger::Owner;
use crate::wire::request::Mode;

/// A read-write lock by its name, made by [`Client::rw_lock`](crate::Client::rw_lock): any number
/// of readers at a time, or one writer. Cheap to clone; nothing is taken until one of its verbs is
/// called.
///
/// # Order
///
/// Waiters stand in one line, in the server. Readers that come after a waiting writer wait behind
/// it, and readers that are next in line are let in together: neither readers nor writers starve.
///
/// # Which lock should you use?
///
/// Reading must take much longer than a round trip, and be much more frequent than writing, before
/// this does better than a plain [`Lock`](crate::Lock). A name is one or the other: where somebody
/// holds a plain lock of that name, or waits for one, the server refuses this with `WRONGKIND`, and
/// the other way round.
///
/// # Lease
///
/// As with a plain lock: renewed by the watchdog, unless [`lease`](Self::lease) gives it one of its
/// own. Each reader has a lease of its own.
///
/// # Owner
///
/// Without [`owner`](Self::owner) every call is an owner of its own. With it:
///
/// - a reader reads again and a writer writes again, without waiting;
/// - a writer may read, and keeps its place as a reader when it stops writing; for that alone there
///   is [`downgrade`](crate::WriteGuard::downgrade);
/// - a reader cannot become a writer, for it would wait for itself: [`write`](Self::write) is
///   refused as a [deadlock](Error::is_deadlock), [`try_write`](Self::try_write) does not acquire;
/// - an owner stands in line once, be it to read or to write: a second call waits here until the
///   first has ended;
/// - of several guards as a reader each has the same lease, and giving one back starts it anew for
///   the others.
///
/// Reading and writing are two holds of the owner, each with a lease and a token of its own.
#[derive(Clone)]
pub struct RwLock {
    options: AcquireOptions,
    name: Arc<[u8]>,
}

impl RwLock {
    pub(crate) fn new(options: AcquireOptions, name: Arc<[u8]>) -> Self {
        Self { options, name }
    }

    /// The name: the key under which the server keeps the lock.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// Takes the lock for this long and does not renew it: see [`Lock::lease`](crate::Lock::lease).
    ///
    /// Where unmodified Redisson clients read the same lock, give readers none that is longer than
    /// their watchdog timeout, 30 s unless set: their renewals set the lock's expiry to that.
    #[must_use = "this gives a lock with the lease, and takes nothing"]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = Some(lease);
        self
    }

    /// Holds the lock for this long at most: see
    /// [`ClientBuilder::max_hold`](crate::ClientBuilder::max_hold), which this overrides.
    #[must_use = "this gives a lock with the limit, and takes nothing"]
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.options.max_hold = Some(longest);
        self
    }

    /// Takes the lock for this owner: see [above](Self#owner).
    #[must_use = "this gives a lock with the owner, and takes nothing"]
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.options.owner = Some(owner.clone());
        self
    }

    /// Takes the lock together with other readers, waiting in line for as long as a writer holds
    /// it or waits before.
    ///
    /// One round trip if nobody writes or waits to. The wait survives a lost connection or a
    /// restart of the server as that of [`Lock::lock`](crate::Lock::lock) does.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in line, and a lock that was granted meanwhile is
    /// given back in the background; nothing stays behind, at whatever await it is dropped.
    ///
    /// # Errors
    ///
    /// - Refused, deadlock, module not loaded: the server's answer.
    /// - Could not ask: the server could not be reached when this was called, the client has been
    ///   shut down, or another connection has taken over its session.
    /// - Unknown: no reply came; see [`Error`] for what then happens to a grant.
    /// - Not acknowledged, lost: only where
    ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
    /// - Not acquired: only if somebody else took this owner out of the queue with `RLOCK.CANCEL`.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.rw_lock("prices").read().await?;
    /// // … nobody writes …
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn read(&self) -> Result<ReadGuard, Error> {
        self.take_to_read(WaitMode::Forever).await
    }

    /// Takes the lock together with other readers if nobody writes or waits to; does not wait. One
    /// round trip.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a lock that was granted meanwhile is given back in the background.
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody writes, with what is left of that lease in [`Error::lease_left`];
    ///   or somebody waits before.
    /// - Refused, module not loaded: the server's answer.
    /// - Could not ask: the server could not be reached, or the client has been shut down.
    /// - Unknown: no reply came; see [`Error`] for what then happens to a grant.
    /// - Not acknowledged, lost: only where
    ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// match client.rw_lock("prices").try_read().await {
    ///     Ok(guard) => guard.unlock().await?,
    ///     Err(error) if error.is_not_acquired() => println!("they are being changed"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_read(&self) -> Result<ReadGuard, Error> {
        self.take_to_read(WaitMode::None).await
    }

    /// Takes the lock together with other readers, waiting in line for at most `timeout`. With a
    /// timeout of zero it does not wait.
    ///
    /// Without an answer from the server this returns at the latest one
    /// [response timeout](crate::ClientBuilder::response_timeout) after `timeout`.
    ///
    /// # Cancel safety
    ///
    /// As with [`read`](Self::read): dropping the future leaves neither a hold nor a waiter behind.
    ///
    /// # Errors
    ///
    /// - Not acquired: still no room for a reader.
    /// - Refused, deadlock, module not loaded: the server's answer.
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
    /// let guard = client.rw_lock("prices").read_timeout(Duration::from_secs(5)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn read_timeout(&self, timeout: Duration) -> Result<ReadGuard, Error> {
        self.take_to_read(WaitMode::of(timeout)).await
    }

    /// Takes the lock alone, waiting in line for as long as it takes.
    ///
    /// One round trip if the lock is free. The wait survives a lost connection or a restart of the
    /// server as that of [`Lock::lock`](crate::Lock::lock) does.
    ///
    /// # Cancel safety
    ///
    /// As with [`read`](Self::read): dropping the future leaves neither a hold nor a waiter behind,
    /// and readers that it kept out are let in at once.
    ///
    /// # Errors
    ///
    /// - Deadlock: its [owner](Self::owner) reads, or the wait would close a circle.
    /// - Refused, module not loaded: the server's answer.
    /// - Could not ask: the server could not be reached when this was called, the client has been
    ///   shut down, or another connection has taken over its session.
    /// - Unknown: no reply came; see [`Error`] for what then happens to a grant.
    /// - Not acknowledged, lost: only where
    ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
    /// - Not acquired: only if somebody else took this owner out of the queue with `RLOCK.CANCEL`.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.rw_lock("prices").write().await?;
    /// // … nobody else reads or writes …
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn write(&self) -> Result<WriteGuard, Error> {
        self.take_to_write(WaitMode::Forever).await
    }

    /// Takes the lock alone if it is free, or if the same owner writes; does not wait. One round
    /// trip.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a lock that was granted meanwhile is given back in the background.
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody reads or writes; [`Error::lease_left`] says what is left of the
    ///   longest lease.
    /// - Refused, module not loaded: the server's answer.
    /// - Could not ask: the server could not be reached, or the client has been shut down.
    /// - Unknown: no reply came; see [`Error`] for what then happens to a grant.
    /// - Not acknowledged, lost: only where
    ///   [replicas](crate::ClientBuilder::acknowledged_by) have to acknowledge the grant.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// match client.rw_lock("prices").try_write().await {
    ///     Ok(guard) => guard.unlock().await?,
    ///     Err(error) if error.is_not_acquired() => println!("they are being read"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_write(&self) -> Result<WriteGuard, Error> {
        self.take_to_write(WaitMode::None).await
    }

    /// Takes the lock alone, waiting in line for at most `timeout`. With a timeout of zero it does
    /// not wait.
    ///
    /// Without an answer from the server this returns at the latest one
    /// [response timeout](crate::ClientBuilder::response_timeout) after `timeout`.
    ///
    /// # Cancel safety
    ///
    /// As with [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody still reads or writes; [`Error::lease_left`] says what is left of
    ///   the longest lease.
    /// - Deadlock: its [owner](Self::owner) reads, or the wait would close a circle.
    /// - Refused, module not loaded: the server's answer.
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
    /// let guard = client.rw_lock("prices").write_timeout(Duration::from_secs(5)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn write_timeout(&self, timeout: Duration) -> Result<WriteGuard, Error> {
        self.take_to_write(WaitMode::of(timeout)).await
    }

    async fn take_to_read(&self, wait_mode: WaitMode) -> Result<ReadGuard, Error> {
        let names = slice::from_ref(&self.name);
        self.options.take(Mode::Read, names, wait_mode).await
    }

    async fn take_to_write(&self, wait_mode: WaitMode) -> Result<WriteGuard, Error> {
        let names = slice::from_ref(&self.name);
        self.options.take(Mode::Write, names, wait_mode).await
    }
}

impl fmt::Debug for RwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RwLock")
            .field("name", &String::from_utf8_lossy(&self.name))
            .field("lease", &self.options.lease)
            .field("owner", &self.options.owner)
            .finish_non_exhaustive()
    }
}
