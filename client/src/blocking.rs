//! The same locks for programs without async.
//!
//! A client here runs a tokio runtime on a thread of its own, which renews leases and listens to
//! the server; the calls wait for it.
//!
//! A child that is made by `fork()` has no such thread: no call on its parent's client ever ends
//! there, and its parent's guards hear nothing more. It makes a client of its own.
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
//! let guard = client.lock("orders").lock()?; // waits in a queue, in the server
//! // … nobody else is here …
//! guard.unlock()?;
//! # Ok::<(), rlock_client::Error>(())
//! ```

use std::thread;
use std::time::Duration;

use redis::{Cmd, FromRedisValue};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::api::setters;
use crate::mode::{Multi, Permits, Plain, Read, Single, Write};
use crate::time::MILLI;
use crate::{Error, LostReason, Owner, QuorumError};

mod builder;
pub use builder::{ClientBuilder, QuorumBuilder};

mod twin;
use twin::{HasTwin, forward, twin};

twin! {
    /// A connection to one server on which locks are taken: [`crate::Client`] for programs without
    /// async. Cheap to clone; clones are the same client.
    ///
    /// Its thread ends when the last clone and the last [`Guard`] have been dropped and the server
    /// has confirmed their releases, at most five seconds later. If the program ends before, the
    /// server releases them after the [grace](crate::ClientBuilder::grace); call
    /// [`shutdown`](Self::shutdown) to wait for the confirmations instead.
    #[derive(Clone)]
    Client {
        /// Names a lock, without I/O.
        fn lock(&self, name: impl AsRef<[u8]>) -> Lock as twin;

        /// Names a read-write lock, without I/O.
        fn rw_lock(&self, name: impl AsRef<[u8]>) -> RwLock as twin;

        /// Names a counting semaphore, without I/O.
        fn semaphore(&self, name: impl AsRef<[u8]>, limit: impl Into<Option<u32>>)
            -> Semaphore as twin;

        /// Sets how many permits of a semaphore may be out, for all who ask for them.
        async fn set_limit(&self, name: impl AsRef<[u8]>, limit: impl Into<Option<u32>>)
            -> Result<Option<u32>, Error>;

        /// Names several locks that are taken at once, without I/O.
        fn multi(&self, names: impl IntoIterator<Item = impl AsRef<[u8]>>) -> MultiLock as twin;

        /// One unit of work that takes several locks, for one owner.
        fn scope(&self) -> Scope as twin;

        /// A new owner, to be passed to single locks.
        fn owner(&self) -> Owner;
    }
}

impl Client {
    /// Connects to the server at `url` with the default settings.
    ///
    /// # Errors
    ///
    /// As [`crate::Client::connect`]; unavailable also if no thread can be started.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn connect(url: &str) -> Result<Self, Error> {
        Self::builder().connect(url)
    }

    /// Connects to a cluster with the default settings: see
    /// [`crate::ClientBuilder::connect_cluster`].
    ///
    /// # Errors
    ///
    /// As there; unavailable also if no thread can be started.
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
        Self::builder().connect_cluster(urls)
    }

    /// Begins with the default settings.
    pub fn builder() -> ClientBuilder {
        crate::Client::builder().into()
    }

    /// Waits until the holds of dropped guards have been released: see [`crate::Client::shutdown`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn shutdown(&self) {
        self.runtime.handle.block_on(self.inner.shutdown());
    }
}

twin! {
    /// One unit of work that takes several locks, for one owner: [`crate::Scope`] for programs
    /// without async. Where threads take several locks, give each thread a scope of its own.
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
    Scope {
        /// Names a lock that is taken for this scope, without I/O.
        fn lock(&self, name: impl AsRef<[u8]>) -> Lock as twin;

        /// Names a read-write lock that is taken for this scope, without I/O.
        fn rw_lock(&self, name: impl AsRef<[u8]>) -> RwLock as twin;

        /// Names several locks that are taken at once, for this scope, without I/O.
        fn multi(&self, names: impl IntoIterator<Item = impl AsRef<[u8]>>) -> MultiLock as twin;

        /// The owner of every lock and guard of this scope.
        fn owner(&self) -> &Owner;
    }
}

