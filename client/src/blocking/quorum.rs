//! The quorum lock for programs without async.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::Runtime;
use crate::error::ErrorKind;
use crate::{QuorumBuilder, QuorumError};

/// A connection to several independent servers, on which a lock is held by a majority:
/// [`crate::QuorumClient`] for programs without async. Cheap to clone; clones are the same client.
///
/// Its thread ends as that of a [`Client`](super::Client) does.
///
/// # Examples
///
/// ```no_run
/// use rlock_client::blocking::QuorumClient;
///
/// let client = QuorumClient::connect(["redis://a:6379", "redis://b:6379", "redis://c:6379"])?;
/// let guard = client.lock("orders").lock()?;
/// // … nobody else is here …
/// guard.unlock()?;
/// # Ok::<(), rlock_client::QuorumError>(())
/// ```
#[derive(Clone)]
pub struct QuorumClient {
    // Before the thread, so that its tasks have ended when the runtime does.
    client: crate::QuorumClient,
    runtime: Arc<Runtime>,
}

impl QuorumClient {
    /// Connects to the servers at these URLs with the default settings.
    ///
    /// # Errors
    ///
    /// As [`crate::QuorumBuilder::connect`]; could not ask also if no thread can be started.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Self, QuorumError> {
        Self::connect_with(crate::QuorumClient::builder(), urls)
    }

    /// Connects with settings other than the defaults.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect_with<U: AsRef<str>>(
        settings: QuorumBuilder,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Self, QuorumError> {
        let runtime = Runtime::start()
            .map_err(|error| QuorumError::new(ErrorKind::CouldNotAsk, error.to_string(), vec![]))?;
        let client = runtime.wait_for(settings.connect(urls))?;
        let runtime = Arc::new(runtime);
        Ok(Self { client, runtime })
    }

    /// Names a lock, without I/O: see [`crate::QuorumClient::lock`].
    pub fn lock(&self, name: impl Into<Vec<u8>>) -> QuorumLock {
        QuorumLock {
            lock: self.client.lock(name),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// Waits until what was dropped has been given back: see [`crate::QuorumClient::shutdown`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn shutdown(&self) {
        self.runtime.wait_for(self.client.shutdown());
    }
}

impl fmt::Debug for QuorumClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.client.fmt(f)
    }
}

/// A lock of a quorum by its name: [`crate::QuorumLock`] for programs without async.
#[derive(Clone)]
pub struct QuorumLock {
    lock: crate::QuorumLock,
    runtime: Arc<Runtime>,
}

impl QuorumLock {
    /// Takes the lock for this long and does not renew it: see [`crate::QuorumLock::lease`].
    #[must_use = "this gives a lock with the lease, and takes nothing"]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lock = self.lock.lease(lease);
        self
    }

    /// Holds the lock for this long at most: see [`crate::QuorumLock::max_hold`].
    #[must_use = "this gives a lock with the limit, and takes nothing"]
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.lock = self.lock.max_hold(longest);
        self
    }

    /// Takes the lock, trying for as long as somebody else has it.
    ///
    /// # Errors
    ///
    /// As [`crate::QuorumLock::lock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lock(&self) -> Result<QuorumGuard, QuorumError> {
        self.taken(self.lock.lock())
    }

    /// Takes the lock if a majority of the servers grants it at the first try.
    ///
    /// # Errors
    ///
    /// As [`crate::QuorumLock::try_lock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn try_lock(&self) -> Result<QuorumGuard, QuorumError> {
        self.taken(self.lock.try_lock())
    }

    /// Takes the lock, trying for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As [`crate::QuorumLock::lock_timeout`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lock_timeout(&self, timeout: Duration) -> Result<QuorumGuard, QuorumError> {
        self.taken(self.lock.lock_timeout(timeout))
    }

    fn taken(
        &self,
        taking: impl Future<Output = Result<crate::QuorumGuard, QuorumError>>,
    ) -> Result<QuorumGuard, QuorumError> {
        let guard = self.runtime.wait_for(taking)?;
        Ok(QuorumGuard {
            guard,
            runtime: Arc::clone(&self.runtime),
        })
    }
}

impl fmt::Debug for QuorumLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// A lock that is held on a majority of servers: [`crate::QuorumGuard`] for programs without async,
/// with the same promise.
#[must_use = "dropping the guard gives the lock back at once"]
pub struct QuorumGuard {
    guard: crate::QuorumGuard,
    runtime: Arc<Runtime>,
}

impl QuorumGuard {
    /// The lock's name.
    pub fn name(&self) -> &[u8] {
        self.guard.name()
    }

    /// The fencing tokens, one a server: see [`crate::QuorumGuard::tokens`].
    pub fn tokens(&self) -> Vec<(String, u64)> {
        self.guard.tokens()
    }

    /// How long the lock may still be called held if nothing more is heard from any server.
    pub fn valid_for(&self) -> Duration {
        self.guard.valid_for()
    }

    /// Whether the lock is lost, or may be. Once true it stays true.
    pub fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }

    /// Waits until the lock is lost, at most this long: why, or `None` if it is still held.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lost_within(&self, timeout: Duration) -> Option<QuorumError> {
        let lost = async { tokio::time::timeout(timeout, self.guard.lost()).await };
        self.runtime.wait_for(lost).ok()
    }

    /// Starts the lease anew on every server: see [`crate::QuorumGuard::renew`].
    ///
    /// # Errors
    ///
    /// As [`crate::QuorumGuard::renew`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn renew(&self) -> Result<(), QuorumError> {
        self.runtime.wait_for(self.guard.renew())
    }

    /// Gives the lock back on all servers and waits until a majority has confirmed it.
    ///
    /// # Errors
    ///
    /// As [`crate::QuorumGuard::unlock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn unlock(self) -> Result<(), QuorumError> {
        self.runtime.wait_for(self.guard.unlock())
    }
}

impl fmt::Debug for QuorumGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guard.fmt(f)
    }
}
