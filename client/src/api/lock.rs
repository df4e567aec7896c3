//! A named lock and the three ways of taking it.

use std::fmt;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use crate::api::acquire_options::AcquireOptions;
use crate::api::guard::Guard;
use crate::error::Error;
use crate::flows::acquire::WaitMode;
use crate::ledger::Owner;
use crate::wire::request::Mode;

/// A lock by its name, made by [`Client::lock`](crate::Client::lock). Cheap to clone; nothing is
/// taken until one of its verbs is called.
///
/// Waiters are served first come first served, in the server, and calls of one client get in line
/// in the order in which they are first polled. A wait costs the server a few hundred bytes and no
/// connection.
///
/// # Lease
///
/// Without [`lease`](Self::lease) the watchdog renews the lock for as long as its guard lives: 30 s
/// every 10 s, unless the [client](crate::ClientBuilder) says otherwise. With it the lock is taken
/// for that long and never renewed but by [`Guard::renew`].
///
/// # Owner
///
/// Without [`owner`](Self::owner) every call is an owner of its own, so a second `lock()` waits for
/// the first, also in the same task. With it a call enters a lock again that the owner already
/// holds. As long as the owner has a guard of the lock, or one that is still being given back,
/// the lease stays as it was first asked for, whatever a later call says. An owner stands in line
/// for a lock once: a second call waits here until the first has ended.
#[derive(Clone)]
pub struct Lock {
    options: AcquireOptions,
    name: Arc<[u8]>,
}

impl Lock {
    pub(crate) fn new(options: AcquireOptions, name: Arc<[u8]>) -> Self {
        Self { options, name }
    }

    /// The name: the key under which the server keeps the lock.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// Takes the lock for this long and does not renew it. Whole milliseconds; a part of one is
    /// cut off.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// use std::time::Duration;
    ///
    /// let guard = client.lock("nightly").lease(Duration::from_secs(600)).lock().await?;
    /// # Ok(())
    /// # }
    /// ```
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

    /// Takes the lock for this owner, who enters it again if it holds it already: see [`Owner`].
    #[must_use = "this gives a lock with the owner, and takes nothing"]
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.options.owner = Some(owner.clone());
        self
    }

    /// Takes the lock, waiting for it in line for as long as it takes.
    ///
    /// One round trip if the lock is free. Once in line, the wait survives a lost connection or a
    /// restart of the server: it connects again and lines up anew, at the end if the server has
    /// forgotten it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in line, and a lock that was granted meanwhile is
    /// given back; nothing stays behind, at whatever await it is dropped. The client sees to that
    /// in the background: see [`Client::shutdown`](crate::Client::shutdown) for waiting until it
    /// is done.
    ///
    /// # Errors
    ///
    /// - Refused, deadlock, module not loaded: the server's answer.
    /// - Could not ask: the server could not be reached when `lock` was called, the client has been
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
    /// let guard = client.lock("orders").lock().await?;
    /// // … nobody else is here …
    /// guard.unlock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lock(&self) -> Result<Guard, Error> {
        self.take(WaitMode::Forever).await
    }

    /// Takes the lock if it is free, or held by the same owner; does not wait. One round trip.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a lock that was granted meanwhile is given back in the background.
    ///
    /// # Errors
    ///
    /// - Not acquired: somebody else has it; [`Error::lease_left`] says what is left of that lease.
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
    /// match client.lock("nightly").try_lock().await {
    ///     Ok(guard) => guard.unlock().await?,
    ///     Err(error) if error.is_not_acquired() => println!("somebody else is at it"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_lock(&self) -> Result<Guard, Error> {
        self.take(WaitMode::None).await
    }

    /// Takes the lock, waiting for it in line for at most `timeout`. With a timeout of zero it
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
    /// - Not acquired: somebody else still has it; [`Error::lease_left`] says what is left of that
    ///   lease.
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
    /// let guard = client.lock("orders").lock_timeout(Duration::from_secs(5)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lock_timeout(&self, timeout: Duration) -> Result<Guard, Error> {
        self.take(WaitMode::of(timeout)).await
    }

    async fn take(&self, wait_mode: WaitMode) -> Result<Guard, Error> {
        let names = slice::from_ref(&self.name);
        self.options.take(Mode::Plain, names, wait_mode).await
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("name", &String::from_utf8_lossy(&self.name))
            .field("lease", &self.options.lease)
            .field("owner", &self.options.owner)
            .finish_non_exhaustive()
    }
}