twin! {
    /// A lock by its name: [`crate::Lock`] for programs without async.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # let client = rlock_client::blocking::Client::connect("redis://127.0.0.1:6379")?;
    /// match client.lock("nightly").lock_timeout(Duration::from_secs(5)) {
    ///     Ok(guard) => guard.unlock()?,
    ///     Err(error) if error.is_not_acquired() => println!("somebody else is at it"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    #[derive(Clone)]
    Lock {
        setters! { self, self.inner.options; lease; max_hold; owner; }

        /// Takes the lock, waiting in the queue for as long as it takes.
        async fn lock(&self) -> Result<Guard, Error> as twin;

        /// Takes the lock if it is free, or held by the same owner; does not wait.
        async fn try_lock(&self) -> Result<Guard, Error> as twin;

        /// Takes the lock, waiting in the queue for at most `timeout`.
        async fn lock_timeout(&self, timeout: Duration) -> Result<Guard, Error> as twin;
    }
}

impl Lock {
    /// Keeps the lock here after its use: see [`crate::Lock::keep`].
    #[must_use = "this gives a lock that is kept, and takes nothing"]
    pub fn keep(mut self, idle: Duration) -> Self {
        self.inner = self.inner.keep(idle);
        self
    }
}

twin! {
    /// A read-write lock by its name: [`crate::RwLock`] for programs without async.
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
    #[derive(Clone)]
    RwLock {
        setters! { self, self.inner.options; lease; max_hold; owner; }

        /// Takes the lock together with other readers, waiting in the queue for as long as it
        /// takes.
        async fn read(&self) -> Result<ReadGuard, Error> as twin;

        /// Takes the lock together with other readers if nobody writes or waits to; does not wait.
        async fn try_read(&self) -> Result<ReadGuard, Error> as twin;

        /// Takes the lock together with other readers, waiting in the queue for at most `timeout`.
        async fn read_timeout(&self, timeout: Duration) -> Result<ReadGuard, Error> as twin;

        /// Takes the lock alone, waiting in the queue for as long as it takes.
        async fn write(&self) -> Result<WriteGuard, Error> as twin;

        /// Takes the lock alone if it is free, or if the same owner writes; does not wait.
        async fn try_write(&self) -> Result<WriteGuard, Error> as twin;

        /// Takes the lock alone, waiting in the queue for at most `timeout`.
        async fn write_timeout(&self, timeout: Duration) -> Result<WriteGuard, Error> as twin;
    }
}

twin! {
    /// A counting semaphore by its name: [`crate::Semaphore`] for programs without async.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # let client = rlock_client::blocking::Client::connect("redis://127.0.0.1:6379")?;
    /// let permit = client.semaphore("exports", 5).acquire()?;
    /// // … export, five at a time in all processes together …
    /// permit.unlock()?;
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    #[derive(Clone)]
    Semaphore {
        setters! { self, self.inner.options; lease; max_hold; }

        /// Takes a permit, waiting in the queue for as long as it takes.
        async fn acquire(&self) -> Result<PermitsGuard, Error> as twin;

        /// Takes this many permits at once, waiting in the queue for as long as it takes.
        async fn acquire_many(&self, permits: u32) -> Result<PermitsGuard, Error> as twin;

        /// Takes a permit if one is free and nobody waits before; does not wait.
        async fn try_acquire(&self) -> Result<PermitsGuard, Error> as twin;

        /// Takes this many permits if they are free and nobody waits before; does not wait.
        async fn try_acquire_many(&self, permits: u32) -> Result<PermitsGuard, Error> as twin;

        /// Takes a permit, waiting in the queue for at most `timeout`.
        async fn acquire_timeout(&self, timeout: Duration) -> Result<PermitsGuard, Error> as twin;

        /// Takes this many permits at once, waiting in the queue for at most `timeout`.
        async fn acquire_many_timeout(&self, permits: u32, timeout: Duration)
            -> Result<PermitsGuard, Error> as twin;
    }
}

