//! The client: one server, shared by everything that locks there.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use uuid::Uuid;

use crate::background::Background;
use crate::connection::{Connector, ServerId};
use crate::error::Error;
use crate::lock::Lock;
use crate::multi::MultiLock;
use crate::node::Identity;
use crate::nodes::Nodes;
use crate::options::ClientBuilder;
use crate::owner::Owner;
use crate::rw_lock::RwLock;
use crate::taker::Taker;
use crate::watchdog::{self, Watchdog};

/// A connection to one server on which locks are taken. Cheap to clone; clones are the same
/// client.
///
/// However many locks it holds and waits for, it has two connections: one for commands, in order,
/// and one on which the server tells of grants and losses and learns that this client lives. A task
/// each owns them and connects again when one breaks; a third, the watchdog, renews the leases.
/// All end when the last clone and the last [`Guard`](crate::Guard) have gone. Where
/// [replicas](ClientBuilder::acknowledged_by) have to acknowledge locks, one more connection waits
/// for them.
#[derive(Clone)]
pub struct Client {
    core: Arc<Core>,
}

impl Client {
    /// Connects to the server at `url` with the default settings: see [`ClientBuilder`].
    ///
    /// # Errors
    ///
    /// - Could not ask: the URL cannot be read, or nobody answers there.
    /// - Module not loaded, refused: the server's answer.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::Error> {
    /// let client = rlock_client::Client::connect("redis://127.0.0.1:6379").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::builder().connect(url).await
    }

    /// Connects to a cluster with the default settings: see
    /// [`ClientBuilder::connect_cluster`].
    ///
    /// # Errors
    ///
    /// As [`ClientBuilder::connect_cluster`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), rlock_client::Error> {
    /// let nodes = ["redis://a.internal:6379", "redis://b.internal:6379"];
    /// let client = rlock_client::Client::connect_cluster(nodes).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect_cluster<U: AsRef<str>>(
        urls: impl IntoIterator<Item = U>,
    ) -> Result<Self, Error> {
        Self::builder().connect_cluster(urls).await
    }

    /// Settings other than the defaults.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::new()
    }

    /// Names a lock. No I/O, and nothing to give back: the lock is taken by
    /// [`Lock::lock`] and its siblings.
    ///
    /// The name is the key under which the server keeps the lock: any bytes.
    pub fn lock(&self, name: impl Into<Vec<u8>>) -> Lock {
        Lock::new(self.taker(), name.into().into())
    }

    /// Names a read-write lock: see [`RwLock`]. No I/O.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let prices = client.rw_lock("prices");
    /// let (one, other) = (prices.read().await?, prices.read().await?); // together
    /// drop((one, other));
    /// let alone = prices.write().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn rw_lock(&self, name: impl Into<Vec<u8>>) -> RwLock {
        RwLock::new(self.taker(), name.into().into())
    }

    /// Names several locks that are taken at once: see [`MultiLock`]. No I/O. A name that is given
    /// twice counts once.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// // From one account to another: all or none, in whatever order they are named.
    /// let both = client.multi(["account:1", "account:2"]).lock().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn multi<N: Into<Vec<u8>>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        MultiLock::new(self.taker(), names.into_iter().map(Into::into))
    }

    fn taker(&self) -> Taker {
        Taker::new(Arc::clone(&self.core))
    }

    /// A new owner, for re-entrance: see [`Owner`].
    pub fn owner(&self) -> Owner {
        self.core.owner()
    }

    /// Ends what is pending and waits until the server knows: calls of `lock()` that still wait
    /// leave the queue with an error, and the holds of dropped guards are given back.
    ///
    /// Guards that are still alive stay valid and are renewed until they are dropped; nothing can
    /// be locked any more, which later calls are told as "could not ask". A release that the server
    /// does not answer is tried again for as long as the lease, so this takes no longer either; put
    /// a timeout around it if that is too long.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future only gives up the waiting.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
    /// let guard = client.lock("orders").lock().await?;
    /// drop(guard); // is given back in the background …
    /// client.shutdown().await; // … and now the server has it
    /// # Ok(())
    /// # }
    /// ```
    pub async fn shutdown(&self) {
        self.core.background.close();
        self.core.background.idle().await;
    }

    /// Why the server cannot be asked just now, if its connection is known to be broken.
    pub(crate) fn trouble(&self) -> Option<Error> {
        self.core.nodes.trouble()
    }

    /// Which server the session is attached to, if it is; of a cluster, none.
    pub(crate) fn server(&self) -> Option<ServerId> {
        self.core.nodes.server()
    }

    pub(crate) async fn open(url: &str, options: &ClientBuilder) -> Result<Self, Error> {
        options.check().map_err(Error::bad_setting)?;
        let connector = Connector::new(options.place(url)?, options.reply_within());
        Self::start(options, |runtime, identity| {
            Nodes::one(runtime, connector, identity)
        })
        .await
    }

    pub(crate) async fn open_cluster<U: AsRef<str>>(
        urls: impl IntoIterator<Item = U>,
        options: &ClientBuilder,
    ) -> Result<Self, Error> {
        options.check_for_cluster().map_err(Error::bad_setting)?;
        let places = urls.into_iter().map(|url| options.node_at(url.as_ref()));
        let connector = |place| Connector::new(place, options.reply_within());
        let mut seeds = places
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .map(connector);
        let first = seeds.next().ok_or_else(Error::no_cluster)?;
        Self::start(options, |runtime, identity| {
            Nodes::cluster(runtime, first, seeds.collect(), identity)
        })
        .await
    }

    async fn start(
        options: &ClientBuilder,
        nodes: impl FnOnce(&Handle, Identity) -> Arc<Nodes>,
    ) -> Result<Self, Error> {
        let runtime = Handle::current();
        let id = Uuid::new_v4().to_string();
        let identity = Identity {
            session: options.session_of(&id).into(),
            grace: options.grace_to_ask(),
            copies: options.copies(),
        };
        let nodes = nodes(&runtime, identity);
        nodes.tried().await?;
        let watchdog = Arc::new(Watchdog::new(options.interval()));
        let watching = watchdog::run(Arc::clone(&watchdog), Arc::clone(&nodes));
        let core = Core {
            id,
            numbers: AtomicU64::new(1),
            lease: options.default_lease(),
            max_hold: options.longest_hold(),
            background: nodes.background.clone(),
            nodes,
            watchdog,
            watching: runtime.spawn(watching).abort_handle(),
        };
        Ok(Self {
            core: Arc::new(core),
        })
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("id", &self.core.id)
            .finish_non_exhaustive()
    }
}

/// What the clones of a client and its guards share.
pub(crate) struct Core {
    pub(crate) id: String,
    numbers: AtomicU64,
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) watchdog: Arc<Watchdog>,
    watching: AbortHandle,
    pub(crate) background: Background,
}

impl Core {
    pub(crate) fn owner(&self) -> Owner {
        Owner::new(&self.id, self.numbers.fetch_add(1, Ordering::Relaxed))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // The nodes go with it, and with the watchdog.
        self.watching.abort();
    }
}
