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

use crate::mode::{One, Plain, Read, Several, Write};
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

    /// Connects to a cluster with the default settings: see
    /// [`crate::ClientBuilder::connect_cluster`].
    ///
    /// # Errors
    ///
    /// As there; could not ask also if no thread can be started.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// let nodes = ["redis://a.internal:6379", "redis://b.internal:6379"];
    /// let client = rlock_client::blocking::Client::connect_cluster(nodes)?;
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    pub fn connect_cluster<U: AsRef<str>>(
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Self, Error> {
        Self::connect_cluster_with(crate::Client::builder(), urls)
    }

    /// Connects to a cluster with settings other than the defaults.
    ///
    /// # Errors
    ///
    /// As [`connect_cluster`](Self::connect_cluster).
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect_cluster_with<U: AsRef<str>>(
        settings: ClientBuilder,
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Self, Error> {
        let runtime = Arc::new(Runtime::start()?);
        let client = runtime.wait_for(settings.connect_cluster(urls))?;
        Ok(Self { client, runtime })
    }

    /// Names a lock, without I/O: see [`crate::Client::lock`].
    pub fn lock(&self, name: impl Into<Vec<u8>>) -> Lock {
        Lock {
            lock: self.client.lock(name),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// Names a read-write lock, without I/O: see [`crate::Client::rw_lock`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # let client = rlock_client::blocking::Client::connect("redis://127.0.0.1:6379")?;
    /// let guard = client.rw_lock("prices").write()?;
    /// // … change them …
    /// let guard = guard.downgrade()?; // … and read them, together with others
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    pub fn rw_lock(&self, name: impl Into<Vec<u8>>) -> RwLock {
        RwLock {
            lock: self.client.rw_lock(name),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// Names several locks that are taken at once, without I/O: see [`crate::Client::multi`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # let client = rlock_client::blocking::Client::connect("redis://127.0.0.1:6379")?;
    /// let both = client.multi(["account:1", "account:2"]).lock()?;
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    pub fn multi<N: Into<Vec<u8>>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        MultiLock {
            lock: self.client.multi(names),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// One unit of work that takes several locks, for one owner: see [`crate::Scope`].
    pub fn scope(&self) -> Scope {
        Scope {
            scope: self.client.scope(),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// A new owner, to be passed to single locks: see [`crate::Client::owner`].
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

/// One unit of work that takes several locks, for one owner: [`crate::Scope`] for programs without
/// async. Where threads take several locks, give each thread a scope of its own.
///
/// # Examples
///
/// ```no_run
/// # let client = rlock_client::blocking::Client::connect("redis://127.0.0.1:6379")?;
/// let scope = client.scope();
/// let order = scope.lock("order:7").lock()?;
/// let customer = scope.lock("customer:3").lock()?; // or `is_deadlock`
/// # Ok::<(), rlock_client::Error>(())
/// ```
#[derive(Clone)]
pub struct Scope {
    scope: crate::Scope,
    runtime: Arc<Runtime>,
}

impl Scope {
    /// Names a lock that is taken for this scope, without I/O: see [`crate::Scope::lock`].
    pub fn lock(&self, name: impl Into<Vec<u8>>) -> Lock {
        Lock {
            lock: self.scope.lock(name),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// Names a read-write lock that is taken for this scope, without I/O: see
    /// [`crate::Scope::rw_lock`].
    pub fn rw_lock(&self, name: impl Into<Vec<u8>>) -> RwLock {
        RwLock {
            lock: self.scope.rw_lock(name),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// Names several locks that are taken at once for this scope, without I/O: see
    /// [`crate::Scope::multi`].
    pub fn multi<N: Into<Vec<u8>>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        MultiLock {
            lock: self.scope.multi(names),
            runtime: Arc::clone(&self.runtime),
        }
    }

    /// Who takes the locks: see [`crate::Scope::owner`].
    pub fn owner(&self) -> &Owner {
        self.scope.owner()
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.scope.fmt(f)
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
        self.runtime.take(self.lock.lock())
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
        self.runtime.take(self.lock.try_lock())
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
        self.runtime.take(self.lock.lock_timeout(timeout))
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// A read-write lock by its name: [`crate::RwLock`] for programs without async.
#[derive(Clone)]
pub struct RwLock {
    lock: crate::RwLock,
    runtime: Arc<Runtime>,
}

impl RwLock {
    /// Takes the lock for this long and does not renew it: see [`crate::RwLock::lease`].
    #[must_use = "this gives a lock with the lease, and takes nothing"]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lock = self.lock.lease(lease);
        self
    }

    /// Holds the lock for this long at most: see [`crate::RwLock::max_hold`].
    #[must_use = "this gives a lock with the limit, and takes nothing"]
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.lock = self.lock.max_hold(longest);
        self
    }

    /// Takes the lock for this owner: see [`crate::RwLock::owner`].
    #[must_use = "this gives a lock with the owner, and takes nothing"]
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.lock = self.lock.owner(owner);
        self
    }

    /// Takes the lock together with other readers, waiting in line for as long as it takes.
    ///
    /// # Errors
    ///
    /// As [`crate::RwLock::read`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn read(&self) -> Result<ReadGuard, Error> {
        self.runtime.take(self.lock.read())
    }

    /// Takes the lock together with other readers if nobody writes or waits to; does not wait.
    ///
    /// # Errors
    ///
    /// As [`crate::RwLock::try_read`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn try_read(&self) -> Result<ReadGuard, Error> {
        self.runtime.take(self.lock.try_read())
    }

    /// Takes the lock together with other readers, waiting in line for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As [`crate::RwLock::read_timeout`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn read_timeout(&self, timeout: Duration) -> Result<ReadGuard, Error> {
        self.runtime.take(self.lock.read_timeout(timeout))
    }

    /// Takes the lock alone, waiting in line for as long as it takes.
    ///
    /// # Errors
    ///
    /// As [`crate::RwLock::write`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn write(&self) -> Result<WriteGuard, Error> {
        self.runtime.take(self.lock.write())
    }

    /// Takes the lock alone if it is free, or if the same owner writes; does not wait.
    ///
    /// # Errors
    ///
    /// As [`crate::RwLock::try_write`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn try_write(&self) -> Result<WriteGuard, Error> {
        self.runtime.take(self.lock.try_write())
    }

    /// Takes the lock alone, waiting in line for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As [`crate::RwLock::write_timeout`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn write_timeout(&self, timeout: Duration) -> Result<WriteGuard, Error> {
        self.runtime.take(self.lock.write_timeout(timeout))
    }
}

impl fmt::Debug for RwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// Several locks by their names: [`crate::MultiLock`] for programs without async.
#[derive(Clone)]
pub struct MultiLock {
    lock: crate::MultiLock,
    runtime: Arc<Runtime>,
}

impl MultiLock {
    /// Takes the locks for this long and does not renew them: see [`crate::MultiLock::lease`].
    #[must_use = "this gives locks with the lease, and takes nothing"]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lock = self.lock.lease(lease);
        self
    }

    /// Holds the locks for this long at most: see [`crate::MultiLock::max_hold`].
    #[must_use = "this gives locks with the limit, and takes nothing"]
    pub fn max_hold(mut self, longest: Duration) -> Self {
        self.lock = self.lock.max_hold(longest);
        self
    }

    /// Takes the locks for this owner: see [`crate::MultiLock::owner`].
    #[must_use = "this gives locks with the owner, and takes nothing"]
    pub fn owner(mut self, owner: &Owner) -> Self {
        self.lock = self.lock.owner(owner);
        self
    }

    /// Takes all the locks, waiting in their lines for as long as it takes.
    ///
    /// # Errors
    ///
    /// As [`crate::MultiLock::lock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lock(&self) -> Result<MultiGuard, Error> {
        self.runtime.take(self.lock.lock())
    }

    /// Takes all the locks if each is free, or held by the same owner; does not wait.
    ///
    /// # Errors
    ///
    /// As [`crate::MultiLock::try_lock`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn try_lock(&self) -> Result<MultiGuard, Error> {
        self.runtime.take(self.lock.try_lock())
    }

    /// Takes all the locks, waiting in their lines for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As [`crate::MultiLock::lock_timeout`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lock_timeout(&self, timeout: Duration) -> Result<MultiGuard, Error> {
        self.runtime.take(self.lock.lock_timeout(timeout))
    }
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock.fmt(f)
    }
}