twin! {
    /// Several locks by their names: [`crate::MultiLock`] for programs without async.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # let client = rlock_client::blocking::Client::connect("redis://127.0.0.1:6379")?;
    /// let both = client.multi(["account:1", "account:2"]).lock()?;
    /// # Ok::<(), rlock_client::Error>(())
    /// ```
    #[derive(Clone)]
    MultiLock {
        setters! { self, self.inner.options; lease; max_hold; owner; }

        /// Takes all the locks, waiting in their queues for as long as it takes.
        async fn lock(&self) -> Result<MultiGuard, Error> as twin;

        /// Takes all the locks if each is free, or held by the same owner; does not wait.
        async fn try_lock(&self) -> Result<MultiGuard, Error> as twin;

        /// Takes all the locks, waiting in their queues for at most `timeout`.
        async fn lock_timeout(&self, timeout: Duration) -> Result<MultiGuard, Error> as twin;
    }
}

twin! {
    /// A lock that is held: [`crate::Guard`] for programs without async, with the same promise.
    #[must_use = "dropped, as by `let _ =`, it gives the lock back at once: give it a name"]
    Guard<M = Plain> {
        /// The owner that holds the lock.
        fn owner(&self) -> &Owner;

        /// The fencing token: a later grant of the same lock has a larger one.
        fn token(&self) -> u64;

        /// How long the lock may still be called held if nothing more is heard from the server.
        fn valid_for(&self) -> Duration;

        /// Whether the lock is lost, or may be. Once true it stays true.
        fn is_lost(&self) -> bool;

        /// Starts the lease anew.
        async fn renew(&self) -> Result<(), Error>;

        /// Waits until a caller waits for the lock because of this hold.
        async fn wanted(&self) -> Result<(), Error>;

        /// Gives the lock back and waits for the server's word.
        async fn unlock(self) -> Result<(), Error>;
    }
}

/// A read-write lock that is held together with other readers.
pub type ReadGuard = Guard<Read>;

/// A read-write lock that is held alone.
pub type WriteGuard = Guard<Write>;

/// Several locks that are held at once.
pub type MultiGuard = Guard<Multi>;

/// Permits of a semaphore that are held.
pub type PermitsGuard = Guard<Permits>;

impl Guard<Permits> {
    forward! { crate::PermitsGuard:
        /// How many permits these are.
        fn permits(&self) -> u32;
    }
}

// As at `crate::Guard`.
impl<M> Guard<M> {
    /// The lock's name.
    pub fn name(&self) -> &[u8]
    where
        M: Single,
    {
        self.inner.name()
    }

    /// Has the server run a Redis command, if this hold is still held there.
    ///
    /// # Errors
    ///
    /// As [`crate::Guard::call`], which says more.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn call<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, Error>
    where
        M: Single,
    {
        self.runtime.handle.block_on(self.inner.call(command))
    }
}

impl Guard<Multi> {
    forward! { crate::MultiGuard:
        /// The names of the locks, as they were given, each once.
        fn names(&self) -> impl ExactSizeIterator<Item = &[u8]>;

        /// The fencing token of one of them.
        fn token_of(&self, name: impl AsRef<[u8]>) -> Option<u64>;
    }
}

impl Guard<Write> {
    forward! { crate::WriteGuard:
        /// Reads on instead of writing. With each of the errors the lock is given back altogether.
        async fn downgrade(self) -> Result<Guard<Read>, Error> as twin;
    }
}

impl<M> Guard<M> {
    /// Waits for at most this long until a caller waits for the lock because of this hold. Returns
    /// whether one does. With a timeout of zero it only looks, and never waits for the server. See
    /// [`crate::Guard::wanted`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn wanted_within(&self, timeout: Duration) -> Result<bool, Error> {
        let wanted = self.runtime.within(timeout, self.inner.wanted());
        Ok(wanted.transpose()?.is_some())
    }

    /// Waits until the lock is lost, at most this long: why, or `None` if it is still held.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lost_within(&self, timeout: Duration) -> Option<LostReason> {
        self.runtime.within(timeout, self.inner.lost())
    }
}

