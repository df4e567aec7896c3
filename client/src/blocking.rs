//! The same locks for programs without async.
//!
//! A client here runs a tokio runtime on a thread of its own, which renews leases and listens to
//! the server; the calls wait for it.
//!
//! None of these may be called from inside an async task: there use the types of the same names at
//! the top of this crate.
//!
//! # Examples
//!
//! ```no_run
//! use rlock_client::blocking::Client;
//!
//! let client = Client::connect("redis://127.0.0.1:6379")?;
//! let guard = client.lock("orders").lock()?; // waits in line, in the server
//! // … nobody else is here …
//! guard.unlock()?;
//! # Ok::<(), rlock_client::Error>(())
//! ```

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::{ClientBuilder, Error, LostReason, Owner};

mod quorum;
pub use quorum::{QuorumClient, QuorumGuard, QuorumLock};

/// A connection to one server on which locks are taken: [`crate::Client`] for programs without
/// async. Cheap to clone; clones are the same client.
///
/// Its thread ends when the last clone and the last [`Guard`] have gone. What is then still being
/// given back is left to the server, which releases it after the
/// [grace](crate::ClientBuilder::grace); call [`shutdown`](Self::shutdown) to wait for it instead.
#[derive(Clone)]
pub struct Client {
    // Before the thread, so that its tasks have ended when the runtime does.
    client: crate::Client,
    runtime: Arc<Runtime>,
}

impl Client {
    /// Connects to the server at `url` with the default settings.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::connect`]; could not ask also if no thread can be started.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(crate::Client::builder(), url)
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
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// let settings = rlock_client::Client::builder().lease(Duration::from_secs(10));
    /// let client =
    ///     rlock_client::blocking::Client::connect_with(settings, "redis://127.0.0.1:6379")?;
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    pub fn connect_with(settings: ClientBuilder, url: &str) -> Result<Self, Error> {
        let runtime = Arc::new(Runtime::start()?);
        let client = runtime.wait_for(settings.connect(url))?;
        Ok(Self { client, runtime })
    }

    /// Names a lock, without I/O: see [`crate::Client::lock`].
    pub fn lock(&self, name: impl Into<Vec<u8>>) -> Lock {
        Lock {
            lock: self.client.lock(name),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// A new owner, for re-entrance: see [`Owner`].
    pub fn owner(&self) -> Owner {
        self.client.owner()
    }

    /// Waits until what was dropped has been given back: see [`crate::Client::shutdown`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn shutdown(&self) {
        self.runtime.wait_for(self.client.shutdown());
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.client.fmt(f)
    }
}

/// A lock by its name: [`crate::Lock`] for programs without async.
#[derive(Clone)]
pub struct Lock {
    lock: crate::Lock,
    runtime: Arc<Runtime>,
}

impl Lock {
    /// Takes the lock for this long and does not renew it: see [`crate::Lock::lease`].
    #[must_use = "this gives a lock with the lease, and takes nothing"]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lock = self.lock.lease(lease);
        self
    }

    /// Holds the lock for this long at most: see [`crate::Lock::max_hold`].
    #[must_use = "this gives a lock with the limit, and takes nothing"]
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.lock = self.lock.max_hold(longest);
        self
    }

    /// Takes the lock for this owner: see [`crate::Lock::owner`].
    #[must_use = "this gives a lock with the owner, and takes nothing"]
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.lock = self.lock.owner(owner);
        self
    }

    /// Takes the lock, waiting for it in line for as long as it takes.
    ///
    /// # Errors
    ///
    /// As [`crate::Lock::lock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lock(&self) -> Result<Guard, Error> {
        self.taken(self.lock.lock())
    }

    /// Takes the lock if it is free, or held by the same owner; does not wait.
    ///
    /// # Errors
    ///
    /// As [`crate::Lock::try_lock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn try_lock(&self) -> Result<Guard, Error> {
        self.taken(self.lock.try_lock())
    }

    /// Takes the lock, waiting for it in line for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As [`crate::Lock::lock_timeout`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lock_timeout(&self, timeout: Duration) -> Result<Guard, Error> {
        self.taken(self.lock.lock_timeout(timeout))
    }

    fn taken(
        &self,
        taking: impl Future<Output = Result<crate::Guard, Error>>,
    ) -> Result<Guard, Error> {
        let guard = self.runtime.wait_for(taking)?;
        Ok(Guard {
            guard,
            runtime: Arc::clone(&self.runtime),
        })
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// A lock that is held: [`crate::Guard`] for programs without async, with the same promise.
#[must_use = "dropping the guard gives the lock back at once"]
pub struct Guard {
    guard: crate::Guard,
    runtime: Arc<Runtime>,
}

impl Guard {
    /// The lock's name.
    pub fn name(&self) -> &[u8] {
        self.guard.name()
    }

    /// Who holds the lock.
    pub fn owner(&self) -> &Owner {
        self.guard.owner()
    }

    /// The fencing token: see [`crate::Guard::token`].
    pub fn token(&self) -> u64 {
        self.guard.token()
    }

    /// How long the lock may still be called held if nothing more is heard from the server.
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
    pub fn lost_within(&self, timeout: Duration) -> Option<LostReason> {
        let lost = async { tokio::time::timeout(timeout, self.guard.lost()).await };
        self.runtime.wait_for(lost).ok()
    }

    /// Starts the lease anew: see [`crate::Guard::renew`].
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::renew`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn renew(&self) -> Result<(), Error> {
        self.runtime.wait_for(self.guard.renew())
    }

    /// Gives the lock back and waits for the server's word.
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::unlock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn unlock(self) -> Result<(), Error> {
        self.runtime.wait_for(self.guard.unlock())
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guard.fmt(f)
    }
}

/// The thread on which everything runs. It ends with this value.
struct Runtime {
    handle: Handle,
    /// The thread waits for the other end of this.
    _running: oneshot::Sender<()>,
}

impl Runtime {
    fn start() -> Result<Self, Error> {
        let no_thread = |error: std::io::Error| Error::could_not_connect(error.into());
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(no_thread)?;
        let handle = runtime.handle().clone();
        let (running, over) = oneshot::channel::<()>();
        let run = move || {
            // The sender says nothing; it goes.
            let _ = runtime.block_on(over);
        };
        let thread = thread::Builder::new().name("rlock-client".to_owned());
        thread.spawn(run).map_err(no_thread)?;
        Ok(Self {
            handle,
            _running: running,
        })
    }

    fn wait_for<T>(&self, work: impl Future<Output = T>) -> T {
        self.handle.block_on(work)
    }
}