/// A lock that is held: [`crate::Guard`] for programs without async, with the same promise.
#[must_use = "dropping the guard gives the lock back at once"]
pub struct Guard<M = Plain> {
    guard: crate::Guard<M>,
    runtime: Arc<Runtime>,
}

/// A read-write lock that is held together with other readers.
pub type ReadGuard = Guard<Read>;

/// A read-write lock that is held alone.
pub type WriteGuard = Guard<Write>;

/// Several locks that are held at once.
pub type MultiGuard = Guard<Several>;

impl<M: One> Guard<M> {
    /// The lock's name.
    pub fn name(&self) -> &[u8] {
        self.guard.name()
    }
}

impl Guard<Several> {
    /// The names of the locks, as they were given, each once.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.guard.names()
    }

    /// The fencing token of one of them: see [`crate::Guard::token_of`].
    pub fn token_of(&self, name: impl AsRef<[u8]>) -> Option<u64> {
        self.guard.token_of(name)
    }
}

impl Guard<Write> {
    /// Reads on instead of writing: see [`crate::WriteGuard::downgrade`].
    ///
    /// # Errors
    ///
    /// As [`crate::WriteGuard::downgrade`]: with each of them the lock is given back altogether.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn downgrade(self) -> Result<Guard<Read>, Error> {
        self.runtime.take(self.guard.downgrade())
    }
}

impl<M> Guard<M> {
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

impl<M> fmt::Debug for Guard<M> {
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

    /// Waits for a guard, which keeps the thread running.
    fn take<M>(
        self: &Arc<Self>,
        taking: impl Future<Output = Result<crate::Guard<M>, Error>>,
    ) -> Result<Guard<M>, Error> {
        let guard = self.wait_for(taking)?;
        Ok(Guard {
            guard,
            runtime: Arc::clone(self),
        })
    }

    fn wait_for<T>(&self, work: impl Future<Output = T>) -> T {
        self.handle.block_on(work)
    }
}