twin! {
    /// A connection to several independent servers, on which a lock is held by a majority:
    /// [`crate::QuorumClient`] for programs without async. Cheap to clone; clones are the same
    /// client.
    ///
    /// Its thread ends as that of a [`Client`](Client) does.
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
    QuorumClient {
        /// Names a lock, without I/O.
        fn lock(&self, name: impl AsRef<[u8]>) -> QuorumLock as twin;
    }
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
        Self::builder().connect(urls)
    }

    /// Begins with the default settings.
    pub fn builder() -> QuorumBuilder {
        crate::QuorumClient::builder().into()
    }

    /// Waits until the holds of dropped guards have been released: see
    /// [`crate::QuorumClient::shutdown`].
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn shutdown(&self) {
        self.runtime.handle.block_on(self.inner.shutdown());
    }
}

twin! {
    /// A lock of a quorum by its name: [`crate::QuorumLock`] for programs without async.
    #[derive(Clone)]
    QuorumLock {
        setters! { self, self.inner; lease; max_hold; }

        /// Takes the lock, trying for as long as somebody else has it.
        async fn lock(&self) -> Result<QuorumGuard, QuorumError> as twin;

        /// Takes the lock if a majority of the servers grants it at the first try.
        async fn try_lock(&self) -> Result<QuorumGuard, QuorumError> as twin;

        /// Takes the lock, trying for at most `timeout`.
        async fn lock_timeout(&self, timeout: Duration) -> Result<QuorumGuard, QuorumError> as twin;
    }
}

twin! {
    /// A lock that is held on a majority of servers: [`crate::QuorumGuard`] for programs without
    /// async, with the same promise.
    #[must_use = "dropped, as by `let _ =`, it gives the lock back at once: give it a name"]
    QuorumGuard {
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

        /// Waits until another client tries to get the lock.
        async fn wanted(&self) -> Result<(), QuorumError>;

        /// Gives the lock back on all servers and waits until a majority has confirmed it.
        async fn unlock(self) -> Result<(), QuorumError>;
    }
}

impl QuorumGuard {
    /// Waits for at most this long until another client tries to get the lock. Returns whether one
    /// does. With a timeout of zero it only looks, and never waits for a server. See
    /// [`crate::QuorumGuard::wanted`].
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn wanted_within(&self, timeout: Duration) -> Result<bool, QuorumError> {
        let wanted = self.runtime.within(timeout, self.inner.wanted());
        Ok(wanted.transpose()?.is_some())
    }

    /// Waits until the lock is lost, at most this long: why, or `None` if it is still held.
    ///
    /// # Panics
    ///
    /// Inside an async task.
    pub fn lost_within(&self, timeout: Duration) -> Option<QuorumError> {
        self.runtime.within(timeout, self.inner.lost())
    }
}

/// A thread goes on for at most this long after all handles of its client have been dropped.
const LINGERS: Duration = Duration::from_secs(5);

/// The thread on which everything runs. It ends after this value is dropped and the last releases
/// are done: the server must hear of a guard that is dropped after its client.
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
        // The sender says nothing; it goes.
        let run = move || {
            runtime.block_on(async {
                let _ = over.await;
                let tasks = runtime.metrics();
                let began = Instant::now();
                while tasks.num_alive_tasks() > 0 && began.elapsed() < LINGERS {
                    sleep(MILLI).await;
                }
            });
        };
        let thread = thread::Builder::new().name("rlock-client".to_owned());
        thread.spawn(run).map_err(no_thread)?;
        Ok(Self {
            handle,
            _running: running,
        })
    }

    /// The result of the work, if it is done within the time.
    fn within<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        let within = async { timeout(limit, work).await };
        self.handle.block_on(within).ok()
    }
}
