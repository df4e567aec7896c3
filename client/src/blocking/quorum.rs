//! The quorum lock for programs without async.

use std::sync::Arc;
use std::time::Duration;

use super::Runtime;
use super::twin::{HasTwin, forward, twin};
use crate::api::methods::setters;
use crate::error::ErrorKind;
use crate::{QuorumBuilder, QuorumError};

twin! {
    /// A connection to several independent servers, on which a lock is held by a majority:
    /// [`crate::QuorumClient`] for programs without async. Cheap to clone; clones are the same
    /// client.
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
    QuorumClient
}

impl QuorumClient {
    /// Connects to the servers at these URLs with the default settings.
    ///
    /// # Errors
    ///
    /// As [`crate::QuorumBuilder::connect`]; unavailable also if no thread can be started.
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
            .map_err(|error| QuorumError::new(ErrorKind::Unavailable, error.to_string(), vec![]))?;
        let client = runtime.wait_for(settings.connect(urls))?;
        Ok(client.twin(&Arc::new(runtime)))
    }

    forward! { crate::QuorumClient:
        /// Names a lock, without I/O.
        fn lock(&self, name: impl Into<Vec<u8>>) -> twin QuorumLock;
    }

    /// Waits until what was dropped has been given back: see [`crate::QuorumClient::shutdown`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn shutdown(&self) {
        self.runtime.wait_for(self.inner.shutdown());
    }
}

twin! {
    /// A lock of a quorum by its name: [`crate::QuorumLock`] for programs without async.
    #[derive(Clone)]
    QuorumLock
}

impl QuorumLock {
    setters! { self.inner; lease; max_hold; }

    forward! { crate::QuorumLock:
        /// Takes the lock, trying for as long as somebody else has it.
        async fn lock(&self) -> Result<QuorumGuard, QuorumError>;

        /// Takes the lock if a majority of the servers grants it at the first try.
        async fn try_lock(&self) -> Result<QuorumGuard, QuorumError>;

        /// Takes the lock, trying for at most `timeout`.
        async fn lock_timeout(&self, timeout: Duration) -> Result<QuorumGuard, QuorumError>;
    }
}

twin! {
    /// A lock that is held on a majority of servers: [`crate::QuorumGuard`] for programs without
    /// async, with the same promise.
    #[must_use = "dropping the guard gives the lock back at once"]
    QuorumGuard
}

impl QuorumGuard {
    forward! { crate::QuorumGuard:
        /// The lock's name.
        fn name(&self) -> &[u8];

        /// The fencing tokens, one a server.
        fn tokens(&self) -> Vec<(String, u64)>;

        /// How long the lock may still be called held if nothing more is heard from any server.
        fn valid_for(&self) -> Duration;

        /// Whether the lock is lost, or may be. Once true it stays true.
        fn is_lost(&self) -> bool;

        /// Starts the lease anew on every server.
        async fn renew(&self) -> Result<(), QuorumError>;

        /// Gives the lock back on all servers and waits until a majority has confirmed it.
        async fn unlock(self) -> Result<(), QuorumError>;
    }

    /// Waits until the lock is lost, at most this long: why, or `None` if it is still held.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lost_within(&self, timeout: Duration) -> Option<QuorumError> {
        let lost = async { tokio::time::timeout(timeout, self.inner.lost()).await };
        self.runtime.wait_for(lost).ok()
    }
}
